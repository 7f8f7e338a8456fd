"""Mistakes and shortages that ended in an error of Python's own, or in advice that nobody could follow."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from protomq import AsyncPullConsumer, PullConsumer, _methods
from protomq._async_push_consumer import AsyncListenedConsumer
from protomq._member_thread import MemberThread
from protomq._membership_logic import MembershipState
from protomq._open_consumers import uncommitted_text
from protomq._pull_multiplexer import PullMultiplexer
from protomq._push_consumer import ListenedConsumer
from protomq._transport import SyncTransport
from protomq._transport_options import TransportOptions
from protomq.allocation import Average
from protomq.errors import ConfigurationError, ConnectFailedError
from protomq.testing import Broker, BrokerStartError


@pytest.mark.parametrize("client", [PullConsumer, AsyncPullConsumer])
@pytest.mark.parametrize("settings", [{}, {"group": "g", "broadcasting": True}])
def test_queues_that_are_not_shared_are_not_locked(client: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"lock_queues .* share"):
        client(lock_queues=True, **settings)
    client("g", lock_queues=True)


@pytest.mark.parametrize("what", ["namesrv", "grpc_address", "remoting_address", "data_dir", "process_id"])
def test_a_broker_that_does_not_run_says_so(what: str) -> None:
    with pytest.raises(RuntimeError, match=r"the broker (has not been started|does not run)"):
        getattr(Broker(), what)


def test_a_data_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises(BrokerStartError, match=f"data_dir {path} cannot be used: .*(exists|directory)"):
            Broker(data_dir=path).start()
    assert file.read_text() == "mine"


@pytest.mark.parametrize("place", ["selectors.DefaultSelector", "socket.socketpair"])
def test_a_consumer_that_gets_no_descriptors_says_so_and_keeps_none(place: str) -> None:
    transport = SyncTransport(TransportOptions())
    before = len(os.listdir("/proc/self/fd"))
    with mock.patch(f"protomq._pull_multiplexer.{place}", side_effect=OSError(errno.EMFILE, "Too many open files")):
        with pytest.raises(ConnectFailedError, match="Too many open files") as raised:
            PullMultiplexer(transport, _methods.PULL)
        assert isinstance(raised.value.__cause__, OSError)
        with pytest.raises(ConnectFailedError, match="Too many open files"):
            MemberThread(MembershipState("g", "m", Average()), transport, lambda: None).poke()
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_was_not_ended_is_told_by_what_to_end_it() -> None:
    assert "call close()" in uncommitted_text(PullConsumer("g"), 1, "the interpreter ended")
    for client in (ListenedConsumer, AsyncListenedConsumer):
        text = uncommitted_text(client("g"), 1, "the interpreter ended")
        assert "the consumer was not stopped; use `with`, or call stop()" in text
        assert "close()" not in text
