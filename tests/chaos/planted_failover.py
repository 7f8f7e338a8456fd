"""Bugs of fail-over that are put in on purpose: `planted.py` lists them; the drill is a life of a cluster (`failover_world`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from protomq_broker import ha_follower, state_changes
from protomq_broker.admin_service import AdminService
from protomq_broker.dead_letter_service import DeadLetterService
from protomq_broker.ha_service import HaService
from protomq_broker.leadership_driver import Standing
from protomq_broker.log_time import LogTime
from protomq_broker.replication import Replication
from protomq_broker.state_changes import StateChanges
from protomq_broker.store.following import LogFollowers
from protomq_broker.store.log.agreement import START, LogPoint, LogView
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from protomq_broker.store.start import derived_recovery
from protomq_broker.store.state.replayed import ReplayedLetters
from protomq_broker.store.store import Store
from protomq_broker.tail_file import TailFile
from protomq_ha.leadership import Leadership
from protomq_ha.replicas import ReplicaTable, Verdict

from . import planted_ha, planted_leadership
from .checker import Violation
from .failover_member import Member
from .failover_world import IN_A_CHANGE, check_failover


def counts_what_was_sent() -> Any:
    """A slave has acknowledged what is on its way to it."""
    note_sent = ReplicaTable.note_sent

    def hasty(self: ReplicaTable, session: int, end: int, log_end: int, now_ms: int) -> None:
        note_sent(self, session, end, log_end, now_ms)
        replica = self._by_session[session]
        replica.written_position = replica.flushed_position = end

    return mock.patch.object(ReplicaTable, "note_sent", hasty)


def truncates_by_length() -> Any:
    """A member that is to follow keeps its log up to the end of the shorter one, if that is a point of its own."""

    def shorter(ours: LogView, theirs: LogView, last_epoch: int) -> LogPoint | None:
        ends = [view.epoch_end(1 << 40) for view in (ours, theirs)]
        position = min(end[1] for end in ends if end is not None) if all(ends) else 0
        return ours.log_point(position) or START

    return mock.patch.object(ha_follower, "last_agreed", shorter)


def lease_by_the_wall_clock() -> Any:
    """A clock that is set back makes a lease last."""
    return mock.patch.object(Member, "lease_clock_ms", lambda self: self.clock.boot_ms() + int(self.clock.wall_offset_ms))


def lease_stands_still_in_a_suspend() -> Any:
    """CLOCK_MONOTONIC."""
    return mock.patch.object(Member, "lease_clock_ms", lambda self: self.clock.monotonic_ms())


def masters_serve_what_is_not_confirmed() -> Any:
    """A master gives readers, and confirms to senders, what only it has."""
    verdict_of = HaService.verdict_of

    def hasty(self: HaService, standing: Standing) -> Verdict:
        return verdict_of(self, standing)._replace(confirmed_position=self._positions.appended)

    return mock.patch.object(HaService, "verdict_of", hasty)


def a_new_master_shows_its_whole_log() -> Any:
    """Whoever is elected takes all that it has for confirmed."""
    begin = Replication.begin

    def hasty(self: Replication, *arguments: Any) -> None:
        with mock.patch.object(self._confirmed_file, "read_within", lambda end_position: end_position):
            begin(self, *arguments)

    return mock.patch.object(Replication, "begin", hasty)


def loses_the_producers_when_it_leads() -> Any:
    """A new master knows no repeated sends, as if they did not come from the log; and takes whoever comes for new."""
    lead = Store.lead

    def forget(self: Store, epoch: int | None = None, *, waits_for_replicas: bool = False) -> int:
        self._repeated._clear()
        self._repeated._require = lambda *_: None  # type: ignore[method-assign]
        return lead(self, epoch, waits_for_replicas=waits_for_replicas)

    return mock.patch.object(Store, "lead", forget)


def takes_a_damaged_log_for_whole() -> Any:
    """Nobody hears that a start has skipped parts of the log."""
    return mock.patch.object(Store, "skipped_ranges", ())


def takes_a_cut_log_for_whole() -> Any:
    """A member leads at once although its start has cut the end of its log."""
    return mock.patch.object(Leadership, "_has_most_of_cut_logs", return_value=True)


@contextmanager
def forgets_at_a_kill_that_its_log_was_cut() -> Iterator[None]:
    """What a start has cut is known to its process alone."""
    content = TailFile._content

    def forgetful(self: TailFile, *, is_clean: bool) -> dict[str, Any]:
        return content(self, is_clean=is_clean) | {"was_cut": False}

    with mock.patch.object(derived_recovery, "note_cut"), mock.patch.object(TailFile, "_content", forgetful):
        yield


def leads_in_any_state() -> Any:
    """Whoever finds the lead free takes it, whatever it has promised and lacks."""

    def may_run(self: Leadership, view: Any, now_ms: int) -> bool:
        return bool(view.master is None and now_ms < self._lease_until_ms)

    return mock.patch.object(Leadership, "_may_run", may_run)


def begins_at_its_own_clock() -> Any:
    """Who leads goes by the wall clock of its machine, whatever log time its master had."""
    return mock.patch.object(LogTime, "follow")


def answers_changes_at_once(*makers: Callable[..., Any]) -> Any:
    """Whoever changes something is answered before replicas have the change. `makers`: methods of such changes; all without them."""
    make = StateChanges._make
    nobody_waits = SimpleNamespace(wait=lambda lane, position, wait_ms, done: done(None), request_flush=lambda: None)

    def hasty(self: StateChanges, calls: Any, change: Any) -> None:
        is_meant = not makers or (isinstance(change, partial) and getattr(change.func, "__func__", None) in makers)
        with mock.patch.object(self, "_waiting", nobody_waits) if is_meant else nullcontext():
            make(self, calls, change)

    return mock.patch.object(StateChanges, "_make", hasty)


def deletions_are_answered_at_once() -> Any:
    """Whoever deletes a topic is answered before replicas have it."""
    return answers_changes_at_once(AdminService._delete)


def replays_are_answered_at_once() -> Any:
    """Whoever replays dead letters is answered before replicas have the copies."""
    return answers_changes_at_once(DeadLetterService._append)


def refusals_are_told_at_once() -> Any:
    """Whoever deletes what is not there is told so, though the deletion before is not on the replicas."""
    return mock.patch.object(state_changes, "SAYS_WHAT_IS_THERE", frozenset())


def topics_made_again_keep_their_offsets() -> Any:
    """The queues of a topic that is made again begin where those of the deleted one ended."""
    remove = ConsumeQueueTable.remove_topic

    def keep(self: ConsumeQueueTable, topic: str) -> None:
        end_offset = self.end_offset(topic, 0)
        remove(self, topic)
        if end_offset:
            self.skip_to(topic, 0, end_offset)

    return mock.patch.object(ConsumeQueueTable, "remove_topic", keep)


def slaves_keep_the_queues_of_deleted_topics() -> Any:
    """A slave that hears of a deletion leaves the topic's queues. The next topic of that name has them, as long as nobody sends to it."""

    def apply(self: LogFollowers, topic: str, body: bytes, position: int) -> None:
        for gone in self._machines[topic].apply(body, position):
            self._forget_topic(gone)

    return mock.patch.object(LogFollowers, "_apply_state", apply)


