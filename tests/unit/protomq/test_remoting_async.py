"""The asynchronous connection: when requests go out, and that nobody says of calls in flight that they are late while nothing is read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from protomq._async_transport import AsyncTransport
from protomq._methods import COMMIT_OFFSETS, POP, PULL
from protomq._remoting_async import AsyncConnection, ended_in
from protomq._transport_options import HELD, TransportOptions
from protomq._types import BrokerAddress
from protomq.errors import ConnectFailedError, ConnectionLostError, RequestTimeoutError
from protomq.wire.frames import (
    HEADER_SIZE_BYTES,
    HELLO_METHOD_ID,
    MAGIC,
    encode_answer,
    encode_cancel,
    encode_echo,
)


class Loop:
    """A loop with timers that run when a test moves the clock. Its own time stands still, as uvloop's does within a callback."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.soon: list[Callable[[], None]] = []
        """What is called in the next turn."""
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return 0.0

    def clock(self) -> float:
        return self.now_s

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def call_soon(self, function: Callable[[], None]) -> None:
        self.soon.append(function)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Any:
        timer = (self.now_s + delay_s, function)
        self._timers.append(timer)
        return Timer(self._timers, timer)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for timer in [timer for timer in self._timers if timer[0] <= self.now_s]:
            self._timers.remove(timer)
            timer[1]()


class Timer:
    def __init__(self, timers: list[Any], timer: Any) -> None:
        self._timers, self._timer = timers, timer

    def cancel(self) -> None:
        if self._timer in self._timers:
            self._timers.remove(self._timer)


class Stream:
    def __init__(self) -> None:
        self.reads = True
        self.written: list[bytes] = []

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None: ...


@pytest.fixture
async def made() -> tuple[Loop, Stream, AsyncConnection]:
    loop, stream = Loop(), Stream()
    connection = AsyncConnection("h:1", loop, clock=loop.clock)  # type: ignore[arg-type]
    connection._transport = stream  # type: ignore[assignment]
    return loop, stream, connection


def receive(connection: AsyncConnection, data: bytes) -> None:
    connection._welcome = None  # It was there before.
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def frame(request_id: int, payload: bytes, status: int = 0) -> bytes:
    return encode_answer(request_id, POP.method_id, len(payload), status) + payload


async def test_the_server_hears_of_a_call_that_is_given_up_and_its_late_answer_has_a_taker(
    made: tuple[Loop, Stream, AsyncConnection],
) -> None:
    _, stream, connection = made
    late: list[bytes] = []
    calls = [connection.request(POP, (b"",), 20.0) for _ in range(3)]
    calls[2][1].set_exception(ValueError("of this test"))
    for (request_id, future), take in zip(calls, (late.append, late.append, late.append), strict=True):
        future.cancel()
        connection.give_up(request_id, future, take)
        assert stream.written[-1].endswith(encode_cancel(request_id))
    receive(connection, frame(1, b"messages") + frame(2, b"", 1) + frame(3, b"dropped", 14))
    await asyncio.sleep(0)
    assert late == [b"messages"]
    assert not connection._pending
    assert connection.usable


async def test_an_answer_that_came_in_the_turn_in_which_its_caller_went_has_a_taker(
    made: tuple[Loop, Stream, AsyncConnection],
) -> None:
    _, stream, connection = made
    late: list[bytes] = []
    request_id, future = connection.request(POP, (b"",), 20.0)
    receive(connection, frame(request_id, b"messages"))
    written = len(stream.written)
    connection.give_up(request_id, future, late.append)
    assert (late, len(stream.written)) == ([b"messages"], written)


