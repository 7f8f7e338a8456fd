"""Loads through the SDK, as an application would write them."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from protomq import AsyncProducer, DelayLevel, Producer, PullConsumer
from protomq_cli.load import Pace
from tests.bench.measure import Counter, Sample, Window

INTENDED: Final = struct.Struct("<d")
"""First bytes of a body: when it was meant to be sent."""
_SILENCE_S: Final = 5.0


def send_from_threads(
    namesrv: str,
    topic: str,
    threads: int,
    batch: int,
    size: int,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
    transport: Any = "auto",
    delay_level: int = 0,
) -> Sample:
    """Threads that share a producer: each sends a message (or a batch made of Python objects) and waits for its answer.

    `delay_level`: of single messages, 0 for none.
    """
    counters = [Counter() for _ in range(threads)]
    window = Window(counters, server_pids)
    stop = threading.Event()
    body = random.Random(7).randbytes(size)
    delay = DelayLevel(delay_level) if delay_level else None
    with Producer(namesrv=namesrv, transport=transport, compression="none") as producer:

        def call(counter: Counter) -> None:
            while not stop.is_set():
                begin = time.perf_counter()
                try:
                    if batch == 1:
                        producer.send(topic, body, delay=delay)
                    else:
                        # A list and its bodies are made for each call: they are what an application has to hand over.
                        producer.send_batch(topic, [bytes(bytearray(body)) for _ in range(batch)])
                except Exception as error:
                    counter.note_error(error)
                    continue
                if window.counting:
                    counter.latencies_s.append(time.perf_counter() - begin)
                counter.messages += batch
                counter.size_bytes += batch * size

        running = [threading.Thread(target=call, args=(c,), daemon=True) for c in counters]
        for thread in running:
            thread.start()
        time.sleep(warm_up)
        window.begin()
        time.sleep(seconds)
        window.end()
        stop.set()
        for thread in running:
            thread.join(10)
        kinds = producer.transports(topic)
    return window.sample({"transport": sorted(set(kinds.values()))})


def send_from_coroutines(
    namesrv: str,
    topic: str,
    callers: int,
    size: int,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
    transport: Any = "auto",
) -> Sample:
    """Coroutines that share a producer: each sends a message and waits for its answer."""
    counters = [Counter() for _ in range(callers)]
    window = Window(counters, server_pids)
    body = random.Random(7).randbytes(size)

    async def run() -> None:
        stopped = False

        async def call(counter: Counter) -> None:
            while not stopped:
                begin = time.perf_counter()
                try:
                    await producer.send(topic, body)
                except Exception as error:
                    counter.note_error(error)
                    continue
                if window.counting:
                    counter.latencies_s.append(time.perf_counter() - begin)
                counter.messages += 1
                counter.size_bytes += size

        async with AsyncProducer(namesrv=namesrv, transport=transport, compression="none") as producer:
            async with asyncio.TaskGroup() as group:
                for counter in counters:
                    group.create_task(call(counter))
                await asyncio.sleep(warm_up)
                window.begin()
                await asyncio.sleep(seconds)
                window.end()
                stopped = True

    asyncio.run(run())
    return window.sample()


def consume(
    namesrv: str, topic: str, messages: int, server_pids: Sequence[int], keys: bool = True
) -> Sample:
    """Read a topic from its start and touch every message: body (its CRC is checked), key (of those that have `keys`) and offset.

    The first twentieth warms up and does not count.
    """
    counter = Counter()
    window = Window([counter], server_pids)
    with PullConsumer(namesrv=namesrv) as consumer:
        consumer.subscribe(topic)
        last = time.perf_counter()
        while counter.messages < messages:
            got = consumer.poll()
            touched = 0
            for message in got:
                touched += len(message.body)
                if bool(message.key) != keys or message.queue_offset < 0:
                    raise ValueError(f"{message} is not what was sent")
            counter.messages += len(got)
            counter.size_bytes += touched
            if not window.counting and counter.messages > messages // 20:
                window.begin()
            now = time.perf_counter()
            if got:
                last = now
            elif now - last > _SILENCE_S:
                raise RuntimeError(f"{counter.messages} of {messages} messages came")
        window.end()
    return window.sample()


def send_paced(
    namesrv: str,
    topic: str,
    threads: int,
    size: int,
    rate: float,
    seconds: float,
    warm_up: float,
    server_pids: Sequence[int],
) -> Sample:
    """Send by a timetable; a body starts with the time (perf_counter) at which it was meant to be sent."""
    counters = [Counter() for _ in range(threads)]
    window = Window(counters, server_pids)
    padding = bytes(size - INTENDED.size)
    with Producer(namesrv=namesrv, compression="none") as producer:
        producer.send(topic, INTENDED.pack(0.0) + padding)
        pace = Pace(time.perf_counter(), rate)
        end = time.perf_counter() + warm_up + seconds

        def call(counter: Counter) -> None:
            while (intended := pace.next_start()) < end:
                if (early := intended - time.perf_counter()) > 0:
                    time.sleep(early)
                try:
                    producer.send(topic, INTENDED.pack(intended) + padding)
                except Exception as error:
                    counter.note_error(error)
                    continue
                if window.counting:
                    counter.latencies_s.append(time.perf_counter() - intended)
                counter.messages += 1

        running = [threading.Thread(target=call, args=(c,), daemon=True) for c in counters]
        for thread in running:
            thread.start()
        time.sleep(warm_up)
        window.begin()
        for thread in running:
            thread.join()
        window.end()
    return window.sample()


def receive(
    namesrv: str, topic: str, seconds: float, warm_up: float, server_pids: Sequence[int]
) -> Sample:
    """Receive what `send_paced` sends, by held pulls; latencies from the intended time of the send."""
    counter = Counter()
    window = Window([counter], server_pids)
    with PullConsumer(namesrv=namesrv, begin="latest") as consumer:
        consumer.subscribe(topic)
        begin = time.perf_counter()
        while (now := time.perf_counter()) < begin + warm_up + seconds:
            if not window.counting and now >= begin + warm_up:
                window.begin()
            for message in consumer.poll(0.1):
                received = time.perf_counter()
                (intended,) = INTENDED.unpack_from(message.body)
                if window.counting and intended:
                    counter.latencies_s.append(received - intended)
                    counter.messages += 1
        window.end()
    return window.sample()
