"""Delayed messages that are all due at one time, and how fast they reach their queues."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from protomq.v1 import pull_service_pb2, send_service_pb2
from tests.bench.batches import (
    LANE_PULL,
    LANE_SEND,
    PULL_METHOD_ID,
    SEND_METHOD_ID,
    BatchTemplate,
    RawConnection,
)
from tests.bench.measure import Counter, Sample, Window


def deliver(
    remoting: str,
    topic: str,
    batch: int,
    size: int,
    queues: int,
    count: int,
    due_s: float,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
) -> Sample:
    """Sends `count` messages that are due at `due_s` (seconds since 1970), then counts what reaches the queues.

    The window begins `warm_up` seconds after the due time. Raises RuntimeError if the sends end too late, or the messages too early.
    """
    _send(remoting, topic, batch, size, queues, count, due_s)
    counter = Counter()
    window = Window([counter], server_pids)
    with RawConnection(remoting, LANE_PULL) as connection:
        _wait(due_s)
        before = _delivered(connection, topic, queues)
        _wait(due_s + warm_up)
        counter.messages = _delivered(connection, topic, queues)
        window.begin()
        _wait(due_s + warm_up + seconds)
        counter.messages = _delivered(connection, topic, queues)
        window.end()
        if before > count // 100 or counter.messages >= count:
            raise RuntimeError(
                f"of {count} messages {before} came before the window, {counter.messages} before its end"
            )
    return window.sample()


def _send(
    remoting: str, topic: str, batch: int, size: int, queues: int, count: int, due_s: float
) -> None:
    template = BatchTemplate(topic, batch, size, is_delayed=True)
    tails = [template.tail(queue) for queue in range(queues)]
    with RawConnection(remoting, LANE_SEND) as connection:
        connection.use_large_buffers()
        for turn in range(count // batch):
            delay_ms = round((due_s - time.time()) * 1_000)
            if delay_ms <= 0:
                raise RuntimeError(
                    f"{turn * batch} of {count} messages were sent when they were due"
                )
            template.advance()
            delay = send_service_pb2.SendRequest(delay_ms=delay_ms).SerializeToString()
            connection.call(SEND_METHOD_ID, (template.records, tails[turn % queues], delay))


def _wait(until_s: float) -> None:
    threading.Event().wait(max(until_s - time.time(), 0))


def _delivered(connection: RawConnection, topic: str, queues: int) -> int:
    """Messages in the queues."""
    total = 0
    for queue in range(queues):
        request = pull_service_pb2.PullRequest(
            topic=topic, queue_id=queue, record_count_max=1, size_max_bytes=1
        )
        answer = pull_service_pb2.PullResponse.FromString(
            connection.call(PULL_METHOD_ID, (request.SerializeToString(),))
        )
        total += answer.end_offset
    return total
