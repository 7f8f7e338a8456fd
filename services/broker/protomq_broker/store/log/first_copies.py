"""Copies of messages that never moved and have no due time, for the queue in which they stand. Pure: bytes in, bytes out.

    stored   0A size | front: fields 1 to 5 |         topic, trailer up to flags | flags | stamps
    copy     0A size | the same octets      | transit | the same octets          | flags | stamps

The octets are those of `move.move_records`, which can do all else too: it works by arrays over what is read from the log, and so costs
some hundred microseconds for one message as for many. Commits of transactions come by tens, each soon after its half message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from protomq.wire import record as layout

from .append import RecordRegion
from .move import KEPT_FLAGS, ORIGIN, ORIGIN_TAGS, record_head, transit_head
from .record_scan import record_field_at

_KIND: Final = layout.FLAG_KIND_COPY | layout.FLAG_TRANSIT
_unpack_trailer: Final = layout.FIXED_TRAILER.unpack_from
# Where `FIXED_TRAILER.unpack` has values: tags stand between them.
_TAG_CODE, _KEY_HASH, _PRODUCER_ID, _PRODUCER_EPOCH, _SEQUENCE, _FLAGS = 1, 3, 7, 9, 11, 17


def first_copies(
    topic: str, queue_id: int, fields: Sequence[bytes], store_times_ms: Sequence[int]
) -> RecordRegion:
    """Copies of record fields of `topic` that stand in `queue_id`, each with its store time, and in no consume queue; at least one.

    The caller knows that they have neither transit nor due time, and one key at most. They are not stamped.
    """
    topic_bytes = topic.encode()
    tail_size = layout.trailer_size_bytes(topic_bytes)
    parts: list[Any] = []
    sizes: list[int] = []
    tag_codes: list[int] = []
    key_hashes: list[int] = []
    identities: list[tuple[int, int, int]] = []
    for field, store_time_ms in zip(fields, store_times_ms, strict=True):
        whole = len(field)
        size, head_size = record_field_at(field, 0, whole)
        values = _unpack_trailer(field, whole - layout.FIXED_TRAILER_SIZE_BYTES)
        transit = _transit(topic_bytes, queue_id, store_time_ms)
        flags = values[_FLAGS] & KEPT_FLAGS | _KIND
        size += len(transit)
        head = record_head(size)
        flags_at = whole + layout.FLAGS_AT
        parts += (
            head,
            field[head_size : whole - tail_size],
            transit,
            field[whole - tail_size : flags_at],
            flags.to_bytes(4, "little"),
            field[flags_at + 4 :],
        )
        sizes.append(len(head) + size)
        tag_codes.append(values[_TAG_CODE])
        key_hashes.append(values[_KEY_HASH])
        identities.append((values[_PRODUCER_ID], values[_PRODUCER_EPOCH], values[_SEQUENCE]))
    is_one = len(sizes) == 1
    lengths = np.array(sizes, np.int64)
    return RecordRegion(
        topic,
        bytearray().join(parts),
        len(sizes),
        None if is_one else np.cumsum(lengths) - lengths,
        None if is_one else lengths,
        tag_codes[0] if is_one else np.array(tag_codes, np.int64),
        key_hashes[0] if is_one else np.array(key_hashes, np.uint64),
        producer_id=0,
        producer_epoch=0,
        first_sequence=0,
        stride=0 if is_one or min(sizes) != max(sizes) else sizes[0],
        flags=layout.FLAG_KIND_COPY,
        identities=np.array(identities, np.uint64),
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
