"""What is known of each producer, in columns: with its id a row costs 170 bytes, where an object cost 300.

    id -> row                 256 dicts, so that none of them takes long to grow
    ids, epochs, floors, …    arrays, an entry for each row
    older                     row -> the runs before its last one (`producer_runs.py`), for those that have any

Rules:
- Who is *forgotten* follows from the times alone: a producer is known as long as `used_ms` of its row is above `forgotten_ms`. That mark is
  set in one step, however many it forgets; their rows are used again one by one, for those who come.
- Older runs of a row that was not used after `runs_forgotten_ms` are forgotten likewise.
- A snapshot is of one moment: `freeze`, then `take` step by step. What is changed meanwhile is kept as it was, until its step has come.
- Not thread-safe: the owner has a lock.
"""

from __future__ import annotations

from array import array
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .producer_runs import RUN_FIELDS

SHARDS: Final = 256
SNAPSHOT_STEP: Final = 1_024
"""Rows that are copied in one go: 0.04 ms, 1 ms if each has an older run."""
NEVER_MS: Final = -1

ROW: Final = np.dtype(
    [
        ("id", "<u8"),
        ("epoch", "<u4"),
        ("floor", "<u8"),
        ("first", "<u8"),
        ("end", "<u8"),
        ("queue", "<u4"),
        ("queue_offset", "<u8"),
        ("used_ms", "<i8"),
        ("older", "<u4"),
    ]
)
"""A row as the snapshot has it; `older`: number of its older runs."""


class _Frozen(NamedTuple):
    """A snapshot that is being taken."""

    row_count: int
    forgotten_ms: int
    runs_forgotten_ms: int
    taken: list[int]
    """One number: rows that have been taken."""
    kept: dict[int, dict[int, tuple[tuple[int, ...], bytes]]]
    """Step -> row -> (values of its columns, older runs) as they were."""


