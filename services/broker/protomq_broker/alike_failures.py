"""Reads a SendBackRequest whose messages are alike, without an object for each of them. Pure.

    run     messages side by side whose encodings have one size, and differ in nothing but queue, queue offset and id
    alike   a few runs that failed in the same way

That is what a consumer sends that gives back what it has polled, or some of it. The first message of a run is parsed, and the others are
compared with it. A newer consumer names the runs itself (`SendBackRequest.alike`), which costs a tenth. Of any other request, and of one
that is wrong, `read_alike` says nothing: `send_backs.py` reads it message by message, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from protomq.v1.group_service_pb2 import AlikeFailures as EncodedFailures
from protomq.v1.group_service_pb2 import FailedMessage, SendBackRequest
from protomq.wire.record import MESSAGE_ID_LENGTH
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, VARINT_SIZE_MAX_BYTES, read_varint

if TYPE_CHECKING:
    from numpy.typing import NDArray

MESSAGES_MAX: Final = 256
"""Of a request that names each message."""
NAMED_MAX: Final = 1_024
"""Of a request that names the runs."""
ALIKE_MIN: Final = 3
"""Messages of a run, on average. Fewer are read faster one by one."""
RUNS_MIN: Final = 4
"""With more runs than these, short ones are given up before the rest is looked at."""
_OFFSET_SIZE_MAX_BYTES: Final = 9
"""Of the offset as a varint; a tenth octet has a negative number."""
_QUEUE_ID_SIZE_MAX_BYTES: Final = 4
"""Of a queue as a varint. Of more, a parser may drop some bits."""


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
_ID_SIZE_BYTES: Final = MESSAGE_ID_LENGTH // 2
_OFFSET_MAX: Final = (1 << 62) - 1
_WEIGHTS: Final = np.int64(1) << np.arange(0, 7 * _OFFSET_SIZE_MAX_BYTES, 7, dtype=np.int64)


class AlikeRun(NamedTuple):
    """Messages of one topic.

    Attributes:
        first: what they have in common, with queue, offset and id of the first of them, or of none.
        queue_ids, queue_offsets: where each was pulled.
        ids: their ids in octets, one behind the other; b"" if they are not given.
    """

    first: FailedMessage
    queue_ids: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]
    ids: bytes

    @property
    def message_count(self) -> int:
        """How many there are."""
        return len(self.queue_offsets)


class AlikeFailures(NamedTuple):
    """A request that was read.

    Attributes:
        group: the consumer group, not checked.
        has_request_id: whether a repeat is to be recognised.
        runs: its messages, in their order. All give ids, or none does.
        said: what all of them say of the failure, encoded: attempt, error, delay, and the topic, if the request names the runs.
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
    if at < len(payload) and payload[at] != _MESSAGE_TAG:
        return _read_named(payload)
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
    if count < ALIKE_MIN * len(runs) or not runs or (rest and not has_request_id) or _names_twice(runs):
        return None
    ((said, _),) = told
    return AlikeFailures(group, has_request_id, runs, said)


def _read_named(payload: bytes) -> AlikeFailures | None:
    """A request that names the runs itself."""
    request = SendBackRequest.FromString(payload)
    failures = request.alike
    queue_ids, firsts, counts = _named_runs(failures)
    common, ids = failures.common, failures.message_ids
    if request.messages or _mistake_in(queue_ids, firsts, counts, common, ids):
        return None
    if len(counts) == 1:
        of_queue = np.full(counts[0], queue_ids[0], np.int64)
        offsets = np.arange(firsts[0], firsts[0] + counts[0])
    else:
        spans = sorted(zip(queue_ids, firsts, counts, strict=True))
        if any(one[0] == behind[0] and one[1] + one[2] > behind[1] for one, behind in pairwise(spans)):
            return None  # a message is named twice
        of_queue = np.repeat(np.array(queue_ids, np.int64), counts)
        offsets = np.concatenate([np.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)])
    run = AlikeRun(common, of_queue, offsets, ids)
    return AlikeFailures(request.consumer_group, bool(request.request_id), [run], common.SerializeToString())


def messages_of(request: SendBackRequest) -> list[FailedMessage]:
    """All messages that a request names. Raises ValueError for runs that are none."""
    messages = list(request.messages)
    if not request.HasField("alike"):
        return messages
    failures = request.alike
    queue_ids, firsts, counts = _named_runs(failures)
    mistake = _mistake_in(queue_ids, firsts, counts, failures.common, failures.message_ids)
    if mistake := "stands beside messages" if messages else mistake:
        raise ValueError(mistake)
    ids = failures.message_ids.hex().upper()
    for queue_id, first, count in zip(queue_ids, firsts, counts, strict=True):
        for queue_offset in range(first, first + count):
            at = len(messages) * MESSAGE_ID_LENGTH
            message = FailedMessage(queue_id=queue_id, queue_offset=queue_offset, message_id=ids[at : at + MESSAGE_ID_LENGTH])
            message.MergeFrom(failures.common)
            messages.append(message)
    return messages


