"""The format `protomq-log`: commit-log segments as a table, without a broker.

    spark.read.format("protomq-log").load("/var/lib/protomq/store")          # or a copy, or s3://..., or one segment
    spark.read.format("protomq-log").option("report", "damage").load(...)    # what of the log does not hold

Rules:
- A task reads whole appends and checks every seal, so no torn, stale or damaged append gets into a table.
- Damage is skipped and said in the executor's log; `report=damage` makes a table of it, `failOnDamage=true` an error. An
  unfinished append at the end of the newest segment is no damage: a live log is being written.
- Within a task the messages of one topic come in the order of the log; those of several topics stand in stretches.
- Half messages, and messages that were not due, are no rows: when they are committed, or due, the log has a copy of them.
- Memory is bounded by the stretch that is read at a time (8 MiB, more for a larger append), whatever the segment's size.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from protomq import MessageQueue
from protomq.wire.log_walk import decode_seal
from protomq.wire.record import SEAL_SIZE_BYTES

from .layout import trailers_of
from .options import OptionError, _columns, _Given
from .records import Decoding, decode_records
from .schema import COLUMN_NAMES, ddl_of
from .segments import (
    STRETCH_MAX_BYTES,
    Damage,
    by_topic,
    find_append,
    in_queues,
    walk,
)

logger = logging.getLogger("protomq_spark")

STRETCH_BYTES: Final = 8 << 20
SPLIT_STEP_BYTES: Final = 32 << 10
DAMAGE_DDL: Final = (
    "segment STRING, start_position BIGINT, end_position BIGINT, reason STRING, tail BOOLEAN"
)
_DAMAGE_SCHEMA: Final = pa.schema(
    [("segment", pa.string()), ("start_position", pa.int64()), ("end_position", pa.int64()),
     ("reason", pa.string()), ("tail", pa.bool_())]
)  # fmt: skip


class DamagedLogError(RuntimeError):
    """A part of the log does not hold, and failOnDamage is true."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of the format."""

    path: str
    topics: frozenset[str]
    columns: tuple[str, ...]
    report: Literal["messages", "damage"]
    fail_on_damage: bool
    broker: str
    min_partitions: int


def parse_log_options(options: Mapping[str, str]) -> LogOptions:
    """Raises OptionError."""
    given = _Given(options, {"subscribe": "topic"})
    path = given.text("path")
    if not path:
        raise OptionError('a path is needed: load("/var/lib/protomq/store")')
    parsed = LogOptions(
        path,
        frozenset(t.strip() for t in given.text("topic").split(",") if t.strip()),
        _columns(given),
        given.choice("report", "messages", ("messages", "damage")),
        given.boolean("failOnDamage", False),
        given.text("broker"),
        given.integer("minPartitions", 0),
    )
    given.refuse_the_rest("source protomq-log")
    return parsed


class Part(NamedTuple):
    """A task: a stretch of a segment, from an append to an append."""

    path: str
    base_position: int
    start: int
    end: int
    crc: int | None
    last: bool
    """In the newest segment, whose end may be unfinished."""


class LogPartition(InputPartition):
    """A task."""

    def __init__(self, value: Part) -> None:
        super().__init__(value)
        self.value = value


class ProtomqLogDataSource(DataSource):
    """spark.read.format("protomq-log")."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "protomq-log"

    def schema(self) -> str:
        """That of the source `protomq`, or of the damage report."""
        options = parse_log_options(self.options)
        return DAMAGE_DDL if options.report == "damage" else ddl_of(options.columns)

    def reader(self, schema: StructType) -> LogReader:
        """A batch query; logs have no streams, a broker has."""
        options = parse_log_options(self.options)
        names = tuple(schema.names)
        unknown = [name for name in names if name not in COLUMN_NAMES]
        if unknown and options.report == "messages":
            raise OptionError(f"the schema names {', '.join(unknown)}")
        return LogReader(options, names)


class LogReader(DataSourceReader):
    """Reads segments."""

    def __init__(self, options: LogOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> list[InputPartition]:
        """One task for each segment, or more where `minPartitions` asks for more."""
        segments = list_segments(self._options.path)
        wanted = -(-self._options.min_partitions // len(segments))
        parts: list[Part] = []
        for path, base_position, size in segments:
            last = path == segments[-1][0]
            whole = Part(path, base_position, 0, size, None, last)
            parts += split_part(whole, wanted) if wanted > 1 else [whole]
        return [LogPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """On an executor."""
        part: Part = partition.value
        if self._options.report == "damage":
            yield damage_table(part)
            return
        for item in read_part(part):
            if isinstance(item, Damage):
                self._report(part, item)
                continue
            data, starts, ends = item
            yield from self._decode(data, starts, ends)

    def _decode(
        self, data: bytes, starts: np.ndarray, ends: np.ndarray
    ) -> Iterator[pa.RecordBatch]:
        options = self._options
        decoding = Decoding(
            self._columns, corrupt_records="fail" if options.fail_on_damage else "null"
        )
        queued = in_queues(data, ends)
        starts, ends = starts[queued], ends[queued]
        for topic, rows in by_topic(data, starts, ends):
            if options.topics and topic not in options.topics:
                continue
            # Bodies of a compressed or damaged record are Python objects: not too many of them at once.
            for some in np.array_split(rows, -(-len(rows) // 32_768)):
                queue = MessageQueue(topic, options.broker, 0)
                offsets = _queue_offsets(data, ends[some])
                yield decode_records(data, starts[some], ends[some], offsets, queue, decoding)

    def _report(self, part: Part, damage: Damage) -> None:
        if damage.tail and part.last:
            return
        text = f"{part.path}: positions {damage.start_position} to {damage.end_position - 1}: {damage.reason}"
        if self._options.fail_on_damage:
            raise DamagedLogError(text)
        logger.warning("damage in the log is skipped: %s", text)


def _queue_offsets(data: bytes, ends: np.ndarray) -> np.ndarray:
    return trailers_of(np.frombuffer(data, np.uint8), ends)["queue_offset"].astype(np.int64)


def damage_table(part: Part) -> pa.RecordBatch:
    """The damaged ranges of a task."""
    found = [item for item in read_part(part) if isinstance(item, Damage)]
    return pa.RecordBatch.from_pylist(
        [{"segment": part.path.rpartition("/")[2], **item._asdict()} for item in found],
        schema=_DAMAGE_SCHEMA,
    )


# -- files -----------------------------------------------------------------------------------------------------------------


def list_segments(path: str) -> list[tuple[str, int, int]]:
    """(path, position of the first octet, size) of each segment: of a store's folder, its commitlog, or one file. Raises OptionError."""
    filesystem, root = _open(path)
    info = filesystem.get_file_info(root)
    if info.type == pafs.FileType.File:
        found = [info]
    else:
        if filesystem.get_file_info(f"{root}/commitlog").type == pafs.FileType.Directory:
            root = f"{root}/commitlog"
        selector = pafs.FileSelector(root, allow_not_found=True)
        found = [
            item for item in filesystem.get_file_info(selector) if item.type == pafs.FileType.File
        ]
    prefix = path[: path.index("://") + 3] if "://" in path else ""
    segments = [
        (prefix + item.path, int(item.base_name), item.size)
        for item in found
        if re.fullmatch(r"\d{20}", item.base_name)
    ]
    if not segments:
        raise OptionError(f"no commit-log segment (a file of 20 digits) in {path!r}")
    return sorted(segments, key=lambda segment: segment[1])


