"""What an operator orders while nobody leads: an order that stands is in nobody's way. And a member that is put back to an older state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from protomq import Admin
from protomq.errors import OrderPendingError, RequestTimeoutError
from protomq.v1.send_service_pb2 import SendStatus
from tests.support.cli import run
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME, HaBroker
from tests.support.waiting import PATIENCE_S, wait_for

ELECTION = {"lease_ttl_ms": 2_000, "renew_interval_ms": 500}


def other_than(cluster: ElectedCluster, master: HaBroker) -> HaBroker:
    return next(each for each in cluster.brokers if each is not master)


def problems_of(broker: HaBroker) -> str:
    return " ".join(broker.status().leadership.problems)


@pytest.mark.timeout(300)
def test_a_switch_that_nobody_takes_is_withdrawn_or_replaced_in_an_emergency(tmp_path: Path) -> None:
    with elected_cluster(tmp_path, count=2, election=ELECTION) as cluster, Admin(namesrv=cluster.namesrv) as admin:
        master = cluster.wait_leading(2)
        slave = other_than(cluster, master)
        broker_id = slave.status().leadership.broker_id
        slave.kill()
        wait_for(lambda: len(master.status().leadership.in_sync) == 1, PATIENCE_S)
        assert master.send(b"the slave lacks this").status == SendStatus.SEND_STATUS_SLAVE_NOT_AVAILABLE
        master.kill()
        slave.start()
        wait_for(lambda: "this store may lack what was acknowledged" in problems_of(slave), PATIENCE_S)
        for _ in range(2):  # the same order is left once
            with pytest.raises(RequestTimeoutError, match="nobody else leads"):
                admin.switch_master(NAME, timeout_s=0.0)
        with pytest.raises(OrderPendingError, match=r"switch to whichever is furthest\. It waits until somebody leads"):
            admin.switch_master(NAME, broker_id, timeout_s=0.0)
        assert admin.withdraw_order(NAME) == "switch to whichever is furthest"
        assert json.loads(run("ha", "cancel", NAME, "-o", "json", namesrv=cluster.namesrv).stdout) == [{"broker": NAME, "order": ""}]
        with pytest.raises(RequestTimeoutError):
            admin.switch_master(NAME, timeout_s=0.0)

        done = run("ha", "promote", NAME, "--to", str(broker_id), "--unclean", "--yes", namesrv=cluster.namesrv)
        assert "this order has replaced one that nobody had taken: switch to whichever is furthest" in done.stderr
        assert cluster.wait_leading(1) is slave
        assert slave.send(b"goes on").status == SendStatus.SEND_STATUS_SLAVE_NOT_AVAILABLE
        master.start()
        assert cluster.wait_leading(2) is slave, "the switch is forgotten"


@pytest.mark.timeout(300)
def test_a_member_that_is_put_back_to_an_older_state_leaves_the_set_first_without_its_tail_file(tmp_path: Path) -> None:
    """As a snapshot of its machine does: its number, its place in the set and all of its folder say that it has everything."""
    with elected_cluster(tmp_path, count=2, election=ELECTION) as cluster:
        master = cluster.wait_leading(2)
        slave = other_than(cluster, master)
        slave.stop()
        older = tmp_path / "older"
        shutil.copytree(slave.folder, older)
        slave.start()
        assert cluster.wait_leading(2) is master
        master.send_ok(b"the older state lacks this")
        wait_for(lambda: slave.has_all_of(master), PATIENCE_S)
        master.kill()
        slave.kill()

        shutil.rmtree(slave.folder)
        shutil.copytree(older, slave.folder)
        (slave.folder / "config" / "tail.json").unlink()
        slave.start()
        wait_for(lambda: "this store may lack what was acknowledged" in problems_of(slave), 2 * PATIENCE_S)
        master.start()
        assert cluster.wait_leading(2) is master
        assert b"the older state lacks this" in cluster.bodies()
        assert slave.status().end_position == master.status().end_position
