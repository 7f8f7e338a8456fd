"""Calls in flight, waited for by one thread: whatever ends a call without the network wakes it. Sockets and threads are fakes."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from protomq import _methods, _pull_multiplexer
from protomq._hook_points import HookPoints
from protomq._hooked_calls import HookedMultiplexer, HookedTransport
from protomq._pull_multiplexer import Outcome, PullMultiplexer, _Connected
from protomq._remoting_sync import PipelinedConnection
from protomq._transport import SyncTransport
from protomq._types import MethodInfo
from protomq.errors import ConnectFailedError, ConnectionLostError, ProtomqError, UnknownMethodError
from protomq.hooks import CallContext, Hook
from protomq.v1.pop_service_pb2 import GiveUpPopRequest, PopRequest
from tests.support.fake_driver import address_of

A, B = address_of("a"), address_of("b")
LONG_S = 30.0


class FakeSocket:
    """One end of a pair: what one sends, the other receives."""

    def __init__(self) -> None:
        self.received: deque[bytes] = deque()
        self.other = self

    def setblocking(self, _: bool) -> None: ...

    def send(self, data: bytes) -> int:
        self.other.received.append(data)
        return len(data)

    def recv(self, _: int) -> bytes:
        if not self.received:
            raise BlockingIOError
        return self.received.popleft()

    def close(self) -> None: ...


class FakeConnection(PipelinedConnection):
    """`answers`: what is there to read; `trouble`: what sending raises."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, int, bytes]] = []
        self.trouble: ProtomqError | None = None
        self.given_up: list[int] = []
        self.is_closed = False

    has_received_ahead = False

    def send(self, request_id: int, *_: object) -> None:
        if self.trouble is not None:
            raise self.trouble

    def give_up(self, request_id: int) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.given_up.append(request_id)

    def receive(self, size_max_bytes: int) -> list[tuple[int, int, bytes]]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        self.is_closed = True


