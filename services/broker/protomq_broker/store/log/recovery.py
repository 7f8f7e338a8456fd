"""Finding the end of the log at a start.

The log is walked from the checkpoint (or from its first segment) to the first append that does not hold, at position P. Then:

    nothing is written behind P                                     the end of the log
    P >= synced, and nothing proves otherwise                       a torn tail: cut at P, the rest zeroed durably, said in the log
    P <  synced                                                     corruption: never cut, never served
    same page cache as before, and an append behind P that holds,   corruption too: the process wrote P before it wrote that
    or an entry of a consume queue for a record behind P
    a segment at or behind P begins with the head of another one    corruption too: files have changed places

Before the checkpoint the log is walked too, for a bit (`check_before`): the chain must come to the CRC that the checkpoint has.

`synced` is the largest position below which everything had been synced, by the word of something durable. That is the checkpoint, a
derived structure, the table of epochs, or a seal that holds and that this store wrote (`epochs.py`). To find seals behind P the bytes are
searched for one after which the next append holds, its CRC chained to the first.

Corruption refuses the start, or goes into quarantine if the operator chose so. Then the range stands in
config/quarantine.json, nothing of it is served, and the log goes on behind it.

Interrupted at any point and run again, recovery decides the same and leaves the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, Literal, NamedTuple

from protomq.wire.hashing import crc32c
from protomq.wire.log_walk import EMPTY, SEAL_HEAD, Seal, WalkedBlock, decode_seal
from protomq.wire.record import SEAL_COVERED_BYTES, SEAL_SIZE_BYTES
from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.files.disk import (
    Disk,
    path_named,
    read_around,
    read_fully,
    write_fully,
)
from protomq_broker.store.files.side_files import (
    SideFileDamagedError,
    read_json_file,
    write_json_file,
)

from .checkpoint import Checkpoint
from .crc_forge import crc32c_before
from .epochs import Epochs
from .positions import LogTail
from .seals import LogWalker, Skip
from .segment import SegmentFile, SegmentFolder

log = logging.getLogger(__name__)

CorruptionMode = Literal["refuse", "quarantine"]

SEARCH_BLOCK_SIZE_BYTES: Final = 4 << 20
PROBE_BLOCK_SIZE_BYTES: Final = 64 << 10
CRC_SIZE_BYTES: Final = 4
_ZEROS: Final = bytes(SEARCH_BLOCK_SIZE_BYTES)


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """Bytes [start_position, end_position) of the log that do not hold; `previous_crc32c` is what the chain goes on with behind them."""

    start_position: int
    end_position: int
    previous_crc32c: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where the walk begins; the CRC is None if nobody knows it: then it is the head of a segment."""

    position: int
    crc32c: int | None


class Resync(NamedTuple):
    """A place behind damage from which on the log holds again, and the CRC with which its chain goes on there."""

    position: int
    crc32c: int


@dataclass(slots=True)
class RecoveredLog:
    """What recovery found.

    Attributes:
        tail: the end of the log.
        synced_position: known to be on stable storage.
        epoch: of the last append.
        damaged: all ranges in quarantine, old and new.
        torn_size_bytes: from the end of the log to the last octet behind it that was not zero, and is cut.
        was_cut: whether a torn tail was cut.
    """

    tail: LogTail
    synced_position: int
    epoch: int = 0
    damaged: list[DamagedRange] = field(default_factory=list)
    torn_size_bytes: int = 0
    was_cut: bool = False


def choose_start(folder: SegmentFolder, checkpoint: Checkpoint | None, position: int) -> StartPoint:
    """Where to begin so that everything from `position` on is walked: the checkpoint if that is early enough, else a segment."""
    first = folder.first_position
    if checkpoint is not None and first <= checkpoint.replay_position <= position:
        return StartPoint(checkpoint.replay_position, checkpoint.replay_crc32c)
    base = max(first, position - position % folder.segment_size_bytes)
    while base > first and base not in folder.files:
        base -= folder.segment_size_bytes
    if base == 0:
        return StartPoint(0, 0)
    if base == first:
        known = checkpoint is not None and checkpoint.first_position == first
        return StartPoint(
            first, checkpoint.first_crc32c if checkpoint is not None and known else None
        )
    return StartPoint(base, chain_at_end(folder.at(base - 1)))


