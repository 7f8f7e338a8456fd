"""Loads with filters: a consumer that wants one message of a hundred, and pulls beside such consumers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from protomq import OutgoingMessage, Producer, PullConsumer
from protomq.calls import ONCE, Calls
from tests.bench.measure import Counter, Sample, Window

KINDS: Final = 100
"""Of messages, in turn: each has a tag, a text and a number of its own."""
_BATCH: Final = 10_000
_SILENCE_S: Final = 30.0


def fill(namesrv: str, topic: str, messages: int, size: int, server_pids: Sequence[int]) -> Sample:
    """Messages with four properties, in batches."""
    counter = Counter()
    window = Window([counter], server_pids)
    window.begin()
    with Producer(namesrv=namesrv, compression="none", send_timeout_s=60.0) as producer:
        for first in range(0, messages, _BATCH):
            producer.send_batch(topic, [_message(topic, n, size) for n in range(first, first + _BATCH)])
            counter.messages += _BATCH
    window.end()
    return window.sample()


def _message(topic: str, number: int, size: int) -> OutgoingMessage:
    kind = number % KINDS
    properties = {
        "carrier": "UA", "delay": str(kind), "dest": f"D{kind:02}", "origin": ("JFK", "LGA", "EWR")[number % 3],
    }  # fmt: skip
    return OutgoingMessage(topic, b"x" * size, tag=f"tag{kind}", properties=properties)


def consume(
    namesrv: str,
    topic: str,
    messages: int,
    subscription: dict[str, Any],
    at_client: bool,
    server_pids: Sequence[int],
    endless: bool = False,
    passes: int = 1,
) -> Sample:
    """Gets the last kind of a topic's `messages`, from its start; all of them count. `at_client`: it gets them all, and looks itself.

    The last of the `passes` over the topic is measured.
    """
    counter = Counter()
    window = Window([counter], server_pids)
    with PullConsumer(namesrv=namesrv) as consumer:
        consumer.subscribe(topic, **subscription)
        while endless or passes > 0:
            passes -= 1
            consumer.seek_to_begin()
            window.begin()
            _consume_once(consumer, messages // KINDS, at_client)
            counter.messages += messages
            window.end()
    return window.sample()


def _consume_once(consumer: PullConsumer, wanted: int, at_client: bool) -> None:
    kept = 0
    last = time.perf_counter()
    while kept < wanted:
        got = consumer.poll()
        if at_client:
            got = [message for message in got if int(message.properties["delay"]) > KINDS - 2]
        kept += len(got)
        now = time.perf_counter()
        if got:
            last = now
        elif now - last > _SILENCE_S:
            raise RuntimeError(f"{kept} of {wanted} messages came")


def pulls(
    remoting: str, topic: str, interval_ms: float, warm_up: float, seconds: float, server_pids: Sequence[int]
) -> Sample:
    """Pulls without a filter from the end of a queue, one at a time."""
    counter = Counter()
    window = Window([counter], server_pids)
    calls = Calls(namesrv=remoting, transport="remoting", retries=ONCE)
    queue = calls.route(topic).read_queues[0]
    begins_s = time.perf_counter() + warm_up
    ends_s = begins_s + seconds
    while (begin := time.perf_counter()) < ends_s:
        if not window.counting and begin >= begins_s:
            window.begin()
        calls.pull(queue, 0, record_count_max=1, timeout_s=5.0)
        if window.counting:
            counter.latencies_s.append(time.perf_counter() - begin)
        counter.messages += 1
        time.sleep(interval_ms / 1000)
    window.end()
    calls.close()
    return window.sample()
