"""Where the brokers of a member are found while its program does not poll. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from protomq._group_routes import KEEP_S, SEARCH_S
from protomq._member_search import LONG_GONE_S, LOOK_S, POLLED_S, MemberSearch
from protomq._membership_logic import MembershipState
from protomq._routes import RouteBook
from protomq._types import BrokerAddress, MessageQueue, Route
from protomq.allocation import Average
from protomq.errors import ConnectionLostError
from protomq.v1 import membership_service_pb2 as pb

MASTER = BrokerAddress("a", "a:1", "a:2")
SLAVE = BrokerAddress("a", "s:1", "s:2")
OTHER = BrokerAddress("b", "b:1", "b:2")


def route(topic: str, *addresses: BrokerAddress, leaderless: Iterable[str] = ()) -> Route:
    queues = tuple(MessageQueue(topic, address.broker_name, 0) for address in addresses)
    brokers = {address.broker_name: address for address in addresses}
    return Route(topic, queues, queues, brokers, tuple(brokers), leaderless_brokers=tuple(leaderless))


class World:
    """A member of two topics, which brokers `a` and `b` have taken."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.state = MembershipState("g", "m", Average())
        self.routes = RouteBook("127.0.0.1:1")
        for topic in "TU":
            self.learn(route(topic, MASTER, OTHER))
        self.state.want({"T": "", "U": ""}, {"a": MASTER, "b": OTHER}, {"T": 1, "U": 1})
        self.state.followed_s = self.now_s
        self.search = MemberSearch(self.state, self.routes)
        for name in "ab":
            self.answer(name)

    def learn(self, found: Route) -> None:
        self.routes._cache.store(found, self.now_s)

    def answer(self, name: str) -> BrokerAddress:
        ticket, address, _, _ = self.state.begin(name, self.now_s)
        answer = pb.HoldMembershipResponse(version=2, broker_start=1, expiry_ms=25_000)
        self.state.answered(ticket, answer.SerializeToString(), self.now_s)
        return address

    def lose(self, name: str) -> None:
        ticket, *_ = self.state.begin(name, self.now_s)
        self.state.failed(ticket, ConnectionLostError("killed"), self.now_s)

    def due(self, after_s: float = 0.0) -> list[str]:
        self.now_s += after_s
        return self.search.take_due(self.now_s)


@pytest.fixture
def world() -> World:
    return World()


def test_nothing_is_searched_for_while_all_brokers_answer(world: World) -> None:
    assert world.due(3600) == []
    assert world.search.next_due_in_s() == float("inf")


def test_who_does_not_poll_comes_to_a_slave_and_back_to_the_master(world: World) -> None:
    world.lose("a")
    assert world.due(POLLED_S) == ["T"], "one topic's route says where it is"
    assert world.search.next_due_in_s() == LOOK_S
    assert world.due(LOOK_S) == []
    world.learn(route("T", SLAVE, OTHER, leaderless="a"))
    assert world.due(LOOK_S) == []
    assert "a" in world.state.due(world.now_s), "it is called at once"
    assert world.answer("a") == SLAVE
    assert world.due(SEARCH_S) == ["T"], "there is no master"
    world.learn(route("T", MASTER, OTHER))
    assert world.due(LOOK_S) == []
    assert "a" in world.state.due(world.now_s)
    assert world.answer("a") == MASTER
    assert world.due(3600) == []
    assert world.search.next_due_in_s() == float("inf")


def test_who_polls_searches_by_itself(world: World) -> None:
    world.lose("a")
    for _ in range(10):
        world.state.followed_s = world.now_s
        assert world.due(SEARCH_S) == []
    assert world.search.next_due_in_s() == float("inf")


def test_a_broker_that_stays_away_is_searched_for_seldom(world: World) -> None:
    world.lose("a")
    dues = [world.due(SEARCH_S) for _ in range(int(KEEP_S))]
    assert dues.count(["T"]) >= KEEP_S - 3
    assert sum(bool(world.due(SEARCH_S)) for _ in range(30)) <= 30 / LONG_GONE_S + 1


def test_without_routes_nothing_is_searched_for(world: World) -> None:
    world.lose("a")
    search = MemberSearch(world.state, None)
    assert search.take_due(world.now_s + 3600) == []
