"""The older runs of sequences that one producer has stored, and where: arithmetic over a flat array. See `repeated_sends.py`.

    runs    array("Q"): first, end, queue, queue offset of a run, those of the next one, …; sorted, none overlap

A run: sequences [first, end), the number of their queue, the queue offset of the first one. One array costs 112 bytes and a run 32.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from struct import Struct
from typing import Final

RUN_FIELDS: Final = 4
pack_run: Final = Struct(f"={RUN_FIELDS}Q").pack
"""A run as it stands in the array, for `frombytes`: faster than to append its fields."""

Run = tuple[int, int, int, int]


def run_count(runs: array[int]) -> int:
    """Number of runs."""
    return len(runs) // RUN_FIELDS


def insert_run(runs: array[int], first: int, end: int, queue: int, queue_offset: int) -> bool:
    """Adds a run at its place; whether there is one more now. One that overlaps another is left out: it is known."""
    at = _index_behind(runs, first)
    field = RUN_FIELDS * at
    if (at and runs[field - 3] > first) or (field < len(runs) and runs[field] < end):
        return False
    if at:
        before = field - RUN_FIELDS
        ahead = first - runs[before]
        if (
            runs[before + 1] == first
            and runs[before + 2] == queue
            and runs[before + 3] + ahead == queue_offset
        ):
            runs[before + 1] = end
            return False
    runs[field:field] = array("Q", (first, end, queue, queue_offset))
    return True


def overlapping_run(runs: array[int], first: int, end: int) -> Run | None:
    """The first run that shares sequences with [first, end)."""
    field = RUN_FIELDS * _index_behind(runs, first)
    if field and runs[field - 3] > first:
        field -= RUN_FIELDS
    if field < len(runs) and runs[field] < end:
        return runs[field], runs[field + 1], runs[field + 2], runs[field + 3]
    return None


def forget_oldest_runs(runs: array[int]) -> tuple[int, int]:
    """Forgets a quarter of the runs, one at least: (how many, the end of the last of them)."""
    count = max(1, run_count(runs) // 4)
    floor = runs[RUN_FIELDS * (count - 1) + 1]
    del runs[: RUN_FIELDS * count]
    return count, floor


def _index_behind(runs: array[int], sequence: int) -> int:
    """Number of runs that begin at `sequence` or before it."""
    count = run_count(runs)
    if count and runs[-RUN_FIELDS] <= sequence:
        return count
    return bisect_right(range(count), sequence, key=lambda index: runs[RUN_FIELDS * index])
