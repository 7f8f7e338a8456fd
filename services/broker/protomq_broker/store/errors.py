"""What can go wrong in the store. It knows nothing of status codes: the services above have a table for that.

StoreError
  StoreLockedError          another process has the store open
  StoreSettingsError        the store on disk was made with other settings, or by another version
    NotAStoreError          the folder has something else in it
  WritesRefusedError        nothing of the append is stored; reading goes on
    DiskFullError           no space: passes by itself when space is free again
    StoreFailedError        a write or fsync failed: only a restart, which recovers, takes writes again
  NotLeadingError           the store follows another one: it takes nothing but that one's bytes
  NotFollowingError         the store leads: it takes nobody else's bytes
  ForeignBytesError         what a follower was given does not continue its log
    LogGapError             it begins elsewhere than the log ends: fetch from there
    LogForkError            the two logs differ: truncate to where they agree
  StaleEpochError           an epoch in which the store is to lead is not above those that it knows
  AppendTooLargeError       the group does not fit into one append
  NoWriterError             nothing is appended, since the writer thread does not run
  TooManyCandidatesError    a look-up would open more records than it may
  CorruptLogError           bytes of the log that were stored safely do not hold any more
  BackupError               a backup or a restore cannot go on
    CutError                a restore is to end where the backup does not reach
    LogBehindError          the log to be copied lacks the end of what the backup has
    LogDivergedError        it has another past than the backup
    NoBackupError           there is none where one is to be read
    StoreInUseError         a store is to be copied whose broker is running
    WrongFolderError        the folder that is to be written has something else
  HealingRefusedError       the bytes of a replica are not those that a damaged range had
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

_NAMED_MAX: Final = 5
"""So many names that were found are listed."""


class StoreError(Exception):
    """Base class of all errors of the store."""


class StoreLockedError(StoreError):
    """Another process has the store open.

    Attributes: root: folder of the store; pid: the process that holds the lock, 0 if it cannot be told.
    """

    def __init__(self, root: str, pid: int) -> None:
        holder = f"process {pid}" if pid else "another process"
        super().__init__(
            f"the store {root} is in use by {holder}: stop it, or choose another folder"
        )
        self.root = root
        self.pid = pid


class BackupError(StoreError):
    """A backup or a restore cannot go on. The parts that were copied stay valid."""


class LogBehindError(BackupError):
    """The log to be copied is the beginning of what the backup has. Run it again when the log has caught up."""


class LogDivergedError(BackupError):
    """The log to be copied has lost a part of what the backup has, or is another one. It never goes on with this backup."""


class NoBackupError(BackupError):
    """There is no backup where one is to be read."""


class CutError(BackupError):
    """A restore is to end where the backup has nothing, or does not tell everything."""


class StoreInUseError(BackupError):
    """The files of a store are to be copied whose broker is running."""


class WrongFolderError(BackupError):
    """The folder that is to be written, or whose files are to be linked, has something else. Nothing there is changed."""


class HealingRefusedError(StoreError):
    """The bytes given to heal a damaged range of the log, [start_position, end_position), are not the bytes that stood there."""

    def __init__(self, start_position: int, end_position: int, reason: str) -> None:
        super().__init__(f"positions {start_position} to {end_position} of the log are not healed with these bytes: {reason}")
        self.start_position = start_position
        self.end_position = end_position
        self.reason = reason


class StoreSettingsError(StoreError):
    """The store on disk does not fit the configuration."""


class NotAStoreError(StoreSettingsError):
    """The folder is neither empty nor a store. Nothing in it was touched. Attribute: found: the names that no new store has."""

    def __init__(self, root: str, found: Sequence[str]) -> None:
        names = ", ".join(found[:_NAMED_MAX])
        if len(found) > _NAMED_MAX:
            names += f" and {len(found) - _NAMED_MAX} more"
        super().__init__(
            f"{root} is no store of protomq, and is not empty (it has {names}); nothing was changed. Give the broker an empty"
            " folder, or one that is not there yet. A store of RocketMQ cannot be opened. A store that has lost config/store.json"
            " needs that file back"
        )
        self.found = tuple(found)


class WritesRefusedError(StoreError):
    """Nothing of the append is stored; what was stored before can still be read."""


class DiskFullError(WritesRefusedError):
    """There is no space for the append. Writes are taken again when space is free."""


class StoreFailedError(WritesRefusedError):
    """A write or an fsync of the log failed. Nothing is appended any more until the broker is started again and has recovered."""


class NotLeadingError(StoreError):
    """The store follows another one, so it makes no changes. The caller must ask the leader."""


class NotFollowingError(StoreError):
    """The store leads: its log continues with its own appends only."""


class StaleEpochError(StoreError):
    """The store was told to lead in an epoch that is over. Attributes: epoch: that epoch; highest_epoch: the highest that the store knows.
    """

    def __init__(self, epoch: int, highest_epoch: int) -> None:
        super().__init__(
            f"epoch {epoch} is over: the store knows of epoch {highest_epoch}. Begin a higher one"
        )
        self.epoch = epoch
        self.highest_epoch = highest_epoch


class ForeignBytesError(StoreError):
    """The store refuses bytes of the leader's log, since they do not continue its own log.

    Attributes: position: where this log ends; reason: what does not hold.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"bytes for position {position} of the log are not stored: {reason}")
        self.position = position
        self.reason = reason


