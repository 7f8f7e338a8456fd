"""A master that is cut off or stopped says nothing: a send goes on as soon as a route names another one, however long its time-out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from protomq import (
    AsyncProducer,
    MessageQueue,
    Producer,
    _byte_streams,
    _producer,
    _remoting_sync,
    _routes,
    _send_lines,
    _transport,
)
from protomq._async_routes import AsyncRoutes
from protomq._async_transport import AsyncTransport
from protomq._methods import (
    ACK,
    CHANGE_INVISIBLE,
    COMMIT_OFFSETS,
    END_TRANSACTION,
    LANE_CONSUMER,
    LANE_SEND,
    POP,
    RECALL_MESSAGE,
    REPLY,
    SEND,
    SEND_BACK,
    WAIT_FOR_CHECKS,
    WAIT_FOR_REPLIES,
)
from protomq._remoting_async import AsyncConnection
from protomq._remoting_sync import Connection, ConnectionPool
from protomq._routes import RouteBook
from protomq._transport import SyncTransport
from protomq._transport_options import HELD, SOON, TransportOptions
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import (
    ConnectFailedError,
    ConnectionLostError,
    NoRouteError,
    NotMasterError,
    RequestTimeoutError,
)
from protomq.v1.route_service_pb2 import Broker, GetRouteResponse, Route
from protomq.wire.frames import HEADER, HEADER_SIZE_BYTES, encode_answer
from tests.support.fake_cluster import FakeAsyncTransport, FakeCluster, FakeSyncTransport
from tests.support.fake_driver import route_of
from tests.unit.protomq.test_remoting_async import Loop
from tests.unit.protomq.test_remoting_async import Stream as AsyncStream

OLD = BrokerAddress("a", "old:1", "old:2")
NEW = BrokerAddress("a", "new:1", "new:2")


def path_of(method: MethodInfo) -> str:
    return method.path


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

    def learn(
        self,
        address: BrokerAddress,
        topic: str = "T",
        leaderless: tuple[str, ...] = (),
        slave: BrokerAddress | None = None,
        lone: frozenset[str] = frozenset(),
    ) -> None:
        route = route_of(topic, address.broker_name)
        slaves = {} if slave is None else {(slave.broker_name, 1): slave}
        route = replace(route, brokers={address.broker_name: address}, slaves=slaves, leaderless_brokers=leaderless, lone_brokers=lone)
        self._cache.store(route, self._clock.now_s)


def test_a_broker_is_replaced_once_a_new_route_names_another_master(clock: Clock) -> None:
    book = Book(clock)
    assert not book.is_replaced(OLD, SOON.silent_s)  # Nothing is known of it.
    book.learn(OLD)
    clock.advance(10)
    assert not book.is_replaced(OLD, SOON.silent_s)
    assert book.looked == ["T"]
    clock.advance(0.5)
    assert not book.is_replaced(OLD, SOON.silent_s)
    assert book.looked == ["T"], "many sends may wait: one look-up a second"
    clock.advance(0.6)
    book.learn(NEW, leaderless=("a",))
    assert not book.is_replaced(OLD, SOON.silent_s), "a slave leads nobody"
    assert book.looked == ["T"], "that is news enough"
    clock.advance(1.0)
    assert not book.is_replaced(OLD, SOON.silent_s)
    assert book.looked == ["T", "T"]
    book.learn(NEW)
    assert book.is_replaced(OLD, SOON.silent_s)
    assert not book.is_replaced(NEW, SOON.silent_s)


def test_a_slave_from_which_a_consumer_reads_is_not_replaced_by_its_master(clock: Clock) -> None:
    book = Book(clock)
    book.learn(OLD, slave=NEW)
    clock.advance(10)
    assert not book.is_replaced(NEW, SOON.silent_s)
    clock.advance(0.5)
    book.learn(OLD, slave=NEW)
    assert not book.is_replaced(NEW, SOON.silent_s)
    book.learn(OLD)
    assert book.is_replaced(NEW, SOON.silent_s), "it is no slave any more"


def test_a_route_from_before_the_silence_says_nothing(clock: Clock) -> None:
    """Another topic, which was looked up when another master led, or an earlier silence of the same name."""
    book = Book(clock)
    book.learn(OLD, "before")
    clock.advance(1.1)
    assert not book.is_replaced(NEW, SOON.silent_s)
    clock.advance(0.2)
    book.learn(OLD, "before")
    assert book.is_replaced(NEW, SOON.silent_s)
    clock.advance(60)
    assert not book.is_replaced(NEW, SOON.silent_s)
    assert book.looked == ["before", "before"]


def test_a_route_that_somebody_has_looked_up_during_the_silence_needs_no_second_look(clock: Clock) -> None:
    """A consumer that waits looks at its routes every 2 s anyway."""
    book = Book(clock)
    for _ in range(10):
        book.learn(OLD)
        for _ in range(3):
            assert not book.is_replaced(OLD, HELD.silent_s)
            clock.advance(0.65)
    assert book.looked == []
    book.learn(NEW, "U")
    clock.advance(2.45)
    assert not book.is_replaced(NEW, HELD.silent_s)
    assert book.looked == ["U"]
    assert book.is_replaced(OLD, HELD.silent_s)
    clock.advance(0.2)
    assert not book.is_replaced(OLD, HELD.silent_s), "it may be from before the silence"


@pytest.mark.parametrize("silent_s", [HELD.silent_s, HELD.look_s])
def test_a_broker_whose_place_nobody_takes_is_looked_up_no_more_often_while_it_holds_a_call(clock: Clock, silent_s: float) -> None:
    book = Book(clock)
    book.learn(OLD, lone=frozenset("a"))
    clock.advance(29.0)
    assert not book.is_replaced(OLD, silent_s)
    assert book.looked == []
    assert not book.is_replaced(OLD, SOON.silent_s)
    assert book.looked == ["T"], "a send waits, and the broker may be back at another address"
    book.learn(OLD)
    clock.advance(3.0)
    assert not book.is_replaced(OLD, silent_s)
    assert book.looked == ["T", "T"], "it has a slave now"


async def test_coroutines_hear_of_a_new_master_from_whoever_looks_the_route_up() -> None:
    loop, asked, replaced = Loop(), list[float](), False

    def is_replaced(silent_s: float) -> bool:
        asked.append(silent_s)
        return replaced

    connection = AsyncConnection("old:2", loop, clock=loop.clock, is_replaced=is_replaced)  # type: ignore[arg-type]
    connection._transport = AsyncStream()  # type: ignore[assignment]
    transport = AsyncTransport()
    transport._connections[OLD, LANE_CONSUMER] = connection
    routes = AsyncRoutes(transport, "n:1")
    loop.advance(1.0)
    _, held = connection.request(WAIT_FOR_REPLIES, (b"",), 20.0)
    loop.advance(2.5)
    loop.advance(0.5)
    assert asked == [HELD.silent_s, HELD.silent_s]
    replaced = True
    routes._cache.store(route_of("T", "a"), 0.0)
    steps = routes._look_up_steps("T", 1.0)
    next(steps)
    answer = Route(topic="T", brokers=[Broker(broker_name="a", grpc_address="new:1", remoting_address="new:2")])
    with pytest.raises(StopIteration):
        steps.send(GetRouteResponse(route=answer).SerializeToString())
    loop.advance(0.0)
    assert held.done()
    with pytest.raises(ConnectionLostError, match="another broker leads under its name"):
        await held
    await transport.close()


def test_all_that_wait_for_a_replaced_broker_are_told_so(clock: Clock) -> None:
    """Whoever asks first takes the news from nobody."""
    book = Book(clock)
    book.learn(OLD)
    clock.advance(1)
    assert not book.is_replaced(OLD, SOON.silent_s)
    book.learn(NEW)
    for waited_s in (0.5, 0.5, 0.0, 0.5):
        clock.advance(waited_s)
        assert book.is_replaced(OLD, SOON.silent_s)
        assert book.is_replaced(OLD, SOON.silent_s)


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
        header = HEADER.unpack(parts[0][:HEADER_SIZE_BYTES])
        self._answer = encode_answer(header[1], header[2], 6) + b"stored"

    def recv_into(self, buffer: bytearray | memoryview, size: int = 0) -> int:
        end_s = self._clock.now_s + self._receive_ms / 1000
        if end_s < self._answers_at_s:
            self._clock.now_s = end_s
            raise BlockingIOError
        self._clock.now_s = max(self._clock.now_s, self._answers_at_s)
        part, self._answer = self._answer[: size or None], self._answer[size or len(self._answer) :]
        buffer[: len(part)] = part
        return len(part)

    def recv(self, size: int) -> bytes:
        """The rest; it pauses for three seconds."""
        assert self._receive_ms > 3_000
        self._clock.advance(3)
        return self._answer[:size]

    def close(self) -> None:
        self.is_closed = True


def exchange(
    stream: Stream, is_replaced: Callable[[], bool], timeout_s: float = 15.0, method: MethodInfo = SEND
) -> tuple[int, bytes]:
    made: Any = stream
    return Connection(made, "old:2", spin=False).exchange(method, (b"x",), timeout_s, False, is_replaced)


REPEATED = [SEND, RECALL_MESSAGE, END_TRANSACTION, ACK, CHANGE_INVISIBLE, REPLY, SEND_BACK, COMMIT_OFFSETS]
WAITING = [POP, WAIT_FOR_REPLIES]


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


@pytest.mark.parametrize("method", REPEATED, ids=path_of)
def test_what_may_be_made_twice_does_not_wait_for_a_silent_server_that_is_replaced(clock: Clock, method: MethodInfo) -> None:
    began_s = clock.now_s
    with pytest.raises(ConnectionLostError, match="another broker leads under its name") as lost:
        exchange(Stream(clock), lambda: True, method=method)
    assert (lost.value.retriable, lost.value.stale_route, lost.value.definite) == (True, True, False)
    assert clock.now_s - began_s == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("method", WAITING, ids=path_of)
def test_a_call_that_is_held_asks_when_several_brokers_would_have_answered_and_every_two_seconds(clock: Clock, method: MethodInfo) -> None:
    began_s, asked_s = clock.now_s, list[float]()

    def is_replaced() -> bool:
        asked_s.append(clock.now_s - began_s)
        return len(asked_s) == 3

    with pytest.raises(ConnectionLostError, match="another broker leads under its name"):
        exchange(Stream(clock), is_replaced, 20.0, method)
    assert asked_s == pytest.approx([2.5, 4.5, 6.5], abs=0.01)
    assert exchange(Stream(clock, clock.now_s + 2.4), lambda: pytest.fail("it was asked"), 20.0, method) == (0, b"stored")
    assert exchange(Stream(clock, clock.now_s + 6.0), lambda: False, 20.0, method) == (0, b"stored")


def test_a_commit_is_not_made_again_at_a_server_that_is_replaced(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one of the calls that are, once, where the server has closed the connection."""
    pool, stream = ConnectionPool(OLD.remoting_address, LANE_CONSUMER, TransportOptions()), Stream(clock)
    made: Any = stream
    idle = Connection(made, "old:2", spin=False)
    idle.last_used_s = clock.now_s
    pool._idle.append(idle)
    monkeypatch.setattr(ConnectionPool, "_open", lambda *_: pytest.fail("it was called again"))
    with pytest.raises(ConnectionLostError, match="another broker leads under its name"):
        pool.call(COMMIT_OFFSETS, (b"x",), 5.0, False, lambda: True)
    assert stream.is_closed


