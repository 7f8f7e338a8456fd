"""A byte stream that behaves as TLS would, without its ciphers: what it sends and receives are the plain bytes of the socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from protomq._byte_streams import TcpStream
from protomq_runtime.byte_stream import WANTS_TO_RECEIVE, WANTS_TO_SEND, Piece
from protomq_runtime.regions import RecentRegion, Region, ShortFileError

RECORD_SIZE_BYTES = 16 << 10
"""What TLS receives and sends at once."""


class UserSpaceStream:
    """Everything passes through memory of this process. What it does that plain TCP does not:

    - It receives whole records, hands them out in parts, and keeps the rest, of which the poll knows nothing.
    - Before every third record it must be able to send, as after a change of keys.
    - It takes pieces and regions a record at a time, and may stop in the middle of any.
    """

    is_direct = False

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._ahead = b""
        self._record_count = 0
        self._must_send_first = False

    @property
    def has_received_ahead(self) -> bool:
        return bool(self._ahead)

    def fileno(self) -> int:
        return self._socket.fileno()

    def poll_mask(self, wanted: int) -> int:
        if wanted & WANTS_TO_RECEIVE and self._must_send_first:
            return wanted & ~WANTS_TO_RECEIVE | WANTS_TO_SEND
        return wanted

    def ready(self, events: int) -> int:
        if events & WANTS_TO_SEND and self._must_send_first:
            return events | WANTS_TO_RECEIVE
        return events

    def recv_into(self, buffer: memoryview, /) -> int:
        if not self._ahead:
            self._ahead = self._receive_record()
        part = self._ahead[: max(1, min(len(buffer), len(self._ahead) * 2 // 3))]
        buffer[: len(part)] = part
        self._ahead = self._ahead[len(part) :]
        return len(part)

    def send(self, data: bytes, /) -> int:
        return self.send_pieces([data], more=False)

    def send_pieces(self, pieces: Sequence[Piece], *, more: bool) -> int:
        data = b"".join(pieces)
        sent = 0
        while sent < len(data):
            record = data[sent : sent + RECORD_SIZE_BYTES]
            taken = self._send_some(record, is_first=not sent)
            sent += taken
            if taken < len(record):
                break
        return sent

    def send_region(self, region: Region | RecentRegion) -> int:
        sent = 0
        while sent < region.size_bytes:
            size = min(RECORD_SIZE_BYTES, region.size_bytes - sent)
            record = os.pread(region.file.fileno(), size, region.offset + sent)
            if not record:
                raise ShortFileError(f"{region.file!r} ends at {region.offset + sent}")
            taken = self._send_some(record, is_first=not sent)
            sent += taken
            if taken < len(record):
                break
        return sent

    def end(self, scratch: memoryview) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.recv_into(scratch)

    def close(self) -> None:
        self._socket.close()

    def _receive_record(self) -> bytes:
        if not self._must_send_first and self._record_count % 3 == 2:
            self._must_send_first = True
            raise BlockingIOError
        self._must_send_first = False
        record = self._socket.recv(RECORD_SIZE_BYTES)
        self._record_count += 1
        return record

    def _send_some(self, record: bytes, *, is_first: bool) -> int:
        try:
            return self._socket.send(record)
        except BlockingIOError:
            if is_first:
                raise
            return 0


class UserSpaceBlockingStream(TcpStream):
    """The same for the SDK's blocking connections: what was received ahead is handed out in parts, and no selector tells of it."""

    __slots__ = ("_ahead",)

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._ahead = b""

    @property
    def has_received_ahead(self) -> bool:  # type: ignore[override]
        return bool(self._ahead)

    def recv_into(self, buffer: bytearray | memoryview, size: int = 0) -> int:
        return self._give(buffer, size or len(buffer), 0)

    def recv_now(self, buffer: bytearray | memoryview) -> int:
        return self._give(buffer, len(buffer), socket.MSG_DONTWAIT)

    def recv(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = bytearray(size - len(data))
            try:
                count = self._give(part, len(part), 0)
            except BlockingIOError:
                if not data:
                    raise
                break
            if not count:
                break
            data += part[:count]
        return data

    def send(self, parts: Sequence[bytes]) -> None:
        data = memoryview(b"".join(parts))
        for start in range(0, len(data), RECORD_SIZE_BYTES):
            self._sock.sendall(data[start : start + RECORD_SIZE_BYTES])

    def is_silent(self) -> bool:
        return not self._ahead and super().is_silent()

    def _give(self, buffer: bytearray | memoryview, size: int, flags: int) -> int:
        if not self._ahead:
            self._ahead = self._sock.recv(RECORD_SIZE_BYTES, flags)
        part = self._ahead[:size]
        buffer[: len(part)] = part
        self._ahead = self._ahead[len(part) :]
        return len(part)
