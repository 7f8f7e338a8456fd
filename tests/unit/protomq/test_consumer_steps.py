"""What a pull consumer decides, driven without sockets, clocks and sleeps: where it begins, what it commits, how often it asks whom."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protomq import MessageQueue
from protomq._consumer_calls import Limits
from protomq._consumer_options import ConsumerOptions
from protomq._consumer_steps import POLL_CALL_TIMEOUT_S, RETRY_RESOLVE_S, ConsumerSteps
from protomq._filters import NO_FILTER, MessageFilter
from protomq._hook_points import HookPoints
from protomq._methods import COMMIT_OFFSETS, GET_OFFSETS, GET_QUEUE_RANGE, PULL, SEARCH_OFFSET
from protomq._pull_logic import Ticket
from protomq._retry import GOING, LAST_COMMIT, Retries
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import (
    CallCancelledError,
    ClosedError,
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    DeadlineExceededError,
    IllegalFilterError,
    NotMasterError,
    NotPermittedError,
    OffsetOutOfRangeError,
    ProtomqError,
    QueueNotFoundError,
    RequestTimeoutError,
    SystemBusyError,
    TopicNotFoundError,
    TopicRecreatedError,
    UnsupportedError,
)
from protomq.hooks import CommitContext, Hook
from protomq.v1 import consumer_service_pb2 as pb
from protomq.v1 import pull_service_pb2
from protomq.wire.record import RecordTemplate
from tests.support.examples import examples
from tests.support.fake_driver import FakeWorld, route_of

TEMPLATE = RecordTemplate("T", 1, 0)


class Brokers:
    """Brokers of topic T: what their queues hold, and what is committed there."""

    def __init__(self, world: FakeWorld) -> None:
        self.ends: dict[MessageQueue, int] = dict.fromkeys(world.routes["T"].read_queues, 0)
        self.committed: dict[MessageQueue, int] = {}
        self.incarnation = 7
        self.suggested_broker_id = 0
        self.reset_epoch = 0
        self.stale: dict[MessageQueue, int] | None = None
        """What the slaves know, while they stand in for the masters."""
        world.answers |= {
            GET_OFFSETS: self._get_offsets,
            GET_QUEUE_RANGE: self._get_range,
            SEARCH_OFFSET: self._search,
            COMMIT_OFFSETS: self._commit,
            PULL: self._pull,
        }

    def _get_offsets(self, server: str, request: bytes) -> bytes:
        asked = pb.GetOffsetsRequest.FromString(request)
        found = [
            pb.QueueOffset(queue_id=queue.queue_id, queue_offset=offset, reset_epoch=self.reset_epoch)
            for queue, offset in (self.committed if self.stale is None else self.stale).items()
            if queue[:2] == (asked.topic, server) and queue.queue_id in asked.queue_ids
        ]
        from_slave = self.stale is not None
        return pb.GetOffsetsResponse(
            offsets=found, topic_incarnation=self.incarnation, from_slave=from_slave
        ).SerializeToString()

    def _get_range(self, server: str, request: bytes) -> bytes:
        asked = pb.GetQueueRangeRequest.FromString(request)
        found = [
            pb.QueueRange(queue_id=queue.queue_id, end_offset=end)
            for queue, end in self.ends.items()
            if queue[:2] == (asked.topic, server) and (queue.queue_id in asked.queue_ids or not asked.queue_ids)
        ]
        return pb.GetQueueRangeResponse(ranges=found, topic_incarnation=self.incarnation).SerializeToString()

    def _search(self, server: str, request: bytes) -> bytes:
        return pb.SearchOffsetResponse(queue_offset=3, topic_incarnation=self.incarnation).SerializeToString()

    def _commit(self, server: str, request: bytes) -> bytes:
        if self.stale is not None:
            raise NotMasterError("a slave")
        answer = pb.CommitOffsetsResponse()
        for one in pb.CommitOffsetsRequest.FromString(request).offsets:
            queue = MessageQueue(one.topic, server, one.queue_id)
            current = self.committed.get(queue)
            if current is not None and one.HasField("began_offset") and not one.began_offset <= current <= one.queue_offset:
                one.queue_offset = current
                answer.kept.append(one)
            else:
                self.committed[queue] = one.queue_offset
        return answer.SerializeToString()

    def _pull(self, server: str, request: bytes) -> bytes:
        asked = pull_service_pb2.PullRequest.FromString(request)
        if asked.topic_incarnation not in (0, self.incarnation):
            raise TopicRecreatedError("made again")
        end = self.ends[MessageQueue(asked.topic, server, asked.queue_id)]
        answer = pull_service_pb2.PullResponse(
            end_offset=end, topic_incarnation=self.incarnation, suggested_broker_id=self.suggested_broker_id
        )
        upto = min(asked.queue_offset + 3, end)
        for offset in range(asked.queue_offset, upto):
            record = answer.records.add()
            record.ParseFromString(TEMPLATE.encode(b"%d" % offset, offset, 0))
            record.queue_offset = offset
        answer.next_offset = upto
        found, none = pull_service_pb2.PULL_STATUS_FOUND, pull_service_pb2.PULL_STATUS_NO_NEW_MSG
        answer.status = found if upto > asked.queue_offset else none
        return answer.SerializeToString()


def asks_for(delay_ms: int) -> SystemBusyError:
    """A refusal that says when to come again."""
    error = SystemBusyError("busy")
    error.retry_delay_ms = delay_ms
    return error


class Consumer:
    """ConsumerSteps with the loop of a flavour, in one line after the other."""

    def __init__(self, world: FakeWorld, **options: object) -> None:
        self.world = world
        self.steps = ConsumerSteps(ConsumerOptions(group="g", **options), world.now_s)  # type: ignore[arg-type]

    def subscribe(self, *tags: str) -> None:
        self.world.driver.run(self.steps.subscribe("T", tags, NO_FILTER))

    def poll(self, count_max: int = 100) -> list[tuple[MessageQueue, int]]:
        """One round: what is due is pulled, what is there is handed out."""
        run, steps = self.world.driver.run, self.steps
        steps.state.user_came_back()
        if not steps.is_settled(self.world.routes.get):
            run(steps.before_poll())
        for queue in steps.state.due(self.world.now_s()):
            ticket = steps.state.begin(queue)
            address = run(steps.address_for(ticket))
            if address is None:
                continue
            try:
                answer = self.world.call(address, PULL, (steps.state.encode_request(ticket),), 20.0)
            except ProtomqError as error:
                run(steps.take_error(ticket, error))
            else:
                steps.take_answer(ticket, answer)
        steps.raise_trouble()
        if not steps.group_due_in_s(self.world.now_s()):
            run(steps.before_poll())
        return [(message.queue, message.queue_offset) for message in steps.state.take(count_max)]


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld(route_of("T", "a", "b", queues=2))


@pytest.fixture
def brokers(world: FakeWorld) -> Brokers:
    return Brokers(world)


def calls(world: FakeWorld, method: MethodInfo) -> list[str]:
    return [server for server, called, *_ in world.calls if called == method]


A0, A1, B0, B1 = (MessageQueue("T", name, queue_id) for name in "ab" for queue_id in (0, 1))


def test_each_broker_is_asked_once_for_all_its_queues(world: FakeWorld, brokers: Brokers) -> None:
    brokers.ends |= {A0: 9, A1: 9}
    brokers.committed |= {A0: 4, B0: 0, B1: 0}
    consumer = Consumer(world)
    consumer.subscribe()
    assert calls(world, GET_OFFSETS) == ["a", "b"]
    assert calls(world, GET_QUEUE_RANGE) == ["a"]  # At b all queues have a committed offset.
    assert {queue: consumer.steps.state.position(queue) for queue in (A0, A1, B0)} == {A0: 4, A1: 0, B0: 0}


@pytest.mark.parametrize("answers", [True, False])
def test_a_poll_asks_for_resets_before_it_goes_on_with_queues_that_were_paused(world: FakeWorld, brokers: Brokers, answers: bool) -> None:
    brokers.ends |= {A0: 9, B0: 9}
    consumer = Consumer(world)
    consumer.subscribe()
    consumer.steps.state.pause([A0, B0])
    assert consumer.poll() == []
    world.calls.clear()
    consumer.poll()
    assert calls(world, GET_OFFSETS) == [], "nothing goes on"
    consumer.steps.state.pause([A0], is_paused=False)
    assert consumer.steps.group_due_in_s(world.now_s()) == 0
    if answers:
        brokers.committed[A0], brokers.reset_epoch = 8, 77
    else:
        world.failures["a"].append(ConnectFailedError("down"))
    assert consumer.poll(3) == ([(A0, 8)] if answers else [(A0, 0), (A0, 1), (A0, 2)])
    assert calls(world, GET_OFFSETS) == ["a"]
    assert consumer.steps.state.paused == (B0,)


def test_a_poll_that_is_cancelled_while_it_asks_for_resets_leaves_that_to_the_next_one(world: FakeWorld, brokers: Brokers) -> None:
    brokers.ends[A0] = 9
    consumer = Consumer(world)
    consumer.subscribe()
    consumer.steps.state.pause([A0])
    assert consumer.poll() == []
    brokers.committed[A0], brokers.reset_epoch = 8, 77
    consumer.steps.state.pause([A0], is_paused=False)
    answer, world.answers[GET_OFFSETS] = world.answers[GET_OFFSETS], mock.Mock(side_effect=asyncio.CancelledError)
    with pytest.raises(asyncio.CancelledError):
        consumer.poll()
    world.answers[GET_OFFSETS] = answer
    assert consumer.poll() == [(A0, 8)]


def test_a_reset_is_followed_in_a_queue_whose_first_answer_is_on_its_way(world: FakeWorld, brokers: Brokers) -> None:
    """Its topic was made after it was subscribed to. The answer was given before the reset."""
    world.failures["a"].extend([TopicNotFoundError("not made yet")] * 3)
    consumer = Consumer(world)
    consumer.subscribe()
    state = consumer.steps.state
    assert (state.position(A0), state.incarnation(A0)) == (0, 0)
    world.failures["a"].clear()
    brokers.ends[A0] = 9
    ticket = state.begin(A0)
    answer = world.call(BrokerAddress("a", "a", "a"), PULL, (state.encode_request(ticket),), 20.0)
    brokers.committed[A0], brokers.reset_epoch = 8, 77
    world.driver.run(consumer.steps.follow_resets())
    assert state.incarnation(A0) == brokers.incarnation
    consumer.steps.take_answer(ticket, answer)
    assert consumer.poll() == [(A0, 8)]


@pytest.mark.parametrize("has_slave", [True, False])
def test_a_master_that_fails_is_no_slave_that_is_left(world: FakeWorld, brokers: Brokers, has_slave: bool) -> None:
    """The route lacks the slave that was suggested, as one does of which the name server has not heard yet."""
    slave = BrokerAddress("a", "slave:1", "slave:1")
    if has_slave:
        world.routes["T"] = replace(world.routes["T"], slaves={("a", 1): slave})
    consumer = Consumer(world)
    consumer.subscribe()
    state = consumer.steps.state
    brokers.suggested_broker_id = 1
    consumer.poll()
    assert state.suggested_broker_id(A0) == 1
    ticket = state.begin(A0)
    address = world.driver.run(consumer.steps.address_for(ticket))
    assert address == (slave if has_slave else world.routes["T"].brokers["a"])
    world.driver.run(consumer.steps.take_error(ticket, ConnectFailedError("down")))
    assert state.suggested_broker_id(A0) == 0
    assert (A0 in state.due(world.now_s())) == has_slave, "the master is pulled at once only if it was a slave that failed"


def test_a_broker_that_held_a_pull_was_not_silent_meanwhile(
    world: FakeWorld, brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = Consumer(world)
    consumer.subscribe()
    state = consumer.steps.state
    ticket = state.begin(A0, world.now_s())
    world.driver.run(consumer.steps.take_error(ticket, ConnectionLostError("restarts")))
    world.advance(2.0)
    ticket = state.begin(A0, world.now_s())
    world.advance(60.0)
    with caplog.at_level(logging.WARNING, "protomq"):
        consumer.steps.take_answer(ticket, brokers._pull("a", state.encode_request(ticket)))
    assert caplog.messages[-1] == "broker a answers again, after 2.0 s"


def test_when_a_broker_answers_again_all_its_queues_are_pulled_at_once(world: FakeWorld, brokers: Brokers) -> None:
    consumer = Consumer(world)
    consumer.subscribe()
    state = consumer.steps.state
    for _ in range(5):
        tickets = [state.begin(queue, world.now_s()) for queue in (A0, A1, B0)]
        for ticket in tickets:
            world.driver.run(consumer.steps.take_error(ticket, ConnectFailedError("down")))
        world.advance(3.0)
    (*others, first) = tickets = [state.begin(queue, world.now_s()) for queue in (A1, B0, A0)]
    for ticket in others:
        world.driver.run(consumer.steps.take_error(ticket, ConnectFailedError("down")))
    assert state.due(world.now_s()) == [B1]
    consumer.steps.take_answer(first, brokers._pull("a", state.encode_request(first)))
    assert set(state.due(world.now_s())) == {A0, A1, B1}


def test_a_consumer_that_is_closed_leaves_no_slave(world: FakeWorld, brokers: Brokers, caplog: pytest.LogCaptureFixture) -> None:
    world.routes["T"] = replace(world.routes["T"], slaves={("a", 1): BrokerAddress("a", "slave:1", "slave:1")})
    consumer = Consumer(world)
    consumer.subscribe()
    brokers.suggested_broker_id = 1
    consumer.poll()
    with caplog.at_level(logging.INFO, "protomq"):
        world.driver.run(consumer.steps.take_error(consumer.steps.state.begin(A0), ClosedError("the transport is closed")))
    assert not [text for text in caplog.messages if "master" in text]


BAD = IllegalFilterError("SQL92 filter, line 1, column 8: what is here")


@pytest.mark.parametrize("error", [BAD, UnsupportedError("no CEL here")])
def test_what_a_broker_has_against_a_filter_is_raised_and_nothing_is_subscribed(
    world: FakeWorld, brokers: Brokers, error: ProtomqError
) -> None:
    world.failures["a"].append(ConnectFailedError("down"))
    world.failures["b"].append(error)
    steps = Consumer(world).steps
    with pytest.raises(type(error)) as caught:
        world.driver.run(steps.subscribe("T", (), MessageFilter(2, "delay >")))
    assert caught.value is error
    assert calls(world, PULL) == ["a", "b"]
    assert (steps.subscriptions, steps.state.queues) == ({}, ())
    world.failures["a"].append(error)
    with pytest.raises(type(error)):
        world.driver.run(steps.assign((A0,), (), MessageFilter(2, "delay >")))
    assert (steps.assigned, steps.state.queues) == ((), ())


def test_a_filter_that_no_broker_can_read_now_is_told_by_the_pulls(world: FakeWorld, brokers: Brokers) -> None:
    for name, error in (("a", ConnectFailedError("down")), ("b", TopicNotFoundError("not yet"))):
        world.failures[name].append(error)
    consumer = Consumer(world)
    world.driver.run(consumer.steps.subscribe("T", (), MessageFilter(2, "delay >")))
    assert consumer.steps.state.queues == (A0, A1, B0, B1)
    world.failures["b"].append(BAD)
    with pytest.raises(IllegalFilterError) as caught:
        consumer.poll()
    assert caught.value.metadata["topic"] == "T"


def test_tags_need_no_broker_to_be_read(world: FakeWorld, brokers: Brokers) -> None:
    Consumer(world).subscribe("en")
    assert calls(world, PULL) == []


@pytest.mark.parametrize(("begin", "position"), [("earliest", 0), ("latest", 9), (datetime(2026, 1, 1, tzinfo=UTC), 3)])
def test_without_a_committed_offset_a_queue_begins_where_it_is_told(
    world: FakeWorld, brokers: Brokers, begin: object, position: int
) -> None:
    brokers.ends[A0] = 9
    consumer = Consumer(world, begin=begin)
    consumer.subscribe()
    assert consumer.steps.state.position(A0) == position


def test_a_broker_that_is_down_when_subscribed_holds_up_no_other_and_is_asked_again(
    world: FakeWorld, brokers: Brokers
) -> None:
    brokers.ends |= dict.fromkeys((A0, B0), 1)
    world.failures["a"].extend(ConnectFailedError("down") for _ in range(9))
    consumer = Consumer(world)
    consumer.subscribe()
    assert calls(world, GET_OFFSETS) == ["a", "a", "a", "b"]  # A call is tried three times.
    assert consumer.poll() == [(B0, 0)]
    # In `poll` it is asked once in a while, once and for half a second.
    tries = len(calls(world, GET_OFFSETS))
    for _ in range(5):
        consumer.poll()
    assert len(calls(world, GET_OFFSETS)) == tries
    world.advance(RETRY_RESOLVE_S)
    consumer.poll()
    assert calls(world, GET_OFFSETS)[tries:] == ["a"]
    assert world.calls[-1][3] <= 20.0
    assert min(timeout_s for *_, timeout_s in world.calls) <= POLL_CALL_TIMEOUT_S
    world.failures["a"].clear()
    world.advance(RETRY_RESOLVE_S)
    assert consumer.poll() == [(A0, 0)]


def test_what_waiting_does_not_mend_is_raised_by_subscribe(world: FakeWorld, brokers: Brokers) -> None:
    world.failures["a"].append(OffsetOutOfRangeError("no"))
    with pytest.raises(OffsetOutOfRangeError):
        Consumer(world).subscribe()


def test_a_topic_that_is_not_made_yet_begins_with_its_first_message(
    world: FakeWorld, brokers: Brokers
) -> None:
    world.failures["a"].extend(TopicNotFoundError("not yet") for _ in range(3))
    consumer = Consumer(world, begin="latest")
    consumer.subscribe()
    assert consumer.steps.state.position(A0) == 0


def test_offsets_are_committed_every_five_seconds_when_they_were_dealt_with(
    world: FakeWorld, brokers: Brokers
) -> None:
    brokers.ends[A0] = 5
    consumer = Consumer(world)
    consumer.subscribe()
    assert consumer.poll() == [(A0, 0), (A0, 1), (A0, 2)]
    world.advance(4.9)
    assert consumer.poll() == [(A0, 3), (A0, 4)]
    assert brokers.committed == {}
    world.advance(0.2)
    consumer.poll()
    assert brokers.committed[A0] == 5
    assert calls(world, COMMIT_OFFSETS) == ["a", "b"]  # Where the group is in empty queues is told, too.


def test_a_commit_in_poll_is_tried_once_and_made_up_for_by_the_next(
    world: FakeWorld, brokers: Brokers
) -> None:
    brokers.ends[A0] = 1
    consumer = Consumer(world, auto_commit_interval_s=1.0)
    consumer.subscribe()
    consumer.poll()
    world.advance(1.0)
    world.failures["a"].append(RequestTimeoutError("silent"))
    consumer.poll()
    assert calls(world, COMMIT_OFFSETS) == ["a", "b"]
    assert A0 not in brokers.committed
    world.advance(1.0)
    consumer.poll()
    assert brokers.committed[A0] == 1


@pytest.mark.parametrize("begin", ["earliest", "latest"])
def test_nothing_falls_back_where_a_member_began_by_the_word_of_a_slave(
    begin: str, world: FakeWorld, brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    """A0: the slave has an older offset. A1: it has none. B0: what was done there goes beyond. B1: no one has committed there."""
    brokers.ends |= {A0: 20, A1: 7, B0: 20, B1: 7}
    brokers.committed |= {A0: 10, A1: 6, B0: 6}
    brokers.stale = {A0: 5, B0: 5}
    consumer = Consumer(world, begin=begin, auto_commit=False)
    consumer.subscribe()
    assert "begins in T/a where a slave says" in caplog.text
    assert world.driver.run(consumer.steps.committed(A0)) == 5
    assert "is what a slave knows" in caplog.text
    assert set(consumer.poll()) >= {(A0, 7), (B0, 7)}
    brokers.stale = None  # The masters are back.
    consumer.steps.state.user_came_back()
    world.driver.run(consumer.steps.commit(None))
    assert brokers.committed == {A0: 10, A1: 6, B0: 8, B1: 7 if begin == "latest" else 3}
    positions = [consumer.steps.state.position(queue) for queue in (A0, A1, B0)]
    assert positions == [10, 6, 8], "nothing is skipped, and nothing comes again that the master knows to be done"
    caplog.clear()
    assert world.driver.run(consumer.steps.committed(A0)) == 10
    assert not caplog.text


def test_a_program_that_seeks_or_commits_back_is_obeyed_wherever_it_began(world: FakeWorld, brokers: Brokers) -> None:
    brokers.ends |= {A0: 20, A1: 20}
    brokers.committed |= {A0: 10, A1: 10}
    brokers.stale = {A0: 5, A1: 5}
    consumer = Consumer(world, auto_commit=False)
    consumer.subscribe()
    brokers.stale = None
    consumer.steps.state.seek(A0, 6)
    world.driver.run(consumer.steps.commit({A0: 6, A1: 4}))
    assert (brokers.committed[A0], brokers.committed[A1]) == (6, 4)


def test_who_does_not_resume_begins_where_it_wants_to_whatever_a_slave_says(world: FakeWorld, brokers: Brokers) -> None:
    brokers.ends[A0] = 20
    brokers.committed[A0] = 10
    brokers.stale = {A0: 5}
    consumer = Consumer(world, auto_commit=False, resume=False)
    consumer.subscribe()
    assert consumer.steps.state.began(A0) is None


def test_a_topic_that_nobody_knows_yet_may_be_one_that_a_slave_lacks(world: FakeWorld, brokers: Brokers) -> None:
    consumer = Consumer(world)
    world.failures["a"].extend(TopicNotFoundError("T") for _ in range(9))
    consumer.subscribe()
    assert (consumer.steps.state.began(A0), consumer.steps.state.began(B0)) == (0, None)


def with_one_to_commit(world: FakeWorld, brokers: Brokers) -> Consumer:
    """A consumer that has dealt with the one message of A0."""
    brokers.ends[A0] = 1
    consumer = Consumer(world)
    consumer.subscribe()
    consumer.poll()
    consumer.steps.state.user_came_back()
    return consumer


@pytest.mark.parametrize("failure", [SystemBusyError, ConnectionLostError, ConnectFailedError, NotMasterError, DeadlineExceededError])
def test_the_last_commit_outlasts_a_broker_that_is_busy_or_away(
    world: FakeWorld, brokers: Brokers, failure: type[ProtomqError], caplog: pytest.LogCaptureFixture
) -> None:
    consumer = with_one_to_commit(world, brokers)
    world.failures["a"].extend(failure("not now") for _ in range(7))
    assert world.driver.run(consumer.steps.commit_last("on close")) is None
    assert brokers.committed[A0] == 1
    assert world.pauses == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5, 0.5]
    assert "not committed" not in caplog.text


def test_the_last_commit_waits_as_long_as_its_broker_asks(world: FakeWorld, brokers: Brokers) -> None:
    consumer = with_one_to_commit(world, brokers)
    world.failures["a"].extend(asks_for(300) for _ in range(4))
    assert world.driver.run(consumer.steps.commit_last("on close")) is None
    assert world.pauses == [0.3, 0.3, 0.3, 0.4]


def test_the_last_commit_is_given_up_when_its_time_is_over_and_that_is_told_once(
    world: FakeWorld, brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = with_one_to_commit(world, brokers)
    world.failures["a"].extend(SystemBusyError("busy") for _ in range(99))
    begun_s = world.now_s()
    assert isinstance(world.driver.run(consumer.steps.commit_last("on close")), SystemBusyError)
    assert 2.4 < world.now_s() - begun_s < 3.0
    assert [text for text in caplog.messages if "not committed" in text] == ["offsets of g in T/a not committed on close: busy"]


@pytest.mark.parametrize("retries", [GOING, LAST_COMMIT])
def test_a_broker_that_stays_busy_is_waited_for_once_and_not_for_each_of_its_topics(
    world: FakeWorld, brokers: Brokers, retries: Retries
) -> None:
    topics = ["T", "U", "V"]
    for topic in topics[1:]:
        world.routes[topic] = route_of(topic, "a")
    consumer = Consumer(world)
    world.answers[COMMIT_OFFSETS] = _busy
    begun_s = world.now_s()
    offsets = dict.fromkeys((MessageQueue(topic, "a", 0) for topic in topics), 1)
    errors = world.driver.run(consumer.steps.commits.commit(offsets, Limits(3.0, retries)))
    assert list(errors) == [(topic, "a") for topic in topics]
    assert world.now_s() - begun_s < 3.0
    asked = [offset.topic for _, method, request, _ in world.calls for offset in pb.CommitOffsetsRequest.FromString(request).offsets]
    assert asked[-3:] == topics


@pytest.mark.parametrize("retries", [GOING, LAST_COMMIT])
def test_brokers_that_do_not_answer_are_waited_for_together_and_not_one_after_the_other(
    world: FakeWorld, brokers: Brokers, retries: Retries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a `poll` holds up, and a `close`, waits meanwhile."""
    names = [f"b{number}" for number in range(10)]
    world.routes["T"] = route_of("T", *names)
    consumer = Consumer(world)

    def silent(*args: Any, **_: Any) -> bytes:
        world.advance(args[3])
        raise RequestTimeoutError("no answer")

    monkeypatch.setattr(world, "call", silent)
    begun_s = world.now_s()
    offsets = dict.fromkeys((MessageQueue("T", name, 0) for name in names), 1)
    errors = world.driver.run(consumer.steps.commits.commit(offsets, Limits(3.0, retries)))
    assert list(errors) == [("T", name) for name in names]
    assert world.now_s() - begun_s <= 3.0 + 0.5 * 9 + 0.01


