"""Whether a line of the log was written a short while ago: what each call would say again fills disks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

INTERVAL_S: Final = 60.0
KEYS_MAX: Final = 1_000
"""Beyond it all are forgotten, and may be said again."""


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
        """Whether it is to be said now: it was not within the interval. If so, it counts as said."""
        now = self._now_s()
        with self._lock:
            said_at = self._said_at.get(key)
            if said_at is not None and now - said_at < self._interval_s:
                return False
            if said_at is None and len(self._said_at) >= KEYS_MAX:
                self._said_at.clear()
            self._said_at[key] = now
            return True
