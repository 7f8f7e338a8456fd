"""The machine of transactions against a model that keeps every event in a list and searches it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protomq_broker.store.state import transactions as module
from protomq_broker.store.state.transactions import (
    CheckPlan,
    Ending,
    HalfMessage,
    Key,
    OpenTransaction,
    TransactionKey,
    Transactions,
    Verdict,
    checked_record,
    ended_record,
)
from tests.support.examples import examples

STEP = 10_000
"""Between two appends of the model's log: more than one carries."""
PLAN = CheckPlan(immunity_ms=100, interval_ms=1_000, check_count_max=2)


def key(sequence: int) -> TransactionKey:
    return TransactionKey(7, 0, sequence)


def half(sequence: int, time_ms: int, position: int | None = None) -> HalfMessage:
    return HalfMessage(
        key(sequence), sequence * 100 if position is None else position, 90, "topic", 1, time_ms
    )


def ended(endings: Sequence[tuple[TransactionKey, Ending]]) -> bytes:
    return ended_record([one for one, _ in endings], bytes(ending for _, ending in endings))


def opened(*sequences: int) -> Transactions:
    machine = Transactions(PLAN)
    machine.open([half(sequence, 0) for sequence in sequences])
    return machine


def test_a_check_comes_after_the_immunity_and_again_after_the_interval_and_then_it_expires() -> (
    None
):
    machine = opened(1)
    times: dict[str, list[int]] = {"check": [], "expire": []}
    for now_ms in range(0, 4_000, 50):
        due = machine.due(now_ms, 10)
        if due.to_check:
            times["check"].append(now_ms)
            machine.apply(checked_record([h.key for h in due.to_check], now_ms), 0)
        if due.to_expire:
            times["expire"].append(now_ms)
            machine.apply(ended([(h.key, Ending.EXPIRED) for h in due.to_expire]), 0)
    assert times == {"check": [100, 1_100], "expire": [2_100]}
    assert machine.open_count == 0
    assert machine.counts[Ending.EXPIRED] == 1
    assert machine.next_due_ms() is None


def test_what_has_ended_leaves_nothing_that_waits_to_be_due() -> None:
    machine = opened(*range(1, 1_000))
    machine.apply(checked_record([key(999)], 50), 0)
    machine.apply(ended([(key(n), Ending.COMMITTED) for n in range(1, 998)]), 0)
    assert len(machine._first_due) + len(machine._due) == 3  # that of 999 before it was asked about, too
    assert [h.key.sequence for h in machine.due(5_000, 10).to_check] == [998, 999]
    assert machine.next_due_ms() == 100


@pytest.mark.parametrize("first", [Ending.COMMITTED, Ending.ROLLED_BACK])
def test_a_decision_is_repeated_contradicted_or_unknown(first: Ending) -> None:
    machine = opened(1)
    assert machine.decide(key(1), first) == (Verdict.END, half(1, 0), None)
    machine.apply(ended([(key(1), first)]), 0)
    other = Ending.COMMITTED if first is Ending.ROLLED_BACK else Ending.ROLLED_BACK
    assert machine.decide(key(1), first) == (Verdict.REPEATED, None, first)
    assert machine.decide(key(1), other) == (Verdict.CONTRADICTED, None, first)
    assert machine.decide(key(2), first).verdict is Verdict.UNKNOWN


def test_the_second_of_two_endings_in_the_log_changes_nothing() -> None:
    machine = opened(1)
    machine.apply(ended([(key(1), Ending.COMMITTED), (key(1), Ending.ROLLED_BACK)]), 0)
    assert machine.decide(key(1), Ending.COMMITTED).verdict is Verdict.REPEATED
    assert machine.counts[Ending.ROLLED_BACK] == 0


