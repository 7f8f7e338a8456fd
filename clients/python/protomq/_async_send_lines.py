"""Carrying what stands in lines, from coroutines: one task serves a line while anything waits in it. See `_lines.py`, `_send_lines.py`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Final

from ._async_routes import AsyncRoutes
from ._async_steps import AsyncDriver
from ._async_transport import AsyncTransport
from ._at_exit import warn_of_loss
from ._batching import PreparedRecord
from ._calls_under_way import TaskCalls
from ._checks import check_queue, check_topic
from ._delays import When
from ._lines import LINES_MAX, own_error, take_batch
from ._loop_ends import fail, given_up, why_ended
from ._methods import SEND
from ._of_one_process import OfOneProcess
from ._outgoing import SendResult, Stored
from ._producer_options import ProducerOptions
from ._retry import attempt_timeout
from ._send_arguments import field_of
from ._send_core import SendCore
from ._send_request import address_of, fits
from ._send_steps import route_for, send_again
from ._types import MessageQueue, Route, Target
from .errors import ConfigurationError, ProtomqError, RequestTimeoutError

_GRACE_S: Final = 0.05
"""The request itself knows its deadline and gives the better error; only if it does not, the caller's own timer ends the wait."""


class _Entry:
    """One message of one coroutine."""

    __slots__ = ("deadline_s", "future", "record", "size_bytes")

    def __init__(
        self, record: PreparedRecord, size_bytes: int, deadline_s: float, future: asyncio.Future[SendResult]
    ) -> None:
        self.record = record
        self.size_bytes = size_bytes
        self.deadline_s = deadline_s
        self.future = future


# What is asked of all messages of a request, without a step of the interpreter for each.
_record_of: Final[Callable[[_Entry], PreparedRecord]] = attrgetter("record")
_deadline_of: Final[Callable[[_Entry], float]] = attrgetter("deadline_s")
_size_of: Final[Callable[[_Entry], int]] = attrgetter("size_bytes")


class AsyncLine:
    """The line of a queue, or of a topic where `queue` is None. See _lines.py."""

    __slots__ = ("create_future", "in_flight", "is_forgotten", "pending", "queue", "target", "task", "topic")

    def __init__(
        self, topic: str, queue: MessageQueue | None, delay_field: bytes | None
    ) -> None:
        self.topic = topic
        self.queue = queue
        self.target = Target(queue, delay_field)
        self.pending: deque[_Entry] = deque()
        self.in_flight: list[_Entry] = []
        """The messages of the request that is under way."""
        self.is_forgotten = False
        self.task: asyncio.Task[None] | None = None
        """Serves the line while anything waits in it, one request in flight at a time."""
        self.create_future: Callable[[], asyncio.Future[SendResult]]
        """That of the loop of the task: to ask which loop runs is a call of the kernel."""

    @property
    def count(self) -> int:
        """Messages without an outcome."""
        return len(self.in_flight) + len(self.pending)

    def forget(self) -> None:
        """Its task goes on no more, or in another process: what it has left is not this line's."""
        self.is_forgotten = True
        self.in_flight = []
        self.pending.clear()


