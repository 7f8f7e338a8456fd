"""Reads old segments again, slowly, so that it finds damage before a consumer does.

A start proves only the log behind the checkpoint. The scrub walks the part before it, a little at a time and round by round, and
checks seals, structure and file sizes. It puts a part that fails twice in a row into quarantine: readers get an error, and continue behind
it.

    a round   from the oldest segment to what is synced of the newest, then the entries of all queues; the next begins ROUND_INTERVAL_MS
              later at the earliest

Entries that do not hold are healed from the log (`queues/heal.py`). Nobody reads those of the broker's own records while the store is open:
their states are in memory. A start that cannot use its snapshots goes by them.

Readers do not wait for the scrub: what they ask for is checked first (`checked_log.py`). It finds damage in what nobody asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

from protomq_broker.store.files.disk import Disk
from protomq_broker.store.log.checked_log import CheckedLog
from protomq_broker.store.log.checked_segment import stretch_of
from protomq_broker.store.log.recovery import StartPoint, skips_of
from protomq_broker.store.log.seals import LogWalker
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from protomq_broker.store.queues.quarantine import Quarantine
from protomq_broker.store.queues.selection import ENTRY_SIZE_BYTES

log = logging.getLogger(__name__)

ROUND_INTERVAL_MS: Final = 24 * 3_600_000
BLOCK_SIZE_BYTES: Final = 256 << 10
"""Size of a block. A walk of it takes 0.2 ms, the longest that other threads wait."""
ENTRIES_PER_BLOCK: Final = 4_096
READ_COST_BYTES: Final = 4_096
"""A read of few entries counts as so much: a file has to be opened for it."""


class Scrubber:
    """See the module's docstring. One thread, the one that deletes segments."""

    def __init__(
        self,
        disk: Disk,
        folder: SegmentFolder,
        size_bytes_per_s: int,
        log_start: Callable[[], StartPoint],
        quarantine: Quarantine,
        checked: CheckedLog,
        queues: ConsumeQueueTable,
    ) -> None:
        """`log_start` returns where a walk of the whole log begins. `checked` gets the parts that are valid, `quarantine` the damaged ones.
        """
        self._disk = disk
        self._folder = folder
        self._size_bytes_per_s = size_bytes_per_s
        self._log_start = log_start
        self._quarantine = quarantine
        self._checked = checked
        self._queues = queues
        self._next: StartPoint | None = None  # of the log; None when it was walked
        self._entries: Iterator[int] | None = None  # behind that; None between two rounds
        self._round_due_ms = 0
        self._at_ms: int | None = None
        self._credit_bytes = 0

    def step(self, now_ms: int, end_position: int) -> None:
        """Walks on as far as the rate allows. Everything before `end_position` is synced. `now_ms`: monotonic time."""
        passed_ms = 0 if self._at_ms is None else now_ms - self._at_ms
        self._at_ms = now_ms
        if self._next is None and self._entries is None:
            if now_ms < self._round_due_ms:
                return
            self._next = self._log_start()
            self._round_due_ms = now_ms + ROUND_INTERVAL_MS
            self._credit_bytes = 0
        earned = passed_ms * self._size_bytes_per_s // 1000
        self._credit_bytes = min(self._credit_bytes + earned, self._size_bytes_per_s)
        try:
            if self._next is not None:
                if self._next.position < self._folder.first_position:  # deleted meanwhile
                    self._next = self._log_start()
                self._walk(self._next, end_position)
        except OSError as error:
            log.error(
                "old segments cannot be read; the scrub tries them again in the next round: %s", error
            )
            self._next, self._entries = None, self._stored_entries()
        self._check_entries()

    def _walk(self, start: StartPoint, end_position: int) -> None:
        while start.position < end_position and self._credit_bytes > 0:
            walker = self._walker(start)
            for block in walker:
                self._credit_bytes -= block.size_bytes
                self._checked.note_walked(stretch_of(block))
                if self._credit_bytes <= 0 or walker.position >= end_position:
                    break
            start = self._next = StartPoint(walker.position, walker.crc32c)
            if walker.problem and start.position < end_position:
                again = self._walker(start)
                if next(iter(again), None) is None:
                    start = self._next = self._put_into_quarantine(start, again.problem)
        if self._credit_bytes > 0:
            self._next, self._entries = None, self._stored_entries()

    def _check_entries(self) -> None:
        while self._entries is not None and self._credit_bytes > 0:
            size_bytes = next(self._entries, None)
            if size_bytes is None:
                self._entries = None
            else:
                self._credit_bytes -= size_bytes

    def _stored_entries(self) -> Iterator[int]:
        """Reads the entries that files have, queue by queue; yields what each read costs. Nobody needs those that lead to deleted segments,
        and nothing could heal them.
        """
        for queue in list(self._queues.all()):
            if not self._queues.has(queue):
                continue  # Its topic was deleted meanwhile.
            try:
                offset = queue.min_offset(self._folder.first_position)
                while offset < queue.flushed_offset and self._queues.has(queue):
                    first, offset = offset, queue.check_stored(offset, ENTRIES_PER_BLOCK)
                    yield max((offset - first) * ENTRY_SIZE_BYTES, READ_COST_BYTES)
            except OSError as error:
                log.error(
                    "%s cannot be read; the scrub tries it again in the next round: %s", queue.folder, error
                )
                yield READ_COST_BYTES

    def _walker(self, start: StartPoint) -> LogWalker:
        skips = skips_of(self._quarantine.ranges)
        return LogWalker(
            self._disk,
            self._folder,
            start.position,
            start.crc32c,
            skips=skips,
            block_size_bytes=BLOCK_SIZE_BYTES,
            unreadable_is_damage=True,
        )

    def _put_into_quarantine(self, start: StartPoint, problem: str) -> StartPoint:
        damage = self._checked.damage_from(start.position, problem)
        self._quarantine.add(damage)
        return StartPoint(damage.end_position, damage.previous_crc32c)
