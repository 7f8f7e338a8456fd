"""The writer of a store that follows a master. It lets other threads run a function between two appends of the thread that fetches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class FollowerWriter:
    """Any thread."""

    def __init__(self) -> None:
        self._turn = threading.RLock()

    def run(self, function: Callable[[], T]) -> T:
        """Calls the function while nobody else writes, and returns its result. Raises what the function raises."""
        with self._turn:
            return function()
