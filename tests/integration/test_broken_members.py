"""Members with locks whose connections break, behind proxies that cut them: no message of a queue is begun that another one may have."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Literal

import grpc
import pytest

from protomq import (
    Admin,
    AsyncPullConsumer,
    AsyncPushConsumer,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    PushConsumer,
    QueueListener,
)
from protomq.testing import Broker
from protomq.testing.fakes import FaultProxy
from protomq.v1.membership_service_pb2 import ListedMember, ListMembersRequest
from protomq.v1.membership_service_pb2_grpc import MembershipServiceStub
from protomq.v1.queue_lock_service_pb2 import (
    ListQueueLocksRequest,
    LockQueuesRequest,
    QueueName,
    UnlockQueuesRequest,
)
from protomq.v1.queue_lock_service_pb2_grpc import QueueLockServiceStub
from protomq_broker.membership_service import BACK_MS
from tests.support.waiting import PATIENCE_S, wait_for

QUEUES = 4
WORK_S = 0.01
"""A message takes that long."""
BACK_S = BACK_MS / 1000
"""For that long the membership and the locks of a member wait."""
NOTICED_S = 0.3
"""By then a member knows that its connections are cut, and its listeners have done what they had begun."""


class Member(QueueListener):
    """A member with locks, and the messages that it begins. It commits nothing: no refused commit tells it what it has lost."""

    def __init__(self, stack: ExitStack, kind: str, namesrv: str, transport: Literal["remoting", "grpc"] = "remoting") -> None:
        self.begun: list[Message] = []
        self.lost: set[int] = set()
        self._is_over = threading.Event()
        self._settings: dict[str, Any] = {"namesrv": namesrv, "transport": transport}
        consumes: dict[str, Callable[[], None]] = {
            "push": self._push, "push of batches": partial(self._push, batch_size=2), "poll": self._poll, "loop": self._loop,
            "async push": partial(self._run_async, self._push_async), "async poll": partial(self._run_async, self._poll_async),
            "async loop": partial(self._run_async, self._loop_async),
        }  # fmt: skip
        thread = threading.Thread(target=consumes[kind])
        thread.start()
        stack.callback(thread.join)
        stack.callback(self._is_over.set)

    def on_lost(self, queues: Sequence[MessageQueue]) -> None:
        self.lost.update(queue.queue_id for queue in queues)

    def offsets(self, first: int = 0) -> dict[int, list[int]]:
        """What it has begun of each queue, from that one on."""
        found: dict[int, list[int]] = defaultdict(list)
        for message in self.begun[first:]:
            found[message.queue_id].append(message.queue_offset)
        return found

    def _listen(self, messages: Sequence[Message]) -> None:
        self.begun += messages
        time.sleep(WORK_S * len(messages))

    async def _listen_async(self, message: Message) -> None:
        self.begun.append(message)
        await asyncio.sleep(WORK_S)

    def _push(self, batch_size: int | None = None) -> None:
        consumer = PushConsumer("g", orderly=True, commit_interval_s=60.0, **self._settings)
        if batch_size is None:
            consumer.subscribe("t", lambda message: self._listen((message,)))
        else:
            consumer.subscribe("t", self._listen, batch_size=batch_size)
        with consumer:
            self._is_over.wait()

    def _run_async(self, consume: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            task = asyncio.create_task(consume())
            await asyncio.to_thread(self._is_over.wait)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        asyncio.run(run())

    async def _push_async(self) -> None:
        consumer = AsyncPushConsumer("g", orderly=True, commit_interval_s=60.0, **self._settings)
        consumer.subscribe("t", self._listen_async)
        async with consumer:
            await asyncio.Event().wait()

    def _poll(self) -> None:
        with PullConsumer("g", lock_queues=True, auto_commit=False, listener=self, **self._settings) as consumer:
            consumer.subscribe("t")
            while not self._is_over.is_set():
                self._listen(consumer.poll(0.1, 2))

    def _loop(self) -> None:
        with PullConsumer("g", lock_queues=True, auto_commit=False, listener=self, **self._settings) as consumer:
            consumer.subscribe("t")
            closes = threading.Thread(target=self._close_at_end, args=(consumer,))
            closes.start()
            for message in consumer:
                self._listen((message,))
            closes.join()

    def _close_at_end(self, consumer: PullConsumer) -> None:
        self._is_over.wait()
        consumer.close()

    async def _poll_async(self) -> None:
        async with AsyncPullConsumer("g", lock_queues=True, auto_commit=False, listener=self, **self._settings) as consumer:
            await consumer.subscribe("t")
            while True:
                for message in await consumer.poll(0.1, 2):
                    await self._listen_async(message)

    async def _loop_async(self) -> None:
        async with AsyncPullConsumer("g", lock_queues=True, auto_commit=False, listener=self, **self._settings) as consumer:
            await consumer.subscribe("t")
            async for message in consumer:
                await self._listen_async(message)


class CutBroker:
    """A broker whose clients reach it through proxies, and a topic with messages."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        self._proxies = [stack.enter_context(FaultProxy()) for _ in range(2)]
        ports = [proxy.address.rpartition(":")[2] for proxy in self._proxies]
        environment = {"PROTOMQ_LISTEN_ADVERTISED_REMOTING_PORT": ports[0], "PROTOMQ_LISTEN_ADVERTISED_GRPC_PORT": ports[1]}
        broker = stack.enter_context(Broker(environment=environment))
        self._proxies[0].target, self._proxies[1].target = broker.remoting_address, broker.grpc_address
        self.namesrv = broker.namesrv
        channel = stack.enter_context(grpc.insecure_channel(broker.grpc_address))
        self._locks, self._members = QueueLockServiceStub(channel), MembershipServiceStub(channel)
        with Admin(namesrv=broker.namesrv) as admin:
            admin.create_topic("t", write_queues=QUEUES, read_queues=QUEUES)
        self.send(count)

    def send(self, count: int) -> None:
        with Producer(namesrv=self.namesrv) as producer:
            queues = producer.queues("t")
            for number in range(count):
                producer.send("t", b"%d" % number, queue=queues[number % QUEUES])

    def members(self) -> list[ListedMember]:
        return list(self._members.ListMembers(ListMembersRequest(consumer_group="g"), timeout=PATIENCE_S).members)

    def queue_counts(self) -> list[int]:
        """How many queues each member has."""
        return [sum(len(topic.queue_ids) for topic in one.member.topics if topic.topic == "t") for one in self.members()]

    def break_once(self, transport: Literal["remoting", "grpc"]) -> float:
        """Cuts the connections of one transport, which can be made again at once. Returns when all members are back, in seconds."""
        begin_s = time.monotonic()
        self._proxies[transport == "grpc"].cut()
        time.sleep(0.04)
        wait_for(lambda: [one.silent_ms for one in self.members()] == [0, 0], pause_s=0.01)
        return time.monotonic() - begin_s

    def cut(self) -> None:
        for proxy in self._proxies:
            proxy.set(refuse=True)
            proxy.cut()

    def heal(self) -> None:
        for proxy in self._proxies:
            proxy.heal()

    def lock_count(self) -> int:
        return len(self._locks.ListQueueLocks(ListQueueLocksRequest(consumer_group="g"), timeout=PATIENCE_S).locks)

    def lock(self, queue_id: int) -> None:
        """Another client locks a queue, past the proxies; as a member does that has not said yet which queues it has."""
        queue = QueueName(topic="t", queue_id=queue_id)
        request = LockQueuesRequest(consumer_group="g", client_id="other", nonce=9, queues=[queue])
        assert self._locks.LockQueues(request, timeout=PATIENCE_S).queues[0].token

    def unlock(self, queue_id: int) -> None:
        queue = QueueName(topic="t", queue_id=queue_id)
        request = UnlockQueuesRequest(consumer_group="g", client_id="other", nonce=9, queues=[queue])
        self._locks.UnlockQueues(request, timeout=PATIENCE_S)


