"""Push consumers while brokers die and topics go, and in broadcast mode: nothing is lost, and what comes twice was not committed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from protomq import Admin, Message, Producer, PushConsumer, _push_state
from protomq.errors import ConfigurationError
from protomq.testing import Broker
from tests.support.push import Push, committed, dead_letters, group_of, send
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """One that may be killed."""
    with Broker() as made:
        yield made


@pytest.fixture(params=["threads", "coroutines"])
def push(request: pytest.FixtureRequest, broker: Broker) -> Push:
    return Push(request.param, broker)


def test_a_broker_that_is_killed_under_it_costs_no_message(push: Push, broker: Broker) -> None:
    topic = f"kill-{push.kind}"
    group = group_of(broker, topic, 20, 20)
    seen: Counter[tuple[bytes, int]] = Counter()
    half = threading.Event()

    def listen(message: Message) -> None:
        seen[message.body, message.attempt] += 1
        if len(seen) > 150:
            half.set()
        if message.body.endswith(b"3") and message.attempt < 1:
            raise ValueError("three")
        if message.body == b"77":
            raise ValueError("always")

    with Producer(namesrv=broker.namesrv) as producer:
        bodies = send(producer, topic, 300)
        with push(group, topic, listen, commit_interval_s=0.1, concurrency=4) as consumer:
            half.wait(PATIENCE_S)
            broker.kill()
            broker.restart()
            bodies += send(producer, topic, 100, first=300)
            wait_for(
                lambda: {body for body, _ in seen} == set(bodies)
                and all(seen[b, 1] for b in bodies if b.endswith(b"3"))
                and seen[b"77", 2],
                PATIENCE_S,
            )
            wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
    assert push.left == 0
    assert committed(broker, group, topic) == 400
    assert dead_letters(broker, group, 1) == {b"77": "ValueError: always"}


def test_what_fails_while_the_broker_is_away_is_given_back_when_it_is_there_again(
    push: Push, broker: Broker
) -> None:
    topic = f"away-{push.kind}"
    group = group_of(broker, topic, 20)
    with Producer(namesrv=broker.namesrv) as producer:
        send(producer, topic, 10)
    begun, is_away = threading.Event(), threading.Event()
    again: list[bytes] = []

    def listen(message: Message) -> None:
        if message.attempt:
            again.append(message.body)
            return
        begun.set()
        is_away.wait(PATIENCE_S)
        raise ValueError("the broker is away")

    # A coroutine that waits like this blocks its loop: one is enough to be with listeners when the broker goes.
    with push(group, topic, listen, request_timeout_s=0.5) as consumer:
        begun.wait(PATIENCE_S)
        broker.kill()
        is_away.set()
        wait_for(lambda: consumer.counts.done == 0 and consumer.counts.waiting == 0, PATIENCE_S)
        broker.restart()
        wait_for(lambda: len(set(again)) == 10, PATIENCE_S)
        wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
    assert committed(broker, group, topic) == 10


def test_dead_letters_may_be_watched_before_the_first_one(push: Push, broker: Broker) -> None:
    topic = f"watched-{push.kind}"
    group = group_of(broker, topic)
    found: list[bytes] = []

    def fail(message: Message) -> None:
        raise ValueError("no")

    def watch(message: Message) -> None:
        found.append(message.body)

    with push(f"w-{topic}", f"%DLQ%{group}", watch, begin="latest") as watcher:
        assert watcher.is_running
        with Producer(namesrv=broker.namesrv) as producer:
            bodies = send(producer, topic, 3)
        with push(group, topic, fail) as consumer:
            wait_for(lambda: sorted(found) == bodies, PATIENCE_S)
            wait_for(lambda: (consumer.counts.failed, consumer.counts.done) == (3, 3), PATIENCE_S)


def test_a_topic_that_is_made_again_is_consumed_from_its_beginning(push: Push, broker: Broker) -> None:
    topic = f"again-{push.kind}"
    group = group_of(broker, topic, 20)
    seen: list[bytes] = []
    with Producer(namesrv=broker.namesrv) as producer, Admin(namesrv=broker.namesrv) as admin:
        send(producer, topic, 5)
        with push(group, topic, lambda message: seen.append(message.body)) as consumer:
            wait_for(lambda: len(seen) == 5, PATIENCE_S)
            admin.delete_topic(topic)
            admin.create_topic(topic, write_queues=1, read_queues=1)
            send(producer, topic, 3, first=100)
            # In any order: the listeners run beside each other.
            wait_for(lambda: sorted(seen[5:]) == [b"100", b"101", b"102"], PATIENCE_S)
            wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
    assert committed(broker, group, topic) == 3


def test_a_reset_of_the_groups_offset_reaches_it_while_it_runs(push: Push, broker: Broker) -> None:
    topic = f"reset-{push.kind}"
    group = group_of(broker, topic, 20)
    seen: Counter[bytes] = Counter()

    def listen(message: Message) -> None:
        seen[message.body] += 1

    with Producer(namesrv=broker.namesrv) as producer, Admin(namesrv=broker.namesrv) as admin:
        bodies = send(producer, topic, 50)
        with push(group, topic, listen, commit_interval_s=0.1):
            wait_for(lambda: sum(seen.values()) == 50 and committed(broker, group, topic) == 50, PATIENCE_S)
            admin.reset_offsets(group, topic, "earliest")
            wait_for(lambda: all(seen[body] == 2 for body in bodies), PATIENCE_S)
    assert committed(broker, group, topic) == 50


def test_what_a_reset_has_skipped_while_it_was_suspended_is_not_given_to_its_listeners(push: Push, broker: Broker) -> None:
    topic = f"skipped-{push.kind}"
    group = group_of(broker, topic, 20)
    seen: list[bytes] = []
    with Producer(namesrv=broker.namesrv) as producer, Admin(namesrv=broker.namesrv) as admin:
        # No commit tells of the reset.
        with push(group, topic, lambda message: seen.append(message.body), commit_interval_s=PATIENCE_S) as consumer:
            send(producer, topic, 1)
            wait_for(lambda: len(seen) == 1, PATIENCE_S)
            push.call(consumer.suspend)
            pulls, skipped = cast(Any, consumer)._consumer._state._queues, list[bytes]()

            def are_some_pulled_and_wait() -> bool:
                """Of such a queue no pull is under way that would tell. It takes until whoever polls knows of the suspension."""
                skipped.extend(send(producer, topic, 8, first=100 + len(skipped)))
                return any(queue.waiting for queue in pulls.values())

            wait_for(are_some_pulled_and_wait, PATIENCE_S)
            admin.reset_offsets(group, topic, "latest")
            push.call(consumer.resume)
            last = send(producer, topic, 1, first=100_000)
            wait_for(lambda: last[0] in seen, PATIENCE_S)
    assert not set(skipped) & set(seen)


def test_each_member_of_a_broadcast_gets_all_and_goes_on_where_it_was(
    push: Push, broker: Broker, tmp_path: Path
) -> None:
    topic = f"all-{push.kind}"
    seen: dict[str, list[bytes]] = {"one": [], "two": []}
    with Producer(namesrv=broker.namesrv) as producer:
        bodies = send(producer, topic, 20)

        def member(name: str) -> Any:
            def listen(message: Message) -> None:
                seen[name].append(message.body)
                if message.body == b"5":
                    raise ValueError("dropped")

            return push(
                "everybody", topic, listen, instance=name, broadcast=True, offset_folder=str(tmp_path)
            )

        with member("one") as one, member("two"):
            wait_for(lambda: all(len(bodies) == 20 for bodies in seen.values()), PATIENCE_S)
            wait_for(lambda: one.counts.open == 0, PATIENCE_S)
            assert one.counts.refused == 1
            with pytest.raises(ConfigurationError, match="another consumer of this machine"):
                member("one").__enter__()
        more = send(producer, topic, 5, first=100)
        with member("one"):
            wait_for(lambda: len(seen["one"]) == 25, PATIENCE_S)
    assert sorted(seen["one"][:20]) == sorted(seen["two"]) == sorted(bodies)
    assert sorted(seen["one"][20:]) == sorted(more)


@pytest.mark.parametrize("kind", ["threads", "functions"])
def test_what_fails_comes_again_while_the_listener_hangs_in_the_next_message(
    kind: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RUN_TARGET_S", "RUN_SHARED_S"):  # A run has all that is there.
        monkeypatch.setattr(_push_state, name, 60.0)
    topic = f"hangs-{kind}"
    group = group_of(broker, topic, 20)
    warm, hangs, again, goes_on = (threading.Event() for _ in range(4))

    def listen(message: Message) -> None:
        if message.body == b"0":
            warm.set()
        elif message.attempt:
            again.set()
        elif message.body == b"1":
            raise ValueError("one")
        else:
            hangs.set()
            goes_on.wait(PATIENCE_S)

    with Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic(topic, write_queues=1, read_queues=1)
    push = Push(kind, broker)
    with Producer(namesrv=broker.namesrv) as producer, push(group, topic, listen, concurrency=2) as consumer:
        send(producer, topic, 1)
        assert warm.wait(PATIENCE_S)
        wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
        send(producer, topic, 2, first=1)
        try:
            assert hangs.wait(PATIENCE_S)
            assert again.wait(PATIENCE_S)
        finally:
            goes_on.set()
    assert push.left == 0
    assert committed(broker, group, topic) == 3


@pytest.mark.parametrize("begin", ["earliest", "latest"])
def test_a_broadcast_goes_on_where_it_was_with_another_subscription_in_the_place_of_one(
    push: Push, broker: Broker, tmp_path: Path, begin: Literal["earliest", "latest"]
) -> None:
    topic = f"anew-{push.kind}-{begin}"
    group_of(broker, topic)
    seen: list[bytes] = []
    found: list[bytes] = []

    def listen(message: Message) -> None:
        seen.append(message.body)

    def go_on(message: Message) -> None:
        found.append(message.body)

    with (
        Producer(namesrv=broker.namesrv) as producer,
        push(topic, topic, listen, begin=begin, broadcast=True, offset_folder=str(tmp_path)) as consumer,
    ):
        bodies = send(producer, topic, 20)
        wait_for(lambda: sorted(seen) == sorted(bodies), PATIENCE_S)
        push.call(lambda: consumer.unsubscribe(topic))
        wait_for(lambda: not consumer.assignment(), PATIENCE_S)
        between = send(producer, topic, 5, first=100)
        push.call(lambda: consumer.subscribe(topic, go_on))
        wait_for(consumer.assignment, PATIENCE_S)
        last = send(producer, topic, 5, first=200)
        wait_for(lambda: set(last) <= set(found), PATIENCE_S)
        wait_for(lambda: consumer.counts.open == 0, PATIENCE_S)
    assert sorted(seen) == sorted(bodies)
    assert sorted(found) == sorted([*between, *last])


def test_a_broadcast_repeats_only_what_was_not_done_when_it_stopped(broker: Broker, tmp_path: Path) -> None:
    topic, goes_on = "exactly", threading.Event()
    seen: list[bytes] = []

    def listen(message: Message) -> None:
        if message.body == b"0" and not goes_on.wait(PATIENCE_S):
            raise TimeoutError
        seen.append(message.body)

    def member() -> PushConsumer:
        made = PushConsumer("exact", namesrv=broker.namesrv, broadcast=True, offset_folder=str(tmp_path), concurrency=4)
        made.subscribe(topic, listen)
        made.start()
        return made

    with Producer(namesrv=broker.namesrv) as producer:
        queue = producer.queues(topic)[0]
        bodies = [b"%d" % number for number in range(100)]
        for body in bodies:
            producer.send(topic, body, queue=queue)
        first = member()
        wait_for(lambda: len(seen) == 99, PATIENCE_S)
        assert first.stop(0) == 1
        goes_on.set()
        wait_for(lambda: len(seen) == 100, PATIENCE_S)
        producer.send(topic, b"last", queue=queue)
        second = member()
        wait_for(lambda: b"last" in seen, PATIENCE_S)
        assert second.stop() == 0
    assert sorted(seen) == sorted([*bodies, b"0", b"last"])
