"""Members of a FakeGroup unsubscribe, rest, stop and leave while messages wait: nothing is lost that a broker would keep."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from protomq import AsyncPushConsumer, Message, PushConsumer, Reject, Retry, Suspend
from protomq.errors import ConfigurationError
from protomq.testing import FakeGroup, FakeMember

Seen = list[tuple[str, str, int]]


def fails_first(name: str, seen: Seen) -> Callable[[Message], None]:
    def listen(message: Message) -> None:
        seen.append((name, message.key, message.attempt))
        if not message.attempt:
            raise ValueError("once")

    return listen


@pytest.mark.parametrize("case", ["only", "another", "in the listener", "later", "taken over"])
def test_a_retry_of_a_topic_that_was_unsubscribed_goes_to_the_listener_that_it_had(case: str) -> None:
    seen: Seen = []
    consumer = PushConsumer("g")

    def listen(message: Message) -> None:
        if case == "in the listener" and not message.attempt:
            consumer.unsubscribe("t1")
        fails_first("old", seen)(message)

    consumer.subscribe("t1", listen, tags=["paid"])
    if case == "another":
        consumer.subscribe("t2", fails_first("other", seen))
    group = FakeGroup(consumer, retry_delays_s=[1])
    group.send("t1", b"", key="a", tag="paid")
    assert group.deliver() == 1
    if case != "in the listener":
        consumer.unsubscribe("t1")
    if case == "taken over":
        consumer.subscribe("t1", fails_first("new", seen), tags=["open"])
    group.advance(1)
    assert group.deliver() == 1
    if case == "later":
        consumer.subscribe("t1", fails_first("new", seen))
        assert group.deliver() == 0
    assert seen == [("old", "a", 0), ("new" if case == "taken over" else "old", "a", 1)]
    assert ([message.key for message in group.done], group.waiting, group.dead_letters) == (["a"], [], [])


def test_a_retry_that_comes_to_a_member_without_its_topic_becomes_a_dead_letter() -> None:
    seen: Seen = []
    first, second = PushConsumer("g"), PushConsumer("g")
    first.subscribe("t1", fails_first("first", seen))
    second.subscribe("t2", fails_first("second", seen))
    group = FakeGroup(first, retry_count_max=2, retry_delays_s=[1])
    group.join(second)
    group.send("t1", b"", key="a")
    group.deliver()
    group.leave(group.members[0])
    for _ in range(2):
        group.advance(1)
        assert group.deliver() == 1
    ((message, error),) = group.dead_letters
    assert (message.key, message.attempt, error) == ("a", 3, "LookupError: this consumer has no listener for topic 't1'")
    assert (seen, group.done, group.waiting) == ([("first", "a", 0)], [], [])


def test_retries_do_not_come_to_a_member_that_has_never_listened() -> None:
    seen: Seen = []
    silent, loud = PushConsumer("g"), PushConsumer("g")
    loud.subscribe("t", fails_first("loud", seen))
    group = FakeGroup(silent, retry_delays_s=[1])
    group.join(loud)
    group.send("t", b"", key="a")
    group.deliver()
    group.advance(1)
    group.deliver()
    assert seen == [("loud", "a", 0), ("loud", "a", 1)]


def test_what_nobody_listens_to_waits_as_at_a_broker() -> None:
    seen: Seen = []
    consumer = PushConsumer("g")
    consumer.subscribe("t1", fails_first("one", seen))
    group = FakeGroup(consumer, retry_delays_s=[1])
    group.send("t2", b"", key="b")
    assert group.deliver() == 0
    assert [message.key for message in group.waiting] == ["b"]
    assert group.next_due_in_s == math.inf, "a loop of `advance` and `deliver` would never end"
    consumer.subscribe("t2", fails_first("two", seen))
    assert (group.next_due_in_s, group.deliver()) == (0, 1)


def test_an_orderly_queue_begins_anew_when_its_topic_is_subscribed_to_again() -> None:
    tries: list[int] = []
    consumer = PushConsumer("g", orderly=True)

    def listen(message: Message) -> Suspend:
        tries.append(message.attempt)
        return Suspend(100_000)

    consumer.subscribe("t", listen)
    group = FakeGroup(consumer)
    group.send("t", b"")
    group.deliver()
    consumer.unsubscribe("t")
    assert (group.deliver(), len(group.waiting), group.next_due_in_s) == (0, 1, math.inf)
    consumer.subscribe("t", listen)
    assert (group.deliver(), tries) == (1, [0, 0])


def test_an_orderly_queue_that_waits_goes_on_at_once_at_the_member_that_gets_it() -> None:
    tries: list[int] = []
    consumer = PushConsumer("g", orderly=True)

    def listen(message: Message) -> Suspend | None:
        tries.append(message.attempt)
        return Suspend(100_000) if len(tries) == 1 else None

    consumer.subscribe("t", listen)
    group = FakeGroup(consumer, queue_count=2)
    second = group.join()
    group.send("t", b"", queue_id=1)
    group.deliver()
    group.leave(second)
    assert (group.deliver(), tries) == (1, [0, 0])


def test_an_unsubscription_commits_what_is_done() -> None:
    consumer = PushConsumer("g")
    consumer.subscribe("t", lambda message: None)
    group = FakeGroup(consumer)
    group.send("t", b"")
    group.deliver()
    consumer.unsubscribe("t")
    assert group.crash() == []


# ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [PushConsumer, AsyncPushConsumer])
def test_a_suspended_member_gets_nothing_until_it_is_resumed(make: type[PushConsumer] | type[AsyncPushConsumer]) -> None:
    keys: list[str] = []
    consumer = make("g")

    def listen(message: Message) -> None:
        keys.append(message.key)
        consumer.suspend()

    consumer.subscribe("t", listen)
    group = FakeGroup(consumer)
    for key in "abc":
        group.send("t", b"", key=key)
    assert (group.deliver(), keys, len(group.waiting), group.next_due_in_s) == (1, ["a"], 2, math.inf)
    assert group.deliver() == 0
    consumer.resume()
    assert (group.deliver(), keys) == (1, ["a", "b"])
    consumer.resume()
    assert asyncio.run(group.deliver_async()) == 1
    assert consumer.is_suspended


def test_a_member_that_is_asked_to_stop_commits_and_leaves() -> None:
    seen: list[tuple[str, str]] = []

    def consumer(name: str) -> PushConsumer:
        made = PushConsumer("g")

        def listen(message: Message) -> None:
            seen.append((name, message.key))
            if name == "one":
                made.request_stop()

        made.subscribe("t", listen)
        return made

    first = consumer("one")
    group = FakeGroup(first, queue_count=2)
    two = group.join(consumer("two"))
    for key in "abc":
        group.send("t", b"", key=key, queue_id=0)
    assert group.deliver() == 3
    assert (seen, group.members) == ([("one", "a"), ("two", "b"), ("two", "c")], [two])
    two.consumer.request_stop()
    group.send("t", b"", key="d")
    assert (group.deliver(), len(group.waiting), group.next_due_in_s) == (0, 1, math.inf)
    assert group.crash() == [], "it had committed"
    assert group.deliver() == 1, "another one like it has come"
    two.consumer.request_stop()
    three = group.join(consumer("three"))
    assert group.members == [three], "the last one stays until another one comes"
    group.send("t", b"", key="e")
    assert (group.deliver(), seen[-1]) == (1, ("three", "e"))
    assert FakeGroup(first).members[0].consumer is first
    group = FakeGroup(first)
    group.send("t", b"", key="f")
    assert group.deliver() == 1, "a FakeGroup is a start: what was asked of the one before is over"


# ------------------------------------------------------------------------------------------------------------------------


class Script:
    """A group whose members do what a script says, and what was sent to them."""

    def __init__(self, is_orderly: bool, retry_count_max: int) -> None:
        self.is_orderly = is_orderly
        self.sent_count = self.repeated_count = 0
        self.keys: set[str] = set()
        self.say: list[object] = []
        """What listeners say next."""
        self.group = FakeGroup(self.consumer(), retry_count_max=retry_count_max, retry_delays_s=[1, 3], queue_count=3)

    def consumer(self, topics: str = "ab") -> PushConsumer:
        made = PushConsumer("g", orderly=self.is_orderly)
        for topic in topics:
            self.subscribe(made, topic)
        return made

    def subscribe(self, consumer: PushConsumer | AsyncPushConsumer, topic: str, batch_size: int | None = None) -> None:
        def listen(_: object) -> object:
            said = self.say.pop() if self.say else None
            if said in ("unsubscribe", "suspend", "stop"):
                self.do(consumer, str(said), topic)
                raise ValueError(said)
            if isinstance(said, Exception):
                raise said
            return said

        consumer.subscribe(topic, listen, batch_size=batch_size)

    def do(self, consumer: PushConsumer | AsyncPushConsumer, step: str, topic: str) -> None:
        """What may be refused, where it is so already."""
        try:
            match step:
                case "subscribe":
                    self.subscribe(consumer, topic)
                case "batch":
                    self.subscribe(consumer, topic, 3)
                case "unsubscribe":
                    consumer.unsubscribe(topic)
                case "suspend":
                    consumer.suspend()
                case "resume":
                    consumer.resume()
                case "stop":
                    consumer.request_stop()
        except ConfigurationError:
            event(f"refused: {step}")

    def member(self, number: int) -> FakeMember:
        return self.group.members[number % len(self.group.members)]

    def check(self) -> None:
        group = self.group
        assert len(group.done) + len(group.waiting) + len(group.dead_letters) == self.sent_count + self.repeated_count
        there = [*group.done, *group.waiting, *(dead.message for dead in group.dead_letters)]
        assert {message.key for message in there} == self.keys

    def run(self, step: str, number: int, topic: str) -> None:
        group = self.group
        match step:
            case "send":
                key = str(self.sent_count)
                group.send(topic, b"", key=key, queue_id=number % 3, delay_s=number // 3 % 2)
                self.sent_count += 1
                self.keys.add(key)
            case "deliver":
                group.deliver()
            case "deliver soon":
                group.advance(number)
                group.deliver()
            case "join":
                group.join(self.consumer(topic))
            case "leave" if len(group.members) > 1:
                group.leave(self.member(number))
            case "crash":
                self.repeated_count += len(group.crash(self.member(number)))
            case "commit":
                group.commit()
            case _:
                self.do(self.member(number).consumer, step, topic)


STEPS = [
    "send", "deliver", "deliver soon", "join", "leave", "crash", "commit", "subscribe", "batch", "unsubscribe", "suspend", "resume", "stop",
]  # fmt: skip
SAYINGS = [None, ValueError("x"), Retry(2), Reject("no"), Suspend(500), Retry(), "unsubscribe", "suspend", "stop"]


@settings(max_examples=200)
@given(
    st.booleans(),
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from([*STEPS[:3], *STEPS]), st.integers(0, 5), st.sampled_from("ab")), max_size=40),
    st.lists(st.sampled_from([*SAYINGS[:2], *SAYINGS]), max_size=20),
)
def test_each_message_is_done_or_waits_or_is_a_dead_letter_whatever_members_do(
    is_orderly: bool, retry_count_max: int, steps: list[tuple[str, int, str]], sayings: list[object]
) -> None:
    script = Script(is_orderly, retry_count_max)
    script.say = list(sayings)
    for step in steps:
        script.run(*step)
        script.check()
    script.say = []
    # Whatever they did, a member that stays and listens gets all that is left.
    stays = script.group.join(script.consumer())
    for member in script.group.members[:]:
        if member is not stays:
            script.group.leave(member)
    while script.group.waiting:
        script.group.advance(script.group.next_due_in_s)
        script.group.deliver()
    script.check()
