"""Looking messages up by key and id: what is damaged is never skipped silently."""

from __future__ import annotations

import random

import pytest

from protomq.v1.record_pb2 import Record
from protomq.wire.hashing import key_hash_of
from protomq_broker.store.errors import CorruptLogError, TooManyCandidatesError
from protomq_broker.store.index import look_ups
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.store import Store
from protomq_broker.store.tools.repair import repair
from protomq_broker.testing.simdisk import SimDisk

from .log_helpers import ManualClock, make_request
from .store_helpers import SEGMENT, open_store

COUNT = 96
START_MS = ManualClock().time_ms
PRODUCER_ID = 7


def filled_store(disk: SimDisk) -> Store:
    """Messages in turn of two topics in two queues each, all with the key "shared" but for their own; message n at START_MS + n s."""
    clock = ManualClock()
    store = open_store(disk, clock=clock)
    for index in range(COUNT):
        clock.time_ms = START_MS + index * 1000
        store.append([request_of(index, "shared" if index % 3 else f"k{index}")])
    store.flush()
    return store


def request_of(index: int, key: str) -> AppendRequest:
    return make_request(
        [bytes([index]) * 300],
        topic=topic_of(index),
        queue_id=index // 2 % 2,
        key=key,
        producer_id=PRODUCER_ID,
        sequence=index,
    )


def topic_of(index: int) -> str:
    return ("even", "odd")[index % 2]


def position_of(store: Store, index: int) -> int:
    queue_id, offset = index // 2 % 2, index // 4
    (region,) = store.read(topic_of(index), queue_id, offset, 1, 1).regions
    return region.file.base_position + region.offset


def damage(store: Store, disk: SimDisk, position: int) -> None:
    """Flips a bit; a second passes, after which the store asks whether somebody has written to the file."""
    path = f"/s/commitlog/{position - position % SEGMENT:020d}"
    disk.flip_bit(path, (position % SEGMENT + 40) * 8)
    store._clock.time_ms += 1000  # type: ignore[attr-defined]


def lose_derived(disk: SimDisk, *folders: str) -> None:
    for folder in folders:
        for path in disk.files(f"/s/{folder}"):
            disk.remove(path)


def by_key(
    store: Store, topic: str, key: str, begin_s: int | None = None, end_s: int | None = None
) -> tuple[list[int], CorruptLogError | None]:
    """(numbers of the messages that are found, the error that ends them)."""
    found: list[int] = []
    times = [None if s is None else START_MS + s * 1000 for s in (begin_s, end_s)]
    try:
        for data in store.find_by_key_hash(topic, key_hash_of(key), *times):
            found.append(Record.FromString(data).body[0])
    except CorruptLogError as error:
        return found, error
    return found, None


def by_id(store: Store, index: int) -> tuple[list[int], CorruptLogError | None]:
    try:
        records = list(store.find_by_message_id(topic_of(index), (PRODUCER_ID, 0, index)))
    except CorruptLogError as error:
        return [], error
    return [Record.FromString(data).body[0] for data in records], None


def shared(topic: str, first: int = 0, end: int = COUNT) -> list[int]:
    return [n for n in range(first, end) if topic_of(n) == topic and n % 3][::-1]


def test_a_key_gives_what_is_newer_than_the_damage_and_then_the_error() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    lost = 40
    damage(store, disk, position_of(store, lost))
    found, error = by_key(store, "even", "shared")
    assert found == shared("even", lost + 1)
    assert error is not None
    assert error.lost == ("even", 0, 10, 11)
    assert "begin_time" in str(error)
    # The time of what is lost is only known by its neighbours: 36 and 44 in its queue.
    assert by_key(store, "even", "shared", begin_s=45) == (shared("even", 45), None)
    assert by_key(store, "even", "shared", end_s=36) == (shared("even", 0, 36), None)
    assert by_key(store, "even", "shared", end_s=lost + 1)[1] is not None


def test_a_lost_message_of_another_topic_is_nobodys_matter() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    damage(store, disk, position_of(store, 40))
    assert by_key(store, "even", "shared")[1] is not None
    assert len(store.damaged_ranges) == 1
    assert by_key(store, "odd", "shared") == (shared("odd"), None)


def test_an_id_is_found_if_it_is_sound_and_else_refused() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    damage(store, disk, position_of(store, 40))
    for index in range(COUNT):
        found, error = by_id(store, index)
        assert (found, error is not None) == (([], True) if index == 40 else ([index], False))
    assert by_id(store, 2 * COUNT) == ([], None)


