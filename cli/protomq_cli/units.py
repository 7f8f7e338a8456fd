"""Sizes, durations and rates as people write them: `4KiB`, `1.5m`, `20k`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_SIZES: Final = {
    "": 1, "b": 1,
    "k": 1 << 10, "kb": 1000, "kib": 1 << 10,
    "m": 1 << 20, "mb": 1000**2, "mib": 1 << 20,
    "g": 1 << 30, "gb": 1000**3, "gib": 1 << 30,
}  # fmt: skip
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTS: Final = {"": 1, "k": 1000, "m": 1000**2}
_VALUE_MAX: Final = float(1 << 63)
"""What a 64-bit number holds: a slip of the keyboard must not become infinity."""


def parse_size(text: str) -> int:
    """Bytes: `128`, `128B`, `4k` and `4KiB` (1024 each), `4KB` (1000 each)."""
    return round(_parse(text, _SIZES, "size", "128, 128B, 4KiB, 1MiB"))


def parse_duration(text: str) -> float:
    """Seconds: `5`, `500ms`, `30s`, `2m`, `1h`, `7d`."""
    return _parse(text, _SECONDS, "duration", "500ms, 30s, 2m, 1h, 7d")


def parse_count(text: str) -> int:
    """A number of things: `1000`, `20k`, `1.5m`."""
    return round(_parse(text, _COUNTS, "number", "1000, 20k, 1.5m"))


def format_size(size_bytes: float) -> str:
    """`1.5 MiB`: at most three digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def format_ms(seconds: float) -> str:
    """Milliseconds with three digits that mean something: `0.113`, `4.20`, `120`."""
    value = seconds * 1000
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _parse(text: str, units: Mapping[str, float], noun: str, forms: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is no {noun}; write {forms}")
    value = float(match[1]) * units[match[2].lower()]
    if value > _VALUE_MAX:
        raise ValueError(f"{text!r} is more than any {noun} can be; write {forms}")
    return value
