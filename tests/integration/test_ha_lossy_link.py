"""Replication over a link that loses 1 % of what it is given, 2 and 50 ms long: the slave follows, sends are confirmed, no session ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from protomq.testing import FaultProxy
from protomq.v1.send_service_pb2 import SendStatus
from tests.support.ha_brokers import HaBroker, pair, running
from tests.support.vanishing_network import VanishingNetwork, why_no_netem
from tests.support.waiting import wait_for

CALLERS = 16
SENDS_MAX = 4_000
LOSSES = 3
BODY = bytes(1 << 10)
DELAYS_S = (0.002, 0.05)


@contextmanager
def linked(folder: Path, link: FaultProxy, host: str = "127.0.0.1") -> Iterator[tuple[HaBroker, HaBroker]]:
    """A SYNC_MASTER, which the link reaches at `host`, and its slave, which has everything. Time-outs are those of an elected one."""
    ha = {"heartbeat_interval_ms": 500, "timeout_ms": 3_000, "sync_timeout_ms": 10_000}
    master, slave = pair(folder, "SYNC_MASTER", ha)
    master.listen(host=host)
    with running(master):
        link.target = f"{host}:{master.address.remoting_address.rpartition(':')[2]}"
        slave.configure(ha=ha | {"master": link.address})
        try:
            slave.start()
            wait_for(lambda: master.status().in_sync_count == 2)
            yield master, slave
        finally:
            slave.kill()


def statuses_of_sends(master: HaBroker, is_enough: Callable[[], bool]) -> set[int]:
    """Of sends by callers that wait for each answer, until it is enough."""

    def send(number: int) -> int:
        return SendStatus.SEND_STATUS_SEND_OK if is_enough() else master.send(BODY).status

    with ThreadPoolExecutor(CALLERS) as callers:
        return set(callers.map(send, range(SENDS_MAX)))


def check(master: HaBroker, slave: HaBroker, statuses: set[int]) -> None:
    """Everything was confirmed, the slave has it, and all of it came in one session."""
    assert statuses == {SendStatus.SEND_STATUS_SEND_OK}
    slave.wait_for_all_of(master)
    end = master.status().end_position
    assert slave.log_bytes(end) == master.log_bytes(end)
    assert master.log_text().count("follows from position") == 1
    assert master.status().in_sync_count == 2


@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_a_slave_follows_over_a_link_that_loses_one_percent(tmp_path: Path, delay_s: float) -> None:
    """A loss stalls what is behind it, as TCP does: 200 ms and a round trip."""
    with FaultProxy(seed=7) as link, linked(tmp_path, link) as (master, slave):
        link.set(delay_s=delay_s, loss_probability=0.01)
        statuses = statuses_of_sends(master, lambda: link.losses >= LOSSES)
        assert link.losses >= LOSSES
        check(master, slave, statuses)


@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_a_slave_follows_over_a_link_of_the_kernel_that_loses_one_percent(tmp_path: Path, delay_s: float) -> None:
    """The same with tc netem, which loses packets of 1,500 bytes."""
    if reason := why_no_netem():
        pytest.skip(reason)
    with VanishingNetwork() as network:

        class Inside(FaultProxy):
            """It takes connections here, and makes its own in the namespace, at the other end of the bad link."""

            def _accept(self) -> None:
                network.enter()
                super()._accept()

        with Inside() as link, linked(tmp_path, link, network.outside) as (master, slave):
            network.spoil(1_000 * delay_s, 1.0)
            statuses = statuses_of_sends(master, lambda: slave.status().end_position > 500 * len(BODY))
            check(master, slave, statuses)
