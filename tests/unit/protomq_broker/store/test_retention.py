from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.store.housekeeping.retention import (
    FORCED_COUNT_MAX,
    Look,
    RetentionDecision,
    RetentionRules,
    RetentionState,
    SegmentAge,
    decide,
)

HOUR = 3_600_000
NOW = 500_000 * HOUR
RULES = RetentionRules()
SEGMENT_SIZE = 1000


def make_segments(*ages_hours: float, now_ms: int = NOW) -> list[SegmentAge]:
    """Segments whose newest messages are so old."""
    return [
        SegmentAge(
            n * SEGMENT_SIZE, (n + 1) * SEGMENT_SIZE, SEGMENT_SIZE, int(now_ms - hours * HOUR)
        )
        for n, hours in enumerate(ages_hours)
    ]


def look(
    segments: list[SegmentAge],
    *,
    wall_ms: int = NOW,
    monotonic_ms: int = 0,
    hour: int = 4,
    used: float = 0.5,
    keep: int | None = None,
) -> Look:
    return Look(wall_ms, hour, monotonic_ms, segments, 100 * SEGMENT_SIZE, used, keep)


def count_of(decision: RetentionDecision) -> int:
    return len(decision.delete)


@pytest.mark.parametrize(
    ("ages", "hour", "used", "expected"),
    [
        ((100, 80, 71, 1), 4, 0.5, 2),
        ((100, 80, 71, 1), 3, 0.5, 0),
        ((100, 80, 71, 1), 5, 0.74, 0),
        ((100, 80, 71, 1), 5, 0.75, 2),
        ((71, 70, 69, 1), 5, 0.80, 0),
        ((72, 1), 4, 0.5, 0),
        ((72.01, 1), 4, 0.5, 1),
        ((100, 99), 4, 0.5, 1),
        ((100,), 4, 0.99, 0),
        ((), 4, 0.99, 0),
        ((9, 8, 7, 6, 5), 5, 0.85, 1),
        ((9, 8, 7, 6, 5), 5, 0.865, 2),
        ((9, 8, 7, 6, 5), 5, 0.99, 4),
        ((100, 99, 98, 6, 5), 5, 0.85, 3),
        (tuple(range(60, 0, -1)), 5, 0.99, FORCED_COUNT_MAX),
    ],
)
def test_what_goes_by_age_hour_and_disk(
    ages: tuple[float, ...], hour: int, used: float, expected: int
):
    segments = make_segments(*ages)
    decision = decide(
        RetentionState(NOW - 1000, monotonic_ms=-1000), look(segments, hour=hour, used=used), RULES
    )
    assert list(decision.delete) == segments[:expected]
    assert decision.delete_below == (segments[expected - 1].end_position if expected else 0)
    assert bool(decision.reason) == bool(expected)


@pytest.mark.parametrize(
    ("used", "refused"), [(0.0, False), (0.899, False), (0.90, True), (1.0, True)]
)
def test_writes_are_refused_when_the_disk_is_nearly_full(used: float, refused: bool):
    decision = decide(None, look(make_segments(1), used=used), RULES)
    assert bool(decision.write_refusal) == refused
    if refused:
        assert f"{used:.1%}" in decision.write_refusal


@pytest.mark.parametrize(
    ("keep", "expected"), [(0, 0), (999, 0), (1000, 1), (1500, 1), (2000, 2), (9000, 3), (None, 3)]
)
def test_what_somebody_needs_stays(keep: int | None, expected: int):
    for used in (0.5, 0.99):
        assert (
            count_of(decide(None, look(make_segments(100, 99, 98, 1), used=used, keep=keep), RULES))
            == expected
        )


def test_a_segment_in_front_of_a_young_one_goes_and_one_behind_it_stays():
    assert count_of(decide(None, look(make_segments(100, 1, 90, 1)), RULES)) == 1


def run(
    *steps: tuple[float, float],
    ages: tuple[float, ...] = (80, 70, 60, 1),
    rules: RetentionRules = RULES,
) -> list[RetentionDecision]:
    """Looks at the same segments; each step is (hours by the wall clock, hours by the monotonic clock) since the first look."""
    segments = make_segments(*ages)
    state = RetentionState(
        NOW - HOUR // 60,
        newest_store_time_ms=segments[-1].newest_store_time_ms,
        monotonic_ms=-HOUR // 60,
    )
    decisions = []
    for wall, monotonic in steps:
        decision = decide(
            state,
            look(segments, wall_ms=int(NOW + wall * HOUR), monotonic_ms=int(monotonic * HOUR)),
            rules,
        )
        state = decision.state
        decisions.append(decision)
    return decisions


