"""A master that is cut off or stopped says nothing: a send goes on as soon as a route names another one, however long its time-out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from protomq import (
    AsyncProducer,
    Producer,
    _byte_streams,
    _producer,
    _remoting_sync,
    _routes,
    _send_lines,
    _transport,
)
from protomq._async_transport import AsyncTransport
from protomq._methods import LANE_SEND, PULL, SEND
from protomq._remoting_async import AsyncConnection
from protomq._remoting_sync import Connection, ConnectionPool
from protomq._routes import RouteBook
from protomq._transport import SyncTransport
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import (
    ConnectFailedError,
    ConnectionLostError,
    NoRouteError,
    RequestTimeoutError,
)
from protomq.v1.route_service_pb2 import Broker
from protomq.wire.frames import HEADER, HEADER_SIZE_BYTES, encode_answer
from tests.support.fake_cluster import FakeAsyncTransport, FakeCluster, FakeSyncTransport
from tests.support.fake_driver import route_of
from tests.unit.protomq.test_remoting_async import Loop
from tests.unit.protomq.test_remoting_async import Stream as AsyncStream

OLD = BrokerAddress("a", "old:1", "old:2")
NEW = BrokerAddress("a", "new:1", "new:2")


class Clock:
    """As the module `time`; it stands still until something takes time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (_producer, _remoting_sync, _routes, _send_lines, _transport):
        monkeypatch.setattr(module, "time", clock)
    return clock


# -- who says that a broker is replaced ------------------------------------------------------------------------------------


