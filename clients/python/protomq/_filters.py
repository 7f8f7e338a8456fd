"""What a subscription asks brokers to filter by, besides tags: a condition in SQL92 or CEL, or a module."""

from __future__ import annotations

from typing import Final, NamedTuple

from ._checks import check_text
from .errors import ConfigurationError
from .wire.hashing import crc32c

_SQL92: Final = 2
_CEL: Final = 3
_MODULE: Final = 4
"""protomq.v1.FilterType"""
TEXT_MAX_BYTES: Final = 8_192
"""Brokers take no member with a longer text."""
TEXT_BEGIN_LENGTH: Final = 1_000


class MessageFilter(NamedTuple):
    """A condition or the name of a module, and the number of its kind in protomq.v1.FilterType; 0: none."""

    type_number: int = 0
    expression: str = ""


def filter_text(tags: tuple[str, ...], wanted: MessageFilter) -> str:
    """The filter of a subscription for people, the same for the same messages; empty: all messages."""
    if tags:
        text = f"tags {', '.join(sorted(tags))}"
    else:
        kind = {_SQL92: "sql", _CEL: "cel", _MODULE: "module"}.get(wanted.type_number)
        text = f"{kind} {wanted.expression}" if kind else ""
    octets = text.encode()
    if len(octets) <= TEXT_MAX_BYTES:
        return text
    # Brokers compare the texts of members: a checksum tells what this one leaves out.
    return f"{text[:TEXT_BEGIN_LENGTH]}... ({len(octets)} octets, CRC {crc32c(octets):08x})"


NO_FILTER: Final = MessageFilter()


def checked_filter(
    tags: tuple[str, ...], sql: str | None = None, cel: str | None = None, module: str | None = None
) -> MessageFilter:
    """The filter of a subscription; its text is the broker's to judge. Raises ConfigurationError for more than one thing to filter by."""
    if sum((bool(tags), sql is not None, cel is not None, module is not None)) > 1:
        raise ConfigurationError(
            "give one of tags, sql, cel and module; in SQL92 and CEL, TAGS is the message's tag"
        )
    if sql is not None:
        return MessageFilter(_SQL92, check_text("sql", sql))
    if cel is not None:
        return MessageFilter(_CEL, check_text("cel", cel))
    if module is not None:
        return MessageFilter(_MODULE, check_text("module", module))
    return NO_FILTER
