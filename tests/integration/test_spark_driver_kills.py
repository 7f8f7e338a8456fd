"""A driver that is killed at every stage of a micro-batch: the query goes on from its checkpoint, and each message is stored once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from pyspark.sql import SparkSession

from protomq import Producer
from protomq.testing import Broker
from tests.support.faulty_spark import STAGES, Fault, copy_options
from tests.support.spark import SPARK_MARKS, copy_stream, run
from tests.support.spark_driver import SparkDriver
from tests.support.topics import bodies, drain, fill, make_topic, once, stored_count

pytestmark = [pytest.mark.long, *SPARK_MARKS]  # test_spark_chaos.py kills one, at some moment.


def logged(checkpoint: Path, log: str) -> set[int]:
    """The micro-batches of which a log of the checkpoint knows."""
    return {int(path.name) for path in (checkpoint / log).iterdir() if path.name.isdecimal()}


@dataclass(frozen=True)
class Copy:
    """A stream that was at some stage of its second micro-batch when its driver was killed."""

    source: str
    target: str
    checkpoint: Path
    fault: Fault


@pytest.fixture(scope="module")
def killed(protomq_server: Broker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Copy]:
    """By stage: a driver ran a stream for each, all had come to their stages, and it was killed."""
    folder = tmp_path_factory.mktemp("driver")
    copies = {}
    queries = []
    with Producer(namesrv=protomq_server.namesrv) as producer:
        for at in STAGES:
            source = make_topic(protomq_server, f"driver-{at}", 1)
            target = make_topic(protomq_server, f"driver-{at}-copy", 3)
            fill(producer, source, 1200)
            copy = Copy(source, target, folder / at, Fault(at, "wait", folder / f"fault-{at}"))
            copies[at] = copy
            options = copy_options(protomq_server.namesrv, source, target, copy.fault)
            reached = str(copy.fault.folder / "happened")
            queries.append({**options, "checkpoint": str(copy.checkpoint), "reached": reached})
    # A task for each stream that waits in one, and one for the others.
    settings = {"master": "local[3]", "warehouse": str(folder / "warehouse"), "queries": queries}
    driver = SparkDriver(settings, folder / "driver.log")
    driver.wait_for(*(copy.fault.folder / "happened" for copy in copies.values()))
    driver.kill()
    return copies


@pytest.mark.parametrize(
    ("at", "planned", "committed", "stored"),
    [
        ("latest", {0}, {0}, range(400, 401)),  # Before the offset log of the second batch is written.
        ("plan", {0, 1}, {0}, range(400, 401)),  # After it was.
        ("read", {0, 1}, {0}, range(400, 800)),
        ("write", {0, 1}, {0}, range(400, 800)),
        ("written", {0, 1}, {0}, range(800, 801)),  # All tasks are done, the commit log is not written.
        ("commit", {0, 1, 2}, {0, 1}, range(800, 801)),  # It is.
    ],
    ids=STAGES,
)  # fmt: skip
def test_a_driver_killed_in_the_second_micro_batch_leaves_out_and_doubles_nothing(
    spark: SparkSession,
    protomq_server: Broker,
    protomq_producer: Producer,
    killed: dict[str, Copy],
    at: str,
    planned: set[int],
    committed: set[int],
    stored: range,
) -> None:
    copy = killed[at]
    logs = logged(copy.checkpoint, "offsets"), logged(copy.checkpoint, "commits")
    assert logs == (planned, committed)
    assert stored_count(protomq_server, copy.target) in stored

    fill(protomq_producer, copy.source, 300, first=1200)
    given = {"subscribe": copy.source, "columns": "body", "maxOffsetsPerTrigger": "400"}
    writer = copy_stream(spark, protomq_server, given, copy.target, copy.checkpoint)
    run(writer.option("batchRows", "50"))
    assert bodies(drain(protomq_server, copy.target)) == once(1500)
