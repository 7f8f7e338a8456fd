"""Two brokers that have one name, as two with the default have on one host: real processes, real name servers."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from protomq._methods import GET_BROKER_STATUS
from protomq._transport import SyncTransport
from protomq.errors import ProtomqError
from protomq.v1.admin_service_pb2 import GetBrokerStatusResponse
from tests.support.named_brokers import NAME, REFUSED, routed_to, running, start
from tests.support.namesrv import Namesrv, running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for


def refusal_of(folder: Path, *namesrv: object) -> str:
    """The last line of a broker that does not start for its name, which says it once."""
    with start(folder, *namesrv) as process:
        try:
            out, log = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, out) == (REFUSED, "")
    assert log.count("belongs to the broker at") == 1
    return log.splitlines()[-1]


@pytest.fixture
def namesrv() -> Iterator[Namesrv]:
    with running_namesrv() as server:
        yield server


def wait_until(condition: Callable[[], object]) -> None:
    """No answer is none yet."""

    def is_so() -> object:
        try:
            return condition()
        except ProtomqError:
            return False

    wait_for(is_so)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("port", ["grpc", "remoting"])
def test_a_second_broker_of_a_name_does_not_start(
    namesrv: Namesrv, tmp_path: Path, port: str
) -> None:
    with running(tmp_path / "first", namesrv.remoting) as first:
        wait_until(lambda: routed_to(namesrv) == [first.address.remoting_address])
        told = refusal_of(tmp_path / "second", getattr(namesrv, port))
        assert f"the name {NAME} (id 0) belongs to the broker at {first.address.grpc_address}" in told
        assert "Give this broker a broker_name of its own, or stop the other one" in told
        assert routed_to(namesrv) == [first.address.remoting_address]
        assert first.takes_sends()


@pytest.mark.slow
def test_one_name_server_that_knows_the_first_is_enough(namesrv: Namesrv, tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with running_namesrv() as forgetful, running(tmp_path / "first", namesrv.remoting):
        assert refusal_of(tmp_path / "second", nobody, forgetful.remoting, namesrv.remoting)
        wait_until(lambda: routed_to(forgetful) == [])  # where it was taken, it has gone again


@pytest.mark.slow
def test_a_killed_broker_comes_back_at_once_to_its_name(namesrv: Namesrv, tmp_path: Path) -> None:
    with running(tmp_path / "only", namesrv.remoting) as first:
        first.process.kill()
        first.process.wait()
        with running(tmp_path / "only", namesrv.remoting) as again:
            assert routed_to(namesrv) == [again.address.remoting_address]
            assert again.takes_sends()


@pytest.mark.slow
def test_a_copy_of_a_running_store_does_not_start_under_its_name(namesrv: Namesrv, tmp_path: Path) -> None:
    with running(tmp_path / "first", namesrv.remoting) as first:
        assert first.takes_sends()
        shutil.copytree(tmp_path / "first", tmp_path / "copy")
        for _ in range(2):
            told = refusal_of(tmp_path / "copy", namesrv.remoting)
            assert f"belongs to the broker at {first.address.grpc_address}, which has a store of the same number" in told
            assert routed_to(namesrv) == [first.address.remoting_address]
            assert first.takes_sends()
        first.process.kill()
        first.process.wait()
        # Now it is as if the store had moved to another machine.
        with running(tmp_path / "copy", namesrv.remoting) as copy:
            assert routed_to(namesrv) == [copy.address.remoting_address]


@pytest.mark.slow
@pytest.mark.parametrize("port", ["grpc", "remoting"])
def test_a_broker_with_a_new_disk_waits_for_the_name_of_the_one_that_was_killed(
    namesrv: Namesrv, tmp_path: Path, port: str
) -> None:
    address = getattr(namesrv, port)
    with running(tmp_path / "first", address) as first:
        first.process.kill()
        first.process.wait()
        with running(tmp_path / "second", address) as second:
            assert routed_to(namesrv) == [second.address.remoting_address]
            assert second.takes_sends()


@pytest.mark.slow
@pytest.mark.parametrize("port", ["grpc", "remoting"])
def test_brokers_that_were_killed_move_to_another_cluster(namesrv: Namesrv, tmp_path: Path, port: str) -> None:
    address = getattr(namesrv, port)
    slave = {"broker_role": "SLAVE", "broker_id": 1}
    with (
        running(tmp_path / "first", address, cluster="c") as first,
        running(tmp_path / "second", address, cluster="c", **slave) as second,
    ):
        for broker in (first, second):
            broker.process.kill()
            broker.process.wait()
        # The name server still has both; each is the other's stray.
        with (
            running(tmp_path / "first", address, cluster="d") as moved,
            running(tmp_path / "second", address, cluster="d", **slave) as follower,
        ):
            assert set(routed_to(namesrv)) == {moved.address.remoting_address, follower.address.remoting_address}
            assert moved.takes_sends()


@pytest.mark.slow
def test_who_lost_its_name_while_it_was_away_takes_no_sends_until_it_is_free(
    tmp_path: Path,
) -> None:
    with (
        running_namesrv(newcomer=0) as namesrv,
        running(tmp_path / "first", namesrv.remoting) as first,
    ):
        assert first.takes_sends()
        first.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: routed_to(namesrv) == [])
        with running(tmp_path / "second", namesrv.remoting) as second:
            assert routed_to(namesrv) == [second.address.remoting_address]
            first.process.send_signal(signal.SIGCONT)
            wait_until(lambda: not first.takes_sends())
            assert routed_to(namesrv) == [second.address.remoting_address]
            assert second.takes_sends()
            with SyncTransport() as caller:
                answer = caller.call(first.address, GET_BROKER_STATUS, [b""], PATIENCE_S)
            assert "belongs to the broker at" in GetBrokerStatusResponse.FromString(answer).write_refusal
            second.process.send_signal(signal.SIGTERM)
            assert second.process.wait(PATIENCE_S) == 0
        wait_until(first.takes_sends)
        assert routed_to(namesrv) == [first.address.remoting_address]


@pytest.mark.slow
def test_after_a_restart_of_the_name_server_the_name_is_the_first_ones(tmp_path: Path) -> None:
    with ExitStack() as stack:
        grpc_port, remoting_port = free_port(), free_port()
        with running_namesrv(grpc_port, remoting_port) as server:
            first = stack.enter_context(running(tmp_path / "first", server.remoting))
        second = stack.enter_context(running(tmp_path / "second", server.remoting))
        assert second.takes_sends()  # nobody can tell it: only a client that has its address can reach it
        again = stack.enter_context(running_namesrv(grpc_port, remoting_port))
        wait_until(lambda: not second.takes_sends())
        assert first.takes_sends()
        wait_until(lambda: routed_to(again) == [first.address.remoting_address])
