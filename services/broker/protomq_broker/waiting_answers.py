"""Answers that claim an append. They wait until the readable position shows that it is stored as SEND_OK promises.

What waits is an entry in a deque, not a thread. All methods on the send lane's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from protomq_runtime.errors import Code, ServiceError

from .store.errors import StoreFailedError

if TYPE_CHECKING:
    from protomq_runtime.call import CallLane
    from protomq_runtime.clock import Clock
    from protomq_runtime.timers import Timer

    from .store.store import Store

Done = Callable[[Exception | None], None]
"""Called with None when the append is stored, otherwise with the reason: NOT_STORED_IN_TIME, NOT_COPIED_IN_TIME or StoreFailedError."""

NOT_STORED_IN_TIME: Final = ServiceError(
    Code.DEADLINE_EXCEEDED,
    "DEADLINE_EXCEEDED",
    "it is appended, but the disk has not confirmed it in time: a power cut may take it back; try again until it is confirmed",
    definite=False,
)
NOT_COPIED_IN_TIME: Final = ServiceError(
    Code.DEADLINE_EXCEEDED,
    "DEADLINE_EXCEEDED",
    "it is appended, but the slaves that are waited for have not confirmed it in time: a fail-over may take it back; try again until it is"
    " confirmed",
    definite=False,
)


class _Waiter(NamedTuple):
    position: int
    deadline_ms: int
    done: Done


class WaitingAnswers:
    """See the module's docstring."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._positions = store.positions
        self._clock = clock
        self._waiters: deque[_Waiter] = deque()
        self._timer: Timer | None = None
        self._timer_due_ms = 0

    def is_stored(self, position: int) -> bool:
        """Whether what is appended up to `position` is stored as promised."""
        return position <= self._positions.readable

    def wait(self, lane: CallLane, position: int, wait_ms: float, done: Done) -> None:
        """Calls `done` when `is_stored` is true, when it can never become true, or after `wait_ms`. Positions must come in rising order."""
        if self.is_stored(position):
            done(None)
            return
        deadline_ms = self._clock.monotonic_ms() + int(wait_ms)
        self._waiters.append(_Waiter(position, deadline_ms, done))
        if self._timer is None or deadline_ms < self._timer_due_ms:
            self._schedule(lane, deadline_ms)

    def request_flush(self) -> None:
        """Wakes the flusher if anybody waits; once for all answers of one append."""
        if self._waiters:
            self._store.request_flush()

    def resolve(self) -> None:
        """Called when the readable position has moved, or can never move again."""
        waiters, readable = self._waiters, self._positions.readable
        failure = self._store.log_failure
        while waiters and (waiters[0].position <= readable or failure):
            position, _, done = waiters.popleft()
            # After a failed fsync the message may be lost, so the caller gets an error and no send status.
            done(None if position <= readable else StoreFailedError(failure))
        if not waiters and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, lane: CallLane, due_ms: int) -> None:
        """One timer for all waiters, at the time of the first whose time is up."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_ms = due_ms
        wait_ms = max(1, due_ms - self._clock.monotonic_ms())
        self._timer = lane.call_later(wait_ms, lambda: self._give_up(lane))

    def _give_up(self, lane: CallLane) -> None:
        self._timer = None
        self.resolve()
        now_ms = self._clock.monotonic_ms()
        late = [waiter for waiter in self._waiters if waiter.deadline_ms <= now_ms]
        self._waiters = deque(waiter for waiter in self._waiters if waiter.deadline_ms > now_ms)
        for waiter in late:
            waiter.done(NOT_STORED_IN_TIME if self._positions.waits_for_disk(waiter.position) else NOT_COPIED_IN_TIME)
        if self._waiters:
            self._schedule(lane, min(waiter.deadline_ms for waiter in self._waiters))
