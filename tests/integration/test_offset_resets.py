"""Resets of a group reach its members while they run: those that wait, those that commit; over a kill of the broker, too."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

import pytest

from protomq import (
    Admin,
    AsyncPullConsumer,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
)
from protomq.errors import ConfigurationError
from protomq.testing import Broker
from tests.support.cli import run

PATIENCE_S = 60.0


@pytest.fixture
def topic(protomq_server: Broker, request: pytest.FixtureRequest) -> str:
    """A topic of one queue with the messages 0 to 9."""
    name = f"resets-{abs(hash(request.node.name)):x}"
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.create_topic(name, write_queues=1, read_queues=1)
    with Producer(namesrv=protomq_server.namesrv) as producer:
        for number in range(10):
            producer.send(name, b"%d" % number)
    return name


def polled(consumer: PullConsumer, count: int) -> list[int]:
    """The numbers of so many messages."""
    found: list[Message] = []
    while len(found) < count:
        found += consumer.poll(PATIENCE_S, max_messages=count - len(found))
    return [int(message.body) for message in found]


def reset(broker: Broker, group: str, topic: str, to: int) -> None:
    with Admin(namesrv=broker.namesrv) as admin:
        admin.reset_offsets(group, topic, to)


def test_the_ends_of_a_queue_have_two_names_each(protomq_server: Broker, topic: str) -> None:
    with Admin(namesrv=protomq_server.namesrv) as admin:
        for to, lag in (("end", 0), ("start", 10), ("latest", 0), ("earliest", 10)):
            admin.reset_offsets("names", topic, to)  # type: ignore[arg-type]
            assert [one.lag for one in admin.group_lag("names", topic)] == [lag], to
        with pytest.raises(ConfigurationError, match="a datetime or an offset, not 'begin'"):
            admin.reset_offsets("names", topic, "begin")  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_member_that_waits_goes_on_where_its_group_was_reset(
    protomq_server: Broker, topic: str, transport: str
) -> None:
    address = protomq_server.remoting_address if transport == "remoting" else protomq_server.grpc_address
    with PullConsumer(f"waits-{transport}", namesrv=address, transport=transport) as consumer:  # type: ignore[arg-type]
        consumer.subscribe(topic)
        assert polled(consumer, 10) == list(range(10))
        assert consumer.poll(0.0) == []  # From here on a pull is held, for 15 s.
        reset(protomq_server, consumer.group, topic, 7)
        assert polled(consumer, 3) == [7, 8, 9]
        (queue,) = consumer.assignment()
        consumer.commit()
        assert consumer.committed(queue) == 10


def test_a_commit_from_before_a_reset_does_not_undo_it(protomq_server: Broker, topic: str) -> None:
    with PullConsumer("commits", namesrv=protomq_server.namesrv, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        assert polled(consumer, 6) == list(range(6))
        (queue,) = consumer.assignment()
        consumer.commit()
        reset(protomq_server, "commits", topic, 2)
        # What was pulled and waits to be handed out is of before.
        consumer.commit({queue: 6})
        assert consumer.committed(queue) == 2
        assert consumer.position(queue) == 2
        assert polled(consumer, 8) == list(range(2, 10))
        consumer.commit()
        assert consumer.committed(queue) == 10


@pytest.mark.parametrize("lock_queues", [False, True])
def test_members_that_run_follow_the_command_line(protomq_server: Broker, topic: str, lock_queues: bool) -> None:
    group = f"line-{lock_queues}"

    async def members() -> None:
        async with AsyncPullConsumer(group, namesrv=protomq_server.namesrv, lock_queues=lock_queues) as consumer:
            await consumer.subscribe(topic)

            async def take(count: int) -> list[int]:
                found: list[Message] = []
                while len(found) < count:
                    found += await consumer.poll(PATIENCE_S, max_messages=count - len(found))
                return [int(message.body) for message in found]

            assert await take(10) == list(range(10))
            waiting = asyncio.create_task(take(10))
            for command in (["group", "reset", group, topic, "--to", "start"], ["group", "commit", group, topic, "-O", "start"]):
                await asyncio.to_thread(run, *command, namesrv=protomq_server.namesrv)
                assert await waiting == list(range(10))
                waiting = asyncio.create_task(take(10))
            waiting.cancel()

    asyncio.run(asyncio.wait_for(members(), PATIENCE_S))


def test_an_orderly_consumer_follows_the_command_line(protomq_server: Broker, topic: str) -> None:
    arrived: SimpleQueue[int] = SimpleQueue()
    consumer = PushConsumer("orderly-line", namesrv=protomq_server.namesrv, orderly=True)
    consumer.subscribe(topic, lambda message: arrived.put(int(message.body)))
    with consumer:
        assert [arrived.get(timeout=PATIENCE_S) for _ in range(10)] == list(range(10))
        for command in (["group", "reset", "orderly-line", topic, "--to", "4"], ["group", "commit", "orderly-line", topic, "-O", "+4"]):
            run(*command, namesrv=protomq_server.namesrv)
            assert [arrived.get(timeout=PATIENCE_S) for _ in range(6)] == list(range(4, 10))


def test_a_member_learns_of_a_reset_that_was_made_before_its_broker_was_killed(
    tmp_path: Path,
) -> None:
    with Broker(data_dir=tmp_path) as broker:
        with Admin(namesrv=broker.namesrv) as admin:
            admin.create_topic("flights", write_queues=1, read_queues=1)
        with Producer(namesrv=broker.namesrv) as producer:
            for number in range(10):
                producer.send("flights", b"%d" % number)
        _kill_between_reset_and_poll(broker)


def _kill_between_reset_and_poll(broker: Broker) -> None:
    with PullConsumer("killed", namesrv=broker.namesrv, auto_commit=False) as member:
        member.subscribe("flights")
        assert polled(member, 10) == list(range(10))
        (queue,) = member.assignment()
        member.commit()
        reset(broker, "killed", "flights", 4)
        broker.kill()
        broker.restart()
        assert polled(member, 6) == list(range(4, 10))
        assert member.committed(queue) == 4
        member.commit()
        assert member.committed(queue) == 10


def test_a_reset_to_a_time_and_a_clone_are_followed_too(protomq_server: Broker, topic: str) -> None:
    with (
        PullConsumer("clone", namesrv=protomq_server.namesrv) as consumer,
        PullConsumer("source", namesrv=protomq_server.namesrv) as source,
        Admin(namesrv=protomq_server.namesrv) as admin,
    ):
        source.subscribe(topic)
        assert polled(source, 1) == [0]
        (queue,) = source.assignment()
        source.commit({queue: 8})
        consumer.subscribe(topic)
        found = consumer.poll(PATIENCE_S)
        while len(found) < 10:
            found += consumer.poll(PATIENCE_S)
        admin.clone_offsets("source", "clone", topic)
        assert polled(consumer, 2) == [8, 9]
        admin.reset_offsets("clone", topic, found[0].store_time - timedelta(seconds=1))
        assert polled(consumer, 10) == list(range(10))
