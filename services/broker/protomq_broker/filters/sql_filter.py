"""An SQL92 expression, ready to be asked about runs of records.

    columns    a walk through all records, and a rule for arrays: for most expressions
    rows       else: a search for constants first, and a rule for each record that has them
"""

from __future__ import annotations

from typing import Any, Final

from numpy.typing import NDArray

from .constants import best_clause, needed_tags
from .fields import FieldReader, Rows
from .search import patterns_of, records_with
from .sql_columns import column_rule_of, comparison_count
from .sql_rules import names_in, rule_of
from .sql_syntax import parse

_SAMPLE_COUNT: Final = 64
"""Records that are searched first: where most of them have the constants, as the name of a property that all have, the others will, too."""

_RECORDS_MAX: Final = 2_048
_RECORDS_MIN: Final = 64
"""A walk through so many costs three quarters of one through 512. Each comparison costs what some records cost, and as much for each record
that arrays leave open."""


class SqlFilter:
    """Any thread. A `Filter` of filter_book.py."""

    records_max = _RECORDS_MAX

    def __init__(self, expression: str) -> None:
        """Raises FilterError."""
        node = parse(expression)
        names = names_in(node)
        clause = best_clause(node)
        self.tags = needed_tags(node)
        self._rule = rule_of(node, names)
        self._column_rule = column_rule_of(node)
        self.records_min = (
            4
            if self._column_rule is None
            else max(_RECORDS_MAX // comparison_count(node), _RECORDS_MIN)
        )
        self._reader = FieldReader(names)
        self._patterns = () if clause is None else patterns_of(clause)

    def matching(self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]) -> list[int]:
        """Indexes, ascending, of the record fields [start, start + size) of `data` that the expression is true of."""
        found = self._by_columns(data, starts, sizes)
        if found is not None:
            return found
        candidates = self._candidates(data, starts, sizes)
        if candidates is None:
            return self._true_of(self._reader.rows(data, starts, sizes))
        if not candidates:
            return []
        chosen = self._true_of(self._reader.rows(data, starts[candidates], sizes[candidates]))
        return [candidates[i] for i in chosen]

    def _by_columns(
        self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]
    ) -> list[int] | None:
        """As `matching`; None if there is no rule for arrays, or few records."""
        if self._column_rule is None:
            return None
        columns = self._reader.columns(data, starts, sizes)
        if columns is None:
            return None
        is_true, _, is_open = self._column_rule(columns)
        is_open = is_open | columns.is_odd
        asked = is_open.nonzero()[0]
        if not len(asked):
            return is_true.nonzero()[0].tolist()
        is_true = is_true & ~is_open
        is_true[asked[self._true_of(self._reader.rows(data, starts[asked], sizes[asked]))]] = True
        return is_true.nonzero()[0].tolist()

    def _candidates(
        self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]
    ) -> list[int] | None:
        """Indexes of the records with the constants; None: all, since a search would not spare enough."""
        if not self._patterns:
            return None
        firsts, ends = starts.tolist(), (starts + sizes).tolist()
        if len(firsts) >= 2 * _SAMPLE_COUNT:
            sample = records_with(
                data, firsts[:_SAMPLE_COUNT], ends[:_SAMPLE_COUNT], self._patterns
            )
            if len(sample) > _SAMPLE_COUNT // 2:
                return None
        return records_with(data, firsts, ends, self._patterns)

    def _true_of(self, rows: Rows) -> list[int]:
        rule = self._rule
        found: list[int] = []
        for index, row in enumerate(rows):
            try:
                if rule(row):
                    found.append(index)
            except ValueError:  # A text that is no number, where one is needed.
                continue
        return found
