"""Calls of callers that ask again and again are taken together, if they come at about the same time.

A call alone costs a turn of each lane that it passes, whatever it asks for. Who has asked beside others lately will do so again, so a call
waits for the others, but not for long. A caller alone never waits, and neither do large calls, whose fixed cost hardly counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from protomq_runtime.execution import fail_unanswered

if TYPE_CHECKING:
    from protomq_runtime.call import Call, CallLane
    from protomq_runtime.timers import Timer

GATHER_MS: Final = 2
"""Longest wait of a call for others. A disk takes as long to store what the call asks for."""
ENOUGH_COUNT: Final = 16
ENOUGH_SIZE_BYTES: Final = 16 << 10
"""With so much gathered, nobody is waited for."""


class GatheredCalls:
    """Of one lane, on its thread."""

    def __init__(self, lane: CallLane, take: Callable[[Sequence[Call]], None]) -> None:
        """`take` gets what was gathered."""
        self._lane = lane
        self._take = take
        self._gathered: list[Call] = []
        self._size_bytes = 0
        self._open: list[Call] = []
        """Calls that were not answered when the last one came."""
        self._at_once = 1
        """So many were open at one time, lately."""
        self._timer: Timer | None = None

    def add(self, calls: Sequence[Call]) -> None:
        """These have come in one turn."""
        self._open = [call for call in self._open if not call.answered]
        self._open += calls
        self._at_once = max(self._at_once, len(self._open))
        self._gathered += calls
        self._size_bytes += sum(len(call.payload) for call in calls)
        if len(self._gathered) >= min(self._at_once, ENOUGH_COUNT) or self._size_bytes >= ENOUGH_SIZE_BYTES:
            self._go_on()
        elif self._timer is None:
            self._timer = self._lane.call_later(GATHER_MS, self._wait_no_more)

    def _wait_no_more(self) -> None:
        # The others ask no more, or not at the same time.
        self._at_once = len(self._gathered)
        self._go_on()

    def _go_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._gathered, self._size_bytes = self._gathered, [], 0
        try:
            self._take(gathered)
        except Exception as error:
            fail_unanswered(gathered, error)
