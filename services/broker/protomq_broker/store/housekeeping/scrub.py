"""Reads old segments again, slowly, so that it finds damage before a consumer does.

A start proves only the log behind the checkpoint. The scrub walks the part before it, a little at a time and round by round, and
checks seals, structure and file sizes. It puts a part that fails twice in a row into quarantine: readers get an error, and continue behind
it.

    a round   from the oldest segment to what is synced of the newest; the next begins ROUND_INTERVAL_MS later at the earliest

Readers do not wait for the scrub: what they ask for is checked first (`checked_log.py`). It finds damage in what nobody asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from protomq_broker.store.files.disk import Disk
from protomq_broker.store.log.checked_log import CheckedLog
from protomq_broker.store.log.checked_segment import stretch_of
from protomq_broker.store.log.recovery import StartPoint, skips_of
from protomq_broker.store.log.seals import LogWalker
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.queues.quarantine import Quarantine

log = logging.getLogger(__name__)

ROUND_INTERVAL_MS: Final = 24 * 3_600_000
BLOCK_SIZE_BYTES: Final = 256 << 10
"""Size of a block. A walk of it takes 0.2 ms, the longest that other threads wait."""


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
    ) -> None:
        """`log_start` returns where a walk of the whole log begins. `checked` gets the parts that are valid, `quarantine` the damaged ones.
        """
        self._disk = disk
        self._folder = folder
        self._size_bytes_per_s = size_bytes_per_s
        self._log_start = log_start
        self._quarantine = quarantine
        self._checked = checked
        self._next: StartPoint | None = None  # None between two rounds
        self._round_due_ms = 0
        self._at_ms: int | None = None
        self._credit_bytes = 0

    def step(self, now_ms: int, end_position: int) -> None:
        """Walks on as far as the rate allows. Everything before `end_position` is synced. `now_ms`: monotonic time."""
        passed_ms = 0 if self._at_ms is None else now_ms - self._at_ms
        self._at_ms = now_ms
        if self._next is None:
            if now_ms < self._round_due_ms:
                return
            self._next = self._log_start()
            self._round_due_ms = now_ms + ROUND_INTERVAL_MS
            self._credit_bytes = 0
        earned = passed_ms * self._size_bytes_per_s // 1000
        self._credit_bytes = min(self._credit_bytes + earned, self._size_bytes_per_s)
        if self._next.position < self._folder.first_position:  # deleted meanwhile
            self._next = self._log_start()
        try:
            self._walk(self._next, end_position)
        except OSError as error:
            log.error(
                "old segments cannot be read; the scrub tries them again in the next round: %s", error
            )
            self._next = None

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
            self._next = None  # the round is over

    def _walker(self, start: StartPoint) -> LogWalker:
        skips = skips_of(self._quarantine.ranges)
        return LogWalker(
            self._disk,
            self._folder,
            start.position,
            start.crc32c,
            skips=skips,
            block_size_bytes=BLOCK_SIZE_BYTES,
        )

    def _put_into_quarantine(self, start: StartPoint, problem: str) -> StartPoint:
        damage = self._checked.damage_from(start.position, problem)
        self._quarantine.add(damage)
        return StartPoint(damage.end_position, damage.previous_crc32c)
