"""AdminService: topics, status, statistics, look-ups of one broker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from protomq.v1.admin_service_pb2 import (
    ConsumerGroup,
    CreateTopicRequest,
    CreateTopicResponse,
    DamagedQueue,
    DeleteGroupRequest,
    DeleteTopicRequest,
    DeleteTopicResponse,
    DescribeTopicRequest,
    DescribeTopicResponse,
    GetBrokerStatusRequest,
    GetBrokerStatusResponse,
    GetStatsRequest,
    GetStatsResponse,
    LaneStatus,
    ListGroupsRequest,
    ListGroupsResponse,
    ListTopicsRequest,
    ListTopicsResponse,
    LogDamage,
    PingRequest,
    PingResponse,
    QueryMessagesRequest,
    QueueStatus,
    TopicStats,
)
from protomq.v1.record_pb2 import Record
from protomq.v1.topic_pb2 import Permission, Topic, TopicType
from protomq.wire.hashing import key_hash_of
from protomq.wire.record import decode_message_id, encode_record_field
from protomq.wire.topics import QUEUES_MAX, rules_of
from protomq_runtime.dispatch import drained, raw
from protomq_runtime.errors import Code, ServiceError, invalid_argument, unparsable

from .group_lag import unread_of
from .metrics import resident_memory_bytes
from .pull_requests import GRPC_SIZE_MAX_BYTES
from .pull_service import SIZE_MAX_BYTES
from .request_times import time_ms_of
from .store.errors import CorruptLogError, StoreError
from .store.state.topics import (
    FROM_PERMISSION,
    IncarnationGivenError,
    InvalidNameError,
    TopicConfig,
    require_group_name,
    require_known_name,
    topic_to_message,
)
from .store_errors import of_corrupt_log, tells_store_errors, to_service_error
from .topic_access import (
    check_group_name,
    check_topic_name,
    existing_topic,
    group_not_found,
    readable_topic,
    topic_not_found,
)

if TYPE_CHECKING:
    from protomq_runtime.call import Call, CallContext

    from .config import BrokerConfig
    from .group_members import GroupMembers
    from .offset_commits import OffsetCommits
    from .state_changes import Outcome, StateChanges
    from .store.store import Store
    from .write_permit import WritePermit

PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 1_000
QUERY_COUNT_DEFAULT = 32
QUERY_COUNT_MAX = 256
DAMAGES_NAMED_MAX = 100
UNREAD_NAMED_MAX = 10
"""Groups in a line of the log."""
log = logging.getLogger("protomq.broker")

_LOOK_UP_TOO_LONG = ServiceError(
    Code.DEADLINE_EXCEEDED,
    "DEADLINE_EXCEEDED",
    "many messages have this key, and the look-up was not done in time: narrow it by begin_time and end_time, or allow more time",
)


class AdminService:
    """Implements protomq.v1.AdminService, on the admin lane.

    `lane_status` gives the state of all lanes. `announce` waits until the name servers know the present topics, or until it gives up.
    `write_refusal` says why the broker takes no writes; "" if it takes them. `a_member` names a member of a group; "": it has none.
    Topics change only after the `permit` is given. `on_grown` is called on the send lane with a topic that has got more read queues.
    """

    def __init__(
        self,
        store: Store,
        config: BrokerConfig,
        *,
        broker_name: str,
        version: str,
        start_time_ms: int,
        lane_status: Callable[[], Sequence[LaneStatus]],
        announce: Callable[[], None],
        write_refusal: Callable[[], str],
        commits: OffsetCommits,
        members: GroupMembers,
        a_member: Callable[[str], str],
        permit: WritePermit,
        changes: StateChanges,
        on_grown: Callable[[str], None],
    ) -> None:
        self._store = store
        self._config = config
        self._broker_name = broker_name
        self._version = version
        self._lane_status = lane_status
        self._announce = announce
        self._write_refusal = write_refusal
        self._commits = commits
        self._members = members
        self._a_member = a_member
        self._permit = permit
        self._changes = changes
        self._on_grown = on_grown
        self._start_time_ms = start_time_ms

    @drained
    def create_topic(self, calls: list[Call]) -> None:
        """Creates or changes topics. Creating a topic again with the same configuration is no error; another configuration needs `update`.

        The service makes one change of all calls that have arrived, since each change rewrites the table of topics and registers all topics
        again. The answer comes when the change is stored, and the name servers know it.
        """
        self._permit.when_given(calls, self._create_topics)

    def _create_topics(self, calls: list[Call]) -> None:
        asked: list[tuple[CreateTopicRequest, TopicConfig]] = []
        taken: list[Call] = []
        for call in calls:
            try:
                request = CreateTopicRequest.FromString(bytes(call.payload))
                asked.append((request, topic_from_message(request.topic, self._config.default_queues)))
            except DecodeError:
                call.fail(unparsable("protomq.v1.CreateTopicRequest"))
            except ServiceError as error:
                call.fail(error)
            else:
                taken.append(call)
        if taken:
            self._changes.make(taken, partial(self._put_topics, asked))

    def _put_topics(self, asked: Sequence[tuple[CreateTopicRequest, TopicConfig]]) -> Sequence[Outcome]:
        """Changes the topics, all together. The send lane: no topic changes between the look at it and its change."""
        wanted: dict[str, TopicConfig] = {}
        found: list[TopicConfig | ServiceError] = []
        for request, asked_topic in asked:
            try:
                topic = self._checked(request, asked_topic, wanted)
            except ServiceError as error:
                found.append(error)
            else:
                wanted[topic.name] = topic
                found.append(topic)
        if not wanted:
            return [each for each in found if isinstance(each, ServiceError)]
        topics = self._store.topics
        queues_before = {name: known.read_queues for name in wanted if (known := topics.find(name)) is not None}
        made = {topic.name: topic for topic in topics.put(list(wanted.values()))}
        for name, count in queues_before.items():
            if made[name].read_queues > count:
                self._on_grown(name)
        announce = cache(self._announce)  # once for all of them
        return [
            each
            if isinstance(each, ServiceError)
            else partial(self._told_created, made[each.name], queues_before.get(each.name, 0), announce)
            for each in found
        ]

    def _told_created(self, topic: TopicConfig, queues_before: int, announce: Callable[[], None]) -> bytes:
        announce()
        answer = CreateTopicResponse(topic=topic_to_message(topic))
        for group, count in self._made_unreadable(topic, queues_before).items():
            answer.unread.add(consumer_group=group, message_count=count)
        return answer.SerializeToString()

    def _made_unreadable(self, topic: TopicConfig, queues_before: int) -> Mapping[str, int]:
        """What groups have not consumed in queues that can be read no more; the log says it, too. `queues_before`: how many could be."""
        if topic.read_queues >= queues_before:
            return {}
        try:
            unread = unread_of(self._store, topic, range(topic.read_queues, queues_before))
        except StoreError as error:
            log.warning("whether groups have consumed what topic %r has no more is not known: %s", topic.name, error)
            return {}
        if unread:
            log.warning(
                "topic %r has %d read queues now, not %d. Nobody can read what groups have not consumed in the others, in messages: %s. "
                "Give it %d read queues again until they have",
                topic.name, topic.read_queues, queues_before, _told_unread(unread), queues_before,
            )  # fmt: skip
        return unread

    @tells_store_errors
    def describe_topic(
        self, request: DescribeTopicRequest, context: CallContext
    ) -> DescribeTopicResponse:
        """Configuration and queues."""
        topic = existing_topic(self._store, request.topic)
        queues = []
        for queue_id in range(max(topic.read_queues, topic.write_queues)):
            min_offset, end_offset = self._store.queue_range(topic.name, queue_id)
            status = QueueStatus(queue_id=queue_id, min_offset=min_offset, end_offset=end_offset)
            if end_offset > min_offset:
                with suppress(KeyError):  # none can be read
                    store_time_ms = self._store.store_time_of(topic.name, queue_id, end_offset - 1)
                    status.last_store_time.CopyFrom(_timestamp(store_time_ms))
            queues.append(status)
        return DescribeTopicResponse(topic=topic_to_message(topic), queues=queues)

    @raw
    def delete_topic(self, call: Call) -> None:
        """Deletes a topic with its queues and committed offsets. The answer comes when the deletion is stored."""
        self._permit.when_given([call], self._delete_topics)

    def _delete_topics(self, calls: list[Call]) -> None:
        for call in calls:
            try:
                request = DeleteTopicRequest.FromString(bytes(call.payload))
            except DecodeError:
                call.fail(unparsable("protomq.v1.DeleteTopicRequest"))
            else:
                self._changes.make([call], partial(self._delete, request.topic, call.lane.post))

    def _delete(self, name: str, later: Callable[[Callable[[], None]], None]) -> Sequence[Outcome]:
        topic = existing_topic(self._store, name)
        self._store.delete_topic(topic.name, later)
        return [self._told_deleted]

    def _told_deleted(self) -> bytes:
        self._announce()
        return DeleteTopicResponse().SerializeToString()

    @tells_store_errors
    def list_topics(self, request: ListTopicsRequest, context: CallContext) -> ListTopicsResponse:
        """Returns a page of topics, sorted by name. The page token is the last name of the previous page."""
        size = page_size_of(request.page_size)
        check_page_token(request.page_token, require_known_name)
        topics = sorted(
            (
                topic
                for topic in self._store.topics.all()
                if topic.name > request.page_token
                and (request.group_topics or rules_of(topic.name).list)
            ),
            key=lambda topic: topic.name,
        )
        page = topics[:size]
        return ListTopicsResponse(
            topics=map(topic_to_message, page),
            next_page_token=page[-1].name if len(topics) > size else "",
        )

    @tells_store_errors
    def list_groups(self, request: ListGroupsRequest, context: CallContext) -> ListGroupsResponse:
        """Returns a page of consumer groups, sorted by name. The page token is the last name of the previous page."""
        size = page_size_of(request.page_size)
        check_page_token(request.page_token, require_group_name)
        if request.topic:
            existing_topic(self._store, request.topic)
        known = self._store.popped.groups()
        for name, topics in self._store.offsets.groups().items():
            known[name] = sorted({*topics, *known.get(name, ())})
        groups = sorted(
            (name, topics)
            for name, topics in known.items()
            if name > request.page_token and (not request.topic or request.topic in topics)
        )
        page = groups[:size]
        return ListGroupsResponse(
            groups=[ConsumerGroup(consumer_group=name, topics=topics) for name, topics in page],
            next_page_token=page[-1][0] if len(groups) > size else "",
        )

    @raw
    def delete_group(self, call: Call) -> None:
        """Appends a record by which the broker forgets a group's offsets, settings and pops. The answer comes when the record is stored."""
        try:
            request = DeleteGroupRequest.FromString(bytes(call.payload))
            self._check_unused(request)
        except DecodeError:
            call.fail(unparsable("protomq.v1.DeleteGroupRequest"))
        except Exception as error:
            refusal = to_service_error(error)
            if refusal.code is Code.NOT_FOUND:
                # The deletion that was before may not be stored yet.
                self._permit.when_given([call], lambda calls: self._changes.make(calls, lambda: [refusal]))
            else:
                call.fail(refusal)
        else:
            self._commits.delete_group(request.consumer_group, call)

    def _check_unused(self, request: DeleteGroupRequest) -> None:
        """Raises ServiceError if the group does not exist, or if it is in use and the request does not set `force`."""
        group = request.consumer_group
        check_group_name(group)
        store = self._store
        if not (
            store.offsets.has_group(group)
            or store.groups.has_settings(group)
            or store.locks.of_group(group)
            or store.popped.has_group(group)
        ):
            raise group_not_found(group)
        # A member may pull at a slave, which this broker does not see.
        member = self._members.user_of(group) or self._a_member(group)
        if member and not request.force:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "GROUP_IN_USE",
                f"{member} is a member of group {group!r} or has just pulled for it: stop it. If it did not stop cleanly, or is no member, "
                "wait for a minute; or set force",
                metadata={"consumer_group": group, "member": member},
            )

    @tells_store_errors
    def get_broker_status(
        self, request: GetBrokerStatusRequest, context: CallContext
    ) -> GetBrokerStatusResponse:
        """What the broker is doing."""
        store = self._store
        damaged_files = store.damaged_files
        return GetBrokerStatusResponse(
            broker_name=self._broker_name,
            version=self._version,
            start_time=_timestamp(self._start_time_ms),
            min_position=store.min_position,
            appended_position=store.appended_position,
            flushed_position=store.flushed_position,
            readable_position=store.readable_position,
            flush_mode="SYNC_FLUSH" if store.config.sync_flush else "ASYNC_FLUSH",
            write_refusal=self._write_refusal(),
            checkpoint_failure=store.checkpoint_failure,
            disk_used_ratio=store.disk_used_ratio(),
            lanes=self._lane_status(),
            topics=len(store.topics.all()),
            resident_memory_bytes=resident_memory_bytes(),
            damaged_queues=[
                DamagedQueue(
                    topic=met.queue.topic,
                    queue_id=met.queue.queue_id,
                    queue_offset=met.queue_offset,
                    reason=met.reason,
                    obstacle=met.obstacle,
                )
                for met in damaged_files[:DAMAGES_NAMED_MAX]
            ],
            damaged_queue_files=len(damaged_files),
            healed_queue_files=store.healed_file_count,
            healed_log_ranges=store.healed_range_count,
            delayed_messages=store.pending.count,
            log_damages=[
                LogDamage(
                    start_position=damage.start_position,
                    end_position=damage.end_position,
                    reason=damage.reason,
                )
                for damage in store.damaged_ranges[:DAMAGES_NAMED_MAX]
            ],
        )

    @tells_store_errors
    def get_stats(self, request: GetStatsRequest, context: CallContext) -> GetStatsResponse:
        """Returns counters since the start; a topic that nobody has used since then has zeros."""
        if len(set(request.topics)) < len(request.topics):
            raise invalid_argument("topics", "names a topic twice")
        names = request.topics or sorted(topic.name for topic in self._store.topics.all())
        answer = GetStatsResponse()
        for name in names:
            existing_topic(self._store, name)
            counters = self._store.counters_of(name)
            answer.topics.append(
                TopicStats(
                    topic=name,
                    records_in=counters.records_in,
                    bytes_in=counters.bytes_in,
                    records_out=counters.records_out,
                    bytes_out=counters.bytes_out,
                )
            )
        return answer

    @tells_store_errors
    @raw
    def query_messages(self, call: Call) -> None:
        """Messages by key or id: candidates come from the index, and are compared here.

        The answer has the records as the log has them. A rewritten record could have its map entries in another order, and its CRC would
        fail.
        """
        try:
            request = QueryMessagesRequest.FromString(bytes(call.payload))
        except DecodeError as error:
            raise unparsable("protomq.v1.QueryMessagesRequest") from error
        size_max_bytes = GRPC_SIZE_MAX_BYTES if call.transport == "grpc" else SIZE_MAX_BYTES
        call.answer(b"".join(self._find_messages(request, size_max_bytes, call.deadline)))

    def _find_messages(
        self, request: QueryMessagesRequest, size_max_bytes: int, deadline: float | None
    ) -> list[bytes]:
        """Returns record fields, newest first, at least one. The first one that would exceed `size_max_bytes` in total ends the list.

        Raises ServiceError CORRUPT_LOG where the next record may be damaged; the error says how many records were found before it.
        """

        def check_time() -> None:
            if deadline is not None and time.monotonic() > deadline:
                raise _LOOK_UP_TOO_LONG

        readable_topic(self._store, request.topic)
        if bool(request.key) == bool(request.message_id):
            raise invalid_argument("key", "give a key or a message_id, one of the two")
        if not 0 <= request.record_count_max <= QUERY_COUNT_MAX:
            raise invalid_argument(
                "record_count_max", f"must be 0 (for {QUERY_COUNT_DEFAULT}) to {QUERY_COUNT_MAX}"
            )
        begin_ms = end_ms = None
        if request.HasField("begin_time"):
            begin_ms = time_ms_of("begin_time", request.begin_time)
        if request.HasField("end_time"):
            end_ms = time_ms_of("end_time", request.end_time)
        if begin_ms is not None and end_ms is not None and end_ms < begin_ms:
            raise invalid_argument("end_time", "is before begin_time")
        if request.key:
            candidates = self._store.find_by_key_hash(
                request.topic,
                key_hash_of(request.key),
                begin_ms,
                end_ms,
                check_time=check_time,
            )
        else:
            try:
                identity = decode_message_id(request.message_id)
            except ValueError as error:
                raise invalid_argument("message_id", str(error)) from error
            candidates = self._store.find_by_message_id(request.topic, identity)
        found: list[bytes] = []
        total_bytes = 0
        try:
            for data in candidates:
                record = Record.FromString(data)
                if request.key and request.key not in record.keys:
                    continue
                time_ms = record.store_time_ms
                if time_ms < (begin_ms or 0) or (end_ms is not None and time_ms >= end_ms):
                    continue
                field = encode_record_field(data)
                total_bytes += len(field)
                if found and total_bytes > size_max_bytes:
                    break
                found.append(field)
                if len(found) == (request.record_count_max or QUERY_COUNT_DEFAULT):
                    break
        except CorruptLogError as error:
            raise of_corrupt_log(error, found_count=len(found)) from error
        return found

    def _checked(self, request: CreateTopicRequest, topic: TopicConfig, wanted: Mapping[str, TopicConfig]) -> TopicConfig:
        """Returns the topic that a request asks for. `wanted` has the topics of earlier ones of the same change. Raises ServiceError if it
        is refused.
        """
        existing = wanted.get(topic.name) or self._store.topics.find(topic.name)
        if request.HasField("only_if"):
            _check_is_as(existing, topic_from_message(request.only_if, self._config.default_queues))
        if existing is not None and not request.topic.type:
            topic = replace(topic, type=existing.type)
        if existing is not None and existing != topic and not request.update:
            raise ServiceError(
                Code.ALREADY_EXISTS,
                "TOPIC_EXISTS",
                f"topic {topic.name!r} exists with {_differences(existing, topic)}; set update to change it",
                metadata={"topic": topic.name},
            )
        check_read_queues(topic, existing)
        known = existing.incarnation if existing is not None else 0
        if known and topic.incarnation not in (0, known):
            raise to_service_error(IncarnationGivenError(topic.name, topic.incarnation, known))
        return replace(topic, incarnation=topic.incarnation or known)

    def ping(self, request: PingRequest, context: CallContext) -> PingResponse:
        """Answers."""
        return PingResponse()


