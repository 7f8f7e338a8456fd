"""Spark as processes of their own, from the pyspark that is installed: a standalone master with workers, and a Connect server."""

from __future__ import annotations

import os
import subprocess
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pyspark

from tests.support.spark_driver import descendants, name_of

SPARK_HOME = Path(pyspark.__file__).parent
THIRD_PARTY = (
    "numpy", "numpy.libs", "pyarrow", "grpc", "google", "google_crc32c", "google_crc32c.libs",
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


class _Processes:
    """Context: processes of Spark that write to logs in a folder; they and what they started are killed at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

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

    def _start(self, log: Path, *command: str, **environment: str) -> None:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(SPARK_HOME / command[0]), *command[1:]],
                env=environment_of_spark() | environment,
                cwd=self._folder,
                stdout=output,
                stderr=output,
            )
        self._processes.append(process)

    def _line_with(self, log: Path, words: str, timeout_s: float = 60) -> str:
        """What stands behind the words in the line of the log that has them, once there is one."""
        ends_s = time.monotonic() + timeout_s
        while True:
            text = log.read_text()
            for line in text.splitlines():
                if words in line:
                    return line.partition(words)[2].strip()
            assert time.monotonic() < ends_s, f"no {words!r} in {log}:\n{text}"
            assert self._processes[-1].poll() is None, f"it has ended:\n{text}"
            time.sleep(0.05)


class SparkCluster(_Processes):
    """Context: a master and two workers, each with one core; its `url`."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        super().__init__(folder)
        self._workers = workers
        self.url = ""

    def __enter__(self) -> SparkCluster:
        log = self._folder / "master.log"
        master = ("bin/spark-class", "org.apache.spark.deploy.master.Master")
        # Port 0: the master's own line says which one it got.
        self._start(log, *master, "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        self.url = self._line_with(log, "Starting Spark master at ")
        for number in range(self._workers):
            # A host of its own for each: Spark does not speculate on the host on which the task runs already.
            host = f"127.0.0.{number + 1}"
            folder = self._folder / f"work-{number}"
            given = ["--host", host, "--webui-port", "0", "--cores", "1", "--memory", "1g"]
            given += ["--work-dir", str(folder), self.url]
            worker = ("bin/spark-class", "org.apache.spark.deploy.worker.Worker")
            log = self._folder / f"worker-{number}.log"
            self._start(log, *worker, *given, SPARK_LOCAL_IP=host)
        for number in range(self._workers):
            self._line_with(self._folder / f"worker-{number}.log", "Successfully registered")
        return self

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
        environment = {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}
        environment |= {"PYTHONPATH": str(python_path)}
        return output_of(command, self._folder, environment_of_spark() | environment, timeout_s)


class ConnectServer(_Processes):
    """Context: a server of Spark Connect with two cores, started as its users start it; its `url`. `python`: of its workers."""

    def __init__(self, folder: Path, python: Path | str) -> None:
        super().__init__(folder)
        self._python = str(python)
        self.url = ""

    def __enter__(self) -> ConnectServer:
        log = self._folder / "connect.log"
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": "0",
            "spark.ui.enabled": "false", "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(self._folder / "warehouse"),
        }  # fmt: skip
        given = [word for pair in settings.items() for word in ("--conf", "=".join(pair))]
        command = ("sbin/start-connect-server.sh", "--master", "local[2]", *given)
        self._start(log, *command, PYSPARK_PYTHON=self._python, SPARK_LOG_DIR=str(self._folder))
        self.url = "sc://" + self._line_with(log, "Spark Connect server started at: ")
        return self


def output_of(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], timeout_s: float
) -> str:
    """What a program printed, which must succeed."""
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr[-8000:]}"
    return done.stdout


def environment_of_spark() -> dict[str, str]:
    """Nothing of ours: neither PYTHONPATH nor PYSPARK_PYTHON."""
    kept = ("PATH", "JAVA_HOME", "HOME", "LANG", "TMPDIR")
    found = {name: os.environ[name] for name in kept if name in os.environ}
    return found | {
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_NO_DAEMONIZE": "1",
    }
