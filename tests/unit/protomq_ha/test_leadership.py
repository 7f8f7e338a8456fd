"""Leadership against etcd as a model, without a network: each request is answered at once, late or never, as a test says."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from random import Random
from unittest import mock

import pytest

from protomq_ha.cluster_state import (
    ELECTION,
    IN_SYNC,
    MASTER,
    ORDER,
    PROMOTE_UNCLEAN,
    SWITCH,
    LogEnd,
    MemberName,
    Put,
    Transaction,
    encode_election,
    encode_end,
    encode_in_sync,
    encode_master,
    encode_order,
)
from protomq_ha.in_sync_set import MemberReport
from protomq_ha.leadership import FULL_PAUSE_MS, LONGER_LOG_WAIT_MS, Leadership
from protomq_ha.leadership_values import (
    Ask,
    Committed,
    CutSettled,
    Effect,
    ElectionKnown,
    Follow,
    Lead,
    NoteStart,
    ReadCluster,
    Request,
    Result,
    Role,
    Settings,
    StopFollowing,
    StopLeading,
    TailSettled,
)
from tests.chaos.leadership_etcd import SimEtcd

TTL_MS = 3_000
PROCESSES = count(1)


class Member:
    """A machine, and what it wanted. Attribute: answers: etcd answers it."""

    def __init__(
        self, etcd: SimEtcd, name: str, now_ms: int = 0, *, epoch: int = 0, empty: bool = True, lost: bool = False, wait_ms: int = 0,
        cut_end: LogEnd | None = None, broker_id: int = 7, new_election: int = 0, start_number: int | None = None, place: str = "",
    ) -> None:
        """`start_number`: in its folder; None: that of etcd. `place`: of its folder; without it, those before are over."""
        self.etcd, self.answers = etcd, True
        self.readings = 0
        self.asks: list[Ask] = []
        self.wants: list[Effect] = []
        self.notes: list[NoteStart] = []
        self.folder_takes_numbers = True
        known = etcd.view.starts.get(name)
        self.start_number = (known.number if known is not None else 0) if start_number is None else start_number
        settings = Settings(
            name, f"{name}:1", new_name_wait_ms=wait_ms, broker_id=broker_id, new_election=new_election,
            process=f"process {next(PROCESSES)}", place=place,
        )  # fmt: skip
        self.machine = Leadership(
            settings, epoch, now_ms, log_is_empty=empty, tail_may_be_lost=lost, cut_end=cut_end, start_number=self.start_number,
        )  # fmt: skip

    def run(self, effects: list[Effect], now_ms: int) -> None:
        for effect in effects:
            if isinstance(effect, NoteStart):
                self.notes.append(effect)
                if self.folder_takes_numbers:
                    self.start_number = effect.number
                self.run(self.machine.start_noted(self.start_number, now_ms), now_ms)
            elif not isinstance(effect, Ask):
                self.wants.append(effect)
            elif self.answers:
                self.readings += isinstance(effect.request, ReadCluster)
                result = self.etcd.do(effect.request, now_ms)
                self.run(self.machine.answered(effect.number, result, now_ms), now_ms)
            else:
                self.asks.append(effect)

    def tick(self, now_ms: int) -> list[Effect]:
        """What it wants now."""
        self.etcd.expire(now_ms)
        self.run(self.machine.tick(now_ms), now_ms)
        wants, self.wants = self.wants, []
        return wants

    def report(self, end: int, reports: dict[str, MemberReport], now_ms: int) -> None:
        self.run(self.machine.report(end, reports, now_ms), now_ms)

    def lead(self, now_ms: int, end: int = 0) -> int:
        """From following to leading; the epoch."""
        assert self.tick(now_ms) == [StopFollowing()]
        self.run(self.machine.following_stopped(self.machine.own_epoch, now_ms), now_ms)
        (lead,) = self.tick(now_ms)
        assert isinstance(lead, Lead)
        self.run(self.machine.opened(lead.epoch, end, now_ms), now_ms)
        assert self.machine.role is Role.LEADING
        return lead.epoch

    def members(self) -> set[str]:
        in_sync = self.etcd.view.in_sync
        return set(in_sync.members) if in_sync is not None else set()


class PromptEtcd(SimEtcd):
    """Its leases end when they are due."""

    def __init__(self) -> None:
        super().__init__(Random(0))
        self.rng.uniform = lambda a, b: 0.0  # type: ignore[method-assign]


@pytest.fixture
def etcd() -> SimEtcd:
    return PromptEtcd()


def master_with(etcd: SimEtcd, *slaves: str, now_ms: int = 0, master: type[Member] = Member) -> Member:
    """A master whose set has these slaves too."""
    leader = master(etcd, "m", now_ms)
    leader.lead(now_ms)
    reports = {slave: MemberReport(0, True, now_ms) for slave in slaves}
    leader.report(0, reports, now_ms)
    assert leader.members() == {"m", *slaves}
    return leader


def test_the_first_one_to_come_leads_and_the_second_one_follows_it(etcd: SimEtcd) -> None:
    first, second = Member(etcd, "a"), Member(etcd, "b")
    assert first.lead(0) == 1
    assert second.tick(0) == [Follow("a", "a:1", 1)]
    assert second.tick(300) == [], "it is told once"
    assert first.members() == {"a"}


def test_a_log_with_messages_and_an_etcd_without_a_set_need_an_order(etcd: SimEtcd) -> None:
    member = Member(etcd, "a", epoch=4, empty=False)
    assert member.tick(0) == []
    assert "order its unclean promotion" in member.machine.problems(0)[0]
    assert etcd.view.in_sync is not None
    assert (member.members(), etcd.view.in_sync.epoch) == (set(), 4), "nobody else leads by itself"
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "a")),)))
    assert member.lead(300) == 5
    assert etcd.view.order is None
    assert member.machine.problems(300) == []


def test_a_member_takes_over_when_lease_and_promise_are_over(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    slave = Member(etcd, "s")
    assert slave.tick(0) == [Follow("m", "m:1", 1)]
    assert slave.machine.may_speak
    slave.machine.heard(1_000)
    for now_ms in range(0, 4_000, 100):
        assert slave.tick(now_ms) == [], now_ms
    assert slave.lead(4_000) == 2
    assert not slave.machine.may_speak
    assert slave.members() == {"s"}, "the master whose lease ran out is not waited for"


def test_the_master_whose_lease_ran_out_is_out_of_the_set_with_the_election(etcd: SimEtcd) -> None:
    master_with(etcd, "s", "t")
    slave = Member(etcd, "s")
    times_ms = iter(range(0, 5_000, 100))
    now_ms = next(at_ms for at_ms in times_ms if slave.tick(at_ms) == [StopFollowing()])
    slave.run(slave.machine.following_stopped(1, now_ms), now_ms)
    assert slave.machine.role is Role.OPENING
    assert slave.members() == {"s", "t"}, "no send of the new master waits for another transaction"


def test_etcd_is_looked_at_more_often_while_nobody_is_heard_of(etcd: SimEtcd) -> None:
    def looks(first_ms: int, end_ms: int) -> int:
        before = slave.readings
        for now_ms in range(first_ms, end_ms, 50):
            slave.tick(now_ms)
        return slave.readings - before

    master = master_with(etcd, "s")
    slave = Member(etcd, "s")
    slave.machine.heard(1_500)
    assert looks(0, 1_500) == 5
    for now_ms in range(1_500, 6_000, 500):
        master.tick(now_ms)
    assert looks(4_500, 6_000) == 30, "its master is silent for longer than a lease"
    slave.machine.heard(6_000)
    assert looks(6_000, 7_500) <= 6
    etcd.commit(Transaction((), (Put(ORDER, encode_order(SWITCH, "s")),)))
    assert looks(7_500, 9_000) >= 13, "it may have to lead soon"


def test_who_finds_nobody_to_lead_for_a_minute_looks_less_often(etcd: SimEtcd) -> None:
    member = Member(etcd, "a", epoch=4, empty=False)
    for at_ms, looks in ((30_000, 20), (91_000, 4)):
        member.tick(at_ms - 300)
        before = member.readings
        for now_ms in range(at_ms, at_ms + 1_000, 50):
            member.tick(now_ms)
        assert member.readings - before <= looks
    assert not member.machine.is_hurried(92_500)
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "a")),)))
    assert member.lead(92_500) == 5


def test_who_hears_nothing_of_a_master_that_etcd_knows_looks_less_often_after_a_minute(etcd: SimEtcd) -> None:
    """A slave that refuses to follow it, for instance."""
    master = master_with(etcd, "s")
    slave = Member(etcd, "s")
    for now_ms in range(0, 70_000, 500):
        master.tick(now_ms)
        slave.tick(now_ms)
    assert not slave.machine.is_hurried(70_000)
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "gone")),)))
    slave.tick(70_000)
    slave.tick(70_500)
    assert slave.machine.is_hurried(71_000)
    assert not slave.machine.is_hurried(140_000), "the order stands, and nobody carries it out"


def silent_slaves(etcd: SimEtcd, *ends: int) -> list[Member]:
    """Slaves of a master whose logs end there, and that has been silent for two seconds."""
    names = [f"s{number}" for number in range(len(ends))]
    master_with(etcd, *names)
    slaves = [Member(etcd, name, epoch=1, empty=False) for name in names]
    for slave, end in zip(slaves, ends, strict=True):
        slave.machine.followed(1, False, LogEnd(1, end))
        slave.tick(0)
        slave.machine.heard(0)
        slave.tick(2_000)
    return slaves


def test_whoever_has_more_of_the_log_runs_first_so_that_nobody_has_to_truncate_it(etcd: SimEtcd) -> None:
    shorter, longer = silent_slaves(etcd, 500, 700)
    assert etcd.view.ends == {"s0": LogEnd(1, 500), "s1": LogEnd(1, 700)}
    assert shorter.tick(TTL_MS + 100) == []
    assert longer.lead(TTL_MS + 100, 700) == 2
    assert shorter.tick(TTL_MS + 200) == [Follow("s1", "s1:1", 2)]


def test_whoever_has_less_of_the_log_runs_if_the_other_does_not(etcd: SimEtcd) -> None:
    shorter, _ = silent_slaves(etcd, 500, 700)
    for now_ms in range(TTL_MS, TTL_MS + 500, 50):
        assert shorter.tick(now_ms) == [], now_ms
    assert shorter.lead(TTL_MS + 550) == 2, "it has all that was acknowledged"


def test_who_died_with_its_master_keeps_the_next_one_waiting_for_a_moment_only(etcd: SimEtcd) -> None:
    """It has not said where its log ends. Who has said that is there, and gets the whole time to appear."""
    master_with(etcd, "s0", "s1", "dead")
    heir, late = (Member(etcd, name, epoch=1, empty=False) for name in ("s0", "s1"))
    for slave in (heir, late):
        slave.tick(0)
        slave.tick(2_000)
    heir.lead(TTL_MS)
    heir.report(0, {}, TTL_MS + 800)
    assert heir.members() == {"s0", "s1", "dead"}, "it may have heard its master a moment ago"
    heir.report(0, {}, TTL_MS + 950)
    assert heir.members() == {"s0", "s1"}
    heir.report(0, {}, TTL_MS + 2_900)
    assert heir.members() == {"s0", "s1"}
    heir.report(0, {}, 2 * TTL_MS)
    assert heir.members() == {"s0"}


def test_who_is_silent_at_a_switch_has_not_died_with_a_master(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s", "t")
    heir = Member(etcd, "s", epoch=1, empty=False)
    heir.tick(0)
    etcd.commit(Transaction((), (Put(ORDER, encode_order(SWITCH, "s")),)))
    for now_ms in (300, 400, 500):
        master.report(0, {"s": MemberReport(0, True, now_ms)}, now_ms)
    heir.lead(700)
    heir.report(0, {}, 2_700)
    assert "t" in heir.members()


def test_nobody_waits_for_a_longer_log_from_outside_the_set_or_for_one_that_ends_there(etcd: SimEtcd) -> None:
    first, second = silent_slaves(etcd, 700, 700)
    stranger = Put("end/x", encode_end(LogEnd(9, 900)))
    etcd.commit(Transaction((), (stranger,)))
    assert second.tick(TTL_MS) == [StopFollowing()]
    assert first.tick(TTL_MS) == [StopFollowing()]


def test_an_end_that_etcd_does_not_take_is_not_told_again_at_once(etcd: SimEtcd) -> None:
    """It does not know the lease any more."""
    slave, _ = silent_slaves(etcd, 700, 700)
    before, etcd.leases = slave.readings, {}
    slave.machine.followed(1, False, LogEnd(1, 800))
    for now_ms in range(2_000, 2_250, 10):
        slave.tick(now_ms)
    assert slave.readings - before <= 6


def test_a_slave_that_hears_its_master_does_not_tell_where_its_log_ends(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s")
    slave = Member(etcd, "s", epoch=1, empty=False)
    for now_ms in range(0, 10_000, 100):
        master.tick(now_ms)
        slave.machine.heard(now_ms)
        slave.tick(now_ms)
    assert etcd.view.ends == {}


def test_to_tell_where_the_log_ends_is_not_to_leave_the_set(etcd: SimEtcd) -> None:
    """The log fails while the word is on its way: what it answers must not count as the farewell."""
    master_with(etcd, "s")
    slave = Member(etcd, "s", epoch=1, empty=False)
    slave.tick(0)
    slave.tick(1_400)
    slave.answers = False
    slave.run(slave.machine.tick(1_800), 1_800)
    (ask,) = (each for each in slave.asks if isinstance(each.request, Transaction))
    assert [put.key for put in ask.request.puts] == ["end/s"]  # type: ignore[union-attr]
    slave.machine.tail_may_be_lost()
    slave.answers = True
    slave.run(slave.machine.answered(ask.number, etcd.do(ask.request, 1_850), 1_850), 1_850)
    slave.tick(2_200)
    assert slave.members() == {"m"}


def test_a_member_with_a_damaged_log_leaves_the_set_to_the_others_and_does_not_run(etcd: SimEtcd) -> None:
    """It does not know which offsets it has given: another member of the set does."""
    master_with(etcd, "s", "t")
    damaged = Member(etcd, "s", epoch=1, empty=False)
    damaged.machine.is_damaged = True
    damaged.tick(0)
    assert damaged.members() == {"m", "t"}
    assert any("skipped damaged parts" in problem for problem in damaged.machine.problems(0))
    for now_ms in range(0, 20_000, 500):
        assert StopFollowing() not in damaged.tick(now_ms)
    damaged.machine.is_damaged = False
    heir = Member(etcd, "t", 20_000, epoch=1, empty=False)
    assert heir.tick(20_000) == []
    assert heir.tick(22_000) == []
    assert heir.lead(23_000) == 2


def test_a_member_with_a_damaged_log_does_not_run_before_it_has_left(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    damaged = Member(etcd, "s", epoch=1, empty=False)
    damaged.machine.is_damaged = True
    for now_ms in range(0, 20_000, 500):
        with mock.patch.object(Leadership, "_leave_to_others"):
            assert StopFollowing() not in damaged.tick(now_ms)
    assert damaged.members() == {"m", "s"}


def test_the_last_member_of_the_set_leads_with_its_damaged_log(etcd: SimEtcd) -> None:
    """Nobody has more."""
    alone = Member(etcd, "a")
    alone.lead(0)
    again = Member(etcd, "a", 10_000, epoch=1, empty=False)
    again.machine.is_damaged = True
    assert again.lead(10_000) == 2
    assert again.members() == {"a"}


def cut_member(etcd: SimEtcd, name: str, end: int, now_ms: int = 0, *, epoch: int = 1) -> Member:
    """It has just started, and its start has cut the end of its log."""
    return Member(etcd, name, now_ms, epoch=1, empty=False, cut_end=LogEnd(epoch, end, is_cut=True))


def test_a_member_whose_log_was_cut_stays_in_the_set_and_may_run_when_it_has_caught_up(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    slave = cut_member(etcd, "s", 500)
    assert "has cut the end of the log" in slave.machine.problems(0)[0]
    assert slave.tick(0) == [Follow("m", "m:1", 1)]
    slave.machine.heard(0)
    slave.machine.followed(1, False, LogEnd(1, 600))
    assert slave.members() == {"m", "s"}, "the master that etcd names may be dead, and have lost more"
    assert slave.machine.caught_up() == [CutSettled()]
    assert slave.machine.caught_up() == []
    assert slave.machine.problems(300) == []
    for now_ms in range(300, TTL_MS, 300):
        assert slave.tick(now_ms) == []
    assert slave.lead(2 * TTL_MS) == 2


def test_a_member_that_has_told_where_its_cut_log_ends_says_nothing_before_the_set_is_written_again(etcd: SimEtcd) -> None:
    """Others count on that end: nothing behind it is acknowledged on its word."""
    master = master_with(etcd, "s", "t")
    slave = cut_member(etcd, "s", 500)
    slave.tick(0)
    slave.machine.followed(1, False, LogEnd(1, 600))
    for now_ms in range(0, 5_000, 100):
        slave.tick(now_ms)
        assert slave.machine.may_speak is ("s" not in etcd.view.ends), now_ms
    assert etcd.view.ends == {"s": LogEnd(1, 600, is_cut=True)}
    master.tick(5_000)
    master.tick(5_100)
    slave.tick(5_300)
    assert etcd.view.master is not None, "it is back"
    assert slave.machine.may_speak


def test_a_member_whose_log_was_cut_does_not_run_while_another_one_may_have_more(etcd: SimEtcd) -> None:
    """As if damage of acknowledged messages had looked like a torn write: the other one was down, too, and comes back later."""
    master_with(etcd, "s", "t")
    cut = cut_member(etcd, "s", 500, 4_000)
    for now_ms in range(4_000, 20_000, 100):
        assert cut.tick(now_ms) == [], now_ms
    assert cut.members() == {"m", "s", "t"}
    (problem,) = cut.machine.problems(20_000)
    assert "It waits for broker_id 7 at m:1 (store m), store t." in problem, "t has never run here"
    assert "protomq ha promote --unclean" in problem
    whole = Member(etcd, "t", 20_000, epoch=1, empty=False)
    for now_ms in range(20_000, 20_000 + TTL_MS, 100):
        assert cut.tick(now_ms) == []
        assert whole.tick(now_ms) == [], now_ms
    assert whole.lead(20_000 + TTL_MS) == 2, "it does not wait for the one that has cut its log"
    assert Follow("t", "t:1", 2) in cut.tick(20_400 + TTL_MS)


def test_a_member_whose_log_was_cut_does_not_even_go_on_with_a_lead_that_etcd_still_has(etcd: SimEtcd) -> None:
    """Its process was killed as the master's, and is back before its lease has run out."""
    master_with(etcd, "s")
    master = cut_member(etcd, "m", 500, 500)
    for now_ms in range(500, 8_000, 100):
        assert StopFollowing() not in master.tick(now_ms), now_ms
    heir = Member(etcd, "s", 8_000, epoch=1, empty=False)
    heir.tick(8_000)
    assert heir.lead(8_000 + TTL_MS) == 2


