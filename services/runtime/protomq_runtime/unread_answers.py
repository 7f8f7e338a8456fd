"""Bounds what is in memory for callers that do not read their answers.

An answer over gRPC is made in memory and stays there until the caller's HTTP/2 window lets it go. Without a bound, four connections
that asked for 16 MiB a hundred times and read nothing cost the broker 2.5 GiB. Here a connection's next large answer is begun only
when there is room: until then it is a list of file regions, which cost nothing. (The remoting port sends files as they are and needs
none of this.)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Connection:
    unread_size_bytes: int = 0
    waiting: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)


class UnreadAnswers:
    """Of each connection: the size of the answers that are made and not taken, and those that wait to be made. Any thread."""

    def __init__(self, size_max_bytes: int) -> None:
        """`size_max_bytes`: of one connection's answers together. A single one may be larger: then it is alone."""
        self._size_max_bytes = size_max_bytes
        self._connections: dict[str, _Connection] = {}
        self._lock = threading.Lock()

    def begin(self, peer: str, size_bytes: int, start: Callable[[], None]) -> None:
        """Calls `start`, at once or from another thread's `settle`, when an answer of that size may be made; in the order of asking.

        Each answer that was started is to be settled once.
        """
        with self._lock:
            connection = self._connections.setdefault(peer, _Connection())
            if connection.waiting or not self._fits(connection, size_bytes):
                connection.waiting.append((size_bytes, start))
                return
            connection.unread_size_bytes += size_bytes
        start()

    def settle(self, peer: str, size_bytes: int) -> None:
        """An answer was taken, or never will be: those that have waited are started if there is room for them."""
        ready: list[Callable[[], None]] = []
        with self._lock:
            connection = self._connections[peer]
            connection.unread_size_bytes -= size_bytes
            waiting = connection.waiting
            while waiting and self._fits(connection, waiting[0][0]):
                next_size_bytes, start = waiting.popleft()
                connection.unread_size_bytes += next_size_bytes
                ready.append(start)
            if not connection.unread_size_bytes:
                del self._connections[peer]
        for start in ready:
            start()

    def _fits(self, connection: _Connection, size_bytes: int) -> bool:
        unread = connection.unread_size_bytes
        return not unread or unread + size_bytes <= self._size_max_bytes
