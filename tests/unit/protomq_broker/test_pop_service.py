"""PopService over a store on a simulated disk: who gets what, when, and what is answered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple
from unittest import mock

import pytest

from protomq.v1.admin_service_pb2 import (
    CreateTopicRequest,
    DeleteGroupRequest,
    DeleteTopicRequest,
    ListGroupsRequest,
)
from protomq.v1.consumer_service_pb2 import (
    CommitOffsetsRequest,
    GetLagRequest,
    GetLagResponse,
    QueueOffset,
)
from protomq.v1.group_pb2 import GroupSettings as GroupMessage
from protomq.v1.group_service_pb2 import PutGroupRequest, SendBackRequest
from protomq.v1.pop_service_pb2 import (
    AckRequest,
    AckResponse,
    ChangeInvisibleRequest,
    ChangeInvisibleResponse,
    GiveUpPopRequest,
    GiveUpPopResponse,
    PopRequest,
    PopResponse,
    PopStart,
    PopStatus,
)
from protomq.v1.pull_service_pb2 import FilterType, PullRequest
from protomq.v1.record_pb2 import Attributes, Record, RecordBatch
from protomq.v1.send_service_pb2 import SendRequest
from protomq.v1.topic_pb2 import Topic
from protomq_broker import pop_planner, pop_reading, pop_requests, pop_service, pop_settling
from protomq_broker.filters.errors import FilterFailedError
from protomq_broker.filters.filter_book import Matches
from protomq_broker.pop_orders import PopTerms
from protomq_broker.store.errors import DiskFullError, StoreError
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.state import popped_queue
from protomq_broker.store.state.group_settings import GroupSettings
from protomq_broker.store.state.topics import TopicConfig, topic_of_broker
from protomq_broker.store.store import Store
from protomq_broker.system_writer import SystemWriter
from protomq_runtime.errors import ServiceError
from protomq_runtime.testing import FakeCall, FakeGrpcCall

from .fake_broker import ADMIN, CONSUMER, GROUP, POP, PULL, SEND, FakeBroker, told
from .store.store_helpers import flip_in_log, read_all

MINUTE_MS = 60_000
HELD_MS = MINUTE_MS + 1
"""How long a message of a pop is held. The millisecond that had begun does not count."""


class Popped(NamedTuple):
    """A message as a member of a group got it."""

    body: bytes
    queue_id: int
    offset: int
    attempt: int
    receipt: bytes


def messages_of(call: FakeCall) -> list[Popped]:
    """What a pop was answered with, read as a client does: by the header's columns, and by parsing all of it."""
    answer: PopResponse = call.response(lambda region: region.file.read(region.offset, region.size_bytes))  # type: ignore[attr-defined]
    data = b"".join(region.file.read(region.offset, region.size_bytes) for region in call.regions)  # type: ignore[attr-defined]
    assert len(data) == answer.regions_size_bytes
    hand_outs = [each for each in answer.hand_outs for _ in range(each.record_count)]
    found = []
    columns = zip(answer.records, answer.record_starts, answer.record_sizes, answer.queue_offsets, hand_outs, strict=True)
    for record, start, size, offset, hand_out in columns:
        assert RecordBatch.FromString(data[start : start + size]).records[0] == record
        found.append(Popped(record.body, hand_out.queue_id, offset, hand_out.attempt, hand_out.receipt))
    assert (answer.status == PopStatus.POP_STATUS_FOUND) == bool(found)
    return found


class Group:
    """A consumer group."""

    def __init__(self, broker: FakeBroker, name: str = "group", **defaults: Any) -> None:
        self.broker = broker
        self.name = name
        self.defaults: dict[str, Any] = {"topic": "topic", "queue_id": 0, **defaults}

    def begin(self, **fields: Any) -> FakeCall:
        request = PopRequest(consumer_group=self.name, **{**self.defaults, **fields})
        return self.broker.call(POP + "Pop", request)

    def pop(self, **fields: Any) -> list[Popped]:
        return messages_of(self.begin(**fields))

    def bodies(self, **fields: Any) -> list[bytes]:
        return [message.body for message in self.pop(**fields)]

    def settle(self, method: str, request: Any, messages: Sequence[Popped]) -> FakeCall:
        for message in messages:
            request.messages.add(receipt=message.receipt, offset_runs=[message.offset, 1])
        return self.broker.call(POP + method, request)

    def ack(self, messages: Sequence[Popped], topic: str = "topic") -> AckResponse:
        request = AckRequest(consumer_group=self.name, topic=topic)
        return self.settle("Ack", request, messages).response()

    def change(self, messages: Sequence[Popped], invisible_ms: int, error: str = "") -> Any:
        request = ChangeInvisibleRequest(consumer_group=self.name, topic="topic", invisible_ms=invisible_ms, error=error)
        return self.settle("ChangeInvisible", request, messages).response()


def filled(count: int = 6, **settings: Any) -> FakeBroker:
    broker = FakeBroker(**settings)
    broker.fill([b"%d" % number for number in range(count)])
    return broker


def test_each_message_goes_to_one_member_and_what_is_acknowledged_never_comes_again() -> None:
    broker = filled()
    group = Group(broker)
    first, second = group.pop(record_count_max=4), group.pop(record_count_max=4)
    assert [message.body for message in first + second] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert [message.offset for message in first + second] == list(range(6))
    assert {message.attempt for message in first + second} == {1}
    assert group.pop() == []
    assert group.ack(first[:3]) == AckResponse()
    group.ack(second)
    broker.advance(HELD_MS - 1)
    assert group.pop() == []
    broker.advance(1)
    (again,) = group.pop()
    assert (again.body, again.attempt) == (b"3", 2)
    group.ack([again])
    broker.advance(10 * MINUTE_MS)
    assert group.pop() == []


def test_groups_know_nothing_of_each_other() -> None:
    broker = filled()
    assert Group(broker).bodies() == Group(broker, "other").bodies()


def test_acks_that_come_together_are_one_record_and_so_are_pops() -> None:
    broker = filled(32)
    group = Group(broker)
    group.pop(record_count_max=1)
    records = broker.store.appended_end_offset("%SYS%POP", 0)
    messages = group.pop(record_count_max=16)
    assert broker.store.appended_end_offset("%SYS%POP", 0) == records + 1
    requests = []
    for message in messages:
        request = AckRequest(consumer_group="group", topic="topic")
        request.messages.add(receipt=message.receipt, offset_runs=[message.offset, 1])
        requests.append(request)
    calls = broker.server.call_together(POP + "Ack", requests)
    pop = broker.server.call(
        POP + "Pop", PopRequest(consumer_group="group", topic="topic", queue_id=0)
    )
    broker.server.run()
    assert [call.response() for call in calls] == [AckResponse()] * 16
    assert len(messages_of(pop)) == 15
    assert broker.store.appended_end_offset("%SYS%POP", 0) == records + 3


@pytest.mark.parametrize("invisible_ms", [None, MINUTE_MS])
def test_what_is_settled_while_a_pop_of_it_is_under_way_is_not_handed_out(invisible_ms: int | None) -> None:
    broker = filled(3)
    group = Group(broker)
    messages = group.pop()
    broker.advance(HELD_MS)
    pop = broker.server.call(POP + "Pop", PopRequest(consumer_group="group", topic="topic", queue_id=0))
    broker.server.lanes["pop"].run()  # planned with all three, which are due, and on its way to the send lane
    request: Any = AckRequest(consumer_group="group", topic="topic")
    if invisible_ms is not None:
        request = ChangeInvisibleRequest(consumer_group="group", topic="topic", invisible_ms=invisible_ms)
    request.messages.add(receipt=messages[1].receipt, offset_runs=[1, 1])
    path = POP + ("Ack" if invisible_ms is None else "ChangeInvisible")
    settled = broker.server.call(path, request)
    assert settled.response() == type(settled.response())(), "it was not answered without the pop lane"
    broker.server.run()
    assert [(message.body, message.attempt) for message in messages_of(pop)] == [(b"0", 2), (b"2", 2)]


def test_a_dead_letter_is_not_made_of_what_is_acknowledged_meanwhile() -> None:
    broker = filled(2)
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    group = Group(broker)
    first, second = group.pop()
    broker.advance(HELD_MS - 1)
    broker.clock.time_ms += 1
    broker.server.call(POP + "Pop", PopRequest(consumer_group="group", topic="topic", queue_id=0))
    broker.server.lanes["pop"].run()  # planned: both are to be buried
    request = AckRequest(consumer_group="group", topic="topic")
    request.messages.add(receipt=first.receipt, offset_runs=[first.offset, 1])
    broker.server.call(POP + "Ack", request).response()
    broker.advance(1_000)
    assert broker.store.queue_range("%DLQ%group", 0) == (0, 1)
    with pytest.raises(ServiceError, match="not held"):
        group.ack([second])


def test_a_held_pop_gets_what_an_ack_makes_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (popped_queue, pop_planner):
        monkeypatch.setattr(module, "OPEN_MAX", 4)
    broker = filled(5)
    group = Group(broker)
    first = group.pop()
    call = group.begin(hold_ms=20_000)
    other = Group(broker, "other").begin(hold_ms=0)
    assert (len(first), len(messages_of(other)), call.answered) == (4, 4, False)
    group.ack(first[:1])
    assert [message.body for message in messages_of(call)] == [b"4"]


def ack_request(messages: Sequence[Popped]) -> AckRequest:
    request = AckRequest(consumer_group="group", topic="topic")
    for message in messages:
        request.messages.add(receipt=message.receipt, offset_runs=[message.offset, 1])
    return request


def test_acks_of_many_messages_leave_the_lane_between_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pop_settling, "PART_COST_MAX", 100)  # two receipts and a half
    broker = filled(8)
    messages = Group(broker).pop()
    requests = [ack_request(messages[at : at + 2]) for at in (0, 2, 4)]
    calls = broker.server.call_together(POP + "Ack", requests)
    assert [call.answered for call in calls] == [True, True, False]
    # What comes meanwhile stands behind what waits.
    (twice,) = broker.server.call_together(POP + "Ack", [ack_request(messages[5:6])])
    (late,) = broker.server.call_together(POP + "Ack", [ack_request(messages[6:7])], timeout_s=-1)
    assert not twice.answered
    broker.server.lanes["send"].posted.popleft()()
    assert [call.answered for call in (calls[2], twice, late)] == [True, True, False]
    broker.server.run()
    assert [call.response() for call in calls] == [AckResponse()] * 3
    assert twice.response() == AckResponse()  # both were looked at in one part, as in one turn
    with pytest.raises(ServiceError, match="deadline"):
        late.response()
    assert Group(broker).ack(messages[6:]) == AckResponse(), "the late one was not looked at"
    assert broker.store.popped.acked_count == 9, "the one that was said twice in a turn counts twice"


def test_acks_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pop_settling, "PART_COST_MAX", 40)
    monkeypatch.setattr(pop_settling, "WAITING_SIZE_MAX_BYTES", 3_000)
    broker = filled(6)
    messages = Group(broker).pop()
    calls = broker.server.call_together(POP + "Ack", [ack_request([message]) for message in messages])
    broker.server.run()
    assert [call.error is None for call in calls] == [True, True, True, False, False, False]
    assert told(calls[3].error) == ("RESOURCE_EXHAUSTED", "SYSTEM_BUSY", {"lane": "send"})  # type: ignore[arg-type]
    assert Group(broker).ack(messages[3:]) == AckResponse()


