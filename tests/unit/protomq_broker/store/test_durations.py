"""Durations by bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.store.log.durations import Durations

BOUNDS_S = (0.1, 1.0, 10.0)


@given(st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.5, 1.0, 3.0, 10.0, 11.0])))
def test_each_duration_is_counted_under_the_lowest_bound_that_it_does_not_pass(durations_s: list[float]) -> None:
    durations = Durations(BOUNDS_S)
    told: list[float] = []
    durations.on_observed = told.append
    for duration_s in durations_s:
        durations.observe(duration_s)
    limits = [-1.0, *BOUNDS_S, float("inf")]
    assert durations.counts == [
        sum(low < each <= high for each in durations_s) for low, high in pairwise(limits)
    ]
    assert durations.sum == pytest.approx(sum(durations_s))
    assert told == durations_s


def test_a_listener_that_fails_is_logged_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    durations = Durations(BOUNDS_S)

    def fail(_: float) -> None:
        raise ValueError("no")

    durations.on_observed = fail
    durations.observe(0.5)
    assert durations.counts == [0, 1, 0, 0]
    assert "a listener for durations failed" in caplog.text
