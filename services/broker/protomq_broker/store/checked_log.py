"""What of the log is known to hold: nothing is given to anybody that was not checked since it came from the disk.

    known to hold   what this process appended itself, and what somebody walked: the start, a reader before its read, the scrub
    not known       what stood on the disk at the start;
                    pieces of which pages have left the page cache: they come from the disk again (where the kernel tells, Linux 6.5);
                    a segment whose file was written to by somebody else

Rules:
- A reader names the parts of the log that it is about to give, and is told of damage in them. What is not known to hold is walked
  first: the piece in which it stands, from the boundary in front of it, not the whole segment (`checked_segment.py`).
- What is known costs a reader 3 microseconds: no byte of it is read, the kernel is asked whether the part is in the page cache still. What
  was appended in the last second need not ask: no read can have brought that from the disk yet.
- If not, or once a second, the kernel is asked for the whole segment, before anything of it is read: a read brings more into the cache
  than it wants, and what came so would pass for checked.
- What does not hold is looked at twice before anybody is told.
- Any thread may call. Walks are done one at a time; who asks for what is known waits for none of them, but for the first read of a
  segment that is new.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from .boundaries import BoundaryFiles
from .checked_segment import CheckedSegment, Stretch, stretch_of
from .disk import Disk
from .errors import CorruptLogError
from .positions import LogTail
from .quarantine import Quarantine
from .recovery import DamagedRange, Resync, StartPoint, chain_at_end, find_resync, skips_of
from .seals import LogWalker
from .segment import SegmentFile, SegmentFolder

PIECE_SIZE_BYTES: Final = 1 << 20
"""Of a piece, about: so much is walked in 0.6 ms for a reader of one message."""
SAVED_COUNT_MIN: Final = 16
"""Boundaries that are new before a segment's file is written again, and that it must have at all."""
LOOK_INTERVAL_MS: Final = 1_000
"""Between two questions to the kernel about one segment. After a pause the first read asks: what left the cache meanwhile is noticed."""
CLOCK_SLACK_NS: Final = 2_000_000_000
"""Between the time that an append was stamped with and the time that its file has: a slow write, a clock that is corrected."""