def find_absent(
    folder: SegmentFolder, end_position: int, known: Sequence[DamagedRange]
) -> int | None:
    """The first position below `end_position` that no file has: a segment is missing, or cut short. What is in quarantine is skipped.

    Below the place where a walk begins nothing else would notice before a reader does.
    """
    size_bytes = folder.segment_size_bytes
    for base in range(folder.first_position, end_position, size_bytes):
        segment = folder.files.get(base)
        position = base if segment is None else base + segment.stored_size_bytes()
        end = min(base + size_bytes, end_position)
        if position < end and not any(
            damage.start_position <= position and end <= damage.end_position for damage in known
        ):
            return position
    return None


def recover_log(
    disk: Disk,
    folder: SegmentFolder,
    start: StartPoint,
    checkpoint: Checkpoint | None,
    *,
    same_cache: bool,
    mode: CorruptionMode,
    quarantine_path: str,
    epochs: Epochs,
    derived_position: int = 0,
    written_position: int = 0,
    on_block: Callable[[WalkedBlock], None],
    on_damage: Callable[[DamagedRange], None] = lambda _: None,
    before_cut: Callable[[], None] = lambda: None,
) -> RecoveredLog:
    """Walks the log, hands each verified block to `on_block`, and settles its end (the module's docstring).

    `derived_position`: up to where a durable derived structure had covered the log, which is never beyond what was synced.
    `written_position`: up to where the log was certainly written, synced or not, and must be there; 0 if the page cache is another
    one. `before_cut` is called before a torn tail is cut: once it is, nothing tells it from a log that ended there.

    Raises CorruptLogError if there is corruption and the mode is "refuse"; then nothing on disk has changed. Raises OSError if the disk
    cannot read what is walked: nothing is cut for that, nor put into quarantine. Nobody would know which offsets were given there.
    """
    damaged = [
        found
        for found in read_quarantine(disk, quarantine_path)
        if found.end_position > folder.first_position
    ]
    store_time_ms = checkpoint.store_time_ms if checkpoint else 0
    epoch = checkpoint.epoch if checkpoint else 0
    flushed_position = checkpoint.flushed_position if checkpoint else 0
    synced = max(derived_position, flushed_position, epochs.synced_position)
    position, chain_crc32c = start.position, start.crc32c
    known = len(damaged)
    for damage in damaged:  # the checkpoint may be older than what is in quarantine since
        if damage.start_position <= position < damage.end_position:
            position, chain_crc32c = damage.end_position, damage.previous_crc32c
    while True:
        walker = LogWalker(disk, folder, position, chain_crc32c, skips=skips_of(damaged))
        for block in walker:
            on_block(block)
            synced = max(synced, epochs.synced_by(block.seals))
        if walker.last_seal is not None:
            store_time_ms = max(store_time_ms, walker.last_seal.store_time_ms)
            epoch = max(epoch, walker.last_seal.epoch)
        position, chain_crc32c = walker.position, walker.crc32c
        found = find_resync(disk, folder, position)
        synced_behind = synced
        if position >= synced and found is not None:
            synced_behind = max_synced_behind(disk, folder, found, skips_of(damaged), epochs)
        written = max(written_position, folder.lost_front_end)
        is_proved = (same_cache and found is not None) or position < written
        misplaced = find_misplaced(folder, position)
        if position >= max(synced, synced_behind) and not is_proved and misplaced is None:
            break
        reason = explain_problem(walker.problem)
        if found is not None:
            damage = DamagedRange(position, found.position, found.crc32c, reason)
        else:
            end = first_free_base(disk, folder, max(position + 1, synced, written))
            damage = DamagedRange(position, end, chain_crc32c or 0, reason)
        if mode == "refuse":
            raise CorruptLogError(
                folder.path_at(position),
                position,
                _explain(damage, synced, synced_behind, misplaced, written_position, folder.lost_front_end),
                damage.end_position,
            )
        log.error(
            "corrupt log: %s",
            CorruptLogError(folder.path_at(position), position, reason, damage.end_position),
        )
        damaged.append(damage)
        on_damage(damage)
        position, chain_crc32c = damage.end_position, damage.previous_crc32c
    if len(damaged) > known:
        damaged = merged_ranges(damaged)
        write_quarantine(disk, quarantine_path, damaged)
    torn_size_bytes = _torn_size_bytes(disk, folder, position)
    was_cut = torn_size_bytes is not None
    if torn_size_bytes is not None:
        before_cut()
        _cut_torn_tail(folder, position, walker.problem, torn_size_bytes)
    tail = LogTail(position, chain_crc32c or 0, store_time_ms)
    return RecoveredLog(tail, min(synced, position), epoch, damaged, torn_size_bytes or 0, was_cut)


