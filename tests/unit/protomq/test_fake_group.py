"""Listeners without a broker: retries come when their time has come, with what a broker would say of them, and end as dead letters."""

from __future__ import annotations

import asyncio
import math
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from protomq import AsyncPushConsumer, DelayLevel, Message, PushConsumer, Reject, Retry, Suspend
from protomq.allocation import Circle, Configured
from protomq.asgi import Messaging
from protomq.errors import ConfigurationError, QueueNotFoundError, WrongTypeError
from protomq.hooks import Hook
from protomq.testing import Broker, FakeGroup, FaultProxy, Faults
from protomq.v1.record_pb2 import Record
from protomq.wire.hashing import sharded_index, sharding_hash_of


def test_a_message_that_fails_comes_again_after_the_groups_delays_and_is_a_dead_letter_in_the_end() -> None:
    consumer = PushConsumer("billing")
    seen: list[tuple[bytes, int, str, str]] = []

    @consumer.on("orders")
    def bill(message: Message) -> None:
        seen.append((message.body, message.attempt, message.last_error, message.topic))
        if message.body == b"poison":
            raise ValueError(f"no {message.attempt}")

    group = FakeGroup(consumer, retry_count_max=2)
    group.send("orders", b"good", key="k", tag="t", properties={"a": "b"}, queue_id=3)
    poison = group.send("orders", b"poison", key="p", tag="t", properties={"c": "d"})
    assert group.deliver() == 2
    assert (group.next_due_in_s, group.deliver()) == (10.0, 0)
    group.advance(9.9)
    assert group.deliver() == 0
    group.advance(0.1)
    assert group.deliver() == 1
    (waiting,) = group.waiting
    assert (waiting.message_id, waiting.key, waiting.tag, dict(waiting.properties)) == (poison.message_id, "p", "t", {"c": "d"})
    group.advance(30)
    assert group.deliver() == 1
    assert seen == [
        (b"good", 0, "", "orders"),
        (b"poison", 0, "", "orders"),
        (b"poison", 1, "ValueError: no 0", "%RETRY%billing"),
        (b"poison", 2, "ValueError: no 1", "%RETRY%billing"),
    ]
    ((dead, error),) = group.dead_letters
    assert (dead.body, error, group.waiting) == (b"poison", "ValueError: no 2", [])
    assert (dead.topic, dead.attempt, dead.last_error) == ("%DLQ%billing", 3, error)
    assert dead.origin is not None
    assert dead.origin[:3] == ("orders", 0, 0)
    (good,) = group.done
    assert (good.key, good.tag, good.properties, good.queue_id) == ("k", "t", {"a": "b"}, 3)


def test_a_level_beyond_the_last_of_the_broker_waits_for_the_last() -> None:
    for make, due_s in ((FakeGroup, 7200), (partial(FakeGroup, delay_levels_s=[1, 60]), 60)):
        consumer = PushConsumer("g")
        consumer.subscribe("t", lambda _: Retry(DelayLevel(19)))
        group = make(consumer)
        group.send("t", b"x")
        assert (group.deliver(), group.next_due_in_s) == (1, due_s)


def test_a_sharding_key_chooses_the_queue_and_stays_with_the_message() -> None:
    consumer = PushConsumer("g")
    consumer.subscribe("t", lambda _: Retry())
    group = FakeGroup(consumer)
    sent = [group.send("t", b"x", sharding_key=key) for key in ("a", "b", "a")]
    assert [message.queue_id for message in sent] == [sharded_index(key, 8) for key in ("a", "b", "a")]
    assert sent[0].queue_id != sent[1].queue_id
    assert group.send("t", b"x", sharding_key="a", queue_id=7).queue_id == 7
    assert group.send("t", b"x").queue_id == 0
    assert group.deliver() == 5
    assert sorted(message.sharding_key for message in group.waiting) == ["", "a", "a", "a", "b"]


