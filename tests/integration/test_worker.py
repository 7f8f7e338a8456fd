"""`protomq worker` with real processes: killed ones come back, a stop drains, a replacement goes one by one; the exit code says how."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protomq import Producer
from protomq.testing import Broker
from tests.support.cli import PROTOMQ, environment_with, run
from tests.support.push import committed, send
from tests.support.waiting import PATIENCE_S, wait_for

PROGRAM = """
import os, pathlib, time
from protomq import AsyncPushConsumer, PushConsumer

FOLDER = pathlib.Path({folder!r})
consumer = PushConsumer({group!r}, namesrv={namesrv!r}, drain_timeout_s={drain})

@consumer.on({topic!r})
def listen(message):
    body = message.body.decode()
    if body == "slow":
        (FOLDER / "begun").touch()
        while not (FOLDER / "go").exists():
            time.sleep(0.01)
    with open(FOLDER / "seen", "a") as file:
        file.write(f"{{os.getpid()}} {version} {{body}}\\n")

def make():
    made = AsyncPushConsumer({group!r}, namesrv={namesrv!r})
    async def coroutine(message):
        listen(message)
    made.subscribe({topic!r}, coroutine)
    return made

def make_broadcast():
    made = PushConsumer({group!r}, namesrv={namesrv!r}, broadcast=True, begin="earliest", offset_folder=str(FOLDER / "offsets"))
    made.subscribe({topic!r}, listen)
    return made