KINDS = ["push", "push of batches", "async push", "poll", "loop", "async poll", "async loop"]


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_cut_off_begins_nothing_and_of_what_another_has_locked_meanwhile_nothing_when_it_is_back(kind: str) -> None:
    with ExitStack() as stack:
        broker = CutBroker(stack, 400)
        member = Member(stack, kind, broker.namesrv)
        wait_for(lambda: len(member.begun) > 8)
        broker.cut()
        time.sleep(NOTICED_S)
        count, taken = len(member.begun), member.begun[-1].queue_id
        wait_for(lambda: broker.lock_count() == 0)
        broker.lock(taken)
        time.sleep(0.2)
        assert len(member.begun) == count, "nobody has told it that its locks are its own still"
        before, others = member.offsets(), set(range(QUEUES)) - {taken}
        broker.heal()
        wait_for(lambda: others <= set(member.offsets(count)))
        time.sleep(0.5)
        after = member.offsets(count)
        assert set(after) == others, "it waits for the other one"
        if "push" not in kind:
            assert member.lost == {taken}
        for queue_id, offsets in after.items():
            begun = before[queue_id] + offsets
            assert begun == list(range(len(begun))), "the others go on where they were"
        broker.unlock(taken)
        wait_for(lambda: taken in member.offsets(count))
        assert member.offsets(count)[taken][0] == 0, "it begins again at what was committed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_that_is_made_again_at_once_costs_a_member_nothing(kind: str) -> None:
    with ExitStack() as stack:
        broker = CutBroker(stack, 400)
        member = Member(stack, kind, broker.namesrv)
        for part in (40, 200):
            wait_for(lambda part=part: len(member.begun) > part)  # type: ignore[misc]
            broker.cut()
            broker.heal()
        wait_for(lambda: len(member.begun) >= 400)
        assert member.offsets() == {queue_id: list(range(100)) for queue_id in range(QUEUES)}
        assert member.lost == set()


@pytest.mark.parametrize(("kind", "transport"), [*((kind, "remoting") for kind in KINDS), ("push", "grpc"), ("async poll", "grpc")])
def test_a_connection_that_is_made_again_at_once_costs_one_of_two_nothing(kind: str, transport: Literal["remoting", "grpc"]) -> None:
    """The other one would have the queues, and reaches the broker by the other transport."""
    for _ in range(5):
        with ExitStack() as stack:
            broker = CutBroker(stack, 0)
            broken = Member(stack, kind, broker.namesrv, transport)
            other = Member(stack, kind, broker.namesrv, "grpc" if transport == "remoting" else "remoting")
            wait_for(lambda: broker.queue_counts() == [2, 2] and broker.lock_count() >= QUEUES)  # noqa: B023
            broker.send(400)
            wait_for(lambda: len(broken.begun) > 40)  # noqa: B023
            # On a busy machine it may be away for longer than others wait for it.
            if broker.break_once(transport) > BACK_S:
                continue
            wait_for(lambda: len({message.message_id for message in broken.begun + other.begun}) == 400)  # noqa: B023
            begun = broken.offsets() | other.offsets()
            assert begun == {queue_id: list(range(100)) for queue_id in range(QUEUES)}
            assert broken.offsets().keys().isdisjoint(other.offsets())
            assert broken.lost | other.lost == set()
            return
    pytest.fail("it never was back in time")
