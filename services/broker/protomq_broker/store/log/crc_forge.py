"""Running CRC-32C backwards.

A CRC is no signature: for any result there are four bytes that lead to it. Two places need that. A chain that is taken up at the head of a
segment has a known CRC there and wants the one before it. And a repaired range must end in the very CRC with which the appends behind it
go on. So those stay as they are, byte for byte, on this broker and on its replicas.
"""

from __future__ import annotations

from typing import Final

from protomq.wire.hashing import extend_crc32c

_POLYNOMIAL: Final = 0x82F63B78


def _make_tables() -> tuple[list[int], dict[int, int]]:
    table = []
    for index in range(256):
        value = index
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table, {value >> 24: index for index, value in enumerate(table)}


_TABLE, _INDEX_BY_TOP = _make_tables()
assert len(_INDEX_BY_TOP) == 256


def unwind_crc32c(crc32c: int, data: bytes) -> int:
    """The CRC before `data`, if it is `crc32c` behind it: extend_crc32c(unwind_crc32c(c, data), data) == c."""
    state = crc32c ^ 0xFFFFFFFF
    for octet in reversed(data):
        index = _INDEX_BY_TOP[state >> 24]
        state = (state ^ _TABLE[index]) << 8 & 0xFFFFFFFF | index ^ octet
    return state ^ 0xFFFFFFFF


def bytes_between(before: int, after: int) -> bytes:
    """The four bytes that lead from one CRC to another: extend_crc32c(before, bytes_between(before, after)) == after."""
    state = unwind_crc32c(after, bytes(4)) ^ 0xFFFFFFFF
    return (state ^ before ^ 0xFFFFFFFF).to_bytes(4, "little")


def crc32c_before(covered: bytes, sealed: int) -> int:
    """The CRC of the previous seal, given what a seal covers and its own CRC."""
    return int.from_bytes(bytes_between(0, unwind_crc32c(sealed, covered)), "little")


assert (
    extend_crc32c(extend_crc32c(0, b"protomq"), bytes_between(extend_crc32c(0, b"protomq"), 42))
    == 42
)
