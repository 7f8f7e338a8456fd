"""Where things stand in many records at once, as arrays. Pure; the only module of the SDK's receiving side that needs numpy.

The scalar loop `_pull_answer.decode_records` says the same about each record, and decides whenever this module finds anything
unusual. Below some fifty records it is also the faster of the two: numpy costs about 40 us a batch.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._message import read_varint
from .errors import ProtocolError
from .wire.hashing import crc32c, extend_crc32c
from .wire.record import (
    CRC32C_AT,
    FIXED_TRAILER_SIZE_BYTES,
    FLAG_COMPRESSION_MASK,
    FLAG_DUE_TIME,
    FLAG_TRANSIT,
    FLAGS_AT,
    RECORD_TAG,
    TOPIC_TAG,
    encode_varint,
)

_UNUSUAL_FLAGS = FLAG_COMPRESSION_MASK | FLAG_DUE_TIME | FLAG_TRANSIT
_VARINT_SIZE_MAX_BYTES = 5
_VARINT_LIMITS = 1 << 7 * np.arange(1, _VARINT_SIZE_MAX_BYTES, dtype=np.int64)
_HEAD_CRCS_MAX = 65_536
_U16 = np.dtype("<u2")
_U32 = np.dtype("<u4")

_RUN_COUNT_MIN = 8
"""Runs have to be so long on average for it to pay to cut them as such."""
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
    head_crc32c: int
    """CRC-32C of tag and length of a body."""
    front_size: int
    """How much of a rest is the producer's, and so under its CRC."""
    crc32cs: list[int]
    """What the CRC-32C of each record should be."""

    def cut(self, raw: bytes, start: int, stop: int) -> Cut:
        """Records start to stop. A slice of `bytes` costs twice as much as what `struct` cuts out."""
        cut: list[bytes] = []
        run = bisect_right(self.run_ends, start)
        while start < stop:
            end = min(self.run_ends[run], stop, start + _LAYOUT_COUNT_MAX)
            cut += _layout(*self.sizes, end - start).unpack_from(raw, int(self.starts[start]))
            if end == self.run_ends[run]:
                run += 1
            start = end
        return cut[::2], cut[1::2]

    def check(self, bodies: Sequence[bytes], rests: Sequence[bytes], start: int) -> list[int]:
        """The CRC-32C of records from `start` on, as they are."""
        crcs = map(extend_crc32c, repeat(self.head_crc32c), bodies)
        if not self.front_size:
            return list(crcs)
        front = slice(self.front_size)
        return list(map(extend_crc32c, crcs, [rest[front] for rest in rests]))


@lru_cache(maxsize=4 * _LAYOUT_COUNT_MAX)
def _layout(head_size: int, body_size: int, rest_size: int, count: int) -> struct.Struct:
    return struct.Struct(f"{head_size}x{body_size}s{rest_size}s" * count)


class RecordsOfAnySize(NamedTuple):
    """Positions in the buffer, record by record."""

    body_starts: list[int]
    fronts: list[int]
    """Where the rest begins."""
    ends: list[int]
    head_crc32cs: list[int]
    """CRC-32C of tag and length of each body."""
    front_sizes: list[int] | None
    """How much of each rest is the producer's; None: nothing of any."""
    crc32cs: list[int]
    """What the CRC-32C of each record should be."""

    def cut(self, raw: bytes, start: int, stop: int) -> Cut:
        """Records start to stop."""
        fronts, ends = self.fronts[start:stop], self.ends[start:stop]
        bodies = [raw[a:b] for a, b in zip(self.body_starts[start:stop], fronts, strict=True)]
        return bodies, [raw[a:b] for a, b in zip(fronts, ends, strict=True)]

    def check(self, bodies: Sequence[bytes], rests: Sequence[bytes], start: int) -> list[int]:
        """The CRC-32C of records from `start` on, as they are."""
        part = slice(start, start + len(bodies))
        crcs = map(extend_crc32c, self.head_crc32cs[part], bodies)
        if self.front_sizes is None:
            return list(crcs)
        sizes = self.front_sizes[part]
        fronts = [rest[:size] for rest, size in zip(rests, sizes, strict=True)]
        return list(map(extend_crc32c, crcs, fronts))


RecordColumns: TypeAlias = RecordsOfOneSize | RecordsOfAnySize


