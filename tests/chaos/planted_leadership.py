"""Bugs of leadership that are put in on purpose: `planted.py` has them in its list; the drill is a random life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from protomq_ha import leadership, orders
from protomq_ha.cluster_state import (
    IN_SYNC,
    MASTER,
    ORDER,
    PROMOTE_UNCLEAN,
    ClusterView,
    InSync,
    LogEnd,
    Transaction,
)
from protomq_ha.in_sync_set import InSyncSet, MemberReport
from protomq_ha.leadership import Leadership
from protomq_ha.leadership_values import Ask, Effect, Follow, Lease, OwnLog, Request, Role

from .checker import Violation
from .leadership_broker import SimBroker
from .leadership_world import (
    LeadershipWorld,
    Mood,
    check_copy_under_brokers,
    check_cut_logs,
    check_late_answers,
    check_leadership,
    check_older_etcd,
    check_quotas,
    check_restored_etcd,
    check_two_operators,
    check_young_cluster,
)


def lease_by_the_wall_clock() -> Any:
    """A clock that is set back makes a lease last."""
    return mock.patch.object(
        SimBroker, "clock_ms", lambda self: self.boot_ms() + int(self.wall_offset_ms)
    )


def lease_stands_still_in_a_suspend() -> Any:
    """CLOCK_MONOTONIC."""
    return mock.patch.object(
        SimBroker, "clock_ms", lambda self: self.boot_ms() - int(self.asleep_ms * self.rate)
    )


def lease_counts_from_the_answer() -> Any:
    """Not from when the renewal was sent."""
    real = Leadership._note_lease

    def note_lease(self: Leadership, lease: Lease, sent_ms: int, now_ms: int) -> None:
        real(self, lease, now_ms, now_ms)

    return mock.patch.object(Leadership, "_note_lease", note_lease)


def acknowledges_whatever_the_lease() -> Any:
    """Whoever believes to lead acknowledges."""
    return mock.patch.object(
        Leadership, "may_acknowledge", lambda self, now_ms: self.in_sync is not None and self.role is Role.LEADING
    )


def acknowledges_what_it_gave_away() -> Any:
    """A master that has handed over trusts its lease still."""

    def may_acknowledge(self: Leadership, now_ms: int) -> bool:
        gave_away, self._gave_away = self._gave_away, False
        try:
            return _MAY_ACKNOWLEDGE(self, now_ms)
        finally:
            self._gave_away = gave_away

    return mock.patch.object(Leadership, "may_acknowledge", may_acknowledge)


_MAY_ACKNOWLEDGE: Final = Leadership.may_acknowledge


def breaks_its_promise() -> Any:
    """A member runs as soon as the master key is gone, though its master counts on it."""
    return mock.patch.object(Leadership, "heard")


def promises_count_from_their_arrival() -> Any:
    """A master trusts a promise from when it has heard it."""

    def vouched_until(
        self: InSyncSet, promise_ms: int, reports: Mapping[str, MemberReport]
    ) -> int | None:
        return (1 << 60) if self.others <= reports.keys() else None

    return mock.patch.object(InSyncSet, "vouched_until", vouched_until)


def acknowledges_alone() -> Any:
    """What the master has is confirmed."""

    def confirm(self: InSyncSet, own_position: int, reports: Mapping[str, MemberReport]) -> int:
        self.confirmed_position = own_position
        return own_position

    return mock.patch.object(InSyncSet, "confirm", confirm)


def proposals_do_not_count() -> Any:
    """A set whose change is not known to be made counts as it was."""
    return mock.patch.object(InSyncSet, "propose")


def proposals_count_alone() -> Any:
    """A change whose outcome is not known is taken for made."""

    def propose(self: InSyncSet, members: frozenset[str]) -> None:
        self.members = members

    return mock.patch.object(InSyncSet, "propose", propose)


def joins_without_the_past() -> Any:
    """A slave joins with what this master has confirmed, whatever an earlier one has acknowledged."""
    real = InSyncSet.begin

    def begin(self: InSyncSet, start_position: int, now_ms: int, gone: str) -> None:
        real(self, 0, now_ms, gone)

    return mock.patch.object(InSyncSet, "begin", begin)



def _without_compares(*keys: str) -> Any:
    real = Leadership._ask

    def ask(self: Leadership, effects: Any, request: Any, now_ms: int) -> None:
        if isinstance(request, Transaction):
            compares = tuple(compare for compare in request.compares if compare.key not in keys)
            request = Transaction(compares, request.puts, request.deletes)
        real(self, effects, request, now_ms)

    return mock.patch.object(Leadership, "_ask", ask)



def compares_no_set() -> Any:
    """Elections and sets are written whatever has become of the set."""
    return _without_compares(IN_SYNC)


def anybody_runs() -> Any:
    """A store from outside the set runs for election."""
    real = Leadership._may_run

    def may_run(self: Leadership, view: ClusterView, now_ms: int) -> bool:
        is_free = view.master is None and now_ms >= self._heard_ms + self.settings.lease_ttl_ms
        return real(self, view, now_ms) or (is_free and now_ms < self._lease_until_ms)

    return mock.patch.object(Leadership, "_may_run", may_run)


def runs_without_its_tail() -> Any:
    """A store whose machine has crashed stays in the set."""
    real = Leadership.__init__

    def begin(self: Leadership, *arguments: Any, tail_may_be_lost: bool, **others: Any) -> None:
        real(self, *arguments, tail_may_be_lost=False, **others)

    return mock.patch.object(Leadership, "__init__", begin)



def leads_with_a_cut_log() -> Any:
    """A member whose start has cut its log runs as if it had lost nothing."""
    return mock.patch.object(Leadership, "_has_most_of_cut_logs", return_value=True)


def the_first_of_cut_logs_leads() -> Any:
    """Where all logs were cut, nobody asks which one has the most."""

    def has_most(self: Leadership, in_sync: InSync, cut_end: LogEnd) -> bool:
        return all(self._says_cut(each) for each in in_sync.members - {self.settings.member})

    return mock.patch.object(Leadership, "_has_most_of_cut_logs", has_most)


def forgets_a_second_cut() -> Any:
    """What caught up before the store was opened again settles what that has cut, too."""
    return mock.patch.object(leadership, "may_forget_cut", return_value=True)


def forgets_a_second_doubt() -> Any:
    """What has left the set before its log failed settles that, too."""
    return mock.patch.object(leadership, "may_forget_doubt", return_value=True)


def keeps_its_epoch() -> Any:
    """An election takes the epoch that is there."""
    real = Leadership._election

    def election(self: Leadership, view: ClusterView) -> Transaction:
        made = real(self, view)
        epoch = view.in_sync.epoch if view.in_sync is not None else 1
        puts = tuple(
            put._replace(value=put.value.replace(f'"epoch": {epoch + 1}'.encode(), f'"epoch": {epoch}'.encode()))
            for put in made.puts
        )
        return Transaction(made.compares, puts, made.deletes)

    return mock.patch.object(Leadership, "_election", election)


def replaced_stores_keep_their_name() -> Any:
    """A member is an address: an empty store that replaces one is the same member. It has its number, too: else it is an older copy."""

    def fault(self: LeadershipWorld) -> None:
        before = {broker.name: broker.disk for broker in self.brokers}
        _FAULT(self)
        for broker in self.brokers:
            old = before.get(broker.name, broker.disk)
            if broker.disk.member != old.member:
                broker.disk.member, broker.disk.start_number = old.member, old.start_number

    return mock.patch.object(LeadershipWorld, "fault", fault)


_FAULT: Final = LeadershipWorld.fault



def drops_its_log_for_whoever_leads() -> Any:
    """A member with messages follows an empty one."""
    return mock.patch.object(SimBroker, "may_drop", return_value=True)


def heads_of_logs_are_alike() -> Any:
    """Logs that share their first bytes only are taken for two pasts."""
    return mock.patch.object(SimBroker, "has_own_head", new=False)


def masters_note_nothing() -> Any:
    """What a master has confirmed is in its memory only."""
    return mock.patch.object(SimBroker, "note_confirmed")


def runs_ahead_of_etcd() -> Any:
    """A member whose log has a later epoch than etcd runs, if etcd's set names it."""
    real = Leadership._may_run

    def may_run(self: Leadership, view: ClusterView, now_ms: int) -> bool:
        with mock.patch.object(self, "_is_ahead", return_value=False):
            return real(self, view, now_ms)

    return mock.patch.object(Leadership, "_may_run", may_run)


