"""Messages that are gone, damaged or not there yet: what batch and stream queries do about them, both ways of failOnDataLoss."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from pyspark.sql import DataFrame, SparkSession

from protomq import Admin, OutgoingMessage, Producer, PullConsumer
from protomq.records import RecordEncoder, make_front
from protomq.testing import Broker
from protomq_spark.cluster import Cluster
from protomq_spark.options import ClientOptions
from protomq_spark.pulling import ANSWERS_AHEAD
from tests.support.faulty_spark import Fault, FaultySource
from tests.support.small_segments import let_retention_pass, small_segments_broker
from tests.support.spark import (
    SPARK_MARKS,
    InBackground,
    batch_frame,
    copy_stream,
    forget_last_commit,
    numbers,
    run,
)
from tests.support.topics import bodies, drain, end_offsets, fill, make_topic, once, stored_count
from tests.support.waiting import wait_for

pytestmark = SPARK_MARKS

COUNT = 2000


def first_offset(server: Broker, topic: str) -> int:
    """Of the only queue."""
    with PullConsumer(namesrv=server.namesrv) as consumer:
        (queue,) = consumer.queues(topic)
        return consumer.min_offset(queue)


def first_offset_after_retention(server: Broker, topic: str) -> int:
    """Old segments go; the first offset that is left."""
    let_retention_pass(server)
    first = first_offset(server, topic)
    assert first > 0
    return first


def send_large(server: Broker, topic: str, count: int, first: int = 0) -> None:
    """Ids as bodies of 500 bytes: some hundred of them fill a segment."""
    with Producer(namesrv=server.namesrv) as producer:
        for start in range(first, first + count, 250):
            ids = range(start, min(start + 250, first + count))
            producer.send_batch(topic, [OutgoingMessage(topic, b"%0500d" % n) for n in ids])


def ids_of(rows: list[Any]) -> list[int]:
    return sorted(int(bytes(row.body)) for row in rows)


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[Broker]:
    """A broker of each test's own, with small segments."""
    with small_segments_broker(tmp_path / "broker") as server:
        yield server


def reader(spark: SparkSession, server: Broker, topic: str, **options: str) -> DataFrame:
    return batch_frame(spark, server, **({"subscribe": topic, "columns": "body"} | options))


# -- retention -----------------------------------------------------------------------------------------------------------------


def test_a_start_that_retention_has_passed_is_an_error_or_passed_over(
    spark: SparkSession, small_server: Broker, tmp_path: Path
) -> None:
    source = make_topic(small_server, "retention", 1)
    target = make_topic(small_server, "retention-copy", 2)
    send_large(small_server, source, 100)
    given = {"subscribe": source, "columns": "body"}
    run(copy_stream(spark, small_server, given, target, tmp_path / "ck"))
    before = ids_of(drain(small_server, target))
    assert before == list(range(100))
    send_large(small_server, source, COUNT, first=100)
    first = first_offset_after_retention(small_server, source)
    assert first > 100
    left = list(range(first, 100 + COUNT))

    from_0 = {"startingOffsets": json.dumps({source: {"0": 0}})}
    with pytest.raises(Exception, match=rf"retention/\S+:0: offsets 0 to {first - 1} are deleted"):
        reader(spark, small_server, source, **from_0).count()
    passed_over = reader(spark, small_server, source, failOnDataLoss="false", **from_0)
    assert ids_of(passed_over.collect()) == left
    assert ids_of(reader(spark, small_server, source).collect()) == left  # earliest: what there is

    with pytest.raises(Exception, match=rf"offsets 100 to {first - 1} are deleted"):
        run(copy_stream(spark, small_server, given, target, tmp_path / "ck"))
    # What was copied before may have gone from the copy meanwhile; nothing of it comes again.
    run(copy_stream(spark, small_server, given, target, tmp_path / "ck", failOnDataLoss="false"))
    copied = sum(end_offsets(small_server, target).values())
    assert copied == 100 + len(left)
    stored = ids_of(drain(small_server, target))
    assert stored == sorted(set(stored))
    assert set(left) <= set(stored)


@pytest.mark.parametrize("fail", ["true", "false"])
def test_retention_that_passes_a_task_while_it_reads(
    spark: SparkSession, small_server: Broker, tmp_path: Path, fail: str
) -> None:
    spark.dataSource.register(FaultySource)
    topic = make_topic(small_server, "retention-task", 1)
    send_large(small_server, topic, COUNT)
    # Two answers are handed over, and the fault holds the third.
    answer_rows, held_answers = 25, 3
    fault = Fault("read", "wait", tmp_path / "fault", rows=(held_answers - 1) * answer_rows)
    given = {"subscribe": topic, "columns": "body"}
    given |= {"failOnDataLoss": fail, "protomq.pullCountMax": str(answer_rows)} | fault.options()
    frame = batch_frame(spark, small_server, kind="protomq-faulty", **given)
    query = InBackground(spark, frame.collect)
    query.wait_for(fault)
    try:
        first = first_offset_after_retention(small_server, topic)
    finally:
        fault.go_on()
    if fail == "true":
        with pytest.raises(Exception, match=rf"deleted, the first is {first}"):
            query.result()
        return
    ids = ids_of(query.result())
    assert ids == sorted(set(ids))
    # What had come by then comes out still: the answers that Spark was given, the one that was decoded and, unless the
    # broker stopped before it saw the request, the one that was on its way. Nothing is left out before the gap.
    passed = [n for n in ids if n < first]
    assert passed == list(range(len(passed)))
    came = held_answers + ANSWERS_AHEAD
    assert len(passed) in ((came - 1) * answer_rows, came * answer_rows)
    assert came * answer_rows < first  # Else retention would not have cut what was left to be asked for.
    assert [n for n in ids if n >= first] == list(range(first, COUNT))


