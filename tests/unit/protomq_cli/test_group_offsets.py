"""`group reset`: where a group goes on in queues that do not have the offset."""

from __future__ import annotations

import time

import pytest
import typer

from protomq import MessageQueue, QueueRange
from protomq_cli.group_offsets import nearest_places
from protomq_cli.offsets import AtTime, FromEnd
from protomq_cli.places import refuse_ahead

RANGES = {
    MessageQueue("t", "a", 0): QueueRange(0, 2),
    MessageQueue("t", "a", 1): QueueRange(5, 120),
    MessageQueue("t", "b", 0): QueueRange(0, 40),
}

BEYOND = (
    "offset 99 is beyond the end of 2 queues, so the group goes on at their ends: with what comes next "
    "(queue 0 at a ends at 2, queue 0 at b ends at 40)"
)


@pytest.mark.parametrize(
    ("queue_offset", "told"),
    [
        (
            99,
            [BEYOND],
        ),
        (
            3,
            [
                "offset 3 is beyond the end of 1 queue, so the group goes on at its end: with what comes next (queue 0 at a ends at 2)",
                "offset 3 is not stored any more in 1 queue, so the group goes on at its first message (queue 1 at a begins at 5)",
            ],
        ),
        (2, ["offset 2 is not stored any more in 1 queue, so the group goes on at its first message (queue 1 at a begins at 5)"]),
    ],
)
def test_where_a_group_goes_on_in_queues_that_do_not_have_the_offset_is_told(queue_offset: int, told: list[str]) -> None:
    assert nearest_places(queue_offset, RANGES) == told


def test_where_all_queues_have_it_nothing_is_told() -> None:
    assert nearest_places(40, {MessageQueue("t", "b", 0): QueueRange(0, 40)}) == []


def test_of_many_queues_three_are_named() -> None:
    (told,) = nearest_places(7, {MessageQueue("t", "a", queue_id): QueueRange(0, 1) for queue_id in range(8)})
    assert told.endswith("(queue 0 at a ends at 1, queue 1 at a ends at 1, queue 2 at a ends at 1, …)")


def test_a_time_ahead_is_refused_and_one_that_clocks_may_differ_by_is_not() -> None:
    now_ms = int(time.time() * 1000)
    refuse_ahead(AtTime(now_ms + 10_000), "--to")
    refuse_ahead(FromEnd(), "--to")
    with pytest.raises(typer.BadParameter, match=r"2062-11-01 00:00:00\+00:00 lies ahead.*would be skipped; if that is wanted, write end"):
        refuse_ahead(AtTime(2_929_564_800_000), "--to")
