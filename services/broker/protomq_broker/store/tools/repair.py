"""Repairing a log, only when asked: what `protomq log repair` does.

A damaged range cannot be made good without a replica. Repair takes it out so that the log can be walked and parsed from end to end again:

1. The bytes are copied into the folder of the caller's choice, synced, before anything is touched.
2. The range is filled with padding appends. The last one ends in the very CRC with which the append behind it goes on; four bytes of its
   padding see to that (crc_forge.py). So everything behind stays as it is, byte for byte. The padding says what it replaces
   (queues/repaired.py), for whoever gets the log from here.
3. The range stays in config/quarantine.json, and config/queue_ends.json says how far queues went in it. So readers of the lost offsets get
   an error, never other messages.

A range in quarantine that a replica has healed, and that waits for the next start, stays as it is.

A torn tail is copied and cut, as a start would do. Interrupted, it can be run again. Backups that have linked a segment keep it as it was.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from protomq.wire.hashing import crc32c, extend_crc32c
from protomq.wire.log_walk import APPEND_SIZE_MAX_BYTES
from protomq.wire.record import SEAL_COVERED_BYTES, SEAL_SIZE_BYTES, encode_seal
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint
from protomq_broker.store.errors import StoreError
from protomq_broker.store.files.disk import (
    Disk,
    read_fully,
    remove_file,
    sync_names_above,
    write_file_atomically,
    write_fully,
)
from protomq_broker.store.files.lock import StoreLock
from protomq_broker.store.files.side_files import TAIL_NAME
from protomq_broker.store.log.checkpoint import write_checkpoint
from protomq_broker.store.log.commit_log import CLOSING_SIZE_BYTES
from protomq_broker.store.log.crc_forge import bytes_between, crc32c_before, unwind_crc32c
from protomq_broker.store.log.lost_head import HeadBounds, find_head
from protomq_broker.store.log.recovery import (
    DamagedRange,
    StartPoint,
    has_bytes_behind,
    holds_again,
    is_filled,
    merged_ranges,
    write_quarantine,
)
from protomq_broker.store.log.seals import encode_head, encode_padding
from protomq_broker.store.log.segment import SegmentFile
from protomq_broker.store.queues.lost_records import EndsByLog
from protomq_broker.store.queues.queue_ends import QueueEnd, ends_below, read_saved_ends, save_ends
from protomq_broker.store.queues.repaired import FORCED_SIZE_BYTES, encode_note, is_within

from .offline import OfflineStore, open_offline
from .verify import find_damage

COPY_BLOCK_SIZE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Repair:
    """One thing that was done.

    Attributes: path: the segment; start_position, end_position: what was taken out; kept: the files with the bytes; explanation: in words.
    """

    path: str
    start_position: int
    end_position: int
    kept: tuple[str, ...]
    explanation: str


class _Note(NamedTuple):
    """What the padding says: the whole range, and how far queues went in it."""

    damage: DamagedRange
    ends: list[QueueEnd]


class _Chain(NamedTuple):
    """What the seals before a place say: what is written there goes on with it.

    What repair writes proves nothing of what stands in front: `synced_position` is what others knew to be synced.
    """

    crc32c: int
    store_time_ms: int = 0
    epoch: int = 0
    synced_position: int = 0

    def behind(self, damage: DamagedRange) -> _Chain:
        """Behind a range that was skipped."""
        return self._replace(crc32c=damage.previous_crc32c)


def repair(root: Path | str, keep_dir: Path | str, *, disk: Disk | None = None) -> list[Repair]:
    """Takes all damage out of a log, ranges in quarantine too; returns what it did. No broker may have the store open.

    Raises StoreLockedError, StoreSettingsError, StoreError, OSError.
    """
    disk = disk or Disk()
    open_offline(root, disk)  # is it a store at all?
    lock = StoreLock(disk, str(root).rstrip("/"))
    try:
        store = open_offline(root, disk, writable=True)
        store.damaged = merged_ranges(store.damaged)
        disk.make_folder(str(keep_dir))
        sync_names_above(disk, str(keep_dir))
        checkpoint = store.checkpoint
        start = store.start()
        position, chain = start.position, _Chain(start.crc32c or 0)
        found: list[tuple[DamagedRange, _Chain]] = []
        quarantined = deque(store.damaged)
        ends = EndsByLog(disk, store.folder)
        for item in find_damage(store, start):
            base = item.start_position if isinstance(item, DamagedRange) else item.base_position
            while quarantined and quarantined[0].start_position < base:
                # A walk skips what was put into quarantine while the store was open.
                damage = quarantined.popleft()
                if damage.start_position == position:  # else it is part of what was found here
                    if not holds_again(disk, store.folder, damage, chain.crc32c, unreadable_is_damage=True):
                        ends.pass_over(damage)
                        found.append((damage, chain))
                    position, chain = damage.end_position, chain.behind(damage)
            if isinstance(item, DamagedRange):
                ends.pass_over(item)
                found.append((item, chain))
                position, chain = item.end_position, chain.behind(item)
            else:
                ends.take(item)
                last = item.seals[-1]
                position = item.base_position + item.size_bytes
                synced = max(chain.synced_position, store.epochs.synced_by(item.seals))
                chain = _Chain(last.crc32c, last.store_time_ms, last.epoch, synced)
        for damage in quarantined:
            if damage.start_position == position:
                if not holds_again(disk, store.folder, damage, chain.crc32c, unreadable_is_damage=True):
                    ends.pass_over(damage)
                    found.append((damage, chain))
                position, chain = damage.end_position, chain.behind(damage)
        found = _with_heads(store, found)
        found = [each for each in found if not is_filled(disk, store.folder, each[0], each[1].crc32c)]
        is_torn = has_bytes_behind(disk, store.folder, position)
        # Before the log lacks anything: killed in between, it may be started, or repaired again, which finds less to do.
        if found or is_torn or _gone_below(store, start.position):
            # What it lacks then it may have acknowledged: where the master is elected, it leaves the in-sync set first.
            remove_file(disk, f"{store.root}/{TAIL_NAME}")
        # It may point into what is filled: the next start reads the log from the start.
        if found and checkpoint is not None:
            first = replace(
                checkpoint, replay_position=start.position, replay_crc32c=start.crc32c or 0
            )
            write_checkpoint(disk, f"{store.root}/checkpoint", first)
        done = _forget_below(store, start.position)
        _keep_ends(store, [damage for damage, _ in found], ends.found)
        for damage, before in found:
            done.append(_take_out(store, damage, before, str(keep_dir)))
        if is_torn:
            done.append(_cut_tail(store, position, str(keep_dir)))
        return done
    finally:
        lock.release()


def _with_heads(
    store: OfflineStore, found: list[tuple[DamagedRange, _Chain]]
) -> list[tuple[DamagedRange, _Chain]]:
    """The ranges, but a head of a segment and what is damaged behind it are one.

    A head has no room for a CRC that is wished for.
    """
    size_bytes = store.folder.segment_size_bytes
    whole: list[tuple[DamagedRange, _Chain]] = []
    for damage, before in found:
        last = whole[-1][0] if whole else None
        is_behind_head = (
            last is not None
            and last.end_position == damage.start_position == last.start_position + SEAL_SIZE_BYTES
            and last.start_position % size_bytes == 0
        )
        if last is not None and is_behind_head:
            whole[-1] = (replace(damage, start_position=last.start_position), whole[-1][1])
        else:
            whole.append((damage, before))
    return whole


def _keep_ends(store: OfflineStore, found: list[DamagedRange], ends: list[QueueEnd]) -> None:
    """Before anything is filled: how far the queues went there, by the log itself and by what a start would go by."""
    folder, config_folder = f"{store.root}/consumequeue", f"{store.root}/config"
    if store.disk.is_folder(folder):
        ends = [*ends, *ends_below(store.disk, folder, folder)]
    there = [
        end
        for end in ends
        if any(damage.start_position <= end.position < damage.end_position for damage in found)
    ]
    if there:
        kept = read_saved_ends(store.disk, config_folder)
        save_ends(store.disk, config_folder, dict.fromkeys([*kept, *there]))


def _take_out(
    store: OfflineStore, damage: DamagedRange, before: _Chain, keep_dir: str
) -> Repair:
    kept = _keep(store, damage.start_position, damage.end_position, damage.reason, keep_dir)
    known = {item.start_position: item for item in store.damaged if not is_within(item, [damage])}
    known[damage.start_position] = damage
    store.damaged = [known[position] for position in sorted(known)]
    write_quarantine(store.disk, store.quarantine_path, store.damaged)
    saved = read_saved_ends(store.disk, f"{store.root}/config")
    ends = [end for end in saved if damage.start_position <= end.position < damage.end_position]
    _fill(store, damage, before, _Note(damage, ends))
    return Repair(
        store.folder.path_at(damage.start_position),
        damage.start_position,
        damage.end_position,
        kept,
        f"{damage.reason}: filled with padding; the offsets of the lost messages are answered with an error",
    )


def _gone_below(store: OfflineStore, first_position: int) -> list[DamagedRange]:
    return [damage for damage in store.damaged if damage.end_position <= first_position]


def _forget_below(store: OfflineStore, first_position: int) -> list[Repair]:
    """Takes ranges before the log's first segment off the list: there is nothing left of them that could be filled."""
    gone = _gone_below(store, first_position)
    if gone:
        store.damaged = [damage for damage in store.damaged if damage not in gone]
        write_quarantine(store.disk, store.quarantine_path, store.damaged)
    return [
        Repair(
            store.folder.path_at(damage.start_position),
            damage.start_position,
            damage.end_position,
            (),
            f"{damage.reason}: the log begins behind it now; it is removed from the list",
        )
        for damage in gone
    ]


