"""Decoding a pull answer: its header, then its records.

    answer    [header: fields 4 to 12][regions: record fields, with seals here and there]

Rules:
- Records behind the header are found by the header's index, never by parsing: 4 MiB of them cost what is touched.
- `decode_records` decodes one by one, `_decode_many` finds the positions with numpy; a property test says that both give the
  same, and that both give what protobuf parses. Whatever is unusual is left to the former.
- An answer that no broker of ours wrote, but that is a PullResponse all the same, is parsed by protobuf.

Pure functions.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from ._message import TRAILER_SIZE_MIN_BYTES, Message, read_varint, skip_value
from ._types import MessageQueue, PullStatus
from .errors import ProtocolError
from .wire.hashing import crc32c
from .wire.record import (
    BODY_CRC32C_AT,
    FLAG_COMPRESSION_MASK,
    FLAGS_AT,
    RECORD_TAG,
    encode_record_field,
)

_COLUMNS_COUNT_MIN: Final = 64
"""From so many records on, positions are found with numpy."""

_U32: Final = struct.Struct("<I").unpack_from


class PullAnswer(NamedTuple):
    """A decoded PullResponse. `starts` are positions in the regions, which begin at `base` in `raw`; `sizes` those of whole fields."""

    status: PullStatus
    next_offset: int
    min_offset: int
    end_offset: int
    raw: bytes
    base: int
    starts: Sequence[int]
    sizes: Sequence[int]
    queue_offsets: Sequence[int]


def decode_pull_answer(payload: bytes) -> PullAnswer:
    """Decodes the header of an encoded PullResponse without touching the records behind it. Raises ProtocolError.

    The brokers write the header first and the records last. An answer in any other order is parsed by protobuf.
    """
    try:
        answer = _scan_pull_answer(payload)
    except (
        IndexError,
        TypeError,
        struct.error,
    ) as error:  # TypeError: memoryview.cast of a length that does not fit.
        raise ProtocolError("a pull answer ends in the middle of a field") from error
    return answer if answer is not None else _parse_pull_answer(payload)


def _scan_pull_answer(payload: bytes) -> PullAnswer | None:
    numbers = {4: 0, 5: 0, 6: 0, 7: 0, 8: 0, 12: 0}
    arrays = {9: b"", 10: b"", 11: b""}
    position, header_end = 0, len(payload)
    while position < header_end:
        field_tag, position = read_varint(payload, position)
        number, wire_type = field_tag >> 3, field_tag & 7
        if number <= 3:
            return None  # Records where the header was expected.
        if wire_type == 0 and number in numbers:
            value, position = read_varint(payload, position)
            numbers[number] = value
            if number == 8:
                header_end = len(payload) - value
        elif wire_type == 2 and number in arrays:
            size, position = read_varint(payload, position)
            arrays[number] = payload[position : position + size]
            position += size
        else:
            position = skip_value(payload, position, field_tag)
    if position != header_end:
        raise ProtocolError("a pull answer ends in the middle of a field")
    starts, sizes = _read_u32s(arrays[9]), _read_u32s(arrays[10])
    if numbers[8] and not starts:
        return None  # Regions without an index of their records.
    offsets: Sequence[int] = range(numbers[12], numbers[12] + len(starts))
    if arrays[11]:
        offsets = struct.unpack(f"<{len(arrays[11]) // 8}Q", arrays[11])
    if not len(starts) == len(sizes) == len(offsets):
        raise ProtocolError("a pull answer names more records than it has")
    status = _status_of(numbers[4])
    return PullAnswer(
        status, numbers[5], numbers[6], numbers[7], payload, header_end, starts, sizes, offsets
    )


def _read_u32s(data: bytes) -> Sequence[int]:
    """Packed fixed32 numbers; not copied where the machine has their byte order."""
    if sys.byteorder == "little":
        return memoryview(data).cast("I")
    return struct.unpack(f"<{len(data) // 4}I", data)


def _parse_pull_answer(payload: bytes) -> PullAnswer:
    """The slow way, which proves the fast one right in the tests and takes what any protobuf library may have written."""
    from google.protobuf.message import DecodeError

    from .v1 import pull_service_pb2

    try:
        answer = pull_service_pb2.PullResponse.FromString(payload)
    except DecodeError as error:
        raise ProtocolError(f"a pull answer does not parse: {error}") from error
    fields = [
        encode_record_field(record.SerializeToString(deterministic=True))
        for record in answer.records
    ]
    starts, position = [], 0
    for field in fields:
        starts.append(position)
        position += len(field)
    return PullAnswer(
        _status_of(answer.status),
        answer.next_offset,
        answer.min_offset,
        answer.end_offset,
        b"".join(fields),
        0,
        starts,
        [len(field) for field in fields],
        [record.queue_offset for record in answer.records],
    )


def _status_of(number: int) -> PullStatus:
    try:
        return PullStatus(number)
    except ValueError:
        raise ProtocolError(f"pull status {number} is unknown to this version") from None


def decode_messages(
    answer: PullAnswer, queue: MessageQueue, start: int = 0, stop: int | None = None
) -> list[Message]:
    """Messages start to stop of an answer. Some hundreds at a time run faster than thousands: their bodies stay in the cache.

    Raises ProtocolError if a record does not have the layout of a stored record.
    """
    part = slice(start, stop)
    starts, sizes, queue_offsets = (
        answer.starts[part],
        answer.sizes[part],
        answer.queue_offsets[part],
    )
    if len(starts) >= _COLUMNS_COUNT_MIN:
        messages = _decode_many(answer.raw, answer.base, starts, sizes, queue_offsets, queue)
        if messages is not None:
            return messages
    return decode_records(answer.raw, answer.base, starts, sizes, queue_offsets, queue)


def _decode_many(
    raw: bytes,
    base: int,
    starts: Sequence[int],
    sizes: Sequence[int],
    queue_offsets: Sequence[int],
    queue: MessageQueue,
) -> list[Message] | None:
    """The same as `decode_records`, with positions found by numpy; None if anything is unusual."""
    from ._record_columns import locate_records

    columns = locate_records(raw, base, starts, sizes)
    if columns is None:
        return None
    body_starts, fronts, ends, body_crc32cs = columns
    bodies = [raw[start:front] for start, front in zip(body_starts, fronts, strict=True)]
    if list(map(crc32c, bodies)) != body_crc32cs:
        return None
    return [
        Message(raw, front, end, body, queue_offset, queue)
        for front, end, body, queue_offset in zip(fronts, ends, bodies, queue_offsets, strict=True)
    ]


def decode_records(
    raw: bytes,
    base: int,
    starts: Sequence[int],
    sizes: Sequence[int],
    queue_offsets: Sequence[int],
    queue: MessageQueue,
) -> list[Message]:
    """One message for each record field of `raw`. Raises ProtocolError if one does not have the layout of a stored record."""
    messages: list[Message] = []
    try:
        for start, size, queue_offset in zip(starts, sizes, queue_offsets, strict=True):
            start += base
            end = start + size
            record_size, position = read_varint(raw, start + 1)
            length, body_start = read_varint(raw, position + 1)
            front = body_start + length
            if (
                raw[start] != RECORD_TAG
                or raw[position] != RECORD_TAG
                or position + record_size != end
                or not body_start <= front <= end - TRAILER_SIZE_MIN_BYTES
                or end > len(raw)
            ):
                raise ProtocolError(
                    f"{queue}: the record at offset {queue_offset} does not have the layout of a stored record"
                )
            body = raw[body_start:front]
            if (
                raw[end + FLAGS_AT] & FLAG_COMPRESSION_MASK
                or crc32c(body) != _U32(raw, end + BODY_CRC32C_AT)[0]
            ):
                message = Message(raw, front, end, None, queue_offset, queue)
                message._body_start = body_start
                messages.append(message)
            else:
                messages.append(Message(raw, front, end, body, queue_offset, queue))
    except (IndexError, struct.error) as error:
        raise ProtocolError(f"{queue}: a pull answer ends in the middle of a record") from error
    return messages
