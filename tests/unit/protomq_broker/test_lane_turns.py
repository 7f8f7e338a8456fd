"""Work in slices: by turns, one slice a turn, whatever a slice does. The lane is a list of posted functions."""

import pytest

from protomq_broker.lane_turns import LaneTurns


class Lane:
    def __init__(self):
        self.posted: list = []
        self.turns = LaneTurns(self.posted.append)

    def turn(self):
        posted, self.posted[:] = list(self.posted), []
        for function in posted:
            function()


def test_works_take_turns_and_a_turn_is_one_slice():
    lane = Lane()
    done: list[str] = []

    def work(name, slices):
        left = iter(range(slices - 1, -1, -1))

        def step():
            done.append(name)
            return next(left) > 0

        return step

    lane.turns.add(work("a", 3))
    lane.turns.add(work("b", 1))
    lane.turns.add(work("c", 2))
    counts = []
    while lane.posted:
        assert len(lane.posted) == 1
        lane.turn()
        counts.append(len(done))
    assert "".join(done) == "abcaca"
    assert counts == [1, 2, 3, 4, 5, 6]


def test_work_may_add_work():
    lane = Lane()
    done: list[str] = []

    def inner():
        done.append("inner")
        return False

    def outer():
        lane.turns.add(inner)
        return False

    lane.turns.add(outer)
    for _ in range(3):
        lane.turn()
    assert done == ["inner"]
    assert not lane.posted


def test_work_that_fails_ends_and_harms_no_other():
    lane = Lane()
    done: list[str] = []

    def fail():
        raise ZeroDivisionError

    def other():
        done.append("other")
        return False

    lane.turns.add(fail)
    lane.turns.add(other)
    with pytest.raises(ZeroDivisionError):
        lane.turn()
    lane.turn()
    assert done == ["other"]
