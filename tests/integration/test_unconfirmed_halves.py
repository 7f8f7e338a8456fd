"""A half message that only the master has: no work is done for it, since a fail-over takes it back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protomq import (
    Admin,
    AsyncTransactionProducer,
    PullConsumer,
    SendStatus,
    TransactionDecision,
    TransactionProducer,
    TransactionResult,
)
from protomq.errors import NotConfirmedError
from protomq.hooks import EndTransactionContext, Hook
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import HaBroker
from tests.support.waiting import PATIENCE_S, is_stopped, wait_for

ROLL_BACK, COMMIT = TransactionDecision.ROLL_BACK, TransactionDecision.COMMIT
BEGIN_TIMEOUT_S = 2.0
MEMBER_TIMEOUT_MS = 15_000
"""So long a slave that is stopped stays in the in-sync set: half messages are answered meanwhile."""
SYNC_TIMEOUT_MS = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElectedCluster]:
    folder: Path = tmp_path_factory.mktemp("halves")
    ha, election = {"sync_timeout_ms": SYNC_TIMEOUT_MS}, {"member_timeout_ms": MEMBER_TIMEOUT_MS}
    with elected_cluster(folder, count=2, election=election, ha=ha, sync_flush_timeout_ms=SYNC_TIMEOUT_MS) as running:
        with Admin(namesrv=running.namesrv) as admin:
            admin.create_topic("bookings", write_queues=1, read_queues=1)
        yield running


def members(cluster: ElectedCluster) -> tuple[HaBroker, HaBroker]:
    """Master and slave, both in sync."""
    master = cluster.wait_leading(2)
    (slave,) = (broker for broker in cluster.brokers if broker is not master)
    return master, slave


def visible(cluster: ElectedCluster) -> list[bytes]:
    with PullConsumer("", namesrv=cluster.namesrv, request_timeout_s=PATIENCE_S) as consumer:
        consumer.assign(consumer.queues("bookings"))
        consumer.seek_to_begin()
        found: list[bytes] = []
        while batch := consumer.poll(1.0):
            found += [message.body for message in batch]
        return found


def send_by_thread(namesrv: str, body: bytes, done: list[object], **settings: Any) -> TransactionResult:
    with TransactionProducer("desk", lambda _: ROLL_BACK, namesrv=namesrv, send_timeout_s=2 * PATIENCE_S, **settings) as producer:
        return producer.send("bookings", body, execute=done.append)


def begin_by_thread(namesrv: str, body: bytes, done: list[object]) -> None:
    with (
        TransactionProducer("desk", lambda _: ROLL_BACK, namesrv=namesrv, send_timeout_s=2 * PATIENCE_S) as producer,
        producer.begin("bookings", body, timeout_s=BEGIN_TIMEOUT_S),
    ):
        done.append(body)


def send_by_coroutine(namesrv: str, body: bytes, done: list[object], **settings: Any) -> TransactionResult:
    async def run() -> TransactionResult:
        async with AsyncTransactionProducer(
            "desk", lambda _: ROLL_BACK, namesrv=namesrv, send_timeout_s=2 * PATIENCE_S, **settings
        ) as producer:
            return await producer.send("bookings", body, execute=done.append)

    return asyncio.run(run())


def begin_by_coroutine(namesrv: str, body: bytes, done: list[object]) -> None:
    async def run() -> None:
        async with (
            AsyncTransactionProducer("desk", lambda _: ROLL_BACK, namesrv=namesrv, send_timeout_s=2 * PATIENCE_S) as producer,
            await producer.begin("bookings", body, timeout_s=BEGIN_TIMEOUT_S),
        ):
            done.append(body)

    asyncio.run(run())


class Stopped:
    """A process that stands still in a `with` block, or until `go_on`."""

    def __init__(self, broker: HaBroker) -> None:
        self.process_id = broker.process.pid

    def __enter__(self) -> Stopped:
        os.kill(self.process_id, signal.SIGSTOP)
        wait_for(lambda: is_stopped(self.process_id), PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.process_id, signal.SIGCONT)


@pytest.mark.parametrize(
    ("send", "begin"), [(send_by_thread, begin_by_thread), (send_by_coroutine, begin_by_coroutine)], ids=["threads", "coroutines"]
)
def test_no_work_is_done_while_the_slave_stands_still_and_the_half_message_is_rolled_back(
    cluster: ElectedCluster, send: Callable[..., TransactionResult], begin: Callable[..., None]
) -> None:
    _, slave = members(cluster)
    done: list[object] = []
    with Stopped(slave):
        with pytest.raises(NotConfirmedError, match="answered FLUSH_SLAVE_TIMEOUT, so no transaction is begun") as caught:
            begin(cluster.namesrv, b"a block", done)
        # The slave has not confirmed the roll-back either.
        assert not caught.value.definite
        result = send(cluster.namesrv, b"not confirmed", done)
    # It left the in-sync set meanwhile, or came back: then the roll-back was answered.
    assert (done, result.half.status, result.decision, result.is_ended) == ([], SendStatus.FLUSH_SLAVE_TIMEOUT, ROLL_BACK, True)
    members(cluster)
    with Admin(namesrv=cluster.namesrv) as admin:
        wait_for(lambda: not admin.list_transactions(), PATIENCE_S)
    result = send(cluster.namesrv, b"booked", done)
    assert (len(done), result.decision, result.is_ended) == (1, COMMIT, True)
    assert set(visible(cluster)) == {b"booked"}


class FailOver(Hook):
    """Before the broker is told what a transaction is to end with, its master stands still, and the slave leads in its place."""

    def __init__(self, master: HaBroker, slave: HaBroker) -> None:
        self._master, self._slave = master, slave

    def before_end_transaction(self, context: EndTransactionContext) -> None:
        os.kill(self._slave.process.pid, signal.SIGKILL)
        self._slave.kill()
        os.kill(self._master.process.pid, signal.SIGSTOP)
        self._slave.start()


@pytest.mark.parametrize("send", [send_by_thread, send_by_coroutine], ids=["threads", "coroutines"])
def test_a_half_message_that_a_fail_over_has_taken_back_has_no_work_done_and_is_known_to_have_ended(
    cluster: ElectedCluster, send: Callable[..., TransactionResult], caplog: pytest.LogCaptureFixture
) -> None:
    master, slave = members(cluster)
    done: list[object] = []
    os.kill(slave.process.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: is_stopped(slave.process.pid), PATIENCE_S)
        result = send(cluster.namesrv, b"taken back", done, hooks=[FailOver(master, slave)])
    finally:
        os.kill(master.process.pid, signal.SIGCONT)
    assert (done, result.half.status, result.decision, result.is_ended) == ([], SendStatus.FLUSH_SLAVE_TIMEOUT, ROLL_BACK, True)
    assert "it will ask" not in caplog.text
    members(cluster)
    with Admin(namesrv=cluster.namesrv) as admin:
        assert not [one for one in admin.list_transactions() if one.message_id == result.half.message_id]
    assert b"taken back" not in visible(cluster)
