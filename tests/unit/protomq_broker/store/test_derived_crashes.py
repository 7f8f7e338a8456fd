"""The derived structures together, with a crash or a failing disk at every single operation."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from protomq_broker.store.index import index, index_runs
from protomq_broker.store.index.index import MessageIndex
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from protomq_broker.store.start.settings import make_folders
from protomq_broker.store.state.repeated_sends import RepeatedSends
from protomq_broker.store.state.send_errors import RepeatedSend
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from tests.unit.protomq_broker.store.derived_helpers import ListLog, Send, use_small_files


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_files(monkeypatch.setattr)
    for module in (index, index_runs):
        monkeypatch.setattr(module, "ROWS_PER_RUN", 32)
    for name, value in (("_ROWS_PER_BLOCK", 8), ("_BLOCK_SIZE_BYTES", 128), ("_BLOCKS_PER_RUN", 4)):
        monkeypatch.setattr(index_runs, name, value)
    monkeypatch.setattr(index_runs, "_FENCES_SIZE_BYTES", 4 * 12)
    monkeypatch.setattr(index_runs, "_RUN_SIZE_BYTES", 4 * 128 + 4 * 12 + 4)


@dataclass
class Broker:
    """What is derived, over a log that is a list. `durable`: the log survives up to there."""

    disk: SimDisk
    log: ListLog = field(default_factory=ListLog)
    durable: int = 0

    def start(self) -> None:
        """As recovery does it."""
        make_folders(self.disk, "/s")
        self.queues = ConsumeQueueTable(self.disk, "/s/consumequeue", files_max=4)
        self.index = MessageIndex(self.disk, "/s/index")
        self.repeated = RepeatedSends(
            self.disk, "/s/repeatedsends", end_offset_of=self.queues.end_offset
        )
        self.all = (self.queues, self.index, self.repeated)
        for structure in self.all:
            structure.load()
        position = min(structure.replay_from for structure in self.all)
        for start, end in zip(self.log.boundaries, self.log.boundaries[1:], strict=False):
            if start >= position:
                for structure in self.all:
                    structure.replay(self.log.scanned(start, end))
        assert not any(structure.needs_rebuild for structure in self.all)
        for structure in self.all:
            structure.truncate(self.log.end)

    def start_and_checkpoint(self) -> None:
        self.start()
        self.checkpoint()

    def append(self, *sends: Send) -> None:
        requests = self.log.append(*sends)
        for structure in self.all:
            structure.apply(requests)

    def flush(self) -> None:
        for structure in self.all:
            structure.flush()

    def checkpoint(self) -> None:
        self.durable = position = self.log.end
        for structure in self.all:
            structure.checkpoint(position)

    def work(self, first_sequence: int) -> None:
        """A bit of everything, a checkpoint in the middle."""
        for turn in range(8):
            self.append(
                Send("a", turn % 2, 3, 7, 0, first_sequence + 10 * turn, key_hashes=[5, 0, 6]),
                Send("b", 0, 1, 8, 0, first_sequence + turn, key_hashes=[turn + 1]),
            )
            if turn % 3 == 1:
                self.flush()
            if turn == 4:
                self.checkpoint()
        self.checkpoint()

    def expect_all(self) -> None:
        for topic, queue_id in self.log.queues():
            records = self.log.of_queue(topic, queue_id)
            queue = self.queues.find(topic, queue_id)
            assert queue is not None
            assert queue.entries(0, 1000).tolist() == [
                (r.position, r.size, r.tag_code) for r in records
            ]
            assert queue.end_offset == len(records)
        keys: dict[int, list[int]] = {}
        for record in self.log.records:
            keys.setdefault(record.key_hash, []).insert(0, record.position)
            found = self.repeated.admit(
                record.producer_id, 0, record.sequence, 1, topic=record.topic
            )
            assert found == RepeatedSend(record.topic, record.queue_id, record.queue_offset)
        keys.pop(0, None)
        for key, positions in keys.items():
            assert self.index.find_key(key) == positions
        assert self.repeated.admit(7, 0, 5_000_000, 1, topic="a") is None
        self.repeated.drop_claims()


@pytest.mark.slow
def test_a_power_cut_at_any_operation_leaves_what_the_log_says():
    count = _operations_of(lambda broker: broker.work(1000))
    assert count > 50
    for number in range(1, count + 1):
        rng = random.Random(number)
        broker = _started(SimDisk())
        broker.work(0)
        broker.disk.fail_at(number, Fault.CRASH)
        with pytest.raises(SimulatedCrash):
            broker.work(1000)
        after = Broker(broker.disk.crash(rng), broker.log, broker.durable)
        after.log.cut(rng.choice([b for b in broker.log.boundaries if b >= broker.durable]))
        after.start()
        after.expect_all()


def test_a_power_cut_at_any_operation_of_a_start_leaves_what_the_log_says():
    def make(seed: int) -> Broker:
        broker = _started(SimDisk())
        broker.work(0)
        broker.append(Send("a", 0, 20, 7, 0, 900), Send("new", 0, 9, 8, 0, 900))
        broker.flush()
        disk = broker.disk.crash(random.Random(seed))
        broker.log.cut(broker.durable)
        return Broker(disk, broker.log, broker.durable)

    for seed in range(3):
        broker = make(seed)
        before = broker.disk.operations
        broker.start_and_checkpoint()
        for number in range(1, broker.disk.operations - before + 1):
            again = make(seed)
            again.disk.fail_at(number, Fault.CRASH)
            with pytest.raises(SimulatedCrash):
                again.start_and_checkpoint()
            after = Broker(again.disk.crash(random.Random(number)), again.log, again.durable)
            after.start()
            after.expect_all()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.SHORT, Fault.SYNC_LOST])
def test_a_disk_that_fails_once_loses_nothing(fault: Fault):
    count = _operations_of(lambda broker: broker.work(1000))
    for number in range(1, count + 1):
        broker = _started(SimDisk())
        broker.work(0)
        broker.disk.fail_at(number, fault)
        sends = broker.append
        for turn in range(8):
            sends(
                Send("a", turn % 2, 3, 7, 0, 1000 + 10 * turn, key_hashes=[5, 0, 6]),
                Send("b", 0, 1, 8, 0, 1000 + turn),
            )
            for step in (broker.flush, broker.checkpoint) if turn in (4, 7) else (broker.flush,):
                try:
                    step()
                except OSError:
                    pass
        broker.expect_all()
        broker.disk.plan = None
        broker.checkpoint()
        broker.expect_all()
        after = Broker(broker.disk.crash(random.Random(number)), broker.log, broker.durable)
        after.start()
        after.expect_all()


def _started(disk: SimDisk) -> Broker:
    broker = Broker(disk)
    broker.start()
    return broker


def _operations_of(work) -> int:
    broker = _started(SimDisk())
    broker.work(0)
    before = broker.disk.operations
    work(broker)
    return broker.disk.operations - before
