"""The only broker of a topic is down for a while: to nobody that is a deleted topic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from protomq import Admin, Message, Producer, PullConsumer, PushConsumer
from protomq.errors import (
    BrokerMissingError,
    NoRouteError,
    ProtomqError,
    TopicNotFoundError,
    TransportError,
)
from tests.support.cli import run
from tests.support.ha_brokers import NAME, HaBroker
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

TOPIC = "bookings"
SEND_S = 0.5


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[str, HaBroker]]:
    with running_namesrv() as server:
        namesrv = str(server.remoting)
        broker = HaBroker(tmp_path / "broker", "ASYNC_MASTER", 0, namesrv=[namesrv])
        try:
            broker.start()
            with Admin(namesrv=namesrv) as admin:
                admin.create_topic(TOPIC, write_queues=1, read_queues=1)
            yield namesrv, broker
        finally:
            broker.kill()


def error_of_send(producer: Producer, body: bytes) -> ProtomqError:
    with pytest.raises(ProtomqError) as caught:
        producer.send(TOPIC, body, timeout_s=SEND_S)
    return caught.value


def test_an_outage_of_the_only_broker_is_no_deleted_topic(
    place: tuple[str, HaBroker], caplog: pytest.LogCaptureFixture
) -> None:
    namesrv, broker = place
    got: list[bytes] = []
    consumer = PushConsumer("g", namesrv=namesrv, begin="earliest")

    @consumer.on(TOPIC)
    def _(message: Message) -> None:
        got.append(message.body)

    with consumer, Producer(namesrv=namesrv) as producer, PullConsumer("", namesrv=namesrv) as reader:
        producer.send(TOPIC, b"before")
        wait_for(lambda: got == [b"before"], PATIENCE_S)
        reader.subscribe(TOPIC)
        broker.kill()
        errors: list[ProtomqError] = []

        def is_away() -> bool:
            errors.append(error_of_send(producer, b"lost"))
            return isinstance(errors[-1], NoRouteError) and bool(errors[-1].metadata.get("missing_brokers"))

        wait_for(is_away, PATIENCE_S)
        assert not [error for error in errors if isinstance(error, TopicNotFoundError)]
        assert all(isinstance(error, NoRouteError | TransportError) for error in errors)
        with Producer(namesrv=namesrv) as new:
            error = error_of_send(new, b"refused")
        assert (type(error), error.definite, error.metadata["missing_brokers"]) == (NoRouteError, True, NAME)
        with PullConsumer("", namesrv=namesrv) as new_reader, pytest.raises(NoRouteError, match=NAME):
            new_reader.subscribe(TOPIC)
        with Admin(namesrv=namesrv) as admin, pytest.raises(BrokerMissingError, match=f"{NAME} is not registered"):
            admin.describe_topic(TOPIC)
        for command in (
            ["send", TOPIC, "x"], ["pull", TOPIC], ["consume", TOPIC, "--exit"], ["pop", TOPIC, "-G", "h", "-c", "0"],
            ["topic", "describe", TOPIC], ["group", "lag", "g", "-t", TOPIC],
        ):  # fmt: skip
            ended = run(*command, "--timeout", "1s", "-o", "json", namesrv=namesrv, code=3) if command[0] != "pop" else run(
                *command, "-o", "json", namesrv=namesrv, code=3
            )
            assert json.loads(ended.stderr.splitlines()[-1])["error"]["reason"] in ("BROKER_MISSING", "NO_ROUTE"), command
        reader.poll(0.2)
        broker.start()
        wait_for(lambda: producer.send(TOPIC, b"after"), PATIENCE_S)
        wait_for(lambda: got[-1] == b"after", PATIENCE_S)
    assert got.count(b"before") == 1
    assert "was deleted" not in caplog.text
