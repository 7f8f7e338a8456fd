"""Offsets as runs: `[40, 3, 50, 1]` are 40, 41, 42 and 50. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def runs_of(offsets: Iterable[int]) -> list[int]:
    """Offsets as runs, in their order."""
    if isinstance(offsets, range) and offsets.step == 1:
        return [offsets.start, len(offsets)] if offsets else []
    # Most are one run. A list is compared as a whole: that takes half of the loop's time.
    if isinstance(offsets, list) and len(offsets) > 1 and offsets == list(range(offsets[0], offsets[0] + len(offsets))):
        return [offsets[0], len(offsets)]
    runs: list[int] = []
    end = -1
    for offset in offsets:
        if offset == end:
            runs[-1] += 1
        else:
            runs += (offset, 1)
        end = offset + 1
    return runs


def offsets_in(runs: Sequence[int]) -> Iterator[int]:
    """What the runs name."""
    for first, end in bounds(runs):
        yield from range(first, end)


def count_in(runs: Sequence[int]) -> int:
    """How many the runs name."""
    return runs[1] if len(runs) == 2 else sum(runs[1::2])


def add_run(runs: list[int], first: int, count: int) -> None:
    """Adds a run. The last run becomes longer where this one goes on from it."""
    if runs and runs[-2] + runs[-1] == first:
        runs[-1] += count
    else:
        runs += (first, count)


def bounds(runs: Sequence[int]) -> Sequence[tuple[int, int]]:
    """(first, one past the last) of each run."""
    if len(runs) == 2:  # nearly always
        first, count = runs
        return ((first, first + count),)
    return [(first, first + count) for first, count in zip(runs[::2], runs[1::2], strict=True)]
