"""The pipeline for dead letters with a real Spark and a real broker: what it counts, what it replays, and that it replays once."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from pyspark.sql import SparkSession

from protomq import Admin, Message, Producer, PullConsumer
from protomq.errors import TopicNotFoundError
from protomq.testing import Broker
from protomq_spark.pipelines import dlq
from protomq_spark.pipelines.__main__ import make_parser
from protomq_spark.pipelines.report import RunReport
from tests.support.pictures import assert_is_png
from tests.support.spark import ROOT, SPARK_MARKS, batch_frame, run
from tests.support.topics import drain, make_topic, stored_count
from tests.support.waiting import wait_for

pytestmark = SPARK_MARKS

Pipeline = Callable[..., RunReport]
COUNT = 12


@pytest.fixture
def pipeline(spark: SparkSession, protomq_server: Broker) -> Pipeline:
    """pipeline("report", "--group", ...): runs it as its command would, in the tests' session."""

    def go(*arguments: str) -> RunReport:
        command = ["dlq", arguments[0], "--namesrv", protomq_server.namesrv, *arguments[1:]]
        parsed = make_parser().parse_args(command)
        report = RunReport("dlq", vars(parsed))
        try:
            dlq.run(spark if dlq.needs_spark(parsed) else None, parsed, report)
        finally:
            if parsed.report:
                report.write(parsed.report)
        return report

    return go


def kill_messages(
    server: Broker, topic: str, group: str, error: Callable[[Message], str], count: int = COUNT, *, unread: int = 0
) -> None:
    """Sends the ids 0 to `count` - 1 to a topic; the group gives all of them back as dead letters, and those `unread` before."""
    with Producer(namesrv=server.namesrv) as producer, PullConsumer(group, namesrv=server.namesrv) as consumer:
        consumer.subscribe(topic)
        producer.send_batch(topic, [b"%d" % number for number in range(count)])
        left = unread + count
        while left > 0:
            by_error: dict[str, list[Message]] = {}
            for message in consumer.poll(30):
                by_error.setdefault(error(message), []).append(message)
            for text, messages in by_error.items():
                consumer.send_back(messages, error=text, dead_letter=True)
                left -= len(messages)
        consumer.commit()
        # The broker answers before the name server knows a topic that it has just made.
        wait_for(lambda: _has_route(consumer, f"%DLQ%{group}"), 30)


def _has_route(consumer: PullConsumer, topic: str) -> bool:
    try:
        return bool(consumer.queues(topic))
    except TopicNotFoundError:
        return False


def of_parity(message: Message) -> str:
    return f"Timeout after {int(message.body)} s" if int(message.body) % 2 else "no account"


def times(server: Broker, topic: str) -> Counter[bytes]:
    """How often each body stands in a topic."""
    return Counter(message.body for message in drain(server, topic))


