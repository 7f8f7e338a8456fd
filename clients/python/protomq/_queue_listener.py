"""QueueListener: how a program learns which queues its consumer gets and gives away."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence

from ._hook_points import ends_the_program
from ._late_imports import fork_waits
from ._types import MessageQueue
from .errors import WrongTypeError

logger = logging.getLogger("protomq")

ListenerMethod = Callable[[Sequence[MessageQueue]], Awaitable[None] | None]
"""A method of a QueueListener."""


class QueueListener:
    """Override what you need; all methods are called on the thread, or in the task, that polls (or subscribes, assigns, closes).

        class Totals(QueueListener):
            def on_revoked(self, queues):
                write_down_totals(queues)

        PullConsumer("readers", listener=Totals())

    The methods may call the consumer: `commit`, `seek`, `position`. With AsyncPullConsumer they may be coroutines. While one runs, nothing
    is polled; so it is to be short. One that raises is logged with its trace, and the change goes on.
    """

    def on_assigned(self, queues: Sequence[MessageQueue]) -> Awaitable[None] | None:
        """These queues came. Where to begin is not looked up yet: a `seek` here decides it."""

    def on_revoked(self, queues: Sequence[MessageQueue]) -> Awaitable[None] | None:
        """These queues go when this returns, to another member or because nobody wants them any more: the last chance to commit.

        With `auto_commit`, what was finished is committed after it.
        """

    def on_lost(self, queues: Sequence[MessageQueue]) -> Awaitable[None] | None:
        """These queues are gone already: their topic was deleted, or another member may have them. Nothing can be committed."""


def refuse_coroutines(listener: QueueListener | None) -> None:
    """Raises WrongTypeError where a method is a coroutine: no thread can run it."""
    for name in ("on_assigned", "on_revoked", "on_lost"):
        if inspect.iscoroutinefunction(getattr(listener, name, None)):
            raise WrongTypeError(
                f"{type(listener).__name__}.{name} is a coroutine function, which only AsyncPullConsumer can run"
            )


def told(method: ListenerMethod, queues: Sequence[MessageQueue]) -> Awaitable[None] | None:
    """Calls a method of a listener; an error is logged. What it returned is to be awaited if it can be."""
    try:
        result = method(queues)
    except BaseException as error:
        if ends_the_program(error):
            raise
        logger.exception("the queue listener's %s failed", method.__name__)
        return None
    return _awaited(result, method.__name__) if inspect.isawaitable(result) else None


async def _awaited(result: Awaitable[None], name: str) -> None:
    with fork_waits:
        import asyncio

        from ._loop_ends import is_closed
    own_task = asyncio.current_task()
    try:
        await result
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        logger.exception("the queue listener's %s failed", name)
    except BaseException as error:
        if ends_the_program(error) or is_closed(error, own_task):
            raise
        logger.exception("the queue listener's %s failed", name)