def check_before(
    disk: Disk,
    folder: SegmentFolder,
    start: StartPoint,
    checkpoint: Checkpoint,
    *,
    mode: CorruptionMode,
    quarantine_path: str,
    on_block: Callable[[WalkedBlock], None],
) -> None:
    """Walks the log from `start` to the checkpoint, at which the chain must come to the CRC that the checkpoint has.

    A walk that begins at the checkpoint would not notice damage before it. It would also take a log that was put in the place of
    another one for a torn tail. Damage is set aside, or refused with CorruptLogError: then nothing has changed.
    """
    end = StartPoint(checkpoint.replay_position, checkpoint.replay_crc32c)
    known = read_quarantine(disk, quarantine_path)
    damaged = list(known)
    at = start
    while at.position < end.position:
        walker = LogWalker(
            disk,
            folder,
            at.position,
            at.crc32c,
            skips=skips_of(damaged),
            end_position=end.position,
        )
        for block in walker:
            on_block(block)
        problem = walker.problem
        if walker.position > end.position:
            break  # set aside already
        if walker.position == end.position:
            if walker.crc32c == end.crc32c:
                break
            problem = "the log has other appends here than the checkpoint knows"
        position = at.position if walker.position == end.position else walker.position
        found = find_resync(disk, folder, min(walker.position, end.position - 1))
        if found is None or found.position >= end.position:
            found = resync_at(disk, folder, end, found)
        damage = DamagedRange(position, found.position, found.crc32c, problem)
        if mode == "refuse":
            raise CorruptLogError(
                folder.path_at(position),
                position,
                _explain(damage, checkpoint.flushed_position, 0, None, 0, 0),
                damage.end_position,
            )
        log.error(
            "corrupt log: %s",
            CorruptLogError(folder.path_at(position), position, problem, damage.end_position),
        )
        damaged.append(damage)
        at = StartPoint(found.position, found.crc32c)
    if len(damaged) > len(known):
        write_quarantine(disk, quarantine_path, merged_ranges(damaged))


def resync_at(
    disk: Disk, folder: SegmentFolder, checkpoint: StartPoint, found: Resync | None
) -> Resync:
    """Where the log goes on behind damage that reaches the checkpoint: there, if it holds or ends there; else behind it (`found`)."""
    assert checkpoint.crc32c is not None
    probe = LogWalker(disk, folder, checkpoint.position, checkpoint.crc32c)
    if next(iter(probe), None) is not None or probe.ended_cleanly:
        return Resync(checkpoint.position, checkpoint.crc32c)
    if found is not None:
        return found
    return Resync(first_free_base(disk, folder, checkpoint.position + 1), checkpoint.crc32c)


def find_misplaced(folder: SegmentFolder, position: int) -> int | None:
    """The first segment at or behind `position` that begins with the head of another one; None if there is none.

    No write that was torn leaves that behind: files have changed places, or were copied from elsewhere.
    """
    for segment in folder.overlapping(position, 1 << 63):
        head = decode_seal(segment.read(0, SEAL_SIZE_BYTES), 0)
        if (
            head is not None
            and head.is_head
            and head.start_position != segment.base_position
            and head.start_position % segment.size_bytes == 0
        ):
            return segment.base_position
    return None


def rewrite_unsynced(disk: Disk, folder: SegmentFolder, start: int, end: int) -> None:
    """Writes [start, end) once more with the bytes it has, and syncs it.

    After a failed fsync the kernel marks pages clean that are not on disk, so another fsync alone would report success for nothing. A
    start cannot know whether one had failed. The process may have been killed, or the disk may have refused every mark that it left.
    """
    for segment in folder.overlapping(start, end):
        at = max(start, segment.base_position)
        stop = min(end, segment.end_position)
        while at < stop:
            offset = at - segment.base_position
            with path_named(segment.path):
                data = read_fully(disk, segment.fd, min(SEARCH_BLOCK_SIZE_BYTES, stop - at), offset)
            if not data:
                break
            write_fully(disk, segment.fd, data, offset)
            at += len(data)
        disk.fsync(segment.fd)


