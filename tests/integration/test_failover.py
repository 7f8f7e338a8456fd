"""Fail-over with a real etcd and three real brokers: whatever happens to the master, what was acknowledged is there, once, in order."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from protomq import Admin
from tests.support.elected_brokers import CountingProducer, ElectedCluster, elected_cluster
from tests.support.waiting import PATIENCE_S, wait_for

LEASE_S = 3.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElectedCluster]:
    with elected_cluster(tmp_path_factory.mktemp("failover")) as running:
        yield running


@pytest.fixture
def producer(cluster: ElectedCluster) -> Iterator[CountingProducer]:
    """Checked at the end: all that it was told is stored is there, once, in order, behind what was there before."""
    cluster.wait_leading()
    before = len(cluster.bodies())
    with CountingProducer(cluster.namesrv) as sends:
        sends.wait_for_more()
        yield sends
    sends.check(cluster.bodies()[before:])


def test_kill_of_the_master(cluster: ElectedCluster, producer: CountingProducer) -> None:
    old = cluster.wait_leading()
    epoch = old.status().epoch
    old.kill()
    killed_s = time.monotonic()
    producer.wait_for_more()
    new = cluster.wait_leading(2)
    assert new is not old
    assert new.status().epoch > epoch
    print(f"time without service: {producer.longest_pause_s(killed_s):.2f} s")
    old.start()
    assert cluster.wait_leading(3) is new
    assert not producer.failures


@pytest.mark.long
def test_a_master_that_is_told_to_stop_hands_over_first(
    cluster: ElectedCluster, producer: CountingProducer
) -> None:
    old = cluster.wait_leading()
    epoch = old.status().epoch
    stopped_s = time.monotonic()
    assert old.stop() == 0
    assert "another member leads pair" in old.log_text()
    producer.wait_for_more()
    new = cluster.wait_leading(2)
    assert (new is not old, new.status().epoch) == (True, epoch + 1)
    print(f"time without service: {producer.longest_pause_s(stopped_s):.2f} s")
    old.start()
    assert cluster.wait_leading(3) is new
    assert not producer.failures


@pytest.mark.long
def test_a_master_that_is_stopped_and_wakes_up(
    cluster: ElectedCluster, producer: CountingProducer
) -> None:
    old = cluster.wait_leading()
    old.process.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        producer.wait_for_more()
        print(f"time without service: {producer.longest_pause_s(stopped_s):.2f} s")
    finally:
        old.process.send_signal(signal.SIGCONT)
    producer.wait_for_more()
    assert cluster.wait_leading(3) is not old
    assert old.status().leadership.state == "FOLLOWING"


@pytest.mark.long
def test_without_etcd_all_goes_on_and_it_is_said(
    cluster: ElectedCluster, producer: CountingProducer
) -> None:
    master = cluster.wait_leading()
    epoch = master.status().epoch
    cluster.etcd.kill()
    try:
        wait_for(lambda: bool(master.status().leadership.problems), PATIENCE_S)
        assert "etcd has not answered" in master.status().leadership.problems[0]
        killed_s = time.monotonic()
        wait_for(lambda: time.monotonic() > killed_s + 2 * LEASE_S, PATIENCE_S)
        producer.wait_for_more()
        assert producer.longest_pause_s(killed_s) < LEASE_S, "the promises of its slaves are enough"
    finally:
        cluster.etcd.start()
    wait_for(lambda: not master.status().leadership.problems, PATIENCE_S)
    assert (cluster.wait_leading(3), master.status().epoch) == (master, epoch)
    assert not producer.failures


@pytest.mark.long
def test_a_switch_loses_nothing(cluster: ElectedCluster, producer: CountingProducer) -> None:
    old = cluster.wait_leading()
    target = next(each for each in cluster.brokers if each is not old)
    begun_s = time.monotonic()
    with Admin(namesrv=cluster.namesrv) as admin:
        admin.switch_master("pair", target.status().broker_id)
    wait_for(lambda: cluster.leading() is target, PATIENCE_S)
    producer.wait_for_more()
    print(f"time without service: {producer.longest_pause_s(begun_s):.2f} s")
    assert cluster.wait_leading(3) is target
    assert not producer.failures
