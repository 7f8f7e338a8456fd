"""The archive pipeline, with a real Spark and a real broker: every message once in files, whatever is killed when."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

import pyarrow.parquet as pq
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from protomq import Producer, PullConsumer
from protomq.testing import Broker
from protomq_spark.archive_table import ArchiveError, ArchiveTable
from protomq_spark.offsets import DataLossError
from protomq_spark.pipelines import archive
from protomq_spark.pipelines.__main__ import make_parser
from protomq_spark.pipelines.report import RunReport
from tests.support.pictures import assert_is_png
from tests.support.spark import SPARK_MARKS
from tests.support.topics import fill, make_topic

pytestmark = SPARK_MARKS

Run = Callable[..., RunReport]


def given(server: Broker, root: Path, *more: str) -> argparse.Namespace:
    """Arguments as from the command line."""
    arguments = ["archive", "--namesrv", server.namesrv, "--output", str(root), *more]
    return make_parser().parse_args(arguments)


@pytest.fixture
def run(spark: SparkSession, protomq_server: Broker, protomq_topic: str, tmp_path: Path) -> Run:
    """run(*arguments): archives the test's topic to tmp_path/archive."""

    def go(*more: str, table: ArchiveTable | None = None) -> RunReport:
        arguments = given(protomq_server, tmp_path / "archive", "--topic", protomq_topic, *more)
        report = RunReport("archive", vars(arguments))
        archive.run(spark, arguments, report, table)
        return report

    return go


def ids(spark: SparkSession, root: Path) -> Counter[int]:
    """The ids in an archive, as any Spark sees it."""
    return Counter(int(row.body) for row in spark.read.parquet(str(root)).select("body").collect())


def files_on_disk(root: Path) -> set[str]:
    """All data files, listed or not."""
    return {str(path.relative_to(root)) for path in root.rglob("*.parquet")} | {
        str(path.relative_to(root)) for path in root.rglob(".*.tmp")
    }


def test_a_topic_is_partitioned_parquet_and_the_next_run_adds_what_is_new(
    spark: SparkSession,
    run: Run,
    protomq_topic: str,
    protomq_producer: Producer,
    protomq_server: Broker,
    tmp_path: Path,
) -> None:
    root = tmp_path / "archive"
    fill(protomq_producer, protomq_topic, 1000)
    report = run("--batch-size", "400", "--compact-files", "0", "--group", "archiver")
    assert [batch["messages"] for batch in report.batches] == [400, 400, 200]
    assert [batch["lag"] for batch in report.batches] == [600, 200, 0]
    assert report.result["rows"] == 1000
    report.write(str(tmp_path / "report"))
    assert json.loads((tmp_path / "report/report.json").read_text())["result"] == report.result
    assert_is_png(tmp_path / "report/report.png")
    table = spark.read.parquet(str(root))
    assert {"topic", "date", "hour"} <= set(table.columns)
    row = table.where("body = encode('7', 'utf-8')").collect()[0]
    assert (row.key, row.tags, row.properties, row.topic) == ("k7", "B", {"n": "7"}, protomq_topic)
    assert (row.date, row.hour) == (row.timestamp.date(), row.timestamp.hour)
    folders = {path.parent.relative_to(root).as_posix() for path in root.rglob("*.parquet")}
    assert all(folder.startswith(f"topic={protomq_topic}/date=20") for folder in folders)

    assert run().result["rows_stored"] == 0
    fill(protomq_producer, protomq_topic, 500, first=1000)
    assert run().result["rows_stored"] == 500
    assert ids(spark, root) == Counter(range(1500))
    with PullConsumer("archiver", namesrv=protomq_server.namesrv) as consumer:
        queues = consumer.queues(protomq_topic)
        assert sum(consumer.committed(queue) or 0 for queue in queues) == 1000


def test_partitions_columns_and_select_are_the_users(
    spark: SparkSession,
    run: Run,
    protomq_topic: str,
    protomq_producer: Producer,
    tmp_path: Path,
) -> None:
    fill(protomq_producer, protomq_topic, 300)
    run(
        "--partition", "tag=concat(tags, '/', queue_id % 2)", "--columns", "body,tags,queue_id",
        "--select", "cast(body AS STRING) AS text, named_struct('q', queue_id, 't', tags) AS place", "--shuffle",
    )  # fmt: skip
    table = spark.read.parquet(str(tmp_path / "archive"))
    assert dict(table.dtypes) == {
        "text": "string", "place": "struct<q:int,t:string>", "tag": "string",
    }  # fmt: skip
    rows = table.collect()
    assert sorted(int(row.text) for row in rows) == list(range(300))
    assert all(row.tag == f"{row.place.t}/{row.place.q % 2}" for row in rows)
    # Every value is in one task's hands with --shuffle, and so in one file.
    assert len(files_on_disk(tmp_path / "archive")) == len({row.tag for row in rows}) == 6
    with pytest.raises(ArchiveError, match="made with another --partitions and --columns and --select"):
        run()


