"""Sending messages back that could not be processed: requests, answers, and the steps between them."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from . import _methods
from ._call_steps import call_broker
from ._checks import check_count, check_flag
from ._decoding import decoded
from ._delays import checked_delay_s
from ._late_imports import fork_waits
from ._message import Message
from ._retry import CALL, Retries, is_away
from ._steps import ForgetRoute, GetRoute, Pause, Steps
from ._types import DelayLevel, MessageQueue
from .errors import (
    ConfigurationError,
    CorruptMessageError,
    InvalidArgumentError,
    NoRouteError,
    ProtomqError,
    TopicNotFoundError,
    WrongTypeError,
)
from .wire.topics import retry_topic

MESSAGES_MAX: Final = 256
"""Of a request that names each message."""
ALIKE_MAX: Final = 1_024
"""Of a request that names runs of messages that failed alike."""
SIZE_MAX_BYTES: Final = 4 << 20
"""Of the messages in one request; a broker takes twice as much."""
ERROR_SIZE_MAX_BYTES: Final = 512
"""A broker keeps so much of the text."""
DELAY_MAX_S: Final = 40 * 86_400
ATTEMPT_MAX: Final = (1 << 31) - 2
"""More are none for a broker."""
LOOK_AGAIN_S: Final = 0.05
"""Until a name server has heard of a topic that was made a moment ago."""


@dataclass(frozen=True, slots=True)
class SentBack:
    """What became of a message that was sent back.

    `attempt`: how often it has been handed out by now. `due_time`: when the group gets it again (UTC). None for a dead letter, and if
    the broker had done the request before and only its answer was lost.
    """

    attempt: int
    due_time: datetime | None
    dead_letter: bool


class BackRequest:
    """One request: messages of one broker. `rows`: their places among those that were given."""

    def __init__(self, topic: str, broker_name: str) -> None:
        self.topic = topic
        self.broker_name = broker_name
        self.rows: list[int] = []
        self.size_bytes = 0


def checked_messages(messages: object) -> list[Message]:
    """One message or several. Raises WrongTypeError."""
    if isinstance(messages, Message):
        return [messages]
    if isinstance(messages, str | bytes) or not isinstance(messages, Iterable):
        raise WrongTypeError(f"send_back takes a Message or several, not {messages!r}")
    found = list(messages)
    for each in found:
        if not isinstance(each, Message):
            raise WrongTypeError(f"send_back takes messages as they were polled, {each!r} is none")
    return found


def error_text(error: object) -> str:
    """Why a message failed, as far as a broker keeps it: a text, or an exception with its name."""
    if isinstance(error, BaseException):
        error = f"{type(error).__name__}: {said_by(str, error)}"
    if not isinstance(error, str):
        raise WrongTypeError(f"error is a str or an exception, not {error!r}")
    octets = error[:ERROR_SIZE_MAX_BYTES].encode(errors="replace")
    return octets[:ERROR_SIZE_MAX_BYTES].decode(errors="ignore")


def said_by(speak: Callable[[object], str], value: object) -> str:
    """What str() or repr() says of a value of the program's, whose code may raise."""
    try:
        return speak(value)
    except Exception as error:
        return f"<{speak.__name__}() raised {type(error).__name__}>"


def delay_fields(delay: object, *, dead_letter: object) -> dict[str, Any]:
    """The fields of FailedMessage that say when. Raises WrongTypeError, ConfigurationError."""
    check_flag("dead_letter", dead_letter)
    if dead_letter:
        if delay is not None:
            raise ConfigurationError("a dead letter has no delay: give one of the two")
        return {"dead_letter": True}
    if delay is None:
        return {}
    if isinstance(delay, DelayLevel):
        return {"delay_level": check_count("the level of a delay", delay.level, 1, (1 << 31) - 1)}
    return {"delay_ms": math.ceil(checked_delay_s(delay, DELAY_MAX_S, "40 days") * 1000)}


def attempt_fields(message: Message) -> dict[str, Any]:
    """The fields of FailedMessage that say how often it was handed out before, where its record counts fewer."""
    if not message.own_tries:
        return {}
    try:
        return {"attempt": min(message.attempt, ATTEMPT_MAX)}
    except CorruptMessageError:
        return {}  # The broker has the record, and knows it better.