def test_an_answer_in_time_asks_nobody(clock: Clock) -> None:
    assert exchange(Stream(clock, clock.now_s + 0.9), lambda: pytest.fail("it was asked")) == (0, b"stored")


async def test_coroutines_give_a_silent_server_up_once_it_is_replaced() -> None:
    loop, replaced = Loop(), False
    connection = AsyncConnection("old:2", loop, clock=loop.clock, is_replaced=lambda _: replaced)  # type: ignore[arg-type]
    connection._transport = AsyncStream()  # type: ignore[assignment]
    loop.advance(1.0)
    _, held = connection.request(WAIT_FOR_CHECKS, (b"",), 20.0)
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


async def test_each_call_of_coroutines_is_given_up_when_it_has_waited_for_long_enough() -> None:
    loop = Loop()
    connection = AsyncConnection("old:2", loop, clock=loop.clock, is_replaced=lambda _: True)  # type: ignore[arg-type]
    connection._transport = AsyncStream()  # type: ignore[assignment]
    loop.advance(1.0)
    calls = {method: connection.request(method, (b"",), 20.0)[1] for method in (*REPEATED, *WAITING)}
    loop.advance(0.9)
    assert not any(call.done() for call in calls.values())
    loop.advance(0.1)
    assert [method for method, call in calls.items() if not call.done()] == WAITING
    loop.advance(1.4)
    assert [method for method, call in calls.items() if not call.done()] == WAITING
    loop.advance(0.1)
    for call in calls.values():
        with pytest.raises(ConnectionLostError, match="another broker leads under its name"):
            await call


