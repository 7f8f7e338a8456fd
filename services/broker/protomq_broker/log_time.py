"""Log time for the parts of a broker. `store/timer/log_time.py` has the rules.

A slave takes its master's log time, which may set its own back. So a broker keeps its own time beside it, which no master changes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from .store.timer.log_time import OFF_MIN_MS, HeardTime, LogClock

if TYPE_CHECKING:
    from protomq_runtime.clock import Clock

    from .log_time_file import LogTimeFile

log = logging.getLogger("protomq.broker")


class LogTime:
    """Any thread."""

    def __init__(self, clock: Clock, floor_ms: int, file: LogTimeFile | None = None) -> None:
        """`floor_ms`: the latest log time that the log contains. `file`: keeps log time for the next start; None: nothing does."""
        self._clock = clock
        self._file = file
        kept = None if file is None else file.load()
        wall_ms, monotonic_ms = clock.now_ms(), clock.monotonic_ms()
        self._log_clock = LogClock(wall_ms, monotonic_ms, floor_ms, None if kept is None else kept.log)
        self._own_clock = LogClock(wall_ms, monotonic_ms, floor_ms, None if kept is None else kept.own)
        self._heard = HeardTime()
        self._lock = threading.Lock()
        self._is_off = False

    def now_ms(self) -> int:
        """Returns milliseconds since 1970, never less than before but where a master is followed. Logs one warning when the wall clock is
        off.
        """
        with self._lock:
            now_ms = self._log_clock.now_ms(self._clock.now_ms(), self._clock.monotonic_ms())
            is_off, offset_ms = self._log_clock.is_off, self._log_clock.offset_ms
            if is_off == self._is_off:
                return now_ms
            self._is_off = is_off
        if is_off:
            log.warning(
                "the wall clock is %+d ms away from log time, which delays follow: log time approaches it slowly",
                offset_ms,
            )
        else:
            log.warning("the wall clock and log time agree again")
        return now_ms

    def own_ms(self) -> int:
        """Returns the own time, never less than before, over restarts and changes of the master, too."""
        with self._lock:
            return self._own_clock.now_ms(self._clock.now_ms(), self._clock.monotonic_ms())

    def follow(self, log_time_ms: int) -> None:
        """Notes what the master that is followed has said. Another log time is kept at once: a store may soon be opened to lead."""
        with self._lock:
            wall_ms, monotonic_ms = self._clock.now_ms(), self._clock.monotonic_ms()
            before_ms = self._log_clock.now_ms(wall_ms, monotonic_ms)
            now_ms = self._heard.heard(log_time_ms, monotonic_ms)
            self._log_clock.go_on_from(now_ms, wall_ms, monotonic_ms)
        if abs(now_ms - before_ms) >= OFF_MIN_MS:
            self.save()

    def save(self) -> None:
        """Keeps log time for the next start. If the disk does not take it, an older note leads to the same time or an earlier one."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.save(self.now_ms(), self.own_ms())

    @property
    def offset_ms(self) -> int:
        """Wall clock minus log time in ms, as of the last call of `now_ms`."""
        return self._log_clock.offset_ms
