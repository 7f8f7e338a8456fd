"""AsyncRoutes: the asyncio flavour of `_routes.Routes`, with the same rules."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import _methods
from ._async_steps import AsyncDriver
from ._lines import own_error
from ._name_servers import ask_one
from ._routes import TIMEOUT_S, RouteBook, broker_address
from ._types import BrokerAddress, MethodInfo, Route
from .errors import ClosedError, NoRouteError

if TYPE_CHECKING:
    from ._async_transport import AsyncTransport


class AsyncRoutes(RouteBook):
    """Routes for coroutines of one event loop."""

    def __init__(
        self, transport: AsyncTransport, namesrv: str | Sequence[str] | None = None, *, sends: bool = False
    ) -> None:
        super().__init__(namesrv, sends=sends)
        self._driver = AsyncDriver(transport)
        self._transport = transport
        self._looking_up: dict[str, asyncio.Task[Route]] = {}

    async def get(self, topic: str, timeout_s: float = TIMEOUT_S) -> Route:
        """See Routes.get. Callers that wait for the same topic share one look-up."""
        now_s = time.monotonic()
        route = self._cache.fresh(topic, now_s)
        if route is not None:
            return route
        route = self._cache.known(topic, now_s)
        task = self._start_look_up(topic)
        if route is not None:
            return route
        wait_s = self._wait_s(topic, timeout_s)
        # Not awaited itself: `close` cancels it, and nobody has cancelled those who wait for it.
        done, _ = await asyncio.wait((task,), timeout=wait_s)
        if not done:
            late = NoRouteError(f"no name server answered within {wait_s:.3f} s")
            route = self._cache.failed(topic, late, time.monotonic())
            if route is None:
                raise late
            return route
        if task.cancelled():
            raise ClosedError("it was closed while this call waited for a route")
        if (error := task.exception()) is not None:
            raise own_error(error)
        return task.result()

    async def current(self, topic: str, timeout_s: float = TIMEOUT_S) -> Route:
        """See Routes.current."""
        route = self._cache.fresh(topic, time.monotonic())
        if route is not None:
            return route
        route = self._cache.last_known(topic)
        if route is None:
            return await self.get(topic, timeout_s)
        _ = self._start_look_up(topic)
        return route

    def look_up_behind(self, topic: str) -> None:
        """See RouteBook.look_up_behind."""
        self.invalidate(topic, may_be_old=True)
        _ = self._start_look_up(topic)

    async def brokers(self, timeout_s: float = TIMEOUT_S) -> tuple[BrokerAddress, ...]:
        """See Routes.brokers."""
        from .v1 import route_service_pb2

        answer = await self.ask(_methods.GET_CLUSTER_INFO, b"", timeout_s)
        info = route_service_pb2.GetClusterInfoResponse.FromString(answer)
        return tuple(broker_address(broker) for broker in info.brokers if broker.broker_id == 0)

    async def ask(self, method: MethodInfo, request: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """See Routes.ask."""
        return await self._driver.run(ask_one(self.name_servers, method, request, timeout_s))

    def _changed(self) -> None:
        self._transport.look_again()

    async def close(self) -> None:
        """Ends look-ups under way."""
        for task in list(self._looking_up.values()):
            if not task.get_loop().is_closed():
                task.cancel()
        self._looking_up.clear()

    def _start_look_up(self, topic: str) -> asyncio.Task[Route]:
        task = self._looking_up.get(topic)
        if task is None or task.done() or task.get_loop().is_closed():
            task = asyncio.get_running_loop().create_task(
                self._driver.run(self._look_up_steps(topic, TIMEOUT_S))
            )
            self._looking_up[topic] = task
            task.add_done_callback(lambda done: self._looked_up(topic, done))
        return task

    def _looked_up(self, topic: str, task: asyncio.Task[Route]) -> None:
        if self._looking_up.get(topic) is task:
            del self._looking_up[topic]
        if not task.cancelled():
            task.exception()  # Seen, even if nobody waits.
