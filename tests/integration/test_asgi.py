"""Applications with a lifespan: FastAPI and Starlette, with a broker; bodies that do not fit become dead letters."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
import pytest
from fastapi import Depends, FastAPI
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from protomq import (
    Admin,
    AsyncProducer,
    AsyncPullConsumer,
    AsyncPushConsumer,
    ConnectionOptions,
    Message,
    Producer,
    PullConsumer,
    TraceEvent,
)
from protomq.asgi import Messaging
from protomq.errors import ConfigurationError, ProtomqError, TopicNotFoundError
from protomq.hooks import ConsumeContext, Hook
from protomq.testing import Broker, FakeGroup
from tests.support.waiting import PATIENCE_S, wait_for


class Order(BaseModel):
    number: int


def connection(broker: Broker) -> ConnectionOptions:
    return ConnectionOptions(namesrv=broker.remoting_address)


@asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """The application as its server runs it: within its lifespan."""
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        yield client


async def test_a_fastapi_application_sends_and_consumes_and_starts_again(protomq_server: Broker, protomq_topic: str) -> None:
    messaging = Messaging("shop", connection=connection(protomq_server))
    billing = messaging.consumer(f"billing-{uuid.uuid4().hex}")
    billed: list[Order] = []
    has_billed = asyncio.Event()

    @billing.on(protomq_topic)
    async def bill(order: Order) -> None:
        # Listeners send, too, while the application stops.
        await (await messaging.producer()).send(f"{protomq_topic}-bills", order)
        billed.append(order)
        has_billed.set()

    app = FastAPI(lifespan=messaging.lifespan)

    @app.post("/orders")
    async def create(order: Order, producer: Annotated[AsyncProducer, Depends(messaging.producer)]) -> str:
        return (await producer.send(protomq_topic, order)).message_id

    @app.get("/lag")
    async def waiting(consumer: Annotated[AsyncPushConsumer, Depends(billing.running)]) -> int:
        return consumer.counts.waiting

    with Producer(connection=connection(protomq_server)) as producer:
        producer.send(protomq_topic, Order(number=0))
    for number in (1, 2):  # A second time, as in the next test of an application.
        assert not messaging.is_running
        async with served(app) as client:
            assert messaging.is_running
            assert len((await client.post("/orders", json={"number": number})).json()) == 40
            assert (await client.get("/lag")).json() in range(4)
            async with asyncio.timeout(60):
                while {order.number for order in billed} < set(range(number + 1)):
                    await has_billed.wait()
                    has_billed.clear()
        assert not messaging.is_running
        assert not billing.is_running
    assert sorted(order.number for order in billed) == [0, 1, 2]
    with PullConsumer(connection=connection(protomq_server)) as bills:
        bills.subscribe(f"{protomq_topic}-bills")
        found: set[int] = set()
        while len(found) < 3:
            found |= {message.value(Order).number for message in bills.poll(5)}


async def dead_letter(reader: AsyncPullConsumer, group: str) -> Message:
    """The first one of a group; its topic is there from then on."""
    async with asyncio.timeout(60):
        while True:
            try:
                await reader.subscribe(f"%DLQ%{group}")
                break
            except TopicNotFoundError:
                await asyncio.sleep(0.05)
        async for message in reader:
            return message
    raise AssertionError


async def test_a_starlette_application_rejects_what_is_no_order(protomq_server: Broker, protomq_topic: str) -> None:
    messaging = Messaging(connection=connection(protomq_server))
    group = f"billing-{uuid.uuid4().hex}"
    billing = messaging.consumer(group)
    seen: list[tuple[int, str]] = []
    was_called, loop = asyncio.Event(), asyncio.get_running_loop()

    @billing.on(protomq_topic)
    def bill(order: Order, message: Message) -> None:
        seen.append((order.number, message.properties["schema"]))
        loop.call_soon_threadsafe(was_called.set)

    async def create(request: Request) -> PlainTextResponse:
        producer = await messaging.producer()
        await producer.send(protomq_topic, await request.json())
        await producer.send(protomq_topic, Order(number=2))
        return PlainTextResponse("sent")

    app = Starlette(routes=[Route("/orders", create, methods=["POST"])], lifespan=messaging.lifespan)
    async with served(app) as client, AsyncPullConsumer(connection=connection(protomq_server)) as reader:
        assert (await client.post("/orders", json={"number": "many"})).text == "sent"
        dead = await dead_letter(reader, group)
        await asyncio.wait_for(was_called.wait(), 60)
    assert dead.value(dict) == {"number": "many"}
    assert dead.last_error.startswith("SchemaError: Order: number: Input should be a valid integer")
    assert seen == [(2, "Order")]


async def test_an_application_without_a_broker_does_not_start() -> None:
    messaging = Messaging(connection=ConnectionOptions(namesrv="127.0.0.1:1"))

    @messaging.consumer("g", request_timeout_s=0.5).on("orders")
    def bill(message: Message) -> None: ...

    with pytest.raises(ProtomqError):
        async with served(FastAPI(lifespan=messaging.lifespan)):
            pass
    assert not messaging.is_running


async def test_a_lifespan_may_be_entered_again_after_one_whose_end_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    messaging = Messaging(connection=ConnectionOptions(namesrv="127.0.0.1:1"))

    async def fail(producer: AsyncProducer, timeout_s: float | None = None) -> None:
        raise OSError("it cannot be closed")

    with monkeypatch.context() as patched:
        patched.setattr(AsyncProducer, "close", fail)
        with pytest.raises(OSError, match="cannot be closed"):
            async with messaging.lifespan():
                pass
    for _ in range(2):
        async with messaging.lifespan():
            assert messaging.is_running
        assert not messaging.is_running


async def test_what_is_used_outside_of_the_lifespan_says_so() -> None:
    messaging = Messaging()
    billing = messaging.consumer("g")
    for dependency in (messaging.producer, billing.running):
        with pytest.raises(ConfigurationError, match="lacks lifespan="):
            await dependency()


async def test_a_lifespan_of_ones_own_takes_it_in_and_one_at_a_time(protomq_server: Broker, protomq_topic: str) -> None:
    messaging = Messaging(connection=connection(protomq_server))
    billing = messaging.consumer(f"billing-{uuid.uuid4().hex}")
    billing.subscribe(protomq_topic, print)
    async with AsyncProducer(connection=connection(protomq_server)) as producer:
        await producer.send(protomq_topic, b"")
    async with messaging.lifespan():
        with pytest.raises(ConfigurationError, match="a Messaging of its own"):
            async with messaging.lifespan():
                pass
        with pytest.raises(ConfigurationError, match="the application has started"):
            billing.subscribe("more", print)
        with pytest.raises(ConfigurationError, match="the application has started"):
            billing.unsubscribe(protomq_topic)
        assert messaging.is_running
    async with messaging.lifespan():  # With the listener that it had.
        assert messaging.is_running


def test_its_listeners_are_tested_without_a_broker() -> None:
    messaging = Messaging()
    billing = messaging.consumer("billing")
    billed = []

    @billing.on("orders")
    async def bill(order: Order) -> None:
        billed.append(order.number)

    group = FakeGroup(billing.make())
    group.send("orders", Order(number=1))
    group.send("orders", {"number": None})
    group.deliver()
    assert billed == [1]
    assert len(group.dead_letters) == 1


async def test_a_consumers_trace_and_its_hooks_know_the_client_that_runs(protomq_server: Broker, protomq_topic: str) -> None:
    contexts: list[ConsumeContext] = []

    class Noting(Hook):
        def before_consume(self, context: ConsumeContext) -> None:
            contexts.append(context)

    messaging = Messaging("shop", connection=connection(protomq_server))
    billing = messaging.consumer(f"billing-{uuid.uuid4().hex}", trace=True, hooks=[Noting()])
    has_billed = asyncio.Event()

    @billing.on(protomq_topic)
    async def bill(message: Message) -> None:
        has_billed.set()

    async with messaging.lifespan():
        consumer = await billing.running()
        sent = await (await messaging.producer()).send(protomq_topic, b"1")
        await asyncio.wait_for(has_billed.wait(), PATIENCE_S)
        client_id, address = consumer._hooks.client_id, consumer._hooks.server_of([sent.queue])
    assert [(one.client_id, one.server_address) for one in contexts] == [(client_id, address)]
    assert address

    def trace() -> list[TraceEvent]:
        with Admin(namesrv=protomq_server.namesrv) as admin:
            return admin.trace_of(sent.message_id)

    await asyncio.to_thread(wait_for, trace, PATIENCE_S)
    assert [(event.kind, event.group, event.client) for event in await asyncio.to_thread(trace)] == [("CONSUMED", billing.group, client_id)]
