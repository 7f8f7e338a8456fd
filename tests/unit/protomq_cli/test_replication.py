"""`ha status`: what a row says."""

from __future__ import annotations

import pytest

from protomq import BrokerRole, HaStatus
from protomq_cli.replication import _row


def state(role: BrokerRole, *, problem: str = "", master_address: str = "") -> HaStatus:
    return HaStatus(
        broker_name="b",
        broker_id=0,
        role=role,
        epoch=1,
        first_position=0,
        end_position=100,
        flushed_position=100,
        confirmed_position=100,
        replicas=(),
        in_sync_count=3,
        in_sync_replicas=2,
        min_in_sync_replicas=1,
        master_address=master_address,
        master_end_position=0,
        master_silence_ms=None,
        problem=problem,
    )


@pytest.mark.parametrize("problem", ["", "no space for an append"])
def test_a_master_with_a_problem_still_shows_its_copies(problem: str) -> None:
    row = _row(state(BrokerRole.SYNC_MASTER, problem=problem), as_table=True)
    assert (row["in_sync"], row["problem"]) == ("3 of 2", problem)


@pytest.mark.parametrize("problem", ["", "it does not follow"])
def test_a_slave_counts_no_copies(problem: str) -> None:
    row = _row(state(BrokerRole.SLAVE, problem=problem, master_address="m:1"), as_table=True)
    assert (row["in_sync"], row["problem"]) == ("", problem)