def test_results_and_delays_and_tags() -> None:
    consumer = AsyncPushConsumer("g")
    seen: list[bytes] = []

    @consumer.on("t", tags=["a"])
    async def listen(message: Message) -> object:
        await asyncio.sleep(0)
        seen.append(message.body)
        if message.body == b"reject":
            return Reject("never")
        return Retry(delay=0.5) if message.body == b"retry" and not message.attempt else None

    group = FakeGroup(consumer)
    for body in (b"reject", b"retry", b"late"):
        group.send("t", body, tag="a", delay_s=5.0 if body == b"late" else 0.0)
    group.send("t", b"other", tag="b")
    group.send("u", b"nobody")
    assert group.deliver() == 2
    assert [(one.message.body, one.error) for one in group.dead_letters] == [(b"reject", "never")]
    group.advance(0.5)
    group.deliver()
    group.advance(4.5)
    group.deliver()
    assert seen == [b"reject", b"retry", b"retry", b"late"]
    assert [message.body for message in group.done] == [b"retry", b"late"]


def test_batches_have_a_result_for_each_message() -> None:
    consumer = PushConsumer("g")
    sizes: list[int] = []

    def listen(batch: list[Message]) -> object:
        sizes.append(len(batch))
        return [Reject("odd") if int(message.body) % 2 else None for message in batch]

    consumer.subscribe("t", listen, batch_size=4)
    group = FakeGroup(consumer)
    for number in range(10):
        group.send("t", b"%d" % number)
    group.deliver()
    assert sizes == [4, 4, 2]
    assert [int(message.body) for message in group.done] == [0, 2, 4, 6, 8]
    assert len(group.dead_letters) == 5


def test_a_list_is_of_one_queue_and_a_retry_is_stored_when_it_is_due() -> None:
    consumer = PushConsumer("g")
    seen: list[list[bytes]] = []

    @consumer.on("t", batch_size=8)
    def listen(messages: list[Message]) -> Retry | None:
        seen.append([message.body for message in messages])
        return Retry(delay=30) if len(seen) == 1 else None

    group = FakeGroup(consumer)
    sent = [group.send("t", body, queue_id=queue_id) for body, queue_id in ((b"a", 0), (b"b", 1), (b"c", 0))]
    assert group.deliver() == 3
    assert seen == [[b"a", b"c"], [b"b"]]
    group.advance(30)
    group.send("t", b"d")
    assert [message.store_time_ms - sent[0].store_time_ms for message in group.waiting] == [30_000] * 3
    group.deliver()
    assert seen[2:] == [[b"a", b"c"], [b"d"]]


def test_an_orderly_batch_is_of_one_queue_and_waits_at_its_first_message_that_fails() -> None:
    consumer = PushConsumer("g", orderly=True, suspend_ms=100)
    seen: list[list[str]] = []
    results: list[object] = [[None, Reject("no"), Suspend(50), None], None, [Suspend(50), None, None], RuntimeError("all"), None]

    def listen(batch: list[Message]) -> object:
        seen.append([f"{message.body.decode()}.{message.attempt}" for message in batch])
        match results.pop(0):
            case RuntimeError() as error:
                raise error
            case result:
                return result

    consumer.subscribe("t", listen, batch_size=4)
    group = FakeGroup(consumer)
    for number in range(5):
        group.send("t", b"a%d" % number)
        if number < 2:
            group.send("t", b"b%d" % number, queue_id=1)
    group.deliver()
    assert ([one.body for one in group.done], group.next_due_in_s) == ([b"a0", b"b0", b"b1"], 0.05)
    group.advance(0.05)
    group.deliver()
    group.advance(0.1)
    group.deliver()
    tried = [["a2.0", "a3.0", "a4.0"], ["a2.1", "a3.0", "a4.0"], ["a2.2", "a3.1", "a4.1"]]
    assert seen == [["a0.0", "a1.0", "a2.0", "a3.0"], ["b0.0", "b1.0"], *tried]
    assert [one.body for one in group.done] == [b"a0", b"b0", b"b1", b"a2", b"a3", b"a4"]
    assert [one.message.body for one in group.dead_letters] == [b"a1"]


