"""The pipelines with a real Spark and a real broker: what they store, what a second run adds, and their reports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

import pyspark
from pyspark.sql import SparkSession

from protomq import OutgoingMessage, Producer, PullConsumer
from protomq.testing import Broker
from protomq_spark.pipelines import backfill, flights, lag, reconcile, transform
from protomq_spark.pipelines.__main__ import PIPELINES, make_parser
from protomq_spark.pipelines.report import RunReport
from tests.support.pictures import assert_is_png
from tests.support.spark import SPARK_MARKS, forget_last_commit, program_environment
from tests.support.topics import bodies, drain, fill, make_topic, once

pytestmark = SPARK_MARKS

Pipeline = Callable[..., RunReport]


@pytest.fixture
def run(spark: SparkSession, protomq_server: Broker) -> Pipeline:
    """run(name, *arguments): runs a pipeline as its command would, in the tests' session."""

    def go(name: str, *arguments: str) -> RunReport:
        parsed = make_parser().parse_args([name, "--namesrv", protomq_server.namesrv, *arguments])
        report = RunReport(name, vars(parsed))
        try:
            PIPELINES[name].run(spark, parsed, report)
        finally:
            if parsed.report:
                report.write(parsed.report)
        return report

    return go


# -- flights -----------------------------------------------------------------------------------------------------------------


def flight(n: int, day: int, carrier: str, origin: str, delay: int | None) -> bytes:
    row = {
        "dep_time": None if delay is None else 600, "dep_delay": delay, "arr_delay": delay, "carrier": carrier,
        "tailnum": f"N{n % 3}", "origin": origin, "dest": "BOS", "time_hour": f"2013-01-{day:02}T10:00:00Z",
    }  # fmt: skip
    return json.dumps(row).encode()


def test_the_flights_pipeline_sums_up_each_finished_day_once(
    spark: SparkSession,
    run: Pipeline,
    protomq_server: Broker,
    protomq_topic: str,
    protomq_producer: Producer,
    tmp_path: Path,
) -> None:
    (tmp_path / "airlines.csv").write_text("carrier,name\nUA,United\nAA,American\n")
    (tmp_path / "airports.csv").write_text("faa,name\nJFK,Kennedy\nEWR,Newark\n")
    (tmp_path / "planes.csv").write_text("tailnum,seats\nN0,100\nN1,200\nN2,NA\n")
    (tmp_path / "weather.csv").write_text(
        "origin,time_hour,wind_speed,precip\nJFK,2013-01-01T10:00:00Z,10.5,0.1\nJFK,2013-01-02T10:00:00Z,NA,0\n"
    )
    sent: dict[tuple[int, str, str], list[tuple[int, int | None]]] = {}
    for day in range(1, 11):
        messages = []
        for n in range(30):
            carrier, origin = ("UA", "AA")[n % 2], ("JFK", "EWR")[n % 3 == 0]
            delay = None if n == 7 else n
            sent.setdefault((day, carrier, origin), []).append((n, delay))
            body = flight(n, day, carrier, origin, delay)
            messages.append(OutgoingMessage(protomq_topic, body, sharding_key=f"N{n}"))
        protomq_producer.send_batch(protomq_topic, messages)
    output = make_topic(protomq_server, "spark-flight-delays", 2)
    table = tmp_path / "table"
    arguments = [
        "--topic", protomq_topic, "--data", str(tmp_path), "--table", str(table), "--checkpoint", str(tmp_path / "checkpoint"),
        "--output-topic", output, "--watermark", "2 days", "--batch-size", "60", "--report", str(tmp_path / "report"),
    ]  # fmt: skip
    report = run("flights", *arguments)
    assert report.result["flights"] == 300
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert written["result"]["flights"] == 300
    assert_is_png(tmp_path / "report" / "report.png")
    forget_last_commit(tmp_path / "checkpoint")
    run("flights", *arguments)

    rows = {
        (row.window_start.day, row.carrier, row.origin): row
        for row in spark.read.parquet(str(table)).collect()
    }
    days = {day for day, _, _ in rows}
    assert days == set(range(1, max(days) + 1))
    assert max(days) >= 7
    # Each plane has its queue, all are read at the same pace: none falls behind by two days.
    assert report.result["sums_dropped_as_too_late"] == 0
    for place, delays in sent.items():
        if place[0] in days:
            row, known = rows[place], [delay for _, delay in delays if delay is not None]
            assert (row.flights, row.cancelled) == (len(delays), len(delays) - len(known))
            assert row.departure_delay_min == pytest.approx(sum(known) / len(known), abs=0.01)
            assert row.seats == sum((100, 200, 0)[n % 3] for n, _ in delays)
    first = rows[1, "UA", "JFK"]
    assert (first.airline, first.airport) == ("United", "Kennedy")
    assert (first.wind_speed_mph, first.rain_inch) == (10.5, 0.1)
    results = [json.loads(message.body) for message in drain(protomq_server, output)]
    assert len(results) == len(rows)
    assert {(m["window_start"], m["carrier"], m["origin"]) for m in results} == {
        (row.window_start.strftime("%Y-%m-%dT%H:%M:%S.000Z"), row.carrier, row.origin)
        for row in rows.values()
    }


