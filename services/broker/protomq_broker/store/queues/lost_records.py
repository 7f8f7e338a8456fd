"""What records in a damaged range say of themselves: never served, but the offsets that they had are not given again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from protomq.wire.log_walk import WalkedBlock, find_fields
from protomq.wire.record import PHYSICAL_OFFSET_AT
from protomq_broker.store.files.disk import Disk, path_named, read_fully
from protomq_broker.store.log.append import CorruptRecordError, ScannedRecords
from protomq_broker.store.log.kinds import is_queued
from protomq_broker.store.log.record_scan import read_trailers
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.log.segment import SegmentFolder

from .queue_ends import QueueEnd


def records_that_seem_whole(
    disk: Disk, folder: SegmentFolder, start: int, end: int
) -> Iterator[ScannedRecords]:
    """The records of a damaged range, one by one, that say that they stand where they stand.

    Raises OSError if the disk cannot read some of it: nobody knows which offsets are given there.
    """
    for segment in folder.overlapping(start, end):
        base = max(start, segment.base_position)
        size = min(end, segment.end_position) - base
        with path_named(segment.path):
            data = read_fully(disk, segment.fd, size, base - segment.base_position)
        for at, field_size in zip(*find_fields(data), strict=True):
            if _stamped_position(data, at + field_size) != base + at:
                continue
            try:
                yield read_trailers(
                    data, base, np.array([at], np.int64), np.array([field_size], np.int64)
                )
            except (CorruptRecordError, ValueError):
                continue


class EndsByLog:
    """How far queues went in damaged ranges, by the log alone: given its blocks and its damaged ranges in their order."""

    def __init__(self, disk: Disk, folder: SegmentFolder) -> None:
        self.found: list[QueueEnd] = []
        self._disk = disk
        self._folder = folder
        self._ends: dict[tuple[str, int], int] = {}

    def take(self, block: WalkedBlock) -> None:
        """The next block."""
        starts, sizes = block.records()
        if not len(starts):
            return
        try:
            records = read_trailers(block.data, block.base_position, starts, sizes)
        except CorruptRecordError:
            return
        records = records.select(is_queued(records.flags))
        keys = records.topic_indexes.astype(np.int64) << 32 | records.queue_ids
        _, rows_from_end = np.unique(keys[::-1], return_index=True)
        for row in (records.count - 1 - rows_from_end).tolist():
            self._ends[_queue_of(records, row)] = int(records.queue_offsets[row]) + 1

    def pass_over(self, damage: DamagedRange) -> None:
        """The next range: a record counts that has the very offset that is next in a queue that is known."""
        for record in records_that_seem_whole(
            self._disk, self._folder, damage.start_position, damage.end_position
        ):
            queue, offset = _queue_of(record, 0), int(record.queue_offsets[0])
            if self._ends.get(queue) == offset:
                self._ends[queue] = offset + 1
                position = int(record.positions[0])
                end_position = position + int(record.sizes[0])
                self.found.append(QueueEnd(*queue, offset, offset + 1, position, end_position))


def _queue_of(records: ScannedRecords, row: int) -> tuple[str, int]:
    return records.topics[int(records.topic_indexes[row])], int(records.queue_ids[row])


def _stamped_position(data: bytes, end: int) -> int:
    return int.from_bytes(data[end + PHYSICAL_OFFSET_AT : end], "little")