def test_the_last_error_has_as_many_octets_as_a_broker_keeps() -> None:
    consumer = PushConsumer("g")
    errors: list[str] = []

    def listen(message: Message) -> object:
        errors.append(message.last_error)
        return Retry(delay=1.0, error="e" + "ß" * 400)

    consumer.subscribe("t", listen)
    group = FakeGroup(consumer, retry_count_max=1)
    group.send("t", b"x")
    group.deliver()
    group.advance(1.0)
    group.deliver()
    assert errors == ["", "e" + "ß" * 255], "511 octets: no half character"
    assert [len(one.error.encode()) for one in group.dead_letters] == [511]


def test_an_orderly_message_is_tried_until_its_attempts_are_spent() -> None:
    consumer = PushConsumer("g", orderly=True, suspend_ms=100, attempts_max=3)
    results: list[object] = [Suspend(50, "not yet"), Retry(), Retry()]
    attempts: list[tuple[int, str]] = []

    def listen(message: Message) -> object:
        if message.body != b"x":
            return None
        attempts.append((message.attempt, message.last_error))
        return results.pop(0)

    consumer.subscribe("t", listen)
    group = FakeGroup(consumer)
    group.send("t", b"x")
    group.send("t", b"behind")
    group.send("t", b"elsewhere", queue_id=1)
    assert (group.deliver(), [one.body for one in group.done]) == (2, [b"elsewhere"])
    assert group.next_due_in_s == 0.05
    group.advance(0.05)
    group.deliver()
    assert group.next_due_in_s == 0.1
    group.advance(0.1)
    group.deliver()
    assert [one.message.body for one in group.dead_letters] == [b"x"]
    assert [one.body for one in group.done] == [b"elsewhere", b"behind"]
    assert attempts == [(0, ""), (1, "not yet"), (2, "")]


@pytest.mark.parametrize(("settings", "limits", "tries"), [
    ({}, {"retry_count_max": 2}, 3), ({}, {"retry_count_max": 0}, 1), ({"attempts_max": 4}, {"retry_count_max": 2}, 4), ({}, {}, None)
])  # fmt: skip
def test_an_orderly_message_is_tried_as_often_as_the_group_says(
    settings: dict[str, Any], limits: dict[str, Any], tries: int | None
) -> None:
    consumer = PushConsumer("g", orderly=True, suspend_ms=1000, **settings)
    attempts: list[int] = []

    @consumer.on("t")
    def listen(message: Message) -> object:
        attempts.append(message.attempt)
        return Retry(error="always")

    group = FakeGroup(consumer, **limits)
    group.send("t", b"x")
    for _ in range(40):
        group.deliver()
        group.advance(1)
    assert attempts == list(range(tries or 40))
    assert [(one.message.body, one.error) for one in group.dead_letters] == ([(b"x", "always")] if tries else [])


def test_a_consumer_that_runs_is_refused() -> None:
    class Runs(PushConsumer):
        is_running = True

    with pytest.raises(ConfigurationError, match="this consumer runs"):
        FakeGroup(Runs("g"))
    with pytest.raises(ConfigurationError, match="one delay of a retry"):
        FakeGroup(PushConsumer("g"), retry_delays_s=[])


def test_a_crash_repeats_what_was_not_committed_and_nothing_else() -> None:
    consumer = PushConsumer("g")
    seen: list[bytes] = []

    @consumer.on("t")
    def listen(message: Message) -> None:
        seen.append(message.body)
        if message.body == b"fails" and not message.attempt:
            raise ValueError("once")

    group = FakeGroup(consumer)
    group.send("t", b"committed")
    group.deliver()
    group.advance(5)
    group.send("t", b"good")
    group.send("t", b"fails")
    group.deliver()
    group.send("t", b"behind")
    assert [message.body for message in group.crash()] == [b"good", b"fails"]
    assert group.crash() == []
    group.deliver()
    assert seen == [b"committed", b"good", b"fails", b"good", b"fails", b"behind"]
    assert len(group.waiting) == 2  # The broker has made a retry of it twice.
    group.commit()
    assert group.crash() == []
    group.advance(10)
    assert group.deliver() == 2
    group.advance(4.999)
    assert len(group.crash()) == 2


