"""From raw records to an Arrow RecordBatch. Pure: bytes in, columns out.

Rules:
- Numbers, times and lengths come from the layout by numpy, bodies and texts by one Arrow gather. No Python object is made for a
  message, except a view of its front for the CRC check, and for compressed bodies.
- Keys, tags, properties and attributes are looked at only where a column asks for them.
- Records that are laid out in another way are parsed by protobuf, with the same result (a property test says so).
- The CRC-32C covers body, key, tag, properties and attributes. If it is wrong, none of these is handed out: there is an
  error, or they are null, or the row is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from protomq import MessageQueue
from protomq.errors import CompressionError, CorruptMessageError
from protomq.records import DECOMPRESSED_SIZE_MAX_BYTES, decompress
from protomq.wire.record import (
    FIXED_TRAILER_SIZE_BYTES,
    FLAG_COMPRESSION_MASK,
    FLAG_TRANSIT,
    NO_QUEUE_OFFSET,
)
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

from .checksums import crc32c_of_pieces
from .layout import (
    Fronts,
    Located,
    Positions,
    Spans,
    Transits,
    UnusualRecordError,
    locate,
    read_fronts,
    read_transits,
)
from .schema import TIMESTAMP_TYPE_STORED, arrow_schema

CorruptPolicy = Literal["fail", "null", "skip"]

_DAMAGE: Final = "its CRC-32C is wrong: it is not what its producer wrote"
_FRONT_COLUMNS: Final = frozenset(
    ("key", "tags", "properties", "headers", "born_host", "sharding_key")
)

_OF_PRODUCER: Final = _FRONT_COLUMNS | {"body"}
"""What the CRC covers."""

_TRANSIT_COLUMNS: Final = frozenset(
    ("reconsume_times", "origin_topic", "origin_queue_id", "origin_queue_offset", "origin_timestamp",
     "last_error", "replayed_group")
)  # fmt: skip
_ATTEMPT_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Decoding:
    """What to make of records."""

    columns: tuple[str, ...]
    check_crc: bool = True
    corrupt_records: CorruptPolicy = "fail"
    tags: frozenset[str] = frozenset()
    """Only these; the broker compares hashes, here the tags themselves are compared."""


def decode_records(
    raw: bytes,
    starts: Positions,
    ends: Positions,
    queue_offsets: Positions,
    queue: MessageQueue,
    decoding: Decoding,
) -> pa.RecordBatch:
    """The record fields [start, end) of `raw`, all of one topic, as a batch.

    Raises CorruptMessageError, or UnusualRecordError for what is no record at all.
    """
    columns = decoding.columns
    located = locate(raw, starts, ends, len(queue.topic.encode()))
    damaged = np.empty(0, np.int64)
    if decoding.tags or not _OF_PRODUCER.isdisjoint(columns):
        damaged = _damaged_rows(raw, located, decoding.check_crc)
    if len(damaged):
        if decoding.corrupt_records == "fail":
            raise _corrupt(queue, queue_offsets, int(damaged[0]), _DAMAGE)
        if decoding.corrupt_records == "skip":
            kept = np.setdiff1d(np.arange(len(ends)), damaged)
            located, queue_offsets, damaged = located.rows(kept), queue_offsets[kept], damaged[:0]
    count = len(located.ends)
    if not len(damaged):
        made, unpackable = _of_producer(raw, located, queue_offsets, queue, decoding)
    else:
        sound = np.setdiff1d(np.arange(count), damaged)
        made, unpackable = _of_producer(
            raw, located.rows(sound), queue_offsets[sound], queue, decoding
        )
        made = {name: _spread(array, sound, count) for name, array in made.items()}
        unpackable = sound[unpackable].tolist()
    trailers = located.trailers
    others: dict[str, Callable[[], pa.Array]] = {
        "topic": lambda: pa.repeat(queue.topic, count),
        "broker": lambda: pa.repeat(queue.broker_name, count),
        "queue_id": lambda: pa.array(trailers["queue_id"].astype(np.int32)),
        "queue_offset": lambda: pa.array(queue_offsets.astype(np.int64)),
        "timestamp": lambda: _timestamps(trailers["store_time_ms"]),
        "timestamp_type": lambda: _constant(TIMESTAMP_TYPE_STORED, count),
        "message_id": lambda: _message_ids(trailers),
        "born_timestamp": lambda: _timestamps(trailers["born_time_ms"]),
    }
    if not _TRANSIT_COLUMNS.isdisjoint(columns):
        made |= _of_transit(raw, located, columns)
    arrays = [made[name] if name in made else others[name]() for name in columns]
    batch = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))
    keep = _kept_rows(count, made.get("tags"), decoding, damaged, unpackable)
    return batch if keep is None else batch.filter(keep)


def _of_producer(
    raw: bytes,
    located: Located,
    queue_offsets: Positions,
    queue: MessageQueue,
    decoding: Decoding,
) -> tuple[dict[str, pa.Array], list[int]]:
    """The columns of what producers write, as far as they are asked for; and the rows whose body cannot be unpacked."""
    columns = decoding.columns
    made: dict[str, pa.Array] = {}
    unpackable: list[int] = []
    if decoding.tags or not _FRONT_COLUMNS.isdisjoint(columns):
        made = _texts(raw, located, columns, bool(decoding.tags))
    if "body" in columns:
        made["body"], unpackable = _bodies(raw, located, queue_offsets, queue, decoding)
    return made, unpackable


def _kept_rows(
    count: int,
    tags: pa.Array | None,
    decoding: Decoding,
    damaged: NDArray[np.int64],
    unpackable: Sequence[int],
) -> pa.Array | None:
    keep = np.ones(count, bool)
    if decoding.tags and tags is not None:
        keep &= np.isin(np.asarray(tags.fill_null("").to_pylist()), list(decoding.tags))
        keep[damaged] = True  # Nobody can say what tag they had.
    if decoding.corrupt_records == "skip":
        keep[list(unpackable)] = False
    return None if keep.all() else pa.array(keep)


# -- damage ------------------------------------------------------------------------------------------------------------


def _damaged_rows(raw: bytes, located: Located, check_crc: bool) -> NDArray[np.int64]:
    """Rows that are not what their producers wrote; without the check those at least that cannot be read."""
    damaged = located.body_starts == located.record_starts
    if check_crc:
        found = crc32c_of_pieces(raw, located.record_starts, located.limits)
        damaged |= found != located.trailers["crc32c"]
    return np.flatnonzero(damaged)


def _spread(array: pa.Array, rows: NDArray[np.int64], count: int) -> pa.Array:
    """The values at these of `count` rows, null at all others."""
    picks = np.full(count, -1, np.int64)
    picks[rows] = np.arange(len(rows))
    return array.take(pa.array(picks, mask=picks < 0))


def _corrupt(
    queue: MessageQueue, queue_offsets: Positions, row: int, what: str
) -> CorruptMessageError:
    offset = int(queue_offsets[row])
    where = f"{queue.topic}/{queue.broker_name}/{queue.queue_id}@{offset}"
    return CorruptMessageError(
        f"{where}: {what} (option corruptRecords: null or skip continues without it)",
        metadata={
            "topic": queue.topic,
            "broker_name": queue.broker_name,
            "queue_id": str(queue.queue_id),
            "queue_offset": str(offset),
        },
    )


# -- bodies ------------------------------------------------------------------------------------------------------------


def _bodies(
    raw: bytes,
    located: Located,
    queue_offsets: Positions,
    queue: MessageQueue,
    decoding: Decoding,
) -> tuple[pa.Array, list[int]]:
    """The bodies, and which rows cannot be unpacked (null in the array)."""
    starts, ends = located.body_starts, located.fronts
    codecs = located.trailers["flags"] & FLAG_COMPRESSION_MASK
    unpacked: dict[int, bytes | None] = {}
    for row in np.flatnonzero(codecs).tolist():
        body = raw[int(starts[row]) : int(ends[row])]
        try:
            unpacked[row] = decompress(body, int(codecs[row]), DECOMPRESSED_SIZE_MAX_BYTES)
        except CompressionError as error:
            if decoding.corrupt_records == "fail":
                raise _corrupt(queue, queue_offsets, row, str(error)) from error
            unpacked[row] = None
    plain = gather(raw, located.data, starts, ends, pa.binary())
    if not unpacked:
        return plain, []
    rows: list[bytes | None] = plain.to_pylist()
    for row, unpacked_body in unpacked.items():
        rows[row] = unpacked_body
    return pa.array(rows, pa.binary()), [row for row, body in unpacked.items() if body is None]


def gather(
    raw: bytes | memoryview,
    data: NDArray[np.uint8],
    starts: Positions,
    ends: Positions,
    kind: pa.DataType,
    rows: NDArray[np.int64] | None = None,
    count: int = 0,
) -> pa.Array:
    """The pieces [start, end) of the buffer as one Arrow array, or, with `rows`, as an array of `count` with null elsewhere.

    The buffer is taken as an array of pieces and gaps in turn, of which the pieces are picked: one copy, in C.
    """
    pieces = len(starts)
    if rows is not None:
        picks = np.full(count, -1, np.int64)
        picks[rows] = np.arange(pieces) * 2
        picked = pa.array(picks, mask=picks < 0)
    else:
        picked = pa.array(np.arange(pieces) * 2)
    if not pieces:
        return pa.nulls(count, kind)
    if (starts[1:] < ends[:-1]).any() or ends[-1] > np.iinfo(np.int32).max:
        raise UnusualRecordError("records that do not stand in order")
    bounds = np.empty(2 * pieces, np.int32)
    bounds[0::2], bounds[1::2] = starts, ends
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(raw)]
    return pa.Array.from_buffers(kind, 2 * pieces - 1, buffers).take(picked)


# -- texts -------------------------------------------------------------------------------------------------------------


def _texts(
    raw: bytes, located: Located, columns: Iterable[str], needs_tags: bool
) -> dict[str, pa.Array]:
    wanted = _FRONT_COLUMNS.intersection(columns) | ({"tags"} if needs_tags else set())
    try:
        fronts = read_fronts(located)
    except UnusualRecordError:
        return _parsed_texts(raw, located, wanted)
    return _gathered_texts(raw, located, fronts, wanted)


def _gathered_texts(
    raw: bytes, located: Located, fronts: Fronts, wanted: Iterable[str]
) -> dict[str, pa.Array]:
    count, data = len(located.ends), located.data

    def text(spans: Spans) -> pa.Array:
        return gather(raw, data, spans.starts, spans.ends, pa.string(), spans.rows, count)

    def pieces(spans: Spans, kind: pa.DataType) -> pa.Array:
        return gather(raw, data, spans.starts, spans.ends, kind)

    def bounds() -> NDArray[np.int32]:
        per_row = np.bincount(fronts.names.rows, minlength=count)
        return np.concatenate(([0], np.cumsum(per_row))).astype(np.int32)

    made: dict[str, Callable[[], pa.Array]] = {
        "key": lambda: text(fronts.keys),
        "tags": lambda: text(fronts.tags),
        "sharding_key": lambda: text(fronts.sharding_keys),
        "born_host": lambda: text(fronts.born_hosts),
        "properties": lambda: pa.MapArray.from_arrays(
            pa.array(bounds()),
            pieces(fronts.names, pa.string()),
            pieces(fronts.values, pa.string()),
        ),
        "headers": lambda: _headers(
            bounds(), pieces(fronts.names, pa.string()), pieces(fronts.values, pa.binary())
        ),
    }
    return {name: made[name]() for name in wanted}


def _headers(bounds: NDArray[np.int32], names: pa.Array, values: pa.Array) -> pa.Array:
    """Kafka's headers: null where there are none."""
    kind = arrow_schema(("headers",)).field(0).type
    entries = pa.StructArray.from_arrays([names, values], fields=list(kind.value_type))
    none = np.diff(bounds) == 0
    return pa.ListArray.from_arrays(pa.array(bounds), entries, type=kind, mask=pa.array(none))


