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

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from protomq.wire.log_walk import decode_seal, walk_appends
from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.config import BACKUP_NAME
from protomq_broker.store.errors import (
    BackupError,
    CutError,
    ForeignBytesError,
    LogBehindError,
    LogDivergedError,
    NoBackupError,
    WrongFolderError,
)
from protomq_broker.store.files.disk import Disk, remove_file, sync_names_above
from protomq_broker.store.files.lock import StoreLock
from protomq_broker.store.files.side_files import empty_folder, write_json_file
from protomq_broker.store.log.agreement import START
from protomq_broker.store.log.epochs import EPOCHS_NAME, find_epochs, restored_epoch, write_epochs
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.start.front_note import keep_front
from protomq_broker.store.start.settings import RESTORED_SLAVE_NAME

from .backup_manifest import CopyReport, Cut, Manifest, read_manifest
from .backup_source import FolderSource, LogSource, SourceLook
from .log_copy import GoneError, LogCopy, check_copied

CRC_SIZE_BYTES: Final = 4


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
            copy = LogCopy(disk, root, manifest, look.end_position)
            try:
                copy.run(source, Cut())
                return copy.report()
            except ForeignBytesError as error:
                raise BackupError(
                    f"the log is damaged at position {error.position}, or does not continue there what {root} has: {error.reason}. What "
                    "stands before holds. `protomq log verify` where its files are says which it is. If nothing is damaged, it has another "
                    "past than the copy, or is that of another broker: then copy it into another folder"
                ) from error
            except GoneError as gone:
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
    backup: Path | str,
    root: Path | str,
    cut: Cut | None = None,
    *,
    is_slave: bool = False,
    disk: Disk | None = None,
    now_ms: int = 0,
) -> CopyReport:
    """Makes a store of a backup, which stays as it is. May be interrupted, and run again. Every byte is proved on its way.

    `is_slave`: the store is to follow a master that is there. `now_ms`: since 1970; it keeps the epochs of restores apart.

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
        copy = LogCopy(disk, root, begun or fresh, kept.end.position)
        try:
            copy.run(source, cut)
        except GoneError as gone:
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
            highest = restored_epoch(max(epochs.highest_epoch, kept.end.epoch), kept.end_time_ms, now_ms)
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
    check_copied(disk, root, manifest)
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
