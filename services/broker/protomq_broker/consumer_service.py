"""ConsumerService: offsets of consumer groups, ranges of queues, offsets by time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError

from protomq.v1.consumer_service_pb2 import (
    CommitOffsetsRequest,
    GetOffsetsRequest,
    GetOffsetsResponse,
    GetQueueRangeRequest,
    GetQueueRangeResponse,
    QueueOffset,
    QueueRange,
    SearchOffsetRequest,
    SearchOffsetResponse,
)
from protomq_runtime.dispatch import raw
from protomq_runtime.errors import invalid_argument, unparsable

from .request_times import time_ms_of
from .store_errors import tells_store_errors, to_service_error
from .topic_access import (
    check_committed_offset,
    check_group_name,
    check_incarnation,
    check_queue_ids,
    check_read_queue,
    existing_topic,
    read_one_incarnation,
    readable_topic,
)

if TYPE_CHECKING:
    from protomq_runtime.call import Call, CallContext

    from .offset_commits import OffsetCommits
    from .store.state.topics import TopicConfig
    from .store.store import Store

T = TypeVar("T")

OFFSETS_PER_COMMIT_MAX = 5_000


class ConsumerService:
    """Implements protomq.v1.ConsumerService, on the consumer lane."""

    def __init__(self, store: Store, commits: OffsetCommits) -> None:
        self._store = store
        self._commits = commits

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
        """Committed offsets; a queue without one is left out."""
        check_group_name(request.consumer_group)

        def read(topic: TopicConfig) -> Mapping[int, int]:
            check_queue_ids(topic, request.queue_ids)
            return self._store.offsets.of_topic(
                request.consumer_group, topic.name, topic.incarnation
            )

        committed, topic = self._read(request.topic, request.topic_incarnation, read)
        wanted = request.queue_ids or sorted(committed)
        return GetOffsetsResponse(
            offsets=[
                QueueOffset(
                    topic=topic.name,
                    queue_id=queue_id,
                    queue_offset=committed[queue_id],
                    topic_incarnation=topic.incarnation,
                )
                for queue_id in wanted
                if queue_id in committed
            ],
            topic_incarnation=topic.incarnation,
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
                min_offset, end_offset = self._store.queue_range(topic.name, queue_id)
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
        found, topic = self._read(
            request.topic,
            request.topic_incarnation,
            lambda topic: self._store.offset_at_time(topic.name, request.queue_id, time_ms),
        )
        return SearchOffsetResponse(queue_offset=found, topic_incarnation=topic.incarnation)

    def _check_commit(self, request: CommitOffsetsRequest) -> None:
        """Raises ServiceError; fills in the incarnations of the topics."""
        check_group_name(request.consumer_group)
        if len(request.offsets) > OFFSETS_PER_COMMIT_MAX:
            raise invalid_argument("offsets", f"at most {OFFSETS_PER_COMMIT_MAX} at once")
        named: set[tuple[str, int]] = set()
        for number, offset in enumerate(request.offsets):
            queue = (offset.topic, offset.queue_id)
            if queue in named:
                raise invalid_argument(
                    f"offsets[{number}]", "names the queue of an earlier offset; give one offset for each queue"
                )
            named.add(queue)
            topic = existing_topic(self._store, offset.topic)
            check_incarnation(topic, offset.topic_incarnation)
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
