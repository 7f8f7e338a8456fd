"""Requests and replies through real brokers: over both transports, late, to callers that are gone, over kills of broker and caller."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from protomq import (
    Admin,
    AsyncProducer,
    AsyncPullConsumer,
    Message,
    Producer,
    PullConsumer,
    Reply,
    SimpleConsumer,
)
from protomq.errors import (
    CallerGoneError,
    ClosedError,
    ConfigurationError,
    MessageTooLargeError,
    RequestTimeoutError,
)
from protomq.testing import Broker
from tests.support.cli import PROTOMQ, environment_with, run

PATIENCE_S = 60.0


@pytest.fixture
def topic(protomq_server: Broker, request: pytest.FixtureRequest) -> str:
    return made_topic(protomq_server, f"requests-{abs(hash(request.node.name)):x}")


def made_topic(broker: Broker, name: str) -> str:
    with Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic(name, write_queues=2, read_queues=2)
    return name


@contextmanager
def service(
    broker: Broker, topic: str, answer: Callable[[PullConsumer, Message], None], group: str = "service", **options: Any
) -> Iterator[None]:
    """A thread that answers requests until the block ends; what `answer` raises is raised at the end."""
    stop = threading.Event()

    def serve() -> None:
        with PullConsumer(group, **({"namesrv": broker.namesrv} | options)) as consumer:
            consumer.subscribe(topic)
            while not stop.is_set():
                for message in consumer.poll(0.05):
                    answer(consumer, message)

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        try:
            yield
        finally:
            stop.set()
        served.result()


def upper(consumer: PullConsumer, message: Message) -> None:
    with suppress(CallerGoneError):  # It has the reply of another group.
        answer_upper(consumer, message)


def answer_upper(consumer: PullConsumer, message: Message) -> None:
    consumer.reply(message, message.body.upper(), properties={"of": message.key or ""})


def polled(consumer: PullConsumer) -> Message:
    """The next message, alone."""
    while True:
        if found := consumer.poll(PATIENCE_S, max_messages=1):
            return found[0]


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_request_gets_the_reply_of_whoever_consumes_it(
    protomq_server: Broker, topic: str, transport: str
) -> None:
    address = protomq_server.remoting_address if transport == "remoting" else protomq_server.grpc_address
    way: Any = {"namesrv": address, "transport": transport}
    with service(protomq_server, topic, upper, **way), Producer(**way) as producer:
        reply = producer.request(topic, b"hello", key="k", properties={"a": "b"}, timeout_s=PATIENCE_S)
        assert isinstance(reply, Reply)
        assert (reply.body, reply.properties) == (b"HELLO", {"of": "k"})
        assert reply.request.queue.topic == topic
        bodies = [b"%d" % number for number in range(40)]
        with ThreadPoolExecutor(8) as pool:
            replies = pool.map(lambda body: producer.request(topic, body + b"x", timeout_s=PATIENCE_S).body, bodies)
            assert list(replies) == [body + b"X" for body in bodies]


def test_coroutines_request_and_reply_and_so_do_those_who_pop(
    protomq_server: Broker, topic: str
) -> None:
    async def replies() -> None:
        async with (
            AsyncProducer(namesrv=protomq_server.namesrv) as producer,
            AsyncPullConsumer("coroutines", namesrv=protomq_server.namesrv) as consumer,
        ):
            await consumer.subscribe(topic)

            async def serve() -> None:
                while True:
                    for message in await consumer.poll(1.0):
                        await consumer.reply(message, message.body * 2)

            serving = asyncio.create_task(serve())
            asked = [producer.request(topic, b"%d" % number, timeout_s=PATIENCE_S) for number in range(30)]
            found = await asyncio.gather(*asked)
            assert [reply.body for reply in found] == [b"%d%d" % (number, number) for number in range(30)]
            serving.cancel()
            with pytest.raises(RequestTimeoutError, match="no reply to message"):
                await producer.request(topic, b"nobody", timeout_s=0.3)

    asyncio.run(asyncio.wait_for(replies(), PATIENCE_S))
    with (
        Producer(namesrv=protomq_server.namesrv) as producer,
        SimpleConsumer("poppers", namesrv=protomq_server.namesrv) as popper,
        ThreadPoolExecutor(1) as pool,
    ):
        assert popper.receive(topic, hold_s=0, start="latest") == []
        asked = pool.submit(producer.request, topic, b"pop", timeout_s=PATIENCE_S)
        found: list[Message] = []
        while not found:
            found = popper.receive(topic, hold_s=1, start="latest")
        popper.reply(found[0], b"popped")
        assert asked.result().body == b"popped"
        popper.ack(found)


def test_nobody_waits_for_a_late_reply_or_that_of_a_caller_that_is_gone(
    protomq_server: Broker, topic: str
) -> None:
    with PullConsumer("late", namesrv=protomq_server.namesrv) as consumer:
        consumer.subscribe(topic)
        with Producer(namesrv=protomq_server.namesrv) as producer:
            with pytest.raises(RequestTimeoutError) as caught:
                producer.request(topic, b"late", timeout_s=0.2)
            assert not caught.value.definite
            message = polled(consumer)
            assert caught.value.metadata["message_id"] == message.message_id
            with ThreadPoolExecutor(1) as pool:
                # The caller is there, and waits for another call.
                other = pool.submit(producer.request, topic, b"next", timeout_s=PATIENCE_S)
                following = polled(consumer)
                with pytest.raises(CallerGoneError) as gone:
                    consumer.reply(message, b"too late", timeout_s=PATIENCE_S)
                assert gone.value.definite
                consumer.reply(following, b"in time", timeout_s=PATIENCE_S)
                consumer.reply(following, b"said again", timeout_s=PATIENCE_S)
                assert other.result().body == b"in time"
        with pytest.raises(CallerGoneError):  # At once, or when the broker has run for 10 s.
            consumer.reply(following, b"to nobody")
        with pytest.raises(ClosedError):
            producer.request(topic, b"closed")


def test_the_first_reply_of_several_groups_counts(protomq_server: Broker, topic: str) -> None:
    with (
        service(protomq_server, topic, upper, "one"),
        service(protomq_server, topic, upper, "two"),
        Producer(namesrv=protomq_server.namesrv) as producer,
    ):
        for _ in range(5):
            assert producer.request(topic, b"both", timeout_s=PATIENCE_S).body == b"BOTH"


def test_a_reply_that_cannot_be_is_refused(protomq_server: Broker, topic: str) -> None:
    with (
        Producer(namesrv=protomq_server.namesrv) as producer,
        PullConsumer("refused", namesrv=protomq_server.namesrv) as consumer,
    ):
        consumer.subscribe(topic)
        producer.send(topic, b"no request")
        with pytest.raises(ConfigurationError, match="asks for no reply"):
            consumer.reply(polled(consumer), b"")
        with pytest.raises(ConfigurationError, match="CORRELATION_ID"):
            producer.request(topic, b"", properties={"CORRELATION_ID": "mine"})
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(producer.request, topic, b"large", timeout_s=PATIENCE_S)
            message = polled(consumer)
            with pytest.raises(MessageTooLargeError):
                consumer.reply(message, bytes((3 << 20) + 1))
            producer.reply(message, bytes((3 << 20) - 300), timeout_s=PATIENCE_S)
            assert len(asked.result().body) == (3 << 20) - 300


def test_a_broker_that_is_killed_between_request_and_reply_brings_the_reply_when_it_is_back(
    tmp_path: Path,
) -> None:
    with Broker(data_dir=tmp_path) as broker:
        topic = made_topic(broker, "flights")
        with (
            Producer(namesrv=broker.namesrv) as producer,
            PullConsumer("killed", namesrv=broker.namesrv, auto_commit=False) as consumer,
            ThreadPoolExecutor(2) as pool,
        ):
            consumer.subscribe(topic)
            asked = pool.submit(producer.request, topic, b"price?", timeout_s=PATIENCE_S)
            message = polled(consumer)
            broker.kill()
            replied = pool.submit(consumer.reply, message, b"17 EUR", timeout_s=PATIENCE_S)
            broker.restart()
            assert asked.result().body == b"17 EUR"
            replied.result()


def test_a_caller_that_was_stopped_for_longer_than_the_request_time_out_gets_its_reply(protomq_server: Broker, topic: str) -> None:
    caller = subprocess.Popen(
        [*PROTOMQ, "request", topic, "hello", "--timeout", str(PATIENCE_S)],
        env=environment_with(protomq_server.namesrv),
        stdout=subprocess.PIPE,
    )
    try:
        with PullConsumer("stopped", namesrv=protomq_server.namesrv, request_timeout_s=0.5) as consumer, ThreadPoolExecutor(1) as pool:
            consumer.subscribe(topic)
            message = polled(consumer)
            caller.send_signal(signal.SIGSTOP)
            os.waitpid(caller.pid, os.WUNTRACED)  # Until all its threads have stopped.
            replied = pool.submit(consumer.reply, message, b"hello again")
            with pytest.raises(TimeoutError):
                replied.result(1.0)
            caller.send_signal(signal.SIGCONT)
            replied.result()
            assert caller.communicate()[0] == b"hello again\n"
    finally:
        caller.kill()
        caller.wait()


def test_a_caller_that_is_killed_is_gone(protomq_server: Broker, topic: str) -> None:
    caller = subprocess.Popen(
        [*PROTOMQ, "request", topic, "hello", "--timeout", str(PATIENCE_S)],
        env=environment_with(protomq_server.namesrv),
        stdout=subprocess.DEVNULL,
    )
    try:
        with PullConsumer("of-the-dead", namesrv=protomq_server.namesrv) as consumer:
            consumer.subscribe(topic)
            message = polled(consumer)
            caller.send_signal(signal.SIGKILL)
            caller.wait()
            with pytest.raises(RequestTimeoutError, match="may come back"):
                consumer.reply(message, b"anybody?", timeout_s=0.5)
            with pytest.raises(CallerGoneError):  # For longer than a caller that is cut off needs to come back.
                consumer.reply(message, b"anybody?")
    finally:
        caller.kill()
        caller.wait()


def test_the_command_line_asks_and_shows_the_reply(protomq_server: Broker, topic: str) -> None:
    with service(protomq_server, topic, upper):
        asked = run("request", topic, "hello", "--key", "k", "--timeout", "60", namesrv=protomq_server.namesrv)
        assert asked.stdout == "HELLO\n"
    nobody = run("request", topic, "hello", "--timeout", "0.3", namesrv=protomq_server.namesrv, code=3)
    assert "no reply to message" in nobody.stderr
