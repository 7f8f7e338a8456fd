"""Push members that should not be as they are: two of one name, two that want different things; and a topic or a broker that goes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from protomq import Admin, Message, MessageQueue, Producer, PushConsumer, SimpleConsumer
from protomq.allocation import Average, GroupMember
from protomq.errors import ConfigurationError
from protomq.hooks import Hook
from protomq.testing import Broker
from tests.support.push import Push, committed, group_of, send
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """One that may be killed."""
    with Broker() as made:
        yield made


@pytest.fixture(params=["threads", "coroutines"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def share(admin: Admin, group: str, topic: str) -> list[int]:
    return sorted(sum(queue.topic == topic for queue in member.queues) for member in admin.group_members(group))


def test_two_of_one_client_id_share_and_nothing_comes_twice(kind: str, broker: Broker) -> None:
    topic = f"twins-{kind}"
    group = group_of(broker, topic, 20)
    seen: tuple[Counter[bytes], Counter[bytes]] = Counter(), Counter()
    one, two = Push(kind, broker), Push(kind, broker)
    with Producer(namesrv=broker.namesrv) as producer, Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic(topic, write_queues=4, read_queues=4)
        with (
            one(group, topic, lambda message: seen[0].update([message.body]), client_id="twin"),
            two(group, topic, lambda message: seen[1].update([message.body]), client_id="twin"),
        ):
            wait_for(lambda: share(admin, group, topic) == [2, 2], PATIENCE_S)
            bodies = [b"%d" % number for number in range(80)]
            for body in bodies:  # One by one they go to the queues in turn.
                producer.send(topic, body)
            wait_for(lambda: sum(seen[0].values()) + sum(seen[1].values()) >= 80, PATIENCE_S)
            assert {member.client_id for member in admin.group_members(group)} == {"twin"}
    assert seen[0] + seen[1] == Counter(bodies)
    assert all(seen)


def test_members_that_want_other_tags_are_told_and_one_that_wants_another_topic_has_it_alone(
    kind: str, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    topic, extra = f"unlike-{kind}", f"extra-{kind}"
    group = group_of(broker, topic, 20)
    seen: Counter[bytes] = Counter()
    one, two = Push(kind, broker), Push(kind, broker)
    with Producer(namesrv=broker.namesrv) as producer, Admin(namesrv=broker.namesrv) as admin:
        for name in (topic, extra):
            admin.create_topic(name, write_queues=4, read_queues=4)

        def listen(message: Message) -> None:
            seen[message.body] += 1

        with (
            caplog.at_level(logging.WARNING, "protomq"),
            one(group, topic, listen) as first,
            two(group, topic, listen),
        ):
            one.call(lambda: first.subscribe(extra, listen, tags=["A"]))
            wait_for(lambda: share(admin, group, extra) == [0, 4], PATIENCE_S)
            wait_for(lambda: share(admin, group, topic) == [2, 2], PATIENCE_S)
            wait_for(lambda: any("are not alike" in text and extra in text for text in caplog.messages), PATIENCE_S)
            bodies = send(producer, topic, 40)
            for number in range(8):
                producer.send(extra, b"extra %d" % number, tag="A")
            wait_for(lambda: len(seen) == 48, PATIENCE_S)
    assert set(seen) == {*bodies, *(b"extra %d" % number for number in range(8))}
    assert set(seen.values()) == {1}
    assert all(f"consumes {extra}, " in text or f"does not consume {extra}, " in text for text in told(caplog.messages, group))
    assert told(broker.log_text().splitlines(), group)


@pytest.mark.parametrize(("wanted", "said"), [({"tags": ["B"]}, "tags B"), ({"sql": "delay > 30"}, "sql delay > 30"), ({}, "all messages")])
def test_members_whose_filters_differ_are_told_both_of_them_and_so_is_the_broker(
    kind: str, wanted: dict[str, Any], said: str, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    base, topic = f"base-{said[:3]}-{kind}", f"filtered-{said[:3]}-{kind}"
    group = group_of(broker, topic, 20)
    one, two = Push(kind, broker), Push(kind, broker)
    with Admin(namesrv=broker.namesrv) as admin, caplog.at_level(logging.WARNING, "protomq"):
        for name in (base, topic):
            admin.create_topic(name, write_queues=4, read_queues=4)
        with (
            one(group, base, lambda _: None, client_id="first") as first,
            two(group, base, lambda _: None, client_id="second") as second,
        ):
            one.call(lambda: first.subscribe(topic, lambda _: None, tags=["A"]))
            two.call(lambda: second.subscribe(topic, lambda _: None, **wanted))
            sides = f"first wants tags A of {topic}, second {said}.", f"second wants {said} of {topic}, first tags A."
            wait_for(lambda: all(any(side in text for text in told(caplog.messages, group)) for side in sides), PATIENCE_S)
            wait_for(lambda: any(side in text for text in told(broker.log_text().splitlines(), group) for side in sides), PATIENCE_S)


@pytest.mark.parametrize("orderly", [False, True])
def test_an_error_that_cannot_say_what_it_is_costs_no_listener(
    kind: str, broker: Broker, orderly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Formatters of others may stumble over such an error (PySpark's does), and pytest's handler raises then; Python's own does not.
    monkeypatch.setattr(logging.getLogger("protomq"), "propagate", False)
    topic = f"speechless-{kind}-{orderly}"
    group = group_of(broker, topic, 20)
    seen: list[bytes] = []

    class SpeechlessError(Exception):
        def __str__(self) -> str:
            raise AttributeError("reason")

    def listen(message: Message) -> None:
        seen.append(message.body)
        if len(seen) == 1:
            raise SpeechlessError

    push = Push(kind, broker)
    with Producer(namesrv=broker.namesrv) as producer, Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic(topic, write_queues=1, read_queues=1)
        send(producer, topic, 2)
        with push(group, topic, listen, concurrency=1, orderly=orderly):
            wait_for(lambda: sorted(seen) == [b"0", b"0", b"1"], PATIENCE_S)
    assert push.left == 0
    assert committed(broker, group, topic) == 2


def test_a_topic_that_is_deleted_for_good_is_told_and_the_others_go_on(
    kind: str, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    topic, other = f"gone-{kind}", f"stays-{kind}"
    group = group_of(broker, topic, 20)
    seen: list[bytes] = []
    push = Push(kind, broker)
    with Producer(namesrv=broker.namesrv) as producer, Admin(namesrv=broker.namesrv) as admin:
        for name in (topic, other):
            admin.create_topic(name, write_queues=1, read_queues=1)
        send(producer, topic, 3)

        def listen(message: Message) -> None:
            seen.append(message.body)

        with caplog.at_level(logging.WARNING, "protomq"), push(group, topic, listen) as consumer:
            push.call(lambda: consumer.subscribe(other, listen))
            wait_for(lambda: len(seen) == 3, PATIENCE_S)
            admin.delete_topic(topic)
            wait_for(lambda: any(topic in text and "delete" in text for text in caplog.messages), PATIENCE_S)
            send(producer, other, 3, first=10)
            wait_for(lambda: seen[3:] == [b"10", b"11", b"12"], PATIENCE_S)
    assert push.left == 0
    assert committed(broker, group, other) == 3


def test_a_stop_while_the_broker_is_gone_ends_in_time_and_what_it_could_not_commit_comes_again(
    kind: str, broker: Broker
) -> None:
    topic = f"dead-{kind}"
    group = group_of(broker, topic, 20)
    seen: Counter[bytes] = Counter()
    push = Push(kind, broker)
    with Producer(namesrv=broker.namesrv) as producer:
        bodies = send(producer, topic, 20)
    began_s = 0.0
    with pytest.warns(RuntimeWarning, match="will come again"):  # noqa: PT031 - of the stop, at the end of the block.
        with push(
            group, topic, lambda message: seen.update([message.body]),
            commit_interval_s=3600.0, request_timeout_s=0.5, drain_timeout_s=1.0,
        ):  # fmt: skip
            wait_for(lambda: len(seen) == 20, PATIENCE_S)
            broker.kill()
            began_s = time.monotonic()
    assert time.monotonic() - began_s < PATIENCE_S / 4
    broker.restart()
    again = threading.Event()

    def listen(message: Message) -> None:
        seen[message.body] += 1
        if all(seen[body] == 2 for body in bodies):
            again.set()

    with push(group, topic, listen):
        assert again.wait(PATIENCE_S)
    assert set(seen.values()) == {2}
    assert committed(broker, group, topic) == 20


class Deadly(Average):
    """Ends whoever computes it, once there are two members."""

    def __init__(self, error: BaseException) -> None:
        object.__setattr__(self, "error", error)

    def share(
        self, member: GroupMember, queues: Sequence[MessageQueue], members: Sequence[GroupMember]
    ) -> list[MessageQueue]:
        if len(members) > 1:
            raise self.error  # type: ignore[attr-defined]
        return super().share(member, queues, members)


def test_a_member_whose_polling_dies_leaves_its_queues_to_others(
    kind: str, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    topic = f"dies-{kind}"
    group = group_of(broker, topic, 20)
    error = SystemExit(3) if kind == "threads" else asyncio.CancelledError()
    seen: Counter[bytes] = Counter()
    one, two = Push(kind, broker), Push(kind, broker)
    with Producer(namesrv=broker.namesrv) as producer, Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic(topic, write_queues=4, read_queues=4)
        with one(group, topic, lambda _: None, allocation=Deadly(error)) as first:
            wait_for(lambda: share(admin, group, topic) == [4], PATIENCE_S)
            with two(group, topic, lambda message: seen.update([message.body])):
                wait_for(lambda: not first.is_running, PATIENCE_S)
                wait_for(lambda: share(admin, group, topic) == [4], PATIENCE_S)
                bodies = send(producer, topic, 40)
                wait_for(lambda: len(seen) == 40, PATIENCE_S)
    assert set(seen) == set(bodies)
    assert f"protomq-push of the push consumer of group {group} has died: the consumer stops" in caplog.messages


class Exits(Hook):
    """As `sys.exit` in a hook."""

    def keeps(self, message: Message) -> bool:
        raise SystemExit(3)

    before_consume = keeps  # type: ignore[assignment]


def test_a_hook_that_exits_costs_no_message(kind: str, broker: Broker) -> None:
    topic = f"hook-exits-{kind}"
    group = group_of(broker, topic, 20)
    seen: Counter[bytes] = Counter()
    with (
        Producer(namesrv=broker.namesrv) as producer,
        Push(kind, broker)(group, topic, lambda message: seen.update([message.body]), hooks=[Exits()]) as consumer,
    ):
        bodies = send(producer, topic, 40)
        wait_for(lambda: len(seen) == 40, PATIENCE_S)
        assert consumer.is_running
    assert seen == Counter(bodies)


class Stops(Hook):
    """Stops its consumer where the consumer polls."""

    consumer: PushConsumer
    error: Exception | None = None

    def keeps(self, message: Message) -> bool:
        if message.body == b"stop":
            try:
                self.consumer.stop()
            except Exception as error:
                self.error = error
        return True


def test_a_stop_in_a_hook_of_its_own_thread_is_refused_and_the_consumer_goes_on(broker: Broker) -> None:
    topic, hook = "hook-stops", Stops()
    group = group_of(broker, topic, 20)
    seen: Counter[bytes] = Counter()
    push = Push("threads", broker)
    with (
        Producer(namesrv=broker.namesrv) as producer,
        push(group, topic, lambda message: seen.update([message.body]), hooks=[hook], commit_interval_s=60.0) as consumer,
    ):
        hook.consumer = cast(PushConsumer, consumer)
        producer.send(topic, b"stop")
        wait_for(lambda: hook.error is not None, PATIENCE_S)
        producer.send(topic, b"after")
        wait_for(lambda: seen[b"after"] == 1, PATIENCE_S)
        assert consumer.is_running
    assert isinstance(hook.error, ConfigurationError)
    assert "request_stop" in str(hook.error)
    assert push.left == 0
    assert committed(broker, group, topic) == 2


def test_members_of_which_one_keeps_no_order_are_told(
    kind: str, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    topic = f"order-{kind}"
    group = group_of(broker, topic, 20)
    one, two = Push(kind, broker), Push(kind, broker)
    with (
        Admin(namesrv=broker.namesrv) as admin,
        caplog.at_level(logging.WARNING, "protomq"),
    ):
        admin.create_topic(topic, write_queues=4, read_queues=4)
        with one(group, topic, lambda _: None, client_id="in-order", orderly=True), two(group, topic, lambda _: None, client_id="free"):
            wait_for(lambda: share(admin, group, topic) == [2, 2], PATIENCE_S)
            wait_for(lambda: len(told(caplog.messages, group)) == 2, PATIENCE_S)  # By each member once.
    assert all("in-order locks its queues, as orderly consumers do, free does not" in text for text in told(caplog.messages, group))
    assert told(broker.log_text().splitlines(), group)


@pytest.mark.parametrize("way", ["pop", "broadcast"])
def test_members_are_told_of_who_consumes_beside_them(
    kind: str, way: str, broker: Broker, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    topic = f"beside-{way}-{kind}"
    group = group_of(broker, topic, 20)
    one, two = Push(kind, broker), Push(kind, broker)
    with Producer(namesrv=broker.namesrv) as producer, caplog.at_level(logging.WARNING, "protomq"):
        send(producer, topic, 1)
        with one(group, topic, lambda _: None, client_id="sharing"), ExitStack() as stack:
            if way == "pop":
                simple = stack.enter_context(SimpleConsumer(group, namesrv=broker.namesrv))
                assert simple.receive(topic, hold_s=PATIENCE_S)
            else:
                stack.enter_context(two(group, topic, lambda _: None, broadcast=True, offset_folder=str(tmp_path)))
                wait_for(lambda: any(f"consumers of group {group} are not alike: sharing" in text for text in caplog.messages), PATIENCE_S)
            wait_for(lambda: len(told(caplog.messages, group)) == 1, PATIENCE_S)
    how = {"pop": "a simple consumer (pop) at 127.0.0.1", "broadcast": "a consumer in broadcast mode at 127.0.0.1"}[way]
    assert how in told(caplog.messages, group)[0]
    assert how in told(broker.log_text().splitlines(), group)[0]


def told(lines: Sequence[str], group: str) -> list[str]:
    return [line for line in lines if f"the members of group {group} are not alike" in line]
