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

Key = tuple[int, int, int]


class EndedTransactions:
    """A table of bounded size. What stands in it stands in rows too, so that a snapshot is one copy."""

    def __init__(self, count_max: int) -> None:
        self._rows = np.zeros(count_max, ENDED_ROW)
        self._octets = self._rows.view(np.uint8).data
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
        if count == len(self._rows):
            self._forget_first()
            count -= 1
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

    def _forget_first(self) -> None:
        producer_id, epoch, sequence, _, _ = _ROW.unpack_from(self._octets, self._start * _ROW.size)
        del self._endings[producer_id, epoch, sequence]
        self._start = (self._start + 1) % len(self._rows)
