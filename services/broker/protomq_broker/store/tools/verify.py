"""Checking a store from end to end: what `protomq log verify` says. Nothing is changed.

For every byte of the log it checks the chain of seals, and that their epochs never fall. It checks the stamps of each record: its position,
the density of the offsets of its queue, the order of store times. Behind the end there must be zeros. The entries of consume queues on disk
must point to these very records, and their check bits must hold. What is missing in a consume queue is no finding: it comes from the log at
the next start. All queues do if their table is missing or of another version.

If a broker has the store open, only what lies below its last checkpoint is judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protomq.wire.log_walk import WalkedBlock
from protomq.wire.record import PHYSICAL_OFFSET_AT
from protomq_broker.store.config import BACKUP_NAME
from protomq_broker.store.errors import BackupError
from protomq_broker.store.files.disk import Disk, read_fully
from protomq_broker.store.files.lock import is_locked
from protomq_broker.store.log.append import CorruptRecordError, ScannedRecords
from protomq_broker.store.log.kinds import NO_OFFSET, is_queued
from protomq_broker.store.log.record_scan import read_trailers
from protomq_broker.store.log.recovery import (
    DamagedRange,
    StartPoint,
    explain_problem,
    find_misplaced,
    find_resync,
    first_free_base,
    has_bytes_behind,
    is_filled,
    max_synced_behind,
    resync_at,
    skips_of,
)
from protomq_broker.store.queues.consume_queue import ENTRIES_PER_FILE, FILE_SIZE_BYTES
from protomq_broker.store.queues.consume_queue_table import has_table
from protomq_broker.store.queues.entry_check import opened, salt_of
from protomq_broker.store.queues.repaired import is_within, repaired_in
from protomq_broker.store.queues.selection import ENTRY, ENTRY_SIZE_BYTES
from protomq_broker.store.start.log_replay import deletions_in_block

from .backup_manifest import read_manifest
from .offline import OfflineStore, open_offline


class FindingKind(Enum):
    """What was found."""

    CORRUPTION = "CORRUPTION"
    """Bytes that had been stored safely do not hold: `repair`, or fetch them from a replica."""
    QUARANTINE = "QUARANTINE"
    """Corruption that a broker has put into quarantine already: it is not served. `repair` takes it out."""
    REPAIRED = "REPAIRED"
    """Corruption that was taken out: the log holds again, the offsets of the lost messages are answered with an error."""
    TORN_TAIL = "TORN_TAIL"
    """What a crash left of the last appends: the next start cuts it."""
    WRONG_STAMP = "WRONG_STAMP"
    """A record that holds says something about itself that is not so: a defect of the broker, please report it."""
    WRONG_ENTRY = "WRONG_ENTRY"
    """A consume queue does not agree with the log: delete the folder `consumequeue`, the next start rebuilds it."""
    BACKUP = "BACKUP"
    """A backup does not say what it has: its backup.json is damaged or gone, and `restore` refuses it."""


@dataclass(frozen=True, slots=True)
class LostMessages:
    """Messages [first_offset, end_offset) of a queue that stand in a damaged part of the log."""

    topic: str
    queue_id: int
    first_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        kind: what it is.
        path: the file.
        start_position: physical offset at which it begins.
        end_position: physical offset at which the log holds again; the end of what is concerned.
        lost: the messages concerned, as far as what follows tells.
        explanation: what is wrong, in words.
    """

    kind: FindingKind
    path: str
    start_position: int
    end_position: int
    lost: tuple[LostMessages, ...]
    explanation: str


def verify(root: Path | str, *, disk: Disk | None = None) -> list[Finding]:
    """Everything that is wrong with a store; nothing if all is well. Raises StoreSettingsError if it is no store."""
    store = open_offline(root, disk)
    return [*_check_manifest(store), *_Verification(store, is_live=is_locked(store.disk, store.root)).run()]


def _check_manifest(store: OfflineStore) -> Iterator[Finding]:
    """What is wrong with the file that makes a folder a backup."""
    path = f"{store.root}/{BACKUP_NAME}"
    explanation = ""
    try:
        if read_manifest(store.root, disk=store.disk) is None and store.is_backup:
            explanation = "it is gone, and nothing else says what the backup has"
    except BackupError as error:
        explanation = str(error.__cause__)
    if explanation:
        position = store.folder.first_position
        yield Finding(FindingKind.BACKUP, path, position, position, (), explanation)


