"""Replication over a slow link, with real processes: parts of the log fit what the link gives, so no session ends, and none is silent."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from protomq.testing import FaultProxy
from protomq.v1.send_service_pb2 import SendStatus
from tests.support.ha_brokers import HaBroker, pair, running
from tests.support.waiting import wait_for

TIMEOUT_MS = 2_000
STORE = {"segment_size_bytes": 32 << 20}
MIB = 1 << 20


@contextmanager
def linked(
    folder: Path, role: str, link: FaultProxy, stored_mib: int = 0, timeout_ms: int = TIMEOUT_MS
) -> Iterator[tuple[HaBroker, HaBroker]]:
    """A master that has stored so much, and its slave, which follows through the link."""
    settings = {"heartbeat_interval_ms": 500, "timeout_ms": timeout_ms, "sync_timeout_ms": 60_000}
    master, slave = pair(folder, role, settings, store=STORE)
    with running(master):
        for _ in range(stored_mib):
            master.send(*[bytes(1 << 10)] * (1 << 10))
        link.target = master.address.remoting_address
        slave.configure(ha=settings | {"master": link.address})
        try:
            slave.start()
            yield master, slave
        finally:
            slave.kill()


def sessions(master: HaBroker) -> int:
    """Sessions of slaves that it has begun."""
    return master.log_text().count("follows from position")


def has_written(master: HaBroker, position: int) -> bool:
    """Whether its log reaches that far."""
    return master.status().end_position >= position


def longest_silence_ms(master: HaBroker, is_over: Callable[[], bool]) -> int:
    """Of the slave, as its master sees it."""
    longest_ms = 0

    def look() -> bool:
        nonlocal longest_ms
        longest_ms = max([longest_ms, *(replica.silence_ms for replica in master.status().replicas)])
        return is_over()

    wait_for(look)
    return longest_ms


def test_an_empty_slave_catches_up_over_a_slow_link_in_one_session(tmp_path: Path) -> None:
    """4 MiB take longer there than the time after which a silence ends a session."""
    with FaultProxy() as link:
        link.set(rate_bytes_per_s=1_500_000)
        with linked(tmp_path, "ASYNC_MASTER", link, stored_mib=20) as (master, slave):
            assert master.status().end_position > 20 * MIB
            silence_ms = longest_silence_ms(master, lambda: slave.has_all_of(master))
            assert sessions(master) == 1
            assert silence_ms < TIMEOUT_MS


def test_a_link_that_gets_slow_under_large_parts_ends_no_session(tmp_path: Path) -> None:
    with FaultProxy() as link, linked(tmp_path, "ASYNC_MASTER", link, stored_mib=20) as (master, slave):
        slave.wait_for_all_of(master)
        link.set(rate_bytes_per_s=400_000)
        master.send_ok(*[bytes(1 << 10)] * (3 << 10))
        silence_ms = longest_silence_ms(master, lambda: slave.has_all_of(master))
        assert sessions(master) == 1
        assert silence_ms < TIMEOUT_MS


def test_sends_behind_others_on_a_slow_link_are_confirmed_part_by_part(tmp_path: Path) -> None:
    count, size_bytes = 32, 32 << 10
    with FaultProxy() as link:
        link.set(rate_bytes_per_s=200_000)
        with linked(tmp_path, "SYNC_MASTER", link, timeout_ms=20_000) as (master, _), ThreadPoolExecutor(count) as callers:
            wait_for(lambda: master.status().in_sync_count == 2)
            sends = []
            # A slave acknowledges what one seal closes as a whole: sends that the master writes together would be confirmed together.
            for _ in range(count):
                written_position = master.status().end_position + size_bytes
                sends.append(callers.submit(master.send, bytes(size_bytes)))
                wait_for(partial(has_written, master, written_position))
            confirmed = [master.status().confirmed_position]
            while not all(send.done() for send in sends):
                confirmed.append(master.status().confirmed_position)
                time.sleep(0.01)
            confirmed.append(master.status().confirmed_position)
            assert {send.result().status for send in sends} == {SendStatus.SEND_STATUS_SEND_OK}
            steps = [after - before for before, after in itertools.pairwise(confirmed)]
            assert sum(steps) > (count - 4) * size_bytes
            assert max(steps) <= 6 * size_bytes, "half a second of this link, and the ends of two sends"
            assert sessions(master) == 1
