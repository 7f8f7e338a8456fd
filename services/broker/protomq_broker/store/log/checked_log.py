"""What of the log is known to hold: nothing is given to anybody that was not checked since it came from the disk.

    known to hold   what this process appended itself, and what somebody walked: the start, a reader before its read, the scrub
    not known       what stood on the disk at the start;
                    pieces of which pages have left the page cache: they come from the disk again (where the kernel tells, Linux 6.5);
                    a segment whose file was written to by somebody else

Rules:
- A reader names the parts of the log that it is about to give, and learns of damage in them. A part that is not known to hold is
  walked first. The walk covers its piece, from the boundary before it, not the whole segment (`checked_segment.py`).
- This process may have walked or written the records of a piece whose pages have left since. Then it checks the chain of seals alone:
  that proves that the bytes are the same, without a look at the records.
- A part that is known to hold costs a reader 3 microseconds. It reads no byte, and asks the kernel whether the part is in the page cache
  still. It does not ask for what was appended in the last second.
- If the part has left the cache, its pieces are doubted before anything is read. So are the pieces around it that have left too. A read
  brings more into the cache than it wants, and that would pass for checked. What another program has read back is not noticed.
- What does not hold is checked twice before it is reported. What the disk cannot read does not hold,
  if something behind it does. Else it is an error of the disk, and passes to the reader.
- A reader may meet that behind the check: pages have left the cache, and cannot be read again. Then the file notes it, and the next look
  doubts all of it. So where the kernel does not say what has left, a bad sector is found all the same.
- Any thread may call. Walks are done one at a time. A question for what is known waits for none of them, except at the first read
  of a new segment.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.files.disk import Disk, read_readable

from .boundaries import BoundaryFiles
from .checked_segment import CheckedSegment, Stretch, stretch_of
from .positions import LogTail
from .recovery import DamagedRange, Resync, StartPoint, chain_at_end, find_resync, skips_of
from .seals import UNREADABLE, LogWalker, chain_holds
from .segment import SegmentFile, SegmentFolder

PIECE_SIZE_BYTES: Final = 1 << 20
"""Size of a piece, about: a reader of one message waits 0.6 ms until it is walked."""
SAVED_COUNT_MIN: Final = 16
"""Boundaries that are new before a segment's file is written again, and that it must have at all."""
LOOK_INTERVAL_MS: Final = 1_000
"""Between two looks whether a segment's file is untouched. What was appended behind the last one is not asked for."""
GAP_SIZE_MAX_BYTES: Final = 64 << 10
"""Between two parts of a read that are asked for together: its pages cost as much as another question."""
READ_AHEAD_BYTES: Final = 4 << 20
READ_BEHIND_BYTES: Final = 1 << 20
"""What the kernel may bring into the cache besides what is read; it reads 128 KiB ahead where nobody has set more."""
CLOCK_SLACK_NS: Final = 2_000_000_000
"""Between the time that an append was stamped with and the time that its file has: a slow write, a clock that is corrected."""


class SetAside(Protocol):
    """The parts of the log that nobody is given anything of."""

    @property
    def ranges(self) -> Sequence[DamagedRange]:
        """Rising and disjoint; replaced, never changed."""
        ...


