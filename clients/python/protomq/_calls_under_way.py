"""The calls of a producer that its `close` waits for: those of which no line knows. A message that stands in a line is waited for there."""

from __future__ import annotations

import asyncio
import threading


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
    """Calls of coroutines of one event loop: `with calls:` around each."""

    def __init__(self) -> None:
        self._count = 0
        self._ended: asyncio.Event | None = None

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count and self._ended is not None:
            self._ended.set()

    async def wait(self, timeout_s: float) -> None:
        """Until none is under way, or the time is over."""
        if not self._count:
            return
        self._ended = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return
