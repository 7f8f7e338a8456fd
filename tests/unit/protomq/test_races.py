"""Races from threads: what is given up, waited for and dropped when one is over, and who has which connections. Calls are fakes.

What a thread would do is done when a test says so: `World.do_aside`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from protomq import _forks, _methods, _races
from protomq._pull_multiplexer import Outcome
from protomq._races import GIVEN_UP_S, LATE_S, Races
from protomq._steps import CallServer, Start
from protomq._transport import SyncTransport
from protomq.errors import ClosedError, ConnectionLostError, ProtomqError
from protomq.testing import FakeClock
from tests.support.fake_driver import address_of


class FakeCalls:
    """In place of a PullMultiplexer: `answers` says what each broker answers; of those that are given up, what they still say."""

    def __init__(self, clock: FakeClock) -> None:
        self.answers: dict[str, bytes | ProtomqError] = {}
        self.late_answers: dict[str, bytes | ProtomqError] = {}
        self.on_wait: Callable[[], object] = lambda: None
        self.did: list[str] = []
        """What was done with the call to which broker."""
        self._clock = clock
        self._names: dict[Any, str] = {}
        self._given_up: set[Any] = set()

    def send(self, address: Any, ticket: Any, payload: bytes, timeout_s: float) -> None:
        assert ticket not in self._names
        self._names[ticket] = address.broker_name
        self.did.append(f"send {address.broker_name} {payload.decode()}")

    def give_up(self, ticket: Any) -> None:
        self._given_up.add(ticket)
        self.did.append(f"give up {self._names[ticket]}")

    def drop(self, ticket: Any) -> None:
        self.did.append(f"drop {self._names.pop(ticket)}")

    def wait(self, timeout_s: float, size_max_bytes: int) -> list[Outcome]:
        self.on_wait()
        if not timeout_s:
            self.did.append("look")
        found: list[Outcome] = []
        for ticket, name in list(self._names.items()):
            answers = self.late_answers if ticket in self._given_up else self.answers
            if name in answers:
                del self._names[ticket]
                found.append(Outcome(ticket, answers.pop(name)))
        if not found:
            self._clock.advance(max(round(timeout_s * 1000), 0))
        return found

    def wake(self) -> None:
        self.did.append("wake")

    def close(self) -> None:
        self.did.append("close")

    def abandon(self) -> None:
        self.did.append("abandon")


class FirstAnswer:
    """A race that is over with the first answer."""

    def __init__(self, *names: str, silent: Sequence[str] = ()) -> None:
        self.silent = silent
        self.heard: list[tuple[str, bytes | ProtomqError]] = []
        self._names = names

    @property
    def is_over(self) -> bool:
        return any(isinstance(outcome, bytes) for _, outcome in self.heard)

    def begin(self) -> list[Start]:
        return [Start(name, CallServer(address_of(name), _methods.POP, (b"p", b"op"), 15.0)) for name in self._names]

    def ended(self, name: str, outcome: bytes | ProtomqError) -> list[Start]:
        self.heard.append((name, outcome))
        return []

    def due(self) -> list[Start]:
        return []

    def wait_s(self) -> float:
        return 1.0


class World:
    """Races whose calls are fakes, one for each race that runs at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        self.made: list[FakeCalls] = []
        self.next = FakeCalls(self.clock)
        monkeypatch.setattr(_races, "multiplexer_with", self._make)
        monkeypatch.setattr(_races, "time", self.clock)
        self.late: list[tuple[str, bytes]] = []
        self.aside: list[Callable[[], None]] = []
        self.races = Races(SyncTransport(), _methods.POP, self._came_late, self.aside.append)

    def _came_late(self, call: CallServer, answer: bytes) -> None:
        self.late.append((call.address.broker_name, answer))

    def do_aside(self) -> None:
        """What threads would do."""
        while self.aside:
            self.aside.pop()()

    def _make(self, _: object, method: object) -> FakeCalls:
        assert method is _methods.POP
        self.made.append(self.next)
        made, self.next = self.next, FakeCalls(self.clock)
        return made


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_what_others_answer_while_they_are_given_up_is_heard(world: World) -> None:
    calls, race = world.next, FirstAnswer("a", "b")
    calls.answers = {"a": b"first"}
    calls.late_answers = {"b": b"late"}
    world.races.run(race)
    assert race.heard == [("a", b"first"), ("b", b"late")]
    assert calls.did == ["send a pop", "send b pop", "give up b"]
    assert world.clock.monotonic() == 0.0, "nobody is waited for any longer"


def test_an_answer_that_comes_when_its_race_is_over_is_waited_for_aside_and_not_lost(world: World) -> None:
    calls, race = world.next, FirstAnswer("a", "b")
    calls.answers = {"a": b"first"}
    world.races.run(race)
    assert calls.did[2:] == ["give up b"]
    assert world.clock.monotonic() == pytest.approx(GIVEN_UP_S), "its caller waits for a moment only"
    world.next.answers = {"a": b"x"}
    world.races.run(FirstAnswer("a"))
    assert len(world.made) == 2, "these calls are not used meanwhile"
    calls.late_answers = {"b": b"late"}
    world.do_aside()
    assert world.late == [("b", b"late")]
    assert "drop b" not in calls.did
    assert race.heard == [("a", b"first")]