def test_a_stale_receipt_is_told_so_and_changes_nothing() -> None:
    broker = filled(2)
    group = Group(broker)
    first = group.pop()
    broker.advance(HELD_MS)
    second = group.pop()
    metadata = {"topic": "topic", "queue_id": "0", "queue_offset": "0"}
    for method, known in ((group.ack, "true"), (lambda messages: group.change(messages, 0), "false")):
        with pytest.raises(ServiceError) as caught:
            method(first)
        assert told(caught.value) == ("FAILED_PRECONDITION", "STALE_RECEIPT", metadata | {"never_acknowledged": known})
    answer = group.ack([first[0], second[1]])
    assert [(each.receipt, list(each.offset_runs)) for each in answer.stale_messages] == [(first[0].receipt, [0, 1])]
    assert answer.never_acknowledged
    with pytest.raises(ServiceError, match="not held"):
        group.ack([first[1]])
    assert group.ack([second[0]]) == AckResponse()


def test_an_acknowledgement_may_be_said_again_and_is_answered_as_at_first() -> None:
    """Its answer may have been lost. Who has had the message before, or has given it back, has not acknowledged it."""
    broker = filled(3)
    group = Group(broker)
    first = group.pop()
    broker.advance(HELD_MS)
    second = group.pop()
    acked_before = broker.store.popped.acked_count
    for _ in range(3):
        assert group.ack(second[:2]) == AckResponse()
    assert broker.store.popped.acked_count == acked_before + 2
    answer = group.ack([first[0], second[1], second[2]])
    assert [(each.receipt, list(each.offset_runs)) for each in answer.stale_messages] == [(first[0].receipt, [0, 1])]
    assert answer.never_acknowledged
    for method in (lambda: group.ack(first), lambda: group.change(second, 0)):
        with pytest.raises(ServiceError, match="not held"):
            method()


def test_a_late_receipt_is_good_until_somebody_else_has_the_message() -> None:
    broker = filled(1)
    group = Group(broker)
    messages = group.pop()
    broker.advance(10 * MINUTE_MS)
    assert group.ack(messages) == AckResponse()
    assert group.pop() == []


@pytest.mark.parametrize(
    ("change", "metadata"),
    [
        (lambda octets: b"", {"field": "receipt", "value": ""}),
        (lambda octets: octets[:-1], {"field": "receipt", "value": ""}),
        (lambda octets: octets[:20] + bytes([octets[20] ^ 1]) + octets[21:], {"field": "receipt", "value": ""}),
    ],
)
def test_what_is_no_receipt_is_refused(change: Any, metadata: dict[str, str]) -> None:
    broker = filled(1)
    (message,) = Group(broker).pop()
    request = AckRequest(consumer_group="group", topic="topic")
    request.messages.add(receipt=change(message.receipt), offset_runs=[0, 1])
    assert told(broker.refusal(POP + "Ack", request)) == ("INVALID_ARGUMENT", "ILLEGAL_RECEIPT", metadata)


def test_a_receipt_of_another_group_topic_or_broker_is_refused() -> None:
    broker, other = filled(1), filled(1)
    other.pop._broker_name = other.pop._requests._broker_name = "c"
    (message,), (foreign,) = Group(broker).pop(), Group(other).pop()
    broker.fill([b"x"], topic="topic2")
    for group, topic, receipt, field, value in (
        ("group2", "topic", message.receipt, "consumer_group", "group"),
        ("group", "topic2", message.receipt, "topic", "topic"),
        ("group", "topic", foreign.receipt, "broker_name", "c"),
    ):
        request = AckRequest(consumer_group=group, topic=topic)
        request.messages.add(receipt=receipt, offset_runs=[0, 1])
        assert told(broker.refusal(POP + "Ack", request)) == (
            "INVALID_ARGUMENT", "ILLEGAL_RECEIPT", {"field": field, "value": value}
        )  # fmt: skip


def test_a_message_is_held_for_longer_or_given_back() -> None:
    broker = filled(3)
    group = Group(broker)
    messages = group.pop()
    broker.advance(HELD_MS - 1)
    group.change(messages[:1], 2 * MINUTE_MS)
    group.change(messages[1:2], 0)
    assert [(message.body, message.attempt) for message in group.pop()] == [(b"1", 2)]
    broker.advance(1)
    assert group.bodies() == [b"2"]
    broker.advance(2 * MINUTE_MS - 1)
    assert b"0" not in group.bodies()
    assert group.change(messages[:1], 5).stale_messages == []
    broker.advance(5)
    assert b"0" not in group.bodies()
    broker.advance(1)
    assert b"0" in group.bodies()


def test_a_message_that_failed_waits_as_its_group_or_a_delay_level_says() -> None:
    broker = filled(3)
    broker.store.groups.put(GroupSettings("group", retry_delays_ms=(1_000, 3_600_000, 90_000_000)))
    group = Group(broker)

    def comes_after_ms(level: int) -> int:
        """The message at offset 0 fails; the others stay away."""
        messages = [message for message in group.pop(invisible_ms=43_200_000) if message.offset == 0]
        request = ChangeInvisibleRequest(consumer_group="group", topic="topic", invisible_ms=7, retry_level=level)
        assert group.settle("ChangeInvisible", request, messages).response().stale_messages == []
        waited_ms = 0
        for step_ms in (1_000, 1, 4_000, 3_595_000, 3_600_000, 36_000_000):  # to 1 s, 5 s, 1 h, 2 h, 12 h
            broker.advance(step_ms)
            waited_ms += step_ms
            if any(message.offset == 0 for message in messages_of(group.begin(invisible_ms=10_000))):
                broker.advance(10_001)
                return waited_ms
        return 0

    assert comes_after_ms(0) == 1_001  # the first delay
    assert comes_after_ms(2) == 5_001  # level 2, whichever attempt it is
    assert comes_after_ms(99) == 7_200_001  # the last level
    assert comes_after_ms(0) == 43_200_001  # the last delay, 25 h: as long as a message may be held
    request = ChangeInvisibleRequest(consumer_group="group", topic="topic", retry_level=-1)
    refused = group.settle("ChangeInvisible", request, group.pop()).error
    assert refused is not None
    assert refused.reason == "INVALID_ARGUMENT"


def test_a_message_that_failed_too_often_goes_to_the_dead_letters() -> None:
    broker = filled(2)
    broker.store.groups.put(GroupSettings("group", retry_count_max=2))
    group = Group(broker)
    group.ack(group.pop()[1:])
    for attempt in (2, 3):
        broker.advance(HELD_MS)
        assert [message.attempt for message in group.pop()] == [attempt]
    broker.advance(MINUTE_MS + 1_000)  # nobody pops
    assert broker.store.appended_end_offset("%DLQ%group", 0) == 1
    assert group.pop() == []
    result = broker.store.read("%DLQ%group", 0, 0, 10, 1 << 20)
    assert result.status is ReadStatus.FOUND
    data = b"".join(region.file.read(region.offset, region.size_bytes) for region in result.regions)
    (record,) = RecordBatch.FromString(data).records
    assert record.body == b"0"
    assert (record.transit.origin_topic, record.transit.origin_queue_offset, record.transit.attempt) == ("topic", 0, 3)
    dead_letters = broker.store.topics.find("%DLQ%group")
    assert dead_letters is not None
    assert (dead_letters.readable, dead_letters.writable) == (True, False)
    # As if a push consumer had rejected it: no client may write there.
    assert broker.store.topics.find("%DLQ%group") == topic_of_broker("%DLQ%group")
    assert broker.store.popped.dead_count == 1


@pytest.mark.parametrize("count", [1, 40])
def test_the_dead_letter_of_a_dead_letter_counts_the_deliveries_of_its_own_group(count: int) -> None:
    broker = filled(count)
    for name, retry_count_max in (("first", 3), ("second", 1)):
        broker.store.groups.put(GroupSettings(name, retry_count_max=retry_count_max))
    first = Group(broker, "first", record_count_max=64)
    for attempt in range(1, 5):
        assert [message.attempt for message in first.pop()] == [attempt] * count
        broker.advance(HELD_MS)
    broker.advance(MINUTE_MS)
    second = Group(broker, "second", topic="%DLQ%first", record_count_max=64)
    for attempt in (1, 2):
        assert [message.attempt for message in second.pop()] == [attempt] * count
        broker.advance(HELD_MS)
    broker.advance(MINUTE_MS)
    assert [_attempts_in(broker, f"%DLQ%{name}") for name in ("first", "second")] == [[4] * count, [2] * count]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_dead_letter_that_its_own_group_cannot_process_either_stays_the_only_one(restarts: bool) -> None:
    broker = filled(3)
    broker.store.groups.put(GroupSettings("group", retry_count_max=1))
    own = {"topic": "%DLQ%group"}
    group = Group(broker)
    for _ in range(2):
        assert len(group.pop()) == 3
        broker.advance(HELD_MS)
    broker.advance(MINUTE_MS)
    dead = group.pop(**own)
    group.ack(dead[2:], "%DLQ%group")
    for attempt in (2, 3):
        broker.advance(HELD_MS)
        if restarts:
            broker = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms)
            group = Group(broker)
            broker.advance(HELD_MS)
        assert [message.attempt for message in group.pop(**own)] == [attempt] * 2 * (attempt == 2)
    broker.advance(MINUTE_MS)
    assert _attempts_in(broker, "%DLQ%group") == [2] * 3, "each once"
    (own_queue,) = (known for known in broker.store.popped.queues() if known.key.topic == "%DLQ%group")
    assert not own_queue.open, "nobody waits for them any more"


def test_a_dead_letter_of_which_retention_has_left_a_copy_alone_is_one_again_when_its_group_fails_again() -> None:
    broker = filled(1)
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    group = Group(broker)
    group.pop()
    broker.advance(HELD_MS + MINUTE_MS)
    assert len(group.pop(topic="%DLQ%group")) == 1
    while broker.store.appended_position < 3 << 20:
        broker.fill([bytes(1 << 19)], topic="other")
    broker.store.checkpoint()
    assert broker.store.delete_segments_below(2 << 20)
    assert broker.store.queue_range("%DLQ%group", 0) == (1, 1)
    broker.advance(HELD_MS + MINUTE_MS)
    assert group.pop(topic="%DLQ%group") != []
    broker.advance(HELD_MS + MINUTE_MS)
    assert broker.store.queue_range("%DLQ%group", 0) == (1, 2)


def _attempts_in(broker: FakeBroker, topic: str) -> list[int]:
    result = broker.store.read(topic, 0, 0, 100, 1 << 20)
    data = b"".join(region.file.read(region.offset, region.size_bytes) for region in result.regions)
    return [record.transit.attempt for record in RecordBatch.FromString(data).records]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_dead_letter_says_what_its_last_holder_said_that_it_failed_of(restarts: bool) -> None:
    broker = filled(4)
    broker.store.groups.put(GroupSettings("group", retry_count_max=1))
    group = Group(broker)
    first = group.pop()
    group.change(first[:1], 0, "ValueError: first")
    group.change(first[1:2], 0, "said once, then out of time")
    group.change(first[2:3], 0)
    group.change(first[3:], 0, "acknowledged in the end")
    second = group.pop()
    group.ack(second[3:])
    group.change(second[:1], 0, "\N{SNOWMAN}" * 400)
    if restarts:
        broker = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms)
        group = Group(broker)
    broker.advance(2 * MINUTE_MS)
    assert group.pop() == []
    result = broker.store.read("%DLQ%group", 0, 0, 10, 1 << 20)
    data = b"".join(region.file.read(region.offset, region.size_bytes) for region in result.regions)
    found = {record.body: record.transit.last_error for record in RecordBatch.FromString(data).records}
    assert found == {b"0": "\N{SNOWMAN}" * 170, b"1": "said once, then out of time", b"2": ""}


