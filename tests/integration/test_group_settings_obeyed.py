"""Consumers obey the settings of their group that no broker can obey for them; and what they do where brokers refuse."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from protomq import Admin, AsyncPullConsumer, Message, Producer, PullConsumer, Retry, SimpleConsumer
from protomq.errors import GroupDisabledError
from protomq.testing import Broker
from tests.support.push import Push, send
from tests.support.waiting import PATIENCE_S, wait_for

QUIET_S = 0.5
"""In which nothing comes that is not to come."""


@pytest.fixture(params=["threads", "coroutines"])
def push(request: pytest.FixtureRequest, protomq_server: Broker) -> Push:
    return Push(request.param, protomq_server)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protomq._group_looks.LOOK_INTERVAL_S", 0.05)


def set_group(broker: Broker, group: str, **settings: Any) -> None:
    with Admin(namesrv=broker.namesrv) as admin:
        admin.set_group(group, **settings)


def test_an_orderly_consumer_tries_a_message_as_often_as_its_group_says(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    group = f"g-{protomq_topic}"
    set_group(protomq_server, group, orderly=True, retry_count_max=2)
    send(protomq_producer, protomq_topic, 1)
    attempts: list[int] = []

    def listen(message: Message) -> object:
        attempts.append(message.attempt)
        return Retry(error="always")

    with push(group, protomq_topic, listen, orderly=True, suspend_ms=10) as consumer:
        wait_for(lambda: consumer.counts.done == 1, PATIENCE_S)
    assert attempts == [0, 1, 2]
    with PullConsumer(namesrv=protomq_server.namesrv) as reader:
        reader.subscribe(f"%DLQ%{group}")
        (letter,) = reader.poll(PATIENCE_S)
    assert (letter.attempt, letter.last_error) == (3, "always")


def test_a_limit_that_is_set_while_a_message_is_tried_ends_it(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    group = f"g-{protomq_topic}"
    send(protomq_producer, protomq_topic, 1)
    attempts: list[int] = []

    def listen(message: Message) -> object:
        attempts.append(message.attempt)
        return Retry()

    with push(group, protomq_topic, listen, orderly=True, suspend_ms=10) as consumer:
        wait_for(lambda: len(attempts) > 3, PATIENCE_S)
        assert consumer.counts.done == 0
        set_group(protomq_server, group, retry_count_max=2)
        wait_for(lambda: consumer.counts.done == 1, PATIENCE_S)


@pytest.mark.parametrize("off", ["consume_enabled", "broadcast_enabled"])
def test_a_broadcasting_push_consumer_stops_and_goes_on_as_its_group_says(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, tmp_path: Path, off: str
) -> None:
    group = f"g-{protomq_topic}"
    set_group(protomq_server, group, **{off: False})
    bodies = send(protomq_producer, protomq_topic, 3)
    seen: list[bytes] = []

    def listen(message: Message) -> None:
        seen.append(message.body)

    with push(group, protomq_topic, listen, broadcast=True, offset_folder=str(tmp_path)):
        with pytest.raises(AssertionError):
            wait_for(lambda: bool(seen), QUIET_S)
        set_group(protomq_server, group, **{off: True})
        wait_for(lambda: sorted(seen) == bodies, PATIENCE_S)


def test_what_a_broadcasting_push_consumer_has_pulled_waits_while_its_group_is_off(
    push: Push,
    protomq_server: Broker,
    protomq_topic: str,
    protomq_producer: Producer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = f"g-{protomq_topic}"
    bodies = send(protomq_producer, protomq_topic, 5)
    seen: list[bytes] = []
    goes_on = threading.Event()

    async def wait() -> None:
        assert await asyncio.to_thread(goes_on.wait, PATIENCE_S)

    def listen(message: Message) -> object:
        seen.append(message.body)
        if push.kind == "coroutines":
            return wait()
        assert goes_on.wait(PATIENCE_S)
        return None

    with push(group, protomq_topic, listen, broadcast=True, offset_folder=str(tmp_path), concurrency=1) as consumer:
        wait_for(lambda: (len(seen), consumer.counts.waiting) == (1, 4), PATIENCE_S)
        set_group(protomq_server, group, broadcast_enabled=False)
        wait_for(lambda: "broadcast_enabled is off" in caplog.text, PATIENCE_S)
        goes_on.set()
        with pytest.raises(AssertionError):
            wait_for(lambda: len(seen) > 1, QUIET_S)
        assert consumer.counts.waiting == 4
        set_group(protomq_server, group, broadcast_enabled=True)
        wait_for(lambda: sorted(seen) == bodies, PATIENCE_S)


@pytest.mark.parametrize("off", ["consume_enabled", "broadcast_enabled"])
def test_a_broadcasting_pull_consumer_does_so_too(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, off: str
) -> None:
    group = f"g-{protomq_topic}"
    set_group(protomq_server, group, **{off: False})
    bodies = send(protomq_producer, protomq_topic, 3)
    with PullConsumer(group, namesrv=protomq_server.namesrv, broadcasting=True) as consumer:
        consumer.subscribe(protomq_topic)
        assert consumer.poll(QUIET_S) == []
        set_group(protomq_server, group, **{off: True})
        seen: list[bytes] = []
        while len(seen) < 3:
            found = consumer.poll(PATIENCE_S)
            assert found
            seen += [message.body for message in found]
    assert sorted(seen) == bodies


async def test_so_does_one_for_coroutines(protomq_server: Broker, protomq_topic: str, protomq_producer: Producer) -> None:
    group = f"g-{protomq_topic}"
    set_group(protomq_server, group, broadcast_enabled=False)
    bodies = send(protomq_producer, protomq_topic, 3)
    async with AsyncPullConsumer(group, namesrv=protomq_server.namesrv, broadcasting=True) as consumer:
        await consumer.subscribe(protomq_topic)
        assert await consumer.poll(QUIET_S) == []
        set_group(protomq_server, group, broadcast_enabled=True)
        seen: list[bytes] = []
        while len(seen) < 3:
            found = await consumer.poll(PATIENCE_S)
            assert found
            seen += [message.body for message in found]
    assert sorted(seen) == bodies


def test_a_push_consumer_waits_until_its_group_consumes_again(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    group = f"g-{protomq_topic}"
    set_group(protomq_server, group, consume_enabled=False)
    bodies = send(protomq_producer, protomq_topic, 3)
    seen: list[bytes] = []

    def listen(message: Message) -> None:
        seen.append(message.body)

    with push(group, protomq_topic, listen):
        with pytest.raises(AssertionError):
            wait_for(lambda: bool(seen), QUIET_S)
        set_group(protomq_server, group, consume_enabled=True)
        wait_for(lambda: sorted(seen) == bodies, PATIENCE_S)


def test_a_simple_consumer_is_told_that_its_group_does_not_consume(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    group = f"g-{protomq_topic}"
    set_group(protomq_server, group, consume_enabled=False)
    send(protomq_producer, protomq_topic, 1)
    with SimpleConsumer(group, namesrv=protomq_server.namesrv) as consumer:
        with pytest.raises(GroupDisabledError):
            consumer.receive(protomq_topic, hold_s=0)
        set_group(protomq_server, group, consume_enabled=True)
        (message,) = consumer.receive(protomq_topic)
        consumer.ack(message)


def test_a_handler_gets_messages_when_its_group_consumes_again(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    group = f"g-{protomq_topic}"
    set_group(protomq_server, group, consume_enabled=False)
    send(protomq_producer, protomq_topic, 1)
    seen: list[bytes] = []
    with SimpleConsumer(group, namesrv=protomq_server.namesrv) as consumer:

        def handler(message: Message) -> None:
            seen.append(message.body)
            consumer.request_stop()

        def allow() -> None:
            assert seen == []
            set_group(protomq_server, group, consume_enabled=True)

        timer = threading.Timer(QUIET_S, allow)
        timer.start()
        assert consumer.handle(protomq_topic, handler) == (1, 0, 0)
        timer.join()
    assert seen == [b"0"]
