"""Which records of a run contain a text: a search over the run's octets, so that nothing is decoded for the others. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from .constants import Clause, Literal

_SHORT_SIZE: int = 3
"""A text of up to 3 octets stands in many places. So the search looks for its length with it, in the two shapes that the length's last
octet has."""


def patterns_of(clause: Clause) -> tuple[bytes, ...]:
    """The octets to look for: each match has one of them."""
    patterns: set[bytes] = set()
    for literal in clause.literals:
        patterns.update(_patterns(literal))
    return tuple(patterns)


def _patterns(literal: Literal) -> tuple[bytes, ...]:
    octets = literal.octets
    if literal.is_whole and len(octets) <= _SHORT_SIZE:
        return bytes((len(octets),)) + octets, b"\0" + octets
    return (octets,)


def records_with(
    data: bytes, starts: Sequence[int], ends: Sequence[int], patterns: Sequence[bytes]
) -> list[int]:
    """Indexes, ascending, of the records [start, end) in which one of the patterns stands; they lie one behind the other in `data`."""
    found: set[int] = set()
    first, last = starts[0], ends[-1]
    for pattern in patterns:
        position = data.find(pattern, first, last)
        while position >= 0:
            index = bisect_right(starts, position) - 1
            end = ends[index]
            if position + len(pattern) <= end:
                found.add(index)
                position = data.find(pattern, end, last)
            else:  # It goes on behind the record: in a seal, or in the next one.
                position = data.find(pattern, position + 1, last)
    return sorted(found)
