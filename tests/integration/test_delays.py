"""Delayed messages through a whole broker, over both transports: delivered when they are due, recalled, and there again after a kill."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from protomq import (
    Admin,
    AsyncProducer,
    DelayLevel,
    Message,
    OutgoingMessage,
    Producer,
    PullConsumer,
    PushConsumer,
    Retry,
    SimpleConsumer,
)
from protomq.errors import IllegalDelayError, NoRouteError
from protomq.testing import Broker
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import (
    RecallMessageRequest,
    RecallMessageResponse,
    SendRequest,
    SendResponse,
)
from protomq.v1.send_service_pb2_grpc import SendServiceStub
from protomq.wire.recall_handle import decode_handle, encode_handle
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def few_levels() -> Iterator[Broker]:
    """A broker of two delay levels."""
    with Broker(environment={"PROTOMQ_DELAY_LEVELS": "10ms 300ms", "PROTOMQ_POP_INVISIBLE_MIN_MS": "100"}) as broker:
        yield broker


def bodies(broker: Broker, topic: str, count: int) -> list[bytes]:
    """The first messages of a topic, as they come; waits for so many."""
    found: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_S
    with PullConsumer(namesrv=broker.namesrv) as consumer:
        consumer.subscribe(topic)
        while len(found) < count:
            assert time.monotonic() < deadline, found
            found += [message.body for message in consumer.poll(timeout_s=1.0)]
    return found


def send(stub: Any, topic: str, body: bytes, **fields: Any) -> SendResponse:
    return stub.Send(SendRequest(topic=topic, records=[Record(body=body)], **fields))


def test_delayed_messages_come_when_they_are_due_and_recalled_ones_do_not(
    protomq_server: Broker, protomq_topic: str
) -> None:
    topic = protomq_topic
    with grpc.insecure_channel(protomq_server.grpc_address) as channel:
        stub = SendServiceStub(channel)
        recalled = send(stub, topic, b"recalled", delay_level=2, queue_id=0)
        began_ms = time.time_ns() // 1_000_000
        second = send(stub, topic, b"second", delay_ms=2_000, queue_id=0)
        first = send(stub, topic, b"first", delay_level=1, queue_id=0)
        at_once = send(stub, topic, b"at once", queue_id=0)
        assert (first.queue_offset, second.queue_offset, at_once.queue_offset) == (-1, -1, 0)
        answer: RecallMessageResponse = stub.RecallMessage(
            RecallMessageRequest(topic=topic, recall_handle=recalled.recall_handle)
        )
        assert answer.recalled
        assert bodies(protomq_server, topic, 3) == [b"at once", b"first", b"second"]
        assert time.time_ns() // 1_000_000 - began_ms >= 1_900
        for handle in (recalled.recall_handle, first.recall_handle):
            late = stub.RecallMessage(RecallMessageRequest(topic=topic, recall_handle=handle))
            assert (late.recalled, late.recalled_before) == (False, handle == recalled.recall_handle)
        with pytest.raises(grpc.RpcError) as caught:
            send(stub, topic, b"x", delay_level=19)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_producer_delays_and_recalls(
    protomq_server: Broker, protomq_topic: str, transport: Any
) -> None:
    topic = protomq_topic
    with Producer(namesrv=protomq_server.namesrv, transport=transport) as producer:
        batch = producer.send_batch(topic, [b"batch %d" % at for at in range(5)], delay=3600)
        mixed = producer.send_batch(
            topic,
            [OutgoingMessage(topic, b"hour %d" % at, deliver_at=datetime.now(UTC) + timedelta(hours=at)) for at in (1, 2)],
        )
        for result in (*batch[1:], *mixed):
            assert producer.recall(topic, result.recall_handle), result
            assert not producer.recall(topic, result.recall_handle)
        assert producer.recall(topic, batch[0].recall_handle)
        sent = producer.send(topic, b"soon", delay=timedelta(milliseconds=300))
        assert sent.queue_offset == -1
        with pytest.raises(IllegalDelayError):
            producer.send(topic, b"x", delay=timedelta(days=41))
        elsewhere = decode_handle(sent.recall_handle)._replace(broker_name="another")
        with pytest.raises(NoRouteError):
            producer.recall(topic, encode_handle(elsewhere))
    assert bodies(protomq_server, topic, 1) == [b"soon"]


async def test_coroutines_delay_and_recall(protomq_server: Broker, protomq_topic: str) -> None:
    topic = protomq_topic
    async with AsyncProducer(namesrv=protomq_server.namesrv) as producer:
        results = await asyncio.gather(*(producer.send(topic, b"%d" % at, delay=3600) for at in range(20)))
        recalled = await asyncio.gather(*(producer.recall(topic, one.recall_handle) for one in results))
        assert recalled == [True] * 20
        assert not await producer.recall(topic, results[7].recall_handle)


def test_a_broker_that_is_killed_delivers_what_was_pending_once(tmp_path: Any) -> None:
    count = 300
    with Broker(data_dir=tmp_path) as broker:
        with grpc.insecure_channel(broker.grpc_address) as channel:
            stub = SendServiceStub(channel)
            for at in range(count):
                send(stub, "later", b"%d" % at, delay_ms=100 + 10 * at, queue_id=0)
        assert bodies(broker, "later", 1)
        broker.kill()
        broker.restart()
        found = bodies(broker, "later", count)
        assert sorted(map(int, found)) == list(range(count))


def test_what_a_broker_refuses_of_one_way_messages_is_in_the_log_over_grpc(
    protomq_server: Broker, protomq_topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def send_some() -> None:
        async with AsyncProducer(namesrv=protomq_server.namesrv, transport="grpc") as producer:
            for _ in range(3):
                await producer.send_one_way(protomq_topic, b"x", delay=DelayLevel(99))

    async def is_cut_off() -> None:
        async with AsyncProducer(namesrv=protomq_server.namesrv, transport="grpc") as producer:
            await producer.send_one_way(protomq_topic, b"x")
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()  # As the end of a loop does.

    def told() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if "one-way" in record.getMessage()]
        caplog.clear()
        return texts

    with Producer(namesrv=protomq_server.namesrv, transport="grpc") as producer:
        for _ in range(3):
            producer.send_one_way(protomq_topic, b"x", delay=DelayLevel(99))
    texts_of_threads = told()
    asyncio.run(send_some())
    for texts in (texts_of_threads, told()):
        assert [text.split(" ")[0] for text in texts] == ["a", "2"]
        assert "level" in texts[0]
    asyncio.run(is_cut_off())
    assert ["event loop ended" in text for text in told()] == [True]


@pytest.mark.parametrize("kind", ["push", "batches", "pop"])
@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_result_with_a_level_beyond_the_last_counts_as_the_last_and_a_call_with_it_is_refused(
    few_levels: Broker, kind: str, transport: Any
) -> None:
    namesrv = few_levels.remoting_address if transport == "remoting" else few_levels.grpc_address
    topic, group = f"{kind}-{transport}", f"g-{kind}-{transport}"
    delivered: SimpleQueue[tuple[bytes, int, str]] = SimpleQueue()

    def fail_once(message: Message) -> Retry | None:
        delivered.put((message.body, message.attempt, message.last_error))
        return None if message.attempt else Retry(delay=DelayLevel(99), error="once")

    with Admin(namesrv=few_levels.namesrv) as admin:
        admin.create_topic(topic, write_queues=1, read_queues=1)
        admin.set_group(group, retry_delays_ms=[3_600_000])
    with Producer(namesrv=few_levels.namesrv) as producer:
        producer.send_batch(topic, [b"0", b"1", b"2"])
    with ExitStack() as stack:
        if kind == "pop":
            simple = stack.enter_context(SimpleConsumer(group, namesrv=namesrv, transport=transport))
            thread = threading.Thread(target=simple.handle, args=(topic, fail_once))
            thread.start()
            stack.callback(thread.join)
            stack.callback(simple.request_stop)
        else:
            consumer = PushConsumer(group, namesrv=namesrv, transport=transport)
            if kind == "batches":
                consumer.subscribe(topic, lambda batch: [fail_once(message) for message in batch], batch_size=3)
            else:
                consumer.subscribe(topic, fail_once)
            stack.enter_context(consumer)
        found = sorted(delivered.get(timeout=PATIENCE_S) for _ in range(6))
    said = "" if kind == "pop" else "once"
    assert found == [(body, attempt, said if attempt else "") for body in (b"0", b"1", b"2") for attempt in (0, 1)]
    with PullConsumer(f"pulls-{group}", namesrv=namesrv, transport=transport) as puller:
        puller.subscribe(topic)
        with pytest.raises(IllegalDelayError, match="levels are 1 to 2"):
            puller.send_back(puller.poll(PATIENCE_S), delay=DelayLevel(3))
    with Producer(namesrv=namesrv, transport=transport) as producer, pytest.raises(IllegalDelayError, match="levels are 1 to 2"):
        producer.send(topic, b"x", delay=DelayLevel(3))
