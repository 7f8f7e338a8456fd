"""protomq.testing does what it promises: the broker fixture, the fault proxy, the fake clock."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protomq import Producer
from protomq.errors import SequenceExpiredError
from protomq.testing import Broker, BrokerStartError, FakeClock, FaultProxy
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that answers every byte with itself."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_the_test_tools_of_the_sdk_need_no_server_installed() -> None:
    script = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name in ("protomq_broker", "protomq_runtime", "protomq_namesrv", "protomq_cli"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Without())
from protomq.testing import *
import protomq.calls, protomq.records
"""
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stderr) == (0, "")


def connect(proxy: FaultProxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), 5.0)


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def test_without_faults_the_proxy_changes_nothing(echo: str) -> None:
    with FaultProxy(echo) as proxy, connect(proxy) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello"
        assert proxy.connections_accepted == 1


def test_a_connection_is_cut_after_so_many_bytes(echo: str) -> None:
    with FaultProxy(echo) as proxy:
        proxy.set(cut_after_answer_bytes=7)
        with connect(proxy) as connection:
            connection.sendall(b"0123456789")
            assert read_to_end(connection) == b"0123456"
        proxy.set(cut_after_answer_bytes=None, cut_after_request_bytes=3)
        with connect(proxy) as connection:
            connection.sendall(b"0123456789")
            assert read_to_end(connection) in (b"", b"012")


def test_answers_are_swallowed_and_cutting_ends_all(echo: str) -> None:
    with FaultProxy(echo) as proxy:
        seen = threading.Event()
        proxy.on_answer(lambda piece: seen.set())
        proxy.set(drop_answers=True)
        with connect(proxy) as connection:
            connection.sendall(b"hello")
            assert seen.wait(60)
            assert proxy.cut() == 1
            assert read_to_end(connection) == b""


def test_a_connection_is_as_slow_as_it_is_told(echo: str) -> None:
    with FaultProxy(echo) as proxy:
        proxy.set(rate_bytes_per_s=100_000)
        with connect(proxy) as connection:
            begun_s = time.monotonic()
            connection.sendall(bytes(20_000))
            received = 0
            while received < 20_000:
                received += len(connection.recv(65_536))
            assert time.monotonic() - begun_s >= 0.2
            assert received == 20_000


def test_what_is_lost_comes_as_late_as_tcp_sends_it_again(echo: str) -> None:
    with FaultProxy(echo) as proxy:
        proxy.set(loss_probability=1.0, delay_s=0.01)
        with connect(proxy) as connection:
            begun_s = time.monotonic()
            connection.sendall(b"hello")
            assert connection.recv(100) == b"hello"
            # Both ways: the delay, and 200 ms and a round trip for what was lost.
            assert time.monotonic() - begun_s >= 2 * (0.01 + 0.2 + 0.02)
            assert proxy.losses == 2


def test_new_connections_can_be_refused(echo: str) -> None:
    with FaultProxy(echo) as proxy:
        proxy.set(refuse=True)
        with connect(proxy) as connection:
            assert read_to_end(connection) == b""
        proxy.heal()
        with connect(proxy) as connection:
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"


def test_a_fake_clock_moves_when_told() -> None:
    clock = FakeClock(1000)
    clock.advance(500)
    clock.jump_wall(-2000)
    assert (clock.now_ms(), clock.monotonic_ms(), clock.monotonic()) == (-500, 500, 0.5)
    with pytest.raises(ValueError):
        clock.advance(-1)


def test_a_broker_keeps_ports_and_data_over_a_crash_and_leaves_nothing_behind() -> None:
    broker = Broker().start()
    directory, address, process_id = broker.data_dir, broker.namesrv, broker.process_id
    with Producer(namesrv=broker.namesrv) as producer:
        assert producer.send("T", b"one").queue_offset == 0
    broker.kill()
    assert not broker.running
    broker.restart()
    assert broker.namesrv == address
    assert broker.process_id != process_id
    with Producer(namesrv=broker.namesrv) as producer:
        offsets = [producer.send("T", b"two").queue_offset for _ in range(8)]
    assert sorted(offsets) == [0] * 7 + [1]
    process_id = broker.process_id
    assert broker.stop() == 0
    assert not directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_a_broker_that_died_by_itself_starts_again_and_nobody_watches_the_dead_one() -> None:
    with Broker() as broker:
        watch = broker._watch
        assert watch is not None
        os.kill(broker.process_id, signal.SIGKILL)
        wait_for(lambda: not broker.running)
        assert broker.start().running
        assert watch._shell.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_brokers_whose_test_program_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    program = """
import time
from protomq.testing import Broker
brokers = [Broker().start(), Broker(data_dir="kept").start()]
for broker in brokers:
    print(broker.process_id, broker.data_dir, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        (first, folder), (second, kept) = (killed.stdout.readline().split() for _ in range(2))
        assert all(Path("/proc", process_id).exists() for process_id in (first, second))
        killed.send_signal(number)
    wait_for(lambda: not any(Path("/proc", process_id).exists() for process_id in (first, second)))
    wait_for(lambda: not Path(folder).exists())
    assert (tmp_path / kept).exists()


@pytest.mark.parametrize("keeps_data", [True, False])
def test_a_broker_that_was_stopped_comes_back_on_its_ports_so_that_its_clients_find_it(tmp_path: Path, keeps_data: bool) -> None:
    with Broker(data_dir=tmp_path if keeps_data else None) as broker:
        addresses = [broker.namesrv, broker.grpc_address, broker.remoting_address]
        with Producer(namesrv=broker.namesrv, send_timeout_s=PATIENCE_S) as producer:
            producer.send("T", b"one", sharding_key="k")
            assert broker.stop() == 0
            assert broker.restart() is broker
            assert [broker.namesrv, broker.grpc_address, broker.remoting_address] == addresses
            if not keeps_data:
                # It is another broker then, which knows less than the producer.
                with pytest.raises(SequenceExpiredError):
                    producer.send("T", b"two", sharding_key="k")
            assert producer.send("T", b"two", sharding_key="k").queue_offset == int(keeps_data)


def test_a_broker_waits_for_a_port_that_somebody_else_has_for_a_moment() -> None:
    with Broker() as broker:
        address = broker.remoting_address
        broker.kill()
        host, _, port = address.rpartition(":")
        with socket.create_server((host, int(port))) as other, ThreadPoolExecutor() as pool:
            restart = pool.submit(broker.restart)
            wait_for(lambda: f"{port} is taken" in broker.log_text(), PATIENCE_S)
            other.close()
            restart.result()
        assert broker.remoting_address == address


async def test_a_broker_is_an_async_context_too() -> None:
    async with Broker() as broker:
        assert broker.running
        assert broker.grpc_address.startswith("127.0.0.1:")
    assert not broker.running


def test_a_broker_that_does_not_start_says_why() -> None:
    with pytest.raises(BrokerStartError, match="no-such-option"):
        Broker(arguments=["--no-such-option"]).start()


def test_a_broker_that_ends_at_its_start_says_so_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BrokerStartError, match=r"ended at its start \(exit code 2, printed ''\)"):
        Broker(environment={"PROTOMQ_BROKER_NAMES": "x"}).start()
    assert not list(tmp_path.iterdir())
