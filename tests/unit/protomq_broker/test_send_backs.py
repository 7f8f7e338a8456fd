"""Send-backs over a store on a simulated disk: retried as planned, dead after exactly the configured attempts, once for each request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from protomq.v1.group_service_pb2 import (
    AlikeFailures,
    FailedMessage,
    SendBackRequest,
    SendBackResponse,
)
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import RecallMessageRequest, RecallMessageResponse
from protomq.wire.recall_handle import RecallHandle, encode_handle
from protomq.wire.record import RecordTemplate, encode_record_field
from protomq.wire.topics import dead_letter_topic, retry_topic
from protomq_broker import failed_messages, send_backs
from protomq_broker.recalls import Recalls
from protomq_broker.send_backs import SendBacks
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region
from protomq_broker.store.state.group_settings import GroupSettings
from protomq_broker.store.state.sent_back import REMEMBERED_MS
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, SimulatedCrash
from protomq_runtime.errors import ServiceError
from tests.support.retry_world import GROUP, TOPIC, Call, RetryWorld, failed, id_of
from tests.unit.protomq_broker.store.store_helpers import flip_in_log

KEPT = ("body", "crc32c", "producer_id", "producer_epoch", "sequence", "born_time_ms", "key_hash")


def refusal(call: Callable[[], Any]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("event", ["", "restart", "kill"])
def test_nothing_takes_a_retry_back(event: str) -> None:
    """Not even a handle that is made by hand, of what a consumer knows of its message."""
    world = RetryWorld()
    world.send(b"poison")
    (message,) = world.read(TOPIC)
    (result,) = world.send_back([message]).results
    if event:
        world.restart(world.disk.killed() if event == "kill" else None)
    (row,) = world.store.pending.at_due(result.due_time_ms, 10, 0)
    identity = (message.producer_id, message.producer_epoch, message.sequence)
    recalls = Recalls(world.store, world.config, "b", world.writer, world.waiting, world.log_time)
    for topic in (TOPIC, retry_topic(GROUP)):
        for position in (0, message.physical_offset, int(row["position"])):
            handle = encode_handle(RecallHandle("b", position, result.due_time_ms, identity))
            call = Call(b"", world.lane)
            recalls.recall(RecallMessageRequest(topic=topic, recall_handle=handle), call)  # type: ignore[arg-type]
            assert call.outcome == RecallMessageResponse(message_id=id_of(message)).SerializeToString()
    world.deliver(10_001)
    assert [retry.body for retry in world.retries()] == [b"poison"]


def test_a_message_that_fails_comes_again_and_says_why() -> None:
    world = RetryWorld()
    world.send(b"first", b"second", key="k")
    _, second = world.read(TOPIC)
    answer = world.send_back([second], error="ValueError: no such flight")
    (result,) = answer.results
    assert (result.attempt, result.dead_letter) == (1, False)
    assert result.due_time_ms == world.log_time.now_ms() + 10_001
    world.deliver(10_000)
    assert world.retries() == []
    world.deliver(1)
    (copy,) = world.retries()
    for name in KEPT:
        assert getattr(copy, name) == getattr(second, name)
    assert list(copy.keys) == ["k"]
    transit = copy.transit
    assert (transit.origin_topic, transit.origin_queue_id, transit.origin_queue_offset) == (TOPIC, 0, 1)
    assert (transit.attempt, transit.last_error) == (1, "ValueError: no such flight")
    assert transit.first_store_time_ms == second.store_time_ms
    assert not copy.HasField("due_time_ms")


@pytest.mark.parametrize("limit", [0, 1, 3, 16])
def test_after_exactly_the_configured_attempts_it_is_a_dead_letter(limit: int) -> None:
    world = RetryWorld()
    world.store.groups.put(GroupSettings(GROUP, retry_count_max=limit, retry_delays_ms=(5, 7)))
    world.send(b"poison")
    message = world.read(TOPIC)[0]
    deliveries = 0
    while True:
        deliveries += 1
        (result,) = world.send_back([message], error=f"failure {deliveries}").results
        assert result.attempt == deliveries
        if result.dead_letter:
            break
        assert result.due_time_ms - world.log_time.now_ms() == (6 if deliveries == 1 else 8)
        world.deliver(10)
        message = world.retries()[-1]
        assert message.transit.attempt == deliveries
    assert deliveries == limit + 1
    (dead,) = world.dead_letters()
    assert (dead.transit.attempt, dead.transit.last_error) == (limit + 1, f"failure {limit + 1}")
    assert dead.transit.origin_topic == TOPIC
    assert id_of(dead) == id_of(message)
    world.deliver(10**9)
    assert len(world.retries()) == limit


@pytest.mark.parametrize("count", [1, 40], ids=["one", "alike"])
def test_a_group_that_consumes_the_dead_letters_of_another_one_has_all_its_own_attempts(count: int) -> None:
    world = RetryWorld()
    other = "other"
    world.store.groups.put(GroupSettings(GROUP, retry_count_max=4, retry_delays_ms=(0,)))
    world.store.groups.put(GroupSettings(other, retry_count_max=2, retry_delays_ms=(5, 7)))
    world.send(*(b"poison%d" % number for number in range(count)))
    world.send_back([failed(message, attempt=4) for message in world.read(TOPIC)])
    messages = world.dead_letters()
    assert {message.transit.attempt for message in messages} == {5}
    for deliveries in (1, 2, 3):
        results = world.send_back(messages, group=other, error=f"failure {deliveries}").results
        assert [(result.attempt, result.dead_letter) for result in results] == [(deliveries, deliveries == 3)] * count
        if deliveries < 3:
            assert results[0].due_time_ms - world.log_time.now_ms() == (6 if deliveries == 1 else 8)
            world.deliver(10)
            messages = world.retries(other)[-count:]
            assert {message.transit.attempt for message in messages} == {deliveries}
    dead = world.dead_letters(other)
    assert [(each.transit.attempt, each.transit.last_error) for each in dead] == [(3, "failure 3")] * count
    assert {each.transit.origin_topic for each in dead} == {TOPIC}


def test_the_consumer_may_choose_the_delay_but_not_the_limit() -> None:
    world = RetryWorld()
    world.store.groups.put(GroupSettings(GROUP, retry_count_max=1))
    world.send(b"a", b"b", b"c", b"d")
    messages = world.read(TOPIC)
    now_ms = world.log_time.now_ms()
    (level,) = world.send_back(messages[:1], delay_level=2).results
    (later,) = world.send_back(messages[1:2], delay_ms=123).results
    (at_once,) = world.send_back(messages[2:3], delay_ms=0).results
    (never,) = world.send_back(messages[3:], dead_letter=True).results
    assert (level.due_time_ms, later.due_time_ms) == (now_ms + 5_001, now_ms + 124)
    assert not at_once.dead_letter
    assert [copy.body for copy in world.retries()] == [b"c"], "without a delay it comes at once"
    assert never.dead_letter
    assert [copy.body for copy in world.dead_letters()] == [b"d"]
    (again,) = world.send_back(world.retries(), delay_level=1).results
    assert again.dead_letter, "the limit holds"
    assert not world.send_back([messages[0]], dead_letter=False).results[0].dead_letter


def test_a_consumer_that_tried_by_itself_says_how_often() -> None:
    world = RetryWorld()
    world.store.groups.put(GroupSettings(GROUP, retry_count_max=3))
    world.send(b"a", b"b")
    first, second = world.read(TOPIC)
    assert world.send_back([first], attempt=2).results[0].attempt == 3
    assert world.send_back([second], attempt=3).results[0].dead_letter
    world.deliver(10**6)
    (copy,) = world.retries()
    assert copy.transit.attempt == 3
    error = refusal(lambda: world.send_back([copy], attempt=2))
    assert "handed out 3 times" in error.message


def test_messages_of_many_queues_go_back_together_or_not_at_all() -> None:
    world = RetryWorld()
    world.send(b"a", b"b")
    world.send(b"c", queue_id=1)
    messages = [*world.read(TOPIC), *world.read(TOPIC, 1)]
    gone = FailedMessage(topic=TOPIC, queue_id=1, queue_offset=1)
    before = world.store.appended_position
    error = refusal(lambda: world.send_back([*messages, gone]))
    assert (error.reason, error.metadata["queue_offset"], error.metadata["end_offset"]) == ("OFFSET_OUT_OF_RANGE", "1", "1")  # fmt: skip
    assert world.store.appended_position == before
    results = world.send_back(reversed(messages)).results
    assert [result.attempt for result in results] == [1, 1, 1]
    world.deliver(10_001)
    assert sorted(copy.body for copy in world.retries()) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    "change", [TopicConfig(TOPIC, 2, 2, readable=False), TopicConfig(TOPIC, 1, 1)], ids=["not to be read", "fewer queues"]
)
def test_who_had_messages_gives_them_back_though_nobody_may_read_them_any_more(change: TopicConfig, count: int) -> None:
    """Alone and by arrays. Else they would be lost: the consumer has them, and nobody gets them again."""
    world = RetryWorld()
    world.send(*[b"%d" % number for number in range(count)], queue_id=1)
    messages = world.read(TOPIC, 1)
    world.store.topics.put([change])
    assert len(world.send_back(messages).results) == count
    world.deliver(10_001)
    assert [copy.body for copy in world.retries()] == [message.body for message in messages]


def requests_of(world: RetryWorld, offsets: list[int], ids: list[int]) -> list[Call]:
    """A SendBack for each offset, all in one turn."""
    requests = [
        SendBackRequest(
            consumer_group=GROUP,
            messages=[FailedMessage(topic=TOPIC, queue_offset=offset, error=f"of {offset}")],
            request_id=request_id,
        )
        for offset, request_id in zip(offsets, ids, strict=True)
    ]
    calls = [Call(request.SerializeToString(), world.lane) for request in requests]
    world.send_backs.send_back(calls)  # type: ignore[arg-type]
    world.store.flush()
    return calls


def answer_of(call: Call) -> SendBackResponse:
    assert isinstance(call.outcome, bytes), call.outcome
    return SendBackResponse.FromString(call.outcome)


def test_requests_of_one_turn_are_one_append_and_each_has_its_answer() -> None:
    world = RetryWorld()
    world.send(*(b"%d" % number for number in range(300)))
    calls = requests_of(world, list(range(300)), list(range(1, 301)))
    assert all(answer_of(call).results[0].attempt == 1 for call in calls)
    world.deliver(10_001)
    copies = sorted(world.retries(), key=lambda copy: copy.transit.origin_queue_offset)
    assert [(copy.body, copy.transit.last_error) for copy in copies] == [
        (b"%d" % number, f"of {number}") for number in range(300)
    ]


def sent_back_in_runs(world: RetryWorld) -> tuple[list[SendBackResponse], list[bytes]]:
    """What is answered to requests of one turn with runs of messages, and what comes of them."""
    world.store.groups.put(GroupSettings(GROUP, retry_count_max=1, retry_delays_ms=(5,)))
    for queue_id in (0, 1):
        world.send(*(b"%03d" % number for number in range(200)), queue_id=queue_id, key="k")
    found = [world.read(TOPIC, queue_id) for queue_id in (0, 1)]
    answers = []
    for turn in range(2):
        several_queues = found[0][160:165] + found[1][150:155]
        runs = [found[0][130:160], found[1][130:140], found[1][140:143], several_queues] if not turn else [world.retries()[1:]]
        calls = []
        for number, run in enumerate(runs):
            messages = [failed(each, error="why", topic_incarnation=0) for each in run]
            request = SendBackRequest(consumer_group=GROUP, messages=messages, request_id=10 * turn + number + 1)
            calls += [Call(request.SerializeToString(), world.lane)] * 2
        world.send_backs.send_back(calls[::2])  # type: ignore[arg-type]
        world.store.flush()
        answers += [answer_of(call) for call in calls[::2]]
        world.send_backs.send_back(calls[1::2])  # type: ignore[arg-type]
        world.store.flush()
        answers += [answer_of(call) for call in calls[1::2]]
        world.deliver(6)
    copies = world.retries() + world.dead_letters()
    return answers, [copy.SerializeToString(deterministic=True) for copy in copies]


def test_runs_of_messages_go_back_as_single_ones_do() -> None:
    runs = RetryWorld()
    with mock.patch.object(send_backs, "copies_alike", wraps=failed_messages.copies_alike) as together:
        by_arrays = sent_back_in_runs(runs)
    assert together.call_count == 4, "once for the requests of each turn, and for their repeats"
    with mock.patch.object(send_backs, "read_alike", return_value=None):
        one_by_one = sent_back_in_runs(RetryWorld())
    assert by_arrays == one_by_one
    answers, copies = by_arrays
    assert len(copies) == 53 + 52
    assert [answer.repeated_request for answer in answers] == [False] * 4 + [True] * 4 + [False, True]
    assert {result.dead_letter for result in answers[-2].results} == {True}
    counts = runs.send_backs.counts
    assert (counts.retried, counts.dead, counts.repeated) == (53, 52, 5)


def named_runs(messages: Sequence[Record], **common: Any) -> AlikeFailures:
    """Neighbours, in one run."""
    first = messages[0]
    return AlikeFailures(
        common=FailedMessage(topic=first.topic, **common),
        queue_ids=[first.queue_id],
        first_offsets=[first.queue_offset],
        message_counts=[len(messages)],
        message_ids=b"".join(bytes.fromhex(id_of(each)) for each in messages),
    )


def failed_until_dead(*, is_named: bool) -> tuple[list[bytes], list[SendBackResponse]]:
    """What comes of messages that fail three times, of which two are retries; each request is sent twice."""
    world = RetryWorld()
    world.store.groups.put(GroupSettings(GROUP, retry_count_max=2, retry_delays_ms=(5,)))
    world.send(*(b"%03d" % number for number in range(40)))
    messages = world.read(TOPIC)
    answers = []
    for turn in range(3):
        said = {"error": f"failure {turn}"}
        request = SendBackRequest(consumer_group=GROUP, request_id=turn + 1)
        if is_named:
            request.alike.CopyFrom(named_runs(messages, **said))
        else:
            request.messages.extend(failed(each, **said) for each in messages)
        for _ in range(2):
            call = world.call(request)
            world.store.flush()
            answers.append(answer_of(call))
        world.deliver(6)
        messages = world.retries()[-40:]
    return [copy.SerializeToString() for copy in (*world.retries(), *world.dead_letters())], answers


@pytest.mark.parametrize("by_arrays", [True, False])
def test_runs_that_a_request_names_go_back_as_their_messages_do(by_arrays: bool) -> None:
    if by_arrays:
        with mock.patch.object(SendBacks, "_read", side_effect=AssertionError("read message by message")):
            copies, answers = failed_until_dead(is_named=True)
    else:
        with mock.patch.object(send_backs, "read_alike", return_value=None):
            copies, answers = failed_until_dead(is_named=True)
    assert (copies, answers) == failed_until_dead(is_named=False)
    assert len(copies) == 40 + 40 + 40
    dead = Record.FromString(copies[-1])
    assert (dead.transit.attempt, dead.transit.last_error) == (3, "failure 2")
    assert [{(each.attempt, each.dead_letter) for each in answer.results} for answer in answers[::2]] == [
        {(1, False)}, {(2, False)}, {(3, True)}
    ]  # fmt: skip
    assert [answer.repeated_request for answer in answers] == [False, True] * 3
    assert all(answer.takes_alike for answer in answers), "a consumer learns from it that it may name runs"


def failed_unlike_often(*, is_named: bool) -> tuple[list[bytes], list[SendBackResponse]]:
    """What comes of retries of which some have failed once, some twice: the latter become dead letters."""
    world = RetryWorld()
    world.store.groups.put(GroupSettings(GROUP, retry_count_max=2, retry_delays_ms=(5,)))
    world.send(*(b"%03d" % number for number in range(30)))
    messages = world.read(TOPIC)
    assert not isinstance(world.call(SendBackRequest(consumer_group=GROUP, alike=named_runs(messages[:20]))).outcome, ServiceError)
    world.deliver(6)
    again = SendBackRequest(consumer_group=GROUP, alike=named_runs(world.retries()[:10]))
    assert not isinstance(world.call(again).outcome, ServiceError)
    rest = SendBackRequest(consumer_group=GROUP, alike=named_runs(messages[20:]))
    assert not isinstance(world.call(rest).outcome, ServiceError)
    world.deliver(6)
    retries = world.retries()[10:]
    assert {each.transit.attempt for each in retries} == {1, 2}
    request = SendBackRequest(consumer_group=GROUP, request_id=7)
    if is_named:
        request.alike.CopyFrom(named_runs(retries, error="again"))
    else:
        request.messages.extend(failed(each, error="again") for each in retries)
    answers = []
    for _ in range(2):
        call = world.call(request)
        world.store.flush()
        answers.append(answer_of(call))
    world.deliver(6)
    return [copy.SerializeToString() for copy in (*world.retries(), *world.dead_letters())], answers


def test_runs_of_messages_that_failed_unlike_often_are_read_together_and_have_their_own_plans() -> None:
    with mock.patch.object(SendBacks, "_read", side_effect=AssertionError("read message by message")):
        copies, answers = failed_unlike_often(is_named=True)
    assert (copies, answers) == failed_unlike_often(is_named=False)
    assert len(copies) == 20 + 10 + 10 + 20 + 10
    assert [Record.FromString(copy).transit.attempt for copy in copies[-10:]] == [3] * 10
    first, repeat = answers
    assert {(each.attempt, each.dead_letter) for each in first.results} == {(2, False), (3, True)}
    assert [each.attempt for each in first.results] == [each.attempt for each in repeat.results]
    assert repeat.repeated_request


def test_a_request_that_names_runs_has_more_messages_than_one_that_names_each() -> None:
    world = RetryWorld(segment=1 << 20)
    world.send(*(b"%04d" % number for number in range(1025)))
    messages = world.read(TOPIC)
    for first, count in ((0, 1025), (0, 1024)):
        request = SendBackRequest(consumer_group=GROUP, alike=named_runs(messages[first : first + count], delay_ms=5))
        outcome = world.call(request).outcome
        assert isinstance(outcome, ServiceError) == (count > 1024)
    world.deliver(6)
    assert [copy.body for copy in world.retries()] == [b"%04d" % number for number in range(1024)]
    each = SendBackRequest(consumer_group=GROUP, messages=[failed(message) for message in messages[:257]])
    assert isinstance(world.call(each).outcome, ServiceError)


def test_runs_that_are_wrong_are_refused_and_change_nothing() -> None:
    world = RetryWorld()
    world.send(b"a", b"b", b"c")
    messages = world.read(TOPIC)

    def refused(change: Callable[[AlikeFailures], Any]) -> ServiceError:
        request = SendBackRequest(consumer_group=GROUP, alike=named_runs(messages))
        change(request.alike)
        outcome = world.call(request).outcome
        assert isinstance(outcome, ServiceError)
        return outcome

    assert "alike: has not an id" in refused(lambda alike: setattr(alike, "message_ids", b"x")).message
    other = refused(lambda alike: setattr(alike, "message_ids", bytes(60)))
    assert "messages[0].message_id" in other.message
    gone = refused(lambda alike: alike.first_offsets.__setitem__(0, 1))
    assert gone.reason == "INVALID_ARGUMENT", "the ids are those of others"
    with_third = named_runs(messages)
    with_third.MergeFrom(named_runs(messages[2:]))
    with_third.ClearField("message_ids")
    twice = refused(lambda alike: alike.CopyFrom(with_third))
    assert "names a message twice" in twice.message
    assert refused(lambda alike: setattr(alike.common, "delay_level", 99)).reason == "ILLEGAL_DELAY"
    world.deliver(10_001)
    assert world.retries() == []


def sent_back_here_and_there(world: RetryWorld, errors: Callable[[int], str]) -> list[bytes]:
    """What comes of a few messages of several queues and topics, which fail twice."""
    world.store.groups.put(GroupSettings(GROUP, retry_count_max=1, retry_delays_ms=(5,)))
    world.store.topics.create(TopicConfig("other", 1, 1))
    for topic, queue_id in ((TOPIC, 0), (TOPIC, 1), ("other", 0)):
        world.send(*(b"%03d" % number for number in range(100)), topic=topic, queue_id=queue_id)
        world.send(b"of another size", topic=topic, queue_id=queue_id)
    chosen = [*world.read(TOPIC)[0::7], *world.read(TOPIC, 1)[90::-9], *world.read("other")[99:95:-1], world.read(TOPIC)[-1]]
    for turn in range(2):
        messages = [failed(each, error=errors(number)) for number, each in enumerate(chosen)]
        results = world.send_back(messages, request_id=turn + 1).results
        assert [(result.attempt, result.dead_letter) for result in results] == [(turn + 1, bool(turn))] * len(chosen)
        world.deliver(6)
        chosen = world.retries()[2::3]
    return [copy.SerializeToString() for copy in (*world.retries(), *world.dead_letters())]


@pytest.mark.parametrize("errors", [lambda number: "why", lambda number: f"why {number}"])
def test_messages_that_are_no_neighbours_go_back_by_arrays_as_single_ones_do(errors: Callable[[int], str]) -> None:
    world = RetryWorld()
    with mock.patch.object(failed_messages, "_read", side_effect=AssertionError("looked up one by one")):
        by_arrays = sent_back_here_and_there(world, errors)
    with (
        mock.patch.object(send_backs, "read_alike", return_value=None),
        mock.patch.object(failed_messages, "TOGETHER_MIN", 1 << 30),
    ):
        one_by_one = sent_back_here_and_there(RetryWorld(), errors)
    assert by_arrays == one_by_one
    assert len(by_arrays) == 31 + 10


@pytest.mark.parametrize("error", ["why", None])
def test_an_entry_that_leads_to_another_message_is_not_believed(error: str | None) -> None:
    world = RetryWorld()
    world.send(*(b"%03d" % number for number in range(20)))
    world.send(*(b"%03d" % number for number in range(20)), queue_id=1)
    real = world.store.entries_at

    def misled(topic: str, queue_id: int, queue_offsets: Any) -> Any:
        return real(topic, 1 - queue_id, queue_offsets)

    chosen = world.read(TOPIC)[3:15:2]
    backs = [failed(each, message_id="", error=error or f"of {number}") for number, each in enumerate(chosen)]
    with mock.patch.object(world.store, "entries_at", side_effect=misled) as asked:
        assert len(world.send_back(backs).results) == 6
    assert asked.called
    world.deliver(10_001)
    assert [(copy.body, copy.transit.origin_queue_id) for copy in world.retries()] == [(each.body, 0) for each in chosen]


def test_of_messages_that_are_no_neighbours_one_that_is_gone_is_told() -> None:
    world = RetryWorld()
    world.send(*(b"%03d" % number for number in range(20)))
    chosen = [failed(each) for each in world.read(TOPIC)[3:15:2]]
    gone = FailedMessage(topic=TOPIC, queue_offset=20, message_id="0" * 40)
    error = refusal(lambda: world.send_back([*chosen, gone]))
    assert (error.reason, error.metadata["queue_offset"]) == ("OFFSET_OUT_OF_RANGE", "20")
    other = FailedMessage(topic=TOPIC, queue_offset=19, message_id="0" * 40)
    error = refusal(lambda: world.send_back([*chosen, other]))
    assert "is not that of the message at topic/0@19" in error.message


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"message_id": "0" * 40}, "INVALID_ARGUMENT"),
        ({"topic_incarnation": 1}, "TOPIC_RECREATED"),
        ({"queue_id": 7}, "QUEUE_NOT_FOUND"),
        ({"topic": "absent"}, "TOPIC_NOT_FOUND"),
        ({"topic": retry_topic("other")}, "INVALID_ARGUMENT"),
        ({"delay_level": 99}, "ILLEGAL_DELAY"),
    ],
)
def test_a_run_that_is_refused_is_told_why_and_harms_no_other(fields: dict[str, Any], reason: str) -> None:
    world = RetryWorld()
    world.send(*(b"%03d" % number for number in range(200)))
    messages = world.read(TOPIC)
    payloads = []
    for run, more in ((messages[130:140], {}), (messages[140:150], fields)):
        backs = [failed(each, **more) for each in run]
        payloads.append(SendBackRequest(consumer_group=GROUP, messages=backs).SerializeToString())
    good, bad = (Call(payload, world.lane) for payload in payloads)
    world.send_backs.send_back([good, bad])  # type: ignore[list-item]
    world.store.flush()
    assert len(answer_of(good).results) == 10
    assert isinstance(bad.outcome, ServiceError)
    assert bad.outcome.reason == reason
    world.deliver(10_001)
    assert len(world.retries()) == 10


def test_in_one_turn_a_request_that_is_refused_harms_no_other() -> None:
    world = RetryWorld()
    world.send(b"a", b"b", b"c")
    first, gone, last = requests_of(world, [0, 77, 2], [1, 2, 3])
    assert isinstance(gone.outcome, ServiceError)
    assert gone.outcome.reason == "OFFSET_OUT_OF_RANGE"
    assert gone.outcome.message.startswith("messages[0]:")
    assert not answer_of(first).repeated_request
    assert not answer_of(last).repeated_request
    world.deliver(10_001)
    assert [copy.body for copy in world.retries()] == [b"a", b"c"]


@pytest.mark.parametrize("is_known_before", [False, True])
def test_in_one_turn_a_request_that_comes_twice_is_done_once(is_known_before: bool) -> None:
    world = RetryWorld()
    world.send(b"a", b"b", b"c")
    if is_known_before:
        assert not answer_of(requests_of(world, [1], [2])[0]).repeated_request
    calls = requests_of(world, [0, 1, 1, 2], [1, 2, 2, 3])
    repeated = [answer_of(call).repeated_request for call in calls]
    assert repeated == [False, is_known_before, True, False]
    world.deliver(10_001)
    assert sorted(copy.body for copy in world.retries()) == [b"a", b"b", b"c"]
    assert world.send_backs.counts.retried == 3


def test_large_messages_go_back_one_by_one() -> None:
    world = RetryWorld(segment=32 << 20)
    world.send(bytes(4 << 20), bytes(4 << 20), b"x")
    messages = world.read(TOPIC)
    error = refusal(lambda: world.send_back(messages))
    assert error.reason == "MESSAGE_TOO_LARGE"
    for message in messages:
        world.send_back([message])


def one(topic: str = TOPIC, **fields: Any) -> SendBackRequest:
    """A request of a good group for one message."""
    message = FailedMessage(**{"topic": topic, **fields})
    return SendBackRequest(consumer_group="g", messages=[message])


def of(group: str, *messages: FailedMessage) -> SendBackRequest:
    return SendBackRequest(consumer_group=group, messages=messages)


@pytest.mark.parametrize(
    ("request_", "reason", "words"),
    [
        (of("", FailedMessage(topic=TOPIC)), "INVALID_ARGUMENT", "consumer_group"),
        (of("%RETRY%g", FailedMessage(topic=TOPIC)), "INVALID_ARGUMENT", "consumer_group"),
        (of("g"), "INVALID_ARGUMENT", "1 to 256"),
        (of("g", *[FailedMessage(topic=TOPIC)] * 257), "INVALID_ARGUMENT", "1 to 256"),
        (of("g", *[FailedMessage(topic=TOPIC)] * 2), "INVALID_ARGUMENT", "twice"),
        (one("nobody"), "TOPIC_NOT_FOUND", "nobody"),
        (one("%SYS%GROUPS"), "INVALID_ARGUMENT", "topic"),
        (one("%RETRY%h"), "INVALID_ARGUMENT", "another group"),
        (one(queue_id=2), "QUEUE_NOT_FOUND", "2"),
        (one(queue_offset=-1), "OFFSET_OUT_OF_RANGE", "-1"),
        (one(topic_incarnation=3), "TOPIC_RECREATED", "3"),
        (one(message_id="x"), "INVALID_ARGUMENT", "message_id"),
        (one(message_id="0" * 40), "INVALID_ARGUMENT", "is not that of"),
        (one(attempt=-1), "INVALID_ARGUMENT", "attempt"),
        (one(attempt=(1 << 31) - 1), "INVALID_ARGUMENT", "attempt"),
        (one(delay_level=19), "ILLEGAL_DELAY", "19"),
        (one(delay_level=0), "ILLEGAL_DELAY", "0"),
        (one(delay_ms=-1), "ILLEGAL_DELAY", "below zero"),
        (one(delay_ms=40 * 86_400_000 + 1), "ILLEGAL_DELAY", "40 days"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(
    request_: SendBackRequest, reason: str, words: str
) -> None:
    world = RetryWorld()
    world.send(b"a")
    before = world.store.appended_position, world.store.topics.snapshot()
    call = world.call(request_)
    assert isinstance(call.outcome, ServiceError)
    assert call.outcome.reason == reason
    assert words in str(call.outcome)
    assert (world.store.appended_position, world.store.topics.snapshot()) == before


def test_what_does_not_parse_is_refused() -> None:
    world = RetryWorld()
    call = world.call(SendBackRequest())
    call.payload, call.outcome = b"\xff", None
    world.send_backs.send_back([call])  # type: ignore[list-item]
    assert isinstance(call.outcome, ServiceError)


def test_a_request_that_is_sent_again_is_done_once_over_restarts_too() -> None:
    world = RetryWorld()
    world.send(b"a", b"b")
    messages = world.read(TOPIC)

    def again(**fields: Any) -> bool:
        return world.send_back(messages, request_id=5, **fields).repeated_request

    assert not again()
    answer = world.send_back(messages, request_id=5)
    assert answer.repeated_request
    assert [(result.attempt, result.due_time_ms) for result in answer.results] == [(1, 0)] * 2
    world.restart()
    assert again()
    world.restart(world.disk.killed())
    assert again()
    assert not again(error="another request, though with the same id")
    world.clock.time_ms += REMEMBERED_MS + 1
    world.send_back(messages[:1], request_id=6)  # time is what records say
    assert not again()
    world.deliver(10**6)
    assert len(world.retries()) == 2 + 2 + 1 + 2


@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_request_that_was_done_is_known_though_its_messages_are_gone(count: int) -> None:
    """Whoever was refused would give back those that are still there in other requests: they would come twice."""
    world = RetryWorld(segment=4096)
    world.send(*(b"%d" % number for number in range(count)))
    messages = world.read(TOPIC)
    assert not world.send_back(messages, request_id=3).repeated_request
    for _ in range(10):
        world.send(bytes(500))
    world.store.checkpoint()
    world.store.delete_segments_below(world.store.appended_position)
    assert refusal(lambda: world.send_back(messages, request_id=4)).reason == "OFFSET_OUT_OF_RANGE"
    answer = world.send_back(messages, request_id=3)
    assert answer.repeated_request
    assert [(each.attempt, each.due_time_ms, each.dead_letter) for each in answer.results] == [(0, 0, False)] * count
    world.deliver(10**6)
    assert len(world.retries()) == count


@pytest.mark.parametrize("count", [1, 3, 9])
def test_what_a_master_before_has_given_out_is_no_mistake_at_one_that_has_just_begun(count: int) -> None:
    """It does not know yet that it is confirmed. Who is refused for good takes them for done, or gives them back in other requests."""
    world = RetryWorld()
    world.send(*(b"%d" % number for number in range(count)))
    messages = world.read(TOPIC)
    world.restart()
    positions = world.store.positions
    positions.replicated = positions.readable = 0
    positions.wait_for_replicas(True)
    world.make_parts()
    assert world.read(TOPIC) == []
    behind = refusal(lambda: world.send_back(messages, request_id=3))
    assert behind.reason == "REPLICA_BEHIND"
    assert behind.retry_delay_ms
    positions.note_replicated(world.store.appended_position)
    world.lane.waits = True
    request = SendBackRequest(consumer_group=GROUP, messages=map(failed, messages), request_id=3)
    calls = [world.call(request)]
    world.lane.run()
    positions.note_replicated(world.store.appended_position)
    world.store.flush()
    assert len(answer_of(calls[0]).results) == count
    # From here on an offset that is too high is a mistake.
    wrong = FailedMessage(topic=TOPIC, queue_offset=count)
    assert refusal(lambda: world.send_back([wrong], request_id=4)).reason == "OFFSET_OUT_OF_RANGE"


def test_two_of_the_same_that_arrive_together_are_done_once() -> None:
    world = RetryWorld()
    world.send(b"a")
    request = SendBackRequest(
        consumer_group=GROUP, messages=[failed(world.read(TOPIC)[0])], request_id=9
    )
    world.lane.waits = True
    calls = [world.call(request), world.call(request)]
    world.lane.run()
    world.store.flush()
    assert all(isinstance(call.outcome, bytes) for call in calls)
    world.deliver(10**6)
    assert len(world.retries()) == 1
    assert (world.send_backs.counts.retried, world.send_backs.counts.repeated) == (1, 1)


def test_without_a_request_id_each_request_makes_copies() -> None:
    world = RetryWorld()
    world.send(b"a")
    for _ in range(2):
        assert not world.send_back(world.read(TOPIC)).repeated_request
    world.deliver(10**6)
    assert len(world.retries()) == 2


def test_requests_that_are_remembered_outlive_their_segments() -> None:
    world = RetryWorld(segment=4096)
    world.send(b"a")
    messages = world.read(TOPIC)
    world.send_back(messages, request_id=3, delay_ms=30 * 86_400_000)
    for _ in range(40):
        world.send(bytes(500))
    keys = [key for key, _ in world.store.groups._sent_back.all()]
    world.store.checkpoint()
    world.store.delete_segments_below(world.store.appended_position)
    assert world.store.min_position > 4096
    world.store.close()
    for path in [path for path in world.disk.list("/s") if path != "commitlog"]:
        world.disk.remove(f"/s/{path}")
    world.start()
    assert [world.store.groups.has_sent_back(key) for key in keys] == [True]


def test_it_is_answered_when_it_is_stored() -> None:
    world = RetryWorld()
    world.send(b"a")
    world.send_back(world.read(TOPIC))
    call = world.call(
        SendBackRequest(consumer_group=GROUP, messages=[failed(world.read(TOPIC)[0])])
    )
    assert not call.answered
    world.store.flush()
    assert isinstance(call.outcome, bytes)


def test_a_topic_that_is_deleted_meanwhile_refuses() -> None:
    world = RetryWorld()
    world.send(b"a")
    request = SendBackRequest(consumer_group=GROUP, messages=[failed(world.read(TOPIC)[0])])
    world.lane.waits = True
    call = world.call(request)
    world.store.delete_topic(TOPIC)
    world.lane.run()
    assert isinstance(call.outcome, ServiceError)
    assert call.outcome.reason == "TOPIC_NOT_FOUND"
    assert world.store.topics.find(retry_topic(GROUP)) is None


@pytest.mark.parametrize("attempt", [-1, (1 << 31) - 1])
def test_an_attempt_beyond_its_bounds_is_refused_with_both(attempt: int) -> None:
    world = RetryWorld()
    world.send(b"a")
    (message,) = world.read(TOPIC)
    refused = refusal(lambda: world.send_back([message], attempt=attempt))
    assert f"is {attempt}, the message was handed out 0 times before: give that or more, 2147483646 at most" in refused.message
    assert world.send_back([message], attempt=(1 << 31) - 2).results[0].dead_letter


def test_pending_messages_have_a_limit_that_dead_letters_do_not_count_for() -> None:
    world = RetryWorld(delayed_count_max=1)
    world.send(b"a", b"b")
    first, second = world.read(TOPIC)
    world.send_back([first])
    assert refusal(lambda: world.send_back([second])).reason == "TOO_MANY"
    assert world.send_back([second], dead_letter=True).results[0].dead_letter


def test_topics_of_groups_come_with_their_first_messages_and_stay() -> None:
    world = RetryWorld()
    world.send(b"a", b"b")
    first, second = world.read(TOPIC)
    world.send_back([first])
    world.send_back([second], dead_letter=True)
    names = (retry_topic(GROUP), dead_letter_topic(GROUP))
    for _ in range(2):
        for name in names:
            topic = world.store.topics.find(name)
            assert topic is not None
            assert (topic.write_queues, topic.read_queues, topic.writable) == (1, 1, False)
        world.restart()
    world.store.delete_topic(names[0])
    world.deliver(10**6)
    assert world.store.topics.find(names[0]) is None, "its pending messages go with it"


def test_a_topic_of_a_group_of_which_only_its_messages_tell_is_restored() -> None:
    world = RetryWorld()
    world.send(b"a")
    world.send_back(world.read(TOPIC), dead_letter=True)
    name = dead_letter_topic(GROUP)
    before = world.store.topics.find(name)
    assert before is not None
    table = world.store.topics
    del table._by_name[name]
    (restored,) = table.restore({name: 1, "%SYS%GROUPS": 1, "%odd": 1}, 8)
    assert (restored.name, restored.read_queues, restored.writable) == (name, 1, False)


ERRORS = st.text(max_size=300)


@hypothesis_settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.binary(max_size=300), ERRORS, st.integers(0, 30)), min_size=1, max_size=8),
    st.integers(0, 20),
    st.permutations(range(8)),
)
def test_copies_are_their_messages_whatever_was_sent_back(
    messages: list[tuple[bytes, str, int]], limit: int, order: list[int]
) -> None:
    world = RetryWorld()
    world.store.groups.put(GroupSettings(GROUP, retry_count_max=limit, retry_delays_ms=(1,)))
    world.send(*(body for body, _, _ in messages))
    stored = world.read(TOPIC)
    rows = [row for row in order if row < len(messages)]
    results = world.send_back(
        [failed(stored[row], error=messages[row][1], attempt=messages[row][2]) for row in rows]
    ).results
    world.deliver(2)
    copies = {id_of(copy): copy for copy in [*world.retries(), *world.dead_letters()]}
    dead = {id_of(copy) for copy in world.dead_letters()}
    for row, result in zip(rows, results, strict=True):
        body, error, attempt = messages[row]
        copy = copies.pop(id_of(stored[row]))
        assert (copy.body, copy.crc32c) == (body, stored[row].crc32c)
        assert copy.transit.attempt == result.attempt == attempt + 1
        assert error.encode().startswith(copy.transit.last_error.encode())
        assert result.dead_letter == (attempt + 1 > limit) == (id_of(copy) in dead)
    assert not copies


def work(world: RetryWorld, told: dict[str, int]) -> None:
    """Sends, fails, retries, dies. `told`: by message id, the attempts that the answers have told of."""

    def send_back(messages: list[Record], request_id: int, **fields: Any) -> None:
        results = world.send_back(messages, request_id=request_id, **fields).results
        for message, result in zip(messages, results, strict=True):
            told[id_of(message)] = result.attempt

    world.send(b"a", b"b", b"c")
    messages = world.read(TOPIC)
    send_back(messages[:2], 1, delay_ms=5)
    world.store.checkpoint()
    world.deliver(6)
    send_back(world.retries()[:1], 2, delay_ms=5)
    send_back(messages[2:], 3, dead_letter=True)
    world.deliver(6)
    send_back(world.retries()[2:], 4, dead_letter=True)


@pytest.mark.parametrize("ends", ["kill", "power cut"])
def test_whatever_ends_it_what_was_answered_is_there_and_once(ends: str) -> None:
    """At each operation of the disk in turn."""
    for number in range(1, 400):
        world = RetryWorld()
        world.store.flush()
        world.disk.fail_at(number, Fault.CRASH)
        told: dict[str, int] = {}
        ended = False
        try:
            work(world, told)
            ended = True
        except SimulatedCrash:
            pass
        disk = world.disk.killed() if ends == "kill" else world.disk.crash(random.Random(number))
        world.restart(disk)
        world.deliver(10**6)
        found: dict[str, list[int]] = {}
        for copy in [*world.retries(), *world.dead_letters()]:
            found.setdefault(id_of(copy), []).append(copy.transit.attempt)
        for message_id, attempt in told.items():
            assert attempt in found[message_id], (number, message_id)
        for attempts in found.values():
            assert len(attempts) == len(set(attempts)), (number, "a copy twice")
        world.store.close()
        assert verify("/s", disk=world.disk) == []
        if ended:
            return
    raise AssertionError("the work never came to its end")


def test_no_more_is_read_than_is_sent_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_backs, "SIZE_MAX_BYTES", 20_000)
    monkeypatch.setattr(failed_messages, "TOGETHER_SIZE_MAX_BYTES", 20_000)
    monkeypatch.setattr(failed_messages, "READ_SIZE_BYTES", 5_000)
    world = RetryWorld()
    for number in range(30):
        world.send(b"%02d" % number + bytes(4_000))
    messages: list[Record] = []
    while len(messages) < 30:
        messages += world.read(TOPIC, 0, len(messages))
    read = mock.Mock(wraps=world.store.read_to_copy)
    monkeypatch.setattr(world.store, "read_to_copy", read)
    error = refusal(lambda: world.send_back(messages))
    assert (error.reason, error.metadata["limit_bytes"]) == ("MESSAGE_TOO_LARGE", "20000")
    assert read.call_count == 5
    assert len(world.send_back(messages[:4]).results) == 4


@pytest.mark.parametrize("dead_letter", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_a_message_in_which_a_bit_flips_is_not_sent_back(count: int, dead_letter: bool) -> None:
    world = RetryWorld()
    for number in range(count):
        world.send(b"poison-%02d" % number)
    messages = world.read(TOPIC)
    bad = messages.pop(count // 2)
    flip_in_log(world.disk, world.store, bad.physical_offset)
    before = world.store.appended_position
    error = refusal(lambda: world.send_back([*messages, bad], dead_letter=dead_letter))
    assert (error.reason, world.store.appended_position) == ("CORRUPT_LOG", before)
    (damage,) = world.store.damaged_ranges
    assert damage.start_position <= bad.physical_offset < damage.end_position
    if messages:
        world.send_back(messages, dead_letter=dead_letter)
        world.deliver(10_001)
        copies = world.dead_letters() if dead_letter else world.retries()
        assert [copy.body for copy in copies] == [message.body for message in messages]


@pytest.mark.parametrize("count", [1, 40])
def test_a_message_that_came_damaged_is_sent_back_as_it_came(count: int) -> None:
    """Its seal holds: it never was anything else, and waits for nobody who heals it."""
    world = RetryWorld()
    template = RecordTemplate(TOPIC, 7, 0)
    records = [template.encode(b"poison-%02d" % number, number, 5) for number in range(count)]
    fields = [encode_record_field(record) for record in records]
    fields[0] = fields[0].replace(b"poison", b"p0ison")
    region = prove_region(bytearray().join(fields), TOPIC, [len(record) for record in records])
    assert region is not None
    world.store.append([AppendRequest(region, 0)])
    world.store.flush()
    messages = world.read(TOPIC)
    world.send_back(messages)
    world.deliver(10_001)
    assert [(copy.body, copy.crc32c) for copy in world.retries()] == [(each.body, each.crc32c) for each in messages]
    assert world.retries()[0].body == b"p0ison-00"
    assert world.store.damaged_ranges == []


def test_what_somebody_else_has_found_damaged_is_not_given_to_be_copied() -> None:
    """A second reader finds nothing new there: the part is in quarantine already, and no seal is asked."""
    world = RetryWorld()
    world.send(b"poison")
    result = world.store.read(TOPIC, 0, 0, 1, 1_000)
    sound = result.octets()
    assert world.store.octets_to_copy(result) == sound
    flip_in_log(world.disk, world.store, world.read(TOPIC)[0].physical_offset)
    assert [world.store.octets_to_copy(result) for _ in range(2)] == [None, None]
    assert len(world.store.damaged_ranges) == 1
