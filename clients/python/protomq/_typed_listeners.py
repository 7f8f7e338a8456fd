"""Listeners that say by type hints what they take: the hint's body codec decodes, before the listener is called.

    def bill(message): ...                                  the Message: so, too, with the hints Message, Any and object
    def bill(order: Order): ...                             the value of its body
    def bill(order: Order, message: Message): ...           both
    def bill(orders: list[Order]): ...                      with batch_size=N; and with (orders: list[Order], messages: list[Message])

A body that does not decode is a SchemaError, as if the listener had raised it: a dead letter at once. A message that is damaged, or
whose body cannot be unpacked, comes again. In a batch the listener gets the others.
"""

from __future__ import annotations

import collections.abc
import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from ._message import Message
from .body_codecs import codec_of
from .errors import ConfigurationError, ProtomqError

_LISTS: Final = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_ANYTHING: Final = (inspect.Parameter.empty, Any, object)
_MESSAGE_TEXT: Final = re.compile(r"(?:(?:\w+\.)*(?:list|List|Sequence|Iterable|Collection)\[)?(?:\w+\.)*Message\]?")
"""A hint that is a text, and whose names are there for type checkers only."""


class OfAll(list[object]):
    """What a listener of a batch said of all that it was given, with the errors of what it was not: one for each message.

    `raised`: what it has raised, if it did. `wrong`: what it has returned otherwise that says nothing; its messages have the error of that.
    """

    raised: Exception | None = None
    wrong = ""


class Taken(NamedTuple):
    """What a listener takes. `type_`: of the values; None: it takes messages. `with_messages`: these, too, as a second argument."""

    type_: Any
    with_messages: bool = False


MESSAGES: Final = Taken(None)


def typed_call(call: Callable[..., Any], name: str, *, is_coroutine: bool, is_batch: bool) -> Callable[[Any], Any]:
    """What is to be called with a Message, or a list of them: `call` itself, unless it takes values. Raises ConfigurationError."""
    taken = taken_by(call, name, is_batch)
    if taken.type_ is None:
        return call
    if is_batch:
        return _batch_call_async(call, taken) if is_coroutine else _batch_call(call, taken)
    return _call_async(call, taken) if is_coroutine else _call(call, taken)


def taken_by(call: Callable[..., Any], name: str, is_batch: bool) -> Taken:
    """What a listener takes, by its hints. Raises ConfigurationError for what nobody could give it."""
    first, second, required_count = _hints(call, name)
    taken = _taken(first, second, name, is_batch)
    if required_count > (2 if taken.with_messages else 1):
        function = name.rpartition(".")[2]
        if next(iter(inspect.signature(call).parameters)) == "self":
            raise ConfigurationError(f"{name} is a method of no object: bind it, as in subscribe(topic, my_object.{function})")
        function = function if function.isidentifier() else "f"
        forms = f"{function}(message), {function}(order: Order) or {function}(order: Order, message: Message)"
        if is_batch:
            forms = f"{function}(messages) or {function}(orders: list[Order], messages: list[Message])"
        raise ConfigurationError(f"{name} wants {required_count} arguments; a listener is a function such as {forms}")
    return taken


def _taken(first: Any, second: Any, name: str, is_batch: bool) -> Taken:
    if first in _ANYTHING:
        return MESSAGES
    if is_batch:
        if typing.get_origin(first) not in _LISTS:
            if first in _LISTS:
                return MESSAGES
            raise ConfigurationError(f"{name} takes {_text(first)}, but it is given lists: hint list[...], or leave batch_size out")
        first = _item(first)
        if first in (Any, object):
            return MESSAGES
        if second is not None and typing.get_origin(second) in _LISTS:
            second = _item(second)
    if isinstance(first, type) and issubclass(first, Message):
        return MESSAGES
    if not is_batch and (typing.get_origin(first) or first) in _LISTS:
        raise ConfigurationError(f"{name} takes {_text(first)}, but it is given one message a call: subscribe it with batch_size=N")
    if first is not bytes and codec_of(first) is None:
        takes, hint = (f"a list of {_text(first)}", "list[...] of ") if is_batch else (_text(first), "")
        raise ConfigurationError(
            f"{name} takes {takes}, which no body codec decodes: hint {hint}Message, bytes, str, dict, a protobuf or pydantic class, or "
            "add a codec by protomq.body_codecs.register_body_codec"
        )
    return Taken(first, isinstance(second, type) and issubclass(second, Message))


def _item(hint: Any) -> Any:
    """Of what a hint for a list is one; Any of a bare `typing.List`."""
    items = typing.get_args(hint)
    return items[0] if len(items) == 1 else Any


