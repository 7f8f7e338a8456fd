"""How far groups are behind: in messages, and in time. Reads the store; any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .store.store import Store


class Lag(NamedTuple):
    """Of a group in one queue.

    Attributes:
        committed: where it goes on; None: it has committed nothing.
        end_offset: one past the last readable offset.
        lag: readable messages that it has not consumed.
        delay_ms: how long ago the first of them was stored; 0 if there is none.
    """

    committed: int | None
    end_offset: int
    lag: int
    delay_ms: int


def lag_of(store: Store, topic: str, queue_id: int, committed: int | None, now_ms: int) -> Lag:
    """Raises StoreError where the queue is being healed, or the message stands in a damaged part of the log."""
    min_offset, end_offset = store.queue_range(topic, queue_id)
    first = max(committed or 0, min_offset)
    count = max(end_offset - first, 0)
    delay_ms = 0
    if count:
        try:
            delay_ms = max(now_ms - store.store_time_of(topic, queue_id, first), 0)
        except KeyError:  # retention has taken it meanwhile
            delay_ms = 0
    return Lag(committed, end_offset, count, delay_ms)
