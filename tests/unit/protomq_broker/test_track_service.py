"""TrackService over a store: places in the order of the log, groups by offsets and pops, and what is damaged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, QueueOffset
from protomq.v1.pop_service_pb2 import AckRequest, PopRequest
from protomq.v1.record_pb2 import Record, Transit
from protomq.v1.send_service_pb2 import SendRequest, SendResponse
from protomq.v1.state_pb2 import HandOut, PoppedQueue
from protomq.v1.track_service_pb2 import (
    PlaceKind,
    TrackMessageRequest,
    TrackMessageResponse,
    TrackState,
)
from protomq.wire.record import FLAG_KEPT, FLAG_KIND_COPY, encode_message_id
from protomq.wire.topics import EXPIRED_TOPIC
from protomq_broker.message_track import origin_of, state_of
from protomq_broker.store.state.acknowledged import Acknowledged, Remembered
from protomq_broker.store.state.popped_queue import OpenMessages, QueueOfGroup

from .fake_broker import CONSUMER, POP, SEND, FakeBroker

TRACK = "/protomq.v1.TrackService/TrackMessage"


def copy(topic: str, marks: int = 0, **transit: Any) -> Record:
    return Record(topic=topic, flags=FLAG_KIND_COPY | marks, transit=Transit(**transit))


@pytest.mark.parametrize(
    ("record", "kind", "group"),
    [
        (Record(topic="t"), "SENT", ""),
        (copy("%RETRY%g", attempt=1), "RETRY", "g"),
        (copy("%RETRY%g"), "KEPT", "g"),
        (copy("%RETRY%g", FLAG_KEPT, attempt=1), "KEPT", "g"),
        (copy("%DLQ%g", replayed_group="h"), "DEAD_LETTER", "g"),
        (copy("t", replayed_group="g"), "REPLAYED", "g"),
        (copy(EXPIRED_TOPIC), "EXPIRED", ""),
        (copy(EXPIRED_TOPIC, replayed_group="g"), "REPLAYED", "g"),
        (copy("t"), "DELAYED", ""),
    ],
)
def test_how_a_message_came_to_a_place(record: Record, kind: str, group: str) -> None:
    found = origin_of(record, was_committed=False)
    assert (PlaceKind.Name(found.kind), found.consumer_group) == (f"PLACE_KIND_{kind}", group)


def test_a_copy_of_a_half_message_was_committed() -> None:
    assert origin_of(copy("t"), was_committed=True).kind == PlaceKind.PLACE_KIND_COMMITTED
    assert origin_of(copy("%RETRY%g", attempt=1), was_committed=True).kind == PlaceKind.PLACE_KIND_RETRY


@given(st.integers(0, 20), st.none() | st.integers(0, 20))
def test_by_offsets_a_message_is_consumed_if_the_group_is_behind_it(
    queue_offset: int, committed: int | None
) -> None:
    found = state_of(queue_offset, committed, None)
    if committed is None:
        assert found is None
    else:
        assert found is not None
        assert (found.state == TrackState.TRACK_STATE_CONSUMED) == (committed >= queue_offset + 1)


def test_by_pops_a_message_is_held_or_consumed_one_by_one() -> None:
    popped = OpenMessages(QueueOfGroup("g", "t", 0), 1, 0, Acknowledged(Remembered(), 0, 0))
    hand_out = HandOut(number=1, time_ms=5, deadline_ms=9, attempt=2, runs=[0, 3])
    popped.take(PoppedQueue(next_offset=4, hand_outs=[hand_out], waiting_runs=[3, 1]), 1)
    popped.take(PoppedQueue(next_offset=4, acked_runs=[1, 1]), 2)
    states = [state_of(offset, 99, popped) for offset in range(5)]
    held, not_yet = TrackState.TRACK_STATE_HELD, TrackState.TRACK_STATE_NOT_YET
    assert [found and tuple(found) for found in states] == [
        (held, 2), (TrackState.TRACK_STATE_CONSUMED, 0), (held, 2), (not_yet, 0), (not_yet, 0),
    ]  # fmt: skip


def test_what_retention_keeps_of_a_popped_message_is_no_retry() -> None:
    broker = FakeBroker()
    record = Record(body=b"x", producer_id=7, producer_epoch=1, sequence=3)
    broker.call(SEND, SendRequest(topic="topic", queue_id=0, records=[record])).response()
    pop = PopRequest(consumer_group="g", topic="topic", queue_id=0)
    receipt = broker.call(POP + "Pop", pop).response(lambda _: b"").hand_outs[0].receipt
    while broker.store.appended_position < 3 << 20:
        broker.fill([bytes(1 << 19)], topic="other")
    broker.store.checkpoint()
    broker.store.delete_segments_below(2 << 20)

    def place() -> tuple[object, ...]:
        answer = broker.call(TRACK, TrackMessageRequest(message_id=encode_message_id(7, 1, 3))).response()
        (kept,) = answer.places
        (group,) = kept.groups
        return PlaceKind.Name(kept.kind), kept.topic, kept.consumer_group, group.consumer_group, group.state, group.attempt

    kept = ("PLACE_KIND_KEPT", "%RETRY%g", "g", "g")
    assert place() == (*kept, TrackState.TRACK_STATE_HELD, 1)
    ack = AckRequest(consumer_group="g", topic="topic")
    ack.messages.add(receipt=receipt, offset_runs=[0, 1])
    broker.call(POP + "Ack", ack).response()
    assert place() == (*kept, TrackState.TRACK_STATE_CONSUMED, 0)


def test_every_place_is_found_with_the_groups_that_consume_it() -> None:
    broker = FakeBroker()
    record = Record(body=b"x", producer_id=7, producer_epoch=1, sequence=3)
    sent = broker.call(SEND, SendRequest(topic="topic", queue_id=1, records=[record]))
    assert isinstance(sent.response(), SendResponse)
    for group, queue_offset in (("behind", 1), ("at-it", 0)):
        offset = QueueOffset(topic="topic", queue_id=1, queue_offset=queue_offset)
        commit = CommitOffsetsRequest(consumer_group=group, offsets=[offset])
        broker.call(CONSUMER + "CommitOffsets", commit).response()
    other = CommitOffsetsRequest(
        consumer_group="elsewhere", offsets=[QueueOffset(topic="topic", queue_id=0, queue_offset=0)]
    )
    broker.call(CONSUMER + "CommitOffsets", other).response()
    request = TrackMessageRequest(message_id=encode_message_id(7, 1, 3))
    answer = broker.call(TRACK, request).response()
    assert isinstance(answer, TrackMessageResponse)
    (place,) = answer.places
    assert (place.kind, place.topic, place.queue_id, place.queue_offset) == (PlaceKind.PLACE_KIND_SENT, "topic", 1, 0)
    assert place.store_time_ms == broker.clock.time_ms
    assert [(group.consumer_group, group.state) for group in place.groups] == [
        ("at-it", TrackState.TRACK_STATE_NOT_YET), ("behind", TrackState.TRACK_STATE_CONSUMED),
    ]  # fmt: skip
    nobody = TrackMessageRequest(message_id=encode_message_id(7, 1, 4))
    assert not broker.call(TRACK, nobody).response().places
    for wrong in ("", "7", "g" * 40):
        refusal = broker.refusal(TRACK, TrackMessageRequest(message_id=wrong))
        assert (refusal.reason, refusal.field_violations[0][0]) == ("INVALID_ARGUMENT", "message_id")


def test_bodies_are_not_kept_while_other_places_are_looked_for() -> None:
    broker = FakeBroker()
    broker.fill([bytes(100_000)], producer_id=7, sequence=1)
    (found,) = broker.store.find_everywhere((7, 0, 1), 9).records
    assert len(found) < 1_000
    assert Record.FromString(found).topic == "topic"
