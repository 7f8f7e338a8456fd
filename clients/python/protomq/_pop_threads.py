"""Handling popped messages on threads: one receives, several handle, one renews. What they decide is in `_pop_handling.py`.

    thread of `handle`    receive, as many as handlers are free ──▶ threads of handlers ──▶ ack, together with others that have just ended
    thread that renews    sleeps until a hold is due
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ._daemon_threads import DaemonThreads
from ._message import Message
from ._pop_handling import RECEIVE_AGAIN_S, HandledCounts, Handling, Hold, logger
from ._pop_steps import COUNT_MAX, PopSteps
from ._push_results import Listener
from ._steps import Steps, T
from .errors import ClosedError, ProtomqError


class Runs(Protocol):
    """Drives steps in the calling thread."""

    def __call__(self, steps: Steps[T]) -> T:
        """What they return."""


class HandlerThreads:
    """One call of `handle`. `stop`: any thread; `work`: the caller's."""

    def __init__(self, steps: PopSteps, handling: Handling, handler: Listener, run: Runs) -> None:
        self.handling = handling
        self._steps = steps
        self._handler = handler
        self._run = run
        self._threads = DaemonThreads("protomq-handler")
        self._changed = threading.Condition()
        self._busy_count = 0
        self._stops = False
        self._has_ended = False
        self._told = threading.Lock()
        """Held while messages are renewed, or given back: a renewal that comes behind would hold what is to come again."""
        self._returned: list[Hold] = []
        self._is_acknowledging = False

    def stop(self) -> None:
        """No handler begins any more."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()

    def work(self) -> HandledCounts:
        """Handles messages until it is stopped. Raises what a `receive` raises that another try does not change."""
        self._threads.submit(self._renew_until_end)
        try:
            while (free_count := self._wait_for_room()) > 0:
                for message in self._receive(free_count):
                    self._begin(message)
        except ClosedError:
            pass
        finally:
            self._drain()
        return self.handling.counts

    def _wait_for_room(self) -> int:
        """How many handlers are free; 0: it is stopped."""
        concurrency = self.handling.options.concurrency
        with self._changed:
            self._changed.wait_for(lambda: self._stops or self._busy_count < concurrency)
            return 0 if self._stops else min(concurrency - self._busy_count, COUNT_MAX)

    def _receive(self, count: int) -> list[Message]:
        try:
            messages = self._run(self._steps.receive(replace(self.handling.wish, count=count)))
        except ClosedError:
            raise
        except ProtomqError as error:
            self.handling.received(error)
            with self._changed:
                self._changed.wait_for(lambda: self._stops, RECEIVE_AGAIN_S)
            return []
        self.handling.received(None)
        return messages

    def _begin(self, message: Message) -> None:
        with self._changed:
            hold = self.handling.holds.begin(message, time.monotonic())
            self._busy_count += 1
            self._changed.notify_all()
        self._threads.submit(partial(self._handle, hold))

    def _handle(self, hold: Hold) -> None:
        handling = self.handling
        call: Callable[[Message], Any] = self._handler.call
        try:
            try:
                failure = handling.judged(call(hold.message))
            except BaseException as error:  # sys.exit() in a handler ends no thread of ours.
                failure = handling.raised(error)
            handling.holds.end(hold)
            if hold.is_lost:
                handling.lost(hold)
            elif failure is None:
                self._acknowledge(hold)
            else:
                with self._told:
                    self._run(handling.fail(hold, failure))
        except Exception:
            logger.exception("the end of a message that %s has handled could not be told", handling.name)
        finally:
            with self._changed:
                self._busy_count -= 1
                self._changed.notify_all()

    def _acknowledge(self, hold: Hold) -> None:
        """With all others that have returned meanwhile: who comes first tells of those that come while it does."""
        with self._changed:
            self._returned.append(hold)
            if self._is_acknowledging:
                return
            self._is_acknowledging = True
        try:
            while True:
                with self._changed:
                    holds, self._returned = self._returned, []
                    if not holds:
                        self._is_acknowledging = False
                        return
                self._run(self.handling.acknowledge(holds))
        except BaseException:
            with self._changed:
                self._is_acknowledging = False
            raise

    def _renew_until_end(self) -> None:
        holds = self.handling.holds
        while True:
            with self._changed:
                if self._has_ended:
                    return
                wait_s = holds.next_due_in_s(time.monotonic())
                if wait_s:
                    self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
                    continue
            if due := holds.due(time.monotonic()):
                with self._told:
                    self._run(self.handling.renew([hold for hold in due if holds.find(hold.message)]))

    def _drain(self) -> None:
        """Waits for handlers that run, and ends the renewals."""
        timeout_s = self.handling.options.drain_timeout_s
        with self._changed:
            self._stops = True
            self._changed.wait_for(lambda: not self._busy_count, timeout_s)
            self._has_ended = True
            self._changed.notify_all()
            left_count = self._busy_count
        self._threads.close()
        if left_count:
            logger.warning(
                "%d messages are still with %s after %.1f s: they are renewed no more, and come again unless it returns in time",
                left_count, self.handling.name, timeout_s,
            )  # fmt: skip
