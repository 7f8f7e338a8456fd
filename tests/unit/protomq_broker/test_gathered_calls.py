"""Calls of several callers are taken together; nobody waits for callers that do not come, or for longer than a moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from protomq_broker.gathered_calls import ENOUGH_COUNT, ENOUGH_SIZE_BYTES, GATHER_MS, GatheredCalls
from protomq_runtime.errors import invalid_argument
from tests.support.retry_world import Call, Lane


class _Timer:
    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        self.function = None


class _Lane(Lane):
    """Its time passes when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[_Timer] = []

    def call_later(self, delay_ms: float, function: Callable[[], None]) -> _Timer:
        assert delay_ms == GATHER_MS
        self.timers.append(_Timer(function))
        return self.timers[-1]

    @property
    def waits_for_time(self) -> bool:
        return any(timer.function is not None for timer in self.timers)

    def time_passes(self) -> None:
        timers, self.timers = self.timers, []
        for timer in timers:
            if timer.function is not None:
                timer.function()


class World:
    """`taken`: what was taken together, in names."""

    def __init__(self) -> None:
        self.lane = _Lane()
        self.taken: list[str] = []
        self.error: Exception | None = None
        self.calls: dict[str, Call] = {}
        self.gathered = GatheredCalls(self.lane, self._take)  # type: ignore[arg-type]

    def _take(self, calls: Sequence[Any]) -> None:
        if self.error is not None:
            raise self.error
        self.taken.append("".join(call.payload.decode()[0] for call in calls))

    def come(self, names: str, size_bytes: int = 1) -> None:
        for name in names:
            self.calls[name] = Call(name.encode() * size_bytes, self.lane)
        self.gathered.add([self.calls[name] for name in names])  # type: ignore[misc]

    def answer(self, names: str) -> None:
        for name in names:
            self.calls[name].answer(b"")


def test_a_caller_alone_never_waits() -> None:
    world = World()
    for _ in range(5):
        world.come("a")
        world.answer("a")
    assert world.taken == ["a"] * 5
    assert not world.lane.waits_for_time


def test_callers_that_have_asked_at_one_time_are_taken_together_from_then_on() -> None:
    world = World()
    world.come("a")
    world.come("b")
    world.answer("ab")
    assert world.taken == ["a"], "another one asks as well: the second call waits for a third"
    world.lane.time_passes()
    world.taken.clear()
    world.come("a")
    world.come("b")
    world.answer("a")
    world.come("a")
    assert world.taken == ["a", "ba"]
    world.answer("ab")
    world.come("b")
    assert world.taken == ["a", "ba"]
    world.come("a")
    assert world.taken == ["a", "ba", "ba"]
    assert not world.lane.waits_for_time


def test_nobody_is_waited_for_who_does_not_come_and_the_next_call_does_not_wait() -> None:
    world = World()
    world.come("abc")
    world.answer("abc")
    world.come("a")
    world.come("b")
    assert world.taken == ["abc"]
    world.lane.time_passes()
    assert world.taken == ["abc", "ab"]
    world.answer("ab")
    world.come("a")
    world.lane.time_passes()
    world.answer("a")
    world.come("a")
    assert world.taken == ["abc", "ab", "a", "a"]


@pytest.mark.parametrize(
    ("names", "size_bytes"), [("x", ENOUGH_SIZE_BYTES), ("xy", ENOUGH_SIZE_BYTES // 2), ("abcdefghijklmnop", 1)]
)
def test_with_enough_gathered_nobody_is_waited_for(names: str, size_bytes: int) -> None:
    assert len(names) in (1, 2, ENOUGH_COUNT)
    world = World()
    everyone = "abcdefghijklmnopqrstuvwxyz"
    world.come(everyone)
    world.answer(everyone)
    for name in names:
        assert world.taken == [everyone]
        world.come(name, size_bytes)
    assert world.taken == [everyone, names]
    assert not world.lane.waits_for_time


def test_what_fails_is_told_to_all_who_were_gathered() -> None:
    world = World()
    world.come("ab")
    world.answer("ab")
    world.error = invalid_argument("field", "is wrong")
    world.come("a")
    world.come("b")
    assert [world.calls[name].outcome for name in "ab"] == [world.error] * 2