def find_damage(store: OfflineStore, start: StartPoint) -> Iterator[WalkedBlock | DamagedRange]:
    """Walks a log from end to end: the blocks that hold, and the damage between them, in order. A torn tail is not damage."""
    position, crc, synced = start.position, start.crc32c, store.synced_position
    while True:
        walker = store.walk(StartPoint(position, crc))
        for block in walker:
            yield block
            synced = max(synced, store.epochs.synced_by(block.seals))
        position, crc = walker.position, walker.crc32c
        found = find_resync(store.disk, store.folder, position)
        checkpoint = store.checkpoint
        if checkpoint is not None and position < checkpoint.replay_position:
            end = StartPoint(checkpoint.replay_position, checkpoint.replay_crc32c)
            if found is None or found.position > end.position:
                found = resync_at(store.disk, store.folder, end, found)
        if position >= synced and found is not None:
            skips = skips_of(store.damaged)
            synced_behind = max_synced_behind(store.disk, store.folder, found, skips, store.epochs)
            synced = max(synced, synced_behind)
        written = max(store.written_position, store.folder.lost_front_end)
        is_proved = (store.same_cache and found is not None) or position < written
        if position >= synced and not is_proved and find_misplaced(store.folder, position) is None:
            return
        if found is None:
            proved = max(position + 1, synced, written)
            free = first_free_base(store.disk, store.folder, proved)
            yield DamagedRange(position, free, crc or 0, explain_problem(walker.problem))
            return
        yield DamagedRange(position, found.position, found.crc32c, explain_problem(walker.problem))
        position, crc = found.position, found.crc32c