def test_the_flights_table_that_is_updated_has_the_last_row_of_each_window(
    spark: SparkSession,
    run: Pipeline,
    protomq_topic: str,
    protomq_producer: Producer,
    tmp_path: Path,
) -> None:
    for name, head in {
        "airlines": "carrier,name", "airports": "faa,name", "planes": "tailnum,seats", "weather": "origin,time_hour,wind_speed,precip",
    }.items():  # fmt: skip
        (tmp_path / f"{name}.csv").write_text(head + "\n")
    for n in range(90):
        protomq_producer.send(protomq_topic, flight(n, 1 + n % 3, "UA", "JFK", n), key=f"N{n}")
    run(
        "flights", "--topic", protomq_topic, "--data", str(tmp_path), "--table", str(tmp_path / "table"),
        "--checkpoint", str(tmp_path / "checkpoint"), "--mode", "update", "--batch-size", "30",
    )  # fmt: skip
    table = spark.read.parquet(str(tmp_path / "table"))
    assert table.count() > 3
    newest = flights.latest(table).collect()
    assert {row.window_start.day: row.flights for row in newest} == {1: 30, 2: 30, 3: 30}


# -- backfill, transform, reconcile ------------------------------------------------------------------------------------------


def test_a_back_fill_that_is_run_again_sends_nothing_twice(
    run: Pipeline, protomq_server: Broker, protomq_topic: str, tmp_path: Path
) -> None:
    (tmp_path / "table.csv").write_text("id;name\n" + "".join(f"{n};name{n}\n" for n in range(400)))
    arguments = [
        "--topic", protomq_topic, "--format", "csv", "--option", "sep=;", "--body", "id", "--key", "name", "--tags", "'T'",
        "--properties", "map('name', name, 'a', 'b')", "--write-id", "table-1", "--partitions", "3",
    ]  # fmt: skip
    assert run("backfill", "--input", str(tmp_path / "table.csv"), *arguments).result["rows"] == 400
    # The same rows, read in another number of pieces.
    (tmp_path / "table").mkdir()
    lines = (tmp_path / "table.csv").read_text().splitlines(keepends=True)
    for part in range(2):
        text = "".join([lines[0], *lines[1 + part :: 2]])
        (tmp_path / "table" / f"{part}.csv").write_text(text)
    run("backfill", "--input", str(tmp_path / "table"), *arguments)
    messages = drain(protomq_server, protomq_topic)
    assert bodies(messages) == once(400)
    assert {message.key for message in messages} == {f"name{n}" for n in range(400)}
    assert all(message.properties == {"name": message.key, "a": "b"} for message in messages)


def test_a_back_fill_from_parquet_takes_bytes_as_they_are(
    spark: SparkSession,
    run: Pipeline,
    protomq_server: Broker,
    protomq_topic: str,
    tmp_path: Path,
) -> None:
    rows = spark.range(100).selectExpr("id", "unhex(hex(id + 65280)) AS raw")
    rows.write.parquet(str(tmp_path / "rows"))
    run(
        "backfill", "--topic", protomq_topic, "--input", str(tmp_path / "rows"), "--body", "raw",
        "--where", "id < 50", "--sharding-key", "id % 2", "--write-id", "raw", "--report", str(tmp_path / "report"),
    )  # fmt: skip
    messages = drain(protomq_server, protomq_topic)
    assert sorted(int.from_bytes(message.body) for message in messages) == [
        0xFF00 + n for n in range(50)
    ]
    assert len({message.queue_id for message in messages}) <= 2
    assert_is_png(tmp_path / "report" / "report.png")


