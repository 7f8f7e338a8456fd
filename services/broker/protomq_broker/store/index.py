"""Where in the log the messages with a key, or with a message id, stand.

    index/index.bin                  state file (`side_files.py`): position u64, generation u64, tail rows u64, tail CRC-32C u32,
                                     then first and end position (u64 each) of each run file, oldest first
    index/tail.<generation>          rows as they came: hash u64, position u64, in the order of the log
    index/run.<first position>       1,048,576 rows sorted by hash: 2,048 blocks of 512 hashes and then their 512 positions; behind
                                     them the fences: for each block its first hash u64 and the CRC-32C of the block u32; then the
                                     CRC-32C of the fences u32

Rules:
- An index finds candidates: two keys can have the same hash. The caller reads the record and compares.
- A key has a row for each message. Message ids have a row for each append request: a request holds consecutive sequences in one
  queue, so its first record leads to all. The hash covers producer, epoch and sequence; for a request of more than one record, the
  block of 256 sequences instead, with a row for each block that the request reaches into. See `find_message_id`.
- The writer only notes what was appended, under a lock that others hold just to take the notes over. Hashing, sorting and files are
  the flusher's, and a look-up's, under a second lock. A third one lets one thread at a time change files.
- Rows go into a run file only when the log is durable behind them, so files hold nothing that the log might lose.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protomq.wire.hashing import crc32c

from .append import AppendRequest, ScannedRecords
from .disk import Disk, read_file, read_fully, remove_file, write_fully
from .errors import StoreError
from .record_runs import run_continues
from .side_files import (
    OpenFiles,
    cut_file,
    read_state_file,
    remove_tree,
    size_of_file,
    write_state_file,
)

ROWS_PER_RUN: Final = 1 << 20
"""Half a million messages with a key and an id each; 16 MiB."""
SEQUENCES_PER_BLOCK: Final = 256
CANDIDATES_MAX: Final = 1_024

_ROWS_PER_BLOCK: Final = 512
_BLOCK_SIZE_BYTES: Final = _ROWS_PER_BLOCK * 16
_ROW: Final = np.dtype([("hash", "<u8"), ("position", "<u8")])
_FENCE: Final = np.dtype([("hash", "<u8"), ("crc32c", "<u4")])
_MAGIC: Final = b"PMQIDX01"
_HEAD: Final = struct.Struct("<QQQI")
_STATE_FILE_NAME: Final = "index.bin"
_RUN_PREFIX: Final = "run."
_TAIL_PREFIX: Final = "tail."
_FENCES_CACHED_MAX: Final = 64
_TAIL_CAPACITY_MIN: Final = 4_096

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = 0xFFFFFFFFFFFFFFFF
_BLOCK_MARK: Final = 1 << 63
"""Tells the hash of a block of sequences from that of one sequence (sequences stay below 2**63 in practice)."""


_Noted = tuple[int, int, "NDArray[np.int64]", "NDArray[np.uint64]", int, int, int]
"""Of a request of many records: position, count, starts, key hashes, producer id, epoch, first sequence; not the bytes."""
_ONE_COLUMNS: Final = 5
"""Of a request of one record: position, key hash, producer id, epoch, sequence."""


class IndexDamagedError(StoreError):
    """A file of the index does not hold. The log has everything: the index is made anew at the next start."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run file: its rows lie in [first_position, end_position)."""

    path: str
    first_position: int
    end_position: int


