"""Recovery: torn tails are cut, corruption is not, and doing it again changes nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.log.checkpoint import Checkpoint
from protomq_broker.store.log.commit_log import CommitLog
from protomq_broker.store.log.positions import LogTail, Positions
from protomq_broker.store.log.recovery import (
    DamagedRange,
    RecoveredLog,
    read_quarantine,
    rewrite_unsynced,
)
from protomq_broker.store.log.seals import LogWalker
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

from .log_helpers import QUARANTINE_PATH, SEGMENT_SIZE_BYTES, Log, make_record, recover

SEGMENT_0 = f"/s/commitlog/{0:020d}"


def checkpoint_at(tail: LogTail, *, flushed: int | None = None) -> Checkpoint:
    return Checkpoint(
        tail.position if flushed is None else flushed, tail.position, tail.crc32c, 0, 5, 0, 0
    )


def append_after(recovered: RecoveredLog, log: Log, *records: bytes) -> LogTail:
    """Goes on with a log that was recovered."""
    log.positions = Positions(recovered.tail, recovered.synced_position)
    log.log = CommitLog(log.disk, log.folder, log.positions)
    return log.append(*records)


def test_an_empty_store_recovers_to_an_empty_log() -> None:
    recovered, fields, _ = recover(SimDisk())
    assert recovered.tail == LogTail(0, 0, 0)
    assert fields == []


def test_a_log_that_was_killed_loses_nothing() -> None:
    log = Log()
    records = [make_record(bytes(size)) for size in range(0, 600, 20)]
    for record in records:
        log.append(record)
    recovered, fields, _ = recover(log.disk.killed(), same_cache=True)
    assert fields == records
    assert recovered.tail == log.log.tail


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_recovery_from_a_checkpoint_finds_the_same_end(from_checkpoint: bool) -> None:
    log = Log()
    middle = log.append(make_record(b"a"))
    log.append(make_record(b"b"))
    log.sync()
    checkpoint = checkpoint_at(middle) if from_checkpoint else None
    recovered, fields, _ = recover(log.disk.killed(), checkpoint=checkpoint)
    assert recovered.tail == log.log.tail
    assert fields == [make_record(b"a"), make_record(b"b")][1 if from_checkpoint else 0 :]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=4), min_size=1, max_size=12),
    st.randoms(),
    st.data(),
)
def test_a_log_cut_at_any_byte_recovers_to_whole_appends_and_a_second_recovery_changes_nothing(
    groups: list[list[int]], rng: random.Random, data: st.DataObject
) -> None:
    log = Log()
    appends: list[tuple[int, list[bytes]]] = []
    for group in groups:
        records = [make_record(rng.randbytes(size)) for size in group]
        appends.append((log.append(*records).position, records))
    cut = data.draw(st.integers(1, log.log.tail.position))
    disk = log.disk
    for base in sorted(log.folder.files):
        path = log.folder.path_at(base)
        kept = min(max(cut - base, 0), SEGMENT_SIZE_BYTES)
        disk.overwrite(path, kept, bytes(SEGMENT_SIZE_BYTES - kept))
    recovered, fields, _ = recover(disk)
    whole = [record for end, records in appends if end <= cut for record in records]
    assert fields[: len(whole)] == whole
    assert len(fields) - len(whole) in (0, *(len(r) for _, r in appends)), (
        "zeros at a seal's end may be its own"
    )
    once = disk.files("/s/commitlog")
    again, fields_again, folder = recover(disk)
    assert (again.tail, fields_again) == (recovered.tail, fields)
    assert disk.files("/s/commitlog") == once
    assert again.torn_size_bytes == 0
    log.folder = folder
    append_after(again, log, make_record(b"new"))
    assert recover(disk)[1] == [*fields, make_record(b"new")]


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=14), st.integers(0, 1 << 62), st.data())
def test_after_a_power_cut_a_prefix_of_whole_appends_is_left_with_all_that_was_synced(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    disk = SimDisk()
    log = Log(disk)
    records: list[bytes] = []
    synced = 0
    for size in sizes:
        records.append(make_record(rng.randbytes(size)))
        log.append(records[-1])
        action = rng.random()
        if action < 0.2:
            log.sync()
            synced = len(records)
        elif action < 0.5:
            disk.write_back(rng)
    after = disk.crash(rng)
    recovered, fields, _ = recover(after)
    assert fields == records[: len(fields)]
    assert len(fields) >= synced
    once = after.files("/s/commitlog")
    assert recover(after)[0].tail == recovered.tail
    assert after.files("/s/commitlog") == once
    assert once == after.crash(rng, keep=0.0).files("/s/commitlog"), (
        "what recovery leaves is durable"
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 62))
def test_recovery_that_is_interrupted_at_any_operation_ends_in_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimDisk()
    log = Log(disk)
    for _ in range(rng.randrange(1, 12)):
        log.append(make_record(rng.randbytes(rng.randrange(900))))
        if rng.random() < 0.2:
            log.sync()
        disk.write_back(rng, 0.3)
    image = disk.crash(rng, keep=0.5)
    plain = image.crash(rng, keep=1.0)
    expected = recover(plain)[0].tail
    bytes_expected = plain.files("/s/commitlog")
    number = 0
    while True:
        number += 1
        attempt = image.crash(rng, keep=1.0)
        attempt.fail_at(number, Fault.CRASH)
        try:
            recover(attempt)
            break
        except SimulatedCrash:
            pass
        cut = attempt.crash(rng)
        assert recover(cut)[0].tail == expected
        assert {path: data for path, data in cut.files("/s/commitlog").items() if any(data)} == {
            path: data for path, data in bytes_expected.items() if any(data)
        }
    assert number < 30


def test_what_is_cut_is_counted_from_the_end_of_the_log_to_the_last_octet_that_was_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log()
    end = log.append(make_record(b"a")).position
    log.disk.overwrite(SEGMENT_0, end + 100, b"\x00torn\x00tail\x00\x00")
    recovered, _, _ = recover(log.disk)
    assert recovered.torn_size_bytes == 100 + len(b"\x00torn\x00tail")
    assert f"cut at position {end}" in caplog.text
    assert f"{recovered.torn_size_bytes} bytes are lost" in caplog.text


def flip_every_kind_of_byte(log: Log, start: int, end: int) -> list[int]:
    return [*range(start, end, 11), end - 60, end - 30, end - 1]


def test_a_flipped_bit_below_the_synced_position_refuses_the_start_and_changes_nothing() -> None:
    log = Log()
    first = log.append(make_record(b"a" * 50))
    second = log.append(make_record(b"b" * 50))
    log.append(make_record(b"c"))
    log.sync()
    third = log.append(make_record(b"d"))  # its seal says what is synced
    log.append(make_record(b"e"))
    for at in flip_every_kind_of_byte(log, first.position, second.position):
        disk = log.disk.killed()
        disk.flip_bit(SEGMENT_0, at * 8 + at % 8)
        before = disk.files()
        with pytest.raises(CorruptLogError) as caught:
            recover(disk)
        assert caught.value.position == first.position
        assert second.position <= caught.value.end_position <= third.position
        assert disk.files() == before


def test_a_flipped_bit_behind_the_synced_position_is_a_torn_tail_after_a_power_cut() -> None:
    log = Log()
    first = log.append(make_record(b"a"))
    log.append(make_record(b"b"))
    log.append(make_record(b"c"))
    disk = log.disk
    disk.flip_bit(SEGMENT_0, (first.position + 20) * 8)
    recovered, fields, _ = recover(disk, same_cache=False)
    assert fields == [make_record(b"a")]
    assert recovered.torn_size_bytes > 0


def test_a_flipped_bit_behind_the_synced_position_is_corruption_if_the_page_cache_survived() -> (
    None
):
    log = Log()
    first = log.append(make_record(b"a"))
    second = log.append(make_record(b"b"))
    log.append(make_record(b"c"))
    disk = log.disk
    disk.flip_bit(SEGMENT_0, (first.position + 20) * 8)
    with pytest.raises(CorruptLogError) as caught:
        recover(disk, same_cache=True)
    assert (caught.value.position, caught.value.end_position) == (first.position, second.position)


def test_the_checkpoint_proves_corruption_where_nothing_follows() -> None:
    log = Log()
    first = log.append(make_record(b"a"))
    second = log.append(make_record(b"b"))
    disk = log.disk
    disk.flip_bit(SEGMENT_0, (first.position + 20) * 8)
    with pytest.raises(CorruptLogError, match="had been synced up to"):
        recover(disk, checkpoint=checkpoint_at(first, flushed=second.position))


@pytest.mark.parametrize("damage", ["removed", "emptied", "cut", "all"])
def test_a_log_that_is_shorter_than_what_was_synced_is_refused(damage: str) -> None:
    log = Log()
    for _ in range(12):
        log.append(make_record(bytes(700)))
    tail = log.log.tail
    log.sync()
    disk = log.disk
    if damage == "removed":
        disk.remove(log.folder.path_at(SEGMENT_SIZE_BYTES))
    elif damage == "emptied":
        disk.overwrite(log.folder.path_at(tail.position), 0, bytes(SEGMENT_SIZE_BYTES))
    elif damage == "cut":
        disk.cut(log.folder.path_at(tail.position), 100)
    else:
        disk.remove("/s/commitlog")
    with pytest.raises(CorruptLogError):
        recover(disk, checkpoint=Checkpoint(tail.position, 0, 0, 0, 0, 0, 0))


def test_quarantine_keeps_what_holds_on_both_sides_and_is_remembered() -> None:
    log = Log()
    records = [make_record(bytes([index]) * 300) for index in range(20)]
    tails = [log.append(record) for record in records]
    log.sync()
    log.append(make_record(b"end"))
    disk = log.disk
    disk.flip_bit(
        log.folder.path_at(tails[4].position), (tails[4].position + 100) % SEGMENT_SIZE_BYTES * 8
    )
    recovered, fields, folder = recover(disk, mode="quarantine")
    assert fields == [*records[:5], *records[6:], make_record(b"end")]
    assert [(d.start_position, d.end_position) for d in recovered.damaged] == [
        (tails[4].position, tails[5].position)
    ]
    assert recovered.tail == log.log.tail
    assert read_quarantine(disk, QUARANTINE_PATH) == recovered.damaged
    log.folder = folder
    append_after(recovered, log, make_record(b"more"))
    assert recover(disk, mode="refuse")[1] == [*fields, make_record(b"more")]


def test_quarantine_of_an_end_that_is_gone_goes_on_in_a_new_segment() -> None:
    log = Log()
    first = log.append(make_record(b"a"))
    second = log.append(make_record(b"b"))
    log.sync()
    disk = log.disk
    disk.flip_bit(SEGMENT_0, (first.position + 20) * 8)
    checkpoint = Checkpoint(second.position, 0, 0, 0, 0, 0, 0)
    recovered, fields, folder = recover(disk, checkpoint=checkpoint, mode="quarantine")
    assert fields == [make_record(b"a")]
    assert recovered.tail.position == SEGMENT_SIZE_BYTES
    log.folder = folder
    append_after(recovered, log, make_record(b"new"))
    assert recover(disk, checkpoint=checkpoint)[1] == [make_record(b"a"), make_record(b"new")]
    damaged = DamagedRange(
        first.position, SEGMENT_SIZE_BYTES, first.crc32c, recovered.damaged[0].reason
    )
    assert recovered.damaged == [damaged]


def test_damage_at_the_head_of_a_segment_costs_only_the_appends_it_touches() -> None:
    log = Log()
    records = [make_record(bytes([index]) * 300) for index in range(20)]
    for record in records:
        log.append(record)
    log.sync()
    log.append(make_record(b"end"))
    disk = log.disk
    walker = LogWalker(disk, log.folder, 0, 0)
    seals = [seal for block in walker for seal in block.seals]
    padding = next(seal for seal in seals if seal.record_count == 0 and seal.size_bytes)
    disk.flip_bit(SEGMENT_0, (padding.start_position + 10) * 8)
    recovered, fields, _ = recover(disk, mode="quarantine")
    assert fields == [*records, make_record(b"end")], "padding was hit, no record"
    assert [(d.start_position, d.end_position) for d in recovered.damaged] == [
        (padding.start_position, SEGMENT_SIZE_BYTES)
    ]


def test_old_segments_may_be_gone() -> None:
    log = Log()
    records = [make_record(bytes([index]) * 300) for index in range(20)]
    for record in records:
        log.append(record)
    log.sync()
    log.log.remove_segments_below(2 * SEGMENT_SIZE_BYTES)
    disk = log.disk
    recovered, fields, _ = recover(disk)
    assert recovered.tail == log.log.tail
    assert fields == records[-len(fields) :]


def test_an_fsync_that_failed_is_made_good_by_writing_anew() -> None:
    disk = SimDisk()
    log = Log(disk)
    log.append(make_record(b"a"))
    log.sync()
    synced = log.log.tail.position
    log.append(make_record(b"b"))
    disk.fail_at(1, Fault.SYNC_LOST)
    with pytest.raises(OSError):
        disk.fdatasync(log.folder.files[0].fd)
    rng = random.Random(1)
    lost = disk.killed()
    for segment in Log(lost).folder.files.values():
        lost.fdatasync(segment.fd)
    assert recover(lost.crash(rng, keep=1.0))[1] == [make_record(b"a")], (
        "another fsync alone reports success for nothing"
    )
    good = disk.killed()
    recovered, fields, folder = recover(good, same_cache=True)
    rewrite_unsynced(good, folder, synced, recovered.tail.position)
    assert fields == [make_record(b"a"), make_record(b"b")]
    assert recover(good.crash(rng, keep=0.0))[1] == fields


def test_recovery_knows_what_the_seals_say_was_synced() -> None:
    log = Log()
    synced = log.append(make_record(b"a"))
    log.sync()
    log.append(make_record(b"b"))
    recovered, _, _ = recover(log.disk.killed())
    assert recovered.synced_position == synced.position < recovered.tail.position
