"""Calls that nobody waits for, and that a server has refused: the log has how many, and why. Over gRPC, where each call is answered.

Over the remoting port a call without a waiting caller has no answer, whatever becomes of it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable

from ._seldom import SaidSeldom
from ._types import MethodInfo
from .errors import ProtomqError

logger = logging.getLogger("protomq")


class OneWayFailures:
    """Those at one server. Any thread.

    What was not said is said by `close`. Where nobody calls that, as where an event loop ends, it is said when nobody has this any more, or
    when the interpreter ends.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._seldom = SaidSeldom(clock)
        self._lock = threading.Lock()
        self._unsaid: Counter[tuple[str, str]] = Counter()
        """By method and reason."""
        weakref.finalize(self, _say_all, address, self._unsaid)

    def note(self, method: MethodInfo, error: ProtomqError) -> None:
        """A call has failed. The log has the first one of its kind at once, and further ones as a number, once a minute."""
        kind = method.path, error.reason
        with self._lock:
            self._unsaid[kind] += 1
            count = self._unsaid.pop(kind) if self._seldom.is_due(kind) else 0
        if count:
            _say(self._address, count, method.path, f"{error} (further ones are counted, and logged once a minute)")

    def close(self) -> None:
        """Says what was not said."""
        with self._lock:
            unsaid = self._unsaid.copy()
            self._unsaid.clear()
        _say_all(self._address, unsaid)


def _say_all(address: str, unsaid: Counter[tuple[str, str]]) -> None:
    for (path, reason), count in unsaid.items():
        _say(address, count, path, reason)


def _say(address: str, count: int, path: str, why: str) -> None:
    calls = f"{count} one-way calls of" if count > 1 else "a one-way call of"
    logger.warning("%s %s failed at %s, of which no caller hears: %s", calls, path, address, why)
