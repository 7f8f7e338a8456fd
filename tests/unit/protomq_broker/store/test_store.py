"""The store as a whole, on a simulated disk."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from protomq.v1.record_pb2 import Record, RecordBatch
from protomq.wire.hashing import key_hash_of, tag_code_of
from protomq.wire.topics import OFFSETS_TOPIC
from protomq_broker.store.appending import Appender
from protomq_broker.store.config import SEGMENT_SIZE_MAX_BYTES, SEGMENT_SIZE_MIN_BYTES, StoreConfig
from protomq_broker.store.errors import (
    AppendTooLargeError,
    CorruptLogError,
    DiskFullError,
    StoreFailedError,
    StoreLockedError,
    StoreSettingsError,
)
from protomq_broker.store.files.disk import DiskUsage, write_file_atomically
from protomq_broker.store.files.side_files import write_json_file
from protomq_broker.store.queues import log_reader
from protomq_broker.store.queues.consume_queue import ConsumeQueueDamagedError
from protomq_broker.store.queues.entry_check import opened_together
from protomq_broker.store.queues.log_reader import LogReader
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.same_messages import SentAgain
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools.offline import open_offline
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

from .log_helpers import ManualClock, make_request
from .store_helpers import (
    SEGMENT,
    commit,
    committed,
    open_store,
    read_all,
    read_all_until_damage,
)


def test_what_is_appended_is_read_back_with_its_stamps() -> None:
    clock = ManualClock(77)
    store = open_store(SimDisk(), clock=clock)
    request = make_request([b"a", b"b"], queue_id=3, tag="x", key="k", producer_id=9)
    position = store.append([request, make_request([b"c"], queue_id=3)])
    assert (request.queue_offset, request.physical_offset) == (0, 53)
    assert position == store.appended_position == store.readable_position
    assert read_all(store, queue_id=3) == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert store.store_time_of("topic", 3, 2) == 77
    with pytest.raises(KeyError):
        store.store_time_of("topic", 3, 3)
    result = store.read("topic", 3, 0, 10, 1 << 20)
    assert len(result.regions) == 1
    record = RecordBatch.FromString(
        result.regions[0].file.read(result.regions[0].offset, result.regions_size_bytes)
    ).records[1]
    assert (record.queue_id, record.store_time_ms, record.physical_offset) == (
        3,
        77,
        53 + int(result.starts[1]),
    )
    assert record.topic == "topic"


def test_the_four_statuses() -> None:
    store = open_store(SimDisk())
    assert store.read("topic", 0, 0, 1, 1).status is ReadStatus.NO_NEW_MSG
    assert store.read("topic", 0, 5, 1, 1).status is ReadStatus.OFFSET_ILLEGAL
    store.append([make_request([b"a", b"b"], tag="x")])
    assert store.read("topic", 0, 0, 1, 1).status is ReadStatus.FOUND
    at_end = store.read("topic", 0, 2, 1, 1)
    assert (at_end.status, at_end.next_offset) == (ReadStatus.NO_NEW_MSG, 2)
    beyond = store.read("topic", 0, 3, 1, 1)
    assert (beyond.status, beyond.next_offset) == (ReadStatus.OFFSET_ILLEGAL, 2)
    other = store.read("topic", 0, 0, 10, 1 << 20, frozenset({tag_code_of("y")}))
    assert (other.status, other.next_offset) == (ReadStatus.NO_MATCHED_MSG, 2)


@pytest.mark.parametrize("span_max", [4096, 3])
def test_entries_of_messages_that_are_no_neighbours_lead_to_their_records(span_max: int) -> None:
    store = open_store(SimDisk())
    for number in range(40):
        store.append([make_request([b"%02d" % number], queue_id=3), make_request([b"other"], queue_id=number % 3)])
    offsets = np.array([4, 9, 9, 30, 39])
    with mock.patch.object(log_reader, "SCAN_CHUNK_COUNT", span_max):
        entries = store.entries_at("topic", 3, offsets)
        assert entries is not None
        data, starts, is_sound = store.read_records(entries["position"].astype(np.int64), entries["size"].astype(np.int64))
        assert is_sound.all()
        fields = [data[start : start + size] for start, size in zip(starts, entries["size"], strict=True)]
        assert [RecordBatch.FromString(field).records[0].body for field in fields] == [b"%02d" % offset for offset in offsets]
        for queue_id, wanted in ((3, [4, 40]), (3, [-1, 4]), (9, [0, 1])):
            assert store.entries_at("topic", queue_id, np.array(wanted)) is None


def three_queues(disk: SimDisk, *, count: int = 40) -> Store:
    """Messages in turns in queues 0 to 2, whose entries stand in files."""
    store = open_store(disk)
    for number in range(count):
        store.append([make_request([b"%d/%d" % (queue_id, number)], queue_id=queue_id) for queue_id in range(3)])
    store.close()
    return open_store(disk)


Pieces = list[tuple[int, list[int]]]


def as_arrays(pieces: Pieces) -> list[tuple[int, NDArray[np.int64]]]:
    return [(queue_id, np.array(offsets, np.int64)) for queue_id, offsets in pieces]


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, [0]), (1, [39])],
        [(0, list(range(40))), (1, list(range(3, 9))), (2, [0, 39])],
        [(2, [7, 7, 30]), (0, [5, 6]), (2, [1])],
    ],
)
def test_entries_of_several_queues_are_those_of_each(pieces: Pieces) -> None:
    store = three_queues(SimDisk())
    together = store.entries_together("topic", as_arrays(pieces))
    assert together is not None
    alone = [store.entries_at("topic", queue_id, offsets) for queue_id, offsets in as_arrays(pieces)]
    assert [entry for part in alone if part is not None for entry in part.tolist()] == together.tolist()


@pytest.mark.parametrize(
    "other",
    [(1, [39, 40]), (1, [-1, 0]), (7, [0])],
)
def test_entries_of_several_queues_of_which_one_is_not_there_are_not_given(other: tuple[int, list[int]]) -> None:
    store = three_queues(SimDisk())
    assert store.entries_together("topic", as_arrays([(0, [0, 1])])) is not None
    assert store.entries_together("topic", as_arrays([(0, [0, 1]), other])) is None


def test_entries_that_are_in_memory_yet_are_not_read_together() -> None:
    store = open_store(SimDisk())
    store.append([make_request([b"a", b"b"], queue_id=0), make_request([b"c"], queue_id=1)])
    assert store.entries_together("topic", as_arrays([(0, [0, 1]), (1, [0])])) is None


def test_entries_of_several_queues_of_which_one_is_damaged_are_not_given() -> None:
    disk = SimDisk()
    three_queues(disk).close()
    (path,) = [path for path in disk.files() if "/consumequeue/topic/1/" in path]
    store = open_store(disk)
    pieces = as_arrays([(0, [0, 1]), (1, [5, 6])])
    assert store.entries_together("topic", pieces) is not None
    disk.flip_bit(path, 7 * 160 + 3)
    assert store.entries_together("topic", pieces) is None, "the entry behind the last one shows whether that one is right"
    assert store.entries_together("topic", as_arrays([(0, [0, 1]), (1, [4, 5])])) is not None


def test_entries_of_several_queues_that_are_out_of_order_are_not_given() -> None:
    store = three_queues(SimDisk())
    pieces = as_arrays([(0, [3, 4]), (1, [3, 4])])

    def disordered(*arguments: Any) -> Any:
        found = opened_together(*arguments)
        assert found is not None
        entries = found.copy()
        entries["position"][1] = entries["position"][0]
        return entries

    with mock.patch.object(log_reader, "opened_together", disordered):
        assert store.entries_together("topic", pieces) is None
    assert store.entries_together("topic", pieces) is not None


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 3_000), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 100), st.integers(1, 40_000)), max_size=6),
)
def test_what_a_read_gives_does_not_depend_on_the_sizes_of_records_that_were_read_before(
    body_sizes: list[int], reads: list[tuple[int, int, int]]
) -> None:
    store = open_store(SimDisk())
    for size_bytes in body_sizes:
        store.append([make_request([bytes(size_bytes)])])
    queue = store._queues.queue("topic", 0)
    for offset, count_max, size_max_bytes in reads:
        result = store.read("topic", 0, offset, count_max, size_max_bytes)
        # As the first read of the queue.
        queue.record_size_bytes = 0
        expected = store.read("topic", 0, offset, count_max, size_max_bytes)
        assert (result.status, result.next_offset) == (expected.status, expected.next_offset)
        assert result.sizes.tolist() == expected.sizes.tolist()
        assert result.regions == expected.regions


def test_queues_of_several_topics_in_one_log_do_not_leak_into_each_other() -> None:
    store = open_store(SimDisk())
    for index in range(30):
        store.append(
            [
                make_request([bytes([index])], topic="a"),
                make_request([b"secret" * index], topic="b"),
                make_request([b"x"], topic="a"),
            ]
        )
    result = store.read("a", 0, 0, 100, 1 << 20)
    data = b"".join(region.file.read(region.offset, region.size_bytes) for region in result.regions)
    assert {record.topic for record in RecordBatch.FromString(data).records} == {"a"}
    assert b"secret" not in data


@pytest.mark.parametrize("fails", [False, True])
def test_a_store_that_could_not_write_its_last_checkpoint_has_not_closed_clean(fails: bool) -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.topics.create(TopicConfig("topic"))
    store.append([make_request([b"x"])])
    if fails:
        disk.fail_at(1, Fault.EIO, for_ever=True)
    store.close()
    assert store.is_closed_clean is not fails


def test_a_clean_restart_finds_everything_and_leaves_no_abort_file() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.topics.create(TopicConfig("topic"))
    for index in range(55):
        store.append(
            [make_request([bytes([index]) * 200], queue_id=index % 3, tag="t", key=f"k{index}")]
        )
    expected = [read_all(store, queue_id=queue) for queue in range(3)]
    assert disk.exists("/s/abort")
    store.close()
    assert not disk.exists("/s/abort")
    files = disk.files()
    store = open_store(disk)
    assert [read_all(store, queue_id=queue) for queue in range(3)] == expected
    (record,) = map(Record.FromString, store.find_by_key_hash("topic", key_hash_of("k7")))
    assert record.body == bytes([7]) * 200
    store.close()
    # Each opening begins an epoch: the table of epochs and the checkpoint know of it.
    others = ("config", "lock", "checkpoint")
    assert {
        path: data
        for path, data in disk.files().items()
        if not any(name in path for name in others)
    } == {path: data for path, data in files.items() if not any(name in path for name in others)}


def test_a_second_broker_on_the_same_store_is_refused_and_told_by_whom() -> None:
    disk = SimDisk()
    store = open_store(disk)
    with pytest.raises(StoreLockedError) as caught:
        open_store(disk)
    assert caught.value.pid > 0
    store.close()
    open_store(disk).close()


def test_another_segment_size_is_refused() -> None:
    disk = SimDisk()
    open_store(disk).close()
    with pytest.raises(StoreSettingsError, match="segment_size_bytes"):
        open_store(disk, segment=2 * SEGMENT)
    disk.remove("/s/config/store.json")
    with pytest.raises(StoreSettingsError):
        open_store(disk, segment=SEGMENT // 2)


def write_plain(disk: SimDisk, path: str, value: object) -> None:
    """As versions before checksums did."""
    write_file_atomically(disk, path, json.dumps(value).encode())


@pytest.mark.parametrize("write", [write_json_file, write_plain])
def test_a_store_of_another_format_is_refused_and_left_as_it_is(
    write: Callable[[SimDisk, str, object], None],
) -> None:
    disk = SimDisk()
    open_store(disk).close()
    path = "/s/config/store.json"
    write(disk, path, {"format_version": 1, "segment_size_bytes": SEGMENT})
    before = disk.files("/s")
    with pytest.raises(StoreSettingsError, match="format_version = 1"):
        open_store(disk)
    with pytest.raises(StoreSettingsError, match="format_version = 1"):
        open_offline("/s", disk)
    assert {**disk.files("/s"), "/s/lock": b""} == {**before, "/s/lock": b""}


def test_settings_that_are_damaged_come_back_from_the_segments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = "/s/config/store.json"
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request()])
    store.close()
    whole = disk.content(path)
    # One bit of each octet at least, and each bit of an octet somewhere.
    for bit in range(0, len(whole) * 8, 7):
        disk.flip_bit(path, bit)
        if bit % 49 == 0:
            with pytest.raises(StoreSettingsError, match=re.escape(path)):
                open_offline("/s", disk)
        caplog.clear()
        store = open_store(disk)
        assert read_all(store) == [(0, b"body")]
        store.close()
        assert disk.content(path) == whole
        assert f"{path} is damaged" in caplog.text


def test_settings_that_are_missing_are_made_anew_by_a_start_and_the_offline_commands_say_so() -> (
    None
):
    disk = SimDisk()
    open_store(disk).close()
    path = "/s/config/store.json"
    whole = disk.content(path)
    disk.remove(path)
    with pytest.raises(StoreSettingsError, match=f"{path} is missing: a start of the broker"):
        open_offline("/s", disk)
    open_store(disk).close()
    assert disk.content(path) == whole
    assert open_offline("/s", disk).folder.segment_size_bytes == SEGMENT


def test_damaged_settings_do_not_open_a_store_with_another_segment_size() -> None:
    disk = SimDisk()
    open_store(disk).close()
    disk.flip_bit("/s/config/store.json", 5)
    with pytest.raises(
        StoreSettingsError, match=f"segment_size_bytes = {SEGMENT}, not {2 * SEGMENT}"
    ):
        open_store(disk, segment=2 * SEGMENT)


def test_store_time_never_falls_when_the_clock_jumps_back() -> None:
    disk = SimDisk()
    clock = ManualClock(1000)
    store = open_store(disk, clock=clock)
    store.append([make_request()])
    clock.time_ms = 10
    store.append([make_request()])
    assert [store.store_time_of("topic", 0, offset) for offset in (0, 1)] == [1000, 1000]
    store.close()
    store = open_store(disk, clock=clock)
    store.append([make_request()])
    assert store.store_time_of("topic", 0, 2) == 1000


def test_offsets_by_time() -> None:
    clock = ManualClock(0)
    store = open_store(SimDisk(), clock=clock)
    for time_ms in (10, 20, 20, 30):
        clock.time_ms = time_ms
        store.append([make_request()])
    assert [
        store.offset_at_time("topic", 0, time_ms) for time_ms in (0, 10, 11, 20, 21, 30, 31)
    ] == [0, 0, 1, 1, 3, 3, 4]


def test_under_sync_flush_nothing_is_readable_before_it_is_synced() -> None:
    store = open_store(SimDisk(), sync_flush=True)
    arrived: list[tuple[str, int]] = []
    flushed: list[int] = []
    store.positions.on_arrival.append(arrived.extend)
    store.positions.on_flushed.append(flushed.append)
    position = store.append([make_request([b"a"], key="k")])
    assert store.queue_range("topic", 0) == (0, 0)
    assert store.read("topic", 0, 0, 1, 1).status is ReadStatus.NO_NEW_MSG
    assert list(store.find_by_key_hash("topic", key_hash_of("k"))) == []
    assert arrived == []
    assert store.flush() == position
    assert (arrived, flushed) == ([("topic", 0)], [position])
    assert read_all(store) == [(0, b"a")]


def test_under_async_flush_arrivals_are_told_at_once_and_a_failing_listener_harms_nobody() -> None:
    store = open_store(SimDisk())

    def listener(keys: Iterable[tuple[str, int]]) -> None:
        raise RuntimeError("a defect")

    store.positions.on_arrival.append(listener)
    store.append([make_request()])
    assert store.queue_range("topic", 0) == (0, 1)


def test_a_failed_fsync_stops_writes_for_good_and_says_so() -> None:
    disk = SimDisk()
    store = open_store(disk, sync_flush=True)
    store.append([make_request([b"a"])])
    store.flush()
    store.append([make_request([b"b"])])
    told: list[int] = []
    store.positions.on_flushed.append(told.append)
    before = store.flushed_position
    disk.fail_at(1, Fault.SYNC_LOST)
    assert store.flush() == before
    assert told == [before], "waiters are woken, to see the refusal"
    assert "fsync" in store.write_refusal
    with pytest.raises(StoreFailedError):
        store.append([make_request([b"c"])])
    assert store.flush() == before, "it is never tried again"
    store.close()
    restarted = open_store(disk.killed(), sync_flush=True)
    assert read_all(restarted) == [(0, b"a"), (1, b"b")]
    restarted.append([make_request([b"d"])])


def test_after_a_failed_fsync_and_a_restart_what_is_flushed_survives_a_power_cut() -> None:
    disk = SimDisk()
    store = open_store(disk, sync_flush=True)
    store.append([make_request([b"a"])])
    disk.fail_at(1, Fault.SYNC_LOST)
    store.flush()
    again = disk.killed()
    restarted = open_store(again, sync_flush=True)
    assert read_all(restarted) == [(0, b"a")]
    after = again.crash(random.Random(3), keep=0.0)
    assert read_all(open_store(after, sync_flush=True)) == [(0, b"a")]


def test_after_a_failed_sync_of_derived_files_the_old_checkpoint_stays_and_the_log_goes_on() -> (
    None
):
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request([b"a"])])
    store.checkpoint()
    old = disk.content("/s/checkpoint")
    store.append([make_request([b"b"])])
    store.flush()
    disk.plan = lambda operation: (
        Fault.SYNC_LOST if "consumequeue" in operation.path and "sync" in operation.name else None
    )
    with pytest.raises(OSError):
        store.checkpoint()
    disk.plan = None
    store.append([make_request([b"c"])])
    store.checkpoint()
    store.close()
    assert disk.content("/s/checkpoint") == old
    assert disk.exists("/s/abort")
    for after in (disk.killed(), disk.crash(random.Random(1), keep=0.0)):
        assert read_all(open_store(after)) == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_a_log_that_failed_is_still_synced() -> None:
    disk = SimDisk()
    store = open_store(disk)
    position = store.append([make_request([b"a"])])
    disk.fail_at(1, Fault.EIO)
    with pytest.raises(StoreFailedError):
        store.append([make_request([b"b"])])
    assert store.flush() == position
    store.close()
    assert read_all(open_store(disk.crash(random.Random(1), keep=0.0))) == [(0, b"a")]


def test_a_full_disk_refuses_and_is_taken_again_later() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request([b"a"])])
    disk.fail_at(1, Fault.ENOSPC)
    with pytest.raises(DiskFullError):
        store.append([make_request([b"b"])])
    store.append([make_request([b"c"])])
    assert read_all(store) == [(0, b"a"), (1, b"c")]


def test_a_send_that_failed_may_be_tried_again() -> None:
    disk = SimDisk()
    store = open_store(disk)
    request = make_request([b"a"], producer_id=5, sequence=0)
    assert store.find_repeated(request) is None
    disk.fail_at(1, Fault.ENOSPC)
    with pytest.raises(DiskFullError):
        store.append([request])
    request = make_request([b"a"], producer_id=5, sequence=0)
    assert store.find_repeated(request) is None
    store.append([request])
    found = store.find_repeated(make_request([b"a"], producer_id=5, sequence=0))
    assert found is not None
    assert (found.queue_offset, found.physical_offset) == (0, request.physical_offset)


def test_a_group_that_is_too_large_changes_nothing_and_fits_when_it_is_split() -> None:
    store = open_store(SimDisk())
    requests = [
        make_request([bytes(1500)], producer_id=5, sequence=sequence) for sequence in range(8)
    ]
    assert sum(len(r.region.data) for r in requests) > store.append_size_max_bytes
    for request in requests:
        assert store.find_repeated(request) is None
    before = store.appended_position
    with pytest.raises(AppendTooLargeError) as caught:
        store.append(requests)
    assert caught.value.size_max_bytes == store.append_size_max_bytes
    assert (store.appended_position, store.write_refusal) == (before, "")
    for half in (requests[:4], requests[4:]):
        for request in half:
            assert store.find_repeated(request) is None, "no claim is left behind"
        store.append(half)
    assert len(read_all(store)) == 8


def test_a_group_in_parts_and_a_group_copied_together_give_the_same_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = []
    for parts_max in (0, 512):
        monkeypatch.setattr("protomq_broker.store.appending._PARTS_MAX", parts_max)
        disk = SimDisk()
        store = open_store(disk, segment=1 << 20)
        store.append([make_request([bytes((turn,)) * 20_000], queue_id=turn) for turn in range(3)])
        store.append([make_request([b"small"]), make_request([b"x" * 40_000, b"y"])])
        fd = disk.open("/s/commitlog/00000000000000000000")
        logs.append(disk.pread(fd, 1 << 20, 0))
        assert [body for _, body in read_all(store)][1:] == [b"small", b"x" * 40_000, b"y"]
    assert logs[0] == logs[1]


def test_segments_below_a_position_are_deleted_and_the_queue_begins_later() -> None:
    disk = SimDisk()
    store = open_store(disk)
    for index in range(40):
        store.append([make_request([bytes([index]) * 700])])
    reading = store.read("topic", 0, 0, 4, 1 << 20)
    held = [region.file.read(region.offset, region.size_bytes) for region in reading.regions]
    assert store.delete_segments_below(3 * SEGMENT) == 0, "a recovery would need them"
    store.checkpoint()
    assert store.delete_segments_below(3 * SEGMENT + 5) == 3 * SEGMENT
    assert [
        region.file.read(region.offset, region.size_bytes) for region in reading.regions
    ] == held
    start, end = store.queue_range("topic", 0)
    assert 0 < start < end == 40
    assert store.read("topic", 0, 0, 4, 1 << 20).status is ReadStatus.OFFSET_ILLEGAL
    expected = read_all(store)
    assert [offset for offset, _ in expected] == list(range(start, 40))
    store.close()
    assert read_all(open_store(disk)) == expected


def test_everything_derived_can_be_lost_even_when_old_segments_are_gone() -> None:
    disk = SimDisk()
    store = open_store(disk)
    for index in range(40):
        store.append([make_request([bytes([index]) * 700], key=f"k{index}")])
    store.checkpoint()
    store.delete_segments_below(2 * SEGMENT)
    expected = read_all(store)
    store.close()
    for path in ("/s/consumequeue", "/s/index", "/s/repeatedsends", "/s/checkpoint"):
        disk.remove(path)
    store = open_store(disk)
    assert read_all(store) == expected
    assert [
        Record.FromString(data).body for data in store.find_by_key_hash("topic", key_hash_of("k39"))
    ] == [bytes([39]) * 700]


def test_lost_derived_files_are_rebuilt_byte_for_byte() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.topics.put([TopicConfig(f"t{number}") for number in range(3)])
    for index in range(50):
        store.append(
            [
                make_request(
                    [bytes([index]) * 99, b"2"],
                    queue_id=index % 4,
                    topic=f"t{index % 3}",
                    producer_id=index % 5,
                )
            ]
        )
    store.close()
    before = {
        path: data
        for path, data in disk.files("/s/consumequeue").items()
        if not path.endswith("table.bin")
    }
    disk.remove("/s/consumequeue")
    open_store(disk).close()
    after = {
        path: data
        for path, data in disk.files("/s/consumequeue").items()
        if not path.endswith("table.bin")
    }
    assert after == before


def test_a_message_id_inside_a_batch_is_found() -> None:
    store = open_store(SimDisk())
    store.append(
        [make_request([bytes([index]) for index in range(20)], producer_id=5, sequence=100)]
    )
    (data,) = store.find_by_message_id("topic", (5, 0, 113))
    assert Record.FromString(data).body == b"\x0d"
    assert list(store.find_by_message_id("topic", (5, 0, 99))) == []
    assert list(store.find_by_message_id("topic", (6, 0, 113))) == []


def test_damage_in_quarantine_is_answered_with_an_error_that_says_where_to_go_on() -> None:
    disk = SimDisk()
    store = open_store(disk)
    requests = []
    for index in range(12):
        request = make_request([bytes([index]) * 100], queue_id=index % 2)
        store.append([request])
        requests.append(request)
    store.flush()
    store.append([make_request([b"end"], queue_id=0), make_request([b"end"], queue_id=1)])
    disk = disk.killed()
    disk.flip_bit(f"/s/commitlog/{0:020d}", (requests[6].physical_offset + 50) * 8)
    with pytest.raises(CorruptLogError):
        open_store(disk.killed())
    store = open_store(disk, corruption="quarantine")
    assert [offset for offset, _ in read_all(store, queue_id=1)] == list(range(7))
    assert [offset for offset, _ in read_all_until_damage(store, 0)] == [0, 1, 2]
    with pytest.raises(CorruptLogError) as caught:
        store.read("topic", 0, 3, 10, 1 << 20)
    assert caught.value.next_offset == 4
    assert [offset for offset, _ in read_all(store, offset=4)] == [4, 5, 6]
    request = make_request([b"new"])
    store.append([request])
    assert request.queue_offset == 7, "no offset is given twice"
    store.close()
    disk.remove("/s/consumequeue")
    store = open_store(disk, corruption="refuse")
    with pytest.raises(CorruptLogError) as caught:
        store.read("topic", 0, 3, 10, 1 << 20)
    assert caught.value.next_offset == 4
    assert len(read_all(store, offset=4)) == 4


def test_lost_lists_of_topics_and_offsets_come_back_from_the_log() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.topics.create(TopicConfig("topic"))
    store.append([make_request(queue_id=2)])
    incarnation = store.topics.create(TopicConfig("topic")).incarnation
    commit(store, "group", "topic", 2, 1)
    store.close()
    disk.remove("/s/config/topics.json")
    disk.remove("/s/config/consumerOffsets.json")
    store = open_store(disk)
    restored = store.topics.find("topic")
    assert restored is not None
    assert restored.incarnation == incarnation
    assert store.topics.find(OFFSETS_TOPIC) is None
    assert committed(store, "group", "topic", 2) == 1


def test_a_start_that_comes_upon_a_damaged_queue_of_offsets_makes_it_anew() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request(queue_id=2)])
    for offset in (1, 2, 3):
        commit(store, "group", "topic", 2, offset)
    store.close()
    path = f"/s/consumequeue/{OFFSETS_TOPIC}/0/{0:020d}"
    whole = disk.content(path)
    disk.remove("/s/config/consumerOffsets.json")
    disk.flip_bit(path, 160 + 3)
    store = open_store(disk)
    assert committed(store, "group", "topic", 2) == 3
    assert len(read_all(store, queue_id=2)) == 1
    store.close()
    assert disk.content(path) == whole


def test_a_filter_never_passes_over_a_message_whose_entry_was_flipped() -> None:
    disk = SimDisk()
    store = open_store(disk)
    for _ in range(5):
        store.append([make_request(tag="red")])
    store.close()
    path = f"/s/consumequeue/topic/0/{0:020d}"
    whole = disk.content(path)
    for bit in range(160):
        disk.flip_bit(path, 2 * 160 + bit)
        store = open_store(disk)
        red = frozenset((tag_code_of("red"),))
        assert store.read("topic", 0, 0, 10, 1 << 20, red).record_count == 2
        with pytest.raises(ConsumeQueueDamagedError):
            store.read("topic", 0, 2, 10, 1 << 20, red)
        store.close()
        store = open_store(disk)
        assert store.read("topic", 0, 0, 10, 1 << 20, red).record_count == 5, "rebuilt"
        store.close()
        assert disk.content(path) == whole


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("is_power_cut", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_start_after_a_crash_needs_no_space(*, is_checkpointed: bool, is_power_cut: bool, follows: bool) -> None:
    """Files of queues go further than their table says, and `lock`, which nobody syncs, may be empty after a power cut."""
    disk = SimDisk()
    store = open_store(disk)
    store.topics.create(TopicConfig("topic"))
    store.append([make_request([b"a" * 500])])
    if is_checkpointed:
        store.checkpoint()
    store.append([make_request([b"b" * 500]), make_request([b"c"], queue_id=1)])
    store.flush()
    for structure in store._files.derived:
        structure.flush()
    disk = disk.crash(random.Random(1), keep=0.0) if is_power_cut else disk.killed()
    assert (disk.content("/s/lock") == b"") is is_power_cut
    disk.capacity_bytes -= disk.usage("/s").free_bytes
    # So few are held in memory before they are written.
    held = ("queues.consume_queue_table._REPLAYED_ENTRIES_MAX", "index.index.ROWS_PER_RUN")
    with mock.patch(f"protomq_broker.store.{held[0]}", 1), mock.patch(f"protomq_broker.store.{held[1]}", 1):
        store = open_store(disk, follows=follows)
    assert [store.appended_end_offset("topic", queue_id) for queue_id in (0, 1)] == [2, 1]
    disk.capacity_bytes = 1 << 40
    store.close()
    store = open_store(disk)
    assert len(read_all(store)) == 2
    store.close()
    assert verify("/s", disk=disk) == []


def test_damage_that_is_noted_already_makes_no_start_need_space() -> None:
    disk = SimDisk()
    store = open_store(disk, corruption="quarantine")
    store.topics.create(TopicConfig("topic"))
    for number in range(4):
        store.append([make_request([b"%d" % number * 500])])
    store.checkpoint()
    found = store.read("topic", 0, 1, 1, 1)
    position = RecordBatch.FromString(found.fields_of(found.octets())[0]).records[0].physical_offset
    disk.flip_bit(f"/s/commitlog/{0:020d}", 8 * (position + 20))
    store.prove_again(0, store.appended_position)
    assert [damage.start_position for damage in store.damaged_ranges] == [position]
    for _ in range(2):
        store.append([make_request([b"more"])])
        store.flush()
        for structure in store._files.derived:
            structure.flush()
        disk = disk.killed()
        disk.capacity_bytes -= disk.usage("/s").free_bytes
        store = open_store(disk, corruption="quarantine")
        disk.capacity_bytes = 1 << 40
    assert store.appended_end_offset("topic", 0) == 6
    assert [damage.start_position for damage in store.damaged_ranges] == [position]


def test_a_start_on_a_full_disk_can_still_be_read_and_takes_writes_when_there_is_space() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.topics.create(TopicConfig("topic"))
    while store.appended_position < SEGMENT:
        store.append([make_request([b"a" * 500])])
    store.close()
    capacity, disk.capacity_bytes = disk.capacity_bytes, 0
    store = open_store(disk)
    count = len(read_all(store))
    assert count > 10
    refused = 0
    for _ in range(20):
        try:
            store.append([make_request([b"b" * 500])])
            count += 1
        except DiskFullError:
            refused += 1
    assert refused
    assert len(read_all(store)) == count
    disk.capacity_bytes = capacity
    store.append([make_request([b"c" * 500])])
    assert read_all(store)[-1] == (count, b"c" * 500)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 62), st.booleans())
def test_nothing_acknowledged_is_lost_over_any_sequence_of_appends_kills_and_power_cuts(
    seed: int, sync_flush: bool
) -> None:
    rng = random.Random(seed)
    disk = SimDisk()
    store = open_store(disk, sync_flush=sync_flush)
    model: dict[tuple[str, int], list[bytes]] = {}
    safe: dict[tuple[str, int], int] = {}

    def remember_safe() -> None:
        for key, bodies in model.items():
            safe[key] = len(bodies)

    for _ in range(rng.randrange(5, 40)):
        step = rng.random()
        if step < 0.6:
            requests = []
            for _ in range(rng.randrange(1, 4)):
                key = (f"t{rng.randrange(2)}", rng.randrange(2))
                bodies = [rng.randbytes(rng.randrange(300)) for _ in range(rng.randrange(1, 4))]
                requests.append(make_request(bodies, topic=key[0], queue_id=key[1]))
                model.setdefault(key, []).extend(bodies)
            store.append(requests)
        elif step < 0.7:
            store.flush()
            remember_safe()
        elif step < 0.8:
            store.checkpoint()
            remember_safe()
        elif step < 0.85:
            disk.write_back(rng)
        elif step < 0.9:
            store.close()
            remember_safe()
            store = open_store(disk, sync_flush=sync_flush)
        elif step < 0.95:
            disk = disk.killed()
            store = open_store(disk, sync_flush=sync_flush)
            store.flush()
            remember_safe()
        else:
            disk = disk.crash(rng)
            store = open_store(disk, sync_flush=sync_flush)
            for key, bodies in model.items():
                end = store.queue_range(*key)[1]
                assert safe.get(key, 0) <= end <= len(bodies)
                del bodies[end:]
        for key, bodies in model.items():
            if not sync_flush:
                assert store.queue_range(*key) == (0, len(bodies))
    store.flush()
    for key, bodies in model.items():
        assert read_all(store, *key) == list(enumerate(bodies))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 62))
def test_a_process_that_ends_at_any_operation_leaves_a_store_that_opens_with_all_that_was_synced(
    seed: int,
) -> None:
    rng = random.Random(seed)
    crash_at = rng.randrange(1, 120)
    disk = SimDisk()
    disk.fail_at(crash_at, Fault.CRASH)
    appended = synced = 0
    try:
        store = open_store(disk)
        for index in range(30):
            store.append([make_request([index.to_bytes(2, "little") * 200])])
            appended += 1
            if rng.random() < 0.3:
                store.flush()
                synced = appended
            if rng.random() < 0.1:
                store.checkpoint()
                synced = appended
        store.close()
        synced = appended
    except SimulatedCrash:
        pass
    for after in (disk.crash(rng), disk.crash(rng, keep=0.0), disk.killed()):
        bodies = [body for _, body in read_all(open_store(after))]
        assert synced <= len(bodies) <= appended + 1
        assert bodies == [index.to_bytes(2, "little") * 200 for index in range(len(bodies))]


class DiskWithQuota(SimDisk):
    """A disk that is far from full: what it refuses is more than somebody's share."""

    def usage(self, path: str) -> DiskUsage:
        return DiskUsage(1_000_000, 900_000)


