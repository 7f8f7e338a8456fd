"""Saves what a store knows, and deletes the segments that nobody needs any more. Not on the writer thread.

    checkpoint   the log is synced and confirmed, then snapshots and derived files, then the file that says up to where they are whole
    delete       what is alive in old segments is appended again (`housekeeping/carry_forward.py`); then they go, oldest first
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from protomq.wire.log_walk import walk_appends
from protomq.wire.record import SEAL_SIZE_BYTES

from .files.disk import DISK_FULL_ERRNOS
from .housekeeping.carry_forward import CarryForward
from .leading import Leadership
from .log.checkpoint import Checkpoint, write_checkpoint
from .log.positions import LogTail
from .log.recovery import chain_at_end
from .open_log import OpenLog
from .state.machine import Snapshot, StateMachine
from .store_files import StoreFiles

log = logging.getLogger(__name__)


CONFIRM_LOOKS: Final = 5


def _no_pause() -> None:
    pass


class _Captured(NamedTuple):
    """What a checkpoint is to say.

    Attributes: tail: of the log at one moment; snapshots: of the states then; durable_position: nothing of it lies at or beyond this.
    """

    tail: LogTail
    snapshots: Sequence[Snapshot]
    durable_position: int


class Saver:
    """See the module's docstring.

    Attributes:
        checkpointed_position: end of the log at the last checkpoint; a recovery needs the segments behind it.
        failure: why no checkpoint is written any more until the next start; "" if they are tried.
        pause: lets replicas confirm; nothing, where nobody else runs.
    """

    def __init__(
        self,
        files: StoreFiles,
        open_log: OpenLog,
        checkpointed_position: int,
        machines: Sequence[StateMachine],
        leadership: Leadership,
        carried: CarryForward,
    ) -> None:
        self.checkpointed_position = checkpointed_position
        self.failure = ""
        self.pause: Callable[[], object] = _no_pause
        self._captured: _Captured | None = None
        self._files = files
        self._log = open_log.commit_log
        self._positions = open_log.positions
        self._flusher = open_log.flusher
        self._start = open_log.start
        self._checked = open_log.checked
        self._quarantine = open_log.quarantine
        self._machines = machines
        self._leadership = leadership
        self._carried = carried
        # Where the log says that it begins, and where that record ends.
        self._told_start = (0, 0)

    @property
    def obstacle(self) -> str:
        """Why no checkpoint is written now; "" if they are written.

        A note that the disk refuses holds them up. Behind a checkpoint, the next start would not find again what was to be noted.
        """
        if self.failure or not self._quarantine.refusal:
            return self.failure
        return (
            f"what is in quarantine cannot be noted in config/: {self._quarantine.refusal}. It is tried again. Until then no checkpoint is"
            " written, and no segment behind the last one is deleted. So the disk fills, and a start reads more of the log. See to config/"
        )

    @property
    def unsaved_bytes(self) -> int:
        """Bytes that were appended since the last checkpoint."""
        return self._positions.appended - self.checkpointed_position

    def checkpoint(self) -> bool:
        """Makes everything durable and records that in the checkpoint. Not on the writer thread. False: call it again soon.

        After a failure of the log or of derived files only the old checkpoint is trustworthy: the log is synced, and that is all.

        Where replicas are waited for, a checkpoint waits until they have what it covers. A fail-over may take back what they lack. The
        files beside the log could not forget that, and would have to be made again, from the whole log.
        """
        if self.failure or self._log.failure:
            self._drop()
            self._flusher.flush()
            return True
        if self._captured is None:
            self._captured = self._capture()
        captured, has_to_wait = self._captured, False
        try:
            if self._flusher.flush() >= captured.durable_position:
                has_to_wait = not self._is_confirmed(captured.durable_position)
                if not has_to_wait:
                    self._write(captured)
        finally:
            if not has_to_wait:
                self._drop()
        return not has_to_wait

    def checkpoint_last(self) -> None:
        """The checkpoint of a store that closes, if replicas have all of the log. Else the one before it stands, and it is only noted up to
        where the log is synced: damage there is no torn tail.
        """
        if self._captured is not None:
            self.checkpoint()  # Replicas may have what that covers, and not yet the end.
        self._drop()
        has_to_wait = not self.checkpoint()
        self._drop()
        if has_to_wait:
            self._leadership.keep_synced_position()

    def _is_confirmed(self, position: int) -> bool:
        """Replicas that are there need a few milliseconds. Meanwhile tables are frozen, so sends pay for each change."""
        for _ in range(CONFIRM_LOOKS):
            if self._positions.confirmed >= position:
                return True
            self.pause()
        return self._positions.confirmed >= position

    def _capture(self) -> _Captured:
        tail = self._positions.tail
        frozen_position = self._files.repeated.freeze()
        try:
            found = [machine.unsaved() for machine in self._machines]
        except BaseException:
            self._files.repeated.thaw()
            raise
        snapshots = [snapshot for snapshot in found if snapshot is not None]
        # The log must be on the disk up to the position of these snapshots.
        ends = (snapshot.end_position for snapshot in snapshots)
        return _Captured(tail, snapshots, max((tail.position, frozen_position, *ends)))

    def _drop(self) -> None:
        if self._captured is not None:
            self._captured = None
            self._files.repeated.thaw()

    def _write(self, captured: _Captured) -> None:
        files, positions, tail = self._files, self._positions, captured.tail
        # A checkpoint says that the log is synced so far. Files beside it hold nothing behind that, so it is confirmed, too.
        flushed = min(positions.flushed, positions.confirmed) if positions.waits_for_replicas else positions.flushed
        # Behind the checkpoint, the next start looks for no repair in the log. See `obstacle`.
        self._quarantine.save_again()
        for snapshot in captured.snapshots:
            snapshot.save(tail.position)
        self._leadership.keep_epochs()  # before the walk of the next start begins behind them
        try:
            for derived in files.derived:
                derived.checkpoint(tail.position)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                self.failure = (
                    f"a file beside the log could not be synced: {error}. What was written to it may be gone, so no checkpoint is written,"
                    " and no segment behind the last one is deleted. Check the disk, and restart the broker: it rebuilds the file from"
                    " the log"
                )
                log.critical("%s", self.failure)
            raise
        write_checkpoint(
            files.disk,
            f"{files.root}/checkpoint",
            Checkpoint(
                flushed,
                tail.position,
                tail.crc32c,
                self._log.epoch,
                tail.store_time_ms,
                *self._start.checkpointed(),
            ),
        )
        self.checkpointed_position = tail.position
        self._checked.save(tail.position)
        with self._leadership.changing:
            if self._leadership.follower is not None:
                self.delete_segments_below(tail.position)

    def delete_segments_below(self, position: int) -> int:
        """Deletes the segments that end at or below `position`, except those that a recovery would need. Before, it appends again what is
        alive in them. Returns where the log starts now. Not on the writer thread, unless `Store.on_writer` allows it.

        A follower deletes no more than its leader has, and appends nothing.

        A pull that is sending from a deleted segment goes on: the file stays open while something refers to it.
        """
        folder, positions = self._log.folder, self._positions
        follower = self._leadership.follower
        if follower is not None:
            position = min(position, follower.deletable_below())
        cut = self._log.start_without(min(position, self.checkpointed_position))
        if cut > folder.first_position and follower is None:
            is_told = cut <= self._told_start[0]
            if not is_told:
                self._carried.forward(cut)
                self._told_start = cut, positions.appended
            if positions.waits_for_replicas and positions.confirmed < self._told_start[1]:
                return folder.first_position  # a replica that leads must have what was carried
            if is_told:
                self._carried.forward_popped(cut)
        if self._files.pending.is_rebuilding:
            return folder.first_position  # what the log says of the ends of delayed messages is still to be read
        crc = self._chain_into(cut) if cut > folder.first_position else None
        removed = self._log.remove_segments_below(cut)
        first = folder.first_position
        if removed:
            log.info("%d segments below position %d are deleted", len(removed), first)
            self._start.move(crc if first == cut else chain_at_end(removed[-1], unreadable_is_damage=True))
            self._quarantine.forget_below(first)
            for derived in self._files.derived:
                derived.delete_below(first)
            self._files.topics.forget_deleted(first)
            self._files.boundaries.remove_below(first)
        return first

    def _chain_into(self, position: int) -> int | None:
        """The CRC with which the chain comes to a segment; None if nobody knows it: the segment before is lost, or damaged at its end.

        A wrong one would make damage of the log's first head, where the segment before can be asked no more.
        """
        folder = self._log.folder
        crc = chain_at_end(folder.at(position - 1), unreadable_is_damage=True)
        segment = folder.at(position)
        if crc is None or segment is None:
            return crc
        head = segment.read_if_readable(0, SEAL_SIZE_BYTES)
        if walk_appends(head, position, crc).seals:
            return crc
        # One of the two does not hold.
        last_seal = position - SEAL_SIZE_BYTES
        for damage in self._quarantine.ranges:
            if damage.start_position < position <= damage.end_position:
                return damage.previous_crc32c if damage.end_position == position else None
        self._checked.doubt(last_seal, position)
        return crc if self._checked.find_damage([(last_seal, SEAL_SIZE_BYTES)]) is None else None

    def fail_lost(self, reason: str) -> None:
        """Stops all writes because the files are gone; creates no new ones in their place."""
        log.critical("%s", reason)
        self.failure = reason
        self._log.fail(reason)
        self._positions.note_failed()
