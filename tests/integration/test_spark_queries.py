"""Real Spark (local, two cores) against a real broker: reading, writing, and every message once whatever fails."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, concat, lit

from protomq import Admin, Producer, PullConsumer
from protomq.testing import Broker
from protomq_spark import send_partition, send_udf
from protomq_spark.udf import SENT_DDL
from tests.support.spark import SPARK_MARKS, copy_stream, forget_last_commit, numbers, run
from tests.support.topics import bodies, drain, end_offsets, fill, make_topic, once, stored_count
from tests.support.waiting import wait_for

pytestmark = SPARK_MARKS

# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_topic_is_a_table_without_registering_anything(
    read: Callable[..., DataFrame], protomq_topic: str, protomq_producer: Producer
) -> None:
    fill(protomq_producer, protomq_topic, 600)
    rows = read(protomq_topic, includeHeaders="true").collect()
    assert Counter(bytes(row.body) for row in rows) == once(600)
    row = next(row for row in rows if bytes(row.body) == b"7")
    assert (row.key, row.tags, row.properties, row.topic) == ("k7", "B", {"n": "7"}, protomq_topic)
    assert [(h.key, bytes(h.value)) for h in row.headers] == [("n", b"7")]
    assert abs(row.timestamp.timestamp() - time.time()) < 3600
    assert (row.timestamp_type, row.reconsume_times, row.born_host) == (1, 0, None)
    message = next(m for m in rows if m.message_id == row.message_id)
    assert (message.queue_id, message.queue_offset) == (row.queue_id, row.queue_offset)


def test_queues_are_split_tags_filtered_and_columns_chosen(
    read: Callable[..., DataFrame], protomq_server: Broker, protomq_producer: Producer
) -> None:
    topic = make_topic(protomq_server, "spark-split", 1)
    fill(protomq_producer, topic, 500)
    whole = read(topic, minPartitions="4", columns="queue_offset,body")
    assert whole.columns == ["queue_offset", "body"]
    assert whole.rdd.getNumPartitions() == 4
    assert Counter(bytes(row.body) for row in whole.collect()) == once(500)
    tagged = read(topic, tags="B", columns="body", maxRecordsPerPartition="100")
    assert tagged.count() == len(range(1, 500, 3))
    part = read(
        topic,
        startingOffsets=json.dumps({topic: {"0": 100}}),
        endingOffsets=json.dumps({topic: {"0": 200}}),
        columns="queue_offset",
    )
    assert sorted(row.queue_offset for row in part.collect()) == list(range(100, 200))


def test_a_time_is_a_place_in_the_topic(
    read: Callable[..., DataFrame], protomq_topic: str, protomq_producer: Producer
) -> None:
    fill(protomq_producer, protomq_topic, 50)
    time.sleep(0.05)
    between_ms = str(int(time.time() * 1000))
    time.sleep(0.05)
    fill(protomq_producer, protomq_topic, 30, first=50)
    young = read(
        protomq_topic, startingTimestamp=between_ms, startingOffsetsByTimestampStrategy="latest"
    )
    assert young.count() == 30
    assert read(protomq_topic, endingTimestamp=between_ms).count() == 50


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"startingOfset": "earliest"}, "startingofset.*is 'startingOffsets' meant"),
        ({"subscribe": "no-such-topic"}, "no-such-topic"),
        ({"protomq.namesrv": "127.0.0.1:1", "protomq.timeoutMs": "400"}, "no name server answers"),
    ],
)
def test_a_mistake_is_an_error_that_names_it(
    read: Callable[..., DataFrame], options: dict[str, str], named: str
) -> None:
    with pytest.raises(Exception, match=named):
        read("unused", **options).count()


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ("body STRING", "body is string: it is binary and may be null. Leave"),
        ("key STRING NOT NULL", "key is string NOT NULL: it is string"),
        ("properties MAP<STRING, INT>", "it is map<string,string>"),
        ("id INT", "the schema names id; there are key"),
    ],
)
def test_a_schema_of_the_users_is_the_messages_or_an_error_before_any_task(
    spark: SparkSession, protomq_server: Broker, schema: str, named: str
) -> None:
    given = {"protomq.namesrv": protomq_server.namesrv, "subscribe": "no-such-topic"}
    frame = spark.read.format("protomq").schema(schema).options(**given).load()
    with pytest.raises(Exception, match=re.escape(named)) as error:
        frame.collect()
    assert "TaskSetManager" not in str(error.value)


def test_a_schema_that_says_what_is_true_chooses_columns(
    spark: SparkSession, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    fill(protomq_producer, protomq_topic, 3)
    true = "timestamp TIMESTAMP, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, body BINARY, properties MAP<STRING, STRING>"
    reader = spark.read.format("protomq").option("protomq.namesrv", protomq_server.namesrv)
    frame = reader.schema(true).option("subscribe", protomq_topic).load()
    assert frame.columns == ["timestamp", "headers", "body", "properties"]
    assert bodies(frame.collect()) == once(3)


# -- writing -----------------------------------------------------------------------------------------------------------


def test_rows_arrive_with_all_their_parts(
    spark: SparkSession, write: Callable[..., None], protomq_server: Broker, protomq_topic: str
) -> None:
    frame = numbers(spark, 300, 2).select(
        "body",
        concat(lit("k"), "body").alias("key"),
        lit("T").alias("tags"),
        concat(lit("s"), (col("body") % 5).cast("int")).alias("sharding_key"),
    )
    write(frame, protomq_topic)
    messages = drain(protomq_server, protomq_topic)
    assert bodies(messages) == once(300)
    assert {message.tag for message in messages} == {"T"}
    assert all(message.key == f"k{message.body.decode()}" for message in messages)
    by_key: dict[str, set[int]] = {}
    for message in messages:
        by_key.setdefault(message.sharding_key, set()).add(message.queue_id)
    assert len(by_key) == 5
    assert all(len(queues) == 1 for queues in by_key.values())


def test_the_key_chooses_the_queue_and_an_empty_one_is_none(
    spark: SparkSession,
    read: Callable[..., DataFrame],
    write: Callable[..., None],
    protomq_topic: str,
) -> None:
    rows = spark.range(0, 400, 1, 2).selectExpr(
        "CAST(id AS STRING) AS body", "IF(id % 8 = 0, '', CONCAT('k', id % 8)) AS key", "'' AS tags"
    )
    write(rows, protomq_topic, batchRows="50")
    stored = read(protomq_topic, columns="body,key,tags,queue_id").collect()
    assert bodies(stored) == once(400)
    assert {row.tags for row in stored} == {None}
    queues: dict[str | None, set[int]] = {}
    for row in stored:
        queues.setdefault(row.key, set()).add(row.queue_id)
    in_turn = queues.pop(None)
    assert len(in_turn) > 1
    assert set(queues) == {f"k{n}" for n in range(1, 8)}
    assert {len(found) for found in queues.values()} == {1}
    assert len(set.union(*queues.values())) > 1


def test_a_tag_that_nobody_could_ask_for_is_refused(
    spark: SparkSession, write: Callable[..., None], protomq_server: Broker, protomq_topic: str
) -> None:
    frame = numbers(spark, 1, 1).selectExpr("body", "'a || b' AS tags")
    with pytest.raises(Exception, match=r"tag 'a || b': a tag has no \|"):
        write(frame, protomq_topic)
    assert not drain(protomq_server, protomq_topic)


def test_a_topic_with_fewer_queues_than_a_moment_ago_is_looked_up_again(
    spark: SparkSession, write: Callable[..., None], protomq_server: Broker, tmp_path: Path
) -> None:
    source = make_topic(protomq_server, "spark-shrinking-source", 1)
    topic = make_topic(protomq_server, "spark-shrinking", 8)
    write(numbers(spark, 80, 8), topic)
    given = {"subscribe": source, "columns": "body"}
    query = copy_stream(spark, protomq_server, given, topic, tmp_path).start()
    try:
        write(numbers(spark, 10, 1), source)
        query.processAllAvailable()
        with Admin(namesrv=protomq_server.namesrv) as admin:
            admin.create_topic(topic, write_queues=2, read_queues=8, update=True)
        brief = {"protomq.timeoutMs": "2000"}  # Much less than a route is trusted for.
        write(numbers(spark, 80, 8), topic, **brief)
        write(numbers(spark, 10, 1), source)
        query.processAllAvailable()
    finally:
        query.stop()
    ends = end_offsets(protomq_server, topic)
    assert sum(ends.values()) == 80 + 10 + 80 + 10
    assert sum(end for queue, end in ends.items() if queue.queue_id >= 2) <= 70


def padded(spark: SparkSession, count: int, partitions: int) -> DataFrame:
    """Rows large enough to leave Spark's buffers while the task still runs."""
    return spark.range(0, count, 1, partitions).selectExpr("lpad(id, 400, '0') AS body")


