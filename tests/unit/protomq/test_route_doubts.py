"""When a member of a group looks up a route again that may be out of date."""

from __future__ import annotations

import itertools
import random

from protomq import MessageQueue
from protomq._group_share import ROUTE_RETRY_MAX_S, ROUTE_RETRY_MIN_S, RouteDoubts, route_number
from protomq._types import Route
from tests.support.fake_driver import route_of

BOTH = route_of("T", "a", "b", queues=4)
ONLY_A = route_of("T", "a", queues=4)


def look_ups_s(doubts: RouteDoubts, contradicted: list[str], for_s: float) -> list[float]:
    """When it looks up, in steps of 0.1 s."""
    return [
        step / 10 for step in range(int(for_s * 10)) if doubts.take_due(contradicted, step / 10)
    ]


def test_a_number_stands_for_the_queues_in_any_order() -> None:
    queues = [MessageQueue("T", broker, number) for broker in ("a", "b") for number in range(4)]
    mixed = random.Random(1).sample(queues, len(queues))
    assert route_number(mixed) == route_number(queues)
    assert (
        len({route_number(queues[:count]) for count in range(len(queues) + 1)}) == len(queues) + 1
    )
    assert 0 < route_number([]) < 1 << 64


def test_what_nobody_contradicts_is_looked_up_no_more_than_usual() -> None:
    doubts = RouteDoubts()
    doubts.follow({"T": BOTH})
    doubts.follow({"T": route_of("T", "a", "b", "c", queues=4)})
    assert look_ups_s(doubts, [], 100) == []


def test_a_route_that_is_contradicted_is_looked_up_at_once_and_then_ever_more_rarely() -> None:
    doubts = RouteDoubts()
    times_s = look_ups_s(doubts, ["T"], 200)
    pauses_s = [after - before for before, after in itertools.pairwise(times_s)]
    assert times_s[0] == 0.0
    assert abs(pauses_s[0] - ROUTE_RETRY_MIN_S) < 0.11
    assert all(
        after > 1.4 * before for before, after in itertools.pairwise(pauses_s[:7])
    )
    assert abs(pauses_s[-1] - ROUTE_RETRY_MAX_S) < 0.11
    assert doubts.take_due([], 200.0) == []
    assert doubts.take_due(["T"], 200.1) == ["T"]


def test_a_broker_that_fell_out_of_a_route_is_looked_for_until_it_is_back_or_half_a_minute_is_over() -> (
    None
):
    doubts = RouteDoubts()
    doubts.follow({"T": BOTH})
    assert doubts.take_due([], 0.0) == []
    doubts.follow({"T": ONLY_A})
    assert len(look_ups_s(doubts, [], 3.0)) == 4
    doubts.follow({"T": BOTH})
    assert look_ups_s(doubts, [], 100) == []
    doubts.follow({"T": ONLY_A})
    times_s = look_ups_s(doubts, [], 1_000)
    assert 6 <= len(times_s) <= 10
    assert max(times_s) < 60


def test_a_topic_that_is_not_consumed_any_more_is_not_looked_up() -> None:
    doubts = RouteDoubts()
    doubts.follow({"T": BOTH})
    doubts.follow({"T": ONLY_A})
    numbers: dict[str, int] = doubts.follow({})
    assert numbers == {}
    assert look_ups_s(doubts, [], 100) == []


def test_the_number_changes_with_the_route() -> None:
    doubts = RouteDoubts()
    routes: list[Route] = [BOTH, ONLY_A, BOTH]
    numbers = [doubts.follow({"T": route})["T"] for route in routes]
    assert numbers[0] == numbers[2] != numbers[1]