def _hints(call: Callable[..., Any], name: str) -> tuple[Any, Any, int]:
    """Of the first argument, of the second (None: there is none), and how many have to be given."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # A function in C that tells nothing.
        return inspect.Parameter.empty, None, 0
    found = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if not found and all(one.kind is not one.VAR_POSITIONAL for one in parameters):
        raise ConfigurationError(f"{name} takes no argument, a listener is given its message")
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and one.default is one.empty:
            raise ConfigurationError(
                f"{name} wants {one.name}=, a listener is given no argument by name: give it a default, or use partial"
            )
    required_count = sum(one.default is one.empty for one in found)
    first = _resolved(call, found[0].annotation, name) if found else inspect.Parameter.empty
    second = _second(call, found[1], first, name) if len(found) > 1 else None
    return first, second, required_count


def _second(call: Callable[..., Any], parameter: inspect.Parameter, first: Any, name: str) -> Any:
    """The hint of the second argument. One that is not known is refused only where nothing but a Message could be given."""
    try:
        second = _resolved(call, parameter.annotation, name)
    except ConfigurationError:
        if first in _ANYTHING or parameter.default is not parameter.empty:
            return None
        raise
    return Message if second is parameter.empty and isinstance(parameter.annotation, str) else second


def _resolved(call: Callable[..., Any], hint: Any, name: str) -> Any:
    """What a hint stands for that may be a text; Parameter.empty for messages whose names are there for type checkers only."""
    if not isinstance(hint, str):
        return hint
    function: Any = inspect.unwrap(getattr(call, "func", call))
    if not hasattr(function, "__globals__"):
        function = getattr(function, "__func__", None) or getattr(function, "__call__", function)  # noqa: B004 - an object's method.
    try:
        return typing.get_type_hints(
            SimpleNamespace(__annotations__={"hint": hint}), getattr(function, "__globals__", {}), _outer_names(function), True
        )["hint"]
    except Exception as error:
        if _MESSAGE_TEXT.fullmatch(hint):
            return inspect.Parameter.empty
        raise ConfigurationError(
            f"{name} takes {hint!r}, which is not known where it stands ({error}): import it at the top, not for type checkers only"
        ) from error


def _outer_names(function: Any) -> dict[str, Any]:
    """Names of the functions around one, as far as it uses them."""
    try:
        return dict(inspect.getclosurevars(function).nonlocals)
    except (TypeError, ValueError):
        return {}


def _call(call: Callable[..., Any], taken: Taken) -> Callable[[Message], Any]:
    type_ = taken.type_
    if taken.with_messages:
        return lambda message: call(message.value(type_), message)
    return lambda message: call(message.value(type_))


def _call_async(call: Callable[..., Awaitable[Any]], taken: Taken) -> Callable[[Message], Awaitable[Any]]:
    async def decode_and_call(message: Message) -> Any:
        value = message.value(taken.type_)
        return await (call(value, message) if taken.with_messages else call(value))

    return decode_and_call


def _batch_call(call: Callable[..., Any], taken: Taken) -> Callable[[Sequence[Message]], Any]:
    def decode_and_call(messages: Sequence[Message]) -> Any:
        batch = _Batch(messages, taken)
        if not batch.values:
            return batch.errors
        if len(batch.values) == len(messages):
            return call(*batch.arguments())
        try:
            result = call(*batch.arguments())
        except Exception as error:
            return batch.raised(error)
        return batch.outcomes(result)

    return decode_and_call


def _batch_call_async(
    call: Callable[..., Awaitable[Any]], taken: Taken
) -> Callable[[Sequence[Message]], Awaitable[Any]]:
    async def decode_and_call(messages: Sequence[Message]) -> Any:
        batch = _Batch(messages, taken)
        if not batch.values:
            return batch.errors
        if len(batch.values) == len(messages):
            return await call(*batch.arguments())
        try:
            result = await call(*batch.arguments())
        except Exception as error:
            return batch.raised(error)
        return batch.outcomes(result)

    return decode_and_call


class _Batch:
    """Messages, and which of them have a value."""

    def __init__(self, messages: Iterable[Message], taken: Taken) -> None:
        self._with_messages = taken.with_messages
        self.values: list[Any] = []
        self.messages: list[Message] = []
        self.errors: list[ProtomqError | None] = []
        """For each message; None: it has a value."""
        for message in messages:
            try:
                self.values.append(message.value(taken.type_))
            except ProtomqError as error:  # What it may be: see Message.value.
                self.errors.append(error)
            else:
                self.messages.append(message)
                self.errors.append(None)

    def arguments(self) -> tuple[Any, ...]:
        return (self.values, self.messages) if self._with_messages else (self.values,)

    def raised(self, error: Exception) -> OfAll:
        """One for each message, where the listener raised."""
        outcomes = OfAll(error if missing is None else missing for missing in self.errors)
        outcomes.raised = error
        return outcomes

    def outcomes(self, result: object) -> list[object]:
        """One for each message, of what the listener said of those that it got; OfAll if it said one thing of all of them."""
        count = len(self.values)
        if isinstance(result, list | tuple) and len(result) == count:
            said = iter(result)
            return [next(said) if error is None else error for error in self.errors]
        wrong = ""
        if isinstance(result, list | tuple):
            wrong = f"returned {len(result)} results for {count} messages"
            result = ValueError(f"the listener {wrong}")
        outcomes = OfAll(result if error is None else error for error in self.errors)
        outcomes.wrong = wrong
        return outcomes


def _text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