def test_the_last_member_of_the_set_leads_with_a_log_that_was_cut_and_says_so(etcd: SimEtcd) -> None:
    Member(etcd, "a").lead(0)
    again = cut_member(etcd, "a", 500, 10_000)
    assert again.tick(10_000) == [StopFollowing()]
    again.run(again.machine.following_stopped(1, 10_000), 10_000)
    assert again.tick(10_000) == [CutSettled(), Lead(2)]
    again.run(again.machine.opened(2, 500, 10_000), 10_000)
    assert again.machine.leads_with_cut_log
    assert any("although its start has cut the end" in problem for problem in again.machine.problems(10_000))
    third = Member(etcd, "a", 20_000, epoch=2, empty=False)
    third.lead(20_000)
    assert third.machine.problems(20_000) == []


@pytest.mark.parametrize(("first", "second", "heir"), [
    (LogEnd(1, 500), LogEnd(1, 700), "t"), (LogEnd(2, 500), LogEnd(1, 700), "s"), (LogEnd(1, 500), LogEnd(1, 500), "t"),
])  # fmt: skip
def test_if_all_logs_were_cut_the_one_with_the_most_of_the_log_leads(etcd: SimEtcd, first: LogEnd, second: LogEnd, heir: str) -> None:
    """One of them lacks nothing. Whoever has as much as it, or more, lacks nothing either."""
    master_with(etcd, "s", "t")
    etcd.commit(Transaction((), (Put(IN_SYNC, encode_in_sync(2, frozenset({"s", "t"}), unclean_epoch=0)),)))
    members = {
        name: cut_member(etcd, name, end.position, 4_000, epoch=end.epoch) for name, end in (("s", first), ("t", second))
    }
    for now_ms in range(4_000, 4_000 + TTL_MS, 100):
        for member in members.values():
            assert member.tick(now_ms) == [], now_ms
    led_ms = 4_000 + TTL_MS
    other = next(name for name in members if name != heir)
    assert members[other].tick(led_ms) == []
    members[heir].tick(led_ms)
    assert members[heir].machine.role is Role.STOPPING
    members[heir].run(members[heir].machine.following_stopped(2, led_ms), led_ms)
    assert members[heir].machine.role is Role.OPENING
    wants = members[other].tick(led_ms + 300)
    assert [type(effect) for effect in wants] == [Follow]
    assert members[other].members() == {"s", "t"}


