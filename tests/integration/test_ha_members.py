"""The members of a group while their master is away: they find each other at its slave, and nobody takes what another has."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from protomq import (
    Admin,
    AsyncPullConsumer,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    PushConsumer,
)
from protomq.v1.membership_service_pb2 import ListMembersRequest, ListMembersResponse
from protomq.v1.membership_service_pb2_grpc import MembershipServiceStub
from tests.support.ha_brokers import HaBroker, pair, running
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

TOPIC = "work"
QUEUES = 4
COUNT = 4_000
"""Messages of each queue: more than are consumed."""
PASSED_COUNT = 40
"""Of each queue that are consumed before the next thing happens."""


class Work:
    """What the members of a group have got."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[tuple[int, int]] = Counter()
        """By queue and offset."""
        self.members: defaultdict[int, set[str]] = defaultdict(set)
        """By queue."""

    def note(self, member: str, queue: MessageQueue, queue_offset: int) -> None:
        with self._lock:
            self.counts[queue.queue_id, queue_offset] += 1
            self.members[queue.queue_id].add(member)

    def wait_for_more(self) -> None:
        """Until each queue has passed so many messages."""
        before = self._by_queue()

        def is_enough() -> bool:
            now = self._by_queue()
            return all(now[queue_id] >= before[queue_id] + PASSED_COUNT for queue_id in range(QUEUES))

        wait_for(is_enough, PATIENCE_S)

    def _by_queue(self) -> Counter[int]:
        with self._lock:
            found: Counter[int] = Counter()
            for queue_id, _ in self.counts:
                found[queue_id] += 1
            return found


class Pushed:
    """A member whose listener takes a moment for each message."""

    def __init__(self, namesrv: str, name: str, work: Work) -> None:
        self._consumer = PushConsumer("g-pushed", namesrv=namesrv, client_id=name, concurrency=2, commit_interval_s=0.5)

        def listen(message: Message) -> None:
            work.note(name, message.queue, message.queue_offset)
            time.sleep(0.01)

        self._consumer.subscribe(TOPIC, listen)

    def __enter__(self) -> Pushed:
        self._consumer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.stop(0)

    def queues(self) -> list[int]:
        return sorted(queue.queue_id for queue in self._consumer.assignment() if queue.topic == TOPIC)


class Pulled:
    """A member that polls."""

    def __init__(self, namesrv: str, name: str, work: Work, group: str = "") -> None:
        self._namesrv, self._name, self._work = namesrv, name, work
        self._group = group or f"g-{type(self).__name__.lower()}"
        self._ends = threading.Event()
        self.polls = threading.Event()
        """Cleared: it works on what it has, and does not poll."""
        self.polls.set()
        self._thread = threading.Thread(target=self._run, name=name)
        self._queues: list[int] = []

    def _run(self) -> None:
        with PullConsumer(self._group, namesrv=self._namesrv, client_id=self._name, auto_commit_interval_s=0.5) as consumer:
            consumer.subscribe(TOPIC)
            consumer.subscribe_retries()
            while not self._ends.is_set():
                self.polls.wait()
                for message in consumer.poll(0.2, max_messages=10):
                    self._work.note(self._name, message.queue, message.queue_offset)
                    time.sleep(0.005)
                self._queues = sorted(queue.queue_id for queue in consumer.assignment() if queue.topic == TOPIC)

    def __enter__(self) -> Pulled:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.polls.set()
        self._thread.join()

    def queues(self) -> list[int]:
        return self._queues


class AsyncPulled(Pulled):
    """The same, in coroutines."""

    def _run(self) -> None:
        asyncio.run(self._poll())

    async def _poll(self) -> None:
        member = AsyncPullConsumer(self._group, namesrv=self._namesrv, client_id=self._name, auto_commit_interval_s=0.5)
        async with member as consumer:
            await consumer.subscribe(TOPIC)
            await consumer.subscribe_retries()
            while not self._ends.is_set():
                await asyncio.to_thread(self.polls.wait)
                for message in await consumer.poll(0.2, max_messages=10):
                    self._work.note(self._name, message.queue, message.queue_offset)
                    await asyncio.sleep(0.005)
                self._queues = sorted(queue.queue_id for queue in consumer.assignment() if queue.topic == TOPIC)


