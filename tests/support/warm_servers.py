"""Servers that have their imports done: a broker or name server of a test is a fork of a process that has them.

The imports of a broker are half a second of CPU, and the tests start hundreds of brokers: it was a ninth of `make test`. The fork is a
process as any other: a child of the test's process, with its own streams, environment, signals and end. `ServerPopen` starts the real
Python where that would make a difference, and where no `warm_servers` runs. Limits of resources and a terminal's Ctrl-C it has from the
process with the imports. What tests start by other means is never warm: the
command line, the examples, and the brokers of `make chaos`.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, AnyStr, Final

from protomq.testing import Broker
from protomq_cli.importing import uncollected
from tests.support.forked_python import run_only, take_streams

ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAMS: Final = (("protomq",), ("protomq_cli", "broker"), ("protomq_cli", "standalone"), ("protomq_namesrv",))
"""What servers are started by, after `python -m`."""
_WARM: Final = ("protomq_broker.main", "protomq_cli.main", "protomq_cli.standalone", "protomq_namesrv.main")
_OURS: Final = ("PROTOMQ_", "PYTEST_CURRENT_TEST", "NOTIFY_SOCKET")
"""Variables that nothing reads while it is imported."""
_REQUEST_SIZE_MAX_BYTES: Final = 1 << 17
_PR_SET_CHILD_SUBREAPER: Final = 36


class _Parent:
    """The process that has the imports, and what asks it for forks. Any thread."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._network = _network()
        self.environment = dict(os.environ)
        """What the imports have seen."""

    @property
    def is_beside(self) -> bool:
        """Whether this thread has the network that a fork would have."""
        return self._network == _network()

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], streams: Sequence[int], *, leads: bool) -> int:
        """Returns the id of a process that runs `python -m ARGUMENTS`, a child of this one. `leads`: in a session of its own."""
        request = repr((list(arguments), dict(environment), os.getcwd(), leads)).encode()
        with self._lock:
            # A child of a child that has ended belongs to the next process above that asks for it.
            self._adopt(True)
            try:
                socket.send_fds(self._channel, [request], streams)
                process_id, ended = self._channel.recv(64), self._channel.recv(64)
            finally:
                self._adopt(False)
        assert ended == b"adopted", "the process that has the imports is gone"
        return int(process_id)

    def _adopt(self, adopts: bool) -> None:
        if self._prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


def _network() -> int:
    return Path("/proc/thread-self/ns/net").stat().st_ino


_parent: _Parent | None = None


class ServerPopen(subprocess.Popen[AnyStr]):
    """A `subprocess.Popen`, which forks what is one of PROGRAMS."""

    def _execute_child(self, *arguments: Any) -> None:
        names = inspect.signature(subprocess.Popen._execute_child).parameters  # type: ignore[attr-defined]
        given = dict(zip(list(names)[1:], arguments, strict=True))
        if _parent is None or not _parent.is_beside or not _is_plain(given, _parent.environment):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if end == -1 else end for number, end in enumerate(ends)]
        self.pid = _parent.fork(given["args"][2:], _environment(given), streams, leads=given["start_new_session"])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def _environment(given: Mapping[str, Any]) -> Mapping[str, str]:
    return os.environ if given["env"] is None else given["env"]


def _is_plain(given: Mapping[str, Any], seen: Mapping[str, str]) -> bool:
    """Whether a fork does as well as a new interpreter."""
    args = given["args"]
    if not isinstance(args, list) or args[:2] != [sys.executable, "-m"]:
        return False
    if not any(tuple(args[2 : 2 + len(program)]) == program for program in PROGRAMS):
        return False
    # What a library or the interpreter reads before the program begins cannot be changed any more.
    changed = {name for name, _ in set(_environment(given).items()) ^ set(seen.items())}
    if not all(name.startswith(_OURS) for name in changed):
        return False
    usual = {
        "executable": None, "preexec_fn": None, "pass_fds": (), "cwd": None, "shell": False, "gid": None, "gids": None, "uid": None,
        "umask": -1, "process_group": -1,
    }  # fmt: skip
    return all(given[name] == value for name, value in usual.items())


@contextmanager
def warm_servers() -> Iterator[None]:
    """The brokers of `protomq.testing` and of this folder are forks, from here on until the end."""
    global _parent
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The last word is for the death watch of a broker, which kills nothing that is not ours.
    command = [sys.executable, "-m", __name__, str(theirs.fileno()), "protomq"]
    # As servers set them before they import gRPC and numpy.
    environment = {"GRPC_VERBOSITY": "NONE", "OPENBLAS_NUM_THREADS": "1"} | os.environ
    with ours, subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
    ):
        theirs.close()
        assert ours.recv(64) == b"warm"
        _parent, Broker._popen = _Parent(ours), ServerPopen
        try:
            yield
        finally:
            _parent, Broker._popen = None, subprocess.Popen
            ours.close()


def serve(channel: socket.socket) -> tuple[bytes, list[int]] | None:
    """What a fork is asked to become, with its streams; None at the end."""
    with uncollected():
        for module in _WARM:
            importlib.import_module(module)
    # In a fork all other threads would be missing.
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    channel.send(b"warm")
    while True:
        request, streams, *_ = socket.recv_fds(channel, _REQUEST_SIZE_MAX_BYTES, 3)
        if not request:
            return None
        between = os.fork()
        if not between:
            process_id = os.fork()
            if not process_id:
                return request, streams
            channel.send(str(process_id).encode())
            os._exit(0)
        os.waitpid(between, 0)
        channel.send(b"adopted")
        for stream in streams:
            os.close(stream)


def become(request: bytes, streams: Sequence[int]) -> None:
    """Runs the module that is asked for, as its only program."""
    (module, *arguments), environment, folder, leads = ast.literal_eval(request.decode())
    take_streams(streams)
    # Python's own are of the files that the process before had.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if leads:
        os.setsid()
    run_only(module, arguments, environment, folder)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as end:
        asked = serve(end)
    if asked is not None:
        become(*asked)
