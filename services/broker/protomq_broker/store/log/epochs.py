"""Which epochs a log has, and which parts of it this store wrote as the leader.

    config/epochs.json   {"highest_epoch": e, "rows": [[start position, epoch, whether this store led], ...], "synced_position": n}

A row goes from its start to that of the next one. The epoch of an append stands in its seal too; who wrote it stands here alone.

Rules:
- Every opening to lead begins a new epoch: a row, durable before the first append of the epoch.
- A seal's synced position is that of the disk of the store that wrote it. It counts where this store led; what was written for another
  leader is as durable as this store's own marks say. One of them is `synced_position`: the log below it was on stable storage here when
  the file was written.
- If another store led an epoch, its row may be written late, with the next checkpoint. So this store did not lead an epoch without a
  row.
- Without a file that holds, every synced position counts. So a start may refuse a torn tail of another leader's bytes, but cuts nothing
  that was stored safely. Then the rows are found again by the seals, and none counts as led by this store.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from protomq.wire.log_walk import Seal, decode_seal
from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.files.disk import Disk
from protomq_broker.store.files.side_files import (
    SideFileDamagedError,
    read_json_file,
    write_json_file,
)

from .seals import LogWalker, seal_before
from .segment import SegmentFolder

log = logging.getLogger(__name__)

EPOCHS_NAME: Final = "config/epochs.json"
RESTORED_EPOCHS: Final = 1_000
"""By how much the epoch of a restored store is above those of its log, at least. Each start of the broker since then has begun one."""
_RESTORE_ORIGIN_S: Final = 1_767_225_600
"""1 January 2026, in seconds since 1970: from then on the epochs of restored stores count seconds."""
_RESTORE_EPOCH_MAX: Final = 1 << 31
"""A clock takes them no further, so that what follows has room in the 32 bits of a seal."""


def restored_epoch(highest_epoch: int, end_time_ms: int, now_ms: int) -> int:
    """The epoch behind which a restored store begins. `highest_epoch`: of the backup, which ends at `end_time_ms`.

    It rises each second, faster than a broker is started again. So two restores, of one backup or of two, never have an epoch in common.
    Who has read from the first store learns from the second one where the two logs part.
    """
    elapsed_s = max(0, now_ms - end_time_ms) // 1_000
    by_clock = max(highest_epoch + RESTORED_EPOCHS + elapsed_s, now_ms // 1_000 - _RESTORE_ORIGIN_S)
    return max(highest_epoch + RESTORED_EPOCHS, min(by_clock, _RESTORE_EPOCH_MAX))


class EpochRow(NamedTuple):
    """From `start_position` on, up to the next row, the log has this epoch; `is_led`: this store wrote it as the leader."""

    start_position: int
    epoch: int
    is_led: bool


NO_ROW: Final = EpochRow(0, 0, is_led=False)


@dataclass(frozen=True, slots=True)
class Epochs:
    """What is known of the epochs of a log. Never changed: a change makes another one.

    Attributes:
        rows: by their starts, which rise; their epochs rise or stay.
        highest_epoch: that this store has ever known, also of appends that were truncated: no epoch begins twice.
        synced_position: the log below it was on this store's stable storage when the rows were written down.
        is_known: False where the file is missing or damaged: then there are no rows, and every synced position counts.
    """

    rows: tuple[EpochRow, ...] = ()
    highest_epoch: int = 0
    synced_position: int = 0
    is_known: bool = True

    @property
    def last(self) -> EpochRow:
        """The last row; all 0 if there is none."""
        return self.rows[-1] if self.rows else NO_ROW

    def row_at(self, position: int) -> EpochRow | None:
        """The row in which a position lies; None before the first."""
        index = bisect_right(self.rows, position, key=_start_of)
        return self.rows[index - 1] if index else None

    def synced_by(self, seals: Sequence[Seal]) -> int:
        """Up to where the log had been synced here, by seals that follow one another; 0 if they do not tell."""
        if not self.is_known:
            return max(seal.synced_position for seal in seals)
        last = seals[-1]
        if self._is_own(last):  # of one writer it never falls
            return last.synced_position
        row = self.row_at(last.start_position)
        if row is None or (not row.is_led and row.start_position <= seals[0].start_position):
            return 0
        return max((seal.synced_position for seal in seals if self._is_own(seal)), default=0)

    def end_of(self, epoch: int, log_end: int) -> tuple[int, int] | None:
        """(the last epoch not above `epoch`, where it ends in a log that ends at `log_end`); None if all are above."""
        index = bisect_right(self.rows, epoch, key=_epoch_of)
        if not index:
            return None
        end = self.rows[index].start_position if index < len(self.rows) else log_end
        return self.rows[index - 1].epoch, end

    def truncated(self, position: int, epoch: int) -> Epochs:
        """The log ends at `position`, with an append of `epoch`, and another store's appends follow. No epoch is given again."""
        rows = tuple(row for row in self.rows if row.start_position < position)
        synced_position = min(self.synced_position, position)
        cut = replace(self, rows=rows, synced_position=synced_position)
        return cut.begin(position, epoch, is_led=False)

    def begin(self, position: int, epoch: int, *, is_led: bool) -> Epochs:
        """From `position`, the end of the log, on there is another epoch, or the same one written by somebody else."""
        rows = tuple(row for row in self.rows if row.start_position < position)
        assert not rows or rows[-1].epoch <= epoch, "epochs never fall"
        highest = max(self.highest_epoch, epoch)
        if rows and rows[-1][1:] == (epoch, is_led):
            return replace(self, rows=rows, highest_epoch=highest)
        rows = (*rows, EpochRow(position, epoch, is_led))
        return replace(self, rows=rows, highest_epoch=highest)

    def note(self, seals: Iterable[Seal]) -> Epochs:
        """Another leader's appends follow at the end of the log."""
        epochs = self
        for seal in seals:
            epochs = epochs.note_epoch(seal.start_position, seal.epoch)
        return epochs

    def note_epoch(self, position: int, epoch: int) -> Epochs:
        """The same for one of them: at `position`, of this epoch."""
        if self.rows and epoch <= self.rows[-1].epoch:
            return self
        return self.begin(position, epoch, is_led=False)

    def note_walked(self, seals: Iterable[Seal]) -> Epochs:
        """A start has walked these appends. An epoch may have begun before its row, in what was damaged when the row was made."""
        epochs, epoch = self, -1
        for seal in seals:
            if seal.epoch != epoch:  # of one epoch, the first append tells all: a start walks millions
                epoch = seal.epoch
                epochs = epochs._note_walked(seal.start_position, epoch)
        return epochs

    def _note_walked(self, position: int, epoch: int) -> Epochs:
        index = bisect_right(self.rows, position, key=_start_of)
        behind = self.rows[index:]
        if not behind:
            return self.note_epoch(position, epoch)
        if (index and epoch <= self.rows[index - 1].epoch) or behind[0].epoch < epoch:
            return self
        if behind[0][1:] == (epoch, False):
            behind = behind[1:]
        return replace(self, rows=(*self.rows[:index], EpochRow(position, epoch, is_led=False), *behind))

    def between(self, log_start: int, log_end: int, synced_position: int) -> Epochs:
        """Without the rows of what the log has no more. It is synced up to there."""
        rows = [row for row in self.rows if row.start_position <= log_end]
        while len(rows) > 1 and rows[1].start_position <= log_start:
            del rows[0]
        return replace(self, rows=tuple(rows), synced_position=synced_position)

    def _is_own(self, seal: Seal) -> bool:
        row = self.row_at(seal.start_position)
        return row is not None and row.is_led and row.epoch == seal.epoch


