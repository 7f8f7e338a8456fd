"""Files beside the log that are older than others, or are gone while others stay: a start follows the log, and takes nothing twice."""

from __future__ import annotations

import pytest

from protomq.v1.send_service_pb2 import SendRequest
from protomq_broker.store.errors import DiskFullError
from protomq_broker.store.queues.consume_queue import LOST_TAG_CODE
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import Fault, SimDisk
from tests.support.lost_files import lose
from tests.support.transaction_world import SEGMENT as WORLD_SEGMENT
from tests.support.transaction_world import World

from .derived_helpers import use_small_files
from .log_helpers import make_request
from .store_helpers import SEGMENT, open_store, read_all
from .test_following import disk_of

TABLE = "/s/consumequeue/table.bin"
TOPICS = ("config/topics.json", "config/topics.json.previous")


def send(store: Store, count: int, topic: str = "topic") -> None:
    for _ in range(count):
        store.append([make_request([b"a body"], topic=topic)])


def fill_segments(store: Store, count: int = 2) -> None:
    end = store.appended_position + count * SEGMENT
    while store.appended_position < end:
        store.append([make_request([bytes(1_000)], topic="filler")])


def put(disk: SimDisk, path: str, content: bytes) -> None:
    """As if the file had never been written after that."""
    disk.cut(path, 0)
    disk.overwrite(path, 0, content)


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_older_table_gives_no_offset_of_deleted_messages_again(*, is_folder: bool) -> None:
    store = open_store(disk := SimDisk())
    store.topics.create(TopicConfig("topic"))
    send(store, 3)
    store.checkpoint()
    older = disk.files("/s/consumequeue")
    send(store, 6)
    fill_segments(store)
    store.checkpoint()
    store.delete_segments_below(store.appended_position)
    assert store.queue_range("topic", 0) == (9, 9)
    store.checkpoint()
    store.close()
    for path in [path for path in older if is_folder or path == TABLE]:
        put(disk, path, older[path])
    store = open_store(disk)
    assert store.queue_range("topic", 0) == (9, 9)
    send(store, 1)
    store.flush()
    assert [offset for offset, _ in read_all(store)] == [9]
    store.close()
    assert open_store(disk).queue_range("topic", 0) == (9, 10)


@pytest.mark.parametrize("gone", ["checkpoint", "index", "timer", "repeatedsends", "transactions"])
@pytest.mark.parametrize("later_count", [None, 0, 1])
def test_a_deleted_topic_stays_deleted_where_caches_are_gone(gone: str, later_count: int | None) -> None:
    """What stands before the deletion is walked again, and only the log tells of it. `later_count`: messages of a new topic of its name."""
    store = open_store(disk := SimDisk())
    store.topics.create(TopicConfig("topic"))
    send(store, 3)
    fill_segments(store)
    store.delete_topic("topic")
    if later_count is not None:
        store.topics.create(TopicConfig("topic", 2, 2))
        send(store, later_count)
    store.close()
    lose(disk_of(store), gone, *TOPICS)
    store = open_store(disk)
    assert (store.topics.find("topic") is None) is (later_count is None)
    assert store.queue_range("topic", 0) == (0, later_count or 0)
    assert len(read_all(store)) == (later_count or 0)


def test_what_the_log_told_of_a_deleted_topic_does_not_count_for_a_later_one() -> None:
    store = open_store(disk := SimDisk())
    store.topics.create(TopicConfig("topic"))
    send(store, 6)
    fill_segments(store)
    store.checkpoint()
    store.delete_segments_below(SEGMENT)
    store.delete_topic("topic")
    store.topics.create(TopicConfig("topic", 2, 2))
    send(store, 1)
    store.close()
    lose(disk_of(store), "consumequeue/topic/0", *TOPICS)
    store = open_store(disk)
    assert store.queue_range("topic", 0) == (0, 1)
    assert [offset for offset, _ in read_all(store)] == [0]


@pytest.mark.parametrize("told_at", [50, 500])
def test_offsets_that_were_given_again_behind_it_count_more_than_what_the_log_told(told_at: int) -> None:
    disk = SimDisk()
    disk.make_folder("/s")
    table = ConsumeQueueTable(disk, "/s/consumequeue")
    table.load()
    table.queue("topic", 0).append(200, 30, 0)
    table.note_carried("topic", 0, 0, 9, told_at)
    table.begin_carried()
    assert table.end_offset("topic", 0) == (1 if told_at < 200 else 9)