def test_a_group_has_16_retries_and_an_orderly_one_no_limit() -> None:
    for orderly in (False, True):
        broker = filled(1)
        if orderly:
            broker.store.groups.put(GroupSettings("group", orderly=True))
        group = Group(broker)
        for attempt in range(1, 18):
            assert [message.attempt for message in group.pop()] == [attempt]
            broker.advance(HELD_MS)
        assert len(group.pop()) == orderly
        assert broker.store.appended_end_offset("%DLQ%group", 0) == 1 - orderly


def test_a_group_that_is_switched_off_pops_nothing_and_can_acknowledge() -> None:
    broker = filled(1)
    group = Group(broker)
    messages = group.pop()
    held = group.begin(hold_ms=20_000)
    broker.call(GROUP + "PutGroup", PutGroupRequest(settings=GroupMessage(consumer_group="group", consume_enabled=False)))
    assert held.error is not None
    assert held.error.reason == "GROUP_DISABLED"
    request = PopRequest(consumer_group="group", topic="topic")
    assert broker.refusal(POP + "Pop", request).reason == "GROUP_DISABLED"
    assert group.ack(messages) == AckResponse()


def test_a_held_pop_is_answered_by_what_comes_falls_due_or_is_given_back() -> None:
    broker = FakeBroker()
    group = Group(broker)
    call = group.begin(hold_ms=20_000)
    assert call.is_held
    broker.fill([b"new"])
    messages = messages_of(call)
    assert [message.body for message in messages] == [b"new"]
    for is_due in (True, False):
        call = group.begin(hold_ms=60_000)
        assert not call.answered
        if is_due:
            broker.advance(HELD_MS)
        else:
            group.change(messages, 0)
        messages = messages_of(call)
        assert [message.body for message in messages] == [b"new"]
    call = group.begin(hold_ms=20_000)
    broker.advance(19_999)
    assert not call.answered
    broker.advance(1)
    assert messages_of(call) == []
    assert broker.server.lanes["pop"].holds == 0


def test_a_held_pop_gets_what_stands_in_queues_that_a_topic_gets_back() -> None:
    broker = FakeBroker()
    broker.fill([b"left behind"], queue_id=1)
    broker.store.topics.put([TopicConfig("topic", 1, 1)])
    call = broker.call(POP + "Pop", PopRequest(consumer_group="group", topic="topic", hold_ms=20_000))
    assert call.is_held
    assert not call.answered
    wanted = CreateTopicRequest(topic=Topic(name="topic", write_queues=2, read_queues=2), update=True)
    broker.call(ADMIN + "CreateTopic", wanted).response()
    assert [message.body for message in messages_of(call)] == [b"left behind"]


def test_a_message_wakes_one_of_many_and_the_others_are_held_on() -> None:
    broker = FakeBroker()
    groups = [Group(broker), Group(broker), Group(broker, "other")]
    calls = [group.begin(hold_ms=20_000) for group in groups]
    broker.fill([b"new"])
    assert [call.answered for call in calls] == [True, False, True]
    calls[1].hang_up()
    assert broker.server.lanes["pop"].holds == 0
    broker.fill([b"newer"])
    assert groups[0].bodies() == [b"newer"]


def test_what_is_planned_for_a_caller_that_gives_up_is_handed_to_the_next_one() -> None:
    broker = FakeBroker()
    group = Group(broker)
    call = group.begin(hold_ms=20_000)
    broker.server.call(SEND, _send(1))
    broker.server.lanes["send"].run()  # it arrives
    broker.server.lanes["pop"].run()  # it is planned for the first
    call.cancel()
    broker.server.run()
    assert [(message.body, message.attempt) for message in group.pop()] == [(b"0", 1)]


HOLD_ID: Final = b"0123456789abcdef"


def give_up(broker: FakeBroker, hold_id: bytes = HOLD_ID) -> None:
    assert broker.call(POP + "GiveUpPop", GiveUpPopRequest(hold_id=hold_id)).response() == GiveUpPopResponse()


def was_given_up(call: FakeCall) -> bool:
    return call.error is not None and call.error.reason == "CANCELLED"


@pytest.mark.parametrize("kind", [FakeCall, FakeGrpcCall])
def test_a_held_pop_that_is_given_up_ends_and_takes_nothing_that_comes_later(kind: type[FakeCall]) -> None:
    broker = FakeBroker()
    group = Group(broker)
    request = PopRequest(consumer_group="group", topic="topic", queue_id=0, hold_ms=20_000, hold_id=HOLD_ID)
    call = broker.call(POP + "Pop", request, kind=kind)
    other = group.begin(hold_ms=20_000, hold_id=b"of another call!")
    nameless = group.begin(hold_ms=20_000)
    give_up(broker)
    assert was_given_up(call)
    assert broker.server.lanes["pop"].holds == 2, "it ends no other one"
    broker.fill([b"new"])
    assert [message.body for message in messages_of(other)] == [b"new"]
    assert not nameless.answered
    give_up(broker)  # What is over is over.


def test_what_is_planned_for_a_pop_that_is_given_up_is_handed_to_the_next_one() -> None:
    broker = FakeBroker()
    group = Group(broker)
    call = group.begin(hold_ms=20_000, hold_id=HOLD_ID)
    broker.server.call(SEND, _send(1))
    broker.server.lanes["send"].run()  # it arrives
    broker.server.lanes["pop"].run()  # it is planned for the first
    give_up(broker)
    assert was_given_up(call)
    assert [(message.body, message.attempt) for message in group.pop()] == [(b"0", 1)]


def test_what_is_handed_out_to_a_pop_that_is_given_up_meanwhile_does_not_count() -> None:
    broker = FakeBroker(sync_flush=True)
    group = Group(broker)

    def flush() -> None:
        broker.server.run()
        broker.store.flush()
        broker.server.run()

    call = group.begin(hold_ms=20_000, hold_id=HOLD_ID)
    broker.server.call(SEND, _send(1))
    flush()
    assert not call.answered, "what was handed out is not on the disk yet"
    give_up(broker)
    assert was_given_up(call)
    flush()
    other = group.begin()
    flush()
    assert [(message.body, message.attempt) for message in messages_of(other)] == [(b"0", 1)]


def test_a_pop_that_was_given_up_before_it_came_is_not_held_and_may_bring_messages() -> None:
    broker = filled(1)
    group = Group(broker)
    give_up(broker)
    assert group.bodies(hold_ms=20_000, hold_id=HOLD_ID) == [b"0"]
    give_up(broker)
    assert was_given_up(group.begin(hold_ms=20_000, hold_id=HOLD_ID))
    assert broker.server.lanes["pop"].holds == 0


def test_a_pop_that_has_its_messages_has_nothing_to_give_up() -> None:
    broker = filled(1)
    group = Group(broker)
    messages = group.pop(hold_ms=20_000, hold_id=HOLD_ID)
    give_up(broker)
    assert group.ack(messages) == AckResponse()


def test_of_those_that_were_given_up_before_they_came_the_last_ones_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pop_service, "GIVEN_UP_COUNT_MAX", 2)
    broker = FakeBroker()
    hold_ids = [b"%016d" % number for number in range(3)]
    for hold_id in hold_ids:
        give_up(broker, hold_id)
    calls = [Group(broker).begin(hold_ms=20_000, hold_id=hold_id) for hold_id in hold_ids]
    assert [was_given_up(call) for call in calls] == [False, True, True]
    assert not calls[0].answered


@pytest.mark.parametrize("hold_id", [b"short", HOLD_ID + b"x"])
def test_what_is_no_id_of_a_pop_is_refused(hold_id: bytes) -> None:
    broker = FakeBroker()
    for method, request in (
        ("Pop", PopRequest(consumer_group="group", topic="topic", hold_id=hold_id)),
        ("GiveUpPop", GiveUpPopRequest(hold_id=hold_id)),
    ):
        assert "hold_id" in broker.refusal(POP + method, request).message
    assert "hold_id" in broker.refusal(POP + "GiveUpPop", GiveUpPopRequest()).message


def test_pops_that_differ_in_their_ids_only_share_what_was_made_of_the_first() -> None:
    broker = FakeBroker()
    request = PopRequest(consumer_group="group", topic="topic", queue_id=0)
    requests = [request.SerializeToString() + b"r\x10" + b"%016d" % number for number in range(5)]
    with mock.patch.object(pop_requests, "PopTerms", wraps=PopTerms) as made:
        assert [messages_of(broker.call(POP + "Pop", each)) for each in requests] == [[]] * 5
    assert made.call_count == 1


def test_what_only_looks_like_an_id_at_the_end_of_a_request_is_none() -> None:
    name = "r\x10" + "x" * 16
    refusal = FakeBroker().refusal(POP + "Pop", PopRequest(consumer_group="group", topic=name))
    assert "cannot be the name of a topic" in refusal.message


def test_a_pop_without_messages_says_that_it_may_be_given_up() -> None:
    response: PopResponse = Group(FakeBroker()).begin().response()
    assert response.may_be_given_up


def test_who_has_stopped_waiting_is_given_nothing_any_more() -> None:
    broker = FakeBroker()
    group = Group(broker)
    call = group.begin(hold_ms=20_000)
    call.deadline = 0.0
    broker.server.call(SEND, _send(1))
    records = broker.store.appended_end_offset("%SYS%POP", 0)
    broker.server.run()
    assert messages_of(call) == []
    assert broker.store.appended_end_offset("%SYS%POP", 0) == records, "it was not even handed out"
    assert [(message.body, message.attempt) for message in group.pop()] == [(b"0", 1)]


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("is_held", [True, False])
def test_what_is_handed_out_to_nobody_is_given_back_at_once(is_held: bool, is_late: bool) -> None:
    broker = FakeBroker(sync_flush=True)
    group = Group(broker)

    def flush() -> None:
        broker.server.run()
        broker.store.flush()
        broker.server.run()

    call = group.begin(hold_ms=20_000) if is_held else None
    broker.server.call(SEND, _send(3))
    flush()
    if call is None:
        call = group.begin(hold_ms=20_000)
    assert not call.answered
    assert call.is_held is is_held
    if is_late:
        call.deadline = 0.0
    else:
        call.hang_up()
    other = group.begin(hold_ms=20_000)
    flush()
    flush()
    assert call.answer_payload is None or not messages_of(call)
    assert [(message.body, message.attempt) for message in messages_of(other)] == [(b"0", 1), (b"1", 1), (b"2", 1)]
    assert broker.server.lanes["pop"].holds == 0