def loses_settings_when_it_leads() -> Any:
    """A new master has no settings of groups."""
    return _forgets_when_it_leads(lambda store: store.groups._settings.clear())


def loses_replays_when_it_leads() -> Any:
    """A new master does not know which dead letters were replayed."""
    return _forgets_when_it_leads(lambda store: setattr(store.groups, "_replayed", ReplayedLetters()))


def _forgets_when_it_leads(forget: Callable[[Store], object]) -> Any:
    real = Store.lead

    def lead(self: Store, *arguments: Any, **named: Any) -> int:
        forget(self)
        return real(self, *arguments, **named)

    return mock.patch.object(Store, "lead", lead)


BUGS: Final[tuple[tuple[str, Callable[[], Any]], ...]] = (
    ("fail-over: acknowledges before it writes", counts_what_was_sent),
    ("fail-over: truncates by length", truncates_by_length),
    ("fail-over: goes on where logs do not agree", planted_ha.goes_on_without_agreement),
    ("fail-over: a lease by the wall clock", lease_by_the_wall_clock),
    ("fail-over: a stale in-sync set", planted_leadership.proposals_count_alone),
    ("fail-over: compares no in-sync set", planted_leadership.compares_no_set),
    ("fail-over: acknowledges alone", planted_leadership.acknowledges_alone),
    ("fail-over: serves before it is confirmed", masters_serve_what_is_not_confirmed),
    ("fail-over: a new master shows its whole log", a_new_master_shows_its_whole_log),
    ("fail-over: a slave serves what it has", planted_ha.a_slave_serves_what_it_has),
    ("fail-over: loses the producers", loses_the_producers_when_it_leads),
    ("fail-over: anybody leads", leads_in_any_state),
    ("fail-over: log time of its own clock", begins_at_its_own_clock),
    ("fail-over: changes are answered before replicas have them", answers_changes_at_once),
    ("fail-over: refuses by what replicas do not have", refusals_are_told_at_once),
    ("fail-over: topics made again keep their offsets", topics_made_again_keep_their_offsets),
    ("fail-over: slaves keep the queues of deleted topics", slaves_keep_the_queues_of_deleted_topics),
    ("fail-over: loses the settings of groups", loses_settings_when_it_leads),
    ("fail-over: loses what was replayed", loses_replays_when_it_leads),
)  # fmt: skip
"""They show in any life of a whole cluster, some of them in few."""


