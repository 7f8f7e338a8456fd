"""Replication with real processes: a slave has its master's log octet by octet, whoever is killed, and refuses what changes it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protomq.errors import NotMasterError
from protomq.v1 import ha_service_pb2 as ha
from protomq.v1 import ha_service_pb2_grpc
from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, GetQueueRangeRequest
from protomq.v1.consumer_service_pb2_grpc import ConsumerServiceStub
from protomq.v1.pull_service_pb2 import PullRequest, PullStatus
from protomq.v1.pull_service_pb2_grpc import PullServiceStub
from protomq.wire.status import GRPC_STATUS_DETAILS_KEY, decode_status
from tests.support.ha_brokers import NAME, TOPIC, HaBroker, follow, pair, running
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HaBroker, HaBroker]]:
    """An ASYNC_MASTER and its slave: a start takes longer than most tests."""
    master, slave = pair(tmp_path_factory.mktemp("pair"))
    with running(master):
        try:
            master.send_ok(b"first")
            follow(slave, master)
            yield master, slave
        finally:
            slave.kill()


@pytest.fixture
def brokers(both: tuple[HaBroker, HaBroker]) -> tuple[HaBroker, HaBroker]:
    """Both, and the slave has everything."""
    master, slave = both
    slave.wait_for_all_of(master)
    return both


def bodies(broker: HaBroker, offset: int = 0) -> list[bytes]:
    """What a reader gets of queue 0 from an offset on."""
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        request = PullRequest(topic=TOPIC, queue_offset=offset, record_count_max=1_000)
        answer = PullServiceStub(channel).Pull(request, timeout=PATIENCE_S)
        return [record.body for record in answer.records]


def end_offset(broker: HaBroker) -> int:
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        request = GetQueueRangeRequest(topic=TOPIC, queue_ids=[0])
        answer = ConsumerServiceStub(channel).GetQueueRange(request, timeout=PATIENCE_S)
        return answer.ranges[0].end_offset


def refused(call: Any) -> tuple[str, dict[str, str]]:
    """(reason, metadata) of an error over gRPC."""
    for key, value in call.trailing_metadata():
        if key == GRPC_STATUS_DETAILS_KEY:
            status = decode_status(value)
            return status.reason, dict(status.metadata)
    raise AssertionError(call)


def same_logs(one: HaBroker, other: HaBroker) -> bool:
    end = one.status().end_position
    return one.log_bytes(end) == other.log_bytes(end)


def test_a_slave_has_the_log_and_serves_it(brokers: tuple[HaBroker, HaBroker]) -> None:
    master, slave = brokers
    for number in range(30):
        master.send_ok(*[b"%d " % number * 6_000] * 20)
    slave.wait_for_all_of(master)
    assert same_logs(master, slave)
    assert bodies(slave) == bodies(master)
    status = master.status()
    (replica,) = status.replicas
    assert (replica.broker_id, replica.in_sync, replica.lag_bytes) == (1, True, 0)
    assert status.end_position > 2 * (4 << 20), "the log has several segments"
    assert slave.status().master_address == master.address.remoting_address


def test_a_slave_refuses_what_changes_state(brokers: tuple[HaBroker, HaBroker]) -> None:
    _, slave = brokers
    with pytest.raises(NotMasterError) as caught:
        slave.send(b"x")
    assert caught.value.definite
    assert caught.value.metadata == {"broker_name": NAME, "broker_id": "1"}
    with grpc.insecure_channel(slave.address.grpc_address) as channel:
        with pytest.raises(grpc.RpcError) as refusal:
            ConsumerServiceStub(channel).CommitOffsets(CommitOffsetsRequest(consumer_group="g"))
        assert refused(refusal.value)[0] == "NOT_MASTER"
        request = PullRequest(topic=TOPIC, consumer_group="g", commit_offset=0)
        with pytest.raises(grpc.RpcError) as refusal:
            PullServiceStub(channel).Pull(request)
        assert refused(refusal.value)[0] == "NOT_MASTER"
        with pytest.raises(grpc.RpcError) as refusal:
            ha_service_pb2_grpc.HaServiceStub(channel).Fetch(ha.FetchRequest(broker_name=NAME, broker_id=2, store_id=5))
        assert refused(refusal.value)[0] == "NOT_MASTER"


def test_what_a_slave_has_not_yet_is_not_illegal(brokers: tuple[HaBroker, HaBroker]) -> None:
    master, slave = brokers
    end = end_offset(master)
    assert end_offset(slave) == end
    with grpc.insecure_channel(slave.address.grpc_address) as channel:
        stub = PullServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            stub.Pull(PullRequest(topic=TOPIC, queue_offset=end + 6))
        reason, metadata = refused(refusal.value)
        assert reason == "REPLICA_BEHIND"
        assert metadata == {
            "topic": TOPIC,
            "queue_id": "0",
            "queue_offset": str(end + 6),
            "end_offset": str(end),
            "definite": "true",
        }
        answer = stub.Pull(PullRequest(topic=TOPIC, queue_offset=end))
        assert answer.status == PullStatus.PULL_STATUS_NO_NEW_MSG


def test_a_held_pull_at_a_slave_is_answered_when_the_message_comes(
    brokers: tuple[HaBroker, HaBroker],
) -> None:
    master, slave = brokers
    request = PullRequest(topic=TOPIC, queue_offset=end_offset(slave), hold_ms=60_000)
    with grpc.insecure_channel(slave.address.grpc_address) as channel:
        held = PullServiceStub(channel).Pull.future(request, timeout=PATIENCE_S)
        master.send_ok(b"second")
        assert [record.body for record in held.result().records] == [b"second"]


@pytest.mark.parametrize("order", ["slave first", "master first"])
def test_both_are_killed_and_come_back(brokers: tuple[HaBroker, HaBroker], order: str) -> None:
    master, slave = brokers
    dead = (slave, master) if order == "slave first" else (master, slave)
    for broker in dead:
        broker.kill()
        if broker is slave and order == "slave first":
            master.send_ok(b"while the slave was away")
    for broker in reversed(dead):
        broker.start()
    master.send_ok(b"behind the restart")
    slave.wait_for_all_of(master)
    assert same_logs(master, slave)
    assert bodies(slave, end_offset(slave) - 1) == [b"behind the restart"]


def test_a_slave_whose_log_is_longer_gives_up_the_rest(tmp_path: Path) -> None:
    """The roles were changed by hand: what was a master alone has more than the one that leads now."""
    master, slave = pair(tmp_path)
    with running(master):
        master.send_ok(b"both")
        follow(slave, master)
        slave.wait_for_all_of(master)
        agreed = master.status().end_position
        slave.kill()
        master.send_ok(b"only here")
        master.kill()
    old, new = HaBroker(tmp_path / "slave", "ASYNC_MASTER", 0), HaBroker(tmp_path / "master", "SLAVE", 1, ha={})
    with running(old):
        try:
            old.send_ok(b"the new one's")
            follow(new, old)
            new.wait_for_all_of(old)
            assert same_logs(old, new)
            assert bodies(new) == [b"both", b"the new one's"]
            assert f"agrees with the master's up to {agreed}: it is truncated" in new.log_text()
            # The process goes on, with the ports that it had.
            assert new.process.poll() is None
            old.send_ok(b"more")
            new.wait_for_all_of(old)
            assert new.stop() == 0
        finally:
            new.kill()


def test_a_slave_that_cannot_note_where_its_log_is_to_end_says_so_and_goes_on_when_it_can(tmp_path: Path) -> None:
    """A folder where the note is to be written: it fails as on a full disk."""
    master, slave = pair(tmp_path)
    with running(master):
        master.send_ok(b"both")
        follow(slave, master)
        slave.wait_for_all_of(master)
        slave.kill()
        master.send_ok(b"only here")
        master.kill()
    old, new = HaBroker(tmp_path / "slave", "ASYNC_MASTER", 0), HaBroker(tmp_path / "master", "SLAVE", 1, ha={})
    blocked = tmp_path / "master/config/truncation.json.tmp"
    blocked.mkdir()
    with running(old):
        try:
            old.send_ok(b"the new one's")
            follow(new, old)
            wait_for(lambda: "cannot be written down" in new.status().problem, PATIENCE_S)
            assert b"only here" not in bodies(new)
            blocked.rmdir()
            new.wait_for_all_of(old)
            assert bodies(new) == [b"both", b"the new one's"]
        finally:
            new.kill()


@pytest.mark.parametrize("right", ["slave", "master"])
def test_a_slave_keeps_its_copy_if_its_master_comes_back_without_its_log(tmp_path: Path, right: str) -> None:
    """Until an operator says which of the two logs is the right one."""
    master, slave = pair(tmp_path)
    first = [b"%d" % number for number in range(20)]
    with running(master):
        master.send_ok(*first)
        try:
            follow(slave, master)
            slave.wait_for_all_of(master)
            end = slave.status().end_position
            if right == "master":
                slave.kill()
            master.kill()
            master.folder.rename(tmp_path / "lost")
            master.start()
            if right == "master":
                master.send_ok(b"another past")
                slave.start()
            wait_for(lambda: "shares nothing with this one" in slave.status().problem, PATIENCE_S)
            assert "let this broker lead" in slave.log_text()
            assert slave.status().end_position == end
            assert bodies(slave) == first
            slave.kill()
            if right == "slave":
                master.send_ok(b"another past")
            else:
                slave.folder.rename(tmp_path / "old")
                slave.start()
                slave.wait_for_all_of(master)
                assert bodies(slave) == [b"another past"]
        finally:
            slave.kill()
    if right == "slave":
        new, old = HaBroker(tmp_path / "slave", "ASYNC_MASTER", 0), HaBroker(tmp_path / "master", "SLAVE", 1, ha={})
        with running(new):
            try:
                follow(old, new)
                # What it took alone, it has acknowledged. The operator says that it is not needed.
                wait_for(lambda: "and was a master's; nothing is dropped" in old.status().problem, PATIENCE_S)
                assert b"another past" in old.log_bytes(old.status().end_position)
                old.kill()
                old.folder.rename(tmp_path / "alone")
                old.start()
                old.wait_for_all_of(new)
                assert bodies(old) == bodies(new) == first
            finally:
                old.kill()


def test_strangers_move_nothing(brokers: tuple[HaBroker, HaBroker]) -> None:
    """Health probes, other names, another store with the slave's id, sessions that are none, positions that were not sent."""
    master, _ = brokers
    before = master.status()
    host, port = master.address.remoting_address.split(":")
    with socket.create_connection((host, int(port))) as probe:
        probe.sendall(os.urandom(64))
    with grpc.insecure_channel(master.address.grpc_address) as channel:
        stub = ha_service_pb2_grpc.HaServiceStub(channel)
        for request, reason in (
            (ha.FetchRequest(), "BROKER_NOT_FOUND"),
            (ha.FetchRequest(broker_name="other", broker_id=1, store_id=1), "BROKER_NOT_FOUND"),
            (ha.FetchRequest(broker_name=NAME, broker_id=0, store_id=1), "INVALID_ARGUMENT"),
            (ha.FetchRequest(broker_name=NAME, broker_id=2), "INVALID_ARGUMENT"),
            (ha.FetchRequest(broker_name=NAME, broker_id=1, store_id=1), "NAME_TAKEN"),
        ):
            with pytest.raises(grpc.RpcError) as refusal:
                stub.Fetch(request, timeout=PATIENCE_S)
            assert refused(refusal.value)[0] == reason
        stub.Acknowledge(ha.AcknowledgeRequest(session=77, written_position=1 << 40), timeout=PATIENCE_S)
        assert stub.Fetch(ha.FetchRequest(session=77)).status == ha.FETCH_STATUS_SESSION_ENDED
        unknown = ha.LogPoint(position=before.end_position, epoch=before.epoch, crc32c=1)
        request = ha.FetchRequest(broker_name=NAME, broker_id=2, store_id=1, end=unknown)
        assert stub.Fetch(request).status == ha.FETCH_STATUS_DIVERGED
        after = master.status()
        assert (after.confirmed_position, after.in_sync_count) == (before.confirmed_position, 2)
        # A replica over gRPC gets the same bytes, and cannot claim what it was not sent.
        mine = stub.Fetch(ha.FetchRequest(broker_name=NAME, broker_id=2, store_id=9, size_max_bytes=64))
        assert (mine.position, len(mine.log)) == (0, 64)
        assert mine.log == master.log_bytes(64)
        for positions in ({"written_position": 65}, {"written_position": 64, "flushed_position": 65}):
            with pytest.raises(grpc.RpcError) as refusal:
                stub.Acknowledge(ha.AcknowledgeRequest(session=mine.session, **positions))
            assert refused(refusal.value)[0] == "INVALID_ARGUMENT"
        replicas = {each.broker_id: each for each in master.status().replicas}
        assert replicas[2].written_position == 0
        assert not replicas[2].in_sync


