"""Backups: a copy of the log, which is all that a broker has to know; what `protomq backup` and `protomq restore` do.

    <backup>/backup.json               what is copied; written last, durably, and so true after a crash at any moment
    <backup>/config/store.json         as in a store, so that `protomq log verify` and `dump` read a backup
    <backup>/commitlog/<20 digits>     segments: copies, or hard links to those of the store

    backup     LogSource (a broker, a folder)  -> proved append by append -> segments, synced -> backup.json
    restore    LogSource (the backup)          -> the same, up to the cut  -> segments, synced -> epochs.json -> backup.json goes

Rules:
- Every seal is proved before its append is written. What does not hold, or does not continue what is copied, ends the run; what is copied
  stays.
- A segment is linked before it is proved. From then on its store changes it in a file of its own (`SegmentFolder.unshared`).
- A run goes on where `backup.json` says that the last one ended. So what the backup has is not copied again.
- Runs may be of a broker, of its slaves, or of a store whose broker is stopped. The chain of seals proves that it is one log.
- A log that lacks the end of the copy is behind, or has lost it. One that is behind is the beginning of the copy. Its last append stands
  there, too, and it has begun no epoch that the copy lacks. Whoever lost something leads on in an epoch of its own.
- Only what is confirmed and on stable storage is copied, so no fail-over takes it back from the broker.
- A log that begins behind 0 is complete from its first segment on (FORMAT.md): but only together with what was carried forward to its end.
  So a backup is complete from the end that the log had when its first run began (`complete_from`). It refuses a cut before that.
- A restored store is another store. It draws a number of its own, and begins with an epoch far above those that the broker may have begun
  since. So what one of them writes is never taken for the other's. One that is restored as a slave keeps the epochs of the log. So it
  follows its master, as any replica that was away. With higher ones, an elected member would follow nobody. Until it has followed, no
  master with a fixed role opens it.
- A folder with `backup.json` is no store: a broker refuses it. So does a restore that was interrupted.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from protomq.wire.log_walk import Seal, decode_seal, walk_appends
from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.config import BACKUP_MARK, BACKUP_NAME, FORMAT_VERSION
from protomq_broker.store.errors import (
    BackupError,
    CutError,
    ForeignBytesError,
    LogBehindError,
    LogDivergedError,
    NoBackupError,
    StoreInUseError,
    WrongFolderError,
)
from protomq_broker.store.files.disk import (
    Disk,
    read_fully,
    remove_file,
    sync_names_above,
    write_fully,
)
from protomq_broker.store.files.lock import StoreLock, is_locked
from protomq_broker.store.files.side_files import (
    SideFileDamagedError,
    empty_folder,
    read_json_file,
    write_json_file,
)
from protomq_broker.store.log.agreement import START, LogPoint
from protomq_broker.store.log.epochs import (
    EPOCHS_NAME,
    RESTORED_EPOCHS,
    find_epochs,
    read_epochs,
    write_epochs,
)
from protomq_broker.store.log.positions import LogTail
from protomq_broker.store.log.seals import LogWalker, seal_before
from protomq_broker.store.log.segment import TEMPORARY_SUFFIX, SegmentFolder
from protomq_broker.store.log.verbatim import ForeignBlock, LogEnd, prove
from protomq_broker.store.start.front_note import keep_front
from protomq_broker.store.start.settings import RESTORED_SLAVE_NAME

from .offline import open_offline

PART_SIZE_BYTES: Final = 4 << 20
CRC_SIZE_BYTES: Final = 4
_NO_LINKS: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOENT}
)
"""Of a hard link that cannot be made: another file system, one without links, or the segment is deleted by now."""


class SourceLook(NamedTuple):
    """How far a log goes.

    Attributes:
        broker_name: "" if it is not known.
        first_position: where it begins.
        end_position: where it ends, as far as it may be copied.
        problem: what is wrong with what is written there; "" if nothing is.
        epoch: the last one that its store has begun, even if nothing is written in it yet; 0: not known.
        epoch_position: where that epoch begins.
    """

    broker_name: str
    segment_size_bytes: int
    first_position: int
    end_position: int
    problem: str = ""
    epoch: int = 0
    epoch_position: int = 0


class LogSource(Protocol):
    """A log that is copied."""

    def look(self) -> SourceLook:
        """How far it goes now; where it begins is looked at first."""

    def read(self, position: int, size_max_bytes: int) -> bytes:
        """The log from a position on, as much as it likes to give; b"": it has that no more."""

    def sealed_path(self, base_position: int) -> str:
        """The file of a segment that nobody writes any more, to be linked; "" if its files are elsewhere."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a backup has.

    Attributes:
        broker_name: whose log it is; "" as long as all runs were of a store whose broker was stopped, which does not have the name.
        segment_size_bytes: of the log.
        first_position: where the copy begins.
        end: where it ends.
        end_time_ms: store time of its last append.
        complete_from: it tells everything if it is cut at this position or behind it.
        complete_time_ms: store time of the append that ends there; 0 while the copy has not come that far.
        is_restore: the folder is to become a store.
    """

    broker_name: str
    segment_size_bytes: int
    first_position: int
    complete_from: int
    end: LogPoint = START
    end_time_ms: int = 0
    complete_time_ms: int = 0
    is_restore: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether it can be restored."""
        return self.end.position >= self.complete_from


