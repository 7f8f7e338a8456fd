"""A run of the push benchmark whose messages stop coming is no result. No server: the consumer here gives what it has and no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.bench.loads import push
from tests.bench.measure import Counter


class FakeConsumer:
    """Gives its listener three messages when it starts."""

    def __init__(self, group: str, **_: Any) -> None:
        self.group = group

    def subscribe(self, topic: str, listener: Callable[[Any], None], **_: Any) -> None:
        self._listener = listener

    def __enter__(self) -> FakeConsumer:
        for _ in range(3):
            self._listener(SimpleNamespace(body=b"12"))
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Trickle:
    """An event that is never set, while a message comes in each half second."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def wait(self, timeout: float) -> bool:
        self._counter.messages += 1
        return False


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "PushConsumer", FakeConsumer)
    monkeypatch.setattr(push, "PATIENCE_S", 0.01)


def listen(messages: int, *, parts: bool = False) -> int:
    return push.listen("127.0.0.1:1", "t", "g", messages, None, False, (), parts).messages


def test_all_messages_that_were_wanted_are_a_result() -> None:
    assert listen(3) == 3


@pytest.mark.parametrize("parts", [False, True])
def test_messages_that_stop_coming_are_none(parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "PART_S", 0.02)
    with pytest.raises(RuntimeError):
        listen(4, parts=parts)


def test_nor_is_the_median_of_messages_that_come_too_slowly() -> None:
    counter = Counter()
    with pytest.raises(RuntimeError, match=r"\d+ of 1000000000 messages"):
        push._median_part(counter, (), cast("threading.Event", Trickle(counter)), 1_000_000_000)
    assert counter.messages
