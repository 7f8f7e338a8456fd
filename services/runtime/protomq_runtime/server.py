"""A server: one dispatch table, its lanes, and the two transports that feed them.

Start: the server takes both ports first, so that a service learns them and a taken port fails at once. Then the lanes run, then the
services' `start(server)` hooks, and only then does anybody get in. Late lanes run when they are told to: what comes for them waits
in its socket or on the lane's queue. Stop: the server refuses new work with SHUTTING_DOWN. The `stop()` hooks answer what is held,
open calls are answered and sent, and everything closes. What is not answered within the grace is cut off.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from . import telemetry
from .admission import AdmissionConfig
from .byte_stream import ByteStream, TcpStream
from .connection_limits import ConnectionLimits
from .dispatch import DispatchTable
from .errors import SHUTTING_DOWN
from .grpc_server import GrpcServer
from .lane import Lane
from .lane_pool import LanePool, PoolStatus
from .principals import Authenticator, NoAuthentication
from .remoting_server import RemotingServer, listen

logger = logging.getLogger(__name__)

REQUEST_SIZE_MAX_BYTES = 16 << 20
"""Largest request on both transports: a batch may hold a few bodies of the 4 MiB that one may have; RocketMQ takes 16 MiB, too."""
THREAD_END_S = 1.0
"""For a thread to close its connections after the grace."""
FRAME_OVERHEAD_BYTES = 12
"""What a frame's length counts besides the request."""


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """Threads and limits of one lane."""

    threads: int = 1
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)