@pytest.mark.parametrize("seen_before", [0, 1, 2])
def test_deliveries_that_nobody_has_seen_make_no_dead_letter(seen_before: int) -> None:
    broker = FakeBroker(sync_flush=True)
    broker.store.groups.put(GroupSettings("group", retry_count_max=2))
    group = Group(broker)

    def flush() -> None:
        broker.server.run()
        broker.store.flush()
        broker.server.run()

    def pop() -> list[Popped]:
        call = group.begin()
        flush()
        return messages_of(call)

    broker.server.call(SEND, _send(2))
    flush()
    for _ in range(seen_before):
        pop()
        broker.advance(HELD_MS)
    for _ in range(20):
        group.begin().hang_up()
        flush()
        flush()
        broker.advance(1_000)
    broker.advance(2_000)
    flush()
    assert broker.store.appended_end_offset("%DLQ%group", 0) == 0
    assert broker.store.popped.dead_count == 0
    assert [(message.body, message.attempt) for message in pop()] == [(b"0", seen_before + 1), (b"1", seen_before + 1)]
    broker.advance(HELD_MS)
    assert [message.attempt for message in pop()] == ([seen_before + 2] * 2 if seen_before < 2 else [])


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("seen_before", [0, 1, 2])
def test_a_member_that_has_not_seen_its_messages_gives_their_delivery_back(seen_before: int, restarts: bool) -> None:
    broker = filled(3)
    broker.store.groups.put(GroupSettings("group", retry_count_max=2))
    group = Group(broker)
    for _ in range(seen_before):
        group.pop()
        broker.advance(HELD_MS)
    handed_out_count = broker.store.popped.handed_out_count
    messages = []
    for _ in range(20):
        messages = group.pop(invisible_ms=10 * MINUTE_MS)
        assert [(message.offset, message.attempt) for message in messages] == [(n, seen_before + 1) for n in range(3)]
        assert _give_back_unseen(group, messages).error is None
    assert broker.store.popped.handed_out_count == handed_out_count + 60
    if seen_before:  # It is said twice, as when an answer was lost.
        assert _give_back_unseen(group, messages).error is None
    if restarts:
        broker = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms)
        group = Group(broker)
    assert [message.attempt for message in group.pop(invisible_ms=MINUTE_MS)] == [seen_before + 1] * 3
    assert group.pop() == []
    broker.advance(HELD_MS - 1)
    assert group.pop() == []
    assert broker.store.appended_end_offset("%DLQ%group", 0) == 0


@pytest.mark.parametrize("is_first", [False, True])
def test_what_is_acknowledged_together_with_a_give_back_does_not_come_again(is_first: bool) -> None:
    broker = filled(3)
    group = Group(broker)
    messages = group.pop()
    ack: Any = AckRequest(consumer_group="group", topic="topic")
    unseen: Any = ChangeInvisibleRequest(consumer_group="group", topic="topic", unseen=True)
    requests = [(POP + "Ack", ack, messages[:2]), (POP + "ChangeInvisible", unseen, messages[1:])]
    if is_first:
        requests.reverse()
    calls = []
    for method, request, some in requests:
        for message in some:
            request.messages.add(receipt=message.receipt, offset_runs=[message.offset, 1])
        calls.append(broker.server.call(method, request))
    broker.server.run()
    assert [call.error for call in calls] == [None, None]
    assert group.bodies() == ([b"1", b"2"] if is_first else [b"2"])


def test_in_order_what_nobody_has_seen_is_still_the_first_of_its_key() -> None:
    broker = FakeBroker()
    fill_groups(broker, "aa")
    group = Group(broker)
    for _ in range(3):
        messages = group.pop(fifo=True)
        assert [(message.body, message.attempt) for message in messages] == [(b"a0", 1)]
        _give_back_unseen(group, messages)
    messages = group.pop(fifo=True)
    group.ack(messages)
    assert group.bodies(fifo=True) == [b"a1"]


def _give_back_unseen(group: Group, messages: Sequence[Popped]) -> FakeCall:
    return group.settle("ChangeInvisible", ChangeInvisibleRequest(consumer_group="group", topic="topic", unseen=True), messages)


def test_a_pop_of_any_queue_fills_itself_from_several() -> None:
    broker = FakeBroker()
    for queue_id in (0, 1):
        broker.fill([b"%d-%d" % (queue_id, number) for number in range(3)], queue_id=queue_id)
    request = PopRequest(consumer_group="group", topic="topic", record_count_max=5)
    messages = messages_of(broker.call(POP + "Pop", request))
    assert sorted(message.body for message in messages) == [b"0-0", b"0-1", b"0-2", b"1-0", b"1-1"]
    Group(broker).ack(messages)
    assert [m.body for m in messages_of(broker.call(POP + "Pop", request))] == [b"1-2"]


@pytest.mark.parametrize(("start", "expected"), [(PopStart.POP_START_UNSPECIFIED, [b"0", b"1"]), (PopStart.POP_START_END, [])])
def test_a_new_group_begins_where_it_says_and_stays_there(start: PopStart.ValueType, expected: list[bytes]) -> None:
    broker = filled(2)
    group = Group(broker)
    assert group.bodies(start=start) == expected
    broker.fill([b"2"])
    assert group.bodies(start=start) == [b"2"]


def test_a_group_that_has_committed_goes_on_there() -> None:
    broker = filled(4)
    request = CommitOffsetsRequest(consumer_group="group")
    request.offsets.add(topic="topic", queue_id=0, queue_offset=3)
    broker.call(CONSUMER + "CommitOffsets", request).response()
    assert Group(broker).bodies() == [b"3"]


def test_only_what_matches_is_given_and_the_rest_is_passed_over() -> None:
    broker = FakeBroker()
    for number in range(40):
        tag = "even" if number % 2 == 0 else "odd"
        broker.fill([b"%d" % number], tag=tag, properties={"n": str(number)})
    even = Group(broker, "tags").pop(tags=["even"])
    assert [int(message.body) for message in even] == list(range(0, 40, 2))
    group = Group(broker, "sql")
    sql: dict[str, Any] = {"filter_type": FilterType.FILTER_TYPE_SQL92, "filter": "n >= 30", "record_count_max": 4}
    call = group.begin(**sql)
    while not call.answered:  # the filter is compiled on a thread of its own
        broker.server.run()
    messages = messages_of(call)
    assert [int(message.body) for message in messages] == [30, 31, 32, 33]
    assert [int(message.body) for message in group.pop(**sql)] == [34, 35, 36, 37]
    group.change(messages[1:2], 0)
    assert [(int(m.body), m.attempt) for m in group.pop(**sql)] == [(31, 2), (38, 1), (39, 1)]
    assert group.pop(**sql) == []


def compiled(broker: FakeBroker, group: Group, **fields: Any) -> list[Popped]:
    """A pop with a filter, which a thread of its own compiles."""
    call = group.begin(**fields)
    while not call.answered:
        broker.server.run()
    return messages_of(call)


OVER_SIX: Final[dict[str, Any]] = {"filter_type": FilterType.FILTER_TYPE_SQL92, "filter": "n > 6"}


@pytest.mark.parametrize("wanted", [{"tags": ["paid"]}, OVER_SIX])
@pytest.mark.parametrize("scan_s", [pop_reading.SCAN_S, -1.0])
def test_due_messages_that_do_not_match_hide_none_behind_them(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], scan_s: float
) -> None:
    monkeypatch.setattr(pop_planner, "SCAN_S", scan_s)  # -1.0: each look has no time for more than one chunk
    monkeypatch.setattr(pop_planner, "CHUNK_COUNT", 2)
    broker = FakeBroker()
    for number in range(9):
        broker.fill([b"%d" % number], tag="paid" if number > 6 else "open", properties={"n": str(number)})
    group = Group(broker)
    assert len(group.pop()) == 9
    broker.advance(HELD_MS)
    found = compiled(broker, group, record_count_max=1, **wanted)
    assert [(message.body, message.attempt) for message in found] == [(b"7", 2)]
    found = compiled(broker, group, record_count_max=2, **wanted)
    assert [(message.body, message.attempt) for message in found] == [(b"8", 2)]
    assert compiled(broker, group, record_count_max=2, **wanted) == []
    assert len(group.pop()) == 7, "the others wait for a pop that wants them"


def test_a_held_pop_does_not_spin_on_due_messages_that_it_does_not_want() -> None:
    broker = FakeBroker()
    broker.fill([b"0", b"1"], tag="open")
    broker.fill([b"2"], tag="paid")
    group = Group(broker)
    first = group.pop()
    group.change(first[2:], 90_000)
    broker.advance(HELD_MS)
    call = group.begin(tags=["paid"], hold_ms=40_000)
    with mock.patch.object(broker.pop.pipeline.planner, "pop", wraps=broker.pop.pipeline.planner.pop) as planned:
        broker.advance(29_000)
        assert planned.call_count < 5
    assert not call.answered
    broker.advance(1_000)
    assert [(message.body, message.attempt) for message in messages_of(call)] == [(b"2", 2)]


def test_what_is_dead_or_lost_hides_nothing_due_from_a_held_pop() -> None:
    broker = filled(2)
    group = Group(broker)
    group.pop(record_count_max=1)
    broker.advance(HELD_MS)
    (again,) = group.pop(record_count_max=1)
    assert (again.body, again.attempt) == (b"0", 2)
    group.pop(record_count_max=1)
    broker.store.groups.put(GroupSettings("group", retry_count_max=1))
    broker.clock.time_ms += HELD_MS  # the pop looks before the sweep does
    call = group.begin(record_count_max=1, hold_ms=20_000)
    assert [(message.body, message.attempt) for message in messages_of(call)] == [(b"1", 2)]


def test_a_pop_and_the_sweep_in_one_plan_make_one_dead_letter_of_a_message() -> None:
    broker = filled(2)
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    group = Group(broker)
    group.pop()
    broker.clock.time_ms += HELD_MS
    pipeline = broker.pop.pipeline
    pipeline._is_sweep_due = True
    assert group.pop() == []
    assert broker.store.queue_range("%DLQ%group", 0) == (0, 2)


def test_what_is_handed_out_can_be_settled_though_its_topic_may_not_be_read_any_more() -> None:
    broker = filled(3)
    group = Group(broker)
    first, second, third = group.pop()
    broker.store.topics.put([replace(broker.topic, readable=False)])
    assert group.ack([first]) == AckResponse()
    assert group.change([second], 0) == ChangeInvisibleResponse()
    assert group.change([third], 2 * MINUTE_MS) == ChangeInvisibleResponse()
    refused = group.begin().error
    assert refused is not None
    assert refused.reason == "NOT_PERMITTED"


