"""Rebuilds the timer's files from the log while the store is open: a run file that does not hold is met by whoever reads it.

    begin      on the writer thread: the rows are forgotten, and all batches that are under way with them
    entries    the log is walked from its first segment to where it ended then: records with due times
    ends       the queue of %SYS%TIMER is read: which of them are pending no more
    end        messages fall due again

Rules:
- Meanwhile messages are taken as always, none falls due, none is recalled or carried forward, and no segment goes: they would be missed.
  A follower hears of messages that end all the same, at its leader. They go when all are here: their entries may not have been read yet.
- At most SLICE_SIZE_BYTES of the log are walked in one step, in blocks between which others get on.
- What the log itself has lost (quarantine) is skipped, and is not counted: as at a start. If a replica heals it, the next start finds it.
- A crash in between costs nothing: the file that says what the others hold went first, so the next start reads the log.

One thread: that of housekeeping, which merges these files and deletes segments, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from protomq.v1.record_pb2 import Record
from protomq.wire.topics import TIMER_TOPIC
from protomq_broker.store.errors import StoreError
from protomq_broker.store.log.record_scan import read_trailers
from protomq_broker.store.log.recovery import DamagedRange, StartPoint, find_resync, skips_of
from protomq_broker.store.log.seals import LogWalker

from .timer import TimerState, ended_columns, is_timed

if TYPE_CHECKING:
    from protomq.wire.log_walk import WalkedBlock
    from protomq_broker.store.files.disk import Disk
    from protomq_broker.store.log.segment import SegmentFolder
    from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
    from protomq_broker.store.queues.log_reader import LogReader
    from protomq_broker.store.queues.quarantine import Quarantine

    from .pending import PendingTimers

log = logging.getLogger(__name__)

SLICE_SIZE_BYTES: Final = 64 << 20
BLOCK_SIZE_BYTES: Final = 256 << 10
RECORDS_PER_SLICE: Final = 1_000
"""Of %SYS%TIMER; each reports 4,096 messages at most, mostly of 512."""
RETRY_INTERVAL_MS: Final = 60_000


class TimerRebuild:
    """See the module's docstring. `rebuilt_count`: how often it was done since the start."""

    def __init__(
        self,
        disk: Disk,
        folder: SegmentFolder,
        pending: PendingTimers,
        timer: TimerState,
        queues: ConsumeQueueTable,
        reader: LogReader,
        quarantine: Quarantine,
        *,
        start_point: Callable[[], StartPoint],
        end_position: Callable[[], int],
        on_writer: Callable[[Callable[[], None]], None],
    ) -> None:
        self.rebuilt_count = 0
        self._disk = disk
        self._folder = folder
        self._pending = pending
        self._timer = timer
        self._queues = queues
        self._reader = reader
        self._quarantine = quarantine
        self._start_point = start_point
        self._end_position = end_position
        self._on_writer = on_writer
        self._steps: Iterator[None] | None = None
        self._retry_due_ms = 0

    def step(self, now_ms: int) -> None:
        """Continues, if there is anything to do. `now_ms` is monotonic. Raises OSError, StoreError: then it begins again a minute later."""
        if self._pending.met_damage and now_ms >= self._retry_due_ms:
            log.error("%s: the timer is rebuilt from the log", self._pending.met_damage)
            self._retry_due_ms = now_ms + RETRY_INTERVAL_MS
            self._steps = self._rebuild()
        if self._steps is None:
            return
        try:
            if next(self._steps, self) is self:
                self._steps = None
        except (OSError, StoreError) as error:
            self._steps = None
            self._pending.met_damage = f"the timer could not be rebuilt: {error}"
            raise

    def _rebuild(self) -> Iterator[None]:
        end = 0

        def begin() -> None:
            nonlocal end
            end = self._end_position()
            self._timer.begin_rebuild(self._folder.first_position)

        self._on_writer(begin)
        yield from self._take_entries(end)
        yield from self._take_ends(end)
        self._pending.end_rebuild()
        self.rebuilt_count += 1
        log.warning("the timer is rebuilt from the log: messages fall due again")

    def _take_entries(self, end: int) -> Iterator[None]:
        start = self._start_point()
        walker = self._walker(start, end)
        left = SLICE_SIZE_BYTES
        while True:
            for block in walker:
                self._take_block(block)
                left -= block.size_bytes
                if left <= 0:
                    self._pending.flush()
                    yield
                    left = SLICE_SIZE_BYTES
            position = walker.position
            if position >= end:
                break
            # It does not hold here, which nobody has met before: as a start does, what follows it is looked for.
            found = find_resync(self._disk, self._folder, position, unreadable_is_damage=True)
            if found is None:
                raise StoreError(f"the log cannot be read at position {position}: {walker.problem}")
            self._quarantine.add(
                DamagedRange(position, found.position, found.crc32c, walker.problem)
            )
            walker = self._walker(StartPoint(found.position, found.crc32c), end)
        self._pending.flush()

    def _walker(self, start: StartPoint, end: int) -> LogWalker:
        return LogWalker(
            self._disk,
            self._folder,
            start.position,
            start.crc32c,
            skips=skips_of(self._quarantine.skip()),
            block_size_bytes=BLOCK_SIZE_BYTES,
            end_position=end,
            unreadable_is_damage=True,
        )

    def _take_block(self, block: WalkedBlock) -> None:
        starts, sizes = block.records()
        if not len(starts):
            return
        records = read_trailers(block.data, block.base_position, starts, sizes)
        chosen = is_timed(records.flags)
        if chosen.any():
            self._pending.restore(
                records.due_times_ms[chosen], records.positions[chosen], records.sizes[chosen]
            )

    def _take_ends(self, end: int) -> Iterator[None]:
        count = 0
        for queue in self._queues.queues_of(TIMER_TOPIC).values():
            for queue_offset in range(queue.known_min_offset, queue.end_offset):
                position, size, _ = queue.entry(queue_offset)
                if position >= end:
                    break
                # Where it is lost, another record may stand at its position.
                record = self._reader.record_at(position) if size else None
                if record is not None:
                    self._pending.restore_removed(*ended_columns(Record.FromString(record).body))
                count += 1
                if count % RECORDS_PER_SLICE == 0:
                    self._pending.flush()
                    yield
        self._pending.flush()
