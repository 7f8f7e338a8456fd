"""Runs of offsets are the sets that they stand for, and what is told of replays is of one incarnation."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from protomq.v1.state_pb2 import ReplayedDeadLetters
from protomq_broker.store.state.replayed import OffsetRuns, ReplayedLetters

RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=12)


@given(RUNS, st.integers(0, 50), st.integers(0, 50))
def test_runs_are_a_set(runs: list[tuple[int, int]], start: int, end: int) -> None:
    model: set[int] = set()
    found = OffsetRuns()
    for first, count in runs:
        found.add_runs([first, first + count])
        model |= set(range(first, first + count))
    numbers = found.numbers()
    assert {offset for offset in range(60) if offset in found} == model
    assert numbers == sorted(set(numbers)), "rising, and joined where they touch"
    assert OffsetRuns(numbers).numbers() == numbers
    assert found.count_within(start, end) == len(model & set(range(start, end)))


def told(group: str, incarnation: int, *runs: int) -> ReplayedDeadLetters:
    return ReplayedDeadLetters(consumer_group=group, topic_incarnation=incarnation, runs=runs)


def test_what_is_told_of_another_incarnation_counts_no_more() -> None:
    known = ReplayedLetters()
    known.note(told("g", 1, 0, 5), 10)
    known.note(told("g", 1, 7, 9), 20)
    assert known.of("g", 1).numbers() == [0, 5, 7, 9]
    assert known.of("g", 2).numbers() == known.of("h", 1).numbers() == []
    known.note(told("g", 2, 1, 2), 30)
    assert known.of("g", 2).numbers() == [1, 2]
    assert known.of("g", 1).numbers() == []
    assert known.below(30) == []
    assert known.told(known.below(31), 31) == [told("g", 2, 1, 2)]
    assert ReplayedLetters.load(known.dump()).dump() == known.dump()
    known.forget("g")
    assert known.dump() == []


def test_a_group_is_said_again_before_its_first_record_goes_not_only_its_newest() -> None:
    known = ReplayedLetters()
    known.note(told("g", 1, 0, 5), 10)
    known.note(told("g", 1, 7, 9), 20)
    known = ReplayedLetters.load(known.dump())
    assert known.below(10) == []
    (again,) = known.told(known.below(15), 15)
    assert again == told("g", 1, 0, 5, 7, 9)
    known.note(again, 30)
    assert known.below(30) == []


def test_a_slice_of_a_replay_costs_what_it_says_and_not_what_was_said_before() -> None:
    """Of dead letters of two topics one of which is gone, each second one is a run of its own."""
    known = ReplayedLetters()
    slices = [[number for offset in range(start, start + 20, 2) for number in (offset, offset + 1)] for start in range(0, 2_000, 20)]
    with mock.patch.object(OffsetRuns, "_add", autospec=True, side_effect=OffsetRuns._add) as add:
        for position, runs in enumerate(slices, 10):
            before = known.of("g", 1)
            numbers = before.numbers()
            known.note(told("g", 1, *runs), position)
            assert before.numbers() == numbers, "readers see the runs as they were"
    assert add.call_count == 1_000
    assert known.of("g", 1).numbers() == [number for runs in slices for number in runs]
