"""Which queues a member of a group shares out while routes change, and when it looks a route up again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

from protomq import MessageQueue
from protomq._group_routes import (
    BACK_S,
    GRACE_S,
    KEEP_S,
    RETRY_MAX_S,
    RETRY_MIN_S,
    SEARCH_S,
    GroupRoutes,
    route_number,
)
from protomq._types import BrokerAddress, Route
from tests.support.fake_driver import route_of

BOTH = route_of("T", "a", "b", queues=4)
ONLY_A = route_of("T", "a", queues=4)


class Member:
    """Follows routes of the topic T; the brokers in `away` do not answer since the time given."""

    def __init__(self, route: Route = BOTH) -> None:
        self.routes = GroupRoutes()
        self.away: dict[str, float] = {}
        self.now_s = 0.0
        self.follow(route)

    def follow(self, route: Route) -> None:
        self.routes.follow({"T": route}, self.away.get, self.now_s, drops=True)

    def brokers(self) -> set[str]:
        return {queue.broker_name for queue in self.routes.queues["T"]}

    def look_ups_s(self, route: Route, for_s: float, contradicted: Mapping[str, str] | None = None) -> list[float]:
        """When it looks up, in polls 0.1 s apart; the answer is always `route`."""
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
        routes.follow({"T": BOTH, "U": other}, lambda name: None, step / 10, drops=True)
        routes.take_due({"T": "old"}, step / 10)
    assert routes.due_in_s({"T": "old"}, 120.0) > 1
    assert routes.due_in_s({"T": "old", "U": "new"}, 120.0) == 0
    assert "U" in routes.take_due({"T": "old", "U": "new"}, 120.0)


def test_a_broker_that_restarts_keeps_its_place_and_is_looked_for() -> None:
    member = Member()
    numbers = member.routes.numbers
    member.away = {"b": 0.0}
    assert len(member.look_ups_s(ONLY_A, 3.0)) == 4
    assert member.brokers() == {"a", "b"}
    assert member.routes.numbers == numbers
    assert member.routes.addresses.keys() == {"a", "b"}
    assert [member.routes.is_looked_for(MessageQueue("T", name, 0)) for name in ("a", "b")] == [False, True]
    member.away = {}
    now_s = member.now_s
    assert member.look_ups_s(ONLY_A, BACK_S - 1)[0] == now_s + 0.1  # It answers, and name servers do not say so yet.
    assert member.brokers() == {"a", "b"}
    member.follow(BOTH)
    assert member.look_ups_s(BOTH, 100) == []
    assert member.routes.numbers == numbers
    assert not member.routes.is_looked_for(MessageQueue("T", "b", 0))


def test_who_polls_rarely_keeps_it_too() -> None:
    member = Member()
    member.now_s, member.away = 1.5, {"b": 0.2}
    member.follow(ONLY_A)
    # The broker is back at 2.5 s, in the route as well; a poll looks the route up, and the next one sees that.
    member.now_s, member.away = 7.5, {}
    member.routes.follow({"T": ONLY_A}, member.away.get, member.now_s, drops=False)
    assert member.routes.take_due({}, member.now_s) == ["T"]
    member.follow(ONLY_A)
    assert member.brokers() == {"a", "b"}
    member.now_s = 13.5
    member.follow(BOTH)
    assert member.brokers() == {"a", "b"}


def test_members_give_up_a_broker_that_does_not_come_back_at_the_same_time() -> None:
    first, second = Member(), Member()
    numbers = first.routes.numbers
    for member in (first, second):
        member.away = {"b": 0.05}
    second.look_ups_s(BOTH, 2.0)  # It hears of the new route later.
    for member, other_s in ((first, KEEP_S), (second, KEEP_S - 2.0)):
        assert 6 <= len(member.look_ups_s(ONLY_A, other_s)) <= 10
        assert member.brokers() == {"a", "b"}
        assert 0 < member.routes.due_in_s({}, member.now_s) <= 0.1
        member.look_ups_s(ONLY_A, 0.2, {"T": "another one gave it up"})
        assert member.brokers() == {"a"}
        assert member.routes.addresses.keys() == {"a"}
        assert member.routes.numbers != numbers
        assert member.look_ups_s(ONLY_A, 100) == []
        member.away = {}
        member.look_ups_s(BOTH, 100)
        member.away = {"b": member.now_s}
        member.look_ups_s(ONLY_A, 10)
        assert member.brokers() == {"a", "b"}  # The next restart is one like the first.


def test_a_broker_that_answers_has_lost_the_topic() -> None:
    member = Member()
    member.look_ups_s(ONLY_A, GRACE_S - 0.1)
    assert member.brokers() == {"a", "b"}
    member.look_ups_s(ONLY_A, 0.4)
    assert member.brokers() == {"a"}
    assert member.look_ups_s(ONLY_A, 100) == []
    member.follow(BOTH)
    member.away = {"b": member.now_s}
    member.look_ups_s(ONLY_A, 1)
    member.away = {}
    member.look_ups_s(ONLY_A, BACK_S + 0.3)
    assert member.brokers() == {"a"}


def at_slave(topic: str, queues: int = 4) -> Route:
    """The master of `a` is away, and its slave is there."""
    route = route_of(topic, "a", queues=queues)
    return replace(route, brokers={"a": BrokerAddress("a", "slave", "slave")}, leaderless_brokers=("a",))


def test_where_a_broker_is_says_the_route_that_changed_last() -> None:
    masters = {topic: route_of(topic, "a", queues=1) for topic in "TU"}
    for first, second in ("TU", "UT"):
        routes = GroupRoutes()
        routes.follow(masters, lambda name: None, 0.0, drops=True)
        known = masters | {first: at_slave(first, 1)}
        routes.follow(known, lambda name: None, 1.0, drops=True)
        assert routes.addresses["a"].grpc_address == "slave"
        known = {topic: at_slave(topic, 1) for topic in "TU"}
        routes.follow(known, lambda name: None, 2.0, drops=True)
        assert routes.addresses["a"].grpc_address == "slave"
        routes.follow(known | {second: masters[second]}, lambda name: None, 3.0, drops=True)
        assert routes.addresses == masters[second].brokers


def test_while_a_broker_does_not_answer_or_is_a_slave_it_is_looked_for_and_not_only_ever_more_rarely() -> None:
    member = Member(ONLY_A)
    assert member.look_ups_s(ONLY_A, 10) == []
    member.away = {"a": member.now_s}
    away_s = member.look_ups_s(ONLY_A, 20)
    member.away = {}
    slave_s = member.look_ups_s(at_slave("T"), 20)
    for times_s in (away_s, slave_s):
        assert max(after - before for before, after in itertools.pairwise(times_s)) < SEARCH_S + 0.11
        assert len(times_s) > 18
    assert member.look_ups_s(ONLY_A, 20) == []


def test_a_broker_is_looked_for_by_one_topic() -> None:
    routes = GroupRoutes()
    known = {topic: at_slave(topic) for topic in "TUV"}
    routes.follow(known, lambda name: None, 0.0, drops=True)
    assert routes.take_due({}, 0.0) == ["T"]
    del known["T"]
    routes.follow(known, lambda name: None, 1.0, drops=True)
    assert routes.take_due({}, 1.0) == ["U"]


def test_a_topic_that_is_not_consumed_any_more_is_not_looked_up() -> None:
    member = Member()
    member.away = {"b": 0.0}
    member.look_ups_s(ONLY_A, 1)
    member.routes.follow({}, member.away.get, 2.0, drops=True)
    assert (member.routes.queues, member.routes.numbers, member.routes.addresses) == ({}, {}, {})
    assert member.routes.take_due({}, 2.0) == []
    assert member.routes.due_in_s({}, 2.0) == float("inf")
