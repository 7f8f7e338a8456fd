"""Handling popped messages on threads: one receives, several handle, one renews. What they decide is in `_pop_handling.py`.

    thread of `handle`    receive, as many as `Ahead` says ──▶ threads of handlers ──▶ ack, together with others that have just ended
                                                                    ▲ next ◀──────────────┘
    threads that renew    one for each broker, which sleeps until a hold is due

Each broker is told by itself: one that does not answer holds up nothing of another one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ._child_ends import ending_children
from ._daemon_threads import DaemonThreads
from ._message import Message
from ._pop_handling import RECEIVE_AGAIN_S, Ahead, HandledCounts, Handling, Hold, clock_s, logger
from ._pop_steps import PopSteps
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
        self._handler = ending_children(handler)
        self._run = run
        self._threads = DaemonThreads("protomq-handler")
        self._changed = threading.Condition()
        self._ahead = Ahead(handling.options)
        self._stops = False
        self._ended = threading.Event()
        self._renewing: set[str] = set()
        """Brokers whose messages a thread renews."""
        self._returned: defaultdict[str, list[Hold]] = defaultdict(list)
        """By broker, what is to be acknowledged."""
        self._acknowledging: set[str] = set()

    @property
    def begins_handlers(self) -> bool:
        """Whether it has not been stopped."""
        return not self._stops

    def stop(self) -> None:
        """No handler begins any more."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends it at once: nothing is told any more, and handlers that run are not waited for."""
        self.handling.close()
        self._ended.set()
        self.stop()

    def work(self) -> HandledCounts:
        """Handles messages until it is stopped. Raises what a `receive` raises that another try does not change."""
        try:
            while (count := self._wait_for_room()) > 0:
                asked_s = clock_s()
                self._begin(self._receive(count), asked_s)
        except ClosedError:
            pass
        finally:
            self._drain()
        return self.handling.counts

    def _wait_for_room(self) -> int:
        """How many messages to receive; 0: it is stopped."""
        with self._changed:
            while not self._stops:
                if count := self._ahead.room(clock_s()):
                    return count
                self._changed.wait()
            return 0

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

    def _begin(self, messages: Sequence[Message], asked_s: float) -> None:
        handed_out_s = self.handling.handed_out_s(asked_s)
        for message in messages:
            hold = self.handling.holds.begin(message, handed_out_s)
            broker_name = message.queue.broker_name
            if broker_name not in self._renewing:
                self._renewing.add(broker_name)
                self._threads.submit(partial(self._renew_until_end, broker_name))
            with self._changed:
                begins = self._ahead.begins(hold, stops=self._stops)
            if begins:
                self._threads.submit(partial(self._handle_some, hold))

    def _handle_some(self, hold: Hold | None) -> None:
        """This message, and then what waits."""
        while hold is not None:
            self._handle(hold)
            with self._changed:
                now_s = clock_s()
                self._ahead.ended(now_s)
                hold = self._ahead.next(now_s, stops=self._stops)
                if self._stops or self._ahead.room(now_s):
                    self._changed.notify_all()

    def _handle(self, hold: Hold) -> None:
        handling = self.handling
        call: Callable[[Message], Any] = self._handler.call
        try:
            try:
                hold.is_begun = True
                failure = handling.judged(call(hold.message))
            except BaseException as error:  # sys.exit() in a handler ends no thread of ours.
                failure = handling.raised(error)
            handling.holds.end(hold)
            if hold.is_refused:
                handling.lost(hold)
            elif failure is None:
                self._acknowledge(hold)
            else:
                self._wait_for_renewals([hold])
                self._run(handling.fail(hold, failure))
        except BaseException:
            logger.exception("the end of a message that %s has handled could not be told", handling.name)

    def _acknowledge(self, hold: Hold) -> None:
        """With all others of its broker that have returned meanwhile: who comes first reports those that come while it does."""
        broker_name = hold.message.queue.broker_name
        with self._changed:
            self._returned[broker_name].append(hold)
            if broker_name in self._acknowledging:
                return
            self._acknowledging.add(broker_name)
        try:
            while True:
                with self._changed:
                    holds = self._returned.pop(broker_name, [])
                    if not holds:
                        self._acknowledging.discard(broker_name)
                        return
                self._run(self.handling.acknowledge(holds))
        except BaseException:
            with self._changed:
                self._acknowledging.discard(broker_name)
            raise

    def _renew_until_end(self, broker_name: str) -> None:
        holds = self.handling.holds
        while not self._ended.wait(holds.next_due_in_s(broker_name, clock_s())):
            if due := holds.due(broker_name, clock_s()):
                self._run(self.handling.renew(due))
                with self._changed:
                    self._changed.notify_all()

    def _wait_for_renewals(self, holds: Sequence[Hold]) -> None:
        """Those that are under way: one that comes behind would hold what is to come again."""
        with self._changed:
            self._changed.wait_for(lambda: self.handling.is_closed or not any(hold.is_being_renewed for hold in holds))

    def _drain(self) -> None:
        """Gives back what waits, waits for handlers that run, and ends the renewals. All that ends when the consumer is closed."""
        timeout_s = self.handling.options.drain_timeout_s
        with self._changed:
            self._stops = True
            waiting = self._ahead.clear()
        if waiting:
            for hold in waiting:
                self.handling.holds.end(hold)
            self._wait_for_renewals(waiting)
            self._run(self.handling.give_back(waiting))
        with self._changed:
            self._changed.wait_for(lambda: self.handling.is_closed or not self._ahead.busy_count, timeout_s)
            left_count = self._ahead.busy_count
        self._ended.set()
        self._threads.close()
        if self.handling.is_closed:
            self.handling.say_closed(left_count)
        elif left_count:
            logger.warning(
                "%d messages are still with %s after %.1f s: they are renewed no more, and come again unless it returns in time",
                left_count, self.handling.name, timeout_s,
            )  # fmt: skip
