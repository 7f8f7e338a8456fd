"""A log that is truncated to where it agrees with its leader's, whatever interrupts that."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.v1.state_pb2 import HandOut, PopRecord
from protomq.wire.topics import POP_TOPIC
from protomq_broker.confirmed_file import ConfirmedFile
from protomq_broker.store.errors import (
    CorruptLogError,
    LogForkError,
    NotFollowingError,
    StoreFailedError,
)
from protomq_broker.store.log.agreement import START, LogPoint, last_agreed
from protomq_broker.store.log.boundaries import BoundaryFiles
from protomq_broker.store.log.checkpoint import read_checkpoint
from protomq_broker.store.start.truncation import TRUNCATION_NAME
from protomq_broker.store.state.popped_queue import QueueOfGroup
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

from .log_helpers import make_request
from .store_helpers import SEGMENT, commit, committed, open_store, read_all
from .test_following import disk_of, fill, follow, incarnation_of, log_of, pair

# Agreement.


@dataclass(frozen=True)
class FakeLog:
    """A log of appends: (epoch, who wrote it), each of size 1."""

    appends: tuple[tuple[int, int], ...]

    def epoch_end(self, epoch: int) -> tuple[int, int] | None:
        ends = [(e, at + 1) for at, (e, _) in enumerate(self.appends) if e <= epoch]
        return ends[-1] if ends else None

    def log_point(self, position: int) -> LogPoint | None:
        if not position:
            return START
        if position > len(self.appends):
            return None
        return LogPoint(position, self.appends[position - 1][0], hash(self.appends[:position]))


APPENDS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=8)


def log_from(steps: list[tuple[int, int]], first: tuple[tuple[int, int], ...] = ()) -> FakeLog:
    """A log whose epochs never fall; (how much higher than the one before, what is written)."""
    appends = list(first)
    for up, content in steps:
        appends.append(((appends[-1][0] if appends else 0) + up, content))
    return FakeLog(tuple(appends))


@given(APPENDS, APPENDS, APPENDS)
def test_logs_that_fork_agree_no_further_than_they_are_the_same(
    common: list[tuple[int, int]], ours: list[tuple[int, int]], theirs: list[tuple[int, int]]
) -> None:
    shared = log_from(common)
    mine, other = log_from(ours, shared.appends), log_from(theirs, shared.appends)
    last = mine.appends[-1][0] if mine.appends else 0
    point = last_agreed(mine, other, last)
    assert point is not None
    assert mine.appends[: point.position] == other.appends[: point.position]
    same = sum(
        mine.appends[: n + 1] == other.appends[: n + 1]
        for n in range(min(len(mine.appends), len(other.appends)))
    )
    forked = {log.appends[same][0] for log in (mine, other) if same < len(log.appends)}
    if len(forked) == 2 or same in (len(mine.appends), len(other.appends)):
        # Each epoch has one writer: then it is the very place.
        is_begun_twice = same < min(len(mine.appends), len(other.appends)) and len(forked) == 1
        assert is_begun_twice or point.position == same


# Stores.


def diverged() -> tuple[Store, Store, LogPoint]:
    """(a leader, a follower that was its leader and has gone on alone, where they agree)."""
    old, new = pair()
    fill(old, 10)
    commit(old, "group", "topic", 0, 3)
    follow(old, new)
    new.flush()
    point = old.log_point(old.appended_position)
    assert point is not None
    fill(old, 30, 10)  # nobody else has these
    commit(old, "group", "topic", 0, 9)
    old.checkpoint()
    old.close()
    new.lead()
    fill(new, 5, 60)
    return new, open_store(disk_of(old), follows=True), point


def agreed(follower: Store, leader: Store) -> LogPoint | None:
    return last_agreed(follower, leader, follower.epochs.rows[-1].epoch)


def test_a_leader_that_comes_back_truncates_to_where_the_logs_agree_and_follows() -> None:
    leader, follower, point = diverged()
    with pytest.raises(LogForkError):
        follower.append_verbatim(follower.appended_position, b"\x12\x33")
    assert agreed(follower, leader) == point
    assert follower.truncate_to(point) == point
    with pytest.raises(StoreFailedError):
        follow(leader, follower)
    follower.close()
    follower = open_store(disk_of(follower), follows=True)
    assert follower.appended_position == point.position
    assert committed(follower, "group", "topic", 0) == 3
    follow(leader, follower)
    for queue in (0, 1):
        assert read_all(follower, queue_id=queue) == read_all(leader, queue_id=queue)
    follower.close()
    assert verify("/s", disk=disk_of(follower)) == []


def test_a_truncation_that_is_interrupted_at_any_io_is_completed_by_the_next_start() -> None:
    leader, follower, point = diverged()
    follower.truncate_to(point)
    image = disk_of(follower).killed()
    whole = image.killed()
    operations = whole.operations
    open_store(whole, follows=True)
    count = whole.operations - operations
    assert count > 20
    rng = random.Random(1)
    for number in range(1, count + 1, 2):
        disk = image.killed()
        disk.fail_at(number, Fault.CRASH)
        with pytest.raises(SimulatedCrash):
            open_store(disk, follows=True)
        disk = disk.crash(rng) if number % 4 == 1 else disk.killed()
        after = open_store(disk, follows=True)
        assert after.appended_position == point.position, number
        assert committed(after, "group", "topic", 0) == 3
        follow(leader, after)
        after = open_store(disk.crash(rng) if number % 4 == 1 else disk.killed(), follows=True)
        assert after.appended_position >= point.position
        assert log_of(disk_of(after), 0, after.appended_position) == log_of(
            disk_of(leader), 0, after.appended_position
        )
        follow(leader, after)
        assert read_all(after) == read_all(leader)
        assert committed(after, "group", "topic", 0) == 3
        assert not disk_of(after).exists(f"/s/{TRUNCATION_NAME}")


def test_an_intent_that_is_there_takes_effect_before_anything_else_is_stored() -> None:
    _, follower, point = diverged()
    probe = disk_of(follower).killed()
    twin = open_store(probe, follows=True)
    before = probe.operations
    twin.truncate_to(point)
    steps = probe.operations - before
    found = set()
    for number in range(1, steps + 1):
        disk = disk_of(follower).killed()
        store = open_store(disk, follows=True)
        disk.fail_at(number, Fault.EIO)
        with suppress(OSError, StoreFailedError):
            store.truncate_to(point)
        is_there = disk.exists(f"/s/{TRUNCATION_NAME}")
        assert bool(store.log_failure) or not is_there, number
        found.add(is_there)
        if is_there:
            assert open_store(disk.killed(), follows=True).appended_position == point.position
    assert found == {True, False}


@pytest.mark.parametrize("behind", [-1, 0, 1])
def test_a_truncation_keeps_what_is_confirmed_at_or_before_the_cut(behind: int) -> None:
    """It stays confirmed. Without it a slave of a master with a fixed role would follow one that has lost all of that."""
    leader, follower, point = diverged()
    confirmed = point.position + behind
    ConfirmedFile(disk_of(follower), "/s").write(confirmed)
    follower.truncate_to(point)
    follower.close()
    follower = open_store(disk_of(follower), follows=True)
    assert follower.appended_position == point.position
    assert ConfirmedFile(disk_of(follower), "/s").read() == (confirmed if behind <= 0 else 0)
    follow(leader, follower)


def test_a_truncation_keeps_where_a_walk_of_what_stays_can_begin() -> None:
    """A start walks some of what stands before the checkpoint. Without boundaries it begins at the head of a segment of a gigabyte."""
    _, follower, point = diverged()
    assert point.position < SEGMENT < follower.appended_position
    follower.truncate_to(point)
    disk = disk_of(follower).killed()
    boundaries = BoundaryFiles(disk, "/s/boundaries")
    boundaries.write(0, [(53, 1), (point.position, 2), (point.position + 53, 3)])
    boundaries.write(SEGMENT, [(SEGMENT + 53, 4)])
    open_store(disk, follows=True)
    assert boundaries.read(0) == [(53, 1), (point.position, 2)]
    assert not boundaries.read(SEGMENT)


def send_more(store: Store) -> None:
    fill(store, 30, 20)
    commit(store, "group", "topic", 0, 9)


def delete_topic(store: Store) -> None:
    store.delete_topic("topic")


def begin_topic_again(store: Store) -> None:
    delete_topic(store)
    store.topics.create(TopicConfig("topic"))
    fill(store, 6, 70)


@pytest.mark.parametrize("do_alone", [send_more, delete_topic, begin_topic_again])
@pytest.mark.parametrize("is_killed", [False, True])
def test_what_replicas_lack_is_in_no_checkpoint_so_that_a_truncation_has_nothing_to_rebuild(
    do_alone: Callable[[Store], object], is_killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A master that was elected has an end that nobody else has. All that is derived was made again, from the whole log."""
    leader, other = pair()
    fill(leader, 20)
    commit(leader, "group", "topic", 0, 3)
    follow(leader, other)
    other.flush()
    leader.close()
    old = open_store(disk_of(leader), follows=True)
    old.lead(waits_for_replicas=True)
    follow(old, other)
    old.positions.note_replicated(old.appended_position)
    assert old.checkpoint()
    point = old.log_point(old.appended_position)
    assert point is not None
    do_alone(old)
    for derived in old._files.derived:
        derived.flush()
    assert not old.checkpoint(), "it waits for the replicas"
    assert not old.checkpoint()
    if is_killed:
        disk = disk_of(old).killed()
    else:
        old.close()
        assert old.is_closed_clean
        disk = disk_of(old)
    caplog.clear()
    follower = open_store(disk, follows=True)
    assert follower.appended_position > point.position
    assert not follower.checkpoint()
    other.lead()
    fill(other, 5, 90)
    assert agreed(follower, other) == point
    follower.truncate_to(point)
    follower.close()
    follower = open_store(disk, follows=True)
    assert follower.appended_position == point.position
    rebuilt = ["ConsumeQueueTable is rebuilt from the log"] if do_alone is not send_more else []
    assert [r.message for r in caplog.records if "rebuilt" in r.message] == rebuilt, "a deleted topic's queues are gone"
    assert committed(follower, "group", "topic", 0) == 3
    follow(other, follower)
    for _ in range(4):
        follower._upkeep.queue_healer.step(follower._clock.monotonic_ms())
    for queue in (0, 1):
        assert read_all(follower, queue_id=queue) == read_all(other, queue_id=queue)
    assert follower.topics.find("topic") == other.topics.find("topic")
    follower.close()
    assert verify("/s", disk=disk) == []


