"""Message trace: what a client did with messages, sent in the background to RMQ_SYS_TRACE_TOPIC.

    the traced call ──note──▶ what waits, PENDING_MAX at most ──a thread──▶ batches of EVENTS_PER_MESSAGE, with a producer of its own

Rules:
- The traced call pays for a tuple. It never waits, and never fails, for the trace: what cannot be sent is dropped, counted, and told in
  the log.
- The trace has connections of its own, made when there is something to send. The trace topic itself is not traced.
- `close` sends what waits, within CLOSE_TIMEOUT_S.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ._connection_options import ConnectionOptions
from ._decoding import decoded
from ._hook_points import HookPoints
from ._late_imports import fork_waits
from ._steps import Block, Steps
from ._types import MessageQueue, PoppedQueue
from .errors import CorruptMessageError, ProtocolError
from .hooks import ConsumeContext, Hook, SendContext
from .wire.topics import TRACE_TOPIC

if TYPE_CHECKING:
    from ._message import Message
    from ._transport_options import TransportOptions

logger = logging.getLogger("protomq.trace")

PENDING_MAX: Final = 10_000
EVENTS_PER_MESSAGE: Final = 60
"""A message has 64 keys at most, and each event's message id is one."""
INTERVAL_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 2.0
ERROR_LENGTH_MAX: Final = 512
SENT: Final = 1
CONSUMED: Final = 2


class Noted(NamedTuple):
    """One event, in the order of the fields of TraceEvent; those of the client are added when it is sent."""

    kind: int
    message_id: str
    topic: str
    broker_name: str
    queue_id: int
    queue_offset: int
    time_ms: int
    duration_us: int
    error: str = ""
    attempt: int = 0


class TraceSender(Protocol):
    """What the trace needs of a producer."""

    def send(self, topic: str, body: bytes, *, keys: Sequence[str]) -> object:
        """See Producer.send."""

    def __enter__(self) -> TraceSender:
        """Itself."""

    def __exit__(self, *_: object) -> None:
        """See Producer.close."""


