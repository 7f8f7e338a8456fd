"""A member whose reports a real broker refuses: its program hears why, it consumes nothing, and another member gets each message once."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from protomq import (
    AsyncPullConsumer,
    AsyncPushConsumer,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    PushConsumer,
)
from protomq.allocation import Average, GroupMember
from protomq.errors import ClientError, InvalidArgumentError
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, async_wait_for

TOO_LONG = "x" * 300
"""No broker takes a member whose allocation has this name."""


@dataclass
class Renamed:
    """As Average; a test gives it another name while it is used."""

    name: str = "average"
    inner: Average = field(default_factory=Average)

    def share(self, member: GroupMember, queues: Any, members: Any) -> list[MessageQueue]:
        return self.inner.share(member, queues, members)


async def settled(value: Awaitable[Any] | Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def polled_for_ever(consumer: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await settled(consumer.poll(0.1))


@dataclass
class Case:
    """A group of one topic: who has got what."""

    connection: dict[str, Any]
    topic: str
    producer: Producer
    seen: Counter[tuple[str, bytes]] = field(default_factory=Counter)

    @property
    def group(self) -> str:
        return f"g-{self.topic}"

    def push(self, name: str, client: Any, allocation: Any) -> Any:
        def listen(message: Message) -> None:
            self.seen[name, message.body] += 1

        consumer = client(self.group, allocation=allocation, commit_interval_s=0.2, **self.connection)
        consumer.subscribe(self.topic, listen)
        return consumer

    async def send(self, tag: str) -> list[bytes]:
        """One message to each queue."""
        queues = await asyncio.to_thread(self.producer.queues, self.topic)
        bodies = [b"%s-%d" % (tag.encode(), queue.queue_id) for queue in queues]
        for queue, body in zip(queues, bodies, strict=True):
            await asyncio.to_thread(self.producer.send, self.topic, body, queue=queue)
        return bodies

    async def check_second_gets_all(self) -> None:
        """Another member has all queues soon, and gets each message once."""
        other = self.push("second", AsyncPushConsumer, Average())
        async with other:
            bodies = await self.send("two")
            await async_wait_for(lambda: all(self.seen["second", body] for body in bodies), PATIENCE_S)
        assert [self.seen["first", body] for body in bodies] == [0] * len(bodies)
        assert [self.seen["second", body] for body in bodies] == [1] * len(bodies)


@pytest.fixture(params=["remoting", "grpc"])
async def case(
    request: pytest.FixtureRequest, protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> Case:
    transport: Literal["remoting", "grpc"] = request.param
    namesrv = protomq_server.namesrv if transport == "remoting" else protomq_server.grpc_address
    return Case({"namesrv": namesrv, "transport": transport}, protomq_topic, protomq_producer)


@pytest.mark.parametrize("client", [PushConsumer, AsyncPushConsumer])
async def test_a_push_consumer_whose_reports_are_refused_stops_by_that_error(case: Case, client: Any) -> None:
    allocation = Renamed()
    first = case.push("first", client, allocation)
    await settled(first.start())
    bodies = await case.send("one")
    await async_wait_for(lambda: all(case.seen["first", body] for body in bodies), PATIENCE_S)
    allocation.name = TOO_LONG
    joining = case.push("second", AsyncPushConsumer, Average())  # For news of it the first one reports again.
    async with joining:
        await async_wait_for(lambda: not first.is_running, PATIENCE_S)
        with pytest.raises(ClientError, match=r"stopped by itself.*member\.allocation"):
            first._raise_death()
        bodies = await case.send("two")
        await async_wait_for(lambda: all(case.seen["second", body] for body in bodies), PATIENCE_S)
    assert [case.seen["first", body] for body in bodies] == [0] * len(bodies)
    assert [case.seen["second", body] for body in bodies] == [1] * len(bodies)
    await settled(first.stop())


@pytest.mark.parametrize("client", [PushConsumer, AsyncPushConsumer])
async def test_a_push_consumer_that_is_refused_from_the_beginning_does_not_start(
    case: Case, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = Renamed()
    first = case.push("first", client, allocation)
    # The SDK refuses that name itself. A broker of another version may refuse what the SDK does not.
    monkeypatch.setattr("protomq._consumer_options.check_name", lambda *_: "")
    allocation.name = TOO_LONG
    with pytest.raises(InvalidArgumentError, match=r"does not take .* as a member of .*member.allocation"):
        await settled(first.start())
    assert not first.is_running
    await case.check_second_gets_all()
    allocation.name = "average"
    await settled(first.start())  # What a start refuses may be tried again.
    assert first.is_running
    await settled(first.stop())


@pytest.mark.parametrize("client", [PullConsumer, AsyncPullConsumer])
async def test_a_poll_raises_that_reports_are_refused_and_has_nothing_of_what_another_member_gets(case: Case, client: Any) -> None:
    allocation = Renamed()
    first = client(case.group, allocation=allocation, auto_commit_interval_s=0.2, **case.connection)
    await settled(first.subscribe(case.topic))
    bodies, got = await case.send("one"), list[bytes]()
    async with asyncio.timeout(PATIENCE_S):
        while len(got) < len(bodies):
            got += [message.body for message in await settled(first.poll(0.1))]
    allocation.name = TOO_LONG
    second = case.push("second", AsyncPushConsumer, Average())
    async with second:
        with pytest.raises(InvalidArgumentError, match=r"does not take .* as a member of .*member.allocation"):
            await polled_for_ever(first)
        assert await settled(first.assignment()) == ()
        bodies = await case.send("two")
        raised = 0
        async with asyncio.timeout(PATIENCE_S):
            while raised < 2:
                try:
                    assert await settled(first.poll(0.1)) == []
                except InvalidArgumentError:
                    raised += 1
        await settled(first.close())
        await async_wait_for(lambda: all(case.seen["second", body] for body in bodies), PATIENCE_S)
    assert [case.seen["second", body] for body in bodies] == [1] * len(bodies)
