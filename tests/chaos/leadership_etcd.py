"""etcd as a model: revisions, transactions, leases that run out somewhat late. One step at a time, as a real one does it behind its log."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from protomq_ha.cluster_state import ClusterView, Row, Transaction
from protomq_ha.leadership_values import (
    Committed,
    GrantLease,
    Lease,
    ReadCluster,
    Refused,
    RenewLease,
    Request,
    Result,
)

LATE_MAX_MS: Final = 700
"""A lease ends this much too late at most: etcd looks every 500 ms."""


@dataclass(slots=True)
class SimLease:
    """Ends at `ends_ms` by the true time."""

    ttl_ms: int
    ends_ms: float


class SimEtcd:
    """Attributes: is_up; view: all keys as they are; refusal: why it refuses all that it would have to store, such as that it is full;
    refuses_reads: so it does all but renewals, as without a password.
    """

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.is_up = True
        self.refusal = ""
        self.refuses_reads = False
        self.revision = 1
        self.rows: dict[str, Row] = {}
        self.leases: dict[int, SimLease] = {}
        self._next_lease = 1
        self._view = ClusterView(1, {})

    @property
    def view(self) -> ClusterView:
        if self._view.revision != self.revision:
            self._view = ClusterView(self.revision, self.rows)
        return self._view

    def come_back(self, now_ms: float) -> None:
        """A new leader of etcd gives all leases their whole time again."""
        self.is_up = True
        for lease in self.leases.values():
            lease.ends_ms = now_ms + lease.ttl_ms

    def forget(self) -> None:
        """All data are gone: a new etcd is in its place."""
        self.revision = 1
        self.rows.clear()
        self.leases.clear()
        self._view = ClusterView(1, {})

    def copy(self) -> tuple[int, dict[str, Row], dict[int, int]]:
        """Of its data: revision, keys, leases with their times."""
        return self.revision, dict(self.rows), {number: lease.ttl_ms for number, lease in self.leases.items()}

    def restore(self, copy: tuple[int, dict[str, Row], dict[int, int]], now_ms: float) -> None:
        """All is as it was then; leases have their whole time again."""
        self.revision, self.rows = copy[0], dict(copy[1])
        self.leases = {number: SimLease(ttl_ms, now_ms + ttl_ms) for number, ttl_ms in copy[2].items()}
        self._view = ClusterView(self.revision, self.rows)

    def expire(self, now_ms: float) -> None:
        """Ends what has run out."""
        for number, lease in list(self.leases.items()):
            if now_ms >= lease.ends_ms:
                del self.leases[number]
                gone = [key for key, row in self.rows.items() if row.lease == number]
                for key in gone:
                    self.revision += 1
                    del self.rows[key]

    def do(self, request: Request, now_ms: float) -> Result:
        """What etcd answers."""
        is_stored = isinstance(request, GrantLease) or (isinstance(request, Transaction) and bool(request.puts))
        if self.refusal and not isinstance(request, RenewLease) and (is_stored or self.refuses_reads):
            return Refused(self.refusal)
        if isinstance(request, ReadCluster):
            return self.view
        if isinstance(request, GrantLease):
            number, self._next_lease = self._next_lease, self._next_lease + 1
            self.leases[number] = SimLease(request.ttl_ms, 0)
            return self._renewed(number, now_ms)
        if isinstance(request, RenewLease):
            return self._renewed(request.lease, now_ms)
        return self.commit(request)

    def commit(self, transaction: Transaction) -> Committed | None:
        """None: an error, nothing was done."""
        revisions = {key: row.revision for key, row in self.rows.items()}
        if any(revisions.get(key, 0) != wanted for key, wanted in transaction.compares):
            return Committed(False, self.revision)
        if any(put.lease and put.lease not in self.leases for put in transaction.puts):
            return None
        self.revision += 1
        for key in transaction.deletes:
            self.rows.pop(key, None)
        for put in transaction.puts:
            self.rows[put.key] = Row(put.value, self.revision, put.lease)
        return Committed(True, self.revision)

    def _renewed(self, number: int, now_ms: float) -> Lease:
        lease = self.leases.get(number)
        if lease is None:
            return Lease(number, 0)
        lease.ends_ms = now_ms + lease.ttl_ms + self.rng.choice((0, self.rng.uniform(0, LATE_MAX_MS)))
        return Lease(number, lease.ttl_ms)
