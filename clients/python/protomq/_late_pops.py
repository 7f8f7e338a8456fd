"""Answers to pops that came when their `receive` was over: the next one for the same messages takes them. Else they are given back.

A broker that is slower than others would get rid of nothing otherwise, for as long as the others have messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

KEPT_S: Final = 0.2
"""For which an answer waits for the next `receive`: longer than one takes that asks a second broker. Not for more than half of the time for
which its messages are invisible: who gets them is to have time for them.
"""


class HandOut(NamedTuple):
    """What a broker has handed out: its answer."""

    broker_name: str
    data: bytes


class LatePop:
    """One that is kept. `over`: somebody has taken it, or its time is up.

    `kept_s`: for how long it may be taken; `until_s`: until when, by the clock.
    """

    def __init__(self, wanted: bytes, topic: str, hand_out: HandOut, kept_s: float, until_s: float) -> None:
        self.wanted = wanted
        self.topic = topic
        self.hand_out = hand_out
        self.kept_s = kept_s
        self.until_s = until_s
        self.over = threading.Event()


class LatePops:
    """Of one consumer. Any thread.

    No lock: a signal's handler may close the consumer on the thread that would have it. Who takes one off the list has it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: list[LatePop] = []
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __contains__(self, late: LatePop) -> bool:
        return late in self._kept

    def keep(self, wanted: bytes, topic: str, hand_out: HandOut, invisible_s: float) -> LatePop:
        """Keeps one; `wanted`: what was asked for, as bytes that are compared. `invisible_s`: for how long; 0: as the broker says, long."""
        kept_s = min(KEPT_S, invisible_s / 2) if invisible_s else KEPT_S
        late = LatePop(wanted, topic, hand_out, kept_s, self._clock() + kept_s)
        self._kept.append(late)
        if self._closed:
            late.over.set()
        return late

    def take(self, wanted: bytes) -> list[HandOut]:
        """Those that somebody wants now. One whose time is up is given back, though its keeper may not have woken up for that yet."""
        now_s = self._clock()
        taken = [late for late in self._kept.copy() if late.wanted == wanted and now_s < late.until_s and self.end(late)]
        for late in taken:
            late.over.set()
        return [late.hand_out for late in taken]

    def end(self, late: LatePop) -> bool:
        """Keeps it no longer. Whether nobody has taken it."""
        try:
            self._kept.remove(late)
        except ValueError:
            return False
        return True

    def close(self) -> list[LatePop]:
        """The time of all is up, also of those that come; those that are kept."""
        self._closed = True
        kept = self._kept.copy()
        for late in kept:
            late.over.set()
        return kept