@pytest.mark.parametrize("fifo", [False, True])
def test_a_group_that_gets_nothing_new_for_what_is_open_is_named_in_the_log(
    fifo: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (popped_queue, pop_planner):
        monkeypatch.setattr(module, "OPEN_MAX", 4)
    broker = FakeBroker()
    broker.fill([b"%d" % number for number in range(6)], attributes=Attributes(sharding_key="k"))
    group = Group(broker, fifo=fifo)
    first = group.pop()
    assert caplog.messages == []
    for _ in range(3):
        assert group.pop() == []
    (line,) = caplog.messages
    assert line.startswith("group group gets nothing new of queue 0 of topic topic: 4 of its messages there are open")
    assert ("Members hold 1, 0 are due again, and 3 wait" if fifo else "Members hold 4, 0 are due again, and 0 wait") in line
    group.ack(first)
    assert len(group.pop()) == (1 if fifo else 2)


def test_a_message_that_the_new_filter_does_not_want_holds_up_its_sharding_key_alone() -> None:
    broker = FakeBroker()
    broker.fill([b"0"], tag="old", attributes=Attributes(sharding_key="k"))
    group = Group(broker, fifo=True)
    assert group.bodies(tags=["old"]) == [b"0"]
    broker.fill([b"1"], tag="new", attributes=Attributes(sharding_key="k"))
    broker.fill([b"2"], tag="new", attributes=Attributes(sharding_key="z"))
    broker.advance(HELD_MS)
    assert group.bodies(tags=["new"]) == [b"2"]
    assert group.pop(tags=["new"]) == []
    (old,) = group.pop()
    assert (old.body, old.attempt) == (b"0", 2)
    group.ack([old])
    assert group.bodies(tags=["new"]) == [b"1"]


def test_more_messages_than_may_be_settled_at_once_are_told_so() -> None:
    broker = filled(1)
    (message,) = Group(broker).pop()
    request = AckRequest(consumer_group="group", topic="topic")
    request.messages.add(receipt=message.receipt, offset_runs=[0, 10_001])
    assert "1 to 10000 at once, these are 10001" in str(broker.refusal(POP + "Ack", request))


def test_invisible_times_are_told_to_the_millisecond() -> None:
    broker = filled(1)
    (message,) = Group(broker).pop()
    request = ChangeInvisibleRequest(consumer_group="group", topic="topic", invisible_ms=43_200_001)
    request.messages.add(receipt=message.receipt, offset_runs=[0, 1])
    assert "that is 0 s to 43200 s, and not 43200.001 s" in str(broker.refusal(POP + "ChangeInvisible", request))


def test_many_dead_letters_are_made_in_slices_between_which_others_pop() -> None:
    broker = filled(1_000)
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    broker.fill([b"of others"], topic="other")
    group = Group(broker)
    assert len(group.pop(record_count_max=1_000)) == 1_000
    broker.advance(HELD_MS - 1)
    broker.clock.time_ms += 1
    pop_lane, send_lane = broker.server.lanes["pop"], broker.server.lanes["send"]
    pop_lane.advance(1_000)
    buried = [broker.store.popped.dead_count]
    call = broker.server.call(POP + "Pop", PopRequest(consumer_group="another", topic="other"))
    buried_at_answer = 0
    while send_lane.run() + pop_lane.run():
        buried.append(broker.store.popped.dead_count)
        if call.answered and not buried_at_answer:
            buried_at_answer = buried[-1]
    assert buried[-1] == 1_000
    assert [message.body for message in messages_of(call)] == [b"of others"]
    assert 0 < buried_at_answer <= 2 * pop_planner.DEAD_COUNT_MAX, "it waited for all the dead letters"
    assert max(after - before for before, after in pairwise(buried)) == pop_planner.DEAD_COUNT_MAX
    assert broker.store.queue_range("%DLQ%group", 0) == (0, 1_000)


def test_dead_letters_of_a_topic_that_is_being_deleted_are_not_planned_without_end() -> None:
    broker = filled(100)
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    assert len(Group(broker).pop(record_count_max=100)) == 100
    broker.clock.time_ms += HELD_MS
    pop_lane, send_lane = broker.server.lanes["pop"], broker.server.lanes["send"]
    pop_lane.advance(1_000)  # planned, and on its way to the send lane
    broker.store.topics.delete("topic")  # What groups have popped of it goes in the next step.
    steps = [send_lane.run() + pop_lane.run() for _ in range(5)]
    assert steps[-1] == 0, "it is planned again and again"
    assert broker.store.popped.dead_count == 0


def test_large_dead_letters_do_not_wait_for_the_next_look_either() -> None:
    broker = FakeBroker()
    for _ in range(3):
        broker.fill([b"x" * (300 << 10)])
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    group = Group(broker)
    assert sum(len(group.pop()) for _ in range(3)) == 3
    broker.advance(HELD_MS + 1_000)
    assert broker.store.popped.dead_count == 3


def test_what_is_dead_is_not_hidden_by_what_is_due_longer() -> None:
    broker = filled(201)
    broker.store.groups.put(GroupSettings("group", retry_count_max=1))
    group = Group(broker)
    (first,) = group.pop(record_count_max=1)
    group.change([first], 0)
    (first,) = group.pop(record_count_max=1, invisible_ms=2 * MINUTE_MS)
    assert first.attempt == 2
    assert len(group.pop(record_count_max=200)) == 200
    broker.advance(2 * HELD_MS + 1_000)
    assert broker.store.popped.dead_count == 1


def test_a_filter_that_is_none_is_refused() -> None:
    broker = filled(1)
    call = Group(broker).begin(filter_type=FilterType.FILTER_TYPE_SQL92, filter="a >")
    while not call.answered:
        broker.server.run()
    assert call.error is not None
    assert call.error.reason == "ILLEGAL_FILTER"


def fill_groups(broker: FakeBroker, names: str) -> None:
    for number, name in enumerate(names):
        broker.fill([b"%s%d" % (name.encode(), number)], attributes=Attributes(sharding_key=name if name != "-" else ""))


def test_in_order_one_message_of_a_group_comes_after_another_and_other_groups_go_on() -> None:
    broker = FakeBroker()
    fill_groups(broker, "aab-bca")
    group = Group(broker, fifo=True)
    first = group.pop()
    assert [message.body for message in first] == [b"a0", b"b2", b"-3", b"c5"]
    assert group.pop() == []
    group.ack([first[0]])
    second = group.pop()
    assert [message.body for message in second] == [b"a1"]
    group.change(second, 0)
    (again,) = group.pop()
    assert (again.body, again.attempt) == (b"a1", 2)
    group.ack([again, first[1]])
    assert group.bodies() == [b"b4", b"a6"]


def test_in_order_a_key_whose_checksum_is_0_is_a_key() -> None:
    broker = FakeBroker()
    for body in (b"first", b"second"):
        broker.fill([body], attributes=Attributes(sharding_key="order-43043437002"))
    group = Group(broker, fifo=True)
    first = group.pop()
    assert [message.body for message in first] == [b"first"]
    assert group.pop() == []
    group.ack(first)
    assert group.bodies() == [b"second"]


def test_in_order_a_held_pop_gets_what_an_ack_lets_go() -> None:
    broker = FakeBroker()
    fill_groups(broker, "aa")
    group = Group(broker, fifo=True)
    first = group.pop()
    call = group.begin(hold_ms=20_000)
    assert not call.answered
    group.ack(first)
    assert [message.body for message in messages_of(call)] == [b"a1"]


def test_beyond_so_many_open_messages_a_queue_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (popped_queue, pop_planner):
        monkeypatch.setattr(module, "OPEN_MAX", 4)
    for fifo in (False, True):
        broker = FakeBroker()
        fill_groups(broker, "aaaaab" if fifo else "------")
        group = Group(broker, fifo=fifo)
        first = group.pop()
        assert len(first) == (1 if fifo else 4)
        assert group.pop() == []
        assert broker.pop.pipeline.planner.full_count >= 1
        group.ack(first[:1])
        assert group.bodies() == ([b"a1"] if fifo else [b"-4"])


def test_a_queue_has_at_most_10_000_open_messages_of_a_group() -> None:
    broker = FakeBroker()
    fill_groups(broker, "a" * 10_001 + "b")
    group = Group(broker, fifo=True)
    (first,) = group.pop(record_count_max=1_024)
    full_count = broker.pop.pipeline.planner.full_count
    assert group.pop() == []
    assert broker.pop.pipeline.planner.full_count > full_count
    group.ack([first])
    (second,) = group.pop()
    assert second.body == b"a1"
    group.ack([second])
    assert {message.body[:1] for message in group.pop()} == {b"a", b"b"}


def test_a_longer_hold_than_the_broker_gives_ends_with_the_brokers_time() -> None:
    broker = FakeBroker(hold_max_ms=5_000)
    call = Group(broker).begin(hold_ms=86_400_000)
    broker.advance(4_999)
    assert call.is_held
    broker.advance(1)
    assert messages_of(call) == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"consumer_group": ""}, "INVALID_ARGUMENT"),
        ({"topic": "absent"}, "TOPIC_NOT_FOUND"),
        ({"queue_id": 7}, "QUEUE_NOT_FOUND"),
        ({"invisible_ms": 9_999}, "INVALID_ARGUMENT"),
        ({"invisible_ms": 43_200_001}, "INVALID_ARGUMENT"),
        ({"record_count_max": 1_025}, "INVALID_ARGUMENT"),
        ({"hold_ms": 86_400_001}, "INVALID_ARGUMENT"),
        ({"hold_ms": -1}, "INVALID_ARGUMENT"),
        ({"size_max_bytes": -1}, "INVALID_ARGUMENT"),
        ({"start": 5}, "INVALID_ARGUMENT"),
        ({"tags": ["a|b"]}, "INVALID_ARGUMENT"),
        ({"tags": ["a"], "filter_type": 2, "filter": "a = 1"}, "INVALID_ARGUMENT"),
        ({"filter": "a = 1"}, "INVALID_ARGUMENT"),
        ({"topic_incarnation": 5}, "TOPIC_RECREATED"),
    ],
)
def test_a_pop_that_cannot_be_is_refused(fields: dict[str, Any], reason: str) -> None:
    broker = filled(1)
    request = PopRequest(**{"consumer_group": "group", "topic": "topic", **fields})
    assert broker.refusal(POP + "Pop", request).reason == reason
    assert broker.refusal(POP + "Pop", b"\xff").reason == "INVALID_ARGUMENT"


def test_a_time_out_of_bounds_is_told_in_both_units_and_no_other_value_is_offered() -> None:
    request = PopRequest(consumer_group="group", topic="topic", invisible_ms=1_000)
    text = filled(1).refusal(POP + "Pop", request).message
    assert text == "invisible_ms: must be 10000 to 43200000; that is 10 s to 43200 s, and not 1 s"


def test_a_request_that_was_answered_before_is_refused_once_it_cannot_be_any_more() -> None:
    broker = filled(2)
    topic = broker.store.topics.find("topic")
    assert topic is not None
    whole: dict[str, Any] = {"consumer_group": "group", "topic": "topic", "record_count_max": 1}
    any_topic = PopRequest(**whole, queue_id=0)
    this_topic = PopRequest(**whole, topic_incarnation=topic.incarnation)
    last_queue = PopRequest(**whole, queue_id=topic.read_queues - 1)
    for request in (any_topic, this_topic, last_queue):
        assert broker.call(POP + "Pop", request).error is None
    settings = GroupMessage(consumer_group="group", consume_enabled=False)
    broker.call(GROUP + "PutGroup", PutGroupRequest(settings=settings))
    assert broker.refusal(POP + "Pop", any_topic).reason == "GROUP_DISABLED"
    settings.consume_enabled = True
    broker.call(GROUP + "PutGroup", PutGroupRequest(settings=settings))
    assert broker.call(POP + "Pop", any_topic).error is None
    broker.store.delete_topic("topic")
    assert broker.refusal(POP + "Pop", any_topic).reason == "TOPIC_NOT_FOUND"
    broker.store.topics.add([TopicConfig("topic", 1, 1)])
    assert broker.refusal(POP + "Pop", this_topic).reason == "TOPIC_RECREATED"
    assert broker.refusal(POP + "Pop", last_queue).reason == "QUEUE_NOT_FOUND"
    assert broker.call(POP + "Pop", any_topic).error is None


