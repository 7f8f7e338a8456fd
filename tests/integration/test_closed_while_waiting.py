"""A client that is closed while a call of another thread or task waits: that call raises ClosedError at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

import pytest

from protomq import AsyncProducer, AsyncSimpleConsumer, Producer, SimpleConsumer
from protomq._requests import LISTEN_TIMEOUT_S
from protomq.errors import ClosedError
from protomq.hooks import CallContext, Hook
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S

HOLD_S = 40.0
AT_ONCE_S = 15.0
"""Far less than the call would wait."""
ON_ITS_WAY_S = 0.2
"""From `before_call` until the request is with the broker, as a rule: nothing tells. A close before that has the same outcome."""
BOTH = pytest.mark.parametrize("transport", ["remoting", "grpc"])
Transport = Literal["remoting", "grpc"]


class Waits(Hook):
    """Says when a call of this name is about to wait."""

    def __init__(self, name: str, held_s: float = AT_ONCE_S) -> None:
        """`held_s`: calls that are held have more time than that, others have less."""
        self._name = name
        self._held_s = held_s
        self.began = threading.Event()

    def before_call(self, context: CallContext) -> None:
        if context.method.endswith(self._name) and context.timeout_s > self._held_s:
            self.began.set()


def outcome_of(call: Callable[[], Any], hook: Waits, close: Callable[[], None]) -> BaseException | None:
    """Of a call in another thread, while this one closes the client."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    assert hook.began.wait(PATIENCE_S)
    time.sleep(ON_ITS_WAY_S)
    closed_s = time.monotonic()
    close()
    error = done.exception(PATIENCE_S)
    assert time.monotonic() - closed_s < AT_ONCE_S
    return error


@BOTH
def test_a_receive_ends(
    protomq_server: Broker, protomq_topic: str, transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    hook = Waits("/Pop")
    consumer = SimpleConsumer("g", namesrv=protomq_server.namesrv, transport=transport, hooks=[hook])
    error = outcome_of(lambda: consumer.receive(protomq_topic, hold_s=HOLD_S), hook, consumer.close)
    assert isinstance(error, ClosedError)
    assert caplog.messages == [], "nobody failed to answer"


@BOTH
def test_a_request_ends(protomq_server: Broker, protomq_topic: str, transport: Transport) -> None:
    hook = Waits("/WaitForReplies", LISTEN_TIMEOUT_S)
    producer = Producer(namesrv=protomq_server.namesrv, transport=transport, hooks=[hook])
    error = outcome_of(lambda: producer.request(protomq_topic, b"x", timeout_s=HOLD_S), hook, producer.close)
    assert isinstance(error, ClosedError)


async def async_outcome_of(call: Any, hook: Waits, close: Callable[[], Any]) -> BaseException | None:
    task: asyncio.Task[Any] = asyncio.ensure_future(call)
    assert await asyncio.to_thread(hook.began.wait, PATIENCE_S)
    await asyncio.sleep(ON_ITS_WAY_S)
    closed_s = time.monotonic()
    await close()
    await asyncio.wait([task])
    assert time.monotonic() - closed_s < AT_ONCE_S
    return task.exception()


@BOTH
def test_a_receive_of_a_coroutine_ends(protomq_server: Broker, protomq_topic: str, transport: Transport) -> None:
    async def run() -> BaseException | None:
        hook = Waits("/Pop")
        consumer = AsyncSimpleConsumer("g", namesrv=protomq_server.namesrv, transport=transport, hooks=[hook])
        return await async_outcome_of(consumer.receive(protomq_topic, hold_s=HOLD_S), hook, consumer.close)

    assert isinstance(asyncio.run(run()), ClosedError)


@BOTH
def test_a_request_of_a_coroutine_ends(protomq_server: Broker, protomq_topic: str, transport: Transport) -> None:
    async def run() -> BaseException | None:
        hook = Waits("/WaitForReplies", LISTEN_TIMEOUT_S)
        producer = AsyncProducer(namesrv=protomq_server.namesrv, transport=transport, hooks=[hook])
        return await async_outcome_of(producer.request(protomq_topic, b"x", timeout_s=HOLD_S), hook, producer.close)

    assert isinstance(asyncio.run(run()), ClosedError)
