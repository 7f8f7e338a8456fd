"""The supervisor of shards: whoever is told when."""

import io
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from protomq_cli import shards


class Child:
    """Ends when it is told to."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.stdout = io.StringIO()

    def poll(self) -> int | None:
        return 0 if self.told else None

    def send_signal(self, number: int) -> None:
        self.told.append(number)

    def wait(self) -> int:
        assert self.told, "nobody told it, so this waits for ever"
        return 0


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return []


def supervisor(
    monkeypatch: pytest.MonkeyPatch, children: list[Child], on_start: Callable[[], None]
) -> shards._Supervisor:
    def start(*_: object, **__: object) -> Child:
        child = Child()
        children.append(child)
        on_start()
        return child

    monkeypatch.setattr(subprocess, "Popen", start)
    return shards._Supervisor(Path("broker.yaml"), 3)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_stop_while_shards_are_started_reaches_all_once(
    monkeypatch: pytest.MonkeyPatch, children: list[Child], at: int
) -> None:
    def stop() -> None:
        if len(children) == at:
            run._on_signal(signal.SIGTERM, None)

    run = supervisor(monkeypatch, children, stop)
    assert run.run() == 0
    assert [child.told for child in children] == [[signal.SIGTERM]] * at


def test_a_second_interrupt_is_passed_on_and_a_second_sigterm_is_not(
    monkeypatch: pytest.MonkeyPatch, children: list[Child]
) -> None:
    run = supervisor(monkeypatch, children, lambda: None)
    monkeypatch.setattr(Child, "poll", lambda _: None)

    def interrupted() -> list[str]:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            run._on_signal(number, None)
        return []

    monkeypatch.setattr(run, "_wait_ready", interrupted)
    assert run.run() == 0
    assert [child.told for child in children] == [[signal.SIGTERM, signal.SIGINT]] * 3
