"""Faults in the middle of real queries. Exactly-once is checked by counting ids: each stored or read once, none missing.

The places of the faults are exact (`tests.support.faulty_spark`): a process stops there and says so, then the test strikes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from protomq import Producer
from protomq.testing import Broker
from protomq_spark.cluster import Cluster
from protomq_spark.options import parse_write_options
from protomq_spark.sender import Identity, RowSender, SentRows
from tests.support.faulty_spark import Fault, FaultySource, copy_options, copy_writer
from tests.support.spark import SPARK_MARKS, InBackground, batch_frame, copy_stream, run
from tests.support.topics import bodies, drain, fill, make_topic, once

pytestmark = SPARK_MARKS
ONE_QUEUE = 1
RESTARTED = pytest.param("restarted", marks=pytest.mark.long)
"""Gentler than killed."""
DEATHS = (("kill", "read"), ("raise", "read"), ("raise", "write"))
"""Beside that of a task that is killed while it writes."""


@pytest.fixture(scope="module")
def faulty_spark(spark: SparkSession) -> SparkSession:
    """The session, with the format `protomq-faulty`, small batches and small windows."""
    spark.dataSource.register(FaultySource)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    return spark


@pytest.fixture(scope="module")
def mortal_server() -> Iterator[Broker]:
    """A broker that the tests of this file may kill; each leaves it running."""
    with Broker() as server:
        yield server


def batch_read(spark: SparkSession, server: Broker, topic: str, **options: str) -> DataFrame:
    given = {"subscribe": topic, "columns": "body", "protomq.pullCountMax": "50"} | options
    return batch_frame(spark, server, kind="protomq-faulty", **given)


def batch_write(frame: DataFrame, server: Broker, topic: str, **options: str) -> None:
    writer = frame.write.format("protomq-faulty").option("protomq.namesrv", server.namesrv)
    writer.options(**({"topic": topic, "batchRows": "50"} | options)).mode("append").save()


def padded(spark: SparkSession, count: int, partitions: int) -> DataFrame:
    """Ids as bodies, large enough to leave Spark's buffers while the task still runs."""
    return spark.range(0, count, 1, partitions).selectExpr("lpad(id, 400, '0') AS body")


def numbers_in(rows: list[Any]) -> Counter[int]:
    return Counter(int(row.body) for row in rows)


def faulty_copy(
    spark: SparkSession,
    server: Broker,
    source: str,
    target: str,
    checkpoint: Path,
    fault: Fault,
    **more: str,
) -> Any:
    """A query, not started yet, that copies a topic in micro-batches of 400, with the fault in its source or its sink."""
    return copy_writer(spark, copy_options(server.namesrv, source, target, fault, **more), checkpoint)


# -- workers ----------------------------------------------------------------------------------------------------------------