@pytest.mark.parametrize("runs", [[], [0], [0, 0], [-1, 1], [0, 10_001], [0, 9_000, 20_000, 9_000]])
def test_runs_that_name_nothing_are_refused(runs: list[int]) -> None:
    broker = filled(1)
    (message,) = Group(broker).pop()
    for method, request in (
        ("Ack", AckRequest(consumer_group="group", topic="topic")),
        ("ChangeInvisible", ChangeInvisibleRequest(consumer_group="group", topic="topic")),
    ):
        request.messages.add(receipt=message.receipt, offset_runs=runs)
        assert broker.refusal(POP + method, request).reason == "INVALID_ARGUMENT"
    request = ChangeInvisibleRequest(consumer_group="group", topic="topic", invisible_ms=43_200_001)
    request.messages.add(receipt=message.receipt, offset_runs=[0, 1])
    assert broker.refusal(POP + "ChangeInvisible", request).reason == "INVALID_ARGUMENT"


def test_over_grpc_an_answer_stays_within_what_clients_accept() -> None:
    broker = FakeBroker()
    for _ in range(10):
        broker.fill([bytes(1 << 19)])
    request = PopRequest(consumer_group="group", topic="topic", queue_id=0, size_max_bytes=16 << 20)
    call = broker.call(POP + "Pop", request, kind=FakeGrpcCall)
    assert len(messages_of(call)) == 6


def test_under_sync_flush_answers_wait_for_the_disk_and_the_next_plan_does_not() -> None:
    broker = FakeBroker(sync_flush=True)
    send = broker.call("/protomq.v1.SendService/Send", _send(4))
    broker.store.flush()
    broker.server.run()
    send.response()
    group = Group(broker)
    first = group.begin(record_count_max=2)
    second = group.begin(record_count_max=2)
    assert not first.answered
    assert not second.answered
    broker.store.flush()
    broker.server.run()
    assert [message.body for message in messages_of(first) + messages_of(second)] == [b"0", b"1", b"2", b"3"]


def _send(count: int) -> Any:
    from protomq.v1.send_service_pb2 import SendRequest

    records = [Record(body=b"%d" % number) for number in range(count)]
    return SendRequest(topic="topic", queue_id=0, records=records)


def test_a_restart_keeps_messages_from_others_for_at_least_as_long_as_was_told() -> None:
    for step_ms in (-3_600_000, 0, 3_600_000):  # the wall clock is another one
        broker = filled(2)
        group = Group(broker)
        (message,) = group.pop(record_count_max=1)
        broker.advance(10_000)
        group.ack(group.pop())
        again = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms + step_ms)
        group = Group(again)
        assert group.pop() == []
        again.advance(HELD_MS - 10_001)
        assert group.pop() == []
        again.advance(1)
        (second,) = group.pop()
        assert (second.body, second.attempt) == (b"0", 2)
        with pytest.raises(ServiceError, match="not held"):
            group.ack([message])


def test_what_was_open_at_a_start_is_looked_after_though_nobody_pops() -> None:
    broker = filled(2)
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    broker.store.groups.put(GroupSettings("other", retry_count_max=1))
    Group(broker).pop()
    Group(broker, "other").pop(invisible_ms=10 * MINUTE_MS)
    for _ in range(4):
        broker = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms)
        for _ in range(9):
            broker.advance(MINUTE_MS // 3)
    assert broker.store.appended_end_offset("%DLQ%group", 0) == 2
    # Of its three minutes each broker has written down two at least.
    assert len(Group(broker, "other").pop()) == 2


def test_a_start_without_open_messages_looks_after_none() -> None:
    broker = filled(2)
    group = Group(broker)
    group.ack(group.pop())
    again = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms)
    end = again.store.appended_position
    again.advance(10 * MINUTE_MS)
    assert again.store.appended_position == end
    assert not again.server.lanes["pop"].timers


def test_a_topic_that_is_deleted_takes_what_was_popped_of_it_along() -> None:
    broker = filled(2)
    group = Group(broker)
    messages = group.pop()
    call = group.begin(hold_ms=20_000)
    broker.store.delete_topic("topic")
    broker.server.run()
    assert call.error is not None
    assert call.error.reason == "TOPIC_NOT_FOUND"
    broker.fill([b"new"])
    assert group.bodies() == [b"new"]
    with pytest.raises(ServiceError, match="not held"):
        group.ack(messages)


def test_a_group_that_pops_is_listed_and_can_be_deleted() -> None:
    broker = filled(2)
    group = Group(broker)
    messages = group.pop()
    listed = broker.call(ADMIN + "ListGroups", ListGroupsRequest()).response().groups
    assert [(each.consumer_group, list(each.topics)) for each in listed] == [("group", ["topic"])]
    request = DeleteGroupRequest(consumer_group="group")
    assert broker.refusal(ADMIN + "DeleteGroup", request).reason == "GROUP_IN_USE"
    request.force = True
    broker.call(ADMIN + "DeleteGroup", request).response()
    with pytest.raises(ServiceError, match="not held"):
        group.ack(messages)
    assert group.bodies() == [b"0", b"1"]
    again = FakeBroker(disk=broker.disk.killed())
    assert again.store.popped.groups() == {"group": ["topic"]}


@pytest.mark.parametrize("topic", ["", "topic"])
def test_a_group_that_pops_is_behind_by_what_it_has_not_had_and_what_is_open(topic: str) -> None:
    broker = filled()
    group = Group(broker)

    def lag() -> tuple[int, int]:
        request = GetLagRequest(consumer_group="group", topic=topic)
        queues = broker.call(CONSUMER + "GetLag", request).response().queues
        assert {queue.committed_offset for queue in queues} == {-1}
        return sum(queue.lag for queue in queues), max(queue.delay_ms for queue in queues)

    if topic:
        assert lag()[0] == 6
    broker.advance(5)
    messages = group.pop(record_count_max=4)
    assert lag() == (6, 5)
    group.ack(messages[:3])
    assert lag() == (3, 5)
    group.ack(group.pop())
    assert lag() == (1, 5)
    group.ack(messages[3:])
    assert lag() == (0, 0)


def test_a_group_that_went_over_from_pops_to_pulls_is_behind_by_what_it_has_not_committed() -> None:
    broker = filled()
    group = Group(broker)
    group.ack(group.pop(record_count_max=2))
    offset = QueueOffset(topic="topic", queue_id=0, queue_offset=5)
    commit = CommitOffsetsRequest(consumer_group="group", offsets=[offset])
    broker.call(CONSUMER + "CommitOffsets", commit).response()
    request = GetLagRequest(consumer_group="group", topic="topic")
    assert [each.lag for each in broker.call(CONSUMER + "GetLag", request).response().queues] == [1, 0]


def shrink(broker: FakeBroker, queues: int = 2, to: int = 1) -> None:
    """By the two steps of docs/operations.md."""
    for change in ((to, queues), (to, to)):
        broker.store.topics.put([TopicConfig("topic", *change)])


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("fifo", [False, True])
def test_what_is_open_in_a_queue_that_the_topic_has_no_more_comes_again_until_it_is_done(restarts: bool, fifo: bool) -> None:
    broker = FakeBroker()
    broker.fill([b"0", b"1", b"2"], queue_id=1)
    group = Group(broker, queue_id=None, fifo=fifo)
    messages = group.pop()
    assert [message.body for message in messages] == [b"0", b"1", b"2"]
    shrink(broker)
    group.ack(messages[:1])
    if restarts:
        broker = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms)
        group = Group(broker, queue_id=None, fifo=fifo)
    assert group.pop() == []
    broker.advance(HELD_MS)
    again = group.pop()
    assert [(message.body, message.queue_id, message.attempt) for message in again] == [(b"1", 1, 2), (b"2", 1, 2)]
    group.ack(again[:1])
    group.change(again[1:], 5_000)
    held = group.begin(hold_ms=20_000)
    broker.advance(5_001)
    (last,) = messages_of(held)
    assert (last.body, last.queue_id, last.attempt) == (b"2", 1, 3)
    group.ack([last])
    broker.advance(10 * MINUTE_MS)
    assert group.pop() == []


@pytest.mark.parametrize("is_known", [False, True], ids=["a request of its own", "the same request"])
def test_a_pop_of_a_queue_that_is_gone_gets_what_is_open_there_and_then_is_told_that_it_is_gone(is_known: bool) -> None:
    broker = FakeBroker()
    broker.fill([b"0", b"1", b"2"], queue_id=1)
    group = Group(broker, queue_id=1, record_count_max=2)
    first = group.pop()
    held = group.begin(hold_ms=30_000)
    assert [message.body for message in messages_of(held)] == [b"2"]
    if not is_known:
        group = Group(broker, queue_id=1, record_count_max=3)
    shrink(broker)
    request = PopRequest(consumer_group="other", topic="topic", queue_id=1)
    assert broker.refusal(POP + "Pop", request).reason == "QUEUE_NOT_FOUND", "the group has nothing open there"
    group.ack(first[:1])
    held = group.begin(hold_ms=HELD_MS + 1_000)
    assert not held.answered, "members hold them"
    broker.advance(HELD_MS)
    again = messages_of(held)
    assert [(message.body, message.attempt) for message in again] == [(b"1", 2), (b"2", 2)]
    group.ack(again)
    request = PopRequest(consumer_group="group", topic="topic", queue_id=1)
    assert broker.refusal(POP + "Pop", request).reason == "QUEUE_NOT_FOUND"


def test_of_a_queue_that_the_topic_has_no_more_nothing_new_is_handed_out() -> None:
    broker = FakeBroker()
    broker.fill([b"0", b"1"], queue_id=1)
    group = Group(broker, queue_id=None)
    (first,) = group.pop(record_count_max=1)
    shrink(broker)
    broker.advance(HELD_MS)
    assert group.bodies() == [b"0"], "the group had it"
    assert Group(broker, "other", queue_id=None).pop() == []
    broker.store.topics.put([TopicConfig("topic", 2, 2)])
    assert group.bodies() == [b"1"]
    assert first.queue_id == 1


def test_due_messages_of_a_queue_that_is_gone_come_though_there_are_always_new_ones() -> None:
    broker = FakeBroker()
    broker.fill([b"gone"], queue_id=1)
    group = Group(broker, queue_id=None)
    assert group.bodies() == [b"gone"]
    shrink(broker)
    broker.fill([b"new"] * 10)
    broker.advance(HELD_MS)
    assert b"gone" in [body for _ in range(2) for body in group.bodies(record_count_max=1)]


def test_what_failed_too_often_in_a_queue_that_is_gone_is_a_dead_letter() -> None:
    broker = FakeBroker()
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    broker.fill([b"0"], queue_id=1)
    assert Group(broker, queue_id=None).bodies() == [b"0"]
    shrink(broker)
    broker.advance(HELD_MS + 1_000)
    assert broker.store.queue_range("%DLQ%group", 0) == (0, 1)


def test_a_plan_that_a_deletion_overtakes_is_made_anew() -> None:
    broker = filled(2)
    group = Group(broker)
    bound_request = PopRequest(consumer_group=group.name, **group.defaults)
    call = broker.server.call(POP + "Pop", bound_request)
    broker.server.lanes["pop"].run()  # planned, and on its way to the send lane
    broker.store.delete_topic("topic")
    broker.fill([b"new"])
    broker.server.run()
    assert [message.body for message in messages_of(call)] == [b"new"]


def test_what_a_start_reads_back_is_not_counted_again() -> None:
    broker = filled(4)
    Group(broker).ack(Group(broker).pop()[1:])
    state = broker.store.popped
    assert (state.handed_out_count, state.acked_count) == (4, 3)
    broker.store.flush()
    state = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms).store.popped
    assert (state.handed_out_count, state.acked_count) == (0, 0)