def test_the_calls_of_a_race_whose_late_answers_have_come_serve_others_again(world: World) -> None:
    calls, race = world.next, FirstAnswer("a", "b")
    calls.answers = {"a": b"first"}
    world.races.run(race)
    calls.late_answers = {"b": ConnectionLostError("CANCELLED")}
    world.do_aside()
    assert world.late == [], "it has brought nothing"
    calls.answers = {"a": b"x"}
    world.races.run(FirstAnswer("a"))
    assert world.made == [calls]


def test_who_never_ends_a_call_that_is_given_up_loses_its_connection(world: World) -> None:
    calls, race = world.next, FirstAnswer("a", "b")
    calls.answers = {"a": b"first"}
    world.races.run(race)
    world.do_aside()
    assert calls.did[2:] == ["give up b", "drop b", "look", "close"], "hooks hear at the next look how it ended"
    assert world.clock.monotonic() == pytest.approx(GIVEN_UP_S + LATE_S)


def test_a_silent_broker_is_not_waited_for(world: World) -> None:
    calls, race = world.next, FirstAnswer("a", "b", silent=["b"])
    calls.answers = {"a": b"first"}
    world.races.run(race)
    assert calls.did[2:] == ["give up b", "look"]
    assert world.clock.monotonic() == 0.0


def test_late_answers_are_waited_for_until_the_close_is_over(world: World) -> None:
    calls, race = world.next, FirstAnswer("a", "b")
    calls.answers = {"a": b"first"}
    world.races.run(race)
    world.races.close(0.0)
    assert calls.did[-1] == "wake"
    world.do_aside()
    assert world.late == []
    assert calls.did[-1] == "close"


def test_a_close_waits_for_the_late_answers_of_a_thread() -> None:
    clock, late, threads = FakeClock(), [], []
    calls = FakeCalls(clock)

    def run_aside(function: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=function))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_races, "multiplexer_with", lambda transport, method: calls)
        monkeypatch.setattr(_races, "time", clock)
        races = Races(SyncTransport(), _methods.POP, lambda call, answer: late.append(answer), run_aside)
        calls.answers = {"a": b"first"}
        races.run(FirstAnswer("a", "b"))
        calls.late_answers = {"b": b"late"}
        threads[0].start()
        races.close(60.0)
        assert late == [b"late"]
        threads[0].join()


def test_a_failure_goes_to_the_race_and_ends_nothing(world: World) -> None:
    calls, race = world.next, FirstAnswer("a", "b")
    lost = ConnectionLostError("gone")
    calls.answers = {"a": lost}
    calls.on_wait = lambda: calls.answers.update(b=b"x") if race.heard else None
    world.races.run(race)
    assert race.heard == [("a", lost), ("b", b"x")]


def test_the_calls_of_one_race_serve_the_next_one(world: World) -> None:
    calls = world.next
    for _ in range(3):
        calls.answers = {"a": b"x"}
        world.races.run(FirstAnswer("a"))
    assert world.made == [calls]
    world.races.close(0.0)
    assert calls.did[-1] == "close"
    with pytest.raises(ClosedError):
        world.races.run(FirstAnswer("a"))


def test_races_at_one_time_have_calls_of_their_own(world: World) -> None:
    calls = world.next
    calls.answers = {"a": b"x"}

    def run_another() -> None:
        calls.on_wait = lambda: None
        world.next.answers = {"a": b"y"}
        world.races.run(other)

    calls.on_wait = run_another
    race, other = FirstAnswer("a"), FirstAnswer("a")
    world.races.run(race)
    assert (race.heard, other.heard) == ([("a", b"x")], [("a", b"y")])
    assert len(world.made) == 2


def test_a_race_that_is_closed_while_it_waits_says_so_and_leaves_no_connection(world: World) -> None:
    calls = world.next
    calls.on_wait = lambda: world.races.close(0.0)
    with pytest.raises(ClosedError, match="closed while this call waited"):
        world.races.run(FirstAnswer("a"))
    assert calls.did == ["send a pop", "wake", "close"]


def test_the_calls_of_a_race_that_was_interrupted_are_used_no_more(world: World) -> None:
    calls = world.next

    def interrupt() -> None:
        raise KeyboardInterrupt

    calls.on_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.races.run(FirstAnswer("a"))
    assert calls.did[-1] == "close"
    world.next.answers = {"a": b"x"}
    world.races.run(FirstAnswer("a"))
    assert len(world.made) == 2


def test_a_forked_child_has_calls_of_its_own_and_leaves_its_parents_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = world.next
    parents.answers = {"a": b"x"}
    world.races.run(FirstAnswer("a"))
    monkeypatch.setattr(_forks, "fork_count", _forks.fork_count + 1)
    world.next.answers = {"a": b"y"}
    world.races.run(FirstAnswer("a"))
    assert world.made[0] is parents
    assert len(world.made) == 2
    assert parents.did[-1] == "abandon"


def test_a_child_that_only_closes_ends_nothing_of_its_parent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = world.next
    calls.answers = {"a": b"x"}
    world.races.run(FirstAnswer("a"))
    monkeypatch.setattr(_forks, "fork_count", _forks.fork_count + 1)
    world.races.close(0.0)
    assert "close" not in calls.did
