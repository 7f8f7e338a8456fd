"""The short form of the campaign with Spark, and that its count finds what is wrong; the long form is `make spark-chaos` (tests/chaos/)."""

from __future__ import annotations

import json
from collections import Counter

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from protomq import OutgoingMessage, Producer
from tests.chaos import process_campaigns
from tests.chaos.checker import Violation
from tests.chaos.spark_world import BATCH_COUNT, COPY, SparkWorld
from tests.support.recorded_sink import BUGS
from tests.support.spark import SPARK_MARKS

pytestmark = [pytest.mark.chaos, *SPARK_MARKS]


@pytest.mark.long
def test_a_copy_is_exact_though_the_target_and_then_the_driver_is_killed() -> None:
    counts: Counter[str] = Counter()
    with SparkWorld(2, counts) as world:
        world.do("target broker killed", "driver killed")
        found = world.finish() or world.check()
    assert not found
    assert (counts["target broker killed"], counts["drivers"]) == (1, 2)
    assert counts["micro-batches"] > 1, counts
    assert counts["ids copied"] > 4 * BATCH_COUNT, counts


class WithoutSpark(SparkWorld):
    """Nobody copies."""

    def _start_driver(self) -> None:
        pass

    def written(self, ids: list[int], failure: str) -> list[Violation]:
        """What the count says if these ids were written to the target, and the query failed once."""
        (self._folder / "checkpoint/commits").mkdir(parents=True)
        (self._folder / "failures").write_text(json.dumps(failure) + "\n")
        with Producer(namesrv=self._target.broker.namesrv) as producer:
            producer.send_batch(COPY, [OutgoingMessage(COPY, b"%0400d" % number) for number in ids])
        self._hold_sender()
        return self.check()


def test_the_count_finds_what_is_lost_doubled_and_never_sent_and_failures_of_ours() -> None:
    with WithoutSpark(2, Counter()) as world:
        failure = "no worker was killed: protomq_spark/sender.py"
        found = world.written([0, 1, 2, 4, *range(5, BATCH_COUNT), 5, 999], failure)
    assert [(each.invariant, each.message.partition(" of ")[0]) for each in found[2:]] == [
        ("B3", "id 3"), ("A3", "id 5 is 2 times in the copy"), ("A6", "id 999 is in the copy and was not sent"),
    ]  # fmt: skip
    assert [each.invariant for each in found[:2]] == ["I1", "I1"]


@pytest.mark.long
def test_a_copy_is_exact_whatever_is_killed_cut_and_restarted() -> None:
    counts = process_campaigns.spark((2,), rounds_each=3)
    assert counts["ids copied"] > 500, counts


@pytest.mark.long
@pytest.mark.parametrize(("bug", "invariant"), [(BUGS[0], "A3"), (BUGS[1], "B3")])
def test_a_planted_bug_is_caught(bug: str, invariant: str) -> None:
    counts: Counter[str] = Counter()
    with SparkWorld(2, counts, bug=bug) as world:
        for _ in range(2):
            world.do("all workers killed")
        found = world.finish() or world.check()
    assert {violation.invariant for violation in found} == {invariant}, found[:5]