def test_an_end_of_a_cut_log_counts_only_behind_the_last_change_of_the_set(etcd: SimEtcd) -> None:
    """What was told before may be of a log that has grown since."""
    master_with(etcd, "s", "t")
    etcd.commit(Transaction((), (Put("end/t", encode_end(LogEnd(1, 400, is_cut=True))),)))
    etcd.commit(Transaction((), (Put(IN_SYNC, encode_in_sync(1, frozenset({"s", "t"}), unclean_epoch=0)),)))
    first = cut_member(etcd, "s", 500, 4_000)
    for now_ms in range(4_000, 10_000, 100):
        assert first.tick(now_ms) == [], now_ms
    etcd.commit(Transaction((), (Put("end/t", encode_end(LogEnd(1, 400, is_cut=True))),)))
    assert first.tick(10_500) == [StopFollowing()]


def test_the_end_of_a_cut_log_is_told_again_behind_a_change_of_the_set_and_never_to_a_master(etcd: SimEtcd) -> None:
    master_with(etcd, "s", "t")
    etcd.commit(Transaction((), (Put(IN_SYNC, encode_in_sync(1, frozenset({"m", "s", "t"}), unclean_epoch=0)),)))
    cut = cut_member(etcd, "s", 500, 4_000)
    for now_ms in range(4_000, 6_000, 100):
        cut.tick(now_ms)
    assert etcd.view.ends == {"s": LogEnd(1, 500, is_cut=True)}
    etcd.commit(Transaction((), (Put(IN_SYNC, encode_in_sync(1, frozenset({"s", "t"}), unclean_epoch=0)),)))
    for now_ms in range(6_000, 7_000, 100):
        cut.tick(now_ms)
    assert etcd.view.key_revision("end/s") > etcd.view.key_revision(IN_SYNC)
    etcd.commit(Transaction((), (Put(MASTER, encode_master("t", 2, "t:1")),)))
    cut.answers = False
    for now_ms in range(7_000, 9_000, 100):
        cut.tick(now_ms)
    told = [put.key for ask in cut.asks if isinstance(ask.request, Transaction) for put in ask.request.puts]
    assert "end/s" not in told


def test_members_of_the_set_are_known_by_name_and_stay_so_when_they_are_taken_out_of_it(etcd: SimEtcd) -> None:
    """As that broker, and at the address, that they have now. Who never was a member is not known."""
    master = master_with(etcd, "s", "t")
    slave, outsider = Member(etcd, "s", 0, broker_id=2), Member(etcd, "u", 0)
    for now_ms in range(0, 1_000, 300):
        for member in (slave, outsider):
            member.tick(now_ms)
        master.report(0, {"s": MemberReport(0, True, now_ms)}, now_ms)
    assert etcd.view.names == {"m": MemberName(7, "m:1"), "s": MemberName(2, "s:1")}
    moved = Member(etcd, "s", 1_000, broker_id=3)
    moved.tick(1_000)
    assert etcd.view.names["s"] == MemberName(3, "s:1")
    for now_ms in range(1_000, 9_000, 300):
        master.report(0, {}, now_ms)
    assert master.members() == {"m"}
    assert etcd.view.names == {"m": MemberName(7, "m:1"), "s": MemberName(3, "s:1")}


def test_who_leaves_the_set_by_itself_is_known_by_name_still(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    slave = Member(etcd, "s", epoch=1, empty=False)
    slave.tick(0)
    assert "s" in etcd.view.names
    slave.machine.tail_may_be_lost()
    slave.tick(300)
    assert "s" not in slave.members()
    slave.tick(5_000)
    assert "s" in etcd.view.names


def test_a_master_that_is_gone_is_known_by_name_until_another_store_of_its_broker_is_a_member(etcd: SimEtcd) -> None:
    master_with(etcd, "s").tick(300)
    slave = Member(etcd, "s", 300, broker_id=2)
    slave.tick(300)
    assert etcd.view.names.keys() == {"m", "s"}
    assert slave.lead(300 + TTL_MS) == 2
    assert slave.members() == {"s"}
    assert etcd.view.names.keys() == {"m", "s"}
    now_ms = 2 * TTL_MS
    emptied = Member(etcd, "n", now_ms, broker_id=7)
    emptied.tick(now_ms)
    assert etcd.view.names.keys() == {"m", "s"}, "it may never get so far"
    slave.report(0, {"n": MemberReport(0, True, now_ms)}, now_ms)
    emptied.tick(now_ms + 300)
    assert slave.members() == {"s", "n"}
    assert etcd.view.names == {"n": MemberName(7, "n:1"), "s": MemberName(2, "s:1")}


def test_a_member_of_the_set_keeps_its_name_though_another_one_has_its_broker_id(etcd: SimEtcd) -> None:
    """By a mistake in their files. Each of them may have what was acknowledged."""
    master_with(etcd, "s")
    slave = Member(etcd, "s", broker_id=7)
    slave.tick(0)
    assert slave.members() == {"m", "s"}
    assert etcd.view.names.keys() == {"m", "s"}


def test_who_runs_says_nothing_to_its_master_any_more(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    slave = Member(etcd, "s")
    slave.tick(0)
    slave.tick(2_900)
    assert slave.tick(3_300) == [StopFollowing()]
    assert not slave.machine.may_speak
    assert slave.tick(3_400) == [], "no election before the word that it has stopped"
    assert etcd.view.master is None


def test_a_store_from_outside_the_set_does_not_run_and_says_who_could(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    stranger = Member(etcd, "x")
    stranger.tick(0)
    for now_ms in range(0, 20_000, 500):
        stranger.tick(now_ms)
    assert stranger.machine.role is Role.FOLLOWING
    (problem,) = stranger.machine.problems(20_000)
    assert "start a member of the in-sync set (broker_id 7 at m:1 (store m), store s), or order an unclean promotion" in problem


def test_an_operator_can_promote_it_all_the_same(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    stranger = Member(etcd, "x", epoch=1, lost=True)
    stranger.tick(0)
    stranger.tick(3_100)
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "x")),)))
    assert stranger.lead(3_400) == 2
    assert (stranger.members(), etcd.view.order) == ({"x"}, None)


def test_an_unclean_promotion_waits_until_nobody_leads(etcd: SimEtcd) -> None:
    master = master_with(etcd)
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "x")),)))
    stranger = Member(etcd, "x")
    assert stranger.tick(100) == [Follow("m", "m:1", 1)]
    master.tick(400)
    assert etcd.view.order is None, "the master takes it back"
    assert master.machine.role is Role.LEADING