def test_an_orderly_message_that_holds_up_its_queue_is_not_delivered_twice_by_a_crash() -> None:
    consumer = PushConsumer("g", orderly=True, attempts_max=2)
    consumer.subscribe("t", lambda message: Suspend(50) if message.body == b"x" else None)
    group = FakeGroup(consumer)
    group.send("t", b"x")
    group.deliver()
    assert group.crash() == []
    assert [message.body for message in group.waiting] == [b"x"]
    group.deliver()  # By the member that took over: it waits for nothing, and counts from the beginning.
    assert group.dead_letters == []
    group.advance(0.05)
    group.deliver()
    assert len(group.dead_letters) == 1
    assert [message.body for message in group.crash()] == [b"x"]  # That it is dead was not committed.


BAD: list[tuple[Any, str]] = [
    (lambda g: FakeGroup(None), "FakeGroup takes a PushConsumer or AsyncPushConsumer, not None"),  # type: ignore[arg-type]
    (lambda g: FakeGroup(Messaging().consumer("g")), "write consumer.make"),  # type: ignore[arg-type]
    (lambda g: FakeGroup(PushConsumer("g"), retry_count_max=-1), "retry_count_max is 0 to"),
    (lambda g: FakeGroup(PushConsumer("g"), retry_count_max="x"), "retry_count_max is an int"),  # type: ignore[arg-type]
    (lambda g: FakeGroup(PushConsumer("g"), retry_delays_s=5), "retry_delays_s is a list of seconds"),  # type: ignore[arg-type]
    (lambda g: FakeGroup(PushConsumer("g"), retry_delays_s=[-1]), "each of retry_delays_s is 0 to"),
    (lambda g: FakeGroup(PushConsumer("g"), retry_delays_s=[math.nan]), "each of retry_delays_s is 0 to"),
    (lambda g: FakeGroup(PushConsumer("g"), clock=5), "clock is a FakeClock"),  # type: ignore[arg-type]
    (lambda g: g.deliver(), "no member of group 'g' has a listener: subscribe one, or import the module that does"),
    (lambda g: asyncio.run(g.deliver_async()), "no member of group 'g' has a listener"),
    (lambda g: g.advance(math.nan), "seconds is 0 to"),
    (lambda g: g.advance(1e300), "seconds is 0 to"),
    (lambda g: g.advance(-1), "seconds is 0 to"),
    (lambda g: g.advance("5"), "seconds is a number of seconds"),
    (lambda g: g.advance(timedelta(seconds=5)), "seconds is a number of seconds"),
    (lambda g: g.send(None, b""), "topic is a str"),
    (lambda g: g.send("a b", b""), "cannot be the name of a topic"),
    (lambda g: g.send("t", None), "body"),
    (lambda g: g.send("t", b"", key=5), "key is a str or None"),
    (lambda g: g.send("t", b"", tag=5), "tag is a str"),
    (lambda g: g.send("t", b"", properties={"a": 5}), "properties is a dict of str to str"),
    (lambda g: g.send("t", b"", delay_s=-1), "delay_s is 0 to"),
    (lambda g: g.send("t", b"", delay_s=math.inf), "delay_s is 0 to"),
    (lambda g: g.send("t", b"", delay_s="5"), "delay_s is a number of seconds"),
    (lambda g: g.send("t", b"", queue_id=-1), "queue_id is 0 to"),
    (lambda g: g.send("t", b"", queue_id="1"), "queue_id is an int"),
    (lambda g: FaultProxy("foo"), "target is HOST:PORT"),
    (lambda g: FaultProxy(5), "target is a str"),  # type: ignore[arg-type]
    (lambda g: Faults(rate_bytes_per_s=0), "rate_bytes_per_s is 1 or more, not 0"),
    (lambda g: Faults(rate_bytes_per_s=-5), "rate_bytes_per_s is 1 or more"),
    (lambda g: Faults(rate_bytes_per_s=1.5), "rate_bytes_per_s is an int"),  # type: ignore[arg-type]
    (lambda g: Faults(delay_s=-1), "delay_s is 0 to"),
    (lambda g: Faults(delay_s="x"), "delay_s is a number"),  # type: ignore[arg-type]
    (lambda g: Faults(jitter_s=-1), "jitter_s is 0 to"),
    (lambda g: Faults(jitter_s=math.nan), "jitter_s is 0 to"),
    (lambda g: Faults(loss_probability="x"), "loss_probability is a number from 0 to 1"),  # type: ignore[arg-type]
    (lambda g: Faults(cut_probability=1.5), "cut_probability is 0 to 1, not 1.5"),
    (lambda g: Faults(cut_after_answer_bytes=-1), "cut_after_answer_bytes is 0 or more"),
    (lambda g: Faults(drop_answers="no"), "drop_answers is True or False"),  # type: ignore[arg-type]
    (lambda g: Broker(environment={"PROTOMQ_X": 5}), "environment is a dict of str to str"),  # type: ignore[dict-item]
]


