"""Damage in a consume queue file that is met while the store is open heals by itself, and nothing is lost, hidden or reordered."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest

from protomq.wire.hashing import tag_code_of
from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.queues import heal
from protomq_broker.store.queues.consume_queue import ConsumeQueueDamagedError
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import SimDisk

from .derived_helpers import use_small_files
from .log_helpers import ManualClock, make_request
from .store_helpers import SEGMENT, open_store, read_all

TOPICS = ("topic", "other")
PLACES = [(topic, queue_id) for topic in TOPICS for queue_id in (0, 1)]
ENTRY_BITS = 160


def path_of(topic: str = "topic", queue_id: int = 0, start: int = 0) -> str:
    return f"/s/consumequeue/{topic}/{queue_id}/{start * 20:020d}"


def fill(store: Store, count: int = 60, seed: int = 0) -> None:
    """Sends of one to four messages to four queues of two topics, over several segments."""
    rng = random.Random(seed)
    for _ in range(count):
        topic, queue_id = rng.choice(PLACES)
        bodies = [rng.randbytes(rng.randrange(200, 500)) for _ in range(rng.randrange(1, 5))]
        store.append(
            [make_request(bodies, topic=topic, queue_id=queue_id, tag=rng.choice(("", "red")))]
        )


def open_filled(disk: SimDisk, clock: ManualClock | None = None, **arguments) -> Store:
    """A store whose entries are all in files."""
    store = open_store(disk, clock=clock, **arguments)
    fill(store)
    store.close()
    return open_store(disk, clock=clock, **arguments)


def all_of(store: Store) -> dict[tuple[str, int], list[tuple[int, bytes]]]:
    return {place: read_all(store, *place) for place in PLACES}


def whole_files(disk: SimDisk) -> dict[str, bytes]:
    return {path_of(*place): disk.content(path_of(*place)) for place in PLACES}


def turns(store: Store, clock: ManualClock, count: int = 3) -> None:
    for _ in range(count):
        clock.time_ms += 500
        store._upkeep.keeper.turn()


def meet(store: Store, topic: str = "topic", queue_id: int = 0) -> bool:
    """Reads a queue in small steps; whether damage was met on the way. It must be told as something that passes."""
    is_told_for_good = False
    try:
        read_all(store, topic, queue_id)
    except ConsumeQueueDamagedError as error:
        is_told_for_good = not error.is_healing
    assert not is_told_for_good
    return bool(store.damaged_files)


def flip_entries(disk: SimDisk, path: str, *numbers: int) -> None:
    for number in numbers:
        disk.flip_bit(path, number * ENTRY_BITS + 9)


HARMS: dict[str, Callable[[SimDisk, str], None]] = {
    "one bit": lambda disk, path: disk.flip_bit(path, 7 * ENTRY_BITS + 3),
    "the first entry": lambda disk, path: disk.flip_bit(path, 100),
    "the last entry": lambda disk, path: disk.flip_bit(path, len(disk.content(path)) * 8 - 30),
    "several": lambda disk, path: flip_entries(disk, path, 2, 3, 9, 14),
    "zeros": lambda disk, path: disk.overwrite(path, 40, bytes(130)),
    "short": lambda disk, path: disk.cut(path, 130),
    "empty": lambda disk, path: disk.cut(path, 0),
    "everything": lambda disk, path: disk.overwrite(path, 0, b"\xa5" * len(disk.content(path))),
    "entries that changed places": lambda disk, path: disk.overwrite(
        path, 40, disk.content(path)[60:80] + disk.content(path)[40:60]
    ),
}


@pytest.mark.parametrize("how", HARMS)
def test_a_damaged_file_is_made_anew_while_the_store_is_open(how: str) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    assert store.appended_position > 4 * SEGMENT
    expected, whole = all_of(store), whole_files(disk)
    HARMS[how](disk, path_of())
    assert meet(store)
    turns(store, clock, 1)
    assert store.damaged_files == []
    assert store.healed_file_count == 1
    assert all_of(store) == expected
    assert whole_files(disk) == whole
    store.append([make_request([b"goes on"])])
    assert read_all(store)[-1] == (len(expected["topic", 0]), b"goes on")
    store.close()
    store = open_store(disk, clock=clock)
    assert read_all(store)[:-1] == expected["topic", 0]
    store.close()


def test_what_is_healed_is_durable_with_the_next_checkpoint() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    expected, whole = all_of(store), whole_files(disk)
    disk.cut(path_of(), 40)
    meet(store)
    store.append([make_request([b"new"], topic="other")])
    store.checkpoint()  # as a damaged queue
    turns(store, clock)
    store.append([make_request([b"new"], topic="other")])
    store.checkpoint()
    after = disk.crash(random.Random(1), keep=0.0)
    assert after.content(path_of()) == whole[path_of()]
    again = open_store(after, clock=clock)
    assert read_all(again) == expected["topic", 0]
    assert not again.damaged_files


def test_files_of_several_queues_heal_by_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    expected = all_of(store)
    for place in PLACES:
        disk.overwrite(path_of(*place), 0, bytes(len(disk.content(path_of(*place)))))
    assert all(meet(store, *place) for place in PLACES)
    assert len(store.damaged_files) == 4
    walked: list[int] = []
    walk = heal.QueueHealer._walk

    def counted(self: heal.QueueHealer, size_max_bytes: int) -> int:
        walked.append(walk(self, size_max_bytes))
        return walked[-1]

    monkeypatch.setattr(heal.QueueHealer, "_walk", counted)
    turns(store, clock, 1)
    assert store.healed_file_count == 4
    assert all_of(store) == expected
    assert sum(walked) <= store.appended_position


def test_a_step_walks_a_bounded_part_of_the_log_and_no_more_than_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    expected = all_of(store)
    monkeypatch.setattr(heal, "SLICE_SIZE_BYTES", 3000)
    monkeypatch.setattr(heal, "BLOCK_SIZE_BYTES", 2048)
    disk.overwrite(path_of(), 0, bytes(len(disk.content(path_of()))))
    meet(store)
    steps = 0
    while store.damaged_files:
        with pytest.raises(ConsumeQueueDamagedError) as caught:
            store.read("topic", 0, 0, 10, 1000)
        assert caught.value.is_healing
        turns(store, clock, 1)
        steps += 1
    assert steps >= store.appended_position // 5000
    assert all_of(store) == expected
    disk.flip_bit(path_of(), 5 * ENTRY_BITS)
    meet(store)
    few = 0
    while store.damaged_files:
        turns(store, clock, 1)
        few += 1
    assert few <= SEGMENT // 3000 + 2, "one segment, or two"


def test_a_queue_goes_on_growing_while_it_is_healed(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    expected = read_all(store)
    monkeypatch.setattr(heal, "SLICE_SIZE_BYTES", 3000)
    monkeypatch.setattr(heal, "BLOCK_SIZE_BYTES", 2048)
    disk.cut(path_of(), 20)
    meet(store)
    number = 0
    while store.damaged_files:
        store.append([make_request([b"%d" % number])])
        expected.append((len(expected), b"%d" % number))
        number += 1
        turns(store, clock, 1)
    assert number > 3
    assert read_all(store) == expected


@pytest.mark.parametrize("steps", range(6))
def test_segments_may_go_while_a_queue_is_healed(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    expected = read_all(store)
    monkeypatch.setattr(heal, "SLICE_SIZE_BYTES", 3000)
    monkeypatch.setattr(heal, "BLOCK_SIZE_BYTES", 2048)
    disk.overwrite(path_of(), 0, bytes(len(disk.content(path_of()))))
    meet(store)
    for _ in range(steps):
        store._upkeep.queue_healer.step(clock.monotonic_ms())
    assert store.delete_segments_below(3 * SEGMENT) == 3 * SEGMENT
    for _ in range(40):
        store._upkeep.queue_healer.step(clock.monotonic_ms())
    assert store.damaged_files == []
    start, end = store.queue_range("topic", 0)
    assert 0 < start < end == len(expected)
    assert read_all(store) == expected[start:]
    other = open_filled_and_cut()
    assert other.queue_range("topic", 0)[0] == start


def open_filled_and_cut() -> Store:
    """What a store of the same content has left when segments go and nothing is damaged."""
    store = open_filled(SimDisk(), ManualClock())
    store.delete_segments_below(3 * SEGMENT)
    return store


def test_a_deleted_topic_is_no_business_of_the_healer_and_its_old_records_stay_out() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    store.topics.create(TopicConfig("topic"))
    disk.cut(path_of(), 20)
    meet(store)
    store.delete_topic("topic")
    turns(store, clock)
    assert store.damaged_files == []
    store.append([make_request([b"a"]), make_request([b"b"])])
    turns(store, clock)
    store.close()
    store = open_store(disk, clock=clock)
    disk.cut(path_of(), 0)
    meet(store)
    turns(store, clock)
    assert read_all(store) == [(0, b"a"), (1, b"b")]


def test_damage_of_the_log_in_the_same_place_stays_told_with_its_range() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    expected = all_of(store)
    target = SEGMENT + 3000
    queue = store._queues.find("topic", 0)
    assert queue is not None
    victim = queue.first_at_or_beyond(target)
    disk.overwrite(
        f"/s/commitlog/{SEGMENT:020d}", queue.entry(victim)[0] - SEGMENT + 30, b"\xff" * 20
    )
    disk.flip_bit(path_of(), victim * ENTRY_BITS)
    meet(store)
    turns(store, clock, 1)
    assert store.damaged_files == []
    (damage,) = store.damaged_ranges
    assert damage.start_position <= queue.entry(victim - 1)[0] + 1000
    for place in PLACES:
        given, told, offset = [], set(), 0
        while offset < len(expected[place]):
            try:
                result = store.read(*place, offset, 1, 1)
            except CorruptLogError as error:
                told.add((error.position, error.end_position))
                offset = max(error.next_offset, offset + 1)
                continue
            assert result.first_offset == offset
            given.append(offset)
            offset = result.next_offset
        assert told <= {(damage.start_position, damage.end_position)}
        lost = set(range(len(expected[place]))) - set(given)
        assert len(lost) <= 4, "one append"
        assert (victim in lost) == (place == ("topic", 0))
    store.close()
    assert list(open_store(disk, clock=clock).damaged_ranges) == [damage]


def test_damage_at_the_end_of_the_log_is_an_obstacle_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    store.append([make_request([b"last" * 50])])
    store.flush()
    turns(store, clock)  # its entry is in the file
    expected = read_all(store)
    queue = store._queues.find("topic", 0)
    assert queue is not None
    queue.release_buffer()
    position = queue.entry(len(expected) - 1)[0]
    base = position // SEGMENT * SEGMENT
    kept = disk.content(f"/s/commitlog/{base:020d}")
    disk.overwrite(f"/s/commitlog/{base:020d}", position - base + 30, b"\xff" * 9)
    disk.flip_bit(path_of(), (len(expected) - 1) * ENTRY_BITS)
    queue._last = (-1, 0)
    meet(store)
    with caplog.at_level(logging.ERROR):
        turns(store, clock, 3)
    (met,) = store.damaged_files
    assert f"{base:020d}: positions" in met.obstacle
    assert sum("cannot be healed" in line for line in caplog.messages) == 1
    with pytest.raises(
        ConsumeQueueDamagedError, match=r"cannot be healed: .* positions"
    ) as caught:
        store.read("topic", 0, len(expected) - 1, 10, 1000)
    assert not caught.value.is_healing
    assert store.damaged_ranges == []
    disk.overwrite(f"/s/commitlog/{base:020d}", 0, kept)  # the disk comes to its senses
    clock.time_ms += heal.RETRY_INTERVAL_MS
    turns(store, clock, 1)
    assert read_all(store) == expected


def test_a_full_disk_is_an_obstacle_until_there_is_space() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    expected = read_all(store)
    disk.cut(path_of(), 20)
    meet(store)
    capacity, disk.capacity_bytes = disk.capacity_bytes, 0
    store._upkeep.queue_healer.step(clock.monotonic_ms())  # a whole turn would delete segments
    (met,) = store.damaged_files
    assert "space" in met.obstacle
    disk.capacity_bytes = capacity
    clock.time_ms += heal.RETRY_INTERVAL_MS
    turns(store, clock, 1)
    assert store.damaged_files == []
    assert read_all(store) == expected


def test_a_file_that_holds_after_all_is_left_alone() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    disk.flip_bit(path_of(), ENTRY_BITS)
    meet(store)
    disk.flip_bit(path_of(), ENTRY_BITS)
    turns(store, clock, 1)
    assert (store.damaged_files, store.healed_file_count) == ([], 0)


def test_a_filter_passes_over_nothing_while_a_queue_heals() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock=clock)
    for _ in range(6):
        store.append([make_request(tag="red")])
    store.close()
    red = frozenset((tag_code_of("red"),))
    for bit in range(ENTRY_BITS):
        store = open_store(disk, clock=clock)
        disk.flip_bit(path_of(), 2 * ENTRY_BITS + bit)
        assert store.read("topic", 0, 0, 10, 1 << 20, red).record_count == 2
        turns(store, clock, 1)
        assert store.read("topic", 0, 0, 10, 1 << 20, red).record_count == 6
        store.close()


def damage_at_random(disk: SimDisk, rng: random.Random, path: str) -> None:
    for _ in range(rng.randrange(1, 5)):
        kind, size = rng.randrange(3), len(disk.content(path))
        if not kind and size:
            disk.flip_bit(path, rng.randrange(size * 8))
        elif kind == 1 and size > 2:
            at = rng.randrange(size - 1)
            disk.overwrite(path, at, rng.randbytes(min(rng.randrange(1, 60), size - at)))
        else:
            disk.cut(path, rng.randrange(size + 1))


@pytest.mark.parametrize("are_small", [False, True], ids=["one file", "many files"])
@pytest.mark.parametrize("seed", range(20))
def test_random_damage_of_any_files_heals_and_nothing_else_changes(
    seed: int, are_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if are_small:
        use_small_files(monkeypatch.setattr)
    rng = random.Random(seed)
    disk, clock = SimDisk(), ManualClock()
    store = open_filled(disk, clock)
    expected = all_of(store)
    whole = {
        path: data
        for path, data in disk.files("/s/consumequeue").items()
        if not path.endswith("/table.bin")
    }
    assert len(whole) > 15 if are_small else len(whole) == len(PLACES)
    for _ in range(6):
        for path in rng.sample(sorted(whole), rng.randrange(1, 4)):
            damage_at_random(disk, rng, path)
            if rng.random() < 0.1:
                disk.remove(path)
        for place in PLACES:  # again and again: what is in front is given first
            for _ in range(40):
                if not meet(store, *place):
                    break
                turns(store, clock, 1)
        assert store.damaged_files == []
        assert all_of(store) == expected
        assert {path: disk.content(path) for path in whole if path in disk.files("/s")} == {
            path: data for path, data in whole.items() if path in disk.files("/s")
        }
    store.close()
    assert all_of(open_store(disk, clock=clock)) == expected
