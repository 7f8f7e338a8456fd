"""Compare two topics, of one cluster or two: counts and checksums per queue and range of offsets.

--by queue is for copies that keep queues and offsets. It compares ranges of --range messages in each queue. --by content is for
copies that went through a stream. It compares buckets of messages by the hash of body, key, tag and properties, whatever their
place and order. The report names every range or bucket that differs; the exit code is 1 if there is one. Topics that are being
written to: --until compares what was stored before a time.

Queues of the same number on the same broker belong together; where each side has one broker, their names may differ.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from protomq_spark.cluster import cluster_of
from protomq_spark.options import ClientOptions, Subscription

from .report import Chart, RunReport, say, show_tasks

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SHOWN_MAX: Final = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pipeline's own arguments."""
    parser.add_argument("--topic", required=True)
    parser.add_argument("--other-namesrv", default="", help="that of the first topic if not given")
    parser.add_argument("--other-topic", default="", help="the same name if not given")
    parser.add_argument("--by", choices=("queue", "content"), default="queue")
    parser.add_argument("--range", type=int, default=10_000, help="messages in a range (by queue)")
    parser.add_argument("--buckets", type=int, default=64, help="by content")
    parser.add_argument("--since", default="", metavar="MS", help="only what was stored since then")
    parser.add_argument("--until", default="", metavar="MS", help="only what was stored before")


def run(spark: SparkSession, arguments: argparse.Namespace, report: RunReport) -> None:
    """Compares; what is found stands in the report. Raises SystemExit(1) if they differ."""
    sides = (
        (arguments.namesrv, arguments.topic),
        (
            arguments.other_namesrv or arguments.namesrv,
            arguments.other_topic or arguments.topic,
        ),
    )
    if sides[0] == sides[1]:
        raise ValueError("a topic is compared with itself: give --other-topic or --other-namesrv")
    with_broker = arguments.by == "queue" and compare_brokers(*map(brokers_of, *zip(*sides, strict=True)))
    one, other = (summary(spark, *side, arguments, with_broker) for side in sides)
    keys = [name for name in one.columns if name not in ("count", "checksum")]
    renamed = other.withColumnsRenamed({"count": "other_count", "checksum": "other_checksum"})
    joined = one.join(renamed, keys, "full").fillna(0, ["count", "other_count"]).orderBy(*keys)
    with show_tasks(spark):
        both = joined.collect()
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
    report.charts = [chart_of(both, differing, keys)]
    for row in differing[:SHOWN_MAX]:
        place = ", ".join(f"{name} {row[name]}" for name in keys)
        say(f"{place}: {row['count']:,} and {row['other_count']:,} messages, checksums differ")
    counts = f"{report.result['messages']:,} and {report.result['other_messages']:,} messages"
    say(
        f"{counts}, {len(differing)} of {len(both)} {'ranges' if arguments.by == 'queue' else 'buckets'} differ"
    )
    if differing:
        raise SystemExit(1)


def brokers_of(namesrv: str, topic: str) -> set[str]:
    """The brokers that have queues of a topic."""
    queues = cluster_of(ClientOptions(namesrv)).queues(Subscription(topics=(topic,)))
    return {queue.broker_name for queue in queues}


def compare_brokers(one: set[str], other: set[str]) -> bool:
    """Whether queues are told apart by their brokers. Raises ValueError if it is not known which belong together."""
    if one == other:
        return True
    if len(one) == len(other) == 1:
        return False
    raise ValueError(
        f"the brokers have other names ({', '.join(sorted(one))} and {', '.join(sorted(other))}), so it is not known"
        " which queues belong together: use --by content"
    )


def summary(
    spark: SparkSession,
    namesrv: str,
    topic: str,
    arguments: argparse.Namespace,
    with_broker: bool,
) -> DataFrame:
    """(place, count, checksum) of a topic."""
    from pyspark.sql import functions as f

    reader = (
        spark.read.format("protomq")
        .option("protomq.namesrv", namesrv)
        .option("subscribe", topic)
        .option("columns", "broker,queue_id,queue_offset,body,key,tags,properties")
    )
    if arguments.since:
        reader = reader.option("startingTimestamp", arguments.since)
        reader = reader.option("startingOffsetsByTimestampStrategy", "latest")
    if arguments.until:
        reader = reader.option("endingTimestamp", arguments.until)
    messages = reader.load()
    # A map has no hash of its own in Spark; sorted entries do, and equal maps have equal ones.
    properties = f.to_json(f.array_sort(f.map_entries("properties")))
    # A null leaves a hash as it is, so that a key without a tag would be equal to a tag without a key.
    present: list[Column] = [f.col(name).isNull() for name in ("body", "key", "tags")]
    content = f.xxhash64("body", "key", "tags", properties, *present)
    if arguments.by == "content":
        place = [f.pmod(content, f.lit(arguments.buckets)).alias("bucket")]
        hashed = content
    else:
        start = f.floor(f.col("queue_offset") / arguments.range) * arguments.range
        place = [f.col("queue_id"), start.cast("bigint").alias("first_offset")]
        if with_broker:
            place.insert(0, f.col("broker"))
        hashed = f.xxhash64(content, "queue_offset")
    # A sum does not depend on the order; as a decimal it does not overflow.
    checksum = f.sum(hashed.cast("decimal(20,0)")).cast("string").alias("checksum")
    return messages.groupBy(*place).agg(f.count(f.lit(1)).alias("count"), checksum)


def chart_of(both: list[Any], differing: list[Any], keys: list[str]) -> Chart:
    """Messages of each queue or bucket, those of ranges that differ beside them."""
    columns = keys[:-1] if len(keys) > 1 else keys
    places: dict[str, int] = {}
    counts: list[list[float | None]] = [[], [], []]
    bad = {tuple(row[key] for key in keys) for row in differing}
    for row in both:
        name = ":".join(str(row[column]) for column in columns)
        index = places.setdefault(name, len(places))
        if index == len(counts[0]):
            for values in counts:
                values.append(0)
        found = tuple(row[key] for key in keys) in bad
        added = (row["count"], row["other_count"], max(row["count"], row["other_count"]) * found)
        for values, value in zip(counts, added, strict=True):
            values[index] = (values[index] or 0) + value
    series = dict(zip(("one", "other", "in ranges that differ"), counts, strict=True))
    return Chart(f"messages of each {' and '.join(columns)}", "messages", list(places), series, "bar")
