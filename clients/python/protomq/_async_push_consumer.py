"""AsyncPushConsumer: the asyncio flavour of `_push_consumer.PushConsumer`, with the same rules.

One task polls, one gives back what failed, and up to `concurrency` tasks take runs of messages, each until there is none. Listeners that
are functions run on threads, which end nobody's loop. The consumer belongs to the loop on which it was started.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, Unpack, cast

from . import _forks
from ._async_pull_consumer import AsyncPullConsumer
from ._checks import check_seconds
from ._child_ends import end_child
from ._closing import Closing
from ._connection_options import ConnectionOptions, connection_of
from ._consumer_options import ConsumerOptions
from ._daemon_threads import DaemonThreads
from ._loop_watch import LoopWatch
from ._message import Message
from ._push_base import IDLE_TICK_S, REVOKE_TIMEOUT_S, TAKE_COUNT_MAX, TICK_S, PushBase
from ._push_options import PushOptions, PushSettings
from ._push_results import Failure
from ._push_state import Run
from ._push_steps import ListenedPulls, PushSteps
from ._push_work import Worker
from ._queue_listener import QueueListener
from ._show_settings import show_settings
from ._steps import to_end
from ._trace import close_steps
from ._types import PEER_TIMEOUT_S, Body, MessageQueue
from .errors import ConfigurationError, ProtomqError

logger = logging.getLogger("protomq")


JOIN_S = 5.0
"""How long the end of a stop waits for coroutines that were cancelled, and go on."""
HURRIED_JOIN_S = 0.2


class _Starting:
    """A start that is under way."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.is_wanted = True

    def goes_on(self) -> bool:
        """Nobody has called `stop`."""
        return self.is_wanted


class AsyncListenedConsumer(AsyncPullConsumer):
    """The pull consumer below a push consumer. Listeners decide which messages are done."""

    end_call = "stop"

    def _new_state(self, options: ConsumerOptions) -> ListenedPulls:
        return ListenedPulls(options.pull_options())

    async def take_within(
        self, timeout_s: float, held: Collection[MessageQueue] | None, count_max: int
    ) -> list[tuple[MessageQueue, list[Message]]]:
        """See ListenedConsumer.take_within."""
        self._check_open()
        steps, state = self._steps, self._state
        state.user_came_back()
        state.hold_back(state.queues if held is None else held)
        arrived = self._arrived
        if arrived is None:
            arrived = self._arrived = asyncio.Event()
        if not steps.is_settled(self._routes.cached):
            await self._run(steps.before_poll())
        self._start_pulls()
        self._raise_trouble()
        parts = state.take_parts(count_max)
        if not parts and timeout_s > 0:
            try:
                async with asyncio.timeout(min(timeout_s, state.next_due_in_s(time.monotonic()))):
                    await arrived.wait()
            except TimeoutError:
                pass
            arrived.clear()
            self._start_pulls()
            self._raise_trouble()
            # It may have been stopped meanwhile: then others have the queues.
            if steps.group_due_in_s(time.monotonic()):
                parts = state.take_parts(count_max)
        if parts:
            self._start_pulls()
        if self._hooks.filter:
            parts = [(queue, self._hooks.kept(messages)) for queue, messages in parts]
        return parts

    def wake(self) -> None:
        """Ends a wait."""
        self._wake()


class _Queues(QueueListener):
    """Tells the push consumer of the queues that its pull consumer gets and gives away, in the polling task."""

    def __init__(self, owner: AsyncPushConsumer) -> None:
        self._owner = owner

    def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
        self._owner._get(queues)

    async def on_revoked(self, queues: Sequence[MessageQueue]) -> None:
        await self._owner._give_away(queues)

    def on_lost(self, queues: Sequence[MessageQueue]) -> None:
        self._owner._lose(queues)


