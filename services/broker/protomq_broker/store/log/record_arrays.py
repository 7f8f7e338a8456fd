"""Records as numpy sees them: their layout as array types, and views of the same place in many records.

Private to the store: shared by record_region.py, which proves and stamps, and record_scan.py, which reads back.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protomq.wire import record as layout
from protomq.wire.trailer_arrays import FIXED_TRAILER_DTYPE

TAGS = layout.FIXED_TRAILER_TAGS
"""The tags of the trailer's fields behind the topic, in order."""
BROKER_FLAGS = ~layout.PRODUCER_FLAGS_MASK & 0xFFFFFFFF
"""Bits of `flags` that a producer must leave zero."""
_FIXED_TAGS = layout.FIXED_TRAILER.pack(*(value for tag in TAGS for value in (tag, 0)))

_DUE_TIME_FIELD = bytes((layout.DUE_TIME_TAG,)) + bytes(8)


def _fields_of(dtype: np.dtype[np.void]) -> list[tuple[str, Any]]:
    return [(name, dtype[name]) for name in dtype.names or ()]


U32 = np.dtype("<u4")
U64 = np.dtype("<u8")
I64 = np.dtype("<i8")


def windows(data: bytes | bytearray | memoryview, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A view of `data` in which item i is the `itemsize` bytes from i on: gathers and scatters become copies of whole items."""
    return np.ndarray((len(data) - dtype.itemsize + 1,), dtype, buffer=data, strides=(1,))


def column(
    data: bytearray, dtype: np.dtype[Any], offset: int, stride: int, count: int
) -> NDArray[Any]:
    """A view of the same place in each of many records of one size."""
    return np.ndarray((count,), dtype, data, offset, (stride,))


@lru_cache(maxsize=256)
def opaque(size: int) -> np.dtype[np.void]:
    return np.dtype(f"V{size}")


@lru_cache(maxsize=256)
def trailer_dtype(topic_size: int, has_due_time: bool) -> np.dtype[np.void]:
    fields: list[tuple[str, Any]] = [("topic_field", f"V{topic_size + 2}")]
    if has_due_time:
        fields += [("due_time_tag", "u1"), ("due_time_ms", "<u8")]
    return np.dtype(fields + _fields_of(FIXED_TRAILER_DTYPE))


def topic_field_of(topic_bytes: bytes) -> bytes:
    return b"%c%c%b" % (layout.TOPIC_TAG, len(topic_bytes), topic_bytes)


def sameness_mask(topic_bytes: bytes, has_due_time: bool) -> NDArray[np.uint64]:
    """What must be the same in all trailers of a request, as words that end where the trailer does. These are all constant parts,
    producer id and epoch, whether there is a due time, and the flags that are not a producer's. Octets before the trailer do not
    count.
    """
    return _sameness_mask(len(topic_bytes) + 2, has_due_time)


# By the size of a topic, not by the topic: ten thousand topics in turn would find nothing of a bounded cache, and 20 us went for it.


@lru_cache(maxsize=256)
def _trailer_mask(topic_field_size: int, has_due_time: bool) -> NDArray[np.uint8]:
    ones = layout.FIXED_TRAILER.pack(*(value for tag in TAGS for value in (_full(tag), 0)))
    due_time = b"\xff" + bytes(8) if has_due_time else b""
    return np.frombuffer(b"\xff" * topic_field_size + due_time + ones, np.uint8)


@lru_cache(maxsize=256)
def _sameness_mask(topic_field_size: int, has_due_time: bool) -> NDArray[np.uint64]:
    fixed = np.zeros(1, FIXED_TRAILER_DTYPE)
    fixed["producer_id"], fixed["producer_epoch"] = 0xFFFFFFFF_FFFFFFFF, 0xFFFFFFFF
    fixed["flags"] = BROKER_FLAGS | layout.FLAG_DUE_TIME
    mask = _trailer_mask(topic_field_size, has_due_time).copy()
    mask[-layout.FIXED_TRAILER_SIZE_BYTES :] |= fixed.view(np.uint8)
    return np.frombuffer(bytes(-len(mask) % 8) + mask.tobytes(), U64)


def _full(tag: int | bytes) -> int | bytes:
    return b"\xff\xff" if isinstance(tag, bytes) else 0xFF


def tag_mismatch(
    trailers: NDArray[np.void], topic_bytes: bytes, has_due_time: bool = False
) -> int | None:
    """Index of the first trailer whose constant parts are wrong, None if all hold; without a topic: of the fixed part alone."""
    topic_field = topic_field_of(topic_bytes) if topic_bytes else b""
    due_time = _DUE_TIME_FIELD if has_due_time else b""
    pattern = np.frombuffer(topic_field + due_time + _FIXED_TAGS, np.uint8)
    octets = trailers.view(np.uint8).reshape(len(trailers), len(pattern))
    wrong = (octets ^ pattern) & _trailer_mask(len(topic_field), has_due_time)
    return int(wrong.any(axis=1).argmax()) if wrong.any() else None
