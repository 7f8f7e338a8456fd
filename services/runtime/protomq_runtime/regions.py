"""File regions as part of an answer, and how small ones are read.

A region names bytes of a file that is kept open by the reference. Large ones go from file to socket by sendfile. The scattered
small ones of a log that mixes topics are read here: neighbours with one pread over the span. Only the regions' own bytes go
on; what lies between belongs to other topics. Large regions that were just written are sent from a mapping: that takes half the CPU time.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

SPAN_SIZE_MAX_BYTES: Final = 256 << 10
"""Largest span read at once."""
GAP_SIZE_MAX_BYTES: Final = 16 << 10
"""A gap up to this is cheaper to read and skip than another system call (about 1.5 us, 6 us of copying at most)."""
WINDOW_SIZE_BYTES: Final = 32 << 20
"""Most bytes of a file that are mapped at a time: they count as memory of this process."""
UNREADABLE_ERRNOS: Final = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EFAULT})
"""Of bytes that the disk has lost, and of file systems with checksums of their own; EFAULT: of a mapping."""


class FileLike(Protocol):
    """What a region lies in: a file object, or a segment of the store."""

    def fileno(self) -> int: ...


@runtime_checkable
class NotesFailedReads(Protocol):
    """A file that wants to know when the disk cannot read some of it: what was believed of it is to be proved again."""

    def note_failed_read(self) -> None: ...


def note_failed_read(file: FileLike, error: OSError) -> None:
    """A read of the file has failed; any thread. Tells the file if that says something of the disk, not of a connection."""
    if error.errno in UNREADABLE_ERRNOS and isinstance(file, NotesFailedReads):
        file.note_failed_read()


class Region(NamedTuple):
    """Bytes [offset, offset + size_bytes) of a file. Any named tuple with these three fields will do, such as the store's."""

    file: FileLike
    offset: int
    size_bytes: int


class RecentRegion(NamedTuple):
    """A region of a file that was just written: all its pages are in memory."""

    file: FileLike
    offset: int
    size_bytes: int


class SharedBytes:
    """Bytes that many answers end with, as a file in memory: none of them copies it, however slowly its caller reads. Over when unused."""

    def __init__(self, name: str, data: bytes) -> None:
        """`name` is for people who look at the process's descriptors. Raises OSError: there is no descriptor left."""
        self._file = open(os.memfd_create(name), "wb", buffering=0)  # noqa: SIM115 - it is closed with this object.
        self._size_bytes = len(data)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def region(self) -> Region:
        """All of it."""
        return Region(self, 0, self._size_bytes)


class MappedWindow:
    """The part of a file that is mapped to send recent regions of it, one behind the other. It keeps the file open. One thread.

    Nothing here reads the mapping: a page that cannot be had must be an error of the system call that sends it, not a signal.
    """

    def __init__(self, region: RecentRegion) -> None:
        """Begins with the region. Raises ShortFileError, OSError."""
        self._file = region.file
        self._start = region.offset - region.offset % mmap.PAGESIZE
        descriptor = region.file.fileno()
        size_bytes = min(os.fstat(descriptor).st_size - self._start, WINDOW_SIZE_BYTES)
        if size_bytes <= region.offset - self._start:
            raise ShortFileError(f"{region.size_bytes} bytes at {region.offset} of {region.file!r} wanted, the file ends before them")
        mapping = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=self._start)
        # Nothing is read ahead: where the file is not written yet, the kernel would fill page by page with zeros, for five times the cost.
        mapping.madvise(mmap.MADV_RANDOM)
        self._memory = memoryview(mapping)

    def view(self, region: RecentRegion) -> memoryview:
        """The beginning of the region, as far as it lies in the window; empty if it does not begin there."""
        if region.file is not self._file or region.offset < self._start:
            return self._memory[:0]
        at = region.offset - self._start
        return self._memory[at : at + region.size_bytes]


class ShortFileError(Exception):
    """A file ends before a region does: the answer cannot be completed, its header is on the way already."""


def read_regions(regions: Sequence[Region | RecentRegion]) -> list[memoryview]:
    """The bytes of the regions, in order. Raises ShortFileError or OSError."""
    pieces: list[memoryview] = []
    index = 0
    while index < len(regions):
        end_index, start, end = _span(regions, index)
        span = _read(regions[index].file, start, end - start)
        if end_index == index + 1:
            pieces.append(span)
        else:
            for region in regions[index:end_index]:
                at = region.offset - start
                pieces.append(span[at : at + region.size_bytes])
        index = end_index
    return pieces


def _span(regions: Sequence[Region | RecentRegion], index: int) -> tuple[int, int, int]:
    """(index of the first region that does not belong to the span, start and end of the span in the file)."""
    file, start, size = regions[index]
    end = start + size
    index += 1
    while index < len(regions):
        next_file, next_offset, next_size = regions[index]
        next_end = next_offset + next_size
        if (
            next_file is not file
            or not end <= next_offset <= end + GAP_SIZE_MAX_BYTES
            or next_end - start > SPAN_SIZE_MAX_BYTES
        ):
            break
        end = next_end
        index += 1
    return index, start, end


def _read(file: FileLike, offset: int, size_bytes: int) -> memoryview:
    descriptor = file.fileno()
    try:
        data = os.pread(descriptor, size_bytes, offset)
        while len(data) < size_bytes:
            more = os.pread(descriptor, size_bytes - len(data), offset + len(data))
            if not more:
                raise ShortFileError(
                    f"{size_bytes} bytes at {offset} of {file!r} wanted, the file ends after {len(data)} of them"
                )
            data += more
    except OSError as error:
        note_failed_read(file, error)
        raise
    return memoryview(data)
