"""Whether records are, by their own CRC-32C, what their producers wrote. Pure: a question for bytes that were read, nothing is read here.

The broker makes a new seal over each copy of a message. So who copies looks at the record's CRC first, as each reader does. A bit may have
flipped in the page cache since the seals were checked. In the copy, it would be under a seal that holds.

The CRC covers fields 1 to 5. Of what stands behind them, only the tags of the trailer are looked at; the values are under the seals alone.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protomq.wire import record as layout
from protomq.wire.hashing import CONTIGUOUS_MAX_BYTES, crc32c
from protomq.wire.trailer_arrays import FIXED_TRAILER_DTYPE
from protomq.wire.varint_arrays import read_lengths
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

from .record_arrays import TAGS, opaque, tag_mismatch, windows
from .record_scan import record_field_at

TOGETHER_MIN: Final = 16
"""Fewer records are looked at one by one: arrays cost some 40 microseconds."""
_IS_FRONT: Final = np.zeros(256, np.bool_)
_IS_FRONT[list(layout.FRONT_TAGS)] = True
_CRC32C: Final = 2 * TAGS.index(0x7D) + 1
"""Where `FIXED_TRAILER.unpack` has it: tags stand between values."""


def wrong_records(data: bytes, starts: NDArray[Any], sizes: NDArray[Any]) -> list[int]:
    """Which of the record fields that stand at `starts` of `data` with `sizes` are not what their producers wrote, or no records at all."""
    if len(starts) >= TOGETHER_MIN and _all_hold(data, starts.astype(np.int64), sizes.astype(np.int64)):
        return []
    spans = enumerate(zip(starts.tolist(), sizes.tolist(), strict=True))
    return [row for row, (start, size) in spans if not _holds(data, start, start + size)]


def front_spans(
    octets: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where fields 1 to 5 of each record begin and end. Field by field, of all records at a time. Raises ValueError, IndexError."""
    sizes, front_starts = read_lengths(octets, starts + 1)
    if (octets[starts] != layout.RECORD_TAG).any() or (front_starts + sizes != ends).any():
        raise ValueError("no record field")
    limits = ends - layout.FIXED_TRAILER_SIZE_BYTES
    cursor = front_starts.copy()
    rows = np.arange(len(starts))
    while True:
        rows = rows[_IS_FRONT[octets[cursor[rows]]]]
        if not len(rows):
            return front_starts, cursor
        sizes, positions = read_lengths(octets, cursor[rows] + 1)
        cursor[rows] = positions + sizes
        if (cursor[rows] >= limits[rows]).any():
            raise ValueError("a field that ends outside of its record")


def _all_hold(data: bytes, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    """Whether all of several records hold. If not, or if that is not clear, they have to be looked at one by one."""
    ends = starts + sizes
    octets = np.frombuffer(data, np.uint8)
    try:
        spans = _equal_spans(data, octets, starts, sizes)
        front_starts, front_ends = front_spans(octets, starts, ends) if spans is None else spans
    except (ValueError, IndexError):
        return False
    trailers = windows(data, opaque(layout.FIXED_TRAILER_SIZE_BYTES))[ends - layout.FIXED_TRAILER_SIZE_BYTES]
    if tag_mismatch(trailers, b"") is not None:
        return False
    crcs = trailers.view(FIXED_TRAILER_DTYPE)["crc32c"].tolist()
    # A copy of a small front costs less than a view of it.
    source: Any = data if int(sizes.max()) <= CONTIGUOUS_MAX_BYTES else octets
    spans_of_all = map(slice, front_starts.tolist(), front_ends.tolist())
    return list(map(crc32c, map(source.__getitem__, spans_of_all))) == crcs


def _equal_spans(
    data: bytes, octets: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """`front_spans` of records that have the same fields of the same sizes, as those of one sender often have; None if these do not."""
    size = int(sizes[0])
    if np.count_nonzero(sizes != size):
        return None
    first = int(starts[0])
    length, at = record_field_at(data, first, first + size)
    if at + length != size:
        raise ValueError("no record field")
    heads = list(range(at))
    front_start, limit = at, size - layout.FIXED_TRAILER_SIZE_BYTES
    while at < limit and data[first + at] in layout.FRONT_TAGS:
        length, behind = read_varint(data, first + at + 1, LENGTH_SIZE_MAX_BYTES)
        heads += range(at, behind - first)
        at = behind - first + length
    heads.append(at)  # the tag of what follows
    found = octets[starts[:, np.newaxis] + np.array(heads)]
    if np.count_nonzero(found != found[0]):
        return None
    return starts + front_start, starts + at


def _holds(data: bytes, start: int, end: int) -> bool:
    size, head = record_field_at(data, start, end)
    front_start, trailer_start = start + head, end - layout.FIXED_TRAILER_SIZE_BYTES
    if front_start + size != end or trailer_start <= front_start:
        return False
    values = layout.FIXED_TRAILER.unpack_from(data, trailer_start)
    if values[::2] != TAGS:
        return False
    try:
        front_end = layout.front_end(data, front_start, trailer_start)
    except ValueError:
        return False
    return crc32c(data[front_start:front_end]) == values[_CRC32C]