def test_a_checkpoint_that_waits_for_replicas_is_made_as_soon_as_they_have_what_it_covers() -> None:
    store = open_store(SimDisk(), follows=True)
    store.lead(waits_for_replicas=True)
    fill(store, 10)
    covered = store.appended_position
    assert not store.checkpoint()
    fill(store, 10, 10)  # a master under load: replicas never have all of it
    store.positions.note_replicated(covered)
    assert store.checkpoint()
    saved = read_checkpoint(disk_of(store), "/s/checkpoint")
    assert saved is not None
    assert saved.replay_position == saved.flushed_position == covered
    assert not store.checkpoint()
    again = open_store(disk_of(store).killed(), follows=True)
    again.positions.note_replicated(again.appended_position)
    assert again.appended_position == store.appended_position
    assert len(read_all(again)) == 10


def test_logs_that_agree_nowhere_make_the_follower_begin_anew() -> None:
    leader = open_store(SimDisk())
    fill(leader, 60)
    leader.checkpoint()
    leader.delete_segments_below(leader.appended_position)
    other = open_store(SimDisk())
    fill(other, 20, 100)
    other.close()
    follower = open_store(disk_of(other), follows=True)
    assert agreed(follower, leader) is None
    follower.truncate_to(START)
    follower.close()
    follower = open_store(disk_of(follower), follows=True)
    assert follower.appended_position == 0
    follow(leader, follower)
    assert read_all(follower) == read_all(leader)
    assert follower.epochs.highest_epoch == 1


