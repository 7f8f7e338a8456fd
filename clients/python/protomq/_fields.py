"""Fields of encoded messages, read one by one where parsing the whole would cost too much. Pure functions."""

from __future__ import annotations

from .errors import ProtocolError
from .wire import varints


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """(value as a signed 64-bit number, position behind it); IndexError at the end of the data."""
    byte = data[position]
    if byte < 0x80:
        return byte, position + 1
    following = data[position + 1]
    if following < 0x80:
        return byte & 0x7F | following << 7, position + 2
    try:
        value, position = varints.read_varint(data, position)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    return (value if value < 1 << 63 else value - (1 << 64)), position


def field_values(data: bytes, number: int) -> list[bytes]:
    """The values of all occurrences of a length-delimited field, in a message that parses."""
    values: list[bytes] = []
    position = 0
    while position < len(data):
        field_tag, start = read_varint(data, position)
        position = skip_value(data, start, field_tag)
        if field_tag == number << 3 | 2:
            values.append(data[read_varint(data, start)[1] : position])
    return values


def skip_value(data: bytes, position: int, field_tag: int) -> int:
    """Position behind the value of a field that this version does not know."""
    wire_type = field_tag & 7
    if wire_type == 0:
        return read_varint(data, position)[1]
    if wire_type == 1:
        return position + 8
    if wire_type == 2:
        size, position = read_varint(data, position)
        return position + size
    if wire_type == 5:
        return position + 4
    raise ProtocolError(f"field tag {field_tag:#x} has a wire type that is not in use")
