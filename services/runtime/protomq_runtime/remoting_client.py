"""A client of the remoting port for servers: one blocking connection, one thread.

A broker uses it to talk to name servers: a few calls a minute, and one that stays open as long as the connection lives. So
calls can be started and their answers awaited apart, in any order. The SDK has its own transports, made for speed.

    connect -> MAGIC, hello -> welcome      a peer that says something else is no remoting port: NotRemotingError
    start(method, payload) -> request id    wait(request ids) -> Answer        call(...) = both

A connection that failed once, or on which a frame was cut short by a time-out, is of no use any more: close it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from protomq.v1.options_pb2 import Lane
from protomq.v1.remoting_pb2 import RemotingHello, RemotingWelcome
from protomq.wire import frames
from protomq.wire.status import decode_status

from .addresses import Address
from .errors import Code, ServiceError

_READ_SIZE_BYTES: Final = 64 << 10
_WELCOME_SIZE_MAX_BYTES: Final = 4 << 10
_HELLO_REQUEST_ID: Final = 1
_LENGTH_MIN: Final = frames.HEADER_SIZE_BYTES - frames.LENGTH_SIZE_BYTES


class NotRemotingError(ConnectionError):
    """What listens there does not speak the remoting protocol; it may be a gRPC port."""


class OtherProtocolError(NotRemotingError):
    """The same, and it has said something that no remoting port says."""


class WokenError(ConnectionError):
    """A call was given up because of `wake`: the connection is of no use any more."""


class Answer(NamedTuple):
    """An answer: `octets` are the response message, or a google.rpc.Status where `status` is not 0. A view lasts until the next `wait`.

    `took_s`: how long it took to come, from its first bytes to its last; 0.0 if it was there at once.
    """

    request_id: int
    status: int
    octets: bytes | memoryview
    took_s: float = 0.0

    def unwrap(self) -> bytes:
        """The response message. Raises the ServiceError that the peer answered."""
        return bytes(self.unwrap_octets())

    def unwrap_octets(self) -> bytes | memoryview:
        """The same, without a copy."""
        if self.status == 0:
            return self.octets
        try:
            status = decode_status(bytes(self.octets))
        except DecodeError:
            raise ServiceError(
                Code(self.status), "", "the peer gave an error without a readable reason"
            ) from None
        raise ServiceError(
            Code(self.status),
            status.reason,
            status.message,
            metadata=status.metadata,
            retry_delay_ms=status.retry_delay_ms,
            field_violations=status.field_violations,
        )


class RemotingClient:
    """One connection. Not thread-safe; only `wake` may be called from any thread."""

    def __init__(
        self,
        address: Address,
        lane: Lane.ValueType,
        client_id: str,
        client_version: str = "",
        timeout_s: float = 3.0,
        lend: Callable[[int], memoryview] | None = None,
        on_connecting: Callable[[RemotingClient], None] | None = None,
    ) -> None:
        """Connects and says hello within `timeout_s`. Raises OSError (NotRemotingError, TimeoutError) or the peer's ServiceError.

        `lend`, if given, returns memory of a size in bytes. An answer larger than one reading is received there, and is a view of it.
        `on_connecting` is given this client before that. From then on `wake` ends connecting and the hello, too: WokenError.
        """
        self.address = address
        self.received_count = 0
        """How often something has come on this connection: a long answer comes in many pieces."""
        self.is_woken = False
        """Whether the last `wait` was ended by `wake`."""
        self._begun_s: float | None = None
        """When the first bytes of an answer came whose end has not come yet."""
        self._lend = lend
        self._answers: dict[int, Answer] = {}
        self._buffer = bytearray()
        self._large: _LargeAnswer | None = None
        self._frame_size_max_bytes = _WELCOME_SIZE_MAX_BYTES
        self._next_request_id = _HELLO_REQUEST_ID
        deadline = time.monotonic() + timeout_s
        self._socket = socket.socket()  # replaced by one of the address's family
        self._wake_receiver, self._wake_sender = socket.socketpair()
        try:
            for end in (self._wake_receiver, self._wake_sender):
                end.setblocking(False)
            if on_connecting is not None:
                on_connecting(self)
            self._connect(deadline)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(timeout_s)
            self.welcome = self._say_hello(
                RemotingHello(lane=lane, client_id=client_id, client_version=client_version),
                deadline,
            )
        except BaseException:
            self.close()
            raise
        self._frame_size_max_bytes = frames.FRAME_SIZE_MAX_BYTES

    def __enter__(self) -> RemotingClient:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def call(
        self, method_id: int, payload: bytes, timeout_s: float, *, until_woken: bool = False
    ) -> bytes:
        """Call and wait. Raises TimeoutError, OSError for a lost connection, or the peer's ServiceError; `until_woken`: and WokenError."""
        return self.ask(method_id, payload, timeout_s, until_woken=until_woken).unwrap()

    def ask(
        self, method_id: int, payload: bytes, timeout_s: float, *, until_woken: bool = False
    ) -> Answer:
        """Call and wait for the answer, which may be an error. Raises what `call` raises, but for the peer's ServiceError.

        `timeout_s` is for an answer that does not come. One that is on its way over a slow link may take longer while more of it comes.
        """
        deadline = time.monotonic() + timeout_s
        request_id = self.start(method_id, payload, timeout_s)
        received_count = self.received_count
        while True:
            wait_s = deadline - time.monotonic()
            if wait_s <= 0:
                if self.received_count == received_count:
                    raise TimeoutError(f"{self.address} did not answer within {timeout_s:.3g} s")
                received_count, wait_s = self.received_count, timeout_s
                deadline = time.monotonic() + wait_s
            self.is_woken = False
            answer = self.wait((request_id,), wait_s)
            if answer is not None:
                return answer
            if until_woken and self.is_woken:
                raise self._woken()

    def start(self, method_id: int, payload: bytes, timeout_s: float) -> int:
        """Send a request; its answer is got by `wait`. `timeout_s` is what the server is told."""
        request_id = self._next_request_id
        self._next_request_id = request_id % 0xFFFF_FFFF + 1
        timeout_ms = max(1, min(int(timeout_s * 1_000), 0xFFFF_FFFF))
        header = frames.encode_request(request_id, method_id, len(payload), timeout_ms)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(header + payload)
        return request_id

    def tell(self, method_id: int, payload: bytes, timeout_s: float) -> None:
        """Send a request that wants no answer."""
        header = frames.encode_request(0, method_id, len(payload), one_way=True)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(header + payload)

    def wait(self, request_ids: Collection[int], timeout_s: float) -> Answer | None:
        """The first answer to one of these requests; None after `timeout_s` or when woken. Raises OSError for a lost connection."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake_receiver, select.POLLIN)
        while True:
            for request_id in request_ids:
                answer = self._answers.pop(request_id, None)
                if answer is not None:
                    return answer
            ready = {
                descriptor
                for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1_000)
            }
            if self._socket.fileno() in ready:
                self._receive()
            elif self._wake_receiver.fileno() in ready:
                self._wake_receiver.recv(4_096)
                self.is_woken = True
                return None
            elif time.monotonic() >= deadline:
                return None

    def wake(self) -> None:
        """Make a `wait` that is under way, or the next one, return None. Any thread, at any time."""
        with contextlib.suppress(OSError):  # Full: it will wake anyhow. Closed: nobody waits.
            self._wake_sender.send(b"\0")

    def close(self) -> None:
        """End the connection."""
        for end in (self._socket, self._wake_receiver, self._wake_sender):
            end.close()

    def _connect(self, deadline: float) -> None:
        """Connects to the first address of the host that takes it. Raises OSError, WokenError."""
        failure: OSError | None = None
        host, port = self.address
        for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            self._socket.close()
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setblocking(False)
            code = self._socket.connect_ex(where)
            if code == errno.EINPROGRESS:
                self._await_connected(deadline)
                code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code:
                return
            failure = OSError(code, os.strerror(code))
        raise failure if failure is not None else OSError(f"{self.address} has no address")

    def _await_connected(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        poll.register(self._wake_receiver, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1_000)}
        if self._wake_receiver.fileno() in ready:
            raise self._woken()
        if not ready:
            raise TimeoutError(f"{self.address} did not take the connection")

    def _woken(self) -> WokenError:
        return WokenError(f"{self.address} is not waited for any more")

    def _say_hello(self, hello: RemotingHello, deadline: float) -> RemotingWelcome:
        payload = hello.SerializeToString()
        request_id = self._next_request_id
        self._next_request_id += 1
        header = frames.encode_request(request_id, frames.HELLO_METHOD_ID, len(payload))
        try:
            self._socket.sendall(frames.MAGIC + header + payload)
            answer = self._await_welcome(request_id, deadline)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise NotRemotingError(
                f"{self.address} closed the connection instead of answering the hello"
            ) from error
        return RemotingWelcome.FromString(answer.unwrap())

    def _await_welcome(self, request_id: int, deadline: float) -> Answer:
        answer = self.wait((request_id,), deadline - time.monotonic())
        if answer is None:
            raise TimeoutError(f"{self.address} did not answer the hello") if time.monotonic() >= deadline else self._woken()
        return answer

    def _receive(self) -> None:
        self._socket.settimeout(None)
        if self._large is not None:
            self._receive_into(self._large)
            return
        data = self._socket.recv(_READ_SIZE_BYTES)
        if not data:
            raise self._closed()
        self.received_count += 1
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= frames.LENGTH_SIZE_BYTES:
            # Looked at before the rest of a header is there: an HTTP/2 SETTINGS frame may have 9 bytes only.
            length = int.from_bytes(buffer[start : start + frames.LENGTH_SIZE_BYTES], "little")
            if not _LENGTH_MIN <= length <= self._frame_size_max_bytes:
                raise OtherProtocolError(f"{self.address} sent bytes that are not a frame of the remoting port")
            end = start + frames.LENGTH_SIZE_BYTES + length
            here = len(buffer) - start
            if end > len(buffer) and (length <= _READ_SIZE_BYTES or here < frames.HEADER_SIZE_BYTES):
                break
            header = frames.decode_header(buffer, start)
            if not header.flags & frames.FLAG_ANSWER:
                raise NotRemotingError(f"{self.address} sent a request where only answers may come")
            received = memoryview(buffer)[start + frames.HEADER_SIZE_BYTES : end]
            if end > len(buffer):
                self._large = _LargeAnswer(header, received, self._memory_of(length - _LENGTH_MIN))
            else:
                self._answers[header.request_id] = Answer(
                    header.request_id, header.status, bytes(received), self._took_s()
                )
            received.release()
            start = end
        del buffer[:start]
        if (buffer or self._large is not None) and self._begun_s is None:
            self._begun_s = time.monotonic()

    def _took_s(self) -> float:
        """See Answer. An answer has come."""
        begun_s, self._begun_s = self._begun_s, None
        return 0.0 if begun_s is None else time.monotonic() - begun_s

    def _memory_of(self, size_bytes: int) -> memoryview:
        """Where a large answer is received. Memory that was lent to an answer that nobody has taken yet is not used again."""
        is_lent = any(isinstance(answer.octets, memoryview) for answer in self._answers.values())
        return memoryview(bytearray(size_bytes)) if self._lend is None or is_lent else self._lend(size_bytes)

    def _receive_into(self, large: _LargeAnswer) -> None:
        count = self._socket.recv_into(large.memory[large.filled :])
        if not count:
            raise self._closed()
        self.received_count += 1
        large.filled += count
        if large.filled == len(large.memory):
            header = large.header
            octets = bytes(large.memory) if self._lend is None else large.memory
            self._answers[header.request_id] = Answer(header.request_id, header.status, octets, self._took_s())
            self._large = None

    def _closed(self) -> ConnectionResetError:
        return ConnectionResetError(f"{self.address} closed the connection")


class _LargeAnswer:
    """An answer that is larger than one reading: the rest of it is received in its place."""

    def __init__(self, header: frames.FrameHeader, received: memoryview, memory: memoryview) -> None:
        self.header = header
        self.memory = memory
        self.memory[: len(received)] = received
        self.filled = len(received)
