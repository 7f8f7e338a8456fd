"""A channel of gRPC whose calls end no more, for a signal handler's error has hit gRPC itself: it is made anew. The channels are fakes."""

from __future__ import annotations

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
        self.is_closed = False
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
        self.is_closed = True


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
    assert (stuck.is_closed, stuck.cancelled_count) == (False, 1), "its close would wait for the call"
    assert send() == b"stored"
    assert not new.is_closed
