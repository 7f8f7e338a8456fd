"""Backups of a log and what is restored from them, whatever interrupts either."""

from __future__ import annotations

import functools
import random
from itertools import count

import pytest

from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import (
    BackupError,
    CorruptLogError,
    CutError,
    LogBehindError,
    LogDivergedError,
    NoBackupError,
    StoreInUseError,
    StoreLockedError,
    StoreSettingsError,
    WrongFolderError,
)
from protomq_broker.store.files.disk import read_file, write_fully
from protomq_broker.store.files.lock import StoreLock
from protomq_broker.store.log.epochs import (
    EPOCHS_NAME,
    RESTORED_EPOCHS,
    find_epochs,
    read_epochs,
    restored_epoch,
)
from protomq_broker.store.start.settings import RESTORED_SLAVE_NAME
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools.backup import back_up, restore
from protomq_broker.store.tools.backup_manifest import Cut, read_manifest
from protomq_broker.store.tools.backup_source import FolderSource, LinkingSource, SourceLook
from protomq_broker.store.tools.offline import open_offline
from protomq_broker.store.tools.repair import repair
from protomq_broker.store.tools.verify import FindingKind, verify
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

from .log_helpers import ManualClock, make_request
from .store_helpers import SEGMENT, commit, committed, open_store, read_all
from .test_following import disk_of, fill

MANY = 40
"""Messages that make more than two segments."""


class OpenStore:
    """A store that is open, as its broker gives it away. A LogSource."""

    def __init__(self, store: Store, part_size_bytes: int = 700) -> None:
        self.store = store
        self.part_size_bytes = part_size_bytes
        self.read_bytes = 0

    def look(self) -> SourceLook:
        store = self.store
        end = min(store.readable_position, store.flushed_position)
        epoch_position, epoch, _ = store.epochs.last
        return SourceLook(
            "broker-a", store.config.segment_size_bytes, store.min_position, end, epoch=epoch, epoch_position=epoch_position
        )

    def read(self, position: int, size_max_bytes: int) -> bytes:
        size = min(size_max_bytes, self.part_size_bytes)
        regions = self.store.log_regions(position, position + size)
        data = b"".join(region.file.read(region.offset, region.size_bytes) for region in regions)
        self.read_bytes += len(data)
        return data

    def sealed_path(self, base_position: int) -> str:
        return ""


def forget_first_segments(store: Store, below: int = SEGMENT) -> None:
    """What retention does."""
    store.checkpoint()
    store.checkpoint()
    store.delete_segments_below(below)
    assert store.min_position == below
    store.flush()


def open_at(disk: SimDisk, root: str, *, follows: bool = False) -> Store:
    config = StoreConfig(segment_size_bytes=SEGMENT)
    return Store.open(root, config, clock=ManualClock(), disk=disk, background=False, follows=follows)


def leader(messages: int = MANY) -> Store:
    store = open_store(SimDisk())
    store.topics.create(TopicConfig("topic"))
    fill(store, messages)
    commit(store, "group", "topic", 0, 3)
    store.flush()
    return store


def contents(store: Store) -> tuple[object, ...]:
    return (
        read_all(store, queue_id=0),
        read_all(store, queue_id=1),
        committed(store, "group", "topic", 0),
        store.topics.find("topic"),
    )


def log_in(disk: SimDisk, root: str) -> dict[str, bytes | None]:
    return {
        name: read_file(disk, f"{root}/commitlog/{name}") for name in disk.list(f"{root}/commitlog")
    }


def test_what_is_restored_has_and_answers_all_that_the_store_had() -> None:
    store = leader()
    disk = disk_of(store)
    report = back_up(OpenStore(store), "/b", disk=disk)
    assert report.manifest.end.position == store.flushed_position == report.copied_bytes
    assert verify("/b", disk=disk) == []
    restored_report = restore("/b", "/r", disk=disk)
    assert restored_report.manifest.end == report.manifest.end
    expected = contents(store)
    repeat = make_request([b"3" * 40], queue_id=1, producer_id=5, sequence=3, key="k3")
    repeated = store.find_repeated(repeat)
    restored = open_at(disk, "/r")
    assert contents(restored) == expected
    assert repeated is not None
    assert restored.find_repeated(repeat) == repeated
    assert restored.epoch >= store.epoch + RESTORED_EPOCHS
    restored.close()
    store.close()
    assert verify("/r", disk=disk) == []


@pytest.mark.parametrize("is_newer_first", [False, True])
def test_no_two_restores_have_an_epoch_in_common(is_newer_first: bool) -> None:
    """Else readers of the first restored store would go on in the second one where they were, and miss what it has there."""
    store = leader()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b1", disk=disk)
    fill(store, 10, first=MANY)
    store.flush()
    end_time_ms = back_up(OpenStore(store), "/b2", disk=disk).manifest.end_time_ms
    begin_ms = end_time_ms + 3_600_000
    restore("/b2" if is_newer_first else "/b1", "/r1", disk=disk, now_ms=begin_ms)
    first_epochs = []
    for _ in range(4):
        first = open_at(disk, "/r1")
        first_epochs.append(first.epoch)
        first.close()
    restore("/b1", "/r2", disk=disk, now_ms=begin_ms + 5_000)
    second = open_at(disk, "/r2")
    assert second.epoch > max(first_epochs)
    second.close()
    store.close()


