"""The clock that decides when the broker asks producers about transactions. It is never behind the store times of half messages. Pure.

When somebody sets the wall clock ahead, store times jump at once, but log time follows slowly. By log time the broker would check such a
half message hours late. So this clock jumps ahead with the store times, then advances with the monotonic clock. A wall clock that is set
ahead by an hour makes the broker ask once, too early, about every open transaction. Setting it back changes nothing.
"""

from __future__ import annotations


class CheckClock:
    """One thread."""

    def __init__(self, log_time_ms: int, monotonic_ms: int) -> None:
        self._now_ms = log_time_ms
        self._monotonic_ms = monotonic_ms

    def now_ms(self, log_time_ms: int, store_time_ms: int, monotonic_ms: int) -> int:
        """Returns milliseconds since 1970, never less than before. `store_time_ms`: store time of the log's last record."""
        elapsed_ms = monotonic_ms - self._monotonic_ms
        self._monotonic_ms = monotonic_ms
        self._now_ms = max(self._now_ms + elapsed_ms, log_time_ms, store_time_ms)
        return self._now_ms