@show_settings(PushOptions, PushSettings.__annotations__)
class AsyncPushConsumer(PushBase):
    """Gives messages to coroutine functions, and to functions: one member of a consumer group.

        consumer = AsyncPushConsumer("billing")

        @consumer.on("orders", tags=["paid"])
        async def bill(message):
            ...

        await consumer.run()                # or: async with consumer: ...

    What listeners return and raise means the same as in PushConsumer. Functions run on threads, up to `concurrency`. A coroutine function
    that blocks the event loop for a second is named in the log. The arguments are those of PushConsumer.
    """

    def __init__(
        self,
        group: str,
        *,
        namesrv: str | Sequence[str] | None = None,
        transport: Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        connection: ConnectionOptions | None = None,
        **settings: Unpack[PushSettings],
    ) -> None:
        super().__init__(PushOptions(group=group, **settings))
        self._connection = connection_of(
            connection, namesrv=namesrv, transport=transport, client_id=client_id, peer_timeout_s=peer_timeout_s
        )
        self._start_hooks(self._connection)
        self._consumer: AsyncListenedConsumer | None = None
        self._starting: _Starting | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where it was started: its tasks and connections are of no other."""
        self._push: PushSteps | None = None
        self._failed = asyncio.Event()
        self._stop_wanted = asyncio.Event()
        self._drained = asyncio.Event()
        self._own_tasks: list[asyncio.Task[None]] = []
        self._pool: set[asyncio.Task[None]] = set()
        self._threads = DaemonThreads("protomq-listener")
        self._watch: LoopWatch | None = None
        self._closing = Closing(0)
        self._drains_until_s = float("inf")
        self._stop_of_death: asyncio.Task[int] | None = None
        """The stop that a death has begun."""
        self._worker = Worker(self._settle, self._seldom, comes_again=not self.options.broadcast)

    # -- life ------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """See PushConsumer.start."""
        self._check_may_start()
        starting = _Starting()
        self._fork_count = _forks.fork_count
        self._starting, self._loop = starting, asyncio.get_running_loop()
        try:
            await self._begin(starting)
        finally:
            self._starting = None
            starting.over.set()

    async def _begin(self, starting: _Starting) -> None:
        consumer = AsyncListenedConsumer(
            self.options.consumer_group, connection=self._connection, listener=_Queues(self), **self.options.consumer_settings()
        )
        consumer.about = self._about
        if consumer.name is not None:
            self._hooks.named_by(consumer.name)
        self._hooks.located_by(consumer._routes.last_known, consumer._transport.kind)
        self._push = push = PushSteps(
            self.options, consumer._steps, self._state, self._wanted, time.monotonic
        )
        self._state.stands, self._worker.is_locked = consumer._steps.may_begin, consumer._steps.is_locked
        pulls = cast(ListenedPulls, consumer._state)
        pulls.lowest_open, pulls.moved = push.lowest_open, lambda queue: self._lose((queue,))
        pulls.done_behind, pulls.forked = self._state.done_behind, self._state.forget_done
        pulls.room_of = self._state.room
        if consumer._steps.locks is not None:
            consumer._steps.locks.is_busy = lambda queue: self._state.is_running((queue,))
            consumer._steps.locks.on_sure = self._begin_tasks
        has_begun = False
        try:
            has_begun = await consumer._run(to_end(push.start(), starting.goes_on)) and starting.is_wanted
        finally:
            if not has_begun:
                push.close()
                self._push = None
                await consumer.close(commit=False)
        if not has_begun:
            self._is_ending = True
            return
        self._consumer = consumer
        self._watch = LoopWatch(lambda: [one for one in self._listeners.copy().values() if one.is_coroutine])
        loop = asyncio.get_running_loop()
        self._own_tasks = [
            loop.create_task(self._until_death(self._poll_until_end), name="protomq-push"),
            loop.create_task(self._until_death(self._give_back_until_end), name="protomq-push-back"),
        ]

    async def stop(self, timeout_s: float | None = None) -> int:
        """See PushConsumer.stop. A coroutine that is not done in time is cancelled.

        It goes on where the caller is cancelled. A second call waits for it, and no longer than its own time-out for coroutines.
        """
        within_s = self.options.drain_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s, zero=True)
        if self._is_left_behind:
            return 0
        task = asyncio.current_task()
        is_part = task in self._pool or task in self._own_tasks
        ends = self._closing.is_own or self._closing.is_over or self._is_ending
        if task in self._pool and not ends:
            raise ConfigurationError(
                "stop() in a listener would wait for itself: call request_stop(), which ends run()"
            )
        self._stop_wanted.set()
        if self._starting is not None:
            self._check_loop()
            self._starting.is_wanted = False
            await self._starting.over.wait()
        consumer = self._consumer
        if consumer is None or self._closing.is_own or (self._is_ending and is_part):
            return 0
        if not self._closing.is_over:
            self._check_loop()
            self._drains_until_s = min(self._drains_until_s, time.monotonic() + within_s)
            self._state.stop()
            self._drained.set()
        return await self._closing.wait(
            partial(self._drain_and_leave, consumer), partial(self._leave, consumer, HURRIED_JOIN_S), self._abort
        )

    async def _drain_and_leave(self, consumer: AsyncListenedConsumer) -> int:
        state = self._state
        while state.is_running() or state.has_backs():
            left_s = self._drains_until_s - time.monotonic()
            if left_s <= 0:
                break
            self._drained.clear()
            self._failed.set()
            try:
                async with asyncio.timeout(left_s):
                    await self._drained.wait()
            except TimeoutError:
                break
        return await self._leave(consumer, JOIN_S)

    async def _leave(self, consumer: AsyncListenedConsumer, join_s: float) -> int:
        """Commits, and leaves the group. May be called again where it was cut off."""
        state = self._state
        left_count = sum(run.count for run in state.runs) + state.backs.count
        tasks = self._cancel_tasks()
        if tasks:
            ended, _ = await asyncio.wait(tasks, timeout=join_s)
            for task in ended:
                if not task.cancelled():
                    task.exception()  # Seen: `_until_death` has told it.
        self._threads.close()
        if self._push is not None:
            await consumer._run(self._push.save(is_last=True))
        await consumer.close()
        if self._push is not None:
            self._push.close()
        if self._tracer is not None:
            await consumer._run(close_steps(self._tracer))
        if left_count:
            logger.warning("%s", self._left_text(left_count))
        return left_count

    def _cancel_tasks(self) -> list[asyncio.Task[None]]:
        """All that it has of its own."""
        self._is_ending = True
        if self._watch is not None:
            self._watch.close()
        tasks = [*self._pool, *self._own_tasks]
        for task in tasks:
            task.cancel()
        return tasks

    def _abort(self) -> None:
        self._cancel_tasks()
        self._threads.close()
        if self._consumer is not None:
            self._consumer._abort()
        if self._push is not None:
            self._push.close()

    def request_stop(self) -> None:
        """Makes `run` end. From the loop, also from a listener."""
        self._stop_wanted.set()

    async def run(self) -> int:
        """See PushConsumer.run."""
        self._check_may_start()  # First: the loop's handlers of signals are those of the run that goes on.
        has_started = False
        loop = asyncio.get_running_loop()
        handled = []
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, self.request_stop)
            except (NotImplementedError, RuntimeError, ValueError):
                continue  # Windows, or no main thread: somebody else sees to signals.
            handled.append(number)
        try:
            await self.start()
            has_started = True
            await self._stop_wanted.wait()
        finally:
            if signal.SIGINT in handled:
                handled.remove(signal.SIGINT)
                loop.remove_signal_handler(signal.SIGINT)
            try:
                left_count = await self.stop() if has_started else 0
            finally:
                # Not earlier: a second SIGTERM would end the drain without its last commit.
                for number in handled:
                    loop.remove_signal_handler(number)
        self._raise_death()
        return left_count

    async def __aenter__(self) -> AsyncPushConsumer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def reply(
        self,
        message: Message,
        body: Body = b"",
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """See PushConsumer.reply. For listeners that are coroutine functions."""
        if self._consumer is None:
            raise ConfigurationError("a push consumer replies while it runs; start it first")
        self._check_loop()
        await self._consumer.reply(message, body, properties=properties, timeout_s=timeout_s)

    def _check_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            raise ConfigurationError(
                "this push consumer was started in another event loop: start and stop it in one asyncio.run(), or call its run()"
            )

    # -- while it runs ---------------------------------------------------------------------------------------------------

    def _in_loop(self, function: Callable[[], None]) -> None:
        """Calls it where the consumer runs: at once there, else soon, as from a thread of the program's. In a closed loop nothing runs."""
        loop = self._loop
        if loop is None or asyncio._get_running_loop() is loop:
            function()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(function)

    def suspend(self) -> None:
        """See PushConsumer.suspend. From another thread than the loop's, that is so in a moment."""
        self._check_is_here()
        self._state.is_suspended = True
        self._in_loop(self._state.rest)

    def resume(self) -> None:
        """See PushConsumer.resume."""
        self._check_is_here()
        self._state.resume()
        self._in_loop(self._wake)

    def set_concurrency(self, concurrency: int) -> None:
        """So many tasks from now on; those that are too many end after what they have. Any thread."""
        concurrency = self._checked_concurrency(concurrency)
        self._check_is_here()
        self._concurrency = concurrency
        self._in_loop(self._begin_tasks)

    @property
    def is_running(self) -> bool:
        """See PushBase.is_running."""
        if self._loop is not None and self._loop.is_closed():
            return False
        return self._consumer is not None and not self._is_ending and self._fork_count == _forks.fork_count

    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues being consumed."""
        return self._consumer.assignment() if self._consumer is not None else ()

    # -- the tasks -------------------------------------------------------------------------------------------------------

    async def _until_death(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """A task. What ends it by itself, such as a SystemExit of an allocation of the program's, ends the consumer."""
        task = asyncio.current_task()
        assert task is not None
        try:
            # Made here: one that is cancelled before it begins would leave a coroutine that nobody awaits.
            await work()
        except BaseException as error:
            # GeneratorExit: its loop was closed before, so nothing can be stopped any more.
            if task.cancelling() or isinstance(error, KeyboardInterrupt | GeneratorExit):
                raise
            self._note_death(error, task.get_name())
            self._pool.discard(task)
            self._stop_of_death = asyncio.get_running_loop().create_task(self.stop(), name="protomq-push-end")
            if isinstance(error, SystemExit):
                raise  # It ends the loop, as in any task.

    async def _poll_until_end(self) -> None:
        assert self._consumer is not None
        assert self._push is not None
        while True:
            try:
                await self._poll(self._consumer, self._push)
            except ProtomqError as error:
                self._state.drop(self._push.take_trouble(error))
            except Exception:
                # A defect of ours must not end the consumption silently.
                logger.exception("group %s could not poll, trying again", self.group)
                await asyncio.sleep(IDLE_TICK_S)

    async def _poll(self, consumer: AsyncListenedConsumer, push: PushSteps) -> None:
        """One turn."""
        if self._fork_count != _forks.fork_count:
            # It would read what its parent's connections bring.
            end_child(ConfigurationError("a forked child that awaits needs an event loop of its own: this one is its parent's"))
        resumes = self._state.resumes_wanted
        if resumes is not None:
            try:
                await consumer._run(push.follow_resets())
            finally:
                self._state.resumed(resumes)
        if push.wants_look():
            await consumer._run(push.look())
            self._note_rates()
        now_s = time.monotonic()
        state = self._state
        state.shut(consumer._state.is_shut)
        overdue = state.tick(now_s)
        if overdue:
            self._failed.set()
        push.say_overdue(overdue)
        self._begin_tasks()
        wait_s = min(TICK_S if state.running_count else IDLE_TICK_S, state.next_due_in_s(now_s))
        parts = await consumer.take_within(wait_s, state.held(), TAKE_COUNT_MAX)
        for queue, messages in parts:
            state.offer(queue, messages)
        if parts:
            self._begin_tasks()
            # Under a backlog nothing else here waits.
            await asyncio.sleep(0)

    def _begin_tasks(self) -> None:
        """As many as have something to do, within the limit."""
        if self._consumer is None or self._is_ending:
            return
        loop = asyncio.get_running_loop()
        idle_count = self._concurrency - len(self._pool)
        for _ in range(min(self._state.runs_wanted(), idle_count)):
            task = loop.create_task(self._until_death(self._listen), name="protomq-listener")
            self._pool.add(task)
            task.add_done_callback(self._pool.discard)

    async def _listen(self) -> None:
        """Runs, until there is none."""
        state = self._state
        while len(self._pool) <= self._concurrency:
            run = state.next_run(time.monotonic(), self._concurrency - len(self._pool) + 1)
            if run is None:
                return
            try:
                if run.listener.is_coroutine:
                    await self._worker.work_async(run)
                else:
                    await self._work_on_thread(run)
            finally:
                if not self._is_ending:
                    now_s = time.monotonic()
                    state.ended(run, now_s)
                    self._drained.set()
                    # Whoever polls does not know yet when to look at a queue that waits.
                    if state.has_room_again() or run.work.suspended_until_s > now_s:
                        self._wake()
            # The loop's turn: a listener may never wait.
            await asyncio.sleep(0)

    async def _work_on_thread(self, run: Run) -> None:
        """What is not simply done the loop settles at once, for the state is its own. The next message of the run may take long."""
        loop = asyncio.get_running_loop()

        def settle(run: Run, messages: Sequence[Message], failures: Sequence[Failure | None]) -> None:
            with suppress(RuntimeError):  # The loop was closed meanwhile.
                loop.call_soon_threadsafe(self._settle, run, messages, failures)

        worker = Worker(settle, self._seldom, comes_again=not self.options.broadcast)
        worker.is_locked = self._worker.is_locked
        await asyncio.wrap_future(self._threads.submit(lambda: worker.work(run)))

    def _settle(self, run: Run, messages: Sequence[Message], failures: Sequence[Failure | None]) -> None:
        self._state.settled(run, messages, failures, time.monotonic())
        self._failed.set()

    async def _give_back_until_end(self) -> None:
        assert self._consumer is not None
        assert self._push is not None
        backs = self._state.backs
        while True:
            now_s = time.monotonic()
            call = backs.begin(now_s)
            if call is None:
                self._failed.clear()
                try:
                    async with asyncio.timeout(min(backs.next_due_in_s(now_s), IDLE_TICK_S)):
                        await self._failed.wait()
                except TimeoutError:
                    pass
                continue
            try:
                await self._consumer._run(self._push.back_steps(call))
            except ProtomqError as error:
                self._push.back_failed(call, error)
            else:
                self._push.back_done(call)
            self._drained.set()
            if self._state.has_room_again():
                self._wake()

    async def _give_away(self, queues: Sequence[MessageQueue]) -> None:
        """Waits a moment until listeners are done with messages of these queues, and until failed ones are given back."""
        if self._push is None or self._is_ending:
            return  # `stop` has waited.
        state, going = self._state, frozenset(queues)
        state.revoke(going)
        try:
            async with asyncio.timeout(min(self.options.drain_timeout_s, REVOKE_TIMEOUT_S)):
                while state.is_running(going) or state.has_backs(going):
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            pass
        self._push.gave_away(going)

    def _lose(self, queues: Sequence[MessageQueue]) -> None:
        """Drops everything of these queues, which belong to others now."""
        if self._push is not None:
            self._push.lost(queues)

    def _get(self, queues: Sequence[MessageQueue]) -> None:
        """Notes that these queues belong to this consumer now."""
        if self._push is not None:
            self._push.came(queues)

    def _wake(self) -> None:
        if self._consumer is not None:
            self._consumer.wake()

    def _look(self) -> None:
        if self._push is not None:
            self._push.look_now()
            self._wake()
