"""Where everything stands in many records at once, as arrays: the vectorised reading of the record layout. Pure.

    record field   0A size | 0A size body | keys 12.. tag 1A.. properties 22.. attributes 2A.. | topic 3A n .. | 103 bytes of trailer
                   ^ field   ^ body                                                            ^ limit         ^              ^ end

A copy that the broker moved has its transit (32 size ..) at the limit, before the topic. It says where the message comes from.
Positions count from the start of the buffer. A foreign client may have written records otherwise. Then `UnusualRecordError` says
that the layout does not hold, and `records.py` parses those records with protobuf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq.wire.record import (
    DUE_TIME_SIZE_BYTES,
    FIXED_TRAILER_SIZE_BYTES,
    FLAG_DUE_TIME,
    FLAG_TRANSIT,
    FRONT_TAGS,
    RECORD_TAG,
    TRANSIT_TAG,
)
from protomq.wire.trailer_arrays import FIXED_TRAILER_DTYPE
from protomq.wire.varint_arrays import read_lengths

Positions = NDArray[np.int64]

_KEY, _TAG, _PROPERTY, _ATTRIBUTES = 0x12, 0x1A, 0x22, 0x2A
_FIRST, _SECOND = 0x0A, 0x12
_ORIGIN_QUEUE_ID, _ORIGIN_QUEUE_OFFSET, _ATTEMPT = 0x15, 0x19, 0x20
_FIRST_STORE_TIME, _LAST_ERROR, _REPLAYED_GROUP, _CONSUMED_TOPIC = 0x29, 0x32, 0x3A, 0x42
_IS_FRONT = np.zeros(256, np.bool_)
_IS_FRONT[list(FRONT_TAGS)] = True


class UnusualRecordError(ValueError):
    """A record that is not laid out as protomq's clients write it; protobuf can read it all the same."""


class Located(NamedTuple):
    """Bodies and trailers. `fronts` is where keys and the like begin, `limits` where they end: there stands the topic, or what the broker
    writes before it. A record is damaged if it does not begin with a body that fits, or lacks a transit that it should have. Then its
    body counts from the record's start.
    """

    data: NDArray[np.uint8]
    record_starts: Positions
    body_starts: Positions
    fronts: Positions
    limits: Positions
    ends: Positions
    trailers: NDArray[Any]

    def rows(self, picked: Positions) -> Located:
        """Some of the records."""
        return Located(self.data, *(column[picked] for column in self[1:]))


class Spans(NamedTuple):
    """Pieces of the buffer that belong to rows; a row may have none or, where said, many. In the order of the buffer."""

    rows: Positions
    starts: Positions
    ends: Positions


class Fronts(NamedTuple):
    """What stands between body and topic. `keys` are first keys; the n-th property is `names[n]`, `values[n]`."""

    keys: Spans
    tags: Spans
    names: Spans
    values: Spans
    sharding_keys: Spans
    born_hosts: Spans


class Transits(NamedTuple):
    """Where messages that were moved come from. `rows` are those that have a transit. Numbers and times are columns of these rows, the
    n-th of row `rows[n]`. The rows of texts are rows of the records, too. What is not written is 0, or has no span.
    """

    rows: Positions
    origin_topics: Spans
    origin_queue_ids: Positions
    origin_queue_offsets: NDArray[np.uint64]
    attempts: Positions
    first_store_times_ms: NDArray[np.uint64]
    last_errors: Spans
    replayed_groups: Spans


def locate(
    raw: bytes | memoryview, starts: Positions, ends: Positions, topic_size_bytes: int | Positions
) -> Located:
    """Finds the parts of the record fields [start, end). Raises UnusualRecordError."""
    data = np.frombuffer(raw, np.uint8)
    count = len(starts)
    if count and (starts.min() < 0 or ends.max() > len(data)):
        raise UnusualRecordError("a record field ends outside of its buffer")
    try:
        sizes, records = read_lengths(data, starts + 1)
        body_sizes, body_starts = read_lengths(data, records + 1, too_long=len(data))
    except IndexError:
        raise UnusualRecordError("a length that does not end") from None
    fronts = body_starts + body_sizes
    if not (
        (data[starts] == RECORD_TAG).all()
        and (records + sizes == ends).all()
        and (sizes > FIXED_TRAILER_SIZE_BYTES).all()
    ):
        raise UnusualRecordError("a record whose parts do not fit")
    trailers = trailers_of(data, ends)
    limits = _front_limits(data, records, ends, topic_size_bytes, trailers["flags"])
    damaged = (fronts > limits) | (data[records] != _FIRST)
    if damaged.any():
        body_starts, fronts = np.where(damaged, records, (body_starts, fronts))
    return Located(data, records, body_starts, fronts, limits, ends, trailers)


