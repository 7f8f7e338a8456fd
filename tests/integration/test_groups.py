"""Groups with real processes: members share, die, are stopped, have one name; the broker goes and comes back."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from protomq import Admin, AsyncPullConsumer, MessageQueue, Producer, PullConsumer, QueueListener
from protomq.allocation import Circle
from protomq.testing import Broker
from tests.support.cli import jsonl, run
from tests.support.member_processes import member_process, read_until
from tests.support.waiting import PATIENCE_S, async_wait_for, fastest_s

MEMBER = """
import sys
from protomq import PullConsumer
with PullConsumer("g", namesrv=sys.argv[1], auto_commit_interval_s=0.1) as member:
    member.subscribe("t")
    had = None
    while True:
        messages = member.poll(0.1)
        if len(member.assignment()) != had:
            had = len(member.assignment())
            print("has", had, flush=True)
        for message in messages:
            print("got", message.body.decode(), flush=True)
"""


BEGINS_LATE = """
import sys, time
from protomq import PullConsumer
with PullConsumer("g", namesrv=sys.argv[1], begin="latest", auto_commit_interval_s=600) as member:
    member.subscribe("t")
    print("has", len(member.assignment()), flush=True)
    time.sleep(600)
"""

BEGINS_LATE_ASYNC = """
import asyncio, sys
from protomq import AsyncPullConsumer
async def main():
    async with AsyncPullConsumer("g", namesrv=sys.argv[1], begin="latest", auto_commit_interval_s=600) as member:
        await member.subscribe("t")
        print("has", len(member.assignment()), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""

WAITS_FOR_TOPIC = """
import sys
from protomq import PullConsumer
with PullConsumer("g", namesrv=sys.argv[1], begin="latest", auto_commit=False) as member:
    member.subscribe("later")
    print("waits", flush=True)
    while True:
        for message in member.poll(1):
            print("got", flush=True)
"""

WAITS_FOR_TOPIC_ASYNC = """
import asyncio, sys
from protomq import AsyncPullConsumer
async def main():
    async with AsyncPullConsumer("g", namesrv=sys.argv[1], begin="latest", auto_commit=False) as member:
        await member.subscribe("later")
        print("waits", flush=True)
        while True:
            for message in await member.poll(1):
                print("got", flush=True)
asyncio.run(main())
"""

WAITS_FOR_TOPIC_PUSH = """
import sys, threading
from protomq import PushConsumer
member = PushConsumer("g", namesrv=sys.argv[1], begin="latest", commit_interval_s=600)
@member.on("later")
def got(message):
    print("got", flush=True)
    threading.Event().wait()
member.start()
print("waits", flush=True)
threading.Event().wait()
"""

FAILS = """
import sys, threading
from protomq import PushConsumer, Retry
member = PushConsumer("g", namesrv=sys.argv[1], begin="latest", commit_interval_s=600)
@member.on("t")
def fail(message):
    print("got", message.attempt, flush=True)
    return Retry(delay=0 if message.attempt == 0 else 600)
member.start()
print("started", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as made:
        make_topic(made)
        yield made


def make_topic(broker: Broker, queues: int = 4, *, update: bool = False) -> None:
    with Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic("t", write_queues=queues, read_queues=queues, update=update)


def poll_until(is_there: Callable[[], bool], *members: PullConsumer) -> float:
    """Polls all members in turn; how long it took, in seconds."""
    began_s = time.monotonic()
    while not is_there():
        assert time.monotonic() - began_s < PATIENCE_S, [member.assignment() for member in members]
        for member in members:
            member.poll(0.02)
    return time.monotonic() - began_s


def counts(*members: PullConsumer) -> list[int]:
    return [len(member.assignment()) for member in members]


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_members_share_and_the_rest_take_over_from_one_that_leaves(
    broker: Broker, transport: str
) -> None:
    with ExitStack() as stack:
        members = [
            stack.enter_context(
                PullConsumer(
                    "g",
                    namesrv=broker.grpc_address if transport == "grpc" else broker.namesrv,
                    transport=transport,  # type: ignore[arg-type]
                )
            )
            for _ in range(3)
        ]
        for member in members:
            member.subscribe("t")
        poll_until(lambda: counts(*members) in ([2, 1, 1], [1, 2, 1], [1, 1, 2]), *members)
        members[0].close()
        poll_until(lambda: counts(*members[1:]) == [2, 2], *members[1:])


def test_the_queues_of_a_member_that_was_killed_are_taken_over_at_once(broker: Broker) -> None:
    with member_process(MEMBER, broker) as victim, PullConsumer("g", namesrv=broker.namesrv) as survivor:
        read_until(victim, "has 4")
        survivor.subscribe("t")
        poll_until(lambda: counts(survivor) == [2], survivor)
        with Producer(namesrv=broker.namesrv) as producer:
            for number in range(40):
                producer.send("t", b"%d" % number)
        victim.kill()
        poll_until(lambda: counts(survivor) == [4], survivor)
        with Producer(namesrv=broker.namesrv) as producer:
            last = {producer.send("t", b"last").queue for _ in range(8)}
        got: set[MessageQueue] = set()
        while got != last:
            found = survivor.poll(PATIENCE_S)
            assert found, "messages of the dead member's queues do not come"
            got.update(message.queue for message in found if message.body == b"last")


@pytest.mark.parametrize("program", [BEGINS_LATE, BEGINS_LATE_ASYNC])
def test_what_comes_after_the_first_member_began_at_the_end_is_nobodys_loss_if_it_is_killed_at_once(
    broker: Broker, program: str
) -> None:
    with Producer(namesrv=broker.namesrv) as producer:
        for _ in range(8):
            producer.send("t", b"before")
        with member_process(program, broker) as victim:
            read_until(victim, "has 4")
            victim.kill()
        for number in range(8):
            producer.send("t", b"%d" % number)
    with PullConsumer("g", namesrv=broker.namesrv, begin="latest") as survivor:
        survivor.subscribe("t")
        got: list[bytes] = []
        while len(got) < 8:
            found = survivor.poll(PATIENCE_S)
            assert found, got
            got += [message.body for message in found]
    assert sorted(got) == [b"%d" % number for number in range(8)]


@pytest.mark.parametrize("program", [WAITS_FOR_TOPIC, WAITS_FOR_TOPIC_ASYNC, WAITS_FOR_TOPIC_PUSH])
def test_a_topic_that_is_made_after_the_first_member_began_loses_nothing_if_it_is_killed_before_it_commits(
    broker: Broker, program: str
) -> None:
    sent = [b"%d" % number for number in range(8)]
    with member_process(program, broker) as victim:
        read_until(victim, "waits")
        with Producer(namesrv=broker.namesrv) as producer:
            for body in sent:
                producer.send("later", body)
        read_until(victim, "got")
        victim.kill()
    with PullConsumer("g", namesrv=broker.namesrv, begin="latest") as survivor:
        survivor.subscribe("later")
        got: list[bytes] = []
        while len(got) < 8:
            found = survivor.poll(PATIENCE_S)
            assert found, got
            got += [message.body for message in found]
    assert sorted(got) == sent


def test_a_retry_that_fell_due_before_the_first_commit_is_not_skipped_by_a_group_that_begins_at_the_end(broker: Broker) -> None:
    with member_process(FAILS, broker) as victim:
        read_until(victim, "started")
        with Producer(namesrv=broker.namesrv) as producer:
            producer.send("t", b"poison")
        read_until(victim, "got 1")
        victim.kill()
    with PullConsumer("g", namesrv=broker.namesrv, begin="latest") as survivor:
        survivor.subscribe("t")
        survivor.subscribe_retries()
        got: set[str] = set()
        while got != {"t", "%RETRY%g"}:
            found = survivor.poll(PATIENCE_S)
            assert found, got
            got |= {message.topic for message in found}


def test_a_join_repeats_nothing_that_was_committed_and_loses_nothing(broker: Broker) -> None:
    sent = [b"%d" % number for number in range(400)]
    with Producer(namesrv=broker.namesrv) as producer, ExitStack() as stack:
        for body in sent[:200]:
            producer.send("t", body)
        members = [stack.enter_context(PullConsumer("g", namesrv=broker.namesrv)) for _ in range(2)]
        got: list[bytes] = []
        members[0].subscribe("t")
        while len(got) < 200:
            got += [message.body for message in members[0].poll(0.1, 16)]
        members[1].subscribe("t")
        for body in sent[200:]:
            producer.send("t", body)
        ends_s = time.monotonic() + PATIENCE_S
        while len(got) < 400 and time.monotonic() < ends_s:
            for member in members:
                got += [message.body for message in member.poll(0.02, 16)]
        assert counts(*members) == [2, 2]
    assert sorted(got) == sorted(sent)


def test_one_that_was_stopped_past_its_time_gives_up_its_queues_when_it_wakes() -> None:
    with Broker(environment={"PROTOMQ_MEMBER_GAP_MS": "5000"}) as broker:
        make_topic(broker)
        with member_process(MEMBER, broker) as stopped, PullConsumer("g", namesrv=broker.namesrv) as other:
            read_until(stopped, "has 4")
            other.subscribe("t")
            poll_until(lambda: counts(other) == [2], other)
            os.kill(stopped.pid, signal.SIGSTOP)
            poll_until(lambda: counts(other) == [4], other)
            os.kill(stopped.pid, signal.SIGCONT)
            poll_until(lambda: counts(other) == [2], other)
            read_until(stopped, "has 0")
            read_until(stopped, "has 2")


def test_a_broker_that_restarts_under_a_group_takes_nothing_from_anybody(tmp_path: Path) -> None:
    lost: list[MessageQueue] = []

    class Notes(QueueListener):
        def on_lost(self, queues: Sequence[MessageQueue]) -> None:
            lost.extend(queues)

    with Broker(data_dir=tmp_path) as broker, ExitStack() as stack:
        make_topic(broker)
        members = [
            stack.enter_context(PullConsumer("g", namesrv=broker.namesrv, listener=Notes()))
            for _ in range(2)
        ]
        for member in members:
            member.subscribe("t")
        poll_until(lambda: counts(*members) == [2, 2], *members)
        before = [member.assignment() for member in members]
        broker.kill()
        for member in members:
            member.poll(0.2)
        broker.start()
        with Admin(namesrv=broker.namesrv) as admin:
            poll_until(lambda: len(admin.group_members("g")) == 2, *members)
        assert [member.assignment() for member in members] == before
        assert lost == []


def test_two_with_one_client_id_each_get_a_share_and_are_listed(broker: Broker) -> None:
    with ExitStack() as stack:
        twins = [
            stack.enter_context(PullConsumer("g", namesrv=broker.namesrv, client_id="twin"))
            for _ in range(2)
        ]
        for twin in twins:
            twin.subscribe("t", ["A"])
        poll_until(lambda: counts(*twins) == [2, 2], *twins)
        with Admin(namesrv=broker.namesrv) as admin:
            poll_until(
                lambda: [len(found.queues) for found in admin.group_members("g")] == [2, 2], *twins
            )
        rows = jsonl(run("group", "members", "g", "--output", "jsonl", namesrv=broker.namesrv))
        assert [(row["member"], row["topic"], row["filter"], row["queues"]) for row in rows] == [
            ("twin", "t", "tags A", 2)
        ] * 2


REBALANCE_S = 1.0
"""From a join, a leave, a crash, or the answer to who made new queues, until all queues are shared again."""


def test_a_join_a_leave_and_a_crash_are_balanced_within_a_second(broker: Broker) -> None:
    with PullConsumer("g", namesrv=broker.namesrv) as first:
        first.subscribe("t")

        def join() -> float:
            with PullConsumer("g", namesrv=broker.namesrv) as second:
                began_s = time.monotonic()
                second.subscribe("t")
                poll_until(lambda: counts(first, second) == [2, 2], first, second)
                took_s = time.monotonic() - began_s
            poll_until(lambda: counts(first) == [4], first)
            return took_s

        def leave() -> float:
            with PullConsumer("g", namesrv=broker.namesrv) as second:
                second.subscribe("t")
                poll_until(lambda: counts(first, second) == [2, 2], first, second)
            return poll_until(lambda: counts(first) == [4], first)

        def crash() -> float:
            with member_process(MEMBER, broker) as victim:
                poll_until(lambda: counts(first) == [2], first)
                read_until(victim, "has 2")
                victim.kill()
                return poll_until(lambda: counts(first) == [4], first)

        for change in (join, leave, crash):
            assert fastest_s(change, REBALANCE_S) < REBALANCE_S, change.__name__


def test_new_queues_get_owners_within_a_second(broker: Broker) -> None:
    with ExitStack() as stack:
        members = [stack.enter_context(PullConsumer("g", namesrv=broker.namesrv)) for _ in range(2)]
        for member in members:
            member.subscribe("t")
        poll_until(lambda: counts(*members) == [2, 2], *members)
        queues = 4

        def grow() -> float:
            nonlocal queues
            queues += 4
            make_topic(broker, queues, update=True)
            return poll_until(lambda: counts(*members) == [queues // 2, queues // 2], *members)

        assert fastest_s(grow, REBALANCE_S) < REBALANCE_S


def test_members_that_are_not_alike_are_told_the_difference(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "protomq"),
        PullConsumer("g", namesrv=broker.namesrv, instance_name="one") as one,
        PullConsumer("g", namesrv=broker.namesrv, instance_name="two", allocation=Circle()) as two,
    ):
        one.subscribe("t")
        two.subscribe("t")
        poll_until(
            lambda: sum("shares queues out by" in text for text in caplog.messages) >= 2, one, two
        )


def test_a_broadcaster_gets_everything_and_is_no_member(broker: Broker) -> None:
    with (
        PullConsumer("g", namesrv=broker.namesrv) as one,
        PullConsumer("g", namesrv=broker.namesrv, broadcasting=True) as everything,
    ):
        one.subscribe("t")
        everything.subscribe("t")
        assert counts(one, everything) == [4, 4]


def test_async_members_share(broker: Broker) -> None:
    revoked: list[MessageQueue] = []

    class Notes(QueueListener):
        async def on_revoked(self, queues: Sequence[MessageQueue]) -> None:
            await asyncio.sleep(0)
            revoked.extend(queues)

    async def poll_for_ever(member: AsyncPullConsumer) -> None:
        while True:
            await member.poll(0.1)

    async def main() -> None:
        first = AsyncPullConsumer("g", namesrv=broker.namesrv, listener=Notes())
        second = AsyncPullConsumer("g", namesrv=broker.namesrv)
        await first.subscribe("t")
        assert len(first.assignment()) == 4
        await second.subscribe("t")
        tasks = [asyncio.create_task(poll_for_ever(member)) for member in (first, second)]
        await async_wait_for(lambda: [len(first.assignment()), len(second.assignment())] == [2, 2])
        assert len(revoked) == 2
        tasks[0].cancel()
        await first.close()
        await async_wait_for(lambda: len(second.assignment()) == 4)
        tasks[1].cancel()
        await second.close()

    asyncio.run(main())
