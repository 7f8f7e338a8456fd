"""Looking at a store without opening it: what `protomq log verify`, `repair`, `dump` and `epochs` have in common, and the last two.

Nothing is changed here. A broker may be running: then what is behind its last checkpoint is still moving.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from protomq.v1.record_pb2 import Record
from protomq.wire.log_walk import Seal
from protomq_broker.store.config import BACKUP_MARK, BACKUP_NAME, check_format
from protomq_broker.store.errors import StoreSettingsError
from protomq_broker.store.files.disk import Disk, read_json
from protomq_broker.store.files.lock import is_locked, previous_cache_id
from protomq_broker.store.files.side_files import SideFileDamagedError, read_json_file
from protomq_broker.store.log.checkpoint import Checkpoint, read_checkpoint
from protomq_broker.store.log.epochs import EPOCHS_NAME, Epochs, find_epochs, read_epochs
from protomq_broker.store.log.record_scan import record_field_at
from protomq_broker.store.log.recovery import (
    DamagedRange,
    StartPoint,
    choose_start,
    read_quarantine,
    skips_of,
)
from protomq_broker.store.log.seals import LogWalker
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.start.front_note import find_front
from protomq_broker.store.start.log_proof import (
    derived_position,
    forget_unused_segments,
    written_position,
)
from protomq_broker.store.start.settings import is_store


@dataclass(slots=True)
class OfflineStore:
    """The files of a store, open for looking.

    Attributes:
        root: its folder.
        disk: where it is.
        folder: the segments.
        checkpoint: None if there is none that holds.
        damaged: the ranges in quarantine.
        same_cache: the page cache is the one that the store was written under; see recovery.py.
        epochs: as the store has them written down.
        synced_position: up to where the log had been synced, by what stands beside it.
        written_position: up to where the log was written for sure; 0 if the page cache is another one.
        is_backup: its settings say that it is a backup.
    """

    root: str
    disk: Disk
    folder: SegmentFolder
    checkpoint: Checkpoint | None
    damaged: list[DamagedRange]
    same_cache: bool
    epochs: Epochs
    synced_position: int
    written_position: int
    is_backup: bool

    @property
    def quarantine_path(self) -> str:
        """The file with the ranges in quarantine."""
        return f"{self.root}/config/quarantine.json"

    def start(self, position: int = 0) -> StartPoint:
        """Where a walk begins that is to see everything from `position` on."""
        return choose_start(self.folder, self.checkpoint, position) if position else self._first()

    def walk(self, start: StartPoint) -> LogWalker:
        """A walk that skips the ranges in quarantine."""
        return LogWalker(
            self.disk, self.folder, start.position, start.crc32c, skips=skips_of(self.damaged)
        )

    def _first(self) -> StartPoint:
        first = self.folder.first_position
        if first == 0:
            return StartPoint(0, 0)
        known = self.checkpoint is not None and self.checkpoint.first_position == first
        return StartPoint(
            first, self.checkpoint.first_crc32c if self.checkpoint is not None and known else None
        )


def check_is_store(root: Path | str, disk: Disk | None = None) -> None:
    """Raises StoreSettingsError for a folder that is no store."""
    if not is_store(disk or Disk(), str(root).rstrip("/")):
        raise StoreSettingsError(f"{root}: this is not a store: it has no config/store.json of protomq")


def open_offline(
    root: Path | str, disk: Disk | None = None, *, writable: bool = False
) -> OfflineStore:
    """Raises StoreSettingsError if this is no store."""
    disk = disk or Disk()
    root = str(root).rstrip("/")
    check_is_store(root, disk)
    try:
        settings = read_json_file(disk, f"{root}/config/store.json")
    except SideFileDamagedError as error:
        plain = read_json(disk, f"{root}/config/store.json")
        if isinstance(plain, dict) and "format_version" in plain:
            check_format(f"{root}/config/store.json", plain)
        raise StoreSettingsError(
            f"{error}: a start of the broker writes it again, from the segments"
        ) from error
    if settings is None and disk.is_folder(f"{root}/commitlog"):
        raise StoreSettingsError(
            f"{root}/config/store.json is missing: a start of the broker writes it again, if its segment_size_bytes is that of the store"
        )
    settings = settings if isinstance(settings, dict) else {}
    size = settings.get("segment_size_bytes")
    if not isinstance(size, int) or size <= 0 or not disk.is_folder(f"{root}/commitlog"):
        raise StoreSettingsError(
            f"{root}: this is not a store: config/store.json or commitlog is missing"
        )
    check_format(f"{root}/config/store.json", settings)
    folder = SegmentFolder(disk, f"{root}/commitlog", size)
    folder.open(read_only=not writable)
    manifest = _manifest_of(disk, root)
    find_front(disk, root, folder, manifest.get("first_position"))
    forget_unused_segments(disk, root, folder)
    cache_id = disk.cache_id(root)
    same_cache = bool(cache_id) and cache_id == previous_cache_id(disk, root)
    checkpoint = read_checkpoint(disk, f"{root}/checkpoint")
    # A broker moves its files; the lock of a caller who is to write is his own.
    epochs = read_epochs(disk, f"{root}/{EPOCHS_NAME}")
    may_ask_queues = same_cache and (writable or not is_locked(disk, root))
    return OfflineStore(
        root,
        disk,
        folder,
        checkpoint,
        read_quarantine(disk, f"{root}/config/quarantine.json", advises=False),
        same_cache,
        epochs,
        max(
            checkpoint.flushed_position if checkpoint else 0,
            derived_position(disk, root),
            epochs.synced_position,
            manifest.get("end", (0,))[0],
        ),
        written_position(disk, root) if may_ask_queues else 0,
        settings.get(BACKUP_MARK) is True,
    )


def _manifest_of(disk: Disk, root: str) -> dict[str, Any]:
    """What a backup has, all of it synced; nothing if the folder is none, or does not tell."""
    try:
        content = read_json_file(disk, f"{root}/{BACKUP_NAME}")
    except SideFileDamagedError:
        return {}
    return content if isinstance(content, dict) else {}


def epochs_of(root: Path | str, *, disk: Disk | None = None) -> list[dict[str, int | bool]]:
    """The epochs of a log, oldest first: each with its start and end position, and whether the store led it.

    Where the store does not tell any more, by its seals. Raises StoreSettingsError.
    """
    store = open_offline(root, disk)
    walker = store.walk(store.start(store.checkpoint.replay_position if store.checkpoint else 0))
    for _ in walker:
        pass
    epochs = store.epochs
    if not epochs.is_known:
        epochs = find_epochs(store.disk, store.folder, walker.position)
    ends = [*(row.start_position for row in epochs.rows[1:]), walker.position]
    return [
        {
            "epoch": row.epoch,
            "start_position": row.start_position,
            "end_position": max(end, row.start_position),
            "led": row.is_led,
        }
        for row, end in zip(epochs.rows, ends, strict=True)
    ]


class LogItem(NamedTuple):
    """One thing in the log, as `dump` gives it: a record, a seal, or the place at which the log does not hold.

    Attributes:
        position: where it starts.
        size_bytes: its size with tag and length; 0 for a problem.
        record: the message, None for the others.
        seal: the seal, None for the others.
        problem: what is wrong from here on; "" if nothing is.
    """

    position: int
    size_bytes: int
    record: Record | None = None
    seal: Seal | None = None
    problem: str = ""


def dump(
    root: Path | str,
    *,
    start_position: int = 0,
    end_position: int | None = None,
    disk: Disk | None = None,
) -> Iterator[LogItem]:
    """The records and seals of a log in order, made one by one; those that begin within [start_position, end_position).

    Ends with a problem where the log does not hold; just ends where it ends, or where a broker is writing. Goes on behind ranges in
    quarantine.
    """
    store = open_offline(root, disk)
    end = 1 << 63 if end_position is None else end_position
    walker = store.walk(store.start(start_position))
    for block in walker:
        if block.base_position >= end:
            return
        fields = block.fields()
        field = next(fields, None)
        for seal in block.seals:
            seal_at = seal.start_position + seal.size_bytes - block.base_position
            while field is not None and field[0] < seal_at:
                at, size = field
                if start_position <= block.base_position + at < end:
                    _, head = record_field_at(block.data, at, at + size)
                    record = Record.FromString(bytes(block.data[at + head : at + size]))
                    yield LogItem(block.base_position + at, size, record=record)
                field = next(fields, None)
            position = block.base_position + seal_at
            if start_position <= position < end:
                yield LogItem(position, seal.end_position - position, seal=seal)
    flushed = store.checkpoint.flushed_position if store.checkpoint else 0
    if walker.position >= flushed and is_locked(store.disk, store.root):
        return  # the end of a log that is being written
    if not walker.ended_cleanly and start_position <= walker.position < end:
        yield LogItem(walker.position, 0, problem=walker.problem)
