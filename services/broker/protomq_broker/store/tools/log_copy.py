"""A run of a backup or a restore: the log of a source, proved append by append, becomes segments and `backup.json` in a folder."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Final

from protomq.wire.log_walk import walk_appends
from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.config import BACKUP_MARK, BACKUP_NAME, FORMAT_VERSION
from protomq_broker.store.errors import BackupError, ForeignBytesError, WrongFolderError
from protomq_broker.store.files.disk import Disk, read_fully, write_fully
from protomq_broker.store.files.side_files import write_json_file
from protomq_broker.store.log.agreement import START, LogPoint
from protomq_broker.store.log.positions import LogTail
from protomq_broker.store.log.seals import LogWalker, seal_before
from protomq_broker.store.log.segment import TEMPORARY_SUFFIX, SegmentFolder
from protomq_broker.store.log.verbatim import ForeignBlock, LogEnd, prove

from .backup_manifest import CopyReport, Cut, Manifest
from .backup_source import LogSource

PART_SIZE_BYTES: Final = 4 << 20
_NO_LINKS: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOENT}
)
"""Of a hard link that cannot be made: another file system, one without links, or the segment is deleted by now."""


class GoneError(Exception):
    """The source has no more what comes next, at `position`: retention has deleted it, or it is lost."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class LogCopy:
    """A run into one folder. Attribute: manifest: what the folder has."""

    def __init__(self, disk: Disk, root: str, manifest: Manifest, end_position: int) -> None:
        """Goes on with what the folder has, and takes what is not in the manifest off."""
        self.manifest = manifest
        self._disk = disk
        self._root = root
        self._folder = f"{root}/commitlog"
        self._end_position = end_position
        self._tail = LogTail(manifest.end.position, manifest.end.crc32c, manifest.end_time_ms)
        self._epoch = manifest.end.epoch
        self._fd = -1
        self._base = -1
        self._links = not manifest.is_restore
        self._copied_bytes = self._linked_bytes = 0
        check_copied(disk, root, manifest)
        self._keep()
        size = manifest.segment_size_bytes
        settings = {"format_version": FORMAT_VERSION, "segment_size_bytes": size}
        if not manifest.is_restore:
            settings[BACKUP_MARK] = True
        write_json_file(disk, f"{root}/config/store.json", settings)
        self._clear_behind(manifest.end.position)

    def report(self) -> CopyReport:
        """What was done."""
        return CopyReport(self.manifest, self._copied_bytes, self._linked_bytes)

    def run(self, source: LogSource, cut: Cut) -> None:
        """Copies up to the end that was looked at, or the cut.

        Raises GoneError, WrongFolderError, OSError; ForeignBytesError, whose position is the first append that does not hold.
        """
        try:
            self._run(source, cut)
            self._finish_segment()
        finally:
            if self._fd >= 0:
                self._disk.close(self._fd)
                self._fd = -1

    def _run(self, source: LogSource, cut: Cut) -> None:
        run, size = b"", self.manifest.segment_size_bytes
        position = self._tail.position or self.manifest.first_position
        while position < min(self._end_position, cut.position):
            is_whole = position % size == 0 and position + size <= self._end_position
            if (
                is_whole
                and self._links
                and not run
                and self._link(source, position)
            ):
                position = self._tail.position
                continue
            read_at = position + len(run)
            if read_at >= cut.position:
                return  # it lies within an append
            # What is behind the cut may be damaged; and the next segment may be one to link.
            left_bytes = min(self._end_position - read_at, cut.position - read_at, size - read_at % size)
            data = source.read(read_at, min(PART_SIZE_BYTES, left_bytes))
            if not data:
                raise GoneError(read_at)
            run += data
            for block in self._prove(run, position):
                if not self._write(block, cut):
                    return
            if self._tail.position:
                run = run[self._tail.position - position :]
                position = self._tail.position

    def _prove(self, data: bytes, position: int) -> Iterator[ForeignBlock]:
        """What continues the copy; whoever takes a block moves the tail behind it. Raises ForeignBytesError where the first append stands
        that does not hold.
        """
        try:
            blocks = self._proved(data, position)
        except ForeignBytesError:
            # It says where the data begins.
            appends = walk_appends(data, position, None if self._is_empty and position else self._tail.crc32c)
            for seal in appends.seals:
                yield from self._proved(data[seal.start_position - position : seal.end_position - position], seal.start_position)
            self._proved(data[appends.size_bytes :], position + appends.size_bytes)
            raise
        yield from blocks

    def _proved(self, data: bytes, position: int) -> list[ForeignBlock]:
        end = LogEnd(self._tail, self._epoch, self._is_empty)
        return prove(data, position, end, self.manifest.segment_size_bytes, may_end_within=True)

    @property
    def _is_empty(self) -> bool:
        return self._tail == LogTail(0, 0, 0)

    def _write(self, block: ForeignBlock, cut: Cut) -> bool:
        """Writes a block, as far as the cut allows; whether that is all of it."""
        appends = block.appends
        seals = [
            seal
            for seal in appends.seals
            if seal.end_position <= cut.position and seal.store_time_ms <= cut.time_ms
        ]
        if not seals:
            return not appends.seals
        base, last = appends.base_position, seals[-1]
        self._open_segment(base)
        data = memoryview(appends.data)[: last.end_position - base]
        write_fully(self._disk, self._fd, data, base - self._base)
        self._tail = LogTail(last.end_position, last.crc32c, last.store_time_ms)
        self._epoch = last.epoch
        self._copied_bytes += len(data)
        if self._tail.position % self.manifest.segment_size_bytes == 0:
            self._finish_segment()
        return len(seals) == len(appends.seals)

    def _link(self, source: LogSource, base: int) -> bool:
        """Links a whole segment and proves it; False if that cannot be, and it is to be copied.

        Raises ForeignBytesError, OSError; WrongFolderError: the file is not the source's.
        """
        path = source.sealed_path(base)
        if not path:
            self._links = False
            return False
        disk, size, kept = self._disk, self.manifest.segment_size_bytes, f"{self._folder}/{base:020d}"
        try:
            disk.link(path, kept)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._links = error.errno == errno.ENOENT
            return False
        tail, epoch, run, at = self._tail, self._epoch, b"", base
        fd = disk.open_read_only(kept)
        try:
            while at < base + size:
                data = read_fully(
                    disk,
                    fd,
                    min(PART_SIZE_BYTES, base + size - at - len(run)),
                    at + len(run) - base,
                )
                run += data
                for block in self._prove(run, at):
                    last = block.appends.seals[-1]
                    self._tail = LogTail(last.end_position, last.crc32c, last.store_time_ms)
                    self._epoch = last.epoch
                if not data:
                    raise ForeignBytesError(at, f"{path} ends there, or within an append")
                if self._tail.position:
                    run = run[self._tail.position - at :]
                    at = self._tail.position
            disk.fsync_dir(self._folder)
        except (ForeignBytesError, OSError) as error:
            self._tail, self._epoch = tail, epoch
            with suppress(OSError):
                disk.unlink(kept)
            if isinstance(error, ForeignBytesError):
                theirs = source.read(error.position, PART_SIZE_BYTES)
                if theirs and theirs != read_fully(disk, fd, len(theirs), error.position - base):
                    raise WrongFolderError(
                        f"{path} is not of this broker's log, which has something else at position {error.position}: --store is the folder "
                        "of another broker, or of another past. Give the data_dir of this broker, or leave --store out"
                    ) from error
            raise
        finally:
            disk.close(fd)
        self._linked_bytes += size
        self._keep()
        return True

    def _open_segment(self, position: int) -> None:
        size = self.manifest.segment_size_bytes
        base = position - position % size
        if self._fd >= 0 and self._base == base:
            return
        self._finish_segment()
        path = f"{self._folder}/{base:020d}"
        if not self._disk.exists(path):
            temporary = path + TEMPORARY_SUFFIX
            fd = self._disk.create(temporary)
            try:
                # A store writes behind the end: it must have the space. A backup is as small as what it has.
                if self.manifest.is_restore:
                    self._disk.allocate(fd, size)
                else:
                    self._disk.truncate(fd, size)
                self._disk.fsync(fd)
            finally:
                self._disk.close(fd)
            self._disk.rename(temporary, path)
            self._disk.fsync_dir(self._folder)
        self._fd, self._base = self._disk.open(path), base

    def _finish_segment(self) -> None:
        """Makes durable what was written, and then the manifest that lists it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                self._disk.fsync(fd)
            finally:
                self._disk.close(fd)
        self._keep()

    def _keep(self) -> None:
        tail, known = self._tail, self.manifest
        complete_time_ms = known.complete_time_ms
        if not complete_time_ms and tail.position >= known.complete_from > 0:
            complete_time_ms = tail.store_time_ms
        self.manifest = replace(
            known,
            end=LogPoint(tail.position, self._epoch, tail.crc32c),
            end_time_ms=tail.store_time_ms,
            complete_time_ms=complete_time_ms,
        )
        write_json_file(self._disk, f"{self._root}/{BACKUP_NAME}", asdict(self.manifest))

    def _clear_behind(self, position: int) -> None:
        """Takes off what an interrupted run has left; a link loses its name only, the store's file stays as it is."""
        disk, size = self._disk, self.manifest.segment_size_bytes
        for name in disk.list(self._folder):
            path = f"{self._folder}/{name}"
            if name.endswith(TEMPORARY_SUFFIX) or int(name) >= position:
                disk.unlink(path)
            elif int(name) + size > position:
                fd = disk.open(path)
                try:
                    disk.truncate(fd, position - int(name))
                    if self.manifest.is_restore:
                        disk.allocate(fd, size)
                    else:
                        disk.truncate(fd, size)
                    disk.fsync(fd)
                finally:
                    disk.close(fd)
        disk.fsync_dir(self._folder)


def check_copied(disk: Disk, root: str, manifest: Manifest) -> None:
    """Looks whether what the manifest lists is there: each segment with its first and its last seal. Raises BackupError if not."""
    if manifest.end == START:
        return
    size, end = manifest.segment_size_bytes, manifest.end
    folder = SegmentFolder(disk, f"{root}/commitlog", size)
    folder.open(read_only=True)
    crc: int | None = None
    for base in range(manifest.first_position, end.position, size):
        segment = folder.files.get(base)
        if segment is None or segment.stored_size_bytes() < size:
            problem = "is missing" if segment is None else "is cut short"
        else:
            head = LogWalker(disk, folder, base, crc, end_position=base + SEAL_SIZE_BYTES)
            holds = any(True for _ in head)
            last = seal_before(folder, min(base + size, end.position))
            if holds and last is not None and (last.end_position < end.position or last.crc32c == end.crc32c):
                crc = last.crc32c
                continue
            problem = "does not hold"
        advice = "restore it into another folder" if manifest.is_restore else "begin another backup in another folder"
        raise BackupError(
            f"{folder.path_at(base)} {problem}, so nothing is added to what {root} has: bring the file back from a copy, or {advice}"
        )