def _parsed_texts(raw: bytes, located: Located, wanted: Iterable[str]) -> dict[str, pa.Array]:
    """The same by protobuf, record by record."""
    from protomq.v1.record_pb2 import Record

    rows: dict[str, list[Any]] = {name: [] for name in _FRONT_COLUMNS}
    for start, end in zip(located.record_starts.tolist(), located.ends.tolist(), strict=True):
        record = Record.FromString(raw[start:end])
        properties = sorted(record.properties.items())
        rows["key"].append(record.keys[0] if record.keys else None)
        rows["tags"].append(record.tag or None)
        rows["sharding_key"].append(record.attributes.sharding_key or None)
        rows["born_host"].append(record.attributes.born_host or None)
        rows["properties"].append(properties)
        headers = [{"key": name, "value": value.encode()} for name, value in properties]
        rows["headers"].append(headers or None)
    return {name: pa.array(rows[name], arrow_schema((name,)).field(0).type) for name in wanted}


# -- where moved messages come from -------------------------------------------------------------------------------------


def _of_transit(raw: bytes, located: Located, columns: Iterable[str]) -> dict[str, pa.Array]:
    """The columns of what the broker wrote about a message that it moved, as far as they are asked for.

    A message that was never moved has no attempts and no origin. Of a record that is so damaged that its transit cannot be found,
    all are null.
    """
    wanted = _TRANSIT_COLUMNS.intersection(columns)
    count = len(located.ends)
    moved = (located.trailers["flags"] & FLAG_TRANSIT) != 0
    if not moved.any():
        none = wanted - {"reconsume_times"}
        made = {name: pa.nulls(count, arrow_schema((name,)).field(0).type) for name in none}
        return made | ({"reconsume_times": _constant(0, count)} if "reconsume_times" in wanted else {})
    try:
        transits = read_transits(located)
    except UnusualRecordError:
        return _parsed_transits(raw, located, wanted)
    return _gathered_transits(raw, located, transits, moved, wanted)


