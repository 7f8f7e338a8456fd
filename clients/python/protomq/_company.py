"""Company: callers that were answered together, and so come together to the line where they do what is next.

Threads that were woken behind one answer reach the next line one by one. The first would find it free, and go out alone. A quarter of the
requests of 32 threads with transactions carried one of them. A request costs as much as twenty callers more in it. So whoever leads a
line waits for those who were answered together, if they come within a millisecond of their answer. A caller that comes later than that
waits for nobody, and so does one that was answered alone.

Work of their own between the two lines may keep them longer, or for ever. Then the wait was of no use, and there is none for a while. That
is 1 ms first, four times as long with each failure, and 100 ms at most. Each success halves it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

TOGETHER_S: Final = 0.001
"""From an answer until its callers are expected no more."""
PAUSE_MIN_S: Final = 0.001
PAUSE_GROWTH: Final = 4
PAUSE_MAX_S: Final = 0.1


class Company:
    """Who is expected in one line. Any thread."""

    __slots__ = (
        "_clock", "_gate", "_lock", "_missing", "_pause_s", "_resume_s", "_together_s", "_until_s",
    )  # fmt: skip

    def __init__(
        self, *, together_s: float = TOGETHER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._together_s = together_s
        self._clock = clock
        self._lock = threading.Lock()
        self._gate: threading.Lock | None = None
        """What a leader waits for."""
        self._missing = 0
        self._until_s = 0.0
        self._pause_s = PAUSE_MIN_S
        self._resume_s = 0.0

    @property
    def is_expected(self) -> bool:
        """Whether anybody is, or was and has not come."""
        return self._missing > 0

    def expect(self, count: int) -> None:
        """So many have just been answered together."""
        if count < 2:
            return
        now_s = self._clock()
        with self._lock:
            if now_s >= self._resume_s:
                self._missing = count + (self._missing if now_s < self._until_s else 0)
                self._until_s = now_s + self._together_s

    def arrive(self) -> None:
        """One caller has come."""
        if not self._missing:
            return
        with self._lock:
            self._missing = max(self._missing - 1, 0)
            if not self._missing and self._gate is not None:
                self._gate.release()
                self._gate = None

    def wait(self) -> None:
        """Until all have come, or are expected no more. Of several leaders only one waits."""
        if not self._missing:
            return
        with self._lock:
            left_s = self._until_s - self._clock()
            if left_s <= 0:
                self._missing = 0
            if not self._missing or self._gate is not None:
                return
            gate = self._gate = threading.Lock()
            gate.acquire()
        try:
            gate.acquire(timeout=left_s)
        finally:  # an interrupt, too, ends the wait
            with self._lock:
                self._end_wait(gate)

    def _end_wait(self, gate: threading.Lock) -> None:
        if self._gate is not gate:  # all have come
            self._pause_s = max(self._pause_s / 2, PAUSE_MIN_S)
            return
        self._gate = None
        self._missing = 0
        self._resume_s = self._clock() + self._pause_s
        self._pause_s = min(self._pause_s * PAUSE_GROWTH, PAUSE_MAX_S)
