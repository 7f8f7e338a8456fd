"""What a backup has linked never changes with the store, whatever happens to the store's log."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

import pytest

from protomq_broker.store.files import disk as disk_module
from protomq_broker.store.files.disk import write_fully
from protomq_broker.store.log.agreement import LogPoint
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.store import Store
from protomq_broker.store.tools import log_copy
from protomq_broker.store.tools.backup import back_up, restore
from protomq_broker.store.tools.backup_source import FolderSource, LinkingSource
from protomq_broker.store.tools.repair import repair
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

from .log_helpers import ManualClock
from .store_helpers import SEGMENT, open_store, read_all
from .test_backup import OpenStore, contents, leader, log_in, open_at
from .test_following import disk_of, fill, follow, log_of, pair
from .test_scrub import filled_store, scrub

FIRST = "/s/commitlog/00000000000000000000"
KEPT = "/b/commitlog/00000000000000000000"


def backed_up(disk: SimDisk) -> dict[str, bytes | None]:
    """The log of a backup with links, of a store that is closed."""
    report = back_up(FolderSource("/s", disk=disk), "/b", disk=disk)
    assert report.linked_bytes >= SEGMENT
    assert disk._names[FIRST] is disk._names[KEPT]
    return log_in(disk, "/b")


def cut_within_a_link() -> tuple[Store, Store, LogPoint, dict[str, bytes | None], tuple[object, ...]]:
    """(a leader, a follower that is to be cut, where, the log of its backup, what its backup tells)."""
    old, new = pair()
    fill(old, 10)
    follow(old, new)
    new.flush()
    point = old.log_point(old.appended_position)
    assert point is not None
    fill(old, 40, 10)
    expected = contents(old)
    old.close()
    log = backed_up(disk_of(old))
    new.lead()
    fill(new, 40, 60)
    return new, open_store(disk_of(old), follows=True), point, log, expected


def test_a_backup_outlives_the_truncation_of_the_log_that_it_has_linked() -> None:
    leading, follower, point, log, expected = cut_within_a_link()
    assert point.position < SEGMENT
    follower.truncate_to(point)
    follower.close()
    disk = disk_of(follower)
    follower = open_store(disk, follows=True)
    assert follower.appended_position == point.position
    follow(leading, follower)
    assert read_all(follower) == read_all(leading)
    assert log_in(disk, "/b") == log
    assert verify("/b", disk=disk) == []
    restore("/b", "/r", disk=disk)
    assert contents(open_at(disk, "/r")) == expected


def test_a_backup_outlives_a_truncation_that_ends_at_any_io() -> None:
    leading, follower, point, log, _ = cut_within_a_link()
    follower.truncate_to(point)
    image = disk_of(follower).killed()
    whole = image.killed()
    open_store(whole, follows=True)
    rng = random.Random(5)
    for number in range(1, whole.operations + 1):
        disk = image.killed()
        disk.fail_at(number, Fault.CRASH)
        with pytest.raises(SimulatedCrash):
            open_store(disk, follows=True)
        disk = disk.crash(rng) if number % 2 else disk.killed()
        assert log_in(disk, "/b") == log, number
        after = open_store(disk, follows=True)
        assert after.appended_position == point.position, number
        follow(leading, after)
        after.close()
        disk = disk.crash(rng) if number % 2 else disk.killed()
        assert log_in(disk, "/b") == log, number
        assert not [name for name in disk.list("/s/commitlog") if name.endswith(".tmp")]
        end = leading.appended_position
        assert log_of(disk, 0, end) == log_of(disk_of(leading), 0, end)


def linked_folder() -> tuple[SimDisk, SegmentFolder]:
    """A segment that is full, and has another name."""
    disk = SimDisk()
    disk.make_folder("/s/commitlog")
    disk.make_folder("/b/commitlog")
    folder = SegmentFolder(disk, "/s/commitlog", SEGMENT)
    for base in (0, SEGMENT):
        segment = folder.create(base)
        write_fully(disk, segment.fd, bytes([7]) * SEGMENT, 0)
        disk.fsync(segment.fd)
    disk.link(FIRST, KEPT)
    for path in ("/", "/s", "/b", "/b/commitlog"):
        disk.fsync_dir(path)
    return disk, folder


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.CRASH, Fault.SYNC_LOST])
@pytest.mark.parametrize("powerless", [False, True])
def test_what_is_cleared_in_a_link_is_cleared_for_the_store_alone(fault: Fault, powerless: bool) -> None:
    rng = random.Random(powerless)
    sevens, cleared = bytes([7]) * SEGMENT, bytes([7]) * 100 + bytes(SEGMENT - 100)
    number = 0
    while True:
        number += 1
        disk, folder = linked_folder()
        disk.fail_at(number, fault)
        try:
            folder.clear_from(100)
        except (OSError, SimulatedCrash):
            assert disk.content(KEPT) == sevens, number
            assert disk.content(FIRST) in (sevens, cleared), number
        else:
            break
        after = disk.crash(rng) if powerless else disk.killed()
        assert after.content(KEPT) == sevens
        assert after.content(FIRST) in (sevens, cleared), number
        folder = SegmentFolder(after, "/s/commitlog", SEGMENT)
        folder.open()
        folder.clear_from(100)
        disk = after.crash(rng)
        assert (disk.content(FIRST), disk.content(KEPT)) == (cleared, sevens)
        assert disk.list("/s/commitlog") == ["00000000000000000000"]
    assert number > 5
    assert (disk.content(FIRST), disk.content(KEPT)) == (cleared, sevens)
    assert folder.files[0].read(0, SEGMENT) == cleared


def test_a_link_that_cannot_be_copied_is_left_as_it_is_and_said() -> None:
    disk, folder = linked_folder()
    folder.remove([SEGMENT])
    disk.capacity_bytes = SEGMENT + SEGMENT // 2
    with pytest.raises(OSError, match="hard link") as caught:
        folder.clear_from(100)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, FIRST)
    assert disk.content(FIRST) == disk.content(KEPT) == bytes([7]) * SEGMENT
    assert disk.list("/s/commitlog") == ["00000000000000000000"]


def test_a_segment_with_one_name_is_cleared_where_it_is() -> None:
    disk, folder = linked_folder()
    disk.unlink(KEPT)
    before = disk._names[FIRST]
    folder.clear_from(100)
    assert disk._names[FIRST] is before
    assert disk.content(FIRST) == bytes([7]) * 100 + bytes(SEGMENT - 100)


def test_a_repair_changes_no_backup_wherever_it_ends() -> None:
    store = leader()
    image = disk_of(store)
    store.close()
    backed_up(image)
    image.flip_bit(FIRST, 8 * 3_000)
    log = log_in(image, "/b")
    rng, number = random.Random(3), 0
    while True:
        number += 1
        disk = image.killed()
        disk.fail_at(number, Fault.CRASH)
        try:
            repair("/s", "/keep", disk=disk)
        except SimulatedCrash:
            pass
        else:
            break
        disk = disk.crash(rng) if number % 2 else disk.killed()
        assert log_in(disk, "/b") == log, number
        repair("/s", "/keep", disk=disk)
        assert log_in(disk, "/b") == log, number
    assert number > 10
    assert log_in(disk, "/b") == log
    assert disk.content(FIRST) != disk.content(KEPT)


def damaged_link(change: Callable[[SimDisk], None]) -> tuple[Store, SimDisk, bytes, ManualClock]:
    """(a store with a backup, changed and then scrubbed; its disk; its log as it was)."""
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    end = store.appended_position
    log = log_of(disk, 0, end)
    store.close()
    change(disk)
    store = open_store(disk, clock=clock, corruption="quarantine")
    back_up(LinkingSource(OpenStore(store), "/s"), "/b", disk=disk)
    assert disk._names[FIRST] is disk._names[KEPT]
    return store, disk, log, clock


def test_healing_of_a_link_heals_the_backup() -> None:
    store, disk, log, clock = damaged_link(lambda disk: None)
    kept = log_in(disk, "/b")
    disk.flip_bit(FIRST, 8 * 3_000)
    assert verify("/b", disk=disk) != []
    scrub(store, clock)
    (damage,) = store.damaged_ranges
    store.heal_log(damage, log[damage.start_position : damage.end_position])
    assert log_in(disk, "/b") == kept
    assert verify("/b", disk=disk) == []


def filled(disk: SimDisk) -> None:
    disk.flip_bit(FIRST, 8 * 3_000)
    repair("/s", "/keep", disk=disk)


def test_healing_of_what_a_repair_has_filled_changes_no_backup() -> None:
    """The padding holds, so the backup is whole: half of what replaces it would not be."""
    store, disk, log, _ = damaged_link(filled)
    kept = log_in(disk, "/b")
    (damage,) = store.damaged_ranges
    store.heal_log(damage, log[damage.start_position : damage.end_position])
    assert log_of(disk, 0, len(log)) == log
    assert log_in(disk, "/b") == kept
    store.close()
    assert open_store(disk).damaged_ranges == []


def test_a_log_that_is_cut_while_a_backup_proves_it_is_cut_in_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = leader()
    disk = disk_of(store)
    store.close()
    source, log = FolderSource("/s", disk=disk), log_in(disk, "/s")
    folder = SegmentFolder(disk, "/s/commitlog", SEGMENT)
    folder.open()
    read = disk_module.read_fully

    def read_and_cut(*arguments: Any) -> bytes:
        data = read(*arguments)
        folder.clear_from(100)
        return data

    monkeypatch.setattr(log_copy, "read_fully", read_and_cut)
    back_up(source, "/b", disk=disk)
    assert disk.content(KEPT) == log["0" * 20] != disk.content(FIRST)
    assert verify("/b", disk=disk) == []
