"""The lead changes under callers and a group: nobody is shown an error, members keep their queues, and owners keep their locks.

The callers also send to a topic that was made since the last change, and never was in a registration of a slave's start.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from protomq import Admin, MessageQueue, Producer, PullConsumer, QueueListener, SendStatus
from protomq.errors import ProtomqError
from protomq.v1.membership_service_pb2 import ListMembersRequest, ListMembersResponse
from protomq.v1.membership_service_pb2_grpc import MembershipServiceStub
from protomq.v1.queue_lock_service_pb2 import ListQueueLocksRequest
from protomq.v1.queue_lock_service_pb2_grpc import QueueLockServiceStub
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME, HaBroker
from tests.support.waiting import PATIENCE_S, wait_for

TOPIC, GROUP = "shared", "g"
QUEUES = 4
CALLERS = 8
SEND_TIMEOUT_S = 20.0
"""Longer than a fail-over on a busy machine."""
SETTLE_MS = 3_000
LOCK_MS = 60_000


class Callers:
    """Threads that send one message after the other to any queue of these topics. Attributes: statuses, failures, as text.

    One of them has a new producer for each message, which knows no route yet.
    """

    def __init__(self, namesrv: str, *topics: str) -> None:
        self._namesrv = namesrv
        self._topics = topics
        self.statuses: Counter[SendStatus] = Counter()
        self.failures: list[str] = []
        self._producer = Producer(namesrv=namesrv, send_timeout_s=SEND_TIMEOUT_S)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CALLERS)]

    def _run(self, caller: int) -> None:
        number = 0
        while not self._stopping.wait(0.01):
            try:
                topic = self._topics[number % len(self._topics)]
                body = b"%d %d" % (caller, number)
                if caller:
                    result = self._producer.send(topic, body)
                else:
                    with Producer(namesrv=self._namesrv, send_timeout_s=SEND_TIMEOUT_S) as newcomer:
                        result = newcomer.send(topic, body)
                self.statuses[result.status] += 1
            except ProtomqError as error:
                self.failures.append(f"{caller} {number}: {error!r}")
            number += 1

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._producer.close()

    def wait_for_more(self) -> None:
        wanted = self.statuses.total() + 10 * CALLERS
        wait_for(lambda: self.statuses.total() >= wanted or self.failures, 2 * PATIENCE_S)


class Member(QueueListener):
    """Polls in a thread of its own. Attribute: events, what its queues did."""

    def __init__(self, namesrv: str) -> None:
        self.events: list[tuple[str, tuple[MessageQueue, ...]]] = []
        self.errors: list[str] = []
        self.consumer = PullConsumer(GROUP, namesrv=namesrv, begin="earliest", lock_queues=True, listener=self)
        self.consumer.subscribe(TOPIC)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
        self.events.append(("came", tuple(queues)))

    def on_revoked(self, queues: Sequence[MessageQueue]) -> None:
        self.events.append(("went", tuple(queues)))

    def on_lost(self, queues: Sequence[MessageQueue]) -> None:
        self.events.append(("lost", tuple(queues)))

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.consumer.poll(0.1)
                self.consumer.commit()
            except ProtomqError as error:
                if not error.retriable:
                    self.errors.append(repr(error))
        self.consumer.close()

    def __enter__(self) -> Member:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopping.set()
        self._thread.join()


def members_at(broker: HaBroker) -> ListMembersResponse:
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        request = ListMembersRequest(consumer_group=GROUP)
        found: ListMembersResponse = MembershipServiceStub(channel).ListMembers(request, timeout=PATIENCE_S)
        return found


def locks_at(broker: HaBroker) -> dict[int, tuple[str, int, int]]:
    """Owner and number of milliseconds that are left, by queue."""
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        request = ListQueueLocksRequest(consumer_group=GROUP)
        locks = QueueLockServiceStub(channel).ListQueueLocks(request, timeout=PATIENCE_S).locks
    return {lock.queue.queue_id: (lock.client_id, lock.nonce, lock.left_ms) for lock in locks if lock.queue.topic == TOPIC}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElectedCluster]:
    folder: Path = tmp_path_factory.mktemp("hand-over")
    # The default intervals: no heartbeat of a slave, and no end of its hold, says by chance what topics it has.
    with elected_cluster(folder, register_interval_ms=30_000, liveness_ms={"hold": 10_000}) as running:
        with Admin(namesrv=running.namesrv) as admin:
            admin.create_topic(TOPIC, write_queues=QUEUES, read_queues=QUEUES)
        yield running


@pytest.mark.parametrize(
    "how", ["terminate", *(pytest.param(other, marks=pytest.mark.long) for other in ("switch", "kill"))]
)
def test_nobody_is_shown_an_error_and_a_group_goes_on_as_it_was(cluster: ElectedCluster, how: str) -> None:
    old = cluster.wait_leading(3)
    namesrv = cluster.namesrv
    newest = f"made-before-{how}"
    with Admin(namesrv=namesrv) as admin:
        admin.create_topic(newest, write_queues=QUEUES, read_queues=QUEUES)
    with Member(namesrv) as first, Member(namesrv) as second, Callers(namesrv, TOPIC, newest) as callers:
        wait_for(lambda: [len(each.consumer.assignment()) for each in (first, second)] == [2, 2], PATIENCE_S)
        wait_for(lambda: len(locks_at(old)) == QUEUES and members_at(old).ownerless_queues == 0, PATIENCE_S)
        callers.wait_for_more()
        shares = [set(each.consumer.assignment()) for each in (first, second)]
        owners = {queue: owner[:2] for queue, owner in locks_at(old).items()}
        seen = [len(first.events), len(second.events)]
        if how == "switch":
            with Admin(namesrv=namesrv) as admin:
                admin.switch_master(NAME)
        elif how == "terminate":
            old.process.terminate()
        else:
            old.kill()
        new = None

        def leads() -> bool:
            nonlocal new
            new = cluster.leading()
            return new not in (None, old)

        wait_for(leads, 2 * PATIENCE_S, pause_s=0.02)
        assert new is not None
        settling_ms, locks = members_at(new).settling_ms, locks_at(new)
        print(f"{how}: the group settles for {settling_ms} ms, locks hold for {[lock[2] for lock in locks.values()]} ms")
        assert 0 < settling_ms <= SETTLE_MS
        assert {queue: owner[:2] for queue, owner in locks.items()} == owners
        assert all(LOCK_MS - SETTLE_MS < lock[2] <= LOCK_MS for lock in locks.values())
        callers.wait_for_more()
        wait_for(lambda: members_at(new).settling_ms == 0, PATIENCE_S)
        wait_for(lambda: len(members_at(new).members) == 2 and members_at(new).ownerless_queues == 0, PATIENCE_S)
        callers.wait_for_more()
        assert [set(each.consumer.assignment()) for each in (first, second)] == shares
        assert [each.events[count:] for each, count in zip((first, second), seen, strict=True)] == [[], []]
        assert first.errors == second.errors == []
    if how == "terminate":
        assert old.stop() == 0
    if how != "switch":
        old.start()
    print(f"{how}: {dict(callers.statuses)}")
    assert not callers.failures, callers.failures[:5]
    assert callers.statuses.keys() <= {SendStatus.SEND_OK, SendStatus.SLAVE_NOT_AVAILABLE}
