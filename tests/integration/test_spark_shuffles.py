"""Streams behind a shuffle: Spark may make the same rows in another order when a micro-batch is replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from pyspark.sql import DataFrame, SparkSession

from protomq import Producer
from protomq.testing import Broker
from protomq_spark import send_batch
from protomq_spark.options import OptionError
from tests.support.spark import SPARK_MARKS, forget_last_commit, run
from tests.support.topics import drain, fill, make_topic

pytestmark = SPARK_MARKS

GROUPS = 100
ROWS = 600


@pytest.fixture(scope="module")
def source(protomq_server: Broker) -> str:
    topic = make_topic(protomq_server, "shuffles", 2)
    with Producer(namesrv=protomq_server.namesrv) as producer:
        fill(producer, topic, ROWS)
    return topic


def sums(spark: SparkSession, server: Broker, topic: str, backwards: bool) -> DataFrame:
    """How many ids leave each remainder. `backwards`: the same rows reach the shuffle the other way round."""
    reader = spark.readStream.format("protomq").option("protomq.namesrv", server.namesrv)
    stored = reader.options(subscribe=topic, startingOffsets="earliest", columns="body").load()

    def turned(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in list(batches)[:: -1 if backwards else 1]:
            rows = list(range(batch.num_rows))
            yield batch.take(rows[::-1] if backwards else rows)

    groups = stored.mapInArrow(turned, "body BINARY").selectExpr(
        f"CAST(CAST(body AS STRING) AS INT) % {GROUPS} AS g"
    )
    return groups.groupBy("g").count().selectExpr(
        "CAST(g AS STRING) AS key", "CAST(count AS STRING) AS body"
    )


def test_a_micro_batch_that_is_replayed_in_another_order_is_stored_once_by_send_batch(
    spark: SparkSession, protomq_server: Broker, source: str, tmp_path: Path
) -> None:
    target = make_topic(protomq_server, "shuffles-sums", 3)
    send = send_batch(target, namesrv=protomq_server.namesrv, partitions=2)
    for backwards in (False, True):
        frame = sums(spark, protomq_server, source, backwards)
        writer = frame.writeStream.outputMode("update").foreachBatch(send)
        run(writer.option("checkpointLocation", str(tmp_path)))
        stored = Counter(m.key for m in drain(protomq_server, target))
        assert stored == Counter(map(str, range(GROUPS)))
        forget_last_commit(tmp_path)
    # A row's queue follows from its key.
    for message in drain(protomq_server, target):
        assert message.body == b"6"


def test_the_sink_refuses_another_order_and_names_the_cure(
    spark: SparkSession, protomq_server: Broker, source: str, tmp_path: Path
) -> None:
    target = make_topic(protomq_server, "shuffles-refused", 1)
    for backwards in (False, True):
        frame = sums(spark, protomq_server, source, backwards)
        writer = frame.writeStream.outputMode("complete").format("protomq")
        writer = writer.option("protomq.namesrv", protomq_server.namesrv).option("topic", target)
        writer = writer.option("checkpointLocation", str(tmp_path))
        if backwards:
            with pytest.raises(Exception, match=r"foreachBatch\(protomq_spark\.send_batch"):
                run(writer)
        else:
            run(writer)
            forget_last_commit(tmp_path)
    assert len(drain(protomq_server, target)) == GROUPS


def test_rows_of_one_key_are_sent_in_the_order_that_is_asked_for(
    spark: SparkSession, protomq_server: Broker, source: str, tmp_path: Path
) -> None:
    target = make_topic(protomq_server, "shuffles-ordered", 3)
    reader = spark.readStream.format("protomq").option("protomq.namesrv", protomq_server.namesrv)
    stored = reader.options(subscribe=source, startingOffsets="earliest", columns="body").load()
    rows = stored.selectExpr(
        "body", "CAST(CAST(body AS STRING) AS INT) AS id", "map('n', CAST(body AS STRING)) AS properties"
    ).selectExpr("*", "CAST(id % 10 AS STRING) AS key")
    send = send_batch(target, namesrv=protomq_server.namesrv, order_by="id")
    writer = rows.repartition(3).writeStream.foreachBatch(send)
    run(writer.option("checkpointLocation", str(tmp_path)))
    by_key: dict[str, list[int]] = {}
    queues: dict[str, set[int]] = {}
    for message in drain(protomq_server, target):
        by_key.setdefault(message.key, []).append(int(message.body))
        queues.setdefault(message.key, set()).add(message.queue_id)
    assert by_key == {str(k): list(range(k, ROWS, 10)) for k in range(10)}
    assert {len(found) for found in queues.values()} == {1}


def test_a_mistake_is_named_before_anything_is_sent(
    spark: SparkSession, protomq_server: Broker
) -> None:
    namesrv = protomq_server.namesrv
    with pytest.raises(OptionError, match="'colour'"):
        send_batch("t", namesrv=namesrv, options={"colour": "red"})
    with pytest.raises(OptionError, match="sets the option 'writeId' itself"):
        send_batch("t", namesrv=namesrv, options={"writeId": "x"})
    rows = spark.range(1).selectExpr("CAST(id AS STRING) AS body")
    with pytest.raises(OptionError, match="order_by: there is no column 'time'"):
        send_batch("t", namesrv=namesrv, order_by="time")(rows, 0)
    with pytest.raises(OptionError, match="query_id="):
        send_batch("t", namesrv=namesrv)(rows, 0)
