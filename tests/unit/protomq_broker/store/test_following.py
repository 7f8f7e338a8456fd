"""A store that follows another one: the same bytes, and all that follows from them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from unittest import mock

import pytest

from protomq.v1.state_pb2 import PopRecord
from protomq.wire.hashing import key_hash_of
from protomq.wire.record import SEAL_SIZE_BYTES
from protomq.wire.topics import POP_TOPIC
from protomq_broker.store.errors import (
    DiskFullError,
    ForeignBytesError,
    LogForkError,
    LogGapError,
    NotFollowingError,
    NotLeadingError,
    NoWriterError,
    StaleEpochError,
    StoreFailedError,
)
from protomq_broker.store.files.disk import write_fully
from protomq_broker.store.log import commit_log
from protomq_broker.store.log.positions import LogTail
from protomq_broker.store.log.recovery import StartPoint
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.log.verbatim import LogEnd, prove
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, SimDisk

from .log_helpers import ManualClock, make_request
from .store_helpers import SEGMENT, commit, committed, open_store, read_all


def log_of(disk: SimDisk, start: int, end: int, segment: int = SEGMENT) -> bytes:
    """The bytes [start, end) of the log on a disk."""
    folder = SegmentFolder(disk, "/s/commitlog", segment)
    folder.open(read_only=True)
    parts = []
    for file in folder.overlapping(start, end):
        at = max(start - file.base_position, 0)
        parts.append(file.read(at, min(end - file.base_position, file.size_bytes) - at))
    return b"".join(parts)


def disk_of(store: Store) -> SimDisk:
    """The disk of a store, which is a simulated one."""
    assert isinstance(store._disk, SimDisk)
    return store._disk


def incarnation_of(store: Store) -> int:
    """Of the topic."""
    topic = store.topics.find("topic")
    assert topic is not None
    return topic.incarnation


def follow(leader: Store, follower: Store, *, confirmed: bool = True) -> None:
    """The follower gets all that the leader has and it has not."""
    start = follower.appended_position
    if not start:
        start = leader.min_position
    data = log_of(disk_of(leader), start, leader.appended_position)
    follower.append_verbatim(start, data)
    if confirmed:
        follower.positions.note_replicated(leader.readable_position)


def test_a_large_part_of_another_log_is_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "FOREIGN_WRITE_SIZE_MAX_BYTES", 500)
    leader, follower = open_store(SimDisk()), open_store(SimDisk(), follows=True)
    for number in range(20):
        leader.append([make_request([b"%03d" % number * 30])])
    end = leader.appended_position
    with mock.patch("protomq_broker.store.log.commit_log.write_fully", wraps=write_fully) as written:
        assert follower.append_verbatim(0, log_of(disk_of(leader), 0, end)) == end
    assert [len(call.args[2]) for call in written.call_args_list] == [500] * (end // 500) + [end % 500]
    assert log_of(disk_of(follower), 0, end) == log_of(disk_of(leader), 0, end)


def fill(store: Store, count: int = 12, first: int = 0) -> None:
    """Messages in two queues, with keys and a producer."""
    for number in range(first, first + count):
        store.append(
            [
                make_request(
                    [b"%d" % number * 40], queue_id=number % 2, producer_id=5, sequence=number, key=f"k{number}"
                )
            ]
        )  # fmt: skip


def pair() -> tuple[Store, Store]:
    """A leader, and an empty store that follows."""
    leader = open_store(SimDisk())
    leader.topics.create(TopicConfig("topic"))
    return leader, open_store(SimDisk(), follows=True)


def test_a_follower_has_the_same_bytes_and_gives_the_same_answers() -> None:
    leader, follower = pair()
    for round_ in range(5):
        fill(leader, 12, round_ * 12)
        commit(leader, "group", "topic", 0, round_)
        follow(leader, follower)
        assert follower.appended_position == leader.appended_position
        for queue in (0, 1):
            assert read_all(follower, queue_id=queue) == read_all(leader, queue_id=queue)
        assert committed(follower, "group", "topic", 0) == round_
    assert follower.topics.find("topic") == leader.topics.find("topic")
    assert incarnation_of(follower) == incarnation_of(leader)
    (found,) = follower.find_by_key_hash("topic", key_hash_of("k17"))
    assert found == next(leader.find_by_key_hash("topic", key_hash_of("k17")))
    repeat = make_request([b"3" * 40], queue_id=1, producer_id=5, sequence=3, key="k3")
    assert follower.find_repeated(repeat) == leader.find_repeated(repeat)
    end = leader.appended_position
    leader.close()
    follower.close()
    assert log_of(disk_of(leader), 0, end) == log_of(disk_of(follower), 0, end)
    assert verify("/s", disk=disk_of(follower)) == []


@pytest.mark.parametrize("part_size", [7, 500, SEGMENT + 100])
def test_parts_that_end_within_an_append_make_the_same_log(part_size: int) -> None:
    leader, follower = pair()
    fill(leader, 80)
    end = leader.appended_position
    assert end > 2 * SEGMENT
    log = b"".join(
        region.file.read(region.offset, region.size_bytes) for region in leader.log_regions(0, end)
    )
    assert log == log_of(disk_of(leader), 0, end)
    for part_end in range(part_size, end + part_size, part_size):
        start = follower.appended_position
        assert follower.append_verbatim(start, log[start:part_end], may_end_within=True) <= part_end
    assert follower.appended_position == end
    assert log_of(disk_of(follower), 0, end) == log
    with pytest.raises(LogForkError, match="within an append"):
        pair()[1].append_verbatim(0, log[: end - 1])


def test_a_part_that_does_not_hold_is_no_beginning_of_an_append() -> None:
    leader, follower = pair()
    fill(leader, 4)
    log = bytearray(log_of(disk_of(leader), 0, leader.appended_position))
    log[-SEAL_SIZE_BYTES] ^= 1
    with pytest.raises(LogForkError):
        follower.append_verbatim(0, bytes(log), may_end_within=True)
    assert follower.appended_position == 0


def test_regions_end_where_segments_are_gone() -> None:
    leader, _ = pair()
    fill(leader, 40)
    leader.flush()
    leader.checkpoint()
    first = leader.delete_segments_below(2 * SEGMENT)
    assert first
    assert leader.log_regions(0, first + 10) == []
    (region,) = leader.log_regions(first, first + 10)
    assert (region.offset, region.size_bytes) == (0, 10)


def test_whoever_sends_the_log_on_is_told_where_it_ends() -> None:
    leader, _ = pair()
    told: list[int] = []
    leader.positions.on_appended.append(told.append)
    fill(leader, 2)
    leader.positions.wait_for_replicas(True)
    fill(leader, 1, 2)
    assert len(told) >= 3
    assert told[-1] == leader.appended_position > leader.readable_position


def test_what_the_leader_deletes_goes_on_the_follower_too() -> None:
    leader, follower = pair()
    fill(leader)
    commit(leader, "group", "topic", 0, 3)
    popped = PopRecord(time_ms=1)
    popped.queues.add(consumer_group="pops", topic="topic", topic_incarnation=incarnation_of(leader), next_offset=1)
    leader.append_state(POP_TOPIC, [popped.SerializeToString()])
    follow(leader, follower)
    assert follower.popped.groups() == {"pops": ["topic"]}
    told: list[str] = []
    follower.on_topic_deleted = told.append
    leader.delete_topic("topic")
    fill(leader, 3, 100)  # its messages begin again
    follow(leader, follower)
    assert told == ["topic"]
    assert committed(follower, "group", "topic", 0) is None
    assert leader.popped.groups() == follower.popped.groups() == {}
    assert read_all(follower) == read_all(leader) != []


def test_only_what_is_confirmed_is_readable_and_readers_are_told_then() -> None:
    leader, follower = pair()
    fill(leader, 3)
    end_of_three = leader.appended_position
    fill(leader, 1, 3)
    told: list[object] = []
    follower.positions.on_arrival.append(told.extend)
    follow(leader, follower, confirmed=False)
    assert read_all(follower) == []
    assert told == []
    follower.positions.note_replicated(end_of_three)
    assert len(read_all(follower)) + len(read_all(follower, queue_id=1)) == 3
    assert told == [], "what came together is told of together"
    follower.positions.note_replicated(leader.appended_position)
    assert len(read_all(follower, queue_id=1)) == 2
    assert {("topic", 0), ("topic", 1)} <= set(told)


def test_a_follower_takes_no_sends_and_a_leader_no_bytes() -> None:
    leader, follower = pair()
    fill(leader, 2)
    follow(leader, follower)
    before = follower.appended_position
    with pytest.raises(NotLeadingError):
        follower.append([make_request([b"x"])])
    with pytest.raises(NotLeadingError):
        follower.topics.create(TopicConfig("other"))
    with pytest.raises(NotLeadingError):
        commit(follower, "group", "topic", 0, 1)
    assert follower.appended_position == before
    with pytest.raises(NotFollowingError):
        leader.append_verbatim(leader.appended_position, b"")


def test_gaps_forks_and_damaged_bytes_are_refused_and_nothing_is_stored() -> None:
    leader, follower = pair()
    fill(leader, 6)
    follow(leader, follower)
    start = follower.appended_position
    fill(leader, 6, 6)
    data = log_of(disk_of(leader), start, leader.appended_position)
    before = disk_of(follower).files("/s/commitlog")
    for position in (start - SEAL_SIZE_BYTES, start + 1, start + SEGMENT):
        with pytest.raises(LogGapError) as caught:
            follower.append_verbatim(position, data)
        assert caught.value.position == start
    for bit in random.Random(1).sample(range(len(data) * 8), 300):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ForeignBytesError):
            follower.append_verbatim(start, bytes(damaged))
    for size in random.Random(1).sample(range(1, len(data)), 50):
        cut = data[:size]
        try:
            follower_end = follower.append_verbatim(start, cut)
        except LogForkError:
            continue
        assert follower_end == start + size, "whole appends"
        break
    else:
        assert disk_of(follower).files("/s/commitlog") == before
    other = open_store(SimDisk())
    fill(other, 30, 50)
    here = follower.appended_position
    with pytest.raises(LogForkError):
        follower.append_verbatim(here, log_of(disk_of(other), here, other.appended_position))
    assert follower.appended_position == here


def late_leader() -> tuple[Store, bytes, int]:
    """A leader whose log begins behind 0, its log, and the CRC with which the chain comes there."""
    leader = pair()[0]
    fill(leader, 60)
    leader.flush()
    leader.checkpoint()
    assert leader.delete_segments_below(SEGMENT) == SEGMENT
    crc32c = leader.start_point.crc32c
    assert crc32c is not None
    return leader, log_of(disk_of(leader), SEGMENT, leader.appended_position), crc32c


def test_the_head_that_an_empty_log_begins_with_is_proved_by_what_stood_before_it() -> None:
    leader, log, crc32c = late_leader()
    empty = LogEnd(LogTail(0, 0, 0), 0, is_empty=True)
    taken = []
    for bit in range(SEAL_SIZE_BYTES * 8):
        damaged = bytearray(log[:SEAL_SIZE_BYTES])
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(LogForkError):
            prove(bytes(damaged), SEGMENT, empty, SEGMENT, previous_crc32c=crc32c)
        with suppress(LogForkError):
            taken += prove(bytes(damaged), SEGMENT, empty, SEGMENT)
    assert taken, "a leader of an earlier version does not tell what stood before"
    follower = open_store(SimDisk(), follows=True)
    with pytest.raises(LogForkError):
        follower.append_verbatim(SEGMENT, log, previous_crc32c=crc32c ^ 1)
    assert (follower.appended_position, follower.epochs.highest_epoch) == (0, 0)
    assert follower.append_verbatim(SEGMENT, log, previous_crc32c=crc32c) == leader.appended_position


def test_a_log_that_begins_behind_0_knows_what_stood_before_it_when_it_leads_and_after_a_start() -> None:
    leader, log, crc32c = late_leader()
    disk = SimDisk()
    follower = open_store(disk, follows=True)
    follower.append_verbatim(SEGMENT, log, previous_crc32c=crc32c)
    assert follower.start_point == leader.start_point == StartPoint(SEGMENT, crc32c)
    follower.positions.note_replicated(follower.appended_position)
    follower.checkpoint()
    follower.close()
    again = open_store(disk)
    assert again.start_point == StartPoint(SEGMENT, crc32c)
    third = open_store(SimDisk(), follows=True)
    third.append_verbatim(SEGMENT, log)
    assert third.start_point == StartPoint(SEGMENT, None), "nobody has told it"


@pytest.mark.parametrize("seed", range(20))
def test_an_empty_log_that_begins_behind_0_takes_no_damaged_bytes(seed: int) -> None:
    """Seed 4351 of the fuzz of pairs: the flipped epoch of the head was taken, and the next epochs were behind it."""
    rng = random.Random(seed)
    _, log, crc32c = late_leader()
    empty = LogEnd(LogTail(0, 0, 0), 0, is_empty=True)
    for _ in range(10):
        damaged = bytearray(log[: rng.choice((SEAL_SIZE_BYTES, len(log), rng.randrange(SEAL_SIZE_BYTES, len(log))))])
        bit = rng.randrange(8 * rng.choice((SEAL_SIZE_BYTES, len(damaged))))
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            blocks = prove(bytes(damaged), SEGMENT, empty, SEGMENT, may_end_within=True, previous_crc32c=crc32c)
        except ForeignBytesError:
            continue
        assert sum(block.appends.size_bytes for block in blocks) <= bit // 8, "what stands before the damage"


def test_a_log_knows_what_stood_before_it_though_the_deleted_segment_was_damaged_there() -> None:
    """Else it would take its own sound head for damage, and not start."""
    leader = pair()[0]
    fill(leader, 60)
    leader.flush()
    leader.checkpoint()
    disk = disk_of(leader)
    disk.flip_bit(f"/s/commitlog/{0:020d}", 8 * (SEGMENT - 2))
    assert leader.delete_segments_below(SEGMENT) == SEGMENT
    assert leader.start_point == StartPoint(SEGMENT, None)
    leader.prove_again(SEGMENT, 2 * SEGMENT)
    assert not leader.damaged_ranges
    leader.checkpoint()
    leader.close()
    again = open_store(disk)
    assert not again.damaged_ranges
    assert read_all(again)
    assert read_all(again, queue_id=1)


def test_a_head_that_was_damaged_before_the_segment_before_it_went_is_damage_still() -> None:
    leader = pair()[0]
    fill(leader, 60)
    leader.flush()
    leader.checkpoint()
    disk = disk_of(leader)
    disk.flip_bit(f"/s/commitlog/{SEGMENT:020d}", 8 * 4)
    assert leader.delete_segments_below(SEGMENT) == SEGMENT
    leader.prove_again(SEGMENT, 2 * SEGMENT)
    assert [damage.start_position for damage in leader.damaged_ranges] == [SEGMENT]


def test_an_epoch_that_is_over_is_refused() -> None:
    leader, follower = pair()
    fill(leader, 2)
    leader.close()
    leader = open_store(disk_of(leader))
    fill(leader, 2, 10)
    follow(leader, follower)
    assert [row.epoch for row in follower.epochs.rows] == [1, 2]
    assert not any(row.is_led for row in follower.epochs.rows)
    leader._log.epoch = 1
    fill(leader, 1, 20)
    with pytest.raises(LogForkError, match="has epoch 1"):
        follow(leader, follower)


def test_a_follower_is_the_same_after_a_start_and_still_follows() -> None:
    leader, follower = pair()
    fill(leader, 20)
    follow(leader, follower)
    for kind in ("close", "kill", "power"):
        disk = disk_of(follower)
        if kind == "close":
            follower.checkpoint()
            follower.close()
        elif kind == "kill":
            disk = disk.killed()
        else:
            disk = disk.crash(random.Random(3))
        follower = open_store(disk, follows=True)
        assert follower.appended_position <= leader.appended_position
        follow(leader, follower)
        fill(leader, 20, 100 + len(kind) * 20)
        follow(leader, follower)
        assert read_all(follower) == read_all(leader)
        assert [row.is_led for row in follower.epochs.rows] == [False]


def test_a_power_cut_of_the_follower_loses_nothing_that_it_had_flushed_whatever_the_leader_says() -> (
    None
):
    for seed in range(60):
        rng = random.Random(seed)
        leader, follower = pair()
        flushed = 0
        for round_ in range(6):
            fill(leader, rng.randrange(1, 8), round_ * 8)
            leader.flush()  # so the seals to come say so
            follow(leader, follower)
            if rng.random() < 0.3:
                flushed = follower.flush()
        disk = disk_of(follower).crash(rng)
        after = open_store(disk, follows=True)
        assert flushed <= after.appended_position <= leader.appended_position
        end = after.appended_position
        assert log_of(disk, 0, end) == log_of(disk_of(leader), 0, end)
        assert [finding.kind.value for finding in verify("/s", disk=disk)] == []


def test_a_follower_that_begins_behind_the_leaders_start_knows_what_the_front_told() -> None:
    clock = ManualClock()
    leader = open_store(SimDisk(), clock=clock)
    leader.topics.create(TopicConfig("topic"))
    leader.topics.create(TopicConfig("rests"))
    leader.append([make_request([b"r"], topic="rests")])
    commit(leader, "group", "rests", 0, 1)
    fill(leader, 60)
    leader.checkpoint()
    leader.delete_segments_below(leader.appended_position)
    assert leader.min_position >= SEGMENT
    fill(leader, 5, 60)
    follower = open_store(SimDisk(), follows=True, clock=clock)
    follow(leader, follower)
    assert follower.min_position == leader.min_position
    for queue in (0, 1):
        assert read_all(follower, queue_id=queue) == read_all(leader, queue_id=queue)
    assert follower.appended_end_offset("rests", 0) == 1
    assert committed(follower, "group", "rests", 0) == 1
    repeat = make_request([b"58" * 40], queue_id=0, producer_id=5, sequence=58, key="k58")
    again = follower.find_repeated(repeat)
    assert again is not None
    follower.lead()
    fill(follower, 3, 65)
    assert follower.appended_end_offset("topic", 1) == leader.appended_end_offset("topic", 1) + 2
    follower.close()
    assert verify("/s", disk=disk_of(follower)) == []


def test_a_follower_deletes_only_what_its_leader_has_deleted_and_confirmed() -> None:
    leader, follower = pair()
    fill(leader, 80)
    follow(leader, follower)
    follower.checkpoint()
    assert follower.delete_segments_below(follower.appended_position) == 0
    leader.checkpoint()
    leader.delete_segments_below(leader.appended_position)
    assert leader.min_position
    follow(leader, follower, confirmed=False)
    follower.checkpoint()
    assert follower.min_position == 0
    follow(leader, follower)
    follower.checkpoint()
    assert follower.min_position == leader.min_position
    assert read_all(follower) == read_all(leader)
    follower.close()
    assert verify("/s", disk=disk_of(follower)) == []


def test_a_promoted_follower_leads_in_a_new_epoch_and_its_old_leader_can_follow_it() -> None:
    leader, follower = pair()
    fill(leader, 10)
    follow(leader, follower)
    with pytest.raises(StaleEpochError):
        follower.lead(1)
    assert not follower.is_leading
    assert follower.lead() == 2
    fill(follower, 10, 10)
    assert [tuple(row)[1:] for row in follower.epochs.rows] == [(1, False), (2, True)]
    leader.close()
    old = open_store(disk_of(leader), follows=True)
    assert [tuple(row)[1:] for row in old.epochs.rows] == [(1, True), (1, False)]
    follow(follower, old)
    assert read_all(old) == read_all(follower)
    assert [tuple(row)[1:] for row in old.epochs.rows] == [(1, True), (2, False)]
    assert old.lead(7) == 7


def test_a_checkpoint_of_a_follower_that_begins_to_lead_meanwhile_takes_nothing_away() -> None:
    leader, follower = pair()
    fill(leader, 80)
    follow(leader, follower)
    follower.checkpoint()
    fill(leader, 2, 80)
    follow(leader, follower)
    first = follower._files.derived[0]
    checkpoint = first.checkpoint

    def lead_meanwhile(position: int) -> None:
        checkpoint(position)
        if not follower.is_leading:
            follower.lead()

    first.checkpoint = lead_meanwhile  # type: ignore[method-assign]
    follower.checkpoint()
    assert follower.min_position == 0, "a leader keeps its log until retention says so"
    fill(follower, 3, 82)
    follower.close()
    after = open_store(disk_of(follower))
    assert [tuple(row)[1:] for row in after.epochs.rows] == [(1, False), (2, True), (3, True)]


def test_a_store_that_leads_has_its_next_writer() -> None:
    leader, follower = pair()
    fill(leader, 60)
    follow(leader, follower)
    written: list[str] = []

    def write(function: Callable[[], None]) -> None:
        written.append("here")
        function()

    follower.lead()
    follower.on_writer = write
    follower.checkpoint()
    assert follower.delete_segments_below(follower.appended_position) > 0
    assert set(written) == {"here"}


def test_between_two_brokers_nobody_but_the_next_leader_appends() -> None:
    leader, follower = pair()
    fill(leader, 60)
    follow(leader, follower)
    follower.forget_listeners()  # its broker has given it up
    follower.lead()
    follower.checkpoint()
    end = follower.appended_position
    with pytest.raises(NoWriterError):
        follower.delete_segments_below(end)  # as housekeeping does, on its thread
    assert follower.appended_position == end
    follower.on_writer = lambda function: function()
    assert follower.delete_segments_below(end) > 0


def test_what_is_not_confirmed_at_a_promotion_stays_unreadable_until_the_replicas_have_it() -> None:
    leader, follower = pair()
    fill(leader, 4)
    follow(leader, follower)
    readable = follower.readable_position
    fill(leader, 4, 4)
    follow(leader, follower, confirmed=False)
    follower.lead(waits_for_replicas=True)
    assert follower.readable_position == readable
    follower.positions.note_replicated(follower.appended_position)
    assert follower.readable_position == follower.appended_position


def test_a_full_disk_and_a_failing_one_leave_whole_appends() -> None:
    for fault, error in ((Fault.ENOSPC, DiskFullError), (Fault.EIO, StoreFailedError)):
        leader, follower = pair()
        fill(leader, 30)
        disk = disk_of(follower)
        disk.fail_at(6, fault)
        with pytest.raises(error):
            follow(leader, follower)
        end = follower.appended_position
        after = open_store(disk.killed(), follows=True)
        assert after.appended_position == end
        follow(leader, after)
        assert read_all(after) == read_all(leader)


def test_no_epoch_is_led_that_could_not_be_written() -> None:
    leader, follower = pair()
    fill(leader, 3)
    follow(leader, follower)
    disk = disk_of(follower)
    disk.plan = lambda operation: Fault.ENOSPC if "epochs" in operation.path else None
    with pytest.raises(OSError, match="No space"):
        follower.check_room()
    with pytest.raises(OSError, match="No space"):
        follower.lead()
    assert not follower.is_leading
    disk.plan = None
    follower.check_room()
    assert follower.lead() == 2


def test_wherever_the_space_runs_out_a_follower_leads_or_still_follows() -> None:
    outcomes = Counter[bool]()
    for number in itertools.count(1):
        leader, follower = pair()
        fill(leader, 30)
        follow(leader, follower)
        disk = disk_of(follower)
        disk.fail_at(number, Fault.ENOSPC, for_ever=True)
        before = disk.operations
        try:
            follower.lead(7)
        except OSError:
            assert not follower.is_leading
        outcomes[follower.is_leading] += 1
        is_over = disk.operations - before < number
        disk.plan = None
        if not follower.is_leading:
            # It goes on following, and what it has heard of is written down.
            fill(leader, 3, 30)
            follow(leader, follower)
            follower.checkpoint()
            after = open_store(disk.killed(), follows=True)
            assert after.epochs.rows == follower.epochs.rows
            assert log_of(disk, 0, leader.appended_position) == log_of(disk_of(leader), 0, leader.appended_position)
        if is_over:
            break
    assert outcomes[True] > 1
    assert outcomes[False] > 3


def test_a_store_that_has_led_without_room_for_its_log_follows_a_leader_whose_clock_is_behind() -> None:
    disk = SimDisk()
    ahead = open_store(disk, clock=ManualClock(1_800_000_000_000), follows=True)
    disk.capacity_bytes = 4_000
    ahead.lead(1)
    ahead.close()
    assert ahead.appended_position == 0
    disk.capacity_bytes = 1 << 30
    leader = open_store(SimDisk(), clock=ManualClock(1_700_000_000_000), follows=True)
    leader.lead(2)
    leader.append([make_request([b"first"])])
    slave = open_store(disk, clock=ManualClock(1_800_000_000_000), follows=True)
    slave.append_verbatim(0, log_of(disk_of(leader), 0, leader.appended_position))
    assert slave.appended_position == leader.appended_position
