"""A name server that is back before the broker knows no topic: clients that have used one wait for its broker, as RocketMQ's do."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from protomq import (
    Admin,
    AsyncProducer,
    AsyncSimpleConsumer,
    Producer,
    PushConsumer,
    SendResult,
    SimpleConsumer,
)
from protomq.errors import ConnectFailedError, TopicNotFoundError
from tests.support.named_brokers import read_ready, start
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

AWAY_S: Final = 4.0
"""More than DELETED_AFTER_S, after which consumers believe that a topic was deleted."""
Transport = Literal["remoting", "grpc"]
TRANSPORTS: Final[tuple[Transport, ...]] = ("remoting", "grpc")


class Servers:
    """A name server and a broker, each at ports of its own for good."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        with ExitStack() as held:
            sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
            self._ports = [one.getsockname()[1] for one in sockets]
        self.namesrv = f"127.0.0.1:{self._ports[1]}"

    def start_namesrv(self) -> None:
        self._namesrv = self._stack.enter_context(running_namesrv(*self._ports[:2])).process

    def start_broker(self) -> None:
        listen = {"grpc_port": self._ports[2], "remoting_port": self._ports[3]}
        process = start(self._folder, self.namesrv, listen=listen, auto_create_topics=False)
        self._broker = self._stack.enter_context(process)
        self._stack.callback(process.kill)
        assert read_ready(process) is not None

    def begin_again(self) -> None:
        """Both are killed; the name server is back."""
        for process in (self._broker, self._namesrv):
            process.kill()
            process.wait()
        self.start_namesrv()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        found = Servers(tmp_path / "broker", stack)
        found.start_namesrv()
        found.start_broker()
        with Admin(namesrv=found.namesrv) as admin:
            admin.create_topic("orders")
        yield found


class Clients:
    """Of one transport, at work on threads of their own until `stop`."""

    def __init__(self, namesrv: str, transport: Transport, stack: ExitStack) -> None:
        self.producer = stack.enter_context(Producer(namesrv=namesrv, transport=transport))
        self.hasty = stack.enter_context(Producer(namesrv=namesrv, transport=transport))
        self.receiver = stack.enter_context(SimpleConsumer(f"received-{transport}", namesrv=namesrv, transport=transport))
        self._handler = stack.enter_context(SimpleConsumer(f"handled-{transport}", namesrv=namesrv, transport=transport))
        self._push = PushConsumer(f"pushed-{transport}", namesrv=namesrv, transport=transport)
        self._got: dict[str, set[bytes]] = {"received": set(), "handled": set(), "pushed": set()}
        self._push.subscribe("orders", lambda message: self._got["pushed"].add(message.body))
        stack.enter_context(self._push)
        self._stop = threading.Event()
        self._pool = stack.enter_context(ThreadPoolExecutor(3))
        stack.callback(self.stop)  # Before its threads are waited for.
        self.at_work: list[Future[object]] = [self._pool.submit(self._handle), self._pool.submit(self._receive)]

    def stop(self) -> None:
        self._stop.set()
        self._handler.request_stop()
        self._push.stop()

    def send(self, body: bytes) -> Future[SendResult]:
        return self._pool.submit(self.producer.send, "orders", body, timeout_s=PATIENCE_S)

    def have(self, body: bytes) -> bool:
        return all(body in bodies for bodies in self._got.values())

    def _handle(self) -> None:
        self._handler.handle("orders", lambda message: self._got["handled"].add(message.body))

    def _receive(self) -> None:
        while not self._stop.is_set():
            self._got["received"].update(message.body for message in self.receiver.receive("orders", hold_s=0.5))


@pytest.mark.slow
def test_clients_wait_for_a_broker_that_comes_after_its_name_server(servers: Servers) -> None:
    with ExitStack() as stack:
        clients = [Clients(servers.namesrv, transport, stack) for transport in TRANSPORTS]
        for each in clients:
            each.send(b"before").result(PATIENCE_S)
            each.hasty.send("orders", b"before")
        wait_for(lambda: all(each.have(b"before") for each in clients), PATIENCE_S)
        servers.begin_again()
        sends = [each.send(b"after") for each in clients]
        futures: list[Future[Any]] = [*sends, *(work for each in clients for work in each.at_work)]
        done, _ = wait(futures, AWAY_S, return_when=FIRST_COMPLETED)
        assert not done
        for each in clients:
            with pytest.raises(ConnectFailedError):
                each.hasty.send("orders", b"in vain", timeout_s=0.5)
        newcomer = stack.enter_context(Producer(namesrv=servers.namesrv))
        with pytest.raises(TopicNotFoundError):
            newcomer.send("orders", b"of one that has never had a route")
        servers.start_broker()
        wait_for(lambda: all(each.have(b"after") for each in clients), PATIENCE_S)
        for send in sends:
            send.result(PATIENCE_S)
        for each in clients:
            each.stop()
            for work in each.at_work:
                work.result(PATIENCE_S)
        with Admin(namesrv=servers.namesrv) as admin:
            admin.delete_topic("orders")
        began_s = time.monotonic()
        for each in clients:
            with pytest.raises(TopicNotFoundError):
                each.producer.send("orders", b"of a topic that was deleted", timeout_s=PATIENCE_S)
            with pytest.raises(TopicNotFoundError):
                each.receiver.receive("orders", hold_s=PATIENCE_S)
        assert time.monotonic() - began_s < PATIENCE_S


@pytest.mark.slow
async def test_coroutines_wait_for_it_too(servers: Servers) -> None:
    async with (
        AsyncProducer(namesrv=servers.namesrv, send_timeout_s=PATIENCE_S) as producer,
        AsyncSimpleConsumer("g", namesrv=servers.namesrv) as consumer,
    ):
        await producer.send("orders", b"before")
        assert await consumer.receive("orders", hold_s=PATIENCE_S)
        await asyncio.to_thread(servers.begin_again)
        sending = asyncio.create_task(producer.send("orders", b"after"))
        assert await consumer.receive("orders", hold_s=1.0) == []
        assert not sending.done()
        await asyncio.to_thread(servers.start_broker)
        await sending
        bodies: set[bytes] = set()
        while b"after" not in bodies:
            bodies.update(message.body for message in await consumer.receive("orders", hold_s=PATIENCE_S))
