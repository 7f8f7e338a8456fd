"""Finds messages by where they were pulled, and makes the copies of those that failed.

All messages of a request are looked up together, by arrays: entries of queues, then the log from its lowest position on. Each record says
which message it is. If that fails for one of them, they are looked up one by one, which says what is wrong.

Who had them may give them back, though the topic may not be read any more, or has fewer queues: else they would be lost.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from protomq.wire import record as layout
from protomq.wire.record import decode_message_id, encode_message_id
from protomq.wire.trailer_arrays import FIXED_TRAILER_DTYPE
from protomq_runtime.errors import Code, ServiceError, invalid_argument

from .slave_gate import replica_behind
from .store.log.append import AppendRequest
from .store.log.move import move_records
from .store.log.move_alike import attempt_of_all, rows_of
from .store.log.record_arrays import opaque, topic_field_of, windows
from .store.log.transit import attempt_of
from .store.queues.reading import ReadResult, ReadStatus
from .topic_access import check_incarnation, check_known_queues, existing_topic

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from protomq.v1.group_service_pb2 import FailedMessage

    from .alike_failures import AlikeRun
    from .store.state.topics import TopicConfig
    from .store.store import Store

_IDENTITY: Final = struct.Struct("<QxIxQ")
"""Producer id, epoch and sequence, as they stand in a trailer, with a tag between."""
_ID_PLACES: Final = np.array(
    [
        layout.FIXED_TRAILER_SIZE_BYTES + at + octet
        for at, size in ((layout.PRODUCER_ID_AT, 8), (layout.PRODUCER_EPOCH_AT, 4), (layout.SEQUENCE_AT, 8))
        for octet in reversed(range(size))
    ]
)
"""The octets of a trailer in the order of a message id."""
TOGETHER_MIN: Final = 3
"""Fewer messages are looked up faster one by one."""
TOGETHER_SIZE_MAX_BYTES: Final = 8 << 20
"""Most bytes of messages that are looked up together. A request may name more, but is refused then."""
PIECES_MAX: Final = 8
"""Entries of more pieces of queues than these are looked up in the order of their queues."""
READ_SIZE_BYTES: Final = 1 << 20
"""Size of one read of neighbouring messages."""

Place = tuple[str, int, int]
"""Topic, queue, queue offset."""


@dataclass(slots=True)
class FoundMessages:
    """Messages that failed, in the order in which they were asked for.

    Attributes:
        data: bytes that have their record fields.
        starts, sizes: where each record field begins in `data`, and how long it is.
        attempts: how often each was handed out before.
    """

    data: bytes
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    attempts: list[int]

    @property
    def size_bytes(self) -> int:
        """Size of all record fields."""
        return int(self.sizes.sum())

    def as_asked(self, numbers: Sequence[int]) -> FoundMessages:
        """In the order of their numbers in the request. `numbers`: of each."""
        rows = np.argsort(numbers)
        return FoundMessages(self.data, self.starts[rows], self.sizes[rows], [self.attempts[row] for row in rows.tolist()])


class RetryPlan(NamedTuple):
    """What becomes of a message.

    Attributes: attempt: how often it has been handed out; due_time_ms: when it is delivered again; None: it is a dead letter.
    """

    attempt: int
    due_time_ms: int | None


def place_of(message: FailedMessage) -> Place:
    """Where it was pulled."""
    return message.topic, message.queue_id, message.queue_offset


def find_messages(
    store: Store, messages: Sequence[FailedMessage], places: Sequence[Place], size_max_bytes: int, *, lacks_news: bool = False
) -> tuple[FoundMessages, list[tuple[str, int]]]:
    """Returns the messages, and their topics with the incarnations in which they were found. `places`: of each, no two the same.

    `size_max_bytes`: most that several have together; more are not read. `lacks_news`: this broker may be able to read further soon. Then
    an offset that is too high is no mistake.

    Raises ServiceError, StoreError.
    """
    if len(messages) >= TOGETHER_MIN:
        known = _find_together(store, messages, places)
        if known is not None:
            check_size(known[0].size_bytes, size_max_bytes)
            return known
    topics: dict[str, TopicConfig] = {}
    count = len(messages)
    starts, sizes, attempts = [0] * count, [0] * count, [0] * count
    parts: list[bytes] = []
    base = 0
    size_bytes = 0
    for run in _runs(places):
        name, queue_id, first = places[run[0]]
        topic = topics.get(name)
        if topic is None:
            topic = topics[name] = existing_topic(store, name)
        check_known_queues(store, topic, [queue_id])
        for incarnation in {messages[number].topic_incarnation for number in run}:
            check_incarnation(topic, incarnation)
        done = 0
        while done < len(run):
            result, data = _read(store, name, queue_id, first + done, len(run) - done, run[done], lacks_news=lacks_news)
            spans = zip(run[done:], result.starts.tolist(), result.sizes.tolist(), strict=False)
            for number, start, size in spans:
                _check_id(number, messages[number], data, start + size)
                starts[number], sizes[number] = base + start, size
                attempts[number] = attempt_of(data, start, start + size)
            parts.append(data)
            base += len(data)
            done += result.record_count
            size_bytes += int(result.sizes.sum())
            if count > 1:
                check_size(size_bytes, size_max_bytes)
    found = FoundMessages(b"".join(parts), np.array(starts), np.array(sizes), attempts)
    return found, [(topic.name, topic.incarnation) for topic in topics.values()]


def check_size(size_bytes: int, size_max_bytes: int) -> None:
    """Raises ServiceError if messages with so many bytes are not sent back together."""
    if size_bytes > size_max_bytes:
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "MESSAGE_TOO_LARGE",
            f"the messages have {size_bytes} bytes together, or more; at most {size_max_bytes} are sent back at once: send back fewer",
            metadata={"field": "messages", "size_bytes": str(size_bytes), "limit_bytes": str(size_max_bytes)},
        )


def _find_together(
    store: Store, messages: Sequence[FailedMessage], places: Sequence[Place]
) -> tuple[FoundMessages, list[tuple[str, int]]] | None:
    """As `find_messages`. None if they have to be looked up one by one."""
    rows: dict[str, list[int]] = {}
    for number, (topic, _, _) in enumerate(places):
        rows.setdefault(topic, []).append(number)
    wanted = [
        _Wanted(
            topic,
            {messages[number].topic_incarnation for number in numbers},
            np.array([places[number][1] for number in numbers], np.int64),
            np.array([places[number][2] for number in numbers], np.int64),
        )
        for topic, numbers in rows.items()
    ]
    try:
        known = _look_up(store, wanted)
    except Exception:  # said by the other way
        return None
    if known is None:
        return None
    found, topics = known
    order = [number for numbers in rows.values() for number in numbers]
    for number, end in zip(order, (found.starts + found.sizes).tolist(), strict=True):
        _check_id(number, messages[number], found.data, end)
    return found.as_asked(order) if len(rows) > 1 else found, topics


def find_alike(
    store: Store, runs: Sequence[AlikeRun]
) -> tuple[FoundMessages, list[tuple[str, int]]] | None:
    """As `find_messages`, of runs that all give ids, or none of them. None if they have to be looked up one by one, which says what is
    wrong, if anything is.

    Raises ServiceError, StoreError.
    """
    by_topic: dict[str, list[AlikeRun]] = {}
    for run in runs:
        by_topic.setdefault(run.first.topic, []).append(run)
    wanted = [
        _Wanted(
            topic,
            {run.first.topic_incarnation for run in ours},
            np.concatenate([run.queue_ids for run in ours]),
            np.concatenate([run.queue_offsets for run in ours]),
        )
        for topic, ours in by_topic.items()
    ]
    ids = b"".join([run.ids for ours in by_topic.values() for run in ours])
    known = _look_up(store, wanted, ids)
    if known is None or len(wanted) == 1:
        return known
    found, topics = known
    numbers = iter(range(len(found.starts)))
    of_runs = [(run.first.topic, list(islice(numbers, run.message_count))) for run in runs]
    return found.as_asked([number for topic in by_topic for name, rows in of_runs if name == topic for number in rows]), topics


class _Wanted(NamedTuple):
    """Messages of one topic, by queue and offset. `incarnations`: in which the topic is meant."""

    topic: str
    incarnations: set[int]
    queue_ids: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]


def _look_up(
    store: Store, wanted: Sequence[_Wanted], ids: bytes = b""
) -> tuple[FoundMessages, list[tuple[str, int]]] | None:
    """The messages, and the topics with their incarnations. `ids`: in octets, if they are to be these. None, or any error, if the messages
    have to be looked up one by one.
    """
    topics = [existing_topic(store, each.topic) for each in wanted]
    parts = []
    for topic, each in zip(topics, wanted, strict=True):
        for incarnation in each.incarnations:
            check_incarnation(topic, incarnation)
        part = _entries_of(store, each)
        if part is None:
            return None
        parts.append(part)
    entries = parts[0] if len(parts) == 1 else np.concatenate(parts)
    positions, sizes = entries["position"].astype(np.int64), entries["size"].astype(np.int64)
    if int(sizes.sum()) > TOGETHER_SIZE_MAX_BYTES:
        return None
    if not np.count_nonzero(positions[1:] < positions[:-1]):
        data, starts, is_sound = store.read_records(positions, sizes)
    else:
        order = positions.argsort()
        data, found_starts, is_sound = store.read_records(positions[order], sizes[order])
        starts = np.empty_like(found_starts)
        starts[order] = found_starts
    if np.count_nonzero(is_sound) < len(is_sound):
        return None
    ends = starts + sizes
    octets = windows(data, opaque(layout.FIXED_TRAILER_SIZE_BYTES))[ends - layout.FIXED_TRAILER_SIZE_BYTES]
    trailers = octets.view(FIXED_TRAILER_DTYPE)
    if not _are_those(data, ends, trailers, positions, wanted):
        return None
    if ids and octets.view(np.uint8).reshape(len(ends), -1)[:, _ID_PLACES].tobytes() != ids:
        return None
    attempts = [0] * len(ends)
    moved = np.flatnonzero(trailers["flags"] & layout.FLAG_TRANSIT)
    if len(moved):
        rows = rows_of(data, starts, sizes)
        attempt = None if rows is None else attempt_of_all(rows)
        for row in moved.tolist():
            attempts[row] = attempt_of(data, int(starts[row]), int(ends[row])) if attempt is None else attempt
    return FoundMessages(data, starts, sizes, attempts), [(topic.name, topic.incarnation) for topic in topics]


def _entries_of(store: Store, wanted: _Wanted) -> NDArray[Any] | None:
    """The entries of the messages in their queues; None if one of them cannot be read."""
    _, _, queue_ids, offsets = wanted
    breaks = (queue_ids[1:] != queue_ids[:-1]) | (offsets[1:] < offsets[:-1])
    order = None
    if np.count_nonzero(breaks) >= PIECES_MAX:
        order = np.lexsort((offsets, queue_ids))
        queue_ids, offsets = queue_ids[order], offsets[order]
        breaks = queue_ids[1:] != queue_ids[:-1]
    bounds = [0, *(breaks.nonzero()[0] + 1).tolist(), len(offsets)]
    pieces = [(int(queue_ids[first]), offsets[first:last]) for first, last in pairwise(bounds)]
    found = store.entries_together(wanted.topic, pieces) if len(pieces) > 1 else None
    if found is None:
        parts = []
        for queue_id, queue_offsets in pieces:
            part = store.entries_at(wanted.topic, queue_id, queue_offsets)
            if part is None:
                return None
            parts.append(part)
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if order is None:
        return found
    entries = np.empty_like(found)
    entries[order] = found
    return entries


def _are_those(
    data: bytes, ends: NDArray[np.int64], trailers: NDArray[Any], positions: NDArray[np.int64], wanted: Sequence[_Wanted]
) -> bool:
    """Whether the records are the messages to which the entries of the queues should lead."""
    row = 0
    for topic, _, queue_ids, offsets in wanted:
        rows = slice(row, row := row + len(offsets))
        name = topic_field_of(topic.encode())
        names = windows(data, opaque(len(name)))[ends[rows] - layout.FIXED_TRAILER_SIZE_BYTES - len(name)]
        if (
            names.tobytes() != name * len(offsets)
            or np.count_nonzero(trailers["queue_id"][rows] != queue_ids)
            or np.count_nonzero(trailers["queue_offset"][rows] != offsets.view(np.uint64))
        ):
            return False
    return not np.count_nonzero(trailers["physical_offset"] != positions.view(np.uint64))


def copies_for(
    found: FoundMessages,
    errors: Sequence[str],
    plans: Sequence[RetryPlan],
    retry_topic: str,
    dead_letter_topic: str,
    now_ms: int,
) -> list[AppendRequest]:
    """A copy of each message: for the retry topic, pending until it is due, or for the topic of dead letters."""
    waiting: list[int] = []
    due_now: list[int] = []
    dead: list[int] = []
    for number, (_, due_ms) in enumerate(plans):
        rows = dead if due_ms is None else waiting if due_ms > now_ms else due_now
        rows.append(number)
    copies = []
    for rows, topic in ((waiting, retry_topic), (due_now, retry_topic), (dead, dead_letter_topic)):
        if not rows:
            continue
        region = move_records(
            found.data,
            found.starts[rows],
            found.sizes[rows],
            topic,
            due_times_ms=np.array([plans[row].due_time_ms for row in rows], np.uint64)
            if rows is waiting
            else None,
            attempts=[plans[row].attempt - found.attempts[row] for row in rows],
            last_errors=[errors[row] for row in rows],
        )
        copies.append(AppendRequest(region, 0))
    return copies


def copies_alike(
    found: FoundMessages,
    error: str,
    plan: RetryPlan,
    retry_topic: str,
    dead_letter_topic: str,
    now_ms: int,
) -> list[AppendRequest]:
    """`copies_for` of messages that have failed as often as each other, and have one plan."""
    due_ms = plan.due_time_ms
    due_times_ms = None
    if due_ms is not None and due_ms > now_ms:
        due_times_ms = np.full(len(found.starts), due_ms, np.uint64)
    region = move_records(
        found.data,
        found.starts,
        found.sizes,
        dead_letter_topic if due_ms is None else retry_topic,
        due_times_ms=due_times_ms,
        attempts=plan.attempt - found.attempts[0],
        last_errors=error,
    )
    return [AppendRequest(region, 0)]


def _runs(places: Sequence[Place]) -> list[list[int]]:
    """Groups the numbers of places that follow one another in a queue, so that one read gets each group."""
    runs: list[list[int]] = []
    for number in sorted(range(len(places)), key=places.__getitem__):
        name, queue_id, offset = places[number]
        if runs and places[runs[-1][-1]] == (name, queue_id, offset - 1):
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _read(
    store: Store, topic: str, queue_id: int, queue_offset: int, count: int, number: int, *, lacks_news: bool
) -> tuple[ReadResult, bytes]:
    """Up to `count` records from an offset on, one at least, and their bytes. `number`: of the first in the request."""
    result, data = store.read_to_copy(topic, queue_id, max(queue_offset, 0), count, READ_SIZE_BYTES)
    if result.status is ReadStatus.FOUND and result.first_offset == queue_offset:
        return result, data
    if lacks_news and queue_offset >= result.end_offset:
        raise replica_behind(topic, queue_id, queue_offset, result.end_offset)
    raise ServiceError(
        Code.OUT_OF_RANGE,
        "OFFSET_OUT_OF_RANGE",
        f"messages[{number}]: queue {queue_id} of {topic!r} has no message {queue_offset} to be read: it begins at "
        f"{result.min_offset} and ends at {result.end_offset}. Leave that one out; nothing was sent back",
        metadata={
            "topic": topic,
            "queue_id": str(queue_id),
            "queue_offset": str(queue_offset),
            "min_offset": str(result.min_offset),
            "end_offset": str(result.end_offset),
        },
    )


def _check_id(number: int, message: FailedMessage, data: bytes, end: int) -> None:
    """Raises ServiceError if the request names an id, and another message stands there."""
    wanted = message.message_id
    there = _IDENTITY.unpack_from(data, end + layout.PRODUCER_ID_AT)
    if not wanted or wanted == encode_message_id(*there):
        return
    try:
        identity = decode_message_id(wanted)
    except ValueError as error:
        raise invalid_argument(f"messages[{number}].message_id", str(error)) from error
    if identity != there:
        raise invalid_argument(
            f"messages[{number}].message_id",
            f"is not that of the message at {message.topic}/{message.queue_id}@{message.queue_offset}; nothing was sent back",
        )