def test_a_master_whose_lease_may_have_run_out_counts_on_promises_alone(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s")
    master.answers = False
    master.report(10, {"s": MemberReport(10, True, 2_000)}, 2_600)
    assert master.machine.may_acknowledge(2_699), "its lease lasts for nine tenths of 3 s"
    assert master.machine.may_acknowledge(4_699), "the slave's promise, from 2 s on"
    assert not master.machine.may_acknowledge(4_700)
    assert master.machine.takes_sends
    assert "etcd has not answered for 4 s" in master.machine.problems(4_700)[0]


@pytest.mark.parametrize("refuses_reads", [False, True])
def test_an_etcd_that_refuses_all_but_renewals_is_a_problem_until_it_takes_a_write(etcd: SimEtcd, refuses_reads: bool) -> None:
    master, slave = master_with(etcd, "s"), Member(etcd, "s", broker_id=8)
    reports = {"s": MemberReport(0, True, 0)}

    def tick(since_ms: int, until_ms: int) -> None:
        for now_ms in range(since_ms, until_ms, 50):
            slave.machine.heard(now_ms)
            slave.tick(now_ms)
            master.report(now_ms, reports | {"s": MemberReport(now_ms, True, now_ms)}, now_ms)

    tick(50, 2_000)
    etcd.refusal, etcd.refuses_reads = "no space", refuses_reads
    slave.machine.followed(1, False, LogEnd(1, 10))  # its start gets another number
    tick(2_000, 16_000)
    for member in (master, slave):
        assert member.machine.problems(16_000) == ["etcd refuses requests (no space): all goes on as it is, and nobody can take over"]
    assert master.machine.role is Role.LEADING
    etcd.refusal = ""
    tick(16_000, 20_000)
    assert [member.machine.problems(20_000) for member in (master, slave)] == [[], []], "each has written something by itself"


@pytest.mark.parametrize("refuses_reads", [False, True])
def test_a_candidate_asks_an_etcd_that_refuses_ever_more_seldom(etcd: SimEtcd, refuses_reads: bool) -> None:
    master_with(etcd, "s").answers = False
    slave = Member(etcd, "s", epoch=1, empty=False, broker_id=8)
    slave.tick(50)
    etcd.refusal, etcd.refuses_reads = "no space", refuses_reads
    asked: list[float] = []
    do, now_ms = etcd.do, 100

    def count_all(request: Request, now_ms: float) -> Result:
        asked.append(now_ms)
        return do(request, now_ms)

    etcd.do = count_all  # type: ignore[method-assign]
    for now_ms in range(100, 63_000, 10):
        if StopFollowing() in slave.tick(now_ms):
            slave.run(slave.machine.following_stopped(1, now_ms), now_ms)
    assert "etcd refuses requests (no space)" in slave.machine.problems(now_ms)[0]
    late = [each for each in asked if each >= 10_000]
    assert len(late) < 150, "in 53 s a renewal each 0.8 s, a look and a write each 3 s"
    etcd.refusal = ""
    free_ms = now_ms
    while slave.machine.role is not Role.OPENING:
        now_ms += 10
        assert now_ms < free_ms + 10_000
        if StopFollowing() in slave.tick(now_ms):
            slave.run(slave.machine.following_stopped(1, now_ms), now_ms)


def test_a_lease_counts_from_when_its_renewal_was_sent(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s")
    master.answers = False
    master.tick(800)
    (renewal,) = (ask for ask in master.asks if type(ask.request).__name__ == "RenewLease")
    result = etcd.do(renewal.request, 2_000)
    master.run(master.machine.answered(renewal.number, result, 2_600), 2_600)
    assert master.machine.may_acknowledge(3_499)
    assert not master.machine.may_acknowledge(3_500)


def test_a_master_alone_in_its_set_goes_on_without_etcd(etcd: SimEtcd) -> None:
    master = master_with(etcd)
    master.answers = False
    master.tick(60_000)
    assert master.machine.may_acknowledge(60_000)


def test_a_master_that_was_away_comes_back_in_its_epoch_if_nobody_else_leads(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s")
    revision = etcd.view.key_revision(IN_SYNC)
    master.answers = False
    master.tick(800)
    etcd.expire(3_100)
    assert etcd.view.master is None
    master.answers = True
    for ask in master.asks:
        master.run(master.machine.answered(ask.number, None, 3_200), 3_200)
    for now_ms in (3_200, 4_000, 4_100, 4_400):
        assert master.tick(now_ms) == []
    assert etcd.view.master is not None
    assert (etcd.view.master.member, etcd.view.master.epoch) == ("m", 1)
    assert etcd.view.key_revision(IN_SYNC) > revision, "an election under way fails"
    assert master.machine.may_acknowledge(4_400)


def test_a_master_that_finds_another_one_stops_leading_and_follows_it(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s")
    etcd.expire(3_100)
    Member(etcd, "s", now_ms=0).lead(3_100)
    assert master.tick(3_200) == [StopLeading(), Follow("s", "s:1", 2)]
    assert not master.machine.may_acknowledge(3_200)


def test_a_master_that_is_started_again_leads_at_once_in_a_new_epoch(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    again = Member(etcd, "m", 500, epoch=1, empty=False)
    assert again.lead(500) == 2
    assert again.members() == {"m", "s"}


def test_an_election_without_an_answer_is_found_to_be_won(etcd: SimEtcd) -> None:
    member = Member(etcd, "a")
    assert member.tick(0) == [StopFollowing()]
    member.answers = False
    member.run(member.machine.following_stopped(0, 10), 10)
    (ask,) = member.asks
    etcd.do(ask.request, 20)
    member.answers = True
    member.run(member.machine.answered(ask.number, None, 1_010), 1_010)
    assert member.wants == [Lead(1)]


def test_an_election_that_comes_too_late_fails(etcd: SimEtcd) -> None:
    first, second = Member(etcd, "a"), Member(etcd, "b")
    first.tick(0)
    first.answers = False
    first.run(first.machine.following_stopped(0, 10), 10)
    assert second.lead(20) == 1
    first.answers = True
    (ask,) = first.asks
    first.run(first.machine.answered(ask.number, etcd.do(ask.request, 30), 30), 30)
    assert first.wants == []
    assert first.tick(400) == [Follow("b", "b:1", 1)]


def test_a_switch_gives_the_lead_to_who_has_everything(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s", "t")
    etcd.commit(Transaction((), (Put(ORDER, encode_order(SWITCH, "s")),)))
    both = {each: MemberReport(50, True, 300) for each in "st"}
    master.report(60, both, 300)
    assert master.machine.role is Role.HANDING_OVER
    assert not master.machine.takes_sends
    assert master.machine.may_acknowledge(310)
    both["s"] = replace_position(both["s"], 60)
    master.report(60, both, 310)
    assert etcd.view.master is None
    assert not master.machine.may_acknowledge(310)
    others = [Member(etcd, each, 0) for each in ("t", "s")]
    assert others[0].tick(320) == [], "the lead is promised to another one"
    assert others[1].lead(320) == 2
    assert master.tick(700) == [StopLeading(), Follow("s", "s:1", 2)]


def test_who_hands_over_leaves_the_set_if_others_are_there_or_if_it_ends(etcd: SimEtcd) -> None:
    for slaves, is_leaving, members in (("st", False, {"s", "t"}), ("s", False, {"m", "s"}), ("s", True, {"s"})):
        here = PromptEtcd()
        master = master_with(here, *slaves)
        reports = {each: MemberReport(60, True, 300) for each in slaves}
        master.report(60, reports, 300)
        assert master.machine.has_successor
        master.machine.is_leaving = is_leaving
        here.commit(Transaction((), (Put(ORDER, encode_order(SWITCH, "s")),)))
        master.report(60, reports, 700)
        master.report(60, reports, 710)
        assert here.view.in_sync is not None
        assert (here.view.master, here.view.in_sync.successor) == (None, "s")
        assert master.members() == members
        assert Member(here, "s", 0).lead(720) == 2


def replace_position(report: MemberReport, position: int) -> MemberReport:
    return report._replace(position=position)


def test_a_switch_to_nobody_in_particular_takes_who_has_most(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s", "t")
    etcd.commit(Transaction((), (Put(ORDER, encode_order(SWITCH, "")),)))
    master.report(60, {"s": MemberReport(60, True, 300), "t": MemberReport(50, True, 300)}, 300)
    master.report(60, {"s": MemberReport(60, True, 300), "t": MemberReport(50, True, 300)}, 310)
    assert etcd.view.in_sync is not None
    assert etcd.view.in_sync.successor == "s"


def test_a_switch_to_who_is_not_in_sync_is_taken_back(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s")
    for number, target in enumerate(("x", "m", "s"), 1):
        etcd.commit(Transaction((), (Put(ORDER, encode_order(SWITCH, target)),)))
        master.report(60, {"s": MemberReport(60, False, 300)}, 400 * number)
        master.tick(400 * number + 1)
        assert etcd.view.order is None
        assert master.machine.role is Role.LEADING


def in_sync_with(etcd: SimEtcd, *full: str, master: type[Member] = Member) -> tuple[Member, dict[str, MemberReport]]:
    """A master with slaves s and t, which have all. The disks of some are full, as etcd knows."""
    leader = master_with(etcd, "s", "t", master=master)
    for name in full:
        slave = Member(etcd, name)
        slave.run(slave.machine.full("no space", 0), 0)
    reports = {each: MemberReport(60, True, 300) for each in "st"}
    leader.report(60, reports, 300)
    return leader, reports


def test_a_master_whose_disk_is_full_gives_the_lead_to_who_has_room_and_leaves_the_set(etcd: SimEtcd) -> None:
    master, reports = in_sync_with(etcd, "t")
    master.run(master.machine.full("no space", 400), 400)
    for now_ms in (700, 710, 720):
        master.report(60, reports, now_ms)
    assert etcd.view.in_sync is not None
    assert (etcd.view.master, etcd.view.in_sync.successor) == (None, "s"), "t would be preferred, but for its disk"
    assert master.members() == {"s", "t"}
    assert etcd.view.full == {"m", "t"}
    assert Member(etcd, "s").lead(730) == 2
    assert master.tick(1_100) == [StopLeading(), Follow("s", "s:1", 2)]
    assert "since its disk is full: no space" in master.machine.problems(1_100)[0]


def test_a_master_whose_disk_is_full_stays_and_says_so_while_nobody_in_sync_has_room(etcd: SimEtcd) -> None:
    master, reports = in_sync_with(etcd, "s", "t")
    master.run(master.machine.full("no space", 400), 400)
    for now_ms in range(500, 2_500, 50):
        master.report(60, reports, now_ms)
        assert (master.machine.role, etcd.view.order) == (Role.LEADING, None)
    assert master.members() == {"m", "s", "t"}
    assert master.machine.problems(2_500) == ["the disk here is full, and the lead stays here until a member in sync has room"]
    slave = Member(etcd, "s", 2_500)
    slave.run(slave.machine.full("no space", 2_500), 2_500)
    slave.run(slave.machine.full("", 2_900), 2_900)
    assert etcd.view.full == {"m", "t"}
    for now_ms in (2_950, 3_250, 3_550):
        etcd.expire(now_ms)
        master.report(60, reports, now_ms)
    assert etcd.view.in_sync is not None
    assert etcd.view.in_sync.successor == "s"


def test_who_gave_the_lead_away_for_a_full_disk_counts_as_full_for_a_while_whatever_the_disk_reports(etcd: SimEtcd) -> None:
    master, reports = in_sync_with(etcd)
    master.run(master.machine.full("no space", 400), 400)
    for now_ms in (700, 710, 720):
        master.report(60, reports, now_ms)
    assert etcd.view.master is None
    successor = etcd.view.in_sync.successor if etcd.view.in_sync is not None else ""
    assert Member(etcd, successor).lead(730) == 2
    assert StopLeading() in master.tick(1_100)
    master.run(master.machine.full("", 1_200), 1_200)
    (problem,) = master.machine.problems(1_200)
    assert "its disk has refused messages" in problem
    assert "does not lead if another one can" in problem
    for now_ms in range(1_500, 720 + FULL_PAUSE_MS, 500):
        master.tick(now_ms)
        assert etcd.view.full == {"m"}
    master.tick(720 + FULL_PAUSE_MS)
    master.tick(1_500 + FULL_PAUSE_MS)
    assert not etcd.view.full
    assert not any("its disk" in each for each in master.machine.problems(1_500 + FULL_PAUSE_MS))


def test_the_pause_of_a_full_disk_is_twice_as_long_each_time_up_to_16_minutes(etcd: SimEtcd) -> None:
    machine, now_ms, pauses_s = Member(etcd, "m").machine, 0, []
    for _ in range(7):
        machine._begin_full_pause(now_ms)
        pauses_s.append((machine._counts_as_full_until_ms - now_ms) / 1_000)
        now_ms = machine._counts_as_full_until_ms
    assert pauses_s == [60, 120, 240, 480, 960, 960, 960]
    machine._begin_full_pause(now_ms + 60_000)
    assert machine._counts_as_full_until_ms == now_ms + 120_000, "it was well for a minute"


class Loser(Member):
    """Its hand-overs do not reach etcd while it has losses left; `time_out` tells it so."""

    losses_left = 0
    lost_count = 0

    def run(self, effects: list[Effect], now_ms: int) -> None:
        for effect in effects:
            is_hand_over = isinstance(effect, Ask) and isinstance(effect.request, Transaction) and MASTER in effect.request.deletes
            if is_hand_over and self.losses_left:
                assert isinstance(effect, Ask)
                self.losses_left, self.lost_count = self.losses_left - 1, self.lost_count + 1
                self.asks.append(effect)
            else:
                super().run([effect], now_ms)

    def time_out(self, now_ms: int) -> None:
        asks, self.asks = self.asks, []
        for ask in asks:
            self.run(self.machine.answered(ask.number, None, now_ms), now_ms)


def lead_over(etcd: SimEtcd, members: str) -> None:
    """The slave s has won the next election."""
    in_sync = encode_in_sync(2, frozenset(members), unclean_epoch=0)
    etcd.commit(Transaction((), (Put(MASTER, encode_master("s", 2, "s:1"), 1), Put(IN_SYNC, in_sync))))


def test_a_lead_that_etcd_is_asked_for_several_times_is_given_away_once(etcd: SimEtcd) -> None:
    master, reports = in_sync_with(etcd, master=Loser)
    assert isinstance(master, Loser)
    master.losses_left = 4
    master.run(master.machine.full("no space", 400), 400)
    for now_ms in range(500, 2_000, 50):
        master.time_out(now_ms)
        master.report(60, reports, now_ms)
    assert (master.lost_count, etcd.view.master) == (4, None)
    master.run(master.machine.full("", 2_000), 2_000)
    lead_over(etcd, "st")
    master.tick(2_300)
    assert master.machine.role is Role.FOLLOWING
    assert "its disk has refused messages" in master.machine.problems(2_300)[0]
    assert not any("its disk" in each for each in master.machine.problems(2_310 + FULL_PAUSE_MS))


def test_a_member_whose_hand_over_is_called_off_has_no_pause(etcd: SimEtcd) -> None:
    master, reports = in_sync_with(etcd, master=Loser)
    assert isinstance(master, Loser)
    master.losses_left = 1_000
    master.run(master.machine.full("no space", 400), 400)
    for now_ms in range(500, 4_100, 50):
        master.time_out(now_ms)
        master.report(60, reports, now_ms)
        if now_ms == 1_500:
            master.run(master.machine.full("", now_ms), now_ms)
    assert (master.lost_count > 1, master.machine.role, etcd.view.order) == (True, Role.LEADING, None)
    lead_over(etcd, "mst")
    master.tick(4_500)
    assert (master.machine.role, master.machine.problems(4_500)) == (Role.FOLLOWING, [])


def test_a_master_that_has_room_again_keeps_the_lead(etcd: SimEtcd) -> None:
    master, reports = in_sync_with(etcd, "s", "t")
    master.run(master.machine.full("no space", 400), 400)
    master.run(master.machine.full("", 800), 800)
    assert etcd.view.full == {"s", "t"}
    etcd.expire(TTL_MS + 1)
    assert not etcd.view.full, "a member that is gone says nothing of its disk"
    assert master.machine.problems(800) == []
    for now_ms in (1_200, 1_600):
        master.report(60, reports, now_ms)
    assert master.machine.role is Role.LEADING


def test_a_switch_to_nobody_in_particular_prefers_who_has_room(etcd: SimEtcd) -> None:
    master, reports = in_sync_with(etcd, "s")
    etcd.commit(Transaction((), (Put(ORDER, encode_order(SWITCH, "")),)))
    reports["t"] = replace_position(reports["t"], 50)
    master.report(60, reports, 700)
    reports["t"] = replace_position(reports["t"], 60)
    master.report(60, reports, 710)
    assert etcd.view.in_sync is not None
    assert etcd.view.in_sync.successor == "t"


def test_who_has_room_runs_first_when_the_lead_is_free_and_who_has_none_leads_if_nobody_else_does(etcd: SimEtcd) -> None:
    master, _ = in_sync_with(etcd)
    full, roomy = Member(etcd, "s", 300), Member(etcd, "t", 300)
    full.run(full.machine.full("no space", 300), 300)
    master.answers = False
    ran_ms: dict[str, int] = {}
    for now_ms in range(400, 2 * TTL_MS, 50):
        for member in (full, roomy):
            if StopFollowing() in member.tick(now_ms):
                ran_ms[member.machine.settings.member] = now_ms
    assert ran_ms["s"] - ran_ms["t"] >= LONGER_LOG_WAIT_MS


def test_a_switch_that_takes_too_long_is_called_off(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s")
    etcd.commit(Transaction((), (Put(ORDER, encode_order(SWITCH, "s")),)))
    late = {"s": MemberReport(50, True, 300)}
    master.report(60, late, 300)
    for now_ms in range(400, 3_300, 100):
        master.report(60, late, now_ms)
        assert master.machine.role is Role.HANDING_OVER
    master.report(60, late, 3_300)
    assert master.machine.role is Role.LEADING
    assert etcd.view.order is None


def test_what_was_given_away_without_an_answer_is_not_used_any_more(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s")
    etcd.commit(Transaction((), (Put(ORDER, encode_order(SWITCH, "s")),)))
    all_of_it = {"s": MemberReport(60, True, 300)}
    master.report(60, all_of_it, 300)
    master.answers = False
    master.report(60, all_of_it, 310)
    assert not master.machine.may_acknowledge(320)
    ask = master.asks[-1]
    assert isinstance(ask.request, Transaction)
    etcd.do(ask.request, 330)
    master.run(master.machine.answered(ask.number, None, 1_310), 1_310)
    assert not master.machine.may_acknowledge(1_320)


def test_a_store_that_may_lack_its_end_leaves_the_set_before_anything_else(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    slave = Member(etcd, "s", epoch=1, empty=False, lost=True)
    assert slave.tick(0) == [Follow("m", "m:1", 1), TailSettled()] or slave.members() == {"m"}
    assert slave.members() == {"m"}
    for now_ms in range(300, 20_000, 300):
        slave.tick(now_ms)
    assert slave.machine.role is Role.FOLLOWING


def test_a_slave_whose_log_has_failed_leaves_the_set_and_does_not_run_before(etcd: SimEtcd) -> None:
    master = master_with(etcd, "s")
    slave = Member(etcd, "s", epoch=1, empty=False)
    slave.tick(0)
    slave.answers = False
    slave.machine.tail_may_be_lost()
    assert slave.tick(TTL_MS) == []
    slave.asks.clear()
    etcd.expire(3 * TTL_MS)
    slave.answers = True
    slave.machine._pending.clear()
    wants = slave.tick(3 * TTL_MS) + slave.tick(3 * TTL_MS + 300) + slave.tick(3 * TTL_MS + 600)
    assert (wants, master.members()) == ([TailSettled()], {"m"})


def elected(etcd: SimEtcd, name: str) -> tuple[Member, Lead]:
    """A member that has won, and has not opened its log by 10,000 ms."""
    member, wants = Member(etcd, name), list[Effect]()
    for now_ms in range(0, 10_100, 100):
        wants += member.tick(now_ms)
        if wants[-1:] == [StopFollowing()]:
            member.run(member.machine.following_stopped(1, now_ms), now_ms)
    lead = wants[-1]
    assert isinstance(lead, Lead)
    return member, lead


def test_who_cannot_open_its_log_to_lead_gives_the_lead_back_and_another_one_takes_it(etcd: SimEtcd) -> None:
    master_with(etcd, "s", "t")
    slave, lead = elected(etcd, "s")
    slave.run(slave.machine.unable(lead.epoch, "the disk is full", 10_000), 10_000)
    assert etcd.view.master is None
    assert slave.members() == {"s", "t"}, "it lacks nothing"
    assert slave.machine.role is Role.FOLLOWING
    assert slave.tick(10_000) == [], "it has not begun to lead, so it need not stop"
    assert "does not run until it can: the disk is full" in "".join(slave.machine.problems(10_000))
    for now_ms in range(10_000, 20_000, 100):
        assert slave.tick(now_ms) == [], "it does not run again"
    other = Member(etcd, "t", 17_000)
    assert other.lead(20_000) == lead.epoch + 1
    assert slave.tick(20_300) == [Follow("t", "t:1", lead.epoch + 1)]


def test_who_gave_the_lead_back_is_in_the_set_still_if_the_next_one_cannot_lead_either(etcd: SimEtcd) -> None:
    master_with(etcd, "s", "t")
    slave, lead = elected(etcd, "s")
    other = Member(etcd, "t", 10_000)
    other.tick(10_000)
    slave.run(slave.machine.unable(lead.epoch, "the disk is full", 10_100), 10_100)
    assert other.tick(20_000) == [StopFollowing()], "it has seen that the other one led"
    other.run(other.machine.following_stopped(1, 20_000), 20_000)
    slave.tick(20_050)
    other.run(other.machine.unable(lead.epoch + 1, "its disk is full, too", 20_100), 20_100)
    assert other.members() == {"s", "t"}
    slave.machine.able()
    assert slave.lead(20_200) == lead.epoch + 2
    slave.report(0, {}, 20_300)
    assert slave.members() == {"s"}, "it waits for nobody who has not come"


def test_a_member_that_leaves_the_set_says_still_that_the_lead_was_given_back(etcd: SimEtcd) -> None:
    master_with(etcd, "s", "t", "u")
    slave, lead = elected(etcd, "s")
    slave.run(slave.machine.unable(lead.epoch, "the disk is full", 10_100), 10_100)
    doubtful = Member(etcd, "u", 10_200, epoch=1, empty=False, lost=True)
    for now_ms in (10_200, 10_500, 10_800):
        doubtful.tick(now_ms)
    assert slave.members() == {"s", "t"}
    assert etcd.view.in_sync is not None
    assert etcd.view.in_sync.is_given_back


def test_it_runs_again_when_it_can_and_not_before(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    slave, lead = elected(etcd, "s")
    slave.run(slave.machine.unable(lead.epoch, "the disk is full", 10_000), 10_000)
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "s")),)))
    assert slave.tick(20_000) == [], "not by order either"
    slave.machine.able()
    assert slave.machine.problems(20_000) == []
    assert slave.lead(20_300) == lead.epoch + 1


def test_who_gives_the_lead_back_while_etcd_is_away_goes_on_with_that(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    slave, lead = elected(etcd, "s")
    slave.answers = False
    slave.run(slave.machine.unable(lead.epoch, "the disk is full", 10_000), 10_000)
    (ask,) = (each for each in slave.asks if isinstance(each.request, Transaction))
    slave.machine.able()
    assert slave.machine.is_unable, "it has the lead still"
    slave.answers = True
    slave.run(slave.machine.answered(ask.number, None, 10_400), 10_400)
    slave.tick(10_800)
    assert etcd.view.master is None
    assert slave.machine.role is Role.FOLLOWING


def test_who_could_not_give_the_lead_back_before_its_lease_ran_out_says_it_when_etcd_is_back(etcd: SimEtcd) -> None:
    """Else the next one takes it for one that is gone. It has everything, so it stays in the set until another one has opened its log."""
    master_with(etcd, "s", "t")
    slave, lead = elected(etcd, "s")
    other = Member(etcd, "t", 10_000)
    other.tick(10_000)
    slave.answers = False
    slave.run(slave.machine.unable(lead.epoch, "the disk is full", 10_000), 10_000)
    slave.tick(20_000)
    asks, slave.asks, slave.answers = slave.asks, [], True
    etcd.expire(20_000)
    assert etcd.view.master is None
    for ask in asks:
        slave.run(slave.machine.answered(ask.number, None, 20_000), 20_000)
    slave.tick(20_400)
    assert slave.machine.role is Role.FOLLOWING
    assert etcd.view.in_sync is not None
    assert etcd.view.in_sync.is_given_back
    assert StopLeading() not in slave.wants
    assert other.tick(30_000) == [StopFollowing()]
    other.run(other.machine.following_stopped(1, 30_000), 30_000)
    assert other.machine.role is Role.OPENING
    assert other.members() == {"s", "t"}


def test_who_was_deposed_meanwhile_has_nothing_to_give_back(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    slave, lead = elected(etcd, "s")
    value = encode_in_sync(lead.epoch + 1, frozenset({"x"}), unclean_epoch=0)
    etcd.commit(Transaction((), (Put(IN_SYNC, value), Put(MASTER, encode_master("x", lead.epoch + 1, "x:1")))))
    assert slave.tick(10_300)[0] == StopLeading()
    slave.run(slave.machine.unable(lead.epoch, "the disk is full", 10_400), 10_400)
    assert etcd.view.master is not None
    assert slave.machine.is_unable


def test_a_store_that_may_lack_its_end_stays_in_doubt_while_etcd_knows_no_member(etcd: SimEtcd) -> None:
    """An operator restores a copy of etcd's data, whose set names it."""
    master_with(etcd, "s")
    copy = etcd.view
    etcd.forget()
    slave = Member(etcd, "s", epoch=1, empty=False, lost=True)
    for now_ms in range(0, 10_000, 300):
        assert slave.tick(now_ms) == []
    assert slave.members() == set()
    assert copy.in_sync is not None
    put = Put(IN_SYNC, encode_in_sync(1, copy.in_sync.members, unclean_epoch=0))
    etcd.commit(Transaction((), (put,)))
    wants = [effect for now_ms in range(10_000, 40_000, 300) for effect in slave.tick(now_ms)]
    assert (wants, slave.members()) == ([TailSettled()], {"m"})


def test_it_writes_the_set_even_if_it_is_not_in_it(etcd: SimEtcd) -> None:
    master_with(etcd)
    revision = etcd.view.key_revision(IN_SYNC)
    slave = Member(etcd, "s", epoch=1, empty=False, lost=True)
    slave.tick(0)
    assert etcd.view.key_revision(IN_SYNC) > revision, "a set with it that is under way can no longer be made"


def test_a_log_that_is_ahead_of_etcd_follows_nobody_and_says_so(etcd: SimEtcd) -> None:
    master_with(etcd)
    member = Member(etcd, "old", epoch=9, empty=False)
    for now_ms in range(0, 10_000, 500):
        assert member.tick(now_ms) == []
    (problem,) = member.machine.problems(10_000)
    assert "etcd's data is older than this log" in problem
    # A restored store is the likely cause where somebody leads, and a promotion would lose what the others have taken since.
    assert problem.index("protomq restore --slave") < problem.index("unclean promotion")


@pytest.mark.parametrize("others", [set(), {"s"}])
def test_a_member_whose_log_is_ahead_of_a_restored_etcd_does_not_run_by_itself(etcd: SimEtcd, others: set[str]) -> None:
    """The copy names it, and nobody leads. Later sets, of which etcd has forgotten, may have had more than this log."""
    etcd.commit(Transaction((), (Put(IN_SYNC, encode_in_sync(3, frozenset({"m", *others}), unclean_epoch=0)),)))
    member = Member(etcd, "m", epoch=5, empty=False)
    for now_ms in range(0, 40_000, 300):
        assert member.tick(now_ms) == []
    assert member.machine.role is Role.FOLLOWING
    (problem,) = member.machine.problems(40_000)
    assert "etcd's data is older than this log" in problem
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "m")),)))
    assert member.lead(40_000) == 6


def test_keys_that_are_gone_end_the_lead(etcd: SimEtcd) -> None:
    master = master_with(etcd)
    etcd.commit(Transaction((), (), (MASTER, IN_SYNC)))
    assert master.tick(300) == [StopLeading()]
    assert "etcd knows no member that has all that was acknowledged" in master.machine.problems(300)[0]


def test_an_empty_member_waits_for_those_with_messages_before_it_leads_a_new_name(etcd: SimEtcd) -> None:
    empty = Member(etcd, "new", wait_ms=TTL_MS)
    for now_ms in range(0, TTL_MS, 100):
        assert empty.tick(now_ms) == [], now_ms
    assert empty.lead(TTL_MS) == 1


@pytest.mark.parametrize("epochs", [(4, 7), (7, 4)])
def test_no_empty_member_leads_where_etcd_was_lost_and_others_have_messages(etcd: SimEtcd, epochs: tuple[int, int]) -> None:
    members = [Member(etcd, f"m{epoch}", epoch=epoch, empty=False) for epoch in epochs]
    empty = Member(etcd, "new", wait_ms=TTL_MS)
    for now_ms in range(0, 20_000, 100):
        assert [each.tick(now_ms) for each in (empty, *members)] == [[], [], []]
    assert etcd.view.in_sync is not None
    assert (empty.members(), etcd.view.in_sync.epoch) == (set(), 7), "the next epoch is above both"
    assert empty.machine.problems(20_000)
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "m4")),)))
    leader = next(each for each in members if each.machine.settings.member == "m4")
    assert leader.lead(20_100) == 8
    follow = Follow("m4", "m4:1", 8, unclean_epoch=8)
    assert [each.tick(20_400) for each in (empty, *members) if each is not leader] == [[follow]] * 2
    assert follow.may_lose(7), "what m7 has more is lost by the order"


