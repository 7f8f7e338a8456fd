"""A server as a process: ready line, signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from protomq.v1 import options_pb2
from protomq_runtime import lifecycle
from tests.integration.transport_callers import RemotingCaller

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from protomq_runtime.lifecycle import run_until_signal
from protomq_runtime.server import Server
from tests.integration.echo_services import Services

services = Services(Path(__file__ if "__file__" in globals() else sys.executable))
server = Server(services.table, name="echo", version="1")
if "stuck" in sys.argv:
    import threading
    services.route.stop = threading.Event().wait
if "failing" in sys.argv:
    services.route.start = lambda server: server.pools["send"].lanes[0].post(server.pools["send"].lanes[0]._poll.close)
ports_file = Path(sys.argv[-1]) if sys.argv[-1].endswith(".json") else None
ready = lambda: {"remoting": f"127.0.0.1:{server.remoting_port}", "data": "a b"}
sys.exit(run_until_signal(server, ready, ports_file=ports_file))
"""


@contextmanager
def process(*arguments: str, prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    child = subprocess.Popen(
        [*prefix, sys.executable, "-c", PROGRAM, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_systemd_is_told_when_it_is_ready_and_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with process() as child:
            assert manager.recv(100) == b"READY=1"
            assert child.stdout is not None
            assert child.stdout.readline().startswith("ready ")
            child.terminate()
            assert manager.recv(100) == b"STOPPING=1"
            assert child.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_process_gracefully(number):
    with process() as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("ready remoting=127.0.0.1:")
        child.send_signal(number)
        out, err = child.communicate(timeout=120)
        assert (child.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_a_shell_started_in_the_background_stops_on_both_signals(number):
    # Such a process begins with SIGINT ignored.
    with process(prefix=["bash", "-c", 'trap "" INT; exec "$0" "$@"']) as child:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("ready ")
        child.send_signal(number)
        assert child.wait(120) == 0


def test_a_ports_file_says_where_it_listens_and_goes_with_the_process(tmp_path: Path):
    path = tmp_path / "ports.json"
    with process(str(path)) as child:
        assert child.stdout is not None
        words = child.stdout.readline().split()
        ports = json.loads(path.read_text())
        assert ports == {
            "pid": child.pid,
            "remoting": words[1].removeprefix("remoting="),
            "data": "a b",
        }
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=120)
    assert not list(tmp_path.iterdir())


def test_nobody_needs_to_read_the_ready_line_and_anybody_may_remove_the_ports_file(tmp_path: Path):
    path = tmp_path / "ports.json"
    with process(str(path)) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        while not path.exists() and child.poll() is None:
            time.sleep(0.01)
        path.unlink()
        child.send_signal(signal.SIGTERM)
        assert (child.wait(120), child.stderr.read()) == (0, "")


def test_a_second_signal_ends_it_at_once():
    with process("stuck") as child:
        assert child.stdout is not None
        child.stdout.readline()
        # The stop hook never returns. Signals that come too close are one: ask until it is over.
        for _ in range(100):
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(0.05)
                break
            except subprocess.TimeoutExpired:
                continue
        assert child.returncode == -signal.SIGTERM


def test_a_failed_thread_ends_the_process():
    with process("failing") as child:
        _, err = child.communicate(timeout=120)
        assert child.returncode == lifecycle.EXIT_FATAL
        assert "the event loop failed" in err


async def test_a_process_serves_between_ready_and_the_signal():
    from tests.integration.echo_services import Services

    services = Services(Path(__file__))
    with process() as child:
        assert child.stdout is not None
        port = int(child.stdout.readline().split()[1].rpartition(":")[2])
        caller = await RemotingCaller.connect(services.table, port, options_pb2.LANE_ADMIN)
        assert await caller.call("/protomq.v1.AdminService/Ping", b"") == b""
        await caller.close()
    services.pull.file.close()
