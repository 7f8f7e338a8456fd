"""gRPC as a way to the servers: one channel per server, sync or asyncio; loaded only where it is needed.

Rules:
- Payloads are bytes already: no serialisers.
- Channels are made at the first call, thus after a fork, and belong to the process (aio: to the event loop) that made them.
- gRPC tries nothing again by itself.
- Errors come from grpc-status-details-bin; without it (a proxy's, or gRPC's own) from the status code.
- A server that says nothing is told from one that refuses by the cause of the error, as over the remoting port: see `was_silent`.
- A call that waits when its channel is closed ends with ClosedError, which is not definite: the server may carry it out.
- A channel on which a call was not answered in time, and nothing else for SILENT_S, is used no more. A firewall may drop what is sent
  there. The calls on it go on. Where it is silent indeed, gRPC's pings end them within PING_S and PING_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ._interrupts import interrupt_behind
from ._methods import WATCHED
from ._transport_options import SOON, given_up, was_silent
from ._types import PEER_TIMEOUT_S, MethodInfo
from .errors import (
    ClosedError,
    ConnectFailedError,
    ConnectionLostError,
    ProtomqError,
    RequestTimeoutError,
    error_from_status,
)
from .wire.frames import FRAME_SIZE_MAX_BYTES
from .wire.status import GRPC_STATUS_DETAILS_KEY, RpcStatus, decode_status

CHANNEL_OPTIONS: Final = (
    # The SDK tries again in one place (_retry.py); gRPC would do it below that, unseen and uncounted.
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", FRAME_SIZE_MAX_BYTES),
    ("grpc.max_send_message_length", FRAME_SIZE_MAX_BYTES),
    # A restarted broker is found again within seconds, not after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # By its name the least pause between two tries; in gRPC it is the least time that a try may take (its default is 20 s). A try takes two
    # round trips, and a send asks another broker within half of its time, so that a silent server must be known by then.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    # Two transports in one process do not share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)

PING_S: Final = 12.0
"""A connection on which nothing comes is asked by a ping after this time, or after half of a shorter `peer_timeout_s`."""
PING_TIMEOUT_S: Final = 5.0
"""For which an answer to a ping is awaited, or a sixth of a shorter `peer_timeout_s`."""
SILENT_S: Final = SOON.silent_s
CLOSE_S: Final = 1.0
"""How long `close` waits at most for a channel whose calls do not end."""
STUCK_S: Final = 1.0
"""How much later than in time a call may end. Later, its channel is stuck: gRPC's thread that ends calls does not run."""
_SILENT_TEXTS: Final = ("timed out", "timeout", "handshaker shutdown")
"""What gRPC says where it has tried to connect, or to ping, and nothing came: it has no code for that."""


