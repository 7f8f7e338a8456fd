"""The options of the source with a real Spark, each by what it does to a query."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from pyspark.sql import DataFrame, SparkSession

from protomq import Admin, MessageQueue, OutgoingMessage, Producer, PullConsumer
from protomq.testing import Broker
from tests.support.spark import ROOT, SPARK_MARKS, copy_stream, numbers, run
from tests.support.topics import bodies, drain, end_offsets, fill, make_topic, once, stored_count
from tests.support.waiting import wait_for

pytestmark = SPARK_MARKS


def rows_of(progress: list[dict[str, Any]]) -> list[int]:
    """Of the micro-batches that had any."""
    return [batch["numInputRows"] for batch in progress if batch["numInputRows"]]


def place(batch: dict[str, Any], name: str, topic: str) -> int:
    """An offset in the progress of a micro-batch, of a topic's only queue."""
    (found,) = offset_in(batch, name)[topic].values()
    return int(found)


def offset_in(batch: dict[str, Any], name: str) -> dict[str, Any]:
    """The offset of a micro-batch's only source, as Spark reports it."""
    (source,) = batch["sources"]
    offset: dict[str, Any] | str = source[name]
    return json.loads(offset) if isinstance(offset, str) else offset


def count_stream(spark: SparkSession, server: Broker, checkpoint: Path, **options: str) -> Any:
    """A query, not started yet, that reads and throws away."""
    given = {"protomq.namesrv": server.namesrv, "columns": "body"} | options
    stream = spark.readStream.format("protomq").options(**given).load()
    return stream.writeStream.format("noop").option("checkpointLocation", str(checkpoint))


# -- how much a micro-batch takes --------------------------------------------------------------------------------------------


def test_a_stream_waits_for_min_offsets_or_until_max_trigger_delay(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    source = make_topic(protomq_server, "options-min", 2)
    target = make_topic(protomq_server, "options-min-copy", 2)
    given = {"subscribe": source, "columns": "body", "minOffsetsPerTrigger": "100"}
    patient = copy_stream(spark, protomq_server, given, target, tmp_path, maxTriggerDelay="1h")
    fill(protomq_producer, source, 60)
    query = patient.start()
    try:
        wait_for(lambda: query.status["message"].startswith("Waiting"))
        fill(protomq_producer, source, 39, first=60)
        for _ in range(3):  # Three looks at 99 messages.
            query.processAllAvailable()
        assert drain(protomq_server, target) == []
        fill(protomq_producer, source, 1, first=99)
        wait_for(lambda: stored_count(protomq_server, target) == 100, pause_s=0.2)
    finally:
        query.stop()
    fill(protomq_producer, source, 10, first=100)
    hasty = copy_stream(spark, protomq_server, given, target, tmp_path, maxTriggerDelay="500ms")
    query = hasty.start()
    try:
        wait_for(lambda: stored_count(protomq_server, target) == 110, pause_s=0.2)
    finally:
        query.stop()
    # Trigger.AvailableNow takes what is there, however little.
    fill(protomq_producer, source, 5, first=110)
    run(copy_stream(spark, protomq_server, given, target, tmp_path))
    assert bodies(drain(protomq_server, target)) == once(115)


def test_max_offsets_are_shared_in_proportion_to_lag(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    large = make_topic(protomq_server, "options-max-large", 1)
    small = make_topic(protomq_server, "options-max-small", 1)
    fill(protomq_producer, large, 270)
    fill(protomq_producer, small, 30)
    given = {"subscribe": f"{large},{small}", "startingOffsets": "earliest"}
    progress = run(
        count_stream(spark, protomq_server, tmp_path, maxOffsetsPerTrigger="100", **given)
    )
    assert rows_of(progress) == [100] * 3
    assert place(progress[0], "endOffset", small) == 10


def test_available_now_ends_at_what_was_there_when_it_began(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    topic = make_topic(protomq_server, "options-now", 1)
    fill(protomq_producer, topic, 300)
    given = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "100"}
    stream = count_stream(spark, protomq_server, tmp_path, **given)
    query = stream.trigger(availableNow=True).start()
    wait_for(lambda: query.lastProgress is not None or not query.isActive)
    fill(protomq_producer, topic, 100, first=300)
    assert query.awaitTermination(60)
    assert rows_of([json.loads(batch.json) for batch in query.recentProgress]) == [100] * 3
    assert rows_of(run(count_stream(spark, protomq_server, tmp_path, **given))) == [100]


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ({}, 2),
        ({"minPartitions": "10"}, 10),
        ({"maxRecordsPerPartition": "150"}, 8),
        ({"maxPartitions": "1"}, 1),
        (
            {"minPartitions": "3", "maxRecordsPerPartition": "1000"},
            4,
        ),  # At least 3, and equal parts.
    ],
)
def test_tasks_are_as_many_and_as_large_as_asked_for(
    read: Callable[..., DataFrame],
    protomq_server: Broker,
    protomq_producer: Producer,
    options: dict[str, str],
    tasks: int,
) -> None:
    topic = "options-tasks"
    with Admin(namesrv=protomq_server.namesrv) as admin:
        if topic not in admin.list_topic_names():
            make_topic(protomq_server, topic, 2)
            for queue in end_offsets(protomq_server, topic):
                for start in range(0, 600, 200):
                    batch = [OutgoingMessage(topic, b"%d" % n) for n in range(start, start + 200)]
                    protomq_producer.send_batch(topic, batch, queue=queue)
    frame = read(topic, columns="body", **options)
    assert frame.rdd.getNumPartitions() == tasks
    sizes = frame.rdd.mapPartitions(lambda rows: [sum(1 for _ in rows)]).collect()
    assert sum(sizes) == 1200
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= int(options.get("maxRecordsPerPartition", "1200"))


