"""Waiting for something that says nothing when it happens."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(
    happened: Callable[[], bool], timeout_s: float = 180.0, *, pause_s: float = 0.05
) -> None:
    """Until it has happened."""
    ends_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < ends_s, "it did not happen in time"
        time.sleep(pause_s)
