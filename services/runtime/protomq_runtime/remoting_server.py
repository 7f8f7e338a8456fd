"""The front door of the remoting port: accepts connections, hears their hello, and hands them to a lane.

One thread. A connection has HELLO_TIMEOUT_S to send the magic and a hello frame; whatever else it sends closes it. What follows the hello
in the same packets goes along to the lane. The counts of connections are kept here, in total and by address; lanes report closings.

A lane may hear of a closing later than this thread hears of its caller's next connection. So at a limit a new connection waits up to
PLACE_TIMEOUT_S for the place of one that is closed already; only then is it refused. Its hello is answered with TOO_MANY.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from protomq.v1 import options_pb2, remoting_pb2
from protomq.wire.frames import (
    HEADER_SIZE_BYTES,
    HELLO_METHOD_ID,
    LENGTH_SIZE_BYTES,
    MAGIC,
    decode_header,
    encode_answer,
)

from .addresses import Address
from .byte_stream import WANTS_TO_RECEIVE, ByteStream, TcpStream
from .connection_limits import HELLO_TIMEOUT_S, ConnectionLimits, watch_peer
from .dispatch import lane_name
from .errors import Code, ServiceError, invalid_argument, too_many, unparsable
from .lane_pool import LanePool
from .listening import bound_socket
from .principals import Authenticator, check_authorization_size
from .wake_up import WakeUp

logger = logging.getLogger(__name__)

HELLO_SIZE_MAX_BYTES: Final = 4096
CLIENT_ID_SIZE_MAX_BYTES: Final = 255
LISTEN_BACKLOG: Final = 1024
ACCEPT_PAUSE_S: Final = 0.1
"""After the process has run out of descriptors."""
PLACE_TIMEOUT_S: Final = 0.5
"""For a lane to notice that a connection is closed; a turn of a busy one takes some tens of milliseconds."""
PLACE_WAITERS_MAX: Final = 256
"""Further connections beyond a limit are refused at once."""
WARNING_INTERVAL_S: Final = 1.0


@dataclass(slots=True)
class _Caller:
    """A connection that has not said hello yet."""

    stream: ByteStream
    peer: str
    deadline: float
    poll_mask: int
    received: bytes = b""


@dataclass(slots=True)
class _Waiter:
    """A connection beyond a limit."""

    socket: socket.socket
    peer: str
    deadline: float


class RemotingServer(threading.Thread):
    """The acceptor. `start`, `stop` and `connection_closed`: any thread."""

    def __init__(
        self,
        listener: socket.socket,
        pools: Mapping[str, LanePool],
        *,
        server_name: str,
        server_version: str,
        frame_size_max_bytes: int,
        limits: ConnectionLimits,
        on_fatal: Callable[[BaseException], None],
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        make_stream: Callable[[socket.socket], ByteStream] = TcpStream,
        authenticator: Authenticator,
    ) -> None:
        """`make_stream` makes the stream of an accepted socket, which does not block; a handshake of its own is part of its first reads."""
        super().__init__(name="remoting-acceptor", daemon=True)
        self._listener = listener
        self._pools = pools
        self._welcome = remoting_pb2.RemotingWelcome(
            server_name=server_name,
            server_version=server_version,
            frame_size_max_bytes=frame_size_max_bytes,
        )
        self._limits = limits
        self._on_fatal = on_fatal
        self._hello_timeout_s = hello_timeout_s
        self._make_stream = make_stream
        self._authenticator = authenticator
        self._scratch = memoryview(bytearray(HELLO_SIZE_MAX_BYTES))
        self._callers: dict[int, _Caller] = {}
        self._connection_count = 0
        self._count_by_address: dict[str, int] = {}
        self._closed: deque[str] = deque()
        self._waiters: deque[_Waiter] = deque()
        """In the order of their coming, and so of their deadlines."""
        self._stopping = False
        self._paused_until: float | None = None
        self._next_warning_at = 0.0
        self._wake_up = WakeUp()
        self._poll = select.epoll()
        self._poll.register(self._wake_up.descriptor, select.EPOLLIN)
        self._poll.register(listener.fileno(), select.EPOLLIN)

    @property
    def connection_count(self) -> int:
        """Connections of all lanes and of callers that have not said hello."""
        return self._connection_count

    def connection_closed(self, peer: str) -> None:
        """A lane has closed a connection that it was given. Noted at once if somebody waits for a place, else with what happens next."""
        self._closed.append(peer)
        if self._waiters:
            self._wake_up.set()

    def stop(self) -> None:
        """Closes the listening socket and those that have not said hello, and ends the thread."""
        self._stopping = True
        self._wake_up.set()
        if self.ident is None:
            self._listener.close()

    def run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            logger.critical("the acceptor failed", exc_info=True)
            self._on_fatal(error)
        finally:
            for caller in list(self._callers.values()):
                self._drop(caller)
            for waiter in self._waiters:
                waiter.socket.close()
            self._listener.close()
            self._poll.close()

    def _turn(self) -> None:
        events = self._poll.poll(self._timeout())
        self._note_closed()
        for descriptor, _ in events:
            if descriptor == self._wake_up.descriptor:
                self._wake_up.clear()
            elif descriptor in self._callers:
                self._hear(self._callers[descriptor])
            else:
                self._accept_all()
        now = time.monotonic()
        for caller in [caller for caller in self._callers.values() if caller.deadline <= now]:
            self._warn("no hello from %s within %.0f s: closed", caller.peer, self._hello_timeout_s)
            self._drop(caller)
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._poll.register(self._listener.fileno(), select.EPOLLIN)
        if self._waiters:
            self._serve_waiters()

    def _timeout(self) -> float:
        # The oldest is first.
        moments = [caller.deadline for caller in list(self._callers.values())[:1]]
        if self._waiters:
            moments.append(self._waiters[0].deadline)
        if self._paused_until is not None:
            moments.append(self._paused_until)
        return max(min(moments) - time.monotonic(), 0.0) if moments else -1.0

    def _accept_all(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._warn("no connection can be accepted: %s", error)
                    self._poll.unregister(self._listener.fileno())
                    self._paused_until = time.monotonic() + ACCEPT_PAUSE_S
                    return
                continue  # The caller is gone already.
            self._admit(
                sock,
                f"[{address[0]}]:{address[1]}"
                if ":" in address[0]
                else f"{address[0]}:{address[1]}",
            )

    def _admit(self, sock: socket.socket, peer: str) -> None:
        is_full = len(self._waiters) >= PLACE_WAITERS_MAX
        # All who wait may be of one address that has as many connections as it may: others have places.
        if self._has_place(peer) and (is_full or not self._waiters):
            self._take(sock, peer)
        elif not is_full:
            self._waiters.append(_Waiter(sock, peer, time.monotonic() + PLACE_TIMEOUT_S))
        else:
            self._refuse(sock, peer)

    def _note_closed(self) -> None:
        while self._closed:
            self._forget(self._closed.popleft())

    def _serve_waiters(self) -> None:
        # A lane that closes a connection after this look sees that somebody waits, and wakes this thread.
        self._note_closed()
        now = time.monotonic()
        waiting: deque[_Waiter] = deque()
        for waiter in self._waiters:
            if self._has_place(waiter.peer):
                self._take(waiter.socket, waiter.peer)
            elif waiter.deadline <= now:
                self._refuse(waiter.socket, waiter.peer)
            else:
                waiting.append(waiter)
        self._waiters = waiting

    def _has_place(self, peer: str) -> bool:
        count = self._count_by_address.get(_address_of(peer), 0)
        return (
            self._connection_count < self._limits.total_max
            and not 0 < self._limits.per_address_max <= count
        )

    def _refuse(self, sock: socket.socket, peer: str) -> None:
        address = _address_of(peer)
        count = self._count_by_address.get(address, 0)
        self._warn("too many connections (%d, %d of %s): closed %s", self._connection_count, count, address, peer)
        limits = self._limits
        if self._connection_count >= limits.total_max:
            error = too_many("connections", limits.total_max, f"there are {limits.total_max} connections already")
        else:
            limit = limits.per_address_max
            error = too_many("connections of one address", limit, f"there are {limit} connections of {address} already")
        self._tell(sock, error)

    def _tell(self, sock: socket.socket, error: ServiceError) -> None:
        """Answers the hello of a connection that gets no place, as far as that needs no waiting, and closes it.

        The hello is here, as a rule. Unread, it could destroy the answer on its way.
        """
        request_id, status = 0, error.encode()
        try:
            sock.setblocking(False)
            stream = self._make_stream(sock)
        except OSError:
            sock.close()
            return
        received = b""
        with suppress(OSError):  # Nothing yet, or it is gone.
            while count := stream.recv_into(self._scratch):
                received += bytes(self._scratch[:count])
                if not stream.has_received_ahead or len(received) >= HELLO_SIZE_MAX_BYTES:
                    break
        if len(received) >= len(MAGIC) + HEADER_SIZE_BYTES:
            request_id = decode_header(received, len(MAGIC)).request_id
        if MAGIC.startswith(received[: len(MAGIC)]):
            _send_all(stream, encode_answer(request_id, HELLO_METHOD_ID, len(status), int(error.code)) + status)
        stream.close()

    def _take(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_peer(sock, self._limits.peer_timeout_ms)
            stream = self._make_stream(sock)
        except OSError:
            sock.close()
            return
        address = _address_of(peer)
        self._connection_count += 1
        self._count_by_address[address] = self._count_by_address.get(address, 0) + 1
        mask = stream.poll_mask(WANTS_TO_RECEIVE)
        caller = _Caller(stream, peer, time.monotonic() + self._hello_timeout_s, mask)
        self._callers[stream.fileno()] = caller
        self._poll.register(stream.fileno(), mask)

    def _hear(self, caller: _Caller) -> None:
        """Takes what has come, until the hello is complete."""
        stream = caller.stream
        descriptor = stream.fileno()
        is_first = True
        while is_first or stream.has_received_ahead:
            is_first = False
            try:
                count = stream.recv_into(self._scratch)
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                self._drop(caller)
                return
            self._take_hello(caller, bytes(self._scratch[:count]))
            if self._callers.get(descriptor) is not caller:
                return
        mask = stream.poll_mask(WANTS_TO_RECEIVE)
        if mask != caller.poll_mask:
            caller.poll_mask = mask
            self._poll.modify(descriptor, mask)

    def _take_hello(self, caller: _Caller, data: bytes) -> None:
        """Hears more of a hello: waits for the rest, greets, or sends the caller away."""
        caller.received += data
        received = caller.received
        if not MAGIC.startswith(received[: len(MAGIC)]):
            self._warn("%s does not speak the remoting protocol: closed", caller.peer)
            self._drop(caller)
            return
        if len(received) < len(MAGIC) + HEADER_SIZE_BYTES:
            return
        header = decode_header(received, len(MAGIC))
        end = len(MAGIC) + LENGTH_SIZE_BYTES + header.length
        if (
            header.method_id != HELLO_METHOD_ID
            or header.flags
            or header.status
            or not len(MAGIC) + HEADER_SIZE_BYTES <= end <= HELLO_SIZE_MAX_BYTES
        ):
            self._warn("the first frame of %s is no hello: closed", caller.peer)
            self._drop(caller)
            return
        if len(received) >= end:
            self._greet(
                caller,
                header.request_id,
                received[len(MAGIC) + HEADER_SIZE_BYTES : end],
                received[end:],
            )

    def _greet(self, caller: _Caller, request_id: int, payload: bytes, begun: bytes) -> None:
        try:
            hello = _parse_hello(payload)
            pool = self._pool_for(hello.lane)
            check_authorization_size(hello.authorization)
            principal = self._authenticator.authenticate(hello.authorization, caller.peer)
        except ServiceError as error:
            status = error.encode()
            _send_all(
                caller.stream,
                encode_answer(request_id, HELLO_METHOD_ID, len(status), int(error.code)) + status,
            )
            self._drop(caller)
            return
        welcome = remoting_pb2.RemotingWelcome(principal=principal.name)
        welcome.MergeFrom(self._welcome)
        payload = welcome.SerializeToString()
        if not _send_all(
            caller.stream, encode_answer(request_id, HELLO_METHOD_ID, len(payload)) + payload
        ):
            self._drop(caller)
            return
        self._leave(caller)
        pool.pick().adopt(caller.stream, caller.peer, cut(hello.client_id), principal, begun)

    def _pool_for(self, lane: int) -> LanePool:
        if lane == options_pb2.LANE_UNSPECIFIED:
            raise invalid_argument("lane", "the hello names no lane")
        try:
            name = lane_name(lane)
            return self._pools[name]
        except (KeyError, ValueError):
            served = ", ".join(self._pools)
            raise ServiceError(
                Code.UNIMPLEMENTED,
                "UNKNOWN_METHOD",
                f"this server has no lane of number {lane}; it serves: {served}",
                metadata={"lane": str(lane), "lanes": served},
            ) from None

    def _drop(self, caller: _Caller) -> None:
        self._leave(caller)
        caller.stream.close()
        self._forget(caller.peer)

    def _leave(self, caller: _Caller) -> None:
        """It is no caller any more: a lane has it, or nobody."""
        descriptor = caller.stream.fileno()
        del self._callers[descriptor]
        self._poll.unregister(descriptor)

    def _forget(self, peer: str) -> None:
        address = _address_of(peer)
        self._connection_count -= 1
        count = self._count_by_address[address] - 1
        if count:
            self._count_by_address[address] = count
        else:
            del self._count_by_address[address]

    def _warn(self, text: str, *arguments: object) -> None:
        """One line a second: what strangers send must not fill the log."""
        now = time.monotonic()
        if now >= self._next_warning_at:
            self._next_warning_at = now + WARNING_INTERVAL_S
            logger.warning(text, *arguments)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    listener = bound_socket(Address(host, port), "the remoting port")
    listener.listen(LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener


def _parse_hello(payload: bytes) -> remoting_pb2.RemotingHello:
    try:
        return remoting_pb2.RemotingHello.FromString(payload)
    except DecodeError:
        raise unparsable("protomq.v1.RemotingHello") from None


def _send_all(stream: ByteStream, data: bytes) -> bool:
    """Sends a few bytes on a fresh connection, whose buffer has room for them. False if it has not."""
    try:
        return stream.send(data) == len(data)
    except OSError:
        return False


def _address_of(peer: str) -> str:
    return peer.rpartition(":")[0]


def cut(client_id: str) -> str:
    """Returns what is kept of a client's name: as many whole characters as fit."""
    return client_id.encode()[:CLIENT_ID_SIZE_MAX_BYTES].decode(errors="ignore")
