"""Handling popped messages in tasks of one event loop: see `_pop_threads.py`, which has the same parts as threads."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ._child_ends import ending_children
from ._closing import Closing
from ._daemon_threads import DaemonThreads
from ._loop_ends import is_closed
from ._loop_watch import LoopWatch
from ._message import Message
from ._pop_handling import RECEIVE_AGAIN_S, Ahead, HandledCounts, Handling, Hold, clock_s, logger
from ._pop_steps import PopSteps
from ._push_results import Listener
from ._steps import Steps, T
from .errors import ClosedError, ProtomqError

RENEW_ANEW_S = 0.1
"""Until renewals that somebody has cancelled begin again. Not at once: a loop that ends cancels all tasks, and waits for no new one."""
LONG_S = 3600.0
"""A wait that something else ends."""


class Runs(Protocol):
    """Drives steps in the calling task."""

    def __call__(self, steps: Steps[T]) -> Coroutine[Any, Any, T]:
        """What they return."""


class HandlerTasks:
    """One call of `handle`. The loop's."""

    def __init__(self, steps: PopSteps, handling: Handling, handler: Listener, run: Runs) -> None:
        self.handling = handling
        self._steps = steps
        self._handler = ending_children(handler)
        self._run = run
        self._threads = DaemonThreads("protomq-handler")
        self._tasks: dict[asyncio.Task[None], Hold] = {}
        self._ahead = Ahead(handling.options)
        self._changed = asyncio.Event()
        self._stops = False
        self._renewing: dict[str, asyncio.Task[None]] = {}
        """By broker."""
        self._ends_renewals = False
        self._renewed = asyncio.Condition()
        self._receiving: asyncio.Task[list[Message]] | None = None
        self._returned: defaultdict[str, list[Hold]] = defaultdict(list)
        """As in HandlerThreads."""
        self._acknowledging: set[str] = set()
        self._closing = Closing(None)
        self._caller: asyncio.Task[Any] | None = None
        self._cancelled_before = 0
        self._was_cancelled = False

    @property
    def ending(self) -> asyncio.Future[None] | None:
        """What ends the call, also where it was cancelled once more meanwhile."""
        return self._closing.task

    @property
    def is_cancelled(self) -> bool:
        """Whether the call was cancelled: it gives back what it has, also when the consumer is closed then."""
        return self._was_cancelled or (self._caller is not None and self._caller.cancelling() > self._cancelled_before)

    @property
    def begins_handlers(self) -> bool:
        """Whether it has not been stopped."""
        return not self._stops

    def stop(self) -> None:
        """No handler begins any more."""
        self._stops = True
        self._changed.set()

    def close(self) -> None:
        """Ends it at once: nothing is told any more, and coroutines that run are cancelled."""
        if self.is_cancelled or self.handling.is_closed:
            return
        self.handling.close()
        self.handling.say_closed(self._cancel_handlers())
        self.stop()

    async def work(self) -> HandledCounts:
        """Handles messages until it is stopped. Raises what a `receive` raises that another try does not change."""
        timeout_s = self.handling.options.drain_timeout_s
        self._caller = asyncio.current_task()
        if self._caller is not None:  # Its caller may have caught a cancellation, and gone on.
            self._cancelled_before = self._caller.cancelling()
        watch = LoopWatch(lambda: [self._handler]) if self._handler.is_coroutine else None
        try:
            while (count := await self._wait_for_room()) > 0:
                asked_s = clock_s()
                self._begin(await self._receive(count), asked_s)
        except ClosedError:
            pass
        except asyncio.CancelledError:
            self._was_cancelled = True
            timeout_s = 0.0
            raise
        finally:
            if watch is not None:
                watch.close()
            try:
                await self._closing.wait(partial(self._end, timeout_s), partial(self._end, 0.0), self._end_renewals)
            except asyncio.CancelledError:
                self._was_cancelled = True
                if not self.handling.is_closed:
                    self._cancel_handlers()
                raise
        return self.handling.counts

    async def _end(self, timeout_s: float) -> None:
        """May be called again where it was cut off."""
        await self._drain(timeout_s)
        await asyncio.gather(*self._end_renewals(), return_exceptions=True)

    def _end_renewals(self) -> list[asyncio.Task[None]]:
        self._ends_renewals = True
        self._threads.close()
        tasks = list(self._renewing.values())
        for task in tasks:
            task.cancel()
        return tasks

    async def _wait_for_room(self) -> int:
        """How many messages to receive; 0: it is stopped."""
        while not self._stops:
            if count := self._ahead.room(clock_s()):
                return count
            await self._wait_for_change(LONG_S)
        return 0

    async def _wait_for_change(self, timeout_s: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _receive(self, count: int) -> list[Message]:
        try:
            steps = self._steps.receive(replace(self.handling.wish, count=count))
            self._receiving = asyncio.get_running_loop().create_task(self._run(steps))
            messages = await asyncio.shield(self._receiving)
            self._receiving = None
        except ClosedError:
            raise
        except ProtomqError as error:
            self.handling.received(error)
            if not self._stops:
                await self._wait_for_change(RECEIVE_AGAIN_S)
            return []
        self.handling.received(None)
        return messages

    def _begin(self, messages: Sequence[Message], asked_s: float) -> None:
        handed_out_s = self.handling.handed_out_s(asked_s)
        for message in messages:
            hold = self.handling.holds.begin(message, handed_out_s)
            broker_name = message.queue.broker_name
            self._begin_to_renew(broker_name)
            if self._ahead.begins(hold, stops=self._stops):
                self._start(hold)

    def _begin_to_renew(self, broker_name: str) -> None:
        if broker_name not in self._renewing:
            task = asyncio.get_running_loop().create_task(self._renew_until_end(broker_name))
            self._renewing[broker_name] = task
            task.add_done_callback(partial(self._renewals_ended, broker_name))

    def _renewals_ended(self, broker_name: str, task: asyncio.Task[None]) -> None:
        """Somebody else may have cancelled them, or a defect has ended them: what is handled is renewed all the same."""
        if self._ends_renewals:
            return
        del self._renewing[broker_name]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the renewals of %s at broker %s have ended, they begin again", self.handling.name, broker_name, exc_info=error)
        task.get_loop().call_later(RENEW_ANEW_S, self._renew_anew, broker_name)

    def _renew_anew(self, broker_name: str) -> None:
        if not self._ends_renewals:
            self._begin_to_renew(broker_name)

    def _start(self, hold: Hold) -> None:
        task = asyncio.get_running_loop().create_task(self._handle(hold))
        self._tasks[task] = hold
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        now_s = clock_s()
        self._ahead.ended(now_s)
        hold = self._ahead.next(now_s, stops=self._stops)
        if hold is not None:
            self._start(hold)
        if self._stops or self._ahead.room(now_s):
            self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the end of a message that %s has handled could not be told", self.handling.name, exc_info=error)

    async def _handle(self, hold: Hold) -> None:
        handling, own_task = self.handling, asyncio.current_task()
        try:
            failure = handling.judged(await self._call(hold))
        except asyncio.CancelledError as error:
            if own_task is None or own_task.cancelling():
                raise  # The consumer stops: nobody knows what became of it.
            failure = handling.raised(error)
        except BaseException as error:
            if is_closed(error, own_task):
                raise
            failure = handling.raised(error)
        handling.holds.end(hold)
        if hold.is_refused:
            handling.lost(hold)
        elif failure is None:
            await self._acknowledge(hold)
        else:
            await self._wait_for_renewals([hold])
            await self._run(handling.fail(hold, failure))

    async def _call(self, hold: Hold) -> Any:
        hold.is_begun = True
        if self._handler.is_coroutine:
            return await self._handler.call(hold.message)
        results: list[Any] = []
        await asyncio.wrap_future(self._threads.submit(lambda: results.append(self._handler.call(hold.message))))
        return results[0]

    async def _acknowledge(self, hold: Hold) -> None:
        """With all others of its broker that have returned meanwhile: who comes first reports those that come while it does."""
        broker_name = hold.message.queue.broker_name
        self._returned[broker_name].append(hold)
        if broker_name in self._acknowledging:
            return
        self._acknowledging.add(broker_name)
        try:
            while holds := self._returned.pop(broker_name, []):
                await self._run(self.handling.acknowledge(holds))
        finally:
            self._acknowledging.discard(broker_name)

    async def _renew_until_end(self, broker_name: str) -> None:
        holds = self.handling.holds
        while True:
            await asyncio.sleep(holds.next_due_in_s(broker_name, clock_s()))
            if due := holds.due(broker_name, clock_s()):
                try:
                    await self._run(self.handling.renew(due))
                finally:
                    async with self._renewed:
                        self._renewed.notify_all()

    async def _wait_for_renewals(self, holds: Sequence[Hold]) -> None:
        """As in HandlerThreads."""
        async with self._renewed:
            await self._renewed.wait_for(lambda: self.handling.is_closed or not any(hold.is_being_renewed for hold in holds))

    async def _drain(self, timeout_s: float) -> None:
        """Gives back what waits, and waits for handlers that run; coroutines are cancelled then, and their messages given back."""
        self._stops = True
        if waiting := self._ahead.clear():
            for hold in waiting:
                self.handling.holds.end(hold)
            await self._wait_for_renewals(waiting)
            await self._run(self.handling.give_back(waiting))
        if self._tasks and timeout_s:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        if not self.handling.is_closed:
            self._cancel_handlers()
        holds = self.handling.holds
        await asyncio.gather(*self._tasks, return_exceptions=True)
        goes_on = not self._handler.is_coroutine
        left = [hold for hold in holds.all() if not (hold.is_refused or (goes_on and hold.is_begun))]
        left += await self._received_last()
        if left:
            for hold in left:
                holds.end(hold)
            await self._wait_for_renewals(left)
            await self._run(self.handling.give_back(left))

    def _cancel_handlers(self) -> int:
        """How many run."""
        count = 0
        for task, hold in self._tasks.items():
            # Else its handler has returned, and the broker is being told.
            if self.handling.holds.find(hold.message):
                task.cancel()
                count += 1
        return count

    async def _received_last(self) -> list[Hold]:
        """Of the `receive` that was under way when the call was cancelled: at the broker it goes on, and would get what is given back."""
        if self._receiving is None:
            return []
        (messages,) = await asyncio.gather(self._receiving, return_exceptions=True)
        if isinstance(messages, BaseException):
            return []
        return [self.handling.holds.begin(message, clock_s()) for message in messages]
