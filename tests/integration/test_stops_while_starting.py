"""Push consumers that are stopped while they start: they are stopped, at whichever call of the start it is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Literal

import pytest

from protomq import Admin, AsyncPushConsumer, Message, Producer, PushConsumer
from protomq.errors import ConfigurationError
from protomq.hooks import CallContext, Hook
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, wait_for

Transport = Literal["remoting", "grpc"]
BOTH = pytest.mark.parametrize("transport", ["remoting", "grpc"])


class AtCall(Hook):
    """Does something once, before a call of that number that the start makes."""

    def __init__(self, number: int, function: Callable[[], object]) -> None:
        self._left = number
        self._function = function
        self._thread = threading.current_thread()
        self._is_over = False
        self.has_come = False

    def before_call(self, context: CallContext) -> None:
        # The calls of members come from threads of their own.
        if self._is_over or threading.current_thread() is not self._thread:
            return
        self._left -= 1
        if self._left < 0:
            self._is_over = self.has_come = True
            self._function()

    def start_is_over(self) -> bool:
        """Whether the call has come. It does nothing any more."""
        self._is_over = True
        return self.has_come


class Group:
    """A group at a topic with messages."""

    def __init__(self, broker: Broker, topic: str, admin: Admin, number: int) -> None:
        self.namesrv, self._admin = broker.namesrv, admin
        self.topic, self.name = topic, f"g-{topic}-{number}"
        self.begun: list[bytes] = []

    def listen(self, message: Message) -> None:
        self.begun.append(message.body)

    def check_stopped(self, consumer: PushConsumer | AsyncPushConsumer) -> None:
        """Neither now nor later is anything begun."""
        assert not consumer.is_running
        begun_count = len(self.begun)
        assert self._admin.group_members(self.name) == []
        time.sleep(0.1)
        assert len(self.begun) == begun_count
        assert self._admin.group_members(self.name) == []


@pytest.fixture
def topic(protomq_topic: str, protomq_producer: Producer) -> str:
    protomq_producer.send_batch(protomq_topic, [b"%d" % number for number in range(20)])
    return protomq_topic


def stopped_at_call(number: int, group: Group, transport: Transport, caller: str) -> bool:
    """Whether the start has made so many calls."""

    def stop_there() -> None:
        thread.start()
        assert consumer._stop_wanted.wait(PATIENCE_S)

    def stop_here() -> None:
        assert consumer.stop() == 0

    hook = AtCall(number, stop_there if caller == "other thread" else stop_here)
    consumer = PushConsumer(group.name, namesrv=group.namesrv, transport=transport, hooks=[hook])
    consumer.subscribe(group.topic, group.listen)
    thread = threading.Thread(target=consumer.stop)
    consumer.start()
    has_come = hook.start_is_over()
    if has_come:
        if caller == "other thread":
            thread.join(PATIENCE_S)
        group.check_stopped(consumer)
        with pytest.raises(ConfigurationError, match="started once"):
            consumer.start()
    assert consumer.stop() == 0
    return has_come


@BOTH
@pytest.mark.parametrize("caller", ["other thread", "signal's handler"])
def test_a_consumer_of_threads(protomq_server: Broker, topic: str, transport: Transport, caller: str) -> None:
    with Admin(namesrv=protomq_server.namesrv) as admin:
        number = 0
        while stopped_at_call(number, Group(protomq_server, topic, admin, number), transport, caller):
            number += 1
    assert number > 1


async def stopped_at_call_of_a_coroutine(number: int, group: Group, transport: Transport) -> bool:
    """Whether the start has made so many calls."""
    stops: list[asyncio.Task[int]] = []
    hook = AtCall(number, lambda: stops.append(asyncio.create_task(consumer.stop())))
    consumer = AsyncPushConsumer(group.name, namesrv=group.namesrv, transport=transport, hooks=[hook])
    consumer.subscribe(group.topic, group.listen)
    await consumer.start()
    has_come = hook.start_is_over()
    if has_come:
        assert await stops[0] == 0
        await asyncio.to_thread(group.check_stopped, consumer)
        with pytest.raises(ConfigurationError, match="started once"):
            await consumer.start()
    assert await consumer.stop() == 0
    return has_come


@BOTH
async def test_a_consumer_of_coroutines(protomq_server: Broker, topic: str, transport: Transport) -> None:
    with Admin(namesrv=protomq_server.namesrv) as admin:
        number = 0
        while await stopped_at_call_of_a_coroutine(number, Group(protomq_server, topic, admin, number), transport):
            number += 1
    assert number > 1


@BOTH
def test_a_run_that_is_stopped_while_it_starts_returns(protomq_server: Broker, topic: str, transport: Transport) -> None:
    hook = AtCall(1, lambda: threading.Thread(target=consumer.stop).start())
    consumer = PushConsumer(f"g-{topic}", namesrv=protomq_server.namesrv, transport=transport, hooks=[hook])
    consumer.subscribe(topic, lambda _: None)
    assert consumer.run() == 0
    assert hook.has_come
    with Admin(namesrv=protomq_server.namesrv) as admin:
        wait_for(lambda: admin.group_members(f"g-{topic}") == [], PATIENCE_S)