def test_time_that_passes_makes_segments_old():
    assert [count_of(d) for d in run((0, 0), (3, 3), (13, 13), (200, 200))] == [1, 2, 3, 3]
    assert not any(d.clock_warning for d in run((0, 0), (3, 3), (200, 200)))


def test_a_clock_that_jumps_forward_makes_nothing_old_then_or_later():
    jumped = run((100, 0.01), (100.01, 0.02), (102, 2), (103, 3), (113, 13))
    assert [count_of(d) for d in jumped] == [1, 1, 1, 2, 3]
    assert all("ahead by 3" in d.clock_warning for d in jumped)


def test_a_clock_that_jumps_forward_and_back_again_leaves_no_trace():
    decisions = run((100, 0.01), (101, 1), (1.5, 1.5), (3, 3))
    assert [count_of(d) for d in decisions] == [1, 1, 1, 2]
    assert decisions[0].clock_warning
    assert not decisions[2].clock_warning


def test_a_clock_that_jumps_back_makes_everything_younger():
    decisions = run((-100, 0.01), (-99, 1), (-90, 10))
    assert [count_of(d) for d in decisions] == [0, 0, 0]


def test_a_lead_is_forgotten_when_the_clocks_have_agreed_for_a_whole_retention_time():
    steps = [(100 + hours, hours) for hours in range(1, 80)]
    decisions = run(*steps, ages=(1, 0.9, 0.5, 0.1))
    assert decisions[70].state.lead_ms > 0
    assert count_of(decisions[70]) == 0
    assert decisions[75].state.lead_ms == 0
    assert count_of(decisions[75]) == 3


def test_a_clock_set_right_after_a_start_in_the_past_has_no_lead():
    segments = make_segments(80, 70, 60, 1)
    first = decide(None, look(segments, wall_ms=1_000, monotonic_ms=0), RULES)
    assert count_of(first) == 0
    second = decide(first.state, look(segments, wall_ms=NOW - HOUR, monotonic_ms=10_000), RULES)
    assert count_of(second) == 1
    assert second.state.lead_ms <= 10_000


def test_over_a_restart_a_clock_is_believed_a_day_and_the_rest_is_lead():
    segments = make_segments(90, 70, 60, 50)
    within = decide(None, look(segments, wall_ms=NOW - 27 * HOUR), RULES)
    assert within.state.lead_ms == 0
    kept = dataclasses.replace(within.state, monotonic_ms=None)
    for state, expected in ((None, 0), (kept, 1)):  # believed: 26 hours, or 3 hours, before NOW
        beyond = decide(state, look(segments, wall_ms=NOW + 300 * HOUR), RULES)
        assert count_of(beyond) == expected
        assert beyond.clock_warning


def test_the_lead_is_kept_over_a_restart():
    before = run((100, 0.01))[-1].state
    kept = dataclasses.replace(before, monotonic_ms=None)
    segments = make_segments(80, 70, 60, 1)
    after = decide(kept, look(segments, wall_ms=NOW + 101 * HOUR, monotonic_ms=5), RULES)
    assert count_of(after) == 1
    assert after.clock_warning


@given(
    st.lists(
        st.tuples(st.integers(-1000 * HOUR, 1000 * HOUR), st.integers(0, 10 * HOUR)),
        min_size=1,
        max_size=20,
    ),
    st.lists(st.integers(0, 200), min_size=2, max_size=6),
)
def test_whatever_the_wall_clock_does_nothing_goes_before_its_time(
    steps: list[tuple[int, int]], ages: list[int]
):
    """By true time, which is the monotonic clock's, no young message is deleted, and never the last segment."""
    segments = make_segments(*sorted(ages, reverse=True))
    newest = segments[-1].newest_store_time_ms
    state = RetentionState(NOW, newest_store_time_ms=newest, monotonic_ms=0)
    passed = 0
    wall = NOW
    for jump, elapsed in steps:
        passed += elapsed
        wall += jump + elapsed
        decision = decide(state, look(segments, wall_ms=wall, monotonic_ms=passed, used=0.8), RULES)
        state = decision.state
        assert len(decision.delete) < len(segments)
        for segment in decision.delete:
            assert NOW + passed - segment.newest_store_time_ms > RULES.retention_ms
