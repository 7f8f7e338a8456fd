"""The flusher and the background threads."""

from __future__ import annotations

import threading

import pytest

from protomq_broker.store.errors import StoreFailedError
from protomq_broker.store.log.flusher import BackgroundThread, LogFlusher
from protomq_broker.testing.simdisk import Fault, SimDisk

from .log_helpers import SEGMENT_SIZE_BYTES, Log, ManualClock, make_record


def make_flusher(log: Log) -> tuple[LogFlusher, list[int]]:
    moved: list[int] = []
    log.positions.on_flushed.append(moved.append)
    return LogFlusher(log.disk, log.log, log.positions, ManualClock().monotonic), moved


def test_a_flush_syncs_every_segment_that_has_something_new() -> None:
    disk = SimDisk()
    log = Log(disk)
    while log.log.tail.position < 2 * SEGMENT_SIZE_BYTES:
        log.append(make_record(bytes(700)))
    flusher, moved = make_flusher(log)
    disk.history = []
    assert flusher.flush() == log.log.tail.position == log.positions.flushed
    assert [operation.path[-5:] for operation in disk.history] == ["00000", "04096", "08192"]
    assert moved == [log.log.tail.position]
    disk.history = []
    flusher.flush()
    assert disk.history == []
    assert len(moved) == 1, "nothing new"


def test_what_is_appended_during_a_sync_is_not_called_synced() -> None:
    disk = SimDisk()
    log = Log(disk)
    before = log.append(make_record(b"a"))
    flusher, _ = make_flusher(log)
    real = disk.fdatasync

    class SlowDisk:
        def fdatasync(self, fd: int) -> None:
            real(fd)
            log.append(make_record(b"b"))

    flusher._disk = SlowDisk()  # type: ignore[assignment]
    assert flusher.flush() == before.position
    assert log.positions.flushed == before.position < log.log.tail.position


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.SYNC_LOST, Fault.ENOSPC])
def test_a_failed_fsync_is_never_tried_again(fault: Fault) -> None:
    disk = SimDisk()
    log = Log(disk)
    log.append(make_record(b"a"))
    flusher, moved = make_flusher(log)
    disk.fail_at(1, fault)
    assert flusher.flush() == 0
    assert moved == [0]
    assert "fsync" in log.log.failure
    disk.history = []
    assert flusher.flush() == 0
    assert disk.history == []
    with pytest.raises(StoreFailedError):
        log.append(make_record(b"b"))


@pytest.mark.parametrize("is_flushed", [True, False])
def test_a_failed_sync_of_healed_bytes_ends_all_flushes_unless_the_segment_was_flushed(is_flushed: bool) -> None:
    disk = SimDisk()
    log = Log(disk)
    while log.log.tail.position < SEGMENT_SIZE_BYTES:
        log.append(make_record(bytes(700)))
    flusher, moved = make_flusher(log)
    if is_flushed:
        flusher.flush()
    log.append(make_record(b"a"))
    flushed, moved[:] = log.positions.flushed, []
    segment = log.log.folder.files[0]
    disk.fail_at(1, Fault.SYNC_LOST)
    with pytest.raises(OSError, match="Input/output error"):
        flusher.sync_healed(segment)
    if is_flushed:
        assert flusher.flush() == log.log.tail.position
        assert not log.log.failure
        return
    assert moved == [flushed], "who waits is told"
    disk.history = []
    assert flusher.flush() == log.positions.flushed == flushed
    assert disk.history == []
    assert moved == [flushed]
    assert segment.path in log.log.failure


def test_a_flush_reports_nothing_once_a_sync_of_others_was_lost() -> None:
    log = Log(SimDisk())
    log.append(make_record(b"a"))
    flusher, moved = make_flusher(log)
    log.log.fail_sync("an fsync of the folder failed")
    assert flusher.flush() == log.positions.flushed == 0
    assert moved == [0]


def test_a_log_that_failed_for_another_reason_is_still_synced() -> None:
    log = Log(SimDisk())
    log.append(make_record(b"a"))
    flusher, _ = make_flusher(log)
    log.log.fail("a defect")
    assert flusher.flush() == log.log.tail.position


def test_a_thread_does_its_work_when_woken_and_ends_when_stopped() -> None:
    done = threading.Semaphore(0)
    thread = BackgroundThread("test", 60_000, done.release, lambda error: None)
    thread.start()
    for _ in range(3):
        thread.wake()
        assert done.acquire(timeout=60)
    thread.stop()
    assert not any(other.name == "test" for other in threading.enumerate())


def test_a_defect_in_a_thread_is_told() -> None:
    told: list[BaseException] = []
    crashed = threading.Event()

    def work() -> None:
        raise RuntimeError("a defect")

    def on_crash(error: BaseException) -> None:
        told.append(error)
        crashed.set()

    thread = BackgroundThread("test", 60_000, work, on_crash)
    thread.start()
    thread.wake()
    assert crashed.wait(60)
    thread.stop()
    assert isinstance(told[0], RuntimeError)


def test_a_thread_that_was_never_started_can_be_stopped() -> None:
    turns: list[str] = []
    thread = BackgroundThread("test", 60_000, lambda: turns.append("turn"), lambda error: None)
    thread.stop()
    assert turns == []
