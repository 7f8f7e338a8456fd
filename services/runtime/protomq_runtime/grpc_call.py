"""Calls that came by gRPC: unary ones, which a lane answers, and the context of streams, which run on the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

import grpc

from .call import AnswerSink, Call
from .dispatch import BoundMethod
from .errors import Code, ServiceError, corrupt_log
from .grpc_status import plain_peer
from .lane import Lane
from .principals import Principal
from .regions import Region, ShortFileError, read_regions
from .unread_answers import UnreadAnswers

logger = logging.getLogger(__name__)

COUNTED_SIZE_MIN_BYTES: Final = 4 << 10
"""Smaller answers are not counted: there are many, and calls under way are bounded."""


class GrpcFront(AnswerSink, Protocol):
    """The server, as its calls see it."""

    unread: UnreadAnswers

    def count_hold(self, lane: Lane, change: int) -> None:
        """A call began or ended to be held by that lane. Lane thread."""
        ...


class GrpcCall(Call):
    """A call that came by gRPC. Its answer is one `bytes`, regions read in."""

    __slots__ = ("_closed", "_peer", "_principal", "front", "future", "unread_size_bytes")

    transport = "grpc"
    lane: Lane

    def __init__(
        self,
        front: GrpcFront,
        lane: Lane,
        bound: BoundMethod,
        payload: bytes,
        peer: str,
        principal: Principal,
        received: float,
        deadline: float | None,
        future: asyncio.Future[bytes | ServiceError],
    ) -> None:
        self.front = front
        self.lane = lane
        self.bound = bound
        self.payload = payload
        self._peer = peer
        self._principal = principal
        self.received = received
        self.deadline = deadline
        self.future = future
        self.answered = False
        self._on_close = None
        self._closed = False
        self.span = None
        self.unread_size_bytes = 0
        """Of the answer, from when it is made until its caller has taken it; 0 for small ones, which are not counted."""

    @property
    def peer(self) -> str:
        return plain_peer(self._peer)

    @property
    def principal(self) -> Principal:
        return self._principal

    @property
    def closed(self) -> bool:
        return self._closed

    def answer(
        self, payload: bytes, regions: Sequence[Region] = (), regions_size_bytes: int = 0
    ) -> None:
        span, self.span = self.span, None  # ended when it is known whether the regions can be read
        self._finish(0)
        if regions_size_bytes < COUNTED_SIZE_MIN_BYTES:
            self._make(payload, regions, span)
            return
        lane = self.lane

        def start() -> None:
            self.unread_size_bytes = regions_size_bytes
            if threading.current_thread() is lane:
                self._make(payload, regions, span)
            else:
                lane.post(lambda: self._make(payload, regions, span))

        self.front.unread.begin(self._peer, regions_size_bytes, start)

    def _make(self, payload: bytes, regions: Sequence[Region], span: Any) -> None:
        """On the lane: reads the regions in, unless nobody waits any more; ends the span with what came of it."""
        answer: bytes | ServiceError = payload
        code = 0
        if regions and self._closed:
            code = Code.CANCELLED
        elif regions:
            try:
                answer = b"".join((payload, *read_regions(regions)))
            except (OSError, ShortFileError) as error:
                logger.error("the answer to %s cannot be read: %s", self.method.path, error)
                reason = f"what is stored cannot be read: {error}"
                answer = corrupt_log(reason)
                code = answer.code
        if span is not None:
            span.end(code)
        self.lane.hand_back(self.front, (self, answer))

    def fail(self, error: ServiceError) -> None:
        self._finish(error.code)
        self.lane.hand_back(self.front, (self, error))

    def settle(self) -> None:
        """On the event loop: the answer was taken, or nobody will."""
        if self.unread_size_bytes:
            self.front.unread.settle(self._peer, self.unread_size_bytes)
            self.unread_size_bytes = 0

    def abandon(self) -> None:
        """On the event loop: the caller has gone."""
        self._closed = True
        self.lane.post(self.caller_gone)

    def _watch(self) -> None:
        # If the caller went before this, `abandon` has posted caller_gone, which may have run already.
        if self._closed:
            self.lane.post(self.caller_gone)

    def _count_hold(self, change: int) -> None:
        super()._count_hold(change)
        self.front.count_hold(self.lane, change)


class StreamContext:
    """CallContext of a streaming method."""

    __slots__ = ("_context", "deadline", "principal")

    def __init__(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        deadline: float | None,
        principal: Principal,
    ) -> None:
        self._context = context
        self.deadline = deadline
        self.principal = principal

    @property
    def peer(self) -> str:
        return plain_peer(self._context.peer())

    @property
    def closed(self) -> bool:
        return self._context.done()
