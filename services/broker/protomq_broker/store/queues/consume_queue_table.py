"""All consume queues of a store: made from the log, flushed behind it, and trusted only as far as a checkpoint says.

    consumequeue/table.bin                          the table: `queue_rows.py`
    consumequeue/<topic>/<queue>/<byte offset>      entries: `consume_queue.py`

Rules:
- The table names every queue and its end as of a position of the log up to which everything is durable. At the start a queue is
  what the table says, not what its files say. What lies behind is cut and comes again from the log; a file that is too short
  lowers `replay_from`. Without a table all is rebuilt.
- The table says where the last record of each queue stands. So an older file, of a deleted topic of that name, is noticed. All its entries
  may lead to what has gone with the log's front.
- Where a topic was deleted, the table says so before its files go, until a checkpoint covers the deletion. A power cut, or a truncation,
  may take the deletion alone. Then the messages come again from the log.
- Where offsets were given twice, the table says so before the entries of the earlier messages go. It does until the later message is
  durable: a power cut may take that one alone. Then the earlier ones come again from the log.
- `apply` runs on the writer thread, `flush`, `checkpoint` and `delete_below` on the flusher thread. The lock keeps the two apart
  while a group of requests is added; nobody holds it during input or output. Another lock lets one thread at a time change files.
  Readers take no lock.
- Ten thousand topics are normal. A queue that rests holds no buffer, a bounded number of files is open, and the start reads no folder
  but the topics'.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq_broker.store.files.disk import DISK_FULL_ERRNOS, Disk, if_there_is_room, remove_file
from protomq_broker.store.files.side_files import (
    OpenFile,
    OpenFiles,
    empty_folder,
    open_files_max,
    read_cached_state,
    why_not,
    write_state_file,
)
from protomq_broker.store.log.append import AppendRequest, ScannedRecords
from protomq_broker.store.log.kinds import is_queued
from protomq_broker.store.log.recovery import DamagedRange

from .consume_queue import (
    ENTRIES_PER_FILE,
    NEW_FOLDER,
    NO_FOLDER,
    ConsumeQueue,
    ConsumeQueueDamagedError,
    DamagedFile,
    QueueFiles,
)
from .found_files import FoundFiles
from .lost_offsets import fill_beginnings, fill_ends
from .queue_ends import QueueEnd, ends_below, ends_lost_in
from .queue_flush import flush_together
from .queue_replay import fill_lost, fill_up, note_given_twice, replay_queue, restart, sound_end
from .queue_rows import QueueRow, QueueRows, decode_rows

log = logging.getLogger(__name__)

TABLE_FILE_NAME: Final = "table.bin"
"""No topic can have this name: a dot is not allowed in one."""

SYNC_ALL_COUNT_MIN: Final = 64
"""From this number of queues on, one sync of the file system syncs them: 20 ms here, as long as a dozen files take."""

_MAGIC: Final = b"PMQCQT02"
"""Its number is that of the entries too: 01 had no check bits."""
_QUEUE_BITS: Final = 32
_REPLAYED_ENTRIES_MAX: Final = 1 << 20
"""Maximum number of entries that a replay keeps in memory: 20 MB."""
_NEVER: Final = 1 << 63
"""Behind each position of a log."""


class _Gone(NamedTuple):
    """A topic that was deleted, whose files are removed, or about to be.

    Attributes:
        rows: of its queues, by their ids.
        deleted_at: the deletion stands before this position; _NEVER: no record of it was found.
        young: queues whose messages all stand behind the table's position, so that they have no rows yet.
    """

    topic: str
    rows: dict[int, int]
    deleted_at: int
    young: tuple[int, ...] = ()


class ConsumeQueueTable:
    """The consume queues of a store.

    Attributes:
        replay_from: after `load`: what the log has below this position is in the queues already.
        needs_rebuild: files turned out not to hold after all; call `start_rebuild`, then replay from the log's start.
        log_start: first position that the log still has.
        damage: after `load`: why its files were not taken over; "" if they were.
        known_ends: after `load`: how far queues went where that is more than they have now.
        keep_known_ends: called before files that report `known_ends` are cut or removed: a start may be killed at any time. Not with ends
            of which the log has lost nothing: then it tells the same, and a full disk takes no note.
    """

    outlives_topics = False
    takes_plain = True

    def __init__(self, disk: Disk, folder: str, *, files_max: int | None = None) -> None:
        self.replay_from = 0
        self.needs_rebuild = False
        self.log_start = 0
        self.damage = ""
        self.known_ends: list[QueueEnd] = []
        self.keep_known_ends: Callable[[list[QueueEnd]], None] = _ignore
        self._disk = disk
        self._folder = folder
        self._files = OpenFiles(disk, open_files_max() if files_max is None else files_max)
        self._home = QueueFiles(folder, self._files)
        self._folder_file: OpenFile | None = (
            None  # open from the first write on: see `Disk.sync_file_system`
        )
        self._lock = threading.Lock()
        self._files_lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self._queues: dict[str, dict[int, ConsumeQueue]] = {}
        self._rows = QueueRows()
        self._carried: dict[tuple[str, int], tuple[int, int, int]] = {}  # first and end offset, and where the log tells it
        self._cut: set[ConsumeQueue] = set()  # whose files had less than the table says: what it covers counts for them as well
        self._replayed_count = 0
        self._covered_position = 0  # no entry's record ends behind it
        self._checkpoint_position = 0
        self._whole_from = _NEVER  # the replay has skipped nothing from here on
        self._cuts: list[Callable[[], None]] = []  # of what files have behind the table: made before anything is written to them
        self._gone_back: dict[ConsumeQueue, int] = {}  # position of the later message that has an offset which was given twice
        self._dirty: set[ConsumeQueue] = set()  # appended to since the last flush
        self._cooling: set[ConsumeQueue] = set()  # written by the last flush
        self._touched: set[ConsumeQueue] = set()  # rows that the next checkpoint must renew
        self._unsynced: set[ConsumeQueue] = set()  # written since the last checkpoint
        self._unsynced_folders: set[str] = set()  # with new names in them
        self._removed: list[tuple[str, list[ConsumeQueue], int]] = []  # with a position behind the deletion
        self._gone: list[_Gone] = []  # which the next checkpoint behind the deletion takes out of the table
        self._home.lost_syncs.clear()
        self._home.met.clear()

    # Look-up, any thread.

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """The queue, None if nothing was ever stored in it."""
        queues = self._queues.get(topic)
        return queues.get(queue_id) if queues is not None else None

    def end_offset(self, topic: str, queue_id: int) -> int:
        """Queue offset of the next message: behind the last one, readable or not. 0 for an unknown queue."""
        queue = self.find(topic, queue_id)
        return queue.end_offset if queue is not None else 0

    def queues_of(self, topic: str) -> dict[int, ConsumeQueue]:
        """The queues of a topic by their id."""
        return dict(self._queues.get(topic, ()))

    def topics(self) -> list[str]:
        """All topics that have a queue."""
        return list(self._queues)

    def all(self) -> Iterator[ConsumeQueue]:
        """All queues."""
        for queues in list(self._queues.values()):
            yield from list(queues.values())

    def queue_count(self) -> int:
        """Number of queues."""
        return len(self._rows) - sum(len(gone.rows) for gone in self._gone)

    def damaged_files(self) -> list[DamagedFile]:
        """Files in which damage was met, and which are not healed."""
        return [met for met in list(self._home.met.values()) if self.has(met.queue)]

    def has(self, queue: ConsumeQueue) -> bool:
        """Whether the queue is still one of these: its topic was not deleted."""
        return self.find(queue.topic, queue.queue_id) is queue

    def watch_damage(self, on_met: Callable[[], None]) -> None:
        """From now on damage is healed: `on_met` is called with each file in which some is met, on any thread."""
        self._home.on_met = on_met

    # Writer thread.

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue; made if there is none."""
        queues = self._queues.get(topic)
        if queues is not None:
            queue = queues.get(queue_id)
            if queue is not None:
                return queue
        with self._lock:
            return self._add(topic, queue_id)

    def apply(self, requests: Sequence[AppendRequest]) -> None:
        """Adds the entries of what was just appended to the log."""
        with self._lock:
            dirty = self._dirty
            for request in requests:
                region = request.region
                if region.flags and not is_queued(region.flags):
                    continue
                queues = self._queues.get(region.topic)
                queue = queues.get(request.queue_id) if queues is not None else None
                if queue is None:
                    queue = self._add(region.topic, request.queue_id)
                assert request.queue_offset == queue.end_offset, (
                    "a queue offset was left out or given twice"
                )
                position = request.physical_offset
                if region.starts is None:
                    queue.append(position, len(region.data), region.tag_codes)  # type: ignore[arg-type]
                else:
                    queue.append_many(region.starts + position, region.sizes, region.tag_codes)  # type: ignore[arg-type]
                dirty.add(queue)
            if requests:
                last = requests[-1]
                self._covered_position = last.physical_offset + len(last.region.data)

    def skip_to(self, topic: str, queue_id: int, queue_offset: int) -> None:
        """The next record of the queue in another leader's log has this offset: the log has lost those in between, or has begun behind."""
        with self._lock:
            queue = self._queues.get(topic, {}).get(queue_id) or self._add(topic, queue_id)
            if queue.end_offset < queue_offset:
                fill_up(queue, queue_offset)
                self._dirty.add(queue)

    def go_back_to(self, topic: str, queue_id: int, queue_offset: int, position: int) -> None:
        """The next record of the queue in another leader's log, at `position`, has an offset that was given before. See `queue_replay`."""
        with self._files_lock:
            queue = self.queue(topic, queue_id)
            self._go_back(queue, queue_offset, position, least=0)  # a deletion of the topic would have been applied

    def fill_lost(
        self, ends: Iterable[QueueEnd], damaged: Sequence[DamagedRange], deleted: Mapping[str, int]
    ) -> None:
        """Gives queues entries of lost records up to the ends that they had in damaged ranges of another leader's log."""

        def make(topic: str, queue_id: int) -> ConsumeQueue:
            return self._queues.get(topic, {}).get(queue_id) or self._add(topic, queue_id)

        with self._lock:
            self._dirty |= fill_ends(ends, damaged, deleted, self.find, make)

    def begin_carried(self) -> None:
        """Queues of which the log has told, and has no message behind that: they continue at the offset that it told."""
        with self._lock:
            for (topic, queue_id), (_, end_offset, told_at) in self._carried.items():
                queue = self._queues.get(topic, {}).get(queue_id) or self._add(topic, queue_id)
                if queue.end_offset >= end_offset or _has_behind(queue, told_at):
                    continue
                if _has_any_from(queue, self.log_start):
                    fill_lost(queue, end_offset, told_at)
                else:
                    # What the files of a queue lacked, or an older table, and the log does not have, went with the log's front.
                    queue.reset(end_offset, end_offset)
                self._dirty.add(queue)
            self._carried = {}
            self._cut = set()

    # Flusher thread.

    def flush(self) -> None:
        """Writes the new entries to the files, without a sync. An OSError loses nothing: the next call goes on."""
        with self._files_lock:
            if self._cuts:
                self._make_cuts()
            dirty = self._take_dirty()
            self._touched |= dirty
            self._cooling = dirty
            queues = _in_order(dirty)
            written: set[ConsumeQueue] = set()
            try:
                for queue in queues:
                    if queue.synced_offset == NO_FOLDER:
                        self._make_folder(queue)
                flush_together(queues, written.add)
            except OSError:
                with self._lock:
                    self._dirty.update(filter(self.has, dirty - written))
                raise
            finally:
                self._unsynced |= written

    def checkpoint(self, position: int) -> None:
        """Makes durable that everything that the log holds below `position` is in the queues.

        The log is durable up to there, and all of it was applied.
        """
        with self._files_lock:
            self.flush()
            touched, self._touched = self._touched, set()
            try:
                self._touched |= self._renew_rows(_in_order(touched), position)
                self._sync()
                self._write_table(position)
            except BaseException:
                self._touched |= touched
                raise
            self._gone_back = {queue: at for queue, at in self._gone_back.items() if at >= position}

    def delete_below(self, log_start: int) -> None:
        """The log begins at `log_start` now: removes files that hold only older entries."""
        with self._files_lock:
            self.log_start = log_start
            old: dict[ConsumeQueue, int] = {}
            for queues in list(self._queues.values()):
                for queue in list(queues.values()):
                    # Else there is one file: it stays, the queue goes on in it.
                    if queue.flushed_offset >= ENTRIES_PER_FILE:
                        old[queue] = self._raise_min_offset(queue, queue.min_offset(log_start))
            if not old:
                return
            # First, so that no start looks for files that are gone.
            self._write_table(self._checkpoint_position)
            for queue, min_offset in old.items():
                self._delete_files_below(queue, min_offset)

    def heal(self, met: DamagedFile, queue_offset: int, entries: NDArray[Any]) -> None:
        """Rewrites entries of a damaged file; the next checkpoint makes them durable."""
        with self._files_lock:
            queue = met.queue
            if self.has(queue):
                self._disk.make_folder(queue.folder)
                queue.heal(queue_offset, entries)
                self._unsynced.add(queue)
                self._touched.add(queue)
            self.forget_met(met)

    def forget_met(self, met: DamagedFile) -> None:
        """The file holds."""
        self._home.met.pop((met.queue, met.start_offset), None)

    def remove_topic(self, topic: str) -> None:
        """Forgets a topic's queues, any thread; the files go with the next flush. A topic of that name begins again, from offset 0."""
        self._remove_topic(topic, self._covered_position)

    def close(self) -> None:
        """Closes the files. Call `checkpoint` before."""
        self._files.forget_below("")
        self._folder_file = None

    # Recovery: one thread, nobody else.

    def load(self, log_start: int = 0) -> None:
        """Takes over what the table and the files agree on."""
        self.log_start = log_start
        self._clear()
        self._disk.make_folder(self._folder)
        self._folder_file = OpenFile(self._disk, self._disk.open_folder(self._folder))
        payload = read_cached_state(self._disk, self._table_path, _MAGIC)
        if payload is None:
            self.damage = why_not(self._disk, self._table_path, _MAGIC)
            self.known_ends += ends_below(self._disk, self._folder, self._folder)
            self.start_rebuild()
            return
        position, rows = decode_rows(payload)
        self._covered_position = self._checkpoint_position = self.replay_from = position
        found = FoundFiles(self._folder, self._files, self.known_ends)
        for row in rows:
            if row.is_gone:
                self._gone.append(self._mark_gone(row.topic, [row.queue_id], _NEVER))
                continue
            queue = self._add(row.topic, row.queue_id)
            self._rows.set(queue.row, row.min_offset, row.end_offset, row.damaged, row.last_position)
            # While the log goes from its beginning, it has each deletion of a topic.
            last_position = row.last_position if 0 < log_start <= row.last_position else 0
            good_end = found.end_of_entries(queue, row.min_offset, row.end_offset, last_position)
            self._load_queue(queue, row, good_end)
        found.note_strays(self._queues, TABLE_FILE_NAME)
        self._cuts = found.cuts
        self._whole_from = self.replay_from
        if self._touched:  # what is made good now is not durable before the next checkpoint
            self._make_cuts()
            self._write_table(position)

    def start_rebuild(self) -> None:
        """Forgets everything, and lets the files go before others are written; a replay from the log's start rebuilds it."""
        self.known_ends += [
            QueueEnd(queue.topic, queue.queue_id, queue.known_min_offset, queue.end_offset)
            for queues in self._queues.values()
            for queue in queues.values()
        ]
        self._files.forget_below("")
        self._clear()
        self._cuts = [partial(remove_file, self._disk, self._table_path), partial(empty_folder, self._disk, self._folder)]
        self.replay_from = self._whole_from = 0
        self.needs_rebuild = False

    def replay(self, records: ScannedRecords) -> None:
        """Adds the entries of records read back from the log, in its order; those that are there already are skipped."""
        if not records.count or self.needs_rebuild:
            return
        self._covered_position = max(
            self._covered_position, int(records.positions[-1] + records.sizes[-1])
        )
        records = records.select(is_queued(records.flags))
        if not records.count:
            return
        keys = records.topic_indexes.astype(np.int64) << _QUEUE_BITS | records.queue_ids
        order = np.argsort(keys, kind="stable")
        bounds = [0, *(np.flatnonzero(np.diff(keys[order])) + 1).tolist(), records.count]
        for start, end in pairwise(bounds):
            rows = order[start:end]
            first = int(rows[0])
            key = records.topics[int(records.topic_indexes[first])], int(records.queue_ids[first])
            if records.positions[first] < self._checkpoint_position and self.find(*key) not in self._cut:
                # The table has these, or they are of a topic that it knows to be deleted, though nobody else may yet.
                rows = rows[records.positions[rows] >= self._checkpoint_position]
                if not len(rows):
                    continue
            queue = self.queue(*key)
            try:
                replay_queue(queue, records, rows, self._knows_removals, self._go_back)
            except ConsumeQueueDamagedError:
                self.needs_rebuild = True
                return
            self._dirty.add(queue)
        self._replayed_count += records.count
        if self._replayed_count >= _REPLAYED_ENTRIES_MAX:
            self._replayed_count = 0
            with if_there_is_room():  # else all stays in memory, as in the broker that the full disk has kept from writing it
                self.flush()

    def pass_over(self, start_position: int, end_position: int) -> None:
        """Offsets that are missing later on report the loss. Deletions of topics may be among it."""
        self._whole_from = max(self._whole_from, end_position)

    def note_carried(
        self, topic: str, queue_id: int, min_offset: int, end_offset: int, position: int
    ) -> None:
        """A replay has come to the record at `position` that tells where a queue begins and ends; `keep_ends` sees to it."""
        if position >= self._checkpoint_position or self.find(topic, queue_id) in self._cut:
            self._carried[topic, queue_id] = min_offset, end_offset, position

    def keep_ends(
        self, damaged: Sequence[DamagedRange], deleted: Mapping[str, int], end_position: int
    ) -> None:
        """Gives queues entries for messages that the log has lost and that only `known_ends` report: no offset is given twice, and
        readers are told. The log ends at `end_position`, and is synced.
        """
        self._make_cuts(ends_lost_in(self.known_ends, damaged))
        kept = fill_beginnings(self.all(), self._begins, damaged, deleted)
        self.known_ends += [
            QueueEnd(topic, queue_id, *told[:2]) for (topic, queue_id), told in self._carried.items()
        ]
        kept |= fill_ends(self.known_ends, damaged, deleted, self.find, self.queue)
        self._dirty |= kept
        self.known_ends = []
        self.begin_carried()
        # For good: the files that had them are cut.
        if kept:
            self.checkpoint(end_position)

    def _begins(self, queue: ConsumeQueue) -> int | None:
        """The offset at which a queue should begin: 0, or where `note_carried` says; None: nobody says."""
        if not self.log_start:
            return 0
        carried = self._carried.get((queue.topic, queue.queue_id))
        return carried[0] if carried is not None else None

    def forget_deleted(self, positions: Mapping[str, int]) -> None:
        """Topics that were deleted, and up to where: queues that have nothing behind that go. What the table knows is skipped."""
        for topic, position in positions.items():
            if position >= self._checkpoint_position:
                self._gone = [
                    gone._replace(deleted_at=min(gone.deleted_at, position + 1)) if gone.topic == topic else gone for gone in self._gone
                ]
            for key in [key for key, told in self._carried.items() if key[0] == topic and told[-1] < position]:
                del self._carried[key]
            is_known = position < self._checkpoint_position
            queues = list(self.queues_of(topic).values())
            if is_known:
                if any(_begins_before(queue, position) for queue in queues if queue not in self._cut):
                    log.error("%s/%s has files of an earlier topic of that name: they are older than the table", self._folder, topic)
                    self.needs_rebuild = True
                    continue
                # What the table knows does not count for a queue that is replayed from before.
                queues = [queue for queue in queues if queue in self._cut]
            try:
                old = [q for q in queues if q.first_at_or_beyond(position) == q.end_offset]
            except ConsumeQueueDamagedError:
                continue  # readers are told, and the next start sees to it
            if len(old) == len(queues) and not is_known:
                self._remove_topic(topic, position + 1)  # the replay has not come to the deletion yet
                continue
            for queue in old:  # others of a topic that was created again are in use
                restart(queue)
                self._touched.add(queue)

    def truncate(self, end_position: int) -> None:
        """Removes the entries of all records at or beyond `end_position`: the log ends there. Nobody appends meanwhile."""
        back = sorted({gone.topic for gone in self._gone if gone.deleted_at > end_position})
        if back and not self.needs_rebuild:
            log.warning("%s: the log has no deletion of the topics %s, whose files are removed", self._folder, ", ".join(back))
            self.needs_rebuild = True
        if end_position >= self._covered_position or self.needs_rebuild:
            return
        with self._files_lock:
            self._truncate(end_position)

    # Parts.

    def _remove_topic(self, topic: str, deleted_at: int) -> None:
        with self._lock:
            queues = self._queues.pop(topic, None)
            if queues is not None:
                self._dirty.difference_update(queues.values())
                self._removed.append((topic, list(queues.values()), deleted_at))

    def _knows_removals(self, queue: ConsumeQueue, last_position: int) -> bool:
        is_from_table = queue.end_offset == queue.loaded_offset
        return max(last_position, self._checkpoint_position if is_from_table else 0) >= self._whole_from

    def _go_back(self, queue: ConsumeQueue, offset: int, position: int, *, least: int = 1) -> bool:
        """The offsets from `offset` on were given twice, the second time to the record at `position` and those behind it. The entries
        that had them first go. False: it may be a new topic of that name.

        `least`: a new topic begins below this offset. The caller holds the lock of the files, or is alone.
        """
        if not max(queue.known_min_offset, least) <= offset:
            return False
        self._make_cuts()
        note_given_twice(queue, offset)
        self._gone_back[queue] = position
        min_offset, end_offset = self._rows.bounds(queue.row)
        if end_offset > offset:  # else other records, at the same queue offsets, would pass for those that the table knows
            with self._lock:
                self._rows.set(queue.row, min(min_offset, offset), offset, damaged=True)
            self._touched.add(queue)
            self._write_table(self._checkpoint_position)
        with self._lock:
            queue.cut(offset)
            self._dirty.add(queue)
        return True

    def _truncate(self, end_position: int) -> None:
        self._make_cuts()
        behind_table = end_position < self._checkpoint_position
        for queues in self._queues.values():
            for queue in queues.values():
                try:
                    end_offset = queue.first_at_or_beyond(end_position)
                except ConsumeQueueDamagedError:
                    self.needs_rebuild = True
                    return
                if end_offset < queue.end_offset:
                    queue.cut(end_offset)
                    self._dirty.add(queue)
        self._covered_position = end_position
        if behind_table:  # else other records, at the same queue offsets, would pass for those that the table knows
            self.checkpoint(end_position)

    def _make_cuts(self, ends: list[QueueEnd] | None = None) -> None:
        """Removes what files have behind the table; first `ends` are kept, all that are known if None. The caller holds the lock of the
        files, or is alone.
        """
        kept = self.known_ends if ends is None else ends
        if kept:
            self.keep_known_ends(kept)
        for cut in self._cuts:
            cut()
        self._cuts = []

    @property
    def _table_path(self) -> str:
        return f"{self._folder}/{TABLE_FILE_NAME}"

    def _add(self, topic: str, queue_id: int) -> ConsumeQueue:
        queue = ConsumeQueue(topic, queue_id, self._rows.add(topic, queue_id), self._home)
        self._queues.setdefault(topic, {})[queue_id] = queue
        return queue

    def _make_folder(self, queue: ConsumeQueue) -> None:
        folder = queue.folder
        if self._disk.exists(folder):  # left over from a topic of that name
            self._files.remove_folder(folder)
        self._disk.make_folder(folder)
        queue.synced_offset = NEW_FOLDER

    def _sync(self) -> None:
        """Makes durable what was written since the last checkpoint: file by file, or all at once where the files are many."""
        if len(self._unsynced) >= SYNC_ALL_COUNT_MIN and self._disk.can_sync_file_system:
            self._sync_all()
            return
        for queue in _in_order(self._unsynced):
            if self.has(queue):
                self._unsynced_folders |= queue.sync()
            self._unsynced.discard(queue)
        for folder in sorted(self._unsynced_folders):
            if self._disk.exists(folder):
                self._disk.fsync_dir(folder)
            self._unsynced_folders.discard(folder)

    def _sync_all(self) -> None:
        queues = [queue for queue in self._unsynced if self.has(queue)]
        assert self._folder_file is not None
        try:
            self._disk.sync_file_system(self._folder_file.fd)
        except OSError:
            for queue in queues:
                queue.sync_failed()
            raise
        for queue in queues:
            queue.sync_done()
        self._unsynced.clear()
        self._unsynced_folders.clear()

    def _renew_rows(self, queues: Iterable[ConsumeQueue], position: int) -> set[ConsumeQueue]:
        """Writes the queues' rows as of `position`; those that have entries behind it, so that their rows must be renewed again."""
        rows = [(queue, self._row_as_of(queue, position)) for queue in queues if self.has(queue)]
        with self._lock:  # once: the writer waits for it
            rows = [(queue, values) for queue, values in rows if self.has(queue)]
            self._rows.set_all([(queue.row, *values) for queue, values in rows])
        return {queue for queue, (_, end_offset, *_) in rows if end_offset < queue.end_offset}

    def _row_as_of(self, queue: ConsumeQueue, position: int) -> tuple[int, int, bool, int]:
        """(first offset, end, whether what comes behind is damaged, where the last record stands) as of a position of the log."""
        damaged = self._home.damage_of(queue)
        try:
            end_offset = queue.first_at_or_beyond(position)
        except ConsumeQueueDamagedError as error:
            damaged = end_offset = error.queue_offset
        min_offset = queue.known_min_offset
        if damaged is not None:
            end_offset = max(min(damaged, end_offset), min_offset)
        last_position = queue.position_before(end_offset) if damaged is None and end_offset > min_offset else 0
        return min_offset, end_offset, damaged is not None or self._gone_back.get(queue, -1) >= position, last_position

    def _write_table(self, position: int) -> None:
        self._renew_rows(self._home.damaged_queues(), position)
        with self._lock:
            self._mark_removed()
            covered = [gone for gone in self._gone if gone.deleted_at <= position]
            self._gone = [gone for gone in self._gone if gone.deleted_at > position]
            for gone in covered:
                for row in gone.rows.values():
                    self._rows.remove(row)
            if position > self._checkpoint_position:
                self._gone = [self._with_rows(gone) for gone in self._gone]
            payload = self._rows.encode(position)
        try:
            write_state_file(self._disk, self._table_path, _MAGIC, payload)
        except BaseException:
            with self._lock:
                self._gone += [self._mark_gone(gone.topic, (*gone.rows, *gone.young), gone.deleted_at) for gone in covered]
            raise
        self._checkpoint_position = position

    def _mark_removed(self) -> None:
        """The rows of removed topics say from now on that these are gone. The caller holds the lock."""
        for topic, queues, deleted_at in self._removed:
            rows: dict[int, int] = {}
            young: list[int] = []
            for queue in queues:
                self._home.forget_damage(queue)
                if self._rows.is_blank(queue.row):
                    self._rows.remove(queue.row)
                    young.append(queue.queue_id)
                else:
                    self._rows.set_gone(queue.row)
                    rows[queue.queue_id] = queue.row
            if queues:
                self._gone.append(_Gone(topic, rows, deleted_at, tuple(young)))
        self._removed = [(topic, [], deleted_at) for topic, _, deleted_at in self._removed]

    def _with_rows(self, gone: _Gone) -> _Gone:
        """A checkpoint comes that may be of a moment between its messages and its deletion. The caller holds the lock."""
        young = self._mark_gone(gone.topic, gone.young, gone.deleted_at)
        return young._replace(rows={**gone.rows, **young.rows})

    def _mark_gone(self, topic: str, queue_ids: Iterable[int], deleted_at: int) -> _Gone:
        """Makes rows that say that these queues are gone. The caller holds the lock, or is alone."""
        rows = {queue_id: self._rows.add(topic, queue_id) for queue_id in queue_ids}
        for row in rows.values():
            self._rows.set_gone(row)
        return _Gone(topic, rows, deleted_at)

    def _take_dirty(self) -> set[ConsumeQueue]:
        """The queues that have new entries. Files of removed topics go before: a folder that is made now may have the name of one."""
        while True:
            if self._removed:
                self._remove_files()
            with self._lock:
                removed = {topic for topic, _, _ in self._removed}  # meanwhile
                if removed and any(queue.topic in removed for queue in self._dirty):
                    continue
                dirty, self._dirty = self._dirty, set()
                for queue in self._cooling:
                    if queue not in dirty:
                        queue.release_buffer()
                return dirty

    def _remove_files(self) -> None:
        """Removes topics for good: from the table first, so that no start looks for files that are gone."""
        with self._lock:
            self._mark_removed()
            removed, self._removed = self._removed, []
        try:
            self._write_table(self._checkpoint_position)
            for topic, _, _ in removed:
                self._files.remove_folder(f"{self._folder}/{topic}")
        except OSError as error:
            # A full disk: the next flush tries it again, before it makes any folder. No other queue waits for files that never go.
            if error.errno in DISK_FULL_ERRNOS:
                with self._lock:
                    self._removed = removed + self._removed
            raise

    def _raise_min_offset(self, queue: ConsumeQueue, min_offset: int) -> int:
        """Enters the queue's new first offset into its row, as far as the row reaches; the offset entered."""
        with self._lock:
            if not self.has(queue):
                return 0  # removed meanwhile
            return self._rows.raise_min_offset(queue.row, min_offset)

    def _delete_files_below(self, queue: ConsumeQueue, min_offset: int) -> None:
        keep = queue.path_of(min_offset)
        for path in [f"{queue.folder}/{name}" for name in self._disk.list(queue.folder)]:
            if path < keep:
                self._files.unlink(path)

    def _load_queue(self, queue: ConsumeQueue, row: QueueRow, good_end: int) -> None:
        """Takes over what a row says. `good_end`: up to where the files have entries."""
        min_offset, end_offset = row.min_offset, row.end_offset
        queue.reset(min_offset, good_end)
        queue.synced_offset = good_end if good_end > min_offset else NO_FOLDER
        if good_end == end_offset and not row.damaged:
            return
        self.known_ends.append(QueueEnd(queue.topic, queue.queue_id, min_offset, end_offset))
        self._touched.add(queue)
        self._cut.add(queue)
        good_end = sound_end(queue)
        log.warning(
            "%s: of entries %d to %d those from %d on do not hold: they are rebuilt from the log",
            queue.folder, min_offset, end_offset - 1, good_end,
        )  # fmt: skip
        self._rows.set(queue.row, min_offset, good_end, damaged=True)
        if good_end > min_offset:
            position, size, _ = queue.entry(good_end - 1)
            queue.reset(min_offset, good_end)
            queue.synced_offset = good_end
            self.replay_from = min(self.replay_from, position + size)
        else:
            restart(queue)
            self.replay_from = 0


