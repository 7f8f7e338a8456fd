"""Which records a pull gets, and as which regions of the log: arithmetic on consume queue entries, nothing is read.

Rules:
- Chosen records come in queue order. If one matches at all, at least one is chosen, however large.
- One region goes on into the next record only if that begins exactly where the last one ends, or if exactly one seal lies
  between. (No record is as small as a seal.) The log mixes topics: whatever else lay in a gap would be somebody else's bytes.
  A region never crosses segments, which are files.
- An entry of size 0 stands for a record that the log has lost: it is skipped.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq.wire.record import SEAL_SIZE_BYTES

ENTRY: Final = np.dtype([("position", "<u8"), ("size", "<u4"), ("tag_code", "<i8")])
"""An entry of a consume queue: physical offset and size of a whole record field, filter code of its tag."""
ENTRY_SIZE_BYTES: Final = ENTRY.itemsize
assert ENTRY_SIZE_BYTES == 20

NO_TAGS: Final[frozenset[int]] = frozenset()

_FEW: Final = 32
"""Up to here a loop over ints is faster than the fixed cost of the array operations (measured: they meet at about 40)."""


class Selection(NamedTuple):
    """The records chosen for a pull.

    Attributes:
        record_count: number of records.
        first_offset: queue offset of the first one; `next_offset` if there is none.
        next_offset: where to go on: behind the last record that was looked at and needs no second look.
        starts: uint32, start of each record field in the regions put one behind the other.
        sizes: uint32, size of each record field.
        queue_offsets: uint64, queue offset of each; None if they are dense from `first_offset` on.
        regions: (position, size_bytes) of each region.
        size_bytes: size of all regions.
    """

    record_count: int
    first_offset: int
    next_offset: int
    starts: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    queue_offsets: NDArray[np.uint64] | None
    regions: list[tuple[int, int]]
    size_bytes: int


_SURPLUS_COUNT: Final = 32
"""Entries beyond those that are likely to fit: the first read of a queue that has small records only is not too small."""

_NONE: Final = np.empty(0, np.uint32)
_FIRST: Final = np.zeros(1, np.uint32)
_FIRST.flags.writeable = False


def likely_count(record_count_max: int, size_max_bytes: int, record_size_bytes: int) -> int:
    """How many entries to read for a pull, so that its size ends it and not the entries. By the size of records that were chosen before.

    Too few cost another read, too many cost a check of each. 4 MiB of 1 KiB records are 3,600 of the 32,768 that a consumer
    allows.
    """
    if not record_size_bytes:
        return record_count_max
    likely = size_max_bytes // record_size_bytes
    return min(record_count_max, likely + likely // 8 + _SURPLUS_COUNT)


def select(
    entries: NDArray[Any],
    queue_offset: int,
    *,
    record_count_max: int,
    size_max_bytes: int,
    segment_size_bytes: int,
    tag_codes: frozenset[int] = NO_TAGS,
    end_position: int | None = None,
) -> Selection:
    """Chooses among `entries`, whose first one has `queue_offset`.

    `size_max_bytes` bounds all regions together, seals between records included. No entry at or beyond `end_position` (the
    readable position) is chosen or skipped. An empty `tag_codes` lets every record through.
    """
    assert record_count_max > 0
    if len(entries) <= _FEW:
        return _select_few(
            entries.tolist(),
            queue_offset,
            record_count_max,
            size_max_bytes,
            segment_size_bytes,
            tag_codes,
            end_position,
        )
    return _select_many(
        entries,
        queue_offset,
        record_count_max,
        size_max_bytes,
        segment_size_bytes,
        tag_codes,
        end_position,
    )


def _select_few(
    entries: list[tuple[int, int, int]],
    queue_offset: int,
    record_count_max: int,
    size_max_bytes: int,
    segment_size_bytes: int,
    tag_codes: frozenset[int],
    end_position: int | None,
) -> Selection:
    starts: list[int] = []
    sizes: list[int] = []
    offsets: list[int] = []
    regions: list[tuple[int, int]] = []
    total, region_start, region_end, segment_end = 0, 0, -1, 0
    next_offset = queue_offset
    for position, size, tag_code in entries:
        if end_position is not None and position + size > end_position:
            break
        if size and (not tag_codes or tag_code in tag_codes):
            gap = position - region_end
            joined = (
                region_end >= 0 and (gap == 0 or gap == SEAL_SIZE_BYTES) and position < segment_end
            )
            added = size + gap if joined else size
            if starts and (len(starts) == record_count_max or total + added > size_max_bytes):
                break
            if not joined:
                if starts:
                    regions.append((region_start, region_end - region_start))
                region_start = position
                segment_end = (position // segment_size_bytes + 1) * segment_size_bytes
            region_end = position + size
            total += added
            starts.append(total - size)
            sizes.append(size)
            offsets.append(next_offset)
        next_offset += 1
    count = len(starts)
    if not count:
        return Selection(0, next_offset, next_offset, _NONE, _NONE, None, regions, 0)
    regions.append((region_start, region_end - region_start))
    dense = offsets[-1] - offsets[0] == count - 1
    return Selection(
        count,
        offsets[0],
        next_offset,
        _FIRST if count == 1 else np.array(starts, np.uint32),
        np.array(sizes, np.uint32),
        None if dense else np.array(offsets, np.uint64),
        regions,
        total,
    )


def _select_many(
    entries: NDArray[Any],
    queue_offset: int,
    record_count_max: int,
    size_max_bytes: int,
    segment_size_bytes: int,
    tag_codes: frozenset[int],
    end_position: int | None,
) -> Selection:
    seen = len(entries)
    positions = entries["position"].astype(np.int64)
    sizes = entries["size"].astype(np.int64)
    if end_position is not None and int(positions[-1] + sizes[-1]) > end_position:
        seen = int(np.searchsorted(positions + sizes, end_position, "right"))
        positions, sizes = positions[:seen], sizes[:seen]
    chosen = _matching(entries[:seen], sizes, tag_codes)
    if chosen is not None:
        positions, sizes = positions[chosen], sizes[chosen]
    matching = len(positions)
    if not matching:
        return Selection(0, queue_offset + seen, queue_offset + seen, _NONE, _NONE, None, [], 0)

    count = min(matching, record_count_max)
    positions, sizes = positions[:count], sizes[:count]
    ends = positions + sizes
    gaps = positions[1:] - ends[:-1]
    joined = (gaps == 0) | (gaps == SEAL_SIZE_BYTES)
    first_position = int(positions[0])
    if first_position // segment_size_bytes != int(positions[-1]) // segment_size_bytes:
        segments = positions // segment_size_bytes
        joined &= segments[1:] == segments[:-1]
    is_one_region = np.count_nonzero(joined) == count - 1
    if is_one_region:
        totals = ends - first_position
    else:
        added = sizes.copy()
        added[1:] += gaps * joined
        totals = np.cumsum(added)
    if int(totals[-1]) > size_max_bytes:
        count = max(1, int(np.searchsorted(totals, size_max_bytes, "right")))
        sizes, totals = sizes[:count], totals[:count]

    regions = [(first_position, int(totals[-1]))]
    if not is_one_region:
        breaks = np.flatnonzero(~joined[: count - 1]) + 1
        firsts = [0, *breaks.tolist()]
        lasts = [*(breaks - 1).tolist(), count - 1]
        starts = positions[firsts]
        regions = list(zip(starts.tolist(), (ends[lasts] - starts).tolist(), strict=True))

    next_offset = queue_offset + seen
    first_index, queue_offsets = 0, None
    if chosen is not None:
        first_index = int(chosen[0])
        if int(chosen[count - 1]) - first_index != count - 1:
            queue_offsets = chosen[:count].astype(np.uint64) + np.uint64(queue_offset)
    if count < matching:
        next_offset = queue_offset + (count if chosen is None else int(chosen[count]))
    return Selection(
        count,
        queue_offset + first_index,
        next_offset,
        (totals - sizes).astype(np.uint32),
        sizes.astype(np.uint32),
        queue_offsets,
        regions,
        int(totals[-1]),
    )


def _matching(
    entries: NDArray[Any], sizes: NDArray[np.int64], tag_codes: frozenset[int]
) -> NDArray[np.int64] | None:
    """Indexes of the entries that may be chosen, None for all."""
    if not tag_codes:
        return None if np.count_nonzero(sizes) == len(sizes) else np.flatnonzero(sizes)
    codes = entries["tag_code"]
    if len(tag_codes) == 1:
        (code,) = tag_codes
        matches = codes == code
    else:
        matches = np.isin(codes, np.fromiter(tag_codes, np.int64, len(tag_codes)))
    matches &= sizes > 0
    return np.flatnonzero(matches)
