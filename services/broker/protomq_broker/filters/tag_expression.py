"""Tags as RocketMQ's subscriptions write them: `a || b`, `*` for all. Pure."""

from __future__ import annotations

from protomq.wire.record import NOT_IN_TAGS

from .errors import FilterError

ALL = "*"


def parse_tags(text: str) -> tuple[str, ...]:
    """The tags, each once; () for all. Raises FilterError."""
    tags: dict[str, None] = {}
    position = 0
    for part in text.split("||"):
        tag = part.strip(" ")
        at = position + len(part) - len(part.lstrip(" "))
        if not tag and text.strip(" "):
            raise FilterError("a tag is expected on both sides of ||", text, at, ("a tag",))
        if wrong := NOT_IN_TAGS.search(tag):
            raise FilterError(
                f"no tag has {wrong[0]!r}: separate tags by ||", text, at + wrong.start(), ("||",)
            )
        tags[tag] = None
        position += len(part) + 2
    return () if ALL in tags or "" in tags else tuple(tags)
