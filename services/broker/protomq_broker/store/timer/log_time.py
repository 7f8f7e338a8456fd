"""Log time: the clock by which delayed messages fall due. It never goes back, and never jumps.

    log time   advances with CLOCK_BOOTTIME, a little faster or slower while the wall clock says something else

That clock is monotonic, and counts while the machine sleeps. Where there is none, the monotonic clock is taken in its place.

Rules:
- A step of the wall clock, forward or back, is followed at SLEW_RATIO: one second off is made good in ten. So a clock that somebody sets an
  hour ahead delivers nothing an hour early, and one that is set back stops nothing.
- Both clocks count whole milliseconds, each from a moment of its own. So one between them is no difference, and is not followed.
- How far the two are apart is known (`offset_ms`); beyond OFF_MIN_MS it is to be said.
- A start goes on where log time was, plus the time that has passed since, if the machine was not started again (`log_time_file.py`).
  Where the wall clock is behind that, log time lost a tenth meanwhile, as if the broker had run. Else a start would be a jump.
  After another boot it begins at the wall clock. In both cases it never begins below the log time that the log itself has seen.
- A slave takes the log time of its master (`HeardTime`), and goes on with it when it leads: deadlines are in its master's log time. Nothing
  depends on a slave's log time before, so it may go back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

SLEW_RATIO: Final = 0.1
"""Milliseconds that log time gains or loses on that clock, for each one that passes."""
UNEQUAL_MIN_MS: Final = 2
OFF_MIN_MS: Final = 1_000
"""NTP keeps a clock within milliseconds; a second is a fault that somebody should hear of."""
HEARD_FOR_MS: Final = 5_000
"""How long what a master has said counts, at least; twice as long at most."""
UNREAD_MIN_MS: Final = 1_000
"""A reader of answers that has stood still for less has read them as they came. It turns twice as often."""
NEVER_MS: Final = -(1 << 62)


class KeptTime(NamedTuple):
    """A log time that was kept, in ms since 1970, and how many ms have passed since."""

    log_time_ms: int
    passed_ms: int

    def continued_ms(self, wall_ms: int) -> int:
        """Returns what log time is now."""
        ahead_ms = self.log_time_ms + self.passed_ms
        loss_max_ms = int(self.passed_ms * SLEW_RATIO)
        return min(ahead_ms, max(wall_ms, ahead_ms - loss_max_ms))


class HeardTime:
    """Log time of a master, which says it now and then. Pure. One thread at a time.

    What it says is late by its way, and by what is stored before it is looked at. So the latest that follows from what was said in some
    seconds counts. No longer: the master's log time may be slower than the monotonic clock.

    What may have lain unread while this process stood still says only that it is not earlier now. What was heard before goes on with the
    monotonic clock then, until the next answer. Only if it is farther ahead than the answer can be late, the master has set it back.
    """

    def __init__(self) -> None:
        self._apart_ms = self._apart_before_ms = self._since_ms = NEVER_MS

    def heard(self, log_time_ms: int, monotonic_ms: int, unread_ms: int = 0) -> int:
        """Notes what the master has said, and returns its log time now. `unread_ms`: so long it may have lain unread."""
        apart_ms = log_time_ms - monotonic_ms
        if unread_ms:
            known_ms = max(self._apart_ms, self._apart_before_ms)
            ahead_max_ms = unread_ms * (1 + SLEW_RATIO) + 2 * HEARD_FOR_MS * SLEW_RATIO
            if known_ms - apart_ms <= ahead_max_ms and known_ms > NEVER_MS:
                self._apart_ms = max(self._apart_ms, apart_ms)
                return monotonic_ms + max(known_ms, apart_ms)
            self._since_ms = NEVER_MS
        passed_ms = monotonic_ms - self._since_ms
        if passed_ms >= HEARD_FOR_MS:
            self._apart_before_ms = self._apart_ms if passed_ms < 2 * HEARD_FOR_MS else NEVER_MS
            self._apart_ms, self._since_ms = apart_ms, monotonic_ms
        self._apart_ms = max(self._apart_ms, apart_ms)
        return monotonic_ms + max(self._apart_ms, self._apart_before_ms)


class UnreadAnswers:
    """Which answers may have lain unread, since their reader stood still: its process or machine was stopped, or a disk was slow.

    Pure. One thread. An answer that was asked for after that is a new one.
    """

    def __init__(self, now_ms: int) -> None:
        self._turned_ms = self._since_ms = now_ms
        self._request_ids: frozenset[int] = frozenset()

    def turn(self, now_ms: int, under_way: Collection[int]) -> None:
        """The reader runs at this moment. `under_way`: the requests whose answers are not read yet."""
        if now_ms - self._turned_ms >= UNREAD_MIN_MS:
            if self._request_ids.isdisjoint(under_way):
                self._since_ms = self._turned_ms
            self._request_ids = frozenset(under_way)
        self._turned_ms = now_ms

    def unread_ms(self, request_id: int) -> int:
        """How long the answer to that request may have lain unread, as of the last turn; 0: it was read as it came."""
        return self._turned_ms - self._since_ms if request_id in self._request_ids else 0


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

    def go_on_from(self, log_time_ms: int, wall_ms: int, monotonic_ms: int) -> None:
        """It is that log time now, earlier or later than it was."""
        self._log_ms = float(log_time_ms)
        self._monotonic_ms = max(monotonic_ms, self._monotonic_ms)
        self.offset_ms = wall_ms - log_time_ms

    @property
    def is_off(self) -> bool:
        """Whether the wall clock is more than a second away: somebody has set it."""
        return abs(self.offset_ms) > OFF_MIN_MS