@pytest.mark.parametrize("failure", [TopicNotFoundError, NotPermittedError])
def test_what_waiting_hardly_mends_is_tried_twice_by_the_last_commit(
    world: FakeWorld, brokers: Brokers, failure: type[ProtomqError]
) -> None:
    consumer = with_one_to_commit(world, brokers)
    world.failures["a"].extend(failure("no") for _ in range(9))
    assert isinstance(world.driver.run(consumer.steps.commit_last("on close")), failure)
    assert calls(world, COMMIT_OFFSETS) == ["a", "a", "b"]


def test_a_topic_that_is_unsubscribed_is_committed_though_its_broker_is_busy(
    world: FakeWorld, brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = with_one_to_commit(world, brokers)
    world.failures["a"].extend(SystemBusyError("busy") for _ in range(7))
    world.driver.run(consumer.steps.unsubscribe("T"))
    assert brokers.committed[A0] == 1
    assert "not committed" not in caplog.text


@pytest.mark.parametrize("interval_s", [1.0, 60.0])
def test_a_commit_in_poll_that_a_busy_broker_refuses_is_made_up_for_soon(
    world: FakeWorld, brokers: Brokers, interval_s: float
) -> None:
    brokers.ends[A0] = 1
    consumer = Consumer(world, auto_commit_interval_s=interval_s)
    consumer.subscribe()
    consumer.poll()
    world.advance(interval_s)
    world.failures["a"].append(asks_for(100))
    consumer.poll()
    world.advance(0.09)
    consumer.poll()
    assert calls(world, COMMIT_OFFSETS) == ["a", "b"]
    world.advance(0.02)
    consumer.poll()
    assert brokers.committed[A0] == 1
    assert calls(world, COMMIT_OFFSETS) == ["a", "b", "a"]
    # A broker that goes on refusing is asked ever less often, and no less often than without a refusal.
    brokers.ends[A0] = 2
    world.advance(interval_s)
    world.answers[COMMIT_OFFSETS] = _busy
    world.calls.clear()
    for _ in range(1000):
        consumer.poll()
        world.advance(interval_s / 100)
    assert 9 <= len(calls(world, COMMIT_OFFSETS)) <= 22


def test_a_commit_that_is_asked_for_is_tried_three_times_and_tells_every_failure(
    world: FakeWorld, brokers: Brokers
) -> None:
    consumer = Consumer(world)
    world.failures["a"].extend(SystemBusyError("busy") for _ in range(9))
    with pytest.raises(SystemBusyError) as caught:
        world.driver.run(consumer.steps.commit({A0: 0, B0: 0}))
    assert calls(world, COMMIT_OFFSETS) == ["a", "a", "a", "b"]
    assert caught.value.__notes__ == ["offsets in T/a not committed: SystemBusyError: busy"]
    assert brokers.committed == {B0: 0}


def test_a_consumer_assigns_or_subscribes_and_reads_its_retries_beside_both(world: FakeWorld, brokers: Brokers) -> None:
    assigning, subscribing = Consumer(world), Consumer(world)
    world.driver.run(assigning.steps.assign((A0,), (), NO_FILTER))
    with pytest.raises(ConfigurationError, match=r"assigned queues, so it cannot subscribe to 'T': `assign\(\[\]\)` first"):
        world.driver.run(assigning.steps.subscribe("T", (), NO_FILTER))
    assert not assigning.steps.subscriptions
    subscribing.subscribe()
    with pytest.raises(ConfigurationError, match="subscribed to 'T', so it cannot assign queues: `unsubscribe` first"):
        world.driver.run(subscribing.steps.assign((A0,), (), NO_FILTER))
    world.driver.run(subscribing.steps.assign((), (), NO_FILTER))
    world.driver.run(subscribing.steps.unsubscribe("T"))
    world.driver.run(subscribing.steps.assign((A0,), (), NO_FILTER))
    world.routes["%RETRY%g"] = route_of("%RETRY%g", "a")
    world.driver.run(assigning.steps.subscribe("%RETRY%g", (), NO_FILTER))
    world.driver.run(assigning.steps.assign((A0,), (), NO_FILTER))


def test_an_assigned_queue_that_is_gone_is_told_and_a_subscribed_one_is_not(
    world: FakeWorld, brokers: Brokers
) -> None:
    consumer = Consumer(world)
    world.driver.run(consumer.steps.assign((A0,), (), NO_FILTER))
    world.failures["a"].append(QueueNotFoundError("gone"))
    with pytest.raises(QueueNotFoundError):
        consumer.poll()
    other = Consumer(world)
    other.subscribe()
    world.failures["a"].append(QueueNotFoundError("gone"))
    assert other.poll() == []
    assert world.forgotten == ["T", "T"]


def test_new_queues_of_a_subscribed_topic_are_read_from_their_first_message(
    world: FakeWorld, brokers: Brokers
) -> None:
    brokers.ends |= {A0: 2, MessageQueue("T", "c", 0): 2}
    consumer = Consumer(world, begin="latest")
    consumer.subscribe()
    assert consumer.poll() == []
    world.routes["T"] = route_of("T", "a", "b", "c", queues=2)
    brokers.ends.setdefault(MessageQueue("T", "c", 1), 0)
    assert consumer.poll() == [(MessageQueue("T", "c", 0), 0), (MessageQueue("T", "c", 0), 1)]


def test_a_pull_that_rests_at_a_master_is_made_at_the_next_one_as_soon_as_the_route_names_it(
    world: FakeWorld, brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = Consumer(world)
    consumer.subscribe()
    assert consumer.poll() == []
    state = consumer.steps.state
    dropped: list[Ticket] = []
    state.on_dropped = dropped.append
    tickets = [state.begin(queue) for queue in state.due(world.now_s())]
    assert len(tickets) == 4
    assert all(state.may_rest(ticket.queue) for ticket in tickets)
    old = world.routes["T"]
    world.routes["T"] = replace(old, brokers={**old.brokers, "a": BrokerAddress("a", "new:1", "new:2")})
    world.driver.run(consumer.steps.before_poll())
    assert [ticket.queue for ticket in dropped] == [A0, A1]
    assert state.due(world.now_s()) == [A0, A1]
    # It is given up, or its old master has gone: nobody is blamed.
    world.driver.run(consumer.steps.take_error(dropped[0], CallCancelledError("given up")))
    world.driver.run(consumer.steps.take_error(dropped[1], ConnectionLostError("gone")))
    assert state.due(world.now_s()) == [A0, A1]
    assert not caplog.messages


LAST_WEEK = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(("begin", "start"), [("latest", 9), (LAST_WEEK, 3)])
@pytest.mark.parametrize("auto_commit", [True, False])
def test_where_a_queue_begins_is_committed_at_once_so_that_its_next_owner_skips_nothing(
    world: FakeWorld, brokers: Brokers, begin: object, start: int, auto_commit: bool
) -> None:
    brokers.ends |= {A0: 9, A1: 9}
    brokers.committed |= {A1: 4}
    Consumer(world, begin=begin, auto_commit=auto_commit).subscribe()
    assert brokers.committed[A0] == start
    assert brokers.committed[A1] == 4
    brokers.ends[A0] = 12
    successor = Consumer(world, begin=begin, auto_commit=auto_commit)
    successor.subscribe()
    assert successor.poll()[0] == (A0, start)


def test_the_beginning_of_an_empty_or_new_queue_is_pinned_too(world: FakeWorld, brokers: Brokers) -> None:
    consumer = Consumer(world, begin="latest")
    consumer.subscribe()
    assert brokers.committed[B1] == 0
    new = MessageQueue("T", "c", 0)
    brokers.ends[new] = 2
    world.routes["T"] = route_of("T", "a", "b", "c", queues=1)
    consumer.poll()
    assert brokers.committed[new] == 0


def test_the_earliest_start_needs_no_commit(world: FakeWorld, brokers: Brokers) -> None:
    Consumer(world).subscribe()
    assert calls(world, COMMIT_OFFSETS) == []


def test_a_start_that_could_not_be_committed_is_committed_by_the_next_commit(world: FakeWorld, brokers: Brokers) -> None:
    brokers.ends[A0] = 9
    refuse = brokers._commit
    failures = [SystemBusyError("busy") for _ in range(3)]

    def commit(server: str, request: bytes) -> bytes:
        if failures:
            raise failures.pop()
        return refuse(server, request)

    world.answers[COMMIT_OFFSETS] = commit
    consumer = Consumer(world, begin="latest")
    consumer.subscribe()
    assert A0 not in brokers.committed
    world.advance(5.0)
    consumer.poll()
    assert brokers.committed[A0] == 9


class Committed(Hook):
    def __init__(self) -> None:
        self.told: list[tuple[str, str, dict[int, int], object]] = []

    def after_commit(self, context: CommitContext) -> None:
        offsets = {queue.queue_id: offset for queue, offset in context.offsets.items()}
        self.told.append((context.topic, context.broker_name, offsets, context.error))


def test_hooks_hear_of_each_commit_at_a_broker(world: FakeWorld, brokers: Brokers) -> None:
    brokers.ends[A0] = 9
    hook, busy = Committed(), SystemBusyError("busy")
    consumer = Consumer(world, begin="latest")
    consumer.steps.commits.hooks = HookPoints("g", [hook])
    consumer.subscribe()
    assert ("T", "a", {0: 9, 1: 0}, None) in hook.told
    hook.told.clear()

    def refuse(server: str, request: bytes) -> bytes:
        raise busy

    world.answers[COMMIT_OFFSETS] = refuse
    with pytest.raises(SystemBusyError):
        world.driver.run(consumer.steps.commit({A0: 5}))
    assert hook.told == [("T", "a", {0: 5}, busy)]


@pytest.mark.parametrize("begin", ["latest", LAST_WEEK])
@pytest.mark.parametrize("auto_commit", [True, False])
def test_the_beginning_of_a_topic_that_is_made_later_is_pinned_before_its_first_message_is_handed_out(
    world: FakeWorld, brokers: Brokers, begin: object, auto_commit: bool
) -> None:
    known = dict(world.answers)
    world.answers |= dict.fromkeys(known, _missing)
    consumer = Consumer(world, begin=begin, auto_commit=auto_commit)
    consumer.subscribe()
    assert consumer.poll() == []
    assert calls(world, COMMIT_OFFSETS) == []
    world.answers |= known
    brokers.ends[A0] = 2
    world.advance(3.0)
    assert consumer.poll() == [(A0, 0), (A0, 1)]
    assert brokers.committed == {A0: 0, A1: 0, B0: 0, B1: 0}
    successor = Consumer(world, begin=begin, auto_commit=auto_commit)
    successor.subscribe()
    assert successor.poll() == [(A0, 0), (A0, 1)], "the first one was killed at once"


def test_a_start_that_could_not_be_committed_is_made_up_for_where_the_program_commits(world: FakeWorld, brokers: Brokers) -> None:
    brokers.ends[A0] = 9
    refuse, refusing = brokers._commit, True

    def commit(server: str, request: bytes) -> bytes:
        if refusing:
            raise SystemBusyError("busy")
        return refuse(server, request)

    world.answers[COMMIT_OFFSETS] = commit
    consumer = Consumer(world, begin="latest", auto_commit=False)
    consumer.subscribe()
    brokers.ends[A0] = 12
    assert consumer.poll() == [(A0, 9), (A0, 10), (A0, 11)], "a broker that takes no commits holds up no message"
    consumer.poll()
    tries = len(calls(world, COMMIT_OFFSETS))
    consumer.poll()
    assert len(calls(world, COMMIT_OFFSETS)) == tries, "it is asked once in a while"
    world.advance(RETRY_RESOLVE_S)
    consumer.poll()
    assert len(calls(world, COMMIT_OFFSETS)) > tries
    refusing = False
    world.advance(2 * RETRY_RESOLVE_S)
    consumer.poll()
    assert brokers.committed == {A0: 9, A1: 0, B0: 0, B1: 0}, "what was handed out is the program's to commit"
    world.driver.run(consumer.steps.commit({A0: 12}))
    world.advance(RETRY_RESOLVE_S)
    consumer.poll()
    assert brokers.committed[A0] == 12


def test_what_the_program_has_committed_is_not_taken_back_by_a_start_that_failed(world: FakeWorld, brokers: Brokers) -> None:
    brokers.ends[A0] = 9
    world.answers[COMMIT_OFFSETS], commit = _busy, brokers._commit
    consumer = Consumer(world, begin="latest", auto_commit=False)
    consumer.subscribe()
    world.answers[COMMIT_OFFSETS] = commit
    world.driver.run(consumer.steps.commit({A0: 12}))
    world.advance(RETRY_RESOLVE_S)
    consumer.poll()
    assert brokers.committed == {A0: 12, A1: 0, B0: 0, B1: 0}


@pytest.mark.parametrize("way", ["unsubscribe", "close"])
def test_a_start_that_failed_is_committed_when_its_queue_goes(world: FakeWorld, brokers: Brokers, way: str) -> None:
    brokers.ends[A0] = 9
    world.answers[COMMIT_OFFSETS], commit = _busy, brokers._commit
    consumer = Consumer(world, begin="latest", auto_commit=False)
    consumer.subscribe()
    world.answers[COMMIT_OFFSETS] = commit
    world.driver.run(consumer.steps.unsubscribe("T") if way == "unsubscribe" else consumer.steps.say_goodbye())
    assert brokers.committed[A0] == 9


@pytest.mark.parametrize("way", ["subscribe", "assign"])
def test_a_topic_that_is_made_again_is_consumed_from_its_first_message(world: FakeWorld, brokers: Brokers, way: str) -> None:
    brokers.ends[A0] = 9
    consumer = Consumer(world, begin="latest")

    def begin() -> None:
        if way == "subscribe":
            consumer.subscribe()
        else:
            world.driver.run(consumer.steps.assign((A0, A1, B0, B1), (), NO_FILTER))

    begin()
    assert consumer.poll() == []
    brokers.incarnation = 8
    brokers.ends |= {A0: 2, B1: 1}
    brokers.committed.clear()
    with pytest.raises(TopicRecreatedError):
        consumer.poll()
    begin()
    assert sorted(consumer.poll()) == [(A0, 0), (A0, 1), (B1, 0)]
    assert brokers.committed[A0] == 0, "its next owner begins there, too"


def test_a_topic_that_is_subscribed_to_again_at_the_end_skips_what_came_since(world: FakeWorld, brokers: Brokers) -> None:
    consumer = Consumer(world, begin="latest")
    consumer.subscribe()
    world.driver.run(consumer.steps.unsubscribe("T"))
    brokers.incarnation = 8
    brokers.ends[A0] = 9
    brokers.committed.clear()
    consumer.subscribe()
    assert consumer.steps.state.position(A0) == 9


def _missing(server: str, request: bytes) -> bytes:
    raise TopicNotFoundError("not yet")


def _busy(server: str, request: bytes) -> bytes:
    raise SystemBusyError("busy")


@pytest.mark.parametrize("begin", ["earliest", "latest", LAST_WEEK])
@pytest.mark.parametrize("auto_commit", [True, False])
def test_a_queue_that_is_no_more_changes_nothing_of_the_others_of_its_broker(
    world: FakeWorld, brokers: Brokers, begin: object, auto_commit: bool
) -> None:
    brokers.ends[A0] = 60
    brokers.committed[A0] = 50
    requests: dict[MethodInfo, Any] = {
        GET_OFFSETS: pb.GetOffsetsRequest,
        GET_QUEUE_RANGE: pb.GetQueueRangeRequest,
        SEARCH_OFFSET: pb.SearchOffsetRequest,
    }

    def only_queue_0(method: MethodInfo, server: str, request: bytes) -> bytes:
        asked = requests[method].FromString(request)
        if server == "a" and 1 in getattr(asked, "queue_ids", [getattr(asked, "queue_id", 0)]):
            raise QueueNotFoundError("topic 'T' has no read queue 1 here, it has 1", metadata={"queue_id": "1", "read_queues": "1"})
        return known[method](server, request)

    def commit(server: str, request: bytes) -> bytes:
        assert (server, 1) not in {(server, one.queue_id) for one in pb.CommitOffsetsRequest.FromString(request).offsets if server == "a"}
        return known[COMMIT_OFFSETS](server, request)

    known = dict(world.answers)
    world.answers |= {method: partial(only_queue_0, method) for method in requests} | {COMMIT_OFFSETS: commit}
    consumer = Consumer(world, begin=begin, auto_commit=auto_commit)
    consumer.subscribe()
    assert consumer.steps.state.position(A0) == 50
    assert brokers.committed[A0] == 50
    world.failures["a"].append(QueueNotFoundError("gone"))
    consumer.poll()
    world.advance(RETRY_RESOLVE_S)
    world.failures["a"].append(QueueNotFoundError("gone"))
    consumer.poll()
    assert brokers.committed[A0] == 50
    assert A1 not in brokers.committed


def test_a_start_that_could_not_be_committed_is_not_looked_at_when_its_topic_is_deleted(world: FakeWorld, brokers: Brokers) -> None:
    world.answers[COMMIT_OFFSETS], commit = _busy, brokers._commit
    consumer = Consumer(world, begin="latest", auto_commit=False)
    consumer.subscribe()
    world.answers[COMMIT_OFFSETS] = commit
    consumer.steps.state._mark_gone(A0, 7)
    world.advance(RETRY_RESOLVE_S)
    consumer.poll()
    assert consumer.steps.group_due_in_s(world.now_s()) > 0
    assert brokers.committed == {B0: 0, B1: 0}


@pytest.mark.parametrize("refusal", [NotPermittedError("ask"), OffsetOutOfRangeError("no")])
@pytest.mark.parametrize("auto_commit", [True, False])
def test_a_group_that_may_not_commit_is_told_so_once_and_tries_ever_less_often(
    world: FakeWorld, brokers: Brokers, caplog: pytest.LogCaptureFixture, refusal: ProtomqError, auto_commit: bool
) -> None:
    caplog.set_level(logging.WARNING, "protomq")
    commit = brokers._commit

    def refuse(server: str, request: bytes) -> bytes:
        raise refusal

    world.answers[COMMIT_OFFSETS] = refuse
    consumer = Consumer(world, begin="latest", auto_commit=auto_commit, auto_commit_interval_s=1e6)
    consumer.subscribe()
    before = len(calls(world, COMMIT_OFFSETS))
    for _ in range(60):
        world.advance(1.0)
        consumer.poll()
    assert len(caplog.messages) == 2, "one for each broker"
    assert len(calls(world, COMMIT_OFFSETS)) - before <= 2 * 5
    world.answers[COMMIT_OFFSETS] = commit
    for _ in range(60):
        world.advance(1.0)
        consumer.poll()
    assert brokers.committed == dict.fromkeys((A0, A1, B0, B1), 0)


def test_a_program_that_commits_the_offsets_of_queues_that_it_assigned_finds_none_of_ours(
    world: FakeWorld, brokers: Brokers
) -> None:
    brokers.ends |= {A0: 9}
    consumer = Consumer(world, begin="latest", auto_commit=False)
    world.driver.run(consumer.steps.assign((A0,), (), NO_FILTER))
    assert calls(world, COMMIT_OFFSETS) == []
    broadcasting = Consumer(world, begin="latest", broadcasting=True)
    broadcasting.subscribe()
    assert calls(world, COMMIT_OFFSETS) == []


@pytest.mark.parametrize("options", [{"begin": "latest"}, {"begin": LAST_WEEK}, {"begin": "latest", "resume": False}])
@pytest.mark.parametrize("committed", [None, 2])
def test_the_retries_of_a_group_begin_at_their_beginning_or_where_the_group_is(
    world: FakeWorld, brokers: Brokers, options: dict[str, object], committed: int | None
) -> None:
    retries = MessageQueue("%RETRY%g", "a", 0)
    world.routes["%RETRY%g"] = route_of("%RETRY%g", "a")
    brokers.ends[retries] = 9
    if committed is not None:
        brokers.committed[retries] = committed
    consumer = Consumer(world, auto_commit=False, **options)
    world.driver.run(consumer.steps.subscribe("%RETRY%g", (), NO_FILTER))
    assert consumer.steps.state.position(retries) == (committed or 0)
    assert calls(world, COMMIT_OFFSETS) == []


def test_the_retries_of_another_group_begin_where_they_are_wanted(world: FakeWorld, brokers: Brokers) -> None:
    retries = MessageQueue("%RETRY%other", "a", 0)
    world.routes["%RETRY%other"] = route_of("%RETRY%other", "a")
    brokers.ends[retries] = 9
    consumer = Consumer(world, begin="latest")
    world.driver.run(consumer.steps.assign((retries,), (), NO_FILTER))
    assert consumer.steps.state.position(retries) == 9


@pytest.mark.parametrize(("auto_commit", "committed"), [(True, 9), (False, 4)])
def test_a_start_that_passes_over_what_is_committed_is_committed_by_a_consumer_that_commits(
    world: FakeWorld, brokers: Brokers, auto_commit: bool, committed: int
) -> None:
    brokers.ends[A0], brokers.committed[A0] = 9, 4
    consumer = Consumer(world, begin="latest", resume=False, auto_commit=auto_commit)
    consumer.subscribe()
    assert consumer.steps.state.position(A0) == 9
    assert brokers.committed[A0] == committed


FAULTY = (ConnectFailedError, ConnectionLostError, RequestTimeoutError, SystemBusyError, NotPermittedError)
FAULTS = st.sampled_from(FAULTY)


class ConsumerMachine(RuleBasedStateMachine):
    """Polls, commits, crashes and faults in any order: each queue gives all its messages, in order, again only what is not committed."""

    @initialize()
    def begin(self) -> None:
        self.world = FakeWorld(route_of("T", "a", "b", queues=2), call_takes_s=0.01)
        self.brokers = Brokers(self.world)
        self.dealt_with = dict.fromkeys(self.brokers.ends, 0)
        self._start()

    def _start(self) -> None:
        self.consumer = Consumer(self.world, auto_commit_interval_s=1.0)
        self.consumer.subscribe()
        self.began_at = dict(self.brokers.committed)
        self.next_offset: dict[MessageQueue, int] = {}
        self.handed_out: list[tuple[MessageQueue, int]] = []

    @rule(queue=st.sampled_from((A0, A1, B0, B1)), count=st.integers(1, 9))
    def append(self, queue: MessageQueue, count: int) -> None:
        self.brokers.ends[queue] += count

    @rule(server=st.sampled_from("ab"), fault=FAULTS, count=st.integers(1, 8))
    def fail(self, server: str, fault: type[ProtomqError], count: int) -> None:
        self.world.failures[server].extend(fault("x") for _ in range(count))

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(count_max=st.integers(1, 7))
    def poll(self, count_max: int) -> None:
        asked = len(self.world.calls)
        for queue, offset in self.handed_out:
            self.dealt_with[queue] = max(self.dealt_with[queue], offset + 1)
        self.handed_out = self.consumer.poll(count_max)
        for queue, offset in self.handed_out:
            expected = self.next_offset.get(queue, self.began_at.get(queue, 0))
            assert offset == expected
            self.next_offset[queue] = offset + 1
        # At most a pull and what begins a queue for each queue, and a commit for each broker.
        assert len(self.world.calls) - asked <= 4 + 2 * 2 + 2

    @rule()
    def commit(self) -> None:
        for queue, offset in self.handed_out:
            self.dealt_with[queue] = max(self.dealt_with[queue], offset + 1)
        self.handed_out = []
        with contextlib.suppress(*FAULTY):
            self.world.driver.run(self.consumer.steps.commit(None))

    @rule()
    def crash_and_begin_again(self) -> None:
        self._start()

    @rule()
    def heal_and_read_to_the_end(self) -> None:
        self.world.failures.clear()
        for _ in range(40):
            self.world.advance(3.0)
            self.poll(100)
        for queue, end in self.brokers.ends.items():
            assert self.next_offset.get(queue, self.began_at.get(queue, 0)) == end

    @invariant()
    def nothing_is_committed_that_was_not_dealt_with(self) -> None:
        for queue, offset in self.brokers.committed.items():
            assert offset <= self.dealt_with[queue]


ConsumerMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
TestConsumerMachine = ConsumerMachine.TestCase
