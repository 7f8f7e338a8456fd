"""What a consumer asks brokers beside pulling: ConsumerService in steps. Values in, values out; each is one call, with all its tries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from . import _methods
from ._call_steps import call_broker
from ._decoding import decoded
from ._filters import MessageFilter
from ._late_imports import fork_waits
from ._retry import CALL, Retries
from ._steps import Steps
from ._types import Membership, MessageQueue, MethodInfo, QueueRange

_NONE_KNOWN: Final[Mapping[MessageQueue, int]] = MappingProxyType({})
BEYOND_ALL_OFFSETS: Final = 2**62
"""A pull from there finds nothing, and searches for nothing."""
STORE_TIME_MAX_MS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999: protobuf has no later Timestamp. Rounded, `datetime.max` is one."""


class Limits(NamedTuple):
    """How long a call may take, all tries together, and how often it is tried."""

    timeout_s: float
    retries: Retries = CALL


class CommittedOffsets(NamedTuple):
    """Committed offset by queue id, where there is one, and the incarnation of the topic; 0 from a broker that does not tell.

    `reset_epochs`: which reset each of the offsets follows. `log_epoch`: of the log that has them; 0 from a broker that does not tell.
    `from_slave`: a slave told it. The group may have committed more, which the master has.
    """

    offsets: dict[int, int]
    topic_incarnation: int
    reset_epochs: dict[int, int]
    log_epoch: int
    from_slave: bool = False


class OffsetReset(NamedTuple):
    """Where a group goes on in a queue whose offset was reset, and which reset it was."""

    queue_offset: int
    reset_epoch: int


class NotTaken(NamedTuple):
    """Queues whose offsets a commit has not changed. `resets`: they were reset; `kept`: the group has committed these offsets instead."""

    resets: dict[MessageQueue, OffsetReset]
    kept: dict[MessageQueue, int]


class QueueRanges(NamedTuple):
    """Range by queue id, and the incarnation of the topic."""

    ranges: dict[int, QueueRange]
    topic_incarnation: int


class FoundOffset(NamedTuple):
    """An offset that was searched for, and the incarnation of the topic."""

    queue_offset: int
    topic_incarnation: int


