"""Producer: sending from threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import TYPE_CHECKING, Literal, Unpack

from ._at_exit import call_at_exit
from ._batching import PreparedRecord
from ._calls_under_way import ThreadCalls
from ._checks import check_batch, check_queue, check_seconds, check_selector, check_topic
from ._choices import CHOSE_BADLY, choices_of
from ._client_name import client_name
from ._connection_options import ConnectionOptions, connection_of
from ._delays import when_of
from ._forks import call_after_fork
from ._hook_points import HookPoints
from ._hooked_calls import transport_with
from ._interrupts import is_interrupt
from ._lines import Entry, Line, Room, resolve_batch
from ._outgoing import BatchResult, OutgoingMessage, SendResult
from ._producer_options import ProducerOptions, ProducerSettings
from ._request_calls import RequestCalls
from ._requests import Reply, check_request, queue_at, reply_steps, reply_timeout_s
from ._routes import Routes
from ._send_arguments import (
    as_message,
    refuse_call_hooks,
    refuse_settings_beside_transport,
    when_of_message,
)
from ._send_core import SendCore
from ._send_future import SendFuture, UnseenFailures, unseen_text
from ._send_lines import LineSender
from ._send_steps import recall, send_batch, send_one_way
from ._show_settings import show_settings
from ._steps import Driver, Steps, T
from ._trace import Tracer, traced
from ._transport import SyncTransport
from ._types import PEER_TIMEOUT_S, Body, Delay, MessageQueue, Route
from ._warnings import warn
from .errors import (
    ClosedError,
    ProtomqError,
    RequestTimeoutError,
)

if TYPE_CHECKING:
    from datetime import datetime

    from ._message import Message
    from ._selectors import QueueSelector
    from .hooks import SendContext

logger = logging.getLogger("protomq.producer")



@show_settings(ProducerOptions, ProducerSettings.__annotations__)
class Producer(LineSender):
    """Sends messages from threads. Any thread may call everything; make one and share it.

        with Producer("shop", namesrv="127.0.0.1:9876") as producer:
            result = producer.send("orders", b"...", key="order-17", tag="created")

    Every `send` returns when the broker has stored the message (in memory or on disk, as the broker is configured), or raises an error. The
    error's `definite` is False if the message may be stored all the same. Sends of many threads travel together.

    Nothing is opened before the first send; a forked child has a producer id of its own.

    - `namesrv`: host:port[;host:port], a sequence of addresses, or a URL that lists them; None: PROTOMQ_NAMESRV_ADDR, else
      127.0.0.1:9876 and 127.0.0.1:10911 (a name server, a standalone).
    - `transport`: "auto" (the remoting port, gRPC where that cannot be reached), "remoting", "grpc", or a SyncTransport to share.
    - `client_id`: the name that the servers' operators see; "" for one made of group, host, process and a random number.
    - `peer_timeout_s`: a server that answers nothing for this time, not even probes, counts as gone. At least 3; over gRPC at least 20,
      unless the servers' `connections.peer_timeout_ms` is as low.
    - `spin`: a blocking call polls for its answer for up to 0.2 ms before it sleeps, if that has helped lately.
    - `connection`: all of these in one ConnectionOptions, for all clients of an application.
    """

    def __init__(
        self,
        group: str = "",
        *,
        namesrv: str | Sequence[str] | None = None,
        transport: SyncTransport | Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        spin: bool = True,
        connection: ConnectionOptions | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        self.options = ProducerOptions(group=group, **settings)
        self._hooks = HookPoints(group, self.options.hooks)
        self._owns_transport = not isinstance(transport, SyncTransport)
        if isinstance(transport, SyncTransport):
            refuse_settings_beside_transport(connection, client_id, peer_timeout_s, spin)
            refuse_call_hooks(self._hooks)
            self._transport = transport
        else:
            connection = connection_of(
                connection, namesrv=namesrv, transport=transport, client_id=client_id,
                peer_timeout_s=peer_timeout_s, spin=spin, group=group,
            )  # fmt: skip
            self._transport, namesrv = transport_with(connection, self._hooks), connection.namesrv
        self._hooks.named_by(client_name(self._transport.options.client_id))
        self._routes = Routes(self._transport, namesrv, sends=True)
        self._hooks.located_by(self._routes.last_known, self._transport.kind)
        if self._transport.is_replaced is None:
            self._transport.is_replaced = self._routes.is_replaced
        self._driver = Driver(self._transport, self._routes)
        self._closed = False
        self._was_cut_off = False
        """Whether a `close` was interrupted, so that the next one is to do all that is left."""
        self._tracer: Tracer | None = None
        if self.options.trace:
            self._tracer = traced(self._hooks, self._transport.options, namesrv)
        self._core = self._make_core()
        self._failures = UnseenFailures()
        self._start()
        call_after_fork(self)
        call_at_exit(self)

    def _make_core(self) -> SendCore:
        return SendCore(self.options, self._hooks)

    def _start(self) -> None:
        self._lines: dict[tuple[str, MessageQueue | None, bytes | None], Line] = {}
        self._workers = None
        self._workers_lock = threading.Lock()
        self._room = Room(self.options.pending_size_max_bytes)
        self._requests = RequestCalls(self._driver, self._transport.end_held)
        self._calls = ThreadCalls()
        self._pending: set[SendFuture] = set()
        """Messages of `send_async` that have no outcome yet."""

    # -- sending -------------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str | OutgoingMessage,
        body: Body = b"",
        *,
        key: str | None = None,
        keys: Sequence[str] = (),
        tag: str = "",
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        selector: QueueSelector | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Sends a message and waits until it is stored.

        `sharding_key`: messages with the same key go to the same queue, in order; "" is none. Without `queue`, `sharding_key` or `selector`
        the message may go to any queue. If the broker of a chosen queue is away, the send waits for it within the time-out, unless
        `retries` is 0.

        `delay` (a timedelta, seconds, or a DelayLevel of the broker) counts from when the broker gets the message. `deliver_at` is a time
        with a time zone. Nobody gets the message before, and until then `recall` can take it back. At most 40 days; a time in the past
        means at once.

        Raises an error of protomq.errors: ConfigurationError, MessageTooLargeError, NoRouteError, TopicNotFoundError,
        RequestTimeoutError and others, after the retries that can help.
        """
        if (
            sharding_key is not None
            or selector is not None
            or delay is not None
            or deliver_at is not None
            or self._hooks.send
            or not isinstance(topic, str)
        ):
            message = as_message(
                topic, body, key, keys, tag, properties, queue, sharding_key, delay, deliver_at
            )
            with self._calls:
                return self._send_message(message, selector, timeout_s)
        if queue is not None and type(queue) is not MessageQueue:
            check_queue(topic, queue)
        deadline_s = self._deadline(timeout_s)
        if type(body) is bytes and len(body) <= self._core.plain_size_max:
            record = self._core.prepare(body, key, keys, tag, properties, deadline_s=deadline_s)
            return self._send_record(topic, record, queue, deadline_s)
        # To write and to compress it takes its time, in which it stands in no line.
        with self._calls:
            record = self._core.prepare(body, key, keys, tag, properties, deadline_s=deadline_s)
            return self._send_record(topic, record, queue, deadline_s)

    def send_async(
        self,
        topic: str | OutgoingMessage,
        body: Body = b"",
        *,
        key: str | None = None,
        keys: Sequence[str] = (),
        tag: str = "",
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        selector: QueueSelector | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        timeout_s: float | None = None,
    ) -> Future[SendResult]:
        """Sends a message without waiting; the future has the result or the error.

        Messages to one chosen queue (or with one sharding key) keep the order of the calls. Waits only while more than
        `pending_size_max_bytes` are on their way. Callbacks of the future run on a sending thread: keep them short. Look at each future:
        for a failure that nobody has seen, `flush`, `close` or the end of the program only give a RuntimeWarning.
        """
        message = as_message(
                topic, body, key, keys, tag, properties, queue, sharding_key, delay, deliver_at
            )
        check_selector(selector, message.queue)
        with self._calls:
            return self._begin_async(message, selector, self._deadline(timeout_s))

    def send_one_way(
        self,
        topic: str | OutgoingMessage,
        body: Body = b"",
        *,
        key: str | None = None,
        keys: Sequence[str] = (),
        tag: str = "",
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        selector: QueueSelector | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Sends a message and returns when the kernel has it. The caller never learns whether it was stored. No retries.

        Raises what is known without an answer: ConfigurationError for a delay of more than 40 days, too. What only the broker refuses, as a
        level that it does not have, is lost without a word over the remoting port. So is a message that meets an overloaded broker
        (SYSTEM_BUSY); that one counts it in `protomq_lane_rejections_total`. Over gRPC the log has a warning with a number.
        """
        message = as_message(
                topic, body, key, keys, tag, properties, queue, sharding_key, delay, deliver_at
            )
        check_selector(selector, message.queue)
        check_queue(message.topic, message.queue)
        deadline_s = self._deadline(timeout_s)
        self._run(send_one_way(self._core, message, selector, deadline_s))

    def send_batch(
        self,
        topic: str,
        messages: Sequence[Body | OutgoingMessage],
        *,
        keys: Sequence[str | None] | None = None,
        tags: str | Sequence[str] = "",
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        timeout_s: float | None = None,
    ) -> BatchResult:
        """Sends many messages of one topic: bodies (with `keys` and `tags`, if given) or OutgoingMessages.

        All messages go to one queue in one request (all or nothing); more than 4 MiB or 32,768 messages become several requests. Messages
        with their own queue or sharding key go there. The time-out covers the whole batch. A batch does not wait for messages of
        `send_async` that are still under way. `delay` and `deliver_at` (see `send`) apply to messages without their own. Each delay needs
        its own request; messages with a `deliver_at` travel together.

        Raises BatchIncompleteError if some requests were stored and another failed; its `stored` lists the stored ones.
        """
        deadline_s = self._deadline(timeout_s)
        check_batch(topic, messages, keys, tags, queue, sharding_key)
        if not messages:
            return BatchResult(())
        when = when_of(delay, deliver_at)
        return self._run(
            send_batch(
                self._core,
                topic,
                messages,
                keys,
                tags,
                queue,
                sharding_key,
                when,
                deadline_s,
                self._routes.cached,
            )
        )

    def recall(self, topic: str, recall_handle: str, *, timeout_s: float | None = None) -> bool:
        """Takes a delayed message back by the `recall_handle` of its SendResult; any producer may.

        Returns True if this call took it back: nobody will get it. False: the message is delivered already, or was recalled by an earlier
        call. Tried again until the time-out, `send_timeout_s`. If an answer is lost, the broker tells at the next try whether that recall
        has won. If it does not know, the error of the lost one is raised, which is not `definite`. After such an error, the False of a new
        call may be the first one's work.

        The broker knows that a message was recalled, not by whom. So two callers that recall one message at once may both be told True, if
        the answer to one of them is lost. Raises ConfigurationError for an invalid handle, NoRouteError if its broker is away.
        """
        check_topic(topic)
        deadline_s = self._deadline(timeout_s)
        return self._run(recall(self._core, topic, recall_handle, deadline_s))

    def request(
        self,
        topic: str,
        body: Body = b"",
        *,
        key: str | None = None,
        keys: Sequence[str] = (),
        tag: str = "",
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Sends a message and waits for the reply that its consumer sends by `reply`; the first one if several consumers reply.

        The request is a message like any other: it is stored, and may be processed more than once, or after the time-out. `timeout_s`
        None: the send time-out. Raises what `send` raises, and RequestTimeoutError (not definite) if no reply has come in time.
        """
        check_topic(topic)
        check_queue(topic, queue)
        check_request(properties)
        deadline_s = self._deadline(timeout_s)
        route = self._route(topic, deadline_s, queue)

        def send(all_properties: Mapping[str, str], within_s: float, broker_name: str) -> SendResult:
            at = queue_at(route, queue, sharding_key, broker_name)
            return self.send(
                topic, body, key=key, keys=keys, tag=tag, properties=all_properties, queue=at,
                sharding_key=sharding_key, timeout_s=within_s,
            )  # fmt: skip

        return self._requests.request(route, properties, deadline_s, send)

    def reply(
        self,
        message: Message,
        body: Body = b"",
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Replies to a message that was sent by `request`; returns when its caller has the reply. Consumers have this method, too.

        Raises CallerGoneError if nobody waits for it any more: drop it. RequestTimeoutError if its caller may still come back: try again.
        ConfigurationError if the message asks for no reply. `timeout_s`: None for 15 s, or `send_timeout_s` if that is longer.
        """
        if timeout_s is None:
            timeout_s = reply_timeout_s(self.options.send_timeout_s)
        within_s = self._deadline(timeout_s) - time.monotonic()
        self._run(reply_steps(message, body, properties, within_s))

    def _run(self, steps: Steps[T]) -> T:
        """What the steps return; `close` waits for them."""
        with self._calls:
            return self._driver.run(steps)

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until every message of `send_async` has its outcome in its future.

        A RuntimeWarning and the log report failures whose future nobody has looked at (result, exception, a callback). Raises
        RequestTimeoutError after `timeout_s` (None: the send time-out); messages without an outcome stay under way.
        """
        deadline_s = self._deadline(timeout_s)
        waiting = wait(list(self._pending), max(deadline_s - time.monotonic(), 0.0)).not_done
        if waiting:
            raise RequestTimeoutError(
                f"{len(waiting)} messages have no outcome yet", metadata={"pending": str(len(waiting))}
            )
        self._tell_unseen_failures()

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def group(self) -> str:
        """The producer group; empty: none."""
        return self.options.group

    @property
    def compression(self) -> str:
        """The codec in use: "zstd", "lz4", "zlib" or "none". It differs from the one asked for if that is not installed."""
        return self._core.compressor.name

    @property
    def producer_id(self) -> int:
        """The first part of the ids of this producer's messages."""
        return self._core.sequences.producer_id

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The writable queues of a topic. If the topic does not exist yet: the queues that the first send would create.

        RocketMQ: fetchPublishMessageQueues. Raises TopicNotFoundError, NoRouteError.
        """
        return self._looked_at(topic).write_queues

    def transports(self, topic: str) -> dict[str, str]:
        """How each broker of the topic was reached last: "remoting", "grpc", or "" before the first send to it."""
        return {name: self._transport.kind(address) for name, address in self._looked_at(topic).brokers.items()}

    def _looked_at(self, topic: str) -> Route:
        """A route that nothing is sent by."""
        check_topic(topic)
        route = self._route(topic, self._deadline(None))
        self._routes.forget_unmade(topic)
        return route

    def close(self, timeout_s: float | None = None) -> None:
        """Waits until all messages under way have their answers, at most `timeout_s` (None: the send time-out).

        So for batches, recalls and replies. What was sent one way has left the process then.
        Messages that still wait then fail with ClosedError. With 0 it does not wait. It reports unseen failures as `flush` does.
        A `request` that waits for its reply in another thread ends with ClosedError.
        """
        if self._shut(timeout_s):
            self._tell_unseen_failures()

    def _shut(self, timeout_s: float | None) -> bool:
        """Closes everything. Returns False if it was closed before."""
        if self._closed and not self._was_cut_off:
            return False
        if timeout_s is None:
            timeout_s = self.options.send_timeout_s
        deadline_s = time.monotonic() + check_seconds("timeout_s", timeout_s, zero=True)
        self._was_cut_off = False
        self._closed = True
        try:
            self._end(deadline_s)
        except BaseException:
            self._was_cut_off = True
            raise
        return True

    def _end(self, deadline_s: float) -> None:
        """May be called again where it was cut off."""
        # First: some of them come to a line.
        self._calls.wait(max(deadline_s - time.monotonic(), 0.0))
        for line in list(self._lines.values()):
            left = line.drain(max(deadline_s - time.monotonic(), 0.0))
            if left:
                resolve_batch(
                    left, None, ClosedError("the producer was closed before the message was sent")
                )
        if self._workers is not None:
            self._workers.shutdown(wait=False)
        self._requests.close()
        if self._tracer is not None:
            self._tracer.close()
        if self._owns_transport:
            self._transport.wait_for_one_way(max(deadline_s - time.monotonic(), 0.0))
            self._transport.close()

    def _tell_unseen_failures(self) -> None:
        """Warns about failures that nobody has seen, at the line that calls the public method. After `close` nobody can see messages
        without an outcome.
        """
        count, error = self._failures.take(list(self._pending) if self._closed else ())
        if count:
            warn(logger, unseen_text(count, error), 3)

    def __enter__(self) -> Producer:
        if self._closed:
            raise ClosedError("the producer is closed")
        return self

    def __exit__(self, *_: object) -> None:
        if self._shut(None):
            self._tell_unseen_failures()

    def after_fork(self) -> None:
        """Prepares a forked child: no connections, no waiting messages, another producer id. The SDK calls it."""
        self._core.after_fork()
        self._failures.restart()
        self._start()

    def finish_at_exit(self) -> int:
        """Gives messages under way the send time-out when the interpreter ends. Returns how many are lost. The SDK calls it."""
        if self._closed:
            return 0
        waiting = wait(list(self._pending), self.options.send_timeout_s).not_done
        return len(waiting) + self._failures.take()[0]

    # -- one message ---------------------------------------------------------------------------------------------------

    def _send_message(
        self, message: OutgoingMessage, selector: QueueSelector | None, timeout_s: float | None
    ) -> SendResult:
        """Sends with hooks, selectors and sharding keys."""
        core = self._core
        check_selector(selector, message.queue)
        deadline_s = self._deadline(timeout_s)
        message, context = core.before_send(message)
        result, error = None, None
        try:
            line, record = self._line_and_record(message, selector, deadline_s)
            try:
                result = self._send_in(line, record, deadline_s)
            except CHOSE_BADLY as refused:
                result = self._choose_again(message, record, selector, deadline_s, refused)
            return result
        except BaseException as caught:
            error = caught
            raise
        finally:
            core.after_send(context, result, error)

    def _choose_again(
        self,
        message: OutgoingMessage,
        record: PreparedRecord,
        selector: QueueSelector | None,
        deadline_s: float,
        refused: ProtomqError,
    ) -> SendResult:
        """Sends to other queues than the one that has refused it. See `_choices.py`."""
        choices = choices_of(self._core, message, selector, deadline_s)
        while True:
            self._driver.run(choices.again(refused))
            line, _ = self._line_and_record(message, selector, deadline_s)
            try:
                return self._send_in(line, record, deadline_s)
            except CHOSE_BADLY as again:
                refused = again

    def _line_and_record(
        self, message: OutgoingMessage, selector: QueueSelector | None, deadline_s: float
    ) -> tuple[Line, PreparedRecord]:
        record = self._core.prepare_message(message, deadline_s)
        queue = message.queue
        check_queue(message.topic, queue)
        if queue is None and (message.sharding_key or selector is not None):
            route = self._route(message.topic, deadline_s)
            queue = self._core.target_queue(route, message, selector)
        when = when_of_message(message)
        return self._line(message.topic, queue, when), record

    def _begin_async(self, message: OutgoingMessage, selector: QueueSelector | None, deadline_s: float) -> Future[SendResult]:
        message, context = self._core.before_send(message)
        try:
            line, record = self._line_and_record(message, selector, deadline_s)
            size = len(record[0]) + len(record[3])
            self._room.take(size, deadline_s)
        except BaseException as error:
            self._core.after_send(context, None, error)
            raise
        future = SendFuture(self._failures)
        entry = Entry(record, deadline_s, future)
        try:
            # Bypasses SendFuture, here and in the callbacks: a look by the producer itself does not count as seen.
            Future.add_done_callback(future, lambda _: self._forget(future, size))
            if context is not None:
                Future.add_done_callback(future, lambda done: self._after_async_send(context, done))
            self._pending.add(future)
            if not line.enter(entry):
                line.arrive()
            elif entry.batch is not None and not self._submit(line, entry.batch):
                self._lead(line, entry.batch)
        except BaseException as error:
            if is_interrupt(error):
                self._interrupted(line, entry, entry)
            raise
        return future

    def _forget(self, done: SendFuture, size_bytes: int) -> None:
        """Forgets a message of `send_async` that has its outcome."""
        self._pending.discard(done)
        self._room.give_back(size_bytes)

    def _after_async_send(self, context: SendContext, done: Future[SendResult]) -> None:
        error = CancelledError() if done.cancelled() else Future.exception(done)
        self._core.after_send(context, None if error else Future.result(done), error)

    def _deadline(self, timeout_s: float | None) -> float:
        """Returns when a send that begins now must end. Every public send calls this, so a closed producer takes none."""
        if self._closed:
            raise ClosedError("the producer is closed")
        if timeout_s is None:
            timeout_s = self.options.send_timeout_s
        else:
            check_seconds("timeout_s", timeout_s)
        return time.monotonic() + timeout_s
