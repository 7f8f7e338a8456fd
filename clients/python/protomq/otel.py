"""OpenTelemetry for clients: a hook that makes spans, and carries their context from producers to consumers in messages.

    from protomq.otel import Spans

    Producer("desk", hooks=[Spans()])          PushConsumer("billing", hooks=[Spans()])

Needs the extra `otel`. What is made of the spans is the application's: a tracer provider of the SDK, set globally or handed in. The
spans follow the semantic conventions for messaging spans (version 1.36, in development there):

    send T       PRODUCER; its context goes into the message. Of a batch: CLIENT, linked to the messages' own
    create T     PRODUCER; one for each message of a batch: its context goes into the message
    receive T    CLIENT; of a `poll` or `receive` that brought messages, or failed; linked to the messages' contexts
    ack T        CLIENT, as `nack T`: popped messages are settled; linked to the messages' contexts
    commit T     CLIENT; of type settle as these: a broker is told a group's offsets, also by the client itself. It knows no messages
    process T    CONSUMER; linked to the messages' contexts. One message, and no span around: it is a child, too

Rules:
- The context stands in the properties `traceparent` and `tracestate`, as W3C Trace Context has them. Those that a message has already stay
  as they are; the send span is linked to them.
- While a listener works, its span is the current one. Spans of pull and simple consumers end when the program is done with the messages,
  and are never current.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import Token
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ._requests import CORRELATION_ID
from .errors import ProtomqError
from .hooks import CommitContext, ConsumeContext, Hook, ReceiveContext, SendContext, SettleContext

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace
    from opentelemetry.trace import (
        Link,
        Span,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TracerProvider,
    )
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError('protomq.otel needs OpenTelemetry: pip install "protomq[otel]"') from error

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from ._message import Message
    from ._outgoing import OutgoingMessage

__all__ = ["Spans"]

SYSTEM: Final = "protomq"
LINKS_MAX: Final = 128
"""Of a span: what OpenTelemetry's SDKs keep by default."""
TRACE_PARENT: Final = "traceparent"
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_NO_CONTEXT: Final = otel_context.Context()


class _Processing(NamedTuple):
    span: Span
    token: Token[Context] | None