@pytest.mark.parametrize(("do", "text"), BAD, ids=[text for _, text in BAD])
def test_what_a_producer_or_a_broker_refuses_is_refused_here(do: Any, text: str) -> None:
    group = FakeGroup(PushConsumer("g"))
    with pytest.raises((ConfigurationError, WrongTypeError), match=text):
        do(group)
    assert group.waiting == []


def test_in_an_event_loop_coroutines_are_delivered_by_awaiting() -> None:
    seen: list[bytes] = []

    async def listen(message: Message) -> None:
        await asyncio.sleep(0)
        seen.append(message.body)

    async def run() -> None:
        consumer = AsyncPushConsumer("g")
        group = FakeGroup(consumer)
        group.send("t", b"a")
        consumer.subscribe("t", listen)
        with pytest.raises(ConfigurationError, match=r"await group.deliver_async\(\)"):
            group.deliver()
        assert await group.deliver_async() == 1
        consumer.unsubscribe("t")
        consumer.subscribe("t", lambda message: seen.append(message.body))
        group.send("t", b"b")
        assert await group.deliver_async() == 1
        assert len(group.done) == 2

    asyncio.run(run())
    assert seen == [b"a", b"b"]


def test_a_message_whose_delivery_is_cancelled_comes_again() -> None:
    seen: list[bytes] = []

    async def listen(message: Message) -> None:
        seen.append(message.body)
        if len(seen) == 1:
            await asyncio.Event().wait()

    async def run() -> None:
        consumer = AsyncPushConsumer("g")
        consumer.subscribe("t", listen)
        group = FakeGroup(consumer)
        group.send("t", b"a")
        delivery = asyncio.create_task(group.deliver_async())
        await asyncio.sleep(0)
        delivery.cancel()
        with pytest.raises(asyncio.CancelledError):
            await delivery
        assert await group.deliver_async() == 1
        assert [message.body for message in group.done] == [b"a"]

    asyncio.run(run())
    assert seen == [b"a", b"a"]


def two_members(**options: Any) -> tuple[FakeGroup, list[tuple[str, bytes]]]:
    """A group whose members note what they are given: their names, and the bodies."""
    seen: list[tuple[str, bytes]] = []

    def consumer(name: str) -> PushConsumer:
        made = PushConsumer("g", **options)
        made.subscribe("t", lambda message: seen.append((name, message.body)))
        return made

    group = FakeGroup(consumer("one"), queue_count=4)
    group.join(consumer("two"))
    return group, seen


