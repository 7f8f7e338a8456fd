"""How long a slave waits before it tries its master again: longer and longer while that is silent. Neither clock nor thread."""

from __future__ import annotations

from typing import Final

RETRY_PAUSE_S: Final = 0.25
RETRY_PAUSE_MAX_S: Final = 3.0
ELECTED_PAUSE_S: Final = 0.02
ELECTED_PAUSE_MAX_S: Final = 0.25
"""Pauses before the next try where the master is elected: the first, and the longest. They are short because sends of a new master wait for
its slaves. When the election names another one, a pause ends at once, and the next one is the first again."""


class FollowPauses:
    """The pauses of one slave."""

    def __init__(self, *, is_elected: bool) -> None:
        """`is_elected`: whether brokers elect the master."""
        self._first_s, self._max_s = (ELECTED_PAUSE_S, ELECTED_PAUSE_MAX_S) if is_elected else (RETRY_PAUSE_S, RETRY_PAUSE_MAX_S)
        self._next_s = self._first_s
        self._heard_ms: int | None = None

    def after(self, heard_ms: int | None, *, needs_others: bool) -> float:
        """The pause after a try, in seconds. `heard_ms`: when the master has said something last; None: never.

        `needs_others`: trying again does not help before an operator, or another broker, has done something.
        """
        if needs_others:
            self._next_s = RETRY_PAUSE_MAX_S
        elif heard_ms != self._heard_ms:
            self._next_s = self._first_s
        self._heard_ms = heard_ms
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return pause_s

    def begin_again(self) -> None:
        """Another master is named: the next pause is the first."""
        self._next_s = self._first_s
