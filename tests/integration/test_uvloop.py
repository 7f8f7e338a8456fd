"""Async clients on uvloop, whose transports are its own: all kinds of them through a real broker, over both transports."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import pytest
import uvloop

from protomq import (
    AsyncProducer,
    AsyncPullConsumer,
    AsyncPushConsumer,
    AsyncSimpleConsumer,
    AsyncTransactionProducer,
    ConnectionOptions,
    Message,
    Retry,
    SendStatus,
    TransactionDecision,
)
from protomq.asgi import Messaging
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, async_wait_for

BIG = bytes(range(256)) * 2048
"""Longer than the buffer of a connection."""
TRANSPORTS: list[Literal["remoting", "grpc"]] = ["remoting", "grpc"]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On uvloop; nothing may be said to the loop's handler of errors, which hides them from everybody."""
    said: list[dict[str, Any]] = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, uvloop.Loop)
        # gRPC's poller, one for all loops of a process, stumbles where there was another one, here of another test.
        loop.set_exception_handler(lambda _, context: None if "PollerCompletionQueue" in context["message"] else said.append(context))
        await asyncio.wait_for(main(), 30.0)
        assert [task for task in asyncio.all_tasks() if not task.get_name().startswith("Task-")] == []

    uvloop.run(watched())
    assert said == []


@pytest.fixture(params=TRANSPORTS)
def settings(request: pytest.FixtureRequest, protomq_server: Broker) -> dict[str, Any]:
    return {"namesrv": protomq_server.remoting_address, "transport": request.param}


def test_producers_and_consumers(settings: dict[str, Any], protomq_topic: str) -> None:
    got: dict[str, list[bytes]] = {"push": [], "threads": [], "pop": [], "pull": []}
    bodies = [BIG, *(b"%d" % number for number in range(100))]

    async def main() -> None:
        group = uuid.uuid4().hex
        async with AsyncProducer(**settings) as producer:
            pushed = AsyncPushConsumer(f"{group}-push", **settings)
            on_threads = AsyncPushConsumer(f"{group}-threads", **settings)

            @pushed.on(protomq_topic)
            async def keep(message: Message) -> Retry | None:
                await asyncio.sleep(0)
                if message.body == b"7" and message.attempt == 0:
                    return Retry(delay=0.1)
                got["push"].append(message.body)
                return None

            @on_threads.on(protomq_topic)
            def keep_too(message: Message) -> None:
                got["threads"].append(message.body)

            async with (
                pushed,
                on_threads,
                AsyncSimpleConsumer(f"{group}-pop", **settings) as popped,
                AsyncPullConsumer(f"{group}-pull", **settings) as pulled,
            ):
                await pulled.subscribe(protomq_topic)
                await asyncio.gather(*(producer.send(protomq_topic, body) for body in bodies))
                assert set((await producer.transports(protomq_topic)).values()) == {settings["transport"]}
                while len(got["pop"]) < len(bodies):
                    messages = await popped.receive(protomq_topic, hold_s=5)
                    await popped.ack(messages)
                    got["pop"] += [message.body for message in messages]
                while len(got["pull"]) < len(bodies):
                    got["pull"] += [message.body for message in await pulled.poll(5)]
                await async_wait_for(lambda: min(len(got["push"]), len(got["threads"])) >= len(bodies), PATIENCE_S)

    run(main)
    assert {kind: sorted(found) for kind, found in got.items()} == dict.fromkeys(got, sorted(bodies))


def test_transactions(settings: dict[str, Any], protomq_topic: str) -> None:
    bodies: list[bytes] = []

    async def main() -> None:
        async with (
            AsyncTransactionProducer(
                uuid.uuid4().hex, lambda _: TransactionDecision.COMMIT, topics=[protomq_topic], **settings
            ) as producer,
            AsyncPullConsumer(**settings) as consumer,
        ):
            await consumer.subscribe(protomq_topic)
            await producer.send(protomq_topic, b"committed", execute=lambda _: None)
            await (await producer.begin(protomq_topic, b"rolled back")).roll_back()
            await producer.begin(protomq_topic, b"asked")  # Nobody decides: the broker asks, and the check commits.
            while len(bodies) < 2:
                bodies.extend([message.body for message in await consumer.poll(5)])

    run(main)
    assert bodies == [b"committed", b"asked"]


