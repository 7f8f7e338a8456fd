"""How long things take, counted by size: what a histogram of the metrics is made from."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

DISK_BOUNDS_S: Final = (
    0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
"""For an append or an fsync: from the page cache of an idle machine to a disk that hangs."""


LATE_BOUNDS_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0, 600.0, 3_600.0)
"""For how late a message is: from the timer's look to a broker that was down."""


class Durations:
    """Durations since the start. Any thread reads; where several observe at once, a few may be missed.

    Attributes:
        bounds_s: the largest duration that each count but the last covers, in seconds.
        counts: one more than there are bounds: the last is for what lies above them.
        sum: of all durations, in seconds.
        on_observed: called with each duration, if somebody wants it.
    """

    __slots__ = ("bounds_s", "counts", "on_observed", "sum")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum = 0.0
        self.on_observed: Callable[[float], None] | None = None

    def observe(self, duration_s: float) -> None:
        """Counts one."""
        self.counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.sum += duration_s
        if self.on_observed is not None:
            try:
                self.on_observed(duration_s)
            except Exception:  # What took so long is done: its maker must not be told otherwise.
                log.exception("a listener for durations failed")

    def observe_all(self, durations_s: NDArray[np.float64]) -> None:
        """Counts many."""
        if self.on_observed is not None:
            for duration_s in durations_s.tolist():
                self.observe(duration_s)
            return
        places = np.searchsorted(self.bounds_s, durations_s, "left")
        for place, count in enumerate(np.bincount(places, minlength=len(self.counts)).tolist()):
            self.counts[place] += count
        self.sum += float(durations_s.sum())
