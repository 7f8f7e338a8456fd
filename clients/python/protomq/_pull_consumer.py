"""PullConsumer: messages of chosen queues, at the user's pace, from one thread or several.

Rules:
- No thread of its own: pulls are in flight while the user works, their answers wait in the kernel, and `poll` reads them.
- Delivery is at least once. With a consumer group, `poll` commits positions every 5 s, and `close` commits them too. A batch counts as done
  when `poll` is called again, or when the `with` block ends without an exception.
- Any thread may call everything; calls wait for each other, except `close` and `wakeup`, which end a `poll` at once.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Literal, Unpack

from ._checks import (
    check_count,
    check_message_queue,
    check_past,
    check_seconds,
    check_time,
    check_topic,
)
from ._closing import HURRY_S
from ._connection_options import ConnectionOptions, connection_of
from ._consumer_base import ConsumerBase, wakes
from ._consumer_options import ConsumerOptions, ConsumerSettings
from ._filters import checked_filter
from ._hook_points import HookPoints
from ._hooked_calls import multiplexer_with, transport_with
from ._hooked_consuming import NOT_DEALT_WITH
from ._interrupts import is_interrupt
from ._loops import Loop
from ._member_thread import MemberThread
from ._message import Message
from ._offset_calls import checked_offsets, checked_queues, checked_tags
from ._open_consumers import closed, not_taken_text, opened
from ._pull_logic import GROUP_LOOK_MIN_S, LOOP_POLL_S, POLL_MESSAGES, Ticket, logger
from ._pull_multiplexer import PullMultiplexer
from ._pull_schedule import COUNT_DEFAULT as PULL_COUNT_DEFAULT
from ._pull_schedule import (
    NEXT_DELAY_DEFAULT_MS,
    SCHEDULED_LOOK_S,
    PullSchedule,
    ScheduledPull,
    ScheduledRun,
)
from ._queue_listener import QueueListener, refuse_coroutines
from ._routes import Routes
from ._send_back import SentBack
from ._show_settings import show_settings
from ._steps import Driver
from ._types import PEER_TIMEOUT_S, Body, Delay, MessageQueue, QueueRange
from ._warnings import warn
from .errors import ClosedError, ProtomqError


@show_settings(ConsumerOptions, ConsumerSettings.__annotations__)
class PullConsumer(ConsumerBase):
    """Pulls messages from queues.

        with PullConsumer("my-group") as consumer:
            consumer.subscribe("flights", tags=["UA"])
            for message in consumer:
                print(message.key, message.body)

    Nothing is opened before the first use. In a forked child it goes on with connections of its own, but then two processes
    consume the same messages.

    - `namesrv`: host:port[;host:port], a URL that lists them, or a sequence of addresses; else PROTOMQ_NAMESRV_ADDR, else
      127.0.0.1:9876 and 127.0.0.1:10911 (a name server, a standalone).
    - `transport`, `client_id`, `peer_timeout_s` and `spin`: as in Producer; pulls never spin. `connection`: all of these in one object.
    - `listener`: a QueueListener, called when queues come and go.
    """

    def __init__(
        self,
        group: str = "",
        *,
        namesrv: str | Sequence[str] | None = None,
        transport: Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        spin: bool = True,
        connection: ConnectionOptions | None = None,
        listener: QueueListener | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        refuse_coroutines(listener)
        options = ConsumerOptions(group=group, **settings)
        connection = connection_of(
            connection, namesrv=namesrv, transport=transport, client_id=client_id, peer_timeout_s=peer_timeout_s, spin=spin,
        )  # fmt: skip
        self._hooks = HookPoints(group, options.hooks)
        self._transport = transport_with(connection, self._hooks)
        self._routes: Routes = Routes(self._transport, connection.namesrv)
        self._hooks.located_by(self._routes.last_known, self._transport.kind)
        self._transport.is_replaced = self._routes.is_replaced
        self._member: MemberThread | None = None
        if options.shares:
            state = self._membership_state(options, connection)
            self._member = MemberThread(state, self._transport, wakes(self), self._routes)
        super().__init__(options, listener, self._member)
        self._routes.looks_seldom = self._steps.looks_seldom
        self._run = Driver(self._transport, self._routes).run
        self._pulls: PullMultiplexer | None = None
        self._has_polled = False
        """In this process: what a forked child has of its parent is not the child's to commit."""
        self._lock = threading.RLock()
        self._polling_thread = 0
        """The one whose `poll` has not returned: a signal's handler that closes the consumer there says nothing of what it has taken."""
        self._start_hooks(connection)
        # A broadcasting consumer commits nothing, and must get what others get, too.
        if not options.broadcasting:
            opened(self, self._routes.name_servers)

    # -- what to consume -------------------------------------------------------------------------------------------------

    def subscribe(
        self,
        topic: str,
        tags: Iterable[str] = (),
        *,
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
    ) -> None:
        """Consumes all queues of a topic, also those that it gets later; `tags`: only messages with one of these ("*": all).

        `sql`, or `cel`: only messages for which this condition is true, in SQL92 ("delay > 30 AND TAGS = 'UA'") or CEL; the broker
        evaluates it (docs/filters.md). `module`: the name of a WebAssembly module that was deployed there (Admin.deploy_filter). For a
        wrong filter `poll` raises IllegalFilterError, which says what is wrong and where.

        Call it for several topics, or again for one to change the filter from here on. Call it again too after `poll` raised
        TopicNotFoundError or TopicRecreatedError. If brokers create topics on the first send, the consumer waits for a topic that does
        not exist yet. It gives a RuntimeWarning, since the name may be wrong. It also waits for a topic that may not be read now. Raises
        TopicNotFoundError, NoRouteError; ConfigurationError for one topic more than a member of a group may have, 256 (docs/groups.md).
        """
        with self._own_lock():
            self._check_open()
            check_topic(topic)
            checked = checked_tags(tags)
            wanted_filter = checked_filter(checked, sql, cel, module)
            routes = self._run(self._steps.subscribe(topic, checked, wanted_filter))
            for text in self._doubts(routes):
                warn(logger, text, 2)

    def unsubscribe(self, topic: str) -> None:
        """Ends a subscription. With `auto_commit`, commits the messages that are done."""
        check_topic(topic)
        with self._own_lock():
            self._check_open()
            self._run(self._steps.unsubscribe(topic))

    def assign(
        self,
        queues: Iterable[MessageQueue],
        tags: Iterable[str] = (),
        *,
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
    ) -> None:
        """Consumes exactly these queues; replaces the last assignment. A consumer either assigns or subscribes (ConfigurationError).

        The consumer waits for a topic that does not exist yet, as in `subscribe`, and for a broker that is away. Raises TopicNotFoundError,
        QueueNotFoundError.
        """
        wanted = checked_queues(queues)
        checked = checked_tags(tags)
        wanted_filter = checked_filter(checked, sql, cel, module)
        with self._own_lock():
            self._check_open()
            routes = self._run(self._steps.assign(wanted, checked, wanted_filter))
            for text in self._doubts(routes):
                warn(logger, text, 2)

    # -- messages --------------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float = 1.0, max_messages: int = POLL_MESSAGES) -> list[Message]:
        """Returns the next messages, at most `max_messages`. Waits for them up to `timeout_s`, then returns an empty list.

        Messages of one queue come in their order. `poll` itself retries what may pass: a server is away or busy, a topic may not be read
        now. It logs one warning when that begins and one when it ends. It raises errors that need your action: TopicNotFoundError (deleted
        while it was read), TopicRecreatedError, and QueueNotFoundError (of an assigned queue). Also CorruptLogError and the like,
        OffsetIllegalError (if asked for), and ClosedError; InvalidArgumentError where a broker does not take this member. It raises such
        an error again at every try until you have solved it; messages of other queues come in between.
        """
        check_count("max_messages", max_messages, 1)
        check_seconds("timeout_s", timeout_s, zero=True)
        return self._poll_for(timeout_s, max_messages)

    def _poll_for(
        self, timeout_s: float, max_messages: int, *, one_queue: bool = False, loop: Loop | None = None
    ) -> list[Message]:
        own_thread = threading.get_ident()
        try:
            if not self._hooks.receive:
                return self._poll_within(timeout_s, max_messages, one_queue, loop)
            context = self._hooks.before_receive()
            try:
                messages = self._poll_within(timeout_s, max_messages, one_queue, loop)
            except BaseException as error:
                self._hooks.after_receive(context, (), error)
                raise
            try:
                self._hooks.after_receive(context, messages)
            except BaseException:
                self._rewind()
                raise
            return messages
        finally:  # No call: what Ctrl-C interrupts here is lost.
            if self._polling_thread == own_thread:
                self._polling_thread = 0

    def _poll_within(self, timeout_s: float, max_messages: int, one_queue: bool, loop: Loop | None) -> list[Message]:
        deadline_s = time.monotonic() + timeout_s
        is_begun = False
        try:
            with self._own_lock():
                self._check_open()
                if self._is_newly_forked:
                    self._say_forked()
                self._check_something_to_poll()
                steps = self._steps
                steps.state.user_came_back(loop)
                is_begun, self._polling_thread = True, threading.get_ident()
                if self._handed is not None:
                    self._handed.came_back()
                if not steps.is_settled(self._routes.cached):
                    self._run(steps.before_poll())
                messages = self._poll(deadline_s, max_messages, one_queue)
                if self._handed is not None:
                    self._handed.gave(messages, loop)
                if loop is not None:
                    steps.state.loop_over(loop, messages)
                return messages
        except ProtomqError:
            raise
        except BaseException as error:
            if is_begun:
                self._rewind()
            if self._closed and not is_interrupt(error):
                return []  # A signal's handler has closed it half-way.
            raise

    def _rewind(self) -> None:
        """After Ctrl-C half-way, messages that were read but not returned must be pulled again."""
        with self._own_lock():
            self._close_pulls()
            self._state.rewind()

    def _poll(self, deadline_s: float, max_messages: int, one_queue: bool) -> list[Message]:
        wait_s = 0.0
        while True:
            self._exchange(wait_s)
            if not self._steps.group_due_in_s(time.monotonic()):
                self._run(self._steps.before_poll())
                self._send_due_now()
            messages = self._state.take(max_messages, one_queue=one_queue)
            if messages and self._hooks.filter:
                messages = self._hooks.kept(messages)
            if messages:
                return messages
            now_s = time.monotonic()
            if self._closed or now_s >= deadline_s:
                return []
            wait_s = min(
                deadline_s - now_s,
                self._state.next_due_in_s(now_s),
                max(self._steps.group_due_in_s(now_s), GROUP_LOOK_MIN_S),
            )

    def __iter__(self) -> Iterator[Message]:
        """Messages without end, one by one; ends when the consumer is closed. What was not handed on when the loop is left comes again.

        A message is done when the next one is asked for. A `commit` in the loop, and a `close`, count the one that the loop is at. Another
        loop that goes on does not, nor does a `with` that an exception ends.
        What the loop has polled already comes before `seek`, `pause` and `unsubscribe` show. With `lock_queues`, nothing comes of queues
        whose locks are not certainly this member's.
        """
        loop = Loop()
        try:
            while not self._closed:
                try:
                    self._poll_for(LOOP_POLL_S, POLL_MESSAGES, loop=loop)
                except ClosedError:
                    return
                if self._steps.locks is None:
                    yield from loop.left
                    continue
                while self._steps.may_hand_on(loop):
                    yield from itertools.islice(loop.left, 1)
                with self._own_lock():
                    self._state.give_back(loop.take_unseen())
        finally:
            loop.is_over = True

    def run_scheduled(
        self,
        pull: ScheduledPull,
        *,
        next_delay_ms: int = NEXT_DELAY_DEFAULT_MS,
        max_messages: int = PULL_COUNT_DEFAULT,
    ) -> None:
        """Calls `pull(queue, messages)` with up to `max_messages` of one queue at a time, until somebody calls `close`; `pull` may do so.

        `pull` returns in how many milliseconds its queue is due again (0 to 40 days), or None for `next_delay_ms`; other queues go on. A
        queue that comes from another member is due at once. If `pull` raises, the error is logged, and it gets the same messages again
        after 1 s. When it returns, its messages are done, and are committed as after a `poll`. Calls come one after another, on this
        thread. Raises what `poll` raises.

        A `close` while `pull` runs waits for its end, `request_timeout_s` at most, and then counts its messages as not done. One that
        `pull` makes, or a signal's handler on its thread, takes effect when `pull` has ended.
        """
        check_count("max_messages", max_messages, 1)
        schedule = PullSchedule(pull, next_delay_ms, may_wait=False)
        run = self._scheduled = ScheduledRun(threading.get_ident())
        try:
            while not self._closed and run.close_commit is None:
                now_s = time.monotonic()
                with self._own_lock():
                    self._state.hold_back(schedule.not_due(self._state.queues, now_s), now_s)
                messages: list[Message] = []
                try:
                    messages = self._poll_for(schedule.next_due_in_s(now_s), max_messages, one_queue=True)
                    if messages:
                        self._pull_scheduled(schedule, pull, messages)
                except ProtomqError:
                    raise
                except BaseException:
                    self._give_back(messages)
                    raise
        except ClosedError:
            if not self._closed:
                raise
        finally:
            if self._scheduled is run:
                self._scheduled = None
            with self._own_lock():
                self._state.hold_back((), time.monotonic())
            if run.close_commit is not None:
                self.close(commit=run.close_commit)

    def _pull_scheduled(self, schedule: PullSchedule, pull: ScheduledPull, messages: list[Message]) -> None:
        queue = messages[0].queue
        try:
            schedule.pulled(queue, pull(queue, messages), time.monotonic())
        except Exception as error:
            schedule.failed(queue, error, time.monotonic())
            self._give_back(messages)

    def _give_back(self, messages: Sequence[Message]) -> None:
        with self._own_lock():
            self._state.give_back(messages)

    def wakeup(self) -> None:
        """Wakes a `poll` that waits in another thread. It goes on waiting unless the consumer is closed."""
        pulls = self._pulls
        if pulls is not None:
            pulls.wake()

    def reply(
        self,
        message: Message,
        body: Body = b"",
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Replies to a message that was sent by `request`; returns when its caller has the reply.

        Raises CallerGoneError if nobody waits for it any more: drop it. RequestTimeoutError if the time is over, and the caller may still
        come back: try again. ConfigurationError if the message asks for no reply. `timeout_s`: None for 15 s, or the request time-out if
        that is longer.
        """
        self._check_open()
        self._run(self._reply_steps(message, body, properties, timeout_s))

    # -- what failed -----------------------------------------------------------------------------------------------------

    def send_back(
        self,
        messages: Message | Iterable[Message],
        *,
        error: str | BaseException = "",
        delay: Delay | None = None,
        dead_letter: bool = False,
    ) -> list[SentBack]:
        """Sends back messages that could not be processed: the group gets them again after a delay, from %RETRY%group.

        Once the retries of the group's settings are spent (16 by default, `Admin.set_group`), they become dead letters, in %DLQ%group.
        `error`: why they failed. `delay`: when to try again (a timedelta, seconds or a DelayLevel; None: as the settings say).
        `dead_letter`: do not try again. Returns the outcome of each message. A message that was sent back is done: commit its offset.

        After an error the messages of other brokers, or those behind the first 256, may have been sent back or not: they may come twice.
        """
        self._check_open()
        return self._run(self._send_back_steps(messages, error, delay, dead_letter))

    def subscribe_retries(self) -> None:
        """Consumes the group's retry topic, too, at all brokers of the topics that it consumes now. `send_back` fills that topic.

        Call it again after another `subscribe`.
        """
        self._check_open()
        self.subscribe(self._run(self._retry_topic_steps()))

    # -- pauses ----------------------------------------------------------------------------------------------------------

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Makes `poll` return nothing from these queues until `resume`. They stay this member's queues, and one answer of each waits in
        memory.

        A queue that goes to another member and comes back is not paused. Raises ConfigurationError if a queue is not assigned; then it
        pauses none.
        """
        wanted = checked_queues(queues)
        with self._own_lock():
            self._check_open()
            self._state.pause(wanted)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Goes on with paused queues where they stopped. The next `poll` asks first whether the group's offset was reset meanwhile.

        Raises ConfigurationError if a queue is not assigned.
        """
        wanted = checked_queues(queues)
        with self._own_lock():
            self._check_open()
            self._state.pause(wanted, is_paused=False)
        self.wakeup()

    # -- positions and offsets -------------------------------------------------------------------------------------------

    def position(self, queue: MessageQueue) -> int:
        """Offset of the next message that `poll` returns for the queue."""
        check_message_queue(queue)
        with self._own_lock():
            self._check_open()
            return self._run(self._steps.position(queue))

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """Makes `poll` go on in the queue at this offset.

        It asks no broker: if the offset is outside the queue, the next `poll` does what `offset_reset` says.
        """
        check_message_queue(queue)
        with self._own_lock():
            self._check_open()
            self._state.seek(queue, queue_offset)

    def seek_to_time(self, when: datetime, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes to the first message stored at the time (with a time zone) or later; in all queues where `queues` is None."""
        check_past("when", when, "call seek_to_end()")
        wanted = None if queues is None else checked_queues(queues)
        with self._own_lock():
            self._check_open()
            self._run(self._steps.seek_to_time(when, wanted))

    def seek_to_begin(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes to the first message that is stored."""
        self._seek_to_range_end(queues, 0)

    def seek_to_end(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes behind the last message."""
        self._seek_to_range_end(queues, 1)

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Stores offsets for the group; without an argument the positions, including what the last `poll` returned. In a loop over the
        consumer, that is up to the message that the loop is at.

        It asks every broker, with retries, and then raises the error of a call that failed; the error's notes say which calls failed. If a
        broker has lost a queue, the other queues are still committed: QueueNotFoundError names those that are not. So does
        QueueNotOwnedError for queues of a subscription that are another member's.
        """
        self._check_group()
        checked = None if offsets is None else checked_offsets(offsets)
        with self._own_lock():
            self._check_open()
            self._run(self._steps.commit(checked))

    def committed(self, queue: MessageQueue) -> int | None:
        """The offset that the group has committed at the broker; None: none.

        While the master is away, its slave answers, which may not have the last commits: a warning in the log says so.
        """
        self._check_group()
        check_message_queue(queue)
        self._check_open()
        return self._run(self._steps.committed(queue))

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that can be read. Raises TopicNotFoundError if neither name server nor brokers know it."""
        check_topic(topic)
        self._check_open()
        return self._run(self._steps.queues(topic))

    def queue_range(self, queue: MessageQueue) -> QueueRange:
        """The offsets that can be read: (min_offset, end_offset), half-open."""
        check_message_queue(queue)
        self._check_open()
        return self._run(self._steps.queue_range(queue))

    def min_offset(self, queue: MessageQueue) -> int:
        """Offset of the first message that is stored."""
        return self.queue_range(queue).min_offset

    def end_offset(self, queue: MessageQueue) -> int:
        """One past the offset of the last message (RocketMQ: maxOffset)."""
        return self.queue_range(queue).end_offset

    def offset_for_time(self, queue: MessageQueue, when: datetime) -> int:
        """Offset of the first message stored at the time (with a time zone) or later; the end offset if there is none."""
        check_message_queue(queue)
        check_time("when", when)
        self._check_open()
        return self._run(self._steps.offset_for_time(queue, when))

    @property
    def transport(self) -> str:
        """The transport of the pulls: "remoting", "grpc", both with a comma if brokers differ, or "" before the first call."""
        return ",".join(
            sorted({kind for kind in map(self._transport.kind, self._addresses()) if kind})
        )

    # -- end -------------------------------------------------------------------------------------------------------------

    def close(self, *, commit: bool = True) -> None:
        """Commits (if that is on, and unless `commit` is False) and closes all connections. May be called twice.

        Brokers that do not take their commits are waited for, all together for the request time-out, each 0.5 s at least. If one fails, a
        RuntimeWarning says that messages will come again; the log names the broker.
        """
        if text := self._shut(commit):
            warn(logger, text, 2)

    def _shut(self, commit: bool) -> str:
        """Closes everything. Returns the warning about the last commit; "" if there is none."""
        self._own_lock()  # A child that was forked forgets what its parent's threads were at.
        scheduled, own_thread = self._scheduled, threading.get_ident()
        if scheduled is not None and scheduled.owner == own_thread != self._polling_thread:
            # What it has handed out is done if `pull` returns, and not if it raises.
            scheduled.close_commit = commit
            return ""
        is_first = not self._closed or self._was_cut_off
        self._was_cut_off, self._closed = False, True
        closed(self)
        try:
            self.wakeup()
            has_ended = self._wait_for_scheduled(scheduled)
            with self._own_lock():
                self._state.end_loops()
                if commit and has_ended and self._polling_thread != own_thread:
                    self._state.user_came_back()
                if is_first:
                    self._run(self._goodbye())
                return self._leave(commit, is_first=is_first)
        except BaseException:
            self._was_cut_off = True
            self._leave_in_a_hurry(commit, is_first=is_first)
            self._was_cut_off = False
            raise

    def _wait_for_scheduled(self, scheduled: ScheduledRun | None) -> bool:
        """Waits until another thread's `run_scheduled` has ended; whether it has, so that it is known what is done."""
        if scheduled is None or scheduled.owner == threading.get_ident():
            return True
        give_up_s = time.monotonic() + self.options.request_timeout_s
        # No lock: a signal's handler may close, and close again.
        while self._scheduled is scheduled:
            if time.monotonic() >= give_up_s:
                return False
            time.sleep(SCHEDULED_LOOK_S)
        return True

    def close_in_a_hurry(self) -> None:
        """As an interrupted `close` does; for whoever was interrupted before."""
        is_first = not self._closed or self._was_cut_off
        self._was_cut_off, self._closed = True, True
        closed(self)
        self.wakeup()
        self._leave_in_a_hurry(True, is_first=is_first)
        self._was_cut_off = False

    def _leave_in_a_hurry(self, commit: bool, *, is_first: bool) -> None:
        """After Ctrl-C, or an alarm: nobody may call `close` again, and others wait for the queues."""
        lock, commits_until_s = self._own_lock(), time.monotonic() + HURRY_S / 2
        # A thread that polls may have it, with a listener that does not return.
        if not lock.acquire(timeout=HURRY_S / 2):
            if self._member is not None:
                self._member.abandon()
            return
        try:
            self._leave(commit, is_first=is_first, commits_until_s=commits_until_s)
        finally:
            lock.release()

    def _leave(self, commit: bool, *, is_first: bool, commits_until_s: float = float("inf")) -> str:
        """All but the goodbye. May be called again where it was cut off."""
        text = ""
        if self._auto_commits and self._has_polled:
            error = self._run(self._steps.commit_last("on close", commits_until_s))
            if error is not None and (count := self._state.uncommitted_count()):
                text = not_taken_text(self, count, error)
        self._auto_commits = False
        if self._member is not None and is_first:
            # Nothing must be pulled for a group that somebody deletes now.
            self._close_pulls()
            self._member.leave(self._state.member_name())
        self._close_pulls()
        self._transport.close()
        if self._handed is not None:
            self._handed.ended(None if commit else NOT_DEALT_WITH)
        if self._tracer is not None:
            self._tracer.close()
        return text

    def __enter__(self) -> PullConsumer:
        self._check_open()
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        # After an exception the program may not have finished its last batch, or the message that its loop is at: those come again.
        if text := self._shut(exception_type is None):
            warn(logger, text, 2)

    def finish_at_exit(self, timeout_s: float) -> int:
        """Commits finished messages when the interpreter ends. Returns the queues of which more was handed out. The SDK calls it."""
        ends_s = time.monotonic() + timeout_s
        if self._closed or not self._auto_commits or self._pid != os.getpid():
            return 0
        self._closed = True
        self.wakeup()
        # A thread that is no user of ours any more may have it.
        if self._lock.acquire(timeout=timeout_s):
            self._run(self._steps.commit_last("at exit", ends_s))
        return self._state.uncommitted_count()

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        self.wakeup()

    def _own_lock(self) -> threading.RLock:
        """Returns the lock. A forked child gets a new one, and drops its parent's connections."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
            self._is_newly_forked, self._has_polled = True, False
            if self._scheduled is not None and self._scheduled.owner != threading.get_ident():
                self._scheduled = None
            if self._pulls is not None:
                self._pulls.abandon()
                self._pulls = None
            self._state.restart()
            if self._member is not None:
                self._member.after_fork()
                self._member.state.restart()
        return self._lock

    def _say_forked(self) -> None:
        self._is_newly_forked = False
        logger.warning(
            "the consumer of group %s was made before this process was forked: parent and child are two consumers now, and may get the "
            "same messages. Make consumers after the fork",
            self.group,
        )

    def _close_pulls(self) -> None:
        if self._pulls is not None:
            self._pulls.close()
            self._pulls = None

    def _exchange(self, wait_s: float) -> None:
        """Sends the pulls that are due, and takes the answers that have come or come within `wait_s`."""
        pulls = self._pulls
        if pulls is None:
            self._has_polled = True
            pulls = self._pulls = multiplexer_with(self._transport)
        steps = self._steps
        self._send_due(pulls)
        if steps.trouble is not None:
            steps.raise_trouble()
        outcomes = pulls.wait(wait_s, steps.state.room_bytes(time.monotonic()))
        for ticket, result in outcomes:
            if isinstance(result, bytes):
                steps.take_answer(ticket, result)
            else:
                self._run(steps.take_error(ticket, result))
        if outcomes:
            if steps.trouble is not None:
                steps.raise_trouble()
            self._send_due(pulls)

    def _send_due_now(self) -> None:
        if self._pulls is not None:
            self._send_due(self._pulls)

    def _send_due(self, pulls: PullMultiplexer) -> None:
        state = self._state
        now_s = time.monotonic()
        for queue in state.due(now_s):
            ticket = state.begin(queue, now_s)
            address = self._known_address(queue) or self._run(self._steps.address_for(ticket))
            if address is not None:
                long_hold = self._long_hold if state.may_rest(queue) else None
                pulls.send(address, ticket, state.encode_request(ticket), self.options.pull_timeout_s, long_hold)

    def _give_up_pull(self, ticket: Ticket) -> None:
        if self._pulls is not None:
            self._pulls.give_up(ticket)

    def _seek_to_range_end(self, queues: Iterable[MessageQueue] | None, which: int) -> None:
        wanted = None if queues is None else checked_queues(queues)
        with self._own_lock():
            self._check_open()
            self._run(self._steps.seek_to_end_of_range(which, wanted))