def test_a_cut_connection_is_made_again(brokers: tuple[HaBroker, HaBroker]) -> None:
    """The master restarts under the slave: another session, another epoch, the same log."""
    master, slave = brokers
    epoch = master.status().epoch
    master.kill()
    wait_for(lambda: slave.status().problem, PATIENCE_S)
    assert bodies(slave)[0] == b"first"
    master.start()
    master.send_ok(b"again")
    slave.wait_for_all_of(master)
    assert slave.status().epoch == master.status().epoch == epoch + 1
    assert same_logs(master, slave)


def test_a_slave_with_other_segments_is_told_so(tmp_path: Path) -> None:
    master, slave = pair(tmp_path)
    slave.configure(store={"segment_size_bytes": 8 << 20})
    with running(master):
        try:
            follow(slave, master)
            wait_for(lambda: "give both the same store.segment_size_bytes" in slave.status().problem, PATIENCE_S)
        finally:
            slave.kill()


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("itself", "this broker itself"),
        ("grpc", "may be a gRPC port"),
        ("other name", "a slave has the name"),
        ("other cluster", "a slave has the cluster of its master"),
    ],
)
def test_a_slave_of_no_master_does_not_start(brokers: tuple[HaBroker, HaBroker], tmp_path: Path, what: str, word: str) -> None:
    address = brokers[0].address
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = free.getsockname()[1]
    master = {"itself": f"localhost:{own}", "grpc": address.grpc_address}.get(what, address.remoting_address)
    config = tmp_path / "slave.yaml"
    listen = {"grpc_port": 0, "remoting_port": own}
    name = "other" if what == "other name" else NAME
    cluster = "other" if what == "other cluster" else "DefaultCluster"
    roles = {"cluster": cluster, "broker_name": name, "broker_role": "SLAVE", "broker_id": 7}
    config.write_text(json.dumps({"data_dir": str(tmp_path / "store"), "listen": listen, "ha": {"master": master}, **roles}))
    command = [sys.executable, "-m", "protomq_cli", "broker", "-c", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert word in done.stderr.splitlines()[-1]
