"""Spans of clients: names, kinds, attributes, links and parents, by an exporter in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from protomq import AsyncProducer, OutgoingMessage, Producer, Retry
from protomq._hook_points import HookPoints
from protomq._hooked_consuming import HandedOut, hooked_listener
from protomq._message import Message
from protomq._push_results import Listener
from protomq._types import BrokerAddress, MessageQueue, Route
from protomq.errors import CorruptMessageError, InvalidArgumentError, StaleReceiptError
from protomq.otel import LINKS_MAX, Spans
from tests.support.fake_cluster import FakeAsyncTransport, FakeCluster, FakeSyncTransport

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class World:
    """A tracer provider, what it exported, and a cluster."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")
        self.cluster = FakeCluster()

    def hook(self, **settings: Any) -> Spans:
        return Spans(tracer_provider=self.provider, **settings)

    def producer(self, **settings: Any) -> Producer:
        return Producer(transport=FakeSyncTransport(self.cluster), hooks=[self.hook(**settings)])

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def carried(self) -> list[dict[str, str]]:
        """The properties of what was sent."""
        return [dict(record.properties) for call in self.cluster.calls for record in call.request.records]


class Received(Message):
    """A message with these properties."""

    __slots__ = ("_given", "_id")

    def __init__(self, properties: Mapping[str, str] | None, topic: str = "T", message_id: str = "0" * 40) -> None:
        self._id = message_id
        self._queue, self._queue_offset, self._given = MessageQueue(topic, "a", 3), 7, properties

    @property
    def message_id(self) -> str:
        return self._id

    @property
    def properties(self) -> Mapping[str, str]:
        if self._given is None:
            raise CorruptMessageError("no")
        return self._given


@pytest.fixture
def world() -> World:
    return World()


def text(context: SpanContext | None) -> str:
    """As a message carries it."""
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def header(span: ReadableSpan) -> str:
    return text(span.get_span_context())


def linked(span: ReadableSpan) -> list[str]:
    return [text(one.context) for one in span.links]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {key.removeprefix("messaging."): value for key, value in (span.attributes or {}).items()}


def test_a_send_is_a_producer_span_whose_context_the_message_carries(world: World) -> None:
    with world.producer() as producer, world.tracer.start_as_current_span("around") as around:
        result = producer.send("T", b"x", properties={"mine": "1"})
    send = world.spans[0]
    assert (send.name, send.kind) == ("send T", SpanKind.PRODUCER)
    assert send.parent == around.get_span_context()
    assert world.carried() == [{"mine": "1", "traceparent": header(send)}]
    found = attributes(send)
    assert found.pop("client.id")
    assert found == {
        "system": "protomq", "operation.name": "send", "operation.type": "send", "destination.name": "T",
        "message.id": result.message_id, "destination.partition.id": str(result.queue.queue_id),
        "server.address": result.queue.broker_name, "server.port": 2,
    }  # fmt: skip


async def test_coroutines_have_the_same_span(world: World) -> None:
    async with AsyncProducer(transport=FakeAsyncTransport(world.cluster), hooks=[world.hook()]) as producer:
        await producer.send("T", b"x")
    assert [(span.name, span.kind) for span in world.spans] == [("send T", SpanKind.PRODUCER)]
    assert world.carried() == [{"traceparent": header(world.spans[0])}]


def test_each_message_of_a_batch_has_a_context_of_its_own(world: World) -> None:
    with world.producer() as producer:
        producer.send_batch("T", [b"a", b"b"])
    first, second, send = world.spans
    assert [(span.name, span.kind) for span in world.spans] == [
        ("create T", SpanKind.PRODUCER), ("create T", SpanKind.PRODUCER), ("send T", SpanKind.CLIENT)
    ]  # fmt: skip
    assert linked(send) == [header(first), header(second)]
    assert world.carried() == [{"traceparent": header(first)}, {"traceparent": header(second)}]
    assert attributes(send)["batch.message_count"] == 2


def test_without_create_spans_a_batch_carries_one_context(world: World) -> None:
    with world.producer(create_spans=False) as producer:
        producer.send_batch("T", [b"a", b"b"])
    (send,) = world.spans
    assert (send.kind, world.carried()) == (SpanKind.PRODUCER, [{"traceparent": header(send)}] * 2)


def test_a_context_that_a_message_has_stays(world: World) -> None:
    with world.producer() as producer:
        producer.send("T", b"x", properties={"traceparent": PARENT, "tracestate": "a=1"})
    (send,) = world.spans
    assert (send.kind, linked(send)) == (SpanKind.CLIENT, [PARENT])
    assert world.carried() == [{"traceparent": PARENT, "tracestate": "a=1"}]