def read_epochs(disk: Disk, path: str) -> Epochs:
    """What the file tells; not known if there is none that holds, as in a store of an earlier version."""
    try:
        content = read_json_file(disk, path)
    except SideFileDamagedError as error:
        log.error("%s: the epochs are found again from the log", error)
        return UNKNOWN_EPOCHS
    if content is None:
        return UNKNOWN_EPOCHS
    try:
        rows = tuple(
            EpochRow(int(start), int(epoch), bool(is_led))
            for start, epoch, is_led in content["rows"]
        )
        return Epochs(rows, int(content["highest_epoch"]), int(content["synced_position"]))
    except (KeyError, TypeError, ValueError) as error:
        log.error("%s is of another form: the epochs are found again from the log: %r", path, error)
        return UNKNOWN_EPOCHS


def write_epochs(disk: Disk, path: str, epochs: Epochs) -> None:
    """Replaces the file, durably. Raises OSError."""
    content = {
        "highest_epoch": epochs.highest_epoch,
        "rows": [list(row) for row in epochs.rows],
        "synced_position": epochs.synced_position,
    }
    write_json_file(disk, path, content)


def find_epochs(disk: Disk, folder: SegmentFolder, log_end: int) -> Epochs:
    """The epochs of a log that ends at `log_end` and is synced, by its seals. Nothing tells who led them: this store led none of them.

    Epochs never fall. So a segment is walked only if it does not end with the epoch with which it begins.
    """
    epochs = Epochs(synced_position=log_end)
    bases = [base for base in folder.files if base < log_end]
    heads = [_head_epoch(folder, base) for base in bases]
    ends = [*heads[1:], epoch_at_end(folder, log_end)]
    for index, base in enumerate(bases):
        if heads[index] == ends[index]:
            epochs = epochs.note_epoch(base, heads[index])
            continue
        end = min(base + folder.segment_size_bytes, log_end)
        for block in LogWalker(disk, folder, base, None, end_position=end):
            epochs = epochs.note(block.seals)
    return epochs


def _head_epoch(folder: SegmentFolder, base: int) -> int:
    """With which epoch a segment begins; 0 if that is damaged."""
    head = decode_seal(folder.files[base].read(0, SEAL_SIZE_BYTES), 0)
    return head.epoch if head is not None else 0


def epoch_at_end(folder: SegmentFolder, log_end: int) -> int:
    """Of the last append of a log that ends at `log_end`; 0 if it has none."""
    seal = seal_before(folder, log_end)
    return seal.epoch if seal is not None else 0


def _epoch_of(row: EpochRow) -> int:
    return row.epoch


def _start_of(row: EpochRow) -> int:
    return row.start_position


UNKNOWN_EPOCHS: Final = Epochs(is_known=False)
