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


def listen(
    namesrv: str,
    topic: str,
    group: str,
    messages: int,
    batch_size: int | None,
    orderly: bool,
    server_pids: Sequence[int],
) -> Sample:
    """Listeners that count, until all messages have been given to them; `batch_size`: None: one message a call."""
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
        ended.wait(PATIENCE_S)
        window.end()
    return window.sample({})


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
