"""Acknowledgements of many coroutines, gathered: those of one turn of the loop, or that come while a call is under way, are one call.

    ack ──▶ by topic and broker ──▶ what waits ──▶ one call at a time ──▶ each caller gets what is its own

A caller learns what it would have learned alone. Where a common call leaves that open, its messages are told once more, by themselves.
Where an event loop ends, callers may have ended with it: the log has the number of messages of which the broker may not know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ._lines import own_error
from ._loop_ends import fail, given_up, why_ended
from ._message import Message
from ._pop_steps import PopSteps, checked_messages
from ._pop_tasks import Runs
from ._types import PoppedQueue
from .errors import ProtomqError

logger = logging.getLogger("protomq")


class _Ack(NamedTuple):
    """What one caller acknowledges at one broker, and where it waits for those that were not held any more."""

    messages: Sequence[Message]
    stale: asyncio.Future[list[Message]]


class AckGatherer:
    """Of one consumer. Coroutines of one event loop."""

    def __init__(self, steps: PopSteps, run: Runs) -> None:
        self._steps = steps
        self._run = run
        self._waiting: dict[tuple[str, str], list[_Ack]] = {}
        """By topic and broker: as long as a task works for them."""
        self._told: dict[tuple[str, str], list[_Ack]] = {}
        """Of the calls that are under way."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def ack(self, messages: Message | Iterable[Message]) -> list[Message]:
        """See SimpleConsumer.ack."""
        if isinstance(messages, Message) and isinstance(messages.queue, PoppedQueue):  # nearly all
            return await self._join(messages.queue[:2], (messages,))
        by_broker: dict[tuple[str, str], list[Message]] = {}
        for message in checked_messages(messages):
            by_broker.setdefault(message.queue[:2], []).append(message)
        results = await asyncio.gather(*[self._join(place, some) for place, some in by_broker.items()])
        return [message for stale in results for message in stale]

    def _join(self, place: tuple[str, str], messages: Sequence[Message]) -> asyncio.Future[list[Message]]:
        loop = asyncio.get_running_loop()
        ack = _Ack(messages, loop.create_future())
        waiting = self._waiting.get(place)
        if waiting is not None:
            waiting.append(ack)
            return ack.stale
        self._waiting[place] = waiting = [ack]
        task = loop.create_task(self._work_off(place, waiting))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, place, waiting))
        return ack.stale

    async def _work_off(self, place: tuple[str, str], waiting: list[_Ack]) -> None:
        try:
            # What other tasks acknowledge in this turn of the loop goes along.
            await asyncio.sleep(0)
            while waiting:
                acks = self._told[place] = waiting.copy()
                waiting.clear()
                await self._tell(acks)
            del self._waiting[place]
        except BaseException as error:
            self._give_up(place, why_ended(error))
            raise
        finally:
            self._told.pop(place, None)

    def _ended(self, place: tuple[str, str], waiting: list[_Ack], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._waiting.get(place) is waiting:  # It was cancelled before its first step.
            self._give_up(place, why_ended(asyncio.CancelledError()))

    def leave_loop(self) -> None:
        """The loop is closed, and with it all that waited there."""
        for place in list(self._waiting):
            self._give_up(place, "the event loop was closed")

    def forget(self) -> None:
        """In a forked child: what is under way is the parent's."""
        self._waiting.clear()
        self._told.clear()

    def _give_up(self, place: tuple[str, str], why: str) -> None:
        """Nobody tells the broker any more of what is left, nor goes on with what it may have heard of."""
        told, waiting = self._told.pop(place, []), self._waiting.pop(place, [])
        count = sum(len(ack.messages) for ack in (*told, *waiting) if ack.stale.cancelled() or not ack.stale.done())
        for ack in told:
            fail(ack.stale, given_up(why, is_under_way=True))
        for ack in waiting:
            fail(ack.stale, given_up(why, is_under_way=False))
        if count:
            logger.warning(
                "the broker may not know of %d acknowledgement%s, whose messages come again then: %s. Await `ack` before",
                count, "s" if count > 1 else "", why,
            )  # fmt: skip

    async def _tell(self, acks: Sequence[_Ack]) -> None:
        try:
            stale = await self._run(self._steps.ack([message for ack in acks for message in ack.messages]))
        except ProtomqError as error:
            if len(acks) == 1 or error.retriable:
                for index, ack in enumerate(acks):
                    if not ack.stale.done():
                        ack.stale.set_exception(own_error(error, index))
            else:  # One of them may be to blame alone.
                await self._tell_alone(acks)
            return
        if not stale:  # nearly always
            for ack in acks:
                if not ack.stale.done():
                    ack.stale.set_result([])
            return
        gone = set(map(id, stale))
        doubtful: list[_Ack] = []
        for ack in acks:
            own = [message for message in ack.messages if id(message) in gone]
            if own and len(own) == len(ack.messages) and len(acks) > 1:
                doubtful.append(ack)
            elif not ack.stale.done():
                ack.stale.set_result(own)
        await self._tell_alone(doubtful)

    async def _tell_alone(self, acks: Iterable[_Ack]) -> None:
        await asyncio.gather(*[self._tell([ack]) for ack in acks])
