"""The remoting port from asyncio: many calls in flight on one connection per server and lane.

Rules:
- What is asked in one turn of the loop goes out in one write; all answers that one read brings are resolved together.
- Time-outs cost no timer per call. One timer per connection stands at the earliest deadline it knows of, and looks at
  all pending calls when it fires. Under load that is about once per time-out, not once per call.
- A call whose caller is gone (time-out, cancellation) is forgotten; its late answer is dropped by its request id.
- A server that holds calls for long is asked by an echo when nothing came for a while. If it says nothing to that either, they time out.
- One that the server holds may be given up. The server hears of it, and an answer that was on its way goes to somebody else.
- Who has enough to do holds the reading: answers stay in the kernel, and the time does not count for calls in flight.
- A connection on which nothing arrived for the whole time-out of a call takes no new calls; it closes when the last one ended.
- Everything runs on the loop that opened the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from ._byte_streams import set_socket_options
from ._methods import GIVEN_UP, WATCHED
from ._remoting_hello import (
    check_welcome_header,
    closed_unheard,
    encode_hello,
    error_of_answer,
    error_of_refusal,
    split_address,
)
from ._transport_options import ECHO_S, HELD, NEWS_S, given_up
from ._types import PEER_TIMEOUT_S, MethodInfo
from .errors import (
    ConnectFailedError,
    ConnectionLostError,
    ForeignProtocolError,
    ProtocolError,
    RequestTimeoutError,
)
from .wire.frames import (
    CANCEL_METHOD_ID,
    FLAG_ANSWER,
    FLAG_ONE_WAY,
    FRAME_SIZE_MAX_BYTES,
    HEADER,
    HEADER_SIZE_BYTES,
    LENGTH_SIZE_BYTES,
    encode_echo,
)

_READ_BUFFER_SIZE_BYTES: Final = 128 << 10
_WRITE_BUFFER_HIGH_BYTES: Final = 4 << 20
"""Callers wait while the kernel and this many bytes before it are full."""
_LENGTH_EXTRA: Final = HEADER_SIZE_BYTES - LENGTH_SIZE_BYTES


_SLICE_S: Final = 0.1
_EARLY_S: Final = 0.01
"""A timer may come that much early."""
_BUSY_S: Final = 0.5
"""A timer that comes that late says that the loop was busy: what has come meanwhile may not be read yet."""
_NEVER: Final = float("inf")


async def ended_in(task: asyncio.Task[Any], timeout_s: float) -> bool:
    """Whether a task ends in time. Time in which the loop was busy does not count: it has not looked at its sockets meanwhile."""
    left_s = timeout_s
    while left_s > 0:
        slice_s = min(left_s, _SLICE_S)
        done, _ = await asyncio.wait((task,), timeout=slice_s)
        if done:
            return True
        left_s -= slice_s
    return False


async def probe(address: str, timeout_s: float) -> None:
    """Connects and closes: tells a dead server from a living one at once and without loading grpc."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        raise ConnectFailedError(f"{address}: {str(error) or 'no answer in time'}") from error
    writer.close()


