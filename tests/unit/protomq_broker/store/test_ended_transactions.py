"""The table of transactions that have ended says what a list says, while it grows and when it is full."""

from __future__ import annotations

import random

import pytest

from protomq_broker.store.state import ended_transactions as module
from protomq_broker.store.state.ended_transactions import EndedTransactions


@pytest.mark.parametrize("seed", range(20))
def test_it_says_what_a_list_says(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(module, "_ROWS_MIN", 2)
    count_max = rng.randrange(1, 12)
    table = EndedTransactions(count_max)
    expected: list[tuple[int, int, int, int, int]] = []
    for number in range(40):
        if rng.random() < 0.7:
            row = (7, 1, number, rng.randrange(1, 4), 100 * number)
            table.add(row[:3], *row[3:])
            expected = [*expected, row][-count_max:]
        elif expected:
            first_kept = rng.choice(expected)[4]
            table.forget_below(first_kept)
            expected = [row for row in expected if row[4] >= first_kept]
        assert table.rows().tolist() == expected
        assert len(table) == len(expected)
        assert [table.get((7, 1, n)) for n in range(number + 1)] == [
            next((row[3] for row in expected if row[2] == n), None) for n in range(number + 1)
        ]
    loaded = EndedTransactions(count_max)
    loaded.load(table.rows())
    assert loaded.rows().tolist() == expected
