"""Calls that brokers hold, which their client ends."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

from protomq import _methods
from protomq._remoting_sync import Connection, ConnectionPool
from protomq._transport_options import TransportOptions
from protomq.errors import ClosedError


def test_a_held_call_that_is_ended_as_its_answer_comes_leaves_no_dead_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ConnectionPool("127.0.0.1:1", 3, TransportOptions())
    connection = mock.Mock(spec=Connection)

    def answer(*_: object) -> tuple[int, bytes]:
        pool.end_held({threading.get_ident()})
        return 0, b"answer"

    connection.exchange = answer
    monkeypatch.setattr(ConnectionPool, "_open", lambda *_: connection)
    with pytest.raises(ClosedError):
        pool.call(_methods.WAIT_FOR_CHECKS, [b""], 1.0, False)
    connection.interrupt.assert_called_once()
    connection.close.assert_called_once()
    assert not pool._idle
