"""Pop time: the clock by which messages are invisible.

It advances with the machine's monotonic clock, and goes on at a start where the newest record of %SYS%POP left it. So neither a step of the
wall clock nor a time in which no broker ran lets a deadline come early: a holder has a message for at least as long as it was told, and
longer by the time that a restart took. Log time (`log_time.py`) would not do: it follows the wall clock, by a tenth while it runs, and at
once at a start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protomq_runtime.clock import Clock


class PopTime:
    """Any thread."""

    def __init__(self, clock: Clock, floor_ms: int) -> None:
        """`floor_ms`: the newest pop time that the log tells; 0: it tells none, and pop time begins with the wall clock."""
        self._clock = clock
        self._base_ms = (floor_ms or clock.now_ms()) - clock.monotonic_ms()

    def now_ms(self) -> int:
        """Never less than before."""
        return self._base_ms + self._clock.monotonic_ms()
