"""Messages that fail: polled, sent back, and delivered again when their delay has passed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from protomq import Message, PullConsumer, PushConsumer, Retry
from protomq.v1 import pull_service_pb2
from protomq.wire.topics import retry_topic
from tests.bench.batches import LANE_PULL, PULL_METHOD_ID, RawConnection
from tests.bench.measure import Counter, Sample, Window

POLL_S = 0.02
"""Time between two looks at the retry topic."""
POLL_TIMEOUT_S = 10.0
"""Without a message for this long, a queue has no more."""


def send_back(
    namesrv: str,
    remoting: str,
    topic: str,
    group: str,
    members: int,
    messages: int,
    count: int,
    delay_s: float,
    server_pids: Sequence[int],
) -> Sample:
    """Members, a thread each, poll their queues and send everything back, `count` messages a call.

    The window ends when the broker has delivered all of them to the retry topic: its CPU covers poll, send-back and delivery.
    """
    counters = [Counter() for _ in range(members)]
    total = Counter()
    window = Window([total], server_pids)
    consumers = [PullConsumer(group, namesrv=namesrv, spin=False) for _ in range(members)]
    for index, consumer in enumerate(consumers):
        consumer.assign(consumer.queues(topic)[index::members])

    def work(consumer: PullConsumer, counter: Counter) -> None:
        while counter.messages < messages // members:
            found = consumer.poll(POLL_TIMEOUT_S, count)
            if not found:
                return
            consumer.send_back(found, error="ValueError: no such flight", delay=delay_s)
            counter.messages += len(found)

    threads = [
        threading.Thread(target=work, args=pair, daemon=True)
        for pair in zip(consumers, counters, strict=True)
    ]
    with RawConnection(remoting, LANE_PULL) as connection:
        window.begin()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        wanted = sum(counter.messages for counter in counters)
        if wanted < messages:
            raise RuntimeError(f"{wanted} of {messages} messages were sent back: a member found no more")
        total.messages = _wait_delivered(connection, group, wanted)
        window.end()
    for consumer in consumers:
        consumer.close()
    return window.sample()


def fail_all(
    namesrv: str, remoting: str, topic: str, group: str, messages: int, delay_s: float, server_pids: Sequence[int]
) -> Sample:
    """A push consumer whose listener wants each message again. After so many messages it gets no more.

    The window ends when the broker has delivered all that failed to the retry topic.
    """
    total, failed = Counter(), Counter()
    window = Window([total], server_pids)
    ended, lock = threading.Event(), threading.Lock()

    again = Retry(delay_s, "ValueError: no such flight")

    def fail(_: Message) -> Retry:
        with lock:
            failed.messages += 1
            if failed.messages == messages:
                ended.set()
        return again

    consumer = PushConsumer(group, namesrv=namesrv)
    consumer.subscribe(topic, fail)
    with RawConnection(remoting, LANE_PULL) as connection:
        window.begin()
        with consumer:
            if not ended.wait(120):
                raise RuntimeError(f"{failed.messages} of {messages} messages came to the listener")
            consumer.suspend()
            total.messages = _wait_delivered(connection, group, messages)
            window.end()
    return window.sample()


def _wait_delivered(connection: RawConnection, group: str, wanted: int) -> int:
    """How many there are in the retry topic, once it has as many as wanted."""
    deadline_s = time.monotonic() + 60
    while (delivered := _end_offset(connection, retry_topic(group))) < wanted:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{delivered} of {wanted} messages that were sent back have come again")
        time.sleep(POLL_S)
    return delivered


def _end_offset(connection: RawConnection, topic: str) -> int:
    request = pull_service_pb2.PullRequest(topic=topic, queue_id=0, record_count_max=1, size_max_bytes=1)
    answer = pull_service_pb2.PullResponse.FromString(
        connection.call(PULL_METHOD_ID, (request.SerializeToString(),))
    )
    return answer.end_offset
