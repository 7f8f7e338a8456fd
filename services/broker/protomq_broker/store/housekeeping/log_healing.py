"""Heals a damaged range of the log with the bytes that a replica has there, while the store is open.

Replicas have the same log, byte by byte, and the store knows the CRC of the chain of seals on both sides of a range. So it proves the bytes
before it writes any. From the CRC before the range, each seal must lead to the next, and the last one to the CRC behind the range.
Bytes of another past or epoch, or with a flipped bit, do not lead there.

    prove  ->  write at the same positions, sync  ->  doubt what readers believed there  ->  take the range out of quarantine

- The range stays in quarantine until all of it is synced. After a crash in between, the store heals it again.
- Damage that was found while the store was open leaves quarantine at once, since the derived structures got these records before.
- A range of which the start had to skip a part waits for the next start (`complete_healing`). That start rebuilds everything that is
  derived from the log, so offsets, index, timers, transactions and queues get what they lacked. So does a range that was missing when a
  queue or the timer was rebuilt while the store was open (`Quarantine.skip`).
- The same way heals a range that `protomq log repair` has filled with padding.
- A backup that has linked the segment is damaged, too, and healed with it: its bytes were those. But a backup of padding is whole. So
  padding is replaced in a file of the store's own.
- A bad sector may take no bytes. Then the segment gets a new file with them and all that can be read of the old one, which its readers
  keep. Not the segment that is being written, and none that is not synced: the old file may still get what the new one lacks.
- That start waits with it as long as another range, with records of the broker's own, is neither healed nor repaired. What is rebuilt would
  lack them, while files beside the log have the topics and committed offsets that stand there.
- A replica may have such padding itself. It heals nothing: the range gets the replica's bytes, stays in quarantine, and the store says so.

Any thread; one at a time.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from protomq.wire.log_walk import WalkedBlock, walk_appends
from protomq.wire.topics import SYSTEM_PREFIX
from protomq_broker.store.errors import HealingRefusedError
from protomq_broker.store.files.disk import UNREADABLE_ERRNOS, Disk, write_fully
from protomq_broker.store.log.checked_log import PIECE_SIZE_BYTES, CheckedLog
from protomq_broker.store.log.commit_log import CommitLog
from protomq_broker.store.log.flusher import LogFlusher
from protomq_broker.store.log.recovery import (
    CRC_SIZE_BYTES,
    DamagedRange,
    StartPoint,
    chain_at_end,
    holds_again,
    is_filled,
    is_repaired,
    read_quarantine,
    rewrite_unsynced,
    write_quarantine,
)
from protomq_broker.store.log.segment import SegmentFile, SegmentFolder
from protomq_broker.store.queues.quarantine import Quarantine
from protomq_broker.store.queues.queue_ends import read_saved_ends
from protomq_broker.store.queues.repaired import RepairedRange, repaired_in
from protomq_broker.store.start.truncation import discard_derived

log = logging.getLogger("protomq.broker")


def prove_healing(
    data: bytes, damage: DamagedRange, crc_before: int | None, segment_size_bytes: int
) -> list[WalkedBlock]:
    """Returns the appends in `data`, segment by segment, if they are those of the damaged range. Raises HealingRefusedError otherwise.

    `crc_before`: CRC of the seal before the range; None: unknown, then the range must begin with the head of a segment.
    """

    def refuse(position: int, reason: str) -> HealingRefusedError:
        return HealingRefusedError(
            damage.start_position, damage.end_position, f"at {position}: {reason}"
        )

    start, size = damage.start_position, damage.end_position - damage.start_position
    if len(data) != size:
        raise refuse(start, f"they are {len(data)} bytes, not {size}")
    if crc_before is None and start % segment_size_bytes:
        raise refuse(start, "it is not known how the chain of seals comes there")
    crc, at, blocks = crc_before, 0, []
    while at < size:
        base = start + at
        part = min(size - at, segment_size_bytes - base % segment_size_bytes)
        block = walk_appends(data[at : at + part], base, crc)
        if block.size_bytes != part:
            raise refuse(base + block.size_bytes, block.problem or "they end within an append")
        if not base % segment_size_bytes and not block.seals[0].is_head:
            raise refuse(base, "a segment does not begin with an empty append")
        crc = block.seals[-1].crc32c
        blocks.append(block)
        at += part
    if crc != damage.previous_crc32c:
        raise refuse(
            damage.end_position,
            "what stands behind them here does not follow them: they have another past",
        )
    return blocks


class LogHealer:
    """See the module's docstring. Attribute: healed_count: ranges that were healed since the start."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        commit_log: CommitLog,
        flusher: LogFlusher,
        quarantine: Quarantine,
        checked: CheckedLog,
        log_start: Callable[[], StartPoint],
        waiting: Iterable[DamagedRange] = (),
    ) -> None:
        """`log_start` returns where a walk of the whole log begins. `waiting`: as of `complete_healing`."""
        self.healed_count = 0
        self._disk = disk
        self._root = root
        self._log = commit_log
        self._flusher = flusher
        self._folder = commit_log.folder
        self._quarantine = quarantine
        self._checked = checked
        self._log_start = log_start
        self._skipped = frozenset(quarantine.ranges)
        self._waiting = frozenset(waiting)
        self._lock = threading.Lock()

    def ranges(self) -> list[DamagedRange]:
        """The ranges in quarantine whose bytes are not healed."""
        return [damage for damage in self._quarantine.ranges if damage not in self._waiting]

    def healed_skipped_ranges(self) -> list[DamagedRange]:
        """The ranges that are healed, and of which the start or a later rebuild had to skip a part. They wait for the next start.
        None of them, if that start would leave them in quarantine: see `complete_healing`.
        """
        waiting = [damage for damage in self._quarantine.ranges if damage in self._waiting]
        return waiting if waiting and self._held_up_by() is None else []

    def _held_up_by(self) -> DamagedRange | None:
        """The range that has to be healed, too, before a start serves what is healed; None if there is none, or nobody knows."""
        try:
            return _with_states(self._disk, self._root, self._folder, self.ranges())
        except OSError:
            return None

    def skipped_ranges(self) -> list[DamagedRange]:
        """The ranges in quarantine of which the start had to skip a part, healed since or not. What `log repair` has filled is not among
        them: nobody expects those records any more.
        """
        ranges = [damage for damage in self._quarantine.ranges if self._was_skipped(damage)]
        return [damage for damage in ranges if not is_repaired(self._disk, self._folder, damage)]

    def has_skipped(self, damage: DamagedRange) -> bool:
        """Whether a range in quarantine is one of `skipped_ranges`; what is known of it is not read again."""
        return self._was_skipped(damage) and not self._quarantine.is_repaired(damage)

    def _was_skipped(self, damage: DamagedRange) -> bool:
        return any(
            skipped.start_position < damage.end_position
            and damage.start_position < skipped.end_position
            for skipped in self._skipped
        )

    def heal(self, damage: DamagedRange, data: bytes) -> None:
        """Replaces a range in quarantine by the bytes of a replica. Raises HealingRefusedError (nothing was written), OSError."""
        with self._lock:
            if damage not in self.ranges():
                return
            before = crc_before(
                self._folder,
                damage.start_position,
                self._quarantine.ranges,
                self._log_start().crc32c,
                unreadable_is_damage=True,
            )
            blocks = prove_healing(data, damage, before, self._folder.segment_size_bytes)
            was_filled = is_filled(self._disk, self._folder, damage, before)
            has_records = any(block.runs for block in blocks)
            repaired = [each for block in blocks for each in repaired_in(block, self._folder)]
            # What a writer has filled up the end of a segment with is padding, too.
            is_lost = not has_records and (bool(repaired) or self._quarantine.has_messages(damage))
            if was_filled and is_lost:
                reason = "they are the padding of `protomq log repair`: the messages are lost there, too"
                raise HealingRefusedError(damage.start_position, damage.end_position, reason)
            for block in blocks:
                self._write(block, in_backups=not (was_filled and has_records))
            self._checked.doubt(damage.start_position, damage.end_position)
            place = damage.start_position, damage.end_position
            if is_lost:
                self._quarantine.replace(damage, repaired or [RepairedRange(damage)])
                log.warning(
                    "positions %d to %d of the log are filled with padding: `protomq log repair` has taken them out at the replica. Their"
                    " messages stay lost", *place,
                )  # fmt: skip
                return
            self.healed_count += 1
            # What a repair had filled gave nothing to the derived structures either.
            is_missed = has_records and (self._was_skipped(damage) or was_filled)
            if is_missed or not self._quarantine.replace(damage, repaired, unless_skipped=has_records):
                self._waiting |= {damage}
                # Pops give up for good what a repair has taken out: these messages are back, and wait.
                self._quarantine.forget_repaired()
                missing = self._held_up_by()
                log.warning(
                    "positions %d to %d of the log are healed from a replica. The start, or a rebuild of something derived, had"
                    " skipped them: they are served after the next start%s", *place,
                    f", if positions {missing.start_position} to {missing.end_position} are healed by then, too" if missing else "",
                )  # fmt: skip
                return
            log.warning("positions %d to %d of the log are healed from a replica", *place)
            for each, _ in repaired:
                log.warning(
                    "but not positions %d to %d: `protomq log repair` has taken them out at the replica",
                    each.start_position, each.end_position,
                )  # fmt: skip

    def _write(self, block: WalkedBlock, *, in_backups: bool) -> None:
        segment = self._log.segment_to_heal(block.base_position, in_backups=in_backups)
        if segment is None:
            # Retention has deleted the segment.
            return
        data = memoryview(block.data)[: block.size_bytes]
        try:
            if segment.stored_size_bytes() < segment.size_bytes:
                self._disk.allocate(segment.fd, segment.size_bytes)
            write_fully(self._disk, segment.fd, data, block.base_position - segment.base_position)
            self._flusher.sync_healed(segment)
        except OSError as error:
            if error.errno not in UNREADABLE_ERRNOS or not self._log.is_flushed(segment):
                raise
            self._write_copy(segment, data, block.base_position, error)

    def _write_copy(self, segment: SegmentFile, data: memoryview, position: int, refusal: OSError) -> None:
        """Puts bytes into a new file of the segment, since the old one does not take them."""
        base, size = segment.base_position, segment.size_bytes
        log.warning("%s does not take the bytes of a replica: %s. It is copied to a new file", segment.path, refusal)
        if segment.is_shared:
            log.warning("a backup has linked %s: there the damage stays", segment.path)
        # All damage must be known before: what the disk cannot read is zeros in the copy, for good.
        self._checked.doubt(base, base + size)
        at = base
        while at < base + size:
            damage = self._checked.find_damage([(at, min(PIECE_SIZE_BYTES, base + size - at))])
            if damage is not None:
                self._quarantine.add(damage)
            else:
                at += PIECE_SIZE_BYTES
        if self._quarantine.refusal:  # nobody would know after a crash which offsets stood where the copy has zeros
            raise OSError(errno.EBUSY, f"it is not copied before quarantine is noted: {self._quarantine.refusal}", segment.path)
        damaged = [(each.start_position - base, each.end_position - base) for each in self._quarantine.ranges]
        self._log.heal_in_copy(segment, data, position, damaged)
        self._checked.doubt(base, base + size)
        log.warning("%s stands in a new file now. Replace the disk, if this happens again", segment.path)


