from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq_broker.store.index import index as index_module
from protomq_broker.store.index import index_rows, index_runs
from protomq_broker.store.index.index import MessageIndex
from protomq_broker.store.index.index_rows import message_id_hash
from protomq_broker.store.index.index_runs import IndexDamagedError
from protomq_broker.store.start.settings import make_folders
from protomq_broker.testing.simdisk import Fault, SimDisk
from tests.unit.protomq_broker.store.derived_helpers import ListLog, LoggedRecord, Send

FOLDER = "/s/index"


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_runs(monkeypatch.setattr)


def use_small_runs(set_) -> None:
    for name, value in (
        ("_ROWS_PER_BLOCK", 8),
        ("_BLOCK_SIZE_BYTES", 128),
        ("_BLOCKS_PER_RUN", 8),
    ):
        set_(index_runs, name, value)
    set_(index_module, "ROWS_PER_RUN", 64)
    set_(index_runs, "ROWS_PER_RUN", 64)
    set_(index_runs, "_FENCES_SIZE_BYTES", 8 * 12)
    set_(index_runs, "_RUN_SIZE_BYTES", 8 * 128 + 8 * 12 + 4)


def make_index(disk: SimDisk, log: ListLog | None = None) -> MessageIndex:
    make_folders(disk, "/s")
    index = MessageIndex(disk, FOLDER)
    index.load()
    if log is not None:
        for block_start, block_end in zip(log.boundaries, log.boundaries[1:], strict=False):
            if block_end > index.replay_from:
                index.replay(log.scanned(block_start, block_end))
        index.truncate(log.end)
    return index


def positions_of_key(index: MessageIndex, log: ListLog, key_hash: int, **limits: int) -> list[int]:
    """What a caller finds: candidates whose record has the key."""
    by_position = log.by_position()
    found = index.find_key(key_hash, **limits)
    return [p for p in found if p in by_position and by_position[p].key_hash == key_hash]


class BusyIndex(MessageIndex):
    """Another thread does something, once, when this one has just looked at the tail of a checkpoint."""

    beside: Callable[[], None] | None = None
    _looked: Any = None

    @property
    def _tail(self) -> Any:
        looked, beside = self._looked, self.beside
        if beside is not None:
            self.beside = None
            beside()
        return looked

    @_tail.setter
    def _tail(self, rows: Any) -> None:
        self._looked = rows


def find_by_id(index: MessageIndex, log: ListLog, wanted: LoggedRecord) -> LoggedRecord | None:
    """The walk from a candidate to the record, as `find_message_id` describes it."""
    by_position, by_offset = log.by_position(), log.by_offset()
    identity = (wanted.producer_id, wanted.producer_epoch)
    for position in index.find_message_id(*identity, wanted.sequence):
        first = by_position.get(position)
        if (
            first is None
            or (first.producer_id, first.producer_epoch) != identity
            or first.sequence > wanted.sequence
        ):
            continue
        found = by_offset.get(
            (first.topic, first.queue_id, first.queue_offset + wanted.sequence - first.sequence)
        )
        if found is not None and (found.producer_id, found.producer_epoch, found.sequence) == (
            *identity,
            wanted.sequence,
        ):
            return found
    return None


