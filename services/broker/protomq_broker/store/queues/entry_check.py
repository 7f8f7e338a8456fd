"""Check bits in the entries of consume queues: an entry that does not hold, or stands where another belongs, is not believed.

    entry in a file   position, 7 octets | check, low octet | size, 3 octets | check, high octet | tag_code, 8 octets

    words   w0 .. w4: the 20 octets as five u32, the two check octets taken as 0
    sum     W0 * w0 + ... + W4 * w4  +  STEP * queue offset  +  CRC-32C("<topic>/<queue>") * 2**32      mod 2**64
    check   the upper 16 bits of sum

By the choice of the factors it always finds one or two flipped bits in an entry. It also finds two entries of a queue that have changed
places with fewer than 46,368 between them. Of all other damage, another queue's entries among it, one in 65,536 passes here; then entries
still have to stand in order.

Entries in memory carry no check: it is added where they are written to a file and taken off where they are read from one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protomq.wire.hashing import crc32c
from protomq_broker.store.errors import StoreError

from .selection import ENTRY, ENTRY_SIZE_BYTES

WORD_FACTORS: Final = (
    0x2D65C24B130B9697,
    0x29C7BFA39B35C1EB,
    0xB6F1DED17B53111B,
    0x82912A1B6E7342FF,
    0x62994ADBB0EF8583,
)
"""SHA-256 of "protomq consume queue 0 <n>", first 8 octets, odd: the first such set by which any two flips show (the tests prove it)."""
OFFSET_STEP: Final = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: small multiples of it stay far from 0."""
POSITION_BITS: Final = 56
"""A log may get this long: 22 years of 100 MB/s."""
SIZE_BITS: Final = 24
"""More than a record may have (`record_region.py`)."""

_MASK: Final = (1 << 64) - 1
_WORD_MASK: Final = (1 << 32) - 1
_POSITION_MASK: Final = (1 << POSITION_BITS) - 1
_SIZE_MASK: Final = (1 << SIZE_BITS) - 1
_WORDS: Final = ENTRY_SIZE_BYTES // 4
_LOW_AT: Final = 7
_HIGH_AT: Final = 11
_FACTORS: Final = np.array(WORD_FACTORS, "<u8")
_FEW: Final = 8
"""Up to here a loop over ints is faster than the fixed cost of the array operations."""
_STEPS: Final = np.arange(4096, dtype="<u8") * np.uint64(OFFSET_STEP)
_STRUCT: Final = struct.Struct("<QIq")


def salt_of(topic: str, queue_id: int) -> int:
    """What the entries of one queue have in their sums, and those of others have not."""
    return crc32c(f"{topic}/{queue_id}".encode()) << 32


def check_of(position: int, size: int, tag_code: int, queue_offset: int, salt: int) -> int:
    """The 16 check bits of one entry."""
    w0, w1, w2, w3, w4 = WORD_FACTORS
    total = (
        w0 * (position & _WORD_MASK)
        + w1 * (position >> 32)
        + w2 * size
        + w3 * (tag_code & _WORD_MASK)
        + w4 * (tag_code >> 32 & _WORD_MASK)
        + OFFSET_STEP * queue_offset
        + salt
    )
    return total >> 48 & 0xFFFF


def sealed(entries: memoryview, queue_offset: int, salt: int) -> bytearray:
    """The entries as they stand in a file, the first one at `queue_offset`; StoreError if a position is too large for one."""
    count = len(entries) // ENTRY_SIZE_BYTES
    if int.from_bytes(entries[-ENTRY_SIZE_BYTES:][:8], "little") > _POSITION_MASK:
        raise StoreError(f"a log ends at position {1 << POSITION_BITS}")
    if count <= _FEW:
        few = bytearray(entries)
        for index, (position, size, tag_code) in enumerate(_STRUCT.iter_unpack(entries)):
            check = check_of(position, size, tag_code, queue_offset + index, salt)
            few[index * ENTRY_SIZE_BYTES + _LOW_AT] = check & 0xFF
            few[index * ENTRY_SIZE_BYTES + _HIGH_AT] = check >> 8
        return few
    data = bytearray(entries)
    _enter_checks(data, count, _sums(data, count, queue_offset, salt))
    return data


