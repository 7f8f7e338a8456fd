"""Rows of `group offsets`: a lag is never below zero, and what stands beyond the end is told."""

from __future__ import annotations

from typing import Any, cast

import pytest

from protomq import MessageQueue, PullConsumer
from protomq_cli.groups import _offset_row

QUEUE = MessageQueue("t", "b", 3)


class Consumer:
    """A consumer whose broker answers what it is told to."""

    group = "g"

    def __init__(self, committed: int | None) -> None:
        self._committed = committed

    def committed(self, queue: MessageQueue) -> int | None:
        return self._committed

    def queue_range(self, queue: MessageQueue) -> tuple[int, int]:
        return 10, 30


@pytest.mark.parametrize(("committed", "lag"), [(None, 20), (0, 20), (12, 18), (30, 0), (35, 0)])
def test_the_lag_of_a_queue(
    committed: int | None, lag: int, capsys: pytest.CaptureFixture[str]
) -> None:
    row = _offset_row(cast(PullConsumer, cast(Any, Consumer(committed))), QUEUE)
    assert (row["committed_offset"], row["end_offset"], row["lag"]) == (committed, 30, lag)
    told = capsys.readouterr().err
    assert ("g has committed 35 in queue 3 of t at b, beyond its end 30" in told) == (committed == 35)
