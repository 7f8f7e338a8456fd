"""One call: the request's bytes, and the way back.

A service sees the same `Call` whichever transport brought it. Rules:

- `answer` or `fail` exactly once, on the thread of `call.lane`. A second answer is an assertion error.
- A call that waits for something is held: `hold(on_close)`. It counts among `lane.holds` until it is over, and `on_close` is called on
  that thread if the caller goes away before the answer. The call is over then and must not be answered any more.
- A hold ends before its caller's deadline: `hold_time_ms` says how long it may last.
- A call that is not held may be answered after its caller has gone; the answer is dropped.
- A one-way call is answered like any other; nothing is sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from protomq.wire.frames import (
    FLAG_ANSWER,
    FLAG_ONE_WAY,
    HEADER,
    HEADER_SIZE_BYTES,
    LENGTH_SIZE_BYTES,
)

from .errors import Code, ServiceError
from .regions import Region

if TYPE_CHECKING:
    from .connection import Connection
    from .dispatch import BoundMethod, Method
    from .lane import Lane

__all__ = ["Call", "CallContext", "ForeignCall", "Region", "RemotingCall"]

logger = logging.getLogger(__name__)

_pack_header = HEADER.pack
_LENGTH_WITHOUT_PAYLOAD = HEADER_SIZE_BYTES - LENGTH_SIZE_BYTES
_COUNTED_SIZE_BYTES = 4096
"""Answers above this are counted as pending before they are flushed; smaller ones are bounded by what is read in one turn."""
HOLD_MARGIN_MS: Final = 100.0
"""Of a caller's time, left for the answer to reach it; a quarter of it where it is short."""


class CallContext(Protocol):
    """What a plain or streaming method may ask about its caller."""

    @property
    def peer(self) -> str:
        """Address and port of the caller."""
        ...

    @property
    def deadline(self) -> float | None:
        """When the caller stops waiting, in seconds of time.monotonic(); None: never."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the caller is gone."""
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
    """Exactly the request message: a bytearray of the call's own where it is longer than 32 KiB and came over the remoting port,
    so that records can be stamped in place; else bytes."""
    received: float
    """When it was read, in seconds of time.monotonic()."""
    deadline: float | None
    """When the caller stops waiting, in seconds of time.monotonic(); None: never."""
    lane: Lane
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
    def closed(self) -> bool:
        """Whether the caller is gone."""
        raise NotImplementedError

    def answer(
        self, payload: bytes, regions: Sequence[Region] = (), regions_size_bytes: int = 0
    ) -> None:
        """The response message: `payload`, then the bytes of the regions, `regions_size_bytes` together."""
        raise NotImplementedError

    def fail(self, error: ServiceError) -> None:
        """The answer is an error."""
        raise NotImplementedError

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


class RemotingCall(Call):
    """A call on a connection of its own lane: the hot path. What it answers is sent at the end of the turn."""

    __slots__ = ("_connection", "_flags", "_request_id")

    def __init__(
        self,
        connection: Connection,
        lane: Lane,
        bound: BoundMethod,
        payload: bytes | bytearray,
        request_id: int,
        flags: int,
        received: float,
        deadline: float | None,
    ) -> None:
        self._connection = connection
        self.lane = lane
        self.bound = bound
        self.payload = payload
        self._request_id = request_id
        self._flags = flags
        self.received = received
        self.deadline = deadline
        self.answered = False
        self._on_close = None
        self.span = None

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def answer(
        self, payload: bytes, regions: Sequence[Region] = (), regions_size_bytes: int = 0
    ) -> None:
        # Connection.send_answer and _finish, written out: this runs once for each small send.
        assert not self.answered, "a call is answered once"
        self.answered = True
        lane = self.lane
        lane.answer_count += 1
        if self.span is not None:
            self.span.end(0)
        connection = self._connection
        if self._on_close is not None:
            self._end_hold()
        if self._flags & FLAG_ONE_WAY or connection.closed:
            return
        out = connection.out
        if not out:
            lane.dirty.append(connection)
        size = len(payload) + regions_size_bytes
        out.append(
            _pack_header(
                _LENGTH_WITHOUT_PAYLOAD + size,
                self._request_id,
                self.bound.method_id,
                FLAG_ANSWER,
                0,
                0,
            )
        )
        out.append(payload)
        if size > _COUNTED_SIZE_BYTES:
            connection.out_size_bytes += size
        if regions:
            out.extend(regions)
            connection.out_has_regions = True

    def fail(self, error: ServiceError) -> None:
        self._finish(error.code)
        if not self._flags & FLAG_ONE_WAY:
            self._connection.send_error(self._request_id, self.bound.method_id, error)

    def _watch(self) -> None:
        if self._connection.closed:
            self.lane.post(self.caller_gone)
        else:
            self._connection.watched.add(self)

    def _end_hold(self) -> None:
        super()._end_hold()
        self._connection.watched.discard(self)


class ForeignCall(Call):
    """A call of another service than the connection's: run by that service's lane, answered through the connection's owner.

    It goes back to its owner however it ends, so that the owner knows what is still under way; all that a lane ends in a turn
    goes back by one hand-over.
    """

    __slots__ = ("_connection", "_flags", "_request_id", "_send")

    def __init__(
        self,
        connection: Connection,
        lane: Lane,
        bound: BoundMethod,
        payload: bytes | bytearray,
        request_id: int,
        flags: int,
        received: float,
        deadline: float | None,
    ) -> None:
        self._connection = connection
        self.lane = lane
        self.bound = bound
        self.payload = payload
        self._request_id = request_id
        self._flags = flags
        self.received = received
        self.deadline = deadline
        self.answered = False
        self._on_close = None
        self.span = None
        self._send: Callable[[], None] | None = None

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def answer(
        self, payload: bytes, regions: Sequence[Region] = (), regions_size_bytes: int = 0
    ) -> None:
        self._send = lambda: self._connection.send_answer(
            self._request_id, self.bound.method_id, payload, regions, regions_size_bytes
        )
        self._finish(0)

    def fail(self, error: ServiceError) -> None:
        self._send = lambda: self._connection.send_error(
            self._request_id, self.bound.method_id, error
        )
        self._finish(error.code)

    def _finish(self, code: int) -> None:
        super()._finish(code)
        self.lane.hand_back(self._connection.lane, self._return)

    def _return(self) -> None:
        """On the owner's thread."""
        connection = self._connection
        connection.lane.foreign_count -= 1
        connection.watched.discard(self)
        if self._send is not None and not self._flags & FLAG_ONE_WAY:
            self._send()

    def _watch(self) -> None:
        self._connection.lane.post(self._watch_on_owner)

    def _watch_on_owner(self) -> None:
        if self._connection.closed:
            self.lane.post(self.caller_gone)
        elif not self.answered:
            self._connection.watched.add(self)
