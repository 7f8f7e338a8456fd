"""First segments that are missing are lost, unless retention has deleted them: the store has noted where its log begins."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest import mock

import pytest

from protomq_broker.store.errors import CorruptLogError, StoreError
from protomq_broker.store.files.side_files import read_json_file
from protomq_broker.store.log.agreement import START
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.start import front_note
from protomq_broker.store.start.front_note import FRONT_NAME
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools.backup import back_up
from protomq_broker.store.tools.backup_source import FolderSource
from protomq_broker.store.tools.repair import repair
from protomq_broker.store.tools.verify import FindingKind, verify
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from tests.support.lost_files import lose

from .log_helpers import make_request
from .store_helpers import SEGMENT, open_store, read_all
from .test_following import disk_of, fill, follow, log_of

NOTE = f"/s/{FRONT_NAME}"


def leader(front: int = 0) -> Store:
    """A store of more than four segments; retention has deleted what stands before `front`."""
    store = open_store(SimDisk())
    store.topics.create(TopicConfig("topic"))
    fill(store, 200)
    store.checkpoint()
    store.delete_segments_below(front)
    assert store.min_position == front
    fill(store, 5)
    assert store.appended_position > front + 4 * SEGMENT
    return store


def bases(disk: SimDisk) -> list[int]:
    return [int(name) for name in disk.list("/s/commitlog") if name.isdecimal()]


def lose_first(disk: SimDisk, count: int) -> int:
    """Takes the first segments away. Returns where the rest begins."""
    for base in bases(disk)[:count]:
        disk.remove(f"/s/commitlog/{base:020d}")
    return bases(disk)[0]


def everything(store: Store) -> list[list[tuple[int, bytes]]]:
    return [read_all(store, queue_id=queue_id) for queue_id in (0, 1)]


@pytest.mark.parametrize("end", ["closed", "killed", "power cut", "no checkpoint"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("front", [0, SEGMENT])
def test_lost_first_segments_are_damage_which_a_replica_heals(front: int, count: int, end: str) -> None:
    store = leader(front)
    expected, log = everything(store), log_of(disk_of(store), front, store.appended_position)
    store.flush()
    if end == "closed":
        store.close()
    disk = disk_of(store).crash(random.Random(1), keep=0.0) if end == "power cut" else disk_of(store).killed()
    if end == "no checkpoint":
        lose(disk, "checkpoint", "consumequeue", "index", "repeatedsends", "timer")
    first = lose_first(disk, count)
    segments = disk.files("/s/commitlog")
    with pytest.raises(CorruptLogError, match=f"is missing; .* since retention has not deleted what stood before {first}."):
        open_store(disk)
    assert disk.files("/s/commitlog") == segments
    for _ in range(2):
        (found,) = verify("/s", disk=disk)
        assert (found.start_position, found.end_position) == (front, first)
        again = open_store(disk, corruption="quarantine")
        (damage,) = again.damaged_ranges
        assert (damage.start_position, damage.end_position) == (front, first)
        assert again.min_position == front
        with pytest.raises(CorruptLogError) as caught:
            again.read("topic", 0, expected[0][0][0], 10, 1 << 20)
        following = caught.value.next_offset
        assert read_all(again, offset=following) == [each for each in expected[0] if each[0] >= following]
        assert len(again.skipped_ranges) == 1
        again.close()
        assert verify("/s", disk=disk)[0].kind is FindingKind.QUARANTINE
    again = open_store(disk, corruption="quarantine")
    request = make_request([b"next"])
    again.append([request])
    assert request.queue_offset == expected[0][-1][0] + 1
    [damage] = again.damaged_ranges
    again.heal_log(damage, log[: first - front])
    again.close()
    healed = open_store(disk)
    assert healed.damaged_ranges == []
    assert bases(disk)[0] == front
    assert everything(healed) == [[*expected[0], (request.queue_offset, b"next")], expected[1]]
    healed.close()
    assert verify("/s", disk=disk) == []


@pytest.mark.parametrize("front", [0, SEGMENT])
def test_first_segments_that_are_lost_with_the_note_are_known_by_the_checkpoint(front: int) -> None:
    store = leader(front)
    store.close()
    disk = disk_of(store).killed()
    disk.remove(NOTE)
    first = lose_first(disk, 2)
    with pytest.raises(CorruptLogError, match=f"retention has not deleted what stood before {first}."):
        open_store(disk)
    (found,) = verify("/s", disk=disk)
    assert (found.start_position, found.end_position) == (front, first)
    (damage,) = open_store(disk, corruption="quarantine").damaged_ranges
    assert (damage.start_position, damage.end_position) == (front, first)


def test_what_retention_has_deleted_since_the_checkpoint_is_not_lost_if_the_note_is() -> None:
    store = leader()
    store.checkpoint()
    store.delete_segments_below(2 * SEGMENT)
    assert store.min_position == 2 * SEGMENT
    disk = disk_of(store).killed()
    disk.remove(NOTE)
    assert open_store(disk).min_position == 2 * SEGMENT


@pytest.mark.parametrize("front", [0, SEGMENT])
def test_a_repair_fills_lost_first_segments(front: int) -> None:
    store = leader(front)
    end = store.queue_range("topic", 0)[1]
    store.close()
    disk = disk_of(store).killed()
    first = lose_first(disk, 2)
    (done,) = repair("/s", "/keep", disk=disk)
    assert (done.start_position, done.end_position) == (front, first)
    assert {found.kind for found in verify("/s", disk=disk)} == {FindingKind.REPAIRED}
    again = open_store(disk)
    assert bases(disk)[0] == front
    with pytest.raises(CorruptLogError):
        again.read("topic", 0, again.queue_range("topic", 0)[0], 10, 1 << 20)
    assert again.queue_range("topic", 0)[1] == end


def test_retention_deletes_behind_lost_segments_and_the_log_begins_there() -> None:
    store = leader()
    store.close()
    disk = disk_of(store).killed()
    first = lose_first(disk, 2)
    again = open_store(disk, corruption="quarantine")
    again.checkpoint()
    assert again.delete_segments_below(first) == 0, "they may be healed"
    assert again.delete_segments_below(first + SEGMENT) == first + SEGMENT
    assert again.damaged_ranges == []
    for after in (again, open_store(disk_of(again).killed())):
        assert after.min_position == first + SEGMENT
        low, end = after.queue_range("topic", 0)
        assert [offset for offset, _ in read_all(after)] == list(range(low, end))


def test_what_is_deleted_step_by_step_is_known_at_any_moment() -> None:
    """Power cuts, kills and a full disk at each operation of a turn: nothing that retention deletes is taken for lost, and what it has not
    deleted is missed.
    """
    worn = leader()
    worn.close()
    image = disk_of(worn)
    for fault in (Fault.CRASH, Fault.ENOSPC, Fault.EIO, Fault.SYNC_LOST):
        for number in range(1, 300):
            disk = image.killed()
            store = open_store(disk)
            disk.fail_at(number, fault)
            with suppress(SimulatedCrash, OSError, StoreError):
                store.delete_segments_below(3 * SEGMENT)
            is_over = disk.plan is not None and disk.operations < number
            disk.plan = None
            for after in (disk.killed(), disk.crash(random.Random(number)), disk.crash(random.Random(number), keep=0.0)):
                note = read_json_file(after, NOTE) if after.exists(NOTE) else None
                assert note is None or note["first_position"] >= bases(after)[0], "it is written before segments go"
                again = open_store(after)
                assert again.damaged_ranges == []
                assert again.min_position == bases(after)[0]
                again.delete_segments_below(3 * SEGMENT)
                again.close()
                lost = after.killed()
                first = lose_first(lost, 1)
                with pytest.raises(CorruptLogError, match=str(first)):
                    open_store(lost)
            if is_over:
                break
        else:
            raise AssertionError("it never ends")


def test_a_disk_too_full_for_the_note_still_gets_its_segments_deleted() -> None:
    store = leader()
    store.checkpoint()
    disk = disk_of(store)

    def no_new_content(operation: object) -> Fault | None:
        is_full = bases(disk)[0] < 2 * SEGMENT and FRONT_NAME in str(operation) and "write" in str(operation)
        return Fault.ENOSPC if is_full else None

    disk.plan = no_new_content
    assert store.delete_segments_below(2 * SEGMENT) == 2 * SEGMENT
    disk.plan = None
    after = disk.killed()
    assert open_store(after.killed()).min_position == 2 * SEGMENT
    lose_first(after, 1)
    with pytest.raises(CorruptLogError):
        open_store(after)


def test_a_store_without_a_note_begins_with_its_first_segment_and_notes_that() -> None:
    store = leader(SEGMENT)
    store.close()
    disk = disk_of(store).killed()
    disk.remove(NOTE)
    again = open_store(disk)
    assert (again.min_position, again.damaged_ranges) == (SEGMENT, [])
    again.close()
    assert disk.exists(NOTE)


def test_a_damaged_note_is_written_again(caplog: pytest.LogCaptureFixture) -> None:
    store = leader(SEGMENT)
    store.close()
    disk = disk_of(store).killed()
    disk.flip_bit(NOTE, 300)
    again = open_store(disk)
    assert (again.min_position, again.damaged_ranges) == (SEGMENT, [])
    assert "the note of where the log begins does not hold" in caplog.text
    again.close()
    lose_first(disk, 1)
    with pytest.raises(CorruptLogError):
        open_store(disk)


@contextmanager
def earlier_version() -> Iterator[None]:
    """A broker that notes nothing."""
    with mock.patch.object(front_note, "write_json_file"):
        yield


@pytest.mark.parametrize("is_killed", [True, False])
def test_what_an_earlier_version_has_deleted_meanwhile_is_not_lost(is_killed: bool) -> None:
    store = leader(SEGMENT)
    disk = disk_of(store)
    with earlier_version():
        store.checkpoint()
        store.delete_segments_below(3 * SEGMENT)
        if not is_killed:
            store.close()
    after = disk.killed()
    assert verify("/s", disk=after) == []
    again = open_store(after)
    assert (again.min_position, again.damaged_ranges) == (3 * SEGMENT, [])
    again.close()
    lost = after.killed()
    lose_first(lost, 1)
    with pytest.raises(CorruptLogError):
        open_store(lost)


@pytest.mark.parametrize("powerless", [True, False])
def test_a_follower_that_is_killed_while_its_log_begins_behind_0_starts_again(powerless: bool) -> None:
    master = leader(2 * SEGMENT)
    for number in range(1, 400):
        disk = SimDisk()
        follower = open_store(disk, follows=True)
        follower.flush()
        disk.fail_at(number, Fault.CRASH)
        with suppress(SimulatedCrash):
            follow(master, follower)
        is_over = disk.operations < number
        disk.plan = None
        after = disk.crash(random.Random(number)) if powerless else disk.killed()
        has_begun = bool(bases(after))
        again = open_store(after, follows=True)
        assert has_begun or not again.appended_position, "a log that has not begun takes what any leader has"
        position = again.appended_position or 2 * SEGMENT
        again.append_verbatim(position, log_of(disk_of(master), position, master.appended_position))
        assert (again.min_position, again.damaged_ranges) == (2 * SEGMENT, [])
        again.close()
        lost = after.killed()
        lose_first(lost, 1)
        with pytest.raises(CorruptLogError):
            open_store(lost, follows=True)
        if is_over:
            return
    raise AssertionError("it never ends")


def test_a_follower_that_begins_again_where_its_leader_does_has_lost_nothing() -> None:
    other, master = leader(SEGMENT), leader(2 * SEGMENT)
    disk = SimDisk()
    follower = open_store(disk, follows=True)
    follow(other, follower)
    point = follower.truncate_to(START)
    assert point.position == 0
    follower.close()
    for number in range(1, 400):
        attempt = disk.killed()
        attempt.fail_at(number, Fault.CRASH)
        with suppress(SimulatedCrash):
            open_store(attempt, follows=True)
        is_over = attempt.operations < number
        attempt.plan = None
        again = open_store(attempt.crash(random.Random(number)), follows=True)
        assert again.damaged_ranges == []
        follow(master, again)
        assert again.min_position == 2 * SEGMENT
        if is_over:
            return
    raise AssertionError("it never ends")


@pytest.mark.parametrize("front", [0, SEGMENT])
def test_a_log_that_is_lost_as_a_whole_is_lost_from_where_it_began(front: int) -> None:
    store = leader(front)
    end, log = store.queue_range("topic", 0)[1], log_of(disk_of(store), front, store.appended_position)
    store.close()
    disk = disk_of(store).killed()
    for base in bases(disk):
        disk.remove(f"/s/commitlog/{base:020d}")
    with pytest.raises(CorruptLogError):
        open_store(disk)
    again = open_store(disk, corruption="quarantine")
    [damage] = again.damaged_ranges
    assert (damage.start_position, again.min_position) == (front, front)
    assert damage.end_position >= front + len(log)
    request = make_request([b"next"])
    again.append([request])
    assert request.queue_offset == end


def test_a_lost_front_with_only_an_unused_segment_left_is_not_an_empty_log() -> None:
    store = open_store(SimDisk())
    store.topics.create(TopicConfig("topic"))
    fill(store, 20)
    store._log.prepare_next_segment()
    store.close()
    disk = disk_of(store).killed()
    lose_first(disk, len(bases(disk)) - 1)
    with pytest.raises(CorruptLogError):
        open_store(disk)
    again = open_store(disk, corruption="quarantine")
    request = make_request([b"next"])
    again.append([request])
    assert request.queue_offset == 10


def test_a_stopped_store_with_lost_first_segments_is_not_backed_up() -> None:
    store = leader()
    store.close()
    disk = disk_of(store).killed()
    lose_first(disk, 1)
    with pytest.raises(StoreError, match="log verify"):
        back_up(FolderSource("/s", disk=disk), "/b", disk=disk)


def test_a_folder_of_segments_alone_begins_with_its_first_one() -> None:
    store = leader(SEGMENT)
    folder = SegmentFolder(disk_of(store), "/s/commitlog", SEGMENT)
    assert folder.first_position == 0
    folder.open(read_only=True)
    assert (folder.first_position, folder.lost_front_end) == (SEGMENT, 0)