class ConsumerCalls:
    """The calls, by topic and broker. An incarnation that is given is checked by the broker (TopicRecreatedError), 0 is not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def committed(
        self,
        limits: Limits,
        group: str,
        topic: str,
        broker_name: str,
        queue_ids: Iterable[int],
        topic_incarnation: int = 0,
    ) -> Steps[CommittedOffsets]:
        """Where a group is in these queues."""
        with fork_waits:
            from .v1 import consumer_service_pb2 as pb

        request = pb.GetOffsetsRequest(
            consumer_group=group,
            topic=topic,
            queue_ids=queue_ids,
            topic_incarnation=topic_incarnation,
        )
        data = yield from self._call(
            limits, topic, broker_name, _methods.GET_OFFSETS, request.SerializeToString()
        )
        answer = decoded(data, pb.GetOffsetsResponse.FromString)
        offsets = {one.queue_id: one.queue_offset for one in answer.offsets}
        epochs = {one.queue_id: one.reset_epoch for one in answer.offsets}
        return CommittedOffsets(offsets, answer.topic_incarnation, epochs, answer.log_epoch, answer.from_slave)

    def queue_ranges(
        self,
        limits: Limits,
        topic: str,
        broker_name: str,
        queue_ids: Iterable[int] = (),
        topic_incarnation: int = 0,
    ) -> Steps[QueueRanges]:
        """What these queues hold, or all that the broker has of the topic."""
        with fork_waits:
            from .v1 import consumer_service_pb2 as pb

        request = pb.GetQueueRangeRequest(
            topic=topic, queue_ids=queue_ids, topic_incarnation=topic_incarnation
        )
        data = yield from self._call(
            limits, topic, broker_name, _methods.GET_QUEUE_RANGE, request.SerializeToString()
        )
        answer = decoded(data, pb.GetQueueRangeResponse.FromString)
        ranges = {one.queue_id: QueueRange(one.min_offset, one.end_offset) for one in answer.ranges}
        return QueueRanges(ranges, answer.topic_incarnation)

    def offset_for_time(
        self, limits: Limits, queue: MessageQueue, when: datetime, topic_incarnation: int = 0
    ) -> Steps[FoundOffset]:
        """The first offset stored at the time or later; the end offset if there is none."""
        with fork_waits:
            from .v1 import consumer_service_pb2 as pb

        request = pb.SearchOffsetRequest(
            topic=queue.topic, queue_id=queue.queue_id, topic_incarnation=topic_incarnation
        )
        request.store_time.FromMilliseconds(min(max(int(when.timestamp() * 1000), 0), STORE_TIME_MAX_MS))
        data = yield from self._call(
            limits, queue.topic, queue.broker_name, _methods.SEARCH_OFFSET, request.SerializeToString(),
        )  # fmt: skip
        answer = decoded(data, pb.SearchOffsetResponse.FromString)
        return FoundOffset(answer.queue_offset, answer.topic_incarnation)

    def try_filter(self, limits: Limits, queue: MessageQueue, wanted: MessageFilter) -> Steps[None]:
        """Has the queue's broker read a filter, and no message. Raises IllegalFilterError, UnsupportedError, and what any pull raises."""
        with fork_waits:
            from .v1 import pull_service_pb2 as pb

        request = pb.PullRequest(
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=BEYOND_ALL_OFFSETS,
            record_count_max=1,
            filter_type=cast(Any, wanted.type_number),
            filter=wanted.expression,
        )
        yield from self._call(
            limits, queue.topic, queue.broker_name, _methods.PULL, request.SerializeToString()
        )

    def commit(
        self,
        limits: Limits,
        group: str,
        topic: str,
        broker_name: str,
        offsets: Mapping[MessageQueue, int],
        incarnations: Mapping[MessageQueue, int] = _NONE_KNOWN,
        reset_epochs: Mapping[MessageQueue, int | None] = _NONE_KNOWN,
        tokens: Mapping[MessageQueue, int] = _NONE_KNOWN,
        log_epochs: Mapping[MessageQueue, int] = _NONE_KNOWN,
        member: Membership | None = None,
        began: Mapping[MessageQueue, int | None] = _NONE_KNOWN,
    ) -> Steps[NotTaken]:
        """Stores where a group is in queues of one topic at one broker, which takes all or none. `incarnations`: as far as known.

        `reset_epochs`: the last reset that is known of each; 0: none was made. Those that were reset since are not taken.
        `tokens`: of the locks of queues that the consumer has to itself. `log_epochs`: of the log that gave what was consumed.
        `member`: the membership that has the queues, which the broker checks. `began`: where the consumer began, if a slave has told it.
        Then nothing is taken that would take back what the group has committed.
        """
        with fork_waits:
            from .v1 import consumer_service_pb2 as pb

        request = pb.CommitOffsetsRequest(
            consumer_group=group,
            offsets=[
                pb.QueueOffset(
                    topic=queue.topic,
                    queue_id=queue.queue_id,
                    queue_offset=queue_offset,
                    topic_incarnation=incarnations.get(queue, 0),
                    reset_epoch=reset_epochs.get(queue),
                    lock_token=tokens.get(queue, 0),
                    log_epoch=log_epochs.get(queue, 0),
                    began_offset=began.get(queue),
                )
                for queue, queue_offset in offsets.items()
            ],
            member=None if member is None else pb.CommittingMember(**member._asdict()),
        )
        data = yield from self._call(
            limits, topic, broker_name, _methods.COMMIT_OFFSETS, request.SerializeToString()
        )
        answer = decoded(data, pb.CommitOffsetsResponse.FromString)
        return NotTaken(
            {
                MessageQueue(one.topic, broker_name, one.queue_id): OffsetReset(one.queue_offset, one.reset_epoch)
                for one in answer.resets
            },
            {MessageQueue(one.topic, broker_name, one.queue_id): one.queue_offset for one in answer.kept},
        )

    def _call(
        self, limits: Limits, topic: str, broker_name: str, method: MethodInfo, request: bytes
    ) -> Steps[bytes]:
        return call_broker(
            topic, broker_name, method, (request,), limits.timeout_s, limits.retries, self._clock
        )