def test_a_full_disk_is_said_once_and_seen_until_there_is_space(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = DiskWithQuota()
    store = open_store(disk)
    while not store.write_refusal:
        disk.capacity_bytes = 1 if store.appended_position > 2 * SEGMENT - 1000 else 1 << 40
        with caplog.at_level("WARNING", "protomq_broker"), suppress(DiskFullError):
            store.append([make_request([bytes(300)])])
    for _ in range(3):
        with pytest.raises(DiskFullError):
            store.append([make_request([bytes(300)])])
        store._upkeep.keeper.turn()
    assert "space" in store.write_refusal
    assert [r.getMessage() for r in caplog.records if "writes: refused" in r.getMessage()]
    assert len([r for r in caplog.records if r.getMessage().startswith("writes: ")]) == 1
    disk.capacity_bytes = 1 << 40
    with caplog.at_level("WARNING", "protomq_broker"):
        store._upkeep.keeper.turn()
    assert store.write_refusal == ""
    assert "accepted again" in caplog.records[-1].getMessage()
    assert store.last_refusal == "the last append found the disk full"
    store.append([make_request([bytes(300)])])
    assert store.last_refusal == ""


def test_a_store_lacks_room_before_it_needs_it() -> None:
    disk = SimDisk()
    store = open_store(disk)
    assert store.lack_of_room() == ""
    used_bytes = disk.capacity_bytes - disk.usage("/s").free_bytes
    disk.capacity_bytes = used_bytes + (1 << 20) - 1
    assert "1048575 bytes left" in store.lack_of_room()
    disk.capacity_bytes += 1
    assert store.lack_of_room() == ""
    store._refusals.refuse("housekeeping says so")
    assert store.lack_of_room() == "housekeeping says so"


def test_a_disk_that_is_smaller_than_a_segment_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = SimDisk()
    disk.capacity_bytes = SEGMENT // 2
    with caplog.at_level("WARNING", "protomq_broker"):
        store = open_store(disk)
        for _ in range(3):
            with pytest.raises(DiskFullError):
                store.append([make_request([b"a"])])
            store._upkeep.keeper.turn()
    assert store.write_refusal
    assert len([r for r in caplog.records if r.getMessage().startswith("writes: ")]) == 1
    disk.capacity_bytes = 1 << 40
    store._upkeep.keeper.turn()
    assert store.write_refusal == ""
    store.append([make_request([b"a"])])


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_folder_that_goes_under_a_running_broker_ends_the_writes(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    config = StoreConfig(segment_size_bytes=SEGMENT)
    store = Store.open(root, config, clock=ManualClock(), background=False)
    store.append([make_request([b"before"])])
    store._upkeep.keeper.turn()
    assert not store.write_refusal
    if how == "removed":
        shutil.rmtree(root)
    else:
        root.rename(tmp_path / "elsewhere")
    if how == "replaced":
        (root / "commitlog").mkdir(parents=True)
        (root / "commitlog" / ("0" * 20)).write_bytes(bytes(SEGMENT))
    failures: list[str] = []
    store.positions.on_flushed.append(lambda _: failures.append(store.log_failure))
    store._upkeep.keeper.turn()
    assert f"{root}/commitlog/{0:020d} is gone" in store.write_refusal
    assert failures == [store.write_refusal]
    assert [r.getMessage() for r in caplog.records if r.levelname == "CRITICAL"] == failures
    with pytest.raises(StoreFailedError, match="is gone"):
        store.append([make_request([b"after"])])
    assert read_all(store) == [(0, b"before")]
    store._upkeep.keeper.turn()
    store.close()
    assert root.exists() == (how == "replaced"), "nothing is rebuilt in its place"
    assert len([r for r in caplog.records if r.levelname == "CRITICAL"]) == 1


def test_a_send_that_finds_space_ends_the_refusal() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request([b"a"])])
    disk.fail_at(1, Fault.ENOSPC)
    with pytest.raises(DiskFullError):
        store.append([make_request([b"b"])])
    assert store.write_refusal
    disk.plan = None
    store.append([make_request([b"c"])])
    assert store.write_refusal == ""


