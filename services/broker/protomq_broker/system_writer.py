"""The broker's own appends: they are made on the send lane, like all others, since it is the only writer.

What another thread has to append it hands over with `post` or `run`. An answer that claims what was appended waits in `WaitingAnswers`.

Messages that move come in batches (`move`). Each is one append with the records that tell of it, so a mover that dies moves nothing twice.
One batch is appended in a turn of the lane: sends that wait get on after a few milliseconds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from .store.errors import NoWriterError

if TYPE_CHECKING:
    from protomq_runtime.call import CallLane

    from .store.log.append import AppendRequest
    from .store.store import Store
    from .write_permit import WritePermit


MOVED_SIZE_MAX_BYTES: Final = 4 << 20
"""Of the copies of a batch together, where it has more than one: appended in 2 to 4 ms."""
MOVED_COUNT_MAX: Final = 4096
"""Copies of a batch: the derived structures take them in 2 ms."""


class MovedBatch(NamedTuple):
    """Messages that move together.

    Attributes:
        copies: one request for each target queue, at least one record in all.
        states: what the machines have to know of it: (system topic, bodies of records).
        on_done: told on the send lane that the batch is appended (None), or why it is not; then nothing of it is.
    """

    copies: Sequence[AppendRequest]
    states: Sequence[tuple[str, Sequence[bytes]]]
    on_done: Callable[[Exception | None], None]


class SystemWriter:
    """`post`, `run` and `move`: any thread. `append`: the send lane. `start`, `close`: the broker."""

    def __init__(self, permit: WritePermit) -> None:
        self._permit = permit
        self._store: Store | None = None
        self._lane: CallLane | None = None
        self._closed = threading.Event()
        self._moving: deque[MovedBatch] = deque()
        self._move_lock = threading.Lock()

    def start(self, store: Store, lane: CallLane) -> None:
        """From now on there is a lane that writes."""
        self._store, self._lane = store, lane

    def close(self) -> None:
        """The lane has ended: who waits for it in `run` is told so."""
        self._closed.set()

    @property
    def lane(self) -> CallLane:
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
                if self._permit.refusal is not None:
                    raise NoWriterError(self._permit.refusal.message)
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
        """Appends one record of a system topic for each body, together; where they end. Raises what `Store.append` raises, and the
        refusal where the broker may not write."""
        assert self._store is not None
        if self._permit.refusal is not None:
            raise self._permit.refusal
        return self._store.append_state(topic, bodies)

    def move(self, batch: MovedBatch) -> None:
        """Has the batch appended on the send lane, behind those that were handed over before."""
        sizes = [len(request.region.data) for request in batch.copies]
        count = sum(request.region.count for request in batch.copies)
        assert count == 1 or (count <= MOVED_COUNT_MAX and sum(sizes) <= MOVED_SIZE_MAX_BYTES)
        with self._move_lock:
            self._moving.append(batch)
            is_first = len(self._moving) == 1
        if is_first:
            self.post(self._move_next)

    def _move_next(self) -> None:
        """Appends one batch, and has the next one appended in the next turn of the lane: that begins with what came in meanwhile."""
        batch = self._moving[0]
        failure: Exception | None = None
        try:
            assert self._store is not None
            if self._permit.refusal is not None:
                raise self._permit.refusal
            self._store.append_moved(batch.copies, batch.states)
        except Exception as error:
            failure = error
        with self._move_lock:
            self._moving.popleft()
            has_more = bool(self._moving)
        if has_more:
            self.post(self._move_next)
        batch.on_done(failure)
