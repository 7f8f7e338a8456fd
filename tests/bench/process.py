"""Processes that the benchmarks start: servers with a ready line, and what /proc tells about them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).resolve().parents[2]
_READY_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 20.0
_REST_INTERVAL_S: Final = 0.5
_CPU_CLOCK: Final = 2
"""Of a process: what the scheduler has counted. /proc has it in steps of 10 ms."""


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time of these processes up to now, user and system, to the microsecond; a process that is gone counts 0."""
    total_s = 0.0
    for pid in pids:
        # clock_getcpuclockid(3), which Python lacks.
        with suppress(OSError):
            total_s += time.clock_gettime((~pid << 3) | _CPU_CLOCK)
    return total_s


def resident_mib(pid: int) -> float:
    """Resident memory of a process, files mapped and shared ones included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no VmRSS in /proc/{pid}/status")


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


class Server:
    """A server process that prints `ready name=value ...` when it serves.

    `values` are the pairs of that line. Its standard error goes to a file beside its data; the error of a server that does not get
    ready quotes it.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = _READY_TIMEOUT_S,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.started = time.perf_counter()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C ends the benchmark, which then ends its servers.
            )
        self.pid = self._process.pid
        try:
            self.values = self._wait_ready(timeout_s)
        except BaseException:
            self.kill()
            raise
        self.ready_s = time.perf_counter() - self.started

    def _wait_ready(self, timeout_s: float) -> dict[str, str]:
        assert self._process.stdout is not None
        alarm = threading.Timer(timeout_s, self._process.kill)
        alarm.start()
        try:
            for raw in self._process.stdout:
                line = raw.decode(errors="replace").strip()
                if line.startswith("ready"):
                    pairs = (word.partition("=") for word in line.split()[1:])
                    return {name: value for name, _, value in pairs}
        finally:
            alarm.cancel()
        tail = self.log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self._process.args!r} did not get ready:\n{tail}")

    @property
    def pids(self) -> list[int]:
        """The server and its children."""
        return descendants(self.pid)

    def resident_mib(self) -> float:
        """Resident memory of the server and its children."""
        return sum(resident_mib(pid) for pid in self.pids)

    def cpu_seconds(self) -> float:
        """CPU time of the server and its children."""
        return cpu_seconds(self.pids)

    def wait_at_rest(self, timeout_s: float = 30.0) -> None:
        """Until the server has done what it does on the side: less than a twentieth of a core over half a second."""
        until = time.monotonic() + timeout_s
        used = self.cpu_seconds()
        while time.monotonic() < until:
            time.sleep(_REST_INTERVAL_S)
            before, used = used, self.cpu_seconds()
            if used - before < _REST_INTERVAL_S / 20:
                return
        raise RuntimeError(f"{self._process.args!r} did not come to rest within {timeout_s:g} s")

    def send_signal(self, number: int) -> None:
        """To the server and its children: SIGSTOP, SIGCONT."""
        for pid in self.pids:
            os.kill(pid, number)

    def stop(self) -> None:
        """Cleanly; kills what does not end."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()

    def kill(self) -> None:
        """As a power cut would, as far as the processes are concerned."""
        if self._process.poll() is None:
            self.send_signal(signal.SIGKILL)
            self._process.wait()
        self._close()

    def _close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module in this Python."""
    return [sys.executable, "-m", module, *arguments]