@pytest.mark.parametrize("restarts", [False, True])
def test_the_delay_of_a_group_is_that_of_its_first_open_message_of_which_retention_has_left_a_copy_alone(restarts: bool) -> None:
    broker = FakeBroker()
    broker.clock.time_ms += 1_000
    stored_ms = broker.clock.time_ms
    for body in (b"first", b"second"):
        broker.fill([body])
        broker.clock.time_ms += 5_000
    group = Group(broker)
    messages = group.pop()
    assert _lag(broker) == (2, broker.clock.time_ms - stored_ms)
    for segments in (3, 6):  # the copy is copied, too
        while broker.store.appended_position < segments << 20:
            broker.fill([bytes(1 << 19)], topic="other")
            broker.clock.time_ms += 1_000
        broker.store.checkpoint()
        assert broker.store.delete_segments_below((segments - 1) << 20)
        assert broker.store.queue_range("topic", 0) == (2, 2)
        assert _lag(broker) == (2, broker.clock.time_ms - stored_ms)
    broker.fill([b"new"])
    if restarts:
        disk = broker.disk.killed()
        disk.remove("/s/config/popState.json")
        broker = FakeBroker(disk=disk, clock_ms=broker.clock.time_ms)
        group = Group(broker)
    broker.clock.time_ms += 1_000
    assert _lag(broker) == (3, broker.clock.time_ms - stored_ms)
    group.ack(messages[:1])
    assert _lag(broker) == (2, broker.clock.time_ms - stored_ms - 5_000)
    group.ack(messages[1:])
    assert _lag(broker) == (1, 1_000)


def _lag(broker: FakeBroker) -> tuple[int, int]:
    """Lag and delay of the group `group` in queue 0 of `topic`."""
    call = broker.call(CONSUMER + "GetLag", GetLagRequest(consumer_group="group", topic="topic"))
    queue = GetLagResponse.FromString(call.answer_payload or b"").queues[0]
    return queue.lag, queue.delay_ms


def test_what_is_not_done_outlives_its_segment_with_the_same_receipt() -> None:
    broker = FakeBroker()
    broker.fill([bytes([number]) * 1_000 for number in range(10)])
    group = Group(broker)
    messages = group.pop()
    group.ack(messages[3:])
    segments = 3
    while broker.store.appended_position < segments << 20:
        broker.fill([bytes(1 << 19)], topic="other")
    for _ in range(2):
        broker.store.checkpoint()
        cut = broker.store.delete_segments_below((segments - 1) << 20)
        assert cut == (segments - 1) << 20
        group.ack(messages[2:3]) if segments == 3 else None
        segments += 2
        while broker.store.appended_position < segments << 20:
            broker.fill([bytes(1 << 19)], topic="other")
    kept = broker.store.topics.find("%RETRY%group")
    assert kept is not None
    assert not kept.writable
    disk = broker.disk.killed()
    disk.remove("/s/config/popState.json")
    again = FakeBroker(disk=disk, clock_ms=broker.clock.time_ms)
    for each in (broker, again):
        group = Group(each)
        assert group.pop() == []
        group.ack(messages[:1])
        each.advance(2 * MINUTE_MS)
        (late,) = group.pop()
        assert (late.body, late.offset, late.attempt) == (messages[1].body, 1, 2)
        group.ack([late])
        each.advance(2 * MINUTE_MS)
        assert group.pop() == []


def test_a_pop_of_one_topic_never_gets_what_comes_again_of_another() -> None:
    broker = FakeBroker()
    for topic in ("topic", "other"):
        broker.fill([topic.encode()] * 3, topic=topic)
    groups = {topic: Group(broker, topic=topic) for topic in ("topic", "other")}
    for group in groups.values():
        assert len(group.pop()) == 3
    for attempt in (2, 3):  # in place; then from the copies, which stand in one retry topic
        broker.advance(HELD_MS)
        for topic, group in groups.items():
            found = [(message.body, message.offset, message.attempt) for message in group.pop()]
            assert found == [(topic.encode(), offset, attempt) for offset in range(3)]
        if attempt == 2:
            while broker.store.appended_position < 3 << 20:
                broker.fill([bytes(1 << 19)], topic="third")
            broker.store.checkpoint()
            broker.store.delete_segments_below(2 << 20)
            assert broker.store.queue_range("%RETRY%group", 0) == (0, 6)


def _retained(broker: FakeBroker, segments: int) -> None:
    """The log has so many segments and more, and retention leaves the last one."""
    while broker.store.appended_position < segments << 20:
        broker.fill([bytes(1 << 19)], topic="third")
    broker.store.checkpoint()
    assert broker.store.delete_segments_below((segments - 1) << 20)


@pytest.mark.parametrize("restarts", [False, True])
def test_who_deletes_the_retries_of_a_group_deletes_what_retention_kept_for_its_members_there(restarts: bool) -> None:
    broker = FakeBroker()
    broker.fill([b"kept"] * 3)
    gone = Group(broker).pop()
    _retained(broker, 3)
    broker.call(ADMIN + "DeleteTopic", DeleteTopicRequest(topic="%RETRY%group")).response()
    broker.fill([b"other"] * 4, topic="other")
    assert len(Group(broker, topic="other").pop()) == 4
    _retained(broker, 6)
    assert broker.store.queue_range("%RETRY%group", 0) == (0, 4), "its offsets mean other messages now"
    if restarts:
        disk = broker.disk.killed()
        disk.remove("/s/config/popState.json")
        broker = FakeBroker(disk=disk, clock_ms=broker.clock.time_ms)
    group = Group(broker)
    with pytest.raises(ServiceError, match="not held"):
        group.ack(gone)
    broker.advance(2 * MINUTE_MS)
    assert group.pop() == []
    assert group.bodies(topic="other") == [b"other"] * 4


@pytest.mark.parametrize("fields", [{}, {"fifo": True}, {"tags": ["tag"]}], ids=["all", "fifo", "tags"])
def test_a_group_that_pops_its_own_retries_gets_none_of_them_again_for_what_retention_keeps(fields: dict[str, Any]) -> None:
    broker = FakeBroker()
    broker.fill([b"0", b"1", b"2"], tag="tag")
    back = SendBackRequest(consumer_group="group")
    for offset in (0, 1):
        back.messages.add(topic="topic", queue_id=0, queue_offset=offset, delay_ms=0)
    broker.call(GROUP + "SendBack", back).response()
    group = Group(broker, topic="%RETRY%group", invisible_ms=60 * MINUTE_MS, **fields)
    messages = group.pop()
    of_topic = Group(broker).pop(invisible_ms=60 * MINUTE_MS)
    assert ([message.body for message in messages], len(of_topic)) == ([b"0", b"1"], 3)
    for passes in range(1, 4):
        _retained(broker, 3 * passes)
        assert broker.store.queue_range("%RETRY%group", 0) == (5 * passes - 3, 5 * passes + 2)
        assert group.pop() == []
    group.ack(messages[:1], topic="%RETRY%group")
    Group(broker).ack(of_topic)
    broker.advance(61 * MINUTE_MS)
    assert [(message.body, message.offset, message.attempt) for message in group.pop()] == [(b"1", 1, 2)]
    assert Group(broker).pop() == []


def filled_one_by_one(count: int) -> FakeBroker:
    """Each message is an append of its own, so that each can be damaged alone."""
    broker = FakeBroker()
    for number in range(count):
        broker.fill([b"%d" % number], tag="tag")
    broker.store.flush()
    return broker


def damage(broker: FakeBroker, *offsets: int) -> None:
    """These messages of queue 0 are found damaged."""
    for offset in offsets:
        (region,) = broker.store.read("topic", 0, offset, 1, 1).regions
        start = region.file.base_position + region.offset
        found = DamagedRange(start, start + region.size_bytes, 0, "a flipped bit")
        broker.store._quarantine.add(found)


def repair(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `protomq log repair` had been run."""
    monkeypatch.setattr(broker.store._quarantine, "is_repaired", lambda _: True)


def bodies_past_errors(group: Group, times: int, **fields: Any) -> list[bytes]:
    """What so many pops give, and whether they are refused or not."""
    found: list[bytes] = []
    for _ in range(times):
        call = group.begin(**fields)
        if call.error is None:
            found += [message.body for message in messages_of(call)]
        else:
            assert told(call.error)[1] == "CORRUPT_LOG"
    return found


def test_damage_holds_up_no_message_that_was_handed_out_before() -> None:
    broker = filled_one_by_one(6)
    group = Group(broker)
    assert len(group.pop()) == 6
    damage(broker, 0, 1, 3)
    broker.advance(HELD_MS)
    # One a pop: damaged ones do not take the place of the others for long.
    assert bodies_past_errors(group, 6, record_count_max=1) == [b"2", b"4", b"5"]


def test_a_damaged_message_that_waited_holds_up_no_other_sharding_key() -> None:
    broker = FakeBroker()
    for number, name in enumerate("kkzz"):
        broker.fill([b"%d" % number], attributes=Attributes(sharding_key=name))
    broker.store.flush()
    group = Group(broker, fifo=True, record_count_max=1)
    first = group.pop() + group.pop() + group.pop()
    assert [message.body for message in first] == [b"0", b"2"]
    group.ack(first)
    damage(broker, 1)
    assert bodies_past_errors(group, 2) == [b"3"]


def test_damage_elsewhere_makes_no_pop_look_at_more_due_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = filled_one_by_one(4)
    group = Group(broker)
    assert len(group.pop()) == 4
    damage(broker, 3)
    broker.clock.time_ms += HELD_MS
    assert broker.store.damaged_ranges
    counts: list[int] = []
    due = pop_planner._due

    def spied(known: Any, now_ms: int, count_max: int, **order: Any) -> Any:
        counts.append(count_max)
        return due(known, now_ms, count_max, **order)

    monkeypatch.setattr(pop_planner, "_due", spied)
    assert group.bodies(record_count_max=1) == [b"0"]
    assert counts == [1]


def test_damage_that_is_repaired_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = filled_one_by_one(6)
    group = Group(broker)
    group.pop(record_count_max=2)
    damage(broker, 1, 3)
    assert bodies_past_errors(group, 3) == [b"2"]  # a replica may heal it
    repair(broker, monkeypatch)
    assert bodies_past_errors(group, 3) == [b"4", b"5"]
    assert "gives up messages 3 to 3 of queue 0 of topic topic" in caplog.text
    broker.advance(HELD_MS)
    late = group.pop()
    assert sorted(message.body for message in late) == [b"0", b"2", b"4", b"5"]
    group.ack(late)
    broker.advance(2 * MINUTE_MS)
    assert bodies_past_errors(group, 2) == []
    assert broker.store.popped.lost_count == 2


@pytest.mark.parametrize("fields", [{"fifo": True}, {"fifo": True, "tags": ["tag"]}])
def test_pops_that_open_records_get_past_repaired_damage(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    broker = filled_one_by_one(4)
    group = Group(broker)
    damage(broker, 1)
    assert bodies_past_errors(group, 3, **fields) == [b"0"]
    repair(broker, monkeypatch)
    assert bodies_past_errors(group, 3, **fields) == [b"2", b"3"]


def test_dead_letters_that_are_damaged_do_not_keep_others_from_their_end() -> None:
    broker = filled_one_by_one(3)
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    group = Group(broker)
    assert len(group.pop()) == 3
    damage(broker, 0)
    broker.advance(HELD_MS)
    bodies_past_errors(group, 2, record_count_max=1)
    broker.advance(1_000)
    assert broker.store.popped.dead_count == 2


class BrokenFilter:
    """As a module of a user that traps at a message."""

    tags: frozenset[bytes] = frozenset()
    records_min = records_max = 3

    def __init__(self, poison: bytes) -> None:
        self._poison = poison

    def matching(self, data: bytes, starts: Any, sizes: Any) -> Matches:
        for index, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            if RecordBatch.FromString(data[start : start + size]).records[0].body == self._poison:
                if index:
                    return Matches(list(range(index)), index)
                raise FilterFailedError("the module failed")
        return Matches(list(range(len(starts))), len(starts))


BY_MODULE: Final[dict[str, Any]] = {"filter_type": FilterType.FILTER_TYPE_MODULE, "filter": "broken"}


@pytest.mark.parametrize("look_count", [1, 3, 4, 512])
@pytest.mark.parametrize("fifo", [False, True])
def test_what_stands_before_a_message_of_which_the_filter_fails_is_handed_out(
    fifo: bool, look_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pop_service, "compile_filter", lambda key, module: BrokenFilter(b"4"))
    monkeypatch.setattr(pop_reading, "SCAN_COUNT", look_count)
    broker = filled(6)
    group = Group(broker, fifo=fifo)
    found = compiled(broker, group, **BY_MODULE)
    assert [message.body for message in found] == [b"0", b"1", b"2", b"3"]
    error = group.begin(**BY_MODULE).error
    assert error is not None
    assert error.reason == "ILLEGAL_FILTER"
    assert error.message == "WebAssembly filter, at message 4 of queue 0 of topic topic: the module failed"
    assert [error.metadata[key] for key in ("topic", "queue_id", "queue_offset")] == ["topic", "0", "4"]
    assert broker.pop.failed_filter_count == 1
    group.ack(found)
    assert group.bodies() == [b"4", b"5"], "nobody has skipped it"


@pytest.mark.parametrize("poison", [b"1", b"3", b"4", b"5"])
def test_due_messages_before_one_of_which_the_filter_fails_are_handed_out(poison: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before b"4" are due; it and b"5" are new."""
    monkeypatch.setattr(pop_service, "compile_filter", lambda key, module: BrokenFilter(poison))
    broker = filled(6)
    group = Group(broker)
    assert len(group.pop(record_count_max=4)) == 4
    broker.clock.time_ms += HELD_MS
    found = compiled(broker, group, **BY_MODULE)
    assert [message.body for message in found] == [b"%d" % number for number in range(int(poison))]
    error = group.begin(**BY_MODULE).error
    assert error is not None
    assert error.reason == "ILLEGAL_FILTER"
    assert group.bodies() == [b"%d" % number for number in range(int(poison), 6)], "nobody has skipped it"


def test_a_message_dies_once_though_the_filter_of_the_pop_that_buries_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pop_service, "compile_filter", lambda key, module: BrokenFilter(b"1"))
    broker = filled(2)
    broker.fill([b"1"], topic="other")
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    group = Group(broker)
    group.pop(record_count_max=1)
    broker.clock.time_ms += HELD_MS
    warm = Group(broker, "other").begin(**BY_MODULE, topic="other")
    while not warm.answered:  # the filter is compiled on a thread of its own
        broker.server.run()
    requests = [PopRequest(consumer_group="group", topic="topic", queue_id=0, **fields) for fields in (BY_MODULE, {})]
    broken, sound = broker.server.call_together(POP + "Pop", requests)  # in one plan
    broker.server.run()
    assert broken.error is not None
    assert broken.error.reason == "ILLEGAL_FILTER"
    assert [message.body for message in messages_of(sound)] == [b"1"]
    assert broker.store.queue_range("%DLQ%group", 0) == (0, 1)


