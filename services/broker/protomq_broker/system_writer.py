"""The broker's own appends: they are made on the send lane, like all others, since it is the only writer.

What another thread has to append it hands over with `post` or `run`. An answer that claims what was appended waits in `WaitingAnswers`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .store.errors import NoWriterError

if TYPE_CHECKING:
    from protomq_runtime.call import CallLane

    from .store.log.append import AppendRequest
    from .store.store import Store
    from .write_permit import WritePermit


class SystemWriter:
    """`post` and `run`: any thread. `append`: the send lane. `start`, `close`: the broker."""

    def __init__(self, permit: WritePermit) -> None:
        self._permit = permit
        self._store: Store | None = None
        self._lane: CallLane | None = None
        self._closed = threading.Event()

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
        return self._permitted_store().append_state(topic, bodies)

    def append_moved(
        self, copies: Sequence[AppendRequest], states: Sequence[tuple[str, Sequence[bytes]]]
    ) -> int:
        """Appends copies, or none, and the records of several states in one append; where they end. Raises as `append`."""
        return self._permitted_store().append_moved(copies, states)

    def _permitted_store(self) -> Store:
        assert self._store is not None
        if self._permit.refusal is not None:
            raise self._permit.refusal
        return self._store
