"""The asynchronous connection: when requests go out, and that nobody says of calls in flight that they are late while nothing is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from protomq._methods import PULL
from protomq._remoting_async import AsyncConnection
from protomq.errors import RequestTimeoutError


class Loop:
    """A loop whose time a test moves; timers run when it says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.soon: list[Callable[[], None]] = []
        """What is called in the next turn."""
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def call_soon(self, function: Callable[[], None]) -> None:
        self.soon.append(function)

    def call_at(self, at_s: float, function: Callable[[], None]) -> Any:
        self._timers.append((at_s, function))
        return Timer(self._timers, (at_s, function))

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
    connection = AsyncConnection("h:1", loop)  # type: ignore[arg-type]
    connection._transport = stream  # type: ignore[assignment]
    return loop, stream, connection


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