def test_a_transformation_goes_through_a_function_of_the_users_once(
    run: Pipeline,
    protomq_server: Broker,
    protomq_topic: str,
    protomq_producer: Producer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(protomq_producer, protomq_topic, 500)
    (tmp_path / "my_functions.py").write_text(
        "def keep(messages):\n"
        "    return messages.where('length(body) > 1').select('body', 'key', 'tags')\n"
        "def count(messages):\n"
        "    return messages.groupBy('tags').count().selectExpr('tags AS key', 'string(count) AS body')\n"
    )
    monkeypatch.chdir(tmp_path)
    target = make_topic(protomq_server, f"{protomq_topic}-out", 2)
    arguments = [
        "--topic", protomq_topic, "--output-topic", target, "--function", "my_functions:keep", "--checkpoint", str(tmp_path / "checkpoint"),
        "--batch-size", "200",
    ]  # fmt: skip
    report = run("transform", *arguments, "--report", str(tmp_path / "report"))
    assert_is_png(tmp_path / "report" / "report.png")
    assert [batch["messages"] for batch in report.batches] == [200, 200, 100]
    assert "batch 2: messages 100" in capsys.readouterr().err
    forget_last_commit(tmp_path / "checkpoint")
    fill(protomq_producer, protomq_topic, 100, first=500)
    run("transform", *arguments)
    messages = drain(protomq_server, target)
    assert bodies(messages) == once(10, 600)
    assert all(message.key == f"k{message.body.decode()}" for message in messages)
    with pytest.raises(ValueError, match="no function other"):
        run("transform", *[word.replace(":keep", ":other") for word in arguments])
    counts = make_topic(protomq_server, f"{protomq_topic}-counts", 2)
    run(
        "transform", "--topic", target, "--output-topic", counts, "--function", "my_functions:count", "--shuffled",
        "--checkpoint", str(tmp_path / "counts"),
    )  # fmt: skip
    found = {message.key: int(message.body) for message in drain(protomq_server, counts)}
    assert found == Counter(message.tag for message in messages)


def test_topics_with_the_same_content_are_equal_and_every_difference_is_named(
    run: Pipeline, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    one = make_topic(protomq_server, "spark-compare-1", 2)
    other = make_topic(protomq_server, "spark-compare-2", 2)
    fill(protomq_producer, one, 300)
    fill(protomq_producer, other, 300)
    arguments = ["--topic", one, "--other-topic", other, "--buckets", "8", "--report", str(tmp_path)]
    report = run("reconcile", "--by", "content", *arguments)
    assert (report.result["messages"], report.result["differing"]) == (300, [])
    assert report.result["compared"] == 8
    assert_is_png(tmp_path / "report.png")
    # A key without a tag and a tag without a key are not the same.
    protomq_producer.send(one, b"x", key="a")
    protomq_producer.send(other, b"x", tag="a")
    with pytest.raises(SystemExit):
        run("reconcile", "--by", "content", *arguments)
    written = json.loads((tmp_path / "report.json").read_text())
    assert 1 <= len(written["result"]["differing"]) <= 2


def test_queues_are_compared_range_by_range_of_two_clusters(
    run: Pipeline, protomq_server: Broker, protomq_producer: Producer
) -> None:
    topic = make_topic(protomq_server, "spark-mirror", 1)
    with Broker(environment={"PROTOMQ_BROKER_NAME": "elsewhere"}) as copy, Producer(namesrv=copy.namesrv) as producer:
        make_topic(copy, topic, 1)
        fill(protomq_producer, topic, 1000)
        fill(producer, topic, 1000)
        arguments = ["--topic", topic, "--other-namesrv", copy.namesrv, "--range", "250"]
        report = run("reconcile", *arguments)
        assert (report.result["compared"], report.result["differing"]) == (4, [])
        protomq_producer.send(topic, b"1000")
        producer.send(topic, b"another")
        report = RunReport("reconcile", {})
        parsed = make_parser().parse_args(
            ["reconcile", "--namesrv", protomq_server.namesrv, *arguments]
        )
        with pytest.raises(SystemExit):
            reconcile.run(SparkSession.active(), parsed, report)
    (differing,) = report.result["differing"]
    assert (differing["queue_id"], differing["first_offset"]) == (0, 1000)
    assert (differing["count"], differing["other_count"]) == (1, 1)


# -- lag ---------------------------------------------------------------------------------------------------------------------


def test_lag_rates_and_history_of_a_cluster(
    run: Pipeline,
    protomq_server: Broker,
    protomq_producer: Producer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    topic = make_topic(protomq_server, "spark-lagging", 2)
    fill(protomq_producer, topic, 1000)
    queues: Any = None
    with PullConsumer("lagging", namesrv=protomq_server.namesrv, auto_commit=False) as consumer:
        queues = consumer.queues(topic)
        consumer.commit(dict.fromkeys(queues, 100))

        def pause(at_s: float) -> float:
            """Between the samples 400 messages come and the group reads 300 of each queue."""
            fill(protomq_producer, topic, 400, first=1000)
            consumer.commit(dict.fromkeys(queues, 400))
            return at_s

        times_s = iter([0.0, 10.0])
        monkeypatch.setattr(lag, "wait_until", pause)
        monkeypatch.setattr(lag, "now_s", lambda: next(times_s))
        report = run(
            "lag", "--topic", topic, "--group", "lagging, never", "--interval", "10", "--history", "5", "--queues",
            "--report", str(tmp_path),
        )  # fmt: skip
    result = report.result
    (row,) = result["topics"]
    assert (row["queues"], row["stored"], row["in_per_s"]) == (2, 1400, 40.0)
    (lagging,) = result["groups"]
    assert (lagging["group"], lagging["lag"], lagging["read_per_s"]) == ("lagging", 600, 60.0)
    assert (lagging["catch_up_s"], lagging["state"]) == (30.0, "catching up")
    assert 0 <= lagging["oldest_unread_s"] < 600
    assert sum(point["messages"] for point in result["history"]) == 1400
    assert sum(point["size_bytes"] for point in result["history"]) == sum(
        len(str(n)) for n in range(1400)
    )
    printed, said = capsys.readouterr()
    assert "catching up" in printed
    assert len([line for line in printed.splitlines() if line.startswith("lagging ")]) == 3
    assert "group never has committed no offsets there" in said
    written = json.loads((tmp_path / "report.json").read_text())
    assert [chart["title"] for chart in written["charts"]][:2] == ["lag of each queue", "throughput"]
    assert_is_png(tmp_path / "report.png")

    # Without --group: all that have committed, each in its topics.
    monkeypatch.undo()
    groups = run("lag", "--topic", topic, "--samples", "1").result["groups"]
    assert [(row["group"], row["lag"]) for row in groups] == [("lagging", 600)]
    other = make_topic(protomq_server, "spark-not-lagging", 1)
    fill(protomq_producer, other, 10)
    both = run("lag", "--topic", f"{topic},{other}", "--samples", "1").result["groups"]
    assert [(row["group"], row["topic"]) for row in both] == [("lagging", topic)]
    everywhere = run("lag", "--samples", "1").result["groups"]
    assert ("lagging", topic, 600) in {(row["group"], row["topic"], row["lag"]) for row in everywhere}


# -- commands ----------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_spark_submit_runs_a_pipeline(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, tmp_path: Path
) -> None:
    fill(protomq_producer, protomq_topic, 100)
    file = subprocess.run(
        [sys.executable, "-m", "protomq_spark.pipelines", "--file"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    done = subprocess.run(
        [
            str(submit), "--master", "local[2]", "--conf", "spark.ui.enabled=false", file,
            "archive", "--namesrv", protomq_server.namesrv, "--topic", protomq_topic, "--output", str(tmp_path / "archive"),
        ],
        capture_output=True, text=True, timeout=350, check=False,
        env=program_environment(tmp_path / "conf"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # spark-submit sends what the application writes to stderr to its own stdout.
    assert "version 0: 100 rows in" in done.stdout


def test_a_mistake_is_one_line(protomq_server: Broker, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "protomq_spark.pipelines", "lag", "--namesrv", protomq_server.namesrv,
            "--topic", "no-such-topic", "--report", str(tmp_path),
        ],
        capture_output=True, text=True, timeout=180, check=False, env=program_environment(tmp_path / "conf"),
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("lag: ")
    assert "no-such-topic" in done.stderr.splitlines()[0]
    assert "no-such-topic" in json.loads((tmp_path / "report.json").read_text())["error"]


def test_the_other_modules_are_all_commands() -> None:
    assert set(PIPELINES.values()) >= {backfill, flights, lag, reconcile, transform}
