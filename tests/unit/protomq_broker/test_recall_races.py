"""Recalls about the due time: before, while and after a batch is delivered, with a kill or a power cut at any operation between.

A recall wins or loses, never both: what was answered as recalled comes to nobody, what was answered as too late comes, and nothing comes
twice. Who asks again is told which it was.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq_broker.store.timer.timer import Watch
from protomq_broker.testing.simdisk import Fault, SimulatedCrash
from tests.support.delay_world import World

DUE_MS = 1_000
Moment = Literal["before", "reading", "appending", "after"]
MOMENTS: tuple[Moment, ...] = ("before", "reading", "appending", "after")


class Race(NamedTuple):
    """Messages by their delays; which of them is recalled when; and the operation of the disk at which everything ends, 0: none."""

    delays_ms: Sequence[int]
    recalls: Sequence[tuple[Moment, int]]
    crash_at: int
    is_kill: bool


@st.composite
def races(draw: st.DrawFn) -> Race:
    delays_ms = draw(st.lists(st.sampled_from((DUE_MS - 1, DUE_MS, DUE_MS + 1)), min_size=1, max_size=5))
    recall = st.tuples(st.sampled_from(MOMENTS), st.integers(0, len(delays_ms) - 1))
    recalls = draw(st.lists(recall, min_size=1, max_size=6))
    return Race(delays_ms, recalls, draw(st.integers(0, 8)), draw(st.booleans()))


class Runner:
    """`answers`: of each message that somebody recalled, what was said; "unknown": it ended before that."""

    def __init__(self, race: Race) -> None:
        self.race = race
        self.world = World().start()
        self.answers: dict[int, set[str]] = {}
        self.handles = [
            self.world.send(b"%d" % number, delay_ms=delay_ms).recall_handle
            for number, delay_ms in enumerate(race.delays_ms)
        ]
        self.world.store.flush()

    def recall(self, moment: Moment) -> None:
        for when, number in self.race.recalls:
            if when == moment:
                self.answers.setdefault(number, set()).add("unknown")
                won = self.world.recall(self.handles[number])
                self.answers[number] -= {"unknown"}
                self.answers[number].add("won" if won else "lost")

    def once(self, function: Callable[..., Any], moment: Moment, *, is_first: bool) -> Callable[..., Any]:
        """`function`, before or behind whose first call recalls come."""
        left = [moment]

        def run(*arguments: Any) -> Any:
            if is_first and left:
                self.recall(left.pop())
            result = function(*arguments)
            if left:
                self.recall(left.pop())
            return result

        return run

    def deliver(self) -> None:
        """One batch, about whose copying and appending there are recalls; it may end in the middle."""
        store, writer = self.world.store, self.world.mover._writer
        reading = self.once(store.read_records, "reading", is_first=False)
        appending = self.once(writer.run, "appending", is_first=True)
        with mock.patch.object(writer, "run", appending):
            # The recalls look the log up themselves: only the mover's reading is interrupted.
            with mock.patch("protomq_broker.timer_mover.copies_of", self._copies_with(reading)):
                self.world.mover.deliver()

    def _copies_with(self, reading: Callable[..., Any]) -> Callable[..., Any]:
        from protomq_broker.store.timer.carrying import copies_of

        return lambda rows, _, is_there, *, keeps_due_times: copies_of(
            rows, reading, is_there, keeps_due_times=keeps_due_times
        )

    def run(self) -> None:
        world = self.world
        self.recall("before")
        world.clock.time_ms += DUE_MS + 1
        if self.race.crash_at:
            world.disk.fail_at(self.race.crash_at, Fault.CRASH)
        try:
            self.deliver()
            self.recall("after")
        except SimulatedCrash:
            pass
        world.disk.plan = None
        disk = world.disk.killed() if self.race.is_kill else world.disk.crash(random.Random(self.race.crash_at))
        world.restart(disk)
        self.judge(Counter(world.deliver(10 * DUE_MS)))

    def judge(self, delivered: Counter[bytes]) -> None:
        """A power cut may take back what was appended and not synced, a recall too: then the message comes after all."""
        for number in range(len(self.handles)):
            times, answers = delivered[b"%d" % number], self.answers.get(number, set())
            assert times <= 1, f"message {number} was delivered {times} times"
            if "won" in answers and self.race.is_kill:
                assert times == 0, f"message {number} was recalled, and delivered"
            if not answers & {"won", "unknown"}:
                assert times == 1, f"message {number} is lost, {answers or 'and nobody recalled it'}"
            again = self.world.recall_answer(self.handles[number])
            assert not again.recalled, f"message {number} is recalled when all is over"
            assert again.recalled_before == (times == 0), f"message {number} was delivered {times} times, and a recall says {again}"
        assert self.world.store.pending.count == self.world.store.pending.size_bytes == 0


@settings(max_examples=60)
@given(races())
def test_a_recall_about_the_due_time_wins_or_loses(race: Race) -> None:
    Runner(race).run()


def test_every_moment_and_every_operation_of_one_message() -> None:
    for moment in MOMENTS:
        for crash_at in range(9):
            for is_kill in (True, False):
                Runner(Race((DUE_MS, DUE_MS), ((moment, 0),), crash_at, is_kill)).run()


def test_a_mover_that_does_not_look_for_recalls_again_is_caught() -> None:
    race = Race((DUE_MS, DUE_MS), (("appending", 1),), 0, True)
    no_ends = mock.patch.object(Watch, "has_ended", lambda _, rows: np.zeros(len(rows), np.bool_))
    with no_ends, pytest.raises(AssertionError, match=r"recalled, and delivered|size_bytes"):
        Runner(race).run()