def test_look_ups_find_nothing_of_a_deleted_topic_in_one_of_the_same_name() -> None:
    store = open_store(SimDisk())
    store.topics.create(TopicConfig("topic"))
    for producer_id in (1, 2):
        store.append([make_request([b"old", b"older"], key="k", producer_id=producer_id)])
    store.delete_topic("topic")
    store.topics.create(TopicConfig("topic"))

    def bodies_found() -> list[list[bytes]]:
        look_ups = [
            store.find_by_key_hash("topic", key_hash_of("k")),
            *(store.find_by_message_id("topic", (n, 0, s)) for n in (1, 3) for s in (0, 1)),
        ]
        return [[Record.FromString(data).body for data in found] for found in look_ups]

    assert bodies_found() == [[], [], [], [], []]
    store.append([make_request([b"new", b"newer"], key="k", producer_id=3)])
    assert bodies_found() == [[b"newer", b"new"], [], [], [b"new"], [b"newer"]]


def test_a_message_id_is_found_once_where_the_request_before_seems_to_reach_it_too() -> None:
    store = open_store(SimDisk())
    for sequence in range(0, 40, 10):
        store.append([make_request([b"x"] * 10, producer_id=5, sequence=sequence)])
    for sequence in range(40):
        (data,) = store.find_by_message_id("topic", (5, 0, sequence))
        assert Record.FromString(data).sequence == sequence


