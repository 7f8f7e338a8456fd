"""Run files of the index: rows that do not change any more, sorted by hash.

    index/run.<first position>       1,048,576 rows sorted by hash: 2,048 blocks of 512 hashes and then their 512 positions; behind
                                     them the fences: for each block its first hash u64 and the CRC-32C of the block u32; then the
                                     CRC-32C of the fences u32

A look-up reads one block, or as many as rows of that hash reach into. The fences of the runs used last are kept in memory: 24 KiB each.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protomq.wire.hashing import crc32c
from protomq_broker.store.errors import StoreError
from protomq_broker.store.files.disk import Disk, remove_file, write_fully
from protomq_broker.store.files.side_files import OpenFiles, read_entries, size_of_file

ROWS_PER_RUN: Final = 1 << 20
"""Half a million messages with a key and an id each; 16 MiB."""

_PREFIX: Final = "run."
_ROWS_PER_BLOCK: Final = 512
_BLOCK_SIZE_BYTES: Final = _ROWS_PER_BLOCK * 16
_FENCE: Final = np.dtype([("hash", "<u8"), ("crc32c", "<u4")])
_FENCES_CACHED_MAX: Final = 64
_BLOCKS_PER_RUN: Final = ROWS_PER_RUN // _ROWS_PER_BLOCK
_FENCES_SIZE_BYTES: Final = _BLOCKS_PER_RUN * _FENCE.itemsize
_RUN_SIZE_BYTES: Final = _BLOCKS_PER_RUN * _BLOCK_SIZE_BYTES + _FENCES_SIZE_BYTES + 4


class IndexDamagedError(StoreError):
    """A file of the index does not hold. The log has everything: the index is rebuilt at the next start."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run file: its rows lie in [first_position, end_position)."""

    first_position: int
    end_position: int

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{_PREFIX}{self.first_position:020d}"


class RunFiles:
    """The run files of an index. Any thread may look up; one at a time writes and removes."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._files = OpenFiles(disk, _FENCES_CACHED_MAX)
        self._lock = threading.Lock()
        self._fences: dict[Run, NDArray[Any]] = {}

    def holds(self, run: Run) -> bool:
        """Whether the file is there, in full length."""
        return size_of_file(self._disk, self._path(run)) == _RUN_SIZE_BYTES

    def remove(self, run: Run) -> None:
        """Removes the file for good."""
        self._forget(run)
        remove_file(self._disk, self._path(run))

    def close(self) -> None:
        """Closes all files."""
        self._files.forget_below("")
        self._fences.clear()

    def write(self, rows: NDArray[Any]) -> Run:
        """Writes `ROWS_PER_RUN` rows, given in the order of the log, to a file of their own; durable but for its name."""
        run = Run(int(rows["position"][0]), int(rows["position"][-1]) + 1)
        rows = rows[np.argsort(rows["hash"], kind="stable")]
        blocks = np.empty((ROWS_PER_RUN // _ROWS_PER_BLOCK, 2, _ROWS_PER_BLOCK), "<u8")
        blocks[:, 0] = rows["hash"].reshape(-1, _ROWS_PER_BLOCK)
        blocks[:, 1] = rows["position"].reshape(-1, _ROWS_PER_BLOCK)
        fences = np.empty(len(blocks), _FENCE)
        fences["hash"] = blocks[:, 0, 0]
        fences["crc32c"] = [crc32c(block.tobytes()) for block in blocks]
        encoded = fences.tobytes()
        self._forget(run)
        fd = self._disk.create(self._path(run))
        try:
            write_fully(self._disk, fd, blocks.tobytes(), 0)
            write_fully(
                self._disk, fd, encoded + crc32c(encoded).to_bytes(4, "little"), blocks.nbytes
            )
            self._disk.truncate(fd, _RUN_SIZE_BYTES)
            self._disk.fsync(fd)
        finally:
            self._disk.close(fd)
        return run

    def find(self, run: Run, hash_: int, start: int, end: int, count_max: int) -> list[int]:
        """Positions within [start, end) of rows with the hash, newest first. Raises IndexDamagedError, or FileNotFoundError."""
        fences = self._fences_of(run)
        key = np.uint64(hash_)
        last = int(np.searchsorted(fences["hash"], key, "right")) - 1
        first = max(0, int(np.searchsorted(fences["hash"], key, "left")) - 1)
        found: list[int] = []
        for block in range(last, first - 1, -1):
            hashes, positions = self._read_block(run, block, int(fences["crc32c"][block]))
            matches = positions[
                np.searchsorted(hashes, key, "left") : np.searchsorted(hashes, key, "right")
            ]
            found.extend(matches[(matches >= start) & (matches < end)][::-1].tolist())
            if len(found) >= count_max:
                break
        return found[:count_max]

    def _path(self, run: Run) -> str:
        return f"{self._folder}/{run.name}"

    def _forget(self, run: Run) -> None:
        self._files.forget(self._path(run))
        with self._lock:
            self._fences.pop(run, None)

    def _fences_of(self, run: Run) -> NDArray[Any]:
        fences = self._fences.get(run)
        if fences is None:
            data = self._read(run, _FENCES_SIZE_BYTES + 4, _BLOCKS_PER_RUN * _BLOCK_SIZE_BYTES)
            encoded = data[:_FENCES_SIZE_BYTES]
            if crc32c(encoded).to_bytes(4, "little") != data[_FENCES_SIZE_BYTES:]:
                raise self._damage(run, "its fences are damaged")
            fences = np.frombuffer(encoded, _FENCE)
            with self._lock:
                if len(self._fences) >= _FENCES_CACHED_MAX:
                    self._fences.clear()
                self._fences[run] = fences
        return fences

    def _read_block(
        self, run: Run, block: int, crc: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        data = self._read(run, _BLOCK_SIZE_BYTES, block * _BLOCK_SIZE_BYTES)
        if crc32c(data) != crc:
            raise self._damage(run, f"block {block} is damaged")
        columns = np.frombuffer(data, "<u8").reshape(2, _ROWS_PER_BLOCK)
        return columns[0], columns[1]

    def _read(self, run: Run, size_bytes: int, at: int) -> bytes:
        return read_entries(self._disk, self._files.get(self._path(run)).fd, size_bytes, at)

    def _damage(self, run: Run, reason: str) -> IndexDamagedError:
        return IndexDamagedError(
            f"{self._path(run)}: {reason}: the index is rebuilt at the next start"
        )
