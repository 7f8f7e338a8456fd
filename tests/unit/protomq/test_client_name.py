"""What clients are called: containers are alike in host and process, and their clients are not."""

from __future__ import annotations

import pytest

from protomq import _forks
from protomq._client_name import client_name


def test_two_containers_with_one_host_name_and_one_process_id_have_clients_of_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "app")
    monkeypatch.setattr("os.getpid", lambda: 1)
    names = [client_name("")() for _ in range(100)]
    assert all(name.startswith("app@1@") for name in names)
    assert len(set(names)) == 100


def test_a_client_keeps_its_name_and_a_forked_child_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    name = client_name("")
    before = name()
    assert name() == before
    monkeypatch.setattr(_forks, "fork_count", _forks.fork_count + 1)
    assert name() != before
    assert name() == name()


def test_a_name_that_is_wished_for_stays() -> None:
    assert client_name("desk-7")() == "desk-7"
