"""A standalone broker as a child process: started, waited for until it is ready, stopped, and never left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from protomq_cli.exits import CliError, ExitCode

START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 15.0


def parse_ready_line(line: str) -> dict[str, str]:
    """`ready grpc=127.0.0.1:8081 remoting=... data=DIR` as a dict. Raises ValueError for any other line."""
    word, _, rest = line.strip().partition(" ")
    # The folder stands last and may hold spaces.
    addresses, _, data = rest.partition(" data=")
    pairs = [part.partition("=") for part in addresses.split()]
    if word != "ready" or not pairs or not all(equals for _, equals, _ in pairs):
        raise ValueError(f"not a ready line: {line!r}")
    return {name: value for name, _, value in pairs} | {"data": data}


class StandaloneChild:
    """`with StandaloneChild(store, log) as broker: broker.remoting`."""

    def __init__(self, data_dir: Path, log_file: Path) -> None:
        """Free ports are used, so that it runs beside whatever runs already. Its log goes to `log_file`."""
        self._data_dir = data_dir
        self._log_file = log_file
        self._process: subprocess.Popen[str] | None = None
        self.grpc = self.remoting = self.namesrv = ""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "protomq_cli", "standalone"]
        command += ["--data-dir", str(self._data_dir), "--port", "0", "--remoting-port", "0"]
        with self._log_file.open("w") as log:
            # A group of its own: Ctrl-C in the terminal is for the parent, who then stops the child.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            self._await_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """Ask it to stop, wait, and insist if that takes too long; its exit code."""
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
        code = process.returncode
        return 0 if code is None else code

    def _await_ready(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        # A child that hangs before it is ready is killed, which ends the read below.
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        try:
            ready = parse_ready_line(line)
        except ValueError as error:
            process.kill()
            process.wait()
            why = self._log_file.read_text("utf-8", "replace").strip().splitlines()
            detail = why[-1] if why else f"exit code {process.returncode}"
            raise CliError(
                ExitCode.FAILURE,
                "NOT_STARTED",
                f"the broker did not start: {detail} (log: {self._log_file})",
            ) from error
        self.grpc, self.remoting, self.namesrv = ready["grpc"], ready["remoting"], ready["namesrv"]
