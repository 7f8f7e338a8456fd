"""Where the log of a store stands: every position in one place, and who is told when one moves.

    flushed      on stable storage below it
    appended     the end of the log: everything below it is written, and all that is derived from the log has it
    replicated   the replicas that are waited for have everything below it; on a follower: what its leader says is confirmed
    confirmed    no fail-over takes back anything below it: the log has it here and there
    readable     nothing at or beyond it is given to anybody, and no answer claims it is stored

    confirmed = readable = appended under ASYNC_FLUSH, flushed under SYNC_FLUSH; but never beyond replicated where replicas are waited for

    flushed <= appended, readable <= appended; none of them ever goes back.

The writer moves `appended`, whoever has synced the log moves `flushed`, whoever talks to the replicas moves `replicated`: each one at a
time. Listeners are called on those threads, after the move; a listener that fails is logged and harms nobody.
"""

from __future__ import annotations

import logging
import threading
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
        replicated: position below which all is on the replicas that count, or confirmed by the leader.
        readable: position below which all may be given.
        on_appended: told where the log ends now. The writer.
        on_arrival: called with the queues that got readable messages.
        on_flushed: told the flushed position when it has moved, and when it never will again, because the log has failed.
    """

    __slots__ = (
        "_arrivals",
        "_lock",
        "_waits",
        "_waits_for_flush",
        "_waits_for_replicas",
        "flushed",
        "on_appended",
        "on_arrival",
        "on_flushed",
        "readable",
        "replicated",
        "tail",
    )

    def __init__(
        self,
        tail: LogTail,
        flushed: int,
        *,
        waits_for_flush: bool = False,
        waits_for_replicas: bool = False,
    ) -> None:
        """`waits_for_flush`: SYNC_FLUSH; `waits_for_replicas`: nothing is readable before `note_replicated` says so."""
        assert flushed <= tail.position
        self.tail = tail
        self.flushed = flushed
        self.replicated = 0
        self.readable = 0
        self.on_appended: list[Callable[[int], None]] = []
        self.on_arrival: list[Callable[[Sequence[QueueKey]], None]] = []
        self.on_flushed: list[Callable[[int], None]] = []
        self._waits_for_flush = waits_for_flush
        self._waits_for_replicas = waits_for_replicas
        self._waits = waits_for_flush or waits_for_replicas
        self._arrivals: deque[tuple[int, Sequence[QueueKey]]] = deque()
        self._lock = threading.Lock()  # of `readable` and of what is taken from the arrivals
        self.readable = self._bound()

    @property
    def appended(self) -> int:
        """The end of the log."""
        return self.tail.position

    @property
    def confirmed(self) -> int:
        """No fail-over takes back anything below it."""
        return self.readable

    @property
    def waits_for_replicas(self) -> bool:
        """Whether nothing is confirmed before replicas have it."""
        return self._waits_for_replicas

    def expect(self, keys: Sequence[QueueKey]) -> None:
        """A start has found more than may be read yet. Who waits for messages of these queues is woken when all of it may be read. Call it
        before the first append.
        """
        if self.readable < self.tail.position:
            self._arrivals.append((self.tail.position, keys))

    def waits_for_disk(self, position: int) -> bool:
        """Whether the log up to `position` is to be synced before it is confirmed, and is not yet."""
        return position > self.flushed and (self._waits_for_flush or not self._waits_for_replicas)

    def publish(self, tail: LogTail, keys: Sequence[QueueKey]) -> None:
        """An append is whole; `keys`: the queues that it went to. The writer."""
        if self._waits:
            # Before the position is published: the flusher may be faster than we are.
            self._arrivals.append((tail.position, keys))
            self.tail = tail
            if self._waits_for_replicas:  # they may be ahead
                self._advance()
            if self.on_appended:
                _tell(self.on_appended, tail.position)
            return
        self.tail = tail
        self.readable = position = tail.position
        # `_tell`, written out: this runs once for each small send.
        for arrived in self.on_arrival:
            try:
                arrived(keys)
            except Exception as error:
                _report(error)
        for appended in self.on_appended:
            try:
                appended(position)
            except Exception as error:
                _report(error)

    def note_flushed(self, position: int) -> None:
        """Everything below `position` is synced. Who has synced it, one at a time."""
        self.flushed = position
        if self._waits:
            self._advance()
        _tell(self.on_flushed, position)

    def note_replicated(self, position: int) -> None:
        """The replicas that count have everything below `position`; on a follower: it is confirmed. A lower one than before is ignored."""
        with self._lock:
            self.replicated = max(self.replicated, position)
        if self._waits:
            self._advance()

    def wait_for_replicas(self, wanted: bool) -> None:
        """Whether replicas are waited for from now on. What is readable stays so. The writer."""
        with self._lock:
            self._waits_for_replicas = wanted
            if wanted:
                self._waits = True
        self._advance()
        with self._lock:  # nobody is in the middle of a move then
            self._waits = self._waits_for_flush or wanted

    def _bound(self) -> int:
        """Up to where the log may be read by all that is waited for."""
        bound = self.flushed if self._waits_for_flush else self.tail.position
        return min(bound, self.replicated) if self._waits_for_replicas else bound

    def _advance(self) -> None:
        """Moves `readable` as far as it may go. Any thread."""
        keys: list[QueueKey] = []
        arrivals = self._arrivals
        with self._lock:
            if not self._waits:
                return  # the writer alone moves it
            self.readable = readable = max(self.readable, self._bound())
            while arrivals and arrivals[0][0] <= readable:
                keys += arrivals.popleft()[1]
        if keys:
            _tell(self.on_arrival, keys)

    def note_failed(self) -> None:
        """The log has failed: no position moves any more, and who waits for one has to look why. Any thread."""
        _tell(self.on_flushed, self.flushed)


def _tell(listeners: Sequence[Callable[[T], None]], what: T) -> None:
    for listener in listeners:
        try:
            listener(what)
        except Exception as error:
            _report(error)


def _report(error: Exception) -> None:
    """What has happened has happened: its maker must not be told otherwise."""
    log.error("a listener for the log's positions failed", exc_info=error)
