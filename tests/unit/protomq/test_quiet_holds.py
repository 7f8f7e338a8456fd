"""Pulls of a thread at a broker that says nothing, and pulls that are given up. The clock stands still until a test moves it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from protomq import _pull_multiplexer
from protomq._pull_multiplexer import Outcome, PullMultiplexer
from protomq._transport import SyncTransport
from protomq._transport_options import LongHold
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import ConnectionLostError, RequestTimeoutError

ADDRESS = BrokerAddress("a", "a:1", "a:2")
REST = LongHold(65.0, 15.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Connection:
    """In place of a PipelinedConnection; keeps what it was told."""

    has_received_ahead = False

    def __init__(self) -> None:
        self._socket, self._other = socket.socketpair()
        self.told: list[tuple[str, int]] = []
        self.timeouts_s: list[float] = []
        self.is_lost = self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request_id: int, method: MethodInfo, payload: bytes, timeout_s: float) -> None:
        self.timeouts_s.append(timeout_s)

    def ask(self, request_id: int) -> None:
        self._tell("echo", request_id)

    def give_up(self, request_id: int) -> None:
        self._tell("give up", request_id)

    def _tell(self, what: str, request_id: int) -> None:
        if self.is_lost:
            raise ConnectionLostError("lost")
        self.told.append((what, request_id))

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()
        self._other.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_pull_multiplexer, "time", clock)
    return clock


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def pulls(clock: Clock, connection: Connection) -> Iterator[PullMultiplexer]:
    with SyncTransport() as transport:
        made = PullMultiplexer(transport)
        made._connections[ADDRESS] = connection  # type: ignore[assignment]
        made._selector.register(connection, 1, ADDRESS)
        yield made
        made.close()


def looks(pulls: PullMultiplexer, *, heard: bool = False) -> list[Outcome]:
    """What `wait` does after it has read."""
    outcomes: list[Outcome] = []
    pulls._expire({ADDRESS} if heard else set(), outcomes)
    return outcomes


def test_a_broker_that_holds_for_long_is_asked_whether_it_is_there(clock: Clock, connection: Connection, pulls: PullMultiplexer) -> None:
    pulls.send(ADDRESS, "one", b"", 20.0, REST)
    assert connection.timeouts_s == [65.0]
    for _ in range(60):
        clock.now_s += 1.0
        told = len(connection.told)
        assert looks(pulls) == []
        if len(connection.told) > told:
            clock.now_s += 0.2
            assert looks(pulls, heard=True) == []
    assert [what for what, _ in connection.told] == ["echo"] * 4
    assert not connection.is_closed


def test_a_broker_that_is_silent_is_noticed_as_soon_as_if_it_held_for_a_short_time_only(
    clock: Clock, connection: Connection, pulls: PullMultiplexer
) -> None:
    pulls.send(ADDRESS, "one", b"", 20.0, REST)
    clock.now_s += 14.9
    assert (looks(pulls), connection.told) == ([], [])
    clock.now_s += 0.1
    assert looks(pulls) == []
    assert connection.told == [("echo", 2)]
    clock.now_s += 4.9
    assert looks(pulls) == []
    clock.now_s += 0.1
    (outcome,) = looks(pulls)
    assert outcome.ticket == "one"
    assert isinstance(outcome.result, RequestTimeoutError)
    assert connection.is_closed


def test_a_program_that_polls_seldom_asks_before_it_calls_a_broker_silent(
    clock: Clock, connection: Connection, pulls: PullMultiplexer
) -> None:
    pulls.send(ADDRESS, "one", b"", 20.0, REST)
    clock.now_s += 60.0
    assert (looks(pulls), len(connection.told)) == ([], 1)
    clock.now_s += 60.0
    assert looks(pulls, heard=True) == []
    assert not connection.is_closed


def test_an_echo_that_is_answered_at_once_counts(clock: Clock, connection: Connection, pulls: PullMultiplexer) -> None:
    pulls.send(ADDRESS, "one", b"", 20.0, REST)
    for _ in range(3):
        clock.now_s += 15.0
        assert looks(pulls) == []
        clock.now_s += 0.001
        assert looks(pulls, heard=True) == []
    assert [what for what, _ in connection.told] == ["echo"] * 3
    clock.now_s += 5.0
    assert looks(pulls) == []
    assert not connection.is_closed


def test_a_pull_that_is_held_as_ever_asks_nobody(clock: Clock, connection: Connection, pulls: PullMultiplexer) -> None:
    pulls.send(ADDRESS, "one", b"", 20.0)
    clock.now_s += 19.9
    assert (looks(pulls), connection.told, connection.timeouts_s) == ([], [], [20.0])


def test_a_connection_that_breaks_when_its_broker_is_asked_is_lost(clock: Clock, connection: Connection, pulls: PullMultiplexer) -> None:
    pulls.send(ADDRESS, "one", b"", 20.0, REST)
    connection.is_lost = True
    clock.now_s += 15.0
    assert [outcome.ticket for outcome in looks(pulls)] == ["one"]


def test_each_pull_is_given_up_by_its_ticket(clock: Clock, connection: Connection, pulls: PullMultiplexer) -> None:
    for ticket in ("one", "two", "three"):
        pulls.send(ADDRESS, ticket, b"", 20.0)
    pulls.give_up("two")
    pulls.give_up("four")
    assert connection.told == [("give up", 2)]
    connection.is_lost = True
    pulls.give_up("three")
    assert connection.is_closed
    assert not pulls._request_ids
    assert not pulls._in_flight
