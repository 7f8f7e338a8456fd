"""One consume queue: for each message of a queue of a topic, where its record stands in the log.

    consumequeue/<topic>/<queue>/<byte offset of the first entry, 20 digits>      300,000 entries each, grown as they fill

    entry   position u64 | size u32 | tag_code i64      little-endian, 20 bytes; entry n of the queue stands at byte n * 20

`position` and `size` are those of the whole record field, its tag and length included. Positions rise. An entry of size 0 and
tag code -1 fills the place of a record that the log has lost. So no queue offset is given twice. In files the top octets of
position and size hold check bits (`entry_check.py`): whatever is read from one is checked.

Rules:
- One thread appends (the writer), one writes files (the flusher), any thread reads.
- New entries stand in a buffer in memory. `end_offset` is set after the entry is written, so a reader that takes `end_offset`
  first and the buffer second never sees half an entry. A buffer is never resized: a larger one takes its place.
- The flusher writes entries to the file and then raises `flushed_offset`; what lies below may leave the memory. Nothing is
  synced here: the table does that for a checkpoint (`consume_queue_table.py`).
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq_broker.store.errors import StoreError
from protomq_broker.store.files.disk import UNREADABLE_ERRNOS, write_fully
from protomq_broker.store.files.side_files import OpenFiles, cut_file, read_entries

from .entry_check import opened, position_in, salt_of, sealed
from .selection import ENTRY, ENTRY_SIZE_BYTES

log = logging.getLogger(__name__)

ENTRIES_PER_FILE: Final = 300_000
"""RocketMQ's: a file is 6 MB."""
FILE_SIZE_BYTES: Final = ENTRIES_PER_FILE * ENTRY_SIZE_BYTES
LOST_TAG_CODE: Final = -1

_ENTRY_STRUCT: Final = struct.Struct("<QIq")
assert _ENTRY_STRUCT.size == ENTRY_SIZE_BYTES
NO_FOLDER: Final = -2
NEW_FOLDER: Final = -1
"""Values of `synced_offset` before the first sync."""
_CAPACITY_MIN: Final = 4
_NO_BUFFER: Final = (0, bytearray())
_NO_LAST: Final = (-1, 0)
_NOT_COMPARED: Final = (0, 0)
_NO_ENTRIES: Final = np.empty(0, ENTRY)


class ConsumeQueueDamagedError(StoreError):
    """A file of a consume queue is not what was written. The log has everything: an open store heals the entries (`heal.py`).

    Attributes:
        path: the file.
        queue_offset: first entry that does not hold.
        reason: what does not hold.
        is_healing: it passes by itself, soon; else only another start, or a repair of the log, may help.
    """

    def __init__(
        self, path: str, queue_offset: int, reason: str, *, is_healing: bool = False
    ) -> None:
        super().__init__(f"{path}: entry {queue_offset}: {reason}")
        self.path = path
        self.queue_offset = queue_offset
        self.reason = reason
        self.is_healing = is_healing


class DamagedFile:
    """A file in which an entry was met that does not hold, until it is healed.

    Attributes:
        queue: whose file it is.
        start_offset: queue offset of the file's first entry.
        queue_offset: the first entry that was met.
        reason: what does not hold.
        obstacle: why it cannot be healed, as of the last try; "" before that.
        is_misleading: an entry that holds leads to another record than its own: nothing that the file says is believed.
    """

    __slots__ = ("is_misleading", "obstacle", "queue", "queue_offset", "reason", "start_offset")

    def __init__(
        self, queue: ConsumeQueue, start_offset: int, queue_offset: int, reason: str
    ) -> None:
        self.queue = queue
        self.start_offset = start_offset
        self.queue_offset = queue_offset
        self.reason = reason
        self.obstacle = ""
        self.is_misleading = False


