"""An event loop ends while something is in line: whoever waits hears of it, the log has one number, and the next loop goes on."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest

from protomq import (
    AsyncProducer,
    AsyncSimpleConsumer,
    AsyncTransactionProducer,
    Message,
    MessageQueue,
    SendResult,
    TransactionDecision,
    _methods,
)
from protomq._async_acks import AckGatherer
from protomq._async_routes import AsyncRoutes
from protomq._end_lines import AsyncEndLine
from protomq._loop_ends import is_closed
from protomq._one_way_failures import OneWayFailures
from protomq._push_results import Listener
from protomq._push_state import Run as PushRun
from protomq._push_work import Worker
from protomq._queue_listener import told
from protomq._requests import ReplyInbox
from protomq._seldom import SaidSeldom
from protomq._transactions import End
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import ClosedError, ProtomqError
from protomq.hooks import Hook
from tests.support.asking_broker import AskingBroker
from tests.support.fake_cluster import FakeAsyncTransport, FakeCluster
from tests.support.waiting import async_wait_for

from .test_async_acks import messages

COMMIT = TransactionDecision.COMMIT
PATIENCE_S = 5.0

Run = Callable[[Coroutine[Any, Any, object]], None]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Of tasks that had not begun when their loop was closed, Python says that nobody awaited them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def run_and_close(main: Coroutine[Any, Any, object]) -> None:
    """As programs do that have no asyncio.run: nobody cancels the tasks."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main)
    loop.close()


def run_in_thread(main: Coroutine[Any, Any, object]) -> None:
    thread = threading.Thread(target=run_and_close, args=(main,))
    thread.start()
    thread.join()


def run_to_end(main: Coroutine[Any, Any, object]) -> None:
    asyncio.run(main)


def run_interrupted(main: Coroutine[Any, Any, object]) -> None:
    """Ctrl-C comes behind it."""

    async def interrupted() -> None:
        await main
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())


every_end = pytest.mark.parametrize("run", [run_to_end, run_and_close, run_in_thread, run_interrupted])


