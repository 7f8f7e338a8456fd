"""Arguments and settings, checked where they come in: what is wrong with one, and what to write instead.

A wrong type is a WrongTypeError (a TypeError), a wrong value a ConfigurationError (a ValueError). Pure functions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import CodeType, FunctionType
from typing import Final, ParamSpec

from ._late_imports import fork_waits
from ._types import MessageQueue
from .errors import ConfigurationError, WrongTypeError
from .wire.topics import GROUP_NAME_LENGTH_MAX, TOPIC_NAME_LENGTH_MAX, is_stored_name, why_no_group

SECONDS_MAX: Final = 1e6
"""Eleven days: longer is a mistake, milliseconds most likely."""
SECONDS_MIN: Final = 0.001
"""Time-outs travel as whole milliseconds; nothing is done in less."""
QUEUE_ID_MAX: Final = (1 << 31) - 1
"""What the wire carries; topics have far fewer queues."""
OFFSET_MAX: Final = (1 << 63) - 1
NONCE_MAX: Final = (1 << 64) - 1
NAME_MAX_BYTES: Final = 255
"""Of a client, as brokers take it; a test compares the numbers."""
AHEAD_MAX_S: Final = 60.0
"""By so much clocks may differ: a place in the log that lies further ahead is a mistake, such as another year."""


def check_group(group: object) -> str:
    """The name of a producer or consumer group; an empty one is no group. An address is told that it belongs to `namesrv`."""
    if not isinstance(group, str):
        raise WrongTypeError(
            f"group is a str, not {group!r}; addresses of name servers are given as namesrv=..."
        )
    if ":" in group:
        raise ConfigurationError(
            f"{group!r} is no group, it looks like an address: write namesrv={group!r}"
        )
    if group and why_no_group(group):
        raise ConfigurationError(
            f"a group has 1 to {GROUP_NAME_LENGTH_MAX} characters of A-Z a-z 0-9 _ and -, this is {short(group)}"
            + (f" and has {len(group)}" if len(group) > GROUP_NAME_LENGTH_MAX else "")
        )
    return group


def check_number(name: str, value: object) -> float:
    """A number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongTypeError(f"{name} is a number of seconds, not {value!r}")
    return value


def check_seconds(name: str, value: object, *, zero: bool = False) -> float:
    """A span of time in seconds: 0.001 (with `zero`: 0) to 1e6."""
    value = check_number(name, value)
    least = 0 if zero else SECONDS_MIN
    if not least <= value <= SECONDS_MAX:
        raise ConfigurationError(f"{name} is {least} to 1e6 seconds, not {value}")
    return value


def check_count(name: str, value: object, low: int, high: int | None = None) -> int:
    """A whole number from `low` to `high`, both included."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongTypeError(f"{name} is an int, not {value!r}")
    if value < low or (high is not None and value > high):
        allowed = f"{low:,} or more" if high is None else f"{low:,} to {high:,}"
        raise ConfigurationError(f"{name} is {allowed}, not {value}")
    return value


def check_texts(
    key: object, keys: object, tag: object, properties: object, sharding_key: object
) -> None:
    """What a message has beside its body: texts, or None where one may be left out."""
    if key is not None and not isinstance(key, str):
        several = isinstance(key, Sequence) and not isinstance(key, bytes | bytearray | memoryview)
        raise WrongTypeError(f"key is a str or None, not {key!r}; write {f'keys={key!r}' if several else f'key={_as_text(key)}'}")
    if isinstance(keys, str | bytes):
        raise WrongTypeError(f"keys is a list of further keys, not {keys!r}; write key={keys!r}")
    if not isinstance(keys, Sequence):
        raise WrongTypeError(f"keys is a list of str, not {keys!r}")
    for item in keys:
        if not isinstance(item, str):
            raise WrongTypeError(f"keys is a list of str, {item!r} is none")
        if not item:
            raise ConfigurationError("keys is a list of further keys: none is empty")
    if not isinstance(tag, str):
        raise WrongTypeError(f'tag is a str, not {tag!r}; without one it is ""')
    if sharding_key is not None and not isinstance(sharding_key, str):
        raise WrongTypeError(
            f"sharding_key is a str or None, not {sharding_key!r}; write sharding_key={_as_text(sharding_key)}"
        )
    check_properties(properties)


def check_properties(properties: object) -> None:
    """Texts by name, or None."""
    if properties is None:
        return
    if not isinstance(properties, Mapping):
        raise WrongTypeError(f"properties is a dict of str to str, not {properties!r}")
    for name, value in properties.items():
        if name == "":
            raise ConfigurationError(f"a property has a name, {name!r}: {value!r} has none")
        if not isinstance(name, str) or not isinstance(value, str):
            hint = "leave it out" if value is None else f"write {_as_text(name)}: {_as_text(value)}"
            raise WrongTypeError(f"properties is a dict of str to str, {name!r}: {value!r} is not; {hint}")


_OTHER_KINDS: Final = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def short(value: object) -> str:
    """A value for an error's text, which may be a large body."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_text(value: object) -> str:
    """How a value is written that is to be a str."""
    return f"{value!r}.decode()" if isinstance(value, bytes) else repr(str(value))


