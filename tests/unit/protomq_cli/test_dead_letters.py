"""What `protomq dlq replay` says on a terminal while it works."""

from __future__ import annotations

import pytest

from protomq import ReplayProgress
from protomq_cli.dead_letters import _say_progress


def test_progress_stays_on_one_line_until_all_are_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    for looked_at, replayed in ((10, 7), (20, 16)):
        _say_progress(ReplayProgress("g", replayed=replayed, looked_at=looked_at, total=20))
    assert capsys.readouterr().err == (
        "\r10 of 20 dead letters looked at, 7 replayed\r20 of 20 dead letters looked at, 16 replayed\n"
    )
