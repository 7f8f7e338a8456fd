"""Where things stand in many records at once, as arrays. Pure; the only module of the SDK's receiving side that needs numpy.

The scalar loop `_pull_answer.decode_records` says the same about each record, and decides whenever this module finds anything
unusual. Below some hundred records it is also the faster of the two: numpy costs as much as these for a batch of any size.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._fields import read_varint
from .errors import ProtocolError
from .wire.crc_arrays import without_end
from .wire.hashing import CONTIGUOUS_MAX_BYTES, crc32c, extend_crc32c
from .wire.record import (
    CRC32C_AT,
    FIXED_TRAILER_SIZE_BYTES,
    FLAG_COMPRESSION_MASK,
    FLAG_DUE_TIME,
    FLAG_TRANSIT,
    FLAGS_AT,
    RECORD_TAG,
    TOPIC_TAG,
)
from .wire.varint_arrays import read_lengths

_UNUSUAL_FLAGS = FLAG_COMPRESSION_MASK | FLAG_DUE_TIME | FLAG_TRANSIT
_CRC_TO_FLAGS = np.dtype(
    {
        "names": ["crc32c", "flags"],
        "formats": ["<u4", "<u4"],
        "offsets": [0, FLAGS_AT - CRC32C_AT],
        "itemsize": FLAGS_AT - CRC32C_AT + 4,
    }
)
"""What stands between these two in a trailer, as one item."""
_OPAQUE_CRC_TO_FLAGS = np.dtype(f"V{_CRC_TO_FLAGS.itemsize}")

_RUN_COUNT_MIN = 8
"""Average length from which on it is faster to cut runs as a whole."""
_LAYOUT_COUNT_MAX = 64

Cut: TypeAlias = tuple[Sequence[bytes], Sequence[bytes]]
"""The bodies, and what stands behind each."""


class RecordsOfOneSize(NamedTuple):
    """Records with heads, bodies and rests of one size each, that stand one behind the other in long runs: what batches give."""

    sizes: tuple[int, int, int]
    """Of head, body and rest."""
    starts: NDArray[np.int64]
    """Positions in the buffer, record by record."""
    run_ends: list[int]
    """Indices: a run ends before each, the last one is the number of records."""
    crc32cs: list[int]
    """What the CRC-32C of each body should be, by that of its record."""

    def cut(self, raw: bytes, start: int, stop: int) -> Cut:
        """Records start to stop."""
        # A slice of `bytes` costs twice as much as what `struct` cuts out.
        cut: list[bytes] = []
        run = bisect_right(self.run_ends, start)
        while start < stop:
            end = min(self.run_ends[run], stop, start + _LAYOUT_COUNT_MAX)
            cut += _layout(*self.sizes, end - start).unpack_from(raw, int(self.starts[start]))
            if end == self.run_ends[run]:
                run += 1
            start = end
        return cut[::2], cut[1::2]

    def check(self, _raw: bytes, _start: int, _stop: int, bodies: Sequence[bytes]) -> list[int]:
        """What compares with `crc32cs` of records start to stop, which have these bodies."""
        return list(map(crc32c, bodies))


@lru_cache(maxsize=4 * _LAYOUT_COUNT_MAX)
def _layout(head_size: int, body_size: int, rest_size: int, count: int) -> struct.Struct:
    return struct.Struct(f"{head_size}x{body_size}s{rest_size}s" * count)


class RecordsOfAnySize(NamedTuple):
    """Positions in the buffer, record by record."""

    body_starts: list[int]
    fronts: list[int]
    """Where the rest begins."""
    ends: list[int]
    records: list[int]
    """Where the record begins: behind tag and length of its field."""
    limits: list[int]
    """Where its front ends."""
    is_small: bool
    """Whether all fronts are so small that they are cut out for one call over each."""
    crc32cs: list[int]
    """What the CRC-32C of each record should be."""

    def cut(self, raw: bytes, start: int, stop: int) -> Cut:
        """Records start to stop."""
        fronts, ends = self.fronts[start:stop], self.ends[start:stop]
        bodies = [raw[a:b] for a, b in zip(self.body_starts[start:stop], fronts, strict=True)]
        return bodies, [raw[a:b] for a, b in zip(fronts, ends, strict=True)]

    def check(self, raw: bytes, start: int, stop: int, bodies: Sequence[bytes]) -> list[int]:
        """What compares with `crc32cs` of records start to stop, which have these bodies."""
        bounds = zip(self.records[start:stop], self.limits[start:stop], strict=True)
        if self.is_small:
            return [crc32c(raw[a:b]) for a, b in bounds]
        fronts = zip(bounds, self.body_starts[start:stop], bodies, strict=True)
        return [
            extend_crc32c(
                extend_crc32c(crc32c(raw[a:body_start]), body), raw[body_start + len(body) : b]
            )
            for (a, b), body_start, body in fronts
        ]


RecordColumns: TypeAlias = RecordsOfOneSize | RecordsOfAnySize


def locate_records(
    raw: bytes, base: int, starts: Sequence[int], sizes: Sequence[int], topic_size: int
) -> RecordColumns | None:
    """The columns. None if a record does not have the layout of a stored one, or has a compressed body, a due time or a transit.

    `topic_size`: of the topic of all records, in bytes.
    """
    field_starts = np.asarray(starts).astype(np.int64) + base
    size_column = np.asarray(sizes)
    ends = field_starts + size_column
    data = np.frombuffer(raw, np.uint8)
    if field_starts.min() < 0 or ends.max() > len(data):
        return None
    if size_column.tobytes() == size_column[:1].tobytes() * len(size_column):
        columns = _locate_equal(raw, field_starts, ends, topic_size)
        if columns is not None:
            return columns
    try:
        record_sizes, records = read_lengths(data, field_starts + 1)
        body_sizes, body_starts = read_lengths(data, records + 1)
    except IndexError:
        return None
    fronts = body_starts + body_sizes
    limits = ends - FIXED_TRAILER_SIZE_BYTES - 2 - topic_size
    holds = (
        (data[field_starts] == RECORD_TAG)
        & (data[records] == RECORD_TAG)
        & (records + record_sizes == ends)
        & (fronts <= limits)
    )
    if not holds.all() or not _names_topics(data, limits):
        return None
    crcs = _crcs_of_plain(raw, ends)
    if crcs is None:
        return None
    return RecordsOfAnySize(
        body_starts.tolist(),
        fronts.tolist(),
        ends.tolist(),
        records.tolist(),
        limits.tolist(),
        bool((limits - records).max() <= CONTIGUOUS_MAX_BYTES),
        crcs.tolist(),
    )


def _names_topics(data: NDArray[np.uint8], limits: NDArray[np.int64]) -> bool:
    """Whether the topic stands where the front of each record ends. No CRC covers that octet: another field there is damage."""
    return bool((data[limits] == TOPIC_TAG).all())


def _crcs_of_plain(raw: bytes, ends: NDArray[np.int64]) -> NDArray[np.uint32] | None:
    """What the CRC-32C of each record should be; None if one has something that moves or packs it."""
    # Gathered as opaque items: numpy copies a structure field by field.
    part = _gather(raw, _OPAQUE_CRC_TO_FLAGS, ends + CRC32C_AT).view(_CRC_TO_FLAGS)
    if (part["flags"] & _UNUSUAL_FLAGS).any():
        return None
    crcs: NDArray[np.uint32] = part["crc32c"]
    return crcs


def _locate_equal(
    raw: bytes, field_starts: NDArray[np.int64], ends: NDArray[np.int64], topic_size: int
) -> RecordColumns | None:
    """For records of one size whose bodies have one size too, the usual case: what the first one begins with, all must begin with.

    None if they do not, or if the first one is not as it should be.
    """
    start, end = int(field_starts[0]), int(ends[0])
    try:
        record_size, record = read_varint(raw, start + 1)
        body_size, body_start = read_varint(raw, record + 1)
    except (IndexError, ProtocolError):
        return None
    head_size = body_start - start
    front = body_start + body_size
    limit = end - FIXED_TRAILER_SIZE_BYTES - 2 - topic_size
    if (
        raw[start] != RECORD_TAG
        or raw[record] != RECORD_TAG
        or record + record_size != end
        or not body_start <= front <= limit
    ):
        return None
    heads = _gather(raw, np.dtype(f"V{head_size}"), field_starts).tobytes()
    crcs = _crcs_of_plain(raw, ends)
    if crcs is None or heads != raw[start:body_start] * len(ends):
        return None
    if not _names_topics(np.frombuffer(raw, np.uint8), field_starts + (limit - start)):
        return None
    breaks = np.flatnonzero(field_starts[1:] != ends[:-1]) + 1
    if (len(breaks) + 1) * _RUN_COUNT_MIN <= len(ends):
        sizes = (head_size, body_size, end - front)
        if limit > front:
            fronts = _gather(raw, np.dtype(f"V{limit - front}"), field_starts + (front - start))
            crcs = without_end(crcs, fronts.view(np.uint8).reshape(len(ends), limit - front))
        # What the same octets before a body do to its CRC is the same for all bodies of one size.
        zeros = bytes(body_size)
        of_head = extend_crc32c(crc32c(raw[record:body_start]), zeros) ^ crc32c(zeros)
        crcs = crcs ^ np.uint32(of_head)
        return RecordsOfOneSize(sizes, field_starts, [*breaks.tolist(), len(ends)], crcs.tolist())
    return RecordsOfAnySize(
        (field_starts + head_size).tolist(),
        (field_starts + (front - start)).tolist(),
        ends.tolist(),
        (field_starts + (record - start)).tolist(),
        (field_starts + (limit - start)).tolist(),
        limit - record <= CONTIGUOUS_MAX_BYTES,
        crcs.tolist(),
    )


def _gather(raw: bytes, dtype: np.dtype[Any], positions: NDArray[np.int64]) -> NDArray[Any]:
    """What stands at each of the positions. Raises IndexError if one is outside."""
    count = len(raw) - dtype.itemsize + 1
    return np.ndarray((count,), dtype, raw, 0, (1,))[positions]