def check_topic(topic: object) -> str:
    """The name of a topic."""
    return check_text("topic", topic)


def check_subscribed(topic: object) -> str:
    """A name that a topic can have: a subscription waits for a topic that does not exist, and would wait for ever."""
    name = check_topic(topic)
    if not is_stored_name(name):
        raise ConfigurationError(f"topic has to be 1 to {TOPIC_NAME_LENGTH_MAX} characters of A-Z a-z 0-9 _ - %, and is {short(name)}")
    return name


def check_message_queue(queue: object) -> MessageQueue:
    """A queue, with fields that a queue can have."""
    if not isinstance(queue, MessageQueue):
        raise WrongTypeError(
            f"a queue is a MessageQueue(topic, broker_name, queue_id), not {queue!r}"
        )
    check_text(f"topic of {queue}", queue.topic)
    check_text(f"broker_name of {queue}", queue.broker_name)
    check_count(f"queue_id of {queue}", queue.queue_id, 0, QUEUE_ID_MAX)
    return queue


def check_queue(topic: str, queue: object) -> None:
    """A queue of the topic, or None for any."""
    if queue is None:
        return
    if not isinstance(queue, MessageQueue):
        raise WrongTypeError(
            f"queue is a MessageQueue(topic, broker_name, queue_id) or None, not {queue!r}"
        )
    if check_message_queue(queue).topic != topic:
        raise ConfigurationError(f"{queue} is no queue of topic {topic!r}")


def checked_texts(name: str, values: object) -> list[str]:
    """A list of str."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise WrongTypeError(f"{name} is a list of str, not {values!r}")
    return [check_text(f"each of {name}", value) for value in values]


def check_selector(selector: object, queue: object = None) -> None:
    """What chooses a queue, or None; not beside a queue that is chosen already."""
    if selector is not None and queue is not None:
        raise ConfigurationError(f"selector would never be called: the queue is {queue}; give one of the two")
    if selector is None:
        return
    if not callable(selector):
        raise WrongTypeError(f"selector is a function (queues, message) -> MessageQueue, not {selector!r}")
    _check_call("selector", "(queues, message)", selector, may_be_coroutine=False, argument_count=2)


def is_coroutine_function(call: object) -> bool:
    """A coroutine function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004 - an object's method.


def is_generator_function(call: object) -> bool:
    """One with a `yield`, or an object whose `__call__` has it. A call of that runs nothing."""
    method = getattr(call, "__call__", None)  # noqa: B004 - an object whose method it is.
    return any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (call, method))


def never_run_text(result: object) -> str:
    """What was returned that nobody awaits or iterates: its name, with what that means; "" for anything else."""
    if inspect.iscoroutine(result):
        # Python would warn, too, at a moment that says nothing.
        result.close()
        return "a coroutine, which nobody awaits"
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        return "a generator, which nobody runs"
    return "an awaitable, which nobody awaits" if inspect.isawaitable(result) else ""


def check_listener(listener: object, *, may_be_coroutine: bool) -> None:
    """What is called when a broker asks about a transaction. What never decides leaves its transactions open until they expire."""
    if not callable(listener):
        raise WrongTypeError(f"check is a function of one TransactionCheck, not {listener!r}")
    _check_call("check", "one TransactionCheck", listener, may_be_coroutine=may_be_coroutine)


class ExecuteChecks:
    """The local work of the transactions of one producer: asked before a half message is sent, which nobody would end. Any thread."""

    __slots__ = ("_good_code", "_may_be_coroutine")

    def __init__(self, *, may_be_coroutine: bool) -> None:
        self._may_be_coroutine = may_be_coroutine
        self._good_code: CodeType | None = None

    def check(self, execute: object) -> None:
        """Raises for what cannot be called with the result of a half message. Each send asks, mostly with a function of one code."""
        code = execute.__code__ if isinstance(execute, FunctionType) else None
        if code is not None and code is self._good_code:
            return
        check_execute(execute, may_be_coroutine=self._may_be_coroutine)
        if code is not None and code.co_argcount == 1 and not code.co_kwonlyargcount:
            self._good_code = code  # Whatever defaults another function of it has, it takes one argument.