class Cut(NamedTuple):
    """Where a restored log ends: with the last append that ends at or before a position, and was stored at or before a time."""

    position: int = 1 << 62
    time_ms: int = 1 << 62


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a run did. Attributes: manifest: as it is now; copied_bytes: of the log; linked_bytes: in segments that are hard links."""

    manifest: Manifest
    copied_bytes: int
    linked_bytes: int


def back_up(source: LogSource, root: Path | str, *, disk: Disk | None = None) -> CopyReport:
    """Copies what a log has and the backup has not, up to where the log ends now. May be interrupted, and run again.

    Raises BackupError, StoreLockedError, OSError, and what the source raises.
    """
    disk, root = disk or Disk(), str(root).rstrip("/")
    _refuse_file(disk, root, "back up")
    known = read_manifest(root, disk=disk)
    if known is not None and known.is_restore:
        raise WrongFolderError(f"{root} is a store that is being restored: back up into another folder")
    if known is None and not _is_free(disk, root):
        raise WrongFolderError(f"{root} is not empty, and no backup: back up into a folder of its own")
    _make_folders(disk, root)
    lock = StoreLock(disk, root)
    begins = known is None
    try:
        while True:
            look = source.look()
            manifest = known or _begun(look)
            if not manifest.broker_name:
                manifest = replace(manifest, broker_name=look.broker_name)
            elif look.broker_name not in ("", manifest.broker_name):
                raise WrongFolderError(
                    f"{root} is a backup of broker {manifest.broker_name}, this one is {look.broker_name}: give each a folder"
                )
            if manifest.segment_size_bytes != look.segment_size_bytes:
                raise WrongFolderError(
                    f"{root} has segments of {manifest.segment_size_bytes} bytes, the broker has {look.segment_size_bytes}: begin another "
                    "backup in another folder"
                )
            _check_continues(source, look, disk, root, manifest)
            copy = _Copy(disk, root, manifest, look.end_position)
            try:
                copy.run(source, Cut())
                return copy.report()
            except ForeignBytesError as error:
                raise BackupError(
                    f"the log is damaged at position {error.position}, or does not continue there what {root} has: {error.reason}. What "
                    "stands before holds. `protomq log verify` where its files are says which it is. If nothing is damaged, it has another "
                    "past than the copy, or is that of another broker: then copy it into another folder"
                ) from error
            except _GoneError as gone:
                if source.look().first_position <= gone.position:
                    raise BackupError(
                        f"the log has nothing at position {gone.position}, though retention has not deleted that: a segment is lost"
                        " (`protomq log verify` where its files are). Back up another member, or heal or repair the log first"
                    ) from None
                if manifest.is_complete and manifest.end != START:
                    raise BackupError(
                        f"{root} has the log up to {copy.manifest.end.position}, and the broker's begins at {source.look().first_position} "
                        "now: what is between is deleted. Begin another backup in another folder, and keep this one for earlier times"
                    ) from None
                known = (
                    None  # what is copied is of no use: it begins again where the log begins now
                )
    except (Exception, KeyboardInterrupt):
        if begins:
            _remove_empty(disk, root)
        raise
    finally:
        lock.release()


def restore(
    backup: Path | str, root: Path | str, cut: Cut | None = None, *, is_slave: bool = False, disk: Disk | None = None
) -> CopyReport:
    """Makes a store of a backup, which stays as it is. May be interrupted, and run again. Every byte is proved on its way.

    `is_slave`: the store is to follow a master that is there.

    Raises CutError, BackupError, StoreLockedError, OSError.
    """
    disk, root = disk or Disk(), str(root).rstrip("/")
    cut = cut or Cut()
    _refuse_file(disk, root, "restore")
    if not disk.is_folder(str(backup)):
        raise NoBackupError(f"{backup} is no folder, so it is no backup")
    kept = read_manifest(backup, disk=disk)
    if kept is None:
        raise NoBackupError(f"{backup} is no backup: {BACKUP_NAME} is missing")
    if not kept.is_complete or kept.is_restore:
        raise BackupError(
            f"{backup} is not complete: it ends at {kept.end.position}, and has to come to {kept.complete_from}: run the backup again"
        )
    if kept.end == START:
        raise NoBackupError(f"{backup} holds nothing yet: run `protomq backup` again, of a broker whose log has something")
    if cut.position < kept.complete_from or cut.time_ms < kept.complete_time_ms:
        raise CutError(
            f"{backup} tells everything from position {kept.complete_from} on, stored at {kept.complete_time_ms} ms since 1970: "
            "cut it there or later, or restore an older backup"
        )
    if kept.end.position < cut.position < Cut().position:
        raise CutError(f"{backup} ends at position {kept.end.position}: cut it there or before, not at {cut.position}")
    begun = read_manifest(root, disk=disk)
    if begun is None and not _is_free(disk, root):
        raise WrongFolderError(f"{root} is not empty: restore into a folder that is")
    if begun is not None and (not begun.is_restore or _has_more(begun, kept, cut)):
        raise WrongFolderError(
            f"{root} is another backup, or a restore with another end: restore into an empty folder"
        )
    source = FolderSource(backup, disk=disk)
    first = source.first_append()
    # Before anything is made: what is refused leaves nothing.
    if first is not None and (first.end_position > cut.position or first.store_time_ms > cut.time_ms):
        raise CutError(
            f"{backup} has nothing that old: its first messages or changes were stored at {first.store_time_ms} ms since 1970, and end at "
            f"position {first.end_position}. Cut it there or later"
        )
    _make_folders(disk, root)
    lock = StoreLock(disk, root)
    try:
        fresh = replace(kept, end=START, end_time_ms=0, complete_time_ms=0, is_restore=True)
        copy = _Copy(disk, root, begun or fresh, kept.end.position)
        try:
            copy.run(source, cut)
        except _GoneError as gone:
            raise BackupError(_what_is_missing(source, gone.position, kept)) from None
        except ForeignBytesError as error:
            raise BackupError(
                f"{backup} is damaged at position {error.position} of the log: {error.reason}. Take another backup, of the broker or a"
                f" slave. This one has {_what_is_left(error.position, kept)}; `protomq log repair` of a copy of the folder gives the rest"
            ) from error
        manifest = copy.manifest
        folder = SegmentFolder(disk, f"{root}/commitlog", manifest.segment_size_bytes)
        folder.open()
        epochs = find_epochs(disk, folder, manifest.end.position)
        if is_slave:
            write_json_file(disk, f"{root}/{RESTORED_SLAVE_NAME}", {})
        else:
            # An earlier run may have been to make a slave.
            remove_file(disk, f"{root}/{RESTORED_SLAVE_NAME}")
            highest = max(epochs.highest_epoch, kept.end.epoch) + RESTORED_EPOCHS
            epochs = replace(epochs, highest_epoch=highest)
        write_epochs(disk, f"{root}/{EPOCHS_NAME}", epochs)
        keep_front(disk, root, folder, manifest.first_position)
        remove_file(disk, f"{root}/{BACKUP_NAME}")
        return copy.report()
    finally:
        lock.release()


def _has_more(begun: Manifest, kept: Manifest, cut: Cut) -> bool:
    """Whether a restore that was interrupted has come further than this one is to come, or to the same end of another log."""
    position, end_position = begun.end.position, kept.end.position
    is_further = position > min(cut.position, end_position) or begun.end_time_ms > cut.time_ms
    return is_further or (position == end_position and begun.end != kept.end)


def read_manifest(root: Path | str, *, disk: Disk | None = None) -> Manifest | None:
    """What a backup has; None if the folder is none. Raises BackupError if the file is damaged."""
    disk = disk or Disk()
    path = f"{str(root).rstrip('/')}/{BACKUP_NAME}"
    try:
        content = read_json_file(disk, path)
        if content is None:
            return None
        return Manifest(**{**content, "end": LogPoint(*content["end"])})
    except (SideFileDamagedError, KeyError, TypeError, ValueError) as error:
        raise BackupError(
            f"{path} does not hold: {error}: begin another backup in another folder"
        ) from error


class FolderSource:
    """A backup, or a store whose broker is stopped. A LogSource."""

    def __init__(
        self, root: Path | str, broker_name: str = "", *, disk: Disk | None = None
    ) -> None:
        """`broker_name`: of a store, which does not have it. Raises StoreSettingsError, StoreInUseError."""
        disk, self._root = disk or Disk(), str(root).rstrip("/")
        self._manifest = read_manifest(self._root, disk=disk)
        self._broker_name = broker_name
        if self._manifest is None and is_locked(disk, self._root):
            raise StoreInUseError(f"a broker is running on {self._root}: name it with --broker")
        self._store = open_offline(self._root, disk)
        self._epochs = read_epochs(disk, f"{self._root}/{EPOCHS_NAME}")
        self._end: int | None = self._manifest.end.position if self._manifest is not None else None
        self._problem = ""

    def look(self) -> SourceLook:
        """See LogSource."""
        store, folder = self._store, self._store.folder
        if self._end is None:
            checkpoint = store.checkpoint
            walker = store.walk(store.start(checkpoint.replay_position if checkpoint else 0))
            for _ in walker:
                pass
            self._end = walker.position
            self._problem = "" if walker.ended_cleanly else walker.problem
        epoch_position, epoch, _ = self._epochs.last
        return SourceLook(
            self._broker_name, folder.segment_size_bytes, folder.first_position, self._end, self._problem, epoch, epoch_position
        )

    def read(self, position: int, size_max_bytes: int) -> bytes:
        """See LogSource."""
        segment = self._store.folder.at(position)
        if segment is None:
            return b""
        size_bytes = min(size_max_bytes, segment.end_position - position)
        return segment.read(position - segment.base_position, size_bytes)

    def path_at(self, position: int) -> str:
        """The file in which a position lies, or should."""
        return self._store.folder.path_at(position)

    def first_append(self) -> Seal | None:
        """The first append that is not the empty head of a segment, as far as the log holds; None if there is none."""
        store = self._store
        for block in store.walk(store.start()):
            for seal in block.seals:
                if not seal.is_head:
                    return seal
        return None

    def sealed_path(self, base_position: int) -> str:
        """See LogSource. What is restored is never a link: its store may write there."""
        return self._store.folder.path_at(base_position) if self._manifest is None else ""


class LinkingSource:
    """A running broker, and the folder of its store on this machine: sealed segments are linked, the rest is asked of the broker."""

    def __init__(self, source: LogSource, store_root: Path | str) -> None:
        self._source = source
        self._folder = f"{str(store_root).rstrip('/')}/commitlog"

    def look(self) -> SourceLook:
        """See LogSource."""
        return self._source.look()

    def read(self, position: int, size_max_bytes: int) -> bytes:
        """See LogSource."""
        return self._source.read(position, size_max_bytes)

    def sealed_path(self, base_position: int) -> str:
        """See LogSource."""
        return f"{self._folder}/{base_position:020d}"


class _GoneError(Exception):
    """The source has no more what comes next, at `position`: retention has deleted it, or it is lost."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def _what_is_missing(source: FolderSource, position: int, kept: Manifest) -> str:
    return (
        f"{source.path_at(position)} is missing or cut short: the backup lacks the log from position {position} on. Bring the file back"
        f" from a copy of the backup, or take another backup. This one has {_what_is_left(position, kept)}; `protomq log repair` of a copy"
        " of the folder gives the rest"
    )