# -- where it starts and ends -----------------------------------------------------------------------------------------------


def tagged(topic: str, number: int) -> OutgoingMessage:
    return OutgoingMessage(topic, b"%d" % number, tag="AB"[number % 2])


@pytest.fixture(scope="module")
def timed(protomq_server: Broker) -> tuple[str, int]:
    """A topic of two queues: 50 messages in each before a moment, 30 in the first after it."""
    topic = make_topic(protomq_server, "options-timed", 2)
    with Producer(namesrv=protomq_server.namesrv) as producer:
        queues = sorted(end_offsets(protomq_server, topic))
        for first, queue in zip((0, 50), queues, strict=True):
            old = [tagged(topic, n) for n in range(first, first + 50)]
            producer.send_batch(topic, old, queue=queue)
        time.sleep(0.01)
        between_ms = int(time.time() * 1000)
        time.sleep(0.01)
        young = [tagged(topic, n) for n in range(100, 130)]
        producer.send_batch(topic, young, queue=queues[0])
    return topic, between_ms


def test_a_time_beyond_a_queues_end_is_an_error_unless_the_strategy_is_latest(
    read: Callable[..., DataFrame], timed: tuple[str, int]
) -> None:
    topic, between_ms = timed
    at = {"startingTimestamp": str(between_ms)}
    each = {"startingOffsetsByTimestamp": json.dumps({topic: {"0": between_ms, "1": between_ms}})}
    latest = {"startingOffsetsByTimestampStrategy": "latest"}
    for options, name in ((at, "startingTimestamp"), (each, "startingOffsetsByTimestamp")):
        with pytest.raises(Exception, match=rf"'{name}': queue \S+:1 of topic '{topic}' has no"):
            read(topic, **options).count()
        assert bodies(read(topic, **options, **latest).collect()) == once(100, 130)


