"""Verify finds and explains, repair takes out and keeps, dump shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.v1.record_pb2 import RecordBatch
from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import CorruptLogError, StoreLockedError, StoreSettingsError
from protomq_broker.store.files.side_files import TAIL_NAME, write_json_file
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.start.front_note import FRONT_NAME
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools.offline import dump
from protomq_broker.store.tools.repair import repair
from protomq_broker.store.tools.verify import FindingKind, verify
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from tests.support.examples import examples

from . import store_helpers
from .log_helpers import ManualClock, make_request
from .store_helpers import read_all

SEGMENT = 8192


def open_store(disk: SimDisk) -> Store:
    config = StoreConfig(segment_size_bytes=SEGMENT)
    return Store.open("/s", config, clock=ManualClock(), disk=disk, background=False)


def filled_store(disk: SimDisk, count: int = 40) -> Store:
    store = open_store(disk)
    for index in range(count):
        store.append([make_request([bytes([index]) * 150], queue_id=index % 2)])
    store.flush()
    store.append([make_request([b"end"], queue_id=0), make_request([b"end"], queue_id=1)])
    return store


def head_only_store(disk: SimDisk, led_epoch: int | None) -> None:
    """A store of which only the head of the log is written, and a checkpoint behind it. A head that was led in is dated."""
    store = store_helpers.open_store(disk, follows=led_epoch is not None)
    if led_epoch is not None:
        store.lead(led_epoch)
    store.close()


def bodies(store: Store, queue_id: int) -> dict[int, bytes]:
    """What can be read of a queue, damage skipped."""
    found: dict[int, bytes] = {}
    offset = store.queue_range("topic", queue_id)[0]
    while True:
        try:
            result = store.read("topic", queue_id, offset, 10, 1 << 20)
        except CorruptLogError as error:
            offset = max(error.next_offset, offset + 1)
            continue
        if result.status is not ReadStatus.FOUND:
            return found
        data = b"".join(
            region.file.read(region.offset, region.size_bytes) for region in result.regions
        )
        found.update(
            (record.queue_offset, record.body) for record in RecordBatch.FromString(data).records
        )
        offset = result.next_offset


def flip(disk: SimDisk, position: int) -> None:
    disk.flip_bit(f"/s/commitlog/{position - position % SEGMENT:020d}", position % SEGMENT * 8)


def test_a_store_that_is_well_has_no_findings() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    assert verify("/s", disk=disk) == [], "while it is open"
    store.close()
    assert verify("/s", disk=disk) == []


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(StoreSettingsError):
        verify("/nothing", disk=SimDisk())


def test_corruption_is_found_with_its_messages_and_verify_changes_nothing() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    position = store.read("topic", 1, 4, 1, 1).regions[0].offset
    store.close()
    flip(disk, position + 60)
    before = disk.files()
    (finding,) = verify("/s", disk=disk)
    assert finding.kind is FindingKind.CORRUPTION
    assert finding.start_position == position
    assert [(m.topic, m.queue_id, m.first_offset, m.end_offset) for m in finding.lost] == [
        ("topic", 1, 4, 5)
    ]
    assert "CRC-32C" in finding.explanation
    assert disk.files() == before


def test_a_torn_tail_is_told_apart() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    end = store.appended_position
    store.close()
    disk.overwrite(f"/s/commitlog/{end - end % SEGMENT:020d}", end % SEGMENT + 5, b"garbage")
    (finding,) = verify("/s", disk=disk)
    assert (finding.kind, finding.start_position) == (FindingKind.TORN_TAIL, end)


def test_a_consume_queue_that_disagrees_is_found() -> None:
    disk = SimDisk()
    filled_store(disk).close()
    disk.overwrite(f"/s/consumequeue/topic/1/{0:020d}", 20 * 3 + 8, b"\x01\x02")
    (finding,) = verify("/s", disk=disk)
    assert finding.kind is FindingKind.WRONG_ENTRY
    assert "offset 3" in finding.explanation


@pytest.mark.parametrize("bit", range(160))
def test_any_flipped_bit_of_a_consume_queue_is_found(bit: int) -> None:
    disk = SimDisk()
    filled_store(disk, 10).close()
    disk.flip_bit(f"/s/consumequeue/topic/1/{0:020d}", 20 * 8 * 3 + bit)
    (finding,) = verify("/s", disk=disk)
    assert finding.kind is FindingKind.WRONG_ENTRY
    assert "offset 3" in finding.explanation


@pytest.mark.parametrize("count", [1, 3, 5, 7, 9])
def test_a_topic_that_was_made_again_between_two_others_of_its_messages_is_well(count: int) -> None:
    disk = SimDisk()
    store = open_store(disk)
    again = partial(make_request, topic="again")
    store.topics.create(TopicConfig("again", 1, 1))
    store.append([again([b"first"] * 4)])
    while not SEGMENT < store.appended_position < SEGMENT + 500:
        store.append([make_request([b"of another topic" * 10])])
    # Both lives of the topic stand in this segment, and the first does not begin there.
    store.append([again([b"more"] * 3)])
    store.delete_topic("again")
    store.topics.create(TopicConfig("again", 1, 1))
    store.append([again([b"made again"] * count)])
    store.close()
    assert verify("/s", disk=disk) == []
    disk.flip_bit(f"/s/consumequeue/again/0/{0:020d}", 20 * 8 * (count - 1) + 3)
    (finding,) = verify("/s", disk=disk)
    assert finding.kind is FindingKind.WRONG_ENTRY
    assert f"offset {count - 1}" in finding.explanation


def test_consume_queues_that_no_start_would_go_by_are_no_finding() -> None:
    disk = SimDisk()
    filled_store(disk).close()
    disk.overwrite(f"/s/consumequeue/topic/1/{0:020d}", 20 * 3 + 8, b"\x01\x02")
    disk.overwrite("/s/consumequeue/table.bin", 0, b"PMQCQT01")
    assert verify("/s", disk=disk) == []


def test_repair_needs_the_store_for_itself() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    with pytest.raises(StoreLockedError):
        repair("/s", "/keep", disk=disk)
    store.close()
    assert repair("/s", "/keep", disk=disk) == []


def test_repair_takes_damage_out_keeps_it_and_leaves_what_follows_untouched() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    expected = {queue: bodies(store, queue) for queue in (0, 1)}
    first = store.read("topic", 1, 4, 1, 1).regions[0].offset
    store.close()
    damaged_bytes = disk.content(f"/s/commitlog/{0:020d}")
    flip(disk, first + 60)
    (finding,) = verify("/s", disk=disk)
    write_json_file(disk, f"/s/{TAIL_NAME}", {"may_be_lost": False})
    (done,) = repair("/s", "/keep", disk=disk)
    assert not disk.exists(f"/s/{TAIL_NAME}"), "nobody knows any more that it lacks nothing"
    assert (done.start_position, done.end_position) == (
        finding.start_position,
        finding.end_position,
    )
    kept = bytearray(disk.content(done.kept[0]))
    kept[60] ^= 1
    assert bytes(kept) == damaged_bytes[done.start_position : done.end_position]
    after = disk.content(f"/s/commitlog/{0:020d}")
    assert after[: done.start_position] == damaged_bytes[: done.start_position]
    assert after[done.end_position :] == damaged_bytes[done.end_position :]
    RecordBatch.FromString(after[: done.end_position])
    assert [found.kind for found in verify("/s", disk=disk)] == [FindingKind.REPAIRED]
    assert repair("/s", "/keep", disk=disk) == [], "once"
    store = open_store(disk)
    assert bodies(store, 0) == expected[0]
    assert bodies(store, 1) == {offset: body for offset, body in expected[1].items() if offset != 4}
    store.append([make_request([b"new"], queue_id=1)])
    assert bodies(store, 1)[len(expected[1])] == b"new"
    store.close()
    disk.remove("/s/consumequeue")
    store = open_store(disk)
    assert 4 not in bodies(store, 1)
    with pytest.raises(CorruptLogError):
        store.read("topic", 1, 4, 1, 1)


@pytest.mark.parametrize("how", ["first", "middle", "the end"])
def test_repair_takes_out_what_an_open_store_has_set_aside(how: str) -> None:
    disk = SimDisk()
    store = filled_store(disk)
    expected = {queue: bodies(store, queue) for queue in (0, 1)}
    offset = {"first": 0, "middle": 9, "the end": 20}[how]
    region = store.read("topic", 0, offset, 1, 1).regions[0]
    position = region.file.base_position + region.offset
    flip(disk, position + 60)
    store._clock.time_ms += 1000  # type: ignore[attr-defined]
    lost = {queue: set(expected[queue]) - set(bodies(store, queue)) for queue in (0, 1)}
    assert offset in lost[0]
    store.close()
    (finding,) = verify("/s", disk=disk)
    assert finding.kind is FindingKind.QUARANTINE
    (done,) = repair("/s", "/keep", disk=disk)
    assert (done.start_position, done.end_position) == (
        finding.start_position,
        finding.end_position,
    )
    assert [found.kind for found in verify("/s", disk=disk)] == [FindingKind.REPAIRED]
    assert repair("/s", "/keep", disk=disk) == []
    store = open_store(disk)
    assert {queue: set(expected[queue]) - set(bodies(store, queue)) for queue in (0, 1)} == lost
    store.append([make_request([b"new"], queue_id=0)])
    assert bodies(store, 0)[len(expected[0])] == b"new"
    RecordBatch.FromString(disk.content("/s/commitlog/00000000000000000000").rstrip(b"\0"))


def test_zeros_at_the_end_after_a_clean_stop_are_found_and_repaired() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    end = store.appended_position
    store.close()
    disk.overwrite(f"/s/commitlog/{end - end % SEGMENT:020d}", end % SEGMENT - 700, bytes(700))
    (finding,) = verify("/s", disk=disk)
    assert (finding.kind, finding.end_position) == (FindingKind.CORRUPTION, end)
    assert repair("/s", "/keep", disk=disk)
    assert [found.kind for found in verify("/s", disk=disk)] == [FindingKind.REPAIRED]
    store = open_store(disk)
    assert store.appended_position >= end
    assert len(bodies(store, 0)) < 21
    request = make_request([b"new"], queue_id=0)
    store.append([request])
    assert request.queue_offset == 21


def test_repair_of_a_torn_tail_keeps_what_it_cuts() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    end = store.appended_position
    store.close()
    disk.overwrite(f"/s/commitlog/{end - end % SEGMENT:020d}", end % SEGMENT, b"garbage")
    (done,) = repair("/s", "/keep", disk=disk)
    assert disk.content(done.kept[0]) == b"garbage"
    assert verify("/s", disk=disk) == []


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1 << 62))
def test_any_damage_can_be_repaired_and_costs_only_what_it_touches(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimDisk()
    store = filled_store(disk)
    end = store.appended_position
    expected = {queue: bodies(store, queue) for queue in (0, 1)}
    places = {
        (queue, offset): store.read("topic", queue, offset, 1, 1).regions[0]
        for queue, found in expected.items()
        for offset in found
    }
    spans = {
        key: (region.file.base_position + region.offset, region.size_bytes)
        for key, region in places.items()
    }
    store.close()
    hit: set[int] = set()
    for _ in range(rng.randrange(1, 4)):
        position = rng.randrange(end)
        size = rng.choice((1, 1, 30, 700, 5000))
        for base in range(position - position % SEGMENT, min(end, position + size), SEGMENT):
            first, last = max(position, base), min(position + size, base + SEGMENT, end)
            if first >= last or hit & set(range(first, last)):
                continue
            path = f"/s/commitlog/{base:020d}"
            other = bytes(
                octet ^ rng.randrange(1, 256)
                for octet in disk.content(path)[first - base : last - base]
            )
            disk.overwrite(path, first - base, other)
            hit.update(range(first, last))
    found = verify("/s", disk=disk)
    assert found
    assert repair("/s", "/keep", disk=disk)
    assert {finding.kind for finding in verify("/s", disk=disk)} == {FindingKind.REPAIRED}
    assert repair("/s", "/keep", disk=disk) == []
    lost = [(finding.start_position, finding.end_position) for finding in found]
    store = open_store(disk)
    for queue, records in expected.items():
        after = bodies(store, queue)
        assert after.items() <= records.items(), "never anything else than what was there"
        for offset in records.keys() - after.keys():
            at, size = spans[queue, offset]
            assert any(first <= at < last for first, last in lost)
    for (queue, offset), (at, size) in spans.items():
        if not any(first <= at < last for first, last in lost):
            assert offset in bodies(store, queue)
            assert not hit & set(range(at, at + size))


@pytest.mark.parametrize("at", [3, 31, 37, 41, 47], ids=lambda at: f"octet {at} of the head")
def test_a_head_whose_fields_are_damaged_together_with_what_stands_before_it_is_taken_out_too(
    at: int,
) -> None:
    disk = SimDisk()
    store = filled_store(disk)
    expected = {queue: bodies(store, queue) for queue in (0, 1)}
    store.close()
    # The seal that ends the segment, so that nothing but the head says with which CRC the chain goes on.
    flip(disk, SEGMENT - 20)
    flip(disk, SEGMENT + at)
    assert [finding.kind for finding in verify("/s", disk=disk)] == [FindingKind.CORRUPTION]
    assert repair("/s", "/keep", disk=disk)
    assert {finding.kind for finding in verify("/s", disk=disk)} == {FindingKind.REPAIRED}
    assert repair("/s", "/keep", disk=disk) == [], "once"
    store = open_store(disk)
    assert {queue: bodies(store, queue) for queue in (0, 1)} == expected
    request = make_request([b"new"])
    store.append([request])
    assert bodies(store, 0) == {**expected[0], request.queue_offset: b"new"}


def test_a_range_that_was_found_while_the_log_ended_behind_a_head_can_be_repaired() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.topics.create(TopicConfig("topic"))  # so that the next start has nothing to add behind the head
    store.close()
    store = filled_store(disk)
    assert SEGMENT < store.appended_position < 2 * SEGMENT
    store.close()
    first, second = (f"/s/commitlog/{base:020d}" for base in (0, SEGMENT))
    contents = disk.content(first), disk.content(second)
    disk.overwrite(second, 0, contents[0])
    disk.overwrite(first, 0, contents[1])
    disk.remove("/s/checkpoint")
    store = store_helpers.open_store(disk, corruption="quarantine")
    assert bodies(store, 0) == {}
    request = make_request([b"new"])
    store.append([request])
    store.close()
    assert {found.kind for found in verify("/s", disk=disk)} == {FindingKind.QUARANTINE}
    assert repair("/s", "/keep", disk=disk)
    assert {found.kind for found in verify("/s", disk=disk)} == {FindingKind.REPAIRED}
    assert bodies(open_store(disk), 0) == {request.queue_offset: b"new"}


def test_a_segment_that_is_too_long_is_refused_with_what_to_do() -> None:
    disk = SimDisk()
    filled_store(disk).close()
    path = f"/s/commitlog/{SEGMENT:020d}"
    whole = disk.content(path)
    disk.overwrite(path, SEGMENT, b"x")
    for refused in (lambda: open_store(disk), lambda: verify("/s", disk=disk)):
        with pytest.raises(StoreSettingsError, match=f"it has {SEGMENT + 1}: .*truncate -s {SEGMENT} {path}"):
            refused()
    disk.cut(path, SEGMENT)
    assert disk.content(path) == whole
    assert verify("/s", disk=disk) == []


def test_repair_that_is_interrupted_can_be_run_again() -> None:
    disk = SimDisk()
    filled_store(disk).close()
    for position in (500, 9000):
        flip(disk, position)
    write_json_file(disk, f"/s/{TAIL_NAME}", {"may_be_lost": False})
    damaged = disk.files("/s/commitlog")
    plain = disk.killed()
    repair("/s", "/keep", disk=plain)
    expected = plain.files("/s/commitlog")
    rng = random.Random(1)
    number = 0
    while True:
        number += 1
        attempt = disk.killed()
        attempt.fail_at(number, Fault.CRASH)
        try:
            repair("/s", "/keep", disk=attempt)
            cut = attempt.crash(rng, keep=0.0)
            assert cut.files("/keep") == attempt.files("/keep")
            assert len(cut.files("/keep")) == 4, "octets and description of each range"
            break
        except SimulatedCrash:
            pass
        after = attempt.crash(rng)
        if after.files("/s/commitlog") != damaged:
            assert not after.exists(f"/s/{TAIL_NAME}"), "it lacks something, and a broker may be started now"
        repair("/s", "/keep", disk=after)
        assert not after.exists(f"/s/{TAIL_NAME}")
        assert after.content("/s/checkpoint") == plain.content("/s/checkpoint"), "the next start reads the log from its start"
        assert after.files("/s/commitlog").keys() == expected.keys()
        assert [found.kind for found in verify("/s", disk=after)] == [FindingKind.REPAIRED] * 2
    assert number > 10


def test_dump_gives_records_and_seals_with_their_positions() -> None:
    disk = SimDisk()
    store = filled_store(disk, 3)
    store.close()
    items = list(dump("/s", disk=disk))
    assert [item.position for item in items] == sorted(item.position for item in items)
    assert sum(item.size_bytes for item in items) == store.appended_position
    records = [item.record for item in items if item.record is not None]
    assert [record.physical_offset for record in records] == [
        item.position for item in items if item.record is not None
    ]
    second = records[1].physical_offset
    assert next(iter(dump("/s", start_position=second, disk=disk))).position == second
    assert [
        item.position
        for item in dump("/s", start_position=second, end_position=second + 1, disk=disk)
    ] == [second]
    flip(disk, second + 20)
    assert [item.problem != "" for item in dump("/s", disk=disk)][-1]


def test_damage_in_front_of_good_appends_is_no_torn_tail_as_long_as_the_page_cache_is_the_same() -> (
    None
):
    disk = SimDisk()
    store = filled_store(disk)
    first = make_request([b"first"])
    requests = [first, *(make_request([b"more"]) for _ in range(3))]
    for request in requests:
        store.append([request])
    disk = disk.killed()
    flip(disk, first.physical_offset + 20)
    with pytest.raises(CorruptLogError):
        open_store(disk.killed())
    assert [found.kind for found in verify("/s", disk=disk)] == [FindingKind.CORRUPTION]
    other_cache = disk.crash(random.Random(1), keep=1.0)
    assert [found.kind for found in verify("/s", disk=other_cache)] == [FindingKind.TORN_TAIL]
    (done,) = repair("/s", "/kept", disk=disk)
    assert done.start_position == first.physical_offset
    store = open_store(disk)
    assert read_all(store, offset=first.queue_offset + 1) == [
        (request.queue_offset, b"more") for request in requests[1:]
    ]


def test_what_stands_unsynced_in_front_of_a_repair_is_synced_by_the_next_start() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request([b"synced"])])
    store.flush()
    requests = [make_request([bytes([index]) * 400]) for index in range(40)]
    for request in requests:
        store.append([request])
    assert requests[-1].physical_offset > 2 * SEGMENT
    disk = disk.killed()
    disk.cut(f"/s/commitlog/{SEGMENT:020d}", SEGMENT // 2)
    repair("/s", "/kept", disk=disk)
    before = bodies(open_store(disk), 0)
    assert 1 < len(before) < 1 + len(requests)
    after_power = disk.crash(random.Random(1), keep=0.0)
    assert bodies(open_store(after_power), 0) == before


def last_path(disk: SimDisk, end: int) -> str:
    """The newest segment that has anything in it."""
    return f"/s/commitlog/{end - end % SEGMENT:020d}"


def killed_without_its_newest_segment() -> tuple[SimDisk, int]:
    """A store that was killed before its first checkpoint; how many messages its queue 0 had."""
    disk = SimDisk()
    store = open_store(disk)
    for index in range(60):
        store.append([make_request([bytes([index]) * 150], queue_id=index % 2)])
    for structure in store._files.derived:
        structure.flush()
    after = disk.killed()
    assert not after.exists("/s/checkpoint")
    after.remove(last_path(after, store.appended_position))
    return after, store.queue_range("topic", 0)[1]


def older_segment_and_checkpoint() -> tuple[SimDisk, int]:
    """A store whose newest segment and checkpoint were put back as they were earlier."""
    disk = SimDisk()
    store = filled_store(disk)
    path = last_path(disk, store.appended_position)
    store.close()
    old, checkpoint = disk.content(path), disk.content("/s/checkpoint")
    store = open_store(disk)
    for _ in range(4):
        store.append([make_request([b"more"])])
    assert last_path(disk, store.appended_position) == path
    end_offset = store.queue_range("topic", 0)[1]
    store.close()
    disk.overwrite(path, 0, old)
    disk.overwrite("/s/checkpoint", 0, checkpoint)
    return disk, end_offset


def without_used_segments() -> tuple[SimDisk, int]:
    """A store of which only the segment is left that was made in advance."""
    disk = SimDisk()
    store = filled_store(disk)
    end_offset, end = store.queue_range("topic", 0)[1], store.appended_position
    store._log.prepare_next_segment()
    store.close()
    for base in range(0, end, SEGMENT):
        disk.remove(f"/s/commitlog/{base:020d}")
    assert len(disk.list("/s/commitlog")) == 1
    return disk, end_offset


@pytest.mark.parametrize(
    "damaged_store",
    [killed_without_its_newest_segment, older_segment_and_checkpoint, without_used_segments],
)
@pytest.mark.parametrize("was_started", [False, True])
def test_what_a_start_refuses_is_found_and_a_repair_makes_it_start(
    damaged_store: Callable[[], tuple[SimDisk, int]], was_started: bool
) -> None:
    disk, end_offset = damaged_store()
    if was_started:
        with pytest.raises(CorruptLogError):
            open_store(disk)
    else:
        with pytest.raises(CorruptLogError):
            open_store(disk.killed())
    found = verify("/s", disk=disk)
    assert FindingKind.CORRUPTION in {finding.kind for finding in found}
    assert repair("/s", "/keep", disk=disk)
    assert {finding.kind for finding in verify("/s", disk=disk)} == {FindingKind.REPAIRED}
    assert repair("/s", "/keep", disk=disk) == [], "once"
    store = open_store(disk)
    request = make_request([b"new"])
    store.append([request])
    assert request.queue_offset == end_offset, "no offset is given twice"
    assert bodies(store, 0)[end_offset] == b"new"
    with pytest.raises(CorruptLogError):
        store.read("topic", 0, end_offset - 1, 1, 1)


@pytest.mark.parametrize("led_epoch", [None, 1, 7])
@pytest.mark.parametrize("is_gone", [False, True])
def test_the_head_of_a_log_that_has_nothing_else_is_written_again_as_it_was(led_epoch: int | None, is_gone: bool) -> None:
    """Store-damage, seed 261: with another CRC in the head, no log could be walked that went on with the one that the checkpoint knows."""
    disk = SimDisk()
    head_only_store(disk, led_epoch)
    first = "/s/commitlog/00000000000000000000"
    whole = disk.content(first)[:SEAL_SIZE_BYTES]
    if is_gone:
        disk.remove(first)
    else:
        disk.overwrite(first, 0, bytes(SEAL_SIZE_BYTES))
    assert [found.kind for found in verify("/s", disk=disk)] == [FindingKind.CORRUPTION]
    assert len(repair("/s", "/keep", disk=disk)) == 1
    assert disk.content(first)[:SEAL_SIZE_BYTES] == whole
    assert [found.kind for found in verify("/s", disk=disk)] == [FindingKind.REPAIRED]
    assert repair("/s", "/keep", disk=disk) == [], "once"
    store = open_store(disk)
    request = make_request([b"new"])
    store.append([request])
    store.close()
    disk.remove("/s/config/quarantine.json")  # the log itself is right
    assert verify("/s", disk=disk) == []


@pytest.mark.parametrize("at", [*range(SEAL_SIZE_BYTES), None])
def test_a_head_that_is_set_aside_alone_is_written_again_as_it_was(at: int | None) -> None:
    """The checkpoint behind it knows its CRC, and what the log has behind that holds."""
    disk = SimDisk()
    head_only_store(disk, 3)
    whole = bodies(filled_store(disk), 0)
    disk = disk.killed()
    first = "/s/commitlog/00000000000000000000"
    head = disk.content(first)[:SEAL_SIZE_BYTES]
    if at is None:
        disk.overwrite(first, 0, bytes(SEAL_SIZE_BYTES))
    else:
        flip(disk, at)
    store = store_helpers.open_store(disk, corruption="quarantine")
    assert bodies(store, 0) == whole
    store.close()
    assert len(repair("/s", "/keep", disk=disk)) == 1
    assert disk.content(first)[:SEAL_SIZE_BYTES] == head
    disk.remove("/s/config/quarantine.json")
    assert verify("/s", disk=disk) == []
    assert bodies(open_store(disk), 0) == whole


def test_a_damaged_head_is_filled_together_with_what_is_damaged_behind_it() -> None:
    """A checkpoint right behind the head parts the two. The head has no room for a CRC of choice, to which the rest would be chained."""
    first = "/s/commitlog/00000000000000000000"
    disk = SimDisk()
    open_store(disk).close()
    whole = bodies(filled_store(disk), 0)
    disk = disk.killed()
    disk.overwrite(first, 9, bytes([9]) * 8)
    disk.overwrite(first, SEAL_SIZE_BYTES, bytes(SEGMENT - SEAL_SIZE_BYTES))
    assert [found.end_position for found in verify("/s", disk=disk)] == [SEAL_SIZE_BYTES, SEGMENT]
    with pytest.raises(CorruptLogError):
        open_store(disk.killed())
    (done,) = repair("/s", "/keep", disk=disk)
    assert (done.start_position, done.end_position) == (0, SEGMENT)
    assert [found.kind for found in verify("/s", disk=disk)] == [FindingKind.REPAIRED]
    assert repair("/s", "/keep", disk=disk) == [], "once"
    disk.remove("/s/config/quarantine.json")  # the log itself is right
    left = bodies(open_store(disk), 0)
    assert left
    assert left.items() <= whole.items()


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_log_that_was_lost_as_a_whole_is_filled_or_taken_off_the_list_if_nobody_knows_where_it_began(is_noted: bool) -> None:
    disk, end_offset = without_used_segments()
    store = store_helpers.open_store(disk, corruption="quarantine")
    request = make_request([b"new"])
    store.append([request])
    assert request.queue_offset == end_offset, "no offset is given twice"
    store.close()
    assert [found.kind for found in verify("/s", disk=disk)] == [FindingKind.QUARANTINE]
    if not is_noted:
        disk.remove(f"/s/{FRONT_NAME}")
        disk.remove("/s/checkpoint")
    assert len(repair("/s", "/keep", disk=disk)) == 1
    kinds = [FindingKind.REPAIRED] if is_noted else []
    assert [found.kind for found in verify("/s", disk=disk)] == kinds
    assert bodies(open_store(disk), 0) == {end_offset: b"new"}