class QueueFiles:
    """What all queues of a store share: the folder, the open files, and what does not hold of them.

    Attributes:
        folder: folder of all consume queues.
        files: those that are open.
        lost_syncs: for a queue, the first offset that a failed sync may have lost.
        met: the damaged files that readers came across, by queue and first offset. Any thread adds, the flusher thread removes.
        on_met: told when one is added, on any thread; None while nobody heals.
        min_offset_lock: held while a first offset is raised.
    """

    __slots__ = ("files", "folder", "lost_syncs", "met", "min_offset_lock", "on_met")

    def __init__(self, folder: str, files: OpenFiles) -> None:
        self.folder = folder
        self.files = files
        self.lost_syncs: dict[ConsumeQueue, int] = {}
        self.met: dict[tuple[ConsumeQueue, int], DamagedFile] = {}
        self.on_met: Callable[[], None] | None = None
        self.min_offset_lock = threading.Lock()

    def forget_damage(self, queue: ConsumeQueue) -> None:
        """The queue's files are not what they were: what was wrong with them is no more."""
        self.lost_syncs.pop(queue, None)
        if self.met:
            for key in [key for key in list(self.met) if key[0] is queue]:
                self.met.pop(key, None)

    def damage_of(self, queue: ConsumeQueue) -> int | None:
        """The first offset of a queue that does not hold, as far as is known; None if all may."""
        found = [met.queue_offset for met in list(self.met.values()) if met.queue is queue]
        if queue in self.lost_syncs:
            found.append(self.lost_syncs[queue])
        return min(found, default=None)

    def damaged_queues(self) -> list[ConsumeQueue]:
        """Those of which something is known not to hold."""
        return list(dict.fromkeys((*self.lost_syncs, *(queue for queue, _ in list(self.met)))))


class StoreTime(NamedTuple):
    """When a record was stored; None if the log has lost it: then `goes_on_at` is a position below which nothing else is to be had."""

    time_ms: int | None
    goes_on_at: int = 0


_NO_TIME: Final = StoreTime(None)


class Unwritten(NamedTuple):
    """Entries that stand in no file yet, and belong in the same one. It has the offset of the first, the entries, what their check
    bits begin with, and whether the next file has to take more."""

    queue_offset: int
    entries: memoryview
    salt: int
    goes_on: bool


