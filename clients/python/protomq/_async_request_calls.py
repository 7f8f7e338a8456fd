"""Requests from coroutines: one task for each broker at which replies are waited for, while there are any. See `_requests.py`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from ._async_steps import AsyncDriver
from ._outgoing import SendResult
from ._requests import (
    Reply,
    ReplyInbox,
    follow_steps,
    listen_steps,
    no_reply,
    seconds_left,
)
from ._types import Route
from .errors import ClosedError, ProtomqError

logger = logging.getLogger("protomq.producer")

GOODBYE_S = 1.0


class AsyncRequestCalls:
    """The requests of one producer. Coroutines of its event loop."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver
        self._inboxes: dict[str, ReplyInbox] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    async def request(
        self,
        route: Route,
        properties: Mapping[str, str] | None,
        deadline_s: float,
        send: Callable[[Mapping[str, str], float, str], Awaitable[SendResult]],
    ) -> Reply:
        """See RequestCalls.request."""
        timeout_s = seconds_left(deadline_s)
        future: asyncio.Future[tuple[bytes, Mapping[str, str]]]
        future = asyncio.get_running_loop().create_future()
        inbox = await self._listen(route, deadline_s)
        call_id = inbox.begin(future)
        if self._closed:
            inbox.close()
        try:
            self._follow(inbox)
            own = inbox.properties(call_id, seconds_left(deadline_s))
            sent = await send(
                {**(properties or {}), **own}, seconds_left(deadline_s), inbox.broker_name
            )
            try:
                body, answered = await asyncio.wait_for(future, seconds_left(deadline_s))
            except TimeoutError:
                raise no_reply(sent, timeout_s) from None
            return Reply(body, answered, sent)
        finally:
            inbox.end(call_id)
            # What it failed with is not awaited where the send has failed before.
            if not future.cancel() and not future.cancelled():
                future.exception()

    async def _listen(self, route: Route, deadline_s: float) -> ReplyInbox:
        """An inbox at a broker that knows of it."""
        return await self._driver.run(listen_steps(route, self._inboxes, self._inbox_at, deadline_s))

    def _inbox_at(self, topic: str, broker_name: str) -> tuple[ReplyInbox, bool]:
        if self._closed:
            raise ClosedError("the producer is closed")
        inbox = self._inboxes.setdefault(broker_name, ReplyInbox(topic, broker_name))
        inbox.topic = topic
        return inbox, self._is_followed(broker_name)

    def _follow(self, inbox: ReplyInbox) -> None:
        if not self._is_followed(inbox.broker_name) and not self._closed:
            task = asyncio.get_running_loop().create_task(self._run(inbox))
            self._tasks[inbox.broker_name] = task

    def _is_followed(self, broker_name: str) -> bool:
        """Not by a task that has failed, or that somebody has cancelled: the next request begins another one."""
        task = self._tasks.get(broker_name)
        return task is not None and not task.done()

    async def _run(self, inbox: ReplyInbox) -> None:
        try:
            await self._driver.run(follow_steps(inbox, lambda: self._goes_on(inbox)))
        except Exception:
            logger.exception("replies from %s are waited for no more", inbox.broker_name)

    def _goes_on(self, inbox: ReplyInbox) -> bool:
        if not self._closed and inbox.is_needed:
            return True
        self._tasks.pop(inbox.broker_name, None)
        return False

    async def close(self) -> None:
        """See RequestCalls.close."""
        self.abort()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
        for inbox in self._inboxes.values():
            with suppress(ProtomqError):
                await self._driver.run(inbox.wait_steps(0.0, GOODBYE_S, leaves=True))

    def abort(self) -> None:
        """`close`, for whoever cannot wait: no broker hears of it."""
        self._closed = True
        for inbox in self._inboxes.values():
            inbox.close()
        for task in self._tasks.values():
            task.cancel()
