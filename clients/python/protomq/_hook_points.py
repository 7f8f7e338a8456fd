"""Calling hooks: which of them have something to say at which point, and what comes of what they raise. Any thread.

    HookPoints(group, hooks)       .send  .consume  .filter  .end  .call: the hooks that have a method there; empty: nothing to do

Callers look whether a point is empty before they make a context, so a client without hooks pays for that look alone.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ._checks import check_hook
from ._late_imports import fork_waits
from ._outgoing import OutgoingMessage
from .errors import ConfigurationError, WrongTypeError
from .hooks import (
    CallContext,
    CommitContext,
    ConsumeContext,
    EndTransactionContext,
    Hook,
    ReceiveContext,
    SendContext,
    SettleContext,
)

if TYPE_CHECKING:
    from ._message import Message
    from ._outgoing import SendResult
    from ._transactions import End
    from ._types import BrokerAddress, MessageQueue, MethodInfo, Route

logger = logging.getLogger("protomq")

_POINTS: Final = {
    "send": ("before_send", "after_send"),
    "receive": ("before_receive", "after_receive"),
    "settle": ("before_settle", "after_settle"),
    "commit": ("before_commit", "after_commit"),
    "consume": ("before_consume", "after_consume"),
    "filter": ("keeps",),
    "end": ("before_end_transaction", "after_end_transaction"),
    "call": ("before_call", "after_call"),
}
_NAMES: Final = [name for names in _POINTS.values() for name in names]
_BEGAN: Final = "began_s"
"""The key of our own note."""


def check_hooks(hooks: object) -> None:
    """Raises WrongTypeError for what are no hooks, ConfigurationError for methods that nobody can call, or whose names are most likely
    misspelled.
    """
    if not isinstance(hooks, Sequence) or isinstance(hooks, str):
        raise WrongTypeError(f"hooks is a list of Hook, not {hooks!r}")
    for hook in hooks:
        with fork_waits:
            import difflib

        if not isinstance(hook, Hook):
            raise WrongTypeError(f"a hook is derived from protomq.hooks.Hook, {hook!r} is not")
        for name in _NAMES:
            method = getattr(hook, name)
            if inspect.iscoroutinefunction(method):
                raise WrongTypeError(f"the methods of a hook are functions, {name} of {hook!r} is a coroutine function")
            if getattr(type(hook), name) is not getattr(Hook, name):
                check_hook(f"{name} of {hook!r}", "one message" if name == "keeps" else "one context", method)
        for name in dir(hook):
            if not hasattr(Hook, name) and (meant := difflib.get_close_matches(name, _NAMES, 1, 0.8)):
                raise ConfigurationError(f"nobody calls {name} of {hook!r}; did you mean {meant[0]}?")


class HookPoints:
    """The hooks of one client."""

    __slots__ = (
        "_hooks", "_kind_of", "_name", "_route_of", "_said", "call", "commit", "consume", "end", "filter", "group", "receive", "send",
        "settle",
    )  # fmt: skip

    def __init__(self, group: str, hooks: Iterable[Hook] = (), client_id: str = "") -> None:
        self.group = group
        self._name: Callable[[], str] = lambda: client_id
        self._route_of: Callable[[str], Route | None] = lambda _: None
        self._kind_of: Callable[[BrokerAddress], str] = lambda _: ""
        self._hooks: tuple[Hook, ...] = ()
        self._said: set[tuple[int, str]] = set()
        self.send: tuple[Hook, ...] = ()
        self.receive: tuple[Hook, ...] = ()
        self.settle: tuple[Hook, ...] = ()
        self.commit: tuple[Hook, ...] = ()
        self.consume: tuple[Hook, ...] = ()
        self.filter: tuple[Hook, ...] = ()
        self.end: tuple[Hook, ...] = ()
        self.call: tuple[Hook, ...] = ()
        for hook in hooks:
            self.add(hook)

    @property
    def client_id(self) -> str:
        """What the client is called: the same as a member of a group, in traces and in spans."""
        return self._name()

    def named_by(self, name: Callable[[], str]) -> None:
        """From now on the client is called what this returns."""
        self._name = name

    def located_by(self, route_of: Callable[[str], Route | None], kind_of: Callable[[BrokerAddress], str]) -> None:
        """From now on brokers are where these say. `route_of`: a topic's route as it was known last. `kind_of`: by which transport a broker
        is called.
        """
        self._route_of, self._kind_of = route_of, kind_of

    def server_of(self, queues: Iterable[MessageQueue]) -> str:
        """host:port of the broker that has all of them; "" if there are several, or it is not known."""
        first = None
        for queue in queues:
            if first is None:
                first = queue
            elif queue.broker_name != first.broker_name:
                return ""
        route = None if first is None else self._route_of(first.topic)
        if first is None or route is None or first.broker_name not in route.brokers:
            return ""
        address = route.brokers[first.broker_name]
        if self._kind_of(address) == "grpc":
            return address.grpc_address
        return address.remoting_address or address.grpc_address

    def add(self, hook: Hook) -> None:
        """One more, behind the others. Before the client's first use."""
        self._hooks += (hook,)
        for point, names in _POINTS.items():
            if any(getattr(type(hook), name) is not getattr(Hook, name) for name in names):
                setattr(self, point, (*getattr(self, point), hook))

    # Sends.

    def before_send(
        self, topic: str, messages: Iterable[OutgoingMessage], *, is_batch: bool = False, is_one_way: bool = False
    ) -> SendContext:
        """Begins a call; the messages to send are those of the context."""
        context = SendContext(self.group, topic, list(messages), is_batch, is_one_way, self.client_id)
        context.notes[_BEGAN] = time.perf_counter()
        for hook in self.send:
            before = list(context.messages)
            self._tell(hook, "before_send", context)
            if why := _wrong_messages(before, context.messages):
                context.messages = before
                self._say(hook, "before_send", TypeError(why))
        return context

    def after_send(
        self, context: SendContext, results: Sequence[SendResult], error: BaseException | None
    ) -> None:
        """The call is over."""
        context.results, context.error = results, error
        context.server_address = self.server_of(result.queue for result in results)
        self._after(self.send, "after_send", context)

    # Messages that are consumed.

    def before_consume(self, messages: Sequence[Message], listener: str = "") -> ConsumeContext:
        """The program gets messages."""
        context = ConsumeContext(self.group, messages, listener, self.client_id)
        context.server_address = self.server_of(message.queue for message in messages)
        context.notes[_BEGAN] = time.perf_counter()
        for hook in self.consume:
            self._tell(hook, "before_consume", context)
        return context

    def after_consume(
        self, context: ConsumeContext, failures: Sequence[str | None], error: BaseException | None = None
    ) -> None:
        """The program is done with them."""
        context.failures, context.error = failures, error
        self._after(self.consume, "after_consume", context)

    def before_receive(self, topic: str = "") -> ReceiveContext:
        """The program asks for messages."""
        context = ReceiveContext(self.group, topic, self.client_id)
        context.notes[_BEGAN] = time.perf_counter()
        for hook in self.receive:
            self._tell(hook, "before_receive", context)
        return context

    def after_receive(
        self, context: ReceiveContext, messages: Sequence[Message], error: BaseException | None = None
    ) -> None:
        """It has them, or an error."""
        context.messages, context.error = messages, error
        context.server_address = self.server_of(message.queue for message in messages)
        self._after(self.receive, "after_receive", context)

    def before_settle(self, operation: str, messages: Sequence[Message]) -> SettleContext:
        """These go to brokers."""
        context = SettleContext(self.group, operation, messages, self.client_id)
        context.server_address = self.server_of(message.queue for message in messages)
        context.notes[_BEGAN] = time.perf_counter()
        for hook in self.settle:
            self._tell(hook, "before_settle", context)
        return context

    def after_settle(
        self, context: SettleContext, stale: Sequence[Message], error: BaseException | None = None
    ) -> None:
        """They were told, or not."""
        context.stale, context.error = stale, error
        self._after(self.settle, "after_settle", context)

    def before_commit(self, topic: str, broker_name: str, offsets: Mapping[MessageQueue, int]) -> CommitContext:
        """These offsets go to a broker."""
        context = CommitContext(self.group, topic, broker_name, dict(offsets), self.client_id)
        context.server_address = self.server_of(offsets)
        context.notes[_BEGAN] = time.perf_counter()
        for hook in self.commit:
            self._tell(hook, "before_commit", context)
        return context

    def after_commit(self, context: CommitContext, error: BaseException | None = None) -> None:
        """It has them, or not."""
        context.error = error
        self._after(self.commit, "after_commit", context)

    def kept(self, messages: list[Message]) -> list[Message]:
        """Those that the program is to get."""
        for hook in self.filter:
            messages = [message for message in messages if self._keeps(hook, message)]
        return messages

    def _keeps(self, hook: Hook, message: Message) -> bool:
        try:
            return bool(hook.keeps(message))
        except BaseException as error:
            if ends_the_program(error):
                raise
            self._say(hook, "keeps", error)
            return True

    # Transactions.

    def before_end(self, end: End) -> EndTransactionContext:
        """A decision is to be told."""
        context = EndTransactionContext(
            self.group, end.topic, end.broker_name, end.message_id, end.handle, end.decision, end.is_check
        )
        context.notes[_BEGAN] = time.perf_counter()
        for hook in self.end:
            self._tell(hook, "before_end_transaction", context)
        return context

    def after_end(self, context: EndTransactionContext, error: BaseException | None) -> None:
        """It was told, or not."""
        context.error = error
        self._after(self.end, "after_end_transaction", context)

    # Calls.

    def before_call(
        self, address: BrokerAddress, method: MethodInfo, size_bytes: int, timeout_s: float, is_one_way: bool = False
    ) -> CallContext:
        """A request is to go out."""
        server = address.broker_name or address.remoting_address or address.grpc_address
        context = CallContext(server, method.path, size_bytes, timeout_s, is_one_way)
        context.notes[_BEGAN] = time.perf_counter()
        for hook in self.call:
            self._tell(hook, "before_call", context)
        return context

    def after_call(self, context: CallContext, answer: bytes | BaseException) -> None:
        """It is over."""
        if isinstance(answer, BaseException):
            context.error = answer
        else:
            context.answer_size_bytes = len(answer)
        self._after(self.call, "after_call", context)

    # --------------------------------------------------------------------------------------------------------------------

    def _after(self, hooks: Sequence[Hook], name: str, context: Any) -> None:
        context.duration_s = time.perf_counter() - context.notes[_BEGAN]
        for hook in reversed(hooks):
            self._tell(hook, name, context)

    def _tell(self, hook: Hook, name: str, context: Any) -> None:
        try:
            getattr(hook, name)(context)
        except BaseException as error:  # sys.exit() in a hook ends no thread of ours.
            if ends_the_program(error):
                raise
            self._say(hook, name, error)

    def _say(self, hook: Hook, name: str, error: BaseException) -> None:
        """Once for each method of a hook."""
        if (id(hook), name) not in self._said:
            self._said.add((id(hook), name))
            logger.error(
                "%s of the hook %r failed; what it looked at goes on (said once)", name, hook, exc_info=error
            )


def ends_the_program(error: BaseException) -> bool:
    """On the main thread Ctrl-C, and the exit of a signal's handler, may come while a hook runs. Within a loop handlers do not raise."""
    if not isinstance(error, KeyboardInterrupt | SystemExit) or threading.current_thread() is not threading.main_thread():
        return False
    loops = sys.modules.get("asyncio.events")  # It is not loaded for this: that takes as long as all of a producer.
    return isinstance(error, KeyboardInterrupt) or loops is None or loops._get_running_loop() is None


def _wrong_messages(before: Sequence[OutgoingMessage], after: object) -> str:
    """What is wrong with what a hook made of the messages; "": nothing."""
    if not isinstance(after, list) or len(after) != len(before):
        return f"a hook leaves as many messages as there were, {len(before)}, in a list, not {after!r}"
    for message in after:
        if not isinstance(message, OutgoingMessage):
            return f"a hook puts an OutgoingMessage in the place of a message, not {message!r}"
        if message.topic != before[0].topic:
            return f"a hook leaves the topic {before[0].topic!r} as it is, {message.topic!r} is another"
    return ""