def send_to_each_queue(group: FakeGroup) -> None:
    for queue_id in range(4):
        group.send("t", b"%d" % queue_id, queue_id=queue_id)


def test_members_share_queues_out_and_each_listener_gets_its_own() -> None:
    group, seen = two_members()
    one, two = group.members
    assert (group.queue_ids(one, "t"), group.queue_ids(two, "t")) == ([0, 1], [2, 3])
    send_to_each_queue(group)
    assert group.deliver() == 4
    assert seen == [("one", b"0"), ("one", b"1"), ("two", b"2"), ("two", b"3")]
    assert [[message.body for message in member.done] for member in group.members] == [[b"0", b"1"], [b"2", b"3"]]
    assert len(group.done) == 4


def test_the_share_of_a_member_that_crashes_is_taken_over_with_what_it_has_not_committed() -> None:
    group, seen = two_members()
    one, two = group.members
    send_to_each_queue(group)
    group.deliver()
    group.commit()
    send_to_each_queue(group)
    group.deliver()
    seen.clear()
    assert [message.body for message in group.crash(two)] == [b"2", b"3"]
    assert group.members == [one]
    group.send("t", b"new", queue_id=3)
    assert group.deliver() == 3
    assert seen == [("one", b"2"), ("one", b"3"), ("one", b"new")]
    assert [message.body for message in group.crash()] == [b"0", b"1", *(body for _, body in seen)], "now all is its own"


def test_a_member_that_joins_or_leaves_repeats_nothing() -> None:
    group, seen = two_members()
    send_to_each_queue(group)
    group.deliver()
    three = group.join()
    assert [group.queue_ids(member, "t") for member in group.members] == [[0, 1], [2], [3]]
    assert [message.body for message in group.crash(group.members[1])] == [b"2"], "what moved to the third was committed before"
    group.deliver()
    seen.clear()
    group.leave(three)
    group.crash()
    group.deliver()
    assert {name for name, _ in seen} == {"one"}
    assert b"3" not in {body for _, body in seen}


def test_an_orderly_queue_that_waits_goes_on_at_its_next_owner() -> None:
    tries: list[str] = []

    def consumer(name: str) -> PushConsumer:
        made = PushConsumer("g", orderly=True)

        def listen(message: Message) -> None:
            tries.append(name)
            if name == "two":
                raise ValueError("not here")

        made.subscribe("t", listen)
        return made

    group = FakeGroup(consumer("one"), queue_count=2)
    two = group.join(consumer("two"))
    group.send("t", b"x", queue_id=1)
    assert group.deliver() == 1
    assert group.next_due_in_s > 0
    assert group.crash(two) == []
    assert group.deliver() == 1
    assert tries == ["two", "one"]


def test_members_share_out_by_the_allocation_of_their_consumers() -> None:
    group, _ = two_members(allocation=Circle())
    assert [group.queue_ids(member, "t") for member in group.members] == [[0, 2], [1, 3]]
    nobodys, seen = two_members(allocation=Configured(()))
    nobodys.send("t", b"x", queue_id=3)
    assert nobodys.deliver() == 0
    assert len(nobodys.waiting) == 1
    assert not seen


def test_retries_come_to_one_member() -> None:
    names: list[str] = []

    def consumer(name: str) -> PushConsumer:
        made = PushConsumer("g")

        def listen(message: Message) -> None:
            names.append(name)
            if not message.attempt:
                raise ValueError("once")

        made.subscribe("t", listen)
        return made

    group = FakeGroup(consumer("one"), queue_count=2)
    group.join(consumer("two"))
    for queue_id in (0, 1):
        group.send("t", b"x", queue_id=queue_id)
    group.deliver()
    group.advance(10)
    group.deliver()
    assert names == ["one", "two", "one", "one"], "the topic of retries has one queue at a broker"


