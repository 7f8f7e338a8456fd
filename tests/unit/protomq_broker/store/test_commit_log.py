"""The commit log: rolling, and writes that fail or fall short."""

from __future__ import annotations

import errno
import os
import random
from typing import NoReturn

import pytest

from protomq_broker.store.errors import AppendTooLargeError, DiskFullError, StoreFailedError
from protomq_broker.store.log.commit_log import Reserve
from protomq_broker.store.log.seals import LogWalker
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.testing.simdisk import Fault, SimDisk

from .log_helpers import SEGMENT_SIZE_BYTES, Log, make_record, recover


def walked(log: Log) -> LogWalker:
    walker = LogWalker(log.disk, log.folder, 0, 0)
    for _ in walker:
        pass
    return walker


def test_a_segment_begins_with_an_empty_append() -> None:
    log = Log()
    log.append(make_record())
    content = next(iter(log.bytes_of().values()))
    assert content[:2] == b"\x12\x33"
    assert content[53] == 0x0A


@pytest.mark.parametrize("size", range(0, 400, 7))
def test_no_append_crosses_segments_whatever_is_left(size: int) -> None:
    log = Log()
    for _ in range(40):
        start = log.append(make_record(bytes(size))).position
        assert start % SEGMENT_SIZE_BYTES != 0
    walker = walked(log)
    assert walker.position == log.log.tail.position
    for content in log.bytes_of().values():
        assert len(content) == SEGMENT_SIZE_BYTES


def test_the_largest_append_fits_and_one_more_byte_does_not() -> None:
    log = Log()
    limit = log.log.append_size_max_bytes
    body = bytes(limit - len(make_record(bytes(3000))) + 3000)
    log.append(make_record(body))
    with pytest.raises(AppendTooLargeError):
        log.log.position_for(limit + 1)


def test_a_write_that_fails_on_a_full_disk_moves_nothing_and_the_next_one_takes_its_place() -> None:
    disk = SimDisk()
    log = Log(disk)
    before = log.append(make_record(b"a"))
    clean = log.bytes_of()
    disk.fail_at(1, Fault.ENOSPC)
    with pytest.raises(DiskFullError):
        log.append(make_record(b"b"))
    assert log.log.tail == before
    assert log.bytes_of() == clean
    log.append(make_record(b"c"))
    assert recover(disk)[1] == [make_record(b"a"), make_record(b"c")]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC])
