"""The entries of one consume queue file while it is healed: which hold, where the log must have the others, and what was found.

    survey     which entries hold: their check bits are right, and they stand in order, within the log
    spans      where in the log the others must stand: behind the entry before them, before the one after
    take       puts in entries of the records that were read there
    fill_lost  puts in entries of lost records, as a start does (`lost_offsets.py`), for what the log does not have

Values only: this module reads and writes no file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .consume_queue import LOST_TAG_CODE
from .entry_check import which_hold

SPANS_MAX: Final = 64
"""If more runs than this are missing, the healer searches the log from the first to the last of them."""


class Bounds(NamedTuple):
    """What is known around the entries.

    Attributes:
        before: where the record of the entry before the first one ends; 0 if there is none, or it is unknown.
        after: where the record of the entry behind the last one starts, or the log ends.
    """

    before: int
    after: int


class Span(NamedTuple):
    """A part of the log, [start, end) in positions."""

    start: int
    end: int


class HealedEntries:
    """Entries [first_offset, first_offset + count) of a queue, as a file has them and then as the log has them."""

    __slots__ = ("_found", "bounds", "entries", "first_offset", "is_wide", "known")

    def __init__(
        self, data: bytes, count: int, first_offset: int, salt: int, bounds: Bounds
    ) -> None:
        """`data`: what the file has in their place."""
        self.first_offset = first_offset
        self.bounds = bounds
        self.is_wide = False
        """No entry of the file is believed any more."""
        self.entries, self.known = which_hold(data, count, first_offset, salt)
        self.known &= ~self._impossible()
        self._found = np.zeros(count, np.bool_)
        """Which of them come from the log."""

    @property
    def is_complete(self) -> bool:
        """Whether every entry is known."""
        return bool(self.known.all())

    @property
    def is_in_order(self) -> bool:
        """Whether the entries, all of them known, are possible: in order, without overlaps."""
        return not self._impossible().any()

    def spans(self) -> list[Span]:
        """Where in the log the missing entries' records must stand, in order."""
        runs = self._missing_runs()
        if len(runs) > SPANS_MAX:
            runs = [(runs[0][0], runs[-1][1])]
        return [Span(self._end_before(start), self._position_at(end)) for start, end in runs]

    def take(
        self,
        queue_offsets: NDArray[np.int64],
        positions: NDArray[np.int64],
        sizes: NDArray[np.int64],
        tag_codes: NDArray[np.int64],
    ) -> None:
        """Puts in entries of records of the queue; it skips those that are known already, or not among these. Of an offset that was given
        twice (`queue_replay.py`) it takes the later record, as readers had it. The records are in the log's order.
        """
        rows = queue_offsets - self.first_offset
        wanted = (rows >= 0) & (rows < len(self.entries))
        among = rows[wanted]
        is_later = self._found[among] & (positions[wanted] > self.entries["position"][among])
        wanted[wanted] = ~self.known[among] | is_later
        rows = rows[wanted]
        self.entries["position"][rows] = positions[wanted]
        self.entries["size"][rows] = sizes[wanted]
        self.entries["tag_code"][rows] = tag_codes[wanted]
        self.known[rows] = self._found[rows] = True

    def widen(self) -> None:
        """What was found between the neighbours does not fit, so an entry that seems to hold is wrong. Forgets all of them."""
        self.is_wide = True
        self.known[:] = self._found[:] = False
        self.bounds = Bounds(0, self.bounds.after)

    def fill_lost(self) -> None:
        """The log has been read where the missing records must stand, and does not have them."""
        for start, end in self._missing_runs():
            self.entries["position"][start:end] = self._end_before(start)
            self.entries["size"][start:end] = 0
            self.entries["tag_code"][start:end] = LOST_TAG_CODE
        self.known[:] = True

    def _missing_runs(self) -> list[tuple[int, int]]:
        """[start, end) of each run of missing entries."""
        edges = np.flatnonzero(np.diff(self.known, prepend=True, append=True))
        return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]

    def _end_before(self, row: int) -> int:
        if not row:
            return self.bounds.before
        return int(self.entries["position"][row - 1]) + int(self.entries["size"][row - 1])

    def _position_at(self, row: int) -> int:
        return int(self.entries["position"][row]) if row < len(self.entries) else self.bounds.after

    def _impossible(self) -> NDArray[np.bool_]:
        """Which of the known entries are impossible. Of two that overlap both count: nothing shows which one is wrong."""
        wrong = np.zeros(len(self.entries), np.bool_)
        rows = np.flatnonzero(self.known)
        known = self.entries[rows]
        starts, sizes = known["position"].astype(np.int64), known["size"].astype(np.int64)
        ends = starts + sizes
        bad = (sizes == 0) & (known["tag_code"] != LOST_TAG_CODE)
        bad |= (starts < self.bounds.before) | (ends > self.bounds.after)
        overlaps = starts[1:] < ends[:-1]
        bad[1:] |= overlaps
        bad[:-1] |= overlaps
        wrong[rows] = bad
        return wrong


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same parts of the log, in order and each once."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def overlap(span: Span, start: int, end: int) -> bool:
    """Whether a part of the log has something of [start, end)."""
    return span.start < end and start < span.end
