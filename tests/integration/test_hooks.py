"""Hooks, traces and replies of consumers through a real broker: listeners, polls, pops and transactions."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protomq import (
    Admin,
    AsyncProducer,
    AsyncPullConsumer,
    AsyncPushConsumer,
    AsyncSimpleConsumer,
    AsyncTransactionProducer,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    Retry,
    SimpleConsumer,
    TraceEvent,
    TransactionCheck,
    TransactionDecision,
    TransactionProducer,
)
from protomq._hooked_consuming import NOT_HANDED_ON
from protomq.allocation import Circle
from protomq.errors import ConfigurationError, TransactionEndedError
from protomq.hooks import CallContext, ConsumeContext, EndTransactionContext, Hook
from protomq.otel import Spans
from protomq.testing import Broker
from tests.support.waiting import async_wait_for, wait_for

PATIENCE_S = 60.0


class Seen(Hook):
    """Writes down what was consumed, decided and called; keeps no message with the tag "no"."""

    def __init__(self) -> None:
        self.consumed: list[tuple[list[bytes], str, list[str | None]]] = []
        self.ends: list[tuple[str, str, bool]] = []
        self.failures: set[tuple[str, str]] = set()
        self.methods: set[str] = set()

    def after_consume(self, context: ConsumeContext) -> None:
        self.consumed.append(
            ([message.body for message in context.messages], context.listener, list(context.failures))
        )

    def keeps(self, message: Message) -> bool:
        return message.tag != "no"

    def after_end_transaction(self, context: EndTransactionContext) -> None:
        self.ends.append((context.message_id, context.decision.name, context.is_check))
        if context.error is not None:
            self.failures.add((context.message_id, type(context.error).__name__))

    def after_call(self, context: CallContext) -> None:
        self.methods.add(context.method.split("/")[-1])


def send(broker: Broker, topic: str, bodies: Iterable[bytes]) -> list[str]:
    with Producer(namesrv=broker.namesrv) as producer:
        producer.send(topic, b"never seen", tag="no")
        return [producer.send(topic, body).message_id for body in bodies]


def events(broker: Broker, message_id: str) -> list[TraceEvent]:
    found: list[TraceEvent] = []

    def are_there() -> bool:
        with Admin(namesrv=broker.namesrv) as admin:
            found[:] = admin.trace_of(message_id)
        return len(found) > 0

    wait_for(are_there)
    return found


def test_listeners_have_hooks_and_a_trace(protomq_server: Broker) -> None:
    hook, done = Seen(), threading.Event()
    good, bad = send(protomq_server, "hooked-push", [b"good", b"bad"])
    consumer = PushConsumer(
        "hooked-push", namesrv=protomq_server.namesrv, hooks=[hook], trace=True, allocation=Circle(), instance_name="one"
    )
    gotten: list[bytes] = []

    @consumer.on("hooked-push")
    def listen(message: Message) -> Retry | None:
        gotten.append(message.body)
        if len(gotten) == 2:
            done.set()
        return Retry(delay=3600, error="not today") if message.body == b"bad" else None

    with consumer:
        assert done.wait(PATIENCE_S)
        with Admin(namesrv=protomq_server.namesrv) as admin:
            (member,) = admin.group_members("hooked-push")
        assert (member.client_id.partition("@")[2], member.allocation) == ("one", Circle().name)
    assert sorted(gotten) == [b"bad", b"good"], "what a hook does not keep, no listener gets"
    name = listen.__qualname__
    assert sorted(hook.consumed) == [([b"bad"], name, ["not today"]), ([b"good"], name, [None])]
    assert hook.methods >= {"Pull", "GetRoute", "SendBack", "CommitOffsets"}
    assert [(event.kind, event.error) for event in events(protomq_server, good)] == [("CONSUMED", "")]
    assert [(event.group, event.error) for event in events(protomq_server, bad)] == [("hooked-push", "not today")]


def test_coroutine_listeners_have_hooks_and_a_trace(protomq_server: Broker) -> None:
    hook = Seen()
    (message_id,) = send(protomq_server, "hooked-async", [b"x"])

    async def consume() -> None:
        done = asyncio.Event()
        consumer = AsyncPushConsumer("hooked-async", namesrv=protomq_server.namesrv, hooks=[hook], trace=True)

        @consumer.on("hooked-async")
        async def listen(message: Message) -> None:
            done.set()

        async with consumer, asyncio.timeout(PATIENCE_S):
            await done.wait()

    asyncio.run(consume())
    assert [(bodies, failures) for bodies, _, failures in hook.consumed] == [([b"x"], [None])]
    assert [event.kind for event in events(protomq_server, message_id)] == ["CONSUMED"]


def test_pops_have_hooks_and_a_trace(protomq_server: Broker) -> None:
    hook = Seen()
    acked, nacked, held = send(protomq_server, "hooked-pop", [b"acked", b"nacked", b"held"])
    with SimpleConsumer("hooked-pop", namesrv=protomq_server.namesrv, hooks=[hook], trace=True) as consumer:
        got: dict[bytes, Message] = {}
        while len(got) < 3:
            got |= {message.body: message for message in consumer.receive("hooked-pop", invisible_s=600)}
        consumer.ack(got[b"acked"])
        consumer.nack(got[b"nacked"], after_s=3600)
        consumer.change_invisible(got[b"held"], 3600)
    assert hook.consumed == [([b"acked"], "", [None]), ([b"nacked"], "", ["given back"])]
    assert [(event.attempt, event.error) for event in events(protomq_server, acked)] == [(0, "")]
    assert [event.error for event in events(protomq_server, nacked)] == ["given back"]
    with Admin(namesrv=protomq_server.namesrv) as admin:
        assert admin.trace_of(held) == []


def test_pops_of_coroutines_have_hooks_and_a_trace(protomq_server: Broker) -> None:
    hook = Seen()
    (message_id,) = send(protomq_server, "hooked-async-pop", [b"x"])

    async def consume() -> None:
        async with AsyncSimpleConsumer(
            "hooked-async-pop", namesrv=protomq_server.namesrv, hooks=[hook], trace=True
        ) as consumer:
            while not (got := await consumer.receive("hooked-async-pop")):
                pass
            await consumer.ack(got)

    asyncio.run(asyncio.wait_for(consume(), PATIENCE_S))
    assert [(bodies, failures) for bodies, _, failures in hook.consumed] == [([b"x"], [None])]
    assert [event.kind for event in events(protomq_server, message_id)] == ["CONSUMED"]


def test_polls_have_hooks(protomq_server: Broker) -> None:
    hook = Seen()
    send(protomq_server, "hooked-pull", [b"x"])
    with PullConsumer("hooked-pull", namesrv=protomq_server.namesrv, hooks=[hook]) as consumer:
        consumer.subscribe("hooked-pull")
        while not consumer.poll():
            pass
        assert hook.consumed == []
        consumer.poll(0)
        assert hook.consumed == [([b"x"], "", [None])]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_loop_that_is_left_has_not_consumed_the_rest(is_async: bool, protomq_server: Broker, protomq_topic: str) -> None:
    hook = Seen()
    bodies = [b"0", b"1", b"2", b"3"]
    with Producer(namesrv=protomq_server.namesrv) as producer:
        message_ids = [result.message_id for result in producer.send_batch(protomq_topic, bodies)]

    def loop() -> list[bytes]:
        with PullConsumer("left", namesrv=protomq_server.namesrv, hooks=[hook], trace=True) as consumer:
            consumer.subscribe(protomq_topic)
            for message in consumer:
                if message.body == b"1":
                    break
            return [message.body for message in consumer.poll(PATIENCE_S)]

    async def loop_async() -> list[bytes]:
        async with AsyncPullConsumer("left", namesrv=protomq_server.namesrv, hooks=[hook], trace=True) as consumer:
            await consumer.subscribe(protomq_topic)
            async for message in consumer:
                if message.body == b"1":
                    break
            return [message.body for message in await consumer.poll(PATIENCE_S)]

    assert (asyncio.run(asyncio.wait_for(loop_async(), PATIENCE_S)) if is_async else loop()) == bodies[2:]
    assert hook.consumed == [(bodies, "", [None, None, NOT_HANDED_ON, NOT_HANDED_ON]), (bodies[2:], "", [None, None])]
    assert [event.error for event in events(protomq_server, message_ids[1])] == [""]
    assert [event.error for event in events(protomq_server, message_ids[2])] == [NOT_HANDED_ON, ""]


def test_decisions_have_hooks(protomq_server: Broker) -> None:
    hook = Seen()
    with TransactionProducer(
        "hooked-desk", lambda _: TransactionDecision.UNKNOWN, namesrv=protomq_server.namesrv, hooks=[hook]
    ) as producer:
        sent = producer.send("hooked-half", b"x", execute=lambda _: None)
        with pytest.raises(KeyError):
            producer.send("hooked-half", b"y", execute=lambda _: {2: None}[1])
    assert hook.ends[0] == (sent.half.message_id, "COMMIT", False)
    assert [decision for _, decision, _ in hook.ends] == ["COMMIT", "ROLL_BACK"]


def test_decisions_of_coroutines_have_hooks_however_they_are_told(protomq_server: Broker) -> None:
    hook = Seen()

    async def check(_: TransactionCheck) -> TransactionDecision:
        return TransactionDecision.ROLL_BACK

    async def decide() -> list[tuple[str, str, bool]]:
        topic = "hooked-async-half"
        async with AsyncTransactionProducer(
            "hooked-async-desk", check, topics=[topic], namesrv=protomq_server.namesrv, hooks=[hook], send_timeout_s=PATIENCE_S
        ) as producer:
            awaited = await producer.send(topic, b"awaited", execute=lambda _: None)
            with pytest.raises(KeyError):
                await producer.send(topic, b"failed", execute=lambda _: {2: None}[1])
            told = await producer.send(topic, b"told", execute=lambda _: None, wait_for_end=False)
            begun = await producer.begin(topic, b"begun")
            await begun.roll_back()
            with pytest.raises(TransactionEndedError):
                await begun.commit()
            left = await producer.begin(topic, b"left")
            await async_wait_for(lambda: any(is_check for _, _, is_check in hook.ends), PATIENCE_S)
        return [
            (awaited.half.message_id, "COMMIT", False),
            (told.half.message_id, "COMMIT", False),
            (begun.message_id, "ROLL_BACK", False),
            (begun.message_id, "COMMIT", False),
            (left.message_id, "ROLL_BACK", True),
        ]

    expected = asyncio.run(asyncio.wait_for(decide(), 2 * PATIENCE_S))
    failed = [end for end in hook.ends if end not in expected]
    assert [(decision, is_check) for _, decision, is_check in failed] == [("ROLL_BACK", False)]
    assert sorted(hook.ends) == sorted([*expected, *failed])
    assert hook.failures == {(expected[3][0], "TransactionEndedError")}


@pytest.mark.parametrize("is_async", [False, True])
def test_transaction_producers_have_a_trace(protomq_server: Broker, is_async: bool) -> None:
    """Of their half messages: what was sent, by whom, and how long it took."""
    group = f"traced-desk-{is_async}"
    settings: dict[str, Any] = {"namesrv": protomq_server.namesrv, "trace": True, "send_timeout_s": PATIENCE_S}

    async def send_one() -> str:
        async with AsyncTransactionProducer(group, lambda _: TransactionDecision.UNKNOWN, **settings) as producer:
            return (await producer.send("traced-half", b"x", execute=lambda _: None)).half.message_id

    if is_async:
        message_id = asyncio.run(asyncio.wait_for(send_one(), PATIENCE_S))
    else:
        with TransactionProducer(group, lambda _: TransactionDecision.UNKNOWN, **settings) as producer:
            message_id = producer.send("traced-half", b"x", execute=lambda _: None).half.message_id
    (event,) = events(protomq_server, message_id)
    assert (event.kind, event.group, event.error, event.queue.topic) == ("SENT", group, "", "traced-half")
    assert 0 < event.duration_s < PATIENCE_S


def test_a_listener_replies(protomq_server: Broker) -> None:
    consumer = PushConsumer("repliers", namesrv=protomq_server.namesrv)

    @consumer.on("asked")
    def answer(message: Message) -> None:
        consumer.reply(message, message.body.upper(), properties={"by": "listener"})

    with consumer, Producer(namesrv=protomq_server.namesrv) as producer:
        reply = producer.request("asked", b"hello", timeout_s=PATIENCE_S)
    assert (reply.body, reply.properties["by"]) == (b"HELLO", "listener")


def test_a_coroutine_listener_replies(protomq_server: Broker) -> None:
    async def ask() -> bytes:
        consumer = AsyncPushConsumer("async-repliers", namesrv=protomq_server.namesrv)

        @consumer.on("asked-async")
        async def answer(message: Message) -> None:
            await consumer.reply(message, message.body.upper())

        with pytest.raises(ConfigurationError, match="start it first"):
            await consumer.reply(Message.__new__(Message))
        async with consumer:
            with Producer(namesrv=protomq_server.namesrv) as producer:
                reply = await asyncio.to_thread(producer.request, "asked-async", b"hello", timeout_s=PATIENCE_S)
        return reply.body

    assert asyncio.run(asyncio.wait_for(ask(), 2 * PATIENCE_S)) == b"HELLO"


def test_a_trace_leads_from_the_send_to_the_listener_and_on(protomq_server: Broker) -> None:
    exporter, provider, done = InMemorySpanExporter(), TracerProvider(), threading.Event()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(tracer_provider=provider)
    consumer = PushConsumer("spans", namesrv=protomq_server.namesrv, hooks=[spans])
    with Producer(namesrv=protomq_server.namesrv, hooks=[spans]) as producer:

        @consumer.on("spans-first")
        def forward(message: Message) -> None:
            producer.send("spans-second", message.body)

        @consumer.on("spans-second")
        def end(_: Message) -> None:
            done.set()

        producer.send("spans-first", b"x")
        with consumer:
            assert done.wait(PATIENCE_S)
    finished = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in finished if span.context is not None}
    at: ReadableSpan | None = next(span for span in finished if span.name == "process spans-second")
    names = []
    while at is not None:
        names.append(at.name)
        at = by_id.get(at.parent.span_id) if at.parent is not None else None
    assert names == ["process spans-second", "send spans-second", "process spans-first", "send spans-first"]


def test_handlers_of_popped_messages_have_hooks_and_a_trace(protomq_server: Broker) -> None:
    hook = Seen()
    good, bad = send(protomq_server, "hooked-handle", [b"good", b"bad"])
    with SimpleConsumer("hooked-handle", namesrv=protomq_server.namesrv, hooks=[hook], trace=True) as consumer:
        seen: list[bytes] = []

        def handler(message: Message) -> Retry | None:
            seen.append(message.body)
            if len(seen) == 2:
                consumer.request_stop()
            return Retry(delay=3600, error="not today") if message.body == b"bad" else None

        counts = consumer.handle("hooked-handle", handler)
    assert (counts.done, counts.failed) == (1, 1)
    name = handler.__qualname__
    assert sorted(hook.consumed) == [([b"bad"], name, ["not today"]), ([b"good"], name, [None])]
    assert [event.error for event in events(protomq_server, good)] == [""]
    assert [event.error for event in events(protomq_server, bad)] == ["not today"]


@pytest.mark.parametrize("is_async", [False, True])
def test_spans_traces_and_groups_call_a_client_the_same(protomq_server: Broker, is_async: bool) -> None:
    topic, group = f"named-{is_async}", f"named-{is_async}"
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings: dict[str, Any] = {"namesrv": protomq_server.namesrv, "hooks": [Spans(tracer_provider=provider)], "trace": True}
    done = threading.Event()
    members: list[str] = []

    def end(_: Message) -> None:
        with Admin(namesrv=protomq_server.namesrv) as admin:
            members.extend(member.client_id for member in admin.group_members(group))
        done.set()

    async def consume(producer: Producer) -> str:
        consumer = AsyncPushConsumer(group, **settings)
        consumer.subscribe(topic, end)
        async with consumer:
            message_id = producer.send(topic, b"x").message_id
            await async_wait_for(done.is_set, PATIENCE_S)
        return message_id

    with Producer("named-desk", **settings) as producer, Producer("named-desk", **settings) as other:
        if is_async:
            message_id = asyncio.run(consume(producer))
        else:
            consumer = PushConsumer(group, **settings)
            consumer.subscribe(topic, end)
            with consumer:
                message_id = producer.send(topic, b"x").message_id
                assert done.wait(PATIENCE_S)
        other.send(f"{topic}-other", b"x")
    names = {span.name: (span.attributes or {})["messaging.client.id"] for span in exporter.get_finished_spans()}
    wait_for(lambda: len(events(protomq_server, message_id)) == 2, PATIENCE_S)
    clients = {event.kind: event.client for event in events(protomq_server, message_id)}
    assert members == [clients["CONSUMED"]] == [names[f"process {topic}"]]
    assert clients["SENT"] == names[f"send {topic}"]
    assert names[f"send {topic}-other"] != clients["SENT"], "two clients of a process are told apart"


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_spans_of_every_client_say_where_the_broker_is(protomq_server: Broker, protomq_topic: str, transport: Any) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings: dict[str, Any] = {"namesrv": protomq_server.namesrv, "hooks": [Spans(tracer_provider=provider)], "transport": transport}
    done = [threading.Event(), threading.Event()]

    async def in_a_loop() -> None:
        async with AsyncProducer(**settings) as producer:
            await producer.send(protomq_topic, b"y")
        push = AsyncPushConsumer(f"async-push-{protomq_topic}", **settings)
        push.subscribe(protomq_topic, lambda _: done[1].set())
        async with (
            push,
            AsyncSimpleConsumer(f"async-pop-{protomq_topic}", **settings) as simple,
            AsyncPullConsumer(f"async-pull-{protomq_topic}", **settings) as pull,
        ):
            await simple.ack(await simple.receive(protomq_topic, hold_s=PATIENCE_S))
            await pull.subscribe(protomq_topic)
            assert await pull.poll(PATIENCE_S)
            await async_wait_for(done[1].is_set, PATIENCE_S)

    with Producer(**settings) as producer:
        producer.send(protomq_topic, b"x")
    push = PushConsumer(f"push-{protomq_topic}", **settings)
    push.subscribe(protomq_topic, lambda _: done[0].set())
    with push, SimpleConsumer(f"pop-{protomq_topic}", **settings) as simple, PullConsumer(f"pull-{protomq_topic}", **settings) as pull:
        simple.ack(simple.receive(protomq_topic, hold_s=PATIENCE_S))
        pull.subscribe(protomq_topic)
        assert pull.poll(PATIENCE_S)
        assert done[0].wait(PATIENCE_S)
    asyncio.run(asyncio.wait_for(in_a_loop(), 3 * PATIENCE_S))
    address = protomq_server.remoting_address if transport == "remoting" else protomq_server.grpc_address
    host, _, port = address.rpartition(":")
    found = Counter(span.name.partition(" ")[0] for span in exporter.get_finished_spans())
    assert (found["send"], found["ack"]) == (2, 2)
    assert found["receive"] >= 4
    assert found["process"] >= 6
    for span in exporter.get_finished_spans():
        attributes = span.attributes or {}
        assert (attributes.get("server.address"), attributes.get("server.port")) == (host, int(port)), span.name


class Open(Hook):
    """Calls that have begun and not ended."""

    def __init__(self) -> None:
        self.calls: dict[int, CallContext] = {}
        self.methods: set[str] = set()

    def before_call(self, context: CallContext) -> None:
        self.calls[id(context)] = context
        self.methods.add(context.method.split("/")[-1])

    def after_call(self, context: CallContext) -> None:
        del self.calls[id(context)]


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_calls_that_a_server_holds_end_with_their_client(protomq_server: Broker, transport: Any) -> None:
    send(protomq_server, "hooked-held", [b"x"])
    settings: Any = {"namesrv": protomq_server.namesrv, "transport": transport}
    hook = Open()
    pushed = PushConsumer("hooked-held", hooks=[hook], **settings)
    pushed.subscribe("hooked-held", lambda _: None)
    with pushed:
        wait_for(lambda: "Pull" in hook.methods)
    wait_for(lambda: not hook.calls, 10.0)
    hook = Open()
    with PullConsumer("hooked-held", hooks=[hook], **settings) as pulled:
        pulled.subscribe("hooked-held")
        wait_for(lambda: pulled.poll(0.1) is not None and "Pull" in hook.methods)
    wait_for(lambda: not hook.calls, 10.0)
    hook = Open()
    with TransactionProducer("hooked-held", lambda _: TransactionDecision.UNKNOWN, topics=["hooked-held"], hooks=[hook], **settings):
        wait_for(lambda: "WaitForChecks" in hook.methods)
    wait_for(lambda: not hook.calls, 10.0)
