"""Loads the files of a store and brings them to the end of its log: the first part of opening a store. Nothing runs yet."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from protomq.wire.log_walk import WalkedBlock

from .config import StoreConfig
from .derived import Derived
from .errors import StaleEpochError
from .files.disk import DISK_FULL_ERRNOS, Disk
from .files.identity import store_id
from .files.lock import AbortFile, StoreLock
from .housekeeping.housekeeping import Clock
from .housekeeping.log_healing import complete_healing
from .index.index import MessageIndex
from .log.boundaries import BoundaryFiles
from .log.checked_segment import Stretch, stretch_of
from .log.checkpoint import Checkpoint, read_checkpoint
from .log.epochs import (
    EPOCHS_NAME,
    Epochs,
    epoch_at_end,
    find_epochs,
    read_epochs,
    write_epochs,
)
from .log.recovery import RecoveredLog, StartPoint, is_repaired
from .log.segment import SegmentFolder
from .queues.consume_queue_table import ConsumeQueueTable
from .queues.queue_ends import read_saved_ends, save_ends
from .start.derived_recovery import rebuild, recover_store
from .start.front_note import keep_front, settle_front
from .start.log_proof import forget_unused_segments
from .start.log_replay import StartFiles
from .start.settings import check_settings, make_folders
from .start.truncation import complete_truncation
from .state.half_messages import HalfMessages
from .state.repeated_sends import RepeatedSends
from .state.topics import TopicTable
from .state.transactions import CheckPlan, Transactions
from .timer.pending import PendingTimers
from .timer.timer import TimerEntries

log = logging.getLogger(__name__)

NO_POSITION: Final = (1 << 64) - 1
"""In a checkpoint: the CRC at the log's start is unknown."""


