"""Latency fault tolerance: leave slow and failing brokers alone for a while (RocketMQ: MQFaultStrategy). Off by default, as there.

A pure state machine: it is told how long sends took and what time it is, and answers which brokers may be used. The tables
are those of RocketMQ 5:

    latency of a send, at least (ms)     50   100   550   1800   3000   5000   15000
    then not used for (ms)                0     0  2000   5000   6000  10000   30000

A send that failed counts as one of 10,000 ms ("isolation"). A broker that answers quickly again is available at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

LATENCY_MAX_MS: Final = (50, 100, 550, 1800, 3000, 5000, 15000)
NOT_AVAILABLE_DURATION_MS: Final = (0, 0, 2000, 5000, 6000, 10000, 30000)
ISOLATION_LATENCY_MS: Final = 10_000


class LatencyFaultTolerance:
    """Remembers until when each broker is to be left alone. Any thread: each call reads or writes one item of a dict."""

    __slots__ = ("_available_from_ms", "_durations_ms", "_latencies_ms")

    def __init__(
        self,
        latency_max_ms: Sequence[int] = LATENCY_MAX_MS,
        not_available_duration_ms: Sequence[int] = NOT_AVAILABLE_DURATION_MS,
    ) -> None:
        if len(latency_max_ms) != len(not_available_duration_ms) or list(latency_max_ms) != sorted(
            latency_max_ms
        ):
            raise ValueError(
                "the two tables must be of the same length, and the latencies must rise"
            )
        self._latencies_ms = tuple(latency_max_ms)
        self._durations_ms = tuple(not_available_duration_ms)
        self._available_from_ms: dict[str, float] = {}

    def duration_for(self, latency_ms: float) -> int:
        """How long a broker with that latency is left alone."""
        place = bisect_right(self._latencies_ms, latency_ms)
        return self._durations_ms[place - 1] if place else 0

    def record(
        self, broker_name: str, latency_ms: float, now_ms: float, *, failed: bool = False
    ) -> None:
        """Notes how long a send to the broker took, or that it failed."""
        duration_ms = self.duration_for(ISOLATION_LATENCY_MS if failed else latency_ms)
        if duration_ms:
            self._available_from_ms[broker_name] = now_ms + duration_ms
        else:
            self._available_from_ms.pop(broker_name, None)

    def is_available(self, broker_name: str, now_ms: float) -> bool:
        """Whether the broker may be chosen."""
        return now_ms >= self._available_from_ms.get(broker_name, now_ms)
