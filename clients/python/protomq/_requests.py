"""Requests and replies: what stands in a request, who waits for its reply, and the steps of both sides. No I/O.

    caller     register ─▶ send the request ─▶ its future ◀── take ◀── the held call (`follow_steps`), one for each broker
    replier    reply_steps: the caller, the call and the broker at which it waits stand in the request's properties

Rules:
- A caller has one id for each broker, random, so that no two meet.
- It is known to the broker before its request goes out: a reply may be faster than the next held call.
- The first reply of a call counts; others, and those that come again, are told to the broker as received. One of a call that nobody waits
  for any more is told as unwanted: then its sender learns that.
- What was received is told with the next held call; if that call fails, with the one after it.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from . import _methods
from ._call_steps import broker_of, call_broker, forget_route, retried
from ._checks import check_properties
from ._decoding import decoded
from ._late_imports import fork_waits
from ._message import Message
from ._outgoing import SendResult
from ._permitted import nothing_to_write
from ._retry import BACKOFF_MAX_S, LISTEN, ONCE, REPLY, attempt_timeout, is_denial
from ._steps import CallServer, ForgetRoute, GetRoute, Pause, Steps
from ._types import MessageQueue, Route
from .body_codecs import decode_body, encode_body
from .errors import (
    CallerGoneError,
    ClosedError,
    ConfigurationError,
    CorruptMessageError,
    ProtomqError,
    RequestTimeoutError,
    WrongTypeError,
)

_T = TypeVar("_T")

CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
REPLY_TO_BROKER: Final = "REPLY_TO_BROKER"
TTL: Final = "TTL"
REQUEST_PROPERTIES: Final = (CORRELATION_ID, REPLY_TO_CLIENT, REPLY_TO_BROKER, TTL)
"""RocketMQ's, but for the broker: there every broker looks for the client."""

REPLY_TIMEOUT_S: Final = 15.0
"""For a reply, unless the program says another: longer than its broker waits for the caller."""
CALLER_WAIT_S: Final = 10.0
"""How long a broker waits for a caller that was cut off."""
ANSWER_MARGIN_S: Final = 0.1
"""So long before the end of a call's time a broker answers it, or in the last quarter."""
EXPIRED_PART: Final = 0.95
"""Of the time that a broker waits: whoever is refused later is not refused at once."""
HOLD_S: Final = 5.0
HOLD_MARGIN_S: Final = 2.0
"""Together less than CALLER_WAIT_S: a caller whose master is silent, since it is stopped or cut off, comes to the next one in time. Mostly
the call is given up before, when a route names that one (`WATCHED`).
"""
ROUTE_TIMEOUT_S: Final = 3.0
LISTEN_TIMEOUT_S: Final = 3.0
"""For a call that is not held."""
PAUSE_MIN_S: Final = 0.05
DONE_MAX: Final = 4_096
"""Calls that are over and remembered: a reply that comes again is no stranger."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. `request`: the result of the send."""

    body: bytes
    properties: Mapping[str, str]
    request: SendResult

    def value(self, type_: type[_T]) -> _T:
        """See Message.value."""
        return decode_body(self.body, lambda: self.properties, type_)


class ReplyTo(NamedTuple):
    """Who waits for the reply to a message, and where."""

    topic: str
    broker_name: str
    caller_id: str
    call_id: str


class Outcome(Protocol):
    """A future of threads, or of a loop."""

    def done(self) -> bool:
        """Whether it has a result."""

    def set_result(self, result: Any, /) -> None:
        """The reply has come."""

    def set_exception(self, error: BaseException, /) -> None:
        """It will not come."""


# The replier.


def reply_to_of(message: object) -> ReplyTo:
    """Where the reply to a message goes. Raises ConfigurationError if its sender waits for none."""
    if not isinstance(message, Message):
        raise WrongTypeError(f"a reply is to a Message as it was consumed, not to {message!r}")
    properties = message.properties
    found = [properties.get(name, "") for name in (REPLY_TO_BROKER, REPLY_TO_CLIENT, CORRELATION_ID)]
    if not all(found):
        raise ConfigurationError(
            f"message {message.message_id} asks for no reply: it was sent by send, not by request"
        )
    origin = message.origin
    topic = message.queue.topic if origin is None else origin.topic
    return ReplyTo(topic, *found)


def asks_for_reply(message: Message) -> bool:
    """Whether its sender waits for a reply."""
    try:
        reply_to_of(message)
    except (ConfigurationError, CorruptMessageError):
        return False
    return True


def reply_timeout_s(request_timeout_s: float) -> float:
    """How long a reply may take, where the program does not say."""
    return max(REPLY_TIMEOUT_S, request_timeout_s)


