"""Tracks a message: how it came to each place in the log, and what groups have done with it there. Pure."""

from __future__ import annotations

from typing import NamedTuple

from protomq.v1.record_pb2 import Record
from protomq.v1.track_service_pb2 import PlaceKind, TrackState
from protomq.wire.record import FLAG_KEPT, FLAG_KIND_COPY, FLAG_KIND_MASK
from protomq.wire.topics import DEAD_LETTER_PREFIX, EXPIRED_TOPIC, RETRY_PREFIX

from .store.state.popped_queue import OpenMessages


class PlaceOrigin(NamedTuple):
    """How a message came to a place, and the group that this belongs to."""

    kind: PlaceKind.ValueType
    consumer_group: str = ""


def origin_of(record: Record, *, was_committed: bool) -> PlaceOrigin:
    """Returns how a record came to its place. `was_committed`: its transaction is known, and was committed."""
    if record.flags & FLAG_KIND_MASK != FLAG_KIND_COPY:
        return PlaceOrigin(PlaceKind.PLACE_KIND_SENT)
    topic = record.topic
    if topic == EXPIRED_TOPIC and not record.transit.replayed_group:
        return PlaceOrigin(PlaceKind.PLACE_KIND_EXPIRED)
    if topic.startswith(RETRY_PREFIX):
        # Retention marks its copies (`pop_carrying.py`). Earlier versions did not; but who sends a message back raises its attempt.
        is_kept = record.flags & FLAG_KEPT or not record.transit.attempt
        kind = PlaceKind.PLACE_KIND_KEPT if is_kept else PlaceKind.PLACE_KIND_RETRY
        return PlaceOrigin(kind, topic.removeprefix(RETRY_PREFIX))
    if topic.startswith(DEAD_LETTER_PREFIX):
        return PlaceOrigin(PlaceKind.PLACE_KIND_DEAD_LETTER, topic.removeprefix(DEAD_LETTER_PREFIX))
    if record.transit.replayed_group:
        return PlaceOrigin(PlaceKind.PLACE_KIND_REPLAYED, record.transit.replayed_group)
    kind = PlaceKind.PLACE_KIND_COMMITTED if was_committed else PlaceKind.PLACE_KIND_DELAYED
    return PlaceOrigin(kind)


class GroupState(NamedTuple):
    """What a group has done with a message. `attempt`: number of deliveries by pop, if a member holds it."""

    state: TrackState.ValueType
    attempt: int = 0


def state_of(
    queue_offset: int, committed: int | None, popped: OpenMessages | None
) -> GroupState | None:
    """Returns what a group has done with the message at an offset; None if the group does not consume the queue.

    `committed`: the group's offset in the queue. `popped`: what it has popped there; then the committed offset does not count.
    """
    if popped is not None:
        holding = popped.open.get(queue_offset)
        if holding is not None and holding.number:
            return GroupState(TrackState.TRACK_STATE_HELD, holding.attempt)
        if holding is not None or queue_offset >= popped.next_offset:
            return GroupState(TrackState.TRACK_STATE_NOT_YET)
        return GroupState(TrackState.TRACK_STATE_CONSUMED)
    if committed is None:
        return None
    is_consumed = committed > queue_offset
    return GroupState(
        TrackState.TRACK_STATE_CONSUMED if is_consumed else TrackState.TRACK_STATE_NOT_YET
    )
