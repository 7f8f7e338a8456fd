"""A group that was deleted stays deleted: a real broker, kill -9, and no cache left."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from protomq import Admin, MessageQueue, Producer, PullConsumer
from protomq.errors import GroupInUseError
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, wait_for

CACHES = ("config/consumerOffsets.json", "checkpoint", "consumequeue", "index", "repeatedsends")


def commit(broker: Broker, group: str, topic: str, queue_offset: int) -> None:
    with PullConsumer(group, namesrv=broker.namesrv, auto_commit=False) as consumer:
        queue = consumer.queues(topic)[0]
        consumer.commit({queue: queue_offset})


def committed(broker: Broker, group: str, queue: MessageQueue) -> int | None:
    with PullConsumer(group, namesrv=broker.namesrv, auto_commit=False) as consumer:
        return consumer.committed(queue)


@pytest.mark.slow
def test_a_deleted_group_does_not_come_back_after_kill_9_without_caches(tmp_path: Path) -> None:
    with Broker(data_dir=tmp_path) as broker:
        with Admin(namesrv=broker.namesrv) as admin:
            admin.create_topic("t", write_queues=1)
        with Producer(namesrv=broker.namesrv) as producer:
            queue = [producer.send("t", b"x").queue for _ in range(3)][-1]
        for group in ("gone", "again", "kept"):
            commit(broker, group, "t", 2)
        with Admin(namesrv=broker.namesrv) as admin:
            for group in ("gone", "again"):
                admin.delete_group(group)
        commit(broker, "again", "t", 1)

        for lost in ((), CACHES):
            broker.kill()
            for name in lost:
                path = tmp_path / "store" / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            broker.start()
            with Admin(namesrv=broker.namesrv) as admin:
                assert [group.name for group in admin.list_groups()] == ["again", "kept"]
            found = [committed(broker, group, queue) for group in ("gone", "again", "kept")]
            assert found == [None, 1, 2]


MEMBER = """
import asyncio, sys, threading
from protomq import AsyncPullConsumer, AsyncPushConsumer, PullConsumer, PushConsumer

settings = {"namesrv": sys.argv[1], "transport": sys.argv[2]}
told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), told.set())).start()

def pull():
    with PullConsumer("g", **settings) as consumer:
        consumer.subscribe("t")
        while not told.is_set():
            consumer.poll(0.1)

def push():
    consumer = PushConsumer("g", **settings)
    consumer.subscribe("t", print)
    with consumer:
        told.wait()

async def async_pull():
    async with AsyncPullConsumer("g", **settings) as consumer:
        await consumer.subscribe("t")
        while not told.is_set():
            await consumer.poll(0.1)

async def async_push():
    consumer = AsyncPushConsumer("g", **settings)
    consumer.subscribe("t", print)
    async with consumer:
        await asyncio.to_thread(told.wait)

kind = globals()[sys.argv[3]]
asyncio.run(kind()) if asyncio.iscoroutinefunction(kind) else kind()
"""


def shares(admin: Admin) -> list[int]:
    """How many queues of the topic each member has."""
    return sorted(sum(queue.topic == "t" for queue in member.queues) for member in admin.group_members("g"))


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
@pytest.mark.parametrize("kind", ["pull", "push", "async_pull", "async_push"])
def test_a_group_is_deleted_at_once_when_all_its_members_have_stopped_and_not_before(kind: str, transport: str) -> None:
    with Broker() as broker, Admin(namesrv=broker.namesrv) as admin, ExitStack() as stack:
        admin.create_topic("t", write_queues=2, read_queues=2)
        commit(broker, "g", "t", 0)
        namesrv = broker.grpc_address if transport == "grpc" else broker.namesrv
        command = [sys.executable, "-c", MEMBER, namesrv, transport, kind]
        members = [stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE)) for _ in range(2)]
        for member in members:
            stack.callback(member.kill)
        wait_for(lambda: shares(admin) == [1, 1], PATIENCE_S)
        for member in members:
            with pytest.raises(GroupInUseError):
                admin.delete_group("g")
            member.communicate(timeout=PATIENCE_S)
            assert member.returncode == 0
        admin.delete_group("g")
        assert [group.name for group in admin.list_groups()] == []
