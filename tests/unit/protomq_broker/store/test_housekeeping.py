"""Housekeeping: checkpoints, retention and the rest when they are due."""

from __future__ import annotations

import logging
from contextlib import suppress

import pytest

from protomq.v1.state_pb2 import TimerEnd
from protomq.wire.topics import TIMER_TOPIC
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import DiskFullError
from protomq_broker.store.files.disk import DiskUsage
from protomq_broker.store.files.side_files import read_json_file
from protomq_broker.store.log.append import CorruptRecordError
from protomq_broker.store.log.checkpoint import read_checkpoint
from protomq_broker.store.log.commit_log import CommitLog
from protomq_broker.store.store import Store
from protomq_broker.store.timer.timer import timer_record
from protomq_broker.testing.simdisk import Fault, SimDisk

from .log_helpers import ManualClock, make_request
from .store_helpers import commit

SEGMENT = 8192
HOUR_MS = 3_600_000


class SizedDisk(SimDisk):
    """A disk whose used part is told by the test."""

    used_ratio = 0.1
    size_bytes = 1_000_000

    def usage(self, path: str) -> DiskUsage:
        return DiskUsage(self.size_bytes, round(self.size_bytes * (1 - self.used_ratio)))


def open_store(disk: SimDisk, clock: ManualClock, **settings: int) -> Store:
    config = StoreConfig(segment_size_bytes=SEGMENT, **settings)  # type: ignore[arg-type]
    return Store.open("/s", config, clock=clock, disk=disk, background=False)


def fill(store: Store, segments: int) -> None:
    while store.appended_position < segments * SEGMENT:
        store.append([make_request([bytes(500)])])


def turn(store: Store) -> None:
    store._upkeep.keeper.turn()


def replay_position(disk: SimDisk) -> int:
    checkpoint = read_checkpoint(disk, "/s/checkpoint")
    return checkpoint.replay_position if checkpoint else -1


def test_a_checkpoint_is_written_when_its_time_has_come_and_something_was_appended() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock)
    end = store.append([make_request()])
    turn(store)
    assert replay_position(disk) == -1
    clock.time_ms += 5_000
    turn(store)
    assert replay_position(disk) == end
    disk.history = []
    clock.time_ms += 5_000
    turn(store)
    assert disk.history == [], "nothing new, nothing to do"


def test_a_checkpoint_is_written_early_when_much_was_appended() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock, checkpoint_size_bytes=2000)
    fill(store, 1)
    turn(store)
    assert replay_position(disk) == store.appended_position


def test_the_next_segment_is_made_ahead() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock)
    while store.appended_position < SEGMENT * 3 // 4:
        store.append([make_request([bytes(500)])])
    turn(store)
    assert f"/s/commitlog/{SEGMENT:020d}" in disk.files()


def test_old_segments_go_when_the_disk_fills_and_the_newest_stays() -> None:
    disk, clock = SizedDisk(), ManualClock()
    store = open_store(disk, clock)
    fill(store, 4)
    clock.time_ms += 5_000
    turn(store)
    for _ in range(8):  # the clock is believed only as far as the housekeeping watches it
        clock.time_ms += 10 * HOUR_MS
        turn(store)
    store.append([make_request()])
    clock.time_ms += 10_000
    turn(store)
    assert store.min_position == 0
    disk.used_ratio = 0.8
    clock.time_ms += 10_000
    turn(store)
    assert 0 < store.min_position <= store.appended_position
    assert store.queue_range("topic", 0)[0] > 0


def test_segments_that_a_recovery_needs_are_not_said_to_be_deleted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, clock = SizedDisk(), ManualClock()
    store = open_store(disk, clock)
    fill(store, 4)
    disk.used_ratio = 0.89
    with caplog.at_level(logging.INFO):
        turn(store)
    assert store.min_position == 0, "there is no checkpoint yet"
    assert "deleted" not in caplog.text
    clock.time_ms += 10_000
    with caplog.at_level(logging.INFO):
        turn(store)
    assert store.min_position > 0
    assert f"{store.min_position // SEGMENT} segments are deleted: the disk" in caplog.text


