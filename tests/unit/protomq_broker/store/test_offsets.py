"""Committed offsets: the records of the log make them, the file beside it is a cache that is never believed against the log."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, QueueOffset
from protomq.v1.state_pb2 import OffsetsRecord
from protomq.wire.record import FLAG_KIND_HALF
from protomq.wire.topics import OFFSETS_TOPIC
from protomq_broker.store.errors import DiskFullError, StoreFailedError
from protomq_broker.store.log.record_region import set_kind
from protomq_broker.store.state import offsets as offsets_module
from protomq_broker.store.state.offsets import ConsumerOffsets, OffsetKey
from protomq_broker.store.state.topics import TopicConfig, incarnation_of_first
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

from .log_helpers import make_request
from .store_helpers import SEGMENT, commit, committed, open_store

PATH = "/s/config/consumerOffsets.json"


def make_offsets(disk: SimDisk | None = None, end_position: int = 1 << 40) -> ConsumerOffsets:
    disk = disk or SimDisk()
    disk.make_folder("/s/config")
    return ConsumerOffsets(disk, PATH, 0, end_position)


def record(*commits: tuple[str, str, int, int], incarnation: int = 1) -> bytes:
    """A record of (group, topic, queue, offset)."""
    return OffsetsRecord(
        commits=[
            CommitOffsetsRequest(
                consumer_group=group,
                offsets=[
                    QueueOffset(
                        topic=topic,
                        queue_id=queue_id,
                        queue_offset=offset,
                        topic_incarnation=incarnation,
                    )
                ],
            )
            for group, topic, queue_id, offset in commits
        ]
    ).SerializeToString()


def deletion(*groups: str) -> bytes:
    return OffsetsRecord(deleted_groups=groups).SerializeToString()


def save(offsets: ConsumerOffsets, position: int) -> bool:
    snapshot = offsets.unsaved()
    if snapshot is not None:
        snapshot.save(position)
    return snapshot is not None


def test_the_last_record_of_a_queue_counts() -> None:
    offsets = make_offsets()
    offsets.apply(record(("g", "t", 0, 5), ("g", "t", 3, 7), ("g", "t", 0, 6)), 10)
    offsets.apply(record(("g", "t", 0, 4)), 20)
    assert offsets.of_topic("g", "t", 1) == {0: 4, 3: 7}
    assert offsets.find("g", "t", 1, 0) == 4
    assert offsets.find("g", "t", 1, 1) is offsets.find("g", "u", 1, 0) is None
    assert offsets.of_topic("h", "t", 1) == {}
    assert offsets.groups() == {"g": ["t"]}


def test_offsets_belong_to_one_incarnation() -> None:
    offsets = make_offsets()
    offsets.apply(record(("g", "t", 0, 5), ("g", "t", 1, 5)), 10)
    assert offsets.of_topic("g", "t", 2) == {}
    offsets.apply(record(("g", "t", 0, 1), incarnation=2), 20)
    assert offsets.of_topic("g", "t", 2) == {0: 1}
    assert offsets.of_topic("g", "t", 1) == {}
    offsets.apply(record(("g", "u", 0, 1), ("h", "u", 0, 1)), 30)
    offsets.keep({"t": 2}.get)
    assert offsets.groups() == {"g": ["t"]}


def test_a_group_that_is_deleted_is_gone_until_it_commits_again() -> None:
    offsets = make_offsets()
    offsets.apply(record(("g", "t", 0, 5), ("h", "t", 0, 7)), 10)
    offsets.apply(deletion("g", "never there"), 20)
    assert offsets.groups() == {"h": ["t"]}
    assert offsets.find("g", "t", 1, 0) is None
    assert offsets.record_of([OffsetKey("g", "t", 0)], 50) == b"", "it is not carried forward"
    offsets.apply(record(("g", "t", 1, 2)), 30)
    assert offsets.of_topic("g", "t", 1) == {1: 2}


def test_a_record_with_both_deletes_first() -> None:
    offsets = make_offsets()
    offsets.apply(record(("g", "t", 0, 5)), 10)
    offsets.apply(record(("g", "t", 1, 6)) + deletion("g"), 20)
    assert offsets.of_topic("g", "t", 1) == {1: 6}


def test_a_group_that_is_deleted_while_the_cache_is_made_is_not_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimDisk()
    offsets = make_offsets(disk)
    offsets.apply(record(("g", "t", 0, 5)), 10)
    names = list(offsets._groups)
    offsets.apply(deletion("g"), 20)
    with monkeypatch.context() as patch:  # as it is between two groups
        patch.setattr(offsets, "_groups", _NamesOfBefore(names))
        assert save(offsets, 30)
    assert make_offsets(disk).groups() == {}


class _NamesOfBefore(dict[str, Any]):
    """Groups that were there when their names were looked at, and are not any more."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)