def find_resync(
    disk: Disk, folder: SegmentFolder, position: int, *, unreadable_is_damage: bool = False
) -> Resync | None:
    """The first place behind `position` from which on the log holds again: at least one append does, chained to the seal before it.

    `unreadable_is_damage`: what the disk cannot read is skipped. Else it raises OSError.
    """
    for segment in folder.overlapping(position + 1, 1 << 63):
        first = max(position + 1 - segment.base_position, 0)
        for start, end in disk.written_ranges(segment.fd, first, segment.size_bytes):
            at = max(start - SEAL_SIZE_BYTES + 1, first)
            while at < end:
                size_bytes = min(SEARCH_BLOCK_SIZE_BYTES, end + SEAL_SIZE_BYTES - at)
                with path_named(segment.path):
                    if unreadable_is_damage:
                        data, _ = read_around(disk, segment.fd, size_bytes, at)
                    else:
                        data = read_fully(disk, segment.fd, size_bytes, at)
                found = _resync_in(disk, folder, data, segment.base_position + at, unreadable_is_damage=unreadable_is_damage)
                if found is not None:
                    return found
                if len(data) < SEARCH_BLOCK_SIZE_BYTES:
                    break
                at += len(data) - SEAL_SIZE_BYTES + 1
    return None


def max_synced_behind(
    disk: Disk,
    folder: SegmentFolder,
    start: Resync | None,
    skips: dict[int, Skip],
    epochs: Epochs,
) -> int:
    """The largest synced position that a seal of this store's from `start` on knows of, skipping further damage."""
    synced = 0
    while start is not None:
        walker = LogWalker(disk, folder, start.position, start.crc32c, skips=skips)
        for block in walker:
            synced = max(synced, epochs.synced_by(block.seals))
        start = find_resync(disk, folder, walker.position)
    return synced


def skips_of(damaged: Sequence[DamagedRange]) -> dict[int, Skip]:
    """The ranges as a walker wants them."""
    return {
        found.start_position: Skip(found.end_position, found.previous_crc32c)
        for found in damaged
        if found.end_position > found.start_position
    }