class StoreFiles:
    """Attributes: the files of a store, under their names. Raises what `Store.open` raises."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        config: StoreConfig,
        clock: Clock,
        lock: StoreLock,
        draw: Callable[[], int] | None,
        check_plan: CheckPlan,
    ) -> None:
        check_settings(disk, root, config)
        make_folders(disk, root)
        self.disk = disk
        self.root = root
        self.config = config
        self.lock = lock
        self.id = store_id(disk, root, draw or (lambda: 1))
        self.abort = AbortFile(disk, root)
        self.folder = SegmentFolder(disk, f"{root}/commitlog", config.segment_size_bytes)
        self.folder.open()
        complete_truncation(disk, root, self.folder, lock)
        settle_front(disk, root, self.folder)
        self.waiting_ranges = complete_healing(disk, root, self.folder)
        forget_unused_segments(disk, root, self.folder)
        self.queues = ConsumeQueueTable(disk, f"{root}/consumequeue")
        self.index = MessageIndex(disk, f"{root}/index")
        self.repeated = RepeatedSends(
            disk, f"{root}/repeatedsends", end_offset_of=self.queues.end_offset
        )
        self.pending = PendingTimers(disk, f"{root}/timer")
        self.transactions = Transactions(check_plan)
        self.transactions_folder = f"{root}/transactions"
        self.halves = HalfMessages(disk, self.transactions_folder, self.transactions)
        self.derived: tuple[Derived, ...] = (
            self.queues,
            self.index,
            self.repeated,
            TimerEntries(self.pending),
            self.halves,
        )
        """The structures that follow the log record by record, in this order. Each one follows appends, starts, retention and checkpoints.
        """
        self.topics = TopicTable(
            disk,
            f"{root}/config/topics.json",
            clock.now_ms,
            draw,
            log_start=self.folder.first_position,
        )
        self.boundaries = BoundaryFiles(disk, f"{root}/boundaries")
        self.epochs = read_epochs(disk, self._epochs_path)
        self.has_written_epochs = True
        """Whether the file has `epochs`. After a write that failed it is not known what the file has."""

    def recover(self) -> Recovery:
        """Finds the end of the log, and brings the derived structures to it."""
        disk = self.disk
        checkpoint = self._checkpoint()
        path = self._checkpoint_path
        if checkpoint is None and disk.exists(path):
            log.warning("%s is damaged: the log is walked from its first segment on", path)
        config_folder = f"{self.root}/config"
        self.queues.known_ends += read_saved_ends(disk, config_folder)
        self.queues.keep_known_ends = partial(save_ends, disk, config_folder)
        for structure in self.derived:
            structure.load(self.folder.first_position)
        files = self._start_files(checkpoint)
        for structure in self.derived:
            structure.forget_deleted(files.deleted)
        cache_id = disk.cache_id(self.root)
        walked: list[Stretch] = []
        epochs = self.epochs

        def take(block: WalkedBlock) -> None:
            nonlocal epochs
            walked.append(stretch_of(block))
            epochs = epochs.note_walked(block.seals)

        recovered = recover_store(
            files,
            self.config.corruption,
            epochs=self.epochs,
            same_cache=bool(cache_id) and cache_id == self.lock.previous_cache_id,
            boundaries=self.boundaries,
            on_walked=take,
        )
        if epochs.is_known:  # else what was walked is not all
            self.epochs = epochs
        if not self.topics.believe(recovered.tail.position):  # nor what followed from it
            rebuild(self._start_files(checkpoint), recovered, self.derived)
        replay_position = checkpoint.replay_position if checkpoint else 0
        return Recovery(recovered, LogStart.of(self.folder, checkpoint), replay_position, walked)

    def settle_epochs(self, recovered: RecoveredLog) -> None:
        """Sets the epochs of a recovered log, which is synced. Does not write them yet."""
        end = recovered.tail.position
        epochs = self.epochs
        if not epochs.is_known:
            epochs = find_epochs(self.disk, self.folder, end)
        epochs = epochs.between(self.folder.first_position, end, recovered.synced_position)
        highest = max(epochs.highest_epoch, recovered.epoch)
        self.epochs = replace(epochs, highest_epoch=highest)

    def begin_epoch(self, end: int, epoch: int | None = None) -> int:
        """Begins a new epoch at the end of the log, in which the store leads. It is durable when this returns.

        `epoch`: the epoch that the store was given; None: the next one. Raises StaleEpochError, OSError. If the disk is full, the store
        stays in the epoch in which it led last, so that segments can be deleted. If the file has the new epoch, it stays in that. This does
        not apply to a given epoch, nor where the log was cut back before that epoch. There another store wrote what stands at the end. Who
        compares logs or offsets by their epochs would not notice what is gone.
        """
        epochs = self.epochs
        is_given = epoch is not None
        if epoch is None:
            epoch = epochs.highest_epoch + 1
        elif epoch <= epochs.highest_epoch:
            raise StaleEpochError(epoch, epochs.highest_epoch)
        try:
            self.keep_epochs(epochs.begin(end, epoch, is_led=True))
        except OSError as error:
            last = epochs.row_at(end)
            if is_given or error.errno not in DISK_FULL_ERRNOS or last is None or not last.is_led:
                raise
            epoch = self._epoch_that_stands(last.epoch)
            log.warning("the disk is full, epoch %d is not durable yet: %s", epoch, error)
            return epoch
        log.info("epoch %d begins at position %d", epoch, end)
        return epoch

    def _epoch_that_stands(self, last_epoch: int) -> int:
        """Returns the epoch in which to lead after the file could not be made durable: the new one if the file has it, else `last_epoch`.

        The next start reads the file, so the seals must have the same epoch.
        """
        standing = read_epochs(self.disk, self._epochs_path)
        if standing.highest_epoch <= self.epochs.highest_epoch:
            return last_epoch
        self.epochs = standing
        return standing.highest_epoch

    def end_epoch(self, recovered: RecoveredLog) -> int:
        """Ends the lead at the end of the log: from there on the store follows. Durable when this returns, unless the disk is full: then
        `has_written_epochs` tells. Returns the log's epoch there. Raises OSError.
        """
        end = recovered.tail.position
        row = self.epochs.row_at(end - 1)
        # A seal that is damaged may tell any epoch.
        epoch = 0 if self._ends_with_damage(recovered) else epoch_at_end(self.folder, end)
        if row is not None:  # a log that ends with damage has no last append that tells
            epoch = max(epoch, row.epoch)
        epochs = self.epochs.begin(end, epoch, is_led=False)
        try:
            self.keep_epochs(epochs)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            log.warning("the disk is full: %s", error)
            standing = read_epochs(self.disk, self._epochs_path)
            self.has_written_epochs = (standing.rows, standing.highest_epoch) == (epochs.rows, epochs.highest_epoch)
            self.epochs = epochs
        return epoch

    def _ends_with_damage(self, recovered: RecoveredLog) -> bool:
        end = recovered.tail.position
        return any(found.end_position == end and not is_repaired(self.disk, self.folder, found) for found in recovered.damaged)

    def keep_front(self, position: int) -> bool:
        """Notes where the log begins, before segments go; whether the disk had the space for it. Raises OSError."""
        return keep_front(self.disk, self.root, self.folder, position)

    def keep_epochs(self, epochs: Epochs) -> None:
        """Writes the epochs to their file. Raises OSError."""
        self.has_written_epochs = False
        write_epochs(self.disk, self._epochs_path, epochs)
        self.epochs, self.has_written_epochs = epochs, True

    def rebuild_queues(self, recovered: RecoveredLog) -> None:
        """Rebuilds the consume queues from the log."""
        rebuild(self._start_files(self._checkpoint()), recovered, [self.queues])

    def _start_files(self, checkpoint: Checkpoint | None) -> StartFiles:
        return StartFiles(
            self.disk,
            self.folder,
            f"{self.root}/config",
            checkpoint,
            self.queues,
            self.derived,
            dict(self.topics.deleted),
        )

    @property
    def _epochs_path(self) -> str:
        return f"{self.root}/{EPOCHS_NAME}"

    @property
    def _checkpoint_path(self) -> str:
        return f"{self.root}/checkpoint"

    def _checkpoint(self) -> Checkpoint | None:
        return read_checkpoint(self.disk, self._checkpoint_path)


class LogStart:
    """Where the log begins, and the CRC with which the chain of seals comes there, if that is known."""

    def __init__(self, folder: SegmentFolder, position: int, crc32c: int | None) -> None:
        self._folder = folder
        self._known = (position, crc32c)

    @classmethod
    def of(cls, folder: SegmentFolder, checkpoint: Checkpoint | None) -> LogStart:
        """Returns the log's start as a start of the store finds it."""
        first = folder.first_position
        if first == 0:
            return cls(folder, 0, 0)
        if checkpoint is not None and checkpoint.first_position == first:
            return cls(folder, first, checkpoint.first_crc32c)
        return cls(folder, NO_POSITION, None)

    def move(self, crc32c: int | None) -> None:
        """The log begins elsewhere now, as after segments were removed. `crc32c`: of the last seal before that."""
        self._known = (self._folder.first_position, crc32c)

    def point(self) -> StartPoint:
        """Where a walk of the whole log begins."""
        first = self._folder.first_position
        position, crc32c = self._known
        return StartPoint(first, crc32c if position == first else None)

    def checkpointed(self) -> tuple[int, int]:
        """Returns (position, CRC) for the checkpoint."""
        position, crc32c = self._known
        return (position, crc32c) if crc32c is not None else (NO_POSITION, 0)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a start has found.

    Attributes: log: its end and its damaged ranges; start: where it begins; replay_position: from the checkpoint; walked: the parts that
    are valid.
    """

    log: RecoveredLog
    start: LogStart
    replay_position: int
    walked: list[Stretch] = field(default_factory=list)
