"""What an event loop leaves behind that ends while others wait for what its tasks do.

    asyncio.run returns, Ctrl-C   it cancels all tasks; one that has not begun yet does nothing at all, not even its `finally`
    the loop is closed            nothing runs any more, and whoever waits in it cannot be told

A task that serves others gives up what it has left where it is cut off. Whoever waits for that, and is not cancelled, gets an error.
"""

from __future__ import annotations

import asyncio
from typing import Any

from .errors import ClosedError


def is_closed(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether a coroutine of the task ends since its loop is gone, and nobody goes on with it; else `error` is the program's own."""
    if not isinstance(error, GeneratorExit):
        return False
    return asyncio._get_running_loop() is None or asyncio.current_task() is not task


def cancel(task: asyncio.Task[Any]) -> None:
    """Unless its loop is closed, where nobody can be told."""
    if not task.get_loop().is_closed():
        task.cancel()


def why_ended(error: BaseException) -> str:
    """Why a task ended that should have gone on: what it was thrown."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "the event loop ended"
    return f"it was interrupted by {error!r}"


def given_up(why: str, *, is_under_way: bool) -> ClosedError:
    """For whoever waits for what nobody goes on with. `is_under_way`: it may be done all the same."""
    error = ClosedError(f"{why}, and nobody knows whether the broker has taken it" if is_under_way else f"{why} before it was sent")
    error.definite = not is_under_way
    return error


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Unless it has an outcome, or is of a closed loop, in which nobody can be told."""
    if not future.done() and not future.get_loop().is_closed():
        future.set_exception(error)
