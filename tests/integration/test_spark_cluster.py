"""A real standalone cluster: the executors are other processes, which have what `make spark-package` builds and nothing of the tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from protomq.testing import Broker
from tests.support.spark import ROOT, SPARK_MARKS, bodies, drain, make_topic, once
from tests.support.spark_cluster import SparkCluster, bare_python, python_of_a_cluster

pytestmark = [pytest.mark.timeout(420), pytest.mark.long, *SPARK_MARKS]
PACKAGE = ROOT / "build/spark-package"
JOB = ROOT / "tests/support/spark_cluster_job.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def build(kind: str) -> Path:
    """Once more for each run: what is tested is the tree as it stands."""
    subprocess.run([sys.executable, ROOT / "tools/spark_package.py", kind], check=True)
    return PACKAGE / {"zip": "protomq-spark.zip", "site": "protomq-spark-site.tar.gz"}[kind]


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
    source = make_topic(protomq_server, f"cluster-{kind}", 4)
    target = make_topic(protomq_server, f"cluster-{kind}-copy", 4)
    arguments = [protomq_server.namesrv, source, target, "2000", str(tmp_path / "checkpoint")]
    printed = cluster.submit(
        python, JOB, arguments, *options, python_path=driver_path, timeout_s=120
    )
    seen = json.loads(printed.splitlines()[-1])
    assert seen["ids"] == list(range(2000))
    assert len({executor for executor, *_ in seen["places"]}) == 2
    for _, *modules in seen["places"]:
        assert all(str(ROOT / "clients") not in module for module in modules)
        assert all(package.name in module or "/site/" in module for module in modules)
    assert bodies(drain(protomq_server, target)) == once(2000)


def test_spark_connect_reads_writes_and_streams(protomq_server: Broker, tmp_path: Path) -> None:
    source = make_topic(protomq_server, "connect", 3)
    target = make_topic(protomq_server, "connect-copy", 3)
    job = str(ROOT / "tests/support/spark_connect_job.py")
    arguments = [protomq_server.namesrv, source, target, "500", str(tmp_path / "checkpoint")]
    done = subprocess.run(
        [sys.executable, job, *arguments],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {"session": "pyspark.sql.connect.session", "ids": list(range(500))}
    assert bodies(drain(protomq_server, target)) == once(500)