def test_a_record_that_is_none_changes_nothing_and_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    offsets = make_offsets()
    offsets.apply(record(("g", "t", 0, 5)), 10)
    offsets.apply(b"\x0a\x05abc", 20)
    assert offsets.of_topic("g", "t", 1) == {0: 5}
    assert "position 20" in caplog.text


def test_the_cache_is_written_when_something_has_changed_and_read_back() -> None:
    disk = SimDisk()
    offsets = make_offsets(disk)
    assert not save(offsets, 0)
    offsets.apply(record(("g", "t", 1, 5)), 10)
    assert save(offsets, 90)
    assert not save(offsets, 95)
    again = make_offsets(disk)
    assert again.replay_from == 90
    assert again.of_topic("g", "t", 1) == {1: 5}
    assert again.keys_below(11) == [OffsetKey("g", "t", 1)]
    assert json.loads(disk.content(PATH))["content"]["groups"]["g"]["t"]["offsets"] == {
        "1": [5, 10]
    }


def test_a_cache_that_could_not_be_written_is_written_later() -> None:
    disk = SimDisk()
    offsets = make_offsets(disk)
    offsets.apply(record(("g", "t", 1, 5)), 10)
    disk.capacity_bytes = 0
    with pytest.raises(OSError):
        save(offsets, 20)
    disk.capacity_bytes = 1 << 20
    assert save(offsets, 20)


def test_a_cache_that_knows_more_than_the_log_is_left_aside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = SimDisk()
    offsets = make_offsets(disk)
    offsets.apply(record(("g", "t", 1, 5)), 10)
    save(offsets, 90)
    again = make_offsets(disk, end_position=89)
    assert (again.replay_from, again.groups()) == (0, {})
    assert "ahead of the log" in caplog.text


def test_every_flipped_bit_of_the_cache_is_noticed() -> None:
    disk = SimDisk()
    offsets = make_offsets(disk)
    offsets.apply(record(("g", "t", 1, 5)), 10)
    save(offsets, 90)
    for bit in range(len(disk.content(PATH)) * 8):
        disk.flip_bit(PATH, bit)
        again = make_offsets(disk)
        assert (again.replay_from, again.groups()) == (0, {}), bit
        disk.flip_bit(PATH, bit)
    assert make_offsets(disk).replay_from == 90


def test_where_the_newest_snapshot_does_not_hold_the_one_before_counts() -> None:
    disk = SimDisk()
    offsets = make_offsets(disk)
    for position in (10, 20, 30):
        offsets.apply(record(("g", "t", 1, position)), position)
        save(offsets, position + 5)
    disk.flip_bit(PATH, 500)
    again = make_offsets(disk)
    assert (again.replay_from, again.of_topic("g", "t", 1)) == (25, {1: 20})
    again.apply(record(("g", "t", 1, 30)), 30)
    save(again, 40)  # the damaged one is not kept
    disk.remove(PATH)
    assert make_offsets(disk).replay_from == 25


def test_a_snapshot_from_before_the_start_of_the_log_does_not_count() -> None:
    """What was deleted since may have told of a deletion."""
    disk = SimDisk()
    offsets = make_offsets(disk)
    offsets.apply(record(("g", "t", 1, 5)), 10)
    save(offsets, 15)
    offsets.apply(deletion("g"), 20)
    save(offsets, 25)
    disk.remove(PATH)
    assert make_offsets(disk).replay_from == 15
    assert ConsumerOffsets(disk, PATH, 16, 100).replay_from == 0


