"""A standalone Spark cluster of processes: a master and workers, from the pyspark that is installed, and spark-submit."""

from __future__ import annotations

import os
import subprocess
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import pyspark

from tests.support.spark_driver import descendants, name_of

SPARK_HOME = Path(pyspark.__file__).parent
THIRD_PARTY = (
    "numpy", "numpy.libs", "pyarrow", "grpc", "google", "google_crc32c", "google_crc32c.libs", "tenacity",
    "typing_extensions.py", "lz4", "backports",
)  # fmt: skip
"""What protomq-spark stands on, as it lies in site-packages."""


def bare_python(folder: Path) -> Path:
    """A Python that has nothing but the standard library: neither our tree nor pyspark."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin/python"


def python_of_a_cluster(folder: Path) -> Path:
    """A Python with what protomq-spark stands on, without protomq."""
    python = bare_python(folder)
    (target,) = (folder / "lib").glob("python*/site-packages")
    for name in THIRD_PARTY:
        installed = SPARK_HOME.parent / name
        if installed.exists():
            (target / name).symlink_to(installed)
    return python


class SparkCluster:
    """Context: a master and two workers, each with one core; its `url`."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder = folder
        self._workers = workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def __enter__(self) -> SparkCluster:
        log = self._folder / "master.log"
        # Port 0: the master's own line says which one it got.
        self._start("master.Master", log, "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        self.url = self._line_with(log, "Starting Spark master at ").rpartition(" at ")[2]
        for number in range(self._workers):
            folder = self._folder / f"work-{number}"
            given = ["--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", "1g"]
            given += ["--work-dir", str(folder), self.url]
            self._start("worker.Worker", self._folder / f"worker-{number}.log", *given)
        for number in range(self._workers):
            self._line_with(self._folder / f"worker-{number}.log", "Successfully registered")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        family = [id_ for process in self._processes for id_ in descendants(process.pid)]
        for process in self._processes:
            process.kill()
            process.wait()
        for process_id in family:
            if name_of(process_id):
                os.kill(process_id, 9)

    def submit(
        self,
        python: Path,
        script: Path,
        arguments: Sequence[str],
        *options: str,
        python_path: Path,
        timeout_s: float,
    ) -> str:
        """Runs a program by spark-submit, driver and executors with that Python; what it printed. `python_path`: of the driver alone."""
        command = [
            str(SPARK_HOME / "bin/spark-submit"), "--master", self.url,
            "--conf", "spark.ui.enabled=false", "--conf", "spark.driver.host=127.0.0.1",
            "--conf", "spark.driver.memory=512m", "--conf", "spark.executor.memory=512m",
            *options, str(script), *arguments,
        ]  # fmt: skip
        environment = _environment() | {"PYTHONPATH": str(python_path)}
        environment |= {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}
        done = subprocess.run(
            command, env=environment, cwd=self._folder, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"spark-submit failed:\n{done.stdout}\n{done.stderr[-8000:]}"
        return done.stdout

    def _start(self, name: str, log: Path, *arguments: str) -> None:
        command = [
            str(SPARK_HOME / "bin/spark-class"),
            f"org.apache.spark.deploy.{name}",
            *arguments,
        ]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, env=_environment(), cwd=self._folder, stdout=output, stderr=output
            )
        self._processes.append(process)

    def _line_with(self, log: Path, words: str, timeout_s: float = 60) -> str:
        ends_s = time.monotonic() + timeout_s
        while True:
            text = log.read_text()
            for line in text.splitlines():
                if words in line:
                    return line
            assert time.monotonic() < ends_s, f"no {words!r} in {log}:\n{text}"
            assert self._processes[-1].poll() is None, f"it has ended:\n{text}"
            time.sleep(0.05)


def _environment() -> dict[str, str]:
    kept = ("PATH", "JAVA_HOME", "HOME", "LANG", "TMPDIR")
    found = {name: os.environ[name] for name in kept if name in os.environ}
    return found | {
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_NO_DAEMONIZE": "1",
    }
