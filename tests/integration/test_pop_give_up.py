"""Messages that have left the broker when nobody waits for them any more: others have them at once, and the delivery does not count.

A proxy holds back the answer, so that it is on its way for as long as a test says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from protomq import Admin, AsyncSimpleConsumer, Message, PoppedQueue, Producer, SimpleConsumer
from protomq.errors import ClosedError
from protomq.testing import Broker, FaultProxy
from tests.support.waiting import PATIENCE_S, wait_for

AT_ONCE_S = 1.0
BODY = b"on its way, in plain sight"
INVISIBLE_S = 2 * PATIENCE_S


class Way:
    """Between a client and a broker, whose invisible times may be short."""

    def __init__(self, broker: Broker, proxy: FaultProxy, transport: Any) -> None:
        self.broker = broker
        self.proxy = proxy
        self.transport = transport
        self.has_left = Event()
        """The message has left the broker."""
        self.is_free = Event()
        """It goes on to its client."""
        proxy.on_answer(self._saw)

    def _saw(self, piece: bytes) -> None:
        if BODY in piece and not self.has_left.is_set():
            self.has_left.set()
            self.is_free.wait(PATIENCE_S)

    def prepare(self, topic: str) -> None:
        with Admin(namesrv=self.broker.namesrv) as admin:
            admin.create_topic(topic, write_queues=1, read_queues=1)

    def send(self, topic: str) -> None:
        with Producer(namesrv=self.broker.namesrv) as producer:
            producer.send(topic, BODY)

    def settings(self) -> dict[str, Any]:
        return {"namesrv": self.broker.namesrv, "transport": self.transport}

    def check_that_others_have_it(self, topic: str) -> None:
        """From now on, at once."""
        with SimpleConsumer("group", namesrv=self.broker.grpc_address, transport="grpc") as other:
            began_s = time.monotonic()
            messages = other.receive(topic, hold_s=5 * AT_ONCE_S, invisible_s=INVISIBLE_S)
            took_s = time.monotonic() - began_s
            assert [(message.body, attempt_of(message)) for message in messages] == [(BODY, 1)]
            assert took_s < AT_ONCE_S
            other.ack(messages)


def attempt_of(message: Message) -> int:
    assert isinstance(message.queue, PoppedQueue)
    return message.queue.attempt


@pytest.fixture(params=["remoting", "grpc"])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    with FaultProxy() as proxy:
        port = proxy.address.rpartition(":")[2]
        environment = {f"PROTOMQ_LISTEN_ADVERTISED_{request.param.upper()}_PORT": port, "PROTOMQ_POP_INVISIBLE_MIN_MS": "100"}
        with Broker(environment=environment) as broker:
            proxy.target = broker.remoting_address if request.param == "remoting" else broker.grpc_address
            yield Way(broker, proxy, request.param)


async def ended(call: asyncio.Task[Any]) -> None:
    await asyncio.wait([call], timeout=PATIENCE_S)
    assert call.done()


async def test_what_is_on_its_way_to_a_receive_that_is_cancelled_comes_to_others_at_once(way: Way) -> None:
    topic = "cancelled"
    way.prepare(topic)
    async with AsyncSimpleConsumer("group", **way.settings()) as consumer:
        call = asyncio.create_task(consumer.receive(topic, hold_s=PATIENCE_S, invisible_s=INVISIBLE_S))
        await asyncio.to_thread(way.send, topic)
        assert await asyncio.to_thread(way.has_left.wait, PATIENCE_S)
        began_s = time.monotonic()
        call.cancel()
        await ended(call)
        assert call.cancelled()
        assert time.monotonic() - began_s < AT_ONCE_S, "nobody waits for what is on its way"
        way.is_free.set()
        await asyncio.to_thread(way.check_that_others_have_it, topic)


async def test_a_close_of_coroutines_gives_back_what_is_on_its_way(way: Way) -> None:
    topic = "closed"
    way.prepare(topic)
    consumer = AsyncSimpleConsumer("group", **way.settings())
    calls = [asyncio.create_task(consumer.receive(topic, hold_s=PATIENCE_S, invisible_s=INVISIBLE_S)) for _ in range(3)]
    await asyncio.to_thread(way.send, topic)
    assert await asyncio.to_thread(way.has_left.wait, PATIENCE_S)
    began_s = time.monotonic()
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0)
    way.is_free.set()
    await ended(closing)
    assert time.monotonic() - began_s < 2 * AT_ONCE_S
    for call in calls:
        await ended(call)
        assert isinstance(call.exception(), ClosedError)
    await asyncio.to_thread(way.check_that_others_have_it, topic)


def test_a_close_beside_threads_gives_back_what_is_on_its_way(way: Way) -> None:
    topic = "closed"
    way.prepare(topic)
    consumer = SimpleConsumer("group", **way.settings())
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(consumer.receive, topic, hold_s=PATIENCE_S, invisible_s=INVISIBLE_S) for _ in range(3)]
        way.send(topic)
        assert way.has_left.wait(PATIENCE_S)
        began_s = time.monotonic()
        closing = threads.submit(consumer.close)
        wait_for(lambda: consumer._closed, PATIENCE_S)
        way.is_free.set()
        closing.result(PATIENCE_S)
        assert time.monotonic() - began_s < 2 * AT_ONCE_S
        for call in calls:
            assert isinstance(call.exception(PATIENCE_S), ClosedError)
    way.check_that_others_have_it(topic)


FAULTS = ("killed", "silent", "cut")


def strike(way: Way, fault: str) -> None:
    if fault == "killed":
        way.broker.kill()
    elif fault == "silent":
        os.kill(way.broker.process_id, signal.SIGSTOP)
    else:
        way.proxy.cut()


def mend(way: Way, fault: str) -> None:
    if fault == "killed":
        way.broker.restart()
        way.proxy.target = way.broker.remoting_address if way.transport == "remoting" else way.broker.grpc_address
    elif fault == "silent":
        os.kill(way.broker.process_id, signal.SIGCONT)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("flavour", ["threads", "coroutines"])
def test_what_cannot_be_given_back_at_a_close_comes_again_when_its_time_is_up(way: Way, flavour: str, fault: str) -> None:
    topic, invisible_s = "faulty", 3.0
    way.prepare(topic)

    async def close_beside_coroutine(on_way: Callable[[], None], closing: Event) -> BaseException | None:
        consumer = AsyncSimpleConsumer("group", **way.settings())
        call = asyncio.create_task(consumer.receive(topic, hold_s=PATIENCE_S, invisible_s=invisible_s))
        await asyncio.to_thread(on_way)
        closing.set()
        await consumer.close()
        await ended(call)
        return call.exception()

    def close_beside_thread(on_way: Callable[[], None], closing: Event) -> BaseException | None:
        consumer = SimpleConsumer("group", **way.settings())
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(consumer.receive, topic, hold_s=PATIENCE_S, invisible_s=invisible_s)
            on_way()
            closing.set()
            consumer.close()
            return call.exception(PATIENCE_S)

    struck_s: list[float] = []

    def on_way() -> None:
        way.send(topic)
        assert way.has_left.wait(PATIENCE_S)
        strike(way, fault)
        struck_s.append(time.monotonic())

    closing = Event()
    with ThreadPoolExecutor(2) as threads:
        if flavour == "threads":
            work = threads.submit(close_beside_thread, on_way, closing)
        else:
            work = threads.submit(lambda: asyncio.run(close_beside_coroutine(on_way, closing)))
        assert closing.wait(PATIENCE_S)
        way.is_free.set()
        error = work.result(PATIENCE_S)
    assert time.monotonic() - struck_s[0] < 3 * AT_ONCE_S
    assert isinstance(error, ClosedError)
    mend(way, fault)
    with SimpleConsumer("group", namesrv=way.broker.grpc_address, transport="grpc") as other:
        messages = other.receive(topic, hold_s=PATIENCE_S, invisible_s=INVISIBLE_S)
        assert [message.body for message in messages] == [BODY]
        assert attempt_of(messages[0]) <= 2
        assert other.ack(messages) == []
