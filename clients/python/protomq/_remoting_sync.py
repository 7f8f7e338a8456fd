"""The remoting port from threads: blocking streams (`_byte_streams.py`), no reader thread.

Rules:
- A stream serves one call at a time. A thread takes one from the pool, sends header and payload at once, reads the
  answer and gives the stream back. After a time-out or any error on the way the stream is closed, never reused. Its next
  bytes could be the late answer of another call.
- An idle stream is looked at before it is used again, so that a restarted server costs no failed call. One that was used a moment ago is
  not. If it turns out to be closed, a call that may be made twice is made again, once, on a new one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Final, Literal

from ._byte_streams import BlockingStream, open_stream
from ._interrupts import comes_of_signal
from ._methods import HELD_METHODS, LOOKED_AT_FIRST, REPEATABLE, WATCHED
from ._remoting_hello import (
    check_welcome_header,
    closed_unheard,
    encode_hello,
    error_of_answer,
    error_of_refusal,
)
from ._spinning import SPIN_MAX_S, TAKEN_AWAY_S, Spinning, cores
from ._transport_options import WATCHED_CONNECT_S, TransportOptions, given_up
from ._types import PEER_TIMEOUT_S, MethodInfo
from .errors import (
    ClosedError,
    ConnectFailedError,
    ConnectionLostError,
    ProtocolError,
    ProtomqError,
    RequestTimeoutError,
)
from .wire.frames import (
    FLAG_ANSWER,
    FLAG_ONE_WAY,
    FRAME_SIZE_MAX_BYTES,
    HEADER,
    HEADER_SIZE_BYTES,
    LENGTH_SIZE_BYTES,
    encode_cancel,
    encode_echo,
)

_READ_BUFFER_SIZE_BYTES: Final = 4096
"""Holds any answer but pulls and lists; the rest of what is longer is read into bytes of its own."""
_BIG_ANSWERS: Final = frozenset((0x0301, 0x0A01))
"""Answers to pulls and pops are read header first, so that the megabytes land where they stay."""
_IDLE_TRUSTED_S: Final = 1.0
"""A socket that was used within the last second is taken as it is, but for calls of LOOKED_AT_FIRST."""
_LENGTH_EXTRA: Final = HEADER_SIZE_BYTES - LENGTH_SIZE_BYTES


def probe(address: str, timeout_s: float) -> None:
    """Connects and closes; raises ConnectFailedError."""
    open_stream(address, timeout_s, PEER_TIMEOUT_S).close()


def connect(
    address: str,
    lane: int,
    client_id: str,
    timeout_s: float,
    peer_timeout_s: float = PEER_TIMEOUT_S,
) -> BlockingStream:
    """A stream whose hello was answered. Raises ConnectFailedError, or the ServerError of the refusal."""
    started_s = time.monotonic()
    stream = open_stream(address, timeout_s, peer_timeout_s)
    try:
        say_hello(
            stream, address, lane, client_id, max(timeout_s - (time.monotonic() - started_s), 0.001)
        )
    except BaseException:
        stream.close()
        raise
    return stream


def say_hello(
    stream: BlockingStream, address: str, lane: int, client_id: str, timeout_s: float
) -> None:
    """Sends the hello and takes the welcome. Raises ConnectFailedError, or the ServerError of the refusal."""
    deadline_s = time.monotonic() + timeout_s
    try:
        _wait_until(stream, deadline_s)
        stream.send((encode_hello(lane, client_id),))
        header, welcome = b"", None
        while welcome is None:
            header += _read_some(stream, HEADER_SIZE_BYTES - len(header), deadline_s, address)
            welcome = check_welcome_header(header, address)
        size, status = welcome
        payload = b""
        while len(payload) < size:
            payload += _read_some(stream, size - len(payload), deadline_s, address)
    except BlockingIOError as error:
        raise ConnectFailedError(f"{address}: no answer to the hello: timed out") from error
    except OSError as error:
        if comes_of_signal(error):
            raise
        raise ConnectFailedError(
            f"{address}: no answer to the hello: {str(error) or type(error).__name__}"
        ) from error
    if status:
        raise error_of_refusal(status, payload, address)


def _wait_until(stream: BlockingStream, deadline_s: float) -> None:
    """The next wait ends at the deadline. Raises BlockingIOError if that is over."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise BlockingIOError
    stream.set_timeout(max(int(left_s * 1000), 1))