def test_a_record_that_was_made_here_changes_what_its_bytes_change() -> None:
    endings = [(key(n), (Ending.COMMITTED, Ending.ROLLED_BACK)[n % 2]) for n in (3, 1, 2, 9)]
    maker, reader = opened(1, 2, 3, 4), opened(1, 2, 3, 4)
    made = maker.ended_record([one for one, _ in endings], bytes(ending for _, ending in endings))
    assert made == ended(endings)
    maker.apply(made, 500)
    reader.apply(bytes(bytearray(made)), 500)
    assert maker.known().open == reader.known().open
    assert maker.known().ended.tolist() == reader.known().ended.tolist()
    assert (maker.counts, maker.size_bytes) == (reader.counts, reader.size_bytes)
    # One that was made and did not come to the log is nobody's.
    maker.ended_record([key(4)], bytes([Ending.COMMITTED]))
    maker.apply(checked_record([key(4)], 600), 600)
    assert [one.check_count for one in maker.open_transactions()] == [1]


def test_no_more_are_checked_at_a_time_than_asked_for() -> None:
    machine = opened(*range(5))
    assert len(machine.due(100, 3).to_check) == 3
    assert len(machine.due(100, 9).to_check) == 5
    machine.apply(checked_record([key(0)], 100), 0)
    assert [h.key.sequence for h in machine.due(100, 9).to_check] == [1, 2, 3, 4]


def test_endings_are_forgotten_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDED_MAX", 2)
    machine = opened(1, 2, 3)
    machine.apply(ended([(key(n), Ending.COMMITTED) for n in (1, 2, 3)]), 0)
    verdicts = [machine.decide(key(n), Ending.COMMITTED).verdict for n in (1, 2, 3)]
    assert verdicts == [Verdict.UNKNOWN, Verdict.REPEATED, Verdict.REPEATED]


def test_an_ending_whose_half_message_is_deleted_is_known() -> None:
    machine = Transactions(PLAN)
    machine.apply(ended([(key(1), Ending.COMMITTED)]), 0)
    assert machine.decide(key(1), Ending.ROLLED_BACK).verdict is Verdict.CONTRADICTED
    assert machine.counts[Ending.COMMITTED] == 0


def test_a_plan_of_fewer_checks_than_there_were_expires_them() -> None:
    machine = opened(1)
    for time_ms in (100, 1_100):
        machine.apply(checked_record([key(1)], time_ms), 0)
    shorter = Transactions(CheckPlan(100, 1_000, 1))
    shorter.open([half(1, 0)])
    shorter.apply(machine.carried_record([key(1)]), 0)
    assert shorter.due(2_099, 9) == ([], [])
    assert shorter.due(2_100, 9) == ([], [half(1, 0)])


