"""What a push consumer that runs refuses changes nothing: it runs on. What its start refuses may be tried again."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from protomq import Admin, AsyncPushConsumer, Message, Producer, PushConsumer
from protomq.errors import ConfigurationError, IllegalFilterError
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, wait_for

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Listened:
    """A topic, and what a listener has seen of it."""

    def __init__(self, broker: Broker, topic: str, producer: Producer) -> None:
        self.namesrv = broker.namesrv
        self.topic = topic
        self.group = f"g-{topic}"
        self.seen: list[bytes] = []
        self._producer = producer

    def listen(self, message: Message) -> None:
        self.seen.append(message.body)

    def check_comes(self, body: bytes) -> None:
        """A message that is sent now comes."""
        self._producer.send(self.topic, body)
        wait_for(lambda: body in self.seen, PATIENCE_S)

    def consumer(self) -> PushConsumer:
        made = PushConsumer(self.group, namesrv=self.namesrv)
        made.subscribe(self.topic, self.listen)
        return made

    def async_consumer(self) -> AsyncPushConsumer:
        made = AsyncPushConsumer(self.group, namesrv=self.namesrv)
        made.subscribe(self.topic, self.listen)
        return made


@pytest.fixture
def listened(protomq_server: Broker, protomq_topic: str, protomq_producer: Producer) -> Listened:
    return Listened(protomq_server, protomq_topic, protomq_producer)


@contextmanager
def refused() -> Iterator[None]:
    """A start of a consumer that runs. Who ends by signals still does."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(ConfigurationError, match=r"runs already.*started once"):
        yield
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


@pytest.mark.parametrize("again", [PushConsumer.run, PushConsumer.start, PushConsumer.__enter__])
def test_a_second_start_changes_nothing(listened: Listened, again: Callable[[PushConsumer], object]) -> None:
    with listened.consumer() as consumer:
        with refused():
            again(consumer)
        assert consumer.is_running
        listened.check_comes(b"later")
    assert not consumer.is_running


@pytest.mark.parametrize("again", [AsyncPushConsumer.run, AsyncPushConsumer.start, AsyncPushConsumer.__aenter__])
async def test_a_second_start_of_coroutines_changes_nothing(
    listened: Listened, again: Callable[[AsyncPushConsumer], object]
) -> None:
    async with listened.async_consumer() as consumer:
        with refused():
            await again(consumer)  # type: ignore[misc]
        assert consumer.is_running
        await asyncio.to_thread(listened.check_comes, b"later")
    assert not consumer.is_running


@pytest.mark.parametrize("is_second_in_thread", [False, True])
def test_a_second_run_leaves_the_first_one_running(listened: Listened, is_second_in_thread: bool) -> None:
    consumer = listened.consumer()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(consumer.run)
        try:
            wait_for(lambda: consumer.is_running, PATIENCE_S)
            with refused():
                threads.submit(consumer.run).result(PATIENCE_S) if is_second_in_thread else consumer.run()
            assert consumer.is_running
            listened.check_comes(b"later")
            assert not first.done()
        finally:
            consumer.request_stop()
        assert first.result(PATIENCE_S) == 0


async def test_a_second_run_of_coroutines_leaves_the_first_one_running(listened: Listened) -> None:
    consumer = listened.async_consumer()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(consumer.run())
        await asyncio.sleep(0)
        with refused():  # While it starts.
            await consumer.run()
        await asyncio.to_thread(wait_for, lambda: consumer.is_running, PATIENCE_S)
        with refused():
            await consumer.run()
        assert consumer.is_running
        await asyncio.to_thread(listened.check_comes, b"later")
        assert not first.done()
        signal.raise_signal(signal.SIGTERM)
    assert first.result() == 0


def test_of_many_runs_at_a_time_one_runs(listened: Listened) -> None:
    consumer = listened.consumer()
    count = 8
    begin = threading.Barrier(count)

    def run() -> int | None:
        begin.wait(PATIENCE_S)
        try:
            return consumer.run()
        except ConfigurationError:
            return None

    with ThreadPoolExecutor(count) as threads:
        runs = [threads.submit(run) for _ in range(count)]
        try:
            wait_for(lambda: sum(one.done() for one in runs) == count - 1, PATIENCE_S)
            wait_for(lambda: consumer.is_running, PATIENCE_S)
            listened.check_comes(b"later")
        finally:
            consumer.request_stop()
        ended = [one.result(PATIENCE_S) for one in runs]
    assert sorted(ended, key=str) == [0] + [None] * (count - 1)


def test_a_run_whose_start_was_refused_may_be_tried_again(listened: Listened) -> None:
    consumer = PushConsumer(listened.group, namesrv=listened.namesrv)
    consumer.subscribe(listened.topic, listened.listen, sql="a >>")
    with pytest.raises(IllegalFilterError):
        consumer.run()
    consumer.unsubscribe(listened.topic)
    consumer.subscribe(listened.topic, listened.listen)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(consumer.run)
        try:
            listened.check_comes(b"now")
            assert not run.done()
        finally:
            consumer.request_stop()
        assert run.result(PATIENCE_S) == 0


async def test_a_run_of_coroutines_whose_start_was_refused_may_be_tried_again(listened: Listened) -> None:
    consumer = AsyncPushConsumer(listened.group, namesrv=listened.namesrv)
    consumer.subscribe(listened.topic, listened.listen, sql="a >>")
    with pytest.raises(IllegalFilterError):
        await consumer.run()
    consumer.unsubscribe(listened.topic)
    consumer.subscribe(listened.topic, listened.listen)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(consumer.run())
        try:
            await asyncio.to_thread(listened.check_comes, b"now")
            assert not run.done()
        finally:
            consumer.request_stop()
    assert run.result() == 0


@pytest.mark.parametrize("name", ["protomq-push", "protomq-push-back", "protomq-listener-2"])
def test_a_start_whose_thread_cannot_be_started_leaves_nothing_behind(
    listened: Listened, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    consumer = listened.consumer()
    with pytest.raises(RuntimeError, match="can't start"):
        consumer.start()
    assert not consumer.is_running
    with Admin(namesrv=listened.namesrv) as admin:
        wait_for(lambda: admin.group_members(listened.group) == [], PATIENCE_S)


def test_a_wrong_filter_while_it_runs_is_logged_and_the_rest_goes_on(
    listened: Listened, caplog: pytest.LogCaptureFixture
) -> None:
    other = f"{listened.topic}-other"
    with listened.consumer() as consumer, caplog.at_level(logging.ERROR, "protomq"):
        listened._producer.send(other, b"there")
        consumer.subscribe(other, listened.listen, sql="a >>")
        wait_for(lambda: f"topic {other}: SQL92 filter, line 1, column 4" in caplog.text, PATIENCE_S)
        listened.check_comes(b"later")
        consumer.unsubscribe(other)
        consumer.subscribe(other, listened.listen)
        wait_for(lambda: b"there" in listened.seen, PATIENCE_S)