async def test_a_commit_of_a_coroutine_is_not_made_again_at_a_server_that_is_replaced() -> None:
    loop, opened = Loop(), list[BrokerAddress]()

    class NoMore(AsyncTransport):
        async def _connect(
            self, address: BrokerAddress, lane: int, timeout_s: float, *, is_watched: bool = False
        ) -> AsyncConnection | None:
            opened.append(address)
            raise ConnectFailedError("it was called again")

    connection = AsyncConnection("old:2", loop, clock=loop.clock, is_replaced=lambda _: True)  # type: ignore[arg-type]
    connection._transport = AsyncStream()  # type: ignore[assignment]
    transport = NoMore()
    transport._bind_to_loop()
    transport.is_replaced = lambda *_: True
    transport._connections[OLD, LANE_CONSUMER] = connection
    call = asyncio.ensure_future(transport.call(OLD, COMMIT_OFFSETS, (b"",), 5.0))
    await asyncio.sleep(0)
    loop.advance(1.0)
    with pytest.raises(ConnectionLostError, match="another broker leads under its name"):
        await call
    assert not opened


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

    monkeypatch.setattr("protomq._async_transport.probe", probe)
    async with Silent() as transport:
        transport.is_replaced = lambda *_: False
        transport._bind_to_loop()
        if was_reached:
            transport._kinds[OLD] = "remoting"
        with pytest.raises(ConnectFailedError):
            await transport.call(OLD, SEND, (b"",), 15.0)
        assert limits_s == ([1.5] if was_reached else [1.5, 1.5])
        limits_s.clear()
        with pytest.raises(ConnectFailedError):
            await transport.call(OLD, WAIT_FOR_CHECKS, (b"",), 15.0)
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


