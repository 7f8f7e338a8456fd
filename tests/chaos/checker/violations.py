"""What a check found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SHOWN_MAX = 20


class Violation(NamedTuple):
    """A promise that was broken: which one (as in docs/reliability.md), and how."""

    invariant: str
    message: str


def explain(violations: Sequence[Violation]) -> str:
    """For a failed test."""
    lines = [f"{violation.invariant}: {violation.message}" for violation in violations[:SHOWN_MAX]]
    if len(violations) > SHOWN_MAX:
        lines.append(f"… and {len(violations) - SHOWN_MAX} more")
    return "\n".join(lines)
