"""Compare two topics, of one cluster or two: counts and checksums per queue and range of offsets.

--by queue (for copies that keep queues and offsets) compares ranges of --range messages in each queue; --by content (for copies
that went through a stream) compares buckets of messages by the hash of body, key, tag and properties, whatever their place and
order. The report names every range or bucket that differs; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .report import RunReport, say

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHOWN_MAX = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pipeline's own arguments."""
    parser.add_argument("--topic", required=True)
    parser.add_argument("--other-namesrv", default="", help="that of the first topic if not given")
    parser.add_argument("--other-topic", required=True)
    parser.add_argument("--by", choices=("queue", "content"), default="queue")
    parser.add_argument("--range", type=int, default=10_000, help="messages in a range (by queue)")
    parser.add_argument("--buckets", type=int, default=64, help="by content")


def run(spark: SparkSession, arguments: argparse.Namespace, report: RunReport) -> None:
    """Compares; what is found stands in the report. Raises SystemExit(1) if they differ."""
    one = summary(spark, arguments.namesrv, arguments.topic, arguments)
    other = summary(
        spark, arguments.other_namesrv or arguments.namesrv, arguments.other_topic, arguments
    )
    keys = [name for name in one.columns if name not in ("count", "checksum")]
    renamed = other.withColumnsRenamed({"count": "other_count", "checksum": "other_checksum"})
    both = one.join(renamed, keys, "full").fillna(0).orderBy(*keys).collect()
    differing = [
        row
        for row in both
        if (row["count"], row["checksum"]) != (row["other_count"], row["other_checksum"])
    ]
    report.result = {
        "messages": sum(row["count"] for row in both),
        "other_messages": sum(row["other_count"] for row in both),
        "compared": len(both),
        "differing": [row.asDict() for row in differing],
    }
    for row in differing[:SHOWN_MAX]:
        place = ", ".join(f"{name} {row[name]}" for name in keys)
        say(f"{place}: {row['count']:,} and {row['other_count']:,} messages, checksums differ")
    counts = f"{report.result['messages']:,} and {report.result['other_messages']:,} messages"
    say(
        f"{counts}, {len(differing)} of {len(both)} {'ranges' if arguments.by == 'queue' else 'buckets'} differ"
    )
    if differing:
        raise SystemExit(1)


def summary(
    spark: SparkSession, namesrv: str, topic: str, arguments: argparse.Namespace
) -> DataFrame:
    """(place, count, checksum) of a topic."""
    from pyspark.sql import functions as f

    messages = (
        spark.read.format("protomq")
        .option("protomq.namesrv", namesrv)
        .option("subscribe", topic)
        .option("columns", "queue_id,queue_offset,body,key,tags,properties")
        .load()
    )
    # A map has no hash of its own in Spark; sorted entries do, and equal maps have equal ones.
    properties = f.to_json(f.array_sort(f.map_entries("properties")))
    content = f.xxhash64("body", "key", "tags", properties)
    if arguments.by == "content":
        place = [f.pmod(content, f.lit(arguments.buckets)).alias("bucket")]
        hashed = content
    else:
        start = f.floor(f.col("queue_offset") / arguments.range) * arguments.range
        place = [f.col("queue_id"), start.cast("bigint").alias("first_offset")]
        hashed = f.xxhash64(content, "queue_offset")
    # A sum does not depend on the order; as a decimal it does not overflow.
    checksum = f.sum(hashed.cast("decimal(20,0)")).cast("string").alias("checksum")
    return messages.groupBy(*place).agg(f.count(f.lit(1)).alias("count"), checksum)
