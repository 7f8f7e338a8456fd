"""Orderly listeners of batches that stop at the first failure: nothing behind it is lost, or dies untried, whatever they say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq import AsyncPushConsumer, DelayLevel, Message, PushConsumer, Reject, Retry, Suspend
from protomq._push_results import BEHIND, Failure, judge
from protomq.errors import SchemaError
from protomq.testing import FakeGroup

FAILED = [Retry(0.5, "bad"), Reject("bad"), Suspend(10, "bad")]


def listen_until(failed: Any, fails: Callable[[int], bool], rest: Any, ran: list[int]) -> Callable[[Sequence[Message]], list[Any]]:
    """A listener that stops at its first failure, and fills its list up with `rest`."""

    def listen(messages: Sequence[Message]) -> list[Any]:
        said: list[Any] = []
        for message in messages:
            number = int(message.body)
            if fails(number):
                said.append(failed)
                break
            ran.append(number)
            said.append(None)
        return said + [rest] * (len(messages) - len(said))

    return listen


def outcome(client: Any, listener: Any, count: int, batch_size: int, attempts_max: int = 2) -> FakeGroup:
    async def listen_async(messages: Sequence[Message]) -> Any:
        await asyncio.sleep(0)
        return listener(messages)

    consumer = client("g", orderly=True, suspend_ms=100, attempts_max=attempts_max)
    consumer.subscribe("t", listen_async if client is AsyncPushConsumer else listener, batch_size=batch_size)
    group = FakeGroup(consumer, queue_count=1)
    for number in range(count):
        group.send("t", str(number).encode(), queue_id=0)
    group.deliver()
    for _ in range(attempts_max * count):
        if not group.waiting:
            break
        group.advance(1)
        group.deliver()
    assert not group.waiting
    return group


@pytest.mark.parametrize("client", [PushConsumer, AsyncPushConsumer])
@pytest.mark.parametrize("failed", FAILED)
@pytest.mark.parametrize("rest", [None, Retry(error="not yet"), Reject("never looked at")])
def test_what_stands_behind_a_dead_letter_is_run(client: Any, failed: Any, rest: Any) -> None:
    ran: list[int] = []
    group = outcome(client, listen_until(failed, lambda number: number == 2, rest, ran), 10, 5)
    assert ran == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert [(letter.message.body, letter.error) for letter in group.dead_letters] == [(b"2", "bad")]


@given(
    failing=st.sets(st.integers(0, 19)), batch_size=st.integers(1, 7), failed=st.sampled_from(FAILED),
    rest=st.sampled_from([None, Retry(), Reject(), Suspend(1)]), attempts_max=st.integers(1, 4),
)  # fmt: skip
def test_each_message_is_run_once_or_dead_after_its_tries(
    failing: set[int], batch_size: int, failed: Any, rest: Any, attempts_max: int
) -> None:
    ran: list[int] = []
    group = outcome(PushConsumer, listen_until(failed, failing.__contains__, rest, ran), 20, batch_size, attempts_max)
    assert ran == [number for number in range(20) if number not in failing]
    assert [int(letter.message.body) for letter in group.dead_letters] == sorted(failing)


def test_a_list_counts_up_to_its_first_failure() -> None:
    said = [None, Retry(3, "e"), None, Reject()]
    assert judge(said, 4, in_order=True).failures[2:] == [BEHIND, BEHIND]
    assert judge(said, 4, in_order=True).failures[:2] == judge(said, 4).failures[:2]
    assert judge([Reject("x"), None], 2, is_batch=True, in_order=True).failures == [
        Failure({"error": "x", "dead_letter": True}), BEHIND,
    ]  # fmt: skip


def test_a_body_that_does_not_decode_stands_before_nothing() -> None:
    """The listener was given the others, so it knows what became of them."""
    failures = judge([SchemaError("no JSON"), None, Retry(), None], 4, in_order=True).failures
    assert failures[0] is not None
    assert failures[0].is_dead_letter
    assert failures[1] is None
    assert failures[3] is BEHIND


def test_what_is_said_of_all_counts_for_all() -> None:
    """Raised, or one result for the batch: each is tried, as RocketMQ's checkReconsumeTimes counts."""
    group = outcome(PushConsumer, lambda _: Reject("all"), 4, 2)
    assert [letter.error for letter in group.dead_letters] == ["all"] * 4


@pytest.mark.parametrize("how", ["raises", "one result", "wrong length"])
@pytest.mark.parametrize("bad", [(), (0,), (2,), (1, 3), (0, 4)])
def test_it_counts_for_all_where_a_body_does_not_decode(how: str, bad: Sequence[int]) -> None:
    calls: list[list[dict[str, int]]] = []

    def listen(values: list[dict[str, int]]) -> object:
        calls.append(values)
        if how == "raises":
            raise LookupError("none")
        return Retry() if how == "one result" else [None] * 9

    consumer = PushConsumer("g", orderly=True, suspend_ms=100, attempts_max=3)
    consumer.subscribe("t", listen, batch_size=5)
    group = FakeGroup(consumer, queue_count=1)
    for number in range(5):
        group.send("t", b"no JSON" if number in bad else b'{"n": %d}' % number, queue_id=0)
    for _ in range(3):
        assert group.deliver()
        group.advance(0.1)
    assert not group.waiting
    assert calls == [[{"n": number} for number in range(5) if number not in bad]] * 3
    assert len(group.dead_letters) == 5


@pytest.mark.parametrize(
    ("delay", "waits_s"), [(DelayLevel(2), 5.0), (DelayLevel(18), 7200.0), (DelayLevel(99), 7200.0), (5, 5.0), (None, 0.1)]
)
@pytest.mark.parametrize("batch_size", [None, 3])
def test_an_orderly_queue_waits_for_the_delay(delay: Any, waits_s: float, batch_size: int | None) -> None:
    consumer = PushConsumer("g", orderly=True, suspend_ms=100)
    said = Retry(delay)
    consumer.subscribe("t", lambda _: [said] if batch_size else said, batch_size=batch_size)
    group = FakeGroup(consumer)
    group.send("t", b"")
    group.deliver()
    assert group.next_due_in_s == waits_s
