"""Calls of the remoting port: on a connection of the lane that runs them, or of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from protomq.wire.frames import (
    FLAG_ANSWER,
    FLAG_ONE_WAY,
    HEADER,
    HEADER_SIZE_BYTES,
    LENGTH_SIZE_BYTES,
)

from .call import Call, CallLane
from .connection import Connection, ConnectionLane, foreign_sizes
from .dispatch import BoundMethod
from .errors import ServiceError
from .principals import Principal
from .regions import Region

_pack_header = HEADER.pack
_LENGTH_WITHOUT_PAYLOAD: Final = HEADER_SIZE_BYTES - LENGTH_SIZE_BYTES
_COUNTED_SIZE_BYTES: Final = 4096
"""Answers above this are counted as pending before they are flushed; smaller ones are bounded by what is read in one turn."""


class RemotingCall(Call):
    """A call on a connection of its own lane: the hot path. What it answers is sent at the end of the turn."""

    __slots__ = ("_connection", "_flags", "_request_id")

    lane: ConnectionLane

    def __init__(
        self,
        connection: Connection,
        lane: ConnectionLane,
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
    def principal(self) -> Principal:
        return self._connection.principal

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
            self._connection.watch(self, self._request_id)

    def _end_hold(self) -> None:
        super()._end_hold()
        self._connection.unwatch(self, self._request_id)


class ForeignCall(Call):
    """A call of another service than the connection's: run by that service's lane, answered through the connection's owner.

    It goes back to its owner however it ends, so the owner knows what is still under way. All calls that a lane ends in a
    turn go back by one hand-over.
    """

    __slots__ = ("_connection", "_flags", "_request_id", "_send", "_size_bytes")

    def __init__(
        self,
        connection: Connection,
        lane: CallLane,
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
        self._size_bytes = 0

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def principal(self) -> Principal:
        return self._connection.principal

    @property
    def closed(self) -> bool:
        return self._connection.closed

    @property
    def is_overloaded(self) -> bool:
        return self._connection.is_overloaded

    def answer(
        self, payload: bytes, regions: Sequence[Region] = (), regions_size_bytes: int = 0
    ) -> None:
        self._send = lambda: self._connection.send_answer(
            self._request_id, self.bound.method_id, payload, regions, regions_size_bytes
        )
        # Regions are in no memory.
        if len(payload) > _COUNTED_SIZE_BYTES:
            self._size_bytes = len(payload)
            with foreign_sizes:
                self._connection.foreign_size_bytes += self._size_bytes
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
        connection.unwatch(self, self._request_id)
        if self._send is not None and not self._flags & FLAG_ONE_WAY:
            self._send()
        if self._size_bytes:
            with foreign_sizes:
                connection.foreign_size_bytes -= self._size_bytes

    def _watch(self) -> None:
        self._connection.lane.post(self._watch_on_owner)

    def _watch_on_owner(self) -> None:
        if self._connection.closed:
            self.lane.post(self.caller_gone)
        elif not self.answered:
            self._connection.watch(self, self._request_id)
