"""AsyncPullConsumer: the asyncio flavour of `_pull_consumer.PullConsumer`, with the same rules.

Each pull in flight is a small task of the event loop; all pulls to a broker share one connection. The consumer belongs to the
event loop on which it was first used, and to its process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal

from . import _methods
from ._async_routes import AsyncRoutes
from ._async_transport import AsyncTransport
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
    shared_queue,
    shared_queue_text,
    uncommitted_text,
)
from ._outages import Outages
from ._pull_consumer import (
    AUTO_COMMIT_INTERVAL_S,
    CALL_ATTEMPTS,
    LAST_COMMIT_ATTEMPTS,
    POLL_CALL_TIMEOUT_S,
    PULL_TIMEOUT_EXTRA_S,
    REQUEST_TIMEOUT_S,
    RETRY_RESOLVE_S,
)
from ._pull_logic import POLL_MESSAGES, OffsetReset, PullOptions, PullState, Ticket
from ._transport_options import TransportOptions
from ._types import PEER_TIMEOUT_S, MessageQueue, MethodInfo, QueueRange, Route
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


class AsyncPullConsumer:
    """Pulls messages from queues.

        async with AsyncPullConsumer("my-group") as consumer:
            await consumer.subscribe("flights", tags=["UA"])
            async for message in consumer:
                print(message.key, message.body)

    Coroutines of one event loop may share it.
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
    ) -> None:
        """The arguments are those of PullConsumer, but for `spin`: nothing blocks here."""
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

        self._transport = AsyncTransport(
            TransportOptions(
                transport, client_id=client_id, peer_timeout_s=peer_timeout_s
            )
        )
        self._routes = AsyncRoutes(self._transport, namesrv)
        self._state = PullState(options)
        self._outages = Outages()
        self._subscriptions: dict[str, Route] = {}
        self._tags: dict[str, tuple[str, ...]] = {}
        self._filters: dict[str, MessageFilter] = {}
        self._assigned: tuple[MessageQueue, ...] = ()
        self._pulls: set[asyncio.Task[None]] = set()
        self._arrived: asyncio.Event | None = None
        self._trouble: ProtomqError | None = None
        self._committing = False
        self._next_commit_s = time.monotonic() + auto_commit_interval_s
        self._retry_resolve_s = 0.0
        self._exists: dict[str, bool] = {}
        """What brokers say of topics: a name server may not know yet of one that was made a moment ago."""
        self._warned_topics: set[str] = set()
        self._warned_of_member = False
        self._commit_troubles: set[str] = set()
        """Reasons of brokers that refused the last commit."""
        self._pid = os.getpid()
        self._closed = False
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
        check_topic(topic)
        checked = checked_tags(tags)
        wanted_filter = checked_filter(checked, sql, cel, module)
        route = await self._routes.get(topic, self._request_timeout_s)
        self._tags[topic], self._filters[topic] = checked, wanted_filter
        self._subscriptions[topic] = route
        self._forget_gone([topic])
        await self._reassign()
        for text in self._doubts(route):
            warn(logger, text, 2)

    async def unsubscribe(self, topic: str) -> None:
        """See PullConsumer.unsubscribe."""
        check_topic(topic)
        self._check_open()
        self._subscriptions.pop(topic, None)
        await self._reassign()

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
        routes = await self._routes_of(wanted)
        self._assigned = wanted
        for queue in self._assigned:
            self._tags[queue.topic], self._filters[queue.topic] = checked, wanted_filter
        self._forget_gone(queue.topic for queue in wanted)
        await self._reassign()
        for text in self._doubts(*routes):
            warn(logger, text, 2)

    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues being consumed."""
        return self._state.queues

    # -- messages --------------------------------------------------------------------------------------------------------

    async def poll(
        self, timeout_s: float = 1.0, max_messages: int = POLL_MESSAGES
    ) -> list[Message]:
        """See PullConsumer.poll."""
        self._check_open()
        check_count("max_messages", max_messages, 1)
        check_seconds("timeout_s", timeout_s, zero=True)
        if not self._subscriptions and not self._assigned:
            raise ConfigurationError("nothing to poll: subscribe to a topic or assign queues first")
        deadline_s = time.monotonic() + timeout_s
        state = self._state
        state.user_came_back()
        arrived = self._arrived
        if arrived is None:
            arrived = self._arrived = asyncio.Event()
        now_s = time.monotonic()
        if self._auto_commit and now_s >= self._next_commit_s and not self._committing:
            self._next_commit_s = now_s + self._auto_commit_interval_s
            await self._commit_now("in poll", POLL_CALL_TIMEOUT_S)
        await self._follow_routes(now_s)
        await asyncio.sleep(
            0
        )  # The pulls need a turn of the loop, even under a user who never waits.
        while True:
            arrived.clear()
            self._start_pulls()
            if self._trouble is not None:
                trouble, self._trouble = self._trouble, None
                raise trouble
            messages = state.take(max_messages)
            if messages:
                self._start_pulls()
                return messages
            now_s = time.monotonic()
            if self._closed or now_s >= deadline_s:
                return []
            try:
                async with asyncio.timeout(min(deadline_s - now_s, state.next_due_in_s(now_s))):
                    await arrived.wait()
            except TimeoutError:
                continue

    async def __aiter__(self) -> AsyncIterator[Message]:
        """See PullConsumer.__iter__."""
        while not self._closed:
            try:
                messages = await self.poll()
            except ClosedError:
                return
            for i, message in enumerate(messages):
                try:
                    yield message
                except GeneratorExit:
                    self._state.give_back(messages[i + 1 :])
                    raise

    # -- positions and offsets -------------------------------------------------------------------------------------------

    async def position(self, queue: MessageQueue) -> int:
        """See PullConsumer.position."""
        check_message_queue(queue)
        self._check_open()
        position = self._state.position(queue)
        if position is None:
            timeout_s = self._request_timeout_s
            await self._resolve(
                queue.topic, queue.broker_name, [queue], self._begin, timeout_s, CALL_ATTEMPTS
            )
            position = self._state.position(queue)
        assert position is not None
        return position

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
        check_time("when", when)
        self._check_open()
        for queue in self._state.queues if queues is None else checked_queues(queues):
            self.seek(queue, await self.offset_for_time(queue, when))

    async def seek_to_begin(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes to the first message that is stored."""
        wanted = None if queues is None else checked_queues(queues)
        self._check_open()
        for queue in self._state.queues if wanted is None else wanted:
            self.seek(queue, await self.min_offset(queue))

    async def seek_to_end(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes behind the last message."""
        wanted = None if queues is None else checked_queues(queues)
        self._check_open()
        for queue in self._state.queues if wanted is None else wanted:
            self.seek(queue, await self.end_offset(queue))

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """See PullConsumer.commit."""
        self._check_group()
        checked = None if offsets is None else checked_offsets(offsets)
        self._check_open()
        if checked is None:
            self._state.user_came_back()
            checked = self._state.to_commit(safe_only=True)
        errors = await self._commit(checked, self._request_timeout_s, CALL_ATTEMPTS)
        if errors:
            raise combined(errors)

    async def committed(self, queue: MessageQueue) -> int | None:
        """See PullConsumer.committed."""
        self._check_group()
        check_message_queue(queue)
        self._check_open()
        request = encode_get_offsets(self.group, queue.topic, [queue.queue_id])
        answer = await self._call(queue.topic, queue.broker_name, _methods.GET_OFFSETS, request)
        return decode_offsets(answer).get(queue.queue_id)

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """See PullConsumer.queues."""
        check_topic(topic)
        self._check_open()
        route = await self._routes.get(topic, self._request_timeout_s)
        if not route.auto_create:
            return route.read_queues
        # It may have been made a moment ago: brokers know that first.
        found: list[MessageQueue] = []
        request = encode_get_queue_range(topic, ())
        for broker_name in route.brokers:
            try:
                answer = await self._call(
                    topic, broker_name, _methods.GET_QUEUE_RANGE, request, attempts=1
                )
            except TopicNotFoundError:
                continue
            ids = sorted(decode_queue_ranges(answer))
            found.extend(MessageQueue(topic, broker_name, queue_id) for queue_id in ids)
        if not found:
            raise unknown_topic(topic)
        return tuple(found)

    async def queue_range(self, queue: MessageQueue) -> QueueRange:
        """The offsets that can be read: (min_offset, end_offset), half-open."""
        check_message_queue(queue)
        self._check_open()
        request = encode_get_queue_range(queue.topic, [queue.queue_id])
        answer = await self._call(queue.topic, queue.broker_name, _methods.GET_QUEUE_RANGE, request)
        return decode_queue_ranges(answer)[queue.queue_id]

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
        request = encode_search_offset(queue, when)
        answer = await self._call(queue.topic, queue.broker_name, _methods.SEARCH_OFFSET, request)
        return decode_search_offset(answer)

    @property
    def transport(self) -> str:
        """See PullConsumer.transport."""
        routes = [
            self._routes.last_known(topic)
            for topic in {queue.topic for queue in self._state.queues}
        ]
        addresses = {
            address for route in routes if route is not None for address in route.brokers.values()
        }
        return ",".join(sorted({kind for kind in map(self._transport.kind, addresses) if kind}))

    # -- end -------------------------------------------------------------------------------------------------------------

    async def close(self, *, commit: bool = True) -> None:
        """See PullConsumer.close."""
        if text := await self._shut(commit):
            warn(logger, text, 2)

    async def _shut(self, commit: bool) -> str:
        """Closes everything; what is to be told of the last commit."""
        if self._closed:
            return ""
        text = ""
        self._closed = True
        closed(self)
        self._wake()
        if commit:
            self._state.user_came_back()
        if self._auto_commit:
            error = await self._commit_now("on close", self._request_timeout_s, is_last=True)
            if error is not None and (count := self._state.uncommitted_count()):
                text = not_taken_text(self.group, count, error)
        for task in self._pulls:
            task.cancel()
        await asyncio.gather(*self._pulls, return_exceptions=True)
        await self._routes.close()
        await self._transport.close()
        return text

    async def __aenter__(self) -> AsyncPullConsumer:
        return self

    async def __aexit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if text := await self._shut(exception_type is None):
            warn(logger, text, 2)

    def finish_at_exit(self, timeout_s: float) -> int:
        """When the interpreter ends, and with it the loop: the queues of which something is not committed. Called by itself."""
        if self._closed or not self._auto_commit or self._pid != os.getpid():
            return 0
        self._closed = True
        return self._state.uncommitted_count()

    def __del__(self) -> None:
        # See PullConsumer.__del__.
        if getattr(self, "_closed", True) or not self._auto_commit or self._pid != os.getpid():
            return
        if count := self._state.uncommitted_count():
            warn(logger, uncommitted_text(self.group, count, "nobody used it any more"))

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed")

    def _wake(self) -> None:
        if self._arrived is not None:
            self._arrived.set()

    def _check_group(self) -> None:
        if not self.group:
            raise ConfigurationError("a consumer without a group commits nothing")

    async def _routes_of(self, queues: Sequence[MessageQueue]) -> list[Route]:
        """See PullConsumer._routes_of."""
        routes: list[Route] = []
        for topic in dict.fromkeys(queue.topic for queue in queues):
            try:
                route = await self._routes.get(topic, self._request_timeout_s)
                if missing_queues(route, queues):
                    self._routes.invalidate(topic)
                    route = await self._routes.get(topic, self._request_timeout_s)
            except NoRouteError:
                continue
            check_queues_exist(route, queues)
            routes.append(route)
        return routes

    def _doubts(self, *routes: Route) -> list[str]:
        """See PullConsumer._doubts."""
        found = doubtful_topics(routes, self._exists, self._warned_topics)
        queue = None if self._warned_of_member else shared_queue(self)
        if queue is not None:
            self._warned_of_member = True
            self._state.warned_of_other()
            found.append(shared_queue_text(self.group, queue))
        return found

    def _forget_gone(self, topics: Iterable[str]) -> None:
        """See PullConsumer._forget_gone."""
        names = set(topics)
        self._state.forget_gone(names)
        if self._trouble is not None and self._trouble.metadata.get("topic") in names:
            self._trouble = None  # Of another queue, found while the user saw to it.
        for topic in names:
            self._exists.pop(topic, None)

    async def _reassign(self) -> None:
        """See PullConsumer._reassign."""
        queues = subscribed_queues(self._assigned, self._subscriptions)
        added = self._state.assign(queues, self._tags, self._filters)
        await self._resolve_or_later(added, self._begin, self._request_timeout_s, CALL_ATTEMPTS)

    async def _follow_routes(self, now_s: float) -> None:
        """See PullConsumer._follow_routes."""
        for topic, last in list(self._subscriptions.items()):
            try:
                route = self._routes.cached(topic) or await self._routes.current(
                    topic, self._request_timeout_s
                )
            except ProtomqError:
                continue  # The pulls will tell.
            if route is not last and self._subscriptions.get(topic) is last:
                self._subscriptions[topic] = route
                self._outages.queues_changed(topic, len(route.read_queues))
                queues = subscribed_queues(self._assigned, self._subscriptions)
                added = self._state.assign(queues, self._tags, self._filters, park=True)
                begin: Begin = "earliest" if last.read_queues else self._begin
                await self._resolve_or_later(added, begin, POLL_CALL_TIMEOUT_S, 1)
                return  # The others: next time.
        if now_s >= self._retry_resolve_s:
            self._retry_resolve_s = now_s + RETRY_RESOLVE_S
            await self._resolve_or_later(
                self._state.unresolved(), self._begin, POLL_CALL_TIMEOUT_S, 1
            )

    async def _resolve_or_later(
        self, queues: Iterable[MessageQueue], begin: Begin, timeout_s: float, attempts: int
    ) -> None:
        """See PullConsumer._resolve_or_later."""
        for (topic, broker_name), members in by_broker(queues).items():
            try:
                is_there = await self._resolve(
                    topic, broker_name, members, begin, timeout_s, attempts
                )
            except ProtomqError as error:
                if not error.retriable:
                    raise
                self._outages.failed(f"broker {broker_name}", topic, error)
            else:
                if is_there:
                    self._outages.answered(f"broker {broker_name}", topic)

    async def _resolve(
        self,
        topic: str,
        broker_name: str,
        queues: Sequence[MessageQueue],
        begin: Begin,
        timeout_s: float,
        attempts: int,
    ) -> bool:
        """See PullConsumer._resolve."""
        committed: dict[int, int] = {}
        starts: dict[MessageQueue, int] = {}
        incarnation = 0
        try:
            if self._resume:
                request = encode_get_offsets(
                    self.group, topic, [queue.queue_id for queue in queues]
                )
                answer = await self._call(
                    topic, broker_name, _methods.GET_OFFSETS, request, timeout_s, attempts
                )
                committed = decode_offsets(answer)
                incarnation = decode_offsets_incarnation(answer)
            rest = [queue for queue in queues if queue.queue_id not in committed]
            if isinstance(begin, datetime):
                for queue in rest:
                    request = encode_search_offset(queue, begin, incarnation)
                    answer = await self._call(
                        topic, broker_name, _methods.SEARCH_OFFSET, request, timeout_s, attempts
                    )
                    starts[queue] = decode_search_offset(answer)
                    incarnation = decode_search_incarnation(answer)
            elif rest:
                request = encode_get_queue_range(
                    topic, [queue.queue_id for queue in rest], incarnation
                )
                answer = await self._call(
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

    def _start_pulls(self) -> None:
        if self._closed:
            return
        for queue in self._state.due(time.monotonic()):
            task = asyncio.get_running_loop().create_task(self._pull(self._state.begin(queue)))
            self._pulls.add(task)
            task.add_done_callback(self._pulls.discard)

    async def _pull(self, ticket: Ticket) -> None:
        """One pull from request to answer."""
        topic = ticket.queue.topic
        asked = False
        try:
            route = self._routes.cached(topic) or await self._routes.current(
                topic, self._request_timeout_s
            )
            address = broker_of(route, ticket.queue.broker_name)
            asked = True
            request = self._state.encode_request(ticket)
            answer = await self._transport.call(
                address, _methods.PULL, (request,), self._pull_timeout_s
            )
        except ProtomqError as error:
            if error.stale_route:
                self._routes.invalidate(topic)
            told = self._state.failed(ticket, error, time.monotonic(), by_broker=asked)
            if told is None and isinstance(error, QueueNotFoundError) and ticket.queue in self._assigned:
                told = error  # See PullConsumer._take_outcome.
            if told is not None:
                self._trouble = told
            else:
                self._outages.failed(f"broker {ticket.queue.broker_name}", topic, error)
        else:
            self._outages.answered(f"broker {ticket.queue.broker_name}", topic)
            try:
                self._state.answered(ticket, answer, time.monotonic())
            except ProtomqError as error:
                self._trouble = error
            self._start_pulls()  # The next hold stands at the broker while the user works.
        self._wake()

    async def _commit_now(
        self, when: str, timeout_s: float, *, is_last: bool = False
    ) -> ProtomqError | None:
        """See PullConsumer._commit_now."""
        self._committing = True
        try:
            attempts = LAST_COMMIT_ATTEMPTS if is_last else 1
            errors = await self._commit(self._state.to_commit(safe_only=True), timeout_s, attempts)
        finally:
            self._committing = False
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

    async def _commit(
        self, offsets: Mapping[MessageQueue, int], timeout_s: float, attempts: int
    ) -> CommitErrors:
        """See PullConsumer._commit."""
        errors: CommitErrors = {}
        silent: set[str] = set()
        for (topic, broker_name), members in by_broker(offsets).items():
            if broker_name in silent:
                continue
            part = {queue: offsets[queue] for queue in members}
            try:
                try:
                    await self._commit_part(topic, broker_name, part, timeout_s, attempts)
                except QueueNotFoundError as error:
                    part, told = without_gone_queues(part, error)
                    if part:
                        await self._commit_part(topic, broker_name, part, timeout_s, attempts)
                    raise told from error
            except ProtomqError as error:
                if error.retriable:
                    self._outages.failed(f"broker {broker_name}", topic, error)
                if isinstance(error, TransportError):
                    silent.add(broker_name)
                errors[topic, broker_name] = error
        return errors

    async def _commit_part(
        self,
        topic: str,
        broker_name: str,
        part: Mapping[MessageQueue, int],
        timeout_s: float,
        attempts: int,
    ) -> None:
        """See PullConsumer._commit_part."""
        incarnations = {queue: self._state.incarnation(queue) for queue in part}
        request = encode_commit(self.group, part, incarnations)
        await self._call(topic, broker_name, _methods.COMMIT_OFFSETS, request, timeout_s, attempts)
        self._state.committed(part)

    async def _call(
        self,
        topic: str,
        broker_name: str,
        method: MethodInfo,
        request: bytes,
        timeout_s: float | None = None,
        attempts: int = CALL_ATTEMPTS,
    ) -> bytes:
        """See PullConsumer._call."""
        timeout_s = timeout_s or self._request_timeout_s
        deadline_s = time.monotonic() + timeout_s
        while True:
            attempts -= 1
            try:
                route = await self._routes.get(topic, timeout_s)
                left_s = max(deadline_s - time.monotonic(), 0.001)
                return await self._transport.call(
                    broker_of(route, broker_name), method, (request,), left_s
                )
            except ProtomqError as error:
                if error.stale_route:
                    self._routes.invalidate(topic)
                pause_s = (error.retry_delay_ms or 50) / 1000
                if not error.retriable or attempts <= 0 or time.monotonic() + pause_s >= deadline_s:
                    raise
            await asyncio.sleep(pause_s)
