"""Scheduled pulls: a function is called with messages of one queue, and says when the queue is due again. Pure; the consumers drive it.

    queue 0   |pull|.......... next_delay_ms ..........|pull|...
    queue 1   |pull|pull|pull|........ next_delay_ms ........|pull|
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from ._checks import check_count, is_generator_function
from ._message import Message
from ._seldom import SaidSeldom
from ._types import MessageQueue
from .errors import ConfigurationError, WrongTypeError

logger = logging.getLogger("protomq")

NEXT_DELAY_DEFAULT_MS: Final = 200
"""RocketMQ's pullNextDelayTimeMillis."""
ERROR_DELAY_MS: Final = 1_000
"""RocketMQ's pullTaskDelayTimeMillsWhenException."""
COUNT_DEFAULT: Final = 32
DELAY_MAX_MS: Final = 40 * 86_400_000
SCHEDULED_LOOK_S: Final = 0.01
"""Between two looks of a `close` whether a call has ended."""
LOOK_AGAIN_S: Final = 1.0
"""A poll of all that is due ends then, for more may be due."""

ScheduledPull = Callable[[MessageQueue, list[Message]], int | None]
AsyncScheduledPull = Callable[[MessageQueue, list[Message]], Awaitable[int | None] | int | None]


class ScheduledRun:
    """A `run_scheduled` that goes on: whether what it has handed out is done is said by how `pull` ends, also where somebody closes.

    `owner`: its thread, or its task. `close_commit`: it was closed from within a `pull`, with that `commit`, and ends when that has ended.
    """

    __slots__ = ("close_commit", "owner")

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.close_commit: bool | None = None


class PullSchedule:
    """When which queue is due."""

    def __init__(self, pull: object, next_delay_ms: int, *, may_wait: bool) -> None:
        """`may_wait`: coroutine functions can be run. Raises WrongTypeError, ConfigurationError."""
        if not callable(pull):
            raise WrongTypeError(f"pull is a function of a queue and messages, not {pull!r}")
        if not may_wait and inspect.iscoroutinefunction(pull):
            raise WrongTypeError("pull is a coroutine function, which only AsyncPullConsumer can run")
        if is_generator_function(pull):
            raise WrongTypeError("pull has a yield, so a call of it runs nothing: it returns when its queue is due again")
        _check_takes_two(pull)
        self._next_delay_ms = check_count("next_delay_ms", next_delay_ms, 0, DELAY_MAX_MS)
        self._due_s: dict[MessageQueue, float] = {}
        self._now_s = 0.0
        self._seldom = SaidSeldom(lambda: self._now_s)

    def not_due(self, queues: Iterable[MessageQueue], now_s: float) -> list[MessageQueue]:
        """Of these, those that are to wait; what is known of others is forgotten: a queue that comes is due."""
        self._due_s = {queue: self._due_s[queue] for queue in queues if self._due_s.get(queue, now_s) > now_s}
        return list(self._due_s)

    def next_due_in_s(self, now_s: float) -> float:
        """For how long to poll those that are due."""
        return min(max(min(self._due_s.values(), default=now_s + LOOK_AGAIN_S) - now_s, 0.0), LOOK_AGAIN_S)

    def pulled(self, queue: MessageQueue, said: object, now_s: float) -> None:
        """The function has returned; anything but a number of milliseconds, 0 to 40 days, or None is logged, and taken as None."""
        delay_ms = self._next_delay_ms
        if isinstance(said, int) and not isinstance(said, bool) and 0 <= said <= DELAY_MAX_MS:
            delay_ms = said
        elif said is not None and self._is_to_be_said(None, now_s):
            logger.warning("a scheduled pull of %s returned %.60r, no delay in milliseconds: it is taken as %d", queue, said, delay_ms)
        self._due_s[queue] = now_s + delay_ms / 1000

    def failed(self, queue: MessageQueue, error: Exception, now_s: float) -> None:
        """The function has raised, which is logged."""
        if self._is_to_be_said(type(error), now_s):
            logger.error(
                "a scheduled pull of %s failed: its messages come again in %d ms (a further %s is not logged for a minute)",
                queue, ERROR_DELAY_MS, type(error).__name__, exc_info=error,
            )  # fmt: skip
        self._due_s[queue] = now_s + ERROR_DELAY_MS / 1000

    def _is_to_be_said(self, kind: type | None, now_s: float) -> bool:
        self._now_s = now_s
        return self._seldom.is_due(kind)


def _check_takes_two(pull: Callable[..., object]) -> None:
    """What cannot be called would be called, and fail, for each queue every second."""
    try:
        signature = inspect.signature(pull)
    except (TypeError, ValueError):  # A function in C that tells nothing.
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigurationError(f"pull is called as pull(queue, messages), which {pull!r} does not take: {error}") from None
