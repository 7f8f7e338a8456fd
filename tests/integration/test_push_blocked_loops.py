"""A coroutine that blocks its event loop for longer than brokers wait for a member: it stays one, and what it has done stays done."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from protomq import (
    Admin,
    AsyncPullConsumer,
    AsyncPushConsumer,
    Message,
    Producer,
    PushConsumer,
    _member_stand_in,
)
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, async_wait_for, wait_for

GAP_S = 3.0
BLOCKED_S = 2 * GAP_S
QUEUES = 4
BODIES = [b"%d" % number for number in range(20)]


@pytest.fixture(scope="module")
def impatient_broker() -> Iterator[Broker]:
    with Broker(environment={"PROTOMQ_MEMBER_GAP_MS": str(int(GAP_S * 1000))}) as broker:
        yield broker


def block() -> None:
    """As a listener that computes, or makes a call that is no coroutine."""
    threading.Event().wait(BLOCKED_S)


def make(broker: Broker, topic: str) -> None:
    with Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic(topic, write_queues=QUEUES, read_queues=QUEUES)


def fill(broker: Broker, topic: str) -> None:
    with Producer(namesrv=broker.namesrv) as producer:
        for body in BODIES:
            producer.send(topic, body)


def check_calm(texts: list[str]) -> None:
    said = "\n".join(texts)
    assert "a thread makes its calls" in said
    assert "given this member up" not in said
    assert "does not answer" not in said


@pytest.mark.parametrize(
    ("name", "member_count", "settings", "batch_size"),
    [("alone", 1, {}, None), ("two", 2, {}, None), ("order", 2, {"orderly": True}, None), ("batch", 1, {}, 4)],
)
def test_listeners_that_block_the_loop_get_nothing_twice(
    impatient_broker: Broker,
    caplog: pytest.LogCaptureFixture,
    name: str,
    member_count: int,
    settings: dict[str, Any],
    batch_size: int | None,
) -> None:
    broker, topic = impatient_broker, f"t-{name}"
    seen: Counter[bytes] = Counter()

    async def listen(given: Any) -> None:
        bodies = [one.body for one in ([given] if isinstance(given, Message) else given)]
        if BODIES[7] in bodies:
            block()
        seen.update(bodies)

    async def consume() -> None:
        members = [AsyncPushConsumer(f"g-{name}", namesrv=broker.namesrv, **settings) for _ in range(member_count)]
        for member in members:
            member.subscribe(topic, listen, batch_size=batch_size)
            await member.start()
        shares = {QUEUES // member_count}
        await async_wait_for(lambda: {sum(queue.topic == topic for queue in one.assignment()) for one in members} == shares, PATIENCE_S)
        await asyncio.to_thread(fill, broker, topic)
        await async_wait_for(lambda: len(seen) == len(BODIES), PATIENCE_S)
        assert [await member.stop() for member in members] == [0] * member_count

    make(broker, topic)
    asyncio.run(consume())
    assert set(seen.values()) == {1}
    check_calm(caplog.messages)


def test_a_program_that_blocks_the_loop_between_polls_keeps_its_queues(
    impatient_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker, seen = impatient_broker, Counter[bytes]()

    async def consume() -> None:
        async with AsyncPullConsumer("g-pull", namesrv=broker.namesrv) as consumer:
            await consumer.subscribe("t-pull")
            async for message in consumer:
                if message.body == BODIES[7]:
                    block()
                seen[message.body] += 1
                if len(seen) == len(BODIES):
                    return

    make(broker, "t-pull")
    fill(broker, "t-pull")
    asyncio.run(asyncio.wait_for(consume(), PATIENCE_S))
    assert set(seen.values()) == {1}
    check_calm(caplog.messages)


def test_the_queues_of_a_loop_that_is_stopped_and_kept_go_to_others_in_the_end(
    impatient_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_member_stand_in, "STOPPED_MAX_S", 0.5)
    broker, topic, seen = impatient_broker, "t-stopped", Counter[bytes]()

    async def listen(message: Message) -> None:
        seen[message.body] += 1

    def count(consumer: AsyncPushConsumer | PushConsumer) -> int:
        return sum(queue.topic == topic for queue in consumer.assignment())

    make(broker, topic)
    stopped = AsyncPushConsumer("g-stopped", namesrv=broker.namesrv)
    stopped.subscribe(topic, listen)
    other = PushConsumer("g-stopped", namesrv=broker.namesrv)
    other.subscribe(topic, lambda message: seen.update([message.body]))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(stopped.start())
    with other:
        loop.run_until_complete(async_wait_for(lambda: (count(stopped), count(other)) == (2, 2), PATIENCE_S))
        wait_for(lambda: count(other) == QUEUES, PATIENCE_S)
        fill(broker, topic)
        wait_for(lambda: len(seen) == len(BODIES), PATIENCE_S)
        loop.run_until_complete(async_wait_for(lambda: (count(stopped), count(other)) == (2, 2), PATIENCE_S))
        loop.run_until_complete(stopped.stop())
        loop.close()
    assert set(seen.values()) == {1}