def test_a_member_that_has_dropped_its_log_to_follow_knows_that_the_name_is_not_new(etcd: SimEtcd) -> None:
    """It has not got the log of its master yet when etcd loses its data."""
    member = Member(etcd, "a", epoch=4, empty=True)
    for now_ms in range(0, 20_000, 500):
        assert member.tick(now_ms) == []
    assert etcd.view.in_sync is not None
    assert (member.members(), etcd.view.in_sync.epoch) == (set(), 4)


def test_an_election_of_an_empty_member_that_comes_too_late_fails(etcd: SimEtcd) -> None:
    empty, full = Member(etcd, "new"), Member(etcd, "old", epoch=3, empty=False)
    assert empty.tick(0) == [StopFollowing()]
    empty.answers = False
    empty.run(empty.machine.following_stopped(0, 10), 10)
    full.tick(20)
    (ask,) = empty.asks
    empty.answers = True
    empty.run(empty.machine.answered(ask.number, etcd.do(ask.request, 30), 30), 30)
    for now_ms in range(100, 20_000, 100):
        assert empty.tick(now_ms) == []
    assert etcd.view.master is None


def test_the_epoch_of_an_order_outlives_changes_of_the_set_elections_and_switches(etcd: SimEtcd) -> None:
    member = Member(etcd, "m", epoch=4, empty=False)
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "m")),)))
    assert member.lead(0) == 5

    def unclean_epoch() -> int:
        assert etcd.view.in_sync is not None
        return etcd.view.in_sync.unclean_epoch

    everything = {"s": MemberReport(0, True, 100)}
    member.report(0, everything, 100)
    assert (member.members(), unclean_epoch()) == ({"m", "s"}, 5)
    etcd.commit(Transaction((), (Put(ORDER, encode_order(SWITCH, "s")),)))
    member.report(0, everything, 400)
    member.report(0, everything, 410)
    assert (etcd.view.master, unclean_epoch()) == (None, 5)
    heir = Member(etcd, "s", 420, epoch=5, empty=False)
    assert (heir.lead(420), unclean_epoch()) == (6, 5)
    again = Member(etcd, "s", 500, epoch=6, empty=False, lost=True)
    again.tick(500)
    assert ("s" in again.members(), unclean_epoch()) == (False, 5)


