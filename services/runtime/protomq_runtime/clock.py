"""Time, handed in. Beside this module only event loops and deadlines of calls read a clock (`CLOCKS` in tests/support/tidy_rules.py)."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What a component may ask about time."""

    def now_ms(self) -> int:
        """Milliseconds since 1970 by the wall clock, which may jump."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since some moment; never goes back."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment, to the microsecond; never goes back."""
        ...


def thread_cpu_s() -> float:
    """CPU time of the calling thread, in seconds."""
    return time.thread_time()


def boottime_ms() -> int:
    """Milliseconds since some moment; never goes back, and counts while the machine sleeps. Where there is no such clock, the monotonic."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1_000_000


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    # No frame in between: each append asks twice.
    monotonic = staticmethod(time.monotonic)
