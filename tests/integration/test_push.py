"""Push consumers of both flavours at real brokers: each message once to its listener, and again where something fails."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from protomq import (
    Admin,
    AsyncPushConsumer,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    PushConsumer,
    Reject,
    Retry,
    Suspend,
)
from protomq.errors import ConfigurationError, IllegalFilterError, NoRouteError
from protomq.testing import Broker
from tests.support.push import Push, committed, dead_letters, group_of, send
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture(params=["threads", "coroutines", "functions in a loop"])
def push(request: pytest.FixtureRequest, protomq_server: Broker) -> Push:
    return Push(request.param, protomq_server)


def test_results_are_done_retry_delay_and_dead_letter(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    bodies = send(protomq_producer, protomq_topic, 40)
    group = group_of(protomq_server, protomq_topic, 20, 30)
    seen: list[tuple[bytes, int]] = []

    def listen(message: Message) -> object:
        seen.append((message.body, message.attempt))
        if message.body == b"7":
            raise ValueError(f"seven, {message.attempt}")
        if message.body == b"8":
            return Reject("eight")
        if message.body == b"9" and not message.attempt:
            return Retry(delay=0.02, error="nine")
        return None

    with push(group, protomq_topic, listen) as consumer:
        wait_for(lambda: len(seen) == 43, PATIENCE_S)
        assert dead_letters(protomq_server, group, 2) == {b"7": "ValueError: seven, 2", b"8": "eight"}
        wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
    assert Counter(seen) == Counter([(b, 0) for b in bodies] + [(b"7", 1), (b"7", 2), (b"9", 1)])
    assert committed(protomq_server, group, protomq_topic) == 40
    assert push.left == 0


@pytest.mark.parametrize(
    ("bound", "most"),
    [({"queue_count_max": 1}, 1), ({"queue_count_max": 7}, 7), ({"count_max": 1}, 1), ({"queue_span_max": 3}, 3)],
)
def test_a_bound_of_messages_holds_exactly(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, bound: dict[str, Any], most: int
) -> None:
    for number in range(40):
        key = str(number) if "count_max" in bound else "one"
        protomq_producer.send(protomq_topic, b"%d" % number, sharding_key=key)
    opened: list[int] = []
    consumers: list[Any] = []
    told = threading.Event()

    def listen(_: Message) -> None:
        told.wait(PATIENCE_S)
        opened.append(consumers[0].counts.open)

    with push(f"{protomq_topic}-bound", protomq_topic, listen, concurrency=1, **bound) as consumer:
        consumers.append(consumer)
        told.set()
        wait_for(lambda: consumer.counts.done == 40, PATIENCE_S)
    assert len(opened) == 40
    assert max(opened) == most


def test_a_batch_has_one_result_or_one_for_each_message(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    group = group_of(protomq_server, protomq_topic, 20)
    first: list[bytes] = []
    again: list[bytes] = []

    def listen(batch: list[Message]) -> object:
        assert isinstance(batch, list)
        assert len(batch) <= 10
        for message in batch:
            (again if message.attempt else first).append(message.body)
        return [Retry(delay=0.01) if m.body.endswith(b"5") and not m.attempt else None for m in batch]

    bodies = send(protomq_producer, protomq_topic, 100)
    with push(group, protomq_topic, listen, batch_size=10) as consumer:
        wait_for(lambda: len(first) == 100 and len(again) == 10, PATIENCE_S)
        wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
    assert sorted(first) == sorted(bodies)
    assert sorted(again) == sorted(body for body in bodies if body.endswith(b"5"))


class Gate:
    """A listener that waits on one message, in the way of its flavour."""

    def __init__(self, push: Push, body: bytes) -> None:
        self.seen: list[bytes] = []
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self._in_loop = push.kind == "coroutines"
        self._body = body

    def __call__(self, message: Message) -> Any:
        if message.body != self._body:
            self.seen.append(message.body)
            return None
        self.begun.set()
        if self._in_loop:
            return self._wait_in_loop(message)
        self.let_go.wait(PATIENCE_S)
        self.seen.append(message.body)
        return None

    async def _wait_in_loop(self, message: Message) -> None:
        while not self.let_go.is_set():  # noqa: ASYNC110 - it is set on another thread.
            await asyncio.sleep(0.001)
        self.seen.append(message.body)


def test_a_message_that_hangs_holds_up_no_other_and_is_not_committed(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    bodies = send(protomq_producer, protomq_topic, 200)
    group = group_of(protomq_server, protomq_topic)
    gate = Gate(push, b"3")
    with push(group, protomq_topic, gate, commit_interval_s=0.05) as consumer:
        try:
            wait_for(lambda: len(gate.seen) == 199, PATIENCE_S)
            wait_for(lambda: consumer.counts.open == 1, PATIENCE_S)
            wait_for(lambda: committed(protomq_server, group, protomq_topic) > 0, PATIENCE_S)
            assert committed(protomq_server, group, protomq_topic) < 200
        finally:
            gate.let_go.set()
        wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
    assert sorted(gate.seen) == sorted(bodies)
    assert committed(protomq_server, group, protomq_topic) == 200


def test_a_message_that_a_listener_keeps_for_too_long_comes_again(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    group = group_of(protomq_server, protomq_topic, 20)
    send(protomq_producer, protomq_topic, 1)
    gate = Gate(push, b"0")
    again: list[str] = []

    def listen(message: Message) -> Any:
        if message.attempt:
            again.append(message.last_error)
            return None
        return gate(message)

    with push(group, protomq_topic, listen, consume_timeout_s=0.3) as consumer:
        try:
            wait_for(lambda: again, PATIENCE_S)
            wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
            assert again[0].endswith("was not done with it after 0.3 s")
            assert any("given back, they come again; it is still running" in text for text in caplog.messages)
        finally:
            gate.let_go.set()
    assert len(again) == 1


def test_a_stop_waits_for_listeners_that_run_and_gives_the_rest_to_the_next(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    bodies = send(protomq_producer, protomq_topic, 50)
    group = group_of(protomq_server, protomq_topic)
    gate = Gate(push, b"20")
    with push(group, protomq_topic, gate, concurrency=1):
        gate.begun.wait(PATIENCE_S)
        threading.Timer(0.2, gate.let_go.set).start()
    assert push.left == 0
    assert b"20" in gate.seen
    first = list(gate.seen)
    with push(group, protomq_topic, gate) as consumer:
        wait_for(lambda: set(gate.seen) == set(bodies), PATIENCE_S)
        wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
    twice = [body for body, count in Counter(gate.seen).items() if count > 1]
    assert twice == []
    assert len(first) < 50


def test_a_stop_waits_no_longer_than_it_is_told(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    send(protomq_producer, protomq_topic, 1)
    group = group_of(protomq_server, protomq_topic)
    gate = Gate(push, b"0")
    with push(group, protomq_topic, gate, drain_timeout_s=0.1):
        gate.begun.wait(PATIENCE_S)
    gate.let_go.set()
    assert push.left == 1
    assert any("1 message(s) were not done when the consumer stopped" in text for text in caplog.messages)
    assert committed(protomq_server, group, protomq_topic) == 0


def test_orderly_queues_go_on_with_the_message_that_failed(
    push: Push, protomq_server: Broker, protomq_producer: Producer, protomq_topic: str
) -> None:
    group = f"g-{protomq_topic}"  # Without a limit of its own: a message is tried for ever.
    for number in range(60):
        protomq_producer.send(protomq_topic, b"%d" % number, sharding_key=f"k{number % 3}")
    seen: list[tuple[int, bytes]] = []
    failures: dict[bytes, list[Any]] = {b"10": [Suspend(20), Retry(delay=0.01), Suspend], b"11": [Reject("never")]}
    running: set[int] = set()

    def listen(message: Message) -> object:
        assert message.queue_id not in running
        running.add(message.queue_id)
        try:
            seen.append((message.queue_id, message.body))
            if failures.get(message.body):
                result = failures[message.body].pop(0)
                if result is Suspend:
                    raise RuntimeError("no")
                return result
            return None
        finally:
            running.discard(message.queue_id)

    with push(group, protomq_topic, listen, orderly=True, suspend_ms=10) as consumer:
        wait_for(lambda: len(seen) >= 63, PATIENCE_S)
        assert dead_letters(protomq_server, group, 1) == {b"11": "never"}
        wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
    for key in range(3):
        order = [int(body) for _, body in seen if int(body) % 3 == key]
        assert len(order) == 20 + 3 * (key == 1)
        assert order == sorted(order)
    assert Counter(body for _, body in seen)[b"10"] == 4
    assert len(seen) == 63


def test_in_a_forked_child_a_consumer_does_not_run(push: Push, protomq_topic: str) -> None:
    with push(f"g-{protomq_topic}", protomq_topic, lambda _: None) as consumer:
        assert consumer.is_running
        child = os.fork()
        if child == 0:
            os._exit(int(consumer.is_running))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert consumer.is_running


def test_orderly_batches_are_of_one_queue_and_go_on_with_the_message_that_failed(
    push: Push, protomq_server: Broker, protomq_producer: Producer, protomq_topic: str
) -> None:
    group = f"g-{protomq_topic}"
    for number in range(60):
        protomq_producer.send(protomq_topic, b"%d" % number, sharding_key=f"k{number % 3}")
    seen: dict[int, list[int]] = {}
    done: dict[int, list[int]] = {}
    sizes: list[int] = []
    failures: list[object] = [Suspend(10), Retry(error="again")]
    raised = [25, 25]

    def listen(batch: list[Message]) -> object:
        numbers = [int(message.body) for message in batch]
        sizes.append(len(batch))
        (queue_id,) = {message.queue_id for message in batch}
        seen.setdefault(queue_id, []).append(numbers[0])
        if raised and raised[0] in numbers:
            raise RuntimeError(str(raised.pop()))
        results: list[object] = [Reject("never") if number == 31 else None for number in numbers]
        if failures and 10 in numbers:
            results[numbers.index(10)] = failures.pop(0)
        held_up = next((i for i, result in enumerate(results) if isinstance(result, Suspend | Retry)), len(numbers))
        done.setdefault(queue_id, []).extend(numbers[:held_up])
        return results

    with push(group, protomq_topic, listen, orderly=True, suspend_ms=10, batch_size=8) as consumer:
        wait_for(lambda: consumer.counts.done == 60, PATIENCE_S)
    assert dead_letters(protomq_server, group, 1) == {b"31": "never"}
    assert sorted(number for numbers in done.values() for number in numbers) == list(range(60)), "each once, in its last delivery"
    for numbers in (*done.values(), *seen.values()):
        for key in range(3):
            of_key = [number for number in numbers if number % 3 == key]
            assert of_key == sorted(of_key)
    assert 1 < max(sizes) <= 8
    assert not raised
    assert not failures
    assert committed(protomq_server, group, protomq_topic) == 60


def test_an_orderly_queue_goes_on_after_the_milliseconds_that_its_listener_says(
    push: Push, protomq_topic: str, protomq_producer: Producer
) -> None:
    send(protomq_producer, protomq_topic, 1)
    began_s: list[float] = []

    def listen(message: Message) -> object:
        began_s.append(time.monotonic())
        return Suspend(10) if len(began_s) < 30 else None

    with push(f"g-{protomq_topic}", protomq_topic, listen, orderly=True, suspend_ms=60_000) as consumer:
        wait_for(lambda: consumer.counts.done == 1, PATIENCE_S)
    pauses_s = sorted(later - earlier for earlier, later in pairwise(began_s))
    assert pauses_s[0] >= 0.01
    assert pauses_s[len(pauses_s) // 2] < 0.1, "a look at it once a second is too seldom"


def test_the_dead_letter_of_an_orderly_message_says_how_often_it_was_handed_out(
    push: Push, protomq_server: Broker, protomq_producer: Producer, protomq_topic: str
) -> None:
    group = group_of(protomq_server, protomq_topic, 20)
    send(protomq_producer, protomq_topic, 2)
    attempts: list[int] = []

    def listen(message: Message) -> object:
        if message.body == b"1":
            return None
        attempts.append(message.attempt)
        return Retry(error="always")

    with push(group, protomq_topic, listen, orderly=True, suspend_ms=10, attempts_max=4) as consumer:
        wait_for(lambda: consumer.counts.done == 2, PATIENCE_S)
    with PullConsumer(namesrv=protomq_server.namesrv) as reader:
        reader.subscribe(f"%DLQ%{group}")
        (letter,) = reader.poll(PATIENCE_S)
    assert attempts == [0, 1, 2, 3]
    assert (letter.attempt, letter.last_error) == (4, "always")


def test_memory_is_bounded_whatever_the_backlog(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    count = 6000
    send(protomq_producer, protomq_topic, count)
    group = group_of(protomq_server, protomq_topic)
    let_go = threading.Event()
    most: list[int] = []
    done: list[bytes] = []

    def listen(message: Message) -> Any:
        done.append(message.body)
        return None

    with push(group, protomq_topic, listen, queue_count_max=50, count_max=200) as consumer:
        push.call(consumer.suspend)
        for _ in range(40):
            most.append(consumer.counts.open)
            let_go.wait(0.01)
        push.call(consumer.resume)
        while len(done) < count:
            most.append(consumer.counts.open)
            let_go.wait(0.005)
    assert max(most) <= 200
    assert len(done) == count


HOLDS = """
import asyncio, sys, threading
from pathlib import Path
from protomq import AsyncPushConsumer, PushConsumer

