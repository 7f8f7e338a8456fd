"""Files beside the log that the disk cannot read: what the log tells too is made again. Else the start ends, and names the file."""

from __future__ import annotations

import pytest

from protomq.wire.hashing import key_hash_of
from protomq_broker.store.queues.consume_queue import ConsumeQueueDamagedError
from protomq_broker.store.store import Store
from protomq_broker.store.tools.backup import back_up
from protomq_broker.store.tools.backup_source import FolderSource
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import SimDisk
from tests.support.transaction_world import COMMIT, World

from .log_helpers import make_request
from .store_helpers import commit, read_all

NEEDED = ("store.json", "storeId", "epochs.json", "log_front.json")
"""Their content is nowhere else, or a start does not believe the log alone."""


def world(disk: SimDisk | None = None) -> World:
    return World(disk=disk or SimDisk()).start()


@pytest.fixture(scope="module")
def closed() -> SimDisk:
    """The disk of a broker that was closed: with messages, delayed ones, transactions and commits."""
    broker = world()
    store = broker.store
    for number in range(20):
        store.append([make_request([b"%d" % number], sequence=number, key=f"key {number}")])
        store.append([make_request([b"late"], due_time_ms=broker.clock.now_ms() + 10_000 + number)])
        half = broker.half(b"half %d" % number)
        if number % 2:
            broker.end((half, COMMIT))
        commit(store, "group", "topic", 0, number)
        if number in (8, 15):
            store.checkpoint()
    store._upkeep.keeper.turn()
    store.close()
    return broker.disk


def files_of(disk: SimDisk) -> list[str]:
    return [path for path in disk.files("/s") if "/commitlog/" not in path]


def known(store: Store) -> list[object]:
    topic = store.topics.find("topic")
    assert topic is not None
    store.pending.flush()
    return [
        read_all(store),
        store.offsets.find("group", "topic", topic.incarnation, 0),
        [row for rows in store.pending.below(1 << 60) for row in rows.tolist()],
        sorted(map(repr, store.transactions.open_transactions())),
        list(store.find_by_key_hash("topic", key_hash_of("key 3"))),
    ]


def test_there_are_files_of_each_kind(closed: SimDisk) -> None:
    names = " ".join(files_of(closed))
    for name in ("checkpoint", "index/", "pending.bin", "table.bin", "transactions/", "retention", "Offsets.json.previous", "topics.json"):
        assert name in names, name


def test_a_start_makes_what_is_derived_again(closed: SimDisk) -> None:
    expected = known(world(closed.killed()).store)
    for path in files_of(closed):
        if path.endswith((*NEEDED, "lock")):
            continue
        disk = closed.killed()
        disk.spoil(path)
        store = world(disk).store
        if path.startswith("/s/consumequeue/topic/"):
            with pytest.raises(ConsumeQueueDamagedError, match="unreadable"):
                store.queue_range("topic", 0)
            store._upkeep.heal(0)
            store._upkeep.heal(1)
            assert store.healed_file_count == 1
        assert known(store) == expected, path
        store.close()
        assert known(world(disk.killed()).store) == expected, path


def test_a_start_names_the_file_that_it_needs(closed: SimDisk) -> None:
    for path in files_of(closed):
        if path.endswith(NEEDED):
            disk = closed.killed()
            disk.spoil(path)
            before = disk.files("/s")
            with pytest.raises(OSError, match=path):
                world(disk)
            assert {each: before[each] == now for each, now in disk.files("/s").items() if each != "/s/lock"} == dict.fromkeys(
                set(before) - {"/s/lock"}, True
            )


def test_a_start_a_backup_and_a_verification_name_the_segment_that_is_unreadable(closed: SimDisk) -> None:
    disk = closed.killed()
    path = f"/s/commitlog/{0:020d}"
    disk.spoil(path)
    for use in (lambda: world(disk), lambda: back_up(FolderSource("/s", disk=disk), "/b", disk=disk), lambda: verify("/s", disk=disk)):
        with pytest.raises(OSError, match=path):
            use()
