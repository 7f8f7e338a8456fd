"""Run files of the timer: rows in the order of their keys, written once.

    timer/run.<number>   blocks of 4,096 rows (24 octets each, the last block shorter), then for each block its CRC-32C u32 and the key of
                         its last row (due_ms u64, position u64), then the CRC-32C of those u32, the number of rows u64, "PMQTMR01"

Rules:
- Files are caches: a run that does not hold is a reason to rebuild the timer from the log (`rebuild.py`).
- Nothing here reads or writes more than a few blocks at a time: neither memory nor the interpreter is held.
- Any thread may read; one writes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protomq.wire.hashing import crc32c
from protomq_broker.store.errors import StoreError
from protomq_broker.store.files.disk import Disk, write_fully
from protomq_broker.store.files.side_files import OpenFile, read_entries

from .timer_rows import (
    LAST_KEY,
    NO_ROWS,
    ROW,
    ROW_SIZE_BYTES,
    Key,
    cancel,
    count_through,
    key_at,
    merge_rows,
)

BLOCK_ROWS: Final = 4_096
_MAGIC: Final = b"PMQTMR01"
_END: Final = struct.Struct("<IQ8s")
_BLOCK: Final = np.dtype([("crc32c", "<u4"), ("due_ms", "<u8"), ("position", "<u8")])


class TimerDamagedError(StoreError):
    """A run file is not what was written to it. It is rebuilt from the log."""


class Run:
    """One file, open. `count`: its rows."""

    def __init__(self, disk: Disk, path: str, number: int) -> None:
        """Raises TimerDamagedError, FileNotFoundError."""
        self.number = number
        self.path = path
        self._disk = disk
        self._file = OpenFile(disk, disk.open_read_only(path))
        size_bytes = disk.size(self._file.fd)
        end = read_entries(disk, self._file.fd, _END.size, max(size_bytes - _END.size, 0))
        if len(end) < _END.size:
            raise TimerDamagedError(f"{path} is cut short")
        crc, self.count, magic = _END.unpack(end)
        block_count = -(-self.count // BLOCK_ROWS)
        blocks_at = self.count * ROW_SIZE_BYTES
        if magic != _MAGIC or blocks_at + block_count * _BLOCK.itemsize + _END.size != size_bytes:
            raise TimerDamagedError(f"{path} does not end as a run of the timer does")
        blocks = read_entries(disk, self._file.fd, block_count * _BLOCK.itemsize, blocks_at)
        if crc32c(blocks) != crc:
            raise TimerDamagedError(f"{path}: the list of its blocks is damaged")
        self._blocks = np.frombuffer(blocks, _BLOCK)

    def read_block(self, block: int) -> NDArray[Any]:
        """The rows of one block. Raises TimerDamagedError."""
        start = block * BLOCK_ROWS
        size_bytes = min(BLOCK_ROWS, self.count - start) * ROW_SIZE_BYTES
        data = read_entries(self._disk, self._file.fd, size_bytes, start * ROW_SIZE_BYTES)
        if len(data) < size_bytes or crc32c(data) != int(self._blocks["crc32c"][block]):
            raise TimerDamagedError(f"{self.path}: block {block} is damaged")
        return np.frombuffer(data, ROW)

    def rows_from(self, start: int) -> NDArray[Any]:
        """The rows from index `start` to the end of its block; none behind the last row."""
        if start >= self.count:
            return NO_ROWS
        block, within = divmod(start, BLOCK_ROWS)
        return self.read_block(block)[within:]

    def count_through(self, key: Key) -> int:
        """How many rows have this key or a smaller one."""
        block = self._block_of(key)
        if block == len(self._blocks):
            return self.count
        return block * BLOCK_ROWS + count_through(self.read_block(block), key)

    def _block_of(self, key: Key) -> int:
        """The first block that ends behind the key."""
        ends = self._blocks["due_ms"]
        block = int(np.searchsorted(ends, np.uint64(key.due_ms), "left"))
        while block < len(ends) and key_at(self._blocks, block) <= key:
            block += 1
        return block


class RunWriter:
    """Writes a run file row by row, in order; not synced."""

    def __init__(self, disk: Disk, path: str, number: int) -> None:
        self._disk = disk
        self._path = path
        self._number = number
        self._file = OpenFile(disk, disk.create(path))
        disk.truncate(self._file.fd, 0)
        self._count = 0
        self._waiting = NO_ROWS
        self._blocks: list[tuple[int, int, int]] = []

    def add(self, rows: NDArray[Any]) -> None:
        """Rows behind all that were added before."""
        if len(self._waiting):
            rows = np.concatenate((self._waiting, rows))
        whole = len(rows) // BLOCK_ROWS * BLOCK_ROWS
        for start in range(0, whole, BLOCK_ROWS):
            self._write(rows[start : start + BLOCK_ROWS])
        self._waiting = rows[whole:]

    def finish(self) -> Run | None:
        """The run; None if it has no rows: then there is no file."""
        if len(self._waiting):
            self._write(self._waiting)
        if not self._count:
            self._disk.unlink(self._path)
            return None
        blocks = np.array(self._blocks, _BLOCK).tobytes()
        end = blocks + _END.pack(crc32c(blocks), self._count, _MAGIC)
        write_fully(self._disk, self._file.fd, end, self._count * ROW_SIZE_BYTES)
        return Run(self._disk, self._path, self._number)

    def _write(self, rows: NDArray[Any]) -> None:
        data = rows.tobytes()
        write_fully(self._disk, self._file.fd, data, self._count * ROW_SIZE_BYTES)
        self._count += len(rows)
        self._blocks.append((crc32c(data), *key_at(rows, -1)))


class Cursor:
    """Where the reading of one run stands: the rows before `index` are taken."""

    def __init__(self, run: Run, index: int = 0) -> None:
        self.run = run
        self.index = index
        self._rows = NO_ROWS  # of the block in which `index` stands, from there on

    def peek(self) -> NDArray[Any]:
        """The next rows, up to the end of a block; none at the end of the run."""
        if not len(self._rows):
            self._rows = self.run.rows_from(self.index)
        return self._rows

    def take(self, count: int) -> NDArray[Any]:
        """The first `count` of those that `peek` gave."""
        taken, self._rows = self._rows[:count], self._rows[count:]
        self.index += count
        return taken

    def forget(self) -> None:
        """Gives its memory back."""
        self._rows = NO_ROWS


def take_through(
    cursors: Sequence[Cursor], others: NDArray[Any], *, keep_removals: bool
) -> tuple[NDArray[Any], NDArray[Any], Key]:
    """The next rows of all, about a block of each, merged. Returns (rows; what is left of `others`, which are sorted; the key up to
    which all rows are taken). The key is LAST_KEY if nothing is left.
    """
    parts = [cursor.peek() for cursor in cursors]
    bound = LAST_KEY
    for cursor, rows in zip(cursors, parts, strict=True):
        if cursor.index + len(rows) < cursor.run.count:
            bound = min(bound, key_at(rows, -1))
    if len(others) > BLOCK_ROWS:
        bound = min(bound, key_at(others, BLOCK_ROWS - 1))
    taken = [
        cursor.take(count_through(rows, bound))
        for cursor, rows in zip(cursors, parts, strict=True)
        if len(rows)
    ]
    count = count_through(others, bound)
    taken.append(others[:count])
    return merge_rows(taken, keep_removals=keep_removals), others[count:], bound


def merged(
    cursors: Sequence[Cursor], others: NDArray[Any], *, keep_removals: bool
) -> Iterator[NDArray[Any]]:
    """All rows that are left, in order, a few blocks at a time. The cursors move."""
    bound = Key(0, 0)
    others = cancel(others, keep_removals=True)
    while bound != LAST_KEY:
        rows, others, bound = take_through(cursors, others, keep_removals=keep_removals)
        if len(rows):
            yield rows
