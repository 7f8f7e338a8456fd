"""The trace's thread: what it cannot send costs only that. Without brokers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from protomq._trace import SENT, Noted, Tracer
from protomq.v1.trace_pb2 import TraceBatch
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