def _channel_options(peer_timeout_s: float) -> tuple[tuple[str, str | int], ...]:
    """The servers allow a ping every 10 s; connections behind NAT and dead peers need them even between calls."""
    ping_timeout_ms = int(min(peer_timeout_s / 6, PING_TIMEOUT_S) * 1000)
    return (
        *CHANNEL_OPTIONS,
        ("grpc.keepalive_time_ms", int(min(peer_timeout_s / 2, PING_S) * 1000)),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        # What counts where another ping is under way already, as mostly. Its default is 60 s.
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


class GrpcLink:
    """A sync channel to one server. Any thread."""

    kind: Literal["grpc"] = "grpc"

    def __init__(self, address: str, peer_timeout_s: float = PEER_TIMEOUT_S) -> None:
        self._address, self._options = address, _channel_options(peer_timeout_s)
        self._lock = threading.Lock()
        self._current = self._open()
        self._silent_channel: Any = None
        """The last one that was silent, for the calls that are still on it."""
        self._heard_s = float("-inf")
        self._closed = False
        self._one_way_calls: set[Any] = set()

    def _open(self) -> tuple[Any, dict[str, Any]]:
        """A channel and its callables, by path."""
        return grpc.insecure_channel(self._address, options=self._options), {}

    def call(
        self,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        one_way: bool,
        is_replaced: Callable[[], bool] | None = None,
    ) -> bytes:
        """See SyncTransport.call."""
        stub = self.method(method)
        request = payload[0] if len(payload) == 1 else b"".join(payload)
        started_s = time.monotonic()
        try:
            if one_way:
                future = stub.future(request, timeout=timeout_s)
                self._one_way_calls.add(future)  # A call that nobody refers to is cancelled.
                future.add_done_callback(self._one_way_calls.discard)
                return b""
            if is_replaced is not None:
                answer = self._call_watched(stub, request, method, timeout_s, is_replaced)
            else:
                answer = stub(request, timeout=timeout_s)
        except grpc.RpcError as error:
            failure = error_of_rpc(error, self._address, method)
            if not _is_unanswered(failure):
                self._heard_s = time.monotonic()
            elif time.monotonic() - max(started_s, self._heard_s) >= SILENT_S:
                self._leave_silent_channel(method, stub)
            if self._closed and isinstance(failure, ConnectFailedError | ConnectionLostError):
                raise _closed_meanwhile() from None
            raise failure from failure.__cause__
        except ValueError as error:  # "Cannot invoke RPC on closed channel!"
            if self._closed:
                raise ClosedError("the transport is closed") from None
            raise ConnectionLostError(f"{self._address}: {error}") from None
        except RuntimeError as error:
            interrupt = interrupt_behind(error)
            if interrupt is None:
                raise
            raise interrupt from interrupt.__cause__
        self._heard_s = time.monotonic()
        return answer

    def _call_watched(
        self, stub: Any, request: bytes, method: MethodInfo, timeout_s: float, is_replaced: Callable[[], bool]
    ) -> bytes:
        future, (wait_s, look_s) = stub.future(request, timeout=timeout_s), WATCHED[method.method_id]
        stuck_s = time.monotonic() + timeout_s + STUCK_S
        try:
            while True:
                try:
                    answer: bytes = future.result(wait_s)
                    return answer
                except grpc.FutureTimeoutError:
                    if is_replaced():
                        lost = given_up(self._address, method)
                        raise lost from lost.__cause__
                    if time.monotonic() > stuck_s:
                        # A signal handler's error has hit gRPC where it was about to start that thread.
                        stuck = self._renew_channel(method, stub)
                        if stuck is not None:
                            _close_aside(stuck, 0.0)
                        raise RequestTimeoutError(f"{self._address}: no answer to {method.path} in time") from TimeoutError()
                    wait_s = look_s
        except grpc.FutureCancelledError:
            if self._closed:
                raise _closed_meanwhile() from None
            raise ConnectionLostError(f"{self._address}: {method.path} was cancelled") from None
        finally:
            future.cancel()  # Where it has not ended.

    def _renew_channel(self, method: MethodInfo, stub: Any) -> Any:
        """Returns the one that was there. None: another caller has found it before."""
        with self._lock:
            channel, methods = self._current
            if self._closed or methods.get(method.path) is not stub:
                return None
            self._current = self._open()
            return channel

    def _leave_silent_channel(self, method: MethodInfo, stub: Any) -> None:
        silent = self._renew_channel(method, stub)
        if silent is not None:
            before, self._silent_channel = self._silent_channel, silent
            if before is not None:
                _close_aside(before, 0.0)

    def method(self, method: MethodInfo) -> Any:
        """The callable of a method: bytes in, bytes out."""
        channel, methods = self._current
        stub = methods.get(method.path)
        if stub is None:
            stub = methods[method.path] = channel.unary_unary(method.path)
        return stub

    def close(self) -> None:
        """Closes the channel; calls in flight end with an error."""
        with self._lock:
            self._closed = True
        for channel in (self._current[0], self._silent_channel):
            if channel is not None:
                _close_aside(channel, CLOSE_S)


def _close_aside(channel: Any, wait_s: float) -> None:
    """Closes a channel, on a thread, for `close` waits for its calls: for ever where the thread of gRPC's that ends them is stuck.

    The thread keeps the channel from the garbage collector, too, which would do the same.
    """
    thread = threading.Thread(target=channel.close, name="protomq-grpc-close", daemon=True)
    thread.start()
    thread.join(wait_s)


class AioGrpcLink:
    """An asyncio channel to one server; used on the loop that was running when it was made."""

    kind: Literal["grpc"] = "grpc"

    def __init__(self, address: str, peer_timeout_s: float = PEER_TIMEOUT_S) -> None:
        self._address, self._options = address, _channel_options(peer_timeout_s)
        self._channel = grpc.aio.insecure_channel(address, options=self._options)
        self._silent_channel: Any = None
        """See GrpcLink."""
        self._heard_s = float("-inf")
        self._closed = False
        self._methods: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(
        self, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, one_way: bool
    ) -> bytes:
        """See AsyncTransport.call."""
        stub = self._methods.get(method.path)
        if stub is None:
            stub = self._methods[method.path] = self._channel.unary_unary(method.path)
        request = payload[0] if len(payload) == 1 else b"".join(payload)
        if one_way:
            task = asyncio.get_running_loop().create_task(
                _ignore_outcome(stub(request, timeout=timeout_s))
            )
            self._keep(task)
            return b""
        started_s = time.monotonic()
        try:
            answer: bytes = await stub(request, timeout=timeout_s)
        except grpc.RpcError as error:
            failure = error_of_rpc(error, self._address, method)
            is_last = self._methods.get(method.path) is stub
            if not _is_unanswered(failure):
                self._heard_s = time.monotonic()
            elif is_last and not self._closed and time.monotonic() - max(started_s, self._heard_s) >= SILENT_S:
                self._leave_silent_channel()
            raise failure from failure.__cause__
        except grpc.aio.UsageError as error:  # "Channel is closed."
            if self._closed:
                raise ClosedError("the transport is closed") from None
            raise ConnectionLostError(f"{self._address}: {error}") from None
        except asyncio.CancelledError:
            # A channel that is closed cancels its calls; their tasks go on.
            caller = asyncio.current_task()
            if self._closed and (caller is None or not caller.cancelling()):
                raise _closed_meanwhile() from None
            raise
        self._heard_s = time.monotonic()
        return answer

    def _leave_silent_channel(self) -> None:
        before, self._silent_channel = self._silent_channel, self._channel
        self._methods, self._channel = {}, grpc.aio.insecure_channel(self._address, options=self._options)
        if before is not None:
            self._keep(asyncio.get_running_loop().create_task(before.close()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Closes the channel; calls in flight end with an error."""
        self._closed = True
        await self._channel.close()
        if self._silent_channel is not None:
            await self._silent_channel.close()


async def _ignore_outcome(call: Any) -> None:
    try:
        await call
    except grpc.RpcError:
        return  # One way: nobody asked.


def _closed_meanwhile() -> ClosedError:
    error = ClosedError("it was closed while this call waited")
    error.definite = False
    return error


def _is_unanswered(failure: ProtomqError) -> bool:
    return isinstance(failure, RequestTimeoutError) and was_silent(failure)


def error_of_rpc(error: grpc.RpcError, address: str, method: MethodInfo) -> ProtomqError:
    """The exception for a failed call; `error` is a grpc.Call, too, and an aio error has the same accessors.

    Its cause is a TimeoutError where the server was silent: raise it `from failure.__cause__`.
    """
    call: Any = error
    code: int = call.code().value[0]
    details: str = call.details() or ""
    metadata: Iterable[tuple[str, Any]] = call.trailing_metadata() or ()
    for key, value in metadata:
        if key == GRPC_STATUS_DETAILS_KEY:
            try:
                return error_from_status(decode_status(value))
            except DecodeError:
                break
    failure: ProtomqError
    if code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]:
        failure = RequestTimeoutError(f"{address}: no answer to {method.path} in time")
        failure.__cause__ = TimeoutError(details)
        return failure
    is_unavailable, details_lower = code == grpc.StatusCode.UNAVAILABLE.value[0], details.lower()
    if is_unavailable and "failed to connect" in details_lower:
        is_silent = any(text in details_lower for text in _SILENT_TEXTS)
        is_refused = "refused" in details_lower
        why = "no answer in time" if is_silent else "connection refused" if is_refused else "it cannot be reached"
        failure = ConnectFailedError(f"{address}: not connected over gRPC: {why}")
        failure.__cause__ = ConnectionRefusedError(details) if is_refused else OSError(details)
    else:
        failure = error_from_status(RpcStatus(code, f"{address}: {details}"))
    if is_unavailable and any(text in details_lower for text in _SILENT_TEXTS):
        failure.__cause__ = TimeoutError(details)
    return failure


def outcome_of_future(call: Any, method: MethodInfo) -> bytes | ProtomqError:
    """The answer or the exception of a call that ended; does not raise."""
    try:
        answer: bytes = call.result()
    except grpc.RpcError as error:
        return error_of_rpc(error, "", method)
    except grpc.FutureCancelledError:
        return ConnectionLostError(f"{method.path} was cancelled")
    return answer
