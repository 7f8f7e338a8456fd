"""AsyncSimpleConsumer: `_pop.SimpleConsumer` for coroutines of one event loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ._async_routes import AsyncRoutes
from ._async_steps import AsyncDriver
from ._async_transport import AsyncTransport
from ._checks import explain_unknown_settings
from ._connection_options import ConnectionOptions, connection_of
from ._late_imports import load_needed_modules
from ._message import Message
from ._pop import REQUEST_TIMEOUT_S
from ._pop_steps import (
    COUNT_DEFAULT,
    HOLD_DEFAULT_S,
    INVISIBLE_DEFAULT_S,
    PopSteps,
    Start,
)
from ._types import PEER_TIMEOUT_S, Body, MessageQueue
from .errors import ClosedError


class AsyncSimpleConsumer:
    """See SimpleConsumer; every method that asks a broker is a coroutine, and several may be under way."""

    @explain_unknown_settings
    def __init__(
        self,
        group: str,
        *,
        namesrv: str | Sequence[str] | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        transport: Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        connection: ConnectionOptions | None = None,
    ) -> None:
        """See SimpleConsumer."""
        self._steps = PopSteps(group, request_timeout_s)
        load_needed_modules("protomq.v1.pop_service_pb2")
        connection = connection_of(
            connection, namesrv=namesrv, transport=transport, client_id=client_id, peer_timeout_s=peer_timeout_s,
        )  # fmt: skip
        self._transport = AsyncTransport(connection)
        self._routes = AsyncRoutes(self._transport, connection.namesrv)
        self._driver = AsyncDriver(self._transport, self._routes)
        self._closed = False

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._steps.group

    async def receive(
        self,
        topic: str,
        count: int = COUNT_DEFAULT,
        *,
        invisible_s: float = INVISIBLE_DEFAULT_S,
        hold_s: float = HOLD_DEFAULT_S,
        queue: MessageQueue | None = None,
        tags: Iterable[str] = (),
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
        fifo: bool = False,
        start: Start = "earliest",
    ) -> list[Message]:
        """See SimpleConsumer.receive. Messages of a call that is cancelled come again when their time is up."""
        self._check_open()
        wish = self._steps.wish(
            topic,
            count,
            invisible_s=invisible_s,
            hold_s=hold_s,
            queue=queue,
            tags=tags,
            sql=sql,
            cel=cel,
            module=module,
            fifo=fifo,
            start=start,
        )
        return await self._driver.run(self._steps.receive(wish))

    async def ack(self, messages: Message | Iterable[Message]) -> list[Message]:
        """See SimpleConsumer.ack."""
        self._check_open()
        return await self._driver.run(self._steps.ack(messages))

    async def change_invisible(
        self, messages: Message | Iterable[Message], invisible_s: float
    ) -> list[Message]:
        """See SimpleConsumer.change_invisible."""
        self._check_open()
        return await self._driver.run(self._steps.change_invisible(messages, invisible_s))

    async def nack(
        self, messages: Message | Iterable[Message], after_s: float = 0.0
    ) -> list[Message]:
        """See SimpleConsumer.nack."""
        return await self.change_invisible(messages, after_s)

    async def reply(
        self,
        message: Message,
        body: Body = b"",
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """See PullConsumer.reply."""
        self._check_open()
        await self._driver.run(self._steps.reply(message, body, properties, timeout_s))

    async def close(self) -> None:
        """See SimpleConsumer.close."""
        self._closed = True
        await self._routes.close()
        await self._transport.close()

    async def __aenter__(self) -> AsyncSimpleConsumer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed")
