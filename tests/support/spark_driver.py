"""A Spark driver as a process of its own, for tests that kill it: `python -m tests.support.spark_driver SETTINGS`.

Runs streams from topic to topic, side by side, until all is done. SETTINGS is JSON: master, warehouse, and the `queries`, each
with its checkpoint and the formats and options of source and sink, in which a fault may stand (`tests.support.faulty_spark.copy_options`).
A query may name a file, `reached`: the next one starts when that is there. Spark gives a Python process 10 s to start, and on a busy
machine many at once take longer.

With `until`, a path, there is one query, which runs on until that file is there and all is done. When it fails it is started again,
as whoever operates it would, and why it failed is added to the file `failures` as a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHUFFLED = "shuffled"
"""As the format of a sink: the rows are shuffled, and written by `send_batch`."""


class SparkDriver:
    """The process, and all that it starts: a JVM, and Python workers."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        command = [sys.executable, "-m", "tests.support.spark_driver", json.dumps(settings)]
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def wait_for(self, *signs: Path, timeout_s: float = 300) -> None:
        """Until all the files are there."""
        ends_s = time.monotonic() + timeout_s
        while missing := [sign for sign in signs if not sign.exists()]:
            assert self._process.poll() is None, f"the driver has ended:\n{self._log.read_text()}"
            assert time.monotonic() < ends_s, f"no {missing}:\n{self._log.read_text()}"
            time.sleep(0.02)

    def wait(self, timeout_s: float) -> bool:
        """Whether it came to a good end within that time; what it wrote is in its log."""
        try:
            return self._process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            return False

    @property
    def running(self) -> bool:
        """Whether it is there."""
        return self._process.poll() is None

    def workers(self) -> list[int]:
        """The Python processes that work for the JVM, the one they are forked from among them."""
        found = []
        for process_id in descendants(self._process.pid):
            if name_of(process_id) == "java":
                found += [i for i in descendants(process_id) if name_of(i).startswith("python")]
        return found

    def kill(self) -> None:
        """SIGKILL for the driver and its JVM, as when the machine's memory is out. Workers find out by themselves, a little later."""
        family = descendants(self._process.pid)
        self._process.kill()
        for process_id in family:
            if name_of(process_id) == "java":
                os.kill(process_id, signal.SIGKILL)
        self._process.wait()
        ends_s = time.monotonic() + 30
        while any(map(name_of, family)):
            assert time.monotonic() < ends_s, "a worker outlives its Spark"
            time.sleep(0.02)


def descendants(process_id: int) -> list[int]:
    """The processes below one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [process_id]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def name_of(process_id: int) -> str:
    """The name of a process; "" if it is gone, or a zombie that nobody has asked for."""
    try:
        text = (Path("/proc") / str(process_id) / "stat").read_text()
    except OSError:
        return ""
    state = text.rpartition(")")[2].split()[0]
    return "" if state in "ZX" else text[text.index("(") + 1 : text.rindex(")")]


def keep_copying(start: Callable[[], Any], until: Path, failures: Path) -> None:
    """Until the file is there and all that there is is copied."""
    while True:
        try:
            query = start()
            while not until.exists():
                query.awaitTermination(0.1)
            query.processAllAvailable()
            query.stop()
            return
        except Exception as error:
            with failures.open("a") as file:
                file.write(json.dumps(str(error)) + "\n")


def main() -> None:
    from tests.support.faulty_spark import FaultySource, copy_writer
    from tests.support.recorded_sink import RecordedSource
    from tests.support.spark import spark_session

    settings = json.loads(sys.argv[1])
    small = {"spark.sql.execution.arrow.maxRecordsPerBatch": "100"}
    with spark_session(Path(settings["warehouse"]), settings["master"], **small) as spark:
        spark.dataSource.register(FaultySource)
        spark.dataSource.register(RecordedSource)
        writers = [copy_writer(spark, query, query["checkpoint"]) for query in settings["queries"]]
        if "until" in settings:
            (writer,) = writers
            keep_copying(writer.start, Path(settings["until"]), Path(settings["failures"]))
            return
        running = []
        for writer, query in zip(writers, settings["queries"], strict=True):
            running.append(writer.trigger(availableNow=True).start())
            while "reached" in query and not Path(query["reached"]).exists():
                if running[-1].awaitTermination(0.1):
                    break
        for started in running:
            started.awaitTermination()


if __name__ == "__main__":
    main()