def topic_from_message(message: Topic, default_queues: int) -> TopicConfig:
    """The configuration that a client asks for, checked, defaults filled in. Raises ServiceError."""
    check_topic_name(message.name)
    for name in ("write_queues", "read_queues"):
        if not 0 <= getattr(message, name) <= QUEUES_MAX:
            raise invalid_argument(f"topic.{name}", f"must be 0 (for the default) to {QUEUES_MAX}")
    if message.permission not in FROM_PERMISSION:
        raise invalid_argument("topic.permission", "is no value of Permission")
    if message.closed_from not in FROM_PERMISSION:
        raise invalid_argument("topic.closed_from", "is no value of Permission")
    if message.type and message.type not in TopicType.values():
        raise invalid_argument("topic.type", "is no value of TopicType")
    if message.incarnation < 0:
        raise invalid_argument("topic.incarnation", "must be 0 (any) or more")
    write_queues = message.write_queues or default_queues
    readable, writable = FROM_PERMISSION[message.permission]
    return TopicConfig(
        message.name,
        write_queues=write_queues,
        read_queues=message.read_queues or write_queues,
        readable=readable,
        writable=writable,
        incarnation=message.incarnation,
        type=message.type or TopicType.TOPIC_TYPE_MIXED,
        closed_from=message.closed_from,
    )


