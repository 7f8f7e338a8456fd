"""From which broker of its name a consumer is to pull next: the master, or a slave while messages are too old for memory.

This is RocketMQ's rule (accessMessageInMemoryMaxRatio, slaveReadEnable, suggestWhichBrokerId). What stands further behind the end of the
log than the page cache reaches comes from the disk. A slave reads it there, so that the master's disk has its time for sends.

Rules
- A broker says it with each answer, by its own log. So a consumer that has caught up at a slave is told to return by that slave.
- Nobody is sent to a slave from the end of a queue: there the master has the next message first.
- The slave is in sync, and has the messages. Queues are spread over the slaves.

No clock, socket or thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .replicas import ReplicaView

MASTER_ID: Final = 0


class SlaveReads:
    """See the module's docstring."""

    def __init__(self, broker_id: int, lag_max_bytes: int | None) -> None:
        """`lag_max_bytes`: messages further behind the end of the log are not in memory; None: nobody is sent to a slave."""
        self._broker_id = broker_id
        self._lag_max_bytes = lag_max_bytes

    def suggest(
        self, queue_id: int, position: int | None, log_end: int, slaves: Iterable[ReplicaView]
    ) -> int:
        """Returns the id of the broker from which to pull the next messages of a queue in which there are more.

        `position`: where the last message of this answer ends in the log; None: the answer has none. `slaves`: those of this master.
        """
        if self._lag_max_bytes is None:
            return MASTER_ID
        if position is None:  # Nothing is known of what comes: whoever searches goes on.
            return self._broker_id
        if log_end - position <= self._lag_max_bytes:
            return MASTER_ID
        if self._broker_id != MASTER_ID:
            return self._broker_id
        having = [each.replica_id for each in slaves if each.is_in_sync and each.written_position >= position]
        return having[queue_id % len(having)] if having else MASTER_ID
