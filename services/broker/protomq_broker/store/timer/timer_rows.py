"""Rows of the timer, as arrays: what falls due when. Pure.

    row   due_ms u64 | position u64 | size u32 | kind u32           24 octets; its key is (due_ms, position)

A row of the kind REMOVED takes away the row with its key: what was recalled or moved while its row stood in a file. The two meet when
files are merged or read, and both go. Positions are those of records in the log, so a key comes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROW: Final = np.dtype([("due_ms", "<u8"), ("position", "<u8"), ("size", "<u4"), ("kind", "<u4")])
ROW_SIZE_BYTES: Final = ROW.itemsize
assert ROW_SIZE_BYTES == 24

MESSAGE: Final = 0
"""Of a row: a message that is delivered when it falls due."""
REMOVED: Final = 0xFFFFFFFF
ASIDE: Final = 0xFFFFFFFE
"""Pending, but its record cannot be read. In memory only."""
NO_ROWS: Final[NDArray[Any]] = np.empty(0, ROW)


class Key(NamedTuple):
    """Where a row stands in the order."""

    due_ms: int
    position: int


LAST_KEY: Final = Key((1 << 64) - 1, (1 << 64) - 1)
"""No row has it: it stands behind all."""


def make_rows(
    due_ms: NDArray[Any] | int,
    positions: NDArray[Any] | Sequence[int],
    sizes: NDArray[Any] | int,
    kind: int,
) -> NDArray[Any]:
    """Rows of one kind from columns."""
    rows = np.empty(len(positions), ROW)
    rows["due_ms"], rows["position"], rows["size"], rows["kind"] = due_ms, positions, sizes, kind
    return rows


def key_at(rows: NDArray[Any], index: int) -> Key:
    """The key of one row."""
    return Key(int(rows["due_ms"][index]), int(rows["position"][index]))


def sort_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """The rows by key; of equal ones the REMOVED last."""
    # Parts that are in order already, one behind the other, are merged by a stable sort; ties are mostly in order then.
    found = rows[np.argsort(rows["due_ms"], kind="stable")]
    due_ms, positions, kinds = found["due_ms"], found["position"], found["kind"]
    is_wrong = positions[1:] < positions[:-1]
    is_wrong |= (positions[1:] == positions[:-1]) & (kinds[1:] < kinds[:-1])
    is_wrong &= due_ms[1:] == due_ms[:-1]
    return found[np.lexsort((kinds, positions, due_ms))] if is_wrong.any() else found


def cancel(rows: NDArray[Any], *, keep_removals: bool) -> NDArray[Any]:
    """Sorted rows without those that a removal among them takes away, and without these removals.

    `keep_removals`: others may stand elsewhere, and removals that found none stay; else they go too.
    """
    if not len(rows) or not (rows["kind"] == REMOVED).any():
        return rows
    due_ms, positions = rows["due_ms"], rows["position"]
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (due_ms[1:] != due_ms[:-1]) | (positions[1:] != positions[:-1])
    firsts = np.flatnonzero(begins)
    lasts = np.append(firsts[1:], len(rows)) - 1
    is_removed = rows["kind"] == REMOVED
    found_none = is_removed[firsts]  # nothing but removals has this key
    kept = ~is_removed[lasts]
    if keep_removals:
        kept |= found_none
    return rows[lasts[kept]]


def merge_rows(parts: Sequence[NDArray[Any]], *, keep_removals: bool) -> NDArray[Any]:
    """Parts, each of any order, as one that is sorted, with removals done."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return NO_ROWS
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return cancel(sort_rows(rows), keep_removals=keep_removals)


def count_through(rows: NDArray[Any], key: Key) -> int:
    """How many of the sorted rows have this key or a smaller one."""
    due_ms = rows["due_ms"]
    start = int(np.searchsorted(due_ms, np.uint64(key.due_ms), "left"))
    end = int(np.searchsorted(due_ms, np.uint64(key.due_ms), "right"))
    positions = rows["position"][start:end]
    return start + int(np.searchsorted(positions, np.uint64(key.position), "right"))


def through(rows: NDArray[Any], key: Key) -> NDArray[np.bool_]:
    """Which of the rows, of any order, have this key or a smaller one."""
    due_ms = rows["due_ms"]
    before: NDArray[np.bool_] = due_ms < np.uint64(key.due_ms)
    before |= (due_ms == np.uint64(key.due_ms)) & (rows["position"] <= np.uint64(key.position))
    return before


def mark_removed(rows: NDArray[Any], removals: NDArray[Any]) -> NDArray[Any]:
    """Marks the sorted `rows` that have the keys of the sorted `removals`, in place. Returns the removals of which none is there."""
    if not len(rows) or not len(removals):
        return removals
    start = count_through(rows, Key(int(removals["due_ms"][0]), 0))
    start -= start > 0 and int(rows["due_ms"][start - 1]) == int(removals["due_ms"][0])
    end = count_through(rows, key_at(removals, -1))
    part = rows[start:end]
    # Keys are looked up by position, which is unique; within the due times that the removals span.
    order = np.argsort(removals["position"], kind="stable")
    wanted = removals["position"][order]
    places = np.minimum(np.searchsorted(wanted, part["position"]), len(wanted) - 1)
    is_wanted = (wanted[places] == part["position"]) & (part["kind"] != REMOVED)
    part["kind"][is_wanted] = REMOVED
    if np.count_nonzero(is_wanted) == len(removals):
        return removals[:0]
    return removals[np.isin(removals["position"], part["position"][is_wanted], invert=True)]
