"""The machine of %SYS%LOCKS: the same records make the same locks, from the log, from a cache, or said again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protomq.v1.state_pb2 import LocksRecord
from protomq_broker.store.state.locks import LockKey, LockOwner, LockTable, locks_record
from protomq_broker.testing.simdisk import SimDisk

PATH = "/s/config/locks.json"
KEYS = [LockKey(group, topic, 7, queue_id) for group in "gh" for topic in "tu" for queue_id in (0, 1)]
OWNERS = [LockOwner(token, name, 5) for token, name in ((1, "a"), (2, "b"), (1 << 63, "a"))]
CHANGES = st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from([None, *OWNERS])), min_size=1, max_size=4)
RECORDS = st.lists(
    st.one_of(
        CHANGES.map(locks_record),
        st.sampled_from("gh").map(lambda group: LocksRecord(deleted_groups=[group]).SerializeToString()),
    ),
    max_size=12,
)


def table(disk: SimDisk, end_position: int = 1_000, log_start: int = 0) -> LockTable:
    return LockTable(disk, PATH, log_start, end_position)


def model(bodies: list[bytes]) -> dict[LockKey, LockOwner]:
    found: dict[LockKey, LockOwner] = {}
    for body in bodies:
        record = LocksRecord.FromString(body)
        for group in record.deleted_groups:
            found = {key: owner for key, owner in found.items() if key.group != group}
        for said in record.locks:
            key = LockKey(said.consumer_group, said.topic, said.topic_incarnation, said.queue_id)
            found.pop(key, None)
            if said.token:
                found[key] = LockOwner(said.token, said.client_id, said.nonce)
    return found


@given(RECORDS)
def test_the_last_record_of_a_queue_says_who_has_it(bodies: list[bytes]) -> None:
    locks = table(SimDisk())
    for position, body in enumerate(bodies):
        locks.apply(body, position * 10)
    assert locks.all() == model(bodies)
    assert locks.count == len(locks.all())


@given(RECORDS, st.integers(0, 12))
def test_a_cache_and_the_records_behind_it_say_the_same(bodies: list[bytes], saved_count: int) -> None:
    disk = SimDisk()
    disk.make_folder("/s/config")
    locks = table(disk)
    for position, body in enumerate(bodies[:saved_count]):
        locks.apply(body, position * 10)
    if (snapshot := locks.unsaved()) is not None:
        snapshot.save(len(bodies[:saved_count]) * 10)
        assert locks.unsaved() is None
    found = table(disk)
    for position, body in enumerate(bodies):
        if position * 10 >= found.replay_from:
            found.apply(body, position * 10)
    assert found.all() == model(bodies)


@given(RECORDS, st.integers(0, 130))
def test_what_is_carried_and_the_records_behind_the_cut_say_the_same(bodies: list[bytes], cut: int) -> None:
    locks = table(SimDisk())
    for position, body in enumerate(bodies):
        locks.apply(body, position * 10)
    carried = [body for carrier in locks.carry(cut) if (body := carrier())]
    rest = [body for position, body in enumerate(bodies) if position * 10 >= cut]
    assert model([*rest, *carried]) == model(bodies)
    for position, body in enumerate(carried, len(bodies)):
        locks.apply(body, position * 10 + 200)
    assert not any(carrier() for carrier in locks.carry(cut)), "it was said again"


def test_what_is_no_record_changes_nothing() -> None:
    locks = table(SimDisk())
    locks.apply(locks_record([(KEYS[0], OWNERS[0])]), 0)
    locks.apply(b"\xff\xff", 10)
    assert locks.all() == {KEYS[0]: OWNERS[0]}
    assert locks.of_group("h") == {}