class Stopped(BaseException):
    """The driver is gone."""


@pytest.mark.parametrize(
    "step",
    [pytest.param("write version", marks=pytest.mark.long), "publish version", "version is published"],
)
def test_a_driver_that_dies_at_any_step_of_a_batch_stores_each_message_once(
    spark: SparkSession,
    run: Run,
    protomq_topic: str,
    protomq_producer: Producer,
    tmp_path: Path,
    step: str,
) -> None:
    root = tmp_path / "archive"
    fill(protomq_producer, protomq_topic, 600)
    seen: list[str] = []

    def stop(name: str) -> None:
        seen.append(name)
        if seen.count(step) == 2:  # In the second batch.
            raise Stopped

    with pytest.raises(Stopped):
        run("--batch-size", "200", "--compact-files", "0", table=ArchiveTable(str(root), stop))
    stored = ids(spark, root)
    assert stored.total() == (400 if step == "version is published" else 200)
    assert set(stored.values()) == {1}
    # More than there was: the batch that is made again has other bounds.
    fill(protomq_producer, protomq_topic, 100, first=600)
    run("--batch-size", "250", "--keep", "0")
    assert ids(spark, root) == Counter(range(700))


@pytest.mark.long
def test_a_killed_archiver_goes_on_where_its_last_version_ends(
    spark: SparkSession,
    run: Run,
    protomq_server: Broker,
    protomq_topic: str,
    protomq_producer: Producer,
    tmp_path: Path,
) -> None:
    root = tmp_path / "archive"
    fill(protomq_producer, protomq_topic, 1000)
    command = [
        sys.executable, "-m", "protomq_spark.pipelines", "archive", "--namesrv", protomq_server.namesrv, "--master", "local[2]",
        "--output", str(root), "--topic", protomq_topic, "--batch-size", "50", "--follow",
    ]  # fmt: skip
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("batch 3:"):
                break
        os.killpg(process.pid, signal.SIGKILL)  # The JVM and its Python workers, too.
    stored = ids(spark, root)
    assert 200 <= stored.total() < 1000
    run("--keep", "0")
    assert ids(spark, root) == Counter(range(1000))
    table = ArchiveTable(str(root))
    assert files_on_disk(root) == {file.path for file in table.newest().files}


def test_messages_that_are_gone_are_an_error_or_passed_over(
    spark: SparkSession, run: Run, protomq_topic: str, protomq_producer: Producer, tmp_path: Path
) -> None:
    fill(protomq_producer, protomq_topic, 100)
    run()
    # As if the topic had been created again, with fewer messages.
    (newest,) = (tmp_path / "archive" / "_spark_metadata").glob("0.compact")
    head, first, *rest = newest.read_text().splitlines()
    entry = json.loads(first)
    positions = entry["archive"]["positions"][protomq_topic]
    for queue in positions:
        positions[queue] += 1000
    newest.write_text("\n".join([head, json.dumps(entry), *rest]))
    with pytest.raises(DataLossError, match="archived"):
        run()
    assert run("--skip-lost").result["rows_stored"] == 0


def test_an_archive_that_begins_at_the_end_remembers_that_end_without_a_file(
    spark: SparkSession, run: Run, protomq_topic: str, protomq_producer: Producer, tmp_path: Path
) -> None:
    root = tmp_path / "archive"
    fill(protomq_producer, protomq_topic, 100)
    assert run("--starting", "latest").result["files"] == 0
    with pytest.raises(AnalysisException):
        spark.read.parquet(str(root))
    fill(protomq_producer, protomq_topic, 20, first=100)
    assert run("--starting", "latest").result["rows"] == 20
    assert ids(spark, root) == Counter(range(100, 120))


