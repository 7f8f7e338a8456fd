"""Where the log of a store stands: every position in one place, and who is told when one moves.

    flushed     on stable storage below it
    appended    the end of the log: everything below it is written, and all that is derived from the log has it
    readable    nothing at or beyond it is given to anybody, and no answer claims it is stored:
                appended under ASYNC_FLUSH, flushed under SYNC_FLUSH

    flushed <= appended, readable <= appended; none of them ever goes back.

The writer moves `appended`, whoever has synced the log moves `flushed`, one at a time. Listeners are called on those threads, after the
move; a listener that fails is logged and harms nobody.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
QueueKey = tuple[str, int]
"""Topic and queue id."""


class LogTail(NamedTuple):
    """The end of the log.

    Attributes: position: where the next append starts; crc32c: CRC of the last seal; store_time_ms: of the last append.
    """

    position: int
    crc32c: int
    store_time_ms: int


class Positions:
    """See the module's docstring. Any thread may read.

    Attributes:
        tail: the end of the log as it is published.
        flushed: position below which all is synced.
        readable: position below which all may be given.
        on_arrival: told of the queues that got readable messages.
        on_flushed: told the flushed position when it has moved, and when it never will again, because the log has failed.
    """

    __slots__ = (
        "_arrivals",
        "_waits_for_flush",
        "flushed",
        "on_arrival",
        "on_flushed",
        "readable",
        "tail",
    )

    def __init__(self, tail: LogTail, flushed: int, *, waits_for_flush: bool = False) -> None:
        """`waits_for_flush`: SYNC_FLUSH."""
        assert flushed <= tail.position
        self.tail = tail
        self.flushed = flushed
        self.readable = flushed if waits_for_flush else tail.position
        self.on_arrival: list[Callable[[Sequence[QueueKey]], None]] = []
        self.on_flushed: list[Callable[[int], None]] = []
        self._waits_for_flush = waits_for_flush
        self._arrivals: deque[tuple[int, Sequence[QueueKey]]] = deque()

    @property
    def appended(self) -> int:
        """The end of the log."""
        return self.tail.position

    def publish(self, tail: LogTail, keys: Sequence[QueueKey]) -> None:
        """An append is whole; `keys`: the queues that it went to. The writer."""
        if self._waits_for_flush:
            # Before the position is published: the flusher may be faster than we are.
            self._arrivals.append((tail.position, keys))
            self.tail = tail
            return
        self.tail = tail
        self.readable = tail.position
        if self.on_arrival:
            _tell(self.on_arrival, keys)

    def note_flushed(self, position: int) -> None:
        """Everything below `position` is synced. Who has synced it, one at a time."""
        self.flushed = position
        keys: list[QueueKey] = []
        if self._waits_for_flush:
            self.readable = position
            arrivals = self._arrivals
            while arrivals and arrivals[0][0] <= position:
                keys += arrivals.popleft()[1]
        if keys:
            _tell(self.on_arrival, keys)
        _tell(self.on_flushed, position)

    def note_failed(self) -> None:
        """The log has failed: no position moves any more, and who waits for one has to look why. Any thread."""
        _tell(self.on_flushed, self.flushed)


def _tell(listeners: Sequence[Callable[[T], None]], what: T) -> None:
    for listener in listeners:
        try:
            listener(what)
        except Exception:  # what has happened has happened: its maker must not be told otherwise
            log.exception("a listener for the log's positions failed")