@pytest.mark.parametrize("size_bytes", [8, 200_000])
async def test_an_answer_that_came_before_the_cancelled_task_ran_has_a_taker(
    size_bytes: int, made: tuple[Loop, Stream, AsyncConnection]
) -> None:
    _, stream, connection = made
    late: list[bytes] = []
    request_id, future = connection.request(POP, (b"",), 20.0)
    future.cancel()
    answer = frame(request_id, bytes(size_bytes))
    connection._welcome = None
    while answer:
        room = connection.get_buffer(-1)
        part, answer = answer[: len(room)], answer[len(room) :]
        room[: len(part)] = part
        connection.buffer_updated(len(part))
    written = len(stream.written)
    connection.give_up(request_id, future, late.append)
    assert ([len(one) for one in late], len(stream.written)) == ([size_bytes], written)
    assert not connection._unclaimed


async def test_time_in_which_the_loop_is_busy_does_not_count_for_a_connect() -> None:
    async def connects() -> None:
        for _ in range(3):
            await asyncio.sleep(0.02)

    task = asyncio.create_task(connects())
    asyncio.get_running_loop().call_later(0.01, time.sleep, 0.5)
    assert await ended_in(task, 0.3)
    assert not await ended_in(asyncio.create_task(asyncio.sleep(30)), 0.02)


async def test_the_time_does_not_count_while_nothing_is_read(
    made: tuple[Loop, Stream, AsyncConnection],
) -> None:
    loop, stream, connection = made
    _, early = connection.request(PULL, (b"",), 2.0)
    loop.advance(1.5)
    connection.hold_reading(True)
    assert not stream.reads
    _, late = connection.request(PULL, (b"",), 2.0)
    loop.advance(60.0)
    assert not early.done()
    assert not late.done()
    assert connection.usable
    connection.hold_reading(False)
    assert stream.reads
    # What was left of each time-out is left.
    loop.advance(0.4)
    assert not early.done()
    loop.advance(0.2)
    with pytest.raises(RequestTimeoutError):
        await early
    assert not late.done()
    loop.advance(1.5)
    with pytest.raises(RequestTimeoutError):
        await late
    assert not connection.usable  # Nothing came all the time that it was read.


async def test_a_server_that_holds_a_call_for_long_is_asked_whether_it_is_there(made: tuple[Loop, Stream, AsyncConnection]) -> None:
    loop, stream, connection = made
    loop.advance(1.0)
    _, held = connection.request(PULL, (b"",), 65.0, 15.0)
    asked: list[float] = []
    for _ in range(60):
        written = len(stream.written)
        loop.advance(1.0)
        for echo in stream.written[written:]:
            asked.append(loop.now_s)
            assert echo == encode_echo(1 + len(asked))
            receive(connection, encode_answer(1 + len(asked), 2, 0))
    assert (asked, held.done(), connection.usable) == ([16.0, 31.0, 46.0, 61.0], False, True)
    receive(connection, encode_answer(1, PULL.method_id, 0))
    assert await held == b""


async def test_a_server_of_another_version_that_knows_no_echo_is_there(made: tuple[Loop, Stream, AsyncConnection]) -> None:
    loop, _, connection = made
    loop.advance(1.0)
    _, held = connection.request(PULL, (b"",), 65.0, 15.0)
    loop.advance(15.0)
    receive(connection, frame(2, b"", 12))
    loop.advance(6.0)
    assert (held.done(), connection.usable) == (False, True)


async def test_a_server_that_is_silent_is_noticed_as_soon_as_if_it_held_for_a_short_time_only(
    made: tuple[Loop, Stream, AsyncConnection],
) -> None:
    loop, _, connection = made
    loop.advance(1.0)
    _, first = connection.request(PULL, (b"",), 65.0, 15.0)
    loop.advance(10.0)
    _, second = connection.request(PULL, (b"",), 65.0, 15.0)
    _, other = connection.request(COMMIT_OFFSETS, (b"",), 65.0)
    loop.advance(5.0)
    loop.advance(4.9)
    assert not first.done()
    loop.advance(0.11)
    with pytest.raises(RequestTimeoutError, match="silent"):
        await first
    assert (second.done(), connection.usable) == (False, False)
    for _ in range(10):
        loop.advance(1.0)
    with pytest.raises(RequestTimeoutError, match="silent"):
        await second
    assert not other.done()