class AsyncConnection(asyncio.BufferedProtocol):
    """One connection after its hello; made by `open`."""

    def __init__(
        self,
        address: str,
        loop: asyncio.AbstractEventLoop,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        is_replaced: Callable[[float], bool] | None = None,
    ) -> None:
        """`is_replaced`: see `SyncTransport.is_replaced`."""
        self._address = address
        self._is_replaced = is_replaced
        self._peer_timeout_s = peer_timeout_s
        self._loop = loop
        # Not the loop's: uvloop's stands still as long as a callback runs, and a call made late in it would be late at once.
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._welcome: asyncio.Future[None] | None = loop.create_future()
        self.closed = False
        self.usable = True  # For new calls: open, and not silent.
        self._read_at_s = 0.0
        self._has_looked = False
        self._asked_at_s = float("-inf")
        """When the last echo was sent."""

        self._buffer = bytearray(_READ_BUFFER_SIZE_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0
        # A frame longer than the buffer: its header, its payload so far, and how much of that is filled.
        self._big_header: tuple[int, int, int] | None = None
        self._big_payload = bytearray()
        self._big_filled = 0

        self._request_id = 0
        self._pending: dict[int, tuple[asyncio.Future[bytes], float, float, MethodInfo, float]] = {}
        """By request id: who waits, until when, since when, for what, and after how long a silence the server is asked (LongHold)."""
        self._unclaimed: dict[int, bytes] = {}
        """Answers that came between the cancelling of their future and the turn of the loop in which its task gives the call up."""
        self.awaited: set[asyncio.Future[bytes]] = set()
        """Answers to calls that were given up."""
        self._out: list[bytes] = []
        self._flush_due = False
        self._writable: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = _NEVER
        self._held_since_s: float | None = None

    @classmethod
    async def open(
        cls,
        address: str,
        lane: int,
        client_id: str,
        timeout_s: float,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        is_replaced: Callable[[float], bool] | None = None,
    ) -> AsyncConnection:
        """Connects and says hello. Raises ConnectFailedError, or the ServerError of the refusal."""
        loop = asyncio.get_running_loop()
        host, port = split_address(address)
        connection = cls(address, loop, peer_timeout_s, is_replaced=is_replaced)
        welcome = connection._welcome
        assert welcome is not None

        async def greet() -> None:
            transport, _ = await loop.create_connection(lambda: connection, host, port)
            if not welcome.done():  # It may have failed already.
                transport.write(encode_hello(lane, client_id))
            await welcome

        greeting = loop.create_task(greet())
        greeting.add_done_callback(lambda done: done.cancelled() or done.exception())  # Seen, even if nobody waits.
        try:
            if not await ended_in(greeting, timeout_s):
                raise TimeoutError
            greeting.result()
        except OSError as error:  # TimeoutError is one, too.
            greeting.cancel()
            welcome.cancel()  # Nobody will ask it.
            connection.close()
            raise ConnectFailedError(f"{address}: {str(error) or 'no answer in time'}") from error
        except BaseException:
            greeting.cancel()
            welcome.cancel()
            connection.close()
            raise
        return connection

    # -- calls ---------------------------------------------------------------------------------------------------------

    def request(
        self, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, silent_s: float = _NEVER
    ) -> tuple[int, asyncio.Future[bytes]]:
        """Queues a request for the end of this turn of the loop; (request id, future of the answer). `silent_s`: see LongHold."""
        idle = not self._pending
        future = self._loop.create_future()
        self._request_id = request_id = self._request_id + 1 & 0xFFFFFFFF
        now_s = self._clock()
        deadline_s = now_s + timeout_s
        self._pending[request_id] = (future, deadline_s, now_s, method, silent_s)
        # A lone call does not wait for company; the next ones of this turn go together.
        self._enqueue(request_id, method, payload, int(timeout_s * 1000.0) or 1, 0, at_once=idle)
        look_s = self._first_look_s(deadline_s, now_s, method, silent_s)
        if look_s < self._timer_at_s:
            self._set_timer(look_s)
        return request_id, future

    def request_one_way(
        self, method: MethodInfo, payload: Sequence[bytes], timeout_s: float
    ) -> None:
        """Queues a request that wants no answer."""
        self._enqueue(0, method, payload, int(timeout_s * 1000.0) or 1, FLAG_ONE_WAY)

    def forget(self, request_id: int) -> None:
        """The caller is gone."""
        self._pending.pop(request_id, None)
        self._unclaimed.pop(request_id, None)

    def give_up(
        self, request_id: int, future: asyncio.Future[bytes], late: Callable[[bytes], None] | None
    ) -> None:
        """The caller is gone, and the server is to hold its call no longer. `late` gets the answer if it was on its way by then."""
        pending, unclaimed = self._pending.get(request_id), self._unclaimed.pop(request_id, None)
        if pending is None:
            # It came in the turn of the loop in which the caller went, before that or behind it.
            if late is not None and unclaimed is not None:
                late(unclaimed)
            elif late is not None and future.done() and not future.cancelled() and future.exception() is None:
                late(future.result())
            return

        def take(done: asyncio.Future[bytes]) -> None:
            self.awaited.discard(done)
            if not done.cancelled() and done.exception() is None and late is not None:
                late(done.result())

        if late is None:
            self.forget(request_id)
        else:
            awaited = self._loop.create_future()
            self.awaited.add(awaited)
            awaited.add_done_callback(take)
            self._pending[request_id] = (awaited, *pending[1:])
        out = self._out
        out.append(HEADER.pack(_LENGTH_EXTRA, request_id, CANCEL_METHOD_ID, FLAG_ONE_WAY, 0, 0))
        self._flush()

    def hold_reading(self, hold: bool) -> None:
        """Stops reading, or goes on: nobody can say of calls in flight that they are late as long as nothing is read."""
        if self._transport is None or self.closed or hold is (self._held_since_s is not None):
            return
        now_s = self._clock()
        if hold:
            self._transport.pause_reading()
            self._held_since_s = now_s
            return
        held_since_s, self._held_since_s = self._held_since_s, None
        assert held_since_s is not None
        for request_id, (future, deadline_s, sent_at_s, method, silent_s) in self._pending.items():
            later_s = deadline_s + now_s - max(sent_at_s, held_since_s)
            self._pending[request_id] = future, later_s, now_s, method, silent_s
        self._transport.resume_reading()
        if self._pending:
            self._set_timer(min(self._first_look_s(*waiting[1:]) for waiting in self._pending.values()))

    def look_again(self) -> None:
        """A route has changed: looks soon whether another broker has taken this one's name."""
        if self._is_replaced is not None and self._pending and not self.closed and self._held_since_s is None:
            self._set_timer(self._clock())

    @property
    def writable(self) -> asyncio.Future[None] | None:
        """None, or a future to wait for (shielded) before more is asked: the peer is slow to read."""
        return self._writable

    async def wait_written(self) -> None:
        """Waits until the kernel has all that was asked, or the connection is closed."""
        self._flush()
        if self._transport is not None and not self.closed:
            self._transport.set_write_buffer_limits(0)
            if self._writable is not None:
                await asyncio.shield(self._writable)

    def close(self) -> None:
        """Closes at once; calls in flight fail with ConnectionLostError."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(ConnectionLostError(f"{self._address}: connection closed"))

    def _enqueue(
        self,
        request_id: int,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_ms: int,
        flags: int,
        *,
        at_once: bool = False,
    ) -> None:
        size = _LENGTH_EXTRA
        for part in payload:
            size += len(part)
        out = self._out
        out.append(HEADER.pack(size, request_id, method.method_id, flags, 0, timeout_ms))
        out.extend(payload)
        if at_once:
            self._flush()
        elif not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self._flush_due = False
        if self._out:
            self._flush()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self.closed:
            self._transport.write(b"".join(out))

    # -- time-outs -----------------------------------------------------------------------------------------------------

    def _first_look_s(self, deadline_s: float, since_s: float, method: MethodInfo, silent_s: float) -> float:
        """When a call is looked at first, if nothing comes."""
        look_s = min(deadline_s, since_s + silent_s)
        if self._is_replaced is not None and (watch := WATCHED.get(method.method_id)) is not None:
            look_s = min(look_s, since_s + watch.silent_s)
        return look_s

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(at_s - self._clock(), 0.0), self._expire)
        self._timer_at_s = at_s

    def _expire(self) -> None:
        if self._held_since_s is not None:
            self._timer, self._timer_at_s = None, _NEVER
            return
        now_s = self._clock()
        was_busy = now_s > self._timer_at_s + _BUSY_S
        expired = [item for item in self._pending.items() if item[1][1] <= now_s]
        for request_id, (future, _, sent_at_s, method, _) in expired:
            del self._pending[request_id]
            if self._read_at_s < sent_at_s:
                self.usable = (
                    False  # Nothing came all the time: the peer may be gone without a word.
                )
            if not future.done():
                future.set_exception(
                    RequestTimeoutError(f"{self._address}: no answer to {method.path} in time")
                )
        self._timer = None
        self._timer_at_s = _NEVER
        look_s = min(self._give_up_if_replaced(now_s), self._ask_if_silent(now_s, was_busy))
        if self._pending:
            self._set_timer(min(look_s, *(deadline_s for _, deadline_s, _, _, _ in self._pending.values())))
        elif not self.usable and not self.closed:
            self.close()

    def _ask_if_silent(self, now_s: float, was_busy: bool) -> float:
        """Asks a server that holds calls for long whether it is there, and ends these if it says nothing; when to look again."""
        look_s = _NEVER
        wants_echo = False
        silent: list[int] = []
        for request_id, (_, _, sent_at_s, _, silent_s) in self._pending.items():
            since_s = max(sent_at_s, self._read_at_s)
            doubt_s = since_s + silent_s
            if doubt_s <= now_s + _EARLY_S:
                if self._asked_at_s <= since_s:
                    wants_echo = True
                    continue
                doubt_s = max(doubt_s, self._asked_at_s) + ECHO_S
                if doubt_s <= now_s + _EARLY_S and not was_busy:
                    silent.append(request_id)
                    continue
            look_s = min(look_s, max(doubt_s, now_s + _SLICE_S))
        for request_id in silent:
            future, _, _, method, _ = self._pending.pop(request_id)
            self.usable = False
            if not future.done():
                future.set_exception(RequestTimeoutError(f"{self._address}: silent while it held {method.path}"))
        if wants_echo and not self.closed:
            self._request_id = self._request_id + 1 & 0xFFFFFFFF
            self._out.append(encode_echo(self._request_id))
            self._flush()
            self._asked_at_s = now_s
            look_s = min(look_s, now_s + ECHO_S)
        return look_s

    def _give_up_if_replaced(self, now_s: float) -> float:
        """Ends watched calls without an answer where another broker has taken this one's name; when to look again."""
        if self._is_replaced is None:
            return _NEVER
        early_s = now_s + _EARLY_S
        silent: list[int] = []
        silent_s = look_s = _NEVER
        for request_id, (_, _, sent_at_s, method, _) in self._pending.items():
            watch = WATCHED.get(method.method_id)
            if watch is None:
                continue
            # A server that holds a call is not silent as long as it answers others.
            doubt_s = max(sent_at_s, self._read_at_s if watch is HELD else 0.0) + watch.silent_s
            if doubt_s <= early_s:
                silent.append(request_id)
                silent_s = min(silent_s, watch.silent_s)
                doubt_s = now_s + (watch.look_s if self._has_looked else NEWS_S)
            look_s = min(look_s, doubt_s)
        self._has_looked = bool(silent) and not self._has_looked
        if silent and self._is_replaced(silent_s):
            for request_id in silent:
                future, _, sent_at_s, method, _ = self._pending.pop(request_id)
                self.usable = self.usable and self._read_at_s >= sent_at_s
                if not future.done():
                    future.set_exception(given_up(self._address, method))
        return look_s

    # -- asyncio.BufferedProtocol --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # What the loop has as a transport: uvloop's is no asyncio.Transport.
        self._transport = made = cast(asyncio.Transport, transport)
        try:
            made.set_write_buffer_limits(high=_WRITE_BUFFER_HIGH_BYTES)
            set_socket_options(made.get_extra_info("socket"), self._peer_timeout_s)
        except Exception as error:
            # A loop would only log it. Whoever opens must not take a defect for a server that cannot be reached.
            self._fail(error)
            made.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._big_header is not None:
            return memoryview(self._big_payload)[self._big_filled :]
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._big_header is not None:
            self._big_filled += nbytes
            self._read_at_s = self._clock()
            if self._big_filled == len(self._big_payload):
                request_id, flags, status = self._big_header
                payload = bytes(self._big_payload)
                self._big_header, self._big_payload = None, bytearray()
                self._resolve(request_id, flags, status, payload)
            return
        self._filled += nbytes
        self._read_at_s = self._clock()
        start = 0
        if self._welcome is not None:
            start = self._take_welcome()
            if start == 0:
                return
        self._take_frames(start)

    def _take_frames(self, start: int) -> None:
        view, filled, pending = self._view, self._filled, self._pending
        unpack = HEADER.unpack_from
        while filled - start >= HEADER_SIZE_BYTES:
            length, request_id, _, flags, status, _ = unpack(view, start)
            end = start + LENGTH_SIZE_BYTES + length
            if end > filled:
                if not _LENGTH_EXTRA <= length <= FRAME_SIZE_MAX_BYTES:
                    self._protocol_error()
                    return
                if length > _READ_BUFFER_SIZE_BYTES // 2:
                    self._begin_big_frame(
                        start, (request_id, flags, status), length - _LENGTH_EXTRA
                    )
                    return
                break
            if length < _LENGTH_EXTRA:
                self._protocol_error()
                return
            # The common case is spelled out here; `_resolve` is the same for the others.
            waiting = pending.pop(request_id, None)
            if waiting is not None and not status and flags == FLAG_ANSWER:
                future = waiting[0]
                if not future.done():
                    future.set_result(bytes(view[start + HEADER_SIZE_BYTES : end]))
                elif waiting[3].method_id in GIVEN_UP and future.cancelled():
                    self._unclaimed[request_id] = bytes(view[start + HEADER_SIZE_BYTES : end])
            elif waiting is not None:
                pending[request_id] = waiting
                self._resolve(
                    request_id, flags, status, bytes(view[start + HEADER_SIZE_BYTES : end])
                )
            start = end
        if start:
            left = filled - start
            if left:
                self._buffer[:left] = self._buffer[start:filled]
            self._filled = left

    def _begin_big_frame(self, start: int, header: tuple[int, int, int], payload_size: int) -> None:
        first = self._view[start + HEADER_SIZE_BYTES : self._filled]
        self._big_header = header
        self._big_payload = bytearray(payload_size)
        self._big_payload[: len(first)] = first
        self._big_filled = len(first)
        self._filled = 0

    def _resolve(self, request_id: int, flags: int, status: int, payload: bytes) -> None:
        waiting = self._pending.pop(request_id, None)
        if flags != FLAG_ANSWER:
            self._protocol_error()
        elif waiting is not None and not waiting[0].done():
            if status:
                waiting[0].set_exception(error_of_answer(status, payload))
            else:
                waiting[0].set_result(payload)
        elif waiting is not None and not status and waiting[3].method_id in GIVEN_UP and waiting[0].cancelled():
            self._unclaimed[request_id] = payload

    def _take_welcome(self) -> int:
        """Where the frames behind the welcome start; 0 while it is not there."""
        assert self._welcome is not None
        try:
            header = check_welcome_header(self._view[: min(self._filled, HEADER_SIZE_BYTES)], self._address)
        except ForeignProtocolError as error:
            self._fail(error)
            return self._filled
        if header is None:
            return 0
        size, status = header
        end = HEADER_SIZE_BYTES + size
        if self._filled < end:
            return 0
        welcome, self._welcome = self._welcome, None
        if status:
            self.closed, self.usable = True, False
            if not welcome.done():
                welcome.set_exception(
                    error_of_refusal(status, bytes(self._view[HEADER_SIZE_BYTES:end]), self._address)
                )
        elif not welcome.done():
            welcome.set_result(None)
        return end

    def _protocol_error(self) -> None:
        self._fail(ProtocolError(f"{self._address}: an answer that cannot be understood"))
        if self._transport is not None:
            self._transport.abort()

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._welcome is not None:
            if exc is not None and not isinstance(exc, OSError):
                self._fail(exc)  # A defect of ours, not another protocol.
            self._fail(closed_unheard(self._address))
        self._fail(
            ConnectionLostError(
                f"{self._address}: connection lost: {exc or 'closed by the server'}"
            )
        )

    def _fail(self, error: Exception) -> None:
        """Ends everything that waits; the first reason counts."""
        self.closed = True
        self.usable = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at_s = _NEVER
        welcome, self._welcome = self._welcome, None
        if welcome is not None and not welcome.done():
            welcome.set_exception(error)
        pending, self._pending = self._pending, {}
        for future, _, _, _, _ in pending.values():
            if not future.done():
                # One each: an exception collects its tracebacks.
                future.set_exception(type(error)(str(error)))
        self.resume_writing()
