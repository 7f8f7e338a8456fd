"""Reading protobuf's numbers of variable length, base 128, the low seven bits first. (Writing them: `record.encode_varint`.)"""

from __future__ import annotations

from typing import Final

VARINT_SIZE_MAX_BYTES: Final = 10
LENGTH_SIZE_MAX_BYTES: Final = 5
"""Of a length, which protobuf keeps below 2^31."""


def read_varint(
    data: bytes | bytearray | memoryview, position: int, size_max_bytes: int = VARINT_SIZE_MAX_BYTES
) -> tuple[int, int]:
    """(the number that begins at `position`, in [0, 2^(7 * size_max_bytes)); the position behind it).

    Raises IndexError where the data end before it does, ValueError if it has more octets.
    """
    octet = data[position]
    value = octet & 0x7F
    shift = 7
    while octet >= 0x80:
        if shift >= 7 * size_max_bytes:
            raise ValueError(f"a varint of more than {size_max_bytes} octets")
        position += 1
        octet = data[position]
        value |= (octet & 0x7F) << shift
        shift += 7
    return value, position + 1
