"""When a slave opens its store again, since a replica has healed parts of the log that its start had skipped.

What is healed is served after the next start, and a lead that begins with that start takes long. So a slave does it before it is elected.
A start may find these parts damaged once more, on a bad disk. Then it is made again and again, ever more seldom.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from .store.log.recovery import DamagedRange

PARTLY_HEALED_WAIT_MS: Final = 30_000
"""From when some of the parts are healed until the store is opened for these alone: the others may be on their way."""
FIRST_PAUSE_MS: Final = 10_000
"""Between two openings for the same parts. It doubles each time."""
PAUSE_MAX_MS: Final = 3_600_000


class HealedReopens:
    """See the module's docstring. No I/O; one thread."""

    def __init__(self) -> None:
        self._healed: frozenset[DamagedRange] = frozenset()
        self._healed_at_ms = 0
        self._opened_for: frozenset[DamagedRange] = frozenset()
        self._pause_ms = 0
        self._not_before_ms = 0

    def is_due(self, healed: Collection[DamagedRange], *, is_whole: bool, now_ms: int) -> bool:
        """Whether the store is to be opened again now.

        `healed`: what waits for the next start, as far as this start knows. `is_whole`: all that it has skipped is healed.
        """
        parts = frozenset(healed)
        if parts != self._healed:
            self._healed, self._healed_at_ms = parts, now_ms
        if not is_whole and (not parts or now_ms < self._healed_at_ms + PARTLY_HEALED_WAIT_MS):
            return False
        return self._is_new or now_ms >= self._not_before_ms

    def note_opening(self, now_ms: int) -> None:
        """The store is opened again, for what was due."""
        longer_ms = 0 if self._is_new else 2 * self._pause_ms
        self._pause_ms = min(max(longer_ms, FIRST_PAUSE_MS), PAUSE_MAX_MS)
        self._not_before_ms = now_ms + self._pause_ms
        self._opened_for |= self._healed

    @property
    def _is_new(self) -> bool:
        """Whether the store was never opened again for some of what is healed."""
        return not self._healed <= self._opened_for