def test_each_form_of_an_end(read: Callable[..., DataFrame], timed: tuple[str, int]) -> None:
    topic, between_ms = timed
    by_queue = {topic: {"0": between_ms, "1": 0}}
    assert bodies(read(topic, endingTimestamp=str(between_ms)).collect()) == once(100)
    ended = read(topic, endingOffsetsByTimestamp=json.dumps(by_queue))
    assert bodies(ended.collect()) == once(50)
    assert read(topic, endingOffsets="latest").count() == 130
    offsets = json.dumps({topic: {"0": 10, "1": -1}})
    assert bodies(read(topic, endingOffsets=offsets).collect()) == once(10) + once(50, 100)
    # A time goes before times of queues, and those before offsets.
    assert read(topic, endingTimestamp=str(between_ms), endingOffsets=offsets).count() == 100


@pytest.mark.parametrize(
    ("subscription", "ids"),
    [
        ({"assign": {"options-timed": [1]}}, once(50, 100)),
        ({"assign": {"options-timed": [0, 1]}}, once(130)),
    ],
)
def test_assigned_queues_alone_are_read(
    spark: SparkSession,
    protomq_server: Broker,
    timed: tuple[str, int],
    tmp_path: Path,
    subscription: dict[str, Any],
    ids: Any,
) -> None:
    given = {
        "protomq.namesrv": protomq_server.namesrv,
        "assign": json.dumps(subscription["assign"]),
    }
    frame = spark.read.format("protomq").options(**given).load()
    assert bodies(frame.collect()) == ids
    given |= {"startingOffsets": "earliest"}
    progress = run(count_stream(spark, protomq_server, tmp_path, **given))
    assert rows_of(progress) == [ids.total()]


def test_a_pattern_means_whole_names(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer
) -> None:
    for name in ("options-pattern-1", "options-pattern-12", "not-options-pattern-1"):
        make_topic(protomq_server, name, 1)
        protomq_producer.send(name, name.encode())
    given = {"protomq.namesrv": protomq_server.namesrv, "subscribePattern": r"options-pattern-\d"}
    rows = spark.read.format("protomq").options(**given).load().collect()
    assert [row.topic for row in rows] == ["options-pattern-1"]


