"""The files of the commit log: one folder, one file per segment.

A segment has a fixed size, is preallocated, and is named by the physical offset of its first byte in 20 digits. It is made under a
temporary name, and gets its own only when its space is allocated and synced. So a segment with a proper name always has its full
size; anything else is damage. What has not been written reads as zeros.

A backup may have linked a segment that was full (tools/log_copy.py): its file has another name then. Appends never come there. Whoever
changes what stands in a segment asks `unshared` first. Only bytes that stood there, or stand there, are written again without that.

Who may call: files may be read from any thread. The table of segments is replaced as a whole, so any thread may look things up in it.
Only one thread at a time may create or remove (`CommitLog` holds a lock around that).
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from protomq_broker.store.errors import StoreSettingsError
from protomq_broker.store.files.disk import (
    PAGE_SIZE_BYTES,
    UNREADABLE_ERRNOS,
    Disk,
    read_again,
    read_fully,
    read_readable,
    write_fully,
)

SEGMENT_NAME: Final = re.compile(r"\d{20}")
TEMPORARY_SUFFIX: Final = ".tmp"
COPY_BLOCK_SIZE_BYTES: Final = 4 << 20


class SegmentFile:
    """One segment, open for as long as anybody refers to it.

    A pull that is sending from it holds a reference, so the file may lose its name (retention) while the bytes are still there.
    """

    __slots__ = (
        "__weakref__",
        "_disk",
        "base_position",
        "end_position",
        "failed_read_count",
        "fd",
        "path",
        "size_bytes",
    )

    def __init__(self, disk: Disk, path: str, fd: int, base_position: int, size_bytes: int) -> None:
        self._disk = disk
        self.path = path
        self.fd = fd
        self.base_position = base_position
        self.size_bytes = size_bytes
        self.end_position = base_position + size_bytes
        self.failed_read_count = 0
        """Reads that the disk has failed for good: what is believed of the file is to be proved again."""

    def fileno(self) -> int:
        """The descriptor, for sendfile."""
        return self.fd

    def read(self, segment_offset: int, size_bytes: int) -> bytes:
        """Bytes of the segment; less where the file is cut short. Raises OSError, with the path."""
        try:
            return self._disk.pread(self.fd, size_bytes, segment_offset)
        except OSError as error:
            first = error
        try:
            if first.errno in UNREADABLE_ERRNOS:
                return read_again(self._disk, self.fd, size_bytes, segment_offset)
        except OSError:
            self.note_failed_read()
        # Of a file that is open, the system does not name it.
        raise OSError(first.errno, first.strerror, self.path) from first

    def read_if_readable(self, segment_offset: int, size_bytes: int) -> bytes:
        """As `read`; nothing where the disk cannot read: as of damage, nobody believes anything of it."""
        try:
            return self.read(segment_offset, size_bytes)
        except OSError as error:
            if error.errno not in UNREADABLE_ERRNOS:
                raise
            return b""

    def note_failed_read(self) -> None:
        """The disk could not read what somebody wanted of the file."""
        self.failed_read_count += 1

    def stored_size_bytes(self) -> int:
        """Size of the file: that of the segment, unless it is cut short."""
        return self._disk.size(self.fd)

    @property
    def is_shared(self) -> bool:
        """Whether the file has another name too: a backup has linked it."""
        return self._disk.name_count(self.fd) > 1

    def is_cached(self, segment_offset: int, size_bytes: int) -> bool:
        """Whether all of a part is in the page cache; True where the kernel does not tell."""
        return self._disk.is_cached(self.fd, segment_offset, size_bytes)

    def written_ns(self) -> int:
        """When the file was last written to, by anybody: nanoseconds since 1970."""
        return self._disk.written_ns(self.fd)

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                self._disk.close(fd)


class SegmentFolder:
    """The segments of a log, by base position."""

    __slots__ = ("_disk", "files", "front", "path", "segment_size_bytes")

    def __init__(self, disk: Disk, path: str, segment_size_bytes: int) -> None:
        self._disk = disk
        self.path = path
        self.segment_size_bytes = segment_size_bytes
        self.files: dict[int, SegmentFile] = {}
        """In their order. Replaced, never changed: a reader that took it may go on with it."""
        self.front: int | None = None
        """Where the log is known to begin: segments that are missing behind it are lost. None: its first segment tells."""

    def open(self, *, read_only: bool = False) -> None:
        """Opens the segments that are there; half-made ones are removed, unless `read_only`. The folder exists.

        Raises StoreSettingsError.
        """
        files: dict[int, SegmentFile] = {}
        for name in self._disk.list(self.path):
            path = f"{self.path}/{name}"
            if name.endswith(TEMPORARY_SUFFIX):
                if not read_only:
                    self._disk.unlink(path)
            elif SEGMENT_NAME.fullmatch(name):
                base_position = int(name)
                fd = self._disk.open_read_only(path) if read_only else self._disk.open(path)
                segment = SegmentFile(self._disk, path, fd, base_position, self.segment_size_bytes)
                if (
                    base_position % self.segment_size_bytes
                    or self._disk.size(segment.fd) > self.segment_size_bytes
                ):
                    raise StoreSettingsError(self._why_no_segment(path, base_position, segment))
                files[base_position] = segment
        if not read_only:  # the last process may have been killed between a rename and its sync
            self._disk.fsync_dir(self.path)
        self.files = files

    def _why_no_segment(self, path: str, base_position: int, segment: SegmentFile) -> str:
        size = self.segment_size_bytes
        if base_position % size:
            what = "its name is no multiple of that: give segment_size_bytes the value with which the store was made, or move the file away"
        else:
            what = (
                f"it has {segment.stored_size_bytes()}: give segment_size_bytes the value with which the store was made. If that is"
                f" {size}, nothing of the log stands behind it, and `truncate -s {size} {path}` takes it off"
            )
        return f"{path}: this is no segment of {size} bytes, {what}"

    def at(self, position: int) -> SegmentFile | None:
        """The segment in which the position lies."""
        return self.files.get(position - position % self.segment_size_bytes)

    def path_at(self, position: int) -> str:
        """Path of the segment in which the position lies, whether it is there or not."""
        return f"{self.path}/{position - position % self.segment_size_bytes:020d}"

    def overlapping(self, start: int, end: int) -> Iterator[SegmentFile]:
        """The segments that hold a part of [start, end), in order."""
        for segment in self.files.values():
            if segment.base_position < end and segment.end_position > start:
                yield segment

    @property
    def first_position(self) -> int:
        """Where the log begins: with its oldest segment, or where it should begin if that one is lost."""
        first, front = next(iter(self.files), None), self.front
        if front is None:
            return first or 0
        return front if first is None or front < first else first

    @property
    def lost_front_end(self) -> int:
        """Up to where the first segments are lost; 0 if they are there."""
        first = next(iter(self.files), 0)
        return first if first > self.first_position else 0

    def create(self, base_position: int) -> SegmentFile:
        """Makes a segment, durably, or raises OSError and leaves nothing behind."""
        assert base_position % self.segment_size_bytes == 0
        path = self.path_at(base_position)
        temporary = path + TEMPORARY_SUFFIX
        disk = self._disk
        fd = disk.create(temporary)
        try:
            disk.allocate(fd, self.segment_size_bytes)
            disk.fsync(fd)
            disk.rename(temporary, path)
            disk.fsync_dir(self.path)
        except OSError:
            disk.close(fd)
            for leftover in (temporary, path):
                with contextlib.suppress(OSError):
                    disk.unlink(leftover)
            raise
        segment = SegmentFile(disk, path, fd, base_position, self.segment_size_bytes)
        self.files = dict(sorted([*self.files.items(), (base_position, segment)]))
        return segment

    def unshared(self, segment: SegmentFile, kept_size_bytes: int | None = None) -> SegmentFile:
        """The segment, for whoever changes what stands in it. If its file has another name, a copy takes its place, durably.

        `kept_size_bytes`: how much is copied, the rest reads as zeros; None: all. Readers keep the old file. After a crash it is the one
        or the other. Raises OSError: then nothing has changed, or only the file's name is not durable yet.
        """
        if not segment.is_shared:
            return segment
        disk = self._disk

        def copy_to(fd: int) -> None:
            kept = self.segment_size_bytes if kept_size_bytes is None else kept_size_bytes
            for start, end in disk.written_ranges(segment.fd, 0, kept):
                for at in range(start, end, COPY_BLOCK_SIZE_BYTES):
                    data = read_fully(disk, segment.fd, min(COPY_BLOCK_SIZE_BYTES, end - at), at)
                    write_fully(disk, fd, data, at)

        why = "a backup has this segment as a hard link, so it is changed in a copy"
        return self._replaced(segment, copy_to, why)

    def healed_copy(
        self, segment: SegmentFile, data: memoryview, segment_offset: int, damaged: Sequence[tuple[int, int]]
    ) -> SegmentFile:
        """A new file with `data` at `segment_offset` takes the segment's place, durably: the old one does not take it.

        `damaged`: parts [start, end) of the segment that nobody is given. Only these read as zeros where the disk cannot read them.
        Readers keep the old file. After a crash it is the one or the other. Raises OSError, as `unshared` does.
        """
        disk, healed_end = self._disk, segment_offset + len(data)

        def copy_to(fd: int) -> None:
            for start, end in disk.written_ranges(segment.fd, 0, self.segment_size_bytes):
                for first, behind in ((start, min(end, segment_offset)), (max(start, healed_end), end)):
                    for at in range(first, behind, COPY_BLOCK_SIZE_BYTES):
                        size_bytes = min(COPY_BLOCK_SIZE_BYTES, behind - at)
                        write_fully(disk, fd, _read_sparing(disk, segment, size_bytes, at, damaged), at)
            write_fully(disk, fd, data, segment_offset)

        return self._replaced(segment, copy_to, "the disk does not take this segment's healed bytes, so they stand in a copy")

    def _replaced(self, segment: SegmentFile, copy_to: Callable[[int], None], why: str) -> SegmentFile:
        """The segment in a new file, to which `copy_to` writes what is not zero. Raises OSError, which says `why` it is copied."""
        disk, temporary = self._disk, segment.path + TEMPORARY_SUFFIX
        fd = disk.create(temporary)
        try:
            disk.truncate(fd, 0)
            disk.allocate(fd, self.segment_size_bytes)
            copy_to(fd)
            disk.fsync(fd)
            disk.rename(temporary, segment.path)
        except OSError as error:
            disk.close(fd)
            with contextlib.suppress(OSError):
                disk.unlink(temporary)
            raise OSError(
                error.errno,
                f"{why} of {self.segment_size_bytes} bytes, which cannot be made: {error.strerror}",
                segment.path,
            ) from error
        copy = SegmentFile(disk, segment.path, fd, segment.base_position, segment.size_bytes)
        self.files = {**self.files, segment.base_position: copy}
        disk.fsync_dir(self.path)
        return copy

    def remove(self, base_positions: list[int]) -> None:
        """Removes segments, durably and one after the other: a crash leaves no gap where the order has none.

        Files that somebody still reads stay open through their references.
        """
        for base_position in base_positions:
            path = self.files[base_position].path
            self.files = {base: file for base, file in self.files.items() if base != base_position}
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(path)
            self._disk.fsync_dir(self.path)

    def clear_from(self, position: int) -> None:
        """Makes everything from `position` on read as zeros, durably; later segments go. Only for recovery: nobody may be reading.

        Safe to be interrupted at any point and done again.
        """
        self.remove(
            sorted((base for base in self.files if base >= position and base != 0), reverse=True)
        )
        segment = self.at(position)
        if segment is None or position >= segment.end_position:
            return
        kept_size_bytes = position - segment.base_position
        if self.unshared(segment, kept_size_bytes) is not segment:
            return
        self._disk.truncate(segment.fd, kept_size_bytes)
        self._disk.allocate(segment.fd, self.segment_size_bytes)
        self._disk.fsync(segment.fd)


def _read_sparing(
    disk: Disk, segment: SegmentFile, size_bytes: int, segment_offset: int, damaged: Sequence[tuple[int, int]]
) -> bytes:
    """A part of a segment, with zeros for pages that the disk cannot read. Raises OSError if one does not lie in a damaged part."""
    parts: list[bytes] = []
    at, end = segment_offset, segment_offset + size_bytes
    while at < end:
        data, is_stuck = read_readable(disk, segment.fd, end - at, at)
        parts.append(data)
        at += len(data)
        if not is_stuck:
            break
        page_end = min(end, at - at % PAGE_SIZE_BYTES + PAGE_SIZE_BYTES)
        if not any(start <= at and page_end <= behind for start, behind in damaged):
            raise OSError(errno.EIO, f"the disk cannot read it at {at}, and nobody has looked there yet", segment.path)
        parts.append(bytes(page_end - at))
        at = page_end
    return b"".join(parts)
