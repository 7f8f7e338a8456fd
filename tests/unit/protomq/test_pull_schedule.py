"""When a queue of a scheduled pull is due: values only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from protomq import MessageQueue
from protomq._pull_schedule import PullSchedule
from protomq.errors import ConfigurationError, WrongTypeError

Q0, Q1 = MessageQueue("T", "b", 0), MessageQueue("T", "b", 1)


def schedule(next_delay_ms: int = 200) -> PullSchedule:
    return PullSchedule(print, next_delay_ms, may_wait=False)


def test_a_queue_is_due_after_what_was_said_of_it_and_others_go_on() -> None:
    made = schedule()
    assert (made.not_due((Q0, Q1), 0.0), made.next_due_in_s(0.0)) == ([], 1.0)
    made.pulled(Q0, 500, 0.0)
    made.pulled(Q1, None, 0.1)
    assert made.not_due((Q0, Q1), 0.1) == [Q0, Q1]
    assert made.next_due_in_s(0.1) == pytest.approx(0.2)
    assert made.not_due((Q0, Q1), 0.31) == [Q0]
    assert made.not_due((Q0, Q1), 0.5) == []
    made.pulled(Q0, 10_000, 1.0)
    assert made.next_due_in_s(1.0) == 1.0  # What is due is polled meanwhile.
    assert made.not_due((Q1,), 1.0) == []
    assert made.not_due((Q0, Q1), 1.0) == []  # It went, and came back.


def test_after_a_failure_it_is_due_in_a_second_and_nonsense_counts_as_nothing_said(caplog: pytest.LogCaptureFixture) -> None:
    made = schedule(50)
    made.failed(Q0, ValueError("no"), 0.0)
    assert (made.not_due((Q0,), 0.99), made.not_due((Q0,), 1.0)) == ([Q0], [])
    for nonsense in (-1, True, 1.5, "1", 41 * 86_400_000):
        made.pulled(Q0, nonsense, 2.0)
        assert (made.not_due((Q0,), 2.04), made.not_due((Q0,), 2.06)) == ([Q0], [])
        assert sum("no delay in milliseconds" in record.message for record in caplog.records) == 1
    made.pulled(Q0, -1, 62.0)
    assert sum("no delay in milliseconds" in record.message for record in caplog.records) == 2


def test_a_failure_is_logged_once_a_minute_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    made = schedule()
    for now_s in range(60):
        for queue in (Q0, Q1):
            made.failed(queue, ValueError("no"), now_s)
        assert made.not_due((Q0, Q1), now_s + 0.5) == [Q0, Q1]
    made.failed(Q0, KeyError("k"), 59.0)
    assert len(caplog.records) == 2
    made.failed(Q0, ValueError("no"), 60.0)
    assert len(caplog.records) == 3
    assert "a further ValueError is not logged for a minute" in caplog.text


def test_what_does_not_take_a_queue_and_messages_is_refused() -> None:
    def one(messages: object) -> None: ...

    def three(queue: object, messages: object, session: object) -> None: ...

    def lazily(queue: object, messages: object) -> Iterator[int]:
        yield 0

    def good(queue: object, messages: object, session: object = None) -> None: ...

    wrong: list[Any] = [one, three, lambda: 0]
    for pull in wrong:
        with pytest.raises(ConfigurationError, match=r"pull is called as pull\(queue, messages\), which <function .* does not take"):
            PullSchedule(pull, 1, may_wait=True)
    with pytest.raises(WrongTypeError, match="pull has a yield"):
        PullSchedule(lazily, 1, may_wait=True)
    PullSchedule(good, 1, may_wait=False)


def test_what_cannot_be_called_is_refused() -> None:
    async def pull(queue: object, messages: object) -> None:
        raise AssertionError

    with pytest.raises(WrongTypeError, match="only AsyncPullConsumer"):
        PullSchedule(pull, 1, may_wait=False)
    PullSchedule(pull, 1, may_wait=True)
    with pytest.raises(WrongTypeError, match="a function"):
        PullSchedule(7, 1, may_wait=True)
    with pytest.raises(ConfigurationError):
        schedule(-1)
