"""Producers against a real broker, with a proxy that makes faults in between: whatever happens, each message is stored once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Literal

import pytest

from protomq import (
    Admin,
    AsyncProducer,
    Message,
    MessageQueue,
    OutgoingMessage,
    Permission,
    Producer,
    PullConsumer,
    SendStatus,
    SimpleConsumer,
    _methods,
)
from protomq._transport import SyncTransport
from protomq._transport_options import TransportOptions
from protomq._types import BrokerAddress
from protomq.calls import ONCE, Calls
from protomq.errors import (
    ConnectFailedError,
    NotPermittedError,
    ProducerIdTakenError,
    ProtomqError,
    RequestTimeoutError,
)
from protomq.testing import Broker, FaultProxy
from protomq.v1.pull_service_pb2 import PullRequest, PullResponse


def read_all(namesrv: str, topic: str, queues: int = 8) -> list[Message]:
    """Everything that is stored in a topic."""
    with PullConsumer(namesrv=namesrv, begin="earliest") as consumer:
        consumer.assign(
            [
                MessageQueue(topic, name, i)
                for name in broker_names(namesrv, topic)
                for i in range(queues)
            ]
        )
        ends = {queue: consumer.end_offset(queue) for queue in consumer.assignment()}
        messages: list[Message] = []
        while any(consumer.position(queue) < end for queue, end in ends.items()):
            messages.extend(consumer.poll(0.2))
        return messages


def broker_names(namesrv: str, topic: str) -> list[str]:
    with Producer(namesrv=namesrv) as producer:
        return list(producer.transports(topic))


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_what_the_permission_of_a_topic_forbids_is_one_error(protomq_server: Broker, transport: Literal["remoting", "grpc"]) -> None:
    namesrv = protomq_server.namesrv
    with Admin(namesrv=namesrv) as admin:
        (broker_name,) = admin.create_topic("may-not-be-written", permission=Permission.READ, update=True)
        admin.create_topic("may-not-be-read", permission=Permission.WRITE, update=True)

    async def send_by_coroutine() -> None:
        async with AsyncProducer(namesrv=namesrv, transport=transport) as producer:
            await producer.request("may-not-be-written", b"x")

    with (
        Producer(namesrv=namesrv, transport=transport) as producer,
        SimpleConsumer("g", namesrv=namesrv, transport=transport) as consumer,
        Calls(namesrv=namesrv, transport=transport, retries=ONCE) as calls,
    ):
        forbidden: dict[str, Callable[[], object]] = {
            "send": lambda: producer.send("may-not-be-written", b"x"),
            "by key": lambda: producer.send("may-not-be-written", b"x", sharding_key="k"),
            "to a queue": lambda: producer.send("may-not-be-written", b"x", queue=MessageQueue("may-not-be-written", broker_name, 0)),
            "batch": lambda: producer.send_batch("may-not-be-written", [b"x", b"y"]),
            "request": lambda: producer.request("may-not-be-written", b"x"),
            "coroutine": lambda: asyncio.run(send_by_coroutine()),
            "receive": lambda: consumer.receive("may-not-be-read"),
            "pull": lambda: calls.pull(MessageQueue("may-not-be-read", broker_name, 0), 0),
        }
        for name, call in forbidden.items():
            with pytest.raises(NotPermittedError) as refused:
                call()
            did = "read" if name in ("receive", "pull") else "written"
            assert str(refused.value) == f"topic 'may-not-be-{did}' may not be {did}: its permission was taken away; ask the operator", name
            assert (refused.value.reason, refused.value.code, refused.value.definite) == ("NOT_PERMITTED", 7, True), name


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[Broker, FaultProxy]]:
    """A broker that advertises the proxy as its remoting port."""
    with FaultProxy(seed=1) as proxy, Broker(environment=proxy.advertised()) as broker:
        proxy.target = broker.remoting_address
        yield broker, proxy
        proxy.heal()


@pytest.fixture
def broker_and_proxy(proxied: tuple[Broker, FaultProxy]) -> Iterator[tuple[Broker, FaultProxy]]:
    yield proxied
    proxied[1].heal()
    proxied[1].on_answer(None)


def lose_next_answer(proxy: FaultProxy) -> None:
    """The next answer is lost on the way and the connection with it; then all is well again."""

    def cut(_: bytes) -> None:
        proxy.on_answer(None)
        proxy.cut()

    proxy.on_answer(cut)


def address(broker: Broker, transport: str) -> str:
    """Of the name server, for clients that may use one transport only."""
    return broker.remoting_address if transport == "remoting" else broker.grpc_address


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_message_arrives_as_it_was_sent(
    protomq_server: Broker, protomq_topic: str, transport: str
) -> None:
    with Producer(namesrv=address(protomq_server, transport), transport=transport) as producer:  # type: ignore[arg-type]
        result = producer.send(
            protomq_topic,
            b"body",
            key="k1",
            keys=["k2"],
            tag="red",
            properties={"a": "1"},
            sharding_key="s",
        )
        assert set(producer.transports(protomq_topic).values()) == {transport}
    [message] = read_all(protomq_server.namesrv, protomq_topic)
    assert (message.body, message.key, message.tag, dict(message.properties)) == (
        b"body",
        "k1",
        "red",
        {"a": "1"},
    )
    assert (message.queue_offset, message.message_id) == (result.queue_offset, result.message_id)


@pytest.mark.parametrize("codec", ["zstd", "lz4", "zlib"])
def test_a_compressed_body_arrives_as_it_was(
    protomq_server: Broker, protomq_topic: str, codec: str
) -> None:
    body = os.urandom(64) * 4096
    with Producer(namesrv=protomq_server.namesrv, compression=codec) as producer:  # type: ignore[arg-type]
        producer.send(protomq_topic, body)
    assert [message.body for message in read_all(protomq_server.namesrv, protomq_topic)] == [body]


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_client_without_codecs_asks_for_plain_bodies(
    protomq_server: Broker, protomq_topic: str, transport: str
) -> None:
    body = b"text " * 400_000  # 2 MB: two do not fit into one answer.
    (name,) = broker_names(protomq_server.namesrv, protomq_topic)
    queue = MessageQueue(protomq_topic, name, 0)
    for codec in ("zstd", "lz4", "zlib", "none"):
        with Producer(namesrv=protomq_server.namesrv, compression=codec) as producer:
            producer.send(protomq_topic, body, key="k", tag="t", queue=queue)
    with SyncTransport(TransportOptions(transport=transport)) as client:  # type: ignore[arg-type]
        server = BrokerAddress("", protomq_server.grpc_address, protomq_server.remoting_address)

        def pull(queue_offset: int) -> PullResponse:
            request = PullRequest(
                topic=protomq_topic, queue_offset=queue_offset, plain_bodies=True
            ).SerializeToString()
            return PullResponse.FromString(client.call(server, _methods.PULL, (request,), 30.0))

        at = 0
        for expected in range(4):
            answer = pull(at)
            assert answer.end_offset == 4
            (record,) = answer.records
            assert (record.body, record.flags, list(record.keys)) == (body, 0, ["k"])
            assert record.queue_offset == answer.first_offset == expected
            at = answer.next_offset
        assert at == 4


def test_batches_one_way_and_sharding(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    results = protomq_producer.send_batch(protomq_topic, [b"%d" % i for i in range(1000)])
    assert [result.queue_offset for result in results] == list(range(1000))
    messages = [
        OutgoingMessage(protomq_topic, b"s%d" % i, sharding_key=f"key-{i % 5}") for i in range(100)
    ]
    sharded = protomq_producer.send_batch(protomq_topic, messages)
    protomq_producer.send_one_way(protomq_topic, b"one way")
    protomq_producer.send(protomq_topic, b"last")
    stored = read_all(protomq_server.namesrv, protomq_topic)
    assert Counter(m.body for m in stored) == Counter(
        [b"%d" % i for i in range(1000)] + [b"s%d" % i for i in range(100)] + [b"one way", b"last"]
    )
    by_place = {(m.queue.queue_id, m.queue_offset): m for m in stored}
    for message, result in zip(messages, sharded, strict=True):
        assert by_place[result.queue.queue_id, result.queue_offset].body == message.body
        assert by_place[result.queue.queue_id, result.queue_offset].message_id == result.message_id


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_64_threads_store_every_message_once(
    protomq_server: Broker, protomq_topic: str, transport: str
) -> None:
    results: list[tuple[bytes, MessageQueue, int]] = []
    errors: list[BaseException] = []

    def run(producer: Producer, number: int) -> None:
        try:
            for i in range(20):
                body = b"%d-%d" % (number, i)
                result = producer.send(
                    protomq_topic, body, sharding_key=f"{number}" if number % 2 else None
                )
                results.append((body, result.queue, result.queue_offset))
        except BaseException as error:
            errors.append(error)

    with Producer(namesrv=address(protomq_server, transport), transport=transport) as producer:  # type: ignore[arg-type]
        threads = [threading.Thread(target=run, args=(producer, number)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    stored = {
        (m.queue, m.queue_offset): bytes(m.body)
        for m in read_all(protomq_server.namesrv, protomq_topic)
    }
    assert len(stored) == 64 * 20
    assert stored == {(queue, offset): body for body, queue, offset in results}


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
async def test_64_coroutines_store_every_message_once(
    protomq_server: Broker, protomq_topic: str, transport: str
) -> None:
    results: dict[tuple[MessageQueue, int], bytes] = {}

    async def run(producer: AsyncProducer, number: int) -> None:
        for i in range(20):
            result = await producer.send(protomq_topic, b"%d-%d" % (number, i), tag="t")
            results[result.queue, result.queue_offset] = b"%d-%d" % (number, i)

    async with AsyncProducer(namesrv=address(protomq_server, transport), transport=transport) as producer:  # type: ignore[arg-type]
        await asyncio.gather(*(run(producer, number) for number in range(64)))
        batch = await producer.send_batch(protomq_topic, [b"batch"] * 10)
        assert {result.status for result in batch} == {SendStatus.SEND_OK}
    stored = await asyncio.to_thread(read_all, protomq_server.namesrv, protomq_topic)
    assert len(stored) == 64 * 20 + 10
    assert {
        (m.queue, m.queue_offset): bytes(m.body) for m in stored if m.body != b"batch"
    } == results


def test_a_send_whose_answer_is_lost_is_stored_once(
    broker_and_proxy: tuple[Broker, FaultProxy],
) -> None:
    broker, proxy = broker_and_proxy
    with Producer(namesrv=broker.remoting_address, transport="remoting") as producer:
        producer.send("lost-answer", b"before")
        # The answer is lost on the way, then the line works again: the broker has the message, the producer does not know.
        lose_next_answer(proxy)
        result = producer.send("lost-answer", b"once", key="k")
        assert result.repeated_send
        producer.send("lost-answer", b"after")
    assert sorted(m.body for m in read_all(broker.namesrv, "lost-answer")) == [
        b"after",
        b"before",
        b"once",
    ]


def test_of_two_producers_with_one_id_each_is_told_what_is_not_stored(
    broker_and_proxy: tuple[Broker, FaultProxy],
) -> None:
    broker, _ = broker_and_proxy
    stored: list[bytes] = []
    with (
        Producer(namesrv=broker.namesrv, producer_id=4711) as one,
        Producer(namesrv=broker.namesrv, producer_id=4711) as other,
    ):
        for producer, bodies in ((one, [b"1", b"2"]), (other, [b"3", b"4", b"5"]), (one, [b"6", b"7"])):
            for body in bodies:
                with suppress(ProducerIdTakenError):
                    producer.send("one-id", body)
                    stored.append(body)
    assert stored == [b"1", b"2", b"5", b"7"]
    assert sorted(m.body for m in read_all(broker.namesrv, "one-id")) == stored


def test_a_swallowed_answer_ends_in_a_time_out_and_the_retry_is_stored_once(
    broker_and_proxy: tuple[Broker, FaultProxy],
) -> None:
    broker, proxy = broker_and_proxy
    with Producer(namesrv=broker.remoting_address, transport="remoting") as producer:
        producer.send("swallowed", b"before")
        proxy.set(drop_answers=True)
        timer = threading.Timer(0.3, proxy.heal)
        timer.start()
        result = producer.send("swallowed", b"once", timeout_s=3.0)
        timer.join()
        assert result.repeated_send
        proxy.set(drop_answers=True)
        with pytest.raises(ProtomqError) as caught:
            producer.send("swallowed", b"unknown", timeout_s=0.2)
        assert isinstance(caught.value, RequestTimeoutError)
        assert not caught.value.definite
    proxy.heal()
    assert sorted(m.body for m in read_all(broker.namesrv, "swallowed")) == [
        b"before",
        b"once",
        b"unknown",
    ]


def test_a_connection_that_has_gone_silent_is_replaced(
    broker_and_proxy: tuple[Broker, FaultProxy],
) -> None:
    broker, proxy = broker_and_proxy
    with Producer(namesrv=broker.remoting_address, transport="remoting") as producer:
        producer.send("silent", b"before")
        proxy.swallow()
        assert not producer.send("silent", b"after").repeated_send
    assert sorted(m.body for m in read_all(broker.namesrv, "silent")) == [b"after", b"before"]


async def test_a_silent_connection_of_coroutines_is_replaced(
    broker_and_proxy: tuple[Broker, FaultProxy],
) -> None:
    broker, proxy = broker_and_proxy
    async with AsyncProducer(namesrv=broker.remoting_address, transport="remoting") as producer:
        await producer.send("async-silent", b"before")
        proxy.swallow()
        results = await asyncio.gather(*(producer.send("async-silent", b"after") for _ in range(3)))
    assert not any(result.repeated_send for result in results)


def test_connections_that_break_at_random_lose_and_repeat_nothing(
    broker_and_proxy: tuple[Broker, FaultProxy],
) -> None:
    broker, proxy = broker_and_proxy
    done: list[bytes] = []
    uncertain: list[bytes] = []
    with Producer(namesrv=broker.remoting_address, transport="remoting", send_timeout_s=10.0) as producer:
        producer.send("random-cuts", b"first")
        proxy.set(cut_probability=0.05)

        def run(number: int) -> None:
            for i in range(40):
                body = b"%d-%d" % (number, i)
                try:
                    producer.send("random-cuts", body)
                    done.append(body)
                except ProtomqError as error:
                    if not error.definite:
                        uncertain.append(body)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    proxy.heal()
    stored = Counter(bytes(m.body) for m in read_all(broker.namesrv, "random-cuts"))
    assert max(stored.values()) == 1
    assert set(done) <= stored.keys() <= {*done, *uncertain, b"first"}
    assert len(done) > 300


async def test_a_coroutine_whose_answer_is_lost_is_stored_once(
    broker_and_proxy: tuple[Broker, FaultProxy],
) -> None:
    broker, proxy = broker_and_proxy
    async with AsyncProducer(namesrv=broker.remoting_address, transport="remoting") as producer:
        await producer.send("async-lost", b"before")
        lose_next_answer(proxy)
        results = await asyncio.gather(
            *(producer.send("async-lost", b"%02d" % i) for i in range(40))
        )
    assert any(result.repeated_send for result in results)
    stored = await asyncio.to_thread(read_all, broker.namesrv, "async-lost")
    assert sorted(bytes(m.body) for m in stored) == sorted(
        [b"before", *(b"%02d" % i for i in range(40))]
    )


def test_a_broker_that_restarts_is_waited_for() -> None:
    with Broker() as broker, Producer(namesrv=broker.namesrv, send_timeout_s=20.0) as producer:
        producer.send("restart", b"before")
        broker.kill()
        restarting = threading.Thread(target=broker.start)
        restarting.start()
        producer.send("restart", b"during")
        restarting.join()
        producer.send("restart", b"after")
        assert sorted(m.body for m in read_all(broker.namesrv, "restart")) == [
            b"after",
            b"before",
            b"during",
        ]
        broker.stop()
        with pytest.raises(ConnectFailedError):
            producer.send("restart", b"too late", timeout_s=0.3)


@pytest.mark.filterwarnings(
    "ignore:This process:DeprecationWarning"
)  # It has threads; the child only sends.
def test_a_forked_child_sends_as_another_producer(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    protomq_producer.send(protomq_topic, b"parent")
    child = os.fork()
    if not child:
        try:
            protomq_producer.send(protomq_topic, b"child")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    protomq_producer.send(protomq_topic, b"parent again")
    stored = read_all(protomq_server.namesrv, protomq_topic)
    assert sorted(m.body for m in stored) == [b"child", b"parent", b"parent again"]
    assert len({m.message_id[:16] for m in stored}) == 2


FORKED = """
import os, sys
from protomq import Producer