def _read_some(stream: BlockingStream, size: int, deadline_s: float, address: str) -> bytes:
    data = bytearray(size)
    _wait_until(stream, deadline_s)
    count = stream.recv_into(data)
    if not count:
        raise closed_unheard(address)
    return bytes(data[:count])


class Connection:
    """One stream after its hello. One thread at a time; every error but a ServerError leaves it unusable."""

    __slots__ = (
        "_address", "_buffer", "_receive_ms", "_request_id", "_spinning", "_stream", "_timeout_ms", "last_used_s",
    )  # fmt: skip

    def __init__(self, stream: BlockingStream, address: str, spin: bool = True) -> None:
        self._stream = stream
        self._address = address
        self._buffer = bytearray(_READ_BUFFER_SIZE_BYTES)
        self._request_id = 0
        self._timeout_ms = 0
        self._receive_ms: int | None = None
        self._spinning = Spinning(cores() if spin else 1)
        self.last_used_s = 0.0

    @classmethod
    def open(
        cls,
        address: str,
        lane: int,
        client_id: str,
        timeout_s: float,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        spin: bool = True,
    ) -> Connection:
        """Connects and says hello. Raises ConnectFailedError, or the ServerError of the refusal."""
        return cls(connect(address, lane, client_id, timeout_s, peer_timeout_s), address, spin)

    def exchange(
        self,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        one_way: bool,
        is_replaced: Callable[[], bool] | None = None,
    ) -> tuple[int, bytes]:
        """(status, payload of the answer); (0, b"") for a one-way call. `is_replaced`: asked while the server is silent.

        Raises ConnectionLostError, RequestTimeoutError, ProtocolError: then the connection must be closed.
        """
        timeout_ms = int(timeout_s * 1000.0) or 1
        # The kernel's limit is set again only when it is off by more than 1/8 s: calls of one kind mostly share theirs.
        receive_ms = None
        if is_replaced is not None and timeout_s > (silent_s := WATCHED[method.method_id].silent_s):
            receive_ms = int(silent_s * 1000)
        if not timeout_ms <= self._timeout_ms <= timeout_ms + 125 or receive_ms != self._receive_ms:
            self._set_timeout(timeout_ms, receive_ms)
        self._request_id = request_id = self._request_id + 1 & 0xFFFFFFFF
        size = 0
        for part in payload:
            size += len(part)
        header = HEADER.pack(
            _LENGTH_EXTRA + size,
            request_id,
            method.method_id,
            FLAG_ONE_WAY if one_way else 0,
            0,
            timeout_ms,
        )
        try:
            self._stream.send((header, *payload))
            if one_way:
                return 0, b""
            if receive_ms is not None:
                assert is_replaced is not None
                return self._read_watched(request_id, method, timeout_s, is_replaced)
            return self._read_answer(request_id, method.method_id in _BIG_ANSWERS, timeout_s)
        except BlockingIOError:
            raise RequestTimeoutError(
                f"{self._address}: no answer to {method.path} within {timeout_s:.3f} s"
            ) from None
        except OSError as error:
            if comes_of_signal(error):
                raise
            raise ConnectionLostError(
                f"{self._address}: connection lost during {method.path}: {error}"
            ) from error

    def _read_watched(
        self, request_id: int, method: MethodInfo, timeout_s: float, is_replaced: Callable[[], bool]
    ) -> tuple[int, bytes]:
        """An answer, waited for in pieces: between them is asked whether anybody is there to give it."""
        silent_s, look_s = WATCHED[method.method_id]
        header_first = method.method_id in _BIG_ANSWERS
        got = -1 if header_first else self._receive_spinning()
        if got < 0:
            started_s = time.monotonic()
            while True:
                try:
                    got = self._stream.recv_into(self._buffer, HEADER_SIZE_BYTES if header_first else 0)
                    break
                except BlockingIOError:
                    left_s = started_s + timeout_s - time.monotonic()
                    if left_s <= 0:
                        raise
                    if is_replaced():
                        lost = given_up(self._address, method)
                        raise lost from lost.__cause__
                    self._set_timeout(self._timeout_ms, int(min(left_s, look_s) * 1000) or 1)
            # What is left of the answer. A large one may pause for longer, as on a slow link.
            receive_ms = None if header_first else int(silent_s * 1000)
            if self._receive_ms != receive_ms:
                self._set_timeout(self._timeout_ms, receive_ms)
        return self._read_answer(request_id, header_first, timeout_s, got)

    def _read_answer(
        self, request_id: int, header_first: bool, timeout_s: float, got: int = -1
    ) -> tuple[int, bytes]:
        """`got`: what is in the buffer; -1: nothing was read yet."""
        buffer = self._buffer
        if got < 0 and not header_first:
            got = self._receive_spinning()
        if got < 0:
            got = self._stream.recv_into(buffer, HEADER_SIZE_BYTES if header_first else 0)
        if got < HEADER_SIZE_BYTES:
            got = self._read_header(got, time.monotonic() + timeout_s)
        length, echoed_id, _method_id, flags, status, _ = HEADER.unpack_from(buffer)
        end = LENGTH_SIZE_BYTES + length
        if (
            echoed_id != request_id
            or flags != FLAG_ANSWER
            or not _LENGTH_EXTRA <= length <= FRAME_SIZE_MAX_BYTES
            or got > end
        ):
            raise ProtocolError(f"{self._address}: the answer is not for this request")
        if got == end:
            return status, bytes(memoryview(buffer)[HEADER_SIZE_BYTES:end])
        return status, self._read_rest(
            bytes(memoryview(buffer)[HEADER_SIZE_BYTES:got]), end - got, timeout_s
        )

    def _receive_spinning(self) -> int:
        """What `recv_into` the buffer gives, without sleeping; -1 if there is nothing soon, or spinning is not worth it now."""
        now_s = time.monotonic()
        if not self._spinning.is_worth_it(now_s):
            return -1
        buffer, recv_now = self._buffer, self._stream.recv_now
        until_s = now_s + SPIN_MAX_S
        while True:
            try:
                got = recv_now(buffer)
            except BlockingIOError:
                got = -1
            looked_s, now_s = now_s, time.monotonic()
            if now_s - looked_s > TAKEN_AWAY_S:
                self._spinning.failed(now_s)
                return got
            if got >= 0:
                self._spinning.succeeded()
                return got
            if now_s > until_s:
                self._spinning.failed(now_s)
                return -1

    def _read_header(self, got: int, deadline_s: float) -> int:
        view = memoryview(self._buffer)
        while got < HEADER_SIZE_BYTES:
            if got == 0:
                raise ConnectionResetError("closed by the server")
            more = self._stream.recv_into(view[got:HEADER_SIZE_BYTES])
            got = got + more if more else 0
            if time.monotonic() > deadline_s:
                raise BlockingIOError
        return got

    def _read_rest(self, first: bytes, missing: int, timeout_s: float) -> bytes:
        """The payload: what came with the header, then the rest, which is one read as a rule."""
        deadline_s = time.monotonic() + timeout_s
        parts = [first] if first else []
        while missing:
            piece = self._stream.recv(missing)
            if not piece:
                raise ConnectionResetError("closed by the server")
            parts.append(piece)
            missing -= len(piece)
            if missing and time.monotonic() > deadline_s:
                raise BlockingIOError
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _set_timeout(self, timeout_ms: int, receive_ms: int | None = None) -> None:
        if timeout_ms != self._timeout_ms:
            timeout_ms = timeout_ms if timeout_ms < 1000 else timeout_ms + 62
        self._stream.set_timeout(timeout_ms, receive_ms)
        self._timeout_ms, self._receive_ms = timeout_ms, receive_ms

    def is_usable(self) -> bool:
        """Whether the idle connection is still open and silent."""
        return self._stream.is_silent()

    def interrupt(self) -> None:
        """Ends the wait of the thread that uses it, with an OSError; another thread may call this."""
        self._stream.interrupt()

    def close(self) -> None:
        """Closes the stream."""
        self._stream.close()