def test_an_etcd_that_was_replaced_ends_the_lead_and_nobody_leads_by_itself(etcd: SimEtcd) -> None:
    """Its revisions begin again: without that, all members believe what the old one has said until the new one has come as far."""
    master = master_with(etcd, "s")
    slave = Member(etcd, "s", epoch=1, empty=False)
    slave.tick(100)
    for each in (master, slave):
        each.etcd = PromptEtcd()
    new = master.etcd = slave.etcd
    wants = [master.tick(now_ms) for now_ms in range(300, 20_000, 300)]
    assert wants[0] == [StopLeading()]
    assert not any(wants[1:])
    assert not any(slave.tick(now_ms) for now_ms in range(300, 20_000, 300))
    assert new.view.in_sync is not None
    assert (new.view.master, new.view.in_sync.members) == (None, frozenset())


def test_an_etcd_that_was_restored_ends_the_lead_though_it_names_the_same_master(etcd: SimEtcd) -> None:
    """Its set may have a member that has left since."""
    master = master_with(etcd)
    copy = (etcd.revision, dict(etcd.rows))
    master.report(0, {"s": MemberReport(0, True, 100)}, 100)
    assert master.members() == {"m", "s"}
    etcd.revision, etcd.rows = copy
    assert master.tick(400)[0] == StopLeading()
    assert master.tick(500) == [] or master.machine.role is not Role.LEADING


