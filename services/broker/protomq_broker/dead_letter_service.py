"""DeadLetterService: which groups have dead letters, and their replay in slices. On the admin lane.

    admin lane   reads a slice of %DLQ%group < makes the copies
    send lane                                                    appends them with the record that they were replayed (`state_changes.py`)

Rules:
- The copies and the record are one append. So each request replays a dead letter once, also when the broker crashes in between.
- If something was replayed or deleted between the reading and the append, the service reads the slice again.
- What is named by id is looked up first, so that a wrong id changes nothing. Then it is replayed slice by slice, too, in one call.
- The answer comes when a send would be answered, also if all were replayed before: that record may not be stored yet.
- A dead letter whose original topic is gone, or takes no sends, stays where it is, and is counted.
- What is damaged keeps no other from its replay: a slice that begins there skips it, and tells its offsets.
- One of an expired transaction goes back to where expired ones stand. It never stood in the topic for which it was meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from protomq.v1.dead_letter_service_pb2 import (
    DeadLetters,
    ListDeadLettersRequest,
    ListDeadLettersResponse,
    ReplayDeadLettersRequest,
    ReplayDeadLettersResponse,
)
from protomq.v1.record_pb2 import Record
from protomq.v1.state_pb2 import GroupsRecord, ReplayedDeadLetters
from protomq.wire.record import FLAG_EXPIRED, decode_message_id
from protomq.wire.topics import (
    EXPIRED_TOPIC,
    GROUPS_TOPIC,
    TopicClass,
    class_of,
    dead_letter_topic,
    group_of,
    rules_of,
)
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint
from protomq_runtime.dispatch import raw
from protomq_runtime.errors import Code, ServiceError, invalid_argument, unparsable

from .admin_service import check_page_token, page_size_of
from .found_log import FoundLog
from .request_times import AHEAD_MAX_MS, time_ms_of
from .store.errors import CorruptLogError
from .store.log.append import AppendRequest
from .store.log.move import move_records
from .store.queues.reading import ReadStatus
from .store.state.replayed import OffsetRuns
from .store.state.topics import require_group_name
from .store_errors import tells_store_errors, to_service_error
from .topic_access import check_group_name, check_incarnation, keep_to_queues

if TYPE_CHECKING:
    from protomq_runtime.call import Call, CallContext
    from protomq_runtime.clock import Clock

    from .state_changes import Outcome, StateChanges
    from .store.state.topics import TopicConfig
    from .store.store import Store
    from .system_writer import SystemWriter
    from .write_permit import WritePermit

SLICE_COUNT_MAX: Final = 256
SLICE_SIZE_MAX_BYTES: Final = 1 << 20
"""The most bytes of dead letters that one call reads. Copying them takes some 10 ms, appending them 1 ms."""
IDS_MAX: Final = 256
QUEUE_ID: Final = 0


class _Letter(NamedTuple):
    """A dead letter. `field`: its record field; `topic`, `queue_id`: where it stood first; `is_expired`: its transaction has."""

    offset: int
    field: bytes
    topic: str
    queue_id: int
    is_expired: bool


class _Asked:
    """A call and its request.

    Attributes:
        incarnation: of the topic of dead letters in which `named` was looked up.
        named: of a request with ids: queue offset and id of each dead letter that is not replayed yet, in their order.
        response: what is known of all that is named by id.
    """

    __slots__ = ("call", "incarnation", "named", "request", "response")

    def __init__(self, call: Call, request: ReplayDeadLettersRequest) -> None:
        self.call = call
        self.request = request
        self.incarnation = 0
        self.named: list[tuple[int, str]] = []
        self.response = ReplayDeadLettersResponse()


class DeadLetterService:
    """Implements protomq.v1.DeadLetterService."""

    def __init__(self, store: Store, writer: SystemWriter, permit: WritePermit, changes: StateChanges, clock: Clock) -> None:
        self._store = store
        self._found = FoundLog(store)
        self._clock = clock
        self._writer = writer
        self._permit = permit
        self._changes = changes
        self.replayed_count = 0
        """Dead letters that were replayed since the start. The send lane."""

    @tells_store_errors
    def list_dead_letters(
        self, request: ListDeadLettersRequest, context: CallContext
    ) -> ListDeadLettersResponse:
        """Returns a page of groups, sorted by name. The page token is the last name of the previous page."""
        size = page_size_of(request.page_size)
        check_page_token(request.page_token, require_group_name)
        topics = {
            group: topic
            for topic in self._store.topics.all()
            if class_of(topic.name) is TopicClass.DEAD_LETTER
            and (group := group_of(topic.name) or "") > request.page_token
        }
        names = sorted(topics)
        return ListDeadLettersResponse(
            groups=[self._describe(group, topics[group]) for group in names[:size]],
            next_page_token=names[size - 1] if len(names) > size else "",
        )

    @raw
    def replay_dead_letters(self, call: Call) -> None:
        """Replays a slice. The answer comes when the copies are stored."""
        self._permit.when_given([call], self._replay)

    def _describe(self, group: str, topic: TopicConfig) -> DeadLetters:
        start, end = self._store.queue_range(topic.name, QUEUE_ID)
        replayed = self._store.groups.replayed(group, topic.incarnation)
        described = DeadLetters(
            consumer_group=group,
            min_offset=start,
            end_offset=end,
            replayed_count=replayed.count_within(start, end),
        )
        if end > start:
            with suppress(KeyError):  # none can be read
                described.last_store_time.FromMilliseconds(self._store.store_time_of(topic.name, QUEUE_ID, end - 1))
        return described

    def _replay(self, calls: list[Call]) -> None:
        for call in calls:
            try:
                asked = _Asked(call, ReplayDeadLettersRequest.FromString(bytes(call.payload)))
                self._check(asked)
            except DecodeError:
                call.fail(unparsable("protomq.v1.ReplayDeadLettersRequest"))
            except Exception as error:
                call.fail(to_service_error(error))
            else:
                self._replay_slice(asked)

    def _replay_slice(self, asked: _Asked) -> None:
        if asked.call.answered:
            return  # its caller has gone
        try:
            replay = self._prepare(asked)
        except Exception as error:
            asked.call.fail(to_service_error(error))
        else:
            self._changes.make([asked.call], partial(self._append, replay, asked))

    def _append(self, replay: _Replay, asked: _Asked) -> Sequence[Outcome]:
        """The send lane."""
        if not replay.append(self._writer):
            asked.call.lane.post(partial(self._replay_slice, asked))
            return [None]
        found = replay.response
        self.replayed_count += found.replayed_count
        if not asked.request.message_ids:
            return [found.SerializeToString]
        all_found = asked.response
        all_found.replayed_count += found.replayed_count
        all_found.known_count += found.known_count
        all_found.without_topic_count += found.without_topic_count
        all_found.unknown_message_ids.extend(found.unknown_message_ids)
        del asked.named[: replay.named_count]
        if asked.named:
            asked.call.lane.post(partial(self._replay_slice, asked))
            return [None]
        return [all_found.SerializeToString]

    def _check(self, asked: _Asked) -> None:
        """Raises ServiceError for what is wrong with the request, and looks up what it names by id."""
        request = asked.request
        check_group_name(request.consumer_group)
        if len(request.message_ids) > IDS_MAX:
            raise invalid_argument("message_ids", f"at most {IDS_MAX}")
        for name in ("begin_offset", "end_offset"):
            if getattr(request, name) < 0:
                raise invalid_argument(name, "must be 0 or above")
        if 0 < request.end_offset < request.begin_offset:
            raise invalid_argument("end_offset", "is before begin_offset: nothing has died between")
        topic = self._topic_of(request.consumer_group)
        # A replay would leave out dead letters that may not be read yet.
        self._found.check_readable(topic.name, QUEUE_ID)
        asked.incarnation = topic.incarnation
        asked.named = self._look_up(request.message_ids, topic, asked.response)

    def _topic_of(self, group: str) -> TopicConfig:
        name = dead_letter_topic(group)
        topic = self._store.topics.find(name)
        if topic is None:
            raise ServiceError(
                Code.NOT_FOUND,
                "TOPIC_NOT_FOUND",
                f"group {group!r} has no dead letters here; ListDeadLetters tells which groups have",
                metadata={"topic": name},
            )
        return topic

    def _prepare(self, asked: _Asked) -> _Replay:
        """Reads a slice and makes its copies. Raises ServiceError, StoreError."""
        request = asked.request
        topic = self._topic_of(request.consumer_group)
        response = ReplayDeadLettersResponse()
        named_count = 0
        if request.message_ids:
            check_incarnation(topic, asked.incarnation)
            letters, named_count = self._read_named(asked.named, topic, response)
        else:
            letters = self._find(request, topic, response)
        replay = _Replay(self._store, request, topic, response, named_count)
        replay.prepare(letters)
        return replay

    def _find(
        self,
        request: ReplayDeadLettersRequest,
        topic: TopicConfig,
        response: ReplayDeadLettersResponse,
    ) -> list[_Letter]:
        """Returns the dead letters that the request asks for, and notes in the response how far the search went."""
        store = self._store
        start, end = store.queue_range(topic.name, QUEUE_ID)
        if request.end_offset:
            end = min(end, request.end_offset)
        begin_ms: int | None = None
        if request.HasField("begin_time"):
            begin_ms = time_ms_of("begin_time", request.begin_time)
            if begin_ms > self._clock.now_ms() + AHEAD_MAX_MS:
                raise invalid_argument("begin_time", "lies ahead: nothing has died then")
            start = max(start, store.offset_at_time(topic.name, QUEUE_ID, begin_ms))
        if request.HasField("end_time"):
            end_ms = time_ms_of("end_time", request.end_time)
            if begin_ms is not None and end_ms <= begin_ms:
                raise invalid_argument("end_time", "is not after begin_time: nothing has died between")
            end = min(end, store.offset_at_time(topic.name, QUEUE_ID, end_ms))
        first = max(start, request.begin_offset)
        response.end_offset = max(end, first)
        response.next_offset = first
        if first >= end:
            return []
        count = min(end - first, SLICE_COUNT_MAX)
        try:
            result, data = store.read_to_copy(topic.name, QUEUE_ID, first, count, self._size_max_bytes())
        except CorruptLogError as error:
            if error.lost is None:
                raise
            response.next_offset = min(max(error.next_offset, first + 1), first + count)
            self._skip(error, range(first, response.next_offset), request, topic, response)
            return []
        if result.status is not ReadStatus.FOUND:
            return []
        response.next_offset = min(result.next_offset, end)
        return [_letter(field) for field in result.fields_of(data)]

    def _skip(
        self,
        error: CorruptLogError,
        offsets: range,
        request: ReplayDeadLettersRequest,
        topic: TopicConfig,
        response: ReplayDeadLettersResponse,
    ) -> None:
        """Tells which dead letters cannot be read. Those that were replayed before are known, as if they could."""
        to_service_error(error)  # says the damage in the broker's log
        known = self._store.groups.replayed(request.consumer_group, topic.incarnation)
        unread = [offset for offset in offsets if request.again or offset not in known]
        response.known_count += len(offsets) - len(unread)
        told = response.lost_runs if error.is_gone else response.unreadable_runs
        told.extend(OffsetRuns(number for offset in unread for number in (offset, offset + 1)).numbers())

    def _look_up(self, ids: Iterable[str], topic: TopicConfig, response: ReplayDeadLettersResponse) -> list[tuple[int, str]]:
        """Where the newest dead letter with each id stands, in the order of the queue."""
        found: dict[int, str] = {}
        identities = {}
        for message_id in ids:
            try:
                identities[message_id] = decode_message_id(message_id)
            except ValueError as error:
                raise invalid_argument("message_ids", str(error)) from error
        for message_id, identity in identities.items():
            record = next(iter(self._store.find_by_message_id(topic.name, identity)), None)
            if record is None:
                response.unknown_message_ids.append(message_id)
            else:
                found[Record.FromString(record).queue_offset] = message_id
        return sorted(found.items())

    def _read_named(
        self, named: Sequence[tuple[int, str]], topic: TopicConfig, response: ReplayDeadLettersResponse
    ) -> tuple[list[_Letter], int]:
        """The first of these dead letters, as many as a slice takes, and how many they are with those that are gone by now."""
        letters: list[_Letter] = []
        size_max_bytes = self._size_max_bytes()
        size_bytes = 0
        for count, (offset, message_id) in enumerate(named):
            result, data = self._store.read_to_copy(topic.name, QUEUE_ID, offset, 1, size_max_bytes)
            if result.status is not ReadStatus.FOUND or result.first_offset != offset:
                response.unknown_message_ids.append(message_id)
                continue
            (field,) = result.fields_of(data)
            size_bytes += len(field)
            if letters and size_bytes > size_max_bytes:
                return letters, count
            letters.append(_letter(field))
        return letters, len(named)

    def _size_max_bytes(self) -> int:
        return min(SLICE_SIZE_MAX_BYTES, self._store.append_size_max_bytes // 4)


class _Replay:
    """One slice to be replayed. One thread makes its copies, another appends them if nothing has changed meanwhile."""

    def __init__(
        self,
        store: Store,
        request: ReplayDeadLettersRequest,
        topic: TopicConfig,
        response: ReplayDeadLettersResponse,
        named_count: int,
    ) -> None:
        """`named_count`: of a request with ids: how many of those that it names are in this slice."""
        self.named_count = named_count
        self._store = store
        self._request = request
        self._topic = topic
        self.response = response
        self._deleted = store.topics.deleted
        self._known = store.groups.replayed(request.consumer_group, topic.incarnation)
        self._offsets: list[int] = []
        self._copies: list[AppendRequest] = []

    def prepare(self, letters: Sequence[_Letter]) -> None:
        """Copies the dead letters that can be replayed, and counts the others."""
        response, request = self.response, self._request
        by_queue: dict[tuple[str, int], list[_Letter]] = {}
        for letter in letters:
            if letter.offset in self._known and not request.again:
                response.known_count += 1
                continue
            target = self._store.topics.find(letter.topic)
            takes_it = letter.is_expired or (target is not None and target.writable and rules_of(letter.topic).send)
            if target is None or not takes_it:
                response.without_topic_count += 1
                continue
            queue_id = letter.queue_id % min(target.write_queues, target.read_queues)
            by_queue.setdefault((letter.topic, queue_id), []).append(letter)
        for (name, queue_id), part in by_queue.items():
            sizes = np.array([len(letter.field) for letter in part], np.int64)
            region = move_records(
                b"".join(letter.field for letter in part),
                np.cumsum(sizes) - sizes,
                sizes,
                name,
                replayed_group=request.consumer_group,
                marks=FLAG_EXPIRED if name == EXPIRED_TOPIC else 0,
            )
            self._copies.append(AppendRequest(region, queue_id))
            self._offsets += [letter.offset for letter in part]
        response.replayed_count = len(self._offsets)

    def append(self, writer: SystemWriter) -> bool:
        """Called on the send lane. Appends the copies, if there are some. Returns False, and does nothing, if a topic or a dead letter has
        changed since they were made.
        """
        if not self._copies:
            return True
        store, request = self._store, self._request
        known = store.groups.replayed(request.consumer_group, self._topic.incarnation)
        if known is not self._known and not (
            request.again or all(offset not in known for offset in self._offsets)
        ):
            return False
        if store.topics.deleted is not self._deleted:
            return False
        told = ReplayedDeadLetters(
            consumer_group=request.consumer_group,
            topic_incarnation=self._topic.incarnation,
            runs=[number for offset in sorted(self._offsets) for number in (offset, offset + 1)],
        )
        record = GroupsRecord(replayed=[told]).SerializeToString()
        keep_to_queues(store, self._copies)
        writer.append_moved(self._copies, [(GROUPS_TOPIC, [record])])
        return True


def _letter(field: bytes) -> _Letter:
    _, start = read_varint(field, 1, LENGTH_SIZE_MAX_BYTES)
    record = Record.FromString(field[start:])
    transit = record.transit
    # Earlier versions did not write the flag.
    if record.flags & FLAG_EXPIRED or transit.consumed_topic == EXPIRED_TOPIC:
        return _Letter(record.queue_offset, field, EXPIRED_TOPIC, 0, True)
    return _Letter(record.queue_offset, field, transit.origin_topic, transit.origin_queue_id, False)
