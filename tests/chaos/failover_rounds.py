"""Rounds of fail-over with real processes: etcd, a name server, three brokers of one name, and a producer that waits for each send.

A round does one thing to them, by the seed; behind it the producer is answered again. At the end all brokers are up, and what was
acknowledged is there once, in order. Everything but the load is real, so a seed repeats the faults and not their moments.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from protomq import Admin
from protomq.errors import ProtomqError
from protomq.testing import FaultProxy
from tests.support.elected_brokers import CountingProducer, ElectedCluster, elected_cluster
from tests.support.failover_watch import FailoverWatch
from tests.support.ha_brokers import NAME, HaBroker

from .checker import Violation

FAULTS = (
    "kill", "kill", "stop", "kill a slave", "stop a slave", "etcd away", "switch", "terminate", "cut from etcd", "cut from slaves",
    "cut off", "kill all",
)  # fmt: skip
"""To the master, where nothing else is said. A cut link is silent, both ways: one that is cut from its slaves is so from clients, too, but
for gRPC; one that is cut off is cut from all three."""


class _Round:
    """What is done to a cluster. `pauses_s`: the longest time without an answer behind each fault; `parts_ms`: what those of kills of a
    master consist of."""

    def __init__(self, cluster: ElectedCluster, producer: CountingProducer, rng: Random) -> None:
        self.cluster, self.producer, self.rng = cluster, producer, rng
        self.pauses_s: dict[str, list[float]] = {}
        self.parts_ms: list[dict[str, int]] = []

    def run(self, fault: str) -> None:
        """Does it, waits until the producer is answered, and until all three are in sync again."""
        master = self.cluster.wait_leading(3)
        slaves = [each for each in self.cluster.brokers if each is not master]
        begun_s = time.monotonic()
        if fault == "kill":
            self._kill([master])
        elif fault == "stop":
            self._stop(master)
        elif fault == "kill a slave":
            self._kill([self.rng.choice(slaves)])
        elif fault == "stop a slave":
            self._stop(self.rng.choice(slaves))
        elif fault == "etcd away":
            self._lose_etcd()
        elif fault == "switch":
            self._switch()
        elif fault == "terminate":
            assert master.stop() == 0
            self.producer.wait_for_more()
            master.start()
        elif fault.startswith("cut"):
            etcd, remoting = self.cluster.links[self.cluster.brokers.index(master)]
            self._cut({"cut from etcd": [etcd], "cut from slaves": [remoting]}.get(fault, [etcd, remoting]))
        else:
            order = [master, *slaves]
            self.rng.shuffle(order)
            self._kill(order)
        self.producer.wait_for_more()
        pause_s = self.producer.longest_pause_s(begun_s)
        self.pauses_s.setdefault(fault, []).append(pause_s)
        print(f"{fault}: {pause_s * 1_000:.0f} ms without an answer", flush=True)

    def _kill(self, brokers: list[HaBroker]) -> None:
        with FailoverWatch(self.cluster) as watch:
            watch.begin()
            for broker in brokers:
                broker.kill()
            if len(brokers) < len(self.cluster.brokers):
                self.producer.wait_for_more()
        if watch.is_whole:
            parts = watch.parts_ms(self.producer.first_answer_s(watch.elected_s))
            self.parts_ms.append(parts)
            print(", ".join(f"{name} {ms} ms" for name, ms in parts.items()), flush=True)
        for broker in brokers:
            broker.start()

    def _stop(self, broker: HaBroker) -> None:
        """For longer or shorter than a lease."""
        broker.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(self.rng.uniform(0.5, 8))
        finally:
            broker.process.send_signal(signal.SIGCONT)

    def _cut(self, links: list[FaultProxy]) -> None:
        """For longer or shorter than a lease, and than slaves are waited for."""
        for link in links:
            link.set(drop_requests=True, drop_answers=True)
        time.sleep(self.rng.uniform(0.5, 12))
        for link in links:
            link.heal()

    def _lose_etcd(self) -> None:
        self.cluster.etcd.kill()
        time.sleep(self.rng.uniform(0.5, 8))
        self.cluster.etcd.start()

    def _switch(self) -> None:
        try:
            with Admin(namesrv=self.cluster.namesrv) as admin:
                admin.switch_master(NAME)
        except ProtomqError:  # a slave's store is being opened again
            pass


def failover_rounds(
    seed: int, rounds: int, counts: Counter[str], faults: tuple[str, ...] = FAULTS
) -> list[Violation]:
    """So many rounds. `counts` gets the faults, and the time without service behind them."""
    rng = Random(seed)
    with (
        tempfile.TemporaryDirectory(prefix="protomq-failover-") as name,
        elected_cluster(Path(name), has_links=True, store={"sync_flush": bool(seed % 2)}) as cluster,
    ):
        before = len(cluster.bodies())
        with CountingProducer(cluster.namesrv) as producer:
            producer.wait_for_more()
            made = _Round(cluster, producer, rng)
            for _ in range(rounds):
                fault = rng.choice(faults)
                made.run(fault)
                counts[fault] += 1
        cluster.wait_leading(3)
        try:
            producer.check(cluster.bodies()[before:])
        except AssertionError as error:
            return [Violation("lost, twice or out of order", str(error))]
        twice = [epoch for epoch, count in cluster.led_epochs().items() if count > 1]
        if twice:
            return [Violation("two writers of an epoch", f"epochs {sorted(twice)} were led twice")]
        counts["acknowledged"] += len(producer.acknowledged)
        counts["failed sends"] += len(producer.failures)
        for fault, pauses_s in made.pauses_s.items():
            ordered = [round(each * 1_000) for each in sorted(pauses_s)]
            longest = f"{fault}: longest ms without an answer"
            counts[longest] = max(counts[longest], ordered[-1])
            print(f"seed {seed}, {fault}: ms without an answer {ordered}, median {statistics.median(ordered)}")
        for name in made.parts_ms[0] if made.parts_ms else ():
            found = [parts[name] for parts in made.parts_ms]
            print(f"seed {seed}, {name}: median {statistics.median(found)} ms, longest {max(found)} ms")
    return []