nothing = 5
"""


class World:
    """A program in a folder of its own."""

    def __init__(self, folder: Path, broker: Broker, topic: str) -> None:
        self.folder, self.broker, self.topic, self.group = folder, broker, topic, f"g-{topic}"
        self.write()

    def write(self, version: int = 1, drain: float = 30.0, namesrv: str = "") -> None:
        """The program; a changed one is read when a process starts."""
        (self.folder / "app.py").write_text(
            PROGRAM.format(
                folder=str(self.folder), group=self.group, topic=self.topic, version=version, drain=drain,
                namesrv=namesrv or self.broker.namesrv,
            )
        )  # fmt: skip

    def seen(self) -> list[list[str]]:
        """Process, version and body of each call."""
        path = self.folder / "seen"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split() for line in lines]

    def bodies(self) -> set[bytes]:
        return {line[2].encode() for line in self.seen()}

    def bodies_of(self, pid: int) -> list[bytes]:
        """What one process was given, sorted."""
        return sorted(line[2].encode() for line in self.seen() if line[0] == str(pid))

    @contextmanager
    def worker(self, *arguments: str, target: str = "app:consumer") -> Iterator[Worker]:
        """A supervisor; it and its processes are killed in the end."""
        running = Worker(self.folder, target, arguments)
        try:
            yield running
        finally:
            running.popen.kill()
            running.popen.wait()
            running.reader.join()


class Worker:
    """A supervisor that runs, and what it said."""

    def __init__(self, folder: Path, target: str, arguments: tuple[str, ...]) -> None:
        environment = {**environment_with(""), "PYTHONDONTWRITEBYTECODE": "1"}
        self.popen = subprocess.Popen(
            [*PROTOMQ, "worker", target, *arguments],
            cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.is_deaf = False
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as stderr:
            for line in stderr:
                self.lines.append(line.rstrip("\n"))
                if self.is_deaf:
                    return

    def close_stderr(self) -> None:
        """Whoever reads its lines ends with the next one."""
        self.is_deaf = True
        self.reader.join()

    def find(self, pattern: str) -> list[re.Match[str]]:
        return [match for line in list(self.lines) if (match := re.search(pattern, line))]

    def wait_ready(self, count: int) -> list[int]:
        """The processes, once so many have been ready."""
        pattern = r"worker \d+, process (\d+), is ready"
        wait_for(lambda: len(self.find(pattern)) >= count, PATIENCE_S)
        return [int(match[1]) for match in self.find(pattern)]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(PATIENCE_S)


@pytest.fixture
def world(tmp_path: Path, protomq_server: Broker, protomq_topic: str) -> World:
    return World(tmp_path, protomq_server, protomq_topic)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_that_is_killed_is_started_again_and_a_stop_ends_all(world: World, protomq_producer: Producer) -> None:
    with world.worker("--processes", "2", "--metrics-port", "0") as worker:
        first = worker.wait_ready(2)
        (where,) = worker.find(r"metrics at (\S+)")

        def metrics() -> str:
            with urllib.request.urlopen(where[1], timeout=PATIENCE_S) as answer:
                return str(answer.read(), "utf-8")

        def total(name: str) -> int:
            return sum(map(int, re.findall(rf'^protomq_worker_messages_{name}{{process="[01]"}} (\d+)$', metrics(), re.MULTILINE)))

        bodies = send(protomq_producer, world.topic, 50)
        wait_for(lambda: world.bodies() == set(bodies), PATIENCE_S)
        wait_for(lambda: (total("done_total"), total("open"), total("refused_total")) == (50, 0, 0), PATIENCE_S)
        protomq_producer.send(world.topic, b"slow")
        wait_for(lambda: (total("open"), total("waiting"), total("bytes") > 0) == (1, 0, True), PATIENCE_S)
        (world.folder / "go").touch()
        bodies.append(b"slow")
        os.kill(first[0], signal.SIGKILL)
        again = worker.wait_ready(3)
        assert worker.find("ended with signal 9, .* the next one starts in 1 s")
        bodies += send(protomq_producer, world.topic, 50, first=50)
        wait_for(lambda: world.bodies() == set(bodies), PATIENCE_S)
        wait_for(lambda: metrics().count('protomq_worker_up{process="') == 2, PATIENCE_S)
        assert re.search(r'protomq_worker_restarts_total\{process="[01]"\} 1', metrics())
        # What the killed process had done is in no count any more.
        done = r'protomq_worker_messages_done_total\{process="[01]"\} (\d+)'
        wait_for(lambda: sum(map(int, re.findall(done, metrics()))) >= 50, PATIENCE_S)
        assert worker.end() == 0
        assert not any(map(is_alive, again))
    assert committed(world.broker, world.group, world.topic) == 101


def test_each_process_of_a_broadcast_gets_all_and_knows_where_it_was(
    world: World, protomq_producer: Producer
) -> None:
    first = 0
    for _ in range(2):
        with world.worker("--processes", "2", target="app:make_broadcast") as worker:
            processes = worker.wait_ready(2)
            bodies = sorted(send(protomq_producer, world.topic, 10, first=first))
            wait_for(lambda: all(world.bodies_of(pid) == bodies for pid in processes), PATIENCE_S)  # noqa: B023
            assert worker.end() == 0
        first += 10


def test_a_stop_lets_a_listener_end_its_message(world: World, protomq_producer: Producer) -> None:
    with world.worker() as worker:
        (process,) = worker.wait_ready(1)
        protomq_producer.send(world.topic, b"slow")
        wait_for((world.folder / "begun").exists, PATIENCE_S)
        worker.popen.send_signal(signal.SIGINT)
        wait_for(lambda: worker.find("stopping: listeners that run may end"), PATIENCE_S)
        assert worker.popen.poll() is None
        time.sleep(1.0)
        os.kill(process, signal.SIGTERM)  # as systemd does, beside the supervisor
        (world.folder / "go").touch()
        assert worker.popen.wait(PATIENCE_S) == 0
        assert worker.find(f"worker 0, process {process}, ended with exit code 0, 1 done")
    assert world.bodies() == {b"slow"}
    assert committed(world.broker, world.group, world.topic) == 1


def test_a_listener_that_hangs_is_killed_in_the_end(world: World, protomq_producer: Producer) -> None:
    with world.worker("--stop-timeout", "300ms") as worker:
        worker.wait_ready(1)
        protomq_producer.send(world.topic, b"slow")
        wait_for((world.folder / "begun").exists, PATIENCE_S)
        assert worker.end() == 1
        assert worker.find("is not done in time: killed, what it had comes again")
    assert committed(world.broker, world.group, world.topic) == 0


@pytest.mark.parametrize("target", ["app:consumer", "app:make"])
def test_a_second_signal_waits_for_no_listener(world: World, protomq_producer: Producer, target: str) -> None:
    with world.worker("--processes", "2", "--stop-timeout", "10m", target=target) as worker:
        processes = worker.wait_ready(2)
        protomq_producer.send(world.topic, b"slow")
        wait_for((world.folder / "begun").exists, PATIENCE_S)
        worker.popen.send_signal(signal.SIGTERM)
        wait_for(lambda: worker.find("stopping: listeners that run may end"), PATIENCE_S)
        assert worker.popen.poll() is None
        assert worker.end() == 1
        assert not any(map(is_alive, processes))
    assert world.bodies() == set()
    assert committed(world.broker, world.group, world.topic) == 0


def test_a_reader_of_its_lines_that_goes_away_costs_no_process(world: World, protomq_producer: Producer) -> None:
    with world.worker("--status", "100ms") as worker:
        (process,) = worker.wait_ready(1)
        worker.close_stderr()
        bodies = send(protomq_producer, world.topic, 5)
        wait_for(lambda: world.bodies() == set(bodies), PATIENCE_S)
        worker.popen.send_signal(signal.SIGHUP)  # It has something to say.
        wait_for(lambda: not is_alive(process), PATIENCE_S)
        bodies += send(protomq_producer, world.topic, 5, first=5)
        wait_for(lambda: world.bodies() == set(bodies), PATIENCE_S)
        assert worker.end() == 0
    assert committed(world.broker, world.group, world.topic) == 10


def test_a_replacement_goes_one_by_one_with_the_new_program(world: World, protomq_producer: Producer) -> None:
    with world.worker("-p", "2") as worker:
        first = worker.wait_ready(2)
        world.write(version=2)
        worker.popen.send_signal(signal.SIGHUP)
        pids = worker.wait_ready(4)
        told = [line for line in worker.lines if re.search("is ready|ended with exit code 0", line)][2:]
        assert ["ended" in line for line in told] == [True, False, True, False]
        assert not any(map(is_alive, first))
        bodies = send(protomq_producer, world.topic, 20)
        wait_for(lambda: world.bodies() == set(bodies), PATIENCE_S)
        assert {line[1] for line in world.seen()} == {"2"}
        assert {int(line[0]) for line in world.seen()} <= set(pids[2:])
        assert worker.end() == 0


def test_a_change_of_the_source_reloads(world: World, protomq_producer: Producer) -> None:
    with world.worker("--reload") as worker:
        worker.wait_ready(1)
        world.write(version=3)
        worker.wait_ready(2)
        bodies = send(protomq_producer, world.topic, 3)
        wait_for(lambda: world.bodies() == set(bodies), PATIENCE_S)
        assert {line[1] for line in world.seen()} == {"3"}
        assert worker.end() == 0


def test_a_function_may_make_a_consumer_of_coroutines(world: World, protomq_producer: Producer) -> None:
    bodies = send(protomq_producer, world.topic, 20)
    with world.worker("--status", "200ms", target="app:make") as worker:
        wait_for(lambda: world.bodies() == set(bodies), PATIENCE_S)
        wait_for(lambda: worker.find(r"up: 20 done, 0 here, 0 of them waiting, 0 failed, 0 refused, 0 restarts"), PATIENCE_S)
        assert worker.end() == 0


def test_processes_end_when_their_supervisor_is_gone(world: World) -> None:
    with world.worker("-p", "2") as worker:
        pids = worker.wait_ready(2)
        worker.popen.kill()
        wait_for(lambda: not any(map(is_alive, pids)), PATIENCE_S)


def test_a_server_that_is_not_there_is_waited_for(world: World) -> None:
    world.write(namesrv="127.0.0.1:1")
    with world.worker() as worker:
        wait_for(lambda: len(worker.find("ended with exit code 3, 0 done; the next one starts in")) >= 2, PATIENCE_S)
        assert worker.end() == 0


def test_a_program_that_hangs_while_it_is_imported_is_killed_and_started_again(world: World) -> None:
    (world.folder / "hangs.py").write_text("import threading; threading.Event().wait()")
    with world.worker("--start-timeout", "300ms", "--stop-timeout", "20s", target="hangs:consumer") as worker:
        wait_for(lambda: len(worker.find("ended with signal 9, 0 done; the next one starts in 2 s")) >= 1, PATIENCE_S)
        assert len(worker.find("is not ready in time: killed$")) == 2
        assert worker.end() == 0


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("app", "'app' is no MODULE:NAME"),
        ("gone:consumer", "there is no module 'gone' here"),
        ("app:gone", "module 'app' has no 'gone'"),
        ("app:nothing", "app:nothing is no PushConsumer or AsyncPushConsumer, nor a function that returns one: 5"),
        ("broken:consumer", "broken:consumer cannot be loaded"),
    ],
)
def test_a_program_that_cannot_be_loaded_ends_it_with_exit_code_2(world: World, target: str, text: str) -> None:
    (world.folder / "broken.py").write_text("1 / 0")
    with world.worker(target=target) as worker:
        assert worker.popen.wait(PATIENCE_S) == 2
        worker.reader.join()
        assert worker.find(re.escape(text))


@pytest.mark.parametrize("target", ["gone:consumer", "broken:consumer"])
def test_a_full_disk_below_stderr_changes_no_exit_code(world: World, target: str) -> None:
    (world.folder / "broken.py").write_text("1 / 0")
    with Path("/dev/full").open("w") as full:
        popen = subprocess.Popen(
            [*PROTOMQ, "worker", target], cwd=world.folder, env={**environment_with(""), "PYTHONDONTWRITEBYTECODE": "1"}, stderr=full
        )
        try:
            assert popen.wait(PATIENCE_S) == 2
        finally:
            popen.kill()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("consumer.run()", "worker 0: app:consumer calls run() where it is loaded: the worker calls it itself, take that out"),
        ("import asyncio; asyncio.run(make().run())", "worker 0: app:consumer calls run() where it is loaded"),
        ("consumer.start()", "worker 0: app:consumer is started where it is made: the worker calls run() itself"),
        ("import sys; sys.exit(3)", "worker 0: app:consumer calls sys.exit(3) where it is loaded: take that out"),
    ],
)
def test_a_program_that_runs_or_ends_where_it_is_loaded_ends_it_with_exit_code_2(world: World, line: str, text: str) -> None:
    with (world.folder / "app.py").open("a") as program:
        program.write(f"\n{line}\n")
    with world.worker() as worker:
        assert worker.popen.wait(PATIENCE_S) == 2
        worker.reader.join()
        assert worker.find(re.escape(text))
        assert not worker.find("the next one starts|Traceback|is ready")


def test_the_trace_of_a_program_that_cannot_be_loaded_begins_in_the_program(world: World) -> None:
    (world.folder / "broken.py").write_text("import deeper")
    (world.folder / "deeper.py").write_text("1 / 0")
    with world.worker(target="broken:consumer") as worker:
        assert worker.popen.wait(PATIENCE_S) == 2
        worker.reader.join()
    files = [match[1] for match in worker.find(r'File ".*?([^/]+)", line')]
    assert files == ["broken.py", "deeper.py"]


def test_a_filter_that_is_none_ends_it_with_exit_code_2_and_no_restarts(world: World) -> None:
    program = (
        "from protomq import PushConsumer\n"
        f"consumer = PushConsumer('filters-badly', namesrv={world.broker.namesrv!r})\n"
        f"consumer.subscribe({world.topic!r}, print, sql='delay >')\n"
    )
    (world.folder / "badly.py").write_text(program)
    with world.worker(target="badly:consumer") as worker:
        assert worker.popen.wait(PATIENCE_S) == 2
        worker.reader.join()
        assert worker.find("SQL92 filter, line 1, column 8")
        assert not worker.find("the next one starts")


def test_a_port_that_is_taken_is_told(world: World) -> None:
    port = world.broker.remoting_address.rpartition(":")[2]
    finished = run("worker", "app:consumer", "--metrics-port", port, code=6)
    assert re.search("metrics cannot be served .*; give another --metrics-port, or 0 for a free one", finished.stderr)
    finished = run("worker", "app:consumer", "--metrics-port", "0", "--metrics-host", "nosuch.invalid", code=2)
    assert "the host 'nosuch.invalid' is not known here" in finished.stderr


def test_the_program_of_a_process_is_not_the_supervisors() -> None:
    """A supervisor that imported the SDK would cost each restart nothing, and memory."""
    code = "import sys, protomq_cli.worker; sys.exit('protomq._push_consumer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
