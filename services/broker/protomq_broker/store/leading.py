"""Whether a store leads or follows, and how its log agrees with the logs of other stores.

A follower's log is its leader's: it stores the bytes that the leader gives (`following.py`). It is truncated where the two logs differ
(`start/truncation.py`). It becomes the leader from the end of its log on, in a new epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from protomq.wire.log_walk import Seal

from .errors import (
    CorruptLogError,
    DiskFullError,
    LogForkError,
    NotFollowingError,
    StoreFailedError,
)
from .files.disk import DISK_FULL_ERRNOS
from .following import Follower
from .log.agreement import START, LogPoint
from .log.epochs import Epochs
from .log.recovery import DamagedRange, explain_problem, skips_of
from .log.seals import LogWalker, seal_before
from .open_log import OpenLog
from .queues.reading import LogRegion
from .start.truncation import intend_truncation, is_truncation_intended
from .state.log_front import LogFront
from .store_files import StoreFiles

NEAR_SIZE_BYTES: Final = 1 << 20
"""So much before a position is walked, where a segment has it: damage there is noticed."""


class Leadership:
    """See the module's docstring.

    Attributes:
        follower: stores the leader's bytes; None: this store leads.
        changing: held while the store begins to lead: what a follower keeps and deletes must not go on behind it.
    """

    def __init__(self, files: StoreFiles, open_log: OpenLog, front: LogFront) -> None:
        self.follower: Follower | None = None
        self.changing = threading.Lock()
        self._files = files
        self._log = open_log.commit_log
        self._positions = open_log.positions
        self._flusher = open_log.flusher
        self._quarantine = open_log.quarantine
        self._checked = open_log.checked
        self._reader = open_log.reader
        self._refusals = open_log.refusals
        self._front = front

    # Changing sides: the writer thread.

    def lead(self, epoch: int | None) -> None:
        """Makes the follower lead from the end of its log on, in a new epoch, which is durable when this returns.

        `epoch`: the epoch that the store was given; None: the next one. Raises StoreFailedError, StaleEpochError, OSError; then the store
        still follows.
        """
        with self.changing:
            follower = self.follower
            assert follower is not None, "a follower becomes the leader"
            if self._log.failure:
                raise StoreFailedError(self._log.failure)
            files, before = self._files, self._files.epochs
            files.epochs = follower.epochs
            try:
                self._log.epoch = files.begin_epoch(self._positions.appended, epoch)
            except BaseException:
                files.epochs = before  # else nobody would write down what the follower has heard of
                raise
            self.follower = None

    def check_room(self) -> None:
        """Writes the epochs of a follower again, as the beginning of a lead would. Any thread. Raises StoreFailedError, OSError."""
        with self.changing:
            if self._log.failure:
                raise StoreFailedError(self._log.failure)
            if self.follower is not None:
                self._write_epochs(self.follower.epochs)

    def append_verbatim(
        self,
        position: int,
        data: bytes | memoryview,
        *,
        may_end_within: bool = False,
        previous_crc32c: int | None = None,
    ) -> int:
        """Stores whole appends of the leader's log, which stand at `position` there. Returns the new appended position.

        `may_end_within`: the data may end with a part of one more append, which is not stored yet. An empty log begins at any segment.
        `previous_crc32c`: the CRC with which the leader's chain comes there; None: the leader does not know it, and the head is believed.
        Raises NotFollowingError; ForeignBytesError: nothing is stored; DiskFullError, StoreFailedError: the appends up to the appended
        position are stored.
        """
        if self.follower is None:
            raise NotFollowingError("the store leads: it takes nobody else's bytes")
        try:
            if not self._files.has_written_epochs:
                self._begin_to_follow()
            return self.follower.append(
                position, data, may_end_within=may_end_within, previous_crc32c=previous_crc32c
            )
        except DiskFullError as error:
            self._refusals.note_full(str(error))
            raise

    def _begin_to_follow(self) -> None:
        """Writes down from where on this store follows, which the full disk of its start did not take. Raises DiskFullError, OSError.

        Without that, bytes that are stored now would count as written by this store.
        """
        try:
            self.keep_epochs()
        except OSError as error:
            if error.errno in DISK_FULL_ERRNOS:
                raise DiskFullError(f"there is no room to store another log's bytes: {error}") from error
            raise

    def truncate_to(self, point: LogPoint) -> LogPoint:
        """Makes the next opening truncate the log to a point at which it agrees with the leader's. Until then the store takes no appends.

        `START`: the logs agree nowhere, so the log begins again where the leader's does. It also begins again if its front was deleted and
        what was carried forward from there stands behind the point. Returns where the log will end. Raises NotFollowingError;
        LogForkError: the log has no such point; StoreFailedError, OSError: nothing has changed, or the log has failed.
        """
        if self.follower is None:
            raise NotFollowingError("the store leads: nobody says where its log ends")
        if point != START and self.log_point(point.position) != point:
            raise LogForkError(self._positions.appended, f"it has no {point}")
        if not self._front.is_told(self._log.folder.first_position, point.position, self._reader):
            point = START
        if self._flusher.flush() < point.position:
            raise StoreFailedError(self._log.failure)
        # The truncation adds a row for the point: it must come behind those that only this process has heard of.
        self.keep_epochs()
        try:
            intend_truncation(self._files.disk, self._files.root, point)
        except OSError as error:
            if is_truncation_intended(self._files.disk, self._files.root):
                # The next start truncates, so nothing may come behind the point until then.
                self._log.fail(f"the log is to be truncated to position {point.position}, and {error}: open the store again")
            raise
        self._log.fail(f"the log is to be truncated to position {point.position}: open the store again")
        return point

    def keep_epochs(self) -> None:
        """Saves the epochs that a follower has heard of, if there are new ones. Any thread. Raises OSError."""
        with self.changing:
            follower, files = self.follower, self._files
            if follower is None or (files.has_written_epochs and follower.epochs.rows == files.epochs.rows):
                return
            self._write_epochs(follower.epochs)

    def keep_synced_position(self) -> None:
        """Saves the epochs with the position up to which the log is synced by now. Any thread. Raises OSError."""
        with self.changing:
            if self.epochs.rows:
                self._write_epochs(self.epochs)

    def _write_epochs(self, epochs: Epochs) -> None:
        first = self._log.folder.first_position
        self._files.keep_epochs(epochs.between(first, epochs.rows[-1].start_position, self._positions.flushed))

    # What the log is compared by: any thread.

    @property
    def epochs(self) -> Epochs:
        """The epochs of the log, and which parts of it this store wrote as the leader."""
        follower = self.follower
        return self._files.epochs if follower is None else follower.epochs

    def epoch_end(self, epoch: int) -> tuple[int, int] | None:
        """Returns (the last epoch of the log that is not above `epoch`, where it ends); None if there is none."""
        return self.epochs.end_of(epoch, self._positions.appended)

    def shared_end_offset(self, topic: str, queue_id: int, epoch: int) -> int | None:
        """Up to which queue offset this log is the same as any other log that had this epoch at its end, as KIP-320 has it.

        None: this log knows no such limit, since the epoch is its last one, or a later one than it has heard of.
        """
        epochs = self.epochs
        if not epochs.rows or epoch >= epochs.rows[-1].epoch:
            return None
        known = epochs.end_of(epoch, self._positions.appended)
        return self._reader.first_offset_behind(topic, queue_id, known[1] if known is not None else 0)

    def log_point(self, position: int) -> LogPoint | None:
        """Returns the end of an append at a position; None if there is none. Reads a part of a segment.

        A log that does not hold up to there is no answer. The damage goes into quarantine, as where a reader finds it, and the walk goes on
        behind it. Raises CorruptLogError if the position lies in the damage: nobody can tell what ended there.
        """
        folder = self._log.folder
        if not 0 < position <= self._positions.appended:
            return START if position == folder.first_position == 0 else None
        while position > folder.first_position:
            ranges = self._quarantine.ranges
            for damage in ranges:
                if damage.start_position < position <= damage.end_position:
                    return self._point_in(damage, position)
            walker, seals = self._walk_to(position, ranges)
            if walker.position >= position:
                ends = (seal for seal in seals if seal.end_position == position)
                return next((LogPoint(position, seal.epoch, seal.crc32c) for seal in ends), None)
            if folder.first_position <= walker.position:
                reason = explain_problem(walker.problem)
                self._quarantine.add(self._checked.damage_from(walker.position, reason))
        return None

    def _walk_to(
        self, position: int, ranges: Sequence[DamagedRange]
    ) -> tuple[LogWalker, list[Seal]]:
        """Walks the segment before a position. Returns a walker that got there, with its last seals; else one that got stuck twice."""
        folder = self._log.folder
        base = (position - 1) // folder.segment_size_bytes * folder.segment_size_bytes
        head: tuple[int, int | None] = base, None
        for damage in ranges:
            if damage.start_position <= base < damage.end_position:
                head = damage.end_position, damage.previous_crc32c
        hints = [at for at in self._checked.boundaries(base) if head[0] < at[0] <= position - NEAR_SIZE_BYTES]
        end = min(base + folder.segment_size_bytes, self._positions.appended)
        starts = [*hints[-1:], head, head]
        while True:
            start, crc = starts.pop(0)
            walker = LogWalker(
                self._files.disk, folder, start, crc, skips=skips_of(ranges), end_position=end, unreadable_is_damage=True
            )
            for block in walker:
                if walker.position >= position:
                    return walker, block.seals
                # A follower may not wait as long as the walk of a segment takes. When it asks again, it need not.
                self._checked.note_boundary(base, walker.position, block.seals[-1].crc32c)
            if not starts:
                return walker, []

    def _point_in(self, damage: DamagedRange, position: int) -> LogPoint | None:
        """The point at a position that is in a damaged range, or at its end. There the log goes on, so its CRC is known."""
        folder = self._log.folder
        if position == damage.end_position:
            seal, row = seal_before(folder, position, unreadable_is_damage=True), self.epochs.row_at(position - 1)
            if seal is not None and seal.crc32c == damage.previous_crc32c and row is not None:
                return LogPoint(position, row.epoch, seal.crc32c)
        if self._quarantine.is_repaired(damage):
            return None
        raise self._in_quarantine(damage, f"so whether an append ended at {position} is not known")

    def _in_quarantine(self, damage: DamagedRange, what_follows: str) -> CorruptLogError:
        return CorruptLogError(
            self._log.folder.path_at(damage.start_position),
            damage.start_position,
            f"{damage.reason}: this is in quarantine, {what_follows}",
            damage.end_position,
        )

    def prove_again(self, start: int, end: int) -> None:
        """Reads a part of the log again, whatever was proved before. Damage goes into quarantine, as where a reader finds it."""
        start, end = max(start, self._log.folder.first_position), min(end, self._positions.appended)
        size_bytes = self._log.folder.segment_size_bytes
        while start < end:
            part_end = min(end, start - start % size_bytes + size_bytes)
            self._checked.doubt(start, part_end)
            damage = self._checked.find_damage([(start, part_end - start)])
            if damage is not None:
                self._quarantine.add(damage)
                return
            start = part_end

    def sound_end(self, start: int, end: int) -> int:
        """Returns up to where nothing of [start, end) is in quarantine, but for what a repair has filled. Raises CorruptLogError if `start`
        is.
        """
        for damage in self._quarantine.ranges:
            if damage.start_position < end and start < damage.end_position and not self._quarantine.is_repaired(damage):
                if damage.start_position <= start:
                    raise self._in_quarantine(damage, f"so nobody gets what stands at {start}")
                return damage.start_position
        return end

    def log_regions(self, start: int, end: int) -> list[LogRegion]:
        """Returns the log from `start` to `end` as regions of its segments, unchecked; less if segments are gone."""
        regions: list[LogRegion] = []
        for segment in self._log.folder.overlapping(start, end):
            first = max(start, segment.base_position)
            if first != start + sum(region.size_bytes for region in regions):
                break
            last = min(end, segment.end_position)
            regions.append(LogRegion(segment, first - segment.base_position, last - first))
        return regions
