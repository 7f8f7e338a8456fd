"""Seals: how an append is closed, and how a log is walked append by append.

    append      [record field]*  or  [padding field]  or nothing     then one seal field of 53 bytes

A seal's CRC-32C covers the CRC of the seal before it, the bytes of the append and the seal itself. So walking from a known CRC proves
every bit, and proves that nothing is missing in between. Boundaries are found by the structure alone (tag, length, tag, length …),
never by searching for a pattern: a producer could put the bytes of a seal into a body.

`LogWalker` reads segments block by block; `walk_appends` is the loop over one block, about 1 microsecond per 5 records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq.wire.hashing import Octets, crc32c, extend_crc32c
from protomq.wire.record import (
    BODY_SIZE_MAX_BYTES,
    FRONT_SIZE_MAX_BYTES,
    PADDING_TAG,
    RECORD_TAG,
    SEAL,
    SEAL_COVERED_BYTES,
    SEAL_FIELD_TAGS,
    SEAL_SIZE_BYTES,
    SEAL_TAG,
    encode_seal,
)
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint
from protomq_broker.store.files.disk import Disk, read_fully

from .segment import SegmentFolder

APPEND_SIZE_MAX_BYTES: Final = 64 << 20
"""Bytes of an append without its seal: bounds what a walker must hold in memory, whatever a broken length claims."""

RECORD_FIELD_SIZE_MAX_BYTES: Final = BODY_SIZE_MAX_BYTES + FRONT_SIZE_MAX_BYTES + 1024
"""Limits of a record, and room for its trailer, its tags and lengths."""

WALK_BLOCK_SIZE_BYTES: Final = 1 << 20
"""Fits into the processor's cache: 1.7 GB/s here with records of 500 bytes, 1.2 GB/s with blocks of 8 MiB."""

SEAL_HEAD: Final = bytes((SEAL_TAG, SEAL_SIZE_BYTES - 2, SEAL_FIELD_TAGS[0]))
_SEAL_START: Final = (SEAL_TAG, SEAL_SIZE_BYTES - 2)
_NO_SEAL: Final = SEAL.unpack(bytes(SEAL_SIZE_BYTES))
_COPIED_SIZE_MAX_BYTES: Final = 8 << 10
"""Below it a copy costs less than a view."""
EMPTY: Final = "nothing is written here"


class Seal(NamedTuple):
    """A seal that was read: the values of the message, see record.proto."""

    epoch: int
    start_position: int
    size_bytes: int
    record_count: int
    store_time_ms: int
    synced_position: int
    crc32c: int

    @property
    def end_position(self) -> int:
        """Where the next append starts."""
        return self.start_position + self.size_bytes + SEAL_SIZE_BYTES

    @property
    def is_head(self) -> bool:
        """Whether this is the empty append at the start of a segment."""
        return self.size_bytes == 0 and self.record_count == 0


def decode_seal(data: bytes, at: int) -> Seal | None:
    """The seal field at `at`, None if none stands there whole. Its CRC is not checked."""
    if at < 0 or at + SEAL_SIZE_BYTES > len(data):
        return None
    values = SEAL.unpack_from(data, at)
    if values[0] != SEAL_TAG or values[1] != SEAL_SIZE_BYTES - 2 or values[2::2] != SEAL_FIELD_TAGS:
        return None
    return Seal(*values[3::2])


def sealed_crc32c(previous_crc32c: int, covered: Octets) -> int:
    """What a seal's CRC must be: `covered` is the append and its seal field up to the tag of the CRC."""
    return extend_crc32c(crc32c(previous_crc32c.to_bytes(4, "little")), covered)


def chain_holds(
    data: bytes, base_position: int, previous_crc32c: int, end_crc32c: int
) -> bool:
    """Whether `data` is whole appends with their seals, by which the chain of CRCs comes from the one to the other.

    Each seal tells where its append begins, so they are found from the end on, and no record is looked at: for bytes whose records were
    walked before. They are the same bytes, for every one of them is under a CRC of the chain.
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
        # In front of it stands the seal of the append before, which ends in its CRC.
        before = data[start - 4 : start] if start >= 4 else previous_crc32c.to_bytes(4, "little")
        covered_end = seal_at + SEAL_COVERED_BYTES
        is_small = covered_end - start < _COPIED_SIZE_MAX_BYTES
        covered = data[start:covered_end] if is_small else octets[start:covered_end]
        if extend_crc32c(crc32c(before), covered) != crc:
            return False
        end, crc = start, int.from_bytes(before, "little")
    return crc == previous_crc32c


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


@dataclass(slots=True)
class WalkedBlock:
    """Appends that hold, in one piece of the log.

    Attributes:
        base_position: physical offset of `data`.
        data: the bytes; may go on behind the last append.
        size_bytes: bytes of the appends, with their seals.
        seals: one per append.
        record_starts: where in `data` each record field starts.
        record_sizes: size of each record field, with tag and length.
        problem: why the append behind `size_bytes` does not hold; "" if it may, given more bytes.
        previous_crc32c: the CRC with which the chain came to `base_position`; None if nobody knows it.
    """

    base_position: int
    data: bytes
    size_bytes: int = 0
    seals: list[Seal] = field(default_factory=list)
    record_starts: list[int] = field(default_factory=list)
    record_sizes: list[int] = field(default_factory=list)
    problem: str = ""
    previous_crc32c: int | None = None

    def records(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and sizes of the record fields as arrays."""
        return np.array(self.record_starts, np.int64), np.array(self.record_sizes, np.int64)