def _gathered_transits(
    raw: bytes, located: Located, transits: Transits, moved: NDArray[np.bool_], wanted: Iterable[str]
) -> dict[str, pa.Array]:
    count, rows = len(located.ends), transits.rows
    nowhere = transits.origin_queue_offsets == NO_QUEUE_OFFSET

    def text(spans: Spans) -> pa.Array:
        # A text that is empty is not written, and is the same as none.
        return gather(raw, located.data, spans.starts, spans.ends, pa.string(), spans.rows, count)

    def numbers(values: NDArray[Any], kind: pa.DataType, nulls: NDArray[np.bool_] | None = None) -> pa.Array:
        column = np.zeros(count, np.int64)
        column[rows] = values
        empty = np.ones(count, np.bool_)
        empty[rows] = False if nulls is None else nulls
        return pa.array(column, pa.int64(), mask=empty).cast(kind)

    def attempts() -> pa.Array:
        column = np.zeros(count, np.int32)
        column[rows] = np.minimum(transits.attempts, _ATTEMPT_MAX)
        damaged = moved.copy()
        damaged[rows] = False
        return pa.array(column, mask=damaged)

    made: dict[str, Callable[[], pa.Array]] = {
        "reconsume_times": attempts,
        "origin_topic": lambda: text(transits.origin_topics),
        "origin_queue_id": lambda: numbers(transits.origin_queue_ids.astype(np.int32), pa.int32()),
        "origin_queue_offset": lambda: numbers(
            np.where(nowhere, np.uint64(0), transits.origin_queue_offsets).astype(np.int64), pa.int64(), nowhere
        ),
        "origin_timestamp": lambda: numbers(
            transits.first_store_times_ms.astype(np.int64) * 1000, pa.timestamp("us", "UTC")
        ),
        "last_error": lambda: text(transits.last_errors),
        "replayed_group": lambda: text(transits.replayed_groups),
    }
    return {name: made[name]() for name in wanted}