def _begins_before(queue: ConsumeQueue, position: int) -> bool:
    """Whether the first message of a queue stands before `position` in the log."""
    if queue.known_min_offset == queue.end_offset:
        return False
    try:
        first, size, _ = queue.entry(queue.known_min_offset)
    except ConsumeQueueDamagedError:
        return False  # readers are told
    return bool(size) and first < position


def _has_behind(queue: ConsumeQueue, position: int) -> bool:
    """Whether the log has a message of the queue behind `position`: its offset counts, also if it was given twice."""
    if queue.known_min_offset == queue.end_offset:
        return False
    try:
        return queue.entry(queue.end_offset - 1)[0] > position
    except ConsumeQueueDamagedError:
        return False


def _has_any_from(queue: ConsumeQueue, log_start: int) -> bool:
    """Whether the log, which begins at `log_start`, may have messages of the queue."""
    try:
        return queue.first_at_or_beyond(log_start) < queue.end_offset
    except ConsumeQueueDamagedError:
        return True


def _ignore(_: object) -> None:
    pass


def _in_order(queues: Iterable[ConsumeQueue]) -> list[ConsumeQueue]:
    """Always the same order, so that a run of a test can be repeated."""
    return sorted(queues, key=attrgetter("row"))


def has_table(disk: Disk, folder: str) -> bool:
    """Whether a start would go by the files in `folder`: else it rebuilds them, and what they hold is nothing to anybody."""
    return read_cached_state(disk, f"{folder}/{TABLE_FILE_NAME}", _MAGIC) is not None


def end_position(disk: Disk, folder: str) -> int:
    """Up to where the files in `folder` reach; 0 if they do not say. What of them lies behind the end of the log is cut off at a start."""
    payload = read_cached_state(disk, f"{folder}/{TABLE_FILE_NAME}", _MAGIC)
    return int(decode_rows(payload)[0]) if payload is not None else 0
