"""Bodies by type, through a broker: protobuf messages and models, filters by their schema, and what simple and pull consumers ask for."""

from __future__ import annotations

import threading
import uuid

import pytest
from google.protobuf.duration_pb2 import Duration
from pydantic import BaseModel

from protomq import (
    Message,
    OutgoingMessage,
    Producer,
    PullConsumer,
    PushConsumer,
    SimpleConsumer,
)
from protomq.errors import SchemaError
from protomq.testing import Broker


class Order(BaseModel):
    number: int
    lines: list[str] = []


def test_a_filter_by_schema_gives_each_listener_its_own(protomq_server: Broker, protomq_topic: str) -> None:
    namesrv = protomq_server.remoting_address
    orders: list[Order] = []
    durations: list[tuple[float, str]] = []
    has_orders, has_durations = threading.Event(), threading.Event()

    def take_order(order: Order) -> None:
        orders.append(order)
        if len(orders) == 2:
            has_orders.set()

    async def take_durations(batch: list[Duration], messages: list[Message]) -> None:
        durations.extend((one.seconds, message.key) for one, message in zip(batch, messages, strict=True))
        if len(durations) == 2:
            has_durations.set()

    large = Order(number=2, lines=["x" * 1000] * 50)  # So large that it is compressed.
    with Producer(namesrv=namesrv) as producer:
        values = [Duration(seconds=1), Order(number=1), large, Duration(seconds=2), b"raw", "text"]
        producer.send_batch(
            protomq_topic,
            [OutgoingMessage(protomq_topic, value, key=f"k{number}") for number, value in enumerate(values)],
        )
    by_orders = PushConsumer(f"orders-{uuid.uuid4().hex}", namesrv=namesrv)
    by_orders.subscribe(protomq_topic, take_order, sql="schema = 'Order'")
    by_durations = PushConsumer(f"durations-{uuid.uuid4().hex}", namesrv=namesrv)
    by_durations.subscribe(protomq_topic, take_durations, sql="schema = 'google.protobuf.Duration'", batch_size=8)
    with by_orders, by_durations:
        assert has_orders.wait(60)
        assert has_durations.wait(60)
    assert sorted(orders, key=lambda order: order.number) == [Order(number=1), large]
    assert sorted(durations) == [(1, "k0"), (2, "k3")]
    assert (by_orders.counts.done, by_orders.counts.refused) == (2, 0)


def test_consumers_that_ask_themselves_ask_the_message(protomq_server: Broker, protomq_topic: str) -> None:
    namesrv = protomq_server.remoting_address
    with Producer(namesrv=namesrv) as producer:
        producer.send(protomq_topic, Duration(seconds=7))
    with SimpleConsumer(f"pop-{uuid.uuid4().hex}", namesrv=namesrv) as simple:
        (popped,) = simple.receive(protomq_topic, hold_s=20)
        assert popped.value(Duration).seconds == 7
        with pytest.raises(SchemaError, match="the body is application/protobuf, not application/json"):
            popped.value(Order)
        simple.ack(popped)
    with PullConsumer(namesrv=namesrv) as pull:
        pull.subscribe(protomq_topic)
        (polled,) = pull.poll(20)
        assert polled.value(Duration) == Duration(seconds=7)
        assert polled.properties == {"content-type": "application/protobuf", "schema": "google.protobuf.Duration"}
