"""Looking messages up by key and by message id.

Rules:
- The index gives candidates, newest first, which are read and compared: two keys can have one hash. Those to which no queue of the topic
  leads are another topic's, and are not opened.
- A message that stands in a damaged part of the log is never skipped silently. A look-up by key gets what is newer, then
  CorruptLogError. A look-up by id gets the message if a sound one has it, else CorruptLogError.
- A candidate in a damaged part cannot be opened, to compare its key. It counts as a message of the topic if an entry of the topic's
  queues leads to it. It counts too if they have lost entries in that part, one of which may have led there. Else it is another
  topic's.
- If the index was rebuilt with damage in the log, it knows nothing of what had stood there (`MessageIndex.unknown_from`). Then each
  message that the topic has lost there may be the wanted one.
- What `protomq log repair` has taken out is gone for look-ups, as if it had never been: no error reports it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from protomq.v1.record_pb2 import Record
from protomq_broker.store.errors import CorruptLogError, TooManyCandidatesError
from protomq_broker.store.log.positions import Positions
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.queues.consume_queue import ConsumeQueueDamagedError
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from protomq_broker.store.queues.log_reader import LogReader, lost_in

from .index import MessageIndex

CANDIDATES_MAX: Final = 65_536
"""Records that one look-up opens at most: as many as a read with a filter looks at entries."""
LISTED_MAX: Final = 1 << 20
"""Candidates that one look-up takes from the index at most."""
_PAGE_COUNT: Final = 256
_PAGE_COUNT_MAX: Final = 8_192
"""Pages grow: who goes through many candidates finds them with few searches."""
_QUEUES_SHARE: Final = 4
"""Below this number of candidates for each queue of the topic, the records of a page are opened: that is cheaper then."""
_ENTRIES_SHARE: Final = 16
"""Maximum number of a queue's entries that are compared for each candidate of a page."""
_ADVICE: Final = (
    "message {} may be what is looked for: leave its time out (begin_time, end_time), or have the operator take the damage out "
    "(`protomq log repair`)"
)

Identity = tuple[int, int, int]
"""Producer id, producer epoch, sequence."""


class Places(NamedTuple):
    """Where a message stands, whatever the topic.

    Attributes:
        records: without tag and length, and without their bodies, the oldest first.
        damaged_count: places in damaged parts of the log, where the message stands or may stand.
    """

    records: Sequence[bytes]
    damaged_count: int


