"""Requests while the lead is switched: no caller is told of it. Real brokers, elected by etcd."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from protomq import Admin, AsyncProducer, Producer, PullConsumer
from protomq.errors import CallerGoneError
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME
from tests.support.waiting import PATIENCE_S, wait_for

QUESTIONS = "questions"
TIMEOUT_S = 20.0
"""Of each request: less than the 30 s after which any route is looked up again."""
PAUSE_S = 0.1
"""Between two requests of a caller: it waits for nothing then, and makes itself known again with the next one."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElectedCluster]:
    with elected_cluster(tmp_path_factory.mktemp("requests"), count=2) as running:
        with Admin(namesrv=running.namesrv) as admin:
            admin.create_topic(QUESTIONS, write_queues=2, read_queues=2)
        with service(running.namesrv):
            yield running


@contextmanager
def service(namesrv: str) -> Iterator[None]:
    """Answers all questions, over both masters."""
    stop = threading.Event()

    def serve() -> None:
        with PullConsumer("service", namesrv=namesrv, request_timeout_s=PATIENCE_S) as consumer:
            consumer.subscribe(QUESTIONS)
            while not stop.is_set():
                for message in consumer.poll(0.1):
                    with suppress(CallerGoneError):
                        consumer.reply(message, message.body.upper(), timeout_s=PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        try:
            yield
        finally:
            stop.set()
        served.result()


def switch(cluster: ElectedCluster) -> None:
    """A planned one, as by `protomq ha switch`."""
    old = cluster.wait_leading(2)
    target = next(each for each in cluster.brokers if each is not old)
    with Admin(namesrv=cluster.namesrv) as admin:
        admin.switch_master(NAME, target.status().broker_id)
    wait_for(lambda: cluster.leading() is target, PATIENCE_S)


class Answers:
    """Of callers that ask one question after the other."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, question: bytes, answer: bytes) -> None:
        assert answer == question.upper()
        self.count += 1

    def wait_for_more(self, count: int, asked: Future[None]) -> None:
        """Until there are so many more, or a caller has failed."""
        wanted = self.count + count
        wait_for(lambda: self.count >= wanted or asked.done(), 2 * PATIENCE_S)


def ask_from_threads(way: dict[str, Any], answers: Answers, stop: threading.Event) -> None:
    def ask(caller: int) -> None:
        with Producer(**way) as producer:
            while not stop.wait(PAUSE_S):
                question = b"question of %d" % caller
                answers.add(question, producer.request(QUESTIONS, question, timeout_s=TIMEOUT_S).body)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, range(3)))


def ask_from_coroutines(way: dict[str, Any], answers: Answers, stop: threading.Event) -> None:
    async def ask(caller: int) -> None:
        async with AsyncProducer(**way) as producer:
            while not stop.is_set():
                question = b"question of %d" % caller
                reply = await producer.request(QUESTIONS, question, timeout_s=TIMEOUT_S)
                answers.add(question, reply.body)
                await asyncio.sleep(PAUSE_S)

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, range(3)))

    asyncio.run(ask_all())


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
@pytest.mark.parametrize("ask", [ask_from_threads, ask_from_coroutines])
def test_requests_go_on_while_the_lead_is_switched(cluster: ElectedCluster, ask: Callable[..., None], transport: str) -> None:
    """Each is answered in its time: those under way, and those that begin while nobody leads."""
    answers, stop = Answers(), threading.Event()
    way = {"namesrv": cluster.namesrv, "transport": transport}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, way, answers, stop)
        try:
            answers.wait_for_more(10, asked)
            switch(cluster)
            answers.wait_for_more(10, asked)
        finally:
            stop.set()
        asked.result()


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_caller_that_was_silent_during_a_switch_finds_the_new_master_at_once(cluster: ElectedCluster, transport: str) -> None:
    """Its route leads to the old one, where its connection was closed."""
    way: dict[str, Any] = {"namesrv": cluster.namesrv, "transport": transport}
    with Producer(**way) as producer:
        assert producer.request(QUESTIONS, b"before", timeout_s=TIMEOUT_S).body == b"BEFORE"
        switch(cluster)
        cluster.wait_leading(2)
        assert producer.request(QUESTIONS, b"after", timeout_s=TIMEOUT_S).body == b"AFTER"
