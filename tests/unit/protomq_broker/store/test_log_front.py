"""The log is complete from its first segment on: whatever retention has deleted, a start needs nothing but the log."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from protomq_broker.store.errors import StoreError
from protomq_broker.store.queues.selection import ENTRY_SIZE_BYTES
from protomq_broker.store.state.group_settings import GroupSettings
from protomq_broker.store.state.send_errors import SequenceExpiredError
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from tests.support.lost_files import lose

from .log_helpers import ManualClock, make_request
from .store_helpers import SEGMENT, commit, committed, open_store, read_all
from .test_following import disk_of

CACHES = ("config", "checkpoint", "consumequeue", "index", "repeatedsends", "boundaries")


def only_the_log(disk: SimDisk) -> SimDisk:
    """As a new replica has it."""
    after = disk.killed()
    lose(after, *CACHES)
    return after


def fill(store: Store, segment_count: int, *, topic: str = "busy") -> None:
    end = store.appended_position + segment_count * SEGMENT
    while store.appended_position < end:
        store.append([make_request([b"x" * 400], topic=topic)])


def told(store: Store) -> dict[str, object]:
    """What clients are told of all that the log must still know."""
    topics = {(t, t.incarnation) for t in store.topics.all()}
    names = [t.name for t in store.topics.all()]
    ranges = {
        (name, queue_id): store.queue_range(name, queue_id)
        for name in names
        for queue_id in range(3)
    }
    return {
        "topics": topics,
        "version": store.topics.snapshot().version,
        "ranges": ranges,
        "offsets": {(name, committed(store, "idle", name, 0)) for name in names},
    }


def worn_store(disk: SimDisk, clock: ManualClock | None = None) -> Store:
    """Four topics, of which one rests, one is deleted and one deleted and created again; the first segments are due to go."""
    store = open_store(disk, clock=clock)
    store.topics.put([TopicConfig(n, 3, 3) for n in ("rests", "gone", "again")])
    store.topics.put([TopicConfig("busy", 4, 4, writable=True)])
    for name in ("rests", "gone", "again"):
        for queue_id in range(2):
            store.append([make_request([b"a", b"b", b"c"], topic=name, queue_id=queue_id)])
        commit(store, "idle", name, 0, 2)
    store.topics.put([TopicConfig("rests", 3, 5, writable=False)])
    fill(store, 2)
    store.delete_topic("gone")
    store.delete_topic("again")
    store.topics.create(TopicConfig("again", 2, 2))
    store.append([make_request([b"new"], topic="again")])
    fill(store, 2)
    store.checkpoint()
    return store


@pytest.mark.parametrize("turns", [1, 3])
def test_what_retention_has_deleted_is_told_by_the_log_alone(turns: int) -> None:
    disk = SimDisk()
    store = worn_store(disk)
    for _ in range(turns):
        before = store.min_position
        assert store.delete_segments_below(store.appended_position) > before
        fill(store, 2)
        store.checkpoint()
    expected = told(store)
    assert expected["ranges"]["rests", 0] == (3, 3)  # type: ignore[index]
    for after in (disk.killed(), only_the_log(disk), disk.crash(random.Random(1), keep=0.0)):
        again = open_store(after)
        assert told(again) == expected
        request = make_request([b"next"], topic="rests", queue_id=1)
        again.append([request])
        assert request.queue_offset == 3
        again.close()
        assert read_all(open_store(only_the_log(after)), "rests", 1) == [(3, b"next")]


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_queue_whose_messages_and_files_are_gone_goes_on_where_it_ended(is_gone: bool) -> None:
    """Only its own files: the table of all queues says how many entries they had."""
    disk = SimDisk()
    store = worn_store(disk)
    store.delete_segments_below(store.appended_position)
    store.checkpoint()
    after = disk.killed()
    [file] = after.list("/s/consumequeue/rests/1")
    path = f"/s/consumequeue/rests/1/{file}"
    if is_gone:
        after.remove(path)
    else:
        after.cut(path, ENTRY_SIZE_BYTES)
    again = open_store(after)
    assert again.queue_range("rests", 1)[1] == 3
    again.append([make_request([b"next"], topic="rests", queue_id=1)])
    assert read_all(again, "rests", 1) == [(3, b"next")]


def test_a_new_topic_of_a_deleted_ones_name_begins_at_0_whatever_was_carried_of_the_old_one() -> None:
    disk = SimDisk()
    store = worn_store(disk)
    store.delete_segments_below(store.appended_position)
    store.delete_topic("rests")
    store.topics.create(TopicConfig("rests", 1, 1))
    for after in (disk.killed(), only_the_log(disk)):
        again = open_store(after)
        assert again.queue_range("rests", 1) == (0, 0)
        assert committed(again, "idle", "rests", 0) is None


def test_a_retention_turn_that_is_killed_anywhere_loses_nothing() -> None:
    for number in range(1, 200):
        disk = SimDisk()
        store = worn_store(disk)
        expected = told(store)
        disk.fail_at(number, Fault.CRASH)
        try:
            store.delete_segments_below(2 * SEGMENT)
        except SimulatedCrash:
            pass
        else:
            assert number > 5
            return
        images = (disk.killed(), disk.crash(random.Random(number)))
        for after in (*images, *(only_the_log(image) for image in images)):
            again = open_store(after)
            found = told(again)
            for what in ("topics", "version", "offsets"):
                assert found[what] == expected[what], (number, what)
            for key, (low, end) in expected["ranges"].items():  # type: ignore[attr-defined]
                first, last = found["ranges"][key]  # type: ignore[index]
                assert (last, low <= first <= end) == (end, True), (number, key)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.SYNC_LOST, Fault.ENOSPC])
def test_nothing_is_deleted_before_what_is_carried_is_synced(fault: Fault) -> None:
    for number in range(1, 200):
        disk = SimDisk()
        store = worn_store(disk)
        expected = told(store)
        disk.fail_at(number, fault)
        with suppress(OSError, StoreError):
            store.delete_segments_below(2 * SEGMENT)
        is_over = disk.operations < number
        disk.plan = None
        found = told(open_store(only_the_log(disk.crash(random.Random(number), keep=0.0))))
        for what in ("topics", "version", "offsets"):
            assert found[what] == expected[what], (number, what)
        if is_over or number > 60:
            return


def test_a_send_is_recognised_after_its_segment_is_gone_and_for_15_minutes() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = worn_store(disk, clock)

    def send(store: Store, sequence: int, queue_id: int = 0) -> object:
        request = make_request(
            [b"once"], topic="busy", queue_id=queue_id, producer_id=77, sequence=sequence
        )
        found = store.find_repeated(request)
        if found is None:
            store.append([request])
        return found

    for sequence in range(6):
        assert send(store, sequence, sequence % 3) is None
    fill(store, 3)
    store.checkpoint()
    store.delete_segments_below(store.appended_position)
    end = store.appended_position
    for after in (disk.killed(), only_the_log(disk)):
        again = open_store(after, clock=clock)
        for sequence in range(6):
            with suppress(SequenceExpiredError):
                assert send(again, sequence, sequence % 3) is not None, sequence
        assert again.appended_position == end
        assert send(again, 6) is None


def test_a_slice_of_producers_has_few_enough_runs_for_one_record() -> None:
    store = open_store(SimDisk())
    for producer_id in (1, 2, 3):
        for sequence in range(4):
            request = make_request([b"x"], producer_id=producer_id, sequence=sequence, queue_id=sequence % 2)
            store.append([request])
    of = store._repeated.producers_since
    assert of(0, 100, 1_000) == [[1, 2, 3]]
    assert of(0, 2, 1_000) == [[1, 2], [3]]
    assert of(0, 100, 5) == [[1], [2], [3]]
    assert of(1 << 60, 100, 5) == []


def test_what_is_carried_needs_no_larger_appends_than_a_segment_takes() -> None:
    """All states together, and those of one producer, are larger than a segment."""
    store = open_store(SimDisk(), segment=4096)
    names = [f"topic-with-a-long-name-{number}" for number in range(60)]
    store.topics.put([TopicConfig(name) for name in names[:30]])
    store.topics.put([TopicConfig(name) for name in names[30:]])
    for name in names:
        commit(store, "a-group-with-a-name", name, 0, 0)
        store.groups.put(GroupSettings(f"group-of-{name}", retry_delays_ms=tuple(range(20))))
        store.append([make_request([b"x"], topic=name)])
    for sequence in range(300):
        for producer_id in (1, 2, 3) if sequence < 40 else (1,):
            request = make_request([b"x"], topic=names[sequence % 2], producer_id=producer_id, sequence=sequence)
            store.append([request])
    store.checkpoint()
    expected = told(store)
    cut = store.appended_position // 4096 * 4096
    store.delete_segments_below(cut)
    assert store.min_position == cut
    store.flush()
    again = open_store(only_the_log(disk_of(store)), segment=4096)
    for store_ in (store, again):
        assert told(store_)["offsets"] == expected["offsets"]
        assert told(store_)["topics"] == expected["topics"]
        assert len(store_.groups.all()) == 60
        for producer_id, sequence in ((1, 299), (2, 0), (3, 39)):
            assert store_._repeated.admit(producer_id, 0, sequence, 1, topic=names[sequence % 2]) is not None
    with pytest.raises(SequenceExpiredError):
        again._repeated.admit(1, 0, 0, 1, topic=names[0])


def test_producers_that_have_rested_are_not_carried() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = worn_store(disk, clock)
    store.append([make_request([b"x"], topic="busy", producer_id=77)])
    fill(store, 2)
    clock.time_ms += 16 * 60_000
    fill(store, 1)
    store.checkpoint()
    cut = 2 * SEGMENT
    assert not any(getattr(carry.body_of, "func", None) == store._front._producers for carry in store._front.carry(cut))


def test_a_disk_that_gives_no_more_can_be_freed() -> None:
    disk = SimDisk()
    store = worn_store(disk)
    expected = told(store)
    disk.capacity_bytes = 0
    with suppress(StoreError):
        for _ in range(1000):
            store.append([make_request([b"x" * 30], topic="busy")])
    disk.capacity_bytes = 1 << 12  # files of a few octets; no segment
    store.delete_segments_below(SEGMENT)
    assert store.min_position == SEGMENT
    disk.capacity_bytes = 1 << 40
    again = open_store(only_the_log(disk))
    assert told(again)["topics"] == expected["topics"]


def test_where_the_oldest_messages_of_a_queue_are_lost_the_log_tells_where_it_begins() -> None:
    disk = SimDisk()
    store = worn_store(disk)
    position = store.appended_position
    store.append([make_request([b"1", b"2"], topic="rests", queue_id=0)])
    store.append([make_request([b"3"], topic="rests", queue_id=0)])
    fill(store, 1)
    store.checkpoint()
    store.delete_segments_below(position - position % SEGMENT)
    assert store.queue_range("rests", 0) == (3, 6)
    store.close()
    base = position - position % SEGMENT
    disk.flip_bit(f"/s/commitlog/{base:020d}", (position - base + 20) * 8)
    again = open_store(only_the_log(disk), corruption="quarantine")
    assert again.damaged_ranges
    assert again.queue_range("rests", 0) == (3, 6)
