"""Which queues a member of a group shares out while routes change, and when it looks a route up again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

from protomq import MessageQueue
from protomq._group_routes import BACK_S, RETRY_MAX_S, RETRY_MIN_S, GroupRoutes, route_number
from protomq._types import Route
from tests.support.fake_driver import route_of

BOTH = route_of("T", "a", "b", queues=4)
ONLY_A = route_of("T", "a", queues=4)


class Member:
    """Follows routes of the topic T; the brokers in `away` do not answer."""

    def __init__(self, route: Route = BOTH) -> None:
        self.routes = GroupRoutes()
        self.away: set[str] = set()
        self.now_s = 0.0
        self.follow(route)

    def follow(self, route: Route) -> None:
        self.routes.follow({"T": route}, self.away.__contains__, self.now_s)

    def brokers(self) -> set[str]:
        return {queue.broker_name for queue in self.routes.queues["T"]}

    def look_ups_s(self, route: Route, for_s: float, contradicted: Mapping[str, str] | None = None) -> list[float]:
        """When it looks up, in steps of 0.1 s; the answer is always `route`."""
        found = []
        for _ in range(int(for_s * 10)):
            self.now_s = round(self.now_s + 0.1, 3)
            self.follow(route)
            if self.routes.take_due(contradicted or {}, self.now_s):
                found.append(self.now_s)
        return found


def test_a_number_stands_for_the_queues_in_any_order() -> None:
    queues = [MessageQueue("T", broker, number) for broker in ("a", "b") for number in range(4)]
    mixed = random.Random(1).sample(queues, len(queues))
    assert route_number(mixed) == route_number(queues)
    assert len({route_number(queues[:count]) for count in range(len(queues) + 1)}) == len(queues) + 1
    assert 0 < route_number([]) < 1 << 64


def test_what_nobody_contradicts_is_looked_up_no_more_than_usual() -> None:
    member = Member()
    assert member.look_ups_s(route_of("T", "a", "b", "c", queues=4), 100) == []
    assert member.brokers() == {"a", "b", "c"}


def test_a_route_that_is_contradicted_is_looked_up_at_once_and_then_ever_more_rarely() -> None:
    member = Member()
    times_s = member.look_ups_s(BOTH, 200, {"T": "others"})
    pauses_s = [after - before for before, after in itertools.pairwise(times_s)]
    assert times_s[0] == 0.1
    assert abs(pauses_s[0] - RETRY_MIN_S) < 0.11
    assert all(after > 1.3 * before for before, after in itertools.pairwise(pauses_s[:7]))
    assert abs(pauses_s[-1] - RETRY_MAX_S) < 0.11
    assert member.look_ups_s(BOTH, 0.1, {"T": "others, and in another way"}) == [200.1]
    assert member.look_ups_s(BOTH, 10) == []
    assert member.look_ups_s(BOTH, 0.1, {"T": "others"}) == [210.2]


def test_a_topic_that_stays_in_doubt_keeps_no_other_waiting() -> None:
    other = route_of("U", "a", queues=1)
    routes = GroupRoutes()
    for step in range(1_200):
        routes.follow({"T": BOTH, "U": other}, lambda name: False, step / 10)
        routes.take_due({"T": "old"}, step / 10)
    assert routes.due_in_s({"T": "old"}, 120.0) > 1
    assert routes.due_in_s({"T": "old", "U": "new"}, 120.0) == 0
    assert "U" in routes.take_due({"T": "old", "U": "new"}, 120.0)


def test_a_broker_that_restarts_keeps_its_place_and_is_looked_for() -> None:
    member = Member()
    numbers = member.routes.numbers
    member.away = {"b"}
    assert len(member.look_ups_s(ONLY_A, 3.0)) == 4
    assert member.brokers() == {"a", "b"}
    assert member.routes.numbers == numbers
    assert member.routes.addresses.keys() == {"a", "b"}
    member.away = set()
    now_s = member.now_s
    assert member.look_ups_s(ONLY_A, BACK_S - 1)[0] == now_s + 0.1  # It answers, and name servers do not say so yet.
    assert member.brokers() == {"a", "b"}
    member.follow(BOTH)
    assert member.look_ups_s(BOTH, 100) == []
    assert member.routes.numbers == numbers


def test_a_broker_that_does_not_come_back_is_given_up() -> None:
    member = Member()
    numbers = member.routes.numbers
    member.away = {"b"}
    times_s = member.look_ups_s(ONLY_A, 1_000)
    assert 6 <= len(times_s) <= 10
    assert max(times_s) < 60
    assert member.brokers() == {"a"}
    assert member.routes.addresses.keys() == {"a"}
    assert member.routes.numbers != numbers
    member.away = set()
    member.follow(BOTH)
    assert member.routes.numbers == numbers


def test_a_broker_that_answers_has_lost_the_topic() -> None:
    member = Member()
    member.follow(ONLY_A)
    assert member.brokers() == {"a"}
    assert member.look_ups_s(ONLY_A, 100) == []
    member.follow(BOTH)
    member.away = {"b"}
    member.look_ups_s(ONLY_A, 1)
    member.away = set()
    member.look_ups_s(ONLY_A, BACK_S + 0.2)
    assert member.brokers() == {"a"}


def test_a_topic_that_is_not_consumed_any_more_is_not_looked_up() -> None:
    member = Member()
    member.away = {"b"}
    member.look_ups_s(ONLY_A, 1)
    member.routes.follow({}, member.away.__contains__, 2.0)
    assert (member.routes.queues, member.routes.numbers, member.routes.addresses) == ({}, {}, {})
    assert member.routes.take_due({}, 2.0) == []
    assert member.routes.due_in_s({}, 2.0) == float("inf")
