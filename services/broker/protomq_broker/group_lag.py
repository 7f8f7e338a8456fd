"""How far groups are behind: in messages, and in time. Reads the store; any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .store.state.popped_queue import QueueOfGroup
    from .store.store import Store


class Lag(NamedTuple):
    """The lag of a group in one queue.

    Attributes:
        committed: the offset at which the group goes on; None: it has committed none.
        end_offset: one past the last readable offset.
        lag: readable messages that the group has not consumed. If it pops: those never handed out, and those not acknowledged.
        delay_ms: how long ago the first of them was stored; 0 if there is none.
    """

    committed: int | None
    end_offset: int
    lag: int
    delay_ms: int


def lag_of(
    store: Store, queue: QueueOfGroup, incarnation: int, committed: int | None, now_ms: int
) -> Lag:
    """Returns the lag. Raises StoreError while the queue is being healed, or if the message stands in a damaged part of the log."""
    _, topic, queue_id = queue
    next_offset = low_offset = committed or 0
    open_count = 0
    with store.popped.lock:
        popped = store.popped.find(queue, incarnation)
        if popped is not None:
            # A group that has changed from pops to pulls goes on at its committed offset.
            next_offset = max(next_offset, popped.next_offset)
            open_count = len(popped.open)
            low_offset = min(popped.open, default=next_offset)
    min_offset, end_offset = store.queue_range(topic, queue_id)
    first = max(low_offset, min_offset)
    count = max(end_offset - max(next_offset, min_offset), 0) + open_count
    delay_ms = 0
    if count:
        try:
            delay_ms = max(now_ms - store.store_time_of(topic, queue_id, first), 0)
        except KeyError:
            # Retention has deleted the message meanwhile.
            delay_ms = 0
    return Lag(committed, end_offset, count, delay_ms)
