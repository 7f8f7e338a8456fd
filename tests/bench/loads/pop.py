"""Members of a group that pop and acknowledge."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from protomq import SimpleConsumer
from tests.bench.measure import Counter, Sample, Window


def pop_and_ack(
    namesrv: str,
    topic: str,
    group: str,
    messages: int,
    count: int,
    members: int,
    acks_alone: bool,
    server_pids: Sequence[int],
) -> Sample:
    """Threads, each a member: `count` messages a call, then one acknowledgement for all of them, or with `acks_alone` one for each."""
    counters = [Counter() for _ in range(members)]
    window = Window(counters, server_pids)
    ended = threading.Event()

    def work(counter: Counter) -> None:
        with SimpleConsumer(group, namesrv=namesrv) as consumer:
            while not ended.is_set():
                begin = time.perf_counter()
                found = consumer.receive(topic, count, invisible_s=600, hold_s=0)
                if acks_alone:
                    for message in found:
                        consumer.ack(message)
                elif found:
                    consumer.ack(found)
                counter.latencies_s.append(time.perf_counter() - begin)
                counter.messages += len(found)
                counter.size_bytes += sum(len(message.body) for message in found)
                if sum(each.messages for each in counters) >= messages:
                    ended.set()

    threads = [threading.Thread(target=work, args=(counter,), daemon=True) for counter in counters]
    window.begin()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    window.end()
    return window.sample({})