def message_id_hash(producer_id: int, producer_epoch: int, number: int) -> int:
    """64-bit hash (splitmix64's finaliser, once per part) of a sequence, or of a block of sequences with `_BLOCK_MARK` set."""
    return _mix(_mix(_mix(producer_id) ^ producer_epoch) ^ number)


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _mix_many(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


class MessageIndex:
    """The index of a store.

    Attributes:
        replay_from: after `load`: what the log has below this position is in the index already.
        needs_rebuild: always False: a damaged index is empty after `load`.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self.replay_from = 0
        self.needs_rebuild = False
        self._disk = disk
        self._folder = folder
        self._files = OpenFiles(disk, _FENCES_CACHED_MAX)
        self._note_lock = threading.Lock()
        self._lock = threading.Lock()
        self._files_lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self._noted_ones: array[int] = array("Q")
        self._noted_many: list[_Noted] = []
        self._runs: list[_Run] = []
        self._fences: dict[str, NDArray[Any]] = {}
        self._tail = np.empty(0, _ROW)
        self._tail_count = 0
        self._tail_flushed = 0
        self._generation = 0
        self._tail_file_is_new = True
        self._damaged = False
        self._checkpoint_position = 0

    # Writer thread.

    def apply(self, requests: Sequence[AppendRequest]) -> None:
        """Notes what was just appended to the log."""
        with self._note_lock:
            for request in requests:
                region = request.region
                if region.starts is None:
                    self._noted_ones.extend(
                        (
                            request.physical_offset,
                            region.key_hashes,  # type: ignore[arg-type]
                            region.producer_id,
                            region.producer_epoch,
                            region.first_sequence,
                        )
                    )
                else:
                    self._noted_many.append(
                        (
                            request.physical_offset,
                            region.count,
                            region.starts,
                            region.key_hashes,  # type: ignore[arg-type]
                            region.producer_id,
                            region.producer_epoch,
                            region.first_sequence,
                        )
                    )

    # Any thread.

    def find_key(
        self, key_hash: int, *, start_position: int = 0, end_position: int | None = None, count_max: int = CANDIDATES_MAX
    ) -> list[int]:
        """Positions of records that may have the key, newest first, within [start_position, end_position)."""
        return self._find((key_hash,), start_position, end_position, count_max)

    def find_message_id(
        self,
        producer_id: int,
        producer_epoch: int,
        sequence: int,
        *,
        start_position: int = 0,
        end_position: int | None = None,
        count_max: int = CANDIDATES_MAX,
    ) -> list[int]:
        """Positions of records that may lead to a message id, newest first, within [start_position, end_position).

        Read the record at a candidate. If its producer and epoch are the wanted ones and its own sequence s is not above the wanted
        one, then the wanted record, if it belongs to the same request, is the one at queue offset + (sequence - s) of that queue.
        Read it and compare its id; if it is another one, go on with the next candidate.
        """
        if producer_id == 0:
            return []
        block = _BLOCK_MARK | sequence // SEQUENCES_PER_BLOCK
        hashes = (
            message_id_hash(producer_id, producer_epoch, sequence),
            message_id_hash(producer_id, producer_epoch, block),
        )
        return self._find(hashes, start_position, end_position, count_max)

    def _find(
        self, hashes: Sequence[int], start_position: int, end_position: int | None, count_max: int
    ) -> list[int]:
        with self._lock:
            self._convert()
            tail = self._tail[: self._tail_count]
            runs = list(self._runs)
        end = end_position if end_position is not None else _MASK
        found: list[int] = []
        tail_positions = tail["position"]
        for hash_ in hashes:
            matches = tail_positions[tail["hash"] == np.uint64(hash_)]
            found.extend(matches[(matches >= start_position) & (matches < end)].tolist())
        found = sorted(set(found), reverse=True)[:count_max]
        for run in reversed(runs):
            if len(found) >= count_max:
                break
            if run.end_position <= start_position or run.first_position >= end:
                continue
            older: set[int] = set()
            for hash_ in hashes:
                older.update(self._find_in_run(run, hash_, start_position, end, count_max - len(found)))
            found.extend(sorted(older.difference(found), reverse=True)[: count_max - len(found)])
        return found

    # Flusher thread.

    def flush(self) -> None:
        """Takes in what was noted and writes it to the tail file, without a sync."""
        with self._files_lock:
            with self._lock:
                self._convert()
                rows = self._tail[self._tail_flushed : self._tail_count]
            if not len(rows):
                return
            file = self._files.get(self._tail_path, create=True)
            if self._tail_file_is_new:
                self._disk.truncate(file.fd, 0)  # left over from before a crash
                self._tail_file_is_new = False
            write_fully(self._disk, file.fd, rows.tobytes(), self._tail_flushed * _ROW.itemsize)
            self._tail_flushed += len(rows)

    def checkpoint(self, position: int) -> None:
        """Makes durable that everything that the log holds below `position` is in the index."""
        with self._files_lock:
            self.flush()
            durable = int(np.searchsorted(self._tail["position"][: self._tail_count], position))
            old_tail_path = self._tail_path
            if durable >= ROWS_PER_RUN:
                durable -= self._roll(durable)
                self.flush()
            if self._tail_flushed:
                self._sync_tail()
            self._write_state(position, durable)
            if old_tail_path != self._tail_path:
                self._files.forget(old_tail_path)
                remove_file(self._disk, old_tail_path)

    def delete_below(self, log_start: int) -> None:
        """The log begins at `log_start` now: removes the run files that lead to nothing any more."""
        with self._files_lock:
            with self._lock:
                gone = [run for run in self._runs if run.end_position <= log_start]
                self._runs = [run for run in self._runs if run.end_position > log_start]
            for run in gone:
                self._fences.pop(run.path, None)
                self._files.forget(run.path)
                remove_file(self._disk, run.path)

    def close(self) -> None:
        """Closes the files. Call `checkpoint` before."""
        self._files.forget("")

    # Recovery: one thread, nobody else.

    def load(self, log_start: int = 0) -> None:
        """Takes over what the files hold; nothing if one of them does not hold. `log_start` is not needed."""
        self._clear()
        self._disk.make_folder(self._folder)
        if not self._load():
            self.start_rebuild()
            return
        known = {_STATE_FILE_NAME, f"{_TAIL_PREFIX}{self._generation}", *(run.path.rpartition("/")[2] for run in self._runs)}
        for name in self._disk.list(self._folder):
            if name not in known:
                self._disk.unlink(f"{self._folder}/{name}")

    def start_rebuild(self) -> None:
        """Removes everything; a replay from the log's start makes it anew."""
        self._files.forget("")
        self._clear()
        remove_file(self._disk, self._state_path)
        remove_tree(self._disk, self._folder)
        self._disk.make_folder(self._folder)
        self.replay_from = 0

    def replay(self, records: ScannedRecords) -> None:
        """Adds records read back from the log, in its order; those that are there already are passed over."""
        first = int(np.searchsorted(records.positions, self.replay_from))
        if first == records.count:
            return
        key_hashes, positions = records.key_hashes[first:], records.positions[first:]
        keyed = np.flatnonzero(key_hashes)
        rows = _rows(key_hashes[keyed], positions[keyed])
        merged = _in_log_order([rows, _message_id_rows_of_scan(records, first)])
        with self._lock:
            self._add_rows(merged)
        if self._tail_count - self._tail_flushed >= ROWS_PER_RUN:
            self.flush()

    def truncate(self, end_position: int) -> None:
        """Removes the rows of all records at or beyond `end_position`. Nobody appends meanwhile."""
        with self._files_lock:
            with self._lock:
                self._convert()
                kept = int(np.searchsorted(self._tail["position"][: self._tail_count], end_position))
                beyond = self._runs and self._runs[-1].end_position > end_position
                if kept == self._tail_count and not beyond:
                    return
                self._tail = self._tail[:kept].copy()
                self._tail_count = kept
                self._tail_flushed = min(self._tail_flushed, kept)
            # Rows in run files stay: the caller looks at each candidate, and refuses one that leads nowhere.
            if self._tail_flushed:
                self._disk.truncate(self._files.get(self._tail_path).fd, self._tail_flushed * _ROW.itemsize)
            if end_position < self._checkpoint_position:
                self.flush()
                self._write_state(end_position, kept)

    # Parts.

    @property
    def _state_path(self) -> str:
        return f"{self._folder}/{_STATE_FILE_NAME}"

    @property
    def _tail_path(self) -> str:
        return f"{self._folder}/{_TAIL_PREFIX}{self._generation}"

    def _convert(self) -> None:
        """Turns what was noted into rows of the tail. The caller holds the lock."""
        with self._note_lock:
            ones, many = self._noted_ones, self._noted_many
            if not ones and not many:
                return
            self._noted_ones, self._noted_many = array("Q"), []
        self._add_rows(_rows_of_noted(np.frombuffer(ones, np.uint64).reshape(-1, _ONE_COLUMNS), many))

    def _add_rows(self, rows: NDArray[Any]) -> None:
        end = self._tail_count + len(rows)
        if end > len(self._tail):
            grown = np.empty(max(_TAIL_CAPACITY_MIN, end + end // 2), _ROW)
            grown[: self._tail_count] = self._tail[: self._tail_count]
            self._tail = grown
        self._tail[self._tail_count : end] = rows
        self._tail_count = end

    def _roll(self, durable: int) -> int:
        """Moves full runs out of the tail, whose first `durable` rows may go; how many went. The next tail is another file."""
        moved = 0
        added: list[_Run] = []
        while durable - moved >= ROWS_PER_RUN:
            added.append(self._write_run(self._tail[moved : moved + ROWS_PER_RUN]))
            moved += ROWS_PER_RUN
        self._disk.fsync_dir(self._folder)
        with self._lock:
            self._runs.extend(added)
            self._tail = self._tail[moved : self._tail_count].copy()
            self._tail_count -= moved
            self._tail_flushed = 0
            self._generation += 1
            self._tail_file_is_new = True
        return moved

    def _write_run(self, rows: NDArray[Any]) -> _Run:
        first, last = int(rows["position"][0]), int(rows["position"][-1])
        rows = rows[np.argsort(rows["hash"], kind="stable")]
        blocks = np.empty((ROWS_PER_RUN // _ROWS_PER_BLOCK, 2, _ROWS_PER_BLOCK), "<u8")
        blocks[:, 0] = rows["hash"].reshape(-1, _ROWS_PER_BLOCK)
        blocks[:, 1] = rows["position"].reshape(-1, _ROWS_PER_BLOCK)
        fences = np.empty(len(blocks), _FENCE)
        fences["hash"] = blocks[:, 0, 0]
        fences["crc32c"] = [crc32c(block.tobytes()) for block in blocks]
        encoded = fences.tobytes()
        path = f"{self._folder}/{_RUN_PREFIX}{first:020d}"
        fd = self._disk.create(path)
        try:
            write_fully(self._disk, fd, blocks.tobytes(), 0)
            write_fully(self._disk, fd, encoded + crc32c(encoded).to_bytes(4, "little"), blocks.nbytes)
            self._disk.truncate(fd, _RUN_SIZE_BYTES)
            self._disk.fsync(fd)
        finally:
            self._disk.close(fd)
        return _Run(path, first, last + 1)

    def _sync_tail(self) -> None:
        try:
            self._disk.fdatasync(self._files.get(self._tail_path).fd)
        except OSError:
            self._damaged = True  # a second sync would not notice what the first one lost
            raise

    def _find_in_run(self, run: _Run, hash_: int, start: int, end: int, count_max: int) -> list[int]:
        fences = self._fences_of(run)
        key = np.uint64(hash_)
        last = int(np.searchsorted(fences["hash"], key, "right")) - 1
        first = max(0, int(np.searchsorted(fences["hash"], key, "left")) - 1)
        found: list[int] = []
        for block in range(last, first - 1, -1):
            hashes, positions = self._read_block(run, block, int(fences["crc32c"][block]))
            matches = positions[np.searchsorted(hashes, key, "left") : np.searchsorted(hashes, key, "right")]
            found.extend(matches[(matches >= start) & (matches < end)][::-1].tolist())
            if len(found) >= count_max:
                break
        return found[:count_max]

    def _fences_of(self, run: _Run) -> NDArray[Any]:
        fences = self._fences.get(run.path)
        if fences is None:
            size = _FENCES_SIZE_BYTES + 4
            data = self._read(run.path, size, _BLOCKS_PER_RUN * _BLOCK_SIZE_BYTES)
            encoded = data[:_FENCES_SIZE_BYTES]
            if len(data) < size or crc32c(encoded).to_bytes(4, "little") != data[_FENCES_SIZE_BYTES:]:
                raise self._damage(run.path, "its fences do not hold")
            fences = np.frombuffer(encoded, _FENCE)
            with self._lock:
                if len(self._fences) >= _FENCES_CACHED_MAX:
                    self._fences.clear()
                self._fences[run.path] = fences
        return fences

    def _read_block(self, run: _Run, block: int, crc: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        data = self._read(run.path, _BLOCK_SIZE_BYTES, block * _BLOCK_SIZE_BYTES)
        if crc32c(data) != crc:
            raise self._damage(run.path, f"block {block} does not hold")
        columns = np.frombuffer(data, "<u8").reshape(2, _ROWS_PER_BLOCK)
        return columns[0], columns[1]

    def _read(self, path: str, size_bytes: int, at: int) -> bytes:
        try:
            file = self._files.get(path)
        except FileNotFoundError:
            if any(run.path == path for run in self._runs):
                raise self._damage(path, "the file is gone") from None
            return b""  # deleted for its age just now
        return read_fully(self._disk, file.fd, size_bytes, at)

    def _damage(self, path: str, reason: str) -> IndexDamagedError:
        self._damaged = True
        return IndexDamagedError(f"{path}: {reason}: the index is made anew at the next start")

    def _write_state(self, position: int, tail_rows: int) -> None:
        if self._damaged:
            remove_file(self._disk, self._state_path)
            return
        tail_crc = crc32c(self._tail[:tail_rows].tobytes())
        bounds = np.array([(run.first_position, run.end_position) for run in self._runs], "<u8").tobytes()
        head = _HEAD.pack(position, self._generation, tail_rows, tail_crc)
        write_state_file(self._disk, self._state_path, _MAGIC, head + bounds)
        self._checkpoint_position = position

    def _load(self) -> bool:
        payload = read_state_file(self._disk, self._state_path, _MAGIC)
        if payload is None:
            return False
        position, self._generation, tail_rows, tail_crc = _HEAD.unpack_from(payload)
        for first, end in np.frombuffer(payload[_HEAD.size :], "<u8").reshape(-1, 2).tolist():
            path = f"{self._folder}/{_RUN_PREFIX}{first:020d}"
            if size_of_file(self._disk, path) != _RUN_SIZE_BYTES:
                return False
            self._runs.append(_Run(path, first, end))
        data = (read_file(self._disk, self._tail_path) or b"")[: tail_rows * _ROW.itemsize]
        if len(data) < tail_rows * _ROW.itemsize or crc32c(data) != tail_crc:
            return False
        cut_file(self._disk, self._tail_path, len(data))
        self._tail = np.frombuffer(data, _ROW).copy()
        self._tail_count = self._tail_flushed = tail_rows
        self._tail_file_is_new = tail_rows == 0
        self._checkpoint_position = self.replay_from = position
        return True


_BLOCKS_PER_RUN: Final = ROWS_PER_RUN // _ROWS_PER_BLOCK
_FENCES_SIZE_BYTES: Final = _BLOCKS_PER_RUN * _FENCE.itemsize
_RUN_SIZE_BYTES: Final = _BLOCKS_PER_RUN * _BLOCK_SIZE_BYTES + _FENCES_SIZE_BYTES + 4


def _rows(hashes: NDArray[np.uint64], positions: NDArray[Any]) -> NDArray[Any]:
    rows = np.empty(len(hashes), _ROW)
    rows["hash"] = hashes
    rows["position"] = positions
    return rows


def _in_log_order(parts: list[NDArray[Any]]) -> NDArray[Any]:
    rows = np.concatenate(parts)
    return rows[np.argsort(rows["position"], kind="stable")]


def _rows_of_noted(ones: NDArray[np.uint64], many: list[_Noted]) -> NDArray[Any]:
    positions, key_hashes, producer_ids, epochs, sequences = ones.T
    keyed, identified = np.flatnonzero(key_hashes), np.flatnonzero(producer_ids)
    parts = [
        _rows(key_hashes[keyed], positions[keyed]),
        _message_id_rows(producer_ids[identified], epochs[identified], sequences[identified], positions[identified]),
    ]
    ids: list[tuple[int, int, int, int]] = []  # producer id, epoch, number, position
    for position, count, starts, hashes, producer_id, producer_epoch, first_sequence in many:
        keyed = np.flatnonzero(hashes)
        if len(keyed):
            parts.append(_rows(hashes[keyed], starts[keyed] + position))
        if producer_id:
            last = first_sequence + count - 1
            for block in range(first_sequence // SEQUENCES_PER_BLOCK, last // SEQUENCES_PER_BLOCK + 1):
                index = max(0, block * SEQUENCES_PER_BLOCK - first_sequence)
                ids.append((producer_id, producer_epoch, _BLOCK_MARK | block, position + int(starts[index])))
    if ids:
        columns = np.array(ids, np.uint64).T
        parts.append(_message_id_rows(*columns))
    return _in_log_order(parts)


def _message_id_rows(
    producer_ids: NDArray[np.uint64], epochs: NDArray[np.uint64], numbers: NDArray[np.uint64], positions: NDArray[Any]
) -> NDArray[Any]:
    return _rows(_mix_many(_mix_many(_mix_many(producer_ids) ^ epochs) ^ numbers), positions)


def _message_id_rows_of_scan(records: ScannedRecords, first: int) -> NDArray[Any]:
    """As `_rows_of_noted` for records of which nobody knows any more which request they came in: runs take the place of requests."""
    producer_ids, epochs = records.producer_ids[first:], records.producer_epochs[first:].astype(np.uint64)
    sequences, positions = records.sequences[first:], records.positions[first:]
    goes_on = run_continues(records)[first:]
    goes_on[0] = False
    followed = np.append(goes_on[1:], False)
    alone = ~goes_on & ~followed
    anchors = (~goes_on | (sequences % np.uint64(SEQUENCES_PER_BLOCK) == 0)) & (producer_ids != 0)
    blocks = sequences // np.uint64(SEQUENCES_PER_BLOCK) | np.uint64(_BLOCK_MARK)
    numbers = np.where(alone, sequences, blocks)
    return _message_id_rows(producer_ids[anchors], epochs[anchors], numbers[anchors], positions[anchors])
