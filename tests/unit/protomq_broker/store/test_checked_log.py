"""Nothing leaves the store that was not checked since it came from the disk, by whatever way, with no scrub to wait for."""

from __future__ import annotations

import logging
import random
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from protomq.v1.record_pb2 import Record, RecordBatch
from protomq.wire.hashing import key_hash_of
from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.files.disk import write_file_atomically
from protomq_broker.store.log import checked_log
from protomq_broker.store.log.boundaries import BoundaryFiles
from protomq_broker.store.log.seals import chain_holds
from protomq_broker.store.queues.consume_queue import ConsumeQueueDamagedError
from protomq_broker.store.queues.entry_check import salt_of, sealed
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.start import derived_recovery
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools.repair import repair
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

from .log_helpers import ManualClock, make_request
from .store_helpers import SEGMENT, open_store, read_all

COUNT = 96
QUEUES = (0, 1)


def filled_store(disk: SimDisk, clock: ManualClock | None = None) -> Store:
    """A store of five segments, still open."""
    store = open_store(disk, clock=clock)
    for index in range(COUNT):
        if clock is not None:
            clock.time_ms += 1000
        store.append(
            [
                make_request(
                    [body_of(index)],
                    queue_id=index % 2,
                    key=f"k{index}",
                    producer_id=7,
                    sequence=index,
                )
            ]
        )
    store.flush()
    return store


def body_of(index: int) -> bytes:
    return bytes([index]) * 300


def segment_path(position: int) -> str:
    return f"/s/commitlog/{position - position % SEGMENT:020d}"


def written(disk: SimDisk) -> list[str]:
    """The segments that hold anything, oldest first: the one behind them is made before it is needed."""
    return sorted(path for path, content in disk.files("/s/commitlog").items() if any(content))


def newest(disk: SimDisk) -> str:
    return written(disk)[-1]


def scan(store: Store, queue_id: int) -> tuple[dict[int, bytes], list[int]]:
    """(what a queue gives, the offsets for which it says CORRUPT_LOG): every offset in its range is one or the other."""
    offset, end = store.queue_range("topic", queue_id)
    given: dict[int, bytes] = {}
    lost: list[int] = []
    while offset < end:
        try:
            result = store.read("topic", queue_id, offset, 7, 1 << 20)
        except CorruptLogError as error:
            lost += range(offset, max(error.next_offset, offset + 1))
            offset = error.next_offset
            continue
        assert result.status is ReadStatus.FOUND
        data = b"".join(r.file.read(r.offset, r.size_bytes) for r in result.regions)
        records = RecordBatch.FromString(data).records
        assert [record.queue_offset for record in records] == list(
            range(offset, result.next_offset)
        )
        given.update((record.queue_offset, record.body) for record in records)
        offset = result.next_offset
    return given, lost


def check_nothing_wrong(store: Store, *, lost_some: bool = True) -> int:
    """Every offset that was given is the message that was sent, or told as lost; how many were lost. A second has passed."""
    store._clock.time_ms += 1000  # type: ignore[attr-defined]
    count = 0
    for queue_id in QUEUES:
        given, lost = scan(store, queue_id)
        assert sorted([*given, *lost])[: COUNT // 2] == list(range(COUNT // 2)), (
            "no queue ends early"
        )
        for offset, body in given.items():
            if offset < COUNT // 2:
                assert body == body_of(2 * offset + queue_id)
        count += len(lost)
    assert bool(count) == lost_some
    assert bool(store.damaged_ranges) == lost_some
    return count