def complete_healing(disk: Disk, root: str, folder: SegmentFolder) -> Sequence[DamagedRange]:
    """Takes healed ranges out of quarantine, and makes the start rebuild everything that is derived from the log. Called at a start, before
    anything but the segments is open. If it is interrupted, the next start does it again. Raises OSError.

    Returns those that are healed, and stay: they wait for another one.
    """
    path = f"{root}/config/quarantine.json"
    damaged = read_quarantine(disk, path)
    try:
        kept = [damage for damage in damaged if not _holds_again(disk, folder, damage, damaged)]
    except OSError as error:
        if error.errno not in UNREADABLE_ERRNOS:
            raise
        # What is rebuilt would lack it, and the offsets in it could be given again.
        log.warning("nothing leaves quarantine at this start, since a part of the log cannot be read: %s", error)
        return ()
    healed = [damage for damage in damaged if damage not in kept]
    if not healed:
        return ()
    missing = _with_states(disk, root, folder, kept)
    if missing is not None:
        log.warning(
            "%d damaged ranges of the log hold again, and stay in quarantine. Positions %d to %d do not, and records of the broker's own"
            " stand there: what is rebuilt now would lack them. Heal these first, or take them out with `protomq log repair`",
            len(healed), missing.start_position, missing.end_position,
        )  # fmt: skip
        return healed
    for damage in healed:  # only the page cache may have its bytes
        rewrite_unsynced(disk, folder, damage.start_position, damage.end_position)
    log.warning(
        "%d damaged ranges of the log hold again: what is derived from it is rebuilt",
        len(healed),
    )
    discard_derived(disk, root)
    write_quarantine(disk, path, kept)
    return ()


