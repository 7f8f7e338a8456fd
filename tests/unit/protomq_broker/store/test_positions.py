"""Positions against their rules, whatever moves them in whatever order."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.store.log.positions import LogTail, Positions, QueueKey


@given(st.booleans(), st.lists(st.one_of(st.integers(1, 50), st.just("flush")), max_size=40))
def test_nothing_is_readable_early_and_each_arrival_is_told_once_when_it_is(
    waits_for_flush: bool, steps: list[int | str]
) -> None:
    positions = Positions(LogTail(0, 0, 0), 0, waits_for_flush=waits_for_flush)
    told: list[QueueKey] = []
    flushed: list[int] = []
    positions.on_arrival.append(told.extend)
    positions.on_flushed.append(flushed.append)
    keys: list[tuple[int, QueueKey]] = []
    for step in steps:
        before = (positions.flushed, positions.readable, positions.appended)
        if isinstance(step, int):
            end = positions.appended + step
            keys.append((end, ("topic", len(keys))))
            positions.publish(LogTail(end, 0, 0), [keys[-1][1]])
        else:
            positions.note_flushed(positions.appended)
            assert flushed[-1] == positions.appended
        after = (positions.flushed, positions.readable, positions.appended)
        assert all(old <= new for old, new in zip(before, after, strict=True))
        assert positions.flushed <= positions.appended
        assert positions.readable == (positions.flushed if waits_for_flush else positions.appended)
        assert told == [key for end, key in keys if end <= positions.readable]


@given(
    st.booleans(),
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 50)),
            st.tuples(st.just("flush"), st.just(0)),
            st.tuples(st.just("replicated"), st.integers(0, 600)),
            st.tuples(st.just("wait"), st.integers(0, 1)),
        ),
        max_size=40,
    ),
)
def test_where_replicas_are_waited_for_nothing_is_readable_beyond_what_they_have(
    waits_for_flush: bool, steps: list[tuple[str, int]]
) -> None:
    positions = Positions(
        LogTail(0, 0, 0), 0, waits_for_flush=waits_for_flush, waits_for_replicas=True
    )
    told: list[QueueKey] = []
    positions.on_arrival.append(told.extend)
    keys: list[tuple[int, QueueKey]] = []
    waits, expected = True, 0
    for name, number in steps:
        before = (positions.flushed, positions.replicated, positions.readable, positions.appended)
        if name == "append":
            end = positions.appended + number
            keys.append((end, ("topic", len(keys))))
            positions.publish(LogTail(end, 0, 0), [keys[-1][1]])
        elif name == "flush":
            positions.note_flushed(positions.appended)
        elif name == "replicated":
            positions.note_replicated(number)
        else:
            waits = bool(number)
            positions.wait_for_replicas(waits)
        after = (positions.flushed, positions.replicated, positions.readable, positions.appended)
        assert all(old <= new for old, new in zip(before, after, strict=True))
        bound = positions.flushed if waits_for_flush else positions.appended
        expected = max(expected, min(bound, positions.replicated) if waits else bound)
        assert positions.readable == positions.confirmed == expected <= positions.appended
        assert told == [key for end, key in keys if end <= positions.readable]


def test_a_position_that_replicas_said_before_counts_for_appends_that_come_later() -> None:
    positions = Positions(LogTail(10, 0, 0), 10, waits_for_replicas=True)
    assert positions.readable == 0
    positions.note_replicated(30)
    assert positions.readable == 10
    positions.publish(LogTail(40, 0, 0), ())
    assert positions.readable == 30


def test_what_is_readable_does_not_go_back_where_replicas_are_waited_for_no_more() -> None:
    """Another thread is about to move it meanwhile, by the positions that it has seen."""
    has_seen, has_written = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    class Slow(Positions):
        def _bound(self) -> int:
            bound = super()._bound()
            if threading.current_thread() in threads:
                has_seen.set()
                has_written.wait(0.5)  # the writer may have to wait for this thread
            for thread in threads:
                if thread.ident is None:
                    thread.start()
            return bound

    positions = Slow(LogTail(10, 0, 0), 10, waits_for_replicas=True)
    threads.append(threading.Thread(target=positions._advance))
    positions.wait_for_replicas(False)
    has_seen.wait(0.5)
    positions.publish(LogTail(20, 0, 0), ())
    has_written.set()
    threads[0].join(5)
    assert positions.readable == 20


def test_all_listeners_are_told_though_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    positions = Positions(LogTail(0, 0, 0), 0)
    told: list[int] = []

    def fail(position: int) -> None:
        raise RuntimeError("a defect")

    positions.on_flushed += [fail, told.append]
    positions.note_flushed(0)
    positions.note_failed()
    assert told == [0, 0]
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        "a defect"
    ] * 2