@pytest.mark.parametrize("number", range(1, 12))
def test_a_save_that_is_killed_anywhere_leaves_a_snapshot(number: int) -> None:
    disk = SimDisk()
    offsets = make_offsets(disk)
    offsets.apply(record(("g", "t", 1, 5)), 10)
    save(offsets, 15)
    for folder in ("/s", "/"):
        disk.fsync_dir(folder)
    offsets.apply(record(("g", "t", 1, 6)), 20)
    disk.fail_at(number, Fault.CRASH)
    with suppress(SimulatedCrash):
        save(offsets, 25)
    for after in (disk.killed(), *(disk.crash(random.Random(seed)) for seed in range(9))):
        again = make_offsets(after)
        offset = {15: 5, 25: 6}[again.replay_from]
        assert again.of_topic("g", "t", 1) == {1: offset}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("gh"),
            st.sampled_from("tu"),
            st.integers(0, 2),
            st.integers(0, 9),
            st.integers(1, 2),
        )
        | st.sampled_from("gh"),
        max_size=30,
    ),
    st.data(),
)
def test_a_cache_at_any_point_and_the_records_behind_it_make_the_same_offsets(
    commits: list[tuple[str, str, int, int, int] | str], data: st.DataObject
) -> None:
    disk = SimDisk()
    offsets = make_offsets(disk)
    bodies = [
        deletion(commit) if isinstance(commit, str) else record(commit[:4], incarnation=commit[4])
        for commit in commits
    ]
    saved_at = data.draw(st.integers(0, len(bodies)))
    for position, body in enumerate(bodies):
        if position == saved_at:
            save(offsets, position)
        offsets.apply(body, position)
    again = make_offsets(disk)
    for position, body in enumerate(bodies):
        if position >= again.replay_from:
            again.apply(body, position)
    for incarnation in (1, 2):
        for group in "gh":
            for topic in "tu":
                assert again.of_topic(group, topic, incarnation) == offsets.of_topic(
                    group, topic, incarnation
                )
    assert sorted(again.keys_below(99)) == sorted(offsets.keys_below(99))
    assert again.incarnations({}) == offsets.incarnations({})
    assert again.groups() == offsets.groups()


# With a store.


CACHES = {
    "nothing": (),
    "cache": ("config/consumerOffsets.json",),
    "checkpoint": ("checkpoint",),
    "cache and checkpoint": ("config/consumerOffsets.json", "checkpoint"),
    "all": (
        "config/consumerOffsets.json",
        "config/topics.json",
        "checkpoint",
        "consumequeue",
        "index",
        "repeatedsends",
    ),
}


@pytest.mark.parametrize("lost", CACHES)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_offsets_survive_the_loss_of_every_cache(lost: str, checkpoints: bool) -> None:
    disk = SimDisk()
    store = open_store(disk)
    incarnation = store.topics.create(TopicConfig("topic")).incarnation
    store.append([make_request(queue_id=1)])
    commit(store, "idle", "topic", 0, 90)
    for offset in (10, 90, 40):
        commit(store, "group", "topic", 1, offset)
        if checkpoints:
            store.checkpoint()
    if checkpoints:
        store.close()
    else:
        disk = disk.killed()
    for name in CACHES[lost]:
        if disk.exists(f"/s/{name}"):
            disk.remove(f"/s/{name}")
    store = open_store(disk)
    assert committed(store, "group", "topic", 1) == 40
    assert committed(store, "idle", "topic", 0) == 90
    topic = store.topics.find("topic")
    assert topic is not None
    assert topic.incarnation == incarnation


@pytest.mark.parametrize("lost", CACHES)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_deleted_group_does_not_come_back_by_the_loss_of_any_cache(
    lost: str, checkpoints: bool
) -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.topics.create(TopicConfig("topic"))
    store.append([make_request(queue_id=1)])  # it names the topic
    commit(store, "gone", "topic", 0, 5)
    commit(store, "again", "topic", 0, 6)
    if checkpoints:
        store.checkpoint()
    store.append_state(OFFSETS_TOPIC, [deletion("gone", "again")])
    commit(store, "again", "topic", 1, 7)
    if checkpoints:
        store.close()
    else:
        disk = disk.killed()
    for name in CACHES[lost]:
        if disk.exists(f"/s/{name}"):
            disk.remove(f"/s/{name}")
    store = open_store(disk)
    assert store.offsets.groups() == {"again": ["topic"]}
    assert (committed(store, "again", "topic", 0), committed(store, "again", "topic", 1)) == (
        None,
        7,
    )


