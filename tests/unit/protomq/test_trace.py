"""The trace's thread: what it cannot send costs only that. Without brokers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

import pytest

from protomq._hook_points import HookPoints
from protomq._message import Message
from protomq._trace import SENT, Noted, TraceHook, Tracer, events_of
from protomq._types import MessageQueue
from protomq.v1.trace_pb2 import TraceBatch, TraceKind
from protomq.v1.trace_pb2 import TraceEvent as TraceEventPb
from protomq.wire.record import RecordTemplate
from protomq.wire.topics import TRACE_TOPIC
from tests.support.waiting import wait_for

PATIENCE_S = 10.0


class Sender:
    """In place of a producer: keeps the errors of the events that it was to send."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.raises: Exception | None = None

    def send(self, topic: str, body: bytes, *, keys: Sequence[str]) -> object:
        error, self.raises = self.raises, None
        if error is not None:
            raise error
        self.errors += [event.error for event in TraceBatch.FromString(body).events]
        return None

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None: ...


def noted(error: str, queue_id: int = 0) -> Noted:
    return Noted(SENT, "", "T", "", queue_id, -1, 1, 1, error)


@pytest.fixture
def sender() -> Sender:
    return Sender()


@pytest.fixture
def tracer(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> Tracer:
    monkeypatch.setattr("protomq._trace.INTERVAL_S", 0.01)
    return Tracer("g", lambda: "c", lambda: sender)


def test_an_error_text_that_is_no_utf_8_is_told_all_the_same(sender: Sender, tracer: Tracer) -> None:
    tracer.note(noted("no \ud800"))
    wait_for(lambda: sender.errors, PATIENCE_S, pause_s=0.001)
    tracer.close()
    assert sender.errors == ["no ?"]


@pytest.mark.parametrize("is_event", [True, False])
def test_what_cannot_be_sent_is_dropped_and_told_and_what_comes_after_is_sent(
    sender: Sender, tracer: Tracer, is_event: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if not is_event:
        sender.raises = RuntimeError("can't start new thread")
    tracer.note(noted("first", queue_id=1 << 40 if is_event else 0))
    wait_for(lambda: tracer.dropped_count, PATIENCE_S, pause_s=0.001)
    tracer.note(noted("second"))
    wait_for(lambda: sender.errors, PATIENCE_S, pause_s=0.001)
    tracer.close()
    assert (sender.errors, tracer.dropped_count) == (["second"], 1)
    assert "traces are dropped, 1 by now" in caplog.text


def test_a_thread_that_cannot_be_started_fails_nobody_and_is_started_by_the_next_event(
    sender: Sender, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        tracer.note(noted("first"))
    tracer.note(noted("second"))
    wait_for(lambda: len(sender.errors) == 2, PATIENCE_S, pause_s=0.001)
    tracer.close()
    assert sender.errors == ["first", "second"]


ID = "51F740DA45E007A7000000000000000000000000"


def traced(*events: TraceEventPb) -> list[tuple[str, int]]:
    body = TraceBatch(events=[TraceEventPb(message_id=ID), *events]).SerializeToString()
    record = RecordTemplate(TRACE_TOPIC, 1, 0).encode(body, 2, 3)
    message = Message.from_record(record, MessageQueue(TRACE_TOPIC, "b", 0), 0)
    return [(event.kind, round(event.time.timestamp() * 1000)) for event in events_of([message], ID)]


def test_an_event_of_a_newer_client_has_a_kind_of_its_own() -> None:
    newer = cast("TraceKind.ValueType", 99)
    known = TraceEventPb(message_id=ID, kind=TraceKind.TRACE_KIND_SENT, time_ms=5)
    found = traced(TraceEventPb(message_id=ID, kind=newer, time_ms=7), known)
    assert found == [("UNSPECIFIED", 0), ("SENT", 5), ("KIND_99", 7)]


@pytest.mark.parametrize("time_ms", [-(1 << 63), (1 << 63) - 1, 1_700_000_000_000_000, -100_000_000_000_000])
def test_an_event_at_no_time_is_skipped_and_told(time_ms: int, caplog: pytest.LogCaptureFixture) -> None:
    assert traced(TraceEventPb(message_id=ID, kind=TraceKind.TRACE_KIND_SENT, time_ms=time_ms)) == [("UNSPECIFIED", 0)]
    assert TRACE_TOPIC in caplog.text
    assert str(time_ms) in caplog.text


def test_a_damaged_message_is_traced_as_those_beside_it(sender: Sender, tracer: Tracer) -> None:
    queue = MessageQueue("T", "b", 0)
    record = RecordTemplate("T", 7, 0).encode(b"body", 1, 1)
    messages = [Message.from_record(octets, queue, 0) for octets in (record, record.replace(b"body", b"bodi"), record)]
    assert [message.is_damaged for message in messages] == [False, True, False]
    hooks = HookPoints("g", [TraceHook(tracer)])
    hooks.after_consume(hooks.before_consume(messages), [None, "damaged", None])
    wait_for(lambda: sender.errors, PATIENCE_S, pause_s=0.001)
    assert sender.errors == ["", "damaged", ""]
