"""AsyncTransport: the asyncio flavour of `_transport.SyncTransport`, with the same rules and the same choice.

It belongs to the event loop on which it was first used. If that loop is closed (one asyncio.run after another), or in a
forked child, it starts again without connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ._held_pops import GIVE_UP_S, give_up_of
from ._late_imports import fork_waits, load_needed_modules
from ._lines import own_error
from ._methods import GIVE_UP_POP, GIVEN_UP, POP, REPEATABLE, WATCHED
from ._remoting_async import AsyncConnection, ended_in, probe
from ._transport import Choice, Kind, check_grpc
from ._transport_options import (
    SOON,
    WATCHED_CONNECT_S,
    LongHold,
    TransportOptions,
    given_up,
    was_silent,
)
from ._types import BrokerAddress, MethodInfo
from .errors import (
    ClosedError,
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    ProtomqError,
)

if TYPE_CHECKING:
    from ._grpc_transport import AioGrpcLink

_Key = tuple[BrokerAddress, int]

# What a forked child must leave alone, even by collecting it: gRPC's objects, and transports of its parent's loop.
_LINKS_OF_PARENTS: list[object] = []


class AsyncTransport:
    """Calls from coroutines: pipelined on one connection per server and lane."""

    is_replaced: Callable[[BrokerAddress, float], bool] | None = None
    """See SyncTransport.is_replaced."""
    on_late: Callable[[BrokerAddress, Sequence[bytes], bytes], None] | None = None
    """Gets address, request and answer of a call of `GIVEN_UP` which was answered when its caller had been cancelled."""

    def __init__(self, options: TransportOptions | None = None) -> None:
        load_needed_modules()
        self.options = options or TransportOptions()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._connections: dict[_Key, AsyncConnection] = {}
        self._silent: list[AsyncConnection] = []
        self._opening: dict[_Key, asyncio.Task[AsyncConnection]] = {}
        self._grpc_links: dict[str, AioGrpcLink] = {}
        self._late: set[asyncio.Task[bytes]] = set()
        """Calls over gRPC whose callers are gone."""
        self._giving_up: set[asyncio.Task[None]] = set()
        self._kinds: dict[BrokerAddress, Kind] = {}
        self._choice = Choice(self.options.transport)

    async def call(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        *,
        one_way: bool = False,
        long_hold: LongHold | None = None,
    ) -> bytes:
        """See SyncTransport.call. A cancelled call is forgotten here; the server may still carry it out. It ends what it holds.

        `long_hold`: how long it may take over the remoting port instead of `timeout_s`.
        """
        longer_s, silent_s = (0.0, float("inf")) if long_hold is None else (long_hold.timeout_s - timeout_s, long_hold.silent_s)
        may_reopen = method.method_id in REPEATABLE
        connection = self._connections.get((address, method.lane))
        if (
            connection is None
            or not connection.usable
            or self._loop is not asyncio.get_running_loop()
            or self._pid != os.getpid()
        ):
            may_reopen = False
            started_s = time.monotonic()
            is_watched = self.is_replaced is not None and method.method_id in WATCHED
            connection = await self._connect(address, method.lane, timeout_s, is_watched=is_watched)
            timeout_s = max(timeout_s - (time.monotonic() - started_s), 0.001)
            if connection is None:
                return await self._call_grpc(address, method, payload, timeout_s, one_way, is_watched=is_watched)
        if connection.writable is not None:
            timeout_s = await _wait_until_writable(connection, timeout_s)
        if one_way:
            connection.request_one_way(method, payload, timeout_s)
            return b""
        deadline_s = time.monotonic() + timeout_s if may_reopen else 0.0
        request_id, future = connection.request(method, payload, timeout_s + longer_s, silent_s)
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(connection, request_id, future, address, method, payload)
            raise
        except ConnectionLostError as error:
            lost = error
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._closed or (self.is_replaced is not None and self.is_replaced(address, SOON.silent_s)):
                raise
        # The server had closed the connection, and this loop had not heard of it.
        try:
            return await self._call_again(address, method, payload, deadline_s)
        except ConnectFailedError:
            raise lost from None  # It does not say that nothing was sent.
        except ProtomqError as error:
            error.definite = False  # What went over the connection that was lost may have been carried out.
            raise

    async def _call_again(
        self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], deadline_s: float
    ) -> bytes:
        """The answer over another connection than the one that was lost."""
        connection = await self._connect(address, method.lane, max(deadline_s - time.monotonic(), 0.001))
        left_s = max(deadline_s - time.monotonic(), 0.001)
        if connection is None:
            return await self._call_grpc(address, method, payload, left_s, False, is_watched=False)
        request_id, future = connection.request(method, payload, left_s)
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(connection, request_id, future, address, method, payload)
            raise

    def _give_up(
        self,
        connection: AsyncConnection,
        request_id: int,
        future: asyncio.Future[bytes],
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
    ) -> None:
        if method.method_id in GIVEN_UP:
            late = partial(self.came_late, address, method, payload) if self.on_late is not None else None
            connection.give_up(request_id, future, late)
        else:
            connection.forget(request_id)

    def came_late(self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], answer: bytes) -> None:
        """An answer has come that nobody takes."""
        if method.method_id in GIVEN_UP and self.on_late is not None:
            self.on_late(address, payload, answer)

    async def wait_for_late(self, timeout_s: float) -> None:
        """Waits until all calls of `GIVEN_UP` have ended whose callers were cancelled."""
        await asyncio.sleep(0)  # Tasks that were cancelled just now give up their calls.
        if self._loop is not asyncio.get_running_loop():
            return
        late: set[asyncio.Future[Any]] = {*self._late}
        for connection in (*self._connections.values(), *self._silent):
            late |= connection.awaited
        if late:
            await asyncio.wait(late, timeout=timeout_s)
            await asyncio.sleep(0)  # Its callbacks are behind ours.

    async def wait_for_one_way(self, timeout_s: float) -> None:
        """Waits until what was asked without an answer is gone, and no close can hold it back."""
        if not self._is_here() or timeout_s <= 0:
            return
        waiting = [connection.wait_written() for connection in (*self._connections.values(), *self._silent)]
        waiting += [link.wait_for_one_way() for link in self._grpc_links.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*waiting)

    def look_again(self) -> None:
        """A route has changed: `is_replaced` may say something else now."""
        for connection in self._connections.values():
            connection.look_again()

    def hold_reading(self, lane: int, hold: bool) -> None:
        """Whether what comes on connections of a lane stays in the kernel; then no call of theirs times out meanwhile.

        gRPC reads always. For a lane of which the caller knows all calls.
        """
        for (_, own_lane), connection in self._connections.items():
            if own_lane == lane:
                connection.hold_reading(hold)

    def kind(self, address: BrokerAddress) -> Kind | Literal[""]:
        """The transport last used for the server: "remoting", "grpc", or "" before the first call."""
        return self._kinds.get(address, "")

    async def close(self) -> None:
        """Closes all connections; calls in flight fail. May be called twice."""
        self.abort()
        if not self._is_here():
            self._grpc_links.clear()
            return
        while self._grpc_links:
            _, link = self._grpc_links.popitem()
            await link.close()
        await asyncio.sleep(0)  # Lets the sockets be closed before the caller's loop ends.

    def abort(self) -> None:
        """`close`, for whoever cannot wait: channels of gRPC are closed when they are collected."""
        self._closed = True
        connections = [*self._connections.values(), *self._silent]
        self._connections.clear()
        self._silent.clear()
        if not self._is_here():
            return
        for task in self._opening.values():
            task.cancel()
        for connection in connections:
            connection.close()

    def _is_here(self) -> bool:
        """Whether its connections are of this process and this loop."""
        return self._pid == os.getpid() and self._loop is asyncio.get_running_loop()

    async def __aenter__(self) -> AsyncTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call_grpc(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        one_way: bool,
        *,
        is_watched: bool,
    ) -> bytes:
        calling = self._grpc_link(address.grpc_address).call(method, payload, timeout_s, one_way)
        try:
            return await (self._watched(address, method, payload, calling) if is_watched else calling)
        except (ConnectFailedError, ConnectionLostError):
            self._choice.grpc_failed(address)
            raise

    async def _watched(
        self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], calling: Coroutine[Any, Any, bytes]
    ) -> bytes:
        """The outcome of a call over gRPC, which is given up where its server is silent, and another one has its name."""
        assert self.is_replaced is not None
        task, (wait_s, look_s) = asyncio.get_running_loop().create_task(calling), WATCHED[method.method_id]
        is_over = False
        try:
            while True:
                done, _ = await asyncio.wait((task,), timeout=wait_s)
                if done:
                    is_over = True
                    return task.result()
                if self.is_replaced(address, wait_s):
                    raise given_up(address.grpc_address, method)
                wait_s = look_s
        finally:
            if not is_over:
                self._leave(task, address, method, payload)

    def _leave(self, task: asyncio.Task[bytes], address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes]) -> None:
        """A call over gRPC has lost its caller."""

        def ended(done: asyncio.Task[bytes]) -> None:
            self._late.discard(done)
            if not done.cancelled() and done.exception() is None:
                self.came_late(address, method, payload, done.result())

        self._late.add(task)
        task.add_done_callback(ended)
        if method.method_id != POP.method_id:
            task.cancel()
        elif (request := give_up_of(payload)) is not None:  # gRPC drops the answer to a call that is cancelled, even if it is here.
            giving_up = asyncio.get_running_loop().create_task(self._end_hold(task, address, request))
            self._giving_up.add(giving_up)
            giving_up.add_done_callback(self._giving_up.discard)

    async def _end_hold(self, task: asyncio.Task[bytes], address: BrokerAddress, request: bytes) -> None:
        """Has a pop over gRPC answered soon. `task`: waits for that."""
        try:
            await self._grpc_link(address.grpc_address).call(GIVE_UP_POP, (request,), GIVE_UP_S, False)
        except ProtomqError:  # It is gone, or of an earlier version: the pop would take what comes later.
            task.cancel()

    async def _connect(
        self, address: BrokerAddress, lane: int, timeout_s: float, *, is_watched: bool = False
    ) -> AsyncConnection | None:
        """The connection to use; None: gRPC is to be used. `is_watched`: see SyncTransport.is_replaced."""
        if self._closed:
            raise ClosedError("the transport is closed")
        self._bind_to_loop()
        refused: ConnectFailedError | None = None
        deadline_s = time.monotonic() + timeout_s
        connect_timeout_s = self.options.connect_timeout_s
        if is_watched:
            connect_timeout_s = min(connect_timeout_s, WATCHED_CONNECT_S)
        if self._choice.try_remoting(address, time.monotonic()):
            if not address.remoting_address:
                raise ConnectFailedError(
                    f"broker {address.broker_name!r} advertises no remoting port"
                )
            try:
                limit_s = self._choice.connect_timeout_s(address, timeout_s, connect_timeout_s)
                connection = await self._open_once(address, lane, limit_s)
            except ConnectFailedError as error:
                if not self._choice.may_fall_back(address, error):
                    raise
                if is_watched and self._kinds.get(address) == "remoting" and was_silent(error):
                    # It was reached here before. Most likely the machine is gone, not the port.
                    raise
                refused = error
            else:
                self._choice.reached(address)
                self._kinds[address] = "remoting"
                if connection.closed:  # Its end was read before this caller had its turn: nobody would end the call.
                    raise ConnectFailedError(f"{address.remoting_address}: connection closed right behind its welcome")
                return connection
        if not address.grpc_address:
            raise ConnectFailedError(f"broker {address.broker_name!r} advertises no gRPC port")
        check_grpc(refused)
        if address.grpc_address not in self._grpc_links:
            left_s = max(deadline_s - time.monotonic(), 0.001)
            await probe(address.grpc_address, min(left_s, connect_timeout_s) if is_watched else left_s)
        if refused is not None:
            self._choice.fell_back(address, refused, time.monotonic())
        self._kinds[address] = "grpc"
        return None

    async def _open_once(
        self, address: BrokerAddress, lane: int, timeout_s: float
    ) -> AsyncConnection:
        """Opens the connection; callers that come meanwhile wait for the same one, each with its own time-out."""
        key = (address, lane)
        connection = self._connections.get(key)
        if connection is not None and connection.usable:
            return connection
        task = self._opening.get(key)
        if task is None:
            task = self._opening[key] = asyncio.get_running_loop().create_task(self._open(key))
            task.add_done_callback(lambda done: self._opened(key, done))
        if not await ended_in(task, timeout_s):
            raise ConnectFailedError(f"{address.remoting_address}: not connected within {timeout_s:.3f} s") from TimeoutError()
        if self._closed and task.cancelled():
            raise ClosedError("the transport is closed")
        if not task.cancelled() and (error := task.exception()) is not None:
            raise own_error(error)
        return task.result()

    async def _open(self, key: _Key) -> AsyncConnection:
        address, lane = key
        connection = await AsyncConnection.open(
            address.remoting_address,
            lane,
            self.options.hello_client_id(),
            self.options.connect_timeout_s,
            self.options.peer_timeout_s,
            None if self.is_replaced is None else partial(self.is_replaced, address),
        )
        if self._closed:
            connection.close()
            raise ClosedError("the transport is closed")
        old = self._connections.get(key)
        self._connections[key] = connection
        self._silent = [silent for silent in self._silent if not silent.closed]
        if old is not None and not old.closed:
            self._silent.append(old)  # It closes when its last call ended, or with this transport.
            old.hold_reading(False)  # `hold_reading` does not reach it any more: its calls would never end.
        return connection

    def _opened(self, key: _Key, task: asyncio.Task[AsyncConnection]) -> None:
        if self._opening.get(key) is task:
            del self._opening[key]
        if not task.cancelled():
            task.exception()  # Seen, even if every waiter has gone.

    def _bind_to_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._pid != os.getpid():
            if self._loop is not None and not self._loop.is_closed() and self._pid == os.getpid():
                raise ConfigurationError(
                    "this object belongs to another event loop, which is still open"
                )
            if self._pid != os.getpid():
                _LINKS_OF_PARENTS.append((self._grpc_links, self._connections, self._silent))
            self._start()
            self._loop = loop

    def _grpc_link(self, grpc_address: str) -> AioGrpcLink:
        with fork_waits:
            from ._grpc_transport import AioGrpcLink

            if self._closed:  # While the caller waited for a connection.
                raise ClosedError("the transport is closed")
            link = self._grpc_links.get(grpc_address)
            if link is None:
                link = self._grpc_links[grpc_address] = AioGrpcLink(
                    grpc_address, self.options.peer_timeout_s
                )
            return link


async def _wait_until_writable(connection: AsyncConnection, timeout_s: float) -> float:
    """Waits while the peer is slow to read; what is left of the time-out."""
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            while connection.writable is not None:
                await asyncio.shield(connection.writable)
    except TimeoutError:
        raise ConnectFailedError("the server takes no more requests: nothing was sent") from None
    if connection.closed:
        raise ConnectionLostError("connection closed while waiting to send")
    return max(timeout_s - (time.monotonic() - started_s), 0.001)
