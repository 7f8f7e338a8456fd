"""Where in the log the messages with a key, or with a message id, stand.

    index/index.bin                  state file (`side_files.py`): position u64, generation u64, tail rows u64, tail CRC-32C u32,
                                     then first and end position (u64 each) of each run file, oldest first
    index/tail.<generation>          rows as they came: hash u64, position u64, in the order of the log
    index/run.<first position>       sorted rows: `index_runs.py`

Rules:
- An index finds candidates: two keys can have the same hash. The caller reads the record and compares.
- Each key of each message has a row. Message ids have a row for each append request: a request holds consecutive sequences in one
  queue, so its first record leads to all. The hash covers producer, epoch and sequence. A request of several records has a row
  for each block of 256 sequences that it reaches into, with a hash of the block. See `find_message_id`.
- The writer only notes what was appended, under a lock that others hold just to take the notes over. Hashing, sorting and files are
  the flusher's, and a look-up's, under a second lock. A third one lets one thread at a time change files.
- Rows go into a run file only when the log is durable behind them, so files hold nothing that the log might lose.
- A replay that skips damage leaves a row with the hash 0 there. What stands before it is known; what the damage took is not.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protomq.wire.hashing import crc32c
from protomq_broker.store.files.disk import Disk, if_there_is_room, remove_file, write_fully
from protomq_broker.store.files.side_files import (
    OpenFiles,
    cut_file,
    empty_folder,
    read_cache,
    read_cached_state,
    why_not,
    write_state_file,
)
from protomq_broker.store.log.append import AppendRequest, MoreKey, ScannedRecords
from protomq_broker.store.log.kinds import is_indexed

from .index_rows import (
    BLOCK_MARK,
    MASK_64,
    ONE_COLUMNS,
    ROW,
    SEQUENCES_PER_BLOCK,
    Noted,
    message_id_hash,
    rows_of_noted,
    rows_of_scan,
)
from .index_runs import ROWS_PER_RUN, IndexDamagedError, Run, RunFiles

CANDIDATES_MAX: Final = 1_024
UNKNOWN_HASH: Final = 0
"""Of no key, and of no message id but one of 2^64, which then finds a candidate more."""

_MAGIC: Final = b"PMQIDX01"
_HEAD: Final = struct.Struct("<QQQI")
_STATE_FILE_NAME: Final = "index.bin"
_TAIL_PREFIX: Final = "tail."
_TAIL_CAPACITY_MIN: Final = 4_096


class MessageIndex:
    """The index of a store.

    Attributes:
        replay_from: after `load`: what the log has below this position is in the index already.
        needs_rebuild: always False: a damaged index is empty after `load`.
        damage: after `load`: why its files were not taken over; "" if they were.
    """

    outlives_topics = False
    takes_plain = True

    def __init__(self, disk: Disk, folder: str) -> None:
        self.replay_from = 0
        self.needs_rebuild = False
        self.damage = ""
        self._disk = disk
        self._folder = folder
        self._files = OpenFiles(disk, 1)
        self._run_files = RunFiles(disk, folder)
        self._note_lock = threading.Lock()
        self._lock = threading.Lock()
        self._files_lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self._noted_ones: array[int] = array("Q")
        self._noted_many: list[Noted] = []
        self._noted_keys: list[MoreKey] = []
        self._runs: list[Run] = []
        self._tail = np.empty(0, ROW)
        self._tail_count = 0
        self._tail_flushed = 0
        self._replay_flush_from = ROWS_PER_RUN  # so many rows of a replay, and they are written
        self._generation = 0
        self._tail_file_is_new = True
        self._has_new_names = False
        self._damaged = False
        self._checkpoint_position = 0

    # Writer thread.

    def apply(self, requests: Sequence[AppendRequest]) -> None:
        """Notes what was just appended to the log."""
        with self._note_lock:
            for request in requests:
                region = request.region
                if region.flags and not is_indexed(region.flags):
                    continue
                if region.more_keys:
                    position = request.physical_offset
                    self._noted_keys += [(position + at, hash_) for at, hash_ in region.more_keys]
                if region.starts is None and not region.flags:
                    self._noted_ones.extend(
                        (
                            request.physical_offset,
                            region.key_hashes,  # type: ignore[arg-type]
                            region.producer_id,
                            region.producer_epoch,
                            region.first_sequence,
                        )
                    )
                elif region.identities is not None:
                    self._noted_ones.frombytes(_ones(request, region.identities).tobytes())
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
        self,
        key_hash: int,
        *,
        start_position: int = 0,
        end_position: int | None = None,
        count_max: int = CANDIDATES_MAX,
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

        Read the record at a candidate. The candidate must have the wanted producer and epoch, and a sequence s that is not above
        the wanted one. If the wanted record belongs to the same request, it stands at queue offset + (sequence - s) of that queue.
        Read it and compare its id; if it is another one, go on with the next candidate.
        """
        if producer_id == 0:
            return []
        block = BLOCK_MARK | sequence // SEQUENCES_PER_BLOCK
        hashes = (
            message_id_hash(producer_id, producer_epoch, sequence),
            message_id_hash(producer_id, producer_epoch, block),
        )
        return self._find(hashes, start_position, end_position, count_max)

    def unknown_from(self, start_position: int, end_position: int) -> list[int]:
        """Within [start_position, end_position), last one first: positions from which on the index was not made of the messages, for they
        were damaged by then. As far as the damage goes, any message may stand there.
        """
        return self._find((UNKNOWN_HASH,), start_position, end_position, CANDIDATES_MAX)

    def _find(
        self, hashes: Sequence[int], start_position: int, end_position: int | None, count_max: int
    ) -> list[int]:
        with self._lock:
            self._convert()
            tail = self._tail[: self._tail_count]
            runs = list(self._runs)
        end = end_position if end_position is not None else MASK_64
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
                older.update(
                    self._find_in_run(run, hash_, start_position, end, count_max - len(found))
                )
            found.extend(sorted(older.difference(found), reverse=True)[: count_max - len(found)])
        return found

    def _find_in_run(self, run: Run, hash_: int, start: int, end: int, count_max: int) -> list[int]:
        try:
            return self._run_files.find(run, hash_, start, end, count_max)
        except (FileNotFoundError, IndexDamagedError) as error:
            if run not in self._runs:
                return []  # deleted for its age just now
            self._damaged = True
            raise IndexDamagedError(str(error)) from error

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
                self._has_new_names = True
            write_fully(self._disk, file.fd, rows.tobytes(), self._tail_flushed * ROW.itemsize)
            self._tail_flushed += len(rows)

    def checkpoint(self, position: int) -> None:
        """Makes durable that everything that the log holds below `position` is in the index."""
        with self._files_lock:
            self.flush()
            durable = self._count_below(position)
            old_tail_path = self._tail_path
            if durable >= ROWS_PER_RUN:
                durable -= self._roll(durable)
                self.flush()
            if self._tail_flushed:
                self._disk.fdatasync(self._files.get(self._tail_path).fd)
            if self._has_new_names:
                self._disk.fsync_dir(self._folder)
                self._has_new_names = False
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
            if not gone:
                return
            # The state first, so that no start looks for files that are gone.
            position = self._checkpoint_position
            self._write_state(position, self._count_below(position))
            for run in gone:
                self._run_files.remove(run)

    def remove_topic(self, topic: str) -> None:
        """Nothing to do: whoever looks up finds no queue that leads to the record."""

    def forget_deleted(self, positions: Mapping[str, int]) -> None:
        """Nothing to do: a hash that leads to what is gone is skipped by whoever looks it up."""

    def close(self) -> None:
        """Closes the files. Call `checkpoint` before."""
        self._files.forget_below("")
        self._run_files.close()

    # Recovery: one thread, nobody else.

    def load(self, log_start: int = 0) -> None:
        """Takes over what the files hold; nothing if one of them does not hold. `log_start` is not needed."""
        self._clear()
        self._disk.make_folder(self._folder)
        self.damage = self._load()
        if self.damage:
            self.start_rebuild()
            return
        known = {
            _STATE_FILE_NAME,
            f"{_TAIL_PREFIX}{self._generation}",
            *(run.name for run in self._runs),
        }
        for name in self._disk.list(self._folder):
            if name not in known:
                self._disk.unlink(f"{self._folder}/{name}")

    def start_rebuild(self) -> None:
        """Removes everything; a replay from the log's start rebuilds it."""
        self._files.forget_below("")
        self._run_files.close()
        self._clear()
        remove_file(self._disk, self._state_path)
        empty_folder(self._disk, self._folder)
        self.replay_from = 0

    def replay(self, records: ScannedRecords) -> None:
        """Adds records read back from the log, in its order; those that are there already are skipped."""
        records = records.select(is_indexed(records.flags))
        first = int(np.searchsorted(records.positions, self.replay_from))
        if first == records.count:
            return
        with self._lock:
            self._add_rows(rows_of_scan(records, first))
        if self._tail_count >= self._replay_flush_from:
            self._replay_flush_from = self._tail_count + ROWS_PER_RUN
            with if_there_is_room():
                self.flush()

    def pass_over(self, start_position: int, end_position: int) -> None:
        """Remembers that the replay comes upon damage, of which it gives no records."""
        start = max(start_position, self.replay_from)
        if start < end_position:
            with self._lock:
                self._add_rows(np.array([(UNKNOWN_HASH, start)], ROW))

    def truncate(self, end_position: int) -> None:
        """Removes the rows of all records at or beyond `end_position`. Nobody appends meanwhile."""
        with self._files_lock:
            with self._lock:
                self._convert()
                kept = self._count_below(end_position)
                beyond = self._runs and self._runs[-1].end_position > end_position
                if kept == self._tail_count and not beyond:
                    return
                self._tail = self._tail[:kept].copy()
                self._tail_count = kept
                self._tail_flushed = min(self._tail_flushed, kept)
            # Rows in run files stay: the caller looks at each candidate, and refuses one that leads nowhere.
            if self._tail_flushed:
                self._disk.truncate(
                    self._files.get(self._tail_path).fd, self._tail_flushed * ROW.itemsize
                )
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

    def _count_below(self, position: int) -> int:
        """How many rows of the tail lie below a position of the log."""
        count = self._tail_count  # before the rows: a look-up may take in others meanwhile
        return int(np.searchsorted(self._tail["position"][:count], position))

    def _convert(self) -> None:
        """Turns what was noted into rows of the tail. The caller holds the lock."""
        with self._note_lock:
            ones, many, keys = self._noted_ones, self._noted_many, self._noted_keys
            if not ones and not many:
                return
            self._noted_ones, self._noted_many, self._noted_keys = array("Q"), [], []
        self._add_rows(
            rows_of_noted(np.frombuffer(ones, np.uint64).reshape(-1, ONE_COLUMNS), many, keys)
        )

    def _add_rows(self, rows: NDArray[Any]) -> None:
        end = self._tail_count + len(rows)
        if end > len(self._tail):
            grown = np.empty(max(_TAIL_CAPACITY_MIN, end + end // 2), ROW)
            grown[: self._tail_count] = self._tail[: self._tail_count]
            self._tail = grown
        self._tail[self._tail_count : end] = rows
        self._tail_count = end

    def _roll(self, durable: int) -> int:
        """Moves full runs out of the tail, whose first `durable` rows may go; how many went. The next tail is another file."""
        moved = 0
        added: list[Run] = []
        while durable - moved >= ROWS_PER_RUN:
            added.append(self._run_files.write(self._tail[moved : moved + ROWS_PER_RUN]))
            moved += ROWS_PER_RUN
        with self._lock:
            self._runs.extend(added)
            self._tail = self._tail[moved : self._tail_count].copy()
            self._tail_count -= moved
            self._tail_flushed = 0
            self._generation += 1
            self._tail_file_is_new = True
        return moved

    def _write_state(self, position: int, tail_rows: int) -> None:
        if self._damaged:
            remove_file(self._disk, self._state_path)
            return
        tail_crc = crc32c(self._tail[:tail_rows].tobytes())
        bounds = np.array(
            [(run.first_position, run.end_position) for run in self._runs], "<u8"
        ).tobytes()
        head = _HEAD.pack(position, self._generation, tail_rows, tail_crc)
        write_state_file(self._disk, self._state_path, _MAGIC, head + bounds)
        self._checkpoint_position = position

    def _load(self) -> str:
        """Takes over the files; why they do not hold, or ""."""
        payload = read_cached_state(self._disk, self._state_path, _MAGIC)
        if payload is None:
            return why_not(self._disk, self._state_path, _MAGIC)
        position, self._generation, tail_rows, tail_crc = _HEAD.unpack_from(payload)
        for first, end in np.frombuffer(payload[_HEAD.size :], "<u8").reshape(-1, 2).tolist():
            run = Run(first, end)
            self._runs.append(run)
            if not self._run_files.holds(run):
                return f"{self._folder}/{run.name} is gone or does not hold"
        data = (read_cache(self._disk, self._tail_path) or b"")[: tail_rows * ROW.itemsize]
        if len(data) < tail_rows * ROW.itemsize or crc32c(data) != tail_crc:
            return f"{self._tail_path} is cut short or does not hold"
        cut_file(self._disk, self._tail_path, len(data))
        self._tail = np.frombuffer(data, ROW).copy()
        self._tail_count = self._tail_flushed = tail_rows
        self._tail_file_is_new = tail_rows == 0
        self._checkpoint_position = self.replay_from = position
        return ""


def _ones(request: AppendRequest, identities: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Copies, of which each has an id of its own, as if each had come alone."""
    ones = np.empty((len(identities), ONE_COLUMNS), np.uint64)
    starts = request.region.starts
    ones[:, 0] = request.physical_offset if starts is None else starts + request.physical_offset
    ones[:, 1] = request.region.key_hashes
    ones[:, 2:] = identities
    return ones


def end_position(disk: Disk, folder: str) -> int:
    """Up to where the files in `folder` reach; 0 if they do not say. What of them lies behind the end of the log is cut off at a start."""
    payload = read_cached_state(disk, f"{folder}/{_STATE_FILE_NAME}", _MAGIC)
    return int(_HEAD.unpack_from(payload)[0]) if payload is not None else 0
