"""Reading what a topic holds now, in the order in which it was stored: what `pull` does.

A pull consumer follows queues as fast as they come. Here the order counts: queues are merged by store time, so that what is
printed reads like the log. Each queue is read on demand, one pull at a time, so `--count 3` costs a pull a queue.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from protomq import MessageQueue
from protomq.calls import PullAnswer, PullStatus, Selection
from protomq.records import decode_messages
from protomq_cli.connection import open_admin, open_calls, open_consumer
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.offsets import OffsetRange
from protomq_cli.partial import Missing
from protomq_cli.permits import check_permitted
from protomq_cli.places import resolve_range

if TYPE_CHECKING:
    from datetime import datetime
    from types import TracebackType
    from typing import Self

    from protomq import Message, QueueRange
    from protomq.calls import Calls

LOOK_UP_TIMEOUT_S: Final = 5.0
"""For a broker to say what its queues hold: one that is gone must not take all of a long time-out."""
PULL_COUNT: Final = 1024
"""Messages a pull; fewer where fewer are wanted."""


class TopicReader:
    """The messages of a topic within a range, with some tags, or those that a filter lets through. `timeout_s` is for all of it."""

    def __init__(
        self,
        namesrv: str | None,
        topic: str,
        wanted: OffsetRange,
        *,
        broker_name: str | None = None,
        queue_ids: Sequence[int] = (),
        tags: Sequence[str] = (),
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
        transport: str = "auto",
        timeout_s: float = 60.0,
    ) -> None:
        """Looks up what there is. Raises TopicNotFoundError, and CliError for a queue that the topic does not have."""
        self._selection = Selection.of(tags, sql=sql, cel=cel, module=module)
        self._deadline_s = time.monotonic() + timeout_s
        self._calls = open_calls(namesrv, transport)
        self.missing = Missing()
        self._parts: dict[MessageQueue, tuple[int, int]] = {}
        try:
            self._find_parts(namesrv, topic, wanted, broker_name, queue_ids, timeout_s)
        except BaseException:
            self._calls.close()
            raise

    def _find_parts(
        self,
        namesrv: str | None,
        topic: str,
        wanted: OffsetRange,
        broker_name: str | None,
        queue_ids: Sequence[int],
        timeout_s: float,
    ) -> None:
        with open_admin(namesrv, timeout_s) as admin:
            self.missing.note(
                gone
                for gone in admin.missing_brokers(topic)
                if broker_name in (None, gone.broker.broker_name)
            )
        ranges: dict[MessageQueue, tuple[int, int]] = {}
        self._calls.timeout_s = look_up_s = min(timeout_s, LOOK_UP_TIMEOUT_S)
        with open_consumer(namesrv, request_timeout_s=look_up_s) as consumer:
            queues = self.missing.queues(consumer, topic)
        if broker_name is not None and queues and broker_name not in {q.broker_name for q in queues}:
            self.missing.raise_first()
            raise unknown_broker(broker_name, topic, queues)
        asked: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            if broker_name in (None, queue.broker_name) and (not queue_ids or queue.queue_id in queue_ids):
                asked.setdefault(queue.broker_name, []).append(queue)
        found = self.missing.ask_each({name: partial(_look_up, self._calls, some, wanted) for name, some in asked.items()})
        for queue, (min_offset, end_offset), begin, end in (one for some in found.values() for one in some):
            ranges[queue] = min_offset, end_offset
            if min_offset <= begin <= end_offset:
                self._parts[queue] = begin, end_offset if end is None else min(end, end_offset)
        unknown = sorted(set(queue_ids).difference(queue.queue_id for some in asked.values() for queue in some))
        if not ranges or (unknown and not self.missing.reasons()):
            self.missing.raise_first()
            if not queues:
                check_permitted(namesrv, timeout_s, topic, "read")
            raise CliError(
                ExitCode.NOT_FOUND,
                "QUEUE_NOT_FOUND",
                f"topic {topic!r} has no queue {', '.join(map(str, unknown))}; `protomq topic describe {topic}` shows them"
                if unknown
                else f"topic {topic!r} has no such queue; `protomq topic describe {topic}` shows them",
            )
        if not self._parts:
            held = ", ".join(f"{q.queue_id}: {low} to {high}" for q, (low, high) in ranges.items())
            raise CliError(
                ExitCode.NOT_FOUND,
                "OFFSET_NOT_FOUND",
                f"no queue of {topic!r} reaches to that offset; first and end offsets by queue: {held}",
            )

    @property
    def count(self) -> int:
        """How many messages are in the range; with tags or a condition: at most."""
        return sum(max(end - begin, 0) for begin, end in self._parts.values())

    def messages(self, count_max: int = 0) -> Iterator[Message]:
        """The messages in the order in which they were stored; all, or the first `count_max`."""
        pull_count = min(count_max, PULL_COUNT) if count_max else PULL_COUNT
        queues = [
            self._queue_messages(queue, begin, end, pull_count)
            for queue, (begin, end) in self._parts.items()
        ]
        # Physical offsets order what one broker stored within a millisecond.
        return heapq.merge(
            *queues, key=lambda m: (m.store_time_ms, m.queue.broker_name, m.physical_offset)
        )

    def check(self) -> None:
        """To be called when all is read: raises what kept messages back, if anything did."""
        if all(queue.broker_name in self.missing for queue in self._parts):
            self.missing.raise_first()
        self.missing.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._calls.close()

    def _queue_messages(
        self, queue: MessageQueue, begin: int, end: int, pull_count: int
    ) -> Iterator[Message]:
        tags = self._selection.tags
        while begin < end:
            pull = partial(self._pull, queue, begin, min(pull_count, end - begin))
            answer = self.missing.ask(queue.broker_name, pull)
            if answer is None:
                return
            if answer.status == PullStatus.OFFSET_ILLEGAL:
                raise CliError(
                    ExitCode.NOT_FOUND,
                    "OFFSET_ILLEGAL",
                    f"queue {queue.queue_id} of {queue.topic!r} has no offset {begin}: "
                    f"it holds {answer.min_offset} to {answer.end_offset - 1}",
                )
            for message in decode_messages(answer, queue):
                # With tags the broker compares hashes, and a count of matches may lead beyond the end.
                if message.queue_offset < end and (not tags or message.tag in tags):
                    yield message
            if answer.next_offset <= begin:
                return
            begin = answer.next_offset

    def _pull(self, queue: MessageQueue, queue_offset: int, count: int) -> PullAnswer:
        left_s = max(self._deadline_s - time.monotonic(), 0.001)
        return self._calls.pull(
            queue, queue_offset, record_count_max=count, selection=self._selection, timeout_s=left_s
        )


def unknown_broker(name: str, topic: str, queues: Iterable[MessageQueue]) -> CliError:
    """The error for a broker that does not have the topic."""
    known = ", ".join(sorted({queue.broker_name for queue in queues})) or "none"
    return CliError(
        ExitCode.NOT_FOUND,
        "BROKER_NOT_FOUND",
        f"no broker {name!r} has topic {topic!r}; those that have it: {known}",
    )


def _look_up(
    calls: Calls, queues: Sequence[MessageQueue], wanted: OffsetRange
) -> list[tuple[MessageQueue, QueueRange, int, int | None]]:
    """What queues of a broker hold, and begin and end of what is wanted of each."""
    topic, broker_name = queues[0].topic, queues[0].broker_name
    ranges = calls.queue_ranges(topic, broker_name, [queue.queue_id for queue in queues]).ranges

    def offset_at(queue: MessageQueue, when: datetime) -> int:
        return calls.offset_for_time(queue, when).queue_offset

    return [
        (queue, ranges[queue.queue_id], *resolve_range(wanted, ranges[queue.queue_id], partial(offset_at, queue))) for queue in queues
    ]
