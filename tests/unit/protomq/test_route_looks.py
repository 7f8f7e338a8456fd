"""When consumers look their routes up again, and what that costs name servers."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from protomq import MessageQueue
from protomq._consumer_options import ConsumerOptions
from protomq._consumer_steps import ConsumerSteps
from protomq._filters import NO_FILTER
from protomq._route_looks import ANSWER_S, LOOK_S, TOLD_SPREAD_S, UNSURE_SPREAD_S, RouteLooks
from protomq._routes import ROUTE_FRESH_S
from protomq.v1 import membership_service_pb2 as pb
from tests.support.fake_driver import FakeWorld, route_of

from .test_consumer_steps import Brokers
from .test_stopped_member import FakeMember

RUN_S = 10_000


class ToldMember(FakeMember):
    """A member whose broker tells of changed routes."""

    changes = 0
    told_topics: tuple[str, ...] = ("T",)

    def answer_more(self) -> pb.HoldMembershipResponse:
        counts = [pb.TopicQueueCount(topic=topic, read_queues=1, route_changes=self.changes) for topic in self.told_topics]
        return pb.HoldMembershipResponse(tells_routes=True, queue_counts=counts)


def looks_in_run(topic_count: int, member_count: int) -> Counter[str]:
    """What one of so many members looks up in RUN_S."""
    looks, now_s = RouteLooks(0.0, random.Random(1)), 0.0
    topics = dict.fromkeys(f"T{number}" for number in range(topic_count))
    found: Counter[str] = Counter()
    while now_s < RUN_S:
        topic = looks.take_due(topics, member_count, now_s)
        if topic is not None:
            found[topic] += 1
        assert looks.due_in_s(now_s) > 0
        now_s += looks.due_in_s(now_s)
    return found


@pytest.mark.parametrize(
    ("topic_count", "member_count", "interval_s"),
    [(1, 1, LOOK_S), (1, 4, LOOK_S), (1, 10, 5.0), (4, 1, LOOK_S), (20, 1, 10.0), (1, 1_000, ROUTE_FRESH_S), (500, 1, ROUTE_FRESH_S)],
)
def test_each_topic_is_looked_up_after_two_seconds_or_as_often_as_a_group_of_many_needs(
    topic_count: int, member_count: int, interval_s: float
) -> None:
    found = looks_in_run(topic_count, member_count)
    assert len(found) == topic_count
    for count in found.values():
        assert RUN_S / count == pytest.approx(interval_s, rel=0.1)


@pytest.mark.parametrize("group", ["", "g"])
def test_a_broker_that_comes_is_consumed_from_after_two_seconds_though_the_route_is_trusted_for_longer(group: str) -> None:
    """A group's member without its driver consumes all queues, as one that broadcasts."""
    world = FakeWorld(route_of("T", "a"))
    world.routes["T"] = whole = route_of("T", "a", "b")
    Brokers(world)
    world.routes["T"] = route_of("T", "a")
    steps = ConsumerSteps(ConsumerOptions(group=group, broadcasting=bool(group)), world.now_s)
    world.driver.run(steps.subscribe("T", (), NO_FILTER))
    trusted = world.routes["T"]
    world.driver.run(steps.before_poll())
    assert steps.is_settled(lambda _: trusted)
    world.routes["T"] = whole
    assert steps.group_due_in_s(world.now_s()) <= LOOK_S, "a poll that waits wakes up for it"
    world.advance(LOOK_S * 1.25)
    assert not steps.is_settled(lambda _: trusted)
    world.driver.run(steps.before_poll())
    assert world.forgotten == ["T"]
    assert MessageQueue("T", "b", 0) in steps.state.queues


