"""Walking a log append by append, and proving it: for the store, for its tools, and for whoever reads segments without a broker. Pure.

    append      [record field]*  or  [padding field]  or nothing     then one seal field of 53 bytes

A seal's CRC-32C covers the CRC of the seal before it, the bytes of the append and the seal itself. So walking from a known CRC proves
every bit, and proves that nothing is missing in between. The walk finds boundaries by the structure alone (tag, length, tag, length
…), never by searching for a pattern. A producer could put the bytes of a seal into a body.

Records of one size in a row are found together, as a run: a walk costs little more than their octets do.
The bytes are described in services/broker/protomq_broker/store/FORMAT.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .hashing import Octets, crc32c, extend_crc32c
from .record import (
    BODY_SIZE_MAX_BYTES,
    FRONT_SIZE_MAX_BYTES,
    PADDING_TAG,
    RECORD_TAG,
    SEAL,
    SEAL_COVERED_BYTES,
    SEAL_FIELD_TAGS,
    SEAL_SIZE_BYTES,
    SEAL_TAG,
)
from .varints import LENGTH_SIZE_MAX_BYTES, read_varint

APPEND_SIZE_MAX_BYTES: Final = 64 << 20
"""Bytes of an append without its seal: bounds what a walker must hold in memory, whatever a broken length claims."""

RECORD_FIELD_SIZE_MAX_BYTES: Final = BODY_SIZE_MAX_BYTES + FRONT_SIZE_MAX_BYTES + 1024
"""Limits of a record, and room for its trailer, its tags and lengths."""

_ALIKE_MIN: Final = 4
"""From this number of records of one size in a row, the walk looks for more of them all at once."""
_ALIKE_MAX_FACTOR: Final = 4
"""How many it looks for, by how many there were: a row that ends soon costs no more than it saved."""

SEAL_HEAD: Final = bytes((SEAL_TAG, SEAL_SIZE_BYTES - 2, SEAL_FIELD_TAGS[0]))
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


def decode_seal(data: bytes | memoryview, at: int) -> Seal | None:
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


class RecordRuns:
    """Where record fields stand: rows of fields of one size, each right behind the one before.

    Attributes: starts, sizes, counts: of each row, the start of its first field, the size of its fields with tag and length, their number.
    """

    __slots__ = ("counts", "sizes", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.sizes: list[int] = []
        self.counts: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.starts)

    def add(self, start: int, size: int, count: int) -> None:
        """Adds a row."""
        self.starts.append(start)
        self.sizes.append(size)
        self.counts.append(count)

    def keep(self, rows: int) -> None:
        """Drops what was added behind this many rows."""
        del self.starts[rows:], self.sizes[rows:], self.counts[rows:]

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and sizes of all fields: int64, one entry a field."""
        starts, sizes = np.array(self.starts, np.int64), np.array(self.sizes, np.int64)
        total = sum(self.counts)
        if total == len(starts):
            return starts, sizes
        counts = np.array(self.counts, np.int64)
        sizes = np.repeat(sizes, counts)
        before = np.cumsum(counts) - counts
        within_row = np.arange(total) - np.repeat(before, counts)
        return np.repeat(starts, counts) + within_row * sizes, sizes