def _front_limits(
    data: NDArray[np.uint8],
    records: Positions,
    ends: Positions,
    topic_size_bytes: int | Positions,
    flags: NDArray[np.uint32],
) -> Positions:
    """Where fields 1 to 5 end; of a record whose transit cannot be found: where it begins."""
    limits: Positions = ends - FIXED_TRAILER_SIZE_BYTES - 2 - topic_size_bytes
    if not (flags & (FLAG_DUE_TIME | FLAG_TRANSIT)).any():
        return limits
    limits = limits - DUE_TIME_SIZE_BYTES * ((flags & FLAG_DUE_TIME) != 0)
    moved = np.flatnonzero(flags & FLAG_TRANSIT)
    if len(moved):
        limits[moved] = _transit_starts(data, records[moved], limits[moved])
    return limits


def _transit_starts(data: NDArray[np.uint8], records: Positions, topics: Positions) -> Positions:
    """Where the transit of each record stands that ends before its topic; where there is none that does: the record's start.

    Field by field, of all records at a time.
    """
    cursor = records.copy()
    rows = np.arange(len(records))
    while True:
        rows = rows[cursor[rows] < topics[rows]]
        rows = rows[_IS_FRONT[data[cursor[rows]]]]
        if not len(rows):
            break
        sizes, starts = read_lengths(data, cursor[rows] + 1, too_long=len(data))
        cursor[rows] = starts + sizes
    inside = np.flatnonzero(cursor < topics)
    inside = inside[data[cursor[inside]] == TRANSIT_TAG]
    sizes, starts = read_lengths(data, cursor[inside] + 1, too_long=len(data))
    found = inside[starts + sizes == topics[inside]]
    result = records.copy()
    result[found] = cursor[found]
    return result


def trailers_of(data: NDArray[np.uint8], ends: Positions) -> NDArray[Any]:
    """The trailers of the records that end at `ends`, as one structured array."""
    opaque = np.dtype(f"V{FIXED_TRAILER_SIZE_BYTES}")
    if not len(ends):
        return np.empty(0, FIXED_TRAILER_DTYPE)
    # Item i of the view is the 103 bytes from i on; opaque, since numpy copies a structure field by field.
    windows: NDArray[Any] = np.ndarray(
        (len(data) - FIXED_TRAILER_SIZE_BYTES + 1,), opaque, buffer=data, strides=(1,)
    )
    return windows[ends - FIXED_TRAILER_SIZE_BYTES].view(FIXED_TRAILER_DTYPE)


def read_fronts(located: Located) -> Fronts:
    """Keys, tags, properties and attributes. Raises UnusualRecordError."""
    data, limits = located.data, located.limits
    cursor = located.fronts.copy()
    try:
        keys = _take(data, cursor, limits, _KEY)
        while len(_take(data, cursor, limits, _KEY).rows):
            pass  # Further keys are skipped.
        tags = _take(data, cursor, limits, _TAG)
        names, values = _read_properties(data, cursor, limits)
        attributes = _take(data, cursor, limits, _ATTRIBUTES)
        inner = attributes.starts.copy()
        sharding_keys = _take(data, inner, attributes.ends, _FIRST)
        born_hosts = _take(data, inner, attributes.ends, _SECOND)
    except IndexError:
        raise UnusualRecordError("a length that does not end") from None
    if (cursor != limits).any() or (inner != attributes.ends).any():
        raise UnusualRecordError("a field where none was expected")
    rows = attributes.rows
    return Fronts(
        keys,
        tags,
        names,
        values,
        sharding_keys._replace(rows=rows[sharding_keys.rows]),
        born_hosts._replace(rows=rows[born_hosts.rows]),
    )


