"""Handlers of popped messages through a whole broker: renewed while they run, told when somebody else has their message, and in order."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from protomq import (
    Admin,
    AsyncSimpleConsumer,
    HandledCounts,
    Message,
    OutgoingMessage,
    PoppedQueue,
    Producer,
    PullConsumer,
    Reject,
    Retry,
    SimpleConsumer,
)
from protomq.errors import ConfigurationError, StaleReceiptError, TopicNotFoundError, WrongTypeError
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, wait_for

WAIT_S = 60.0


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """With short invisible times."""
    with Broker(environment={"PROTOMQ_POP_INVISIBLE_MIN_MS": "100"}) as broker:
        yield broker


def fill(broker: Broker, topic: str, bodies: list[bytes], keys: list[str] | None = None) -> None:
    with Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic(topic, write_queues=1, read_queues=1, update=True)
    outgoing = [
        OutgoingMessage(topic, body, sharding_key=keys[number] if keys else "") for number, body in enumerate(bodies)
    ]
    with Producer(namesrv=broker.namesrv) as producer:
        producer.send_batch(topic, outgoing)


def dead_letters(broker: Broker, group: str) -> dict[bytes, str]:
    with PullConsumer(namesrv=broker.namesrv) as reader:
        reader.assign(reader.queues(f"%DLQ%{group}"))
        found: dict[bytes, str] = {}
        while messages := reader.poll(0.5):
            found |= {message.body: message.last_error for message in messages}
        return found


def attempt_of(message: Message) -> int:
    assert isinstance(message.queue, PoppedQueue)
    return message.queue.attempt


@pytest.fixture(params=["threads", "coroutines"])
def handle(request: pytest.FixtureRequest, broker: Broker) -> Callable[..., HandledCounts]:
    """handle(group, topic, handler, **options): handler(message, consumer) is a function that may block, and calls `request_stop`."""

    def by_threads(group: str, topic: str, handler: Any, **options: Any) -> HandledCounts:
        with SimpleConsumer(group, namesrv=broker.namesrv) as consumer:
            return consumer.handle(topic, lambda message: handler(message, consumer), **options)

    async def in_tasks(group: str, topic: str, handler: Any, **options: Any) -> HandledCounts:
        async with AsyncSimpleConsumer(group, namesrv=broker.namesrv) as consumer:
            loop = asyncio.get_running_loop()

            class Stopped:
                hold = consumer.hold

                @staticmethod
                def request_stop() -> None:
                    loop.call_soon_threadsafe(consumer.request_stop)

            def call(message: Message) -> object:
                result: object = handler(message, Stopped)
                return result

            async def wait(message: Message) -> object:
                return await asyncio.to_thread(call, message)

            return await consumer.handle(topic, wait if request.param == "coroutines" else call, **options)

    if request.param == "threads":
        return by_threads
    return lambda *given, **options: asyncio.run(in_tasks(*given, **options))


@pytest.mark.parametrize("handle", ["threads", "coroutines", "functions of an event loop"], indirect=True)
def test_a_message_stays_with_a_handler_that_takes_three_times_as_long_as_it_is_invisible(
    broker: Broker, handle: Any, request: pytest.FixtureRequest
) -> None:
    topic = f"renewed-{abs(hash(request.node.name))}"
    fill(broker, topic, [b"slow", b"a", b"b"])
    seen: list[tuple[bytes, int]] = []
    renewed_counts: list[int] = []

    def handler(message: Message, consumer: Any) -> None:
        seen.append((message.body, attempt_of(message)))
        if message.body == b"slow":
            hold = consumer.hold(message)
            give_up = threading.Event()
            while hold.renewed_count < 5:  # 2.5 times the invisible time
                give_up.wait(0.02)
            renewed_counts.append(hold.renewed_count)
            consumer.request_stop()

    counts = handle("group", topic, handler, invisible_s=0.6, concurrency=3)
    assert sorted(seen) == [(b"a", 1), (b"b", 1), (b"slow", 1)]
    assert renewed_counts == [5]
    assert counts == (3, 0, 0)
    with SimpleConsumer("group", namesrv=broker.namesrv) as consumer:
        assert consumer.receive(topic, hold_s=0) == []


def test_quick_handlers_get_messages_ahead_and_what_waits_at_a_stop_comes_at_once(
    broker: Broker, handle: Any, request: pytest.FixtureRequest
) -> None:
    topic = f"ahead-{abs(hash(request.node.name))}"
    bodies = [b"%d" % number for number in range(300)]
    fill(broker, topic, bodies)
    seen: list[bytes] = []

    def handler(message: Message, consumer: Any) -> None:
        seen.append(message.body)
        if len(seen) == 200:
            consumer.request_stop()

    counts = handle("group", topic, handler, invisible_s=600, concurrency=2)
    assert counts == (len(seen), 0, 0)
    with SimpleConsumer("group", namesrv=broker.namesrv) as consumer:
        rest = consumer.receive(topic, 1_024, hold_s=0)
    assert sorted(seen + [message.body for message in rest]) == sorted(bodies)
    assert {attempt_of(message) for message in rest} == {1}, "what only waited is no delivery"


def test_a_handler_whose_message_somebody_else_has_is_told_and_what_it_says_is_refused(
    broker: Broker, handle: Any, request: pytest.FixtureRequest
) -> None:
    topic = f"lost-{abs(hash(request.node.name))}"
    fill(broker, topic, [b"x"])
    stolen: list[Message] = []
    told: list[str] = []

    def handler(message: Message, consumer: Any) -> None:
        with SimpleConsumer("group", namesrv=broker.namesrv) as other:  # As if it had been stopped beyond its time.
            other.nack(message)
            stolen.extend(other.receive(topic, invisible_s=600))
        hold = consumer.hold(message)
        give_up = threading.Event()
        while not hold.is_lost:
            give_up.wait(0.02)
        with pytest.raises(StaleReceiptError):
            hold.check()
        told.append("lost")
        consumer.request_stop()

    counts = handle("group", topic, handler, invisible_s=0.6, concurrency=1)
    assert (told, counts) == (["lost"], HandledCounts(0, 0, 1))
    (message,) = stolen
    assert attempt_of(message) == 2
    with SimpleConsumer("group", namesrv=broker.namesrv) as other:
        assert other.ack(message) == []  # The late handler took nothing from its new holder.


def test_a_coroutine_that_blocks_its_loop_is_named_and_another_member_gets_its_message(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    fill(broker, "blocked", [b"x"])
    told = threading.Event()
    stolen: list[Message] = []

    class Tells(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "blocks the event loop" in record.getMessage():
                told.set()

    def steal() -> None:
        with SimpleConsumer("group", namesrv=broker.namesrv) as other:
            while not stolen:
                stolen.extend(other.receive("blocked", invisible_s=600, hold_s=WAIT_S))

    async def consume() -> HandledCounts:
        async with AsyncSimpleConsumer("group", namesrv=broker.namesrv) as consumer:

            async def blocks(message: Message) -> None:
                thief = threading.Thread(target=steal)
                thief.start()
                thief.join(PATIENCE_S)
                told.wait(PATIENCE_S)
                consumer.request_stop()

            return await consumer.handle("blocked", blocks, invisible_s=0.3)

    handler = Tells()
    logging.getLogger("protomq").addHandler(handler)
    try:
        counts = asyncio.run(consume())
    finally:
        logging.getLogger("protomq").removeHandler(handler)
    (text,) = [text for text in caplog.messages if "blocks the event loop" in text]
    assert "blocks blocks the event loop for more than 1 s, at" in text.rpartition("<locals>.")[2]
    (message,) = stolen
    assert (attempt_of(message), counts) == (2, HandledCounts(0, 0, 1))
    with SimpleConsumer("group", namesrv=broker.namesrv) as other:
        assert other.ack(message) == []


def test_what_handlers_raise_is_the_error_of_the_dead_letter_and_a_rejected_one_is_dead_at_once(
    broker: Broker, handle: Any, request: pytest.FixtureRequest
) -> None:
    topic, group = f"failed-{abs(hash(request.node.name))}", f"failing-{abs(hash(request.node.name))}"
    fill(broker, topic, [b"poison", b"never", b"later", b"good"])
    with Admin(namesrv=broker.namesrv) as admin:
        admin.set_group(group, retry_count_max=1)
    ends: list[bytes] = []

    def handler(message: Message, consumer: Any) -> object:
        attempt = attempt_of(message)
        if message.body == b"never":
            return Reject("of no use")
        if message.body == b"later" and attempt == 1:
            return Retry(delay=0.1, error="not yet")
        if message.body == b"poison" and attempt == 1:
            return Retry(delay=0.0, error="first")
        ends.append(message.body)
        if len(ends) == 3:
            consumer.request_stop()
        if message.body == b"poison":
            return Retry(delay=0.0, error="ValueError: broken")
        return None

    counts = handle(group, topic, handler, concurrency=2)
    assert sorted(ends) == [b"good", b"later", b"poison"]
    assert counts == (2, 4, 0)
    with SimpleConsumer(group, namesrv=broker.namesrv) as consumer:
        assert consumer.receive(topic, hold_s=1.5) == []
    assert dead_letters(broker, group) == {b"poison": "ValueError: broken", b"never": "of no use"}


def test_the_dead_letter_of_a_rejected_message_says_how_often_it_was_handed_out(
    broker: Broker, handle: Any, request: pytest.FixtureRequest
) -> None:
    topic, group = f"rejected-{abs(hash(request.node.name))}", f"rejecting-{abs(hash(request.node.name))}"
    fill(broker, topic, [b"poison"])
    attempts: list[int] = []

    def handler(message: Message, consumer: Any) -> object:
        attempts.append(message.attempt)
        if len(attempts) < 3:
            return Retry(delay=0.0)
        consumer.request_stop()
        return Reject("of no use")

    assert handle(group, topic, handler) == (0, 3, 0)
    assert attempts == [0, 1, 2]
    with PullConsumer(namesrv=broker.namesrv) as reader:
        reader.assign(reader.queues(f"%DLQ%{group}"))
        (letter,) = reader.poll(PATIENCE_S)
    assert (letter.attempt, letter.last_error) == (3, "of no use")


def test_a_message_that_is_to_come_again_tomorrow_is_held_as_long_as_a_broker_may(
    broker: Broker, handle: Any, request: pytest.FixtureRequest
) -> None:
    topic, group = f"tomorrow-{abs(hash(request.node.name))}", f"late-{abs(hash(request.node.name))}"
    fill(broker, topic, [b"tomorrow"])

    def handler(message: Message, consumer: Any) -> object:
        consumer.request_stop()
        return Retry(delay=timedelta(days=1), error="not today")

    assert handle(group, topic, handler) == (0, 1, 0)


def test_a_message_whose_handler_raises_waits_as_its_group_says(broker: Broker, handle: Any, request: pytest.FixtureRequest) -> None:
    topic, group = f"delays-{abs(hash(request.node.name))}", f"delaying-{abs(hash(request.node.name))}"
    fill(broker, topic, [b"x"])
    with Admin(namesrv=broker.namesrv) as admin:
        admin.set_group(group, retry_delays_ms=[100])
    seen_s: list[float] = []

    def handler(message: Message, consumer: Any) -> None:
        seen_s.append(time.monotonic())
        if attempt_of(message) == 1:
            raise ValueError("not yet")
        consumer.request_stop()

    assert handle(group, topic, handler) == (1, 1, 0)
    assert 0.1 <= seen_s[1] - seen_s[0] < 5.0  # 10 s where nobody has said anything


def test_in_order_messages_of_a_key_never_run_side_by_side(broker: Broker, handle: Any, request: pytest.FixtureRequest) -> None:
    topic = f"ordered-{abs(hash(request.node.name))}"
    fill(broker, topic, [b"%d" % number for number in range(30)], [f"k{number % 3}" for number in range(30)])
    lock = threading.Lock()
    running: set[str] = set()
    seen: dict[str, list[int]] = {}
    overlaps: list[str] = []

    def handler(message: Message, consumer: Any) -> None:
        key = message.sharding_key
        with lock:
            if key in running:
                overlaps.append(key)
            running.add(key)
        threading.Event().wait(0.002)
        with lock:
            running.discard(key)
            seen.setdefault(key, []).append(int(message.body))
            if sum(map(len, seen.values())) == 30:
                consumer.request_stop()

    counts = handle("fifo", topic, handler, fifo=True, concurrency=8)
    assert overlaps == []
    assert seen == {f"k{key}": list(range(key, 30, 3)) for key in range(3)}
    assert counts == (30, 0, 0)


def test_a_call_that_is_cancelled_gives_its_messages_back_at_once(broker: Broker) -> None:
    fill(broker, "cancelled", [b"x"])

    async def work() -> list[Message]:
        began = asyncio.Event()

        async def handler(message: Message) -> None:
            began.set()
            await asyncio.Event().wait()

        async with AsyncSimpleConsumer("group", namesrv=broker.namesrv) as consumer:
            task = asyncio.create_task(consumer.handle("cancelled", handler, invisible_s=600))
            await asyncio.wait_for(began.wait(), WAIT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await consumer.receive("cancelled")

    (message,) = asyncio.run(work())
    assert attempt_of(message) == 2


def test_handlers_outlive_a_broker_that_restarts(tmp_path: Any) -> None:
    with Broker(data_dir=tmp_path) as broker:
        fill(broker, "T", [b"%d" % number for number in range(20)])
        seen: list[bytes] = []
        is_half_done, goes_on = threading.Event(), threading.Event()

        def handler(message: Message) -> None:
            seen.append(message.body)
            if len(seen) == 10:
                is_half_done.set()
                assert goes_on.wait(WAIT_S)
            if len(set(seen)) == 20:
                consumer.request_stop()

        with SimpleConsumer("group", namesrv=broker.namesrv) as consumer:
            counts: list[HandledCounts] = []
            # What the broker popped for an answer that the kill cut off comes again after `invisible_s`.
            thread = threading.Thread(target=lambda: counts.append(consumer.handle("T", handler, concurrency=1, invisible_s=10)))
            thread.start()
            assert is_half_done.wait(WAIT_S)
            broker.kill()
            broker.restart()
            goes_on.set()
            thread.join(WAIT_S)
            assert not thread.is_alive()
            assert sorted(seen, key=int) == [b"%d" % number for number in range(20)]
            assert counts == [HandledCounts(20, 0, 0)]
            assert consumer.receive("T", hold_s=0) == []


def test_a_second_call_is_refused_for_what_the_first_handles_and_else_runs_beside_it(broker: Broker) -> None:
    for topic in ("beside-1", "beside-2"):
        fill(broker, topic, [topic.encode()])
    both = threading.Barrier(3)

    def first(message: Message) -> None:
        both.wait(PATIENCE_S)

    def second(message: Message) -> None:
        both.wait(PATIENCE_S)

    with Producer(namesrv=broker.namesrv) as producer:
        (queue,) = producer.queues("beside-1")
    with SimpleConsumer("beside", namesrv=broker.namesrv) as consumer, ThreadPoolExecutor(3) as pool:
        running = [pool.submit(consumer.handle, "beside-1", first, queue=queue), pool.submit(consumer.handle, "beside-2", second)]
        both.wait(PATIENCE_S)
        for taken in (None, queue):
            with pytest.raises(ConfigurationError, match=r"first handles 'beside-1' here already, .*`request_stop`"):
                consumer.handle("beside-1", second, queue=taken)
        consumer.request_stop()
        assert [call.result(PATIENCE_S).done for call in running] == [1, 1]
        # What it has stopped hinders nobody.
        again = pool.submit(consumer.handle, "beside-1", second)
        wait_for(lambda: any(threads.begins_handlers for threads in consumer._handlers), PATIENCE_S)
        consumer.request_stop()
        assert again.result(PATIENCE_S).done == 0


async def test_coroutines_are_refused_a_second_call_alike(broker: Broker) -> None:
    for topic in ("beside-3", "beside-4"):
        fill(broker, topic, [topic.encode()])
    begun, goes_on = asyncio.Semaphore(0), asyncio.Event()

    async def handler(message: Message) -> None:
        begun.release()
        await goes_on.wait()

    async with AsyncSimpleConsumer("beside", namesrv=broker.namesrv) as consumer, asyncio.timeout(PATIENCE_S):
        running = [asyncio.create_task(consumer.handle(topic, handler)) for topic in ("beside-3", "beside-4")]
        for _ in running:
            await begun.acquire()
        with pytest.raises(ConfigurationError, match="handles 'beside-3' here already"):
            await consumer.handle("beside-3", handler)
        goes_on.set()
        consumer.request_stop()
        assert [counts.done for counts in await asyncio.gather(*running)] == [1, 1]


def test_what_is_wrong_is_said(broker: Broker) -> None:
    fill(broker, "wrong", [b"x"])

    async def coroutine(message: Message) -> None:
        raise AssertionError(message)

    with SimpleConsumer("group", namesrv=broker.namesrv) as consumer:
        with pytest.raises(WrongTypeError, match="only AsyncSimpleConsumer"):
            consumer.handle("wrong", coroutine)
        with pytest.raises(ConfigurationError, match="concurrency"):
            consumer.handle("wrong", print, concurrency=0)
        with pytest.raises(TopicNotFoundError):
            consumer.handle("absent", print)
        (message,) = consumer.receive("wrong")
        with pytest.raises(ConfigurationError, match="is not being handled"):
            consumer.hold(message)


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
@pytest.mark.parametrize("concurrency", [1, 20], ids=["no slot is free", "slots are free"])
def test_a_close_ends_handle_at_once_and_its_handler_is_told(broker: Broker, concurrency: int, transport: Any) -> None:
    topic = f"closed-{transport}-{concurrency}"
    fill(broker, topic, [b"x"])
    begun, goes_on = threading.Event(), threading.Event()
    told: list[str] = []
    consumer = SimpleConsumer("group", namesrv=broker.namesrv, transport=transport)

    def handler(message: Message) -> None:
        begun.set()
        goes_on.wait(WAIT_S)
        with pytest.raises(StaleReceiptError, match="its consumer was closed"):
            consumer.hold(message).check()
        told.append("lost")

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(consumer.handle, topic, handler, concurrency=concurrency, invisible_s=0.6, drain_timeout_s=600.0)
        assert begun.wait(WAIT_S)
        consumer.close()
        assert result.result(PATIENCE_S) == HandledCounts(0, 0, 0)
    with SimpleConsumer("group", namesrv=broker.namesrv) as other:
        (message,) = other.receive(topic, hold_s=WAIT_S, invisible_s=600)
        goes_on.set()
        wait_for(lambda: bool(told))
        assert (attempt_of(message), other.ack(message)) == (2, [])


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
@pytest.mark.parametrize("concurrency", [1, 20], ids=["no slot is free", "slots are free"])
@pytest.mark.parametrize("kind", ["coroutine", "function"])
async def test_a_close_ends_handle_of_a_loop_alike(broker: Broker, concurrency: int, transport: Any, kind: str) -> None:
    topic = f"closed-{kind}-{transport}-{concurrency}"
    await asyncio.to_thread(fill, broker, topic, [b"x"])
    begun, goes_on = asyncio.Event(), threading.Event()
    told: list[str] = []
    loop = asyncio.get_running_loop()
    consumer = AsyncSimpleConsumer("group", namesrv=broker.namesrv, transport=transport)

    def look(message: Message) -> None:
        with pytest.raises(StaleReceiptError, match="its consumer was closed"):
            consumer.hold(message).check()
        told.append("lost")

    async def coroutine(message: Message) -> None:
        begun.set()
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            look(message)

    def function(message: Message) -> None:
        loop.call_soon_threadsafe(begun.set)
        goes_on.wait(WAIT_S)
        look(message)

    handler: Any = coroutine if kind == "coroutine" else function
    call = asyncio.create_task(consumer.handle(topic, handler, concurrency=concurrency, invisible_s=0.6, drain_timeout_s=600.0))
    await asyncio.wait_for(begun.wait(), WAIT_S)
    await asyncio.wait_for(consumer.close(), PATIENCE_S)
    assert await asyncio.wait_for(call, PATIENCE_S) == HandledCounts(0, 0, 0)
    async with AsyncSimpleConsumer("group", namesrv=broker.namesrv) as other:
        (message,) = await other.receive(topic, hold_s=WAIT_S, invisible_s=600)
        goes_on.set()
        await asyncio.to_thread(wait_for, lambda: bool(told))
        assert (attempt_of(message), await other.ack(message)) == (2, [])
