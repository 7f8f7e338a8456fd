"""Finds messages by where they were pulled, and makes the copies of those that failed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from protomq.v1.record_pb2 import Record
from protomq.wire import record as layout
from protomq.wire.record import decode_message_id
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint
from protomq_runtime.errors import Code, ServiceError, invalid_argument

from .store.log.append import AppendRequest
from .store.log.move import move_records
from .store.queues.reading import ReadStatus
from .topic_access import check_incarnation, check_read_queue, readable_topic

if TYPE_CHECKING:
    from protomq.v1.group_service_pb2 import FailedMessage, SentBack

    from .store.state.topics import TopicConfig
    from .store.store import Store

_U32: Final = struct.Struct("<I").unpack_from
_U64: Final = struct.Struct("<Q").unpack_from
READ_SIZE_BYTES: Final = 1 << 20
"""Size of one read of neighbouring messages."""


class FoundMessage(NamedTuple):
    """A message that failed.

    Attributes: field: its record field; attempt: how often it was handed out before.
    """

    field: bytes
    attempt: int

    @property
    def size_bytes(self) -> int:
        """Size of the record field."""
        return len(self.field)


def find_messages(
    store: Store, messages: Sequence[FailedMessage]
) -> tuple[list[FoundMessage], list[tuple[str, int]]]:
    """Returns the messages, and their topics with the incarnations in which they were found. Raises ServiceError, StoreError."""
    topics: dict[str, TopicConfig] = {}
    found: dict[int, FoundMessage] = {}
    places = [(each.topic, each.queue_id, each.queue_offset) for each in messages]
    for run in _runs(places):
        name, queue_id, first = places[run[0]]
        topic = topics.get(name)
        if topic is None:
            topic = topics[name] = readable_topic(store, name)
        check_read_queue(topic, queue_id)
        for number in run:
            check_incarnation(topic, messages[number].topic_incarnation)
        fields: list[bytes] = []
        while len(fields) < len(run):
            fields += _read(store, name, queue_id, first + len(fields), len(run) - len(fields), run[len(fields)])
        for number, field in zip(run, fields, strict=True):
            if messages[number].message_id:
                _check_id(number, messages[number], field)
            found[number] = FoundMessage(field, _attempt_of(field))
    return (
        [found[number] for number in range(len(messages))],
        [(topic.name, topic.incarnation) for topic in topics.values()],
    )


def copies_for(
    found: Sequence[FoundMessage],
    errors: Sequence[str],
    plans: Sequence[SentBack],
    retry_topic: str,
    dead_letter_topic: str,
    now_ms: int,
) -> list[AppendRequest]:
    """A copy of each message: for the retry topic, pending until it is due, or for the topic of dead letters."""
    waiting: list[int] = []
    due_now: list[int] = []
    dead: list[int] = []
    for number, plan in enumerate(plans):
        rows = dead if plan.dead_letter else waiting if plan.due_time_ms > now_ms else due_now
        rows.append(number)
    copies = []
    for rows, topic in ((waiting, retry_topic), (due_now, retry_topic), (dead, dead_letter_topic)):
        if not rows:
            continue
        sizes = np.array([found[row].size_bytes for row in rows], np.int64)
        due_ms = [plans[row].due_time_ms for row in rows]
        region = move_records(
            b"".join(found[row].field for row in rows),
            np.cumsum(sizes) - sizes,
            sizes,
            topic,
            due_times_ms=np.array(due_ms, np.uint64) if rows is waiting else None,
            attempts=[plans[row].attempt - found[row].attempt for row in rows],
            last_errors=[errors[row] for row in rows],
        )
        copies.append(AppendRequest(region, 0))
    return copies


def _runs(places: Sequence[tuple[str, int, int]]) -> list[list[int]]:
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
    store: Store, topic: str, queue_id: int, queue_offset: int, count: int, number: int
) -> list[bytes]:
    """Up to `count` record fields from an offset on, one at least. `number`: of the first in the request."""
    result = store.read(topic, queue_id, max(queue_offset, 0), count, READ_SIZE_BYTES)
    if result.status is not ReadStatus.FOUND or result.first_offset != queue_offset:
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
    return result.record_fields()


def _attempt_of(field: bytes) -> int:
    if not _U32(field, len(field) + layout.FLAGS_AT)[0] & layout.FLAG_TRANSIT:
        return 0
    _, start = read_varint(field, 1, LENGTH_SIZE_MAX_BYTES)
    return Record.FromString(field[start:]).transit.attempt


def _check_id(number: int, message: FailedMessage, field: bytes) -> None:
    try:
        wanted = decode_message_id(message.message_id)
    except ValueError as error:
        raise invalid_argument(f"messages[{number}].message_id", str(error)) from error
    end = len(field)
    there = (
        _U64(field, end + layout.PRODUCER_ID_AT)[0],
        _U32(field, end + layout.PRODUCER_EPOCH_AT)[0],
        _U64(field, end + layout.SEQUENCE_AT)[0],
    )
    if tuple(wanted) != there:
        raise invalid_argument(
            f"messages[{number}].message_id",
            f"is not that of the message at {message.topic}/{message.queue_id}@{message.queue_offset}; nothing was sent back",
        )
