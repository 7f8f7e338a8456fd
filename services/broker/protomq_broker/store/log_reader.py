"""Reading records: by queue and offset, by time, by key, by id.

Rules:
- Nothing at or beyond the readable position is given to anybody; it is taken once, first.
- Nothing is given that is not known to hold (`checked_log.py`), nor for another message than it says it is (`stamp_check.py`).
  Where a read finds damage, that range is set aside, and it looks again.
- Nothing of a damaged range is given: a read that would begin there raises CorruptLogError with the offset to go on at; one that
  begins before it ends there.
- Any thread may call. A segment that is deleted meanwhile stays open through the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from protomq.v1.record_pb2 import Record
from protomq.wire.record import STORE_TIME_MS_AT

from .checked_log import CheckedLog
from .consume_queue import ConsumeQueue, StoreTime
from .consume_queue_table import ConsumeQueueTable
from .errors import CorruptLogError
from .index import MessageIndex
from .reading import LogRegion, ReadResult, ReadStatus
from .record_scan import record_field_at
from .recovery import DamagedRange
from .segment import SegmentFile, SegmentFolder
from .selection import NO_TAGS, Selection, select
from .stamp_check import first_stranger

SCAN_CHUNK_COUNT: Final = 4096
SCAN_COUNT_MAX: Final = 65_536
"""Entries that one read looks at when it filters by tag; RocketMQ looks at 16,000."""

_HEAD_SIZE_BYTES: Final = 8
_FIRST_READ_SIZE_BYTES: Final = 2048
_UNBOUNDED: Final = 1 << 62


class LogReader:
    """Reads through the derived structures. `damaged` is replaced when the store learns of damage."""

    def __init__(
        self,
        folder: SegmentFolder,
        queues: ConsumeQueueTable,
        index: MessageIndex,
        checked: CheckedLog,
        readable_position: Callable[[], int],
        damaged: Sequence[DamagedRange],
        set_aside: Callable[[DamagedRange], None],
    ) -> None:
        self.damaged = damaged
        self._checked = checked
        self._set_aside = set_aside
        self._folder = folder
        self._queues = queues
        self._index = index
        self._readable_position = readable_position

    def read(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        record_count_max: int,
        size_max_bytes: int,
        tag_codes: frozenset[int] = NO_TAGS,
    ) -> ReadResult:
        """The records of a queue from `queue_offset` on; at least one if there is one that matches, however large.

        Raises CorruptLogError for records that stand in a damaged part of the log.
        """
        readable = self._readable_position()
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            status = ReadStatus.OFFSET_ILLEGAL if queue_offset else ReadStatus.NO_NEW_MSG
            return ReadResult(status, 0, 0, 0)
        end_offset = queue.first_at_or_beyond(readable)
        min_offset = min(queue.min_offset(self._folder.first_position), end_offset)
        if queue_offset < min_offset:
            return ReadResult(ReadStatus.OFFSET_ILLEGAL, min_offset, min_offset, end_offset)
        if queue_offset >= end_offset:
            status = (
                ReadStatus.NO_NEW_MSG if queue_offset == end_offset else ReadStatus.OFFSET_ILLEGAL
            )
            return ReadResult(status, end_offset, min_offset, end_offset)
        stop_offset = (
            self._stop_before_damage(queue, queue_offset, end_offset)
            if self.damaged
            else end_offset
        )
        selection = self._select(
            queue, queue_offset, stop_offset, record_count_max, size_max_bytes, tag_codes, readable
        )
        if not selection.record_count:
            return ReadResult(
                ReadStatus.NO_MATCHED_MSG, selection.next_offset, min_offset, end_offset
            )
        damage = self._checked.find_damage(selection.regions)
        if damage is not None:
            self._set_aside(damage)
            return self.read(
                topic, queue_id, queue_offset, record_count_max, size_max_bytes, tag_codes
            )
        regions: list[LogRegion] = []
        for position, size_bytes in selection.regions:
            segment = self._folder.at(position)
            if segment is None:
                if position >= self._folder.first_position:  # else deleted since we looked
                    raise CorruptLogError(
                        self._folder.path_at(position), position, "the segment file is missing"
                    )
                return self.read(
                    topic, queue_id, queue_offset, record_count_max, size_max_bytes, tag_codes
                )
            regions.append(LogRegion(segment, position - segment.base_position, size_bytes))
        if not queue.is_compared(selection.first_offset, selection.next_offset):
            self._compare(queue, selection, regions)
        return ReadResult(
            ReadStatus.FOUND,
            selection.next_offset,
            min_offset,
            end_offset,
            selection.first_offset,
            selection.starts,
            selection.sizes,
            selection.queue_offsets,
            regions,
            selection.size_bytes,
        )

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """(first queue offset that is there, one past the last that may be read)."""
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return 0, 0
        end_offset = queue.first_at_or_beyond(self._readable_position())
        return min(queue.min_offset(self._folder.first_position), end_offset), end_offset

    def offset_at_time(self, topic: str, queue_id: int, time_ms: int) -> int:
        """Queue offset of the first readable message stored at `time_ms` or later; the end if there is none."""
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return 0
        end_offset = queue.first_at_or_beyond(self._readable_position())
        return min(
            queue.offset_at_time(time_ms, self._folder.first_position, self._store_time_at),
            end_offset,
        )

    def store_time_of(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Store time of a message that is there; KeyError if it is not, or may not be read."""
        queue = self._queues.find(topic, queue_id)
        start, end = self.queue_range(topic, queue_id)
        if queue is None or not start <= queue_offset < end:
            raise KeyError((topic, queue_id, queue_offset))
        position, size, _ = queue.entry(queue_offset)
        return self._store_time(position, size)

    def find_by_key_hash(
        self, topic: str, key_hash: int, *, count_max: int = 64
    ) -> Iterator[bytes]:
        """Records (without tag and length) of a topic that may have a key of this hash, newest first: the caller compares the keys.

        Raises ConsumeQueueDamagedError where the topic's queues cannot tell whether a record is theirs.
        """
        for position in self._index.find_key(
            key_hash,
            count_max=count_max,
            start_position=self._folder.first_position,
            end_position=self._readable_position(),
        ):
            data = self.record_at(position)
            if data is not None and self._is_listed(topic, Record.FromString(data), position):
                yield data

    def find_by_message_id(
        self, topic: str, producer_id: int, producer_epoch: int, sequence: int
    ) -> Iterator[bytes]:
        """Records (without tag and length) of a topic that may have this id: the caller compares. Raises as `find_by_key_hash`."""
        readable = self._readable_position()
        given: set[int] = set()  # a request seems to reach the one behind it in its queue too
        for position in self._index.find_message_id(
            producer_id,
            producer_epoch,
            sequence,
            start_position=self._folder.first_position,
            end_position=readable,
        ):
            data = self.record_at(position)
            if data is None:
                continue
            first = Record.FromString(data)
            ahead = sequence - first.sequence
            if (
                ahead < 0
                or (first.producer_id, first.producer_epoch) != (producer_id, producer_epoch)
                or not self._is_listed(topic, first, position)
            ):
                continue
            if ahead:
                queue = self._queues.find(topic, first.queue_id)
                wanted = first.queue_offset + ahead
                if queue is None or wanted >= queue.first_at_or_beyond(readable):
                    continue
                position = queue.entry(wanted)[0]
                data = self.record_at(position)
            if data is not None and position not in given:
                given.add(position)
                yield data

    def _is_listed(self, topic: str, record: Record, position: int) -> bool:
        """Whether the record at `position` is a message of the topic, not of a deleted one of its name: its queue leads there."""
        queue = self._queues.find(topic, record.queue_id)
        return (
            record.topic == topic
            and queue is not None
            and queue.known_min_offset <= record.queue_offset < queue.end_offset
            and queue.entry(record.queue_offset)[0] == position
        )

    def _select(
        self,
        queue: ConsumeQueue,
        queue_offset: int,
        end_offset: int,
        record_count_max: int,
        size_max_bytes: int,
        tag_codes: frozenset[int],
        end_position: int,
    ) -> Selection:
        chunk = record_count_max if not tag_codes else max(record_count_max, SCAN_CHUNK_COUNT)
        scan_end = min(end_offset, queue_offset + SCAN_COUNT_MAX)
        while True:
            selection = select(
                queue.entries(queue_offset, min(chunk, end_offset - queue_offset)),
                queue_offset,
                record_count_max=record_count_max,
                size_max_bytes=size_max_bytes,
                segment_size_bytes=self._folder.segment_size_bytes,
                tag_codes=tag_codes,
                end_position=end_position,
            )
            if (
                selection.record_count
                or selection.next_offset >= scan_end
                or selection.next_offset == queue_offset
            ):
                return selection
            queue_offset = selection.next_offset

    def _compare(
        self, queue: ConsumeQueue, selection: Selection, regions: Sequence[LogRegion]
    ) -> None:
        """Compares what entries say that were read from files with what the records say; ConsumeQueueDamagedError if they do not agree."""
        data = b"".join(region.file.read(region.offset, region.size_bytes) for region in regions)
        starts, sizes = selection.starts.astype(np.int64), selection.sizes.astype(np.int64)
        bases = np.array([position for position, _ in selection.regions], np.int64)
        ends = np.cumsum([size for _, size in selection.regions])
        index = np.searchsorted(ends, starts, "right")
        positions = starts + (bases - np.concatenate(([0], ends[:-1])))[index]
        first, count = selection.first_offset, selection.record_count
        offsets = np.arange(first, first + count)
        if selection.queue_offsets is not None:
            offsets = selection.queue_offsets.astype(np.int64)
        wrong = first_stranger(data, starts, sizes, positions, queue.topic, queue.queue_id, offsets)
        if wrong is not None:
            raise queue.misled(int(offsets[wrong]))
        if selection.queue_offsets is None:
            queue.note_compared(first, first + count)

    def _stop_before_damage(self, queue: ConsumeQueue, queue_offset: int, end_offset: int) -> int:
        """Up to which queue offset a read from `queue_offset` may go; CorruptLogError if that one is lost already."""
        for damage in self.damaged:
            first = queue.first_at_or_beyond(damage.start_position)
            following = queue.first_at_or_beyond(damage.end_position)
            if first > queue.known_min_offset:
                position, size, _ = queue.entry(first - 1)
                if not size:  # fills the place of lost records: all of these have the position behind the last good one
                    first = queue.first_at_or_beyond(position)
            if first <= queue_offset < following:
                raise CorruptLogError(
                    self._folder.path_at(damage.start_position),
                    damage.start_position,
                    f"{damage.reason}: messages {first} to {following - 1} of queue {queue.queue_id} of topic {queue.topic} are in "
                    f"quarantine; go on at offset {following}",
                    damage.end_position,
                    following,
                )
            if queue_offset < first < following:
                end_offset = min(end_offset, first)
        return end_offset

    def record_at(self, position: int) -> bytes | None:
        """The record (without tag and length) at a position, None if it is gone or damaged."""
        segment = self._sound_segment_at(position)
        if segment is None:
            return None
        offset = position - segment.base_position
        data = segment.read(offset, _FIRST_READ_SIZE_BYTES)
        size, head = record_field_at(data, 0, _UNBOUNDED)
        if size < 0:
            return None
        if head + size > len(data):
            data = segment.read(offset, head + size)
        return data[head : head + size] if head + size <= len(data) else None

    def _sound_segment_at(self, position: int) -> SegmentFile | None:
        """The segment of a record that is there and holds; None if it is gone or damaged."""
        while self._damage_at(position) is None:
            # An append holds as a whole: so does the record that begins at its place, and ends in it.
            damage = self._checked.find_damage(((position, 1),))
            if damage is None:
                return self._folder.at(position)
            self._set_aside(damage)
        return None

    def _damage_at(self, position: int) -> DamagedRange | None:
        for damage in self.damaged:
            if damage.start_position <= position < damage.end_position:
                return damage
        return None

    def _store_time_at(self, position: int) -> StoreTime:
        segment = self._sound_segment_at(position)
        if segment is None:
            damage = self._damage_at(position)
            return StoreTime(None, damage.end_position) if damage is not None else StoreTime(0)
        size, head = record_field_at(
            segment.read(position - segment.base_position, _HEAD_SIZE_BYTES), 0, _UNBOUNDED
        )
        if size < 0:
            raise CorruptLogError(
                segment.path, position, "no record stands where the consume queue points"
            )
        return StoreTime(self._store_time(position, head + size))

    def _store_time(self, position: int, size: int) -> int:
        """Store time of the record field at `position`; 0 if it is gone or damaged."""
        segment = self._sound_segment_at(position)
        if segment is None or not size:
            return 0
        return int.from_bytes(
            segment.read(position + size + STORE_TIME_MS_AT - segment.base_position, 8), "little"
        )