def _told_unread(unread: Mapping[str, int]) -> str:
    told = [f"{group} {count}" for group, count in unread.items()]
    return ", ".join((*told[:UNREAD_NAMED_MAX], "…") if len(told) > UNREAD_NAMED_MAX else told)


def _check_is_as(existing: TopicConfig | None, seen: TopicConfig) -> None:
    """Raises ServiceError if the topic has changed since the caller has seen it, or is gone."""
    if existing is None:
        raise topic_not_found(seen.name)
    if existing != seen:
        raise ServiceError(
            Code.ALREADY_EXISTS,
            "TOPIC_EXISTS",
            f"topic {seen.name!r} has been changed meanwhile: it exists with {_differences(existing, seen)}; look at it again",
            metadata={"topic": seen.name},
        )
    if seen.incarnation not in (0, existing.incarnation):
        raise to_service_error(IncarnationGivenError(seen.name, seen.incarnation, existing.incarnation))


def _differences(existing: TopicConfig, wanted: TopicConfig) -> str:
    """What a topic has that a wish has otherwise: "read_queues 8, not 16"."""
    names = [field.name for field in fields(TopicConfig) if getattr(existing, field.name) != getattr(wanted, field.name) and field.compare]
    return ", ".join(f"{name} {_shown(name, existing)}, not {_shown(name, wanted)}" for name in names)


