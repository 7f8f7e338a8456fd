"""A Spark session in a process of its own (`driver.py`), from the outside: what it is told, what it takes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from tests.bench.measure import Sample
from tests.bench.process import ROOT, cpu_seconds, descendants, resident_mib

_START_TIMEOUT_S: Final = 180.0
_QUERY_TIMEOUT_S: Final = 300.0
_MEMORY_INTERVAL_S: Final = 0.05


class Session:
    """One Spark. `server_pid` is the broker that it reads from."""

    def __init__(
        self, python: Path, folder: Path, server_pid: int, jars: Sequence[str] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._server_pid = server_pid
        environment = {
            **os.environ,
            "PYSPARK_PYTHON": str(python),
            "PYSPARK_DRIVER_PYTHON": str(python),
        }
        for name in ("SPARK_HOME", "PYTHONPATH"):  # Each Spark is its own environment's.
            environment.pop(name, None)
        with (folder / "spark.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(python), str(Path(__file__).with_name("driver.py"))], cwd=ROOT, env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        self._log = folder / "spark.log"
        try:
            settings = {"folder": str(folder), "jars": list(jars)}
            self.version: str = self._ask(settings, _START_TIMEOUT_S)["version"]
        except BaseException:
            self.close()
            raise

    def run(self, do: str, **command: Any) -> Sample:
        """Run it once; CPU time is that of the whole session (JVM, driver, Python workers) and of the broker."""
        client, server = cpu_seconds(self._pids()), cpu_seconds(descendants(self._server_pid))
        answer = self._ask({"do": do, **command}, _QUERY_TIMEOUT_S)
        return Sample(
            messages=answer["messages"], seconds=answer["seconds"],
            client_cpu_s=cpu_seconds(self._pids()) - client,
            server_cpu_s=cpu_seconds(descendants(self._server_pid)) - server,
        )  # fmt: skip

    def run_watching_memory(self, do: str, **command: Any) -> float:
        """The most resident memory of a Python worker while it runs, in MiB."""
        most = 0.0
        done = threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(_MEMORY_INTERVAL_S):
                for pid in self._workers():
                    with contextlib.suppress(OSError, ValueError):
                        most = max(most, resident_mib(pid))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            self.run(do, **command)
        finally:
            done.set()
            watcher.join()
        return most

    def _pids(self) -> list[int]:
        return descendants(self._process.pid)

    def _workers(self) -> list[int]:
        """The processes that tasks run in: children of the daemon for `pyspark.worker`."""
        found = []
        for pid in self._pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"pyspark.daemon" in words and b"pyspark.worker" in words:
                    found.append(pid)
        return found

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        alarm = threading.Timer(timeout_s, self._process.kill)
        alarm.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        answer: dict[str, Any] = json.loads(line or "{}")
        if not line or "error" in answer:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{answer.get('error', 'the session has ended')}\n{tail}")
        return answer

    def pause(self) -> None:
        """Takes no CPU time until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Goes on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End it with all its workers."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