def test_a_stream_begins_at_the_end_unless_told_and_looks_at_that_once(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    topic = make_topic(protomq_server, "options-start", 1)
    fill(protomq_producer, topic, 50)
    assert rows_of(run(count_stream(spark, protomq_server, tmp_path, subscribe=topic))) == []
    fill(protomq_producer, topic, 7, first=50)
    again = count_stream(
        spark, protomq_server, tmp_path, subscribe=topic, startingOffsets="earliest"
    )
    assert rows_of(run(again)) == [7]


# -- each option, in a batch query and in a stream ----------------------------------------------------------------------------

TUNING = {
    "minPartitions": "7", "maxRecordsPerPartition": "20", "failOnDataLoss": "false", "checkCrc": "false",
    "corruptRecords": "skip", "protomq.transport": "grpc", "protomq.timeoutMs": "9000", "protomq.pullSizeMaxBytes": "500",
    "protomq.pullCountMax": "7", "protomq.group.id": "tuned", "groupIdPrefix": "unused", "protomq.namesrv": "",
}  # fmt: skip
ALIASES = {
    "nameServer": "", "topic": "options-timed", "group": "aliased", "subExpression": "A",
    "pullBatchSize": "9", "pullTimeout": "9000",
}  # fmt: skip
SUBSCRIBED = {"subscribe": "options-timed"}
EVEN = [n for n in range(130) if n % 2 == 0]
EVERY = [
    (SUBSCRIBED | TUNING, range(130)),
    ({"subscribePattern": "options-tim.*", "maxPartitions": "1"}, range(130)),
    (ALIASES, EVEN),
    (SUBSCRIBED | {"tags": "A,C", "columns": "body,tags,headers", "includeHeaders": "true"}, EVEN),
    (SUBSCRIBED | {"startingOffsets": '{"options-timed": {"0": 20, "1": -2}}'}, range(20, 130)),
    (SUBSCRIBED | {"startingTimestamp": "BETWEEN", "startingOffsetsByTimestampStrategy": "latest"}, range(100, 130)),
    ({"assign": '{"options-timed": [0]}', "startingOffsetsByTimestamp": '{"options-timed": {"0": BETWEEN}}'}, range(100, 130)),
]  # fmt: skip
BATCH_ONLY = {"endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"}
STREAM_ONLY = {"maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"}


def test_every_option_of_the_table_is_tried() -> None:
    text = (ROOT / "docs/spark.md").read_text()
    table = text.partition("### Options of the source")[2].partition("### Streams")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    assert named == {name for options, _ in EVERY for name in options} | BATCH_ONLY | STREAM_ONLY


@pytest.mark.parametrize(("options", "ids"), EVERY)
def test_each_option_has_its_effect_in_a_batch_query_and_in_a_stream(
    spark: SparkSession,
    protomq_server: Broker,
    timed: tuple[str, int],
    tmp_path: Path,
    options: dict[str, str],
    ids: Iterable[int],
) -> None:
    namesrv = dict.fromkeys(("protomq.namesrv", "nameServer"), protomq_server.namesrv)
    given = {name: text.replace("BETWEEN", str(timed[1])) for name, text in options.items()}
    given |= {name: namesrv[name] for name in namesrv if name in given}
    if "nameServer" not in given:
        given |= {"protomq.namesrv": protomq_server.namesrv}
    batch = spark.read.format("protomq").options(**given).load()
    if not any(name.startswith("starting") for name in given):
        given |= {"startingOffsets": "earliest"}
    stream = spark.readStream.format("protomq").options(**given).load()
    writer = stream.writeStream.format("memory").queryName("each_option")
    run(writer.option("checkpointLocation", str(tmp_path)))
    for frame in (batch, spark.table("each_option")):
        assert sorted(int(row.body) for row in frame.collect()) == sorted(ids)
        if "columns" in options:
            assert frame.columns == options["columns"].split(",")


# -- what others see -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["prefix", "id"])
def test_lag_tools_see_how_far_a_stream_is(
    spark: SparkSession,
    protomq_server: Broker,
    protomq_producer: Producer,
    tmp_path: Path,
    named: str,
) -> None:
    topic = make_topic(protomq_server, f"options-group-{named}", 2)
    fill(protomq_producer, topic, 200)
    given = {"prefix": {"groupIdPrefix": "night-job"}, "id": {"protomq.group.id": "the-job"}}[named]
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "100"}
    progress = run(count_stream(spark, protomq_server, tmp_path, **given, **options))
    group = "the-job" if named == "id" else f"night-job-{query_name(progress)}"
    assert committed(protomq_server, topic, group) == end_offsets(protomq_server, topic)


def query_name(progress: list[dict[str, Any]]) -> str:
    """What the query remembers in its checkpoint."""
    return str(offset_in(progress[-1], "endOffset")["@protomq"]["query"])


def committed(server: Broker, topic: str, group: str) -> dict[MessageQueue, int]:
    with PullConsumer(group, namesrv=server.namesrv) as consumer:
        return {queue: consumer.committed(queue) or 0 for queue in consumer.queues(topic)}


