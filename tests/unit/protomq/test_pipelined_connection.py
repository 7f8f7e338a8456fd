"""Many calls on one connection, read by whoever waits for them: over a pair of sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from protomq._byte_streams import TcpStream
from protomq._remoting_sync import PipelinedConnection
from protomq.errors import ConnectionLostError, ProtocolError
from protomq.wire.frames import encode_answer

POP = 0x0A01


@pytest.fixture
def ends() -> Iterator[tuple[PipelinedConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = PipelinedConnection(TcpStream(ours), "peer")
    with theirs:
        yield connection, theirs
    connection.close()


def answer(request_id: int, payload: bytes) -> bytes:
    return encode_answer(request_id, POP, len(payload)) + payload


@pytest.mark.parametrize("begun", [b"", answer(3, b"lost")[:7], answer(3, b"lost")[:-1]])
def test_what_a_server_has_answered_before_it_closes_is_not_lost(ends: tuple[PipelinedConnection, socket.socket], begun: bytes) -> None:
    """The messages of a pop would be nobody's until their invisible time is over."""
    connection, server = ends
    server.sendall(answer(1, b"one") + answer(2, b"two") + begun)
    server.shutdown(socket.SHUT_WR)
    assert connection.receive(1 << 20) == [(1, 0, b"one"), (2, 0, b"two")]
    for _ in range(2):
        with pytest.raises(ConnectionLostError):
            connection.receive(1 << 20)


def test_what_comes_before_an_answer_that_cannot_be_understood_is_not_lost(ends: tuple[PipelinedConnection, socket.socket]) -> None:
    connection, server = ends
    server.sendall(answer(1, b"one") + bytes(20))
    assert connection.receive(1 << 20) == [(1, 0, b"one")]
    for _ in range(2):
        with pytest.raises(ProtocolError):
            connection.receive(1 << 20)