def test_what_somebody_needs_is_not_deleted() -> None:
    disk, clock = SizedDisk(), ManualClock()
    store = open_store(disk, clock)
    fill(store, 6)
    clock.time_ms += 5_000
    turn(store)
    store.keep_from_position = lambda: SEGMENT + 100
    disk.used_ratio = 0.89
    clock.time_ms += 10_000
    turn(store)
    assert store.min_position == SEGMENT


def test_writes_are_refused_on_a_disk_that_is_nearly_full_and_taken_again() -> None:
    disk, clock = SizedDisk(), ManualClock()
    store = open_store(disk, clock)
    disk.used_ratio = 0.95
    turn(store)
    assert "full" in store.write_refusal
    with pytest.raises(DiskFullError):
        store.append([make_request()])
    disk.used_ratio = 0.5
    clock.time_ms += 10_000
    turn(store)
    assert store.write_refusal == ""
    store.append([make_request()])


def test_an_error_of_the_disk_is_tried_again_and_does_not_stop_the_log() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock)
    end = store.append([make_request()])
    store.flush()
    clock.time_ms += 5_000
    disk.fail_at(1, Fault.ENOSPC, for_ever=True)
    turn(store)
    disk.plan = None
    assert store.write_refusal == ""
    clock.time_ms += 5_000
    turn(store)
    assert replay_position(disk) == end


def test_retention_frees_a_disk_on_which_nothing_else_can_be_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, clock = SizedDisk(), ManualClock()
    store = open_store(disk, clock)
    fill(store, 6)
    store.checkpoint()
    store.append([make_request()])
    disk.capacity_bytes, disk.used_ratio = 0, 0.99
    for _ in range(25):
        clock.time_ms += 500
        turn(store)
    assert "the checkpoint failed" in caplog.text, "the disk is full indeed"
    assert caplog.text.count("writing derived files failed") == 1, "which is said once, not twice a second"
    assert store.min_position > 0


@pytest.mark.parametrize("error", [PermissionError(13, "no"), CorruptRecordError(7, "no record")])
def test_a_look_that_fails_ends_no_duty_but_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock)
    end = store.append([make_request()])

    def refuse(_: CommitLog) -> str:
        raise error

    monkeypatch.setattr(CommitLog, "lost_path", refuse)
    for _ in range(2):
        clock.time_ms += 5_000
        turn(store)
    assert caplog.text.count("looking for the log's file failed and will be tried again") == 1
    assert replay_position(disk) == end
    assert store.write_refusal == ""


def test_what_is_known_of_the_clock_is_kept_over_a_restart() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock)
    turn(store)
    store.close()
    state = read_json_file(disk, "/s/config/retention.json")
    assert state is not None
    assert state["wall_ms"] == clock.time_ms
    assert state["monotonic_ms"] is None
    open_store(disk, clock).close()


