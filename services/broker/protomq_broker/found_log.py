"""What a broker found in its log when it began, as far as nobody may read it yet.

An earlier master may have given it to clients, even if this broker does not know yet that it is confirmed. So an offset in it is not
illegal, and the end of a queue may lie in it (KIP-207).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .slave_gate import replica_behind

if TYPE_CHECKING:
    from .store.store import Store


class FoundLog:
    """See the module's docstring. Make it before the store appends. Any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._end_position = store.positions.appended

    @property
    def is_readable(self) -> bool:
        """Whether all of it may be given: then this broker knows as much of a queue's end as any master before it."""
        return self._store.positions.readable >= self._end_position

    def check_readable(self, topic: str, queue_id: int) -> None:
        """Raises ServiceError while a queue has messages that may not be given yet and that an earlier master may have given."""
        if self.is_readable:
            return
        readable_end = self._store.queue_range(topic, queue_id)[1]
        end_offset = self._store.appended_end_offset(topic, queue_id)
        if readable_end < end_offset and not self.is_readable:
            raise replica_behind(topic, queue_id, end_offset, readable_end)
