"""Lag and throughput of a cluster: what each group has left to read, how fast topics grow, and when a group will be through.

The cluster is asked --samples times, --interval seconds apart. From the first and the last answer follow rates for each
queue: messages that came in, and messages that a group committed. From the rates follows the time in which a group catches
up: lag divided by how much faster it reads than the topic grows. Skew is the largest queue's share over that of the average
queue: 1 is even.

All groups count, or those of --group, each in the topics in which it has committed offsets. What a group never read is not its
lag. A queue of such a topic in which it never committed lags by all that is stored. Nothing is below zero: an end that went back
(a topic made again, a broker that lost its newest messages) has grown from nothing.

--history MINUTES adds what came in before, minute by minute. Spark reads it from the times and sizes of the messages; without
--history no Spark is started. Rates come from offsets, so they need no counters of the brokers and survive their restarts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from protomq import Admin, MessageQueue, QueueRange
from protomq.calls import by_broker
from protomq_spark.cluster import Cluster, cluster_of
from protomq_spark.offsets import OffsetRange
from protomq_spark.options import ClientOptions, Subscription
from protomq_spark.pulling import PullSettings, read_range
from protomq_spark.records import Decoding

from .report import Chart, RunReport, answer, say, text_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = dict[str, Any]

BARS_MAX: Final = 64
"""A plot with more bars cannot be read: then only the largest are shown."""
HISTORY_POINTS: Final = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pipeline's own arguments."""
    parser.add_argument("--topic", default="", help="topics, separated by commas; default: all")
    parser.add_argument(
        "--topic-pattern", default="", help="or a regular expression for their names"
    )
    parser.add_argument(
        "--group", default="", help="consumer groups, separated by commas; default: all"
    )
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--samples", type=int, default=2, help="1: no rates")
    parser.add_argument("--history", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--queues", action="store_true", help="a line for each queue, too")


def needs_spark(arguments: argparse.Namespace) -> bool:
    """Only for what messages tell."""
    return bool(arguments.history)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the cluster said at one time. `committed`: group -> queue -> offset."""

    at_s: float
    ranges: Mapping[MessageQueue, QueueRange]
    committed: Mapping[str, Mapping[MessageQueue, int]] = field(default_factory=dict)


def run(
    spark: SparkSession | None, arguments: argparse.Namespace, report: RunReport
) -> None:
    """Samples, then prints tables."""
    if arguments.samples < 1 or arguments.interval <= 0:
        raise ValueError("--samples must be 1 or more, --interval above 0")
    cluster = cluster_of(ClientOptions(arguments.namesrv))
    subscription = Subscription(topics=names(arguments.topic), pattern=arguments.topic_pattern)
    if not subscription.topics and not subscription.pattern:
        subscription = Subscription(pattern=".*")
    named_groups = names(arguments.group)
    samples: list[Sample] = []
    for number in range(arguments.samples):
        if number:
            wait_until(samples[0].at_s + number * arguments.interval)
        groups = dict.fromkeys(named_groups) or all_groups(arguments.namesrv)
        samples.append(take_sample(cluster, subscription, groups))
        behind = of_reading_groups(group_rows(samples[0], samples[-1]))
        lag = sum(row["lag"] for row in behind)
        stored = sum(there.end_offset for there in samples[-1].ranges.values())
        report.batch(number, messages_ever=stored, lag=lag)
    queues = queue_rows(samples)
    members = of_reading_groups(group_rows(samples[0], samples[-1]))
    for group in sorted(set(named_groups) - {row["group"] for row in members}):
        say(f"group {group} has committed no offsets there: its lag is unknown")
    for row in members:
        row["oldest_unread_s"] = oldest_unread_s(cluster, row, samples[-1].ranges)
    topics, totals = topic_rows(queues), group_totals(members)
    report.result = {
        "interval_s": round(samples[-1].at_s - samples[0].at_s, 3),
        "topics": topics,
        "groups": totals,
        "queues": queues,
        "group_queues": members,
    }
    report.charts = charts(samples, topics, members)
    print_tables(arguments, topics, totals, members)
    if spark is not None:
        points = history(spark, arguments, sorted({row["topic"] for row in topics}))
        report.result["history"] = points
        report.charts += history_charts(points)
        say(f"history: {sum(p['messages'] for p in points):,} messages in {arguments.history:g} min")


now_s = time.monotonic


def wait_until(at_s: float) -> None:
    """Sleeps until then."""
    time.sleep(max(at_s - now_s(), 0.0))


def names(text: str) -> tuple[str, ...]:
    """a, b."""
    return tuple(filter(None, map(str.strip, text.split(","))))


Groups = Mapping[str, Collection[str] | None]
"""Group -> the topics in which it has committed; None: not known."""


def all_groups(namesrv: str) -> Groups:
    """Those that have committed anywhere."""
    with Admin(namesrv=namesrv) as admin:
        return {group.name: group.topics for group in admin.list_groups()}


def take_sample(cluster: Cluster, subscription: Subscription, groups: Groups) -> Sample:
    """Asks once. Committed offsets first: read later, they could be ahead of the ends, and the lag below zero."""
    cluster.refresh()
    queues = cluster.queues(subscription)
    committed = {
        group: committed_offsets(cluster, group, found)
        for group, topics in groups.items()
        if (found := [queue for queue in queues if topics is None or queue.topic in topics])
    }
    return Sample(now_s(), cluster.see(queues).ranges, committed)


def committed_offsets(
    cluster: Cluster, group: str, queues: Iterable[MessageQueue]
) -> dict[MessageQueue, int]:
    """Where a group is: one call for each topic and broker. Queues without a commit are left out."""
    found: dict[MessageQueue, int] = {}
    for (topic, broker_name), members in by_broker(queues).items():
        ids = [queue.queue_id for queue in members]
        by_id = cluster.calls.committed(group, topic, broker_name, ids).offsets
        found |= {queue: by_id[queue.queue_id] for queue in members if queue.queue_id in by_id}
    return found


# -- what follows from samples -------------------------------------------------------------------------------------------------


def rate(first: int | None, last: int | None, elapsed_s: float) -> float | None:
    """Per second, never below 0; None if it cannot be known."""
    if first is None or last is None or elapsed_s <= 0:
        return None
    return round((last - first if last >= first else last) / elapsed_s, 3)


def place(queue: MessageQueue) -> Row:
    """The columns that say which queue."""
    return {"topic": queue.topic, "broker": queue.broker_name, "queue": queue.queue_id}


def queue_rows(samples: Sequence[Sample]) -> list[Row]:
    """Each queue: what it holds, and how fast it grows."""
    first, last = samples[0], samples[-1]
    elapsed_s = last.at_s - first.at_s
    rows = []
    for queue in sorted(last.ranges):
        there = last.ranges[queue]
        before = first.ranges.get(queue)
        rows.append(
            place(queue)
            | {
                "min_offset": there.min_offset,
                "end_offset": there.end_offset,
                "stored": there.end_offset - there.min_offset,
                # A queue that is new has grown from nothing.
                "in_per_s": rate(before.end_offset if before else 0, there.end_offset, elapsed_s),
            }
        )
    return rows


def group_rows(begin: Sample, end: Sample) -> list[Row]:
    """Each queue and group: lag, and how fast it is read."""
    elapsed_s = end.at_s - begin.at_s
    rows = []
    for group, offsets in end.committed.items():
        before = begin.committed.get(group, {})
        for queue in sorted(end.ranges):
            there = end.ranges[queue]
            committed = offsets.get(queue)
            ended = begin.ranges.get(queue)
            rows.append(
                {"group": group}
                | place(queue)
                | {
                    "committed": committed,
                    "lag": max(there.end_offset - max(committed or 0, there.min_offset), 0),
                    # Before its first commit a group was, as far as one can know, at the first message.
                    "read_per_s": rate(
                        before.get(queue, there.min_offset),
                        there.min_offset if committed is None else committed,
                        elapsed_s,
                    ),
                    "in_per_s": rate(ended.end_offset if ended else 0, there.end_offset, elapsed_s),
                }
            )
    return rows


def of_reading_groups(rows: list[Row]) -> list[Row]:
    """Without topics that a group never read."""
    read = {(row["group"], row["topic"]) for row in rows if row["committed"] is not None}
    return [row for row in rows if (row["group"], row["topic"]) in read]


def skew(values: Sequence[float]) -> float | None:
    """The largest over the average; None if there is nothing."""
    total = sum(values)
    return round(max(values) * len(values) / total, 2) if values and total else None


def catch_up_s(lag: int, read_per_s: float | None, in_per_s: float | None) -> float | None:
    """When a group will be through; None: never, as things are, or not known."""
    if not lag:
        return 0.0
    if read_per_s is None or in_per_s is None or read_per_s <= in_per_s:
        return None
    return round(lag / (read_per_s - in_per_s), 1)


def topic_rows(queues: Sequence[Row]) -> list[Row]:
    """Sums of each topic."""
    by_topic: dict[str, list[Row]] = {}
    for row in queues:
        by_topic.setdefault(row["topic"], []).append(row)
    return [
        {
            "topic": topic,
            "queues": len(rows),
            "stored": sum(row["stored"] for row in rows),
            "stored_skew": skew([row["stored"] for row in rows]),
            "in_per_s": total(rows, "in_per_s"),
            "in_skew": skew([row["in_per_s"] or 0.0 for row in rows]),
        }
        for topic, rows in by_topic.items()
    ]


def group_totals(members: Sequence[Row]) -> list[Row]:
    """Sums of each group and topic."""
    by_group: dict[tuple[str, str], list[Row]] = {}
    for row in members:
        by_group.setdefault((row["group"], row["topic"]), []).append(row)
    totals = []
    for (group, topic), rows in by_group.items():
        lag = sum(row["lag"] for row in rows)
        read, grown = total(rows, "read_per_s"), total(rows, "in_per_s")
        ages = [row["oldest_unread_s"] for row in rows if row.get("oldest_unread_s") is not None]
        totals.append(
            {
                "group": group,
                "topic": topic,
                "lag": lag,
                "lag_skew": skew([row["lag"] for row in rows]),
                "oldest_unread_s": max(ages, default=None),
                "read_per_s": read,
                "in_per_s": grown,
                "catch_up_s": catch_up_s(lag, read, grown),
                "state": state_of(lag, read, grown),
            }
        )
    return totals


def total(rows: Sequence[Row], column: str) -> float | None:
    """The sum; None if a part of it is not known."""
    values = [row[column] for row in rows]
    return None if None in values else round(sum(values), 3)


def state_of(lag: int, read_per_s: float | None, in_per_s: float | None) -> str:
    """In words."""
    if not lag:
        return "caught up"
    if read_per_s is None or in_per_s is None:
        return "behind"
    if read_per_s <= 0:
        return "stands still"
    if read_per_s > in_per_s:
        return "catching up"
    return "keeping pace" if read_per_s == in_per_s else "falling behind"


def oldest_unread_s(
    cluster: Cluster, row: Row, ranges: Mapping[MessageQueue, QueueRange]
) -> float | None:
    """The age of the first message that a group has not read in a queue; None if there is none."""
    queue = MessageQueue(row["topic"], row["broker"], row["queue"])
    start = max(row["committed"] or 0, ranges[queue].min_offset)
    if start >= ranges[queue].end_offset:
        return None
    settings = PullSettings(Decoding(("timestamp",), check_crc=False), (), False, 1, 1)
    for batch in read_range(cluster, OffsetRange(queue, start, start + 1), settings):
        for stored_at in batch.column(0).to_pylist():
            return max(round((datetime.now(UTC) - stored_at).total_seconds(), 3), 0.0)
    return None


# -- what came in before -------------------------------------------------------------------------------------------------------


def history(
    spark: SparkSession, arguments: argparse.Namespace, topics: Sequence[str]
) -> list[Row]:
    """Messages and bytes of each topic and piece of time, from the messages themselves."""
    from pyspark.sql import functions as f

    piece_s = max(round(arguments.history * 60 / HISTORY_POINTS), 1)
    begin_ms = int((time.time() - arguments.history * 60) * 1000)
    messages = (
        spark.read.format("protomq")
        .option("protomq.namesrv", arguments.namesrv)
        .option("subscribe", ",".join(topics))
        .option("startingTimestamp", str(begin_ms))
        .option("startingOffsetsByTimestampStrategy", "latest")
        .option("columns", "topic,timestamp,body")
        .option("checkCrc", "false")
        .load()
    )
    pieces = (
        messages.groupBy("topic", f.window("timestamp", f"{piece_s} seconds").alias("piece"))
        .agg(f.count(f.lit(1)).alias("messages"), f.sum(f.length("body")).alias("size_bytes"))
        .orderBy("topic", "piece")
    )
    return [
        {
            "topic": row["topic"],
            "from": row["piece"]["start"].replace(tzinfo=UTC).isoformat(),
            "from_s": row["piece"]["start"].replace(tzinfo=UTC).timestamp(),
            "seconds": piece_s,
            "messages": row["messages"],
            "size_bytes": row["size_bytes"],
        }
        for row in pieces.collect()
    ]


def history_charts(points: Sequence[Row]) -> list[Chart]:
    """Messages and bytes per second over time."""
    if not points:
        return []
    piece_s = points[0]["seconds"]
    first, last = min(p["from_s"] for p in points), max(p["from_s"] for p in points)
    times = [first + piece_s * n for n in range(round((last - first) / piece_s) + 1)]
    made = []
    for column, unit in (("messages", "messages/s"), ("size_bytes", "bytes/s")):
        series = {}
        for topic in sorted({point["topic"] for point in points}):
            known = {p["from_s"]: p[column] / piece_s for p in points if p["topic"] == topic}
            series[topic] = [known.get(at, 0.0) for at in times]
        minutes = [(at - time.time()) / 60 for at in times]
        made.append(Chart(f"stored before ({unit})", unit, minutes, series, "line", "minutes"))
    return made


# -- showing -------------------------------------------------------------------------------------------------------------------


def print_tables(
    arguments: argparse.Namespace,
    topics: Sequence[Row],
    totals: Sequence[Row],
    members: Sequence[Row],
) -> None:
    """To stdout: it is what was asked for."""
    answer(text_table(topics))
    if totals:
        answer("\n" + text_table(totals))
    if arguments.queues and members:
        answer("\n" + text_table(members))
    if not totals:
        say("no group has committed offsets there")


def charts(
    samples: Sequence[Sample], topics: Sequence[Row], members: Sequence[Row]
) -> list[Chart]:
    """Lag of each queue, lag over time if there are more than two samples, and rates."""
    made: list[Chart] = []
    if members:
        shown = sorted(members, key=lambda row: -row["lag"])[:BARS_MAX]
        queues = sorted({(row["topic"], row["broker"], row["queue"]) for row in shown})
        lags = {(row["group"], row["topic"], row["broker"], row["queue"]): row["lag"] for row in members}
        groups = dict.fromkeys(row["group"] for row in members)
        made.append(
            Chart(
                "lag of each queue", "messages", [f"{topic}/{broker}:{queue}" for topic, broker, queue in queues],
                {group: [lags.get((group, *queue)) for queue in queues] for group in groups}, "bar",
            )
        )  # fmt: skip
    if members and len(samples) > 2:
        kept = {(row["group"], row["topic"]) for row in members}
        over_time: dict[str, list[float | None]] = {}
        for sample in samples:
            sums: dict[str, float] = {}
            for row in group_rows(samples[0], sample):
                if (row["group"], row["topic"]) in kept:
                    name = f"{row['group']} in {row['topic']}"
                    sums[name] = sums.get(name, 0) + row["lag"]
            for name, lag in sums.items():
                over_time.setdefault(name, []).append(lag)
        times = [round(sample.at_s - samples[0].at_s, 3) for sample in samples]
        made.append(Chart("lag over time", "messages", times, over_time, "line", "seconds"))
    if any(row["in_per_s"] is not None for row in topics):
        busy = sorted(topics, key=lambda row: -(row["in_per_s"] or 0))[:BARS_MAX]
        series: dict[str, list[float | None]] = {"stored": [row["in_per_s"] for row in busy]}
        for total_row in group_totals(members):
            values = series.setdefault(f"read by {total_row['group']}", [None] * len(busy))
            for index, row in enumerate(busy):
                if row["topic"] == total_row["topic"]:
                    values[index] = total_row["read_per_s"]
        made.append(
            Chart("throughput", "messages/s", [row["topic"] for row in busy], series, "bar")
        )
    return made
