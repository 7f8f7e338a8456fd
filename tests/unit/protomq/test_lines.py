"""What is taken from a line into one request, who leads next, and in which order callers are woken."""

from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq import MessageQueue, SendStatus
from protomq._lines import CHAINS, DEADLINE_SPREAD_S, Entry, Line, Room, resolve_batch, take_batch
from protomq._outgoing import Stored
from protomq.errors import ConnectionLostError, RequestTimeoutError


def entry(size: int = 1, deadline_s: float = 100.0) -> Entry:
    return Entry((bytes(size), "", "", b"", 0, 0, 0), deadline_s)


def line() -> Line:
    return Line("T", None, count_max=1000, size_max_bytes=1 << 20)


def stored(count: int) -> Stored:
    return Stored(SendStatus.SEND_OK, MessageQueue("T", "a", 0), 10, 0, False, (1, 0), 5, count)


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.floats(100, 102)), min_size=1, max_size=30),
    st.integers(1, 10),
    st.integers(1, 10_000),
)
def test_batches_keep_order_limits_and_deadlines(
    messages: list[tuple[int, float]], count_max: int, size_max: int
) -> None:
    entries = [entry(size, deadline_s) for size, deadline_s in messages]
    pending = deque(entries)
    taken: list[Entry] = []
    while pending:
        batch = take_batch(pending, count_max, size_max)
        assert 1 <= len(batch) <= count_max
        assert len(batch) == 1 or sum(len(item.record[0]) for item in batch) <= size_max
        deadlines = [item.deadline_s for item in batch]
        assert all(abs(deadline_s - deadlines[0]) <= DEADLINE_SPREAD_S for deadline_s in deadlines)
        taken += batch
    assert taken == entries


def test_the_first_caller_leads_and_the_next_ones_wait() -> None:
    row, first, second, third = line(), entry(), entry(), entry()
    assert row.enter(first)
    assert not row.try_to_lead(entry().record)
    assert not row.enter(second)
    assert not row.enter(third)
    batch, leader = row.leave()
    assert batch == [second, third]
    assert leader is second
    assert second.batch is batch
    assert row.leave() == ([], None)
    assert row.try_to_lead(entry().record)


def test_a_message_that_waits_can_be_withdrawn_but_not_one_on_its_way() -> None:
    row, first, second, third = line(), entry(), entry(), entry()
    row.enter(first)
    row.enter(second)
    row.enter(third)
    assert row.withdraw(second)
    assert not row.withdraw(second)
    assert row.leave() == ([third], third)
    assert not row.withdraw(third)


def test_draining_takes_out_what_waits() -> None:
    row, first, second = line(), entry(), entry()
    assert row.drain(0.0) == []
    row.enter(first)
    row.enter(second)
    assert row.drain(0.0) == [second]
    assert row.leave() == ([], None)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_caller_is_woken_once_in_chains(count: int) -> None:
    row, entries = line(), [entry() for _ in range(count)]
    row.enter(entry())
    for item in entries:
        row.enter(item)
    resolve_batch(entries, stored(count), None)
    woken = 0
    awake = [item for item in entries if item.wakeup is not None and item.wakeup.acquire(False)]
    assert len(awake) == min(CHAINS, count)
    while awake:
        woken += len(awake)
        assert all(item.resolved for item in awake)
        for item in awake:
            item.pass_on()
        awake = [item for item in entries if item.wakeup is not None and item.wakeup.acquire(False)]
    assert woken == count
    assert [item.index for item in entries] == list(range(count))


def test_threads_get_errors_of_their_own() -> None:
    entries = [entry() for _ in range(3)]
    error = ConnectionLostError("cut", metadata={"a": "b"})
    resolve_batch(entries, None, error)
    assert len({id(item.error) for item in entries}) == 3
    assert {str(item.error) for item in entries} == {"cut"}


def test_room_is_given_back() -> None:
    room = Room(100)
    room.take(60, 0.0)
    with pytest.raises(RequestTimeoutError) as caught:
        room.take(60, 0.0)
    assert caught.value.definite
    waiting = threading.Thread(target=room.take, args=(60, 1e9))
    waiting.start()
    room.give_back(60)
    waiting.join(60)
    assert not waiting.is_alive()