def send_more(store: Store) -> None:
    """New messages get offsets that were never given."""
    for queue_id in QUEUES:
        request = make_request([b"more"], queue_id=queue_id)
        store.append([request])
        assert request.queue_offset == COUNT // 2
        assert scan(store, queue_id)[0][COUNT // 2] == b"more"


def zero_the_end(disk: SimDisk, end: int) -> None:
    disk.overwrite(newest(disk), end % SEGMENT - 3000, bytes(3000))


def swap_the_last_two(disk: SimDisk, end: int) -> None:
    disk.swap_files(*written(disk)[-2:])


def overwrite_the_newest(disk: SimDisk, end: int) -> None:
    disk.overwrite(newest(disk), 0, random.Random(1).randbytes(SEGMENT))


def overwrite_the_one_before(disk: SimDisk, end: int) -> None:
    disk.overwrite(written(disk)[-2], 0, random.Random(1).randbytes(SEGMENT))


HARMS: list[Callable[[SimDisk, int], None]] = [
    zero_the_end, swap_the_last_two, overwrite_the_newest, overwrite_the_one_before,
]  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_after_a_clean_stop_harm_to_the_last_segments_is_never_taken_for_the_end_of_the_log(
    harm: Callable[[SimDisk, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimDisk()
    store = filled_store(disk)
    end = store.appended_position
    store.close()
    harm(disk, end)
    before = disk.files("/s/commitlog")
    if harm is not overwrite_the_one_before:  # that one no start has to read
        with pytest.raises(CorruptLogError, match="protomq log verify"):
            open_store(disk)
        assert disk.files("/s/commitlog") == before, "nothing is changed"
    with caplog.at_level(logging.ERROR):
        store = open_store(disk, corruption="quarantine")
        lost = check_nothing_wrong(store)
    assert "corrupt log" in caplog.text
    send_more(store)
    store.close()
    store = open_store(disk)
    assert check_nothing_wrong(store) == lost
    for path, data in before.items():
        assert (
            disk.content(path)[: len(data.rstrip(b"\0"))] == data.rstrip(b"\0")
            or harm is zero_the_end
        )


@pytest.mark.parametrize("harm", HARMS)
def test_after_a_kill_harm_to_the_last_segments_is_never_taken_for_the_end_of_the_log(
    harm: Callable[[SimDisk, int], None],
) -> None:
    disk = SimDisk()
    store = filled_store(disk)
    store.checkpoint()
    end = store.appended_position
    disk = disk.killed()
    harm(disk, end)
    store = open_store(disk, corruption="quarantine")
    check_nothing_wrong(store)
    send_more(store)


@pytest.mark.parametrize("is_refused_first", [False, True])
@pytest.mark.parametrize("harm", HARMS)
def test_no_queue_ends_early_where_only_its_files_tell_of_lost_messages(
    harm: Callable[[SimDisk, int], None], is_refused_first: bool
) -> None:
    disk = SimDisk()
    store = filled_store(disk)
    for derived in store._files.derived:
        derived.flush()
    end = store.appended_position
    disk = disk.killed()
    harm(disk, end)
    if is_refused_first:
        with pytest.raises(CorruptLogError):
            open_store(disk)
        disk = disk.killed()
    store = open_store(disk, corruption="quarantine")
    check_nothing_wrong(store)
    disk = disk.killed()
    store = open_store(disk)
    check_nothing_wrong(store)
    send_more(store)
    store.close()
    disk.remove("/s/consumequeue")
    check_nothing_wrong(open_store(disk))


def test_no_queue_ends_early_where_the_start_that_set_it_aside_was_killed_at_any_step() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    for derived in store._files.derived:
        derived.flush()
    end = store.appended_position
    disk = disk.killed()
    zero_the_end(disk, end)
    step, is_done = 0, False
    while not is_done:
        step += 1
        image = disk.killed()
        image.fail_at(step, Fault.CRASH)
        try:
            open_store(image, corruption="quarantine")
            is_done = True
        except SimulatedCrash:
            pass
        check_nothing_wrong(open_store(image.killed(), corruption="quarantine"))
    assert step > 20


def test_a_queue_whose_first_messages_are_lost_does_not_begin_late() -> None:
    disk = SimDisk()
    filled_store(disk).close()
    disk.overwrite(segment_path(0), 0, random.Random(1).randbytes(SEGMENT))
    disk.remove("/s/consumequeue")
    store = open_store(disk, corruption="quarantine")
    check_nothing_wrong(store)
    assert [store.queue_range("topic", queue_id)[0] for queue_id in QUEUES] == [0, 0]


def test_swapped_segments_behind_the_checkpoint_are_not_a_torn_tail() -> None:
    disk = SimDisk()
    filled_store(disk)
    disk = disk.killed()
    before = disk.files("/s/commitlog")
    swap_the_last_two(disk, 0)
    swapped = disk.files("/s/commitlog")
    with pytest.raises(CorruptLogError, match="content of another one"):
        open_store(disk)
    assert disk.files("/s/commitlog") == swapped
    swap_the_last_two(disk, 0)
    assert disk.files("/s/commitlog") == before
    check_nothing_wrong(open_store(disk), lost_some=False)


@pytest.mark.parametrize("seed", range(30))
def test_damage_anywhere_in_front_of_the_checkpoint_is_told_at_the_first_read(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimDisk()
    filled_store(disk).close()
    path = rng.choice(written(disk)[:-1])
    disk.overwrite(path, rng.randrange(SEGMENT - 700), rng.randbytes(rng.choice((1, 60, 700))))
    store = open_store(disk)
    check_nothing_wrong(store)
    send_more(store)


@pytest.mark.parametrize("seed", range(30))
def test_damage_anywhere_under_an_open_store_is_told_at_once(seed: int) -> None:
    """What was checked, or written by the store itself, and has left the page cache since is checked again."""
    rng = random.Random(seed)
    disk = SimDisk()
    store = filled_store(disk)
    if seed % 2:
        store.close()
        store = open_store(disk)
    check_nothing_wrong(store, lost_some=False)
    position = rng.randrange(53, store.appended_position - 700)
    position = min(position, position - position % SEGMENT + SEGMENT - 700)
    disk.overwrite(
        segment_path(position), position % SEGMENT, rng.randbytes(rng.choice((1, 60, 700)))
    )
    check_nothing_wrong(store)
    send_more(store)
    store.close()
    store = open_store(disk)
    check_nothing_wrong(store)
    store.close()


@pytest.mark.parametrize("seed", range(10))
def test_damage_between_two_looks_is_told_at_once_where_the_writer_is_gone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second has passed since the kernel was asked for the whole segment: a read asks for its own part."""
    monkeypatch.setattr(checked_log, "PIECE_SIZE_BYTES", 1_024)
    rng = random.Random(seed)
    disk = SimDisk()
    store = filled_store(disk)
    check_nothing_wrong(store, lost_some=False)
    position = rng.randrange(53, store.appended_position - SEGMENT - 700)
    position = min(position, position - position % SEGMENT + SEGMENT - 700)
    disk.overwrite(segment_path(position), position % SEGMENT, rng.randbytes(700))
    before_ms = store._clock.time_ms  # type: ignore[attr-defined]
    lost = [offset for queue_id in QUEUES for offset in scan(store, queue_id)[1]]
    assert 1 <= len(lost) <= 8, "an append or two and what stands up to the next one that holds"
    assert store._clock.time_ms == before_ms  # type: ignore[attr-defined]
    check_nothing_wrong(store)


def test_what_stands_beside_a_piece_that_left_the_cache_is_not_walked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checked_log, "PIECE_SIZE_BYTES", 1_024)
    disk = SimDisk()
    store = filled_store(disk)
    check_nothing_wrong(store, lost_some=False)
    looked_at: list[tuple[int, int]] = []

    def noted(data: bytes, position: int, *crcs: int) -> bool:
        looked_at.append((position, position + len(data)))
        return chain_holds(data, position, *crcs)

    monkeypatch.setattr(checked_log, "chain_holds", noted)
    monkeypatch.setattr(checked_log, "LogWalker", None)  # the records of the piece were walked once
    path = segment_path(SEGMENT)
    disk.overwrite(path, 2_000, disk.files("/s/commitlog")[path][2_000:2_001])
    check_nothing_wrong(store, lost_some=False)
    [(start, end)] = looked_at
    assert start <= SEGMENT + 2_000 < end
    assert end - start < SEGMENT // 2


def test_what_stands_behind_a_range_set_aside_is_walked_before_it_is_given() -> None:
    """A look-up in front of the range asks for more than its record: up into the range, and no further."""
    disk = SimDisk()
    store = filled_store(disk)
    entries = [store._queues.queue("topic", q).entry(o) for o in range(COUNT // 2) for q in QUEUES]
    store.close()
    first = next(i for i, (position, _, _) in enumerate(entries) if position > SEGMENT + 1_000)
    position, _, _ = entries[first]
    disk.overwrite(segment_path(position), position % SEGMENT + 5, bytes(2_500))
    later = next(i for i, entry in enumerate(entries) if entry[0] > position + 4_500)
    place, place_size, _ = entries[later]
    assert segment_path(place) == segment_path(position)
    disk.overwrite(segment_path(place), (place + place_size // 2) % SEGMENT, b"harm")
    store = open_store(disk)
    before = store._reader.record_at(entries[first - 1][0])
    assert before is not None
    assert Record.FromString(before).body == body_of(first - 1)
    assert store._reader.record_at(entries[first - 1][0]) == before
    assert store._reader.record_at(place) is None
    assert len(store.damaged_ranges) == 2


def test_the_last_append_under_an_open_store_too() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    disk.flip_bit(newest(disk), (store.appended_position % SEGMENT - 100) * 8)
    assert check_nothing_wrong(store) == 1
    send_more(store)
    store.close()
    store = open_store(disk)
    check_nothing_wrong(store)


def test_look_ups_by_key_by_id_and_by_time_give_nothing_of_a_damaged_part() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    start_ms = clock.time_ms - COUNT * 1000
    region = store.read("topic", 0, 10, 1, 1).regions[0]
    position = region.file.base_position + region.offset
    store.close()
    disk.flip_bit(segment_path(position), (position % SEGMENT + 40) * 8)
    store = open_store(disk, clock=clock)
    with pytest.raises(CorruptLogError) as caught:
        list(store.find_by_key_hash("topic", key_hash_of("k20")))
    assert caught.value.lost == ("topic", 0, 10, 11)
    assert [
        Record.FromString(r).body for r in store.find_by_key_hash("topic", key_hash_of("k21"))
    ] == [body_of(21)]
    (damage,) = store.damaged_ranges
    assert damage.start_position == position
    for how in ("id", "time", "store time"):
        disk.remove("/s/config/quarantine.json")
        store.close()
        disk.remove("/s/config/quarantine.json")
        store = open_store(disk, clock=clock)
        assert not store.damaged_ranges
        if how == "id":
            with pytest.raises(CorruptLogError) as caught:
                list(store.find_by_message_id("topic", (7, 0, 20)))
            assert caught.value.lost == ("topic", 0, 10, 11)
        elif how == "time":
            assert store.offset_at_time("topic", 0, start_ms + 19_000) == 9
            assert store.offset_at_time("topic", 0, start_ms + 24_000) == 12
        else:
            assert store.store_time_of("topic", 0, 10) == store.store_time_of("topic", 0, 11) > 0
        assert [d.start_position for d in store.damaged_ranges] == [position]


def test_the_scrub_reads_what_is_synced_of_the_newest_segment_too() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    store.topics.create(TopicConfig("topic"))  # else the start would append a record of it
    store.append([make_request([body_of(COUNT)])])
    store.close()
    store = open_store(disk, clock=clock)
    end = store.appended_position
    disk.flip_bit(newest(disk), (end % SEGMENT - 100) * 8)
    for _ in range(3):
        store._upkeep.keeper.turn()
        clock.time_ms += 1000
    (damage,) = store.damaged_ranges
    assert damage.end_position == end
    check_nothing_wrong(store)


def test_what_is_known_to_hold_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    store = filled_store(disk)

    def logs_read() -> int:
        count = 0
        real = SimDisk.pread

        def pread(self: SimDisk, fd: int, size_bytes: int, position: int) -> bytes:
            nonlocal count
            count += "/commitlog/" in self._descriptors[fd][1]
            return real(self, fd, size_bytes, position)

        with monkeypatch.context() as patch:
            patch.setattr(SimDisk, "pread", pread)
            for queue_id in QUEUES:
                offset, end = store.queue_range("topic", queue_id)
                while offset < end:
                    offset = store.read("topic", queue_id, offset, 7, 1 << 20).next_offset
        return count

    assert logs_read() == 0, "what this process wrote"
    store.close()
    store = open_store(disk)
    assert 0 < logs_read() < 3 * COUNT, "once"
    assert logs_read() == 0
    assert read_all(store)


def test_what_is_known_to_hold_is_given_while_somebody_walks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checked_log, "PIECE_SIZE_BYTES", 256)
    store = filled_store(SimDisk())
    store.read("topic", 0, 0, 1, 1 << 20)
    end = store.queue_range("topic", 0)[1]
    found: list[ReadStatus] = []

    def read_the_end() -> None:
        found.append(store.read("topic", 0, end, 1, 1 << 20).status)

    read_the_end()  # the segment is known
    store.append([make_request([body_of(0)])])
    with store._checked._lock:
        reader = threading.Thread(target=read_the_end, daemon=True)
        reader.start()
        reader.join(60)
    assert found[1:] == [ReadStatus.FOUND]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many boundaries in a segment of 8 KiB as there are in one of a gigabyte."""
    monkeypatch.setattr(checked_log, "PIECE_SIZE_BYTES", 512)
    monkeypatch.setattr(checked_log, "SAVED_COUNT_MIN", 2)
    monkeypatch.setattr(derived_recovery, "START_CHECK_SIZE_BYTES", 1000)


class ReadCounter(SimDisk):
    """A disk that counts what is read of the log."""

    log_bytes = 0

    def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        data = super().pread(fd, size_bytes, position)
        if "/commitlog/" in self._descriptors[fd][1]:
            self.log_bytes += len(data)
        return data


@pytest.mark.usefixtures("small_pieces")
def test_boundaries_save_the_walk_from_the_head_of_a_segment() -> None:
    disk = ReadCounter()
    filled_store(disk).close()
    assert len(disk.files("/s/boundaries")) == 6
    with_boundaries, read = disk.files("/s/boundaries"), []
    for _ in range(2):
        disk.log_bytes = 0
        open_store(disk).close()
        read.append(disk.log_bytes)
        disk.remove("/s/boundaries")
    assert read[0] < read[1] - 2000, "a start reads a part of the newest segment only"
    open_store(disk).close()
    for path, data in with_boundaries.items():
        write_file_atomically(disk, path, data)
    store = open_store(disk)
    position = store._queues.queue("topic", 0).entry(16)[0]
    assert position % SEGMENT > 6000, "deep inside a segment"
    disk.log_bytes = 0
    assert store.read("topic", 0, 16, 1, 1).record_count == 1
    assert disk.log_bytes < 3000
    check_nothing_wrong(store, lost_some=False)
    store.delete_segments_below(2 * SEGMENT)
    assert len(disk.files("/s/boundaries")) == 4


def test_who_asks_again_where_an_append_ends_does_not_wait_for_the_walk_of_a_segment() -> None:
    """A follower gives up waiting after some seconds; so if each answer took as long as the first, it never followed."""
    disk, segment = ReadCounter(), 8 << 20
    store = open_store(disk, segment=segment)
    ends = [store.append([make_request([bytes(100_000)])]) for _ in range(150)]
    store.close()
    disk.remove("/s/boundaries")
    store = open_store(disk, segment=segment)
    read = []
    for end in (ends[70], ends[70], ends[-1]):
        disk.log_bytes = 0
        assert store.log_point(end) is not None
        read.append(disk.log_bytes)
    assert read[0] > 7_000_000, "nobody has walked the first segment"
    assert max(read[1:]) <= 3 << 20, "it was walked, and the start has walked the newest one"


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_of_which_only_an_earlier_process_has_walked_the_records_is_walked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimDisk()
    filled_store(disk).close()
    store = open_store(disk)

    def chain_alone(*_: Any) -> bool:
        pytest.fail("nobody has counted the records yet")

    monkeypatch.setattr(checked_log, "chain_holds", chain_alone)
    check_nothing_wrong(store, lost_some=False)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", range(20))
def test_wrong_boundaries_cost_time_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimDisk()
    filled_store(disk).close()
    files = BoundaryFiles(disk, "/s/boundaries")
    for path in disk.files("/s/boundaries"):
        base = int(path.rpartition("/")[2])
        rows = files.read(base)
        at = rng.randrange(len(rows))
        position, crc = rows[at]
        rows[at] = rng.choice(((position + 1, crc), (position, crc ^ 1), (position + 600, crc)))
        files.write(base, sorted(rows))
    store = open_store(disk)
    check_nothing_wrong(store, lost_some=False)
    send_more(store)
    store.close()
    disk.flip_bit(segment_path(SEGMENT), 4000 * 8)
    store = open_store(disk)
    assert check_nothing_wrong(store) == 1


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", range(20))
def test_damage_is_found_with_boundaries_as_without_them(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimDisk()
    store = filled_store(disk)
    end = store.appended_position
    store.close()
    position = rng.randrange(53, end - 700)
    disk.overwrite(
        segment_path(position),
        min(position % SEGMENT, SEGMENT - 700),
        rng.randbytes(rng.choice((1, 60, 700))),
    )
    store = open_store(disk, corruption="quarantine")
    check_nothing_wrong(store)
    send_more(store)


@pytest.mark.parametrize("how", ["another message", "another queue", "no message"])
def test_an_entry_that_holds_and_leads_to_another_message_is_not_believed(how: str) -> None:
    """One in 65,536 of wilder damage passes the check bits of an entry: then the record says that it is another one."""
    disk, clock = SimDisk(), ManualClock()
    store = filled_store(disk, clock)
    queues = store._queues
    position, size, code = queues.queue("topic", 0).entry(10)
    if how == "another message":
        position, size, code = queues.queue("topic", 0).entry(9)
        position += 1
    elif how == "another queue":
        position, size, code = queues.queue("topic", 1).entry(10)
    else:
        position += 8
        size -= 8
    store.close()
    entry = bytearray(struct.pack("<QIq", position, size, code))
    sealed_entry = sealed(memoryview(entry), 10, salt_of("topic", 0))
    disk.overwrite(f"/s/consumequeue/topic/0/{0:020d}", 20 * 10, bytes(sealed_entry))
    store = open_store(disk, clock=clock)
    with pytest.raises(ConsumeQueueDamagedError):
        store.read("topic", 0, 10, 1, 1 << 20)
    for _ in range(3):
        clock.time_ms += 1000
        store._upkeep.keeper.turn()
    check_nothing_wrong(store, lost_some=False)
    assert store.healed_file_count == 1


def delete_caches(disk: SimDisk) -> None:
    for folder in ("consumequeue", "index", "repeatedsends", "boundaries"):
        disk.remove(f"/s/{folder}")


@pytest.mark.parametrize("is_repaired", [False, True])
@pytest.mark.parametrize("harm", HARMS)
def test_ends_that_stood_in_a_range_set_aside_outlive_the_caches(
    harm: Callable[[SimDisk, int], None], is_repaired: bool
) -> None:
    disk = SimDisk()
    store = filled_store(disk)
    end = store.appended_position
    store.close()
    harm(disk, end)
    store = open_store(disk, corruption="quarantine")
    lost = check_nothing_wrong(store)
    store.close()
    if is_repaired:
        repair("/s", "/kept", disk=disk)
    for _ in range(2):
        delete_caches(disk)
        store = open_store(disk)
        assert check_nothing_wrong(store) == lost
        store.close()
    delete_caches(disk)
    send_more(open_store(disk))


@pytest.mark.parametrize("has_queues", [False, True])
@pytest.mark.parametrize("how", ["met while open", "met by nobody before the repair"])
def test_the_last_message_of_a_queue_that_is_damaged_and_repaired_keeps_its_offset(
    how: str, has_queues: bool
) -> None:
    disk = SimDisk()
    store = open_store(disk)
    for index in range(20):
        store.append([make_request([body_of(index)], queue_id=0)])
    position = store.appended_position
    store.append([make_request([body_of(20)], queue_id=0, key="last")])
    for index in range(COUNT):
        store.append([make_request([body_of(index)], queue_id=1)])
    store.close()
    disk.flip_bit(segment_path(position), (position % SEGMENT + 50) * 8)
    if how == "met while open":
        store = open_store(disk, corruption="quarantine")
        assert scan(store, 0)[1] == [20]
        store.close()
    if not has_queues:
        delete_caches(disk)
    repair("/s", "/kept", disk=disk)
    for _ in range(2):
        delete_caches(disk)
        store = open_store(disk)
        assert store.queue_range("topic", 0) == (0, 21)
        assert scan(store, 0)[1] == [20]
        store.close()
    store = open_store(disk)
    request = make_request([b"more"], queue_id=0)
    store.append([request])
    assert request.queue_offset == 21
