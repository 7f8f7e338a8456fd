"""Transactions of a store: half messages nobody gets, ended once, asked about in time; whatever ends the process or the power."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest

from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import (
    RecallMessageRequest,
    RecallMessageResponse,
    SendRequest,
    SendResponse,
)
from protomq.v1.transaction_service_pb2 import (
    EndTransactionRequest,
    EndTransactionResponse,
    TransactionEnd,
    WaitForChecksRequest,
)
from protomq.wire import record as layout
from protomq.wire.hashing import key_hash_of
from protomq.wire.recall_handle import RecallHandle, encode_handle
from protomq.wire.topics import EXPIRED_TOPIC
from protomq_broker import transaction_checks, transaction_endings, transaction_service
from protomq_broker.config import BrokerConfig
from protomq_broker.half_sends import HalfSends
from protomq_broker.replication import changing_hands
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import DiskFullError, StoreError
from protomq_broker.store.files.disk import read_fully, write_fully
from protomq_broker.store.state import fresh_halves
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.state.transactions import Ending
from protomq_broker.store.tools.repair import repair
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from protomq_runtime.errors import ServiceError
from tests.support import transaction_world
from tests.support.transaction_world import (
    COMMIT,
    PRODUCER,
    ROLL_BACK,
    SEGMENT,
    Call,
    World,
    checks_of,
)
from tests.unit.protomq_broker.store.store_helpers import flip_in_log


@pytest.fixture
def world() -> World:
    return World().start()


def refusal(call: Callable[[], Any]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value


# What nobody gets, and what everybody gets.


def test_a_half_message_is_nowhere_before_it_is_committed(world: World) -> None:
    record = world.record(b"paid", keys=["k1", "k2"], tag="t", properties={"a": "b"})
    sent = world.request(SendRequest(topic="topic", queue_id=3, records=[record], half=True))
    assert (sent.queue_id, sent.queue_offset, sent.recall_handle) == (3, -1, "")
    identity = (PRODUCER, 0, record.sequence)

    def found() -> list[bytes]:
        store = world.store
        hits = [
            *store.find_by_message_id("topic", identity),
            *store.find_by_key_hash("topic", key_hash_of("k1")),
            *store.find_by_key_hash("topic", key_hash_of("k2")),
        ]
        return [Record.FromString(hit).body for hit in hits] + world.delivered(queue_id=3)

    assert found() == []
    (result,) = world.end((sent.transaction_handles[0], COMMIT))
    assert (result.error_reason, result.repeated_decision) == ("", False)
    assert result.message_id == layout.encode_message_id(*identity)
    assert found() == [b"paid"] * 4
    (hit,) = world.store.find_by_message_id("topic", identity)
    copy = Record.FromString(hit)
    assert (list(copy.keys), copy.tag, dict(copy.properties)) == (["k1", "k2"], "t", {"a": "b"})
    assert copy.flags == layout.FLAG_KIND_COPY | layout.FLAG_TRANSIT | layout.FLAG_MANY_KEYS | layout.FLAG_COMMITTED
    assert (copy.queue_id, copy.queue_offset, copy.HasField("crc32c")) == (3, 0, True)


def test_the_largest_half_message_that_is_taken_is_committed_with_others_or_expires(world: World) -> None:
    """Segments are small here: its copy has to fit into one, too."""
    taken, refused = 1_000, SEGMENT
    handles: list[str] = []
    while refused - taken > 1:
        size = (taken + refused) // 2
        try:
            handles.append(world.half(bytes(size)))
            taken = size
        except ServiceError:
            refused = size
    assert refusal(lambda: world.half(bytes(refused))).reason == "MESSAGE_TOO_LARGE"
    small = [world.half(bytes(2_000)) for _ in range(7)]
    others, largest = handles[:-1], handles[-1]
    assert {end.error_reason for end in world.end(*((handle, COMMIT) for handle in (*small, largest)))} == {""}
    assert sorted(map(len, world.delivered())) == [2_000] * 7 + [taken]
    for _ in range(40):
        world.turns(30_000)
    assert not world.open()
    assert len(world.delivered(EXPIRED_TOPIC)) == len(others)


def test_what_is_rolled_back_is_nowhere(world: World) -> None:
    handle = world.half()
    world.end((handle, ROLL_BACK))
    world.turns(10**7)
    assert world.delivered() == []
    assert world.open() == []
    assert world.store.transactions.counts[Ending.ROLLED_BACK] == 1


def test_messages_of_one_request_end_each_by_itself(world: World) -> None:
    records = [world.record(b"%d" % number) for number in range(5)]
    sent = world.request(SendRequest(topic="topic", queue_id=0, records=records, half=True))
    handles = sent.transaction_handles
    assert len(set(handles)) == 5
    results = world.end(
        (handles[4], COMMIT), (handles[1], ROLL_BACK), (handles[0], COMMIT), ("x", COMMIT)
    )
    assert [result.error_reason for result in results] == ["", "", "", "INVALID_ARGUMENT"]
    assert sorted(world.delivered()) == [b"0", b"4"]
    assert len(world.open()) == 2


def test_many_queues_and_topics_are_committed_with_one_append(world: World) -> None:
    handles = [
        world.half(b"%d" % number, queue_id=number % 3, topic=f"topic{number % 2}")
        for number in range(12)
    ]
    appends: list[int] = []
    world.store.positions.on_arrival.append(lambda keys: appends.append(len(keys)))
    world.end(*((handle, COMMIT) for handle in reversed(handles)))
    assert len(appends) == 1
    for topic in range(2):
        for queue_id in range(3):
            expected = {b"%d" % n for n in range(12) if n % 2 == topic and n % 3 == queue_id}
            assert set(world.delivered(f"topic{topic}", queue_id)) == expected


def test_a_delay_goes_on_while_the_message_waits_for_its_commit(world: World) -> None:
    late, early = world.half(b"late", delay_ms=5_000), world.half(b"early", delay_ms=1_000)
    world.clock.time_ms += 2_000
    world.end((late, COMMIT), (early, COMMIT))
    assert world.delivered() == [b"early"]
    world.clock.time_ms += 3_000
    world.mover.deliver()
    assert world.delivered() == [b"early"]
    world.clock.time_ms += 1
    world.mover.deliver()
    assert world.delivered() == [b"early", b"late"]


@pytest.mark.parametrize("event", ["", "restart", "kill", "carried forward"])
def test_nothing_takes_a_committed_delayed_message_back(world: World, event: str) -> None:
    """Not even a handle that is made by hand: a handle says nothing that its sender does not know."""
    handle = world.half(b"paid", delay_ms=5_000)
    position = world.store.transactions.open_transactions()[0].half.position
    octets = world.store.record_at(position)
    assert octets is not None
    half = Record.FromString(octets)
    identity = (half.producer_id, half.producer_epoch, half.sequence)
    positions = [0, position]

    def recalled() -> list[RecallMessageResponse]:
        handles = [RecallHandle(world.sends._recalls._broker_name, at, half.due_time_ms, identity) for at in positions]
        requests = [RecallMessageRequest(topic="topic", recall_handle=encode_handle(each)) for each in handles]
        return [RecallMessageResponse.FromString(world.call(world.sends.recall_message, each, drained=False).result()) for each in requests]

    nothing = RecallMessageResponse(message_id=layout.encode_message_id(*identity))
    assert recalled() == [nothing] * 2, "it is open"
    world.end((handle, COMMIT))
    if event == "carried forward":
        for _ in range(60):
            world.half(bytes(5_000))
        world.store.checkpoint()
        assert world.store.delete_segments_below(world.store.appended_position) > position
    elif event:
        world.restart(world.disk.killed() if event == "kill" else None)
    (row,) = world.store.pending.at_due(half.due_time_ms, 10, 0)
    positions.append(int(row["position"]))
    assert recalled() == [nothing] * 3
    world.clock.time_ms += 5_001
    world.mover.deliver()
    assert world.delivered() == [b"paid"]
    assert recalled() == [nothing] * 3


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("write_queues", "read_queues"), [(4, 8), (4, 4)])
def test_what_is_committed_goes_to_queues_that_the_topic_still_has(
    world: World, write_queues: int, read_queues: int, restarts: bool
) -> None:
    """A topic that shrinks in two steps: at either, what waited for a queue that goes can be read. A delay of it goes on."""
    topics = world.store.topics
    topics.put([TopicConfig("topic", 8, 8)])
    handles = [world.half(b"%d" % queue_id, queue_id=queue_id) for queue_id in range(8)]
    delayed = world.half(b"delayed", queue_id=7, delay_ms=5_000)
    for change in ((4, 8), (write_queues, read_queues)):
        topics.put([TopicConfig("topic", *change)])
    if restarts:
        world.restart()  # so they are read back from the log
    world.end(*((handle, COMMIT) for handle in [*handles, delayed]))
    assert [sorted(world.delivered("topic", queue_id)) for queue_id in range(8)] == [
        [b"0", b"4"], [b"1", b"5"], [b"2", b"6"], [b"3", b"7"], [], [], [], [],
    ]  # fmt: skip
    world.restart(world.disk.killed())
    world.clock.time_ms += 5_001
    world.mover.deliver()
    assert world.delivered("topic", 3)[-1:] == [b"delayed"]
    assert [result.repeated_decision for result in world.end((handles[7], COMMIT), (delayed, COMMIT))] == [True, True]


# Decisions.


@pytest.mark.parametrize(("first", "other"), [(COMMIT, ROLL_BACK), (ROLL_BACK, COMMIT)])
@pytest.mark.parametrize("restarts", [False, True])
def test_the_first_decision_counts(
    world: World, first: Any, other: Any, restarts: bool
) -> None:
    handle = world.half()
    world.end((handle, first))
    if restarts:
        world.restart()
    (again,) = world.end((handle, first))
    assert again.repeated_decision
    error = refusal(lambda: world.end((handle, other)))
    assert (error.reason, error.metadata["definite"]) == ("TRANSACTION_ENDED", "true")
    assert error.metadata["ending"] == ("committed" if first == COMMIT else "rolled back")
    assert world.delivered() == [b"half"] * (first == COMMIT)


def test_decisions_of_one_request_on_one_transaction_are_as_if_they_came_one_after_another(
    world: World,
) -> None:
    handle = world.half()
    first, other, again = world.end((handle, COMMIT), (handle, ROLL_BACK), (handle, COMMIT))
    assert (first.error_reason, first.repeated_decision) == ("", False)
    assert other.error_reason == "TRANSACTION_ENDED"
    assert (again.error_reason, again.repeated_decision) == ("", True)
    assert world.delivered() == [b"half"]


def test_decisions_on_large_messages_let_others_in_between(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request may commit all that is open, which are gigabytes."""
    monkeypatch.setattr(transaction_endings, "TURN_SIZE_MAX_BYTES", 10_000)
    turns: list[Callable[[], None]] = []
    monkeypatch.setattr(world.lane, "post", turns.append)
    handles = [world.half(b"%02d" % number + bytes(3_000)) for number in range(20)]
    dropped = world.half(b"dropped")
    ends = [*((handle, COMMIT) for handle in handles), (dropped, ROLL_BACK), (handles[0], COMMIT), (handles[0], ROLL_BACK)]
    request = EndTransactionRequest(ends=[TransactionEnd(transaction_handle=handle, decision=what) for handle, what in ends])
    large = world.call(world.service.end_transaction, request)
    small = world.call(world.service.end_transaction, EndTransactionRequest(ends=request.ends[-1:]))
    left = [len(world.open())]
    for turn in turns:
        assert not large.answered
        turn()
        left.append(len(world.open()))
    assert left == [18, 15, 12, 9, 6, 3, 0]
    assert [error.reason for error in [refusal(small.result)]] == ["TRANSACTION_ENDED"]
    results = EndTransactionResponse.FromString(large.result()).results
    assert [result.error_reason for result in results] == [""] * 22 + ["TRANSACTION_ENDED"]
    assert [result.repeated_decision for result in results] == [False] * 21 + [True, False]
    assert [body[:2] for body in world.delivered()] == [b"%02d" % number for number in range(20)]


