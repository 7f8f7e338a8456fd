"""Members of groups at one broker: who is there, which queues have owners, and when members hear of it. No clock, no socket."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protomq.v1.membership_service_pb2 import GroupMember, MemberTopic
from protomq_broker import memberships as module
from protomq_broker.memberships import Group, MemberKey, Memberships, check_member, difference
from protomq_runtime.errors import ServiceError

QUEUES = 4


def made(known: tuple[str, ...] = (), *, takes_commits: bool = True) -> Memberships:
    return Memberships(
        0,
        settle_ms=3_000,
        expiry_ms=120_000,
        gap_ms=25_000,
        queue_count=lambda topic: QUEUES if topic == "T" else 0,
        known_groups=known,
        takes_commits=takes_commits,
    )


def member(name: str, *queue_ids: int, nonce: int = 1, topic: str = "T", wanted: str = "") -> GroupMember:
    return GroupMember(
        client_id=name,
        nonce=nonce,
        topics=[MemberTopic(topic=topic, filter=wanted, queue_ids=queue_ids)],
        allocation="average",
    )


def seen(known: Memberships, said: GroupMember, now_ms: int = 0, *, rejoins: bool = False) -> bool:
    return known.seen("g", said, "peer", now_ms, rejoins=rejoins)


def names(known: Memberships) -> list[str]:
    group = known.find("g")
    return [] if group is None else [said.client_id for said in group.said()]


def test_news_are_who_is_there_and_queues_that_are_free_or_have_two_owners() -> None:
    known = made()
    assert seen(known, member("a"))
    assert not seen(known, member("a")), "a beat"
    assert not seen(known, member("a", 0, 1, 2, 3)), "queues that were free are taken"
    assert seen(known, member("b"))
    assert seen(known, member("a", 0, 1)), "two queues are free"
    assert not seen(known, member("b", 2, 3))
    assert seen(known, member("b", 1, 2, 3)), "queue 1 has two owners"
    assert seen(known, member("b", 1, 2, 3, wanted="tags X"))


def test_a_member_that_says_the_same_again_is_known_for_as_long_as_if_it_had_said_something_new() -> None:
    known = made()
    first = member("a", 0, 1, 2, 3)
    assert not known.says_the_same("g", first)
    seen(known, first)
    group = known.find("g")
    assert group is not None
    version = group.version
    again = member("a", 0, 1, 2, 3)
    assert known.says_the_same("g", again)
    assert not known.seen("g", again, "another peer", 100_000, rejoins=True)
    at_rest = group.members["a", 1]
    assert at_rest.said is first, "what it said is kept once"
    assert (at_rest.peer, at_rest.queues, group.version) == ("another peer", frozenset(("T", i) for i in range(QUEUES)), version)
    assert known.expire(219_999) == []
    assert not known.says_the_same("g", member("a", 0, 1, 2))
    assert seen(known, member("a", 0, 1, 2), 219_999), "a queue is free"
    assert known.expire(339_998) == []
    assert known.expire(339_999) == [("g", ("a", 1))]


def test_groups_have_the_names_of_queues_in_common() -> None:
    """A thousand groups of one topic with 16 queues had 4 MiB of them."""
    known = made()
    for group in ("g", "h"):
        for queue_ids in ((), (0, 1, 2, 3), (0, 1, 2, 3, QUEUES)):
            known.seen(group, member("a", *queue_ids), "peer", 0, rejoins=False)
    groups = [group for _, group in known.groups()]
    for index in range(QUEUES):
        queues = [queue for group in groups for queue in (*group.owners, *group.members["a", 1].queues) if queue == ("T", index)]
        assert len(queues) == 4
        assert len(set(map(id, queues))) == 1
    assert all(("T", QUEUES) in group.owners for group in groups), "beyond what the topic has, as in the moment when it shrinks"


def test_what_a_member_has_and_another_too_is_taken() -> None:
    known = made()
    seen(known, member("a", 0, 1))
    seen(known, member("b", 2))
    assert known.taken("g", ("b", 1)) == {}
    seen(known, member("b", 3, 2, 1, 0))
    assert known.taken("g", ("b", 1)) == known.taken("g", ("a", 1)) == {"T": [0, 1]}
    known.left("g", ("a", 1), 0)
    assert known.taken("g", ("b", 1)) == {}


def test_a_member_whose_held_call_breaks_is_gone_at_once() -> None:
    known = made()
    seen(known, member("a", 0))
    known.held("g", ("a", 1))
    assert known.broke("g", ("a", 1), 5)
    assert names(known) == []
    assert not known.broke("g", ("a", 1), 5)


def test_a_member_that_locks_its_queues_stays_for_a_moment_when_its_held_call_breaks() -> None:
    known = made()
    said = member("a", 0)
    said.locks_queues = True
    seen(known, said)
    known.held("g", ("a", 1))
    assert not known.may_be_back("g", ("a", 1)), "it holds a call"
    assert not known.broke("g", ("a", 1), 60_000)
    assert known.may_be_back("g", ("a", 1))
    seen(known, member("b", 1, 2, 3), 60_001)
    assert seen(known, member("b", 0, 1, 2, 3), 60_002), "queue 0 has two owners"
    assert known.may_commit("g", ("a", 1), 0, [("T", 0)]) == []
    assert not seen(known, said, 60_003, rejoins=True), "as if nothing had happened"
    known.held("g", ("a", 1))
    known.held("g", ("a", 1))
    assert not known.broke("g", ("a", 1), 60_004)
    assert not known.may_be_back("g", ("a", 1)), "it holds another one"
    assert not known.broke("g", ("a", 1), 60_005)
    assert known.expire(85_004) == []
    assert known.expire(85_005) == [("g", ("a", 1))], "whatever the service does"
    assert not known.may_be_back("g", ("a", 1))
    assert not known.broke("g", ("a", 1), 85_006)


def test_a_member_that_calls_again_before_the_call_before_breaks_stays() -> None:
    known = made()
    seen(known, member("a"))
    known.held("g", ("a", 1))
    known.held("g", ("a", 1))
    assert not known.broke("g", ("a", 1), 5)
    assert names(known) == ["a"]


@pytest.mark.parametrize(("holds", "gone_after_ms"), [(True, 25_000), (False, 120_000)])
def test_who_does_not_call_again_is_gone_after_its_time(holds: bool, gone_after_ms: int) -> None:
    known = made()
    seen(known, member("a"), 1_000)
    if holds:
        known.held("g", ("a", 1))
        assert known.expire(1_000_000) == [], "as long as the call is held, it is there"
        known.answered("g", ("a", 1), 1_000)
    assert known.expire(1_000 + gone_after_ms - 1) == []
    assert known.expire(1_000 + gone_after_ms) == [("g", ("a", 1))]
    assert names(known) == []


class Groups(dict[str, Group]):
    """Counts how often somebody looks through all groups."""

    looks = 0

    def items(self) -> Any:
        self.looks += 1
        return super().items()


def test_members_at_rest_are_looked_through_only_when_one_may_be_gone() -> None:
    known = made()
    known._groups = groups = Groups()
    for name in ("held", "answered"):
        seen(known, member(name), 0)
        known.held("g", (name, 1))
    for now_ms in range(0, 150_000, 500):
        if not now_ms % 15_000:
            known.answered("g", ("answered", 1), now_ms)
            seen(known, member("answered"), now_ms)
            known.held("g", ("answered", 1))
        assert known.expire(now_ms) == []
    assert 0 < groups.looks <= 150_000 / 25_000
    known.answered("g", ("held", 1), 150_000)
    assert known.expire(175_000 - 1) == []
    assert known.expire(175_000) == [("g", ("held", 1))]


def test_one_that_expired_is_refused_if_another_has_its_queues_and_else_comes_back() -> None:
    known = made()
    seen(known, member("a", 0))
    seen(known, member("b"))
    known.expire(120_000)
    seen(known, member("b", 0), 120_000)
    with pytest.raises(ServiceError, match="Give them up") as raised:
        seen(known, member("a", 0), 120_001, rejoins=True)
    assert raised.value.reason == "MEMBER_UNKNOWN"
    assert seen(known, member("a"), 120_002, rejoins=True), "it has given them up"
    assert seen(known, member("c", 3), 120_003, rejoins=True), "nobody else has queue 3"


def test_one_that_expired_is_refused_if_another_had_its_queues_meanwhile_and_is_gone_too() -> None:
    known = made()
    seen(known, member("a", 0, 1))
    known.left("g", ("a", 1), 5)
    seen(known, member("b", 1), 6)
    known.left("g", ("b", 1), 7)
    assert known.find("g") is None
    with pytest.raises(ServiceError, match="Give them up"):
        seen(known, member("a", 0, 1), 8, rejoins=True)
    assert seen(known, member("a", 0), 9, rejoins=True), "queue 0 was nobody's"


def test_a_claim_that_came_too_late_takes_no_queue_from_an_owner_whose_connection_breaks_after_it() -> None:
    known = made()
    seen(known, member("a", 0))
    seen(known, member("b", 0), 1)
    seen(known, member("b"), 2)
    known.left("g", ("a", 1), 3)
    assert seen(known, member("a", 0), 4, rejoins=True)


def test_who_has_waited_for_an_owner_in_vain_and_took_its_queue_had_it() -> None:
    known = made()
    seen(known, member("a", 0))
    seen(known, member("b", 0), 60_000)
    known.left("g", ("a", 1), 60_001)
    known.left("g", ("b", 1), 60_002)
    with pytest.raises(ServiceError, match="Give them up"):
        seen(known, member("a", 0), 60_003, rejoins=True)


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_claim_costs_one_whose_connection_broke_none_of_its_other_queues(is_taken: bool) -> None:
    known = made()
    seen(known, member("b", 3))
    seen(known, member("a", 0, 1))
    seen(known, member("b"))
    known.left("g", ("a", 1), 1)
    if is_taken:
        seen(known, member("b", 3), 2)
    assert seen(known, member("a", 0, 1, 3), 3, rejoins=True), "it had never had queue 3, which it claims"
    assert known.taken("g", ("a", 1)) == ({"T": [3]} if is_taken else {})


def test_what_it_had_when_its_connection_broke_is_no_claim() -> None:
    known = made()
    seen(known, member("a", 0, 1))
    known.left("g", ("a", 1), 1)
    seen(known, member("b", 1), 2)
    for _ in range(2):
        with pytest.raises(ServiceError, match="Give them up"):
            seen(known, member("a", 0, 1, 3), 3, rejoins=True)
    assert seen(known, member("a", 0, 3), 4, rejoins=True)


def test_a_call_of_another_membership_than_the_one_that_ended_claims_nothing() -> None:
    known = made()
    said = member("a", 0)
    said.member_epoch = 2
    seen(known, said)
    known.left("g", ("a", 1), 1)
    seen(known, member("b", 1), 2)
    late = member("a", 1)
    late.member_epoch = 1
    with pytest.raises(ServiceError, match="Give them up"):
        seen(known, late, 3, rejoins=True)


def test_members_that_are_gone_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_OWNERS_MAX", 4)
    known = made()
    for name in ("a", "b"):
        seen(known, member(name, 0, 1))
        known.left("g", (name, 1), 1)
    seen(known, member("c", 3), 2)
    for name in ("a", "b"):
        if name == "a":  # Forgotten: all that it says counts as what it had.
            with pytest.raises(ServiceError, match="Give them up"):
                seen(known, member(name, 3), 3, rejoins=True)
        else:
            assert seen(known, member(name, 3), 3, rejoins=True)
    assert len(known._departed) <= 1


@pytest.mark.parametrize("how", ["settles", "new group", "slave", "names no membership", "is new", "has other queues", "in time"])
def test_one_that_comes_to_a_broker_that_started_again_is_refused_only_if_others_could_take_its_queues_in_order(how: str) -> None:
    known = made(() if how == "new group" else ("g",), takes_commits=how != "slave")
    said = member("a", 1 if how == "has other queues" else 0)
    said.member_epoch = int(how != "names no membership")

    def comes(now_ms: int) -> bool:
        return known.seen("g", said, "peer", now_ms, rejoins=False, was_known=how != "is new")

    if how == "in time":
        comes(1)
    seen(known, member("b", 0), 2)
    assert comes(2_999 if how == "settles" else 3_000) is (how != "in time")
    assert known.taken("g", ("a", 1)) == ({} if how == "has other queues" else {"T": [0]})


def test_one_that_comes_to_a_broker_that_started_again_when_that_has_settled_and_others_have_its_queues_is_refused() -> None:
    known = made(("g",))
    said = member("a", 0)
    said.member_epoch = 1
    seen(known, member("b", 0), 3_000)
    with pytest.raises(ServiceError, match="Give them up"):
        known.seen("g", said, "peer", 3_000, rejoins=False, was_known=True)


def test_one_that_comes_to_a_broker_that_started_again_is_refused_though_the_next_owner_has_left() -> None:
    known = made(("g",))
    said = member("a", 0)
    said.member_epoch = 1
    seen(known, member("b", 0), 3_000)
    known.left("g", ("b", 1), 3_001)
    with pytest.raises(ServiceError, match="Give them up"):
        known.seen("g", said, "peer", 3_002, rejoins=False, was_known=True)
    said = member("a", 1)
    said.member_epoch = 1
    assert known.seen("g", said, "peer", 3_003, rejoins=False, was_known=True), "queue 1 was nobody's"


def test_free_queues_whose_last_owner_is_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_OWNERS_MAX", 2)
    known = made()
    for first in range(4):
        seen(known, member("b", *range(first, 4)))
    known.left("g", ("b", 1), 1)
    assert seen(known, member("a", 0, 1), 2, rejoins=True), "forgotten"
    with pytest.raises(ServiceError):
        seen(known, member("c", 2), 3, rejoins=True)


def test_members_of_one_name_are_two() -> None:
    known = made()
    seen(known, member("a", nonce=1))
    assert seen(known, member("a", nonce=2))
    assert names(known) == ["a", "a"]


def test_lists_settle_after_a_start_for_groups_that_were_there_before() -> None:
    known = made(("g",))
    assert known.settling_ms("g", 1_000) == 2_000
    assert known.settling_ms("g", 4_000) == 0
    assert known.settling_ms("new", 1_000) == 0


def test_at_a_slave_a_list_settles_when_the_first_member_comes_whenever_that_is() -> None:
    known = made(takes_commits=False)
    assert known.settling_ms("g", 60_000) == 0, "nobody is there, and nobody is waited for"
    seen(known, member("a", 0), 60_000)
    assert known.settling_ms("g", 60_000) == 3_000
    seen(known, member("b", 1), 62_000)
    assert known.settling_ms("g", 62_000) == 1_000
    assert known.settling_ms("g", 63_000) == 0
    assert known.ownerless_ms_upto(63_500) == 2 * 500
    known.left("g", ("a", 1), 64_000)
    assert known.settling_ms("g", 64_000) == 0
    known.left("g", ("b", 1), 64_000)
    seen(known, member("a", 0), 90_000)
    assert known.settling_ms("g", 91_000) == 2_000, "the master was back, and is away again"


def test_ownerless_time_counts_free_queues_from_the_end_of_the_settling_on() -> None:
    known = made(("g",))
    seen(known, member("a"), 1_000)
    seen(known, member("a", 0, 1), 5_000)
    assert known.ownerless_ms == QUEUES * 2_000
    assert known.ownerless_ms_upto(6_000) == QUEUES * 2_000 + 2 * 1_000


def test_members_and_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 2)
    monkeypatch.setattr(module, "GROUPS_MAX", 1)
    known = made()
    seen(known, member("a"))
    seen(known, member("b"))
    with pytest.raises(ServiceError, match="2 members") as raised:
        seen(known, member("c"))
    assert raised.value.reason == "TOO_MANY"
    with pytest.raises(ServiceError, match="1 groups"):
        known.seen("other", member("a"), "peer", 0, rejoins=False)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (GroupMember(nonce=1), "client_id: is missing"),
        (GroupMember(client_id="x" * 256, nonce=1), "client_id: has more than 255"),
        (GroupMember(client_id="x"), "nonce"),
        (GroupMember(client_id="x", nonce=1, topics=[MemberTopic()]), "a topic without a name"),
        (GroupMember(client_id="x", nonce=1, topics=[MemberTopic(topic="T")] * 2), "a topic twice"),
        (GroupMember(client_id="x", nonce=1, topics=[MemberTopic(topic="T", queue_ids=[-1])]), "below 0"),
        (GroupMember(client_id="x", nonce=1, topics=[MemberTopic(topic="T", queue_ids=range(16_385))]), "16384"),
        (GroupMember(client_id="x", nonce=1, topics=[MemberTopic(topic="T", filter="f" * 8_193)]), "filter"),
        (GroupMember(client_id="x", nonce=1, topics=[MemberTopic(topic=f"T{i}") for i in range(257)]), "256"),
    ],
)
def test_a_member_that_says_nonsense_is_refused(said: GroupMember, text: str) -> None:
    with pytest.raises(ServiceError, match=text) as raised:
        check_member(said)
    assert raised.value.reason == "INVALID_ARGUMENT"


def test_who_consumes_the_retries_already_is_no_other_member_for_it() -> None:
    early, late = member("a"), member("b")
    early.topics.add(topic="%RETRY%g")
    assert difference(early, [late]) == difference(late, [early]) == ""


def test_a_difference_is_named() -> None:
    one = member("a", wanted="tags X")
    assert difference(one, [one, member("b", wanted="tags X")]) == ""
    assert difference(one, [member("b")]) == "b wants all messages of T, a tags X"
    assert difference(one, [member("b", topic="U")]) == "b does not consume T, a does"
    assert difference(member("a", topic="U"), [member("b")]) == "b consumes T, a does not"
    circle = member("b", wanted="tags X")
    circle.allocation = "circle"
    assert difference(one, [circle]) == "b shares queues out by 'circle', a by 'average'"


def test_who_locks_its_queues_differs_from_who_does_not_and_from_nobody_who_does_not_say() -> None:
    locking, free, silent = member("a"), member("b"), member("c")
    locking.locks_queues, free.locks_queues = True, False
    text = "a locks its queues, as orderly consumers do, b does not, so what it has of the group's queues is in no order"
    assert difference(locking, [silent, free]) == difference(free, [silent, locking]) == text
    assert difference(silent, [locking, free]) == difference(locking, [silent]) == difference(free, [silent]) == ""
    known = made()
    for said in (locking, free):
        seen(known, said)
    group = known.find("g")
    assert group is not None
    assert not group.are_alike


def test_groups_that_consume_a_topic_hear_of_its_route_and_others_do_not() -> None:
    known = made()
    for topic in "TU":
        known.seen(topic, member("m", topic=topic), "peer", 0, rejoins=False)
    groups = dict(known.groups())
    before = {name: group.version for name, group in groups.items()}
    counts = [known.route_changes(topic) for topic in "TU"]
    assert known.routes_changed(["T", "of somebody else"]) == ["T"]
    assert groups["T"].version > before["T"]
    assert groups["U"].version == before["U"]
    assert known.routes_changed(None) == ["T", "U"]
    assert [known.route_changes(topic) for topic in "TU"] == [counts[0] + 2, counts[1] + 1]
    known.left("T", ("m", 1), 0)
    assert known.routes_changed(None) == ["U"]


def test_who_comes_back_after_nobody_has_consumed_a_topic_hears_that_its_route_may_be_another_one() -> None:
    known = made()
    numbers = set()
    for _ in range(3):
        known.seen("T", member("m", topic="T"), "peer", 0, rejoins=False)
        numbers.add(known.route_changes("T"))
        known.left("T", ("m", 1), 0)
        known.routes_changed(["T"])
    assert len(numbers) == 3


class Owners(dict[tuple[str, int], int]):
    """Counts how often somebody looks whether a queue has an owner."""

    looks = 0

    def __contains__(self, queue: object) -> bool:
        self.looks += 1
        return super().__contains__(queue)


def test_only_groups_that_consume_a_changed_topic_are_counted_again() -> None:
    counts = defaultdict(int, T=4, U=4)
    known = made()
    known.queue_count = counts.__getitem__
    owners = {}
    for topic in "TU":
        known.seen(topic, member("m", 0, topic=topic), "peer", 0, rejoins=False)
        group = known.find(topic)
        assert group is not None
        owners[topic] = group.owners = Owners(group.owners)
    counts["of somebody else"] = 1_000
    assert known.topics_changed(0) == []
    assert (owners["T"].looks, owners["U"].looks) == (0, 0)
    counts["T"] = 6
    assert known.topics_changed(0) == ["T"]
    assert (owners["T"].looks, owners["U"].looks) == (2, 0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("TUV"), st.integers(0, 5)),
            st.tuples(
                st.sampled_from("gh"),
                st.sampled_from("ab"),
                # Without topics: it leaves.
                st.dictionaries(st.sampled_from("TUV"), st.frozensets(st.integers(0, 6), max_size=3)),
            ),
        ),
        max_size=30,
    )
)
def test_free_queues_are_what_a_count_of_all_groups_gives_after_each_change_of_topics(
    steps: list[tuple[str, int] | tuple[str, str, dict[str, frozenset[int]]]],
) -> None:
    counts = defaultdict(int, T=2, U=3)
    known = made()
    known.queue_count = counts.__getitem__
    for step in steps:
        if len(step) == 2:
            is_change, counts[step[0]] = counts[step[0]] != step[1], step[1]
            changed = known.topics_changed(0)
            assert sorted(changed) == sorted(name for name, group in known.groups() if is_change and group.consumers[step[0]])
        else:
            name, client, wanted = step
            if not wanted:
                known.left(name, (client, 1), 0)
            else:
                topics = [MemberTopic(topic=topic, queue_ids=sorted(ids)) for topic, ids in wanted.items()]
                known.seen(name, GroupMember(client_id=client, nonce=1, topics=topics), "peer", 0, rejoins=False)
        for _, group in known.groups():
            free = [(topic, i) for topic in group.consumers for i in range(counts[topic]) if (topic, i) not in group.owners]
            assert group.ownerless_queues == len(free)


class Members(RuleBasedStateMachine):
    """Whatever members do: owners are those of the members that are there, and no news are kept from anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.known = made()
        self.now_ms = 0
        self.queues: dict[MemberKey, frozenset[int]] = {}
        self.version = 0

    def _free_or_double(self) -> set[tuple[int, bool]]:
        counts = [sum(i in queues for queues in self.queues.values()) for i in range(QUEUES)]
        return {(i, count > 1) for i, count in enumerate(counts) if count != 1}

    def _after(self, before: tuple[set[MemberKey], set[tuple[int, bool]]]) -> None:
        group = self.known.find("g")
        if group is None:
            return
        version = group.version
        gone = before[0] != set(self.queues)
        worse = self._free_or_double() - before[1]
        assert version >= self.version
        if gone or worse:
            assert version > self.version, "news that nobody is told of"
        self.version = version

    @rule(name=st.sampled_from("abc"), queues=st.frozensets(st.integers(0, QUEUES - 1)))
    def calls(self, name: str, queues: frozenset[int]) -> None:
        before = set(self.queues), self._free_or_double()
        seen(self.known, member(name, *sorted(queues)), self.now_ms)
        self.queues[name, 1] = queues
        self._after(before)

    @rule(name=st.sampled_from("abc"))
    def leaves(self, name: str) -> None:
        before = set(self.queues), self._free_or_double()
        was_there = (name, 1) in self.queues
        assert self.known.left("g", (name, 1), self.now_ms) is was_there
        self.queues.pop((name, 1), None)
        self._after(before)

    @rule()
    def time_passes(self) -> None:
        before = set(self.queues), self._free_or_double()
        self.now_ms += 60_000
        self.known.expire(self.now_ms)
        group = self.known.find("g")
        there = set(group.members) if group is not None else set()
        self.queues = {key: queues for key, queues in self.queues.items() if key in there}
        self._after(before)

    @invariant()
    def owners_are_those_of_members(self) -> None:
        group = self.known.find("g")
        assert (group is None) is (not self.queues)
        if group is None:
            return
        counts = {i: sum(i in queues for queues in self.queues.values()) for i in range(QUEUES)}
        assert group.owners == {("T", i): count for i, count in counts.items() if count}
        assert group.ownerless_queues == sum(not count for count in counts.values())


Members.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMembers = Members.TestCase
