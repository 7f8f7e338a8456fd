"""Delayed messages of two kinds: many that stay pending, and some that fall due at an even rate and are awaited."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from protomq import Producer, PullConsumer
from protomq.v1 import send_service_pb2
from tests.bench.batches import LANE_SEND, SEND_METHOD_ID, BatchTemplate, RawConnection
from tests.bench.measure import Counter, Sample, Window

SLOT_MS = 10
"""What falls due together."""
PATIENCE_S = 30.0
"""How long messages may be late."""


def fill(
    remoting: str,
    topic: str,
    batch: int,
    size: int,
    queues: int,
    count: int,
    delay_min_s: float,
    delay_max_s: float,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
) -> Sample:
    """Sends `count` messages in batches, each with another delay; these lie evenly between the two, and do not come in their order."""
    template = BatchTemplate(topic, batch, size, is_delayed=True)
    tails = [template.tail(queue) for queue in range(queues)]
    counter = Counter()
    window = Window([counter], server_pids)
    turns = -(-count // batch)
    with RawConnection(remoting, LANE_SEND) as connection:
        connection.use_large_buffers()
        window.begin()
        for turn in range(turns):
            # Steps of the golden ratio reach all parts of the span again and again.
            delay_s = delay_min_s + (delay_max_s - delay_min_s) * (turn * 0.6180339887 % 1.0)
            template.advance()
            delay = send_service_pb2.SendRequest(delay_ms=round(delay_s * 1000)).SerializeToString()
            connection.call(SEND_METHOD_ID, (template.records, tails[turn % queues], delay))
            counter.messages += batch
        window.end()
    return window.sample()


def due(
    namesrv: str, topic: str, pending_topic: str, rate: int, due_s: float, warm_up: float, seconds: float, server_pids: Sequence[int]
) -> Sample:
    """Sends messages of which `rate` a second fall due from `due_s` (seconds since 1970) on, and gets them.

    Latencies are from a message's due time until a consumer has it. `extra`: how many came early, by the clock here or by the time that
    the broker gave them; how long before the first was due the last was sent. Raises RuntimeError if sends end too late, if messages do not
    come, or if any of `pending_topic` have.
    """
    per_slot, slots = rate * SLOT_MS // 1000, round(seconds * 1000) // SLOT_MS
    first_ms = round(due_s * 1000)
    counter = Counter()
    window = Window([counter], server_pids)
    early_count = 0

    def consume() -> None:
        nonlocal early_count
        while counter.messages < per_slot * slots and time.time() < due_s + seconds + PATIENCE_S:
            messages = consumer.poll(0.1)
            now_ms = time.time_ns() / 1_000_000
            for message in messages:
                due_ms = int(message.body)
                early_count += now_ms < due_ms or message.store_time_ms < due_ms
                counter.latencies_s.append((now_ms - due_ms) / 1000)
            counter.messages += len(messages)

    with PullConsumer(namesrv=namesrv) as consumer:
        consumer.subscribe(topic)
        reader = threading.Thread(target=consume)
        with Producer(namesrv=namesrv) as producer:
            for slot in range(slots):
                due_ms = first_ms + slot * SLOT_MS
                when = datetime.fromtimestamp(due_ms / 1000, UTC)
                producer.send_batch(topic, [b"%d" % due_ms] * per_slot, deliver_at=when)
        left_s = due_s - time.time()
        if left_s <= 0:
            raise RuntimeError(f"{per_slot * slots:,} messages were sent {-left_s:.1f} s after the first was due")
        window.begin()
        reader.start()
        reader.join()
        window.end()
        delivered = sum(consumer.queue_range(queue)[1] for queue in consumer.queues(pending_topic))
    if delivered:
        raise RuntimeError(f"{delivered:,} messages of {pending_topic} came days early")
    if counter.messages != per_slot * slots:
        raise RuntimeError(f"{counter.messages:,} of {per_slot * slots:,} messages came within {PATIENCE_S:.0f} s")
    return window.sample({"early": early_count, "sent_before_s": left_s})
