"""A real standalone cluster and a real Connect server: the executors, and the client, are other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from protomq import OutgoingMessage, Producer
from protomq.testing import Broker
from tests.support.recorded_sink import BUGS
from tests.support.spark import ROOT, SPARK_MARKS
from tests.support.spark_cluster import (
    ConnectServer,
    SparkCluster,
    bare_python,
    environment_of_spark,
    output_of,
    python_of_a_cluster,
)
from tests.support.topics import bodies, drain, make_topic, once

pytestmark = [pytest.mark.timeout(420), pytest.mark.long, *SPARK_MARKS]
PACKAGE = ROOT / "build/spark-package"
COPY_JOB = ROOT / "tests/support/spark_copy_job.py"
SPECULATION_JOB = ROOT / "tests/support/spark_speculation_job.py"
COUNT = 2000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def build(kind: str) -> Path:
    """Once more for each run: what is tested is the tree as it stands."""
    subprocess.run([sys.executable, ROOT / "tools/spark_package.py", kind], check=True)
    return PACKAGE / {"zip": "protomq-spark.zip", "site": "protomq-spark-site.tar.gz"}[kind]


class Copy:
    """The topics of a run of COPY_JOB, its arguments, and what must have come of it."""

    def __init__(self, server: Broker, name: str, folder: Path) -> None:
        self._server = server
        topics = [make_topic(server, f"{name}-{part}", 4) for part in ("source", "copy", "sent")]
        self._topics = topics
        self.arguments = [server.namesrv, *topics, str(COUNT), str(folder / "checkpoint")]

    def check(self, printed: str) -> dict[str, Any]:
        """What it printed beside the ids."""
        seen: dict[str, Any] = json.loads(printed.splitlines()[-1])
        assert seen["ids"] == list(range(COUNT))
        assert seen["sent"] == {"SEND_OK": COUNT}
        for topic in self._topics:
            assert bodies(drain(self._server, topic)) == once(COUNT)
        return seen


@pytest.mark.parametrize("kind", ["zip", "site"])
def test_two_executors_read_and_write_with_nothing_but_the_package(
    cluster: SparkCluster, protomq_server: Broker, tmp_path: Path, kind: str
) -> None:
    package = build(kind)
    if kind == "zip":
        python, driver_path = python_of_a_cluster(tmp_path / "python"), package
        options = ["--py-files", str(package)]
    else:
        python, driver_path = bare_python(tmp_path / "python"), PACKAGE / "site"
        options = [
            "--archives", f"{package}#site", "--conf", "spark.executorEnv.PYTHONPATH=site",
        ]  # fmt: skip
    copy = Copy(protomq_server, f"cluster-{kind}", tmp_path)
    printed = cluster.submit(
        python, COPY_JOB, copy.arguments, *options, python_path=driver_path, timeout_s=240
    )
    seen = copy.check(printed)
    assert len({executor for executor, *_ in seen["places"]}) == 2
    for _, *modules in seen["places"]:
        assert all(str(ROOT / "clients") not in module for module in modules)
        assert all(package.name in module or "/site/" in module for module in modules)


# -- speculation -----------------------------------------------------------------------------------------------------------

STALLS = 0
"""The partition that SPECULATION_JOB makes slow, when 500 of its rows are on their way to the sink."""
STORED_TWICE_MIN = 100
"""So many of these, at least, have left the buffers between Spark's processes by then: the loser has stored them."""
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.0",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.executorEnv.PYTHONPATH": str(ROOT),
}


def ends_of_tasks(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What Spark's event log says of tasks that ran in two attempts: of the first and of the speculative one."""
    ended: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    for path in folder.rglob("*"):
        for line in path.read_text().splitlines() if path.is_file() else ():
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("Event") == "SparkListenerTaskEnd":
                info = event["Task Info"]
                attempts = ended.setdefault((event["Stage ID"], info["Index"]), {})
                attempts[info["Attempt"]] = info | event["Task End Reason"]
    for attempts in ended.values():
        if len(attempts) > 1:
            assert sorted(attempts) == [0, 1]
            yield attempts[0], attempts[1]


@pytest.mark.parametrize("bug", ["", BUGS[0]])
def test_a_speculative_twin_and_the_attempt_that_it_beats_store_each_row_once(
    cluster: SparkCluster, protomq_server: Broker, tmp_path: Path, bug: str
) -> None:
    """With `bug` rows are numbered by attempt: then those that both attempts sent are there twice. So without it they were recognised."""
    names = ("batch", "source", "stream")
    batch, source, stream = (
        make_topic(protomq_server, f"speculation{len(bug)}-{name}", 4) for name in names
    )
    with Producer(namesrv=protomq_server.namesrv) as producer:
        for start in range(0, 2 * COUNT, 250):
            ids = range(start, start + 250)
            producer.send_batch(source, [OutgoingMessage(source, b"%0400d" % n) for n in ids])
    events = tmp_path / "events"
    events.mkdir()
    settings = SPECULATION | {"spark.eventLog.dir": f"file://{events}"}
    arguments = [protomq_server.namesrv, batch, source, stream, str(2 * COUNT), str(tmp_path)]
    cluster.submit(
        Path(sys.executable), SPECULATION_JOB, arguments + ([bug] if bug else []),
        *(word for pair in settings.items() for word in ("--conf", "=".join(pair))),
        python_path=ROOT, timeout_s=240,
    )  # fmt: skip

    raced = list(ends_of_tasks(events))
    assert len(raced) == 2, raced  # One task of the batch write, one of the stream.
    for first, twin in raced:
        assert (first["Speculative"], twin["Speculative"]) == (False, True)
        assert first["Host"] != twin["Host"]
        # Either may win. The other is killed, or comes too late to be committed.
        assert [first["Reason"], twin["Reason"]].count("Success") == 1, raced
    for name, topic in (("batch", batch), ("stream", stream)):
        ended = [json.loads(path.read_text()) for path in (tmp_path / name).glob(f"{STALLS}-*.json")]
        known = sum(attempt["repeated_rows"] for attempt in ended)
        stored = Counter(int(message.body) for message in drain(protomq_server, topic))
        assert set(stored) == set(range(2 * COUNT))
        if bug:
            assert known == 0
            assert [*stored.values()].count(2) >= STORED_TWICE_MIN
        else:
            assert set(stored.values()) == {1}
            assert known >= STORED_TWICE_MIN


# -- Spark Connect ---------------------------------------------------------------------------------------------------------


def test_spark_connect_in_one_process(protomq_server: Broker, tmp_path: Path) -> None:
    copy = Copy(protomq_server, "connect-local", tmp_path)
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_REMOTE": "local[2]"}
    printed = output_of([sys.executable, COPY_JOB, *copy.arguments], tmp_path, environment, 300)
    assert copy.check(printed)["session"] == "pyspark.sql.connect.session"


def test_spark_connect_with_a_server_and_a_client_that_has_no_java(
    protomq_server: Broker, tmp_path: Path
) -> None:
    copy = Copy(protomq_server, "connect", tmp_path)
    with ConnectServer(tmp_path, sys.executable) as server:
        assert server.url.startswith("sc://127.0.0.1:")
        environment = environment_of_spark() | {"PATH": "/nowhere", "SPARK_REMOTE": server.url}
        del environment["SPARK_HOME"]
        environment.pop("JAVA_HOME", None)
        printed = output_of([sys.executable, COPY_JOB, *copy.arguments], tmp_path, environment, 180)
        seen = copy.check(printed)
        assert seen["session"] == "pyspark.sql.connect.session"
