"""Producers beside brokers that have forgotten them, or lost what they had acknowledged. A cluster in memory, no sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protomq import AsyncProducer, MessageQueue, Producer
from protomq.errors import (
    ConnectionLostError,
    RequestTimeoutError,
    SequenceExpiredError,
)
from protomq.testing.fakes import FakeClock
from tests.support.fake_cluster import (
    FakeAsyncTransport,
    FakeCluster,
    FakeSyncTransport,
    after_storing,
)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def producer(cluster: FakeCluster) -> Iterator[Producer]:
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        yield producer


def named(cluster: FakeCluster) -> list[int | None]:
    """What each request named as sent before."""
    return [
        call.request.previous_sequence if call.request.HasField("previous_sequence") else None
        for call in cluster.calls
    ]


def test_a_request_names_what_its_broker_has_acknowledged() -> None:
    cluster = FakeCluster({"T": {"a": 1, "b": 1}})
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        for broker in ("a", "b", "a", "a", "b"):
            producer.send("T", b"x", queue=MessageQueue("T", broker, 0))
        producer.send_batch("T", [b"x"] * 3, queue=MessageQueue("T", "a", 0))
        producer.send("T", b"x", queue=MessageQueue("T", "a", 0))
    assert named(cluster) == [None, None, 0, 2, 1, 3, 7]


def test_what_was_not_acknowledged_is_not_named(cluster: FakeCluster, producer: Producer) -> None:
    cluster.script("a", *[after_storing(RequestTimeoutError("lost"))] * 9)
    with pytest.raises(RequestTimeoutError):
        producer.send("T", b"x", timeout_s=0.2)
    cluster.brokers["a"].script.clear()
    producer.send("T", b"y")
    assert set(named(cluster)) == {None}


def test_to_a_broker_that_has_forgotten_the_producer_a_new_message_goes_as_the_first(
    cluster: FakeCluster, producer: Producer
) -> None:
    producer.send("T", b"one")
    cluster.brokers["a"].forget()
    result = producer.send("T", b"two")
    assert not result.repeated_send
    producer.send("T", b"three")
    assert named(cluster) == [None, 0, None, 1]
    assert cluster.bodies() == [b"one", b"three", b"two"]


def test_what_a_power_cut_took_back_stops_nobody(cluster: FakeCluster, producer: Producer) -> None:
    for body in (b"one", b"two", b"three"):
        producer.send("T", body)
    cluster.brokers["a"].forget(1, 2)
    producer.send("T", b"four")
    producer.send("T", b"five")
    assert named(cluster) == [None, 0, 1, 2, None, 3]


def test_a_message_that_may_be_stored_is_not_stored_again_by_a_broker_that_has_forgotten(
    cluster: FakeCluster, producer: Producer
) -> None:
    producer.send("T", b"one")
    cluster.script("a", after_storing(ConnectionLostError("cut")))

    def forget(_: object) -> None:
        if len(cluster.calls) == 2:  # the answer is lost; before it asks again, the broker forgets
            cluster.brokers["a"].forget()

    cluster.on_send = forget
    with pytest.raises(SequenceExpiredError) as caught:
        producer.send("T", b"two")
    assert not caught.value.definite
    assert cluster.bodies() == [b"one", b"two"]
    producer.send("T", b"three")
    assert cluster.bodies() == [b"one", b"three", b"two"]


def test_what_cannot_be_stored_since_the_message_before_it_was_taken_back_is_sent_as_the_first(
    cluster: FakeCluster, producer: Producer
) -> None:
    producer.send("T", b"one")
    producer.send("T", b"unconfirmed")
    # The master falls silent, and the next one has not got what was not confirmed. What named it is not stored there either.
    cluster.script("a", RequestTimeoutError("silent"))
    cluster.brokers["a"].forget(1)
    assert not producer.send("T", b"two").repeated_send
    producer.send("T", b"three")
    assert named(cluster) == [None, 0, 1, 1, None, 2]


def test_a_first_contact_is_not_tried_again_for_longer_than_a_broker_remembers(
    cluster: FakeCluster,
) -> None:
    with Producer(transport=FakeSyncTransport(cluster), send_timeout_s=3_600) as producer:
        clock = FakeClock()
        producer._core.clock = clock.monotonic
        cluster.script("a", after_storing(ConnectionLostError("cut")))

        def wait_long(_: object) -> None:
            clock.advance(850_000)

        cluster.on_send = wait_long
        with pytest.raises(ConnectionLostError) as caught:
            producer.send("T", b"one")
        assert not caught.value.definite
        assert cluster.bodies() == [b"one"]
        assert len(cluster.calls) == 1


async def test_an_async_producer_does_the_same() -> None:
    cluster = FakeCluster()
    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as producer:
        await producer.send("T", b"one")
        cluster.brokers["a"].forget()
        await producer.send("T", b"two")
        await producer.send_batch("T", [b"three"] * 2)
    assert named(cluster) == [None, 0, None, 1]
