"""Answers to pops that came when their `receive` was over: the next one for the same messages takes them. Else they are given back.

A broker that is slower than others would get rid of nothing otherwise, for as long as the others have messages.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

KEPT_S: Final = 0.2
"""For which an answer waits for the next `receive`: longer than one takes that asks a second broker."""


class HandOut(NamedTuple):
    """What a broker has handed out: its answer."""

    broker_name: str
    data: bytes


class LatePop:
    """One that is kept. `over`: somebody has taken it, or its time is up."""

    def __init__(self, wanted: bytes, topic: str, hand_out: HandOut) -> None:
        self.wanted = wanted
        self.topic = topic
        self.hand_out = hand_out
        self.over = threading.Event()


class LatePops:
    """Of one consumer. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[LatePop] = []
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __contains__(self, late: LatePop) -> bool:
        return late in self._kept

    def keep(self, wanted: bytes, topic: str, hand_out: HandOut) -> LatePop:
        """Keeps one; `wanted`: what was asked for, as bytes that are compared."""
        late = LatePop(wanted, topic, hand_out)
        with self._lock:
            self._kept.append(late)
            if self._closed:
                late.over.set()
        return late

    def take(self, wanted: bytes) -> list[HandOut]:
        """Those that somebody wants now."""
        with self._lock:
            taken = [late for late in self._kept if late.wanted == wanted]
            self._kept = [late for late in self._kept if late.wanted != wanted]
        for late in taken:
            late.over.set()
        return [late.hand_out for late in taken]

    def end(self, late: LatePop) -> bool:
        """Keeps it no longer. Whether nobody has taken it."""
        with self._lock:
            if late not in self._kept:
                return False
            self._kept.remove(late)
            return True

    def close(self) -> list[LatePop]:
        """The time of all is up, also of those that come; those that are kept."""
        with self._lock:
            self._closed = True
            kept = list(self._kept)
        for late in kept:
            late.over.set()
        return kept
