"""What a consumer's user may not have meant is told: unknown topics and queues, a second member, commits that nobody made."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest

from protomq import AsyncProducer, AsyncPullConsumer, MessageQueue, Producer, PullConsumer, _methods
from protomq.errors import QueueNotFoundError, TopicNotFoundError, TopicRecreatedError
from protomq.testing import Broker
from protomq.v1 import route_service_pb2
from protomq.wire.status import RpcStatus
from tests.support.fake_server import FakeServer
from tests.support.waiting import wait_for

Q0, Q1 = MessageQueue("t", "broker-a", 0), MessageQueue("t", "broker-a", 1)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer({"t": 2}) as made:
        made.auto_create = True
        yield made


def consumer(server: FakeServer, group: str = "g", **options: Any) -> PullConsumer:
    return PullConsumer(group, namesrv=server.address, hold_ms=20, **options)


def async_consumer(server: FakeServer, group: str = "g", **options: Any) -> AsyncPullConsumer:
    return AsyncPullConsumer(group, namesrv=server.address, hold_ms=20, **options)


# -- topics and queues that are not there ------------------------------------------------------------------------------------


def test_a_topic_that_does_not_exist_is_told_once_and_waited_for(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with consumer(server) as source:
        with pytest.warns(RuntimeWarning, match="topic 'nosuch' does not exist") as told:
            source.subscribe("nosuch")
        assert told[0].filename == __file__
        source.subscribe("nosuch", tags=["a"])
        source.unsubscribe("nosuch")
        source.assign([MessageQueue("nosuch", "broker-a", 0)])
        assert source.poll(0) == []
        lines = [text for text in caplog.messages if "topic 'nosuch' does not exist" in text]
        assert len(lines) == 1
        source.assign([])
        source.subscribe("nosuch")
        server.topics["nosuch"] = 1
        server.append("nosuch", 0, [b"first"])
        while not (messages := source.poll(5)):
            pass
        assert messages[0].body == b"first"


@pytest.mark.filterwarnings("ignore:topic 'nosuch' does not exist")
def test_a_topic_that_does_not_exist_is_one_line_of_the_log(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    with consumer(server) as source:
        source.subscribe("nosuch")
        assert source.poll(0.5) == []
    assert [record.message.partition(";")[0] for record in caplog.records if record.levelno >= logging.WARNING] == [
        "topic 'nosuch' does not exist"
    ]


async def test_a_topic_that_does_not_exist_is_told_by_the_async_consumer(
    server: FakeServer,
) -> None:
    async with async_consumer(server) as source:
        with pytest.warns(RuntimeWarning, match="topic 'nosuch' does not exist") as told:
            await source.subscribe("nosuch")
        assert told[0].filename == __file__
        await source.unsubscribe("nosuch")
        with pytest.warns(RuntimeWarning, match="topic 'other' does not exist"):
            await source.assign([MessageQueue("other", "broker-a", 0)])
        await source.assign([])
        await source.subscribe("nosuch")


def test_a_topic_that_a_broker_has_is_not_told_though_the_name_server_does_not_know_it_yet(
    server: FakeServer,
) -> None:
    server.topics["new"] = 2
    encoded = server._get_route(route_service_pb2.GetRouteRequest(topic="new").SerializeToString())
    assert isinstance(encoded, bytes)
    answer = route_service_pb2.GetRouteResponse.FromString(encoded)
    answer.route.auto_create = True
    server.answer_once(_methods.GET_ROUTE, answer.SerializeToString())
    with consumer(server) as source:
        source.subscribe("new")
        assert len(source.assignment()) == 2


async def test_a_topic_that_is_made_after_a_producer_has_looked_at_its_queues_is_sent_to_where_it_is(
    server: FakeServer,
) -> None:
    """Before, the producer created it at the brokers that it had seen."""
    with Producer(namesrv=server.address) as producer:
        assert len(producer.queues("new")) == 2
        assert producer.transports("new") == {"broker-a": ""}
        server.topics["new"] = 1
        sent = [producer.send("new", b"x").queue.queue_id for _ in range(4)]
    assert sent == [0] * 4
    async with AsyncProducer(namesrv=server.address) as other:
        assert len(await other.queues("newer")) == 2
        assert await other.transports("newer") == {"broker-a": ""}
        server.topics["newer"] = 1
        assert [(await other.send("newer", b"x")).queue.queue_id for _ in range(4)] == [0] * 4


async def test_where_no_broker_creates_topics_an_unknown_topic_is_an_error(
    server: FakeServer,
) -> None:
    server.auto_create = False
    queue = MessageQueue("nosuch", "broker-a", 0)
    with consumer(server) as source:
        with pytest.raises(TopicNotFoundError):
            source.subscribe("nosuch")
        with pytest.raises(TopicNotFoundError):
            source.assign([queue])
        assert source.assignment() == ()
    async with async_consumer(server) as other:
        with pytest.raises(TopicNotFoundError):
            await other.subscribe("nosuch")
        with pytest.raises(TopicNotFoundError):
            await other.assign([queue])
        assert other.assignment() == ()


async def test_the_queues_of_a_topic_that_does_not_exist_are_not_made_up(
    server: FakeServer,
) -> None:
    async with async_consumer(server) as other:
        with consumer(server) as source:
            for _ in range(2):
                with pytest.raises(TopicNotFoundError, match="'nope' does not exist"):
                    source.queues("nope")
                with pytest.raises(TopicNotFoundError, match="'nope' does not exist"):
                    await other.queues("nope")
            # The broker has it, and the name server has not heard of it.
            unheard = server._get_route(
                route_service_pb2.GetRouteRequest(topic="nope").SerializeToString()
            )
            assert isinstance(unheard, bytes)
            server.topics["nope"] = 3
            server.answer_once(_methods.GET_ROUTE, unheard)
            server.answer_once(_methods.GET_ROUTE, unheard)
            three = tuple(MessageQueue("nope", "broker-a", i) for i in range(3))
            assert source.queues("nope") == three
            assert await other.queues("nope") == three
        server.auto_create = False
        with pytest.raises(TopicNotFoundError):
            await other.queues("not-here")


def test_warnings_go_to_stderr_where_the_program_has_no_log() -> None:
    script = """
        from protomq import PullConsumer, MessageQueue
        with PullConsumer("g", namesrv="127.0.0.1:1", request_timeout_s=0.1) as source:
            source.assign([MessageQueue("t", "a", 0)])
            source.poll(0.1)
    """
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "broker a does not answer, trying again: no name server answers" in finished.stderr


def test_a_topic_that_nobody_may_read_is_told(
    protomq_server: Broker, protomq_topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    from protomq import Admin, Permission

    with (
        Admin(namesrv=protomq_server.namesrv) as admin,
        PullConsumer("paused", namesrv=protomq_server.namesrv, hold_ms=20) as early,
        PullConsumer("paused-too", namesrv=protomq_server.namesrv, hold_ms=20) as late,
    ):
        early.subscribe(protomq_topic)
        admin.create_topic(protomq_topic, write_queues=8, permission=Permission.NONE, update=True)
        ends_s = time.monotonic() + 60
        while "NOT_PERMITTED, trying again" not in caplog.text and time.monotonic() < ends_s:
            early.poll(0.1)
        while early.assignment() and time.monotonic() < ends_s:
            early.poll(0.1)
        assert [f"topic {protomq_topic}" in line for line in caplog.messages] == [True]
        with pytest.warns(RuntimeWarning, match="has no queue that can be read, by its permission"):
            late.subscribe(protomq_topic)
        assert late.poll(0) == []
        admin.create_topic(
            protomq_topic, write_queues=8, permission=Permission.READ_WRITE, update=True
        )


def test_looking_for_a_topic_does_not_make_it(protomq_server: Broker) -> None:
    from protomq import Admin

    with PullConsumer("typo", namesrv=protomq_server.namesrv, hold_ms=20) as source:
        with pytest.warns(RuntimeWarning, match="topic 'typo-topic' does not exist"):
            source.subscribe("typo-topic")
        assert source.poll(0.3) == []
    with Admin(namesrv=protomq_server.namesrv) as admin:
        assert "typo-topic" not in admin.list_topic_names()


async def test_who_begins_anew_is_not_told_once_more_what_was_wrong_before(
    server: FakeServer,
) -> None:
    server.append("t", 0, [b"x"])
    async with async_consumer(server) as source:
        for end, begin_anew in (
            (lambda: source.assign([]), lambda: source.subscribe("t")),
            (lambda: source.unsubscribe("t"), lambda: source.assign([Q0])),
            (lambda: source.assign([]), lambda: source.subscribe("t")),
        ):
            await end()
            # As if a pull of another queue had failed since the last `poll`.
            source._steps.trouble = TopicRecreatedError("made again", metadata={"topic": "t"})
            await begin_anew()
            await source.poll(0)
        source._steps.trouble = TopicRecreatedError("made again", metadata={"topic": "other"})
        await source.subscribe("t")
        with pytest.raises(TopicRecreatedError):
            await source.poll(0)


async def test_a_queue_that_is_not_there_cannot_be_assigned(server: FakeServer) -> None:
    missing = MessageQueue("t", "broker-a", 99)
    with consumer(server) as source:
        source.assign([Q0])
        with pytest.raises(QueueNotFoundError, match=r"no queue 99 .* it has 0 to 1") as caught:
            source.assign([Q1, missing])
        assert caught.value.metadata["queue_id"] == "99"
        assert source.assignment() == (Q0,)
        source.assign([MessageQueue("t", "broker-that-is-away", 0)])
    async with async_consumer(server) as other:
        with pytest.raises(QueueNotFoundError, match="no queue 99"):
            await other.assign([missing])


# -- a second member ---------------------------------------------------------------------------------------------------------


async def test_a_second_member_in_the_same_process_is_told_at_once(server: FakeServer) -> None:
    with consumer(server) as first, consumer(server) as second, consumer(server, "other") as third:
        first.subscribe("t")
        wait_for(first.assignment)  # A share comes by a call of its own.
        with pytest.warns(RuntimeWarning, match="group g has another consumer in this process"):
            second.subscribe("t")
        second.subscribe("t")
        third.subscribe("t")
        async with async_consumer(server) as fourth:
            with pytest.warns(RuntimeWarning, match="group g has another consumer"):
                await fourth.subscribe("t")


async def test_members_with_queues_of_their_own_and_those_that_are_gone_are_no_second(
    server: FakeServer,
) -> None:
    with consumer(server) as first, consumer(server) as second:
        first.assign([Q0])
        second.assign([Q1])
    async with async_consumer(server) as third:
        await third.subscribe("t")
    with consumer(server) as fourth:
        fourth.subscribe("t")
    with consumer(server, "") as nobody, consumer(server, "") as nobody_else:
        nobody.subscribe("t")
        nobody_else.subscribe("t")


def test_the_same_group_of_another_cluster_is_another_group(server: FakeServer) -> None:
    with FakeServer({"t": 2}) as elsewhere, consumer(server) as first, consumer(elsewhere) as second:
        first.subscribe("t")
        second.subscribe("t")


# -- what goes on is told once -----------------------------------------------------------------------------------------------

BEYOND = RpcStatus(11, "beyond the end", "OFFSET_OUT_OF_RANGE")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.levelno >= logging.WARNING and "not committed in poll" in record.message
    ]


def test_a_broker_that_refuses_offsets_is_told_once_until_it_takes_some(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.append("t", 0, [b"x"])
    server.fail(_methods.COMMIT_OFFSETS, BEYOND, times=3)
    with consumer(server, auto_commit_interval_s=0.001) as source:
        source.subscribe("t")
        ends_s = time.monotonic() + 30
        while ("g", "t", 0) not in server.committed and time.monotonic() < ends_s:
            source.poll(0.01)
        assert server.called(_methods.COMMIT_OFFSETS) >= 4
        assert len(told(caplog)) == 1
        server.append("t", 0, [b"y"])
        server.fail(_methods.COMMIT_OFFSETS, BEYOND, times=2)
        while server.committed["g", "t", 0] < 2 and time.monotonic() < ends_s:
            source.poll(0.01)
        assert len(told(caplog)) == 2


async def test_a_broker_that_refuses_offsets_is_told_once_by_the_async_consumer(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.append("t", 0, [b"x"])
    server.fail(_methods.COMMIT_OFFSETS, BEYOND, times=3)
    async with async_consumer(server, auto_commit_interval_s=0.001) as source:
        await source.subscribe("t")
        ends_s = time.monotonic() + 30
        while ("g", "t", 0) not in server.committed and time.monotonic() < ends_s:
            await source.poll(0.01)
    assert server.called(_methods.COMMIT_OFFSETS) >= 4
    assert len(told(caplog)) == 1


# -- commits that nobody made ------------------------------------------------------------------------------------------------

PROGRAM = """
    import asyncio, os, sys
    from protomq import AsyncPullConsumer, PullConsumer

    def consume(polls, group="g", **options):
        consumer = PullConsumer(group, namesrv={address!r}, hold_ms=20, **options)
        consumer.subscribe("t")
        while polls:
            polls -= bool(consumer.poll(1, max_messages=5))
        return consumer

    async def consume_async():
        consumer = AsyncPullConsumer("g", namesrv={address!r}, hold_ms=20)
        await consumer.subscribe("t")
        while not await consumer.poll(1, max_messages=5):
            pass
        return consumer