class ConsumeQueue:
    """The entries of one queue.

    Attributes:
        topic: the topic.
        queue_id: the queue.
        row: place of the queue in the table's state; the table's own.
        end_offset: queue offset of the next message. Moved by the writer.
        flushed_offset: entries below stand in files. Moved by the flusher; <= end_offset.
        synced_offset: entries below are on stable storage; or NO_FOLDER, NEW_FOLDER. The table's own.
        loaded_offset: entries below stood in files at the start.
        compared: of these, the offsets [start, end) that were compared with the records they lead to. The readers' own.
        record_size_bytes: about what a record of the last answer took, 0 before there was one. The readers' own.
    """

    __slots__ = (
        "_buffer",
        "_home",
        "_last",
        "_log_start",
        "_min_offset",
        "_salt",
        "compared",
        "end_offset",
        "flushed_offset",
        "loaded_offset",
        "queue_id",
        "record_size_bytes",
        "row",
        "synced_offset",
        "topic",
    )

    def __init__(self, topic: str, queue_id: int, row: int, home: QueueFiles) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.row = row
        self.end_offset = 0
        self.flushed_offset = 0
        self.synced_offset = NO_FOLDER
        self.loaded_offset = 0
        self.compared = _NOT_COMPARED
        self.record_size_bytes = 0
        self._min_offset = 0
        self._log_start = -1  # for which `_min_offset` holds
        self._last = _NO_LAST  # an end offset, and the position in the entry before it
        self._buffer: tuple[int, bytearray] = (
            _NO_BUFFER  # queue offset of its first entry, the entries
        )
        self._home = home
        self._salt = salt_of(topic, queue_id)

    @property
    def folder(self) -> str:
        """The folder of this queue's files."""
        return f"{self._home.folder}/{self.topic}/{self.queue_id}"

    @property
    def known_min_offset(self) -> int:
        """The first offset as of the last look: see `min_offset`."""
        return self._min_offset

    def path_of(self, queue_offset: int) -> str:
        """The file in which the entry stands."""
        start = queue_offset // ENTRIES_PER_FILE * FILE_SIZE_BYTES
        return f"{self._home.folder}/{self.topic}/{self.queue_id}/{start:020d}"

    # Writer thread.

    def reset(self, min_offset: int, end_offset: int) -> None:
        """Takes over what the files hold: entries [min_offset, end_offset), or none of them if the two are equal."""
        self._buffer = _NO_BUFFER
        self._min_offset = min_offset
        self._log_start = -1
        self._last = _NO_LAST
        self._home.forget_damage(self)
        self.loaded_offset = end_offset
        self.compared = _NOT_COMPARED
        self.flushed_offset = end_offset
        self.end_offset = end_offset

    def append(self, position: int, size: int, tag_code: int) -> None:
        """Adds the entry of one record."""
        offset = self.end_offset
        start, buffer = self._buffer
        at = (offset - start) * ENTRY_SIZE_BYTES
        if at >= len(buffer):
            start, buffer = self._grow(1)
            at = (offset - start) * ENTRY_SIZE_BYTES
        _ENTRY_STRUCT.pack_into(buffer, at, position, size, tag_code)
        self.end_offset = offset + 1

    def append_many(
        self, positions: NDArray[np.int64], sizes: NDArray[np.int64], tag_codes: NDArray[np.int64]
    ) -> None:
        """Adds the entries of many records."""
        count = len(positions)
        offset = self.end_offset
        start, buffer = self._buffer
        at = (offset - start) * ENTRY_SIZE_BYTES
        if at + count * ENTRY_SIZE_BYTES > len(buffer):
            start, buffer = self._grow(count)
            at = (offset - start) * ENTRY_SIZE_BYTES
        entries = np.frombuffer(buffer, ENTRY, count, at)
        entries["position"] = positions
        entries["size"] = sizes
        entries["tag_code"] = tag_codes
        self.end_offset = offset + count

    def _grow(self, count: int) -> tuple[int, bytearray]:
        """A buffer with room for `count` more entries, that starts with the first one that is not in a file."""
        start, buffer = self._buffer
        first, end = self.flushed_offset, self.end_offset
        capacity = _CAPACITY_MIN
        while capacity < 2 * (end - first) + count:  # of a queue that rested: no more than it needs
            capacity *= 2
        grown = bytearray(capacity * ENTRY_SIZE_BYTES)
        kept = (end - first) * ENTRY_SIZE_BYTES
        if kept:
            at = (first - start) * ENTRY_SIZE_BYTES
            grown[:kept] = memoryview(buffer)[at : at + kept]
        self._buffer = (first, grown)
        return self._buffer

    def cut(self, end_offset: int) -> None:
        """Removes the entries from `end_offset` on, in memory and in files; nobody appends or flushes meanwhile."""
        assert self._min_offset <= end_offset <= self.end_offset
        start, buffer = self._buffer
        old_flushed = self.flushed_offset
        if len(buffer) and end_offset > start:  # a copy: readers may hold views of the buffer
            self._buffer = (start, bytearray(buffer))
        else:
            self._buffer = _NO_BUFFER
        self.end_offset = end_offset
        self._last = _NO_LAST
        self.flushed_offset = min(old_flushed, end_offset)
        self.synced_offset = min(self.synced_offset, end_offset)
        self.loaded_offset = min(self.loaded_offset, end_offset)
        if old_flushed <= end_offset:
            return
        files = self._home.files
        keep = self.path_of(end_offset)
        behind = [path for name in files.disk.list(self.folder) if (path := f"{self.folder}/{name}") > keep]
        for path in behind:
            files.unlink(path)
        if behind:  # for good: behind a shorter file, no start looks for them
            files.disk.fsync_dir(self.folder)
        cut_file(files.disk, keep, end_offset % ENTRIES_PER_FILE * ENTRY_SIZE_BYTES)

    # Flusher thread.

    def flush(self) -> None:
        """Writes what is only in memory to files, without a sync. After an OSError nothing is lost: it is all still in memory."""
        end = self.end_offset
        while self.flushed_offset < end:
            first, entries, salt, _ = self.unwritten()
            self.write(first, sealed(entries, first, salt))

    def unwritten(self) -> Unwritten:
        """What is only in memory, as far as it belongs into one file."""
        first, end = self.flushed_offset, self.end_offset
        start, buffer = self._buffer
        last = min(end, (first // ENTRIES_PER_FILE + 1) * ENTRIES_PER_FILE)
        part = slice((first - start) * ENTRY_SIZE_BYTES, (last - start) * ENTRY_SIZE_BYTES)
        return Unwritten(first, memoryview(buffer)[part], self._salt, last < end)

    def write(self, queue_offset: int, entries: bytearray | memoryview) -> None:
        """Writes what `unwritten` gave, sealed."""
        files = self._home.files
        file = files.get(self.path_of(queue_offset), create=True)
        at = queue_offset % ENTRIES_PER_FILE * ENTRY_SIZE_BYTES
        write_fully(files.disk, file.fd, entries, at)
        end = queue_offset + len(entries) // ENTRY_SIZE_BYTES
        # The next checkpoint asks for it, and the buffer may be gone by then.
        self._last = (end, position_in(entries[-ENTRY_SIZE_BYTES:]))
        self.flushed_offset = end

    def sync(self) -> set[str]:
        """Makes the files durable as far as they are written; the folders that have new names in them, to be synced by the caller."""
        files, end = self._home.files, self.flushed_offset
        folders: set[str] = set()
        if self.synced_offset < 0:
            folders |= {self._home.folder, f"{self._home.folder}/{self.topic}", self.folder}
        offset = max(self.synced_offset, self._min_offset)
        while offset < end:
            if offset % ENTRIES_PER_FILE == 0:
                folders.add(self.folder)
            try:
                files.disk.fdatasync(files.get(self.path_of(offset)).fd)
            except OSError:
                self.sync_failed()
                raise
            offset = (offset // ENTRIES_PER_FILE + 1) * ENTRIES_PER_FILE
        self.sync_done()
        return folders

    def raw_entries(self, queue_offset: int, end: int) -> bytes:
        """What the file has in the place of entries [queue_offset, end), which are in one file; fewer bytes where it has none."""
        files = self._home.files
        try:
            file = files.get(self.path_of(queue_offset))
        except FileNotFoundError:
            return b""
        at = queue_offset % ENTRIES_PER_FILE * ENTRY_SIZE_BYTES
        return read_entries(files.disk, file.fd, (end - queue_offset) * ENTRY_SIZE_BYTES, at)

    def heal(self, queue_offset: int, entries: NDArray[Any]) -> None:
        """Writes entries of one file once more, without a sync; they are in files already, or should be. The folder is there."""
        files, path = self._home.files, self.path_of(queue_offset)
        # What stands at the path now may be another file than the open one.
        files.forget(path)
        file = files.get(path, create=True)
        at = queue_offset % ENTRIES_PER_FILE * ENTRY_SIZE_BYTES
        data = sealed(memoryview(entries.tobytes()), queue_offset, self._salt)
        try:
            write_fully(files.disk, file.fd, data, at)
        except OSError as error:
            if error.errno not in UNREADABLE_ERRNOS:
                raise
            # A write of a part of a bad page has to read the rest of it. These are all entries of the file that anybody needs, but for
            # those that were written while the log was searched for them. These are missed where somebody reads them, and healed too.
            files.unlink(path)
            write_fully(files.disk, files.get(path, create=True).fd, data, at)
        if self.synced_offset > queue_offset:  # at the file's start: its name is synced too
            self.synced_offset = queue_offset // ENTRIES_PER_FILE * ENTRIES_PER_FILE
        self._last = _NO_LAST

    def sync_done(self) -> None:
        """The files are durable as far as they are written."""
        self.synced_offset = self.flushed_offset

    def sync_failed(self) -> None:
        """The kernel may have dropped what was written, and a second sync would not notice: the entries count as damaged."""
        start = max(self.synced_offset, self._min_offset)
        self._home.lost_syncs[self] = min(self._home.lost_syncs.get(self, start), start)

    def release_buffer(self) -> None:
        """Gives the memory back if all entries are in files. The caller keeps the writer out."""
        if self.flushed_offset == self.end_offset:
            self._buffer = _NO_BUFFER

    # Any thread.

    def entries(self, queue_offset: int, count_max: int) -> NDArray[Any]:
        """The entries from `queue_offset` on, at most `count_max`; none if `queue_offset` is outside [min_offset, end_offset).

        The result may be a view of the buffer: read it, do not keep it. Less than there is comes before an entry that does not
        hold; ConsumeQueueDamagedError if that is the first.
        """
        # Before the buffer: see the rules above.
        end = min(self.end_offset, queue_offset + count_max)
        start, buffer = self._buffer
        if queue_offset >= end or queue_offset < self._min_offset:
            return _NO_ENTRIES
        if buffer and queue_offset >= start:
            return np.frombuffer(
                buffer, ENTRY, end - queue_offset, (queue_offset - start) * ENTRY_SIZE_BYTES
            )
        if not buffer or end <= start:
            try:
                return self._read(queue_offset, end)
            except ConsumeQueueDamagedError:
                if queue_offset < self._min_offset:  # deleted for its age just now
                    return _NO_ENTRIES
                raise
        older = self._read(queue_offset, start)
        if len(older) < start - queue_offset:
            return older
        return np.concatenate((older, np.frombuffer(buffer, ENTRY, end - start)))

    def stored(self, queue_offset: int, count: int) -> tuple[bytes, int] | None:
        """(`count` entries as they stand in a file, and one more where there is one; the salt of their checks).

        None if not all of them stand in one file, or it cannot be read: `entries` says why.
        """
        at = queue_offset % ENTRIES_PER_FILE
        look_at = min(count + 1, ENTRIES_PER_FILE - at, self.flushed_offset - queue_offset)
        if look_at < count or queue_offset < self._min_offset:
            return None
        try:
            file = self._home.files.get(self.path_of(queue_offset))
        except FileNotFoundError:
            return None
        data = read_entries(self._home.files.disk, file.fd, look_at * ENTRY_SIZE_BYTES, at * ENTRY_SIZE_BYTES)
        return (data, self._salt) if len(data) == look_at * ENTRY_SIZE_BYTES else None

    def entry(self, queue_offset: int) -> tuple[int, int, int]:
        """(position, size, tag_code) of one entry that exists; one that is deleted for its age meanwhile is that of a lost record at 0."""
        start, buffer = self._buffer
        if buffer and queue_offset >= start:
            return _ENTRY_STRUCT.unpack_from(buffer, (queue_offset - start) * ENTRY_SIZE_BYTES)
        try:
            return self._read(queue_offset, queue_offset + 1)[0].item()
        except ConsumeQueueDamagedError:
            if queue_offset < self._min_offset:
                return 0, 0, LOST_TAG_CODE
            raise

    def position_before(self, end_offset: int) -> int:
        """Where the record of the entry before `end_offset` stands; 0 if that entry does not hold."""
        known_end, position = self._last
        if known_end == end_offset:
            return position
        try:
            return self.entry(end_offset - 1)[0]
        except ConsumeQueueDamagedError:
            return 0

    def check(self, queue_offset: int) -> None:
        """Reads all entries from `queue_offset` on. Raises ConsumeQueueDamagedError if one does not hold."""
        while found := len(self.entries(queue_offset, ENTRIES_PER_FILE)):
            queue_offset += found

    def check_stored(self, queue_offset: int, count_max: int) -> int:
        """Reads entries from `queue_offset` on in one file, at most `count_max`. Damage is noted, and is healed with the file.

        Returns the offset at which to go on: behind them, or behind the file if one does not hold.
        """
        file_end = (queue_offset // ENTRIES_PER_FILE + 1) * ENTRIES_PER_FILE
        count = min(self.flushed_offset, file_end, queue_offset + count_max) - queue_offset
        if queue_offset < self._min_offset:
            return self._min_offset
        if count <= 0:
            return file_end
        try:
            found = len(self._read_file(queue_offset, count))
        except ConsumeQueueDamagedError:
            return file_end
        return queue_offset + count if found == count else file_end

    def min_offset(self, log_start: int) -> int:
        """Offset of the first message that the log still has, `end_offset` if it has none; `log_start`: the log's first position.

        Looks once for each start of the log: at one entry, and searches only when that one is gone.
        """
        if log_start <= self._log_start:  # less: the log's start has moved since the caller looked
            return self._min_offset
        with self._home.min_offset_lock:
            first = self._min_offset
            if log_start <= self._log_start:
                return first
            try:
                if first < self.end_offset and self.entry(first)[0] < log_start:
                    first = self.first_at_or_beyond(log_start)
                    self._min_offset = first
            except ConsumeQueueDamagedError:
                return first  # the entries that hold can still be read
            self._log_start = log_start
            return first

    def first_at_or_beyond(self, position: int) -> int:
        """Offset of the first entry whose record stands at `position` of the log or behind it, `end_offset` if there is none."""
        low, high = self._min_offset, self.end_offset
        if high > low:  # the usual question first: is all of it older?
            end_offset, last_position = self._last
            if end_offset != high:
                last_position = self.entry(high - 1)[0]
                self._last = (high, last_position)
            if last_position < position:
                return high
        while low < high:
            middle = (low + high) // 2
            if self.entry(middle)[0] < position:
                low = middle + 1
            else:
                high = middle
        return low

    def offset_at_time(
        self, time_ms: int, log_start: int, store_time_at: Callable[[int], StoreTime]
    ) -> int:
        """Offset of the first message stored at `time_ms` or later, `end_offset` if there is none.

        `store_time_at` reads the store time of the record at a position.
        """
        low, high = self.min_offset(log_start), self.end_offset
        while low < high:
            middle = (low + high) // 2
            probe = middle
            found = _NO_TIME
            while probe < high:  # a lost record has no time: ask the next one that has
                position, size, _ = self.entry(probe)
                found = store_time_at(position) if size else _NO_TIME
                if found.time_ms is not None:
                    break
                probe = max(probe + 1, self.first_at_or_beyond(found.goes_on_at))
            if found.time_ms is not None and found.time_ms < time_ms:
                low = probe + 1
            else:
                high = middle
        return low

    def is_compared(self, queue_offset: int, end_offset: int) -> bool:
        """Whether what stood in files at the start of [queue_offset, end_offset) was compared with its records."""
        start, end = self.compared
        return start <= queue_offset and min(end_offset, self.loaded_offset) <= max(
            end, queue_offset
        )

    def note_compared(self, queue_offset: int, end_offset: int) -> None:
        """These were. One range is remembered: the one that readers go on from."""
        start, end = self.compared
        if start <= queue_offset <= end:
            self.compared = (start, max(end, end_offset))
        else:
            self.compared = (queue_offset, end_offset)

    def misled(self, queue_offset: int) -> ConsumeQueueDamagedError:
        """The entry leads to a record that is not its own: the error for the reader. The file is noted to be healed."""
        path = self.path_of(queue_offset)
        error = self._damage(path, queue_offset, "an entry leads to another message")
        met = self._home.met.get((self, queue_offset // ENTRIES_PER_FILE * ENTRIES_PER_FILE))
        if met is not None:
            met.is_misleading = True
        return error

    def _read(self, queue_offset: int, end: int) -> NDArray[Any]:
        """Entries from files: up to `end`, or up to the first that does not hold; ConsumeQueueDamagedError if that is the first."""
        parts: list[NDArray[Any]] = []
        while queue_offset < end:
            count = (
                min(end, (queue_offset // ENTRIES_PER_FILE + 1) * ENTRIES_PER_FILE) - queue_offset
            )
            try:
                part = self._read_file(queue_offset, count)
            except ConsumeQueueDamagedError:
                if not parts:
                    raise
                break
            parts.append(part)
            queue_offset += count
            if len(part) < count:
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_file(self, queue_offset: int, count: int) -> NDArray[Any]:
        """Entries that stand in one file, as `_read`. One more is looked at where there is one: it shows if the last one is wrong."""
        files, path = self._home.files, self.path_of(queue_offset)
        at = queue_offset % ENTRIES_PER_FILE
        look_at = min(count + 1, ENTRIES_PER_FILE - at, self.flushed_offset - queue_offset)
        try:
            file = files.get(path)
        except FileNotFoundError:
            raise self._damage(path, queue_offset, "the file is gone") from None
        data = read_entries(files.disk, file.fd, look_at * ENTRY_SIZE_BYTES, at * ENTRY_SIZE_BYTES)
        whole = len(data) // ENTRY_SIZE_BYTES
        entries, good = opened(data, whole, queue_offset, self._salt)
        reason = "the file is too short, or unreadable"
        if good < whole:
            reason = "its check bits do not hold"
        wrong = first_disorder(entries[:good])
        if wrong is not None:
            # It or the one before it is wrong.
            good, reason = max(wrong - 1, 0), "entries are out of order"
        if good < min(look_at, count):
            error = self._damage(path, queue_offset + good, reason)
            if not good:
                raise error
        return entries[: min(good, count)]

    def _damage(self, path: str, queue_offset: int, reason: str) -> ConsumeQueueDamagedError:
        home = self._home
        if queue_offset < self._min_offset:
            return ConsumeQueueDamagedError(path, queue_offset, reason)
        start = queue_offset // ENTRIES_PER_FILE * ENTRIES_PER_FILE
        met = home.met.get((self, start))
        if met is None:
            met = home.met.setdefault((self, start), DamagedFile(self, start, queue_offset, reason))
            log.error("damage in a consume queue: %s: entry %d: %s", path, queue_offset, reason)
            if home.on_met is not None:
                home.on_met()
        met.queue_offset = min(met.queue_offset, queue_offset)
        if met.obstacle:
            reason = f"{reason}, and it cannot be healed: {met.obstacle}"
        is_healing = home.on_met is not None and not met.obstacle
        return ConsumeQueueDamagedError(path, queue_offset, reason, is_healing=is_healing)


def first_disorder(entries: NDArray[Any]) -> int | None:
    """Index of the first entry that cannot have been written so, None if all may hold."""
    if len(entries) <= 2:
        return _first_disorder_of_few(entries.tolist())
    positions, sizes = entries["position"].astype(np.int64), entries["size"].astype(np.int64)
    overlaps = positions[1:] < (positions + sizes)[:-1]
    if not np.count_nonzero(overlaps) and np.count_nonzero(sizes) == len(sizes):
        return None
    wrong = (sizes == 0) & (entries["tag_code"] != LOST_TAG_CODE)
    wrong[1:] |= overlaps
    return int(wrong.argmax()) if np.count_nonzero(wrong) else None


def _first_disorder_of_few(entries: list[tuple[int, int, int]]) -> int | None:
    end = 0
    for index, (position, size, tag_code) in enumerate(entries):
        if position < end or (not size and tag_code != LOST_TAG_CODE):
            return index
        end = position + size
    return None