def sealed_together(
    parts: Sequence[memoryview], queue_offsets: Sequence[int], salts: Sequence[int]
) -> bytearray:
    """`sealed` of entries of many queues, one behind the other: the array operations run once, however many the queues are."""
    data = bytearray().join(parts)
    total = len(data) // ENTRY_SIZE_BYTES
    words = np.frombuffer(data, "<u4").reshape(total, _WORDS)
    if total and int(words[:, 1].max()) >> (POSITION_BITS - 32):
        raise StoreError(f"a log ends at position {1 << POSITION_BITS}")
    counts = [len(part) // ENTRY_SIZE_BYTES for part in parts]
    sums = _sums_together(data, counts, queue_offsets, salts)
    _enter_checks(data, total, sums)
    return data


def _enter_checks(data: bytearray, count: int, sums: NDArray[np.uint64]) -> None:
    octets = np.frombuffer(data, np.uint8).reshape(count, ENTRY_SIZE_BYTES)
    checks = sums.view(np.uint8).reshape(count, 8)
    octets[:, _LOW_AT] = checks[:, 6]
    octets[:, _HIGH_AT] = checks[:, 7]


def opened(
    data: bytes | bytearray, count: int, queue_offset: int, salt: int
) -> tuple[NDArray[Any], int]:
    """(the entries without their checks, how many hold up to the first that does not), as they stood in a file."""
    if count <= _FEW:
        return _opened_few(data, count, queue_offset, salt)
    content = bytearray(memoryview(data)[: count * ENTRY_SIZE_BYTES])
    octets = np.frombuffer(content, np.uint8).reshape(count, ENTRY_SIZE_BYTES)
    low, high = octets[:, _LOW_AT].copy(), octets[:, _HIGH_AT].copy()
    octets[:, _LOW_AT] = 0
    octets[:, _HIGH_AT] = 0
    sums = _sums(content, count, queue_offset, salt).view(np.uint8).reshape(count, 8)
    wrong = low != sums[:, 6]
    wrong |= high != sums[:, 7]
    good = int(wrong.argmax()) if np.count_nonzero(wrong) else count
    return np.frombuffer(content, ENTRY, count), good


def opened_together(
    data: bytes | bytearray, counts: Sequence[int], queue_offsets: Sequence[int], salts: Sequence[int]
) -> NDArray[Any] | None:
    """`opened` of entries of many queues, one behind the other, as they stood in files; None if one of them does not hold."""
    content = bytearray(data)
    octets = np.frombuffer(content, np.uint8).reshape(-1, ENTRY_SIZE_BYTES)
    low, high = octets[:, _LOW_AT].copy(), octets[:, _HIGH_AT].copy()
    octets[:, _LOW_AT] = 0
    octets[:, _HIGH_AT] = 0
    sums = _sums_together(content, counts, queue_offsets, salts).view(np.uint8).reshape(-1, 8)
    wrong = low != sums[:, 6]
    wrong |= high != sums[:, 7]
    return None if np.count_nonzero(wrong) else np.frombuffer(content, ENTRY)


def position_in(entry: bytes | bytearray | memoryview) -> int:
    """The position in a sealed entry; its check is not looked at."""
    return int.from_bytes(entry[: POSITION_BITS // 8], "little")


def which_hold(
    data: bytes, count: int, queue_offset: int, salt: int
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """(`count` entries without their checks, which of them hold), as they stood in a file; `data` may be shorter than they are."""
    content = bytearray(count * ENTRY_SIZE_BYTES)
    content[: len(data)] = data
    octets = np.frombuffer(content, np.uint8).reshape(count, ENTRY_SIZE_BYTES)
    low, high = octets[:, _LOW_AT].copy(), octets[:, _HIGH_AT].copy()
    octets[:, _LOW_AT] = 0
    octets[:, _HIGH_AT] = 0
    sums = _sums(content, count, queue_offset, salt).view(np.uint8).reshape(count, 8)
    holds = (low == sums[:, 6]) & (high == sums[:, 7])
    holds[len(data) // ENTRY_SIZE_BYTES :] = False
    return np.frombuffer(content, ENTRY, count), holds


def _opened_few(
    data: bytes | bytearray, count: int, queue_offset: int, salt: int
) -> tuple[NDArray[Any], int]:
    entries: list[tuple[int, int, int]] = []
    good = count
    for index in range(count):
        position, size, tag_code = _STRUCT.unpack_from(data, index * ENTRY_SIZE_BYTES)
        found = position >> POSITION_BITS | size >> SIZE_BITS << 8
        position, size = position & _POSITION_MASK, size & _SIZE_MASK
        entries.append((position, size, tag_code))
        if found != check_of(position, size, tag_code, queue_offset + index, salt):
            good = min(good, index)
    return np.array(entries, ENTRY), good


def _sums(data: bytearray, count: int, queue_offset: int, salt: int) -> NDArray[np.uint64]:
    """The sums of entries whose check octets are 0: the upper two octets of each are its check."""
    words = np.frombuffer(data, "<u4", count * _WORDS).reshape(count, _WORDS)
    sums: NDArray[np.uint64] = words @ _FACTORS
    if count <= len(_STEPS):
        sums += _STEPS[:count]
    else:
        sums += np.arange(count, dtype=np.uint64) * np.uint64(OFFSET_STEP)
    sums += np.uint64((OFFSET_STEP * queue_offset + salt) & _MASK)
    return sums


def _sums_together(
    data: bytearray, counts: Sequence[int], queue_offsets: Sequence[int], salts: Sequence[int]
) -> NDArray[np.uint64]:
    """`_sums` of entries of many queues, one behind the other. `counts`: of the entries of each."""
    words = np.frombuffer(data, "<u4").reshape(-1, _WORDS)
    # Entry i of a part has the sum of a part that begins at its first entry; the arithmetic is modulo 2**64.
    bases, start = [], 0
    for count, offset, salt in zip(counts, queue_offsets, salts, strict=True):
        bases.append(OFFSET_STEP * (offset - start) + salt & _MASK)
        start += count
    sums: NDArray[np.uint64] = words @ _FACTORS
    sums += _STEPS[: len(sums)] if len(sums) <= len(_STEPS) else np.arange(len(sums), dtype=np.uint64) * np.uint64(OFFSET_STEP)
    sums += np.repeat(np.array(bases, np.uint64), counts)
    return sums
