"""AsyncProducer: coroutines share requests, retries store once, nothing waits for ever. A cluster in memory, no sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from protomq import AsyncProducer, MessageQueue, OutgoingMessage, SendStatus
from protomq._routes import INVALIDATE_INTERVAL_S
from protomq.errors import (
    BatchIncompleteError,
    ClosedError,
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    InvalidArgumentError,
    NoRouteError,
    QueueNotFoundError,
    RequestTimeoutError,
    ShuttingDownError,
    TopicNotFoundError,
)
from protomq.wire.hashing import sharded_index
from protomq.wire.recall_handle import RecallHandle, encode_handle
from protomq.wire.record import decode_message_id
from tests.support.eager_tasks import eager_task_factory
from tests.support.fake_cluster import FakeAsyncTransport, FakeCluster, after_storing

QUEUE = MessageQueue("T", "a", 1)
HANDLE = encode_handle(RecallHandle("a", 1, 2, (7, 1, 0)))


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def transport(cluster: FakeCluster) -> FakeAsyncTransport:
    return FakeAsyncTransport(cluster)


@pytest.fixture
async def producer(transport: FakeAsyncTransport) -> AsyncIterator[AsyncProducer]:
    async with AsyncProducer(transport=transport) as producer:
        yield producer


async def turns(count: int = 5) -> None:
    """Lets the loop turn a few times: everything that can happen by now has happened."""
    for _ in range(count):
        await asyncio.sleep(0)


class Gate:
    """Holds requests back until it is opened."""

    def __init__(self, transport: FakeAsyncTransport) -> None:
        self.waiting = 0
        self.open = asyncio.Event()
        transport.gate = self.wait

    async def wait(self) -> None:
        self.waiting += 1
        await self.open.wait()


async def test_a_result_says_where_the_message_is(
    cluster: FakeCluster, producer: AsyncProducer
) -> None:
    await producer.send("T", b"one", queue=QUEUE)
    result = await producer.send("T", b"two", queue=QUEUE, key="k", tag="t", properties={"p": "v"})
    assert (result.status, result.queue, result.queue_offset) == (SendStatus.SEND_OK, QUEUE, 1)
    assert decode_message_id(result.message_id) == (producer.producer_id, 0, 1)
    record = cluster.calls[1].request.records[0]
    assert (list(record.keys), record.tag, dict(record.properties)) == (["k"], "t", {"p": "v"})


async def test_coroutines_of_one_turn_share_a_request(
    cluster: FakeCluster, producer: AsyncProducer
) -> None:
    results = await asyncio.gather(
        *(producer.send("T", b"%02d" % i, queue=QUEUE) for i in range(64))
    )
    assert [len(call.request.records) for call in cluster.calls] == [64]
    assert [result.queue_offset for result in results] == list(range(64))
    assert cluster.stored() == {("a", 1): [b"%02d" % i for i in range(64)]}


async def test_messages_that_gather_while_the_line_is_busy_travel_together(
    cluster: FakeCluster, transport: FakeAsyncTransport, producer: AsyncProducer
) -> None:
    gate = Gate(transport)
    tasks = [asyncio.create_task(producer.send("T", b"first", queue=QUEUE))]
    await turns()
    tasks += [asyncio.create_task(producer.send("T", b"%02d" % i, queue=QUEUE)) for i in range(20)]
    await turns()
    assert gate.waiting == 1
    gate.open.set()
    assert [result.queue_offset for result in await asyncio.gather(*tasks)] == list(range(21))
    assert [len(call.request.records) for call in cluster.calls] == [1, 20]


async def test_messages_for_any_queue_are_all_stored_once(
    cluster: FakeCluster, producer: AsyncProducer
) -> None:
    for _ in range(2):
        cluster.script("a", after_storing(ConnectionLostError("cut")), ConnectFailedError("down"))

    async def run(number: int) -> None:
        for i in range(30):
            await producer.send("T", b"%d-%d" % (number, i))

    await asyncio.gather(*(run(number) for number in range(40)))
    assert cluster.bodies() == sorted(
        b"%d-%d" % (number, i) for number in range(40) for i in range(30)
    )
    queues = {call.request.queue_id for call in cluster.calls}
    assert queues == {0, 1, 2, 3}


async def test_a_send_between_the_end_of_a_request_and_the_next_turn_is_not_forgotten(
    producer: AsyncProducer,
) -> None:
    async def run() -> list[int]:
        return [(await producer.send("T", b"x", queue=QUEUE)).queue_offset for _ in range(50)]

    async with asyncio.timeout(60):
        first, second = await asyncio.gather(run(), run())
    assert sorted([*first, *second]) == list(range(100))


@pytest.mark.parametrize("answers_at_once", [False, True])
async def test_tasks_that_begin_at_once_send_every_message(
    cluster: FakeCluster, transport: FakeAsyncTransport, producer: AsyncProducer, answers_at_once: bool
) -> None:
    if not answers_at_once:
        transport.gate = turns
    asyncio.get_running_loop().set_task_factory(eager_task_factory)
    for i in range(3):
        result = await producer.send("T", b"%d" % i, queue=QUEUE, timeout_s=1.0)
        assert result.queue_offset == i
    results = await asyncio.gather(*(producer.send("T", b"more", queue=QUEUE, timeout_s=1.0) for _ in range(9)))
    assert [result.queue_offset for result in results] == list(range(3, 12))


async def test_sharding_keys_selectors_and_messages(producer: AsyncProducer) -> None:
    assert (await producer.send("T", b"x", sharding_key="k")).queue.queue_id == sharded_index(
        "k", 4
    )
    assert (
        await producer.send("T", b"x", selector=lambda queues, message: queues[3])
    ).queue.queue_id == 3
    assert (await producer.send(OutgoingMessage("T", b"x", queue=QUEUE))).queue == QUEUE


async def test_a_lost_answer_is_asked_for_again_and_stored_once(
    cluster: FakeCluster, producer: AsyncProducer
) -> None:
    cluster.script("a", after_storing(RequestTimeoutError("lost")))
    result = await producer.send("T", b"once")
    assert result.repeated_send
    assert cluster.bodies() == [b"once"]
    assert len({call.payload for call in cluster.calls}) == 1


async def test_a_broker_that_refuses_is_left_for_another() -> None:
    cluster = FakeCluster({"T": {"a": 2, "b": 2}})
    cluster.script("a", *[ShuttingDownError("bye")] * 9)
    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as producer:
        assert {(await producer.send("T", b"x")).queue.broker_name for _ in range(8)} == {"b"}


async def test_a_shrunk_topic_is_looked_up_again(
    cluster: FakeCluster, producer: AsyncProducer
) -> None:
    key = next(f"k{i}" for i in range(100) if sharded_index(f"k{i}", 4) == 3)
    await producer.send("T", b"x", sharding_key=key)
    cluster.topics["T"]["a"] = 2
    cluster.script("a", *[QueueNotFoundError("no queue 3")] * 3)
    assert (await producer.send("T", b"y", sharding_key=key)).queue.queue_id == sharded_index(
        key, 2
    )


async def test_of_a_queue_that_went_before_the_answer_no_other_one_gets_the_message_too(
    cluster: FakeCluster, producer: AsyncProducer
) -> None:
    cluster.script("a", after_storing(ConnectionLostError("gone")), *[QueueNotFoundError("no queue")] * 3)
    with pytest.raises(QueueNotFoundError) as raised:
        await producer.send("T", b"x", sharding_key="k", timeout_s=5)
    assert not raised.value.definite
    assert cluster.bodies() == [b"x"]
    assert len({call.request.records[0].sequence for call in cluster.calls}) == 1


async def test_a_chosen_queue_is_looked_up_at_once_when_its_broker_is_back() -> None:
    cluster = FakeCluster({"T": {"a": 2, "b": 2}})
    cluster.away = {"b"}
    async with AsyncProducer(transport=FakeAsyncTransport(cluster), retries=0) as producer:
        await producer.send("T", b"the route without b is known now, and trusted for 30 s")
        with pytest.raises(NoRouteError, match="'b'"):
            await producer.send("T", b"x", queue=MessageQueue("T", "b", 1))
        for entry in producer._routes._cache._entries.values():
            entry.fetched_at_s -= INVALIDATE_INTERVAL_S
        cluster.away = set()
        queue = MessageQueue("T", "b", 1)
        assert (await producer.send("T", b"x", queue=queue)).queue_offset == 0
        assert (await producer.send_batch("T", [b"y"], queue=queue))[0].queue_offset == 1
        await producer.send_one_way("T", b"z", queue=queue)
    assert cluster.stored()["b", 1] == [b"x", b"y", b"z"]


async def test_a_send_to_a_chosen_queue_waits_for_its_broker() -> None:
    cluster = FakeCluster({"T": {"a": 2, "b": 2}})
    cluster.away = {"b"}
    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as producer:
        await producer.send("T", b"the route without b is known now")
        asyncio.get_running_loop().call_later(0.3, cluster.away.clear)
        result = await producer.send("T", b"x", queue=MessageQueue("T", "b", 1), timeout_s=30)
        assert result.queue_offset == 0


async def test_an_error_reaches_every_caller_of_the_request(
    cluster: FakeCluster, producer: AsyncProducer
) -> None:
    cluster.script("a", InvalidArgumentError("no"))
    outcomes = await asyncio.gather(
        *(producer.send("T", b"x", queue=QUEUE) for _ in range(5)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [InvalidArgumentError] * 5
    assert len({id(outcome) for outcome in outcomes}) == 5, "callers write into each other's traceback"
    with pytest.raises(TopicNotFoundError):
        await producer.send("unknown", b"x")


async def test_waiting_in_line_ends_with_the_time_out_and_is_definite(
    cluster: FakeCluster, transport: FakeAsyncTransport, producer: AsyncProducer
) -> None:
    gate = Gate(transport)
    first = asyncio.create_task(producer.send("T", b"first", queue=QUEUE))
    await turns()
    with pytest.raises(RequestTimeoutError) as caught:
        await producer.send("T", b"second", queue=QUEUE, timeout_s=0.01)
    assert caught.value.definite
    gate.open.set()
    await first
    await turns()
    assert cluster.bodies() == [b"first"]


async def test_of_what_has_gathered_what_is_late_and_whose_caller_has_gone_are_not_sent(
    cluster: FakeCluster, transport: FakeAsyncTransport, producer: AsyncProducer
) -> None:
    gate = Gate(transport)
    first = asyncio.create_task(producer.send("T", b"first", queue=QUEUE))
    await turns()
    line, now_s = producer._line("T", QUEUE, None), time.monotonic()
    late, gone, live = (
        producer._enqueue(line, producer._core.prepare(body), now_s + left_s).future
        for body, left_s in ((b"late", 0.0), (b"gone", 0.3), (b"live", 60.0))
    )
    gone.cancel()
    gate.open.set()
    await asyncio.gather(first, live)
    with pytest.raises(RequestTimeoutError, match="still waiting in line") as caught:
        await late
    assert caught.value.definite
    assert cluster.bodies() == [b"first", b"live"]
    assert producer._pending_size == 0


async def test_a_time_out_on_the_way_is_not_definite(
    transport: FakeAsyncTransport, producer: AsyncProducer
) -> None:
    await producer.send("T", b"looks the route up")
    gate = Gate(transport)
    with pytest.raises(RequestTimeoutError) as caught:
        await producer.send("T", b"x", timeout_s=0.3)  # Long enough to be on its way by then.
    assert not caught.value.definite
    gate.open.set()


async def test_a_cancelled_send_that_still_waits_is_not_sent(
    cluster: FakeCluster, transport: FakeAsyncTransport, producer: AsyncProducer
) -> None:
    gate = Gate(transport)
    tasks = [asyncio.create_task(producer.send("T", body, queue=QUEUE)) for body in (b"first",)]
    await turns()
    tasks += [
        asyncio.create_task(producer.send("T", body, queue=QUEUE)) for body in (b"second", b"third")
    ]
    await turns()
    tasks[1].cancel()
    gate.open.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert cluster.bodies() == [b"first", b"third"]


async def test_more_than_may_be_on_its_way_waits_for_room(
    cluster: FakeCluster, transport: FakeAsyncTransport
) -> None:
    gate = Gate(transport)
    async with AsyncProducer(transport=transport, pending_size_max_bytes=1000) as producer:
        tasks = [asyncio.create_task(producer.send("T", bytes(400))) for _ in range(10)]
        await turns()
        assert producer._pending_size <= 1400
        gate.open.set()
        results = await asyncio.gather(*tasks)
    assert len(results) == len(cluster.bodies()) == 10
    assert producer._pending_size == 0


async def test_the_room_of_a_message_whose_line_was_dropped_while_it_waited_is_given_back(
    transport: FakeAsyncTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of delays that nothing waits in make room for others."""
    monkeypatch.setattr("protomq._async_send_lines.LINES_MAX", 3)
    gate = Gate(transport)
    async with AsyncProducer(transport=transport, pending_size_max_bytes=1000, compression="none") as producer:
        tasks = [asyncio.create_task(producer.send("T", bytes(1100), delay=delay_s)) for delay_s in range(1, 7)]
        await turns()
        gate.open.set()
        await asyncio.gather(*tasks)
        assert producer._pending_size == 0


