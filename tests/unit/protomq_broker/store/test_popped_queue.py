"""One queue as a group pops it, against a model that knows each message by itself."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.v1.state_pb2 import HandOut, PoppedQueue
from protomq.wire.runs import count_in, offsets_in, runs_of
from protomq_broker.store.state import acknowledged, popped_queue
from protomq_broker.store.state.acknowledged import Acknowledged, Remembered
from protomq_broker.store.state.popped_queue import (
    OpenMessages,
    QueueOfGroup,
)
from tests.support.examples import examples

KEY = QueueOfGroup("g", "t", 0)


@dataclass
class ModelMessage:
    number: int = 0
    time_ms: int = 0
    deadline_ms: int = 0
    attempt: int = 0
    sharding_hash: int = 0
    retry_offset: int | None = None
    error: str | None = None


@dataclass
class Model:
    """Every open message by itself."""

    next_offset: int = 0
    open: dict[int, ModelMessage] = field(default_factory=dict)
    count: int = 0
    acked: dict[int, set[int]] = field(default_factory=dict)
    """By the number of the hand-out."""
    forgotten: int = 0

    def first_of_group(self, offset: int) -> bool:
        sharding_hash = self.open[offset].sharding_hash
        return not sharding_hash or offset == min(
            other for other, each in self.open.items() if each.sharding_hash == sharding_hash
        )

    def due(self, now_ms: int, in_order: bool) -> set[int]:
        return {
            offset
            for offset, each in self.open.items()
            if each.attempt and each.deadline_ms <= now_ms and (not in_order or self.first_of_group(offset))
        }

    def ready(self) -> list[int]:
        return [
            offset
            for offset in sorted(self.open)
            if not self.open[offset].attempt and self.first_of_group(offset)
        ]


def seen(known: OpenMessages) -> dict[int, ModelMessage]:
    return {
        offset: ModelMessage(
            each.number, each.time_ms, each.deadline_ms, each.attempt,
            known._hashes.get(offset, 0), known.moved.get(offset), known.errors.get(offset),
        )
        for offset, each in known.open.items()
    }  # fmt: skip


def check(known: OpenMessages, model: Model, now_ms: int) -> None:
    assert known.next_offset == model.next_offset
    assert seen(known) == model.open
    assert known.low_offset == min(model.open, default=model.next_offset)
    for in_order in (False, True):
        due = [offset for offset, _ in known.due(now_ms, 1_000, in_order=in_order)]
        assert len(due) == len(set(due))
        assert set(due) == model.due(now_ms, in_order)
    assert known.ready(1_000) == model.ready()
    deadlines = [each.deadline_ms for each in model.open.values() if each.attempt]
    assert known.next_due_ms() == min(deadlines, default=None)
    every = [0, model.next_offset] if model.next_offset else []
    for number in range(model.count + 1):
        time_ms = known.acknowledged._bounds.get(number, (0, []))[0]
        acked, rest = known.acknowledged.parted(every, number, time_ms)
        assert set(offsets_in(acked)) == model.acked.get(number, set())
        assert sorted([*offsets_in(acked), *offsets_in(rest)]) == list(range(model.next_offset))
        assert known.acknowledged.parted(every, number, time_ms + 1) == ([], runs_of(offsets_in(every)))
        assert known.acknowledged.is_whole(number, 0) is (number > model.forgotten)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_it_says_of_each_message_what_a_model_says(data: st.DataObject) -> None:
    known, model = OpenMessages(KEY, 7, 0, Acknowledged(Remembered(), 0, 0)), Model()
    now_ms = position = 0
    for _ in range(data.draw(st.integers(1, 25), "records")):
        position += 10
        told = PoppedQueue(topic="t", consumer_group="g")
        now_ms += data.draw(st.integers(0, 4), "time")
        # Who pops and settles in one record looks at what was so before it.
        due = known.due(now_ms, 3, in_order=True)
        ready = known.ready(2)
        settled = data.draw(st.lists(st.sampled_from(sorted(model.open) or [0]), max_size=4, unique=True), "settled")
        settled = sorted(offset for offset in settled if offset in model.open)
        cut = data.draw(st.integers(0, len(settled)), "dead from")
        told.acked_runs.extend(runs_of(settled[:cut]))
        told.dead_runs.extend(runs_of(settled[cut:]))
        for offset in settled[:cut]:
            model.acked.setdefault(model.open[offset].number, set()).add(offset)
        for offset in settled:
            del model.open[offset]
        changed = [o for o in sorted(model.open) if model.open[o].attempt and data.draw(st.booleans(), "changed")][:3]
        fresh = data.draw(st.lists(st.sampled_from((0, 0, 1, 2)), max_size=5), "fresh")
        taken: list[tuple[int, int]] = []
        groups = {each.sharding_hash for each in model.open.values()} - {0}
        for offset, sharding_hash in enumerate(fresh, model.next_offset):
            if sharding_hash:
                told.grouped_offsets.append(offset)
                told.sharding_hashes.append(sharding_hash)
            model.open[offset] = ModelMessage(sharding_hash=sharding_hash)
            if sharding_hash not in groups and data.draw(st.booleans(), "given"):
                taken.append((offset, 0))
            else:
                told.waiting_runs.extend((offset, 1))
            if sharding_hash:
                groups.add(sharding_hash)
        model.next_offset += len(fresh)
        told.next_offset = model.next_offset
        if changed:
            told.changes.add(deadline_ms=now_ms + 5, runs=runs_of(changed))
            for offset in changed:
                model.open[offset].deadline_ms = now_ms + 5
            if data.draw(st.booleans(), "failed"):
                error = data.draw(st.sampled_from(("E: a", "E: b")), "error")
                told.errors.add(error=error, runs=runs_of([*changed, 10_000]))  # one of them is not open
                for offset in changed:
                    model.open[offset].error = error
        again = [(offset, attempt) for offset, attempt in due if offset in model.open and offset not in changed]
        again += [(offset, 0) for offset in ready if offset in model.open]
        by_attempt: dict[int, list[int]] = {}
        for offset, attempt in (*again, *taken):
            by_attempt.setdefault(attempt, []).append(offset)
        for attempt, offsets in by_attempt.items():
            model.count += 1
            deadline_ms = now_ms + data.draw(st.integers(0, 9), "invisible")
            told.hand_outs.append(
                HandOut(
                    number=model.count, time_ms=now_ms, deadline_ms=deadline_ms, attempt=attempt + 1,
                    runs=runs_of(sorted(offsets)),
                )
            )  # fmt: skip
            for offset in offsets:
                each = model.open[offset]
                each.number, each.time_ms, each.deadline_ms = model.count, now_ms, deadline_ms
                each.attempt = attempt + 1
        moved = [offset for offset in sorted(model.open) if data.draw(st.integers(0, 9), "moved") == 0]
        told.moved_offsets.extend(moved)
        told.retry_offsets.extend(offset + 1_000 for offset in moved)
        for offset in moved:
            model.open[offset].retry_offset = offset + 1_000
        known.take(told, position)
        check(known, model, now_ms)
        known.take(told, position)  # a replay from an older position
        check(known, model, now_ms)
        if data.draw(st.booleans(), "said again"):
            position += 10
            whole = OpenMessages(KEY, 7, 0, Acknowledged(Remembered(), model.count, 0))
            whole.take(PoppedQueue.FromString(known.statement().SerializeToString()), position)
            assert whole.since == position
            assert whole.hand_out_count == known.hand_out_count == model.count
            known, model.acked, model.forgotten = whole, {}, model.count
            check(known, model, now_ms)


def test_the_oldest_hand_outs_are_forgotten_and_it_is_known_that_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acknowledged, "REMEMBERED_MAX", 2)
    remembered = Remembered()
    one, other = Acknowledged(remembered, 0, 0), Acknowledged(remembered, 0, 0)
    one.add(3, 30, 0, 1)
    one.add(5, 50, 7, 2)
    other.add(1, 10, 4, 1)  # the third
    assert len(remembered.order) == remembered.run_count == 2
    assert one.parted([0, 1], 3, 30) == ([], [0, 1])
    assert [one.is_whole(number, 30) for number in (3, 4)] == [False, True]
    assert one.parted([6, 3], 5, 50) == ([7, 2], [6, 1])
    assert other.is_whole(1, 10)
    for offset in (6, 8):  # runs of their own: they count as hand-outs do
        other.add(1, 10, offset, 1)
    assert remembered.run_count <= 2
    assert not other.is_whole(1, 10)


def test_messages_that_are_acknowledged_one_by_one_in_any_order_become_one_run() -> None:
    remembered = Remembered()
    known = Acknowledged(remembered, 0, 0)
    for offset in random.Random(0).sample(range(100, 132), 32):
        known.add(1, 10, offset, 1)
    assert remembered.run_count == 1
    assert known.parted([90, 20, 130, 10], 1, 10) == ([100, 10, 130, 2], [90, 10, 132, 8])


def test_to_look_up_one_message_costs_nothing_for_the_others_of_its_hand_out() -> None:
    """An acknowledgement may name each of them alone: 10,000 of these took the lane 1.4 s."""
    known = Acknowledged(Remembered(), 0, 0)
    known.add(1, 10, 0, 10_000)
    tracemalloc.start()
    try:
        assert known.parted([5_000, 1], 1, 10) == ([5_000, 1], [])
        assert tracemalloc.get_traced_memory()[1] < 4_096
    finally:
        tracemalloc.stop()


@given(st.sets(st.integers(0, 30)))
def test_runs_name_what_they_are_made_of(offsets: set[int]) -> None:
    runs = runs_of(sorted(offsets))
    assert list(offsets_in(runs)) == sorted(offsets)
    assert count_in(runs) == len(offsets)


def test_what_is_due_is_given_again_and_only_its_hand_out_holds_it() -> None:
    known = OpenMessages(KEY, 7, 0, Acknowledged(Remembered(), 0, 0))
    told = PoppedQueue(next_offset=3)
    told.hand_outs.append(HandOut(number=1, time_ms=0, deadline_ms=10, attempt=1, runs=[0, 3]))
    known.take(told, 0)
    assert known.due(9, 10) == []
    assert known.due(10, 10) == [(0, 1), (1, 1), (2, 1)]
    assert known.due(10, 1) == [(0, 1)]
    assert known.held_and_lost([0, 3], 1, 0) == ([0, 3], [])
    assert known.held_and_lost([0, 3], 2, 0) == known.held_and_lost([0, 3], 1, 5) == ([], [0, 3])
    known.take(PoppedQueue(acked_runs=[1, 1]), 1)
    assert known.held_and_lost([0, 4], 1, 0) == ([0, 1, 2, 1], [1, 1, 3, 1])
    assert known.held_and_lost([0, 1, 1, 1, 2, 1], 1, 0) == ([0, 1, 2, 1], [1, 1])


def test_a_message_that_waits_for_one_that_is_settled_in_its_own_record_is_ready() -> None:
    known = OpenMessages(KEY, 7, 0, Acknowledged(Remembered(), 0, 0))
    told = PoppedQueue(next_offset=1, grouped_offsets=[0], sharding_hashes=[5])
    told.hand_outs.append(HandOut(number=1, time_ms=0, deadline_ms=10, attempt=1, runs=[0, 1]))
    known.take(told, 0)
    assert known.is_group_open(5)
    known.take(
        PoppedQueue(
            acked_runs=[0, 1], next_offset=3, waiting_runs=[1, 2], grouped_offsets=[1, 2], sharding_hashes=[5, 5]
        ),
        1,
    )  # fmt: skip
    assert known.ready(10) == [1]
    assert known.low_offset == 1


def test_what_was_said_first_is_forgotten_where_too_many_have_failed_and_a_statement_keeps_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(popped_queue, "ERRORS_MAX", 3)
    known = OpenMessages(KEY, 7, 0, Acknowledged(Remembered(), 0, 0))
    told = PoppedQueue(next_offset=6)
    told.hand_outs.append(HandOut(number=1, time_ms=0, deadline_ms=10, attempt=1, runs=[0, 6]))
    for error, runs in (("a", [5, 1]), ("b", [0, 3]), ("c", [0, 1]), ("d", [9, 1])):
        told.errors.add(error=error, runs=runs)
    known.take(told, 0)
    assert list(known.errors.items()) == [(1, "b"), (2, "b"), (0, "c")]
    whole = OpenMessages(KEY, 7, 0, Acknowledged(Remembered(), 0, 0))
    whole.take(known.statement(), 1)
    assert list(whole.errors.items()) == list(known.errors.items())
    whole.take(PoppedQueue(acked_runs=[0, 2]), 2)
    assert list(whole.errors.items()) == [(2, "b")]
