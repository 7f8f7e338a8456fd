"""AsyncProducer: sending from coroutines."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, Unpack

from ._async_request_calls import AsyncRequestCalls
from ._async_routes import AsyncRoutes
from ._async_steps import AsyncDriver
from ._async_transport import AsyncTransport
from ._at_exit import call_at_exit, warn_of_loss
from ._batching import PreparedRecord
from ._checks import check_batch, check_queue, check_seconds, check_selector, check_topic
from ._connection_options import ConnectionOptions, connection_of
from ._delays import When, when_of
from ._forks import call_after_fork
from ._hook_points import HookPoints
from ._hooked_async_calls import async_transport_with
from ._lines import LINES_MAX, take_batch
from ._methods import SEND
from ._outgoing import BatchResult, OutgoingMessage, SendResult, Stored
from ._producer_options import ProducerOptions, ProducerSettings
from ._requests import Reply, queue_at, reply_steps
from ._retry import attempt_timeout
from ._send_arguments import (
    as_message,
    field_of,
    refuse_call_hooks,
    refuse_settings_beside_transport,
    when_of_message,
)
from ._send_core import SendCore
from ._send_request import address_of, fits
from ._send_steps import recall, route_for, send_again, send_groups
from ._show_settings import show_settings
from ._trace import Tracer, close_steps, traced
from ._types import PEER_TIMEOUT_S, Body, Delay, MessageQueue, Route, Target
from .errors import (
    ClosedError,
    ProtomqError,
    QueueNotFoundError,
    RequestTimeoutError,
)

if TYPE_CHECKING:
    from datetime import datetime

    from ._message import Message
    from ._selectors import QueueSelector


@show_settings(ProducerOptions, ProducerSettings.__annotations__)
class AsyncProducer:
    """Sends messages from coroutines of one event loop.

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
        self._hooks.client_id = self._transport.options.hello_client_id()
        self._routes = AsyncRoutes(self._transport, namesrv)
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
        self._lines: dict[tuple[str, MessageQueue | None, bytes | None], _Line] = {}
        self._pending_size = 0
        self._waiting_for_room: deque[asyncio.Future[None]] = deque()
        self._requests = AsyncRequestCalls(self._driver)

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
            return await self._send_message(message, selector, timeout_s)
        if queue is not None and type(queue) is not MessageQueue:
            check_queue(topic, queue)
        deadline_s = self._deadline(timeout_s)
        record = self._core.prepare(body, key, keys, tag, properties, deadline_s=deadline_s)
        if timeout_s is not None or self._pending_size > self.options.pending_size_max_bytes:
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
        """Sends a message without an answer: nothing tells whether it was stored. No retries."""
        message = as_message(
                topic, body, key, keys, tag, properties, queue, sharding_key, delay, deliver_at
            )
        check_selector(selector, message.queue)
        check_queue(message.topic, message.queue)
        deadline_s = self._deadline(timeout_s)
        core = self._core
        message, context = core.before_send(message, is_one_way=True)
        error: BaseException | None = None
        try:
            record = core.prepare_message(message, deadline_s)
            route = await self._route(message.topic, deadline_s, message.queue)
            request = core.make_request(
                route,
                (record,),
                core.target_queue(route, message, selector),
                field_of(when_of_message(message)),
            )
            within_s = deadline_s - time.monotonic()
            await self._transport.call(
                address_of(request), SEND, request.payload, within_s, one_way=True
            )
        except BaseException as caught:
            error = caught
            raise
        finally:
            core.after_send(context, None, error)

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
        core, context = self._core, None
        when = when_of(delay, deliver_at)
        if core.hooks.send:
            given = core.as_messages(topic, messages, keys, tags)
            context = core.hooks.before_send(topic, given, is_batch=True)
            messages, keys, tags = context.messages, None, ""
        try:
            records = core.prepare_many(messages, topic, keys, tags, deadline_s, when)
            route = await self._route(topic, deadline_s, queue)
            groups, places = core.group(route, records, messages, queue, sharding_key, when)
            result = await self._driver.run(send_groups(core, route, groups, places, deadline_s))
        except BaseException as error:
            if context is not None:
                core.hooks.after_send(context, (), error)
            raise
        if context is not None:
            core.hooks.after_send(context, result, None)
        return result

    async def recall(
        self, topic: str, recall_handle: str, *, timeout_s: float | None = None
    ) -> bool:
        """Takes a delayed message back. See Producer.recall."""
        check_topic(topic)
        deadline_s = self._deadline(timeout_s)
        return await self._driver.run(recall(self._core, topic, recall_handle, deadline_s))

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
        within_s = self._deadline(timeout_s) - time.monotonic()
        await self._driver.run(reply_steps(message, body, properties, within_s))

    async def flush(self, timeout_s: float | None = None) -> None:
        """Waits until every message whose `send` is under way in another task has its outcome. See Producer.flush."""
        if self._closed:
            raise ClosedError("the producer is closed")
        if timeout_s is None:
            timeout_s = self.options.send_timeout_s
        check_seconds("timeout_s", timeout_s)
        futures = {
            entry.future
            for line in self._lines.values()
            for entry in (*line.in_flight, *line.pending)
        }
        waiting = (await asyncio.wait(futures, timeout=timeout_s))[1] if futures else set()
        if waiting:
            raise RequestTimeoutError(
                f"{len(waiting)} messages have no outcome yet", metadata={"pending": str(len(waiting))}
            )

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def group(self) -> str:
        """The producer group; empty: none."""
        return self.options.group

    @property
    def compression(self) -> str:
        """The codec in use: "zstd", "lz4", "zlib" or "none"; another than was asked for if that is not installed."""
        return self._core.compressor.name

    @property
    def producer_id(self) -> int:
        """The first part of the ids of this producer's messages."""
        return self._core.sequences.producer_id

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """See Producer.queues."""
        check_topic(topic)
        return (await self._route(topic, self._deadline(None))).write_queues

    async def transports(self, topic: str) -> dict[str, str]:
        """How each broker of the topic was reached last: "remoting", "grpc", or "" before the first send to it."""
        check_topic(topic)
        return {
            name: self._transport.kind(address)
            for name, address in (await self._route(topic, self._deadline(None))).brokers.items()
        }

    async def close(self, timeout_s: float | None = None) -> None:
        """Waits until what is on its way has its answer. See Producer.close."""
        if self._closed:
            return
        if timeout_s is None:
            timeout_s = self.options.send_timeout_s
        check_seconds("timeout_s", timeout_s, zero=True)
        self._closed = True
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
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
        if self._tracer is not None:
            await self._driver.run(close_steps(self._tracer))
        await self._routes.close()
        if self._owns_transport:
            await self._transport.close()

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def after_fork(self) -> None:
        """In a forked child: no connections, no waiting messages, another producer id. Called by itself."""
        self._core.after_fork()
        self._start()

    def finish_at_exit(self) -> int:
        """When the interpreter ends, and with it the loop: how many messages are lost. Called by itself."""
        return 0 if self._closed else sum(line.count for line in self._lines.values())

    # -- one message ---------------------------------------------------------------------------------------------------

    async def _send_message(
        self, message: OutgoingMessage, selector: QueueSelector | None, timeout_s: float | None
    ) -> SendResult:
        """The general way: hooks, selectors, sharding keys."""
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
            except QueueNotFoundError:
                if message.queue is not None:
                    raise
                # The topic has fewer queues than the route said; it has been looked up again: choose again.
                queue = await self._target_queue(message, selector, deadline_s)
                result = await self._send_bounded(message.topic, record, queue, deadline_s, when)
            return result
        except BaseException as caught:
            error = caught
            raise
        finally:
            core.after_send(context, result, error)

    async def _target_queue(
        self, message: OutgoingMessage, selector: QueueSelector | None, deadline_s: float
    ) -> MessageQueue | None:
        if message.queue is None and not message.sharding_key and selector is None:
            return None
        return self._core.target_queue(
            await self._route(message.topic, deadline_s), message, selector
        )

    async def _send_bounded(
        self,
        topic: str,
        record: PreparedRecord,
        queue: MessageQueue | None,
        deadline_s: float,
        when: When | None = None,
    ) -> SendResult:
        """With a time-out of its own, and waiting for room while too much is on its way."""
        line = self._line(topic, queue, when)
        entry: _Entry | None = None
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + deadline_s - time.monotonic() + _GRACE_S
            ):
                while self._pending_size > self.options.pending_size_max_bytes:
                    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting_for_room.append(room)
                    await room
                entry = self._enqueue(line, record, deadline_s)
                return await entry.future
        except TimeoutError as timeout:
            if isinstance(timeout, ProtomqError):
                raise
            error = RequestTimeoutError(f"topic {topic}: no answer in time")
            if entry is None or entry in line.pending:
                error = RequestTimeoutError(
                    f"topic {topic}: the message was still waiting to be sent when its time was up"
                )
                error.definite = True
            raise error from None

    def _enqueue(self, line: _Line, record: PreparedRecord, deadline_s: float) -> _Entry:
        loop = asyncio.get_running_loop()
        entry = _Entry(record, deadline_s, loop.create_future())
        line.pending.append(entry)
        self._pending_size += len(record[0]) + len(record[3])
        if line.task is None:
            # It starts in the next turn of the loop: what other coroutines send in this one goes along.
            line.task = loop.create_task(self._serve(line))
        return entry

    def _line(self, topic: str, queue: MessageQueue | None, when: When | None) -> _Line:
        delay_field = field_of(when)
        line = self._lines.get((topic, queue, delay_field))
        if line is not None:
            return line
        check_topic(topic)
        check_queue(topic, queue)
        if when is not None and len(self._lines) >= LINES_MAX:
            # Delays may be of any number, unlike queues. What is delayed has no order to keep.
            for key, idle in list(self._lines.items()):
                if key[2] is not None and idle.task is None:
                    del self._lines[key]
        line = self._lines[topic, queue, delay_field] = _Line(topic, queue, delay_field)
        return line

    async def _serve(self, line: _Line) -> None:
        """Sends what waits in the line, request by request, until nothing does."""
        options = self.options
        try:
            while line.pending:
                line.in_flight = take_batch(
                    line.pending, options.coalesce_count_max, options.coalesce_size_max_bytes
                )
                await self._send_batch_of(line, line.in_flight)
                line.in_flight = []
        except asyncio.CancelledError:
            # By `close`, which tells each caller, or by the end of the loop, when no caller is left to be told.
            lost, line.in_flight = line.count, []
            if not self._closed:
                line.pending.clear()
                warn_of_loss(lost, "the event loop ended")
            raise
        finally:
            line.task = None  # Here, not in a callback: whoever sends next must see it at once.

    async def _send_batch_of(self, line: _Line, batch: list[_Entry]) -> None:
        size = sum(len(entry.record[0]) + len(entry.record[3]) for entry in batch)
        live = self._drop_expired(batch)
        try:
            if live:
                deadline_s = min(entry.deadline_s for entry in live)
                route = self._routes.cached(line.topic)
                if route is None or not fits(route, line.queue):
                    route = await self._route(line.topic, deadline_s, line.queue)
                stored = await self._dispatch(
                    route, [entry.record for entry in live], line.target, deadline_s
                )
                for index, entry in enumerate(live):
                    if not entry.future.done():
                        entry.future.set_result(stored.result(index))
        except asyncio.CancelledError:
            for entry in live:
                if not self._closed:
                    entry.future.cancel()
                elif not entry.future.done():
                    closed = ClosedError("the producer was closed before the broker had answered")
                    closed.definite = False
                    entry.future.set_exception(closed)
            raise
        except Exception as error:
            for entry in live:
                if not entry.future.done():
                    entry.future.set_exception(error)
        finally:
            self._pending_size -= size
            if self._waiting_for_room and self._pending_size <= self.options.pending_size_max_bytes:
                # All of them: each looks again whether there is room, and one that has gone takes nobody's turn.
                waiting, self._waiting_for_room = self._waiting_for_room, deque()
                for waiter in waiting:
                    if not waiter.done():
                        waiter.set_result(None)

    def _drop_expired(self, batch: list[_Entry]) -> list[_Entry]:
        """Without those whose time is up or whose caller has gone."""
        now_s = time.monotonic()
        for entry in batch:
            if entry.deadline_s <= now_s and not entry.future.done():
                error = RequestTimeoutError(
                    "the message was still waiting in line when its time was up"
                )
                error.definite = True
                entry.future.set_exception(error)
        return [entry for entry in batch if not entry.future.done()]

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _dispatch(
        self,
        route: Route,
        records: Sequence[PreparedRecord],
        target: Target,
        deadline_s: float,
    ) -> Stored:
        """See Producer._dispatch."""
        core = self._core
        request = core.make_request(route, records, *target)
        started_s = time.monotonic()
        try:
            answer = await self._transport.call(
                address_of(request), SEND, request.payload, attempt_timeout(deadline_s - started_s)
            )
            return core.answered(request, answer, started_s)
        except ProtomqError as error:
            core.failed(request, started_s)
            return await self._driver.run(send_again(core, request, route, deadline_s, error))

    async def _route(
        self, topic: str, deadline_s: float, queue: MessageQueue | None = None
    ) -> Route:
        """See Producer._route."""
        route = self._routes.cached(topic)
        if route is not None and fits(route, queue):
            return route
        return await self._driver.run(route_for(self._core, topic, queue, deadline_s))

    def _deadline(self, timeout_s: float | None) -> float:
        """When a send that begins now is to end. Every public send comes by here: a closed producer takes none."""
        if self._closed:
            raise ClosedError("the producer is closed")
        if timeout_s is None:
            timeout_s = self.options.send_timeout_s
        else:
            check_seconds("timeout_s", timeout_s)
        return time.monotonic() + timeout_s


_GRACE_S: Final = 0.05
"""The request itself knows its deadline and gives the better error; only if it does not, the caller's own timer ends the wait."""


class _Entry:
    """One message of one coroutine."""

    __slots__ = ("deadline_s", "future", "record")

    def __init__(
        self, record: PreparedRecord, deadline_s: float, future: asyncio.Future[SendResult]
    ) -> None:
        self.record = record
        self.deadline_s = deadline_s
        self.future = future


class _Line:
    """The line of a queue, or of a topic where `queue` is None. See _lines.py."""

    __slots__ = ("in_flight", "pending", "queue", "target", "task", "topic")

    def __init__(
        self, topic: str, queue: MessageQueue | None, delay_field: bytes | None
    ) -> None:
        self.topic = topic
        self.queue = queue
        self.target = Target(queue, delay_field)
        self.pending: deque[_Entry] = deque()
        self.in_flight: list[_Entry] = []
        """The messages of the request that is under way."""
        self.task: asyncio.Task[None] | None = None
        """Serves the line while anything waits in it, one request in flight at a time."""

    @property
    def count(self) -> int:
        """Messages without an outcome."""
        return len(self.in_flight) + len(self.pending)
