"""AsyncRoutes: the asyncio flavour of `_routes.Routes`, with the same rules."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import _methods
from ._outages import Outages
from ._routes import (
    NAME_SERVERS,
    TIMEOUT_S,
    NameServerList,
    RouteCache,
    broker_address,
    decode_route,
    encode_get_route,
    no_name_server,
    outcome_of_failures,
    tries,
)
from ._types import BrokerAddress, MethodInfo, Route
from .errors import NoRouteError, NotFoundError, ProtomqError, UnknownMethodError

if TYPE_CHECKING:
    from ._async_transport import AsyncTransport


class AsyncRoutes:
    """Routes for coroutines of one event loop."""

    def __init__(
        self, transport: AsyncTransport, namesrv: str | Sequence[str] | None = None
    ) -> None:
        self.name_servers = NameServerList(namesrv)
        self._transport = transport
        self._cache = RouteCache()
        self._outages = Outages()
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
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise NoRouteError(f"no name server answered within {timeout_s:.3f} s") from None

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

    def cached(self, topic: str) -> Route | None:
        """The route, if it needs no look-up: spares a hot path the coroutine."""
        return self._cache.fresh(topic, time.monotonic())

    def last_known(self, topic: str) -> Route | None:
        """What was known last, without any look-up."""
        return self._cache.last_known(topic)

    def invalidate(self, topic: str) -> None:
        """See Routes.invalidate."""
        self._cache.invalidate(topic)

    async def brokers(self, timeout_s: float = TIMEOUT_S) -> tuple[BrokerAddress, ...]:
        """See Routes.brokers."""
        from .v1 import route_service_pb2

        answer = await self.ask(_methods.GET_CLUSTER_INFO, b"", timeout_s)
        info = route_service_pb2.GetClusterInfoResponse.FromString(answer)
        return tuple(broker_address(broker) for broker in info.brokers if broker.broker_id == 0)

    async def ask(self, method: MethodInfo, request: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """See Routes.ask."""
        deadline_s = time.monotonic() + timeout_s
        names = self.name_servers
        if names.needs_reading(time.monotonic()):
            await asyncio.to_thread(names.read_url, timeout_s / 2, time.monotonic())
        errors: list[ProtomqError] = []
        for server, try_timeout_s in tries(names.in_order(), deadline_s):
            try:
                answer = await self._transport.call(server, method, (request,), try_timeout_s)
            except UnknownMethodError as error:
                raise no_name_server(server, method) from error
            except ProtomqError as error:
                if not error.retriable and not isinstance(error, NotFoundError):
                    raise
                errors.append(error)
                continue
            names.prefer(server)
            return answer
        raise outcome_of_failures(errors, names)

    async def close(self) -> None:
        """Ends look-ups under way."""
        for task in list(self._looking_up.values()):
            task.cancel()
        self._looking_up.clear()

    async def _look_up(self, topic: str) -> Route:
        try:
            route = decode_route(
                await self.ask(_methods.GET_ROUTE, encode_get_route(topic), TIMEOUT_S)
            )
        except ProtomqError as error:
            known = self._cache.failed(topic, error, time.monotonic())
            if known is None:
                raise
            self._outages.failed(NAME_SERVERS, topic, error)
            return known
        self._outages.answered(NAME_SERVERS, topic)
        return self._cache.store(route, time.monotonic())

    def _start_look_up(self, topic: str) -> asyncio.Task[Route]:
        task = self._looking_up.get(topic)
        if task is None or task.done():
            task = asyncio.get_running_loop().create_task(self._look_up(topic))
            self._looking_up[topic] = task
            task.add_done_callback(lambda done: self._looked_up(topic, done))
        return task

    def _looked_up(self, topic: str, task: asyncio.Task[Route]) -> None:
        if self._looking_up.get(topic) is task:
            del self._looking_up[topic]
        if not task.cancelled():
            task.exception()  # Seen, even if nobody waits.