def drill(seed: int) -> list[Violation]:
    """A life of a whole cluster."""
    return check_failover(seed, Counter())


def suspended_members(seed: int) -> list[Violation]:
    """A life in which machines are suspended, and nothing else is wrong."""
    return check_failover(seed, Counter(), ("suspend",))


def killed_with_cut_logs(seed: int) -> list[Violation]:
    """Lives in which starts cut logs whose last appends are damaged, and are killed again."""
    lives = (check_failover(life, Counter(), ("flipped byte", "kill")) for life in range(3 * seed, 3 * seed + 3))
    return next((found for found in lives if found), [])


def damaged_and_switched(seed: int) -> list[Violation]:
    """A life in which bytes flip, and the lead is given to whoever is in sync."""
    return check_failover(seed, Counter(), ("flipped byte", "switch"))


def killed_in_changes(seed: int) -> list[Violation]:
    """A life in which masters are cut off and killed just when they are asked for a change."""
    return check_failover(seed, Counter(), (IN_A_CHANGE,))


BUGS_OF_FEW_FAULTS: Final[tuple[tuple[str, Callable[[], Any], Callable[[int], list[Violation]]], ...]] = (
    ("fail-over: a lease that stands still in a suspend", lease_stands_still_in_a_suspend, suspended_members),
    ("fail-over: forgets at a kill that its log was cut", forgets_at_a_kill_that_its_log_was_cut, killed_with_cut_logs),
    ("fail-over: takes a damaged log for whole", takes_a_damaged_log_for_whole, damaged_and_switched),
    ("fail-over: takes a cut log for whole", takes_a_cut_log_for_whole, killed_with_cut_logs),
    ("fail-over: deletions are answered before replicas have them", deletions_are_answered_at_once, killed_in_changes),
    ("fail-over: replays are answered before replicas have them", replays_are_answered_at_once, killed_in_changes),
)
"""The same, with the lives in which they show: others have too many other faults."""
