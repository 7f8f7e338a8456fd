"""Which queue the messages of a send go to, if its request names none.

- With a sharding key: the queue of the key among the topic's write queues. So messages of one key stay in order, whatever client sends
  them. Where this broker alone has the topic, the SDK chooses the same queue. A request has one queue, so its messages may have one key.
  Those without a key go along.
- Without: the queues in turn.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from protomq.wire.hashing import sharded_index
from protomq.wire.record import SHARDING_HASH_AT
from protomq_runtime.errors import invalid_argument

from .store.log.front import sharding_keys_of
from .store.log.record_region import sharding_hashes_of

if TYPE_CHECKING:
    from .store.log.append import RecordRegion
    from .store.state.topics import TopicConfig

_SHARDING_HASH: Final = slice(SHARDING_HASH_AT, SHARDING_HASH_AT + 4)
"""Of the last record in a region."""
_NO_KEY: Final = bytes(4)


class QueueChoice:
    """Chooses queues. The send lane."""

    def __init__(self) -> None:
        self._next_queue: dict[str, itertools.count[int]] = {}

    def choose(self, topic: TopicConfig, region: RecordRegion, exists: bool) -> int:
        """The queue for the messages of a request. Raises ServiceError if they have different sharding keys.

        `exists`: whether there is the topic yet. If not, it has no turns, since the send may be refused.
        """
        if region.starts is None:
            has_key = region.data[_SHARDING_HASH] != _NO_KEY
        else:
            has_key = bool(np.count_nonzero(sharding_hashes_of(region)))
        if has_key:
            keys = sharding_keys_of(region.data)
            if len(keys) > 1:
                first, second = sorted(keys)[:2]
                raise invalid_argument(
                    "queue_id",
                    f"is needed: the messages have different sharding keys, such as {first!r} and {second!r}. Name the queue, or send the"
                    " messages of each key by themselves",
                )
            for key in keys:
                return sharded_index(key, topic.write_queues)
        if not exists:
            return 0
        turn = self._next_queue.get(topic.name)
        if turn is None:
            turn = self._next_queue[topic.name] = itertools.count()
        return next(turn) % topic.write_queues

    def begin(self, topic: str) -> None:
        """The turns of a topic that its first message has created, in queue 0 unless a key has chosen."""
        self._next_queue.setdefault(topic, itertools.count(1))
