"""Whom a supervisor starts, stops and kills."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protomq_cli.worker_policy import (
    BACKOFF_MAX_S,
    LIVED_S,
    UNLOADABLE,
    Action,
    Doing,
    Phase,
    WorkerPolicy,
)


def up(count: int) -> WorkerPolicy:
    made = WorkerPolicy(count, 30.0)
    assert made.step(0.0) == [Action(Doing.START, index) for index in range(count)]
    assert made.step(0.0) == []
    for index in range(count):
        made.ready(index)
    return made


def test_one_that_dies_is_started_again_after_growing_pauses() -> None:
    made, now_s, pauses = up(2), 0.0, []
    for _ in range(8):
        made.exited(1, -9, now_s)
        assert made.step(now_s) == []
        pauses.append(made.next_step_s(now_s))
        now_s += pauses[-1]
        assert made.step(now_s) == [Action(Doing.START, 1)]
    assert pauses == [1, 2, 4, 8, 16, BACKOFF_MAX_S, BACKOFF_MAX_S, BACKOFF_MAX_S]
    made.exited(1, 1, now_s + LIVED_S)
    assert made.next_step_s(now_s + LIVED_S) == 1
    assert made.slots[1].restarts == 9


def test_a_stop_asks_all_and_kills_who_is_not_done_in_time() -> None:
    made = up(2)
    made.stop(5.0)
    assert made.step(5.0) == [Action(Doing.STOP, 0), Action(Doing.STOP, 1)]
    made.exited(0, 0, 6.0)
    assert made.exit_code is None
    assert made.step(34.9) == []
    assert made.step(35.0) == [Action(Doing.KILL, 1)]
    assert made.step(36.0) == []
    made.exited(1, -9, 36.0)
    assert made.exit_code == 1
    assert made.step(99.0) == []


def test_a_process_that_a_stop_ends_before_it_takes_signals_has_lost_nothing() -> None:
    for is_ready, told, code in ((False, -15, 0), (False, 3, 0), (False, 2, 1), (True, -15, 1), (True, 3, 1)):
        made = WorkerPolicy(1, 30.0)
        made.step(0.0)
        if is_ready:
            made.ready(0)
        made.stop(0.1)
        made.step(0.1)
        made.exited(0, told, 0.2)
        assert made.exit_code == code


def test_a_second_stop_waits_for_nobody() -> None:
    made = up(1)
    made.stop(0.0)
    made.step(0.0)
    made.stop(1.0)
    assert made.step(1.0) == [Action(Doing.KILL, 0)]


def test_two_stops_at_once_wait_for_nobody_either() -> None:
    made = up(2)
    made.stop(1.0)
    made.stop(1.0)
    assert made.step(1.0) == [Action(Doing.STOP, 0), Action(Doing.STOP, 1)]
    assert made.next_step_s(1.0) == 0.0
    assert made.step(1.0) == [Action(Doing.KILL, 0), Action(Doing.KILL, 1)]


def test_a_replacement_goes_one_by_one_and_waits_until_the_new_one_is_ready() -> None:
    made = up(2)
    made.replace()
    assert made.step(1.0) == [Action(Doing.STOP, 0)]
    assert made.step(1.5) == []
    made.exited(0, 0, 2.0)
    assert made.step(2.0) == [Action(Doing.START, 0)]
    assert made.step(2.0) == []
    made.exited(0, 1, 3.0)  # The new program is broken: the second slot keeps the old one.
    assert made.step(3.0) == []
    assert made.step(4.0) == [Action(Doing.START, 0)]
    made.ready(0)
    assert made.step(5.0) == [Action(Doing.STOP, 1)]
    made.exited(1, 0, 6.0)
    assert made.step(6.0) == [Action(Doing.START, 1)]
    made.ready(1)
    assert made.step(7.0) == []
    assert [slot.phase for slot in made.slots] == [Phase.UP, Phase.UP]


def test_a_program_that_cannot_be_loaded_ends_it_at_its_start_and_not_later() -> None:
    made = WorkerPolicy(2, 30.0)
    made.step(0.0)
    made.exited(0, UNLOADABLE, 1.0)
    assert made.step(1.0) == [Action(Doing.STOP, 1)]
    made.exited(1, UNLOADABLE, 1.0)
    assert made.exit_code == 2
    later = up(1)
    later.exited(0, UNLOADABLE, 5.0)
    assert later.exit_code is None


def test_one_that_is_not_ready_in_time_is_killed_and_counts_as_a_failed_start() -> None:
    made, now_s, pauses = WorkerPolicy(2, 30.0, 300.0), 0.0, []
    made.step(0.0)
    made.ready(1)
    for _ in range(4):
        assert made.next_step_s(now_s) == 300.0
        assert made.step(now_s + 299.9) == []
        now_s += 300.0
        assert made.step(now_s) == [Action(Doing.KILL, 0)]
        assert made.step(now_s) == []
        made.exited(0, -9, now_s)
        pauses.append(made.next_step_s(now_s))
        now_s += pauses[-1]
        assert made.step(now_s) == [Action(Doing.START, 0)]
    assert pauses == [1, 2, 4, 8]
    assert made.slots[0].restarts == 4
    made.ready(0)
    assert made.next_step_s(now_s) == float("inf")
    assert made.step(now_s + 1_000.0) == []
    assert made.exit_code is None


def test_a_stop_asks_one_that_is_not_ready_yet() -> None:
    made = WorkerPolicy(1, 30.0, 300.0)
    made.step(0.0)
    made.stop(300.0)
    assert made.step(300.0) == [Action(Doing.STOP, 0)]
    assert made.next_step_s(300.0) == 30.0


@given(st.lists(st.tuples(st.sampled_from(["exit", "ready", "replace", "time"]), st.integers(0, 2), st.integers(0, 3)), max_size=80))
def test_whatever_happens_all_run_again_and_a_stop_ends_all(script: list[tuple[str, int, int]]) -> None:
    made, now_s, running = WorkerPolicy(3, 10.0), 0.0, set[int]()
    asked: set[int] = set()

    def step() -> None:
        for doing, index in made.step(now_s):
            if doing is Doing.START:
                assert index not in running
                running.add(index)
            else:
                assert index in running
                asked.add(index)
        if not made.is_stopping:
            assert len(asked) <= 1  # One by one.

    def leave(index: int, code: int) -> None:
        running.discard(index)
        asked.discard(index)
        made.exited(index, code, now_s)

    for kind, index, amount in script:
        step()
        if kind == "exit" and index in running:
            leave(index, -amount)
        elif kind == "ready" and index in running:
            made.ready(index)
        elif kind == "replace":
            made.replace()
        now_s += amount
    for _ in range(60):
        step()
        for index in list(asked):
            leave(index, 0)
        for index in running:
            made.ready(index)
        now_s += BACKOFF_MAX_S
    assert running == {0, 1, 2}
    assert not asked
    made.stop(now_s)
    step()
    assert asked == {0, 1, 2}
    for index in range(3):
        leave(index, 0)
    assert made.exit_code == 0
