"""Connecting: a host name with several addresses."""

import socket
import time
from collections.abc import Iterator

import pytest

from protomq._byte_streams import open_stream
from protomq.errors import ConnectFailedError

TIMEOUT_S = 0.6


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address that answers nothing: its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, socket.socket() as first:
        first.connect(listener.getsockname())
        yield listener.getsockname()


def addresses(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    look_up = socket.getaddrinfo

    def several(host: str, port: int, *rest: int, **named: int) -> list[object]:
        found = hosts if host == "several" else (host,)
        return [entry for each in found for entry in look_up(each, port, *rest, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", several)


def test_the_time_is_shared_among_the_addresses_of_a_name(
    monkeypatch: pytest.MonkeyPatch, silent: tuple[str, int]
) -> None:
    host, port = silent
    addresses(monkeypatch, host, host, host)
    started_s = time.monotonic()
    with pytest.raises(ConnectFailedError, match=f"several:{port}: timed out"):
        open_stream(f"several:{port}", TIMEOUT_S, 30.0)
    assert TIMEOUT_S * 0.9 < time.monotonic() - started_s < TIMEOUT_S * 2


def test_a_dead_address_leaves_time_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, silent: tuple[str, int]
) -> None:
    host, port = silent
    addresses(monkeypatch, host, "127.0.0.2")
    with socket.create_server(("127.0.0.2", port)):
        started_s = time.monotonic()
        open_stream(f"several:{port}", TIMEOUT_S, 30.0).close()
        assert time.monotonic() - started_s < TIMEOUT_S


def test_an_address_of_a_family_that_the_host_has_not_leaves_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def both(_: str, port: int, *rest: int, **named: int) -> list[object]:
        (family, *entry), *others = look_up("127.0.0.1", port, *rest, **named)
        # Linux knows AF_APPLETALK by number only, as it knows AF_INET6 where that is switched off.
        return [(socket.AF_APPLETALK, *entry), (family, *entry), *others]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(socket, "getaddrinfo", both)
        open_stream(f"several:{listener.getsockname()[1]}", TIMEOUT_S, 30.0).close()
        listener.settimeout(TIMEOUT_S)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(1) == b"", "the stream was connected, and closed"