class ProducerTable:
    """See the module's docstring.

    Attributes: the columns, for the owner to read and write: after `keep`.
        forgotten_ms, runs_forgotten_ms: the two marks.
        count: producers that are known, as of the mark.
        older_count: their older runs together.
        is_frozen: a snapshot is being taken: `keep` comes before any change.
        shards: id -> row, by the lowest octet of the id.
    """

    __slots__ = (
        "_free", "_free_taken", "_frozen", "count", "ends", "epochs", "firsts", "floors", "forgotten_ms", "ids", "is_frozen", "older",
        "older_count", "older_counts", "queue_offsets", "queues", "runs_forgotten_ms", "shards", "used_ms",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ids, self.epochs = array("Q"), array("I")
        self.floors, self.firsts, self.ends = array("Q"), array("Q"), array("Q")
        self.queues, self.queue_offsets = array("I"), array("Q")
        self.used_ms, self.older_counts = array("q"), array("I")
        self.older: dict[int, array[int]] = {}
        self.forgotten_ms = self.runs_forgotten_ms = NEVER_MS
        self.count = self.older_count = 0
        self.shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._free: NDArray[np.int64] = np.empty(0, np.int64)
        self._free_taken = 0
        self._frozen: _Frozen | None = None
        self.is_frozen = False

    # One producer.

    def find(self, producer_id: int) -> int:
        """The row of a producer that is known; -1 if it is not."""
        row = self.shards[producer_id & 255].get(producer_id, -1)
        return row if row >= 0 and self.used_ms[row] > self.forgotten_ms else -1

    def add(self, producer_id: int, epoch: int, used_ms: int) -> int:
        """The row for a producer that is not known, without a run."""
        shard = self.shards[producer_id & 255]
        row = shard.get(producer_id, -1)
        if row < 0:
            row = self._reclaim()
            shard[producer_id] = row
        self.keep(row)
        self.ids[row] = producer_id
        self.reset(row, epoch)
        self.used_ms[row] = used_ms
        self.count += 1
        return row

    def reset(self, row: int, epoch: int) -> None:
        """Nothing of a producer is known but its epoch."""
        self.drop_older(row)
        self.epochs[row] = epoch
        self.floors[row] = self.firsts[row] = self.ends[row] = 0

    def drop_older(self, row: int) -> None:
        """Forgets the older runs of a row."""
        count = self.older_counts[row]
        if count:
            if self.has_older(row):
                self.older_count -= count
            self.older_counts[row] = 0
            del self.older[row]

    def has_older(self, row: int) -> bool:
        """Whether the row has older runs, and they are not forgotten."""
        used_ms = self.used_ms[row]
        return (
            self.older_counts[row] > 0
            and used_ms > self.runs_forgotten_ms
            and used_ms > self.forgotten_ms
        )

    def older_of(self, row: int) -> array[int]:
        """The older runs of a row, made if it has none."""
        runs = self.older.get(row)
        if runs is None:
            runs = self.older[row] = array("Q")
        return runs

    # All of them.

    def count_used_until(self, time_ms: int) -> int:
        """How many that are known were not used after `time_ms`."""
        used = np.frombuffer(self.used_ms, np.int64)
        return int(np.count_nonzero(used <= time_ms) - np.count_nonzero(used <= self.forgotten_ms))

    def forget_until(self, time_ms: int) -> None:
        """Forgets all that were not used after `time_ms`."""
        if time_ms > self.forgotten_ms:
            self.forgotten_ms = time_ms
            self.recount()

    def forget_runs_until(self, time_ms: int) -> None:
        """Forgets the older runs of all that were not used after `time_ms`."""
        if time_ms > self.runs_forgotten_ms:
            self.runs_forgotten_ms = time_ms
            self.recount()

    def recount(self) -> None:
        """Counts again, after a mark was moved or columns were changed as a whole."""
        if not len(self.ids):
            return
        used = np.frombuffer(self.used_ms, np.int64)
        known = used > self.forgotten_ms
        self.count = int(np.count_nonzero(known))
        with_runs = used > max(self.forgotten_ms, self.runs_forgotten_ms)
        older = np.frombuffer(self.older_counts, np.uint32)
        self.older_count = int(np.sum(older, where=with_runs, dtype=np.int64))
        self._free, self._free_taken = np.flatnonzero(~known), 0

    def _reclaim(self) -> int:
        """A row of a producer that is forgotten, or a new one."""
        while self._free_taken < len(self._free):
            row = int(self._free[self._free_taken])
            self._free_taken += 1
            if self.used_ms[row] <= self.forgotten_ms:
                self.keep(row)
                old_id = self.ids[row]
                shard = self.shards[old_id & 255]
                if shard.get(old_id) == row:
                    del shard[old_id]
                return row
        row = len(self.ids)
        for column in self._columns():
            column.append(0)
        self.used_ms[row] = NEVER_MS
        return row

    def _columns(self) -> tuple[array[int], ...]:
        return (
            self.ids, self.epochs, self.floors, self.firsts, self.ends, self.queues, self.queue_offsets, self.used_ms,
            self.older_counts,
        )  # fmt: skip

    # Some of them.

    def copy(self, rows: list[int], runs_max: int) -> tuple[NDArray[Any], list[bytes]]:
        """What is known in these rows, and the newest older runs of those that have any, in their order."""
        found = np.empty(len(rows), ROW)
        for name, column in zip(ROW.names or (), self._columns(), strict=True):
            found[name] = [column[row] for row in rows]
        older = []
        for index, row in enumerate(rows):
            if self.has_older(row):
                runs = self.older[row][-RUN_FIELDS * runs_max :]
                older.append(runs.tobytes())
                if self.older_counts[row] > runs_max:
                    found[index]["floor"], found[index]["older"] = runs[0], runs_max
            elif self.older_counts[row]:  # forgotten
                found[index]["floor"], found[index]["older"] = self.firsts[row], 0
        return found, older

    def enter(self, rows: NDArray[Any], older: bytes) -> None:
        """Takes over what `copy` gave: it is all that is known of these producers."""
        at = 0
        for values in rows.tolist():
            producer_id, epoch, floor, first, end, queue, queue_offset, used_ms, older_count = values
            row = self.find(producer_id)
            if row < 0:
                row = self.add(producer_id, epoch, used_ms)
            self.keep(row)
            self.reset(row, epoch)
            self.floors[row], self.firsts[row], self.ends[row] = floor, first, end
            self.queues[row], self.queue_offsets[row], self.used_ms[row] = queue, queue_offset, used_ms
            if older_count:
                size = 8 * RUN_FIELDS * older_count
                self.older_of(row).frombytes(older[at : at + size])
                at += size
                self.older_counts[row] = older_count
                self.older_count += older_count

    # Snapshots.

    def freeze(self) -> None:
        """From now on `take` reports this moment."""
        self._frozen = _Frozen(len(self.ids), self.forgotten_ms, self.runs_forgotten_ms, [0], {})
        self.is_frozen = True

    def thaw(self) -> None:
        """The snapshot is done, or given up."""
        self._frozen = None
        self.is_frozen = False

    def keep(self, row: int) -> None:
        """To be called before a row is changed while the table is frozen."""
        frozen = self._frozen
        if frozen is not None and frozen.taken[0] <= row < frozen.row_count:
            kept = frozen.kept.setdefault(row // SNAPSHOT_STEP, {})
            if row not in kept:
                runs = self.older.get(row)
                values = tuple(column[row] for column in self._columns())
                kept[row] = values, b"" if runs is None else runs.tobytes()

    def take(self) -> tuple[NDArray[Any], list[bytes]] | None:
        """The next rows of the frozen moment that are known, and the older runs of those that have any, in their order; None: no more."""
        frozen = self._frozen
        assert frozen is not None, "freeze comes first"
        start = frozen.taken[0]
        if start >= frozen.row_count:
            return None
        end = min(start + SNAPSHOT_STEP, frozen.row_count)
        rows = np.empty(end - start, ROW)
        for name, column in zip(ROW.names or (), self._columns(), strict=True):
            rows[name] = column[start:end]
        kept = frozen.kept.pop(start // SNAPSHOT_STEP, {})
        for row, (values, _) in kept.items():
            rows[row - start] = values
        frozen.taken[0] = end
        used_ms = rows["used_ms"]
        known = used_ms > frozen.forgotten_ms
        without = (rows["older"] > 0) & (used_ms <= frozen.runs_forgotten_ms)
        rows["floor"][without] = rows["first"][without]
        rows["older"][without] = 0
        older = [
            kept[row][1] if row in kept else self.older[row].tobytes()
            for row in (np.flatnonzero(known & (rows["older"] > 0)) + start).tolist()
        ]
        return rows[known], older

    def load(self, rows: NDArray[Any], older: bytes | memoryview) -> None:
        """Takes over a snapshot; the table is empty."""
        for name, column in zip(ROW.names or (), self._columns(), strict=True):
            column.frombytes(np.ascontiguousarray(rows[name]).tobytes())
        for row, producer_id in enumerate(self.ids):
            self.shards[producer_id & 255][producer_id] = row
        at = 0
        for row in np.flatnonzero(rows["older"]).tolist():
            size = 8 * RUN_FIELDS * self.older_counts[row]
            self.older_of(row).frombytes(older[at : at + size])
            at += size
        self.recount()

    # A log that was cut.

    def clip(self, ends: NDArray[np.int64]) -> None:
        """Cuts each run where its queue ends (`ends`, by the queue's number), and forgets who has none left."""
        assert self._frozen is None, "nobody takes a snapshot of a log that is cut"
        if not len(self.ids):
            return
        firsts = np.frombuffer(self.firsts, np.uint64)
        run_ends = np.frombuffer(self.ends, np.uint64)
        clipped = _clipped(
            firsts,
            run_ends,
            np.frombuffer(self.queues, np.uint32),
            np.frombuffer(self.queue_offsets, np.uint64),
            ends,
        )
        run_ends[:] = clipped
        empty = clipped <= firsts
        for row in list(self.older):
            runs = np.frombuffer(self.older[row], np.uint64).reshape(-1, RUN_FIELDS).copy()
            runs[:, 1] = _clipped(runs[:, 0], runs[:, 1], runs[:, 2], runs[:, 3], ends)
            runs = runs[runs[:, 1] > runs[:, 0]]
            if empty[row] and len(runs):
                last = runs[-1].tolist()
                runs, empty[row] = runs[:-1], False
                self.firsts[row], self.ends[row], self.queues[row], self.queue_offsets[row] = last
            self.older_counts[row] = len(runs)
            if len(runs):
                self.older[row] = array("Q", runs.tobytes())
            else:
                del self.older[row]
        np.frombuffer(self.used_ms, np.int64)[empty] = NEVER_MS
        self.recount()


def _clipped(
    firsts: NDArray[np.uint64],
    run_ends: NDArray[np.uint64],
    queues: NDArray[Any],
    queue_offsets: NDArray[np.uint64],
    ends: NDArray[np.int64],
) -> NDArray[np.uint64]:
    """The end of each run as far as its queue reaches."""
    if not len(ends):
        return run_ends
    allowed = ends[queues.astype(np.int64)] - queue_offsets.astype(np.int64)
    lengths = (run_ends - firsts).astype(np.int64)
    return firsts + np.clip(allowed, 0, lengths).astype(np.uint64)
