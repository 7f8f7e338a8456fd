"""A master that is stopped says nothing, and its connections stay: what may be made twice goes on at the next one."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
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
    _membership_logic,
)
from protomq.errors import GroupDisabledError, ProtomqError
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME
from tests.support.waiting import PATIENCE_S, wait_for

TIMEOUT_S: Final = 60.0
"""Of each call. Without a look at the route, half of it is the least that a call waits."""
LATEST_S: Final = 15.0
HOUR_S: Final = 3_600
HOLD_S: Final = 3.0
HELD_S: Final = 60.0
"""For which pulls and members' calls are held: so much longer than a fail-over takes, on a busy machine too."""
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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElectedCluster]:
    folder = tmp_path_factory.mktemp("silent")
    # A member holds its call for some part of the time after which it is given up.
    election, member_gap_ms = {"lease_ttl_ms": 2_000, "renew_interval_ms": 500}, int(2_000 * HELD_S)
    with elected_cluster(folder, count=2, election=election, member_gap_ms=member_gap_ms) as running:
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
        epoch = cluster.last_epoch_beside(old)
        old.process.send_signal(signal.SIGSTOP)
        try:
            stopped.set()
            for kind, callers in threads.items():
                for name, call in callers.calls.items():
                    waits[f"{name}, thread, {kind}"] = pool.submit(took_s, call)
            waits_s = {name: wait.result(2 * TIMEOUT_S) for name, wait in waits.items()}
        finally:
            old.process.send_signal(signal.SIGCONT)
    assert {name: wait_s for name, wait_s in waits_s.items() if wait_s > LATEST_S} == {}
    assert cluster.last_epoch_beside(old) > epoch
    cluster.wait_leading(2)


class Receivers:
    """Groups that receive a topic without a pause, by threads and coroutines over both kinds of port. Attributes: bodies, errors."""

    def __init__(self, pool: ThreadPoolExecutor, namesrv: str, topic: str) -> None:
        self.bodies: dict[str, list[bytes]] = {}
        self.errors: list[str] = []
        self._topic = topic
        self._stops = threading.Event()
        self._ended: list[Future[None]] = []
        kinds: tuple[Literal["remoting", "grpc"], ...] = ("remoting", "grpc")
        for kind in kinds:
            connection = ConnectionOptions(namesrv=namesrv, transport=kind)
            self._ended.append(pool.submit(self._receive, f"thread-{kind}", connection))
            self._ended.append(pool.submit(asyncio.run, self._receive_async(f"coroutine-{kind}", connection)))

    def _receive(self, group: str, connection: ConnectionOptions) -> None:
        found = self.bodies.setdefault(group, [])
        with SimpleConsumer(group, connection=connection) as consumer:
            while not self._stops.is_set():
                try:
                    found += [message.body for message in consumer.receive(self._topic, invisible_s=HOUR_S, hold_s=HOLD_S)]
                except ProtomqError as error:
                    self.errors.append(f"{group}: {error!r}")

    async def _receive_async(self, group: str, connection: ConnectionOptions) -> None:
        found = self.bodies.setdefault(group, [])
        async with AsyncSimpleConsumer(group, connection=connection) as consumer:
            while not self._stops.is_set():
                try:
                    found += [message.body for message in await consumer.receive(self._topic, invisible_s=HOUR_S, hold_s=HOLD_S)]
                except ProtomqError as error:
                    self.errors.append(f"{group}: {error!r}")

    def wait_for(self, body: bytes) -> None:
        """Until all groups have it."""
        wait_for(lambda: len(self.bodies) == 4 and all(body in found for found in self.bodies.values()), PATIENCE_S)

    def close(self) -> None:
        self._stops.set()
        for ended in self._ended:
            ended.result(PATIENCE_S)


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_receive_raises_nothing_during_a_fail_over_and_goes_on(cluster: ElectedCluster, sent: signal.Signals) -> None:
    old = cluster.wait_leading(2)
    topic = f"waited-{sent.name}"
    with Admin(namesrv=cluster.namesrv) as admin:
        admin.create_topic(topic, write_queues=1, read_queues=1)
    with ThreadPoolExecutor() as pool, Producer(namesrv=cluster.namesrv, send_timeout_s=TIMEOUT_S) as producer:
        producer.send(topic, b"before")
        receivers = Receivers(pool, cluster.namesrv, topic)
        try:
            receivers.wait_for(b"before")
            epoch = cluster.last_epoch_beside(old)
            old.process.send_signal(sent)
            began_s = time.monotonic()
            producer.send(topic, b"after")
            receivers.wait_for(b"after")
            took_s = time.monotonic() - began_s
        finally:
            if sent == signal.SIGSTOP:
                old.process.send_signal(signal.SIGCONT)
            receivers.close()
    if sent == signal.SIGKILL:
        old.kill()
        old.start()
    assert receivers.errors == []
    assert took_s < LATEST_S
    assert cluster.last_epoch_beside(old) > epoch
    cluster.wait_leading(2)