class LogGapError(ForeignBytesError):
    """The bytes begin elsewhere than the log ends. Attribute: given_position: where they begin."""

    def __init__(self, position: int, given_position: int) -> None:
        super().__init__(position, f"they begin at {given_position}")
        self.given_position = given_position


class LogForkError(ForeignBytesError):
    """The bytes do not continue the log: the log has another past than the leader's, or the bytes are damaged."""


class NoWriterError(StoreError):
    """The writer is not started yet, or has ended: nothing is appended."""


class AppendTooLargeError(StoreError):
    """A group of records larger than an append may be.

    Attributes: size_bytes: what was asked for; size_max_bytes: the most that one append takes.
    """

    def __init__(self, size_bytes: int, size_max_bytes: int) -> None:
        super().__init__(
            f"an append of {size_bytes} bytes: at most {size_max_bytes} fit, send less at a time"
        )
        self.size_bytes = size_bytes
        self.size_max_bytes = size_max_bytes


class TooManyCandidatesError(StoreError):
    """A look-up by key found more records with the key's hash than it may open.

    Attributes: limit: the most records that it may open.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"more than {limit} messages with a key of this hash, of this topic or others: narrow it down by begin_time and end_time"
        )
        self.limit = limit


class LostMessage(NamedTuple):
    """A message in a damaged part of the log, as its queue knows it.

    Attributes:
        topic, queue_id, queue_offset: its place.
        next_offset: offset at which a reader of the queue can go on.
    """

    topic: str
    queue_id: int
    queue_offset: int
    next_offset: int


class CorruptLogError(StoreError):
    """Bytes of the log that were safely stored have been damaged since.

    Attributes:
        path: the segment file.
        position: physical offset of the first damaged append.
        end_position: physical offset at which the log is valid again; -1 if it is not, or if nobody looked.
        reason: what is wrong.
        lost: the message that was to be read; None where no queue was read.
        is_gone: whether the message never comes back: `protomq log repair` has taken it out, or no damaged range is known there. The log
            holds then, and lacks it.
    """

    def __init__(
        self,
        path: str,
        position: int,
        reason: str,
        end_position: int = -1,
        lost: LostMessage | None = None,
    ) -> None:
        extent = (
            f"positions {position} to {end_position}"
            if end_position >= 0
            else f"position {position}"
        )
        super().__init__(f"{path}: {extent}: {reason}")
        self.path = path
        self.position = position
        self.end_position = end_position
        self.lost = lost
        self.is_gone = False
        self.reason = reason

    @property
    def next_offset(self) -> int:
        """Queue offset at which a reader of the queue can go on; -1 where no queue was read."""
        return self.lost.next_offset if self.lost is not None else -1
