"""Pops that brokers hold when their consumer is closed: who hears of it, and what becomes of what comes then. Steps, driven by the test."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from protomq import _forks, _methods
from protomq._held_pops import HeldPops, give_up_of, id_field
from protomq._pop_race import PopRace
from protomq._steps import CallServer
from protomq._types import MethodInfo
from protomq.errors import (
    CallCancelledError,
    ClosedError,
    ProtomqError,
    RequestTimeoutError,
    UnknownMethodError,
)
from protomq.v1.pop_service_pb2 import GiveUpPopRequest, PopRequest, PopResponse

from .test_pop_steps import Brokers, answer_of

NOTHING = answer_of([])


class World(Brokers):
    """`meanwhile`: is called while a pop is held; it is answered with what that returns, or raises."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.meanwhile: Any = lambda: NOTHING
        self.told: list[tuple[str, bytes]] = []
        """Brokers that were told to end a hold."""
        self.held: list[bytes] = []
        """The ids of all pops that came; empty: it is not to be held."""
        self.nothing = NOTHING

    def _call(self, name: str, method: MethodInfo, payload: bytes) -> bytes:
        if method is _methods.GIVE_UP_POP:
            self.told.append((name, GiveUpPopRequest.FromString(payload).hold_id))
            if self.failures[name]:
                raise self.failures[name].pop(0)
            return b""
        if method is _methods.POP:
            request = PopRequest.FromString(payload)
            self.held.append(request.hold_id)
            if request.hold_ms:
                answer: bytes = self.meanwhile()
                return answer
            self.asked.append((name, 0))
            return self.nothing
        return super()._call(name, method, payload)

    def _race(self, race: Any) -> None:
        """As a driver does, with one call at a time."""
        starts = race.begin()
        while not race.is_over:
            if not starts:
                self.clock.now_s += race.wait_s()
                starts += race.due()
                continue
            name, call = starts.pop(0)
            try:
                outcome: bytes | ProtomqError = self._call(name, call.method, b"".join(call.payload))
            except ProtomqError as error:
                outcome = error
            starts += race.ended(name, outcome)

    def close(self) -> bool:
        """As a consumer does; whether all brokers have heard of it."""
        self.steps.is_closed = True
        heard: bool = self.run(self.steps.give_up_held())
        return heard


@pytest.fixture(params=["a", "ab"])
def world(request: pytest.FixtureRequest) -> World:
    return World(*request.param)


def test_a_pop_that_may_be_held_has_an_id_of_its_own_and_others_have_none(world: World) -> None:
    world.receive(hold_s=0.0)
    assert set(world.held) == {b""}
    world.held.clear()
    for _ in range(2):
        world.meanwhile = lambda: answer_of([b"x"])
        assert world.receive(hold_s=3.0)
    held = [hold_id for hold_id in world.held if hold_id]
    assert len(set(held)) == len(held) >= 2
    assert {len(hold_id) for hold_id in held} == {16}
    assert world.steps.held.pops() == []
    assert world.close()
    assert world.told == [], "nothing is held any more"


def test_a_close_ends_what_is_held_and_the_receive_says_that_it_was_closed(world: World) -> None:
    def close() -> bytes:
        assert world.close()
        raise CallCancelledError("given up")

    world.meanwhile = close
    with pytest.raises(ClosedError):
        world.receive(hold_s=3.0)
    assert [name for name, _ in world.told] == list(world.messages)
    assert world.held[-1] in dict(world.told).values()
    assert world.clock.now_s == 0.0


def test_what_comes_when_the_consumer_is_closed_is_given_back(world: World) -> None:
    def close() -> bytes:
        world.close()
        return answer_of([b"x", b"y"])

    world.meanwhile = close
    with pytest.raises(ClosedError):
        world.receive(hold_s=3.0)
    (given,) = world.given_back
    assert given.unseen


