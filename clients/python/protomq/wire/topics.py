"""Topics that are the system's own: their names begin with `%`, which no user's topic has."""

from __future__ import annotations

from typing import Final

OFFSETS_TOPIC: Final = "%SYS%OFFSETS"
"""Records of committed offsets; see the message OffsetsRecord."""
