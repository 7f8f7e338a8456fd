"""Where a walk of a segment can begin, kept beside the log. So one message of a gigabyte can be checked without all of it.

    boundaries/<start of the segment, 20 digits>     state file (`side_files.py`): rows of position u64, CRC-32C of the chain there u32

Derived, and only a hint. If a walk from a boundary finds that the log does not hold, it is repeated from the segment's head before
anything is reported. One that is missing costs the first reader of that segment the walk from its head: a second for a gigabyte, if
the disk can.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from protomq_broker.store.files.disk import Disk, if_there_is_room, remove_file
from protomq_broker.store.files.side_files import read_cached_state, write_state_file

_MAGIC: Final = b"PMQBND01"
_ROW: Final = np.dtype([("position", "<u8"), ("crc32c", "<u4")])


class BoundaryFiles:
    """The files, in one folder, which exists."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder

    def read(self, base_position: int) -> list[tuple[int, int]]:
        """(position, CRC) of the boundaries in a segment, rising; none if there is no file that holds."""
        payload = read_cached_state(self._disk, self._path(base_position), _MAGIC)
        if payload is None or len(payload) % _ROW.itemsize:
            return []
        rows: list[tuple[int, int]] = np.frombuffer(payload, _ROW).tolist()
        return rows

    def write(self, base_position: int, boundaries: Iterable[tuple[int, int]]) -> None:
        """Replaces a segment's file."""
        rows = np.array(list(boundaries), _ROW)
        write_state_file(self._disk, self._path(base_position), _MAGIC, rows.tobytes())

    def remove_below(self, position: int) -> None:
        """Segments below `position` are gone."""
        for name in self._disk.list(self._folder):
            if name.isdecimal() and int(name) < position:
                remove_file(self._disk, f"{self._folder}/{name}")

    def cut(self, position: int) -> None:
        """The log ends at `position` from now on; 0: nothing of it is known any more. Durable when this returns. Raises OSError."""
        names = self._disk.list(self._folder)
        bases = sorted(int(name) for name in names if name.isdecimal())
        last = max((base for base in bases if base < position), default=None)
        if last is not None:
            found = self.read(last)
            kept = [row for row in found if row[0] <= position]
            if kept != found:
                remove_file(self._disk, self._path(last))
                with if_there_is_room():  # it is only a hint
                    self.write(last, kept)
        for base in bases:
            if base >= position:
                remove_file(self._disk, self._path(base))

    def _path(self, base_position: int) -> str:
        return f"{self._folder}/{base_position:020d}"