def test_a_deleted_group_does_not_come_back_when_segments_go() -> None:
    disk = SimDisk()
    store = open_store(disk)
    commit(store, "gone", "topic", 0, 5)
    commit(store, "idle", "topic", 0, 6)
    fill_segments(store, 2)
    store.append_state(OFFSETS_TOPIC, [deletion("gone")])
    for count in (4, 6):  # first the offsets' segment goes, then the deletion's
        fill_segments(store, count)
        store.checkpoint()
        store.delete_segments_below((count - 2) * SEGMENT)
        assert store.min_position > 0
        killed = disk.killed()
        killed.remove(PATH)
        assert open_store(killed).offsets.groups() == {"idle": ["topic"]}


@pytest.mark.parametrize("digit", range(3))
def test_a_changed_digit_in_the_cache_changes_no_offset(
    digit: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimDisk()
    store = open_store(disk)
    commit(store, "group", "topic", 0, 777)
    store.close()
    at = disk.content(PATH).index(b"777") + digit
    disk.overwrite(PATH, at, b"1")
    caplog.clear()
    store = open_store(disk)
    assert committed(store, "group", "topic", 0) == 777
    assert "consumerOffsets.json is damaged" in caplog.text


def fill_segments(store: Store, count: int) -> None:
    while store.appended_position < count * SEGMENT:
        store.append([make_request([b"x" * 400])])


def test_an_idle_groups_offsets_outlive_the_segment_in_which_they_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offsets_module, "CARRIED_COUNT", 2)
    disk = SimDisk()
    store = open_store(disk)
    store.topics.create(TopicConfig("gone"))
    for number in range(5):
        commit(store, f"idle{number}", "topic", number, number)
    commit(store, "idle0", "gone", 0, 5)
    commit(store, "busy", "topic", 0, 1)
    for round_ in range(1, 4):
        fill_segments(store, 3 * round_)
        commit(store, "busy", "topic", 0, round_)
        if round_ == 2:
            store.delete_topic("gone")
        store.checkpoint()
        before = store.min_position
        after = store.delete_segments_below(store.appended_position)
        assert after > before
        assert store.offsets.keys_below(after) == []
    disk = disk.killed()
    disk.remove(PATH)
    store = open_store(disk)
    for number in range(5):
        assert committed(store, f"idle{number}", "topic", number) == number
    assert committed(store, "busy", "topic", 0) == 3
    assert "gone" not in {topic for topics in store.offsets.groups().values() for topic in topics}


def test_nothing_is_deleted_if_what_is_alive_in_it_cannot_be_carried_forward() -> None:
    disk = SimDisk()
    store = open_store(disk)
    commit(store, "idle", "topic", 0, 5)
    fill_segments(store, 3)
    store.checkpoint()

    def refuse(function: object) -> None:
        raise StoreFailedError("there is no writer")

    store._carried._on_writer = refuse
    with pytest.raises(StoreFailedError):
        store.delete_segments_below(2 * SEGMENT)
    assert store.min_position == 0


def test_a_disk_that_is_too_full_for_messages_takes_commits_and_can_be_freed() -> None:
    disk = SimDisk()
    store = open_store(disk)
    commit(store, "idle", "topic", 0, 5)
    fill_segments(store, 3)
    store.checkpoint()
    store._refusals.refuse("the disk is 95 % full")
    with pytest.raises(DiskFullError):
        store.append([make_request([b"x"])])
    commit(store, "group", "topic", 0, 9)
    store.delete_segments_below(2 * SEGMENT)
    assert store.min_position == 2 * SEGMENT
    assert (committed(store, "idle", "topic", 0), committed(store, "group", "topic", 0)) == (5, 9)


def until_refused(append: Callable[[], object]) -> int:
    """How often it was taken."""
    for count in range(SEGMENT):
        try:
            append()
        except DiskFullError:
            return count
    raise AssertionError("it is never refused")