def _what_is_left(position: int, kept: Manifest) -> str:
    """What a backup gives that is sound up to a position."""
    if position > kept.first_position and position >= kept.complete_from:
        return f"the log up to there, which is sound: `protomq restore --position {position}` gives that"
    return "nothing that could be restored"


def _begun(look: SourceLook) -> Manifest:
    # A log from its very beginning needs nothing that was carried forward.
    complete_from = look.end_position if look.first_position else 0
    return Manifest(look.broker_name, look.segment_size_bytes, look.first_position, complete_from)


def _check_continues(source: LogSource, look: SourceLook, disk: Disk, root: str, manifest: Manifest) -> None:
    """Raises BackupError for a log that is not seen to go on where the copy ends. What is copied proves the rest."""
    end, copied_end = look.end_position, manifest.end.position
    if end < copied_end and look.problem:
        raise BackupError(
            f"the log is damaged from position {end} on: {look.problem} (`protomq log verify` where its files are). "
            f"{root} has it up to {copied_end}, and may have all of the log: keep it"
        )
    # Epochs never fall. So the copy would have that epoch, too.
    if look.epoch > manifest.end.epoch and look.epoch_position < copied_end:
        of_another = "" if look.broker_name else ", or it is that of another broker"
        raise LogDivergedError(
            f"{root} has the log up to {copied_end}, and the broker began epoch {look.epoch} at {look.epoch_position}: it has lost a part "
            f"of it{of_another}. Begin another backup in another folder, and keep this one"
        )
    if end > copied_end:
        return
    if not _ends_alike(source, end, disk, root, manifest):
        if not _ends_sound(source, look):
            raise BackupError(
                f"the last append of the log, which ends at {end}, is damaged (`protomq log verify` where its files are). {root} may have "
                "all of the log: keep it"
            )
        raise LogDivergedError(
            f"the broker's log ends at {end}, and {root}, which has it up to {copied_end}, has another append there. The log has another "
            "past than the copy, or is that of another broker: copy it into another folder, and keep this one"
        )
    if end < copied_end:
        raise LogBehindError(
            f"{root} has the log up to {copied_end}, and this log ends at {end}: so far they are the same, and it lacks {copied_end - end} "
            "bytes. Nothing was changed. Run it again when this broker has caught up (`protomq ha status`), or back up another member of "
            "its name. A master that does not catch up has lost them: begin another backup in another folder, and keep this one"
        )


