"""A byte stream without a socket: what it receives is given to it, what it sends is kept, and it takes no more than it has room for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from protomq_runtime.byte_stream import WANTS_TO_RECEIVE, Piece
from protomq_runtime.regions import RecentRegion, Region, read_regions

_descriptors = itertools.count(1_000)


class MemoryStream:
    """A ByteStream. `room`: how many bytes it takes until it is given more."""

    def __init__(self, room: int = 1 << 30, *, is_direct: bool = True) -> None:
        self.is_direct = is_direct
        self.room = room
        self.sent = bytearray()
        self.received = bytearray()
        """What is there to be received."""
        self.ahead_size_bytes = 0
        """Of it, what the poll does not tell of; for streams that are not direct."""
        self.peer_has_ended = False
        self.must_send_first = False
        """For streams that are not direct: whether receiving waits for room to send."""
        self.is_ended = False
        self.is_closed = False
        self.operations: list[str] = []
        """Those that took bytes: `send`, `pieces` or `region`."""
        self._descriptor = next(_descriptors)

    @property
    def has_received_ahead(self) -> bool:
        return self.ahead_size_bytes > 0

    def fileno(self) -> int:
        return self._descriptor

    def poll_mask(self, wanted: int) -> int:
        return wanted ^ 0b101 if self.must_send_first and wanted == WANTS_TO_RECEIVE else wanted

    def ready(self, events: int) -> int:
        return events | WANTS_TO_RECEIVE if self.must_send_first else events

    def recv_into(self, buffer: memoryview, /) -> int:
        if self.must_send_first:
            raise BlockingIOError
        if not self.received:
            if self.peer_has_ended:
                return 0
            raise BlockingIOError
        count = min(len(buffer), len(self.received), self.ahead_size_bytes or len(self.received))
        buffer[:count] = self.received[:count]
        del self.received[:count]
        self.ahead_size_bytes = max(self.ahead_size_bytes - count, 0)
        return count

    def send(self, data: bytes, /) -> int:
        return self._take("send", data)

    def send_pieces(self, pieces: Sequence[Piece], *, more: bool) -> int:
        return self._take("pieces", b"".join(pieces))

    def send_region(self, region: Region | RecentRegion) -> int:
        return self._take("region", b"".join(read_regions([region])))

    def end(self, scratch: memoryview) -> None:
        self.is_ended = True

    def close(self) -> None:
        assert not self.is_closed, "a stream is closed once"
        self.is_closed = True

    def _take(self, operation: str, data: bytes) -> int:
        if not self.room:
            raise BlockingIOError
        taken = data[: self.room]
        self.room -= len(taken)
        self.sent += taken
        self.operations.append(operation)
        return len(taken)
