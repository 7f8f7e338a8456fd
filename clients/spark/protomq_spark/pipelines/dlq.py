"""Dead letters: what groups could not process and why (report), and sending it to its topics again (replay).

    dlq report                                           counts by group, origin topic, error text, attempts and time
    dlq replay --group billing --all                     all of a group that were not replayed yet
    dlq replay --group billing --id ID --id ID           those with these ids
    dlq replay --group billing --since TIME --until TIME those that died in a time
    dlq replay --group billing --where "last_error LIKE 'Timeout%'"

--where is an SQL condition over the columns of the source, those of moved messages too (last_error, origin_topic, reconsume_times).
Spark reads the dead letters, and the pipeline replays the ids of those that match.

A replay is that of `protomq dlq replay`: brokers make the copies, in slices, each in one append with the record of what was replayed. So
a dead letter is replayed once; run a replay again that was killed, and it goes on. --again replays letters a second time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from protomq import Admin, DeadLetters, ReplayProgress
from protomq.wire.topics import dead_letter_topic
from protomq_spark.schema import COLUMN_NAMES

from .report import Chart, RunReport, answer, say, show_tasks, text_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Row = dict[str, Any]

HISTORY_POINTS: Final = 60
BARS_MAX: Final = 20
ERRORS_MAX: Final = 1_000
"""Rows of the report: the most frequent ones."""
PROGRESS_INTERVAL_S: Final = 1.0
_REPORT_COLUMNS: Final = ("topic", "timestamp", "message_id", "reconsume_times", "origin_topic", "last_error")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pipeline's own arguments."""
    parser.add_argument("action", choices=("report", "replay"))
    parser.add_argument("--group", default="", help="consumer groups, separated by commas; report: all if not given")
    parser.add_argument("--since", default="", metavar="TIME", help="only what died then or later: milliseconds since 1970, or ISO 8601")
    parser.add_argument("--until", default="", metavar="TIME", help="only what died before")
    parser.add_argument("--where", default="", metavar="SQL", help="only what meets this condition over the columns of the source")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="report: how many errors to print")
    parser.add_argument("--merge-numbers", action="store_true", help="report: errors that differ in numbers only are one")
    parser.add_argument("--all", action="store_true", dest="everything", help="replay: all that were not replayed yet")
    parser.add_argument("--id", action="append", default=[], metavar="ID", help="replay: the one with this message id; may be repeated")
    parser.add_argument("--again", action="store_true", help="replay: those that were replayed before, too")


def needs_spark(arguments: argparse.Namespace) -> bool:
    """Brokers replay by themselves; only what is to be counted or searched has to be read."""
    return arguments.action == "report" or bool(arguments.where)


def run(
    spark: SparkSession | None, arguments: argparse.Namespace, report: RunReport
) -> None:
    """One of the two. Raises SystemExit(1) if a dead letter that was named is nowhere."""
    check(arguments)
    if arguments.action == "replay":
        run_replay(spark, arguments, report)
        return
    assert spark is not None
    run_report(spark, arguments, report)


def check(arguments: argparse.Namespace) -> None:
    """Raises ValueError if the arguments contradict each other."""
    begin, end = time_of("--since", arguments.since), time_of("--until", arguments.until)
    if begin is not None and end is not None and begin >= end:
        raise ValueError("--since is not before --until")
    if arguments.action == "report":
        for name, given in (("--all", arguments.everything), ("--id", arguments.id), ("--again", arguments.again)):
            if given:
                raise ValueError(f"{name} is for replay: a report changes nothing")
        if arguments.top < 1:
            raise ValueError("--top must be 1 or more")
        return
    if not names(arguments.group):
        raise ValueError("replay needs --group")
    selected = bool(arguments.since or arguments.until or arguments.where)
    if arguments.everything + bool(arguments.id) + selected != 1:
        raise ValueError("say which to replay: --all, or --id, or --since, --until and --where")


