"""Transactions that have ended, the newest: so that a decision that comes twice, late or contradictory is known as such."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

ENDED_ROW: Final = np.dtype(
    [
        ("producer_id", "<u8"),
        ("producer_epoch", "<u4"),
        ("sequence", "<u8"),
        ("ending", "u1"),
        ("position", "<u8"),
    ]
)
"""As it stands in the state file. `position`: of the record that reports the ending."""
_ROW: Final = struct.Struct("<QIQBQ")
"""The same for one row: an item of an array costs several times as much to read and to write."""
_KEY: Final = struct.Struct("<QIQ9x")
"""The same for the key of a row."""
assert _ROW.size == _KEY.size == ENDED_ROW.itemsize

_ROWS_MIN: Final = 1_024
"""What is there from the start."""

Key = tuple[int, int, int]


class EndedTransactions:
    """A table of bounded size. What stands in it stands in rows too, so that a snapshot is one copy."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        # Grown by doubling: all 3 MB at once would be most of what it takes to open a small store.
        self._put(np.zeros(min(count_max, _ROWS_MIN), ENDED_ROW))
        self._start = 0
        self._endings: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._endings)

    def get(self, key: Key) -> int | None:
        """How it ended; None if that is not known, or it has not."""
        return self._endings.get(key)

    def has_any(self, keys: Iterable[Key]) -> bool:
        """Whether one of these is known to have ended."""
        return not self._endings.keys().isdisjoint(keys)

    def add_all(self, keys: Sequence[Key], endings: Sequence[int], position: int) -> None:
        """These have ended, by the record at a position that is never less than the one before. Of each the first ending counts; the oldest
        are forgotten if they must be.
        """
        known = self._endings
        before = len(known)
        deque(map(known.setdefault, keys, endings), maxlen=0)
        count = len(known) - before
        if count == len(keys) <= self._count_max:  # nearly always
            self._add_rows(keys, endings, before, position)
            return
        for _ in range(count):
            known.popitem()
        for key, ending in zip(keys, endings, strict=True):
            if key not in known:
                known[key] = ending
                self._add_rows((key,), (ending,), len(known) - 1, position)

    def _add_rows(
        self, keys: Sequence[Key], endings: Sequence[int], before: int, position: int
    ) -> None:
        """The rows of the newest; there were `before` others."""
        gone = max(before + len(keys) - self._count_max, 0)
        if gone:
            self._forget_first(gone)
        count = before - gone
        if count + len(keys) > len(self._rows):
            size = max(2 * len(self._rows), count + len(keys))
            grown = np.zeros(min(size, self._count_max), ENDED_ROW)
            grown[:count] = self._first_rows(count)
            self._put(grown)
            self._start = 0
        octets = b"".join(map(_ROW.pack, *zip(*keys, strict=True), endings, repeat(position)))
        # Around the end of the rows, if it comes to that.
        at = (self._start + count) % len(self._rows) * _ROW.size
        first = min(len(octets), len(self._octets) - at)
        self._octets[at : at + first] = octets[:first]
        self._octets[: len(octets) - first] = octets[first:]

    def forget_below(self, position: int) -> None:
        """Forgets what is told by records before `position`."""
        while self._endings and self._rows[self._start]["position"] < position:
            self._forget_first(1)

    def rows(self) -> NDArray[Any]:
        """A copy of all rows, the oldest first."""
        return self._first_rows(len(self._endings))

    def _first_rows(self, count: int) -> NDArray[Any]:
        numbers = np.arange(self._start, self._start + count) % len(self._rows)
        found: NDArray[Any] = self._rows[numbers]
        return found

    def load(self, rows: Sequence[Any] | NDArray[Any]) -> None:
        """Takes over what `rows` gave."""
        for producer_id, epoch, sequence, ending, position in np.asarray(rows, ENDED_ROW).tolist():
            self.add_all([(producer_id, epoch, sequence)], [ending], position)

    def _put(self, rows: NDArray[Any]) -> None:
        self._rows = rows
        self._octets = rows.view(np.uint8).data

    def _forget_first(self, count: int) -> None:
        """Forgets the oldest; `count` of them are there."""
        at, size = self._start * _ROW.size, count * _ROW.size
        octets = bytes(self._octets[at : at + size])
        octets += bytes(self._octets[: size - len(octets)])
        deque(map(self._endings.__delitem__, _KEY.iter_unpack(octets)), maxlen=0)
        self._start = (self._start + count) % len(self._rows)