def test_each_query_has_a_group_of_its_own_and_keeps_it_when_it_starts_again(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    topic = make_topic(protomq_server, "options-two-queries", 1)
    given = {"subscribe": topic, "startingOffsets": "earliest"}
    groups: dict[str, list[str]] = {"fast": [], "slow": []}
    for round_ in range(2):
        fill(protomq_producer, topic, 100, first=100 * round_)
        for name in ("slow", "fast")[round_:]:
            stream = count_stream(spark, protomq_server, tmp_path / name, **given)
            groups[name].append(f"spark-protomq-source-{query_name(run(stream))}")
    fast, slow = groups["fast"], groups["slow"]
    assert len(set(fast)) == 1
    assert slow[0] != fast[0]
    (queue,) = end_offsets(protomq_server, topic)
    assert committed(protomq_server, topic, fast[0]) == {queue: 200}
    assert committed(protomq_server, topic, slow[0]) == {queue: 100}


def test_progress_reports_the_newest_offsets_beside_those_that_were_read(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    topic = make_topic(protomq_server, "options-progress", 1)
    fill(protomq_producer, topic, 300)
    given = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "100"}
    progress = run(count_stream(spark, protomq_server, tmp_path, **given))
    places = [
        (place(batch, "endOffset", topic), place(batch, "latestOffset", topic))
        for batch in progress
        if batch["numInputRows"]
    ]
    assert places == [(100, 300), (200, 300), (300, 300)]


# -- mistakes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"subscribe": "a", "subscribePattern": "a"}, "'subscribe' and 'subscribePattern'|not subscribe and subscribePattern"),
        ({"subscribe": "a", "nonsense": "1"}, "no option 'nonsense'"),
        ({"subscribe": "a", "startingOffsets": "latest"}, "'startingOffsets' cannot be latest"),
        ({"subscribe": "a", "endingOffsets": "earliest"}, "'endingOffsets' cannot be earliest"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": "5"}, "'maxOffsetsPerTrigger' is for a stream"),
        ({"subscribe": "a", "failOnDataLoss": "perhaps"}, "'failOnDataLoss' must be"),
        ({"subscribe": "a", "minPartitions": "0"}, "'minPartitions' must be 1 to"),
        ({"subscribe": "a", "topic": "a"}, "'(subscribe|topic)' and '(subscribe|topic)' mean the same"),
        ({"assign": '{"options-timed": [7]}'}, "'assign': topic 'options-timed' has no queue '7'"),
        ({"subscribe": "options-timed", "startingOffsets": '{"options-timed": {"0": 1}}'}, "'startingOffsets' leaves out 1 queues"),
        ({"subscribe": "options-timed", "endingOffsets": '{"options-timed": {"0": 999, "1": 1}}'}, "'endingOffsets': 999 is beyond"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("timed")
def test_a_mistake_in_a_batch_query_is_named(
    spark: SparkSession, protomq_server: Broker, options: dict[str, str], named: str
) -> None:
    reader = spark.read.format("protomq").option("protomq.namesrv", protomq_server.namesrv)
    with pytest.raises(Exception, match=f"(?i){named}"):
        reader.options(**options).load().count()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"endingOffsets": "latest"}, "'endingOffsets' is for a batch"),
        ({"maxTriggerDelay": "5m"}, "'maxTriggerDelay' has a meaning with 'minOffsetsPerTrigger' only"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"}, "'minOffsetsPerTrigger' is above"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_stream_is_named(
    spark: SparkSession, protomq_server: Broker, tmp_path: Path, options: dict[str, str], named: str
) -> None:
    with pytest.raises(Exception, match=named):
        run(count_stream(spark, protomq_server, tmp_path, subscribe="a", **options))


@pytest.mark.parametrize("switch", ["false", "true"])
def test_a_filter_gives_the_same_rows_with_sparks_push_down_off_and_on(
    spark: SparkSession, read: Callable[..., DataFrame], timed: tuple[str, int], switch: str
) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", switch)
    try:
        found = read(timed[0]).where("queue_id = 1 AND queue_offset < 10").collect()
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    assert bodies(found) == once(50, 60)


def test_names_of_rocketmqs_connector_work(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer
) -> None:
    topic = make_topic(protomq_server, "options-aliases", 1)
    fill(protomq_producer, topic, 30)
    given = {"nameServer": protomq_server.namesrv, "topic": topic, "subExpression": "A || B"}
    frame = spark.read.format("protomq").options(group="g", pullBatchSize="7", **given).load()
    assert frame.count() == 20
    numbers(spark, 3, 1).write.format("protomq").options(
        nameServer=protomq_server.namesrv, topic=topic
    ).mode("append").save()
    assert len(drain(protomq_server, topic)) == 33