async def test_a_loop_that_was_busy_reads_before_it_says_that_a_server_is_silent(made: tuple[Loop, Stream, AsyncConnection]) -> None:
    loop, stream, connection = made
    loop.advance(1.0)
    _, held = connection.request(PULL, (b"",), 65.0, 15.0)
    loop.advance(15.0)
    assert stream.written[-1] == encode_echo(2)
    loop.advance(30.0)  # As uvloop has it: timers first.
    assert not held.done()
    receive(connection, encode_answer(2, 2, 0))
    loop.advance(0.2)
    assert (held.done(), connection.usable) == (False, True)


async def test_a_server_is_not_silent_while_nothing_is_read(made: tuple[Loop, Stream, AsyncConnection]) -> None:
    loop, stream, connection = made
    loop.advance(1.0)
    _, held = connection.request(PULL, (b"",), 65.0, 15.0)
    connection.hold_reading(True)
    loop.advance(40.0)
    connection.hold_reading(False)
    loop.advance(14.0)
    written = len(stream.written)
    loop.advance(1.0)
    assert stream.written[written:] == [encode_echo(2)]
    loop.advance(4.9)
    assert not held.done()


async def test_a_broker_that_is_replaced_is_left_as_soon_after_a_pause_of_reading(made: tuple[Loop, Stream, AsyncConnection]) -> None:
    loop, _, connection = made
    connection._is_replaced = lambda _: True
    _, future = connection.request(PULL, (b"",), 120.0, 15.0)
    connection.hold_reading(True)
    loop.advance(1.0)
    connection.hold_reading(False)
    loop.advance(HELD.silent_s - 0.1)
    assert not future.done(), "it has not been read for that long"
    loop.advance(0.2)
    with pytest.raises(ConnectionLostError):
        future.result()


async def test_holding_twice_is_holding_once(made: tuple[Loop, Stream, AsyncConnection]) -> None:
    loop, stream, connection = made
    connection.hold_reading(True)
    loop.advance(5.0)
    connection.hold_reading(True)
    _, future = connection.request(PULL, (b"",), 1.0)
    connection.hold_reading(False)
    connection.hold_reading(False)
    assert stream.reads
    loop.advance(0.9)
    assert not future.done()
    loop.advance(0.2)
    with pytest.raises(RequestTimeoutError):
        await future


async def test_a_lone_request_leaves_the_next_turn_of_the_loop_nothing_to_do(
    made: tuple[Loop, Stream, AsyncConnection],
) -> None:
    loop, stream, connection = made
    connection.request(PULL, [b"first"], 1.0)
    assert len(stream.written) == 1
    assert not loop.soon
    connection.request(PULL, [b"second"], 1.0)
    connection.request(PULL, [b"third"], 1.0)
    assert len(stream.written) == 1
    (flush,) = loop.soon
    flush()
    assert [data.count(b"d") for data in stream.written] == [0, 2]


async def test_a_call_late_in_a_long_callback_has_all_its_time(made: tuple[Loop, Stream, AsyncConnection]) -> None:
    loop, _, connection = made
    _, early = connection.request(PULL, (b"",), 3.0)
    loop.advance(2.5)  # In the same turn of the loop: somebody blocks it.
    _, late = connection.request(PULL, (b"",), 2.0)
    loop.advance(1.0)
    assert early.done()
    assert not late.done()
    loop.advance(1.1)
    with pytest.raises(RequestTimeoutError):
        await early
    with pytest.raises(RequestTimeoutError):
        await late


