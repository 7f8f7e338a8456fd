"""The calls by which a consumer is a member of its group, from a thread of their own.

Of their own, since the program may work on a message for longer than the brokers would wait for a sign of life. The change of queues itself
is the consumer's, inside `poll`: `on_news` says that there is one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from . import _methods
from ._member_driver import LOOK_MAX_S, leaves, take_outcome
from ._member_search import MemberSearch
from ._membership_logic import MembershipState, MemberTicket
from ._pull_multiplexer import PullMultiplexer
from ._routes import Routes
from ._transport import SyncTransport
from .errors import ProtomqError

logger = logging.getLogger("protomq")

ANSWER_MAX_BYTES: Final = 16 << 20
RESTART_S: Final = 1.0
"""Before calls are made again after an error that is none of theirs."""


class MemberThread:
    """From a thread, which begins with the first call and ends with `close`, or `abandon`. Any thread."""

    def __init__(
        self, state: MembershipState, transport: SyncTransport, on_news: Callable[[], None], routes: Routes | None = None
    ) -> None:
        """`routes`: where brokers are searched for while the program does not poll."""
        self.state = state
        self._routes = routes
        self._search = MemberSearch(state, routes)
        self._transport = transport
        self._on_news = on_news
        self.after_fork()

    def after_fork(self) -> None:
        """In a child, or at the beginning: there is no thread, and no connection."""
        # A signal's handler may close the consumer on the thread that has it.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._calls: PullMultiplexer | None = None
        self._closed = False

    def poke(self) -> None:
        """See MemberDriver."""
        with self.lock:
            calls = self._calls
            if calls is None and not self._closed:
                calls = self._new_calls()
                try:
                    threading.Thread(
                        target=self._run, args=(calls,), name="protomq-member", daemon=True
                    ).start()
                except BaseException:  # The next look begins another one.
                    calls.close()
                    raise
                self._calls = calls
        if calls is not None:
            calls.wake()

    def wait_known(self, timeout_s: float) -> None:
        """See MemberDriver."""
        with self.lock:
            self._changed.wait_for(lambda: self._closed or self.state.is_known_everywhere(), timeout_s)

    def wait_granted(self, timeout_s: float) -> None:
        """See MemberDriver."""
        with self.lock:
            self._changed.wait_for(lambda: self._closed or not self.state.has_open_claims(), timeout_s)

    def wait_answered(self, broker_name: str, timeout_s: float) -> None:
        """See MemberDriver."""
        self.poke()
        with self.lock:
            self._changed.wait_for(lambda: self._closed or self.state.is_answered(broker_name), timeout_s)

    def leave(self, pull_member: str) -> None:
        """Says to all brokers that the member goes, and pulls no more under this name. Who does not hear it finds out.

        Then there is no thread any more.
        """
        with self.lock:
            requests = self.state.leave_requests(pull_member)
        self.abandon()
        for address, payload, timeout_s in leaves(requests):
            with contextlib.suppress(ProtomqError):
                self._transport.call(address, _methods.LEAVE_GROUP, (payload,), timeout_s)

    def abandon(self) -> None:
        """Nobody wants it any more; does not wait. It takes no lock, for it may run anywhere: the thread wakes who waits, when it ends."""
        self._closed = True
        calls = self._calls
        if calls is not None:
            calls.wake()

    def _new_calls(self) -> PullMultiplexer:
        return PullMultiplexer(self._transport, _methods.HOLD_MEMBERSHIP)

    def _run(self, calls: PullMultiplexer | None) -> None:
        while not self._closed:
            try:
                # Another one may need descriptors that are not there yet.
                if calls is None:
                    calls = self._calls = self._new_calls()
                with contextlib.closing(calls):
                    self._call(calls)
            except Exception:
                logger.exception("the calls of a member of group %s failed, it makes them again", self.state.group)
                calls = None
                with self.lock:
                    self.state.lose_calls(time.monotonic())
                    self._changed.notify_all()
                self._on_news()
                time.sleep(RESTART_S)
        with self.lock:
            self._changed.notify_all()

    def _call(self, calls: PullMultiplexer) -> None:
        """Until the member is closed."""
        while not self._closed:
            wait_s = self._send(calls)
            for ticket, result in calls.wait(min(wait_s, LOOK_MAX_S), ANSWER_MAX_BYTES):
                self._take(ticket, result)

    def _send(self, calls: PullMultiplexer) -> float:
        """Sends the calls that are due; in how many seconds the next one is."""
        with self.lock:
            now_s = time.monotonic()
            searched = self._search.take_due(now_s)
            due = [self.state.begin(name, now_s) for name in self.state.due(now_s)]
            wait_s = min(self.state.next_due_in_s(now_s), self._search.next_due_in_s())
        for topic in searched:
            assert self._routes is not None
            self._routes.look_up_behind(topic)
        for ticket, address, request, timeout_s in due:
            calls.send(address, ticket, request, timeout_s)
        return wait_s

    def _take(self, ticket: MemberTicket, result: bytes | ProtomqError) -> None:
        with self.lock:
            before = self.state.news
            take_outcome(self.state, ticket, result)
            has_news = self.state.news != before
            self._changed.notify_all()
        if has_news:
            self._on_news()
