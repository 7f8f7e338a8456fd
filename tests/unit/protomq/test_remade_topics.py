"""Consumers of a topic that is deleted, and made again: what they lock, commit and list. Without sockets, clocks and sleeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from protomq import MessageQueue
from protomq._consumer_options import ConsumerOptions
from protomq._consumer_steps import ConsumerSteps
from protomq._filters import NO_FILTER
from protomq._methods import COMMIT_OFFSETS, GET_OFFSETS, LOCK_QUEUES, PULL
from protomq._pull_logic import BACKOFF_MAX_S, DELETED_AFTER_S
from protomq._queue_locks import RETRY_S
from protomq._types import MethodInfo
from protomq.errors import ProtomqError, QueueNotOwnedError, TopicNotFoundError, TopicRecreatedError
from protomq.v1 import consumer_service_pb2 as pb
from protomq.v1 import queue_lock_service_pb2 as pb_locks
from tests.support.fake_driver import FakeWorld, route_of

from .test_consumer_steps import A0, A1, B0, Brokers, Consumer
from .test_stopped_member import FakeMember


class LockingBrokers(Brokers):
    """Brokers that lock queues for one member: each incarnation of the topic has other locks, and other tokens."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world)
        self.is_there = True
        self._plain = dict(world.answers)
        world.answers |= {LOCK_QUEUES: self._lock, COMMIT_OFFSETS: self._commit_locked}
        for method in (GET_OFFSETS, PULL):
            world.answers[method] = self._if_there(method)

    def remake(self) -> None:
        self.incarnation += 1
        self.committed.clear()

    def _if_there(self, method: MethodInfo) -> Callable[[str, bytes], bytes]:
        def answer(server: str, request: bytes) -> bytes:
            if not self.is_there:
                raise TopicNotFoundError("not here")
            return self._plain[method](server, request)

        return answer

    def _lock(self, _: str, request: bytes) -> bytes:
        answer = pb_locks.LockQueuesResponse(lock_ms=60_000)
        for queue in pb_locks.LockQueuesRequest.FromString(request).queues:
            if self.is_there:
                answer.queues.add(queue=queue, token=self.incarnation * 10, topic_incarnation=self.incarnation)
            else:
                answer.queues.add(queue=queue)
        return answer.SerializeToString()

    def _commit_locked(self, server: str, request: bytes) -> bytes:
        for one in pb.CommitOffsetsRequest.FromString(request).offsets:
            if one.topic_incarnation != self.incarnation:
                raise TopicRecreatedError("made again")
            if one.lock_token != self.incarnation * 10:
                raise QueueNotOwnedError("not yours", metadata={"queue_ids": str(one.queue_id)})
        return self._plain[COMMIT_OFFSETS](server, request)