def test_messages_do_not_take_the_last_room_of_a_disk_that_gives_no_more() -> None:
    disk = SimDisk()
    store = open_store(disk, segment=4 * SEGMENT)
    commit(store, "idle", "topic", 0, 5)
    fill_segments(store, 8)
    store.checkpoint()
    disk.capacity_bytes = 0
    until_refused(lambda: store.append([make_request([b"x" * 100])]))
    taken = until_refused(lambda: commit(store, "group", "topic", 0, 1))
    assert taken, "commits are taken for longer than messages"
    disk.capacity_bytes = 1 << 12  # a start of a file: nothing for a segment
    store.delete_segments_below(4 * SEGMENT)
    assert store.min_position == 4 * SEGMENT, "and what must be carried forward for longer than commits"
    assert committed(store, "idle", "topic", 0) == 5


def test_half_messages_are_carried_forward_when_commits_have_taken_their_part_of_the_last_room() -> None:
    disk = SimDisk()
    store = open_store(disk, segment=4 * SEGMENT)
    half = make_request([b"half"], producer_id=7, sequence=1)
    set_kind(half.region, FLAG_KIND_HALF)
    store.append([half])
    fill_segments(store, 8)
    store.checkpoint()
    disk.capacity_bytes = 0
    until_refused(lambda: store.append([make_request([b"x" * 100])]))
    until_refused(lambda: commit(store, "group", "topic", 0, 1))
    disk.capacity_bytes = 1 << 12
    store.delete_segments_below(4 * SEGMENT)
    assert store.min_position == 4 * SEGMENT
    (known,) = store.transactions.open_transactions()
    assert known.half.key == (7, 0, 1)
    assert known.half.position > 4 * SEGMENT


def test_a_power_cut_takes_no_more_of_the_offsets_than_of_the_log() -> None:
    for seed in range(20):
        disk = SimDisk()
        store = open_store(disk)
        for offset in range(5):
            commit(store, "group", "topic", 0, offset)
        store.checkpoint()
        commit(store, "group", "topic", 0, 7)
        assert store.offsets.unsaved() is not None
        store = open_store(disk.crash(random.Random(seed)))
        assert committed(store, "group", "topic", 0) in (4, 7)


def test_a_commit_that_the_log_does_not_take_is_not_there() -> None:
    disk = SimDisk()
    store = open_store(disk)
    commit(store, "group", "topic", 0, 3)
    store._log.fail("an fsync failed")
    with pytest.raises(StoreFailedError):
        commit(store, "group", "topic", 0, 5)
    assert committed(store, "group", "topic", 0) == 3


def test_only_the_newest_records_of_offsets_are_carried() -> None:
    offsets = make_offsets()
    offsets.apply(record(("g", "t", 0, 5), ("g", "t", 1, 6), ("h", "t", 0, 7)), 10)
    keys = offsets.keys_below(50)
    offsets.apply(record(("g", "t", 0, 8)), 60)
    carried = OffsetsRecord.FromString(offsets.record_of(keys, 50))
    found = [
        (c.consumer_group, o.queue_id, o.queue_offset, o.topic_incarnation)
        for c in carried.commits
        for o in c.offsets
    ]
    assert found == [("g", 1, 6, 1), ("h", 0, 7, 1)]
    assert offsets.record_of(keys, 5) == b""


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("is_later", [False, True])
def test_offsets_of_a_deleted_topic_do_not_come_back_with_one_of_the_same_incarnation(checkpoints: bool, is_later: bool) -> None:
    """Whoever makes it may choose the incarnation. Else the group would pass over its first messages."""
    disk = SimDisk()
    store = open_store(disk)
    store.topics.put([TopicConfig("topic", incarnation=5)])
    store.append([make_request([b"a", b"b", b"c"])])
    commit(store, "g", "topic", 0, 3)
    commit(store, "g", "topic", 1, 2)
    if checkpoints:
        store.checkpoint()
    later: list[Callable[[], None]] = []
    store.delete_topic("topic", later.append)
    if not is_later:
        later.pop()()
    store.topics.put([TopicConfig("topic", incarnation=5)])
    store.append([make_request([b"d"])])
    commit(store, "g", "topic", 1, 1)
    while later:
        later.pop()()
    assert [committed(store, "g", "topic", queue_id) for queue_id in (0, 1)] == [None, 1]
    store = open_store(disk.killed())
    assert [committed(store, "g", "topic", queue_id) for queue_id in (0, 1)] == [None, 1]