@pytest.mark.parametrize(
    "body",
    [
        b"\xff",
        ended([(key(1), Ending.COMMITTED)])[:-1] + b"\x09",
        ended([(key(1), Ending.COMMITTED)]) + b"\x0a\x08" + bytes(8),
    ],
)
def test_a_record_that_does_not_hold_changes_nothing_and_is_said(
    body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    machine = opened(1)
    with caplog.at_level(logging.ERROR):
        machine.apply(body, 77)
    assert "77" in caplog.text
    assert machine.open_count == 1


def test_who_carries_some_forward_looks_at_no_more_than_these() -> None:
    """Housekeeping asks for 256 at a time, of 200,000. To look at all of them each time took a minute of the interpreter."""
    machine = opened(*range(6))
    looked_at: list[int] = []

    class Looked(dict[Key, OpenTransaction]):
        def values(self) -> Iterator[OpenTransaction]:  # type: ignore[override]
            for number, known in enumerate(super().values()):
                looked_at.append(number)
                yield known

    machine._open = Looked(machine._open)
    assert [one.key.sequence for one in machine.below(400, 2)] == [0, 1]
    assert len(looked_at) <= 3


class AgainstModel(RuleBasedStateMachine):
    """Every step goes to the log first. A second machine that reads what is left of the log must know the same."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Transactions(PLAN)
        self.log: list[tuple[int, list[HalfMessage] | bytes]] = []
        self.now_ms = 0
        self.position = 0
        self.log_start = 0
        self.sequence = 0
        # Of the open ones: sent, checked, checked.
        self.times_ms: dict[TransactionKey, list[int]] = {}
        self.ended: dict[TransactionKey, Ending] = {}

    def end(self, keys: list[TransactionKey], ending: Ending) -> None:
        for k in keys:
            del self.times_ms[k]
            self.ended[k] = ending

    def append(self, entry: list[HalfMessage] | bytes) -> None:
        self.log.append((self.position, entry))
        if isinstance(entry, bytes):
            self.machine.apply(entry, self.position)
        else:
            self.machine.open(entry)
        self.position += STEP

    @rule(count=st.integers(1, 3))
    def send(self, count: int) -> None:
        halves = [half(self.sequence + n, self.now_ms, self.position + n) for n in range(count)]
        self.sequence += count
        self.times_ms.update({h.key: [self.now_ms] for h in halves})
        self.append(halves)

    @rule(ms=st.integers(1, 1_500))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    @precondition(lambda self: bool(self.times_ms or self.ended))
    @rule(data=st.data(), wanted=st.sampled_from([Ending.COMMITTED, Ending.ROLLED_BACK]))
    def decide(self, data: st.DataObject, wanted: Ending) -> None:
        chosen = data.draw(st.sampled_from(sorted({*self.times_ms, *self.ended})))
        decision = self.machine.decide(chosen, wanted)
        if chosen in self.times_ms:
            assert decision.verdict is Verdict.END
            self.append(ended([(chosen, wanted)]))
            self.end([chosen], wanted)
            return
        known = self.ended[chosen]
        assert decision.verdict is (Verdict.REPEATED if known is wanted else Verdict.CONTRADICTED)
        assert decision.ending is known

    @rule(count_max=st.integers(1, 4))
    def take_what_is_due(self, count_max: int) -> None:
        due = self.machine.due(self.now_ms, count_max)
        expected = {
            k: len(times) <= PLAN.check_count_max
            for k, times in self.times_ms.items()
            if self.now_ms - times[-1]
            >= (PLAN.immunity_ms if len(times) == 1 else PLAN.interval_ms)
        }
        to_check, to_expire = [h.key for h in due.to_check], [h.key for h in due.to_expire]
        assert len(to_check) + len(to_expire) == min(count_max, len(expected))
        assert all(expected[k] for k in to_check)
        assert not any(expected[k] for k in to_expire)
        if to_check:
            self.append(checked_record(to_check, self.now_ms))
            for k in to_check:
                self.times_ms[k].append(self.now_ms)
        if to_expire:
            self.append(ended([(k, Ending.EXPIRED) for k in to_expire]))
            self.end(to_expire, Ending.EXPIRED)

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """Retention: what is alive in front of the cut is appended again, then the front of the log goes."""
        # Between two appends.
        cut = data.draw(st.integers(self.log_start // STEP, self.position // STEP)) * STEP
        count = self.machine.open_count
        halves = self.machine.below(cut, count)
        assert halves == [known.half for known in self.machine.open_transactions() if known.half.position < cut]
        assert self.machine.below(cut, count // 2) == halves[: count // 2]
        if halves:
            keys = [h.key for h in halves]
            body = self.machine.carried_record(keys)
            again = [
                h._replace(position=self.position + n, store_time_ms=self.now_ms)
                for n, h in enumerate(halves)
            ]
            self.append(again)
            self.append(body)
        self.log = [entry for entry in self.log if entry[0] >= cut]
        self.log_start = cut

    @invariant()
    def a_replay_knows_the_same_of_what_is_open(self) -> None:
        other = Transactions(PLAN)
        for position, entry in self.log:
            if isinstance(entry, bytes):
                other.apply(entry, position)
            else:
                other.open(entry)
        expected = {k: len(times) - 1 for k, times in self.times_ms.items()}
        for machine in (self.machine, other):
            assert {known.half.key: known.check_count for known in machine.open_transactions()} == expected
            assert machine.open_count == len(expected)
        assert other.open_transactions() == self.machine.open_transactions()
        assert other.size_bytes == self.machine.size_bytes
        loaded = Transactions(PLAN)
        loaded.load(self.machine.known())
        assert loaded.open_transactions() == self.machine.open_transactions()
        assert loaded.next_due_ms() == self.machine.next_due_ms()
        assert (other.next_due_ms() is None) == (not expected)


AgainstModel.TestCase.settings = settings(max_examples=examples(100))
TestAgainstModel = AgainstModel.TestCase
