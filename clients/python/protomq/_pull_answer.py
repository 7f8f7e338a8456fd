"""Decoding a pull answer: its header, then its records.

    answer    [header: fields 4 to 12][regions: record fields, with seals here and there]

Rules:
- Records behind the header are found by the header's index, never by parsing: 4 MiB of them cost what is touched.
- `decode_records` decodes one by one; `AnswerMessages` finds the positions with numpy, once for the whole answer, and cuts columns. A
  property test says that both give the same, and that both give what protobuf parses. Whatever is unusual is left to the former.
- An answer that no broker of ours wrote, but that is a PullResponse all the same, is parsed by protobuf.

Pure functions.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple

from ._fields import read_varint, skip_value
from ._late_imports import fork_waits
from ._message import (
    TRAILER_SIZE_MIN_BYTES,
    DamagedMessage,
    Message,
    StoredMessage,
)
from ._types import MessageQueue, PullStatus
from .errors import ProtocolError
from .wire.hashing import CONTIGUOUS_MAX_BYTES, crc32c, extend_crc32c
from .wire.record import (
    CRC32C_AT,
    FIXED_TRAILER_SIZE_BYTES,
    FIXED_TRAILER_TAGS,
    FLAG_COMPRESSION_MASK,
    FLAGS_AT,
    RECORD_TAG,
    TAG_CODE_AT,
    TOPIC_TAG,
    encode_front,
    encode_record_field,
    encode_varint,
    front_end,
)

if TYPE_CHECKING:
    from ._record_columns import RecordColumns
    from .v1.record_pb2 import Record

_COLUMNS_COUNT_MIN: Final = 128
"""From this number of records on, numpy finds the positions."""

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
    topic_incarnation: int = 0
    other_member: str = ""
    reset_epoch: int = 0
    log_epoch: int = 0
    suggested_broker_id: int = 0


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
    numbers = {4: 0, 5: 0, 6: 0, 7: 0, 8: 0, 12: 0, 13: 0, 21: 0, 22: 0, 23: 0}
    arrays = {9: b"", 10: b"", 11: b"", 20: b""}
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
    starts, sizes = read_u32s(arrays[9]), read_u32s(arrays[10])
    if numbers[8] and not starts:
        return None  # Regions without an index of their records.
    offsets: Sequence[int] = range(numbers[12], numbers[12] + len(starts))
    if arrays[11]:
        offsets = struct.unpack(f"<{len(arrays[11]) // 8}Q", arrays[11])
    if not len(starts) == len(sizes) == len(offsets):
        raise ProtocolError("a pull answer names more records than it has")
    status = _status_of(numbers[4])
    return PullAnswer(
        status,
        numbers[5],
        numbers[6],
        numbers[7],
        payload,
        header_end,
        starts,
        sizes,
        offsets,
        numbers[13],
        arrays[20].decode("utf-8", "replace"),
        numbers[21],
        numbers[22],
        numbers[23],
    )


def read_u32s(data: bytes) -> Sequence[int]:
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
    fields = [encode_record_field(_canonical(record)) for record in answer.records]
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
        answer.topic_incarnation,
        answer.other_member,
        answer.reset_epoch,
        answer.log_epoch,
        answer.suggested_broker_id,
    )


def _canonical(record: Record) -> bytes:
    """A parsed record as a producer writes it, for its CRC: in what order a map was serialised last is anybody's guess."""
    body = record.body
    parts = [b"\x0a", encode_varint(len(body)), body]
    parts.append(encode_front(record.keys, record.tag, record.properties))
    if record.HasField("attributes"):
        attributes = record.attributes.SerializeToString(deterministic=True)
        parts += (b"\x2a", encode_varint(len(attributes)), attributes)
    trailer = type(record)()
    trailer.CopyFrom(record)
    for name in ("body", "keys", "tag", "properties", "attributes"):
        trailer.ClearField(name)
    return b"".join((*parts, trailer.SerializeToString(deterministic=True)))


def _status_of(number: int) -> PullStatus:
    try:
        return PullStatus(number)
    except ValueError:
        raise ProtocolError(f"pull status {number} is unknown to this version") from None


