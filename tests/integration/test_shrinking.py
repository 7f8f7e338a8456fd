"""A topic gets fewer queues by the steps of docs/operations.md, while messages wait for the queues that go: all reach their groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final

import pytest

from protomq import (
    Admin,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    SimpleConsumer,
    TransactionDecision,
    TransactionProducer,
)
from protomq.testing import Broker
from tests.support.cli import jsonl, run
from tests.support.waiting import PATIENCE_S, wait_for

TOPIC: Final = "orders"
DELAY_S: Final = 10
INVISIBLE_S: Final = 10


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(environment={"PROTOMQ_TRANSACTION_TIMEOUT_MS": "600000", "PROTOMQ_POP_INVISIBLE_MIN_MS": "100"}) as broker:
        run("topic", "create", TOPIC, "-q", "8", namesrv=broker.namesrv)
        yield broker


def rests_with(consumer: PullConsumer, queue_count: int) -> bool:
    """Nothing comes, and it has so many queues."""
    return not consumer.poll(0.1) and len(consumer.assignment()) == queue_count


def queues_of(producer: Producer) -> list[MessageQueue]:
    return sorted(producer.queues(TOPIC), key=lambda queue: queue.queue_id)


def change(broker: Broker, queues: int, read_queues: int) -> str:
    """What is told on stderr."""
    arguments = ("--queues", str(queues), "--read-queues", str(read_queues))
    return run("topic", "create", TOPIC, "-u", *arguments, namesrv=broker.namesrv).stderr


def lag(broker: Broker, group: str) -> list[int]:
    """As each of the commands tells it."""

    def told(*command: str) -> int:
        rows = jsonl(run("group", *command, "-o", "jsonl", namesrv=broker.namesrv))
        return sum(int(str(row["lag"])) for row in rows if (row["group"], row["topic"]) == (group, TOPIC))

    return [told("lag", group), told("lag", group, "-t", TOPIC), told("offsets", group, TOPIC), told("list")]


def test_what_waits_for_queues_that_go_is_delivered_committed_and_popped_again(broker: Broker) -> None:
    with (
        Admin(namesrv=broker.namesrv) as admin,
        Producer(namesrv=broker.namesrv) as producer,
        TransactionProducer("desk", lambda check: TransactionDecision.UNKNOWN, namesrv=broker.namesrv) as desk,
        PullConsumer("billing", namesrv=broker.namesrv) as billing,
        SimpleConsumer("pops", namesrv=broker.namesrv) as pops,
    ):
        billing.subscribe(TOPIC)
        queues = queues_of(producer)
        plain, expected = set[bytes](), set[bytes]()
        for queue in queues:
            producer.send(TOPIC, b"plain %d" % queue.queue_id, queue=queue)
            plain.add(b"plain %d" % queue.queue_id)
        got = set[bytes]()

        def poll() -> set[bytes]:
            got.update(message.body for message in billing.poll(0.2))
            billing.commit()
            return got

        wait_for(lambda: plain <= poll(), PATIENCE_S)
        held: dict[bytes, Message] = {}

        def hold() -> bool:
            held.update((message.body, message) for message in pops.receive(TOPIC, hold_s=0.2, invisible_s=INVISIBLE_S))
            return len(held) == 8

        wait_for(hold, PATIENCE_S)
        halves = []
        for queue in queues:
            producer.send(TOPIC, b"delayed %d" % queue.queue_id, queue=queue, delay=DELAY_S)
            halves.append(desk.begin(TOPIC, b"half %d" % queue.queue_id, queue=queue))
            halves.append(desk.begin(TOPIC, b"half, delayed %d" % queue.queue_id, queue=queue, delay=DELAY_S))
            expected |= {each + b" %d" % queue.queue_id for each in (b"delayed", b"half", b"half, delayed")}
        assert change(broker, 4, 8) == ""
        assert lag(broker, "billing") == [0] * 4
        assert change(broker, 4, 4) == ""
        for half in halves[:8]:
            half.commit()
        pops.ack(held.pop(b"plain 7"))
        broker.restart()
        for half in halves[8:]:
            half.commit()
        wait_for(lambda: plain | expected <= poll(), PATIENCE_S)
        again = set[bytes]()

        def pop() -> set[bytes]:
            for message in pops.receive(TOPIC, hold_s=0.2, invisible_s=60.0):
                again.add(message.body)
                pops.ack(message)
            return again

        wait_for(lambda: (plain - {b"plain 7"}) | expected <= pop(), PATIENCE_S)
        assert b"plain 7" not in again, "it was acknowledged"
        wait_for(lambda: lag(broker, "pops") == lag(broker, "billing") == [0] * 4, PATIENCE_S)
        ends = {one.queue.queue_id: one.offsets.end_offset for one in admin.describe_topic(TOPIC).queues}
        assert ends == dict.fromkeys(range(4), 7), "a message of each of two queues before, and three of both after"
        change(broker, 8, 8)
        ends = {one.queue.queue_id: one.offsets.end_offset for one in admin.describe_topic(TOPIC).queues}
        assert [ends[queue_id] for queue_id in range(4, 8)] == [1] * 4


def test_who_takes_queues_away_that_are_not_consumed_is_told_and_can_give_them_back(broker: Broker) -> None:
    with (
        Admin(namesrv=broker.namesrv) as admin,
        Producer(namesrv=broker.namesrv) as producer,
        PullConsumer("billing", namesrv=broker.namesrv) as billing,
    ):
        queues = queues_of(producer)
        for queue in queues:
            producer.send(TOPIC, b"first", queue=queue)
        billing.subscribe(TOPIC)
        got: list[bytes] = []

        def poll(count: int) -> bool:
            got.extend(message.body for message in billing.poll(0.2))
            return len(got) == count

        wait_for(lambda: poll(8), PATIENCE_S)
        billing.commit()
        for queue in queues[5:]:
            producer.send(TOPIC, b"second", queue=queue)
        assert change(broker, 4, 8) == ""
        told = change(broker, 4, 4)
        assert told.startswith("protomq: topic orders has 4 read queues at ")
        assert "in messages: billing 3. Give" in told
        assert lag(broker, "billing") == [3] * 4
        assert change(broker, 4, 4) == ""
        admin.create_topic(TOPIC, write_queues=4, read_queues=8, update=True)
        with pytest.warns(RuntimeWarning, match="in messages: billing 3"):
            admin.create_topic(TOPIC, write_queues=4, read_queues=4, update=True)
        assert change(broker, 4, 8) == ""
        wait_for(lambda: poll(11), PATIENCE_S)
        billing.commit()
        assert change(broker, 4, 4) == ""
        assert lag(broker, "billing") == [0] * 4
        rows = jsonl(run("group", "offsets", "billing", TOPIC, "-o", "jsonl", namesrv=broker.namesrv))
        assert [row["queue_id"] for row in rows] == [0, 1, 2, 3]


def test_what_members_finish_of_queues_that_are_gone_is_committed_and_does_not_come_again(broker: Broker) -> None:
    """By itself when the queues go, by a commit, and for a group in order."""
    groups = ("billing", "manual", "ordered")
    with ExitStack() as stack:
        producer = stack.enter_context(Producer(namesrv=broker.namesrv))
        for queue in queues_of(producer):
            producer.send(TOPIC, b"%d" % queue.queue_id, queue=queue)

        def member(group: str) -> PullConsumer:
            consumer = PullConsumer(
                group, namesrv=broker.namesrv, auto_commit=group != "manual", auto_commit_interval_s=3600, lock_queues=group == "ordered"
            )
            stack.enter_context(consumer).subscribe(TOPIC)
            return consumer

        members = [member(group) for group in groups]
        for consumer in members:
            got = set[bytes]()
            while len(got) < 8:
                got |= {message.body for message in consumer.poll(PATIENCE_S)}
        for read_queues in (8, 4):
            change(broker, 4, read_queues)
        members[1].commit()
        for consumer in members:
            wait_for(partial(rests_with, consumer, 4), PATIENCE_S)
            consumer.commit()
        assert [lag(broker, group) for group in groups] == [[0] * 4] * 3
        assert change(broker, 8, 8) == ""
        for consumer in members:
            wait_for(partial(rests_with, consumer, 8), PATIENCE_S)
