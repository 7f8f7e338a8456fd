"""Opens a store: recovers the log, and brings the derived structures to its end.

    settings < derived.load < recover_log, which hands verified blocks to the derived structures < derived.truncate(end of the log)

Each derived structure says up to where it is complete (`replay_from`). The walk begins early enough for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protomq.v1.record_pb2 import RecordBatch
from protomq.v1.state_pb2 import TopicsRecord
from protomq.wire.log_walk import WalkedBlock
from protomq.wire.topics import LOG_TOPIC, TOPICS_TOPIC

from .config import BACKUP_NAME, FORMAT_VERSION, StoreConfig, check_format
from .derived import Derived
from .errors import CorruptLogError, StoreSettingsError
from .files.disk import Disk, read_json, sync_names_above
from .files.side_files import SideFileDamagedError, read_json_file, size_of_file, write_json_file
from .log.append import CorruptRecordError, ScannedRecords
from .log.boundaries import BoundaryFiles
from .log.checkpoint import Checkpoint
from .log.epochs import Epochs
from .log.record_scan import read_trailers
from .log.recovery import (
    CorruptionMode,
    RecoveredLog,
    StartPoint,
    check_before,
    choose_start,
    find_absent,
    read_quarantine,
    recover_log,
    rewrite_unsynced,
    skips_of,
)
from .log.seals import LogWalker
from .log.segment import SEGMENT_NAME, SegmentFolder
from .queues.consume_queue import ConsumeQueueDamagedError
from .queues.consume_queue_table import ConsumeQueueTable
from .queues.lost_records import records_that_seem_whole
from .queues.queue_ends import ends_in, keep_ends_of_damage, save_ends
from .state.log_front import tell
from .state.repeated_sends import RepeatedSends
from .state.topics import TopicTable, deletions_in, incarnation_of_first

log = logging.getLogger(__name__)

T = TypeVar("T")

START_CHECK_SIZE_BYTES: Final = 64 << 20
"""Bytes before the checkpoint that a start checks: 40 ms if they are in the page cache."""


def make_folders(disk: Disk, root: str) -> None:
    """Creates the store's folders, durably. Syncs those above the root too, since a start that was killed may have created any of them."""
    for folder in ("config", "commitlog", "boundaries", "consumequeue", "index", "repeatedsends", "timer"):
        disk.make_folder(f"{root}/{folder}")
    disk.fsync_dir(root)
    sync_names_above(disk, root)


def check_settings(disk: Disk, root: str, config: StoreConfig) -> None:
    """Compares the settings that shape the data on disk with those of the store. A new store saves them. Raises StoreSettingsError."""
    if disk.exists(f"{root}/{BACKUP_NAME}"):
        raise StoreSettingsError(
            f"{root}: this is a backup, or a restore that is not done ({BACKUP_NAME}): `protomq restore` makes a store of a backup"
        )
    path = f"{root}/config/store.json"
    ours = {"format_version": FORMAT_VERSION, "segment_size_bytes": config.segment_size_bytes}
    try:
        stored = read_json_file(disk, path)
    except SideFileDamagedError as error:
        plain = read_json(disk, path)
        if isinstance(plain, dict) and "format_version" in plain:
            check_format(path, plain)  # of an earlier version, which wrote no checksum
        stored = _settings_of_segments(disk, root, error)
        log.error("%s: its segments say what it was made with: %s", error, stored)
        if stored == ours:
            write_json_file(disk, path, ours)
    if stored is None:
        write_json_file(disk, path, ours)
        return
    check_format(path, stored)
    for name, value in ours.items():
        if stored.get(name) != value:
            raise StoreSettingsError(
                f"{path}: the store was made with {name} = {stored.get(name)}, not {value}"
            )


def _settings_of_segments(
    disk: Disk, root: str, error: SideFileDamagedError
) -> dict[str, int] | None:
    """Returns the settings that the segments of a store show; None if it has no segments. Raises StoreSettingsError if their sizes differ.
    """
    sizes: set[int | None] = set()
    names = [name for name in disk.list(f"{root}/commitlog") if SEGMENT_NAME.fullmatch(name)]
    for name in names:
        sizes.add(size_of_file(disk, f"{root}/commitlog/{name}"))
    if not names:
        return None
    size_bytes = sizes.pop()
    if sizes or not size_bytes or any(int(name) % size_bytes for name in names):
        raise StoreSettingsError(
            f"{error}, and the segments do not show the settings of the store: restore the file or the store from a copy"
        )
    return {"format_version": FORMAT_VERSION, "segment_size_bytes": size_bytes}


