"""The checker of the campaign `groups`: what is right passes, and each rule finds what it is for. Pure: the times are made up."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chaos.checker.groups import GroupHistory, Span, check_group, take_overs_s

GAP_S, SETTLE_S = 3.0, 1.0


def history(*lines: str, locked: bool = True, acked: int = 3) -> GroupHistory:
    made = GroupHistory(GAP_S, SETTLE_S, is_locked=locked, is_ordered=True)
    for line in lines:
        member, _, said = line.partition(" ")
        made.note(member, said)
    made.acked_s = {("a/0", offset): 0.0 for offset in range(acked)}
    return made


def broken(made: GroupHistory) -> list[str]:
    return [violation.invariant for violation in check_group(made, Counter())]


FIRST = (
    "x token 1.0 a/0 7", "x fetched 1.1 a/0 -1 1.0", "x got 1.2 a/0 0", "x done 1.3 a/0 0", "x commit 1.4 1 a/0 1 7", "x committed 1.5 1 -",
)  # fmt: skip
SECOND = (
    "y token 2.0 a/0 8", "y fetched 2.1 a/0 1 2.05", "y got 2.2 a/0 1", "y done 2.3 a/0 1", "y got 2.4 a/0 2", "y done 2.5 a/0 2",
    "y commit 2.6 1 a/0 3 8", "y committed 2.7 1 -",
)  # fmt: skip


def test_a_queue_that_changes_hands_in_order_is_right() -> None:
    counts: Counter[str] = Counter()
    assert check_group(history(*FIRST, *SECOND), counts) == []
    assert (counts["deliveries"], counts["deliveries twice"], counts["commits"]) == (3, 0, 2)


@pytest.mark.parametrize(
    ("rule", "lines"),
    [
        ("C1b", (*FIRST,)),
        ("C1a", (*FIRST, *SECOND[:6], "y commit 2.45 9 a/0 3 8", "y committed 2.46 9 -")),
        ("C3", (*FIRST, "y token 2.0 a/0 8", "y fetched 2.1 a/0 0 2.05", *SECOND[2:])),
        ("B3", (*FIRST, *SECOND[:2], "y got 2.15 a/0 0", "y done 2.16 a/0 0", *SECOND[2:])),
        ("B3", (*FIRST, *SECOND[:2], "y got 2.2 a/0 2", "y done 2.3 a/0 2", "y got 2.4 a/0 1", "y done 2.5 a/0 1")),
        ("C3", (*FIRST, *SECOND, "y commit 2.8 2 a/0 2 8", "y committed 2.9 2 -")),
        ("B4", (*FIRST[:3], "x done 2.25 a/0 0", "x commit 2.26 1 a/0 1 7", "x refused 2.27 1 QUEUE_NOT_OWNED", *SECOND)),
        ("C5", (*FIRST, "x commit 2.15 2 a/0 1 7", "x committed 2.16 2 -", *SECOND)),
        ("C6", (*FIRST, *(line.replace(" 2.", " 22.") for line in SECOND))),
        ("C2", (*FIRST[:4], "y token 2.0 a/0 8", "y fetched 2.1 a/0 -1 2.05", "y got 2.15 a/0 0", "y done 2.16 a/0 0", *SECOND[2:])),
    ],
)
def test_each_rule_finds_what_it_is_for(rule: str, lines: tuple[str, ...]) -> None:
    assert rule in broken(history(*lines))


def test_a_killed_member_takes_its_uncommitted_messages_with_it_and_they_come_again() -> None:
    again = ("y token 2.0 a/0 8", "y fetched 2.1 a/0 -1 2.05", "y got 2.15 a/0 0", "y done 2.16 a/0 0", *SECOND[2:])
    made = history(*FIRST[:4], *again)
    made.killed_s["x"] = 1.35
    counts: Counter[str] = Counter()
    assert check_group(made, counts) == []
    assert counts["deliveries twice"] == 1
    assert take_overs_s(made) == [pytest.approx(0.8)]
    # The time is taken before the kill, and it may begin a message in between.
    made.killed_s["x"] = 1.15
    assert check_group(made, counts) == []


def test_a_stopped_member_may_end_what_it_has_in_hand_and_begin_one_that_was_checked_before() -> None:
    held = ("x got 1.6 a/0 1", "x done 9.1 a/0 1")
    taken = tuple(line.replace(" 2.", " 6.") for line in SECOND)
    made = history(*FIRST, *held, *taken)
    made.stops["x"].append(Span(1.7, 9.0))
    counts: Counter[str] = Counter()
    assert check_group(made, counts) == []
    assert counts["finished after waking"] == 1
    for begun_count in (1, 2):
        begun = [f"x got 9.{2 + number} a/0 {2 + number}" for number in range(begun_count)]
        made = history(*FIRST, *held, *taken, *begun)
        made.stops["x"].append(Span(1.7, 9.0))
        assert ("C7" in broken(made)) is (begun_count > 1)


LATE = (
    "x fetched 1.1 a/0 -1 1.0", "x got 1.2 a/0 0", "x done 1.3 a/0 0",
    "y fetched 6.1 a/0 -1 6.05", "y got 6.2 a/0 0", "y done 6.3 a/0 0", "y got 6.4 a/0 1", "y done 6.5 a/0 1", "y got 6.55 a/0 2",
    "y done 6.6 a/0 2", "y commit 6.65 1 a/0 3 0", "y committed 6.7 1 -",
    "x commit 9.05 1 a/0 1 0", "x committed 9.1 1 -",
    "z fetched 9.3 a/0 1 9.25", "z got 9.4 a/0 1", "z done 9.5 a/0 1", "z got 9.6 a/0 2", "z done 9.7 a/0 2",
)  # fmt: skip


def test_the_commit_that_a_stopped_member_was_sending_may_not_take_back_the_next_owners() -> None:
    refused = tuple(line.replace("x committed 9.1 1 -", "x refused 9.1 1 MEMBER_UNKNOWN") for line in LATE[:-5])
    made = history(*refused, locked=False)
    made.stops["x"].append(Span(1.4, 9.0))
    counts: Counter[str] = Counter()
    assert check_group(made, counts) == []
    assert counts["commits refused as no member"] == 1
    made = history(*LATE, locked=False)
    made.stops["x"].append(Span(1.4, 9.0))
    assert broken(made) == ["C3", "C3", "C2", "C2"], "it was accepted"
    assert broken(history(*LATE, locked=False)) == ["C3", "C3", "C2", "C2", "C2"], "nobody was stopped"


def test_without_locks_too_accepted_commits_only_grow() -> None:
    made = history(*FIRST, *SECOND, "y commit 2.8 2 a/0 2 8", "y committed 2.9 2 -", locked=False)
    assert broken(made) == ["C3"]


def test_who_leaves_before_a_broker_that_was_away_has_heard_of_it_may_leave_its_last_message_to_another() -> None:
    left = (
        "x fetched 3.1 a/0 -1 3.0", "x got 3.2 a/0 0", "x done 3.3 a/0 0", "x left 3.4",
        "y fetched 3.6 a/0 -1 3.55", "y got 3.7 a/0 0", "y done 3.8 a/0 0", "y got 3.85 a/0 1", "y done 3.9 a/0 1", "y got 3.95 a/0 2",
        "y done 4.0 a/0 2", "y commit 4.1 1 a/0 3 0", "y committed 4.2 1 -",
    )  # fmt: skip
    for down, rules in ((Span(0.0, 1.5), []), (Span(-2.0, 0.1), ["C2"])):
        made = history(*left, locked=False)
        made.downs["a"].append(down)
        assert broken(made) == rules


def test_what_was_ended_behind_a_message_that_took_too_long_may_come_again() -> None:
    again = (
        "x fetched 1.1 a/0 -1 1.0", "x got 1.2 a/0 0", "x got 1.25 a/0 1", "x done 1.3 a/0 1", "x done {} a/0 0",
        "y fetched 2.5 a/0 -1 2.45", "y got 2.6 a/0 0", "y done 2.65 a/0 0", "y got 2.7 a/0 1", "y done 2.75 a/0 1",
    )  # fmt: skip
    for done_s, rules in ((2.4, []), (2.2, ["C2", "C2"])):
        assert broken(history(*(line.format(done_s) for line in again), locked=False, acked=2)) == rules


def test_one_message_that_is_begun_on_waking_is_no_second_owner_and_no_lost_commit() -> None:
    taken = tuple(line.replace(" 2.", " 6.") for line in SECOND)
    begun = ("z fetched 9.0 a/0 3 8.95", "z got 9.1 a/0 3", "x got 9.2 a/0 1", "x done 9.3 a/0 1", "z done 9.4 a/0 3")
    lines = (*FIRST, *taken, *begun)
    made = history(*lines)
    made.stops["x"].append(Span(1.7, 9.05))
    assert broken(made) == []
    assert {"B4", "C2"} <= set(broken(history(*lines))), "nobody was stopped"


def test_a_busy_machine_may_be_late_and_a_broker_that_is_down_silent() -> None:
    late = tuple(line.replace(" 2.", " 9.") for line in SECOND)
    assert broken(history(*FIRST, *late)) == ["C6"]
    made = history(*FIRST, *late)
    made.paces = [(5.0, 3.0)]
    assert broken(made) == []
    made = history(*FIRST, *late)
    made.downs["a"].append(Span(2.0, 4.0))
    assert broken(made) == []


AGAIN = (*FIRST[:3], "x failed 1.3 a/0 0", "x got 1.4 a/0 0", "x done 1.5 a/0 0")


def test_a_message_that_fails_comes_again_before_those_behind_it() -> None:
    counts: Counter[str] = Counter()
    made = history(*AGAIN, "x commit 1.6 1 a/0 1 7", "x committed 1.7 1 -", *SECOND)
    made.is_held_up = True
    assert check_group(made, counts) == []
    assert (counts["failed"], counts["deliveries twice"]) == (1, 0)


def test_a_message_that_fails_and_is_overtaken_is_found() -> None:
    overtaken = ("x got 1.4 a/0 1", "x done 1.5 a/0 1", "x got 1.6 a/0 0", "x done 1.7 a/0 0")
    made = history(*AGAIN[:4], *overtaken)
    assert "B4" not in broken(made)
    made.is_held_up = True
    assert "B4" in broken(made)


def test_a_member_that_works_on_a_queue_twice_at_a_time_in_order_is_found() -> None:
    made = history(*FIRST[:3], "x got 1.25 a/0 0", *FIRST[3:], *SECOND)
    assert "B4" not in broken(made)
    made.is_held_up = True
    assert "B4" in broken(made)


def test_a_message_that_fails_goes_to_the_next_owner_first() -> None:
    made = history(*AGAIN[:4], "y token 2.0 a/0 8", "y fetched 2.1 a/0 -1 2.05", "y got 2.15 a/0 0", "y done 2.16 a/0 0", *SECOND[2:])
    made.is_held_up = True
    assert broken(made) == []


def test_what_comes_again_after_a_kill_was_ended_within_the_time_of_a_commit() -> None:
    for quiet_s, rules in ((2.0, []), (9.0, ["C2"])):
        taken = tuple(line.replace(" 2.", f" {2 + round(quiet_s)}.") for line in SECOND[2:])
        begun_s = 2 + quiet_s
        again = (f"y token {begun_s} a/0 8", f"y fetched {begun_s + 0.1} a/0 -1 {begun_s + 0.05}", f"y got {begun_s + 0.15} a/0 0")
        made = history(*FIRST[:4], *again, f"y done {begun_s + 0.16} a/0 0", *taken)
        made.killed_s["x"] = begun_s - 0.1
        made.acked_s = {("a/0", offset): begun_s for offset in range(3)}
        assert broken(made) == rules, quiet_s