def _shown(name: str, topic: TopicConfig) -> str:
    value = getattr(topic, name)
    if name == "closed_from":
        return Permission.Name(value).removeprefix("PERMISSION_")
    return TopicType.Name(value).removeprefix("TOPIC_TYPE_") if name == "type" else str(value).lower()


def check_read_queues(topic: TopicConfig, existing: TopicConfig | None) -> None:
    """Raises ServiceError if the change makes a queue unreadable that is written now or was until now: its messages would reach nobody."""
    written = max(topic.write_queues, existing.write_queues if existing is not None else 0)
    if topic.read_queues >= written:
        return
    if written > topic.write_queues:
        remedy = (
            f"it has {written} write queues now. Lower those first and leave {written} read queues. Wait until consumers have read "
            "the queues that go, then lower the read queues"
        )
    else:
        remedy = "raise the read queues first or together with the write queues"
    raise invalid_argument(
        "topic.read_queues",
        f"{topic.read_queues} read queues for {topic.write_queues} write queues of {topic.name!r}: nobody could read what is sent "
        f"to the others; {remedy}",
        metadata={
            "topic": topic.name,
            "write_queues": str(topic.write_queues),
            "read_queues": str(topic.read_queues),
            "read_queues_min": str(written),
        },
    )


def page_size_of(asked: int) -> int:
    if not 0 <= asked <= PAGE_SIZE_MAX:
        raise invalid_argument(
            "page_size", f"must be 0 (for {PAGE_SIZE_DEFAULT}) to {PAGE_SIZE_MAX}"
        )
    return asked or PAGE_SIZE_DEFAULT


def check_page_token(token: str, require_name: Callable[[str], None]) -> None:
    """Checks a page token: the last name of the previous page, or empty for the first page. Raises ServiceError."""
    try:
        if token:
            require_name(token)
    except InvalidNameError:
        raise invalid_argument(
            "page_token", "was not given by this broker; leave it out for the first page"
        ) from None


def _timestamp(time_ms: int) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromMilliseconds(time_ms)
    return timestamp