def test_a_request_is_refused_as_a_whole_where_the_lead_goes_between_its_turns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SDK tells all of it to the next leader then. It would not try again what is refused within an answer."""
    monkeypatch.setattr(transaction_endings, "TURN_SIZE_MAX_BYTES", 10_000)
    turns: list[Callable[[], None]] = []
    monkeypatch.setattr(world.lane, "post", turns.append)
    handles = [world.half(bytes(3_000)) for _ in range(6)]
    ends = [TransactionEnd(transaction_handle=handle, decision=COMMIT) for handle in handles]
    before, call = (Call(EndTransactionRequest(ends=some), world.lane) for some in (ends[:1], ends[1:]))
    world.service.end_transaction([before, call])  # type: ignore[list-item]
    world.sends.shortage = changing_hands("b")
    for turn in turns:
        turn()
    assert before.result()
    assert refusal(call.result).reason == "NOT_MASTER"
    assert len(world.open()) == 3
    world.sends.shortage = None
    turns.clear()
    again = world.call(world.service.end_transaction, EndTransactionRequest(ends=ends[1:]))
    for turn in turns:
        turn()
    results = EndTransactionResponse.FromString(again.result()).results
    assert [(result.error_reason, result.repeated_decision) for result in results] == [("", True)] * 2 + [("", False)] * 3


def test_what_cannot_be_ended_in_a_later_turn_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_endings, "TURN_SIZE_MAX_BYTES", 10_000)
    turns: list[Callable[[], None]] = []
    monkeypatch.setattr(world.lane, "post", turns.append)
    handles = [world.half(bytes(3_000)) for _ in range(6)]
    request = EndTransactionRequest(ends=[TransactionEnd(transaction_handle=handle, decision=COMMIT) for handle in handles])
    call = world.call(world.service.end_transaction, request)
    monkeypatch.setattr(world.store, "append_moved", Mock(side_effect=DiskFullError))
    for turn in turns:
        turn()
    results = EndTransactionResponse.FromString(call.result()).results
    assert [result.error_reason for result in results] == [""] * 3 + ["DISK_FULL"] * 3
    assert len(world.open()) == 3


def test_what_is_not_known_is_said_so(world: World) -> None:
    handle = world.half()
    elsewhere = World(disk=SimDisk()).start()
    error = refusal(lambda: elsewhere.end((handle, COMMIT)))
    assert error.reason == "TRANSACTION_NOT_FOUND"
    assert error.metadata["message_id"] == layout.encode_message_id(PRODUCER, 0, 1)
    assert refusal(lambda: world.end(("", COMMIT))).reason == "INVALID_ARGUMENT"
    assert refusal(lambda: world.end((handle[:-4] + "AAAA", COMMIT))).reason == "INVALID_ARGUMENT"
    assert refusal(lambda: world.end((handle, 0))).reason == "INVALID_ARGUMENT"
    assert refusal(world.end).reason == "INVALID_ARGUMENT"
    beyond = world.checks._handles.encode(10**9, world.store.transactions.open_transactions()[0].half.key)
    assert refusal(lambda: world.end((beyond, COMMIT))).reason == "TRANSACTION_NOT_FOUND"
    assert world.delivered() == []
    assert len(world.open()) == 1


@pytest.mark.parametrize(
    "fields", [{"message_id": "xyz"}, {"topic": "a b"}, {"producer_group": "%"}, {"count_max": -1}, {"position": -1}]
)  # fmt: skip
def test_a_mistyped_wish_does_not_read_as_an_empty_list(world: World, fields: dict[str, Any]) -> None:
    world.half()
    error = refusal(lambda: world.listed(**fields))
    assert error.reason == "INVALID_ARGUMENT"
    assert [field for field, _ in error.field_violations] == list(fields)


def test_a_broker_that_may_not_write_ends_nothing() -> None:
    world = World().start()
    handle = world.half()
    world.permit._refusal = ServiceError(14, "SHUTTING_DOWN", "it stops")
    assert refusal(lambda: world.end((handle, COMMIT))).reason == "SHUTTING_DOWN"
    assert refusal(lambda: checks_of(world.wait())).reason == "SHUTTING_DOWN"


def test_an_answer_waits_for_what_an_answer_to_a_send_waits_for() -> None:
    world = World(sync_flush=True).start()
    handle = world.half()
    calls = []
    for _ in range(2):
        request = EndTransactionRequest(
            ends=[TransactionEnd(transaction_handle=handle, decision=COMMIT)]
        )
        calls.append(Call(request, world.lane))
        world.service.end_transaction([calls[-1]])  # type: ignore[list-item]
    assert [call.answered for call in calls] == [False, False]
    world.store.flush()
    world.waiting.resolve()
    repeated = [EndTransactionResponse.FromString(call.result()).results[0] for call in calls]
    assert [each.repeated_decision for each in repeated] == [False, True]


def test_how_a_transaction_has_ended_is_told_when_that_is_stored() -> None:
    """A fail-over may take the first decision back, and then the other one may be taken."""
    world = World(sync_flush=True).start()
    handle = world.half()
    calls = []
    for decision in (COMMIT, ROLL_BACK):
        request = EndTransactionRequest(ends=[TransactionEnd(transaction_handle=handle, decision=decision)])
        calls.append(Call(request, world.lane))
        world.service.end_transaction([calls[-1]])  # type: ignore[list-item]
    assert [call.answered for call in calls] == [False, False]
    world.store.flush()
    world.waiting.resolve()
    assert calls[0].result()
    assert refusal(calls[1].result).reason == "TRANSACTION_ENDED"


def test_a_damaged_half_message_is_not_committed_and_can_be_rolled_back(world: World) -> None:
    handles = [world.half(b"x" * 100) for _ in range(2)]
    world.restart()  # or else what was sent just now need not be read
    at = world.store.transactions.open_transactions()[0].half.position
    real = world.store.read_records

    def first_is_damaged(positions: Any, sizes: Any) -> Any:
        data, starts, is_sound = real(positions, sizes)
        return data, starts, is_sound & (positions != at)

    world.store.read_records = first_is_damaged
    results = world.end((handles[0], COMMIT), (handles[1], COMMIT))
    assert [result.error_reason for result in results] == ["CORRUPT_LOG", ""]
    world.end((handles[0], ROLL_BACK))
    assert world.open() == []
    assert world.delivered() == [b"x" * 100]


@pytest.mark.parametrize("kept_bytes", [0, 600, 1 << 20])
@pytest.mark.parametrize("forwards", [True, False])
def test_commits_are_the_same_whether_or_not_their_half_messages_are_read_again(
    world: World, monkeypatch: pytest.MonkeyPatch, kept_bytes: int, forwards: bool
) -> None:
    monkeypatch.setattr(fresh_halves, "FRESH_SIZE_MAX_BYTES", kept_bytes)
    handles = [world.half(b"%d" % n * 100, queue_id=n % 2) for n in range(6)]
    reading = Mock(side_effect=world.store.read_records)
    world.store.read_records = reading
    world.end(*[(handle, COMMIT) for handle in (handles if forwards else handles[::-1])])
    assert world.delivered(queue_id=0) == [b"%d" % n * 100 for n in (0, 2, 4)]
    assert world.delivered(queue_id=1) == [b"%d" % n * 100 for n in (1, 3, 5)]
    assert reading.called == (kept_bytes < 1 << 20)
    assert world.store.transactions.open_count == 0
    world.restart()
    assert world.delivered() == [b"%d" % n * 100 for n in (0, 2, 4)]
    world.store.close()
    assert verify("/s", disk=world.disk) == []


def test_of_decisions_of_one_turn_that_cannot_be_stored_all_are_told(world: World) -> None:
    handles = [world.half() for _ in range(2)]
    world.store._log.fail("no disk")
    ends = [(handles[0], COMMIT), (handles[1], ROLL_BACK), (handles[0], ROLL_BACK)]
    results = world.end(*ends, ("x" * 40, COMMIT))
    assert [result.error_reason for result in results] == ["STORE_FAILED"] * 3 + ["INVALID_ARGUMENT"]


# Sends.


def test_a_send_that_is_repeated_has_the_handles_of_the_first_time(world: World) -> None:
    records = [world.record(b"%d" % number) for number in range(2)]
    request = SendRequest(topic="topic", queue_id=0, records=records, half=True)
    first, again = world.request(request), world.request(request)
    assert again.repeated_send
    assert again.transaction_handles == first.transaction_handles
    world.end((first.transaction_handles[0], COMMIT))
    assert world.request(request).transaction_handles == first.transaction_handles
    assert world.delivered() == [b"0"]
    assert len(world.open()) == 1


@pytest.mark.parametrize("seed", range(12))
def test_a_request_in_the_usual_form_is_answered_as_one_that_is_parsed(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Of two brokers, one parses every request. The same is sent to both."""
    usual: list[bool] = []
    worlds = World().start(), World().start()
    real = worlds[0].service._usual

    def noted(payload: bytes) -> Any:
        found = real(payload)
        usual.append(found is not None)
        return found

    monkeypatch.setattr(worlds[0].service, "_usual", noted)
    monkeypatch.setattr(worlds[1].service, "_usual", lambda payload: None)
    handles: list[str] = []
    rng = random.Random(seed)
    for number in range(30):
        if rng.random() < 0.4:
            records = [worlds[0].record(b"%d" % number) for _ in range(rng.randrange(1, 6))]
            request = SendRequest(topic="topic", queue_id=1, records=records, half=True)
            first, second = (list(world.request(request).transaction_handles) for world in worlds)
            assert first == second
            handles += first
            continue
        ends: list[tuple[str, Any]] = [
            (rng.choice(handles), rng.choice((COMMIT, ROLL_BACK)))
            for _ in range(rng.randrange(2, 6))
            if handles
        ]
        if rng.random() < 0.3:
            ends.append(rng.choice([("x", COMMIT), (rng.choice(handles or ["y"]), 0), (rng.choice(handles or ["y"]), 7)]))
        if len(ends) > 1:
            answers = [world.end(*ends) for world in worlds]
            assert answers[0] == answers[1]
    assert any(usual)
    assert not all(usual)
    assert worlds[0].delivered(queue_id=1) == worlds[1].delivered(queue_id=1)
    assert worlds[0].open() == worlds[1].open()


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "delayed": {"delay_ms": 500},
    "half": {"half": True},
    "delayed half": {"half": True, "delay_ms": 500},
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("again", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_only_a_send_of_the_same_kind_is_a_repeat(world: World, first: str, again: str, count: int) -> None:
    """Of a half message that is open, or is rolled back, nobody gets anything: no plain send may be told that it is stored."""
    records = [world.record(b"%d" % number) for number in range(count)]
    request = SendRequest(topic="topic", queue_id=0, records=records, **KINDS[first])
    other = SendRequest(topic="topic", queue_id=0, records=records, **KINDS[again])
    sent = world.request(request)
    end = world.store.appended_position
    for _ in range(2):
        if first == again:
            assert world.request(other).repeated_send
        else:
            error = refusal(partial(world.request, other))
            assert error.reason == "PRODUCER_ID_TAKEN"
            assert f"is stored here as a {first} message, and this one is {again}" in str(error)
        assert world.store.appended_position == end
        if sent.transaction_handles:
            world.end(*((handle, ROLL_BACK) for handle in sent.transaction_handles))
            end = world.store.appended_position
    assert world.request(request).repeated_send


def test_a_half_message_without_a_producer_id_is_refused(world: World) -> None:
    request = SendRequest(topic="topic", records=[Record(body=b"x")], half=True)
    error = refusal(lambda: world.request(request))
    assert error.reason == "INVALID_ARGUMENT"
    assert "producer_id" in error.message


@pytest.mark.parametrize("group", ["p q!", "p" * 121, "%RETRY%p"])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_half_message_of_a_group_that_no_producer_can_have_is_refused(world: World, group: str, count: int) -> None:
    """Nobody could be asked what has become of it."""
    records = [world.record(b"x", "" if number == 0 else "g") for number in range(count)]
    assert world.request(SendRequest(topic="topic", queue_id=0, records=records, half=True)).transaction_handles
    records = [world.record(b"x", group if number == count - 1 else "g") for number in range(count)]
    end = world.store.appended_position
    error = refusal(lambda: world.request(SendRequest(topic="topic", queue_id=0, records=records, half=True)))
    assert (error.reason, error.field_violations[0][0]) == (
        "INVALID_ARGUMENT",
        f"records[{count - 1}].attributes.producer_group",
    )
    assert world.store.appended_position == end
    world.request(SendRequest(topic="topic", queue_id=0, records=records))  # a plain message has nobody to ask


@pytest.mark.parametrize(
    "limits", [{"transaction_count_max": 2}, {"transaction_size_max_bytes": 700}]
)
def test_no_more_half_messages_are_taken_than_there_may_be(limits: dict[str, int]) -> None:
    world = World(config=BrokerConfig(**limits)).start()  # type: ignore[arg-type]
    handles = [world.half(b"x" * 150) for _ in range(2)]
    error = refusal(lambda: world.half(b"x" * 150))
    assert error.reason == "TOO_MANY"
    plain = world.request(SendRequest(topic="topic", queue_id=0, records=[Record(body=b"plain")]))
    assert plain.queue_offset == 0
    world.end((handles[0], ROLL_BACK))
    world.half(b"x" * 150)


def test_one_that_is_refused_takes_no_other_of_its_turn_with_it() -> None:
    world = World(config=BrokerConfig(transaction_count_max=1)).start()
    plain = SendRequest(topic="topic", queue_id=0, records=[world.record(b"plain")])
    halves = [
        SendRequest(topic="topic", queue_id=0, records=[world.record(b"half")], half=True)
        for _ in range(2)
    ]
    world.half()
    calls = [Call(request, world.lane) for request in (plain, halves[0], plain, halves[1])]
    world.sends.send(calls)  # type: ignore[arg-type]
    assert SendResponse.FromString(calls[2].result()).repeated_send
    assert world.delivered() == [b"plain"]
    for call in (calls[1], calls[3]):
        assert isinstance(call.outcome, ServiceError)
    world.end((world.listed().transactions[0].transaction_handle, ROLL_BACK))
    assert world.request(halves[0]).transaction_handles


def test_an_identity_of_another_transaction_is_refused(world: World) -> None:
    halves = HalfSends(world.store.transactions, world.checks._handles, count_max=9, size_max_bytes=1 << 20)
    world.half()
    region_of: list[Any] = []
    original, world.sends._halves = world.sends._halves, halves
    halves.check = region_of.append  # type: ignore[method-assign, assignment]
    world.half()
    world.sends._halves = original
    with pytest.raises(Exception, match="belongs to another transaction"):
        original.check(region_of[0])


def test_a_deleted_topic_takes_its_transactions_along(world: World) -> None:
    handle = world.half(topic="other")
    kept = world.half()
    world.store.delete_topic("other")
    for _ in range(2):
        assert refusal(lambda: world.end((handle, COMMIT))).reason == "TRANSACTION_NOT_FOUND"
        assert len(world.open()) == 1
        world.restart()
    world.end((kept, COMMIT))


def test_a_topic_of_which_only_half_messages_tell_comes_back_with_the_first_commit(
    world: World,
) -> None:
    handle = world.half(topic="fresh", queue_id=2)
    world.store.topics._by_name.pop("fresh")
    world.end((handle, COMMIT))
    assert world.store.topics.find("fresh") is not None
    assert world.delivered("fresh", 2) == [b"half"]


# Checks.


def test_a_producer_is_asked_in_time_until_the_transaction_expires(world: World) -> None:
    handle = world.half(b"orphan")
    asked = []
    for second in range(600):
        call = world.wait()
        world.turns(1_000)
        if call.answered:
            (check,) = checks_of(call)
            assert check.message.body == b"orphan"
            assert check.message.attributes.producer_group == "g"
            asked.append((second + 1, check.check_count))
        else:
            call.on_close()
    assert asked == [(6 + 30 * number, number + 1) for number in range(15)]
    assert world.open() == []
    assert world.delivered() == []
    assert world.delivered(EXPIRED_TOPIC) == [b"orphan"]
    error = refusal(lambda: world.end((handle, COMMIT)))
    assert (error.reason, error.metadata["ending"]) == ("TRANSACTION_ENDED", "expired")
    topic = world.store.topics.find(EXPIRED_TOPIC)
    assert topic is not None
    assert (topic.readable, topic.writable, topic.read_queues) == (True, False, 1)
    assert world.store.transactions.counts[Ending.EXPIRED] == 1


def test_any_producer_of_the_group_settles_what_another_began(world: World) -> None:
    world.half(group="g")
    world.half(b"other", group="h")
    calls = {group: world.wait(group) for group in "gh"}
    world.turns(6_000)
    for group, call in calls.items():
        (check,) = checks_of(call)
        assert check.message.attributes.producer_group == group
        world.end((check.transaction_handle, COMMIT))
    assert sorted(world.delivered()) == [b"half", b"other"]


def test_producers_of_a_group_are_asked_in_turn(world: World) -> None:
    calls = [world.wait() for _ in range(2)]
    for number in range(2):
        world.half()
        world.turns(6_000)
        assert [call.answered for call in calls] == [True, number == 1]


def test_a_producer_that_is_gone_is_not_asked_before_the_lane_hears_of_it(world: World) -> None:
    gone, there = world.wait(), world.wait()
    gone.closed = True
    world.half()
    world.turns(6_000)
    assert gone.answered
    assert len(checks_of(there)) == 1
    gone = world.wait()
    gone.closed = True
    world.half(b"other")
    world.turns(6_000)
    assert [check.message.body for check in checks_of(world.wait())] == [b"other"]


def test_a_producer_that_is_gone_when_its_call_is_read_takes_no_question_from_those_who_come(world: World) -> None:
    world.half()
    world.turns(6_000)
    request = WaitForChecksRequest(producer_group="g", hold_ms=1_000)
    gone = Call(request, world.lane)
    gone.closed = True
    world.service.wait_for_checks(gone)  # type: ignore[arg-type]
    assert len(checks_of(world.wait())) == 1


def test_the_first_producer_that_comes_is_asked_what_nobody_was_there_for(world: World) -> None:
    handles = [world.half(b"%d" % number) for number in range(2)]
    world.turns(6_000)
    world.end((handles[0], COMMIT))
    assert [check.message.body for check in checks_of(world.wait())] == [b"1"]
    assert not world.wait().answered


@pytest.mark.parametrize("is_expired", [False, True])
def test_transactions_that_ended_take_no_room_from_those_that_wait_for_a_producer(
    world: World, monkeypatch: pytest.MonkeyPatch, is_expired: bool
) -> None:
    monkeypatch.setattr(transaction_checks, "UNASKED_MAX", 3)
    handles = [world.half(group="retired") for _ in range(3)]
    world.turns(6_000)
    if is_expired:
        for _ in range(15):
            world.turns(30_000)
    else:
        world.end(*((handle, ROLL_BACK) for handle in handles))
    assert world.open() == []
    for number in range(3):
        world.half(b"%d" % number)
    world.turns(6_000)
    assert sorted(check.message.body for check in checks_of(world.wait())) == [b"0", b"1", b"2"]


def test_a_hold_ends_with_nothing_to_ask(world: World) -> None:
    assert checks_of(world.wait(hold_ms=0)) == []
    call = world.wait()
    world.lane.timers[-1].function()
    assert checks_of(call) == []
    left = world.wait()
    left.on_close()
    world.half()
    world.turns(6_000)
    assert not left.answered
    assert len(checks_of(world.wait())) == 1, "who has left is not asked"
    stopped = world.wait()
    world.service.stop()
    assert checks_of(stopped) == []
    for group, hold_ms in (("", 1), ("%g", 1), ("g", -1)):
        error = refusal(lambda group=group, hold_ms=hold_ms: checks_of(world.wait(group, hold_ms)))  # type: ignore[misc]
        assert error.reason == "INVALID_ARGUMENT"


def test_the_lane_is_woken_when_something_is_due_and_only_then(world: World) -> None:
    world.checks.arm()
    assert world.lane.timers == []
    world.half()
    (timer,) = world.lane.timers
    world.half()
    assert len(world.lane.timers) == 1
    call = world.wait()
    world.clock.time_ms += 6_000
    timer.function()
    assert len(checks_of(call)) == 2


def test_a_check_is_stored_before_anybody_hears_of_it() -> None:
    world = World(sync_flush=True).start()
    world.half()
    call = world.wait()
    world.turns(6_000)
    assert not call.answered
    world.store.flush()
    world.waiting.resolve()
    assert len(checks_of(call)) == 1


def counts_asked(*calls: Call) -> list[int]:
    return [check.check_count for call in calls for check in checks_of(call)]


def stored(world: World) -> None:
    world.store.flush()
    world.waiting.resolve()


def test_checks_that_a_slow_disk_confirms_together_have_numbers_of_their_own() -> None:
    world = World(sync_flush=True).start()
    world.half()
    calls = [world.wait() for _ in range(2)]
    world.turns(6_000)
    world.turns(30_000)
    assert not any(call.answered for call in calls)
    stored(world)
    assert counts_asked(*calls) == [1, 2]


def test_a_check_that_is_not_stored_yet_is_not_the_one_that_a_late_producer_is_told() -> None:
    world = World(sync_flush=True).start()
    world.half()
    world.turns(6_000)
    stored(world)  # Nobody is there to be asked.
    world.clock.time_ms += 30_000
    world.checks.turn()
    first = Call(WaitForChecksRequest(producer_group="g", hold_ms=1_000), world.lane)
    world.service.wait_for_checks(first)  # type: ignore[arg-type]
    second = Call(WaitForChecksRequest(producer_group="g", hold_ms=1_000), world.lane)
    world.service.wait_for_checks(second)  # type: ignore[arg-type]
    assert first.answered
    assert not second.answered
    stored(world)
    assert counts_asked(first, second) == [1, 2]


def test_what_a_producer_was_asked_is_not_asked_again_for_the_check_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body in (b"0", b"1"):
        world.half(body)
    world.turns(6_000)
    # A producer that comes is held although something is left to ask: of the first batch, nothing can be read.
    with monkeypatch.context() as damaged:
        damaged.setattr(transaction_checks, "BATCH_COUNT_MAX", 1)
        damaged.setattr(world.store, "read_records", lambda positions, sizes: (b"", positions, positions < 0))
        call = world.wait()
    assert not call.answered
    world.turns(30_000)
    assert counts_asked(call) == [2, 2]
    assert not world.wait().answered


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
def test_a_wall_clock_that_is_set_neither_stops_nor_repeats_checks(
    world: World, step_ms: int
) -> None:
    before = world.half(b"before")
    world.clock.wall_offset_ms = step_ms
    world.half(b"after")
    asked: list[bytes] = []
    for _ in range(70):
        call = world.wait()
        world.turns(1_000)
        if call.answered:
            asked += [check.message.body for check in checks_of(call)]
        else:
            call.on_close()
    # What was open when the clock was set ahead was asked about too early, and then in its turn.
    assert sorted(asked) == [b"after"] * 3 + [b"before"] * 3
    world.end((before, COMMIT))


def test_what_is_damaged_is_asked_about_by_nobody_and_does_not_expire(world: World) -> None:
    world.half(b"x" * 100)
    half = world.store.transactions.open_transactions()[0].half
    world.store.read_records = lambda positions, sizes: (
        b"",
        positions,
        positions < 0,
    )
    for _ in range(20):
        call = world.wait()
        world.turns(30_000)
        assert not call.answered
    assert world.store.transactions.find(half.key) is not None


def test_what_is_healed_behind_all_its_checks_is_asked_about_before_it_expires(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = world.half(b"x")
    with monkeypatch.context() as damaged:
        damaged.setattr(world.store, "read_records", lambda positions, sizes: (b"", positions, positions < 0))
        for _ in range(20):
            world.turns(30_000)
    call = world.wait()
    world.turns(30_000)
    (check,) = checks_of(call)
    assert check.message.body == b"x"
    world.end((handle, COMMIT))
    assert world.delivered() == [b"x"]
    world.half(b"y")
    for _ in range(20):
        world.turns(30_000)
    assert world.open() == [], "what could be read all the time expires as it did"


@pytest.mark.parametrize("is_damaged_then", [False, True])
def test_what_is_healed_behind_all_its_checks_and_a_start_is_asked_about_before_it_expires(
    world: World, monkeypatch: pytest.MonkeyPatch, is_damaged_then: bool
) -> None:
    world.half(b"x")

    def turns_while_damaged(count: int) -> None:
        with monkeypatch.context() as damaged:
            damaged.setattr(world.store, "read_records", lambda positions, sizes: (b"", positions, positions < 0))
            for _ in range(count):
                world.turns(30_000)

    turns_while_damaged(15 if is_damaged_then else 20)
    world.restart()
    turns_while_damaged(1 if is_damaged_then else 0)
    call = world.wait()
    world.turns(30_000)
    (check,) = checks_of(call)
    assert check.message.body == b"x"
    assert world.open()
    world.turns(30_000)
    assert world.open() == []


def unreadable(world: World, count: int) -> Any:
    """A look into the store that finds the first half messages damaged."""
    limit = sorted(known.half.position for known in world.store.transactions.open_transactions())[count]
    read = world.store.read_records

    def read_records(positions: Any, sizes: Any) -> Any:
        data, starts, is_sound = read(positions, sizes)
        return data, starts, is_sound & (positions >= limit)

    return read_records


def test_a_producer_is_asked_at_once_though_the_first_questions_cannot_be_read_any_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was held until the next of its questions fell due."""
    for number in range(300):
        world.half(b"%d" % number)
    world.turns(6_000)
    monkeypatch.setattr(world.store, "read_records", unreadable(world, 299))
    first, second = world.wait(), world.wait()
    for _ in range(3):
        world.lane.fire()
    assert [check.message.body for check in checks_of(first)] == [b"299"]
    assert not second.answered
    assert world.checks._unasked_count == 0


def test_questions_that_wait_are_not_lost_when_their_producer_goes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        world.half(b"%d" % number)
    world.turns(6_000)
    monkeypatch.setattr(world.store, "read_records", unreadable(world, 128))
    call = world.wait()
    call.closed = True
    world.lane.fire()
    assert len(checks_of(world.wait())) == 128
    assert len(checks_of(world.wait())) == 44
    assert world.checks._unasked_count == 0


def test_a_wait_looks_at_no_more_questions_than_it_answers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand may wait for the first producer of their group."""
    handles = [world.half() for _ in range(1_000)]
    world.turns(6_000)
    world.end(*((handle, ROLL_BACK) for handle in handles[:100]))
    looks = Mock(side_effect=world.store.transactions.find)
    monkeypatch.setattr(world.store.transactions, "find", looks)
    assert len(checks_of(world.wait())) == 128
    assert looks.call_count <= 228
    assert world.checks._unasked_count == 1_000 - 228
    found = [len(checks_of(world.wait())) for _ in range(7)]
    assert sum(found) == 900 - 128
    assert not world.wait().answered


def test_what_cannot_be_read_costs_no_look_at_all_of_it_with_each_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment may have a hundred thousand half messages, and be damaged."""
    handles = [world.half() for _ in range(1_000)]
    monkeypatch.setattr(world.store, "read_records", lambda positions, sizes: (b"", positions, positions < 0))
    world.turns(6_000)
    transactions = world.store.transactions
    looks = Mock(side_effect=transactions.find)
    monkeypatch.setattr(transactions, "find", looks)
    world.turns(30_000)
    assert looks.call_count <= 2.5 * len(handles)
    world.end(*((handle, ROLL_BACK) for handle in handles))
    world.half()
    world.turns(6_000)
    assert len(world.checks._unread) <= 2 * transactions.open_count + transaction_checks.BATCH_COUNT_MAX


@pytest.mark.parametrize("what", [COMMIT, ROLL_BACK])
def test_a_start_that_cannot_read_a_half_message_does_not_say_that_there_never_was_one(
    world: World, monkeypatch: pytest.MonkeyPatch, what: Any
) -> None:
    handle = world.half(b"x")
    (known,) = world.store.transactions.open_transactions()
    for _ in range(2):
        world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"behind")]))
        world.store.flush()
    disk = world.disk.killed()
    disk.flip_bit(f"/s/commitlog/{0:020d}", (known.half.position + 30) * 8)
    monkeypatch.setattr(transaction_world, "StoreConfig", partial(StoreConfig, corruption="quarantine"))
    world.restart(disk)
    assert world.open() == []
    assert refusal(lambda: world.end((handle, what))).reason == "CORRUPT_LOG"
    disk.flip_bit(f"/s/commitlog/{0:020d}", (known.half.position + 30) * 8)  # healed
    world.restart()
    world.end((handle, what))
    assert world.delivered() == ([b"x"] if what == COMMIT else [])


def test_a_start_that_cannot_read_where_a_half_message_was_carried_does_not_say_that_there_never_was_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = world.half(b"x")
    fill(world, 3 * SEGMENT)
    cut_front(world)
    (known,) = world.store.transactions.open_transactions()
    assert known.half.position >= world.store.min_position > SEGMENT
    for _ in range(2):
        world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"behind")]))
        world.store.flush()
    disk = world.disk.killed()
    disk.remove("/s/transactions")
    begin, at = divmod(known.half.position, SEGMENT)
    damaged = f"/s/commitlog/{begin * SEGMENT:020d}", (at + 30) * 8
    disk.flip_bit(*damaged)
    monkeypatch.setattr(transaction_world, "StoreConfig", partial(StoreConfig, corruption="quarantine"))
    world.restart(disk)
    assert world.open() == []
    assert refusal(lambda: world.end((handle, COMMIT))).reason == "CORRUPT_LOG"
    disk.flip_bit(*damaged)  # healed
    world.restart()
    world.end((handle, COMMIT))
    assert world.delivered() == [b"x"]


def test_decisions_on_what_a_start_could_not_read_do_not_read_the_damage_again_each(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may have 4,096 of them, and other sends wait on the lane."""
    handles = [world.half(b"%d" % number) for number in range(200)]
    for _ in range(2):
        world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"behind")]))
        world.store.flush()
    disk = world.disk.killed()
    for known in world.store.transactions.open_transactions():
        disk.flip_bit(f"/s/commitlog/{0:020d}", (known.half.position + 30) * 8)
    monkeypatch.setattr(transaction_world, "StoreConfig", partial(StoreConfig, corruption="quarantine"))
    world.restart(disk)
    refused = {result.error_reason for result in world.end(*((handle, COMMIT) for handle in handles))}
    with patch.object(SimDisk, "pread", autospec=True, side_effect=SimDisk.pread) as reads:
        refused |= {result.error_reason for result in world.end(*((handle, COMMIT) for handle in handles))}
        assert reads.call_count < len(handles)
    assert refused == {"CORRUPT_LOG"}


