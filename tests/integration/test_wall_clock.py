"""A broker whose wall clock somebody sets, as a process."""

from __future__ import annotations

from pathlib import Path

from protomq import Producer, SendStatus
from tests.chaos.stepped_clock import SteppedClock
from tests.support.ha_brokers import HaBroker, running
from tests.support.namesrv import running_namesrv

HOUR_S = 3_600.0
SOON_S = 20.0
"""A name server remembers a broker that is gone for two minutes."""


def test_name_servers_take_a_broker_that_starts_with_a_clock_that_was_set_back(tmp_path: Path) -> None:
    clock = SteppedClock(tmp_path / "clock")
    with running_namesrv() as namesrv:
        broker = HaBroker(tmp_path / "broker", "ASYNC_MASTER", 0, clock.environment, namesrv=[str(namesrv.remoting)])
        with running(broker):
            for offset_s in (HOUR_S, 0.0, -HOUR_S):
                broker.kill()
                clock.set(offset_s)
                broker.start()
                # One that had sent before would know where the broker is.
                with Producer(namesrv=str(namesrv.remoting), send_timeout_s=SOON_S) as producer:
                    assert producer.send("orders", b"x").status is SendStatus.SEND_OK
