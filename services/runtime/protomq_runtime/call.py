"""One call: the request's bytes, and the way back.

A service sees the same `Call` whichever transport brought it: those of the remoting port stand in `remoting_call.py`, those of gRPC in
`grpc_call.py`. Rules:

- `answer` or `fail` exactly once, on the thread of `call.lane`. A second answer is an assertion error.
- A call that waits for something is held: `hold(on_close)`. It counts among `lane.holds` until it is over, and `on_close` is called on
  that thread if the caller goes away before the answer. The call is over then and must not be answered any more.
- A held call that its caller gives up is answered CANCELLED; `on_close` is called then, too.
- A hold ends before its caller's deadline: `hold_time_ms` says how long it may last.
- A call that is not held may be answered after its caller has gone; the answer is dropped.
- A one-way call is answered like any other; nothing is sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Protocol

from .dispatch import BoundMethod, Method
from .errors import CANCELLED, Code, ServiceError
from .principals import Principal
from .regions import Region
from .timers import Timer

logger = logging.getLogger(__name__)

HOLD_MARGIN_MS: Final = 100.0
"""Of a caller's time, left for the answer to reach it; a quarter of it where it is short."""


class CallContext(Protocol):
    """What a plain or streaming method may ask about its caller."""

    @property
    def peer(self) -> str:
        """Address and port of the caller."""
        ...

    @property
    def principal(self) -> Principal:
        """Who calls."""
        ...

    @property
    def deadline(self) -> float | None:
        """When the caller stops waiting, in seconds of time.monotonic(); None: never."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the caller is gone."""
        ...


class AnswerSink(Protocol):
    """Where answers go that another thread has to pass on: the gRPC front, or the lane that owns the connection."""

    def deliver(self, answers: list[Any]) -> None:
        """Takes all answers of one turn. Called on the lane's thread."""
        ...


class CallLane(Protocol):
    """The lane that runs a call, as the call and its service see it. `post`: any thread; everything else: the lane's own."""

    answer_count: int
    """Calls that are over, for the count of open ones."""
    holds: int
    """Calls that are held now, whatever brought them; they count themselves (`Call.hold`)."""

    @property
    def pool_name(self) -> str:
        """Of its pool, and so of its service: `send`."""
        ...

    def post(self, function: Callable[[], None]) -> None:
        """Has the function called on the lane's thread, in the order of posting."""
        ...

    def call_later(self, delay_ms: float, function: Callable[[], None]) -> Timer:
        """Has the function called after the delay, unless the timer is cancelled."""
        ...

    def hand_back(self, sink: AnswerSink, answer: Any) -> None:
        """Passes an answer on at the end of the turn."""
        ...


class Call:
    """A call that has been received. Lane thread only."""

    __slots__ = (
        "_on_close",
        "answered",
        "bound",
        "deadline",
        "lane",
        "payload",
        "received",
        "span",
    )

    transport: ClassVar[str] = "remoting"
    """Which of the two brought it: `remoting` or `grpc`."""
    payload: bytes | bytearray
    """Exactly the request message. Over 32 KiB from the remoting port it is a bytearray of the call's own, so that records can
    be stamped in place; else bytes."""
    received: float
    """When it was read, or handed to its lane by another one, in seconds of time.monotonic()."""
    deadline: float | None
    """When the caller stops waiting, in seconds of time.monotonic(); None: never."""
    lane: CallLane
    """The lane that runs the call."""
    bound: BoundMethod
    answered: bool
    """Whether the call is over: answered, failed, or given up by its caller."""
    _on_close: Callable[[], None] | None
    """Not None: the call is held."""
    span: Any
    """What telemetry hangs on the call; None where it is off."""

    @property
    def method(self) -> Method:
        """The rpc."""
        return self.bound.method

    @property
    def peer(self) -> str:
        """Address and port of the caller."""
        raise NotImplementedError

    @property
    def principal(self) -> Principal:
        """Who calls: of whom the connection is, or over gRPC the call."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether the caller is gone."""
        raise NotImplementedError

    @property
    def is_overloaded(self) -> bool:
        """Whether its caller leaves so much unread that no more may be made for it."""
        return False

    def answer(
        self, payload: bytes, regions: Sequence[Region] = (), regions_size_bytes: int = 0
    ) -> None:
        """The response message: `payload`, then the bytes of the regions, `regions_size_bytes` together."""
        raise NotImplementedError

    def fail(self, error: ServiceError) -> None:
        """The answer is an error."""
        raise NotImplementedError

    @property
    def is_late(self) -> bool:
        """Whether its caller has stopped waiting."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def hold_time_ms(self, wanted_ms: float) -> float:
        """How long the call may be held if it asks for `wanted_ms`: less where its caller would not wait for the answer."""
        if self.deadline is None:
            return wanted_ms
        left_ms = (self.deadline - time.monotonic()) * 1000
        return max(0.0, min(wanted_ms, left_ms - min(HOLD_MARGIN_MS, left_ms / 4)))

    def hold(self, on_close: Callable[[], None]) -> None:
        """The call waits from now on; `on_close` is called if its caller goes away before the answer. Once."""
        assert self._on_close is None, "a call is held once"
        assert not self.answered, "a call that is over is not held"
        self._on_close = on_close
        self._count_hold(1)
        self._watch()

    def _watch(self) -> None:
        """Makes sure that `caller_gone` is called when the caller goes away."""
        raise NotImplementedError

    def caller_gone(self) -> None:
        """For the transport, on the call's lane: nobody waits for the answer any more."""
        callback = self._on_close
        if self.answered or callback is None:
            return
        self._finish(Code.CANCELLED)
        try:
            callback()
        except Exception:
            logger.exception("on_close of %s failed", self.method.path)

    def cancel(self) -> None:
        """For the transport, on the call's lane: the caller does not want it any more, and is there. One that is not held goes on."""
        callback = self._on_close
        if self.answered or callback is None:
            return
        self.fail(CANCELLED)
        try:
            callback()
        except Exception:
            logger.exception("on_close of %s failed", self.method.path)

    def _finish(self, code: int) -> None:
        assert not self.answered, "a call is answered once"
        self.answered = True
        self.lane.answer_count += 1
        if self._on_close is not None:
            self._end_hold()
        if self.span is not None:
            self.span.end(code)

    def _end_hold(self) -> None:
        self._on_close = None
        self._count_hold(-1)

    def _count_hold(self, change: int) -> None:
        self.lane.holds += change