class AsyncLineSender(OfOneProcess):
    """The part of a producer that carries records. Coroutines of one event loop. The producer makes its fields."""

    options: ProducerOptions
    _core: SendCore
    _transport: AsyncTransport
    _routes: AsyncRoutes
    _driver: AsyncDriver
    _closed: bool
    _lines: dict[tuple[str, MessageQueue | None, bytes | None], AsyncLine]
    _pending_size: int
    _waiting_for_room: deque[asyncio.Future[None]]
    _loop: asyncio.AbstractEventLoop | None
    _loop_thread: int
    """Where the loop runs: to ask for the thread costs less than to ask for the loop."""
    _binding: threading.Lock
    _calls: TaskCalls

    def _ensure_bound(self) -> None:
        """As `_bind_to_loop`, which most calls do without."""
        loop = self._loop
        if loop is None or threading.get_ident() != self._loop_thread or loop.is_closed():
            self._bind_to_loop()

    def _bind_to_loop(self) -> None:
        """Before anything is queued: raises ConfigurationError in another loop than that of the first send, unless that one is closed."""
        loop = asyncio.get_running_loop()
        with self._binding:
            left = self._loop if self._loop is not loop else None
            if left is not None and not left.is_closed():
                raise ConfigurationError(
                    "this producer belongs to another event loop, which is still open: nothing was sent. Coroutine listeners of a "
                    "PushConsumer have a loop for each thread: use AsyncPushConsumer, or a Producer, which any thread may use"
                )
            self._loop, self._loop_thread = loop, threading.get_ident()
            if left is not None:
                self._leave_loop()

    def _leave_loop(self) -> None:
        """The loop is closed, and with it all that waited there: the next one begins without."""
        lost = sum(line.count for line in self._lines.values())
        for line in self._lines.values():
            line.forget()
        self._lines = {}
        self._pending_size = 0
        self._waiting_for_room = deque()
        self._calls = TaskCalls()
        if lost:
            warn_of_loss(lost, "the event loop was closed")

    async def _send_bounded(
        self,
        topic: str,
        record: PreparedRecord,
        queue: MessageQueue | None,
        deadline_s: float,
        when: When | None = None,
    ) -> SendResult:
        """With a time-out of its own, and waiting for room while too much is on its way."""
        line = self._line(topic, queue, when)
        entry: _Entry | None = None
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + deadline_s - time.monotonic() + _GRACE_S
            ):
                while self._pending_size > self.options.pending_size_max_bytes:
                    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting_for_room.append(room)
                    await room
                    line = self._line(topic, queue, when)  # Nothing waited in it, so it may have been dropped.
                entry = self._enqueue(line, record, deadline_s)
                return await entry.future
        except TimeoutError as timeout:
            if isinstance(timeout, ProtomqError):
                raise
            error = RequestTimeoutError(f"topic {topic}: no answer in time")
            if entry is None or entry in line.pending:
                error = RequestTimeoutError(
                    f"topic {topic}: the message was still waiting to be sent when its time was up"
                )
                error.definite = True
            raise error from None

    def _enqueue(self, line: AsyncLine, record: PreparedRecord, deadline_s: float) -> _Entry:
        is_idle = line.task is None
        if is_idle:
            loop = asyncio.get_running_loop()
            if loop is not self._loop:
                self._bind_to_loop()
            line.create_future = loop.create_future
        size_bytes = len(record[0]) + len(record[3])
        entry = _Entry(record, size_bytes, deadline_s, line.create_future())
        line.pending.append(entry)
        self._pending_size += size_bytes
        if is_idle:
            # It starts in the next turn of the loop: what other coroutines send in this one goes along. With an eager task factory it
            # starts here, so what it is to send must be there. It may even have ended.
            task = asyncio.get_running_loop().create_task(self._serve(line))
            if not task.done():
                line.task = task
                task.add_done_callback(partial(self._served, line))
        return entry

    def _line(self, topic: str, queue: MessageQueue | None, when: When | None) -> AsyncLine:
        delay_field = field_of(when)
        line = self._lines.get((topic, queue, delay_field))
        if line is not None:
            return line
        check_topic(topic)
        check_queue(topic, queue)
        if when is not None and len(self._lines) >= LINES_MAX:
            # Delays may be of any number, unlike queues. What is delayed has no order to keep.
            for key, idle in list(self._lines.items()):
                if key[2] is not None and idle.task is None:
                    del self._lines[key]
        line = self._lines[topic, queue, delay_field] = AsyncLine(topic, queue, delay_field)
        return line

    async def _serve(self, line: AsyncLine) -> None:
        """Sends what waits in the line, request by request, until nothing does."""
        options = self.options
        try:
            while line.pending:
                line.in_flight = take_batch(
                    line.pending, options.coalesce_count_max, options.coalesce_size_max_bytes
                )
                await self._send_batch_of(line, line.in_flight)
                line.in_flight = []
        except BaseException as error:
            if not self._closed:  # `close` tells each caller by itself.
                self._give_up(line, why_ended(error))
            raise
        finally:
            line.task = None  # Here, not in a callback: whoever sends next must see it at once.

    def _served(self, line: AsyncLine, task: asyncio.Task[None]) -> None:
        if line.task is task:  # It was cancelled before its first step.
            line.task = None
            if not self._closed:
                self._give_up(line, why_ended(asyncio.CancelledError()))

    def _give_up(self, line: AsyncLine, why: str) -> None:
        """Nobody sends any more what the line has. Of the request under way, each caller is told by whoever has made it."""
        lost, line.in_flight = line.count, []
        for entry in line.pending:
            fail(entry.future, given_up(why, is_under_way=False))
        self._give_back(line, sum(map(_size_of, line.pending)))
        line.pending.clear()
        if lost:
            warn_of_loss(lost, why)

    def _give_back(self, line: AsyncLine, size_bytes: int) -> None:
        """There is room again, unless the loop of the line was left."""
        if line.is_forgotten:
            return
        self._pending_size -= size_bytes
        if self._waiting_for_room and self._pending_size <= self.options.pending_size_max_bytes:
            # All of them: each looks again whether there is room, and one that has gone takes nobody's turn.
            waiting, self._waiting_for_room = self._waiting_for_room, deque()
            for waiter in waiting:
                if not waiter.done() and not waiter.get_loop().is_closed():
                    waiter.set_result(None)

    async def _send_batch_of(self, line: AsyncLine, batch: list[_Entry]) -> None:
        size_bytes = sum(map(_size_of, batch))
        if min(map(_deadline_of, batch)) <= time.monotonic():
            self._fail_expired(batch)
        live = [entry for entry in batch if not entry.future.done()]  # Others are late, or their callers have gone.
        try:
            if live:
                deadline_s = min(map(_deadline_of, live))
                route = self._routes.cached(line.topic)
                if route is None or not fits(route, line.queue):
                    route = await self._route(line.topic, deadline_s, line.queue)
                stored = await self._dispatch(
                    route, list(map(_record_of, live)), line.target, deadline_s
                )
                result_of = stored.result
                for index, entry in enumerate(live):
                    future = entry.future
                    if not future.done():
                        future.set_result(result_of(index))
        except Exception as error:
            for index, entry in enumerate(live):
                if not entry.future.done():
                    entry.future.set_exception(own_error(error, index))
        except BaseException as error:
            why = "the producer was closed" if self._closed else why_ended(error)
            for entry in live:
                fail(entry.future, given_up(why, is_under_way=True))
            raise
        finally:
            self._give_back(line, size_bytes)

    def _fail_expired(self, batch: list[_Entry]) -> None:
        """Those whose time is up."""
        now_s = time.monotonic()
        for entry in batch:
            if entry.deadline_s <= now_s and not entry.future.done():
                error = RequestTimeoutError(
                    "the message was still waiting in line when its time was up"
                )
                error.definite = True
                entry.future.set_exception(error)

    async def _dispatch(
        self,
        route: Route,
        records: Sequence[PreparedRecord],
        target: Target,
        deadline_s: float,
    ) -> Stored:
        """See LineSender._dispatch."""
        core = self._core
        request = core.make_request(route, records, *target)
        started_s = time.monotonic()
        try:
            answer = await self._transport.call(
                address_of(request), SEND, request.payload, attempt_timeout(deadline_s - started_s)
            )
            return core.answered(request, answer, started_s)
        except ProtomqError as error:
            core.failed(request, started_s)
            return await self._driver.run(send_again(core, request, route, deadline_s, error))

    async def _route(
        self, topic: str, deadline_s: float, queue: MessageQueue | None = None
    ) -> Route:
        """See LineSender._route."""
        route = self._routes.cached(topic)
        if route is not None and fits(route, queue):
            return route
        return await self._driver.run(route_for(self._core, topic, queue, deadline_s))