def test_a_send_that_fails_is_an_error(world: World) -> None:
    world.cluster.script("a", InvalidArgumentError("not like this"))
    with world.producer() as producer, pytest.raises(InvalidArgumentError):
        producer.send("T", b"x")
    (send,) = world.spans
    assert send.status.status_code is StatusCode.ERROR
    assert attributes(send)["error.type"] == InvalidArgumentError.reason
    assert send.status.description == "not like this"


def test_one_way_and_async_sends_have_spans(world: World) -> None:
    with world.producer() as producer:
        producer.send_one_way("T", b"x")
        producer.send_async("T", b"y").result(10)
    assert [span.name for span in world.spans] == ["send T", "send T"]


def listen(world: World, given: Any, result: object = None, batch_size: int | None = None, **settings: Any) -> list[Any]:
    """Calls a listener; its current span is the result."""
    current: list[Any] = []

    def listener(_: object) -> object:
        current.append(trace.get_current_span().get_span_context())
        if isinstance(result, Exception) and not isinstance(result, Retry):
            raise result
        return result

    points = HookPoints("g", [world.hook(**settings)], client_id="me")
    hooked_listener(Listener.of(listener, batch_size), points).call(given)
    return current


def test_a_listener_works_within_a_child_of_the_producers_span(world: World) -> None:
    (current,) = listen(world, Received({"traceparent": PARENT, "CORRELATION_ID": "c"}))
    (process,) = world.spans
    assert (process.name, process.kind) == ("process T", SpanKind.CONSUMER)
    assert process.get_span_context() == current
    assert process.parent is not None
    assert f"{process.parent.span_id:016x}" == PARENT.split("-")[2]
    assert linked(process) == [PARENT]
    assert attributes(process) == {
        "system": "protomq", "operation.name": "process", "operation.type": "process", "destination.name": "T",
        "consumer.group.name": "g", "client.id": "me", "message.id": "0" * 40, "destination.partition.id": "3",
        "message.conversation_id": "c",
    }  # fmt: skip
    assert process.status.status_code is StatusCode.UNSET
    assert not trace.get_current_span().get_span_context().is_valid


def test_within_another_span_it_is_linked_only(world: World) -> None:
    with world.tracer.start_as_current_span("around") as around:
        listen(world, Received({"traceparent": PARENT}))
    process = world.spans[0]
    assert (process.parent, linked(process)) == (around.get_span_context(), [PARENT])


def test_links_alone_if_asked_for(world: World) -> None:
    listen(world, Received({"traceparent": PARENT}), is_child=False)
    assert (world.spans[0].parent, linked(world.spans[0])) == (None, [PARENT])


def test_a_batch_is_linked_to_each_of_its_messages_once(world: World) -> None:
    others = [f"00-{number:032x}-{number:016x}-01" for number in range(1, LINKS_MAX + 10)]
    listen(world, [Received({"traceparent": one}) for one in (PARENT, PARENT, *others)], batch_size=1024)
    process = world.spans[0]
    assert process.parent is None
    assert linked(process) == [PARENT, *others][:LINKS_MAX]
    assert attributes(process)["batch.message_count"] == LINKS_MAX + 11


def test_a_link_of_a_batch_names_its_message_and_that_of_several_names_none(world: World) -> None:
    carried = PARENT, PARENT, PARENT.replace("b7ad", "c8ad")
    messages = [Received({"traceparent": one}, message_id=str(number)) for number, one in enumerate(carried)]
    listen(world, messages, batch_size=8)
    listen(world, messages[0])
    batch, single = world.spans
    assert [dict(link.attributes or {}) for link in (*batch.links, *single.links)] == [{}, {"messaging.message.id": "2"}, {}]


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.0.0.1:8081", {"server.address": "10.0.0.1", "server.port": 8081}),
        ("[::1]:8081", {"server.address": "::1", "server.port": 8081}),
        ("", {}),
    ],
)
def test_a_span_says_where_its_broker_is(world: World, address: str, found: dict[str, Any]) -> None:
    points = HookPoints("g", [world.hook()])
    points.located_by(lambda _: Route("T", brokers={"a": BrokerAddress("a", "", address)}), lambda _: "remoting")
    messages = [Received({}), Received({})]
    points.after_consume(points.before_consume(messages), (None, None))
    points.after_receive(points.before_receive("T"), messages)
    points.after_settle(points.before_settle("ack", messages), ())
    assert len(world.spans) == 3
    for span in world.spans:
        assert {key: value for key, value in (span.attributes or {}).items() if key.startswith("server.")} == found


@pytest.mark.parametrize("properties", [{}, {"traceparent": "nonsense"}, None])
def test_a_message_without_a_context_begins_a_trace(world: World, properties: Mapping[str, str] | None) -> None:
    listen(world, Received(properties))
    assert (world.spans[0].parent, linked(world.spans[0])) == (None, [])