def test_what_a_repair_has_taken_out_expires_after_its_checks(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = world.half(b"x")
    (known,) = world.store.transactions.open_transactions()
    world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"behind")]))
    world.store.flush()
    world.restart()
    world.disk.flip_bit(f"/s/commitlog/{0:020d}", (known.half.position + 30) * 8)
    world.turns(30_000)
    assert world.store.damaged_ranges
    world.store.close()
    repair("/s", "/kept", disk=world.disk)
    world.restart(world.disk)
    for _ in range(13):
        world.turns(30_000)
    assert world.open()
    with monkeypatch.context() as patched:
        patched.setattr(world.checks._writer, "append_moved", Mock(side_effect=OSError(28, "no space left on device")))
        for _ in range(3):
            with suppress(OSError):
                world.turns(30_000)
    for _ in range(2):
        world.turns(30_000)
    assert world.open() == []
    assert caplog.text.count("1 half messages are lost: `protomq log repair` has taken them out") == 1
    assert refusal(lambda: world.end((handle, COMMIT))).reason == "TRANSACTION_ENDED"
    assert world.delivered(EXPIRED_TOPIC) == []


# Starts, crashes, retention.


def cut_front(world: World) -> None:
    """All segments go that can go."""
    world.store.checkpoint()
    world.store.delete_segments_below(world.store.appended_position)


