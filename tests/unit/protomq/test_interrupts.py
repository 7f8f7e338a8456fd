"""Ctrl-C may come anywhere: also between a line's word that the caller leads, and what would give the line back. No next call hangs."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from protomq import Producer
from protomq._end_lines import EndLine
from protomq._interrupts import comes_of_signal, is_interrupt
from protomq._transactions import End
from protomq.errors import ProtomqError
from tests.support.fake_cluster import FakeCluster, FakeSyncTransport
from tests.support.interrupts import interrupted_everywhere
from tests.support.waiting import wait_for

from .test_end_lines import end_of

SOON_S = 5.0
ERRORS = [KeyboardInterrupt, TimeoutError]
"""What signal handlers raise: of Ctrl-C, and of many alarms."""


class Alarm:
    """A handler that is no function."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    def ring(self, *_: object) -> None:
        raise OSError("rings")


@pytest.mark.parametrize("handler", [Alarm(), Alarm().ring, functools.partial(Alarm()), lambda number, _: {}[number]])
def test_what_a_signal_handler_raises_is_told_from_what_is_raised_where_it_comes(handler: Any) -> None:
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises((OSError, KeyError)) as caught:
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert comes_of_signal(caught.value)
    assert is_interrupt(caught.value)


def test_an_error_of_the_code_itself_is_no_interrupt() -> None:
    def fail(depth: int) -> None:
        if not depth:
            raise TimeoutError
        fail(depth - 1)

    with pytest.raises(TimeoutError) as caught:
        fail(3)
    assert not is_interrupt(caught.value)
    assert not is_interrupt(TimeoutError())
    assert is_interrupt(SystemExit())


def producer() -> Producer:
    made = Producer(transport=FakeSyncTransport(FakeCluster()))
    made.send("T", b"first", sharding_key="k")
    return made


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    "send",
    [
        lambda made: made.send("T", b"x", timeout_s=SOON_S),
        lambda made: made.send("T", b"x", sharding_key="k", timeout_s=SOON_S),
        lambda made: made.send_async("T", b"x", timeout_s=SOON_S).result(SOON_S),
    ],
    ids=["send", "send to a queue", "send_async"],
)
def test_a_send_that_is_interrupted_leaves_its_line_to_the_next(
    send: Callable[[Producer], object], error: type[BaseException]
) -> None:
    places = []
    for place, made in interrupted_everywhere(producer, send, error):
        places.append(place)
        with made:
            send(made)
            made.flush(SOON_S)
            wait_for(lambda made=made: not any(line.busy for line in made._lines.values()), SOON_S, pause_s=0.001)  # type: ignore[misc]
    assert any("try_to_lead" in place or "enter" in place for place in places)


@pytest.mark.parametrize("error", ERRORS)
def test_a_send_that_leads_others_and_is_interrupted_leaves_nobody_waiting(error: type[BaseException]) -> None:
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

    for place, made in interrupted_everywhere(Busy, lambda made: made.producer.send("T", b"x", timeout_s=SOON_S), error):
        if made.thread.ident is not None:
            assert made.ended.wait(SOON_S), place
        made.producer.send("T", b"y", timeout_s=SOON_S)
        made.producer.close()


@pytest.mark.parametrize("error", ERRORS)
def test_a_decision_that_is_interrupted_leaves_its_line_to_the_next(error: type[BaseException]) -> None:
    def made() -> EndLine:
        return EndLine(lambda ends, _: [False for _ in ends])

    for place, line in interrupted_everywhere(made, lambda line: line.end(end_of("interrupted"), SOON_S), error):
        assert not line.end(end_of("later"), SOON_S), place


@pytest.mark.parametrize("error", ERRORS)
def test_a_decision_that_leads_others_and_is_interrupted_leaves_nobody_waiting(error: type[BaseException]) -> None:
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

    for place, made in interrupted_everywhere(Busy, lambda made: made.line.end(end_of("interrupted"), SOON_S), error):
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


@pytest.mark.parametrize("error", ERRORS)
def test_a_send_that_waits_in_line_and_is_interrupted_leaves_nobody_waiting(error: type[BaseException]) -> None:
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

    for place, made in interrupted_everywhere(Busy, lambda made: made.producer.send("T", b"x", timeout_s=SOON_S), error):
        made.is_over = True
        made.thread.join(SOON_S)
        assert not made.thread.is_alive(), place
        made.producer.send("T", b"later", timeout_s=SOON_S)
        made.producer.close()
    wait_for(lambda: not any(one.name == "protomq-interrupted" for one in threading.enumerate()), SOON_S, pause_s=0.001)