def restored_behind_a_switch(etcd: SimEtcd) -> tuple[Member, Member]:
    """The master of epoch 1 has given the lead to "s". Then etcd is restored from a copy of epoch 1, and both run on."""
    former = master_with(etcd, "s")
    copy = etcd.copy()
    later = Member(etcd, "s", epoch=1, empty=False)
    later.tick(100)
    etcd.commit(Transaction((), (Put(ORDER, encode_order(SWITCH, "s")),)))
    former.tick(400)
    former.report(0, {"s": MemberReport(0, True, 500)}, 500)
    assert later.lead(800) == 2
    assert former.tick(900)[-1] == Follow("s", "s:1", 2)
    former.machine.followed(2, False, LogEnd(2, 0))
    etcd.restore(copy, 1_000)
    for now_ms in range(1_000, 2_500, 300):
        former.tick(now_ms)
        later.tick(now_ms)
    assert (former.machine.role, later.machine.role) == (Role.FOLLOWING, Role.FOLLOWING)
    return former, later


def test_a_former_master_does_not_hold_the_key_of_an_old_copy_with_its_lease(etcd: SimEtcd) -> None:
    """It is ahead of the copy, so it does not lead. Its lease is as old as the copy, and it renews it."""
    former, later = restored_behind_a_switch(etcd)
    assert etcd.view.master is None
    assert not any(former.tick(now_ms) + later.tick(now_ms) for now_ms in range(2_500, 20_000, 300)), "by itself nobody leads"
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "s")),)))
    assert later.lead(20_000) == 3
    assert former.tick(20_300) == [Follow("s", "s:1", 3, unclean_epoch=3)]


def test_a_former_master_that_is_promoted_does_not_lead_in_the_epoch_of_an_old_copy(etcd: SimEtcd) -> None:
    """Even if the order is there before it has seen the copy."""
    former = master_with(etcd, "s")
    copy = etcd.copy()
    former.machine.own_epoch = 3
    etcd.commit(Transaction((), (Put(IN_SYNC, encode_in_sync(3, frozenset("s"), "s", unclean_epoch=0)),), (MASTER,)))
    assert former.tick(400) == [StopLeading()]
    etcd.restore(copy, 500)
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "m")),)))
    assert former.lead(800) == 4
    assert etcd.view.order is None


@pytest.mark.parametrize("waits", [False, True])
def test_who_is_ahead_of_etcd_says_whom_etcd_has_as_the_master_and_that_an_order_waits_for_that(etcd: SimEtcd, waits: bool) -> None:
    master_with(etcd)
    member = Member(etcd, "old", epoch=9, empty=False)
    if waits:
        etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "old")),)))
    member.tick(0)
    assert not any("order to promote" in each for each in member.machine.problems(0)), "an order that is taken stands for a moment, too"
    problems = member.machine.problems(TTL_MS)
    assert "etcd names store m at m:1 as the master of epoch 1" in problems[0]
    assert any("order to promote store old waits" in each for each in problems) is waits


