"""What a subscription asks brokers to filter by, besides tags: a condition in SQL92 or CEL."""

from __future__ import annotations

from typing import Final, NamedTuple

from ._checks import check_text
from .errors import ConfigurationError

_SQL92: Final = 2
_CEL: Final = 3
"""protomq.v1.FilterType"""


class MessageFilter(NamedTuple):
    """A condition, and the number of its language in protomq.v1.FilterType; 0: none."""

    type_number: int = 0
    expression: str = ""


NO_FILTER: Final = MessageFilter()


def checked_filter(tags: tuple[str, ...], sql: str | None, cel: str | None) -> MessageFilter:
    """The filter of a subscription; its text is the broker's to judge. Raises ConfigurationError for more than one thing to filter by."""
    if sum((bool(tags), sql is not None, cel is not None)) > 1:
        raise ConfigurationError(
            "give one of tags, sql and cel; in SQL92 and CEL, TAGS is the message's tag"
        )
    if sql is not None:
        return MessageFilter(_SQL92, check_text("sql", sql))
    if cel is not None:
        return MessageFilter(_CEL, check_text("cel", cel))
    return NO_FILTER
