"""Ctrl-C, or a signal handler's error, in SimpleConsumer.receive: what brokers have handed out is given back. They are fakes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from protomq import Message, SimpleConsumer, _methods
from protomq._steps import CallRace, Driver
from protomq._types import BrokerAddress, MethodInfo, Route
from protomq.v1.pop_service_pb2 import ChangeInvisibleRequest, ChangeInvisibleResponse
from tests.support.fake_driver import route_of
from tests.support.interrupts import interrupted_everywhere

from .test_pop_steps import answer_of

ERRORS = [KeyboardInterrupt, TimeoutError]
NOTHING, ANSWER = answer_of([]), answer_of([b"x"])


class Brokers:
    """`names`: of those with a message, which they hand out once."""

    def __init__(self, names: str) -> None:
        self._names = list(names)
        self.handed_out: set[str] = set()
        self.taken: set[str] = set()
        """Of those, what the race has heard of."""
        self.given_back: set[str] = set()

    def call(
        self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, *, one_way: bool = False
    ) -> bytes:
        name = address.broker_name
        if method is _methods.POP:
            if name in self.handed_out:
                return NOTHING
            self.handed_out.add(name)
            return ANSWER
        assert method is _methods.CHANGE_INVISIBLE
        request = ChangeInvisibleRequest.FromString(b"".join(payload))
        assert (request.unseen, request.invisible_ms) == (True, 0)
        self.given_back.add(name)
        data: bytes = ChangeInvisibleResponse().SerializeToString()
        return data

    def get(self, topic: str, timeout_s: float) -> Route:
        return route_of(topic, *self._names)

    current = get

    def invalidate(self, topic: str, *, may_be_old: bool = False, is_denied: bool = False) -> None:
        """Nothing is kept."""

    def run(self, race: CallRace) -> None:
        """All that it begins with is under way at once."""
        starts = race.begin()
        while starts:
            name, call = starts.pop()
            starts += race.ended(name, self.call(*call))
            self.taken |= self.handed_out


class World:
    def __init__(self, names: str) -> None:
        self.brokers = Brokers(names)
        self.consumer = SimpleConsumer("g", namesrv="127.0.0.1:1")
        self.consumer._transport = self.consumer._routes = self.consumer._races = self.brokers  # type: ignore[assignment]
        self.consumer._driver = Driver(self.brokers, self.brokers)

    def receive(self) -> list[Message]:
        return self.consumer.receive("T", hold_s=0.0)


@pytest.mark.parametrize("error", ERRORS)
def test_what_an_interrupted_receive_has_been_given_goes_back(error: type[BaseException]) -> None:
    losses = []
    for place, world in interrupted_everywhere(lambda: World("a"), World.receive, error):
        if world.brokers.handed_out != world.brokers.given_back:
            losses.append(place)
    assert losses == []


@pytest.mark.parametrize("error", ERRORS)
def test_what_it_has_been_given_by_one_of_several_brokers_goes_back(error: type[BaseException]) -> None:
    losses, given_back = [], set()
    for place, world in interrupted_everywhere(lambda: World("ab"), World.receive, error):
        given_back |= world.brokers.given_back
        if not world.brokers.taken <= world.brokers.given_back:
            losses.append(place)
    assert losses == []
    assert given_back == {"a"}, "the first that has some ends the race"


def test_nothing_goes_back_of_a_receive_that_has_returned() -> None:
    world = World("ab")
    assert world.receive()
    assert not world.brokers.given_back
