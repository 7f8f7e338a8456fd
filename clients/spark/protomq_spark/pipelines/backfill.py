"""Send a table of files (Parquet, CSV, JSON) to a topic, once, however often it is started.

Rows are spread over a fixed number of partitions by what is in them and sorted there, so that a second run with the same
--write-id, on whatever cluster, sends the same rows under the same numbers: what is stored already is recognised (for 24 hours
after the broker last heard of this write), and the rest is added. Other files under the same id are an error, not a mixture.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .report import RunReport, say

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pipeline's own arguments."""
    parser.add_argument("--topic", required=True)
    parser.add_argument("--input", required=True, help="files or folders, as Spark reads them")
    parser.add_argument("--format", default="parquet", choices=("parquet", "csv", "json", "orc"))
    parser.add_argument("--body", default="to_json(struct(*))", help="SQL expression of the body")
    parser.add_argument("--key", default="", help="SQL expression of the key")
    parser.add_argument("--tags", default="", help="SQL expression of the tag")
    parser.add_argument("--sharding-key", default="", help="SQL expression: same key, same queue")
    parser.add_argument(
        "--write-id", required=True, help="name of this back-fill, for running it again"
    )
    parser.add_argument(
        "--partitions", type=int, default=8, help="the same in every run of a --write-id"
    )


def run(spark: SparkSession, arguments: argparse.Namespace, report: RunReport) -> None:
    """Until all rows are sent."""
    reader = spark.read.format(arguments.format)
    if arguments.format == "csv":
        reader = reader.option("header", "true")
    rows = messages_of(reader.load(arguments.input), arguments)
    writer = rows.write.format("protomq").option("protomq.namesrv", arguments.namesrv)
    writer = writer.option("topic", arguments.topic)
    # The number of partitions is part of the name: another number would spread the rows otherwise.
    writer = writer.option("writeId", f"{arguments.write_id}/{arguments.partitions}")
    count = rows.count()
    writer.mode("append").save()
    report.result = {"rows": count, "write_id": arguments.write_id}
    say(f"{count:,} rows are in {arguments.topic}, each once")


def messages_of(table: DataFrame, arguments: argparse.Namespace) -> DataFrame:
    """The rows as messages, in partitions and an order that follow from their content alone."""
    from pyspark.sql import functions as f

    expressions = {
        "body": arguments.body,
        "key": arguments.key,
        "tags": arguments.tags,
        "sharding_key": arguments.sharding_key,
    }
    given = {name: text for name, text in expressions.items() if text}
    messages = table.select(
        *[f.expr(text).cast("string").alias(name) for name, text in given.items()]
    )
    hashed = f.xxhash64(*given)
    return messages.repartition(arguments.partitions, hashed).sortWithinPartitions(*given)
