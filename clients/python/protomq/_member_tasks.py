"""The calls by which a consumer is a member of its group, from tasks of the event loop on which it was first used.

While that loop is blocked, a thread makes them (`_member_stand_in.py`).

The change of queues itself is the consumer's, inside `poll`: `on_news` says that there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable

from . import _methods
from ._async_routes import AsyncRoutes
from ._async_transport import AsyncTransport
from ._loop_ends import cancel
from ._member_driver import LEAVE_TIMEOUT_S, LOOK_MAX_S, take_outcome
from ._member_search import MemberSearch
from ._member_stand_in import MemberStandIn
from ._membership_logic import MembershipState, MemberTicket
from ._types import BrokerAddress
from .errors import ConnectionLostError, ProtomqError

logger = logging.getLogger("protomq")


class MemberTasks:
    """From tasks of the event loop on which it was first used."""

    def __init__(
        self, state: MembershipState, transport: AsyncTransport, on_news: Callable[[], None], routes: AsyncRoutes | None = None
    ) -> None:
        """`routes`: where brokers are searched for while the program does not poll."""
        self.state = state
        self._routes = routes
        self._search = MemberSearch(state, routes)
        self.lock = threading.RLock()
        self._transport = transport
        self._on_news = on_news
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._stand_in: MemberStandIn | None = None

    def poke(self) -> None:
        """See MemberDriver."""
        if self._closed:
            return
        loop, now_s = asyncio.get_running_loop(), time.monotonic()
        if self._stand_in is None:
            stand_in = MemberStandIn(self.state, self.lock, self._transport.options, self._stood_in)
            stand_in.start(loop)
            self._stand_in = stand_in
        with self.lock:
            searched = self._search.take_due(now_s)
            due = [self.state.begin(name, now_s) for name in self.state.due(now_s)]
            wait_s = min(self.state.next_due_in_s(now_s), self._search.next_due_in_s())
        for topic in searched:
            assert self._routes is not None
            self._routes.look_up_behind(topic)
        if due:
            self._stand_in.look()
        for call in due:
            task = loop.create_task(self._call(*call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(wait_s, self.poke) if wait_s < LOOK_MAX_S else None

    async def wait_known(self, timeout_s: float) -> None:
        """See MemberDriver."""
        await self._wait(self.state.is_known_everywhere, timeout_s)

    async def wait_granted(self, timeout_s: float) -> None:
        """See MemberDriver."""
        await self._wait(lambda: not self.state.has_open_claims(), timeout_s)

    async def wait_answered(self, broker_name: str, timeout_s: float) -> None:
        """See MemberDriver."""
        self.poke()
        await self._wait(lambda: self.state.is_answered(broker_name), timeout_s)

    async def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._closed:
                    with self.lock:
                        if is_so():
                            return
                    self._changed.clear()
                    await self._changed.wait()

    async def leave(self, pull_member: str) -> None:
        """Says to all brokers that the member goes, and pulls no more under this name. Who does not hear it finds out.

        Then there are no tasks any more.
        """
        self.abandon()
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._tasks if task.get_loop() is loop), return_exceptions=True)
        with self.lock:
            requests = self.state.leave_requests(pull_member)
        await asyncio.gather(*(self._say_leaving(leave.address, leave.payload) for leave in requests))

    async def _say_leaving(self, address: BrokerAddress, request: bytes) -> None:
        with contextlib.suppress(ProtomqError):
            await self._transport.call(address, _methods.LEAVE_GROUP, (request,), LEAVE_TIMEOUT_S)

    def abandon(self) -> None:
        """Nobody wants it any more; does not wait."""
        self._closed = True
        if self._stand_in is not None:
            self._stand_in.close()
        with contextlib.suppress(RuntimeError):  # Whoever waits, waits in a loop that is closed.
            self._changed.set()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            cancel(task)

    async def _call(
        self, ticket: MemberTicket, address: BrokerAddress, request: bytes, timeout_s: float
    ) -> None:
        result: bytes | ProtomqError
        try:
            result = await self._transport.call(
                address, _methods.HOLD_MEMBERSHIP, (request,), timeout_s
            )
        except ProtomqError as error:
            result = error
        except Exception as error:
            logger.exception("a call of a member of group %s failed, it makes it again", self.state.group)
            result = ConnectionLostError(f"{address.broker_name}: {error!r}")
        with self.lock:
            before = self.state.news
            take_outcome(self.state, ticket, result)
            has_news = self.state.news != before
        self._changed.set()
        if self._stand_in is not None:
            self._stand_in.look()
        if has_news:
            self._on_news()
        self.poke()

    def _stood_in(self) -> None:
        """The loop runs again: others have made its calls."""
        self._changed.set()
        self._on_news()
        self.poke()
