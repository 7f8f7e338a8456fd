"""Push consumers: which signals end `run`, what a second one does while it stops, and threads that cannot be started. Without brokers."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protomq import AsyncPushConsumer, PushConsumer
from protomq._requests import ReplyInbox
from protomq.errors import ClientError
from protomq.testing import FakeGroup


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Which signals the program's own handlers got."""
    got: list[int] = []
    before = {number: signal.signal(number, lambda number, _: got.append(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    yield got
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_sigterm_does_not_end_a_drain_and_a_second_interrupt_does(
    ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = PushConsumer("g")

    def stop() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ended
        os.kill(os.getpid(), signal.SIGINT)
        return 7

    monkeypatch.setattr(consumer, "start", lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(consumer, "stop", stop)
    assert consumer.run() == 7
    assert ended == [signal.SIGINT]
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [signal.SIGINT, signal.SIGTERM]


def test_what_ends_a_drain_gives_the_signals_back(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = PushConsumer("g")
    monkeypatch.setattr(consumer, "start", consumer.request_stop)

    def stop() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(consumer, "stop", stop)
    with pytest.raises(KeyboardInterrupt):
        consumer.run()
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [signal.SIGTERM]


@pytest.mark.usefixtures("ended")
def test_coroutines_have_the_same_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = AsyncPushConsumer("g")

    async def start() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def stop() -> int:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
        return 7

    monkeypatch.setattr(consumer, "start", start)
    monkeypatch.setattr(consumer, "stop", stop)
    assert asyncio.run(consumer.run()) == 7
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_threads_that_cannot_be_started_are_started_when_there_is_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    room_count = 2

    def start(thread: threading.Thread) -> None:
        if len(started) == room_count:
            raise RuntimeError("can't start new thread")
        started.append(thread)

    consumer = PushConsumer("g")
    monkeypatch.setattr(consumer, "_consumer", object())
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError):
        consumer.set_concurrency(5)
    assert consumer._pool == set(started)
    room_count = 5
    consumer.set_concurrency(5)
    assert len(started) == 5
    assert consumer._pool == set(started)


DEATHS = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), ValueError("x")]


@pytest.mark.parametrize("error", DEATHS, ids=type)
@pytest.mark.usefixtures("ended")
def test_a_thread_that_dies_ends_the_consumer_and_its_run(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    consumer, stopped = PushConsumer("g"), threading.Event()

    def die() -> None:
        raise error

    def stop() -> int:
        stopped.set()
        consumer.request_stop()
        return 0

    monkeypatch.setattr(consumer, "stop", stop)
    monkeypatch.setattr(
        consumer, "start", lambda: threading.Thread(target=consumer._until_death, args=(die,), name="protomq-push").start()
    )
    with pytest.raises(ClientError, match="the push consumer of group g stopped by itself") as raised:
        consumer.run()
    assert raised.value.__cause__ is error
    assert stopped.wait(10)
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]
    assert caplog.messages == ["protomq-push of the push consumer of group g has died: the consumer stops"]


@pytest.mark.parametrize("error", DEATHS[2:], ids=type)
@pytest.mark.usefixtures("ended")
def test_a_task_that_dies_ends_the_consumer_and_its_run(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = AsyncPushConsumer("g")
    tasks = []

    async def die() -> None:
        raise error

    async def start() -> None:
        tasks.append(asyncio.create_task(consumer._until_death(die), name="protomq-push"))

    async def stop() -> int:
        consumer.request_stop()
        return 0

    monkeypatch.setattr(consumer, "stop", stop)
    monkeypatch.setattr(consumer, "start", start)
    with pytest.raises(ClientError, match="the push consumer of group g stopped by itself") as raised:
        asyncio.run(asyncio.wait_for(consumer.run(), 10))
    assert raised.value.__cause__ is error
    assert caplog.messages == ["protomq-push of the push consumer of group g has died: the consumer stops"]


async def test_a_task_that_is_cancelled_from_outside_has_not_died(caplog: pytest.LogCaptureFixture) -> None:
    consumer = AsyncPushConsumer("g")
    task = asyncio.create_task(consumer._until_death(partial(asyncio.sleep, 60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    consumer._raise_death()
    assert not caplog.records


async def test_a_task_that_is_cancelled_before_it_begins_leaves_no_coroutine(recwarn: pytest.WarningsRecorder) -> None:
    consumer = AsyncPushConsumer("g")
    task = asyncio.create_task(consumer._until_death(partial(asyncio.sleep, 60)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    assert not list(recwarn)


def test_a_task_whose_loop_was_closed_before_its_end_has_not_died(caplog: pytest.LogCaptureFixture) -> None:
    consumer = AsyncPushConsumer("g")
    loop = asyncio.new_event_loop()
    task = loop.create_task(consumer._until_death(partial(asyncio.sleep, 60)))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    del loop, task
    gc.collect()
    consumer._raise_death()
    assert not [record for record in caplog.records if record.name == "protomq"]


async def test_an_interrupt_in_a_task_is_the_programs() -> None:
    consumer = AsyncPushConsumer("g")

    async def interrupted() -> None:
        raise KeyboardInterrupt

    work = consumer._until_death(interrupted)
    consumer._pool.clear()
    with pytest.raises(KeyboardInterrupt):
        await work
    consumer._raise_death()


def test_who_stops_waits_for_a_stop_that_is_under_way() -> None:
    """Else a program ends before its last commit, as `run` does when a thread has died."""

    class Closing:
        def wakeup(self) -> None: ...

        def close(self) -> None:
            is_closing.set()
            may_close.wait(10)
            ended.append("closed")

    def stop() -> None:
        consumer.stop()
        ended.append("stopped")

    consumer, ended = PushConsumer("g"), list[str]()
    is_closing, may_close = threading.Event(), threading.Event()
    consumer._consumer = cast(Any, Closing())
    threads = [threading.Thread(target=stop) for _ in range(2)]
    threads[0].start()
    assert is_closing.wait(10)
    threads[1].start()
    threads[1].join(0.1)
    may_close.set()
    for thread in threads:
        thread.join(10)
    assert ended == ["closed", "stopped", "stopped"]


async def test_who_stops_waits_for_tasks_that_stop() -> None:
    class Closing:
        async def close(self) -> None:
            is_closing.set()
            await may_close.wait()
            ended.append("closed")

    async def stop() -> None:
        await consumer.stop()
        ended.append("stopped")

    consumer, ended = AsyncPushConsumer("g"), list[str]()
    is_closing, may_close = asyncio.Event(), asyncio.Event()
    consumer._consumer, consumer._loop = cast(Any, Closing()), asyncio.get_running_loop()
    tasks = [asyncio.create_task(stop())]
    await is_closing.wait()
    tasks.append(asyncio.create_task(stop()))
    await asyncio.sleep(0)
    may_close.set()
    await asyncio.gather(*tasks)
    assert ended == ["closed", "stopped", "stopped"]


def test_a_thread_may_set_the_concurrency_of_coroutines(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = AsyncPushConsumer("g")
    begun: list[object] = []

    def runs_wanted() -> int:
        begun.append(asyncio.get_running_loop())
        return 0

    async def run() -> None:
        monkeypatch.setattr(consumer, "_consumer", SimpleNamespace(wake=lambda: begun.append("wake")))
        consumer._loop = asyncio.get_running_loop()
        monkeypatch.setattr(consumer._state, "runs_wanted", runs_wanted)
        consumer.suspend()
        for change in (lambda: consumer.set_concurrency(3), consumer.resume):
            await asyncio.to_thread(change)
        consumer.set_concurrency(4)
        assert begun == [consumer._loop, "wake", consumer._loop]

    asyncio.run(run())
    assert (consumer.concurrency, consumer.is_suspended) == (4, False)


@pytest.mark.parametrize("asks", [True, False])
def test_a_service_that_returns_its_answer_is_told_to_reply(asks: bool, caplog: pytest.LogCaptureFixture) -> None:
    consumer = PushConsumer("g")
    consumer.subscribe("t", lambda message: b"answer")
    group = FakeGroup(consumer)
    group.send("t", b"question", properties=ReplyInbox("t", "b").properties("call", 60.0) if asks else {})
    group.deliver()
    assert sum("which is no result" in text for text in caplog.messages) == 1
    hints = [text for text in caplog.messages if text.endswith("waits for a reply: call reply(message, ...)")]
    assert len(hints) == asks