def test_a_process_that_is_stopped_within_a_turn_does_not_take_its_clock_for_one_that_has_jumped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each stopped master said so ever after: what a look has found of the clock is kept."""
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock)
    turn(store)
    keeper = store._upkeep.keeper

    def stop() -> None:
        clock.time_ms += 6_000

    keeper._actions = keeper._actions._replace(look_for_space=stop)
    for _ in range(4):
        clock.time_ms += 10_000
        turn(store)
    assert "clock" not in caplog.text


def test_once_no_checkpoint_is_possible_any_more_memory_is_given_back_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock, checkpoint_size_bytes=2000)
    fill(store, 1)
    disk.plan = lambda operation: (
        Fault.SYNC_LOST if "consumequeue" in operation.path and "sync" in operation.name else None
    )
    turn(store)
    assert "Check the disk, and restart the broker" in store.checkpoint_failure
    assert [record.levelname for record in caplog.records if "could not be synced" in record.message] == ["CRITICAL"]
    disk.plan = None
    fill(store, 2)
    queue = store._queues.find("topic", 0)
    assert queue is not None
    for _ in range(3):
        turn(store)
    assert queue.flushed_offset == queue.end_offset
    assert not queue._buffer[1]
    assert replay_position(disk) == -1


@pytest.mark.parametrize("alive", [0, 4])
@pytest.mark.parametrize("segment_size", [SEGMENT, 4 * SEGMENT])
def test_a_small_disk_that_fills_faster_than_anybody_looks_is_freed_again_and_again(alive: int, segment_size: int) -> None:
    """`alive`: every so many messages one is delayed for long, so that it is carried forward."""
    disk, clock = SimDisk(), ManualClock()
    disk.capacity_bytes = 1 << 20
    config = StoreConfig(segment_size_bytes=segment_size, disk_delete_ratio=0.4, disk_force_ratio=0.5, checkpoint_interval_ms=2_000)
    store = Store.open("/s", config, clock=clock, disk=disk, background=False)
    firsts, stored = [], [0] * 40
    for look in range(40):
        for number in range(1_200):  # more than the disk has room for
            due_ms = clock.time_ms + 400_000 if alive and number % (20 * alive) < 2 else None
            try:
                store.append([make_request([bytes(1_000)], due_time_ms=due_ms)])
                stored[look] += 1
            except DiskFullError:
                break
        for _ in range(11):
            clock.time_ms += 1_000
            turn(store)
            drop_due(store, clock)
        firsts.append(store.min_position)
    assert firsts[-1] > firsts[20] > firsts[8] > 0
    assert sum(stored[20:]) > 200
    assert disk.usage("/s").used_ratio < 1.0


def drop_due(store: Store, clock: ManualClock) -> None:
    """What falls due is pending no more."""
    rows = store.pending.due(clock.time_ms, 64)
    if len(rows):
        with suppress(DiskFullError):
            store.append_state(TIMER_TOPIC, [timer_record(rows, TimerEnd.TIMER_END_DELIVERED, clock.time_ms)])


def test_a_commit_in_the_reserve_does_not_say_that_messages_are_taken_again(caplog: pytest.LogCaptureFixture) -> None:
    disk, clock = SizedDisk(), ManualClock()
    store = open_store(disk, clock)
    disk.used_ratio = 0.91
    for offset in range(3):
        with pytest.raises(DiskFullError):
            fill(store, 2)
        commit(store, "g", "orders", 0, offset)
        assert "91.0% full" in store.write_refusal
    assert len([each for each in caplog.messages if each.startswith("writes")]) == 1
    disk.used_ratio = 0.5
    fill(store, 2)
    assert store.write_refusal == ""
    assert caplog.messages[-1] == "writes: accepted again, there is space"


def test_commits_begin_segments_while_some_have_room_however_full_a_large_disk_is() -> None:
    disk, clock = SizedDisk(), ManualClock()
    disk.size_bytes = 100_000_000
    store = open_store(disk, clock)

    def commit_up_to(position: int) -> None:
        while store.appended_position < position:
            commit(store, "g", "orders", 0, store.appended_position)

    disk.used_ratio = 0.99
    commit_up_to(2 * SEGMENT)
    disk.used_ratio = 1 - 15.9 * SEGMENT / disk.size_bytes
    with pytest.raises(DiskFullError, match="from 95% on no segment is begun for records of the broker's own"):
        commit_up_to(4 * SEGMENT)


def test_writes_are_refused_on_a_nearly_full_disk_even_if_nothing_can_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, clock = SizedDisk(), ManualClock()
    store = open_store(disk, clock)
    fill(store, 4)
    clock.time_ms += 5_000
    turn(store)

    def fail(position: int) -> int:
        raise DiskFullError("no space for the next segment")

    keeper = store._upkeep.keeper
    monkeypatch.setattr(keeper, "_actions", keeper._actions._replace(delete_segments_below=fail))
    disk.used_ratio = 0.95
    clock.time_ms += 10_000
    turn(store)
    assert "95.0% full" in store.write_refusal


def test_no_segment_is_begun_for_messages_on_a_nearly_full_disk_before_anybody_looks() -> None:
    disk, clock = SizedDisk(), ManualClock()
    store = open_store(disk, clock)
    disk.used_ratio = 0.91
    with pytest.raises(DiskFullError, match=r"91\.0% full"):
        fill(store, 4)
    assert store.appended_position < SEGMENT
    turn(store)
    assert f"/s/commitlog/{SEGMENT:020d}" not in disk.files()
    disk.used_ratio = 0.5
    store._refusals.refuse("")
    fill(store, 4)
