"""Rows of `group offsets`: what the broker says of the lag, and what stands beyond the end is told."""

from __future__ import annotations

import pytest

from protomq import GroupLag, MessageQueue
from protomq_cli.groups import _offset_row

QUEUE = MessageQueue("t", "b", 3)


@pytest.mark.parametrize(("committed", "lag"), [(None, 20), (0, 20), (12, 18), (30, 0), (35, 0)])
def test_a_row_has_what_its_broker_says(
    committed: int | None, lag: int, capsys: pytest.CaptureFixture[str]
) -> None:
    row = _offset_row("g", GroupLag(QUEUE, committed, 30, lag, 0.0), min_offset=10)
    assert (row["min_offset"], row["committed_offset"], row["end_offset"], row["lag"]) == (10, committed, 30, lag)
    told = capsys.readouterr().err
    assert ("g has committed 35 in queue 3 of t at b, beyond its end 30" in told) == (committed == 35)