def test_request_and_reply(settings: dict[str, Any], protomq_topic: str) -> None:
    replies: list[bytes] = []

    async def main() -> None:
        service = AsyncPushConsumer(uuid.uuid4().hex, **settings)

        @service.on(protomq_topic)
        async def answer(message: Message) -> None:
            await service.reply(message, message.body.upper())

        async with service, AsyncProducer(**settings) as producer:
            answered = await asyncio.gather(
                *(producer.request(protomq_topic, b"hello %d" % number, timeout_s=PATIENCE_S) for number in range(20))
            )
            replies.extend(reply.body for reply in answered)

    run(main)
    assert replies == [b"HELLO %d" % number for number in range(20)]


def test_a_handler_of_a_simple_consumer(settings: dict[str, Any], protomq_topic: str) -> None:
    handled: list[bytes] = []

    async def main() -> None:
        async with AsyncProducer(**settings) as producer, AsyncSimpleConsumer(uuid.uuid4().hex, **settings) as consumer:
            for number in range(10):
                await producer.send(protomq_topic, b"%d" % number)

            async def handle(message: Message) -> None:
                handled.append(message.body)
                if len(handled) == 10:
                    consumer.request_stop()

            await consumer.handle(protomq_topic, handle)

    run(main)
    assert sorted(handled) == [b"%d" % number for number in range(10)]


def test_an_application_with_a_lifespan(protomq_server: Broker, protomq_topic: str) -> None:
    got: list[bytes] = []

    async def main() -> None:
        messaging = Messaging("shop", connection=ConnectionOptions(namesrv=protomq_server.remoting_address))

        @messaging.consumer(uuid.uuid4().hex).on(protomq_topic)
        async def keep(message: Message) -> None:
            got.append(message.body)

        async with messaging.lifespan(None):
            await (await messaging.producer()).send(protomq_topic, b"x")
            await async_wait_for(lambda: got, PATIENCE_S)

    run(main)
    assert got == [b"x"]


def test_a_broker_that_comes_back(protomq_topic: str, tmp_path: Any) -> None:
    """Connections that break, and those that are refused."""
    with Broker(data_dir=tmp_path) as broker:

        async def main() -> None:
            async with AsyncProducer(namesrv=broker.remoting_address, send_timeout_s=PATIENCE_S) as producer:
                await producer.send(protomq_topic, b"1")
                await asyncio.to_thread(broker.kill)
                sending = asyncio.create_task(producer.send(protomq_topic, b"2"))
                await asyncio.to_thread(broker.restart)
                await sending
                assert set((await producer.transports(protomq_topic)).values()) == {"remoting"}

        run(main)


def test_a_signal_ends_a_consumer(protomq_server: Broker, protomq_topic: str) -> None:
    async def main() -> None:
        consumer = AsyncPushConsumer(uuid.uuid4().hex, namesrv=protomq_server.remoting_address)

        @consumer.on(protomq_topic)
        async def end(message: Message) -> None:
            signal.raise_signal(signal.SIGTERM)

        async with AsyncProducer(namesrv=protomq_server.remoting_address) as producer:
            await producer.send(protomq_topic, b"x")
            assert await consumer.run() == 0
        assert consumer.counts.done == 1

    run(main)


# With warnings as errors uvloop's `close` never ends here.
@pytest.mark.filterwarnings("ignore:unclosed resource:ResourceWarning")
def test_a_client_outlives_its_loop(protomq_server: Broker, protomq_topic: str) -> None:
    producer = AsyncProducer(namesrv=protomq_server.remoting_address)

    sent: list[SendStatus] = []

    async def send() -> None:
        sent.append((await producer.send(protomq_topic, b"x")).status)

    run(send)
    run(send)
    assert sent == [SendStatus.SEND_OK] * 2

    async def close() -> None:
        await producer.close()

    run(close)
