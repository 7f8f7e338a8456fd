"""Ctrl-C may come anywhere: also between a line's word that the caller leads, and what would give the line back. No next call hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from protomq import Producer
from protomq._end_lines import EndLine
from protomq._transactions import End
from protomq.errors import ProtomqError
from tests.support.fake_cluster import FakeCluster, FakeSyncTransport
from tests.support.interrupts import interrupted_everywhere
from tests.support.waiting import wait_for

from .test_end_lines import end_of

SOON_S = 5.0


def producer() -> Producer:
    made = Producer(transport=FakeSyncTransport(FakeCluster()))
    made.send("T", b"first", sharding_key="k")
    return made


@pytest.mark.parametrize(
    "send",
    [
        lambda made: made.send("T", b"x", timeout_s=SOON_S),
        lambda made: made.send("T", b"x", sharding_key="k", timeout_s=SOON_S),
        lambda made: made.send_async("T", b"x", timeout_s=SOON_S).result(SOON_S),
    ],
    ids=["send", "send to a queue", "send_async"],
)
def test_a_send_that_is_interrupted_leaves_its_line_to_the_next(send: Callable[[Producer], object]) -> None:
    places = []
    for place, made in interrupted_everywhere(producer, send):
        places.append(place)
        with made:
            send(made)
            made.flush(SOON_S)
            wait_for(lambda made=made: not any(line.busy for line in made._lines.values()), SOON_S, pause_s=0.001)  # type: ignore[misc]
    assert any("try_to_lead" in place or "enter" in place for place in places)


def test_a_send_that_leads_others_and_is_interrupted_leaves_nobody_waiting() -> None:
    """Another message gathers while the interrupted one is on its way."""

    class Busy:
        def __init__(self) -> None:
            self.producer = producer()
            self.line = self.producer._line("T", None, None)
            self.ended = threading.Event()
            dispatch = self.producer._dispatch

            def dispatch_slowly(*arguments: Any) -> Any:
                if self.thread.ident is None:
                    self.thread.start()
                    wait_for(lambda: bool(self.line._pending), SOON_S, pause_s=0.0001)
                return dispatch(*arguments)

            self.producer._dispatch = dispatch_slowly  # type: ignore[method-assign, assignment]
            self.thread = threading.Thread(target=self.follow, daemon=True)

        def follow(self) -> None:
            with suppress(ProtomqError):
                self.producer.send("T", b"other", timeout_s=3 * SOON_S)
            self.ended.set()

    for place, made in interrupted_everywhere(Busy, lambda made: made.producer.send("T", b"x", timeout_s=SOON_S)):
        if made.thread.ident is not None:
            assert made.ended.wait(SOON_S), place
        made.producer.send("T", b"y", timeout_s=SOON_S)
        made.producer.close()


def test_a_decision_that_is_interrupted_leaves_its_line_to_the_next() -> None:
    def made() -> EndLine:
        return EndLine(lambda ends, _: [False for _ in ends])

    for place, line in interrupted_everywhere(made, lambda line: line.end(end_of("interrupted"), SOON_S)):
        assert not line.end(end_of("later"), SOON_S), place


def test_a_decision_that_leads_others_and_is_interrupted_leaves_nobody_waiting() -> None:
    """Another decision gathers while the interrupted one is on its way."""

    class Busy:
        def __init__(self) -> None:
            self.line = EndLine(self.call)
            self.ended = threading.Event()
            self.thread = threading.Thread(target=self.follow, daemon=True)

        def call(self, ends: Sequence[End], _: float) -> list[bool | ProtomqError]:
            if self.thread.ident is None:
                self.thread.start()
                wait_for(lambda: bool(self.line._waiting), SOON_S, pause_s=0.0001)
            return [False for _ in ends]

        def follow(self) -> None:
            with suppress(ProtomqError):
                self.line.end(end_of("other"), 3 * SOON_S)
            self.ended.set()

    for place, made in interrupted_everywhere(Busy, lambda made: made.line.end(end_of("interrupted"), SOON_S)):
        if made.thread.ident is not None:
            assert made.ended.wait(SOON_S), place
        assert not made.line.end(end_of("later"), SOON_S), place
        wait_for(lambda line=made.line: line._leader is None, SOON_S, pause_s=0.001)  # type: ignore[misc]


def test_no_thread_is_left_behind_that_waits_for_nothing() -> None:
    for _, made in interrupted_everywhere(producer, lambda made: made.send("T", b"x", timeout_s=SOON_S)):
        made.close()
    for _ in interrupted_everywhere(lambda: EndLine(lambda ends, _: [False for _ in ends]), lambda line: line.end(end_of("x"), SOON_S)):
        pass
    wait_for(lambda: not any(one.name == "protomq-interrupted" for one in threading.enumerate()), SOON_S, pause_s=0.001)


def test_a_send_that_waits_in_line_and_is_interrupted_leaves_nobody_waiting() -> None:
    """Another thread leads, and comes back when the message waits, or when its caller was interrupted before."""

    class Busy:
        def __init__(self) -> None:
            self.producer = producer()
            self.line = self.producer._line("T", None, None)
            self.is_over = False
            self.thread = threading.Thread(target=self.lead, daemon=True)
            dispatch = self.producer._dispatch

            def dispatch_slowly(*arguments: Any) -> Any:
                if threading.current_thread() is self.thread:
                    wait_for(lambda: bool(self.line._pending) or self.is_over, SOON_S, pause_s=0.0001)
                return dispatch(*arguments)

            self.producer._dispatch = dispatch_slowly  # type: ignore[method-assign, assignment]
            self.thread.start()
            wait_for(lambda: self.line.busy, SOON_S, pause_s=0.0001)

        def lead(self) -> None:
            self.producer.send("T", b"leads", timeout_s=3 * SOON_S)

    for place, made in interrupted_everywhere(Busy, lambda made: made.producer.send("T", b"x", timeout_s=SOON_S)):
        made.is_over = True
        made.thread.join(SOON_S)
        assert not made.thread.is_alive(), place
        made.producer.send("T", b"later", timeout_s=SOON_S)
        made.producer.close()
    wait_for(lambda: not any(one.name == "protomq-interrupted" for one in threading.enumerate()), SOON_S, pause_s=0.001)