def _cut_tail(store: OfflineStore, position: int, keep_dir: str) -> Repair:
    end = max(segment.end_position for segment in store.folder.overlapping(position, 1 << 63))
    kept = _keep(store, position, end, "torn tail", keep_dir)
    store.folder.clear_from(position)
    return Repair(store.folder.path_at(position), position, end, kept, "torn tail: cut")


def _keep(store: OfflineStore, start: int, end: int, reason: str, keep_dir: str) -> tuple[str, ...]:
    """Copies [start, end) of the log, zeros at the end of each file left out; a file of an earlier run is not written over."""
    disk = store.disk
    paths: list[str] = []
    for segment in store.folder.overlapping(start, end):
        first = max(start, segment.base_position) - segment.base_position
        last = min(end, segment.end_position) - segment.base_position
        for at in range(first, last, COPY_BLOCK_SIZE_BYTES):
            data = read_fully(disk, segment.fd, min(COPY_BLOCK_SIZE_BYTES, last - at), at).rstrip(
                b"\x00"
            )
            if data:
                path = _free_path(disk, f"{keep_dir}/{segment.base_position + at:020d}")
                write_file_atomically(disk, path, data)
                paths.append(path)
    note = {
        "root": store.root,
        "start_position": start,
        "end_position": end,
        "reason": reason,
        "files": paths,
    }
    write_file_atomically(
        disk,
        _free_path(disk, f"{keep_dir}/{start:020d}.json"),
        json.dumps(note, indent=2).encode() + b"\n",
    )
    return tuple(paths)


