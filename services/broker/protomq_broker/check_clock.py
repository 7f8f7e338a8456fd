"""The time by which producers are asked about their transactions: never behind the store times of half messages. Pure.

Log time follows a wall clock that was set ahead only slowly; the store times of messages follow it at once. Of a half message that was
stored then, nobody would be asked for hours. So this clock goes ahead with the store times, and from there on with the monotonic clock.
A wall clock that is set ahead by an hour has every open transaction asked about once, too early; one that is set back changes nothing.
"""

from __future__ import annotations


class CheckClock:
    """One thread."""

    def __init__(self, log_time_ms: int, monotonic_ms: int) -> None:
        self._now_ms = log_time_ms
        self._monotonic_ms = monotonic_ms

    def now_ms(self, log_time_ms: int, store_time_ms: int, monotonic_ms: int) -> int:
        """Milliseconds since 1970. `store_time_ms`: of the log's last record. Never less than before."""
        elapsed_ms = monotonic_ms - self._monotonic_ms
        self._monotonic_ms = monotonic_ms
        self._now_ms = max(self._now_ms + elapsed_ms, log_time_ms, store_time_ms)
        return self._now_ms
