"""L2: the store as a hypothesis state machine. It looks for the shortest script of operations, faults and restarts that breaks a promise.

The rules are the operations of a `StoreWorld`; after every crash all is read and compared, and at the end all is checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protomq_broker.store.errors import WritesRefusedError
from protomq_broker.testing.simdisk import Fault, SimulatedCrash

from .checker import check_history, check_store_files, explain
from .store_world import QUEUES, TOPICS, StoreWorld

SEEDS = st.integers(0, 1 << 32)


class StoreMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    world: StoreWorld

    @initialize(seed=SEEDS, sync_flush=st.booleans())
    def begin(self, seed: int, sync_flush: bool) -> None:
        self.world = StoreWorld(seed, sync_flush=sync_flush)
        self.world.open()

    def _do(self, action: Callable[[], None]) -> None:
        """An operation on a disk that may fail: the process ends, or the caller is told."""
        try:
            action()
        except SimulatedCrash:
            self._restart("kill", 0)
        except (WritesRefusedError, OSError):
            pass

    @property
    def is_open(self) -> bool:
        return self.world.store is not None

    @rule(counts=st.lists(st.sampled_from((1, 1, 2, 5, 40)), min_size=1, max_size=4))
    @precondition(lambda self: self.is_open)
    def append(self, counts: list[int]) -> None:
        self._do(lambda: self.world.send([self.world.new_order(count=count) for count in counts]))

    @rule()
    @precondition(lambda self: self.is_open)
    def flush(self) -> None:
        self._do(self.world.flush)

    @rule()
    @precondition(lambda self: self.is_open)
    def checkpoint(self) -> None:
        self._do(self.world.checkpoint)

    @rule()
    @precondition(lambda self: self.is_open)
    def housekeeping(self) -> None:
        self._do(self.world.housekeeping)

    @rule(count=st.integers(1, 3))
    @precondition(lambda self: self.is_open)
    def delete_segments(self, count: int) -> None:
        self._do(lambda: self.world.delete_old(count))

    @rule()
    @precondition(lambda self: self.is_open)
    def create_topic(self) -> None:
        self._do(self.world.create_topic)

    @rule()
    @precondition(lambda self: self.is_open)
    def commit_offsets(self) -> None:
        self._do(self.world.commit_offsets)

    @rule()
    @precondition(lambda self: self.is_open)
    def retry(self) -> None:
        self._do(self.world.retry_uncertain)

    @rule(topic=st.sampled_from(TOPICS), queue=st.integers(0, QUEUES - 1), back=st.integers(0, 20))
    @precondition(lambda self: self.is_open)
    def read(self, topic: str, queue: int, back: int) -> None:
        world = self.world
        assert world.store is not None
        start, end = world.store.queue_range(topic, queue)
        if start < end:
            reader = f"r{len(world.history.events)}"  # a new one, that has read nothing yet
            world.poll(topic, queue, max(start, end - 1 - back), process=reader)

    @rule(
        number=st.integers(1, 12),
        fault=st.sampled_from((Fault.EIO, Fault.ENOSPC, Fault.SHORT, Fault.SYNC_LOST, Fault.CRASH)),
        for_ever=st.booleans(),
    )
    @precondition(lambda self: self.is_open)
    def fail_later(self, number: int, fault: Fault, for_ever: bool) -> None:
        """The disk will fail; until something else is planned."""
        self.world.disk.fail_at(number, fault, for_ever=for_ever)

    @rule()
    def heal(self) -> None:
        self.world.disk.plan = None

    @rule(kind=st.sampled_from(("kill", "power", "power")), seed=SEEDS)
    def crash(self, kind: str, seed: int) -> None:
        """The process or the machine goes, and comes back."""
        self._restart(kind, seed)

    @rule(seed=SEEDS, number=st.integers(1, 30), kind=st.sampled_from(("kill", "power")))
    def crash_in_recovery(self, seed: int, number: int, kind: str) -> None:
        """It goes once more while it comes back."""
        rng = random.Random(seed)
        world = self.world.fork(kind, rng)
        world.disk.fail_at(number, Fault.CRASH)
        try:
            world.open()
        except SimulatedCrash:
            pass
        self.world = world
        self._restart(rng.choice(("kill", "power")), seed + 1)

    @rule()
    @precondition(lambda self: self.is_open)
    def close(self) -> None:
        """A clean stop; then the files are checked."""
        world = self.world
        world.disk.plan = None
        world.close()
        files = world.files()
        if "abort" not in files:  # else something had failed, and the next start sees to it
            found = check_store_files(files)
            assert not found, explain(found)
        self._restart("kill", 0)

    def _restart(self, kind: str, seed: int) -> None:
        world = self.world.fork(kind, random.Random(seed))
        world.open()
        world.scan()
        found = check_history(world.history.events, world.promise)
        found += world.check_settings() + world.check_look_ups()
        self.world = world
        assert not found, explain(found)

    @invariant()
    def positions_are_in_order(self) -> None:
        """Whatever happens."""
        store = getattr(self, "world", None) and self.world.store
        if store:
            assert store.flushed_position <= store.appended_position
            assert store.readable_position <= store.appended_position

    def teardown(self) -> None:
        """A power cut at the end of every script."""
        if hasattr(self, "world"):
            found = self.world.fork("power", random.Random(1)).verify()
            assert not found, explain(found)