def test_dead_letters_are_counted_by_group_topic_error_and_time(
    pipeline: Pipeline, protomq_server: Broker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, other = (make_topic(protomq_server, name, 2) for name in ("dlq-orders", "dlq-bills"))
    kill_messages(protomq_server, one, "counted", of_parity)
    kill_messages(protomq_server, other, "counted", of_parity)
    kill_messages(protomq_server, one, "others", lambda _: "", unread=COUNT)
    report = pipeline("report", "--group", "counted,others,none", "--merge-numbers", "--report", str(tmp_path))
    result = report.result
    counts = [(row["group"], row["stored"], row["replayed"], row["selected"]) for row in result["groups"]]
    assert counts == [("counted", 2 * COUNT, 0, 2 * COUNT), ("others", 2 * COUNT, 0, 2 * COUNT)]
    assert [(row["group"], row["origin_topic"], row["dead_letters"]) for row in result["topics"]] == [
        ("counted", other, COUNT), ("counted", one, COUNT), ("others", one, 2 * COUNT),
    ]  # fmt: skip
    errors = {(row["group"], row["origin_topic"], row["error"], row["attempts"]): row["dead_letters"] for row in result["errors"]}
    assert errors == {
        ("counted", one, "Timeout after # s", 1): COUNT // 2, ("counted", one, "no account", 1): COUNT // 2,
        ("counted", other, "Timeout after # s", 1): COUNT // 2, ("counted", other, "no account", 1): COUNT // 2,
        ("others", one, "", 1): 2 * COUNT,
    }  # fmt: skip
    assert sum(row["dead_letters"] for row in result["history"]) == 4 * COUNT
    newest = result["errors"][0]["newest_id"]
    assert newest in {letter.message_id for letter in drain(protomq_server, "%DLQ%others")}
    printed, said = capfd.readouterr()
    assert "Timeout after # s" in printed
    assert "group none has no dead letters" in said
    assert json.loads((tmp_path / "report.json").read_text())["result"] == result
    assert_is_png(tmp_path / "report.png")

    # Each text for itself, and only what Spark finds.
    chosen = pipeline("report", "--group", "counted", "--where", f"origin_topic = '{one}' AND body LIKE '1%'")
    assert {row["error"] for row in chosen.result["errors"]} == {"no account", "Timeout after 1 s", "Timeout after 11 s"}
    assert chosen.result["groups"][0]["selected"] == 3  # 1, 10, 11


def test_what_spark_selects_is_replayed_once(pipeline: Pipeline, protomq_server: Broker) -> None:
    topic = make_topic(protomq_server, "dlq-selected", 2)
    kill_messages(protomq_server, topic, "selected", of_parity)
    condition = ("--group", "selected", "--where", "last_error LIKE 'Timeout%' AND reconsume_times = 1")
    (row,) = pipeline("replay", *condition).result["groups"]
    assert (row["replayed"], row["known"], row["without_topic"]) == (COUNT // 2, 0, 0)
    (row,) = pipeline("replay", *condition).result["groups"]
    assert (row["replayed"], row["known"]) == (0, COUNT // 2)
    odd = {b"%d" % number: 2 for number in range(1, COUNT, 2)}
    assert times(protomq_server, topic) == {b"%d" % number: 1 for number in range(COUNT)} | odd
    again = [message for message in drain(protomq_server, topic) if message.replayed_group]
    letters = {letter.message_id for letter in drain(protomq_server, "%DLQ%selected") if int(letter.body) % 2}
    assert {message.message_id for message in again} == letters
    (row,) = pipeline("report", "--group", "selected").result["groups"]
    assert (row["stored"], row["replayed"]) == (COUNT, COUNT // 2)


def test_dead_letters_are_replayed_by_time_and_by_id(
    pipeline: Pipeline, protomq_server: Broker, capfd: pytest.CaptureFixture[str]
) -> None:
    topic = make_topic(protomq_server, "dlq-times", 1)
    kill_messages(protomq_server, topic, "timed", of_parity)
    (first, *_, last) = sorted(letter.store_time_ms for letter in drain(protomq_server, "%DLQ%timed"))
    wait_for(lambda: datetime.now(UTC).timestamp() * 1000 > last + 1)
    kill_messages(protomq_server, topic, "timed", of_parity)
    bound = datetime.fromtimestamp((last + 1) / 1000, UTC).isoformat()
    (row,) = pipeline("replay", "--group", "timed", "--since", str(first), "--until", bound).result["groups"]
    assert row["replayed"] == COUNT
    (row,) = pipeline("report", "--group", "timed", "--since", bound).result["groups"]
    assert (row["stored"], row["selected"]) == (2 * COUNT, COUNT)

    letters = sorted(drain(protomq_server, "%DLQ%timed"), key=lambda letter: letter.queue_offset)
    ids = [letters[0].message_id, letters[-1].message_id]
    (row,) = pipeline("replay", "--group", "timed", "--id", ids[0], "--id", ids[1]).result["groups"]
    assert (row["replayed"], row["known"]) == (1, 1)
    with pytest.raises(SystemExit) as ended:
        pipeline("replay", "--group", "timed", "--id", ids[1], "--id", "0" * 40)
    assert ended.value.code == 1
    assert "no dead letter " + "0" * 40 in capfd.readouterr().err
    (row,) = pipeline("replay", "--group", "timed", "--all").result["groups"]
    assert (row["replayed"], row["known"]) == (COUNT - 1, COUNT + 1)
    assert stored_count(protomq_server, topic) == 4 * COUNT


def test_a_replay_whose_driver_was_killed_goes_on_and_stores_nothing_twice(
    pipeline: Pipeline, protomq_server: Broker
) -> None:
    topic, count = make_topic(protomq_server, "dlq-killed", 2), 4_000
    kill_messages(protomq_server, topic, "killed", lambda _: "no", count)
    command = [sys.executable, "-m", "protomq_spark.pipelines", "dlq", "replay", "--namesrv", protomq_server.namesrv]
    with subprocess.Popen([*command, "--group", "killed", "--all"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as driver:
        assert driver.stderr is not None
        assert driver.stderr.readline().startswith(b"batch 0: ")
        driver.kill()
    (row,) = pipeline("replay", "--group", "killed", "--all").result["groups"]
    assert row["known"] > 0
    assert row["replayed"] + row["known"] == count
    assert times(protomq_server, topic) == {b"%d" % number: 2 for number in range(count)}


def test_attempts_and_origin_are_columns_of_batches_and_streams(
    spark: SparkSession, protomq_server: Broker, tmp_path: Path
) -> None:
    topic = make_topic(protomq_server, "dlq-columns", 2)
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.set_group("columns", retry_count_max=2, retry_delays_ms=[1])
    with Producer(namesrv=protomq_server.namesrv) as producer, PullConsumer("columns", namesrv=protomq_server.namesrv) as consumer:
        sent = producer.send(topic, b"x", key="k")
        consumer.subscribe(topic)
        consumer.subscribe_retries()
        for number in range(3):
            (message,) = consumer.poll(30)
            consumer.send_back(message, error=f"no {number}")
    names = "reconsume_times,last_error,origin_topic,origin_queue_id,origin_queue_offset,message_id"
    columns = {"columns": names}
    origin = (topic, sent.queue.queue_id, sent.queue_offset, sent.message_id)
    for name, expected in (
        (topic, [(0, None, None, None, None, sent.message_id)]),
        ("%RETRY%columns", [(1, "no 0", *origin), (2, "no 1", *origin)]),
        ("%DLQ%columns", [(3, "no 2", *origin)]),
    ):
        rows = batch_frame(spark, protomq_server, subscribe=name, **columns).orderBy("reconsume_times").collect()
        assert [tuple(row) for row in rows] == expected
    # The same in a stream, which carries the attempts on as a property.
    target = make_topic(protomq_server, "dlq-columns-copy", 1)
    stream = spark.readStream.format("protomq").option("protomq.namesrv", protomq_server.namesrv)
    told = stream.options(subscribe="%DLQ%columns", startingOffsets="earliest", columns="reconsume_times,origin_topic").load()
    writer = (
        told.selectExpr("concat(reconsume_times, ' ', origin_topic) AS body")
        .writeStream.format("protomq").option("protomq.namesrv", protomq_server.namesrv).option("topic", target)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
    )  # fmt: skip
    run(writer)
    assert [message.body for message in drain(protomq_server, target)] == [f"3 {topic}".encode()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("replay", "--all"), "needs --group"),
        (("replay", "--group", "g"), "say which"),
        (("replay", "--group", "g", "--all", "--id", "0"), "say which"),
        (("replay", "--group", "g", "--id", "0", "--since", "5"), "say which"),
        (("report", "--all"), "a report changes nothing"),
        (("report", "--again"), "a report changes nothing"),
        (("report", "--top", "0"), "1 or more"),
        (("report", "--since", "yesterday"), "--since is milliseconds"),
        (("report", "--since", "6", "--until", "1970-01-01T00:00:00"), "not before"),
    ],
)
def test_what_contradicts_itself_is_refused(pipeline: Pipeline, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pipeline(*arguments)


def test_a_condition_that_is_no_sql_is_refused(pipeline: Pipeline, protomq_server: Broker) -> None:
    kill_messages(protomq_server, make_topic(protomq_server, "dlq-where", 1), "where", of_parity, 1)
    for condition in ("no_column = 1", "body LIKE"):
        with pytest.raises(ValueError, match="--where: "):
            pipeline("report", "--group", "where", "--where", condition)


def test_the_commands_of_the_page_work(pipeline: Pipeline, protomq_server: Broker, tmp_path: Path) -> None:
    topic = make_topic(protomq_server, "dlq-shown", 1)
    kill_messages(protomq_server, topic, "billing", of_parity)
    text = (ROOT / "docs" / "spark.md").read_text().partition("\n### dlq\n")[2].partition("\n### ")[0]
    commands = re.findall(r"^    python -m protomq_spark\.pipelines dlq (.*)$", text, re.MULTILINE)
    assert len(commands) == 5
    replayed = []
    for command in commands:
        action, *words = shlex.split(command.replace("/tmp/dlq.report", str(tmp_path)))
        at = words.index("--namesrv")
        assert words[at + 1] == "127.0.0.1:10911"
        report = pipeline(action, *words[:at], *words[at + 2 :])
        replayed.append(sum(row.get("replayed", 0) for row in report.result["groups"] if action == "replay"))
    assert replayed == [0, 0, COUNT // 2, 0, COUNT // 2]
