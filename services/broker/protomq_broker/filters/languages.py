"""From a language and an expression in it to a filter."""

from __future__ import annotations

from .cel_filter import CelFilter
from .filter_book import Filter, FilterKey


def compile_filter(key: FilterKey) -> Filter:
    """Raises FilterError, and FilterUnavailableError where a library is missing."""
    if key.language == "CEL":
        return CelFilter(key.text)
    # Lark takes time to import, which brokers without such filters need not spend.
    from .sql_filter import SqlFilter

    return SqlFilter(key.text)