def _closed_meanwhile() -> ClosedError:
    return ClosedError("it was closed while this call waited")


class ConnectionPool:
    """The sockets of one server and lane. Any thread; `deque` is what makes it safe."""

    kind: Literal["remoting"] = "remoting"

    __slots__ = ("__weakref__", "_address", "_closed", "_held", "_held_lock", "_idle", "_is_left", "_lane", "_options")

    def __init__(self, address: str, lane: int, options: TransportOptions) -> None:
        self._address = address
        self._lane = lane
        self._options = options
        self._idle: deque[Connection] = deque()
        self._held: dict[Connection, int] = {}
        """Those with a call that the server holds until there is something, and the thread that waits; 0 once `close` or `end_held` has
        ended it.
        """
        self._held_lock = threading.RLock()
        """A signal's handler may close the pool on a thread that has it."""
        self._closed = False
        self._is_left = False

    def call(
        self,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        one_way: bool,
        is_replaced: Callable[[], bool] | None = None,
    ) -> bytes:
        """See SyncTransport.call."""
        idle = self._idle
        now_s = time.monotonic()
        deadline_s = now_s + timeout_s
        connection: Connection | None = None
        while idle:
            try:
                connection = idle.pop()
            except IndexError:  # Another thread was faster.
                break
            is_trusted = now_s - connection.last_used_s < _IDLE_TRUSTED_S and method.method_id not in LOOKED_AT_FIRST
            if is_trusted or connection.is_usable():
                break
            connection.close()
            connection = None
        may_reopen = connection is not None and method.method_id in REPEATABLE and not one_way
        lost: ConnectionLostError | None = None
        while True:
            if connection is None:
                connect_timeout_s = min(timeout_s, self._options.connect_timeout_s)
                if is_replaced is not None:
                    connect_timeout_s = min(connect_timeout_s, WATCHED_CONNECT_S)
                try:
                    connection = self._open(connect_timeout_s)
                except ProtomqError as error:
                    if lost is None:
                        raise
                    if isinstance(error, ConnectFailedError):
                        raise lost from None  # It does not say that nothing was sent.
                    error.definite = False
                    raise
                timeout_s = max(deadline_s - time.monotonic(), 0.001)
            try:
                if method.method_id in HELD_METHODS:
                    status, answer = self._exchange_held(connection, method, payload, timeout_s, is_replaced)
                else:
                    status, answer = connection.exchange(method, payload, timeout_s, one_way, is_replaced)
                break
            except BaseException as error:
                connection.close()
                if isinstance(error, ConnectionLostError):
                    self._drop_idle()  # The others are most likely gone, too.
                    timeout_s = deadline_s - time.monotonic()
                    if may_reopen and timeout_s > 0 and not (is_replaced is not None and is_replaced()):
                        connection, may_reopen, lost = None, False, error
                        continue
                raise
        connection.last_used_s = now_s
        idle.append(connection)
        if self._closed or self._is_left or len(idle) > self._options.connections_idle_max:
            self._trim()
        if status:
            refusal = error_of_answer(status, answer)
            # What went over the connection that was lost may have been carried out.
            refusal.definite = refusal.definite and lost is None
            raise refusal
        return answer

    def _exchange_held(
        self,
        connection: Connection,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        is_replaced: Callable[[], bool] | None,
    ) -> tuple[int, bytes]:
        with self._held_lock:
            self._held[connection] = threading.get_ident()
            if self._closed:  # Behind that: from here on a `close` ends it.
                del self._held[connection]
                raise ClosedError("the transport is closed")
        try:
            answer = connection.exchange(method, payload, timeout_s, False, is_replaced)
        except ConnectionLostError:
            if not self._held[connection]:
                raise _closed_meanwhile() from None
            raise
        finally:
            # Before its socket is closed, and the number may be another one's.
            with self._held_lock:
                is_ended = not self._held.pop(connection)
        if is_ended:  # Its socket is shut down, whatever came before that.
            raise _closed_meanwhile()
        return answer

    def prepare(self, timeout_s: float) -> None:
        """Opens a connection for the calls to come. Raises ConnectFailedError, or the ServerError of the refusal."""
        connection = self._open(timeout_s)
        connection.last_used_s = time.monotonic()
        self._idle.append(connection)

    def close_lost(self) -> None:
        """Closes idle connections that the server has closed. A call does so with those that it meets, but an old address gets none."""
        for _ in range(len(self._idle)):
            try:
                connection = self._idle.popleft()
            except IndexError:
                return
            if connection.is_usable():
                self._idle.append(connection)
            else:
                connection.close()
        if self._closed:
            self._drop_idle()

    def close(self) -> None:
        """Closes what is idle, and ends calls that the server holds; what else is in use is closed when its call ends."""
        with self._held_lock:
            self._closed = True
            for connection in self._held:
                self._held[connection] = 0
                connection.interrupt()
        self._drop_idle()

    def end_held(self, threads: Set[int]) -> None:
        """See SyncTransport.end_held."""
        with self._held_lock:
            for connection, thread in self._held.items():
                if thread in threads:
                    self._held[connection] = 0
                    connection.interrupt()

    def leave(self) -> None:
        """No calls are to come. Those that are under way go on, and their connections are closed behind them."""
        self._is_left = True
        self._drop_idle()

    def close_copies(self) -> None:
        """In a forked child: closes the copies of idle sockets. What is in use there is the parent's, and `interrupt` would end it."""
        self._closed = True
        self._drop_idle()

    def _open(self, timeout_s: float) -> Connection:
        return Connection.open(
            self._address,
            self._lane,
            self._options.hello_client_id(),
            timeout_s,
            self._options.peer_timeout_s,
            self._options.spin,
        )

    def _drop_idle(self) -> None:
        while self._idle:
            try:
                self._idle.popleft().close()
            except IndexError:
                return

    def _trim(self) -> None:
        if self._closed or self._is_left:
            self._drop_idle()
            return
        while len(self._idle) > self._options.connections_idle_max:
            try:
                self._idle.popleft().close()  # The one that was unused for longest.
            except IndexError:
                return