def _open(path: str) -> tuple[pafs.FileSystem, str]:
    if "://" in path or path.startswith("file:"):
        filesystem, inner = pafs.FileSystem.from_uri(path)
        return filesystem, inner.rstrip("/")
    return pafs.LocalFileSystem(), path.rstrip("/")


def split_part(whole: Part, count: int) -> list[Part]:
    """A segment in up to `count` parts that end where an append ends: found by walking it once, on the driver."""
    ends = list(_append_ends(whole))
    if not ends:
        return [whole]
    last = ends[-1][0]  # What is written of it: a segment is preallocated.
    bounds: list[tuple[int, int | None]] = [(whole.start, whole.crc)]
    for end, crc in ends[:-1]:
        if len(bounds) < count and end >= last * len(bounds) // count:
            bounds.append((end, crc))
    starts = [start for start, _ in bounds]
    return [
        whole._replace(start=start, end=end, crc=crc, last=whole.last and end == whole.end)
        for (start, crc), end in zip(bounds, [*starts[1:], whole.end], strict=True)
    ]


def _append_ends(part: Part) -> Iterator[tuple[int, int]]:
    """(end, CRC) of appends up to the first damage, not all of them."""
    filesystem, path = _open(part.path)
    position, crc, kept = part.start, part.crc, part.start
    size = STRETCH_BYTES
    with filesystem.open_input_file(path) as file:
        while position < part.end:
            data = file.read_at(min(size, part.end - position), position)
            window = walk(data, part.base_position + position, crc, whole=False)
            for end, end_crc in window.appends:
                if position + end - kept >= SPLIT_STEP_BYTES:
                    kept = position + end
                    yield kept, end_crc
            if window.reason or window.finished or position + len(data) >= part.end:
                return
            size = STRETCH_BYTES if window.walked_bytes else 2 * size
            position, crc = position + window.walked_bytes, window.crc


Stretch = tuple[bytes, np.ndarray, np.ndarray]


def read_part(part: Part) -> Iterator[Stretch | Damage]:
    """The records of a task, stretch by stretch (data, starts, ends of record fields), and what does not hold."""
    filesystem, path = _open(part.path)
    position, crc, size = part.start, part.crc, STRETCH_BYTES
    with filesystem.open_input_file(path) as file:
        while position < part.end:
            data = file.read_at(min(size, part.end - position), position)
            whole = position + len(data) >= part.end
            base = part.base_position + position
            window = walk(data, base, crc, whole=whole)
            if window.starts:
                starts, ends = np.array(window.starts, np.int64), np.array(window.ends, np.int64)
                yield data, starts, ends
            if window.walked_bytes:
                position, crc, size = position + window.walked_bytes, window.crc, STRETCH_BYTES
            if window.finished:
                return
            if window.reason:
                damage, following = _damage_at(file, part, position, window.reason)
                yield damage
                if following is None:
                    return
                position, crc, size = *following, STRETCH_BYTES
            elif not window.walked_bytes:
                size *= 2  # One append is larger than the stretch.
                if size > 4 * STRETCH_MAX_BYTES:
                    raise DamagedLogError(f"{part.path}: no append ends behind {base}")


def _damage_at(
    file: pa.NativeFile, part: Part, position: int, reason: str
) -> tuple[Damage, tuple[int, int | None] | None]:
    """The damaged range that begins at `position`, and (position, CRC before it) of the append behind it, if there is one."""
    at = position
    keep = STRETCH_MAX_BYTES
    while at < part.end:
        data = file.read_at(min(2 * keep, part.end - at), at)
        found = find_append(data, part.base_position + at, 1 if at == position else 0)
        if found is not None:
            begins = at + found
            before = decode_seal(data, found - SEAL_SIZE_BYTES)
            assert before is not None
            return (
                Damage(part.base_position + position, part.base_position + begins, reason, False),
                (begins, before.crc32c),
            )
        if at + len(data) >= part.end:
            break
        at += keep
    return Damage(part.base_position + position, part.base_position + part.end, reason, True), None