def read_quarantine(disk: Disk, path: str, *, advises: bool = True) -> list[DamagedRange]:
    """The ranges of earlier starts; none if the file is missing or damaged: then they are found again. `advises`: names a command that
    does.
    """
    try:
        content = read_json_file(disk, path)
    except SideFileDamagedError as error:
        advice = "they must be found again. Run `protomq log verify`" if advises else "this command finds them again where it reads the log"
        log.error("%s. It had the ranges in quarantine: %s", error, advice)
        return []
    try:
        return [
            DamagedRange(
                int(item["start_position"]),
                int(item["end_position"]),
                int(item["previous_crc32c"]),
                str(item["reason"]),
            )
            for item in (content or {}).get("ranges", ())
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def merged_ranges(damaged: Sequence[DamagedRange]) -> list[DamagedRange]:
    """The ranges in order; those that overlap are one, which ends as the one that goes furthest."""
    merged: list[DamagedRange] = []
    for damage in sorted(damaged, key=attrgetter("start_position")):
        if not merged or damage.start_position >= merged[-1].end_position:
            merged.append(damage)
        elif damage.end_position > merged[-1].end_position:
            last = merged[-1]
            merged[-1] = replace(damage, start_position=last.start_position, reason=last.reason)
    return merged


def is_filled(
    disk: Disk, folder: SegmentFolder, damage: DamagedRange, previous_crc32c: int | None
) -> bool:
    """Whether a damaged range was repaired: it holds padding, chained to what stands before it and behind it. What the disk cannot read
    does not.

    `previous_crc32c`: with which the chain comes to the range; None if nobody knows it.
    """
    walker = _walker_of(disk, folder, damage, previous_crc32c, unreadable_is_damage=True)
    if any(block.runs for block in walker):
        return False
    return (walker.position, walker.crc32c) == (damage.end_position, damage.previous_crc32c)


def holds_again(
    disk: Disk,
    folder: SegmentFolder,
    damage: DamagedRange,
    previous_crc32c: int | None,
    *,
    unreadable_is_damage: bool = False,
) -> bool:
    """Whether a damaged range has been healed: appends with records stand in it, chained to what stands before it and behind it.

    `previous_crc32c`: as of `is_filled`. `unreadable_is_damage`: what the disk cannot read does not hold, else it raises OSError.
    """
    if previous_crc32c is None and damage.start_position % folder.segment_size_bytes:
        return False
    walker = _walker_of(disk, folder, damage, previous_crc32c, unreadable_is_damage=unreadable_is_damage)
    for _ in walker:
        pass
    end = damage.end_position, damage.previous_crc32c
    return (walker.position, walker.crc32c) == end and not is_filled(disk, folder, damage, previous_crc32c)


def is_repaired(disk: Disk, folder: SegmentFolder, damage: DamagedRange) -> bool:
    """As `is_filled`, for callers that do not come along the chain. The seal before the range ends in the CRC with which it goes
    on."""
    segment = folder.at(damage.start_position)
    if segment is None:
        return False
    offset = damage.start_position - segment.base_position
    before = segment.read_if_readable(offset - CRC_SIZE_BYTES, CRC_SIZE_BYTES) if offset else None
    if before == b"":
        return False
    return is_filled(disk, folder, damage, None if before is None else int.from_bytes(before, "little"))


def write_quarantine(disk: Disk, path: str, damaged: Sequence[DamagedRange]) -> None:
    """Remembers the ranges, durably."""
    ranges = [
        {
            "start_position": found.start_position,
            "end_position": found.end_position,
            "previous_crc32c": found.previous_crc32c,
            "reason": found.reason,
        }
        for found in damaged
    ]
    write_json_file(disk, path, {"ranges": ranges})


def _walker_of(
    disk: Disk, folder: SegmentFolder, damage: DamagedRange, previous_crc32c: int | None, *, unreadable_is_damage: bool
) -> LogWalker:
    """Walks a range that was damaged, and no further."""
    return LogWalker(
        disk,
        folder,
        damage.start_position,
        previous_crc32c,
        end_position=damage.end_position,
        unreadable_is_damage=unreadable_is_damage,
    )


def _resync_in(
    disk: Disk, folder: SegmentFolder, data: bytes, base_position: int, *, unreadable_is_damage: bool
) -> Resync | None:
    """The first seal in `data` that stands where it says and after which an append holds."""
    at = data.find(SEAL_HEAD)
    while at >= 0:
        seal = decode_seal(data, at)
        if seal is not None and seal.end_position == base_position + at + SEAL_SIZE_BYTES:
            probe = LogWalker(
                disk,
                folder,
                seal.end_position,
                seal.crc32c,
                block_size_bytes=PROBE_BLOCK_SIZE_BYTES,
                unreadable_is_damage=unreadable_is_damage,
            )
            block = next(iter(probe), None)
            if block is not None:
                return _after_anchor(seal, block.seals[0], data, at, folder.segment_size_bytes)
        at = data.find(SEAL_HEAD, at + 1)
    return None


def _after_anchor(
    seal: Seal, following: Seal, data: bytes, at: int, segment_size_bytes: int
) -> Resync:
    """Where the chain is taken up at a seal that `following` is chained to. That is behind the seal, but before it if it is a
    head, which covers only itself.

    Of a head only its CRC is proved, by the seal behind it. The CRC before it is computed from its fields, so any fields would hold. A
    seal that does not agree with the seal behind it is damaged too, or stands where an epoch ended. There the chain is taken up behind
    it.
    """
    if (
        seal.is_head
        and seal.start_position % segment_size_bytes == 0
        and seal.epoch == following.epoch
        and seal.store_time_ms <= following.store_time_ms
        and seal.synced_position <= min(following.synced_position, seal.start_position)
    ):
        covered = data[at : at + SEAL_COVERED_BYTES]
        return Resync(seal.start_position, crc32c_before(covered, seal.crc32c))
    return Resync(seal.end_position, seal.crc32c)


def first_free_base(disk: Disk, folder: SegmentFolder, position: int) -> int:
    """The first place for a segment that is behind `position` and behind all that is written."""
    for segment in folder.overlapping(position, 1 << 63):
        for _, end in disk.written_ranges(segment.fd, 0, segment.size_bytes):
            position = max(position, segment.base_position + end)
    size = folder.segment_size_bytes
    return (position + size - 1) // size * size


def has_bytes_behind(disk: Disk, folder: SegmentFolder, position: int) -> bool:
    """Whether anything but zeros is written at or behind `position`."""
    return any(True for _ in _written_behind(disk, folder, position))


def _written_behind(disk: Disk, folder: SegmentFolder, position: int) -> Iterator[int]:
    """Of the pieces at and behind `position` that are not all zeros: where the last octet that is none ends."""
    for segment in folder.overlapping(position, 1 << 63):
        first = max(position - segment.base_position, 0)
        for start, end in disk.written_ranges(segment.fd, first, segment.size_bytes):
            for at in range(start, end, SEARCH_BLOCK_SIZE_BYTES):
                with path_named(segment.path):
                    data = read_fully(disk, segment.fd, min(SEARCH_BLOCK_SIZE_BYTES, end - at), at)
                if data != _ZEROS[: len(data)]:
                    yield segment.base_position + at + len(data.rstrip(b"\x00"))


def _torn_size_bytes(disk: Disk, folder: SegmentFolder, position: int) -> int | None:
    """How far anything is written behind the end of the log. 0: a file is just too short. None: there is no torn tail."""
    size = max(_written_behind(disk, folder, position), default=position) - position
    is_short = any(
        disk.size(segment.fd) < segment.size_bytes
        for segment in folder.overlapping(position, 1 << 63)
    )
    return size if size or is_short else None


def _cut_torn_tail(folder: SegmentFolder, position: int, problem: str, size_bytes: int) -> None:
    """Zeroes what is written at and behind `position`, durably. Says so, and how far it went."""
    log.warning(
        "torn tail: %s is cut at position %d (%s): %d bytes are lost, none of them known to be synced",
        folder.path_at(position), position, problem, size_bytes,
    )  # fmt: skip
    folder.clear_from(position)


def chain_at_end(segment: SegmentFile | None, *, unreadable_is_damage: bool = False) -> int | None:
    """The CRC that the chain of seals has where the segment ends, None if that is unknown. As `seal_at_end`."""
    seal = seal_at_end(segment, unreadable_is_damage=unreadable_is_damage)
    return seal.crc32c if seal is not None else None


def seal_at_end(segment: SegmentFile | None, *, unreadable_is_damage: bool = False) -> Seal | None:
    """The seal that ends where the segment ends, None if there is none.

    `unreadable_is_damage`: what the disk cannot read is no seal, else it raises OSError.
    """
    if segment is None:
        return None
    read = segment.read_if_readable if unreadable_is_damage else segment.read
    seal = decode_seal(read(segment.size_bytes - SEAL_SIZE_BYTES, SEAL_SIZE_BYTES), 0)
    return seal if seal is not None and seal.end_position == segment.end_position else None


def explain_problem(problem: str) -> str:
    """Why a walk ended, as the reason of damage."""
    return "the log ends here, though more of it was written" if problem == EMPTY else problem


def _explain(
    damage: DamagedRange, synced: int, synced_behind: int, misplaced: int | None, written: int, lost_front_end: int
) -> str:
    if damage.start_position < lost_front_end:
        proof = f"retention has not deleted what stood before {lost_front_end}"
    elif damage.start_position < synced:
        proof = f"the log had been synced up to {synced}"
    elif damage.start_position < synced_behind:
        proof = f"a later seal says that the log had been synced up to {synced_behind}"
    elif misplaced is not None:
        proof = f"the file of the segment at {misplaced} has the content of another one"
    elif damage.start_position < written:
        proof = f"consume queues say that the log had been written up to {written}"
    else:
        proof = "what was written later holds"
    return (
        f"{damage.reason}; this is no torn tail, since {proof}. Run `protomq log verify`, then fetch the range from a replica, or "
        "repair it with `protomq log repair`, or start with corruption: quarantine"
    )


assert crc32c(b"") == 0, "the chain starts at 0"
