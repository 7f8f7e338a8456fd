"""ConsumerService: offsets of consumer groups, ranges of queues, offsets by time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError, Message

from protomq.v1.consumer_service_pb2 import (
    CloneOffsetsRequest,
    CommitOffsetsRequest,
    GetLagRequest,
    GetLagResponse,
    GetOffsetsRequest,
    GetOffsetsResponse,
    GetQueueRangeRequest,
    GetQueueRangeResponse,
    QueueLag,
    QueueOffset,
    QueueRange,
    ResetOffsetsRequest,
    SearchOffsetRequest,
    SearchOffsetResponse,
)
from protomq.wire.topics import retry_topic
from protomq_runtime.dispatch import never_shed, raw
from protomq_runtime.errors import invalid_argument, unparsable

from .forks import settle_commit
from .found_log import FoundLog
from .group_lag import lag_of, place_of, queues_of
from .request_times import AHEAD_MAX_MS, time_ms_of
from .store.state.popped_queue import QueueOfGroup
from .store_errors import tells_store_errors, to_service_error
from .topic_access import (
    check_committed_offset,
    check_group_name,
    check_incarnation,
    check_known_queues,
    check_queue_ids,
    check_read_queue,
    existing_topic,
    nothing_consumed,
    read_one_incarnation,
    readable_topic,
)

if TYPE_CHECKING:
    from protomq_runtime.call import Call, CallContext
    from protomq_runtime.clock import Clock

    from .offset_commits import OffsetCommits
    from .store.state.topics import TopicConfig
    from .store.store import Store

T = TypeVar("T")
M = TypeVar("M", bound=Message)

OFFSETS_PER_COMMIT_MAX = 5_000


class ConsumerService:
    """Implements protomq.v1.ConsumerService, on the consumer lane."""

    def __init__(
        self, store: Store, commits: OffsetCommits, clock: Clock, may_have_lost_lead: Callable[[], bool] = lambda: False
    ) -> None:
        """`may_have_lost_lead`: whether another broker may lead by now, of which this master has not heard."""
        self._store = store
        self._may_have_lost_lead = may_have_lost_lead
        self._found = FoundLog(store)
        self._commits = commits
        self._clock = clock

    @never_shed
    @raw
    def commit_offsets(self, call: Call) -> None:
        """Checks all offsets, then has all of them appended; answered when they are stored."""
        try:
            request = CommitOffsetsRequest.FromString(bytes(call.payload))
            self._check_commit(request)
        except DecodeError:
            call.fail(unparsable("protomq.v1.CommitOffsetsRequest"))
        except Exception as error:
            call.fail(to_service_error(error))
        else:
            self._commits.commit(request, call)

    @tells_store_errors
    def get_offsets(self, request: GetOffsetsRequest, context: CallContext) -> GetOffsetsResponse:
        """Returns committed offsets. A queue without a committed offset is missing from the answer."""
        check_group_name(request.consumer_group)

        def read(topic: TopicConfig) -> Mapping[int, int]:
            check_queue_ids(topic, request.queue_ids)
            return self._store.offsets.of_topic(
                request.consumer_group, topic.name, topic.incarnation
            )

        # First: a slave that is made the master meanwhile may have read its old offsets.
        from_slave = not self._store.is_leading
        log_epoch = self._store.last_epoch
        committed, topic = self._read(request.topic, request.topic_incarnation, read)
        wanted = request.queue_ids or sorted(committed)
        return GetOffsetsResponse(
            offsets=[
                QueueOffset(
                    topic=topic.name,
                    queue_id=queue_id,
                    queue_offset=committed[queue_id],
                    topic_incarnation=topic.incarnation,
                    reset_epoch=self._store.offsets.reset_epoch(
                        request.consumer_group, topic.name, topic.incarnation, queue_id
                    ),
                )
                for queue_id in wanted
                if queue_id in committed
            ],
            topic_incarnation=topic.incarnation,
            log_epoch=log_epoch,
            # Last: a master that was paused before it read them was perhaps replaced meanwhile. It knows no more than a slave then.
            from_slave=from_slave or self._may_have_lost_lead(),
        )

    @tells_store_errors
    def get_queue_range(
        self, request: GetQueueRangeRequest, context: CallContext
    ) -> GetQueueRangeResponse:
        """First and end offset of queues."""

        def read(topic: TopicConfig) -> list[QueueRange]:
            check_queue_ids(topic, request.queue_ids)
            ranges = []
            for queue_id in request.queue_ids or range(topic.read_queues):
                min_offset, end_offset = self._range_of(topic.name, queue_id)
                ranges.append(
                    QueueRange(queue_id=queue_id, min_offset=min_offset, end_offset=end_offset)
                )
            return ranges

        ranges, topic = self._read(request.topic, request.topic_incarnation, read)
        return GetQueueRangeResponse(ranges=ranges, topic_incarnation=topic.incarnation)

    @tells_store_errors
    def search_offset(
        self, request: SearchOffsetRequest, context: CallContext
    ) -> SearchOffsetResponse:
        """First offset whose message was stored at the time or later."""
        check_read_queue(readable_topic(self._store, request.topic), request.queue_id)
        if not request.HasField("store_time"):
            raise invalid_argument("store_time", "is needed")
        time_ms = time_ms_of("store_time", request.store_time)

        def read(topic: TopicConfig) -> int:
            offset = self._store.offset_at_time(topic.name, request.queue_id, time_ms)
            if offset < self._store.queue_range(topic.name, request.queue_id)[1]:
                return offset
            self._range_of(topic.name, request.queue_id)
            return self._store.offset_at_time(topic.name, request.queue_id, time_ms)

        found, topic = self._read(request.topic, request.topic_incarnation, read)
        return SearchOffsetResponse(queue_offset=found, topic_incarnation=topic.incarnation)

    def _range_of(self, topic: str, queue_id: int) -> tuple[int, int]:
        """First and end offset of a queue. Raises ServiceError while messages from before this broker led are not readable yet (KIP-207).

        A reader who begins at the end would get again what others had. A slave tells what it has.
        """
        if self._store.is_leading:
            self._found.check_readable(topic, queue_id)
        return self._store.queue_range(topic, queue_id)

    @tells_store_errors
    def get_lag(self, request: GetLagRequest, context: CallContext) -> GetLagResponse:
        """Lag and delay by queue."""
        check_group_name(request.consumer_group)
        now_ms = self._clock.now_ms()
        response = GetLagResponse()
        names = [request.topic] if request.topic else self._topics_of(request.consumer_group)
        for name in names:

            def read(topic: TopicConfig) -> list[QueueLag]:
                queue_ids, committed = queues_of(self._store, request.consumer_group, topic)
                lags = [self._lag(request.consumer_group, topic, n, committed.get(n), now_ms) for n in queue_ids]
                # A queue that the topic has no more is of no interest, unless something is left there.
                return [each for each in lags if each.lag or each.queue_id < topic.read_queues]

            response.queues.extend(self._read(name, 0, read)[0])
        return response

    def _lag(
        self, group: str, topic: TopicConfig, queue_id: int, committed: int | None, now_ms: int
    ) -> QueueLag:
        queue = QueueOfGroup(group, topic.name, queue_id)
        lag = lag_of(self._store, queue, topic.incarnation, committed, now_ms)
        return QueueLag(
            topic=topic.name,
            queue_id=queue_id,
            committed_offset=-1 if committed is None else committed,
            end_offset=lag.end_offset,
            lag=lag.lag,
            delay_ms=lag.delay_ms,
        )

    def _topics_of(self, group: str) -> list[str]:
        """Topics in which the group has committed or popped. Raises ServiceError if there are none."""
        committed = self._store.offsets.groups().get(group)
        popped = self._store.popped.groups().get(group, ())
        if committed is None and not popped:
            raise nothing_consumed(group)
        topics = sorted({*(committed or ()), *popped})
        return [topic for topic in topics if self._store.topics.find(topic) is not None]

    @raw
    def reset_offsets(self, call: Call) -> None:
        """Has a group go on at an offset that the caller chooses."""
        self._commit_made(call, ResetOffsetsRequest, self._reset)

    @raw
    def clone_offsets(self, call: Call) -> None:
        """Has a group go on where another one is."""
        self._commit_made(call, CloneOffsetsRequest, self._clone)

    def _commit_made(
        self, call: Call, request_class: type[M], make: Callable[[M], CommitOffsetsRequest]
    ) -> None:
        try:
            commit = make(request_class.FromString(bytes(call.payload)))
            self._check_commit(commit)
        except DecodeError:
            call.fail(unparsable(request_class.DESCRIPTOR.full_name))
        except Exception as error:
            call.fail(to_service_error(error))
        else:
            self._commits.commit(commit, call, is_reset=True)

    def _reset(self, request: ResetOffsetsRequest) -> CommitOffsetsRequest:
        check_group_name(request.consumer_group)
        place = request.WhichOneof("place")
        if place is None or (place == "end" and not request.end):
            raise invalid_argument("place", "say where: store_time, queue_offset or end")
        time_ms = time_ms_of("store_time", request.store_time) if place == "store_time" else 0
        if time_ms > self._clock.now_ms() + AHEAD_MAX_MS:
            # A mistyped year must not skip everything.
            raise invalid_argument("store_time", "lies ahead: all that is stored would be skipped; if that is wanted, say end")

        def offset_in(topic: str, queue_id: int) -> int:
            # Readable or not: who has just begun to lead does not know yet what is confirmed.
            if place == "store_time":
                return self._store.offset_at_time(topic, queue_id, time_ms, is_readable=False)
            end_offset = self._store.appended_end_offset(topic, queue_id)
            if place == "end":
                return end_offset
            min_offset, _ = self._store.queue_range(topic, queue_id)
            return min(max(request.queue_offset, min_offset), end_offset)

        def read(topic: TopicConfig) -> list[QueueOffset]:
            check_queue_ids(topic, request.queue_ids)
            return [
                QueueOffset(
                    topic=topic.name,
                    queue_id=queue_id,
                    queue_offset=offset_in(topic.name, queue_id),
                    topic_incarnation=topic.incarnation,
                )
                for queue_id in request.queue_ids or range(topic.read_queues)
            ]

        offsets, _ = self._read(request.topic, 0, read)
        return CommitOffsetsRequest(consumer_group=request.consumer_group, offsets=offsets)

    def _clone(self, request: CloneOffsetsRequest) -> CommitOffsetsRequest:
        check_group_name(request.source_group, "source_group")
        check_group_name(request.consumer_group)
        if request.source_group == request.consumer_group:
            # It would change no offset, and yet take from the members what they hold.
            raise invalid_argument("source_group", "is the group itself; give another group, whose offsets are copied")
        commit = CommitOffsetsRequest(consumer_group=request.consumer_group)
        known = self._topics_of(request.source_group)
        if request.topic:
            existing_topic(self._store, request.topic)
        for name in known:
            topic = self._store.topics.find(name)
            if topic is None or request.topic not in ("", name):
                continue
            if not request.topic and name == retry_topic(request.source_group):
                continue  # The other group would have a lag in a topic that it never consumes.
            committed = self._store.offsets.of_topic(request.source_group, name, topic.incarnation)
            for queue_id in range(topic.read_queues):
                queue = QueueOfGroup(request.source_group, name, queue_id)
                place = place_of(self._store, queue, topic.incarnation, committed.get(queue_id))
                if place is not None:
                    commit.offsets.add(
                        topic=name, queue_id=queue_id, queue_offset=place.low_offset, topic_incarnation=topic.incarnation
                    )
        return commit

    def _check_commit(self, request: CommitOffsetsRequest) -> None:
        """Checks the request and fills in the incarnations of its topics. Raises ServiceError."""
        check_group_name(request.consumer_group)
        if len(request.offsets) > OFFSETS_PER_COMMIT_MAX:
            raise invalid_argument("offsets", f"at most {OFFSETS_PER_COMMIT_MAX} at once")
        named: dict[str, dict[int, QueueOffset]] = {}
        for number, offset in enumerate(request.offsets):
            of_topic = named.setdefault(offset.topic, {})
            if offset.queue_id in of_topic:
                raise invalid_argument(
                    f"offsets[{number}]", "names the queue of an earlier offset; give one offset for each queue"
                )
            of_topic[offset.queue_id] = offset
        for name, of_topic in named.items():
            topic = existing_topic(self._store, name)
            # First: which queues the topic has now says nothing of an earlier one of this name.
            for offset in of_topic.values():
                check_incarnation(topic, offset.topic_incarnation)
            # Of a queue that is gone, too: if it comes back, the group is not to get again what it has done.
            check_known_queues(self._store, topic, sorted(of_topic))
            for offset in of_topic.values():
                settle_commit(self._store, offset)
                check_committed_offset(self._store, topic, offset.queue_id, offset.queue_offset)
                offset.topic_incarnation = topic.incarnation

    def _read(
        self, name: str, incarnation: int, read: Callable[[TopicConfig], T]
    ) -> tuple[T, TopicConfig]:
        def look_up() -> TopicConfig:
            topic = existing_topic(self._store, name)
            check_incarnation(topic, incarnation)
            return topic

        return read_one_incarnation(self._store, look_up, read)
