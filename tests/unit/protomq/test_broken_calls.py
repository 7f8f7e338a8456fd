"""A member with locks whose call breaks: the broker frees its locks soon, so it begins nothing of those queues until they are renewed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest

from protomq import AsyncPullConsumer, Message, MessageQueue, PullConsumer
from protomq._consumer_options import ConsumerOptions
from protomq._consumer_steps import ConsumerSteps
from protomq._filters import NO_FILTER
from protomq._loops import Loop
from protomq._membership_logic import CALL_MARGIN_S, DOUBT_S, EXPIRY_PART, HOLD_S
from protomq._methods import LOCK_QUEUES
from protomq._push_results import Listener
from protomq._push_state import Run
from protomq._push_work import Worker
from protomq._queue_listener import QueueListener
from protomq._queue_locks import RETRY_S
from protomq._seldom import SaidSeldom
from protomq.errors import (
    ClosedError,
    ConnectionLostError,
    MemberUnknownError,
    NotMasterError,
    ProtomqError,
    SystemBusyError,
    UnknownMethodError,
)
from protomq.v1.pull_service_pb2 import PULL_STATUS_FOUND, PullResponse
from protomq.v1.queue_lock_service_pb2 import LockQueuesRequest
from protomq.wire.record import RecordTemplate
from tests.support.fake_driver import FakeWorld, route_of

from .test_queue_locks import Lockers
from .test_stopped_member import GAP_S, FakeMember

A0, A1 = (MessageQueue("T", "a", queue_id) for queue_id in (0, 1))


class Lost(QueueListener):
    def __init__(self) -> None:
        self.queues: list[MessageQueue] = []

    def on_lost(self, queues: Sequence[MessageQueue]) -> None:
        self.queues += queues


class Node:
    """A member with locks of two queues at a broker; of each, messages have come that nobody has begun."""

    def __init__(self) -> None:
        self.world = FakeWorld(route_of("T", "a", queues=2))
        self.broker, self.lost = Lockers(self.world), Lost()
        self.member = FakeMember(self.world)
        self.member.state.locks_queues = True
        options = ConsumerOptions(group="g", lock_queues=True, auto_commit=False)
        self.steps = ConsumerSteps(options, self.world.now_s, self.lost, member=self.member)
        self.world.driver.run(self.steps.subscribe("T", (), NO_FILTER))
        self.member.state.claim(self.steps.state.queues)
        self.steps.state.start_all([A0, A1], {0: 0, 1: 0}, {}, 7)
        for queue in (A0, A1):
            self.pulled(queue, 5)
        assert self.begun() == [0, 0]
        self.world.calls.clear()

    def pulled(self, queue: MessageQueue, count: int) -> None:
        state = self.steps.state
        ticket = state.begin(queue)
        answer = PullResponse(status=PULL_STATUS_FOUND, next_offset=ticket.queue_offset + count, end_offset=99, topic_incarnation=7)
        for offset in range(ticket.queue_offset, ticket.queue_offset + count):
            record = answer.records.add()
            record.ParseFromString(RecordTemplate("T", queue.queue_id, 0).encode(b"x", offset, 0))
            record.queue_offset = offset
        state.answered(ticket, answer.SerializeToString(), self.world.now_s())

    def begun(self) -> list[int]:
        """The offsets that a poll hands out, one of each queue."""
        return [message.queue_offset for _ in range(2) for message in self.steps.state.take(1)]

    def breaks(self) -> None:
        """The connection breaks; the next call is on its way."""
        self.member.fail()
        self.member.call()

    def is_answered(self) -> None:
        self.member.answer()
        self.member.call()

    def poll(self) -> None:
        if not self.steps.group_due_in_s(self.world.now_s()):
            self.world.driver.run(self.steps.before_poll())

    def asked(self) -> list[list[int]]:
        """The queues of each call that locks."""
        requests = [LockQueuesRequest.FromString(request) for _, method, request, _ in self.world.calls if method == LOCK_QUEUES]
        return [sorted(queue.queue_id for queue in request.queues) for request in requests]


@pytest.fixture
def node() -> Node:
    return Node()


def test_from_the_break_on_nothing_is_begun_until_the_locks_are_renewed_in_one_call(node: Node) -> None:
    assert node.steps.may_begin(A0)
    node.breaks()
    assert not node.steps.may_begin(A0)
    assert node.steps.stands(A0), "what it has done it commits: its token says whether it may"
    node.poll()
    assert (node.begun(), node.asked()) == ([], [])
    node.is_answered()
    assert not node.steps.may_begin(A0)
    assert node.begun() == []
    node.poll()
    assert node.asked() == [[0, 1]]
    assert node.steps.may_begin(A0)
    assert node.begun() == [1, 1]
    node.poll()
    assert node.asked() == [[0, 1]]
    assert node.lost.queues == []


def test_what_another_has_locked_meanwhile_is_lost_before_anything_is_begun_and_the_rest_goes_on(node: Node) -> None:
    node.breaks()
    node.broker.owners[0] = ("other", 99)
    node.is_answered()
    assert node.begun() == []
    node.poll()
    assert node.lost.queues == [A0]
    assert (node.steps.may_begin(A0), node.steps.may_begin(A1)) == (False, True)
    assert [message.queue for message in node.steps.state.take(9)] == [A1] * 4


def test_who_cannot_reach_the_broker_waits_for_as_long_as_that_is_so_and_does_not_spin(node: Node) -> None:
    for _ in range(int(GAP_S * EXPIRY_PART) - 1):
        node.breaks()
        node.world.advance(1.0)
        node.poll()
        assert not node.steps.may_begin(A0)
        assert node.begun() == []
        assert node.steps.locks is not None
        assert node.steps.locks.due_in_s(node.world.now_s()) > 0


@pytest.mark.parametrize("error", [SystemBusyError("busy"), MemberUnknownError("who?")])
def test_a_renewal_that_fails_is_made_again_and_nothing_is_begun_before(node: Node, error: ProtomqError) -> None:
    node.breaks()
    node.is_answered()
    node.world.failures["a"].extend([error] * 9)
    node.poll()
    node.world.failures["a"].clear()
    tries = len(node.asked())
    assert not node.steps.may_begin(A0)
    assert node.begun() == []
    node.poll()
    assert len(node.asked()) == tries
    node.world.advance(RETRY_S)
    node.poll()
    assert len(node.asked()) == tries + 1
    assert node.begun() == [1, 1]


def test_a_break_while_the_locks_are_renewed_counts(node: Node) -> None:
    lock = node.world.answers[LOCK_QUEUES]

    def lock_and_break(server: str, request: bytes) -> bytes:
        node.world.answers[LOCK_QUEUES] = lock
        answer = lock(server, request)
        node.breaks()
        return answer

    node.world.answers[LOCK_QUEUES] = lock_and_break
    node.breaks()
    node.is_answered()
    node.poll()
    assert not node.steps.may_begin(A0)
    assert node.begun() == []
    node.is_answered()
    node.poll()
    assert node.asked() == [[0, 1]] * 2
    assert node.begun() == [1, 1]


@pytest.mark.parametrize("error", [NotMasterError("a slave"), UnknownMethodError("of an older version")])
def test_where_nobody_is_given_locks_the_member_goes_on(node: Node, error: ProtomqError) -> None:
    node.breaks()
    node.is_answered()
    node.world.failures["a"].append(error)
    node.poll()
    assert node.begun() == [1, 1]


def test_a_queue_that_comes_meanwhile_is_not_begun_before_the_locks_of_its_broker_are_renewed() -> None:
    node = Node()
    del node.broker.owners[1]
    assert node.steps.locks is not None
    node.steps.locks.forget_queues([A1])
    node.breaks()
    node.world.driver.run(node.steps.locks.follow([A0, A1], node.steps._limits))
    assert node.asked() == [[1]]
    assert node.steps.locks.locked([A0, A1]) == [A0, A1]
    assert not node.steps.may_begin(A1)
    node.is_answered()
    node.poll()
    assert node.asked() == [[1], [0, 1]]
    assert node.steps.may_begin(A1)


def test_a_member_that_is_another_one_by_now_has_nothing_to_renew(node: Node) -> None:
    node.breaks()
    node.member.state.restart()
    assert node.member.state.unsure == {}


def test_a_broker_that_is_not_needed_any_more_is_forgotten_with_its_break(node: Node) -> None:
    node.breaks()
    node.member.state.claim([])
    node.member.state.want({"T": "*"}, {}, {"T": 1})
    node.member.fail()
    assert node.member.state.unsure == {}


def test_calls_of_a_member_without_locks_break_without_consequences(node: Node) -> None:
    node.member.state.locks_queues = False
    node.breaks()
    assert node.member.state.unsure == {}


def test_a_pull_that_breaks_may_tell_of_a_call_that_has_and_the_broker_is_asked(node: Node) -> None:
    queue = node.steps.state.due(node.world.now_s())[0]
    ticket = node.steps.state.begin(queue, node.world.now_s())
    node.world.driver.run(node.steps.take_error(ticket, ConnectionLostError("reset")))
    assert not node.steps.may_begin(A0)
    assert node.begun() == []
    assert node.member.state.due(node.world.now_s()) == ["a"]
    node.is_answered()
    node.poll()
    assert (node.begun(), node.asked()) == ([], []), "that call was sent before"
    node.is_answered()
    node.poll()
    assert (node.begun(), node.asked()) == ([1, 1], [[0, 1]])


def test_the_answer_behind_a_pull_that_broke_wakes_a_poll_that_sleeps(node: Node) -> None:
    """Its locks are to be renewed, and nothing else that it could hear of has changed."""
    queue = node.steps.state.due(node.world.now_s())[0]
    node.world.driver.run(node.steps.take_error(node.steps.state.begin(queue, node.world.now_s()), ConnectionLostError("reset")))
    node.member.call()
    before = node.member.state.news
    node.member.answer()
    assert node.member.state.news > before


def test_a_loop_hands_on_nothing_of_a_membership_that_is_over(node: Node) -> None:
    """As of a process that was stopped: no call has broken, and the tokens are still there."""
    loop = Loop()
    loop.fill(node.steps.state.take(2))
    assert node.steps.may_hand_on(loop)
    node.world.advance(10 * GAP_S)
    assert node.steps.is_locked(A0)
    assert not node.steps.may_hand_on(loop)


def test_who_asks_since_a_pull_broke_does_not_wait_for_a_dead_connection_for_as_long_as_a_call_is_held(node: Node) -> None:
    queue = node.steps.state.due(node.world.now_s())[0]
    node.world.driver.run(node.steps.take_error(node.steps.state.begin(queue, node.world.now_s()), ConnectionLostError("reset")))
    assert node.member.state.begin("a", node.world.now_s())[3] == DOUBT_S
    node.member.call()
    node.member.answer()
    assert node.member.state.begin("a", node.world.now_s())[3] == HOLD_S + CALL_MARGIN_S


@pytest.mark.parametrize("error", [SystemBusyError("busy"), ClosedError("closed")])
def test_a_pull_that_fails_otherwise_tells_nothing(node: Node, error: ProtomqError) -> None:
    queue = node.steps.state.due(node.world.now_s())[0]
    node.world.driver.run(node.steps.take_error(node.steps.state.begin(queue, node.world.now_s()), error))
    assert node.steps.may_begin(A0)


# -- who begins messages --------------------------------------------------------------------------------------------------


def run_of(listen: Callable[[Any], Any], batch_size: int | None, *, is_orderly: bool) -> Run:
    messages: Any = deque([mock.Mock(_queue_offset=offset) for offset in range(4)])
    return Run(mock.Mock(queue=A0), Listener.of(listen, batch_size), messages, 4, 0.0, is_orderly)


@pytest.mark.parametrize("is_orderly", [True, False])
@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize("is_coroutine", [True, False])
def test_a_listener_in_order_ends_its_message_and_is_given_no_other(is_coroutine: bool, batch_size: int | None, is_orderly: bool) -> None:
    begun: list[object] = []
    worker = Worker(lambda *_: None, SaidSeldom(lambda: 0.0))
    worker.is_locked = lambda queue: queue == A0 and len(begun) < 2

    def listen(given: Any) -> None:
        begun.append(given)

    async def listen_async(given: Any) -> None:
        begun.append(given)

    run = run_of(listen_async if is_coroutine else listen, batch_size, is_orderly=is_orderly)
    if is_coroutine:
        asyncio.run(worker.work_async(run))
    else:
        worker.work(run)
    assert (len(begun), len(run.done), len(run.messages)) == ((2, 2, 2) if is_orderly else (4, 4, 0))


class Looped:
    """A consumer that is looped over: what its polls bring, and which queues are its own."""

    def __init__(self, consumer: PullConsumer | AsyncPullConsumer, node: Node) -> None:
        self._node = node
        consumer._steps, consumer._state, consumer._auto_commits = node.steps, node.steps.state, False

    def poll(self, timeout_s: float, max_messages: int, *, loop: Loop) -> None:
        """What `_poll_for` does of it."""
        state = self._node.steps.state
        state.user_came_back(loop)
        state.loop_over(loop, state.take(max_messages))


def loop_over(node: Node, count: int, meanwhile: dict[int, Callable[[], None]], *, is_async: bool) -> list[tuple[int, int]]:
    """The messages that a loop is given, by queue and offset; ends after so many, or a poll in vain."""
    found: list[tuple[int, int]] = []

    def take(message: Message) -> bool:
        found.append((message.queue.queue_id, message.queue_offset))
        meanwhile.get(len(found), lambda: None)()
        return len(found) < count

    async def loop_async() -> None:
        consumer = AsyncPullConsumer("g", namesrv="127.0.0.1:1", lock_queues=True)
        looped = Looped(consumer, node)

        async def poll(loop: Loop) -> None:
            looped.poll(1.0, 512, loop=loop)
            if loop.is_through:
                loop.is_over = True

        consumer._poll_for_loop = poll  # type: ignore[method-assign]
        async for message in consumer:
            if not take(message):
                break

    if is_async:
        asyncio.run(loop_async())
        return found
    consumer = PullConsumer("g", namesrv="127.0.0.1:1", lock_queues=True)
    looped = Looped(consumer, node)

    def poll(timeout_s: float, max_messages: int, *, loop: Loop) -> None:
        looped.poll(timeout_s, max_messages, loop=loop)
        if loop.is_through:
            consumer._closed = True

    consumer._poll_for = poll  # type: ignore[assignment, method-assign]
    loop: Iterator[Message] = iter(consumer)
    for message in loop:
        if not take(message):
            break
    return found


@pytest.mark.parametrize("is_async", [False, True])
def test_a_loop_hands_on_nothing_more_of_what_it_has_polled(node: Node, is_async: bool) -> None:
    assert loop_over(node, 99, {3: node.breaks}, is_async=is_async) == [(0, 1), (0, 2), (0, 3)]
    assert node.steps.state.to_commit(safe_only=True) == {A0: 4, A1: 1}, "the three are finished, and nothing else"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_loop_without_a_break_hands_on_all(node: Node, is_async: bool) -> None:
    assert loop_over(node, 8, {}, is_async=is_async) == [(queue_id, offset) for queue_id in (0, 1) for offset in (1, 2, 3, 4)]


