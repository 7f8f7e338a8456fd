"""Loops over a consumer: whoever goes, nothing that was not handed on is passed over, or said to be finished."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from protomq._loops import Loop
from protomq._pull_logic import PullOptions, PullState
from tests.support.interrupts import interrupted_everywhere

from .test_pull_logic import Q0, Q1, found, pull, state


def begun(made: PullState, count: int, *, seen: int) -> Loop:
    """A loop over the next `count` messages, that has handed on `seen` of them."""
    loop = Loop()
    made.loop_over(loop, made.take(count))
    hand_on(loop, seen)
    return loop


def hand_on(loop: Loop, count: int) -> list[int]:
    return [next(loop.left).queue_offset for _ in range(count)]


def of_two_loops() -> tuple[PullState, Loop, Loop]:
    """The first is at message 1, the second at 12."""
    made = state()
    made.answered(pull(made), found(0, 20), 0.0)
    return made, begun(made, 10, seen=2), begun(made, 10, seen=3)


@pytest.mark.parametrize("is_first_left_first", [False, True])
def test_two_loops_that_are_left_pass_nothing_over_in_whatever_order(*, is_first_left_first: bool) -> None:
    made, first, second = of_two_loops()
    for loop in (first, second) if is_first_left_first else (second, first):
        loop.is_over = True
        assert made.position(Q0) == (2 if loop is first or is_first_left_first else 13)
    assert made.position(Q0) == 2
    made.user_came_back()
    assert made.to_commit(safe_only=True) == {Q0: 2}


def test_a_close_that_ends_two_loops_commits_nothing_that_the_first_has_not_handed_on() -> None:
    made, first, second = of_two_loops()
    made.end_loops()
    made.user_came_back()
    assert not [*first.left, *second.left]
    assert made.to_commit(safe_only=True) == {Q0: 2}


def test_an_error_that_ends_a_loop_takes_back_the_message_that_it_is_at() -> None:
    made = state()
    made.answered(pull(made), found(0, 10), 0.0)
    begun(made, 10, seen=4)
    made.end_loops()
    assert made.to_commit(safe_only=True) == {Q0: 3}
    assert made.position(Q0) == 4
    made.user_came_back()
    assert made.to_commit(safe_only=True) == {Q0: 4}


def test_a_commit_in_a_loop_is_not_taken_back_by_an_error_at_the_same_message() -> None:
    made = state()
    made.answered(pull(made), found(0, 10), 0.0)
    begun(made, 10, seen=4)
    made.user_came_back()
    made.committed(made.to_commit(safe_only=True))
    made.end_loops()
    assert made.to_commit(safe_only=True) == {}


def test_an_error_that_ends_loops_and_a_poll_beside_them_says_nothing_of_what_they_are_at() -> None:
    made, _, _ = of_two_loops()
    made.end_loops()
    assert made.to_commit(safe_only=True) == {Q0: 1}
    made = state()
    made.answered(pull(made), found(0, 10), 0.0)
    begun(made, 5, seen=3)
    made.user_came_back()
    made.take(5)
    made.end_loops()
    assert made.to_commit(safe_only=True) == {Q0: 3}


def test_ctrl_c_anywhere_while_a_loop_that_was_left_is_given_back_loses_nothing() -> None:
    def left() -> PullState:
        made = state()
        made.answered(pull(made), found(0, 10), 0.0)
        begun(made, 10, seen=4).is_over = True
        return made

    for place, made in interrupted_everywhere(left, lambda made: made.user_came_back()):
        made.end_loops()
        assert made.to_commit(safe_only=True)[Q0] in (3, 4), place
        assert made.position(Q0) == 4, place
        made.user_came_back()
        assert made.to_commit(safe_only=True) == {Q0: 4}, place


def test_a_loop_that_asks_for_more_says_nothing_of_the_message_that_another_one_is_at() -> None:
    made, first, second = of_two_loops()
    assert hand_on(second, 7)[-1] == 19
    made.user_came_back(second)
    assert made.to_commit(safe_only=True) == {Q0: 1}
    assert hand_on(first, 8)[-1] == 9
    made.user_came_back(first)
    assert made.to_commit(safe_only=True) == {Q0: 20}


def test_a_commit_counts_the_message_that_a_loop_is_at() -> None:
    made, _, _ = of_two_loops()
    made.user_came_back()
    assert made.to_commit(safe_only=True) == {Q0: 2}


def test_what_a_commit_has_counted_in_one_loop_is_not_taken_back_when_another_one_asks_for_more() -> None:
    made, _, second = of_two_loops()
    made.user_came_back()
    made.committed(made.to_commit(safe_only=True))
    hand_on(second, 7)
    made.user_came_back(second)
    assert made.to_commit(safe_only=True) == {}


def test_a_seek_while_a_loop_has_messages_holds_when_another_one_takes_over_from_it() -> None:
    """Two tasks ask for the next message of one iterator."""
    made = state()
    made.answered(pull(made), found(0, 10), 0.0)
    loop = begun(made, 10, seen=2)
    made.seek(Q0, 50)
    made.answered(pull(made), found(50, 2), 0.0)
    made.loop_over(loop, made.take(10))
    assert hand_on(loop, 1) == [50]
    loop.is_over = True
    assert made.position(Q0) == 51


def test_a_seek_behind_a_loop_that_was_left_holds() -> None:
    made, first, second = of_two_loops()
    first.is_over = True
    made.seek(Q0, 15)
    second.is_over = True
    assert made.position(Q0) == 15


def test_messages_that_were_taken_back_by_a_fail_over_do_not_hide_what_came_in_their_place() -> None:
    made = state()
    made.answered(pull(made), found(0, 10), 0.0)
    loop = begun(made, 10, seen=8)
    made.follow_fork(Q0, 5, 2)
    loop.is_over = True
    assert made.position(Q0) == 5


def test_a_queue_whose_broker_is_away_goes_on_with_what_a_loop_has_not_handed_on() -> None:
    made = state(Q0, Q1)
    made.answered(pull(made), found(0, 10), 0.0)
    loop = begun(made, 10, seen=3)
    made.assign([Q1], {}, park=True)
    made.user_came_back()
    loop.is_over = True
    made.user_came_back()
    made.assign([Q0, Q1], {}, park=True)
    assert made.position(Q0) == 3
    assert made.to_commit(safe_only=True)[Q0] == 3


def test_a_queue_of_which_it_is_not_known_where_it_begins_is_not_told_by_an_old_loop() -> None:
    made = state(Q0, Q1)
    made.answered(pull(made), found(0, 10), 0.0)
    loop = begun(made, 10, seen=3)
    made.assign([Q1], {})
    made.assign([Q0, Q1], {})
    loop.is_over = True
    made.user_came_back()
    assert made.unresolved() == [Q0]


def test_loops_by_chance_lose_nothing() -> None:
    """What is committed was handed on, up to there; and all comes."""
    for seed in range(200):
        rng = random.Random(seed)
        made, seen, loops = PullState(PullOptions("g")), set[int](), list[Loop]()
        made.assign([Q0], {})
        made.start_all([Q0], {}, {}, incarnation=7)
        for _ in range(60):
            for queue in made.due(0.0):
                ticket = made.begin(queue)
                count = min(rng.randint(1, 8), 40 - ticket.queue_offset)
                if count > 0:
                    made.answered(ticket, found(ticket.queue_offset, count), 0.0)
                else:
                    made.restart()
            step, loop = rng.choice(["poll", "hand on", "hand on", "leave", "commit"]), rng.choice([*loops, Loop()])
            if step == "poll" and not [*loop.open_offsets()]:
                made.user_came_back(loop)
                made.loop_over(loop, made.take(rng.randint(1, 8)))
                loops = [*(one for one in loops if one is not loop), loop]
            elif step == "hand on":
                seen.update(message.queue_offset for message in islice(loop.left, rng.randint(1, 8)))
            elif step == "leave" and loop in loops:
                loop.is_over = True
                loops.remove(loop)
            elif step == "commit":
                made.user_came_back()
            committed = made.to_commit(safe_only=True).get(Q0, 0)
            assert seen.issuperset(range(committed)), f"seed {seed}"
        made.end_loops()
        made.user_came_back()
        position = made.to_commit(safe_only=True).get(Q0, 0)
        assert seen.issuperset(range(position)), f"seed {seed}"


def test_a_loop_keeps_no_messages_while_it_waits_for_more() -> None:
    made = state()
    made.answered(pull(made), found(0, 10), 0.0)
    loop = begun(made, 10, seen=10)
    made.user_came_back(loop)
    assert not loop.held_count
