"""How much slower than alone a thread comes along: others may be at work on the machine, which makes everything late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

LOOK_S: Final = 0.5
SPIN_S: Final = 0.01


@contextmanager
def measured_pace(note: Callable[[float, float], None]) -> Iterator[None]:
    """Notes now and then the time, and how many times longer some work took than it would on a quiet machine."""
    is_over = threading.Event()

    def measure() -> None:
        while not is_over.wait(LOOK_S):
            began_s, ends_s = time.monotonic(), time.thread_time() + SPIN_S
            while time.thread_time() < ends_s:
                pass
            now_s = time.monotonic()
            note(now_s, max((now_s - began_s) / SPIN_S, 1.0))

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