async def test_one_way_asks_for_no_answer(cluster: FakeCluster, producer: AsyncProducer) -> None:
    await producer.send_one_way("T", b"x", key="k")
    assert cluster.calls[0].one_way


async def test_a_batch_is_one_request_unless_it_must_be_split(
    cluster: FakeCluster, transport: FakeAsyncTransport
) -> None:
    async with AsyncProducer(transport=transport, batch_size_max_bytes=5000) as producer:
        assert [
            r.queue_offset for r in await producer.send_batch("T", [b"a", b"b"], queue=QUEUE)
        ] == [0, 1]
        result = await producer.send_batch("T", [bytes(1000)] * 10, queue=QUEUE)
    assert [r.queue_offset for r in result] == list(range(2, 12))
    assert [len(call.request.records) for call in cluster.calls] == [2, 4, 4, 2]


async def test_messages_of_a_batch_go_to_the_queue_of_their_sharding_key(
    cluster: FakeCluster, producer: AsyncProducer
) -> None:
    messages = [OutgoingMessage("T", b"%d" % i, sharding_key=f"key-{i % 7}") for i in range(50)]
    for message, stored in zip(messages, await producer.send_batch("T", messages), strict=True):
        assert (
            cluster.brokers["a"].queues["T", stored.queue.queue_id][stored.queue_offset].body
            == message.body
        )


