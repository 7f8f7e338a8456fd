"""CRC-32C of many short pieces at once, and of parts of what a CRC is known of. Pure; needs numpy.

A CRC is linear, with + as exclusive or. For octets A followed by B of n octets:

    crc(A B) = shift(crc(A), n) + crc(B)                shift: what n octets of 0 do to a CRC; it can be undone
    crc(B)   = crc(n octets of 0) + sum over B of table[octets behind it][octet]

So the CRC that A must have is known from that of A B, and A need not be copied to stand beside B.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .hashing import crc32c

_POLYNOMIAL: Final = np.uint32(0x82F63B78)
"""CRC-32C's, its bits in reverse order."""
_TOP_BIT: Final = np.uint32(1 << 31)
_ONE: Final = np.uint32(1)

TABLES_MAX: Final = 64
"""Up to this length of a piece the tables are faster than a call for each piece; they take 64 KiB."""


def crcs_of_rows(octets: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """CRC-32C of each row."""
    count, size = octets.shape
    if size > TABLES_MAX:
        data = octets.tobytes()
        rows = (crc32c(data[start : start + size]) for start in range(0, count * size, size))
        return np.fromiter(rows, np.uint32, count)
    crcs = np.full(count, crc32c(bytes(size)), np.uint32)
    for column in range(size):
        crcs ^= _table(size - 1 - column)[octets[:, column]]
    return crcs


def without_end(crcs: NDArray[np.uint32], ends: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Each of `crcs` is that of some octets followed by the row of `ends` that stands beside it: the CRC-32C of the octets in front."""
    shifted = crcs ^ crcs_of_rows(ends)
    tables = _undoing(ends.shape[1])
    crcs_in_front: NDArray[np.uint32] = tables[0][shifted & 0xFF]
    for place in range(1, 4):
        crcs_in_front ^= tables[place][shifted >> np.uint32(8 * place) & 0xFF]
    return crcs_in_front


@lru_cache(maxsize=TABLES_MAX)
def _table(behind: int) -> NDArray[np.uint32]:
    """What an octet adds to the CRC of octets of 0, with `behind` of them behind it."""
    zeros = bytes(behind)
    return np.array([crc32c(bytes([octet]) + zeros) for octet in range(256)], np.uint32) ^ np.uint32(
        crc32c(bytes(1 + behind))
    )


@lru_cache(maxsize=256)
def _undoing(size: int) -> NDArray[np.uint32]:
    """Four tables, one for each octet of a CRC: what it was before `size` octets of 0."""
    octets = np.arange(256, dtype=np.uint32)
    tables = np.stack([octets << np.uint32(8 * place) for place in range(4)])
    for power, step in enumerate(reversed(f"{size:b}")):
        if step == "1":
            tables = _apply(_undoing_power(power), tables)
    return tables


@lru_cache(maxsize=32)
def _undoing_power(power: int) -> NDArray[np.uint32]:
    """For each bit of a CRC, what it was before 2**power octets of 0."""
    if power:
        half = _undoing_power(power - 1)
        return _apply(half, half)
    bits: NDArray[np.uint32] = _ONE << np.arange(32, dtype=np.uint32)
    for _ in range(8):
        had_top = (bits & _TOP_BIT) != 0
        bits = np.where(had_top, (bits ^ _POLYNOMIAL) << _ONE | _ONE, bits << _ONE)
    return bits


def _apply(of_bits: NDArray[np.uint32], values: NDArray[Any]) -> NDArray[np.uint32]:
    """A linear map, given by what it makes of each bit, on all values."""
    made = np.zeros_like(values)
    for bit in range(32):
        made ^= of_bits[bit] * (values >> np.uint32(bit) & _ONE)
    return made
