"""A signal handler's error that has hit gRPC itself: it reaches the caller, and a channel whose calls end no more is made anew.

The channels are fakes.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import FrameType
from typing import Any

import grpc
import pytest

from protomq import _grpc_transport
from protomq._grpc_transport import GrpcLink
from protomq._methods import SEND
from protomq.errors import RequestTimeoutError


class FakeChannel:
    """`answer`: of each call; None: it never ends."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.close_ends = threading.Event()
        self.is_closed = threading.Event()
        self.cancelled_count = 0

    def unary_unary(self, _: str) -> FakeChannel:
        return self

    def future(self, _: bytes, timeout: float) -> FakeChannel:
        return self

    def result(self, _: float) -> bytes:
        if self.answer is None:
            raise grpc.FutureTimeoutError
        return self.answer

    def cancel(self) -> None:
        self.cancelled_count += 1

    def close(self) -> None:
        """Waits for its calls, as gRPC's does."""
        if self.answer is None:
            self.close_ends.wait()
        self.is_closed.set()


def test_a_call_that_does_not_end_in_time_ends_all_the_same_and_the_next_one_has_a_new_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, new = channels = [FakeChannel(None), FakeChannel(b"stored")]

    def make(*_: Any, **__: Any) -> FakeChannel:
        return channels.pop(0)

    monkeypatch.setattr(grpc, "insecure_channel", make)
    monkeypatch.setattr(_grpc_transport, "STUCK_S", 0.0)
    link = GrpcLink("a:1")

    def send() -> bytes:
        return link.call(SEND, [b"x"], 0.001, False, lambda: False)

    with pytest.raises(RequestTimeoutError, match=f"a:1: no answer to {SEND.path} in time") as caught:
        send()
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert stuck.cancelled_count == 1
    assert send() == b"stored"
    assert not stuck.is_closed.is_set(), "nobody waits for that"
    assert not new.is_closed.is_set()
    link.close()
    assert new.is_closed.is_set()
    stuck.close_ends.set()
    assert stuck.is_closed.wait(5.0)


def test_the_close_of_a_link_does_not_wait_for_a_stuck_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = FakeChannel(None)
    monkeypatch.setattr(grpc, "insecure_channel", lambda *_, **__: stuck)
    monkeypatch.setattr(_grpc_transport, "CLOSE_S", 0.0)
    GrpcLink("a:1").close()
    assert not stuck.is_closed.is_set()
    stuck.close_ends.set()
    assert stuck.is_closed.wait(5.0)


def test_a_link_is_closed_where_no_thread_can_begin_as_in_atexit(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    channel = FakeChannel(b"")
    monkeypatch.setattr(grpc, "insecure_channel", lambda *_, **__: channel)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    GrpcLink("a:1").close()
    assert channel.is_closed.is_set()


def test_a_stuck_channel_is_not_collected_for_that_would_wait_for_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = FakeChannel(None)
    found, ends, channels = weakref.ref(channel), channel.close_ends, [FakeChannel(b""), channel]
    monkeypatch.setattr(grpc, "insecure_channel", lambda *_, **__: channels.pop())
    monkeypatch.setattr(_grpc_transport, "STUCK_S", 0.0)
    link = GrpcLink("a:1")
    del channel
    with pytest.raises(RequestTimeoutError):
        link.call(SEND, [b"x"], 0.001, False, lambda: False)
    gc.collect()
    assert found() is not None
    ends.set()


class WaitingChannel(FakeChannel):
    """Its calls wait as gRPC's do; the answer comes before anybody waits for it."""

    def result(self, _: float) -> bytes:
        condition = threading.Condition()
        with condition:
            condition.wait(0.0)
        return b"stored"


class HandlerAt:
    """A profiler that raises an error at one of the places in `threading.Condition.wait`, as a signal handler does."""

    def __init__(self, place: int, error: type[BaseException]) -> None:
        self.left = place
        self._error = error

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code is threading.Condition.wait.__code__:
            self.left -= 1
            if not self.left:
                sys.setprofile(None)
                raise self._error("of the handler")


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, LookupError])
def test_the_error_of_a_handler_that_comes_inside_grpcs_own_wait_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    monkeypatch.setattr(grpc, "insecure_channel", lambda *_, **__: WaitingChannel(b""))
    link = GrpcLink("a:1")

    def outcome_with_handler_at(place: int) -> bytes | str:
        sys.setprofile(HandlerAt(place, error))
        try:
            return link.call(SEND, [b"x"], 1.0, False, lambda: False)
        except error as caught:
            return str(caught)
        finally:
            sys.setprofile(None)

    outcomes = [outcome_with_handler_at(1)]
    while outcomes[-1] != b"stored":
        outcomes.append(outcome_with_handler_at(len(outcomes) + 1))
    assert outcomes[:-1] == ["of the handler"] * (len(outcomes) - 1)
    assert len(outcomes) > 5


class ThreadlessChannel(FakeChannel):
    """No thread is left for its calls."""

    def future(self, _: bytes, timeout: float) -> FakeChannel:
        raise RuntimeError("can't start new thread")


def test_an_error_of_a_call_that_is_made_behind_ctrl_c_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a program commits in its `except KeyboardInterrupt`."""
    monkeypatch.setattr(grpc, "insecure_channel", lambda *_, **__: ThreadlessChannel(b""))
    link = GrpcLink("a:1")
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError, match="new thread"):
            link.call(SEND, [b"x"], 1.0, False, lambda: False)
