"""Cuts a lane's long work into slices that take turns, so that the lane's other calls wait for one slice at most.

    turn of the lane     slice of A | sockets, other calls | slice of B | sockets, other calls | slice of A ...

Each lane has its own `LaneTurns`, touched by that lane's thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

SLICE_S: Final = 0.001
"""Length of one slice. It ends up to a millisecond late, and two lanes that do such work share the interpreter. So a call that comes
in between begins within 5 ms.
"""

Step = Callable[[], bool]
"""Works for SLICE_S at most, and returns whether there is more to do."""


class LaneTurns:
    """The slices of one lane. `post` calls a function in the lane's next turn."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._steps: deque[Step] = deque()

    def add(self, step: Step) -> None:
        """Calls `step` once a turn until it returns False."""
        self._steps.append(step)
        if len(self._steps) == 1:
            self._post(self._run)

    def _run(self) -> None:
        # The step stays in the deque until its slice is done; otherwise `add` would post a second turn.
        step = self._steps[0]
        try:
            has_more = step()
        except BaseException:
            has_more = False
            raise
        finally:
            self._steps.popleft()
            if has_more:
                self._steps.append(step)
            if self._steps:
                self._post(self._run)
