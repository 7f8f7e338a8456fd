"""Makes the broker's own appends on the send lane, since that is the only writer.

Another thread hands its appends over with `post` or `run`. An answer that claims an append waits in `WaitingAnswers`.
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
        """Starts writing: from now on there is a send lane."""
        self._store, self._lane = store, lane

    def close(self) -> None:
        """Stops when the lane has ended. Threads that wait in `run` get NoWriterError."""
        self._closed.set()

    @property
    def lane(self) -> CallLane:
        """The send lane."""
        assert self._lane is not None, "start comes first"
        return self._lane

    def post(self, function: Callable[[], None]) -> None:
        """Calls the function on the send lane, without waiting."""
        self.lane.post(function)

    def run(self, function: Callable[[], None]) -> None:
        """Calls the function on the send lane and waits for it. Raises what the function raises, and NoWriterError."""
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
        """Appends one record of a system topic for each body, all together. Returns where they end. Raises what `Store.append` raises, and
        the refusal if the broker may not write."""
        return self._permitted_store().append_state(topic, bodies)

    def append_moved(
        self, copies: Sequence[AppendRequest], states: Sequence[tuple[str, Sequence[bytes]]]
    ) -> int:
        """Appends copies (or none) and the records of several states in one append. Returns where they end. Raises as `append`."""
        return self._permitted_store().append_moved(copies, states)

    def _permitted_store(self) -> Store:
        assert self._store is not None
        if self._permit.refusal is not None:
            raise self._permit.refusal
        return self._store