def test_a_log_whose_front_went_with_what_is_truncated_begins_anew() -> None:
    old, new = pair()
    fill(old, 40)
    follow(old, new)
    new.flush()
    point = old.log_point(old.appended_position)
    assert point is not None
    old.checkpoint()
    old.delete_segments_below(
        old.appended_position
    )  # what was alive there is carried behind the point
    assert 0 < old.min_position < point.position
    old.close()
    follower = open_store(disk_of(old), follows=True)
    assert follower.truncate_to(point) == START


def test_only_a_point_that_the_log_has_is_taken_and_only_by_a_follower() -> None:
    leader, follower, point = diverged()
    with pytest.raises(NotFollowingError):
        leader.truncate_to(point)
    for wrong in (
        point._replace(position=point.position - 1),
        point._replace(crc32c=point.crc32c ^ 1),
        point._replace(epoch=7),
    ):
        with pytest.raises(LogForkError):
            follower.truncate_to(wrong)
    assert not disk_of(follower).exists(f"/s/{TRUNCATION_NAME}")


def test_nothing_is_deleted_before_the_replicas_have_what_was_carried_forward() -> None:
    leader, follower = pair()
    fill(leader, 60)
    follow(leader, follower)
    follower.lead(waits_for_replicas=True)
    follower.checkpoint()
    assert follower.delete_segments_below(follower.appended_position) == 0
    follower.positions.note_replicated(follower.appended_position)
    assert follower.delete_segments_below(follower.appended_position) > 0


