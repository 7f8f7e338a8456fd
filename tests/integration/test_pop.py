"""Popping through a whole broker, over both transports: from threads, coroutines and the command line, and across a kill -9."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from protomq import (
    Admin,
    AsyncProducer,
    AsyncSimpleConsumer,
    Message,
    OutgoingMessage,
    Permission,
    PoppedQueue,
    Producer,
    PullConsumer,
    SimpleConsumer,
    TopicType,
    _methods,
)
from protomq.errors import (
    ClosedError,
    ConfigurationError,
    IllegalReceiptError,
    InvalidArgumentError,
    NotPermittedError,
    StaleReceiptError,
    TopicNotFoundError,
    WrongTypeError,
)
from protomq.hooks import Hook
from protomq.testing import Broker
from protomq.wire.hashing import sharded_index
from tests.chaos.pop_rounds import pop_rounds
from tests.support.cli import run
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """With short invisible times."""
    with Broker(environment={"PROTOMQ_POP_INVISIBLE_MIN_MS": "100"}) as broker:
        yield broker


def fill(broker: Broker, topic: str, count: int, queues: int = 1, **fields: Any) -> None:
    with Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic(topic, write_queues=queues, read_queues=queues, update=True)
    with Producer(namesrv=broker.namesrv) as producer:
        producer.send_batch(topic, [OutgoingMessage(topic, b"%d" % number, **fields) for number in range(count)])


def attempt_of(message: Message) -> int:
    assert isinstance(message.queue, PoppedQueue)
    return message.queue.attempt


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
async def test_a_receive_that_is_cancelled_takes_nothing_that_comes_later(broker: Broker, transport: Any) -> None:
    topic = f"cancelled-{transport}"
    fill(broker, topic, 1)
    namesrv = broker.namesrv if transport == "remoting" else broker.grpc_address
    async with AsyncSimpleConsumer("group", namesrv=namesrv, transport=transport) as consumer:
        await consumer.ack(await consumer.receive(topic))
        calls = [asyncio.create_task(consumer.receive(topic, 8)) for _ in range(5)]
        await asyncio.wait(calls, timeout=0.3)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        with Producer(namesrv=broker.namesrv) as producer:
            producer.send_batch(topic, [OutgoingMessage(topic, b"%d" % number) for number in range(128)])
        messages: list[Message] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(messages) < 128:
                messages += await consumer.receive(topic, 100)
        assert len({message.message_id for message in messages}) == 128


class _NotTheFirst(Hook):
    def keeps(self, message: Message) -> bool:
        return message.body != b"0"


async def test_what_a_receive_has_found_that_is_cancelled_while_it_acknowledges_comes_at_once(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = "cancelled-late"
    fill(broker, topic, 3)
    acknowledges = asyncio.Event()
    async with AsyncSimpleConsumer("late", namesrv=broker.namesrv, hooks=[_NotTheFirst()]) as consumer:
        call = consumer._transport.call

        async def hang_at_ack(address: Any, method: Any, *rest: Any, **options: Any) -> bytes:
            if method is _methods.ACK:
                acknowledges.set()
                await asyncio.sleep(PATIENCE_S)
            return await call(address, method, *rest, **options)

        monkeypatch.setattr(consumer._transport, "call", hang_at_ack)
        task = asyncio.create_task(consumer.receive(topic, hold_s=15))
        await asyncio.wait_for(acknowledges.wait(), PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with AsyncSimpleConsumer("late", namesrv=broker.namesrv) as consumer:
        found: list[tuple[bytes, int]] = []
        while len(found) < 3:
            found += [(message.body, attempt_of(message)) for message in await consumer.receive(topic, hold_s=PATIENCE_S)]
    assert sorted(found) == [(b"0", 1), (b"1", 1), (b"2", 1)]


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
async def test_messages_on_their_way_to_a_receive_that_is_cancelled_come_at_once(broker: Broker, transport: Any) -> None:
    topic = f"on-their-way-{transport}"
    fill(broker, topic, 1)
    bodies = {b"w%d" % number for number in range(60)}

    async def send() -> None:
        async with AsyncProducer(namesrv=broker.namesrv) as producer:
            for body in sorted(bodies):
                await producer.send(topic, body)
                await asyncio.sleep(0.003)

    namesrv = broker.namesrv if transport == "remoting" else broker.grpc_address
    async with (
        AsyncSimpleConsumer("group", namesrv=namesrv, transport=transport) as consumer,
        asyncio.timeout(PATIENCE_S),
    ):
        await consumer.ack(await consumer.receive(topic))
        sender = asyncio.create_task(send())
        found: list[bytes] = []
        while len(found) < len(bodies):
            call = asyncio.create_task(consumer.receive(topic, 8))
            await asyncio.wait([call], timeout=0.003 if not sender.done() else None)
            call.cancel()
            (messages,) = await asyncio.gather(call, return_exceptions=True)
            if not isinstance(messages, BaseException):
                found += [message.body for message in messages]
        await sender
    assert sorted(found) == sorted(bodies), "a message came to two receives"


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_messages_are_received_acknowledged_and_given_back(broker: Broker, transport: Any) -> None:
    topic = f"plain-{transport}"
    fill(broker, topic, 300)
    with SimpleConsumer("group", namesrv=broker.namesrv, transport=transport) as consumer:
        messages = consumer.receive(topic, 200)
        assert [message.body for message in messages] == [b"%d" % number for number in range(200)]
        assert messages[0].topic == topic
        assert consumer.ack(messages[:150]) == []
        assert consumer.nack(messages[150:]) == []
        again = consumer.receive(topic, 200)
        assert [message.body for message in again] == [b"%d" % number for number in range(150, 300)]
        assert [attempt_of(message) for message in again] == [2] * 50 + [1] * 100
        assert consumer.ack(messages[0]) == [], "it was acknowledged so before"
        with pytest.raises(StaleReceiptError) as caught:
            consumer.ack(messages[150])
        assert caught.value.metadata["never_acknowledged"] == "true"
        assert consumer.ack([messages[0], messages[150], *again]) == [messages[150]]
        assert consumer.receive(topic, hold_s=0) == []
        other = pickle.loads(pickle.dumps(again[0]))
        with pytest.raises(StaleReceiptError):
            consumer.change_invisible(other, 10)
    with pytest.raises(ClosedError):
        consumer.receive(topic)


def test_a_group_that_pops_goes_on_where_it_is_reset_and_a_kill_changes_nothing(tmp_path: Path) -> None:
    with Broker(data_dir=tmp_path) as broker, SimpleConsumer("group", namesrv=broker.namesrv) as consumer:
        fill(broker, "moved", 10)

        def after(*command: str) -> tuple[int, int]:
            """Committed offset, and lag."""
            said = run("group", *command, "-o", "json", namesrv=broker.namesrv).stdout
            (row,) = json.loads(said)
            return int(row["committed_offset"]), int(row["lag"])

        assert len(consumer.receive("moved", 6)) == 6
        held = consumer.receive("moved", 1)
        assert after("reset", "group", "moved", "--to", "8") == (8, 2)
        broker.kill()
        broker.restart()
        with pytest.raises(StaleReceiptError):
            consumer.ack(held)
        fresh = consumer.receive("moved", 10)
        assert [(message.body, attempt_of(message)) for message in fresh] == [(b"8", 1), (b"9", 1)]
        assert after("lag", "group") == (8, 2)
        assert after("reset", "group", "moved", "--to", "end") == (10, 0)
        with pytest.raises(StaleReceiptError):
            consumer.ack(fresh)
        assert consumer.receive("moved", hold_s=0) == []
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(consumer.receive, "moved", 10, hold_s=60)
            assert after("reset", "group", "moved", "--to", "start")[0] == 0
            assert len(waiting.result(30)) == 10
        with SimpleConsumer("other", namesrv=broker.namesrv) as other:
            other.ack(other.receive("moved", 7))
        assert after("clone", "other", "group", "--topic", "moved") == (7, 3)
        assert [message.body for message in consumer.receive("moved", 10)] == [b"7", b"8", b"9"]
        # The group goes over to pulls, and begins where it was set, not at the end.
        with PullConsumer("group", namesrv=broker.namesrv, begin="latest") as puller:
            puller.subscribe("moved")
            bodies: list[bytes] = []

            def poll() -> bool:
                bodies.extend(message.body for message in puller.poll(0.2))
                return len(bodies) >= 3

            wait_for(poll, PATIENCE_S)
        assert bodies == [b"7", b"8", b"9"]


def test_what_is_not_acknowledged_comes_again_and_wakes_who_waits(broker: Broker) -> None:
    topic = "again"
    fill(broker, topic, 2, queues=2)
    with SimpleConsumer("group", namesrv=broker.namesrv) as consumer:
        first = consumer.receive(topic, invisible_s=0.5)
        (later,) = consumer.receive(topic, invisible_s=0.5) if len(first) == 1 else (None,)
        again: list[Message] = []
        while len(again) < 2:
            found = consumer.receive(topic, hold_s=20)
            assert found
            again += found
        assert {attempt_of(message) for message in again} == {2}
        assert later is None or consumer.ack(again) == []


def test_coroutines_share_the_messages(broker: Broker) -> None:
    topic = "shared"
    fill(broker, topic, 400, queues=4)

    async def receive_all() -> list[bytes]:
        found: list[bytes] = []

        async def work(consumer: AsyncSimpleConsumer) -> None:
            while messages := await consumer.receive(topic, 16, hold_s=0):
                assert await consumer.ack(messages) == []
                found.extend(message.body for message in messages)

        async with AsyncSimpleConsumer("group", namesrv=broker.namesrv) as consumer:
            await asyncio.gather(*(work(consumer) for _ in range(8)))
            held = asyncio.create_task(consumer.receive(topic, hold_s=30))
            await asyncio.to_thread(fill, broker, topic, 1, 4)
            found.extend(message.body for message in await held)
        return found

    found = asyncio.run(receive_all())
    assert sorted(map(int, found)) == sorted([*range(400), 0])


def test_filters_order_and_start(broker: Broker) -> None:
    topic = "chosen"
    fill(broker, topic, 4, tag="a", properties={"n": "1"}, sharding_key="k")
    fill(broker, topic, 2, tag="b", properties={"n": "2"})
    with SimpleConsumer("tags", namesrv=broker.namesrv) as consumer:
        assert {message.tag for message in consumer.receive(topic, tags=["b"])} == {"b"}
    with SimpleConsumer("sql", namesrv=broker.namesrv) as consumer:
        assert len(consumer.receive(topic, sql="n = 1 AND TAGS = 'a'")) == 4
    with SimpleConsumer("fifo", namesrv=broker.namesrv) as consumer:
        messages = consumer.receive(topic, fifo=True)
        assert [message.sharding_key for message in messages] == ["k", "", ""]
        consumer.ack(messages[0])
        assert len(consumer.receive(topic, fifo=True)) == 1
    with SimpleConsumer("late", namesrv=broker.namesrv) as consumer:
        assert consumer.receive(topic, hold_s=0, start="latest") == []
        fill(broker, topic, 1)
        assert len(consumer.receive(topic, start="latest")) == 1


def test_the_steps_of_the_docs_keep_the_order_of_a_key_while_its_topic_grows(broker: Broker) -> None:
    key = next(f"k{number}" for number in range(100) if sharded_index(f"k{number}", 8))
    grown = "grown"
    with Admin(namesrv=broker.namesrv) as admin, SimpleConsumer("steps", namesrv=broker.namesrv) as consumer:
        admin.create_topic(grown, write_queues=1, type=TopicType.FIFO)
        bodies: list[object] = []
        for write_queues, queue_id in ((1, 0), (8, sharded_index(key, 8))):
            admin.create_topic(grown, write_queues=write_queues, update=True)
            with Producer(namesrv=broker.namesrv) as producer:
                for number in range(3):
                    sent = producer.send(grown, b"%d of %d" % (number, write_queues), sharding_key=key)
                    assert sent.queue.queue_id == queue_id
            for _ in range(3):
                (message,) = consumer.receive(grown, fifo=True)
                assert consumer.receive(grown, fifo=True, hold_s=0) == [], "one at a time"
                bodies.append(message.body)
                consumer.ack([message])
            assert sum(each.lag for each in admin.group_lag("steps", grown)) == 0
    assert bodies == [b"%d of %d" % (number, count) for count in (1, 8) for number in range(3)]


def test_a_kill_takes_nothing_back(tmp_path: Any) -> None:
    with Broker(data_dir=tmp_path, environment={"PROTOMQ_POP_INVISIBLE_MIN_MS": "100"}) as broker:
        fill(broker, "T", 3)
        with SimpleConsumer("group", namesrv=broker.namesrv) as consumer:
            done, held = consumer.receive("T", 2, invisible_s=3600)
            consumer.ack(done)
            (due,) = consumer.receive("T", 1, invisible_s=0.1)
            broker.kill()
            broker.restart()
            (again,) = consumer.receive("T", 3)
            assert (again.body, attempt_of(again)) == (due.body, 2)
            # First, since it opens a connection: an answer that was lost with one leaves open whether the receipt was stale before.
            consumer.ack(held)
            with pytest.raises(StaleReceiptError):
                consumer.ack(due)
            assert consumer.ack([again]) == []
            assert consumer.receive("T", hold_s=0) == []


def test_what_failed_too_often_before_a_kill_is_dead_though_nobody_pops_since(tmp_path: Path) -> None:
    with Broker(data_dir=tmp_path, environment={"PROTOMQ_POP_INVISIBLE_MIN_MS": "100"}) as broker:
        fill(broker, "T", 1)
        with Admin(namesrv=broker.namesrv) as admin:
            admin.set_group("group", retry_count_max=0)
        with SimpleConsumer("group", namesrv=broker.namesrv) as consumer:
            consumer.receive("T", invisible_s=1)
        broker.kill()
        broker.restart()
        with PullConsumer(namesrv=broker.namesrv) as reader:

            def is_there() -> bool:
                try:
                    reader.subscribe("%DLQ%group")
                except TopicNotFoundError:
                    return False
                return True

            wait_for(is_there, PATIENCE_S)
            assert [letter.body for letter in reader.poll(PATIENCE_S)] == [b"0"]


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
@pytest.mark.parametrize("permission", [Permission.NONE, Permission.WRITE])
def test_what_was_received_can_be_settled_though_its_topic_may_not_be_read_any_more(
    broker: Broker, transport: Any, permission: Permission
) -> None:
    topic = f"closed-{transport}-{permission.name}"
    fill(broker, topic, 6)
    with (
        Admin(namesrv=broker.namesrv) as admin,
        SimpleConsumer("group", namesrv=broker.namesrv, transport=transport) as consumer,
        SimpleConsumer("group", namesrv=broker.namesrv, transport=transport) as of_new_route,
        PullConsumer("pulls", namesrv=broker.namesrv, transport=transport) as pulls,
    ):
        messages = consumer.receive(topic, 6)
        assert len(messages) == 6
        pulls.subscribe(topic)
        pulled: list[Message] = []
        while len(pulled) < 6:
            pulled += pulls.poll(timeout_s=PATIENCE_S)
        admin.create_topic(topic, write_queues=1, update=True, permission=permission)
        for member, some in ((consumer, messages[:3]), (of_new_route, messages[3:])):
            assert member.ack(some[0]) == []
            assert member.nack(some[1], error="not now") == []
            assert member.change_invisible(some[2], 30) == []
        pulls.commit()
        assert [back.dead_letter for back in pulls.send_back(pulled[:1], dead_letter=True)] == [True]
        with pytest.raises(NotPermittedError):
            of_new_route.receive(topic)
        with PullConsumer("pulls", namesrv=broker.namesrv, transport=transport) as with_new_route:
            assert len(with_new_route.send_back(pulled[1:])) == 5
        admin.create_topic(topic, write_queues=1, update=True, permission=Permission.READ_WRITE)

        again: list[Message] = []

        def received_again() -> bool:
            try:
                again.extend(of_new_route.receive(topic, hold_s=0))
            except NotPermittedError:
                return False  # The route is looked up five times a second at most.
            return len(again) == 2

        wait_for(received_again)
        assert [(message.body, attempt_of(message)) for message in again] == [(b"1", 2), (b"4", 2)]
        assert of_new_route.ack(again) == []
        assert [(lag.queue.topic, lag.committed_offset) for lag in admin.group_lag("pulls", topic)] == [(topic, 6)]


@pytest.mark.chaos
def test_kills_give_no_message_two_holders_and_lose_none(tmp_path: Path) -> None:
    counts = Counter[str]()
    assert pop_rounds(1, 2, tmp_path, counts) == []
    assert counts["deliveries"] >= 2 * 20


def test_what_is_wrong_is_said(broker: Broker) -> None:
    fill(broker, "T", 1)
    with pytest.raises(ConfigurationError):
        SimpleConsumer("")
    with (
        SimpleConsumer("group", namesrv=broker.namesrv) as consumer,
        SimpleConsumer("other", namesrv=broker.namesrv) as other,
    ):
        for wrong in ({"count": 0}, {"invisible_s": 43_201}, {"hold_s": 61}, {"start": "middle"}):
            with pytest.raises(ConfigurationError):
                consumer.receive("T", **wrong)
        with pytest.raises(InvalidArgumentError, match=r"not 0\.01 s"):
            consumer.receive("T", invisible_s=0.01)
        with pytest.raises(TopicNotFoundError):
            consumer.receive("absent")
        (message,) = consumer.receive("T")
        with pytest.raises(IllegalReceiptError):
            other.ack(message)
        assert consumer.ack([]) == []
        for nothing in ([1], 7):
            with pytest.raises((ConfigurationError, WrongTypeError)):
                consumer.ack(nothing)  # type: ignore[arg-type]
        assert consumer.ack(message) == []
