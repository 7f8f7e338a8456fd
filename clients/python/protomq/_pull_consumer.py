"""PullConsumer: messages of chosen queues, at the user's pace, from one thread or several.

Rules:
- No thread of its own: pulls are in flight while the user works, their answers wait in the kernel, and `poll` reads them.
- Delivery is at least once. With a consumer group, positions are committed every 5 s inside `poll` and on `close`; a batch
  counts as dealt with when `poll` is called again (or the `with` block ends without an exception).
- Any thread may call everything; calls wait for each other, except `close` and `wakeup`, which end a `poll` at once.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, Literal

from . import _methods
from ._checks import (
    check_count,
    check_flag,
    check_group,
    check_message_queue,
    check_seconds,
    check_time,
    check_topic,
    explain_unknown_settings,
)
from ._filters import MessageFilter, checked_filter
from ._message import Message
from ._offset_calls import (
    Begin,
    CommitErrors,
    broker_of,
    by_broker,
    check_begin,
    check_queues_exist,
    checked_offsets,
    checked_queues,
    checked_tags,
    combined,
    decode_offsets,
    decode_offsets_incarnation,
    decode_queue_ranges,
    decode_range_incarnation,
    decode_search_incarnation,
    decode_search_offset,
    doubtful_topics,
    encode_commit,
    encode_get_offsets,
    encode_get_queue_range,
    encode_search_offset,
    first_offsets,
    missing_queues,
    subscribed_queues,
    unknown_topic,
    without_gone_queues,
)
from ._open_consumers import (
    closed,
    not_taken_text,
    opened,
    share_s,
    shared_queue,
    shared_queue_text,
    uncommitted_text,
)
from ._outages import Outages
from ._pull_logic import POLL_MESSAGES, OffsetReset, PullOptions, PullState, Ticket
from ._pull_multiplexer import PullMultiplexer
from ._routes import Routes
from ._transport import SyncTransport
from ._transport_options import TransportOptions
from ._types import PEER_TIMEOUT_S, BrokerAddress, MessageQueue, MethodInfo, QueueRange, Route
from ._warnings import warn
from .errors import (
    ClosedError,
    ConfigurationError,
    NoRouteError,
    ProtomqError,
    QueueNotFoundError,
    TopicNotFoundError,
    TransportError,
)

logger = logging.getLogger("protomq")

AUTO_COMMIT_INTERVAL_S: Final = 5.0
"""RocketMQ's persistConsumerOffsetInterval."""
REQUEST_TIMEOUT_S: Final = 3.0
POLL_CALL_TIMEOUT_S: Final = 0.5
"""For the calls that `poll` makes besides pulling: a broker that is gone must not hold up the queues of the others."""
RETRY_RESOLVE_S: Final = 2.0
PULL_TIMEOUT_EXTRA_S: Final = 5.0
"""What a pull may take beyond its hold: a cold disk, a slow network."""
CALL_ATTEMPTS: Final = 3
LAST_COMMIT_ATTEMPTS: Final = 2
"""Nothing makes up for it: a broker that came back since the last call has closed the connection, and answers on a new one."""