def test_members_of_groups_get_what_the_new_master_has_without_waiting_for_their_held_calls(
    cluster: ElectedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_membership_logic, "HOLD_S", HELD_S)
    old = cluster.wait_leading(2)
    with Admin(namesrv=cluster.namesrv) as admin:
        admin.create_topic("held", write_queues=4, read_queues=4)
    bodies: dict[str, list[bytes]] = {}
    ends, hold_ms = threading.Event(), int(1_000 * HELD_S)

    def consume(group: str, connection: ConnectionOptions) -> None:
        with PullConsumer(group, connection=connection, begin="earliest", hold_ms=hold_ms) as consumer:
            consumer.subscribe("held")
            while not ends.is_set():
                bodies.setdefault(group, []).extend(message.body for message in consumer.poll(1))

    async def consume_async(group: str, connection: ConnectionOptions) -> None:
        async with AsyncPullConsumer(group, connection=connection, begin="earliest", hold_ms=hold_ms) as consumer:
            await consumer.subscribe("held")
            while not ends.is_set():
                bodies.setdefault(group, []).extend(message.body for message in await consumer.poll(1))

    def wait_for_all(kind: bytes) -> None:
        wanted = {kind + b"%d" % number for number in range(8)}
        wait_for(lambda: len(bodies) == 4 and all(wanted <= set(found) for found in bodies.values()), PATIENCE_S)

    with ThreadPoolExecutor(16) as pool, Producer(namesrv=cluster.namesrv, send_timeout_s=TIMEOUT_S) as producer:
        kinds: tuple[Literal["remoting", "grpc"], ...] = ("remoting", "grpc")
        running = []
        try:
            for kind in kinds:
                connection = ConnectionOptions(namesrv=cluster.namesrv, transport=kind)
                for _ in range(2):
                    running.append(pool.submit(consume, f"threads-{kind}", connection))
                    running.append(pool.submit(asyncio.run, consume_async(f"coroutines-{kind}", connection)))
            for number in range(8):
                producer.send("held", b"before%d" % number, queue=MessageQueue("held", NAME, number % 4))
            wait_for_all(b"before")
            epoch = cluster.last_epoch_beside(old)
            old.process.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            for number in range(8):
                producer.send("held", b"after%d" % number, queue=MessageQueue("held", NAME, number % 4))
            wait_for_all(b"after")
            took_s = time.monotonic() - began_s
        finally:
            old.process.send_signal(signal.SIGCONT)
            ends.set()
            for one in running:
                one.result(PATIENCE_S)
    assert took_s < HELD_S / 2
    assert cluster.last_epoch_beside(old) > epoch
    cluster.wait_leading(2)


def test_receive_raises_what_waiting_does_not_mend_while_a_broker_is_silent(cluster: ElectedCluster) -> None:
    old = cluster.wait_leading(2)
    with Admin(namesrv=cluster.namesrv) as admin, SimpleConsumer("off", namesrv=cluster.namesrv) as consumer:
        admin.create_topic("refused", write_queues=1, read_queues=1)
        admin.set_group("off", consume_enabled=False)
        with pytest.raises(GroupDisabledError):
            consumer.receive("refused", hold_s=0)
        epoch = cluster.last_epoch_beside(old)
        old.process.send_signal(signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            with pytest.raises(GroupDisabledError):
                consumer.receive("refused", hold_s=LATEST_S)
            assert time.monotonic() - began_s < LATEST_S, "the new master says so"
        finally:
            old.process.send_signal(signal.SIGCONT)
    assert cluster.last_epoch_beside(old) > epoch
    cluster.wait_leading(2)
