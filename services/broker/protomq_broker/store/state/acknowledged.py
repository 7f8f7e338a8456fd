"""By which hand-outs messages of one queue of a group were acknowledged, of late. Pure.

An answer to an acknowledgement may be lost. Who says it again is to be told the same, though nobody holds the messages any more, and
somebody else may have had them instead. Records do not name the hand-out of what they say is acknowledged. The state knows it at that
moment, so this is known wherever records are applied. It is kept for the latest hand-outs of all queues and groups of a broker. It is no
part of a snapshot: what a start did not apply is forgotten.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final

from protomq.wire.runs import add_run, bounds

REMEMBERED_MAX: Final = 32_768
"""Runs of acknowledged messages that are known, of all queues and groups: 12 MiB. Most hand-outs have one. At 5,000 pops a second these
are 6 s."""


class Remembered:
    """What all queues and groups share. `order`: the hand-out that is first there is forgotten first."""

    __slots__ = ("order", "run_count")

    def __init__(self) -> None:
        self.order: deque[tuple[Acknowledged, int]] = deque()
        self.run_count = 0


class Acknowledged:
    """Of one queue of a group."""

    __slots__ = ("_bounds", "_forgotten_number", "_remembered", "_since_ms")

    def __init__(self, remembered: Remembered, forgotten_number: int, since_ms: int) -> None:
        """What hand-outs up to `forgotten_number`, or before the pop time `since_ms`, have acknowledged is not known."""
        self._remembered = remembered
        self._bounds: dict[int, tuple[int, list[int]]] = {}
        """By the number of the hand-out: its pop time, and where each run begins and ends, rising. No run touches the next one."""
        self._forgotten_number = forgotten_number
        self._since_ms = since_ms

    def add(self, number: int, time_ms: int, first: int, count: int) -> None:
        """Notes messages that are acknowledged while this hand-out holds them."""
        remembered, known = self._remembered, self._bounds.get(number)
        if known is None:
            known = self._bounds[number] = (time_ms, [])
            remembered.order.append((self, number))
        of_runs, end = known[1], first + count
        if of_runs and of_runs[-1] == first:  # mostly
            of_runs[-1] = end
            return
        before = len(of_runs)
        low, high = bisect_left(of_runs, first), bisect_right(of_runs, end)
        of_runs[low:high] = ([] if low % 2 else [first]) + ([] if high % 2 else [end])
        remembered.run_count += (len(of_runs) - before) // 2
        while remembered.run_count > REMEMBERED_MAX:
            oldest, forgotten_number = remembered.order.popleft()
            oldest._forget(forgotten_number)

    def _forget(self, number: int) -> None:
        _, of_runs = self._bounds.pop(number)
        self._remembered.run_count -= len(of_runs) // 2
        self._forgotten_number = max(self._forgotten_number, number)

    def parted(self, runs: Sequence[int], number: int, time_ms: int) -> tuple[list[int], list[int]]:
        """The runs, parted: what is known to be acknowledged by the hand-out of this number and time, and the rest."""
        known_time_ms, of_runs = self._bounds.get(number, (time_ms, []))
        if known_time_ms != time_ms:
            of_runs = []
        acknowledged: list[int] = []
        rest: list[int] = []
        for first, end in bounds(runs):
            index = bisect_right(of_runs, first)
            while first < end:
                stop = min(of_runs[index], end) if index < len(of_runs) else end
                add_run(acknowledged if index % 2 else rest, first, stop - first)
                first, index = stop, index + 1
        return acknowledged, rest

    def is_whole(self, number: int, time_ms: int) -> bool:
        """Whether all that the hand-out of this number and time has acknowledged is known."""
        return number > self._forgotten_number and time_ms >= self._since_ms
