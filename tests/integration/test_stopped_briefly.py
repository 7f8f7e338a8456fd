"""Members that are stopped (SIGSTOP) for longer than their own clocks allow, and less than the broker waits: they go on as before.

The broker confirms their memberships when they wake: nothing comes again, in order nothing steps back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from protomq import Admin, MessageQueue, Producer
from protomq.testing import Broker
from tests.support.body_files import bodies
from tests.support.waiting import PATIENCE_S, wait_for

GAP_S = 6.0
STOPPED_S = 5.6
"""More than 0.9 times GAP_S, which is what the member's own clock allows, whenever its last call was sent."""
QUEUES = 4
EVERY_S = 0.05
MEMBER = """
import asyncio, os, sys
from protomq import AsyncPushConsumer, ProtomqError, PullConsumer, PushConsumer

namesrv, seen, group, kind, transport = sys.argv[1:]
settings = {"namesrv": namesrv, "transport": transport}
line = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def listen(message):
    os.write(line, message.body + b"\\n")

async def listen_async(message):
    listen(message)

async def main():
    consumer = AsyncPushConsumer(group, orderly="orderly" in kind, **settings)
    consumer.subscribe("t", listen_async)
    await consumer.run()

if "coroutines" in kind:
    asyncio.run(main())
elif kind == "pulls":
    with PullConsumer(group, auto_commit=False, **settings) as consumer:
        consumer.subscribe("t")
        while True:
            for message in consumer.poll(1):
                listen(message)
            consumer.commit()
else:
    consumer = PushConsumer(group, orderly="orderly" in kind, **settings)
    consumer.subscribe("t", listen)
    consumer.run()
"""
KINDS = ("threads", "orderly threads", "coroutines", "orderly coroutines", "pulls")


def has_queues(admin: Admin, groups: list[str], count: int) -> bool:
    """Whether each group has that many members, which have all queues."""
    for group in groups:
        members = admin.group_members(group)
        if len(members) != count or sum(queue.topic == "t" for member in members for queue in member.queues) != QUEUES:
            return False
    return True


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
@pytest.mark.parametrize("count", [1, 2])
def test_one_that_is_stopped_for_a_moment_repeats_nothing(transport: str, count: int, tmp_path: Path) -> None:
    groups = {f"g{i}": kind for i, kind in enumerate(KINDS)}
    seen = {group: [tmp_path / f"{group}.{i}" for i in range(count)] for group in groups}
    told = tmp_path / "told"
    sent: list[str] = []
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(environment={"PROTOMQ_MEMBER_GAP_MS": str(int(GAP_S * 1000))}))
        admin = stack.enter_context(Admin(namesrv=broker.namesrv))
        producer = stack.enter_context(Producer(namesrv=broker.namesrv, send_timeout_s=10))
        admin.create_topic("t", write_queues=QUEUES, read_queues=QUEUES)
        (broker_name,) = admin.create_topic("u")
        log = stack.enter_context(told.open("wb"))
        processes = []
        for group, kind in groups.items():
            for path in seen[group]:
                command = [sys.executable, "-c", MEMBER, broker.namesrv, str(path), group, kind, transport]
                process = subprocess.Popen(command, stdout=log, stderr=log)
                stack.callback(process.wait)
                stack.callback(process.kill)
                processes.append(process)
        wait_for(lambda: has_queues(admin, list(groups), count), PATIENCE_S)
        ends = threading.Event()

        def send() -> None:
            while not ends.wait(EVERY_S):
                body = str(len(sent))
                producer.send("t", body.encode(), queue=MessageQueue("t", broker_name, len(sent) % QUEUES))
                sent.append(body)

        def have_all() -> bool:
            return all(set(bodies(*paths)) >= set(sent) for paths in seen.values())

        sender = threading.Thread(target=send)
        sender.start()
        stack.callback(sender.join)
        stack.callback(ends.set)
        wait_for(lambda: all(bodies(path) for paths in seen.values() for path in paths), PATIENCE_S)
        stopped = processes[::count]
        for process in stopped:
            os.kill(process.pid, signal.SIGSTOP)
        ends.wait(STOPPED_S)
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)
        before = len(sent)
        wait_for(lambda: len(sent) > before + 100, PATIENCE_S)
        ends.set()
        sender.join()
        wait_for(have_all, PATIENCE_S)
    repeated = {groups[group]: [body for body, times in bodies(*paths).items() if times > 1] for group, paths in seen.items()}
    assert "given this member up" not in told.read_text()
    assert not any(repeated.values()), repeated
