from __future__ import annotations

import struct

import numpy as np
import pytest

from protomq_broker.store.files.side_files import OpenFiles
from protomq_broker.store.queues import consume_queue
from protomq_broker.store.queues.consume_queue import (
    ConsumeQueue,
    ConsumeQueueDamagedError,
    QueueFiles,
    StoreTime,
    first_disorder,
)
from protomq_broker.store.queues.entry_check import check_of, salt_of
from protomq_broker.store.queues.selection import ENTRY
from protomq_broker.testing.simdisk import SimDisk

FOLDER = "/s/consumequeue"
FIRST_FILE = f"{FOLDER}/topic/3/{0:020d}"


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consume_queue, "ENTRIES_PER_FILE", 8)
    monkeypatch.setattr(consume_queue, "FILE_SIZE_BYTES", 160)


def make_queue(disk: SimDisk | None = None, *, end_offset: int = 0) -> tuple[ConsumeQueue, SimDisk]:
    disk = disk or SimDisk()
    disk.make_folder(f"{FOLDER}/topic/3")
    queue = ConsumeQueue("topic", 3, 0, QueueFiles(FOLDER, OpenFiles(disk)))
    queue.reset(0, end_offset)
    return queue, disk


def fill(queue: ConsumeQueue, count: int) -> None:
    """Appends `count` entries: record n stands at 100 * n, has 100 bytes and tag n."""
    for offset in range(queue.end_offset, queue.end_offset + count):
        queue.append(100 * offset, 100, offset)


def rows(start: int, end: int) -> list[tuple[int, int, int]]:
    return [(100 * offset, 100, offset) for offset in range(start, end)]


def test_entries_on_disk_are_position_size_and_tag_code_in_20_bytes_two_of_them_check_bits():
    queue, disk = make_queue()
    queue.append(0x02030405060708, 0x0A0B0C, -2)
    queue.flush()
    check = check_of(0x02030405060708, 0x0A0B0C, -2, 0, salt_of("topic", 3))
    stored = bytearray(disk.content(FIRST_FILE))
    assert len(stored) == 20
    assert stored[7] | stored[11] << 8 == check
    stored[7] = stored[11] = 0
    assert stored == struct.pack("<QIq", 0x02030405060708, 0x0A0B0C, -2)


@pytest.mark.parametrize("bit", range(160))
def test_a_flipped_bit_is_told_and_never_believed(bit: int):
    queue, disk = make_queue()
    fill(queue, 8)
    queue.flush()
    queue.release_buffer()
    disk.flip_bit(FIRST_FILE, 5 * 160 + bit)
    assert queue.entries(0, 8).tolist() == rows(0, 5)
    with pytest.raises(ConsumeQueueDamagedError, match="check bits") as caught:
        queue.entry(5)
    assert caught.value.queue_offset == 5
    assert queue.entries(6, 8).tolist() == rows(6, 8)


def test_a_file_of_another_queue_is_not_believed():
    queue, disk = make_queue()
    other = ConsumeQueue("topic", 4, 0, QueueFiles(FOLDER, OpenFiles(disk)))
    disk.make_folder(f"{FOLDER}/topic/4")
    for each in (queue, other):
        fill(each, 8)
        each.flush()
        each.release_buffer()
    disk.overwrite(FIRST_FILE, 0, disk.content(f"{FOLDER}/topic/4/{0:020d}"))
    with pytest.raises(ConsumeQueueDamagedError):
        queue.entries(0, 8)
    assert other.entries(0, 8).tolist() == rows(0, 8)


def test_a_file_is_named_by_the_byte_offset_of_its_first_entry():
    queue, disk = make_queue()
    fill(queue, 17)
    queue.flush()
    assert disk.list(f"{FOLDER}/topic/3") == [f"{0:020d}", f"{160:020d}", f"{320:020d}"]


@pytest.mark.parametrize("flushed", [0, 1, 8, 19, 20])
@pytest.mark.parametrize("released", [False, True])
def test_entries_come_from_files_and_memory_alike(flushed: int, released: bool):
    queue, _ = make_queue()
    fill(queue, flushed)
    queue.flush()
    if released:
        queue.release_buffer()
    fill(queue, 20 - flushed)
    for start in range(20):
        for count in (1, 2, 7, 8, 9, 30):
            assert queue.entries(start, count).tolist() == rows(start, min(20, start + count))
        assert queue.entry(start) == rows(start, start + 1)[0]
    assert len(queue.entries(20, 5)) == 0


def test_many_at_once_are_the_same_as_one_by_one():
    queue, _ = make_queue()
    for count in (1, 5, 3, 40):
        offsets = np.arange(queue.end_offset, queue.end_offset + count)
        queue.append_many(100 * offsets, np.full(count, 100), offsets)
        if count == 5:
            queue.flush()
    assert queue.entries(0, 100).tolist() == rows(0, 49)


def test_a_view_stays_as_it_was_while_the_queue_grows_and_is_flushed():
    queue, _ = make_queue()
    fill(queue, 3)
    seen = queue.entries(0, 10)
    fill(queue, 100)
    queue.flush()
    queue.release_buffer()
    fill(queue, 10)
    assert seen.tolist() == rows(0, 3)


def test_a_buffer_with_new_entries_is_not_released():
    queue, _ = make_queue()
    fill(queue, 3)
    queue.release_buffer()
    assert queue.entries(0, 10).tolist() == rows(0, 3)


def test_a_queue_at_rest_holds_no_buffer():
    queue, _ = make_queue()
    fill(queue, 3)
    queue.flush()
    queue.release_buffer()
    assert queue._buffer is consume_queue._NO_BUFFER