"""


def run(server: FakeServer, end: str) -> str:
    """A program with one queue of ten messages that ends as `end` says; its stderr."""
    server.topics["t"] = 1
    server.append("t", 0, [b"%d" % i for i in range(10)])
    program = textwrap.dedent(PROGRAM).format(address=server.address) + textwrap.dedent(end)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stderr


def test_what_was_dealt_with_is_committed_when_the_program_ends(server: FakeServer) -> None:
    stderr = run(server, "consumer = consume(2)\nassert consumer.poll(0) == []")
    assert server.committed == {("g", "t", 0): 10}
    assert stderr == ""


def test_what_was_handed_out_last_is_told_when_the_program_ends(server: FakeServer) -> None:
    stderr = run(server, "consumer = consume(2)")
    # Nobody came back for more: what came last may not have been dealt with.
    assert server.committed == {("g", "t", 0): 5}
    assert "RuntimeWarning: messages of 1 queue that were handed out to group g are not" in stderr
    assert "the interpreter ended" in stderr


def test_a_consumer_that_nobody_has_any_more_is_told(server: FakeServer) -> None:
    stderr = run(server, "consume(1)")
    assert "RuntimeWarning: messages of 1 queue" in stderr
    assert "nobody used it any more" in stderr


def test_an_async_consumer_that_was_not_closed_is_told(server: FakeServer) -> None:
    stderr = run(server, "consumer = asyncio.run(consume_async())")
    assert server.committed == {}
    assert "RuntimeWarning: messages of 1 queue" in stderr
    assert "the interpreter ended" in stderr


@pytest.mark.parametrize(
    "end",
    [
        "consume(1).close()",
        "consumer = consume(1)\nconsumer.commit()",
        "async def main():\n    async with await consume_async():\n        pass\nasyncio.run(main())",
        # A forked child has nothing to commit for its parent.
        """
        consumer = consume(1)
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        consumer.close()
        """,
    ],
)
def test_nothing_is_told_where_all_is_committed(server: FakeServer, end: str) -> None:
    assert run(server, end) == ""
    assert server.committed == {("g", "t", 0): 5}


@pytest.mark.parametrize("options", ["auto_commit=False", "group=''"])
def test_who_commits_by_himself_is_told_nothing(server: FakeServer, options: str) -> None:
    assert run(server, f"consumer = consume(2, {options})") == ""
    assert server.committed == {}
