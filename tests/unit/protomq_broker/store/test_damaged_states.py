"""A replica's files of the broker's own records are damaged, or the log under them: what it knows of pops, timers, transactions and offsets
is what its master knows, as it runs, after its next start, and when it leads.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from protomq.v1.send_service_pb2 import SendRequest
from protomq.v1.state_pb2 import PopRecord
from protomq.wire.topics import OFFSETS_TOPIC, POP_TOPIC, TIMER_TOPIC, TRANSACTIONS_TOPIC
from protomq_broker.store.housekeeping.scrub import ROUND_INTERVAL_MS
from protomq_broker.store.store import Store
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import SimDisk
from tests.support.transaction_world import COMMIT, ROLL_BACK, SEGMENT, World

from .log_helpers import ManualClock, make_request
from .store_helpers import commit, open_store
from .test_following import log_of
from .test_scrub import scrub

COUNT = 40
STATES = (POP_TOPIC, TIMER_TOPIC, TRANSACTIONS_TOPIC, OFFSETS_TOPIC)
ENTRY_BITS = 160


@pytest.fixture(scope="module")
def leader() -> Store:
    """A master whose log has pops and acknowledgements, delayed and half messages, what became of them, and commits."""
    world, rng = World().start(), random.Random(1)
    topic = world.store.topics.find("topic")
    assert topic is not None

    def note_pop(time_ms: int, **told: Any) -> None:
        record = PopRecord(time_ms=time_ms)
        alike = {"consumer_group": "pops", "topic": "topic", "topic_incarnation": topic.incarnation, "queue_id": 0}
        record.queues.add(**alike, **told)
        world.store.append_state(POP_TOPIC, [record.SerializeToString()])

    for number in range(COUNT):
        world.request(SendRequest(topic="topic", queue_id=0, records=[world.record(b"%d" % number)]))
        delay_ms = rng.randrange(1_000, 50_000)
        world.request(SendRequest(topic="topic", queue_id=0, records=[world.record(b"late")], delay_ms=delay_ms))
        half = world.half(b"half %d" % number)
        if number % 3 == 0:
            world.end((half, COMMIT if number % 2 else ROLL_BACK))
        commit(world.store, "group", "topic", 0, number)
        hand_out = {"number": number + 1, "time_ms": number, "deadline_ms": 99_000, "attempt": 1, "runs": [number, 1]}
        note_pop(number, next_offset=number + 1, hand_outs=[hand_out])
        if number % 2:
            note_pop(number, acked_runs=[number - 1, 1])
        world.clock.time_ms += 400
        while world.mover.deliver():
            pass
    world.store.flush()
    world.store.append([make_request([b"behind all states"])])
    world.store.flush()
    return world.store


@pytest.fixture
def disk(leader: Store) -> SimDisk:
    """A replica that was closed."""
    disk = SimDisk()
    replica = opened(disk)
    replica.append_verbatim(0, log_of_leader(leader))
    replica.positions.note_replicated(leader.appended_position)
    replica.close()
    return disk


def opened(disk: SimDisk, clock: ManualClock | None = None) -> Store:
    """A replica, whose leader has said that all is confirmed."""
    store = open_store(disk, clock=clock, segment=SEGMENT, follows=True, corruption="quarantine")
    store.positions.note_replicated(1 << 40)
    return store


def log_of_leader(leader: Store) -> bytes:
    assert isinstance(leader._disk, SimDisk)
    return log_of(leader._disk, 0, leader.appended_position, SEGMENT)


def states(store: Store) -> dict[str, Any]:
    """What the store knows, and answers by."""
    topic = store.topics.find("topic")
    assert topic is not None
    store.pending.flush()
    timers = [position for rows in store.pending.below(1 << 60) for position in rows["position"].tolist()]
    return {
        "pops": sorted(queue.statement().SerializeToString() for queue in store.popped.queues()),
        "timers": sorted(timers),
        "timers counted": (store.pending.count, store.pending.size_bytes),
        "transactions": store.transactions.open_transactions(),
        "offset": store.offsets.find("group", "topic", topic.incarnation, 0),
    }


def forget_snapshots(disk: SimDisk) -> None:
    """As after a start that could not use them: all states come from the log."""
    names = ("popState", "consumerOffsets")
    paths = [path for path in disk.files("/s/config") if any(name in path for name in names)]
    for path in (*paths, *disk.files("/s/timer"), *disk.files("/s/transactions")):
        disk.unlink(path)


def queue_path(topic: str) -> str:
    return f"/s/consumequeue/{topic}/0/{0:020d}"


def position_of(disk: SimDisk, topic: str, number: int) -> int:
    """Where the record of an entry stands."""
    return int.from_bytes(disk.content(queue_path(topic))[20 * number :][:7], "little")


def test_the_log_has_states_of_each_kind(leader: Store) -> None:
    known = states(leader)
    assert known["pops"]
    assert COUNT > len(known["timers"]) == known["timers counted"][0] > 0
    assert COUNT > len(known["transactions"]) > 0
    assert known["offset"] == COUNT - 1
    assert all(leader.queue_range(topic, 0)[1] > 2 for topic in STATES)


@pytest.mark.parametrize("topic", STATES)
def test_an_entry_that_nobody_reads_is_healed_while_the_replica_runs(disk: SimDisk, leader: Store, topic: str) -> None:
    """The states are in memory and in snapshots, so neither the replica nor its next start comes to the entry."""
    clock, path = ManualClock(), queue_path(topic)
    whole = disk.content(path)
    replica = opened(disk, clock)
    disk.flip_bit(path, ENTRY_BITS + 9)
    scrub(replica, clock)
    assert disk.content(path) == whole
    assert replica.healed_file_count == 1
    assert not replica.damaged_files
    assert states(replica) == states(leader)
    replica.close()
    assert verify("/s", disk=disk) == []


@pytest.mark.parametrize("topic", STATES)
def test_a_damaged_entry_is_healed_after_the_next_start(disk: SimDisk, topic: str) -> None:
    clock, path = ManualClock(), queue_path(topic)
    whole = disk.content(path)
    disk.overwrite(path, 20, bytes(20))
    replica = opened(disk, clock)
    scrub(replica, clock)
    replica.close()
    assert disk.content(path) == whole
    assert verify("/s", disk=disk) == []


@pytest.mark.parametrize("topic", STATES)
@pytest.mark.parametrize("number", [0, 1, -2])
def test_a_start_that_comes_to_a_damaged_entry_takes_each_record_once(
    disk: SimDisk, leader: Store, topic: str, number: int
) -> None:
    forget_snapshots(disk)
    path = queue_path(topic)
    whole = disk.content(path)
    disk.flip_bit(path, number % (len(whole) // 20) * ENTRY_BITS + 9)
    replica = opened(disk)
    assert states(replica) == states(leader)
    replica.lead()
    assert states(replica) == states(leader)
    replica.close()
    assert disk.content(path)[: len(whole)] == whole


@pytest.mark.parametrize("topic", STATES)
@pytest.mark.parametrize("is_running", [False, True])
def test_damage_of_the_log_under_a_state_is_healed_with_the_state(
    disk: SimDisk, leader: Store, topic: str, *, is_running: bool
) -> None:
    clock, log = ManualClock(), log_of_leader(leader)
    position = position_of(disk, topic, 1)
    replica = opened(disk, clock) if is_running else None
    if replica is None:
        forget_snapshots(disk)
    disk.flip_bit(f"/s/commitlog/{0:020d}", (position + 30) * 8)
    if replica is None:
        replica = opened(disk, clock)
        # Later commits say more than this one.
        assert (states(replica) != states(leader)) == (topic != OFFSETS_TOPIC)
    scrub(replica, clock)
    (damage,) = replica.damaged_ranges
    assert damage.start_position <= position < damage.end_position
    replica.heal_log(damage, log[damage.start_position : damage.end_position])
    if not is_running:
        assert replica.has_healed_skipped_parts, "an elected slave opens its store again for that"
        replica.close()
        replica = opened(disk, clock)
    assert replica.damaged_ranges == []
    assert states(replica) == states(leader)
    replica.lead()
    assert states(replica) == states(leader)
    replica.close()
    assert verify("/s", disk=disk) == []


@pytest.mark.parametrize("topic", [*STATES, "topic"])
@pytest.mark.parametrize("is_log_met_before", [False, True])
def test_an_entry_and_its_record_are_both_damaged(
    disk: SimDisk, leader: Store, topic: str, *, is_log_met_before: bool
) -> None:
    """A queue that is healed while a part of the log is missing gets entries of lost records. A replica gives back both."""
    clock, log, path = ManualClock(), log_of_leader(leader), queue_path(topic)
    whole, position = disk.content(path), position_of(disk, topic, 1)
    replica = opened(disk, clock)
    disk.flip_bit(f"/s/commitlog/{0:020d}", (position + 30) * 8)
    if is_log_met_before:
        scrub(replica, clock)
    disk.flip_bit(path, ENTRY_BITS + 9)
    clock.time_ms += ROUND_INTERVAL_MS
    scrub(replica, clock)
    (damage,) = replica.damaged_ranges
    replica.heal_log(damage, log[damage.start_position : damage.end_position])
    scrub(replica, clock)
    if replica.has_healed_skipped_parts:
        replica.close()
        replica = opened(disk, clock)
    assert replica.damaged_ranges == []
    assert states(replica) == states(leader)
    replica.close()
    assert disk.content(path) == whole
    forget_snapshots(disk)
    assert states(opened(disk)) == states(leader)
    assert verify("/s", disk=disk) == []
