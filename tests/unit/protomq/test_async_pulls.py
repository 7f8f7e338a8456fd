"""Pulls of coroutines, without a broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protomq import AsyncPullConsumer, MessageQueue
from protomq._steps import Steps
from protomq._types import BrokerAddress
from protomq.errors import ClosedError, ConfigurationError

QUEUE = MessageQueue("T", "a", 0)


def test_a_queue_that_goes_while_its_broker_is_looked_up_is_not_pulled_and_no_broker_is_blamed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[object] = []

    async def call(*arguments: object) -> bytes:
        called.append(arguments)
        return b""

    async def pull() -> None:
        consumer = AsyncPullConsumer()
        state = consumer._state
        state.assign([QUEUE], {})
        state.start_all([QUEUE], {}, {QUEUE: 0})

        run = consumer._run

        async def look_up(steps: Steps[Any]) -> Any:
            if QUEUE not in state.queues:
                return await run(steps)
            steps.close()
            state.drop([QUEUE])
            return BrokerAddress("a", "a:1", "a:2")

        monkeypatch.setattr(consumer, "_run", look_up)
        monkeypatch.setattr(consumer._transport, "call", call)
        await consumer._pull(state.begin(QUEUE))
        monkeypatch.undo()
        await consumer.close()

    asyncio.run(pull())
    assert not called
    assert not caplog.messages


def test_a_consumer_that_polled_in_one_loop_is_refused_in_the_next_one() -> None:
    consumer = AsyncPullConsumer()
    with pytest.raises(ConfigurationError, match="nothing to poll"):
        asyncio.run(consumer.poll())
    with pytest.raises(ConfigurationError, match="was used in another event loop: use it within one"):
        asyncio.run(consumer.poll())
    asyncio.run(consumer.close())


def test_a_consumer_is_closed_by_its_own_loop_only_while_that_is_open() -> None:
    async def close_elsewhere() -> None:
        consumer = AsyncPullConsumer()
        with pytest.raises(ConfigurationError, match="nothing to poll"):
            await consumer.poll()
        with pytest.raises(ConfigurationError, match="was used in another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(consumer.close()))
        with pytest.raises(ConfigurationError, match="nothing to poll"):
            await consumer.poll()
        await consumer.close()
        with pytest.raises(ClosedError):
            await consumer.poll()

    asyncio.run(close_elsewhere())


def test_a_defect_that_ends_a_pull_is_raised_by_the_next_poll_once_and_the_queue_is_pulled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pulls = 0

    async def call(*_: object, **__: object) -> bytes:
        nonlocal pulls
        pulls += 1
        raise ZeroDivisionError("a defect")

    async def poll() -> None:
        consumer = AsyncPullConsumer()
        consumer._steps.assigned = (QUEUE,)
        consumer._state.assign([QUEUE], {})
        consumer._state.start_all([QUEUE], {}, {QUEUE: 0})
        monkeypatch.setattr(consumer._steps, "is_settled", lambda _: True)
        monkeypatch.setattr(consumer, "_known_address", lambda _: BrokerAddress("a", "a:1", "a:2"))
        monkeypatch.setattr(consumer._transport, "call", call)
        for i in range(2):
            with pytest.raises(ZeroDivisionError, match="a defect"):
                await consumer.poll()
            assert pulls == i + 1
        monkeypatch.undo()
        await consumer.close()

    asyncio.run(poll())
