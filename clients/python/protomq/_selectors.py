"""Which queue a message goes to.

- nothing said: the queues in turn, one request each (RocketMQ: ThreadLocalIndex). Messages that gather while the line is busy
  travel together. So requests take turns, not messages; in the long run both spread evenly.
- `sharding_key`: queue number `hash63(UTF-8 of the key) % queue count` of the queues ordered by broker name and queue id. The
  hash (wire/hashing.py) is made of two standard checksums, so every language and every process agrees. Python's own hash()
  differs from run to run.
- `queue`: that queue.
- `selector`: any callable (queues, message) -> MessageQueue.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._outgoing import OutgoingMessage
    from ._types import MessageQueue

    QueueSelector = Callable[[Sequence[MessageQueue], OutgoingMessage], MessageQueue]


class RoundRobin:
    """Takes queues in turn, from a random start, so that many producers do not begin with the same queue. Any thread."""

    __slots__ = ("_counter",)

    def __init__(self, first: int | None = None) -> None:
        self._counter = itertools.count(random.randrange(1 << 16) if first is None else first)

    def next_queue(
        self,
        queues: Sequence[MessageQueue],
        *,
        avoid_broker: str = "",
        is_available: Callable[[str], bool] | None = None,
    ) -> MessageQueue:
        """The next queue, of an available broker other than `avoid_broker` if there is one, else of an available one, else of any."""
        start = next(self._counter)
        count = len(queues)
        if not avoid_broker and is_available is None:
            return queues[start % count]
        second_choice: MessageQueue | None = None
        for index in range(start, start + count):
            queue = queues[index % count]
            if is_available is not None and not is_available(queue.broker_name):
                continue
            if queue.broker_name != avoid_broker:
                return queue
            second_choice = second_choice or queue
        return second_choice or queues[start % count]
