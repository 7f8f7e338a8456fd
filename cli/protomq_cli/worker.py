"""`worker`: members of a consumer group in processes of their own, started, watched, and replaced.

The supervisor is one thread over the pipes of its processes and its signals; `worker_policy.py` decides. Each process is a new interpreter
(`worker_process.py`), so nothing of a parent is in it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from protomq_cli.environment import WORKER_PROCESS_VARIABLE
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import Namesrv, duration_option
from protomq_cli.output import forget_reader
from protomq_cli.settings import NAMESRV_VARIABLE, named_namesrv
from protomq_cli.worker_policy import Doing, Phase, WorkerPolicy

PROCESSES_MAX: Final = 256
RELOAD_S: Final = 0.5
LOOK_S: Final = 1.0
"""At least so often it looks whether a process is gone that has not closed its pipe."""
PIPE_CLOSED_S: Final = 5.0
"""A process whose pipe is closed ends within this time, or is killed."""


class Process:
    """One process and what it has told."""

    def __init__(self, index: int, target: str, environment: dict[str, str]) -> None:
        read, write = os.pipe()
        command = [sys.executable, "-m", "protomq_cli.worker_process", target, str(index), str(write)]
        environment = {**environment, WORKER_PROCESS_VARIABLE: str(index)}
        try:
            # A session of its own: Ctrl-C in the terminal is for the supervisor, who drains it.
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(write,), env=environment, start_new_session=True
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        os.set_blocking(read, False)
        self.index = index
        self.pipe = read
        self.is_running = False
        self.counts = {"open": 0, "waiting": 0, "size_bytes": 0, "done": 0, "refused": 0, "failed": 0}
        self._rest = b""

    def read(self) -> bool:
        """Takes what it has told; whether its pipe is open."""
        try:
            data = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            told = json.loads(lines[-1])
            self.is_running = told.pop("is_running")
            self.counts = told
        return bool(data)


class Supervisor:
    """All processes. `say`: takes a line for people."""

    def __init__(
        self,
        target: str,
        count: int,
        *,
        environment: dict[str, str],
        stop_timeout_s: float,
        start_timeout_s: float,
        status_s: float,
        watched: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._target = target
        self._environment = environment
        self._status_s = status_s
        self._watched = watched
        self._say = say
        self.policy = WorkerPolicy(count, stop_timeout_s, start_timeout_s)
        self.processes: dict[int, Process] = {}
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []

    def run(self) -> int:
        """Until all have ended; the exit code."""
        next_status_s = time.monotonic() + self._status_s if self._status_s else float("inf")
        modified = _snapshot(self._watched)
        next_look_s = time.monotonic() + RELOAD_S
        with self._signals_taken():
            while (code := self.policy.exit_code) is None:
                now_s = time.monotonic()
                for action in self.policy.step(now_s):
                    self._do(action.doing, action.slot)
                if now_s >= next_status_s:
                    next_status_s = now_s + self._status_s
                    self._say_status()
                if self._watched is not None and now_s >= next_look_s:
                    next_look_s = now_s + RELOAD_S
                    found = _snapshot(self._watched)
                    if found != modified:
                        modified = found
                        self._say("source has changed: replacing the processes")
                        self.policy.replace()
                        continue
                wait_s = min(self.policy.next_step_s(now_s), RELOAD_S if self._watched is not None else LOOK_S)
                self._wait(wait_s)
        return code

    def _do(self, doing: Doing, index: int) -> None:
        if doing is Doing.START:
            try:
                process = Process(index, self._target, self._environment)
            except OSError as error:  # No memory, processes or files are left now: those that run go on.
                now_s = time.monotonic()
                self.policy.exited(index, ExitCode.FAILURE, now_s)
                wait_s = self.policy.slots[index].start_at_s - now_s
                self._say(f"worker {index} cannot be started, it is tried again in {wait_s:.0f} s: {error}")
                return
            self.processes[index] = process
            self._selector.register(process.pipe, selectors.EVENT_READ, process)
            return
        process = self.processes[index]
        if doing is Doing.KILL:
            is_up = self.policy.slots[index].phase is not Phase.STARTING
            how = "done in time: killed, what it had comes again" if is_up else "ready in time: killed"
            self._say(f"worker {index}, process {process.popen.pid}, is not {how}")
        process.popen.send_signal(signal.SIGTERM if doing is Doing.STOP else signal.SIGKILL)

    def _wait(self, timeout_s: float) -> None:
        """Takes what processes and signals have told by then."""
        for key, _ in self._selector.select(timeout_s):
            process = key.data
            if process is None:
                os.read(key.fd, 4096)
                continue
            was_running = process.is_running
            is_open = process.read()
            if process.is_running and not was_running:
                self.policy.ready(process.index)
                self._say(f"worker {process.index}, process {process.popen.pid}, is ready")
            if not is_open:
                self._ended(process)
        for process in list(self.processes.values()):
            if process.popen.poll() is not None:
                self._ended(process)
        while self._signals:
            self._take(self._signals.pop(0))

    def _ended(self, process: Process) -> None:
        if self.processes.get(process.index) is not process:
            return
        try:
            code = process.popen.wait(PIPE_CLOSED_S)
        except subprocess.TimeoutExpired:
            process.popen.kill()
            code = process.popen.wait()
        process.read()
        self._selector.unregister(process.pipe)
        os.close(process.pipe)
        del self.processes[process.index]
        slot = self.policy.slots[process.index]
        was_asked = slot.phase is Phase.STOPPING
        self.policy.exited(process.index, code, time.monotonic())
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        text = f"worker {process.index}, process {process.popen.pid}, ended with {how}, {process.counts['done']} done"
        if not was_asked and not self.policy.is_stopping:
            text += f"; the next one starts in {max(slot.start_at_s - time.monotonic(), 0.0):.0f} s"
        self._say(text)

    def _take(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._say("replacing the processes one by one")
            self.policy.replace()
        else:
            again = self.policy.is_stopping
            self._say("stopping at once" if again else "stopping: listeners that run may end")
            self.policy.stop(time.monotonic())

    def _say_status(self) -> None:
        for slot in self.policy.slots:
            process = self.processes.get(slot.index)
            if process is None:
                self._say(f"worker {slot.index} is down, {slot.restarts} restarts")
                continue
            counts = process.counts
            self._say(
                f"worker {slot.index}, process {process.popen.pid}, {slot.phase.value}: {counts['done']} done, {counts['open']} here, "
                f"{counts['waiting']} of them waiting, {counts['failed']} failed, {counts['refused']} refused, {slot.restarts} restarts"
            )

    @contextmanager
    def _signals_taken(self) -> Iterator[None]:
        """Signals wake the selector, and are seen to between two waits."""
        inside, outside = socket.socketpair()
        inside.setblocking(False)
        outside.setblocking(False)
        self._selector.register(inside, selectors.EVENT_READ, None)
        before_fd = signal.set_wakeup_fd(outside.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, lambda got, _: self._signals.append(got)) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_fd)
            for process in self.processes.values():
                process.popen.kill()
            self._selector.close()
            inside.close()
            outside.close()


def _snapshot(folder: Path | None) -> dict[str, int]:
    """When each Python file below was changed, but for hidden folders and those of environments."""
    found: dict[str, int] = {}
    if folder is None:
        return found
    for place, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith((".", "__pycache__")) and name not in ("venv", "node_modules")
        ]
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(place, name)
                try:
                    found[path] = os.stat(path).st_mtime_ns
                except FileNotFoundError:
                    continue
    return found


def _say(text: str) -> None:
    """To stderr. Where that takes nothing (its reader is gone, its disk is full), the processes go on all the same."""
    try:
        typer.echo(text, err=True)
    except BrokenPipeError:
        forget_reader(sys.stderr)
    except OSError:
        return


def process_environment(namesrv: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the processes. Their SDK reads the name server there, and no configuration file of commands."""
    named = named_namesrv(namesrv, environment)
    if named is None:
        return dict(environment)
    from protomq import Admin

    # Raises ConfigurationError: else each process would end with a trace through the program.
    Admin(namesrv=named).close()
    return {**environment, NAMESRV_VARIABLE: named}


