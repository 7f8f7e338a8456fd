"""Prebuilt send requests, and the blocking connection over which loads send raw frames.

A prebuilt request still gets new sequence numbers before each send: a repeated one would be recognised and not stored.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from protomq.v1.remoting_pb2 import RemotingHello
from protomq.wire import record as layout
from protomq.wire.frames import (
    HEADER,
    HEADER_SIZE_BYTES,
    HELLO_METHOD_ID,
    LENGTH_SIZE_BYTES,
    MAGIC,
    encode_request,
)
from protomq.wire.record import RecordTemplate, encode_front, encode_record_field, encode_varint

LANE_SEND: Final = 2
LANE_PULL: Final = 3
LANE_ADMIN: Final = 5
SEND_METHOD_ID: Final = 0x0201
PULL_METHOD_ID: Final = 0x0301
CREATE_TOPIC_METHOD_ID: Final = 0x0501
PING_METHOD_ID: Final = 0x0508

_SOCKET_BUFFER_BYTES: Final = 4 << 20
_EXTRA: Final = HEADER_SIZE_BYTES - LENGTH_SIZE_BYTES


class BatchTemplate:
    """A SendRequest of equal records whose sequences, topic and queue can be replaced in place.

    All topics that it is asked for must be as long as the first.
    """

    def __init__(
        self,
        topic: str,
        count: int,
        body_size_bytes: int,
        *,
        with_keys: bool = False,
        is_delayed: bool = False,
    ) -> None:
        """`is_delayed`: the records have room for a due time, as the SDK writes them for a send with a delay."""
        self.count = count
        self._encoded_topic = topic.encode()
        rng = random.Random()  # Each load is a producer of its own.
        template = RecordTemplate(topic, rng.getrandbits(63) | 1, 0)
        body = rng.randbytes(body_size_bytes)
        now_ms = time.time_ns() // 1_000_000
        keys = [f"key-{index:06d}" if with_keys else "" for index in range(count)]
        fields = [
            encode_record_field(
                template.encode(
                    body,
                    index,
                    now_ms,
                    key=key,
                    front=encode_front([key]) if key else b"",
                    due_time_ms=0 if is_delayed else None,
                )
            )
            for index, key in enumerate(keys)
        ]
        self.record_size_bytes = len(fields[0])
        assert all(len(field) == self.record_size_bytes for field in fields)
        self.records = bytearray().join(fields)
        size = self.record_size_bytes
        self._sequences = self._view("<u8", size + layout.SEQUENCE_AT)
        self._order = np.arange(count, dtype="<u8")
        topic_at = (
            size - layout.trailer_size_bytes(self._encoded_topic, has_due_time=is_delayed) + 2
        )
        self._topics = self._view(f"S{len(self._encoded_topic)}", topic_at)
        self._sizes = struct.pack("<I", size - self._head_size()) * count
        self._next_sequence = 0

    def _view(self, kind: str, at: int) -> npt.NDArray[np.generic]:
        strides = (self.record_size_bytes,)
        return np.ndarray((self.count,), kind, self.records, at, strides)

    def _head_size(self) -> int:
        size = self.record_size_bytes
        for head in range(2, 7):
            if 1 + len(encode_varint(size - head)) == head:
                return head
        raise AssertionError(f"no varint makes a field of {size} bytes")

    def advance(self) -> None:
        """New sequence numbers for the next request."""
        self._sequences[:] = self._order + np.uint64(self._next_sequence)
        self._next_sequence += self.count

    def set_topic(self, topic: bytes) -> None:
        """Another topic of the same length."""
        assert len(topic) == len(self._encoded_topic)
        if topic != self._encoded_topic:
            self._topics[:] = topic
            self._encoded_topic = topic

    def tail(self, queue_id: int | None = None) -> bytes:
        """What follows the records in the request: topic, queue, sizes."""
        parts = [b"\x22", encode_varint(len(self._encoded_topic)), self._encoded_topic]
        if queue_id is not None:
            parts += [b"\x28", encode_varint(queue_id)]
        return b"".join((*parts, b"\x32", encode_varint(len(self._sizes)), self._sizes))


class RawConnection:
    """A blocking connection to a remoting port: one call at a time."""

    def __init__(self, address: str, lane: int) -> None:
        host, _, port = address.rpartition(":")
        # No time-out: with one, Python polls before each call. Whoever started this process ends it when it hangs.
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._header = bytearray(HEADER_SIZE_BYTES)
        self._next_id = 1
        hello = RemotingHello(lane=lane, client_id="bench").SerializeToString()  # type: ignore[arg-type]
        self.socket.sendall(
            MAGIC + HEADER.pack(len(hello) + _EXTRA, 0, HELLO_METHOD_ID, 0, 0, 0) + hello
        )
        self._receive_answer()

    def use_large_buffers(self) -> None:
        """For frames of hundreds of kilobytes."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)

    def send(self, method_id: int, parts: Sequence[bytes | bytearray | memoryview]) -> int:
        """A request whose answer is not waited for here; its id."""
        size = sum(map(len, parts))
        request_id = self._next_id
        self._next_id = request_id % 0xFFFFFFFF + 1
        header = encode_request(request_id, method_id, size)
        sent = self.socket.sendmsg((header, *parts))
        # A signal interrupted it; else a blocking socket takes all.
        if sent < size + HEADER_SIZE_BYTES:
            self.socket.sendall(memoryview(b"".join((header, *parts)))[sent:])
        return request_id

    def call(self, method_id: int, parts: Sequence[bytes | bytearray | memoryview]) -> bytes:
        """The payload of the answer; raises RuntimeError for an error status."""
        self.send(method_id, parts)
        return self._receive_answer()

    def receive_header(self) -> int:
        """Size of the payload that follows; raises RuntimeError for an error status."""
        self._receive_into(memoryview(self._header))
        length, _id, _method, _flags, status, _timeout = HEADER.unpack(self._header)
        if status:
            payload = bytearray(length - _EXTRA)
            self._receive_into(memoryview(payload))
            raise RuntimeError(f"status {status}: {bytes(payload)!r}")
        return int(length) - _EXTRA

    def receive_payload_into(self, buffer: memoryview) -> None:
        """The payload whose size `receive_header` told."""
        self._receive_into(buffer)

    def _receive_answer(self) -> bytes:
        payload = bytearray(self.receive_header())
        self._receive_into(memoryview(payload))
        return bytes(payload)

    def _receive_into(self, view: memoryview) -> None:
        while view:
            received = self.socket.recv_into(view, len(view), socket.MSG_WAITALL)
            if not received:
                raise ConnectionError("the server closed the connection")
            view = view[received:]

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
