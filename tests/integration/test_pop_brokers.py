"""Popping from several brokers: none of them, be it empty, silent or gone, holds back what another one has."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from protomq import (
    Admin,
    AsyncSimpleConsumer,
    Message,
    MessageQueue,
    PoppedQueue,
    Producer,
    SimpleConsumer,
)
from protomq.errors import ClosedError
from tests.support.ha_brokers import HaBroker, running
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

NAMES = ("a", "b")
LONG_HOLD_S = 30.0


class Place:
    """A name server and two brokers."""

    def __init__(self, namesrv: str, brokers: dict[str, HaBroker]) -> None:
        self.namesrv = namesrv
        self.brokers = brokers

    def create(self, topic: str) -> None:
        with Admin(namesrv=self.namesrv) as admin:
            admin.create_topic(topic, write_queues=2, read_queues=2)

    @contextmanager
    def silent(self, name: str) -> Iterator[None]:
        os.kill(self.brokers[name].process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.brokers[name].process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder: Path = tmp_path_factory.mktemp("brokers")
    with running_namesrv() as server:
        namesrv = str(server.remoting)
        made = {name: HaBroker(folder / name, "ASYNC_MASTER", 0, broker_name=name, namesrv=[namesrv]) for name in NAMES}
        with running(*made.values()), Admin(namesrv=namesrv) as admin:
            wait_for(lambda: set(NAMES) <= {each.broker_name for each in admin.cluster_info()}, PATIENCE_S)
            yield Place(namesrv, made)


class Receiver:
    """`receive` and `ack` of either flavour, for a test in a thread."""

    def __init__(self, place: Place, flavour: str, transport: Any = "auto") -> None:
        self._consumer: Any
        self._run: Callable[[Any], Any]
        self._end: Callable[[], None] = lambda: None
        if flavour == "threads":
            self._consumer = SimpleConsumer("group", namesrv=place.namesrv, transport=transport)
            self._run = lambda result: result
        else:
            runner = asyncio.Runner()
            self._consumer = AsyncSimpleConsumer("group", namesrv=place.namesrv, transport=transport)
            self._run, self._end = runner.run, runner.close

    def receive(self, topic: str, **settings: Any) -> list[Message]:
        messages: list[Message] = self._run(self._consumer.receive(topic, **settings))
        return messages

    def receive_until(self, closes: Event, topic: str, **settings: Any) -> list[Message]:
        """Of coroutines: what a `receive` returns, beside which the consumer is closed then."""

        async def receive() -> list[Message]:
            call = asyncio.create_task(self._consumer.receive(topic, **settings))
            await asyncio.to_thread(closes.wait, PATIENCE_S)
            await self._consumer.close()
            messages: list[Message] = await call
            return messages

        try:
            messages: list[Message] = self._run(receive())
            return messages
        finally:
            self._end()

    def ack(self, messages: list[Message]) -> None:
        assert self._run(self._consumer.ack(messages)) == []

    def close(self) -> None:
        self._run(self._consumer.close())
        self._end()


@pytest.fixture(params=["threads", "coroutines"])
def flavour(request: pytest.FixtureRequest) -> str:
    flavour: str = request.param
    return flavour


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_no_message_waits_for_a_broker_that_has_none(place: Place, flavour: str, transport: Any) -> None:
    topic = f"one-of-two-{flavour}-{transport}"
    place.create(topic)
    receiver = Receiver(place, flavour, transport)
    with Producer(namesrv=place.namesrv) as producer:
        producer.send(topic, b"first", queue=MessageQueue(topic, "b", 0))
        receiver.ack(receiver.receive(topic, hold_s=LONG_HOLD_S))
        waits_s: list[float] = []
        for number in range(9):
            sent: list[float] = []

            def send_later(number: int = number, sent: list[float] = sent) -> None:
                time.sleep(0.3)  # It is held at both by then.
                sent.append(time.monotonic())
                producer.send(topic, b"%d" % number, queue=MessageQueue(topic, NAMES[number % 2], 0))

            thread = Thread(target=send_later)
            thread.start()
            messages = receiver.receive(topic, hold_s=LONG_HOLD_S)
            waits_s.append(time.monotonic() - sent[0])
            thread.join()
            assert [message.body for message in messages] == [b"%d" % number]
            assert isinstance(messages[0].queue, PoppedQueue)
            assert messages[0].queue.attempt == 1
            receiver.ack(messages)
    receiver.close()
    assert statistics.median(waits_s) < 0.25


def test_a_silent_broker_holds_back_nothing_of_another(place: Place, flavour: str) -> None:
    topic = f"one-silent-{flavour}"
    place.create(topic)
    receiver = Receiver(place, flavour)
    with Producer(namesrv=place.namesrv) as producer:
        for name in NAMES:
            producer.send(topic, b"first", queue=MessageQueue(topic, name, 0))
        for _ in NAMES:
            receiver.ack(receiver.receive(topic, hold_s=LONG_HOLD_S))
        with place.silent("a"):
            began_s = time.monotonic()
            for number in range(60):
                producer.send(topic, b"%d" % number, queue=MessageQueue(topic, "b", number % 2))
                messages = receiver.receive(topic, hold_s=2.0)
                assert [message.body for message in messages] == [b"%d" % number]
                receiver.ack(messages)
            took_s = time.monotonic() - began_s
        producer.send(topic, b"last", queue=MessageQueue(topic, "a", 0))
        assert [message.body for message in receiver.receive(topic, hold_s=LONG_HOLD_S)] == [b"last"]
    receiver.close()
    assert took_s < 5.0  # One call to it that is waited for takes that long.


STOPPED_S = (0.098, 0.101, 0.104, 0.11)
"""About as long as a broker is waited for before the next one is asked: so its answer crosses the end of the call."""


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_what_a_slow_broker_hands_out_is_neither_lost_nor_counted(place: Place, flavour: str, transport: Any) -> None:
    topic, count = f"slow-{flavour}-{transport}", 300
    place.create(topic)
    with Producer(namesrv=place.namesrv) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, queue=MessageQueue(topic, NAMES[number % 2], 0))
    is_over = Event()

    def slow_down() -> None:
        for stopped_s, name in itertools.cycle(itertools.product(STOPPED_S, NAMES)):
            with place.silent(name):
                is_over.wait(stopped_s)
            if is_over.wait(0.01):
                return

    found: list[tuple[bytes, int]] = []
    receiver = Receiver(place, flavour, transport)
    slow = Thread(target=slow_down)
    slow.start()
    try:
        limit_s = time.monotonic() + PATIENCE_S / 2
        while len(found) < count and time.monotonic() < limit_s:
            messages = receiver.receive(topic, count=2, hold_s=2.0, invisible_s=2 * PATIENCE_S)
            for message in messages:
                assert isinstance(message.queue, PoppedQueue)
                found.append((message.body, message.queue.attempt))
            receiver.ack(messages)
            is_over.wait(0.005)  # Its work: there are messages at both brokers for a while.
    finally:
        is_over.set()
        slow.join()
        receiver.close()
    assert sorted(found) == sorted((b"%d" % number, 1) for number in range(count))


def test_a_close_ends_what_is_held_at_several_brokers(place: Place) -> None:
    topic = "closed"
    place.create(topic)
    consumer = SimpleConsumer("group", namesrv=place.namesrv)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(consumer.receive, topic, hold_s=LONG_HOLD_S)
        wait_for(lambda: bool(consumer._races._busy), PATIENCE_S)
        began_s = time.monotonic()
        consumer.close()
        with pytest.raises(ClosedError):
            call.result(PATIENCE_S)
        assert time.monotonic() - began_s < LONG_HOLD_S / 3


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_close_gives_back_what_several_brokers_bring(place: Place, flavour: str, transport: Any) -> None:
    topic = f"closed-{flavour}-{transport}"
    place.create(topic)
    other, closed_count = Receiver(place, "threads", transport), 0
    with Producer(namesrv=place.namesrv) as producer, ThreadPoolExecutor(3) as threads:
        for number in range(16):
            receiver, moment = Receiver(place, flavour, transport), Event()
            settings = {"hold_s": LONG_HOLD_S, "invisible_s": 2 * PATIENCE_S}
            if flavour == "threads":
                call = threads.submit(receiver.receive, topic, **settings)
            else:
                call = threads.submit(receiver.receive_until, moment, topic, **settings)
            moment.wait(0.15)  # It is held at both by then.
            for name in NAMES:
                threads.submit(producer.send, topic, b"x", queue=MessageQueue(topic, name, 0))
            moment.wait(number % 8 * 0.001)
            moment.set()
            if flavour == "threads":
                receiver.close()
            try:
                count = len(call.result(PATIENCE_S))
            except ClosedError:
                count = 0
            closed_count += count == 0
            while count < len(NAMES):
                messages = other.receive(topic, hold_s=5.0)
                assert messages, "it waits for its invisible time"
                for message in messages:
                    assert isinstance(message.queue, PoppedQueue)
                    assert message.queue.attempt == 1
                other.ack(messages)
                count += len(messages)
    other.close()
    assert closed_count