class _Verification:
    """One run. `expected` is the next offset of each queue that was seen."""

    def __init__(self, store: OfflineStore, *, is_live: bool) -> None:
        self._store = store
        self._deleted: dict[str, int] = {}  # topic -> up to where what the log has of it is gone
        self._flushed = store.checkpoint.flushed_position if store.checkpoint else 0
        self._limit = self._flushed if is_live else 1 << 63
        self._quarantine = deque(sorted(store.damaged, key=lambda damage: damage.start_position))
        self._expected: dict[tuple[str, int], int] = {}
        self._store_time_ms = 0
        self._epoch = 0
        self._chain: tuple[int, int | None] = (0, None)  # where the walk is, and the CRC there
        self._has_queues = has_table(store.disk, f"{store.root}/consumequeue")
        self._damage: list[tuple[DamagedRange, FindingKind, list[LostMessages]]] = []
        self._findings: list[Finding] = []
        # With topic, queue and offset: the topic may be deleted further on, or the offset given to a later message.
        self._wrong_entries: list[tuple[str, int, int, Finding]] = []
        self._falls: dict[tuple[str, int], list[tuple[int, int]]] = {}
        """Of each queue where its offsets go back: (position, offset)."""

    def run(self) -> Iterator[Finding]:
        store = self._store
        start = store.start()
        position = start.position
        self._chain = start.position, start.crc32c
        for found in find_damage(store, start):
            if isinstance(found, DamagedRange):
                if found.start_position < self._limit:
                    self._damage.append((found, FindingKind.CORRUPTION, []))
                position = found.end_position
                self._chain = position, found.previous_crc32c
                continue
            position = found.base_position + found.size_bytes
            self._note_quarantine(position, found.base_position)
            self._chain = position, found.seals[-1].crc32c
            self._note_repaired(found)
            self._check_block(found)
        self._note_quarantine(1 << 63)
        for damage, kind, lost in self._damage:
            position = max(position, damage.end_position)
            yield self._finding(
                kind, damage.start_position, damage.end_position, damage.reason, tuple(lost)
            )
        yield from self._findings
        for topic, queue_id, offset, wrong in self._wrong_entries:
            position_of, falls = wrong.start_position, self._falls.get((topic, queue_id), ())
            is_replaced = any(position_of < fall_position and fallen_to <= offset for fall_position, fallen_to in falls)
            if position_of >= self._deleted.get(topic, 0) and not is_replaced:
                yield wrong
        if position < self._limit and has_bytes_behind(store.disk, store.folder, position):
            yield self._finding(
                FindingKind.TORN_TAIL, position, position, self._explain_tail(position)
            )

    def _note_quarantine(self, end_position: int, walked_from: int = 1 << 63) -> None:
        """Enters the ranges in quarantine that begin below `end_position`; [walked_from, end_position) was walked, and holds."""
        store = self._store
        while self._quarantine and self._quarantine[0].start_position < end_position:
            damage = self._quarantine.popleft()
            position, crc = self._chain
            is_repaired = damage.end_position > walked_from or (
                damage.start_position == position
                and is_filled(store.disk, store.folder, damage, crc)
            )
            self._chain = damage.end_position, damage.previous_crc32c
            kind = FindingKind.REPAIRED if is_repaired else FindingKind.QUARANTINE
            self._damage.append((damage, kind, []))

    def _note_repaired(self, block: WalkedBlock) -> None:
        """Enters what was taken out of the log before it came here, unless the store knows of it."""
        for damage, _ in repaired_in(block, self._store.folder):
            if damage.start_position < self._limit and not is_within(damage, self._store.damaged):
                self._damage.append((damage, FindingKind.REPAIRED, []))

    def _explain_tail(self, position: int) -> str:
        if find_resync(self._store.disk, self._store.folder, position) is None:
            return "the log ends here, but there are bytes behind it: the next start cuts them"
        return "an append that is not known to have been synced does not hold, and the page cache is gone: the next start cuts here"

    def _check_epochs(self, block: WalkedBlock) -> None:
        for seal in block.seals:
            if seal.epoch < self._epoch and seal.start_position < self._limit:
                self._report(
                    FindingKind.WRONG_STAMP,
                    seal.start_position,
                    f"an append of epoch {seal.epoch}, behind one of epoch {self._epoch}",
                )
            self._epoch = max(self._epoch, seal.epoch)

    def _check_block(self, block: WalkedBlock) -> None:
        self._check_epochs(block)
        starts, sizes = block.records()
        if not len(starts) or block.base_position >= self._limit:
            return
        try:
            records = read_trailers(block.data, block.base_position, starts, sizes)
        except CorruptRecordError as error:
            self._report(
                FindingKind.WRONG_STAMP, error.position, f"{error.reason}, though its seal holds"
            )
            return
        stamped = _stamped_positions(bytes(block.data), starts + sizes)
        for row in np.flatnonzero(stamped != records.positions).tolist():
            self._report(
                FindingKind.WRONG_STAMP,
                int(records.positions[row]),
                f"the record says it stands at {int(stamped[row])}",
            )
        times = np.concatenate(([self._store_time_ms], records.store_times_ms))
        for row in np.flatnonzero(np.diff(times) < 0).tolist():
            self._report(
                FindingKind.WRONG_STAMP,
                int(records.positions[row]),
                "stored before the record before it",
            )
        self._store_time_ms = int(times[-1])
        for name, position in deletions_in_block(block, records):
            self._deleted[name] = max(position, self._deleted.get(name, 0))
        queued = is_queued(records.flags)
        for row in np.flatnonzero(queued == (records.queue_offsets == NO_OFFSET)).tolist():
            offset = "no queue offset" if queued[row] else f"offset {records.queue_offsets[row]}"
            self._report(
                FindingKind.WRONG_STAMP,
                int(records.positions[row]),
                f"{offset} in a record with flags {int(records.flags[row]):#x}",
            )
        records = records.select(queued)
        keys = records.topic_indexes.astype(np.int64) << 32 | records.queue_ids
        for key in np.unique(keys).tolist():
            rows = np.flatnonzero(keys == key)
            self._check_queue(records, rows, records.topics[key >> 32], key & 0xFFFFFFFF)

    def _check_queue(
        self, records: ScannedRecords, rows: NDArray[np.int64], topic: str, queue_id: int
    ) -> None:
        offsets, positions = records.queue_offsets[rows], records.positions[rows]
        expected = self._expected.get((topic, queue_id), int(offsets[0]))
        steps = np.diff(np.concatenate(([expected - 1], offsets)))
        for row in np.flatnonzero(
            (steps != 1) & (offsets != 0)
        ).tolist():  # from 0 again: the topic was deleted and created again
            first = expected if row == 0 else int(offsets[row - 1]) + 1
            self._gap(topic, queue_id, first, int(offsets[row]), int(positions[row]))
        for row in np.flatnonzero(steps <= 0).tolist():
            self._falls.setdefault((topic, queue_id), []).append((int(positions[row]), int(offsets[row])))
        self._expected[topic, queue_id] = int(offsets[-1]) + 1
        if self._has_queues:
            # The queue of each topic that had the name has entries, or had them, at the same places.
            for life in np.split(rows, np.flatnonzero(np.diff(offsets) <= 0) + 1):
                self._check_entries(records, life, topic, queue_id)

    def _gap(self, topic: str, queue_id: int, first: int, end: int, position: int) -> None:
        before = [entry for entry in self._damage if entry[0].end_position <= position]
        if first < end and before:
            before[-1][2].append(LostMessages(topic, queue_id, first, end))
            return
        what = f"offset {end} of queue {queue_id} of topic {topic}"
        if end < first:
            text = f"{what} was given before: messages that had it, or a higher one, are not served"
        else:
            text = f"{what}, where {first} comes next"
        self._report(FindingKind.WRONG_STAMP, position, text)

    def _check_entries(
        self, records: ScannedRecords, rows: NDArray[np.int64], topic: str, queue_id: int
    ) -> None:
        """Compares rows whose offsets grow with the files of the consume queue, as far as they reach."""
        offsets = records.queue_offsets[rows]
        wanted = np.empty(len(rows), ENTRY)
        wanted["position"], wanted["size"], wanted["tag_code"] = (
            records.positions[rows],
            records.sizes[rows],
            records.tag_codes[rows],
        )
        for number in np.unique(offsets // ENTRIES_PER_FILE).tolist():
            chosen = np.flatnonzero(offsets // ENTRIES_PER_FILE == number)
            path = f"{self._store.root}/consumequeue/{topic}/{queue_id}/{number * FILE_SIZE_BYTES:020d}"
            first, end = int(offsets[chosen[0]]), int(offsets[chosen[-1]]) + 1
            stored, good = _read_entries(
                self._store.disk, path, first, end - first, salt_of(topic, queue_id)
            )
            places = offsets[chosen] - first
            chosen, places = chosen[places < len(stored)], places[places < len(stored)]
            differing = np.flatnonzero(stored[places] != wanted[chosen])
            explanation, row = "", 0
            if len(differing):
                row = int(chosen[differing[0]])
                explanation = (
                    f"{len(differing)} entries do not agree with the log, the first is that of offset {int(offsets[row])}: "
                    f"{stored[places[differing[0]]].item()} instead of {wanted[row].item()}"
                )
            elif good < len(stored):
                row = int(chosen[np.searchsorted(places, good, "right") - 1])
                explanation = f"the check bits of the entry of offset {first + good} do not hold"
            if explanation:
                position = int(wanted[row]["position"])
                wrong = Finding(FindingKind.WRONG_ENTRY, path, position, position, (), explanation)
                self._wrong_entries.append((topic, queue_id, int(offsets[row]), wrong))

    def _report(self, kind: FindingKind, position: int, explanation: str) -> None:
        self._findings.append(self._finding(kind, position, position, explanation))

    def _finding(
        self,
        kind: FindingKind,
        start: int,
        end: int,
        explanation: str,
        lost: tuple[LostMessages, ...] = (),
    ) -> Finding:
        return Finding(kind, self._store.folder.path_at(start), start, end, lost, explanation)


def _stamped_positions(data: bytes, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    windows = np.ndarray((len(data) - 7,), "<i8", buffer=data, strides=(1,))
    return windows[ends + PHYSICAL_OFFSET_AT]


def _read_entries(
    disk: Disk, path: str, queue_offset: int, count: int, salt: int
) -> tuple[NDArray[np.void], int]:
    """(the entries from `queue_offset` on that the file has, how many hold up to the first whose check does not)."""
    try:
        fd = disk.open_read_only(path)
    except FileNotFoundError:
        return np.empty(0, ENTRY), 0
    try:
        at = queue_offset % ENTRIES_PER_FILE * ENTRY_SIZE_BYTES
        data = read_fully(disk, fd, count * ENTRY_SIZE_BYTES, at)
    finally:
        disk.close(fd)
    return opened(data, len(data) // ENTRY_SIZE_BYTES, queue_offset, salt)
