"""What a queue listener is told, and what is committed before queues go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from protomq import AsyncPullConsumer, MessageQueue, PullConsumer, QueueListener
from protomq._async_steps import AsyncDriver
from protomq._consumer_options import ConsumerOptions
from protomq._consumer_steps import ConsumerSteps
from protomq._filters import NO_FILTER
from protomq._methods import COMMIT_OFFSETS, GET_OFFSETS, GET_QUEUE_RANGE
from protomq._queue_listener import told
from protomq.errors import RequestTimeoutError, TopicRecreatedError, WrongTypeError
from protomq.v1 import consumer_service_pb2 as pb
from tests.support.fake_driver import FakeWorld, route_of

Q0, Q1, Q2 = (MessageQueue("T", "a", queue_id) for queue_id in range(3))


class Notes(QueueListener):
    """Writes down what it is told, and what was committed by then."""

    def __init__(self, world: FakeWorld) -> None:
        self.world = world
        self.told: list[tuple[str, tuple[MessageQueue, ...], int]] = []

    def _note(self, what: str, queues: Sequence[MessageQueue]) -> None:
        commits = sum(method == COMMIT_OFFSETS for _, method, *_ in self.world.calls)
        self.told.append((what, tuple(queues), commits))

    def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
        self._note("assigned", queues)

    def on_revoked(self, queues: Sequence[MessageQueue]) -> None:
        self._note("revoked", queues)

    def on_lost(self, queues: Sequence[MessageQueue]) -> None:
        self._note("lost", queues)


@pytest.fixture
def world() -> FakeWorld:
    made = FakeWorld(route_of("T", "a", queues=3))
    made.answers[GET_OFFSETS] = lambda server, request: pb.GetOffsetsResponse(
        topic_incarnation=7
    ).SerializeToString()
    made.answers[GET_QUEUE_RANGE] = lambda server, request: pb.GetQueueRangeResponse(
        topic_incarnation=7
    ).SerializeToString()
    return made


def steps_of(world: FakeWorld, listener: QueueListener) -> ConsumerSteps:
    return ConsumerSteps(ConsumerOptions(group="g"), world.now_s, listener)


def assign(world: FakeWorld, steps: ConsumerSteps, *queues: MessageQueue) -> None:
    world.driver.run(steps.assign(queues, (), NO_FILTER))


def deal_with(steps: ConsumerSteps, queue: MessageQueue, upto: int) -> None:
    """As if its messages up to there had been handed out, and the user had come back."""
    steps.state.seek(queue, upto)


def test_only_what_changes_is_told(world: FakeWorld) -> None:
    notes = Notes(world)
    steps = steps_of(world, notes)
    assign(world, steps, Q0, Q1)
    assign(world, steps, Q0, Q1)
    assign(world, steps, Q1, Q2)
    assert [(what, queues) for what, queues, _ in notes.told] == [
        ("assigned", (Q0, Q1)),
        ("revoked", (Q0,)),
        ("assigned", (Q2,)),
    ]


def test_queues_that_go_are_committed_once_the_listener_knows_and_others_are_not(
    world: FakeWorld,
) -> None:
    notes = Notes(world)
    steps = steps_of(world, notes)
    assign(world, steps, Q0, Q1)
    deal_with(steps, Q0, 5)
    deal_with(steps, Q1, 7)
    assign(world, steps, Q1)
    assert notes.told[-1] == ("revoked", (Q0,), 0)
    (commit,) = [request for _, method, request, _ in world.calls if method == COMMIT_OFFSETS]
    assert [(one.queue_id, one.queue_offset) for one in pb.CommitOffsetsRequest.FromString(commit).offsets] == [
        (0, 5)
    ]


def test_a_seek_in_on_assigned_decides_where_a_queue_begins(world: FakeWorld) -> None:
    class Seeks(QueueListener):
        def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
            for queue in queues:
                steps.state.seek(queue, 42)

    steps = steps_of(world, Seeks())
    assign(world, steps, Q0)
    assert steps.state.position(Q0) == 42
    # A reset from now on is followed; where the queue begins is not asked.
    assert [method for _, method, _, _ in world.calls] == [GET_OFFSETS]
    assert steps.state.reset_epoch(Q0) == 0


class OwnError(BaseException):
    """Of a library that wants to get through `except Exception`."""


@pytest.mark.parametrize("error", [RuntimeError, OwnError, GeneratorExit, asyncio.CancelledError])
def test_a_listener_that_raises_is_logged_and_the_change_goes_on(
    world: FakeWorld, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    class Fails(QueueListener):
        def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
            raise error("no")

        on_revoked = on_assigned

    steps = steps_of(world, Fails())
    with caplog.at_level(logging.ERROR, "protomq"):
        assign(world, steps, Q0)
        assign(world, steps, Q1)
    assert steps.state.queues == (Q1,)
    failed = "the queue listener's on_assigned failed"
    assert [record.getMessage() for record in caplog.records] == [failed] * 3


@pytest.mark.parametrize("error", [RuntimeError, OwnError, SystemExit, asyncio.CancelledError])
def test_a_coroutine_that_raises_is_logged(caplog: pytest.LogCaptureFixture, error: type[BaseException]) -> None:
    async def on_assigned(queues: Sequence[MessageQueue]) -> None:
        raise error("no")

    async def tell() -> None:
        awaited = told(on_assigned, [])
        assert awaited is not None
        await awaited

    with caplog.at_level(logging.ERROR, "protomq"):
        asyncio.run(tell())
    assert [record.getMessage() for record in caplog.records] == ["the queue listener's on_assigned failed"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_on_the_main_thread_an_interrupt_and_an_exit_are_the_programs(error: type[BaseException]) -> None:
    def on_assigned(queues: Sequence[MessageQueue]) -> None:
        raise error

    with pytest.raises(error):
        told(on_assigned, [])


def test_a_listener_that_changes_the_queues_is_told_of_the_change_afterwards(world: FakeWorld) -> None:
    class TakesOne(Notes):
        def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
            super().on_assigned(queues)
            if Q1 in queues:
                assign(world, steps, Q0)

    notes = TakesOne(world)
    steps = steps_of(world, notes)
    assign(world, steps, Q0, Q1)
    assert steps.state.queues == (Q0,)
    assert [(what, queues) for what, queues, _ in notes.told] == [
        ("assigned", (Q0, Q1)),
        ("revoked", (Q1,)),
    ]
    assert steps.state.position(Q0) == 0, "the queue that stayed was looked up"


def test_a_commit_that_a_broker_does_not_take_keeps_no_queue(world: FakeWorld) -> None:
    steps = steps_of(world, Notes(world))
    assign(world, steps, Q0)
    deal_with(steps, Q0, 5)
    world.failures["a"].extend(RequestTimeoutError("late") for _ in range(9))
    assign(world, steps)
    assert steps.state.queues == ()


def test_a_coroutine_is_awaited_where_tasks_poll_and_refused_where_threads_do(world: FakeWorld) -> None:
    class Waits(QueueListener):
        told_after_waiting = False

        async def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
            await asyncio.sleep(0)
            self.told_after_waiting = True

    class Servers:
        async def call(self, *arguments: object) -> bytes:
            return world.call(*arguments)  # type: ignore[arg-type]

    class Routes:
        async def get(self, topic: str, timeout_s: float) -> object:
            return world.get(topic, timeout_s)

    listener = Waits()
    steps = steps_of(world, listener)
    driver = AsyncDriver(Servers(), Routes())  # type: ignore[arg-type]
    asyncio.run(driver.run(steps.assign((Q0,), (), NO_FILTER)))
    assert listener.told_after_waiting
    with pytest.raises(WrongTypeError, match=r"Waits\.on_assigned is a coroutine"):
        PullConsumer("g", listener=listener)
    AsyncPullConsumer("g", listener=listener)


def test_what_is_no_listener_is_refused() -> None:
    with pytest.raises(WrongTypeError, match="listener is a QueueListener"):
        PullConsumer("g", listener=print)  # type: ignore[arg-type]


def test_queues_of_a_topic_that_was_made_again_are_lost_and_nothing_is_committed(
    world: FakeWorld,
) -> None:
    notes = Notes(world)
    steps = steps_of(world, notes)
    assign(world, steps, Q0, Q1)
    deal_with(steps, Q0, 5)
    steps.state.failed(steps.state.begin(Q0), TopicRecreatedError("made again"), 0.0)
    assign(world, steps, Q0, Q1)
    assert notes.told[1:] == [("lost", (Q0, Q1), 0), ("assigned", (Q0, Q1), 0)]
