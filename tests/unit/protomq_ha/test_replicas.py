"""A master's table of its slaves: nothing but what was sent counts, and what is confirmed is on as many copies as are waited for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protomq_ha.replicas import (
    Confirmation,
    ImpossibleAckError,
    Limits,
    ReplicaTable,
    ReplicaTakenError,
    Verdict,
)

TIMEOUT_MS = 1_000
GAP = 500


def joined(limits: Limits | None = None, *ids: int) -> ReplicaTable:
    """Slaves with these ids, whose sessions have the same numbers, at the start of an empty log."""
    table = ReplicaTable(limits or Limits(2, 1, GAP, TIMEOUT_MS))
    for replica_id in ids:
        table.join(replica_id, 100 + replica_id, replica_id, f"host{replica_id}", 0, 0)
        table.note_acknowledged(replica_id, 0, 0, 0, 0)
    return table


def test_without_slaves_the_master_is_enough_and_says_so() -> None:
    verdict = joined().verdict(100, 0)
    assert verdict == (1, False, 0, True, False)
    assert joined(Limits(1, 1)).verdict(100, 0).is_short is False


def test_a_send_waits_for_the_slave_that_is_in_sync() -> None:
    table = joined(None, 1)
    table.note_sent(1, 100, 100, 0)
    assert table.verdict(100, 0) == (2, True, 0, False, False)
    table.note_acknowledged(1, 60, 0, 100, 0)
    assert table.verdict(100, 0).confirmed_position == 60
    table.note_acknowledged(1, 100, 60, 100, 0)
    assert table.verdict(100, 0).confirmed_position == 100


def test_what_is_synced_counts_where_the_master_syncs() -> None:
    table = joined(Limits(2, 1, GAP, TIMEOUT_MS, counts_flushed=True), 1)
    table.note_sent(1, 100, 100, 0)
    table.note_acknowledged(1, 100, 40, 100, 0)
    assert table.verdict(100, 0).confirmed_position == 40


def test_of_three_copies_the_second_fastest_counts() -> None:
    table = joined(Limits(2, 1, GAP, TIMEOUT_MS), 1, 2)
    for session, position in ((1, 80), (2, 30)):
        table.note_sent(session, 100, 100, 0)
        table.note_acknowledged(session, position, 0, 100, 0)
    assert table.verdict(100, 0).confirmed_position == 80
    table.limits = Limits(3, 1, GAP, TIMEOUT_MS)
    assert table.verdict(100, 0).confirmed_position == 30


def test_too_few_copies_confirm_nothing_and_refuse_sends() -> None:
    table = joined(Limits(3, 2, GAP, TIMEOUT_MS))
    assert table.verdict(100, 0) == (1, True, 0, True, True)
    table.join(1, 101, 1, "", 100, 0)
    table.note_acknowledged(1, 100, 0, 100, 0)
    assert table.verdict(100, 0) == (2, True, 100, True, False)


def test_a_slave_that_joins_counts_when_it_has_caught_up() -> None:
    table = joined(None)
    table.join(1, 101, 1, "", 0, 0)
    table.note_acknowledged(1, 0, 0, 400, 0)
    assert table.verdict(400, 0).in_sync_count == 1
    table.note_sent(1, 400, 400, 5)
    # The log has gone on meanwhile: it has what there was when it was sent something.
    table.note_acknowledged(1, 400, 0, 450, 9)
    assert table.verdict(450, 9).in_sync_count == 2
    (view,) = table.views(450, 19)
    assert (view.lag_bytes, view.silence_ms, view.is_in_sync) == (50, 10, True)


def test_what_fewer_copies_confirmed_is_not_said_to_be_on_all() -> None:
    """A slave that comes may lack what the other one has confirmed, and the master's own disk is still at."""
    confirmation = Confirmation()
    assert confirmation.has_all_copies(1)
    confirmation.change(Verdict(2, True, 700, True, False), 0)
    assert not confirmation.has_all_copies(700)
    confirmation.change(Verdict(3, True, 50, False, False), 700)
    assert not confirmation.has_all_copies(700)
    assert confirmation.has_all_copies(701)
    confirmation.change(Verdict(3, True, 900, False, False), 900)
    assert confirmation.has_all_copies(701)


@pytest.mark.parametrize("why", ["silent", "far behind", "never catches up", "gone"])
def test_who_is_out(why: str) -> None:
    table = joined(None, 1)
    table.note_sent(1, 100, 100, 0)
    now_ms, log_end = 0, 100
    if why == "silent":
        now_ms = TIMEOUT_MS
        assert table.silent(now_ms - 1) == []
        assert table.silent(now_ms) == [1]
    elif why == "far behind":
        assert table.verdict(GAP, now_ms).in_sync_count == 2
        log_end = GAP + 1
    elif why == "never catches up":
        table.note_acknowledged(1, 50, 0, 100, TIMEOUT_MS - 1)
        assert table.verdict(100, TIMEOUT_MS - 1).in_sync_count == 2
        now_ms = TIMEOUT_MS
    else:
        table.leave(1)
    assert table.verdict(log_end, now_ms).in_sync_count == 1
    assert not table.verdict(log_end, now_ms).waits


