"""The writer of a store that follows: whoever has something to do between two appends takes turns with the thread that fetches."""

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
        """Calls it while nobody else writes; what it gives. Raises what it raises."""
        with self._turn:
            return function()
