"""PushConsumer: gives a group's messages to functions, on a pool of threads.

    protomq-push          polls: pulls, commits, ticks; hands what came to the state
    protomq-listener-N    take runs of messages and call listeners
    protomq-push-back     gives back what failed

All decisions are in `_push_state.py`, under one lock; nobody holds it while waiting for a broker or a listener. The polling thread alone
uses the pull consumer below.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, Unpack, cast

from . import _forks
from ._checks import check_seconds, loop_runs
from ._child_ends import end_child
from ._connection_options import ConnectionOptions, connection_of
from ._consumer_options import ConsumerOptions
from ._message import Message
from ._pull_consumer import PullConsumer
from ._pull_logic import Room
from ._push_base import IDLE_TICK_S, REVOKE_TIMEOUT_S, TAKE_COUNT_MAX, TICK_S, PushBase
from ._push_options import PushOptions, PushSettings
from ._push_results import Failure
from ._push_state import Run
from ._push_steps import ListenedPulls, PushSteps
from ._push_work import Worker
from ._queue_listener import QueueListener
from ._show_settings import show_settings
from ._steps import to_end
from ._stop_flag import StopFlag
from ._types import PEER_TIMEOUT_S, Body, MessageQueue
from .errors import ClosedError, ConfigurationError, ConnectFailedError, ProtomqError

logger = logging.getLogger("protomq")

JOIN_S = 5.0
"""How long the end of a stop waits for the consumer's own threads, whose calls have time-outs."""
HURRIED_JOIN_S = 0.5


class _Starting:
    """A start that is under way in the thread that makes this."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.over = threading.Event()
        self.has_begun = False
        """Whether there is something to stop."""
        self.is_wanted = True
        self.stop_within_s: float | None = None
        """What a signal's handler has given to `stop`, on the same thread."""

    def goes_on(self) -> bool:
        """Nobody has called `stop`."""
        return self.is_wanted


class ListenedConsumer(PullConsumer):
    """The pull consumer below a push consumer. Listeners decide which messages are done."""

    end_call = "stop"

    def _new_state(self, options: ConsumerOptions) -> ListenedPulls:
        return ListenedPulls(options.pull_options())

    def take_within(
        self,
        timeout_s: float,
        held: Collection[MessageQueue] | None,
        count_max: int,
        offer: Callable[[list[tuple[MessageQueue, list[Message]]]], None],
    ) -> None:
        """Offers the messages that are there or come within `timeout_s`, by queue. It waits less if somebody wakes it.

        `held`: queues to leave out; None: all. `offer` is called under the lock, so that no commit at the interpreter's end comes in
        between.
        """
        with self._own_lock():
            self._check_open()
            steps, state = self._steps, self._state
            state.user_came_back()
            state.hold_back(state.queues if held is None else held)
            if not steps.is_settled(self._routes.cached):
                self._run(steps.before_poll())
            parts = self._taken(count_max)
            if parts:
                offer(parts)
                # If answers are there already, there is no need to look at the connections.
                if self._pulls is not None:
                    self._send_due(self._pulls)
                return
            self._exchange(min(timeout_s, state.next_due_in_s(time.monotonic())))
            # The process may have been stopped meanwhile; then others have the queues.
            if steps.group_due_in_s(time.monotonic()) and (parts := self._taken(count_max)):
                offer(parts)

    def _taken(self, count_max: int) -> list[tuple[MessageQueue, list[Message]]]:
        parts = self._state.take_parts(count_max)
        if self._hooks.filter:
            parts = [(queue, self._hooks.kept(messages)) for queue, messages in parts]
        return parts


class _Queues(QueueListener):
    """Tells the push consumer which queues its pull consumer gets and gives away, on the polling thread."""

    def __init__(self, owner: PushConsumer) -> None:
        self._owner = owner

    def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
        self._owner._get(queues)

    def on_revoked(self, queues: Sequence[MessageQueue]) -> None:
        self._owner._give_away(queues)

    def on_lost(self, queues: Sequence[MessageQueue]) -> None:
        self._owner._lose(queues)


