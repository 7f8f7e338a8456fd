"""What a repair has taken out of a log stays known wherever that log goes: to replicas, over their restarts, and through rebuilds."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from protomq.v1.record_pb2 import Record, RecordBatch
from protomq_broker.store import following
from protomq_broker.store.errors import CorruptLogError, HealingRefusedError
from protomq_broker.store.files.disk import write_file_atomically
from protomq_broker.store.log.recovery import DamagedRange, read_quarantine
from protomq_broker.store.queues.queue_ends import QueueEnd
from protomq_broker.store.queues.repaired import encode_note
from protomq_broker.store.state.machine import replay_states
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools import repair as repair_tool
from protomq_broker.store.tools.offline import open_offline
from protomq_broker.store.tools.repair import repair
from protomq_broker.store.tools.verify import FindingKind, LostMessages, verify
from protomq_broker.testing.simdisk import Fault, SimDisk

from .log_helpers import make_request
from .store_helpers import SEGMENT, open_store, read_all
from .test_following import disk_of, fill, follow, log_of

TAG = frozenset({1})


def repaired_leader(offset: int = 4, queue_id: int = 1, count: int = 40) -> tuple[Store, DamagedRange]:
    """A store of which a repair has taken out the append with this message, and the range."""
    disk = SimDisk()
    store = open_store(disk)
    for index in range(count):
        store.append([make_request([bytes([index]) * 150], queue_id=index % 2)])
    result = store.read("topic", queue_id, offset, 1, 1)
    position = result.regions[0].file.base_position + result.regions[0].offset
    store.close()
    disk.flip_bit(f"/s/commitlog/{position - position % SEGMENT:020d}", (position % SEGMENT + 60) * 8)
    repair("/s", "/keep", disk=disk)
    store = open_store(disk)
    (damage,) = store.damaged_ranges
    return store, damage


def error_at(store: Store, offset: int, queue_id: int = 1, tags: frozenset[int] = frozenset()) -> CorruptLogError:
    with pytest.raises(CorruptLogError) as raised:
        store.read("topic", queue_id, offset, 10, 1 << 20, tags)
    return raised.value


def facts(error: CorruptLogError) -> tuple[object, ...]:
    return (str(error), error.position, error.end_position, error.lost, error.next_offset)


def without_derived(store: Store) -> Store:
    """The store after a start that rebuilt its consume queues."""
    disk = disk_of(store)
    store.close()
    for path in disk.files("/s/consumequeue"):
        disk.unlink(path)
    return open_store(disk, follows=True)


def restarted(store: Store) -> Store:
    store.close()
    return open_store(disk_of(store), follows=True)


def killed(store: Store) -> Store:
    """The store after a kill: what it had not written is gone."""
    return open_store(disk_of(store).killed(), follows=True)


def promoted(store: Store) -> Store:
    store.close()
    return open_store(disk_of(store))


def as_it_is(store: Store) -> Store:
    return store


def without_notes(store: Store) -> Store:
    """The store as if it knew only its log: restored from a backup, say."""
    disk = disk_of(store)
    store.close()
    for path in [*disk.files("/s/consumequeue"), *disk.files("/s/config"), "/s/checkpoint"]:
        if "store" not in path and disk.exists(path):
            disk.unlink(path)
    return open_store(disk, follows=True)


AFTER = [as_it_is, restarted, killed, without_derived, promoted, without_notes]


@pytest.mark.parametrize("after", AFTER)
def test_who_reads_at_a_replica_is_told_what_was_taken_out_of_the_leaders_log(after: Callable[[Store], Store]) -> None:
    leader, damage = repaired_leader()
    follower = open_store(SimDisk(), follows=True)
    follow(leader, follower)
    follower = after(follower)
    follower.positions.note_replicated(leader.readable_position)
    expected = error_at(leader, 4)
    assert expected.next_offset == 5
    assert facts(error_at(follower, 4)) == facts(expected)
    assert follower.damaged_ranges == [damage]
    assert follower.skipped_ranges == []
    assert follower.is_repaired(damage.start_position)
    before, behind = follower.read("topic", 1, 0, 10, 1 << 20), follower.read("topic", 1, 5, 10, 1 << 20)
    assert (before.next_offset, behind.record_count) == (4, 10)


@pytest.mark.parametrize("after", AFTER)
def test_verify_of_a_replica_reports_what_that_of_the_leader_does(after: Callable[[Store], Store]) -> None:
    leader, damage = repaired_leader()
    follower = open_store(SimDisk(), follows=True)
    follow(leader, follower)
    follower = after(follower)
    follower.close()
    leader.close()
    (finding,) = verify("/s", disk=disk_of(follower))
    assert finding == verify("/s", disk=disk_of(leader))[0]
    assert (finding.kind, finding.start_position) == (FindingKind.REPAIRED, damage.start_position)
    assert finding.lost == (LostMessages("topic", 1, 4, 5),)


@pytest.mark.parametrize("after", AFTER)
def test_offsets_at_the_end_of_a_queue_that_were_taken_out_are_given_to_no_other_message(
    after: Callable[[Store], Store],
) -> None:
    leader, _ = repaired_leader(offset=19, queue_id=1)
    assert leader.appended_end_offset("topic", 1) == 20
    follower = open_store(SimDisk(), follows=True)
    follow(leader, follower)
    follower = after(follower)
    follower.positions.note_replicated(leader.readable_position)
    assert follower.appended_end_offset("topic", 1) == 20
    assert error_at(follower, 19).next_offset == 20
    follower = promoted(follower)
    follower.append([make_request([b"new"], queue_id=1)])
    assert follower.appended_end_offset("topic", 1) == 21
    found = follower.read("topic", 1, 20, 10, 1 << 20)
    assert [RecordBatch.FromString(field).records[0].body for field in found.fields_of(found.octets())] == [b"new"]


def test_offsets_of_a_deleted_topic_are_not_given_back_to_it() -> None:
    leader, _ = repaired_leader(offset=19, queue_id=1)
    leader.topics.create(TopicConfig("topic"))
    leader.topics.delete("topic")
    follower = open_store(SimDisk(), follows=True)
    follow(leader, follower)
    assert follower.appended_end_offset("topic", 1) == leader.appended_end_offset("topic", 1) == 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("has_notes", [True, False], ids=["with notes", "repaired by an earlier version"])
def test_wherever_something_was_taken_out_a_replica_says_the_same(
    seed: int, has_notes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_notes:
        monkeypatch.setattr(repair_tool, "encode_note", lambda *_: b"")
    rng = random.Random(seed)
    disk = SimDisk()
    leader = open_store(disk)
    for index in range(120):
        leader.append([make_request([rng.randbytes(rng.randrange(600))], queue_id=index % 2)])
    for queue_id in (0, 1):
        leader.append([make_request([b"end"], queue_id=queue_id)])
    end = leader.appended_position
    leader.close()
    for _ in range(3):
        at = rng.randrange(end - 2_000)
        for base in range(at - at % SEGMENT, end, SEGMENT):
            first, last = max(at, base), min(at + rng.choice((1, 50, 12_000)), base + SEGMENT, end - 2_000)
            if first < last:
                disk.overwrite(f"/s/commitlog/{base:020d}", first - base, rng.randbytes(last - first))
    repair("/s", "/keep", disk=disk)
    leader = open_store(disk)
    follower = open_store(SimDisk(), follows=True)
    follow(leader, follower)
    for after in (as_it_is, without_derived):
        follower = after(follower)
        follower.positions.note_replicated(leader.readable_position)
        for queue_id in (0, 1):
            assert lost_offsets(follower, queue_id) == lost_offsets(leader, queue_id) != []
        if has_notes:
            assert len(follower.damaged_ranges) == len(leader.damaged_ranges)
            for found, known in zip(follower.damaged_ranges, leader.damaged_ranges, strict=True):
                assert found.start_position == known.start_position
                assert known.reason.startswith(found.reason), "a small range has no room for all of it"
    follower.close()
    assert {finding.kind for finding in verify("/s", disk=disk_of(follower))} == {FindingKind.REPAIRED}


def lost_offsets(store: Store, queue_id: int) -> list[int]:
    """Offsets that are answered with an error; all others have a message."""
    lost: list[int] = []
    offset, end = store.queue_range("topic", queue_id)
    while offset < end:
        try:
            result = store.read("topic", queue_id, offset, 10, 1 << 20)
        except CorruptLogError as error:
            lost += range(offset, error.next_offset)
            offset = error.next_offset
            continue
        assert result.record_count == result.next_offset - offset, "nothing is skipped without a word"
        offset = result.next_offset
    return lost


def test_a_replica_of_an_earlier_version_tells_of_every_message_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, damage = repaired_leader()
    monkeypatch.setattr(following, "repaired_in", lambda *_: [])
    follower = open_store(SimDisk(), follows=True)
    follow(leader, follower)
    monkeypatch.undo()
    assert follower.damaged_ranges == []
    error = error_at(follower, 4)
    assert (error.next_offset, error.is_gone) == (5, True)
    assert "messages 4 to 4 of queue 1 of topic topic are not in the log any more; continue at offset 5" in str(error)
    assert lost_offsets(follower, 1) == [4]
    # Nothing matches, and yet the reader is told.
    assert follower.read("topic", 1, 0, 10, 1 << 20, TAG).next_offset == 4
    assert error_at(follower, 4, tags=TAG).next_offset == 5
    follower.close()
    (finding,) = verify("/s", disk=disk_of(follower))
    assert (finding.kind, finding.start_position) == (FindingKind.REPAIRED, damage.start_position)


def test_padding_of_a_repair_heals_nothing() -> None:
    leader, damage = repaired_leader()
    padding = log_of(disk_of(leader), damage.start_position, damage.end_position)
    with pytest.raises(HealingRefusedError, match="the messages are lost there, too"):
        leader.heal_log(damage, padding)
    assert leader.damaged_ranges == [damage]
    assert leader.healed_range_count == 0


def test_a_damaged_range_that_gets_the_padding_of_a_replica_stays_in_quarantine(caplog: pytest.LogCaptureFixture) -> None:
    leader, damage = repaired_leader()
    padding = log_of(disk_of(leader), damage.start_position, damage.end_position)
    leader.close()
    disk = disk_of(leader)
    base, offset = damage.start_position - damage.start_position % SEGMENT, damage.start_position % SEGMENT
    disk.flip_bit(f"/s/commitlog/{base:020d}", (offset + 90) * 8)
    store = open_store(disk, corruption="quarantine")
    (found,) = store.damaged_ranges
    store.heal_log(found, padding)
    assert "healed" not in caplog.text
    assert "Their messages stay lost" in caplog.text
    assert store.healed_range_count == 0
    assert store.skipped_ranges == []
    assert error_at(store, 4).next_offset == 5
    store.close()
    assert error_at(open_store(disk), 4).next_offset == 5
    (finding,) = verify("/s", disk=disk)
    assert finding.kind is FindingKind.REPAIRED


def test_padding_that_was_damaged_after_somebody_read_there_is_healed() -> None:
    leader, damage = repaired_leader()
    padding = log_of(disk_of(leader), damage.start_position, damage.end_position)
    assert leader.is_repaired(damage.start_position)
    disk = disk_of(leader)
    base, offset = damage.start_position - damage.start_position % SEGMENT, damage.start_position % SEGMENT
    disk.flip_bit(f"/s/commitlog/{base:020d}", (offset + 90) * 8)
    leader.heal_log(damage, padding)
    assert log_of(disk, damage.start_position, damage.end_position) == padding
    assert leader.damaged_ranges == [damage]
    assert error_at(leader, 4).next_offset == 5


@pytest.mark.parametrize("when", ["turn", "checkpoint"])
def test_what_a_full_disk_did_not_note_of_a_repair_is_noted_later(when: str, caplog: pytest.LogCaptureFixture) -> None:
    leader, damage = repaired_leader()
    follower = open_store(SimDisk(), follows=True)
    disk = disk_of(follower)
    disk.plan = lambda operation: Fault.ENOSPC if "quarantine.json" in operation.path else None
    follow(leader, follower)
    assert "what is in quarantine cannot be noted for the next start yet" in caplog.text
    assert follower.damaged_ranges == [damage], "readers are told"
    note = read_quarantine(disk, "/s/config/quarantine.json")
    assert note == []
    follower._upkeep.keeper.turn()
    with pytest.raises(OSError, match="No space"):
        follower.checkpoint()
    disk.plan = None
    (follower._upkeep.keeper.turn if when == "turn" else follower.checkpoint)()
    assert read_quarantine(disk, "/s/config/quarantine.json") == [damage]
    assert "the disk takes it again" in caplog.text
    again = open_store(disk.killed(), follows=True)
    assert again.damaged_ranges == [damage]
    again.positions.note_replicated(leader.readable_position)
    assert error_at(again, 4).next_offset == 5


def test_a_damaged_note_of_the_quarantine_sends_nobody_to_the_command_that_reads_it(caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(SimDisk())
    fill(store, 3)
    store.close()
    disk = disk_of(store)
    write_file_atomically(disk, "/s/config/quarantine.json", b"zeroes")
    open_offline("/s", disk)
    assert "quarantine.json is damaged" in caplog.text
    assert "protomq log verify" not in caplog.text
    open_store(disk).close()
    assert "Run `protomq log verify`" in caplog.text


@pytest.mark.parametrize("name", ["quarantine.json", "queue_ends.json"])
@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO])
def test_a_note_that_the_disk_refuses_holds_up_the_checkpoint_and_the_status_says_so(name: str, fault: Fault) -> None:
    """Behind a checkpoint the next start would not come upon the repair again."""
    leader, damage = repaired_leader()
    follower = open_store(SimDisk(), follows=True)
    disk = disk_of(follower)
    disk.plan = lambda operation: fault if name in operation.path else None
    follow(leader, follower)
    with pytest.raises(OSError):
        follower.checkpoint()
    assert follower.checkpoint_failure.startswith("what is in quarantine cannot be noted in config/")
    assert "no segment behind the last one is deleted" in follower.checkpoint_failure
    again = open_store(disk.killed(), follows=True)
    assert again.damaged_ranges == [damage], "the start has found it again"
    disk.plan = None
    follower.checkpoint()
    assert follower.checkpoint_failure == ""
    assert read_quarantine(disk, "/s/config/quarantine.json") == [damage]


def test_messages_heal_a_replica_that_got_padding_and_the_next_start_serves_them() -> None:
    sound = open_store(SimDisk())
    for index in range(40):
        sound.append([make_request([bytes([index]) * 150], queue_id=index % 2)])
    leader, damage = repaired_leader()
    follower = open_store(SimDisk(), follows=True)
    follow(leader, follower)
    assert follower.is_repaired(damage.start_position)
    follower.heal_log(damage, log_of(disk_of(sound), damage.start_position, damage.end_position))
    assert follower.healed_range_count == 1
    assert error_at(follower, 4).next_offset == 5
    assert not follower.is_repaired(damage.start_position), "pops would give up for good what the next start serves"
    follower = restarted(follower)
    follower.positions.note_replicated(leader.readable_position)
    assert follower.damaged_ranges == []
    assert read_all(follower, queue_id=1) == read_all(sound, queue_id=1)


def test_a_note_is_cut_to_its_room() -> None:
    damage = DamagedRange(1_000, 2_000, 7, "a reason of some words")
    ends = [QueueEnd("topic", 1, 0, 5, 1_100, 1_200), QueueEnd("topic", 1, 0, 6, 1_300, 1_400)]
    full = encode_note(damage, ends, 1_000)
    assert full == b'PMQREP01[1000,2000,[["topic",1,0,6,1300,1400]],"a reason of some words"]\x00'
    assert encode_note(damage, ends, len(full) - 6) == full.replace(b" words", b"")
    assert encode_note(damage, ends, 40) == b'PMQREP01[1000,2000,[],""]\x00'
    assert encode_note(damage, ends, 20) == b""


def test_a_state_takes_no_record_of_another_topic_for_one_that_the_log_has_lost() -> None:
    """The entry of a lost record has the position behind the record before it, where a record of the same append may stand."""
    taken: list[tuple[bytes, int]] = []
    machine: Any = SimpleNamespace(topic="system", replay_from=0, apply=lambda body, position: taken.append((body, position)))
    entries = [(100, 50, 0), (150, 0, -1), (400, 50, 0)]
    queue = SimpleNamespace(
        known_min_offset=0, end_offset=3, first_at_or_beyond=lambda _: 0, check=lambda _: None, entry=entries.__getitem__
    )
    queues: Any = SimpleNamespace(queues_of=lambda _: {0: queue})
    reader: Any = SimpleNamespace(record_at=lambda position: Record(body=b"at %d" % position).SerializeToString())
    replay_states([machine], queues, reader)
    assert taken == [(b"at 100", 100), (b"at 400", 400)]