def locate_records(
    raw: bytes, base: int, starts: Sequence[int], sizes: Sequence[int], topic_size: int
) -> RecordColumns | None:
    """The columns; None if a record does not have the layout of a stored one, or has a compressed body, a due time or a transit.

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
        record_sizes, records = _read_varints(data, field_starts + 1)
        body_sizes, body_starts = _read_varints(data, records + 1)
    except IndexError:
        return None
    fronts = body_starts + body_sizes
    limits = ends - FIXED_TRAILER_SIZE_BYTES - 2 - topic_size
    holds = (
        (data[field_starts] == RECORD_TAG)
        & (data[records] == RECORD_TAG)
        & (records + record_sizes == ends)
        & (fronts <= limits)
        & (body_starts - records == 1 + _varint_sizes(body_sizes))
    )
    if not holds.all() or not _are_plain(raw, ends, limits, topic_size):
        return None
    crcs = _gather(raw, _U32, ends + CRC32C_AT)
    front_sizes = limits - fronts
    return RecordsOfAnySize(
        body_starts.tolist(),
        fronts.tolist(),
        ends.tolist(),
        list(map(_head_crcs.__getitem__, body_sizes.tolist())),
        front_sizes.tolist() if front_sizes.any() else None,
        crcs.tolist(),
    )


def _are_plain(
    raw: bytes, ends: NDArray[np.int64], limits: NDArray[np.int64], topic_size: int
) -> bool:
    """Whether all records have their topic where `limits` say, and nothing that moves it or is packed."""
    topic_heads = _gather(raw, _U16, limits)
    if (topic_heads != (TOPIC_TAG | topic_size << 8)).any():
        return False
    return not (_gather(raw, _U16, ends + FLAGS_AT) & _UNUSUAL_FLAGS).any()


class _HeadCrcs(dict[int, int]):
    """From the size of a body to the CRC-32C of its tag and length."""

    def __missing__(self, size: int) -> int:
        crc = crc32c(b"\x0a" + encode_varint(size))
        if len(self) < _HEAD_CRCS_MAX:
            self[size] = crc
        return crc


_head_crcs = _HeadCrcs()


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
    limits = field_starts + (limit - start)
    if heads != raw[start:body_start] * len(ends) or not _are_plain(
        raw, ends, limits, topic_size
    ):
        return None
    crcs = _gather(raw, _U32, ends + CRC32C_AT).tolist()
    head_crc = crc32c(raw[record:body_start])
    breaks = np.flatnonzero(field_starts[1:] != ends[:-1]) + 1
    if (len(breaks) + 1) * _RUN_COUNT_MIN <= len(ends):
        sizes = (head_size, body_size, end - front)
        run_ends = [*breaks.tolist(), len(ends)]
        return RecordsOfOneSize(sizes, field_starts, run_ends, head_crc, limit - front, crcs)
    return RecordsOfAnySize(
        (field_starts + head_size).tolist(),
        (field_starts + (front - start)).tolist(),
        ends.tolist(),
        [head_crc] * len(ends),
        [limit - front] * len(ends) if limit > front else None,
        crcs,
    )


def _gather(raw: bytes, dtype: np.dtype[Any], positions: NDArray[np.int64]) -> NDArray[Any]:
    """What stands at each of the positions. Raises IndexError if one is outside."""
    count = len(raw) - dtype.itemsize + 1
    return np.ndarray((count,), dtype, raw, 0, (1,))[positions]


def _varint_sizes(values: NDArray[np.int64]) -> NDArray[Any]:
    return np.searchsorted(_VARINT_LIMITS, values, "right") + 1


def _read_varints(
    data: NDArray[np.uint8], positions: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """(values, positions behind them); IndexError at the end of the data or for a varint that is too long."""
    bytes_there = data[positions]
    values = (bytes_there & 0x7F).astype(np.int64)
    positions = positions + 1
    more = bytes_there >= 0x80
    for shift in range(7, 7 * _VARINT_SIZE_MAX_BYTES, 7):
        if not more.any():
            return values, positions
        bytes_there = data[positions]
        values += np.where(more, (bytes_there & 0x7F).astype(np.int64) << shift, 0)
        positions = positions + more
        more &= bytes_there >= 0x80
    if more.any():
        raise IndexError("a length has more than 5 bytes")
    return values, positions