class Server:
    """`start` and `stop` on the event loop of the process; the rest any thread."""

    def __init__(
        self,
        table: DispatchTable,
        *,
        name: str,
        version: str,
        lanes: Mapping[str, LaneConfig] | None = None,
        late_lanes: Collection[str] = (),
        grpc_host: str = "127.0.0.1",
        grpc_port: int | None = 0,
        remoting_host: str = "127.0.0.1",
        remoting_port: int | None = 0,
        request_size_max_bytes: int = REQUEST_SIZE_MAX_BYTES,
        limits: ConnectionLimits | None = None,
        make_stream: Callable[[socket.socket], ByteStream] = TcpStream,
        authenticator: Authenticator | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        """A port of 0: any free one; None: this transport is off. Lanes that `lanes` does not name have the defaults.

        `late_lanes` begin with `start_late_lanes`, not with `start`. `make_stream` makes the streams of the remoting port's connections.
        `authenticator` finds out who calls; None: everybody is anonymous.
        """
        self._late_lanes = frozenset(late_lanes)
        self._beginning = threading.Lock()
        """Of late lanes: they begin once, in time or with the stop. Of the next one, too."""
        self._is_stopping = False
        self.table = table
        self.name = name
        self.version = version
        self.grpc_port = 0
        self.remoting_port = 0
        self._grpc_address = (grpc_host, grpc_port)
        self._remoting_address = (remoting_host, remoting_port)
        self._request_size_max_bytes = request_size_max_bytes
        self._limits = limits or ConnectionLimits()
        self._make_stream = make_stream
        self._authenticator = authenticator or NoAuthentication()
        self._on_fatal = on_fatal or _log_fatal
        self._grpc: GrpcServer | None = None
        self._remoting: RemotingServer | None = None
        self._started: list[Any] = []
        """Implementations whose start hook was called and whose stop hook was not."""
        configured = lanes or {}
        self.pools: dict[str, LanePool] = {
            lane: self._make_pool(lane, configured.get(lane) or default_lane_config(lane))
            for lane in table.lane_names
        }
        for pool in self.pools.values():
            pool.siblings = self.pools

    def set_on_fatal(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Who is told when a thread of the server has failed. Before `start`."""
        self._on_fatal = on_fatal

    async def start(self) -> None:
        """Raises OSError if a port cannot be taken; nothing is left running then."""
        telemetry.attach(self.table, self.lane_statuses)
        host, port = self._grpc_address
        if port is not None:
            self._grpc = GrpcServer(
                self.table,
                self.pools,
                request_size_max_bytes=self._request_size_max_bytes,
                limits=self._limits,
                authenticator=self._authenticator,
            )
            self.grpc_port = self._grpc.bind(host, port)
        try:
            host, port = self._remoting_address
            if port is not None:
                self._bind_remoting(host, port)
            for name, pool in self.pools.items():
                if name not in self._late_lanes:
                    _start_all(pool.lanes)
            for implementation in self.table.implementations:
                self._started.append(implementation)
                await _call_hook(implementation, "start", self)
        except BaseException:
            await self.stop(0)
            raise
        if self._grpc is not None:
            await self._grpc.start()
        if self._remoting is not None:
            self._remoting.start()

    def start_late_lanes(self) -> None:
        """What has come for them is done now, unless the server stops meanwhile. Behind `start`; any thread."""
        with self._beginning:
            if not self._is_stopping:
                for name in self._late_lanes:
                    _start_all(self.pools[name].lanes)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuses, lets the services answer what they hold, and closes. Takes the grace only if calls stay unanswered."""
        loop = asyncio.get_running_loop()
        stop_by = loop.time() + grace_s
        if self._grpc is not None:
            await self._grpc.refuse()
        if self._remoting is not None:
            self._remoting.stop()
            await _join(self._remoting, grace_s)
        all_lanes = [lane for pool in self.pools.values() for lane in pool.lanes]
        for lane in all_lanes:
            lane.refuse(SHUTTING_DOWN)
        with self._beginning:
            self._is_stopping = True
            if any(lane.is_alive() for lane in all_lanes):
                # What waits for a lane that has never run is to be told, too.
                _start_all(all_lanes)
        lanes = [lane for lane in all_lanes if lane.is_alive()]
        while self._started:
            implementation = self._started.pop()
            try:
                await _call_hook(implementation, "stop")
            except Exception:
                logger.exception("stopping %s failed", type(implementation).__name__)
        # Behind this, no lane puts a call on another one's queue any more, and what the hooks have posted is done.
        await _pass_through(lanes, stop_by - loop.time())
        # gRPC first: its last calls may still be on their way to a lane.
        if self._grpc is not None:
            await self._grpc.stop(max(stop_by - loop.time(), 0.0))
        for lane in lanes:
            lane.finish(max(stop_by - loop.time(), 0.0))
        for lane in lanes:
            await _join(lane, max(stop_by - loop.time(), 0.0) + THREAD_END_S)

    def lane_statuses(self) -> list[PoolStatus]:
        """What an operator sees of the lanes."""
        return [pool.status() for pool in self.pools.values()]

    def _bind_remoting(self, host: str, port: int) -> None:
        listener = listen(host, port)
        self.remoting_port = listener.getsockname()[1]
        self._remoting = RemotingServer(
            listener,
            self.pools,
            server_name=self.name,
            server_version=self.version,
            frame_size_max_bytes=self._request_size_max_bytes + FRAME_OVERHEAD_BYTES,
            limits=self._limits,
            make_stream=self._make_stream,
            authenticator=self._authenticator,
            on_fatal=self._report_fatal,
        )

    def _make_pool(self, lane: str, config: LaneConfig) -> LanePool:
        return LanePool(
            lane,
            config.threads,
            config.admission,
            self.table.by_id,
            frame_size_max_bytes=self._request_size_max_bytes + FRAME_OVERHEAD_BYTES,
            on_connection_closed=self._connection_closed,
            on_fatal=self._report_fatal,
        )

    def _report_fatal(self, error: BaseException) -> None:
        self._on_fatal(error)

    def _connection_closed(self, peer: str) -> None:
        if self._remoting is not None:
            self._remoting.connection_closed(peer)


def default_lane_config(lane: str) -> LaneConfig:
    """Routing and administration must answer under overload: no rule on queue time there. A pull may wait for a cold disk,
    and a refused consumer asks again. RocketMQ lets pulls wait 25 times as long as sends, here it is 20."""
    if lane in ("route", "admin"):
        return LaneConfig(admission=AdmissionConfig(queue_time_target_ms=0))
    if lane == "pull":
        return LaneConfig(
            admission=AdmissionConfig(queue_time_target_ms=1000, queue_time_interval_ms=2000, waits_for_disk=True)
        )
    return LaneConfig()


def _start_all(lanes: Iterable[Lane]) -> None:
    """Those that have never run."""
    for lane in lanes:
        if lane.ident is None:
            lane.start()


async def _pass_through(lanes: Sequence[Lane], timeout_s: float) -> None:
    """Waits until every lane has done what was posted to it before."""
    loop = asyncio.get_running_loop()

    def passed(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    futures: list[asyncio.Future[None]] = []
    for lane in lanes:
        future = loop.create_future()
        futures.append(future)
        lane.post(partial(_call_in_loop, loop, partial(passed, future)))
    if futures:
        await asyncio.wait(futures, timeout=max(timeout_s, 0.0))


def _call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(function)


async def _join(thread: threading.Thread, timeout_s: float) -> None:
    if thread.is_alive():
        await asyncio.get_running_loop().run_in_executor(None, thread.join, timeout_s)
        if thread.is_alive():
            logger.warning("%s is still busy: the stop does not wait for it", thread.name)


async def _call_hook(implementation: Any, name: str, *arguments: Any) -> None:
    hook = getattr(implementation, name, None)
    if hook is not None:
        result = hook(*arguments)
        if inspect.isawaitable(result):
            await result


def _log_fatal(error: BaseException) -> None:
    logger.critical("a thread of the server has failed; the server ends: %r", error)
