"""AsyncProducer: sending from coroutines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, Unpack

from ._async_request_calls import AsyncRequestCalls
from ._async_routes import AsyncRoutes
from ._async_send_lines import AsyncLine, AsyncLineSender
from ._async_steps import AsyncDriver
from ._async_transport import AsyncTransport
from ._at_exit import call_at_exit
from ._batching import PreparedRecord
from ._calls_under_way import TaskCalls
from ._checks import check_batch, check_queue, check_seconds, check_selector, check_topic
from ._choices import CHOSE_BADLY, choices_of
from ._client_name import client_name
from ._closing import Closing
from ._connection_options import ConnectionOptions, connection_of
from ._delays import when_of
from ._forks import call_after_fork
from ._hook_points import HookPoints
from ._hooked_async_calls import async_transport_with
from ._outgoing import BatchResult, OutgoingMessage, SendResult
from ._producer_options import ProducerOptions, ProducerSettings
from ._requests import Reply, check_request, queue_at, reply_steps, reply_timeout_s
from ._send_arguments import (
    as_message,
    refuse_call_hooks,
    refuse_settings_beside_transport,
    when_of_message,
)
from ._send_core import SendCore
from ._send_steps import recall, send_batch, send_one_way
from ._show_settings import show_settings
from ._steps import Steps, T
from ._trace import Tracer, close_steps, traced
from ._types import PEER_TIMEOUT_S, Body, Delay, MessageQueue, Route
from .errors import (
    ClosedError,
    ConfigurationError,
    ProtomqError,
    RequestTimeoutError,
)

if TYPE_CHECKING:
    from datetime import datetime

    from ._message import Message
    from ._selectors import QueueSelector


@show_settings(ProducerOptions, ProducerSettings.__annotations__)
class AsyncProducer(AsyncLineSender):
    """Sends messages from coroutines of one event loop. In another one, while the first is open, a send raises ConfigurationError.

        async with AsyncProducer("shop", namesrv="127.0.0.1:9876") as producer:
            result = await producer.send("orders", b"...", key="order-17", tag="created")

    As Producer, with `await`; the arguments are the same, but for `spin`: nothing blocks here. Coroutines that send at the same time
    share requests on one connection per broker.
    """

    def __init__(
        self,
        group: str = "",
        *,
        namesrv: str | Sequence[str] | None = None,
        transport: AsyncTransport | Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        connection: ConnectionOptions | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        self.options = ProducerOptions(group=group, **settings)
        self._hooks = HookPoints(group, self.options.hooks)
        self._owns_transport = not isinstance(transport, AsyncTransport)
        if isinstance(transport, AsyncTransport):
            refuse_settings_beside_transport(connection, client_id, peer_timeout_s)
            refuse_call_hooks(self._hooks)
            self._transport = transport
        else:
            connection = connection_of(
                connection, namesrv=namesrv, transport=transport, client_id=client_id,
                peer_timeout_s=peer_timeout_s, group=group,
            )  # fmt: skip
            self._transport, namesrv = async_transport_with(connection, self._hooks), connection.namesrv
        self._hooks.named_by(client_name(self._transport.options.client_id))
        self._routes = AsyncRoutes(self._transport, namesrv, sends=True)
        self._hooks.located_by(self._routes.last_known, self._transport.kind)
        if self._transport.is_replaced is None:
            self._transport.is_replaced = self._routes.is_replaced
        self._driver = AsyncDriver(self._transport, self._routes)
        self._closed = False
        self._tracer: Tracer | None = None
        if self.options.trace:
            self._tracer = traced(self._hooks, self._transport.options, namesrv)
        self._core = self._make_core()
        self._start()
        call_after_fork(self)
        call_at_exit(self)

    def _make_core(self) -> SendCore:
        return SendCore(self.options, self._hooks)

    def _start(self) -> None:
        self._lines: dict[tuple[str, MessageQueue | None, bytes | None], AsyncLine] = {}
        self._pending_size = 0
        self._waiting_for_room: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._binding = threading.Lock()
        self._closing = Closing(None)
        self._requests = AsyncRequestCalls(self._driver)
        self._calls = TaskCalls()

    # -- sending -------------------------------------------------------------------------------------------------------

    async def send(
        self,
        topic: str | OutgoingMessage,
        body: Body = b"",
        *,
        key: str | None = None,
        keys: Sequence[str] = (),
        tag: str = "",
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        selector: QueueSelector | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Sends a message and waits until it is stored. See Producer.send.

        Messages to one chosen queue keep the order of the calls. A cancelled send may still be carried out.
        """
        if (
            sharding_key is not None
            or selector is not None
            or delay is not None
            or deliver_at is not None
            or self._hooks.send
            or not isinstance(topic, str)
        ):
            message = as_message(
                topic, body, key, keys, tag, properties, queue, sharding_key, delay, deliver_at
            )
            with self._calls.one():
                return await self._send_message(message, selector, timeout_s)
        if queue is not None and type(queue) is not MessageQueue:
            check_queue(topic, queue)
        deadline_s = self._deadline(timeout_s)
        record = self._core.prepare(body, key, keys, tag, properties, deadline_s=deadline_s)
        if timeout_s is not None or self._pending_size > self.options.pending_size_max_bytes:
            with self._calls.one():
                return await self._send_bounded(topic, record, queue, deadline_s)
        line = self._lines.get((topic, queue, None)) or self._line(topic, queue, None)
        return await self._enqueue(line, record, deadline_s).future

    async def send_one_way(
        self,
        topic: str | OutgoingMessage,
        body: Body = b"",
        *,
        key: str | None = None,
        keys: Sequence[str] = (),
        tag: str = "",
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        selector: QueueSelector | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Sends a message without an answer: nothing tells whether it was stored. No retries. See Producer.send_one_way."""
        message = as_message(
                topic, body, key, keys, tag, properties, queue, sharding_key, delay, deliver_at
            )
        check_selector(selector, message.queue)
        check_queue(message.topic, message.queue)
        deadline_s = self._deadline(timeout_s)
        await self._run(send_one_way(self._core, message, selector, deadline_s))

    async def send_batch(
        self,
        topic: str,
        messages: Sequence[Body | OutgoingMessage],
        *,
        keys: Sequence[str | None] | None = None,
        tags: str | Sequence[str] = "",
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        timeout_s: float | None = None,
    ) -> BatchResult:
        """Sends many messages of one topic. See Producer.send_batch; requests to different queues travel at the same time."""
        deadline_s = self._deadline(timeout_s)
        check_batch(topic, messages, keys, tags, queue, sharding_key)
        if not messages:
            return BatchResult(())
        when = when_of(delay, deliver_at)
        return await self._run(
            send_batch(
                self._core,
                topic,
                messages,
                keys,
                tags,
                queue,
                sharding_key,
                when,
                deadline_s,
                self._routes.cached,
            )
        )

    async def recall(
        self, topic: str, recall_handle: str, *, timeout_s: float | None = None
    ) -> bool:
        """Takes a delayed message back. See Producer.recall."""
        check_topic(topic)
        deadline_s = self._deadline(timeout_s)
        return await self._run(recall(self._core, topic, recall_handle, deadline_s))

    async def request(
        self,
        topic: str,
        body: Body = b"",
        *,
        key: str | None = None,
        keys: Sequence[str] = (),
        tag: str = "",
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """See Producer.request."""
        check_topic(topic)
        check_queue(topic, queue)
        check_request(properties)
        deadline_s = self._deadline(timeout_s)
        route = await self._route(topic, deadline_s, queue)

        async def send(
            all_properties: Mapping[str, str], within_s: float, broker_name: str
        ) -> SendResult:
            at = queue_at(route, queue, sharding_key, broker_name)
            return await self.send(
                topic, body, key=key, keys=keys, tag=tag, properties=all_properties, queue=at,
                sharding_key=sharding_key, timeout_s=within_s,
            )  # fmt: skip

        return await self._requests.request(route, properties, deadline_s, send)

    async def reply(
        self,
        message: Message,
        body: Body = b"",
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """See Producer.reply."""
        if timeout_s is None:
            timeout_s = reply_timeout_s(self.options.send_timeout_s)
        within_s = self._deadline(timeout_s) - time.monotonic()
        await self._run(reply_steps(message, body, properties, within_s))

    async def _run(self, steps: Steps[T]) -> T:
        """As in Producer."""
        with self._calls.one():
            return await self._driver.run(steps)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Waits until every message whose `send` is under way in another task has its outcome. So for batches, recalls and replies.

        See Producer.flush.
        """
        if self._closed:
            raise ClosedError("the producer is closed")
        if timeout_s is None:
            timeout_s = self.options.send_timeout_s
        check_seconds("timeout_s", timeout_s)
        self._bind_to_loop()
        futures = {
            entry.future
            for line in self._lines.values()
            for entry in (*line.in_flight, *line.pending)
        }
        deadline_s = time.monotonic() + timeout_s
        # Of these no line may know yet: they wait for a route, or for room.
        left_count = await self._calls.wait(timeout_s, frozenset(self._calls.now))
        timeout_s = max(deadline_s - time.monotonic(), 0.0)
        waiting = (await asyncio.wait(futures, timeout=timeout_s))[1] if futures else set()
        if count := max(left_count, len(waiting)):  # Some are both.
            raise RequestTimeoutError(f"{count} messages have no outcome yet", metadata={"pending": str(count)})

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def group(self) -> str:
        """The producer group; empty: none."""
        return self.options.group

    @property
    def compression(self) -> str:
        """The codec in use: "zstd", "lz4", "zlib" or "none". It differs from the one asked for if that is not installed."""
        return self._core.compressor.name

    @property
    def producer_id(self) -> int:
        """The first part of the ids of this producer's messages."""
        return self._core.sequences.producer_id

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """See Producer.queues."""
        return (await self._looked_at(topic)).write_queues

    async def transports(self, topic: str) -> dict[str, str]:
        """How each broker of the topic was reached last: "remoting", "grpc", or "" before the first send to it."""
        return {name: self._transport.kind(address) for name, address in (await self._looked_at(topic)).brokers.items()}

    async def _looked_at(self, topic: str) -> Route:
        """As in Producer."""
        check_topic(topic)
        route = await self._route(topic, self._deadline(None))
        self._routes.forget_unmade(topic)
        return route

    async def close(self, timeout_s: float | None = None) -> None:
        """Waits until what is on its way has its answer. See Producer.close.

        It goes on where the caller is cancelled, and a second call waits for it.
        """
        if self._closing.is_over or self._closing.is_own:
            return
        if timeout_s is None:
            timeout_s = self.options.send_timeout_s
        check_seconds("timeout_s", timeout_s, zero=True)
        if self._loop is not None and asyncio._get_running_loop() not in (None, self._loop):
            if not self._loop.is_closed():
                raise ConfigurationError("this producer belongs to another event loop, which is still open: close it there")
            self._bind_to_loop()
        self._closed = True
        abort = self._transport.abort if self._owns_transport else self._requests.abort
        await self._closing.wait(partial(self._end, timeout_s), partial(self._end, 0.0), abort)

    async def _end(self, timeout_s: float) -> None:
        """May be called again where it was cut off."""
        deadline_s = time.monotonic() + timeout_s
        await self._calls.wait(timeout_s)  # First: some of them come to a line.
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=max(deadline_s - time.monotonic(), 0.0))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for line in self._lines.values():
            for entry in line.pending:
                if not entry.future.done():
                    entry.future.set_exception(
                        ClosedError("the producer was closed before the message was sent")
                    )
            line.pending.clear()
        for waiter in self._waiting_for_room:
            if not waiter.done():
                waiter.set_exception(
                    ClosedError("the producer was closed before the message was sent")
                )
        await self._requests.close()
        await self._routes.close()
        if self._owns_transport:
            await self._transport.wait_for_one_way(max(deadline_s - time.monotonic(), 0.0))
            await self._transport.close()
        if self._tracer is not None:
            await self._driver.run(close_steps(self._tracer))

    async def __aenter__(self) -> AsyncProducer:
        if self._closed:
            raise ClosedError("the producer is closed")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _leave_loop(self) -> None:
        self._requests = AsyncRequestCalls(self._driver)
        super()._leave_loop()

    def after_fork(self) -> None:
        """Prepares a forked child: no connections, no waiting messages, another producer id. The SDK calls it."""
        self._core.after_fork()
        for line in self._lines.values():
            line.forget()
        self._start()

    def finish_at_exit(self) -> int:
        """When the interpreter ends, and with it the loop: how many messages are lost. Called by itself."""
        return 0 if self._closed else sum(line.count for line in self._lines.values())

    # -- one message ---------------------------------------------------------------------------------------------------

    async def _send_message(
        self, message: OutgoingMessage, selector: QueueSelector | None, timeout_s: float | None
    ) -> SendResult:
        """Sends with hooks, selectors and sharding keys."""
        core = self._core
        check_selector(selector, message.queue)
        deadline_s = self._deadline(timeout_s)
        message, context = core.before_send(message)
        result, error = None, None
        try:
            record = core.prepare_message(message, deadline_s)
            when = when_of_message(message)
            queue = await self._target_queue(message, selector, deadline_s)
            try:
                result = await self._send_bounded(message.topic, record, queue, deadline_s, when)
            except CHOSE_BADLY as refused:
                result = await self._choose_again(message, record, selector, deadline_s, refused)
            return result
        except BaseException as caught:
            error = caught
            raise
        finally:
            core.after_send(context, result, error)

    async def _choose_again(
        self,
        message: OutgoingMessage,
        record: PreparedRecord,
        selector: QueueSelector | None,
        deadline_s: float,
        refused: ProtomqError,
    ) -> SendResult:
        """See Producer._choose_again."""
        when = when_of_message(message)
        choices = choices_of(self._core, message, selector, deadline_s)
        while True:
            await self._driver.run(choices.again(refused))
            queue = await self._target_queue(message, selector, deadline_s)
            try:
                return await self._send_bounded(message.topic, record, queue, deadline_s, when)
            except CHOSE_BADLY as again:
                refused = again

    async def _target_queue(
        self, message: OutgoingMessage, selector: QueueSelector | None, deadline_s: float
    ) -> MessageQueue | None:
        if message.queue is None and not message.sharding_key and selector is None:
            return None
        return self._core.target_queue(
            await self._route(message.topic, deadline_s), message, selector
        )

    def _deadline(self, timeout_s: float | None) -> float:
        """Returns when a send that begins now must end. Every public send calls this, which refuses a closed producer and another loop."""
        if self._closed:
            raise ClosedError("the producer is closed")
        if timeout_s is None:
            timeout_s = self.options.send_timeout_s
        else:
            check_seconds("timeout_s", timeout_s)
        self._ensure_bound()
        return time.monotonic() + timeout_s
