"""What a listener says of a message, and what the consumer makes of it. Values only.

    returns nothing                    done
    returns anything that is no result done, with one warning for each listener: "return" says that it is done
    returns a coroutine, a generator   comes again: nobody runs that, so nothing of it was done
    raises                             comes again after the group's delay, with the error's text
    raises SchemaError                 is a dead letter at once: its body is not what the listener takes
    returns Retry(delay=...)           comes again after that delay
    returns Reject()                   is a dead letter at once
    returns Suspend(ms)                orderly: its queue waits, and goes on with the same message; else like Retry(delay=ms / 1000)
    raises one of these three          as if it had returned it

A listener of batches says one of these of all its messages, or returns a list with one for each. In order, a list counts up to its first
failure: it may be that of a listener that stopped there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple, cast

from ._checks import check_count, is_coroutine_function, is_generator_function, never_run_text
from ._delays import delay_of_level_s
from ._send_back import delay_fields, error_text, said_by
from ._typed_listeners import OfAll, typed_call
from ._types import Delay, DelayLevel
from .errors import CompressionError, CorruptMessageError, SchemaError, WrongTypeError

BATCH_SIZE_MAX: Final = 1024
"""RocketMQ's largest consumeMessageBatchMaxSize."""
_NOT_GIVEN: Final = (SchemaError, CorruptMessageError, CompressionError)
"""Why a listener of values does not get a message: see Message.value."""


class Said(Exception):
    """What a listener returns of a message that is not done, or raises."""

    def __str__(self) -> str:
        return repr(self)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(cast(Any, self)))


# Not frozen: Python itself sets attributes of what is raised.
@dataclass(unsafe_hash=True)
class Retry(Said):
    """The message comes again: after `delay` (a timedelta, seconds or a DelayLevel), else as the group's settings say.

    A level beyond the broker's last counts as the last. `error`: why it failed. In an orderly consumer the queue waits for the delay, and
    goes on with this message.
    """

    delay: Delay | None = None
    error: str = ""

    def __post_init__(self) -> None:
        delay_fields(self.delay, dead_letter=False)
        error_text(self.error)


@dataclass(unsafe_hash=True)
class Reject(Said):
    """The message is a dead letter at once. `error`: why it failed."""

    error: str = ""

    def __post_init__(self) -> None:
        error_text(self.error)


@dataclass(unsafe_hash=True)
class Suspend(Said):
    """The queue of an orderly consumer waits, 1 ms to 40 days, then goes on with the same message. `error`: why it failed.

    Without `delay_ms`, it waits for the consumer's `suspend_ms`; without order the message comes again after the group's delay.
    """

    delay_ms: int | None = None
    error: str = ""

    def __post_init__(self) -> None:
        if self.delay_ms is not None:
            check_count("delay_ms", self.delay_ms, 1, 40 * 86_400_000)
        error_text(self.error)


Result = Retry | Reject | Suspend | None


@dataclass(frozen=True, slots=True)
class Listener:
    """A function that is given messages.

    `batch_size`: None: one message a call; else a list of at most that many. `name`: for the log. `function`: what the user wrote, of which
    `call` may be the decoding front (`_typed_listeners`).
    """

    call: Callable[[Any], Any]
    name: str
    is_coroutine: bool
    batch_size: int | None = None
    function: Callable[..., Any] | None = None

    @classmethod
    def of(cls, call: object, batch_size: int | None = None) -> Listener:
        """Raises WrongTypeError, ConfigurationError."""
        if not callable(call):
            raise WrongTypeError(f"a listener is a function or a coroutine function, not {call!r}")
        if isinstance(call, type):
            raise WrongTypeError(f"a listener is a function or a coroutine function, not the class {call.__name__}")
        if batch_size is not None:
            check_count("batch_size", batch_size, 1, BATCH_SIZE_MAX)
        name = getattr(call, "__qualname__", None) or type(call).__qualname__
        if is_generator_function(call):
            raise WrongTypeError(f"{name} has a yield, so a call of it runs nothing: a listener returns what it says, it yields nothing")
        is_coroutine = is_coroutine_function(call)
        typed = typed_call(call, name, is_coroutine=is_coroutine, is_batch=batch_size is not None)
        return cls(typed, name, is_coroutine, batch_size, call)


class Failure(NamedTuple):
    """A message is not done.

    `fields`: of the FailedMessage that gives it back: its error, its delay, whether it is a dead letter. `delay_ms`: how long an orderly
    queue waits; None: as its settings say.
    """

    fields: Mapping[str, Any]
    delay_ms: int | None = None

    @property
    def is_dead_letter(self) -> bool:
        """Whether it is not to be tried again."""
        return bool(self.fields.get("dead_letter"))

    @property
    def error(self) -> str:
        """Why it failed."""
        return str(self.fields.get("error", ""))


