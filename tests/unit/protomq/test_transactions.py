"""What a local execution says of its transaction."""

from __future__ import annotations

import pytest

from protomq import TransactionDecision
from protomq._transactions import decision_of
from protomq.errors import WrongTypeError


@pytest.mark.parametrize("returned", [None, 42, True, "row 7", TransactionDecision.COMMIT])
def test_it_commits_by_returning(returned: object) -> None:
    assert decision_of(returned) is TransactionDecision.COMMIT


@pytest.mark.parametrize("returned", [TransactionDecision.ROLL_BACK, TransactionDecision.UNKNOWN])
def test_another_decision_is_taken(returned: TransactionDecision) -> None:
    assert decision_of(returned) is returned


def test_work_that_nobody_awaits_commits_nothing() -> None:
    async def book() -> None: ...

    with pytest.raises(WrongTypeError, match="AsyncTransactionProducer"):
        decision_of(book())
