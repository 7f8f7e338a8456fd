"""A member of three comes back with damage in its log, where messages were acknowledged. It does not lead, is healed, and joins again.

Real processes and a real etcd. The damage is a changed octet of a message: in the middle of the log, or in its last append. There a start
may take it for a torn write. Or the log's first segment is lost, as if retention had deleted it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest

from protomq import Admin
from protomq_broker.store.tools.repair import repair
from tests.support.elected_brokers import LEADS_PATTERN, ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME, HaBroker
from tests.support.waiting import PATIENCE_S, wait_for

COUNT = 40
Harm = Callable[[HaBroker, bytes], None]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElectedCluster]:
    with elected_cluster(tmp_path_factory.mktemp("damaged"), store={"corruption": "quarantine", "segment_size_bytes": "16KiB"}) as running:
        yield running


@pytest.fixture
def bodies(cluster: ElectedCluster, request: pytest.FixtureRequest) -> list[bytes]:
    """All that was acknowledged, in order, on all three; the last ones are of this test."""
    master = cluster.wait_leading(3)
    before = cluster.bodies()
    # Each test fills more than a segment.
    new = [b"%s %d %s" % (request.node.name.encode(), number, b"x" * 600) for number in range(COUNT)]
    for body in new:
        master.send_ok(body)
    for slave in cluster.brokers:
        if slave is not master:
            slave.wait_for_all_of(master)
    return before + new


def damage(broker: HaBroker, body: bytes) -> None:
    """Changes an octet of this message in the log of a broker that is down."""
    for path in (broker.folder / "commitlog").glob("[0-9]*"):
        log = bytearray(path.read_bytes())
        at = log.find(body)
        if at >= 0:
            log[at] ^= 1
            path.write_bytes(log)
            return
    raise AssertionError(f"the log has no {body!r}")


def lose_first_segment(broker: HaBroker, body: bytes) -> None:
    """As a file system may, of a broker that is down. The message is behind it."""
    first, *others = sorted((broker.folder / "commitlog").glob("[0-9]*"))
    assert any(body in path.read_bytes() for path in others)
    first.unlink()


HARMS = pytest.mark.parametrize("harm", [damage, lose_first_segment])


def led_count(broker: HaBroker) -> int:
    return len(LEADS_PATTERN.findall(broker.log_text()))


def problems_of(broker: HaBroker) -> str:
    """"" while its store is being opened again."""
    try:
        return "; ".join(broker.status().leadership.problems)
    except grpc.RpcError:
        return ""


def has_confirmed_all(master: HaBroker) -> bool:
    """Until all members of the set have reported, a new master gives nothing that one of them may lack."""
    status = master.status()
    return status.confirmed_position == status.end_position


def check_whole(cluster: ElectedCluster, broker: HaBroker, bodies: list[bytes]) -> None:
    """This broker is in sync again, has the same log as the others, and can lead with all of it."""
    master = cluster.wait_leading(3)
    wait_for(lambda: has_confirmed_all(master), PATIENCE_S)
    assert cluster.bodies() == bodies
    if broker is not master:
        broker.wait_for_all_of(master)
    end = master.status().end_position
    others = (each for each in cluster.brokers if each is not master)
    assert all(each.log_bytes(end) == master.log_bytes(end) for each in others)
    assert not problems_of(broker)
    if broker is not master:
        with Admin(namesrv=cluster.namesrv) as admin:
            admin.switch_master(NAME, broker.status().broker_id)
        wait_for(lambda: cluster.leading(copies=3) is broker and has_confirmed_all(broker), 2 * PATIENCE_S)
        assert cluster.bodies() == bodies


@HARMS
def test_a_damaged_slave_is_healed_while_another_one_leads(cluster: ElectedCluster, bodies: list[bytes], harm: Harm) -> None:
    master = cluster.wait_leading(3)
    slave = next(each for each in cluster.brokers if each is not master)
    slave.kill()
    harm(slave, bodies[-COUNT // 2])
    led, known = led_count(slave), len(slave.log_text())
    slave.start()
    wait_for(lambda: "the store is open again" in slave.log_text()[known:].rpartition("corrupt log")[2], 2 * PATIENCE_S)
    assert "of the log are healed from a replica" in slave.log_text()[known:]
    assert cluster.wait_leading(3) is master
    assert led_count(slave) == led
    check_whole(cluster, slave, bodies)
    with Admin(namesrv=cluster.namesrv) as admin:
        (leads,) = admin.broker_status()
    assert leads.healed_log_ranges > 0, "the count is that of the process, which has opened its store again since"


@HARMS
def test_a_damaged_member_that_is_alone_there_does_not_lead(cluster: ElectedCluster, bodies: list[bytes], harm: Harm) -> None:
    """Not even one that had led."""
    damaged = cluster.wait_leading(3)
    for broker in cluster.brokers:
        broker.kill()
    harm(damaged, bodies[-COUNT // 2])
    led = led_count(damaged)
    damaged.start()
    wait_for(lambda: "skipped damaged parts of the log" in problems_of(damaged), PATIENCE_S)

    def has_left() -> bool:
        leadership = damaged.status().leadership
        return len(leadership.in_sync) == 2 and leadership.member not in leadership.in_sync

    wait_for(has_left, PATIENCE_S)
    for broker in cluster.brokers:
        if broker is not damaged:
            broker.start()
    assert cluster.wait_leading(3) is not damaged
    assert led_count(damaged) == led
    check_whole(cluster, damaged, bodies)


def test_a_member_whose_last_append_is_damaged_waits_for_another_one(cluster: ElectedCluster, bodies: list[bytes]) -> None:
    """A start takes that for a torn write if nothing says that it was synced; else for a damaged end."""
    damaged = cluster.wait_leading(3)
    last = b"the last one of all"
    damaged.send_ok(last)
    for broker in cluster.brokers:
        broker.kill()
    damage(damaged, last)
    led = led_count(damaged)
    damaged.start()
    # Its lease as the master is over, and it would lead now.
    wait_for(lambda: not damaged.status().leadership.master, PATIENCE_S)
    for broker in cluster.brokers:
        if broker is not damaged:
            broker.start()
    assert cluster.wait_leading(3) is not damaged
    assert led_count(damaged) == led
    check_whole(cluster, damaged, [*bodies, last])


def test_a_slave_of_a_repaired_log_serves_again_what_a_replica_has_given_back(cluster: ElectedCluster, bodies: list[bytes]) -> None:
    """Before it is elected: a lead that begins with a new start of the store takes long."""
    master = cluster.wait_leading(3)
    slave = next(each for each in cluster.brokers if each is not master)
    slave.kill()
    damage(slave, bodies[-COUNT // 2])
    repair(str(slave.folder), str(slave.folder.parent / "kept"))
    led, known = led_count(slave), len(slave.log_text())
    slave.start()
    healed = "of the log are healed from a replica"
    wait_for(lambda: "the store is open again" in slave.log_text()[known:].rpartition(healed)[2], 2 * PATIENCE_S)
    assert cluster.wait_leading(3) is master
    assert led_count(slave) == led
    check_whole(cluster, slave, bodies)