class Spans(Hook):
    """Makes spans of what a client sends and consumes. One may be given to many clients.

    `tracer_provider`: whose spans these are; None: the global one, as it is when a span begins. `is_child`: whether the span of a single
    message, with no span around it, is a child of the producer's span, in its trace. False: it is only linked to it. `create_spans`:
    whether each message of a batch has a span of its own; without, all of them carry the context of the one `send` span.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        is_child: bool = True,
        create_spans: bool = True,
    ) -> None:
        self._tracer = trace.get_tracer("protomq", tracer_provider=tracer_provider)
        self._is_child = is_child
        self._create_spans = create_spans

    # Sends.

    def before_send(self, context: SendContext) -> None:
        """See Hook."""
        messages = context.messages
        creations = [_context_of(message.properties or {}) for message in messages]
        if context.is_batch and self._create_spans:
            for index, message in enumerate(messages):
                if not _is_valid(creations[index]):
                    span = self._start("create", context, SpanKind.PRODUCER)
                    creations[index] = trace.set_span_in_context(span, _NO_CONTEXT)
                    messages[index] = _with_context(message, creations[index])
                    span.end()
        is_creation = not any(map(_is_valid, creations))
        kind = SpanKind.PRODUCER if is_creation else SpanKind.CLIENT
        span = self._start("send", context, kind, _links(creations))
        context.notes[self] = span
        for index, message in enumerate(messages):
            if not _is_valid(creations[index]):
                messages[index] = _with_context(message, trace.set_span_in_context(span, _NO_CONTEXT))

    def after_send(self, context: SendContext) -> None:
        """See Hook."""
        span: Span | None = context.notes.pop(self, None)
        if span is None:
            return
        if len(context.results) == 1:
            (result,) = context.results
            span.set_attribute("messaging.message.id", result.message_id)
            span.set_attribute("messaging.destination.partition.id", str(result.queue.queue_id))
        span.set_attributes(_server(context.server_address))
        _end(span, context.error, "" if context.error is None else str(context.error))

    def _start(
        self, operation: str, context: SendContext, kind: SpanKind, links: Sequence[Link] = ()
    ) -> Span:
        attributes = _attributes(operation, operation, context.topic, context.client_id)
        if operation == "send" and context.is_batch:
            attributes["messaging.batch.message_count"] = len(context.messages)
        elif operation == "send":
            _add_conversation(attributes, context.messages[0].properties or {})
        return self._tracer.start_span(
            f"{operation} {context.topic}", kind=kind, attributes=attributes, links=links
        )

    # Messages that are consumed.

    def before_consume(self, context: ConsumeContext) -> None:
        """See Hook."""
        messages = context.messages
        creations = [_context_of(_properties_of(message)) for message in messages]
        topic = _one_topic_of(messages)
        attributes = _attributes("process", "process", topic, context.client_id) | _server(context.server_address)
        if context.group:
            attributes["messaging.consumer.group.name"] = context.group
        _add_messages(attributes, messages)
        parent = None
        if len(messages) == 1 and self._is_child and not _is_valid(otel_context.get_current()):
            parent = creations[0]
        span = self._tracer.start_span(
            f"process {topic}".rstrip(), parent, SpanKind.CONSUMER, attributes, _links(creations, messages)
        )
        token = otel_context.attach(trace.set_span_in_context(span)) if context.listener else None
        context.notes[self] = _Processing(span, token)

    def after_consume(self, context: ConsumeContext) -> None:
        """See Hook."""
        processing: _Processing | None = context.notes.pop(self, None)
        if processing is None:
            return
        if processing.token is not None:
            otel_context.detach(processing.token)
        failures = [failure for failure in context.failures if failure is not None]
        error = context.error if context.error is not None or not failures else "not_done"
        _end(processing.span, error, failures[0] if failures else "")

    # What is asked of brokers for that.

    def after_receive(self, context: ReceiveContext) -> None:
        """See Hook."""
        if context.messages or context.error is not None:
            self._tell("receive", "receive", context, context.topic)

    def after_settle(self, context: SettleContext) -> None:
        """See Hook."""
        self._tell(context.operation, "settle", context, "")

    def after_commit(self, context: CommitContext) -> None:
        """See Hook."""
        attributes = _attributes("commit", "settle", context.topic, context.client_id) | _server(context.server_address)
        attributes["messaging.consumer.group.name"] = context.group
        if len(context.offsets) == 1:
            (queue,) = context.offsets
            attributes["messaging.destination.partition.id"] = str(queue.queue_id)
        ended_ns = time.time_ns()
        began_ns = ended_ns - int(context.duration_s * 1e9)
        span = self._tracer.start_span(f"commit {context.topic}", None, SpanKind.CLIENT, attributes, start_time=began_ns)
        _end(span, context.error, "" if context.error is None else str(context.error), ended_ns)

    def _tell(
        self, name: str, type_: str, context: ReceiveContext | SettleContext, topic: str
    ) -> None:
        """A span of what is over: only then it is known to what it is linked."""
        messages = context.messages
        topic = topic or _one_topic_of(messages)
        attributes = _attributes(name, type_, topic, context.client_id) | _server(context.server_address)
        if context.group:
            attributes["messaging.consumer.group.name"] = context.group
        _add_messages(attributes, messages)
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{name} {topic}".rstrip(),
            None,
            SpanKind.CLIENT,
            attributes,
            _links([_context_of(_properties_of(message)) for message in messages], messages),
            ended_ns - int(context.duration_s * 1e9),
        )
        _end(span, context.error, "" if context.error is None else str(context.error), ended_ns)


def _one_topic_of(messages: Sequence[Message]) -> str:
    """Of all of them; "" if they are of several."""
    topics = {message.queue.topic for message in messages}
    return topics.pop() if len(topics) == 1 else ""


def _add_messages(attributes: dict[str, Any], messages: Sequence[Message]) -> None:
    if len(messages) == 1:
        (message,) = messages
        attributes["messaging.message.id"] = message.message_id
        attributes["messaging.destination.partition.id"] = str(message.queue.queue_id)
        _add_conversation(attributes, _properties_of(message))
    elif messages:
        attributes["messaging.batch.message_count"] = len(messages)


def _attributes(name: str, type_: str, topic: str, client_id: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": type_,
        "messaging.client.id": client_id,
    }
    if topic:
        attributes["messaging.destination.name"] = topic
    return attributes


def _server(address: str) -> dict[str, str | int]:
    """The attributes of a server at host:port; none if it is not known."""
    host, _, port = address.rpartition(":")
    return {"server.address": host.strip("[]"), "server.port": int(port)} if host and port.isdecimal() else {}


def _add_conversation(attributes: dict[str, Any], properties: Mapping[str, str]) -> None:
    if conversation := properties.get(CORRELATION_ID):
        attributes["messaging.message.conversation_id"] = conversation


def _end(
    span: Span, error: BaseException | str | None, text: str, ended_ns: int | None = None
) -> None:
    if error is not None:
        kind = error if isinstance(error, str) else getattr(error, "reason", "") or type(error).__qualname__
        span.set_attribute("error.type", kind)
        span.set_status(Status(StatusCode.ERROR, text))
    span.end(ended_ns)


def _context_of(properties: Mapping[str, str]) -> Context:
    """Which context a message carries; an empty one if it has none."""
    if TRACE_PARENT not in properties:
        return _NO_CONTEXT
    return _PROPAGATOR.extract(properties, _NO_CONTEXT)


def _with_context(message: OutgoingMessage, context: Context) -> OutgoingMessage:
    """The message that carries the context, unless it carries one already, or there is nobody who makes spans."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    properties = message.properties or {}
    if not carrier or TRACE_PARENT in properties:
        return message
    return replace(message, properties={**properties, **carrier})


def _links(contexts: Sequence[Context], messages: Sequence[Message] = ()) -> list[Link]:
    """One for each context. `messages`: whose contexts these are; where there are several, a link has the id of the one that it is of."""
    once: dict[tuple[int, int], tuple[SpanContext, set[str]]] = {}
    for index, context in enumerate(contexts):
        if _is_valid(context):
            one = trace.get_current_span(context).get_span_context()
            ids = once.setdefault((one.trace_id, one.span_id), (one, set()))[1]
            if len(messages) > 1:
                ids.add(messages[index].message_id)
    return [
        Link(one, {"messaging.message.id": next(iter(ids))} if len(ids) == 1 else None) for one, ids in list(once.values())[:LINKS_MAX]
    ]


def _is_valid(context: Context) -> bool:
    return trace.get_current_span(context).get_span_context().is_valid


def _properties_of(message: Message) -> Mapping[str, str]:
    try:
        return message.properties
    except ProtomqError:  # A damaged message says nothing of itself.
        return {}