class CheckedLog:
    """See the module's docstring."""

    def __init__(
        self,
        disk: Disk,
        folder: SegmentFolder,
        tail: Callable[[], LogTail],
        log_start: Callable[[], StartPoint],
        quarantine: Quarantine,
        files: BoundaryFiles,
        monotonic_ms: Callable[[], int],
    ) -> None:
        """`log_start`: where a walk of the whole log begins; `quarantine`: what is set aside already, and is given to nobody."""
        self._disk = disk
        self._folder = folder
        self._tail = tail
        self._log_start = log_start
        self._quarantine = quarantine
        self._files = files
        self._monotonic_ms = monotonic_ms
        self._segments: dict[int, CheckedSegment] = {}
        self._lock = threading.Lock()
        self._appended: deque[tuple[int, int]] = deque()
        self._next_note = 0
        self._own_from = 1 << 63  # segments that start here or behind are ours from end to end

    # What is known.

    def begin(self, walked: Iterable[Stretch]) -> None:
        """At the start: recovery has walked these. What follows the end of the log is this process's own."""
        tail = self._tail()
        self._own_from = tail.position
        for stretch in walked:
            self._segment_of(stretch.start_position).note(stretch, PIECE_SIZE_BYTES)
        segment = self._folder.at(tail.position)
        if segment is not None:
            checked = self._segment_of(tail.position)
            checked.add(tail.position, tail.crc32c)
            checked.trust(tail.position, segment.end_position)
        self._next_note = tail.position

    def note_append(self, tail: LogTail) -> None:
        """The writer goes on at `tail`, in front of an append."""
        if tail.position >= self._next_note:
            self._appended.append((tail.position, tail.crc32c))
            size = self._folder.segment_size_bytes
            self._next_note = min(
                tail.position + PIECE_SIZE_BYTES, tail.position // size * size + size
            )

    def note_walked(self, walked: Stretch) -> None:
        """Somebody has walked these appends: they hold."""
        with self._lock:
            self._segment_of(walked.start_position).note(walked, PIECE_SIZE_BYTES)

    def save(self, flushed_position: int, *, is_last: bool = False) -> None:
        """Writes the boundaries of segments of which many are new, or, with `is_last`, of all, as far as the log is flushed."""
        with self._lock:
            self._take_notes()
            segments = list(self._segments.values())
        for checked in segments:
            new = len(checked.pieces.positions) - checked.saved_count
            if new <= 0 or new < (1 if is_last else SAVED_COUNT_MIN):
                continue
            boundaries = checked.boundaries(flushed_position)
            if len(boundaries) >= SAVED_COUNT_MIN:
                self._files.write(checked.base_position, boundaries)
                checked.saved_count = len(checked.pieces.positions)

    # Any thread.

    def find_damage(self, parts: Iterable[tuple[int, int]]) -> DamagedRange | None:
        """Damage in parts of the log (position, size), each within a segment and a reader's to be given; None if they hold."""
        start = end = 0  # what the last part has shown to hold
        for position, size_bytes in parts:
            if start <= position and position + size_bytes <= end:
                continue
            found = self._confirm(position, position + size_bytes)
            if isinstance(found, DamagedRange):
                return found
            start, end = found
        return None

    def damage_from(self, position: int, reason: str) -> DamagedRange:
        """The range that does not hold, from `position` on. Raises CorruptLogError if that is behind the end of the log."""
        tail = self._tail()
        if position >= tail.position:
            raise CorruptLogError(
                self._folder.path_at(position), position, f"the log ends at {tail.position}"
            )
        found = find_resync(self._disk, self._folder, position)
        if found is None or found.position > tail.position:
            found = Resync(tail.position, tail.crc32c)
        return DamagedRange(position, found.position, found.crc32c, reason)

    # Parts.

    def _confirm(self, start: int, end: int) -> tuple[int, int] | DamagedRange:
        """A range of the log around [start, end) that holds, or damage in it."""
        file = self._folder.at(start)
        if file is None:
            return start, end  # deleted, or missing: there is nothing to be given
        checked = self._segments.get(file.base_position)
        if checked is None:
            with self._lock:
                self._take_notes()
                checked = self._segment_of(file.base_position)
        elif self._appended and self._lock.acquire(
            blocking=False
        ):  # else somebody walks: later will do
            try:
                self._take_notes()
            finally:
                self._lock.release()
        now_ms = self._monotonic_ms()
        around = checked.pieces.around(start, end)
        if now_ms - checked.looked_ms >= LOOK_INTERVAL_MS or (
            around[0] < checked.looked_position
            and not file.is_cached(around[0] - file.base_position, around[1] - around[0])
        ):
            self._look(checked, file, now_ms)
        pieces = checked.pieces
        if pieces.first_unknown(start, end) is None:
            return pieces.around(start, end)
        with self._lock:
            damage = self._walk(checked, start, end)
        return (start, end) if damage is None else damage

    def _look(self, checked: CheckedSegment, file: SegmentFile, now_ms: int) -> None:
        """Asks the kernel what of a segment can be what it was when it was found to hold."""
        tail_position = self._tail().position
        checked.looked_ms, checked.looked_position = now_ms, tail_position
        lost = None
        if self._is_untouched(checked, file):
            lost = checked.pieces.lost(
                checked.base_position,
                min(tail_position, checked.end_position),
                lambda start, end: file.is_cached(start - file.base_position, end - start),
            )
        if lost != []:
            with self._lock:
                checked.distrust(lost)

    def _is_untouched(self, checked: CheckedSegment, file: SegmentFile) -> bool:
        """Whether nobody but this process has written to the file."""
        written_ns, before_ns = file.written_ns(), checked.written_ns
        checked.written_ns = written_ns
        if written_ns == before_ns:
            return True
        if not checked.is_growing:
            return False
        tail = self._tail()
        checked.is_growing = tail.position < file.end_position
        return written_ns <= tail.store_time_ms * 1_000_000 + CLOCK_SLACK_NS

    def _walk(self, checked: CheckedSegment, start: int, end: int) -> DamagedRange | None:
        """Walks what of [start, end) is not known to hold; the first damage in it."""
        while checked.base_position in self._folder.files:  # else it was deleted meanwhile
            pieces = checked.pieces
            index = pieces.first_unknown(start, end)
            if index is None:
                break
            first, piece_end = pieces.positions[index], pieces.end_of(index)
            crc = pieces.crcs[index] if index else self._chain_at(first)
            at = self._skip(StartPoint(first, crc))
            if at.position >= (end if piece_end is None else piece_end):
                checked.trust(first, first + 1)  # all of it is set aside
                continue
            if piece_end is None:
                damage = self._walk_open(checked, at, end)
            else:
                damage = self._walk_piece(
                    checked, at, end, StartPoint(piece_end, pieces.crcs[index + 1])
                )
            if damage is None:
                continue
            if not checked.is_hinted:
                return damage
            checked.forget_hints()  # and again, from the head of the segment
        return None

    def _walk_open(self, checked: CheckedSegment, at: StartPoint, end: int) -> DamagedRange | None:
        """Walks on behind the last boundary of a segment, up to `end` at least."""
        tail = self._tail()
        walker, problem = self._walked(checked, at, end, checked.end_position)
        if problem:
            return self.damage_from(walker.position, problem)
        if walker.position >= tail.position:
            checked.trust(walker.position, checked.end_position)  # what follows is our own
        return None

    def _walk_piece(
        self, checked: CheckedSegment, at: StartPoint, end: int, piece_end: StartPoint
    ) -> DamagedRange | None:
        """Walks a piece, up to `end` at least or as far as it goes: then the chain must be where it was when the boundary was made."""
        walker, problem = self._walked(
            checked, at, min(end, piece_end.position), piece_end.position
        )
        if problem:
            return self.damage_from(walker.position, problem)
        if walker.position == piece_end.position and piece_end.crc32c not in (None, walker.crc32c):
            checked.distrust()
            assert piece_end.crc32c is not None
            reason = "these appends are not those that stood here"
            return DamagedRange(at.position, piece_end.position, piece_end.crc32c, reason)
        return None

    def _walked(
        self, checked: CheckedSegment, at: StartPoint, wanted_end: int, end_position: int
    ) -> tuple[LogWalker, str]:
        """(a walker that got to `wanted_end`, or why it did not, twice in a row)."""
        tries = 2
        while True:
            walker = LogWalker(
                self._disk,
                self._folder,
                at.position,
                at.crc32c,
                skips=skips_of(self._quarantine.ranges),
                end_position=end_position,
            )
            for block in walker:
                checked.note(stretch_of(block), PIECE_SIZE_BYTES)
                if walker.position >= wanted_end:
                    break
            tries -= 1
            if walker.position >= wanted_end or not tries:
                return walker, "" if walker.position >= wanted_end else walker.problem
            at = StartPoint(walker.position, walker.crc32c)

    def _skip(self, at: StartPoint) -> StartPoint:
        """Behind what is set aside already."""
        for damage in self._quarantine.ranges:
            if damage.start_position <= at.position < damage.end_position:
                at = StartPoint(damage.end_position, damage.previous_crc32c)
        return at

    def _take_notes(self) -> None:
        """Enters the boundaries that the writer has left."""
        while self._appended:
            position, crc = self._appended.popleft()
            if self._folder.at(position) is not None:
                self._segment_of(position).add(position, crc)

    def _segment_of(self, position: int) -> CheckedSegment:
        """What is known of the segment; the caller holds the lock, or is alone."""
        size = self._folder.segment_size_bytes
        base = position - position % size
        checked = self._segments.get(base)
        if checked is None:
            file = self._folder.files.get(base)
            written_ns = file.written_ns() if file is not None else 0
            checked = CheckedSegment(base, base + size, written_ns)
            checked.is_growing = base <= self._tail().position < base + size
            if base >= self._own_from:
                checked.trust(base, base + size)
            else:
                checked.take_hints(
                    [b for b in self._files.read(base) if base < b[0] <= self._own_from]
                )
            known = self._folder.files
            kept = {b: c for b, c in self._segments.items() if b in known}
            self._segments = {**kept, base: checked}
        return checked

    def _chain_at(self, base: int) -> int | None:
        """The CRC with which the chain comes to a segment; None if nobody knows it."""
        if base == 0:
            return 0
        if base == self._folder.first_position:
            return self._log_start().crc32c
        return chain_at_end(self._folder.at(base - 1))
