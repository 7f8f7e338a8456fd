"""Whether a blocking call looks for its answer again and again before it goes to sleep.

A thread that sleeps lets its core fall idle, and a virtual machine hands an idle core back. Until the thread runs again, with cold caches,
a third of a call's time has passed: 0.15 instead of 0.09 ms on one machine. So a call spins, for 0.2 ms at most, but only where that has
been of use lately:

- spinning fails if the answer does not come in time, or if the core was taken away meanwhile. Then the following calls sleep at
  once for a while: 1 ms first, 16 times as long with each failure, up to 1 s. Each success halves that time;
- so a broker that is farther away costs 0.2 ms of a core a second, and a busy machine nothing that it would notice.

Pure: no I/O, time handed in. One thread at a time.
"""

from __future__ import annotations

import os
from typing import Final

SPIN_MAX_S: Final = 0.000_2
TAKEN_AWAY_S: Final = 0.000_05
"""Between two looks: other threads or processes had the core, or the interpreter."""
PAUSE_MIN_S: Final = 0.001
PAUSE_GROWTH: Final = 16
PAUSE_MAX_S: Final = 1.0


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Spinning:
    """The history of one connection."""

    __slots__ = ("_pause_s", "_resume_s")

    def __init__(self, cores_count: int) -> None:
        self._pause_s = PAUSE_MIN_S
        # Who spins on the only core keeps the answer from being made.
        self._resume_s = 0.0 if cores_count > 1 else float("inf")

    def is_worth_it(self, now_s: float) -> bool:
        """Whether the call that begins now is to spin."""
        return now_s >= self._resume_s

    def succeeded(self) -> None:
        """The answer came in time."""
        self._pause_s = max(self._pause_s / 2, PAUSE_MIN_S)

    def failed(self, now_s: float) -> None:
        """It did not, or somebody else had use for the core."""
        self._resume_s = now_s + self._pause_s
        self._pause_s = min(self._pause_s * PAUSE_GROWTH, PAUSE_MAX_S)