def test_a_segment_that_cannot_be_made_for_the_moment_is_made_later(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    log = Log()
    body = make_record(bytes(log.log.append_size_max_bytes // 2))

    def create(folder: SegmentFolder, base_position: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    def fill() -> None:
        for _ in range(4):
            log.append(body)

    log.append(body)
    with monkeypatch.context() as without:
        without.setattr(SegmentFolder, "create", create)
        with pytest.raises(DiskFullError):
            fill()
    fill()
    assert not log.log.failure


def test_a_short_write_is_completed() -> None:
    disk = SimDisk()
    log = Log(disk)
    log.append(make_record(b"a"))
    disk.fail_at(1, Fault.SHORT)
    tail = log.append(make_record(b"b"))
    assert walked(log).position == tail.position


def test_a_short_write_whose_rest_fails_leaves_zeros() -> None:
    disk = SimDisk()
    log = Log(disk)
    before = log.append(make_record(b"a"))
    clean = log.bytes_of()
    first = disk.operations + 1
    disk.plan = lambda o: (
        Fault.SHORT if o.number == first else Fault.ENOSPC if o.number == first + 1 else None
    )
    with pytest.raises(DiskFullError):
        log.append(make_record(b"b" * 500))
    assert log.log.tail == before
    assert log.bytes_of() == clean


def test_a_half_written_append_that_cannot_be_zeroed_ends_the_log() -> None:
    disk = SimDisk()
    log = Log(disk)
    log.append(make_record(b"a"))
    first = disk.operations + 1
    disk.plan = lambda o: (
        Fault.SHORT if o.number == first else Fault.ENOSPC if o.number > first else None
    )
    with pytest.raises(StoreFailedError):
        log.append(make_record(b"b" * 500))
    disk.plan = None
    assert "could not be undone" in log.log.failure
    with pytest.raises(StoreFailedError):
        log.append(make_record(b"c"))
    assert recover(disk.killed(), same_cache=True)[1] == [make_record(b"a")]


def test_a_write_error_ends_the_log_and_leaves_nothing_of_the_append() -> None:
    disk = SimDisk()
    log = Log(disk)
    log.append(make_record(b"a"))
    disk.fail_at(1, Fault.EIO)
    with pytest.raises(StoreFailedError):
        log.append(make_record(b"b"))
    with pytest.raises(StoreFailedError):
        log.append(make_record(b"c"))
    assert recover(disk.killed(), same_cache=True)[1] == [make_record(b"a")]


def test_a_full_disk_at_a_roll_changes_nothing_and_passes() -> None:
    disk = SimDisk(capacity_bytes=SEGMENT_SIZE_BYTES + 1000)
    log = Log(disk)
    record = make_record(bytes(700))
    while log.log.tail.position + len(record) + 2 * 53 + 2 <= SEGMENT_SIZE_BYTES:
        log.append(record, reserve=Reserve.CARRIED)
    before, clean = log.log.tail, log.bytes_of()
    for _ in range(2):
        with pytest.raises(DiskFullError):
            log.append(record, reserve=Reserve.CARRIED)
        assert (log.log.tail, log.bytes_of()) == (before, clean)
    disk.capacity_bytes *= 3
    log.append(record)
    assert walked(log).position == log.log.tail.position


def test_each_fault_at_a_roll_leaves_a_log_that_recovers_to_what_was_appended() -> None:
    record = make_record(bytes(700))
    for number in range(1, 12):
        for fault in (Fault.EIO, Fault.ENOSPC, Fault.SHORT):
            disk = SimDisk()
            log = Log(disk)
            done = 0
            while log.log.tail.position + len(record) + 2 * 53 + 2 <= SEGMENT_SIZE_BYTES:
                log.append(record)
                done += 1
            disk.fail_at(number, fault)
            for _ in range(3):
                try:
                    log.append(record)
                    done += 1
                except (DiskFullError, StoreFailedError):
                    pass
            assert len(recover(disk.killed(), same_cache=True)[1]) == done, (number, fault)


def test_a_segment_made_ahead_is_used_by_the_roll() -> None:
    disk = SimDisk()
    log = Log(disk)
    record = make_record(bytes(700))
    assert not log.log.is_next_segment_due()
    while not log.log.is_next_segment_due():
        log.append(record)
    assert log.log.prepare_next_segment()
    assert not log.log.is_next_segment_due()
    disk.history = []
    while log.log.tail.position < SEGMENT_SIZE_BYTES:
        log.append(record)
    assert {operation.name for operation in disk.history} == {"pwritev"}


def test_deleted_segments_can_still_be_read_by_who_holds_them() -> None:
    disk = SimDisk()
    log = Log(disk)
    for _ in range(10):
        log.append(make_record(bytes(700)))
    log.sync()
    held = log.folder.files[0]
    content = held.read(0, 100)
    removed = log.log.remove_segments_below(log.log.tail.position)
    assert [segment.base_position for segment in removed] == sorted(
        segment.base_position for segment in removed
    )
    assert len(log.folder.files) == 1, "the one that is written stays"
    assert held.read(0, 100) == content
    del removed, held
    assert disk.open_descriptors == 1


def test_segments_that_are_not_synced_are_not_deleted() -> None:
    log = Log()
    for _ in range(12):
        log.append(make_record(bytes(700)))
    assert log.log.remove_segments_below(log.log.tail.position) == []


def test_a_segment_has_its_full_size_from_the_moment_it_has_its_name() -> None:
    disk = SimDisk()
    Log(disk).log.position_for(0)
    after = disk.crash(random.Random(0), keep=0.0)
    assert [len(content) for content in after.files("/s/commitlog").values()] == [
        SEGMENT_SIZE_BYTES
    ]
