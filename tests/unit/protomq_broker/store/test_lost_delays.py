"""Delayed messages that were lost with a part of the log: what the log says of their ends takes nothing from the number of the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protomq.v1.state_pb2 import TimerEnd
from protomq.wire.topics import TIMER_TOPIC
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.timer.timer import timer_record
from protomq_broker.store.tools.repair import repair
from protomq_broker.testing.simdisk import SimDisk

from .log_helpers import ManualClock, make_request
from .store_helpers import SEGMENT, open_store
from .test_following import disk_of, log_of


def deliver(store: Store, count: int) -> None:
    rows = store.pending.due(1 << 60, count)
    assert len(rows) == count
    store.append_state(TIMER_TOPIC, [timer_record(rows, TimerEnd.TIMER_END_DELIVERED, 1)])


def store_that_loses(*, is_delivered: bool) -> tuple[SimDisk, int]:
    """A store whose first of three delayed messages was delivered, or not, and is damaged now: its disk, and where that message stands."""
    store = open_store(SimDisk(), clock=ManualClock())
    store.topics.create(TopicConfig("topic"))
    position = store.appended_position
    for number in range(3):
        store.append([make_request([b"%d" % number], due_time_ms=1_000 + number)])
    if is_delivered:
        deliver(store, 1)
    store.append([make_request([b"behind"])])
    store.flush()
    disk = disk_of(store).killed()
    disk.flip_bit(f"/s/commitlog/{0:020d}", 8 * (position + 20))
    return disk, position


def expect(store: Store, count: int) -> None:
    assert store.pending.count == count == sum(map(len, store.pending.below(1 << 62)))
    assert (store.pending.size_bytes > 0) is (count > 0)
    store.positions.note_replicated(store.appended_position)
    assert store.checkpoint()
    assert store.checkpoint_failure == ""


def deliver_rest(store: Store) -> None:
    expect(store, 2)
    deliver(store, 2)
    expect(store, 0)


@pytest.mark.parametrize("is_repaired", [False, True])
def test_a_start_counts_no_end_of_a_delayed_message_that_it_has_skipped(*, is_repaired: bool) -> None:
    disk, position = store_that_loses(is_delivered=True)
    if is_repaired:
        assert len(repair("/s", "/keep", disk=disk)) == 1
    store = open_store(disk, clock=ManualClock(), corruption="quarantine")
    assert [damage.start_position for damage in store.damaged_ranges] == [position]
    deliver_rest(store)
    store.close()
    expect(open_store(disk, clock=ManualClock(), corruption="quarantine"), 0)


@pytest.mark.parametrize("is_at_once", [False, True])
def test_an_empty_follower_counts_no_end_of_what_its_leader_has_lost(*, is_at_once: bool) -> None:
    disk, position = store_that_loses(is_delivered=True)
    assert len(repair("/s", "/keep", disk=disk)) == 1
    leader = open_store(disk, clock=ManualClock())
    end = leader.appended_position
    follower = open_store(SimDisk(), clock=ManualClock(), follows=True)
    log = log_of(disk, 0, end)
    start = 0
    while start < end:
        start = follower.append_verbatim(start, log[start : end if is_at_once else start + 700], may_end_within=True)
    follower.flush()
    assert [damage.start_position for damage in follower.damaged_ranges] == [position]
    expect(follower, 2)
    deliver(leader, 2)
    follower.append_verbatim(end, log_of(disk, end, leader.appended_position))
    follower.flush()
    expect(follower, 0)


def test_a_follower_that_has_started_since_does_not_count_below_zero() -> None:
    """Its leader knew the message, and drops it when it is due. All housekeeping ended with the negative number."""
    disk, _ = store_that_loses(is_delivered=False)
    follower = open_store(follower_disk := disk.killed(), clock=ManualClock(), follows=True, corruption="quarantine")
    end = follower.appended_position
    expect(follower, 2)
    follower.close()
    disk.flip_bit(f"/s/commitlog/{0:020d}", 8 * (follower.damaged_ranges[0].start_position + 20))
    leader = open_store(disk, clock=ManualClock())
    deliver(leader, 3)
    follower = open_store(follower_disk, clock=ManualClock(), follows=True, corruption="quarantine")
    follower.append_verbatim(end, log_of(disk, end, leader.appended_position))
    follower.flush()
    expect(follower, 0)


def test_no_segment_of_a_follower_goes_while_its_timer_is_rebuilt() -> None:
    """What the log says of the ends of messages that were read already would be gone: they would be pending for ever."""
    leader = open_store(SimDisk(), clock=ManualClock())
    leader.topics.create(TopicConfig("topic"))
    for number in range(3):
        leader.append([make_request([b"%d" % number], due_time_ms=1_000 + number)])
    deliver(leader, 3)
    while leader.appended_position < 2 * SEGMENT:
        leader.append([make_request([bytes(500)])])
    follower = open_store(SimDisk(), clock=ManualClock(), follows=True)
    follower.append_verbatim(0, log_of(disk_of(leader), 0, leader.appended_position))
    follower.positions.note_replicated(leader.appended_position)
    assert follower.checkpoint()
    leader.checkpoint()
    leader.delete_segments_below(2 * SEGMENT)
    follower.append_verbatim(
        follower.appended_position, log_of(disk_of(leader), follower.appended_position, leader.appended_position)
    )
    follower.positions.note_replicated(leader.appended_position)
    rebuild = follower._upkeep.timer_rebuild
    walk = rebuild._take_entries

    def walk_and_pause(end: int) -> Iterator[None]:
        yield from walk(end)
        yield

    rebuild._take_entries = walk_and_pause  # type: ignore[method-assign]
    follower.pending.met_damage = "a file does not hold"
    rebuild.step(0)
    assert follower.pending.is_rebuilding
    assert follower.checkpoint()
    assert follower.min_position == 0
    rebuild.step(1)
    assert not follower.pending.is_rebuilding
    leader.append([make_request([b"behind"])])
    follower.append_verbatim(
        follower.appended_position, log_of(disk_of(leader), follower.appended_position, leader.appended_position)
    )
    follower.positions.note_replicated(leader.appended_position)
    assert follower.checkpoint()
    assert follower.min_position == leader.min_position > 0
    expect(follower, 0)
