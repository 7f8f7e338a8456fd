"""Remembers why a full disk refused appends, and says when to look for space again. No I/O.

Each append tries the disk, whatever stands here; this state is for people and clients. Between appends, housekeeping looks for space. A
look may be wrong because of a quota, or a disk that gives less than it says. Then the next look waits twice as long, so that the log does
not report each one. Any thread may call; the last call counts.
"""

from __future__ import annotations

from typing import Final

LOOK_PAUSE_MIN_MS: Final = 1_000
LOOK_PAUSE_MAX_MS: Final = 60_000


class FullDisk:
    """See the module's docstring.

    Attributes:
        reason: why the last append was refused; "" if it was not, or there is space again.
        was_full: an append was refused, and none was stored since; then call `stored` after the next one that is.
    """

    __slots__ = ("_has_promised", "_look_from_ms", "_pause_ms", "reason", "was_full")

    def __init__(self) -> None:
        self.reason = ""
        self.was_full = False
        # The last look found space, and nothing was stored since.
        self._has_promised = False
        self._pause_ms = 0
        self._look_from_ms = 0

    def refused(self, reason: str, now_ms: int) -> bool:
        """Notes that an append found no space. Returns whether the disk was not known to be full."""
        is_news = not self.reason
        self.reason = reason
        self.was_full = True
        if self._has_promised:
            self._has_promised = False
            self._pause_ms = min(max(2 * self._pause_ms, LOOK_PAUSE_MIN_MS), LOOK_PAUSE_MAX_MS)
            self._look_from_ms = now_ms + self._pause_ms
        return is_news

    def stored(self) -> bool:
        """Notes that an append was stored. Returns whether the disk was known to be full."""
        is_news = bool(self.reason)
        self.reason = ""
        self.was_full = self._has_promised = False
        self._pause_ms = self._look_from_ms = 0
        return is_news

    def is_look_due(self, now_ms: int) -> bool:
        """Whether to look for space now."""
        return bool(self.reason) and now_ms >= self._look_from_ms

    def found_space(self) -> None:
        """Notes that a look has found space for the next append."""
        self.reason = ""
        self._has_promised = True
