"""Room for a due time: records whose trailer has no field `due_time_ms` get one. Pure: a proved region in, a proved region out.

    proved   0A size | front | topic              | fixed trailer
    result   0A size | front | topic | due_time_ms | the same, but flags have bit 4

A request may ask for one delivery time for all its records, while a plain writer gives a record no due time. The producer's CRC-32C covers
fields 1 to 5 alone, so it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from protomq.wire import record as layout

from .append import MoreKey, RecordRegion
from .record_arrays import U32, windows
from .record_scan import record_field_at, record_head

_TRAILER_SIZE_BYTES = layout.FIXED_TRAILER_SIZE_BYTES


def with_due_time(region: RecordRegion, due_time_ms: int) -> RecordRegion:
    """The region with `due_time_ms` in each record. No record of `region` may have a due time; nothing in it is stamped yet."""
    assert not region.flags, "plain records only"
    field = bytes((layout.DUE_TIME_TAG,)) + due_time_ms.to_bytes(8, "little")
    if region.starts is None:
        data, _ = _joined(region.data, [0], [len(region.data)], field)
        at = len(data) + layout.FLAGS_AT
        flags = int.from_bytes(data[at : at + 4], "little") | layout.FLAG_DUE_TIME
        data[at : at + 4] = flags.to_bytes(4, "little")
        more_keys = [(0, key_hash) for _, key_hash in region.more_keys]
        return replace(
            region, data=data, due_times_ms=due_time_ms, more_keys=more_keys, flags=layout.FLAG_DUE_TIME
        )
    assert region.sizes is not None
    if region.stride:
        data, stride = _joined_rows(region.data, region.stride, region.count, field)
        sizes = np.full(region.count, stride, np.int64)
    else:
        stride = 0
        data, new_sizes = _joined(region.data, region.starts.tolist(), region.sizes.tolist(), field)
        sizes = np.array(new_sizes, np.int64)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    windows(data, U32)[ends + layout.FLAGS_AT] |= np.uint32(layout.FLAG_DUE_TIME)
    return replace(
        region,
        data=data,
        starts=starts,
        sizes=sizes,
        stride=stride,
        due_times_ms=np.full(region.count, due_time_ms, np.uint64),
        more_keys=_moved_keys(region.more_keys, region.starts, starts),
        flags=layout.FLAG_DUE_TIME,
    )


def _joined_rows(data: bytearray, stride: int, count: int, field: bytes) -> tuple[bytearray, int]:
    """Records of one size, as rows of one array: (their bytes, the size of each with tag and length)."""
    size, head_size = record_field_at(data, 0, stride)
    head = record_head(size + len(field))
    new_stride = len(head) + size + len(field)
    joined = bytearray(new_stride * count)
    rows = np.frombuffer(joined, np.uint8).reshape(count, new_stride)
    old_rows = np.frombuffer(data, np.uint8).reshape(count, stride)
    room_at = new_stride - _TRAILER_SIZE_BYTES - len(field)
    rows[:, : len(head)] = np.frombuffer(head, np.uint8)
    rows[:, len(head) : room_at] = old_rows[:, head_size : stride - _TRAILER_SIZE_BYTES]
    rows[:, room_at : room_at + len(field)] = np.frombuffer(field, np.uint8)
    rows[:, -_TRAILER_SIZE_BYTES:] = old_rows[:, -_TRAILER_SIZE_BYTES:]
    return joined, new_stride


def _joined(
    data: bytearray, starts: list[int], sizes: list[int], field: bytes
) -> tuple[bytearray, list[int]]:
    """Records of any sizes, put together from slices: (their bytes, the size of each with tag and length)."""
    whole = memoryview(data)
    parts: list[bytes | memoryview] = []
    new_sizes: list[int] = []
    for start, field_size in zip(starts, sizes, strict=True):
        end = start + field_size
        size, head_size = record_field_at(data, start, end)
        head = record_head(size + len(field))
        room_at = end - _TRAILER_SIZE_BYTES
        parts += (head, whole[start + head_size : room_at], field, whole[room_at:end])
        new_sizes.append(len(head) + size + len(field))
    return bytearray().join(parts), new_sizes


def _moved_keys(
    more_keys: Sequence[MoreKey], old_starts: NDArray[np.int64], starts: NDArray[np.int64]
) -> list[MoreKey]:
    """The further keys of all records, at the new starts of these."""
    if not more_keys:
        return []
    rows = np.searchsorted(old_starts, [start for start, _ in more_keys])
    hashes = (key_hash for _, key_hash in more_keys)
    return list(zip(starts[rows].tolist(), hashes, strict=True))
