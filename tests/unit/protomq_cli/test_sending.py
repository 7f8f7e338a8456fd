"""What `send` says of what it has sent, and what may stand on its command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from protomq import BatchResult, MessageQueue, OutgoingMessage, SendStatus
from protomq._outgoing import Stored
from protomq.errors import BatchIncompleteError, ConnectFailedError
from protomq_cli import sending
from tests.support.cli import run

NOWHERE = "127.0.0.1:1"


class FakeProducer:
    """Takes `left` messages, one a request, and then no more. `bodies`: those that it has."""

    compression = "zlib"

    def __init__(self, left: int) -> None:
        self._left = left
        self.bodies: list[bytes] = []
        self.statuses = [SendStatus.SEND_OK]

    def send_batch(self, topic: str, messages: list[OutgoingMessage]) -> BatchResult:
        stored = []
        for message in messages[: self._left]:
            number = len(self.bodies)
            status = self.statuses[number % len(self.statuses)]
            stored.append(Stored(status, MessageQueue(topic, "a", number % 2), number // 2, 0, False, (1, 0), number, 1))
            self.bodies.append(bytes(message.body))
        self._left -= len(stored)
        if len(stored) < len(messages):
            raise BatchIncompleteError("some are stored", stored) from ConnectFailedError("refused")
        return BatchResult(stored)


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> FakeProducer:
    made = FakeProducer(3)

    @contextmanager
    def opened(*_: Any, **__: Any) -> Iterator[FakeProducer]:
        yield made

    monkeypatch.setattr(sending, "open_producer", opened)
    return made


def test_what_is_stored_of_a_batch_that_fails_is_shown(producer: FakeProducer) -> None:
    sent = run("send", "t", "-o", "jsonl", stdin="0\n1\n2\n3\n4\n", namesrv=NOWHERE, code=1)
    rows = [json.loads(line) for line in sent.stdout.splitlines()]
    assert [(row["queue_id"], row["queue_offset"]) for row in rows] == [(0, 0), (1, 0), (0, 1)]
    assert len({row["message_id"] for row in rows}) == 3
    assert json.loads(sent.stderr)["error"]["reason"] == "BATCH_INCOMPLETE"


@pytest.mark.parametrize("flags", [[], ["-Q"]])
def test_who_wants_no_rows_is_told_which_messages_may_be_lost(producer: FakeProducer, flags: list[str]) -> None:
    producer.statuses = [SendStatus.SLAVE_NOT_AVAILABLE, SendStatus.SEND_OK, SendStatus.SLAVE_NOT_AVAILABLE]
    sent = run("send", "t", *flags, stdin="0\n1\n2\n", namesrv=NOWHERE)
    told = "protomq: 2 messages are stored with SLAVE_NOT_AVAILABLE: a power cut or a fail-over may take them back"
    assert sent.stdout.count("SLAVE_NOT_AVAILABLE") == (0 if flags else 2)
    assert [line for line in sent.stderr.splitlines() if "stored" in line] == ([told] if flags else [])


def test_octets_that_are_no_utf8_are_bodies_and_no_names(producer: FakeProducer) -> None:
    run("send", "t", "\udcff", namesrv=NOWHERE)
    run("send", "t", "-K", "\udcff", stdin="a:b", namesrv=NOWHERE, code=2)
    assert producer.bodies == [b"\xff"]
    assert r"'\udcff' is no UTF-8" in run("pull", "\udcff", namesrv=NOWHERE, code=2).stderr
    assert "it is empty" in run("send", "t", "-K", "", stdin="a:b", namesrv=NOWHERE, code=2).stderr
