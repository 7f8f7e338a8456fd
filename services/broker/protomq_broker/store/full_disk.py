"""What is known of a full disk from the appends that it refused: why, and when somebody looks for space. No I/O.

Each append tries, whatever stands here: this is what people and clients are told. Between appends housekeeping looks whether there is
space again. A look may be wrong (a quota, a disk that gives less than it says): then the next one waits twice as long, so that the log
does not tell of each. One thread or another may call: the last word counts.
"""

from __future__ import annotations

from typing import Final

LOOK_PAUSE_MIN_MS: Final = 1_000
LOOK_PAUSE_MAX_MS: Final = 60_000


class FullDisk:
    """See the module's docstring.

    Attributes:
        reason: why the last append was refused; "" if it was not, or there is space again.
        was_full: an append was refused, and none stored since: `stored` is to be told of the next one.
    """

    __slots__ = ("_has_promised", "_look_from_ms", "_pause_ms", "reason", "was_full")

    def __init__(self) -> None:
        self.reason = ""
        self.was_full = False
        self._has_promised = False  # there was space, said the last look, and nothing was stored since
        self._pause_ms = 0
        self._look_from_ms = 0

    def refused(self, reason: str, now_ms: int) -> bool:
        """An append found no space; whether that is news."""
        is_news = not self.reason
        self.reason = reason
        self.was_full = True
        if self._has_promised:
            self._has_promised = False
            self._pause_ms = min(max(2 * self._pause_ms, LOOK_PAUSE_MIN_MS), LOOK_PAUSE_MAX_MS)
            self._look_from_ms = now_ms + self._pause_ms
        return is_news

    def stored(self) -> bool:
        """An append was stored; whether that is news."""
        is_news = bool(self.reason)
        self.reason = ""
        self.was_full = self._has_promised = False
        self._pause_ms = self._look_from_ms = 0
        return is_news

    def is_look_due(self, now_ms: int) -> bool:
        """Whether to look for space now."""
        return bool(self.reason) and now_ms >= self._look_from_ms

    def found_space(self) -> None:
        """A look says that the next append will have space."""
        self.reason = ""
        self._has_promised = True
