"""An SQL92 expression, ready to be asked about runs of records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .constants import best_clause, needed_tags
from .fields import FieldReader
from .search import patterns_of, records_with
from .sql_rules import names_in, rule_of
from .sql_syntax import parse

_SAMPLE_COUNT: Final = 64
"""Records that are searched first: where most of them have the constants, as the name of a property that all have, the others will, too."""


class SqlFilter:
    """Any thread. A `Filter` of filter_book.py."""

    records_max = 1_024

    def __init__(self, expression: str) -> None:
        """Raises FilterError."""
        node = parse(expression)
        names = names_in(node)
        clause = best_clause(node)
        self.tags = needed_tags(node)
        self._rule = rule_of(node, names)
        self._reader = FieldReader(names)
        self._patterns = () if clause is None else patterns_of(clause)

    def matching(self, data: bytes, starts: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Indexes, ascending, of the record fields [start, start + size) of `data` that the expression is true of."""
        candidates = self._candidates(data, starts, sizes)
        if candidates is None:
            return self._true_of(data, starts, sizes)
        if not candidates:
            return []
        chosen = self._true_of(data, [starts[i] for i in candidates], [sizes[i] for i in candidates])
        return [candidates[i] for i in chosen]

    def _candidates(
        self, data: bytes, starts: Sequence[int], sizes: Sequence[int]
    ) -> list[int] | None:
        """Indexes of the records with the constants; None: all, since a search would not spare enough."""
        if not self._patterns:
            return None
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        if len(starts) >= 2 * _SAMPLE_COUNT:
            sample = records_with(
                data, starts[:_SAMPLE_COUNT], ends[:_SAMPLE_COUNT], self._patterns
            )
            if len(sample) > _SAMPLE_COUNT // 2:
                return None
        return records_with(data, starts, ends, self._patterns)

    def _true_of(self, data: bytes, starts: Sequence[int], sizes: Sequence[int]) -> list[int]:
        rule = self._rule
        found: list[int] = []
        for index, row in enumerate(self._reader.rows(data, starts, sizes)):
            try:
                if rule(row):
                    found.append(index)
            except ValueError:  # A text that is no number, where one is needed.
                continue
        return found