@pytest.mark.parametrize("ahead", [0, 3])
def test_an_id_in_a_request_of_many_that_is_lost(ahead: int) -> None:
    disk = SimDisk()
    store = open_store(disk)
    for first in (0, 8):
        store.append([make_request([b"x" * 99] * 8, topic="even", producer_id=7, sequence=first)])
    store.flush()
    (region,) = store.read("even", 0, 0, 1, 1).regions
    damage(store, disk, region.file.base_position + region.offset)
    for _ in range(2):  # the damage is met, and is known
        with pytest.raises(CorruptLogError) as caught:
            list(store.find_by_message_id("even", (7, 0, ahead)))
        assert caught.value.next_offset == 8
        assert len(list(store.find_by_message_id("even", (7, 0, 8 + ahead)))) == 1


@pytest.mark.parametrize("counts", [(20, 4, 4, 4, 4), (1, 1, 1, 1)])
def test_an_id_is_found_behind_a_lost_request_though_the_index_was_made_from_the_log(
    counts: tuple[int, ...],
) -> None:
    disk = SimDisk()
    store = open_store(disk)
    for number, count in enumerate(counts):
        first = sum(counts[:number])
        store.append(
            [make_request([b"x"] * count, topic="even", producer_id=PRODUCER_ID, sequence=first)]
        )
    store.close()
    lose_derived(disk, "index")
    open_store(disk).close()
    store = open_store(disk)
    (region,) = store.read("even", 0, 0, 1, 1).regions
    damage(store, disk, region.file.base_position + region.offset)
    identities = [(PRODUCER_ID, 0, sequence) for sequence in range(sum(counts))]
    for identity in identities[: counts[0]]:
        with pytest.raises(CorruptLogError):
            list(store.find_by_message_id("even", identity))
    for identity in identities[counts[0] :]:
        assert len(list(store.find_by_message_id("even", identity))) == 1


@pytest.mark.parametrize(
    "lost_too",
    [(), ("index",), ("index", "consumequeue"), ("index", "consumequeue", "repeatedsends")],
)
def test_what_is_damaged_is_told_also_where_what_is_derived_was_made_anew(
    lost_too: tuple[str, ...],
) -> None:
    disk = SimDisk()
    store = filled_store(disk)
    position = position_of(store, 40)
    store.close()
    damage(store, disk, position)
    lose_derived(disk, *lost_too)
    if "consumequeue" in lost_too:
        disk.remove("/s/checkpoint")
    for _ in range(3):  # the next starts know it from the index that this one writes
        store = open_store(disk, corruption="quarantine")
        found, error = by_key(store, "even", "shared")
        assert found == shared("even", 41)
        assert error is not None
        found, error = by_id(store, 40)
        assert not found
        assert error is not None
        assert by_key(store, "odd", "shared") == (shared("odd"), None)
        assert by_id(store, 41) == ([41], None)
        assert by_id(store, 42) == ([42], None)
        store.close()