@pytest.mark.parametrize("now_ms", [0, 1, 1_767_225_600_000, 1_800_000_000_000, 1 << 60])
def test_the_epoch_of_a_restored_store_fits_in_a_seal_whatever_the_clock_says(now_ms: int) -> None:
    for highest in (1, 40, 30_000_000):
        assert highest + RESTORED_EPOCHS <= restored_epoch(highest, 1_795_000_000_000, now_ms) <= 1 << 31


def test_what_is_restored_as_a_slave_has_the_epochs_of_the_backup() -> None:
    store = leader()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b", disk=disk)
    restore("/b", "/r", disk=disk, is_slave=True)
    epochs = find_epochs(disk, open_offline("/r", disk).folder, store.flushed_position)
    known = read_epochs(disk, f"/r/{EPOCHS_NAME}")
    assert (known.rows, known.highest_epoch) == (epochs.rows, store.epoch)
    store.close()


def test_a_restore_as_a_slave_that_was_interrupted_may_become_that_of_a_master() -> None:
    store = leader()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b", disk=disk)
    disk.plan = lambda operation: Fault.CRASH if operation.path == f"/r/{EPOCHS_NAME}.tmp" else None
    with pytest.raises(SimulatedCrash):
        restore("/b", "/r", disk=disk, is_slave=True)
    disk = disk.killed()
    restore("/b", "/r", disk=disk)
    assert open_at(disk, "/r").epoch > store.epoch + RESTORED_EPOCHS
    store.close()


@pytest.mark.parametrize("is_elected", [False, True])
def test_what_is_restored_as_a_slave_leads_only_when_it_has_followed_or_was_elected(is_elected: bool) -> None:
    """Its next epoch may be one that another store has begun."""
    store = leader()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b", disk=disk)
    restore("/b", "/r", disk=disk, is_slave=True)
    before = disk.files("/r")
    with pytest.raises(StoreSettingsError, match="it has followed no master since"):
        open_at(disk, "/r")
    assert disk.files("/r") == before
    slave = open_at(disk, "/r", follows=True)
    if is_elected:
        slave.lead(store.epoch + 7)
    else:
        slave.note_role_taken()
    slave.close()
    assert open_at(disk, "/r").epoch > store.epoch
    store.close()


def test_what_is_restored_as_a_slave_is_tried_again_until_it_is_a_store_as_any_other(caplog: pytest.LogCaptureFixture) -> None:
    store = leader()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b", disk=disk)
    restore("/b", "/r", disk=disk, is_slave=True)
    slave = open_at(disk, "/r", follows=True)
    disk.plan = lambda operation: Fault.EIO if operation.path.endswith(RESTORED_SLAVE_NAME) else None
    slave.note_role_taken()
    for _ in range(3):
        slave._upkeep.keeper.turn()
    assert caplog.text.count("housekeeping: writing notes failed and will be tried again") == 1
    disk.plan = None
    slave._upkeep.keeper.turn()
    assert not disk.exists(f"/r/{RESTORED_SLAVE_NAME}")
    slave.close()
    assert open_at(disk, "/r").epoch > store.epoch
    store.close()


def test_a_second_run_copies_only_what_is_new() -> None:
    store = leader()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b", disk=disk)
    end = store.flushed_position
    assert back_up(OpenStore(store), "/b", disk=disk).copied_bytes == 0
    fill(store, MANY, MANY)
    store.flush()
    source = OpenStore(store)
    report = back_up(source, "/b", disk=disk)
    assert report.copied_bytes == source.read_bytes == store.flushed_position - end
    restore("/b", "/r", disk=disk)
    assert contents(open_at(disk, "/r")) == contents(store)


def test_nothing_behind_what_is_synced_and_readable_is_copied() -> None:
    store = leader()
    end = store.flushed_position
    fill(store, 3, MANY)
    assert store.appended_position > end
    assert back_up(OpenStore(store), "/b", disk=disk_of(store)).manifest.end.position == end


def test_sealed_segments_become_links_which_outlive_retention() -> None:
    store = leader()
    disk = disk_of(store)
    source = OpenStore(store)
    report = back_up(LinkingSource(source, "/s"), "/b", disk=disk)
    assert report.linked_bytes >= SEGMENT
    assert source.read_bytes == report.copied_bytes < SEGMENT
    assert disk._names["/b/commitlog/" + "0" * 20] is disk._names["/s/commitlog/" + "0" * 20]
    expected = contents(store)
    forget_first_segments(store)
    assert not disk.exists("/s/commitlog/" + "0" * 20)
    restore("/b", "/r", disk=disk)
    assert contents(open_at(disk, "/r")) == expected
    assert disk._names["/b/commitlog/" + "0" * 20] is not disk._names["/r/commitlog/" + "0" * 20]


