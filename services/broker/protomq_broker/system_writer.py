"""The broker's own appends: they are made on the send lane, like all others, since it is the only writer.

What another thread has to append it hands over with `post` or `run`. An answer that claims what was appended waits for the disk as the
answer to a send does: `when_stored`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from protomq_runtime.errors import Code, ServiceError

from .store.errors import NoWriterError, StoreFailedError

if TYPE_CHECKING:
    from protomq_runtime.clock import Clock
    from protomq_runtime.lane import Lane, Timer

    from .store.store import Store

log = logging.getLogger("protomq.broker")

Done = Callable[[Exception | None], None]
"""Told that what was appended is stored, or why it is not."""


NOT_STORED_IN_TIME: Final = ServiceError(
    Code.DEADLINE_EXCEEDED,
    "DEADLINE_EXCEEDED",
    "it is appended, but the disk has not confirmed it in time: a power cut may take it back; ask again until it is confirmed",
    definite=False,
)


class _Waiter(NamedTuple):
    position: int
    deadline_ms: int
    done: Done


class SystemWriter:
    """`post` and `run`: any thread. `append`, `when_stored`, `resolve_flushed`: the send lane. `start`, `close`: the broker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._store: Store | None = None
        self._lane: Lane | None = None
        self._closed = threading.Event()
        self._waiters: deque[_Waiter] = deque()
        self._timer: Timer | None = None
        self._timer_due_ms = 0

    def start(self, store: Store, lane: Lane) -> None:
        """From now on there is a lane that writes."""
        self._store, self._lane = store, lane

    def close(self) -> None:
        """The lane has ended: who waits for it in `run` is told so."""
        self._closed.set()

    @property
    def lane(self) -> Lane:
        """The send lane."""
        assert self._lane is not None, "start comes first"
        return self._lane

    def post(self, function: Callable[[], None]) -> None:
        """Has the function called on the send lane."""
        self.lane.post(function)

    def run(self, function: Callable[[], None]) -> None:
        """Has the function called on the send lane, and waits for it; raises what it raises, and NoWriterError."""
        if self._lane is None or self._closed.is_set():
            raise NoWriterError("the broker does not write now")
        ended = threading.Event()
        failures: list[BaseException] = []

        def call() -> None:
            try:
                function()
            except Exception as error:
                failures.append(error)
            finally:
                ended.set()

        self._lane.post(call)
        while not ended.wait(0.1):
            if self._closed.is_set():
                raise NoWriterError("the broker is stopping")
        if failures:
            raise failures[0]

    def append(self, topic: str, bodies: Sequence[bytes]) -> int:
        """Appends one record of a system topic for each body, together; where they end. Raises what `Store.append` raises."""
        assert self._store is not None
        return self._store.append_state(topic, bodies)

    def is_stored(self, position: int) -> bool:
        """Whether what is appended up to `position` is stored as a SEND_OK promises: under SYNC_FLUSH when it is synced."""
        store = self._store
        assert store is not None
        return not store.config.sync_flush or position <= store.flushed_position

    def when_stored(self, position: int, wait_ms: float, done: Done) -> None:
        """Calls `done` when `is_stored` holds, or with NOT_STORED_IN_TIME after `wait_ms`."""
        if self.is_stored(position):
            done(None)
            return
        assert self._store is not None
        deadline_ms = self._clock.monotonic_ms() + int(wait_ms)
        self._waiters.append(_Waiter(position, deadline_ms, done))
        if self._timer is None or deadline_ms < self._timer_due_ms:
            self._schedule(deadline_ms)
        self._store.request_flush()

    def resolve_flushed(self) -> None:
        """The flushed position has moved, or never will again."""
        store = self._store
        assert store is not None
        waiters, flushed, failure = self._waiters, store.flushed_position, store.log_failure
        while waiters and (waiters[0].position <= flushed or failure):
            position, _, done = waiters.popleft()
            done(None if position <= flushed else StoreFailedError(failure))
        if not waiters and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, due_ms: int) -> None:
        """One timer for all waiters, at the time of the first whose time is up."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_ms = due_ms
        wait_ms = max(1, due_ms - self._clock.monotonic_ms())
        self._timer = self.lane.call_later(wait_ms, self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        self._timer = None
        self.resolve_flushed()
        now_ms = self._clock.monotonic_ms()
        late = [waiter for waiter in self._waiters if waiter.deadline_ms <= now_ms]
        self._waiters = deque(waiter for waiter in self._waiters if waiter.deadline_ms > now_ms)
        for waiter in late:
            waiter.done(NOT_STORED_IN_TIME)
        if self._waiters:
            self._schedule(min(waiter.deadline_ms for waiter in self._waiters))
