"""What leadership needs of etcd: a real one and the model keep the same contract."""

from __future__ import annotations

from protomq_broker.etcd_gateway import EtcdGateway
from protomq_ha.cluster_state import (
    IN_SYNC,
    MASTER,
    ORDER,
    SWITCH,
    ClusterView,
    Compare,
    LogEnd,
    Put,
    Transaction,
    encode_end,
    encode_full,
    encode_in_sync,
    encode_master,
    encode_order,
)
from protomq_ha.leadership_values import Committed, GrantLease, Lease, ReadCluster, RenewLease


def check_contract(etcd: EtcdGateway) -> Lease:
    """On an etcd without keys; the lease to which the master key is bound then."""
    view = etcd.ask(ReadCluster())
    assert isinstance(view, ClusterView)
    assert (view.master, view.in_sync, view.order) == (None, None, None)

    lease = etcd.ask(GrantLease(3_000))
    assert isinstance(lease, Lease)
    assert (lease.lease > 0, lease.ttl_ms) == (True, 3_000)
    assert etcd.ask(RenewLease(lease.lease)) == lease
    assert etcd.ask(RenewLease(12_345)) == Lease(12_345, 0)

    members = frozenset({"7", "8"})
    election = Transaction(
        (Compare(MASTER, 0), Compare(IN_SYNC, 0)),
        (
            Put(MASTER, encode_master("7", 3, "host:10911"), lease.lease),
            Put(IN_SYNC, encode_in_sync(3, members, unclean_epoch=0)),
        ),
    )
    made = etcd.ask(election)
    assert isinstance(made, Committed)
    assert made.is_made
    again = etcd.ask(election)
    assert isinstance(again, Committed)
    assert not again.is_made
    assert again.revision == made.revision

    after = etcd.ask(ReadCluster())
    assert isinstance(after, ClusterView)
    assert after.revision == made.revision
    assert after.rows == view.after(election, made.revision).rows
    assert after.master is not None
    assert after.master.lease == lease.lease

    unknown = Transaction((Compare(IN_SYNC, made.revision),), (Put(MASTER, b"{}", 12_345),))
    assert etcd.ask(unknown) is None, "a lease that is not there: nothing was done"
    puts = (
        Put(IN_SYNC, encode_in_sync(4, members, unclean_epoch=0)),
        Put(ORDER, encode_order(SWITCH, "8")),
        Put("end/7", encode_end(LogEnd(3, 500))),
        Put("full/8", encode_full()),
    )
    both = Transaction((), puts, (MASTER, "end/8"))
    assert isinstance(etcd.ask(both), Committed)
    end = etcd.ask(ReadCluster())
    assert isinstance(end, ClusterView)
    assert end.master is None
    assert end.in_sync is not None
    assert (end.in_sync.epoch, end.in_sync.revision) == (4, end.revision)
    assert end.rows.keys() == {put.key for put in puts}, "what one has written the others read"
    assert end.order is not None
    assert (end.order.kind, end.order.target) == (SWITCH, "8")
    assert end.ends == {"7": LogEnd(3, 500)}
    assert end.full == {"8"}
    return lease
