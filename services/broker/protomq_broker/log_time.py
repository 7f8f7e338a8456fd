"""Log time for the parts of a broker. `store/timer/log_time.py` has the rules.

A slave takes its master's log time, which may set its own back. So a broker keeps its own time beside it, which no master changes.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from .store.timer.log_time import OFF_MIN_MS, HeardTime, LogClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from protomq_runtime.clock import Clock

    from .log_time_file import LogTimeFile

log = logging.getLogger("protomq.broker")

COMPLAINT_INTERVAL_MS: Final = 60_000
"""Between two warnings that a disk does not take log time."""


class LogTime:
    """Any thread."""

    def __init__(
        self, clock: Clock, floor_ms: int, file: LogTimeFile | None = None, boottime_ms: Callable[[], int] | None = None
    ) -> None:
        """`floor_ms`: the latest log time that the log contains. `file`: keeps log time for the next start; None: nothing does.
        `boottime_ms`: the clock with which it advances, also while the machine sleeps; None: the monotonic one.
        """
        self._clock = clock
        self.boottime_ms = boottime_ms or clock.monotonic_ms
        self._file = file
        kept = None if file is None else file.load()
        wall_ms, monotonic_ms = clock.now_ms(), self.boottime_ms()
        self._log_clock = LogClock(wall_ms, monotonic_ms, floor_ms, None if kept is None else kept.log)
        self._own_clock = LogClock(wall_ms, monotonic_ms, floor_ms, None if kept is None else kept.own)
        self._heard = HeardTime()
        self._lock = threading.Lock()
        self._saving = threading.Lock()  # else an older time may be written over a newer one
        self._is_off = False
        self._is_unsaved = False
        self._complaint_due_ms = clock.monotonic_ms()

    def now_ms(self) -> int:
        """Returns milliseconds since 1970, never less than before but where a master is followed. Logs one warning when the wall clock is
        off.
        """
        with self._lock:
            now_ms = self._log_clock.now_ms(self._clock.now_ms(), self.boottime_ms())
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
            return self._own_clock.now_ms(self._clock.now_ms(), self.boottime_ms())

    def follow(self, log_time_ms: int, *, is_first: bool = False, unread_ms: int = 0) -> None:
        """Notes what the master that is followed has said. `is_first`: in a session. What was said before counts no more then: a master
        that was started on another boot may have set log time back. `unread_ms`: see `HeardTime`.

        If log time is another one by that, it is kept at once. The store may be opened again, to lead, before it is kept the next time.
        """
        with self._lock:
            if is_first:
                self._heard = HeardTime()
            wall_ms, monotonic_ms = self._clock.now_ms(), self.boottime_ms()
            before_ms = self._log_clock.now_ms(wall_ms, monotonic_ms)
            now_ms = self._heard.heard(log_time_ms, monotonic_ms, unread_ms)
            self._log_clock.go_on_from(now_ms, wall_ms, monotonic_ms)
        if abs(now_ms - before_ms) >= OFF_MIN_MS:
            self.save()

    def save(self) -> None:
        """Keeps log time for the next start; housekeeping calls it several times a second. If the disk does not take it, the older note
        leads to the same time, but for what was heard of a master since. Says so once a minute.
        """
        if self._file is None:
            return
        with self._saving:
            self._save(self._file)

    def _save(self, file: LogTimeFile) -> None:
        try:
            file.save(self.now_ms(), self.own_ms())
        except OSError as error:
            now_ms = self._clock.monotonic_ms()
            if now_ms >= self._complaint_due_ms:
                self._complaint_due_ms = now_ms + COMPLAINT_INTERVAL_MS
                log.warning(
                    "log time cannot be kept for the next start yet: %s. It is tried again. If this broker is killed before that, delays"
                    " may be off by as much as its own clock and that of its last master differ", error,
                )  # fmt: skip
            self._is_unsaved = True
            return
        if self._is_unsaved:
            self._is_unsaved = False
            log.warning("log time is kept for the next start again")

    @property
    def offset_ms(self) -> int:
        """Wall clock minus log time in ms, as of the last call of `now_ms`."""
        return self._log_clock.offset_ms
