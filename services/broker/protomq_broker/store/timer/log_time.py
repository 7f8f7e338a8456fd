"""Log time: the clock by which delayed messages fall due. It never goes back, and never jumps.

    log time   advances with the monotonic clock, a little faster or slower while the wall clock says something else

Rules:
- A step of the wall clock, forward or back, is followed at SLEW_RATIO: one second off is made good in ten. So a clock that somebody sets an
  hour ahead delivers nothing an hour early, and one that is set back stops nothing.
- Both clocks count whole milliseconds, each from a moment of its own. So one between them is no difference, and is not followed.
- How far the two are apart is known (`offset_ms`); beyond OFF_MIN_MS it is to be said.
- A start goes on where log time was, plus the time that has passed since, if the machine was not started again (`log_time_file.py`).
  Where the wall clock is behind that, log time lost a tenth meanwhile, as if the broker had run. Else a start would be a jump.
  After another boot it begins at the wall clock. In both cases it never begins below the log time that the log itself has seen.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SLEW_RATIO: Final = 0.1
"""Milliseconds that log time gains or loses on the monotonic clock, for each one that passes."""
UNEQUAL_MIN_MS: Final = 2
OFF_MIN_MS: Final = 1_000
"""NTP keeps a clock within milliseconds; a second is a fault that somebody should hear of."""


class KeptTime(NamedTuple):
    """A log time that was kept, in ms since 1970, and how many ms have passed since."""

    log_time_ms: int
    passed_ms: int

    def continued_ms(self, wall_ms: int) -> int:
        """Returns what log time is now."""
        ahead_ms = self.log_time_ms + self.passed_ms
        loss_max_ms = int(self.passed_ms * SLEW_RATIO)
        return min(ahead_ms, max(wall_ms, ahead_ms - loss_max_ms))


class LogClock:
    """Pure: it is given the two clocks. One thread at a time."""

    def __init__(
        self, wall_ms: int, monotonic_ms: int, floor_ms: int = 0, kept: KeptTime | None = None
    ) -> None:
        """`floor_ms`: log time has been there already. `kept`: by an earlier start; None: nobody knows, the wall clock counts."""
        self._log_ms = float(max(wall_ms if kept is None else kept.continued_ms(wall_ms), floor_ms))
        self._monotonic_ms = monotonic_ms
        self.offset_ms = wall_ms - int(self._log_ms)
        """Wall clock less log time, as of the last look."""

    def now_ms(self, wall_ms: int, monotonic_ms: int) -> int:
        """Log time at this moment: milliseconds since 1970, never less than before."""
        passed_ms = max(monotonic_ms - self._monotonic_ms, 0)
        self._monotonic_ms = max(monotonic_ms, self._monotonic_ms)
        ahead_ms = self._log_ms + passed_ms
        slew_max_ms = passed_ms * SLEW_RATIO
        apart_ms = wall_ms - ahead_ms
        if abs(apart_ms) < UNEQUAL_MIN_MS:
            apart_ms = 0.0
        self._log_ms = ahead_ms + min(max(apart_ms, -slew_max_ms), slew_max_ms)
        now_ms = int(self._log_ms)
        self.offset_ms = wall_ms - now_ms
        return now_ms

    @property
    def is_off(self) -> bool:
        """Whether the wall clock is more than a second away: somebody has set it, or the machine slept."""
        return abs(self.offset_ms) > OFF_MIN_MS
