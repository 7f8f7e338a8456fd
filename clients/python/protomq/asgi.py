"""protomq in an application that speaks ASGI: FastAPI, Starlette, and others that have a lifespan. None of them is imported here.

    messaging = Messaging("shop")
    billing = messaging.consumer("billing")

    @billing.on("orders")
    async def bill(order: Order): ...

    app = FastAPI(lifespan=messaging.lifespan)

    @app.post("/orders")
    async def create(order: Order, producer: Annotated[AsyncProducer, Depends(messaging.producer)]) -> str:
        return (await producer.send("orders", order)).message_id

The application starts when all consumers have subscribed, and its shutdown waits for their listeners; the producer is closed last, since
listeners send. That goes on, in this order, where the lifespan is cancelled; the next one waits for it. A lifespan may be entered again
after it has ended, as test clients do: it has clients of its own each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Unpack

from ._async_producer import AsyncProducer
from ._async_push_consumer import AsyncPushConsumer
from ._checks import check_settings
from ._closing import Closing
from ._connection_options import ConnectionOptions, connection_of
from ._producer_options import ProducerOptions, ProducerSettings
from ._push_base import PushBase
from ._push_options import PushOptions, PushSettings
from .errors import ConfigurationError

__all__ = ["AppConsumer", "Messaging"]


class AppConsumer(PushBase):
    """A push consumer of an application: its listeners, given by `on` or `subscribe` before the application starts."""

    def __init__(self, connection: ConnectionOptions, group: str, settings: PushSettings) -> None:
        """Not for users: see Messaging.consumer."""
        super().__init__(PushOptions(group=group, **settings))
        self._connection = connection
        self._settings = settings
        self._running: AsyncPushConsumer | None = None

    @property
    def is_running(self) -> bool:
        """Whether the application has started it, and not stopped it yet."""
        return self._running is not None and self._running.is_running

    async def running(self) -> AsyncPushConsumer:
        """The consumer of the running application: a dependency, `Depends(billing.running)`. Raises ConfigurationError without one."""
        if self._running is None:
            raise ConfigurationError(f"the consumer of group {self.group!r} does not run: {_NOT_STARTED}")
        return self._running

    def make(self) -> AsyncPushConsumer:
        """A consumer with these listeners that is not started: for `protomq.testing.FakeGroup`."""
        made = AsyncPushConsumer(self.group, connection=self._connection, **self._settings)
        made._listen_as(self)
        return made

    def unsubscribe(self, topic: str) -> None:
        """See PushConsumer.unsubscribe; before the application starts."""
        self._look()
        super().unsubscribe(topic)

    async def _start(self) -> None:
        consumer = self.make()
        await consumer.start()
        self._running = consumer

    async def _stop(self, timeout_s: float | None) -> None:
        """May be called again where it was cut off."""
        if self._running is not None:
            try:
                await self._running.stop(timeout_s)
            except Exception:
                self._running = None
                raise
            self._running = None

    def _check_may_subscribe(self) -> None:
        self._look()

    def _look(self) -> None:
        if self._running is not None:
            raise ConfigurationError(
                f"group {self.group!r}: the application has started; subscribe before, or with the consumer that `running` gives"
            )


class Messaging:
    """The producer and the consumers of one application."""

    def __init__(
        self,
        group: str = "",
        *,
        connection: ConnectionOptions | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        """`group` and the settings: of the producer. `connection`: of all clients; None: PROTOMQ_NAMESRV_ADDR, or this machine."""
        check_settings("Messaging", settings, [*ProducerSettings.__annotations__])
        self._connection = connection_of(connection)
        ProducerOptions(group=group, **settings)
        self._group = group
        self._settings = settings
        self._consumers: list[AppConsumer] = []
        self._producer: AsyncProducer | None = None
        self._ending: Callable[[], Awaitable[None]] | None = None
        """Waits for the end of a lifespan, from the moment on when it begins."""

    def consumer(self, group: str, **settings: Unpack[PushSettings]) -> AppConsumer:
        """A push consumer that runs while the application does. The settings are those of AsyncPushConsumer."""
        check_settings("Messaging.consumer", settings, [*PushSettings.__annotations__])
        if self._producer is not None:
            raise ConfigurationError(
                f"the application has started: a consumer of group {group!r} would never run; make it before, or start an AsyncPushConsumer"
            )
        made = AppConsumer(self._connection, group, settings)
        self._consumers.append(made)
        return made

    async def producer(self) -> AsyncProducer:
        """The application's producer: a dependency, `Depends(messaging.producer)`. Raises ConfigurationError outside of its lifespan."""
        if self._producer is None:
            raise ConfigurationError(f"there is no producer: {_NOT_STARTED}")
        return self._producer

    @property
    def is_running(self) -> bool:
        """Whether the application has started, and all its consumers run: what a readiness probe asks."""
        return self._producer is not None and self._ending is None and all(consumer.is_running for consumer in self._consumers)

    @asynccontextmanager
    async def lifespan(self, app: Any = None) -> AsyncIterator[None]:
        """What the application takes as its `lifespan`; within a lifespan of your own: `async with messaging.lifespan(app): yield`.

        Raises what the start of a consumer raises: the application does not start then.
        """
        if self._ending is not None:  # That of a lifespan which was cancelled.
            await self._ending()
        if self._producer is not None:
            raise ConfigurationError("this lifespan runs: each application has a Messaging of its own")
        producer = self._producer = AsyncProducer(self._group, connection=self._connection, **self._settings)
        closing = Closing(None)
        end = partial(self._end, producer)
        ending = partial(closing.wait, partial(end, None), partial(end, 0.0), partial(self._abort, producer))
        try:
            for consumer in self._consumers:
                await consumer._start()
            yield
        finally:
            self._ending = ending
            await ending()

    async def _end(self, producer: AsyncProducer, timeout_s: float | None) -> None:
        """The producer closes when no listener runs any more. May be called again where it was cut off."""
        outcomes = await asyncio.gather(*(consumer._stop(timeout_s) for consumer in self._consumers), return_exceptions=True)
        await producer.close(timeout_s)
        self._producer = self._ending = None
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def _abort(self, producer: AsyncProducer) -> None:
        """The end has failed, or its loop has ended. There may be another lifespan all the same."""
        producer._transport.abort()
        for consumer in self._consumers:
            consumer._running = None
        self._producer = self._ending = None


_NOT_STARTED = "the application has not started, or it lacks lifespan=messaging.lifespan"
