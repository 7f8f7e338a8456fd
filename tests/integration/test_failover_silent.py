"""A master that is stopped says nothing, and its connections stay: what may be made twice goes on at the next one."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from protomq import (
    Admin,
    AsyncProducer,
    AsyncPullConsumer,
    AsyncSimpleConsumer,
    ConnectionOptions,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    SimpleConsumer,
    TransactionDecision,
    TransactionProducer,
)
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME
from tests.support.waiting import PATIENCE_S

TIMEOUT_S: Final = 60.0
"""Of each call. Without a look at the route, half of it is the least that a call waits."""
LATEST_S: Final = 15.0
HOUR_S: Final = 3_600
TOPICS: Final = ("popped", "consumed", "later", "bookings", "questions")


def polled(consumer: PullConsumer) -> Message:
    (message,) = consumer.poll(PATIENCE_S, max_messages=1)
    return message


class Callers:
    """Clients of one kind of port, that have each what one call is about. Attribute: calls, by name; each is made once, and returns."""

    def __init__(self, stack: ExitStack, pool: ThreadPoolExecutor, namesrv: str, transport: Literal["remoting", "grpc"]) -> None:
        way: dict[str, Any] = {"connection": ConnectionOptions(namesrv=namesrv, transport=transport)}
        group = f"g-{transport}"
        producer = stack.enter_context(Producer(send_timeout_s=TIMEOUT_S, **way))
        popper = stack.enter_context(SimpleConsumer(group, request_timeout_s=TIMEOUT_S, **way))
        consumer = stack.enter_context(
            PullConsumer(group, begin="earliest", auto_commit=False, request_timeout_s=TIMEOUT_S, **way)
        )
        replier = stack.enter_context(PullConsumer(f"{group}-replies", begin="earliest", request_timeout_s=TIMEOUT_S, **way))
        desk = stack.enter_context(
            TransactionProducer(group, lambda check: TransactionDecision.UNKNOWN, send_timeout_s=TIMEOUT_S, **way)
        )
        for _ in range(3):
            producer.send("popped", b"x")
        done, held, given_back = popper.receive("popped", 3, invisible_s=HOUR_S)
        producer.send("consumed", b"x")
        consumer.assign([MessageQueue("consumed", NAME, 0)])
        consumed = polled(consumer)
        recalled = producer.send("later", b"x", delay=HOUR_S)
        transaction = desk.begin("bookings", b"x")
        self.asked = pool.submit(producer.request, "questions", transport.encode(), timeout_s=TIMEOUT_S)
        replier.assign([MessageQueue("questions", NAME, 0)])
        question = polled(replier)
        while question.body != transport.encode():
            question = polled(replier)

        def recall() -> None:
            assert producer.recall("later", recalled.recall_handle)

        def reply() -> None:
            replier.reply(question, b"answer", timeout_s=TIMEOUT_S)
            assert self.asked.result().body == b"answer"

        def ack() -> None:
            assert popper.ack(done) == []

        def hold() -> None:
            assert popper.change_invisible(held, 2 * HOUR_S) == []

        def give_back() -> None:
            assert popper.nack(given_back, HOUR_S, error="not yet") == []

        def send_back() -> None:
            assert consumer.send_back([consumed], error="not yet")[0].attempt == 1

        self.calls: dict[str, Callable[[], None]] = {
            "recall": recall, "reply": reply, "ack": ack, "hold": hold, "give back": give_back, "send back": send_back,
            "commit": lambda: consumer.commit({MessageQueue("consumed", NAME, 0): 1}),
            "end of a transaction": lambda: transaction.commit(TIMEOUT_S),
        }  # fmt: skip


class Coroutines:
    """The same of coroutines, each on a loop of its own, which prepares before the master is stopped."""

    def __init__(self, namesrv: str, transport: Literal["remoting", "grpc"], stopped: threading.Event) -> None:
        self._way: dict[str, Any] = {"connection": ConnectionOptions(namesrv=namesrv, transport=transport)}
        self._group = f"c-{transport}"
        self._stopped = stopped
        self.are_ready = threading.Barrier(4)
        self.calls: dict[str, Callable[[], Coroutine[Any, Any, float]]] = {
            "ack": self._ack, "commit": self._commit, "recall": self._recall,
        }  # fmt: skip

    async def _timed(self, call: Callable[[], Coroutine[Any, Any, object]]) -> float:
        await asyncio.to_thread(self.are_ready.wait)
        await asyncio.to_thread(self._stopped.wait)
        began_s = time.monotonic()
        await call()
        return time.monotonic() - began_s

    async def _ack(self) -> float:
        async with (
            AsyncProducer(send_timeout_s=TIMEOUT_S, **self._way) as producer,
            AsyncSimpleConsumer(self._group, request_timeout_s=TIMEOUT_S, **self._way) as popper,
        ):
            await producer.send("popped", b"x")
            messages = await popper.receive("popped", 1, invisible_s=HOUR_S)
            return await self._timed(lambda: popper.ack(messages))

    async def _commit(self) -> float:
        queue = MessageQueue("consumed", NAME, 0)
        async with AsyncPullConsumer(self._group, auto_commit=False, request_timeout_s=TIMEOUT_S, **self._way) as consumer:
            await consumer.assign([queue])
            await consumer.commit({queue: 0})
            return await self._timed(lambda: consumer.commit({queue: 1}))

    async def _recall(self) -> float:
        async with AsyncProducer(send_timeout_s=TIMEOUT_S, **self._way) as producer:
            sent = await producer.send("later", b"x", delay=HOUR_S)
            return await self._timed(lambda: producer.recall("later", sent.recall_handle))


def took_s(call: Callable[[], None]) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    with elected_cluster(tmp_path, count=2, election={"lease_ttl_ms": 2_000, "renew_interval_ms": 500}) as running:
        yield running


def test_what_may_be_made_twice_does_not_wait_for_a_silent_master(cluster: ElectedCluster) -> None:
    old = cluster.wait_leading(2)
    with Admin(namesrv=cluster.namesrv) as admin:
        for topic in TOPICS:
            admin.create_topic(topic, write_queues=1, read_queues=1)
    stopped = threading.Event()
    waits: dict[str, Future[float]] = {}
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(32))
        kinds: tuple[Literal["remoting", "grpc"], ...] = ("remoting", "grpc")
        for kind in kinds:
            coroutines = Coroutines(cluster.namesrv, kind, stopped)
            for name, begin in coroutines.calls.items():
                waits[f"{name}, coroutine, {kind}"] = pool.submit(asyncio.run, begin())
            coroutines.are_ready.wait(PATIENCE_S)
        threads = {kind: Callers(stack, pool, cluster.namesrv, kind) for kind in kinds}
        old.process.send_signal(signal.SIGSTOP)
        try:
            stopped.set()
            for kind, callers in threads.items():
                for name, call in callers.calls.items():
                    waits[f"{name}, thread, {kind}"] = pool.submit(took_s, call)
            waits_s = {name: wait.result(2 * TIMEOUT_S) for name, wait in waits.items()}
        finally:
            old.process.send_signal(signal.SIGCONT)
    print({name: round(wait_s, 2) for name, wait_s in waits_s.items()})
    assert {name: wait_s for name, wait_s in waits_s.items() if wait_s > LATEST_S} == {}
    assert cluster.wait_leading(2) is not old
