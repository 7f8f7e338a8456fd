"""StopFlag: what a signal's handler sets, while its thread may wait for that.

A `threading.Event` does not do: its lock is not reentrant. A handler that sets it on a thread that is about to wait waits for itself.
"""

from __future__ import annotations

import threading


class StopFlag:
    """Any thread, and a signal's handler. Wait in slices: a handler may come between the look and the wait."""

    def __init__(self) -> None:
        self._is_set = False
        self._changed = threading.Condition()

    def set(self) -> None:
        """From now on."""
        self._is_set = True
        with self._changed:
            self._changed.notify_all()

    def clear(self) -> None:
        """No more."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Whether it is set by then."""
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout_s)