def test_an_older_file_of_the_timer_does_not_count_where_the_log_begins_behind_it() -> None:
    world = World().start()

    def delay(count: int) -> None:
        for _ in range(count):
            world.request(SendRequest(topic="topic", queue_id=0, records=[world.record(b"late")], delay_ms=10_000))

    delay(2)
    world.store.checkpoint()
    older = world.disk.content("/s/timer/pending.bin")
    delay(20)
    fill_segments(world.store, 2 * WORLD_SEGMENT // SEGMENT)
    world.store.checkpoint()
    world.store.delete_segments_below(WORLD_SEGMENT)
    assert world.store.min_position == WORLD_SEGMENT
    world.store.flush()
    disk = world.disk.killed()
    put(disk, "/s/timer/pending.bin", older)
    world.restart(disk)
    pending = world.store.pending
    assert sum(map(len, pending.below(1 << 60))) == pending.count == 22
    world.clock.time_ms += 20_000
    while world.mover.deliver():
        pass
    assert world.delivered() == [b"late"] * 22
    assert pending.count == 0
    world.store.checkpoint()
    assert world.restart().store.pending.count == 0


@pytest.mark.parametrize("is_front_deleted", [False, True])
def test_an_older_file_of_a_queue_gives_no_message_of_a_deleted_topic(*, is_front_deleted: bool) -> None:
    """Its check bits hold: it is of an earlier topic of that name."""
    store = open_store(disk := SimDisk())
    store.topics.create(TopicConfig("topic"))
    send(store, 3)
    store.checkpoint()
    older = disk.content(path := f"/s/consumequeue/topic/0/{0:020d}")
    fill_segments(store)
    store.delete_topic("topic")
    store.topics.create(TopicConfig("topic", 2, 2))
    for number in range(3):
        store.append([make_request([b"later %d" % number])])
    if is_front_deleted:
        store.checkpoint()
        store.delete_segments_below(SEGMENT)
    expected = read_all(store)
    store.close()
    assert len(expected) == 3
    assert disk.content(path) != older
    put(disk, path, older)
    store = open_store(disk)
    assert read_all(store) == expected
    store.close()
    assert read_all(open_store(disk)) == expected


@pytest.mark.parametrize("later_count", [3, 12])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_an_older_file_hides_no_message_where_the_deletion_of_its_topic_has_left_the_log(
    later_count: int, is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_files(monkeypatch.setattr)  # of 8 entries
    store = open_store(disk := SimDisk())
    store.topics.create(TopicConfig("topic"))
    send(store, later_count)
    store.checkpoint()
    path = f"/s/consumequeue/topic/0/{later_count // 8 * 160:020d}"
    older = disk.content(path)
    store.delete_topic("topic")
    fill_segments(store)
    store.topics.create(TopicConfig("topic", 2, 2))
    for number in range(later_count):
        store.append([make_request([b"later %d" % number])])
    store.checkpoint()
    store.delete_segments_below(2 * SEGMENT)
    assert not store.topics.deleted
    expected = read_all(store)
    assert len(expected) == later_count
    if is_checkpointed:
        store.checkpoint()
    store.close()
    open_store(disk).close()  # nothing has changed in the queue since: the table still tells
    put(disk, path, older)
    for _ in range(2):
        store = open_store(disk)
        assert read_all(store) == expected
        store.close()


def test_an_older_table_brings_no_topic_back_whose_deletion_has_left_the_log() -> None:
    store = open_store(disk := SimDisk())
    store.topics.create(TopicConfig("topic"))
    send(store, 3)
    store.checkpoint()
    older = disk.content(TABLE)
    store.delete_topic("topic")
    fill_segments(store)
    store.checkpoint()
    store.delete_segments_below(SEGMENT)
    store.close()
    put(disk, TABLE, older)
    store = open_store(disk)
    assert store.topics.find("topic") is None
    store.topics.create(TopicConfig("topic"))
    send(store, 1)
    assert [offset for offset, _ in read_all(store)] == [0]


def test_deletions_that_have_left_the_log_are_forgotten_while_the_store_is_open() -> None:
    store = open_store(SimDisk())
    for number in range(3):
        store.topics.create(TopicConfig(f"passing-{number}"))
        store.delete_topic(f"passing-{number}")
    fill_segments(store)
    store.topics.create(TopicConfig("last"))
    store.delete_topic("last")
    store.checkpoint()
    store.delete_segments_below(SEGMENT)
    assert list(store.topics.deleted) == ["last"]


def test_a_first_message_that_was_refused_makes_no_topic() -> None:
    store = open_store(disk := SimDisk())
    send(store, 1, "other")
    disk.fail_at(1, Fault.ENOSPC)
    with pytest.raises(DiskFullError):
        send(store, 1)
    store.close()
    store = open_store(disk)
    assert [topic.name for topic in store.topics.all()] == ["other"]


def test_an_older_file_is_noticed_where_another_queue_of_its_topic_is_damaged() -> None:
    store = open_store(disk := SimDisk())
    store.topics.create(TopicConfig("topic", 2, 2))
    for queue_id in (0, 1):
        store.append([make_request([b"earlier"] * 3, queue_id=queue_id)])
    store.checkpoint()
    damaged, path = (f"/s/consumequeue/topic/{queue_id}/{0:020d}" for queue_id in (0, 1))
    older = disk.content(path)
    fill_segments(store)
    store.delete_topic("topic")
    store.topics.create(TopicConfig("topic", 2, 2))
    for queue_id in (0, 1):
        store.append([make_request([b"later"] * 3, queue_id=queue_id)])
    store.close()
    disk.flip_bit(damaged, 0)
    put(disk, path, older)
    store = open_store(disk)
    assert [body for _, body in read_all(store, queue_id=1)] == [b"later"] * 3


@pytest.mark.parametrize("log_start", [0, 100, 180, 221, 1_000])
def test_what_the_log_told_of_a_queues_end_hides_no_message_that_the_log_still_has(log_start: int) -> None:
    """As of a follower whose leader has lost messages from the end of the queue, and told where it ends before the next one came."""
    disk = SimDisk()
    disk.make_folder("/s")
    table = ConsumeQueueTable(disk, "/s/consumequeue")
    table.load()
    queue = table.queue("topic", 0)
    for position in (100, 140, 180, 220):
        queue.append(position, 30, 0)
    table.log_start = log_start
    table.note_carried("topic", 0, 0, 9, 500)
    table.begin_carried()
    assert table.end_offset("topic", 0) == 9
    kept = [position for position in (100, 140, 180, 220) if position >= log_start]
    entries = queue.entries(queue.min_offset(log_start), 9)
    lost_count = 5 if kept else 0
    assert entries["position"].tolist() == [*kept, *[500] * lost_count]
    assert entries["tag_code"].tolist() == [*[0] * len(kept), *[LOST_TAG_CODE] * lost_count]
