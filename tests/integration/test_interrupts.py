"""Signals at any moment of any call of a client: what their handlers raise is heard, and the next calls, and other threads', go on."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from protomq import Producer, PullConsumer, SimpleConsumer, _methods
from protomq.testing import Broker
from tests.support.fake_server import FakeServer

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "TimeoutError"])
def test_a_storm_of_interrupts_leaves_every_client_working(protomq_server: Broker, protomq_topic: str, error: str) -> None:
    command = [sys.executable, "-m", "tests.support.interrupted_client", protomq_server.namesrv, protomq_topic, "8", error]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"interrupted (\d+) times", ended.stdout)
    assert found is not None
    assert int(found[1]) > 20


@pytest.fixture
def silent_server() -> Iterator[FakeServer]:
    with FakeServer({"t": 1}) as server:
        for method in (_methods.SEND, _methods.POP, _methods.PULL):
            server.stall(method, 9)
        yield server


@pytest.fixture
def alarm_after() -> Iterator[Callable[[type[Exception]], None]]:
    """Has a signal handler raise such an error soon, in the main thread."""
    main, timers = threading.main_thread().ident, []
    assert main is not None
    before = signal.getsignal(signal.SIGUSR1)

    def ring(error: type[Exception]) -> None:
        def raise_it(_: int, __: FrameType | None) -> None:
            raise error("alarm")

        signal.signal(signal.SIGUSR1, raise_it)
        timers.append(threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGUSR1)))
        timers[-1].start()

    yield ring
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError])
def test_the_error_of_an_alarm_is_for_the_program_and_no_fault_of_the_network(
    silent_server: FakeServer, alarm_after: Callable[[type[Exception]], None], error: type[Exception]
) -> None:
    namesrv = silent_server.address
    with Producer(namesrv=namesrv) as producer, SimpleConsumer("g", namesrv=namesrv) as simple, PullConsumer(namesrv=namesrv) as puller:
        puller.subscribe("t")
        calls: list[Callable[[], object]] = [
            lambda: producer.send("t", b"x"),
            lambda: producer.send_batch("t", [b"x"]),
            lambda: simple.receive("t", hold_s=2.0),
            lambda: puller.poll(2.0),
        ]
        for call in calls:
            alarm_after(error)
            with pytest.raises(error, match="alarm"):
                call()
