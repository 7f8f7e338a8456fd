"""Send a table of files (Parquet, CSV, JSON, ORC) to a topic, once, however often it is started.

Rows are spread over a fixed number of partitions by what is in them, and sorted there. So a second run with the same
--write-id, on any cluster, sends the same rows under the same numbers. The broker recognises what is stored already, for 24
hours after it last heard of this write, and adds the rest. Other files under the same id are an error, not a mixture.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .report import Chart, RunReport, say, show_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pipeline's own arguments."""
    parser.add_argument("--topic", required=True)
    parser.add_argument("--input", required=True, help="files or folders, as Spark reads them")
    parser.add_argument("--format", default="parquet", choices=("parquet", "csv", "json", "orc"))
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help="option of Spark's reader; for csv, header=true is set unless given",
    )  # fmt: skip
    parser.add_argument("--where", default="", help="SQL condition: only these rows")
    parser.add_argument("--body", default="to_json(struct(*))", help="SQL expression of the body")
    parser.add_argument("--key", default="", help="SQL expression of the key")
    parser.add_argument("--tags", default="", help="SQL expression of the tag")
    parser.add_argument("--properties", default="", help="SQL expression: map<string, string>")
    parser.add_argument("--sharding-key", default="", help="SQL expression: same key, same queue")
    parser.add_argument(
        "--write-id", required=True, help="name of this back-fill, for running it again"
    )
    parser.add_argument(
        "--partitions", type=int, default=8, help="the same in every run of a --write-id"
    )


def run(spark: SparkSession, arguments: argparse.Namespace, report: RunReport) -> None:
    """Until all rows are sent."""
    from pyspark.sql.functions import spark_partition_id

    reader = spark.read.format(arguments.format)
    if arguments.format == "csv":
        reader = reader.option("header", "true")
    for text in arguments.option:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option must be NAME=VALUE, not {text!r}")
        reader = reader.option(name, value)
    rows = messages_of(reader.load(arguments.input), arguments)
    with show_tasks(spark):
        # Counted first: Spark tells no one how many rows a Python sink was given.
        counts = rows.groupBy(spark_partition_id().alias("number")).count().collect()
    by_partition = {row["number"]: row["count"] for row in counts}
    count = sum(by_partition.values())
    report.charts = [
        Chart(
            "rows of each partition", "rows", list(range(arguments.partitions)),
            {"rows": [by_partition.get(n, 0) for n in range(arguments.partitions)]}, "bar", "partition",
        )
    ]  # fmt: skip
    say(f"{count:,} rows in {arguments.input}")
    writer = rows.write.format("protomq").option("protomq.namesrv", arguments.namesrv)
    writer = writer.option("topic", arguments.topic)
    # The number of partitions is part of the name: another number would spread the rows otherwise.
    writer = writer.option("writeId", f"{arguments.write_id}/{arguments.partitions}")
    with show_tasks(spark):
        writer.mode("append").save()
    report.batch(0, rows=count)
    report.result = {"rows": count, "write_id": arguments.write_id}
    say(f"{count:,} rows are in {arguments.topic}, each once")


def messages_of(table: DataFrame, arguments: argparse.Namespace) -> DataFrame:
    """The rows as messages, in partitions and an order that follow from their content alone."""
    from pyspark.sql import functions as f

    expressions = {
        "key": arguments.key,
        "tags": arguments.tags,
        "sharding_key": arguments.sharding_key,
    }
    if arguments.where:
        table = table.where(arguments.where)
    # A body may be bytes; all else is text.
    body = f.expr(arguments.body)
    columns = [body.alias("body")]
    columns += [f.expr(sql).cast("string").alias(name) for name, sql in expressions.items() if sql]
    if arguments.properties:
        columns.append(f.expr(arguments.properties).alias("properties"))
    messages = table.select(*columns)
    if dict(messages.dtypes)["body"] != "binary":
        messages = messages.withColumn("body", f.col("body").cast("string"))
    # A map has no order in Spark; its sorted entries have.
    order = [name for name in messages.columns if name != "properties"]
    keys = [f.col(name) for name in order]
    if arguments.properties:
        keys.append(f.to_json(f.array_sort(f.map_entries("properties"))))
    hashed = f.xxhash64(*keys)
    return messages.repartition(arguments.partitions, hashed).sortWithinPartitions(*keys)
