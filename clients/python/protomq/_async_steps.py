"""AsyncDriver: drives the steps of `_steps.py` from a coroutine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from ._steps import (
    Block,
    CallRace,
    CallServer,
    Each,
    Effect,
    ForgetRoute,
    GetRoute,
    Pause,
    Race,
    SendOneWay,
    Start,
    Steps,
    T,
    Tell,
    results_of,
)
from ._types import BrokerAddress, MethodInfo, Route
from .errors import ProtomqError


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

    def came_late(self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], answer: bytes) -> None:
        """See AsyncTransport.came_late."""


class KnowsRoutes(Protocol):
    """What a driver needs of routes."""

    async def get(self, topic: str, timeout_s: float) -> Route:
        """See AsyncRoutes.get."""

    async def current(self, topic: str, timeout_s: float) -> Route:
        """See AsyncRoutes.current."""

    def invalidate(self, topic: str, *, may_be_old: bool = False, is_denied: bool = False) -> None:
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
            case ForgetRoute(topic, may_be_old, is_denied):
                assert self._routes is not None
                self._routes.invalidate(topic, may_be_old=may_be_old, is_denied=is_denied)
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
            case Race(race):
                await self._run_race(race)
        return None

    async def _run_race(self, race: CallRace) -> None:
        tasks: dict[asyncio.Task[bytes], Start] = {}

        def start(starts: list[Start]) -> None:
            for each in starts:
                tasks[asyncio.create_task(self._call(each.call))] = each

        try:
            start(race.begin())
            while not race.is_over:
                if not tasks:  # It pauses.
                    await asyncio.sleep(race.wait_s())
                    start(race.due())
                    continue
                done, _ = await asyncio.wait(tasks, timeout=race.wait_s(), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = task.exception()
                    if error is not None and not isinstance(error, ProtomqError):
                        raise error
                    start(race.ended(tasks.pop(task).name, error or task.result()))
                start(race.due())
        finally:
            for task, (_, call) in tasks.items():
                if not task.done():
                    task.cancel()
                elif not task.cancelled() and task.exception() is None:
                    self._transport.came_late(call.address, call.method, call.payload, task.result())

    async def _call(self, call: CallServer) -> bytes:
        return await self._transport.call(*call)
