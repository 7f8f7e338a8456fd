"""Copies of messages that never moved and have no due time, for the queue in which they stand. Pure: bytes in, bytes out.

    stored   0A size | front: fields 1 to 5 |         topic, trailer up to flags | flags | stamps
    copy     0A size | the same octets      | transit | the same octets          | flags | stamps

The octets are those of `move.move_records`, which can do all other moves too. That one works by arrays over what is read from the log,
so it costs some hundred microseconds for one message as for many. Commits of transactions come by tens, each soon after its half
message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from protomq.wire import record as layout
from protomq.wire.trailer_arrays import FIXED_TRAILER_DTYPE

from .append import RecordRegion
from .record_arrays import U32, opaque, windows
from .record_scan import record_field_at, record_head
from .transit import KEPT_FLAGS, ORIGIN, ORIGIN_TAGS, transit_head

_KIND: Final = layout.FLAG_KIND_COPY | layout.FLAG_TRANSIT


def first_copies(
    topic: str, queue_id: int, fields: Sequence[bytes], store_times_ms: Sequence[int]
) -> RecordRegion:
    """Copies of record fields of `topic` that stand in `queue_id`, each with its store time, and in no consume queue; at least one.

    The caller knows that they have neither transit nor due time, and one key at most. They are not stamped.
    """
    topic_bytes = topic.encode()
    tail_size = layout.trailer_size_bytes(topic_bytes)
    parts: list[bytes] = []
    sizes: list[int] = []
    whole = store_time_ms = head_size = front_end = copied_size = -1
    head = transit = b""
    for field, time_ms in zip(fields, store_times_ms, strict=True):
        if len(field) != whole or time_ms != store_time_ms:  # most are as the one before
            whole, store_time_ms = len(field), time_ms
            transit = _transit(topic_bytes, queue_id, time_ms)
            front_end = whole - tail_size
            size, head_size = record_field_at(field, 0, whole)
            head = record_head(size + len(transit))
            copied_size = len(head) + size + len(transit)
        parts += (head, field[head_size:front_end], transit, field[front_end:])
        sizes.append(copied_size)
    data = bytearray().join(parts)
    lengths = np.array(sizes, np.int64)
    ends = np.cumsum(lengths)
    trailers = windows(data, opaque(layout.FIXED_TRAILER_SIZE_BYTES))[
        ends - layout.FIXED_TRAILER_SIZE_BYTES
    ].view(FIXED_TRAILER_DTYPE)
    windows(data, U32)[ends + layout.FLAGS_AT] = trailers["flags"] & KEPT_FLAGS | _KIND
    identities = np.empty((len(sizes), 3), np.uint64)
    for place, name in enumerate(("producer_id", "producer_epoch", "sequence")):
        identities[:, place] = trailers[name]
    tag_codes, key_hashes = trailers["tag_code"].copy(), trailers["key_hash"].copy()
    is_one = len(sizes) == 1
    return RecordRegion(
        topic,
        data,
        len(sizes),
        None if is_one else ends - lengths,
        None if is_one else lengths,
        int(tag_codes[0]) if is_one else tag_codes,
        int(key_hashes[0]) if is_one else key_hashes,
        producer_id=0,
        producer_epoch=0,
        first_sequence=0,
        stride=0 if is_one or min(sizes) != max(sizes) else sizes[0],
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
