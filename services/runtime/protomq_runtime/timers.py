"""Timers of one lane: a heap, cheap to add to and to cancel from. One thread only.

A hold of 15 s that ends after 1 ms leaves a cancelled timer behind. The heap is rebuilt when more than half of it is
cancelled, so holds cost memory by their number, not by their rate.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

REBUILD_COUNT_MIN: Final = 256
"""Below this number of cancelled timers a rebuild is not worth it."""


class Timer:
    """A function to be called once, at `when` (monotonic seconds), unless cancelled."""

    __slots__ = ("_callback", "_timers", "when")

    def __init__(self, timers: Timers, when: float, callback: Callable[[], None]) -> None:
        self._timers: Timers | None = timers
        """None: it is due, and stands among them no more."""
        self._callback: Callable[[], None] | None = callback
        self.when = when

    def cancel(self) -> None:
        """Forgets the function. Harmless if it has run or was cancelled."""
        if self._callback is not None:
            self._callback = None
            if self._timers is not None:
                self._timers._note_cancelled()

    def run(self) -> None:
        """Calls the function, unless another one that was due before has cancelled it."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Timers:
    """All timers of a lane."""

    __slots__ = ("_cancelled_count", "_heap", "_sequence")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._sequence = 0
        self._cancelled_count = 0

    def __len__(self) -> int:
        return len(self._heap) - self._cancelled_count

    def add(self, when: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self, when, callback)
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, timer))
        return timer

    def next_at(self) -> float | None:
        """When the earliest timer is due (it may be a cancelled one); None: there is none."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Callable[[], None]]:
        """Takes out what is due, in the order of time. What is cancelled by then does nothing when it is called."""
        heap = self._heap
        callbacks: list[Callable[[], None]] = []
        while heap and heap[0][0] <= now:
            timer = heapq.heappop(heap)[2]
            timer._timers = None
            if timer._callback is None:
                self._cancelled_count -= 1
            else:
                callbacks.append(timer.run)
        return callbacks

    def _note_cancelled(self) -> None:
        self._cancelled_count += 1
        if self._cancelled_count >= REBUILD_COUNT_MIN and self._cancelled_count * 2 > len(
            self._heap
        ):
            self._heap = [entry for entry in self._heap if entry[2]._callback is not None]
            heapq.heapify(self._heap)
            self._cancelled_count = 0
