"""Sends while a broker is drained: what a key has chosen there goes to another broker. A cluster in memory, no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from protomq import AsyncProducer, MessageQueue, OutgoingMessage, Producer, SendResult
from protomq.errors import (
    BatchIncompleteError,
    NotPermittedError,
    ProtomqError,
    RequestTimeoutError,
)
from protomq.wire.hashing import sharded_index
from tests.support.fake_cluster import (
    FakeAsyncTransport,
    FakeCluster,
    FakeSyncTransport,
    SendCall,
    after_storing,
)

KEY = next(f"k{i}" for i in range(100) if sharded_index(f"k{i}", 4) == 0)
"""Chooses queue 0 of the broker a while both brokers may be written."""
OTHER_KEY = next(f"k{i}" for i in range(100) if sharded_index(f"k{i}", 4) == 2)
"""Chooses queue 0 of the broker b."""
OPEN = MessageQueue("T", "b", sharded_index(KEY, 2))
CLOSED = MessageQueue("T", "a", 0)

Send = Callable[..., SendResult]


@pytest.fixture
def cluster() -> FakeCluster:
    """Of two brokers; a refuses from now on, and the name server has not heard of it."""
    cluster = FakeCluster({"T": {"a": 2, "b": 2}})
    cluster.closed = {"a"}
    return cluster


@pytest.fixture(params=["threads", "coroutines"])
def sends(request: pytest.FixtureRequest, cluster: FakeCluster) -> Callable[..., SendResult]:
    """`send` of a producer of its own. `batch`: `send_batch` instead, and its first result."""

    def send(body: object, *, batch: bool = False, retries: int = 2, **settings: object) -> SendResult:
        if request.param == "threads":
            with Producer(transport=FakeSyncTransport(cluster), retries=retries) as producer:
                if batch:
                    return producer.send_batch("T", body, **settings)[0]  # type: ignore[arg-type]
                return producer.send("T", body, **settings)  # type: ignore[arg-type]

        async def run() -> SendResult:
            async with AsyncProducer(transport=FakeAsyncTransport(cluster), retries=retries) as producer:
                if batch:
                    return (await producer.send_batch("T", body, **settings))[0]  # type: ignore[arg-type]
                return await producer.send("T", body, **settings)  # type: ignore[arg-type]

        return asyncio.run(run())

    return send


def told_at_call(cluster: FakeCluster, number: int) -> None:
    """The name server hears of it when the broker has had so many calls."""

    def on_send(call: SendCall) -> None:
        if len(cluster.calls) + 1 >= number:
            cluster.told_closed = {"a"}

    cluster.on_send = on_send


@pytest.mark.parametrize("call_number", [1, 4, 7])
def test_a_message_goes_on_to_the_queue_that_its_key_has_now(
    cluster: FakeCluster, sends: Send, call_number: int
) -> None:
    told_at_call(cluster, call_number)
    assert sends(b"x", sharding_key=KEY).queue == OPEN
    assert cluster.stored() == {("b", OPEN.queue_id): [b"x"]}


def test_a_selector_chooses_again(cluster: FakeCluster, sends: Send) -> None:
    told_at_call(cluster, 1)
    assert sends(b"x", selector=lambda queues, _: queues[0]).queue == MessageQueue("T", "b", 0)


def test_a_message_that_names_its_queue_keeps_the_error(cluster: FakeCluster, sends: Send) -> None:
    told_at_call(cluster, 1)
    with pytest.raises(NotPermittedError) as raised:
        sends(b"x", queue=CLOSED, sharding_key=None)
    assert raised.value.definite
    assert len(cluster.calls) == 3


def test_without_retries_a_message_is_tried_once(cluster: FakeCluster, sends: Send) -> None:
    told_at_call(cluster, 1)
    with pytest.raises(NotPermittedError):
        sends(b"x", sharding_key=KEY, retries=0)
    assert len(cluster.calls) == 1


def test_what_may_be_stored_goes_to_no_other_queue(cluster: FakeCluster, sends: Send) -> None:
    cluster.closed = set()
    refused = NotPermittedError("closed")
    cluster.script("a", after_storing(RequestTimeoutError("lost")), refused, refused, refused, refused)
    told_at_call(cluster, 1)
    with pytest.raises(ProtomqError) as raised:
        sends(b"x", sharding_key=KEY)
    assert not raised.value.definite
    assert cluster.bodies() == [b"x"]


def test_a_broker_that_refuses_for_good_is_asked_until_the_time_is_over(cluster: FakeCluster, sends: Send) -> None:
    with pytest.raises(NotPermittedError) as raised:
        sends(b"x", sharding_key=KEY, timeout_s=0.3)
    assert raised.value.definite
    assert 3 < len(cluster.calls) < 20


def test_a_permission_that_is_given_back_is_waited_for(cluster: FakeCluster, sends: Send) -> None:
    cluster.closed, cluster.told_closed = set(), {"a", "b"}
    asked = cluster._answer_route

    def answer(topic: str) -> bytes:
        if cluster.route_calls == 1:
            cluster.told_closed = {"a"}
        return asked(topic)

    cluster._answer_route = answer  # type: ignore[method-assign]
    assert sends(b"x", sharding_key=KEY).queue == OPEN
    cluster.route_calls, cluster.told_closed = 0, {"a", "b"}
    assert sends(b"x").queue.broker_name == "b"


def test_a_topic_that_nobody_may_write_is_an_error_soon(cluster: FakeCluster, sends: Send) -> None:
    cluster.told_closed = {"a", "b"}
    for settings in ({}, {"sharding_key": KEY}):
        with pytest.raises(NotPermittedError):
            sends(b"x", timeout_s=30, **settings)
    assert not cluster.calls
    assert cluster.route_calls < 30


def test_a_batch_of_which_nothing_is_stored_goes_on(cluster: FakeCluster, sends: Send) -> None:
    told_at_call(cluster, 4)
    assert sends([b"x", b"y"], batch=True, sharding_key=KEY).queue == OPEN
    assert cluster.stored() == {("b", OPEN.queue_id): [b"x", b"y"]}
    cluster.told_closed = set()
    told_at_call(cluster, len(cluster.calls) + 1)
    assert sends([OutgoingMessage("T", b"z", sharding_key=KEY)], batch=True).queue == OPEN
    assert cluster.bodies() == [b"x", b"y", b"z"]


def test_a_batch_of_which_a_part_is_stored_says_so(cluster: FakeCluster, sends: Send) -> None:
    messages = [OutgoingMessage("T", b"b", sharding_key=OTHER_KEY), OutgoingMessage("T", b"a", sharding_key=KEY)]
    told_at_call(cluster, 1)
    with pytest.raises(BatchIncompleteError):
        sends(messages, batch=True)
    assert cluster.bodies() == [b"b"]


def test_a_batch_that_names_a_queue_keeps_the_error(cluster: FakeCluster, sends: Send) -> None:
    told_at_call(cluster, 1)
    for messages, settings in (([b"x"], {"queue": CLOSED}), ([OutgoingMessage("T", b"x", queue=CLOSED)], {"sharding_key": KEY})):
        with pytest.raises(NotPermittedError):
            sends(messages, batch=True, **settings)
    assert not cluster.bodies()


async def test_of_a_batch_that_may_be_stored_the_error_is_not_definite(cluster: FakeCluster) -> None:
    # Both requests are sent at the same time. One is refused; later, the outcome of the other stays unknown.
    lost = RequestTimeoutError("lost", retry_delay_ms=60)
    cluster.script("b", *[after_storing(lost)] * 9)
    told_at_call(cluster, 1)
    messages = [OutgoingMessage("T", b"b", sharding_key=OTHER_KEY), OutgoingMessage("T", b"a", sharding_key=KEY)]
    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as producer:
        with pytest.raises(RequestTimeoutError) as raised:
            await producer.send_batch("T", messages)
    assert not raised.value.definite
    assert cluster.bodies() == [b"b"]
