"""The benchmark of workers: what its listeners count is its result; a run without messages, or without enough, is none. No server."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench import computing
from tests.bench.loads import workers

WORKER = """#!{python}
import os, time
path = os.environ["COMPUTING_LISTENER"].split(",")[-1]
for number in range(1, 1_000):
    with open(path, "r+b") as file:
        file.write(b"".join(({step} * number).to_bytes(8, "little") for _ in range(2)))
    time.sleep(0.01)
"""
"""Two processes, each of which does `step` messages each 10 ms."""


@pytest.fixture
def worker_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(step: int) -> None:
        path = tmp_path / "worker"
        path.write_text(WORKER.format(python=sys.executable, step=step))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(workers, "program", lambda: str(path))

    return put


def compute(messages: int) -> float:
    return workers.compute("127.0.0.1:1", "t", "g", 2, messages, 0.01, 0.2, 0.0, ()).messages


def test_all_processes_count(worker_of: Any) -> None:
    worker_of(1)
    assert 2 <= compute(1_000_000) <= 42


def test_too_few_messages_are_no_result(worker_of: Any) -> None:
    worker_of(500)
    with pytest.raises(RuntimeError, match="1000 messages did not last"):
        compute(1_000)


def test_a_process_without_messages_is_no_result(worker_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE_S", 0.3)
    worker_of(0)
    with pytest.raises(RuntimeError, match="gets no messages"):
        compute(1_000)


def test_the_listener_counts_in_the_place_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, listeners, steps = tmp_path / "counts", list[Any](), list[int]()
    path.write_bytes(bytes(2 * computing.COUNT.size))
    consumer = SimpleNamespace(subscribe=lambda topic, listener: listeners.append(listener))
    monkeypatch.setattr(computing, "PushConsumer", lambda group, namesrv: consumer)
    monkeypatch.setattr(computing, "compute", steps.append)
    monkeypatch.setenv("COMPUTING_LISTENER", f"127.0.0.1:1,t,g,70,{path}")
    monkeypatch.setenv("PROTOMQ_WORKER_PROCESS", "1")
    computing.make()
    for _ in range(3):
        listeners[0](None)
    assert (path.read_bytes(), steps) == (computing.COUNT.pack(0) + computing.COUNT.pack(3), [70, 70, 70])
