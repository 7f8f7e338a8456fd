"""Opening a store after what disks do to it: folders and names, fsyncs that were lost, segment files that are gone or cut short."""

from __future__ import annotations

import errno
import random

import pytest

from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.start.settings import make_folders
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, Operation, SimDisk, SimulatedCrash

from .derived_helpers import use_small_files
from .log_helpers import make_request
from .store_helpers import (
    SEGMENT,
    commit,
    committed,
    open_store,
    read_all,
    read_all_until_damage,
)


def path_of(number: int) -> str:
    return f"/s/commitlog/{number * SEGMENT:020d}"


def filled_store(disk: SimDisk, *, segment_count: int = 4) -> list[tuple[int, bytes]]:
    """A store of several segments, cleanly closed; what is in its queue 0."""
    store = open_store(disk)
    store.topics.create(TopicConfig("topic"))
    while store.appended_position < (segment_count - 1) * SEGMENT + 2000:
        store.append([make_request([bytes([store.appended_position % 251]) * 300])])
        store.append([make_request([b"other"], queue_id=1)])
    expected = read_all(store)
    store.close()
    return expected


def offsets_within(store: Store, number: int) -> list[int]:
    """Queue offsets of queue 0 whose records stand in a segment."""
    queue = store._queues.find("topic", 0)
    assert queue is not None
    first, end = (queue.first_at_or_beyond((number + index) * SEGMENT) for index in (0, 1))
    return list(range(first, end))


# F2: pages that count as clean and are not on disk.


def lost_sync(disk: SimDisk) -> None:
    """A store under SYNC_FLUSH whose last fsync is lost, on a disk that then takes nothing more: not even a mark."""
    store = open_store(disk, sync_flush=True)
    store.append([make_request([b"a"])])
    store.flush()
    store.append([make_request([b"b" * 2000])])
    first = disk.operations + 1

    def plan(operation: Operation) -> Fault | None:
        if operation.number == first:
            return Fault.SYNC_LOST
        return Fault.EIO if operation.number > first else None

    disk.plan = plan
    store.flush()
    assert "fsync" in store.log_failure


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_lost_fsync_that_left_no_mark_costs_nothing_that_was_acknowledged(
    checkpoint: bool,
) -> None:
    disk = SimDisk()
    lost_sync(disk)
    second = disk.killed()
    store = open_store(second, sync_flush=True)
    end = store.append([make_request([b"c"])])
    assert store.flush() == end
    if checkpoint:
        store.checkpoint()
    third = open_store(second.crash(random.Random(1), keep=0.0), sync_flush=True)
    assert [body for _, body in read_all(third)] == [b"a", b"b" * 2000, b"c"]


def test_what_is_not_known_to_be_synced_is_written_anew_whatever_names_the_page_cache() -> None:
    """A container that is started again has another mount, and the same page cache."""
    disk = SimDisk()
    lost_sync(disk)
    second = disk.killed()
    second.overwrite("/s/lock", 0, bytes(512))
    store = open_store(second, sync_flush=True)
    assert store.flushed_position == store.appended_position
    third = open_store(second.crash(random.Random(1), keep=0.0), sync_flush=True)
    assert [body for _, body in read_all(third)] == [b"a", b"b" * 2000]


def test_nothing_is_called_synced_if_writing_anew_fails_too() -> None:
    disk = SimDisk()
    lost_sync(disk)
    second = disk.killed()
    second.plan = lambda operation: (
        Fault.SYNC_LOST
        if operation.name == "fsync" and operation.path.startswith("/s/commitlog/0")
        else None
    )
    with pytest.raises(OSError):
        open_store(second, sync_flush=True)
    third = second.killed()
    store = open_store(third, sync_flush=True)
    assert store.flush() == store.appended_position
    after = open_store(third.crash(random.Random(1), keep=0.0), sync_flush=True)
    assert [body for _, body in read_all(after)] == [b"a", b"b" * 2000]


def test_after_a_clean_stop_nothing_is_written_anew() -> None:
    disk = SimDisk()
    filled_store(disk)
    disk.history = []
    store = open_store(disk)
    segments = [o for o in disk.history if o.path.startswith("/s/commitlog/0")]
    assert segments == []
    assert store.flushed_position == store.appended_position


# F4: names and folders.


class FolderDisk(SimDisk):
    """Writes down which folders are synced; some cannot be."""

    __slots__ = ("refused", "synced")

    def __init__(self, refused: dict[str, int] | None = None) -> None:
        super().__init__()
        self.refused = refused or {}
        self.synced: list[str] = []

    def fsync_dir(self, path: str) -> None:
        if path in self.refused:
            raise OSError(self.refused[path], "refused", path)
        self.synced.append(path)
        super().fsync_dir(path)


