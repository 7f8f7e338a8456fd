"""A topic as partitioned Parquet: every message once, small files merged, readers undisturbed.

    --output root --partition topic=topic --partition 'date=to_date(timestamp)' --partition "hour=date_format(timestamp, 'HH')"

The archive is its own checkpoint. Each version of it (a file in root/_spark_metadata) holds the list of its files, and the
offset of each queue up to which they reach. It is published in one step. So restart a run that was killed at any moment: it goes
on behind the last version. `spark.read.parquet(root)` sees the newest version; other readers take the files that root/_manifest
or --list-files names. A glob would read rows twice. Files that are not listed (left by a killed run, or merged) are removed an
hour later (--keep).

--compact-files N: when a partition has N small files (below half of --file-size), they are merged. The merged file takes their
place in one version, so that a reader sees either, never both and never neither. --compact-only does that and nothing else; it
may run beside the archiver.
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from protomq_spark.archive_files import (
    WRITTEN_DDL,
    FileSettings,
    WrittenFile,
    merge_files,
    write_partitions,
)
from protomq_spark.archive_table import (
    ArchiveError,
    ArchiveTable,
    Version,
    appended,
    merge_groups,
    replaced,
)
from protomq_spark.cluster import Cluster, cluster_of
from protomq_spark.offsets import (
    DataLossError,
    Incarnations,
    Positions,
    Seen,
    decode_incarnations,
    encode_incarnations,
    from_stream_offset,
    lag_of,
    limit_ends,
    made_again,
    queue_name,
    say_made_again,
    to_stream_offset,
    without,
)
from protomq_spark.options import ClientOptions, Subscription
from protomq_spark.schema import DEFAULT_COLUMNS

from .report import RunReport, answer, say, show_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULT_PARTITIONS: Final = (
    "topic=topic",
    "date=to_date(timestamp)",
    "hour=date_format(timestamp, 'HH')",
)
Job = tuple[int, Sequence[str]]
"""Number and paths of the files that become one."""
Merge = Callable[[Job], WrittenFile]

COMMIT_TIMEOUT_S: Final = 3.0
_FOLDER: Final = "_folder_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pipeline's own arguments."""
    parser.add_argument("--topic", default="", help="topics, separated by commas")
    parser.add_argument("--topic-pattern", default="", help="or a regular expression for their names")
    parser.add_argument("--output", required=True, help="folder or URL of the archive")
    parser.add_argument(
        "--partition", action="append", metavar="NAME=SQL", help=f"default: {' '.join(DEFAULT_PARTITIONS)}"
    )
    parser.add_argument("--columns", default=",".join(DEFAULT_COLUMNS), help="columns of the source to read")
    parser.add_argument("--select", default="*", help="SQL expressions of the columns to store, separated by commas")
    parser.add_argument("--tags", default="", help="only messages with these tags")
    parser.add_argument("--starting", choices=("earliest", "latest"), default="earliest", help="first run only")
    parser.add_argument("--batch-size", type=int, default=1_000_000, help="messages in a version")
    parser.add_argument("--min-tasks", type=int, default=0, help="split large queues")
    parser.add_argument("--shuffle", action="store_true", help="one task for each partition value: fewer, larger files")
    parser.add_argument("--file-size", type=int, default=128, metavar="MIB", help="a file is closed at this size")
    parser.add_argument("--compression", choices=("zstd", "snappy", "gzip", "none"), default="zstd")
    parser.add_argument("--compact-files", type=int, default=8, metavar="N", help="0: never")
    parser.add_argument("--compact-every", type=int, default=20, metavar="BATCHES", help="and at the end of the run")
    parser.add_argument("--compact-only", action="store_true", help="read no messages")
    parser.add_argument("--keep", type=float, default=3600.0, metavar="SECONDS", help="how long readers may take")
    parser.add_argument("--list-files", action="store_true", help="print the files of the newest version, do nothing else")
    parser.add_argument("--group", default="", help="consumer group to commit offsets to, for lag tools")
    parser.add_argument("--skip-lost", action="store_true", help="continue where messages are already deleted")
    parser.add_argument("--follow", action="store_true", help="do not end when all messages are stored")
    parser.add_argument("--interval", type=float, default=10.0, metavar="SECONDS", help="with --follow: pause when there is nothing new")