def recover_store(
    disk: Disk,
    folder: SegmentFolder,
    root: str,
    config: StoreConfig,
    checkpoint: Checkpoint | None,
    queues: ConsumeQueueTable,
    derived: Sequence[Derived],
    *,
    epochs: Epochs,
    same_cache: bool,
    deleted: dict[str, int],
    boundaries: BoundaryFiles,
    on_walked: Callable[[WalkedBlock], None],
) -> RecoveredLog:
    """Recovers the log and brings the derived structures to its end; they are loaded already, consume queues first. Raises CorruptLogError.

    `deleted`: for each deleted topic the position up to which its records are deleted; the walk adds those that it finds. `boundaries`:
    positions where a walk may begin, besides the heads of segments. `on_walked` is called with each block of the walk.
    """
    config_folder = f"{root}/config"
    positions = [structure.replay_from for structure in derived]
    try:
        recovered, replay = _recover(
            disk, folder, config_folder, config, checkpoint, queues, derived, epochs, same_cache, deleted, positions, boundaries, on_walked,
        )  # fmt: skip
    except CorruptLogError:
        if queues.known_ends:  # the files that had them are cut
            save_ends(disk, config_folder, queues.known_ends)
        raise
    replay.finish(recovered.tail.position)
    for structure in derived:
        # Before the first checkpoint there are no such files yet.
        if structure.damage and (
            checkpoint is not None or not structure.damage.endswith("is gone")
        ):
            log.warning("%s: it is rebuilt from the log", structure.damage)
    if recovered.synced_position < recovered.tail.position:
        log.info(
            "%d bytes from position %d on are rewritten and synced: they may not have been synced before",
            recovered.tail.position - recovered.synced_position, recovered.synced_position,
        )  # fmt: skip
        rewrite_unsynced(disk, folder, recovered.synced_position, recovered.tail.position)
        recovered.synced_position = recovered.tail.position
    broken = [structure for structure in derived if structure.needs_rebuild]
    if broken:
        _rebuild(disk, folder, checkpoint, recovered, queues, broken, deleted)
    for structure in derived:
        structure.truncate(recovered.tail.position)
    ahead = [structure for structure in derived if structure.needs_rebuild]
    if ahead:
        _rebuild(disk, folder, checkpoint, recovered, queues, ahead, deleted)
    queues.keep_ends(recovered.damaged, deleted, recovered.tail.position)
    ends = ends_in(queues.all(), recovered.damaged)
    keep_ends_of_damage(disk, config_folder, recovered.damaged, ends)
    return recovered


def _recover(
    disk: Disk,
    folder: SegmentFolder,
    config_folder: str,
    config: StoreConfig,
    checkpoint: Checkpoint | None,
    queues: ConsumeQueueTable,
    derived: Sequence[Derived],
    epochs: Epochs,
    same_cache: bool,
    deleted: dict[str, int],
    positions: Sequence[int],
    boundaries: BoundaryFiles,
    on_walked: Callable[[WalkedBlock], None],
) -> tuple[RecoveredLog, _Replay]:
    """Walks the log. Returns the result, and the replay that fed the derived structures, which were complete up to `positions`."""
    quarantine_path = f"{config_folder}/quarantine.json"
    start = choose_start(folder, checkpoint, min(positions))
    absent = find_absent(folder, start.position, read_quarantine(disk, quarantine_path))
    if absent is not None:
        start = choose_start(folder, checkpoint, absent)  # so that the walk comes upon it
    if checkpoint is not None and start.position == checkpoint.replay_position > 0:
        head = _start_before(folder, checkpoint)
        nearer = _boundary_before(checkpoint, boundaries.read(head.position))
        modes: list[tuple[StartPoint, CorruptionMode]] = [(head, config.corruption)]
        if nearer is not None:  # a boundary is only a hint
            modes.insert(0, (nearer, "refuse"))
        for first, mode in modes:
            try:
                check_before(
                    disk,
                    folder,
                    first,
                    checkpoint,
                    mode=mode,
                    quarantine_path=quarantine_path,
                    on_block=on_walked,
                )
                break
            except CorruptLogError:
                if first is head:
                    raise
    replay = _Replay(folder, disk, queues, derived, start.position, deleted)

    def take(block: WalkedBlock) -> None:
        on_walked(block)
        replay.take(block)

    written = max((end.end_position for end in queues.known_ends), default=0)
    recovered = recover_log(
        disk,
        folder,
        start,
        checkpoint,
        same_cache=same_cache,
        mode=config.corruption,
        quarantine_path=quarantine_path,
        epochs=epochs,
        derived_position=max(positions),
        written_position=written if same_cache else 0,
        on_block=take,
    )
    return recovered, replay