def requests_for(messages: Sequence[Message]) -> list[BackRequest]:
    """The messages by broker, as many in a request as fit."""
    requests: list[BackRequest] = []
    open_requests: dict[str, BackRequest] = {}
    for row, message in enumerate(messages):
        queue = message.queue
        size_bytes = len(message.record)
        request = open_requests.get(queue.broker_name)
        if (
            request is None
            or len(request.rows) >= MESSAGES_MAX
            or request.size_bytes + size_bytes > SIZE_MAX_BYTES
        ):
            request = open_requests[queue.broker_name] = BackRequest(queue.topic, queue.broker_name)
            requests.append(request)
        request.rows.append(row)
        request.size_bytes += size_bytes
    return requests


class BackPayload:
    """An encoded SendBackRequest with an id of its own: all tries have the same octets, so it is done once.

    It names runs of messages, if the broker is one of `alike_brokers` and they failed alike. If the broker has an earlier version by now (a
    fail-over during an upgrade) and refuses that, the request is encoded again, message by message. That is another
    request: if the first one was done and only its answer was lost, its messages are sent back twice. More than 256 messages are not sent
    again: the error is raised.
    """

    def __init__(
        self,
        group: str,
        broker_name: str,
        failed: Sequence[tuple[Message, Mapping[str, Any]]],
        incarnation_of: Callable[[MessageQueue], int],
        alike_brokers: set[str],
    ) -> None:
        """Each message with fields of its FailedMessage. `alike_brokers`: names of those that have said so; an answer may add one."""
        self._group = group
        self._broker_name = broker_name
        self._failed = failed
        self._incarnation_of = incarnation_of
        self._alike_brokers = alike_brokers
        alike = _alike_failures(failed, incarnation_of) if broker_name in alike_brokers else None
        self._is_alike = alike is not None
        self.octets: bytes = self._encoded(messages=[], alike=alike) if alike is not None else self._by_message()

    def call_steps(
        self, topic: str, timeout_s: float, retries: Retries, clock: Callable[[], float] = time.monotonic
    ) -> Steps[Any]:
        """The SendBackResponse of the broker, which is found by the route of a topic."""
        with fork_waits:
            from .v1 import group_service_pb2 as pb

        def call() -> Steps[bytes]:
            return call_broker(topic, self._broker_name, _methods.SEND_BACK, (self.octets,), timeout_s, retries, clock)

        try:
            data = yield from call()
        except InvalidArgumentError as error:
            if not self._is_alike or "messages" not in dict(error.field_violations):
                raise
            self._alike_brokers.discard(self._broker_name)
            if len(self._failed) > MESSAGES_MAX:
                raise  # An earlier version takes fewer: the caller asks for them again.
            self._is_alike, self.octets = False, self._by_message()
            data = yield from call()
        answer = decoded(data, pb.SendBackResponse.FromString)
        if answer.takes_alike:
            self._alike_brokers.add(self._broker_name)
        return answer

    def _by_message(self) -> bytes:
        with fork_waits:
            from .v1 import group_service_pb2 as pb

        messages = [
            pb.FailedMessage(
                topic=message.queue.topic,
                queue_id=message.queue.queue_id,
                queue_offset=message.queue_offset,
                topic_incarnation=self._incarnation_of(message.queue),
                message_id=message.message_id,
                **fields,
            )
            for message, fields in self._failed
        ]
        return self._encoded(messages=messages)

    def _encoded(self, **fields: Any) -> bytes:
        with fork_waits:
            from .v1 import group_service_pb2 as pb

        return pb.SendBackRequest(
            consumer_group=self._group, request_id=secrets.randbits(64) | 1, **fields
        ).SerializeToString()


