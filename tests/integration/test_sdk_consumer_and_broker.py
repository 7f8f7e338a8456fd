"""The consumers against a real broker: both transports, compressed bodies, cut connections, kill -9."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from protomq import (
    Admin,
    AsyncPullConsumer,
    Message,
    OutgoingMessage,
    Producer,
    PullConsumer,
    _open_consumers,
    _pull_logic,
)
from protomq._methods import GET_BROKER_STATUS
from protomq._transport import SyncTransport
from protomq._types import BrokerAddress
from protomq.errors import (
    OffsetOutOfRangeError,
    QueueNotFoundError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from protomq.testing import Broker, FaultProxy
from protomq.v1.admin_service_pb2 import GetBrokerStatusResponse
from tests.support.waiting import PATIENCE_S, async_wait_for, wait_for

Transport = Literal["remoting", "grpc"]
TRANSPORTS = pytest.mark.parametrize("transport", ["remoting", "grpc"])


def address_of(broker: Broker, transport: Transport) -> str:
    return broker.grpc_address if transport == "grpc" else broker.remoting_address


def drain(source: PullConsumer, count: int, timeout_s: float = PATIENCE_S) -> list[Message]:
    got: list[Message] = []
    ends_s = time.monotonic() + timeout_s
    while len(got) < count and time.monotonic() < ends_s:
        got.extend(source.poll(0.5))
    return got


@TRANSPORTS
def test_messages_arrive_as_they_were_sent(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, transport: Transport
) -> None:
    big = b"compressible " * 2000
    sent = [
        OutgoingMessage(protomq_topic, b"plain"),
        OutgoingMessage(
            protomq_topic, b"", keys=("k1", "k2"), tag="T", properties={"b": "2", "a": "ä"}
        ),
        OutgoingMessage(protomq_topic, big, keys=("big",), sharding_key="shard"),
    ]
    results = [protomq_producer.send(message) for message in sent]
    with PullConsumer(
        namesrv=address_of(protomq_server, transport), transport=transport
    ) as source:
        source.subscribe(protomq_topic)
        got = {message.message_id: message for message in drain(source, 3)}
        assert source.transport == transport
    assert len(got) == 3
    for message, result in zip(sent, results, strict=True):
        received = got[result.message_id]
        assert received.body == message.body
        assert received.keys == tuple(message.keys)
        assert (received.tag, dict(received.properties)) == (
            message.tag,
            dict(message.properties or {}),
        )
        assert received.sharding_key == (message.sharding_key or "")
        assert (received.queue, received.queue_offset) == (result.queue, result.queue_offset)
        assert abs(received.store_time_ms - received.born_time_ms) < 10_000
    assert got[results[2].message_id].compression != "none"


@pytest.fixture
def held(protomq_server: Broker) -> Iterator[Callable[[], int]]:
    """Counts the pulls that are held at the broker."""
    address = BrokerAddress("", protomq_server.grpc_address, protomq_server.remoting_address)
    with SyncTransport() as transport:

        def count() -> int:
            status = GetBrokerStatusResponse.FromString(transport.call(address, GET_BROKER_STATUS, [b""], PATIENCE_S))
            return sum(lane.holds for lane in status.lanes if lane.lane == "pull")

        yield count


@TRANSPORTS
def test_a_pull_that_does_not_count_any_more_is_not_held_any_longer(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, held: Callable[[], int], transport: Transport
) -> None:
    protomq_producer.send(protomq_topic, b"x", sharding_key="one-queue")
    before = held()
    with PullConsumer("gives-up", namesrv=address_of(protomq_server, transport), transport=transport) as source:
        source.subscribe(protomq_topic)
        (message,) = drain(source, 1)
        count = len(source.assignment())
        while held() != before + count:
            source.poll(0.1)
        source.seek(message.queue, 0)
        assert [again.body for again in drain(source, 1)] == [b"x"]
        source.seek(message.queue, 1)
        ends_s = time.monotonic() + PATIENCE_S / 6
        while source.poll(0.2) or held() != before + count:
            assert time.monotonic() < ends_s
        source.unsubscribe(protomq_topic)
        wait_for(lambda: held() == before, PATIENCE_S / 6)


@TRANSPORTS
async def test_a_pull_of_a_coroutine_that_does_not_count_any_more_is_not_held_any_longer(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, held: Callable[[], int], transport: Transport
) -> None:
    protomq_producer.send(protomq_topic, b"x", sharding_key="one-queue")
    before = held()
    async with AsyncPullConsumer("gives-up-async", namesrv=address_of(protomq_server, transport), transport=transport) as source:
        await source.subscribe(protomq_topic)
        message: Message | None = None
        while message is None or held() != before + len(source.assignment()):
            for message in await source.poll(0.1):
                assert message.body == b"x"
        count = len(source.assignment())
        source.seek(message.queue, 0)
        while not await source.poll(0.2):
            pass
        source.seek(message.queue, 1)
        ends_s = time.monotonic() + PATIENCE_S / 6
        while await source.poll(0.2) or held() != before + count:
            assert time.monotonic() < ends_s
        await source.unsubscribe(protomq_topic)
        await async_wait_for(lambda: held() == before, PATIENCE_S / 6)


@TRANSPORTS
async def test_async_consumer_and_tags(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, transport: Transport
) -> None:
    for i in range(60):
        protomq_producer.send(protomq_topic, b"%d" % i, tag="ABC"[i % 3], sharding_key="one-queue")
    source = AsyncPullConsumer(
        "async",
        namesrv=address_of(protomq_server, transport),
        transport=transport,
        hold_ms=1000,
    )
    got: list[bytes] = []
    async with source:
        await source.subscribe(protomq_topic, tags=["A", "C"])
        while len(got) < 40:
            got.extend(message.body for message in await source.poll(10))
        assert await source.poll(0.05) == []
        assert source.transport == transport
    assert got == [b"%d" % i for i in range(60) if i % 3 != 1]


def test_a_group_goes_on_where_it_stopped_after_the_broker_was_killed() -> None:
    with Broker() as broker, Producer(namesrv=broker.namesrv) as producer:
        producer.send_batch("t", [b"%d" % i for i in range(500)])
        with PullConsumer("g", namesrv=broker.namesrv) as source:
            source.subscribe("t")
            first = drain(source, 500)
            assert len(first) == 500
            source.commit()
            broker.kill()
            broker.start()
            producer.send_batch("t", [b"%d" % i for i in range(500, 600)])
            second = drain(source, 100)
        assert Counter(message.body for message in first + second) == Counter(
            b"%d" % i for i in range(600)
        )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cut_connections_lose_and_repeat_nothing(seed: int) -> None:
    """Positions are kept by the consumer: whatever is cut, it asks again for what it has not got."""
    with FaultProxy(seed=seed) as proxy, Broker(environment=proxy.advertised()) as broker:
        proxy.target = broker.remoting_address
        with Producer(namesrv=broker.grpc_address, transport="grpc") as producer:
            producer.send_batch("t", [b"%d" % i + bytes(500) for i in range(3000)])
        proxy.set(cut_probability=0.05)
        source = PullConsumer(namesrv=broker.grpc_address, pull_size_max_bytes=100_000)
        with source:
            source.subscribe("t")
            got = drain(source, 3000)
        proxy.heal()
    assert len(got) == 3000, f"seed {seed}"
    assert [message.queue_offset for message in got] == list(range(3000))
    assert [message.body for message in got] == [b"%d" % i + bytes(500) for i in range(3000)]


def test_a_message_reaches_a_waiting_consumer_at_once(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    with PullConsumer(namesrv=protomq_server.remoting_address) as source:
        source.subscribe(protomq_topic)
        assert source.poll(0.2) == []
        latencies_s = []
        for _ in range(20):
            sent_s: list[float] = []

            def send(sent_s: list[float] = sent_s) -> None:
                sent_s.append(time.perf_counter())
                protomq_producer.send(protomq_topic, b"now")

            timer = threading.Timer(0.02, send)
            timer.start()
            assert len(source.poll(PATIENCE_S)) == 1
            latencies_s.append(time.perf_counter() - sent_s[0])
            timer.join()
    # The hold ends when the message comes; a poll every so often would take longer.
    assert sorted(latencies_s)[10] < 0.1


def make_again(broker: Broker, topic: str, queue_count: int = 2) -> None:
    with Admin(namesrv=broker.remoting_address) as admin:
        admin.delete_topic(topic)
        admin.create_topic(topic, write_queues=queue_count, read_queues=queue_count)


@TRANSPORTS
def test_a_reader_of_a_topic_that_was_made_again_is_told_and_can_begin_anew(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, transport: Transport
) -> None:
    address = address_of(protomq_server, transport)
    for number in range(8):
        protomq_producer.send(protomq_topic, b"old %d" % number)
    with PullConsumer("recreated", namesrv=address, transport=transport) as source:
        source.subscribe(protomq_topic)
        assert len(drain(source, 8)) == 8
        source.commit()
        make_again(protomq_server, protomq_topic)
        for number in range(20):
            protomq_producer.send(protomq_topic, b"new %d" % number)
        with pytest.raises(TopicRecreatedError, match="created again") as caught:
            drain(source, 1)
        assert caught.value.metadata["topic"] == protomq_topic
        assert caught.value.metadata["wanted"] != caught.value.metadata["current"]
        (queue, *_) = source.assignment()
        with pytest.raises(TopicRecreatedError):
            source.commit({queue: 1})
        assert source.committed(queue) is None
        source.subscribe(protomq_topic)
        assert {message.body for message in drain(source, 20)} == {b"new %d" % i for i in range(20)}
        source.commit()
        assert sum(source.committed(queue) or 0 for queue in source.assignment()) == 20


@pytest.mark.parametrize("group", ["recreated-latest", ""])
def test_a_reader_that_begins_at_the_end_skips_nothing_of_a_topic_that_was_made_again(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, group: str
) -> None:
    protomq_producer.send(protomq_topic, b"before")
    with PullConsumer(group, namesrv=protomq_server.remoting_address, begin="latest") as source:
        source.subscribe(protomq_topic)
        assert source.poll(0) == []
        make_again(protomq_server, protomq_topic, queue_count=8)
        for number in range(20):
            protomq_producer.send(protomq_topic, b"new %d" % number)
        with pytest.raises(TopicRecreatedError):
            drain(source, 1)
        source.subscribe(protomq_topic)
        assert {message.body for message in drain(source, 20, 5.0)} == {b"new %d" % i for i in range(20)}


async def test_an_async_reader_of_a_topic_that_was_made_again_is_told_and_can_begin_anew(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    protomq_producer.send(protomq_topic, b"old")
    source = AsyncPullConsumer("recreated-async", namesrv=protomq_server.remoting_address)
    async with source:
        await source.subscribe(protomq_topic)
        got: list[bytes] = []
        while not got:
            got += [message.body for message in await source.poll(1.0)]
        await source.commit()
        await asyncio.to_thread(make_again, protomq_server, protomq_topic)
        await asyncio.to_thread(protomq_producer.send, protomq_topic, b"new")

        async def read_until(body: bytes) -> None:
            while body not in got:
                got.extend(message.body for message in await source.poll(1.0))

        with pytest.raises(TopicRecreatedError):
            await read_until(b"new")
        await source.subscribe(protomq_topic)
        await read_until(b"new")
        assert got == [b"old", b"new"]


@TRANSPORTS
def test_a_reader_of_a_topic_that_was_deleted_is_told_and_can_wait_for_a_new_one(
    protomq_server: Broker,
    protomq_topic: str,
    protomq_producer: Producer,
    transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_pull_logic, "DELETED_AFTER_S", 0.2)
    sent = protomq_producer.send(protomq_topic, b"old")
    address = address_of(protomq_server, transport)
    with (
        PullConsumer("deleted-1", namesrv=address, transport=transport) as subscriber,
        PullConsumer("deleted-2", namesrv=address, transport=transport) as assignee,
        Admin(namesrv=address) as admin,
    ):
        subscriber.subscribe(protomq_topic)
        assignee.assign([sent.queue])
        for source in (subscriber, assignee):
            assert len(drain(source, 1)) == 1
        admin.delete_topic(protomq_topic)
        for source in (subscriber, assignee):
            for _ in range(2):
                with pytest.raises(TopicNotFoundError, match=r"was deleted at broker .* while it was read"):
                    drain(source, 1)
        with pytest.warns(RuntimeWarning, match="does not exist"):
            subscriber.subscribe(protomq_topic)
        protomq_producer.send(protomq_topic, b"new")
        assert [message.body for message in drain(subscriber, 1)] == [b"new"]
        with pytest.raises(TopicRecreatedError):
            drain(assignee, 1)


async def test_an_async_reader_of_a_topic_that_was_deleted_is_told(
    protomq_server: Broker,
    protomq_topic: str,
    protomq_producer: Producer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_pull_logic, "DELETED_AFTER_S", 0.2)
    protomq_producer.send(protomq_topic, b"old")
    source = AsyncPullConsumer("deleted-async", namesrv=protomq_server.remoting_address)
    async with source:
        await source.subscribe(protomq_topic)
        while not await source.poll(1.0):
            pass
        with Admin(namesrv=protomq_server.remoting_address) as admin:
            await asyncio.to_thread(admin.delete_topic, protomq_topic)

        async def read() -> None:
            ends_s = time.monotonic() + PATIENCE_S
            while time.monotonic() < ends_s:
                await source.poll(1.0)

        with pytest.raises(TopicNotFoundError, match=r"was deleted at broker .* while it was read"):
            await read()


async def test_offsets_of_queues_that_a_topic_has_no_more_keep_no_others_from_being_committed(
    protomq_server: Broker, protomq_topic: str
) -> None:
    namesrv = protomq_server.namesrv
    with (
        Admin(namesrv=namesrv) as admin,
        PullConsumer("fewer", namesrv=namesrv) as source,
        Producer(namesrv=namesrv) as producer,
    ):
        queues = source.queues(protomq_topic)
        producer.send(protomq_topic, b"x", queue=queues[5])
        source.assign(queues)
        admin.create_topic(protomq_topic, write_queues=2, read_queues=8, update=True)
        admin.create_topic(protomq_topic, write_queues=2, read_queues=2, update=True)
        with pytest.raises(QueueNotFoundError, match="offset of queue 6, 7 is not committed") as caught:
            source.commit(dict.fromkeys([queues[6], *queues[:2], queues[7]], 0))
        assert caught.value.metadata["queue_ids"] == "6, 7"
        assert ", queue 6, 7, not committed: QueueNotFoundError" in caught.value.__notes__[0]
        assert [source.committed(queue) for queue in queues[:2]] == [0, 0]
        with pytest.raises(QueueNotFoundError):
            source.commit({queues[7]: 0})
        with pytest.raises(QueueNotFoundError, match="offset of queue 7 is not committed"):
            source.commit({queues[5]: 1, queues[7]: 0, queues[0]: 0})
        admin.create_topic(protomq_topic, write_queues=8, read_queues=8, update=True)
        assert source.committed(queues[5]) == 1, "it has had a message"
        admin.create_topic(protomq_topic, write_queues=2, read_queues=8, update=True)
        admin.create_topic(protomq_topic, write_queues=2, read_queues=2, update=True)
        # Who has named them wants to know that they are not there.
        with pytest.raises(QueueNotFoundError, match="no read queue"):
            drain(source, 1)
        async with AsyncPullConsumer("fewer-async", namesrv=namesrv) as other:
            with pytest.raises(QueueNotFoundError, match="offset of queue 4 is not committed"):
                await other.commit({queues[4]: 0, queues[5]: 1, queues[1]: 0})
            assert await other.committed(queues[1]) == 0
            await other.assign(queues[:2])
            other._steps.assigned = tuple(queues)
            other._state.assign(queues, {})
            other._state.start_all(queues, {}, {})
            with pytest.raises(QueueNotFoundError, match="no read queue"):
                await other.poll(PATIENCE_S)


@TRANSPORTS
def test_two_who_assign_the_same_queues_are_told_that_both_get_everything(
    protomq_server: Broker,
    protomq_topic: str,
    protomq_producer: Producer,
    transport: Transport,
    caplog: pytest.LogCaptureFixture,
) -> None:
    namesrv = address_of(protomq_server, transport)
    made = [
        PullConsumer("pair", namesrv=namesrv, transport=transport, hold_ms=20) for _ in range(2)
    ]
    for source in made:
        _open_consumers.closed(source)  # As if each were in a process of its own.
    alone = PullConsumer("alone", namesrv=namesrv, transport=transport, hold_ms=20)
    with caplog.at_level(logging.WARNING, "protomq"), made[0], made[1], alone:
        queues = alone.queues(protomq_topic)
        for source in (*made, alone):
            source.assign(queues)
        for _ in range(200):
            for source in (*made, alone):
                source.poll(0.05)
            if len(caplog.messages) >= 2:
                break
    # One line for each of the two, which names the other; none for who is alone.
    assert len(caplog.messages) == 2
    named = {message.split("another member, ")[1].split(", that")[0] for message in caplog.messages}
    assert named == {source._state._member for source in made}


@TRANSPORTS
def test_an_offset_beyond_the_end_is_refused_with_the_range(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, transport: Transport
) -> None:
    sent = protomq_producer.send(protomq_topic, b"x")
    address = address_of(protomq_server, transport)
    with PullConsumer("beyond", namesrv=address, transport=transport) as source:
        with pytest.raises(OffsetOutOfRangeError, match="from 0 to 1") as caught:
            source.commit({sent.queue: 2})
        assert (caught.value.metadata["min_offset"], caught.value.metadata["end_offset"]) == ("0", "1")
        assert caught.value.definite
        assert not caught.value.retriable
        with pytest.raises(OffsetOutOfRangeError):
            source.commit({sent.queue: -1})
        assert source.committed(sent.queue) is None
        source.commit({sent.queue: 1})
        assert source.committed(sent.queue) == 1
