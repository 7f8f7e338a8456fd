"""Calls from gRPC on their way to lanes: those that come together are handed over together. Event loop only, but for `held`.

Every group costs both threads several hand-overs of the GIL. So if many calls were under way lately (except held ones), new ones gather
until as many are here or a moment has passed. Else a call goes at the end of this iteration of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from .call import Call
from .lane import Lane

GATHER_COUNT_MIN: Final = 4
"""If this many calls for a lane were under way at once lately, the next ones are gathered; fewer callers would only wait longer."""
GATHER_S: Final = 0.002
"""Longest time to gather: a call costs 0.3 ms of CPU, so many callers wait longer for each other anyway."""
CROWD_DECAY: Final = 0.9
"""By how much the number lately under way falls from one group to the next."""


class Gathering:
    """The calls under way at each lane, and those that are about to be handed over to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lanes: Iterable[Lane]) -> None:
        self._loop = loop
        self._gathered: dict[Lane, tuple[list[Call], asyncio.Handle]] = {}
        self.under_way = dict.fromkeys(lanes, 0)
        """Calls that were taken and are not over, by lane."""
        self._crowds = dict.fromkeys(self.under_way, 0.0)
        self.held = dict.fromkeys(self.under_way, 0)
        """Of the calls under way at a lane, those that it holds; each number is changed by its lane's thread only."""

    def has_room(self, lane: Lane) -> bool:
        """Whether the lane takes another call, behind those that are gathered for it."""
        gathered = self._gathered.get(lane)
        return lane.has_room(len(gathered[0]) if gathered is not None else 0)

    def submit(self, lane: Lane, call: Call) -> None:
        """Puts the call on the lane's queue with others: one wake-up, one group."""
        crowd = self._crowds[lane] = max(
            self.under_way[lane] - self.held[lane], self._crowds[lane]
        )
        gathered = self._gathered.get(lane)
        if gathered is not None:
            gathered[0].append(call)
            if GATHER_COUNT_MIN <= crowd <= len(gathered[0]):
                gathered[1].cancel()
                self._hand_over(lane)
        elif crowd < GATHER_COUNT_MIN:
            self._gathered[lane] = [call], self._loop.call_soon(self._hand_over, lane)
        else:
            self._gathered[lane] = [call], self._loop.call_later(GATHER_S, self._hand_over, lane)

    def _hand_over(self, lane: Lane) -> None:
        calls, _ = self._gathered.pop(lane)
        self._crowds[lane] *= CROWD_DECAY
        lane.submit_all(calls)