# -- compaction --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_files_made_once(
    spark: SparkSession, protomq_server: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """`archive`, of five batches with a file for each queue, and beside it `kept`, the same once more."""
    folder = tmp_path_factory.mktemp("small-files")
    topic = make_topic(protomq_server, "spark-archive-small", 4)
    with Producer(namesrv=protomq_server.namesrv) as producer:
        fill(producer, topic, 1000)
    more = ("--topic", topic, "--batch-size", "200", "--compact-files", "0")
    archive.run(spark, given(protomq_server, folder / "archive", *more), RunReport("archive", {}))
    assert len(files_on_disk(folder / "archive")) >= 20
    shutil.copytree(folder / "archive", folder / "kept")
    return folder


@pytest.fixture
def many_small_files(small_files_made_once: Path) -> Path:
    """The archive as it was made; at its place, which stands in it."""
    root = small_files_made_once / "archive"
    shutil.rmtree(root)
    shutil.copytree(small_files_made_once / "kept", root)
    return root


def test_small_files_become_one_and_readers_see_each_message_once_all_the_while(
    spark: SparkSession, protomq_server: Broker, many_small_files: Path
) -> None:
    def run(*more: str) -> RunReport:
        report = RunReport("archive", {})
        archive.run(spark, given(protomq_server, many_small_files, *more), report)
        return report

    before = spark.read.parquet(str(many_small_files)).select("body")
    over = threading.Event()
    counts: list[int] = []

    def read_on() -> None:
        while not over.is_set():
            counts.append(spark.read.parquet(str(many_small_files)).count())

    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        report = run("--compact-only", "--compact-files", "2")
    finally:
        over.set()
        reader.join()
    assert set(counts) == {1000}
    assert report.result["files_merged"] >= 18
    assert report.result["files"] <= 2  # The hour may have changed.
    assert ids(spark, many_small_files) == Counter(range(1000))
    # A query that was planned before still finds its files, for an hour.
    assert Counter(int(row.body) for row in before.collect()) == Counter(range(1000))
    listed = {file.path for file in ArchiveTable(str(many_small_files)).newest().files}
    assert files_on_disk(many_small_files) > listed
    assert run("--compact-only", "--keep", "0").result["files_removed"] >= 20
    assert files_on_disk(many_small_files) == listed
    (path, *_) = listed
    assert pq.ParquetFile(many_small_files / path).metadata.num_row_groups == 1


def compact_and_die(arguments: argparse.Namespace, step: str) -> None:
    """In a child process: what `archive --compact-only` does, killed at a step."""

    def die(name: str) -> None:
        if name == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def run_all(merge: archive.Merge, jobs: Sequence[archive.Job]) -> list[Any]:
        done = [merge(job) for job in jobs]
        die("files are merged")
        return done

    table = ArchiveTable(arguments.output, die)
    archive.compact_with(run_all, arguments, table)
    table.vacuum(arguments.keep, time.time())


@pytest.mark.parametrize(
    "step",
    [
        "files are merged", "publish version", "remove file",
        *(pytest.param(step, marks=pytest.mark.long) for step in ("write version", "version is published", "remove version")),
    ],
)  # fmt: skip
def test_a_compaction_that_is_killed_leaves_each_message_once_and_is_made_again(
    spark: SparkSession, protomq_server: Broker, many_small_files: Path, step: str
) -> None:
    root = many_small_files
    arguments = given(protomq_server, root, "--compact-only", "--compact-files", "2", "--keep", "0")
    child = multiprocessing.get_context("spawn").Process(
        target=compact_and_die, args=(arguments, step)
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert ids(spark, root) == Counter(range(1000))
    archive.run(spark, arguments, RunReport("archive", {}))
    assert ids(spark, root) == Counter(range(1000))
    listed = {file.path for file in ArchiveTable(str(root)).newest().files}
    assert files_on_disk(root) == listed
    assert len(listed) <= 2


def test_the_files_of_several_topics_are_listed_for_other_readers(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, first in (("spark-archive-a", 0), ("spark-archive-b", 100)):
        fill(protomq_producer, make_topic(protomq_server, name, 2), 100, first=first)
    arguments = given(protomq_server, tmp_path, "--topic-pattern", "spark-archive-[ab]")
    archive.run(spark, arguments, RunReport("archive", {}))
    assert spark.read.parquet(str(tmp_path)).where("topic = 'spark-archive-b'").count() == 100
    capsys.readouterr()
    arguments.list_files = True
    archive.run(None, arguments, RunReport("archive", {}))
    paths = capsys.readouterr().out.split()
    assert {path.split("topic=")[1].split("/")[0] for path in paths} == {"spark-archive-a", "spark-archive-b"}
    assert sum(pq.read_metadata(path).num_rows for path in paths) == 200
    assert (tmp_path / "_manifest").read_text().split() == paths
