"""Reading records: by queue and offset, and by time. (By key and by id: `look_ups.py`.)

Rules:
- Nothing at or beyond the readable position is given to anybody; it is taken once, first.
- Nothing is given that is not known to hold (`checked_log.py`), nor for another message than it says it is (`stamp_check.py`).
  Where a read finds damage, that range is put into quarantine, and it looks again.
- What is read to be copied holds by its own CRC, too (`record_crcs.py`): the copy gets a seal of its own. If it does not, the seals are
  asked again. Where they hold, the record came so from its producer, and stays what it is.
- Readers get nothing of a damaged range. A read that would begin there raises CorruptLogError with the offset to go on at; one
  that begins before it ends there.
- Any thread may call. A segment that is deleted meanwhile stays open through the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from protomq.wire.record import STORE_TIME_MS_AT, encode_record_field
from protomq_broker.store.errors import CorruptLogError, LostMessage
from protomq_broker.store.log.checked_log import CheckedLog
from protomq_broker.store.log.record_crcs import wrong_records
from protomq_broker.store.log.record_scan import record_field_at
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.log.segment import SegmentFile, SegmentFolder
from protomq_broker.store.log.stamp_check import first_stranger

from .consume_queue import ConsumeQueue, StoreTime
from .consume_queue_table import ConsumeQueueTable
from .entry_check import opened_together
from .quarantine import Quarantine
from .reading import LogRegion, ReadResult, ReadStatus
from .selection import ENTRY, ENTRY_SIZE_BYTES, NO_TAGS, Selection, likely_count, select

SCAN_CHUNK_COUNT: Final = 4096
SCAN_COUNT_MAX: Final = 65_536
"""Entries that one read looks at when it filters by tag; RocketMQ looks at 16,000."""

STEPS_MAX: Final = 1024
"""Records that are read to find one behind another: 10 ms."""

_GAP_SIZE_MAX_BYTES: Final = 4 << 10
"""Between two records that are read together: another read costs as much."""
_HEAD_SIZE_BYTES: Final = 8
_FIRST_READ_SIZE_BYTES: Final = 2048
_UNBOUNDED: Final = 1 << 62


class ReadBound(Protocol):
    """Up to where a reader may give the log."""

    @property
    def readable(self) -> int:
        """Nothing at or beyond this position is given."""


class LogReader:
    """Reads through the derived structures."""

    def __init__(
        self,
        folder: SegmentFolder,
        queues: ConsumeQueueTable,
        checked: CheckedLog,
        positions: ReadBound,
        quarantine: Quarantine,
    ) -> None:
        """`positions`: those of the log (`positions.py`). Another bound than theirs is for the broker's own eyes alone."""
        self._checked = checked
        self._quarantine = quarantine
        self._folder = folder
        self._queues = queues
        self._positions = positions

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

        They are not counted as read; see `TopicCounts.count_read`.

        Raises CorruptLogError for records that stand in a damaged part of the log.
        """
        readable = self._positions.readable
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
            if self._quarantine.ranges
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
            self._quarantine.add(damage)
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

    def regions_hold(self, regions: Sequence[LogRegion]) -> bool:
        """Whether regions of an earlier answer are still valid: they may have been damaged since. If not, the next `read` will find the
        damage.
        """
        damage = self._checked.find_damage(
            (region.file.base_position + region.offset, region.size_bytes) for region in regions
        )
        if damage is not None:
            self._quarantine.add(damage)
        return damage is None

    def read_to_copy(
        self, topic: str, queue_id: int, queue_offset: int, record_count_max: int, size_max_bytes: int
    ) -> tuple[ReadResult, bytes]:
        """As `read`, with the bytes of the regions, of which copies may be made."""
        while True:
            result = self.read(topic, queue_id, queue_offset, record_count_max, size_max_bytes)
            data = self.octets_to_copy(result)
            if data is not None:
                return result, data

    def octets_to_copy(self, result: ReadResult) -> bytes | None:
        """The bytes of the regions, of which copies may be made; None if they are damaged, or gone. Then the next `read` says so."""
        proved: list[bytes] = []
        while True:
            data = result.octets()
            rows = wrong_records(data, result.starts, result.sizes)
            starts, sizes = result.starts[rows].astype(np.int64), result.sizes[rows].astype(np.int64)
            wrong = [data[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
            if wrong == proved:
                return data
            regions = [(region.file.base_position + region.offset, region.size_bytes) for region in result.regions]
            positions = _positions_at(starts, regions)
            self._ask_the_seals(positions, sizes)
            if not self._are_there(positions, sizes).all():
                return None
            proved = wrong

    def _ask_the_seals(self, positions: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Records at rising positions were read that do not hold: puts the damage there, if that is why, into quarantine."""
        spans = list(zip(positions.tolist(), sizes.tolist(), strict=True))
        for position, size_bytes in spans:
            self._checked.doubt(position, position + size_bytes)
        while (damage := self._checked.find_damage(spans)) is not None:
            self._quarantine.add(damage)

    def _are_there(self, positions: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which records are neither deleted nor in quarantine."""
        is_there = positions >= self._folder.first_position
        for damage in self._quarantine.ranges:
            is_there &= (positions + sizes <= damage.start_position) | (positions >= damage.end_position)
        return is_there

    def entries_at(
        self, topic: str, queue_id: int, queue_offsets: NDArray[np.int64]
    ) -> NDArray[Any] | None:
        """The entries of messages of a queue, whose offsets do not fall; None if one of them cannot be read.

        `read_records` says whether their records hold, and the records say whether they are those messages.
        """
        queue = self._queues.find(topic, queue_id)
        first, last = int(queue_offsets[0]), int(queue_offsets[-1])
        start, end = self.queue_range(topic, queue_id)
        if queue is None or first < start or last >= end:
            return None
        count = last - first + 1
        if count > SCAN_CHUNK_COUNT:
            found = np.array([queue.entry(offset) for offset in queue_offsets.tolist()], ENTRY)
        else:
            entries = queue.entries(first, count)
            if len(entries) < count:
                return None
            found = entries[queue_offsets - first]  # a copy: entries may be a view
        return found if found["size"].all() else None

    def entries_together(self, topic: str, pieces: Sequence[tuple[int, NDArray[np.int64]]]) -> NDArray[Any] | None:
        """`entries_at` of several queues, or pieces of them, one behind the other: the array operations run once.

        None if that cannot be: some are in memory yet, or do not hold, or are not there.
        """
        parts: list[bytes] = []
        counts: list[int] = []
        firsts: list[int] = []
        salts: list[int] = []
        for queue_id, queue_offsets in pieces:
            queue = self._queues.find(topic, queue_id)
            first, last = int(queue_offsets[0]), int(queue_offsets[-1])
            start, end = self.queue_range(topic, queue_id)
            if queue is None or first < start or last >= end or last - first >= SCAN_CHUNK_COUNT:
                return None
            stored = queue.stored(first, last - first + 1)
            if stored is None:
                return None
            data, salt = stored
            parts.append(data)
            counts.append(len(data) // ENTRY_SIZE_BYTES)
            firsts.append(first)
            salts.append(salt)
        entries = opened_together(b"".join(parts), counts, firsts, salts)
        if entries is None or np.count_nonzero(entries["size"]) != len(entries):
            return None
        positions = entries["position"].astype(np.int64)
        overlaps = positions[1:] < (positions + entries["size"])[:-1]
        ends = np.cumsum(counts)
        overlaps[ends[:-1] - 1] = False
        if np.count_nonzero(overlaps):
            return None
        offsets = np.concatenate([queue_offsets for _, queue_offsets in pieces])
        rows = offsets + np.repeat(ends - counts - firsts, [len(queue_offsets) for _, queue_offsets in pieces])
        found: NDArray[Any] = entries[rows]
        return found

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Returns (first offset of the queue that is stored, one past the last readable offset)."""
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return 0, 0
        end_offset = queue.first_at_or_beyond(self._positions.readable)
        return min(queue.min_offset(self._folder.first_position), end_offset), end_offset

    def first_offset_behind(self, topic: str, queue_id: int, position: int) -> int:
        """Queue offset of the first message, readable or not, that stands at or behind a position of the log; the end if there is none."""
        queue = self._queues.find(topic, queue_id)
        return 0 if queue is None else queue.first_at_or_beyond(position)

    def offset_at_time(self, topic: str, queue_id: int, time_ms: int, *, is_readable: bool = True) -> int:
        """Returns the queue offset of the first message stored at `time_ms` or later; the end if there is none.

        `is_readable`: what is not readable yet does not count.
        """
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return 0
        offset = queue.offset_at_time(time_ms, self._folder.first_position, self._store_time_at)
        return min(offset, queue.first_at_or_beyond(self._positions.readable)) if is_readable else offset

    def store_time_of(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Returns the store time of a message in ms since 1970. Raises KeyError if it is deleted or not readable.

        Nobody knows that of a message which the log has lost. Then it is that of the next one in the queue that can be read, or else of
        the last one before it. Raises KeyError, too, if there is neither.
        """
        queue = self._queues.find(topic, queue_id)
        start, end = self.queue_range(topic, queue_id)
        if queue is None or not start <= queue_offset < end:
            raise KeyError((topic, queue_id, queue_offset))
        lost = self._unreadable_at(queue, queue_offset)
        if lost is None:
            return self._store_time(*queue.entry(queue_offset)[:2])
        first, following = lost
        while following < end:
            further = self._unreadable_at(queue, following)
            if further is None:
                return self._store_time(*queue.entry(following)[:2])
            following = further[1]
        while first > start:
            further = self._unreadable_at(queue, first - 1)
            if further is None:
                return self._store_time(*queue.entry(first - 1)[:2])
            first = further[0]
        raise KeyError((topic, queue_id, queue_offset))

    def _unreadable_at(self, queue: ConsumeQueue, queue_offset: int) -> tuple[int, int] | None:
        """None if the store time of a message can be read, else the queue offsets [first, following) around it of which none can be."""
        position, size, _ = queue.entry(queue_offset)
        if self._store_time(position, size):
            return None
        damage = self.damage_at(position)
        if damage is not None:
            first, following = lost_in(queue, damage)
        elif size:  # its segment is gone
            base = position - position % self._folder.segment_size_bytes
            first, following = map(queue.first_at_or_beyond, (base, base + self._folder.segment_size_bytes))
        else:  # fills the place of lost records: all of these have the position behind the last good one
            first, following = map(queue.first_at_or_beyond, (position, position + 1))
        return min(first, queue_offset), max(following, queue_offset + 1)

    def position_at_time(self, topic: str, time_ms: int) -> int:
        """A position of the log before which nothing of the topic stands that was stored at `time_ms` or later."""
        positions = [
            queue.entry(offset)[0]
            for queue, offset in self._offsets_at_time(topic, time_ms)
            if offset < queue.end_offset
        ]
        return min(positions, default=self._positions.readable)

    def position_behind_time(self, topic: str, time_ms: int) -> int:
        """A position of the log from which on nothing of the topic stands that was stored before `time_ms`."""
        positions = []
        for queue, offset in self._offsets_at_time(topic, time_ms):
            # The time of what is lost is not known: it may be earlier.
            for damage in self._quarantine.ranges:
                first, following = lost_in(queue, damage)
                if first <= offset < following:
                    offset = following
            if offset < queue.end_offset:
                positions.append(queue.entry(offset)[0])
        return min(positions, default=self._positions.readable)

    def _offsets_at_time(self, topic: str, time_ms: int) -> Iterator[tuple[ConsumeQueue, int]]:
        log_start = self._folder.first_position
        for queue in self._queues.queues_of(topic).values():
            yield queue, queue.offset_at_time(time_ms, log_start, self._store_time_at)

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
        if tag_codes:
            chunk = max(record_count_max, SCAN_CHUNK_COUNT)
        else:
            chunk = likely_count(record_count_max, size_max_bytes, queue.record_size_bytes)
        scan_end = min(end_offset, queue_offset + SCAN_COUNT_MAX)
        asked_offset = queue_offset
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
                chunk < record_count_max
                and chunk < end_offset - queue_offset
                and selection.next_offset == queue_offset + chunk
            ):
                # The records are smaller than those before: more of them fit.
                chunk = record_count_max
                continue
            if tag_codes or selection.next_offset - queue_offset != selection.record_count:
                lost = _first_lost(queue, queue_offset, selection.next_offset)
                if lost == asked_offset:
                    raise self._lost(queue, lost)
                if lost is not None:
                    end_offset = scan_end = lost
                    continue
            if selection.record_count:
                queue.record_size_bytes = selection.size_bytes // selection.record_count
                return selection
            if selection.next_offset >= scan_end or selection.next_offset == queue_offset:
                return selection
            queue_offset = selection.next_offset

    def _compare(
        self, queue: ConsumeQueue, selection: Selection, regions: Sequence[LogRegion]
    ) -> None:
        """Compares what entries say that were read from files with what the records say; ConsumeQueueDamagedError if they do not agree."""
        data = b"".join(region.file.read(region.offset, region.size_bytes) for region in regions)
        starts, sizes = selection.starts.astype(np.int64), selection.sizes.astype(np.int64)
        positions = _positions_at(starts, selection.regions)
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
        for damage in self._quarantine.ranges:
            first, following = lost_in(queue, damage)
            if first <= queue_offset < following:
                raise self.corrupt(queue, damage, queue_offset, f"continue at offset {following}")
            if queue_offset < first < following:
                end_offset = min(end_offset, first)
        return end_offset

    def _lost(self, queue: ConsumeQueue, queue_offset: int) -> CorruptLogError:
        """The error for a message whose entry says that the log has lost it, where no range is known to have had it."""
        position, _, _ = queue.entry(queue_offset)
        following = max(queue.first_at_or_beyond(position + 1), queue_offset + 1)
        behind = queue.entry(following)[0] if following < queue.end_offset else position
        error = CorruptLogError(
            self._folder.path_at(position),
            position,
            f"messages {queue_offset} to {following - 1} of queue {queue.queue_id} of topic {queue.topic} are not in the log any more;"
            f" continue at offset {following}",
            behind,
            LostMessage(queue.topic, queue.queue_id, queue_offset, following),
        )
        error.is_gone = True
        return error

    def check_sound(self, queue: ConsumeQueue, queue_offset: int) -> None:
        """Raises CorruptLogError if the message is in a damaged part of the log."""
        self._stop_before_damage(queue, queue_offset, queue_offset + 1)

    def corrupt(
        self, queue: ConsumeQueue, damage: DamagedRange, queue_offset: int, advice: str
    ) -> CorruptLogError:
        """The error for a message of the queue in a damaged part of the log."""
        first, following = lost_in(queue, damage)
        error = CorruptLogError(
            self._folder.path_at(damage.start_position),
            damage.start_position,
            f"{damage.reason}: messages {first} to {following - 1} of queue {queue.queue_id} of topic {queue.topic} are in "
            f"quarantine; {advice}",
            damage.end_position,
            LostMessage(queue.topic, queue.queue_id, queue_offset, following),
        )
        error.is_gone = self._quarantine.is_repaired(damage)
        return error

    def record_at(self, position: int) -> bytes | None:
        """Returns the record at a position, without tag and length; None if it is gone or damaged."""
        segment = self._sound_segment_at(position, _FIRST_READ_SIZE_BYTES)
        if segment is None:
            return None
        offset = position - segment.base_position
        data = segment.read(offset, _FIRST_READ_SIZE_BYTES)
        size, head = record_field_at(data, 0, _UNBOUNDED)
        if size < 0:
            return None
        if head + size > len(data):
            if self._sound_segment_at(position, head + size) is None:
                return None
            data = segment.read(offset, head + size)
        return data[head : head + size] if head + size <= len(data) else None

    def position_behind(self, position: int, count: int) -> int:
        """Where the record stands that comes `count` records behind the one at `position`, in the same append; 0 if that cannot be told."""
        if count > STEPS_MAX:
            return 0
        for _ in range(count):
            record = self.record_at(position)
            if record is None:
                return 0
            position += len(encode_record_field(record))
        return position if self._folder.at(position) is not None else 0

    def read_records(
        self, positions: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[bytes, NDArray[np.int64], NDArray[np.bool_]]:
        """The record fields at rising positions: (bytes in which they stand, where each begins there, which of them are there and hold).

        Copies may be made of them. Those that are gone or damaged begin nowhere.
        """
        proved: list[bytes] = []
        while True:
            data, starts, is_sound = self._read_records(positions, sizes)
            there = np.flatnonzero(is_sound)
            rows = there[wrong_records(data, starts[there], sizes[there])]
            spans = zip(starts[rows].tolist(), sizes[rows].tolist(), strict=True)
            wrong = [data[start : start + size] for start, size in spans]
            if wrong == proved:
                return data, starts, is_sound
            self._ask_the_seals(positions[rows], sizes[rows])
            proved = wrong

    def _read_records(
        self, positions: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[bytes, NDArray[np.int64], NDArray[np.bool_]]:
        """As `read_records`, by the seals alone."""
        segment_size = self._folder.segment_size_bytes
        while True:
            is_sound = self._are_there(positions, sizes)
            holds = np.count_nonzero(is_sound) == len(is_sound)
            at, lengths = (positions, sizes) if holds else (positions[is_sound], sizes[is_sound])
            breaks = at[1:] - (at[:-1] + lengths[:-1]) > _GAP_SIZE_MAX_BYTES
            if len(at) and int(at[0]) // segment_size != int(at[-1]) // segment_size:
                breaks |= at[1:] // segment_size != at[:-1] // segment_size
            bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(at)] if len(at) else [0]
            spans = [(int(at[first]), int(at[last - 1] + lengths[last - 1] - at[first])) for first, last in pairwise(bounds)]
            damage_found = self._checked.find_damage(spans)
            if damage_found is None:
                break
            self._quarantine.add(damage_found)
        starts = np.full(len(positions), -1, np.int64)
        if not len(at):
            return b"", starts, is_sound
        parts: list[bytes] = []
        found = np.empty(len(at), np.int64)
        end = 0
        for (first, last), (start, size_bytes) in zip(pairwise(bounds), spans, strict=True):
            segment = self._folder.at(start)
            data = segment.read(start - segment.base_position, size_bytes) if segment else b""
            if len(data) < size_bytes:  # deleted since we looked
                return self._read_records(positions, sizes)
            found[first:last] = at[first:last] - start + end
            parts.append(data)
            end += size_bytes
        if holds:
            return b"".join(parts), found, is_sound
        starts[is_sound] = found
        return b"".join(parts), starts, is_sound

    def _sound_segment_at(self, position: int, size_bytes: int) -> SegmentFile | None:
        """The segment of a record that is there and holds as far as it is read; None if it is gone or damaged."""
        while self.damage_at(position) is None:
            damage = self._checked.find_damage(((position, size_bytes),))
            if damage is None:
                return self._folder.at(position)
            self._quarantine.add(damage)
        return None

    @property
    def has_damage(self) -> bool:
        """Whether any part of the log is known to be damaged."""
        return bool(self._quarantine.ranges)

    def damage_at(self, position: int) -> DamagedRange | None:
        """The damaged range in which a position lies, None if it lies in none that is known."""
        for damage in self._quarantine.ranges:
            if damage.start_position <= position < damage.end_position:
                return damage
        return None

    def is_repaired(self, position: int) -> bool:
        """Whether `protomq log repair` has taken out the damage at a position: then it never heals."""
        damage = self.damage_at(position)
        return damage is not None and self._quarantine.is_repaired(damage)

    def _store_time_at(self, position: int) -> StoreTime:
        segment = self._sound_segment_at(position, _HEAD_SIZE_BYTES)
        if segment is None:
            damage = self.damage_at(position)
            return StoreTime(None, damage.end_position) if damage is not None else StoreTime(0)
        size, head = record_field_at(
            segment.read(position - segment.base_position, _HEAD_SIZE_BYTES), 0, _UNBOUNDED
        )
        if size < 0:
            raise CorruptLogError(
                segment.path, position, "there is no record where the consume queue points"
            )
        return StoreTime(self._store_time(position, head + size))

    def _store_time(self, position: int, size: int) -> int:
        """Store time of the record field at `position`; 0 if it is gone or damaged."""
        segment = self._sound_segment_at(position, size)
        if segment is None or not size:
            return 0
        return int.from_bytes(
            segment.read(position + size + STORE_TIME_MS_AT - segment.base_position, 8), "little"
        )


def _positions_at(starts: NDArray[np.int64], regions: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Where in the log stands what begins at `starts` of regions (position, size) that are put one behind the other."""
    if not len(starts):
        return starts
    bases = np.array([position for position, _ in regions], np.int64)
    ends = np.cumsum([size for _, size in regions])
    index = np.searchsorted(ends, starts, "right")
    positions: NDArray[np.int64] = starts + (bases - np.concatenate(([0], ends[:-1])))[index]
    return positions


def _first_lost(queue: ConsumeQueue, queue_offset: int, end_offset: int) -> int | None:
    """The first offset of [queue_offset, end_offset) whose record the log has lost; None if there is none."""
    sizes = queue.entries(queue_offset, end_offset - queue_offset)["size"]
    return None if np.count_nonzero(sizes) == len(sizes) else queue_offset + int(np.argmin(sizes > 0))


def lost_in(queue: ConsumeQueue, damage: DamagedRange) -> tuple[int, int]:
    """The queue offsets [first, following) of the messages that a queue has lost in a damaged range."""
    first = queue.first_at_or_beyond(damage.start_position)
    following = queue.first_at_or_beyond(damage.end_position)
    if first > queue.known_min_offset:
        position, size, _ = queue.entry(first - 1)
        if not size:  # fills the place of lost records: all of these have the position behind the last good one
            first = queue.first_at_or_beyond(position)
    return first, following
