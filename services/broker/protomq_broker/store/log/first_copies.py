"""Copies of half messages that are committed: they never moved, have no due time, and stay in their queue. Pure: bytes in, bytes out.

    stored   0A size | front: fields 1 to 5 |         topic, trailer up to flags | flags | stamps
    copy     0A size | the same octets      | transit | the same octets          | flags | stamps

`flags` say that the transaction of the message was committed.

The octets are those of `move.move_records`, which can do all other moves too. That one works by arrays over what is read from the log,
so it costs some hundred microseconds for one message as for many. Commits of transactions come by tens, each soon after its half
message. A few are copied one by one, and more as rows of an array where they have one size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protomq.wire import record as layout

from .append import RecordRegion
from .record_arrays import I64, U32, U64, column
from .record_region import steps
from .record_scan import record_field_at, record_head
from .transit import KEPT_FLAGS, ORIGIN, ORIGIN_TAGS, transit_head

ROWS_MIN: Final = 6
"""Below this number arrays cost more than they save."""
_KIND: Final = layout.FLAG_KIND_COPY | layout.FLAG_TRANSIT | layout.FLAG_COMMITTED
_HEAD_SIZE_MAX_BYTES: Final = 8
_pack_flags = struct.Struct("<I").pack_into
# Where `FIXED_TRAILER.unpack` has values: tags stand between them.
_TAG_CODE, _KEY_HASH, _FLAGS = 1, 3, 17
_IDENTITY: Final = slice(7, 12, 2)


def first_copies(
    topic: str, queue_id: int, fields: Sequence[bytes | bytearray], store_times_ms: Sequence[int]
) -> RecordRegion:
    """Copies of record fields of `topic` that stand in `queue_id`, each with its store time, and in no consume queue; at least one.

    The caller knows that they have neither transit nor due time, and one key at most. They are not stamped.
    """
    if len(fields) >= ROWS_MIN and len(set(map(len, fields))) == 1:
        rows = np.frombuffer(b"".join(fields), np.uint8).reshape(len(fields), -1)
        return first_copies_of_rows(topic, queue_id, rows, store_times_ms)
    topic_bytes = topic.encode()
    tail_size = layout.trailer_size_bytes(topic_bytes)
    parts: list[bytes | bytearray] = []
    trailers: list[tuple[Any, ...]] = []
    sizes: list[int] = []
    for field, time_ms in zip(fields, store_times_ms, strict=True):
        transit = _transit(topic_bytes, queue_id, time_ms)
        size, head_size = record_field_at(field, 0, len(field))
        head = record_head(size + len(transit))
        front_end = len(field) - tail_size
        parts += (head, field[head_size:front_end], transit, field[front_end:])
        trailers.append(layout.FIXED_TRAILER.unpack_from(field, len(field) - layout.FIXED_TRAILER_SIZE_BYTES))
        sizes.append(len(head) + size + len(transit))
    data = bytearray().join(parts)
    end = 0
    for trailer, size in zip(trailers, sizes, strict=True):
        end += size
        _pack_flags(data, end + layout.FLAGS_AT, trailer[_FLAGS] & KEPT_FLAGS | _KIND)
    identities = np.array([trailer[_IDENTITY] for trailer in trailers], np.uint64)
    if len(sizes) == 1:
        return _region(
            topic, data, None, None, trailers[0][_TAG_CODE], trailers[0][_KEY_HASH], identities, 0
        )
    lengths = np.array(sizes, np.int64)
    return _region(
        topic,
        data,
        np.cumsum(lengths) - lengths,
        lengths,
        np.array([trailer[_TAG_CODE] for trailer in trailers], np.int64),
        np.array([trailer[_KEY_HASH] for trailer in trailers], np.uint64),
        identities,
        sizes[0] if min(sizes) == max(sizes) else 0,
    )


def first_copies_of_rows(
    topic: str, queue_id: int, rows: NDArray[np.uint8], store_times_ms: Sequence[int]
) -> RecordRegion:
    """As `first_copies`, for several record fields of one size, which are the rows of an array."""
    topic_bytes = topic.encode()
    count, whole = rows.shape
    transit = _transit(topic_bytes, queue_id, store_times_ms[0])
    front_end = whole - layout.trailer_size_bytes(topic_bytes)
    size, head_size = record_field_at(rows[0, :_HEAD_SIZE_MAX_BYTES].tobytes(), 0, whole)
    head = record_head(size + len(transit))
    transit_at = len(head) + front_end - head_size
    transit_end = transit_at + len(transit)
    stride = len(head) + size + len(transit)
    data = bytearray(count * stride)
    copies = np.frombuffer(data, np.uint8).reshape(count, stride)
    copies[:, : len(head)] = np.frombuffer(head, np.uint8)
    copies[:, len(head) : transit_at] = rows[:, head_size:front_end]
    copies[:, transit_at:transit_end] = np.frombuffer(transit, np.uint8)
    copies[:, transit_end:] = rows[:, front_end:]
    if store_times_ms.count(store_times_ms[0]) < count:
        column(data, U64, transit_end - U64.itemsize, stride, count)[:] = store_times_ms
    flags = column(data, U32, stride + layout.FLAGS_AT, stride, count)
    flags &= np.uint32(KEPT_FLAGS)
    flags |= np.uint32(_KIND)
    identities = np.empty((count, 3), np.uint64)
    identities[:, 0] = column(data, U64, stride + layout.PRODUCER_ID_AT, stride, count)
    identities[:, 1] = column(data, U32, stride + layout.PRODUCER_EPOCH_AT, stride, count)
    identities[:, 2] = column(data, U64, stride + layout.SEQUENCE_AT, stride, count)
    tag_codes = column(data, I64, stride + layout.TAG_CODE_AT, stride, count).copy()
    key_hashes = column(data, U64, stride + layout.KEY_HASH_AT, stride, count).copy()
    return _region(topic, data, *steps(stride, count), tag_codes, key_hashes, identities, stride)


def _region(
    topic: str,
    data: bytearray,
    starts: NDArray[np.int64] | None,
    sizes: NDArray[np.int64] | None,
    tag_codes: NDArray[np.int64] | int,
    key_hashes: NDArray[np.uint64] | int,
    identities: NDArray[np.uint64],
    stride: int,
) -> RecordRegion:
    return RecordRegion(
        topic,
        data,
        len(identities),
        starts,
        sizes,
        tag_codes,
        key_hashes,
        producer_id=0,
        producer_epoch=0,
        first_sequence=0,
        stride=stride,
        flags=layout.FLAG_KIND_COPY,
        identities=identities,
    )


@lru_cache(maxsize=256)
def _transit(topic: bytes, queue_id: int, store_time_ms: int) -> bytes:
    """The field `transit` of messages that were stored together."""
    origin = np.zeros(1, ORIGIN)
    for name, tag in ORIGIN_TAGS.items():
        origin[name] = tag
    origin["queue_id"], origin["queue_offset"] = queue_id, layout.NO_QUEUE_OFFSET
    origin["store_time_ms"] = store_time_ms
    return transit_head(topic) + origin.tobytes()
