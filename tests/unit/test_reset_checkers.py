"""The checkers of the campaigns `resets` and `broadcasts`: what is right passes, each rule finds what it is for. Times are made up."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chaos.checker.broadcasts import check_broadcast
from tests.chaos.checker.groups import GroupHistory, Span
from tests.chaos.checker.resets import Reset, check_resets

QUEUE = "a/0"
ACKED = 4
MOVED = Reset(2.0, 2.1, 1)
SKIPPED = Reset(2.0, 2.1, 3)
BY_TIME = Reset(2.0, 2.1, None, 0.15, 0.15)
"""Messages 0 and 1 were acknowledged before that time, 2 and 3 sent after it."""


def history(*lines: str) -> GroupHistory:
    made = GroupHistory(3.0, 1.0)
    for line in lines:
        member, _, said = line.partition(" ")
        made.note(member, said)
    for offset in range(ACKED):
        made.sent_s[QUEUE, offset] = offset / 10
        made.acked_s[QUEUE, offset] = offset / 10 + 0.01
    return made


def consumed(member: str, begin_s: float, *offsets: int) -> list[str]:
    lines = []
    for place, offset in enumerate(offsets):
        time_s = begin_s + place / 10
        lines += [f"{member} got {time_s} {QUEUE} {offset}", f"{member} done {time_s + 0.05} {QUEUE} {offset}"]
    return lines


ALL = consumed("x", 1.0, 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("reset", "again"),
    [
        (MOVED, consumed("x", 2.2, 1, 2, 3)),
        (MOVED, [*consumed("x", 2.05, 0), f"x fetched 2.12 {QUEUE} 1 2.11", *consumed("y", 2.2, 1, 2, 3)]),
        (MOVED, [*consumed("x", 2.2, 1, 2), f"y fetched 2.7 {QUEUE} 3 2.6", *consumed("y", 2.8, 3)]),
        (SKIPPED, consumed("x", 2.2, 3)),
        (BY_TIME, consumed("x", 2.2, 2, 3)),
    ],
)
def test_a_reset_that_members_follow_is_right(reset: Reset, again: list[str]) -> None:
    counts = Counter[str]()
    assert check_resets(history(*ALL, *again), [reset], [QUEUE], counts) == []
    assert counts["deliveries"] == ACKED + sum(" got " in line for line in again)


@pytest.mark.parametrize(
    ("rule", "reset", "again"),
    [
        ("O1", MOVED, consumed("x", 2.2, 1, 3)),
        ("O1", MOVED, [*consumed("x", 2.2, 1, 2), f"x got 2.9 {QUEUE} 3"]),
        ("O1", BY_TIME, consumed("x", 2.2, 3)),
        ("O2", MOVED, consumed("x", 32.2, 1, 2, 3)),
        ("O2", MOVED, []),
        ("O3", MOVED, [f"y fetched 2.2 {QUEUE} 0 2.15", *consumed("y", 2.3, 1, 2, 3)]),
        ("O3", MOVED, [f"y fetched 2.2 {QUEUE} -1 2.15", *consumed("y", 2.3, 1, 2, 3)]),
        ("O3", MOVED, [f"y fetched 2.2 {QUEUE} 4 2.15", *consumed("y", 2.3, 1, 2, 3)]),
        ("O4", SKIPPED, [*consumed("x", 2.2, 3), *consumed("x", 32.0, 1)]),
        ("B4", MOVED, [*consumed("x", 2.2, 1, 2, 3), *consumed("y", 2.42, 3)]),
    ],
)
def test_each_rule_of_resets_finds_what_it_is_for(rule: str, reset: Reset, again: list[str]) -> None:
    assert rule in [one.invariant for one in check_resets(history(*ALL, *again), [reset], [QUEUE], Counter())]


def test_a_reset_that_was_followed_by_another_one_is_judged_up_to_there() -> None:
    made = history(*ALL, *consumed("x", 2.2, 1, 2, 3), *consumed("x", 3.2, 3))
    assert check_resets(made, [MOVED, Reset(3.0, 3.1, 3)], [QUEUE], Counter()) == []
    undone = history(*ALL, *consumed("x", 2.2, 1), f"y fetched 2.5 {QUEUE} 4 2.4", *consumed("x", 3.2, 3))
    assert "O3" in [one.invariant for one in check_resets(undone, [MOVED, Reset(3.0, 3.1, 3)], [QUEUE], Counter())]


def test_a_member_in_order_ends_what_it_has_before_it_goes_on_where_its_group_was_reset() -> None:
    for done_s, found in ((2.15, []), (2.25, ["B4"])):
        made = history(*ALL, f"x got 1.9 {QUEUE} 0", f"x done {done_s} {QUEUE} 0", *consumed("x", 2.2, 1, 2, 3))
        assert check_resets(made, [MOVED], [QUEUE], Counter()) == [], "it may where there is no order"
        made.is_held_up = True
        assert [one.invariant for one in check_resets(made, [MOVED], [QUEUE], Counter())] == found


RUNS = {"keeper": ["keeper.1", "keeper.2"], "other": ["other.1", "other.2"]}
GOOD = (*consumed("keeper.1", 1.0, 0, 1), *consumed("keeper.2", 2.0, 2, 3), *consumed("other.1", 1.0, 0, 1, 2, 3))


def broken(*lines: str, killed_s: dict[str, float] | None = None, downs: dict[str, list[Span]] | None = None) -> list[str]:
    made = history(*lines)
    made.killed_s |= killed_s or {}
    made.downs |= downs or {}
    return [one.invariant for one in check_broadcast(made, RUNS, ("keeper",), Counter())]


def test_members_that_all_get_everything_are_right() -> None:
    assert broken(*GOOD) == []
    assert broken(*GOOD, *consumed("keeper.2", 2.5, 1), killed_s={"keeper.1": 1.6}) == []
    assert broken(*GOOD, *consumed("other.2", 3.0, 0, 1)) == []
    # Its broker was away: what was ended shortly before comes again.
    away = {"a": [Span(1.3, 1.5)]}
    assert broken(*GOOD, *consumed("keeper.1", 1.6, 1), downs=away) == []
    assert broken(*GOOD, "keeper.1 left 1.7", *consumed("keeper.2", 2.5, 1), downs=away) == []


@pytest.mark.parametrize(
    ("rule", "lines", "killed_s"),
    [
        ("P1", GOOD[:-2], {}),
        ("P1", (*GOOD[:-1],), {}),
        ("P2", (*GOOD, *consumed("keeper.2", 2.5, 1)), {}),
        ("P2", (*GOOD, *consumed("keeper.2", 32.5, 1)), {"keeper.1": 31.0}),
        ("P3", (*GOOD, *consumed("other.1", 3.0, 0)), {}),
    ],
)
def test_each_rule_of_broadcasts_finds_what_it_is_for(rule: str, lines: tuple[str, ...], killed_s: dict[str, float]) -> None:
    assert broken(*lines, killed_s=killed_s) == [rule]


def test_an_outage_excuses_only_what_was_ended_shortly_before() -> None:
    away = {"a": [Span(31.3, 31.5)]}
    assert broken(*GOOD, *consumed("keeper.1", 31.6, 1), downs=away) == ["P3"]
    assert broken(*GOOD, *consumed("keeper.1", 31.1, 1), downs=away) == ["P3"]
    assert broken(*GOOD, "keeper.1 left 31.7", *consumed("keeper.2", 32.5, 1), downs=away) == ["P2"]
