"""What is logged seldom, however often it happens."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Final

SAID_AGAIN_S: Final = 60.0


class SaidSeldom:
    """Lines that would fill a log: each once a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_s: dict[Hashable, float] = {}

    def is_due(self, what: Hashable) -> bool:
        """Whether to say it now."""
        now_s = self._clock()
        if now_s < self._next_s.get(what, -math.inf):
            return False
        if len(self._next_s) > 1000:
            self._next_s.clear()
        self._next_s[what] = now_s + SAID_AGAIN_S
        return True