def needs_spark(arguments: argparse.Namespace) -> bool:
    """Listing files needs none."""
    return not arguments.list_files


def check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for numbers with which nothing would be stored."""
    for name in ("batch_size", "file_size", "compact_every"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
    for name in ("min_tasks", "compact_files", "keep"):
        if getattr(arguments, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more")
    if arguments.interval <= 0:
        raise ValueError("--interval must be above 0")


def run(
    spark: SparkSession | None,
    arguments: argparse.Namespace,
    report: RunReport,
    table: ArchiveTable | None = None,
) -> None:
    """Until what was there at the beginning is stored, or, with --follow, for ever."""
    check(arguments)
    table = table or ArchiveTable(arguments.output)
    if (arguments.list_files or arguments.compact_only) and table.newest().number < 0:
        raise ArchiveError(f"there is no archive in {arguments.output}: is --output right?")
    if arguments.list_files:
        for path in table.paths():
            answer(path)
        return
    assert spark is not None
    if not arguments.compact_only:
        Archiver(spark, arguments, report, table).run()
    merged = compact(spark, arguments, table)
    removed = table.vacuum(arguments.keep, time.time())
    version = table.newest()
    report.result |= {
        "version": version.number,
        "rows": version.row_count,
        "files": len(version.files),
        "size_bytes": sum(file.size_bytes for file in version.files),
        "files_merged": merged + report.result.pop("merged_before", 0),
        "files_removed": removed,
    }
    say(f"version {version.number}: {version.row_count:,} rows in {len(version.files):,} files")


class Archiver:
    """Stores batch after batch."""

    def __init__(
        self,
        spark: SparkSession,
        arguments: argparse.Namespace,
        report: RunReport,
        table: ArchiveTable,
    ) -> None:
        if bool(arguments.topic) == bool(arguments.topic_pattern):
            raise ValueError("exactly one of --topic and --topic-pattern is needed")
        self._spark = spark
        self._arguments = arguments
        self._report = report
        self._table = table
        self._cluster = cluster_of(ClientOptions(arguments.namesrv))
        self._subscription = Subscription(
            topics=tuple(filter(None, map(str.strip, arguments.topic.split(",")))),
            pattern=arguments.topic_pattern,
        )
        self._partitions = parse_partitions(arguments.partition or DEFAULT_PARTITIONS)
        # What the files look like: an archive keeps to it.
        self._layout = {
            "partitions": [f"{name}={sql}" for name, sql in self._partitions.items()],
            "columns": arguments.columns,
            "select": arguments.select,
            "tags": arguments.tags,
        }

    def run(self) -> None:
        """Batches until there is nothing left."""
        arguments = self._arguments
        final: Positions | None = None
        rows = count = merged = 0
        while True:
            version = self._table.newest()
            self._check(version)
            begins_at_ends = arguments.starting == "latest" and not version.state
            # A queue that is seen later is stored from its first message: the end of each must be known.
            seen = see_now(self._cluster, self._subscription, begins_at_ends)
            start = starts(version, seen, arguments.starting, arguments.skip_lost)
            if begins_at_ends:
                # The ends of now are where this archive begins: whatever comes before the first batch is part of it.
                version = self._publish(version, [], start, seen.incarnations)
            latest = {queue: found.end_offset for queue, found in seen.ranges.items()}
            if final is None and not arguments.follow:
                final = latest
            if final is not None:  # What came since the run began is for the next one.
                latest = {queue: min(end, final.get(queue, 0)) for queue, end in latest.items()}
            latest = {queue: max(latest[queue], start[queue]) for queue in latest}
            end = limit_ends(start, latest, arguments.batch_size)
            if not lag_of(start, end):
                if final is not None:
                    break
                time.sleep(arguments.interval)
                continue
            files = self._write(version, start, end)
            self._publish(version, files, end, seen.incarnations)
            if arguments.group:
                self._cluster.commit(arguments.group, end, seen.incarnations, COMMIT_TIMEOUT_S)
            stored = sum(file.row_count for file in files)
            rows += stored
            self._report.batch(
                count, messages=lag_of(start, end), rows=stored, files=len(files),
                lag=lag_of(end, latest),
            )  # fmt: skip
            count += 1
            if count % arguments.compact_every == 0:
                merged += compact(self._spark, arguments, self._table)
                self._table.vacuum(arguments.keep, time.time())
        self._report.result = {"rows_stored": rows, "batches": count, "merged_before": merged}

    def _check(self, version: Version) -> None:
        known = version.state.get("layout")
        if known is not None and known != self._layout:
            names = [name for name in self._layout if known.get(name) != self._layout[name]]
            raise ArchiveError(
                f"{self._table.root} was made with another {' and '.join(f'--{name}' for name in names)}:"
                f" {', '.join(str(known.get(name)) for name in names)}"
            )

    def _write(self, version: Version, start: Positions, end: Positions) -> list[WrittenFile]:
        """The files of one batch; none if nothing matches."""
        wanted = {queue for queue in end if end[queue] > start[queue]}
        label = f"{version.number + 1:08d}-{uuid.uuid4().hex[:8]}"
        settings = settings_of(self._arguments, label, tuple(self._partitions))
        messages = self._messages(
            {queue: start[queue] for queue in wanted}, {queue: end[queue] for queue in wanted}
        )
        with show_tasks(self._spark):
            rows = messages.mapInArrow(partial(write_partitions, settings), WRITTEN_DDL).collect()
        return [WrittenFile(*row) for row in rows]

    def _publish(
        self, version: Version, files: Sequence[WrittenFile], end: Positions, incarnations: Incarnations
    ) -> Version:
        """A version that has the files and says how far they reach."""
        before = version.state.get("positions", {})
        known = decode_incarnations(version.state.get("incarnations", {}))
        kept = without(from_stream_offset(before), made_again(known, incarnations))
        state = {
            "positions": to_stream_offset({**kept, **end}),
            "incarnations": encode_incarnations({**known, **incarnations}),
            "layout": self._layout,
        }

        def change(base: Version) -> Version:
            # Versions of a compaction that ran beside us are welcome, those of another archiver are not.
            if base.state.get("positions", {}) != before:
                raise ArchiveError(f"another job archives to {self._table.root}")
            return appended(base, files, state, int(time.time() * 1000))

        return self._table.update(change)

    def _messages(self, start: Positions, end: Positions) -> DataFrame:
        from pyspark.sql import functions as f

        arguments = self._arguments
        queues: dict[str, list[str]] = {}
        for queue in sorted(start):
            queues.setdefault(queue.topic, []).append(queue_name(queue))
        reader = (
            self._spark.read.format("protomq")
            .option("protomq.namesrv", arguments.namesrv)
            .option("assign", json.dumps(queues))
            .option("startingOffsets", json.dumps(to_stream_offset(start)))
            .option("endingOffsets", json.dumps(to_stream_offset(end)))
            .option("columns", arguments.columns)
            .option("failOnDataLoss", str(not arguments.skip_lost).lower())
        )
        if arguments.min_tasks:
            reader = reader.option("minPartitions", str(arguments.min_tasks))
        if arguments.tags:
            reader = reader.option("tags", arguments.tags)
        # A column of the same name as a folder is in the name of the folder already.
        folders = [
            f"CAST(({sql}) AS STRING) AS {_FOLDER}{name}" for name, sql in self._partitions.items()
        ]
        placed = reader.load().selectExpr(*split_sql(arguments.select), *folders)
        kept = [
            name
            for name in placed.columns
            if name not in self._partitions and not name.startswith(_FOLDER)
        ]
        result = placed.select(
            *kept, *(f.col(_FOLDER + name).alias(name) for name in self._partitions)
        )
        if arguments.shuffle:
            result = result.repartition(*self._partitions)
        return result


def settings_of(
    arguments: argparse.Namespace, label: str, partitions: tuple[str, ...] = ()
) -> FileSettings:
    """How the files of a run are written."""
    return FileSettings(
        arguments.output, label, partitions, arguments.file_size << 20, arguments.compression
    )


def compact(spark: SparkSession, arguments: argparse.Namespace, table: ArchiveTable) -> int:
    """Merges small files, on the executors; how many there are fewer."""

    def on_executors(merge: Merge, jobs: Sequence[Job]) -> list[WrittenFile]:
        with show_tasks(spark):
            return spark.sparkContext.parallelize(jobs, len(jobs)).map(merge).collect()

    return compact_with(on_executors, arguments, table)


def compact_with(
    run_all: Callable[[Merge, Sequence[Job]], list[WrittenFile]],
    arguments: argparse.Namespace,
    table: ArchiveTable,
) -> int:
    """The same, wherever `run_all` runs the merges."""
    version = table.newest()
    groups = merge_groups(version.files, arguments.file_size << 20, arguments.compact_files)
    if not groups or not arguments.compact_files:
        return 0
    settings = settings_of(arguments, f"{version.number + 1:08d}-{uuid.uuid4().hex[:8]}")
    made = run_all(partial(merge_files, settings), list(enumerate(groups)))
    merged = dict(zip(made, groups, strict=True))
    table.update(lambda base: replaced(base, merged, int(time.time() * 1000)))
    say(f"compacted: {sum(map(len, groups))} files are {len(groups)}")
    return sum(map(len, groups)) - len(groups)


# -- which messages ----------------------------------------------------------------------------------------------------------


def see_now(cluster: Cluster, subscription: Subscription, all_brokers: bool) -> Seen:
    """The queues as they are now, new ones too. `all_brokers`: one that is away is waited for; raises BrokerMissingError."""
    cluster.refresh()
    return cluster.see((cluster.all_queues if all_brokers else cluster.queues)(subscription))


def starts(version: Version, seen: Seen, starting: str, skip_lost: bool) -> Positions:
    """Where each queue goes on. Raises DataLossError if messages are gone that were to be stored, unless `skip_lost`."""
    archived = from_stream_offset(version.state.get("positions", {}))
    gone = made_again(decode_incarnations(version.state.get("incarnations", {})), seen.incarnations)
    for share in gone:
        _lose(say_made_again(share), skip_lost, "continues at its beginning")
    known = without(archived, gone)
    start: Positions = {}
    for queue, there in seen.ranges.items():
        first = there.min_offset
        if starting == "latest" and not version.state:
            first = there.end_offset
        position = known.get(queue, first)
        where = f"{queue.topic}/{queue_name(queue)}"
        if position < there.min_offset:
            _lose(f"{where}: offsets {position} to {there.min_offset - 1} are deleted", skip_lost)
            position = there.min_offset
        if position > there.end_offset:
            _lose(f"{where} ends at {there.end_offset}, but {position} are archived", skip_lost)
        start[queue] = position
    return start


def _lose(text: str, skip_lost: bool, instead: str = "continues without them") -> None:
    if not skip_lost:
        raise DataLossError(f"{text} (--skip-lost {instead})")
    say(f"messages are lost: {text}")


def parse_partitions(given: Sequence[str]) -> dict[str, str]:
    """NAME=SQL. Raises ValueError."""
    parsed: dict[str, str] = {}
    for text in given:
        name, equals, sql = text.partition("=")
        if not (name.strip().isidentifier() and equals and sql.strip()) or name.strip() in parsed:
            raise ValueError(f"--partition must be NAME=SQL, each name once, not {text!r}")
        parsed[name.strip()] = sql.strip()
    return parsed


def split_sql(text: str) -> list[str]:
    """SQL expressions at the commas that are in no bracket and no string."""
    parts, depth, quote, start = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"`":
            quote = character
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]
