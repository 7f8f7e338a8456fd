"""Message trace through a real broker: what clients did is found by the message id; a trace that fails costs its client nothing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from protomq import (
    Admin,
    AsyncProducer,
    AsyncPullConsumer,
    Message,
    OutgoingMessage,
    Producer,
    PullConsumer,
    TraceEvent,
    _trace,
)
from protomq._trace import Noted, Tracer
from protomq.errors import ProtomqError
from protomq.testing import Broker
from protomq.v1 import trace_pb2
from protomq.wire.topics import TRACE_TOPIC
from tests.support.cli import jsonl, run
from tests.support.waiting import wait_for

PATIENCE_S = 60.0


def traced(broker: Broker, message_id: str, count: int) -> list[TraceEvent]:
    """So many events of the message."""
    found: list[TraceEvent] = []

    def is_there() -> bool:
        with Admin(namesrv=broker.namesrv) as admin:
            found[:] = admin.trace_of(message_id)
        return len(found) >= count

    wait_for(is_there)
    return found


def polled(consumer: PullConsumer, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        found += consumer.poll(PATIENCE_S)
    return found


def test_the_trace_of_a_message_says_who_sent_and_who_consumed_it(protomq_server: Broker) -> None:
    namesrv = protomq_server.namesrv
    with Producer("desk", namesrv=namesrv, trace=True) as producer:
        sent = producer.send("traced", b"hello", key="k")
        batch = producer.send_batch("traced", [b"%d" % number for number in range(100)])
    with PullConsumer("readers", namesrv=namesrv, trace=True) as consumer:
        consumer.subscribe("traced")
        polled(consumer, 101)
    with PullConsumer("silent", namesrv=namesrv) as consumer:
        consumer.subscribe("traced")
        polled(consumer, 101)
    first, second = traced(protomq_server, sent.message_id, 2)
    assert (first.kind, first.group, first.error) == ("SENT", "desk", "")
    assert (second.kind, second.group, second.attempt) == ("CONSUMED", "readers", 0)
    for event in (first, second):
        assert (event.message_id, event.queue, event.queue_offset) == (sent.message_id, sent.queue, sent.queue_offset)
        assert 0 < event.duration_s < PATIENCE_S
    assert first.client != second.client
    assert [event.kind for event in traced(protomq_server, batch[99].message_id, 2)] == ["SENT", "CONSUMED"]
    rows = jsonl(run("trace", "show", sent.message_id, "-o", "jsonl", namesrv=namesrv))
    assert [(row["kind"], row["group"]) for row in rows] == [("SENT", "desk"), ("CONSUMED", "readers")]
    nobody = run("trace", "show", "0" * 40, namesrv=namesrv, code=4)
    assert "trace=True" in nobody.stderr


def test_what_another_program_wrote_into_the_topic_is_skipped_with_a_warning(protomq_server: Broker) -> None:
    namesrv = protomq_server.namesrv
    with Producer(namesrv=namesrv, trace=True) as producer:
        sent = producer.send("littered", b"hello")
    traced(protomq_server, sent.message_id, 1)
    at_no_time = trace_pb2.TraceBatch(events=[trace_pb2.TraceEvent(message_id=sent.message_id, time_ms=1 << 62)])
    with Producer(namesrv=namesrv) as producer:
        junk = producer.send(TRACE_TOPIC, b"\xffjunk", key=sent.message_id)
        late = producer.send(TRACE_TOPIC, at_no_time.SerializeToString(), key=sent.message_id)
    shown = run("trace", "show", sent.message_id, "-o", "jsonl", namesrv=namesrv)
    assert [row["kind"] for row in jsonl(shown)] == ["SENT"]
    assert f"protomq: message {junk.message_id} of {TRACE_TOPIC} is no trace\n" in shown.stderr
    assert f"protomq: message {late.message_id} of {TRACE_TOPIC} has an event at no time: time_ms {1 << 62}\n" in shown.stderr


def test_coroutines_trace_too(protomq_server: Broker) -> None:
    async def clients() -> str:
        async with (
            AsyncProducer("async-desk", namesrv=protomq_server.namesrv, trace=True) as producer,
            AsyncPullConsumer("async-readers", namesrv=protomq_server.namesrv, trace=True) as consumer,
        ):
            sent = await producer.send(OutgoingMessage("traced-async", b"hello"))
            await consumer.subscribe("traced-async")
            while not await consumer.poll(1.0):
                pass
            return sent.message_id

    message_id = asyncio.run(asyncio.wait_for(clients(), PATIENCE_S))
    assert [event.group for event in traced(protomq_server, message_id, 2)] == ["async-desk", "async-readers"]


def test_a_trace_that_cannot_be_sent_costs_its_client_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"PROTOMQ_AUTO_CREATE_TOPICS": "false"}
    with Broker(data_dir=tmp_path, environment=settings) as broker:
        with Admin(namesrv=broker.namesrv) as admin:
            admin.create_topic("lonely")
        with (
            caplog.at_level(logging.WARNING, "protomq"),
            Producer(namesrv=broker.namesrv, trace=True) as producer,
        ):
            assert producer.send("lonely", b"hello").queue.topic == "lonely"
            wait_for(lambda: "traces are dropped, 1 by now" in caplog.text)
            assert producer.send("lonely", b"again").queue.topic == "lonely"
        assert caplog.text.count("traces are dropped") == 1, "told once"


def test_a_send_that_fails_is_noted_with_its_error_and_a_one_way_send_is_not(
    protomq_server: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Noted] = []
    with Producer(namesrv=protomq_server.namesrv, trace=True, send_timeout_s=0.5) as producer:
        assert producer._tracer is not None
        monkeypatch.setattr(producer._tracer, "note", noted.append)
        with pytest.raises(ProtomqError):
            producer.send("%SYS%forbidden", b"hello")
        producer.send("fine", b"hello")
        producer.send_one_way("fine", b"hello")
    assert [(event.kind, event.topic, bool(event.error)) for event in noted] == [
        (_trace.SENT, "%SYS%forbidden", True),
        (_trace.SENT, "fine", False),
    ]


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trace, "PENDING_MAX", 3)
    tracer = Tracer("g", lambda: "c", Producer)
    monkeypatch.setattr(tracer, "_begin", lambda: None)
    for number in range(5):
        tracer.note(Noted(_trace.SENT, str(number), "t", "b", 0, number, 0, 0))
    assert ([event.message_id for event in tracer._pending], tracer.dropped_count) == (["0", "1", "2"], 2)
    tracer.close()