class CheckedLog:
    """See the module's docstring."""

    def __init__(
        self,
        disk: Disk,
        folder: SegmentFolder,
        tail: Callable[[], LogTail],
        log_start: Callable[[], StartPoint],
        quarantine: SetAside,
        files: BoundaryFiles,
        monotonic_ms: Callable[[], int],
        written_ms: Callable[[], int],
    ) -> None:
        """`log_start`: where a walk of the whole log begins. `quarantine`: ranges in quarantine, which nobody gets. `written_ms`: when
        this process wrote to the log last, by the wall clock.
        """
        self._disk = disk
        self._folder = folder
        self._tail = tail
        self._log_start = log_start
        self._quarantine = quarantine
        self._files = files
        self._monotonic_ms = monotonic_ms
        self._written_ms = written_ms
        self._segments: dict[int, CheckedSegment] = {}
        self._lock = threading.Lock()
        self._appended: deque[tuple[int, int]] = deque()
        self.next_note = 0
        """An append that begins here or behind is to be noted."""
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
        self.next_note = tail.position

    def note_append(self, tail: LogTail) -> None:
        """The writer goes on at `tail`, before an append, which is at `next_note` or behind."""
        self._appended.append((tail.position, tail.crc32c))
        size = self._folder.segment_size_bytes
        self.next_note = min(tail.position + PIECE_SIZE_BYTES, tail.position // size * size + size)

    def note_walked(self, walked: Stretch) -> None:
        """Somebody has walked these appends: they hold."""
        with self._lock:
            self._segment_of(walked.start_position).note(walked, PIECE_SIZE_BYTES)

    def boundaries(self, base_position: int) -> list[tuple[int, int]]:
        """(position, CRC) of the boundaries in a segment, rising, as far as they are known. Waits for no walk. Any thread."""
        if self._lock.acquire(blocking=False):
            try:
                self._take_notes()
                self._segment_of(base_position)
            finally:
                self._lock.release()
        checked = self._segments.get(base_position)
        return self._files.read(base_position) if checked is None else checked.boundaries(1 << 63)

    def note_boundary(self, base_position: int, position: int, crc32c: int) -> None:
        """Somebody has walked a segment up to there. Any thread."""
        checked = self._segments.get(base_position)
        if checked is not None:
            checked.add(position, crc32c)

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

    def doubt(self, start: int, end: int) -> None:
        """Whatever was believed of [start, end): other bytes stand there now."""
        with self._lock:
            for checked in self._segments.values():
                if start < checked.end_position and checked.base_position < end:
                    checked.doubt(max(start, checked.base_position), min(end, checked.end_position))

    def find_damage(self, parts: Iterable[tuple[int, int]]) -> DamagedRange | None:
        """Damage in what a reader is about to give: parts (position, size) that begin within a segment each; None if they hold."""
        start = end = 0
        for position, size_bytes in parts:
            if end and self._is_beside(end, position):
                end = max(end, position + size_bytes)
                continue
            if end and (damage := self._confirm(start, end)) is not None:
                return damage
            start, end = position, position + size_bytes
        return self._confirm(start, end) if end else None

    def _is_beside(self, end: int, position: int) -> bool:
        """Whether what begins at `position` is better looked at together with what ends at `end`."""
        segment_size_bytes = self._folder.segment_size_bytes
        return (
            0 <= position - end <= GAP_SIZE_MAX_BYTES
            and position // segment_size_bytes == (end - 1) // segment_size_bytes
        )

    def damage_from(self, position: int, reason: str) -> DamagedRange:
        """The range that does not hold, from `position` on. Raises CorruptLogError if that is behind the end of the log.

        Raises OSError if it cannot be read, and nothing behind it holds: that may be the whole disk, and may pass.
        """
        tail = self._tail()
        if position >= tail.position:
            raise CorruptLogError(
                self._folder.path_at(position), position, f"the log ends at {tail.position}"
            )
        self._doubt_all(position, position)
        found = find_resync(self._disk, self._folder, position, unreadable_is_damage=True)
        self._doubt_all(position, tail.position if found is None else found.position)
        if found is None or found.position > tail.position:
            if reason == UNREADABLE:
                raise OSError(errno.EIO, os.strerror(errno.EIO), self._folder.path_at(position))
            found = Resync(tail.position, tail.crc32c)
        return DamagedRange(position, found.position, found.crc32c, reason)

    # Parts.

    def _confirm(self, start: int, end: int) -> DamagedRange | None:
        """Damage in [start, end), a part of one segment; None if it holds."""
        file = self._folder.at(start)
        if file is None:
            return None  # deleted, or missing: there is nothing to be given
        end = min(end, file.end_position, max(start + 1, self._tail().position))
        checked = self._segments.get(file.base_position)
        if checked is None:
            with self._lock:
                self._take_notes()
                checked = self._segment_of(file.base_position)
        # While somebody walks, the notes wait: later will do.
        elif self._appended and self._lock.acquire(blocking=False):
            try:
                self._take_notes()
            finally:
                self._lock.release()
        now_ms = self._monotonic_ms()
        if now_ms - checked.looked_ms >= LOOK_INTERVAL_MS:
            checked.looked_ms, checked.looked_position = now_ms, self._tail().position
            if not self._is_untouched(checked, file) or file.failed_read_count != checked.failed_read_count:
                checked.failed_read_count = file.failed_read_count
                checked.doubt(checked.base_position, checked.end_position)
        if start < checked.looked_position and not self._is_cached(file, start, end):
            doubt_count = checked.doubt_count
            self._doubt_lost(checked, file, start, end)
            if checked.doubt_count == doubt_count:  # it has come back meanwhile
                checked.doubt(start, end)
            self._doubt_lost(checked, file, start - READ_BEHIND_BYTES, start)
            self._doubt_lost(checked, file, end, end + READ_AHEAD_BYTES)
        if checked.pieces.first_unknown(start, end) is None:
            return None
        with self._lock:
            return self._walk(checked, start, end)

    @staticmethod
    def _is_cached(file: SegmentFile, start: int, end: int) -> bool:
        return file.is_cached(start - file.base_position, end - start)

    def _doubt_lost(self, checked: CheckedSegment, file: SegmentFile, start: int, end: int) -> None:
        """Doubts the pieces with a part in [start, end) of which something has left the page cache."""
        start = max(start, checked.base_position)
        end = min(end, checked.end_position, self._tail().position)
        for first, behind in checked.pieces.good_parts(start, end):
            if not self._is_cached(file, first, behind):
                checked.doubt(first, behind)

    def _doubt_all(self, start: int, end: int) -> None:
        """Doubts [start, end] and the rest of its last segment: somebody reads there who does not check."""
        for checked in list(self._segments.values()):
            if start < checked.end_position and checked.base_position <= end:
                checked.doubt(max(start, checked.base_position), checked.end_position)

    def _is_untouched(self, checked: CheckedSegment, file: SegmentFile) -> bool:
        """Whether nobody but this process has written to the file."""
        written_ns, before_ns = file.written_ns(), checked.written_ns
        checked.written_ns = written_ns
        if written_ns == before_ns:
            return True
        if not checked.is_growing:
            return False
        checked.is_growing = self._tail().position < file.end_position
        return written_ns <= self._written_ms() * 1_000_000 + CLOCK_SLACK_NS

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
                # What was asked for is put into quarantine; behind that, nobody has looked.
                if piece_end is None and at.position < checked.end_position:
                    checked.add(at.position, at.crc32c)
                    piece_end = at.position
                checked.trust(first, first + 1 if piece_end is None else piece_end)
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
        """Walks a piece, up to `end` at least or as far as it goes. There the chain must be as it was when the boundary was made."""
        if not checked.is_hinted and self._holds_still(checked, at, piece_end):
            return None
        walker, problem = self._walked(
            checked, at, min(end, piece_end.position), piece_end.position
        )
        if problem:
            return self.damage_from(walker.position, problem)
        if walker.position == piece_end.position and piece_end.crc32c not in (None, walker.crc32c):
            checked.doubt(checked.base_position, checked.end_position)
            assert piece_end.crc32c is not None
            reason = "these appends are not those that stood here"
            return DamagedRange(at.position, piece_end.position, piece_end.crc32c, reason)
        return None

    def _holds_still(
        self, checked: CheckedSegment, at: StartPoint, piece_end: StartPoint
    ) -> bool:
        """Whether a piece, whose boundaries this process has made itself when its records were walked or written, has the same bytes.

        The chain of seals from the one boundary to the other shows it, at a third of what a walk costs. If not, a walk says what is wrong.
        """
        file = self._folder.at(at.position)
        if at.crc32c is None or piece_end.crc32c is None or file is None:
            return False
        doubt_count = checked.doubt_count
        size_bytes = piece_end.position - at.position
        data, _ = read_readable(self._disk, file.fd, size_bytes, at.position - file.base_position)
        if len(data) < size_bytes or not chain_holds(
            data, at.position, at.crc32c, piece_end.crc32c
        ):
            return False
        stretch = Stretch(at.position, at.crc32c, piece_end.position, piece_end.crc32c)
        checked.note(stretch, PIECE_SIZE_BYTES, doubt_count)
        return True

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
                unreadable_is_damage=True,
            )
            doubt_count = checked.doubt_count
            for block in walker:
                checked.note(stretch_of(block), PIECE_SIZE_BYTES, doubt_count)
                doubt_count = checked.doubt_count
                if walker.position >= wanted_end:
                    break
            tries -= 1
            if walker.position >= wanted_end or not tries:
                return walker, "" if walker.position >= wanted_end else walker.problem
            at = StartPoint(walker.position, walker.crc32c)

    def _skip(self, at: StartPoint) -> StartPoint:
        """Behind what is in quarantine already."""
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
        before, file = (
            self._segments.get(base - self._folder.segment_size_bytes),
            self._folder.at(base - 1),
        )
        if before is not None and file is not None:
            self._doubt_lost(before, file, base - READ_BEHIND_BYTES, base)
        return chain_at_end(file, unreadable_is_damage=True)