namesrv, topic, transport, producer_id, count = sys.argv[1:]
with Producer("forks", namesrv=namesrv, transport=transport, producer_id=int(producer_id), client_id="named") as producer:
    for number in range(10):
        producer.send(topic, b"before %d" % number)
    child = os.fork()
    try:
        for number in range(int(count)):
            producer.send(topic, b"%s %d" % (b"parent" if child else b"child", number))
    except BaseException:
        if not child:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        raise
    if not child:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
"""In a process of its own: a gRPC channel that another test has left in an event loop would keep gRPC from the child."""


@pytest.mark.parametrize(("transport", "producer_id"), [("remoting", 1401), ("grpc", 1402)])
def test_all_that_parent_and_child_send_by_one_forked_producer_is_stored(
    transport: str, producer_id: int, protomq_server: Broker, protomq_topic: str
) -> None:
    """Their sequences count on from the same number: under one id the broker would take those of one for repeats of the other's."""
    count = 1_000
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    command += [protomq_server.namesrv, protomq_topic, transport, str(producer_id), str(count)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    stored = read_all(protomq_server.namesrv, protomq_topic)
    wanted = [b"before %d" % number for number in range(10)]
    wanted += [b"%s %d" % (name, number) for name in (b"parent", b"child") for number in range(count)]
    assert sorted(message.body for message in stored) == sorted(wanted)
    assert len({message.message_id[:16] for message in stored}) == 2
