"""Working on a run: its messages to its listener, one call after the other. One loop for threads, one for coroutines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from . import _forks
from ._child_ends import end_child
from ._loop_ends import is_closed
from ._message import Message
from ._push_results import Failure, Judgement, Listener, Said, failure_of, judge
from ._push_state import Run
from ._requests import asks_for_reply
from ._seldom import SaidSeldom
from ._typed_listeners import OfAll
from ._types import MessageQueue
from .errors import SchemaError

logger = logging.getLogger("protomq")

Settle = Callable[[Run, Sequence[Message], Sequence[Failure | None]], None]
"""Takes what a listener said of messages, where it is not simply that they are done. From the thread or task that works on the run."""


class Worker:
    """What the threads or tasks of one consumer have in common. Any thread."""

    def __init__(self, settle: Settle, seldom: SaidSeldom, *, comes_again: bool = True) -> None:
        """`comes_again`: whether a message that fails does."""
        self.is_locked: Callable[[MessageQueue], bool] = lambda _: True
        """Of an orderly run, whether its next message may be begun."""
        self._settle = settle
        self._comes_again = comes_again
        self._seldom = seldom

    def work(self, run: Run) -> None:
        """All of a run whose listener is a function."""
        listener, messages, done = run.listener, run.messages, run.done
        call = listener.call
        fork_count = _forks.fork_count
        asks, queue = self._asks(run), run.work.queue
        if listener.batch_size is not None:
            while (asks is None or asks(queue)) and (batch := _next_batch(messages, listener.batch_size)):
                run.current = batch
                outcome = self._outcome(run, call, batch)
                self._say(run, batch, outcome)
                if run.is_orderly and outcome is not None and _is_held_up(outcome):
                    return
            return
        while asks is None or asks(queue):
            try:
                message = messages.popleft()
            except IndexError:
                return
            run.current = message
            try:
                result = call(message)
            except BaseException as error:  # sys.exit() in a listener ends no thread of ours.
                if _forks.fork_count != fork_count:
                    end_child(error)
                judgement = self._raised(listener, error, 1)
            else:
                if _forks.fork_count != fork_count:
                    end_child()
                if result is None:
                    done.append(message)
                    continue
                judgement = self._judged(run, result, 1)
            self._say(run, (message,), judgement)
            if run.is_orderly and _is_held_up(judgement):
                return

    async def work_async(self, run: Run) -> None:
        """All of a run whose listener is a coroutine function."""
        listener, messages, done = run.listener, run.messages, run.done
        call = listener.call
        size = listener.batch_size
        fork_count, own_task = _forks.fork_count, asyncio.current_task()
        asks, queue = self._asks(run), run.work.queue
        while (asks is None or asks(queue)) and (batch := _next_batch(messages, size or 1)):
            given: Any = batch if size is not None else batch[0]
            run.current = batch if size is not None else batch[0]
            try:
                result = await call(given)
            except asyncio.CancelledError as error:
                if own_task is None or own_task.cancelling():
                    raise  # The consumer stops: nobody knows what became of these.
                self._say(run, batch, self._raised(listener, error, len(batch)))
                continue
            except BaseException as error:
                if _forks.fork_count != fork_count:
                    end_child(error)
                if is_closed(error, own_task):
                    raise
                self._say(run, batch, self._raised(listener, error, len(batch)))
                continue
            if _forks.fork_count != fork_count:
                end_child()
            if result is None:
                done.extend(batch)
            else:
                self._say(run, batch, self._judged(run, result, len(batch)))

    def _asks(self, run: Run) -> Callable[[MessageQueue], bool] | None:
        """What each next message waits for: until it is known whose the queue is. None: nothing."""
        return self.is_locked if run.is_orderly else None

    def _outcome(self, run: Run, call: Callable[[Any], Any], batch: Sequence[Message]) -> Judgement | None:
        fork_count = _forks.fork_count
        try:
            result = call(batch)
        except BaseException as error:
            if _forks.fork_count != fork_count:
                end_child(error)
            return self._raised(run.listener, error, len(batch))
        if _forks.fork_count != fork_count:
            end_child()
        return None if result is None else self._judged(run, result, len(batch))

    def _say(self, run: Run, messages: Sequence[Message], judgement: Judgement | None) -> None:
        if judgement is None:
            run.done.extend(messages)
        else:
            if judgement.nonsense and asks_for_reply(messages[0]) and self._seldom.is_due((run.listener.name, "reply")):
                logger.warning("%s: the sender of %r waits for a reply: call reply(message, ...)", run.listener.name, messages[0])
            run.current = None
            self._settle(run, messages, judgement.failures)

    def _raised(self, listener: Listener, error: BaseException, count: int) -> Judgement:
        self._say_raised(listener, error)
        failure = failure_of(error)
        if isinstance(error, Said):
            error.__traceback__ = None  # It may be a constant, raised again and again: its trace would grow.
        return Judgement([failure] * count)

    def _say_raised(self, listener: Listener, error: BaseException) -> None:
        if not isinstance(error, Said) and self._seldom.is_due((listener.name, type(error))):
            logger.warning(
                "%s raised %s: its message %s (a further one of this kind is not logged for a minute)",
                listener.name, type(error).__name__, self._goes(error), exc_info=error,
            )  # fmt: skip

    def _goes(self, error: BaseException) -> str:
        if not self._comes_again:
            return "is dropped"
        return "is a dead letter" if isinstance(error, SchemaError) else "comes again while its group has retries left"

    def _judged(self, run: Run, result: object, count: int) -> Judgement:
        listener = run.listener
        judgement = judge(result, count, is_batch=listener.batch_size is not None, in_order=run.is_orderly)
        if judgement.nonsense and self._seldom.is_due((listener.name, "nonsense")):
            logger.warning("%s %s", listener.name, judgement.nonsense)
        if isinstance(result, OfAll) and result.raised is not None:
            self._say_raised(listener, result.raised)
            if isinstance(result.raised, Said):
                result.raised.__traceback__ = None  # As in `_raised`.
        return judgement


def _is_held_up(judgement: Judgement) -> bool:
    """Whether an orderly queue waits for a message."""
    return any(failure is not None and not failure.is_dead_letter for failure in judgement.failures)


def _next_batch(messages: Any, size: int) -> list[Message]:
    """The next ones, as many as a listener takes at a time; others may take from the other end meanwhile."""
    batch: list[Message] = []
    try:
        while len(batch) < size:
            batch.append(messages.popleft())
    except IndexError:
        pass
    return batch
