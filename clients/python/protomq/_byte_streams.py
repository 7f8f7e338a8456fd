"""The bytes of a blocking connection to the remoting port: what stands under `Connection` and `PipelinedConnection`.

`TcpStream` is the only one today. TLS will be another class with these methods, opened in `open_stream`. (Coroutines have asyncio's
transports for that: `AsyncConnection` relies on nothing that a transport with TLS lacks.) Rules:

- A wait ends with BlockingIOError when the time-out is over. Time-outs are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO): one system call to wait
  and read, where Python's own need two.
- A stream may have received more than it was asked for: those bytes no selector reports (`has_received_ahead`).
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from ._interrupts import comes_of_signal
from ._remoting_hello import split_address
from .errors import ConnectFailedError

_SENDMSG_PARTS_MAX: Final = 512
"""Well below IOV_MAX (1024)."""
_TIMEVAL: Final = struct.Struct("@ll")


class BlockingStream(Protocol):
    """See the module's docstring. One thread at a time; all methods raise OSError for a broken connection."""

    @property
    def has_received_ahead(self) -> bool:
        """Whether there are bytes to receive that a selector does not report."""
        ...

    def fileno(self) -> int:
        """For selectors."""
        ...

    def set_timeout(self, timeout_ms: int, receive_ms: int | None = None) -> None:
        """How long a single wait may last from now on, and one to receive where that differs; at least 1."""
        ...

    def send(self, parts: Sequence[bytes]) -> None:
        """Sends all of it."""
        ...

    def recv_into(self, buffer: bytearray | memoryview, size: int = 0) -> int:
        """Waits for bytes; how many were written to the buffer, `size` at most (0: all that it takes). 0: the server has closed."""
        ...

    def recv_now(self, buffer: bytearray | memoryview) -> int:
        """The same without waiting: BlockingIOError if there is nothing."""
        ...

    def recv(self, size: int) -> bytes:
        """Waits for `size` bytes; returns fewer only if the time is over, or the server has closed."""
        ...

    def is_silent(self) -> bool:
        """Whether the connection is open, and there is nothing to receive."""
        ...

    def interrupt(self) -> None:
        """Ends a wait of the thread that uses it: nothing comes any more. Any thread."""
        ...

    def close(self) -> None:
        """Closes it."""
        ...


class TcpStream:
    """Plain TCP."""

    __slots__ = ("_sock",)

    has_received_ahead = False

    def __init__(self, sock: socket.socket) -> None:
        """Owns the socket from now on. Without `set_timeout` a wait has no end."""
        sock.settimeout(None)
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def set_timeout(self, timeout_ms: int, receive_ms: int | None = None) -> None:
        value = _TIMEVAL.pack(*divmod(timeout_ms * 1000, 1_000_000))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        if receive_ms is not None:
            value = _TIMEVAL.pack(*divmod(receive_ms * 1000, 1_000_000))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    def send(self, parts: Sequence[bytes]) -> None:
        if len(parts) > _SENDMSG_PARTS_MAX:
            parts = (b"".join(parts),)
        size = 0
        for part in parts:
            size += len(part)
        sent = self._sock.sendmsg(parts)
        if sent != size:
            self._sock.sendall(memoryview(b"".join(parts))[sent:])

    def recv_into(self, buffer: bytearray | memoryview, size: int = 0) -> int:
        return self._sock.recv_into(buffer, size)

    def recv_now(self, buffer: bytearray | memoryview) -> int:
        return self._sock.recv_into(buffer, 0, socket.MSG_DONTWAIT)

    def recv(self, size: int) -> bytes:
        return self._sock.recv(size, socket.MSG_WAITALL)

    def is_silent(self) -> bool:
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError as error:
            if comes_of_signal(error):
                raise
        return False  # Closed, or bytes that nobody asked for.

    def interrupt(self) -> None:
        with suppress(OSError):  # It is lost already.
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def open_stream(address: str, timeout_s: float, peer_timeout_s: float) -> BlockingStream:
    """A connected stream; raises ConnectFailedError."""
    host, port = split_address(address)
    try:
        sock = _connected(host, port, timeout_s)
    except OSError as error:
        if comes_of_signal(error):
            raise
        # The message has all that there is to say.
        raise ConnectFailedError(f"{address}: {error}") from None
    set_socket_options(sock, peer_timeout_s)
    return TcpStream(sock)


def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    """Where a name has several addresses, what is left of the time is shared among those that are left. Raises OSError."""
    deadline_s = time.monotonic() + timeout_s
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for left, (family, kind, protocol, _, place) in zip(range(len(found), 0, -1), found, strict=True):
        sock: socket.socket | None = None
        try:
            # A host without IPv6 refuses such a socket already.
            sock = socket.socket(family, kind, protocol)
            sock.settimeout(max((deadline_s - time.monotonic()) / left, 0.001))
            sock.connect(place)
            return sock
        except OSError as error:
            if sock is not None:
                sock.close()
            if left == 1 or comes_of_signal(error):
                raise
    raise OSError("the name has no address")


def set_socket_options(sock: socket.socket, peer_timeout_s: float) -> None:
    """No delay for small writes; a peer that is gone without a word is noticed in time, whether something is under way or not."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(peer_timeout_s / 2))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(int(peer_timeout_s / 6), 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # Else what is sent is repeated for a quarter of an hour.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(peer_timeout_s * 1000))