def fail_when_stored(
    server: Broker,
    topic: str,
    count: int,
    *,
    attempts: int = 1,
    kill: bool = False,
    turn: bool = False,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Passes everything on; the first attempts then wait until the topic holds `count` messages, and fail or are killed.

    `turn`: later attempts have the rows in the opposite order.
    """
    namesrv = server.namesrv

    def through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        rows = [body for batch in batches for body in batch.column(0).to_pylist()]
        if turn and task.attemptNumber():
            rows.reverse()
        for start in range(0, len(rows), 100):
            yield pa.RecordBatch.from_pydict({"body": rows[start : start + 100]})
        if task.attemptNumber() < attempts:
            ends_s = time.monotonic() + 20
            with PullConsumer(namesrv=namesrv) as consumer:
                queues = consumer.queues(topic)
                while sum(map(consumer.end_offset, queues)) < count:
                    assert time.monotonic() < ends_s, "the first attempt sent nothing"
                    time.sleep(0.02)
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("made to fail")

    return through


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(name, "100")
    yield
    spark.conf.unset(name)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=pytest.mark.long)], ids=["failed", "killed"])
def test_a_task_that_runs_again_stores_its_rows_once(
    spark: SparkSession,
    write: Callable[..., None],
    protomq_server: Broker,
    protomq_topic: str,
    kill: bool,
) -> None:
    again = fail_when_stored(
        protomq_server, protomq_topic, 300, attempts=1 if kill else 2, kill=kill
    )
    write(padded(spark, 2000, 2).mapInArrow(again, "body string"), protomq_topic, batchRows="100")
    stored = Counter(int(message.body) for message in drain(protomq_server, protomq_topic))
    assert stored == Counter(range(2000))


@pytest.mark.usefixtures("small_batches")
def test_rows_in_another_order_when_a_task_runs_again_are_an_error_not_a_loss(
    spark: SparkSession, write: Callable[..., None], protomq_server: Broker, protomq_topic: str
) -> None:
    again = fail_when_stored(protomq_server, protomq_topic, 100, turn=True)
    frame = padded(spark, 1000, 1).mapInArrow(again, "body string")
    with pytest.raises(Exception, match=r"protomq_spark\.send_batch.*sortWithinPartitions"):
        write(frame, protomq_topic, batchRows="100")


def test_the_same_write_id_writes_once(
    spark: SparkSession, write: Callable[..., None], protomq_server: Broker, protomq_topic: str
) -> None:
    for _ in range(2):
        write(numbers(spark, 500, 2), protomq_topic, writeId="backfill-1")
    assert bodies(drain(protomq_server, protomq_topic)) == once(500)
    write(numbers(spark, 500, 2), protomq_topic)
    assert len(drain(protomq_server, protomq_topic)) == 1000


@pytest.mark.parametrize(
    ("columns", "named"), [("body, 1 AS colour", "colour"), ("'k' AS key", "'body'")]
)
def test_columns_that_cannot_be_sent_are_refused(
    spark: SparkSession, write: Callable[..., None], protomq_topic: str, columns: str, named: str
) -> None:
    with pytest.raises(Exception, match=named):
        write(numbers(spark, 1, 1).selectExpr(*columns.split(", ")), protomq_topic)


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_stream_copies_every_message_once_across_restarts_and_replays(
    spark: SparkSession,
    protomq_server: Broker,
    protomq_topic: str,
    protomq_producer: Producer,
    tmp_path: Path,
) -> None:
    target = make_topic(protomq_server, f"{protomq_topic}-copy", 4)
    fill(protomq_producer, protomq_topic, 1000)
    source = {"subscribe": protomq_topic, "protomq.group.id": "spark-lag"}
    writer = copy_stream(
        spark, protomq_server, source, target, tmp_path, maxOffsetsPerTrigger="400"
    )
    progress = run(writer)
    assert [batch["numInputRows"] for batch in progress if batch["numInputRows"]] == [400, 400, 200]
    assert bodies(drain(protomq_server, target)) == once(1000)

    forget_last_commit(tmp_path)
    fill(protomq_producer, protomq_topic, 500, first=1000)
    run(copy_stream(spark, protomq_server, source, target, tmp_path))
    assert bodies(drain(protomq_server, target)) == once(1500)

    with PullConsumer("spark-lag", namesrv=protomq_server.namesrv) as consumer:
        ends = {queue: consumer.end_offset(queue) for queue in consumer.queues(protomq_topic)}
        committed = {queue: consumer.committed(queue) for queue in ends}
    assert sum(ends.values()) == 1500
    assert any(committed.values())
    assert all((offset or 0) <= ends[queue] for queue, offset in committed.items())


def test_topics_that_appear_later_are_read_from_their_first_message(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    target = make_topic(protomq_server, "spark-late-target", 2)
    source = {"subscribePattern": r"spark-late-in-\d"}
    fill(protomq_producer, make_topic(protomq_server, "spark-late-in-1", 2), 100)
    run(copy_stream(spark, protomq_server, source, target, tmp_path))
    fill(protomq_producer, make_topic(protomq_server, "spark-late-in-2", 2), 100, first=100)
    run(copy_stream(spark, protomq_server, source, target, tmp_path))
    assert bodies(drain(protomq_server, target)) == once(200)


def test_a_restarted_broker_costs_no_message_and_adds_none(
    spark: SparkSession, tmp_path: Path
) -> None:
    with Broker() as server:
        source = make_topic(server, "spark-in", 3)
        target = make_topic(server, "spark-out", 3)
        with Producer(namesrv=server.namesrv, send_timeout_s=30) as producer:
            fill(producer, source, 500)
            query = (
                spark.readStream.format("protomq")
                .option("protomq.namesrv", server.namesrv)
                .option("subscribe", source)
                .option("startingOffsets", "earliest")
                .option("columns", "body")
                .option("maxOffsetsPerTrigger", "300")
                .load()
                .writeStream.format("protomq")
                .option("protomq.namesrv", server.namesrv)
                .option("topic", target)
                .option("checkpointLocation", str(tmp_path))
                .start()
            )
            wait_for(lambda: query.lastProgress is not None)
            server.restart()
            fill(producer, source, 700, first=500)
            wait_for(
                lambda: query.exception() is not None or stored_count(server, target) >= 1200,
                pause_s=0.2,
            )
            query.processAllAvailable()
            query.stop()
        assert bodies(drain(server, target)) == once(1200)


def _written(segment: Path) -> bytes:
    """Its bytes up to 16 MiB of nothing: no record is so large."""
    octets = b""
    with segment.open("rb") as file:
        while (more := file.read(16 << 20)).strip(b"\0"):
            octets += more
    return octets


# -- functions that send -------------------------------------------------------------------------------------------------


def test_a_column_that_sends_says_where_each_message_is(
    spark: SparkSession, protomq_server: Broker, protomq_topic: str
) -> None:
    send = send_udf(protomq_topic, namesrv=protomq_server.namesrv)
    sent = (
        numbers(spark, 100, 2)
        .select("body", send("body", "body").alias("sent"))
        .select("body", "sent.*")
    )
    rows = sent.collect()
    assert {(row.status, row.error) for row in rows} == {("SEND_OK", None)}
    messages = {message.message_id: message for message in drain(protomq_server, protomq_topic)}
    assert len(messages) == 100
    for row in rows:
        message = messages[row.message_id]
        assert (message.body.decode(), message.key) == (row.body, row.body)
        assert (message.queue_id, message.queue_offset) == (row.queue_id, row.queue_offset)


def test_partitions_send_and_a_message_that_is_refused_is_a_row_with_an_error(
    spark: SparkSession, protomq_server: Broker, protomq_topic: str
) -> None:
    numbers(spark, 50, 2).foreachPartition(
        send_partition(protomq_topic, namesrv=protomq_server.namesrv)
    )
    assert bodies(drain(protomq_server, protomq_topic)) == once(50)
    nowhere = send_partition.arrow("spark bad name!", namesrv=protomq_server.namesrv, timeout_s=2)
    (row,) = numbers(spark, 1, 1).mapInArrow(nowhere, SENT_DDL).collect()
    assert row.status is None
    assert row.error


# -- the log -------------------------------------------------------------------------------------------------------------


def test_the_log_of_a_live_store_and_a_damaged_copy_are_tables(
    spark: SparkSession,
    protomq_server: Broker,
    protomq_topic: str,
    protomq_producer: Producer,
    tmp_path: Path,
) -> None:
    fill(protomq_producer, protomq_topic, 1000)
    store = protomq_server.data_dir / "store"
    log = spark.read.format("protomq-log").option("topic", protomq_topic)
    rows = log.load(str(store)).collect()
    assert Counter(bytes(row.body) for row in rows) == once(1000)
    assert {(row.topic, row.properties["n"]) for row in rows} == {
        (protomq_topic, str(n)) for n in range(1000)
    }
    split = log.option("minPartitions", "4").load(str(store))
    assert split.rdd.getNumPartitions() > 1
    assert split.count() == 1000

    (segment,) = (store / "commitlog").iterdir()
    # Whatever other tests have sent to this broker, the zeros behind it come with the copy: not all, for a segment has 1 GiB.
    octets = bytearray(_written(segment).rstrip(b"\0") + bytes(4096))
    octets[octets.rindex(b"\x0a\x03500")] ^= (
        0x80  # The body of message 500, in one append with 250 to 499 or so.
    )
    copy = tmp_path / segment.name
    copy.write_bytes(octets)
    damage = (
        spark.read.format("protomq-log").option("report", "damage").load(str(tmp_path)).collect()
    )
    assert len(damage) == 1
    assert not damage[0].tail
    left = {int(row.body) for row in log.load(str(copy)).collect()}
    assert 500 not in left
    assert 0 < len(left) < 1000
    assert left == set(range(500)) | set(range(750, 1000))
    with pytest.raises(Exception, match="does not match its seal"):
        log.option("failOnDamage", "true").load(str(copy)).count()
