"""The seeded part of the campaign with Spark; the long form is `make spark-chaos` (tests/chaos/)."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from tests.chaos import process_campaigns
from tests.chaos.spark_world import SparkWorld
from tests.support.recorded_sink import BUGS
from tests.support.spark import SPARK_MARKS

pytestmark = [pytest.mark.chaos, *SPARK_MARKS]


def test_a_copy_is_exact_whatever_is_killed_cut_and_restarted() -> None:
    counts = process_campaigns.spark((2,), rounds_each=3)
    assert counts["ids copied"] > 500, counts


@pytest.mark.parametrize(
    ("bug", "invariant"), [(BUGS[0], "A3"), pytest.param(BUGS[1], "B3", marks=pytest.mark.long)]
)
def test_a_planted_bug_is_caught(bug: str, invariant: str) -> None:
    counts: Counter[str] = Counter()
    with SparkWorld(2, counts, bug=bug) as world:
        for _ in range(2):
            world.do("all workers killed")
        found = world.finish() or world.check()
    assert {violation.invariant for violation in found} == {invariant}, found[:5]