class Foreign(asyncio.BaseTransport):
    """A transport as no loop has it: what fails in it is no trouble with the server."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error
        self.is_aborted = False

    def set_write_buffer_limits(self, high: int) -> None:
        raise self._error

    def write(self, data: bytes) -> None:
        raise AssertionError

    def abort(self) -> None:
        self.is_aborted = True


async def connect_by(made: Foreign, grpc_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call in a loop that has transports of its own."""
    loop = asyncio.get_running_loop()

    async def create_connection(factory: Callable[[], AsyncConnection], *_: object) -> tuple[Foreign, AsyncConnection]:
        protocol = factory()
        loop.call_soon(protocol.connection_made, made)
        await asyncio.sleep(0)
        return made, protocol

    monkeypatch.setattr(loop, "create_connection", create_connection)
    transport = AsyncTransport()
    try:
        await transport.call(BrokerAddress("broker", grpc_address, "h:1"), PULL, (b"",), 5.0)
    finally:
        await transport.close()


async def test_a_defect_is_not_taken_for_a_server_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = Foreign(AssertionError("no such transport"))
    async with asyncio.timeout(1.0):  # Less than it tries the remoting port for, before it falls back to gRPC.
        with pytest.raises(AssertionError, match="no such transport"):
            await connect_by(foreign, "h:2", monkeypatch)
    assert foreign.is_aborted


async def test_a_connection_that_ends_at_once_is_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = Foreign(ConnectionResetError("reset"))
    with pytest.raises(ConnectFailedError, match="h:1: reset"):
        await connect_by(foreign, "", monkeypatch)
    assert foreign.is_aborted


async def test_a_defect_in_the_hello_is_not_another_protocol() -> None:
    connection = AsyncConnection("h:1", asyncio.get_running_loop())
    welcome = connection._welcome
    assert welcome is not None
    connection.connection_lost(TypeError("unpack"))
    with pytest.raises(TypeError, match="unpack"):
        await welcome


@asynccontextmanager
async def welcoming(*, closes: bool) -> AsyncIterator[tuple[AsyncTransport, BrokerAddress]]:
    """A server that welcomes everybody and answers nothing; `closes`: right behind the welcome."""
    ended: set[asyncio.Task[None] | None] = set()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.add(asyncio.current_task())
        await reader.readexactly(len(MAGIC) + HEADER_SIZE_BYTES)
        writer.write(encode_answer(0, HELLO_METHOD_ID, 0))
        if not closes:
            with suppress(ConnectionResetError):
                await reader.read()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(welcome, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    transport = AsyncTransport(TransportOptions(transport="remoting"))
    try:
        yield transport, BrokerAddress("broker", "", f"{host}:{port}")
    finally:
        await transport.close()
        server.close()
        await asyncio.gather(*(task for task in ended if task is not None))


@pytest.mark.parametrize("one_way", [False, True])
async def test_a_call_does_not_wait_on_a_connection_that_ended_right_behind_its_welcome(one_way: bool) -> None:
    """As of a server that stops: the end is read before whoever asked for the connection has his turn."""
    async with welcoming(closes=True) as (transport, address), asyncio.timeout(10.0):
        with pytest.raises(ConnectFailedError, match="closed"):
            await transport.call(address, COMMIT_OFFSETS, (b"",), 60.0, one_way=one_way)


async def test_calls_on_a_connection_that_was_replaced_while_nothing_was_read_end_in_time() -> None:
    """One that has become silent takes no new calls, and those that are on it are nobody else's."""
    async with welcoming(closes=False) as (transport, address):
        with pytest.raises(RequestTimeoutError):
            await asyncio.gather(
                transport.call(address, PULL, (b"",), 0.2),
                pending := asyncio.ensure_future(transport.call(address, PULL, (b"",), 0.8)),
            )
        transport.hold_reading(PULL.lane, True)
        with pytest.raises(RequestTimeoutError):
            await transport.call(address, PULL, (b"",), 0.1)
        transport.hold_reading(PULL.lane, False)
        with pytest.raises(RequestTimeoutError):
            async with asyncio.timeout(5.0):
                await pending
