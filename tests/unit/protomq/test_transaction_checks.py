"""What a check listener or the local work raises, and what is told of it. A broker in memory, from threads and from coroutines."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from protomq import (
    AsyncTransactionProducer,
    TransactionCheck,
    TransactionDecision,
    TransactionProducer,
    _async_transaction_producer,
    _methods,
    _transaction_producer,
)
from protomq.errors import (
    ConfigurationError,
    ConnectionLostError,
    TopicNotFoundError,
    TransactionEndedError,
    WrongTypeError,
)
from tests.support.asking_broker import AskingBroker, begin, begin_async
from tests.support.fake_cluster import FakeAsyncTransport, FakeSyncTransport
from tests.support.waiting import async_wait_for, wait_for

COMMIT, ROLL_BACK = TransactionDecision.COMMIT, TransactionDecision.ROLL_BACK
PATIENCE_S = 5.0

Listener = Callable[[TransactionCheck], Any]


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> AskingBroker:
    for module in (_transaction_producer, _async_transaction_producer):
        monkeypatch.setattr(module, "PAUSE_S", 0.01)
    return AskingBroker()


def run_until(broker: AskingBroker, happened: Callable[[], object], listener: Listener) -> None:
    with TransactionProducer("g", listener, topics=["T"], transport=FakeSyncTransport(broker)):
        wait_for(happened, PATIENCE_S, pause_s=0.001)


def run_async_until(broker: AskingBroker, happened: Callable[[], object], listener: Listener) -> None:
    async def run() -> None:
        transport = FakeAsyncTransport(broker)
        async with AsyncTransactionProducer("g", listener, topics=["T"], transport=transport):
            await async_wait_for(happened, PATIENCE_S)

    asyncio.run(run())


BOTH = pytest.mark.parametrize("run", [run_until, run_async_until])


@BOTH
@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), ValueError("x")], ids=type)
def test_whatever_a_listener_raises_the_broker_goes_on_asking(
    broker: AskingBroker, run: Callable[..., None], error: BaseException
) -> None:
    def listener(check: TransactionCheck) -> TransactionDecision:
        if check.transaction_handle == "first":
            raise error
        return COMMIT

    broker.ask("first", "second")
    broker.ask("third")
    run(broker, lambda: len(broker.told) == 2, listener)
    assert broker.told == [("second", COMMIT), ("third", COMMIT)]


def test_a_close_tells_what_a_listener_decides_that_runs_and_calls_no_further_one(broker: AskingBroker) -> None:
    asked: list[str] = []
    closes = threading.Event()

    def listener(check: TransactionCheck) -> TransactionDecision:
        asked.append(check.transaction_handle)
        closes.set()
        wait_for(producer._closed.is_set, PATIENCE_S, pause_s=0.001)
        return COMMIT

    broker.ask("first", "second")
    broker.ask("third")
    producer = TransactionProducer("g", listener, transport=FakeSyncTransport(broker))
    producer.begin("T", b"")
    assert closes.wait(PATIENCE_S)
    threads = list(producer._threads)
    producer.close(PATIENCE_S)
    assert not [thread for thread in threads if thread.is_alive()]
    assert (asked, broker.told) == (["first"], [("first", COMMIT)])


def test_a_close_tells_what_a_coroutine_decides_that_runs_and_calls_no_further_one(broker: AskingBroker) -> None:
    async def listener(check: TransactionCheck) -> TransactionDecision:
        asked.append(check.transaction_handle)
        is_asked.set()
        await may_decide.wait()
        return COMMIT

    async def run() -> None:
        producer = AsyncTransactionProducer("g", listener, transport=FakeAsyncTransport(broker))
        await producer.begin("T", b"")
        await is_asked.wait()
        tasks = list(producer._tasks)
        asyncio.get_running_loop().call_later(0.05, may_decide.set)
        await producer.close(PATIENCE_S)
        assert all(task.done() for task in tasks)

    asked: list[str] = []
    is_asked, may_decide = asyncio.Event(), asyncio.Event()
    broker.ask("first", "second")
    broker.ask("third")
    asyncio.run(run())
    assert (asked, broker.told) == (["first"], [("first", COMMIT)])


def test_a_coroutine_may_close_its_producer(broker: AskingBroker) -> None:
    async def listener(check: TransactionCheck) -> TransactionDecision:
        asked.append(check.transaction_handle)
        await producers[0].close(PATIENCE_S)
        return COMMIT

    async def run() -> None:
        producers.append(AsyncTransactionProducer("g", listener, transport=FakeAsyncTransport(broker)))
        await producers[0].begin("T", b"")
        begun_s = time.monotonic()
        await async_wait_for(lambda: asked and not producers[0]._tasks, 2 * PATIENCE_S)
        assert time.monotonic() - begun_s < PATIENCE_S, "it waits for itself"

    asked: list[str] = []
    producers: list[AsyncTransactionProducer] = []
    broker.ask("first", "second")
    asyncio.run(run())
    assert asked == ["first"]


@pytest.mark.parametrize("way", ["in a task", "twice at once"])
def test_a_coroutine_that_closes_its_producer_is_neither_waited_for_nor_cancelled(broker: AskingBroker, way: str) -> None:
    """`asyncio.wait_for` makes a task; and the program may close it at the same time."""

    async def listener(check: TransactionCheck) -> TransactionDecision:
        is_asked.set()
        if way == "in a task":
            await asyncio.create_task(producers[0].close(PATIENCE_S))
        else:
            await asyncio.sleep(0.05)
            await producers[0].close(PATIENCE_S)
        ended.append(check.transaction_handle)
        return COMMIT

    async def run() -> None:
        producers.append(AsyncTransactionProducer("g", listener, transport=FakeAsyncTransport(broker)))
        await producers[0].begin("T", b"")
        await is_asked.wait()
        begun_s = time.monotonic()
        if way == "twice at once":
            await producers[0].close(PATIENCE_S)
        await async_wait_for(lambda: not producers[0]._tasks, 2 * PATIENCE_S)
        assert time.monotonic() - begun_s < PATIENCE_S, "each waits for the other"

    ended: list[str] = []
    is_asked = asyncio.Event()
    producers: list[AsyncTransactionProducer] = []
    broker.ask("first", "second")
    asyncio.run(run())
    assert ended == ["first"]


def test_a_listener_may_close_its_producer(broker: AskingBroker) -> None:
    asked: list[str] = []

    def listener(check: TransactionCheck) -> TransactionDecision:
        asked.append(check.transaction_handle)
        producer.close(PATIENCE_S)
        return COMMIT

    producer = TransactionProducer("g", listener, transport=FakeSyncTransport(broker))
    broker.ask("first", "second")
    producer.begin("T", b"")
    wait_for(lambda: asked and not any(thread.is_alive() for thread in producer._threads), PATIENCE_S, pause_s=0.001)
    assert asked == ["first"]


def test_a_coroutine_that_awaits_what_others_cancelled_is_asked_again(broker: AskingBroker) -> None:
    async def listener(check: TransactionCheck) -> TransactionDecision:
        if check.transaction_handle == "first":
            lookup = asyncio.ensure_future(asyncio.sleep(60))
            lookup.cancel()
            await lookup
        return COMMIT

    broker.ask("first", "second")
    run_async_until(broker, lambda: broker.told, listener)
    assert broker.told == [("second", COMMIT)]


@BOTH
@pytest.mark.parametrize("returned", [None, True, "COMMIT"])
def test_what_is_no_decision_costs_the_other_questions_nothing(
    broker: AskingBroker, run: Callable[..., None], returned: object, caplog: pytest.LogCaptureFixture
) -> None:
    broker.ask("first", "second")
    run(broker, lambda: broker.told, lambda check: returned if check.transaction_handle == "first" else COMMIT)
    assert broker.told == [("second", COMMIT)]
    assert "returns a TransactionDecision" in caplog.text


@BOTH
def test_a_check_that_fails_is_logged_once_a_minute_for_each_kind_of_error(
    broker: AskingBroker, run: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    def listener(check: TransactionCheck) -> TransactionDecision:
        if check.transaction_handle != "last":
            raise KeyError("k") if check.transaction_handle == "other" else ValueError("no database")
        return COMMIT

    broker.ask("first", "second")
    broker.ask("third", "other", "last")
    run(broker, lambda: broker.told, listener)
    told = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert told == [ValueError, KeyError]


def test_a_close_ends_a_listener_that_waits(broker: AskingBroker) -> None:
    async def listener(_: TransactionCheck) -> TransactionDecision:
        is_asked.set()
        await asyncio.sleep(3600)
        return COMMIT

    async def run() -> None:
        options: Any = {"transport": FakeAsyncTransport(broker), "send_timeout_s": 0.05}
        async with AsyncTransactionProducer("g", listener, topics=["T"], **options) as producer:
            await is_asked.wait()
            tasks = list(producer._tasks)
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert all(task.done() for task in tasks)

    is_asked = asyncio.Event()
    broker.ask("first")
    asyncio.run(run())
    assert broker.told == []


def test_the_next_message_begins_the_answers_that_somebody_cancelled(broker: AskingBroker) -> None:
    async def run() -> None:
        async with AsyncTransactionProducer("g", lambda _: COMMIT, transport=FakeAsyncTransport(broker)) as producer:
            await producer.begin("T", b"")
            (task,) = producer._tasks
            task.cancel()
            await asyncio.wait([task])
            broker.ask("first")
            await producer.begin("T", b"")
            await async_wait_for(lambda: broker.told, PATIENCE_S)

    asyncio.run(run())
    assert broker.told == [("first", COMMIT)]


def send(broker: AskingBroker, execute: Callable[[object], Any]) -> None:
    with TransactionProducer("g", lambda _: COMMIT, transport=FakeSyncTransport(broker)) as producer:
        producer.send("T", b"", execute=execute)


def send_async(broker: AskingBroker, execute: Callable[[object], Any]) -> None:
    async def run() -> None:
        async with AsyncTransactionProducer("g", lambda _: COMMIT, transport=FakeAsyncTransport(broker)) as producer:
            # Not in a task: asyncio would raise it in the loop, too.
            await producer.send("T", b"", execute=execute)

    asyncio.run(run())


@pytest.mark.parametrize("do", [send, send_async, begin, begin_async])
@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyboardInterrupt(), []), (SystemExit(1), []), (asyncio.CancelledError(), []), (ValueError("x"), [("half", ROLL_BACK)])],
    ids=lambda value: type(value).__name__,
)
def test_work_that_failed_is_rolled_back_and_work_that_was_interrupted_is_asked_about(
    broker: AskingBroker, do: Callable[..., None], error: BaseException, told: list[tuple[str, int]]
) -> None:
    """An interrupt may come right behind the commit of the database."""

    def execute(_: object) -> None:
        raise error

    with pytest.raises(type(error)):
        do(broker, execute)
    assert broker.told == told


@pytest.mark.parametrize("do", [send, send_async])
@pytest.mark.parametrize(
    ("returned", "told"),
    [(False, []), ("ROLL_BACK", []), (5, []), ((one for one in "17A"), [("half", ROLL_BACK)]), (COMMIT, [("half", COMMIT)])],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_decision_leaves_a_transaction_open_and_work_that_never_ran_is_rolled_back(
    broker: AskingBroker, do: Callable[..., None], returned: object, told: list[tuple[str, int]]
) -> None:
    with nullcontext() if returned is COMMIT else pytest.raises(WrongTypeError, match="execute return"):
        do(broker, lambda _: returned)
    assert broker.told == told


def generator(_: object) -> Iterator[None]:
    yield


async def coroutine(_: object) -> None: ...


class Coroutine:
    async def __call__(self, _: object) -> None: ...


WRONG_CALLS: list[Any] = [lambda: None, lambda a, b: None, lambda a, *, b: None, partial(lambda: None), generator]


@pytest.mark.parametrize(
    ("do", "client", "transport", "wrong"),
    [
        *((send, TransactionProducer, FakeSyncTransport, wrong) for wrong in [*WRONG_CALLS, coroutine, Coroutine()]),
        *((send_async, AsyncTransactionProducer, FakeAsyncTransport, wrong) for wrong in WRONG_CALLS),
    ],
)
def test_what_cannot_be_a_check_or_the_work_is_refused_where_it_is_given(
    broker: AskingBroker, do: Callable[..., None], client: Any, transport: Any, wrong: Any
) -> None:
    with pytest.raises((ConfigurationError, WrongTypeError), match=r"^check is (a function|called with one TransactionCheck)"):
        client("g", wrong, transport=transport(broker))
    with pytest.raises((ConfigurationError, WrongTypeError), match=r"^execute is (a function|called with one SendResult)"):
        do(broker, wrong)
    assert (broker.told, broker.bodies()) == ([], [])


@pytest.mark.parametrize("right", [print, lambda *all_: None, lambda a, b=1: None, lambda a, *, b=1: None, partial(print, 1), dict])
def test_what_takes_one_argument_is_a_check(broker: AskingBroker, right: Any) -> None:
    TransactionProducer("g", right, transport=FakeSyncTransport(broker)).close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # It has threads; the child needs none of them.
def test_a_forked_child_sends_and_answers_for_itself_whatever_another_thread_was_doing(broker: AskingBroker) -> None:
    with TransactionProducer("g", lambda _: COMMIT, topics=["T"], transport=FakeSyncTransport(broker)) as producer:
        wait_for(lambda: producer._listening, PATIENCE_S, pause_s=0.001)
        with producer._lock:  # Another thread begins to listen to another broker.
            child = os.fork()
            if not child:
                try:
                    signal.alarm(int(PATIENCE_S))
                    producer.begin("T", b"")
                    broker.ask("first")
                    wait_for(lambda: broker.told, PATIENCE_S, pause_s=0.001)
                    names = sorted(thread.name for thread in threading.enumerate()[1:])
                    os._exit(0 if names == ["protomq-transaction-checks"] * 2 else 1)
                finally:
                    os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


REFUSED = "the transaction of message 1 has expired"


def send_and_look(broker: AskingBroker) -> bool:
    with TransactionProducer("g", lambda _: COMMIT, transport=FakeSyncTransport(broker)) as producer:
        return producer.send("T", b"", execute=lambda _: COMMIT).is_ended


def send_async_and_look(broker: AskingBroker) -> bool:
    async def run() -> bool:
        async with AsyncTransactionProducer("g", lambda _: COMMIT, transport=FakeAsyncTransport(broker)) as producer:
            return (await producer.send("T", b"", execute=lambda _: COMMIT)).is_ended

    return asyncio.run(run())


def begin_and_commit(broker: AskingBroker) -> None:
    with TransactionProducer("g", lambda _: COMMIT, transport=FakeSyncTransport(broker)) as producer:
        producer.begin("T", b"").commit()


@pytest.mark.parametrize("look", [send_and_look, send_async_and_look])
def test_a_refusal_for_good_is_raised_unless_an_earlier_try_may_have_ended_the_transaction(
    broker: AskingBroker, look: Callable[[AskingBroker], bool], caplog: pytest.LogCaptureFixture
) -> None:
    broker.fail("a", _methods.END_TRANSACTION, TransactionEndedError(REFUSED))
    with pytest.raises(TransactionEndedError, match=REFUSED) as caught:
        look(broker)
    assert caught.value.definite
    assert REFUSED not in caplog.text
    broker.fail("a", _methods.END_TRANSACTION, ConnectionLostError("the answer was lost"), TransactionEndedError(REFUSED))
    assert not look(broker)
    assert REFUSED in caplog.text
    broker.fail("a", _methods.END_TRANSACTION, ConnectionLostError("the answer was lost"), TransactionEndedError(REFUSED))
    with pytest.raises(TransactionEndedError, match=REFUSED) as caught:
        begin_and_commit(broker)
    assert not caught.value.definite


@pytest.mark.parametrize("is_async", [False, True])
def test_a_decision_finds_its_broker_by_another_topic_where_its_own_was_deleted(is_async: bool) -> None:
    """Others wait in its line: it must not hold them up until its time is over."""
    cluster = AskingBroker({"gone": {"a": 1}, "T": {"a": 1}})

    def delete() -> None:
        del cluster.topics["gone"]
        cluster.script("a", *(TopicNotFoundError("it was deleted") for _ in range(9)))

    def run() -> None:
        with TransactionProducer("g", lambda _: COMMIT, transport=FakeSyncTransport(cluster)) as producer:
            begun = [producer.begin(topic) for topic in ("gone", "T")]
            delete()
            with pytest.raises(TopicNotFoundError):
                producer.begin("gone", timeout_s=0.3)
            for transaction in begun:
                transaction.commit()

    async def run_async() -> None:
        async with AsyncTransactionProducer("g", lambda _: COMMIT, transport=FakeAsyncTransport(cluster)) as producer:
            begun = [await producer.begin(topic) for topic in ("gone", "T")]
            delete()
            with pytest.raises(TopicNotFoundError):
                await producer.begin("gone", timeout_s=0.3)
            await asyncio.gather(*(transaction.commit() for transaction in begun))

    if is_async:
        asyncio.run(run_async())
    else:
        run()
    assert cluster.told == [("half", COMMIT)] * 2
