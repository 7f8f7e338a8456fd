"""What the tests with a real Spark share: the session, and queries run to their end.

Importing this skips the test module where there is no JDK or no pyspark: `make test` brings both, so there nothing is skipped.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
    pytest.skip("Spark needs a JDK 17 or newer: make spark says how", allow_module_level=True)
pytest.importorskip("pyspark", reason="pyspark is not installed: make spark", exc_type=ImportError)

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col

from tests.support.faulty_spark import Fault
from tests.support.topics import Reachable
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]

SPARK_MARKS = [
    pytest.mark.slow,
    # Spark's own warnings (versions of pandas, sockets that py4j closes late) are not ours to fail for.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.timeout(400),
]

CONFIGURATION = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    # Most of the time of so short a run would be the compilers', and the verifier's: Spark's classes are as they were published.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions"
    " -XX:-BytecodeVerificationRemote -Djdk.lang.Process.launchMechanism=VFORK",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    # The checkpoint of each micro-batch costs a dozen processes, readlink and chmod, unless it is written this way; and no second file
    # beside each, with a checksum of Spark's.
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing"
    ".FileSystemBasedCheckpointFileManager",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}


def program_environment(folder: Path) -> dict[str, str]:
    """For a Spark program that is run as it stands: what it does not say itself is as in CONFIGURATION. `folder` is made for that."""
    folder.mkdir()
    lines = [f"{name} {value}" for name, value in CONFIGURATION.items()]
    (folder / "spark-defaults.conf").write_text("\n".join(lines))
    return {**os.environ, "SPARK_CONF_DIR": str(folder), "PYSPARK_PYTHON": sys.executable}


@contextmanager
def spark_session(
    warehouse: Path, master: str = "local[2,3]", python: str = sys.executable, **more: str
) -> Iterator[SparkSession]:
    """A session of this process. local[2,3]: two cores, three attempts for a task. The JVM outlives it, for the next one.

    `python`: what Spark starts as its workers.
    """
    builder = SparkSession.builder.master(master).appName("protomq-tests")
    for name, value in (CONFIGURATION | {"spark.sql.warehouse.dir": str(warehouse)} | more).items():
        builder = builder.config(name, value)
    # Workers shall find tests.support. Only the start reads these: a variable that stays would keep brokers of later tests from being warm.
    with patch.dict(os.environ, PYSPARK_PYTHON=python, PYSPARK_DRIVER_PYTHON=python, PYTHONPATH=str(ROOT)):
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("FATAL")
    try:
        yield session
    finally:
        session.stop()
        collect_sockets()


def collect_sockets() -> None:
    """Collects what Spark has left open: its sockets warn then, and not in the middle of a test that has nothing to do with Spark."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def numbers(spark: SparkSession, count: int, partitions: int) -> DataFrame:
    """The ids 0 to count - 1 as bodies."""
    return spark.range(0, count, 1, partitions).select(col("id").cast("string").alias("body"))


def batch_frame(
    spark: SparkSession, server: Reachable, *, kind: str = "protomq", **options: str
) -> DataFrame:
    """A batch read, not run yet; `kind`: the format."""
    reader = spark.read.format(kind).option("protomq.namesrv", server.namesrv)
    return reader.options(**options).load()


# -- queries -----------------------------------------------------------------------------------------------------------


def copy_stream(
    spark: SparkSession,
    server: Reachable,
    source: dict[str, str],
    target: str,
    checkpoint: Path,
    **read_options: str,
) -> Any:
    """A query, not started yet, that copies a topic to another."""
    reader = spark.readStream.format("protomq").option("protomq.namesrv", server.namesrv)
    options = {"startingOffsets": "earliest", "columns": "body,key"} | source | read_options
    writer = reader.options(**options).load().writeStream.format("protomq")
    writer = writer.option("protomq.namesrv", server.namesrv).option("topic", target)
    return writer.option("checkpointLocation", str(checkpoint))


def run(writer: Any, timeout_s: float = 180) -> list[dict[str, Any]]:
    """Until all that is there is done; the progress of each micro-batch."""
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(timeout_s)
    return [json.loads(progress.json) for progress in query.recentProgress]


def forget_last_commit(checkpoint: Path) -> None:
    """As if the driver had been killed when the last micro-batch was written but not committed yet."""
    commits = sorted(
        (p for p in (checkpoint / "commits").iterdir() if p.name.isdecimal()),
        key=lambda p: int(p.name),
    )
    commits[-1].unlink()
    (checkpoint / "commits" / f".{commits[-1].name}.crc").unlink(missing_ok=True)


class InBackground:
    """An action of Spark on a thread of its own, while the test strikes."""

    def __init__(self, spark: SparkSession, action: Callable[[], Any]) -> None:
        self.answer: Any = None
        self._spark = spark
        self._error: BaseException | None = None
        self._action = action
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            # Makes the session the one of this thread: see docs/spark.md.
            self._spark.createDataFrame([], "id INT")
            self.answer = self._action()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return not self._thread.is_alive()

    def result(self, timeout_s: float = 180) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the query does not end"
        if self._error is not None:
            raise self._error
        return self.answer

    def wait_for(self, fault: Fault) -> None:
        """Until the fault is there. Raises what the query ended with, if it did not get that far."""
        wait_for(lambda: fault.happened or not self._thread.is_alive())
        if not fault.happened:
            self.result()
            raise AssertionError("the query ended without the fault")