def test_the_retries_of_a_group_are_looked_up_only_where_a_broker_has_come() -> None:
    world = FakeWorld(route_of("T", "a"), route_of("%RETRY%g", "a"))
    world.routes["T"] = whole = route_of("T", "a", "b")
    Brokers(world)
    world.routes["T"] = route_of("T", "a")
    steps = ConsumerSteps(ConsumerOptions(group="g"), world.now_s)
    for topic in ("T", "%RETRY%g"):
        world.driver.run(steps.subscribe(topic, (), NO_FILTER))
    for _ in range(5):
        world.advance(LOOK_S * 1.25)
        world.driver.run(steps.before_poll())
    assert world.forgotten == ["T"] * 5
    world.routes["T"] = whole
    world.driver.run(steps.before_poll())
    assert world.forgotten[5:] == ["%RETRY%g"]


def test_members_that_began_at_one_time_do_not_look_at_one_time() -> None:
    members = [RouteLooks(0.0, random.Random(number)) for number in range(16)]
    times_s = [0.0]
    for looks in members:
        now_s = LOOK_S
        while now_s < 30.0:
            if looks.take_due(["T"], len(members), now_s) is not None:
                times_s.append(now_s)
            now_s += looks.due_in_s(now_s)
    times_s.sort()
    assert max(later - earlier for earlier, later in pairwise(times_s)) < 2.5


def test_who_is_told_of_changes_does_not_look_and_looks_soon_when_it_is_told_no_more() -> None:
    looks = RouteLooks(0.0, random.Random(1))
    looks.follow(True, 1.0)
    for now_s in (LOOK_S, LOOK_S + ROUTE_FRESH_S):
        assert looks.due_in_s(now_s) == 0
        assert looks.take_due(["T"], 1, now_s) is None
    now_s += 5.0
    looks.follow(True, now_s)
    assert looks.due_in_s(now_s) == ROUTE_FRESH_S - 5.0
    looks.follow(False, now_s)
    assert looks.due_in_s(now_s) <= 2 * LOOK_S
    assert looks.take_due(["T"], 1, now_s + 2 * LOOK_S) == "T"


def test_a_member_that_is_told_of_a_route_looks_it_up_then_and_only_then() -> None:
    world = FakeWorld(route_of("T", "a"))
    world.routes["T"] = whole = route_of("T", "a", "b")
    Brokers(world)
    world.routes["T"] = route_of("T", "a")
    member = ToldMember(world)
    steps = ConsumerSteps(ConsumerOptions(group="g"), world.now_s, member=member)
    world.driver.run(steps.subscribe("T", (), NO_FILTER))
    for _ in range(2):
        world.driver.run(steps.before_poll())
        world.advance(UNSURE_SPREAD_S)
    world.forgotten.clear()
    for _ in range(10):
        world.advance(LOOK_S)
        world.driver.run(steps.before_poll())
    assert world.forgotten == []
    world.routes["T"] = whole
    member.changes += 1
    member.wait_known(0.0)
    world.driver.run(steps.before_poll())
    assert steps.group_due_in_s(world.now_s()) <= TOLD_SPREAD_S
    world.advance(TOLD_SPREAD_S)
    world.driver.run(steps.before_poll())
    assert world.forgotten == ["T"]
    assert steps.group_due_in_s(world.now_s()) <= ANSWER_S, "what comes of it is seen soon"
    assert "b" in member.state.broker_names
    # The other broker does not tell of the topic, as far as the member knows.
    for _ in range(2):
        world.driver.run(steps.before_poll())
        world.advance(LOOK_S * 2)
    assert world.forgotten == ["T", "T"]


def test_a_member_looks_its_routes_up_once_more_after_it_has_joined_but_not_that_of_its_retries() -> None:
    """A broker may have got the topic between the first look-up and the join, and nobody could tell the member."""
    world = FakeWorld(route_of("T", "a"), route_of("%RETRY%g", "a"))
    world.routes["T"] = whole = route_of("T", "a", "b")
    Brokers(world)
    world.routes["T"] = route_of("T", "a")
    member = ToldMember(world)
    member.told_topics = ("T", "%RETRY%g")
    steps = ConsumerSteps(ConsumerOptions(group="g"), world.now_s, member=member)
    for topic in member.told_topics:
        world.driver.run(steps.subscribe(topic, (), NO_FILTER))
    assert "b" not in member.state.broker_names
    world.driver.run(steps.before_poll())
    assert steps.group_due_in_s(world.now_s()) <= UNSURE_SPREAD_S, "a poll that waits wakes up for it"
    world.routes["T"] = whole
    world.advance(UNSURE_SPREAD_S)
    world.driver.run(steps.before_poll())
    assert world.forgotten[0] == "T"
    assert world.forgotten[1:] == ["%RETRY%g"], "where a broker has come"
    assert "b" in member.state.broker_names


