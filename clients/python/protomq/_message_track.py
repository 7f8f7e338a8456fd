"""Tracks of messages over all brokers: every place of a message, and what groups have done with it there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from . import _methods
from ._checks import check_wanted
from ._late_imports import fork_waits
from ._types import MessageQueue
from .errors import ProtomqError

if TYPE_CHECKING:
    from ._admin_calls import AdminCalls


class PlaceKind(IntEnum):
    """How a message came to a place (protomq.v1.PlaceKind without prefix)."""

    UNSPECIFIED = 0
    SENT = 1
    DELAYED = 2
    COMMITTED = 3
    RETRY = 4
    DEAD_LETTER = 5
    REPLAYED = 6
    EXPIRED = 7
    OPEN_TRANSACTION = 8
    WAITING = 9
    KEPT = 10

    def __str__(self) -> str:
        return self.name


class TrackState(IntEnum):
    """What a group has done with a message (protomq.v1.TrackState without prefix)."""

    UNSPECIFIED = 0
    CONSUMED = 1
    NOT_YET = 2
    HELD = 3

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """A place of a message.

    Attributes:
        kind: how it came there.
        queue: where that is.
        queue_offset: its offset there; None: it is in no queue yet.
        store_time: when it was stored there (UTC).
        attempt: how often it had been handed out before.
        last_error: why the delivery before it failed.
        group: whose retry or dead letter it is, or for which it is kept.
        groups: what the groups that consume the topic have done with it.
        check_count: how often its producer was asked about its transaction, while that is open.
        due_time: when it comes there (UTC), while it waits for a delay or a retry; else None.
        origin_topic: where it stood before the broker moved it for the first time; "" if it did not. Of an expired
            transaction: where it was to come.
        origin_queue_id: the queue there.
        origin_offset: its offset there; None: it was in no queue, as a delayed message, or one of a transaction.
    """

    kind: PlaceKind
    queue: MessageQueue
    queue_offset: int | None
    store_time: datetime
    attempt: int = 0
    last_error: str = ""
    group: str = ""
    groups: Mapping[str, TrackState] = field(default_factory=dict)
    check_count: int = 0
    due_time: datetime | None = None
    origin_topic: str = ""
    origin_queue_id: int = 0
    origin_offset: int | None = None


@dataclass(frozen=True, slots=True)
class MessageTrack:
    """What became of a message: its places, the oldest first.

    `damaged_count`: places in damaged parts of logs, of which nothing else is known. `unsearched_count`: messages that wait, and among
    which this one was not looked for: a broker looks at 65,536, those that fall due next.
    """

    message_id: str
    places: tuple[MessagePlace, ...]
    damaged_count: int = 0
    unsearched_count: int = 0


def track_message(
    admin: AdminCalls, message_id: str, brokers: Iterable[str] | None
) -> tuple[MessageTrack, dict[str, ProtomqError]]:
    """The track, and the brokers that did not answer."""
    with fork_waits:
        from .v1 import track_service_pb2 as pb

    check_wanted("message_id", message_id)
    request = pb.TrackMessageRequest(message_id=message_id)

    def ask(broker: Any) -> pb.TrackMessageResponse:
        return admin._call(broker.address, _methods.TRACK_MESSAGE, request, pb.TrackMessageResponse)

    answers, failures = admin._answers(brokers, ask, slave_stands_in=True)
    places = [_place(each, broker.broker_name) for broker, answer in answers for each in answer.places]
    places.sort(key=lambda place: place.store_time)
    damaged_count = sum(answer.damaged_count for _, answer in answers)
    unsearched_count = sum(answer.unsearched_count for _, answer in answers)
    track = MessageTrack(message_id.upper(), tuple(places), damaged_count, unsearched_count)
    return track, failures


def _place(each: Any, broker_name: str) -> MessagePlace:
    return MessagePlace(
        PlaceKind(each.kind),
        MessageQueue(each.topic, broker_name, each.queue_id),
        None if each.queue_offset < 0 else each.queue_offset,
        datetime.fromtimestamp(each.store_time_ms / 1000, UTC),
        each.attempt,
        each.last_error,
        each.consumer_group,
        {group.consumer_group: TrackState(group.state) for group in each.groups},
        each.check_count,
        datetime.fromtimestamp(each.due_time_ms / 1000, UTC) if each.due_time_ms else None,
        each.origin_topic,
        each.origin_queue_id,
        each.origin_queue_offset if each.HasField("origin_queue_offset") else None,
    )
