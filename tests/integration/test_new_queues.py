"""Queues that a topic gets, and a topic that is made again, for groups that begin at the end: nothing of what is new is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import pytest

from protomq import Admin, Message, Producer, PullConsumer, PushConsumer, SimpleConsumer
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as broker:
        yield broker


Transport = Literal["remoting", "grpc"]
Take = Callable[[], list[bytes]]
"""Bodies of what has come since the last call."""


@contextmanager
def pushing(broker: Broker, topic: str) -> Iterator[Take]:
    came: list[bytes] = []

    def take() -> list[bytes]:
        taken = came[:]
        del came[: len(taken)]
        return taken

    consumer = PushConsumer(f"{topic}-group", namesrv=broker.namesrv, begin="latest")
    consumer.subscribe(topic, lambda message: came.append(message.body))
    with consumer:
        yield take


@contextmanager
def pulling(broker: Broker, topic: str) -> Iterator[Take]:
    with PullConsumer(f"{topic}-group", namesrv=broker.namesrv, begin="latest") as consumer:
        consumer.subscribe(topic)
        yield lambda: [message.body for message in consumer.poll(0.1)]


@contextmanager
def popping(broker: Broker, topic: str) -> Iterator[Take]:
    with SimpleConsumer(f"{topic}-group", namesrv=broker.namesrv) as consumer:

        def take() -> list[bytes]:
            messages: list[Message] = consumer.receive(topic, hold_s=0.1, start="latest")
            consumer.ack(messages)
            return [message.body for message in messages]

        yield take


def send(broker: Broker, topic: str, *bodies: bytes) -> None:
    with Producer(namesrv=broker.namesrv) as producer:
        for body in bodies:
            producer.send(topic, body)


def take_all(take: Take, bodies: set[bytes]) -> None:
    """Until all of them have come; nothing else does."""
    came: list[bytes] = []

    def has_come() -> bool:
        came.extend(take())
        return bodies <= set(came)

    wait_for(has_come, PATIENCE_S)
    assert set(came) == bodies


@pytest.mark.parametrize("consuming", [pushing, pulling, popping])
def test_who_begins_at_the_end_misses_nothing_of_queues_that_came_while_all_were_away(
    broker: Broker, consuming: Callable[[Broker, str], AbstractContextManager[Take]]
) -> None:
    topic = f"grows-{consuming.__name__}"
    with Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic(topic, write_queues=2)
        send(broker, topic, b"old", b"old")
        with consuming(broker, topic) as take:

            def has_begun() -> bool:
                take()
                return len({lag.queue for lag in admin.group_lag(f"{topic}-group", topic) if lag.lag == 0}) == 2

            wait_for(has_begun, PATIENCE_S)
            # One of the two queues stays as it is: it has had messages before, and is not new.
            send(broker, topic, b"first")
            take_all(take, {b"first"})
        admin.create_topic(topic, write_queues=8, update=True)
        new = [b"%d" % number for number in range(16)]
        send(broker, topic, *new)
        with consuming(broker, topic) as take:
            take_all(take, set(new))


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_simple_consumer_that_began_at_the_end_misses_nothing_of_a_topic_that_is_made_again(broker: Broker, transport: Transport) -> None:
    topic = f"made-again-{transport}"
    namesrv = broker.namesrv if transport == "remoting" else broker.grpc_address
    with (
        Admin(namesrv=broker.namesrv) as admin,
        SimpleConsumer(f"{topic}-group", namesrv=namesrv, transport=transport) as consumer,
    ):
        admin.create_topic(topic, write_queues=2)
        send(broker, topic, b"old", b"old")
        assert consumer.receive(topic, hold_s=0, start="latest") == []
        admin.delete_topic(topic)
        admin.create_topic(topic, write_queues=4)
        new = [b"%d" % number for number in range(8)]
        send(broker, topic, *new)

        def take() -> list[bytes]:
            messages = consumer.receive(topic, hold_s=1, start="latest")
            consumer.ack(messages)
            return [message.body for message in messages]

        take_all(take, set(new))
