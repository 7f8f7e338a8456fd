"""Transactions with commit: half message, local work that does nothing, decision, each awaited."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from protomq import AsyncTransactionProducer, TransactionDecision, TransactionProducer
from tests.bench.measure import Counter, Sample, Window


def commit_from_threads(
    namesrv: str,
    topic: str,
    threads: int,
    size: int,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
    wait_for_end: bool = True,
) -> Sample:
    """Threads that share a producer. Without `wait_for_end` at most some thousand decisions are on their way when the window ends."""
    counters = [Counter() for _ in range(threads)]
    window = Window(counters, server_pids)
    stop = threading.Event()
    body = random.Random(7).randbytes(size)
    with TransactionProducer("bench", _roll_back, namesrv=namesrv, compression="none") as producer:

        def call(counter: Counter) -> None:
            while not stop.is_set():
                begin = time.perf_counter()
                try:
                    result = producer.send(topic, body, execute=_nothing, wait_for_end=wait_for_end)
                    _note(counter, result.is_ended or not wait_for_end, size)
                except Exception as error:
                    counter.note_error(error)
                    continue
                if window.counting:
                    counter.latencies_s.append(time.perf_counter() - begin)

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
    return window.sample()


def commit_from_coroutines(
    namesrv: str,
    topic: str,
    callers: int,
    size: int,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
    wait_for_end: bool = True,
) -> Sample:
    """Coroutines that share a producer; see `commit_from_threads`."""
    counters = [Counter() for _ in range(callers)]
    window = Window(counters, server_pids)
    body = random.Random(7).randbytes(size)

    async def run() -> None:
        stopped = False

        async def call(counter: Counter) -> None:
            while not stopped:
                begin = time.perf_counter()
                try:
                    result = await producer.send(
                        topic, body, execute=_nothing, wait_for_end=wait_for_end
                    )
                    _note(counter, result.is_ended or not wait_for_end, size)
                except Exception as error:
                    counter.note_error(error)
                    continue
                if window.counting:
                    counter.latencies_s.append(time.perf_counter() - begin)

        async with AsyncTransactionProducer(
            "bench", _roll_back, namesrv=namesrv, compression="none"
        ) as producer:
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


def _nothing(_: Any) -> None:
    pass


def _roll_back(_: Any) -> TransactionDecision:
    return TransactionDecision.ROLL_BACK


def _note(counter: Counter, is_ended: bool, size: int) -> None:
    if not is_ended:
        raise RuntimeError("the decision was not taken")
    counter.messages += 1
    counter.size_bytes += size