# Logs that are damaged.


def test_what_is_popped_while_replicas_get_what_was_carried_forward_is_carried_too(caplog: pytest.LogCaptureFixture) -> None:
    """Retention looks every ten seconds. A message that was popped in between was lost with its segment, and said to be damaged."""
    store = open_store(SimDisk(), follows=True)
    store.lead(waits_for_replicas=True)
    store.topics.create(TopicConfig("topic"))
    while store.appended_position < 3 * SEGMENT:
        store.append([make_request([bytes(300)])])
    store.positions.note_replicated(store.appended_position)
    assert store.checkpoint()
    assert store.delete_segments_below(SEGMENT) == 0
    incarnation = incarnation_of(store)
    record = PopRecord(time_ms=5)
    told = record.queues.add(consumer_group="g", topic="topic", topic_incarnation=incarnation, queue_id=0, next_offset=3)
    told.hand_outs.append(HandOut(number=1, time_ms=5, deadline_ms=500, attempt=1, runs=[0, 3]))
    store.append_state(POP_TOPIC, [record.SerializeToString()])
    store.positions.note_replicated(store.appended_position)
    assert store.delete_segments_below(SEGMENT) == SEGMENT
    known = store.popped.find(QueueOfGroup("g", "topic", 0), incarnation)
    assert known is not None
    assert sorted(known.moved) == [0, 1, 2]
    store.positions.note_replicated(store.appended_position)
    bodies = [body for _, body in read_all(store, topic="%RETRY%g")]
    assert bodies == [bytes(300)] * 3
    assert "damaged" not in caplog.text


def rot(store: Store, position: int) -> None:
    """A bit of the log changes on the disk of a store."""
    base = position - position % SEGMENT
    disk_of(store).flip_bit(f"/s/commitlog/{base:020d}", 8 * (position - base))


def killed(store: Store) -> SimDisk:
    """The disk of a store that was killed after its housekeeping has written entries of queues for all of the log."""
    for derived in store._files.derived:
        derived.flush()
    return disk_of(store).killed()