class FakeSelector:
    """Never sleeps: a wait that nothing would end is an error."""

    def __init__(self) -> None:
        self._keys: list[selectors.SelectorKey] = []

    def register(self, of: Any, events: int, data: Any) -> None:
        self._keys.append(selectors.SelectorKey(of, 0, events, data))

    def unregister(self, of: Any) -> None:
        self._keys = [key for key in self._keys if key.fileobj is not of]

    def select(self, timeout_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        found = []
        for key in self._keys:
            of: Any = key.fileobj
            if of.received if isinstance(of, FakeSocket) else of.answers:
                found.append((key, selectors.EVENT_READ))
        assert found or timeout_s == 0.0, "it would sleep"
        return found

    def close(self) -> None: ...


class FakeThread:
    """Connects when the test says so: `PullMultiplexer._connected` is told by `World.connect`."""

    def __init__(self, *, target: Callable[..., object], args: tuple[Any, ...], name: str, daemon: bool) -> None: ...

    def start(self) -> None: ...


class World:
    """A multiplexer and the connections of its brokers."""

    def __init__(self, calls: PullMultiplexer) -> None:
        self.calls = calls
        self.connection = FakeConnection()

    def connect(self, link: Any = None) -> list[tuple[Any, bytes | ProtomqError]]:
        self.calls._reports.put(_Connected(A, link or self.connection))
        self.calls.wake()
        return self.ended()

    def ended(self) -> list[tuple[Any, bytes | ProtomqError]]:
        return [(ticket, result) for ticket, result in self.calls.wait(LONG_S, 1 << 20)]


def socket_pair() -> tuple[FakeSocket, FakeSocket]:
    one, two = FakeSocket(), FakeSocket()
    one.other, two.other = two, one
    return one, two


@pytest.fixture(autouse=True)
def _nothing_real(monkeypatch: pytest.MonkeyPatch) -> None:
    selectors_ = SimpleNamespace(DefaultSelector=FakeSelector, EVENT_READ=selectors.EVENT_READ)
    monkeypatch.setattr(_pull_multiplexer, "selectors", selectors_)
    monkeypatch.setattr(_pull_multiplexer, "socket", SimpleNamespace(socketpair=socket_pair))
    monkeypatch.setattr(_pull_multiplexer, "threading", SimpleNamespace(Thread=FakeThread))


@pytest.fixture
def world() -> Iterator[World]:
    made = World(PullMultiplexer(SyncTransport(), _methods.POP))
    yield made
    made.calls.close()


def only_error(ended: list[tuple[Any, bytes | ProtomqError]], ticket: Any) -> ProtomqError:
    ((of, error),) = ended
    assert of == ticket
    assert isinstance(error, ProtomqError)
    return error


def test_a_call_that_is_given_up_before_it_is_connected_ends_at_once(world: World) -> None:
    world.calls.send(A, 1, b"", LONG_S)
    world.calls.send(A, 2, b"", LONG_S)
    world.calls.give_up(1)
    assert isinstance(only_error(world.ended(), 1), ConnectionLostError)
    world.connect()
    assert [item.ticket for item in world.calls._in_flight.values()] == [2], "what was given up is not sent"


def test_a_call_that_is_given_up_is_told_to_its_server_which_ends_it(world: World) -> None:
    world.calls.send(A, 1, b"", LONG_S)
    world.connect()
    world.calls.give_up(1)
    (request_id,) = world.connection.given_up
    world.connection.answers = [(request_id, 0, b"nothing")]
    assert world.ended() == [(1, b"nothing")]
    assert not world.connection.is_closed


@pytest.mark.parametrize("how", ["drop", "give_up"])
def test_a_call_whose_connection_is_dropped_or_lost_ends_at_once_with_all_others_there(world: World, how: str) -> None:
    for ticket in (1, 2):
        world.calls.send(A, ticket, b"", LONG_S)
    world.connect()
    world.connection.trouble = ConnectionLostError("reset")
    getattr(world.calls, how)(1)
    ended = world.ended()
    assert sorted(ticket for ticket, _ in ended) == [1, 2]
    assert all(isinstance(result, ConnectionLostError) for _, result in ended)
    assert world.connection.is_closed
    world.calls.drop(1)  # It is gone: nothing happens.
    assert world.calls.wait(0.0, 1) == []


def test_a_call_that_cannot_be_sent_ends_at_once(world: World) -> None:
    world.calls.send(A, 1, b"", LONG_S)
    world.connect()
    world.connection.trouble = ConnectionLostError("reset")
    world.calls.send(A, 2, b"", LONG_S)
    assert sorted(ticket for ticket, _ in world.ended()) == [1, 2]


def test_a_broker_that_cannot_be_connected_fails_its_own_calls_only(world: World) -> None:
    world.calls.send(A, 1, b"", LONG_S)
    world.calls.send(B, 2, b"", LONG_S)
    refused = ConnectFailedError("refused")
    world.calls._reports.put(_Connected(A, refused))
    world.calls.wake()
    assert world.ended() == [(1, refused)]


def test_a_call_for_which_no_thread_can_be_started_has_failed_and_the_next_one_connects(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the queue of a push consumer was never pulled again."""

    def no_more(_: FakeThread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(FakeThread, "start", no_more)
        world.calls.send(A, 1, b"", LONG_S)
    assert isinstance(only_error(world.ended(), 1), ConnectFailedError)
    world.calls.send(A, 2, b"", LONG_S)
    world.connect()
    assert [item.ticket for item in world.calls._in_flight.values()] == [2]


class FakeGrpcLink:
    """Calls over gRPC; `is_closed`: as of a channel that was closed."""

    def __init__(self) -> None:
        self.is_closed = False
        self.calls: list[FakeGrpcCall] = []

    def begin(self, method: MethodInfo, request: bytes, timeout_s: float) -> FakeGrpcCall:
        if self.is_closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        self.calls.append(FakeGrpcCall(method, request))
        return self.calls[-1]


class FakeGrpcCall:
    """`error`: what it ends with."""

    def __init__(self, method: MethodInfo, request: bytes) -> None:
        self.method = method
        self.request = request
        self.error: Exception | None = None
        self._ended: Callable[[Any], object] = lambda _: None
        self._answer = b""

    def add_done_callback(self, ended: Callable[[Any], object]) -> None:
        self._ended = ended

    def cancel(self) -> bool:
        self.answer(b"cancelled")
        return True

    def answer(self, data: bytes) -> None:
        self._answer = data
        self._ended(self)

    def result(self) -> bytes:
        return self._answer

    def cancelled(self) -> bool:
        return self._answer == b"cancelled"

    def exception(self) -> Exception | None:
        return self.error


def test_over_grpc_the_end_of_a_call_wakes_who_waits_however_it_ends(world: World) -> None:
    link = FakeGrpcLink()
    for ticket in (1, 2):
        world.calls.send(A, ticket, b"", LONG_S)
    world.connect(link)
    link.calls[0].answer(b"messages")
    assert world.ended() == [(1, b"messages")]
    link.calls[1].cancel()
    assert world.ended() == [(2, b"cancelled")]
    link.is_closed = True
    world.calls.send(A, 3, b"", LONG_S)
    assert isinstance(only_error(world.connect(link), 3), ConnectionLostError)


HELD = PopRequest(consumer_group="g", topic="T", hold_ms=9_000, hold_id=b"0123456789abcdef").SerializeToString()


@pytest.mark.parametrize("knows_it", [True, False])
def test_over_grpc_a_held_pop_that_is_given_up_goes_on_and_its_broker_hears_of_it(world: World, knows_it: bool) -> None:
    """gRPC drops the answer to a call that is cancelled, even if it is here."""
    link = FakeGrpcLink()
    world.calls.send(A, 1, HELD, LONG_S)
    world.connect(link)
    world.calls.give_up(1)
    pop, told = link.calls
    assert told.method is _methods.GIVE_UP_POP
    assert GiveUpPopRequest.FromString(told.request).hold_id == b"0123456789abcdef"
    assert world.calls.wait(0.0, 1) == []
    if not knows_it:  # It is of an earlier version: the pop would take what comes later.
        told.error = UnknownMethodError("unknown method")
    told.answer(b"")
    if knows_it:
        pop.answer(b"messages")
    assert world.ended() == [(1, b"messages" if knows_it else b"cancelled")]
    world.calls.give_up(1)  # It is over.
    assert len(link.calls) == 2


def test_over_grpc_a_pop_that_is_not_held_ends_by_itself_and_a_pull_is_cancelled(world: World) -> None:
    link = FakeGrpcLink()
    world.calls.send(A, 1, b"", LONG_S)
    world.connect(link)
    world.calls.give_up(1)
    assert world.calls.wait(0.0, 1) == []
    (pop,) = link.calls
    pop.answer(b"messages")
    assert world.ended() == [(1, b"messages")]
    pulls = World(PullMultiplexer(SyncTransport(), _methods.PULL))
    pulls.calls.send(A, 1, b"", LONG_S)
    pulls.connect(link)
    pulls.calls.give_up(1)
    assert pulls.ended() == [(1, b"cancelled")]
    pulls.calls.close()


def test_hooks_hear_how_a_dropped_call_ended() -> None:
    heard: list[str] = []

    class Listens(Hook):
        def after_call(self, context: CallContext) -> None:
            heard.append(type(context.error).__name__)

    world = World(HookedMultiplexer(HookedTransport(None, HookPoints("g", [Listens()])), _methods.POP))
    world.calls.send(A, 1, b"", LONG_S)
    world.connect()
    world.calls.drop(1)
    assert [ticket for ticket, _ in world.ended()] == [1]
    assert heard == ["ConnectionLostError"]


def test_a_wake_up_ends_a_wait_with_nothing(world: World) -> None:
    world.calls.wake()
    world.calls.wake()
    assert world.calls.wait(LONG_S, 1) == []
    assert world.calls.wait(0.0, 1) == list[Outcome]()
