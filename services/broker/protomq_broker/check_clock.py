"""The clock that decides when the broker asks producers about transactions. It is never behind the store times of half messages. Pure.

When somebody sets the wall clock ahead, store times jump at once, but log time follows slowly. By log time the broker would check such a
half message hours late. So this clock jumps ahead with the store times, then advances with the monotonic clock. A wall clock that is set
ahead by an hour makes the broker ask once, too early, about every open transaction.

When it is set back, this clock goes on, and approaches log time by SLEW_RATIO. Store times stand still meanwhile. So half messages do not
have their time from them (`TransactionChecks.begun_record`).
"""

from __future__ import annotations

from typing import Final

SLEW_RATIO: Final = 0.02
"""Milliseconds that are lost on the monotonic clock for each one that passes. Five seconds are made good in four minutes."""


class CheckClock:
    """One thread."""

    def __init__(self, log_time_ms: int, monotonic_ms: int) -> None:
        self._now_ms = float(log_time_ms)
        self._monotonic_ms = monotonic_ms

    def now_ms(self, log_time_ms: int, store_time_ms: int, monotonic_ms: int) -> int:
        """Returns milliseconds since 1970, never less than before. `store_time_ms`: store time of the log's last record."""
        passed_ms = monotonic_ms - self._monotonic_ms
        self._monotonic_ms = monotonic_ms
        least_ms = max(log_time_ms, store_time_ms)
        ahead_ms = self._now_ms + passed_ms
        self._now_ms = max(ahead_ms - min(passed_ms * SLEW_RATIO, max(ahead_ms - least_ms, 0.0)), least_ms)
        return int(self._now_ms)
