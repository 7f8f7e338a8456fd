from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from protomq_ha.in_sync_set import InSyncSet, MemberReport

TIMEOUT_MS = 1_000
LOST_TIMEOUT_MS = 200


def live(position: int, asked_ms: int = 0) -> MemberReport:
    return MemberReport(position, True, asked_ms)


def a_set(*members: str, start: int = 0) -> InSyncSet:
    made = InSyncSet("m", frozenset(members), 1, now_ms=0)
    made.begin(start, now_ms=0)
    return made


def wanted(made: InSyncSet, reports: Mapping[str, MemberReport], now_ms: int = 1) -> set[str]:
    return set(made.wanted(reports, TIMEOUT_MS, LOST_TIMEOUT_MS, now_ms))


def test_what_the_slowest_member_has_is_confirmed() -> None:
    made = a_set("m", "a", "b")
    assert made.confirm(100, {"a": live(70), "b": live(90)}) == 70
    assert made.confirm(100, {"a": live(100), "b": live(90), "stranger": live(1)}) == 90
    assert made.confirm(80, {}) == 90, "it never goes back"


def test_a_member_that_has_said_nothing_has_nothing() -> None:
    assert a_set("m", "a").confirm(100, {}) == 0
    assert a_set("m").confirm(100, {}) == 100


def test_until_a_change_is_settled_both_sets_count() -> None:
    made = a_set("m", "a")
    made.propose(frozenset({"m", "b"}))
    assert made.others == {"a", "b"}
    assert made.confirm(100, {"a": live(100), "b": live(10)}) == 10
    made.settle(frozenset({"m", "a"}), 1, now_ms=5)
    assert made.others == {"a", "b"}, "etcd has told nothing new"
    made.settle(frozenset({"m", "a"}), 2, now_ms=5)
    assert made.others == {"a"}


def test_a_slave_joins_with_all_that_may_have_been_acknowledged() -> None:
    made = a_set("m", start=50)
    assert wanted(made, {"a": live(49)}) == {"m"}
    assert wanted(made, {"a": live(50)}) == {"m", "a"}
    made.confirm(60, {})
    assert wanted(made, {"a": live(59)}) == {"m"}
    assert wanted(made, {"a": live(60)}) == {"m", "a"}
    assert wanted(made, {"a": live(60)._replace(is_live=False)}) == {"m"}


def test_what_was_said_before_the_set_changed_lets_nobody_join() -> None:
    made = a_set("m", "a")
    made.settle(frozenset({"m"}), 2, now_ms=500)
    assert wanted(made, {"a": live(10, asked_ms=499)}, 600) == {"m"}
    assert wanted(made, {"a": live(10, asked_ms=500)}, 600) == {"m", "a"}


def test_a_member_leaves_when_it_has_not_kept_up_for_the_time_out() -> None:
    made = a_set("m", "a")
    late = {"a": live(0)._replace(is_live=False)}
    assert wanted(made, late, TIMEOUT_MS - 1) == {"m", "a"}
    assert wanted(made, {"a": live(0)}, TIMEOUT_MS - 1) == {"m", "a"}
    assert wanted(made, late, 2 * TIMEOUT_MS - 2) == {"m", "a"}
    assert wanted(made, late, 2 * TIMEOUT_MS - 1) == {"m"}


def test_a_member_whose_session_has_ended_leaves_sooner_unless_it_comes_back() -> None:
    made = a_set("m", "a", "b")
    assert wanted(made, {}, TIMEOUT_MS - 1) == {"m", "a", "b"}, "they have not come yet"
    assert wanted(made, {"a": live(0), "b": live(0)}, 900) == {"m", "a", "b"}
    assert wanted(made, {"b": live(0)}, 900 + LOST_TIMEOUT_MS - 1) == {"m", "a", "b"}
    assert wanted(made, {"b": live(0)}, 900 + LOST_TIMEOUT_MS) == {"m", "b"}
    slow = {"a": live(0)._replace(is_live=False), "b": live(0)}
    assert wanted(made, slow, 900 + LOST_TIMEOUT_MS) == {"m", "a", "b"}, "it is back, and has time to catch up"


def test_the_master_that_lost_its_lease_leaves_at_once_and_comes_back_when_it_has_caught_up() -> None:
    made = InSyncSet("m", frozenset({"m", "old", "a"}), 1, now_ms=0)
    made.begin(50, now_ms=0, gone="old")
    assert wanted(made, {}) == {"m", "a"}, "the other one has time to come"
    assert wanted(made, {"old": live(49)}) == {"m", "old", "a"}, "it is there after all"
    made.settle(frozenset({"m", "a"}), 2, now_ms=5)
    assert wanted(made, {"old": live(49, 5)._replace(is_live=False)}, TIMEOUT_MS + 9) == {"m"}
    assert wanted(made, {"old": live(50, 5), "a": live(0, 5)}, 9) == {"m", "old", "a"}


def test_promises_hold_as_long_as_the_first_one_that_ends() -> None:
    made = a_set("m", "a", "b")
    assert made.vouched_until(30, {"a": live(0, 10), "b": live(0, 5)}) == 35
    assert made.vouched_until(30, {"a": live(0, 10)}) == 30, "b has promised nothing"
    assert a_set("m").vouched_until(30, {}) is None


MEMBERS = st.frozensets(st.sampled_from("abcd")).map(lambda members: members | {"m"})


@given(st.data())
def test_whatever_became_of_the_changes_every_member_has_what_is_confirmed(data: st.DataObject) -> None:
    """etcd as it is: some changes are made, the master learns of some; what it confirms, all members in etcd have."""
    made = a_set("m")
    etcd, revision, known = frozenset({"m"}), 1, 1
    has = dict.fromkeys("abcd", 0)
    end = 0
    for _ in range(data.draw(st.integers(1, 12))):
        end += data.draw(st.integers(0, 5))
        for member in has:
            has[member] = data.draw(st.integers(has[member], end))
        reports = {member: live(position, asked_ms=1 << 40) for member, position in has.items()}
        members = data.draw(MEMBERS)
        if known == revision and members - made.members <= set(wanted(made, reports)):
            made.propose(members)
            if data.draw(st.booleans()):
                etcd, revision = members, revision + 1
        if data.draw(st.booleans()):
            made.settle(etcd, revision, now_ms=0)
            known = revision
        confirmed = made.confirm(end, reports)
        assert all(has[member] >= confirmed for member in etcd - {"m"})
