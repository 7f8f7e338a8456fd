"""AsyncPullConsumer: the asyncio flavour of `_pull_consumer.PullConsumer`, with the same rules.

Each pull in flight is a small task of the event loop; all pulls to a broker share one connection. The consumer belongs to the
event loop on which it was first used, and to its process.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Literal, Unpack

from . import _methods
from ._async_routes import AsyncRoutes
from ._async_steps import AsyncDriver
from ._checks import (
    check_count,
    check_message_queue,
    check_past,
    check_seconds,
    check_time,
    check_topic,
)
from ._closing import HURRY_S, Closing
from ._connection_options import ConnectionOptions, connection_of
from ._consumer_base import ConsumerBase, wakes
from ._consumer_options import ConsumerOptions, ConsumerSettings
from ._filters import checked_filter
from ._hook_points import HookPoints
from ._hooked_async_calls import async_transport_with
from ._hooked_consuming import NOT_DEALT_WITH
from ._loop_ends import cancel
from ._loops import Loop
from ._member_tasks import MemberTasks
from ._message import Message
from ._offset_calls import checked_offsets, checked_queues, checked_tags
from ._open_consumers import closed, not_taken_text, opened
from ._pull_logic import GROUP_LOOK_MIN_S, LOOP_POLL_S, POLL_MESSAGES, Ticket, logger
from ._pull_schedule import COUNT_DEFAULT as PULL_COUNT_DEFAULT
from ._pull_schedule import (
    NEXT_DELAY_DEFAULT_MS,
    SCHEDULED_LOOK_S,
    AsyncScheduledPull,
    PullSchedule,
    ScheduledRun,
)
from ._queue_listener import QueueListener
from ._send_back import SentBack
from ._show_settings import show_settings
from ._trace import close_steps
from ._types import PEER_TIMEOUT_S, Body, Delay, MessageQueue, QueueRange
from ._warnings import warn
from .errors import ClosedError, ConfigurationError, ProtomqError


@show_settings(ConsumerOptions, ConsumerSettings.__annotations__)
class AsyncPullConsumer(ConsumerBase):
    """Pulls messages from queues.

        async with AsyncPullConsumer("my-group") as consumer:
            await consumer.subscribe("flights", tags=["UA"])
            async for message in consumer:
                print(message.key, message.body)

    Coroutines of one event loop may share it. The arguments are those of PullConsumer, but for `spin`: nothing blocks here.
    """

    def __init__(
        self,
        group: str = "",
        *,
        namesrv: str | Sequence[str] | None = None,
        transport: Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        connection: ConnectionOptions | None = None,
        listener: QueueListener | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        options = ConsumerOptions(group=group, **settings)
        connection = connection_of(
            connection, namesrv=namesrv, transport=transport, client_id=client_id, peer_timeout_s=peer_timeout_s,
        )  # fmt: skip
        self._hooks = HookPoints(group, options.hooks)
        self._transport = async_transport_with(connection, self._hooks)
        self._routes: AsyncRoutes = AsyncRoutes(self._transport, connection.namesrv)
        self._hooks.located_by(self._routes.last_known, self._transport.kind)
        self._transport.is_replaced = self._routes.is_replaced
        self._member: MemberTasks | None = None
        if options.shares:
            state = self._membership_state(options, connection)
            self._member = MemberTasks(state, self._transport, wakes(self), self._routes)
        super().__init__(options, listener, self._member)
        self._routes.looks_seldom = self._steps.looks_seldom
        self._run = AsyncDriver(self._transport, self._routes).run
        self._pulls: set[asyncio.Task[None]] = set()
        self._pull_of: dict[Ticket, asyncio.Task[None]] = {}
        self._defect: Exception | None = None
        """What has ended a pull, and is no outcome of it: the next `poll` raises it."""
        self._arrived: asyncio.Event | None = None
        self._closing = Closing("")
        """Its outcome: the warning about the last commit."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where it is a member, and pulls."""
        self._reads = True
        """Whether what arrives is taken from the kernel: not while enough waits to be handed out."""
        self._start_hooks(connection)
        if not options.broadcasting:  # It commits nothing, and is to get what others get, too.
            opened(self, self._routes.name_servers)

    # -- what to consume -------------------------------------------------------------------------------------------------

    async def subscribe(
        self,
        topic: str,
        tags: Iterable[str] = (),
        *,
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
    ) -> None:
        """See PullConsumer.subscribe."""
        self._check_open()
        if self._member is not None:
            self._check_loop()
        check_topic(topic)
        checked = checked_tags(tags)
        wanted_filter = checked_filter(checked, sql, cel, module)
        routes = await self._run(self._steps.subscribe(topic, checked, wanted_filter))
        for text in self._doubts(routes):
            warn(logger, text, 2)

    async def unsubscribe(self, topic: str) -> None:
        """See PullConsumer.unsubscribe."""
        check_topic(topic)
        self._check_open()
        self._check_no_other_loop()
        await self._run(self._steps.unsubscribe(topic))

    async def assign(
        self,
        queues: Iterable[MessageQueue],
        tags: Iterable[str] = (),
        *,
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
    ) -> None:
        """See PullConsumer.assign."""
        wanted = checked_queues(queues)
        checked = checked_tags(tags)
        wanted_filter = checked_filter(checked, sql, cel, module)
        self._check_open()
        self._check_no_other_loop()
        routes = await self._run(self._steps.assign(wanted, checked, wanted_filter))
        for text in self._doubts(routes):
            warn(logger, text, 2)

    # -- messages --------------------------------------------------------------------------------------------------------

    async def poll(
        self, timeout_s: float = 1.0, max_messages: int = POLL_MESSAGES
    ) -> list[Message]:
        """See PullConsumer.poll."""
        check_count("max_messages", max_messages, 1)
        check_seconds("timeout_s", timeout_s, zero=True)
        return await self._poll_for(timeout_s, max_messages)

    async def _poll_for(
        self, timeout_s: float, max_messages: int, *, one_queue: bool = False, loop: Loop | None = None
    ) -> list[Message]:
        if not self._hooks.receive:
            return await self._poll_within(timeout_s, max_messages, one_queue, loop)
        context = self._hooks.before_receive()
        try:
            messages = await self._poll_within(timeout_s, max_messages, one_queue, loop)
        except BaseException as error:
            self._hooks.after_receive(context, (), error)
            raise
        try:
            self._hooks.after_receive(context, messages)
        except BaseException:
            self._state.rewind()
            raise
        return messages

    async def _poll_within(self, timeout_s: float, max_messages: int, one_queue: bool, loop: Loop | None) -> list[Message]:
        self._check_open()
        self._check_loop()
        self._check_something_to_poll()
        deadline_s = time.monotonic() + timeout_s
        steps, state = self._steps, self._state
        state.user_came_back(loop)
        if self._handed is not None:
            self._handed.came_back()
        arrived = self._arrived
        if arrived is None:
            arrived = self._arrived = asyncio.Event()
        if not steps.is_settled(self._routes.cached):
            await self._run(steps.before_poll())
        # The pulls need a turn of the loop, even under a user who never waits.
        await asyncio.sleep(0)
        while True:
            arrived.clear()
            if not steps.group_due_in_s(time.monotonic()):
                await self._run(steps.before_poll())
            self._start_pulls()
            self._raise_trouble()
            if messages := self._take(max_messages, one_queue, loop):
                return messages
            now_s = time.monotonic()
            if self._closed or now_s >= deadline_s:
                return []
            try:
                group_s = max(steps.group_due_in_s(now_s), GROUP_LOOK_MIN_S)
                async with asyncio.timeout(
                    min(deadline_s - now_s, state.next_due_in_s(now_s), group_s)
                ):
                    await arrived.wait()
            except TimeoutError:
                continue

    def _take(self, max_messages: int, one_queue: bool, loop: Loop | None) -> list[Message]:
        """What has come, for the program."""
        state = self._state
        try:
            messages = state.take(max_messages, one_queue=one_queue)
            if messages and self._hooks.filter:
                messages = self._hooks.kept(messages)
            if messages:
                self._start_pulls()
                if self._handed is not None:
                    self._handed.gave(messages, loop)
                if loop is not None:
                    state.loop_over(loop, messages)
        except ProtomqError:
            raise
        except BaseException:  # Ctrl-C in a hook, say: what was not returned comes again.
            state.rewind()
            raise
        return messages

    def __aiter__(self) -> AsyncIterator[Message]:
        """See PullConsumer.__iter__."""
        return _AsyncLoop(self)

    async def _poll_for_loop(self, loop: Loop) -> None:
        await self._poll_for(LOOP_POLL_S, POLL_MESSAGES, loop=loop)

    async def run_scheduled(
        self,
        pull: AsyncScheduledPull,
        *,
        next_delay_ms: int = NEXT_DELAY_DEFAULT_MS,
        max_messages: int = PULL_COUNT_DEFAULT,
    ) -> None:
        """See PullConsumer.run_scheduled. `pull`: a coroutine function, or a function; a call that is cancelled gets its messages again."""
        check_count("max_messages", max_messages, 1)
        schedule = PullSchedule(pull, next_delay_ms, may_wait=True)
        run = self._scheduled = ScheduledRun(asyncio.current_task())
        try:
            while not self._closed and run.close_commit is None:
                now_s = time.monotonic()
                self._state.hold_back(schedule.not_due(self._state.queues, now_s), now_s)
                messages = await self._poll_for(
                    schedule.next_due_in_s(now_s), max_messages, one_queue=True
                )
                if not messages:
                    continue
                queue = messages[0].queue
                try:
                    said = pull(queue, messages)
                    schedule.pulled(queue, await said if inspect.isawaitable(said) else said, time.monotonic())
                except Exception as error:
                    schedule.failed(queue, error, time.monotonic())
                    self._state.give_back(messages)
                except BaseException:
                    self._state.give_back(messages)
                    raise
        except ClosedError:
            if not self._closed:
                raise
        finally:
            if self._scheduled is run:
                self._scheduled = None
            self._state.hold_back((), time.monotonic())
            if run.close_commit is not None:
                await self.close(commit=run.close_commit)

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
        await self._run(self._reply_steps(message, body, properties, timeout_s))

    # -- what failed -----------------------------------------------------------------------------------------------------

    async def send_back(
        self,
        messages: Message | Iterable[Message],
        *,
        error: str | BaseException = "",
        delay: Delay | None = None,
        dead_letter: bool = False,
    ) -> list[SentBack]:
        """See PullConsumer.send_back."""
        self._check_open()
        return await self._run(self._send_back_steps(messages, error, delay, dead_letter))

    async def subscribe_retries(self) -> None:
        """See PullConsumer.subscribe_retries."""
        self._check_open()
        await self.subscribe(await self._run(self._retry_topic_steps()))

    # -- pauses ----------------------------------------------------------------------------------------------------------

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """See PullConsumer.pause."""
        wanted = checked_queues(queues)
        self._check_open()
        self._state.pause(wanted)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """See PullConsumer.resume."""
        wanted = checked_queues(queues)
        self._check_open()
        self._state.pause(wanted, is_paused=False)
        self._wake()

    # -- positions and offsets -------------------------------------------------------------------------------------------

    async def position(self, queue: MessageQueue) -> int:
        """See PullConsumer.position."""
        check_message_queue(queue)
        self._check_open()
        return await self._run(self._steps.position(queue))

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """See PullConsumer.seek."""
        check_message_queue(queue)
        self._check_open()
        self._state.seek(queue, queue_offset)
        self._wake()

    async def seek_to_time(
        self, when: datetime, queues: Iterable[MessageQueue] | None = None
    ) -> None:
        """See PullConsumer.seek_to_time."""
        check_past("when", when, "call seek_to_end()")
        wanted = None if queues is None else checked_queues(queues)
        self._check_open()
        await self._run(self._steps.seek_to_time(when, wanted))
        self._wake()

    async def seek_to_begin(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes to the first message that is stored."""
        await self._seek_to_range_end(queues, 0)

    async def seek_to_end(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes behind the last message."""
        await self._seek_to_range_end(queues, 1)

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """See PullConsumer.commit."""
        self._check_group()
        checked = None if offsets is None else checked_offsets(offsets)
        self._check_open()
        await self._run(self._steps.commit(checked))

    async def committed(self, queue: MessageQueue) -> int | None:
        """See PullConsumer.committed."""
        self._check_group()
        check_message_queue(queue)
        self._check_open()
        return await self._run(self._steps.committed(queue))

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """See PullConsumer.queues."""
        check_topic(topic)
        self._check_open()
        return await self._run(self._steps.queues(topic))

    async def queue_range(self, queue: MessageQueue) -> QueueRange:
        """The offsets that can be read: (min_offset, end_offset), half-open."""
        check_message_queue(queue)
        self._check_open()
        return await self._run(self._steps.queue_range(queue))

    async def min_offset(self, queue: MessageQueue) -> int:
        """Offset of the first message that is stored."""
        return (await self.queue_range(queue)).min_offset

    async def end_offset(self, queue: MessageQueue) -> int:
        """One past the offset of the last message (RocketMQ: maxOffset)."""
        return (await self.queue_range(queue)).end_offset

    async def offset_for_time(self, queue: MessageQueue, when: datetime) -> int:
        """See PullConsumer.offset_for_time."""
        check_message_queue(queue)
        check_time("when", when)
        self._check_open()
        return await self._run(self._steps.offset_for_time(queue, when))

    @property
    def transport(self) -> str:
        """See PullConsumer.transport."""
        return ",".join(
            sorted({kind for kind in map(self._transport.kind, self._addresses()) if kind})
        )

    # -- end -------------------------------------------------------------------------------------------------------------

    async def close(self, *, commit: bool = True) -> None:
        """See PullConsumer.close. It goes on where the caller is cancelled, and a second call waits for it."""
        if text := await self._shut(commit):
            warn(logger, text, 2)

    async def _shut(self, commit: bool) -> str:
        """Closes everything. Returns the warning about the last commit; "" if there is none."""
        if self._closing.is_own:
            return ""
        scheduled = self._scheduled
        if scheduled is not None and scheduled.owner is asyncio.current_task():
            # What it has handed out is done if `pull` returns, and not if it raises.
            scheduled.close_commit = commit
            return ""
        if not self._closing.is_over:
            self._check_no_other_loop()
        if not self._closed:
            self._closed = True
            closed(self)
            self._wake()
            self._state.end_loops()
            if commit and scheduled is None:
                self._state.user_came_back()
        return await self._closing.wait(partial(self._end, commit, scheduled), partial(self._end_in_a_hurry, commit), self._abort)

    async def _end(self, commit: bool, scheduled: ScheduledRun | None) -> str:
        if scheduled is not None and await self._has_ended(scheduled) and commit:
            self._state.user_came_back()
        await self._run(self._goodbye())
        return await self._leave(commit, float("inf"))

    async def _has_ended(self, scheduled: ScheduledRun) -> bool:
        """Waits until another task's `run_scheduled` has ended; whether it has, so that it is known what is done."""
        give_up_s = time.monotonic() + self.options.request_timeout_s
        while self._scheduled is scheduled:
            if time.monotonic() >= give_up_s:
                return False
            await asyncio.sleep(SCHEDULED_LOOK_S)
        return True

    async def _end_in_a_hurry(self, commit: bool) -> str:
        return await self._leave(commit, time.monotonic() + HURRY_S / 2)

    async def _leave(self, commit: bool, commits_until_s: float) -> str:
        """All but the goodbye. May be called again where it was cut off."""
        text = ""
        if self._auto_commits:
            error = await self._run(self._steps.commit_last("on close", commits_until_s))
            if error is not None and (count := self._state.uncommitted_count()):
                text = not_taken_text(self, count, error)
        # First: nothing must be pulled for a group that somebody deletes now.
        for task in self._pulls:
            cancel(task)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._pulls if task.get_loop() is loop), return_exceptions=True)
        if self._member is not None:
            await self._member.leave(self._state.member_name())
        await self._routes.close()
        await self._transport.close()
        if self._handed is not None:
            self._handed.ended(None if commit else NOT_DEALT_WITH)
        if self._tracer is not None:
            await self._run(close_steps(self._tracer))
        if text and not self._closing.is_awaited:
            logger.warning("%s", text)
        return text

    def _abort(self) -> None:
        if self._member is not None:
            self._member.abandon()
        self._transport.abort()

    async def __aenter__(self) -> AsyncPullConsumer:
        self._check_open()
        return self

    async def __aexit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if text := await self._shut(exception_type is None):
            warn(logger, text, 2)

    def finish_at_exit(self, timeout_s: float) -> int:
        """When the interpreter ends, and with it the loop: the queues of which something is not committed. Called by itself."""
        if self._closed or not self._auto_commits or self._pid != os.getpid():
            return 0
        self._closed = True
        return self._state.uncommitted_count()

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _check_loop(self) -> None:
        """Pulls that were under way when another loop ended have ended with it, and nobody would make them again."""
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise ConfigurationError(
                "this pull consumer was used in another event loop: use it within one asyncio.run(), or make a consumer in each"
            )

    def _check_no_other_loop(self) -> None:
        """One that is closed keeps nothing."""
        if self._loop is not None and not self._loop.is_closed():
            self._check_loop()

    def _look_around(self) -> None:
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not (self._loop is not None and self._loop.is_closed()):
            self._arrived.set()

    def _start_pulls(self) -> None:
        """Begins the pulls that are due; while enough waits to be handed out none is, and nothing is read."""
        if self._closed or not self._has_room():
            return
        now_s = time.monotonic()
        for queue in self._state.due(now_s):
            ticket = self._state.begin(queue, now_s)
            task = self._pull_of[ticket] = asyncio.get_running_loop().create_task(self._pull(ticket))
            self._pulls.add(task)
            task.add_done_callback(partial(self._pull_ended, ticket))

    def _pull_ended(self, ticket: Ticket, task: asyncio.Task[None]) -> None:
        self._pulls.discard(task)
        # An equal ticket may be under way again.
        if self._pull_of.get(ticket) is task:
            del self._pull_of[ticket]
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or error is not None:  # Ctrl-C in a hook, say; or somebody has cancelled all tasks.
                if isinstance(error, Exception):
                    self._defect = error
                self._state.lost(ticket)
                self._wake()

    def _raise_trouble(self) -> None:
        """Raises what the user is to know, once."""
        if self._defect is not None:
            defect, self._defect = self._defect, None
            raise defect
        self._steps.raise_trouble()

    def _give_up_pull(self, ticket: Ticket) -> None:
        task = self._pull_of.pop(ticket, None)
        if task is not None:
            cancel(task)

    def _has_room(self) -> bool:
        has_room = self._state.room_bytes(time.monotonic()) > 0
        if not has_room or not self._reads:
            # Again and again, for connections may be new.
            self._transport.hold_reading(_methods.LANE_PULL, not has_room)
            self._reads = has_room
        return has_room

    async def _pull(self, ticket: Ticket) -> None:
        """One pull from request to answer."""
        steps = self._steps
        address = self._known_address(ticket.queue) or await self._run(steps.address_for(ticket))
        # The queue may have gone while its broker was looked up.
        if address is not None and self._state.is_under_way(ticket):
            try:
                request = self._state.encode_request(ticket)
                answer = await self._transport.call(
                    address,
                    _methods.PULL,
                    (request,),
                    self.options.pull_timeout_s,
                    long_hold=self._long_hold if self._state.may_rest(ticket.queue) else None,
                )
            except ProtomqError as error:
                await self._run(steps.take_error(ticket, error))
            else:
                steps.take_answer(ticket, answer)
                self._start_pulls()  # The next hold stands at the broker while the user works.
        self._wake()

    async def _seek_to_range_end(self, queues: Iterable[MessageQueue] | None, which: int) -> None:
        wanted = None if queues is None else checked_queues(queues)
        self._check_open()
        await self._run(self._steps.seek_to_end_of_range(which, wanted))
        self._wake()


class _AsyncLoop(AsyncIterator[Message]):
    """One `async for` over a consumer. No generator: an event loop ends one that was left by `break` only after the next `await`."""

    def __init__(self, consumer: AsyncPullConsumer) -> None:
        self._consumer = consumer
        self._loop = Loop()

    async def __anext__(self) -> Message:
        while True:
            if self._consumer._steps.locks is not None and not self._consumer._steps.may_hand_on(self._loop):
                self._consumer._state.give_back(self._loop.take_unseen())
            for message in self._loop.left:
                return message
            if self._consumer._closed or self._loop.is_over:
                raise StopAsyncIteration
            try:
                await self._consumer._poll_for_loop(self._loop)
            except ClosedError:
                raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Leaves the loop, for `contextlib.aclosing`."""
        self._loop.is_over = True
        self._consumer._state.give_back_left()

    def __del__(self) -> None:
        # No more than that: it may be garbage, which any thread may find, at any place of its program.
        self._loop.is_over = True