@pytest.mark.long
def test_retention_between_a_micro_batch_and_its_replay_is_an_error_and_no_row_takes_anothers_place(
    spark: SparkSession, small_server: Broker, protomq_server: Broker, tmp_path: Path
) -> None:
    source = make_topic(small_server, "retention-replay", 1)
    target = make_topic(protomq_server, "retention-replay-copy", 1)
    send_large(small_server, source, COUNT)
    given = {"subscribe": source, "columns": "body", "failOnDataLoss": "false"}
    writer = copy_stream(spark, small_server, given, target, tmp_path / "ck")
    writer = writer.option("protomq.namesrv", protomq_server.namesrv)
    run(writer)
    before = ids_of(drain(protomq_server, target))
    assert before == list(range(COUNT))
    forget_last_commit(tmp_path / "ck")
    first_offset_after_retention(small_server, source)
    with pytest.raises(Exception, match="runs again with other rows"):
        run(writer)
    assert ids_of(drain(protomq_server, target)) == before


# -- damage ------------------------------------------------------------------------------------------------------------------------


def damage(server: Broker, body: bytes) -> None:
    """Flips a bit in the middle of a body on disk."""
    for segment in (server.data_dir / "store/commitlog").iterdir():
        with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0) as octets:
            at = octets.find(body)
            if at >= 0:
                octets[at + len(body) // 2] ^= 1
                return
    raise AssertionError("no such body")


POISONED = {123, 200}


def send_damaged(server: Broker, topic: str, count: int) -> None:
    """As `send_large`, with keys; bits flip between the producer's encoding and the broker, which takes whole records as they are."""
    records = [
        (b"%0500d" % n, f"k{n}", "", make_front(f"k{n}", (), "", None, None, "")[1], 0, 1, 0)
        for n in range(count)
    ]
    request = bytearray(b"".join(RecordEncoder(topic, 78, 0).encode_request(records, 0, 0)))
    request[request.index(b"%0500d" % 123) + 250] ^= 1  # in a body
    request[request.index(b"k200")] ^= 1  # in a key
    cluster = Cluster(ClientOptions(server.namesrv))
    (queue,) = end_offsets(server, topic)
    cluster.calls.send(queue, bytes(request))
    cluster.close()


@pytest.mark.long
def test_a_message_damaged_on_its_way_is_an_error_null_or_left_out(
    spark: SparkSession, protomq_server: Broker, tmp_path: Path
) -> None:
    topic = make_topic(protomq_server, "poison", 1)
    send_damaged(protomq_server, topic, 300)
    sound = [n for n in range(300) if n not in POISONED]
    columns = {"columns": "queue_offset,body,key"}
    with pytest.raises(Exception, match=r"poison/\S+/0@123: its CRC-32C is wrong"):
        reader(spark, protomq_server, topic, **columns).count()
    with pytest.raises(Exception, match=r"poison/\S+/0@123: its CRC-32C is wrong"):
        reader(spark, protomq_server, topic, columns="key").count()
    rows = reader(spark, protomq_server, topic, corruptRecords="null", **columns).collect()
    assert {row.queue_offset for row in rows if row.body is None} == POISONED
    assert {row.queue_offset for row in rows if row.key is None} == POISONED
    assert ids_of([row for row in rows if row.body]) == sound
    kept = reader(spark, protomq_server, topic, corruptRecords="skip", **columns).collect()
    assert ids_of(kept) == sound
    assert reader(spark, protomq_server, topic, columns="queue_offset").count() == 300

    target = make_topic(protomq_server, "poison-copy", 2)
    given = {"subscribe": topic, "columns": "body"}
    with pytest.raises(Exception, match="@123"):
        run(copy_stream(spark, protomq_server, given, target, tmp_path / "ck"))
    run(copy_stream(spark, protomq_server, given, target, tmp_path / "ck", corruptRecords="skip"))
    assert ids_of(drain(protomq_server, target)) == sound


def test_a_range_in_quarantine_is_an_error_or_passed_over(
    spark: SparkSession, tmp_path: Path
) -> None:
    # Synced: each append says in its seal that those before are on the disk, so that damage to them is no torn tail.
    settings = {"PROTOMQ_STORE_CORRUPTION": "quarantine", "PROTOMQ_STORE_SYNC_FLUSH": "true"}
    with Broker(environment=settings) as server:
        topic = make_topic(server, "quarantine", 1)
        target = make_topic(server, "quarantine-copy", 2)
        send_large(server, topic, 500)
        send_large(server, topic, 500, first=500)
        server.kill()
        damage(server, b"%0500d" % 600)
        server.start()
        with pytest.raises(Exception, match="damaged on the broker's disk"):
            reader(spark, server, topic).count()
        left = ids_of(reader(spark, server, topic, failOnDataLoss="false").collect())
        assert 600 not in left
        assert left == sorted(set(left))
        # No more than the append of it.
        assert set(range(1000)) - set(left) <= set(range(500, 750))
        given = {"subscribe": topic, "columns": "body"}
        with pytest.raises(Exception, match="damaged on the broker's disk"):
            run(copy_stream(spark, server, given, target, tmp_path / "ck"))
        run(copy_stream(spark, server, given, target, tmp_path / "ck", failOnDataLoss="false"))
        assert ids_of(drain(server, target)) == left


def test_a_compressed_body_that_does_not_decode_is_an_error_null_or_left_out(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer
) -> None:
    topic = make_topic(protomq_server, "undecodable", 1)
    fill(protomq_producer, topic, 10)
    zstd = 1
    records = [(b"this is not zstd", "", "", b"", zstd, 1_700_000_000_000, 0)]
    request = b"".join(RecordEncoder(topic, 77, 0).encode_request(records, 0, 0))
    cluster = Cluster(ClientOptions(protomq_server.namesrv))
    (queue,) = end_offsets(protomq_server, topic)
    cluster.calls.send(queue, request)
    cluster.close()
    fill(protomq_producer, topic, 10, first=10)
    columns = {"columns": "queue_offset,body"}
    with pytest.raises(Exception, match=r"undecodable/\S+/0@10: "):
        reader(spark, protomq_server, topic, **columns).count()
    rows = reader(spark, protomq_server, topic, corruptRecords="null", **columns).collect()
    assert [row.queue_offset for row in rows if row.body is None] == [10]
    kept = reader(spark, protomq_server, topic, corruptRecords="skip", **columns)
    assert bodies(kept.collect()) == once(20)


# -- what is not there yet, or not at all ---------------------------------------------------------------------------------------


def test_queues_added_in_the_middle_of_a_stream_are_read_from_their_first_message(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    source = make_topic(protomq_server, "growth", 2)
    target = make_topic(protomq_server, "growth-copy", 2)
    fill(protomq_producer, source, 600)
    # Later queues are read from their beginning whatever the start was.
    given = {"subscribe": source, "columns": "body"}
    query = copy_stream(spark, protomq_server, given, target, tmp_path / "ck").start()
    try:
        wait_for(lambda: stored_count(protomq_server, target) == 600, pause_s=0.2)
        with Admin(namesrv=protomq_server.namesrv) as admin:
            admin.create_topic(source, write_queues=5, read_queues=5, update=True)
        with Producer(namesrv=protomq_server.namesrv) as producer:  # A new one: it knows all five queues.
            fill(producer, source, 2500, first=600)
        grown = end_offsets(protomq_server, source)
        assert len([end for end in grown.values() if end]) == 5
        query.processAllAvailable()
    finally:
        query.stop()
    assert bodies(drain(protomq_server, target)) == once(3100)


def test_a_topic_that_is_missing_is_named(
    spark: SparkSession, protomq_server: Broker, tmp_path: Path
) -> None:
    target = make_topic(protomq_server, "missing-copy", 1)
    with pytest.raises(Exception, match="there is no topic 'no-such-topic'"):
        reader(spark, protomq_server, "no-such-topic").count()
    given = {"subscribe": "no-such-topic"}
    with pytest.raises(Exception, match="there is no topic 'no-such-topic'"):
        run(copy_stream(spark, protomq_server, given, target, tmp_path / "ck"))
    assert batch_frame(spark, protomq_server, subscribePattern="no-such-.*").count() == 0


def test_a_sink_without_its_topic_makes_it_or_names_it(
    spark: SparkSession, protomq_server: Broker, write: Callable[..., None]
) -> None:
    write(numbers(spark, 10, 1), "made-by-the-first-row")
    assert bodies(drain(protomq_server, "made-by-the-first-row")) == once(10)
    with Broker(environment={"PROTOMQ_AUTO_CREATE_TOPICS": "false"}) as strict:
        with pytest.raises(Exception, match="no-such-topic"):
            write(numbers(spark, 1, 1), "no-such-topic", **{"protomq.namesrv": strict.namesrv})


def test_nobody_there_is_an_error_that_names_the_address(
    spark: SparkSession, write: Callable[..., None], tmp_path: Path
) -> None:
    nobody = {"protomq.namesrv": "127.0.0.1:1", "protomq.timeoutMs": "300"}
    named = r"no name server answers.*127\.0\.0\.1:1"
    given = {"subscribe": "t", **nobody}
    with pytest.raises(Exception, match=named):
        spark.read.format("protomq").options(**given).load().count()
    stream = spark.readStream.format("protomq").options(**given).load()
    with pytest.raises(Exception, match=named):
        run(stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path)))
    with pytest.raises(Exception, match=named):
        write(numbers(spark, 1, 1), "t", **nobody)
