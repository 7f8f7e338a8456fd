"""Push consumers of a topic that is full."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from protomq import PushConsumer
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
