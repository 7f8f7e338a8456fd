"""A name server that lives while its only broker is gone: reads, streams and writes wait for it within their time-out, or say so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from pyspark.sql import SparkSession

from protomq import Admin, Producer
from protomq.testing import Broker
from tests.support.faulty_spark import Fault, FaultySource, copy_options, copy_writer
from tests.support.namesrv import running_namesrv
from tests.support.spark import SPARK_MARKS, InBackground, batch_frame, copy_stream, numbers, run
from tests.support.topics import bodies, drain, fill, make_topic, once
from tests.support.waiting import wait_for

pytestmark = SPARK_MARKS
COUNT = 1000
NO_BROKER = "no broker is registered at {}"
BRIEF = {"protomq.timeoutMs": "1000"}
PATIENCE_S = 20.0
"""For a query that must fail after a second: Spark runs a task three times and starts workers for it."""


class Lonely:
    """A broker, and the name server through which it is reached: a process of its own."""

    def __init__(self, broker: Broker, namesrv: str) -> None:
        self.broker = broker
        self.namesrv = namesrv

    def brokers(self) -> int:
        with Admin(namesrv=self.namesrv) as admin:
            return len(admin.cluster_info())

    def take_away(self) -> None:
        """Until the name server knows it."""
        self.broker.kill()
        wait_for(lambda: self.brokers() == 0)

    def bring_back(self) -> None:
        self.broker.start()
        wait_for(lambda: self.brokers() == 1)

    def filled(self, name: str, queues: int = 1) -> str:
        """A new topic with COUNT ids."""
        with Producer(namesrv=self.namesrv) as producer:
            fill(producer, make_topic(self.broker, name, queues), COUNT)
        return name


@pytest.fixture(scope="module")
def lonely() -> Iterator[Lonely]:
    with running_namesrv() as server:
        address = str(server.remoting)
        with Broker(environment={"PROTOMQ_NAMESRV": address}) as broker:
            found = Lonely(broker, address)
            wait_for(lambda: found.brokers() == 1)
            yield found


@pytest.fixture
def gone(lonely: Lonely) -> Iterator[Lonely]:
    """The broker comes back after the test, whatever happened."""
    yield lonely
    lonely.bring_back()


@pytest.fixture(scope="module")
def faulty_spark(spark: SparkSession) -> SparkSession:
    spark.dataSource.register(FaultySource)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    return spark


def write(spark: SparkSession, server: Lonely, topic: str, **options: str) -> None:
    given = {"protomq.namesrv": server.namesrv, "topic": topic, "writeId": topic}
    writer = numbers(spark, COUNT, 2).write.format("protomq").options(**(given | options))
    writer.mode("append").save()


def copy(
    spark: SparkSession, server: Lonely, source: str, target: str, folder: Path, **options: str
) -> Any:
    given = {"subscribe": source, "columns": "body", **options}
    return copy_stream(spark, server, given, target, folder / "checkpoint").options(**options)


def test_what_begins_without_the_broker_fails_within_its_time_and_says_why(
    spark: SparkSession, gone: Lonely, tmp_path: Path
) -> None:
    source, target = gone.filled("lonely-begins"), make_topic(gone.broker, "lonely-begins-copy", 2)
    gone.take_away()
    actions: list[Callable[[], Any]] = [
        lambda: batch_frame(spark, gone, columns="body", subscribe=source, **BRIEF).count(),
        lambda: batch_frame(
            spark, gone, columns="body", subscribePattern="lonely-.*", **BRIEF
        ).count(),
        lambda: run(copy(spark, gone, source, target, tmp_path, **BRIEF)),
        lambda: write(spark, gone, target, **BRIEF),
    ]
    for action in actions:
        began_s = time.monotonic()
        with pytest.raises(Exception, match=NO_BROKER.format(gone.namesrv)):
            action()
        assert time.monotonic() - began_s < PATIENCE_S
    gone.bring_back()
    assert bodies(drain(gone.broker, target)) == {}
    run(copy(spark, gone, source, target, tmp_path))
    assert bodies(drain(gone.broker, target)) == once(COUNT)


def test_what_begins_without_the_broker_waits_for_it(
    spark: SparkSession, gone: Lonely, tmp_path: Path
) -> None:
    source = gone.filled("lonely-waits")
    copied, written = (make_topic(gone.broker, f"lonely-waits-{n}", 2) for n in ("copy", "write"))
    gone.take_away()
    running = [
        InBackground(spark, batch_frame(spark, gone, columns="body", subscribe=source).collect),
        InBackground(
            spark, batch_frame(spark, gone, columns="body", subscribePattern="lonely-waits").collect
        ),
        InBackground(spark, lambda: run(copy(spark, gone, source, copied, tmp_path))),
        InBackground(spark, lambda: write(spark, gone, written)),
    ]
    time.sleep(1.5)  # Beyond the first attempts; nothing says when a caller begins to wait.
    assert not any(query.done for query in running)
    gone.bring_back()
    rows, rows_of_pattern, *_ = [query.result() for query in running]
    assert bodies(rows) == bodies(rows_of_pattern) == once(COUNT)
    assert bodies(drain(gone.broker, copied)) == once(COUNT)
    assert bodies(drain(gone.broker, written)) == once(COUNT)


def faulty_copy(
    spark: SparkSession, server: Lonely, fault: Fault, source: str, target: str, folder: Path, **options: str
) -> Any:  # fmt: skip
    given = copy_options(server.namesrv, source, target, fault, **options)
    return copy_writer(spark, given, folder / "checkpoint").options(**options)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "at", [pytest.param("plan", marks=LONG), pytest.param("read", marks=LONG), "write"]
)
def test_a_stream_waits_for_a_broker_that_goes_under_it(
    faulty_spark: SparkSession, gone: Lonely, tmp_path: Path, at: str
) -> None:
    source = gone.filled(f"lonely-{at}")
    target = make_topic(gone.broker, f"lonely-{at}-copy", 3)
    fault = Fault(at, "wait", tmp_path / "fault")
    writer = faulty_copy(faulty_spark, gone, fault, source, target, tmp_path)
    query = InBackground(faulty_spark, lambda: run(writer))
    query.wait_for(fault)
    gone.take_away()
    fault.go_on()
    time.sleep(1.0)  # Meanwhile it asks in vain.
    assert not query.done
    gone.bring_back()
    query.result()
    assert bodies(drain(gone.broker, target)) == once(COUNT)


@LONG
def test_a_stream_whose_broker_stays_away_fails_and_goes_on_later(
    faulty_spark: SparkSession, gone: Lonely, tmp_path: Path
) -> None:
    source = gone.filled("lonely-away")
    target = make_topic(gone.broker, "lonely-away-copy", 3)
    fault = Fault("write", "wait", tmp_path / "fault")
    writer = faulty_copy(faulty_spark, gone, fault, source, target, tmp_path, **BRIEF)
    query = InBackground(faulty_spark, lambda: run(writer))
    query.wait_for(fault)
    gone.take_away()
    began_s = time.monotonic()
    fault.go_on()
    with pytest.raises(Exception, match=NO_BROKER.format(gone.namesrv)):
        query.result()
    assert time.monotonic() - began_s < PATIENCE_S
    gone.bring_back()
    run(copy(faulty_spark, gone, source, target, tmp_path).option("batchRows", "50"))
    assert bodies(drain(gone.broker, target)) == once(COUNT)


@LONG
def test_a_write_waits_for_a_broker_that_goes_under_it(
    faulty_spark: SparkSession, gone: Lonely, tmp_path: Path
) -> None:
    target = make_topic(gone.broker, "lonely-written", 3)
    fault = Fault("write", "wait", tmp_path / "fault", rows=300)
    given = {"protomq.namesrv": gone.namesrv, "topic": target, "batchRows": "50"}
    writer = numbers(faulty_spark, COUNT, 2).write.format("protomq-faulty")
    writer = writer.options(**(given | fault.options())).mode("append")
    query = InBackground(faulty_spark, writer.save)
    query.wait_for(fault)
    gone.take_away()
    fault.go_on()
    time.sleep(1.0)  # Meanwhile it asks in vain.
    assert not query.done
    gone.bring_back()
    query.result()
    assert bodies(drain(gone.broker, target)) == once(COUNT)
