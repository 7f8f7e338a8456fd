"""The table of metrics: names, and what a histogram tells people."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_runtime.metrics import Kind, Metric, Table, quantile_bound


@pytest.mark.parametrize(
    ("name", "unit", "wanted"),
    [
        ("protomq.lane.calls", "{call}", "protomq_lane_calls"),
        ("protomq.lane.queue_time", "s", "protomq_lane_queue_time_seconds"),
        ("protomq.topic.bytes_in", "By", "protomq_topic_bytes_in"),
        ("protomq.disk.used", "1", "protomq_disk_used_ratio"),
        ("protomq.queue.end_offset", "", "protomq_queue_end_offset"),
    ],
)
def test_the_name_in_prometheus_says_the_unit_once(name: str, unit: str, wanted: str) -> None:
    assert Metric(name, unit, "", "").prometheus_name == wanted


@pytest.mark.parametrize(
    ("name", "unit", "kind", "bounds"),
    [
        ("lane.calls", "", Kind.GAUGE, ()),
        ("protomq.Calls", "", Kind.GAUGE, ()),
        ("protomq.calls", "calls", Kind.GAUGE, ()),
        ("protomq.time", "s", Kind.GAUGE, (1.0,)),
        ("protomq.time", "s", Kind.HISTOGRAM, ()),
        ("protomq.time", "s", Kind.HISTOGRAM, (2.0, 1.0)),
    ],
)
def test_a_metric_that_makes_no_sense_is_a_defect(
    name: str, unit: str, kind: Kind, bounds: tuple[float, ...]
) -> None:
    with pytest.raises(AssertionError):
        Metric(name, unit, "", "", kind, bounds)


def test_a_histogram_has_no_attributes() -> None:
    with pytest.raises(AssertionError):
        Table("t", ("lane",), (Metric("protomq.time", "s", "", "", Kind.HISTOGRAM, (1.0,)),))


@given(st.lists(st.sampled_from([0.5, 1.5, 2.5, 9.0]), min_size=1), st.sampled_from([0.5, 0.99, 1.0]))
def test_a_quantile_is_the_lowest_bound_that_covers_it(values: list[float], share: float) -> None:
    bounds = (1.0, 2.0, 3.0)
    limits = [0.0, *bounds, math.inf]
    counts = [sum(low < value <= high for value in values) for low, high in pairwise(limits)]
    enough = [b for b in (*bounds, math.inf) if sum(value <= b for value in values) >= share * len(values)]
    assert quantile_bound(bounds, counts, share) == enough[0]
