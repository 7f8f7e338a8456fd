"""Push consumers of a topic that is full."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from protomq import PushConsumer
from tests.bench.loads.sdk import INTENDED
from tests.bench.measure import Counter, Sample, Window

PATIENCE_S = 600.0
PART_S = 0.5


def listen(
    namesrv: str,
    topic: str,
    group: str,
    messages: int,
    batch_size: int | None,
    orderly: bool,
    server_pids: Sequence[int],
    parts: bool = False,
) -> Sample:
    """Listeners that count, until all messages have been given to them; `batch_size`: None: one message a call.

    Raises RuntimeError if not all come within `PATIENCE_S`.
    `parts`: the result is the median half second, start and end left out, as `Bench.java` has it for RocketMQ's consumer.
    """
    counter = Counter()
    window = Window([counter], server_pids)
    ended, lock = threading.Event(), threading.Lock()

    def count(number: int, size_bytes: int) -> None:
        with lock:
            counter.messages += number
            counter.size_bytes += size_bytes
            if counter.messages >= messages:
                ended.set()

    def one(message: Any) -> None:
        count(1, len(message.body))

    def many(batch: Any) -> None:
        count(len(batch), sum(len(message.body) for message in batch))

    consumer = PushConsumer(group, namesrv=namesrv, orderly=orderly)
    consumer.subscribe(topic, one if batch_size is None else many, batch_size=batch_size)
    window.begin()
    with consumer:
        if parts:
            return _median_part(counter, server_pids, ended, messages)
        if not ended.wait(PATIENCE_S):
            raise _too_few(counter, messages)
        window.end()
    return window.sample({})


def _too_few(counter: Counter, messages: int) -> RuntimeError:
    return RuntimeError(f"only {counter.messages} of {messages} messages came in {PATIENCE_S:g} s")


def _median_part(counter: Counter, server_pids: Sequence[int], ended: threading.Event, messages: int) -> Sample:
    found: list[Sample] = []
    ends_s = time.perf_counter() + PATIENCE_S
    while True:
        if time.perf_counter() >= ends_s:
            raise _too_few(counter, messages)
        is_first, part = not counter.messages, Window([counter], server_pids)
        part.begin()
        if ended.wait(PART_S):
            break
        part.end()
        if not is_first:
            found.append(part.sample())
    if not found:
        raise RuntimeError(f"{counter.messages} messages came too fast to see half a second of them")
    return sorted(found, key=lambda sample: sample.rate)[len(found) // 2]


def receive(
    namesrv: str,
    topic: str,
    group: str,
    seconds: float,
    warm_up: float,
    server_pids: Sequence[int],
) -> Sample:
    """Listens to what `sdk.send_paced` sends, one message a call; latencies from the intended time of the send."""
    counter = Counter()
    window = Window([counter], server_pids)

    def one(message: Any) -> None:
        received = time.perf_counter()
        (intended,) = INTENDED.unpack_from(message.body)
        if window.counting and intended:
            counter.latencies_s.append(received - intended)
            counter.messages += 1

    consumer = PushConsumer(group, namesrv=namesrv, begin="latest")
    consumer.subscribe(topic, one)
    with consumer:
        time.sleep(warm_up)
        window.begin()
        time.sleep(seconds)
        window.end()
    return window.sample()