@pytest.mark.parametrize(
    ("do", "text"),
    [
        (lambda group: group.crash(), "say which of 2 members"),
        (lambda group: group.join(PushConsumer("other")), "'other' cannot join 'g'"),
        (lambda group: group.join(PushConsumer("g", broadcast=True)), "gets all messages"),
        (lambda group: (group.leave(group.members[1]), group.leave(group.members[0])), "last member cannot leave"),
        (lambda group: (gone := group.members[1], group.crash(gone), group.crash(gone)), "no member of this group"),
    ],
)
def test_what_a_group_of_members_refuses(do: Any, text: str) -> None:
    group, _ = two_members()
    with pytest.raises(ConfigurationError, match=text):
        do(group)


def test_hooks_are_asked_which_messages_the_program_gets_each_time_they_are_pulled() -> None:
    asked: list[tuple[str, int]] = []

    class Keeps(Hook):
        def keeps(self, message: Message) -> bool:
            asked.append((message.key, message.attempt))
            return message.key != "drop"

    for batch_size in (None, 10):
        for is_orderly in (False, True):
            asked.clear()
            seen: list[tuple[str, int]] = []
            consumer = PushConsumer("g", orderly=is_orderly, hooks=[Keeps()])

            def listen(given: Any, seen: list[tuple[str, int]] = seen, batch_size: int | None = batch_size) -> Any:
                batch = [given] if batch_size is None else given
                seen += [(message.key, message.attempt) for message in batch]
                results = [Retry() if message.key == "bad" and not message.attempt else None for message in batch]
                return results[0] if batch_size is None else results

            consumer.subscribe("t", listen, batch_size=batch_size)
            group = FakeGroup(consumer, retry_delays_s=[1])
            for key in ("drop", "bad", "good"):
                group.send("t", b"", key=key)
            group.deliver()
            group.advance(1)
            group.deliver()
            assert not group.waiting
            assert {key for key, _ in seen} == {"bad", "good"}
            # In order it is tried again where it is; else its retry is pulled.
            assert asked == [("drop", 0), ("bad", 0), ("good", 0)] + ([] if is_orderly else [("bad", 1)])


def test_what_a_hook_that_ends_the_program_leaves_comes_again() -> None:
    class Ends(Hook):
        def keeps(self, message: Message) -> bool:
            if message.key == "end" and not seen:
                seen.append(b"")
                raise KeyboardInterrupt
            return True

    seen: list[bytes] = []
    consumer = PushConsumer("g", hooks=[Ends()])
    consumer.subscribe("t", lambda messages: seen.extend(message.body for message in messages), batch_size=10)
    group = FakeGroup(consumer)
    group.send("t", b"1")
    group.send("t", b"2", key="end")
    with pytest.raises(KeyboardInterrupt):
        group.deliver()
    assert group.deliver() == 2
    assert seen == [b"", b"1", b"2"]


def test_a_delayed_message_says_where_it_comes_from_as_one_of_a_broker_does() -> None:
    consumer = PushConsumer("g")
    seen: list[Message] = []

    @consumer.on("t")
    def listen(message: Message) -> None:
        seen.append(message)
        if not message.attempt:
            raise ValueError("x")

    group = FakeGroup(consumer, retry_delays_s=[1])
    sent_ms = group.clock.now_ms()
    group.send("t", b"later", key="k", tag="g", queue_id=3, delay_s=5)
    group.send("t", b"now")
    for _ in range(2):
        group.deliver()
        group.advance(5)
    group.deliver()
    assert [(one.body, one.attempt) for one in seen] == [(b"now", 0), (b"now", 1), (b"later", 0), (b"later", 1)]
    now, later, again = seen[0], *seen[2:]
    assert now.origin is None
    assert later.origin == again.origin == ("t", 3, None, sent_ms)
    assert (later.key, later.tag, later.queue_id, later.queue_offset, later.store_time_ms) == ("k", "g", 3, 0, sent_ms + 5000)


