"""Reads a SendBackRequest whose messages are alike, without an object for each of them. Pure.

    run     neighbours in one queue whose encodings differ in nothing but queue offset and id
    alike   a few runs, perhaps of several queues, that failed in the same way

That is what a consumer sends that gives back what it has polled, or has gathered. The first message of a run is parsed, and the others are
compared with it. Of any other request, and of one that is wrong, `read_alike` says nothing: `send_backs.py` reads it message by message,
and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from protomq.v1.group_service_pb2 import FailedMessage, SendBackRequest
from protomq.wire.record import MESSAGE_ID_LENGTH
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

if TYPE_CHECKING:
    from numpy.typing import NDArray

MESSAGES_MAX: Final = 256
"""Of a request."""
ALIKE_MIN: Final = 3
"""Messages of a run, on average. Fewer are read faster one by one."""
RUNS_MIN: Final = 4
"""With more runs than these, short ones are given up before the rest is looked at."""
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


class AlikeRun(NamedTuple):
    """Neighbours in one queue.

    Attributes:
        first: the first of them; the others stand behind that one in its queue.
        message_count: how many there are.
        ids: their ids in octets, one behind the other; b"" if they are not given.
    """

    first: FailedMessage
    message_count: int
    ids: bytes


class AlikeFailures(NamedTuple):
    """A request that was read.

    Attributes:
        group: the consumer group, not checked.
        has_request_id: whether a repeat is to be recognised.
        runs: its messages, in their order. All give ids, or none does.
        said: what all of them say of the failure, encoded: attempt, error, delay.
    """

    group: str
    has_request_id: bool
    runs: Sequence[AlikeRun]
    said: bytes

    @property
    def message_count(self) -> int:
        """How many messages it names."""
        return sum(run.message_count for run in self.runs)


def read_alike(payload: bytes) -> AlikeFailures | None:
    """The request; None if it has to be read message by message."""
    try:
        return _read(payload)
    except (IndexError, ValueError, DecodeError):
        return None


def _read(payload: bytes) -> AlikeFailures | None:
    if payload[0] != _GROUP_TAG:
        return None
    size, at = read_varint(payload, 1, LENGTH_SIZE_MAX_BYTES)
    group, at = payload[at : at + size].decode(), at + size
    runs: list[AlikeRun] = []
    told: set[tuple[bytes, bool]] = set()
    count = 0
    while at < len(payload) and payload[at] == _MESSAGE_TAG:
        found = _read_run(payload, at)
        if found is None:
            return None
        run, said, at = found
        runs.append(run)
        told.add((said, bool(run.ids)))
        count += run.message_count
        if count > MESSAGES_MAX or len(told) > 1 or (len(runs) > RUNS_MIN and count < ALIKE_MIN * len(runs)):
            return None
    rest = len(payload) - at
    has_request_id = rest == _REQUEST_ID_SIZE_BYTES and payload[at] == _REQUEST_ID_TAG
    if count < ALIKE_MIN * len(runs) or not runs or (rest and not has_request_id) or _overlap(runs):
        return None
    ((said, _),) = told
    return AlikeFailures(group, has_request_id, runs, said)


def _read_run(payload: bytes, start: int) -> tuple[AlikeRun, bytes, int] | None:
    """The run that begins at `start` of a request, what its messages say of the failure, and where it ends."""
    size, at = read_varint(payload, start + 1, LENGTH_SIZE_MAX_BYTES)
    stride = at + size - start
    # Each run is looked for in all that may be of it.
    count = min((len(payload) - start) // stride, MESSAGES_MAX + 1)
    encoded = payload[at : at + size]
    first = FailedMessage.FromString(encoded)
    places = _places_of(encoded, at - start)
    # Only of what a parser writes again as it stands, each field stands where `_places_of` has looked.
    if places is None or first.SerializeToString() != encoded:
        return None
    offset_start, offset_end, id_start, id_end = places
    rows = np.frombuffer(payload, np.uint8, count * stride, start).reshape(count, stride)
    offsets = (rows[:, offset_start:offset_end] & 0x7F) @ _WEIGHTS[: offset_end - offset_start]
    count = _count_same(offsets - first.queue_offset, np.arange(count))
    shared = rows[:count].copy()
    shared[:, offset_start:offset_end] &= 0x80
    shared[:, id_start:id_end] = 0
    if shared.tobytes() != shared[0].tobytes() * count:
        count = _count_same(shared, shared[0])
    ids = bytes.fromhex(rows[:count, id_start:id_end].tobytes().decode("ascii"))
    if len(ids) * 2 != count * (id_end - id_start):
        return None
    return AlikeRun(first, count, ids), payload[start + id_end : start + stride], start + count * stride


def _count_same(rows: NDArray[Any], others: NDArray[Any]) -> int:
    """How many rows are the same as the others up to the first that is not."""
    differs = rows != others
    if differs.ndim > 1:
        differs = differs.any(axis=1)
    first = int(differs.argmax())
    return first if differs[first] else len(rows)


def _overlap(runs: Sequence[AlikeRun]) -> bool:
    """Whether a message is in two of them."""
    if len(runs) == 1:
        return False
    spans = sorted((run.first.topic, run.first.queue_id, run.first.queue_offset, run.message_count) for run in runs)
    return any(
        one[:2] == other[:2] and one[2] + one[3] > other[2] for one, other in pairwise(spans)
    )


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
