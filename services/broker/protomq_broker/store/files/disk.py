"""The few operations through which the store touches a disk, so that tests can put a simulated one in their place.

Rules:
- Files are descriptors (ints); paths are strings. Every error is an OSError with its errno.
- `pwrite` and `pwritev` may write less than they were given (a full disk, a signal): callers look at the result.
- A file or folder that was made, renamed or removed is so for good only after `fsync_dir` of the folder it stands in.
- `Disk` stores no state: any thread may call it. A subclass may (protomq_broker.testing.simdisk).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from .page_cache import is_cached

log = logging.getLogger(__name__)

BOOT_ID_PATH: Final = "/proc/sys/kernel/random/boot_id"
NOT_OURS_ERRNOS: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS, errno.ENOSYS, errno.EOPNOTSUPP}
)
"""Of an fsync of a folder that we may not write into, or that is no disk's: so we have not made anything there."""
DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
UNREADABLE_ERRNOS: Final = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""Of a read of bytes that the disk has lost, and of file systems with checksums of their own."""
READ_RETRIES: Final = 2
"""Of a read that fails so: the error may pass."""
PAGE_SIZE_BYTES: Final = 4096
"""What the disk cannot read is told apart by pages: the kernel reads no less."""
WRITE_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC


def _syncfs_reports_errors(system: str, release: str) -> bool:
    version = re.match(r"(\d+)\.(\d+)", release)
    return system == "Linux" and version is not None and tuple(map(int, version.groups())) >= (5, 8)


SYNCFS_REPORTS_ERRORS: Final = _syncfs_reports_errors(os.uname().sysname, os.uname().release)


class DiskUsage(NamedTuple):
    """Sizes of a file system in bytes; `free_bytes` is what an ordinary user may still take."""

    total_bytes: int
    free_bytes: int

    @property
    def used_ratio(self) -> float:
        """Used part, from 0.0 to 1.0."""
        return 1.0 - self.free_bytes / self.total_bytes if self.total_bytes else 1.0


class Disk:
    """The real disk."""

    __slots__ = ()

    # The hot ones are the functions of the os module themselves: no frame in between.
    pwrite = staticmethod(os.pwrite)
    pwritev = staticmethod(os.pwritev)
    pread = staticmethod(os.pread)
    fdatasync = staticmethod(os.fdatasync)
    fsync = staticmethod(os.fsync)
    close = staticmethod(os.close)

    def open(self, path: str) -> int:
        """Opens an existing file for reading and writing."""
        return os.open(path, WRITE_FLAGS)

    def open_read_only(self, path: str) -> int:
        """Opens an existing file for reading. Raises IsADirectoryError at once: the error of the first read would not have the path."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return fd

    def create(self, path: str) -> int:
        """Opens a file for reading and writing; makes it, empty, if there is none. An existing one keeps its content."""
        return os.open(path, WRITE_FLAGS | os.O_CREAT, 0o640)

    def size(self, fd: int) -> int:
        """Size of the file in bytes."""
        return os.fstat(fd).st_size

    def name_count(self, fd: int) -> int:
        """How many names the file has: hard links, of a backup say."""
        return os.fstat(fd).st_nlink

    is_cached = staticmethod(is_cached)

    def written_ns(self, fd: int) -> int:
        """When the file was last written to, by anybody: nanoseconds since 1970, by the wall clock."""
        return os.fstat(fd).st_mtime_ns

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Makes the file at least `size_bytes` long, with space for all of it; what is new reads as zeros."""
        os.posix_fallocate(fd, 0, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Cuts or extends the file to `size_bytes`."""
        os.ftruncate(fd, size_bytes)

    def written_ranges(self, fd: int, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that may hold anything but zeros, in order.

        Preallocated space that nobody wrote is left out where the file system tells (ext4, XFS and others do). A list, made at once:
        reading brings pages into the page cache, and those count as written.
        """
        ranges: list[tuple[int, int]] = []
        end = min(end, self.size(fd))
        position = start
        while position < end:
            try:
                data = os.lseek(fd, position, os.SEEK_DATA)
                position = min(os.lseek(fd, data, os.SEEK_HOLE), end) if data < end else end
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing behind `position`
                    break
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                data, position = position, end
            if data < position:
                ranges.append((data, position))
        return ranges

    def exists(self, path: str) -> bool:
        """Whether a file or folder of that name is there."""
        return os.path.exists(path)

    def has_name(self, fd: int, path: str) -> bool:
        """Whether the open file is what `path` names: not if it was removed, moved, or replaced by another."""
        try:
            named = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(named, os.fstat(fd))

    def list(self, path: str) -> list[str]:
        """Names in a folder, sorted; none if there is no such folder."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def is_folder(self, path: str) -> bool:
        """Whether `path` is a folder."""
        return os.path.isdir(path)

    def make_folder(self, path: str) -> None:
        """Makes the folder and those above it, not durably yet; nothing happens if it is there."""
        os.makedirs(path, 0o750, exist_ok=True)

    def rename(self, source: str, target: str) -> None:
        """Gives a file another name, in one step; a file that has the name already is replaced."""
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """Gives a file one more name, that of no file yet."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """Removes a file's name; descriptors that are open go on working."""
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder."""
        os.rmdir(path)

    def fsync_dir(self, path: str) -> None:
        """Makes what was made, renamed and removed in the folder durable: names of files and of folders."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @property
    def can_sync_file_system(self) -> bool:
        """Whether `sync_file_system` works here and says so if a write-back failed: Linux does since 5.8."""
        return SYNCFS_REPORTS_ERRORS

    def open_folder(self, path: str) -> int:
        """Opens a folder, for `sync_file_system`."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def sync_file_system(self, fd: int) -> None:
        """Makes everything durable that was written to the file system on which the folder lies.

        For hundreds of files that is faster than an fsync of each, by far. A write-back that fails is reported once to each
        descriptor that was open before (Linux 5.8): so keep `fd` open from before the first write.
        """
        if _libc_syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def lock(self, fd: int) -> bool:
        """Takes the exclusive lock of the file, for as long as it is open; False if somebody else has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def usage(self, path: str) -> DiskUsage:
        """Sizes of the file system on which the folder lies, without what it reserves for root: as df counts."""
        usage = shutil.disk_usage(path)
        return DiskUsage(usage.used + usage.free, usage.free)

    def cache_id(self, path: str) -> str:
        """Names the page cache behind a folder: the boot, and the mount where the kernel tells them apart (Linux 6.8).

        As long as it is the same, what a process wrote before it was killed can still be read, synced or not.
        """
        boot_id = read_boot_id()
        return f"{boot_id}/{_mount_id(path)}" if boot_id else ""


def read_boot_id() -> str:
    """Id of this start of the machine; "" if the system does not tell: no start is then the same as another."""
    try:
        with open(BOOT_ID_PATH, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def write_fully(disk: Disk, fd: int, data: bytes | bytearray | memoryview, position: int) -> None:
    """Writes all of `data`; OSError if the disk does not take it all."""
    written = disk.pwrite(fd, data, position)
    if written == len(data):
        return
    view = memoryview(data)
    while written < len(data):
        count = disk.pwrite(fd, view[written:], position + written)
        if count <= 0:
            raise OSError(errno.EIO, "the disk accepts no more bytes, without a reason")
        written += count


def read_again(disk: Disk, fd: int, size_bytes: int, position: int) -> bytes:
    """As `pread`. A read that the disk fails is tried READ_RETRIES times more. Raises OSError."""
    for _ in range(READ_RETRIES):
        try:
            return disk.pread(fd, size_bytes, position)
        except OSError as error:
            if error.errno not in UNREADABLE_ERRNOS:
                raise
    return disk.pread(fd, size_bytes, position)


def read_fully(disk: Disk, fd: int, size_bytes: int, position: int) -> bytes:
    """Reads `size_bytes`, or less where the file ends. Raises OSError, if a read fails again and again."""
    data = read_again(disk, fd, size_bytes, position)
    if len(data) == size_bytes or not data:
        return data
    parts = [data]
    have = len(data)
    while have < size_bytes:
        part = read_again(disk, fd, size_bytes - have, position + have)
        if not part:
            break
        parts.append(part)
        have += len(part)
    return b"".join(parts)


def read_readable(disk: Disk, fd: int, size_bytes: int, position: int) -> tuple[bytes, bool]:
    """As `read_fully`, up to the first page that the disk cannot read: (the bytes before it, whether there is one)."""
    try:
        return read_fully(disk, fd, size_bytes, position), False
    except OSError as error:
        if error.errno not in UNREADABLE_ERRNOS:
            raise
    parts: list[bytes] = []
    at, end = position, position + size_bytes
    while at < end:
        page_end = min(end, at - at % PAGE_SIZE_BYTES + PAGE_SIZE_BYTES)
        try:
            part = read_fully(disk, fd, page_end - at, at)
        except OSError as error:
            if error.errno not in UNREADABLE_ERRNOS:
                raise
            return b"".join(parts), True
        parts.append(part)
        if len(part) < page_end - at:
            break
        at = page_end
    return b"".join(parts), False


def read_around(disk: Disk, fd: int, size_bytes: int, position: int) -> tuple[bytes, bool]:
    """As `read_fully`, with zeros where the disk cannot read: (the bytes, whether that was somewhere).

    In a row of pages that fail, as much is left out each time as was before. So of a large area not every page is tried.
    """
    parts: list[bytes] = []
    at, end = position, position + size_bytes
    left_out = 0  # in a row
    is_whole = True
    while at < end:
        data, is_stuck = read_readable(disk, fd, end - at, at)
        parts.append(data)
        at += len(data)
        if not is_stuck:
            break
        is_whole = False
        left_out = 0 if data else left_out
        gap = min(end, at - at % PAGE_SIZE_BYTES + max(PAGE_SIZE_BYTES, left_out)) - at
        parts.append(bytes(gap))
        at += gap
        left_out += gap
    return b"".join(parts), not is_whole


@contextmanager
def path_named(path: str) -> Iterator[None]:
    """Around calls with the descriptor of a file: the errors of the system do not name it. Raises OSError, with the path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


@contextmanager
def if_there_is_room() -> Iterator[None]:
    """Around a write without which a start goes on: a full disk need not take it, which is logged. Raises OSError, any other."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        log.warning("the disk is full: %s", error)


def read_file(disk: Disk, path: str) -> bytes | None:
    """The content of a file, None if there is none. Raises OSError, with the path."""
    try:
        fd = disk.open_read_only(path)
    except FileNotFoundError:
        return None
    try:
        with path_named(path):
            return read_fully(disk, fd, disk.size(fd), 0)
    finally:
        disk.close(fd)


def write_file_atomically(disk: Disk, path: str, *parts: bytes) -> None:
    """Replaces a file. After a crash at any moment it is the old one or the new one, whole; after this returned, the new one.

    Its content comes in parts, so that a large one need not be put together.
    """
    temporary = f"{path}.tmp"
    fd = disk.create(temporary)
    try:
        disk.truncate(fd, 0)
        position = 0
        for part in parts:
            write_fully(disk, fd, part, position)
            position += len(part)
        disk.fsync(fd)
    finally:
        disk.close(fd)
    disk.rename(temporary, path)
    disk.fsync_dir(os.path.dirname(path))


def remove_file(disk: Disk, path: str) -> None:
    """Removes a file for good; nothing happens if there is none."""
    try:
        disk.unlink(path)
    except FileNotFoundError:
        return
    disk.fsync_dir(os.path.dirname(path))


def sync_names_above(disk: Disk, path: str) -> None:
    """Makes the names of a folder and of all above it durable, as far as they may be ours."""
    path = os.path.abspath(path)  # A name from here has folders above it that it does not say.
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        try:
            disk.fsync_dir(path)
        except OSError as error:
            if error.errno not in NOT_OURS_ERRNOS:
                raise


def read_json(disk: Disk, path: str) -> Any:
    """The value in a JSON file, None if there is no file or it does not parse."""
    data = read_file(disk, path)
    if data is None:
        return None
    try:
        return json.loads(data)
    except ValueError:
        return None


def _libc_syncfs(fd: int) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syncfs(fd))


def _mount_id(path: str) -> int:
    """The unique id of the mount, from statx(2); 0 where the C library or the kernel does not have it."""
    statx_size, mask_at, mount_id_at, mount_id_unique = 256, 0, 0x90, 0x4000
    at_fdcwd, basic = -100, 0
    try:
        statx = ctypes.CDLL(None).statx
    except AttributeError:
        return 0
    buffer = ctypes.create_string_buffer(statx_size)
    if statx(at_fdcwd, os.fsencode(path), basic, mount_id_unique, buffer) != 0:
        return 0
    if not int.from_bytes(buffer.raw[mask_at : mask_at + 4], "little") & mount_id_unique:
        return 0
    return int.from_bytes(buffer.raw[mount_id_at : mount_id_at + 8], "little")