@pytest.mark.parametrize("is_orderly", [False, True])
def test_each_try_gets_the_body_that_was_sent(is_orderly: bool) -> None:
    """A listener may unpack in place: `message.body = unpack(message.body)`."""
    seen: list[bytes] = []
    consumer = PushConsumer("g", orderly=is_orderly, commit_interval_s=60)

    @consumer.on("t")
    def listen(message: Message) -> None:
        seen.append(message.body)
        message.body = b"unpacked"
        if len(seen) < 5:
            raise ValueError("x")

    group = FakeGroup(consumer, retry_count_max=2, retry_delays_s=[1])
    group.send("t", b"packed")
    for _ in range(3):
        group.deliver()
        group.advance(1)
    assert [letter.message.body for letter in group.dead_letters] == [b"packed"]
    group.send("t", b"packed")
    for _ in range(2):
        group.deliver()
        group.advance(1)
    assert [message.body for message in group.crash()][-1] == b"packed"
    assert set(seen) == {b"packed"}


def test_a_fault_that_a_proxy_cannot_have_changes_nothing() -> None:
    with FaultProxy() as proxy:
        proxy.set(delay_s=0.5)
        with pytest.raises(ConfigurationError, match="rate_bytes_per_s"):
            proxy.set(rate_bytes_per_s=0)
        assert proxy.faults == Faults(delay_s=0.5)


def test_a_queue_that_the_topic_has_not_is_not_found() -> None:
    group = FakeGroup(PushConsumer("g"), queue_count=2)
    group.send("t", b"", queue_id=1)
    with pytest.raises(QueueNotFoundError, match="has queues 0 to 1, not 2") as refused:
        group.send("t", b"", queue_id=2)
    assert refused.value.metadata == {"topic": "t", "broker_name": "fake", "queue_id": "2"}


def test_messages_have_the_code_of_their_sharding_key() -> None:
    consumer = PushConsumer("g")
    seen: list[int] = []

    @consumer.on("t")
    def fail(message: Message) -> None:
        seen.append(message.sharding_hash)
        raise ValueError

    group = FakeGroup(consumer, retry_count_max=1)
    group.send("t", b"x", sharding_key="a")
    group.send("t", b"x", sharding_key="a", delay_s=1)
    group.send("t", b"x")
    while group.deliver() or group.waiting:
        group.advance(10)
    assert sorted(seen) == [0, 0] + [sharding_hash_of("a")] * 4
    assert [letter.message.sharding_hash for letter in group.dead_letters].count(sharding_hash_of("a")) == 2


def test_a_delayed_message_gets_its_offset_when_it_is_due() -> None:
    consumer = PushConsumer("g")
    consumer.subscribe("t", lambda message: None)
    group = FakeGroup(consumer)
    later = group.send("t", b"later", delay_s=10)
    sooner = group.send("t", b"sooner", delay_s=5)
    at_once = group.send("t", b"at once")
    assert [message.queue_offset for message in (later, sooner, at_once)] == [-1, -1, 0]
    assert group.waiting == [at_once, sooner, later]
    group.advance(20)
    last = group.send("t", b"last")
    assert [message.queue_offset for message in (at_once, sooner, later, last)] == [0, 1, 2, 3]
    assert [Record.FromString(message.record).queue_offset for message in group.waiting] == [0, 1, 2, 3]
    assert group.deliver() == 4
    assert [message.body for message in group.done] == [b"at once", b"sooner", b"later", b"last"]


def test_twice_the_messages_take_little_more_than_twice_the_time() -> None:
    def cpu_s(count: int) -> float:
        consumer = PushConsumer("g")
        consumer.subscribe("t", lambda message: None)
        group = FakeGroup(consumer)
        for number in range(count):
            group.send("t", b"x", queue_id=number % 8)
        began_s = time.thread_time()
        assert group.deliver() == count
        return time.thread_time() - began_s

    cpu_s(100)
    assert min(cpu_s(2_000) for _ in range(2)) < 3 * max(cpu_s(1_000) for _ in range(2))