@pytest.mark.parametrize(
    ("written", "flushed", "named"),
    [(101, 0, "written_position"), (49, 0, "written_position"), (60, 61, "flushed_position"), (60, 19, "flushed_position")],
)  # fmt: skip
def test_an_impossible_acknowledgement_moves_nothing(written: int, flushed: int, named: str) -> None:
    table = joined(None, 1)
    table.note_sent(1, 100, 200, 0)
    table.note_acknowledged(1, 50, 20, 200, 0)
    before = (table.views(200, 0), table.verdict(200, 0))
    with pytest.raises(ImpossibleAckError) as caught:
        table.note_acknowledged(1, written, flushed, 200, 0)
    assert caught.value.field == named
    assert (table.views(200, 0), table.verdict(200, 0)) == before


def test_an_id_belongs_to_one_store_while_its_session_lasts() -> None:
    table = joined(None, 1)
    with pytest.raises(ReplicaTakenError, match="broker_id 1 and another store follows already, from host1"):
        table.join(1, 7, 9, "", 0, TIMEOUT_MS - 1)
    assert table.find(9) is None
    assert table.join(1, 101, 9, "", 0, 5) == [1]  # its own store may come back at once
    assert table.find(1) is None
    assert table.join(1, 7, 11, "", 0, 5 + TIMEOUT_MS) == [9]  # a silent one is no owner


def test_of_a_store_and_its_copy_under_another_id_one_follows() -> None:
    table = joined(None, 1, 2)
    with pytest.raises(ReplicaTakenError, match=r"broker_id 1 and a store of the same number .* follows already, from host1"):
        table.join(4, 101, 9, "", 0, TIMEOUT_MS - 1)
    assert table.find(9) is None
    assert table.join(4, 101, 10, "", 0, TIMEOUT_MS) == [1], "a silent one is no owner"
    assert [each.replica_id for each in table.views(0, TIMEOUT_MS)] == [2, 4]


def test_the_log_is_kept_for_who_is_furthest_behind() -> None:
    table = joined(None, 1, 2)
    assert joined().kept_position() is None
    for session, position in ((1, 80), (2, 30)):
        table.note_sent(session, 100, 100, 0)
        table.note_acknowledged(session, position, 0, 100, 0)
    assert table.kept_position() == 30


@dataclass
class Model:
    """A slave as it is, whatever it says."""

    sent: int
    written: int
    flushed: int = 0


