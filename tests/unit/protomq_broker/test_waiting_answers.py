"""What waits for the disk is answered once: stored, too late, or failed."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest

from protomq_broker.store.errors import StoreFailedError
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import Fault, SimDisk
from protomq_broker.waiting_answers import NOT_COPIED_IN_TIME, NOT_STORED_IN_TIME, WaitingAnswers

from .store.log_helpers import ManualClock, make_request
from .store.store_helpers import open_store
from .test_offset_commits import StubLane


def waiting_on(store: Store, clock: ManualClock | None = None) -> tuple[WaitingAnswers, Any]:
    return WaitingAnswers(store, clock or ManualClock()), cast("Any", StubLane())


def test_under_async_flush_nobody_waits() -> None:
    store = open_store(SimDisk())
    waiting, lane = waiting_on(store)
    outcomes: list[Exception | None] = []
    waiting.wait(lane, store.append([make_request()]), 1_000, outcomes.append)
    assert outcomes == [None]
    assert not lane.due


def test_an_answer_waits_for_its_own_position() -> None:
    store = open_store(SimDisk(), sync_flush=True)
    waiting, lane = waiting_on(store)
    first: list[Exception | None] = []
    second: list[Exception | None] = []
    waiting.wait(lane, store.append([make_request()]), 1_000, first.append)
    store.flush()
    waiting.wait(lane, store.append([make_request()]), 1_000, second.append)
    waiting.resolve()
    assert (first, second) == ([None], [])
    store.flush()
    waiting.resolve()
    assert (first, second) == ([None], [None])
    assert not lane.due


def test_a_failed_sync_fails_who_waits_and_who_comes_later() -> None:
    disk = SimDisk()
    store = open_store(disk, sync_flush=True)
    waiting, lane = waiting_on(store)
    outcomes: list[Exception | None] = []
    waiting.wait(lane, store.append([make_request()]), 1_000, outcomes.append)
    disk.fail_at(1, Fault.SYNC_LOST)
    store.flush()
    waiting.resolve()
    waiting.wait(lane, store.appended_position, 1_000, outcomes.append)
    waiting.resolve()
    assert [type(outcome) for outcome in outcomes] == [StoreFailedError, StoreFailedError]


@pytest.mark.parametrize("patient_first", [False, True])
def test_the_less_patient_is_told_first_whoever_came_first(patient_first: bool) -> None:
    clock = ManualClock()
    store = open_store(SimDisk(), clock=clock, sync_flush=True)
    waiting, lane = waiting_on(store, clock)
    told: list[tuple[str, Exception | None]] = []

    def note(name: str, outcome: Exception | None) -> None:
        told.append((name, outcome))

    waits = {"patient": 2_000, "hurried": 500}
    for name in sorted(waits, reverse=patient_first):
        position = store.append([make_request()])
        waiting.wait(lane, position, waits[name], partial(note, name))
    assert len(lane.due) == 1
    clock.time_ms += 500
    due, lane.due[:] = list(lane.due), []
    lane.run(due)
    assert told == [("hurried", NOT_STORED_IN_TIME)]
    store.flush()
    waiting.resolve()
    assert told[1:] == [("patient", None)]


@pytest.mark.parametrize("sync_flush", [False, True])
def test_who_waits_for_copies_is_not_told_of_the_disk(sync_flush: bool) -> None:
    clock = ManualClock()
    store = open_store(SimDisk(), clock=clock, sync_flush=sync_flush)
    store.positions.wait_for_replicas(True)
    waiting, lane = waiting_on(store, clock)
    told: list[Exception | None] = []
    for flushes in (True, False):
        waiting.wait(lane, store.append([make_request()]), 500, told.append)
        if flushes:
            store.flush()
    clock.time_ms += 500
    due, lane.due[:] = list(lane.due), []
    lane.run(due)
    assert told == [NOT_COPIED_IN_TIME, NOT_STORED_IN_TIME if sync_flush else NOT_COPIED_IN_TIME]
    assert "disk" not in NOT_COPIED_IN_TIME.message
    assert NOT_COPIED_IN_TIME.metadata["definite"] == "false"
