"""Locks of a consumer's queues, driven without sockets and clocks: what it asks for, what it keeps, what it has lost."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from protomq import MessageQueue
from protomq._consumer_calls import Limits
from protomq._consumer_options import ConsumerOptions
from protomq._consumer_steps import ConsumerSteps
from protomq._filters import NO_FILTER
from protomq._methods import LOCK_QUEUES, UNLOCK_QUEUES
from protomq._offset_calls import without_lost_queues
from protomq._queue_locks import RENEW_S, RETRY_S, QueueLocks
from protomq._retry import ONCE
from protomq.errors import (
    MemberUnknownError,
    QueueNotOwnedError,
    SystemBusyError,
    UnknownMethodError,
)
from protomq.v1 import membership_service_pb2 as pb_members
from protomq.v1 import queue_lock_service_pb2 as pb
from tests.support.fake_driver import FakeWorld, route_of

from .test_stopped_member import FakeMember

LIMITS = Limits(1.0, ONCE)
Q0, Q1 = (MessageQueue("T", "a", queue_id) for queue_id in (0, 1))


class Lockers:
    """A broker that gives what nobody has."""

    def __init__(self, world: FakeWorld) -> None:
        self.owners: dict[int, tuple[str, int]] = {}
        self.unlocked: list[int] = []
        self._token = 0
        world.answers |= {LOCK_QUEUES: self._lock, UNLOCK_QUEUES: self._unlock}

    def _lock(self, _: str, request: bytes) -> bytes:
        asked = pb.LockQueuesRequest.FromString(request)
        answer = pb.LockQueuesResponse(lock_ms=60_000)
        for queue in asked.queues:
            self._token += 1
            owner, token = self.owners.setdefault(queue.queue_id, (asked.client_id, self._token))
            is_own = owner == asked.client_id
            answer.queues.add(queue=queue, token=token if is_own else 0, owner="" if is_own else owner)
        return answer.SerializeToString()

    def _unlock(self, _: str, request: bytes) -> bytes:
        for queue in pb.UnlockQueuesRequest.FromString(request).queues:
            self.unlocked.append(queue.queue_id)
            del self.owners[queue.queue_id]
        return b""


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld(route_of("T", "a", queues=2))


@pytest.fixture
def broker(world: FakeWorld) -> Lockers:
    return Lockers(world)


@pytest.fixture
def locks(world: FakeWorld) -> QueueLocks:
    return QueueLocks("g", lambda: ("me", 1), world.now_s)


def follow(world: FakeWorld, locks: QueueLocks, *queues: MessageQueue) -> list[MessageQueue]:
    return world.driver.run(locks.follow(queues, LIMITS))


def release_busy(world: FakeWorld, locks: QueueLocks, *queues: MessageQueue) -> set[MessageQueue]:
    """The queues go while a listener has a message of the first; the result says which queues have listeners."""
    busy = {queues[0]}
    locks.is_busy = busy.__contains__
    world.driver.run(locks.release(queues, LIMITS))
    return busy


def test_a_lock_is_renewed_every_twenty_seconds_and_not_before(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    assert follow(world, locks, Q0, Q1) == []
    assert (locks.locked([Q0, Q1]), locks.token(Q0), locks.token(Q1)) == ([Q0, Q1], 1, 2)
    assert follow(world, locks, Q0, Q1) == []
    assert (len(world.calls), locks.due_in_s(world.now_s())) == (1, RENEW_S)
    world.advance(RENEW_S)
    assert locks.due_in_s(world.now_s()) == 0
    assert follow(world, locks, Q0, Q1) == []
    assert len(world.calls) == 2


def test_a_queue_of_another_is_asked_for_again(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    broker.owners[1] = ("other", 9)
    assert follow(world, locks, Q0, Q1) == []
    assert locks.locked([Q0, Q1]) == [Q0]
    assert locks.due_in_s(world.now_s()) == RETRY_S
    del broker.owners[1]
    world.advance(RETRY_S)
    assert follow(world, locks, Q0, Q1) == []
    assert locks.locked([Q0, Q1]) == [Q0, Q1]


def test_a_topic_that_is_gone_keeps_no_other_from_its_locks(world: FakeWorld, broker: Lockers, locks: QueueLocks) -> None:
    """Its queues come first, and its route leads to no broker any more."""
    gone = MessageQueue("gone", "a", 0)
    assert follow(world, locks, gone, Q0) == []
    assert locks.locked([Q0]) == []
    world.advance(RETRY_S)
    follow(world, locks, gone, Q0)
    assert locks.locked([Q0]) == [Q0]


def test_what_another_has_now_is_lost_and_so_is_what_was_another_lock_meanwhile(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    follow(world, locks, Q0, Q1)
    broker.owners = {0: ("other", 9), 1: ("me", 10)}
    world.advance(RENEW_S)
    assert follow(world, locks, Q0, Q1) == [Q0, Q1]
    assert follow(world, locks, Q0, Q1) == [], "it is said once"
    assert (locks.locked([Q0, Q1]), locks.token(Q1)) == ([Q1], 10)


def test_a_commit_that_was_refused_says_so_at_once(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    follow(world, locks, Q0, Q1)
    locks.refused([Q0])
    assert (locks.due_in_s(world.now_s()), locks.locked([Q0, Q1])) == (0, [Q1])
    assert follow(world, locks, Q0, Q1) == [Q0]
    assert len(world.calls) == 1, "what is left of it is dropped before it is locked again: a listener might begin it meanwhile"
    assert follow(world, locks, Q0, Q1) == []
    assert locks.locked([Q0, Q1]) == [Q0, Q1]
    error = QueueNotOwnedError("lost", metadata={"queue_ids": "0,7"})
    assert without_lost_queues({Q0: 4, Q1: 5}, error) == ({Q1: 5}, [Q0])


def test_a_lock_that_is_another_one_by_now_counts_once_the_listener_is_done_with_its_message_of_the_one_before(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    follow(world, locks, Q0)
    busy = {Q0}
    locks.is_busy = busy.__contains__
    broker.owners = {0: ("me", 10)}
    world.advance(RENEW_S)
    assert follow(world, locks, Q0) == [Q0]
    for _ in range(3):
        assert follow(world, locks, Q0) == []
        assert locks.locked([Q0]) == [], "else two messages of it would run at the same time"
        world.advance(RETRY_S)
    busy.clear()
    follow(world, locks, Q0)
    assert (locks.locked([Q0]), locks.token(Q0)) == ([Q0], 10)
    world.driver.run(locks.release([Q0], LIMITS))
    assert broker.owners == {}


def test_a_broker_that_does_not_answer_takes_nothing_away(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    follow(world, locks, Q0)
    world.advance(RENEW_S)
    world.script.append(SystemBusyError("later"))
    assert follow(world, locks, Q0) == []
    assert locks.token(Q0) == 1


@pytest.mark.parametrize("error", [SystemBusyError("gone"), asyncio.CancelledError()])
def test_a_lock_that_was_granted_without_an_answer_is_given_up_if_the_queue_goes_to_another(
    world: FakeWorld, broker: Lockers, locks: QueueLocks, error: BaseException
) -> None:
    # The broker locked both and died before it answered, or the `poll` that asked was cancelled. It keeps locks while this member lives.
    broker.owners = {0: ("me", 1), 1: ("me", 2)}

    def answer_nothing(_: str, request: bytes) -> bytes:
        raise error

    world.answers[LOCK_QUEUES] = answer_nothing
    with contextlib.suppress(asyncio.CancelledError):
        assert follow(world, locks, Q0, Q1) == []
    world.answers[LOCK_QUEUES] = broker._lock
    assert locks.locked([Q0, Q1]) == []
    world.advance(RETRY_S)
    assert follow(world, locks, Q0) == []
    assert (locks.locked([Q0]), broker.unlocked) == ([Q0], [1])
    world.advance(RENEW_S)
    follow(world, locks, Q0)
    assert broker.unlocked == [1], "it is given up once"


def test_a_lock_of_a_member_that_was_given_up_and_came_back_is_given_up_unless_it_is_wanted(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    follow(world, locks, Q0, Q1)
    locks.forget(["a"])  # The broker has not freed them: the member was back before.
    assert locks.due_in_s(world.now_s()) == 0
    follow(world, locks, Q1)
    assert (locks.locked([Q0, Q1]), broker.unlocked) == ([Q1], [0])


def test_a_broker_that_does_not_know_the_member_has_locked_nothing(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    world.script.append(MemberUnknownError("join first"))
    follow(world, locks, Q0)
    world.advance(RETRY_S)
    follow(world, locks)
    assert [call for call in world.calls if call[1] == UNLOCK_QUEUES] == []


def test_queues_that_go_are_unlocked_once_no_listener_has_a_message_of_theirs(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    follow(world, locks, Q0, Q1)
    busy = release_busy(world, locks, Q0, Q1)
    assert (broker.unlocked, locks.locked([Q0, Q1])) == ([1], [])
    assert follow(world, locks, Q0) == []
    assert locks.locked([Q0]) == [], "what is worked on is of the lock before"
    busy.clear()
    world.advance(RETRY_S)
    follow(world, locks)
    world.driver.run(locks.release([], LIMITS))
    assert follow(world, locks, Q0) == []
    assert locks.locked([Q0]) == [Q0]


def test_a_queue_that_goes_comes_back_and_goes_for_good_while_a_listener_is_busy_is_unlocked(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    follow(world, locks, Q0, Q1)
    busy = release_busy(world, locks, Q0)
    follow(world, locks, Q0, Q1)  # Its own again, and not to be locked again yet.
    assert locks.locked([Q0, Q1]) == [Q1]
    follow(world, locks, Q1)  # Another member has come, whose queue it is.
    busy.clear()
    world.advance(RETRY_S)
    assert locks.due_in_s(world.now_s()) == 0
    follow(world, locks, Q1)
    assert broker.unlocked == [0]
    assert locks.due_in_s(world.now_s()) > RETRY_S


def test_a_queue_that_goes_and_comes_back_is_locked_once_no_listener_is_busy_and_then_kept(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    follow(world, locks, Q0)
    busy = release_busy(world, locks, Q0)
    follow(world, locks, Q0)
    busy.clear()
    world.advance(RETRY_S)
    follow(world, locks, Q0)
    assert (locks.locked([Q0]), broker.unlocked) == ([Q0], [])
    follow(world, locks)  # `release` comes first for a queue that is locked.
    assert broker.unlocked == []


def test_an_older_broker_locks_nothing_and_is_consumed_all_the_same(
    world: FakeWorld, locks: QueueLocks, caplog: pytest.LogCaptureFixture
) -> None:
    world.script.append(UnknownMethodError("no such method"))
    assert follow(world, locks, Q0) == []
    assert (locks.locked([Q0]), locks.token(Q0)) == ([Q0], 0)
    assert "knows no locks" in caplog.text


def test_who_was_given_up_has_no_lock_of_that_broker(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    follow(world, locks, Q0)
    locks.forget({"b"})
    assert locks.locked([Q0]) == [Q0]
    locks.forget({"a"})
    assert locks.locked([Q0]) == []
    assert locks.due_in_s(world.now_s()) == 0


def test_a_broker_that_does_not_know_the_member_yet_takes_nothing_away_and_is_asked_again_without_a_word(
    world: FakeWorld, broker: Lockers, locks: QueueLocks, caplog: pytest.LogCaptureFixture
) -> None:
    follow(world, locks, Q0)
    world.script.append(MemberUnknownError("who?"))
    assert follow(world, locks, Q0, Q1) == []
    assert (locks.token(Q0), locks.locked([Q1])) == (1, [])
    assert locks.due_in_s(world.now_s()) == RETRY_S
    world.advance(RETRY_S)
    follow(world, locks, Q0, Q1)
    assert locks.locked([Q0, Q1]) == [Q0, Q1]
    assert caplog.text == ""


def test_a_queue_that_goes_to_another_while_its_lock_is_on_its_way_is_unlocked_again(
    world: FakeWorld, broker: Lockers
) -> None:
    member = FakeMember(world)
    steps = ConsumerSteps(ConsumerOptions(group="g", lock_queues=True), world.now_s, member=member)
    lock = world.answers[LOCK_QUEUES]

    def lock_while_another_joins(server: str, request: bytes) -> bytes:
        world.answers[LOCK_QUEUES] = lock
        answer = lock(server, request)
        member.call()
        member.answer(pb_members.GroupMember(client_id="z", nonce=2, topics=[pb_members.MemberTopic(topic="T")]))
        return answer

    world.answers[LOCK_QUEUES] = lock_while_another_joins
    world.driver.run(steps.subscribe("T", (), NO_FILTER))
    assert steps.state.queues == (Q0,)
    assert steps.locks is not None
    assert steps.locks.locked([Q0, Q1]) == [Q0]
    assert list(broker.owners) == [0], "else it has an owner that never consumes it"


class QuickMember(FakeMember):
    """Its broker grants a claim at a certain poke: calls have a thread of their own, so that may be while queues are being changed."""

    answers_at = 0
    pokes = 0

    def poke(self) -> None:
        self.pokes += self.state.has_open_claims()
        if self.pokes == self.answers_at and self.state.has_open_claims():
            self.call()
            self.answer()

    def wait_granted(self, timeout_s: float) -> None:
        pass


@pytest.mark.parametrize("answers_at", range(1, 5))
def test_a_queue_that_is_granted_while_queues_are_changed_is_locked_at_once(
    world: FakeWorld, broker: Lockers, answers_at: int
) -> None:
    member = QuickMember(world)
    member.answers_at = answers_at
    steps = ConsumerSteps(ConsumerOptions(group="g", lock_queues=True), world.now_s, member=member)
    world.driver.run(steps.subscribe("T", (), NO_FILTER))
    for _ in range(5):
        if not steps.group_due_in_s(world.now_s()):
            world.driver.run(steps.before_poll())
        else:
            member.poke()
    assert steps.state.queues == (Q0, Q1), "not only when locks are to be renewed"


def test_what_is_missing_is_asked_for_and_the_rest_when_it_is_to_be_renewed(
    world: FakeWorld, broker: Lockers, locks: QueueLocks
) -> None:
    broker.owners[1] = ("other", 9)
    follow(world, locks, Q0, Q1)
    asked: list[list[int]] = []
    while world.now_s() < RENEW_S:
        world.advance(RETRY_S)
        follow(world, locks, Q0, Q1)
        queues = pb.LockQueuesRequest.FromString(world.calls[-1][2]).queues
        asked.append([queue.queue_id for queue in queues])
    assert asked == [[1]] * (len(asked) - 1) + [[0, 1]]