def fill(world: World, size_bytes: int) -> None:
    for _ in range(size_bytes // 30_000 + 1):
        world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=bytes(30_000))]))


@pytest.mark.parametrize("only_log", [False, True])
def test_open_transactions_outlive_starts_and_retention(world: World, only_log: bool) -> None:
    handles = [world.half(b"%d" % number, delay_ms=10**7 * (number == 4)) for number in range(5)]
    world.end((handles[0], ROLL_BACK))
    world.turns(6_000)
    for _ in range(3):
        fill(world, 3 * SEGMENT)
        cut_front(world)
        world.store.close()
        if only_log:
            for name in world.disk.list("/s"):
                if name != "commitlog":
                    world.disk.remove(f"/s/{name}")
        world.restart(world.disk)
    assert world.store.min_position > SEGMENT
    listed = world.listed().transactions
    assert [each.check_count for each in listed] == [1] * 4
    assert {each.next_check_time_ms for each in listed} == {world.clock.time_ms + 30_000}
    world.end(*((handle, COMMIT) for handle in handles[1:]))
    assert sorted(world.delivered()) == [b"1", b"2", b"3"]
    (hit,) = world.store.find_by_message_id("topic", (PRODUCER, 0, 2))
    transit = Record.FromString(hit).transit
    assert (transit.origin_topic, transit.origin_queue_offset) == ("topic", 2**64 - 1)
    assert world.store.pending.count == 1
    world.store.close()
    assert verify("/s", disk=world.disk) == []