def test_an_older_reading_that_comes_late_changes_nothing(etcd: SimEtcd) -> None:
    member = Member(etcd, "a")
    member.tick(0)
    member.answers = False
    member.run(member.machine.tick(400), 400)
    (reading,) = member.asks
    old = etcd.do(reading.request, 400)
    etcd.commit(
        Transaction(
            (),
            (Put(MASTER, encode_master("b", 1, "b:1")), Put(IN_SYNC, encode_in_sync(1, frozenset("b"), unclean_epoch=0))),
        )
    )
    for ask in member.asks:  # and the one that follows
        member.run(member.machine.answered(ask.number, None, 500), 500)
        member.answers = True
    member.tick(1_000)
    known = member.machine.view
    assert known is not None
    assert known.revision == etcd.revision > old.revision  # type: ignore[union-attr]
    member.machine._note_view(old, 1_001, is_fresh=True)  # type: ignore[arg-type]
    assert member.machine.view is known


def test_settings_trust_nine_tenths() -> None:
    assert replace(Settings("m", "a"), lease_ttl_ms=5_000).trusted_ms == 4_500


def test_an_election_gets_one_number_which_all_members_are_told_once(etcd: SimEtcd) -> None:
    first, second = Member(etcd, "a", wait_ms=2_000, new_election=11), Member(etcd, "b", wait_ms=2_000, new_election=12)
    assert first.tick(0) == [ElectionKnown(11)]
    assert second.tick(0) == [ElectionKnown(11)]
    assert (first.tick(300), second.tick(300), etcd.view.election) == ([], [], 11)


def test_two_members_that_find_no_number_agree_on_one(etcd: SimEtcd) -> None:
    first, second = Member(etcd, "a", wait_ms=2_000, new_election=11), Member(etcd, "b", wait_ms=2_000, new_election=12)
    first.answers = False
    first.tick(0)
    late = [ask for ask in first.asks if isinstance(ask.request, ReadCluster)]
    view = etcd.do(late[0].request, 0)  # before the other one writes
    assert second.tick(0) == [ElectionKnown(12)]
    first.answers = True
    first.run(first.machine.answered(late[0].number, view, 0), 0)
    assert (first.tick(300), etcd.view.election) == ([ElectionKnown(12)], 12)


def test_an_etcd_that_has_lost_its_data_gets_another_number(etcd: SimEtcd) -> None:
    master = Member(etcd, "m", new_election=11)
    master.lead(0)
    master.tick(300)
    assert etcd.view.election == 11
    etcd.forget()
    other = Member(etcd, "s", 600, epoch=1, empty=False, new_election=12)
    assert other.tick(600) == [ElectionKnown(12)]
    assert master.tick(600) == [ElectionKnown(12), StopLeading()]
    etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "s")),)))
    assert other.lead(5_000) == 2
    assert etcd.view.election == 12


def test_a_running_election_of_the_version_before_gets_a_number_while_somebody_leads(etcd: SimEtcd) -> None:
    master_with(etcd, "s")
    assert etcd.view.election == 0
    slave = Member(etcd, "s", epoch=1, empty=False, new_election=12)
    assert ElectionKnown(12) in slave.tick(0)


def test_a_number_that_nobody_can_read_stays_and_keeps_nobody_from_leading(etcd: SimEtcd) -> None:
    etcd.commit(Transaction((), (Put(ELECTION, b"nonsense"),)))
    assert etcd.view.election == 0
    assert Member(etcd, "m", new_election=11).lead(0) == 1
    assert etcd.view.election == 0
    etcd.commit(Transaction((), (Put(ELECTION, encode_election(5)),)))
    assert etcd.view.election == 5


def test_a_process_says_in_its_folder_and_then_in_etcd_that_it_stands_for_its_store(etcd: SimEtcd) -> None:
    member = Member(etcd, "a", start_number=4)
    member.lead(0)
    assert member.notes == [NoteStart(5, is_older_copy=False)]
    assert etcd.view.starts["a"].number == 5
    assert etcd.view.alive["7"].member == "a"


def test_an_older_copy_of_a_folder_leaves_the_set_before_it_runs(etcd: SimEtcd) -> None:
    """The log of the copy ends where it ended: it may lack what was acknowledged since."""
    leader = master_with(etcd, "s")
    slave = Member(etcd, "s", start_number=1)
    slave.tick(0)
    assert etcd.view.starts["s"].number == 2
    copy = Member(etcd, "s", 10_000, epoch=1, empty=False, start_number=1)
    wants = [want for now_ms in range(10_000, 20_000, 100) for want in copy.tick(now_ms)]
    assert copy.notes == [NoteStart(3, is_older_copy=True)]
    assert wants == [TailSettled()]
    assert leader.members() == {"m"}
    assert copy.machine.role is Role.FOLLOWING


def test_a_crash_between_the_folder_and_etcd_makes_no_older_copy(etcd: SimEtcd) -> None:
    Member(etcd, "a", start_number=1).lead(0)
    assert etcd.view.starts["a"].number == 2
    again = Member(etcd, "a", 10_000, epoch=1, empty=False, start_number=3)
    assert again.lead(10_000) == 2
    assert again.notes == [NoteStart(4, is_older_copy=False)]


def test_a_full_disk_that_takes_no_number_keeps_nobody_from_the_lead(etcd: SimEtcd) -> None:
    Member(etcd, "a").lead(0)
    again = Member(etcd, "a", 10_000, epoch=1, empty=False, start_number=1)
    again.folder_takes_numbers = False
    assert again.lead(10_000) == 2
    assert etcd.view.starts["a"].number == 1


def test_the_number_rises_while_the_log_goes_on(etcd: SimEtcd) -> None:
    """So that a copy of the folder of a process that ran on is older."""
    leader = master_with(etcd)
    for now_ms in range(0, 60_000, 100):
        leader.tick(now_ms)
    assert len(leader.notes) == 1, "nothing was appended"
    for now_ms in range(60_000, 90_000, 100):
        leader.report(now_ms, {}, now_ms)
    assert 3 <= len(leader.notes) - 1 <= 4
    assert etcd.view.starts["m"].number == leader.start_number == len(leader.notes)


def test_a_copy_of_the_store_of_a_process_that_lives_waits_for_its_end(etcd: SimEtcd) -> None:
    leader = master_with(etcd, "s")
    slave = Member(etcd, "s", broker_id=2, place="disk 1")
    slave.tick(0)
    number = etcd.view.starts["s"].number
    copy = Member(etcd, "s", epoch=1, empty=False, broker_id=4, place="disk 2", start_number=number)
    for now_ms in range(0, 9_000, 100):
        slave.machine.heard(now_ms)
        leader.report(0, {"s": MemberReport(0, True, now_ms)}, now_ms)
        slave.tick(now_ms)
        assert copy.tick(now_ms) == []
    assert copy.notes == []
    assert "one folder is a copy of the other" in copy.machine.problems(9_000)[0]
    assert slave.machine.may_speak
    assert not copy.machine.may_speak


def test_a_second_broker_with_the_id_of_one_that_lives_waits_for_its_end(etcd: SimEtcd) -> None:
    leader = Member(etcd, "m", broker_id=3, place="disk 1")
    leader.lead(0)
    second = Member(etcd, "x", broker_id=3, place="disk 2")
    for now_ms in range(0, 9_000, 100):
        leader.report(0, {}, now_ms)
        assert second.tick(now_ms) == []
    assert "another process lives with store m and broker_id 3" in second.machine.problems(9_000)[0]


def test_a_process_in_whose_place_a_copy_has_come_neither_leads_nor_runs(etcd: SimEtcd) -> None:
    """It was stopped for longer than its lease."""
    old = Member(etcd, "a", broker_id=1, place="disk 1")
    old.lead(0)
    copy = Member(etcd, "a", 20_000, epoch=1, empty=False, broker_id=4, place="disk 2")
    assert copy.lead(20_000) == 2
    wants = [want for now_ms in range(20_100, 30_000, 100) for want in (*old.tick(now_ms), *copy.tick(now_ms))]
    assert wants == [StopLeading()]
    assert old.machine.role is Role.FOLLOWING
    assert not old.machine.may_speak
    assert "one folder is a copy of the other" in old.machine.problems(30_000)[0]


def test_an_election_compares_who_stands_for_the_store(etcd: SimEtcd) -> None:
    """A copy may have come since the process that runs has read etcd."""
    member = Member(etcd, "a")
    member.tick(0)
    member.answers = False
    member.run(member.machine.following_stopped(0, 0), 0)
    (election,) = (ask for ask in member.asks if isinstance(ask.request, Transaction))
    etcd.commit(Transaction((), (Put("start/a", b'{"number": 9, "process": "another"}'),)))
    assert etcd.do(election.request, 0) == Committed(False, etcd.revision)


def test_the_last_member_of_the_set_keeps_its_promise_to_a_master_whose_copy_has_left_the_set(etcd: SimEtcd) -> None:
    """That master is cut off from etcd, and acknowledges while its slave answers."""
    leader = Member(etcd, "m", broker_id=1, place="disk 1")
    leader.lead(0)
    leader.report(0, {"s": MemberReport(0, True, 0)}, 0)
    assert leader.members() == {"m", "s"}
    slave = Member(etcd, "s", 1_000, broker_id=2)
    slave.tick(1_000)
    etcd.expire(9_000)
    copy = Member(etcd, "m", 9_000, epoch=1, empty=False, start_number=0, broker_id=4, place="disk 2")
    slave.machine.heard(9_000)
    copy.tick(9_000)
    assert slave.members() == {"s"}
    for now_ms in range(9_000, 12_000, 100):
        assert slave.tick(now_ms) == []
    assert slave.lead(12_000) == 2
