"""Slow and failing brokers are left alone for as long as RocketMQ's tables say."""

from __future__ import annotations

import pytest

from protomq._fault_tolerance import LatencyFaultTolerance

LATENCIES = [0, 49, 50, 549, 550, 1799, 1800, 3000, 5000, 14_999, 60_000]
DURATIONS = [0, 0, 0, 0, 2000, 2000, 5000, 6000, 10_000, 10_000, 30_000]


@pytest.mark.parametrize(
    ("latency_ms", "duration_ms"), list(zip(LATENCIES, DURATIONS, strict=True))
)
def test_the_tables_are_those_of_rocketmq(latency_ms: int, duration_ms: int) -> None:
    assert LatencyFaultTolerance().duration_for(latency_ms) == duration_ms


def test_a_slow_broker_is_left_alone_until_its_time_is_over() -> None:
    tolerance = LatencyFaultTolerance()
    tolerance.record("a", 600, now_ms=1000)
    assert not tolerance.is_available("a", 2999)
    assert tolerance.is_available("a", 3000)
    assert tolerance.is_available("b", 1000)


def test_a_failed_send_counts_as_one_of_ten_seconds() -> None:
    tolerance = LatencyFaultTolerance()
    tolerance.record("a", 1, now_ms=0, failed=True)
    assert not tolerance.is_available("a", 9_999)
    assert tolerance.is_available("a", 10_000)


def test_a_quick_answer_makes_a_broker_available_at_once() -> None:
    tolerance = LatencyFaultTolerance()
    tolerance.record("a", 1, now_ms=0, failed=True)
    tolerance.record("a", 5, now_ms=1)
    assert tolerance.is_available("a", 1)


def test_tables_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError):
        LatencyFaultTolerance([1, 2], [0])
    with pytest.raises(ValueError):
        LatencyFaultTolerance([2, 1], [0, 0])