@pytest.mark.parametrize("part_size_bytes", [700, 1 << 20])
def test_a_later_run_links_what_was_sealed_since(part_size_bytes: int) -> None:
    """Only the segment within which the run before ended is copied, and the one that is written now."""
    store = leader()
    disk = disk_of(store)
    first = back_up(LinkingSource(OpenStore(store), "/s"), "/b", disk=disk).manifest.end.position
    fill(store, 3 * MANY, MANY)
    store.flush()
    report = back_up(LinkingSource(OpenStore(store, part_size_bytes), "/s"), "/b", disk=disk)
    next_base = first - first % SEGMENT + SEGMENT
    written_base = store.flushed_position - store.flushed_position % SEGMENT
    assert written_base > next_base
    assert report.linked_bytes == written_base - next_base
    assert report.copied_bytes == store.flushed_position - first - report.linked_bytes
    restore("/b", "/r", disk=disk)
    assert contents(open_at(disk, "/r")) == contents(store)


def test_a_segment_of_another_store_is_not_linked() -> None:
    store, other = leader(), leader()
    fill(other, MANY, MANY)
    disk = disk_of(store)
    path = "/x/commitlog/" + "0" * 20
    disk.make_folder("/x/commitlog")
    fd = disk.create(path)
    write_fully(disk, fd, bytes(SEGMENT), 0)
    with pytest.raises(WrongFolderError, match=f"{path} is not of this broker's log, which has something else at position 0: --store"):
        back_up(LinkingSource(OpenStore(store), "/x"), "/b", disk=disk)
    assert not disk.exists("/b/commitlog/" + "0" * 20)


def test_a_first_run_that_failed_leaves_nothing_that_looks_like_a_backup() -> None:
    store, other = leader(), leader(2)
    other.close()
    disk = SimDisk()
    back_up(FolderSource("/s", disk=disk_of(other)), "/known", disk=disk)
    disk.flip_bit("/known/commitlog/" + "0" * 20, 8)
    with pytest.raises(BackupError, match="is damaged at position 0"):
        back_up(FolderSource("/known", disk=disk), "/b", disk=disk)
    assert read_manifest("/b", disk=disk) is None
    with pytest.raises(StoreSettingsError, match="not a store"):
        verify("/b", disk=disk)
    with pytest.raises(NoBackupError, match=r"backup\.json is missing"):
        restore("/b", "/r", disk=disk)
    back_up(OpenStore(store), "/b", disk=disk)
    restore("/b", "/r", disk=disk)
    assert contents(open_at(disk, "/r")) == contents(store)


def test_a_backup_that_holds_nothing_is_not_restored() -> None:
    """Its first run was killed, or the broker had nothing yet."""
    disk = SimDisk()
    back_up(OpenStore(open_store(SimDisk())), "/b", disk=disk)
    with pytest.raises(NoBackupError, match="/b holds nothing yet: run `protomq backup` again"):
        restore("/b", "/r", disk=disk)
    assert not disk.exists("/r")


def test_a_store_whose_broker_is_stopped_is_copied_from_its_folder() -> None:
    store = leader()
    disk = disk_of(store)
    expected = contents(store)
    with pytest.raises(StoreInUseError, match="a broker is running"):
        FolderSource("/s", disk=disk)
    store.close()
    report = back_up(FolderSource("/s", disk=disk), "/b", disk=disk)
    assert report.linked_bytes >= SEGMENT
    restore("/b", "/r", disk=disk)
    assert contents(open_at(disk, "/r")) == expected


def test_a_backup_that_has_lost_its_manifest_is_no_store_that_starts() -> None:
    """Nothing in it is changed. A copy without the mark is a store, if nobody else has the log."""
    store = leader()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b", disk=disk)
    disk.remove("/b/backup.json")
    before = disk.files("/b")
    with pytest.raises(StoreSettingsError, match=r"/b: this is a backup that has lost its backup\.json"):
        open_at(disk, "/b")
    assert disk.files("/b") == before
    disk.remove("/b/config/store.json")
    assert contents(open_at(disk, "/b")) == contents(store)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_backup_of_a_stopped_store_whose_last_append_is_damaged_says_so(*, is_killed: bool) -> None:
    """Not that the log has lost a part, or has another past, which would need another folder."""
    store = leader()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b", disk=disk)
    end = store.flushed_position
    if is_killed:
        disk = disk.killed()
    else:
        store.close()
    base = (end - 1) // SEGMENT * SEGMENT
    disk.flip_bit(f"/s/commitlog/{base:020d}", (end - base - 2) * 8)
    before = log_in(disk, "/b")
    with pytest.raises(BackupError, match=r"is damaged .*\(`protomq log verify` .*\)\. /b .* all of the log: keep it") as told:
        back_up(FolderSource("/s", disk=disk), "/b", disk=disk)
    assert "another folder" not in str(told.value)
    assert log_in(disk, "/b") == before


