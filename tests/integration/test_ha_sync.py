"""SYNC_MASTER with real processes: a send is answered when slaves have it, or says that they have not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protomq.errors import NotEnoughReplicasError
from protomq.v1.pull_service_pb2 import PullRequest, PullStatus
from protomq.v1.pull_service_pb2_grpc import PullServiceStub
from protomq.v1.send_service_pb2 import SendStatus
from protomq_broker.confirmed_file import ConfirmedFile
from protomq_broker.store.files.disk import Disk
from tests.support.ha_brokers import TOPIC, HaBroker, follow, pair, running
from tests.support.waiting import PATIENCE_S, is_stopped, wait_for

SEND_OK = SendStatus.SEND_STATUS_SEND_OK
FLUSH_SLAVE_TIMEOUT = SendStatus.SEND_STATUS_FLUSH_SLAVE_TIMEOUT
SLAVE_NOT_AVAILABLE = SendStatus.SEND_STATUS_SLAVE_NOT_AVAILABLE
HA = {"sync_timeout_ms": 300, "heartbeat_interval_ms": 1_000, "timeout_ms": 60_000}


@pytest.fixture(scope="module", params=["ASYNC_FLUSH", "SYNC_FLUSH"])
def both(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[HaBroker, HaBroker]]:
    """A SYNC_MASTER and its slave: a start takes longer than most tests."""
    store = {"sync_flush": request.param == "SYNC_FLUSH"}
    master, slave = pair(tmp_path_factory.mktemp("pair"), "SYNC_MASTER", HA, store=store)
    with running(master):
        try:
            assert master.send(b"alone").status == SLAVE_NOT_AVAILABLE
            follow(slave, master)
            yield master, slave
        finally:
            slave.kill()


@pytest.fixture
def brokers(both: tuple[HaBroker, HaBroker]) -> tuple[HaBroker, HaBroker]:
    """Both, up and in sync, whatever the test before has done to them."""
    master, _ = both
    for broker in both:
        if not broker.is_up:
            broker.start()
    wait_for(lambda: master.send(b"probe").status == SEND_OK, PATIENCE_S)
    return both


def pulled(broker: HaBroker, offset: int) -> list[bytes]:
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        answer = PullServiceStub(channel).Pull(PullRequest(topic=TOPIC, queue_offset=offset))
        assert answer.status in (PullStatus.PULL_STATUS_FOUND, PullStatus.PULL_STATUS_NO_NEW_MSG)
        return [record.body for record in answer.records]


def test_a_slave_that_stands_still_holds_sends_and_readers_back(
    brokers: tuple[HaBroker, HaBroker],
) -> None:
    master, slave = brokers
    os.kill(slave.process.pid, signal.SIGSTOP)
    try:
        # One of its threads takes the signal, and the others go on until it has had its turn.
        wait_for(lambda: is_stopped(slave.process.pid), PATIENCE_S)
        answer = master.send(b"unconfirmed")
        assert answer.status == FLUSH_SLAVE_TIMEOUT
        # The master has it, and gives it to nobody.
        assert pulled(master, answer.queue_offset) == []
        status = master.status()
        assert status.confirmed_position < status.end_position
        assert status.in_sync_count == 2
    finally:
        os.kill(slave.process.pid, signal.SIGCONT)
    wait_for(lambda: pulled(master, answer.queue_offset) == [b"unconfirmed"], PATIENCE_S)
    wait_for(lambda: pulled(slave, answer.queue_offset) == [b"unconfirmed"], PATIENCE_S)
    wait_for(lambda: master.send(b"again").status == SEND_OK, PATIENCE_S)


def test_without_the_slave_the_master_goes_on_and_says_so(
    brokers: tuple[HaBroker, HaBroker],
) -> None:
    master, slave = brokers
    slave.kill()
    wait_for(lambda: master.status().in_sync_count == 1, PATIENCE_S)
    answer = master.send(b"on one copy")
    assert answer.status == SLAVE_NOT_AVAILABLE
    assert pulled(master, answer.queue_offset) == [b"on one copy"]
    slave.start()
    wait_for(lambda: master.send(b"back").status == SEND_OK, PATIENCE_S)
    assert pulled(slave, answer.queue_offset)[0] == b"on one copy"


def test_an_answered_send_is_on_the_slave(brokers: tuple[HaBroker, HaBroker]) -> None:
    """kill -9 of both behind the answer: the slave's files have it."""
    master, slave = brokers
    answer = master.send(b"precious " * 3)
    assert answer.status == SEND_OK
    master.kill()
    slave.kill()
    end = answer.physical_offset + 30
    assert b"precious precious precious " in slave.log_bytes(end + 200)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_slave_that_is_killed_behind_its_master_serves_what_it_served_before(tmp_path: Path, how: signal.Signals) -> None:
    """Long before the next heartbeat."""
    master, slave = pair(tmp_path, "SYNC_MASTER", HA | {"heartbeat_interval_ms": 30_000})
    with running(master):
        try:
            follow(slave, master)
            wait_for(lambda: master.send(b"probe").status == SEND_OK, PATIENCE_S)
            bodies = [b"%d" % number for number in range(5)]
            answers = [master.send(body) for body in bodies]
            first = answers[0]
            wait_for(lambda: pulled(slave, first.queue_offset) == bodies, PATIENCE_S)
            master.process.send_signal(how)
            end = slave.status().confirmed_position
            wait_for(lambda: ConfirmedFile(Disk(), str(slave.folder)).read() >= end, PATIENCE_S)
            slave.kill()
            slave.start()
            assert pulled(slave, first.queue_offset) == bodies
        finally:
            slave.kill()


def test_below_the_least_nothing_is_stored(tmp_path: Path) -> None:
    master, slave = pair(tmp_path, "SYNC_MASTER", HA | {"min_in_sync_replicas": 2})
    with running(master):
        try:
            end = master.status().end_position
            with pytest.raises(NotEnoughReplicasError) as caught:
                master.send(b"x")
            assert caught.value.definite
            assert caught.value.metadata == {"in_sync_count": "1", "min_in_sync_replicas": "2"}
            assert master.status().end_position == end
            follow(slave, master)
            wait_for(lambda: master.status().in_sync_count == 2, PATIENCE_S)
            wait_for(lambda: is_taken(master), PATIENCE_S)
        finally:
            slave.kill()


def is_taken(master: HaBroker) -> bool:
    try:
        return master.send(b"x").status == SEND_OK
    except NotEnoughReplicasError:
        return False
