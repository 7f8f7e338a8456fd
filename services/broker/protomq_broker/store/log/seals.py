"""Seals: how an append is closed, and how a log is walked append by append.

    append      [record field]*  or  [padding field]  or nothing     then one seal field of 53 bytes

A seal's CRC-32C covers the CRC of the seal before it, the bytes of the append and the seal itself. So walking from a known CRC proves
every bit, and proves that nothing is missing in between. The walk finds boundaries by the structure alone (tag, length, tag, length
…), never by searching for a pattern. A producer could put the bytes of a seal into a body.

`LogWalker` reads segments block by block; the loop over one block is `walk_appends` (protomq.wire.log_walk).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from protomq.wire.hashing import crc32c, extend_crc32c
from protomq.wire.log_walk import EMPTY, Seal, WalkedBlock, decode_seal, walk_appends
from protomq.wire.record import (
    PADDING_TAG,
    SEAL,
    SEAL_COVERED_BYTES,
    SEAL_FIELD_TAGS,
    SEAL_SIZE_BYTES,
    SEAL_TAG,
    encode_seal,
)
from protomq_broker.store.files.disk import Disk, path_named, read_fully, read_readable

from .segment import SegmentFile, SegmentFolder

UNREADABLE: Final = "the disk cannot read it (Input/output error)"
"""What is wrong where a walk takes that for damage."""
WALK_BLOCK_SIZE_BYTES: Final = 1 << 20
"""Fits into the processor's cache: 1.7 GB/s here with records of 500 bytes, 1.2 GB/s with blocks of 8 MiB."""

_SEAL_START: Final = (SEAL_TAG, SEAL_SIZE_BYTES - 2)
_NO_SEAL: Final = SEAL.unpack(bytes(SEAL_SIZE_BYTES))
_COPIED_SIZE_MAX_BYTES: Final = 8 << 10
"""Below it a copy costs less than a view."""


def chain_holds(
    data: bytes, base_position: int, previous_crc32c: int, end_crc32c: int
) -> bool:
    """Whether `data` is whole appends with their seals, by which the chain of CRCs comes from the one to the other.

    Each seal says where its append begins, so this finds them from the end on, without a look at the records. For bytes whose records
    were walked before. They are the same bytes, for every one of them is under a CRC of the chain.
    """
    octets = np.frombuffer(data, np.uint8)
    end, crc = len(data), end_crc32c
    while end:
        seal_at = end - SEAL_SIZE_BYTES
        # As `decode_seal`, written out: where each message was appended alone, this is most of the work.
        values = SEAL.unpack_from(data, seal_at) if seal_at >= 0 else _NO_SEAL
        if values[:2] != _SEAL_START or values[2::2] != SEAL_FIELD_TAGS or values[15] != crc:
            return False
        start = seal_at - values[7]
        if start < 0 or values[5] != base_position + start:
            return False
        # Before it stands the seal of the append before, which ends in its CRC.
        before = data[start - 4 : start] if start >= 4 else previous_crc32c.to_bytes(4, "little")
        covered_end = seal_at + SEAL_COVERED_BYTES
        is_small = covered_end - start < _COPIED_SIZE_MAX_BYTES
        covered = data[start:covered_end] if is_small else octets[start:covered_end]
        if extend_crc32c(crc32c(before), covered) != crc:
            return False
        end, crc = start, int.from_bytes(before, "little")
    return crc == previous_crc32c


def seal_before(
    folder: SegmentFolder, position: int, *, unreadable_is_damage: bool = False
) -> Seal | None:
    """The seal that stands right before a position; None if there is none. Its CRC is not checked.

    `unreadable_is_damage`: what the disk cannot read is no seal, else it raises OSError. It may be a good one.
    """
    segment = folder.at(position - 1) if position else None
    at = position - SEAL_SIZE_BYTES - segment.base_position if segment is not None else -1
    if segment is None or at < 0:
        return None
    read = segment.read_if_readable if unreadable_is_damage else segment.read
    seal = decode_seal(read(at, SEAL_SIZE_BYTES), 0)
    return seal if seal is not None and seal.end_position == position else None


def encode_padding(size_bytes: int) -> bytes:
    """A padding field of exactly `size_bytes`, at least 2. Its length is written wider than needed where that is what fits."""
    assert size_bytes >= 2, "a field has a tag and a length"
    for width in range(1, 6):
        length = size_bytes - 1 - width
        if length < 1 << 7 * width:
            octets = [length >> 7 * index & 0x7F | 0x80 for index in range(width)]
            octets[-1] &= 0x7F
            return bytes((PADDING_TAG, *octets)) + bytes(length)
    raise ValueError(f"no padding of {size_bytes} bytes")


