"""Reading the messages that a pop may get. The pop lane's thread.

New messages are those behind the last one that any pop of the group has seen. With a filter, or in order of message groups, the reader
opens their records, for SCAN_S at most. The pop goes on in its next turn. Open messages are read where they stand: in their queue, or in
the retry topic.

Damage of the log holds up no message that was handed out before. New ones behind it wait, since a replica may heal it. What `protomq log
repair` has taken out is given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np

from protomq.wire.record import FLAG_KEPT, FLAGS_AT, SEAL_SIZE_BYTES, SHARDING_HASH_AT
from protomq.wire.runs import runs_of
from protomq.wire.topics import retry_topic

from .filters.errors import FilterFailedError
from .pop_ahead import AHEAD_COUNT, PopAhead
from .store.errors import CorruptLogError
from .store.log.record_arrays import U32, windows
from .store.queues.consume_queue import ConsumeQueueDamagedError
from .store.queues.reading import LogRegion, ReadResult, ReadStatus
from .store.queues.selection import NO_TAGS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .filters.filter_book import Filter
    from .store.state.popped_queue import QueueOfGroup
    from .store.store import Store

log = logging.getLogger("protomq.broker")

SCAN_S: Final = 0.003
"""Seconds for which a pop may open records. Other pops wait for it."""
SCAN_COUNT: Final = 512
SCAN_SIZE_BYTES: Final = 512 << 10
"""Bytes of one look."""


class Limits(NamedTuple):
    """Most records and bytes that a read may give. It always gives one record, however large."""

    record_count: int
    size_bytes: int


class _Gap(NamedTuple):
    """A read met damage. The messages before `next_offset` cannot be read; `is_final`: they never can."""

    next_offset: int
    is_final: bool


@dataclass(slots=True)
class Fresh:
    """What was found among new messages.

    Attributes:
        next_offset: end of the messages that were examined.
        results: records to hand out, and their offsets.
        waiting: offsets of those that wait for others of their message group.
        grouped: (offset, sharding hash) of those that have a message group, handed out or waiting.
        lost: offsets that the log does not contain any more.
        has_more: the queue goes on behind next_offset.
    """

    next_offset: int
    results: list[tuple[Sequence[int], ReadResult]] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    grouped: list[tuple[int, int]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    has_more: bool = False


@dataclass(slots=True)
class Found:
    """Open messages that were read: offsets and records.

    `lost`: offsets that the log does not contain any more. `damaged`: offsets that cannot be read now; a replica may heal them.
    `filter_error`: what the filter raised of the message behind them.
    """

    results: list[tuple[Sequence[int], ReadResult]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    filter_error: Exception | None = None


class PopReader:
    """Reads messages for pops. `failure`: the last read error; the caller clears it. `ahead`: what the next pops will want."""

    def __init__(self, store: Store, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._monotonic = monotonic
        self.ahead = PopAhead(store)
        self.failure: Exception | None = None

    def fresh(
        self,
        key: QueueOfGroup,
        incarnation: int,
        next_offset: int,
        limits: Limits,
        tag_codes: frozenset[int],
    ) -> Fresh:
        """Returns the next new messages of a queue without opening them."""
        if tag_codes or limits.record_count > AHEAD_COUNT // 4:
            result = self._look(key, next_offset, limits, tag_codes)
        else:
            result = self._look_ahead(key, incarnation, next_offset, limits)
        if result is None or (isinstance(result, _Gap) and not result.is_final):
            return Fresh(next_offset)
        if isinstance(result, _Gap):
            lost = list(range(next_offset, result.next_offset))
            return Fresh(result.next_offset, lost=lost, has_more=True)
        found = Fresh(result.next_offset, has_more=result.next_offset < result.end_offset)
        if result.status is ReadStatus.FOUND:
            found.results.append((offsets_of(result), result))
        return found

    def scanned(
        self,
        key: QueueOfGroup,
        next_offset: int,
        limits: Limits,
        tag_codes: frozenset[int],
        filter_: Filter | None,
        is_group_open: Callable[[int], bool] | None,
        room: int,
    ) -> Fresh:
        """Returns the next new messages that match, without copies that retention keeps for the group. With `is_group_open`, one message of
        each message group at most, and none of an open group.

        `room`: how many messages may become open. Raises what a filter raises of the first message.
        """
        found = Fresh(next_offset, has_more=True)
        taken: set[int] = set()
        count, size_bytes = limits
        began_s = self._monotonic()
        while found.has_more and count > 0 and room > 0 and size_bytes > 0:
            look = Limits(min(SCAN_COUNT, room), SCAN_SIZE_BYTES)
            result = self._look(key, found.next_offset, look, tag_codes)
            if isinstance(result, _Gap) and result.is_final:
                found.lost += range(found.next_offset, result.next_offset)
                found.next_offset = result.next_offset
                continue
            if (
                result is None
                or isinstance(result, _Gap)
                or result.next_offset <= found.next_offset
            ):
                found.has_more = False
                break
            found.has_more = result.next_offset < result.end_offset
            found.next_offset = result.next_offset
            if result.status is not ReadStatus.FOUND:
                continue
            data, sizes = result.octets(), result.sizes.tolist()
            offsets = offsets_of(result)
            matching: Sequence[int] = range(len(sizes))
            is_stopped = False
            if filter_ is not None:
                try:
                    matching, examined = _matching(filter_, data, result)
                except Exception as error:
                    if offsets[0] == next_offset:
                        if isinstance(error, FilterFailedError):
                            error.queue = (key.topic, key.queue_id, offsets[0])
                        raise
                    matching, examined = (), 0  # What stands before is handed out; the next pop begins here, and gets the error.
                if examined < len(sizes):
                    is_stopped = found.has_more = True
                    found.next_offset = offsets[examined]
            if key.topic == retry_topic(key.group):
                is_kept = _field_of(data, result, FLAGS_AT) & FLAG_KEPT
                matching = [index for index in matching if not is_kept[index]]
            hashes = _field_of(data, result, SHARDING_HASH_AT).tolist() if is_group_open is not None else None
            chosen: list[int] = []
            for index in matching:
                sharding_hash = hashes[index] if hashes is not None else 0
                if count == 0 or size_bytes <= 0:
                    found.next_offset, found.has_more = offsets[index], True
                    break
                if sharding_hash:
                    found.grouped.append((offsets[index], sharding_hash))
                    room -= 1
                    assert is_group_open is not None
                    if sharding_hash in taken or is_group_open(sharding_hash):
                        found.waiting.append(offsets[index])
                        continue
                    taken.add(sharding_hash)
                else:
                    room -= 1
                chosen.append(index)
                count -= 1
                size_bytes -= sizes[index]
            if chosen:
                found.results.append(([offsets[index] for index in chosen], choose(result, chosen)))
            if is_stopped or self._monotonic() - began_s > SCAN_S:
                break
        return found

    def open_ones(
        self,
        key: QueueOfGroup,
        offsets: Iterable[int],
        moved: dict[int, int],
        limits: Limits,
        tag_codes: frozenset[int] = frozenset(),
        filter_: Filter | None = None,
    ) -> Found:
        """Returns open messages in the order of the queue, without those that do not match. Ends before one of which the filter fails."""
        found = Found()
        count, size_bytes = limits
        in_place: list[int] = []
        places: list[tuple[QueueOfGroup, int, int, int]] = []
        for offset in sorted(offsets):
            if offset in moved:
                retry = key._replace(topic=retry_topic(key.group), queue_id=0)
                places.append((retry, moved[offset], 1, offset - moved[offset]))
            else:
                in_place.append(offset)
        runs = runs_of(in_place)
        places += [(key, first, length, 0) for first, length in zip(runs[::2], runs[1::2], strict=True)]
        for place, first, length, shift in sorted(places, key=lambda each: each[1] + each[3]):
            at, end = first, first + length
            while at < end and count > 0 and size_bytes > 0:
                result = self._look(place, at, Limits(min(end - at, count), size_bytes), tag_codes)
                if result is None:
                    break
                if isinstance(result, _Gap):
                    following = min(result.next_offset, end)
                    gone = found.lost if result.is_final else found.damaged
                    gone += range(at + shift, following + shift)
                    at = following
                    continue
                if result.status in (ReadStatus.OFFSET_ILLEGAL, ReadStatus.NO_NEW_MSG):
                    # Behind the last readable one, it may be readable soon: who has just begun to lead does not know what is confirmed.
                    is_gone = not self._store.appended_end_offset(place.topic, place.queue_id)
                    if is_gone or at < result.min_offset:
                        lost_end = end if is_gone else min(end, result.min_offset)
                        found.lost += range(at + shift, lost_end + shift)
                        at = lost_end
                        continue
                    break
                following = min(result.next_offset, end)
                if result.status is ReadStatus.FOUND:
                    result = _within(result, end)
                    if filter_ is not None and result.record_count:
                        try:
                            matching, examined = _matching(filter_, result.octets(), result)
                        except Exception as error:
                            if isinstance(error, FilterFailedError):
                                error.queue = (key.topic, key.queue_id, offsets_of(result)[0] + shift)
                            found.filter_error = error
                            return found
                        if examined < result.record_count:
                            following = offsets_of(result)[examined]  # The next look begins with it, and fails.
                        result = choose(result, matching)
                    if result.record_count:
                        found.results.append(([offset + shift for offset in offsets_of(result)], result))
                        count -= result.record_count
                        size_bytes -= result.regions_size_bytes
                at = following
        return found

    def open_ones_to_copy(
        self, key: QueueOfGroup, offsets: Sequence[int], moved: dict[int, int], limits: Limits
    ) -> tuple[Found, list[bytes]]:
        """As `open_ones`, with the bytes of each result, of which copies may be made."""
        while True:
            found = self.open_ones(key, offsets, moved, limits)
            parts = [self._store.octets_to_copy(result) for _, result in found.results]
            sound = [data for data in parts if data is not None]
            if len(sound) == len(parts):
                return found, sound

    def _look_ahead(
        self, key: QueueOfGroup, incarnation: int, offset: int, limits: Limits
    ) -> ReadResult | _Gap | None:
        """As `_look`, for pops of few messages without tags."""
        truth = self.ahead.truth(incarnation)
        found = self.ahead.take(key, truth, offset, *limits)
        if found is not None:
            return found
        result = self._look(key, offset, Limits(AHEAD_COUNT, limits.size_bytes), NO_TAGS)
        if (
            not isinstance(result, ReadResult)
            or result.status is not ReadStatus.FOUND
            or result.record_count <= limits.record_count
        ):
            return result
        self.ahead.note(key, truth, result)
        found = self.ahead.take(key, truth, offset, *limits)
        return self._look(key, offset, limits, NO_TAGS) if found is None else found

    def _look(
        self, key: QueueOfGroup, offset: int, limits: Limits, tag_codes: frozenset[int]
    ) -> ReadResult | _Gap | None:
        """Returns the gap if the log is damaged there; None if the queue is, which the broker heals at once. Sets `failure`, except where
        `protomq log repair` has taken the damage out.
        """
        try:
            return self._store.read(key.topic, key.queue_id, offset, *limits, tag_codes)
        except CorruptLogError as error:
            gap = _Gap(max(error.next_offset, offset + 1), error.is_gone)
            if not gap.is_final:
                self.failure = error
                return gap
            log.error(
                "group %s gives up messages %d to %d of queue %d of topic %s: `protomq log repair` has taken them out of the log",
                key.group, offset, gap.next_offset - 1, key.queue_id, key.topic,
            )  # fmt: skip
            return gap
        except ConsumeQueueDamagedError as error:
            self.failure = error
            return None


def offsets_of(result: ReadResult) -> Sequence[int]:
    """Queue offsets of the records."""
    if result.queue_offsets is None:
        return range(result.first_offset, result.first_offset + result.record_count)
    return cast("list[int]", result.queue_offsets.tolist())


def choose(result: ReadResult, indexes: Sequence[int]) -> ReadResult:
    """Returns a result with only the records of these ascending indexes."""
    if len(indexes) == result.record_count:
        return result
    ends = np.cumsum([region.size_bytes for region in result.regions]).tolist()
    all_starts, all_sizes, all_offsets = (
        result.starts.tolist(),
        result.sizes.tolist(),
        offsets_of(result),
    )
    starts: list[int] = []
    sizes: list[int] = []
    regions: list[LogRegion] = []
    total, at = 0, 0
    for index in indexes:
        start, size = all_starts[index], all_sizes[index]
        while ends[at] <= start:
            at += 1
        region = result.regions[at]
        offset = region.offset + start - (ends[at] - region.size_bytes)
        last = regions[-1] if regions else None
        gap = (
            offset - last.offset - last.size_bytes
            if last is not None and last.file is region.file
            else -1
        )
        if last is not None and gap in (0, SEAL_SIZE_BYTES):
            regions[-1] = LogRegion(last.file, last.offset, last.size_bytes + gap + size)
            total += gap + size
        else:
            regions.append(LogRegion(region.file, offset, size))
            total += size
        starts.append(total - size)
        sizes.append(size)
    return ReadResult(
        ReadStatus.FOUND,
        result.next_offset,
        result.min_offset,
        result.end_offset,
        all_offsets[indexes[0]] if indexes else result.first_offset,
        np.array(starts, np.uint32),
        np.array(sizes, np.uint32),
        np.array([all_offsets[index] for index in indexes], np.uint64),
        regions,
        total,
    )


def _within(result: ReadResult, end: int) -> ReadResult:
    """Returns only the records before an offset."""
    offsets = offsets_of(result)
    if offsets[-1] < end:
        return result
    return choose(result, [index for index, offset in enumerate(offsets) if offset < end])


def _matching(filter_: Filter, data: bytes, result: ReadResult) -> tuple[list[int], int]:
    """Indexes of the records that match, among those that were examined, and how many these are. It stops before what makes the filter
    raise; raises that if nothing stands before.
    """
    found: list[int] = []
    first = 0
    while first < result.record_count:
        some = slice(first, first + filter_.records_max)
        try:
            matches = filter_.matching(data, result.starts[some], result.sizes[some])
        except Exception:
            if first:
                break
            raise
        found += [first + index for index in matches.indexes]
        first += matches.examined
    return found, first


def _field_of(data: bytes, result: ReadResult, at: int) -> NDArray[np.uint32]:
    """A field of four octets of each record's trailer."""
    ends: NDArray[np.int64] = result.starts.astype(np.int64) + result.sizes
    return windows(data, U32)[ends + at]