def read_transits(located: Located) -> Transits:
    """Where the messages come from that were moved. Raises UnusualRecordError."""
    data = located.data
    moved = (located.trailers["flags"] & FLAG_TRANSIT) != 0
    rows = np.flatnonzero(moved & (located.body_starts != located.record_starts))
    try:
        sizes, cursor = read_lengths(data, located.limits[rows] + 1)
        limits = cursor + sizes
        origin_topics = _take(data, cursor, limits, _FIRST)
        queue_ids = _take_number(data, cursor, limits, _ORIGIN_QUEUE_ID, np.dtype("<u4"))
        queue_offsets = _take_number(data, cursor, limits, _ORIGIN_QUEUE_OFFSET, np.dtype("<u8"))
        attempts = _take_varint(data, cursor, limits, _ATTEMPT)
        store_times_ms = _take_number(data, cursor, limits, _FIRST_STORE_TIME, np.dtype("<u8"))
        last_errors = _take(data, cursor, limits, _LAST_ERROR)
        replayed_groups = _take(data, cursor, limits, _REPLAYED_GROUP)
        _take(data, cursor, limits, _CONSUMED_TOPIC)
    except IndexError:
        raise UnusualRecordError("a length that does not end") from None
    if (cursor != limits).any():
        raise UnusualRecordError("a field where none was expected")
    return Transits(
        rows,
        origin_topics._replace(rows=rows[origin_topics.rows]),
        queue_ids.astype(np.int64),
        queue_offsets,
        attempts,
        store_times_ms,
        last_errors._replace(rows=rows[last_errors.rows]),
        replayed_groups._replace(rows=rows[replayed_groups.rows]),
    )


def _take_number(
    data: NDArray[np.uint8], cursor: Positions, limits: Positions, tag: int, kind: np.dtype[Any]
) -> NDArray[Any]:
    """The fixed-width field `tag` of all rows, 0 where it is not at the cursor, which is moved behind it."""
    values = np.zeros(len(cursor), kind)
    rows = np.flatnonzero(cursor + kind.itemsize < limits)
    rows = rows[data[cursor[rows]] == tag]
    if len(rows):
        words: NDArray[Any] = np.ndarray(
            (len(data) - kind.itemsize + 1,), kind, buffer=data, strides=(1,)
        )
        values[rows] = words[cursor[rows] + 1]
        cursor[rows] += 1 + kind.itemsize
    return values


def _take_varint(
    data: NDArray[np.uint8], cursor: Positions, limits: Positions, tag: int
) -> Positions:
    """As `_take_number`, of a number of up to 32 bits that is written as a length is."""
    values = np.zeros(len(cursor), np.int64)
    rows = np.flatnonzero(cursor < limits)
    rows = rows[data[cursor[rows]] == tag]
    values[rows], cursor[rows] = read_lengths(data, cursor[rows] + 1)
    return values


def _read_properties(
    data: NDArray[np.uint8], cursor: Positions, limits: Positions
) -> tuple[Spans, Spans]:
    """All properties, in rounds: the n-th of each row at a time."""
    name_rounds: list[Spans] = []
    value_rounds: list[Spans] = []
    while True:
        entries = _take(data, cursor, limits, _PROPERTY)
        if not len(entries.rows):
            break
        inner = entries.starts.copy()
        names = _take(data, inner, entries.ends, _FIRST)
        values = _take(data, inner, entries.ends, _SECOND)
        if len(values.rows) != len(inner) or len(names.rows) != len(inner):
            raise UnusualRecordError("a property without name or value")
        if (inner != entries.ends).any():
            raise UnusualRecordError("a property with more than name and value")
        name_rounds.append(names._replace(rows=entries.rows))
        value_rounds.append(values._replace(rows=entries.rows))
    names, values = _joined(name_rounds), _joined(value_rounds)
    order = np.argsort(names.starts, kind="stable")  # By row, and in a row as they stand.
    return Spans(*(part[order] for part in names)), Spans(*(part[order] for part in values))


def _joined(rounds: list[Spans]) -> Spans:
    if not rounds:
        nothing = np.empty(0, np.int64)
        return Spans(nothing, nothing, nothing)
    return Spans(*(np.concatenate(parts) for parts in zip(*rounds, strict=True)))


def _take(data: NDArray[np.uint8], cursor: Positions, limits: Positions, tag: int) -> Spans:
    """The field `tag` of each row that has it at its cursor, which is moved behind it."""
    rows = np.flatnonzero(cursor < limits)
    rows = rows[data[cursor[rows]] == tag]
    sizes, starts = read_lengths(data, cursor[rows] + 1)
    ends = starts + sizes
    if (ends > limits[rows]).any():
        raise UnusualRecordError("a field that ends outside of its message")
    cursor[rows] = ends
    return Spans(rows, starts, ends)