class PullConsumer:
    """Pulls messages from queues.

        with PullConsumer("my-group") as consumer:
            consumer.subscribe("flights", tags=["UA"])
            for message in consumer:
                print(message.key, message.body)

    Nothing is opened before the first use. In a forked child it goes on with connections of its own, but then two processes
    consume the same messages.
    """

    @explain_unknown_settings
    def __init__(
        self,
        group: str = "",
        *,
        namesrv: str | Sequence[str] | None = None,
        begin: Begin = "earliest",
        resume: bool = True,
        auto_commit: bool = True,
        auto_commit_interval_s: float = AUTO_COMMIT_INTERVAL_S,
        offset_reset: OffsetReset = "nearest",
        hold_ms: int = 15_000,
        pull_record_count_max: int = 32_768,
        pull_size_max_bytes: int = 4 << 20,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        transport: Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        spin: bool = True,
    ) -> None:
        """Makes a consumer; raises ConfigurationError.

        `group`: whose offsets are committed; without one, nothing is. `namesrv`: host:port[;host:port], a URL
        that lists them, or a sequence of addresses; else PROTOMQ_NAMESRV_ADDR, else
        127.0.0.1:9876 and 127.0.0.1:10911 (a name server, a standalone). `begin`: where a queue
        without a committed offset begins. `resume=False`: begin there even if there is one. `offset_reset`: what to do when
        the position is outside the queue (its messages expired): go to the "nearest" valid offset, "earliest", "latest", or
        raise an "error". `hold_ms`: how long a broker holds a pull of an empty queue. `pull_record_count_max` and
        `pull_size_max_bytes` bound one answer. Over the remoting port no more is read while 8 MiB wait to be handed out; over
        gRPC up to two answers per queue are in memory. `client_id`, `peer_timeout_s` and `spin`: as in Producer; pulls never spin.
        """
        check_begin(begin)
        check_seconds("auto_commit_interval_s", auto_commit_interval_s)
        check_seconds("request_timeout_s", request_timeout_s)
        check_flag("resume", resume)
        check_flag("auto_commit", auto_commit)
        self.group = check_group(group)
        options = PullOptions(
            group, hold_ms, pull_record_count_max, pull_size_max_bytes, offset_reset
        )
        self._begin = begin
        self._resume = resume and bool(group)
        self._auto_commit = auto_commit and bool(group)
        self._auto_commit_interval_s = auto_commit_interval_s
        self._request_timeout_s = request_timeout_s
        self._pull_timeout_s = hold_ms / 1000 + PULL_TIMEOUT_EXTRA_S

        self._transport = SyncTransport(
            TransportOptions(
                transport, client_id=client_id, peer_timeout_s=peer_timeout_s, spin=spin
            )
        )
        self._routes = Routes(self._transport, namesrv)
        self._state = PullState(options)
        self._outages = Outages()
        self._subscriptions: dict[str, Route] = {}
        self._tags: dict[str, tuple[str, ...]] = {}
        self._filters: dict[str, MessageFilter] = {}
        self._assigned: tuple[MessageQueue, ...] = ()
        self._pulls: PullMultiplexer | None = None
        self._next_commit_s = time.monotonic() + auto_commit_interval_s
        self._retry_resolve_s = 0.0
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._exists: dict[str, bool] = {}
        """What brokers say of topics: a name server may not know yet of one that was made a moment ago."""
        self._warned_topics: set[str] = set()
        self._warned_of_member = False
        self._commit_troubles: set[str] = set()
        """Reasons of brokers that refused the last commit."""
        self._closed = False
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

        `sql`, or `cel`: only messages of which this condition is true, in SQL92 ("delay > 30 AND TAGS = 'UA'") or CEL; the broker evaluates
        it (docs/filters.md). `module`: the name of a WebAssembly module that was deployed there (Admin.deploy_filter). What is wrong with
        it, and where, `poll` raises as IllegalFilterError.

        May be called for several topics, and again for one: to change what is wanted from here on, or to begin anew with a topic that was
        deleted or made again (`poll` raises TopicNotFoundError or TopicRecreatedError then). A topic that does not exist yet, where
        brokers create topics on the first send, is waited for, with a RuntimeWarning: the name may be wrong. So is one that may not be
        read now. Raises TopicNotFoundError, NoRouteError.
        """
        with self._own_lock():
            self._check_open()
            check_topic(topic)
            checked = checked_tags(tags)
            wanted_filter = checked_filter(checked, sql, cel, module)
            route = self._routes.get(topic, self._request_timeout_s)
            self._tags[topic], self._filters[topic] = checked, wanted_filter
            self._subscriptions[topic] = route
            self._forget_gone([topic])
            self._reassign()
            for text in self._doubts(route):
                warn(logger, text, 2)

    def unsubscribe(self, topic: str) -> None:
        """Ends a subscription; nothing is committed by it."""
        check_topic(topic)
        with self._own_lock():
            self._check_open()
            self._subscriptions.pop(topic, None)
            self._reassign()

    def assign(
        self,
        queues: Iterable[MessageQueue],
        tags: Iterable[str] = (),
        *,
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
    ) -> None:
        """Consumes exactly these queues, beside subscribed topics; replaces the last assignment.

        A topic that does not exist yet is waited for as in `subscribe`, a broker that is away as well. Raises TopicNotFoundError,
        QueueNotFoundError.
        """
        wanted = checked_queues(queues)
        checked = checked_tags(tags)
        wanted_filter = checked_filter(checked, sql, cel, module)
        with self._own_lock():
            self._check_open()
            routes = self._routes_of(wanted)
            self._assigned = wanted
            for queue in self._assigned:
                self._tags[queue.topic], self._filters[queue.topic] = checked, wanted_filter
            self._forget_gone(queue.topic for queue in wanted)
            self._reassign()
            for text in self._doubts(*routes):
                warn(logger, text, 2)

    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues being consumed."""
        return self._state.queues

    # -- messages --------------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float = 1.0, max_messages: int = POLL_MESSAGES) -> list[Message]:
        """The next messages, at most `max_messages`; waits for them for up to `timeout_s`, then returns an empty list.

        Messages of one queue come in their order. What may pass is tried again inside, and told by one warning in the log when it begins
        and one when it is over: a server that is away or busy, a topic that may not be read now. Raised is what needs somebody:
        TopicNotFoundError (deleted while it was read), TopicRecreatedError, QueueNotFoundError (of an assigned queue), CorruptLogError and
        the like, OffsetIllegalError (if asked for), ClosedError. It is raised again with every try until you have seen to it; the messages
        of other queues come in between.
        """
        check_count("max_messages", max_messages, 1)
        check_seconds("timeout_s", timeout_s, zero=True)
        deadline_s = time.monotonic() + timeout_s
        with self._own_lock():
            self._check_open()
            if not self._subscriptions and not self._assigned:
                raise ConfigurationError(
                    "nothing to poll: subscribe to a topic or assign queues first"
                )
            state = self._state
            state.user_came_back()
            now_s = time.monotonic()
            if self._auto_commit and now_s >= self._next_commit_s:
                self._next_commit_s = now_s + self._auto_commit_interval_s
                self._commit_now("in poll", POLL_CALL_TIMEOUT_S)
            self._follow_routes(now_s)
            try:
                return self._poll(deadline_s, max_messages)
            except ProtomqError:
                raise
            except (
                BaseException
            ):  # Ctrl-C, half-way: what was read, but not handed out, is pulled again.
                self._close_pulls()
                state.rewind()
                raise

    def _poll(self, deadline_s: float, max_messages: int) -> list[Message]:
        wait_s = 0.0
        while True:
            self._exchange(wait_s)
            messages = self._state.take(max_messages)
            if messages:
                return messages
            now_s = time.monotonic()
            if self._closed or now_s >= deadline_s:
                return []
            wait_s = min(deadline_s - now_s, self._state.next_due_in_s(now_s))

    def __iter__(self) -> Iterator[Message]:
        """Messages without end, one by one; ends when the consumer is closed. Those of a batch that are left when the loop
        is left come again."""
        while not self._closed:
            try:
                messages = self.poll()
            except ClosedError:
                return
            for i, message in enumerate(messages):
                try:
                    yield message
                except GeneratorExit:
                    with self._own_lock():
                        self._state.give_back(messages[i + 1 :])
                    raise

    def wakeup(self) -> None:
        """Makes a `poll` that waits in another thread look around; it goes on waiting unless the consumer is closed."""
        pulls = self._pulls
        if pulls is not None:
            pulls.wake()

    # -- positions and offsets -------------------------------------------------------------------------------------------

    def position(self, queue: MessageQueue) -> int:
        """Offset of the next message that `poll` returns for the queue."""
        check_message_queue(queue)
        with self._own_lock():
            self._check_open()
            position = self._state.position(queue)
            if position is None:
                timeout_s = self._request_timeout_s
                self._resolve(
                    queue.topic, queue.broker_name, [queue], self._begin, timeout_s, CALL_ATTEMPTS
                )
                position = self._state.position(queue)
            assert position is not None
            return position

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """The next message of the queue is the one at this offset.

        No broker is asked: where the offset is outside the queue, the next `poll` does as `offset_reset` says.
        """
        check_message_queue(queue)
        with self._own_lock():
            self._check_open()
            self._state.seek(queue, queue_offset)

    def seek_to_time(self, when: datetime, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes to the first message stored at the time (with a time zone) or later; in all queues where `queues` is None."""
        check_time("when", when)
        wanted = None if queues is None else checked_queues(queues)
        with self._own_lock():
            self._check_open()
            for queue in self._state.queues if wanted is None else wanted:
                self._state.seek(queue, self.offset_for_time(queue, when))

    def seek_to_begin(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes to the first message that is stored."""
        self._seek_to_range_end(queues, 0)

    def seek_to_end(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes behind the last message."""
        self._seek_to_range_end(queues, 1)

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Stores offsets for the group; without an argument the positions, including what the last `poll` returned.

        Raises what the call to a broker raises, after retries, and after every broker was asked; notes of the error tell which failed.
        A queue that its broker has no more keeps no other from being committed: QueueNotFoundError names those that are not.
        """
        self._check_group()
        checked = None if offsets is None else checked_offsets(offsets)
        with self._own_lock():
            self._check_open()
            if checked is None:
                self._state.user_came_back()
                checked = self._state.to_commit(safe_only=True)
            errors = self._commit(checked, self._request_timeout_s, CALL_ATTEMPTS)
        if errors:
            raise combined(errors)

    def committed(self, queue: MessageQueue) -> int | None:
        """The offset that the group has committed at the broker; None: none."""
        self._check_group()
        check_message_queue(queue)
        self._check_open()
        request = encode_get_offsets(self.group, queue.topic, [queue.queue_id])
        answer = self._call(queue.topic, queue.broker_name, _methods.GET_OFFSETS, request)
        return decode_offsets(answer).get(queue.queue_id)

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that can be read. Raises TopicNotFoundError if neither name server nor brokers know it."""
        check_topic(topic)
        self._check_open()
        route = self._routes.get(topic, self._request_timeout_s)
        if not route.auto_create:
            return route.read_queues
        # It may have been made a moment ago: brokers know that first.
        found: list[MessageQueue] = []
        request = encode_get_queue_range(topic, ())
        for broker_name in route.brokers:
            try:
                answer = self._call(
                    topic, broker_name, _methods.GET_QUEUE_RANGE, request, attempts=1
                )
            except TopicNotFoundError:
                continue
            ids = sorted(decode_queue_ranges(answer))
            found.extend(MessageQueue(topic, broker_name, queue_id) for queue_id in ids)
        if not found:
            raise unknown_topic(topic)
        return tuple(found)

    def queue_range(self, queue: MessageQueue) -> QueueRange:
        """The offsets that can be read: (min_offset, end_offset), half-open."""
        check_message_queue(queue)
        self._check_open()
        request = encode_get_queue_range(queue.topic, [queue.queue_id])
        answer = self._call(queue.topic, queue.broker_name, _methods.GET_QUEUE_RANGE, request)
        return decode_queue_ranges(answer)[queue.queue_id]

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
        request = encode_search_offset(queue, when)
        answer = self._call(queue.topic, queue.broker_name, _methods.SEARCH_OFFSET, request)
        return decode_search_offset(answer)

    @property
    def transport(self) -> str:
        """What carries the pulls: "remoting", "grpc", both with a comma where brokers differ, or "" before the first call."""
        return ",".join(
            sorted({kind for kind in map(self._transport.kind, self._addresses()) if kind})
        )

    # -- end -------------------------------------------------------------------------------------------------------------

    def close(self, *, commit: bool = True) -> None:
        """Commits (if that is on, and unless `commit` is False) and closes all connections. May be called twice.

        Each broker has the request time-out for it. A RuntimeWarning tells that messages will come again because one did not take
        its offsets; the log tells which.
        """
        if text := self._shut(commit):
            warn(logger, text, 2)

    def _shut(self, commit: bool) -> str:
        """Closes everything; what is to be told of the last commit."""
        text = ""
        self._closed = True
        closed(self)
        self.wakeup()
        with self._own_lock():
            if commit:
                self._state.user_came_back()
            if self._auto_commit and self._pulls is not None:
                error = self._commit_now("on close", self._request_timeout_s, is_last=True)
                if error is not None and (count := self._state.uncommitted_count()):
                    text = not_taken_text(self.group, count, error)
            self._auto_commit = False
            self._close_pulls()
            self._transport.close()
        return text

    def __enter__(self) -> PullConsumer:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        # After an exception the last batch may not have been dealt with: it is not committed, and comes again.
        if text := self._shut(exception_type is None):
            warn(logger, text, 2)

    def finish_at_exit(self, timeout_s: float) -> int:
        """When the interpreter ends: commits what has been dealt with. The queues of which more was handed out. Called by itself."""
        ends_s = time.monotonic() + timeout_s
        if self._closed or not self._auto_commit or self._pid != os.getpid():
            return 0
        self._closed = True
        self.wakeup()
        # A thread that is no user of ours any more may have it.
        if self._lock.acquire(timeout=timeout_s):
            self._commit_now("at exit", self._request_timeout_s, ends_s=ends_s, is_last=True)
        return self._state.uncommitted_count()

    def __del__(self) -> None:
        # Nobody has it any more, and nobody closed it: too late for a call to a broker, for this may run anywhere.
        if getattr(self, "_closed", True) or not self._auto_commit or self._pid != os.getpid():
            return
        if count := self._state.uncommitted_count():
            warn(logger, uncommitted_text(self.group, count, "nobody used it any more"))

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _own_lock(self) -> threading.RLock:
        """The lock; a forked child starts with one of its own, without its parent's connections."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
            if self._pulls is not None:
                self._pulls.abandon()
                self._pulls = None
            self._state.restart()
        return self._lock

    def _close_pulls(self) -> None:
        if self._pulls is not None:
            self._pulls.close()
            self._pulls = None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed")

    def _check_group(self) -> None:
        if not self.group:
            raise ConfigurationError("a consumer without a group commits nothing")

    def _routes_of(self, queues: Sequence[MessageQueue]) -> list[Route]:
        """The routes of the topics of queues that are to be assigned. Raises QueueNotFoundError where one is not there."""
        routes: list[Route] = []
        for topic in dict.fromkeys(queue.topic for queue in queues):
            try:
                route = self._routes.get(topic, self._request_timeout_s)
                if missing_queues(route, queues):  # It may have more since the last look-up.
                    self._routes.invalidate(topic)
                    route = self._routes.get(topic, self._request_timeout_s)
            except NoRouteError:
                continue  # No name server answers: `poll` goes on trying.
            check_queues_exist(route, queues)
            routes.append(route)
        return routes

    def _doubts(self, *routes: Route) -> list[str]:
        """What the user may not have meant; each is told once."""
        found = doubtful_topics(routes, self._exists, self._warned_topics)
        queue = None if self._warned_of_member else shared_queue(self)
        if queue is not None:
            self._warned_of_member = True
            self._state.warned_of_other()
            found.append(shared_queue_text(self.group, queue))
        return found

    def _forget_gone(self, topics: Iterable[str]) -> None:
        """What is known of topics that were deleted is known no more: they are begun anew."""
        names = set(topics)
        self._state.forget_gone(names)
        for topic in names:
            self._exists.pop(topic, None)

    def _reassign(self) -> None:
        """Brings the queues in line with what the user asked for."""
        queues = subscribed_queues(self._assigned, self._subscriptions)
        added = self._state.assign(queues, self._tags, self._filters)
        self._resolve_or_later(added, self._begin, self._request_timeout_s, CALL_ATTEMPTS)

    def _follow_routes(self, now_s: float) -> None:
        """Takes up queues that a subscribed topic got meanwhile: those that are new from their first message on."""
        for topic, last in self._subscriptions.items():
            try:
                route = self._routes.current(topic, self._request_timeout_s)
            except ProtomqError:
                continue  # The pulls will tell.
            if route is not last:
                self._subscriptions[topic] = route
                self._outages.queues_changed(topic, len(route.read_queues))
                queues = subscribed_queues(self._assigned, self._subscriptions)
                added = self._state.assign(queues, self._tags, self._filters, park=True)
                begin: Begin = "earliest" if last.read_queues else self._begin
                self._resolve_or_later(added, begin, POLL_CALL_TIMEOUT_S, 1)
                return  # The others: next time.
        if now_s >= self._retry_resolve_s:
            self._retry_resolve_s = now_s + RETRY_RESOLVE_S
            self._resolve_or_later(self._state.unresolved(), self._begin, POLL_CALL_TIMEOUT_S, 1)

    def _resolve_or_later(
        self, queues: Iterable[MessageQueue], begin: Begin, timeout_s: float, attempts: int
    ) -> None:
        """Finds out where to begin; a broker that does not answer is asked again in a later `poll`."""
        for (topic, broker_name), members in by_broker(queues).items():
            try:
                is_there = self._resolve(
                    topic, broker_name, members, begin, timeout_s, attempts
                )
            except ProtomqError as error:
                if not error.retriable:
                    raise
                self._outages.failed(f"broker {broker_name}", topic, error)
            else:
                if is_there:
                    self._outages.answered(f"broker {broker_name}", topic)

    def _resolve(
        self,
        topic: str,
        broker_name: str,
        queues: Sequence[MessageQueue],
        begin: Begin,
        timeout_s: float,
        attempts: int,
    ) -> bool:
        """Finds out where to begin in queues of one broker; whether it has the topic and the queues."""
        committed: dict[int, int] = {}
        starts: dict[MessageQueue, int] = {}
        incarnation = 0
        try:
            if self._resume:
                request = encode_get_offsets(
                    self.group, topic, [queue.queue_id for queue in queues]
                )
                answer = self._call(
                    topic, broker_name, _methods.GET_OFFSETS, request, timeout_s, attempts
                )
                committed = decode_offsets(answer)
                incarnation = decode_offsets_incarnation(answer)
            rest = [queue for queue in queues if queue.queue_id not in committed]
            if isinstance(begin, datetime):
                for queue in rest:
                    request = encode_search_offset(queue, begin, incarnation)
                    answer = self._call(
                        topic, broker_name, _methods.SEARCH_OFFSET, request, timeout_s, attempts
                    )
                    starts[queue] = decode_search_offset(answer)
                    incarnation = decode_search_incarnation(answer)
            elif rest:
                request = encode_get_queue_range(
                    topic, [queue.queue_id for queue in rest], incarnation
                )
                answer = self._call(
                    topic, broker_name, _methods.GET_QUEUE_RANGE, request, timeout_s, attempts
                )
                starts = first_offsets(rest, decode_queue_ranges(answer), begin)
                incarnation = decode_range_incarnation(answer)
        except (TopicNotFoundError, QueueNotFoundError) as error:
            is_there = False
            # Not made yet (auto_create): its first message will have the offset 0.
            committed, starts, incarnation = {}, {}, 0
            self._exists.setdefault(topic, isinstance(error, QueueNotFoundError))
        else:
            is_there = self._exists[topic] = True
        self._state.start_all(queues, committed, starts, incarnation)
        return is_there

    def _exchange(self, wait_s: float) -> None:
        """Sends the pulls that are due, and takes what has come or comes within the time."""
        pulls = self._pulls
        if pulls is None:
            pulls = self._pulls = PullMultiplexer(self._transport)
        self._send_due(pulls)
        outcomes = pulls.wait(wait_s, self._state.room_bytes(time.monotonic()))
        trouble: ProtomqError | None = None
        for ticket, result in outcomes:
            try:
                self._take_outcome(ticket, result)
            except ProtomqError as error:
                trouble = error  # The other outcomes are taken all the same.
        if trouble is not None:
            raise trouble
        if outcomes:
            self._send_due(pulls)

    def _send_due(self, pulls: PullMultiplexer) -> None:
        for queue in self._state.due(time.monotonic()):
            ticket = self._state.begin(queue)
            try:
                route = self._routes.current(queue.topic, self._request_timeout_s)
                address = broker_of(route, queue.broker_name)
            except ProtomqError as error:
                self._take_outcome(ticket, error, by_broker=False)
                continue
            request = self._state.encode_request(ticket)
            pulls.send(address, ticket, request, self._pull_timeout_s)

    def _take_outcome(
        self, ticket: Ticket, result: bytes | ProtomqError, *, by_broker: bool = True
    ) -> None:
        queue = ticket.queue
        if isinstance(result, bytes):
            self._outages.answered(f"broker {queue.broker_name}", queue.topic)
            self._state.answered(ticket, result, time.monotonic())
            return
        if result.stale_route:
            self._routes.invalidate(queue.topic)
        told = self._state.failed(ticket, result, time.monotonic(), by_broker=by_broker)
        if told is None and isinstance(result, QueueNotFoundError) and queue in self._assigned:
            told = result  # A subscription follows the route; this queue was asked for by its number.
        if told is not None:
            raise told
        self._outages.failed(f"broker {queue.broker_name}", queue.topic, result)

    def _commit_now(
        self, when: str, timeout_s: float, *, ends_s: float = math.inf, is_last: bool = False
    ) -> ProtomqError | None:
        """Commits what was dealt with; a failure is logged, the next commit makes up for it, unless this is the last one.

        Answers the first error.
        """
        attempts = LAST_COMMIT_ATTEMPTS if is_last else 1
        errors = self._commit(self._state.to_commit(safe_only=True), timeout_s, attempts, ends_s)
        for (topic, broker_name), error in errors.items():
            # A broker that is down is told by `_outages`; what a broker has against the offsets is told once until it takes some.
            is_told = error.retriable or error.reason in self._commit_troubles
            level = logging.DEBUG if is_told and not is_last else logging.WARNING
            logger.log(
                level,
                "offsets of %s in %s/%s not committed %s: %s",
                self.group, topic, broker_name, when, error,
            )  # fmt: skip
        self._commit_troubles = {error.reason for error in errors.values() if not error.retriable}
        return next(iter(errors.values()), None)

    def _commit(
        self,
        offsets: Mapping[MessageQueue, int],
        timeout_s: float,
        attempts: int,
        ends_s: float = math.inf,
    ) -> CommitErrors:
        """Commits at every broker, for each of which `timeout_s` is the limit, and `ends_s` the end for all. What went wrong.

        One that does not answer is not asked for its other topics; one that has fewer queues now is asked again for those it has.
        """
        errors: CommitErrors = {}
        silent: set[str] = set()
        parts = by_broker(offsets)
        for i, ((topic, broker_name), members) in enumerate(parts.items()):
            if broker_name in silent:
                continue
            part = {queue: offsets[queue] for queue in members}
            limit_s = min(timeout_s, share_s(ends_s, len(parts) - i))
            try:
                try:
                    self._commit_part(topic, broker_name, part, limit_s, attempts)
                except QueueNotFoundError as error:
                    part, told = without_gone_queues(part, error)
                    if part:
                        self._commit_part(topic, broker_name, part, limit_s, attempts)
                    raise told from error
            except ProtomqError as error:
                if error.retriable:
                    self._outages.failed(f"broker {broker_name}", topic, error)
                if isinstance(error, TransportError):
                    silent.add(broker_name)
                errors[topic, broker_name] = error
        return errors

    def _commit_part(
        self,
        topic: str,
        broker_name: str,
        part: Mapping[MessageQueue, int],
        timeout_s: float,
        attempts: int,
    ) -> None:
        """Commits in one topic at one broker."""
        incarnations = {queue: self._state.incarnation(queue) for queue in part}
        request = encode_commit(self.group, part, incarnations)
        self._call(topic, broker_name, _methods.COMMIT_OFFSETS, request, timeout_s, attempts)
        self._state.committed(part)

    def _call(
        self,
        topic: str,
        broker_name: str,
        method: MethodInfo,
        request: bytes,
        timeout_s: float | None = None,
        attempts: int = CALL_ATTEMPTS,
    ) -> bytes:
        """Calls a broker; again after an error that may pass, within the time-out."""
        timeout_s = timeout_s or self._request_timeout_s
        deadline_s = time.monotonic() + timeout_s
        while True:
            attempts -= 1
            try:
                route = self._routes.get(topic, timeout_s)
                left_s = max(deadline_s - time.monotonic(), 0.001)
                return self._transport.call(
                    broker_of(route, broker_name), method, (request,), left_s
                )
            except ProtomqError as error:
                if error.stale_route:
                    self._routes.invalidate(topic)
                pause_s = (error.retry_delay_ms or 50) / 1000
                if not error.retriable or attempts <= 0 or time.monotonic() + pause_s >= deadline_s:
                    raise
            time.sleep(pause_s)

    def _addresses(self) -> set[BrokerAddress]:
        routes = [
            self._routes.last_known(topic)
            for topic in {queue.topic for queue in self._state.queues}
        ]
        return {
            address for route in routes if route is not None for address in route.brokers.values()
        }

    def _seek_to_range_end(self, queues: Iterable[MessageQueue] | None, which: int) -> None:
        wanted = None if queues is None else checked_queues(queues)
        with self._own_lock():
            self._check_open()
            for queue in self._state.queues if wanted is None else wanted:
                self._state.seek(queue, self.queue_range(queue)[which])