def _free_path(disk: Disk, path: str) -> str:
    number, free = 1, path
    while disk.exists(free):
        number += 1
        free = f"{path}.{number}"
    return free


def _fill(store: OfflineStore, damage: DamagedRange, before: _Chain, note: _Note) -> None:
    position, chain = damage.start_position, before
    folder = store.folder
    head_position = damage.end_position - SEAL_SIZE_BYTES
    if head_position % folder.segment_size_bytes == 0 and position < head_position:
        _fill_up_to_head(store, damage, before, note)
        return
    lost_head = _lost_head(store, damage, before) if position == head_position else b""
    while position < damage.end_position:
        segment = folder.at(position)
        if segment is None:
            segment = folder.create(position - position % folder.segment_size_bytes)
        segment = folder.unshared(segment)
        store.disk.allocate(segment.fd, folder.segment_size_bytes)
        if position == segment.base_position:
            head = lost_head or encode_head(
                position,
                chain.crc32c,
                epoch=chain.epoch,
                store_time_ms=chain.store_time_ms,
                synced_position=chain.synced_position,
            )
            chain = chain._replace(crc32c=_write(store.disk, segment, position, head))
            position += len(head)
        end = min(segment.end_position, damage.end_position)
        while position < end:
            size = _piece(end - position)
            forced = damage.previous_crc32c if position + size == damage.end_position else None
            padding = _padding_append(position, size, chain, forced, note)
            chain = chain._replace(crc32c=_write(store.disk, segment, position, padding))
            position += size
        store.disk.fsync(segment.fd)


