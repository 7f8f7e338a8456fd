"""What brokers have promised before a kill -9 of the master holds at the next one: delays, recalls, transactions, retries, pops, replies.

Two elected brokers, and one fail-over for all tests: each prepares its part, then the master is killed, and each looks at its part.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from protomq import (
    Admin,
    Message,
    MessageQueue,
    PoppedQueue,
    Producer,
    PullConsumer,
    Reply,
    SendResult,
    SendStatus,
    SimpleConsumer,
    TransactionCheck,
    TransactionDecision,
    TransactionProducer,
)
from protomq.errors import GroupDisabledError, StaleReceiptError, TransactionEndedError
from protomq.v1.group_service_pb2 import FailedMessage, SendBackRequest
from protomq.v1.group_service_pb2_grpc import GroupServiceStub
from protomq.v1.queue_lock_service_pb2 import LockedQueue, LockQueuesRequest, QueueName
from protomq.v1.queue_lock_service_pb2_grpc import QueueLockServiceStub
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME, HaBroker
from tests.support.polling import polled
from tests.support.waiting import PATIENCE_S, wait_for

GROUP: Final = "g"
RETRY_DELAYS_MS: Final = (6_000, 100)
LATER_S: Final = (0.0, 1.0, 2.0, 6.0, 6.5)
"""Delays: due before the kill, while nobody leads, and afterwards."""
HOUR_S: Final = 3_600
CLOCK_STEP_MS: Final = 100
"""What log time may be ahead of the clock by which this test measures."""
COMMIT, ROLL_BACK, UNKNOWN = TransactionDecision.COMMIT, TransactionDecision.ROLL_BACK, TransactionDecision.UNKNOWN


class FailOver:
    """All that is done before the kill, and what is known of it afterwards. Each topic has one queue."""

    def __init__(self, cluster: ElectedCluster, stack: ExitStack) -> None:
        self.cluster = cluster
        way: dict[str, Any] = {"namesrv": cluster.namesrv}
        self.admin = stack.enter_context(Admin(**way))
        self.producer = stack.enter_context(Producer(send_timeout_s=PATIENCE_S, **way))
        self.group = stack.enter_context(PullConsumer(GROUP, auto_commit=False, request_timeout_s=PATIENCE_S, **way))
        self.popper = stack.enter_context(SimpleConsumer("poppers", request_timeout_s=PATIENCE_S, **way))
        self.checks: list[tuple[str, int]] = []
        """Bodies and numbers of questions, in the order in which they were asked."""
        self.may_decide = threading.Event()
        self.desk = stack.enter_context(
            TransactionProducer("desk", self._decide, topics=["bookings"], send_timeout_s=PATIENCE_S, **way)
        )
        self.pool = stack.enter_context(ThreadPoolExecutor(2))
        for topic in ("later", "bookings", "orders", "parcels", "questions"):
            self.admin.create_topic(topic, write_queues=1, read_queues=1)
        self.prepare_retries()
        self.prepare_delays()
        self.prepare_transactions()
        self.prepare_pops()
        self.prepare_settings()
        self.prepare_request()

    def fail_over(self) -> None:
        """kill -9 of the master, until the other one leads."""
        old = self.cluster.wait_leading(2)
        old.kill()
        self.asked_before = counts_of(self.checks)
        self.replied = self.pool.submit(self.group.reply, self.asked_message, b"17 EUR", timeout_s=PATIENCE_S)
        self.new = self.cluster.wait_leading(1)
        assert self.new is not old
        self.checks.clear()

    def send(self, topic: str, body: bytes, **options: Any) -> SendResult:
        result = self.producer.send(topic, body, **options)
        assert result.status is SendStatus.SEND_OK
        return result

    def read(self, topic: str, count: int) -> list[Message]:
        """All messages of a topic: at least so many."""
        with PullConsumer(namesrv=self.cluster.namesrv) as reader:
            reader.assign([MessageQueue(topic, NAME, 0)])
            reader.seek_to_begin()
            return polled(reader, count)

    # -- before the kill -------------------------------------------------------------------------------------------------

    def prepare_delays(self) -> None:
        self.due_ms: dict[bytes, float] = {}
        for delay_s in LATER_S:
            body = b"after %.1f s" % delay_s
            self.due_ms[body] = time.time() * 1_000 + delay_s * 1_000
            self.send("later", body, delay=delay_s)
        self.recalled = [self.send("later", b"recalled", delay=delay_s) for delay_s in (2.0, 6.0)]
        for sent in self.recalled:
            assert self.producer.recall("later", sent.recall_handle)
        self.pending = self.send("later", b"in an hour", delay=HOUR_S)

    def _decide(self, check: TransactionCheck) -> TransactionDecision:
        body = check.message.body.decode()
        self.checks.append((body, check.check_count))
        if not self.may_decide.is_set():
            return UNKNOWN
        return {"asked: commit": COMMIT, "asked: roll back": ROLL_BACK}.get(body, UNKNOWN)

    def prepare_transactions(self) -> None:
        names = ("committed", "rolled back", "commit", "roll back", "asked: commit", "asked: roll back")
        self.begun = {name: self.desk.begin("bookings", name.encode()) for name in names}
        self.begun["committed"].commit()
        self.begun["rolled back"].roll_back()
        # The next master has to know how often each was asked about.
        wait_for(lambda: {body for body, count in self.checks if count >= 3} == set(names[2:]), PATIENCE_S)

    def prepare_retries(self) -> None:
        """One message waits for its retry, two are dead, one of these was replayed."""
        self.admin.set_group(GROUP, retry_count_max=2, retry_delays_ms=list(RETRY_DELAYS_MS))
        self.group.assign([MessageQueue("orders", NAME, 0)])
        for body in (b"retried", b"dead", b"replayed"):
            self.send("orders", body)
        retried, dead, replayed = polled(self.group, 3)
        self.group.send_back([dead, replayed], error="bad", dead_letter=True)
        self.letters = self.read("%DLQ%g", 2)
        assert self.admin.replay_dead_letters(GROUP, message_ids=[replayed.message_id]).replayed == 1
        failed = FailedMessage(topic="orders", queue_offset=retried.queue_offset, message_id=retried.message_id, error="not yet")
        self.send_back = SendBackRequest(consumer_group=GROUP, messages=[failed], request_id=17)
        self.sent_back_ms = time.time() * 1_000
        with grpc.insecure_channel(self.cluster.wait_leading(2).address.grpc_address) as channel:
            answer = GroupServiceStub(channel).SendBack(self.send_back, timeout=PATIENCE_S)
        assert (answer.repeated_request, answer.results[0].attempt) == (False, 1)
        self.group.commit({MessageQueue("orders", NAME, 0): 3})

    def prepare_pops(self) -> None:
        for number in range(6):
            self.send("parcels", b"%d" % number)
        done, self.held, self.given_back, self.kept = self.popper.receive("parcels", 4, invisible_s=HOUR_S)
        self.popper.ack(done)
        (self.short,) = self.popper.receive("parcels", 1, invisible_s=0.1)

    def prepare_settings(self) -> None:
        self.admin.set_group("off", consume_enabled=False)
        (self.lock,) = lock(self.cluster.wait_leading(2), "owner", 1)
        assert self.lock.token

    def prepare_request(self) -> None:
        self.asked: Future[Reply] = self.pool.submit(self.producer.request, "questions", b"price?", timeout_s=PATIENCE_S)
        self.group.assign([MessageQueue("questions", NAME, 0)])
        (self.asked_message,) = polled(self.group, 1)


def lock(broker: HaBroker, client_id: str, nonce: int) -> Sequence[LockedQueue]:
    """Asks for the queue of "orders" for a group that consumes in order."""
    request = LockQueuesRequest(
        consumer_group="in-order", client_id=client_id, nonce=nonce, queues=[QueueName(topic="orders", queue_id=0)]
    )
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        return list(QueueLockServiceStub(channel).LockQueues(request, timeout=PATIENCE_S).queues)


def counts_of(checks: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    """The numbers of the questions about each message."""
    found: dict[str, list[int]] = {}
    for body, count in checks:
        found.setdefault(body, []).append(count)
    return found


def attempt_of(message: Message) -> int:
    assert isinstance(message.queue, PoppedQueue)
    return message.queue.attempt


@pytest.fixture(scope="module")
def failed_over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailOver]:
    folder: Path = tmp_path_factory.mktemp("delivery")
    settings: dict[str, Any] = {
        "pop_invisible_min_ms": 100,
        "transaction_timeout_ms": 300,
        "transaction_check_interval_ms": 300,
        "transaction_check_max": 10_000,
    }
    election = {"lease_ttl_ms": 2_000, "renew_interval_ms": 500}
    with elected_cluster(folder, count=2, election=election, **settings) as cluster, ExitStack() as stack:
        made = FailOver(cluster, stack)
        made.fail_over()
        yield made


def test_popped_messages_stay_with_their_holders_and_receipts_count(failed_over: FailOver) -> None:
    popper = failed_over.popper

    def receive(count: int) -> list[Message]:
        found: list[Message] = []

        def has_them() -> bool:
            found.extend(popper.receive("parcels", 6, invisible_s=HOUR_S, hold_s=1))
            return len(found) >= count

        wait_for(has_them, PATIENCE_S, pause_s=0.0)
        return sorted(found, key=lambda message: message.queue_offset)

    # Its time was up while nobody led; the last one nobody has had yet.
    again, new = receive(2)
    assert [(one.body, attempt_of(one)) for one in (again, new)] == [(b"4", 2), (b"5", 1)]
    with pytest.raises(StaleReceiptError):
        popper.ack(failed_over.short)
    assert popper.ack([failed_over.held, again, new]) == []
    assert popper.nack(failed_over.given_back) == []
    (given_back,) = receive(1)
    assert (given_back.body, attempt_of(given_back)) == (b"2", 2)
    assert popper.receive("parcels", 6, hold_s=0) == [], "one was acknowledged before, one is held for an hour"
    assert popper.ack([given_back, failed_over.kept]) == []


def test_a_group_keeps_its_offsets_settings_and_locks(failed_over: FailOver) -> None:
    assert failed_over.group.committed(MessageQueue("orders", NAME, 0)) == 3
    settings = failed_over.admin.get_group(GROUP)
    assert (settings.retry_count_max, tuple(settings.retry_delays_ms)) == (2, RETRY_DELAYS_MS)
    with (
        SimpleConsumer("off", namesrv=failed_over.cluster.namesrv) as popper,
        pytest.raises(GroupDisabledError),
    ):
        popper.receive("orders", hold_s=0)
    (other,) = lock(failed_over.new, "other", 2)
    assert (other.owner, other.token) == ("owner", 0)
    (again,) = lock(failed_over.new, "owner", 1)
    assert again == failed_over.lock


def test_a_request_that_was_under_way_gets_its_reply(failed_over: FailOver) -> None:
    failed_over.replied.result(PATIENCE_S)
    assert failed_over.asked.result(PATIENCE_S).body == b"17 EUR"


def test_open_transactions_are_ended_by_their_handles_or_asked_about(failed_over: FailOver) -> None:
    begun, admin = failed_over.begun, failed_over.admin
    begun["commit"].commit()
    begun["roll back"].roll_back()
    for name in ("committed", "commit"):
        assert failed_over.desk.end(begun[name].half, COMMIT), "it has ended so"
        with pytest.raises(TransactionEndedError):
            begun[name].roll_back()
    for name in ("rolled back", "roll back"):
        with pytest.raises(TransactionEndedError):
            begun[name].commit()
    wait_for(lambda: {body for body, _ in failed_over.checks} >= {"asked: commit", "asked: roll back"}, PATIENCE_S)
    failed_over.may_decide.set()
    wait_for(lambda: not admin.list_transactions(), PATIENCE_S)
    assert Counter(message.body for message in failed_over.read("bookings", 3)) == Counter(
        [b"committed", b"commit", b"asked: commit"]
    )
    for body, counts in counts_of(failed_over.checks).items():
        # A question says how often the broker had noted one when it was asked: two in a row may say the same.
        assert min(counts) >= max(failed_over.asked_before[body]), "the new master goes on counting"


def test_delayed_messages_come_once_and_never_early_and_recalled_ones_never(failed_over: FailOver) -> None:
    producer = failed_over.producer
    for sent in failed_over.recalled:
        assert not producer.recall("later", sent.recall_handle)
    assert producer.recall("later", failed_over.pending.recall_handle)
    assert not producer.recall("later", failed_over.pending.recall_handle)
    found = failed_over.read("later", len(LATER_S))
    assert sorted(message.body for message in found) == sorted(failed_over.due_ms)
    early_ms = {message.body: failed_over.due_ms[message.body] - message.store_time_ms for message in found}
    assert max(early_ms.values()) <= CLOCK_STEP_MS, early_ms


def test_retries_come_when_they_are_due_and_dead_letters_are_replayed_once(failed_over: FailOver) -> None:
    with grpc.insecure_channel(failed_over.new.address.grpc_address) as channel:
        answer = GroupServiceStub(channel).SendBack(failed_over.send_back, timeout=PATIENCE_S)
    assert answer.repeated_request, "the new master knows the request"
    group = failed_over.group
    group.assign([MessageQueue("%RETRY%g", NAME, 0)])
    group.seek_to_begin()
    (first,) = polled(group, 1)
    assert (first.body, first.attempt, first.last_error) == (b"retried", 1, "not yet")
    early_ms = failed_over.sent_back_ms + RETRY_DELAYS_MS[0] - first.store_time_ms
    assert early_ms <= CLOCK_STEP_MS
    assert not group.send_back(first, error="still not")[0].dead_letter
    (second,) = polled(group, 1)
    assert (second.body, second.attempt) == (b"retried", 2)
    assert group.send_back(second, error="never")[0].dead_letter

    letters = failed_over.read("%DLQ%g", 3)
    assert [message.record for message in letters[:2]] == [message.record for message in failed_over.letters]
    assert [(message.body, message.attempt, message.last_error) for message in letters] == [
        (b"dead", 1, "bad"), (b"replayed", 1, "bad"), (b"retried", 3, "never"),
    ]  # fmt: skip
    replay = failed_over.admin.replay_dead_letters(GROUP)
    assert (replay.replayed, replay.known) == (2, 1)
    bodies = [message.body for message in failed_over.read("orders", 6)]
    assert bodies == [b"retried", b"dead", b"replayed", b"replayed", b"dead", b"retried"]