def test_hot_calls_of_the_face_go_straight_to_the_part_that_does_the_work() -> None:
    store = open_store(SimDisk())
    found = {store.append: Appender, store.read: LogReader, store.find_repeated: SentAgain}
    for function, part in found.items():
        assert isinstance(function.__self__, part)  # type: ignore[attr-defined]
    calls: list[str] = []
    requests = [make_request([b"x"])]
    store.append(requests)
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        store.append(requests)
    finally:
        sys.setprofile(None)
    assert calls[0] == "append"
    assert calls.count("append") <= 3, "of the appender, of the log, of the queue"
    store.close()


@pytest.mark.parametrize("size_bytes", [SEGMENT_SIZE_MIN_BYTES - 1, SEGMENT_SIZE_MAX_BYTES + 1, 999 << 40])
def test_a_segment_size_out_of_range_is_refused(size_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"segment_size_bytes must be 4096 \(4KiB\) to 68719476736 \(64GiB\)"):
        StoreConfig(segment_size_bytes=size_bytes)


def test_a_store_without_a_segment_takes_another_segment_size() -> None:
    """Its first start could not make one: the disk was too small for it."""
    disk = SimDisk()
    disk.plan = lambda operation: Fault.ENOSPC if "/commitlog/" in operation.path else None
    open_store(disk, segment=2 * SEGMENT).close()
    disk.plan = None
    assert not disk.list("/s/commitlog")
    store = open_store(disk)
    store.append([make_request()])
    store.close()
    with pytest.raises(StoreSettingsError, match=f"set store.segment_size_bytes to {SEGMENT}, or give"):
        open_store(disk, segment=2 * SEGMENT)
