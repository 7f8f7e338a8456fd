"""A transaction producer is asked about its transactions, though the topic by whose route it found the broker was deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from protomq import (
    Admin,
    AsyncTransactionProducer,
    SendResult,
    TransactionCheck,
    TransactionDecision,
    TransactionProducer,
)
from protomq.errors import TopicNotFoundError
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, wait_for

SETTINGS = {
    "PROTOMQ_AUTO_CREATE_TOPICS": "false", "PROTOMQ_TRANSACTION_TIMEOUT_MS": "500", "PROTOMQ_TRANSACTION_CHECK_INTERVAL_MS": "500",
}  # fmt: skip


@pytest.fixture
def broker() -> Iterator[Broker]:
    """One with two topics, which makes no others."""
    with Broker(environment=SETTINGS) as made:
        with Admin(namesrv=made.namesrv) as admin:
            for topic in ("deleted", "kept"):
                admin.create_topic(topic, write_queues=1, read_queues=1)
        yield made


def delete(broker: Broker) -> None:
    with Admin(namesrv=broker.namesrv) as admin:
        admin.delete_topic("deleted")


def unknown(_: SendResult) -> TransactionDecision:
    return TransactionDecision.UNKNOWN


def test_a_broker_is_found_by_another_topic(broker: Broker) -> None:
    asked: list[str] = []

    def check(question: TransactionCheck) -> TransactionDecision:
        asked.append(question.message.topic)
        return TransactionDecision.COMMIT

    with TransactionProducer("desk", check, namesrv=broker.namesrv) as producer:
        producer.send("deleted", b"", execute=lambda _: None)
        delete(broker)
        with pytest.raises(TopicNotFoundError):
            producer.send("deleted", b"", execute=lambda _: None)
        broker.restart()  # It was held there.
        producer.send("kept", b"", execute=unknown)
        wait_for(lambda: asked == ["kept"], PATIENCE_S)


async def test_a_broker_is_found_by_another_topic_from_coroutines(broker: Broker) -> None:
    asked: list[str] = []
    is_asked = asyncio.Event()

    def check(question: TransactionCheck) -> TransactionDecision:
        asked.append(question.message.topic)
        is_asked.set()
        return TransactionDecision.COMMIT

    async with AsyncTransactionProducer("desk", check, namesrv=broker.namesrv) as producer:
        await producer.send("deleted", b"", execute=lambda _: None)
        await asyncio.to_thread(delete, broker)
        with pytest.raises(TopicNotFoundError):
            await producer.send("deleted", b"", execute=lambda _: None)
        await asyncio.to_thread(broker.restart)
        await producer.send("kept", b"", execute=unknown)
        await asyncio.wait_for(is_asked.wait(), PATIENCE_S)
    assert asked == ["kept"]
