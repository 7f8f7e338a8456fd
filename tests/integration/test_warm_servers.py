"""The brokers of these tests are as any other, but that their imports are done: tests/support/warm_servers.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from protomq.testing import Broker
from tests.support.warm_servers import ServerPopen

HELP = [sys.executable, "-m", "protomq_namesrv", "--help"]


def parent_of(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])


def is_warm(process_id: int) -> bool:
    """A fork has the command line of the process that it comes from."""
    return b"warm_servers" in Path(f"/proc/{process_id}/cmdline").read_bytes()


def test_it_is_a_child_of_this_process_and_ends_as_one() -> None:
    broker = Broker().start()
    assert is_warm(broker.process_id)
    assert parent_of(broker.process_id) == os.getpid()
    assert os.getsid(broker.process_id) == broker.process_id
    process = broker._process
    assert process is not None
    broker.kill()
    assert process.returncode == -signal.SIGKILL
    broker.start()
    assert broker.stop() == 0


def test_its_streams_environment_and_folder_are_those_that_were_given(tmp_path: Path) -> None:
    with ServerPopen(HELP, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "Run a name server" in process.stdout.read()
    assert process.returncode == 0
    said = {"PROTOMQ_LIVENESS_HOLD_MS": "here"}
    with ServerPopen(HELP[:-1], env={**os.environ, **said}, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "'here'" in process.stderr.read()
    assert process.returncode == 1
    with Broker(data_dir=tmp_path) as broker:
        assert Path(f"/proc/{broker.process_id}/cwd").resolve() == Path.cwd()
        files = list(Path(f"/proc/{broker.process_id}/fd").iterdir())
        sockets = [file for file in files if file.readlink().name.startswith("socket:")]
        assert len(sockets) < 16  # And none of the process that it comes from.


def test_whoever_kills_what_is_left_of_a_killed_program_knows_it_by_its_command_line() -> None:
    # The broker's death watch looks for this word, which the folder of a checkout need not have.
    with Broker() as broker:
        assert b"protomq" in Path(f"/proc/{broker.process_id}/cmdline").read_bytes().split(b"\0")


def test_what_a_fork_cannot_have_is_a_new_interpreter() -> None:
    with Broker(environment={"OTEL_SERVICE_NAME": "x"}) as broker:
        assert not is_warm(broker.process_id)
        assert parent_of(broker.process_id) == os.getpid()
    with Broker(environment={"PROTOMQ_REGISTER_INTERVAL_MS": "9s"}) as broker:
        assert is_warm(broker.process_id)


def test_an_orphan_of_a_broker_is_not_adopted() -> None:
    # The process asks to be the next parent only while it takes a fork.
    program = "import os, time\nif os.fork():\n    os._exit(0)\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    with Broker(), subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        process.wait()
        assert parent_of(orphan) != os.getpid()
        os.kill(orphan, signal.SIGKILL)