@dataclass(slots=True)
class WalkedBlock:
    """Appends that hold, in one piece of the log.

    Attributes:
        base_position: physical offset of `data`.
        data: the bytes; may go on behind the last append.
        size_bytes: bytes of the appends, with their seals.
        seals: one per append.
        runs: where in `data` the record fields stand.
        problem: why the append behind `size_bytes` does not hold; "" if it may, given more bytes.
        previous_crc32c: the CRC with which the chain came to `base_position`; None if nobody knows it.
    """

    base_position: int
    data: bytes | memoryview
    size_bytes: int = 0
    seals: list[Seal] = field(default_factory=list)
    runs: RecordRuns = field(default_factory=RecordRuns)
    problem: str = ""
    previous_crc32c: int | None = None

    def records(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and sizes of the record fields: int64, one entry a field."""
        return self.runs.arrays()

    def fields(self) -> Iterator[tuple[int, int]]:
        """(start, size) of each record field."""
        starts, sizes = self.runs.arrays()
        return zip(starts.tolist(), sizes.tolist(), strict=True)


def walk_appends(data: bytes | memoryview, base_position: int, previous_crc32c: int | None) -> WalkedBlock:
    """Takes the appends that `data` begins with, as many as hold.

    Without `previous_crc32c` the first append must be the head of a segment, whose CRC is then taken as it is.
    """
    block = WalkedBlock(base_position, data, previous_crc32c=previous_crc32c)
    runs = block.runs
    octets = np.frombuffer(data, np.uint8)
    at = 0
    while at < len(data):
        rows_before = len(runs.starts)
        seal_at, problem = _walk_records(data, at, runs)
        seal: Seal | None = None
        if not problem and seal_at >= 0:
            if seal_at + SEAL_SIZE_BYTES > len(data):
                seal_at = -1
            else:
                seal = decode_seal(data, seal_at)
                count = sum(runs.counts[rows_before:])
                problem = _check_seal(
                    seal, octets, at, seal_at, base_position, count, previous_crc32c
                )
        if problem or seal is None:
            runs.keep(rows_before)
            block.problem = problem
            break
        block.seals.append(seal)
        previous_crc32c = seal.crc32c
        at = seal_at + SEAL_SIZE_BYTES
    block.size_bytes = at
    return block


def _walk_records(data: bytes | memoryview, at: int, runs: RecordRuns) -> tuple[int, str]:
    """Walks the fields from `at` on: (where a seal field starts, or -1 if the bytes end before; what is wrong, or "")."""
    end, position = len(data), at
    while position < end:
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
        start, head = position, bytes(data[position:behind])
        position += size
        if position > end:
            return -1, ""
        if position - at > APPEND_SIZE_MAX_BYTES:
            return -1, "an append longer than any may be"
        count = 1 + _count_alike(data, position, head, size)
        runs.add(start, size, count)
        position = start + count * size
    return -1, ""


def _count_alike(data: bytes | memoryview, at: int, head: bytes, size: int) -> int:
    """How many whole fields that begin with `head`, and so have this size, stand in a row from `at` on."""
    count = 0
    whole = (len(data) - at) // size
    while count < whole:
        position = at + count * size
        if data[position : position + len(head)] != head:
            break
        count += 1
        if count >= _ALIKE_MIN:
            most = min(whole - count, _ALIKE_MAX_FACTOR * count)
            more = _count_heads(data, position + size, head, size, most)
            count += more
            if more < most:
                break
    return count


def _count_heads(data: bytes | memoryview, at: int, head: bytes, size: int, most: int) -> int:
    """How many of the `most` fields of this size from `at` on begin with `head`, up to the first that does not."""
    if not most:
        return 0
    heads = np.ndarray((most,), f"V{len(head)}", data, at, (size,))
    is_alike = heads == np.frombuffer(head, heads.dtype)[0]
    return most if is_alike.all() else int(is_alike.argmin())


def _check_seal(
    seal: Seal | None,
    octets: NDArray[np.uint8],
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
    if sealed_crc32c(previous_crc32c, octets[at : seal_at + SEAL_COVERED_BYTES]) != seal.crc32c:
        return "the CRC-32C of the append does not match its seal"
    return ""


def find_fields(data: bytes) -> tuple[list[int], list[int]]:
    """Starts and sizes of the record fields at the start of `data`, as far as its structure goes. Nothing of it is proved."""
    runs = RecordRuns()
    at = 0
    while at < len(data):
        seal_at, problem = _walk_records(data, at, runs)
        if problem or seal_at < 0:
            break
        at = seal_at + SEAL_SIZE_BYTES
    starts, sizes = runs.arrays()
    return starts.tolist(), sizes.tolist()