def _ends_alike(source: LogSource, end: int, disk: Disk, root: str, manifest: Manifest) -> bool:
    """Whether a log that is not longer than the copy ends with an append that the copy has, as far as both have that place."""
    if not end:
        return True
    seal = source.read(end - SEAL_SIZE_BYTES, SEAL_SIZE_BYTES)
    if len(seal) < SEAL_SIZE_BYTES:
        return True  # Retention has deleted it.
    if end == manifest.end.position:
        return int.from_bytes(seal[-CRC_SIZE_BYTES:], "little") == manifest.end.crc32c
    if end <= manifest.first_position:
        return True
    _check_copied(disk, root, manifest)
    return seal == FolderSource(root, disk=disk).read(end - SEAL_SIZE_BYTES, SEAL_SIZE_BYTES)


def _ends_sound(source: LogSource, look: SourceLook) -> bool:
    """Whether the last append of a log holds, as far as the log has what stands before it."""
    end = look.end_position
    seal = decode_seal(source.read(end - SEAL_SIZE_BYTES, SEAL_SIZE_BYTES), 0)
    if seal is None or seal.end_position != end or not end - look.segment_size_bytes <= seal.start_position < end:
        return False
    start, append = seal.start_position, b""
    while start + len(append) < end:
        part = source.read(start + len(append), end - start - len(append))
        if not part:
            return False
        append += part
    before = source.read(start - CRC_SIZE_BYTES, CRC_SIZE_BYTES) if start else bytes(CRC_SIZE_BYTES)
    previous_crc32c = int.from_bytes(before, "little") if before else None
    return walk_appends(append, start, previous_crc32c).size_bytes == len(append)


