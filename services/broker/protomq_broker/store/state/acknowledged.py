"""By which hand-outs messages of one queue of a group were acknowledged, of late. Pure.

An answer to an acknowledgement may be lost. Who says it again is to be told the same, though nobody holds the messages any more, and
somebody else may have had them instead. Records do not name the hand-out of what they say is acknowledged. The state knows it at that
moment, so this is known wherever records are applied. It is kept for the latest hand-outs of all queues and groups of a broker. It is no
part of a snapshot: what a start did not apply is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from .runs import add_run, bounds

REMEMBERED_MAX: Final = 32_768
"""Hand-outs whose acknowledged messages are known, of all queues and groups: 12 MiB. At 5,000 pops a second these are 6 s."""


class Acknowledged:
    """`order` is shared by all queues and groups: what is first there is forgotten first.

    `forgotten_number`: what hand-outs up to this one have acknowledged before is not known.
    """

    __slots__ = ("_forgotten_number", "_order", "_runs")

    def __init__(self, order: deque[tuple[Acknowledged, int]], forgotten_number: int) -> None:
        self._order = order
        self._runs: dict[int, tuple[int, list[int]]] = {}
        """By the number of the hand-out: its pop time, and the runs."""
        self._forgotten_number = forgotten_number

    def add(self, number: int, time_ms: int, first: int, count: int) -> None:
        """Notes messages that are acknowledged while this hand-out holds them."""
        known = self._runs.get(number)
        if known is None:
            known = self._runs[number] = (time_ms, [])
            self._order.append((self, number))
            if len(self._order) > REMEMBERED_MAX:
                oldest, forgotten_number = self._order.popleft()
                oldest._forget(forgotten_number)
        add_run(known[1], first, count)

    def _forget(self, number: int) -> None:
        del self._runs[number]
        self._forgotten_number = max(self._forgotten_number, number)

    def parted(self, runs: Sequence[int], number: int, time_ms: int) -> tuple[list[int], list[int]]:
        """The runs, parted: what is known to be acknowledged by the hand-out of this number and time, and the rest."""
        known_time_ms, known = self._runs.get(number, (time_ms, []))
        offsets = {offset for first, end in bounds(known) for offset in range(first, end)} if known_time_ms == time_ms else set()
        parts: tuple[list[int], list[int]] = ([], [])
        for first, end in bounds(runs):
            for offset in range(first, end):
                add_run(parts[offset not in offsets], offset, 1)
        return parts

    def is_whole(self, number: int) -> bool:
        """Whether all that this hand-out has acknowledged is known."""
        return number > self._forgotten_number
