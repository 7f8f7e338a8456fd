"""The bytes of one connection of the remoting port, both ways: what stands under a `Connection`.

`TcpStream` is the only one today. TLS will be another class with these methods, and nothing above will change; so nothing above
relies on more than this:

- Nothing waits. What cannot be done now raises BlockingIOError; it is tried again when `ready` says so.
- A stream may need the opposite of what it is asked for: now and then TLS has to send before it can receive. So the owner asks the poll
  for `poll_mask(what it wants)`, and does what `ready(events)` says.
- A stream may have received more than it was asked for. No poll reports those bytes (`has_received_ahead`).
- Bytes for which `send` raised BlockingIOError stand first in what is sent next. There may be more behind them.
- A region of a file is the stream's to move: plain TCP leaves it to the kernel, TLS has to read it. `RecentRegion` says that its pages are
  in memory.

A stream for which the middle two never happen says so by `is_direct`, and costs its owner no look.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

from .regions import MappedWindow, RecentRegion, Region, ShortFileError, note_failed_read

Piece: TypeAlias = bytes | memoryview

WANTS_TO_RECEIVE: Final = select.EPOLLIN
WANTS_TO_SEND: Final = select.EPOLLOUT


class ByteStream(Protocol):
    """See the module's docstring. One thread at a time; all methods raise OSError for a broken connection."""

    @property
    def is_direct(self) -> bool:
        """Whether the poll's events mean what they say, and report all bytes that can be received."""
        ...

    @property
    def has_received_ahead(self) -> bool:
        """Whether `recv_into` would give bytes that the poll does not report."""
        ...

    def fileno(self) -> int:
        """What to poll."""
        ...

    def poll_mask(self, wanted: int) -> int:
        """The events to poll for, where `wanted` is WANTS_TO_RECEIVE, WANTS_TO_SEND, both or 0. Ask again after each BlockingIOError."""
        ...

    def ready(self, events: int) -> int:
        """Which of the two to try after these events; the bits of a broken connection stay."""
        ...

    def recv_into(self, buffer: memoryview, /) -> int:
        """How many bytes were written to the buffer, which is not empty; 0: the peer has ended its half."""
        ...

    def send(self, data: bytes, /) -> int:
        """How many bytes were taken."""
        ...

    def send_pieces(self, pieces: Sequence[Piece], *, more: bool) -> int:
        """How many bytes were taken, from the first on; at most 1,000 pieces. `more`: others follow at once, a packet may wait for them."""
        ...

    def send_region(self, region: Region | RecentRegion) -> int:
        """How many bytes of the region's start were taken, at least one. Raises ShortFileError if the file ends before it."""
        ...

    def end(self, scratch: memoryview) -> None:
        """Tells the peer that nothing more comes. Takes what it has sent meanwhile: unread, it could destroy answers on their way."""
        ...

    def close(self) -> None:
        """Gives the descriptor back. Once."""
        ...


class TcpStream:
    """Plain TCP: the socket's own methods, regions by sendfile.

    A recent region is sent from a mapping. That copies its bytes, and yet takes half the CPU time. For sendfile the kernel looks up each
    page, marks it as used, and hands over 64 KiB at a time.
    """

    __slots__ = ("_socket", "_window", "recv_into", "send")

    is_direct = True
    has_received_ahead = False

    def __init__(self, sock: socket.socket) -> None:
        """Owns the socket from now on, which does not block."""
        self._socket = sock
        self._window: MappedWindow | None = None
        self.recv_into: Callable[[memoryview], int] = sock.recv_into
        self.send: Callable[[bytes], int] = sock.send

    def fileno(self) -> int:
        return self._socket.fileno()

    def poll_mask(self, wanted: int) -> int:
        return wanted

    def ready(self, events: int) -> int:
        return events

    def send_pieces(self, pieces: Sequence[Piece], *, more: bool) -> int:
        # MSG_MORE: the kernel puts a header and the start of the region behind it into one packet.
        return self._socket.sendmsg(pieces, (), socket.MSG_MORE if more else 0)

    def send_region(self, region: Region | RecentRegion) -> int:
        try:
            if isinstance(region, RecentRegion):
                return self._send_mapped(region)
            # What was mapped would keep its file.
            self._window = None
            sent = os.sendfile(
                self._socket.fileno(), region.file.fileno(), region.offset, region.size_bytes
            )
        except OSError as error:
            note_failed_read(region.file, error)
            raise
        if sent == 0:
            raise ShortFileError(
                f"nothing at {region.offset} of {region.file!r}, {region.size_bytes} bytes wanted"
            )
        return sent

    def _send_mapped(self, region: RecentRegion) -> int:
        view = self._window.view(region) if self._window is not None else None
        if not view:
            self._window = MappedWindow(region)
            view = self._window.view(region)
        return self._socket.send(view)

    def end(self, scratch: memoryview) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.recv_into(scratch)

    def close(self) -> None:
        self._window = None
        self._socket.close()
