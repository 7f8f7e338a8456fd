"""Calls that nobody waits for, and that a server has refused: the log has how many, and why. Over gRPC, where each call is answered.

Over the remoting port a call without a waiting caller has no answer, whatever becomes of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from ._seldom import SaidSeldom
from ._types import MethodInfo
from .errors import ProtomqError

logger = logging.getLogger("protomq")


class OneWayFailures:
    """Those at one server. Any thread."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._seldom = SaidSeldom(clock)
        self._lock = threading.Lock()
        self._unsaid: Counter[tuple[str, str]] = Counter()
        """By method and reason."""

    def note(self, method: MethodInfo, error: ProtomqError) -> None:
        """A call has failed. The log has the first one of its kind at once, and further ones as a number, once a minute."""
        kind = method.path, error.reason
        with self._lock:
            self._unsaid[kind] += 1
            count = self._unsaid.pop(kind) if self._seldom.is_due(kind) else 0
        if count:
            self._say(count, method.path, f"{error} (further ones are counted, and logged once a minute)")

    def close(self) -> None:
        """Says what was not said."""
        with self._lock:
            unsaid, self._unsaid = self._unsaid, Counter()
        for (path, reason), count in unsaid.items():
            self._say(count, path, reason)

    def _say(self, count: int, path: str, why: str) -> None:
        calls = f"{count} one-way calls of" if count > 1 else "a one-way call of"
        logger.warning("%s %s failed at %s, of which no caller hears: %s", calls, path, self._address, why)
