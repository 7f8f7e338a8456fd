"""A lock at which Ctrl-C meets the one who wants it."""

from __future__ import annotations

import threading
from typing import Final


class InterruptingLock:
    """Another thread has it for a moment when the main thread wants it first, and then Ctrl-C comes."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._interrupts = True

    def __enter__(self) -> None:
        if self._interrupts and threading.current_thread() is threading.main_thread():
            self._interrupts = False
            raise KeyboardInterrupt
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