class MessageLookUps:
    """Any thread may call."""

    def __init__(
        self,
        folder: SegmentFolder,
        queues: ConsumeQueueTable,
        index: MessageIndex,
        reader: LogReader,
        positions: Positions,
    ) -> None:
        self._folder = folder
        self._queues = queues
        self._index = index
        self._reader = reader
        self._positions = positions

    def by_key_hash(
        self,
        topic: str,
        key_hash: int,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        *,
        check_time: Callable[[], None] = lambda: None,
    ) -> Iterator[bytes]:
        """Records (without tag and length) of a topic that may have a key of this hash, newest first: the caller compares the keys.

        Left out are those that were stored before `begin_ms`, or at `end_ms` or later; of milliseconds at the border the caller decides.

        `check_time` is called between any two searches and records, and may raise to end a look-up that takes too long.

        Raises CorruptLogError where the next one may be lost, TooManyCandidatesError, and ConsumeQueueDamagedError where the topic's
        queues cannot tell whether a record is theirs.
        """
        start, end = self._folder.first_position, self._positions.readable
        if begin_ms is not None:
            start = max(start, self._reader.position_at_time(topic, begin_ms))
        if end_ms is not None:
            end = min(end, self._reader.position_behind_time(topic, end_ms))
        unknown = self._index.unknown_from(start, end)
        known = self._key_candidates(topic, key_hash, start, end, check_time)
        for position in heapq.merge(known, unknown, reverse=True):
            check_time()
            data = self._reader.record_at(position)
            if data is None:
                error = self._lost_at(topic, position, is_exact=position not in unknown)
                if error is not None:
                    raise error
            elif self._is_listed(topic, Record.FromString(data), position):
                yield data

    def by_message_id(self, topic: str, identity: Identity) -> Iterator[bytes]:
        """Records (without tag and length) of a topic with this id: one, unless its producer has sent it twice under different names.

        Raises CorruptLogError if there is none and it may be lost, and as `by_key_hash`.
        """
        readable = self._positions.readable
        first = self._folder.first_position
        unknown = self._index.unknown_from(first, readable)
        found = self._index.find_message_id(*identity, start_position=first, end_position=readable)
        given: set[int] = set()  # a request seems to reach the one behind it in its queue too
        lost: CorruptLogError | None = None
        for candidate in heapq.merge(found, unknown, reverse=True):
            try:
                position, data = self._follow(topic, identity, candidate, readable)
            except CorruptLogError as error:
                if not self._reader.is_repaired(error.position):
                    lost = lost or error
                continue
            if data is None:
                if position >= 0:
                    lost = lost or self._lost_at(topic, position, is_exact=position not in unknown)
                continue
            if position not in given and _identity_of(Record.FromString(data)) == identity:
                given.add(position)
                yield data
        if lost is not None and not given:
            raise lost

    def everywhere(self, identity: Identity, count_max: int) -> Places:
        """The newest `count_max` records with this id that some queue of any topic leads to: a message keeps its id wherever it is moved.

        Raises ConsumeQueueDamagedError where a queue cannot tell whether a record is its own.
        """
        readable = self._positions.readable
        found = self._index.find_message_id(
            *identity, start_position=self._folder.first_position, end_position=readable
        )
        given: dict[int, bytes] = {}
        damaged_count = 0
        for candidate in found:
            data = self._reader.record_at(candidate)
            position = candidate
            if data is not None:
                topic = Record.FromString(data).topic
                try:
                    position, data = self._follow(topic, identity, candidate, readable)
                except CorruptLogError as error:
                    position, data = error.position, None
            if data is None:
                if position >= 0 and not self._reader.is_repaired(position):
                    damaged_count += 1
            elif _identity_of(record := Record.FromString(data)) == identity:
                record.ClearField("body")  # Of hundreds of places they may have a gigabyte.
                given[position] = record.SerializeToString()
            if len(given) >= count_max:
                break
        return Places([given[position] for position in sorted(given)], damaged_count)

    def _key_candidates(
        self, topic: str, key_hash: int, start: int, end: int, check_time: Callable[[], None]
    ) -> Iterator[int]:
        """Positions, newest first, of what may be the topic's. Raises TooManyCandidatesError."""
        listed_count = opened_count = 0
        page_count = _PAGE_COUNT
        while True:
            check_time()
            page = self._index.find_key(
                key_hash, start_position=start, end_position=end, count_max=page_count
            )
            listed_count += len(page)
            for position in self._may_be_of(topic, page):
                if opened_count >= CANDIDATES_MAX:
                    raise TooManyCandidatesError(opened_count)
                opened_count += 1
                yield position
            if len(page) < page_count:
                return
            if listed_count >= LISTED_MAX:
                raise TooManyCandidatesError(listed_count)
            end = page[-1]
            page_count = min(2 * page_count, _PAGE_COUNT_MAX)

    def _may_be_of(self, topic: str, page: Sequence[int]) -> Sequence[int]:
        """The positions of a page, newest first, without those to which no queue of the topic leads. All of them if that would be dear
        to find out, or damage hides it.
        """
        queues = self._queues.queues_of(topic).values()
        if not page or len(queues) * _QUEUES_SHARE > len(page) or self._reader.has_damage:
            return page
        positions = np.array(page, np.uint64)
        listed = np.zeros(len(page), np.bool_)
        for queue in queues:
            try:
                first = queue.first_at_or_beyond(page[-1])
                count = queue.first_at_or_beyond(page[0] + 1) - first
                if count <= 0:
                    continue
                if count > _ENTRIES_SHARE * len(page):
                    return page
                entries = queue.entries(first, count)
            except ConsumeQueueDamagedError:
                return page
            if len(entries) < count:
                return page
            listed |= np.isin(positions, entries["position"])
        return positions[listed].tolist()

    def _follow(
        self, topic: str, identity: Identity, position: int, readable: int
    ) -> tuple[int, bytes | None]:
        """(position, record) of the one that a candidate for an id leads to. No record if it is lost or gone; position -1 if there is
        none. CorruptLogError if its queue says that it is lost."""
        data = self._reader.record_at(position)
        if data is None:
            return position, None
        first = Record.FromString(data)
        ahead = identity[2] - first.sequence
        if (
            ahead < 0
            or _identity_of(first)[:2] != identity[:2]
            or not self._is_listed(topic, first, position)
        ):
            return -1, None
        if not ahead:
            return position, data
        queue = self._queues.find(topic, first.queue_id)
        wanted = first.queue_offset + ahead
        if queue is None or wanted >= queue.first_at_or_beyond(readable):
            return -1, None
        self._reader.check_sound(queue, wanted)
        position = queue.entry(wanted)[0]
        data = self._reader.record_at(position)
        if data is None:
            self._reader.check_sound(queue, wanted)  # the damage was met just now
        return position, data

    def _is_listed(self, topic: str, record: Record, position: int) -> bool:
        """Whether the record at `position` is a message of the topic, not of a deleted one of its name: its queue leads there."""
        queue = self._queues.find(topic, record.queue_id)
        return (
            record.topic == topic
            and queue is not None
            and queue.known_min_offset <= record.queue_offset < queue.end_offset
            and queue.entry(record.queue_offset)[0] == position
        )

    def _lost_at(self, topic: str, position: int, *, is_exact: bool) -> CorruptLogError | None:
        """The error if a record that cannot be read at `position` is, or may be, one of the topic. None if it is gone,
        repaired, or another's.

        `is_exact`: a record stands there; else anything may that the damaged part has from there on, and the parts that follow at once.
        """
        damage = self._reader.damage_at(position) or self._missing_at(position)
        while damage is not None:
            if not self._reader.is_repaired(position):
                error = self._lost_in(topic, damage, position, is_exact=is_exact)
                if error is not None:
                    return error
            if is_exact:
                return None
            position = damage.end_position
            damage = self._reader.damage_at(position)
        return None

    def _lost_in(
        self, topic: str, damage: DamagedRange, position: int, *, is_exact: bool
    ) -> CorruptLogError | None:
        """The same for one damaged part."""
        for queue in self._queues.queues_of(topic).values():
            first, following = lost_in(queue, damage)
            if first >= following:
                continue
            offset = max(first, queue.first_at_or_beyond(position))
            stands_there = offset < following and (
                not is_exact or queue.entry(offset)[0] == position
            )
            if not stands_there:
                sizes = queue.entries(first, following - first)["size"]
                if np.count_nonzero(sizes) == following - first:
                    continue  # it knows all of these, and none stands there
                offset = first
            offset = min(offset, following - 1)
            return self._reader.corrupt(queue, damage, offset, _ADVICE.format(offset))
        return None

    def _missing_at(self, position: int) -> DamagedRange | None:
        """The segment, as damage, if its file is missing; one that was deleted for its age is not."""
        if position < self._folder.first_position or self._folder.at(position) is not None:
            return None
        size = self._folder.segment_size_bytes
        base = position - position % size
        return DamagedRange(base, base + size, 0, "the segment file is missing")


def _identity_of(record: Record) -> Identity:
    return record.producer_id, record.producer_epoch, record.sequence