@pytest.mark.parametrize("end", [0, 1, 7, 8, 9, 15, 16, 20])
@pytest.mark.parametrize("flushed", [0, 10, 20])
def test_a_cut_takes_entries_from_files_and_memory(end: int, flushed: int):
    queue, disk = make_queue()
    fill(queue, flushed)
    queue.flush()
    fill(queue, 20 - flushed)
    queue.cut(end)
    assert queue.end_offset == end
    assert queue.entries(0, 100).tolist() == rows(0, end)
    stored = b"".join(disk.files(FOLDER).values())
    assert len(stored) == 20 * min(end, flushed)
    fill(queue, 5)
    queue.flush()
    assert queue.entries(0, 100).tolist() == rows(0, end + 5)


def test_a_failed_flush_keeps_everything_and_goes_on_later():
    queue, disk = make_queue()
    fill(queue, 20)
    disk.capacity_bytes = 200
    with pytest.raises(OSError):
        queue.flush()
    assert queue.entries(0, 100).tolist() == rows(0, 20)
    disk.capacity_bytes = 1 << 20
    queue.flush()
    queue.release_buffer()
    assert queue.entries(0, 100).tolist() == rows(0, 20)


@pytest.mark.parametrize("is_flushed", [False, True])
def test_the_first_entry_at_or_beyond_a_position_is_found(is_flushed: bool):
    queue, _ = make_queue()
    fill(queue, 20)
    if is_flushed:
        queue.flush()
        queue.release_buffer()
    for position in range(0, 2100, 50):
        assert queue.first_at_or_beyond(position) == min(20, -(-position // 100))


def test_the_first_offset_follows_the_start_of_the_log():
    queue, _ = make_queue()
    assert queue.min_offset(0) == 0
    fill(queue, 20)
    assert queue.min_offset(0) == 0
    assert queue.min_offset(450) == 5
    assert queue.min_offset(450) == 5
    assert queue.min_offset(10_000) == 20
    assert len(queue.entries(3, 5)) == 0


def test_a_time_leads_to_the_first_message_stored_then_or_later():
    queue, _ = make_queue()
    fill(queue, 20)
    times = {100 * offset: 1000 + offset // 3 * 10 for offset in range(20)}
    for time_ms in range(990, 1080):
        expected = next((offset for offset in range(4, 20) if times[100 * offset] >= time_ms), 20)
        assert queue.offset_at_time(time_ms, 400, lambda at: StoreTime(times[at])) == expected


def test_lost_records_do_not_disturb_the_search_by_time():
    queue, _ = make_queue()
    fill(queue, 5)
    queue.append_many(np.full(5, 500), np.zeros(5, np.int64), np.full(5, -1))
    for offset in range(10, 15):
        queue.append(100 * offset, 100, offset)
    for time_ms in range(0, 1600, 50):
        found = queue.offset_at_time(time_ms, 0, StoreTime)
        stored = [(offset, 100 * offset) for offset in (*range(5), *range(10, 15))]
        expected = next((offset for offset, stored_ms in stored if stored_ms >= time_ms), 15)
        assert found == expected or (found in range(5, 10) and expected == 10)


def test_damage_is_found_on_reading_and_what_is_whole_before_it_is_given():
    queue, disk = make_queue()
    fill(queue, 20)
    queue.flush()
    queue.release_buffer()
    disk.overwrite(FIRST_FILE, 5 * 20, bytes(20))
    assert queue.entries(0, 100).tolist() == rows(0, 5)
    with pytest.raises(ConsumeQueueDamagedError) as caught:
        queue.entries(5, 100)
    assert caught.value.queue_offset == 5
    assert caught.value.path == FIRST_FILE
    assert queue.entries(6, 100).tolist() == rows(6, 20)


def test_an_old_entry_that_the_disk_brought_back_is_seen_by_the_one_behind_it():
    queue, disk = make_queue()
    fill(queue, 3)
    queue.append(900, 100, 3)  # of a tail that recovery has cut since
    queue.flush()
    old = disk.content(FIRST_FILE)[3 * 20 : 4 * 20]
    queue.cut(3)
    fill(queue, 5)
    queue.flush()
    queue.release_buffer()
    disk.overwrite(FIRST_FILE, 3 * 20, old)
    assert queue.entries(0, 3).tolist() == rows(0, 3)
    with pytest.raises(ConsumeQueueDamagedError, match="order"):
        queue.entries(3, 1)


def test_a_missing_or_short_file_is_damage():
    queue, disk = make_queue()
    fill(queue, 20)
    queue.flush()
    queue.release_buffer()
    disk.cut(f"{FOLDER}/topic/3/{320:020d}", 30)
    assert queue.entries(10, 100).tolist() == rows(10, 17)
    with pytest.raises(ConsumeQueueDamagedError, match="too short"):
        queue.entries(17, 1)
    again, _ = make_queue(SimDisk(), end_offset=5)
    with pytest.raises(ConsumeQueueDamagedError, match="gone"):
        again.entries(0, 1)


def test_order_is_checked_the_same_way_for_few_and_for_many():
    good = [(0, 100, 1), (100, 50, 1), (150, 0, -1), (203, 10, 0)]
    assert first_disorder(np.array(good, ENTRY)) is None
    for count in (1, 2, 3, 4):
        for index in range(count):
            wrong = list(good[:count])
            wrong[index] = (0, 0, 0)
            assert first_disorder(np.array(wrong, ENTRY)) == index
