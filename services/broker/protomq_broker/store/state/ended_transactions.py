"""Transactions that have ended, the newest: so that a decision that comes twice, late or contradictory is known as such."""

from __future__ import annotations

import struct
from collections.abc import Sequence
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
assert _ROW.size == ENDED_ROW.itemsize

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

    def add(self, key: Key, ending: int, position: int) -> None:
        """One has ended, by the record at a position that is never less than the one before; the oldest is forgotten if it must be."""
        count = len(self._endings)
        if count == self._count_max:
            self._forget_first()
            count -= 1
        elif count == len(self._rows):
            grown = np.zeros(min(2 * count, self._count_max), ENDED_ROW)
            grown[:count] = self.rows()
            self._put(grown)
            self._start = 0
        at = (self._start + count) % len(self._rows)
        _ROW.pack_into(self._octets, at * _ROW.size, *key, ending, position)
        self._endings[key] = ending

    def forget_below(self, position: int) -> None:
        """Forgets what is told by records before `position`."""
        while self._endings and self._rows[self._start]["position"] < position:
            self._forget_first()

    def rows(self) -> NDArray[Any]:
        """A copy of all rows, the oldest first."""
        numbers = np.arange(self._start, self._start + len(self._endings)) % len(self._rows)
        found: NDArray[Any] = self._rows[numbers]
        return found

    def load(self, rows: Sequence[Any] | NDArray[Any]) -> None:
        """Takes over what `rows` gave."""
        for producer_id, epoch, sequence, ending, position in np.asarray(rows, ENDED_ROW).tolist():
            self.add((producer_id, epoch, sequence), ending, position)

    def _put(self, rows: NDArray[Any]) -> None:
        self._rows = rows
        self._octets = rows.view(np.uint8).data

    def _forget_first(self) -> None:
        producer_id, epoch, sequence, _, _ = _ROW.unpack_from(self._octets, self._start * _ROW.size)
        del self._endings[producer_id, epoch, sequence]
        self._start = (self._start + 1) % len(self._rows)
