"""gRPC as a way to the servers: one channel per server, sync or asyncio; loaded only where it is needed.

Rules:
- Payloads are bytes already: no serialisers.
- Channels are made at the first call, thus after a fork, and belong to the process (aio: to the event loop) that made them.
- gRPC tries nothing again by itself.
- Errors come from grpc-status-details-bin; without it (a proxy's, or gRPC's own) from the status code.
- A server that says nothing is told from one that refuses by the cause of the error, as over the remoting port: see `was_silent`.
- A call that waits when its channel is closed ends with ClosedError, which is not definite: the server may carry it out.
- A channel on which a call was not answered in time, and nothing else for SILENT_S, is used no more. A firewall may drop what is sent
  there. The calls on it go on, and then it is closed. Where it is silent indeed, gRPC's pings end them within PING_S and PING_TIMEOUT_S.
- Where nothing was ever heard on a channel, another one would be as silent: it stays.
- After a refused connection gRPC makes calls fail for up to a second, by what it knew. A server that takes connections by then gets another
  channel, and the call, which was not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any, Final, Literal

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from . import _forks
from ._interrupts import interrupt_behind
from ._methods import HELD_METHODS, WATCHED
from ._one_way_failures import OneWayFailures
from ._remoting_async import probe as probe_async
from ._remoting_sync import probe
from ._transport_options import SOON, given_up, was_refused, was_silent
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
    ("grpc.max_reconnect_backoff_ms", 1_000),
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
PROBE_S: Final = 0.5
"""For which a server that has refused a connection is tried to be reached."""
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


_aio_channels: Final[weakref.WeakSet[grpc.aio.Channel]] = weakref.WeakSet()
"""As long as there is one, closed or not, gRPC has a thread that a forked child lacks."""


def _after_fork() -> None:
    _forks.grpc_is_lost = _forks.grpc_is_lost or len(_aio_channels) > 0


if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(after_in_child=_after_fork)


class _Channel:
    """A channel to a server, and the calls that are under way on it."""

    __slots__ = ("calls", "channel", "is_left", "opened_s", "stubs")

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.stubs: dict[str, Any] = {}
        """Callables by path: bytes in, bytes out."""
        self.calls: set[Any] = set()
        self.is_left = False
        """No call begins on it: it is to be closed behind its last call."""
        self.opened_s = time.monotonic()

    def stub(self, method: MethodInfo) -> Any:
        """The callable of a method."""
        stub = self.stubs.get(method.path)
        if stub is None:
            stub = self.stubs[method.path] = self.channel.unary_unary(method.path)
        return stub

    def is_silent(self, started_s: float, heard_s: float) -> bool:
        """Whether it has become silent, where a call is not answered that was begun then, and something was heard last then."""
        return heard_s > self.opened_s and time.monotonic() - max(started_s, heard_s) >= SILENT_S


class GrpcLink:
    """A sync channel to one server. Any thread."""

    kind: Literal["grpc"] = "grpc"

    def __init__(self, address: str, peer_timeout_s: float = PEER_TIMEOUT_S) -> None:
        self._address, self._options = address, _channel_options(peer_timeout_s)
        self._lock = threading.RLock()
        """A signal's handler may close it on a thread that has it."""
        self._current = self._open()
        self._left: set[_Channel] = set()
        """Those that were silent, for the calls that are still on them."""
        self._held: dict[Any, list[int]] = {}
        """Calls that the server holds until there is something, each with the thread that waits: none, once `end_held` has ended it."""
        self._heard_s = float("-inf")
        self._closed = False
        self._one_way_failures = OneWayFailures(address)

    def _open(self) -> _Channel:
        return _Channel(grpc.insecure_channel(self._address, options=self._options))

    def call(
        self,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        one_way: bool,
        is_replaced: Callable[[], bool] | None = None,
    ) -> bytes:
        """See SyncTransport.call."""
        channel, ends_s = self._current, time.monotonic() + timeout_s
        try:
            return self._call(channel, method, payload, timeout_s, one_way, is_replaced)
        except ConnectFailedError as error:
            if not was_refused(error) or not self._is_back(channel, ends_s - time.monotonic()):
                raise
        return self._call(self._current, method, payload, max(ends_s - time.monotonic(), 0.001), one_way, is_replaced)

    def _is_back(self, channel: _Channel, timeout_s: float) -> bool:
        """Whether the server takes connections, though gRPC has said that it does not. Then there is another channel."""
        if self._current is channel:
            try:
                probe(self._address, max(min(timeout_s, PROBE_S), 0.001))
            except ConnectFailedError:
                return False
            if self._renew(channel):
                self._left.add(channel)
                channel.is_left = True
                self._ended(channel, None)
        return not self._closed

    def _call(
        self,
        channel: _Channel,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        one_way: bool,
        is_replaced: Callable[[], bool] | None,
    ) -> bytes:
        this_call = object()
        request = payload[0] if len(payload) == 1 else b"".join(payload)
        started_s = time.monotonic()
        channel.calls.add(this_call)
        try:
            if one_way:
                self.begin(method, request, timeout_s).add_done_callback(partial(self._one_way_ended, method))
                return b""
            stub = channel.stub(method)
            if is_replaced is not None or method.method_id in HELD_METHODS:
                answer = self._call_watched(channel, stub, request, method, timeout_s, is_replaced)
            else:
                answer = stub(request, timeout=timeout_s)
        except grpc.RpcError as error:
            failure = error_of_rpc(error, self._address, method)
            if not _is_unanswered(failure):
                self._heard_s = time.monotonic()
            elif channel.is_silent(started_s, self._heard_s) and self._renew(channel):
                self._left.add(channel)
                channel.is_left = True  # From here on whoever ends the last call closes it: this one or another.
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
        finally:
            self._ended(channel, this_call)
        self._heard_s = time.monotonic()
        return answer

    def _call_watched(
        self, channel: _Channel, stub: Any, request: bytes, method: MethodInfo, timeout_s: float, is_replaced: Callable[[], bool] | None
    ) -> bytes:
        wait_s, look_s = (timeout_s + STUCK_S, STUCK_S) if is_replaced is None else WATCHED[method.method_id]
        stuck_s = time.monotonic() + timeout_s + STUCK_S
        future = stub.future(request, timeout=timeout_s)
        waiting = [threading.get_ident()]
        if method.method_id in HELD_METHODS:
            self._held[future] = waiting
        try:
            while True:
                try:
                    answer: bytes = future.result(wait_s)
                    return answer
                except grpc.FutureTimeoutError:
                    if is_replaced is not None and is_replaced():
                        lost = given_up(self._address, method)
                        raise lost from lost.__cause__
                    if time.monotonic() >= stuck_s:
                        # A signal handler's error has hit gRPC where it was about to start that thread.
                        if self._renew(channel):
                            _close_aside(channel.channel, 0.0)
                        raise RequestTimeoutError(f"{self._address}: no answer to {method.path} in time") from TimeoutError()
                    wait_s = look_s
        except grpc.FutureCancelledError:
            if self._closed or not waiting:
                raise _closed_meanwhile() from None
            raise ConnectionLostError(f"{self._address}: {method.path} was cancelled") from None
        finally:
            self._held.pop(future, None)
            future.cancel()  # Where it has not ended.

    def _renew(self, channel: _Channel) -> bool:
        """Whether calls go to another channel from now on, and this caller is the first that has found this one wanting."""
        with self._lock:
            if self._closed or self._current is not channel:
                return False
            renewed = self._current = self._open()
        if self._closed:  # By a signal's handler, meanwhile.
            _close_aside(renewed.channel, 0.0)
        return not self._closed

    def _ended(self, channel: _Channel, call: object) -> None:
        """A call has ended. Any thread."""
        channel.calls.discard(call)
        if channel.is_left and not channel.calls and channel in self._left:
            self._left.discard(channel)
            _close_aside(channel.channel, 0.0)

    def begin(self, method: MethodInfo, request: bytes, timeout_s: float) -> Any:
        """Begins a call, and returns gRPC's future. Raises ValueError on a closed channel."""
        channel = self._current
        future = channel.stub(method).future(request, timeout=timeout_s)
        channel.calls.add(future)  # A call that nobody refers to is cancelled.
        future.add_done_callback(partial(self._begun_ended, channel))
        return future

    def _begun_ended(self, channel: _Channel, future: Any) -> None:
        """Runs in a thread of gRPC's."""
        if future.code() is grpc.StatusCode.OK:
            self._heard_s = time.monotonic()
        self._ended(channel, future)

    def _one_way_ended(self, method: MethodInfo, future: Any) -> None:
        """Runs in a thread of gRPC's."""
        if future.cancelled():
            self._one_way_failures.note(method, _closed_meanwhile("its producer was closed"))
        elif (error := future.exception()) is not None:
            self._one_way_failures.note(method, error_of_rpc(error, self._address, method))

    def wait_for_one_way(self, timeout_s: float) -> None:
        """Waits until calls that were begun without waiting for their answers have these. gRPC does not tell earlier that they are gone."""
        deadline_s = time.monotonic() + timeout_s
        for channel in (self._current, *self._left.copy()):
            for call in channel.calls.copy():
                if isinstance(call, grpc.Future):
                    with contextlib.suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
                        call.exception(max(deadline_s - time.monotonic(), 0.0))

    def end_held(self, threads: Set[int]) -> None:
        """See SyncTransport.end_held."""
        for future, waiting in self._held.copy().items():
            if not threads.isdisjoint(waiting):
                waiting.clear()
                future.cancel()

    def close(self) -> None:
        """Closes the channel; calls in flight end with an error."""
        with self._lock:
            self._closed = True
        left, self._left = self._left, set()
        for channel in (self._current, *left):
            _close_aside(channel.channel, CLOSE_S)
        self._one_way_failures.close()


