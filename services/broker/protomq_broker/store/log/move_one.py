"""`move.move_records` for one record, without arrays: these cost some hundred microseconds, for one record as for many. Pure.

A consumer sends back a message at a time; a batch of them goes by arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from protomq.wire import record as layout
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

from .append import MoreKey, RecordRegion
from .record_arrays import TAGS, topic_field_of
from .record_scan import hashes_of_more_keys, record_head
from .transit import KEPT_FLAGS, ORIGIN, ORIGIN_TAGS, raised_transit, transit_head, transit_tail

_ORIGIN: Final = struct.Struct("<BIBQBQ")
assert _ORIGIN.size == ORIGIN.itemsize
_QUEUE_ID_TAG, _QUEUE_OFFSET_TAG, _STORE_TIME_TAG = ORIGIN_TAGS.values()
# Where `FIXED_TRAILER.unpack` has values: tags stand between them.
_TAG_CODE, _KEY_HASH, _PRODUCER_ID, _PRODUCER_EPOCH, _SEQUENCE, _FLAGS = 1, 3, 7, 9, 11, 17
_QUEUE_ID, _STORE_TIME_MS, _QUEUE_OFFSET = 19, 21, 23


def move_one(
    field: bytes,
    topic: str,
    kind: int,
    *,
    due_time_ms: int | None,
    attempts: int,
    last_error: str | None,
    replayed_group: str,
    marks: int,
) -> RecordRegion:
    """The copy of one record field. `kind`: the bits of `flags` that say what it becomes. All else, and errors: `move_records`."""
    try:
        front_start, front_end = _front(field)
        topic_start = front_end
        values = layout.FIXED_TRAILER.unpack_from(field, len(field) - layout.FIXED_TRAILER_SIZE_BYTES)
        flags = values[_FLAGS]
        if flags & layout.FLAG_TRANSIT:
            size, at = read_varint(field, front_end + 1, LENGTH_SIZE_MAX_BYTES)
            topic_start = at + size
        topic_end = topic_start + 2 + field[topic_start + 1]
    except (IndexError, struct.error):
        raise ValueError("a record that is cut short") from None
    if field[topic_start] != layout.TOPIC_TAG or topic_end >= len(field) or values[::2] != TAGS:
        raise ValueError("a record without its topic")
    front = field[front_start:front_end]
    written, stored_topic = field[front_end:topic_start], field[topic_start + 2 : topic_end]
    origin = values[_QUEUE_ID], values[_QUEUE_OFFSET], values[_STORE_TIME_MS]
    is_opened = bool(attempts) or last_error is not None or bool(replayed_group)
    if not written:
        tail = transit_tail(attempts, last_error, replayed_group) if is_opened else b""
        transit = transit_head(stored_topic, len(tail)) + _ORIGIN.pack(
            _QUEUE_ID_TAG, origin[0], _QUEUE_OFFSET_TAG, origin[1], _STORE_TIME_TAG, origin[2]
        ) + tail
    elif is_opened:
        transit = raised_transit(written, stored_topic, attempts, last_error, replayed_group)
    else:
        transit = written
    flags = flags & KEPT_FLAGS | kind | marks | layout.FLAG_TRANSIT
    due_time = b""
    if due_time_ms is not None:
        due_time = bytes((layout.DUE_TIME_TAG,)) + due_time_ms.to_bytes(8, "little")
        flags |= layout.FLAG_DUE_TIME
    rest = (front, transit, topic_field_of(topic.encode()), due_time, field[-layout.FIXED_TRAILER_SIZE_BYTES :])
    data = bytearray().join((record_head(sum(map(len, rest))), *rest))
    end = len(data)
    data[end + layout.FLAGS_AT : end + layout.FLAGS_AT + 4] = flags.to_bytes(4, "little")
    return RecordRegion(
        topic,
        data,
        1,
        None,
        None,
        values[_TAG_CODE],
        values[_KEY_HASH],
        producer_id=0,
        producer_epoch=0,
        first_sequence=0,
        due_times_ms=due_time_ms,
        more_keys=_more_keys(front) if flags & layout.FLAG_MANY_KEYS else (),
        flags=kind | (layout.FLAG_DUE_TIME if due_time_ms is not None else 0),
        identities=np.array(
            [[values[_PRODUCER_ID], values[_PRODUCER_EPOCH], values[_SEQUENCE]]], np.uint64
        ),
    )


def _front(field: bytes) -> tuple[int, int]:
    """Where fields 1 to 5 of the record begin and end. Raises ValueError, IndexError."""
    size, start = read_varint(field, 1, LENGTH_SIZE_MAX_BYTES)
    if field[0] != layout.RECORD_TAG or start + size != len(field):
        raise ValueError("no record field")
    limit = len(field) - layout.FIXED_TRAILER_SIZE_BYTES
    at = start
    while field[at] in layout.FRONT_TAGS:
        size, at = read_varint(field, at + 1, LENGTH_SIZE_MAX_BYTES)
        at += size
        if at >= limit:
            raise ValueError("a field that ends outside of its record")
    return start, at


def _more_keys(front: bytes) -> Sequence[MoreKey]:
    try:
        return [(0, key_hash) for key_hash in hashes_of_more_keys(front)]
    except DecodeError as error:
        raise ValueError("a record that does not parse") from error