def test_more_is_open_than_a_small_segment_takes(world: World) -> None:
    bodies = [b"%02d" % number + bytes(2_000) for number in range(60)]
    handles = [world.half(body) for body in bodies]
    assert sum(map(len, bodies)) > SEGMENT
    fill(world, 3 * SEGMENT)
    cut_front(world)
    assert world.store.min_position > SEGMENT
    assert len(world.open()) == len(bodies)
    world.end(*((handle, COMMIT) for handle in handles))
    assert sorted(world.delivered()) == bodies


def test_what_is_damaged_where_its_segment_goes_expires(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    handle = world.half()
    real = world.store.read_records

    def damaged(positions: Any, sizes: Any) -> Any:
        data, starts, _ = real(positions, sizes)
        return data, starts, positions < 0

    world.store.read_records = damaged
    fill(world, 3 * SEGMENT)
    cut_front(world)
    assert "are lost with their segment" in caplog.text
    assert refusal(lambda: world.end((handle, COMMIT))).reason == "TRANSACTION_ENDED"


def test_a_file_of_transactions_that_is_older_than_the_log_opens_none_that_has_ended(world: World) -> None:
    """As where a folder was put back that was copied before: the log tells the ending no more."""
    path = "/s/transactions/open.bin"
    handle = world.half()
    world.store.checkpoint()
    fd = world.disk.open(path)
    old = read_fully(world.disk, fd, world.disk.size(fd), 0)
    world.disk.close(fd)
    world.end((handle, COMMIT))
    still = world.half(b"still")
    fill(world, 3 * SEGMENT)
    cut_front(world)
    assert world.store.min_position > SEGMENT
    world.store.close()
    world.disk.remove(path)
    fd = world.disk.create(path)
    write_fully(world.disk, fd, old, 0)
    world.disk.close(fd)
    world.restart(world.disk)
    world.end((still, COMMIT))
    assert world.open() == []
    assert world.delivered() == [b"still"]


def test_endings_are_known_as_far_back_as_the_log_goes(world: World) -> None:
    handle = world.half()
    world.end((handle, COMMIT))
    fill(world, SEGMENT)
    assert world.end((handle, COMMIT))[0].repeated_decision
    fill(world, 3 * SEGMENT)
    cut_front(world)
    assert refusal(lambda: world.end((handle, COMMIT))).reason == "TRANSACTION_NOT_FOUND"


class Script:
    """Runs through everything, and knows what must have come of it.

    Attributes: handles: of those that were sent, by body; done: decisions that were answered; doubtful: decided, and not answered;
    may_be_gone: delivered, and their segments may go.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.handles: dict[str, str] = {}
        self.done: dict[str, Any] = {}
        self.doubtful: set[str] = set()
        self.may_be_gone: set[str] = set()

    def end(self, *ends: tuple[str, Any]) -> None:
        self.doubtful.update(body for body, _ in ends)
        self.world.end(*((self.handles[body], what) for body, what in ends))
        self.doubtful.difference_update(body for body, _ in ends)
        self.done.update(ends)

    def run(self) -> None:
        world = self.world
        for number in range(6):
            self.handles[f"m{number}"] = world.half(b"m%d" % number)
        self.end(("m0", COMMIT), ("m1", ROLL_BACK))
        world.turns(6_000)
        world.store.checkpoint()
        fill(world, 2 * SEGMENT)
        self.end(("m2", COMMIT))
        self.may_be_gone = {"m0", "m2"}
        cut_front(world)
        self.end(("m3", ROLL_BACK), ("m4", COMMIT))
        world.store.close()

    def check(self) -> None:
        """What was answered holds; what was under way is whole or not there; the rest is open, and nobody has seen it."""
        world = self.world
        seen = [body.decode() for body in world.delivered()]
        assert len(seen) == len(set(seen))
        committed = {body for body, what in self.done.items() if what == COMMIT}
        assert committed - self.may_be_gone <= set(seen) <= committed | self.doubtful
        open_ = {each.message_id: each for each in world.listed(with_messages=True).transactions}
        bodies = {Record.FromString(each.record).body.decode() for each in open_.values()}
        assert set(self.handles) - set(self.done) - self.doubtful <= bodies
        assert not bodies & (set(seen) | set(self.done))
        for body, what in self.done.items():
            if body not in self.may_be_gone | {"m1"}:  # of those, what says so may be gone, too
                assert world.end((self.handles[body], what))[0].repeated_decision
        for each in open_.values():
            world.end((each.transaction_handle, COMMIT))
        assert sorted(world.delivered()) == sorted({*map(str.encode, seen), *map(str.encode, bodies)})


def crashes(kind: str) -> int:
    """Crashes at each operation of the disk in turn; how many there are."""
    for number in range(1, 1_000):
        world = World(sync_flush=True).start()
        world.disk.fail_at(number, Fault.CRASH)
        script = Script(world)
        try:
            script.run()
        except SimulatedCrash:
            pass
        else:
            return number - 1
        rng = random.Random(number)
        world.restart(world.disk.killed() if kind == "kill" else world.disk.crash(rng))
        script.check()
    raise AssertionError("the script does not come to its end")


@pytest.mark.parametrize("kind", ["kill", "power"])
def test_a_crash_at_any_write_leaves_each_transaction_open_or_ended_once(kind: str) -> None:
    assert crashes(kind) > 60


def test_a_listing_looks_at_a_part_of_what_is_open_and_says_where_it_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        world.half(topic="topic", queue_id=number % 2)
    whole = world.open()
    assert len(whole) == 7
    monkeypatch.setattr(transaction_service, "LOOKED_AT_MAX", 3)
    parts = [world.listed()]
    while parts[-1].next_position:
        parts.append(world.listed(position=parts[-1].next_position))
    assert [len(part.transactions) for part in parts] == [3, 3, 1]
    assert [each.message_id for part in parts for each in part.transactions] == whole
    none_here = world.listed(message_id=whole[4])
    assert (len(none_here.transactions), none_here.next_position > 0) == (0, True)
    (found,) = world.listed(message_id=whole[4], position=none_here.next_position).transactions
    assert found.message_id == whole[4]


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions it calls: its cost, whatever the machine."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def costs_with(ended_count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, int], int]:
    """What work costs with 5 open transactions behind so many ended ones, and how many bytes a start reads."""
    world = World(sync_flush=True).start()
    for _ in range(ended_count // 100):
        records = [world.record(b"x") for _ in range(100)]
        answer = world.request(SendRequest(topic="topic", queue_id=0, records=records, half=True))
        world.end(*((handle, COMMIT) for handle in answer.transaction_handles))
    handles = [world.half() for _ in range(5)]
    world.turns(6_000)
    world.store.checkpoint()
    calls = {
        "questions": calls_of(lambda: world.turns(30_000)),
        "a look at the time": calls_of(lambda: world.turns(1)),
        "a listing": calls_of(world.open),
        "a decision": calls_of(lambda: world.end((handles[0], COMMIT))),
    }
    world.store.checkpoint()
    read_bytes = 0
    read = SimDisk.pread

    def count_bytes(disk: SimDisk, fd: int, size_bytes: int, position: int) -> bytes:
        nonlocal read_bytes
        read_bytes += size_bytes
        return read(disk, fd, size_bytes, position)

    with monkeypatch.context() as patched:
        patched.setattr(SimDisk, "pread", count_bytes)
        world.restart(world.disk.killed())
    assert len(world.open()) == 4
    return calls, read_bytes


def test_what_transactions_cost_follows_what_is_open_and_not_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    costs_with(100, monkeypatch)  # what is made once is made
    few, few_bytes = costs_with(500, monkeypatch)
    many, many_bytes = costs_with(5_000, monkeypatch)
    assert many == pytest.approx(few, rel=0.02)
    # A start reads the endings that are remembered (the newest 100,000), and not their messages: 330 bytes of log each.
    assert (many_bytes - few_bytes) / 4_500 < 64


def test_a_half_message_in_which_a_bit_flips_is_neither_committed_nor_expires(world: World) -> None:
    handles = [world.half(b"half-%d" % number) for number in range(3)]
    world.restart()  # or else what was sent just now need not be read
    flip_in_log(world.disk, world.store, world.store.transactions.open_transactions()[0].half.position)
    results = world.end((handles[0], COMMIT), (handles[1], COMMIT))
    assert [result.error_reason for result in results] == ["CORRUPT_LOG", ""]
    assert world.delivered() == [b"half-1"]
    for _ in range(40):
        world.turns(30_000)
    assert (len(world.open()), world.delivered(EXPIRED_TOPIC)) == (1, [b"half-2"])
    world.end((handles[0], ROLL_BACK))
    assert world.open() == []


def test_a_half_message_is_not_carried_forward_with_a_flipped_bit(world: World, caplog: pytest.LogCaptureFixture) -> None:
    handles = [world.half(b"half-%d" % number) for number in range(2)]
    fill(world, 3 * SEGMENT)
    flip_in_log(world.disk, world.store, world.store.transactions.open_transactions()[0].half.position)
    with pytest.raises(StoreError, match="they stay until the next try"):
        cut_front(world)
    assert len(world.open()) == 2
    cut_front(world)
    assert "1 half messages are damaged, and are lost with their segment" in caplog.text
    assert refusal(lambda: world.end((handles[0], COMMIT))).reason == "TRANSACTION_ENDED"
    world.end((handles[1], COMMIT))
    assert world.delivered() == [b"half-1"]