def _close_aside(channel: Any, wait_s: float) -> None:
    """Closes a channel, on a thread, for `close` waits for its calls: for ever where the thread of gRPC's that ends them is stuck.

    The thread keeps the channel from the garbage collector, too, which would do the same.
    """
    thread = threading.Thread(target=channel.close, name="protomq-grpc-close", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # No thread begins where the interpreter ends: a program may close its clients then.
        channel.close()
    else:
        thread.join(wait_s)


class AioGrpcLink:
    """An asyncio channel to one server; used on the loop that was running when it was made."""

    kind: Literal["grpc"] = "grpc"

    def __init__(self, address: str, peer_timeout_s: float = PEER_TIMEOUT_S) -> None:
        self._address, self._options = address, _channel_options(peer_timeout_s)
        self._current = self._open()
        self._left: set[_Channel] = set()
        """See GrpcLink."""
        self._heard_s = float("-inf")
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_way_failures = OneWayFailures(address)

    def _open(self) -> _Channel:
        channel = grpc.aio.insecure_channel(self._address, options=self._options)
        _aio_channels.add(channel)
        return _Channel(channel)

    async def call(
        self, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, one_way: bool
    ) -> bytes:
        """See AsyncTransport.call."""
        channel, ends_s = self._current, time.monotonic() + timeout_s
        try:
            return await self._call(channel, method, payload, timeout_s, one_way)
        except ConnectFailedError as error:
            if not was_refused(error) or not await self._is_back(channel, ends_s - time.monotonic()):
                raise
        return await self._call(self._current, method, payload, max(ends_s - time.monotonic(), 0.001), one_way)

    async def _is_back(self, channel: _Channel, timeout_s: float) -> bool:
        """See GrpcLink._is_back."""
        if self._current is channel:
            try:
                await probe_async(self._address, max(min(timeout_s, PROBE_S), 0.001))
            except ConnectFailedError:
                return False
            if self._current is channel and not self._closed:
                self._current = self._open()
                self._left.add(channel)
                channel.is_left = True
                self._ended(channel, None)
        return not self._closed

    async def _call(
        self, channel: _Channel, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, one_way: bool
    ) -> bytes:
        this_call = object()
        stub = channel.stub(method)
        request = payload[0] if len(payload) == 1 else b"".join(payload)
        if one_way:
            task = asyncio.get_running_loop().create_task(_outcome(stub(request, timeout=timeout_s)))
            channel.calls.add(task)
            task.add_done_callback(partial(self._one_way_ended, channel, method))
            return b""
        started_s = time.monotonic()
        channel.calls.add(this_call)
        try:
            answer: bytes = await stub(request, timeout=timeout_s)
        except grpc.RpcError as error:
            failure = error_of_rpc(error, self._address, method)
            if not _is_unanswered(failure):
                self._heard_s = time.monotonic()
            elif self._current is channel and not self._closed and channel.is_silent(started_s, self._heard_s):
                self._current = self._open()
                self._left.add(channel)
                channel.is_left = True
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
        finally:
            self._ended(channel, this_call)
        self._heard_s = time.monotonic()
        return answer

    def _ended(self, channel: _Channel, call: object) -> None:
        channel.calls.discard(call)
        if channel.is_left and not channel.calls and channel in self._left:
            self._left.discard(channel)
            task = asyncio.get_running_loop().create_task(channel.channel.close())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _one_way_ended(self, channel: _Channel, method: MethodInfo, task: asyncio.Task[bytes]) -> None:
        self._ended(channel, task)
        if task.cancelled():
            self._one_way_failures.note(method, _closed_meanwhile("its event loop ended, or its producer was closed"))
        elif isinstance(error := task.exception(), grpc.RpcError):
            self._one_way_failures.note(method, error_of_rpc(error, self._address, method))
        elif error is not None:  # The channel is closed.
            self._one_way_failures.note(method, _closed_meanwhile(str(error)))

    async def wait_for_one_way(self) -> None:
        """See GrpcLink.wait_for_one_way."""
        if tasks := self._one_way_calls():
            await asyncio.wait(tasks)

    def _one_way_calls(self) -> list[asyncio.Task[bytes]]:
        return [call for channel in (self._current, *self._left) for call in channel.calls if isinstance(call, asyncio.Task)]

    async def close(self) -> None:
        """Closes the channel; calls in flight end with an error."""
        self._closed = True
        one_way = self._one_way_calls()
        left, self._left = self._left, set()
        for channel in (self._current, *left):
            await channel.channel.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if one_way:
            await asyncio.wait(one_way, timeout=CLOSE_S)  # They are cut off, and end with that some turns of the loop later.
            await asyncio.sleep(0)  # What is called at their ends counts them.
        self._one_way_failures.close()


async def _outcome(call: Any) -> bytes:
    """What the call is answered. A task runs coroutines only."""
    answer: bytes = await call
    return answer


def _closed_meanwhile(text: str = "it was closed while this call waited") -> ClosedError:
    error = ClosedError(text)
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