def check_execute(execute: object, *, may_be_coroutine: bool) -> None:
    """See ExecuteChecks."""
    if not callable(execute):
        raise WrongTypeError(
            f"execute is the local work, a function of one SendResult, not {execute!r}; without one: producer.begin(...), then commit()"
        )
    _check_call("execute", "one SendResult", execute, may_be_coroutine=may_be_coroutine)


def check_hook(name: str, given: str, method: Callable[..., object]) -> None:
    """A method of a hook. `given`: what it is called with, in words."""
    _check_call(name, given, method, may_be_coroutine=False)


def _check_call(
    name: str, given: str, call: Callable[..., object], *, may_be_coroutine: bool, argument_count: int = 1
) -> None:
    """A function that can be called with so many arguments, and whose call runs it. `given`: what these are, in words."""
    if type(call) is FunctionType:
        # Each send of a transaction asks: a signature would take longer than all else here.
        code = call.__code__
        is_plain = not (code.co_kwonlyargcount or code.co_flags & _OTHER_KINDS)
        takes_all = code.co_argcount >= argument_count or code.co_flags & inspect.CO_VARARGS
        if is_plain and takes_all and code.co_argcount - len(call.__defaults__ or ()) <= argument_count:
            return
    if is_generator_function(call):
        raise WrongTypeError(f"{name} is a function, not the generator function {call!r}: a call of it runs nothing")
    if not may_be_coroutine and is_coroutine_function(call):
        elsewhere = ": AsyncTransactionProducer takes those" if name in ("execute", "check") else ""
        raise WrongTypeError(f"{name} is a function, not the coroutine function {call!r}{elsewhere}")
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # A function in C that tells nothing.
        return
    try:
        signature.bind(*[None] * argument_count)
    except TypeError as error:
        raise ConfigurationError(f"{name} is called with {given}, which {call!r} does not take: {error}") from None


def check_batch(
    topic: object,
    messages: object,
    keys: object,
    tags: object,
    queue: object,
    sharding_key: object,
) -> None:
    """What a batch has beside its messages, and that these can be counted: they are looked at more than once."""
    topic = check_topic(topic)
    if isinstance(messages, str | bytes | bytearray | memoryview):
        raise WrongTypeError(f"messages is a list of bodies, not one of them: write [{short(messages)}]")
    if isinstance(messages, Iterable) and not isinstance(messages, Sequence):
        raise WrongTypeError(f"messages is a list, not {short(messages)}: write list(messages)")
    if not isinstance(messages, Sequence):
        raise WrongTypeError(
            f"messages is a list of bytes or OutgoingMessage, not {short(messages)}"
        )
    if isinstance(keys, str) or not isinstance(keys, Sequence | None):
        raise WrongTypeError(f"keys is a list with a key for each message, not {short(keys)}")
    if not isinstance(tags, Sequence):
        raise WrongTypeError(
            f"tags is a str, or a list with a tag for each message, not {short(tags)}"
        )
    check_queue(topic, queue)
    if sharding_key is not None:
        check_text("sharding_key", sharding_key)
        if queue is not None and sharding_key:
            raise ConfigurationError(f"sharding_key would not be used: the queue is {queue}; give one of the two")


def check_time(name: str, when: object) -> datetime:
    """A point in time, with its time zone: without one, nobody knows whether it is local time or UTC."""
    if not isinstance(when, datetime):
        raise WrongTypeError(f"{name} is a datetime, not {when!r}; of seconds: datetime.fromtimestamp(seconds, UTC)")
    if when.utcoffset() is None:
        raise ConfigurationError(
            f"{name} is a datetime with a time zone, not {when!r}: write when.astimezone() if it is local time, "
            "when.replace(tzinfo=UTC) if it is UTC"
        )
    return when


def check_past(name: str, when: object, end: str) -> datetime:
    """A point in time at which messages may have been stored. `end`: what to write for the end of the log."""
    checked = check_time(name, when)
    if checked.timestamp() > time.time() + AHEAD_MAX_S:
        raise ConfigurationError(
            f"{name} is {checked.isoformat()}, which lies ahead: nothing is stored there, and all that is stored now would be skipped; "
            f"if that is wanted, {end}"
        )
    return checked


