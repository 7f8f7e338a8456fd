"""Retries and dead letters through a real broker: what a consumer gives back comes again, or is a dead letter; a kill loses nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest

from protomq import (
    Admin,
    AsyncPullConsumer,
    Message,
    MessageOrigin,
    Producer,
    PullConsumer,
    PushConsumer,
    ReplayProgress,
    Retry,
    SimpleConsumer,
)
from protomq.errors import (
    ConfigurationError,
    NotPermittedError,
    TopicNotFoundError,
    WrongTypeError,
)
from protomq.testing import Broker
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq.v1.send_service_pb2_grpc import SendServiceStub
from tests.support.cli import jsonl, run
from tests.support.waiting import wait_for

PATIENCE_S = 30.0


@pytest.fixture
def group(protomq_server: Broker, request: pytest.FixtureRequest) -> str:
    """A group whose retries wait for 20 and 50 ms, and are two."""
    name = f"g-{abs(hash(request.node.name)):x}"
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.set_group(name, retry_count_max=2, retry_delays_ms=[20, 50])
    return name


def polled(consumer: PullConsumer, count: int) -> list[Message]:
    """So many messages."""
    found: list[Message] = []
    while len(found) < count:
        found += consumer.poll(PATIENCE_S)
    return found


def dead_letters(broker: Broker, group: str, count: int) -> list[Message]:
    topic = f"%DLQ%{group}"

    def is_there() -> bool:
        with suppress(TopicNotFoundError):
            return bool(consumer.queues(topic))
        return False

    with PullConsumer(namesrv=broker.namesrv) as consumer:
        wait_for(is_there)  # The name server may not know it yet.
        consumer.subscribe(topic)
        return polled(consumer, count)


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_message_comes_again_until_its_retries_are_spent(
    protomq_server: Broker, group: str, transport: str
) -> None:
    namesrv = (
        protomq_server.remoting_address if transport == "remoting" else protomq_server.grpc_address
    )
    topic = f"orders-{transport}"
    with Producer(namesrv=protomq_server.namesrv) as producer:
        sent = producer.send(topic, b"poison", key="k", properties={"a": "b"})
    with PullConsumer(group, namesrv=namesrv, transport=transport) as consumer:  # type: ignore[arg-type]
        consumer.subscribe(topic)
        consumer.subscribe_retries()
        seen = []
        while True:
            (message,) = polled(consumer, 1)
            seen.append((message.attempt, message.last_error))
            (told,) = consumer.send_back(message, error=ValueError(f"no {len(seen)}"))
            assert told.attempt == len(seen)
            if told.dead_letter:
                break
            assert told.due_time is not None
    assert seen == [(0, ""), (1, "ValueError: no 1"), (2, "ValueError: no 2")]
    (dead,) = dead_letters(protomq_server, group, 1)
    assert (dead.message_id, dead.body, dead.key) == (sent.message_id, b"poison", "k")
    assert dead.properties == {"a": "b"}
    assert (dead.attempt, dead.last_error) == (3, "ValueError: no 3")
    assert dead.origin is not None
    assert dead.origin[:3] == (topic, sent.queue.queue_id, sent.queue_offset)
    assert isinstance(dead.origin, MessageOrigin)


@pytest.mark.parametrize("kind", ["push", "orderly", "pop"])
def test_who_consumes_the_dead_letters_of_others_has_all_its_retries_and_counts_them_itself(
    protomq_server: Broker, group: str, kind: str
) -> None:
    topic, others = f"of-others-{kind}", f"others-{kind}"
    seen: SimpleQueue[int] = SimpleQueue()

    def dead_letter_of(name: str) -> Message:
        with Admin(namesrv=protomq_server.namesrv) as admin:
            wait_for(lambda: name in {one.group for one in admin.list_dead_letters()}, PATIENCE_S)
        return dead_letters(protomq_server, name, 1)[0]

    def fail(message: Message) -> Retry:
        seen.put(message.attempt)
        return Retry(delay=0.0, error="again")

    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.set_group(others, retry_count_max=4)
    with Producer(namesrv=protomq_server.namesrv) as producer:
        producer.send(topic, b"poison")
    first = PushConsumer(others, namesrv=protomq_server.namesrv)
    first.subscribe(topic, fail)
    with first:
        assert [seen.get(timeout=PATIENCE_S) for _ in range(5)] == [0, 1, 2, 3, 4]
        assert dead_letter_of(others).attempt == 5
    with ExitStack() as stack:
        if kind == "pop":
            simple = stack.enter_context(SimpleConsumer(group, namesrv=protomq_server.namesrv))
            thread = threading.Thread(target=simple.handle, args=(f"%DLQ%{others}", fail))
            thread.start()
            stack.callback(thread.join)
            stack.callback(simple.request_stop)
        else:
            consumer = PushConsumer(group, namesrv=protomq_server.namesrv, orderly=kind == "orderly", suspend_ms=10)
            consumer.subscribe(f"%DLQ%{others}", fail)
            stack.enter_context(consumer)
        assert [seen.get(timeout=PATIENCE_S) for _ in range(3)] == [5, 1, 2]
        letter = dead_letter_of(group)
    assert (letter.attempt, letter.last_error) == (3, "again")


def test_coroutines_give_back_too(protomq_server: Broker, group: str) -> None:
    with Producer(namesrv=protomq_server.namesrv) as producer:
        for body in (b"a", b"b"):
            producer.send("tasks", body)

    async def consume() -> list[tuple[bytes, int]]:
        async with AsyncPullConsumer(group, namesrv=protomq_server.namesrv) as consumer:
            await consumer.subscribe("tasks")
            await consumer.subscribe_retries()
            first: list[Message] = []
            while len(first) < 2:
                first += await consumer.poll(PATIENCE_S)
            told = await consumer.send_back(first, delay=0.001, error="later")
            assert [one.attempt for one in told] == [1, 1]
            again: list[Message] = []
            while len(again) < 2:
                again += await consumer.poll(PATIENCE_S)
            return sorted((message.body, message.attempt) for message in again)

    assert asyncio.run(consume()) == [(b"a", 1), (b"b", 1)]


def test_more_than_one_request_takes_go_back_in_several(protomq_server: Broker, group: str) -> None:
    with Producer(namesrv=protomq_server.namesrv) as producer:
        producer.send_batch("many", [b"%d" % number for number in range(600)])
    with PullConsumer(group, namesrv=protomq_server.namesrv) as consumer:
        consumer.subscribe("many")
        told = consumer.send_back(polled(consumer, 600), dead_letter=True)
    assert len(told) == 600
    assert all(one.dead_letter for one in told)
    bodies = {message.body for message in dead_letters(protomq_server, group, 600)}
    assert len(bodies) == 600


def test_topics_of_groups_are_listed_when_asked_for_and_nobody_sends_to_them(
    protomq_server: Broker, group: str
) -> None:
    with Producer(namesrv=protomq_server.namesrv) as producer:
        producer.send("listed", b"x")
        with PullConsumer(group, namesrv=protomq_server.namesrv) as consumer:
            consumer.subscribe("listed")
            consumer.send_back(polled(consumer, 1))
            consumer.subscribe_retries()
        retry = f"%RETRY%{group}"
        with Admin(namesrv=protomq_server.namesrv) as admin:
            assert retry not in admin.list_topic_names()
            assert retry in admin.list_topic_names(group_topics=True)
            ((name, topics),) = admin.list_topics(group_topics=True).items()
            assert retry in {topic.name for topic in topics}
            assert retry not in {topic.name for topic in admin.list_topics()[name]}
        with pytest.raises(NotPermittedError, match="only the broker writes it"):
            producer.send(retry, b"x")
        channel = grpc.insecure_channel(protomq_server.grpc_address)
        with channel, pytest.raises(grpc.RpcError, match="by the broker alone"):
            SendServiceStub(channel).Send(SendRequest(topic=retry, records=[Record(body=b"x")]))


def test_what_cannot_be_given_back_is_told(protomq_server: Broker, group: str) -> None:
    with Producer(namesrv=protomq_server.namesrv) as producer:
        producer.send("misuse", b"x")
    with PullConsumer(namesrv=protomq_server.namesrv) as nobody:
        nobody.subscribe("misuse")
        (message,) = polled(nobody, 1)
        with pytest.raises(ConfigurationError, match="give the consumer one"):
            nobody.send_back(message)
    with PullConsumer(group, namesrv=protomq_server.namesrv) as consumer:
        with pytest.raises(ConfigurationError, match="subscribe to a topic"):
            consumer.subscribe_retries()
        calls: list[Callable[[], object]] = [
            lambda: consumer.send_back(b"x"),  # type: ignore[arg-type]
            lambda: consumer.send_back([b"x"]),  # type: ignore[list-item]
            lambda: consumer.send_back(message, error=5),  # type: ignore[arg-type]
            lambda: consumer.send_back(message, delay="soon"),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(WrongTypeError):
                call()
        with pytest.raises(ConfigurationError, match="one of the two"):
            consumer.send_back(message, delay=1, dead_letter=True)
        with pytest.raises(ConfigurationError, match="40 days"):
            consumer.send_back(message, delay=41 * 86_400)


def test_dead_letters_are_shown_and_replayed_once(protomq_server: Broker, group: str) -> None:
    with Producer(namesrv=protomq_server.namesrv) as producer:
        ids = [producer.send("dead", b"%d" % number, key="k").message_id for number in range(4)]
    with PullConsumer(group, namesrv=protomq_server.namesrv) as consumer:
        consumer.subscribe("dead")
        consumer.send_back(polled(consumer, 4), error="poison", dead_letter=True)
        told: list[ReplayProgress] = []
        with Admin(namesrv=protomq_server.namesrv) as admin:
            (listed,) = [one for one in admin.list_dead_letters() if one.group == group]
            assert (listed.message_count, listed.replayed_count) == (4, 0)
            done = admin.replay_dead_letters(group, message_ids=[ids[2], "0" * 40])
            assert (done.replayed, done.unknown_ids) == (1, ("0" * 40,))
            done = admin.replay_dead_letters(group, on_progress=told.append)
            assert (done.replayed, done.known) == (3, 1)
            assert (told[-1].looked_at, told[-1].total) == (4, 4)
            assert admin.replay_dead_letters(group).replayed == 0
            now = datetime.now(UTC)
            assert admin.replay_dead_letters(group, end=now - timedelta(hours=1)).known == 0
            later = now + timedelta(hours=1)
            with pytest.raises(ConfigurationError, match=r"begin is .* lies ahead: nothing has died then"):
                admin.replay_dead_letters(group, begin=later)
            with pytest.raises(ConfigurationError, match=r"end is .* not after begin"):
                admin.replay_dead_letters(group, begin=now, end=now)
            with pytest.raises(TopicNotFoundError, match=r"no dead letters at any broker\. .* or there is no such group;"):
                admin.replay_dead_letters("nobody")
            with pytest.raises(ConfigurationError, match="one of the two"):
                admin.replay_dead_letters(group, message_ids=ids, begin=later)
            (listed,) = [one for one in admin.list_dead_letters() if one.group == group]
            assert listed.replayed_count == 4
        again = polled(consumer, 4)
    assert {message.message_id for message in again} == set(ids)
    assert {(message.attempt, message.replayed_group) for message in again} == {(0, group)}
    cli = partial(run, namesrv=protomq_server.namesrv)
    (row,) = [row for row in jsonl(cli("dlq", "list", "-o", "jsonl")) if row["group"] == group]
    assert (row["messages"], row["replayed"]) == (4, 4)
    rows = jsonl(cli("dlq", "show", group, "-c", "3", "-o", "jsonl"))
    assert len(rows) == 3
    assert {(row["origin_topic"], row["deliveries"], row["error"], row["key"]) for row in rows} == {("dead", 1, "poison", "k")}  # fmt: skip
    (row,) = jsonl(cli("dlq", "show", group, "--id", ids[0], "-o", "jsonl"))
    assert row["message_id"] == ids[0]
    (row,) = jsonl(cli("dlq", "replay", group, "--all", "-o", "jsonl"))
    assert (row["replayed"], row["known"]) == (0, 4)
    (row,) = jsonl(cli("dlq", "replay", group, "--time", "@-1h", "--again", "-o", "jsonl"))
    assert row["replayed"] == 4
    (row,) = jsonl(cli("dlq", "replay", group, "--id", ids[1], "--id", ids[3], "--again", "-o", "jsonl"))
    assert (row["replayed"], row["known"]) == (2, 0)
    assert "say which" in cli("dlq", "replay", group, code=2).stderr
    assert "is no time; the forms are" in cli("dlq", "replay", group, "--time", "5", code=2).stderr
    cli("dlq", "replay", group, "--id", "0" * 40, code=4)
    cli("dlq", "replay", "nobody", "--all", code=4)
    cli("dlq", "show", group, "--id", "0" * 40, code=4)


def test_the_command_line_replays_one_and_says_how_far_it_is_on_a_terminal(protomq_server: Broker, group: str) -> None:
    with Producer(namesrv=protomq_server.namesrv) as producer:
        ids = [producer.send("dead-too", b"%d" % number).message_id for number in range(3)]
    with PullConsumer(group, namesrv=protomq_server.namesrv) as consumer:
        consumer.subscribe("dead-too")
        consumer.send_back(polled(consumer, 3), error="poison", dead_letter=True)
        cli = partial(run, namesrv=protomq_server.namesrv)
        replayed = cli("dlq", "replay", group, "--id", ids[1], "-o", "jsonl")
        assert [(row["replayed"], row["known"]) for row in jsonl(replayed)] == [(1, 0)]
        assert replayed.stderr == "", "no terminal"
        (again,) = polled(consumer, 1)
        assert (again.message_id, again.replayed_group) == (ids[1], group)
        replayed = cli("dlq", "replay", group, "--all", "-o", "jsonl", terminal=True)
        assert [(row["replayed"], row["known"]) for row in jsonl(replayed)] == [(2, 1)]
        assert replayed.stderr.split("\r")[-1] == "3 of 3 dead letters looked at, 2 replayed\n"
        assert {message.message_id for message in polled(consumer, 2)} == {ids[0], ids[2]}


def test_a_kill_takes_back_no_answer(tmp_path: Path) -> None:
    with Broker(data_dir=tmp_path) as broker:
        with Producer(namesrv=broker.namesrv) as producer:
            producer.send_batch("killed", [b"%d" % number for number in range(20)])
        with PullConsumer("k", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("killed")
            messages = polled(consumer, 20)
            consumer.send_back(messages[:10], delay=0.1)
            consumer.send_back(messages[10:], dead_letter=True)
        broker.kill()
        broker.restart()
        with PullConsumer("k", namesrv=broker.namesrv) as consumer:
            consumer.subscribe("%RETRY%k")
            assert {message.body for message in polled(consumer, 10)} == {b"%d" % n for n in range(10)}
        assert {message.body for message in dead_letters(broker, "k", 10)} == {b"%d" % n for n in range(10, 20)}


def test_damaged_dead_letters_keep_no_other_from_being_replayed_and_shown(tmp_path: Path) -> None:
    settings = {"PROTOMQ_STORE_CORRUPTION": "quarantine"}
    with Broker(data_dir=tmp_path, environment=settings) as broker:
        cli = partial(run, namesrv=broker.namesrv)
        with Producer(namesrv=broker.namesrv) as producer, PullConsumer("g", namesrv=broker.namesrv) as consumer:
            producer.send_batch("t", [b"letter %d" % number for number in range(9)])
            consumer.subscribe("t")
            for message in polled(consumer, 9):
                consumer.send_back(message, dead_letter=True)
            producer.send("t", b"behind them")
        broker.stop()
        store = tmp_path / "store"
        dumped = jsonl(run("log", "dump", str(store), "--topic", "%DLQ%g"))
        for row in dumped[2], dumped[5], dumped[6]:
            flip(store, int(str(row["position"])) + 8)
        broker.start()

        shown = cli("dlq", "show", "g", "-c", "8", "-o", "jsonl", code=1)
        sound, damaged = ([row["offset"] for row in jsonl(shown) if row["is_damaged"] is is_damaged] for is_damaged in (False, True))
        assert (sound, damaged) == ([1, 3, 4, 7, 8], [2, 5, 6])
        assert "damaged, and not shown: offsets 2, 5 to 6 of broker " in shown.stderr
        with Admin(namesrv=broker.namesrv) as admin:
            told: list[ReplayProgress] = []
            done = admin.replay_dead_letters("g", on_progress=told.append)
            assert (done.replayed, done.known, done.unreadable, done.lost) == (6, 0, 3, 0)
            assert [(each.begin_offset, each.end_offset, each.is_lost) for each in done.damaged] == [(2, 3, False), (5, 7, False)]
            assert (told[-1].looked_at, told[-1].total) == (9, 9)
        replayed = cli("dlq", "replay", "g", "--time", "@-1h", "-o", "jsonl", code=1)
        assert [(row["replayed"], row["known"], row["unreadable"]) for row in jsonl(replayed)] == [(0, 6, 3)]
        assert "3 dead letters are left out, they are damaged: offsets 2, 5 to 6 of broker " in replayed.stderr

        broker.stop()
        run("log", "repair", str(store), "--keep", str(tmp_path / "kept"), "-y")
        broker.start()
        shown = cli("dlq", "show", "g", "-c", "8", "-o", "jsonl")
        assert [row["offset"] for row in jsonl(shown) if row["is_damaged"]] == [2, 5, 6]
        assert "3 dead letters are lost, `protomq log repair` has taken them out: offsets 2, 5 to 6 of broker " in shown.stderr
        replayed = cli("dlq", "replay", "g", "--all", "-o", "jsonl")
        assert [(row["replayed"], row["known"], row["unreadable"], row["lost"]) for row in jsonl(replayed)] == [(0, 6, 0, 3)]
        assert "3 dead letters are lost, `protomq log repair` has taken them out: offsets 2, 5 to 6 of broker " in replayed.stderr
        with PullConsumer(namesrv=broker.namesrv) as consumer:
            consumer.subscribe("t")
            again = [message.body for message in polled(consumer, 16) if message.replayed_group]
        assert sorted(again) == [b"letter %d" % number for number in (0, 1, 3, 4, 7, 8)]


def flip(store: Path, position: int) -> None:
    """Changes one bit of the log's first segment, of a broker that is stopped."""
    segment = store / "commitlog" / f"{0:020d}"
    octets = segment.read_bytes()[position]
    with segment.open("r+b") as file:
        file.seek(position)
        file.write(bytes([octets ^ 1]))
