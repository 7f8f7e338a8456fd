"""What systemd is told: a datagram to the socket that it names, and nothing where it names none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from protomq_runtime.service_manager import READY, STOPPING, VARIABLE, notify


@pytest.fixture(params=["file", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    name = str(tmp_path / "notify") if request.param == "file" else f"@protomq-{tmp_path.name}"
    monkeypatch.setenv(VARIABLE, name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0", 1))
        receiver.settimeout(5)
        yield receiver


def test_the_manager_gets_what_is_said(manager: socket.socket) -> None:
    notify(READY)
    notify(STOPPING)
    assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"STOPPING=1"]


def test_nothing_is_said_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(socket, "socket", None)
    notify(READY)


def test_a_manager_that_is_gone_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nobody"))
    notify(READY)
    assert "cannot be told READY=1" in caplog.text