def names(text: str) -> tuple[str, ...]:
    """a, b."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def time_of(option: str, text: str) -> datetime | None:
    """Milliseconds since 1970, or ISO 8601, in UTC if it does not say; None if nothing is given. Raises ValueError."""
    if not text:
        return None
    try:
        if text.isascii() and text.isdecimal():
            return _EPOCH + timedelta(milliseconds=int(text))
        time_ = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{option} is milliseconds since 1970, or a time as 2026-01-05T09:00:00Z, not {text!r}"
        ) from None
    return time_ if time_.tzinfo is not None else time_.replace(tzinfo=UTC)


# -- reading ---------------------------------------------------------------------------------------------------------------


def read_letters(
    spark: SparkSession, arguments: argparse.Namespace, groups: Sequence[str], columns: Sequence[str]
) -> DataFrame:
    """The dead letters of these groups that were selected, not read yet. What retention takes meanwhile is skipped."""
    # A condition may be about whatever there is; bodies that do not hold are null then.
    read = COLUMN_NAMES if arguments.where else columns
    reader = (
        spark.read.format("protomq")
        .option("protomq.namesrv", arguments.namesrv)
        .option("subscribe", ",".join(map(dead_letter_topic, groups)))
        .option("columns", ",".join(read))
        .option("corruptRecords", "null")
        .option("failOnDataLoss", "false")
    )
    begin, end = time_of("--since", arguments.since), time_of("--until", arguments.until)
    if begin is not None:
        reader = reader.option("startingTimestamp", str(_milliseconds(begin)))
        reader = reader.option("startingOffsetsByTimestampStrategy", "latest")
    if end is not None:
        reader = reader.option("endingTimestamp", str(_milliseconds(end)))
    letters = reader.load()
    if not arguments.where:
        return letters
    from pyspark.errors import AnalysisException

    try:
        return letters.where(arguments.where)
    except AnalysisException as error:
        raise ValueError(f"--where: {str(error).splitlines()[0]}") from error


def _milliseconds(time_: datetime) -> int:
    return (time_ - _EPOCH) // timedelta(milliseconds=1)


# -- report ----------------------------------------------------------------------------------------------------------------


def run_report(spark: SparkSession, arguments: argparse.Namespace, report: RunReport) -> None:
    """Counts, and prints tables."""
    with Admin(namesrv=arguments.namesrv) as admin:
        known = {one.group: one for one in admin.list_dead_letters()}
    wanted = names(arguments.group) or tuple(known)
    for group in wanted:
        if group not in known:
            say(f"group {group} has no dead letters at any broker")
    there = [group for group in wanted if group in known]
    found = count(spark, arguments, there) if there else {"groups": [], "errors": [], "history": []}
    totals = group_rows([known[group] for group in there], found["groups"])
    errors = found["errors"]
    report.result = {
        "groups": totals,
        "topics": topic_rows(found["topics"]) if there else [],
        "errors": errors,
        "history": found["history"],
    }
    report.charts = charts(errors, found["history"])
    answer(text_table(totals))
    if errors:
        answer("\n" + text_table([shown(row) for row in errors[: arguments.top]]))
    if len(errors) > arguments.top:
        say(f"the {arguments.top} most frequent of {len(errors):,} errors; --top shows more")


def count(
    spark: SparkSession, arguments: argparse.Namespace, groups: Sequence[str]
) -> dict[str, list[Row]]:
    """What Spark finds: sums of groups, of topics of origin, of errors, and over time."""
    from pyspark.sql import functions as f

    error = f.coalesce("last_error", f.lit(""))
    if arguments.merge_numbers:
        error = f.regexp_replace(error, r"\d+", "#")
    prefix = len(dead_letter_topic(""))
    letters = (
        read_letters(spark, arguments, groups, _REPORT_COLUMNS)
        .select(
            f.expr(f"substr(topic, {prefix + 1})").alias("group"),
            "origin_topic",
            error.alias("error"),
            f.col("reconsume_times").alias("attempts"),
            f.unix_millis("timestamp").alias("died_ms"),
            "message_id",
        )
        .persist()
    )
    dead = f.count(f.lit(1)).alias("dead_letters")
    first, last = f.min("died_ms").alias("first_ms"), f.max("died_ms").alias("last_ms")
    try:
        with show_tasks(spark):
            by_group = [row.asDict() for row in letters.groupBy("group").agg(dead, first, last).collect()]
            by_topic = letters.groupBy("group", "origin_topic").agg(dead).collect()
            newest = f.max_by("message_id", "died_ms").alias("newest_id")
            by_error = (
                letters.groupBy("group", "origin_topic", "error", "attempts")
                .agg(dead, first, last, newest)
                .orderBy(f.desc("dead_letters"), "group", "origin_topic", "error", "attempts")
                .limit(ERRORS_MAX)
                .collect()
            )
            piece_ms = piece_of(by_group)
            piece = (f.col("died_ms") - f.col("died_ms") % piece_ms).alias("from_ms")
            by_time = letters.groupBy("group", piece).agg(dead).orderBy("group", "from_ms").collect()
    finally:
        letters.unpersist()
    return {
        "groups": by_group,
        "topics": [row.asDict() for row in by_topic],
        "errors": [row.asDict() for row in by_error],
        "history": [row.asDict() | {"seconds": piece_ms // 1000} for row in by_time],
    }


# -- what follows from counts ----------------------------------------------------------------------------------------------


def piece_of(groups: Sequence[Mapping[str, Any]]) -> int:
    """How long the pieces of time are into which the report cuts, in milliseconds: whole seconds."""
    if not groups:
        return 1000
    span_ms = max(row["last_ms"] for row in groups) - min(row["first_ms"] for row in groups)
    return max(-(-span_ms // (HISTORY_POINTS * 1000)), 1) * 1000


def group_rows(known: Sequence[DeadLetters], counted: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Each group: what brokers say of all its dead letters, and how many were selected."""
    by_group = {row["group"]: row for row in counted}
    rows = []
    for one in sorted(known, key=lambda one: one.group):
        found = by_group.get(one.group)
        rows.append(
            {
                "group": one.group,
                "stored": one.message_count,
                "replayed": one.replayed_count,
                "selected": found["dead_letters"] if found else 0,
                "first_died": time_text(found["first_ms"]) if found else None,
                "last_died": time_text(found["last_ms"]) if found else None,
            }
        )
    return rows


