"""What is known of one segment of the log: in which pieces it can be walked, and which of them hold. Nothing is read here.

    boundary   a position between two appends, with the CRC with which the chain of seals goes on there
    piece      from one boundary to the next; behind the last one is a piece too, of which nobody knows yet how it is divided

Boundaries are remembered where somebody came by: a walk, or the writer. By them a piece deep inside a segment is proved without all that
stands in front of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .seals import WalkedBlock


class Stretch(NamedTuple):
    """Appends that were walked and hold: [start, end), and the CRC of the chain in front of them and behind them."""

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

    def around(self, start: int, end: int) -> tuple[int, int]:
        """The pieces in which [start, end) lies; up to `end` only where nobody knows yet where the last one ends."""
        piece_end = self.end_of(self.at(end - 1))
        return self.positions[self.at(start)], end if piece_end is None else piece_end

    def lost(self, start: int, end: int, is_cached: Callable[[int, int], bool]) -> list[int]:
        """Where the pieces begin that are known to hold and of whose part in [start, end) `is_cached(from, to)` says no.

        Halves what is not cached until it is one piece: few questions where much is cached, or little is known.
        """
        lost: list[int] = []
        stack = [(self.at(start), bisect_left(self.positions, end))]
        while stack:
            low, high = stack.pop()
            first = max(start, self.positions[low])
            behind = min(end, self.positions[high]) if high < len(self.positions) else end
            if first >= behind or True not in self.good[low:high] or is_cached(first, behind):
                continue
            if high - low == 1:
                lost.append(self.positions[low])
            else:
                middle = (low + high) // 2
                stack += [(middle, high), (low, middle)]
        return lost

    def first_unknown(self, start: int, end: int) -> int | None:
        """Index of the first piece with a part of [start, end) that is not known to hold; None if all are."""
        for index in range(self.at(start), len(self.positions)):
            if self.positions[index] >= end:
                break
            if not self.good[index]:
                return index
        return None


class CheckedSegment:
    """See the module's docstring. One thread at a time changes it.

    Attributes:
        base_position, end_position: of the segment.
        pieces: what is known.
        written_ns: when the file had last been written to, as of the last look.
        is_growing: this process may have appended to it since.
        looked_ms: when the kernel was asked about all of it last, by the monotonic clock.
        looked_position: where the log ended then.
        is_hinted: some of the boundaries were read from a file.
        saved_count: how many boundaries the file has.
    """

    __slots__ = (
        "base_position",
        "end_position",
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
        self.saved_count = 0

    def take_hints(self, boundaries: Sequence[tuple[int, int]]) -> None:
        """Boundaries of an earlier process, rising; whether the pieces hold is not known."""
        for position, crc in boundaries:
            self.add(position, crc)
        self.is_hinted = bool(boundaries)
        self.saved_count = len(self.pieces.positions)

    def forget_hints(self) -> None:
        """One of them may be wrong: all boundaries go."""
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

    def note(self, walked: Stretch, piece_size_bytes: int) -> None:
        """Appends were walked, and hold. Neighbours that hold become one piece, of this size at most: a walk may come in small steps."""
        self.add(walked.start_position, walked.previous_crc32c)
        if walked.end_position < self.end_position:
            self.add(walked.end_position, walked.crc32c)
        self.trust(walked.start_position, walked.end_position)
        positions, crcs, good = self.pieces
        index = bisect_left(positions, walked.start_position)
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
        positions, crcs, good = self.pieces
        first, last = bisect_left(positions, start), bisect_left(positions, end)
        good = good.copy()
        good[first:last] = [True] * (last - first)
        self.pieces = Pieces(positions, crcs, good)

    def distrust(self, lost: Sequence[int] | None = None) -> None:
        """The pieces that begin at `lost`, or all, are not known to hold any more; the boundaries stay."""
        positions, crcs, good = self.pieces
        good = [False] * len(positions) if lost is None else good.copy()
        for position in lost or ():
            good[self.pieces.at(position)] = False
        self.pieces = Pieces(positions, crcs, good)
