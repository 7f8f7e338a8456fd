"""`flush`, and what becomes of messages on their way when the program ends without `close`."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, as_completed, wait
from pathlib import Path
from typing import Any

import pytest

from protomq import AsyncProducer, Producer, SendResult
from protomq._calls_under_way import TaskCalls
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


def fail_all(cluster: FakeCluster) -> None:
    def refuse(call: SendCall) -> None:
        raise InvalidArgumentError("no")

    cluster.on_send = refuse


def test_flush_tells_failures_that_nobody_has_looked_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster()
    fail_all(cluster)
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        futures = [producer.send_async("T", b"%d" % i) for i in range(5)]
        with pytest.warns(RuntimeWarning, match="5 messages of send_async.*InvalidArgument") as told:
            producer.flush()
        assert told[0].filename == __file__
        assert "5 messages of send_async" in caplog.text
        producer.flush()  # And no more of them here, nor by `close`.
        assert all(isinstance(future.exception(0), InvalidArgumentError) for future in futures)


def end_with_close(transport: FakeSyncTransport) -> None:
    producer = Producer(transport=transport)
    producer.send_async("T", b"x")
    producer.close()
    producer.close()


def end_of_with(transport: FakeSyncTransport) -> None:
    with Producer(transport=transport) as producer:
        producer.send_async("T", b"x")


@pytest.mark.parametrize("end", [end_with_close, end_of_with])
def test_the_end_of_a_producer_tells_failures_that_nobody_has_looked_at(
    end: Callable[[FakeSyncTransport], None],
) -> None:
    cluster = FakeCluster()
    fail_all(cluster)
    with pytest.warns(RuntimeWarning, match="1 message of send_async was not stored") as told:
        end(FakeSyncTransport(cluster))
    assert [warning.filename for warning in told] == [__file__]


def see_result(future: Future[SendResult]) -> None:
    with pytest.raises(InvalidArgumentError):
        future.result(60)


@pytest.mark.parametrize(
    "look",
    [
        lambda future: future.exception(60),
        see_result,
        lambda future: future.add_done_callback(lambda _: None),
        lambda future: next(as_completed([future])).exception(),
    ],
    ids=["exception", "result", "callback", "as_completed"],
)
def test_a_failure_that_somebody_has_looked_at_is_not_told(
    look: Callable[[Future[SendResult]], object],
    recwarn: pytest.WarningsRecorder,
) -> None:
    cluster = FakeCluster()
    fail_all(cluster)
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        look(producer.send_async("T", b"x"))
        producer.flush()
    assert not recwarn.list


def test_who_looked_before_the_failure_has_seen_it() -> None:
    cluster = FakeCluster()
    asked = threading.Event()

    def refuse(call: SendCall) -> None:
        assert asked.wait(60)
        raise InvalidArgumentError("no")

    cluster.on_send = refuse
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        future = producer.send_async("T", b"x")
        with pytest.raises(TimeoutError):
            future.result(0)
        asked.set()
        assert not wait([future], 60).not_done


async def test_asyncio_tells_failures_of_tasks_that_nobody_has_looked_at() -> None:
    cluster = FakeCluster()
    fail_all(cluster)
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as producer:
        tasks = [asyncio.create_task(producer.send("T", b"%d" % i)) for i in range(5)]
        await asyncio.sleep(0)  # They begin.
        await producer.flush()
        await asyncio.wait(tasks)
    del tasks
    gc.collect()
    assert [type(context["exception"]) for context in told] == [InvalidArgumentError] * 5


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [({}, {"sharding_key": "k"}), ({}, {"timeout_s": 5.0}), ({"pending_size_max_bytes": 2_000}, {}), ({}, {"delay": 0.1})],
    ids=["by a key", "with a time-out", "waiting for room", "delayed"],
)
async def test_flush_waits_for_sends_of_which_no_line_knows_yet(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    cluster = FakeCluster()
    async with AsyncProducer(transport=FakeAsyncTransport(cluster), **settings) as producer:
        tasks = [asyncio.create_task(producer.send("T", bytes(1_000), **arguments)) for _ in range(20)]
        batch = asyncio.create_task(producer.send_batch("T", [b"x"] * 5))
        await asyncio.sleep(0)  # They begin.
        await producer.flush()
        assert len(cluster.bodies()) == 25
        await asyncio.gather(*tasks, batch)


async def test_flush_says_how_many_sends_of_which_no_line_knows_have_no_outcome_and_waits_for_no_later_ones() -> None:
    calls = TaskCalls()
    goes_on = asyncio.Event()

    async def call() -> None:
        with calls.one():
            await goes_on.wait()

    first = [asyncio.create_task(call()) for _ in range(3)]
    await asyncio.sleep(0)
    before = frozenset(calls.now)
    later = asyncio.create_task(call())
    await asyncio.sleep(0)
    assert await calls.wait(0.001, before) == 3
    first[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await first[0]
    assert await calls.wait(0.001, before) == 2
    waiting = asyncio.create_task(calls.wait(60.0, before))
    await asyncio.sleep(0)
    for task in first[1:]:
        task.cancel()
    assert await waiting == 0
    assert not later.done()
    goes_on.set()
    assert await calls.wait(60.0) == 0
    await later


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


def test_what_failed_before_the_end_is_told_where_nobody_closed_the_producer() -> None:
    _, stderr = run_program("""
from concurrent.futures import wait
producer = Producer(transport=FakeSyncTransport(cluster), retries=0)

def refuse(call):
    raise ShuttingDownError("bye")

cluster.on_send = refuse
seen, unseen = producer.send_async("T", b"x"), producer.send_async("T", b"x")
seen.exception()
wait([unseen])
""")
    assert "RuntimeWarning: 1 message was not sent, or nobody knows: the interpreter" in stderr


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
