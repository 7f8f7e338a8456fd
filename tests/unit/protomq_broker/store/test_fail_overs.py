"""Fail-overs of two stores by turns, with all that leaves a state: a former master is truncated, and has what the new one has."""

from __future__ import annotations

import random

import pytest

from protomq_broker.store.log.agreement import START, last_agreed
from protomq_broker.store.store import Store
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

from .store_helpers import open_store, read_all
from .test_following import disk_of, log_of
from .test_late_logs import SEGMENT, TOPICS, Life, differences


class FailOvers:
    """A master that waits for its one replica. Each of them may be closed, killed or cut off from power, and each start interrupted."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.life = Life(seed)
        self.life.store.close()
        self.life.store = self.opened(disk_of(self.life.store), interruptions=0)
        self.life.store.lead(waits_for_replicas=True)
        self.replica = self.opened(SimDisk(), interruptions=0)
        self.confirmed = 0

    def opened(self, disk: SimDisk, interruptions: int = 5) -> Store:
        """Opened to follow, after some tries that a crash ends."""
        for _ in range(interruptions):
            if self.rng.random() < 0.5:
                break
            disk.fail_at(disk.operations + self.rng.randrange(1, 120), Fault.CRASH)
            try:
                open_store(disk, clock=self.life.clock, segment=SEGMENT, follows=True)
            except SimulatedCrash:
                pass
            disk = disk.killed() if self.rng.random() < 0.5 else disk.crash(self.rng)
        disk.plan = None
        return open_store(disk, clock=self.life.clock, segment=SEGMENT, follows=True)

    def ended(self, store: Store) -> SimDisk:
        """The disk of a store that is gone, in one way or another."""
        disk, way = disk_of(store), self.rng.randrange(4)
        if way == 0:
            store.close()
        return (disk, disk.killed(), disk.crash(self.rng), disk.crash(self.rng, keep=0.0))[way]

    def replicate(self) -> None:
        """The replica gets the next part of the log, which counts as confirmed then."""
        master, replica = self.life.store, self.replica
        start = replica.appended_position
        later = [end for end in self.life.ends if start < end <= master.appended_position]
        if later:
            replica.append_verbatim(start, log_of(disk_of(master), start, self.rng.choice(later[:20]), SEGMENT))
        self.confirm()

    def confirm(self) -> None:
        """What the replica has is confirmed; it may not have heard of that."""
        master, replica = self.life.store, self.replica
        master.positions.note_replicated(replica.appended_position)
        self.confirmed = max(self.confirmed, master.positions.confirmed)
        if self.rng.random() < 0.7:
            replica.positions.note_replicated(min(self.confirmed, replica.appended_position))

    def step(self) -> None:
        chance, store = self.rng.random(), self.rng.choice((self.life.store, self.replica))
        if chance < 0.6:
            self.life.step()
        elif chance < 0.73:
            self.replicate()
        elif chance < 0.85:
            store.checkpoint()
        elif chance < 0.95:
            for derived in store._files.derived:
                derived.flush()
        else:
            store.flush()

    def fail_over(self) -> None:
        """The master goes, the replica leads, and the former master follows it."""
        while self.replica.appended_position < self.confirmed:  # a power cut has taken it
            self.replicate()
        for _ in range(self.rng.randrange(20)):
            self.life.step()
            if self.rng.random() < 0.3:
                self.rng.choice((self.life.store.checkpoint, self.life.store._files.queues.flush))()
        disk, master = self.ended(self.life.store), self.replica
        master.lead(waits_for_replicas=True)
        master.positions.note_replicated(self.confirmed)
        self.life.store = master
        self.life.ends = [end for end in self.life.ends if end < master.appended_position] + [master.appended_position]
        for _ in range(self.rng.randrange(15)):
            self.life.step()
        former = self.opened(disk)
        while former.appended_position:
            point = last_agreed(former, master, former.epochs.rows[-1].epoch) or START
            if point.position == former.appended_position:
                break
            former.truncate_to(point)
            former = self.opened(self.ended(former))
        self.replica = former
        while self.replica.appended_position < master.appended_position:
            self.replicate()
        self.check()

    def check(self) -> None:
        master, replica = self.life.store, self.replica
        for store in (master, replica):
            store.positions.note_replicated(replica.appended_position)
        self.confirmed = master.positions.confirmed
        assert differences(replica, master) == {}
        for topic in TOPICS:
            if master.topics.find(topic) is not None:
                for queue_id in (0, 1):
                    assert read_all(replica, topic, queue_id) == read_all(master, topic, queue_id)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 11, 13, 41, 63, 75, 113, 133])
def test_a_former_master_has_what_the_next_one_has(seed: int) -> None:
    world = FailOvers(seed)
    for _ in range(4):
        for _ in range(world.rng.randrange(10, 60)):
            world.step()
        world.fail_over()
    master = world.life.store
    assert master.checkpoint()
    master.close()
    assert verify("/s", disk=disk_of(master)) == []