def expect_all(index: MessageIndex, log: ListLog, sample: int = 50) -> None:
    """Looks up keys and ids of some records, evenly spread."""
    records = log.records[:: max(1, len(log.records) // sample)]
    for key in {r.key_hash for r in records} - {0}:
        expected = sorted((r.position for r in log.records if r.key_hash == key), reverse=True)
        assert positions_of_key(index, log, key) == expected
    assert positions_of_key(index, log, 999_999) == []
    for record in records:
        if record.producer_id:
            assert find_by_id(index, log, record) == record


def test_the_scalar_and_the_vector_hash_agree():
    rng = random.Random(1)
    rows = [(rng.getrandbits(64), rng.getrandbits(32), rng.getrandbits(64), 5) for _ in range(100)]
    columns = np.array(rows, np.uint64).T
    assert index_rows._message_id_rows(*columns)["hash"].tolist() == [
        message_id_hash(*row[:3]) for row in rows
    ]


def test_keys_and_ids_of_single_and_batched_sends_are_found():
    log, index = ListLog(), make_index(SimDisk())
    index.apply(log.append(Send(records=1, producer_id=7, first_sequence=3, key_hashes=[11])))
    index.apply(
        log.append(
            Send(records=3, producer_id=7, first_sequence=255, key_hashes=[11, 0, 12], queue_id=2),
            Send(records=2, producer_id=(1 << 64) - 1, producer_epoch=9, first_sequence=0),
            Send(records=600, producer_id=8, first_sequence=(1 << 62) + 100),
        )
    )
    expect_all(index, log)
    assert index.find_message_id(0, 0, 0) == []


def test_a_batch_needs_a_row_for_each_256_sequences_only():
    log, index = ListLog(), make_index(SimDisk())
    index.apply(log.append(Send(records=1000, producer_id=8, first_sequence=100)))
    index.find_key(1)
    assert index._tail_count == 5


def test_what_has_neither_key_nor_producer_has_no_row():
    log, index = ListLog(), make_index(SimDisk())
    index.apply(log.append(Send(records=20), Send()))
    index.find_key(1)
    assert index._tail_count == 0


def test_the_newest_come_first_and_no_more_than_asked_for():
    log, index = ListLog(), make_index(SimDisk())
    for _ in range(100):
        index.apply(log.append(Send(key_hashes=[5]), Send(key_hashes=[6])))
    index.checkpoint(log.end)
    assert len(index._runs) == 3
    positions = [r.position for r in log.records if r.key_hash == 5][::-1]
    assert index.find_key(5, count_max=70) == positions[:70]
    assert index.find_key(5, count_max=1) == positions[:1]
    assert (
        index.find_key(5, start_position=positions[80], end_position=positions[20])
        == positions[21:81]
    )


def test_a_clean_start_finds_what_was_there():
    disk, log = SimDisk(), ListLog()
    index = make_index(disk)
    for turn in range(120):
        index.apply(
            log.append(
                Send(
                    records=1 + turn % 3,
                    producer_id=4,
                    first_sequence=turn * 3,
                    key_hashes=[turn % 7] * (1 + turn % 3),
                )
            )
        )
    index.checkpoint(log.end)
    again = make_index(disk)
    assert again.replay_from == log.end
    expect_all(again, log)


def test_without_files_everything_is_rebuilt():
    disk, log = SimDisk(), ListLog()
    index = make_index(disk)
    for turn in range(120):
        index.apply(
            log.append(
                Send(
                    records=5,
                    producer_id=4,
                    first_sequence=turn * 5,
                    key_hashes=[turn, 1, 2, 0, turn],
                )
            )
        )
    index.checkpoint(log.end)
    disk.remove(FOLDER)
    again = make_index(disk, log)
    assert again.replay_from == 0
    expect_all(again, log)


@pytest.mark.parametrize("name", ["index.bin", "tail.1", "run.00000000000000000000"])
@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_lost_file_means_a_rebuild(name: str, how: str):
    disk, log = SimDisk(), ListLog()
    index = make_index(disk)
    for turn in range(100):
        index.apply(log.append(Send(key_hashes=[1 + turn % 5])))
    index.checkpoint(log.end)
    path = f"{FOLDER}/{name}"
    if how == "gone":
        disk.unlink(path)
    else:
        disk.cut(path, len(disk.content(path)) - 1)
    again = make_index(disk, log)
    assert again.replay_from == 0
    expect_all(again, log)


@pytest.mark.parametrize("part", ["block", "fences"])
def test_a_flipped_bit_in_a_run_is_noticed_and_the_next_start_rebuilds(part: str):
    disk, log = SimDisk(), ListLog()
    index = make_index(disk)
    for _ in range(100):
        index.apply(log.append(Send(key_hashes=[5])))
    index.checkpoint(log.end)
    path = f"{FOLDER}/run.{0:020d}"
    disk.flip_bit(path, 8 * (3 if part == "block" else 8 * 128 + 3))
    again = make_index(disk)
    with pytest.raises(IndexDamagedError):
        again.find_key(5)
    again.checkpoint(log.end)
    healed = make_index(disk, log)
    assert healed.replay_from == 0
    expect_all(healed, log)


def test_runs_of_a_part_of_the_log_that_is_gone_are_removed():
    disk, log = SimDisk(), ListLog()
    index = make_index(disk)
    for _ in range(200):
        index.apply(log.append(Send(key_hashes=[5])))
    index.checkpoint(log.end)
    positions = [r.position for r in log.records]
    index.delete_below(positions[130])
    killed = MessageIndex(disk.killed(), FOLDER)
    killed.load(positions[130])
    assert killed.replay_from == log.end
    assert [name for name in disk.list(FOLDER) if name.startswith("run.")] == [
        f"run.{positions[128]:020d}"
    ]
    index.checkpoint(log.end)
    again = make_index(disk)
    assert again.find_key(5, start_position=positions[130]) == positions[130:][::-1]


def test_rows_of_what_the_log_has_lost_are_cut():
    disk, log = SimDisk(), ListLog()
    index = make_index(disk)
    for _ in range(100):
        index.apply(log.append(Send(key_hashes=[5])))
    index.checkpoint(log.end)
    log.cut(log.boundaries[30])
    index.truncate(log.end)
    for _ in range(50):
        index.apply(log.append(Send(key_hashes=[6])))
    expect_all(index, log)
    index.flush()
    expect_all(make_index(disk, log), log)


def test_a_failed_sync_is_not_tried_again_in_hope():
    disk, log = SimDisk(), ListLog()
    index = make_index(disk)
    index.apply(log.append(Send(key_hashes=[5])))
    index.checkpoint(log.end)
    index.apply(log.append(Send(key_hashes=[6])))
    index.flush()
    disk.fail_at(1, Fault.SYNC_LOST)
    with pytest.raises(OSError):
        index.checkpoint(log.end)
    disk.plan = None
    index.checkpoint(log.end)
    again = make_index(disk.crash(random.Random(1), keep=0.0))
    assert again.replay_from == 0


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(5, 40))
def test_after_any_history_of_power_cuts_the_index_finds_what_the_log_has(seed: int, steps: int):
    with pytest.MonkeyPatch.context() as patch:
        use_small_runs(patch.setattr)
        rng = random.Random(seed)
        disk, log = SimDisk(), ListLog()
        index = make_index(disk)
        durable = 0
        sequence = 0
        for _ in range(steps):
            action = rng.choice(
                ["append"] * 6 + ["flush", "flush", "checkpoint", "power cut", "kill", "write back"]
            )
            if action == "append":
                sends = []
                for _ in range(rng.randint(1, 3)):
                    count = rng.choice([1, 1, 2, 30])
                    keys = [rng.choice([0, 0, 5, 6, 7, rng.getrandbits(64)]) for _ in range(count)]
                    sends.append(
                        Send(
                            "t",
                            rng.randrange(2),
                            count,
                            rng.choice([0, 8]),
                            0,
                            sequence,
                            key_hashes=keys,
                        )
                    )
                    sequence += count
                index.apply(log.append(*sends))
            elif action == "flush":
                index.flush()
            elif action == "checkpoint":
                durable = rng.choice([b for b in log.boundaries if b >= durable])
                index.checkpoint(durable)
            elif action == "write back":
                disk.write_back(rng)
            elif action == "kill":
                disk = disk.killed()
                index = make_index(disk, log)
            else:
                disk = disk.crash(rng)
                log.cut(rng.choice([b for b in log.boundaries if b >= durable]))
                index = make_index(disk, log)
            expect_all(index, log, 5)
        index.checkpoint(log.end)
        again = make_index(disk.crash(rng))
        assert again.replay_from == log.end
        expect_all(again, log)


def test_a_look_up_beside_a_checkpoint_changes_nothing_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index_module, "_TAIL_CAPACITY_MIN", 16)
    disk, log = SimDisk(), ListLog()
    make_folders(disk, "/s")
    index = BusyIndex(disk, FOLDER)
    index.load()
    index.apply(log.append(*(Send(key_hashes=[number], producer_id=number) for number in range(1, 5))))
    index.flush()
    index._tail[index._tail_count :] = 0  # whatever the memory had
    position = log.end

    def look_up() -> None:
        index.apply(log.append(*(Send(key_hashes=[number], producer_id=number) for number in range(5, 15))))
        assert index.find_key(14)

    flush = index.flush

    def flush_and_look() -> None:
        flush()
        index.beside = look_up

    monkeypatch.setattr(index, "flush", flush_and_look)
    index.checkpoint(position)
    again = MessageIndex(disk.killed(), FOLDER)
    again.load()
    assert not again.damage
    assert [bool(again.find_key(number)) for number in (1, 4, 5)] == [True, True, False]