def test_every_folder_down_to_the_log_is_made_durable() -> None:
    disk = FolderDisk({"/": errno.EACCES})
    make_folders(disk, "/var/lib/mq/store")
    assert disk.is_folder("/var/lib/mq/store/config")
    assert disk.is_folder("/var/lib/mq/store/commitlog")
    assert disk.synced == ["/var/lib/mq/store", "/var/lib/mq", "/var/lib", "/var"]
    with pytest.raises(OSError):
        make_folders(FolderDisk({"/var": errno.EIO}), "/var/lib/mq/store")


def test_a_segment_whose_maker_was_killed_before_its_name_was_synced_keeps_what_is_acknowledged() -> (
    None
):
    disk = SimDisk()
    store = open_store(disk, sync_flush=True)
    store.append([make_request([b"a" * 3000])])
    store.flush()
    disk.plan = lambda operation: (
        Fault.CRASH
        if operation.name == "fsync_dir" and operation.path.endswith("commitlog")
        else None
    )
    with pytest.raises(SimulatedCrash):
        store.append([make_request([b"b" * 3000])])  # it would enter the reserve: the next segment is made
    second = disk.killed()
    assert second.exists(path_of(1))
    store = open_store(second, sync_flush=True)
    while store.appended_position < SEGMENT:
        store.append([make_request([b"c" * 3000])])
    store.flush()
    expected = read_all(store)
    after = open_store(second.crash(random.Random(1), keep=0.0), sync_flush=True)
    assert read_all(after) == expected


# F1: segments that are deleted.


@pytest.mark.parametrize("number", range(1, 9))
def test_a_power_cut_while_segments_are_deleted_leaves_no_gap(number: int) -> None:
    for seed in range(6):
        disk = SimDisk()
        expected = filled_store(disk, segment_count=6)
        store = open_store(disk)
        disk.fail_at(number, Fault.CRASH)
        try:
            store.delete_segments_below(4 * SEGMENT)
        except SimulatedCrash:
            pass
        after = disk.crash(random.Random(seed))
        bases = [int(name) for name in after.list("/s/commitlog")]
        assert bases == list(range(bases[0], 6 * SEGMENT, SEGMENT))
        after.remove("/s/consumequeue")
        left = read_all(open_store(after))
        assert left == expected[len(expected) - len(left) :]
        assert left


# F8, F9: segment files that are gone or cut short, far below the checkpoint.


def lose(disk: SimDisk, number: int, how: str) -> None:
    if how == "missing":
        disk.remove(path_of(number))
    else:
        disk.cut(path_of(number), 1000)


