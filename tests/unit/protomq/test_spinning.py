"""When calls spin: only while that is of use, and never on one core."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from protomq import Admin, AsyncProducer, AsyncPullConsumer, Producer, PullConsumer
from protomq._byte_streams import TcpStream
from protomq._methods import PING, SEND
from protomq._remoting_sync import Connection
from protomq._spinning import (
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    SPIN_MAX_S,
    TAKEN_AWAY_S,
    Spinning,
    cores,
)
from protomq.errors import ConnectionLostError, RequestTimeoutError
from protomq.wire.frames import FLAG_ANSWER, HEADER, HEADER_SIZE_BYTES, LENGTH_SIZE_BYTES


def test_failures_make_pauses_that_grow_and_successes_shorten_them() -> None:
    spinning = Spinning(2)
    now_s, pauses = 10.0, []
    for _ in range(8):
        assert spinning.is_worth_it(now_s)
        spinning.failed(now_s)
        pause_s = PAUSE_MIN_S
        while not spinning.is_worth_it(now_s + pause_s):
            pause_s *= 2
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses[0] == PAUSE_MIN_S
    assert pauses == sorted(pauses)
    assert pauses[-1] >= PAUSE_MAX_S
    for _ in range(20):
        spinning.succeeded()
    spinning.failed(now_s)
    assert spinning.is_worth_it(now_s + PAUSE_MIN_S)
    assert not spinning.is_worth_it(now_s + PAUSE_MIN_S / 2)


def test_on_one_core_nobody_spins() -> None:
    assert not Spinning(1).is_worth_it(1e12)
    assert cores() >= 1


class Peer:
    """A socket pair: a Connection, and what answers it. Counts how often it looked without waiting."""

    def __init__(self) -> None:
        here, self.there = socket.socketpair()
        self.looks = 0
        peer = self

        class Counting(socket.socket):
            def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
                peer.looks += bool(flags & socket.MSG_DONTWAIT)
                return super().recv_into(buffer, size, flags)

        self.connection = Connection(TcpStream(Counting(fileno=here.detach())), "peer")
        self.connection._spinning = Spinning(2)

    def answer(self, payload: bytes, delay_s: float) -> None:
        header = self.there.recv(HEADER_SIZE_BYTES, socket.MSG_WAITALL)
        length, request_id, method_id, _, _, _ = HEADER.unpack(header)
        self.there.recv(length + LENGTH_SIZE_BYTES - HEADER_SIZE_BYTES, socket.MSG_WAITALL)
        time.sleep(delay_s)
        size = HEADER_SIZE_BYTES - LENGTH_SIZE_BYTES + len(payload)
        self.there.sendall(HEADER.pack(size, request_id, method_id, FLAG_ANSWER, 0, 0) + payload)

    def call(self, payload: bytes, delay_s: float, timeout_s: float = 5.0) -> bytes:
        thread = threading.Thread(target=self.answer, args=(payload, delay_s))
        thread.start()
        try:
            return self.connection.exchange(PING, (b"request",), timeout_s, False)[1]
        finally:
            thread.join(60)


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.connection.close()
    made.there.close()


@pytest.mark.parametrize("delay_s", [0.0, SPIN_MAX_S / 2, 0.05])
@pytest.mark.parametrize("size", [0, 31, 5000])
def test_answers_are_whole_whenever_they_come(peer: Peer, delay_s: float, size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    for _ in range(5):
        assert peer.call(payload, delay_s) == payload


def test_a_peer_that_is_far_away_is_not_spun_for(peer: Peer) -> None:
    spinning_calls = 0
    for _ in range(30):
        before = peer.looks
        peer.call(b"late", 0.02)
        spinning_calls += peer.looks > before
    assert 1 <= spinning_calls <= 10
    assert TAKEN_AWAY_S < SPIN_MAX_S


def test_ends_and_time_outs_are_told_while_it_spins(peer: Peer) -> None:
    with pytest.raises(RequestTimeoutError):
        peer.connection.exchange(SEND, (b"request",), 0.01, False)
    peer.connection._spinning = Spinning(2)
    peer.there.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionLostError):
        peer.connection.exchange(SEND, (b"request",), 1.0, False)


def test_who_wants_no_spinning_gets_none() -> None:
    mine, theirs = socket.socketpair()
    with theirs:
        connection = Connection(TcpStream(mine), "nowhere", spin=False)
        assert not connection._spinning.is_worth_it(time.monotonic())
        connection.close()


def test_every_client_that_blocks_can_be_told_not_to_spin() -> None:
    for client in (Producer, PullConsumer, Admin):
        with client(spin=False, peer_timeout_s=30) as made:
            options = made._transport.options
            assert (options.spin, options.peer_timeout_s) == (False, 30)
    for coroutines in (AsyncProducer, AsyncPullConsumer):
        assert coroutines(peer_timeout_s=30)._transport.options.peer_timeout_s == 30