def test_what_is_lost_in_the_second_of_two_neighbouring_parts_is_told_by_an_index_that_was_rebuilt() -> (
    None
):
    disk = SimDisk()
    store = filled_store(disk)
    for index in (41, 42):  # one after the other, so that they stay two ranges
        damage(store, disk, position_of(store, index))
        with pytest.raises(CorruptLogError):
            store.read(topic_of(index), index // 2 % 2, index // 4, 1, 1)
    store.close()
    lose_derived(disk, "index")
    for _ in range(2):
        store = open_store(disk, corruption="quarantine")
        found, error = by_key(store, "even", "k42")
        assert not found
        assert error is not None
        assert by_id(store, 42)[1] is not None
        assert by_key(store, "odd", "k45")[0] == [45], "what is newer is found"
        store.close()


def test_with_the_last_segment_missing_sound_messages_are_found_and_the_others_told() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    positions = [position_of(store, index) for index in range(COUNT)]
    base = positions[-1] - positions[-1] % SEGMENT
    store.close()
    disk.remove(f"/s/commitlog/{base:020d}")
    for _ in range(2):
        store = open_store(disk, corruption="quarantine")
        for index in range(0, COUNT, 3):
            is_lost = positions[index] >= base
            found, error = by_key(store, topic_of(index), f"k{index}")
            assert (found, error is not None) == (([], True) if is_lost else ([index], False))
        store.close()


@pytest.mark.parametrize("derived_lost", [(), ("index",), ("index", "consumequeue")])
@pytest.mark.parametrize("kind", ["flip", "middle segment missing", "last segment missing"])
def test_after_a_repair_what_is_sound_is_found_and_look_ups_say_nothing_of_the_rest(
    kind: str, derived_lost: tuple[str, ...]
) -> None:
    disk = SimDisk()
    store = filled_store(disk)
    positions = [position_of(store, index) for index in range(COUNT)]
    position = positions[-1 if kind == "last segment missing" else 40]
    store.close()
    if kind == "flip":
        damage(store, disk, position)
    else:
        disk.remove(f"/s/commitlog/{position - position % SEGMENT:020d}")
    lose_derived(disk, *derived_lost)
    open_store(disk, corruption="quarantine").close()
    repair("/s", "/kept", disk=disk)
    for _ in range(2):
        store = open_store(disk)
        lost = {
            n
            for n in range(COUNT)
            for found in store.damaged_ranges
            if found.start_position <= positions[n] < found.end_position
        }
        assert lost
        for index in range(COUNT):
            sound = [] if index in lost else [index]
            assert by_id(store, index) == (sound, None)
        for topic in ("even", "odd"):
            kept = [n for n in shared(topic) if n not in lost]
            assert by_key(store, topic, "shared") == (kept, None)
        store.close()


def test_a_segment_that_is_missing_under_an_open_store_is_told_too() -> None:
    disk = SimDisk()
    store = filled_store(disk)
    position = position_of(store, 40)
    base = position - position % SEGMENT
    store._folder.files.pop(base)
    found, error = by_key(store, "even", "shared")
    assert error is not None
    assert "missing" in str(error)
    assert found == shared("even", min(n for n in found))


def test_more_messages_than_a_page_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(SimDisk(), segment=1 << 20)
    for first in range(0, 600, 200):
        store.append([make_request([b"x"] * 200, key="k", producer_id=5, sequence=first)])
    found = list(store.find_by_key_hash("topic", key_hash_of("k")))
    assert [Record.FromString(data).sequence for data in found] == list(range(599, -1, -1))
    monkeypatch.setattr(look_ups, "CANDIDATES_MAX", 512)
    with pytest.raises(TooManyCandidatesError):
        list(store.find_by_key_hash("topic", key_hash_of("k")))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_damaged_each_message_is_found_or_the_look_up_fails(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimDisk()
    store = filled_store(disk)
    for _ in range(rng.randrange(1, 4)):
        position = rng.randrange(53, store.appended_position - 100)
        store._clock.time_ms += 1000  # type: ignore[attr-defined]
        disk.overwrite(
            f"/s/commitlog/{position - position % SEGMENT:020d}",
            position % SEGMENT,
            rng.randbytes(rng.choice((1, 60, 900)))[: SEGMENT - position % SEGMENT],
        )
    for round_ in range(3):
        for index in range(COUNT):
            key = "shared" if index % 3 else f"k{index}"
            found, error = by_key(store, topic_of(index), key)
            assert index in found or error is not None
            found, error = by_id(store, index)
            assert found == [index] or error is not None
        store.close()
        if round_ == 0:
            lose_derived(disk, *rng.choice([("index",), ("index", "consumequeue"), ()]))
        store = open_store(disk, corruption="quarantine")
    assert all(isinstance(damage, DamagedRange) for damage in store.damaged_ranges)


def test_messages_are_found_by_each_of_their_keys_live_and_after_starts() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request([b"a"], key="k1", more_keys=("k2", "k3"), producer_id=5)])
    store.append(
        [
            make_request([b"b", b"c"], key="k2", producer_id=5, sequence=1),
            make_request([b"d", b"e"], key="k4", more_keys=("k3", "k3"), producer_id=5, sequence=3),
        ]
    )
    store.flush()
    found = {"k1": [b"a"], "k2": [b"c", b"b", b"a"], "k3": [b"e", b"d", b"a"], "k4": [b"e", b"d"]}

    def bodies(key: str) -> list[bytes]:
        data = store.find_by_key_hash("topic", key_hash_of(key))
        return [Record.FromString(record).body for record in data]

    assert {key: bodies(key) for key in found} == found
    for lost in ((), ("index",), ("index", "consumequeue")):
        store.close()
        lose_derived(disk, *lost)
        store = open_store(disk)
        assert {key: bodies(key) for key in found} == found


def test_messages_of_other_topics_with_the_key_are_not_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(look_ups, "CANDIDATES_MAX", 10)
    store = open_store(SimDisk(), clock=ManualClock(), segment=1 << 20)

    def send(topic: str, count: int) -> None:
        store.append([make_request([b"x"] * count, topic=topic, queue_id=0, key="shared")])

    send("rare", 1)
    for _ in range(5):
        send("often", 100)
    send("rare", 2)
    send("often", 100)
    assert len(by_key(store, "rare", "shared")[0]) == 3
    assert by_key(store, "none", "shared") == ([], None)
    with pytest.raises(TooManyCandidatesError):
        by_key(store, "often", "shared")


def test_a_look_up_ends_when_its_time_is_over() -> None:
    store = filled_store(SimDisk())
    looked: list[bytes] = []

    def check_time() -> None:
        if len(looked) == 3:
            raise TimeoutError

    found = store.find_by_key_hash("even", key_hash_of("shared"), check_time=check_time)
    looked += [next(found) for _ in range(3)]
    with pytest.raises(TimeoutError):
        next(found)
