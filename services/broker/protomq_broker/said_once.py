"""Decides whether to write a repeated line into the broker's log: a line for each call would fill disks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

INTERVAL_S: Final = 60.0
KEYS_MAX: Final = 1_000
"""Most keys that are remembered. At more, all keys are forgotten, and their lines may be written again."""


class SaidOnce:
    """Any thread may call."""

    def __init__(
        self, interval_s: float = INTERVAL_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._said_at: dict[Hashable, float] = {}

    def is_due(self, key: Hashable) -> bool:
        """Whether to write the line now: it was not written within the interval. If so, it counts as written."""
        now = self._now_s()
        with self._lock:
            said_at = self._said_at.get(key)
            if said_at is not None and now - said_at < self._interval_s:
                return False
            if said_at is None and len(self._said_at) >= KEYS_MAX:
                self._said_at.clear()
            self._said_at[key] = now
            return True