def topic_rows(counted: Sequence[Mapping[str, Any]]) -> list[Row]:
    """By group, the topic with the most dead letters first."""
    order = sorted(counted, key=lambda row: (row["group"], -row["dead_letters"], row["origin_topic"] or ""))
    return [dict(row) for row in order]


def shown(row: Mapping[str, Any]) -> Row:
    """An error as a line of the table."""
    error = " ".join((row["error"] or "-").split())
    return {
        "group": row["group"],
        "origin_topic": row["origin_topic"],
        "attempts": row["attempts"],
        "dead_letters": row["dead_letters"],
        "last_died": time_text(row["last_ms"]),
        "newest_id": row["newest_id"],
        "error": error if len(error) <= 80 else error[:79] + "…",
    }


def time_text(time_ms: int) -> str:
    """To the second, in UTC."""
    return (_EPOCH + timedelta(milliseconds=time_ms)).strftime("%Y-%m-%dT%H:%M:%SZ")


def charts(errors: Sequence[Mapping[str, Any]], history: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The most frequent errors, and what died when."""
    if not history:
        return []
    most: dict[tuple[str, str], int] = {}
    for row in errors:
        name = row["group"], (row["error"] or "-")[:40]
        most[name] = most.get(name, 0) + row["dead_letters"]
    kept = sorted(most, key=lambda name: -most[name])[:BARS_MAX]
    groups = list(dict.fromkeys(row["group"] for row in history))
    bars: dict[str, list[float | None]] = {
        group: [most[name] if name[0] == group else None for name in kept] for group in groups
    }
    piece_ms = history[0]["seconds"] * 1000
    first, last = (choose(row["from_ms"] for row in history) for choose in (min, max))
    times = range(first, last + 1, piece_ms)
    known = {(row["group"], row["from_ms"]): row["dead_letters"] for row in history}
    lines: dict[str, list[float | None]] = {
        group: [known.get((group, at), 0) for at in times] for group in groups
    }
    minutes = [(at - last) / 60_000 for at in times]
    return [
        Chart("dead letters by error", "dead letters", [error for _, error in kept], bars, "bar"),
        Chart(f"died, in pieces of {piece_ms // 1000} s", "dead letters", minutes, lines, "line", "minutes before the last"),
    ]


# -- replay ----------------------------------------------------------------------------------------------------------------


def run_replay(spark: SparkSession | None, arguments: argparse.Namespace, report: RunReport) -> None:
    """Group after group."""
    rows: list[Row] = []
    report.result = {"groups": rows}
    with Admin(namesrv=arguments.namesrv) as admin:
        for group in names(arguments.group):
            if arguments.where:
                assert spark is not None
                ids = matching_ids(spark, arguments, group)
                say(f"group {group}: {len(ids):,} dead letters match")
                if not ids:
                    rows.append(replay_row(ReplayProgress(group)))
                    continue
                replay(admin, arguments, group, report, rows, message_ids=ids)
            elif arguments.id:
                replay(admin, arguments, group, report, rows, message_ids=arguments.id)
            else:
                begin, end = time_of("--since", arguments.since), time_of("--until", arguments.until)
                replay(admin, arguments, group, report, rows, begin=begin, end=end)
    answer(text_table([{name: row[name] for name in row if name != "unknown_ids"} for row in rows]))
    unknown = unknown_everywhere(rows) if arguments.id else []
    if unknown:
        say(f"no dead letter {', '.join(unknown)} in {' or '.join(names(arguments.group))}")
        raise SystemExit(1)


def matching_ids(spark: SparkSession, arguments: argparse.Namespace, group: str) -> list[str]:
    """Ids of the dead letters that meet the condition."""
    letters = read_letters(spark, arguments, (group,), ())
    with show_tasks(spark):
        return [row[0] for row in letters.select("message_id").distinct().collect()]


def replay(
    admin: Admin, arguments: argparse.Namespace, group: str, report: RunReport, rows: list[Row], **which: Any
) -> None:
    """Replays; what was done stands in `rows` even if a broker fails in the middle."""
    rows.append(replay_row(ReplayProgress(group)))
    at = len(rows) - 1
    told_s: float | None = None

    def on_progress(progress: ReplayProgress) -> None:
        nonlocal told_s
        rows[at] = replay_row(progress)
        now_s = time.monotonic()
        if told_s is not None and now_s - told_s < PROGRESS_INTERVAL_S and progress.looked_at < progress.total:
            return
        told_s = now_s
        report.batch(
            len(report.batches), looked_at=progress.looked_at, total=progress.total, replayed=progress.replayed
        )

    done = admin.replay_dead_letters(group, again=arguments.again, on_progress=on_progress, **which)
    rows[at] = replay_row(done)


def replay_row(progress: ReplayProgress) -> Row:
    """What became of a group's dead letters."""
    return {
        "group": progress.group,
        "replayed": progress.replayed,
        "known": progress.known,
        "without_topic": progress.without_topic,
        "unreadable": progress.unreadable,
        "lost": progress.lost,
        "unknown_ids": list(progress.unknown_ids),
    }


def unknown_everywhere(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids that no group has."""
    return sorted(set.intersection(*(set(row["unknown_ids"]) for row in rows)))