namesrv, group, topic, kind = sys.argv[1:]
settings = {"namesrv": namesrv, "size_max_bytes": 8 << 20, "pull_size_max_bytes": 256 << 10}
held, most_bytes = [], [0]

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def hold(message):
    held.append(message)
    threading.Event().wait()

async def hold_async(message):
    held.append(message)
    await asyncio.Event().wait()

def watch(consumer, before):
    # Its bound is reached, and what was pulled behind it is here, too.
    while consumer.counts.size_bytes < 8 << 20 or len(most_bytes) < 50:
        most_bytes.append(resident_bytes())
        threading.Event().wait(0.02)
    print(max(most_bytes) - before, flush=True)

async def main():
    consumer = AsyncPushConsumer(group, **settings)
    consumer.subscribe(topic, hold_async)
    await consumer.start()
    await asyncio.to_thread(watch, consumer, before)

before = resident_bytes()
if kind == "coroutines":
    asyncio.run(main())
else:
    consumer = PushConsumer(group, **settings)
    consumer.subscribe(topic, hold)
    consumer.start()
    watch(consumer, before)
import os
os._exit(0)
"""


def test_a_process_whose_listeners_hang_grows_by_its_bounds_and_not_by_the_backlog(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    body = os.urandom(128 << 10)
    for _ in range(16):
        protomq_producer.send_batch(protomq_topic, [body] * 48)  # 96 MiB
    for kind in ("threads", "coroutines"):
        words = [sys.executable, "-c", HOLDS, protomq_server.namesrv, f"{kind}-{protomq_topic}", protomq_topic, kind]
        finished = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        # 8 MiB of messages, two answers of 256 KiB of each of eight queues, what waits in connections, and modules.
        assert int(finished.stdout) < 40 << 20, kind


def test_a_suspended_consumer_begins_no_listener(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    group = group_of(protomq_server, protomq_topic)
    seen: list[bytes] = []
    with push(group, protomq_topic, lambda message: seen.append(message.body)) as consumer:
        push.call(consumer.suspend)
        assert consumer.is_suspended
        send(protomq_producer, protomq_topic, 5)
        threading.Event().wait(0.2)
        assert seen == []
        push.call(consumer.resume)
        wait_for(lambda: len(seen) == 5, PATIENCE_S)


def test_a_consumer_that_is_suspended_in_a_run_begins_no_listener_of_that_run(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    """A run may have 256 messages, by how quick the listener was before."""
    group = group_of(protomq_server, protomq_topic)
    seen: list[bytes] = []
    runs, suspended = threading.Event(), threading.Event()

    def count(message: Message) -> None:
        seen.append(message.body)
        if message.body == b"100":
            assert runs.wait(PATIENCE_S)
            consumer.suspend()
            suspended.set()

    first = protomq_producer.queues(protomq_topic)[0]
    protomq_producer.send_batch(protomq_topic, [b"%d" % number for number in range(200)], queue=first)
    with push(group, protomq_topic, count, concurrency=1) as consumer:
        runs.set()
        assert suspended.wait(PATIENCE_S)
        wait_for(lambda: not consumer._state.running_count, PATIENCE_S)
        # A thread that is not the loop's has it suspended in a moment.
        assert len(seen) == 101 if push.kind != "functions in a loop" else len(seen) < 200
        push.call(consumer.resume)
        wait_for(lambda: len(seen) == 200, PATIENCE_S)


def test_concurrency_grows_and_shrinks_while_it_runs(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    group = group_of(protomq_server, protomq_topic)
    let_go = threading.Event()
    lock, running = threading.Lock(), [0]
    at_once: list[int] = []
    """Of each call, how many ran when it began."""

    async def wait() -> None:
        while not let_go.is_set():  # noqa: ASYNC110 - it is set on another thread.
            await asyncio.sleep(0.001)
        running[0] -= 1

    def listen(message: Message) -> Any:
        with lock:
            running[0] += 1
            at_once.append(running[0])
        if push.kind == "coroutines":
            return wait()
        let_go.wait(PATIENCE_S)
        with lock:
            running[0] -= 1
        return None

    send(protomq_producer, protomq_topic, 30)
    with push(group, protomq_topic, listen, concurrency=2) as consumer:
        try:
            wait_for(lambda: running[0] == 2, PATIENCE_S)
            push.call(lambda: consumer.set_concurrency(7))
            wait_for(lambda: running[0] == 7, PATIENCE_S)
            push.call(lambda: consumer.set_concurrency(1))
            assert consumer.concurrency == 1
        finally:
            let_go.set()
        wait_for(lambda: consumer.counts.done == 30, PATIENCE_S)
    # None of the 23 others began before the last of these seven was done, and then one after the other.
    assert at_once == [*range(1, 8), *[1] * 23]


def test_a_new_group_begins_where_it_is_told_to(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    send(protomq_producer, protomq_topic, 6)
    before_ms = time.time_ns() // 1_000_000 + 1
    wait_for(lambda: time.time_ns() // 1_000_000 > before_ms, PATIENCE_S, pause_s=0.001)
    later = send(protomq_producer, protomq_topic, 6, first=6)
    begin = datetime.fromtimestamp((before_ms + 1) / 1_000, UTC)
    seen: list[bytes] = []
    group = group_of(protomq_server, protomq_topic)
    with push(group, protomq_topic, lambda message: seen.append(message.body), begin=begin) as consumer:
        wait_for(lambda: consumer.counts.done == len(later), PATIENCE_S)
        # The next ones of each queue are the first that come after these.
        more = send(protomq_producer, protomq_topic, 12, first=12)
        wait_for(lambda: consumer.counts.done == len(later) + len(more), PATIENCE_S)
    assert sorted(seen) == sorted([*later, *more])


def test_an_orderly_listener_that_hangs_keeps_its_queue_and_no_other(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    """`consume_timeout_s` is not for it: a message that was given back would overtake, or be overtaken."""
    group = group_of(protomq_server, protomq_topic, 20)
    for number in range(40):
        protomq_producer.send(protomq_topic, b"%d" % number, sharding_key=str(number % 10))
    with PullConsumer(namesrv=protomq_server.namesrv) as reader:
        reader.subscribe(protomq_topic)
        stored: list[Message] = []
        while len(stored) < 40:
            stored += reader.poll(PATIENCE_S)
    queue_of = {message.body: message.queue for message in stored}
    hanging = b"3"
    behind = [message.body for message in stored if message.queue == queue_of[hanging]]
    behind = behind[behind.index(hanging) :]
    assert 4 <= len(behind) < 40
    gate = Gate(push, hanging)
    others: list[bytes] = []

    def listen(message: Message) -> Any:
        assert not message.attempt
        return gate(message)

    settings: dict[str, Any] = {"orderly": True, "consume_timeout_s": 0.1, "commit_interval_s": 0.05}
    with push(group, protomq_topic, listen, **settings) as consumer:
        try:
            assert gate.begun.wait(PATIENCE_S)
            wait_for(lambda: len(gate.seen) == 40 - len(behind), PATIENCE_S)
            wait_for(lambda: "in order, its queue waits for it" in caplog.text, PATIENCE_S)
            wait_for(lambda: consumer.counts.open == len(behind), PATIENCE_S)
            # A second member gets no message of this queue, even where it is of its share now: the lock stays with who has the listener.
            other = PushConsumer(group, namesrv=protomq_server.namesrv, **settings)
            other.subscribe(protomq_topic, lambda message: others.append(message.body))
            with Admin(namesrv=protomq_server.namesrv) as admin:

                def owners() -> dict[MessageQueue, int]:
                    return {one.queue: one.nonce for one in admin.queue_locks(group) if one.queue.topic == protomq_topic}

                first = owners()[queue_of[hanging]]
                with other:
                    wait_for(lambda: len(set(owners().values())) == 2, PATIENCE_S)
                    assert owners()[queue_of[hanging]] == first
            assert not set(behind) & set(gate.seen)
        finally:
            gate.let_go.set()
        wait_for(lambda: set(gate.seen) == set(queue_of) and consumer.counts.open == 0, PATIENCE_S)
    assert others == []
    # Where the share had moved, the message comes again to whoever locks the queue next, and the others behind it.
    seen = [body for body in gate.seen if body in behind]
    assert seen[seen.count(hanging) - 1 :] == behind
    assert committed(protomq_server, group, protomq_topic) == 40


def has_open(consumer: PushConsumer | AsyncPushConsumer, count: int) -> bool:
    return consumer.counts.open == count


def test_an_orderly_queue_goes_on_where_its_group_was_reset_when_its_listener_is_done(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    """However often it is reset, and to a message behind the one that a listener has, or to that one again."""
    group = group_of(protomq_server, protomq_topic, 20)
    for number in range(10):
        protomq_producer.send(protomq_topic, b"%d" % number, sharding_key="one")
    gate, begun, running = Gate(push, b"0"), list[bytes](), Counter[int]()

    def listen(message: Message) -> Any:
        begun.append(message.body)
        running[len(begun) - len(gate.seen)] += 1
        return gate(message)

    admin = Admin(namesrv=protomq_server.namesrv)
    with admin, push(group, protomq_topic, listen, orderly=True, commit_interval_s=0.05) as consumer:
        try:
            assert gate.begun.wait(PATIENCE_S)
            queue_id = next(one.queue.queue_id for one in admin.group_lag(group, protomq_topic) if one.lag)
            for to, count in ((7, 3), ("latest", 0), (4, 6)):
                admin.reset_offsets(group, protomq_topic, to, queue_ids=[queue_id])  # type: ignore[arg-type]
                wait_for(partial(has_open, consumer, count), PATIENCE_S)
            admin.reset_offsets(group, protomq_topic, "earliest")
            wait_for(partial(has_open, consumer, 10), PATIENCE_S)
            assert begun == [b"0"]
        finally:
            gate.let_go.set()
        wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
    assert begun == gate.seen == [b"0", *(b"%d" % number for number in range(10))]
    assert set(running) == {1}
    assert committed(protomq_server, group, protomq_topic) == 10


def test_a_topic_can_be_added_and_taken_away_while_it_runs(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    group = group_of(protomq_server, protomq_topic)
    other = f"{protomq_topic}-2"
    seen: list[bytes] = []
    more: list[bytes] = []
    with push(group, protomq_topic, lambda message: seen.append(message.body)) as consumer:
        protomq_producer.send(other, b"more", tag="a")
        protomq_producer.send(other, b"less", tag="b")
        push.call(lambda: consumer.subscribe(other, lambda message: more.append(message.body), tags=["a"]))
        wait_for(lambda: more == [b"more"], PATIENCE_S)
        push.call(lambda: consumer.unsubscribe(other))
        wait_for(lambda: {queue.topic for queue in consumer.assignment()} <= {protomq_topic, f"%RETRY%{group}"}, PATIENCE_S)
        send(protomq_producer, protomq_topic, 1)
        wait_for(lambda: seen == [b"0"], PATIENCE_S)
    assert (seen, more) == ([b"0"], [b"more"])


def test_retries_of_a_topic_that_was_taken_away_come_to_the_listener_that_it_had_and_no_other_message_does(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    group, other = group_of(protomq_server, protomq_topic, 1_000), f"{protomq_topic}-2"
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.create_topic(other, write_queues=1, read_queues=1)
    seen: list[tuple[bytes, int]] = []
    rest: list[tuple[bytes, bytes]] = []

    def listen(message: Message) -> object:
        seen.append((message.body, message.attempt))
        return Retry(error="not yet") if not message.attempt else None

    with push(group, protomq_topic, listen) as consumer:
        push.call(lambda: consumer.subscribe(other, lambda message: rest.append((b"rest", message.body))))
        (first,) = send(protomq_producer, protomq_topic, 1)
        wait_for(lambda: seen == [(first, 0)] and consumer.counts.open == 0, PATIENCE_S)
        push.call(lambda: consumer.unsubscribe(protomq_topic))
        wait_for(lambda: {queue.topic for queue in consumer.assignment()} <= {other, f"%RETRY%{group}"}, PATIENCE_S)
        send(protomq_producer, protomq_topic, 1)
        wait_for(lambda: len(seen) > 1, PATIENCE_S)
        protomq_producer.send(other, b"last")
        wait_for(lambda: rest == [(b"rest", b"last")], PATIENCE_S)
        push.call(lambda: consumer.subscribe(protomq_topic, lambda message: rest.append((b"new", message.body))))
        wait_for(lambda: len(rest) > 1, PATIENCE_S)
    assert seen == [(first, 0), (first, 1)]
    assert rest[1:] == [(b"new", first)], "what was sent meanwhile comes to the next listener"


def test_a_listener_that_says_nonsense_is_done_and_told_once(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    group = group_of(protomq_server, protomq_topic)
    send(protomq_producer, protomq_topic, 20)
    with push(group, protomq_topic, lambda message: 42) as consumer:
        wait_for(lambda: consumer.counts.done == 20, PATIENCE_S)
    assert sum("returned 42, which is no result" in text for text in caplog.messages) == 1
    assert committed(protomq_server, group, protomq_topic) == 20


def test_a_listener_that_exits_ends_no_thread_and_gets_its_message_again(
    push: Push, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    group = group_of(protomq_server, protomq_topic, 10)
    again: list[str] = []

    def listen(message: Message) -> None:
        if not message.attempt:
            raise SystemExit(3)
        again.append(message.last_error)

    send(protomq_producer, protomq_topic, 30)
    with push(group, protomq_topic, listen, concurrency=2):
        wait_for(lambda: len(again) == 30, PATIENCE_S)
    assert set(again) == {"SystemExit: 3"}


def test_a_coroutine_that_blocks_the_loop_is_named(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bytes] = []
    told = threading.Event()

    async def blocks(message: Message) -> None:
        told.wait(PATIENCE_S)
        seen.append(message.body)

    class Tells(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "blocks the event loop" in record.getMessage():
                told.set()

    handler = Tells()
    logging.getLogger("protomq").addHandler(handler)
    send(protomq_producer, protomq_topic, 1)

    async def consume() -> None:
        consumer = AsyncPushConsumer(f"g-{protomq_topic}", namesrv=protomq_server.namesrv)
        consumer.subscribe(protomq_topic, blocks)
        async with consumer:
            while not seen:  # noqa: ASYNC110 - the loop is blocked meanwhile.
                await asyncio.sleep(0.01)

    try:
        asyncio.run(consume())
    finally:
        logging.getLogger("protomq").removeHandler(handler)
    (text,) = [text for text in caplog.messages if "blocks the event loop" in text]
    assert "blocks blocks the event loop for more than 1 s, at" in text.replace(
        "test_a_coroutine_that_blocks_the_loop_is_named.<locals>.", ""
    )


def test_coroutines_may_listen_on_threads(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    seen: list[bytes] = []
    consumer = PushConsumer(f"g-{protomq_topic}", namesrv=protomq_server.namesrv)

    @consumer.on(protomq_topic)
    async def listen(message: Message) -> None:
        await asyncio.sleep(0.001)
        seen.append(message.body)

    bodies = send(protomq_producer, protomq_topic, 20)
    with consumer:
        wait_for(lambda: len(seen) == 20, PATIENCE_S)
    assert sorted(seen) == sorted(bodies)


def test_run_ends_when_a_listener_asks_for_it(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    consumer = PushConsumer(f"g-{protomq_topic}", namesrv=protomq_server.namesrv)
    refused: list[str] = []

    @consumer.on(protomq_topic)
    def listen(message: Message) -> None:
        try:
            consumer.stop()
        except ConfigurationError as error:
            refused.append(str(error))
        consumer.request_stop()

    send(protomq_producer, protomq_topic, 1)
    assert consumer.run() == 0
    assert "would wait for itself" in refused[0]
    with pytest.raises(ConfigurationError, match="started once"):
        consumer.start()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stop_in_a_listener_is_refused_and_run_goes_on(
    is_async: bool, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    refused: list[str] = []
    seen: Counter[bytes] = Counter()

    def heard(message: Message, error: ConfigurationError, end: Callable[[], None]) -> None:
        refused.append(str(error))
        seen[message.body] += 1
        if len(refused) == 1:  # What comes after the refusal goes to the listener, too.
            send(protomq_producer, protomq_topic, 9, first=1)
        if len(seen) == 10:
            end()

    def run() -> int:
        consumer = PushConsumer(f"g-{protomq_topic}", namesrv=protomq_server.namesrv)

        @consumer.on(protomq_topic)
        def listen(message: Message) -> None:
            with pytest.raises(ConfigurationError) as error:
                consumer.stop()
            heard(message, error.value, consumer.request_stop)

        return consumer.run()

    async def run_async() -> int:
        consumer = AsyncPushConsumer(f"g-{protomq_topic}", namesrv=protomq_server.namesrv)

        @consumer.on(protomq_topic)
        async def listen(message: Message) -> None:
            with pytest.raises(ConfigurationError) as error:
                await consumer.stop()
            heard(message, error.value, consumer.request_stop)

        return await consumer.run()

    send(protomq_producer, protomq_topic, 1)
    assert (asyncio.run(run_async()) if is_async else run()) == 0
    assert seen == {b"%d" % number: 1 for number in range(10)}
    assert ["would wait for itself" in text for text in refused] == [True] * 10


@pytest.mark.parametrize("topic", ["there", "not there"])
def test_a_start_with_a_wrong_filter_is_refused_and_says_where(push: Push, protomq_topic: str, topic: str) -> None:
    settings: Any = {"namesrv": push.namesrv}
    consumer = (PushConsumer if push.kind == "threads" else AsyncPushConsumer)("g", **settings)
    consumer.subscribe(protomq_topic if topic == "there" else "NotThere", print, sql="delay > 5 AND")
    start = consumer.start if isinstance(consumer, PushConsumer) else lambda: asyncio.run(consumer.start())
    with pytest.raises(IllegalFilterError, match="line 1, column 14"):
        start()
    assert not consumer.is_running


def test_a_start_without_a_server_is_refused_at_once() -> None:
    consumer = PushConsumer("g", namesrv="127.0.0.1:1", request_timeout_s=0.3)
    consumer.subscribe("t", print)
    with pytest.raises(NoRouteError):
        consumer.start()


def test_a_consumer_of_one_event_loop_is_not_stopped_in_another(protomq_server: Broker, protomq_topic: str) -> None:
    consumer = AsyncPushConsumer(group_of(protomq_server, protomq_topic), namesrv=protomq_server.namesrv)
    consumer.subscribe(protomq_topic, lambda message: None)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(consumer.start())
        with pytest.raises(ConfigurationError, match=r"started in another event loop.*in one asyncio\.run"):
            asyncio.run(consumer.stop())
        assert consumer.is_running
        assert loop.run_until_complete(consumer.stop()) == 0
    finally:
        loop.close()
