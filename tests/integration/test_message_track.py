"""Tracks of messages through a real broker: sent, delayed, retried, dead, replayed, committed, popped; and by whom consumed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from protomq import (
    Admin,
    Message,
    MessagePlace,
    PlaceKind,
    Producer,
    PullConsumer,
    SimpleConsumer,
    TrackState,
    TransactionDecision,
    TransactionProducer,
)
from protomq.errors import InvalidArgumentError
from protomq.testing import Broker
from tests.support.cli import jsonl, run
from tests.support.waiting import wait_for

PATIENCE_S = 60.0


@pytest.fixture
def name(protomq_server: Broker, request: pytest.FixtureRequest) -> str:
    """Of a topic with one queue, and of a group whose first failure is its last but one."""
    name = f"track-{abs(hash(request.node.name)):x}"
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.create_topic(name, write_queues=1, read_queues=1)
        admin.set_group(name, retry_count_max=1, retry_delays_ms=[10])
    return name


def polled(consumer: PullConsumer, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        found += consumer.poll(PATIENCE_S)
    return found


def places(broker: Broker, message_id: str) -> tuple[MessagePlace, ...]:
    with Admin(namesrv=broker.namesrv) as admin:
        return admin.track_message(message_id).places


def kinds(broker: Broker, message_id: str) -> list[tuple[str, str]]:
    return [(str(place.kind), place.queue.topic) for place in places(broker, message_id)]


def test_a_message_that_fails_is_followed_to_the_dead_letters_and_back(
    protomq_server: Broker, name: str
) -> None:
    with (
        Producer(namesrv=protomq_server.namesrv) as producer,
        PullConsumer(name, namesrv=protomq_server.namesrv) as consumer,
        Admin(namesrv=protomq_server.namesrv) as admin,
    ):
        other = producer.send(name, b"another one")
        sent = producer.send(name, b"poison", key="k")
        consumer.subscribe(name)
        consumer.subscribe_retries()
        for message in polled(consumer, 2):
            if message.body == b"poison":
                consumer.send_back(message, error=ValueError("first"))
        (again,) = polled(consumer, 1)
        consumer.send_back(again, error=ValueError("second"))
        consumer.commit()
        admin.replay_dead_letters(name)
        found = places(protomq_server, sent.message_id)
        retry, dead = f"%RETRY%{name}", f"%DLQ%{name}"
        assert [(place.kind, place.queue.topic, place.attempt, place.last_error, place.group) for place in found] == [
            (PlaceKind.SENT, name, 0, "", ""),
            (PlaceKind.RETRY, retry, 1, "ValueError: first", name),
            (PlaceKind.DEAD_LETTER, dead, 2, "ValueError: second", name),
            (PlaceKind.REPLAYED, name, 0, "ValueError: second", name),
        ]
        assert [dict(place.groups) for place in found] == [
            {name: TrackState.CONSUMED}, {name: TrackState.CONSUMED}, {}, {name: TrackState.NOT_YET},
        ]  # fmt: skip
        assert (found[0].queue_offset, found[3].queue_offset) == (1, 2)
        assert kinds(protomq_server, other.message_id) == [("SENT", name)]
        # The command line, by id and by key.
        rows = jsonl(run("message", "track", sent.message_id, "-o", "jsonl", namesrv=protomq_server.namesrv))
        assert [row["kind"] for row in rows] == ["SENT", "RETRY", "DEAD_LETTER", "REPLAYED"]
        assert rows[0]["groups"] == f"{name} CONSUMED"
        by_key = run("message", "track", "--key", "k", "--topic", name, "-o", "jsonl", namesrv=protomq_server.namesrv)
        assert jsonl(by_key) == rows
        origin = {"topic": name, "queue_id": 0, "queue_offset": 1}
        assert [row.get("origin") for row in rows] == [None, origin, origin, origin]
        (letter,) = jsonl(run("pull", dead, namesrv=protomq_server.namesrv))
        assert [letter[field] for field in ("attempt", "last_error", "origin")] == [2, "ValueError: second", origin]
        head, line = run("pull", dead, "-o", "table", namesrv=protomq_server.namesrv).stdout.splitlines()
        assert head.split()[-4:] == ["ATTEMPT", "ORIGIN", "LAST-ERROR", "BODY"]
        assert line.split()[-5:] == ["2", f"{name}/0@1", "ValueError:", "second", "poison"]
        assert [row.get("replayed_group") for row in jsonl(run("pull", name, namesrv=protomq_server.namesrv))] == [None, None, name]


def test_delays_and_transactions_show_where_the_message_came_from(
    protomq_server: Broker, name: str
) -> None:
    namesrv = protomq_server.namesrv
    with Producer(namesrv=namesrv) as producer:
        delayed = producer.send(name, b"later", delay=timedelta(milliseconds=200))
        wait_for(lambda: kinds(protomq_server, delayed.message_id) == [("DELAYED", name)])
        (place,) = places(protomq_server, delayed.message_id)
        assert (place.origin_topic, place.origin_offset) == (name, None)
    with TransactionProducer(name, lambda _: TransactionDecision.UNKNOWN, namesrv=namesrv) as producer:
        transaction = producer.begin(name, b"half")
        (open_,) = places(protomq_server, transaction.message_id)
        assert (open_.kind, open_.queue.topic, open_.queue_offset) == (PlaceKind.OPEN_TRANSACTION, name, None)
        transaction.commit()
        assert kinds(protomq_server, transaction.message_id) == [("COMMITTED", name)]


def test_what_waits_for_a_delay_or_a_retry_is_shown_with_its_time(
    protomq_server: Broker, name: str
) -> None:
    namesrv = protomq_server.namesrv
    with Producer(namesrv=namesrv) as producer, PullConsumer(name, namesrv=namesrv) as consumer:
        before = datetime.now(UTC)
        delayed = producer.send(name, b"later", delay=timedelta(hours=1))
        (place,) = places(protomq_server, delayed.message_id)
        assert (place.kind, place.queue.topic, place.queue_offset) == (PlaceKind.WAITING, name, None)
        assert place.due_time is not None
        assert timedelta(milliseconds=-1) < place.due_time - before - timedelta(hours=1) < timedelta(minutes=5)
        sent = producer.send(name, b"poison")
        consumer.subscribe(name)
        (message,) = polled(consumer, 1)
        told = consumer.send_back(message, error="no account", delay=3600)
        _, retry = places(protomq_server, sent.message_id)
        assert (retry.kind, retry.queue.topic, retry.group) == (PlaceKind.WAITING, f"%RETRY%{name}", name)
        assert (retry.attempt, retry.last_error, retry.due_time) == (1, "no account", told[0].due_time)
        (row,) = jsonl(run("message", "track", delayed.message_id, "-o", "jsonl", namesrv=namesrv))
        assert str(row["kind"]).startswith("WAITING until 20")
        assert producer.recall(name, delayed.recall_handle)
        assert places(protomq_server, delayed.message_id) == ()


def test_a_popped_message_is_held_until_it_is_acknowledged(protomq_server: Broker, name: str) -> None:
    with (
        Producer(namesrv=protomq_server.namesrv) as producer,
        SimpleConsumer("poppers", namesrv=protomq_server.namesrv) as consumer,
    ):
        first, second = (producer.send(name, body).message_id for body in (b"1", b"2"))
        (message,) = consumer.receive(name, 1, hold_s=10)
        assert message.message_id == first

        def state(message_id: str) -> dict[str, TrackState]:
            (place,) = places(protomq_server, message_id)
            return dict(place.groups)

        assert state(first) == {"poppers": TrackState.HELD}
        assert state(second) == {"poppers": TrackState.NOT_YET}
        consumer.ack(message)
        assert state(first) == {"poppers": TrackState.CONSUMED}


def test_what_no_broker_has_is_said(protomq_server: Broker) -> None:
    unknown = "0" * 39 + "7"
    assert places(protomq_server, unknown) == ()
    with pytest.raises(InvalidArgumentError, match="message_id"):
        places(protomq_server, "no id")
    ended = run("message", "track", unknown, namesrv=protomq_server.namesrv, code=4)
    assert f"no broker has a message with id {unknown}" in ended.stderr
    assert run("message", "track", namesrv=protomq_server.namesrv, code=2).stderr
    assert "--topic" in run("message", "track", "--key", "k", namesrv=protomq_server.namesrv, code=2).stderr