@show_settings(PushOptions, PushSettings.__annotations__)
class PushConsumer(PushBase):
    """Gives messages to functions: one member of a consumer group.

        consumer = PushConsumer("billing")

        @consumer.on("orders", tags=["paid"])
        def bill(message):
            ...

        consumer.run()                      # until Ctrl-C, SIGTERM or request_stop(); or start() ... stop(), or `with consumer:`

    A message is done when its listener returns. If the listener raises, it gets the message again after the group's delays, until the
    message is a dead letter. The listener may also return Retry(delay=...), Reject() or Suspend(ms). Coroutine functions may listen too:
    each thread then has a loop. Messages come at least once. A consumer is started once, in the process that uses it.

    - `namesrv`, `transport`, `client_id`, `peer_timeout_s`, `connection`: as of PullConsumer.
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
        self._consumer: ListenedConsumer | None = None
        self._starting: _Starting | None = None
        self._start_lock = threading.Lock()
        self._push: PushSteps | None = None
        self._lock = threading.RLock()
        """Reentrant, as `_stopping` is: a signal's handler may call `stop` where its thread has it."""
        self._changed = threading.Condition(self._lock)
        """Notified when there may be a run to take, or the pool must shrink."""
        self._failed = threading.Condition(self._lock)
        """Notified when there is something to give back, and when there is nothing any more."""
        self._drained = threading.Condition(self._lock)
        self._idle_count = 0
        self._is_waking = False
        """A thread was woken and has not run yet."""
        self._threads: list[threading.Thread] = []
        self._pool: set[threading.Thread] = set()
        self._thread_number = 0
        self._is_revoking = False
        self._stop_wanted = StopFlag()
        self._was_cut_off = False
        """Whether a `stop` was interrupted, so that the next one is to do all that is left."""
        self._stopping = threading.RLock()
        """A signal's handler may call `stop` in the midst of it."""
        self._worker = Worker(self._settle, self._seldom, comes_again=not self.options.broadcast)

    # -- life ------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Subscribes and begins; returns when the servers have answered. Raises what a subscription raises; then nothing has begun.

        Where `stop` is called meanwhile, it returns soon, and the consumer is stopped.
        """
        starting = _Starting()
        try:
            self._start(starting)
        except BaseException:
            if starting.has_begun:  # No thread could be started, say.
                self.stop()
            raise

    def _start(self, starting: _Starting) -> None:
        try:
            with self._start_lock:  # Of two threads one begins.
                self._check_may_start()
                self._fork_count = _forks.fork_count
                self._starting = starting
            self._begin(starting)
        finally:
            if self._starting is starting:
                self._starting = None
            starting.over.set()
        if starting.stop_within_s is not None:
            self.stop(starting.stop_within_s)

    def _begin(self, starting: _Starting) -> None:
        consumer = ListenedConsumer(
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
        pulls.lowest_open, pulls.moved = self._lowest_open, lambda queue: self._lose((queue,))
        pulls.done_behind, pulls.forked = self._done_behind, self._forget_done
        pulls.room_of = self._room
        if consumer._steps.locks is not None:
            consumer._steps.locks.is_busy, consumer._steps.locks.on_sure = self._is_busy, self._go_on
        has_begun = False
        try:
            has_begun = consumer._run(to_end(push.start(), starting.goes_on)) and starting.is_wanted
        finally:
            if not has_begun:
                push.close()
                self._push = None
                consumer.close(commit=False)
        if not has_begun:
            self._is_ending = True
            return
        self._consumer = consumer
        starting.has_begun = True
        for name, run in (("protomq-push", self._poll_until_end), ("protomq-push-back", self._give_back_until_end)):
            thread = threading.Thread(target=self._until_death, args=(run,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self.set_concurrency(self._concurrency)

    def stop(self, timeout_s: float | None = None) -> int:
        """Stops: starts no more listeners, waits `timeout_s` (None: `drain_timeout_s`) for running ones, gives back failed messages,
        commits.

        Returns how many messages were begun and are not done: they come again. May be called twice. A listener, and what else is called
        on the consumer's threads, a hook or an allocation, must call `request_stop` instead. There it raises ConfigurationError, and ends
        nothing.

        It ends a `start` that is under way in another thread. In the same one, as in a signal's handler, it only says that it is to end.
        In a forked child, as at the end of a `with`, it does nothing: the consumer is the parent's.
        """
        within_s = self.options.drain_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s, zero=True)
        if self._is_left_behind:
            return 0
        thread = threading.current_thread()
        if thread in self._pool or thread in self._threads:
            if self._is_ending:
                return 0
            raise ConfigurationError(
                "stop() in a listener or a hook would wait for itself: call request_stop(), which ends run()"
            )
        self._stop_wanted.set()
        starting = self._starting
        if starting is not None:
            starting.is_wanted = False
            if starting.thread is thread:
                starting.stop_within_s = within_s
                return 0
            starting.over.wait()
        consumer = self._consumer
        if consumer is None:
            return 0
        with self._stopping:
            return self._stop(consumer, within_s)

    def _stop(self, consumer: ListenedConsumer, timeout_s: float) -> int:
        if self._is_ending and not self._was_cut_off:
            return 0  # Somebody else has stopped it meanwhile.
        self._was_cut_off = False
        try:
            self._drain(timeout_s)
            return self._leave(consumer, JOIN_S, consumer.close)
        except BaseException:
            self._was_cut_off = True
            # Ctrl-C, or an alarm: nobody may call `stop` again, and others wait for the queues.
            self._leave(consumer, HURRIED_JOIN_S, consumer.close_in_a_hurry)
            self._was_cut_off = False
            raise

    def _drain(self, timeout_s: float) -> None:
        ends_s = time.monotonic() + timeout_s
        with self._lock:
            self._state.stop()
            self._changed.notify_all()
            self._failed.notify_all()
            while self._state.is_running() or self._state.has_backs():
                left_s = ends_s - time.monotonic()
                if left_s <= 0 or not self._drained.wait(left_s):
                    break

    def _leave(self, consumer: ListenedConsumer, join_s: float, close: Callable[[], None]) -> int:
        """Commits, and leaves the group. May be called again where it was cut off."""
        with self._lock:
            left_count = sum(run.count for run in self._state.runs) + self._state.backs.count
            self._is_ending = True
            self._failed.notify_all()
        consumer.wakeup()
        for thread in self._threads:
            if thread.ident is not None:  # It was started.
                thread.join(join_s)
        if self._push is not None:
            consumer._run(self._push.save(is_last=True))
        close()
        if self._push is not None:
            self._push.close()
        if self._tracer is not None:
            self._tracer.close()
        if left_count:
            logger.warning("%s", self._left_text(left_count))
        return left_count

    def request_stop(self) -> None:
        """Makes `run` end. Any thread may call it, also a listener's or a signal handler."""
        self._stop_wanted.set()

    def run(self) -> int:
        """Starts, waits for Ctrl-C, SIGTERM or `request_stop`, and stops. Returns what `stop` returns. A second Ctrl-C waits for no
        listener; a second SIGTERM changes nothing. Raises ClientError if the consumer has stopped by itself,
        and ConfigurationError in a running event loop. So it does where the consumer runs already, which then goes on.
        """
        if loop_runs():
            raise ConfigurationError(
                "run() would block the event loop that runs here: use AsyncPushConsumer, whose run() is awaited, or start() and stop()"
            )
        self._check_may_start()
        has_started = False
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, lambda *_: self.request_stop())
        try:
            self.start()
            has_started = True
            # In slices: a signal's handler runs between two of them on every platform.
            while not self._stop_wanted.wait(0.5):
                pass
        finally:
            if before:
                signal.signal(signal.SIGINT, before.pop(signal.SIGINT))
            try:
                left_count = self.stop() if has_started else 0
            finally:
                # Not earlier: a second SIGTERM would end the drain without its last commit.
                for number, handler in before.items():
                    signal.signal(number, handler)
        self._raise_death()
        return left_count

    def __enter__(self) -> PushConsumer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def reply(
        self,
        message: Message,
        body: Body = b"",
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Replies to a message that was sent by `request`; for listeners. Returns when its caller has the reply.

        Raises CallerGoneError if nobody waits for it any more: return, there is nothing to retry. RequestTimeoutError if the time is over,
        and the caller may still come back: let it be raised, so that the message comes again. ConfigurationError if the message asks for
        no reply. `timeout_s`: None for 15 s, or the request time-out if that is longer.
        """
        if self._consumer is None:
            raise ConfigurationError("a push consumer replies while it runs; start it first")
        self._consumer.reply(message, body, properties=properties, timeout_s=timeout_s)

    # -- while it runs ---------------------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Starts no more listeners until `resume`; running ones go on."""
        self._check_is_here()
        with self._lock:
            self._state.suspend()

    def resume(self) -> None:
        """Starts listeners again after `suspend`, in a moment: what a reset of the group's offset has skipped is dropped before."""
        self._check_is_here()
        with self._lock:
            self._state.resume()
        self._wake()

    def set_concurrency(self, concurrency: int) -> None:
        """Sets the number of listener threads. Surplus threads end after their present work."""
        concurrency = self._checked_concurrency(concurrency)
        self._check_is_here()
        with self._lock:
            self._concurrency = concurrency
            if self._consumer is None or self._state.is_stopping:
                return
            new = []
            while len(self._pool) < concurrency:
                self._thread_number += 1
                name = f"protomq-listener-{self._thread_number}"
                thread = threading.Thread(target=self._until_death, args=(self._listen_until_end,), name=name, daemon=True)
                self._pool.add(thread)
                new.append(thread)
            self._changed.notify_all()
        for number, thread in enumerate(new):
            try:
                thread.start()
            except BaseException:
                with self._lock:
                    self._pool.difference_update(new[number:])
                raise

    @property
    def is_running(self) -> bool:
        """See PushBase.is_running."""
        return self._consumer is not None and not self._is_ending and self._fork_count == _forks.fork_count

    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues being consumed."""
        return self._consumer.assignment() if self._consumer is not None else ()

    # -- the threads -----------------------------------------------------------------------------------------------------

    def _until_death(self, run: Callable[[], None]) -> None:
        """A thread. What ends it by itself, such as a SystemExit of an allocation of the program's, ends the consumer."""
        try:
            run()
        except BaseException as error:
            thread = threading.current_thread()
            self._note_death(error, thread.name)
            with self._lock:
                self._pool.discard(thread)
            # Not here: whoever stops joins this thread.
            threading.Thread(target=self.stop, name="protomq-push-end", daemon=True).start()

    def _poll_until_end(self) -> None:
        assert self._consumer is not None
        assert self._push is not None
        while not self._is_ending:
            if self._fork_count != _forks.fork_count:
                end_child()  # A hook, or what else is called here, has forked.
            try:
                self._poll(self._consumer, self._push)
            except ClosedError:
                return  # The interpreter ends.
            except ProtomqError as error:
                gone = self._push.take_trouble(error)
                with self._lock:
                    self._state.drop(gone)
                if isinstance(error, ConnectFailedError):  # No descriptor is left: the next turn would begin at once.
                    time.sleep(IDLE_TICK_S)
            except Exception:
                # A defect in the SDK must not end the consumption silently.
                logger.exception("group %s could not poll, trying again", self.group)
                time.sleep(IDLE_TICK_S)

    def _poll(self, consumer: ListenedConsumer, push: PushSteps) -> None:
        """One turn."""
        resumes = self._state.resumes_wanted
        if resumes is not None:
            try:
                consumer._run(push.follow_resets())
            finally:
                with self._lock:
                    self._state.resumed(resumes)
                    self._changed.notify_all()
        if push.wants_look():
            consumer._run(push.look())
            self._note_rates()
        now_s = time.monotonic()
        state = self._state
        with self._lock:
            state.shut(consumer._state.is_shut)
            overdue = state.tick(now_s)
            if overdue:
                self._failed.notify_all()
            held = state.held()
            held = frozenset(held) if held is not None else None
            wait_s = min(TICK_S if state.running_count else IDLE_TICK_S, state.next_due_in_s(now_s))
            self._notify_listeners()
        push.say_overdue(overdue)
        consumer.take_within(wait_s, held, TAKE_COUNT_MAX, self._offer)

    def _offer(self, parts: Sequence[tuple[MessageQueue, Sequence[Message]]]) -> None:
        with self._lock:
            for queue, messages in parts:
                self._state.offer(queue, messages)
            self._notify_listeners()

    def _notify_listeners(self) -> None:
        """Wakes one idle thread if there is work. It wakes the next when it has taken its own, if then there is more.

        A wake-up costs its caller up to 50 us, and listeners that are quick are done before a second thread runs.
        """
        if self._idle_count and not self._is_waking and self._state.runs_wanted():
            self._is_waking = True
            self._changed.notify()

    def _listen_until_end(self) -> None:
        runner: asyncio.Runner | None = None
        state, run = self._state, None
        try:
            while True:
                with self._lock:
                    if run is not None:
                        self._end(run)
                    run = self._next_run()
                    has_room_again = state.has_room_again()
                if has_room_again:
                    self._wake()
                if run is None:
                    return
                if run.listener.is_coroutine:
                    if runner is None:
                        runner = asyncio.Runner()
                    runner.run(self._worker.work_async(run))
                else:
                    self._worker.work(run)
        finally:
            if runner is not None:
                runner.close()

    def _next_run(self) -> Run | None:
        """Waits for the next run. Returns None if this thread is one too many, or the consumer stops."""
        state = self._state
        while not state.is_stopping and len(self._pool) <= self._concurrency:
            run = state.next_run(time.monotonic(), self._idle_count + 1)
            if run is not None:
                self._notify_listeners()
                return run
            if state.has_room_again():
                self._wake()
            self._idle_count += 1
            self._changed.wait()
            self._idle_count -= 1
            self._is_waking = False
        self._pool.discard(threading.current_thread())
        self._notify_listeners()
        return None

    def _end(self, run: Run) -> None:
        now_s = time.monotonic()
        self._state.ended(run, now_s)
        if run.work.suspended_until_s > now_s:
            self._wake()  # Whoever polls does not know yet when to look at that queue.
        if self._state.is_stopping or self._is_revoking:
            self._drained.notify_all()

    def _settle(self, run: Run, messages: Sequence[Message], failures: Sequence[Failure | None]) -> None:
        with self._lock:
            self._state.settled(run, messages, failures, time.monotonic())
            self._failed.notify_all()

    def _give_back_until_end(self) -> None:
        assert self._consumer is not None
        assert self._push is not None
        backs = self._state.backs
        while True:
            with self._lock:
                now_s = time.monotonic()
                while (call := backs.begin(now_s)) is None and not self._is_ending:
                    due_in_s = backs.next_due_in_s(now_s)
                    self._failed.wait(min(due_in_s, IDLE_TICK_S))
                    now_s = time.monotonic()
            if call is None or self._is_ending:
                return
            error: ProtomqError | None = None
            try:
                self._consumer._run(self._push.back_steps(call))
            except ProtomqError as caught:
                error = caught
            with self._lock:
                if error is None:
                    self._push.back_done(call)
                else:
                    self._push.back_failed(call, error)
                if self._state.is_stopping or self._is_revoking:
                    self._drained.notify_all()
                has_room_again = self._state.has_room_again()
            if has_room_again:
                self._wake()

    def _is_busy(self, queue: MessageQueue) -> bool:
        with self._lock:
            return self._state.is_running((queue,))

    def _go_on(self) -> None:
        """Queues that waited may go on."""
        with self._lock:
            self._notify_listeners()

    def _lowest_open(self, queue: MessageQueue) -> int | None:
        assert self._push is not None
        with self._lock:
            return self._push.lowest_open(queue)

    def _room(self, queue: MessageQueue | None) -> Room:
        with self._lock:
            return self._state.room(queue)

    def _done_behind(self, queue: MessageQueue) -> set[int]:
        with self._lock:
            return self._state.done_behind(queue)

    def _forget_done(self, queue: MessageQueue) -> None:
        with self._lock:
            self._state.forget_done(queue)

    def _give_away(self, queues: Sequence[MessageQueue]) -> None:
        """Waits a moment until listeners are done with messages of these queues, and until failed ones are given back."""
        if self._push is None or self._is_ending:
            return  # `stop` has waited.
        ends_s = time.monotonic() + min(self.options.drain_timeout_s, REVOKE_TIMEOUT_S)
        going = frozenset(queues)
        with self._lock:
            self._state.revoke(going)
            self._is_revoking = True
            while self._state.is_running(going) or self._state.has_backs(going):
                left_s = ends_s - time.monotonic()
                if left_s <= 0 or not self._drained.wait(left_s):
                    break
            self._is_revoking = False
            self._push.gave_away(going)

    def _lose(self, queues: Sequence[MessageQueue]) -> None:
        """Drops everything of these queues, which belong to others now."""
        if self._push is not None:
            with self._lock:
                self._push.lost(queues)

    def _get(self, queues: Sequence[MessageQueue]) -> None:
        """Notes that these queues belong to this consumer now."""
        if self._push is not None:
            with self._lock:
                self._push.came(queues)

    def _wake(self) -> None:
        if self._consumer is not None:
            self._consumer.wakeup()

    def _look(self) -> None:
        if self._push is not None:
            self._push.look_now()
            self._wake()

