"""`flush`, and what becomes of messages on their way when the program ends without `close`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from protomq import AsyncProducer, Producer
from protomq.errors import (
    ClosedError,
    ConfigurationError,
    InvalidArgumentError,
    RequestTimeoutError,
)
from tests.support.fake_cluster import (
    FakeAsyncTransport,
    FakeCluster,
    FakeSyncTransport,
    SendCall,
)

ROOT = Path(__file__).parents[3]


class Gate:
    """Holds all requests back until it is opened."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.open = threading.Event()
        cluster.on_send = self.wait

    def wait(self, call: SendCall) -> None:
        assert self.open.wait(60)


def test_flush_waits_until_all_that_was_sent_before_is_stored() -> None:
    cluster = FakeCluster()
    gate = Gate(cluster)
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        producer.flush()  # Nothing to wait for.
        futures = [producer.send_async("T", b"%d" % i) for i in range(100)]
        with pytest.raises(RequestTimeoutError, match="100 messages have no outcome yet"):
            producer.flush(0.01)
        gate.open.set()
        producer.flush()
        assert all(future.done() for future in futures)
        assert len(cluster.bodies()) == 100
        with pytest.raises(ConfigurationError):
            producer.flush(-1)
    with pytest.raises(ClosedError):
        producer.flush()


def test_flush_leaves_errors_to_the_futures() -> None:
    cluster = FakeCluster()
    cluster.script("a", InvalidArgumentError("no"))
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        future = producer.send_async("T", b"x")
        producer.flush()
        assert isinstance(future.exception(0), InvalidArgumentError)


async def test_flush_waits_for_the_sends_of_other_tasks() -> None:
    cluster = FakeCluster()
    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as producer:
        await producer.flush()
        tasks = [asyncio.create_task(producer.send("T", b"%d" % i)) for i in range(100)]
        await asyncio.sleep(0)  # They begin.
        await producer.flush()
        assert len(cluster.bodies()) == 100
        await asyncio.gather(*tasks)


# -- the end of the program ------------------------------------------------------------------------------------------------

PROLOGUE = """
import atexit, sys, threading
# Run in reverse order: this one after the SDK's own.
atexit.register(lambda: print("stored", len(cluster.bodies())))
import concurrent.futures.thread
ended = threading.Event()
# Runs when the main thread has ended, between the SDK's hook and the join of the sending threads.
threading._register_atexit(ended.set)
import asyncio
from protomq import AsyncProducer, Producer
from protomq.errors import ShuttingDownError
from tests.support.fake_cluster import FakeAsyncTransport, FakeCluster, FakeSyncTransport
cluster = FakeCluster()
began = threading.Event()
"""


def run_program(text: str) -> tuple[str, str]:
    """What a program wrote to stdout and stderr, run to its end."""
    finished = subprocess.run(
        [sys.executable, "-c", PROLOGUE + text],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return finished.stdout, finished.stderr


def test_what_send_async_left_behind_is_sent_when_the_program_ends() -> None:
    stdout, stderr = run_program("""
producer = Producer(transport=FakeSyncTransport(cluster), coalesce_count_max=2, send_timeout_s=30)
cluster.on_send = lambda call: began.wait(60)
for number in range(1000):
    producer.send_async("T", b"%04d" % number)
began.set()
""")
    assert (stdout, stderr) == ("stored 1000\n", "")


def test_what_cannot_be_sent_at_the_end_is_told_with_its_number() -> None:
    stdout, stderr = run_program("""
producer = Producer(transport=FakeSyncTransport(cluster), send_timeout_s=1.0, retries=0)
producer.send("T", b"route")

def refuse(call):
    # Until the main thread has ended nobody gets an answer.
    ended.wait(60)
    raise ShuttingDownError("bye")

cluster.on_send = refuse
for number in range(7):
    producer.send_async("T", b"x")
""")
    assert stdout == "stored 1\n"
    assert "RuntimeWarning: 7 messages were not sent, or nobody knows: the interpreter" in stderr
    assert "flush() or close()" in stderr


def test_nothing_is_told_where_the_producer_was_flushed_or_closed() -> None:
    stdout, stderr = run_program("""
first = Producer(transport=FakeSyncTransport(cluster))
first.send_async("T", b"x")
first.flush()
with Producer(transport=FakeSyncTransport(cluster)) as second:
    second.send_async("T", b"y")
""")
    assert (stdout, stderr) == ("stored 2\n", "")


def test_sends_that_the_end_of_the_loop_cuts_off_are_told_with_their_number() -> None:
    stdout, stderr = run_program("""
class Slow(FakeAsyncTransport):
    async def call(self, *arguments, **more):
        await asyncio.sleep(3600)

async def main():
    global producer, tasks
    producer = AsyncProducer(transport=Slow(cluster))
    tasks = [asyncio.create_task(producer.send("T", b"x")) for _ in range(5)]
    await asyncio.sleep(0.01)

asyncio.run(main())
""")
    assert stdout == "stored 0\n"
    assert "RuntimeWarning: 5 messages were not sent, or nobody knows: the event loop" in stderr


def test_a_forked_child_has_nothing_of_its_parent_to_send() -> None:
    stdout, stderr = run_program("""
import os
producer = Producer(transport=FakeSyncTransport(cluster))
producer.send("T", b"route")
cluster.on_send = lambda call: began.wait(60)
for number in range(3):
    producer.send_async("T", b"x")
child = os.fork()
if child == 0:
    atexit.unregister(print)
    sys.exit()
_, status = os.waitpid(child, 0)
print("child", status)
began.set()
""")
    assert "child 0\n" in stdout
    assert stdout.endswith("stored 4\n")
    assert "messages" not in stderr