def encode_head(
    position: int, previous_crc32c: int, *, epoch: int, store_time_ms: int, synced_position: int
) -> bytes:
    """The empty append with which each segment begins, so that the chain of CRCs can be taken up there."""
    return encode_seal(
        previous_crc32c,
        b"",
        epoch=epoch,
        start_position=position,
        record_count=0,
        store_time_ms=store_time_ms,
        synced_position=synced_position,
    )


class Skip(NamedTuple):
    """A damaged range that a walk skips: where it ends, and the CRC with which the chain goes on there."""

    end_position: int
    previous_crc32c: int


class LogWalker:
    """Walks a log from a position to the first append that does not hold.

    After the iteration `position` and `crc32c` say where the good part ends, and `last_seal` is the last seal that held. `problem` says
    what is wrong behind it (`EMPTY` if the log simply ends).
    """

    def __init__(
        self,
        disk: Disk,
        folder: SegmentFolder,
        position: int,
        crc32c: int | None,
        *,
        skips: Mapping[int, Skip] | None = None,
        block_size_bytes: int = WALK_BLOCK_SIZE_BYTES,
        end_position: int | None = None,
        unreadable_is_damage: bool = False,
    ) -> None:
        """`end_position`: where an append is known to end: the walk ends there, and nothing behind it is looked at.

        `unreadable_is_damage`: at what the disk cannot read the walk ends with the problem UNREADABLE, else it raises OSError. Whoever
        cuts where a walk ends must not take the one for the other.
        """
        self.position = position
        self.crc32c = crc32c
        self.last_seal: Seal | None = None
        self.problem = ""
        self._disk = disk
        self._folder = folder
        self._skips = skips or {}
        self._block_size_bytes = block_size_bytes
        self._end_position = 1 << 63 if end_position is None else end_position
        self._unreadable_is_damage = unreadable_is_damage

    @property
    def ended_cleanly(self) -> bool:
        """Whether the walk ended where nothing is written any more."""
        return self.problem == EMPTY

    def __iter__(self) -> Iterator[WalkedBlock]:
        while True:
            skip = self._skips.get(self.position)
            if skip is not None:
                self.position, self.crc32c = skip
                continue
            if self.position >= self._end_position:
                return
            block = self._next_block()
            if block is None:
                return
            if block.seals:
                self.position += block.size_bytes
                self.last_seal = block.seals[-1]
                self.crc32c = self.last_seal.crc32c
                yield block
            if block.problem and self.position not in self._skips:
                self.problem = block.problem
                return

    def _next_block(self) -> WalkedBlock | None:
        """The next block with at least one append, or with a problem; None at the end of the last segment."""
        segment = self._folder.at(self.position)
        if segment is None:
            later = any(base > self.position for base in self._folder.files)
            self.problem = "the segment file is missing" if later else EMPTY
            return None
        at_base = self.position == segment.base_position
        size_bytes = self._block_size_bytes
        while True:
            left = min(segment.end_position, self._end_position) - self.position
            size_bytes = min(size_bytes, left)
            with path_named(segment.path):
                data, is_stuck = self._read(segment, size_bytes)
            if is_stuck and not data:
                return WalkedBlock(self.position, b"", problem=UNREADABLE)
            if not data:
                return WalkedBlock(self.position, b"", problem="the segment file is cut short")
            block = walk_appends(data, self.position, self.crc32c)
            if block.seals and at_base and not block.seals[0].is_head:
                return WalkedBlock(
                    self.position, data, problem="a segment does not begin with an empty append"
                )
            if block.seals or block.problem:
                return block
            if is_stuck:
                block.problem = UNREADABLE
                return block
            if len(data) < size_bytes:
                block.problem = "the segment file is cut short"
                return block
            if size_bytes == left:
                block.problem = "an append runs beyond where it must end"
                return block
            size_bytes *= 2

    def _read(self, segment: SegmentFile, size_bytes: int) -> tuple[bytes, bool]:
        """(what stands at the position, whether the disk could not read further)."""
        offset = self.position - segment.base_position
        if self._unreadable_is_damage:
            return read_readable(self._disk, segment.fd, size_bytes, offset)
        return read_fully(self._disk, segment.fd, size_bytes, offset), False
