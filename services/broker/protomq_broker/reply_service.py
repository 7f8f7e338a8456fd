"""ReplyService: brings replies to callers that wait for them. `reply_calls.py` decides; here are calls, timers and the lanes' threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from google.protobuf.message import DecodeError

from protomq.v1.reply_service_pb2 import (
    ReplyRequest,
    ReplyResponse,
    WaitForRepliesRequest,
    WaitForRepliesResponse,
)
from protomq_runtime.dispatch import raw
from protomq_runtime.errors import (
    Code,
    ServiceError,
    invalid_argument,
    too_many,
    unparsable,
)

from .pull_requests import shortened_hold_ms
from .reply_calls import (
    GRACE_MS,
    Delivered,
    Effect,
    Given,
    Refused,
    Replaced,
    ReplyCalls,
    TooMany,
)
from .store_errors import to_service_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from protomq_runtime.call import Call
    from protomq_runtime.clock import Clock
    from protomq_runtime.timers import Timer

ID_SIZE_MAX: Final = 255
REPLY_SIZE_MAX_BYTES: Final = 3 << 20
"""Most bytes of body and properties. The answer that brings the reply then fits into the 4 MiB that gRPC clients take by default."""
REPLY_IDS_MAX: Final = 2_000
RETRY_DELAY_MS: Final = 500

_ANSWER = ReplyResponse().SerializeToString()


class ReplyService:
    """Implements protomq.v1.ReplyService, on the consumer lanes."""

    def __init__(
        self,
        clock: Clock,
        hold_max_ms: int,
        write_refusal: Callable[[], ServiceError | None],
        first_reply_id: int = 1,
    ) -> None:
        """`write_refusal`: why this broker leads nothing now; then callers and replies must go to another broker. `first_reply_id`: random.
        """
        self._clock = clock
        self._hold_max_ms = hold_max_ms
        self._write_refusal = write_refusal
        self._lock = threading.Lock()
        self._calls = ReplyCalls(clock.monotonic_ms(), first_id=first_reply_id)
        self._waiting: dict[Call, str] = {}
        """The held calls of callers, with the callers' ids."""
        self._timers: dict[Call, Timer] = {}
        """The timers of held calls; only the lane of a call touches its timer."""
        self._is_stopping = False

    @raw
    def wait_for_replies(self, call: Call) -> None:
        """Holds the call until there is a reply."""
        try:
            request = self._read_wait(call)
        except Exception as error:
            call.fail(to_service_error(error))
            return
        caller_id = request.caller_id
        hold_ms = call.hold_time_ms(request.hold_ms)
        is_held = hold_ms > 0 and not request.leaves and not self._is_stopping
        if is_held:
            # Hold the call before another lane can find it. A reply's answer is posted to this lane, so it comes after this function.
            call.hold(partial(self._caller_left, caller_id, call))
        with self._lock:
            if is_held:
                self._waiting[call] = caller_id
            effects = self._calls.wait(
                caller_id,
                call,
                self._clock.monotonic_ms(),
                is_held=is_held,
                received=request.received_reply_ids,
                unwanted=request.unwanted_reply_ids,
                leaves=request.leaves,
            )
        self._do(effects)
        if is_held:
            self._timers[call] = call.lane.call_later(
                hold_ms, partial(self._wait_ends, caller_id, call)
            )
            if self._is_stopping:  # since it was looked at: `stop` may not have seen this call
                self._wait_ends(caller_id, call)

    @raw
    def reply(self, call: Call) -> None:
        """Holds the call until the caller has the reply."""
        try:
            request = self._read_reply(call)
        except Exception as error:
            call.fail(to_service_error(error))
            return
        call.hold(partial(self._replier_left, call))
        with self._lock:
            effects = self._calls.reply(
                request.caller_id, bytes(call.payload), call, self._clock.monotonic_ms()
            )
        self._do(effects)
        hold_ms = call.hold_time_ms(GRACE_MS)
        self._timers[call] = call.lane.call_later(hold_ms, partial(self._reply_ends, call))

    def numbers(self) -> tuple[int, int, int, int]:
        """Returns the callers and replies that wait now, and the replies delivered and refused since the start. Any thread."""
        with self._lock:
            calls = self._calls
            callers = calls.caller_count(self._clock.monotonic_ms())
            return callers, calls.reply_count, calls.counts.delivered, calls.counts.refused

    def stop(self) -> None:
        """Refuses new calls, and answers the callers that wait, so that they find the next broker. Any thread."""
        self._is_stopping = True
        with self._lock:
            waiting = list(self._waiting.items())
        for call, caller_id in waiting:
            call.lane.post(partial(self._wait_ends, caller_id, call))

    # Requests.

    def _read_wait(self, call: Call) -> WaitForRepliesRequest:
        try:
            request = WaitForRepliesRequest.FromString(bytes(call.payload))
        except DecodeError:
            raise unparsable("protomq.v1.WaitForRepliesRequest") from None
        _check_id("caller_id", request.caller_id)
        request.hold_ms = shortened_hold_ms(request.hold_ms, self._hold_max_ms)
        for name in ("received_reply_ids", "unwanted_reply_ids"):
            if len(getattr(request, name)) > REPLY_IDS_MAX:
                raise invalid_argument(name, f"at most {REPLY_IDS_MAX} at once")
        self._check_leads()
        return request

    def _read_reply(self, call: Call) -> ReplyRequest:
        try:
            request = ReplyRequest.FromString(bytes(call.payload))
        except DecodeError:
            raise unparsable("protomq.v1.ReplyRequest") from None
        _check_id("caller_id", request.caller_id)
        _check_id("call_id", request.call_id)
        size_bytes = len(call.payload)
        if size_bytes > REPLY_SIZE_MAX_BYTES:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "MESSAGE_TOO_LARGE",
                f"the reply has {size_bytes} bytes, at most {REPLY_SIZE_MAX_BYTES} are allowed",
                metadata={
                    "field": "body",
                    "size_bytes": str(size_bytes),
                    "limit_bytes": str(REPLY_SIZE_MAX_BYTES),
                },
            )
        self._check_leads()
        return request

    def _check_leads(self) -> None:
        refusal = self._write_refusal()
        if refusal is not None:
            raise refusal

    # Ends.

    def _wait_ends(self, caller_id: str, call: Call) -> None:
        with self._lock:
            effects = self._calls.wait_ends(caller_id, call, self._clock.monotonic_ms())
        self._do(effects)

    def _caller_left(self, caller_id: str, call: Call) -> None:
        self._cancel_timer(call)
        with self._lock:
            self._waiting.pop(call, None)
            self._calls.waiter_left(caller_id, call, self._clock.monotonic_ms())

    def _reply_ends(self, call: Call) -> None:
        with self._lock:
            effects = self._calls.reply_ends(call)
        self._do(effects)

    def _replier_left(self, call: Call) -> None:
        self._cancel_timer(call)
        with self._lock:
            self._calls.replier_left(call)

    def _cancel_timer(self, call: Call) -> None:
        timer = self._timers.pop(call, None)
        if timer is not None:
            timer.cancel()

    # Effects.

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            call = cast("Call", effect.waiter)
            match effect:
                case Given(_, replies):
                    response = WaitForRepliesResponse()
                    for reply_id, reply in replies:
                        given = response.replies.add(reply_id=reply_id)
                        given.reply.ParseFromString(reply)
                    self._end(call, response.SerializeToString())
                case Delivered():
                    self._end(call, _ANSWER)
                case Replaced(_, caller_id):
                    text = f"another call of caller {caller_id!r} waits now: two callers with one id, or this one was made again"
                    self._end(call, caller_gone(caller_id, text))
                case Refused(_, caller_id, was_given):
                    self._end(call, _refusal(caller_id, was_given=was_given))
                case TooMany(_, what, limit):
                    self._end(call, _no_room(what, limit))

    def _end(self, call: Call, outcome: bytes | ServiceError) -> None:
        with self._lock:
            self._waiting.pop(call, None)

        def end() -> None:
            self._cancel_timer(call)
            if call.answered:  # Its caller has gone meanwhile.
                return
            if isinstance(outcome, ServiceError):
                call.fail(outcome)
            else:
                call.answer(outcome)

        call.lane.post(end)


def caller_gone(caller_id: str, text: str, *, definite: bool = True) -> ServiceError:
    """Makes an error: the caller does not wait for the reply any more, or another caller has taken its place."""
    return ServiceError(
        Code.NOT_FOUND, "CALLER_GONE", text, metadata={"caller_id": caller_id}, definite=definite
    )


def _refusal(caller_id: str, *, was_given: bool) -> ServiceError:
    text = f"caller {caller_id!r} waits for no reply any more: its time is up, or it has gone; drop the reply"
    return caller_gone(caller_id, text, definite=not was_given)


def _no_room(what: str, limit: int) -> ServiceError:
    text = f"{limit} {what} are waiting already; try again later"
    match what:
        case "callers":
            return too_many("callers", limit, text, retry_delay_ms=RETRY_DELAY_MS)
        case "replies of a caller":
            return too_many("replies of a caller", limit, text, retry_delay_ms=RETRY_DELAY_MS)
    return too_many("bytes of replies", limit, text, retry_delay_ms=RETRY_DELAY_MS)


def _check_id(field: str, value: str) -> None:
    if not 0 < len(value.encode()) <= ID_SIZE_MAX:
        raise invalid_argument(field, f"has 1 to {ID_SIZE_MAX} bytes")
