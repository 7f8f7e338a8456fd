"""The engine of the benchmarks: who calls when, and what the latencies were.

Rules: latency is counted from the moment at which a call was meant to start. With a rate the calls have a timetable. If a
call starts late because those before it were slow, its waiting counts. Otherwise a stall of a second would be one slow
call, not a thousand. Without a rate each caller's next call is meant to start when its last one ended. Samples are kept
whole, 8 bytes each, so that percentiles are exact.
"""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

PERCENTILES: Final = ((50, "p50_ms"), (90, "p90_ms"), (99, "p99_ms"), (99.9, "p99.9_ms"))
COLUMNS: Final = (
    "what", "messages", "rate_per_s", "mib_per_s", "avg_ms", "p50_ms", "p90_ms", "p99_ms", "p99.9_ms",
    "max_ms", "errors",
)  # fmt: skip


class Pace:
    """The timetable of calls. Any thread.

    `next_start` gives the time (of `time.perf_counter`) at which the next call is meant to start; without a rate: now.
    """

    def __init__(self, start: float, rate_per_s: float = 0.0) -> None:
        self._start = start
        self._interval = 1.0 / rate_per_s if rate_per_s else 0.0
        self._numbers = itertools.count()

    def next_start(self) -> float:
        """When the caller's next call is meant to start."""
        if not self._interval:
            return time.perf_counter()
        return self._start + next(self._numbers) * self._interval


@dataclass(slots=True)
class Tally:
    """What one caller saw. Written by one thread; read by others for progress only, until the end."""

    latencies_s: array[float] = field(default_factory=lambda: array("d"))
    messages: int = 0
    size_bytes: int = 0
    errors: int = 0
    first_error: BaseException | None = None

    def note_error(self, error: BaseException) -> None:
        """A call failed."""
        self.errors += 1
        if self.first_error is None:
            self.first_error = error


@dataclass(frozen=True, slots=True)
class Window:
    """The time that counts, of `time.perf_counter`: calls meant to start in [begin, end)."""

    begin: float
    end: float

    def counts(self, moment: float) -> bool:
        """Whether a call that is meant to start then is counted."""
        return self.begin <= moment < self.end


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed (nearest rank)."""
    if not ordered:
        return 0.0
    # Through integers: 0.999 * 1000 is a little more than 999 in floating point.
    rank = -(-len(ordered) * round(percent * 1000) // 100_000)
    return ordered[max(rank, 1) - 1]


def summarise(what: str, tallies: Sequence[Tally], elapsed_s: float) -> dict[str, Any]:
    """One row of the result."""
    ordered = sorted(itertools.chain.from_iterable(tally.latencies_s for tally in tallies))
    messages = sum(tally.messages for tally in tallies)
    size_bytes = sum(tally.size_bytes for tally in tallies)
    row: dict[str, Any] = {
        "what": what,
        "messages": messages,
        "rate_per_s": round(messages / elapsed_s) if elapsed_s > 0 else 0,
        "mib_per_s": round(size_bytes / elapsed_s / (1 << 20), 2) if elapsed_s > 0 else 0.0,
        "avg_ms": _ms(sum(ordered) / len(ordered)) if ordered else 0.0,
    }
    for percent, name in PERCENTILES:
        row[name] = _ms(percentile(ordered, percent))
    row["max_ms"] = _ms(ordered[-1]) if ordered else 0.0
    row["errors"] = sum(tally.errors for tally in tallies)
    return row


def first_error(tallies: Sequence[Tally]) -> BaseException | None:
    """Some error that a caller met, None if there was none."""
    return next((tally.first_error for tally in tallies if tally.first_error is not None), None)


def call_paced(
    call: Callable[[float], int],
    pace: Pace,
    window: Window,
    message_count: int,
    tally: Tally,
    stop: threading.Event,
) -> None:
    """Call until the window ends. `call` is given its intended start and returns the bytes that it moved."""
    while not stop.is_set():
        intended = pace.next_start()
        if intended >= window.end:
            return
        if (early_s := intended - time.perf_counter()) > 0:
            time.sleep(early_s)
        try:
            size_bytes = call(intended)
        except Exception as error:
            tally.note_error(error)
            continue
        if window.counts(intended):
            tally.latencies_s.append(time.perf_counter() - intended)
            tally.messages += message_count
            tally.size_bytes += size_bytes


async def call_paced_async(
    call: Callable[[float], Awaitable[int]],
    pace: Pace,
    window: Window,
    message_count: int,
    tally: Tally,
) -> None:
    """The same for a coroutine."""
    import asyncio

    while True:
        intended = pace.next_start()
        if intended >= window.end:
            return
        if (early_s := intended - time.perf_counter()) > 0:
            await asyncio.sleep(early_s)
        try:
            size_bytes = await call(intended)
        except Exception as error:
            tally.note_error(error)
            continue
        if window.counts(intended):
            tally.latencies_s.append(time.perf_counter() - intended)
            tally.messages += message_count
            tally.size_bytes += size_bytes


def run_threads(
    work: Callable[[int, Tally, threading.Event], None],
    count: int,
    on_progress: Callable[[Sequence[Tally]], None] | None = None,
    progress_interval_s: float = 1.0,
) -> list[Tally]:
    """Run `work(number, tally, stop)` on `count` threads until all return; Ctrl-C sets `stop` and ends early.

    An exception that escapes from `work` is raised here, when all have ended.
    """
    tallies = [Tally() for _ in range(count)]
    stop = threading.Event()
    escaped: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number, tallies[number], stop)
        except BaseException as error:
            escaped.append(error)
            stop.set()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(progress_interval_s)
                if on_progress is not None and thread.is_alive():
                    on_progress(tallies)
    except KeyboardInterrupt:
        stop.set()
        for thread in threads:
            thread.join()
        raise
    if escaped:
        raise escaped[0]
    return tallies


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
