"""The long form with Spark: `make spark-chaos`. PROTOMQ_CHAOS_SEED: where the seeds begin, PROTOMQ_CHAOS_SEEDS: how many there are."""

from __future__ import annotations

import os
from collections import Counter

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from tests.support.recorded_sink import BUGS

from . import process_campaigns
from .process_campaigns import first_seed
from .store_campaigns import CampaignFailed

pytestmark = pytest.mark.chaos
SEEDS_DEFAULT = 20


def test_spark() -> None:
    count = int(os.environ.get("PROTOMQ_CHAOS_SEEDS", SEEDS_DEFAULT))
    counts: Counter[str] = Counter()
    for seed in range(first_seed(), first_seed() + count):
        found = process_campaigns.spark((seed,), rounds_each=8)
        print(f"seed {seed}: {dict(found)}", flush=True)
        counts += found
    print(f"{count} seeds: {dict(counts)}")
    assert counts["ids copied"] > 1000 * count
    if count >= SEEDS_DEFAULT:
        assert counts["driver killed"]
        assert counts["worker processes killed"]
        assert counts["retention"]
        assert counts["source broker killed"]
        assert counts["target broker killed"]


@pytest.mark.parametrize(("bug", "invariant"), [(BUGS[0], "A3"), (BUGS[1], "B3")])
def test_a_planted_bug_is_caught(bug: str, invariant: str) -> None:
    with pytest.raises(CampaignFailed, match=f"\n{invariant}: "):
        process_campaigns.spark(range(first_seed(), first_seed() + 20), rounds_each=8, bug=bug)
