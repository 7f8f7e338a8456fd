"""A power cut, or a truncation, takes the deletion of a topic back: its messages are in their queues, whatever the files had lost."""

from __future__ import annotations

import random

import pytest

from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import SimDisk

from .log_helpers import make_request
from .store_helpers import open_store, read_all
from .test_following import disk_of, fill, follow, pair


def make_store(disk: SimDisk) -> Store:
    store = open_store(disk)
    store.topics.create(TopicConfig("topic"))
    fill(store)
    store.append([make_request([b"another's"], topic="another")])
    store.checkpoint()
    return store


def delete(store: Store, *, again: bool) -> None:
    store.delete_topic("topic")
    if again:
        store.topics.create(TopicConfig("topic"))
        fill(store, 1, 100)


def write_derived(store: Store) -> None:
    """What housekeeping does several times a second."""
    for structure in store._files.derived:
        structure.flush()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_power_cut_takes_the_deletion_of_a_topic_back(again: bool, turns: int) -> None:
    store = make_store(SimDisk())
    expected = [read_all(store, queue_id=queue_id) for queue_id in (0, 1)]
    delete(store, again=again)
    for _ in range(turns):
        write_derived(store)
    back = open_store(disk_of(store).crash(random.Random(1), keep=0.0))
    assert back.topics.find("topic") is not None
    assert [read_all(back, queue_id=queue_id) for queue_id in (0, 1)] == expected
    fill(back, 1, 50)
    assert read_all(back)[-1][0] == expected[0][-1][0] + 1
    assert len(read_all(back, "another")) == 1


@pytest.mark.parametrize("again", [False, True])
def test_a_deletion_that_is_in_the_log_costs_no_rebuild(again: bool, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(SimDisk())
    delete(store, again=again)
    write_derived(store)
    later = open_store(disk_of(store).killed())
    assert len(read_all(later)) == again
    assert not read_all(later, queue_id=1)
    later.checkpoint()
    once_more = open_store(disk_of(later).crash(random.Random(1), keep=0.0))
    assert len(read_all(once_more)) == again
    assert "ConsumeQueueTable is rebuilt" not in caplog.text


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("is_written", [False, True])
def test_a_follower_is_truncated_to_before_the_deletion_of_a_topic(restarts: bool, is_written: bool) -> None:
    leader, follower = pair()
    fill(leader)
    follow(leader, follower)
    follower.checkpoint()
    follower.flush()
    point = follower.log_point(follower.appended_position)
    assert point is not None
    expected = [read_all(follower, queue_id=queue_id) for queue_id in (0, 1)]
    delete(leader, again=True)
    leader.delete_topic("topic")
    follow(leader, follower, confirmed=False)
    if is_written:
        write_derived(follower)
    disk = disk_of(follower)
    if restarts:
        follower = open_store(disk.killed(), follows=True)
        disk = disk_of(follower)
        write_derived(follower)
    follower.truncate_to(point)
    back = open_store(disk.killed(), follows=True)
    back.positions.note_replicated(back.appended_position)
    assert [read_all(back, queue_id=queue_id) for queue_id in (0, 1)] == expected


def test_a_checkpoint_that_was_begun_before_the_deletion_of_a_young_topic_keeps_its_messages() -> None:
    """It waits for replicas. The table before it knows nothing of the topic, and the deletion is taken back."""
    leader, other = open_store(SimDisk(), follows=True), open_store(SimDisk(), follows=True)
    leader.lead(waits_for_replicas=True)
    leader.topics.create(TopicConfig("topic"))
    fill(leader)
    follow(leader, other)
    point = leader.log_point(leader.appended_position)
    assert point is not None
    assert not leader.checkpoint()
    delete(leader, again=True)
    write_derived(leader)
    leader.positions.note_replicated(point.position)
    assert leader.checkpoint()
    former = open_store(disk_of(leader).killed(), follows=True)
    former.truncate_to(point)
    back = open_store(disk_of(former).killed(), follows=True)
    for store in (back, other):
        store.positions.note_replicated(point.position)
    expected = [read_all(other, queue_id=queue_id) for queue_id in (0, 1)]
    assert len(expected[0]) == 6
    assert [read_all(back, queue_id=queue_id) for queue_id in (0, 1)] == expected