def test_a_worker_killed_while_it_reads_repeats_and_leaves_out_nothing(
    faulty_spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    topic = make_topic(protomq_server, "faults-read-killed", ONE_QUEUE)
    fill(protomq_producer, topic, 1000)
    fault = Fault("read", "kill", tmp_path / "fault")
    rows = batch_read(faulty_spark, protomq_server, topic, **fault.options()).collect()
    assert fault.happened
    assert bodies(rows) == once(1000)


def test_the_sinks_worker_killed_while_it_writes_stores_its_rows_once(
    faulty_spark: SparkSession, protomq_server: Broker, tmp_path: Path
) -> None:
    topic = make_topic(protomq_server, "faults-write-killed", 4)
    fault = Fault("write", "kill", tmp_path / "fault", rows=300)
    batch_write(padded(faulty_spark, 2000, 2), protomq_server, topic, **fault.options())
    assert fault.happened
    assert numbers_in(drain(protomq_server, topic)) == Counter(range(2000))


@pytest.mark.parametrize(
    ("do", "at"),
    [("kill", "write"), *(pytest.param(*each, marks=pytest.mark.long) for each in DEATHS)],
)  # fmt: skip
def test_a_task_of_a_stream_that_dies_is_run_again_and_stores_nothing_twice(
    faulty_spark: SparkSession,
    protomq_server: Broker,
    protomq_producer: Producer,
    tmp_path: Path,
    at: str,
    do: str,
) -> None:
    source = make_topic(protomq_server, f"faults-{at}-{do}", ONE_QUEUE)
    target = make_topic(protomq_server, f"faults-{at}-{do}-copy", 3)
    fill(protomq_producer, source, 1000)
    fault = Fault(at, do, tmp_path / "fault")
    run(faulty_copy(faulty_spark, protomq_server, source, target, tmp_path / "ck", fault))
    assert fault.happened
    assert bodies(drain(protomq_server, target)) == once(1000)


# -- brokers ----------------------------------------------------------------------------------------------------------------


def strike(server: Broker, how: str) -> None:
    if how == "killed":
        server.kill()
        server.start()
    else:
        server.restart()


@pytest.mark.parametrize("how", ["killed", RESTARTED])
def test_a_broker_that_goes_in_the_middle_of_a_batch_read(
    faulty_spark: SparkSession, mortal_server: Broker, tmp_path: Path, how: str
) -> None:
    topic = make_topic(mortal_server, f"faults-read-{how}", ONE_QUEUE)
    with Producer(namesrv=mortal_server.namesrv) as producer:
        fill(producer, topic, 1000)
    fault = Fault("read", "wait", tmp_path / "fault")
    frame = batch_read(faulty_spark, mortal_server, topic, **fault.options())
    query = InBackground(faulty_spark, frame.collect)
    query.wait_for(fault)
    strike(mortal_server, how)
    fault.go_on()
    assert bodies(query.result()) == once(1000)


@pytest.mark.parametrize("how", ["killed", RESTARTED])
def test_a_broker_that_goes_in_the_middle_of_a_batch_write(
    faulty_spark: SparkSession, mortal_server: Broker, tmp_path: Path, how: str
) -> None:
    topic = make_topic(mortal_server, f"faults-write-{how}", 3)
    fault = Fault("write", "wait", tmp_path / "fault", rows=300)
    frame = padded(faulty_spark, 2000, 2)
    query = InBackground(
        faulty_spark, lambda: batch_write(frame, mortal_server, topic, **fault.options())
    )
    query.wait_for(fault)
    strike(mortal_server, how)
    fault.go_on()
    query.result()
    assert numbers_in(drain(mortal_server, topic)) == Counter(range(2000))


@pytest.mark.parametrize(
    "at", [pytest.param("plan", marks=pytest.mark.long), pytest.param("read", marks=pytest.mark.long), "write"]
)  # fmt: skip
def test_a_broker_killed_at_a_stage_of_a_micro_batch(
    faulty_spark: SparkSession, mortal_server: Broker, tmp_path: Path, at: str
) -> None:
    source = make_topic(mortal_server, f"faults-stream-{at}", ONE_QUEUE)
    target = make_topic(mortal_server, f"faults-stream-{at}-copy", 3)
    with Producer(namesrv=mortal_server.namesrv) as producer:
        fill(producer, source, 1000)
    fault = Fault(at, "wait", tmp_path / "fault")
    writer = faulty_copy(faulty_spark, mortal_server, source, target, tmp_path / "ck", fault)
    query = InBackground(faulty_spark, lambda: run(writer))
    query.wait_for(fault)
    strike(mortal_server, "killed")
    fault.go_on()
    query.result()
    assert bodies(drain(mortal_server, target)) == once(1000)


@pytest.mark.long
def test_a_broker_that_stays_away_fails_the_query_which_then_goes_on_where_it_was(
    faulty_spark: SparkSession, mortal_server: Broker, tmp_path: Path
) -> None:
    source = make_topic(mortal_server, "faults-away", ONE_QUEUE)
    target = make_topic(mortal_server, "faults-away-copy", 3)
    with Producer(namesrv=mortal_server.namesrv) as producer:
        fill(producer, source, 1000)
    fault = Fault("read", "wait", tmp_path / "fault")
    checkpoint, brief = tmp_path / "ck", {"protomq.timeoutMs": "500"}
    writer = faulty_copy(faulty_spark, mortal_server, source, target, checkpoint, fault, **brief)
    query = InBackground(faulty_spark, lambda: run(writer))
    query.wait_for(fault)
    mortal_server.kill()
    try:
        fault.go_on()
        with pytest.raises(Exception, match="refused"):
            query.result()
    finally:
        mortal_server.start()
    given = {"subscribe": source, "columns": "body"}
    writer = copy_stream(faulty_spark, mortal_server, given, target, checkpoint)
    run(writer.option("batchRows", "50"))
    assert bodies(drain(mortal_server, target)) == once(1000)


# -- zombies ----------------------------------------------------------------------------------------------------------------


def test_an_attempt_that_spark_has_given_up_goes_on_sending_beside_its_twin(
    mortal_server: Broker,
) -> None:
    """What a speculative twin, or an executor that was only cut off, does: both send the same rows, and each is stored once."""
    topic = make_topic(mortal_server, "faults-zombie", 3)
    given = {"protomq.namesrv": mortal_server.namesrv, "topic": topic, "batchRows": "10"}
    options = parse_write_options(given)
    batches = [
        pa.RecordBatch.from_pydict({"body": [b"%d" % n for n in range(start, start + 50)]})
        for start in range(0, 1000, 50)
    ]
    half_sent, twin_done = threading.Event(), threading.Event()

    def stalling() -> Iterator[pa.RecordBatch]:
        yield from batches[:10]
        half_sent.set()
        assert twin_done.wait(60)
        yield from batches[10:]

    def attempt(rows: Iterator[pa.RecordBatch]) -> SentRows:
        cluster = Cluster(options.client)
        try:
            return RowSender(cluster, options, Identity("query\0zombie", 0, 7)).send(rows)
        finally:
            cluster.close()

    with ThreadPoolExecutor(1) as pool:
        zombie = pool.submit(attempt, stalling())
        assert half_sent.wait(60)
        twin = attempt(iter(batches))
        twin_done.set()
        late = zombie.result(60)
    assert (twin.rows, late.rows) == (1000, 1000)
    assert twin.repeated_rows + late.repeated_rows == 1000  # Each row came twice, and was new once.
    assert late.repeated_rows >= 500
    assert bodies(drain(mortal_server, topic)) == once(1000)
