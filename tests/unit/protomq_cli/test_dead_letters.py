"""What `protomq dlq replay` says on a terminal while it works."""

from __future__ import annotations

import pytest

from protomq import DamagedLetters, ReplayProgress
from protomq_cli.dead_letters import _say_progress, check_replayed
from protomq_cli.exits import CliError, ExitCode


def test_progress_stays_on_one_line_until_all_are_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    for looked_at, replayed in ((10, 7), (20, 16)):
        _say_progress(ReplayProgress("g", replayed=replayed, looked_at=looked_at, total=20))
    assert capsys.readouterr().err == (
        "\r10 of 20 dead letters looked at, 7 replayed\r20 of 20 dead letters looked at, 16 replayed\n"
    )


def test_a_replay_that_leaves_something_is_no_success() -> None:
    check_replayed(ReplayProgress("g", replayed=7, known=2))
    with pytest.raises(CliError, match=r"1 dead letters stay .* `protomq dlq show g` names it .* then replay again") as refused:
        check_replayed(ReplayProgress("g", replayed=7, without_topic=1))
    with pytest.raises(CliError, match="group 'g' has no dead letter AB, CD") as unknown:
        check_replayed(ReplayProgress("g", unknown_ids=("AB", "CD")))
    assert (refused.value.exit_code, unknown.value.exit_code) == (ExitCode.REFUSED, ExitCode.NOT_FOUND)


def test_a_replay_that_leaves_out_what_is_damaged_names_it_and_what_is_lost_is_no_failure() -> None:
    damaged = [DamagedLetters("a", 3, 5, False), DamagedLetters("b", 7, 8, True), DamagedLetters("a", 13, 14, False)]
    progress = ReplayProgress("g", replayed=7, damaged=tuple(damaged))
    assert (progress.unreadable, progress.lost) == (3, 1)
    with pytest.raises(CliError, match=r"^3 dead letters are left out, .* offsets 3 to 4, 13 of broker a; .* replay again$") as refused:
        check_replayed(progress)
    assert (refused.value.exit_code, refused.value.reason) == (ExitCode.FAILURE, "CORRUPT_LOG")
    check_replayed(ReplayProgress("g", damaged=(damaged[1],)))
