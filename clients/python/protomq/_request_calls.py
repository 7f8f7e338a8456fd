"""Requests from threads: one thread for each broker at which replies are waited for, while there are any. See `_requests.py`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress

from ._interrupts import comes_of_signal
from ._outgoing import SendResult
from ._requests import (
    Reply,
    ReplyInbox,
    follow_steps,
    listen_steps,
    no_reply,
    seconds_left,
)
from ._steps import Driver
from ._types import Route
from .errors import ClosedError, ProtomqError

logger = logging.getLogger("protomq.producer")

GOODBYE_S = 1.0
THREADS_END_S = 1.0
"""A thread may be in a pause, or look for a route: then it makes no call any more."""
END_AGAIN_S = 0.05
"""A thread may be about to begin its call when that is to be ended: then it is ended again."""


class RequestCalls:
    """The requests of one producer. Any thread."""

    def __init__(self, driver: Driver, end_held: Callable[[Set[int]], None]) -> None:
        """`end_held`: see SyncTransport."""
        self._driver = driver
        self._end_held = end_held
        self._lock = threading.RLock()
        """A signal's handler may close the producer on a thread that has it."""
        self._inboxes: dict[str, ReplyInbox] = {}
        self._followed: set[str] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def request(
        self,
        route: Route,
        properties: Mapping[str, str] | None,
        deadline_s: float,
        send: Callable[[Mapping[str, str], float, str], SendResult],
    ) -> Reply:
        """Sends a request, and waits for its reply. `send` is given all properties, the seconds that it may take, and
        the broker at which the reply is waited for."""
        timeout_s = seconds_left(deadline_s)
        future: Future[tuple[bytes, Mapping[str, str]]] = Future()
        inbox = self._listen(route, deadline_s)
        call_id = inbox.begin(future)
        if self._closed:
            inbox.close()
        try:
            self._follow(inbox)
            own = inbox.properties(call_id, seconds_left(deadline_s))
            sent = send(
                {**(properties or {}), **own}, seconds_left(deadline_s), inbox.broker_name
            )
            try:
                body, answered = future.result(seconds_left(deadline_s))
            except FutureTimeoutError as error:
                if comes_of_signal(error):
                    raise
                raise no_reply(sent, timeout_s) from None
            return Reply(body, answered, sent)
        finally:
            inbox.end(call_id)

    def _listen(self, route: Route, deadline_s: float) -> ReplyInbox:
        """An inbox at a broker that knows of it."""
        return self._driver.run(listen_steps(route, self._inboxes, self._inbox_at, deadline_s))

    def _inbox_at(self, topic: str, broker_name: str) -> tuple[ReplyInbox, bool]:
        with self._lock:
            if self._closed:
                raise ClosedError("the producer is closed")
            inbox = self._inboxes.setdefault(broker_name, ReplyInbox(topic, broker_name))
            inbox.topic = topic
            return inbox, broker_name in self._followed

    def _follow(self, inbox: ReplyInbox) -> None:
        with self._lock:
            if inbox.broker_name in self._followed or self._closed:
                return
            self._followed.add(inbox.broker_name)
        thread = threading.Thread(target=self._run, args=(inbox,), name="protomq-replies", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:  # The next request begins another one.
            self._threads.discard(thread)
            with self._lock:
                self._followed.discard(inbox.broker_name)
            raise

    def _run(self, inbox: ReplyInbox) -> None:
        try:
            self._driver.run(follow_steps(inbox, lambda: self._goes_on(inbox)))
        except Exception:
            logger.exception("replies from %s are waited for no more", inbox.broker_name)
            with self._lock:
                self._followed.discard(inbox.broker_name)
        finally:
            self._threads.discard(threading.current_thread())

    def _goes_on(self, inbox: ReplyInbox) -> bool:
        """Under the lock: a request that begins finds either a thread that goes on, or none."""
        with self._lock:
            if not self._closed and inbox.is_needed:
                return True
            self._followed.discard(inbox.broker_name)
            return False

    def close(self) -> None:
        """Tells the brokers what was received, so that those who replied learn it at once."""
        with self._lock:
            self._closed = True
            inboxes = list(self._inboxes.values())
        for inbox in inboxes:
            inbox.close()
        # First: a call that came behind the goodbye would have the broker take this caller for one that waits.
        self._end_threads(time.monotonic() + THREADS_END_S)
        ends_s = time.monotonic() + GOODBYE_S
        for inbox in inboxes:
            with suppress(ProtomqError):
                self._driver.run(inbox.wait_steps(0.0, seconds_left(ends_s), leaves=True))

    def _end_threads(self, until_s: float) -> None:
        # One that is not alive yet makes no call. A hook may close the producer on one of them.
        own = threading.current_thread()
        while (threads := [each for each in self._threads.copy() if each.is_alive() and each is not own]) and (
            left_s := until_s - time.monotonic()
        ) > 0:
            self._end_held({thread.ident for thread in threads if thread.ident})
            threads[0].join(min(left_s, END_AGAIN_S))
