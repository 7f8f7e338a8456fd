"""How long nobody is answered when a master dies, is told to stop, or gives the lead to another one."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from protomq import Admin
from tests.bench.bench import Bench, Result, row
from tests.support.elected_brokers import CountingProducer, ElectedCluster, elected_cluster
from tests.support.failover_watch import FailoverWatch
from tests.support.ha_brokers import NAME
from tests.support.waiting import PATIENCE_S, wait_for

ROUNDS_FACTOR: Final = 5
PRODUCERS: Final = 4
MORE: Final = 20
_PARTS: Final = {
    "the lease runs out": ("end of the lease", None),
    "promotion": ("promotion: the lease is lost, to the first accepted send", 1.0),
    "known": ("the new master is known to clients, after its promotion", 1.0),
}


class _Rounds:
    """Of one kind of change. Attributes: pauses_s: the longest time without an answer of any producer; parts_s: of kills, by name."""

    def __init__(self, cluster: ElectedCluster, producers: list[CountingProducer]) -> None:
        self.cluster, self.producers = cluster, producers
        self.pauses_s: list[float] = []
        self.parts_s: dict[str, list[float]] = {name: [] for name in _PARTS}

    def kill(self) -> None:
        """kill -9 of the master; it comes back behind that."""
        old = self.cluster.wait_leading(3)
        with FailoverWatch(self.cluster) as watch:
            watch.begin()
            old.kill()
            self._wait_for_more()
            wait_for(lambda: watch.leads_s > 0, PATIENCE_S)
        self._note(watch.began_s)
        firsts_s = [producer.first_answer_s(watch.elected_s or watch.began_s) for producer in self.producers]
        if watch.is_whole:
            self.parts_s["the lease runs out"].append(watch.gone_s - watch.began_s)
            self.parts_s["promotion"].append(min(firsts_s) - watch.gone_s)
            # The log of the new master says it a moment after it takes sends.
            self.parts_s["known"].append(max(firsts_s) - min(watch.leads_s, *firsts_s))
        old.start()

    def terminate(self) -> None:
        """SIGTERM, as in a rolling restart."""
        old = self.cluster.wait_leading(3)
        begun_s = time.monotonic()
        old.stop()
        self._wait_for_more()
        self._note(begun_s)
        old.start()

    def switch(self) -> None:
        """`ha switch`."""
        old = self.cluster.wait_leading(3)
        begun_s = time.monotonic()
        with Admin(namesrv=self.cluster.namesrv) as admin:
            admin.switch_master(NAME)
        wait_for(lambda: self.cluster.leading() not in (old, None), PATIENCE_S)
        self._wait_for_more()
        self._note(begun_s)

    def _wait_for_more(self) -> None:
        for producer in self.producers:
            producer.wait_for_more(MORE)

    def _note(self, begun_s: float) -> None:
        self.pauses_s.append(max(producer.longest_pause_s(begun_s) for producer in self.producers))


@row("fail-over")
def failover(bench: Bench) -> Iterator[Result]:
    """Three brokers and an etcd: kill -9 and SIGTERM of the master, and planned switches."""
    if shutil.which("etcd") is None:
        bench.notes.append("fail-over: there is no etcd here (make etcd)")
        return
    rounds = ROUNDS_FACTOR * bench.extent.rounds
    folder = bench.new_folder("fail-over")
    try:
        with elected_cluster(folder) as cluster, ExitStack() as stack:
            producers = [stack.enter_context(CountingProducer(cluster.namesrv)) for _ in range(PRODUCERS)]
            kinds = {name: _Rounds(cluster, producers) for name in ("kill", "terminate", "switch")}
            kinds["kill"]._wait_for_more()
            for _ in range(rounds):
                for name, some in kinds.items():
                    getattr(some, name)()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    how = f"3 brokers, etcd, default settings, {PRODUCERS} producers that wait for each send; {rounds} rounds"
    names = {"kill": "kill -9 of the master", "terminate": "SIGTERM of the master", "switch": "a planned switch"}
    floors = {"kill": 5.0, "terminate": None, "switch": 1.0}
    for kind, some in kinds.items():
        yield from _spread(f"time without service, {names[kind]}", some.pauses_s, floors[kind], how)
    for part, (name, floor) in _PARTS.items():
        found = kinds["kill"].parts_s[part]
        if found:
            yield from _spread(name, found, floor, f"{how}; seen in {len(found)} of {rounds} kills")


def _spread(name: str, values_s: list[float], floor_s: float | None, how: str) -> Iterator[Result]:
    yield Result(f"{name}, p50", statistics.median(values_s), "s", "less", how)
    yield Result(f"{name}, longest", max(values_s), "s", "less", how, floor_s)