def test_the_route_of_retries_is_trusted_for_longer_while_brokers_tell_of_it_and_looked_up_when_they_do_so_no_more() -> None:
    world = FakeWorld(route_of("T", "a"), route_of("%RETRY%g", "a"))
    Brokers(world)
    member = ToldMember(world)
    member.told_topics = ("T", "%RETRY%g")
    steps = ConsumerSteps(ConsumerOptions(group="g"), world.now_s, member=member)
    for topic in member.told_topics:
        world.driver.run(steps.subscribe(topic, (), NO_FILTER))
    assert not steps.looks_seldom("%RETRY%g")
    for _ in range(2):
        world.driver.run(steps.before_poll())
        world.advance(UNSURE_SPREAD_S)
    assert steps.looks_seldom("%RETRY%g")
    assert not steps.looks_seldom("T")
    world.forgotten.clear()
    member.told_topics = ("T",)
    member.changes += 1  # Else the broker need not say what it has.
    member.wait_known(0.0)
    world.driver.run(steps.before_poll())
    assert not steps.looks_seldom("%RETRY%g")
    world.advance(UNSURE_SPREAD_S)
    world.driver.run(steps.before_poll())
    assert sorted(world.forgotten) == ["%RETRY%g", "T"]


def test_members_that_hear_of_a_change_at_one_time_do_not_look_at_one_time() -> None:
    members = [RouteLooks(0.0, random.Random(number)) for number in range(16)]
    for looks in members:
        looks.hear(["T"], TOLD_SPREAD_S, 1.0)
    times_s = sorted(looks.due_in_s(1.0) for looks in members)
    assert max(later - earlier for earlier, later in pairwise(times_s)) < TOLD_SPREAD_S / 2
    assert times_s[-1] < TOLD_SPREAD_S
    assert [looks.take_heard(1.0 + TOLD_SPREAD_S) for looks in members] == [["T"]] * len(members)
    assert [looks.take_heard(1.0 + TOLD_SPREAD_S) for looks in members] == [[]] * len(members)


def test_a_topic_of_which_a_member_hears_again_is_not_looked_up_later_for_that() -> None:
    looks = RouteLooks(0.0, random.Random(1))
    looks.hear(["T"], TOLD_SPREAD_S, 0.0)
    due_s = looks.due_in_s(0.0)
    for _ in range(20):
        looks.hear(["T"], UNSURE_SPREAD_S, due_s / 2)
    assert looks.due_in_s(0.0) <= due_s


def test_what_came_of_a_look_up_is_seen_soon() -> None:
    looks = RouteLooks(0.0, random.Random(1))
    assert looks.take_due(["T"], 1, LOOK_S) == "T"
    assert looks.due_in_s(LOOK_S) == pytest.approx(ANSWER_S)
    assert looks.take_due(["T"], 1, LOOK_S + ANSWER_S + 0.01) is None
    assert looks.due_in_s(LOOK_S + ANSWER_S + 0.01) > 1


def test_topics_that_are_not_consumed_any_more_are_not_looked_up() -> None:
    looks, now_s = RouteLooks(0.0, random.Random(1)), 0.0
    found = []
    for topics in (["A", "B"],) * 3 + (["B"],) * 3 + ([],) * 2 + (["A"],):
        now_s += 2 * LOOK_S
        found.append(looks.take_due(topics, 1, now_s))
    assert set(found[:2]) == {"A", "B"}
    assert found[3:] == ["B", "B", "B", None, None, "A"]