def _parsed_transits(raw: bytes, located: Located, wanted: Iterable[str]) -> dict[str, pa.Array]:
    """The same by protobuf, transit by transit. One that does not parse is null."""
    from google.protobuf.message import DecodeError

    from protomq.v1.record_pb2 import Transit

    rows: dict[str, list[Any]] = {name: [] for name in _TRANSIT_COLUMNS}
    moved = (located.trailers["flags"] & FLAG_TRANSIT) != 0
    damaged = moved & (located.body_starts == located.record_starts)
    for row in range(len(moved)):
        transit = Transit()
        if moved[row] and not damaged[row]:
            size, start = read_varint(raw, int(located.limits[row]) + 1, LENGTH_SIZE_MAX_BYTES)
            try:
                transit = Transit.FromString(raw[start : start + size])
            except DecodeError:
                damaged[row] = True
        known = moved[row] and not damaged[row]
        offset = transit.origin_queue_offset
        values: dict[str, Any] = {
            "origin_topic": transit.origin_topic or None,
            "origin_queue_id": transit.origin_queue_id,
            "origin_queue_offset": None if offset == NO_QUEUE_OFFSET else offset,
            "origin_timestamp": transit.first_store_time_ms * 1000,
            "last_error": transit.last_error or None,
            "replayed_group": transit.replayed_group or None,
        }
        for name, value in values.items():
            rows[name].append(value if known else None)
        attempt = min(transit.attempt, _ATTEMPT_MAX)
        rows["reconsume_times"].append(None if damaged[row] else attempt)
    return {name: pa.array(rows[name], arrow_schema((name,)).field(0).type) for name in wanted}


