"""A topic that is deleted and created again under a stream: its offsets mean nothing in the new one, which must not be skipped silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from pyspark.sql import DataFrame, SparkSession

from protomq import Admin, Producer
from protomq.testing import Broker
from tests.support.faulty_spark import Fault, FaultySource
from tests.support.spark import SPARK_MARKS, InBackground, batch_frame, copy_stream, run
from tests.support.topics import bodies, drain, fill, make_topic, once, stored_count
from tests.support.waiting import wait_for

pytestmark = SPARK_MARKS

SAID = r"topic 'recreated[a-z-]*' was deleted and created again"


def make_again(server: Broker, topic: str, queues: int = 1) -> None:
    with Admin(namesrv=server.namesrv) as admin:
        admin.delete_topic(topic)
    make_topic(server, topic, queues)


def forget_incarnations(checkpoint: Path) -> None:
    """As a version left it that knew of none."""
    for path in (checkpoint / "offsets").iterdir():
        if path.name.isdecimal():
            *head, offset = path.read_text().splitlines()
            remembered = json.loads(offset)
            del remembered["@protomq"]
            path.write_text("\n".join([*head, json.dumps(remembered)]))
            (path.parent / f".{path.name}.crc").unlink()


def test_a_stream_says_at_once_that_its_topic_was_made_again_and_goes_on_only_if_told_to(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    source = make_topic(protomq_server, "recreated", 1)
    target = make_topic(protomq_server, "recreated-copy", 2)
    fill(protomq_producer, source, 1000)
    given = {"subscribe": source, "columns": "body"}
    query = copy_stream(spark, protomq_server, given, target, tmp_path).start()
    try:
        wait_for(lambda: query.exception() is not None or stored_count(protomq_server, target) == 1000)
        make_again(protomq_server, source)
        with Producer(namesrv=protomq_server.namesrv) as producer:
            # More than were read of the old one: no offset looks wrong.
            fill(producer, source, 1300, first=1000)
        wait_for(lambda: not query.isActive)
        with pytest.raises(Exception, match=SAID) as error:
            query.awaitTermination()
    finally:
        query.stop()
    assert "failOnDataLoss=false" in str(error.value)
    assert stored_count(protomq_server, target) == 1000
    with pytest.raises(Exception, match=SAID):  # The same, started again.
        run(copy_stream(spark, protomq_server, given, target, tmp_path))
    assert stored_count(protomq_server, target) == 1000

    lenient = copy_stream(spark, protomq_server, given, target, tmp_path, failOnDataLoss="false")
    run(lenient)
    assert bodies(drain(protomq_server, target)) == once(2300)
    run(copy_stream(spark, protomq_server, given, target, tmp_path))  # It has the new one now.


def test_a_checkpoint_of_an_older_version_goes_on(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    source = make_topic(protomq_server, "recreated-old", 2)
    target = make_topic(protomq_server, "recreated-old-copy", 2)
    given = {"subscribe": source, "columns": "body"}
    fill(protomq_producer, source, 300)
    run(copy_stream(spark, protomq_server, given, target, tmp_path))
    forget_incarnations(tmp_path)
    fill(protomq_producer, source, 300, first=300)
    run(copy_stream(spark, protomq_server, given, target, tmp_path))
    assert bodies(drain(protomq_server, target)) == once(600)
    make_again(protomq_server, source)
    with pytest.raises(Exception, match=SAID):
        run(copy_stream(spark, protomq_server, given, target, tmp_path))


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_task_that_reads_says_so_too(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path, fail: str
) -> None:
    spark.dataSource.register(FaultySource)
    topic = make_topic(protomq_server, f"recreated-task-{fail}", 1)
    fill(protomq_producer, topic, 1000)
    fault = Fault("read", "wait", tmp_path / "fault")
    given = {"subscribe": topic, "columns": "body", "protomq.pullCountMax": "50", "failOnDataLoss": fail}
    frame: DataFrame = batch_frame(
        spark, protomq_server, kind="protomq-faulty", **given, **fault.options()
    )
    collect: Callable[[], list[Any]] = frame.collect
    query = InBackground(spark, collect)
    query.wait_for(fault)
    try:
        make_again(protomq_server, topic)
        with Producer(namesrv=protomq_server.namesrv) as producer:
            fill(producer, topic, 1000, first=5000)
    finally:
        fault.go_on()
    if fail == "true":
        with pytest.raises(Exception, match=SAID):
            query.result()
        return
    ids = sorted(int(row.body) for row in query.result())
    assert ids == list(range(len(ids)))  # Nothing of the new one under offsets of the old one.
    assert len(ids) < 1000