@pytest.mark.parametrize("begins_stopped", [False, True])
def test_backups_of_a_broker_that_runs_and_that_is_stopped_go_on_with_each_other(begins_stopped: bool) -> None:
    """The name of a stopped broker does not stand in its store."""
    store = leader()
    disk = disk_of(store)
    ends = []
    for number in range(4):
        if number % 2 != begins_stopped:
            store.close()
            ends.append(back_up(FolderSource("/s", disk=disk), "/b", disk=disk).manifest)
            store = open_store(disk)
        else:
            ends.append(back_up(OpenStore(store), "/b", disk=disk).manifest)
        fill(store, 5, MANY + 5 * number)
        store.flush()
    assert [each.broker_name for each in ends] == ["" if begins_stopped else "broker-a", *["broker-a"] * 3]
    assert len({each.end.position for each in ends}) == 4
    manifest = back_up(OpenStore(store), "/b", disk=disk).manifest
    assert manifest.end.position == store.flushed_position
    restore("/b", "/r", disk=disk)
    assert contents(open_at(disk, "/r")) == contents(store)
    other = OpenStore(store)
    look = other.look()
    other.look = lambda: look._replace(broker_name="broker-b")  # type: ignore[method-assign]
    with pytest.raises(WrongFolderError, match="a backup of broker broker-a"):
        back_up(other, "/b", disk=disk)


@pytest.mark.parametrize("extra", [-4, 0, 4])
def test_a_stopped_broker_with_another_log_does_not_go_on_with_a_backup(extra: int) -> None:
    """Though it has the same size."""
    store, other = leader(), open_store(SimDisk())
    disk = disk_of(other)
    other.topics.create(TopicConfig("topic"))
    fill(other, MANY - 1)
    fill(other, 1, MANY + 7)
    before_commit = other.appended_position
    commit(other, "group", "topic", 0, 3)
    other.flush()
    assert other.appended_position == store.appended_position
    back_up(OpenStore(store), "/b", disk=disk)
    before = log_in(disk, "/b"), read_manifest("/b", disk=disk)
    if extra > 0:
        fill(other, extra, 80)
    other.close()
    source = FolderSource("/s", disk=disk)
    if extra < 0:
        look = source.look()
        source.look = lambda: look._replace(end_position=before_commit)  # type: ignore[method-assign]
    with pytest.raises(BackupError, match=r"another past"):
        back_up(source, "/b", disk=disk)
    assert (log_in(disk, "/b"), read_manifest("/b", disk=disk)) == before


def test_damage_of_a_backup_is_no_torn_tail_and_what_is_around_it_can_be_restored() -> None:
    store = leader()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b", disk=disk)
    expected = [read_all(store, queue_id=queue_id) for queue_id in (0, 1)]
    disk.flip_bit("/b/commitlog/" + "0" * 20, 8 * 3_000)
    (found,) = verify("/b", disk=disk)
    assert found.kind is FindingKind.CORRUPTION, "all that backup.json lists was proved and synced"
    place = found.start_position
    with pytest.raises(BackupError, match=rf"/b is damaged at position {place} of the log: .*--position {place}`"):
        restore("/b", "/all", disk=disk)
    for place in (found.start_position, found.start_position + 1):
        report = restore("/b", f"/before{place}", Cut(position=place), disk=disk)
        assert report.manifest.end.position == found.start_position
        before = open_at(disk, f"/before{place}")
        bodies = [read_all(before, queue_id=queue_id) for queue_id in (0, 1)]
        assert bodies == [each[: len(got)] for each, got in zip(expected, bodies, strict=True)]
        assert all(bodies)
    repair("/b", "/keep", disk=disk)
    assert [each.kind for each in verify("/b", disk=disk)] == [FindingKind.REPAIRED]
    restore("/b", "/rest", disk=disk)
    rest = open_at(disk, "/rest")
    told = []
    for queue_id, each in enumerate(expected):
        try:
            assert read_all(rest, queue_id=queue_id) == each
        except CorruptLogError as error:
            told.append(error.lost)
    (lost,) = told
    assert lost is not None
    assert lost.next_offset == lost.queue_offset + 1
    behind = [message for message in expected[lost.queue_id] if message[0] >= lost.next_offset]
    assert read_all(rest, queue_id=lost.queue_id, offset=lost.next_offset) == behind