def _alike_failures(
    failed: Sequence[tuple[Message, Mapping[str, Any]]], incarnation_of: Callable[[MessageQueue], int]
) -> Any:
    """The messages as AlikeFailures; None if they did not fail alike."""
    with fork_waits:
        from .v1 import group_service_pb2 as pb

    message, fields = failed[0]
    topic, incarnation = message.queue.topic, incarnation_of(message.queue)
    queue, next_offset = None, 0
    queue_ids: list[int] = []
    firsts: list[int] = []
    counts: list[int] = []
    ids: list[bytes] = []
    for message, others in failed:
        if others is not fields and others != fields:
            return None
        ids.append(message._identity)
        if message.queue == queue and message.queue_offset == next_offset:
            counts[-1] += 1
            next_offset += 1
            continue
        queue, next_offset = message.queue, message.queue_offset + 1
        if queue.topic != topic or incarnation_of(queue) != incarnation:
            return None
        queue_ids.append(queue.queue_id)
        firsts.append(message.queue_offset)
        counts.append(1)
    return pb.AlikeFailures(
        common=pb.FailedMessage(topic=topic, topic_incarnation=incarnation, **fields),
        queue_ids=queue_ids,
        first_offsets=firsts,
        message_counts=counts,
        message_ids=b"".join(ids),
    )


def send_back_steps(
    group: str,
    messages: Sequence[Message],
    fields: Mapping[str, Any],
    incarnation_of: Callable[[MessageQueue], int],
    timeout_s: float,
    retries: Retries = CALL,
    clock: Callable[[], float] = time.monotonic,
    alike_brokers: set[str] | None = None,
) -> Steps[list[SentBack]]:
    """What became of the messages, in their order. `fields`: of each FailedMessage. The first error ends it: requests before are done.

    `alike_brokers`: see BackPayload; None: of one call.
    """
    alike_brokers = set() if alike_brokers is None else alike_brokers
    results: dict[int, SentBack] = {}
    for request in requests_for(messages):
        failed = [(messages[row], fields) for row in request.rows]
        payload = BackPayload(group, request.broker_name, failed, incarnation_of, alike_brokers)
        answer = yield from payload.call_steps(request.topic, timeout_s, retries, clock)
        for row, result in zip(request.rows, answer.results, strict=True):
            results[row] = _sent_back(result)
    return [results[row] for row in range(len(messages))]


def require_group(group: str) -> str:
    """The group of a consumer that has one. Raises ConfigurationError."""
    if not group:
        raise ConfigurationError(
            'messages are sent back for a group: give the consumer one, PullConsumer("my-group")'
        )
    return group


def brokers_of(queues: Iterable[MessageQueue]) -> dict[str, str]:
    """By broker name, a topic by whose route the broker is found. Raises ConfigurationError if there is no queue."""
    found = {queue.broker_name: queue.topic for queue in queues}
    if not found:
        raise ConfigurationError(
            "retries come from the brokers of what is consumed: subscribe to a topic or assign queues first"
        )
    return found


def retry_topic_steps(
    group: str, brokers: Mapping[str, str], timeout_s: float
) -> Steps[str]:
    """Makes the topic of the group's retries at these brokers, and waits until name servers know it; its name.

    `brokers`: by name, a topic by whose route each is found.
    """
    with fork_waits:
        from .v1 import group_service_pb2 as pb

    deadline_s = time.monotonic() + timeout_s
    payload = pb.CreateRetryTopicRequest(consumer_group=group).SerializeToString()
    for broker_name, topic in brokers.items():
        yield from call_broker(
            topic, broker_name, _methods.CREATE_RETRY_TOPIC, (payload,), timeout_s, CALL
        )
    wanted = retry_topic(group)
    while True:
        try:
            route = yield GetRoute(wanted, timeout_s)
            missing = set(brokers) - {queue.broker_name for queue in route.read_queues}
        except ProtomqError as error:
            if not isinstance(error, TopicNotFoundError) and not is_away(error):
                raise
            missing = set(brokers)
        if not missing:
            return wanted
        if time.monotonic() >= deadline_s:
            raise NoRouteError(
                f"the name servers do not know of {wanted!r} at {', '.join(sorted(missing))} yet: call again"
            )
        yield Pause(LOOK_AGAIN_S)
        yield ForgetRoute(wanted)


def _sent_back(result: Any) -> SentBack:
    due_ms = result.due_time_ms
    due_time = datetime.fromtimestamp(due_ms / 1000, UTC) if due_ms else None
    return SentBack(result.attempt, due_time, result.dead_letter)
