"""Two elections have one broker name and one name server: the one that has the name keeps it, whatever the epoch of the other one."""

from __future__ import annotations

from pathlib import Path

from protomq import MessageQueue, Producer, SendStatus
from tests.support.cli import jsonl, run
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME, TOPIC, HaBroker, running
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

QUEUE = MessageQueue(TOPIC, NAME, 0)


def addresses_of(namesrv: str) -> dict[int, str]:
    """Whom the name server has under the name."""
    return {int(str(row["broker_id"])): str(row["grpc_address"]) for row in rows_of(namesrv) if row["refused_time"] is None}


def refused_by(namesrv: str) -> dict[str, str]:
    """Where those are that the name server refuses under the name, and why."""
    return {str(row["grpc_address"]): str(row["cause"]) for row in rows_of(namesrv) if row["refused_time"] is not None}


def rows_of(namesrv: str) -> list[dict[str, object]]:
    rows = jsonl(run("cluster", "list", "-o", "jsonl", namesrv=namesrv, code=(0, 7)))
    return [row for row in rows if row["broker"] == NAME]


def test_a_broker_of_another_election_does_not_take_the_name_by_its_epoch(tmp_path: Path) -> None:
    with elected_cluster(tmp_path, count=2) as cluster, running_namesrv() as elsewhere:
        master = cluster.wait_leading(2)
        stray = HaBroker(
            tmp_path / "stray", "SYNC_MASTER", 3, namesrv=[str(elsewhere.remoting)],
            etcd={"endpoints": cluster.etcd.urls, "prefix": "/staging"},
        )  # fmt: skip
        with running(stray):
            staging = ElectedCluster(cluster.etcd, [stray], str(elsewhere.remoting))
            while staging.wait_leading(1).status().epoch <= master.status().epoch + 1:
                stray.kill()
                stray.start()
            known = addresses_of(cluster.namesrv)
            assert known[0] == master.address.grpc_address

            # It gets the name server of the others, by mistake.
            stray.kill()
            stray.configure(namesrv=[cluster.namesrv])
            assert stray.exit_of_start() == 6
            said = stray.log_text().splitlines()[-1]
            assert f"the name {NAME} belongs to brokers that elect their master in another part of etcd" in said
            assert "Is etcd.endpoints or etcd.prefix wrong" in said
            assert addresses_of(cluster.namesrv) == known
            # Its ports may be others at each start.
            (cause,) = refused_by(cluster.namesrv).values()
            assert "belongs to brokers that elect their master in another part of etcd" in cause
            status = run("ha", "status", namesrv=cluster.namesrv).stdout
            assert "REFUSED" in status
            with Producer(namesrv=cluster.namesrv, send_timeout_s=15) as producer:
                receipt = producer.send(TOPIC, b"to the cluster", queue=QUEUE)
            assert receipt.status is SendStatus.SEND_OK
            assert b"to the cluster" in cluster.bodies()

        for broker in cluster.brokers:
            broker.kill()
        # Whoever comes first has the name: now the others are told what is wrong.
        with running(stray):
            wait_for(lambda: addresses_of(cluster.namesrv).get(0) == stray.address.grpc_address, PATIENCE_S)
            assert stray.address.grpc_address not in refused_by(cluster.namesrv)
            assert master.exit_of_start() == 6
            assert refused_by(cluster.namesrv)
            assert f"at {stray.address.grpc_address}" in master.log_text().splitlines()[-1]
        master.start()
        wait_for(lambda: master.address.grpc_address in addresses_of(cluster.namesrv).values(), PATIENCE_S)


def test_a_slave_with_a_fixed_role_is_told_that_its_name_elects_its_master(tmp_path: Path) -> None:
    with elected_cluster(tmp_path, count=2) as cluster:
        slave = HaBroker(tmp_path / "fixed", "SLAVE", 5, namesrv=[cluster.namesrv])
        with running(slave):
            wait_for(lambda: "the slave that asks has no etcd setting" in slave.status().problem, PATIENCE_S)
