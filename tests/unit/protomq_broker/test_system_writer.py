"""SystemWriter: batches of moved messages are appended one in a turn of the send lane."""

from __future__ import annotations

from typing import Any, cast

from protomq.testing.simdisk import Fault, SimDisk
from protomq_broker.store.errors import StoreError
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.move import move_record
from protomq_broker.store.store import Store
from protomq_broker.system_writer import MovedBatch, SystemWriter
from protomq_broker.write_permit import WritePermit
from protomq_runtime.errors import Code, ServiceError

from .store.log_helpers import make_record, make_request
from .store.store_helpers import open_store, read_all
from .test_offset_commits import StubLane


def make_writer() -> tuple[SystemWriter, WritePermit, StubLane, Store, SimDisk]:
    disk = SimDisk()
    permit = WritePermit()
    store, lane, writer = open_store(disk), StubLane(), SystemWriter(permit)
    writer.start(store, cast("Any", lane))
    return writer, permit, lane, store, disk


def batch_of(body: bytes, outcomes: list[Exception | None]) -> MovedBatch:
    copy = AppendRequest(move_record(make_record(body), "topic"), 0)
    return MovedBatch([copy], [], outcomes.append)


def test_one_batch_is_appended_in_a_turn_and_sends_come_between() -> None:
    writer, _, lane, store, _ = make_writer()
    outcomes: list[Exception | None] = []
    for body in (b"1", b"2"):
        writer.move(batch_of(body, outcomes))
    assert len(lane.posted) == 1
    lane.posted.pop(0)()
    store.append([make_request([b"sent"])])
    assert (len(outcomes), len(lane.posted)) == (1, 1)
    lane.run(lane.posted)
    assert outcomes == [None, None]
    assert [body for _, body in read_all(store)] == [b"1", b"sent", b"2"]
    writer.move(batch_of(b"3", outcomes))
    lane.run(lane.posted)
    assert [body for _, body in read_all(store)] == [b"1", b"sent", b"2", b"3"]


def test_who_hands_over_is_told_why_nothing_was_moved_and_the_next_batch_goes_on() -> None:
    writer, _, lane, store, disk = make_writer()
    outcomes: list[Exception | None] = []
    disk.fail_at(1, Fault.ENOSPC)
    writer.move(batch_of(b"1", outcomes))
    writer.move(batch_of(b"2", outcomes))
    lane.run(lane.posted)
    assert isinstance(outcomes[0], StoreError)
    assert outcomes[1] is None
    assert [body for _, body in read_all(store)] == [b"2"]


def test_a_broker_that_may_not_write_moves_nothing() -> None:
    writer, permit, lane, store, _ = make_writer()
    refusal = ServiceError(Code.UNAVAILABLE, "NAME_TAKEN", "another broker has the name")
    permit.refuse(refusal)
    outcomes: list[Exception | None] = []
    writer.move(batch_of(b"1", outcomes))
    lane.run(lane.posted)
    assert outcomes == [refusal]
    assert read_all(store) == []
