"""Broker: `protomq standalone` as a child process, for tests.

Rules:
- Free ports, a temporary folder: any number of them run side by side (pytest-xdist).
- Started means ready: the child prints one line, `ready grpc=HOST:PORT remoting=HOST:PORT namesrv=HOST:PORT data=DIR`.
- `kill` is SIGKILL; `restart` starts again with the same data on the same ports. After `stop` the ports are the same; a temporary folder is
  gone. What is left over is killed when the object goes away or the test process ends, also by SIGTERM or SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, ClassVar

from protomq.errors import WrongTypeError

from ._death_watch import DeathWatch

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
PORT_RETRY_INTERVAL_S = 0.2


class BrokerStartError(Exception):
    """The child process did not become ready; the message holds what it wrote."""


class _PortTakenError(BrokerStartError):
    """Somebody else has a port that the broker had before."""


class Broker:
    """A standalone protomq: name server and broker in one child process.

    `data_dir`: kept if given, else temporary and removed by `stop`. `arguments`: more for the command line, `environment`: more
    variables (PROTOMQ_SECTION_FIELD sets a configuration value).
    """

    _popen: ClassVar[type[subprocess.Popen[bytes]]] = subprocess.Popen
    """What starts the child; protomq's own tests have another one."""

    def __init__(
        self,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._given_data_dir = Path(data_dir) if data_dir is not None else None
        self._arguments = tuple(arguments)
        self._environment = dict(environment or {})
        given: dict[Any, Any] = self._environment
        for name, value in given.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise WrongTypeError(f"environment is a dict of str to str, {name!r}: {value!r} is not; write {name!r}: {str(value)!r}")
        self._start_timeout_s = start_timeout_s
        self._temporary: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: weakref.finalize[[int], Broker] | None = None
        self._watch: DeathWatch | None = None
        self._addresses: dict[str, str] = {}
        self._ports: dict[str, str] = {}
        """Those that it has, or had last."""

    # -- addresses -----------------------------------------------------------------------------------------------------

    @property
    def namesrv(self) -> str:
        """host:port of the name server, for Producer and PullConsumer."""
        return self._address("namesrv")

    @property
    def grpc_address(self) -> str:
        """host:port of all gRPC services."""
        return self._address("grpc")

    @property
    def remoting_address(self) -> str:
        """host:port of the remoting port."""
        return self._address("remoting")

    def _address(self, name: str) -> str:
        if name not in self._addresses:
            raise RuntimeError("the broker has not been started, or was stopped: it has no address; write `with Broker() as broker:`")
        return self._addresses[name]

    @property
    def data_dir(self) -> Path:
        """Folder of the store."""
        directory = self._given_data_dir or self._temporary
        if directory is None:
            raise RuntimeError("the broker has not been started")
        return directory

    @property
    def process_id(self) -> int:
        """Of the child."""
        if self._process is None:
            raise RuntimeError("the broker does not run")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the child is there."""
        return self._process is not None and self._process.poll() is None

    def log_text(self) -> str:
        """What the child has written to stderr."""
        path = self._log_path()
        return path.read_text(errors="replace") if path.exists() else ""

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> Broker:
        """Starts the child and waits until it is ready. While somebody else has one of its former ports, it tries again.

        Raises BrokerStartError.
        """
        if self.running:
            return self
        is_first = self._given_data_dir is None and self._temporary is None
        if is_first:
            self._temporary = Path(tempfile.mkdtemp(prefix="protomq-test-"))
        try:
            return self._start()
        except BaseException:
            if is_first:  # Nobody stops what never ran.
                self._remove_temporary()
            raise

    def _start(self) -> Broker:
        self._end(signal.SIGKILL)  # Of one that died by itself.
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BrokerStartError(f"data_dir {self.data_dir} cannot be used: {error}") from error
        deadline_s = time.monotonic() + self._start_timeout_s
        while True:
            try:
                return self._start_once()
            except _PortTakenError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(PORT_RETRY_INTERVAL_S)

    def _start_once(self) -> Broker:
        # After a restart clients shall find it where it was.
        ports = self._ports
        command = [
            sys.executable, "-m", "protomq", "--data-dir", str(self.data_dir / "store"),
            "--port", ports.get("grpc", "0"), "--remoting-port", ports.get("remoting", "0"), *self._arguments,
        ]  # fmt: skip
        with open(self._log_path(), "ab") as log:
            log_start = log.tell()
            self._process = self._popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._child_environment(),
                # Ctrl-C in the terminal is for the tests; they stop the child.
                start_new_session=True,
            )
        self._guard = weakref.finalize(self, _kill_process, self._process.pid)
        self._watch = DeathWatch(self._process.pid, str(self._temporary or ""))
        assert self._process.stdout is not None
        began_s = time.monotonic()
        line = _read_line(self._process, self._process.stdout, self._start_timeout_s)
        try:
            self._addresses = parse_ready_line(line)
        except ValueError:
            ended = time.monotonic() - began_s < self._start_timeout_s
            if ended and not line:  # Its stdout is closed: it is about to end.
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_TIMEOUT_S)
            code = self._process.poll()
            self._end(signal.SIGKILL)
            written = self._log_path().read_bytes()[log_start:].decode(errors="replace")
            is_taken = bool(ports) and " is taken; " in written
            failed = "ended at its start" if ended else f"did not become ready within {self._start_timeout_s:.0f} s"
            raise (_PortTakenError if is_taken else BrokerStartError)(
                f"`{' '.join(command)}` {failed} (exit code {code}, printed {line!r}):\n{self.log_text()[-4000:]}"
            ) from None
        self._ports = {name: self._addresses[name].rpartition(":")[2] for name in ("grpc", "remoting")}
        return self

    def stop(self) -> int:
        """Stops it gracefully and removes the temporary folder; the exit code. A later start has the same ports, and is empty unless a
        `data_dir` was given.
        """
        code = self._end(signal.SIGTERM)
        self._remove_temporary()
        self._addresses = {}
        return code

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def kill(self) -> None:
        """SIGKILL, as a crash; data and ports are kept for `restart`."""
        self._end(signal.SIGKILL)

    def restart(self) -> Broker:
        """Stops it gracefully if it runs, and starts it with the same data on the same ports. See `stop` for one that was stopped."""
        self._end(signal.SIGTERM)
        return self.start()

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Broker:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def _child_environment(self) -> dict[str, str]:
        # Settings of the surrounding system stay out: a test's broker must not register with its name servers.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("PROTOMQ_")
        }
        return inherited | self._environment

    def _log_path(self) -> Path:
        return self.data_dir / "broker.log"

    def _end(self, signal_number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(signal_number)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if self._guard is not None:
            self._guard.detach()
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        return process.returncode


def parse_ready_line(line: str) -> dict[str, str]:
    """The addresses (and `data`) in a ready line. Raises ValueError for any other line."""
    word, _, rest = line.strip().partition(" ")
    # The folder stands last and may hold spaces.
    addresses, _, data = rest.partition(" data=")
    found = dict(part.split("=", 1) for part in addresses.split())
    if word != "ready" or not {"grpc", "remoting", "namesrv"} <= found.keys():
        raise ValueError(f"not a ready line: {line!r}")
    return {**found, "data": data}


def _read_line(process: subprocess.Popen[bytes], stdout: IO[bytes], timeout_s: float) -> str:
    """The first line that the child prints; "" if it ends or takes too long."""
    # Killing the child ends the read: no polling, and no bytes are lost between two readers.
    watchdog = threading.Timer(timeout_s, process.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        return stdout.readline().decode(errors="replace")
    finally:
        watchdog.cancel()


def _kill_process(process_id: int) -> None:
    try:
        os.kill(process_id, signal.SIGKILL)
    except ProcessLookupError:
        pass
