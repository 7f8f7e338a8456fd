"""Copies of messages and the records that tell of the move are one append: all of it is in the log, or nothing."""

from __future__ import annotations

import random

import pytest

from protomq.v1.record_pb2 import Record
from protomq.v1.state_pb2 import OffsetsRecord
from protomq.wire.topics import OFFSETS_TOPIC
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from tests.chaos.checker.log_files import check_store_files, parse_log
from tests.support.moves import move_record

from .log_helpers import make_request
from .store_helpers import committed, open_store, read_all

BODIES = [b"first", b"second", b"third"]


def make_store(disk: SimDisk) -> Store:
    """With three messages of one producer, everything on stable storage."""
    store = open_store(disk)
    for topic in ("origin", "a", "b"):
        store.topics.create(TopicConfig(topic))
    store.append([make_request(BODIES, topic="origin", producer_id=7, key="key")])
    store.checkpoint()
    return store


def move(store: Store) -> int:
    """The first and the third to topic a, the second to topic b, and a record of the offsets for the progress."""
    result = store.read("origin", 0, 0, 3, 1 << 20)
    data = b"".join(region.file.read(region.offset, region.size_bytes) for region in result.regions)
    copies = [
        AppendRequest(move_record(data[start : start + size], topic, attempts=1), 0)
        for topic, start, size in zip(
            ("a", "b", "a"), result.starts.tolist(), result.sizes.tolist(), strict=True
        )
    ]
    config = store.topics.find("origin")
    assert config is not None
    record = OffsetsRecord()
    record.commits.add(consumer_group="mover").offsets.add(
        topic="origin", queue_id=0, queue_offset=3, topic_incarnation=config.incarnation
    )
    return store.append_moved(copies, [(OFFSETS_TOPIC, [record.SerializeToString()])])


def outcome(store: Store) -> tuple[list[bytes], list[bytes], int | None]:
    """What consumers of the targets get, and the progress."""
    moved = [[body for _, body in read_all(store, topic)] for topic in ("a", "b")]
    return (moved[0], moved[1], committed(store, "mover", "origin", 0))


NOTHING: tuple[list[bytes], list[bytes], int | None] = ([], [], None)
ALL = ([b"first", b"third"], [b"second"], 3)


def test_copies_and_progress_are_one_append_and_are_found_like_any_message() -> None:
    disk = SimDisk()
    store = make_store(disk)
    before = store.appended_position
    end = move(store)
    assert outcome(store) == ALL
    sent_again = make_request(BODIES, topic="origin", producer_id=7, key="key")
    assert store.find_repeated(sent_again) is not None
    for topic, sequence in (("a", 0), ("b", 1), ("a", 2), ("origin", 1)):
        (found,) = map(Record.FromString, store.find_by_message_id(topic, (7, 0, sequence)))
        assert found.body == BODIES[sequence]
        assert found.transit.attempt == (topic != "origin")
    store.close()
    files = {path.removeprefix("/s/"): data for path, data in disk.files("/s").items()}
    assert check_store_files(files) == []
    assert verify("/s", disk=disk) == []
    report = parse_log(files)
    assert [at for at in report.seal_ends if before < at <= end] == [end]
    store = open_store(disk)
    assert outcome(store) == ALL
    store.close()


def test_whatever_ends_the_process_or_the_power_all_is_moved_or_nothing() -> None:
    """The process ends at each operation in turn, then the power goes too: of the append, its sync and the checkpoint behind it."""
    seen = set()
    for number in range(1, 200):
        disk = SimDisk()
        store = make_store(disk)
        disk.fail_at(number, Fault.CRASH)
        is_durable = False
        try:
            move(store)
            store.flush()
            is_durable = True
            store.checkpoint()
            store.close()
        except SimulatedCrash:
            ended = False
        else:
            ended = True
        for after in (disk.killed(), disk.crash(random.Random(number))):
            again = open_store(after)
            found = outcome(again)
            assert found in (NOTHING, ALL)
            assert not is_durable or found == ALL
            seen.add(found == ALL)
            again.close()
            assert verify("/s", disk=after) == []
        if ended:
            assert seen == {True, False}
            return
    raise AssertionError("the store was never closed")


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.SHORT])
def test_an_append_that_the_disk_refuses_moves_nothing(fault: Fault) -> None:
    disk = SimDisk()
    store = make_store(disk)
    disk.fail_at(1, fault, for_ever=True)
    with pytest.raises(Exception, match=r".+"):
        move(store)
    assert outcome(store) == NOTHING
    disk.plan = None
    again = open_store(disk.killed())
    assert outcome(again) == NOTHING
    again.close()