def test_a_pop_that_finds_only_dead_messages_is_told_that_they_cannot_be_moved() -> None:
    broker = filled(1)
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    group = Group(broker)
    group.pop()
    broker.clock.time_ms += HELD_MS
    full = mock.Mock(side_effect=DiskFullError("full"))
    with mock.patch.object(SystemWriter, "append_moved", full):
        call = group.begin(hold_ms=20_000)
    assert call.error is not None
    assert call.error.reason == "DISK_FULL"
    assert full.call_count == 1
    assert group.pop() == []
    assert broker.store.queue_range("%DLQ%group", 0) == (0, 1)


def test_a_pop_is_answered_though_the_dead_messages_of_others_cannot_be_moved(caplog: pytest.LogCaptureFixture) -> None:
    broker = filled(1)
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    Group(broker).pop()
    broker.clock.time_ms += HELD_MS
    with mock.patch.object(pop_planner, "move_records", side_effect=OSError(5, "the disk cannot read it")):
        broker.pop.pipeline._sweep()  # due in the turn in which the pop comes
        assert Group(broker, "other").bodies() == [b"0"]
        broker.advance(5_000)
    (line,) = [line for line in caplog.messages if "dead letters" in line]
    assert "cannot be moved" in line
    broker.advance(1_000)
    assert broker.store.queue_range("%DLQ%group", 0) == (0, 1)


def _promoted(broker: FakeBroker) -> FakeBroker:
    """A broker with the same log, of which it does not know yet that anything is confirmed."""
    broker.store.flush()
    with mock.patch.object(Store, "open", partial(Store.open, waits_for_replicas=True)):
        promoted = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms)
    assert promoted.store.readable_position == 0
    return promoted


@pytest.mark.parametrize("kind", ["due", "waiting", "dead", "kept"])
def test_after_a_fail_over_what_is_not_known_to_be_confirmed_is_not_given_up(kind: str) -> None:
    broker = FakeBroker()
    if kind == "dead":
        broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    broker.fill([b"0", b"1"], attributes=Attributes(sharding_key="k"))
    group = Group(broker, fifo=kind == "waiting")
    first = group.pop()
    if kind == "waiting":
        group.ack(first)
    elif kind == "kept":
        _retained(broker, 3)
    broker = _promoted(broker)
    group = Group(broker, fifo=kind == "waiting")
    broker.clock.time_ms += HELD_MS
    assert group.pop() == []
    broker.advance(5_000)
    assert (broker.store.popped.lost_count, broker.store.popped.dead_count) == (0, 0)
    broker.store.positions.wait_for_replicas(False)
    expected = {"due": [b"0", b"1"], "waiting": [b"1"], "dead": [], "kept": [b"0", b"1"]}
    assert group.bodies() == expected[kind]
    broker.advance(5_000)
    assert broker.store.queue_range("%DLQ%group", 0) == ((0, 2) if kind == "dead" else (0, 0))


@pytest.mark.parametrize("fields", [{}, {"start": PopStart.POP_START_END}], ids=["committed", "end"])
def test_a_group_that_begins_right_after_a_fail_over_gets_nothing_from_before_where_it_begins(fields: dict[str, Any]) -> None:
    broker = filled(5)
    if not fields:
        request = CommitOffsetsRequest(consumer_group="group")
        request.offsets.add(topic="topic", queue_id=0, queue_offset=4)
        broker.call(CONSUMER + "CommitOffsets", request).response()
    broker = _promoted(broker)
    call = Group(broker).begin(**fields)
    broker.store.positions.wait_for_replicas(False)
    broker.advance(1_000)
    assert messages_of(call) == []
    broker.fill([b"5"])
    assert Group(broker).bodies(**fields) == ([b"4", b"5"] if not fields else [b"5"])


def test_who_waits_after_a_fail_over_is_woken_by_what_turns_out_to_be_confirmed() -> None:
    broker = _promoted(filled(2))
    pop = Group(broker).begin(hold_ms=20_000)
    pull = broker.call(PULL, PullRequest(consumer_group="other", topic="topic", queue_id=0, hold_ms=20_000))
    assert (pop.answered, pull.answered) == (False, False)
    broker.store.positions.wait_for_replicas(False)
    broker.server.run()
    assert (pop.answered, pull.answered) == (True, True)
    assert [message.body for message in messages_of(pop)] == [b"0", b"1"]


def test_who_waits_is_woken_when_the_copies_that_retention_has_made_may_be_read() -> None:
    broker = FakeBroker(sync_flush=True)
    broker.call(SEND, SendRequest(topic="topic", queue_id=0, records=[Record(body=b"kept")]))
    broker.store.flush()
    begun = Group(broker).begin()
    broker.store.flush()
    broker.server.run()
    assert [message.body for message in messages_of(begun)] == [b"kept"]
    broker.store._carried._pop_carrier.move_below(broker.store.appended_position, lambda: None)
    broker.clock.time_ms += HELD_MS - 1_000
    pop, other = Group(broker).begin(hold_ms=20_000), Group(broker, "other").begin(hold_ms=20_000, start=PopStart.POP_START_END)
    broker.advance(1_000)
    assert (broker.store.queue_range("%RETRY%group", 0), pop.answered) == ((0, 0), False), "due, and not to be read yet"
    for _ in range(2):  # the copy, and then the record of the pop
        broker.store.flush()
        broker.server.run()
    assert [(message.body, message.attempt) for message in messages_of(pop)] == [(b"kept", 2)]
    assert not other.answered


def flip(broker: FakeBroker, offset: int) -> None:
    """A bit flips in a message of queue 0, and nobody knows."""
    (region,) = broker.store.read("topic", 0, offset, 1, 1).regions
    flip_in_log(broker.disk, broker.store, region.file.base_position + region.offset)


def copies_in(broker: FakeBroker, topic: str) -> list[bytes]:
    return [body for _, body in read_all(broker.store, topic)]


def test_a_message_in_which_a_bit_flips_becomes_no_dead_letter_and_holds_up_no_other() -> None:
    broker = filled_one_by_one(4)
    broker.store.groups.put(GroupSettings("group", retry_count_max=0))
    group = Group(broker)
    assert len(group.pop()) == 4
    flip(broker, 1)
    broker.advance(HELD_MS)
    bodies_past_errors(group, 2)
    broker.advance(1_000)
    assert copies_in(broker, "%DLQ%group") == [b"0", b"2", b"3"]
    assert broker.store.popped.dead_count == 3
    assert len(broker.store.damaged_ranges) == 1


def test_retention_keeps_no_popped_message_with_a_flipped_bit(caplog: pytest.LogCaptureFixture) -> None:
    broker = filled_one_by_one(3)
    assert len(Group(broker).pop()) == 3
    flip(broker, 1)
    with pytest.raises(StoreError, match="they stay until the next try"):
        _retained(broker, 3)
    assert copies_in(broker, "%RETRY%group") == []
    _retained(broker, 3)
    assert copies_in(broker, "%RETRY%group") == [b"0", b"2"]
    assert "1 messages of queue 0 of topic that group has popped are damaged" in caplog.text


def test_arrivals_that_two_threads_tell_at_once_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that falls back could be one that a pop has seen already: then it would be held beside messages for it."""
    broker = FakeBroker()
    broker.call(POP + "Pop", PopRequest(consumer_group="group", topic="topic", hold_ms=60_000))
    pop, told_count = broker.pop, 20_000
    monkeypatch.setattr(pop, "_wake", lambda topic, group: None)
    before = pop._arrivals["topic"]

    def tell(once: Callable[[], None]) -> None:
        for _ in range(told_count):
            once()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as executor:
            stored = executor.submit(tell, partial(pop.signal, [("topic", 0)]))
            freed = executor.submit(tell, partial(pop._signal_freed, "group", "topic"))
            stored.result()
            freed.result()
    finally:
        sys.setswitchinterval(interval_s)
    assert pop._arrivals["topic"] - before == 2 * told_count
