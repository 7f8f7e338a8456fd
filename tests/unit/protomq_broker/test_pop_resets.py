"""Resets and clones of groups that pop: the next pop goes on there, and what was handed out before is nobody's any more."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from protomq.v1.consumer_service_pb2 import (
    CloneOffsetsRequest,
    CommitOffsetsRequest,
    GetLagRequest,
    GetOffsetsRequest,
    QueueOffset,
    ResetOffsetsRequest,
)
from protomq.v1.pop_service_pb2 import AckRequest, AckResponse, PopRequest
from protomq.v1.record_pb2 import Attributes
from protomq.wire.topics import OFFSETS_TOPIC, POP_TOPIC
from protomq_broker.store.housekeeping.pop_carrying import PopCarrier
from protomq_broker.store.state import offsets as offsets_state
from protomq_broker.store.state.group_settings import GroupSettings
from protomq_broker.store.state.popped_queue import QueueOfGroup
from protomq_broker.system_writer import SystemWriter
from protomq_broker.testing.simdisk import SimDisk
from protomq_runtime.errors import ServiceError
from protomq_runtime.testing import FakeCall
from tests.support.lost_files import lose

from .fake_broker import CONSUMER, POP, FakeBroker
from .store.store_helpers import SEGMENT, open_store
from .store.test_following import follow
from .test_pop_service import HELD_MS, MINUTE_MS, Group, Popped, filled, messages_of


def reset_request(group: str = "group", **fields: Any) -> ResetOffsetsRequest:
    return ResetOffsetsRequest(consumer_group=group, topic="topic", **fields)


def reset(broker: FakeBroker, group: str = "group", **fields: Any) -> None:
    broker.call(CONSUMER + "ResetOffsets", reset_request(group, **fields)).response()


def clone(broker: FakeBroker, source: str, group: str) -> None:
    broker.call(CONSUMER + "CloneOffsets", CloneOffsetsRequest(source_group=source, consumer_group=group)).response()


def lag(broker: FakeBroker, group: str = "group") -> int:
    request = GetLagRequest(consumer_group=group, topic="topic")
    return sum(queue.lag for queue in broker.call(CONSUMER + "GetLag", request).response().queues)


def committed(broker: FakeBroker, group: str = "group") -> dict[int, int]:
    call = broker.call(CONSUMER + "GetOffsets", GetOffsetsRequest(consumer_group=group, topic="topic"))
    return {each.queue_id: each.queue_offset for each in call.response().offsets}


def commit(broker: FakeBroker, group: str, offset: int) -> None:
    one = QueueOffset(topic="topic", queue_id=0, queue_offset=offset)
    broker.call(CONSUMER + "CommitOffsets", CommitOffsetsRequest(consumer_group=group, offsets=[one])).response()


def begin_pop(broker: FakeBroker, **fields: Any) -> FakeCall:
    """What it gets is planned, and not appended."""
    call = broker.server.call(POP + "Pop", PopRequest(consumer_group="group", topic="topic", queue_id=0, **fields))
    broker.server.lanes["pop"].run()
    return call


def offsets(messages: list[Popped]) -> list[int]:
    return [message.offset for message in messages]


def test_a_reset_to_the_end_skips_what_was_not_handed_out_and_what_is_open() -> None:
    broker = filled(6)
    group = Group(broker)
    first = group.pop(record_count_max=2)
    assert lag(broker) == 6
    reset(broker, end=True)
    assert lag(broker) == 0
    broker.advance(10 * MINUTE_MS)
    assert group.pop() == []
    with pytest.raises(ServiceError, match="not held"):
        group.ack(first)
    with pytest.raises(ServiceError, match="not held"):
        group.change(first, MINUTE_MS)
    broker.fill([b"new"])
    assert lag(broker) == 1
    assert [(message.body, message.attempt) for message in group.pop()] == [(b"new", 1)]


def test_after_a_reset_back_all_comes_again_as_if_for_the_first_time() -> None:
    broker = filled(4)
    group = Group(broker)
    first = group.pop()
    group.ack(first[:3])
    reset(broker, queue_offset=1)
    assert lag(broker) == 3
    again = group.pop()
    assert [(message.offset, message.attempt) for message in again] == [(1, 1), (2, 1), (3, 1)]
    # The receipt from before is of the same message, which somebody else has.
    with pytest.raises(ServiceError, match="not held"):
        group.ack(first[3:])
    broker.advance(HELD_MS)
    assert [(message.offset, message.attempt) for message in group.pop()] == [(1, 2), (2, 2), (3, 2)]


def test_a_reset_is_of_the_queues_that_it_names_and_goes_to_a_time_too() -> None:
    broker = FakeBroker()
    for number in range(6):
        broker.fill([b"%d" % number], queue_id=number % 2)
        broker.clock.time_ms += 1_000
    group, other = Group(broker, queue_id=None), Group(broker, "other", queue_id=None)
    for each in (group, other):
        each.ack([*each.pop(), *each.pop()])
        assert each.pop() == []
    when = Timestamp()
    when.FromMilliseconds(broker.clock.time_ms - 3_500)
    reset(broker, store_time=when, queue_ids=[1])
    assert group.bodies() == [b"3", b"5"]
    reset(broker, store_time=when)
    assert sorted([*group.bodies(), *group.bodies()]) == [b"3", b"4", b"5"]
    assert other.pop() == []


def test_a_reset_forgets_who_waits_for_whom() -> None:
    broker = FakeBroker()
    for number in range(4):
        broker.fill([b"%d" % number], attributes=Attributes(sharding_key="key"))
    group = Group(broker, fifo=True)
    (first,) = group.pop()
    assert group.pop() == []
    reset(broker, queue_offset=2)
    (second,) = group.pop()
    assert (first.body, second.body) == (b"0", b"2")
    group.ack([second])
    assert group.bodies() == [b"3"]


def test_a_reset_outlives_a_kill_the_loss_of_caches_and_the_segment_of_its_record() -> None:
    broker = filled(6)
    group = Group(broker)
    old = group.pop(record_count_max=4)
    reset(broker, queue_offset=5)
    later = Group(broker).pop()
    for loses_caches in (False, True):
        disk = broker.disk.killed()
        if loses_caches:
            disk.remove("/s/config/popState.json")
            disk.remove("/s/config/popState.json.previous")
        again = FakeBroker(disk=disk)
        assert offsets(later) == [5]
        assert lag(again) == 1
        with pytest.raises(ServiceError, match="not held"):
            Group(again).ack(old)
        assert Group(again).ack(later) == AckResponse()
    while broker.store.appended_position < 3 << 20:
        broker.fill([bytes(1 << 19)], topic="other")
    broker.store.checkpoint()
    assert broker.store.delete_segments_below(2 << 20) == 2 << 20
    disk = broker.disk.killed()
    lose(disk, "config", "consumequeue", "checkpoint")
    again = FakeBroker(disk=disk)
    with pytest.raises(ServiceError, match="not held"):
        Group(again).ack(old)
    assert Group(again).ack(later) == AckResponse()


def test_a_reset_is_one_append_and_commits_where_the_group_only_pops_too() -> None:
    broker = filled(6)
    commit(broker, "group", 3)
    assert offsets(Group(broker).pop(record_count_max=1)) == [3]
    real = SystemWriter.append_moved
    with mock.patch.object(SystemWriter, "append_moved", autospec=True, side_effect=real) as append:
        reset(broker, queue_offset=1)
    (call,) = append.call_args_list
    assert [topic for topic, _ in call.args[2]] == [OFFSETS_TOPIC, POP_TOPIC]
    # The queue 1 was never popped: the group begins at its committed offset.
    assert committed(broker) == {0: 1, 1: 0}
    assert offsets(Group(broker).pop(record_count_max=1)) == [1]
    other = Group(broker, "other", queue_id=None)
    other.pop()
    assert other.pop() == []
    reset(broker, "other", end=True)
    assert committed(broker, "other") == {0: 6, 1: 0}
    assert lag(broker, "other") == 0


def test_a_member_that_pulls_goes_on_at_a_reset_from_when_the_group_only_popped() -> None:
    broker = filled(6)
    Group(broker).pop()
    broker.call(CONSUMER + "ResetOffsets", reset_request(queue_offset=2, queue_ids=[0])).response()
    clone(broker, "group", "clone")
    for group in ("group", "clone"):
        (found,) = broker.call(CONSUMER + "GetOffsets", GetOffsetsRequest(consumer_group=group, topic="topic")).response().offsets
        assert (found.queue_id, found.queue_offset) == (0, 2)
        assert found.reset_epoch > 0


def test_what_a_reset_of_pops_commits_outlives_a_kill() -> None:
    broker = filled(6)
    Group(broker).pop()
    reset(broker, queue_offset=2, queue_ids=[0])
    assert committed(FakeBroker(disk=broker.disk.killed())) == {0: 2}


def test_a_group_that_only_pops_is_reset_although_no_group_more_may_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = filled(3)
    Group(broker).pop()
    monkeypatch.setattr(offsets_state, "GROUPS_MAX", 0)
    before = broker.store.appended_position
    refused = broker.refusal(CONSUMER + "ResetOffsets", reset_request("new", queue_offset=0))
    assert refused.reason == "TOO_MANY"
    assert broker.store.appended_position == before
    reset(broker, end=True, queue_ids=[0])
    assert (committed(broker), lag(broker)) == ({0: 3}, 0)


@pytest.mark.parametrize("was_popped", [True, False])
def test_a_pop_that_was_planned_before_a_reset_does_not_undo_it(was_popped: bool) -> None:
    broker = filled(6)
    if was_popped:
        Group(broker).pop(record_count_max=1)
    call = broker.server.call(CONSUMER + "ResetOffsets", reset_request(queue_offset=4))
    pop = begin_pop(broker, record_count_max=2)  # It is planned with what was so before, and is appended behind the reset.
    broker.server.run()
    call.response()
    assert offsets(messages_of(pop)) == [4, 5]
    assert lag(broker) == 2
    assert Group(broker).pop() == []


def test_a_reset_to_where_the_group_is_overtakes_a_pop_of_what_was_due() -> None:
    broker = filled(2)
    first = Group(broker).pop()
    broker.clock.time_ms += HELD_MS
    broker.server.call(CONSUMER + "ResetOffsets", reset_request(end=True))
    pop = begin_pop(broker)
    broker.server.run()
    assert messages_of(pop) == []
    with pytest.raises(ServiceError, match="not held"):
        Group(broker).ack(first)


def test_no_dead_letter_is_made_of_what_a_reset_has_skipped() -> None:
    broker = filled(2)
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    Group(broker).pop()
    broker.clock.time_ms += HELD_MS
    broker.server.call(CONSUMER + "ResetOffsets", reset_request(end=True))
    begin_pop(broker)
    broker.advance(1_000)
    assert broker.store.queue_range("%DLQ%group", 0) == (0, 0)


def test_an_ack_behind_a_reset_is_stale_and_one_before_it_is_done() -> None:
    broker = filled(2)
    messages = Group(broker).pop()
    request = AckRequest(consumer_group="group", topic="topic")
    request.messages.add(receipt=messages[0].receipt, offset_runs=[0, 1])
    acked = broker.server.call(POP + "Ack", request)
    broker.server.call(CONSUMER + "ResetOffsets", reset_request(queue_offset=0))
    broker.server.run()
    assert acked.response() == AckResponse()
    late = broker.call(POP + "Ack", request)
    assert late.error is not None
    assert late.error.reason == "STALE_RECEIPT"
    assert offsets(Group(broker).pop()) == [0, 1]


def test_a_held_pop_gets_what_a_reset_brings_again() -> None:
    broker = filled(3)
    group = Group(broker)
    group.ack(group.pop())
    call = group.begin(hold_ms=20_000)
    other = Group(broker, "other")
    other.ack(other.pop())
    other_call = other.begin(hold_ms=20_000)
    assert not call.answered
    reset(broker, queue_offset=1)
    assert offsets(messages_of(call)) == [1, 2]
    assert not other_call.answered


def test_copies_that_retention_has_made_stay_and_nobody_pops_them() -> None:
    broker = FakeBroker()
    broker.fill([bytes([number]) * 1_000 for number in range(4)])
    group = Group(broker)
    messages = group.pop()
    while broker.store.appended_position < 3 << 20:
        broker.fill([bytes(1 << 19)], topic="other")
    broker.store.checkpoint()
    broker.store.delete_segments_below(2 << 20)
    assert broker.store.queue_range("%RETRY%group", 0) == (0, 4)
    reset(broker, queue_offset=0)
    assert lag(broker) == 0
    broker.advance(2 * MINUTE_MS)
    assert group.pop() == []
    with pytest.raises(ServiceError, match="not held"):
        group.ack(messages)
    assert broker.store.queue_range("%RETRY%group", 0) == (0, 4)


def test_retention_keeps_what_was_handed_out_after_a_reset_that_it_met() -> None:
    broker = FakeBroker()
    broker.fill([bytes([number]) * 1_000 for number in range(4)])
    group = Group(broker)
    group.pop(record_count_max=3)
    while broker.store.appended_position < 3 << 20:
        broker.fill([bytes(1 << 19)], topic="other")
    broker.store.checkpoint()
    real = PopCarrier._move
    later: list[Popped] = []

    def move(self: PopCarrier, known: Any, places: Any, check_loss: Any) -> None:
        if not later:  # It has looked at the queue, and has appended nothing yet.
            reset(broker, queue_offset=0)
            later.extend(group.pop(record_count_max=2))
        real(self, known, places, check_loss)

    with mock.patch.object(PopCarrier, "_move", move):
        broker.store.delete_segments_below(2 << 20)
    assert broker.store.queue_range("%RETRY%group", 0) == (0, 2)
    assert group.ack(later[:1]) == AckResponse()
    broker.advance(2 * MINUTE_MS)
    (again,) = group.pop(record_count_max=1)
    assert (again.body, again.offset, again.attempt) == (bytes([1]) * 1_000, 1, 2)


def test_a_clone_of_a_group_that_pops_begins_at_its_first_open_message() -> None:
    broker = filled(6)
    source = Group(broker, "source")
    messages = source.pop(record_count_max=4)
    source.ack([messages[0], messages[2]])
    clone(broker, "source", "group")
    assert committed(broker) == {0: 1}
    assert lag(broker) == 5
    assert offsets(Group(broker).pop()) == [1, 2, 3, 4, 5]
    source.ack([messages[1], messages[3]])
    clone(broker, "source", "third")
    assert committed(broker, "third") == {0: 4}
    assert lag(broker, "third") == lag(broker, "source") == 2


def test_a_clone_to_a_group_that_pops_is_a_reset_of_it() -> None:
    broker = filled(6)
    commit(broker, "source", 2)
    group = Group(broker)
    first = group.pop()
    clone(broker, "source", "group")
    assert lag(broker) == lag(broker, "source") == 4
    assert offsets(group.pop()) == [2, 3, 4, 5]
    with pytest.raises(ServiceError, match="not held"):
        group.ack(first)


def test_a_clone_of_a_group_that_went_over_to_pulls_has_its_committed_offset() -> None:
    broker = filled(6)
    source = Group(broker, "source")
    source.ack(source.pop(record_count_max=2))
    commit(broker, "source", 5)
    clone(broker, "source", "group")
    assert committed(broker) == {0: 5}


def test_the_records_make_the_same_state_anew() -> None:
    broker = filled(4)
    group = Group(broker)
    group.pop()
    reset(broker, queue_offset=2)
    group.pop(record_count_max=1)
    key = QueueOfGroup("group", "topic", 0)
    found = broker.store.popped.find(key, broker.topic.incarnation)
    disk = broker.disk.killed()
    disk.remove("/s/config/popState.json")
    again = FakeBroker(disk=disk).store.popped.find(key, broker.topic.incarnation)
    assert found is not None
    assert again is not None
    assert found.statement() == again.statement()
    assert (found.hand_out_count, found.next_offset, list(found.open)) == (2, 3, [2])


def test_a_broker_that_has_followed_goes_on_behind_the_reset() -> None:
    broker = filled(6, segment=SEGMENT)
    old = Group(broker).pop(record_count_max=4)
    disk = SimDisk()
    follower = open_store(disk, follows=True)
    follow(broker.store, follower)
    reset(broker, queue_offset=2)
    held = Group(broker).pop(record_count_max=1)
    follow(broker.store, follower)
    follower.close()
    promoted = FakeBroker(disk=disk, segment=SEGMENT)
    assert lag(promoted) == 4
    with pytest.raises(ServiceError, match="not held"):
        Group(promoted).ack(old)
    assert Group(promoted).ack(held) == AckResponse()
    assert offsets(Group(promoted).pop()) == [3, 4, 5]