def worker(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", show_default=False, help="A push consumer, or a function that makes one.")
    ],
    processes: Annotated[
        int, typer.Option("--processes", "-p", min=1, max=PROCESSES_MAX, metavar="N", help="How many members of the group.")
    ] = 1,
    reload: Annotated[
        bool, typer.Option("--reload", help="Replace the processes when a Python file below this folder changes.")
    ] = False,
    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", min=0, max=65535, metavar="PORT", help="Prometheus metrics; 0: a free port.")
    ] = None,
    metrics_host: Annotated[
        str, typer.Option("--metrics-host", metavar="HOST", help="Where the metrics are served.")
    ] = "127.0.0.1",
    stop_timeout: Annotated[
        float,
        typer.Option(
            "--stop-timeout", parser=duration_option, metavar="TIME", show_default="30s",
            help="A process that is not done by then is killed.",
        ),
    ] = 30.0,
    start_timeout: Annotated[
        float,
        typer.Option(
            "--start-timeout", parser=duration_option, metavar="TIME", show_default="5m",
            help="A process that does not consume by then is killed, and started again; 0s: never.",
        ),
    ] = 300.0,
    status: Annotated[
        float,
        typer.Option("--status", parser=duration_option, metavar="TIME", show_default="60s", help="Between status lines; 0s: none."),
    ] = 60.0,
    namesrv: Namesrv = None,
) -> None:  # fmt: skip
    """Run a push consumer in processes of their own: members of its group
    that use all cores.

    \b
      protomq worker app.orders:consumer --processes 4
      protomq worker app.orders:consumer --reload       while you write it

    SIGTERM or Ctrl-C drains and ends all, SIGHUP replaces one process after
    the other. Exit codes: 0 all done, 1 something was cut short, 2 the
    program cannot be loaded, 6 the metrics port is taken.
    """
    if sys.platform == "win32":
        raise CliError(ExitCode.USAGE, "UNSUPPORTED", "protomq worker needs signals and pipes of Linux or macOS")
    supervisor = Supervisor(
        target,
        processes,
        environment=process_environment(namesrv, os.environ),
        stop_timeout_s=stop_timeout,
        start_timeout_s=start_timeout or float("inf"),
        status_s=status,
        watched=Path.cwd() if reload else None,
        say=_say,
    )
    page = None
    if metrics_port is not None:
        from protomq_cli.worker_metrics import MetricsPage

        page = MetricsPage(supervisor, metrics_host, metrics_port)
        _say(f"metrics at {page.address}")
    try:
        code = supervisor.run()
    finally:
        if page is not None:
            page.close()
        try:
            sys.stderr.flush()
        except OSError:
            forget_reader(sys.stderr)  # Else Python ends with exit code 120.
    raise typer.Exit(code)