class PipelinedConnection:
    """A connection that carries many calls at once and is read by the thread that owns it, when a selector says so.

    Used by the pull consumer: what the server sends ahead waits in the kernel's buffer, so no thread has to read it.
    """

    kind: Literal["remoting"] = "remoting"

    __slots__ = ("_address", "_header", "_header_got", "_missing", "_parts", "_stream")

    READ_TIMEOUT_S: Final = 1.0
    """How long `receive` may block for the rest of a frame whose beginning is there."""

    def __init__(self, stream: BlockingStream, address: str) -> None:
        stream.set_timeout(int(self.READ_TIMEOUT_S * 1000))
        self._stream = stream
        self._address = address
        self._header = bytearray(HEADER_SIZE_BYTES)
        self._header_got = 0
        self._parts: list[bytes] = []
        self._missing = 0

    @classmethod
    def open(
        cls,
        address: str,
        lane: int,
        client_id: str,
        timeout_s: float,
        peer_timeout_s: float = PEER_TIMEOUT_S,
    ) -> PipelinedConnection:
        """Connects and says hello. Raises ConnectFailedError, or the ServerError of the refusal."""
        return cls(connect(address, lane, client_id, timeout_s, peer_timeout_s), address)

    def fileno(self) -> int:
        """For selectors."""
        return self._stream.fileno()

    @property
    def has_received_ahead(self) -> bool:
        """Whether `receive` has something to look at, whatever a selector says."""
        return self._stream.has_received_ahead

    def send(self, request_id: int, method: MethodInfo, payload: bytes, timeout_s: float) -> None:
        """Sends a request. Raises ConnectionLostError; then the connection must be closed."""
        header = HEADER.pack(
            _LENGTH_EXTRA + len(payload),
            request_id,
            method.method_id,
            0,
            0,
            int(timeout_s * 1000.0) or 1,
        )
        try:
            self._stream.send((header, payload))
        except OSError as error:
            if comes_of_signal(error):
                raise
            raise ConnectionLostError(
                f"{self._address}: connection lost during {method.path}: {error}"
            ) from error

    def give_up(self, request_id: int) -> None:
        """Tells the server that it is to hold a request no longer. Raises ConnectionLostError."""
        self._tell(encode_cancel(request_id))

    def ask(self, request_id: int) -> None:
        """Asks the server whether it is there: it answers at once. Raises ConnectionLostError."""
        self._tell(encode_echo(request_id))

    def _tell(self, frame: bytes) -> None:
        try:
            self._stream.send((frame,))
        except OSError as error:
            if comes_of_signal(error):
                raise
            raise ConnectionLostError(f"{self._address}: connection lost: {error}") from error

    def receive(self, size_max_bytes: int) -> list[tuple[int, int, bytes]]:
        """(request id, status, payload) of every answer that is complete by now, up to a total of bytes.

        Raises ConnectionLostError, ProtocolError. What came before an error is returned first, and the next call raises it.
        """
        answers: list[tuple[int, int, bytes]] = []
        size = 0
        try:
            while size < size_max_bytes and (self._missing or self._read_header()):
                if self._missing:
                    piece = self._stream.recv(self._missing)
                    if not piece:
                        raise ConnectionResetError("closed by the server")
                    self._parts.append(piece)
                    self._missing -= len(piece)
                    if self._missing:
                        break
                parts, self._parts, self._header_got = self._parts, [], 0
                length, request_id, _, _, status, _ = HEADER.unpack_from(self._header)
                size += length
                answers.append(
                    (request_id, status, parts[0] if len(parts) == 1 else b"".join(parts))
                )
        except BlockingIOError:
            pass
        except ProtocolError:
            if not answers:
                raise
        except OSError as error:
            if comes_of_signal(error):
                raise
            if not answers:
                raise ConnectionLostError(f"{self._address}: connection lost: {error}") from error
        return answers

    def _read_header(self) -> bool:
        """Whether a header is complete (then `_missing` is set); raises BlockingIOError when there is nothing to read."""
        if self._header_got < HEADER_SIZE_BYTES:  # Else it is one that was not understood.
            got = self._stream.recv_now(memoryview(self._header)[self._header_got :])
            if got == 0:
                raise ConnectionResetError("closed by the server")
            self._header_got += got
            if self._header_got < HEADER_SIZE_BYTES:
                return False
        length, _, _, flags, _, _ = HEADER.unpack_from(self._header)
        if flags != FLAG_ANSWER or not _LENGTH_EXTRA <= length <= FRAME_SIZE_MAX_BYTES:
            raise ProtocolError(f"{self._address}: an answer that cannot be understood")
        self._missing = length - _LENGTH_EXTRA
        return True

    def close(self) -> None:
        """Closes the stream; the server drops what it holds for it."""
        self._stream.close()