def test_a_receive_is_under_way_until_it_has_given_back(world: World) -> None:
    over: list[bool] = []

    def close() -> bytes:
        world.close()
        future = world.steps.held.over()
        over.append(future.done())
        future.add_done_callback(lambda _: over.append(len(world.given_back) == 1))
        return answer_of([b"x"])

    world.meanwhile = close
    with pytest.raises(ClosedError):
        world.receive(hold_s=3.0)
    assert over == [False, True]


def test_a_signal_handler_that_closes_does_not_wait_for_the_receive_that_it_has_interrupted(world: World) -> None:
    over: list[bool] = []

    def close() -> bytes:
        world.close()
        over.append(world.steps.held.over(threading.get_ident()).done())
        return NOTHING

    world.meanwhile = close
    with pytest.raises(ClosedError):
        world.receive(hold_s=3.0)
    assert over == [True]


def test_all_who_close_wait_for_the_receives_of_others() -> None:
    held = HeldPops()
    receive = held.began()
    first = held.over()
    second = held.over(threading.get_ident() + 1)
    assert not first.done()
    assert not second.done()
    held.ended(receive)
    assert first.done()
    assert second.done()


def test_nothing_is_asked_of_a_broker_once_the_consumer_is_closed(world: World) -> None:
    world.steps.is_closed = True
    with pytest.raises(ClosedError):
        world.receive(hold_s=3.0)
    assert world.held == []


@pytest.mark.parametrize("failure", [UnknownMethodError("unknown method"), RequestTimeoutError("silent")])
def test_a_broker_that_does_not_end_its_hold_keeps_no_other_from_hearing(failure: ProtomqError) -> None:
    world = World("a", "b")
    for name in "ab":
        world.steps.held.begin("T", name)
    world.failures["a"].append(failure)
    assert world.close() is not isinstance(failure, UnknownMethodError), "nobody waits for one of an earlier version"
    assert [name for name, _ in world.told] == ["a", "b"]


def test_silent_brokers_leave_time_for_others() -> None:
    world = World("a", "b", "c")
    for name in "abc":
        world.steps.held.begin("T", name)
    world.dead_connections = 2
    assert world.close()
    assert [name for name, _ in world.told] == ["c"]
    assert world.clock.now_s < 0.5


def test_a_forked_child_ends_nothing_of_its_parent_and_waits_for_none_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldPops()
    held.began()
    of_parent = held.begin("T", "a")
    monkeypatch.setattr(_forks, "fork_count", _forks.fork_count + 1)
    assert held.pops() == []
    assert held.over().done()
    held.ended(held.began())
    of_child = held.begin("T", "a")
    assert [hold_id for hold_id, _ in held.pops()] == [of_child]
    assert of_child[:8] != of_parent[:8]


@pytest.mark.parametrize("is_told", [False, True])
def test_over_grpc_several_brokers_hold_where_each_says_that_it_may_be_given_up(is_told: bool) -> None:
    world = World("a", "b")
    world.steps._kind_of = lambda address: "grpc"
    world.nothing = PopResponse(status=2, may_be_given_up=is_told).SerializeToString()  # type: ignore[arg-type]
    world.meanwhile = lambda: answer_of([b"x"])
    assert [message.body for message in world.receive(hold_s=3.0)] == ([b"x"] if is_told else [])
    assert (len(world.asked) == 2) is is_told, "they are asked again and again where none may hold"


def test_a_race_of_a_consumer_that_is_closed_is_over() -> None:
    closed: list[bool] = []
    call = CallServer(None, _methods.POP, (), 0.0)  # type: ignore[arg-type]
    race = PopRace(["a"], lambda name, hold_ms: call, lambda name, data: [], 9.0, lambda: 0.0, is_closed=lambda: bool(closed))
    assert race.begin()
    assert not race.is_over
    closed.append(True)
    assert race.is_over
    assert race.ended("a", b"") == []


def test_of_a_request_without_an_id_nothing_is_to_be_given_up() -> None:
    request = PopRequest(consumer_group="g", topic="T").SerializeToString()
    assert give_up_of((request,)) is None
    assert GiveUpPopRequest.FromString(give_up_of((request, id_field(b"0123456789abcdef"))) or b"").hold_id == b"0123456789abcdef"
