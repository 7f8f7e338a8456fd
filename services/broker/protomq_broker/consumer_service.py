"""ConsumerService: offsets of consumer groups, ranges of queues, offsets by time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from protomq.v1.consumer_service_pb2 import (
    CommitOffsetsRequest,
    CommitOffsetsResponse,
    GetOffsetsRequest,
    GetOffsetsResponse,
    GetQueueRangeRequest,
    GetQueueRangeResponse,
    QueueOffset,
    QueueRange,
    SearchOffsetRequest,
    SearchOffsetResponse,
)
from protomq_runtime.errors import invalid_argument

from .store_errors import tells_store_errors
from .topic_access import (
    check_group_name,
    check_incarnation,
    check_read_queue,
    existing_topic,
    read_one_incarnation,
    readable_topic,
)

if TYPE_CHECKING:
    from protomq_runtime.call import CallContext

    from .store.store import Store
    from .store.topics import TopicConfig

T = TypeVar("T")

OFFSETS_PER_COMMIT_MAX = 5_000


class ConsumerService:
    """Implements protomq.v1.ConsumerService, on the consumer lane."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @tells_store_errors
    def commit_offsets(
        self, request: CommitOffsetsRequest, context: CallContext
    ) -> CommitOffsetsResponse:
        """Checks all offsets, then takes all of them."""
        check_group_name(request.consumer_group)
        if len(request.offsets) > OFFSETS_PER_COMMIT_MAX:
            raise invalid_argument("offsets", f"at most {OFFSETS_PER_COMMIT_MAX} at once")
        for index, offset in enumerate(request.offsets):
            topic = existing_topic(self._store, offset.topic)
            check_incarnation(topic, offset.topic_incarnation)
            check_read_queue(topic, offset.queue_id)
            if offset.queue_offset < 0:
                raise invalid_argument(f"offsets[{index}].queue_offset", "must be 0 or above")
        for offset in request.offsets:
            self._store.offsets.commit(
                request.consumer_group, offset.topic, offset.queue_id, offset.queue_offset
            )
        return CommitOffsetsResponse()

    @tells_store_errors
    def get_offsets(self, request: GetOffsetsRequest, context: CallContext) -> GetOffsetsResponse:
        """Committed offsets; a queue without one is left out."""
        check_group_name(request.consumer_group)

        def read(topic: TopicConfig) -> Mapping[int, int]:
            for queue_id in request.queue_ids:
                check_read_queue(topic, queue_id)
            return self._store.offsets.of_topic(request.consumer_group, topic.name)

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
            for queue_id in request.queue_ids:
                check_read_queue(topic, queue_id)
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
        # A time between two milliseconds means the later one: no message before it may be given.
        time_ms = request.store_time.seconds * 1000 + -(-request.store_time.nanos // 1_000_000)
        found, topic = self._read(
            request.topic,
            request.topic_incarnation,
            lambda topic: self._store.offset_at_time(topic.name, request.queue_id, time_ms),
        )
        return SearchOffsetResponse(queue_offset=found, topic_incarnation=topic.incarnation)

    def _read(
        self, name: str, incarnation: int, read: Callable[[TopicConfig], T]
    ) -> tuple[T, TopicConfig]:
        def look_up() -> TopicConfig:
            topic = existing_topic(self._store, name)
            check_incarnation(topic, incarnation)
            return topic

        return read_one_incarnation(self._store, look_up, read)
