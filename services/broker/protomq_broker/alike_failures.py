"""Reads a SendBackRequest whose messages are alike, without an object for each of them. Pure.

    alike   neighbours in one queue that failed in the same way: their encodings differ in nothing but queue offset and id

That is what a consumer sends that gives back what it has polled. The first message is parsed, and the others are compared with it. Of any
other request, and of one that is wrong, `read_alike` says nothing: `send_backs.py` reads it message by message, and says what is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from protomq.v1.group_service_pb2 import FailedMessage, SendBackRequest
from protomq.wire.record import MESSAGE_ID_LENGTH
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIKE_MIN: Final = 3
"""Fewer are read faster one by one."""
_OFFSET_SIZE_MAX_BYTES: Final = 9
"""Of the offset as a varint; a tenth octet has a negative number."""


def _tag_of(message: type[FailedMessage] | type[SendBackRequest], field: str, wire_type: int) -> int:
    tag: int = message.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type
    assert tag < 0x80
    return tag


_VARINT, _I64, _LENGTH = 0, 1, 2
_GROUP_TAG: Final = _tag_of(SendBackRequest, "consumer_group", _LENGTH)
_MESSAGE_TAG: Final = _tag_of(SendBackRequest, "messages", _LENGTH)
_REQUEST_ID_TAG: Final = _tag_of(SendBackRequest, "request_id", _I64)
_REQUEST_ID_SIZE_BYTES: Final = 9
_TOPIC_TAG: Final = _tag_of(FailedMessage, "topic", _LENGTH)
_QUEUE_ID_TAG: Final = _tag_of(FailedMessage, "queue_id", _VARINT)
_OFFSET_TAG: Final = _tag_of(FailedMessage, "queue_offset", _VARINT)
_INCARNATION_TAG: Final = _tag_of(FailedMessage, "topic_incarnation", _VARINT)
_ID_TAG: Final = _tag_of(FailedMessage, "message_id", _LENGTH)
_WEIGHTS: Final = np.int64(1) << np.arange(0, 7 * _OFFSET_SIZE_MAX_BYTES, 7, dtype=np.int64)


class AlikeFailures(NamedTuple):
    """A request that was read.

    Attributes:
        group: the consumer group, not checked.
        has_request_id: whether a repeat is to be recognised.
        first: its first message; the others stand behind that one in its queue.
        message_count: how many there are.
        ids: their ids in octets, one behind the other; b"" if they are not given.
        said: what all of them say of the failure, encoded: attempt, error, delay.
    """

    group: str
    has_request_id: bool
    first: FailedMessage
    message_count: int
    ids: bytes
    said: bytes


def read_alike(payload: bytes) -> AlikeFailures | None:
    """The request; None if it has to be read message by message."""
    try:
        return _read(payload)
    except (IndexError, ValueError, DecodeError):
        return None


def _read(payload: bytes) -> AlikeFailures | None:
    if payload[0] != _GROUP_TAG:
        return None
    size, start = read_varint(payload, 1, LENGTH_SIZE_MAX_BYTES)
    group, start = payload[start : start + size].decode(), start + size
    size, at = read_varint(payload, start + 1, LENGTH_SIZE_MAX_BYTES)
    stride = at + size - start
    count, rest = divmod(len(payload) - start, stride)
    has_request_id = rest == _REQUEST_ID_SIZE_BYTES and payload[-rest] == _REQUEST_ID_TAG
    if payload[start] != _MESSAGE_TAG or count < ALIKE_MIN or (rest and not has_request_id):
        return None
    encoded = payload[at : at + size]
    first = FailedMessage.FromString(encoded)
    places = _places_of(encoded, at - start)
    # Only of what a parser writes again as it stands, each field stands where `_places_of` has looked.
    if places is None or first.SerializeToString() != encoded:
        return None
    offset_start, offset_end, id_start, id_end = places
    rows = np.frombuffer(payload, np.uint8, count * stride, start).reshape(count, stride)
    offsets = rows[:, offset_start:offset_end]
    if not (
        _are_same(rows[:, :offset_start])
        and _are_same(offsets & 0x80)
        and _are_same(rows[:, offset_end:id_start])
        and _are_same(rows[:, id_end:])
    ):
        return None
    steps = (offsets & 0x7F) @ _WEIGHTS[: offset_end - offset_start] - first.queue_offset
    if steps.tobytes() != np.arange(count).tobytes():
        return None
    ids = bytes.fromhex(rows[:, id_start:id_end].tobytes().decode("ascii"))
    if len(ids) * 2 != count * (id_end - id_start):
        return None
    return AlikeFailures(group, has_request_id, first, count, ids, payload[start + id_end : start + stride])


def _places_of(message: bytes, base: int) -> tuple[int, int, int, int] | None:
    """Where the offset begins and ends, and the id, in a FailedMessage at `base`. None if it has no offset, or an id that cannot be one."""
    at = 0
    if message[at] == _TOPIC_TAG:
        size, at = read_varint(message, at + 1, LENGTH_SIZE_MAX_BYTES)
        at += size
    if message[at] == _QUEUE_ID_TAG:
        _, at = read_varint(message, at + 1)
    if message[at] != _OFFSET_TAG:
        return None
    offset_start = at + 1
    _, offset_end = read_varint(message, offset_start, _OFFSET_SIZE_MAX_BYTES)
    at = offset_end
    if at < len(message) and message[at] == _INCARNATION_TAG:
        _, at = read_varint(message, at + 1)
    id_start = id_end = at
    if at < len(message) and message[at] == _ID_TAG:
        id_start, id_end = at + 2, at + 2 + MESSAGE_ID_LENGTH
        if message[at + 1] != MESSAGE_ID_LENGTH:
            return None
    return base + offset_start, base + offset_end, base + id_start, base + id_end


def _are_same(rows: NDArray[Any]) -> bool:
    return rows.tobytes() == rows[0].tobytes() * len(rows)