# -- numbers -----------------------------------------------------------------------------------------------------------


def _timestamps(milliseconds: NDArray[Any]) -> pa.Array:
    values = milliseconds.astype(np.int64) * 1000
    return pa.Array.from_buffers(
        pa.timestamp("us", "UTC"), len(values), [None, pa.py_buffer(values)]
    )


def _constant(value: int, count: int) -> pa.Array:
    return pa.array(np.full(count, value, np.int32))


def _message_ids(trailers: NDArray[Any]) -> pa.Array:
    """40 hex digits each: producer id, epoch, sequence."""
    count = len(trailers)
    octets = np.empty((count, 20), np.uint8)
    octets[:, :8] = trailers["producer_id"].astype(">u8").view(np.uint8).reshape(count, 8)
    octets[:, 8:12] = trailers["producer_epoch"].astype(">u4").view(np.uint8).reshape(count, 4)
    octets[:, 12:] = trailers["sequence"].astype(">u8").view(np.uint8).reshape(count, 8)
    digits = np.empty((count, 40), np.uint8)
    digits[:, 0::2], digits[:, 1::2] = (
        _hex_digits(octets >> np.uint8(4)),
        _hex_digits(octets & np.uint8(15)),
    )
    bounds = np.arange(0, 40 * count + 1, 40, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), count, [None, pa.py_buffer(bounds), pa.py_buffer(digits)]
    )


def _hex_digits(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Computed, not looked up: numpy does that many octets at a time."""
    letters = (nibbles > 9).view(np.uint8) * np.uint8(ord("A") - ord("9") - 1)
    return nibbles + letters + np.uint8(ord("0"))


assert FIXED_TRAILER_SIZE_BYTES == 103  # What `FIXED_TRAILER_DTYPE` is made for.
