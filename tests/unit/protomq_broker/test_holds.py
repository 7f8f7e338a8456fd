"""Held pulls: who is woken, how often, and in which order of steps. The lane is a list of posted functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from protomq.v1.pull_service_pb2 import PullRequest
from protomq_broker import holds as holds_module
from protomq_broker.holds import Hold, LaneHolds
from protomq_runtime.timers import Timers


class Lane:
    """Runs what was posted when it is told to."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], None]] = []
        self.woken: list[list[Hold]] = []
        self.holds = LaneHolds(self.posted.append, self._wake)

    def turn(self) -> None:
        posted, self.posted[:] = list(self.posted), []
        for function in posted:
            function()

    def _wake(self, holds: LaneHolds, woken: Sequence[Hold]) -> None:
        assert holds is self.holds
        self.woken.append(list(woken))


def hold(topic: str = "t", queue_id: int = 0) -> Hold:
    ends: list[Hold] = []
    return Hold((topic, queue_id), cast(Any, None), PullRequest(), frozenset(), 0, 0.0, on_expiry=ends.append, on_drop=ends.append)


def test_only_the_holds_of_the_queue_are_woken() -> None:
    lane = Lane()
    wanted, other = hold("t", 0), hold("t", 1)
    lane.holds.add(wanted)
    lane.holds.add(other)
    lane.holds.signal([("t", 0), ("nobody", 3)])
    lane.turn()
    assert lane.woken == [[wanted]]
    assert len(lane.holds.all()) == 2  # who wakes decides whether the hold is over


def test_a_queue_that_nobody_waits_for_wakes_nobody() -> None:
    lane = Lane()
    lane.holds.add(hold())
    lane.holds.signal([("t", 7)])
    assert lane.posted == []


def test_many_signals_before_the_lane_runs_are_one_wake() -> None:
    lane = Lane()
    waiting = hold()
    lane.holds.add(waiting)
    for _ in range(10):
        lane.holds.signal([("t", 0)])
    assert len(lane.posted) == 1
    lane.turn()
    assert lane.woken == [[waiting]]


def test_a_signal_during_the_wake_wakes_again() -> None:
    lane = Lane()
    lane.holds.add(hold())
    lane.holds.signal([("t", 0)])
    lane.turn()
    lane.holds.signal([("t", 0)])
    lane.turn()
    assert len(lane.woken) == 2


def test_a_hold_that_is_gone_is_not_woken() -> None:
    lane = Lane()
    gone, there = hold(), hold()
    lane.holds.add(gone)
    lane.holds.add(there)
    lane.holds.signal([("t", 0)])
    assert lane.holds.remove(gone)
    assert not lane.holds.remove(gone)
    lane.turn()
    assert lane.woken == [[there]]
    assert lane.holds.all() == [there]


def test_many_holds_are_woken_in_slices_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds_module, "WAKE_COUNT_MAX", 3)
    lane = Lane()
    waiting = [hold() for _ in range(8)]
    for each in waiting:
        lane.holds.add(each)
    lane.holds.signal([("t", 0)])
    lane.turn()
    assert lane.woken == [waiting[:3]]
    lane.holds.remove(waiting[4])
    lane.turn()
    lane.turn()
    assert lane.woken[1:] == [[waiting[3], waiting[5]], waiting[6:]]
    assert lane.posted == []


def test_holds_of_one_moment_end_by_one_timer_and_none_keeps_another() -> None:
    timers = Timers()
    lane = Lane()
    ended: list[Hold] = []

    def end(which: Hold) -> None:
        ended.append(which)
        if which is broken:
            raise ValueError("no answer")
        if which is closing:
            dropped.cancel_timer()

    def made() -> Hold:
        made_hold = Hold(("t", 0), cast(Any, None), PullRequest(), frozenset(), 0, 0.0, on_expiry=end, on_drop=end)
        lane.holds.add(made_hold)
        return made_hold

    broken, other, gone = made(), made(), made()
    for one in (broken, other, gone):
        lane.holds.end_together(one, 60_000, lambda callback: timers.add(60.0, callback))
    later, closing, dropped = made(), made(), made()
    lane.holds.end_together(later, 60_001, lambda callback: timers.add(60.001, callback))
    assert len(timers) == 2
    gone.cancel_timer()
    for callback in timers.due(60.0):
        callback()
    assert {broken, other} == set(ended)
    ended.clear()
    # The moment is over: who comes now has a timer of its own.
    lane.holds.end_together(other, 60_000, lambda callback: timers.add(60.0, callback))
    other.cancel_timer()
    later.cancel_timer()
    assert len(timers) == 0
    for one in (closing, dropped):
        lane.holds.end_together(one, 61_000, lambda callback: timers.add(61.0, callback))
    for callback in timers.due(61.0):
        callback()
    assert closing in ended
    assert len(ended) == 1 or ended == [dropped, closing]


def test_holds_of_one_queue_share_its_key() -> None:
    lane = Lane()
    first, second = hold("".join(["t", "t"])), hold("tt")
    for one in (first, second):
        lane.holds.add(one)
    assert first.key is second.key
