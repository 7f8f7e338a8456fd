"""Damage of the log is healed with a replica's bytes, and with no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from unittest import mock

import pytest

from protomq.wire.hashing import key_hash_of
from protomq.wire.log_walk import walk_appends
from protomq.wire.record import SEAL_SIZE_BYTES, encode_seal
from protomq_broker.store.errors import HealingRefusedError, StoreFailedError
from protomq_broker.store.housekeeping import log_healing
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.log.seals import encode_padding
from protomq_broker.store.queues import heal
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools.repair import repair
from protomq_broker.store.tools.verify import FindingKind, verify
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

from .log_helpers import ManualClock, make_request
from .store_helpers import SEGMENT, commit, committed, open_store, read_all, read_all_until_damage
from .test_following import disk_of, fill, follow, log_of
from .test_heal import meet, turns
from .test_scrub import damage as damage_of
from .test_scrub import filled_store, scrub

HOWS = ["a flipped bit", "zeros", "cut short", "missing"]


def damaged_store(how: str) -> tuple[Store, SimDisk, bytes, ManualClock]:
    """A store of which the scrub has found a part damaged; and the log as a replica has it."""
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    log = log_of(disk, 0, store.appended_position)
    damage_of(disk, store, how)
    scrub(store, clock)
    assert store.damaged_ranges
    return store, disk, log, clock


def heal_all(store: Store, log: bytes) -> None:
    for damage in store.damaged_ranges:
        store.heal_log(damage, log[damage.start_position : damage.end_position])


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_range_is_healed_while_the_store_serves(how: str) -> None:
    store, disk, log, clock = damaged_store(how)
    sound = open_store(_disk_with(log))
    expected = [read_all(sound, queue_id=queue_id) for queue_id in (0, 1)]
    assert any(
        len(read_all_until_damage(store, queue_id)) < len(expected[queue_id]) for queue_id in (0, 1)
    )
    store.append([make_request([b"goes on"])])
    heal_all(store, log)
    assert store.damaged_ranges == []
    assert store.healed_range_count == 1
    assert [read_all(store, queue_id=queue_id) for queue_id in (0, 1)] == [
        [*expected[0], (45, b"goes on")],
        expected[1],
    ]
    scrub(store, clock)
    assert store.damaged_ranges == []
    store.close()
    assert log_of(disk, 0, len(log)) == log
    assert verify("/s", disk=disk) == []
    assert open_store(disk, clock=clock).damaged_ranges == []


def _disk_with(log: bytes) -> SimDisk:
    """A store that has this log: another one that follows."""
    disk = SimDisk()
    follower = open_store(disk, follows=True)
    follower.append_verbatim(0, log)
    follower.close()
    return disk


@pytest.mark.parametrize("how", ["a flipped bit", "zeros"])
def test_what_a_start_has_skipped_comes_back_with_the_next_start(how: str) -> None:
    store, disk, log, clock = damaged_store(how)
    store.close()
    for name in disk.list("/s/consumequeue/topic"):
        for file in disk.list(f"/s/consumequeue/topic/{name}"):
            disk.unlink(f"/s/consumequeue/topic/{name}/{file}")
    disk.unlink("/s/consumequeue/table.bin")
    again = open_store(disk, clock=clock, corruption="quarantine")
    (damage,) = again.unhealed_ranges
    assert not again.has_healed_what_was_skipped
    heal_all(again, log)
    assert again.unhealed_ranges == []
    assert again.damaged_ranges == [damage], "queues, index and states have not what stands there"
    assert again.skipped_ranges == [damage]
    assert again.has_healed_what_was_skipped
    again.append([make_request([b"goes on"])])
    again.close()
    healed = open_store(disk, clock=clock)
    assert healed.damaged_ranges == []
    assert healed.skipped_ranges == []
    sound = open_store(_disk_with(log))
    assert read_all(healed)[:-1] == read_all(sound)
    assert read_all(healed, queue_id=1) == read_all(sound, queue_id=1)
    assert read_all(healed)[-1] == (45, b"goes on")
    healed.close()
    assert verify("/s", disk=disk) == []


def test_counts_go_on_when_a_process_opens_its_store_again() -> None:
    store, disk, log, clock = damaged_store("a flipped bit")
    heal_all(store, log)
    store.append([make_request([b"one more"])])
    before = store.counters_of("topic").records_in
    store.close()
    again = open_store(disk, clock=clock)
    again.go_on_counting(store)
    assert again.healed_range_count == store.healed_range_count == 1
    assert again.counters_of("topic").records_in == before
    again.append([make_request([b"and another"])])
    again.close()
    third = open_store(disk, clock=clock)
    third.go_on_counting(again)
    assert (third.healed_range_count, third.healed_file_count, third.timer_rebuilt_count) == (1, 0, 0)
    assert third.counters_of("topic").records_in == before + 1
    assert again.counters_of("topic").records_in == before + 1, "what is counted now counts once"
    third.close()


@pytest.mark.parametrize("before_end_bytes", [SEAL_SIZE_BYTES, SEAL_SIZE_BYTES + 30, 2_000])
def test_a_follower_does_not_lead_with_healed_parts_that_its_start_has_skipped(before_end_bytes: int) -> None:
    """Its start may not know which queue offsets they have, and new messages would get the same ones."""
    leader, follower = open_store(SimDisk()), open_store(SimDisk(), follows=True)
    fill(leader, 20)
    follow(leader, follower)
    end, disk = follower.appended_position, disk_of(follower)
    log = log_of(disk, 0, end)
    follower.close()
    disk.flip_bit(f"/s/commitlog/{0:020d}", 8 * (end - before_end_bytes))
    open_store(disk, follows=True, corruption="quarantine").close()
    for path in (*disk.files("/s/consumequeue"), "/s/config/queue_ends.json"):
        disk.unlink(path)
    follower = open_store(disk, follows=True, corruption="quarantine")
    assert not follower.has_healed_skipped_parts
    heal_all(follower, log)
    assert follower.has_healed_skipped_parts
    with pytest.raises(StoreFailedError, match="open the store again"):
        follower.lead()
    assert not follower.is_leading
    follower.close()
    follower = open_store(disk, follows=True, corruption="quarantine")
    follower.lead()
    for queue_id in (0, 1):
        follower.append([make_request([b"goes on"], queue_id=queue_id)])
    follower.close()
    follower = open_store(disk)
    for queue_id in (0, 1):
        assert read_all(follower, queue_id=queue_id) == [*read_all(leader, queue_id=queue_id), (10, b"goes on")]


def test_what_a_start_has_skipped_comes_back_with_the_next_start_though_damage_before_it_was_found_later() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock=clock)
    fill(store, 60)
    log = log_of(disk, 0, store.appended_position)
    store.close()
    for path in disk.files("/s/index"):
        disk.unlink(path)
    disk.flip_bit(f"/s/commitlog/{SEGMENT:020d}", 8 * 1000)
    store = open_store(disk, clock=clock, corruption="quarantine")
    (skipped,) = store.damaged_ranges
    disk.flip_bit(f"/s/commitlog/{SEGMENT:020d}", 8 * (skipped.start_position - SEGMENT - 100))
    scrub(store, clock)
    (both,) = store.damaged_ranges
    assert both.start_position < skipped.start_position < both.end_position
    heal_all(store, log)
    store.close()
    store = open_store(disk, clock=clock)
    assert store.damaged_ranges == []
    found = [len(list(store.find_by_key_hash("topic", key_hash_of(f"k{n}")))) for n in range(60)]
    assert found == [1] * 60


def _store_with_damage_at(marks: list[int], disk: SimDisk) -> tuple[Store, bytes]:
    """A store of which two parts are damaged: the messages at the first mark, and a topic with a committed offset at the second one."""
    store = open_store(disk, corruption="quarantine")
    fill(store, 30)
    marks.append(store.appended_position)
    fill(store, 30)
    marks.append(store.appended_position)
    store.topics.create(TopicConfig("kept"))
    commit(store, "group", "kept", 0, 7)
    fill(store, 30)
    store.checkpoint()
    log = log_of(disk, 0, store.appended_position)
    for mark in marks:
        disk.flip_bit(f"/s/commitlog/{mark // SEGMENT * SEGMENT:020d}", 8 * (mark % SEGMENT + 20))
    for _ in marks:
        store.prove_again(0, store.appended_position)
    assert len(store.damaged_ranges) == 2
    store.close()
    return open_store(disk, corruption="quarantine"), log


@pytest.mark.parametrize("is_repaired", [False, True])
def test_a_healing_takes_no_states_away_that_another_damaged_range_has(*, is_repaired: bool) -> None:
    disk, marks = SimDisk(), list[int]()
    store, log = _store_with_damage_at(marks, disk)
    first, second = store.damaged_ranges
    store.heal_log(first, log[first.start_position : first.end_position])
    store.close()
    store = open_store(disk, corruption="quarantine")
    assert store.topics.find("kept") is not None
    assert committed(store, "group", "kept", 0) == 7
    assert list(store.damaged_ranges) == [first, second]
    if is_repaired:
        store.close()
        assert len(repair("/s", "/keep", disk=disk)) == 1
    else:
        heal_all(store, log)
        store.close()
    store = open_store(disk, corruption="quarantine")
    assert list(store.damaged_ranges) == ([second] if is_repaired else [])
    assert is_repaired or committed(store, "group", "kept", 0) == 7


def test_what_is_healed_and_waits_for_another_range_is_healed_once() -> None:
    """Each start would fetch all of it from a replica again, and write it."""
    disk, marks = SimDisk(), list[int]()
    store, log = _store_with_damage_at(marks, disk)
    first, second = store.damaged_ranges
    store.heal_log(first, log[first.start_position : first.end_position])
    for _ in range(2):
        store.close()
        store = open_store(disk, corruption="quarantine")
        assert list(store.unhealed_ranges) == [second]
        assert not store.has_healed_skipped_parts
        assert not store.has_healed_what_was_skipped
    store.heal_log(second, log[second.start_position : second.end_position])
    assert store.healed_skipped_ranges == [first, second]
    store.close()
    assert open_store(disk).damaged_ranges == []


def test_what_was_healed_and_is_damaged_again_is_healed_again() -> None:
    disk, marks = SimDisk(), list[int]()
    store, log = _store_with_damage_at(marks, disk)
    first, second = store.damaged_ranges
    store.heal_log(first, log[first.start_position : first.end_position])
    store.close()
    disk.flip_bit(f"/s/commitlog/{first.start_position // SEGMENT * SEGMENT:020d}", 8 * (first.start_position % SEGMENT + 20))
    store = open_store(disk, corruption="quarantine")
    assert list(store.unhealed_ranges) == [first, second]
    heal_all(store, log)
    store.close()
    assert open_store(disk).damaged_ranges == []


def test_a_start_that_would_serve_nothing_of_what_is_healed_is_not_asked_for() -> None:
    """An elected slave would open its store again and again, and before each lead."""
    disk, marks = SimDisk(), list[int]()
    store, log = _store_with_damage_at(marks, disk)
    first, second = store.damaged_ranges
    store.heal_log(first, log[first.start_position : first.end_position])
    assert not store.has_healed_skipped_parts
    assert not store.has_healed_what_was_skipped
    store.heal_log(second, log[second.start_position : second.end_position])
    assert store.healed_skipped_ranges == [first, second]
    assert store.has_healed_what_was_skipped
    store.close()
    assert open_store(disk).damaged_ranges == []


def test_a_repair_leaves_what_a_replica_has_healed() -> None:
    disk = SimDisk()
    store = open_store(disk, corruption="quarantine")
    fill(store, 120)
    store.checkpoint()
    log = log_of(disk, 0, store.appended_position)
    disk.flip_bit(f"/s/commitlog/{SEGMENT:020d}", 80)
    store.prove_again(0, store.appended_position)
    assert [damage.start_position for damage in store.damaged_ranges] == [SEGMENT]
    store.close()
    store = open_store(disk, corruption="quarantine")
    heal_all(store, log)
    assert store.has_healed_skipped_parts
    store.close()
    assert repair("/s", "/keep", disk=disk) == []
    store = open_store(disk, corruption="quarantine")
    assert store.damaged_ranges == []
    store.close()
    assert log_of(disk, 0, len(log)) == log


def test_an_epoch_that_began_in_a_damaged_range_begins_there_once_that_is_healed() -> None:
    """Else a broker whose log ends in the epoch before is told that this one goes further, and truncates more than it has to."""
    clock = ManualClock()
    leader = open_store(leader_disk := SimDisk(), clock=clock)
    fill(leader)
    follower = open_store(disk := SimDisk(), clock=clock, corruption="quarantine", follows=True)
    follow(leader, follower)
    follower.checkpoint()
    leader.close()
    leader = open_store(leader_disk, clock=clock)
    begin = follower.appended_position
    fill(leader, 40, 12)
    end = leader.appended_position
    log = log_of(leader_disk, 0, end)
    follower.append_verbatim(begin, log[begin:])
    follower.flush()
    expected = follower.epochs.rows
    disk.flip_bit(f"/s/commitlog/{begin // SEGMENT * SEGMENT:020d}", 8 * (begin % SEGMENT + 20))
    follower.prove_again(0, end)
    assert [damage.start_position for damage in follower.damaged_ranges] == [begin]
    for _ in range(2):
        disk = disk_of(follower).killed()
        follower = open_store(disk, clock=clock, corruption="quarantine", follows=True)
        heal_all(follower, log)
    assert follower.damaged_ranges == []
    assert [row[:2] for row in follower.epochs.rows if row.epoch > 1] == [row[:2] for row in expected if row.epoch > 1]


def test_a_start_that_is_killed_while_it_rebuilds_is_made_again() -> None:
    store, disk, log, clock = damaged_store("zeros")
    store.close()
    again = open_store(disk, clock=clock, corruption="quarantine")
    heal_all(again, log)
    again.close()
    sound = open_store(_disk_with(log))
    for number in range(1, 40, 2):
        killed = disk.crash(random.Random(number), keep=1.0)
        killed.fail_at(number, Fault.CRASH)
        try:
            open_store(killed, clock=clock)
        except SimulatedCrash:
            pass
        after = killed.crash(random.Random(number))
        healed = open_store(after, clock=clock)
        assert healed.damaged_ranges == []
        for queue_id in (0, 1):
            assert read_all(healed, queue_id=queue_id) == read_all(sound, queue_id=queue_id)


@pytest.mark.parametrize("fault", [Fault.SYNC_LOST, Fault.CRASH])
def test_what_was_healed_and_not_synced_leaves_quarantine_only_when_it_is_synced(fault: Fault) -> None:
    store, disk, log, clock = damaged_store("zeros")
    disk.plan = lambda operation: fault if operation.name == "fsync" else None
    with suppress(OSError, SimulatedCrash):
        heal_all(store, log)
    again = disk.killed()
    again.plan = None
    assert open_store(again, clock=clock).damaged_ranges == []
    after = open_store(again.crash(random.Random(1), keep=0.0), clock=clock)
    assert log_of(disk_of(after), 0, len(log)) == log


def test_what_a_repair_has_filled_is_healed() -> None:
    store, disk, log, clock = damaged_store("zeros")
    store.close()
    repair("/s", "/keep", disk=disk)
    again = open_store(disk, clock=clock, corruption="quarantine")
    assert again.skipped_ranges == [], "nobody waits for it: the repair has taken these records out"
    heal_all(again, log)
    again.close()
    assert log_of(disk, 0, len(log)) == log
    assert open_store(disk, clock=clock).damaged_ranges == []


def another_past() -> bytes:
    """The log of a replica that forked: it is sound, and as long."""
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock=clock)
    store.topics.create(TopicConfig("topic"))
    for index in range(100):
        store.append([make_request([bytes([index ^ 1]) * 300], queue_id=index % 2)])
    return log_of(disk, 0, store.appended_position)


WRONG: dict[str, Callable[[bytes, DamagedRange], bytes]] = {
    "flipped": lambda log, at: _flipped(log[at.start_position : at.end_position], 90),
    "flipped in the last seal": lambda log, at: _flipped(
        log[at.start_position : at.end_position], -20
    ),
    "short": lambda log, at: log[at.start_position : at.end_position - 1],
    "long": lambda log, at: log[at.start_position : at.end_position + 1],
    "none": lambda log, at: b"",
    "zeros": lambda log, at: bytes(at.end_position - at.start_position),
    "of elsewhere": lambda log, at: log[: at.end_position - at.start_position],
    "of another past": lambda log, at: another_past()[at.start_position : at.end_position],
}


def _flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 4
    return bytes(changed)


@pytest.mark.parametrize("wrong", WRONG)
def test_bytes_that_did_not_stand_there_change_nothing(wrong: str) -> None:
    store, disk, log, _ = damaged_store("zeros")
    before = log_of(disk, 0, len(log))
    (damage,) = store.damaged_ranges
    with pytest.raises(HealingRefusedError):
        store.heal_log(damage, WRONG[wrong](log, damage))
    assert store.damaged_ranges == [damage]
    assert log_of(disk, 0, len(log)) == before
    heal_all(store, log)
    assert store.damaged_ranges == []


@pytest.mark.parametrize("body", [b"", encode_padding(100)], ids=["a head", "no head"])
def test_a_segment_that_begins_without_a_head_is_no_healing_however_well_its_seals_fit(body: bytes) -> None:
    """A later start could not take the chain up there."""
    seal = encode_seal(7, body, epoch=1, start_position=SEGMENT, record_count=0, store_time_ms=1, synced_position=0)
    data = body + seal
    (only,) = walk_appends(data, SEGMENT, 7).seals
    damage = DamagedRange(SEGMENT, SEGMENT + len(data), only.crc32c, "damaged")
    if body:
        with pytest.raises(HealingRefusedError, match="does not begin with an empty append"):
            log_healing.prove_healing(data, damage, 7, SEGMENT)
    else:
        (block,) = log_healing.prove_healing(data, damage, 7, SEGMENT)
        assert block.size_bytes == len(data)


def fork_at_the_start_of_a_segment() -> tuple[Store, bytes]:
    """A store whose whole first segment is damaged, and a sound log of another past that begins at the same place."""
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    disk.overwrite(f"/s/commitlog/{0:020d}", 0, bytes(SEGMENT - 200))
    scrub(store, clock)
    return store, another_past()


def test_a_sound_log_of_another_past_does_not_heal_the_beginning_of_the_log() -> None:
    store, other = fork_at_the_start_of_a_segment()
    (damage,) = store.damaged_ranges
    assert damage.start_position == 0
    assert walk_appends(other[:SEGMENT], 0, 0).size_bytes == SEGMENT
    with pytest.raises(HealingRefusedError):
        store.heal_log(damage, other[: damage.end_position])
    assert store.damaged_ranges == [damage]


def rounds(seed: int, count: int) -> None:
    """Random damage, random answers of replicas: in the end the log is what it was, or the range is in quarantine still."""
    rng = random.Random(seed)
    for _ in range(count):
        disk, clock = SimDisk(), ManualClock()
        store = filled_store(disk, clock)
        log = log_of(disk, 0, store.appended_position)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(log) - 40)
            disk.overwrite(
                f"/s/commitlog/{at - at % SEGMENT:020d}",
                at % SEGMENT,
                rng.randbytes(rng.randrange(1, 40)),
            )
        scrub(store, clock)
        for damage in store.damaged_ranges:
            for answer in rng.sample(sorted(WRONG), 2):
                try:
                    store.heal_log(damage, WRONG[answer](log, damage))
                except HealingRefusedError:
                    assert damage in store.damaged_ranges
            if damage in store.damaged_ranges and rng.random() < 0.8:
                store.heal_log(damage, log[damage.start_position : damage.end_position])
        left = store.damaged_ranges
        now = bytearray(log_of(disk, 0, len(log)))
        for damage in left:
            now[damage.start_position : damage.end_position] = log[
                damage.start_position : damage.end_position
            ]
        assert bytes(now) == log, f"seed {seed}: what is not in quarantine is not what it was"
        store.close()


def unchecked() -> AbstractContextManager[object]:
    """Planted: bytes are put in place as they come."""

    def believe(data: bytes, damage: DamagedRange, crc: int | None, size: int) -> list[object]:
        from protomq.wire.log_walk import WalkedBlock

        block = WalkedBlock(damage.start_position, data, size_bytes=len(data))
        block.runs.add(0, len(data), 1)
        return [block] if data else []

    return mock.patch.object(log_healing, "prove_healing", believe)


def only_seals() -> AbstractContextManager[object]:
    """Planted: what follows behind the range is not compared, so a log of another epoch heals."""
    prove = log_healing.prove_healing

    def careless(data: bytes, damage: DamagedRange, crc: int | None, size: int) -> object:
        start = damage.start_position - damage.start_position % size
        block = walk_appends(
            data, damage.start_position, None if damage.start_position == start else crc
        )
        end = block.seals[-1].crc32c if block.seals else 0
        changed = DamagedRange(damage.start_position, damage.end_position, end, damage.reason)
        return prove(data, changed, None if damage.start_position == start else crc, size)

    return mock.patch.object(log_healing, "prove_healing", careless)


def lifted_first() -> AbstractContextManager[object]:
    """Planted: the range leaves quarantine, and nothing is written."""
    return mock.patch.object(log_healing.LogHealer, "_write", return_value=None)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_replicas_answer_the_log_is_what_it_was(seed: int) -> None:
    rounds(seed, 2)


@pytest.mark.parametrize("plant", [unchecked, lifted_first])
def test_a_planted_bug_is_caught(plant: Callable[[], AbstractContextManager[object]]) -> None:
    with plant(), pytest.raises(AssertionError):
        rounds(0, 8)


def test_a_planted_bug_of_epochs_is_caught() -> None:
    with only_seals():
        store, other = fork_at_the_start_of_a_segment()
        (damage,) = store.damaged_ranges
        store.heal_log(damage, other[: damage.end_position])
        assert store.damaged_ranges == [], "the planted bug heals with another past"


def test_a_kill_in_the_middle_leaves_the_range_in_quarantine_or_healed() -> None:
    for number in range(1, 100):
        store, disk, log, clock = damaged_store("zeros")
        (damage,) = store.damaged_ranges
        disk.fail_at(number, Fault.CRASH)
        try:
            store.heal_log(damage, log[damage.start_position : damage.end_position])
        except SimulatedCrash:
            pass
        else:
            break
        for after in (disk.killed(), disk.crash(random.Random(number))):
            again = open_store(after, clock=clock, corruption="quarantine")
            heal_all(again, log)
            again.close()
            assert log_of(after, 0, len(log)) == log
            healed = open_store(after, clock=clock)
            assert healed.damaged_ranges == []
            healed.close()
            assert verify("/s", disk=after) == []
    assert number > 3


def test_damaged_padding_at_the_end_of_a_segment_heals_for_good(caplog: pytest.LogCaptureFixture) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    log = log_of(disk, 0, store.appended_position)
    padding = walk_appends(log[:SEGMENT], 0, 0).seals[-1]
    assert padding.record_count == 0
    disk.flip_bit(f"/s/commitlog/{0:020d}", (padding.start_position + 10) * 8)
    scrub(store, clock)
    assert [found.start_position for found in store.damaged_ranges] == [padding.start_position]
    heal_all(store, log)
    assert store.damaged_ranges == []
    assert store.healed_range_count == 1
    assert "lost" not in caplog.text
    scrub(store, clock)
    store.close()
    assert verify("/s", disk=disk) == []
    assert open_store(disk, clock=clock).damaged_ranges == []


def given_twice(*, is_first: bool = False) -> tuple[Store, Store, Store]:
    """A master that had lost the last message of queue 1 and its queue files, gave that offset to a new one, and was healed after that.
    Returns it, open again; a sound store without the new message; and a replica that had followed up to there. `is_first`: the message was
    the queue's only one.
    """
    sound = open_store(SimDisk())
    for index in range(20):
        sound.append([make_request([b"%d" % index], queue_id=0 if is_first else index % 2)])
    start = sound.appended_position
    sound.append([make_request([b"lost for a while"], queue_id=1)])
    end = sound.appended_position
    sound.append([make_request([b"behind"], queue_id=0)])
    sound.flush()
    log = log_of(disk_of(sound), 0, sound.appended_position)
    replica, follower = open_store(SimDisk(), follows=True), open_store(SimDisk(), follows=True)
    for each in (replica, follower):
        follow(sound, each)
    follower.close()
    disk = disk_of(follower)
    disk.overwrite(f"/s/commitlog/{0:020d}", start, bytes(end - start - SEAL_SIZE_BYTES))
    open_store(disk, corruption="quarantine").close()
    for path in (*disk.files("/s/consumequeue"), "/s/config/queue_ends.json"):
        disk.unlink(path)
    store = open_store(disk, corruption="quarantine")
    store.append([make_request([b"new"], queue_id=1)])
    heal_all(store, log)
    store.close()
    return open_store(disk), sound, replica


def test_offsets_that_were_given_twice_take_no_earlier_messages_out_of_a_queue(caplog: pytest.LogCaptureFixture) -> None:
    store, sound, _ = given_twice()
    assert read_all(store) == read_all(sound)
    before = read_all(sound, queue_id=1)
    assert read_all(store, queue_id=1) == [*before[:-1], (10, b"new")]
    assert "queue offsets 10 to 10 of queue 1 of topic topic were given twice" in caplog.text


def test_verify_tells_offsets_that_were_given_twice_and_takes_no_entry_for_wrong() -> None:
    store, _, _ = given_twice()
    store.close()
    (finding,) = verify("/s", disk=disk_of(store))
    assert finding.kind is FindingKind.WRONG_STAMP
    assert finding.explanation.startswith("offset 10 of queue 1 of topic topic was given before")
    disk_of(store).flip_bit(f"/s/consumequeue/topic/1/{0:020d}", 20 * 8 * 9 + 3)
    _, finding = verify("/s", disk=disk_of(store))
    assert finding.kind is FindingKind.WRONG_ENTRY
    assert "offset 9" in finding.explanation


def test_a_queue_file_that_heals_has_the_later_message_of_an_offset_that_was_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal, "BLOCK_SIZE_BYTES", 200)
    store, _, _ = given_twice()
    store.close()
    disk, clock = disk_of(store), ManualClock()
    disk.flip_bit(f"/s/consumequeue/topic/1/{0:020d}", 20 * 8 * 10 + 3)
    store = open_store(disk, clock=clock)
    assert meet(store, queue_id=1)
    turns(store, clock)
    assert store.healed_file_count == 1
    assert read_all(store, offset=10, queue_id=1) == [(10, b"new")]


@pytest.mark.parametrize("is_first", [False, True])
def test_a_replica_goes_on_where_its_master_has_given_offsets_twice(*, is_first: bool) -> None:
    store, _, replica = given_twice(is_first=is_first)
    for follower in (replica, open_store(SimDisk(), follows=True)):
        follow(store, follower)
        follower.positions.note_replicated(store.readable_position)
        for after in (follower, None):
            if after is None:
                follower.close()
                after = open_store(disk_of(follower), follows=True)
                after.positions.note_replicated(store.readable_position)
            for queue_id in (0, 1):
                assert read_all(after, queue_id=queue_id) == read_all(store, queue_id=queue_id)


def test_a_replica_that_is_killed_loses_no_earlier_messages_where_offsets_were_given_twice() -> None:
    store, _, _ = given_twice()
    log = log_of(disk_of(store), 0, store.appended_position)
    for checkpoint in (0, *(seal.end_position for seal in walk_appends(log, 0, 0).seals)):
        replica = open_store(SimDisk(), follows=True)
        replica.append_verbatim(0, log[:checkpoint])
        replica.positions.note_replicated(checkpoint)
        replica.checkpoint()
        replica.append_verbatim(checkpoint, log[checkpoint:])
        replica = open_store(disk_of(replica).killed(), follows=True)
        replica.positions.note_replicated(store.readable_position)
        for queue_id in (0, 1):
            assert read_all(replica, queue_id=queue_id) == read_all(store, queue_id=queue_id)


def test_a_replica_that_loses_the_later_message_in_a_power_cut_has_the_earlier_one() -> None:
    store, sound, replica = given_twice()
    replica.checkpoint()
    start = replica.appended_position
    follow(store, replica)
    disk = disk_of(replica).crash(random.Random(1), keep=0.0)
    replica = open_store(disk, follows=True)
    replica.positions.note_replicated(start)
    assert replica.appended_position == start
    assert read_all(replica, queue_id=1) == read_all(sound, queue_id=1)
    follow(store, replica)
    assert read_all(replica, queue_id=1) == read_all(store, queue_id=1)


@pytest.mark.slow
@pytest.mark.parametrize("ends_in", ["a kill", "a power cut", "a power cut that leaves some"])
def test_a_replica_that_crashes_where_offsets_were_given_twice_has_what_its_log_has(ends_in: str) -> None:
    """At any operation on the disk, while it stores the later message and makes its first checkpoint after that."""
    log, start = log_given_twice()
    keep = 0.0 if ends_in == "a power cut" else None
    crash_count = 0
    while True:
        replica = open_store(SimDisk(), follows=True)
        replica.append_verbatim(0, log[:start])
        replica.positions.note_replicated(len(log))
        replica.checkpoint()
        disk = disk_of(replica)
        disk.fail_at(crash_count + 1, Fault.CRASH)
        try:
            replica.append_verbatim(start, log[start:])
            replica.checkpoint()
            break
        except SimulatedCrash:
            crash_count += 1
        disk.plan = None
        after = disk.killed() if ends_in == "a kill" else disk.crash(random.Random(crash_count), keep=keep)
        expect_what_the_log_has(open_store(after, follows=True), log)
    assert crash_count > 10


@pytest.mark.slow
def test_a_start_that_crashes_where_offsets_were_given_twice_leaves_what_the_log_has() -> None:
    """The replica was killed with the later message in its log, and the earlier one in its queue. A start crashes, too."""
    log, start = log_given_twice()
    replica = open_store(SimDisk(), follows=True)
    replica.append_verbatim(0, log[:start])
    replica.positions.note_replicated(len(log))
    replica.checkpoint()
    with mock.patch.object(replica._files.queues, "go_back_to", side_effect=SimulatedCrash), suppress(SimulatedCrash):
        replica.append_verbatim(start, log[start:])
    crash_count = 0
    while True:
        disk = disk_of(replica).killed()
        disk.fail_at(crash_count + 1, Fault.CRASH)
        try:
            open_store(disk, follows=True).checkpoint()
            break
        except SimulatedCrash:
            crash_count += 1
        disk.plan = None
        expect_what_the_log_has(open_store(disk.crash(random.Random(crash_count)), follows=True), log)
    assert crash_count > 10


def test_a_checkpoint_that_began_before_the_later_message_leaves_the_earlier_one_to_a_power_cut() -> None:
    """The writer goes on beside a checkpoint: this one covers the log up to where the later message begins."""
    log, start = log_given_twice()
    replica = open_store(SimDisk(), follows=True)
    replica.append_verbatim(0, log[:start])
    replica.positions.note_replicated(start)
    queues = replica._files.queues
    checkpoint = queues.checkpoint

    def goes_on_meanwhile(position: int) -> None:
        queues.checkpoint = checkpoint  # type: ignore[method-assign]
        replica.append_verbatim(start, log[start:])
        checkpoint(position)

    queues.checkpoint = goes_on_meanwhile  # type: ignore[method-assign]
    replica.checkpoint()
    assert replica.appended_position == len(log)
    expect_what_the_log_has(open_store(disk_of(replica).crash(random.Random(1), keep=0.0), follows=True), log)


def log_given_twice() -> tuple[bytes, int]:
    """(a log in which an offset was given twice, where its last append begins: that of the later message)."""
    store, _, _ = given_twice()
    log = log_of(disk_of(store), 0, store.appended_position)
    return log, walk_appends(log, 0, 0).seals[-1].start_position


def expect_what_the_log_has(replica: Store, log: bytes) -> None:
    """It answers as a store that has the same log and never crashed; also when it goes on from there."""
    end = replica.appended_position
    model = open_store(SimDisk(), follows=True)
    model.append_verbatim(0, log[:end])
    for goes_on in (False, True):
        for store in (replica, model):
            if goes_on and end < len(log):
                store.append_verbatim(end, log[end:])
            store.positions.note_replicated(store.appended_position)
        for queue_id in (0, 1):
            assert read_all(replica, queue_id=queue_id) == read_all(model, queue_id=queue_id)


@pytest.mark.parametrize("is_table_left", [False, True])
def test_a_topic_that_may_have_been_made_again_has_no_messages_of_the_one_before(*, is_table_left: bool) -> None:
    """Damage has taken what tells of the deletion, and the first messages of the new topic."""
    disk = SimDisk()
    store = open_store(disk)
    store.topics.create(TopicConfig("topic"))
    for _ in range(6):
        store.append([make_request([b"old"])])
    start = store.appended_position
    store.topics.delete("topic")
    store.topics.create(TopicConfig("topic"))
    for _ in range(3):
        store.append([make_request([b"lost"])])
    end = store.appended_position
    store.append([make_request([b"new"])])
    store.close()
    disk.overwrite(f"/s/commitlog/{0:020d}", start, bytes(end - start - SEAL_SIZE_BYTES))
    for path in (*disk.files("/s/consumequeue"), "/s/config/topics.json"):
        if not (is_table_left and path.endswith("table.bin")):
            disk.unlink(path)
    store = open_store(disk, corruption="quarantine")
    assert read_all(store, offset=3) == [(3, b"new")]
    assert read_all_until_damage(store, 0) == []