@pytest.mark.parametrize("how", ["restore", "stopped", "running", "linked"])
def test_damage_is_named_where_verify_finds_it(how: str) -> None:
    """Not where the part begins that was read at once: whoever cuts there drops sound messages."""
    store = leader(150)
    store.checkpoint()  # Verify looks up to there while the broker runs.
    disk = disk_of(store)
    root = "/s"
    if how == "restore":
        back_up(OpenStore(store), "/b", disk=disk)
        root = "/b"
    elif how == "stopped":
        store.close()
    found = set()
    for at in (900, SEGMENT + 2_000, SEGMENT + SEGMENT // 2):
        base = at - at % SEGMENT
        path = f"{root}/commitlog/{base:020d}"
        disk.flip_bit(path, 8 * (at - base))
        first = next(each for each in verify(root, disk=disk) if each.kind is FindingKind.CORRUPTION)
        source = FolderSource(root, disk=disk) if how in ("restore", "stopped") else OpenStore(store, 1 << 20)
        copy = functools.partial(back_up, LinkingSource(source, "/s") if how == "linked" else source)
        with pytest.raises(BackupError, match=rf"\b{first.start_position}\b"):
            (functools.partial(restore, "/b") if how == "restore" else copy)(f"/new{at}", disk=disk)
        found.add(first.start_position)
        disk.flip_bit(path, 8 * (at - base))
    assert len(found) == 3


@pytest.mark.parametrize("by", ["position", "time"])
def test_a_cut_gives_the_store_as_it_was_at_any_append(by: str) -> None:
    clock = ManualClock()
    store = open_store(SimDisk(), clock=clock)
    disk = disk_of(store)
    store.topics.create(TopicConfig("topic"))
    moments: list[tuple[Cut, tuple[object, ...]]] = []
    for number in range(12):
        clock.time_ms += 1_000
        fill(store, 4, number * 4)
        commit(store, "group", "topic", 0, number)
        # Between two appends, and between two moments.
        cut = (
            Cut(position=store.appended_position + (20 if number < 11 else 0))
            if by == "position"
            else Cut(time_ms=clock.time_ms + 999)
        )
        moments.append((cut, contents(store)))
    store.flush()
    back_up(OpenStore(store), "/b", disk=disk)
    for number, (cut, expected) in enumerate(moments):
        restore("/b", f"/r{number}", cut, disk=disk)
        restored = open_at(disk, f"/r{number}")
        assert contents(restored) == expected
        restored.append([make_request([b"goes on"])])
        restored.close()
        assert verify(f"/r{number}", disk=disk) == []


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        (Cut(time_ms=999), "has nothing that old: its first messages or changes were stored at 1000 ms since 1970, and end at"),
        (Cut(position=7), "has nothing that old"),
        (Cut(position=SEAL_SIZE_BYTES), "has nothing that old"),
        (Cut(position=99_999_999_999), "ends at position"),
    ],
)
def test_a_cut_outside_of_the_backup_is_refused(cut: Cut, why: str) -> None:
    store = open_store(SimDisk(), clock=ManualClock(1_000))
    disk = disk_of(store)
    fill(store, 4)
    store.flush()
    back_up(OpenStore(store), "/b", disk=disk)
    with pytest.raises(CutError, match=why):
        restore("/b", "/r", cut, disk=disk)
    assert [path for path in ("/r/commitlog", "/r/config", "/r/lock", "/r/backup.json") if disk.exists(path)] == []
    restore("/b", "/r", Cut(position=store.appended_position, time_ms=1_000), disk=disk)
    assert read_all(open_at(disk, "/r")) == read_all(store)


def test_a_backup_of_a_log_whose_front_is_deleted_is_cut_only_where_it_tells_everything() -> None:
    clock = ManualClock()
    store = open_store(SimDisk(), clock=clock)
    disk = disk_of(store)
    store.topics.create(TopicConfig("topic"))
    commit(store, "group", "topic", 0, 2)
    fill(store, MANY)
    before = store.appended_position
    forget_first_segments(store)
    clock.time_ms += 1_000
    report = back_up(OpenStore(store), "/b", disk=disk)
    assert report.manifest.first_position == SEGMENT
    assert report.manifest.complete_from == report.manifest.end.position > before
    for cut in (Cut(position=before), Cut(time_ms=report.manifest.complete_time_ms - 1)):
        with pytest.raises(BackupError, match="tells everything from"):
            restore("/b", "/r", cut, disk=disk)
    restore("/b", "/r", Cut(position=report.manifest.end.position), disk=disk)
    restored = open_at(disk, "/r")
    assert contents(restored) == contents(store)
    assert committed(restored, "group", "topic", 0) == 2


def test_a_first_run_begins_again_if_retention_takes_what_comes_next() -> None:
    store = leader()
    disk = disk_of(store)
    forget_first_segments(store)
    fill(store, 2 * MANY, MANY)
    store.flush()

    class Forgetful(OpenStore):
        def read(self, position: int, size_max_bytes: int) -> bytes:
            if self.read_bytes > 2_000 and store.min_position == SEGMENT:
                forget_first_segments(store, 3 * SEGMENT)
            return super().read(position, size_max_bytes)

    report = back_up(Forgetful(store), "/b", disk=disk)
    assert report.manifest.first_position == 3 * SEGMENT
    restore("/b", "/r", disk=disk)
    assert contents(open_at(disk, "/r")) == contents(store)


