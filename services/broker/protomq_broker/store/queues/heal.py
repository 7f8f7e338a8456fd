"""Heals damaged consume queue files from the log, while the store is open.

A reader that meets a damaged entry gets an error, and the file is noted (`QueueFiles.met`). The healer reads the file, and searches the log
for the records of its damaged entries. It searches only where they can stand, segment by segment, the newest first. It walks each segment
from its head, so that it believes only records under a seal. Then it writes the entries again, and readers continue.

- One step walks at most SLICE_SIZE_BYTES of the log, one step each flush interval: 128 MiB/s by default.
- Memory: the entries of BATCH_ENTRIES_MAX messages. Files that fit into that are healed together by one walk.
- If the log is damaged there, the healer puts the range into quarantine as the scrub does, and the queue gets entries of lost records.
  Readers get CORRUPT_LOG with the range. It is served again when a replica has healed it, after the next start. If nothing behind the
  damage holds or is synced, the damage is an obstacle, which readers get as the reason. The healer tries the file again every
  RETRY_INTERVAL_MS.
- A crash in between costs nothing: entries that were not written again are damaged as before.

One thread: that of housekeeping, which deletes segments and writes these files too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from protomq.wire.log_walk import WalkedBlock
from protomq_broker.store.files.disk import Disk
from protomq_broker.store.log.append import CorruptRecordError
from protomq_broker.store.log.kinds import is_queued
from protomq_broker.store.log.record_scan import read_trailers
from protomq_broker.store.log.recovery import DamagedRange, StartPoint, find_resync, skips_of
from protomq_broker.store.log.seals import LogWalker
from protomq_broker.store.log.segment import SegmentFolder

from .consume_queue import ENTRIES_PER_FILE, ConsumeQueueDamagedError, DamagedFile
from .consume_queue_table import ConsumeQueueTable
from .entry_check import salt_of
from .healed_entries import Bounds, HealedEntries, Span, merged, overlap
from .quarantine import Quarantine

log = logging.getLogger(__name__)

SLICE_SIZE_BYTES: Final = 64 << 20
"""Of the log, walked in one step: 100 to 150 ms of a core, in blocks; other threads run in between."""
BLOCK_SIZE_BYTES: Final = 256 << 10
"""Walked, and its records read, in half a millisecond: the longest that other threads wait."""
BATCH_ENTRIES_MAX: Final = 1_000_000
"""20 MB; a file has 300,000."""
RETRY_INTERVAL_MS: Final = 60_000

_QUEUE_BITS: Final = 32


class LogState(NamedTuple):
    """What the healer asks of the store.

    Attributes:
        end_position: end of the log; all before it is written.
        flushed_position: end of what is on stable storage.
        deleted: topics that were deleted, and where the log ended then.
        quarantine: ranges in quarantine.
    """

    end_position: Callable[[], int]
    flushed_position: Callable[[], int]
    deleted: Callable[[], Mapping[str, int]]
    quarantine: Quarantine


class QueueHealer:
    """See the module's docstring. `healed_count`: files that were healed since the start."""

    def __init__(
        self, disk: Disk, folder: SegmentFolder, queues: ConsumeQueueTable, state: LogState
    ) -> None:
        self.healed_count = 0
        self._disk = disk
        self._folder = folder
        self._queues = queues
        self._state = state
        self._batch: dict[tuple[str, int], list[tuple[DamagedFile, HealedEntries]]] = {}
        self._next_base = -1  # of the segment to be walked next, downwards
        self._walker: LogWalker | None = None
        self._blocks: Iterator[WalkedBlock] = iter(())
        self._spans: list[Span] = []  # where something was missing when the segment was begun
        self._stop = 0  # where the walk of this segment ends
        self._is_second_look = False
        self._skipped: set[Span] = set()  # damage that the walks have skipped
        self._obstacles: list[tuple[Span, str]] = []
        self._retry_due_ms = 0

    def step(self, now_ms: int) -> None:
        """Continues to heal. `now_ms` is monotonic."""
        if not self._batch and not self._begin(now_ms):
            return
        left = SLICE_SIZE_BYTES
        while left > 0 and self._batch:
            if self._walker is None and not self._next_segment():
                self._finish()
                continue
            left -= self._walk(left)

    # A batch of files.

    def _begin(self, now_ms: int) -> bool:
        """Takes the files that wait; returns whether there is something to do."""
        is_retry_due = now_ms >= self._retry_due_ms
        count = 0
        for met in self._queues.damaged_files():
            if met.obstacle and not is_retry_due:
                continue
            try:
                healed = self._survey(met)
            except OSError as error:
                self._give_up(met, str(error))
                continue
            if healed is None or healed.is_complete:
                self._queues.forget_met(met)
                continue
            key = (met.queue.topic, met.queue.queue_id)
            self._batch.setdefault(key, []).append((met, healed))
            count += len(healed.entries)
            if count >= BATCH_ENTRIES_MAX:
                break
        if is_retry_due:
            self._retry_due_ms = now_ms + RETRY_INTERVAL_MS
        self._begin_walk()
        return bool(self._batch)

    def _survey(self, met: DamagedFile) -> HealedEntries | None:
        """Which entries of a file hold; None if the queue needs none of them any more."""
        queue = met.queue
        first = max(met.start_offset, queue.min_offset(self._folder.first_position))
        end = min(met.start_offset + ENTRIES_PER_FILE, queue.flushed_offset)
        if first >= end:
            return None
        data = queue.raw_entries(first, end)
        before, after = 0, self._state.end_position()
        try:
            if first > queue.known_min_offset:
                position, size, _ = queue.entry(first - 1)
                before = position + size
        except ConsumeQueueDamagedError:
            pass
        try:
            if end < queue.end_offset:
                after = queue.entry(end)[0]
        except ConsumeQueueDamagedError:
            pass
        salt = salt_of(queue.topic, queue.queue_id)
        healed = HealedEntries(data, end - first, first, salt, Bounds(before, after))
        if met.is_misleading:
            healed.widen()
        return healed

    def _begin_walk(self) -> None:
        ends = [span.end for _, healed in self._all_healed() for span in healed.spans()]
        size = self._folder.segment_size_bytes
        self._next_base = (max(ends, default=0) - 1) // size * size
        self._obstacles = []
        self._skipped = set()

    def _all_healed(self) -> list[tuple[DamagedFile, HealedEntries]]:
        return [item for items in self._batch.values() for item in items]

    def _finish(self) -> None:
        """The log has been read where an entry was missing: writes what was found. A file that needs a wider search stays in the batch."""
        batch, self._batch = self._batch, {}
        for key, items in batch.items():
            for met, healed in items:
                if self._queues.has(met.queue) and self._needs_wider_look(met, healed):
                    healed.widen()
                    self._batch.setdefault(key, []).append((met, healed))
        self._begin_walk()

    def _needs_wider_look(self, met: DamagedFile, healed: HealedEntries) -> bool:
        """Writes a file, or gives it up, unless the whole log has to be searched for it: then True."""
        if not healed.is_complete:
            spans = healed.spans()
            for span in spans:
                for place, reason in self._obstacles:
                    if overlap(span, *place):
                        self._give_up(met, reason)
                        return False
            damaged = self._state.quarantine.ranges
            if not healed.is_wide and not all(
                any(overlap(span, each.start_position, each.end_position) for each in damaged)
                for span in spans
            ):
                return True
            skipped = self._state.quarantine.skip(spans)
            if any(overlap(span, *each) for span in spans for each in self._skipped - _places(skipped)):
                # It was healed after the walk.
                return True
            lost = int(np.count_nonzero(~healed.known))
            healed.fill_lost()
            log.error("%s: the log has lost %d of its messages", _name(met), lost)
        if not healed.is_in_order:
            if not healed.is_wide:
                return True
            self._give_up(met, "the log's records are out of order")
            return False
        try:
            self._queues.heal(met, healed.first_offset, healed.entries)
        except OSError as error:
            self._give_up(met, str(error))
            return False
        self.healed_count += 1
        log.warning("%s: healed: the entries are rewritten from the log", _name(met))
        return False

    def _give_up(self, met: DamagedFile, reason: str) -> None:
        if met.obstacle != reason:
            log.error("%s cannot be healed: %s", _name(met), reason)
        met.obstacle = reason

    # The log.

    def _next_segment(self) -> bool:
        """Goes to the next older segment that may have missing records; returns whether there is one."""
        spans = merged(span for _, healed in self._all_healed() for span in healed.spans())
        if not spans:
            return False
        self._spans = spans
        size = self._folder.segment_size_bytes
        lowest = max(spans[0].start, self._folder.first_position)
        while self._next_base >= lowest // size * size:
            base, self._next_base = self._next_base, self._next_base - size
            end = base + size
            stop = max((span.end for span in spans if overlap(span, base, end)), default=base)
            # A head: the CRC before it may be that of a damaged seal.
            start = StartPoint(base, None)
            damaged = self._state.quarantine.ranges
            self._skipped |= _places(damaged)
            for damage in damaged:
                if damage.start_position <= base < damage.end_position:
                    start = StartPoint(damage.end_position, damage.previous_crc32c)
            self._stop = min(stop, end)
            if start.position < self._stop:
                self._look_from(start)
                return True
        return False

    def _look_from(self, start: StartPoint, *, again: bool = False) -> None:
        self._is_second_look = again
        damaged = self._state.quarantine.ranges
        self._skipped |= _places(damaged)
        self._walker = LogWalker(
            self._disk,
            self._folder,
            start.position,
            start.crc32c,
            skips=skips_of(damaged),
            block_size_bytes=BLOCK_SIZE_BYTES,
            unreadable_is_damage=True,
        )
        self._blocks = iter(self._walker)

    def _walk(self, size_max_bytes: int) -> int:
        """Walks on in this segment, about `size_max_bytes` at most; returns how many bytes."""
        walker = self._walker
        assert walker is not None
        size = 0
        try:
            for block in self._blocks:
                size += block.size_bytes
                self._take(block)
                if walker.position >= self._stop or size >= size_max_bytes:
                    break
            else:
                self._ended(walker)
                return size
        except (OSError, CorruptRecordError) as error:
            self._note_obstacle(walker.position, str(error))
            return size
        if walker.position >= self._stop:
            self._walker = None
        return size

    def _ended(self, walker: LogWalker) -> None:
        """The walk has ended by itself: at the end of the log, or at damage."""
        position, self._walker = walker.position, None
        if position >= self._stop or position < self._folder.first_position:
            return
        if not self._is_second_look:
            self._look_from(StartPoint(position, walker.crc32c), again=True)
            return
        found = find_resync(self._disk, self._folder, position, unreadable_is_damage=True)
        if found is None or found.position > self._state.flushed_position():
            self._note_obstacle(position, walker.problem)
            return
        damage = DamagedRange(position, found.position, found.crc32c, walker.problem)
        self._state.quarantine.add(damage)
        if found.position < self._stop:
            self._look_from(StartPoint(found.position, found.crc32c))

    def _note_obstacle(self, position: int, problem: str) -> None:
        self._walker = None
        reason = (
            f"{self._folder.path_at(position)}: positions {position} to {self._stop}: {problem}"
        )
        self._obstacles.append((Span(position, self._stop), reason))

    def _take(self, block: WalkedBlock) -> None:
        """Hands the records of a block to the files that are healed."""
        end = block.base_position + block.size_bytes
        if not any(overlap(span, block.base_position, end) for span in self._spans):
            return
        starts, sizes = block.records()
        if not len(starts):
            return
        records = read_trailers(block.data, block.base_position, starts, sizes)
        records = records.select(is_queued(records.flags))
        if not records.count:
            return
        deleted = self._state.deleted()
        keys = records.topic_indexes.astype(np.int64) << _QUEUE_BITS | records.queue_ids
        order = np.argsort(keys, kind="stable")
        bounds = [0, *(np.flatnonzero(np.diff(keys[order])) + 1).tolist(), records.count]
        for first, last in pairwise(bounds):
            rows = order[first:last]
            topic = records.topics[int(records.topic_indexes[rows[0]])]
            healed_files = self._batch.get((topic, int(records.queue_ids[rows[0]])))
            if healed_files is None:
                continue
            rows = rows[records.positions[rows] >= deleted.get(topic, 0)]
            for _, healed in healed_files:
                healed.take(
                    records.queue_offsets[rows],
                    records.positions[rows],
                    records.sizes[rows],
                    records.tag_codes[rows],
                )


def _places(damaged: Iterable[DamagedRange]) -> set[Span]:
    return {Span(each.start_position, each.end_position) for each in damaged}


def _name(met: DamagedFile) -> str:
    return met.queue.path_of(met.start_offset)