def test_a_listener_that_fails_is_an_error(world: World) -> None:
    with pytest.raises(KeyError):
        listen(world, Received({}), KeyError("k"))
    listen(world, Received({}), Retry(error="later"))
    raised, returned = world.spans
    assert (attributes(raised)["error.type"], raised.status.description) == ("KeyError", "KeyError: 'k'")
    assert (attributes(returned)["error.type"], returned.status.description) == ("not_done", "later")
    assert not trace.get_current_span().get_span_context().is_valid


def test_coroutine_listeners_have_their_own_current_spans(world: World) -> None:
    """Two at the same time, each within its own."""

    async def both() -> list[tuple[str, Any]]:
        met, found = asyncio.Barrier(2), []

        async def listener(message: Message) -> None:
            await met.wait()
            found.append((message.properties["traceparent"], trace.get_current_span()))

        call = hooked_listener(Listener.of(listener), HookPoints("g", [world.hook()])).call
        other = PARENT.replace("b7ad", "c8ad")
        await asyncio.gather(call(Received({"traceparent": PARENT})), call(Received({"traceparent": other})))
        return found

    for carried, span in asyncio.run(both()):
        assert f"{span.parent.span_id:016x}" == carried.split("-")[2]


def test_a_poll_has_a_span_until_the_program_comes_back(world: World) -> None:
    handed = HandedOut(HookPoints("g", [world.hook()]))
    handed.gave([Received({"traceparent": PARENT}), Received({}, "other")])
    assert not world.spans
    assert not trace.get_current_span().get_span_context().is_valid
    handed.came_back()
    (process,) = world.spans
    assert (process.name, linked(process)) == ("process", [PARENT])


def test_without_an_sdk_nothing_is_added_to_messages() -> None:
    cluster = FakeCluster()
    with Producer(transport=FakeSyncTransport(cluster), hooks=[Spans(tracer_provider=trace.NoOpTracerProvider())]) as producer:
        producer.send(OutgoingMessage("T", b"x"))
        producer.send_batch("T", [b"y"])
    assert [dict(record.properties) for call in cluster.calls for record in call.request.records] == [{}, {}]


def test_a_receive_and_what_is_settled_are_client_spans_linked_to_the_messages(world: World) -> None:
    points = HookPoints("group", [world.hook()], "client")
    messages: list[Message] = [Received({"traceparent": PARENT}), Received({})]
    with world.tracer.start_as_current_span("around") as around:
        points.after_receive(points.before_receive("T"), messages)
        points.after_settle(points.before_settle("ack", messages[:1]), ())
        points.after_receive(points.before_receive("T"), ())  # Nothing came: no span.
    receive, ack, _ = world.spans
    assert [(span.name, span.kind, span.parent) for span in (receive, ack)] == [
        ("receive T", SpanKind.CLIENT, around.get_span_context()), ("ack T", SpanKind.CLIENT, around.get_span_context()),
    ]  # fmt: skip
    assert linked(receive) == linked(ack) == [PARENT]
    same = {"system": "protomq", "client.id": "client", "consumer.group.name": "group", "destination.name": "T"}
    assert attributes(receive) == {**same, "operation.name": "receive", "operation.type": "receive", "batch.message_count": 2}
    assert attributes(ack) == {
        **same, "operation.name": "ack", "operation.type": "settle", "message.id": "0" * 40, "destination.partition.id": "3",
    }  # fmt: skip
    assert receive.start_time is not None
    assert receive.end_time is not None
    assert receive.start_time <= receive.end_time


def test_a_receive_or_ack_that_fails_is_an_error(world: World) -> None:
    points = HookPoints("group", [world.hook()], "client")
    points.after_receive(points.before_receive("T"), (), StaleReceiptError("gone"))
    points.after_settle(points.before_settle("nack", [Received({})]), (), StaleReceiptError("gone"))
    found = [(span.name, span.status.status_code, attributes(span)["error.type"]) for span in world.spans]
    assert found == [
        ("receive T", StatusCode.ERROR, "STALE_RECEIPT"), ("nack T", StatusCode.ERROR, "STALE_RECEIPT"),
    ]  # fmt: skip


def test_a_commit_is_a_settle_span_without_links(world: World) -> None:
    points = HookPoints("group", [world.hook()], "client")
    one, two = MessageQueue("T", "b", 3), MessageQueue("T", "b", 4)
    points.after_commit(points.before_commit("T", "b", {one: 7}))
    points.after_commit(points.before_commit("T", "b", {one: 7, two: 9}), StaleReceiptError("gone"))
    done, failed = world.spans
    same = {
        "system": "protomq", "client.id": "client", "consumer.group.name": "group", "destination.name": "T", "operation.name": "commit",
        "operation.type": "settle",
    }  # fmt: skip
    assert [(span.name, span.kind, linked(span)) for span in world.spans] == [("commit T", SpanKind.CLIENT, [])] * 2
    assert attributes(done) == {**same, "destination.partition.id": "3"}
    assert (failed.status.status_code, attributes(failed)["error.type"]) == (StatusCode.ERROR, "STALE_RECEIPT")