def _boundary_before(
    checkpoint: Checkpoint, boundaries: Sequence[tuple[int, int]]
) -> StartPoint | None:
    """Returns the last boundary that is at least START_CHECK_SIZE_BYTES before the checkpoint; None if there is none."""
    end = checkpoint.replay_position - START_CHECK_SIZE_BYTES
    found = [StartPoint(position, crc) for position, crc in boundaries if position <= end]
    return found[-1] if found else None


def _start_before(folder: SegmentFolder, checkpoint: Checkpoint) -> StartPoint:
    """Returns where the check before the checkpoint begins: at the segment that ends with the checkpoint or contains it."""
    return choose_start(
        folder, replace(checkpoint, replay_position=1 << 62), checkpoint.replay_position - 1
    )


def rebuild(
    disk: Disk,
    folder: SegmentFolder,
    checkpoint: Checkpoint | None,
    recovered: RecoveredLog,
    queues: ConsumeQueueTable,
    derived: Sequence[Derived],
    deleted: dict[str, int],
) -> None:
    """Rebuilds derived structures from the recovered log, because the start had relied on wrong data."""
    _rebuild(disk, folder, checkpoint, recovered, queues, derived, deleted)
    queues.keep_ends(recovered.damaged, deleted, recovered.tail.position)


def restore_topics(
    topics: TopicTable,
    queues: ConsumeQueueTable,
    queues_default: int,
    known_incarnations: Mapping[str, int],
    store_id: int,
) -> None:
    """Restores from their queues the topics that have messages but no record. A crash came just after their first message, or their record
    is lost.

    Their incarnation comes from the newest committed offset (`known_incarnations`), or from the first message. The latter gives another
    incarnation if the store's number was lost too; then readers get TOPIC_RECREATED, and begin again.
    """
    counts = {
        topic: max(queues.queues_of(topic)) + 1
        for topic in queues.topics()
        if topics.find(topic) is None
    }
    incarnations = {
        topic: incarnation_of_first(store_id, topic, position)
        for topic in counts
        if (position := _first_position_of(topic, queues)) is not None
    }
    found = topics.restore(counts, queues_default, {**incarnations, **known_incarnations})
    if found:
        log.warning(
            "%d topics are recovered from their queues: the log has their messages, but no record of them",
            len(found),
        )


def _first_position_of(topic: str, queues: ConsumeQueueTable) -> int | None:
    """Returns where the oldest message of a topic stands; None if its queues do not say."""
    positions = []
    for queue in queues.queues_of(topic).values():
        if queue.known_min_offset < queue.end_offset:
            try:
                position, size_bytes, _ = queue.entry(queue.known_min_offset)
            except ConsumeQueueDamagedError:
                continue
            if size_bytes:
                positions.append(position)
    return min(positions, default=None)


def _rebuild(
    disk: Disk,
    folder: SegmentFolder,
    checkpoint: Checkpoint | None,
    recovered: RecoveredLog,
    queues: ConsumeQueueTable,
    broken: Sequence[Derived],
    deleted: dict[str, int],
) -> None:
    for structure in broken:
        log.warning("%s is rebuilt from the log", type(structure).__name__)
        structure.start_rebuild()
    start = choose_start(folder, checkpoint, 0)
    replay = _Replay(folder, disk, queues, broken, start.position, deleted)
    for block in LogWalker(
        disk, folder, start.position, start.crc32c, skips=skips_of(recovered.damaged)
    ):
        replay.take(block)
    replay.finish(recovered.tail.position)


def deletions_in_block(
    block: WalkedBlock, records: ScannedRecords
) -> Iterator[tuple[str, int]]:
    """Yields the topics that records of a block delete, each with the position up to which its records are deleted."""
    for row, body in state_records(block, records, TOPICS_TOPIC):
        with suppress(DecodeError):
            yield from deletions_in(TopicsRecord.FromString(body), int(records.positions[row]))


def state_records(
    block: WalkedBlock, records: ScannedRecords, topic: str
) -> Iterator[tuple[int, bytes]]:
    """Yields row and body of each record of a system topic in a block."""
    if topic not in records.topics:
        return
    for row in np.flatnonzero(records.topic_indexes == records.topics.index(topic)).tolist():
        at = int(records.positions[row]) - block.base_position
        data = bytes(block.data[at : at + int(records.sizes[row])])
        (record,) = RecordBatch.FromString(data).records
        yield row, record.body