def _with_states(disk: Disk, root: str, folder: SegmentFolder, damaged: Sequence[DamagedRange]) -> DamagedRange | None:
    """The first of these ranges that has records of the broker's own, as far as is known; None if there is none. What a repair has filled
    does not count.
    """
    ends = [end.position for end in read_saved_ends(disk, f"{root}/config") if end.topic.startswith(SYSTEM_PREFIX)]
    for damage in damaged:
        has_some = any(damage.start_position <= position < damage.end_position for position in ends)
        if has_some and not is_repaired(disk, folder, damage):
            return damage
    return None


def _holds_again(
    disk: Disk, folder: SegmentFolder, damage: DamagedRange, damaged: Sequence[DamagedRange]
) -> bool:
    return holds_again(disk, folder, damage, crc_before(folder, damage.start_position, damaged, None))


def crc_before(
    folder: SegmentFolder,
    position: int,
    damaged: Sequence[DamagedRange],
    first_crc: int | None,
    *,
    unreadable_is_damage: bool = False,
) -> int | None:
    """Returns the CRC of the chain of seals at a position; None if it is unknown. `first_crc`: the CRC at the first segment.

    `unreadable_is_damage`: a seal at the end of a segment that the disk cannot read tells nothing, else it raises OSError.
    """
    for other in damaged:
        if other.end_position == position:
            return other.previous_crc32c
    if not position:
        return 0
    offset = position % folder.segment_size_bytes
    if not offset:
        return (
            first_crc
            if position == folder.first_position
            else chain_at_end(folder.at(position - 1), unreadable_is_damage=unreadable_is_damage)
        )
    segment = folder.at(position)
    if segment is None:
        return None
    return int.from_bytes(segment.read(offset - CRC_SIZE_BYTES, CRC_SIZE_BYTES), "little")
