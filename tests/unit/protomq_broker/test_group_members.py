"""Two members at one queue are told; a restart, a hand-over and members with queues of their own are not."""

from __future__ import annotations

import pytest

from protomq.testing.fakes import FakeClock
from protomq_broker import group_members
from protomq_broker.group_members import MEMBERS_MAX, REMEMBERED_MS, GroupMembers

Q0, Q1 = ("g", "t", 0), ("g", "t", 1)


def test_two_that_take_turns_are_told_of_each_other() -> None:
    members = GroupMembers(FakeClock())
    for name in ("a", "b"):
        members.pulled(Q0, name)
        assert members.other(Q0, name) == ""
    members.pulled(Q0, "a")
    assert members.other(Q0, "a") == "b"
    assert members.other(Q0, "b") == "a"
    assert members.other(Q1, "a") == members.other(("h", "t", 0), "a") == ""


def test_a_turn_counts_for_a_minute_beyond_its_hold() -> None:
    clock = FakeClock()
    members = GroupMembers(clock)
    members.pulled(Q0, "a", 60_000)
    members.pulled(Q0, "b", 60_000)
    clock.advance(60_000 + REMEMBERED_MS)
    members.pulled(Q0, "a", 60_000)
    assert members.other(Q0, "a") == "b"
    clock.advance(60_000 + REMEMBERED_MS - 1)
    assert members.other(Q0, "b") == "a"
    clock.advance(1)
    assert members.other(Q0, "b") == ""


def test_three_are_told_too() -> None:
    members = GroupMembers(FakeClock())
    for name in "abca":
        members.pulled(Q0, name)
    assert members.other(Q0, "a") == "c"
    assert members.other(Q0, "b") == "a"


def test_a_restart_and_members_with_queues_of_their_own_are_no_conflict() -> None:
    members = GroupMembers(FakeClock())
    for name in ("before", "before", "after", "after", "after"):
        members.pulled(Q0, name)
        members.pulled(Q1, "another")
        assert members.other(Q0, name) == members.other(Q1, "another") == ""


def test_a_group_is_in_use_until_a_minute_after_the_last_hold() -> None:
    clock = FakeClock()
    members = GroupMembers(clock)
    assert members.user_of("g") == ""
    members.seen("g", "a", 0)
    members.seen("g", "b", 15_000)
    clock.advance(REMEMBERED_MS + 14_999)
    assert (members.user_of("g"), members.user_of("h")) == ("b", "")
    clock.advance(1)
    assert members.user_of("g") == ""


def test_who_pulls_no_more_does_not_use_the_group_though_a_last_pull_comes_late_and_others_do() -> None:
    members = GroupMembers(FakeClock())
    for name in "abc":
        members.seen("g", name, 240_000)
    members.seen("h", "b", 240_000)
    members.left("g", "c")
    members.seen("g", "c", 240_000)
    assert members.user_of("g") == "b"
    members.left("g", "b")
    assert members.user_of("g") == "a"
    members.left("g", "a")
    assert (members.user_of("g"), members.user_of("h")) == ("", "b")


def test_of_those_who_pull_no_more_the_last_ones_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_members, "LEFT_MAX", 2)
    members = GroupMembers(FakeClock())
    for name in "abc":
        members.left("g", name)
    for name in "abc":
        members.seen("g", name, 0)
    assert members.user_of("g") == "a"
    members.left("g", "a")
    assert members.user_of("g") == ""


def test_who_uses_a_group_no_more_is_forgotten() -> None:
    clock = FakeClock()
    members = GroupMembers(clock)
    for number in range(10):
        members.seen("g", str(number), 0)
        clock.advance(REMEMBERED_MS)
    assert len(members._users) == 1


def test_who_consumes_beside_members_is_named_until_a_minute_after_the_last_hold_of_all_of_them() -> None:
    clock = FakeClock()
    members = GroupMembers(clock)
    assert members.beside() == {}
    members.came_beside("g", "a simple consumer", "10.0.0.5:4711", 15_000)
    members.came_beside("g", "a simple consumer", "10.0.0.6:1")
    members.came_beside("h", "a consumer in broadcast mode", "[::1]:2")
    found = members.beside()
    assert found["g"].startswith("a simple consumer at 10.0.0.5 consumes")
    assert found["h"].startswith("a consumer in broadcast mode at [::1] consumes")
    clock.advance(REMEMBERED_MS - 1)
    members.came_beside("g", "a simple consumer", "10.0.0.6:1")
    clock.advance(1)
    assert list(members.beside()) == ["g"]
    clock.advance(REMEMBERED_MS)
    members.came_beside("g", "a simple consumer", "10.0.0.6:1")
    assert members.beside()["g"].startswith("a simple consumer at 10.0.0.6")


def test_the_groups_that_pulled_longest_ago_are_forgotten_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_members, "USERS_MAX", 2)
    members = GroupMembers(FakeClock())
    for group in ("g", "h", "g", "i"):
        members.seen(group, "a", 0)
    assert [members.user_of(group) for group in "ghi"] == ["a", "", "a"]


def test_it_is_forgotten_when_one_is_gone_for_a_minute() -> None:
    clock = FakeClock()
    members = GroupMembers(clock)
    for name in "aba":
        members.pulled(Q0, name)
    clock.advance(REMEMBERED_MS - 1)
    assert members.other(Q0, "a") == "b"
    clock.advance(1)
    assert members.other(Q0, "a") == ""
    # And who comes back after more than a minute takes no turns.
    members.pulled(Q1, "a")
    members.pulled(Q1, "b")
    clock.advance(REMEMBERED_MS + 1)
    members.pulled(Q1, "a")
    assert members.other(Q1, "a") == ""


def test_what_is_remembered_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(group_members, "QUEUES_MAX", 3)
    members = GroupMembers(FakeClock())
    for queue_id in range(10):
        members.pulled(("g", "t", queue_id), "a")
    assert len(members._queues) == 3
    for number in range(100):
        members.pulled(Q0, f"m{number}")
    several = members._queues[Q0]
    assert not isinstance(several, tuple)
    assert len(several.until_ms) == MEMBERS_MAX
