"""Asking members of groups how they stand, through real brokers: threads and coroutines, one that hangs, one that is unknown."""

from __future__ import annotations

import asyncio
import threading

import pytest

from protomq import (
    Admin,
    AsyncPushConsumer,
    MemberReport,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
)
from protomq.errors import MemberUnknownError, RequestTimeoutError
from protomq.testing import Broker
from tests.support.cli import run
from tests.support.waiting import wait_for

PATIENCE_S = 60.0


def send(broker: Broker, topic: str, count: int) -> None:
    with Producer(namesrv=broker.namesrv) as producer:
        producer.send_batch(topic, [b"%d" % number for number in range(count)])


def test_a_push_consumer_whose_listener_hangs_tells_where(protomq_server: Broker) -> None:
    began, gate = threading.Event(), threading.Event()
    send(protomq_server, "asked-push", 3)
    consumer = PushConsumer("asked-push", namesrv=protomq_server.namesrv, instance_name="hangs", concurrency=1)

    @consumer.on("asked-push")
    def waits_for_the_gate(message: Message) -> None:
        began.set()
        gate.wait()

    with consumer, Admin(namesrv=protomq_server.namesrv, request_timeout_s=PATIENCE_S) as admin:
        assert began.wait(PATIENCE_S)
        (member,) = admin.group_members("asked-push")
        report = admin.describe_member("asked-push", member.client_id, stacks=True)
        assert (report.kind, report.counts["open"], report.counts["done"]) == ("PushConsumer", 3, 0)
        assert report.settings["concurrency"] == "1"
        assert "waits_for_the_gate" in report.settings["listeners"]
        own = [one for one in report.queues if one.queue.topic == "asked-push"]
        assert sorted(one.queue for one in own) == sorted(q for q in member.queues if q.topic == "asked-push")
        assert sum(one.open_count for one in own) == 3
        assert sum(one.position or 0 for one in own) == 3
        (stack,) = [text for name, text in report.stacks if name.startswith("protomq-listener")]
        assert "waits_for_the_gate" in stack
        out = run("group", "info", "asked-push", member.client_id, "--stacks", namesrv=protomq_server.namesrv).stdout
        assert "gate.wait()" in out
        assert "PushConsumer" in out
        without = admin.describe_member("asked-push", member.client_id)
        # With stacks it may be cut: the test runner's calls are many.
        assert (without.stacks, without.is_cut) == ((), False)
        with pytest.raises(MemberUnknownError):
            admin.describe_member("asked-push", "nobody")
        gate.set()
        wait_for(lambda: admin.describe_member("asked-push", member.client_id).counts["done"] == 3)
        wait_for(lambda: "done" in admin.describe_member("asked-push", member.client_id).rates)


def test_coroutines_tell_what_their_tasks_await(protomq_server: Broker) -> None:
    send(protomq_server, "asked-async", 1)

    async def ask() -> MemberReport:
        began, gate = asyncio.Event(), asyncio.Event()
        consumer = AsyncPushConsumer("asked-async", namesrv=protomq_server.namesrv)

        @consumer.on("asked-async")
        async def awaits_the_gate(message: Message) -> None:
            began.set()
            await gate.wait()

        async with consumer:
            await began.wait()
            with Admin(namesrv=protomq_server.namesrv, request_timeout_s=PATIENCE_S) as admin:
                (member,) = await asyncio.to_thread(admin.group_members, "asked-async")
                report = await asyncio.to_thread(admin.describe_member, "asked-async", member.client_id, stacks=True)
            gate.set()
            return report

    report = asyncio.run(asyncio.wait_for(ask(), 2 * PATIENCE_S))
    assert report.kind == "AsyncPushConsumer"
    assert any("awaits_the_gate" in text and "await gate.wait()" in text for _, text in report.stacks)


def test_a_pull_consumer_that_works_for_long_answers_meanwhile(protomq_server: Broker) -> None:
    """Its calls are a thread's of their own; nobody is in `poll`."""
    send(protomq_server, "asked-pull", 5)
    with (
        PullConsumer("asked-pull", namesrv=protomq_server.namesrv) as consumer,
        Admin(namesrv=protomq_server.namesrv, request_timeout_s=PATIENCE_S) as admin,
    ):
        consumer.subscribe("asked-pull")
        got: list[Message] = []
        while len(got) < 5:
            got += consumer.poll()
        consumer.commit()
        (member,) = admin.group_members("asked-pull")
        report = admin.describe_member("asked-pull", member.client_id)
    assert report.kind == "PullConsumer"
    assert sum(one.position or 0 for one in report.queues) == 5
    assert sum(one.committed_offset or 0 for one in report.queues) == 5
    assert report.running_s > 0


def test_a_member_whose_loop_is_blocked_is_said_to_be_silent(protomq_server: Broker) -> None:
    async def block() -> None:
        consumer = AsyncPushConsumer("asked-blocked", namesrv=protomq_server.namesrv)

        @consumer.on("asked-blocked")
        async def listen(message: Message) -> None: ...

        async with consumer:
            with Admin(namesrv=protomq_server.namesrv) as admin:
                (member,) = await asyncio.to_thread(admin.group_members, "asked-blocked")
            errors: list[BaseException] = []

            def ask() -> None:
                with Admin(namesrv=protomq_server.namesrv, request_timeout_s=1.0) as admin:
                    try:
                        admin.describe_member("asked-blocked", member.client_id)
                    except RequestTimeoutError as error:
                        errors.append(error)

            asker = threading.Thread(target=ask)
            asker.start()
            asker.join()  # The loop's own thread: nothing else runs.
        assert "did not answer within 0.8 s" in str(errors[0])

    send(protomq_server, "asked-blocked", 1)
    asyncio.run(asyncio.wait_for(block(), PATIENCE_S))
