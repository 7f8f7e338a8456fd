"""Waiting for something that says nothing when it happens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 60.0
"""For what takes a moment where nobody else is at work: only a failure waits so long."""


def wait_for(
    happened: Callable[[], object], timeout_s: float = 180.0, *, pause_s: float = 0.05
) -> None:
    """Until it has happened."""
    ends_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < ends_s, "it did not happen in time"
        time.sleep(pause_s)


def is_stopped(process_id: int) -> bool:
    """Whether each thread of a process stands still after SIGSTOP."""
    states = [thread.read_text().rpartition(")")[2].split()[0] for thread in Path(f"/proc/{process_id}/task").glob("*/stat")]
    return set(states) == {"T"}


def fastest_s(run: Callable[[], float], enough_s: float, tries: int = 5) -> float:
    """The least that `run` returned, in seconds; it runs again while that is not below `enough_s`: others may be at work here."""
    least_s = math.inf
    for _ in range(tries):
        least_s = min(least_s, run())
        if least_s < enough_s:
            break
    return least_s


async def async_wait_for(happened: Callable[[], object], timeout_s: float = 180.0) -> None:
    """The same, while everything else in this loop runs."""
    async with asyncio.timeout(timeout_s):
        while not happened():  # noqa: ASYNC110 - what is waited for happens on other threads.
            await asyncio.sleep(0.001)
