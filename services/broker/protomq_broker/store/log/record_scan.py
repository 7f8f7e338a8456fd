"""Reading records back from the log: in recovery, in verification, and for what is rebuilt."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protomq.v1.record_pb2 import Record
from protomq.wire import record as layout
from protomq.wire.hashing import key_hash_of
from protomq.wire.record import RECORD_TAG
from protomq.wire.trailer_arrays import FIXED_TRAILER_DTYPE
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

from .append import CorruptRecordError, MoreKey, ScannedRecords
from .record_arrays import (
    U64,
    opaque,
    tag_mismatch,
    topic_field_of,
    windows,
)

_TOPIC_SIZE_UNAMBIGUOUS_BYTES = 36


def record_field_at(
    data: bytes | bytearray | memoryview, position: int, end: int
) -> tuple[int, int]:
    """(size of the record, size of its tag and length) of the record field at `position`; size -1 if none stands there whole."""
    if end - position < 2 or data[position] != RECORD_TAG:
        return -1, 0
    size, head = data[position + 1], 2
    if size >= 0x80:
        # Lengths of two octets, which most messages have, are read here: every send asks twice.
        if end - position > 2 and (high := data[position + 2]) < 0x80:
            size, head = size & 0x7F | high << 7, 3
        else:
            try:
                size, at = read_varint(data, position + 1, LENGTH_SIZE_MAX_BYTES)
            except (IndexError, ValueError):
                return -1, 0
            head = at - position
    return (size, head) if position + head + size <= end else (-1, 0)


@lru_cache(maxsize=4096)
def record_head(size: int) -> bytes:
    """Tag and length of a record field."""
    return bytes((layout.RECORD_TAG,)) + layout.encode_varint(size)


def read_trailers(
    data: bytes | bytearray | memoryview,
    base_position: int,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> ScannedRecords:
    """The trailers of the record fields at `starts` (relative to `data`) with `sizes`, as arrays.

    Raises CorruptRecordError with the position if a trailer does not hold. The caller has checked the seal's CRC, so that is a defect of
    the writer and no torn write.
    """
    count = len(starts)
    ends = starts + sizes
    if count and int(sizes.min()) < layout.FIXED_TRAILER_SIZE_BYTES + 5:
        at = int(starts[int(sizes.argmin())])
        raise CorruptRecordError(base_position + at, "a record that is shorter than its trailer")
    fixed_void = opaque(layout.FIXED_TRAILER_SIZE_BYTES)
    trailers = (
        windows(data, fixed_void)[ends - layout.FIXED_TRAILER_SIZE_BYTES]
        if count
        else np.empty(0, fixed_void)
    )
    wrong = tag_mismatch(trailers, b"")
    if wrong is not None:
        raise CorruptRecordError(base_position + int(starts[wrong]), "a record without its trailer")
    fields = trailers.view(FIXED_TRAILER_DTYPE)
    has_due_time = (fields["flags"] & layout.FLAG_DUE_TIME) != 0
    due_times_ms = np.zeros(count, np.uint64)
    if np.count_nonzero(has_due_time):
        due_times_ms[has_due_time] = windows(data, U64)[ends[has_due_time] + layout.DUE_TIME_MS_AT]
    topic_ends = ends - layout.FIXED_TRAILER_SIZE_BYTES - layout.DUE_TIME_SIZE_BYTES * has_due_time
    topics, indexes = _read_topics(data, base_position, starts, ends, topic_ends)
    return ScannedRecords(
        positions=starts + base_position,
        sizes=sizes,
        topics=topics,
        topic_indexes=indexes,
        queue_ids=fields["queue_id"].astype(np.int64),
        queue_offsets=fields["queue_offset"].astype(np.int64),
        store_times_ms=fields["store_time_ms"].astype(np.int64),
        tag_codes=fields["tag_code"].astype(np.int64),
        key_hashes=fields["key_hash"].astype(np.uint64),
        producer_ids=fields["producer_id"].astype(np.uint64),
        producer_epochs=fields["producer_epoch"].astype(np.int64),
        sequences=fields["sequence"].astype(np.uint64),
        flags=fields["flags"].astype(np.uint32),
        due_times_ms=due_times_ms,
        more_keys=_more_keys(data, base_position, starts, ends, fields["flags"]),
    )


def hashes_of_more_keys(record: bytes) -> list[int]:
    """Hashes of the keys of a record (without tag and length) but for the first. Raises DecodeError."""
    return [key_hash_of(key) for key in Record.FromString(record).keys[1:]]


def _more_keys(
    data: bytes | bytearray | memoryview,
    base_position: int,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    flags: NDArray[np.uint32],
) -> list[MoreKey]:
    found: list[MoreKey] = []
    for row in np.flatnonzero(flags & layout.FLAG_MANY_KEYS).tolist():
        start, end = int(starts[row]), int(ends[row])
        _, head = record_field_at(data, start, end)
        try:
            hashes = hashes_of_more_keys(bytes(data[start + head : end]))
        except DecodeError as error:
            raise CorruptRecordError(
                base_position + start, "a record that does not parse"
            ) from error
        found += [(base_position + start, key_hash) for key_hash in hashes]
    return found


def _read_topics(
    data: bytes | bytearray | memoryview,
    base_position: int,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    topic_ends: NDArray[np.int64],
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """The topic of each record.

    The topic's length is not known from the end. The scan parses the first record of a topic. Then it takes all others that have
    the same field in the same place in one step. That is exact for topics of up to 36 bytes. A longer field with the same end
    would have to hold the shorter one's length octet, which is no character of a name. Longer ones, and what is left when a block
    holds many topics, are parsed one by one.
    """
    count = len(starts)
    indexes = np.full(count, -1, np.int32)
    known: dict[str, int] = {}
    for _ in range(16):
        left = np.flatnonzero(indexes < 0)
        if not len(left):
            break
        first = int(left[0])
        topic = _parse_topic(data, base_position, int(starts[first]), int(ends[first]))
        index = known.setdefault(topic, len(known))
        indexes[first] = index
        encoded = topic.encode()
        if len(encoded) > _TOPIC_SIZE_UNAMBIGUOUS_BYTES:
            continue
        field = topic_field_of(encoded)
        field_starts = topic_ends[left] - len(field)
        inside = field_starts > starts[left]
        left, field_starts = left[inside], field_starts[inside]
        found = windows(data, opaque(len(field)))[field_starts]
        indexes[left[found == np.frombuffer(field, found.dtype)[0]]] = index
    for row in np.flatnonzero(indexes < 0).tolist():
        topic = _parse_topic(data, base_position, int(starts[row]), int(ends[row]))
        indexes[row] = known.setdefault(topic, len(known))
    return tuple(known), indexes


def _parse_topic(
    data: bytes | bytearray | memoryview, base_position: int, start: int, end: int
) -> str:
    _, head = record_field_at(data, start, end)
    try:
        topic: str = Record.FromString(bytes(data[start + head : end])).topic
    except DecodeError as error:
        raise CorruptRecordError(base_position + start, "a record that does not parse") from error
    return topic
