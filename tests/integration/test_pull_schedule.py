"""Pauses and scheduled pulls through a whole broker, from threads and coroutines."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from protomq import Admin, AsyncPullConsumer, Message, MessageQueue, Producer, PullConsumer
from protomq.errors import ConfigurationError
from protomq.testing import Broker


def fill(producer: Producer, topic: str, count: int) -> tuple[MessageQueue, ...]:
    queues = producer.queues(topic)[:2]
    for number in range(count):
        for queue in queues:
            producer.send(topic, b"%d" % number, queue=queue)
    return queues


@pytest.fixture(params=["threads", "coroutines"])
def play(request: pytest.FixtureRequest, protomq_server: Broker) -> Any:
    """play(group, scenario): scenario(consumer, wait) runs with either consumer; `wait` takes what a method returned."""

    def run(group: str, scenario: Any, **settings: Any) -> None:
        async def in_loop() -> None:
            if request.param == "coroutines":
                async with AsyncPullConsumer(group, namesrv=protomq_server.namesrv, **settings) as consumer:
                    await scenario(consumer, awaited)
            else:
                with PullConsumer(group, namesrv=protomq_server.namesrv, **settings) as consumer:
                    await scenario(consumer, awaited)

        asyncio.run(in_loop())

    return run


async def awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def test_a_queue_that_is_paused_gives_nothing_until_it_is_resumed(
    play: Any, protomq_topic: str, protomq_producer: Producer
) -> None:
    first, second = fill(protomq_producer, protomq_topic, 5)

    async def scenario(consumer: Any, wait: Any) -> None:
        await wait(consumer.assign([first, second]))
        consumer.pause([first])
        assert consumer.paused() == (first,)
        seen: list[Message] = []
        while len(seen) < 5:
            seen += await wait(consumer.poll(5))
        assert await wait(consumer.poll(0.2)) == []
        assert {message.queue for message in seen} == {second}
        assert set(consumer.assignment()) == {first, second}
        consumer.resume([first])
        while len(seen) < 10:
            seen += await wait(consumer.poll(5))
        assert [int(message.body) for message in seen if message.queue == first] == [0, 1, 2, 3, 4]
        with pytest.raises(ConfigurationError, match="not assigned"):
            consumer.pause([MessageQueue(protomq_topic, "other", 0)])

    play("", scenario)


def test_what_a_reset_has_skipped_while_a_queue_was_paused_is_not_returned(
    play: Any, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    first, second = fill(protomq_producer, protomq_topic, 5)
    group = f"group-{protomq_topic}"

    async def scenario(consumer: Any, wait: Any) -> None:
        await wait(consumer.assign([first, second]))
        consumer.pause([first])
        seen: list[Message] = []
        while len(seen) < 5 or not consumer._state._queues[first].waiting:
            seen += await wait(consumer.poll(0.1))
        with Admin(namesrv=protomq_server.namesrv) as admin:
            await asyncio.to_thread(admin.reset_offsets, group, protomq_topic, "latest")
        consumer.resume([first])
        protomq_producer.send(protomq_topic, b"last", queue=first)
        while b"last" not in [message.body for message in seen]:
            seen += await wait(consumer.poll(5))
        assert [message.body for message in seen if message.queue == first] == [b"last"]

    play(group, scenario, auto_commit=False)


def test_a_scheduled_pull_gets_queues_one_by_one_after_their_delays_and_what_failed_again(
    play: Any, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    first, second = fill(protomq_producer, protomq_topic, 6)
    group = f"group-{protomq_topic}"

    async def scenario(consumer: Any, wait: Any) -> None:
        calls: list[tuple[MessageQueue, list[int]]] = []
        held: list[bool] = []
        stop: list[Any] = []

        def pull(queue: MessageQueue, messages: list[Message]) -> int | None:
            numbers = [int(message.body) for message in messages]
            calls.append((queue, numbers))
            if queue == first and numbers[0] == 2 and len([1 for at, some in calls if at == first and some[0] == 2]) == 1:
                raise ValueError("broken")
            if queue == second:
                held.append(numbers[-1] == 5)
                return 40 * 86_400_000 if numbers[-1] == 3 else 0  # The last two are never due.
            if numbers[-1] == 5:
                stop.append(consumer.close())
                if inspect.isawaitable(stop[0]):
                    stop[0] = asyncio.ensure_future(stop[0])
            return 10

        await wait(consumer.assign([first, second]))
        await wait(consumer.run_scheduled(pull, max_messages=2))
        await wait(stop[0])
        assert [numbers for queue, numbers in calls if queue == first] == [[0, 1], [2, 3], [2, 3], [4, 5]]
        assert [numbers for queue, numbers in calls if queue == second] == [[0, 1], [2, 3]]
        assert held == [False, False]

    play(group, scenario)
    with PullConsumer(group, namesrv=protomq_server.namesrv) as again:
        again.assign([first, second])
        assert (again.committed(first), again.committed(second)) == (6, 4)
