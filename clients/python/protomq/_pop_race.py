"""A pop at several brokers: which is asked when. Pure: time is handed in by a clock, and calls are made by a driver (`_steps.Race`).

    asked without a hold, one after the other ──▶ all that have nothing hold a call each ──▶ the first that has messages

Rules:
- The next broker is asked when the one before has answered, or has been silent for APART_S. So brokers that have much are asked one at a
  time, and one that is silent holds nobody up.
- It is over when messages have come, all have failed, or the time is up. It is over FAILED_S after one has failed, too: another race asks
  that one again. The driver gives up what is under way.
- Over gRPC what is on its way when a call is cancelled is lost for its invisible time. So a broker of an earlier version, which cannot be
  told to end a hold, holds nothing there. If it is one of them, all that have nothing are asked again, one after the other, each AGAIN_S.
- A broker that is silent has CALL_EXTRA_S to answer, also beyond the hold. The others go on holding for as long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from ._message import Message
from ._steps import CallServer, Start
from .errors import ProtomqError

CALL_EXTRA_S: Final = 5.0
"""What a pop may take beyond its hold: a cold disk, a slow network."""
APART_S: Final = 0.1
FAILED_S: Final = 0.1
AGAIN_S: Final = 0.1


class PopRace:
    """One go. The driver's thread or loop.

    Attributes:
        found: what came, by broker; of more than one where they came together.
        failures: of brokers.
        answered: brokers that have said anything.
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[[str, int], CallServer],
        decode: Callable[[str, bytes], list[Message]],
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        may_hold: Callable[[str], bool] = lambda name: True,
        is_closed: Callable[[], bool] = lambda: False,
    ) -> None:
        """`make`: the call to a broker, with its hold in milliseconds; `decode`: its answer; `limit_s`: when it is over, by the clock.

        `may_hold`: whether nothing is lost that a broker, which has answered, has sent when its hold ends. `is_closed`: whether nobody
        waits for the race any more.
        """
        self.found: list[tuple[str, list[Message]]] = []
        self.failures: dict[str, ProtomqError] = {}
        self.answered: set[str] = set()
        self._make = make
        self._decode = decode
        self._limit_s = limit_s
        self._clock = clock
        self._count = len(names)
        self._unasked = deque(names)
        self._asked_s: dict[str, float] = {}
        """When those were asked that have not answered yet."""
        self._idle: list[str] = []
        """Those that have nothing, and hold no call."""
        self._is_up = False
        self._may_hold = may_hold
        self._is_closed = is_closed
        self._again_s = clock() + AGAIN_S
        """When those that nobody may hold are asked again."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be waited for."""
        return bool(self.found) or self._is_up or len(self.failures) == self._count or self._is_closed()

    @property
    def silent(self) -> list[str]:
        """Brokers that were asked, and have said nothing for a while."""
        now_s = self._clock()
        return [name for name, asked_s in self._asked_s.items() if now_s - asked_s >= APART_S]

    def begin(self) -> list[Start]:
        """The first calls."""
        return self._go_on()

    def ended(self, name: str, outcome: bytes | ProtomqError) -> list[Start]:
        """A call has ended, perhaps of a race that is over; the next ones."""
        self._asked_s.pop(name, None)
        try:
            if isinstance(outcome, ProtomqError):
                raise outcome
            messages = self._decode(name, outcome)
        except ProtomqError as error:
            if self.is_over:
                return []
            self.failures[name] = error
            self._limit_s = min(self._limit_s, self._clock() + FAILED_S)
            return self._go_on()
        self.answered.add(name)
        if messages:
            self.found.append((name, messages))
        else:
            self._idle.append(name)
        return self._go_on()

    def due(self) -> list[Start]:
        """Time has passed; the next calls."""
        return self._go_on()

    def wait_s(self) -> float:
        """Until `due` is to be called, if nothing ends before."""
        now_s = self._clock()
        moments = [asked_s + APART_S for asked_s in self._asked_s.values() if asked_s + APART_S > now_s]
        if not moments and not self._may_be_held():
            moments.append(self._again_s)
        return max(min([self._end_s(), *moments]) - now_s, 0.0)

    def _may_be_held(self) -> bool:
        return all(map(self._may_hold, self._idle))

    def _end_s(self) -> float:
        # Another race asks again those that failed: who is silent has only the time after which the next one is asked.
        extra_s = APART_S if self.failures else CALL_EXTRA_S
        return max([self._limit_s, *(asked_s + extra_s for asked_s in self._asked_s.values())])

    def _go_on(self) -> list[Start]:
        now_s = self._clock()
        if self.is_over or any(now_s - asked_s < APART_S for asked_s in self._asked_s.values()):
            return []
        if self._unasked:
            name = self._unasked.popleft()
            self._asked_s[name] = now_s
            return [Start(name, self._make(name, 0))]
        left_s = self._end_s() - now_s
        if left_s <= 0:
            self._is_up = True
            return []
        if not self._may_be_held():
            if now_s < self._again_s:
                return []
            self._again_s = now_s + AGAIN_S
            self._unasked.extend(self._idle)
            self._idle.clear()
            return self._go_on()
        names, self._idle = self._idle, []
        return [Start(name, self._make(name, max(round(left_s * 1000), 1))) for name in names]
