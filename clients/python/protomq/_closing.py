"""How clients of an event loop end: in a task of its own, so that no caller's cancellation is the end of it.

    stop() ──▶ task: the end in order ──▶ whoever still waits
                │ it fails, or the loop ends, which cancels all tasks
                ▼
               the end in a hurry, HURRY_S at most ──▶ its connections are closed at once

A caller may be cancelled at any await: once by `asyncio.timeout`, at every one by anyio. It gets its CancelledError, and the task goes on.
A second `stop` waits for the same task. So nobody who was told to leave a group stays a member, whose queues nobody consumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Final, Generic, TypeVar

logger = logging.getLogger("protomq")

HURRY_S: Final = 2.0
"""What the end of a loop waits for one client: its last commit, and brokers that hear that it leaves."""

T = TypeVar("T")

_under_way: Final[set[asyncio.Future[Any]]] = set()
"""A loop keeps no task alive, and nobody may have the client any more."""
_within: Final[contextvars.ContextVar[frozenset[int]]] = contextvars.ContextVar("protomq_closing", default=frozenset())
"""Ids of those whose end this is a part of."""


class Closing(Generic[T]):
    """The end of one client. Coroutines of its event loop.

    It refers to nothing of the client before it begins: a client that nobody has is to be collected at once.
    """

    def __init__(self, nothing: T) -> None:
        """`nothing`: what a caller gets when somebody has the result already."""
        self._nothing = nothing
        self._task: asyncio.Future[T] | None = None
        self._caller_count = 0
        self._is_told = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self._task is not None and self._task.done()

    @property
    def is_own(self) -> bool:
        """Whether the caller is a part of the end, as a listener that is called in it: it would wait for itself."""
        return id(self) in _within.get()

    @property
    def task(self) -> asyncio.Future[T] | None:
        """The end, once it has begun; for whoever wants nothing but to wait for it."""
        return self._task

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for it."""
        return self._caller_count > 0

    async def wait(
        self, end: Callable[[], Coroutine[Any, Any, T]], hurry: Callable[[], Coroutine[Any, Any, T]], abort: Callable[[], object]
    ) -> T:
        """Begins the end, unless it has begun, and waits for it. The first caller gets what it returns or raises.

        `hurry`: what must be done where `end` is cut off, at any place. `abort`: closes what is open, without waiting, where that
        is cut off, too.
        """
        if asyncio._get_running_loop() is None:
            return await end()  # The first step of a task that begins where it is made, before its loop runs.
        task = self._task
        # In a loop that is closed, nothing goes on.
        if task is None or (not task.done() and task.get_loop().is_closed()):
            task = self._begin(end, hurry, abort)
        self._caller_count += 1
        try:
            if not task.done():
                await asyncio.wait((task,))
        finally:
            self._caller_count -= 1
        if self._is_told:
            return self._nothing
        self._is_told = True
        return task.result()

    def _begin(
        self, end: Callable[[], Coroutine[Any, Any, T]], hurry: Callable[[], Coroutine[Any, Any, T]], abort: Callable[[], object]
    ) -> asyncio.Future[T]:
        context = contextvars.copy_context()
        context.run(_within.set, _within.get() | {id(self)})
        task = asyncio.get_running_loop().create_task(_Steps(end, hurry), name="protomq-closing", context=context)
        self._task = task
        _under_way.add(task)
        task.add_done_callback(partial(self._over, abort))
        return task

    def _over(self, abort: Callable[[], object], task: asyncio.Future[T]) -> None:
        _under_way.discard(task)
        if task.cancelled():
            abort()
        elif (error := task.exception()) is not None:
            abort()
            if not self.is_awaited and not self._is_told:
                logger.error("a client was not closed in order, and nobody waits for its end", exc_info=error)


class _Steps(Coroutine[Any, Any, T]):
    """What the task runs. A task that is cancelled before its first step would do nothing at all: this one hurries."""

    def __init__(self, end: Callable[[], Coroutine[Any, Any, T]], hurry: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._end = end
        self._hurry = hurry
        self._begun: Coroutine[Any, Any, T] | None = None

    def send(self, value: Any) -> Any:
        """See Coroutine."""
        if self._begun is None:
            self._begun = _in_order(self._end, self._hurry)
        return self._begun.send(value)

    def throw(self, error: Any, *rest: Any) -> Any:
        """See Coroutine."""
        if self._begun is None:
            self._begun = _hurried(self._hurry, error)
            return self._begun.send(None)
        return self._begun.throw(error, *rest)

    def close(self) -> None:
        """See Coroutine."""
        if self._begun is not None:
            self._begun.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError("a task drives it")


async def _in_order(end: Callable[[], Coroutine[Any, Any, T]], hurry: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        return await end()
    except GeneratorExit:  # Its loop is gone.
        raise
    except BaseException as error:
        cut_off = error
    try:
        return await _hurried(hurry, cut_off)
    finally:
        # An error that refers to this frame is not to be kept by it.
        del cut_off


async def _hurried(hurry: Callable[[], Coroutine[Any, Any, T]], cut_off: BaseException) -> T:
    """Returns what `hurry` does, if the end was cancelled, and raises what it was cut off by else."""
    try:
        result = await _in_time(hurry)
    except Exception as error:
        raise cut_off from error
    if isinstance(cut_off, asyncio.CancelledError):
        return result
    raise cut_off


async def _in_time(hurry: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Tries again where it is cancelled: a program may cancel all tasks before its loop does. So may what it waits for be cancelled."""
    ends_s = time.monotonic() + HURRY_S
    while True:
        try:
            async with asyncio.timeout(ends_s - time.monotonic()):
                return await hurry()
        except asyncio.CancelledError:
            if time.monotonic() >= ends_s:
                raise
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
