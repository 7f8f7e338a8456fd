"""The calls of a producer that its `close` waits for: those of which no line knows. A message that stands in a line is waited for there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Set


class ThreadCalls:
    """Calls of threads: `with calls:` around each. Any thread, and a signal's handler."""

    def __init__(self) -> None:
        self._threads: list[int] = []
        self._ended = threading.Condition()
        self._is_awaited = False

    def __enter__(self) -> None:
        self._threads.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.remove(threading.get_ident())
        if self._is_awaited:
            with self._ended:
                self._ended.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until none is under way, or the time is over.

        Those of its own thread do not count: a hook closes the producer, or a signal's handler.
        """
        self._is_awaited = True
        with self._ended:
            self._ended.wait_for(self._are_own, timeout_s)

    def _are_own(self) -> bool:
        return set(self._threads) <= {threading.get_ident()}


class TaskCalls:
    """Calls of coroutines of one event loop: `with calls.one():` around each.

    Attributes:
        now: those that are under way.
    """

    def __init__(self) -> None:
        self.now: set[TaskCall] = set()
        self._changed: asyncio.Event | None = None

    def one(self) -> TaskCall:
        """A call, as a context manager. It may end where no loop runs any more."""
        return TaskCall(self)

    def ended(self, call: TaskCall) -> None:
        """A call has its outcome."""
        self.now.discard(call)
        if self._changed is not None:
            self._changed.set()

    async def wait(self, timeout_s: float, of: Set[TaskCall] | None = None) -> int:
        """Until none is under way, or none of these, or the time is over; how many are."""
        if not self._left(of):
            return 0
        try:
            async with asyncio.timeout(timeout_s):
                while self._left(of):
                    if self._changed is None:
                        self._changed = asyncio.Event()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self._left(of)

    def _left(self, of: Set[TaskCall] | None) -> int:
        return len(self.now if of is None else self.now & of)


class TaskCall:
    """One of them. No generator: that takes almost three times as long, for each send."""

    __slots__ = ("_calls",)

    def __init__(self, calls: TaskCalls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._calls.now.add(self)

    def __exit__(self, *_: object) -> None:
        self._calls.ended(self)
