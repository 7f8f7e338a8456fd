"""What the disk cannot read of the log is damage: it goes into quarantine, and a replica heals it. Nothing is ever cut for it."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.log.seals import UNREADABLE
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import Fault, Operation, SimDisk, SimulatedCrash

from .log_helpers import ManualClock, make_request
from .store_helpers import open_store, read_all
from .test_checked_log import scan
from .test_following import log_of

SEGMENT = 1 << 16
COUNT = 700
"""Messages of 300 bytes in two queues: more than three segments."""
PAGE = 4096


def path_of(base: int) -> str:
    return f"/s/commitlog/{base:020d}"


def filled_store(disk: SimDisk, clock: ManualClock, *, reopened: bool = True, sync_flush: bool = False) -> Store:
    """A store of several segments."""
    store = open_store(disk, clock=clock, segment=SEGMENT)
    for index in range(COUNT):
        store.append([make_request([b"%d " % index * 60], queue_id=index % 2)])
    if not reopened:
        store.flush()
        return store
    store.close()
    return open_store(disk, clock=clock, segment=SEGMENT, sync_flush=sync_flush)


def whole_log(disk: SimDisk, store: Store) -> bytes:
    return log_of(disk, 0, store.appended_position, SEGMENT)


def scanned(store: Store) -> list[tuple[dict[int, bytes], list[int]]]:
    return [scan(store, queue_id) for queue_id in (0, 1)]


def scrub(store: Store, clock: ManualClock, *, turns: int = 4) -> None:
    for _ in range(turns):
        store._upkeep.keeper.turn()
        clock.time_ms += 1000


def pull(store: Store, clock: ManualClock) -> None:
    for queue_id in (0, 1):
        scan(store, queue_id)


FINDERS: list[Callable[[Store, ManualClock], None]] = [pull, scrub]


@pytest.mark.parametrize("find", FINDERS)
@pytest.mark.parametrize("is_reopened", [True, False])
def test_what_cannot_be_read_is_in_quarantine_and_everything_else_is_given(
    find: Callable[[Store, ManualClock], None], is_reopened: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock, reopened=is_reopened)
    expected = [dict(read_all(store, queue_id=queue_id)) for queue_id in (0, 1)]
    start = SEGMENT + 5 * PAGE
    disk.spoil_part(path_of(SEGMENT), start - SEGMENT, start - SEGMENT + PAGE)
    clock.time_ms += 1000
    with caplog.at_level(logging.ERROR):
        find(store, clock)
    (damage,) = store.damaged_ranges
    assert damage.start_position <= start < start + PAGE <= damage.end_position <= start + PAGE + 1000
    assert damage.reason == UNREADABLE
    assert f"{path_of(SEGMENT)}: positions {damage.start_position} to {damage.end_position} are in quarantine" in caplog.text
    lost_count = 0
    for (given, lost), known in zip(scanned(store), expected, strict=True):
        assert sorted([*given, *lost]) == sorted(known), "no queue ends early"
        assert all(known[offset] == body for offset, body in given.items())
        lost_count += len(lost)
    assert 0 < lost_count <= (PAGE + 1000) // 200
    store.append([make_request([b"goes on"])])


@pytest.mark.parametrize("count", [1, 2])
def test_a_read_that_fails_and_then_works_loses_nothing(count: int) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    expected = [read_all(store, queue_id=queue_id) for queue_id in (0, 1)]
    for find in FINDERS:
        for _ in range(20):
            disk.flip_bit(path_of(SEGMENT), 0)
            disk.flip_bit(path_of(SEGMENT), 0)  # its pages have left the cache
            disk.fail_reads(path_of(SEGMENT), count)
            clock.time_ms += 1000
            find(store, clock)
    assert store.damaged_ranges == []
    assert [read_all(store, queue_id=queue_id) for queue_id in (0, 1)] == expected


def test_a_start_remembers_the_range_and_does_not_need_to_read_it() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    disk.spoil_part(path_of(SEGMENT), 5 * PAGE, 6 * PAGE)
    scrub(store, clock)
    known, (damage,) = scanned(store), store.damaged_ranges
    store.close()
    for corruption in ("refuse", "quarantine"):
        again = open_store(disk.killed(), clock=clock, segment=SEGMENT, corruption=corruption)
        assert again.damaged_ranges == [damage]
        assert scanned(again) == known
        assert not again.is_repaired(damage.start_position)


def test_a_segment_of_which_nothing_can_be_read_is_in_quarantine() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    disk.spoil(path_of(SEGMENT))
    scrub(store, clock)
    (damage,) = store.damaged_ranges
    assert damage.start_position == SEGMENT
    assert damage.end_position == 2 * SEGMENT
    (given, lost), _ = scanned(store)
    assert sorted([*given, *lost]) == list(range(COUNT // 2))


@pytest.mark.parametrize("base", [0, SEGMENT, 2 * SEGMENT])
@pytest.mark.parametrize("pages", [(0, 1), (3, 5), (15, 16), (0, 16)])
def test_a_replica_heals_what_cannot_be_read_in_its_place(base: int, pages: tuple[int, int]) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    expected = [read_all(store, queue_id=queue_id) for queue_id in (0, 1)]
    log = whole_log(disk, store)
    disk.spoil_part(path_of(base), pages[0] * PAGE, pages[1] * PAGE)
    scrub(store, clock)
    assert store.damaged_ranges
    for damage in store.unhealed_ranges:
        store.heal_log(damage, log[damage.start_position : damage.end_position])
    assert store.damaged_ranges == []
    assert [read_all(store, queue_id=queue_id) for queue_id in (0, 1)] == expected
    scrub(store, clock)
    assert store.damaged_ranges == []
    assert whole_log(disk, store) == log


def test_the_end_of_the_log_that_a_running_store_cannot_read_is_in_quarantine_and_it_goes_on() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    end = store.appended_position
    base = end // SEGMENT * SEGMENT
    last_page = (end - base) // PAGE * PAGE
    disk.spoil_part(path_of(base), last_page - PAGE, last_page)
    clock.time_ms += 1000
    pull(store, clock)
    (damage,) = store.damaged_ranges
    assert damage.end_position <= end
    lost = scanned(store)[0][1]
    with pytest.raises(CorruptLogError, match="are in quarantine"):
        store.read("topic", 0, lost[0], 1, 1 << 20)
    store.append([make_request([b"goes on"])])
    assert scanned(store)[0][0][COUNT // 2] == b"goes on"


@pytest.mark.parametrize("find", FINDERS)
def test_an_end_that_cannot_be_read_may_be_read_again_and_nothing_is_in_quarantine(find: Callable[[Store, ManualClock], None]) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    expected = [read_all(store, queue_id=queue_id) for queue_id in (0, 1)]
    base = store.appended_position // SEGMENT * SEGMENT
    disk.spoil_part(path_of(base), 0, SEGMENT)
    clock.time_ms += 1000
    with suppress(OSError):
        find(store, clock)
    assert store.damaged_ranges == []
    disk.mend(path_of(base))
    clock.time_ms += 1000
    assert [read_all(store, queue_id=queue_id) for queue_id in (0, 1)] == expected


@pytest.mark.parametrize("fault", ["writes", "sync"])
@pytest.mark.parametrize("pages", [[(3, 5)], [(3, 5), (9, 10)], [(0, 1), (15, 16)]])
def test_a_segment_that_does_not_take_the_healed_bytes_gets_a_new_file(
    fault: str, pages: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    expected = [read_all(store, queue_id=queue_id) for queue_id in (0, 1)]
    log, path = whole_log(disk, store), path_of(SEGMENT)
    for first, last in pages:
        disk.spoil_part(path, first * PAGE, last * PAGE, is_stuck=fault == "writes")
    held = store._folder.files[SEGMENT]
    scrub(store, clock)
    assert len(store.unhealed_ranges) == len(pages)
    if fault == "sync":
        disk.plan = lambda operation: Fault.SYNC_LOST if operation.name == "fsync" and operation.path == path else None
    for damage in store.unhealed_ranges:
        store.heal_log(damage, log[damage.start_position : damage.end_position])
    disk.plan = None
    assert store.damaged_ranges == []
    assert "It is copied to a new file" in caplog.text
    assert store._folder.files[SEGMENT] is not held
    assert [read_all(store, queue_id=queue_id) for queue_id in (0, 1)] == expected
    assert whole_log(disk, store) == log
    store.append([make_request([b"goes on"])])
    store.close()
    for after in (disk.killed(), disk.crash(random.Random(1))):
        assert log_of(after, 0, len(log), SEGMENT) == log
        assert open_store(after, clock=clock, segment=SEGMENT).damaged_ranges == []


def test_a_healing_whose_sync_fails_ends_all_flushes_of_what_is_not_flushed() -> None:
    """It may have told of appends. A flush right behind it hears nothing of that: it waits, and reports no success."""
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock, sync_flush=True)
    base = store.appended_position // SEGMENT * SEGMENT
    while store.appended_position < base + SEGMENT:
        store.append([make_request([b"not flushed " * 20])])
    log, flushed = whole_log(disk, store), store.flushed_position
    disk.spoil_part(path_of(base), 0, PAGE)
    damage = store._checked.damage_from(base, UNREADABLE)
    store._quarantine.ranges = [damage]
    assert flushed < base + SEGMENT
    beside = threading.Thread(target=store.flush)

    def flush_beside(operation: Operation) -> Fault | None:
        if operation.name != "fsync" or operation.path != path_of(base):
            return None
        disk.plan = None
        disk._names[path_of(base)].dirty.clear()  # what the sync that fails has lost
        beside.start()
        beside.join(0.1)
        return Fault.SYNC_LOST

    told: list[int] = []
    store.positions.on_flushed.append(told.append)
    disk.plan = flush_beside
    with pytest.raises(OSError, match="Input/output error"):
        store.heal_log(damage, log[damage.start_position : damage.end_position])
    beside.join()
    assert "an fsync of" in store.log_failure
    store.flush()
    assert store.flushed_position == store.readable_position == flushed
    assert told == [flushed], "who waits for the disk gets an error"


def test_the_segment_that_is_written_is_never_copied() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    log = whole_log(disk, store)
    base = len(log) // SEGMENT * SEGMENT
    disk.spoil_part(path_of(base), 2 * PAGE, 3 * PAGE, is_stuck=True)
    scrub(store, clock)
    (damage,) = store.unhealed_ranges
    held = store._folder.files[base]
    with pytest.raises(OSError, match="Input/output error"):
        store.heal_log(damage, log[damage.start_position : damage.end_position])
    assert store._folder.files[base] is held
    assert store.unhealed_ranges == [damage]
    store.append([make_request([b"goes on"])])


def test_a_segment_is_not_copied_before_its_damage_is_noted() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    log = whole_log(disk, store)
    disk.spoil_part(path_of(SEGMENT), 3 * PAGE, 4 * PAGE, is_stuck=True)
    disk.spoil_part(path_of(SEGMENT), 9 * PAGE, 10 * PAGE)
    disk.plan = lambda operation: Fault.ENOSPC if "/config/" in operation.path else None
    scrub(store, clock)
    disk.plan = None
    held, (first, second) = store._folder.files[SEGMENT], store.unhealed_ranges
    with pytest.raises(OSError, match="not copied before quarantine is noted"):
        store.heal_log(first, log[first.start_position : first.end_position])
    assert store._folder.files[SEGMENT] is held
    store._quarantine.save_again()
    for damage in (first, second):
        store.heal_log(damage, log[damage.start_position : damage.end_position])
    assert store.damaged_ranges == []
    assert whole_log(disk, store) == log


@pytest.mark.parametrize("powerless", [True, False])
def test_a_copy_that_ends_at_any_io_is_the_old_file_or_the_new_one(powerless: bool) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    log = whole_log(disk, store)
    disk.spoil_part(path_of(SEGMENT), 3 * PAGE, 4 * PAGE, is_stuck=True)
    scrub(store, clock)
    store.close()
    number, is_done = 0, False
    while not is_done:
        number += 1
        image = disk.killed()
        again = open_store(image, clock=clock, segment=SEGMENT)
        (damage,) = again.unhealed_ranges
        image.fail_at(number, Fault.CRASH)
        try:
            again.heal_log(damage, log[damage.start_position : damage.end_position])
            is_done = True
        except SimulatedCrash:
            pass
        image.plan = None
        after = image.crash(random.Random(number)) if powerless else image.killed()
        found = open_store(after, clock=clock, segment=SEGMENT)
        if found.damaged_ranges:
            assert found.unhealed_ranges == [damage]
            found.heal_log(damage, log[damage.start_position : damage.end_position])
        assert log_of(after, 0, len(log), SEGMENT) == log
    assert number > 5


def killed_store(clock: ManualClock) -> tuple[SimDisk, Store]:
    """A store that is killed next: a start walks its log from the first segment on."""
    disk = SimDisk()
    return disk, filled_store(disk, clock, reopened=False)


def bodies(store: Store) -> list[list[tuple[int, bytes]]]:
    return [read_all(store, queue_id=queue_id) for queue_id in (0, 1)]


def ends_and_changes_nothing(disk: SimDisk, clock: ManualClock, base: int, corruption: str) -> None:
    """Opens what cannot be read. All of the log and of the quarantine stays."""
    before = disk.files("/s/commitlog"), disk.files("/s/config").get("/s/config/quarantine.json")
    with pytest.raises(OSError, match=path_of(base)):
        open_store(disk, clock=clock, segment=SEGMENT, corruption=corruption)
    assert (disk.files("/s/commitlog"), disk.files("/s/config").get("/s/config/quarantine.json")) == before


@pytest.mark.parametrize("corruption", ["refuse", "quarantine"])
@pytest.mark.parametrize("same_cache", [True, False])
@pytest.mark.parametrize("pages", [(0, 1), (3, 5), (15, 16), (0, 16)])
@pytest.mark.parametrize("is_last", [True, False])
def test_a_start_that_cannot_read_the_log_ends_and_cuts_nothing(
    corruption: str, same_cache: bool, pages: tuple[int, int], is_last: bool
) -> None:
    clock = ManualClock()
    disk, store = killed_store(clock)
    expected = bodies(store)
    base = store.appended_position // SEGMENT * SEGMENT if is_last else SEGMENT
    disk = disk.killed() if same_cache else disk.crash(random.Random(1))
    disk.spoil_part(path_of(base), pages[0] * PAGE, pages[1] * PAGE)
    ends_and_changes_nothing(disk, clock, base, corruption)
    disk = disk.killed()
    disk.mend(path_of(base))
    again = open_store(disk, clock=clock, segment=SEGMENT, corruption=corruption)
    assert again.damaged_ranges == []
    assert bodies(again) == expected


def test_a_start_that_reads_again_what_failed_once_is_as_any_other() -> None:
    clock = ManualClock()
    disk, store = killed_store(clock)
    expected = bodies(store)
    for base in range(0, store.appended_position, SEGMENT):
        image = disk.killed()
        image.fail_reads(path_of(base), 2)
        again = open_store(image, clock=clock, segment=SEGMENT)
        assert again.damaged_ranges == []
        assert bodies(again) == expected


@pytest.mark.parametrize("corruption", ["refuse", "quarantine"])
@pytest.mark.parametrize("same_cache", [True, False])
def test_a_start_that_walks_over_a_known_range_must_read_it(corruption: str, same_cache: bool) -> None:
    """What a queue lacks stands there: its offsets must not be given again."""
    clock = ManualClock()
    disk, store = killed_store(clock)
    expected = bodies(store)
    disk.spoil_part(path_of(SEGMENT), 5 * PAGE, 6 * PAGE)
    clock.time_ms += 1000
    pull(store, clock)
    assert store.damaged_ranges
    disk = disk.killed() if same_cache else disk.crash(random.Random(1))
    ends_and_changes_nothing(disk, clock, SEGMENT, corruption)
    disk = disk.killed()
    disk.mend(path_of(SEGMENT))
    again = open_store(disk, clock=clock, segment=SEGMENT, corruption=corruption)
    assert again.damaged_ranges == []
    assert bodies(again) == expected


def test_no_range_leaves_quarantine_at_a_start_that_cannot_read_another() -> None:
    """What is rebuilt then would lack it."""
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    expected = bodies(store)
    for base in (0, SEGMENT):
        disk.spoil_part(path_of(base), 5 * PAGE, 6 * PAGE)
    scrub(store, clock)
    known = store.damaged_ranges
    assert len(known) == 2
    store.close()
    disk = disk.killed()
    disk.mend(path_of(0))
    again = open_store(disk, clock=clock, segment=SEGMENT)
    assert again.damaged_ranges == known
    lost = [end for _, end in scanned(again)]
    for queue_id in (0, 1):
        assert lost[queue_id]
        assert again.queue_range("topic", queue_id) == (0, COUNT // 2)
    again.close()
    disk = disk.killed()
    disk.mend(path_of(SEGMENT))
    again = open_store(disk, clock=clock, segment=SEGMENT)
    assert again.damaged_ranges == []
    assert bodies(again) == expected


def test_a_seal_that_cannot_be_read_is_never_taken_for_none() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    end = store.appended_position
    base = end // SEGMENT * SEGMENT
    store.close()
    last = disk.killed()
    last.spoil_part(path_of(base), (end - base) // PAGE * PAGE, (end - base) // PAGE * PAGE + PAGE)
    with pytest.raises(OSError, match=path_of(base)):  # else it would say that it has lost its end
        open_store(last, clock=clock, segment=SEGMENT, corruption="quarantine")
    disk = disk.killed()
    again = open_store(disk, clock=clock, segment=SEGMENT)
    _ = again.has_dated_head
    disk.spoil_part(path_of(0), 0, PAGE)
    with pytest.raises(OSError, match=path_of(0)):
        _ = again.has_dated_head