def test_a_later_run_says_what_is_deleted_and_keeps_what_it_has() -> None:
    store = leader()
    disk = disk_of(store)
    manifest = back_up(OpenStore(store), "/b", disk=disk).manifest
    before = log_in(disk, "/b")
    fill(store, 2 * MANY, MANY)
    forget_first_segments(store, 3 * SEGMENT)
    with pytest.raises(BackupError, match="what is between is deleted"):
        back_up(OpenStore(store), "/b", disk=disk)
    assert read_manifest("/b", disk=disk) == manifest
    assert log_in(disk, "/b") == before


def test_a_log_with_another_past_is_refused() -> None:
    disk = SimDisk()
    first = open_store(SimDisk())
    fill(first, 8)
    first.flush()
    back_up(OpenStore(first), "/b", disk=disk)
    before = log_in(disk, "/b")
    other = open_store(SimDisk())
    fill(other, 5, 100)
    other.flush()
    with pytest.raises(LogDivergedError, match="another past"):
        back_up(OpenStore(other), "/b", disk=disk)
    fill(other, 9, 105)
    other.flush()
    with pytest.raises(BackupError, match="another past"):
        back_up(OpenStore(other), "/b", disk=disk)
    assert log_in(disk, "/b") == before


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("has", ["a part", "nothing"])
def test_a_slave_that_is_behind_has_lost_nothing(has: str, *, is_stopped: bool) -> None:
    """Its log is the beginning of the copy. The run is refused for now, and done when it has caught up."""
    disk = SimDisk()
    store = open_store(disk)
    if has == "a part":
        fill(store, MANY)
    store.flush()
    end = store.flushed_position
    early = disk.killed()
    fill(store, 3, MANY)
    store.flush()
    manifest = back_up(OpenStore(store), "/b", disk=early).manifest
    before = log_in(early, "/b")
    source: FolderSource | OpenStore = FolderSource("/s", disk=early)
    if not is_stopped:
        slave = open_at(early, "/s", follows=True)
        slave.positions.note_replicated(end)
        source = OpenStore(slave)
    lacks_bytes = manifest.end.position - end
    with pytest.raises(LogBehindError, match=rf"up to {manifest.end.position}, and this log ends at {end}: .* {lacks_bytes} bytes"):
        back_up(source, "/b", disk=early)
    assert (read_manifest("/b", disk=early), log_in(early, "/b")) == (manifest, before)
    fill(store, 1, MANY + 3)
    store.flush()
    assert back_up(OpenStore(store), "/b", disk=early).manifest.end.position == store.flushed_position


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_a_log_that_has_lost_a_part_is_not_behind(count: int, *, is_stopped: bool) -> None:
    """It went on in an epoch of its own: that tells before it has a single append."""
    disk = SimDisk()
    store = open_store(disk)
    fill(store, MANY)
    store.flush()
    early = disk.killed()
    fill(store, 3, MANY)
    store.flush()
    manifest = back_up(OpenStore(store), "/b", disk=early).manifest
    before = log_in(early, "/b")
    lost = open_at(early, "/s")
    if count:
        fill(lost, count, 500)
    lost.flush()
    source: FolderSource | OpenStore = OpenStore(lost)
    if is_stopped:
        lost.close()
        source = FolderSource("/s", disk=early)
    with pytest.raises(LogDivergedError, match="has lost a part of it"):
        back_up(source, "/b", disk=early)
    assert (read_manifest("/b", disk=early), log_in(early, "/b")) == (manifest, before)


@pytest.mark.parametrize("before_end_bytes", [1, 10, SEAL_SIZE_BYTES, SEAL_SIZE_BYTES + 20])
def test_damage_in_the_last_append_of_the_broker_is_not_another_past(before_end_bytes: int) -> None:
    """Whoever is told that begins another backup, of a log that lacks what this one has."""
    store = leader()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b", disk=disk)
    before = log_in(disk, "/b"), read_manifest("/b", disk=disk)
    end = store.appended_position
    # The CRC is another one, in any case.
    for byte in {before_end_bytes, 1}:
        disk.flip_bit(f"/s/commitlog/{end - end % SEGMENT:020d}", 8 * (end % SEGMENT - byte))
    with pytest.raises(BackupError, match=rf"the last append of the log, which ends at {end}, is damaged") as raised:
        back_up(OpenStore(store), "/b", disk=disk)
    assert "past" not in str(raised.value)
    assert (log_in(disk, "/b"), read_manifest("/b", disk=disk)) == before