def failure_of(error: BaseException) -> Failure:
    """Of a message whose listener raised: a body that does not decode now never will."""
    if isinstance(error, Said):
        failure, _ = _judge_one(error)
        assert failure is not None
        return failure
    if isinstance(error, SchemaError):
        return Failure({"error": error_text(error), "dead_letter": True})
    return Failure({"error": error_text(error)})


def failure_of_text(text: str) -> Failure:
    """Of a message that the consumer itself gives back."""
    return Failure({"error": error_text(text)})


class Judgement(NamedTuple):
    """What a listener's result means: for each message a failure, or None where it is done. `nonsense`: what is wrong with it, or ""."""

    failures: Sequence[Failure | None]
    nonsense: str = ""


BEHIND: Final = Failure({"error": "behind a message that failed"})
"""In order: nobody knows whether the listener came so far. The message comes again, which counts as no try of it."""


def judge(result: object, count: int, *, is_batch: bool = False, in_order: bool = False) -> Judgement:
    """The meaning of what a listener returned for `count` messages. `is_batch`: it is one of batches, of which one may be alone.

    `in_order`: of a list of the listener's, all behind the first failure are BEHIND. A body that does not decode is none: the others went
    to the listener.
    """
    if isinstance(result, list | tuple):
        # Without a batch, a list is a value like any other, unless it says something of messages.
        is_said = is_batch or count > 1 or any(isinstance(one, Said) or _is_bare(one) for one in result)
        if len(result) != count and is_said:
            text = f"returned {len(result)} results for {count} message{'s' if count > 1 else ''}"
            return Judgement([failure_of_text(f"the listener {text}")] * count, f"{text}: {'they come' if count > 1 else 'it comes'} again")
        if len(result) == count:
            raised = result.raised if isinstance(result, OfAll) else None
            parts = [(failure_of(raised), "") if raised is not None and one is raised else _judge_one(one) for one in result]
            failures = [failure for failure, _ in parts]
            if isinstance(result, OfAll) and result.wrong:
                return Judgement(failures, f"{result.wrong}: they come again")
            if in_order and not isinstance(result, OfAll):
                is_stop = (failure and not isinstance(said, _NOT_GIVEN) for said, failure in zip(result, failures, strict=True))
                first = next((index for index, stops in enumerate(is_stop) if stops), count)
                failures[first + 1 :] = [BEHIND] * (count - first - 1)
            return Judgement(failures, next((text for _, text in parts if text), ""))
    failure, nonsense = _judge_one(result)
    return Judgement([failure] * count, nonsense)


def _is_bare(result: object) -> bool:
    """Whether the parentheses were forgotten."""
    return result is Retry or result is Reject or result is Suspend


def _judge_one(result: object) -> tuple[Failure | None, str]:
    if result is None:
        return None, ""
    if _is_bare(result):
        result = cast(type[Said], result)()
    match result:
        case Retry(delay, error):
            fields = delay_fields(delay, dead_letter=False)
            delay_ms = round(delay_of_level_s(delay.level) * 1000) if isinstance(delay, DelayLevel) else fields.get("delay_ms")
            return Failure({"error": error_text(error), **fields}, delay_ms), ""
        case Reject(error):
            return Failure({"error": error_text(error), "dead_letter": True}), ""
        case Suspend(None, error):
            return Failure({"error": error_text(error)}), ""
        case Suspend(delay_ms, error):
            return Failure({"error": error_text(error), "delay_ms": delay_ms}, delay_ms), ""
        case SchemaError():
            return failure_of(result), f"is not given what does not decode, it is a dead letter: {said_by(str, result)}"
        case CorruptMessageError() | CompressionError():
            return failure_of(result), f"is not given what cannot be read, it comes again: {said_by(str, result)}"
        case BaseException():
            return failure_of(result), f"returned {said_by(repr, result)}: taken as raised"
    if never_run := never_run_text(result):
        said = f"returned {never_run}"
        return failure_of_text(f"the listener {said}"), f"{said}: it is taken as failed; write async def, with await"
    return None, (
        f"returned {_short(result)}, which is no result: the message is done; return nothing, Retry(), Reject() or Suspend(ms)"
    )


def _short(value: object) -> str:
    text = said_by(repr, value)
    return text if len(text) <= 60 else f"{text[:60]}..."
