"""What pops ask for, and what they get. Only the pop lane's thread uses these values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protomq_runtime.call import Call
    from protomq_runtime.timers import Timer

    from .filters.filter_book import Filter, FilterKey
    from .store.queues.reading import ReadResult
    from .store.state.topics import TopicConfig


@dataclass(frozen=True, slots=True)
class PopTerms:
    """What a pop asks for, checked, with its defaults filled in. Pops with equal requests share one.

    Attributes: the fields of PopRequest; but
        queue_id: -1 for any.
        is_from_end: a group begins behind the messages that are there.
        tag_codes: of the wanted tags, empty for all.
        filter_key: what messages have to match besides their tags.
    """

    consumer_group: str
    topic: str
    topic_incarnation: int
    queue_id: int
    record_count_max: int
    size_max_bytes: int
    hold_ms: int
    invisible_ms: int
    fifo: bool
    is_from_end: bool
    tag_codes: frozenset[int]
    filter_key: FilterKey | None


@dataclass(eq=False, slots=True)
class PopOrder:
    """A pop that waits for a plan, or is held.

    Attributes:
        call: to be answered.
        request: what was asked for.
        tag_codes: wanted tags, empty for all.
        filter: what messages have to match besides their tags.
        arrival_count: number of arrivals in its topic that this pop has seen. A held pop is planned again when there are more.
        is_held: whether its call waits for messages.
        timer: makes the lane plan the pop again, when its hold ends or a message is due.
        ends_ms: when its hold ends, by the monotonic clock.
        hold_id: by what its caller gives it up; empty: it cannot.
    """

    call: Call
    request: PopTerms
    tag_codes: frozenset[int]
    filter: Filter | None = None
    arrival_count: int = -1
    is_held: bool = False
    timer: Timer | None = None
    ends_ms: float = 0.0
    hold_id: bytes = b""

    @property
    def wanted(self) -> tuple[object, ...]:
        """What the pop wants. Two pops with the same value find the same messages."""
        request = self.request
        key = (request.consumer_group, request.topic, request.queue_id, request.fifo)
        return (*key, self.tag_codes, self.filter, request.topic_incarnation)


@dataclass(slots=True)
class Part:
    """Messages of one queue that go to one pop, all with the same attempt number.

    Attributes:
        queue_id, number, attempt: of the hand-out.
        offsets: the messages.
        result: where their records stand, in the same order.
    """

    queue_id: int
    number: int
    attempt: int
    offsets: Sequence[int]
    result: ReadResult


@dataclass(slots=True)
class PopAnswer:
    """What a pop gets: parts from one incarnation of the topic."""

    order: PopOrder
    topic: TopicConfig
    time_ms: int
    parts: list[Part] = field(default_factory=list)
