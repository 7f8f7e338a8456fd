"""Texts of others, as logs and tables show them."""

from __future__ import annotations


def one_line(text: str) -> str:
    """The text without what would end its line or steer a terminal: such characters are written as Python writes them."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
