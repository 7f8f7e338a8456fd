"""When what happens in a fail-over, as etcd, the brokers and their logs show it: for what a time without service consists of."""

from __future__ import annotations

import threading
import time
from typing import Any

from protomq_broker.etcd_gateway import HttpEtcd
from protomq_ha.cluster_state import ClusterView
from protomq_ha.leadership_values import ReadCluster

from .elected_brokers import ElectedCluster
from .ha_brokers import NAME

LOOK_INTERVAL_S = 0.02
LEASE_PART = "the lease runs out"
"""What comes before a promotion."""


class FailoverWatch:
    """`with` begins and ends it; `begin` right before the fault. Times are those of time.monotonic; 0: it has not come.

    Attributes: began_s; gone_s: nobody leads by etcd; elected_s: another one does; leads_s: it says so, and takes sends.
    """

    def __init__(self, cluster: ElectedCluster) -> None:
        self._cluster = cluster
        self._etcd = HttpEtcd(cluster.etcd.urls, f"/protomq/DefaultCluster/{NAME}")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._known_count = self._lead_count()
        self.began_s = self.gone_s = self.elected_s = self.leads_s = 0.0

    def begin(self) -> None:
        """What is seen from now on counts."""
        self.began_s = time.monotonic()
        self._thread.start()

    def __enter__(self) -> FailoverWatch:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopping.set()
        self._thread.join()
        self._etcd.close()

    @property
    def is_whole(self) -> bool:
        """The election was seen."""
        return 0 < self.gone_s < self.elected_s

    def parts_ms(self, answered_s: float) -> dict[str, int]:
        """The parts, in their order; `answered_s`: the first send was answered then."""
        steps = {
            LEASE_PART: self.gone_s,
            "another one is elected": self.elected_s,
            "it takes sends": min(self.leads_s or answered_s, answered_s),
            "the first answer": answered_s,
        }
        found, before_s = {}, self.began_s
        for name, at_s in steps.items():
            found[name] = round(1_000 * (at_s - before_s))
            before_s = at_s
        return found

    def _lead_count(self) -> int:
        return self._cluster.led_epochs().total()

    def _run(self) -> None:
        while not self._stopping.is_set() and not self.leads_s:
            if not self.elected_s:
                view = self._etcd.ask(ReadCluster())
                now_s = time.monotonic()
                if isinstance(view, ClusterView) and view.master is None and not self.gone_s:
                    self.gone_s = now_s
                elif isinstance(view, ClusterView) and view.master is not None and self.gone_s:
                    self.elected_s = now_s
            elif self._lead_count() > self._known_count:
                self.leads_s = time.monotonic()
            self._stopping.wait(LOOK_INTERVAL_S)
