"""Members of a group that pop and acknowledge."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

from protomq import AsyncSimpleConsumer, SimpleConsumer
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


def pop_in_coroutines(
    namesrv: str,
    topic: str,
    group: str,
    messages: int,
    count: int,
    callers: int,
    acks_alone: bool,
    server_pids: Sequence[int],
) -> Sample:
    """Coroutines that share a consumer: `count` messages a call, then one acknowledgement for all of them; with `acks_alone` one for each,
    all of a call on their way together.
    """
    counters = [Counter() for _ in range(callers)]
    window = Window(counters, server_pids)

    async def work(consumer: AsyncSimpleConsumer, counter: Counter) -> None:
        while sum(each.messages for each in counters) < messages:
            begin = time.perf_counter()
            found = await consumer.receive(topic, count, invisible_s=600, hold_s=0)
            if acks_alone:
                stale = any(await asyncio.gather(*[consumer.ack(message) for message in found]))
            else:
                stale = bool(found and await consumer.ack(found))
            if stale:
                raise RuntimeError("a message was not held any more")
            counter.latencies_s.append(time.perf_counter() - begin)
            counter.messages += len(found)
            counter.size_bytes += sum(len(message.body) for message in found)

    async def run() -> None:
        async with AsyncSimpleConsumer(group, namesrv=namesrv) as consumer, asyncio.TaskGroup() as tasks:
            window.begin()
            for counter in counters:
                tasks.create_task(work(consumer, counter))
        window.end()

    asyncio.run(run())
    return window.sample({})