class AnswerMessages:
    """The messages of one answer, made part by part.

    Some hundreds at a time run faster than thousands: their bodies stay in the cache.
    """

    __slots__ = ("_answer", "_columns", "_queue")

    def __init__(self, answer: PullAnswer, queue: MessageQueue) -> None:
        self._answer = answer
        self._queue = queue
        self._columns: RecordColumns | None = None
        if len(answer.starts) >= _COLUMNS_COUNT_MIN:
            with fork_waits:
                from ._record_columns import locate_records

            self._columns = locate_records(
                answer.raw, answer.base, answer.starts, answer.sizes, len(queue.topic)
            )

    def part(self, start: int, stop: int) -> list[Message]:
        """Messages start to stop. Raises ProtocolError if a record does not have the layout of a stored record."""
        messages = self._cut(start, stop) if self._columns is not None else None
        if messages is not None:
            return messages
        answer, part = self._answer, slice(start, stop)
        starts, sizes, offsets = answer.starts[part], answer.sizes[part], answer.queue_offsets[part]
        return decode_records(answer.raw, answer.base, starts, sizes, offsets, self._queue)

    def _cut(self, start: int, stop: int) -> list[Message] | None:
        """The same as `decode_records`, from the columns; None if a record is not what its CRC says."""
        columns, answer = self._columns, self._answer
        assert columns is not None
        bodies, rests = columns.cut(answer.raw, start, stop)
        if columns.check(answer.raw, start, stop, bodies) != columns.crc32cs[start:stop]:
            return None
        offsets = answer.queue_offsets[start:stop]
        return list(map(Message, bodies, rests, offsets, repeat(self._queue)))


def decode_messages(answer: PullAnswer, queue: MessageQueue) -> list[Message]:
    """All messages of an answer. Raises ProtocolError if a record does not have the layout of a stored record."""
    return AnswerMessages(answer, queue).part(0, len(answer.starts))


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
    # A topic is ASCII on every broker; records of one that is not are walked.
    topic_size = len(queue.topic)
    trailer_size = FIXED_TRAILER_SIZE_BYTES + 2 + topic_size
    raw_size = len(raw)
    # Records of a batch mostly have one size and one head, the tags and lengths before the body: then these are read once.
    known_size, head, record_at, length = -1, b"", 0, 0
    try:
        for start, size, queue_offset in zip(starts, sizes, queue_offsets, strict=True):
            start += base
            end = start + size
            limit = end - trailer_size
            # The high octet of the flags is the broker's: 0 for a record that was not moved.
            is_usual = (
                end <= raw_size
                and raw[limit] == TOPIC_TAG
                and raw[limit + 1] == topic_size
                and not raw[end + FLAGS_AT + 1]
            )
            if is_usual and size == known_size and raw.startswith(head, start):
                position, body_start = start + record_at, start + len(head)
                front = body_start + length
            else:
                record_size, position = read_varint(raw, start + 1)
                if (
                    raw[start] != RECORD_TAG
                    or position + record_size != end
                    or record_size < TRAILER_SIZE_MIN_BYTES
                    or end > raw_size
                ):
                    raise _not_stored(queue, queue_offset)
                body_start = position
                if not is_usual:
                    limit = _front_limit(raw, position, end)
                try:
                    length, body_start = read_varint(raw, position + 1)
                except ProtocolError:
                    length = -1
                front = body_start + length
                known_size = -1
                if length < 0 or front > limit or raw[position] != RECORD_TAG:
                    # Damage has many shapes: the length of the body may be what was hit.
                    body_start = front = position
                elif is_usual:
                    known_size, head, record_at = size, raw[start:body_start], position - start
            body, rest = raw[body_start:front], raw[front:end]
            if front - position <= CONTIGUOUS_MAX_BYTES:
                crc = crc32c(raw[position:limit])
            else:
                head_crc = crc32c(raw[position:body_start])
                crc = extend_crc32c(extend_crc32c(head_crc, body), raw[front:limit])
            if crc == _U32(rest, CRC32C_AT)[0]:
                kind = StoredMessage if rest[FLAGS_AT] & FLAG_COMPRESSION_MASK else Message
                messages.append(kind(body, rest, queue_offset, queue))
            elif raw[end + TAG_CODE_AT - 1] == FIXED_TRAILER_TAGS[0]:
                record = raw[position:end]
                messages.append(DamagedMessage(body, rest, queue_offset, queue, record))
            else:
                raise _not_stored(queue, queue_offset)
    except (IndexError, struct.error) as error:
        raise ProtocolError(f"{queue}: a pull answer ends in the middle of a record") from error
    return messages


def _front_limit(raw: bytes, position: int, end: int) -> int:
    """Where fields 1 to 5 of the record [position, end) end, by a walk. For records that the broker moved, or that have a due time."""
    try:
        return front_end(raw, position, end - FIXED_TRAILER_SIZE_BYTES)
    except ValueError:
        return end - FIXED_TRAILER_SIZE_BYTES


def _not_stored(queue: MessageQueue, queue_offset: int) -> ProtocolError:
    return ProtocolError(
        f"{queue}: the record at offset {queue_offset} does not have the layout of a stored record"
    )