def check_span(begin_name: str, begin: datetime | None, end_name: str, end: datetime | None, what: str) -> None:
    """A span of time in which something may have happened. `what`: that could have, "has died" for instance."""
    for name, time_ in ((begin_name, begin), (end_name, end)):
        if time_ is not None:
            check_time(name, time_)
    if begin is not None and begin.timestamp() > time.time() + AHEAD_MAX_S:
        raise ConfigurationError(f"{begin_name} is {begin.isoformat()}, which lies ahead: nothing {what} then")
    if begin is not None and end is not None and end <= begin:
        raise ConfigurationError(
            f"{end_name} is {end.isoformat()}, which is not after {begin_name}, {begin.isoformat()}: nothing {what} between"
        )


def loop_runs() -> bool:
    """Whether this thread runs an event loop, which nothing here may block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def check_flag(name: str, value: object) -> bool:
    """True or False; a text is always true, whatever it says."""
    if not isinstance(value, bool):
        raise WrongTypeError(f"{name} is True or False, not {value!r}")
    return value


def check_text(name: str, value: object) -> str:
    """A str that can be written as UTF-8."""
    if not isinstance(value, str):
        raise WrongTypeError(f"{name} is a str, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{name} cannot be written as UTF-8: {error}") from error
    return value


def check_name(name: str, value: object, size_max_bytes: int = NAME_MAX_BYTES) -> str:
    """A name that brokers take, and that stands in logs and tables."""
    size_bytes = len(check_text(name, value).encode())
    if size_bytes > size_max_bytes:
        raise ConfigurationError(f"{name} has at most {size_max_bytes} octets, {short(value)} has {size_bytes}")
    if not str(value).isprintable():
        raise ConfigurationError(f"{name} is a name that people read in one line, without control characters, not {short(value)}")
    return str(value)


def check_wanted(name: str, value: object) -> str:
    """A text to look for: no message has an empty one."""
    if not check_text(name, value):
        raise ConfigurationError(f"{name} is empty: no message can be found by that")
    return str(value)


def check_encodable(
    key: object, keys: Iterable[object], tag: object, properties: object, sharding_key: object
) -> None:
    """Raises ConfigurationError for the text of a message that cannot be written as UTF-8."""
    check_text("key", key or "")
    for text in keys:
        check_text("each of keys", text)
    check_text("tag", tag)
    check_text("sharding_key", sharding_key or "")
    if isinstance(properties, Mapping):
        for name, value in properties.items():
            check_text("the name of a property", name)
            check_text(f"property {name!r}", value)


_P = ParamSpec("_P")


def explain_unknown_settings(init: Callable[_P, None]) -> Callable[_P, None]:
    """A decorator of constructors: a keyword that they do not have is refused with the name that is like it most."""
    known = [
        parameter.name
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ][1:]

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        check_settings(type(args[0]).__name__, kwargs, known)
        init(*args, **kwargs)

    return checked


_RETRIES_TEXT: Final = "retries are the group's, at the broker: protomq group set GROUP --retries 3, or Admin.set_group"
_COMMIT_TEXT: Final = "what is done is committed by itself, every commit_interval_s"
_PUSH_TEXTS: Final = {
    "max_retries": _RETRIES_TEXT, "retries": _RETRIES_TEXT, "retry_count_max": _RETRIES_TEXT, "max_reconsume_times": _RETRIES_TEXT,
    "auto_commit": _COMMIT_TEXT, "enable_auto_commit": _COMMIT_TEXT, "acks_late": "a message is done when its listener has returned",
}  # fmt: skip
_PUSH_NAMES: Final = {
    "threads": "concurrency", "workers": "concurrency", "max_workers": "concurrency", "thread_count": "concurrency",
    "prefetch": "count_max", "prefetch_count": "count_max", "worker_prefetch_multiplier": "count_max",
}  # fmt: skip
"""What Celery, Kafka, RabbitMQ and RocketMQ call settings of a push consumer."""


def check_settings(client: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises WrongTypeError for a keyword that a constructor does not have."""
    for name in given:
        if name not in known:
            with fork_waits:
                import difflib

            # A part of a longer name first: "timeout" is meant for send_timeout_s, however unlike they are.
            like = [other for other in known if name.strip("_") in other] or difflib.get_close_matches(
                name, known, 1, 0.5
            )
            if name == "batch_size" and "concurrency" in known:
                raise WrongTypeError(
                    f'{client} has no setting {name!r}: it belongs to a listener, as in @consumer.on("orders", batch_size=32)'
                )
            if "concurrency" in known:
                if name in _PUSH_TEXTS:
                    raise WrongTypeError(f"{client} has no setting {name!r}: {_PUSH_TEXTS[name]}")
                like = [_PUSH_NAMES[name]] if name in _PUSH_NAMES else like
            hint = f"; did you mean {' or '.join(like)}?" if like else f"; it has {', '.join(known)}"
            raise WrongTypeError(f"{client} has no setting {name!r}{hint}")