def reply_steps(
    message: object,
    body: object,
    properties: Mapping[str, str] | None,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Steps[None]:
    """Sends the reply; done when the caller has it. Tried until the time is over: its broker may be starting again.

    Raises CallerGoneError where the broker refuses it, RequestTimeoutError where the time is over: then the caller may come back.
    """
    with fork_waits:
        from .v1 import reply_service_pb2 as pb

    to = reply_to_of(message)
    encoded, properties = encode_body(body, properties)
    request = pb.ReplyRequest(
        caller_id=to.caller_id,
        call_id=to.call_id,
        body=encoded,
        properties=dict(properties or {}),
    )
    payload = (request.SerializeToString(),)
    deadline_s = clock() + timeout_s
    may_have_it = False

    def attempt() -> Steps[None]:
        nonlocal may_have_it
        began_s = clock()
        left_s = max(deadline_s - began_s, 0.001)
        try:
            yield from call_broker(to.topic, to.broker_name, _methods.REPLY, payload, left_s, ONCE, clock)
        except ProtomqError as error:
            may_have_it = may_have_it or not error.definite
            # The broker says the same of a caller that has gone, and of one that has not come back while the call was held.
            if isinstance(error, CallerGoneError) and clock() - began_s >= _held_s(left_s) * EXPIRED_PART:
                raise _no_caller_yet(to, timeout_s) from error
            raise

    try:
        yield from retried(attempt, REPLY.of_call(deadline_s, clock).decide)
    except CallerGoneError as error:
        # Of a reply that it held for nothing, the broker is sure that nobody has it.
        error.definite = not may_have_it
        raise


def _held_s(left_s: float) -> float:
    """How long a broker holds a reply of which its call has so much time left."""
    return min(CALLER_WAIT_S, left_s - min(ANSWER_MARGIN_S, left_s / 4))


def _no_caller_yet(to: ReplyTo, timeout_s: float) -> RequestTimeoutError:
    return RequestTimeoutError(
        f"broker {to.broker_name} has not heard within {timeout_s:.3g} s that the caller has the reply: it may have it, or may come back",
        metadata={"caller_id": to.caller_id, "broker_name": to.broker_name},
    )


# The caller.


class ReplyInbox:
    """The replies that one caller waits for at one broker. `begin` and `end`: any thread; the rest: whoever drives `follow_steps`."""

    def __init__(self, topic: str, broker_name: str) -> None:
        self.topic = topic
        """One that the broker has, of the last request: its route leads there."""
        self.broker_name = broker_name
        self.caller_id = ""
        self._open: dict[str, Outcome] = {}
        self._done: OrderedDict[str, None] = OrderedDict()
        self._received: dict[int, None] = {}
        self._unwanted: dict[int, None] = {}
        self.renew()

    def renew(self) -> None:
        """Another caller came with the same id: takes a new one. The replies to what is open go to the other; those calls have failed."""
        self.caller_id = secrets.token_hex(16)
        for call_id in list(self._open):
            outcome = self._open.pop(call_id, None)
            if outcome is not None and not outcome.done():
                outcome.set_exception(
                    CallerGoneError("the broker has another caller of the same id: it gets the reply")
                )

    def close(self) -> None:
        """Nobody waits for replies any more: the producer is closed."""
        for call_id in list(self._open):
            outcome = self._open.pop(call_id, None)
            if outcome is not None and not outcome.done():
                outcome.set_exception(ClosedError("the producer was closed while this request waited for its reply"))

    def begin(self, outcome: Outcome) -> str:
        """A call begins, whose outcome is to be told; its id."""
        call_id = secrets.token_hex(16)
        self._open[call_id] = outcome
        return call_id

    def end(self, call_id: str) -> None:
        """Nobody waits for this call any more."""
        self._open.pop(call_id, None)

    @property
    def is_needed(self) -> bool:
        """Whether the broker has to be asked: a call is open, or it is to be told what was received."""
        return bool(self._open or self._received or self._unwanted)

    def properties(self, call_id: str, timeout_s: float) -> dict[str, str]:
        """What stands in the request of a call."""
        return {
            CORRELATION_ID: call_id,
            REPLY_TO_CLIENT: self.caller_id,
            REPLY_TO_BROKER: self.broker_name,
            TTL: str(max(int(timeout_s * 1000), 1)),
        }

    def wait_steps(
        self, hold_s: float, timeout_s: float, *, leaves: bool = False
    ) -> Steps[None]:
        """Waits for replies once, and tells what was received. 0 seconds: the broker learns that the caller is there.

        `leaves`: the caller waits for nothing any more.
        """
        with fork_waits:
            from .v1 import reply_service_pb2 as pb

        received, unwanted = tuple(self._received), tuple(self._unwanted)
        request = pb.WaitForRepliesRequest(
            caller_id=self.caller_id,
            hold_ms=int(hold_s * 1000),
            received_reply_ids=received,
            unwanted_reply_ids=unwanted,
            leaves=leaves,
        )
        route: Route = yield GetRoute(self.topic, min(timeout_s, ROUTE_TIMEOUT_S))
        data: bytes = yield CallServer(
            broker_of(route, self.broker_name),
            _methods.WAIT_FOR_REPLIES,
            (request.SerializeToString(),),
            timeout_s,
        )
        for told, reply_ids in ((self._received, received), (self._unwanted, unwanted)):
            for reply_id in reply_ids:
                told.pop(reply_id, None)
        for waiting in decoded(data, pb.WaitForRepliesResponse.FromString).replies:
            reply = waiting.reply
            is_wanted = self._take(reply.call_id, reply.body, dict(reply.properties))
            (self._received if is_wanted else self._unwanted)[waiting.reply_id] = None

    def _take(self, call_id: str, body: bytes, properties: Mapping[str, str]) -> bool:
        """Whether somebody waits, or has waited, for the reply."""
        outcome = self._open.pop(call_id, None)
        if outcome is None or outcome.done():
            return call_id in self._done
        outcome.set_result((body, properties))
        self._done[call_id] = None
        if len(self._done) > DONE_MAX:
            self._done.popitem(last=False)
        return True


def listen_steps(
    route: Route,
    inboxes: Mapping[str, ReplyInbox],
    inbox_at: Callable[[str, str], tuple[ReplyInbox, bool]],
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Steps[ReplyInbox]:
    """An inbox at a broker that knows of it. While that is away, or another master is elected, it is looked for until the deadline.

    `inboxes`: those that there are. `inbox_at`: of a topic and a broker: its inbox, and whether a held call follows it.
    """
    retries = LISTEN.of_call(deadline_s, clock)
    while True:
        trouble = nothing_to_write(route)
        is_waited_for = bool(route.leaderless_brokers)
        for broker_name in brokers_for(route, inboxes):
            inbox, is_followed = inbox_at(route.topic, broker_name)
            if is_followed:
                return inbox
            timeout_s = min(attempt_timeout(deadline_s - clock()), LISTEN_TIMEOUT_S)
            try:
                yield from inbox.wait_steps(0.0, timeout_s)
            except ProtomqError as error:
                if is_denial(error):
                    yield forget_route(route.topic, error)
                    raise
                # Another broker has the topic, too; or this one is back soon.
                trouble, is_waited_for = error, True
            else:
                return inbox
        yield ForgetRoute(route.topic)
        pause_s = retries.decide(trouble) if is_waited_for else None
        if pause_s is None:
            raise trouble
        yield Pause(pause_s)
        try:
            route = yield GetRoute(route.topic, max(min(deadline_s - clock(), ROUTE_TIMEOUT_S), 0.001))
        except ProtomqError as error:
            if not error.retriable or is_denial(error):
                raise


def follow_steps(inbox: ReplyInbox, goes_on: Callable[[], bool]) -> Steps[None]:
    """Holds a call at the broker as long as `goes_on`; over restarts and cuts."""
    pause_s = PAUSE_MIN_S
    while goes_on():
        try:
            yield from inbox.wait_steps(HOLD_S, HOLD_S + HOLD_MARGIN_S)
            pause_s = PAUSE_MIN_S
        except CallerGoneError:
            if goes_on():
                inbox.renew()
        except ProtomqError as error:
            if not goes_on():
                return
            # A master that is stopped or cut off is silent: meanwhile another one may lead.
            if error.stale_route or isinstance(error, RequestTimeoutError):
                yield forget_route(inbox.topic, error)
            yield Pause(max(pause_s, (error.retry_delay_ms or 0) / 1000))
            pause_s = min(pause_s * 2, BACKOFF_MAX_S)


def check_request(properties: Mapping[str, str] | None) -> None:
    """Raises ConfigurationError where a property of the caller's has the name of one that a request needs."""
    check_properties(properties)
    taken = [name for name in REQUEST_PROPERTIES if name in (properties or {})]
    if taken:
        raise ConfigurationError(f"a request has the property {taken[0]} of its own: name yours differently")


def queue_at(
    route: Route, queue: MessageQueue | None, sharding_key: str | None, broker_name: str
) -> MessageQueue | None:
    """The queue of a request: the one that was asked for. Else, if the request creates the topic, a queue of the broker at which its
    caller waits.

    So the reply finds that broker by the route of the topic.
    """
    if queue is not None or sharding_key or not route.auto_create:
        return queue
    return next((each for each in route.write_queues if each.broker_name == broker_name), None)


def no_reply(sent: SendResult, timeout_s: float) -> RequestTimeoutError:
    """The error when the request is stored, and no reply has come."""
    return RequestTimeoutError(
        f"no reply to message {sent.message_id} within {timeout_s:.3g} s; the request stays in its topic, and may be processed",
        metadata={"message_id": sent.message_id, "topic": sent.queue.topic},
    )


def brokers_for(route: Route, known: Mapping[str, ReplyInbox]) -> list[str]:
    """Where to wait for replies to requests to this topic, the best first: at a broker where the caller waits already."""
    names = [name for name in route.brokers if name in route.writable_brokers]
    secrets.SystemRandom().shuffle(names)
    return sorted(names, key=lambda name: name not in known)


def seconds_left(deadline_s: float) -> float:
    """Until the deadline, by time.monotonic(); never 0."""
    return max(deadline_s - time.monotonic(), 0.001)
