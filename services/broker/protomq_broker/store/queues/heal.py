"""Consume queue files that do not hold are made anew from the log, while the store is open.

A reader that meets an entry which does not hold is told so, and the file is noted (`QueueFiles.met`). Here the file is read, and what
does not hold in it is looked for in the log: only where it can stand, segment by segment, the newest first, each walked from its head,
so that every record that is believed is under a seal. Then the entries are written again, and readers go on.

- At most SLICE_SIZE_BYTES of the log are walked in one step, one step each flush interval: 128 MiB/s by default.
- Memory: the entries of BATCH_ENTRIES_MAX messages. Files that wait are healed together where they fit: one walk serves all.
- Where the log turns out not to hold, its range is set aside as the scrub does it, and the queue gets entries for lost records:
  readers are told CORRUPT_LOG with the range. Damage behind which nothing holds, or is not synced, is an obstacle that is told to
  readers; the file is tried again every RETRY_INTERVAL_MS.
- A crash in between costs nothing: what was not written again does not hold now as it did not before.

One thread: that of housekeeping, which deletes segments and writes these files too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from protomq_broker.store.files.disk import Disk
from protomq_broker.store.log.append import CorruptRecordError
from protomq_broker.store.log.kinds import is_queued
from protomq_broker.store.log.record_scan import read_trailers
from protomq_broker.store.log.recovery import DamagedRange, StartPoint, find_resync, skips_of
from protomq_broker.store.log.seals import LogWalker, WalkedBlock
from protomq_broker.store.log.segment import SegmentFolder

from .consume_queue import ENTRIES_PER_FILE, ConsumeQueueDamagedError, DamagedFile
from .consume_queue_table import ConsumeQueueTable
from .entry_check import salt_of
from .quarantine import Quarantine
from .queue_patch import Bounds, QueuePatch, Span, merged, overlap

log = logging.getLogger(__name__)

SLICE_SIZE_BYTES: Final = 64 << 20
"""Of the log, walked in one step: 100 to 150 ms of a core, in blocks between which others get on."""
BLOCK_SIZE_BYTES: Final = 256 << 10
"""Walked, and its records read, in half a millisecond: so long other threads may have to wait."""
BATCH_ENTRIES_MAX: Final = 1_000_000
"""20 MB; a file has 300,000."""
RETRY_INTERVAL_MS: Final = 60_000

_QUEUE_BITS: Final = 32


class LogState(NamedTuple):
    """What the healer asks of the store.

    Attributes:
        end_position: end of the log; all in front of it is written.
        flushed_position: end of what is on stable storage.
        deleted: topics that were deleted, and where the log ended then.
        quarantine: ranges that are set aside.
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
        self._batch: dict[tuple[str, int], list[tuple[DamagedFile, QueuePatch]]] = {}
        self._next_base = -1  # of the segment to be walked next, downwards
        self._walker: LogWalker | None = None
        self._blocks: Iterator[WalkedBlock] = iter(())
        self._spans: list[Span] = []  # where something was missing when the segment was begun
        self._stop = 0  # where the walk of this segment ends
        self._is_second_look = False
        self._obstacles: list[tuple[Span, str]] = []
        self._retry_due_ms = 0

    def step(self, now_ms: int) -> None:
        """Heals on. `now_ms` is monotonic."""
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
        """Takes the files that wait; whether there is something to do for them."""
        is_retry_due = now_ms >= self._retry_due_ms
        count = 0
        for met in self._queues.damaged_files():
            if met.obstacle and not is_retry_due:
                continue
            try:
                patch = self._survey(met)
            except OSError as error:
                self._give_up(met, str(error))
                continue
            if patch is None or patch.is_complete:
                self._queues.forget_met(met)
                continue
            key = (met.queue.topic, met.queue.queue_id)
            self._batch.setdefault(key, []).append((met, patch))
            count += len(patch.entries)
            if count >= BATCH_ENTRIES_MAX:
                break
        if is_retry_due:
            self._retry_due_ms = now_ms + RETRY_INTERVAL_MS
        self._begin_walk()
        return bool(self._batch)

    def _survey(self, met: DamagedFile) -> QueuePatch | None:
        """What of a file holds; None if nothing of it is needed any more."""
        queue = met.queue
        first = max(met.start_offset, queue.known_min_offset)
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
        patch = QueuePatch(data, end - first, first, salt, Bounds(before, after))
        if met.is_misleading:
            patch.widen()
        return patch

    def _begin_walk(self) -> None:
        ends = [span.end for _, patch in self._patches() for span in patch.spans()]
        size = self._folder.segment_size_bytes
        self._next_base = (max(ends, default=0) - 1) // size * size
        self._obstacles = []

    def _patches(self) -> list[tuple[DamagedFile, QueuePatch]]:
        return [item for items in self._batch.values() for item in items]

    def _finish(self) -> None:
        """All has been read where something was missing: writes what was found. What needs another, wider look stays in the batch."""
        batch, self._batch = self._batch, {}
        for key, items in batch.items():
            for met, patch in items:
                if self._queues.has(met.queue) and self._needs_wider_look(met, patch):
                    patch.widen()
                    self._batch.setdefault(key, []).append((met, patch))
        self._begin_walk()

    def _needs_wider_look(self, met: DamagedFile, patch: QueuePatch) -> bool:
        """Settles a file, unless the log has to be looked through for it from end to end."""
        if not patch.is_complete:
            spans = patch.spans()
            for span in spans:
                for place, reason in self._obstacles:
                    if overlap(span, *place):
                        self._give_up(met, reason)
                        return False
            damaged = self._state.quarantine.ranges
            if not patch.is_wide and not all(
                any(overlap(span, each.start_position, each.end_position) for each in damaged)
                for span in spans
            ):
                return True
            lost = int(np.count_nonzero(~patch.known))
            patch.fill_lost()
            log.error("%s: the log has lost %d of its messages", _name(met), lost)
        if not patch.is_in_order:
            if not patch.is_wide:
                return True
            self._give_up(met, "the log's records are out of order")
            return False
        try:
            self._queues.mend(met, patch.first_offset, patch.entries)
        except OSError as error:
            self._give_up(met, str(error))
            return False
        self.healed_count += 1
        log.warning("%s: the entries are made anew from the log", _name(met))
        return False

    def _give_up(self, met: DamagedFile, reason: str) -> None:
        if met.obstacle != reason:
            log.error("%s cannot be made anew: %s", _name(met), reason)
        met.obstacle = reason

    # The log.

    def _next_segment(self) -> bool:
        """Goes on to the next older segment in which something is to be found; whether there is one."""
        spans = merged(span for _, patch in self._patches() for span in patch.spans())
        if not spans:
            return False
        self._spans = spans
        size = self._folder.segment_size_bytes
        lowest = max(spans[0].start, self._folder.first_position)
        while self._next_base >= lowest // size * size:
            base, self._next_base = self._next_base, self._next_base - size
            end = base + size
            stop = max((span.end for span in spans if overlap(span, base, end)), default=base)
            start = StartPoint(
                base, None
            )  # a head: the CRC before it may be that of a damaged seal
            for damage in self._state.quarantine.ranges:
                if damage.start_position <= base < damage.end_position:
                    start = StartPoint(damage.end_position, damage.previous_crc32c)
            self._stop = min(stop, end)
            if start.position < self._stop:
                self._look_from(start)
                return True
        return False

    def _look_from(self, start: StartPoint, *, again: bool = False) -> None:
        self._is_second_look = again
        self._walker = LogWalker(
            self._disk,
            self._folder,
            start.position,
            start.crc32c,
            skips=skips_of(self._state.quarantine.ranges),
            block_size_bytes=BLOCK_SIZE_BYTES,
        )
        self._blocks = iter(self._walker)

    def _walk(self, size_max_bytes: int) -> int:
        """Walks on in this segment, about so far at most; how much was walked."""
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
        """The walk has come to an end by itself: at the end of the log, or where it does not hold."""
        position, self._walker = walker.position, None
        if position >= self._stop or position < self._folder.first_position:
            return
        if not self._is_second_look:
            self._look_from(StartPoint(position, walker.crc32c), again=True)
            return
        found = find_resync(self._disk, self._folder, position)
        if found is None or found.position > self._state.flushed_position():
            self._note_obstacle(position, walker.problem)
            return
        damage = DamagedRange(position, found.position, found.crc32c, walker.problem)
        self._state.quarantine.set_aside(damage)
        if found.position < self._stop:
            self._look_from(StartPoint(found.position, found.crc32c))

    def _note_obstacle(self, position: int, problem: str) -> None:
        self._walker = None
        reason = (
            f"{self._folder.path_at(position)}: positions {position} to {self._stop}: {problem}"
        )
        self._obstacles.append((Span(position, self._stop), reason))

    def _take(self, block: WalkedBlock) -> None:
        """Gives the patches what the records of a block say."""
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
            patches = self._batch.get((topic, int(records.queue_ids[rows[0]])))
            if patches is None:
                continue
            rows = rows[records.positions[rows] >= deleted.get(topic, 0)]
            for _, patch in patches:
                patch.take(
                    records.queue_offsets[rows],
                    records.positions[rows],
                    records.sizes[rows],
                    records.tag_codes[rows],
                )


def _name(met: DamagedFile) -> str:
    return met.queue.path_of(met.start_offset)
