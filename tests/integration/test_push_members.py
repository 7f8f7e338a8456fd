"""A group of push consumers in processes of their own: one is killed, or stopped past its time and woken; the other has its messages."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from protomq import Admin, Producer
from protomq.testing import Broker
from tests.support.body_files import bodies, member_process
from tests.support.waiting import PATIENCE_S, wait_for

MEMBER = """
import asyncio, os, sys
from protomq import AsyncPushConsumer, PushConsumer

namesrv, seen, kind = sys.argv[1:]
settings = {"namesrv": namesrv, "commit_interval_s": 0.1, "orderly": "orderly" in kind}
line = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def listen(message):
    os.write(line, message.body + b"\\n")

async def listen_async(message):
    listen(message)

async def main():
    consumer = AsyncPushConsumer("g", **settings)
    consumer.subscribe("t", listen_async)
    await consumer.run()

if "coroutines" in kind:
    asyncio.run(main())
else:
    consumer = PushConsumer("g", **settings)
    consumer.subscribe("t", listen)
    consumer.run()
"""


def shares(admin: Admin) -> list[int]:
    """How many queues of the topic each member has."""
    return sorted(sum(queue.topic == "t" for queue in member.queues) for member in admin.group_members("g"))


def test_a_killed_members_messages_come_to_the_other_and_nobody_is_said_to_differ(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with Broker() as broker, Admin(namesrv=broker.namesrv) as admin, Producer(namesrv=broker.namesrv) as producer:
        admin.create_topic("t", write_queues=8, read_queues=8)
        with member_process(MEMBER, broker.namesrv, one, "threads") as first, member_process(MEMBER, broker.namesrv, two, "threads"):
            wait_for(lambda: shares(admin) == [4, 4], PATIENCE_S)
            for number in range(400):
                producer.send("t", b"%d" % number)
            wait_for(lambda: len(bodies(one)) and len(bodies(two)), PATIENCE_S)
            first.kill()
            for number in range(400, 800):
                producer.send("t", b"%d" % number)
            wait_for(lambda: len(bodies(one, two)) == 800, PATIENCE_S)
        told = broker.log_text()
    assert max(bodies(one, two).values()) <= 2
    assert "not alike" not in told


@pytest.mark.parametrize("kind", ["threads", "orderly coroutines"])
def test_one_that_is_stopped_past_its_time_and_woken_begins_nothing_that_the_other_has(kind: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with (
        Broker(environment={"PROTOMQ_MEMBER_GAP_MS": "3000"}) as broker,
        Admin(namesrv=broker.namesrv) as admin,
        Producer(namesrv=broker.namesrv) as producer,
    ):
        admin.create_topic("t", write_queues=8, read_queues=8)

        def send(first: int) -> set[str]:
            numbers = range(first, first + 80)
            for number in numbers:
                producer.send("t", b"%d" % number)
            return {str(number) for number in numbers}

        with member_process(MEMBER, broker.namesrv, one, kind) as stopped, member_process(MEMBER, broker.namesrv, two, kind):
            wait_for(lambda: shares(admin) == [4, 4], PATIENCE_S)
            before = send(0)
            wait_for(lambda: set(bodies(one, two)) == before, PATIENCE_S)
            had = set(bodies(one))
            assert had
            os.kill(stopped.pid, signal.SIGSTOP)
            meanwhile = send(80)
            wait_for(lambda: set(bodies(two)) >= meanwhile, PATIENCE_S)
            assert shares(admin) == [8]
            os.kill(stopped.pid, signal.SIGCONT)
            wait_for(lambda: shares(admin) == [4, 4], PATIENCE_S)
            after = send(160)
            wait_for(lambda: set(bodies(one, two)) == before | meanwhile | after, PATIENCE_S)
            wait_for(lambda: set(bodies(one)) & after, PATIENCE_S)
    # It was stopped between two messages: what it has after that is its share of what was sent after it woke.
    assert set(bodies(one)) <= had | after
    # Its last commit may have been lost with the stop.
    assert {body for body, count in bodies(one, two).items() if count > 1} <= had
