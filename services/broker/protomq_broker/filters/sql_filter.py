"""An SQL92 expression, ready to be asked about runs of records.

    columns    a walk through all records, and a rule for arrays: for most expressions
    rows       else: a search for constants first, and a rule for each record that has them
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .constants import best_clause, needed_tags
from .fields import FieldReader, front_size_of
from .filter_book import Matches
from .search import patterns_of, records_with
from .sql_columns import column_rule_of, comparison_count, rule_comparison_count
from .sql_rules import names_in, rule_of
from .sql_syntax import parse

_SAMPLE_COUNT: Final = 64
"""Records that are searched first: where most of them have the constants, as the name of a property that all have, the others will, too."""

_SEARCH_SIZE_MAX_BYTES: Final = 8 << 10
"""Mean size of records that are searched. A search through more octets, the body's too, takes longer than to parse the rest."""

_RECORDS_MAX: Final = 2_048
_RECORDS_MIN: Final = 64
"""A walk through so many costs three quarters of one through 512. Each comparison costs what some records cost, and as much for each record
that arrays leave open."""
_ROWS_MAX: Final = 256
"""Records of one call that the rule is asked about one by one, if it has one comparison: some 0.7 ms of work. Four more cost twice that."""
_ROWS_MIN: Final = 4
_ROWS_SIZE_MAX_BYTES: Final = 32 << 10
"""Octets of these records beside their bodies, unless one alone has more: protobuf takes a millisecond for 32 KiB of small properties."""


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
        self._reader = FieldReader(names)
        comparisons = comparison_count(node)
        self._rows_max = max(_ROWS_MAX * 5 // (4 + rule_comparison_count(node)), _ROWS_MIN)
        self.records_min = (
            4
            if self._column_rule is None or self._reader.needs_parse
            else max(_RECORDS_MAX // comparisons, _RECORDS_MIN)
        )
        self._patterns = () if clause is None else patterns_of(clause)

    def matching(self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]) -> Matches:
        """As of Filter."""
        found = self._by_columns(data, starts, sizes)
        if found is not None:
            return found
        candidates = self._candidates(data, starts, sizes)
        asked = np.arange(len(starts)) if candidates is None else np.array(candidates, np.int64)
        front_sizes = sizes[asked]
        if int(front_sizes.sum()) > _ROWS_SIZE_MAX_BYTES:
            some = asked[: self._rows_max + 1]
            places = zip(starts[some].tolist(), sizes[some].tolist(), strict=True)
            front_sizes = np.array([front_size_of(data, start, size) for start, size in places])
        asked, count = self._first_of(asked, front_sizes, len(starts))
        return Matches(self._asked_for(data, starts, sizes, asked), count)

    def _by_columns(
        self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]
    ) -> Matches | None:
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
            return Matches(is_true.nonzero()[0].tolist(), columns.count)
        asked, count = self._first_of(asked, columns.front_sizes(asked), columns.count)
        is_true = (is_true & ~is_open)[:count]
        is_true[self._asked_for(data, starts, sizes, asked)] = True
        return Matches(is_true.nonzero()[0].tolist(), count)

    def _first_of(
        self, asked: NDArray[np.int64], sizes: NDArray[Any], count: int
    ) -> tuple[NDArray[np.int64], int]:
        """Those of the records to ask about, of these sizes, that one call has time for; and how many records it has seen with them."""
        fitting = int(np.searchsorted(np.cumsum(sizes), _ROWS_SIZE_MAX_BYTES, "right"))
        fitting = min(max(fitting, 1), self._rows_max)
        if fitting >= len(asked):
            return asked, count
        return asked[:fitting], int(asked[fitting])

    def _candidates(
        self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]
    ) -> list[int] | None:
        """Indexes of the records with the constants; None: all, since a search would not spare enough."""
        if not self._patterns or int(sizes.sum()) > _SEARCH_SIZE_MAX_BYTES * len(sizes):
            return None
        firsts, ends = starts.tolist(), (starts + sizes).tolist()
        if len(firsts) >= 2 * _SAMPLE_COUNT:
            sample = records_with(
                data, firsts[:_SAMPLE_COUNT], ends[:_SAMPLE_COUNT], self._patterns
            )
            if len(sample) > _SAMPLE_COUNT // 2:
                return None
        return records_with(data, firsts, ends, self._patterns)

    def _asked_for(
        self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any], asked: NDArray[np.int64]
    ) -> list[int]:
        """Which of the records `asked` the rule is true of."""
        rule = self._rule
        found: list[int] = []
        rows = self._reader.rows(data, starts[asked], sizes[asked])
        for index, row in zip(asked.tolist(), rows, strict=True):
            try:
                if rule(row):
                    found.append(index)
            except ValueError:  # A text that is no number, where one is needed.
                continue
        return found