def test_damage_of_the_broker_ends_a_run_and_damage_of_a_backup_ends_a_restore() -> None:
    store = leader()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b", disk=disk)
    disk.flip_bit("/s/commitlog/" + "0" * 20, 24_001)
    with pytest.raises(BackupError, match="the log is damaged at position"):
        back_up(OpenStore(store), "/c", disk=disk)
    restore("/b", "/r", disk=disk)
    disk.flip_bit("/b/commitlog/" + "0" * 20, 24_001)
    assert verify("/b", disk=disk)
    with pytest.raises(BackupError, match="/b is damaged at position"):
        restore("/b", "/r2", disk=disk)
    with pytest.raises(StoreSettingsError, match="not done"):
        open_at(disk, "/r2")
    with pytest.raises(StoreSettingsError, match="protomq restore"):
        open_at(disk, "/b")


def test_a_full_disk_ends_a_run_which_goes_on_when_there_is_space() -> None:
    store = leader()
    disk = SimDisk(capacity_bytes=SEGMENT + SEGMENT // 2)
    with pytest.raises(OSError, match="space"):
        back_up(OpenStore(store), "/b", disk=disk)
    disk.capacity_bytes = 1 << 30
    back_up(OpenStore(store), "/b", disk=disk)
    assert verify("/b", disk=disk) == []
    restore("/b", "/r", disk=disk)
    assert contents(open_at(disk, "/r")) == contents(store)


def test_folders_with_something_else_are_left_alone() -> None:
    store = leader()
    disk = disk_of(store)
    with pytest.raises(WrongFolderError, match="not empty"):
        back_up(OpenStore(store), "/s", disk=disk)
    with pytest.raises(BackupError, match="no backup"):
        restore("/s", "/r", disk=disk)
    back_up(OpenStore(store), "/b", disk=disk)
    with pytest.raises(WrongFolderError, match="not empty"):
        restore("/b", "/s", disk=disk)
    lock = StoreLock(disk, "/b")
    with pytest.raises(StoreLockedError):
        back_up(OpenStore(store), "/b", disk=disk)
    lock.release()
    other = OpenStore(store)
    look = other.look()
    other.look = lambda: look._replace(broker_name="broker-b")  # type: ignore[method-assign]
    with pytest.raises(WrongFolderError, match="a backup of broker broker-a"):
        back_up(other, "/b", disk=disk)


@pytest.mark.parametrize("powerless", [False, True])
@pytest.mark.parametrize("linking", [False, True])
def test_a_backup_that_is_killed_anywhere_is_run_again(linking: bool, powerless: bool) -> None:
    rng = random.Random(linking * 2 + powerless)
    store = leader()
    opened = OpenStore(store, 4_000)
    source = LinkingSource(opened, "/s") if linking else opened
    expected = contents(store)
    disk = disk_of(store)
    for number in count(1):
        disk = disk_of(store).crash(rng, keep=1.0)
        disk.fail_at(number, Fault.CRASH)
        try:
            back_up(source, "/b", disk=disk)
        except SimulatedCrash:
            pass
        else:
            break
        after = disk.crash(rng) if powerless else disk.killed()
        back_up(source, "/b", disk=after)
        assert verify("/b", disk=after) == []
        assert log_in(after, "/b").items() <= log_in(disk_of(store), "/s").items()
    disk.plan = None
    restore("/b", "/r", disk=disk)
    assert contents(open_at(disk, "/r")) == expected


@pytest.mark.parametrize("powerless", [False, True])
def test_a_restore_that_is_killed_anywhere_is_run_again(powerless: bool) -> None:
    rng = random.Random(powerless)
    store = leader()
    kept = SimDisk()
    back_up(OpenStore(store), "/b", disk=kept)
    disk = kept
    for number in count(1):
        disk = kept.crash(rng, keep=1.0)
        disk.fail_at(number, Fault.CRASH)
        try:
            restore("/b", "/r", disk=disk)
        except SimulatedCrash:
            pass
        else:
            break
        after = disk.crash(rng) if powerless else disk.killed()
        if read_manifest("/r", disk=after) is not None:
            with pytest.raises(StoreSettingsError, match="not done"):
                open_at(after, "/r")
            restore("/b", "/r", disk=after)
        elif not after.list("/r/commitlog"):
            restore("/b", "/r", disk=after)
        assert log_in(after, "/r") == log_in(after, "/b")
        assert verify("/r", disk=after) == []
    disk.plan = None
    assert contents(open_at(disk, "/r")) == contents(store)


def restore_killed_at_its_end(disk: SimDisk, cut: Cut) -> SimDisk:
    disk.plan = lambda operation: Fault.CRASH if operation.path == f"/r/{EPOCHS_NAME}.tmp" else None
    with pytest.raises(SimulatedCrash):
        restore("/b", "/r", cut, disk=disk)
    return disk.killed()


def test_a_restore_that_is_run_again_to_an_earlier_time_takes_nothing_that_is_later() -> None:
    clock = ManualClock()
    store = open_store(SimDisk(), clock=clock)
    times = []
    for _ in range(MANY):
        clock.time_ms += 1_000
        fill(store, 1)
        times.append((store.positions.tail.store_time_ms, store.appended_position))
    store.flush()
    disk = disk_of(store)
    back_up(OpenStore(store), "/b", disk=disk)
    (earlier_ms, earlier_end), (later_ms, later_end) = times[5], times[30]
    disk = restore_killed_at_its_end(disk, Cut(time_ms=later_ms))
    with pytest.raises(WrongFolderError, match="restore with another end"):
        restore("/b", "/r", Cut(time_ms=earlier_ms), disk=disk)
    assert restore("/b", "/r", Cut(time_ms=later_ms), disk=disk).manifest.end.position == later_end
    assert restore("/b", "/other", Cut(time_ms=earlier_ms), disk=disk).manifest.end.position == earlier_end


def test_a_restore_of_one_log_does_not_go_on_as_that_of_another_one_with_the_same_end() -> None:
    kept = SimDisk()
    for root, body in (("/b", b"a"), ("/b2", b"b")):
        store = open_store(SimDisk())
        store.append([make_request([body * 40])])
        store.flush()
        back_up(OpenStore(store), root, disk=kept)
    disk = restore_killed_at_its_end(kept, Cut())
    with pytest.raises(WrongFolderError, match="another backup"):
        restore("/b2", "/r", disk=disk)


@pytest.mark.parametrize("front", [0, SEGMENT])
@pytest.mark.parametrize(
    "what", ["first", "first two", "middle", "last", "all", "cut short", "zeros", "manifest empty", "manifest flipped", "manifest gone"]
)
def test_what_a_backup_has_lost_is_told_by_verify_by_restore_and_by_the_next_run(what: str, front: int) -> None:
    store = leader(150)
    if front:
        forget_first_segments(store, front)
    disk = SimDisk()
    back_up(OpenStore(store), "/b", disk=disk)
    assert verify("/b", disk=disk) == []
    kept = read_manifest("/b", disk=disk)
    assert kept is not None
    names = disk.list("/b/commitlog")
    assert len(names) >= 4
    lost = {"first": names[:1], "first two": names[:2], "middle": names[2:3], "last": names[-1:], "all": names}.get(what, [])
    for name in lost:
        disk.remove(f"/b/commitlog/{name}")
    path = f"/b/commitlog/{lost[0]}" if lost else f"/b/commitlog/{names[1]}"
    if what == "cut short":
        disk.cut(path, 100)
    elif what == "zeros":
        disk.overwrite(path, 0, bytes(SEGMENT))
    elif what == "manifest empty":
        disk.cut("/b/backup.json", 0)
    elif what == "manifest flipped":
        disk.flip_bit("/b/backup.json", 3)
    elif what == "manifest gone":
        disk.remove("/b/backup.json")
    (found, *_) = verify("/b", disk=disk)
    is_log = not what.startswith("manifest")
    assert (found.kind, found.path) == (
        (FindingKind.CORRUPTION, path) if is_log else (FindingKind.BACKUP, "/b/backup.json")
    )
    place = f"at position {found.start_position} of the log" if what == "zeros" else path
    with pytest.raises(BackupError, match=place if is_log else "backup.json"):
        restore("/b", "/r", disk=disk)
    fill(store, 3)
    store.flush()
    with pytest.raises(BackupError, match=path if is_log else "/b"):
        back_up(OpenStore(store), "/b", disk=disk)
    if is_log:
        assert read_manifest("/b", disk=disk) == kept


def test_a_restore_that_lacks_a_segment_names_the_file_and_what_to_do() -> None:
    store = leader(150)
    disk = SimDisk()
    report = back_up(OpenStore(store), "/b", disk=disk)
    *_, name = disk.list("/b/commitlog")
    disk.remove(f"/b/commitlog/{name}")
    left = f"`protomq restore --position {int(name)}` gives that"
    with pytest.raises(BackupError, match=f"/b/commitlog/{name} is missing or cut short: .* {left}"):
        restore("/b", "/r", disk=disk)
    restored = restore("/b", "/other", Cut(position=int(name)), disk=disk)
    assert restored.manifest.end.position == int(name) < report.manifest.end.position


def test_a_file_is_no_folder_to_write_into_nor_a_backup() -> None:
    store = leader()
    disk = SimDisk()
    back_up(OpenStore(store), "/b", disk=disk)
    disk.close(disk.create("/file"))
    with pytest.raises(WrongFolderError, match="/file is a file: restore into a folder"):
        restore("/b", "/file", disk=disk)
    with pytest.raises(WrongFolderError, match="/file is a file: back up into a folder"):
        back_up(OpenStore(store), "/file", disk=disk)
    with pytest.raises(NoBackupError, match="/file is no folder"):
        restore("/file", "/r", disk=disk)


def test_a_restored_store_knows_where_its_log_begins() -> None:
    store = leader(150)
    forget_first_segments(store)
    disk = SimDisk()
    back_up(OpenStore(store), "/b", disk=disk)
    restore("/b", "/r", disk=disk)
    disk.remove(f"/r/commitlog/{SEGMENT:020d}")
    with pytest.raises(CorruptLogError):
        open_at(disk, "/r")
