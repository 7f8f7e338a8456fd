"""The connections of a lane: which there are, what the kernel is asked about each, and which are dropped for standing still.

    expect ─▶ add ─▶ polled for what it can use ─▶ close: by its peer, by an error, by the sweep, with the lane
                     └▶ resumable: may go on without an event of the kernel

Lane thread only, except for `expect` (the acceptor) and `count` (any thread).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from .connection import STALL_TIMEOUT_S, Connection
from .regions import ShortFileError

logger = logging.getLogger(__name__)

UNFINISHED_SIZE_MAX_BYTES: Final = 256 << 20
"""Memory of frames that have begun and not ended, over all connections of a lane: beyond it, those that wait longest are closed."""


class Poll(Protocol):
    """What a lane sleeps in, as far as the table needs it: `select.epoll`."""

    def register(self, fd: int, eventmask: int, /) -> None: ...

    def modify(self, fd: int, eventmask: int, /) -> None: ...

    def unregister(self, fd: int, /) -> None: ...


class ConnectionTable:
    """See the module's docstring."""

    def __init__(self, lane_name: str, poll: Poll, on_closed: Callable[[str], None]) -> None:
        """`on_closed` is told the peer of each connection that is closed."""
        self._lane_name = lane_name
        self._poll = poll
        self._on_closed = on_closed
        self.by_descriptor: dict[int, Connection] = {}
        """Changed by `add` and `close` only."""
        self.resumable: list[Connection] = []
        """Connections with frames of before, or with bytes that no poll reports, which may be served again. Perhaps closed since."""
        self._expected_count = 0
        """Counted by the acceptor, the next one by the lane."""
        self._added_count = 0

    @property
    def count(self) -> int:
        """Connections of the lane, with those that it has been given and has not added yet."""
        return len(self.by_descriptor) + self._expected_count - self._added_count

    def expect(self) -> None:
        """A connection is on its way to the lane."""
        self._expected_count += 1

    def add(self, connection: Connection, now: float) -> None:
        """Takes in a connection that was expected."""
        self._added_count += 1
        connection.progress_at = now
        connection.poll_mask = connection.wanted_events()
        self.by_descriptor[connection.descriptor] = connection
        self._poll.register(connection.descriptor, connection.poll_mask)
        self._note_resumable(connection)

    def update_poll(self, connection: Connection) -> None:
        """Asks the kernel for what the connection can use now."""
        self._note_resumable(connection)
        mask = connection.wanted_events()
        if mask != connection.poll_mask:
            self._poll.modify(connection.descriptor, mask)
            connection.poll_mask = mask

    def take_resumable(self) -> list[Connection]:
        """Those of `resumable` that are open, and not clogged since: each once. It is empty then."""
        taken, self.resumable = self.resumable, []
        return [connection for connection in dict.fromkeys(taken) if not (connection.closed or connection.is_clogged)]

    def close(self, connection: Connection, error: BaseException | None = None) -> None:
        """Closes it, and tells the calls that are held for it; `error`: why, None if its peer has ended it. Harmless if it is closed."""
        if connection.closed:
            return
        connection.closed = True
        if isinstance(error, ShortFileError):
            logger.error("%s: %s: closed %s", self._lane_name, error, connection.peer)
        elif error is not None:
            # A client that ends with an unread answer, of a held pull say, resets its connection: nothing is wrong.
            level = logging.DEBUG if isinstance(error, ConnectionResetError | BrokenPipeError) else logging.INFO
            logger.log(level, "%s: %s: closed %s", self._lane_name, error, connection.peer)
        del self.by_descriptor[connection.descriptor]
        self._poll.unregister(connection.descriptor)
        connection.stream.close()
        connection.out.clear()
        connection.queue = None
        connection.backlog.clear()
        self._on_closed(connection.peer)
        held, connection.held = connection.held, {}
        for call in held.values():
            if call.lane is connection.lane:
                call.caller_gone()
            else:
                call.lane.post(call.caller_gone)

    def sweep(self, now: float) -> None:
        """Drops connections that stand still in the middle of a frame or of an answer, and bounds the memory of frames."""
        limit = now - STALL_TIMEOUT_S
        stalled = [
            connection
            for connection in self.by_descriptor.values()
            if connection.progress_at < limit and (connection.queue or connection.reader.in_frame)
        ]
        for connection in stalled:
            logger.warning(
                "%s: no progress for %d s: closed %s",
                self._lane_name,
                STALL_TIMEOUT_S,
                connection.peer,
            )
            self.close(connection)
        self._bound_unfinished()

    def has_unsent(self) -> bool:
        """Whether any answer has not left yet."""
        return any(connection.queue for connection in self.by_descriptor.values())

    def close_all(self, scratch: memoryview) -> None:
        """The lane ends. What is read into `scratch` is thrown away."""
        for connection in list(self.by_descriptor.values()):
            try:
                connection.stream.end(scratch)
            except OSError:
                pass
            self.close(connection)

    def _note_resumable(self, connection: Connection) -> None:
        if connection.is_clogged:
            return
        if connection.backlog or (
            not connection.is_direct and connection.stream.has_received_ahead
        ):
            self.resumable.append(connection)

    def _bound_unfinished(self) -> None:
        """Nobody may fill the memory with frames that never end: each is small enough, thousands of them are not."""
        unfinished = [c for c in self.by_descriptor.values() if c.reader.held_size_bytes]
        size_bytes = sum(connection.reader.held_size_bytes for connection in unfinished)
        unfinished.sort(key=lambda connection: connection.progress_at, reverse=True)
        while size_bytes > UNFINISHED_SIZE_MAX_BYTES:
            connection = unfinished.pop()
            size_bytes -= connection.reader.held_size_bytes
            logger.warning(
                "%s: too many unfinished frames: closed %s", self._lane_name, connection.peer
            )
            self.close(connection)