def _named_runs(failures: EncodedFailures) -> tuple[list[int], list[int], list[int]]:
    """Queue, first offset and number of messages of each run that a request names. Slices: protobuf copies them faster than `list`."""
    return failures.queue_ids[:], failures.first_offsets[:], failures.message_counts[:]


def _mistake_in(queue_ids: list[int], firsts: list[int], counts: list[int], common: FailedMessage, ids: bytes) -> str:
    """What is wrong with runs that a request names; "" if nothing is."""
    if not counts or not len(counts) == len(queue_ids) == len(firsts):
        return "has not a queue, a first offset and a number of messages for each run, and one run at least"
    count = sum(counts)
    if min(counts) < 1 or count > NAMED_MAX:
        return f"has not 1 to {NAMED_MAX} messages, one at least in each run"
    if min(queue_ids) < 0 or min(firsts) < 0 or max(firsts) > _OFFSET_MAX:
        return "has a queue or an offset that none can be"
    if len(ids) not in (0, count * _ID_SIZE_BYTES):
        return f"has not an id of {_ID_SIZE_BYTES} octets for each message"
    if common.queue_id or common.queue_offset or common.message_id:
        return "has a queue, offset or id in common, which only one message can have"
    return ""


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
    queue_start, queue_end, offset_start, offset_end, id_start, id_end = places
    rows = np.frombuffer(payload, np.uint8, count * stride, start).reshape(count, stride)
    shared = rows.copy()
    shared[:, queue_start:queue_end] &= 0x80
    shared[:, offset_start:offset_end] &= 0x80
    shared[:, id_start:id_end] = 0
    if shared.tobytes() != shared[0].tobytes() * count:
        count = int((shared != shared[0]).any(axis=1).argmax())
        rows = rows[:count]
    ids = bytes.fromhex(rows[:, id_start:id_end].tobytes().decode("ascii"))
    if len(ids) * 2 != count * (id_end - id_start):
        return None
    queue_ids, queue_offsets = _numbers(rows[:, queue_start:queue_end]), _numbers(rows[:, offset_start:offset_end])
    run = AlikeRun(first, queue_ids, queue_offsets, ids)
    return run, payload[start + id_end : start + stride], start + count * stride


def _numbers(varints: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The values of varints of one size, a row for each; 0 if they have no octets."""
    found: NDArray[np.int64] = (varints & 0x7F) @ _WEIGHTS[: varints.shape[1]]
    return found


def _names_twice(runs: Sequence[AlikeRun]) -> bool:
    """Whether a message is in them twice."""
    for topic in {run.first.topic for run in runs}:
        ours = [run for run in runs if run.first.topic == topic]
        queue_ids = np.concatenate([run.queue_ids for run in ours])
        offsets = np.concatenate([run.queue_offsets for run in ours])
        if not _rise(queue_ids, offsets):
            order = np.lexsort((offsets, queue_ids))
            if not _rise(queue_ids[order], offsets[order]):
                return True
    return False


def _rise(queue_ids: NDArray[np.int64], offsets: NDArray[np.int64]) -> bool:
    """Whether each place is behind the one before."""
    is_behind = offsets[1:] > offsets[:-1]
    if queue_ids[0] != queue_ids[-1] or np.count_nonzero(queue_ids != queue_ids[0]):
        steps = queue_ids[1:] - queue_ids[:-1]
        is_behind = (steps > 0) | ((steps == 0) & is_behind)
    return np.count_nonzero(is_behind) == len(is_behind)


def _places_of(message: bytes, base: int) -> tuple[int, int, int, int, int, int] | None:
    """Where queue, offset and id begin and end in a FailedMessage at `base`; what is left out begins and ends at one place. None if it has
    an id that cannot be one.
    """
    at = 0
    if message[at] == _TOPIC_TAG:
        size, at = read_varint(message, at + 1, LENGTH_SIZE_MAX_BYTES)
        at += size
    queue_start, at = _varint_at(message, at, _QUEUE_ID_TAG, _QUEUE_ID_SIZE_MAX_BYTES)
    queue_end = at
    offset_start, at = _varint_at(message, at, _OFFSET_TAG, _OFFSET_SIZE_MAX_BYTES)
    offset_end = at
    _, at = _varint_at(message, at, _INCARNATION_TAG, VARINT_SIZE_MAX_BYTES)
    id_start = id_end = at
    if at < len(message) and message[at] == _ID_TAG:
        id_start, id_end = at + 2, at + 2 + MESSAGE_ID_LENGTH
        if message[at + 1] != MESSAGE_ID_LENGTH:
            return None
    return base + queue_start, base + queue_end, base + offset_start, base + offset_end, base + id_start, base + id_end


def _varint_at(message: bytes, at: int, tag: int, size_max_bytes: int) -> tuple[int, int]:
    """Where the value of a field begins and ends, if it stands at `at`; if not, both are `at`."""
    if at >= len(message) or message[at] != tag:
        return at, at
    return at + 1, read_varint(message, at + 1, size_max_bytes)[1]
