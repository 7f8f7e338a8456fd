"""One call: the request's bytes, and the way back.

A service sees the same `Call` whichever transport brought it. Rules:

- `answer` or `fail` exactly once, on the thread of `call.lane`. A second answer is an assertion error.
- A call that is going to be held gets an `on_close`: it is called on that thread if the caller goes away before the answer.
  The call is over then and must not be answered any more.
- Without `on_close` a call may be answered after its caller has gone; the answer is dropped.
- A one-way call is answered like any other; nothing is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

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

    @property
    def on_close(self) -> Callable[[], None] | None:
        """Called if the caller goes away before the answer."""
        return self._on_close

    @on_close.setter
    def on_close(self, callback: Callable[[], None] | None) -> None:
        self._on_close = callback
        if callback is not None and not self.answered:
            self._watch()

    def _watch(self) -> None:
        """Makes sure that `caller_gone` is called when the caller goes away."""
        raise NotImplementedError

    def caller_gone(self) -> None:
        """For the transport, on the call's lane: nobody waits for the answer any more."""
        callback, self._on_close = self._on_close, None
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
        if self.span is not None:
            self.span.end(code)


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
            connection.watched.discard(self)
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
        self._connection.watched.discard(self)
        if not self._flags & FLAG_ONE_WAY:
            self._connection.send_error(self._request_id, self.bound.method_id, error)

    def _watch(self) -> None:
        if self._connection.closed:
            self.lane.post(self.caller_gone)
        else:
            self._connection.watched.add(self)


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