def test_a_topic_made_anew_does_not_come_back_as_the_one_that_was_deleted() -> None:
    disk = SimDisk()
    store = open_store(disk)
    old = store.topics.create(TopicConfig("topic"))
    store.append([make_request([b"a", b"b", b"c"])])
    commit(store, "g", "topic", 0, 3)
    store.delete_topic("topic")
    first = make_request([b"d"])
    store.append([first])
    made = incarnation_of_first(store.id, "topic", first.physical_offset)
    store.topics.add([TopicConfig("topic", incarnation=made)])

    store = open_store(disk.killed())  # before config/topics.json had the new one

    found = store.topics.find("topic")
    assert found is not None
    assert found.incarnation == made != old.incarnation
    assert committed(store, "g", "topic", 0) is None


def test_a_commit_in_a_topic_made_anew_outlives_the_end_of_the_deletion() -> None:
    store = open_store(SimDisk(), sync_flush=True)
    commit(store, "g", "topic", 0, 3)
    later: list[Callable[[], None]] = []
    store.delete_topic("topic", later.append)
    commit(store, "g", "topic", 0, 1)
    (forget,) = later
    forget()
    assert committed(store, "g", "topic", 0) == 1


@pytest.mark.parametrize("how", ["at the start", "by a reader"])
def test_a_damaged_record_makes_the_offset_fall_back_and_that_is_said(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimDisk()
    store = open_store(disk)
    commit(store, "g", "t", 0, 10)
    first = store.appended_position
    commit(store, "g", "t", 0, 40)
    fill_segments(store, 1 if how == "at the start" else 4)
    store.close()
    disk.flip_bit(f"/s/commitlog/{0:020d}", first * 8 + 100)
    disk.remove("/s/config/consumerOffsets.json")
    if how == "at the start":  # the whole log is walked
        disk.remove("/s/checkpoint")
    store = open_store(disk, corruption="quarantine")
    assert committed(store, "g", "t", 0) == 10
    assert "offsets fall back to the newest record that holds" in caplog.text


def resets(*offsets: tuple[int, int, int]) -> bytes:
    """A record of (queue, offset, reset epoch) of one group."""
    commit = CommitOffsetsRequest(consumer_group="g")
    for queue_id, offset, epoch in offsets:
        commit.offsets.add(
            topic="t", queue_id=queue_id, queue_offset=offset, topic_incarnation=1, reset_epoch=epoch
        )
    return OffsetsRecord(commits=[commit]).SerializeToString()


def test_a_reset_has_an_epoch_which_the_cache_and_what_is_carried_forward_keep() -> None:
    disk = SimDisk()
    offsets = make_offsets(disk)
    offsets.apply(record(("g", "t", 0, 5)), 10)
    assert offsets.reset_epoch("g", "t", 1, 0) == 0
    offsets.apply(resets((0, 2, 77), (1, 3, 77)), 20)
    offsets.apply(resets((1, 4, 77)), 30)
    (carrier,) = offsets.carry(25)
    carried = OffsetsRecord.FromString(carrier())
    assert [(one.queue_id, one.queue_offset, one.reset_epoch) for one in carried.commits[0].offsets] == [(0, 2, 77)]
    assert save(offsets, 90)
    from_log = make_offsets()
    from_log.apply(resets((1, 4, 77)), 30)
    from_log.apply(carried.SerializeToString(), 40)
    for again in (make_offsets(disk), from_log):
        assert again.of_topic("g", "t", 1) == {0: 2, 1: 4}
        assert [again.reset_epoch("g", "t", 1, queue_id) for queue_id in (0, 1, 2)] == [77, 77, 0]
        assert again.reset_epoch("g", "t", 2, 0) == 0, "of another incarnation"
    offsets.apply(deletion("g"), 50)
    assert offsets.reset_epoch("g", "t", 1, 0) == 0


def test_a_deletion_looks_at_the_queues_of_the_topics_that_were_deleted_alone() -> None:
    """There may be a million offsets, and commits wait meanwhile."""

    class Untouched(dict[int, int]):
        def items(self) -> NoReturn:
            raise AssertionError("looked at")

    offsets = make_offsets()
    offsets.apply(record(("g", "t", 0, 5), ("g", "other", 0, 5)), 10)
    offsets._groups["g"]["other"].positions = Untouched({0: 10})
    offsets.keep({"t": 1, "other": 1}.get, {"t": 20})
    assert offsets.groups() == {"g": ["other"]}