@pytest.mark.parametrize("how", ["missing", "cut short"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_segment_file_that_is_gone_or_cut_short_refuses_the_start_and_changes_nothing(
    number: int, how: str
) -> None:
    disk = SimDisk()
    filled_store(disk)
    lose(disk, number, how)
    before = disk.files("/s/commitlog")
    with pytest.raises(CorruptLogError) as caught:
        open_store(disk)
    assert caught.value.path == path_of(number)
    assert number * SEGMENT <= caught.value.position < (number + 1) * SEGMENT
    assert caught.value.end_position == (number + 1) * SEGMENT
    assert disk.files("/s/commitlog") == before
    assert [finding.start_position for finding in verify("/s", disk=disk)] == [
        caught.value.position
    ]


@pytest.mark.parametrize("how", ["missing", "cut short"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_in_quarantine_a_lost_segment_file_costs_its_own_messages_only(
    number: int, how: str
) -> None:
    disk = SimDisk()
    expected = filled_store(disk)
    whole = open_store(disk.killed())
    hit = offsets_within(whole, number)
    lose(disk, number, how)
    for _ in range(2):  # the second start knows of it
        store = open_store(disk, corruption="quarantine")
        good = len(read_all_until_damage(store, 0))
        assert good == hit[0] if how == "missing" else hit[0] < good <= hit[-1]
        with pytest.raises(CorruptLogError) as caught:
            store.read("topic", 0, good, 10, 1 << 20)
        assert caught.value.next_offset == hit[-1] + 1
        assert read_all(store, offset=hit[-1] + 1) == expected[hit[-1] + 1 :]
        request = make_request([b"new"])
        store.append([request])
        assert request.queue_offset == len(expected), "no offset is given twice"
        expected.append((len(expected), b"new"))
        assert read_all(store, offset=hit[-1] + 1) == expected[hit[-1] + 1 :]
        store.close()


def test_a_log_without_any_segment_is_no_empty_log() -> None:
    disk = SimDisk()
    expected = filled_store(disk)
    disk.remove("/s/commitlog")
    with pytest.raises(CorruptLogError):
        open_store(disk)
    store = open_store(disk, corruption="quarantine")
    request = make_request([b"new"])
    store.append([request])
    assert request.queue_offset == len(expected)
    assert read_all(store, offset=len(expected)) == [(len(expected), b"new")]


# F18: topics that were deleted.


def crashed(disk: SimDisk, how: str) -> SimDisk:
    if how == "power cut":
        return disk.crash(random.Random(1), keep=0.0)
    after = disk.killed()
    if how == "derived files lost":
        for name in ("consumequeue", "index", "repeatedsends", "checkpoint"):
            after.remove(f"/s/{name}")
    return after


@pytest.mark.parametrize("how", ["kill", "power cut", "derived files lost"])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("made_anew", ["not", "empty", "used"])
def test_a_deleted_topic_stays_deleted_whatever_happens_next(
    how: str, checkpoint: bool, made_anew: str
) -> None:
    disk = SimDisk()
    store = open_store(disk, sync_flush=True)
    store.topics.create(TopicConfig("topic"))
    for index in range(5):
        store.append([make_request([b"old"], queue_id=index % 2, producer_id=9, sequence=index)])
    store.append([make_request([b"other"], topic="other")])
    commit(store, "group", "topic", 0, 3)
    store.flush()
    if checkpoint:
        store.checkpoint()
    store.delete_topic("topic")
    if made_anew != "not":
        store.topics.create(TopicConfig("topic"))
    if made_anew == "used":
        store.append([make_request([b"new"])])
    store.flush()
    expected = {queue_id: read_all(store, queue_id=queue_id) for queue_id in (0, 1)}
    assert expected[1] == []
    for _ in range(2):
        disk = crashed(disk, how)
        store = open_store(disk, sync_flush=True)
        assert (store.topics.find("topic") is None) == (made_anew == "not")
        for queue_id in (0, 1):
            assert read_all(store, queue_id=queue_id) == expected[queue_id]
            end = store.queue_range("topic", queue_id)[1]
            assert end == len(expected[queue_id])
        assert committed(store, "group", "topic", 0) is None
        assert not store.offsets.groups()
        assert read_all(store, "other") == [(0, b"other")]
    store.close()
    assert verify("/s", disk=disk) == []


def test_deletions_are_forgotten_with_the_segments() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.topics.create(TopicConfig("gone"))
    store.append([make_request([b"x"], topic="gone")])
    store.delete_topic("gone")
    store.close()
    filled_store(disk)
    store = open_store(disk)
    assert list(store.topics.deleted) == ["gone"]
    store.delete_segments_below(2 * SEGMENT)
    store.close()
    store = open_store(disk)
    assert not store.topics.deleted
    store.topics.create(TopicConfig("another"))
    store.checkpoint()
    assert b'"gone"' not in disk.content("/s/config/topics.json")


@pytest.mark.parametrize(
    "path",
    [
        "/s/consumequeue/table.bin",
        "/s/consumequeue/topic/0/00000000000000000000",
        "/s/index/index.bin",
        "/s/index/tail.0",
        "/s/repeatedsends/table.bin",
        "/s/checkpoint",
    ],
)
@pytest.mark.parametrize("how", ["damaged", "cut short", "gone"])
def test_derived_files_that_are_made_anew_are_named_in_the_log(
    path: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimDisk()
    filled_store(disk)
    store = open_store(disk)
    store.append([make_request([b"with a key"], key="key")])
    expected = read_all(store)
    store.close()
    caplog.clear()
    with caplog.at_level("WARNING", "protomq_broker"):
        open_store(disk).close()
    assert [r.getMessage() for r in caplog.records if "topics.json" not in r.getMessage()] == []
    if how == "gone":
        disk.remove(path)
    elif how == "cut short":
        disk.cut(path, len(disk.content(path)) - 1)
    else:
        disk.flip_bit(path, 8 * 10)
    with caplog.at_level("WARNING", "protomq_broker"):
        store = open_store(disk)
    if path != "/s/checkpoint" or how != "gone":
        name = path.removesuffix("/00000000000000000000")
        is_left_to_readers = "/topic/" in path and how == "damaged"  # check bits: see heal.py
        assert any(name in r.getMessage() for r in caplog.records) != is_left_to_readers
    if "/topic/" not in path:
        assert read_all(store) == expected
    store.close()


def test_a_power_cut_leaves_no_file_of_a_queue_behind_one_that_a_start_has_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the queue has come so far, its entries would pass for proof of a longer log."""
    use_small_files(monkeypatch.setattr)
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request([b"a", b"b", b"c"])])
    store.checkpoint()
    store.append([make_request([b"d"] * 20)])
    for derived in store._files.derived:
        derived.flush()
    rng = random.Random(1)
    for _ in range(40):
        again = disk.killed()
        open_store(again)
        again = again.crash(rng)
        open_store(again)
        assert list(again.files("/s/consumequeue/topic/0")) in ([], [f"/s/consumequeue/topic/0/{0:020d}"])
