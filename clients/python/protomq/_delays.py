"""When a message is delivered: what a send says of it, and the handle by which it is taken back. Pure functions.

Two ways go over the wire. A delay stands in the request, and the broker counts it from when it gets the message: no clock of ours is in it.
A time stands in the record. Messages travel together where the way, and the delay, are the same.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from ._batching import PreparedRecord
from ._checks import check_count, check_text, check_time
from ._types import DelayLevel
from .errors import ConfigurationError, WrongTypeError
from .wire.recall_handle import decode_handle
from .wire.record import FLAG_DUE_TIME, encode_varint

LEVEL_MAX: Final = (1 << 31) - 1
"""What the wire carries; which levels there are is the broker's to say."""
_DELAY_MAX_S: Final = 1e10
"""300 years. The broker says what it takes: 40 days."""
BROKER_MAX_S: Final = 40 * 86_400
_LEVELS_S: Final = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""RocketMQ's messageDelayLevel."""


class When(NamedTuple):
    """What a send says of when its messages are delivered.

    Attributes:
        field: of the request, encoded; b"": each record has its due time.
        due_time_ms: of the record, milliseconds since 1970; 0 where the broker counts.
    """

    field: bytes
    due_time_ms: int


def when_of(delay: object, deliver_at: object) -> When | None:
    """None: at once. Raises WrongTypeError, ConfigurationError for what is no delay, and for both."""
    if deliver_at is not None:
        if delay is not None:
            raise ConfigurationError(
                f"a message has a delay or a time, not both: {delay!r}, {deliver_at!r}"
            )
        due_time_ms = check_time("deliver_at", deliver_at).timestamp() * 1000
        return When(b"", max(math.ceil(due_time_ms), 1))
    if delay is None:
        return None
    if isinstance(delay, DelayLevel):
        level = check_count("the level of a delay", delay.level, 1, LEVEL_MAX)
        return When(b"\x48" + encode_varint(level), 0)
    delay_s = checked_delay_s(delay, _DELAY_MAX_S, "40 days", "; a time is given as deliver_at")
    return When(b"\x50" + encode_varint(math.ceil(delay_s * 1000)), 0)


def delay_of_level_s(level: int) -> float:
    """How long a level lasts where no broker is asked; one beyond the last as long as that."""
    return float(_LEVELS_S[min(level, len(_LEVELS_S)) - 1])


def check_unanswered(delay: object, deliver_at: object, now_s: float) -> None:
    """Raises what `when_of` does, and ConfigurationError for more than 40 days: nobody would hear that the broker refuses it.

    `now_s`: since 1970.
    """
    when = when_of(delay, deliver_at)
    if when is not None and when.due_time_ms > (now_s + BROKER_MAX_S) * 1000:
        raise ConfigurationError(f"deliver_at is 40 days ahead at most, not {deliver_at}")
    if delay is not None and not isinstance(delay, DelayLevel):
        checked_delay_s(delay, BROKER_MAX_S, "40 days", "; a time is given as deliver_at")


def checked_delay_s(delay: object, max_s: float, max_text: str, hint: str = "") -> float:
    """The seconds of a delay that is no level. Raises WrongTypeError, and ConfigurationError for less than none or more than `max_s`."""
    if isinstance(delay, timedelta):
        delay = delay.total_seconds()
    if isinstance(delay, bool) or not isinstance(delay, int | float):
        raise WrongTypeError(
            f"delay is a timedelta, a number of seconds or a DelayLevel, not {delay!r}{hint if isinstance(delay, datetime) else ''}"
        )
    if not 0 <= delay <= max_s:
        raise ConfigurationError(f"delay is 0 seconds to {max_text}, not {delay}{hint if delay > max_s else ''}")
    return delay


def delayed(record: PreparedRecord, when: When | None) -> PreparedRecord:
    """The record with its due time, or room for the one that the broker writes; as it is without."""
    if when is None:
        return record
    body, key, tag, front, flags, born_time_ms, sharding_hash = record
    return body, key, tag, front, flags | delay_flags(when), born_time_ms, sharding_hash


def delay_flags(when: When | None) -> int:
    """What a prepared record has for it in its flags."""
    return 0 if when is None else FLAG_DUE_TIME | when.due_time_ms << 32


def broker_of_handle(recall_handle: object) -> str:
    """Name of the broker that has the message. Raises WrongTypeError, ConfigurationError for what is no handle."""
    text = check_text("recall_handle", recall_handle)
    if not text:
        raise ConfigurationError("recall_handle is empty: only a delayed message has one")
    try:
        return decode_handle(text).broker_name
    except ValueError as error:
        raise ConfigurationError(f"recall_handle: {error}: {text!r}") from error


def encode_recall(topic: str, recall_handle: str) -> bytes:
    """An encoded RecallMessageRequest."""
    from .v1.send_service_pb2 import RecallMessageRequest

    return RecallMessageRequest(topic=topic, recall_handle=recall_handle).SerializeToString()


def decode_recall(answer: bytes) -> tuple[bool, bool]:
    """Whether this call took the message back, and whether an earlier one did."""
    from .v1.send_service_pb2 import RecallMessageResponse

    response = RecallMessageResponse.FromString(answer)
    return response.recalled, response.recalled_before
