"""What is pending: delayed messages that are not delivered yet, by the time at which they fall due. Derived from the log.

    noted     what the writer has noted and nobody has looked at      arrays as they came
    fresh     rows that came lately, of any due time                    memory, unordered, few
    aside     rows that are due, and whose record cannot be read        memory, parts in order; pending, but `due` gives them no more,
                                                                        until `take_back` or the next start
    near      the rows that fall due next                               memory, in order
    ------------------------------------------------------------------- horizon: a key; all rows up to it are in memory
    far       rows behind the horizon that came lately                  memory, unordered
    runs      rows behind the horizon                                   files in order, each read up to somewhere: `timer_runs.py`

    timer/pending.bin   what a checkpoint wrote: `pending_state.py`
    timer/recalled.bin  which messages were recalled of late: `recalled.py`

Rules:
- A row comes when a record with a due time is appended. It goes when a record of %SYS%TIMER says that it was moved, recalled or carried
  forward. Both are noted by the writer, under a lock that is held for no more than that.
- What lies far ahead costs nothing but its place in a file, and being merged with others now and then. Memory holds MEMORY_ROWS_MAX rows.
- A row that goes while it stands in a file leaves a removal; when the two meet, both go.
- A removal may meet no row: its record stands where the log was damaged when it was read. Such a row was never counted.
- A checkpoint has the state at the moment of `freeze`. What it writes is durable in the log by then. So after a power cut the files are
  never ahead of the log.
- One thread at a time takes what is due; rows stay until they are removed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq_broker.store.files.disk import Disk, remove_file
from protomq_broker.store.files.side_files import empty_folder

from .pending_state import STATE_FILE_NAME, PendingState, read_state, why_no_state, write_state
from .recalled import RECALLED_FILE_NAME, RecalledMessages
from .timer_rows import (
    ASIDE,
    LAST_KEY,
    MESSAGE,
    NO_ROWS,
    REMOVED,
    Key,
    count_through,
    key_at,
    make_rows,
    mark_removed,
    merge_rows,
    sort_rows,
    through,
)
from .timer_runs import Cursor, Run, RunWriter, TimerDamagedError, merged, take_through

NEAR_ROWS_MAX: Final = 128 << 10
"""More are cut in half: the later ones go into a file."""
FRESH_ROWS_MAX: Final = 32 << 10
FAR_ROWS_MAX: Final = 64 << 10
MEMORY_ROWS_MAX: Final = NEAR_ROWS_MAX + FRESH_ROWS_MAX + FAR_ROWS_MAX
RUNS_PER_LEVEL: Final = 8
"""This number of runs of about one size become one: a row is rewritten once for each time that the timer grows eightfold."""

_NO_HORIZON: Final = LAST_KEY


class PendingLimits(NamedTuple):
    """How many rows stand where; tests make them small."""

    near: int = NEAR_ROWS_MAX
    fresh: int = FRESH_ROWS_MAX
    far: int = FAR_ROWS_MAX
    runs_per_level: int = RUNS_PER_LEVEL


class PendingTimers:
    """See the module's docstring.

    Attributes:
        entries_from, removals_from: after `load`: what the log has below these positions is in it already.
        rows_from: no row stands before this position. What the log says of earlier ones is of segments that were gone when it was taken in.
        damage: after `load`: why its files were not taken over; "" if they were.
        met_damage: why the files have to be rebuilt while others use them; "" if they hold, as far as is known.
        is_rebuilding: not everything is here yet.
        log_time_ms: the latest that a record of %SYS%TIMER tells.
        recalled: the messages that were recalled of late.
    """

    def __init__(self, disk: Disk, folder: str, limits: PendingLimits | None = None) -> None:
        self.entries_from = 0
        self.removals_from = 0
        self.rows_from = 0
        self.damage = ""
        self.met_damage = ""
        self.is_rebuilding = False
        self._disk = disk
        self._folder = folder
        self._limits = limits or PendingLimits()
        self._note_lock = threading.Lock()
        self._lock = threading.Lock()
        self._files_lock = threading.Lock()
        self.recalled = RecalledMessages(disk, folder)
        self._lost: list[tuple[int, int]] = []  # parts [start, end) of the log of which no row came, since it has lost them
        self._clear()

    def _clear(self) -> None:
        self.entries_from = self.removals_from = 0
        self._noted: list[NDArray[Any]] = []
        self._noted_removals: list[NDArray[Any]] = []
        self._held_removals: list[NDArray[Any]] = []
        """Noted while `is_rebuilding`: their rows may not be here yet, and a removal that finds none is gone."""
        self._fresh: list[NDArray[Any]] = []
        self._fresh_count = 0
        self._fresh_due_ms = LAST_KEY.due_ms  # the least of them
        self._near = NO_ROWS
        self._near_start = 0
        self._aside: list[NDArray[Any]] = []
        """Each part has twice as many rows as the next one, at least: so a row is merged a few times, however many there are."""
        self._far: list[NDArray[Any]] = []
        self._far_count = 0
        self._horizon = _NO_HORIZON
        self._cursors: list[Cursor] = []
        self._next_number = 0
        self._loaded = Key(0, 0)
        self._count = self._size_bytes = 0
        self._missed_count = self._missed_bytes = 0
        """Of rows that were counted as gone, and never came."""
        self._found_count = self._found_bytes = 0
        """While `is_rebuilding`: what the log has brought back, less what there was before. Till then that counts."""
        self.log_time_ms = 0
        self._frozen: PendingState | None = None
        self._unsynced: list[str] = []
        self._retired: list[str] = []

    # Writer thread.

    def begin_rebuild(self, rows_from: int) -> None:
        """Forgets all rows: `restore` and `restore_removed` bring them back from the log, whose first position is `rows_from`. Until
        `end_rebuild` nothing is due, what is noted is taken in besides, and how many there were is not forgotten.
        """
        with self._files_lock, self._lock, self._note_lock:
            counts, log_time_ms = (self.count, self.size_bytes), self.log_time_ms
            positions = self.entries_from, self.removals_from
            next_number = self._next_number  # runs that somebody reads still are not written over
            self._clear()
            self._count, self._size_bytes = counts
            self._found_count, self._found_bytes = -counts[0], -counts[1]
            self.entries_from, self.removals_from = positions
            self.log_time_ms, self._next_number = log_time_ms, next_number
            self.rows_from = rows_from
            self.met_damage = ""
            self.is_rebuilding = True
            remove_file(self._disk, self._state_path)
            empty_folder(self._disk, self._folder)
            self.recalled.forget_file()

    def note(
        self,
        due_times_ms: NDArray[Any],
        positions: NDArray[Any],
        sizes: NDArray[Any],
        end_position: int,
        kind: int = MESSAGE,
    ) -> None:
        """Records with due times were appended; all up to `end_position` are noted."""
        rows = make_rows(due_times_ms, positions, sizes, kind)
        with self._note_lock:
            self._noted.append(rows)
            self._count += len(rows)
            self._size_bytes += int(rows["size"].sum())
            self.entries_from = end_position

    def pass_over(self, start_position: int, end_position: int) -> None:
        """The log has lost this part: no row came of what stood there, so none goes."""
        with self._note_lock:
            self._lost.append((start_position, end_position))

    def note_removed(
        self,
        due_times_ms: NDArray[Any],
        positions: NDArray[Any],
        end_position: int,
        sizes: NDArray[Any],
        recalled_key: bytes = b"",
    ) -> None:
        """These, which are pending, are no more; by a record that stands before `end_position`. `recalled_key`: of a recalled one."""
        is_here = positions >= np.uint64(self.rows_from)
        for start, end in self._lost:
            is_here &= (positions < np.uint64(start)) | (positions >= np.uint64(end))
        if not is_here.all():
            due_times_ms, positions, sizes = due_times_ms[is_here], positions[is_here], sizes[is_here]
        removals = make_rows(due_times_ms, positions, sizes, REMOVED)
        with self._note_lock:
            self.removals_from = end_position
            if recalled_key:
                self.recalled.note(recalled_key)
            if not len(removals):
                return
            (self._held_removals if self.is_rebuilding else self._noted_removals).append(removals)
            # Below zero for a while, where they meet no rows: what is lost here may be pending at a leader.
            self._count -= len(removals)
            self._size_bytes -= int(sizes.sum())

    # Any thread.

    @property
    def count(self) -> int:
        """How many are pending. Too few, where removals beyond the horizon have not met their rows yet, and will meet none."""
        return max(self._count + (0 if self.is_rebuilding else self._missed_count), 0)

    @property
    def size_bytes(self) -> int:
        """How much of the log the records have that are pending."""
        return max(self._size_bytes + (0 if self.is_rebuilding else self._missed_bytes), 0)

    def due(self, now_ms: int, count_max: int) -> NDArray[Any]:
        """Up to `count_max` rows that fall due at `now_ms` or before, in order of their keys; the same again until they are removed.

        Raises TimerDamagedError, OSError.
        """
        with self._lock, self._noting_damage():
            if self.is_rebuilding:
                return NO_ROWS
            self._take_notes()
            if self._fresh_due_ms <= now_ms:
                self._settle()
            self._relieve()
            parts: list[NDArray[Any]] = []
            found, at = 0, self._near_start
            while found < count_max:
                if at >= len(self._near):
                    if self._horizon == _NO_HORIZON or self._horizon.due_ms > now_ms:
                        break
                    at -= self._load()
                    continue
                rows = self._near[at : at + count_max]
                past = int(np.searchsorted(rows["due_ms"], np.uint64(now_ms), "right"))
                live = rows[:past][rows["kind"][:past] < ASIDE][: count_max - found]
                parts.append(live)
                found += len(live)
                at += past
                if past < len(rows):
                    break
        return np.concatenate(parts) if parts else NO_ROWS

    def next_due_ms(self) -> int | None:
        """Nothing falls due before this time; None if nothing is pending."""
        with self._lock:
            self._take_notes()
            due_ms = min(self._fresh_due_ms, self._horizon.due_ms)
            if self._near_start < len(self._near):
                due_ms = min(due_ms, int(self._near["due_ms"][self._near_start]))
        return None if due_ms == LAST_KEY.due_ms else due_ms

    def at_due(self, due_ms: int, count_max: int, from_position: int = 0) -> NDArray[Any]:
        """Up to `count_max` rows with this due time, from a position on, by position. Raises TimerDamagedError, OSError."""
        parts: list[NDArray[Any]] = []
        found = 0
        with self._lock, self._noting_damage():
            self._require_all()
            self._take_notes()
            cursors = []
            if Key(due_ms, LAST_KEY.position) > self._horizon:
                start = Key(due_ms, max(from_position - 1, 0))  # no record stands at position 0
                cursors = [
                    Cursor(cursor.run, max(cursor.index, cursor.run.count_through(start)))
                    for cursor in self._cursors
                ]
            others = [
                part[(part["due_ms"] == np.uint64(due_ms)) & (part["position"] >= np.uint64(from_position))]
                for part in (*self._fresh, _rows_at(self._near[self._near_start :], due_ms), *self._aside, *self._far)
            ]
            for rows in merged(cursors, merge_rows(others, keep_removals=True), keep_removals=False):
                part = rows[: int(np.searchsorted(rows["due_ms"], np.uint64(due_ms), "right"))]
                parts.append(part[part["kind"] != REMOVED])
                found += len(parts[-1])
                if found >= count_max or len(part) < len(rows):
                    break
        return np.concatenate(parts)[:count_max] if parts else NO_ROWS

    def set_aside(self, rows: NDArray[Any]) -> None:
        """Rows that `due` gave, in its order, and cannot be read now: `due` gives them no more, until `take_back` or the next start."""
        with self._lock:
            near = self._near[self._near_start :]
            near = near[: count_through(near, key_at(rows, -1))]
            chosen = np.isin(near["position"], rows["position"]) & (near["kind"] == MESSAGE)
            aside = near[chosen]
            near["kind"][chosen] = REMOVED  # here; so many may not be readable that they would fill it
            self._skip_removed()
            aside["kind"] = ASIDE
            while self._aside and len(self._aside[-1]) < 2 * len(aside):
                aside = merge_rows([self._aside.pop(), aside], keep_removals=False)
            if len(aside):
                self._aside.append(aside)

    def take_back(self, damaged: Sequence[tuple[int, int]]) -> int:
        """Rows that were set aside fall due again, but for those whose records reach into `damaged`: rising and disjoint [start, end).

        Returns how many.
        """
        starts = np.array([start for start, _ in damaged] + [LAST_KEY.position], np.uint64)
        ends = np.array([end for _, end in damaged], np.uint64)
        with self._lock:
            self._take_notes()
            left: list[NDArray[Any]] = []
            back: list[NDArray[Any]] = []
            for rows in self._aside:
                positions = rows["position"]
                is_damaged = starts[np.searchsorted(ends, positions, "right")] < positions + rows["size"]
                left.append(rows[is_damaged])
                if not is_damaged.all():
                    back.append(_taken_back(rows[~is_damaged]))
            if back:
                remaining = merge_rows(left, keep_removals=False)
                self._aside = [remaining] if len(remaining) else []
                self._take(back, [])
        return sum(map(len, back))

    def below(self, position: int) -> Iterator[NDArray[Any]]:
        """The rows of records before `position`, a few at a time, as of now. Raises TimerDamagedError, OSError."""
        with self._lock:
            self._require_all()
            self._take_notes()
            self._settle()
            cursors = [Cursor(cursor.run, cursor.index) for cursor in self._cursors]
            others = merge_rows([*self._aside, self._near_rows(), *self._far], keep_removals=True)
        with self._noting_damage():
            for rows in merged(cursors, others, keep_removals=False):
                found = rows[rows["position"] < np.uint64(position)]
                if len(found):
                    yield found

    # Housekeeping.

    def flush(self) -> None:
        """Takes in what was noted; merges files of which there are many. Raises TimerDamagedError, OSError."""
        with self._lock:
            self._take_notes()
            self._relieve()
        with self._noting_damage():
            while self._merge_runs():
                pass

    def restore(
        self, due_times_ms: NDArray[Any], positions: NDArray[Any], sizes: NDArray[Any]
    ) -> None:
        """While `is_rebuilding`: records with due times that the log has from before. All of them come before `restore_removed`."""
        rows = make_rows(due_times_ms, positions, sizes, MESSAGE)
        with self._note_lock:
            self._noted.append(rows)
            self._found_count += len(rows)
            self._found_bytes += int(rows["size"].sum())

    def restore_removed(self, due_times_ms: NDArray[Any], positions: NDArray[Any], sizes: NDArray[Any]) -> None:
        """While `is_rebuilding`: those of which the log says that they are pending no more."""
        is_here = positions >= np.uint64(self.rows_from)
        removals = make_rows(due_times_ms[is_here], positions[is_here], sizes[is_here], REMOVED)
        if len(removals):
            with self._note_lock:
                self._noted_removals.append(removals)
                self._found_count -= len(removals)
                self._found_bytes -= int(removals["size"].sum())

    def end_rebuild(self) -> None:
        """Everything is here again, and what has ended meanwhile goes: at a follower, its leader goes on."""
        with self._note_lock:
            self._noted_removals += self._held_removals
            self._held_removals = []
            self._count += self._found_count
            self._size_bytes += self._found_bytes
            self.is_rebuilding = False

    def freeze(self) -> int:
        """The next `checkpoint` reports this moment; up to where the log was taken in by then."""
        with self._lock:
            with self._note_lock:  # the two positions and what was noted belong together
                entries_up_to, removals_up_to = self.entries_from, self.removals_from
                count, size_bytes, noted = self._count, self._size_bytes, self._swap_notes()
                self.recalled.freeze()
            self._take(*noted)
            self._relieve()
            self._frozen = PendingState(
                entries_up_to,
                removals_up_to,
                self.rows_from,
                max(count + self._missed_count, 0),
                max(size_bytes + self._missed_bytes, 0),
                self.log_time_ms,
                self._horizon,
                self._next_number,
                [(cursor.run.number, cursor.index) for cursor in self._cursors],
                [*map(_taken_back, self._aside), self._near_rows(), *self._fresh, *self._far],
            )
            return max(entries_up_to, removals_up_to)

    def checkpoint(self, position: int) -> None:
        """Makes durable what was there at `freeze`, which all that the log has below `position` is in.

        Nothing if a rebuild has begun since: what is here now is not all. Without the file, the next start reads the log.
        """
        frozen, self._frozen = self._frozen, None
        if frozen is None:
            return
        with self._files_lock:
            self._sync_runs()
            self.recalled.save()  # before the state, behind which no start reads the log again
            write_state(
                self._disk,
                self._folder,
                frozen._replace(
                    entries_up_to=max(frozen.entries_up_to, position),
                    removals_up_to=max(frozen.removals_up_to, position),
                    next_number=self._next_number,
                ),
            )
            with self._lock:
                live = {cursor.run.path for cursor in self._cursors}
                kept = {self._path(number) for number, _ in frozen.runs} | live
                gone = [path for path in self._retired if path not in kept]
                self._retired = [path for path in self._retired if path in kept]
            for path in gone:
                remove_file(self._disk, path)

    def close(self) -> None:
        """Nothing to do: files close with their last user."""

    # Recovery: one thread, nobody else.

    def load(self) -> None:
        """Takes over what the files hold; nothing if one of them does not hold."""
        self._clear()
        self._lost = []
        self.recalled.clear()
        self._disk.make_folder(self._folder)
        self.damage = self._load_files()
        if self.damage:
            damage = self.damage
            self.start_rebuild()
            self.damage = damage
            return
        if self.removals_from:
            self.recalled.load()
        known = {STATE_FILE_NAME, RECALLED_FILE_NAME, *(f"run.{cursor.run.number}" for cursor in self._cursors)}
        for name in self._disk.list(self._folder):
            if name not in known:
                self._disk.unlink(f"{self._folder}/{name}")

    def start_rebuild(self) -> None:
        """Forgets everything; the records of the log bring it back."""
        self._clear()
        self._lost = []
        self.recalled.clear()
        remove_file(self._disk, self._state_path)
        empty_folder(self._disk, self._folder)

    # Parts. All of them with the lock held, but for the last ones.

    @contextmanager
    def _noting_damage(self) -> Iterator[None]:
        try:
            yield
        except TimerDamagedError as error:
            self.met_damage = str(error)
            raise

    def _require_all(self) -> None:
        if self.is_rebuilding:
            raise TimerDamagedError("the timer's files are being rebuilt from the log")

    def _swap_notes(self) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        noted, self._noted = self._noted, []
        removals, self._noted_removals = self._noted_removals, []
        return noted, removals

    def _take_notes(self) -> None:
        with self._note_lock:
            noted, removals = self._swap_notes()
        self._take(noted, removals)

    def _take(self, noted: list[NDArray[Any]], removals: list[NDArray[Any]]) -> None:
        for rows in noted:
            self._fresh.append(rows)
            self._fresh_count += len(rows)
            self._fresh_due_ms = min(self._fresh_due_ms, int(rows["due_ms"].min()))
        for rows in removals:
            self._remove(rows)
        if self._fresh_count > self._limits.fresh:
            self._settle()

    def _remove(self, removals: NDArray[Any]) -> None:
        first_ms, last_ms = removals["due_ms"].min(), removals["due_ms"].max()
        for number, part in enumerate(self._aside):
            start, end = np.searchsorted(part["due_ms"], first_ms, "left"), np.searchsorted(part["due_ms"], last_ms, "right")
            if start == end:
                continue  # There may be millions of them: only those of these due times are compared.
            positions = part["position"][start:end]
            left = part[start:end][np.isin(positions, removals["position"], invert=True)]
            if len(left) < len(positions):
                removals = removals[np.isin(removals["position"], positions, invert=True)]
                self._aside[number] = np.concatenate((part[:start], left, part[end:]))
        front = self._near[self._near_start : self._near_start + len(removals)]
        if len(front) == len(removals) and np.array_equal(front["position"], removals["position"]):
            front["kind"] = REMOVED  # what was due went, in its order
        else:
            self._settle()
            within = through(removals, self._horizon)
            self._note_missed(mark_removed(self._near[self._near_start :], sort_rows(removals[within])))
            self._add_far(removals[~within])
        self._skip_removed()

    def _note_missed(self, removals: NDArray[Any]) -> None:
        """These have met no row."""
        self._missed_count += len(removals)
        self._missed_bytes += int(removals["size"].sum())

    def _skip_removed(self) -> None:
        """`near` begins with a row that is pending."""
        is_live = self._near["kind"][self._near_start :] != REMOVED
        self._near_start += int(np.argmax(is_live)) if is_live.any() else len(is_live)

    def _settle(self) -> None:
        """Fresh rows go where they belong."""
        if not self._fresh_count:
            return
        rows = np.concatenate(self._fresh)
        self._fresh, self._fresh_count, self._fresh_due_ms = [], 0, LAST_KEY.due_ms
        within = through(rows, self._horizon)
        if within.any():
            self._set_near(merge_rows([self._near_rows(), rows[within]], keep_removals=False))
        self._add_far(rows[~within])

    def _relieve(self) -> None:
        """Where memory has too many rows, they go into files. Raises OSError: then they stay."""
        if len(self._near) - self._near_start > self._limits.near:
            self._unload()
        if self._far_count > self._limits.far:
            self._write_run(merge_rows(self._far, keep_removals=True))
            self._far, self._far_count = [], 0

    def _near_rows(self) -> NDArray[Any]:
        """Those of `near` that are pending."""
        rows = self._near[self._near_start :]
        return rows[rows["kind"] != REMOVED]

    def _set_near(self, rows: NDArray[Any]) -> None:
        self._near, self._near_start = rows, 0

    def _unload(self) -> None:
        """The later part of `near` goes into a file, and the horizon comes nearer."""
        rows = self._near_rows()
        kept = min(self._limits.near // 2, len(rows) - 1)
        if kept <= 0:
            return
        self._write_run(rows[kept:])
        self._horizon = key_at(rows, kept - 1)
        self._set_near(rows[:kept].copy())

    def _add_far(self, rows: NDArray[Any]) -> None:
        if len(rows):
            self._far.append(rows)
            self._far_count += len(rows)

    def _load(self) -> int:
        """Brings the next rows behind the horizon into memory; how many rows before `near` were given up for that."""
        far = merge_rows(self._far, keep_removals=True)
        rows, far, self._horizon = take_through(self._cursors, far, keep_removals=True)
        is_removal = rows["kind"] == REMOVED
        self._note_missed(rows[is_removal])
        rows = rows[~is_removal]
        self._loaded = max(self._loaded, self._horizon)
        self._far, self._far_count = ([far] if len(far) else []), len(far)
        rows["kind"][rows["kind"] == ASIDE] = MESSAGE  # Earlier versions wrote some of them into files.
        given_up = self._near_start
        self._set_near(np.concatenate((self._near[given_up:], rows)))
        for cursor in [cursor for cursor in self._cursors if cursor.index >= cursor.run.count]:
            self._retire(cursor)
        return given_up

    def _write_run(self, rows: NDArray[Any]) -> None:
        if not len(rows):
            return
        writer = self._new_writer()
        writer.add(rows)
        run = writer.finish()
        assert run is not None
        self._add_run(run)

    def _new_writer(self) -> RunWriter:
        number = self._next_number
        self._next_number += 1
        return RunWriter(self._disk, self._path(number), number)

    def _add_run(self, run: Run, index: int = 0) -> None:
        self._cursors.append(Cursor(run, index))
        self._unsynced.append(run.path)

    def _retire(self, cursor: Cursor) -> None:
        self._cursors.remove(cursor)
        self._retired.append(cursor.run.path)

    # Files.

    @property
    def _state_path(self) -> str:
        return f"{self._folder}/{STATE_FILE_NAME}"

    def _path(self, number: int) -> str:
        return f"{self._folder}/run.{number}"

    def _merge_runs(self) -> bool:
        """Makes one run of `runs_per_level` runs of about one size; returns whether there were that many.

        What is taken of them meanwhile is taken of the new one too: it is taken of all runs up to one key.
        """
        with self._files_lock:
            with self._lock:
                chosen = _of_one_level(self._cursors, self._limits.runs_per_level)
                if not chosen:
                    return False
                self._loaded = Key(0, 0)
                copies = [Cursor(cursor.run, cursor.index) for cursor in chosen]
                writer = self._new_writer()
            for rows in merged(copies, NO_ROWS, keep_removals=True):
                writer.add(rows)
            run = writer.finish()
            with self._lock:
                taken = run.count_through(self._loaded) if run is not None else 0
                for cursor in chosen:
                    if cursor in self._cursors:
                        self._retire(cursor)
                if run is not None:
                    self._add_run(run, taken)
                    if taken == run.count:
                        self._retire(self._cursors[-1])
        return True

    def _sync_runs(self) -> None:
        """Those that are new. One whose sync fails stays on the list."""
        with self._lock:
            unsynced = list(self._unsynced)
        for path in unsynced:
            if self._disk.exists(path):
                fd = self._disk.open(path)
                try:
                    self._disk.fdatasync(fd)
                finally:
                    self._disk.close(fd)
        if unsynced:
            self._disk.fsync_dir(self._folder)
        with self._lock:
            del self._unsynced[: len(unsynced)]

    def _load_files(self) -> str:
        """What is wrong; "" if nothing is."""
        state = read_state(self._disk, self._folder)
        if state is None:
            return why_no_state(self._disk, self._folder)
        try:
            for number, index in state.runs:
                self._cursors.append(Cursor(Run(self._disk, self._path(number), number), index))
        except (FileNotFoundError, TimerDamagedError) as error:
            return str(error)
        self._horizon = state.horizon
        self._next_number = state.next_number
        self._count, self._size_bytes = state.pending_count, state.pending_bytes
        self.log_time_ms = state.log_time_ms
        self.entries_from, self.removals_from = state.entries_up_to, state.removals_up_to
        self.rows_from = state.rows_from
        (rows,) = state.rows
        within = through(rows, self._horizon)
        self._set_near(merge_rows([rows[within]], keep_removals=False))
        if len(rows) > int(within.sum()):
            self._far, self._far_count = [rows[~within]], int((~within).sum())
        return ""


def _of_one_level(cursors: Sequence[Cursor], runs_per_level: int) -> list[Cursor]:
    """Runs that are merged next: `runs_per_level` of about one size; none if there are fewer."""
    levels: dict[int, list[Cursor]] = {}
    for cursor in cursors:
        left = cursor.run.count - cursor.index
        levels.setdefault(left.bit_length() // 3, []).append(cursor)
    for level in sorted(levels):
        if len(levels[level]) >= runs_per_level:
            return levels[level]
    return []


def _rows_at(rows: NDArray[Any], due_ms: int) -> NDArray[Any]:
    """Those of the sorted rows that have this due time and are pending."""
    start, end = (
        int(np.searchsorted(rows["due_ms"], np.uint64(due_ms), side)) for side in ("left", "right")
    )
    found = rows[start:end]
    return found[found["kind"] != REMOVED]


def _taken_back(rows: NDArray[Any]) -> NDArray[Any]:
    """A copy in which nothing is set aside."""
    rows = rows.copy()
    rows["kind"][rows["kind"] == ASIDE] = MESSAGE
    return rows