def with_last() -> tuple[Store, Store, int]:
    """(a leader, a follower that has everything, where the last append begins)."""
    leader, follower = pair()
    fill(leader, 40)
    last = leader.appended_position
    assert last > SEGMENT
    fill(leader, 1, 40)
    follow(leader, follower)
    return leader, follower, last


def test_damage_below_a_position_hides_no_append_that_ends_there() -> None:
    leader, follower = pair()
    fill(leader, 12)
    follow(leader, follower)
    end = follower.appended_position
    point = follower.log_point(end)
    assert point is not None
    assert agreed(follower, leader) == point
    rot(leader, end // 2)
    assert agreed(follower, leader) == point
    [damage] = leader.damaged_ranges
    assert damage.start_position <= end // 2 < damage.end_position < end
    # The follower, which stays as it is, has what the leader lacks.
    leader.heal_log(damage, log_of(disk_of(follower), damage.start_position, damage.end_position))
    assert not leader.damaged_ranges
    assert read_all(leader) == read_all(follower)


def test_a_position_in_damage_is_not_taken_for_one_at_which_no_append_ends() -> None:
    leader, _, last = with_last()
    assert leader.log_point(last + 1) is None
    rot(leader, last + 10)
    with pytest.raises(CorruptLogError, match="is not known"):
        leader.log_point(last + 1)
    assert [d.start_position for d in leader.damaged_ranges] == [last]


def test_where_a_damaged_range_ends_logs_agree_by_the_crc_behind_it() -> None:
    leader, follower, last = with_last()
    point = follower.log_point(follower.appended_position)
    assert point is not None
    rot(leader, last + 10)
    assert agreed(follower, leader) == point
    assert [d.end_position for d in leader.damaged_ranges] == [point.position]


def test_a_leader_that_has_set_its_end_aside_takes_no_end_from_others() -> None:
    leader, follower, last = with_last()
    rot(leader, last + 10)
    leader = open_store(killed(leader), corruption="quarantine")
    assert [d.start_position for d in leader.damaged_ranges] == [last]
    assert leader.damaged_ranges[0].end_position > follower.appended_position
    fill(leader, 1, 41)
    with pytest.raises(CorruptLogError, match="is not known"):
        agreed(follower, leader)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_follower_with_damage_at_its_end_is_truncated_to_before_it(is_gone: bool) -> None:
    leader, follower, last = with_last()
    end = follower.appended_position
    if is_gone:
        last = last - last % SEGMENT
        follower.close()
        disk_of(follower).unlink(f"/s/commitlog/{last:020d}")
    else:
        rot(follower, last + 10)
    disk = killed(follower)
    follower = open_store(disk, follows=True, corruption="quarantine")
    assert follower.has_lost_its_end
    assert not follower.skipped_ranges, "it follows, and begins again before its lost end"
    assert follower.epochs.rows[-1].epoch == leader.epoch
    assert [d.start_position for d in follower.damaged_ranges] == [last]
    point = agreed(follower, leader)
    assert point is not None
    assert point.position == last
    assert follower.truncate_to(point) == point
    follower.close()
    follower = open_store(disk, follows=True, corruption="quarantine")
    assert not follower.damaged_ranges
    assert not follower.has_lost_its_end
    follow(leader, follower)
    assert log_of(disk, 0, end) == log_of(disk_of(leader), 0, end)


def test_a_follower_that_is_killed_before_it_is_cut_knows_where_the_epochs_begin() -> None:
    leader, follower = pair()
    fill(leader, 6)
    leader.close()
    leader = open_store(disk_of(leader))  # in the next epoch
    fill(leader, 6, 6)
    follow(leader, follower)
    point = leader.log_point(leader.appended_position)
    assert point is not None
    fill(leader, 6, 12)
    follow(leader, follower, confirmed=False)
    follower.truncate_to(point)
    cut = open_store(disk_of(follower).killed(), follows=True)
    assert [row[:2] for row in cut.epochs.rows] == [row[:2] for row in leader.epochs.rows]
    assert cut.epoch_end(1) == leader.epoch_end(1)