def members_at(broker: HaBroker, group: str) -> ListMembersResponse:
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        request = ListMembersRequest(consumer_group=group)
        found: ListMembersResponse = MembershipServiceStub(channel).ListMembers(request, timeout=PATIENCE_S)
        return found


def has_settled(broker: HaBroker, group: str) -> bool:
    found = members_at(broker, group)
    return bool(found.members) and not found.settling_ms


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, HaBroker, HaBroker]]:
    """A name server, a master and its slave."""
    folder: Path = tmp_path_factory.mktemp("members")
    with running_namesrv() as started:
        namesrv = str(started.remoting)
        master, slave = pair(folder, "SYNC_MASTER", namesrv=[namesrv])
        with running(master, slave):
            slave.wait_for_all_of(master)
            with Admin(namesrv=namesrv) as admin:
                admin.create_topic(TOPIC, write_queues=QUEUES, read_queues=QUEUES)
            with Producer(namesrv=namesrv, send_timeout_s=PATIENCE_S) as producer:
                for queue in producer.queues(TOPIC):
                    for _ in range(COUNT // 500):
                        producer.send_batch(TOPIC, [b"x"] * 500, queue=queue)
            yield namesrv, master, slave


@pytest.mark.parametrize("kind", [Pushed, Pulled, AsyncPulled])
def test_members_keep_their_queues_at_a_slave_and_when_the_master_is_back(
    cluster: tuple[str, HaBroker, HaBroker], kind: type[Pushed | Pulled]
) -> None:
    namesrv, master, slave = cluster
    group, work = f"g-{kind.__name__.lower()}", Work()
    with ExitStack() as stack:
        members: list[Pushed | Pulled] = [kind(namesrv, name, work) for name in ("m1", "m2")]
        for member in members:
            stack.enter_context(member)
        wait_for(lambda: [len(member.queues()) for member in members] == [2, 2], PATIENCE_S)
        shares = [member.queues() for member in members]
        work.wait_for_more()
        work.counts.clear()
        work.members.clear()
        master.kill()
        wait_for(lambda: has_settled(slave, group), PATIENCE_S)
        work.wait_for_more()
        assert [listed.member.client_id for listed in members_at(slave, group).members] == ["m1", "m2"]
        master.start()
        wait_for(lambda: has_settled(master, group), PATIENCE_S)
        work.wait_for_more()
        assert [listed.member.client_id for listed in members_at(master, group).members] == ["m1", "m2"]
        assert [member.queues() for member in members] == shares
    owners = {queue_id: {f"m{number}"} for number, share in enumerate(shares, 1) for queue_id in share}
    assert dict(work.members) == owners
    assert [key for key, count in work.counts.items() if count > 1] == []
    slave.wait_for_all_of(master)


@pytest.mark.parametrize("kind", [Pulled, AsyncPulled])
def test_a_member_that_does_not_poll_meanwhile_keeps_its_queues_too(cluster: tuple[str, HaBroker, HaBroker], kind: type[Pulled]) -> None:
    namesrv, master, slave = cluster
    group, work = f"g-{kind.__name__.lower()}-busy", Work()
    with ExitStack() as stack:
        first, busy = members = [kind(namesrv, name, work, group) for name in ("m1", "m2")]
        for member in members:
            stack.enter_context(member)
        wait_for(lambda: [len(member.queues()) for member in members] == [2, 2], PATIENCE_S)
        shares = [member.queues() for member in members]
        work.wait_for_more()
        work.counts.clear()
        work.members.clear()
        busy.polls.clear()
        master.kill()
        wait_for(lambda: has_settled(slave, group), PATIENCE_S)
        assert [listed.member.client_id for listed in members_at(slave, group).members] == ["m1", "m2"]
        master.start()
        wait_for(lambda: has_settled(master, group), PATIENCE_S)
        assert [listed.member.client_id for listed in members_at(master, group).members] == ["m1", "m2"]
        assert first.queues() == shares[0]
        busy.polls.set()
        work.wait_for_more()
        assert [member.queues() for member in members] == shares
    owners = {queue_id: {f"m{number}"} for number, share in enumerate(shares, 1) for queue_id in share}
    assert dict(work.members) == owners
    assert [key for key, count in work.counts.items() if count > 1] == []
    slave.wait_for_all_of(master)