@pytest.mark.parametrize("was_told", [True, False])
def test_a_send_that_is_under_way_when_only_slaves_are_registered_names_the_missing_master(was_told: bool) -> None:
    cluster = FakeCluster({"T": {"a": 1, "b": 1}})
    cluster.leaderless.add("a")
    # The slave's answer, or the silence of the master from before; then no slave is asked.
    cluster.script("a", *[NotMasterError("ask the master") if was_told else RequestTimeoutError("silent")] * 99)
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        with pytest.raises(NoRouteError, match="no master of a is registered") as error:
            producer.send("T", b"x", queue=MessageQueue("T", "a", 0), timeout_s=0.3)
    assert (error.value.definite, error.value.retriable) == (was_told, True)
    assert "queue 0 of topic 'T' at a cannot be written now" in str(error.value), "b takes the topic"
    assert len(cluster.calls) == 1


def test_a_send_with_a_sharding_key_waits_for_the_master_of_its_queue_and_later_ones_choose_among_the_others() -> None:
    cluster = FakeCluster({"T": {"a": 1, "b": 1}})
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        key = next(key for key in map(str, range(99)) if producer.send("T", b"x", sharding_key=key).queue.broker_name == "b")
        cluster.leaderless.add("b")
        cluster.script("b", *[NotMasterError("ask the master")] * 99)
        with pytest.raises(NoRouteError, match="queue 0 of topic 'T' at b cannot be written now: no master of b is registered") as error:
            producer.send("T", b"x", sharding_key=key, timeout_s=0.3)
        assert error.value.metadata == {"topic": "T", "broker_name": "b"}
        assert producer.send("T", b"x", sharding_key=key).queue.broker_name == "a"


async def test_a_send_of_a_coroutine_to_a_queue_of_a_missing_master_goes_there_when_it_is_back() -> None:
    cluster = FakeCluster()
    cluster.leaderless.add("a")
    cluster.script("a", NotMasterError("ask the master"))
    transport, asked = FakeAsyncTransport(cluster), asyncio.Event()

    async def note() -> None:
        asked.set()

    transport.gate = note
    async with AsyncProducer(transport=transport) as producer:
        sent = asyncio.create_task(producer.send("T", b"x", queue=MessageQueue("T", "a", 0), timeout_s=30.0))
        await asked.wait()
        cluster.leaderless.clear()
        assert (await sent).queue_offset == 0
