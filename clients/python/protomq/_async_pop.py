"""AsyncSimpleConsumer: `_pop.SimpleConsumer` for coroutines of one event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal
from weakref import WeakSet

from . import _forks
from ._async_acks import AckGatherer
from ._async_routes import AsyncRoutes
from ._async_steps import AsyncDriver
from ._checks import check_flag, explain_unknown_settings
from ._client_name import client_name
from ._closing import Closing
from ._connection_options import ConnectionOptions, connection_of
from ._hook_points import HookPoints, check_hooks
from ._hooked_async_calls import async_transport_with
from ._hooked_consuming import hooked_listener
from ._late_imports import load_needed_modules
from ._late_pops import LatePop
from ._message import Message
from ._of_one_process import OfOneProcess
from ._pop import REQUEST_TIMEOUT_S
from ._pop_handling import (
    AHEAD_DEFAULT,
    CONCURRENCY_DEFAULT,
    DRAIN_TIMEOUT_DEFAULT_S,
    RECEIVE_HOLD_S,
    RENEW_LIMIT_DEFAULT_S,
    HandledCounts,
    Handling,
    HandlingOptions,
    Hold,
    check_alone,
    hold_of,
)
from ._pop_steps import (
    COUNT_DEFAULT,
    GIVE_BACK_S,
    HOLD_DEFAULT_S,
    INVISIBLE_DEFAULT_S,
    PopSteps,
    Start,
)
from ._pop_tasks import HandlerTasks
from ._push_results import Listener
from ._steps import Steps
from ._trace import Tracer, close_steps, traced
from ._types import PEER_TIMEOUT_S, Body, BrokerAddress, MessageQueue
from .errors import ClosedError, ConfigurationError
from .hooks import Hook


class AsyncSimpleConsumer(OfOneProcess):
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
        trace: bool = False,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """See SimpleConsumer."""
        check_hooks(hooks)
        self._hooks = HookPoints(group, hooks)
        self._tracer: Tracer | None = None
        load_needed_modules("protomq.v1.pop_service_pb2")
        connection = connection_of(
            connection, namesrv=namesrv, transport=transport, client_id=client_id, peer_timeout_s=peer_timeout_s,
        )  # fmt: skip
        self._transport = async_transport_with(connection, self._hooks)
        self._hooks.named_by(client_name(connection.client_id))
        if check_flag("trace", trace):
            self._tracer = traced(self._hooks, connection, connection.namesrv)
        self._steps = PopSteps(group, request_timeout_s, hooks=self._hooks, kind_of=self._transport.kind)
        self._routes = AsyncRoutes(self._transport, connection.namesrv)
        self._hooks.located_by(self._routes.last_known, self._transport.kind)
        self._transport.is_replaced = self._routes.is_replaced
        self._transport.on_late = self._came_late
        self._steps.on_abandoned = self._give_back
        self._driver = AsyncDriver(self._transport, self._routes)
        self._begin()
        self._closed = False
        self._closing = Closing(None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fork_count = _forks.fork_count

    def _begin(self) -> None:
        """In a loop: nothing is under way in it yet."""
        self._giving_back: set[asyncio.Task[None]] = set()
        self._acks = AckGatherer(self._steps, self._driver.run)
        self._handlers: set[HandlerTasks] = set()
        self._handlings: WeakSet[Handling] = WeakSet()
        """As in SimpleConsumer. Handlers on threads ask, too."""
        self._handlings_lock = threading.Lock()

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
        """See SimpleConsumer.receive. A call that is cancelled takes no messages. Those that were on their way go to the next call,
        or are given back.
        """
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
        messages = await self._driver.run(self._steps.receive(wish))
        self._steps.tell_received(messages)
        return messages

    async def ack(self, messages: Message | Iterable[Message]) -> list[Message]:
        """See SimpleConsumer.ack. What several tasks acknowledge side by side goes to a broker in one call."""
        self._check_open()
        return await self._acks.ack(messages)

    async def change_invisible(
        self, messages: Message | Iterable[Message], invisible_s: float
    ) -> list[Message]:
        """See SimpleConsumer.change_invisible."""
        self._check_open()
        return await self._driver.run(self._steps.change_invisible(messages, invisible_s))

    async def nack(
        self, messages: Message | Iterable[Message], after_s: float = 0.0, *, error: str | BaseException = ""
    ) -> list[Message]:
        """See SimpleConsumer.nack."""
        self._check_open()
        return await self._driver.run(self._steps.nack(messages, after_s, error))

    async def handle(
        self,
        topic: str,
        handler: Callable[..., object],
        *,
        concurrency: int = CONCURRENCY_DEFAULT,
        invisible_s: float = INVISIBLE_DEFAULT_S,
        renew_limit_s: float = RENEW_LIMIT_DEFAULT_S,
        drain_timeout_s: float = DRAIN_TIMEOUT_DEFAULT_S,
        ahead: int = AHEAD_DEFAULT,
        queue: MessageQueue | None = None,
        tags: Iterable[str] = (),
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
        fifo: bool = False,
        start: Start = "earliest",
    ) -> HandledCounts:
        """See SimpleConsumer.handle. `handler` is a coroutine function, with a task for each message, or a function, with a thread.

        Coroutines that still run `drain_timeout_s` after `request_stop` are cancelled, and all of them when the call is, which then takes
        up to 2 s. Their messages are given back. `close` cancels all of them, and gives nothing back.
        """
        self._check_open()
        function = hooked_listener(Listener.of(handler), self._hooks)
        options = HandlingOptions(concurrency, invisible_s, renew_limit_s, drain_timeout_s, ahead)
        wish = self._steps.wish(
            topic, concurrency, invisible_s=invisible_s, hold_s=RECEIVE_HOLD_S, queue=queue, tags=tags, sql=sql, cel=cel, module=module,
            fifo=fifo, start=start,
        )  # fmt: skip
        tasks = HandlerTasks(self._steps, Handling(self._steps, wish, options, function.name), function, self._driver.run)
        check_alone(tasks.handling, [others.handling for others in self._handlers if others.begins_handlers])
        self._handlers.add(tasks)
        with self._handlings_lock:
            self._handlings.add(tasks.handling)
        try:
            return await tasks.work()
        finally:
            if tasks.ending is None:
                self._handlers.discard(tasks)
            else:
                tasks.ending.add_done_callback(lambda _: self._handlers.discard(tasks))

    def hold(self, message: Message) -> Hold:
        """See SimpleConsumer.hold."""
        with self._handlings_lock:
            handlings = list(self._handlings)
        return hold_of(message, handlings)

    def request_stop(self) -> None:
        """Every `handle` returns soon: within 2 s, and when its handlers have."""
        for tasks in self._handlers:
            tasks.stop()

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
        """See SimpleConsumer.close. It goes on where the caller is cancelled, and a second call waits for it."""
        if self._closing.is_own:
            return
        if self._is_of_another_loop():
            raise ConfigurationError("this simple consumer belongs to another event loop, which is still open: close it there")
        self._enter_loop()
        self._closed = self._steps.is_closed = True
        for tasks in self._handlers:
            tasks.stop()
            tasks.close()
        await self._closing.wait(self._end, self._end, self._transport.abort)

    async def _end(self) -> None:
        """May be called again where it was cut off."""
        # Calls of `handle` that were cancelled, and not waited for.
        if ending := [tasks.ending for tasks in self._handlers if tasks.ending is not None and tasks.is_cancelled]:
            await asyncio.wait(ending, timeout=RECEIVE_HOLD_S + GIVE_BACK_S)
        await self._end_late()
        await self._routes.close()
        await self._transport.close()
        if self._tracer is not None:
            await self._driver.run(close_steps(self._tracer))

    def _came_late(self, address: BrokerAddress, request: Sequence[bytes], answer: bytes) -> None:
        """An answer has come when its `receive` was over."""
        late = self._steps.keep_late(request, address.broker_name, answer)
        if late is None:
            return
        if late.over.is_set():
            self._give_back_kept(late)
        else:
            asyncio.get_running_loop().call_later(late.kept_s, self._give_back_kept, late)

    def _give_back_kept(self, late: LatePop) -> None:
        if late in self._steps.late:
            self._begin_to_give_back(self._steps.give_back_kept(late))

    async def _end_late(self) -> None:
        """Gives back what is on its way to nobody, as far as it comes in time."""
        until_s = time.monotonic() + GIVE_BACK_S
        for late in self._steps.late.close():
            self._give_back_kept(late)
        if await self._driver.run(self._steps.give_up_held()):
            is_over = asyncio.Event()
            self._steps.held.over().add_done_callback(lambda _: is_over.set())
            with suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), max(until_s - time.monotonic(), 0.0))
        await self._transport.wait_for_late(max(until_s - time.monotonic(), 0.0))
        if self._giving_back:
            await asyncio.wait(self._giving_back, timeout=max(until_s - time.monotonic(), 0.0))
        self._transport.on_late = None

    def _give_back(self, messages: list[Message]) -> None:
        if not self._closed:
            self._begin_to_give_back(self._steps.give_back(messages))

    def _begin_to_give_back(self, steps: Steps[None]) -> None:
        task = asyncio.get_running_loop().create_task(self._driver.run(steps))
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)

    async def __aenter__(self) -> AsyncSimpleConsumer:
        self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed")
        if self._is_of_another_loop():
            raise ConfigurationError(
                "this simple consumer belongs to another event loop, which is still open: use it there, or make a consumer in each loop"
            )
        self._enter_loop()

    def _enter_loop(self) -> None:
        """What was under way in a loop that is closed, or was a parent's, ended with it."""
        loop = asyncio._get_running_loop()
        if loop is None:
            return  # The first step of a task that begins where it is made, before its loop runs.
        if self._loop is not None and (self._loop is not loop or self._fork_count != _forks.fork_count):
            if self._fork_count != _forks.fork_count:
                self._acks.forget()
            self._acks.leave_loop()
            self._begin()
        self._loop, self._fork_count = loop, _forks.fork_count

    def _is_of_another_loop(self) -> bool:
        """A loop that is closed, or was a parent's, keeps nothing."""
        if self._loop is None or self._loop.is_closed() or self._fork_count != _forks.fork_count:
            return False
        return self._loop is not asyncio.get_running_loop()
