"""The commit log: appends groups of records, each group closed by one seal.

Rules:
- One writer: `position_for` and `append` are called on the writer thread only.
- An append is one positioned write. `tail` moves only when all of it is written. After a write that failed or fell short, its place is
  zeroed. If that fails too, the log has failed: nothing is ever appended behind half a record.
- No append crosses segments: what is left of a segment is filled with padding, which has a seal of its own. Every segment begins with an
  empty append, so that the chain of CRCs can be taken up there when older segments are gone.
- A failed log stays failed until a restart has recovered it.

`positions.py` has where it stands.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final

from protomq.wire.hashing import Octets
from protomq.wire.log_walk import APPEND_SIZE_MAX_BYTES, WalkedBlock
from protomq.wire.record import SEAL_SIZE_BYTES, seal_of
from protomq_broker.store.errors import AppendTooLargeError, DiskFullError, StoreFailedError
from protomq_broker.store.files.disk import DISK_FULL_ERRNOS, Disk, DiskUsage, write_fully

from .positions import LogTail, Positions
from .seals import encode_padding
from .segment import SegmentFile, SegmentFolder

_NO_SEGMENT_ERRNOS: Final = DISK_FULL_ERRNOS | {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Why a segment cannot be created for the moment: the disk is sound."""

CLOSING_SIZE_BYTES: Final = 6 + SEAL_SIZE_BYTES
"""What must stay free behind an append: a padding field and its seal. The smallest padding has two octets. With four free ones a repair can
make it end in any CRC (`crc_forge`), so that what stands behind it keeps its own."""

ZEROS_SIZE_BYTES: Final = 1 << 20


class Reserve(IntEnum):
    """Who may use the last part of the log's space when the disk gives no more. The value: how many quarters they may not use."""

    CARRIED = 0
    """What must be appended before segments can be deleted: without it a full disk could never be freed."""
    STATE = 2
    """Other records of the broker's own."""
    MESSAGES = 4
    """What clients send."""


FOREIGN_WRITE_SIZE_MAX_BYTES: Final = 1 << 20
"""Most bytes of another log in one write. For a larger one the kernel may look for larger pieces of memory, and that cost more than all the
rest."""
RESERVE_SIZE_MAX_BYTES: Final = 32 << 20
"""Half of it holds what is carried forward of 100,000 topics or a million offsets."""
STATE_ROOM_SEGMENTS: Final = 16
"""Where so many have room, records of the broker's own begin one, however full a large disk is: no consumer gets further without them."""


