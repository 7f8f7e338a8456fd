"""What is known of one segment of the log: in which pieces it can be walked, and which of them hold. Nothing is read here.

    boundary   a position between two appends, with the CRC with which the chain of seals goes on there
    piece      from one boundary to the next; behind the last one is a piece too, of which nobody knows yet how it is divided

Boundaries are remembered where somebody came by: a walk, or the writer. By them a piece deep inside a segment is proved without all that
stands before it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from protomq.wire.log_walk import WalkedBlock


class Stretch(NamedTuple):
    """Appends that were walked and hold: [start, end), and the CRC of the chain before them and behind them."""

    start_position: int
    previous_crc32c: int | None
    end_position: int
    crc32c: int


def stretch_of(block: WalkedBlock) -> Stretch:
    """What a block with appends shows."""
    end = block.base_position + block.size_bytes
    return Stretch(block.base_position, block.previous_crc32c, end, block.seals[-1].crc32c)


class Pieces(NamedTuple):
    """The pieces of a segment; replaced, never changed, so that any thread may look at them.

    Attributes: positions: the boundaries, rising, the first is the segment's start; crcs: the CRC at each, None where nobody knows it;
    good: whether the piece behind each holds.
    """

    positions: list[int]
    crcs: list[int | None]
    good: list[bool]

    def at(self, position: int) -> int:
        """Index of the piece in which a position lies."""
        return bisect_right(self.positions, position) - 1

    def end_of(self, index: int) -> int | None:
        """Where a piece ends; None for the last one."""
        return self.positions[index + 1] if index + 1 < len(self.positions) else None

    def good_parts(self, start: int, end: int) -> list[tuple[int, int]]:
        """Of each piece that is known to hold, its part in [start, end)."""
        parts: list[tuple[int, int]] = []
        for index in range(self.at(start), bisect_left(self.positions, end)):
            piece_end = self.end_of(index)
            if self.good[index]:
                stop = end if piece_end is None else min(end, piece_end)
                parts.append((max(start, self.positions[index]), stop))
        return parts

    def first_unknown(self, start: int, end: int) -> int | None:
        """Index of the first piece with a part of [start, end) that is not known to hold; None if all are."""
        for index in range(self.at(start), len(self.positions)):
            if self.positions[index] >= end:
                break
            if not self.good[index]:
                return index
        return None


class CheckedSegment:
    """See the module's docstring. Any thread.

    Attributes:
        doubt_count: how often something was doubted: who has walked bytes before a doubt has not shown that they hold behind it.
        base_position, end_position: of the segment.
        pieces: what is known.
        written_ns: when the file had last been written to, as of the last look.
        is_growing: this process may have appended to it since.
        looked_ms: when somebody looked whether the file is untouched, by the monotonic clock; looked_position: where the log ended then.
        is_hinted: some of the boundaries were read from a file.
        saved_count: how many boundaries the file has.
        failed_read_count: reads of the file that had failed at the last look.
    """

    __slots__ = (
        "_lock",
        "base_position",
        "doubt_count",
        "end_position",
        "failed_read_count",
        "is_growing",
        "is_hinted",
        "looked_ms",
        "looked_position",
        "pieces",
        "saved_count",
        "written_ns",
    )

    def __init__(self, base_position: int, end_position: int, written_ns: int) -> None:
        self.base_position = base_position
        self.end_position = end_position
        self.pieces = Pieces([base_position], [None], [False])
        self.written_ns = written_ns
        self.is_growing = False
        self.is_hinted = False
        self.looked_ms = -(1 << 62)
        self.looked_position = 0
        self.doubt_count = 0
        self.failed_read_count = 0
        self._lock = threading.Lock()  # never held while anything is read
        self.saved_count = 0

    def take_hints(self, boundaries: Sequence[tuple[int, int]]) -> None:
        """Boundaries of an earlier process, rising; whether the pieces hold is not known."""
        for position, crc in boundaries:
            self.add(position, crc)
        self.is_hinted = bool(boundaries)
        self.saved_count = len(self.pieces.positions)

    def forget_hints(self) -> None:
        """One of them may be wrong: all boundaries go."""
        with self._lock:
            self.pieces = Pieces([self.base_position], [None], [False])
            self.is_hinted = False

    def boundaries(self, end_position: int) -> list[tuple[int, int]]:
        """Those below a position, where the CRC is known."""
        positions, crcs, _ = self.pieces
        return [
            (position, crc)
            for position, crc in zip(positions, crcs, strict=True)
            if crc is not None and position <= end_position
        ]

    def add(self, position: int, crc32c: int | None) -> None:
        """Makes a boundary, if it is none. Both parts of a piece that is split are as good as it was."""
        with self._lock:
            self._add(position, crc32c)

    def _add(self, position: int, crc32c: int | None) -> None:
        positions, crcs, good = self.pieces
        index = bisect_left(positions, position)
        if index < len(positions) and positions[index] == position:
            if crcs[index] is None:
                crcs[index] = crc32c
            return
        positions, crcs, good = positions.copy(), crcs.copy(), good.copy()
        positions.insert(index, position)
        crcs.insert(index, crc32c)
        good.insert(index, good[index - 1])
        self.pieces = Pieces(positions, crcs, good)

    def note(self, walked: Stretch, piece_size_bytes: int, doubt_count: int | None = None) -> None:
        """Appends were walked, and hold. Neighbours that hold become one piece, of this size at most: a walk may come in small steps.

        `doubt_count`: what it was before they were read; if there was a doubt since, only the boundaries are noted.
        """
        with self._lock:
            self._add(walked.start_position, walked.previous_crc32c)
            if walked.end_position < self.end_position:
                self._add(walked.end_position, walked.crc32c)
            if doubt_count in (None, self.doubt_count):
                self._trust(walked.start_position, walked.end_position)
                self._join(walked.start_position, piece_size_bytes)

    def _join(self, position: int, piece_size_bytes: int) -> None:
        positions, crcs, good = self.pieces
        index = bisect_left(positions, position)
        end = self.pieces.end_of(index)
        if (
            index
            and good[index - 1]
            and end is not None
            and end - positions[index - 1] <= piece_size_bytes
        ):
            self.pieces = Pieces(
                positions[:index] + positions[index + 1 :],
                crcs[:index] + crcs[index + 1 :],
                good[:index] + good[index + 1 :],
            )

    def trust(self, start: int, end: int) -> None:
        """The pieces within [start, end), two boundaries or the segment's end, hold."""
        with self._lock:
            self._trust(start, end)

    def _trust(self, start: int, end: int) -> None:
        positions, crcs, good = self.pieces
        first, last = bisect_left(positions, start), bisect_left(positions, end)
        good = good.copy()
        good[first:last] = [True] * (last - first)
        self.pieces = Pieces(positions, crcs, good)

    def doubt(self, start: int, end: int) -> None:
        """No piece with a part of [start, end) is known to hold any more; the boundaries stay."""
        with self._lock:
            positions, crcs, good = self.pieces
            first, last = self.pieces.at(start), bisect_left(positions, end)
            good = good.copy()
            good[first:last] = [False] * (last - first)
            self.pieces = Pieces(positions, crcs, good)
            self.doubt_count += 1
