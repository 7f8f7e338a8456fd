"""Pop time: the clock by which messages are invisible.

Pop time advances with the machine's monotonic clock. A start continues from the pop time in the newest record of %SYS%POP. So no deadline
comes early when the wall clock jumps or while no broker runs. A holder has a message at least for its invisible time, plus the time of a
restart. Log time (`log_time.py`) is unsuitable: it follows the wall clock, by a tenth, and at once after another boot of the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protomq_runtime.clock import Clock


class PopTime:
    """Any thread."""

    def __init__(self, clock: Clock, floor_ms: int) -> None:
        """`floor_ms`: the newest pop time in the log; 0: there is none, and pop time begins at the wall clock."""
        self._clock = clock
        self._base_ms = (floor_ms or clock.now_ms()) - clock.monotonic_ms()

    def now_ms(self) -> int:
        """Milliseconds of pop time, never less than before."""
        return self._base_ms + self._clock.monotonic_ms()


def deadline_ms(now_ms: int, invisible_ms: int) -> int:
    """Pop time at which messages are due that become invisible now; 0: at once.

    The millisecond that has begun does not count: else they could be due that much too early.
    """
    return now_ms + invisible_ms + 1 if invisible_ms else now_ms