class Tracer:
    """The trace of one client. Any thread."""

    def __init__(self, group: str, client: Callable[[], str], make_producer: Callable[[], TraceSender]) -> None:
        """`client`: returns what the client is called. `make_producer`: of a producer with connections of its own, which does not trace."""
        self._group = group
        self._client = client
        self._make_producer = make_producer
        self._lock = threading.RLock()
        """Reentrant: a signal's handler may close the client on the thread that has it."""
        self.dropped_count = 0
        """Events that nobody will see."""
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._pending: deque[Noted] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._is_in_trouble = False

    def note(self, event: Noted) -> None:
        """Something happened. Never waits, never raises."""
        if self._pid != os.getpid():
            self._lock = threading.RLock()
            self._start()
        if len(self._pending) >= PENDING_MAX:
            self.dropped_count += 1
            return
        self._pending.append(event)
        if self._thread is None:
            self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is not None or self._is_closed:
                return
            thread = threading.Thread(target=self._run, name="protomq-trace", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # No more threads now: the next event tries again.
                return
            self._thread = thread

    def close(self) -> None:
        """Sends what waits, if that goes quickly."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None and self._pid == os.getpid():
            thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        with self._make_producer() as producer:
            while not self._is_closed:
                self._wake.wait(INTERVAL_S)
                self._send_all(producer)
            self._send_all(producer)

    def _send_all(self, producer: TraceSender) -> None:
        while self._pending:
            events = [self._pending.popleft() for _ in range(min(len(self._pending), EVENTS_PER_MESSAGE))]
            try:
                producer.send(TRACE_TOPIC, self._encode(events), keys=_keys_of(events))
            except Exception as error:  # Also of an event that is none for protobuf.
                self.dropped_count += len(events)
                level = logging.DEBUG if self._is_in_trouble else logging.WARNING
                self._is_in_trouble = True
                logger.log(level, "traces are dropped, %d by now: %s", self.dropped_count, error)
            else:
                self._is_in_trouble = False

    def _encode(self, events: Sequence[Noted]) -> bytes:
        with fork_waits:
            from .v1 import trace_pb2

        batch = trace_pb2.TraceBatch()
        for event in events:
            fields: dict[str, Any] = event._asdict()
            fields["kind"] = trace_pb2.TraceKind.Name(event.kind)  # type: ignore[arg-type]
            fields["error"] = event.error.encode(errors="replace").decode()
            batch.events.add(
                **fields,
                group=self._group,
                client=self._client(),
            )
        return batch.SerializeToString()


def _keys_of(events: Sequence[Noted]) -> list[str]:
    return list(dict.fromkeys(event.message_id for event in events if event.message_id))


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """What one client did with one message.

    Attributes:
        kind: "SENT" or "CONSUMED"; of a newer client perhaps "KIND_3", which this one does not know.
        message_id: of the message.
        queue: where the message stands.
        queue_offset: its offset there; None: in no queue (delayed, or a half message).
        group: of the producer or the consumer.
        client: which it was.
        time: when it began, by the clock of the client (UTC).
        duration_s: until the broker had answered, or the consumer came back for more.
        error: why it failed.
        attempt: how often the message had been handed out before.
    """

    kind: str
    message_id: str
    queue: MessageQueue
    queue_offset: int | None
    group: str
    client: str
    time: datetime
    duration_s: float
    error: str
    attempt: int


def events_of(messages: Iterable[Message], message_id: str) -> list[TraceEvent]:
    """The events of one message in messages of the trace topic, the oldest first; what is no TraceBatch, or at no time, is skipped."""
    with fork_waits:
        from .v1 import trace_pb2

    found: list[TraceEvent] = []
    for message in messages:
        try:
            batch = decoded(message.body, trace_pb2.TraceBatch.FromString)
        except ProtocolError:
            logger.warning("message %s of %s is no trace", message.message_id, TRACE_TOPIC)
            continue
        for event in batch.events:
            if event.message_id != message_id:
                continue
            try:
                began = datetime.fromtimestamp(event.time_ms / 1000, UTC)
            except (ValueError, OverflowError, OSError):  # Which one depends on the platform.
                logger.warning(
                    "message %s of %s has an event at no time: time_ms %d", message.message_id, TRACE_TOPIC, event.time_ms
                )
                continue
            found.append(
                TraceEvent(
                    _name_of(event.kind),
                    event.message_id,
                    MessageQueue(event.topic, event.broker_name, event.queue_id),
                    None if event.queue_offset < 0 else event.queue_offset,
                    event.group,
                    event.client,
                    began,
                    event.duration_us / 1e6,
                    event.error,
                    event.attempt,
                )
            )
    return sorted(found, key=lambda event: event.time)


def _name_of(kind: int) -> str:
    """As in TraceEvent.kind; a newer client may note what this one does not know."""
    with fork_waits:
        from .v1 import trace_pb2

    try:
        return trace_pb2.TraceKind.Name(kind).removeprefix("TRACE_KIND_")  # type: ignore[arg-type]
    except ValueError:
        return f"KIND_{kind}"


class TraceHook(Hook):
    """Notes each send, and each message that the program got, once it is done with it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def before_send(self, context: SendContext) -> None:
        """See Hook."""
        context.notes[self] = time.time_ns() // 1_000_000

    def after_send(self, context: SendContext) -> None:
        """See Hook."""
        if context.is_one_way and context.error is None:
            return  # Nobody knows the outcome.
        time_ms, duration_us = context.notes[self], int(context.duration_s * 1e6)
        error = context.error
        if error is not None:
            text = f"{type(error).__name__}: {error}"[:ERROR_LENGTH_MAX]
            for message in context.messages:
                self._tracer.note(Noted(SENT, "", message.topic, "", 0, -1, time_ms, duration_us, text))
            return
        for result in context.results:
            queue = result.queue
            self._tracer.note(
                Noted(
                    SENT, result.message_id, queue.topic, queue.broker_name, queue.queue_id, result.queue_offset, time_ms,
                    duration_us,
                )
            )  # fmt: skip

    def before_consume(self, context: ConsumeContext) -> None:
        """See Hook."""
        context.notes[self] = time.time_ns() // 1_000_000

    def after_consume(self, context: ConsumeContext) -> None:
        """See Hook."""
        time_ms, duration_us = context.notes[self], int(context.duration_s * 1e6)
        for message, failure in zip(context.messages, context.failures, strict=True):
            queue = message.queue
            attempt = queue.attempt - 1 if isinstance(queue, PoppedQueue) else _attempt_of(message)
            self._tracer.note(
                Noted(
                    CONSUMED, message.message_id, queue.topic, queue.broker_name, queue.queue_id, message.queue_offset,
                    time_ms, duration_us, (failure or "")[:ERROR_LENGTH_MAX], attempt,
                )
            )  # fmt: skip


def _attempt_of(message: Message) -> int:
    try:
        return message.attempt
    except CorruptMessageError:  # Its record does not say it.
        return 0


def traced(
    hooks: HookPoints, options: TransportOptions, namesrv: str | Sequence[str] | None
) -> Tracer:
    """Adds a trace to the hooks of a client, with connections like the client's."""

    def make_producer() -> TraceSender:
        with fork_waits:
            from ._producer import Producer

        connection = ConnectionOptions(
            namesrv=namesrv,
            transport=options.transport,
            client_id=options.client_id,
            peer_timeout_s=options.peer_timeout_s,
            spin=False,
        )
        return Producer(connection=connection, send_timeout_s=CLOSE_TIMEOUT_S, retries=1)

    tracer = Tracer(hooks.group, lambda: hooks.client_id, make_producer)
    hooks.add(TraceHook(tracer))
    return tracer


def close_steps(tracer: Tracer) -> Steps[None]:
    """`Tracer.close`, which blocks."""
    yield Block(tracer.close)
