"""Rounds of fail-over with real processes: etcd, a name server, two or three brokers of one name, producers that wait for each call.

A round does one thing to them, by the seed; behind it all producers are answered again. Each kind of fault comes once before any comes
again. At the end all brokers are up. Then what was acknowledged is there once, in order; no epoch was led twice; what any broker gave to a
reader is still there at its offset; the logs are the same; and a message that is due in half a day has not come. A wall clock that is set
costs nobody the lead. Everything but the load is real, so a seed repeats the faults and not their moments.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import yaml

from protomq import Admin, MessageQueue, Producer
from protomq.errors import ProtomqError
from protomq.testing import FaultProxy
from tests.support.elected_brokers import (
    CountingProducers,
    ElectedCluster,
    Links,
    ReadingThread,
    elected_cluster,
    read_all,
)
from tests.support.failover_watch import LEASE_PART, FailoverWatch
from tests.support.ha_brokers import NAME, TOPIC, HaBroker
from tests.support.waiting import PATIENCE_S, wait_for

from .checker import Violation
from .sick_disk import SickDisk, build_library, why_no_sick_disk
from .stepped_clock import SteppedClock

FAULTS: Final = (
    "kill", "stop", "kill a slave", "stop a slave", "etcd away", "switch", "terminate", "cut from etcd", "cut from slaves",
    "cut off", "kill all", "kill two", "cut one way", "slow link", "flapping", "slow disk", "full disk", "damaged slave", "empty slave",
    "etcd leader", "clock of the master", "clock of a slave", "clocks and kill", "clocks and switch",
)  # fmt: skip
"""To the master, where nothing else is said. A cut link is silent, both ways or one: who is cut from its slaves is so from clients, but for
gRPC; one that is cut off is cut from all of them. Links flap, and disks are slow or full, at any broker. A damaged slave has an octet
that another program has changed; an empty one has lost its folder. Wall clocks are set by hours, ahead or back. Seeds that 3 divides have
an etcd of three members."""
SAMPLE: Final = Path(__file__).parents[2] / "deploy" / "2m-2s-etcd" / "broker-a-1.yaml"
"""Of a name with two members."""
CLOCK_MIN_S: Final = 3_600
CLOCK_MAX_S: Final = 9 * 3_600
LATER_S: Final = 12 * 3_600
"""Longer than any clock is set ahead. A broker that believed one would deliver it."""
LATER_QUEUE_ID: Final = 1
BATCH_COUNTS: Final = {0: 1, 2: 16, 3: 1}
"""Of each producer, by its queue: how many messages it sends in a call."""
CLOCK_TRIES: Final = 3
"""A busy machine may cost a master its lease, whatever its clock says; so often in a row it does not."""


def kinds_of(seed: int, rounds: int, faults: tuple[str, ...] = FAULTS) -> list[str]:
    """The faults of a seed, in their order: each once before any comes again. The next seed goes on where this one ends."""
    first = (seed - 1) * rounds
    return [_shuffled(faults, number // len(faults))[number % len(faults)] for number in range(first, first + rounds)]


def _shuffled(faults: tuple[str, ...], turn: int) -> list[str]:
    return Random(f"faults {turn}").sample(faults, len(faults))


class _Round:
    """What is done to a cluster. `pauses_s`: the longest time without an answer behind each fault; `parts_ms`: what those of kills of a
    master consist of."""

    def __init__(self, sick: _SickCluster, producers: CountingProducers, rng: Random, counts: Counter[str]) -> None:
        self.cluster, self.disks, self.clocks, self.producers, self.rng = sick.cluster, sick.disks, sick.clocks, producers, rng
        self.counts = counts
        self.found: list[Violation] = []
        self.pauses_s: dict[str, list[float]] = {}
        self.parts_ms: list[dict[str, int]] = []

    def run(self, fault: str) -> None:
        """Does it, waits until the producers are answered, and until all are in sync again."""
        master = self._wait_all()
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
        elif fault == "etcd leader":
            self._lose_etcd_leader()
        elif fault == "slow link":
            self._slow_link(master)
        elif fault == "flapping":
            self._flap()
        elif fault.endswith("disk"):
            self._spoil_disk(is_full=fault == "full disk")
        elif fault == "damaged slave":
            self._damage(self.rng.choice(slaves))
        elif fault == "empty slave":
            self._empty(self.rng.choice(slaves))
        elif fault == "switch":
            wait_for(self._switch, PATIENCE_S)
        elif fault == "clock of the master":
            self._set_clock(master)
        elif fault == "clock of a slave":
            self._set_clock(self.rng.choice(slaves))
        elif fault.startswith("clocks"):
            self._change_with_wrong_clocks(master, is_kill=fault == "clocks and kill")
        elif fault == "terminate":
            assert master.stop() == 0
            self.producers.wait_for_more()
            master.start()
        elif fault.startswith("cut"):
            links = self._links(master)
            some = {"cut from etcd": [*links.etcd], "cut from slaves": [links.remoting], "cut off": [*links.all]}
            self._cut(some.get(fault) or self.rng.choice([*some.values()]), both_ways=fault != "cut one way")
        else:
            order = [master, *slaves] if fault == "kill all" else [master, self.rng.choice(slaves)]
            self.rng.shuffle(order)
            self._kill(order)
        self.producers.wait_for_more()
        pause_s = self.producers.longest_pause_s(begun_s)
        self.pauses_s.setdefault(fault, []).append(pause_s)
        self.counts[fault] += 1
        print(f"{fault}: {pause_s * 1_000:.0f} ms without an answer", flush=True)

    def _wait_all(self) -> HaBroker:
        return self.cluster.wait_leading(len(self.cluster.brokers))

    def _a_step_s(self) -> float:
        return self.rng.choice((-1, 1)) * self.rng.uniform(CLOCK_MIN_S, CLOCK_MAX_S)

    def _set_clock(self, broker: HaBroker) -> None:
        """For longer than a lease, and right again: nobody else leads for it."""
        clock = self.clocks[self.cluster.brokers.index(broker)]
        for _ in range(CLOCK_TRIES):
            elections = self.cluster.led_epochs().total()
            clock.set(self._a_step_s())
            time.sleep(self.rng.uniform(4, 6))
            self.producers.wait_for_more()
            clock.set(0)
            self.producers.wait_for_more()
            if self.cluster.led_epochs().total() == elections:
                self.counts["clocks set without an election"] += 1
                return
        self.found.append(Violation("a spurious fail-over", f"the clock of {broker.folder.name} was set, and another one led, each time"))

    def _change_with_wrong_clocks(self, master: HaBroker, *, is_kill: bool) -> None:
        """All say something else while the lead changes."""
        for clock in self.clocks:
            clock.set(self._a_step_s())
        time.sleep(self.rng.uniform(0.2, 2))
        if is_kill:
            self._kill([master])
        else:
            wait_for(self._switch, PATIENCE_S)
        self.producers.wait_for_more()
        for clock in self.clocks:
            clock.set(0)

    def _kill(self, brokers: list[HaBroker]) -> None:
        with FailoverWatch(self.cluster) as watch:
            watch.begin()
            for broker in brokers:
                broker.kill()
            # One that is left alone may lead by itself only if the others had left the set before.
            if len(brokers) == 1:
                self.producers.wait_for_more()
        if watch.is_whole:
            parts = watch.parts_ms(self.producers.first_answer_s(watch.elected_s))
            self.parts_ms.append(parts)
            print(", ".join(f"{name} {ms} ms" for name, ms in parts.items()), flush=True)
            print(f"  {self.cluster.last_change()}", flush=True)
        self.rng.shuffle(brokers)
        for broker in brokers:
            broker.start()

    def _stop(self, broker: HaBroker) -> None:
        """For longer or shorter than a lease."""
        broker.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(self.rng.uniform(0.5, 8))
        finally:
            broker.process.send_signal(signal.SIGCONT)

    def _links(self, broker: HaBroker) -> Links:
        return self.cluster.links[self.cluster.brokers.index(broker)]

    def _cut(self, links: list[FaultProxy], *, both_ways: bool = True) -> None:
        """For longer or shorter than a lease, and than slaves are waited for."""
        faults = {"drop_requests": True, "drop_answers": True}
        if not both_ways:
            del faults[self.rng.choice([*faults])]
        for link in links:
            link.set(**faults)
        time.sleep(self.rng.uniform(0.5, 12))
        for link in links:
            link.heal()

    def _flap(self) -> None:
        """Some links of one broker are cut and mended again, again and again."""
        links = self._links(self.rng.choice(self.cluster.brokers)).all
        for _ in range(self.rng.randint(4, 10)):
            some = self.rng.sample(links, self.rng.randint(1, len(links)))
            for link in some:
                link.set(drop_requests=True, drop_answers=True)
            time.sleep(self.rng.uniform(0.05, 1.5))
            for link in some:
                link.heal()
            time.sleep(self.rng.uniform(0.05, 1))

    def _slow_link(self, master: HaBroker) -> None:
        """Each piece that passes is late, both ways, and one of a hundred is lost; sometimes the lead changes meanwhile."""
        links = self._links(master).all
        delay_s = self.rng.choice([0.002, 0.05])
        for link in links:
            link.set(delay_s=delay_s, loss_probability=0.01)
        if self.rng.random() < 0.5:
            self._switch()
        self.producers.wait_for_more(10)
        for link in links:
            link.heal()

    def _spoil_disk(self, *, is_full: bool) -> None:
        disk = self.rng.choice(self.disks)
        with disk.full() if is_full else disk.slow(self.rng.choice([20, 200, 1_000])):
            time.sleep(self.rng.uniform(0.5, 6))

    def _damage(self, slave: HaBroker) -> None:
        """An octet of its log is another one when it starts again; it is healed from another broker, and serves again after a start."""
        end = slave.status().confirmed_position
        slave.kill()
        position = self.rng.randrange(end * 3 // 4)
        files = sorted((slave.folder / "commitlog").glob("[0-9]*"))
        size = files[0].stat().st_size
        with files[position // size].open("r+b") as file:
            file.seek(position % size)
            octet = file.read(1)
            file.seek(position % size)
            file.write(bytes([octet[0] ^ 1 << self.rng.randrange(8)]))
        slave.start()
        master = self._wait_all()

        def is_healed() -> bool:
            read_all(slave, end_s=0)  # whoever reads finds it
            return slave.log_bytes(end) == master.log_bytes(end)

        wait_for(is_healed, 2 * PATIENCE_S)
        slave.kill()
        slave.start()

    def _empty(self, slave: HaBroker) -> None:
        slave.kill()
        shutil.rmtree(slave.folder)
        slave.start()

    def _lose_etcd(self) -> None:
        self.cluster.etcd.kill()
        time.sleep(self.rng.uniform(0.5, 8))
        self.cluster.etcd.start()

    def _lose_etcd_leader(self) -> None:
        """Alone it is all of etcd."""
        self.cluster.etcd.leader().kill()
        time.sleep(self.rng.uniform(0.5, 8))
        self.cluster.etcd.start()

    def _switch(self) -> bool:
        """Whether the lead was given away."""
        try:
            with Admin(namesrv=self.cluster.namesrv) as admin:
                admin.switch_master(NAME)
        except ProtomqError:  # a slave's store is being opened again
            return False
        return True


@dataclass
class _SickCluster:
    """Its links can be cut, its disks be slow or full where they are here, and its clocks be set."""

    cluster: ElectedCluster
    disks: list[SickDisk]
    clocks: list[SteppedClock]


@contextmanager
def _sick_cluster(folder: Path, seed: int, members: int) -> Iterator[_SickCluster]:
    clocks = [SteppedClock(folder / f"clock-{number}") for number in range(members)]
    disks: list[SickDisk] = []
    if not why_no_sick_disk():
        library = build_library(folder)
        disks += [SickDisk(folder / f"disk-{number}", library) for number in range(members)]
    environments = [clock.environment for clock in clocks]
    for environment, disk in zip(environments, disks, strict=False):
        environment |= disk.environment
    settings: dict[str, Any] = {"ha": yaml.safe_load(SAMPLE.read_text())["ha"]} if members == 2 else {}
    with elected_cluster(
        folder,
        has_links=True,
        count=members,
        etcd_count=1 if seed % 3 else 3,
        environments=environments,
        store={"sync_flush": bool(seed % 2), "corruption": "quarantine"},
        **settings,
    ) as cluster:
        try:
            yield _SickCluster(cluster, disks, clocks)
        except BaseException:
            print(cluster.last_lines(), file=sys.stderr)
            raise


def _send_later(cluster: ElectedCluster) -> None:
    """A message that must not come before all is over."""
    with Producer(namesrv=cluster.namesrv, send_timeout_s=PATIENCE_S) as producer:
        queue = MessageQueue(TOPIC, NAME, LATER_QUEUE_ID)
        assert producer.send(TOPIC, b"later", queue=queue, delay=LATER_S).recall_handle


def failover_rounds(
    seed: int, rounds: int, counts: Counter[str], faults: tuple[str, ...] = FAULTS, members: int = 3
) -> list[Violation]:
    """So many rounds. `counts` gets the faults, and the time without service behind them. `members`: of the name."""
    rng = Random(seed)
    if why_no_sick_disk():
        faults = tuple(fault for fault in faults if not fault.endswith("disk"))
    if members == 2:
        faults = tuple(fault for fault in faults if fault != "kill two")
    with (
        tempfile.TemporaryDirectory(prefix="protomq-failover-") as name,
        _sick_cluster(Path(name), seed, members) as sick,
    ):
        cluster = sick.cluster
        before = {queue_id: len(cluster.bodies(queue_id)) for queue_id in BATCH_COUNTS}
        with CountingProducers(cluster.namesrv, BATCH_COUNTS) as producers, ReadingThread(cluster, [*BATCH_COUNTS]) as reader:
            producers.wait_for_more()
            _send_later(cluster)
            made = _Round(sick, producers, rng, counts)
            for number, fault in enumerate(kinds_of(seed, rounds, faults), 1):
                print(f"seed {seed}, round {number} of {rounds}: {fault}", flush=True)
                made.run(fault)
                counts["rounds"] += 1
                if made.found:
                    return made.found
        master = cluster.wait_leading(members)
        bodies = {queue_id: cluster.bodies(queue_id) for queue_id in BATCH_COUNTS}
        try:
            for producer in producers.all:
                producer.check(bodies[producer.queue_id][before[producer.queue_id] :])
        except AssertionError as error:
            return [Violation("lost, twice or out of order", str(error))]
        early = read_all(master, queue_id=LATER_QUEUE_ID)
        if early:
            return [Violation("delivered early", f"{len(early)} messages that are due in {LATER_S // 3_600} h")]
        for queue_id, read in reader.bodies.items():
            taken_back = [offset for offset, body in enumerate(read) if bodies[queue_id][offset : offset + 1] != [body]]
            if taken_back:
                return [Violation("read and taken back", f"{len(taken_back)} messages of queue {queue_id}, offsets {taken_back[:20]}")]
        end = master.status().end_position
        for broker in cluster.brokers:
            if broker is not master:
                broker.wait_for_all_of(master)
                if broker.log_bytes(end) != master.log_bytes(end):
                    return [Violation("logs differ", f"{broker.folder.name} and {master.folder.name}")]
        counts["read"] += sum(map(len, reader.bodies.values()))
        twice = [epoch for epoch, count in cluster.led_epochs().items() if count > 1]
        if twice:
            return [Violation("two writers of an epoch", f"epochs {sorted(twice)} were led twice")]
        for producer in producers.all:
            counts["acknowledged"] += len(producer.acknowledged)
            counts["acknowledged in batches"] += len(producer.acknowledged) if producer.batch_count > 1 else 0
            counts["failed sends"] += len(producer.failures)
        for fault, pauses_s in made.pauses_s.items():
            _note_times(seed, f"{fault}: ms without an answer", [round(1_000 * pause_s) for pause_s in pauses_s], counts)
        for name in made.parts_ms[0] if made.parts_ms else ():
            _note_times(seed, f"{name}, ms", [parts[name] for parts in made.parts_ms], counts)
        if made.parts_ms:
            promotions_ms = [sum(parts.values()) - parts[LEASE_PART] for parts in made.parts_ms]
            _note_times(seed, "promotion, ms", promotions_ms, counts)
    return []


def _note_times(seed: int, name: str, times_ms: list[int], counts: Counter[str]) -> None:
    """The largest median of a seed, and the longest of all."""
    median_ms = round(statistics.median(times_ms))
    print(f"seed {seed}, {name}: {sorted(times_ms)}, median {median_ms}")
    for which, value in (("median", median_ms), ("longest", max(times_ms))):
        counts[f"{name}, {which}"] = max(counts[f"{name}, {which}"], value)