class CommitLog:
    """See the module's docstring."""

    def __init__(
        self,
        disk: Disk,
        folder: SegmentFolder,
        positions: Positions,
        *,
        epoch: int = 0,
        keep_front: Callable[[int], bool] | None = None,
        refuse_ratio: float = 1.0,
    ) -> None:
        """`keep_front` notes durably where the log begins, before segments go; False if the disk is too full for that.

        `refuse_ratio`: on a disk that is as full, no segment is begun for messages.
        """
        self.folder = folder
        self.tail = positions.tail
        """Where the writer goes on: ahead of the published tail while an append is under way."""
        self.epoch = epoch
        """Of the next append."""
        self._foreign_written_ms = 0  # when the last bytes of another leader were written here
        self.failure = ""
        """Why nothing is appended any more; "" as long as the log is well."""
        self.has_lost_sync = False
        """Whether an fsync has failed that may have reported appends: what is written is not to be called synced any more."""
        self.append_size_max_bytes = min(
            APPEND_SIZE_MAX_BYTES,
            folder.segment_size_bytes - 2 * SEAL_SIZE_BYTES - CLOSING_SIZE_BYTES,
        )
        """The most that one append takes, without its seal."""
        self._reserve_bytes = min(RESERVE_SIZE_MAX_BYTES, folder.segment_size_bytes // 2)
        self._refuse_ratio = refuse_ratio
        self._disk = disk
        self._positions = positions
        self._pwritev = disk.pwritev
        self._segment: SegmentFile | None = folder.at(self.tail.position)
        self._keep_front = keep_front or (lambda _: True)
        self._create_lock = threading.Lock()

    def position_for(self, size_bytes: int, reserve: Reserve = Reserve.MESSAGES) -> int:
        """Where an append of `size_bytes` will start; goes on to the next segment when it does not fit into this one.

        The last part of the last segment is a reserve: entered only by whom `reserve` allows it, or when the next segment is there.
        Raises DiskFullError, StoreFailedError, AppendTooLargeError.
        """
        if size_bytes > self.append_size_max_bytes:
            raise AppendTooLargeError(size_bytes, self.append_size_max_bytes)
        segment, position = self._segment, self.tail.position
        if (
            segment is not None
            and position != segment.base_position
            and position + size_bytes + SEAL_SIZE_BYTES + CLOSING_SIZE_BYTES <= segment.end_position
        ):
            if position + size_bytes > segment.end_position - self._reserve_bytes:
                self._keep_reserve(segment, position + size_bytes, reserve)
            return position
        self._roll(size_bytes, reserve)
        return self.tail.position

    def date_head(self, now_ms: int) -> None:
        """The head of a log without an append will say when it was begun. So logs that were begun apart share not even that."""
        if not self.tail.crc32c:
            self.tail = self.tail._replace(store_time_ms=now_ms)

    def append(self, parts: Sequence[Octets], record_count: int, store_time_ms: int) -> LogTail:
        """Writes the parts and their seal at the tail and moves it. The caller has asked `position_for` first.

        Raises DiskFullError or StoreFailedError: then nothing of it is in the log.
        """
        if self.failure:
            raise StoreFailedError(self.failure)
        tail, segment = self.tail, self._segment
        assert segment is not None
        position = tail.position
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        seal, crc = seal_of(
            parts,
            size,
            tail.crc32c,
            self.epoch,
            position,
            record_count,
            store_time_ms,
            self._positions.flushed,
        )
        size += SEAL_SIZE_BYTES
        at = position - segment.base_position
        try:
            written = self._pwritev(segment.fd, [*parts, seal], at)  # type: ignore[list-item]  # Arrays are buffers.
            if written != size:
                whole = b"".join((*map(bytes, parts), seal))
                write_fully(self._disk, segment.fd, memoryview(whole)[written:], at + written)
        except OSError as error:
            self._take_back(tail, size, error)
        self.tail = tail = LogTail(position + size, crc, store_time_ms)
        return tail

    def append_verbatim(self, block: WalkedBlock, now_ms: int) -> LogTail:
        """Writes appends of another log at the tail, which is where they stand there, and moves it. They lie within one segment.

        The caller has walked them from the tail's CRC on. Raises DiskFullError or StoreFailedError: then nothing of them is in the log.
        """
        if self.failure:
            raise StoreFailedError(self.failure)
        tail, segment = self.tail, self._segment
        position = tail.position
        assert block.base_position == position
        if segment is None or position == segment.end_position:
            segment = self._segment = self._following(position)
        assert position + block.size_bytes <= segment.end_position
        self._foreign_written_ms = now_ms
        data = memoryview(block.data)[: block.size_bytes]
        try:
            for start in range(0, len(data), FOREIGN_WRITE_SIZE_MAX_BYTES):
                part = data[start : start + FOREIGN_WRITE_SIZE_MAX_BYTES]
                write_fully(self._disk, segment.fd, part, position - segment.base_position + start)
        except OSError as error:
            self._take_back(tail, block.size_bytes, error)
        last = block.seals[-1]
        self.epoch = last.epoch
        self.tail = tail = LogTail(last.end_position, last.crc32c, last.store_time_ms)
        return tail

    def begin_at(self, position: int) -> None:
        """A log without an append begins at this multiple of the size of a segment. What was made for it elsewhere goes. Raises OSError."""
        assert position % self.folder.segment_size_bytes == 0
        with self._create_lock:
            self._keep_front(position)
            self.folder.remove([base for base in self.folder.files if base != position])
            self._segment = self.folder.files.get(position)
            self.tail = LogTail(position, 0, 0)

    def take_back(self, tail: LogTail, reason: str) -> None:
        """Undoes the last append, before anybody learned of it, and stops the log for good; `tail` is what stood before."""
        segment = self._segment
        assert segment is not None
        assert segment.base_position <= tail.position <= self.tail.position
        size = self.tail.position - tail.position
        self.tail = tail
        self.fail(reason)
        try:
            self._write_zeros(segment, tail.position, size)
        except OSError as error:
            self.failure += f"; then the append could not be taken back: {error}"

    def fail_sync(self, reason: str) -> None:
        """As `fail`; and something that was written may not be on stable storage: no flush reports success any more."""
        self.has_lost_sync = True
        self.fail(reason)

    def fail(self, reason: str) -> None:
        """Stops all appends for good; any thread. The first reason stays."""
        if not self.failure:
            self.failure = reason

    def prepare_next_segment(self) -> bool:
        """Makes the segment behind the current one if it is not there, so that a roll need not wait; any thread. False on a full disk."""
        segment = self._segment
        try:
            self._new_segment_at(self.tail.position if segment is None else segment.end_position, Reserve.MESSAGES)
        except (OSError, DiskFullError):
            return False
        return True

    def lost_path(self) -> str:
        """The path of the segment that is being written, if no file, or another one, has that name now; "" if all is well. Any thread."""
        segment = self._segment
        if segment is None or self._disk.has_name(segment.fd, segment.path):
            return ""
        return segment.path if segment is self._segment else ""

    @property
    def written_ms(self) -> int:
        """When something was last written, by the wall clock; any thread."""
        return max(self.tail.store_time_ms, self._foreign_written_ms)

    @property
    def has_next_segment(self) -> bool:
        """Whether the segment behind the current one is there; any thread."""
        segment = self._segment
        return segment is not None and segment.end_position in self.folder.files

    def is_next_segment_due(self) -> bool:
        """Whether the current segment is more than half full, but for the reserve, and has no successor."""
        segment, position = self._segment, self.tail.position
        if segment is None or position < segment.base_position + (segment.size_bytes - self._reserve_bytes) // 2:
            return False
        return segment.end_position not in self.folder.files

    def start_without(self, position: int) -> int:
        """Where the log would begin if the segments that end at or below `position` were removed; any thread."""
        position = min(position, self.tail.position, self._positions.flushed)
        first = self.folder.first_position
        # Lost segments between them are as old as these.
        for segment in self.folder.files.values():
            if segment.end_position <= position:
                first = segment.end_position
        return first

    def remove_segments_below(self, position: int) -> list[SegmentFile]:
        """Removes the segments that end at or below `position`, but never the one being written; any thread. Returns them."""
        with self._create_lock:
            position = min(position, self.tail.position, self._positions.flushed)
            current = self._segment
            removed = [
                segment
                for segment in self.folder.files.values()
                if segment.end_position <= position and segment is not current
            ]
            removed.sort(key=lambda segment: segment.base_position)
            if removed:
                front = removed[-1].end_position
                is_kept = self._keep_front(front)
                self.folder.remove([segment.base_position for segment in removed])
                if not is_kept:  # now there is space
                    self._keep_front(front)
            return removed

    def segment_to_heal(self, position: int, *, in_backups: bool) -> SegmentFile | None:
        """The segment in which a position lies, made if its file is missing; None if it is deleted. Any thread. Raises OSError.

        `in_backups`: what is written there is written into the backups, too, that have linked it.
        """
        with self._create_lock:
            if position < self.folder.first_position:
                return None
            segment = self.folder.at(position)
            if segment is None:
                return self.folder.create(position - position % self.folder.segment_size_bytes)
            if in_backups or not segment.is_shared:
                return segment
            if segment is self._segment:
                raise OSError(errno.EBUSY, "a backup has linked it, and no other segment is begun", segment.path)
            try:
                return self.folder.unshared(segment)
            except OSError as error:
                if self.folder.at(position) is not segment:
                    self.fail_sync(f"an fsync of {self.folder.path} failed: {error}")
                raise

    def is_flushed(self, segment: SegmentFile) -> bool:
        """Whether all of a segment is on stable storage, and nothing will be appended to it. Any thread."""
        return segment is not self._segment and segment.end_position <= self._positions.flushed

    def heal_in_copy(self, segment: SegmentFile, data: memoryview, position: int, damaged: Sequence[tuple[int, int]]) -> None:
        """A new file with `data` at a position of the log takes the place of a segment whose file does not take it. Any thread.

        `damaged`: parts of the segment in quarantine, by their offsets in it. Raises OSError, also if the segment is still written to.
        """
        with self._create_lock:
            if self.folder.at(position) is not segment:
                return  # deleted meanwhile
            if not self.is_flushed(segment):
                raise OSError(errno.EBUSY, "it takes no healed bytes, and is still being written: it can be copied later", segment.path)
            try:
                self.folder.healed_copy(segment, data, position - segment.base_position, damaged)
            except OSError as error:
                if self.folder.at(position) is not segment:
                    self.fail_sync(f"an fsync of {self.folder.path} failed: {error}")
                raise

    def close(self) -> None:
        """Lets go of the files; nothing can be appended any more."""
        self.fail("the store is closed")
        self._segment = None
        self.folder.files = {}

    def _roll(self, size_bytes: int, reserve: Reserve) -> None:
        """Makes the tail stand in a segment with room for `size_bytes`, behind its head."""
        if self.failure:
            raise StoreFailedError(self.failure)
        segment, tail = self._segment, self.tail
        if segment is None or tail.position == segment.end_position:
            following = self._following(tail.position, reserve)
        elif tail.position == segment.base_position:
            following = segment
            self._keep_reserve(segment, segment.base_position + SEAL_SIZE_BYTES + size_bytes, reserve)
        else:
            following = self._following(segment.end_position, reserve)  # first: a full disk changes nothing
            gap = segment.end_position - tail.position - SEAL_SIZE_BYTES
            self._append_empty(encode_padding(gap))
        self._segment = following
        self._append_empty(b"")
        assert (
            self.tail.position + size_bytes + SEAL_SIZE_BYTES + CLOSING_SIZE_BYTES
            <= following.end_position
        )

    def _following(self, base_position: int, reserve: Reserve = Reserve.CARRIED) -> SegmentFile:
        """The segment in which the writer continues, or will."""
        try:
            return self._new_segment_at(base_position, reserve)
        except OSError as error:
            if error.errno in _NO_SEGMENT_ERRNOS:
                raise DiskFullError(f"no space for the next segment: {error}") from error
            self.fail(f"the next segment cannot be created: {error}")
            raise StoreFailedError(self.failure) from error

    def _keep_reserve(self, segment: SegmentFile, end_position: int, reserve: Reserve) -> None:
        """Makes sure that there is a segment behind this one, if an append up to `end_position` would enter the reserve. Raises what
        `position_for` raises.
        """
        if end_position > segment.end_position - self._reserve_bytes * reserve // Reserve.MESSAGES:
            self._following(segment.end_position, reserve)

    def _append_empty(self, data: bytes) -> None:
        """Padding, or the head of a segment."""
        self.append((data,), 0, self.tail.store_time_ms)

    def _new_segment_at(self, base_position: int, reserve: Reserve) -> SegmentFile:
        """The segment, which is made if it is not there. Raises OSError, DiskFullError: the rest of the disk is kept for others."""
        with self._create_lock:
            segment = self.folder.files.get(base_position)
            if segment is not None:
                return segment
            if reserve:
                self._keep_space(self._disk.usage(self.folder.path), reserve)
            return self.folder.create(base_position)

    def _keep_space(self, usage: DiskUsage, reserve: Reserve) -> None:
        """Raises DiskFullError if what is left of the disk is kept for others."""
        limit = 1.0 - (1.0 - self._refuse_ratio) * reserve / Reserve.MESSAGES
        what = "messages"
        if reserve is not Reserve.MESSAGES:
            what = "records of the broker's own"
            if usage.free_bytes >= STATE_ROOM_SEGMENTS * self.folder.segment_size_bytes:
                return
        if usage.used_ratio >= limit:
            raise DiskFullError(f"the disk is {usage.used_ratio:.1%} full, and from {limit:.0%} on no segment is begun for {what}")

    def _take_back(self, tail: LogTail, size: int, error: OSError) -> None:
        """A write failed, perhaps half-way: clears its place and raises."""
        if error.errno not in DISK_FULL_ERRNOS:
            self.fail(f"a write to the log failed at position {tail.position}: {error}")
        segment = self._segment
        assert segment is not None
        try:
            self._write_zeros(segment, tail.position, size)
        except OSError as second:
            self.fail(
                f"a write to the log failed at position {tail.position} and could not be undone: {second}"
            )
        if self.failure:
            raise StoreFailedError(self.failure) from error
        raise DiskFullError(
            f"no space for an append of {size} bytes at position {tail.position}: {error}"
        ) from error

    def _write_zeros(self, segment: SegmentFile, position: int, size: int) -> None:
        at, end = position - segment.base_position, position - segment.base_position + size
        while at < end:
            count = min(end - at, ZEROS_SIZE_BYTES)
            write_fully(self._disk, segment.fd, bytes(count), at)
            at += count
