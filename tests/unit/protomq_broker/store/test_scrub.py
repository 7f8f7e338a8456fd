"""Damage below the checkpoint is found while the store is open."""

from __future__ import annotations

import errno

import pytest

from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.files.side_files import OpenFile, OpenFiles
from protomq_broker.store.housekeeping.scrub import ROUND_INTERVAL_MS
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import Fault, SimDisk

from .log_helpers import ManualClock, make_request
from .store_helpers import SEGMENT, open_store, read_all, read_all_until_damage

COUNT = 90


def filled_store(disk: SimDisk, clock: ManualClock) -> Store:
    """A store of several segments, opened again: nothing of them is walked at the start."""
    store = open_store(disk, clock=clock)
    store.topics.create(TopicConfig("topic"))
    for index in range(COUNT):
        store.append([make_request([bytes([index]) * 300], queue_id=index % 2)])
    store.close()
    return open_store(disk, clock=clock)


def scrub(store: Store, clock: ManualClock, *, turns: int = 4) -> None:
    for _ in range(turns):
        store._upkeep.keeper.turn()
        clock.time_ms += 1000


def damage(disk: SimDisk, store: Store, how: str) -> None:
    """Damages segment 1."""
    if how == "a flipped bit":
        disk.flip_bit(f"/s/commitlog/{SEGMENT:020d}", 2000 * 8)
    elif how == "zeros":
        disk.overwrite(f"/s/commitlog/{SEGMENT:020d}", 1000, bytes(700))
    elif how == "cut short":
        disk.cut(f"/s/commitlog/{SEGMENT:020d}", 1000)
    else:
        store._folder.files = {b: f for b, f in store._folder.files.items() if b != SEGMENT}


@pytest.mark.parametrize("how", ["a flipped bit", "zeros", "cut short", "missing"])
def test_damage_is_set_aside_and_readers_are_told_behind_what_stands_before_it(how: str) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    expected = [read_all(store, queue_id=queue_id) for queue_id in (0, 1)]
    damage(disk, store, how)
    scrub(store, clock)
    (found,) = store.damaged_ranges
    assert SEGMENT <= found.start_position < found.end_position <= 2 * SEGMENT
    for _ in range(2):
        lost = 0
        for queue_id in (0, 1):
            good = len(read_all_until_damage(store, queue_id))
            if good == len(expected[queue_id]):
                continue
            assert good > 0
            with pytest.raises(CorruptLogError) as caught:
                store.read("topic", queue_id, good, 10, 1 << 20)
            following = caught.value.next_offset
            lost += following - good
            assert (
                read_all(store, queue_id=queue_id, offset=following)
                == expected[queue_id][following:]
            )
        assert lost == 1 if how == "a flipped bit" else lost > 1
        if how == "missing":
            return
        store.close()
        store = open_store(disk, clock=clock)  # it is remembered
        assert list(store.damaged_ranges) == [found]


def test_a_log_that_holds_is_walked_once_a_round_and_no_faster_than_allowed() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    reads: list[int] = []
    real = SimDisk.pread

    def pread(fd: int, size_bytes: int, position: int) -> bytes:
        data = real(disk, fd, size_bytes, position)
        reads.append(len(data))
        return data

    full = store.flushed_position // SEGMENT * SEGMENT
    store._upkeep.scrubber._size_bytes_per_s = SEGMENT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimDisk, "pread", lambda self, *args: pread(*args))
        for _ in range(full // SEGMENT + 3):
            before = sum(reads)
            store._upkeep.scrub(clock.time_ms)
            assert sum(reads) - before <= 2 * SEGMENT
            clock.time_ms += 1000
        once = sum(reads)
        assert full <= once < 2 * full
        store._upkeep.scrub(clock.time_ms)
        assert sum(reads) == once
        clock.time_ms += ROUND_INTERVAL_MS
        store._upkeep.scrub(clock.time_ms)
        clock.time_ms += 1000
        store._upkeep.scrub(clock.time_ms)
        assert sum(reads) > once
    assert not store.damaged_ranges


def test_old_segments_may_go_while_they_are_walked() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    store._upkeep.scrubber._size_bytes_per_s = SEGMENT // 2
    for number in range(12):
        store._upkeep.scrub(clock.time_ms)
        clock.time_ms += 1000
        if number % 3 == 2:
            store.delete_segments_below((number // 3 + 1) * SEGMENT)
    assert not store.damaged_ranges
    store.append([make_request([b"end"])])
    assert read_all(store)[-1][1] == b"end"


def test_a_disk_that_does_not_read_ends_the_round() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)

    def pread(fd: int, size_bytes: int, position: int) -> bytes:
        raise OSError(5, "a bad sector")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimDisk, "pread", lambda self, *args: pread(*args))
        store._upkeep.scrub(clock.time_ms)
        clock.time_ms += 1000
        store._upkeep.scrub(clock.time_ms)
    assert not store.damaged_ranges
    store.close()


def test_what_is_set_aside_stays_so_even_if_it_cannot_be_written_down() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    damage(disk, store, "a flipped bit")
    disk.fail_at(1, Fault.EIO, for_ever=True)
    scrub(store, clock)
    assert len(store.damaged_ranges) == 1


def test_entries_of_messages_that_retention_has_deleted_are_no_damage(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody asks for them, and the log has nothing by which they could be healed."""
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    store.checkpoint()
    store.delete_segments_below(3 * SEGMENT)
    disk.flip_bit(f"/s/consumequeue/topic/0/{0:020d}", 20 * 8 + 9)
    scrub(store, clock)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert store.healed_file_count == 0
    first = store.queue_range("topic", 0)[0]
    assert first > 1
    assert len(read_all(store, offset=first)) == COUNT // 2 - first
    disk.flip_bit(f"/s/consumequeue/topic/0/{0:020d}", (first + 1) * 20 * 8 + 9)
    clock.time_ms += ROUND_INTERVAL_MS
    scrub(store, clock)
    assert store.healed_file_count == 1


def test_a_queue_file_that_cannot_be_read_keeps_the_scrub_from_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    first, second = (f"/s/consumequeue/topic/{queue_id}/{0:020d}" for queue_id in (0, 1))
    real = OpenFiles.get

    def get(files: OpenFiles, path: str, *, create: bool = False) -> OpenFile:
        if path == first:
            raise OSError(errno.EIO, "Input/output error", path)
        return real(files, path, create=create)

    monkeypatch.setattr(OpenFiles, "get", get)
    disk.flip_bit(second, 20 * 8 + 9)
    scrub(store, clock)
    assert store.healed_file_count == 1
    (error,) = {record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()}
    assert first in error


def test_a_topic_that_is_deleted_while_its_queues_are_to_be_read_is_no_damage(caplog: pytest.LogCaptureFixture) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    store.checkpoint()
    store.delete_segments_below(3 * SEGMENT)
    entries = store._upkeep.scrubber._stored_entries()
    assert next(entries)
    store.delete_topic("topic", lambda later: later())
    store.checkpoint()
    assert not disk.exists(f"/s/consumequeue/topic/1/{0:020d}")
    assert list(entries), "others are read"
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert not store.damaged_files
