"""etcd has lost its data, all or the newest, and a member its disk: no acknowledged message is lost without an operator's order."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from protomq import MessageQueue, Producer, SendStatus
from protomq_broker.confirmed_file import ConfirmedFile
from protomq_broker.store.files.disk import Disk
from tests.support.cli import jsonl, run
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME, TOPIC, HaBroker
from tests.support.waiting import PATIENCE_S, wait_for

QUEUE = MessageQueue(TOPIC, NAME, 0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ElectedCluster]:
    with elected_cluster(tmp_path) as running:
        yield running


def send(namesrv: str, *bodies: bytes) -> set[SendStatus]:
    with Producer(namesrv=namesrv, send_timeout_s=15) as producer:
        return {producer.send(TOPIC, body, queue=QUEUE).status for body in bodies}


def problem_of(broker_id: int, namesrv: str) -> str:
    """As the operator reads it; "" if the name servers do not list that broker. They may list one that was killed (exit code 7)."""
    rows = jsonl(run("ha", "status", "-o", "jsonl", namesrv=namesrv, code=(0, 7)))
    return "; ".join(str(row["problem"]) for row in rows if row["broker_id"] == broker_id)


def promote(broker_id: int, namesrv: str) -> None:
    run("ha", "promote", NAME, "--to", str(broker_id), "--unclean", "--yes", namesrv=namesrv)


def number_of(cluster: ElectedCluster, broker: HaBroker) -> int:
    """Its broker_id while it follows."""
    return cluster.brokers.index(broker) + 1


def lose_disk(broker: HaBroker) -> None:
    broker.kill()
    shutil.rmtree(broker.folder)


def test_an_empty_member_that_leads_a_new_etcd_makes_nobody_drop_messages(cluster: ElectedCluster) -> None:
    namesrv = cluster.namesrv
    bodies = [*cluster.bodies(), b"first", b"second"]
    assert send(namesrv, *bodies[-2:]) == {SendStatus.SEND_OK}
    master = cluster.wait_leading(3)
    kept, other = (each for each in cluster.brokers if each is not master)
    for slave in (kept, other):
        slave.wait_for_all_of(master)
        slave.kill()
    lose_disk(master)
    cluster.etcd.lose_data()

    empty = master.start()
    assert cluster.wait_leading(1) is empty, "nobody with messages is there, and etcd knows of none"
    kept.start()
    kept_id = number_of(cluster, kept)
    wait_for(lambda: "nothing is dropped" in problem_of(kept_id, namesrv), PATIENCE_S)
    assert "order the unclean promotion of this one" in problem_of(kept_id, namesrv)
    empty.kill()
    wait_for(lambda: not kept.status().leadership.master, PATIENCE_S)
    promote(kept_id, namesrv)
    assert cluster.wait_leading(1) is kept
    empty.start()
    other.start()
    assert cluster.wait_leading(3) is kept, "the empty one has begun again, by the operator's order"
    assert cluster.bodies() == bodies


def notes_all_as_confirmed(broker: HaBroker) -> bool:
    """Whether its disk says so."""
    return ConfirmedFile(Disk(), str(broker.folder)).read() == broker.status().end_position


def test_a_killed_master_keeps_what_it_has_acknowledged_since_the_copy_of_which_etcd_was_restored(
    cluster: ElectedCluster, tmp_path: Path
) -> None:
    """The copy names the slaves, which lack it: they elect one of them."""
    namesrv = cluster.namesrv
    master = cluster.wait_leading(3)
    slaves = [each for each in cluster.brokers if each is not master]
    cluster.etcd.copy_data(tmp_path / "copy")
    for slave in slaves:
        slave.wait_for_all_of(master)
        slave.kill()
    bodies = [*cluster.bodies(), b"first", b"second"]
    assert send(namesrv, *bodies[-2:]) == {SendStatus.SLAVE_NOT_AVAILABLE}
    wait_for(lambda: notes_all_as_confirmed(master), PATIENCE_S)
    master.kill()
    cluster.etcd.restore_data(tmp_path / "copy")

    for slave in slaves:
        slave.start()
    assert cluster.wait_leading(2) in slaves
    master.start()
    master_id = number_of(cluster, master)
    wait_for(lambda: "nothing is dropped" in problem_of(master_id, namesrv), PATIENCE_S)
    for slave in slaves:
        slave.kill()
    wait_for(lambda: not master.status().leadership.master, PATIENCE_S)
    promote(master_id, namesrv)
    assert cluster.wait_leading(1) is master
    assert cluster.bodies() == bodies


@pytest.mark.long
def test_no_empty_member_leads_where_others_have_messages_and_etcd_is_new(cluster: ElectedCluster) -> None:
    namesrv = cluster.namesrv
    bodies = [*cluster.bodies(), b"first", b"second"]
    assert send(namesrv, *bodies[-2:]) == {SendStatus.SEND_OK}
    master = cluster.wait_leading(3)
    empty, other = (each for each in cluster.brokers if each is not master)
    other.wait_for_all_of(master)
    lose_disk(empty)
    cluster.etcd.lose_data()
    empty.start()
    for broker in (master, other, empty):
        broker_id = number_of(cluster, broker)
        wait_for(lambda broker_id=broker_id: "etcd knows no member" in problem_of(broker_id, namesrv), PATIENCE_S)  # type: ignore[misc]
    assert cluster.leading() is None
    promote(number_of(cluster, master), namesrv)
    assert cluster.wait_leading(3) is master
    assert cluster.bodies() == bodies