def walk_appends(data: bytes, base_position: int, previous_crc32c: int | None) -> WalkedBlock:
    """Takes the appends that `data` begins with, as many as hold.

    Without `previous_crc32c` the first append must be the head of a segment, whose CRC is then taken as it is.
    """
    block = WalkedBlock(base_position, data, previous_crc32c=previous_crc32c)
    starts, sizes = block.record_starts, block.record_sizes
    at = 0
    while at < len(data):
        count_before = len(starts)
        seal_at, problem = _walk_records(data, at, starts, sizes)
        seal: Seal | None = None
        if not problem and seal_at >= 0:
            if seal_at + SEAL_SIZE_BYTES > len(data):
                seal_at = -1
            else:
                seal = decode_seal(data, seal_at)
                count = len(starts) - count_before
                problem = _check_seal(
                    seal, data, at, seal_at, base_position, count, previous_crc32c
                )
        if problem or seal is None:
            del starts[count_before:], sizes[count_before:]
            block.problem = problem
            break
        block.seals.append(seal)
        previous_crc32c = seal.crc32c
        at = seal_at + SEAL_SIZE_BYTES
    block.size_bytes = at
    return block


def _walk_records(data: bytes, at: int, starts: list[int], sizes: list[int]) -> tuple[int, str]:
    """Walks the fields from `at` on: (where a seal field starts, or -1 if the bytes end before; what is wrong, or "")."""
    end, position = len(data), at
    head, size = b"\x00", 0
    add_start, add_size, same_head = starts.append, sizes.append, data.startswith
    while position < end:
        if size and same_head(
            head, position
        ):  # a record as long as the one before: its length is known
            position += size
            if position > end:
                return -1, ""
            add_start(position - size)
            add_size(size)
            continue
        tag = data[position]
        if tag == SEAL_TAG:
            return position, ""
        if tag not in (RECORD_TAG, PADDING_TAG):
            return (
                -1,
                EMPTY
                if position == at and tag == 0
                else f"no field of a log starts with 0x{tag:02X}",
            )
        try:
            length, behind = read_varint(data, position + 1, LENGTH_SIZE_MAX_BYTES)
        except IndexError:
            return -1, ""
        except ValueError:
            return -1, "a field whose length has more than five octets"
        if tag == PADDING_TAG:
            if position != at or behind + length - position > APPEND_SIZE_MAX_BYTES + 256:
                return -1, "padding where none can stand"
            position = behind + length
            if position >= end:
                return -1, ""
            return (
                (position, "") if data[position] == SEAL_TAG else (-1, "padding without its seal")
            )
        size = behind + length - position
        if size > RECORD_FIELD_SIZE_MAX_BYTES:
            return -1, f"a record of {length} bytes: more than any may have"
        head = data[position:behind]
        position += size
        if position > end:
            return -1, ""
        if position - at > APPEND_SIZE_MAX_BYTES:
            return -1, "an append longer than any may be"
        add_start(position - size)
        add_size(size)
    return -1, ""


def _check_seal(
    seal: Seal | None,
    data: bytes,
    at: int,
    seal_at: int,
    base_position: int,
    record_count: int,
    previous_crc32c: int | None,
) -> str:
    """What is wrong with the append [at, seal_at) and its seal, "" if it holds."""
    if seal is None:
        return "what stands in the place of a seal is none"
    if seal.start_position != base_position + at or seal.size_bytes != seal_at - at:
        return "the seal is that of another append"
    if seal.record_count != record_count:
        return f"the seal counts {seal.record_count} records, {record_count} stand there"
    if previous_crc32c is None:
        return "" if seal.is_head else "a segment does not begin with an empty append"
    if sealed_crc32c(previous_crc32c, data[at : seal_at + SEAL_COVERED_BYTES]) != seal.crc32c:
        return "the CRC-32C of the append does not match its seal"
    return ""


class Skip(NamedTuple):
    """A damaged range that a walk skips: where it ends, and the CRC with which the chain goes on there."""

    end_position: int
    previous_crc32c: int


class LogWalker:
    """Walks a log from a position to the first append that does not hold.

    After the iteration `position` and `crc32c` say where the good part ends, `last_seal` is the last seal that held, and `problem` says
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
    ) -> None:
        """`end_position`: where an append is known to end: the walk ends there, and nothing behind it is looked at."""
        self.position = position
        self.crc32c = crc32c
        self.last_seal: Seal | None = None
        self.problem = ""
        self._disk = disk
        self._folder = folder
        self._skips = skips or {}
        self._block_size_bytes = block_size_bytes
        self._end_position = 1 << 63 if end_position is None else end_position

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
            data = read_fully(
                self._disk, segment.fd, size_bytes, self.position - segment.base_position
            )
            if not data:
                return WalkedBlock(self.position, b"", problem="the segment file is cut short")
            block = walk_appends(data, self.position, self.crc32c)
            if block.seals and at_base and not block.seals[0].is_head:
                return WalkedBlock(
                    self.position, data, problem="a segment does not begin with an empty append"
                )
            if block.seals or block.problem:
                return block
            if len(data) < size_bytes:
                block.problem = "the segment file is cut short"
                return block
            if size_bytes == left:
                block.problem = "an append runs beyond where it must end"
                return block
            size_bytes *= 2


def find_fields(data: bytes) -> tuple[list[int], list[int]]:
    """Starts and sizes of the record fields at the start of `data`, as far as its structure goes. Nothing of it is proved."""
    starts: list[int] = []
    sizes: list[int] = []
    at = 0
    while at < len(data):
        seal_at, problem = _walk_records(data, at, starts, sizes)
        if problem or seal_at < 0:
            break
        at = seal_at + SEAL_SIZE_BYTES
    return starts, sizes