async def in_time(work: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await work


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Stuck(FakeAsyncTransport):
    """Answers nothing of a method while it is stuck."""

    def __init__(self, cluster: FakeCluster, method: MethodInfo) -> None:
        super().__init__(cluster)
        self.method: MethodInfo | None = method

    async def call(self, address: BrokerAddress, method: MethodInfo, *given: Any, **named: Any) -> bytes:
        if method == self.method:
            await asyncio.Event().wait()
        return await super().call(address, method, *given, **named)


# The task that serves a line has not begun after one turn of the loop; after more, its request is on its way.
@pytest.mark.parametrize("turn_count", [1, 9])
@every_end
def test_messages_in_line_are_counted_and_the_next_loop_sends(run: Run, turn_count: int) -> None:
    cluster = FakeCluster()
    transport = Stuck(cluster, _methods.SEND)
    producer = AsyncProducer(transport=transport)

    async def begin() -> None:
        tasks.extend(asyncio.create_task(producer.send("T", b"lost")) for _ in range(3))
        await turns(turn_count)

    async def go_on() -> None:
        transport.method = None
        await producer.send("T", b"x")
        await producer.close()

    def ends_and_goes_on() -> None:
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # A look-up that had not begun.
        run(begin())
        asyncio.run(in_time(go_on()))
        tasks.clear()
        gc.collect()

    tasks: list[asyncio.Task[SendResult]] = []
    with pytest.warns(RuntimeWarning, match=r"3 messages were not sent, or nobody knows: the event loop (ended|was closed)") as caught:
        ends_and_goes_on()
    assert len(caught) == 1
    assert cluster.bodies() == [b"x"]
    assert producer._pending_size == 0


@every_end
def test_a_producer_is_closed_in_the_next_loop(run: Run) -> None:
    producer = AsyncProducer(transport=Stuck(FakeCluster(), _methods.SEND))

    async def begin() -> None:
        tasks.append(asyncio.create_task(producer.send("T", b"lost", timeout_s=60)))
        await turns(5)

    def ends_and_is_closed() -> None:
        run(begin())
        asyncio.run(in_time(producer.close()))

    tasks: list[asyncio.Task[SendResult]] = []
    with pytest.warns(RuntimeWarning, match="1 message was not sent, or nobody knows"):
        ends_and_is_closed()


@pytest.mark.parametrize("hooks", [(), (Hook(),)])
@pytest.mark.parametrize("turn_count", [0, 9])
@every_end
def test_decisions_in_line_are_counted_and_the_next_loop_tells_its_own(
    run: Run, turn_count: int, hooks: tuple[Hook, ...], caplog: pytest.LogCaptureFixture
) -> None:
    broker = AskingBroker()
    transport = Stuck(broker, _methods.END_TRANSACTION)
    producer = AsyncTransactionProducer("g", lambda _: COMMIT, transport=transport, hooks=hooks)

    async def begin() -> None:
        for _ in range(3):
            await producer.send("T", b"", execute=lambda _: None, wait_for_end=False)
        await turns(turn_count)

    async def go_on() -> None:
        transport.method = None
        assert (await producer.send("T", b"", execute=lambda _: None)).is_ended
        await producer.close()

    with caplog.at_level(logging.WARNING):
        run(begin())
        asyncio.run(in_time(go_on()))
        gc.collect()
    told = [record.getMessage() for record in caplog.records if "decision" in record.getMessage()]
    assert len(told) == 1
    assert "may not know yet of 3 decisions on transactions, it will ask: the event loop" in told[0]
    assert broker.told == [("half", COMMIT)]


@every_end
def test_a_decision_is_told_in_the_loop_after_that_of_its_half_message(run: Run) -> None:
    broker = AskingBroker()
    transport = Stuck(broker, _methods.END_TRANSACTION)
    producer = AsyncTransactionProducer("g", lambda _: COMMIT, transport=transport)
    halves: list[SendResult] = []

    async def begin() -> None:
        halves.append((await producer.begin("T", b"")).half)
        tasks.append(asyncio.create_task(producer.end(halves[0], COMMIT)))
        await turns(5)

    async def go_on() -> None:
        transport.method = None
        assert await producer.end(halves[0], COMMIT) is False
        await producer.close()

    tasks: list[asyncio.Task[bool]] = []
    run(begin())
    asyncio.run(in_time(go_on()))
    assert broker.told == [("half", COMMIT)]


@every_end
def test_brokers_of_its_topics_ask_a_producer_in_the_next_loop_too(run: Run) -> None:
    broker = AskingBroker()
    producer = AsyncTransactionProducer("g", lambda _: COMMIT, topics=["T"], transport=FakeAsyncTransport(broker))

    async def answer(handle: str) -> None:
        await producer.start()
        broker.ask(handle)
        await async_wait_for(lambda: (handle, COMMIT) in broker.told, PATIENCE_S)

    run(in_time(answer("first")))
    asyncio.run(in_time(answer("second")))
    asyncio.run(in_time(producer.close()))


@every_end
@pytest.mark.parametrize("begins", [False, True])
def test_the_first_message_in_the_next_loop_tells_brokers_of_its_topics_that_the_producer_is_there(run: Run, begins: bool) -> None:
    """Those of its other topics, too: as the first message of all does."""
    broker = AskingBroker({"T": {"a": 1}, "other": {"b": 1}})
    producer = AsyncTransactionProducer("g", lambda _: COMMIT, topics=["other"], transport=FakeAsyncTransport(broker))

    async def send() -> None:
        if begins:
            await (await producer.begin("T", b"x")).commit()
        else:
            await producer.send("T", b"x", execute=lambda _: COMMIT)

    async def send_again() -> None:
        before = broker.tries("b", _methods.WAIT_FOR_CHECKS)
        await send()
        await async_wait_for(lambda: broker.tries("b", _methods.WAIT_FOR_CHECKS) > before, PATIENCE_S)

    run(in_time(send()))
    asyncio.run(in_time(send_again()))
    asyncio.run(in_time(producer.close()))


async def cancels_all_others(begun: Callable[[], asyncio.Future[Any]], turn_count: int) -> BaseException | None:
    """What a task gets that waits, where all others are cancelled: as a program does before its loop ends."""
    waiting = begun()
    await turns(turn_count)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.wait((waiting,), timeout=PATIENCE_S)
    assert waiting.done()
    return waiting.exception()


@pytest.mark.parametrize(("turn_count", "is_definite"), [(0, True), (5, False)])
async def test_who_waits_for_a_line_whose_task_is_cancelled_gets_an_error(turn_count: int, is_definite: bool) -> None:
    async def call(ends: object, _: float) -> list[bool | ProtomqError]:
        await asyncio.Event().wait()
        return []

    async def run(steps: object) -> Any:
        await asyncio.Event().wait()

    class Steps:
        def ack(self, acked: list[Message]) -> list[Message]:
            return acked

    line, acks = AsyncEndLine(call), AckGatherer(Steps(), run)  # type: ignore[arg-type]
    producer = AsyncProducer(transport=Stuck(FakeCluster(), _methods.SEND))
    await producer.queues("T")
    end = End("T", "a", "handle", COMMIT)
    errors = [
        await cancels_all_others(lambda: line.tell(end, 60.0), turn_count),
        await cancels_all_others(lambda: acks._join(("T", "a"), messages(1)), turn_count),
    ]

    def send() -> asyncio.Future[SendResult]:
        return producer._enqueue(producer._line("T", None, None), producer._core.prepare(b"x"), 1e9).future

    with pytest.warns(RuntimeWarning, match="1 message was not sent"):
        errors.append(await cancels_all_others(send, turn_count))
    for error in errors:
        assert isinstance(error, ClosedError)
        assert error.definite is is_definite
        assert "the event loop ended" in str(error)
    await producer.close()


@pytest.mark.parametrize("turn_count", [1, 9])
@every_end
def test_acknowledgements_in_line_are_counted_and_go_out_in_the_next_loop(
    run: Run, turn_count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = AsyncSimpleConsumer("g", namesrv="127.0.0.1:1")
    is_stuck = True
    told: list[bytes] = []

    def ack(acked: list[Message]) -> Any:
        return acked

    async def drive(acked: Any) -> Any:
        if is_stuck:
            await asyncio.Event().wait()
        told.extend(message.body for message in acked)
        return []

    monkeypatch.setattr(consumer._steps, "ack", ack)
    monkeypatch.setattr(type(consumer._driver), "run", lambda _, steps: drive(steps))
    consumer._begin()

    async def begin() -> None:
        tasks.extend(asyncio.create_task(consumer.ack(messages(2, "a", first))) for first in (1, 3))
        await turns(turn_count)

    tasks: list[asyncio.Task[list[Message]]] = []
    run(begin())
    is_stuck = False
    assert asyncio.run(in_time(consumer.ack(messages(1)))) == []
    assert told == [b"a0"]
    tasks.clear()
    gc.collect()
    (text,) = not_acknowledged(caplog)
    assert re.match("the broker may not know of 4 acknowledgements, .* the event loop (ended|was closed)", text)


def not_acknowledged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of acknowledgements."""
    return [record.getMessage() for record in caplog.records if "acknowledgement" in record.getMessage()]


def test_acknowledgements_of_a_consumer_that_nobody_has_any_more_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def stuck(_: Any) -> Any:
        await asyncio.Event().wait()

    class Steps:
        def ack(self, acked: list[Message]) -> list[Message]:
            return acked

    async def begin() -> None:
        acks = AckGatherer(Steps(), stuck)  # type: ignore[arg-type]
        tasks.append(asyncio.create_task(acks.ack(messages(1))))
        await turns(5)

    tasks: list[asyncio.Task[list[Message]]] = []
    run_and_close(begin())
    tasks.clear()
    gc.collect()
    (text,) = not_acknowledged(caplog)
    assert text.startswith("the broker may not know of 1 acknowledgement, ")


def test_refused_one_way_calls_are_all_counted_where_nobody_closes_their_link(caplog: pytest.LogCaptureFixture) -> None:
    failures = OneWayFailures("a:1")
    for _ in range(5):
        failures.note(_methods.SEND, ClosedError("its event loop ended"))
    del failures
    gc.collect()
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(" of ")[0] for text in texts] == ["a one-way call", "4 one-way calls"]


@every_end
def test_a_look_up_that_ended_with_its_loop_is_begun_again(run: Run) -> None:
    transport = Stuck(FakeCluster(), _methods.GET_ROUTE)
    routes = AsyncRoutes(transport, "127.0.0.1:1")

    async def begin() -> None:
        tasks.append(asyncio.create_task(routes.get("T", 60.0)))
        await turns(3)

    tasks: list[asyncio.Task[Any]] = []
    run(begin())
    transport.method = None
    assert asyncio.run(in_time(routes.get("T", 60.0))).topic == "T"
    asyncio.run(in_time(routes.close()))


def test_what_a_producer_has_left_that_nobody_has_any_more_is_counted() -> None:
    """Its loop was closed. asyncio says that the task was destroyed, to the log."""

    async def begin() -> None:
        producer = AsyncProducer(transport=Stuck(FakeCluster(), _methods.SEND))
        tasks.append(asyncio.create_task(producer.send("T", b"lost")))
        await turns(5)

    tasks: list[asyncio.Task[SendResult]] = []
    run_and_close(begin())
    tasks.clear()
    with pytest.warns(RuntimeWarning, match="1 message was not sent, or nobody knows: the event loop ended"):
        gc.collect()


def test_a_forked_child_begins_without_what_its_parent_has_in_line(caplog: pytest.LogCaptureFixture) -> None:
    broker = AskingBroker()
    transport = Stuck(broker, _methods.END_TRANSACTION)
    producer = AsyncTransactionProducer("g", lambda _: COMMIT, transport=transport)

    async def begin() -> None:
        await producer.send("T", b"", execute=lambda _: None, wait_for_end=False)
        tasks.append(asyncio.create_task(producer.send("T", b"", execute=lambda _: None)))
        await turns(9)

    async def go_on() -> None:
        transport.method = None
        assert (await producer.send("T", b"", execute=lambda _: None)).is_ended
        await producer.close()

    tasks: list[asyncio.Task[Any]] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    child = os.fork()
    if not child:
        try:
            signal.alarm(int(PATIENCE_S))
            asyncio.run(go_on())
            os._exit(0 if broker.told == [("half", COMMIT)] and "decision" not in caplog.text else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    transport.method = None
    for task in tasks:
        task.cancel()
    loop.run_until_complete(producer.close(0.0))
    loop.close()


@pytest.mark.parametrize("turn_count", [1, 2])
async def test_replies_are_waited_for_again_after_somebody_has_cancelled_that(turn_count: int) -> None:
    producer = AsyncProducer(transport=FakeAsyncTransport(FakeCluster()))
    inbox = ReplyInbox("T", "a")
    inbox.begin(asyncio.get_running_loop().create_future())
    producer._requests._follow(inbox)
    producer._requests._tasks["a"].cancel()
    await turns(turn_count)
    producer._requests._follow(inbox)
    assert not producer._requests._tasks["a"].done()
    await producer.close()


async def waits_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def begun_and_left(make: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """The coroutine waits in a task of a loop that is closed, and is garbage then."""

    async def main() -> None:
        task = asyncio.create_task(make())
        kept.append(task)
        await turns(3)
        assert not task.done()

    kept: list[asyncio.Task[object]] = []
    run_and_close(main())
    kept.clear()
    gc.collect()


def of_the_sdk(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("protomq")]


def test_a_queue_listener_that_waits_when_its_loop_is_closed_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def on_revoked(queues: Sequence[MessageQueue]) -> None:
        await waits_for_ever()

    async def tell() -> None:
        awaited = told(on_revoked, [])
        assert awaited is not None
        await awaited

    begun_and_left(tell)
    assert of_the_sdk(caplog) == []


@pytest.mark.parametrize("batch_size", [None, 1])
def test_behind_a_listener_that_waits_when_its_loop_is_closed_no_other_message_begins(
    caplog: pytest.LogCaptureFixture, batch_size: int | None
) -> None:
    begun: list[object] = []

    async def listen(given: Any) -> None:
        begun.append(given)
        await waits_for_ever()

    settled: list[object] = []
    worker = Worker(lambda *said: settled.append(said), SaidSeldom(lambda: 0.0))
    messages: Any = deque([mock.Mock(_queue_offset=0), mock.Mock(_queue_offset=1)])
    run = PushRun(mock.Mock(), Listener.of(listen, batch_size), messages, 2, 0.0)
    begun_and_left(lambda: worker.work_async(run))
    assert (len(begun), settled, of_the_sdk(caplog)) == (1, [], [])


def test_a_check_that_waits_when_its_loop_is_closed_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def check(asked: object) -> TransactionDecision:
        await waits_for_ever()
        return TransactionDecision.COMMIT

    asked: Any = mock.Mock(_check=check, _answering={})
    asked._decide = partial(AsyncTransactionProducer._decide, asked)
    begun_and_left(lambda: AsyncTransactionProducer._answer(asked, "t", "b", mock.Mock()))
    assert of_the_sdk(caplog) == []


@pytest.mark.parametrize("of_own_task", [False, True])
async def test_what_a_listener_raises_itself_is_no_end_of_its_loop(of_own_task: bool) -> None:
    task = asyncio.current_task() if of_own_task else None
    assert is_closed(GeneratorExit(), task) is not of_own_task
    assert not is_closed(RuntimeError(), task)
