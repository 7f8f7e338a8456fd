"""How far groups are behind, in messages and in time, and where they go on. Reads the store; any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .store.state.popped_queue import QueueOfGroup

if TYPE_CHECKING:
    from .store.state.topics import TopicConfig
    from .store.store import Store


class Lag(NamedTuple):
    """The lag of a group in one queue.

    Attributes:
        low_offset: everything below was consumed.
        end_offset: one past the last readable offset.
        lag: readable messages that the group has not consumed. If it pops: those never handed out, and those not acknowledged.
        delay_ms: how long ago the first of them was stored; 0 if there is none. If it cannot be read, that of the next one that can.
    """

    low_offset: int
    end_offset: int
    lag: int
    delay_ms: int


class Place(NamedTuple):
    """How far a group is in one queue.

    Attributes:
        low_offset: everything below was consumed.
        next_offset: nobody of the group has had a message from here on.
        open_count: messages that members hold, or that come again.
        stored_ms: when the first of these was stored, if it is known since retention has copied it.
    """

    low_offset: int
    next_offset: int
    open_count: int
    stored_ms: int | None = None


def place_of(store: Store, queue: QueueOfGroup, incarnation: int, committed: int | None) -> Place | None:
    """Returns where the group is, by what it has committed and popped; None if it has done neither."""
    with store.popped.lock:
        popped = store.popped.find(queue, incarnation)
        if popped is not None:
            # A group that has changed from pops to pulls goes on at its committed offset.
            next_offset = max(committed or 0, popped.next_offset)
            low_offset = min(popped.open, default=next_offset)
            return Place(low_offset, next_offset, len(popped.open), popped.stored_ms.get(low_offset))
    return None if committed is None else Place(committed, committed, 0)


def unread_of(store: Store, topic: TopicConfig, queue_ids: Sequence[int]) -> dict[str, int]:
    """How many messages of these queues each group that consumes the topic has never had, where there are any."""
    groups: set[str] = set().union(*(state.groups_of(topic.name, topic.incarnation) for state in (store.offsets, store.popped)))
    unread: dict[str, int] = {}
    for group in sorted(groups):
        committed = store.offsets.of_topic(group, topic.name, topic.incarnation)
        count = 0
        for queue_id in queue_ids:
            queue = QueueOfGroup(group, topic.name, queue_id)
            place = place_of(store, queue, topic.incarnation, committed.get(queue_id)) or Place(0, 0, 0)
            min_offset, end_offset = store.queue_range(topic.name, queue_id)
            count += max(end_offset - max(place.next_offset, min_offset), 0)
        if count:
            unread[group] = count
    return unread


def queues_of(store: Store, group: str, topic: TopicConfig) -> tuple[list[int], dict[int, int]]:
    """Returns the queues in which a group may lag, and what it has committed.

    First all of the topic, touched or not: it consumes them all. Then those that the topic has no more, and in which it has committed or
    popped.
    """
    committed = store.offsets.of_topic(group, topic.name, topic.incarnation)
    touched = {*committed, *store.popped.queue_ids(group, topic.name)}
    gone = sorted(queue_id for queue_id in touched if queue_id >= topic.read_queues)
    return [*range(topic.read_queues), *gone], committed


def lag_of(
    store: Store,
    queue: QueueOfGroup,
    incarnation: int,
    committed: int | None,
    now_ms: int,
    store_time_of: Callable[[str, int, int], int] | None = None,
) -> Lag:
    """Returns the lag. Raises StoreError while the queue is being healed, or if the message stands in a damaged part of the log.

    `store_time_of`: the store's, with a memory, where many groups are asked for.
    """
    _, topic, queue_id = queue
    place = place_of(store, queue, incarnation, committed) or Place(0, 0, 0)
    min_offset, end_offset = store.queue_range(topic, queue_id)
    first = max(place.low_offset, min_offset)
    count = max(end_offset - max(place.next_offset, min_offset), 0) + place.open_count
    delay_ms = 0
    if place.stored_ms is not None:
        delay_ms = max(now_ms - place.stored_ms, 0)
    elif count:
        try:
            delay_ms = max(now_ms - (store_time_of or store.store_time_of)(topic, queue_id, first), 0)
        except KeyError:
            # Retention has deleted the message meanwhile, or none of the queue can be read.
            delay_ms = 0
    return Lag(place.low_offset, end_offset, count, delay_ms)