def _is_free(disk: Disk, root: str) -> bool:
    """Whether nothing is in a folder but what a run leaves that was killed at its very beginning."""
    left = {"config", "commitlog", "lock", f"{BACKUP_NAME}.tmp"}
    return (
        set(disk.list(root)) <= left
        and not disk.list(f"{root}/commitlog")
        and not disk.list(f"{root}/config")
    )


def _refuse_file(disk: Disk, root: str, what: str) -> None:
    if disk.exists(root) and not disk.is_folder(root):
        raise WrongFolderError(f"{root} is a file: {what} into a folder")


def _check_copied(disk: Disk, root: str, manifest: Manifest) -> None:
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


def _make_folders(disk: Disk, root: str) -> None:
    for folder in ("config", "commitlog"):
        disk.make_folder(f"{root}/{folder}")
    disk.fsync_dir(root)
    sync_names_above(disk, root)


def _remove_empty(disk: Disk, root: str) -> None:
    """What a first run leaves that has copied nothing must not look like a backup. As far as the disk lets."""
    with suppress(OSError, BackupError):
        manifest = read_manifest(root, disk=disk)
        if manifest is not None and manifest.end == START:
            empty_folder(disk, f"{root}/commitlog")
            empty_folder(disk, f"{root}/config")
            remove_file(disk, f"{root}/{BACKUP_NAME}")


class _Copy:
    """A run. Attribute: manifest: what the folder has."""

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
        _check_copied(disk, root, manifest)
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

        Raises _GoneError, WrongFolderError, OSError; ForeignBytesError, whose position is the first append that does not hold.
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
                raise _GoneError(read_at)
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