async def test_a_batch_that_fails_half_way_says_what_is_stored(
    cluster: FakeCluster, transport: FakeAsyncTransport
) -> None:
    async with AsyncProducer(transport=transport, batch_size_max_bytes=3000) as producer:
        cluster.on_send = lambda call: (
            cluster.script("a", InvalidArgumentError("no")) if len(cluster.calls) == 1 else None
        )
        with pytest.raises(BatchIncompleteError) as caught:
            await producer.send_batch("T", [bytes(1000)] * 5)
        assert [stored.count for stored in caught.value.stored] == [2]
        with pytest.raises(ConfigurationError):
            await producer.send_batch("T", [b"a"], keys=["k", "l"])
    cluster.on_send = None


async def test_close_waits_for_what_is_on_its_way(transport: FakeAsyncTransport) -> None:
    gate = Gate(transport)
    producer = AsyncProducer(transport=transport)
    tasks = [asyncio.create_task(producer.send("T", b"x")) for _ in range(3)]
    await turns()
    closing = asyncio.create_task(producer.close())
    await turns()
    gate.open.set()
    await closing
    assert [(await task).status for task in tasks] == [SendStatus.SEND_OK] * 3
    with pytest.raises(ClosedError):
        await producer.send("T", b"x")


class HeldTransport(FakeAsyncTransport):
    """Holds all calls, also those to name servers, until it is opened."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.open = asyncio.Event()

    async def call(self, *args: Any, **settings: Any) -> bytes:
        await self.open.wait()
        return await super().call(*args, **settings)


# Those of which no line knows, while they look for their route at least.
CALLS_OUTSIDE_OF_LINES: dict[str, Callable[[AsyncProducer], Coroutine[Any, Any, object]]] = {
    "batch": lambda producer: producer.send_batch("T", [b"x", b"y"]),
    "one way": lambda producer: producer.send_one_way("T", b"x"),
    "sharding key": lambda producer: producer.send("T", b"x", sharding_key="k"),
    "selector": lambda producer: producer.send("T", b"x", selector=lambda queues, _: queues[0]),
    "recall": lambda producer: producer.recall("T", HANDLE),
}


@pytest.mark.parametrize("call", CALLS_OUTSIDE_OF_LINES.values(), ids=CALLS_OUTSIDE_OF_LINES)
async def test_close_waits_for_calls_of_other_tasks(
    cluster: FakeCluster, call: Callable[[AsyncProducer], Coroutine[Any, Any, object]]
) -> None:
    transport = HeldTransport(cluster)
    producer = AsyncProducer(transport=transport)
    calling = asyncio.create_task(call(producer))
    await turns()
    closing = asyncio.create_task(producer.close())
    await turns(20)
    assert not closing.done(), "it waits"
    transport.open.set()
    await calling
    await closing


async def test_close_waits_for_a_message_that_waits_for_room(cluster: FakeCluster) -> None:
    transport = HeldTransport(cluster)
    producer = AsyncProducer(transport=transport, pending_size_max_bytes=1000, compression="none")
    sending = [asyncio.create_task(producer.send("T", bytes(900), queue=MessageQueue("T", "a", number))) for number in range(4)]
    await turns()
    closing = asyncio.create_task(producer.close())
    await turns()
    transport.open.set()
    assert [(await task).status for task in sending] == [SendStatus.SEND_OK] * 4
    await closing


async def test_what_is_not_done_in_time_when_a_producer_is_closed_ends_with_closed_error(cluster: FakeCluster) -> None:
    transport = HeldTransport(cluster)
    producer = AsyncProducer(transport=transport)
    calling = [asyncio.create_task(call(producer)) for call in CALLS_OUTSIDE_OF_LINES.values()]
    await turns()
    await producer.close(timeout_s=0.01)
    outcomes = await asyncio.gather(*calling, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ClosedError] * len(calling)


async def test_a_close_that_is_cancelled_goes_on_and_a_second_one_waits_for_it(transport: FakeAsyncTransport) -> None:
    gate = Gate(transport)
    producer = AsyncProducer(transport=transport)
    sending = asyncio.create_task(producer.send("T", b"x"))
    await turns()
    first = asyncio.create_task(producer.close())
    await turns()
    while not first.done():
        first.cancel()
        await asyncio.sleep(0)
    second = asyncio.create_task(producer.close())
    await turns()
    assert not second.done()
    gate.open.set()
    await second
    assert (await sending).status == SendStatus.SEND_OK


async def test_close_fails_what_it_cannot_send_in_time(transport: FakeAsyncTransport) -> None:
    gate = Gate(transport)
    producer = AsyncProducer(transport=transport)
    first = asyncio.create_task(producer.send("T", b"x", queue=QUEUE))
    await turns()
    second = asyncio.create_task(producer.send("T", b"y", queue=QUEUE))
    await turns()
    await producer.close(timeout_s=0.01)
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ClosedError, ClosedError]
    assert [outcome.definite for outcome in outcomes] == [False, True]  # type: ignore[union-attr]
    assert gate.waiting == 1


async def test_another_loop_is_refused_before_anything_is_queued(
    cluster: FakeCluster, producer: AsyncProducer, transport: FakeAsyncTransport
) -> None:
    gate = Gate(transport)
    sending = asyncio.create_task(producer.send("T", b"first"))
    await turns()
    sends: list[Callable[[], Coroutine[Any, Any, object]]] = [
        lambda: producer.send("T", b"x"),
        lambda: producer.send("T", b"x", timeout_s=1),
        lambda: producer.send("T", b"x", delay=1),
        lambda: producer.send_one_way("T", b"x"),
        lambda: producer.send_batch("T", [b"x"]),
        producer.flush,
    ]

    def refused(send: Callable[[], Coroutine[Any, Any, object]]) -> None:
        with pytest.raises(ConfigurationError, match=r"another event loop, which is still open: nothing was sent\..*AsyncPushConsumer"):
            asyncio.run(send())

    for send in sends:
        await asyncio.to_thread(refused, send)
    assert sum(line.count for line in producer._lines.values()) == 1
    gate.open.set()
    await sending
    assert len(cluster.calls) == 1


def test_of_loops_that_begin_together_one_has_the_producer(cluster: FakeCluster, transport: FakeAsyncTransport) -> None:
    count = 8
    producer = AsyncProducer(transport=transport)
    before, behind = threading.Barrier(count), threading.Barrier(count)

    async def send() -> bool:
        before.wait(10)
        try:
            await producer.send("T", b"x")
        except ConfigurationError:
            return False
        finally:
            behind.wait(10)  # All loops are open until then.
        return True

    with ThreadPoolExecutor(count) as pool:
        sent = list(pool.map(lambda _: asyncio.run(send()), range(count)))
    assert (sent.count(True), len(cluster.calls)) == (1, 1)
    asyncio.run(producer.close())


def test_a_loop_after_another_that_is_closed_has_it_and_then_no_third_one(transport: FakeAsyncTransport) -> None:
    producer = AsyncProducer(transport=transport)
    for _ in range(2):
        asyncio.run(producer.send("T", b"x"))

    async def send() -> None:
        await producer.send("T", b"x")
        with pytest.raises(ConfigurationError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(producer.send("T", b"x")))
        with pytest.raises(ConfigurationError, match="another event loop, which is still open: close it there"):
            await asyncio.to_thread(lambda: asyncio.run(producer.close()))
        await producer.send("T", b"y")

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(producer.send("T", b"x"))
        with pytest.raises(ConfigurationError, match="close it there"):
            second.run(producer.close())
        first.run(producer.send("T", b"x"))

    asyncio.run(send())
    asyncio.run(producer.close())
