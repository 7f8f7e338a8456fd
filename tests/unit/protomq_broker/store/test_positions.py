"""Positions against their rules, whatever moves them in whatever order."""

from __future__ import annotations

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
