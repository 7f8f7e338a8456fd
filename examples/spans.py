"""OpenTelemetry: a flight that is sent and handled is one trace, though two programs may do it; the context travels in the message."""

import os
import sys
import threading

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protomq import Message, Producer, ProtomqError, PushConsumer
from protomq.otel import Spans

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "traced-flights"


def main() -> None:
    # In a program of yours: where spans go is set once, for all libraries (trace.set_tracer_provider), and Spans() takes that.
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    handled = threading.Event()
    consumer = PushConsumer("radar", namesrv=NAMESRV, hooks=[Spans(tracer_provider=tracers)])

    @consumer.on(TOPIC)
    def watch(message: Message) -> None:
        print("the message carries", ", ".join(sorted(message.properties)))
        handled.set()

    with Producer("desk", namesrv=NAMESRV, hooks=[Spans(tracer_provider=tracers)]) as producer:
        producer.send(TOPIC, b"UA1545", tag="UA", key="N14228")
    with consumer:
        handled.wait(30)

    spans = {span.name: span for span in exporter.get_finished_spans()}
    sent, processed = spans[f"send {TOPIC}"], spans[f"process {TOPIC}"]
    for span in (sent, processed):
        group = (span.attributes or {}).get("messaging.consumer.group.name", "nobody's")
        print(f"{span.name}: {span.kind.name}, group: {group!s}")
    is_child = (
        processed.parent is not None
        and sent.context is not None
        and processed.parent.span_id == sent.context.span_id
    )
    print("the second is a child of the first:", is_child)


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
