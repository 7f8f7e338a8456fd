"""AsyncDriver: drives the steps of `_steps.py` from a coroutine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from ._steps import (
    Block,
    CallServer,
    Each,
    Effect,
    ForgetRoute,
    GetRoute,
    Pause,
    SendOneWay,
    Steps,
    T,
    Tell,
    results_of,
)
from ._types import BrokerAddress, MethodInfo, Route


class CallsServers(Protocol):
    """What a driver needs of a transport."""

    async def call(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        *,
        one_way: bool = False,
    ) -> bytes:
        """See AsyncTransport.call."""


class KnowsRoutes(Protocol):
    """What a driver needs of routes."""

    async def get(self, topic: str, timeout_s: float) -> Route:
        """See AsyncRoutes.get."""

    async def current(self, topic: str, timeout_s: float) -> Route:
        """See AsyncRoutes.current."""

    def invalidate(self, topic: str, *, may_be_old: bool = False) -> None:
        """See AsyncRoutes.invalidate."""


class AsyncDriver:
    """Drives steps in the calling task. Coroutines of one event loop."""

    __slots__ = ("_pause", "_routes", "_transport")

    def __init__(
        self,
        transport: CallsServers,
        routes: KnowsRoutes | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._transport = transport
        self._routes = routes
        self._pause = pause

    async def run(self, steps: Steps[T]) -> T:
        """What the steps return; raises what they raise."""
        try:
            effect = next(steps)
            while True:
                outcome: Any = None
                thrown: BaseException | None = None
                try:
                    outcome = await self._do(effect)
                except BaseException as error:
                    thrown = error
                # Not while the error is handled: it would be the context of whatever the steps raise later.
                effect = steps.send(outcome) if thrown is None else steps.throw(thrown)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            # An error that refers to this frame is not to be kept by it.
            thrown = None

    async def _do(self, effect: Effect) -> Any:
        match effect:
            case CallServer():
                return await self._transport.call(*effect)
            case GetRoute(topic, timeout_s, may_be_old):
                assert self._routes is not None
                look = self._routes.current if may_be_old else self._routes.get
                return await look(topic, timeout_s)
            case ForgetRoute(topic, may_be_old):
                assert self._routes is not None
                self._routes.invalidate(topic, may_be_old=may_be_old)
            case Pause(seconds):
                await self._pause(seconds)
            case Block(function):
                return await asyncio.to_thread(function)
            case Tell(function):
                result = function()
                if inspect.isawaitable(result):
                    await result
            case Each(several):
                return results_of(await asyncio.gather(*(self.run(steps) for steps in several), return_exceptions=True))
            case SendOneWay():
                await self._transport.call(*effect, one_way=True)
        return None