class Book(RouteBook):
    """Attribute: looked: the topics that were to be looked up."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("n:1")
        self._clock = clock
        self.looked: list[str] = []

    def look_up_behind(self, topic: str) -> None:
        self.looked.append(topic)

    def learn(self, address: BrokerAddress, topic: str = "T", leaderless: tuple[str, ...] = ()) -> None:
        route = route_of(topic, address.broker_name)
        route = replace(route, brokers={address.broker_name: address}, leaderless_brokers=leaderless)
        self._cache.store(route, self._clock.now_s)


def test_a_broker_is_replaced_once_a_new_route_names_another_master(clock: Clock) -> None:
    book = Book(clock)
    assert not book.is_replaced(OLD)  # Nothing is known of it.
    book.learn(OLD)
    clock.advance(10)
    assert not book.is_replaced(OLD)
    assert book.looked == ["T"]
    clock.advance(0.5)
    assert not book.is_replaced(OLD)
    assert book.looked == ["T"], "many sends may wait: one look-up a second"
    clock.advance(0.6)
    book.learn(NEW, leaderless=("a",))
    assert not book.is_replaced(OLD), "a slave leads nobody"
    assert book.looked == ["T", "T"]
    clock.advance(1.0)
    book.learn(NEW)
    assert book.is_replaced(OLD)
    assert not book.is_replaced(NEW)


def test_a_route_from_before_the_silence_says_nothing(clock: Clock) -> None:
    """Another topic, which was looked up when another master led, or an earlier silence of the same name."""
    book = Book(clock)
    book.learn(OLD, "before")
    assert not book.is_replaced(NEW)
    clock.advance(0.2)
    book.learn(OLD, "before")
    assert book.is_replaced(NEW)
    clock.advance(60)
    assert not book.is_replaced(NEW)
    assert book.looked == ["before", "before"]


# -- waiting for an answer -------------------------------------------------------------------------------------------------


class Stream:
    """Answers at a time; until then each wait lasts for as long as it may."""

    has_received_ahead = False

    def __init__(self, clock: Clock, answers_at_s: float = float("inf")) -> None:
        self._clock, self._answers_at_s = clock, answers_at_s
        self._receive_ms = 0
        self._answer = b""
        self.is_closed = False

    def set_timeout(self, timeout_ms: int, receive_ms: int | None = None) -> None:
        self._receive_ms = timeout_ms if receive_ms is None else receive_ms

    def send(self, parts: Sequence[bytes]) -> None:
        request_id = HEADER.unpack(parts[0][:HEADER_SIZE_BYTES])[1]
        self._answer = encode_answer(request_id, SEND.method_id, 6) + b"stored"

    def recv_into(self, buffer: bytearray | memoryview, size: int = 0) -> int:
        end_s = self._clock.now_s + self._receive_ms / 1000
        if end_s < self._answers_at_s:
            self._clock.now_s = end_s
            raise BlockingIOError
        self._clock.now_s = max(self._clock.now_s, self._answers_at_s)
        buffer[: len(self._answer)] = self._answer
        return len(self._answer)

    def close(self) -> None:
        self.is_closed = True


def exchange(stream: Stream, is_replaced: Callable[[], bool], timeout_s: float = 15.0) -> tuple[int, bytes]:
    made: Any = stream
    return Connection(made, "old:2", spin=False).exchange(SEND, (b"x",), timeout_s, False, is_replaced)


def test_a_thread_gives_a_silent_server_up_once_it_is_replaced(clock: Clock) -> None:
    began_s = clock.now_s
    with pytest.raises(ConnectionLostError, match="another broker leads under its name") as lost:
        exchange(Stream(clock), lambda: clock.now_s >= began_s + 3.2)
    assert not lost.value.definite
    assert clock.now_s - began_s == pytest.approx(3.5, abs=0.01)


def test_a_thread_waits_for_a_slow_server_to_the_end(clock: Clock) -> None:
    began_s = clock.now_s
    assert exchange(Stream(clock, began_s + 7.3), lambda: False) == (0, b"stored")
    assert clock.now_s == began_s + 7.3
    with pytest.raises(RequestTimeoutError):
        exchange(Stream(clock), lambda: False, 4.8)
    assert clock.now_s - began_s - 7.3 == pytest.approx(4.8, abs=0.01)


def test_an_answer_in_time_asks_nobody(clock: Clock) -> None:
    assert exchange(Stream(clock, clock.now_s + 0.9), lambda: pytest.fail("it was asked")) == (0, b"stored")


async def test_coroutines_give_a_silent_server_up_once_it_is_replaced() -> None:
    loop, replaced = Loop(), False
    connection = AsyncConnection("old:2", loop, clock=loop.clock, is_replaced=lambda: replaced)  # type: ignore[arg-type]
    connection._transport = AsyncStream()  # type: ignore[assignment]
    loop.advance(1.0)
    _, held = connection.request(PULL, (b"",), 20.0)
    _, send = connection.request(SEND, (b"",), 15.0)
    for _ in range(6):
        loop.advance(0.5)
    assert not send.done()
    replaced = True
    _, late = connection.request(SEND, (b"",), 15.0)
    loop.advance(0.5)
    with pytest.raises(ConnectionLostError, match="another broker leads under its name"):
        await send
    assert not connection.usable
    assert not late.done(), "it is silent for half a second only"
    loop.advance(0.5)
    with pytest.raises(ConnectionLostError):
        await late
    assert not held.done()
    held.cancel()


# -- connecting ------------------------------------------------------------------------------------------------------------


class MovingCluster(FakeCluster):
    """Broker a is at OLD, and from a moment on at NEW."""

    def __init__(self, clock: Clock, moves_at_s: float) -> None:
        super().__init__()
        self._clock, self._moves_at_s = clock, moves_at_s

    def _broker(self, name: str) -> Broker:
        address = NEW if self._clock.now_s >= self._moves_at_s else OLD
        return Broker(broker_name=name, grpc_address=address.grpc_address, remoting_address=address.remoting_address)


class CutOff(FakeSyncTransport):
    """OLD is connected to in earnest, and nothing comes back."""

    def call(
        self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, *, one_way: bool = False
    ) -> bytes:
        if address == OLD:
            return SyncTransport.call(self, address, method, payload, timeout_s, one_way=one_way)
        return super().call(address, method, payload, timeout_s, one_way=one_way)


@pytest.mark.parametrize("was_reached", [False, True])
def test_connecting_to_a_cut_off_master_takes_a_small_part_of_the_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, was_reached: bool
) -> None:
    def silence(_host: str, _port: int, timeout_s: float) -> None:
        clock.advance(timeout_s)
        raise TimeoutError("timed out")

    monkeypatch.setattr(_byte_streams, "_connected", silence)
    began_s = clock.now_s
    cluster = MovingCluster(clock, began_s + 2.9)
    transport = CutOff(cluster)
    if was_reached:
        transport._links[OLD, LANE_SEND] = ConnectionPool(OLD.remoting_address, LANE_SEND, transport.options)
    with Producer(transport=transport, send_timeout_s=10) as producer:
        producer._core.clock = clock.monotonic
        producer._driver._pause = clock.advance
        producer.send("T", b"x")
    assert cluster.bodies() == [b"x"]
    # Two tries of 1.5 s each, or one of both ports.
    assert clock.now_s - began_s < 3.5


@pytest.mark.parametrize("was_reached", [False, True])
async def test_coroutines_connect_for_as_long(monkeypatch: pytest.MonkeyPatch, was_reached: bool) -> None:
    limits_s: list[float] = []

    class Silent(AsyncTransport):
        async def _open_once(self, address: BrokerAddress, lane: int, timeout_s: float) -> AsyncConnection:
            limits_s.append(timeout_s)
            raise ConnectFailedError("not connected") from TimeoutError()

    async def probe(_address: str, timeout_s: float) -> None:
        limits_s.append(timeout_s)
        raise ConnectFailedError("not connected") from TimeoutError()

    monkeypatch.setattr("protomq._async_transport._probe", probe)
    async with Silent() as transport:
        transport.is_replaced = lambda _: False
        transport._bind_to_loop()
        if was_reached:
            transport._kinds[OLD] = "remoting"
        with pytest.raises(ConnectFailedError):
            await transport.call(OLD, SEND, (b"",), 15.0)
        assert limits_s == ([1.5] if was_reached else [1.5, 1.5])
        limits_s.clear()
        with pytest.raises(ConnectFailedError):
            await transport.call(OLD, PULL, (b"",), 15.0)
        assert limits_s[0] == 3.0, "other calls have what they had"


# -- only the slave is there -----------------------------------------------------------------------------------------------


def test_a_send_while_only_slaves_are_registered_may_be_tried_again() -> None:
    cluster = FakeCluster()
    cluster.leaderless.add("a")
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        with pytest.raises(NoRouteError, match="no master of a is registered") as error:
            producer.send("T", b"x", timeout_s=0.05)
    assert (error.value.definite, error.value.retriable) == (True, True)
    assert not cluster.calls


async def test_a_send_of_a_coroutine_while_only_slaves_are_registered_may_be_tried_again() -> None:
    cluster = FakeCluster()
    cluster.leaderless.add("a")
    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as producer:
        with pytest.raises(NoRouteError, match="no master of a is registered") as error:
            await producer.send("T", b"x", timeout_s=0.05)
    assert (error.value.definite, error.value.retriable) == (True, True)
    assert not cluster.calls
