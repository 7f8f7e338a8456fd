"""The permit to change the store. The broker gets it after it has asked the name servers whether its name is free.

Sends wait in their lane, which starts late. Other changing calls come on lanes that serve from the start, so they wait here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from protomq_runtime.errors import DEADLINE_EXCEEDED, system_busy

if TYPE_CHECKING:
    from protomq_runtime.call import Call
    from protomq_runtime.errors import ServiceError

WAITING_MAX: Final = 1_000
"""Calls that wait for the decision, which takes some 2 s at most. More are refused (SYSTEM_BUSY)."""
RETRY_DELAY_MS: Final = 1_000


class WritePermit:
    """A permit that is decided once: given, or refused for good. Any thread."""

    def __init__(self) -> None:
        self._deciding = threading.Lock()
        self._is_decided = False
        self._refusal: ServiceError | None = None
        self._waiting: list[Callable[[], None]] = []
        self._waiting_count = 0

    @property
    def refusal(self) -> ServiceError | None:
        """Why this broker makes no changes; None: the permit is given or not decided yet."""
        return self._refusal

    def give(self) -> bool:
        """Gives the permit, unless it was refused before. Returns whether it is given."""
        self._decide(None)
        return self._refusal is None

    def refuse(self, refusal: ServiceError) -> None:
        """Refuses the permit for good, unless it was given before."""
        self._decide(refusal)

    def when_given(self, calls: Sequence[Call], change: Callable[[list[Call]], None]) -> None:
        """Calls `change` with the calls on their common lane, at once or when the permit is given. If it is refused, the calls fail."""
        with self._deciding:
            is_decided = self._is_decided
            has_room = self._waiting_count + len(calls) <= WAITING_MAX
            if not is_decided and has_room:
                self._waiting_count += len(calls)
                lane = calls[0].lane
                self._waiting.append(lambda: lane.post(lambda: self._go_on(calls, change)))
        if is_decided:
            self._go_on(calls, change)
        elif not has_room:
            _fail(calls, system_busy(calls[0].lane.pool_name, RETRY_DELAY_MS))

    def _go_on(self, calls: Sequence[Call], change: Callable[[list[Call]], None]) -> None:
        if self._refusal is not None:
            _fail(calls, self._refusal)
            return
        now = time.monotonic()
        late = [call for call in calls if call.deadline is not None and now > call.deadline]
        _fail(late, DEADLINE_EXCEEDED)
        in_time = [call for call in calls if call not in late]
        if in_time:
            change(in_time)

    def _decide(self, refusal: ServiceError | None) -> None:
        with self._deciding:
            if self._is_decided:
                return
            self._is_decided, self._refusal = True, refusal
            waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()


def _fail(calls: Sequence[Call], error: ServiceError) -> None:
    for call in calls:
        call.fail(error)
