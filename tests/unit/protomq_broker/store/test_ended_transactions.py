"""The table of transactions that have ended says what a list says, while it grows and when it is full."""

from __future__ import annotations

import random

import pytest

from protomq_broker.store.state.ended_transactions import EndedTransactions, rows_of


@pytest.mark.parametrize("seed", range(20))
def test_it_says_what_a_list_says(seed: int) -> None:
    rng = random.Random(seed)
    count_max = rng.randrange(1, 12)
    table = EndedTransactions(count_max)
    expected: list[tuple[int, int, int, int, int]] = []
    for number in range(40):
        if rng.random() < 0.7:
            endings = [rng.randrange(1, 4) for _ in range(rng.choice((1, 1, 2, 5, 13)))]
            # Some have ended before, or end twice here: then the first ending counts.
            keys = [(7, 1, max(number - rng.randrange(3) * (rng.random() < 0.2), 0)), *((8, 1, rng.randrange(30)) for _ in endings[1:])]
            if rng.random() < 0.4:  # sent together
                first = rng.randrange(20)
                keys = [(8, 1, first + index) for index in range(len(endings))]
            table.add_all(keys, endings, 100 * number)
            first_endings = dict(reversed(list(zip(keys, endings, strict=True))))
            for key, ending in sorted(first_endings.items()):
                if key not in [row[:3] for row in expected]:
                    expected = [*expected, (*key, ending, 100 * number)][-count_max:]
        elif expected:
            first_kept = rng.choice(expected)[4]
            table.forget_below(first_kept)
            expected = [row for row in expected if row[4] >= first_kept]
        assert rows_of(table.runs()).tolist() == expected
        assert len(table) == len(expected)
        every = [(7, 1, n) for n in range(number + 1)] + [(8, 1, n) for n in range(30)]
        known = {row[:3]: row[3] for row in expected}
        assert [table.get(key) for key in every] == [known.get(key) for key in every]
        assert [table.has_any(*key[:2], range(key[2], key[2] + 1)) for key in every] == [key in known for key in every]
    loaded = EndedTransactions(count_max)
    loaded.load(rows_of(table.runs()))
    assert rows_of(loaded.runs()).tolist() == expected
