"""Hooks around messages that a program consumes: by a listener, by `poll`, by `receive`. See `hooks.ConsumeContext`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from ._child_ends import ending_children
from ._hook_points import HookPoints
from ._loops import Loop
from ._message import Message
from ._push_results import Listener, Said, failure_of, judge
from ._typed_listeners import OfAll
from .hooks import ConsumeContext

NOT_DEALT_WITH: Final = "the consumer was closed without a commit"
NOT_HANDED_ON: Final = "the loop was left before this message"
HELD_MAX: Final = 10_000
"""Messages of a simple consumer that are remembered until they are acknowledged."""


def hooked_listener(listener: Listener, hooks: HookPoints, *, in_order: bool = False) -> Listener:
    """The listener, with the hooks around its calls; as it is where there are none. `in_order`: as of `judge`."""
    if not hooks.consume:
        return listener
    call, name, is_batch = ending_children(listener).call, listener.name, listener.batch_size is not None

    def begin(given: Any) -> ConsumeContext:
        return hooks.before_consume(given if is_batch else (given,), name)

    def returned(context: ConsumeContext, result: object) -> None:
        failures = judge(result, len(context.messages), is_batch=is_batch, in_order=in_order).failures
        error = result.raised if isinstance(result, OfAll) and not isinstance(result.raised, Said) else None
        hooks.after_consume(context, [None if one is None else one.error or "to be retried" for one in failures], error)

    def raised(context: ConsumeContext, error: BaseException) -> None:
        if isinstance(error, Said):
            returned(context, error)
            return
        hooks.after_consume(context, [failure_of(error).error] * len(context.messages), error)

    def call_hooked(given: Any) -> Any:
        context = begin(given)
        try:
            result = call(given)
        except BaseException as error:
            raised(context, error)
            raise
        returned(context, result)
        return result

    async def call_hooked_async(given: Any) -> Any:
        context = begin(given)
        try:
            result = await call(given)
        except BaseException as error:
            raised(context, error)
            raise
        returned(context, result)
        return result

    return replace(
        listener, call=call_hooked_async if listener.is_coroutine else call_hooked, function=listener.function or call
    )


class HandedOut:
    """What `poll` gave, until the program comes back. One thread at a time."""

    def __init__(self, hooks: HookPoints) -> None:
        self._hooks = hooks
        self._open: list[tuple[ConsumeContext, Loop | None]] = []

    def gave(self, messages: Sequence[Message], loop: Loop | None = None) -> None:
        """The messages go to the program now, one by one if by a loop; those before them were finished."""
        self.came_back()
        if messages:
            self._open.append((self._hooks.before_consume(messages), loop))

    def came_back(self) -> None:
        """What was given has been finished, but for what a loop has yet to hand on."""
        opened, self._open = self._open, []
        for context, loop in opened:
            if loop is None or loop.is_through:
                self._finish(context, loop, None)
            else:
                self._open.append((context, loop))

    def ended(self, failure: str | None = None) -> None:
        """The consumer is closed. `failure`: why what was given has not been finished, but for what a loop has gone on from."""
        opened, self._open = self._open, []
        for context, loop in opened:
            self._finish(context, loop, failure)

    def _finish(self, context: ConsumeContext, loop: Loop | None, failure: str | None) -> None:
        if loop is None:
            failures = [failure] * len(context.messages)
        else:
            why = failure or NOT_HANDED_ON
            unfinished = {id(message) for message in loop.unseen(with_current=failure is not None)}
            failures = [why if id(message) in unfinished else None for message in context.messages]
        self._hooks.after_consume(context, failures)


class HeldMessages:
    """What `receive` gave, until each message is acknowledged. Any thread."""

    def __init__(self, hooks: HookPoints) -> None:
        self._hooks = hooks
        self._contexts: OrderedDict[tuple[bytes, int], ConsumeContext] = OrderedDict()

    def gave(self, messages: Iterable[Message]) -> None:
        """The messages go to the program now."""
        for message in messages:
            self._contexts[_key(message)] = self._hooks.before_consume((message,))
            if len(self._contexts) > HELD_MAX:
                self._contexts.popitem(last=False)

    def settled(self, messages: Iterable[Message], failure: str | None) -> None:
        """They are done, or were given back."""
        for message in messages:
            context = self._contexts.pop(_key(message), None)
            if context is not None:
                self._hooks.after_consume(context, (failure,))


def _key(message: Message) -> tuple[bytes, int]:
    return getattr(message.queue, "receipt", b""), message.queue_offset