class InOrder(Consumer):
    """A member that has its queues to itself. `busy`: queues of which a listener has a message."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world)
        self._member = FakeMember(world)
        self.steps = ConsumerSteps(ConsumerOptions(group="g", lock_queues=True), world.now_s, member=self._member)
        self.busy: set[MessageQueue] = set()
        assert self.steps.locks is not None
        self.steps.locks.is_busy = self.busy.__contains__

    def poll(self, count_max: int = 100) -> list[tuple[MessageQueue, int]]:
        """See Consumer.poll; its calls are answered."""
        if self._member.ticket is not None:
            self._member.answer()
        self._member.call()
        return super().poll(count_max)


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld(route_of("T", "a"))


@pytest.fixture
def brokers(world: FakeWorld) -> LockingBrokers:
    found = LockingBrokers(world)
    found.ends[A0] = 3
    return found


def subscribed(world: FakeWorld) -> InOrder:
    """One that has got three messages, and committed."""
    consumer = InOrder(world)
    consumer.subscribe()
    assert [offset for _, offset in consumer.poll()] == [0, 1, 2]
    world.driver.run(consumer.steps.commit(None))
    return consumer


def remade(world: FakeWorld, brokers: LockingBrokers) -> InOrder:
    """The same, when it knows that the topic was made again, and is about to subscribe."""
    consumer = subscribed(world)
    brokers.remake()
    with pytest.raises(TopicRecreatedError):
        consumer.poll()
    return consumer


def test_a_queue_of_a_topic_that_is_made_again_is_locked_again_and_its_messages_come_once(
    world: FakeWorld, brokers: LockingBrokers
) -> None:
    consumer = remade(world, brokers)
    consumer.subscribe()
    assert [offset for _, offset in consumer.poll()] == [0, 1, 2]
    world.driver.run(consumer.steps.commit(None))
    assert brokers.committed == {A0: 3}
    for _ in range(3):
        world.advance(RETRY_S)
        assert consumer.poll() == []


def test_a_topic_that_is_made_again_waits_until_a_listener_is_done_with_a_message_of_the_old_one(
    world: FakeWorld, brokers: LockingBrokers
) -> None:
    consumer = remade(world, brokers)
    consumer.busy.add(A0)
    consumer.subscribe()
    for _ in range(3):
        assert consumer.poll() == []
        world.advance(RETRY_S)
    consumer.busy.clear()
    found: list[int] = []
    for _ in range(4):  # It claims the queue anew.
        found += [offset for _, offset in consumer.poll()]
        world.advance(RETRY_S)
    assert found == [0, 1, 2]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_topic_that_is_made_again_between_the_lock_and_the_look_where_to_begin_is_locked_again(
    world: FakeWorld, brokers: LockingBrokers, is_there: bool
) -> None:
    consumer = InOrder(world)
    look_up = world.answers[GET_OFFSETS]

    def remake_first(server: str, request: bytes) -> bytes:
        world.answers[GET_OFFSETS] = look_up
        brokers.remake()
        brokers.is_there = is_there
        return look_up(server, request)

    world.answers[GET_OFFSETS] = remake_first
    consumer.subscribe()
    brokers.is_there = True
    found: list[int] = []
    for _ in range(3):
        found += [offset for _, offset in consumer.poll()]
        world.driver.run(consumer.steps.commit(None))
        world.advance(RETRY_S)
    assert (found, brokers.committed) == ([0, 1, 2], {A0: 3})


def test_who_asks_where_it_stands_in_a_queue_that_is_to_be_locked_again_is_told_so(world: FakeWorld, brokers: LockingBrokers) -> None:
    consumer = InOrder(world)
    world.failures["a"].append(TopicNotFoundError("down"))
    consumer.subscribe()
    if A0 not in consumer.steps.state.queues:
        consumer.poll()
    consumer.steps.state.drop([A0])
    consumer.steps.state.assign([A0], {})
    brokers.remake()
    with pytest.raises(QueueNotOwnedError, match="made again"):
        world.driver.run(consumer.steps.position(A0))


def test_a_topic_that_is_not_there_is_consumed_in_order_soon_after_it_is_made(world: FakeWorld, brokers: LockingBrokers) -> None:
    consumer = subscribed(world)
    brokers.is_there = False
    errors: list[ProtomqError] = []
    for _ in range(20):
        try:
            consumer.poll()
        except TopicNotFoundError as error:
            errors.append(error)
            consumer.subscribe()
        world.advance(RETRY_S)
    assert len(errors) == 1
    assert consumer.steps.assignment() == ()
    brokers.remake()
    brokers.is_there = True
    found: list[int] = []
    for _ in range(2):
        found += [offset for _, offset in consumer.poll()]
        world.advance(RETRY_S)
    world.driver.run(consumer.steps.commit(None))
    assert (found, brokers.committed) == ([0, 1, 2], {A0: 3})


def test_a_commit_under_way_belongs_to_the_topic_of_its_offsets_whatever_is_subscribed_to_meanwhile() -> None:
    """Tasks of one consumer: while the first broker takes its part, another one subscribes to what the topic is now."""
    world = FakeWorld(route_of("T", "a", "b", queues=2))
    brokers = Brokers(world)
    brokers.ends |= {A0: 3, B0: 3}
    consumer = Consumer(world, auto_commit=False)
    consumer.subscribe()
    consumer.poll()
    commit = world.answers[COMMIT_OFFSETS]
    told: list[tuple[str, int, int]] = []

    def note(server: str, request: bytes) -> bytes:
        told.extend((server, one.queue_offset, one.topic_incarnation) for one in pb.CommitOffsetsRequest.FromString(request).offsets)
        answer = commit(server, request)
        if server == "a":
            brokers.incarnation = 8
            brokers.committed.clear()
            with pytest.raises(TopicRecreatedError):
                consumer.poll()
            consumer.subscribe()
        return answer

    world.answers[COMMIT_OFFSETS] = note
    world.driver.run(consumer.steps.commit({A0: 3, B0: 3}))
    assert told == [("a", 3, 7), ("b", 3, 7)], "the broker refuses it: the topic of these offsets is gone"
    state = consumer.steps.state
    assert (state.has_commit(A0), state.has_commit(B0)) == (False, False), "nothing is committed in the new one"


def test_queues_of_a_topic_that_is_deleted_are_none(world: FakeWorld) -> None:
    made = route_of("T", "a", queues=2)
    unmade = dataclasses.replace(route_of("T", "a", queues=8), auto_create=True)
    world.routes["T"] = unmade
    brokers = Brokers(world)
    is_there = False

    def answer(method: MethodInfo) -> Callable[[str, bytes], bytes]:
        real = world.answers[method]

        def asked(server: str, request: bytes) -> bytes:
            if not is_there:
                raise TopicNotFoundError("not here")
            return real(server, request)

        return asked

    world.answers |= {method: answer(method) for method in (GET_OFFSETS, PULL)}
    consumer = Consumer(world)
    consumer.subscribe()
    assert len(consumer.steps.assignment()) == 8, "those that it would get"
    is_there, world.routes["T"] = True, made
    brokers.ends |= {A0: 0, A1: 0}
    for _ in range(8):
        consumer.poll()
        world.advance(1.0)
    assert consumer.steps.assignment() == (A0, A1)
    is_there, world.routes["T"] = False, unmade
    consumer.poll()
    world.advance(DELETED_AFTER_S + BACKOFF_MAX_S)
    with pytest.raises(TopicNotFoundError):
        consumer.poll()
    assert consumer.steps.assignment() == ()
    consumer.subscribe()
    assert len(consumer.steps.assignment()) == 8, "as of any topic that is to be made"
    is_there, world.routes["T"] = True, made
    brokers.incarnation = 8
    for _ in range(8):
        consumer.poll()
        world.advance(1.0)
    assert consumer.steps.assignment() == (A0, A1)


def test_queues_that_the_program_names_are_its_own_whatever_becomes_of_their_topic(world: FakeWorld, brokers: LockingBrokers) -> None:
    consumer = Consumer(world)
    world.driver.run(consumer.steps.assign((A0,), (), NO_FILTER))
    consumer.poll()
    brokers.remake()
    with pytest.raises(TopicRecreatedError):
        consumer.poll()
    assert consumer.steps.assignment() == (A0,)