class ReplicasMachine(RuleBasedStateMachine):
    """Slaves come, go, lie and fall behind: what is confirmed is really there, on as many copies as are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = self.log_end = self.session = 0
        self.limits = Limits(3, 2, GAP, TIMEOUT_MS, counts_flushed=True)
        self.table = ReplicaTable(self.limits)
        self.slaves: dict[int, Model] = {}

    @rule(size=st.integers(1, 300))
    def append(self, size: int) -> None:
        self.log_end += size

    @rule(by=st.integers(0, TIMEOUT_MS))
    def pass_time(self, by: int) -> None:
        self.now_ms += by
        for session in self.table.silent(self.now_ms):
            self.table.leave(session)
            del self.slaves[session]

    @rule(replica_id=st.integers(1, 3), part=st.floats(0, 1))
    def join(self, replica_id: int, part: float) -> None:
        self.session += 1
        position = int(self.log_end * part)
        ended = self.table.join(replica_id, replica_id, self.session, "", position, self.now_ms)
        for each in ended:
            del self.slaves[each]
        self.slaves[self.session] = Model(position, position)

    @precondition(lambda self: self.slaves)
    @rule(data=st.data(), part=st.floats(0, 1))
    def send(self, data: st.DataObject, part: float) -> None:
        session = data.draw(st.sampled_from(sorted(self.slaves)))
        slave = self.slaves[session]
        slave.sent += int((self.log_end - slave.sent) * part)
        self.table.note_sent(session, slave.sent, self.log_end, self.now_ms)

    @precondition(lambda self: self.slaves)
    @rule(data=st.data(), written=st.integers(-50, 1_500), flushed=st.integers(-50, 1_500))
    def acknowledge(self, data: st.DataObject, written: int, flushed: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.slaves)))
        slave = self.slaves[session]
        is_true = slave.written <= written <= slave.sent and slave.flushed <= flushed <= written
        try:
            self.table.note_acknowledged(session, written, flushed, self.log_end, self.now_ms)
        except ImpossibleAckError:
            assert not is_true
        else:
            assert is_true
            slave.written, slave.flushed = written, flushed

    @invariant()
    def confirmed_is_there(self) -> None:
        verdict = self.table.verdict(self.log_end, self.now_ms)
        copies = sum(slave.flushed >= verdict.confirmed_position for slave in self.slaves.values()) + 1
        assert verdict.in_sync_count <= len(self.slaves) + 1
        assert verdict.refuses == (verdict.in_sync_count < 2)
        assert verdict.waits  # two copies must be there
        if verdict.confirmed_position:
            assert copies >= min(3, verdict.in_sync_count)
        if verdict.refuses:
            assert verdict.confirmed_position == 0
        for view in self.table.views(self.log_end, self.now_ms):
            assert not view.is_in_sync or self.log_end - view.flushed_position <= GAP


TestReplicas = ReplicasMachine.TestCase
TestReplicas.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 10), min_size=1, max_size=6), st.integers(1, 4))
def test_confirmed_never_falls_while_the_same_slaves_are_in_sync(
    steps: list[int], wanted: int
) -> None:
    table = joined(Limits(wanted, 1, GAP, TIMEOUT_MS), 1, 2, 3)
    written = {1: 0, 2: 0, 3: 0}
    for session in written:
        table.note_sent(session, 200, 200, 0)
    last = 0
    for index, step in enumerate(steps):
        session = index % 3 + 1
        written[session] += step
        table.note_acknowledged(session, written[session], 0, 200, 0)
        confirmed = table.verdict(200, 0).confirmed_position
        assert confirmed >= last
        last = confirmed


def test_what_a_slave_says_follows_what_it_was_told() -> None:
    table = joined(None, 1)
    table.note_sent(1, 100, 100, 0)
    table.note_said(1, 5_000)
    with pytest.raises(ImpossibleAckError, match="told something at 5000 last"):
        table.note_heard(1, 5_001)
    assert table.reports(100, 0, TIMEOUT_MS, TIMEOUT_MS) == {}, "it has answered nothing yet"
    table.note_heard(1, 5_000)
    table.note_acknowledged(1, 60, 0, 100, 10)
    (member,) = table.reports(100, 10, TIMEOUT_MS, TIMEOUT_MS)
    assert member == "101", "a member is a store"
    assert table.reports(100, 10, TIMEOUT_MS, TIMEOUT_MS)[member] == (60, True, 5_000)
    assert not table.reports(100, 10 + TIMEOUT_MS // 2, TIMEOUT_MS // 2, TIMEOUT_MS)[member].is_live
    table.note_heard(1, 4_000)
    assert table.reports(100, 10, TIMEOUT_MS, TIMEOUT_MS)[member].asked_ms == 5_000


def test_a_new_session_has_answered_nothing() -> None:
    table = joined(None, 1)
    table.note_said(1, 5_000)
    table.note_heard(1, 5_000)
    table.join(1, 101, 7, "host1", 0, 20)
    assert table.reports(0, 20, TIMEOUT_MS, TIMEOUT_MS) == {}


class _Trickle:
    """A slave behind a link that lets too little through. Each step of 100 ms the log grows by 10, and the slave says what it has got."""

    def __init__(self) -> None:
        self.table = joined(Limits(2, 1, 1 << 30, TIMEOUT_MS), 1)
        self.table.note_said(1, 1)
        self.table.note_heard(1, 1)
        self.now_ms = self.log_end = self.has = 0

    def step(self, size: int) -> None:
        """The link lets this much through."""
        self.now_ms += 100
        self.log_end += 10
        self.has = min(self.has + size, self.log_end)
        self.table.note_sent(1, self.log_end, self.log_end, self.now_ms)
        self.table.note_acknowledged(1, self.has, 0, self.log_end, self.now_ms)

    @property
    def is_in_sync(self) -> bool:
        return self.table.verdict(self.log_end, self.now_ms).in_sync_count == 2


def test_a_slave_that_gets_a_little_all_the_time_is_out_when_it_is_too_late() -> None:
    link = _Trickle()
    for _ in range(20):
        link.step(10)
        assert link.is_in_sync
    begun_ms = link.now_ms
    while link.is_in_sync:
        link.step(1)
    assert 0 <= link.now_ms - begun_ms - TIMEOUT_MS <= 100
    for _ in range(100):
        link.step(1)
        verdict = link.table.verdict(link.log_end, link.now_ms)
        assert (verdict.in_sync_count, verdict.is_short, verdict.waits) == (1, True, False), "SLAVE_NOT_AVAILABLE, and nobody waits"
    link.step(10_000)
    assert link.is_in_sync, "it has caught up"


def test_a_slave_that_is_late_by_less_stays_in() -> None:
    link = _Trickle()
    link.step(0)
    for _ in range(200):
        link.step(10)
        assert link.has < link.log_end
        assert link.is_in_sync


def test_a_member_that_gets_a_little_all_the_time_does_not_keep_up() -> None:
    link = _Trickle()
    link.step(10)
    begun_ms = link.now_ms

    def is_live() -> bool:
        reports = link.table.reports(link.log_end, link.now_ms, TIMEOUT_MS, TIMEOUT_MS // 2)
        return reports["101"].is_live

    while is_live():
        link.step(1)
    assert 0 <= link.now_ms - begun_ms - TIMEOUT_MS // 2 <= 100