def _lost_head(store: OfflineStore, damage: DamagedRange, before: _Chain) -> bytes:
    """The head of a segment, if it is all that is damaged: as it was, for the log goes on behind it with its CRC."""
    checkpoint = store.checkpoint
    block = next(iter(store.walk(StartPoint(damage.end_position, damage.previous_crc32c))), None)
    behind = None if block is None else block.seals[0]
    known = [each for each in (behind, checkpoint) if each is not None]
    row = store.epochs.row_at(damage.start_position)
    likely = [before.epoch if row is None else row.epoch]
    bounds = HeadBounds(
        epochs=list(dict.fromkeys([*likely, *sorted({before.epoch, *(each.epoch for each in known)})])),
        store_time_ms=(before.store_time_ms, max(each.store_time_ms for each in (before, *known))),
        synced_position=(before.synced_position, damage.start_position),
    )
    head = find_head(damage.start_position, before.crc32c, damage.previous_crc32c, bounds)
    if head is None:
        raise StoreError(f"the head of the segment at {damage.start_position} cannot be reckoned: restore the log from a replica")
    return head


def _fill_up_to_head(store: OfflineStore, damage: DamagedRange, before: _Chain, note: _Note) -> None:
    """As `_fill`, for a range that ends with the head of a segment: the padding before the head makes its CRC right."""
    position = damage.end_position - SEAL_SIZE_BYTES

    def head_behind(crc: int) -> bytes:
        return encode_head(
            position,
            crc,
            epoch=before.epoch,
            store_time_ms=before.store_time_ms,
            synced_position=before.synced_position,
        )

    crc = crc32c_before(head_behind(0)[:SEAL_COVERED_BYTES], damage.previous_crc32c)
    _fill(store, replace(damage, end_position=position, previous_crc32c=crc), before, note)
    segment = store.folder.at(position)
    assert segment is not None, "what is behind the range stands in it"
    segment = store.folder.unshared(segment)
    written = _write(store.disk, segment, position, head_behind(crc))
    assert written == damage.previous_crc32c
    store.disk.fsync(segment.fd)


def _piece(left: int) -> int:
    """How many of the bytes that are left the next padding append takes: never so that too few remain for another one."""
    if left < CLOSING_SIZE_BYTES:
        raise StoreError(
            f"a damaged range of {left} bytes is too small to fill: restore the log from a replica"
        )
    most = APPEND_SIZE_MAX_BYTES
    if left <= most:
        return left
    return most if left - most >= CLOSING_SIZE_BYTES else left - CLOSING_SIZE_BYTES


def _padding_append(
    position: int, size: int, chain: _Chain, forced_crc32c: int | None, note: _Note
) -> bytes:
    """A padding append of `size` bytes with its seal; with the CRC that is wished for."""
    padding = _with_note(encode_padding(size - SEAL_SIZE_BYTES), note)
    seal = encode_seal(
        chain.crc32c,
        padding,
        epoch=chain.epoch,
        start_position=position,
        record_count=0,
        store_time_ms=chain.store_time_ms,
        synced_position=chain.synced_position,
    )
    if forced_crc32c is None:
        return padding + seal
    before = extend_crc32c(crc32c(chain.crc32c.to_bytes(4, "little")), padding[:-4])
    after = unwind_crc32c(forced_crc32c, seal[:SEAL_COVERED_BYTES])
    return (
        padding[:-4]
        + bytes_between(before, after)
        + seal[:SEAL_COVERED_BYTES]
        + forced_crc32c.to_bytes(4, "little")
    )


def _with_note(padding: bytes, note: _Note) -> bytes:
    _, start = read_varint(padding, 1, LENGTH_SIZE_MAX_BYTES)
    text = encode_note(note.damage, note.ends, len(padding) - start - FORCED_SIZE_BYTES)
    return padding[:start] + text + padding[start + len(text) :]


def _write(disk: Disk, segment: SegmentFile, position: int, data: bytes) -> int:
    write_fully(disk, segment.fd, data, position - segment.base_position)
    return int.from_bytes(data[-4:], "little")