def holds_the_key_of_a_copy() -> Any:
    """A member that etcd names again as the master does not lead, and renews the lease of that key."""
    real = Leadership._ask

    def ask(self: Leadership, effects: list[Effect], request: Request, now_ms: int) -> None:
        if not (isinstance(request, Transaction) and request.deletes == (MASTER,) and not request.puts):
            real(self, effects, request, now_ms)

    return mock.patch.object(Leadership, "_ask", ask)


def takes_the_key_of_a_copy_for_its_election() -> Any:
    """A member that runs leads in the epoch of the key that it finds there as its own."""
    real = Leadership._while_running

    def while_running(self: Leadership, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        own_epoch = self.own_epoch
        self.own_epoch = 0 if self._is_held_here(view) else own_epoch
        real(self, effects, view, now_ms)
        self.own_epoch = own_epoch

    return mock.patch.object(Leadership, "_while_running", while_running)


def an_epoch_may_have_two_writers() -> Any:
    """A member follows a master of the epoch that its log has from another one."""
    real = OwnLog.kept_for

    def kept_for(self: OwnLog, follow: Follow, *, shares_past: bool) -> int:
        return real(self, follow._replace(epoch=self.epoch + 1), shares_past=shares_past)

    return mock.patch.object(OwnLog, "kept_for", kept_for)


def believes_a_disk_at_once() -> Any:
    """A member that has given the lead away for its disk takes it again as soon as the disk reports room."""
    return mock.patch.object(Leadership, "_counts_as_full", lambda self, now_ms: self.is_full)


def etcds_of_a_copy(seed: int) -> list[Violation]:
    """Etcd goes back in time."""
    return check_restored_etcd(seed, Counter())


def etcds_of_an_older_copy(seed: int) -> list[Violation]:
    """Etcd goes back in time, behind the epoch of all logs."""
    return check_older_etcd(seed, Counter())


def etcds_of_a_copy_under_brokers(seed: int) -> list[Violation]:
    """Etcd goes back in time, behind some changes of the master, while all brokers run on."""
    return check_copy_under_brokers(seed, Counter())


def disks_with_quotas(seed: int) -> list[Violation]:
    """No disk takes messages, and all report room."""
    return check_quotas(seed, Counter())


def young_clusters(seed: int) -> list[Violation]:
    """Nothing was acknowledged when the first master dies."""
    return check_young_cluster(seed, Counter())


def deaf_masters(seed: int) -> list[Violation]:
    """Masters that have handed over, and do not hear that it is done."""
    return _lives(seed, Mood(("switch",), 0.0, 0.0, deafens=True))


def lives_with_an_etcd_that_forgets(seed: int) -> list[Violation]:
    """Members are away, and replaced, when etcd has lost its data."""
    return _lives(seed, Mood(("all down", "kill", "replace", "replace", "forget"), 0.0, 0.0, 0.0, True))


def stores_that_open_again(seed: int) -> list[Violation]:
    """Starts cut logs, and so do openings just when a member has caught up; then all are down, or the master is."""
    return _lives(seed, Mood(("kill", "switch"), 0.0, 0.0, reopens=True))


def logs_that_fail_again(seed: int) -> list[Violation]:
    """Members leave the set after a power cut, and join; then their logs fail, and all are down."""
    return _lives(seed, Mood(("power", "power", "switch"), 0.0, 0.0, fails=True))


def drill(seed: int) -> list[Violation]:
    """Ten random lives, up to the first that is red."""
    return _lives(seed, None)


def two_operators(seed: int) -> list[Violation]:
    """Nobody can lead, a switch stands, and two operators promote."""
    return check_two_operators(seed, Counter())


def late_answers(seed: int) -> list[Violation]:
    """Etcd's answer to a renewal comes late, and its master is cut off."""
    return check_late_answers(seed, Counter())


def cut_logs(seed: int) -> list[Violation]:
    """All logs are cut, and one of them has lost more."""
    return check_cut_logs(seed, Counter())


def a_switch_stands_in_the_way() -> Any:
    """No order replaces another one."""
    real = orders.to_leave

    def to_leave(view: ClusterView, kind: str, target: str) -> Transaction | None:
        if view.order is not None:
            raise orders.OrderStandsError("another order is there")
        return real(view, kind, target)

    return mock.patch.object(orders, "to_leave", to_leave)


def orders_replace_what_nobody_has_seen() -> Any:
    """An unclean promotion replaces whatever stands there when it is written."""
    real = orders.to_leave

    def to_leave(view: ClusterView, kind: str, target: str) -> Transaction | None:
        made = real(view, kind, target)
        return replace(made, compares=()) if made is not None and kind == PROMOTE_UNCLEAN else made

    return mock.patch.object(orders, "to_leave", to_leave)


def members_write_their_own_numbers() -> Any:
    """Whoever has not seen the number of the election writes one, though another one has done so meanwhile."""
    real = Leadership._begin_election

    def begin(self: Leadership, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        count = len(effects)
        real(self, effects, view, now_ms)
        if len(effects) > count:
            ask = effects.pop()
            assert isinstance(ask, Ask)
            assert isinstance(ask.request, Transaction)
            effects.append(Ask(ask.number, replace(ask.request, compares=())))

    return mock.patch.object(Leadership, "_begin_election", begin)


def trusts_an_older_copy() -> Any:
    """Of a folder, if etcd knows a later start of its store."""
    return mock.patch.object(Leadership, "tail_may_be_lost", return_value=None)


def copies_live_beside_their_stores() -> Any:
    """Nobody waits for a lease to run out."""
    return mock.patch.object(ClusterView, "in_the_way", return_value=None)


def copies_of_folders(seed: int) -> list[Violation]:
    """Folders go back, and copies start, while little else happens."""
    return _lives(seed, Mood(("kill", "all down", "pause", "switch"), 0.0, 0.02, copied=0.4))


def stores_that_come_back_poorer(seed: int) -> list[Violation]:
    """Lives in which little else happens, mostly when the lead or the set has just changed."""
    return _lives(seed, Mood(("replace", "kill", "cut", "switch"), 0.0, 0.1, hasty=0.9))


def _lives(seed: int, mood: Mood | None) -> list[Violation]:
    lives = (check_leadership(life, Counter(), mood) for life in range(10 * seed, 10 * seed + 10))
    return next((found for found in lives if found), [])


BUGS: Final[tuple[tuple[Any, ...], ...]] = (
    ("counts its lease by the wall clock", lease_by_the_wall_clock, drill),
    ("counts its lease by a clock that stands still in a suspend", lease_stands_still_in_a_suspend, drill),
    ("counts its lease from the answer", lease_counts_from_the_answer, late_answers),
    ("acknowledges behind its lease", acknowledges_whatever_the_lease, drill),
    ("acknowledges what it has given away", acknowledges_what_it_gave_away, deaf_masters),
    ("breaks its promise", breaks_its_promise, drill),
    ("trusts promises for ever", promises_count_from_their_arrival, drill),
    ("acknowledges what it has alone", acknowledges_alone, drill),
    ("does not count proposals", proposals_do_not_count, drill),
    ("takes proposals for made", proposals_count_alone, drill),
    ("lets slaves join without the past", joins_without_the_past, stores_that_come_back_poorer),
    ("compares no in-sync set", compares_no_set, drill),
    ("runs from outside the set", anybody_runs, drill),
    ("runs without the end of its log", runs_without_its_tail, drill),
    ("runs with a log whose end was cut", leads_with_a_cut_log, drill),
    ("takes any of the logs that were cut", the_first_of_cut_logs_leads, cut_logs),
    ("forgets that its log was cut once more", forgets_a_second_cut, stores_that_open_again),
    ("forgets that its log has failed once more", forgets_a_second_doubt, logs_that_fail_again),
    ("keeps the epoch at an election", keeps_its_epoch, drill),
    ("drops its log for whoever leads", drops_its_log_for_whoever_leads, lives_with_an_etcd_that_forgets),
    ("writes down nothing of what a master confirms", masters_note_nothing, etcds_of_a_copy),
    ("runs although its log is ahead of etcd", runs_ahead_of_etcd, etcds_of_an_older_copy),
    ("holds the master key of a copy of etcd", holds_the_key_of_a_copy, etcds_of_a_copy_under_brokers),
    ("takes the master key of a copy for its election", takes_the_key_of_a_copy_for_its_election, etcds_of_a_copy_under_brokers),
    ("lets an epoch have two writers", an_epoch_may_have_two_writers, etcds_of_a_copy),
    ("takes a young cluster for two", heads_of_logs_are_alike, young_clusters),
    ("believes at once that a disk has room again", believes_a_disk_at_once, disks_with_quotas),
    ("gives an election a second number", members_write_their_own_numbers, drill),
    ("lets a switch stand in the way of an emergency", a_switch_stands_in_the_way, two_operators),
    ("replaces an order that its operator has not seen", orders_replace_what_nobody_has_seen, two_operators),
    ("takes an order that was replaced", lambda: _without_compares(ORDER), two_operators),
    ("trusts an older copy of a folder", trusts_an_older_copy, copies_of_folders),
    ("lets a copy live beside its store", copies_live_beside_their_stores, copies_of_folders),
    ("takes a replaced store for the old one", replaced_stores_keep_their_name, drill),
)
"""(name, what plants it, where it shows, within how many seeds where that is not the default)."""