class _Replay:
    """Hands blocks to derived structures, reports the damaged ranges in between, and saves the queue offsets of those ranges."""

    def __init__(
        self,
        folder: SegmentFolder,
        disk: Disk,
        queues: ConsumeQueueTable,
        derived: Sequence[Derived],
        position: int,
        deleted: dict[str, int],
    ) -> None:
        """`deleted`: the known deleted topics; the replay adds those that the blocks delete."""
        self._deleted = deleted
        self._folder = folder
        self._disk = disk
        self._queues = queues
        self._derived = derived
        self._position = position

    def take(self, block: WalkedBlock) -> None:
        """Takes the next block."""
        if block.base_position > self._position:
            self._pass_over(self._position, block.base_position)
        self._position = block.base_position + block.size_bytes
        starts, sizes = block.records()
        if not len(starts):
            return
        try:
            records = read_trailers(block.data, block.base_position, starts, sizes)
        except CorruptRecordError as error:
            raise CorruptLogError(
                self._folder.path_at(error.position),
                error.position,
                f"{error.reason}, though its seal holds",
            ) from error
        self._note_deletions(block, records)
        start = 0
        for row, body in state_records(block, records, LOG_TOPIC):
            self._replay(records.select(_between(records, start, row)))
            position = int(records.positions[row])
            queues, repeated = self._one_of(ConsumeQueueTable), self._one_of(RepeatedSends)
            tell(body, position, self._deleted, queues, repeated)
            start = row
        self._replay(records.select(_between(records, start, records.count)) if start else records)

    def _one_of(self, kind: type[T]) -> T | None:
        """Returns the structure of this kind if it is replayed."""
        return next((found for found in self._derived if isinstance(found, kind)), None)

    def _replay(self, records: ScannedRecords) -> None:
        if not records.count:
            return
        kept = records.select(_is_owned(records, self._deleted))
        for structure in self._derived:
            if kept is not records and structure.outlives_topics:
                structure.replay(_disowned(records, self._deleted))
            else:
                structure.replay(kept)

    def _note_deletions(self, block: WalkedBlock, records: ScannedRecords) -> None:
        """Notes topics that a block deletes: forgets them in all earlier blocks, and skips the records that the block itself has of them.
        """
        for name, end_position in deletions_in_block(block, records):
            if end_position > self._deleted.get(name, 0):
                self._deleted[name] = end_position
                for structure in self._derived:
                    structure.forget_deleted({name: end_position})

    def finish(self, end_position: int) -> None:
        """Ends the replay: there are no more blocks."""
        if end_position > self._position:
            self._pass_over(self._position, end_position)

    def _pass_over(self, start: int, end: int) -> None:
        for structure in self._derived:
            structure.pass_over(start, end)
        self._save_offsets(start, end)

    def _save_offsets(self, start: int, end: int) -> None:
        """Enters records of a damaged range into their queues, so that no new message gets their offsets. They are never served.

        It takes only records that name their real position, a known queue, and exactly the next offset of that queue.
        """
        if self._queues not in self._derived:
            return
        for record in records_that_seem_whole(self._disk, self._folder, start, end):
            queue = self._queues.find(record.topics[0], int(record.queue_ids[0]))
            if queue is not None and queue.end_offset == int(record.queue_offsets[0]):
                self._queues.replay(record)


def _disowned(records: ScannedRecords, deleted: Mapping[str, int]) -> ScannedRecords:
    """Returns the records; those whose topic was deleted after them get the topic ""."""
    indexes = np.where(_is_owned(records, deleted), records.topic_indexes, len(records.topics))
    return replace(records, topics=(*records.topics, ""), topic_indexes=indexes.astype(np.int32))


def _between(records: ScannedRecords, start: int, end: int) -> NDArray[np.bool_]:
    """Chooses the records of rows [start, end)."""
    rows = np.arange(records.count)
    chosen: NDArray[np.bool_] = (rows >= start) & (rows < end)
    return chosen


def _is_owned(records: ScannedRecords, deleted: Mapping[str, int]) -> NDArray[np.bool_]:
    """Whether each record belongs to a topic that was not deleted after it."""
    ends = np.array([deleted.get(topic, 0) for topic in records.topics], np.int64)
    owned: NDArray[np.bool_] = records.positions >= ends[records.topic_indexes]
    return owned
