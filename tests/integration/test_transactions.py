"""Transactions through a whole broker: from threads and coroutines, over both transports, with producers and brokers that die."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from protomq import (
    Admin,
    AsyncTransactionProducer,
    Producer,
    PullConsumer,
    SendResult,
    TransactionCheck,
    TransactionDecision,
    TransactionProducer,
)
from protomq._methods import END_TRANSACTION
from protomq._transport import SyncTransport
from protomq._transport_options import TransportOptions
from protomq._types import BrokerAddress
from protomq.errors import (
    ConfigurationError,
    NotPermittedError,
    TransactionEndedError,
    WrongTypeError,
)
from protomq.testing import Broker
from protomq.v1.transaction_service_pb2 import (
    EndTransactionRequest,
    EndTransactionResponse,
    TransactionEnd,
)
from protomq.wire.topics import EXPIRED_TOPIC
from tests.support.cli import Finished, jsonl, run
from tests.support.waiting import PATIENCE_S, wait_for

COMMIT, ROLL_BACK, UNKNOWN = (
    TransactionDecision.COMMIT,
    TransactionDecision.ROLL_BACK,
    TransactionDecision.UNKNOWN,
)


def checks(timeout_ms: int, interval_ms: int, count: int) -> dict[str, str]:
    """The environment of a broker that asks so often."""
    return {
        "PROTOMQ_TRANSACTION_TIMEOUT_MS": str(timeout_ms),
        "PROTOMQ_TRANSACTION_CHECK_INTERVAL_MS": str(interval_ms),
        "PROTOMQ_TRANSACTION_CHECK_MAX": str(count),
    }


def received(broker: Broker, topic: str, count: int) -> list[bytes]:
    """The bodies of a topic, at least so many."""
    found: list[bytes] = []

    def poll() -> bool:
        found.extend(message.body for message in consumer.poll(timeout_s=0.5))
        return len(found) >= count

    with PullConsumer(namesrv=broker.namesrv) as consumer:
        consumer.subscribe(topic)
        wait_for(poll, PATIENCE_S)
    return sorted(found)


LEFT_OPEN = """
import sys
from protomq import TransactionDecision, TransactionProducer
producer = TransactionProducer("left", lambda _: TransactionDecision.UNKNOWN, namesrv=sys.argv[1], transport=sys.argv[2])
for number in range(50):
    producer.send(sys.argv[3], b"%02d" % number, execute=lambda _: None, wait_for_end=False)
"""


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_decisions_on_their_way_are_told_when_the_program_ends(protomq_server: Broker, transport: str) -> None:
    topic = f"left-{transport}"
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.create_topic(topic)
    for turn in range(3):
        done = subprocess.run(
            [sys.executable, "-c", LEFT_OPEN, protomq_server.namesrv, transport, topic],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert done.stderr == ""
        assert len(received(protomq_server, topic, 50 * (turn + 1))) == 50 * (turn + 1)


def never(_: TransactionCheck) -> TransactionDecision:
    raise AssertionError("nobody is to be asked")


async def nobody_awaits(half: SendResult) -> None: ...


def failing(half: SendResult) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_threads_commit_what_was_done_and_roll_back_what_was_not(
    protomq_server: Broker, protomq_topic: str, transport: Any
) -> None:
    topic = protomq_topic
    with TransactionProducer(
        "desk",
        never,
        namesrv=protomq_server.namesrv,
        transport=transport,
        send_timeout_s=PATIENCE_S,
    ) as producer:

        def fail(_: Any) -> None:
            raise KeyError("no seat")

        def sell(number: int) -> None:
            result = producer.send(
                topic,
                b"%d" % number,
                key=f"k{number}",
                execute=lambda half: ROLL_BACK if number % 3 == 0 else None,
            )
            assert result.is_ended
            assert result.half.queue_offset == -1

        threads = [threading.Thread(target=sell, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(KeyError, match="no seat"):
            producer.send(topic, b"failed", execute=fail)
        with producer.begin(topic, b"begun") as transaction:
            assert transaction.message_id
        transaction.commit()
        with pytest.raises(TransactionEndedError):
            transaction.roll_back()
        with pytest.raises(ZeroDivisionError), producer.begin(topic, b"broken"):
            raise ZeroDivisionError
        expected = [b"%d" % number for number in range(24) if number % 3]
        assert received(protomq_server, topic, 17) == sorted([*expected, b"begun"])
        with pytest.raises(WrongTypeError, match="AsyncTransactionProducer takes those"):
            producer.send(topic, b"x", execute=nobody_awaits)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError):
            TransactionProducer("", never)


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_coroutines_do_the_same(protomq_server: Broker, protomq_topic: str, transport: Any) -> None:
    topic = protomq_topic

    async def run() -> None:
        async def work(half: Any) -> TransactionDecision | None:
            await asyncio.sleep(0)
            return None if half.message_id else ROLL_BACK

        async with AsyncTransactionProducer(
            "desk",
            never,
            topics=[topic],
            namesrv=protomq_server.namesrv,
            transport=transport,
            send_timeout_s=PATIENCE_S,
        ) as producer:
            results = await asyncio.gather(
                *(producer.send(topic, b"%d" % number, execute=work) for number in range(24))
            )
            assert all(result.is_ended for result in results)
            async with await producer.begin(topic, b"begun") as transaction:
                await transaction.roll_back()
            with pytest.raises(TransactionEndedError):
                await transaction.commit()
            with pytest.raises(ZeroDivisionError):
                await producer.send(topic, b"broken", execute=failing)

    asyncio.run(run())
    assert received(protomq_server, topic, 24) == sorted(b"%d" % number for number in range(24))


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_decisions_that_nobody_waits_for_are_taken_before_the_end(
    protomq_server: Broker, protomq_topic: str, transport: Any
) -> None:
    """Of threads and of coroutines; the close waits for what is on its way. What the broker refuses is logged, and raised to nobody."""
    options: Any = {
        "namesrv": protomq_server.namesrv, "transport": transport, "send_timeout_s": PATIENCE_S,
    }  # fmt: skip
    with TransactionProducer("desk", never, **options) as producer:
        for number in range(20):
            result = producer.send(
                protomq_topic,
                b"%d" % number,
                execute=lambda half: ROLL_BACK if number % 2 else None,  # noqa: B023 - called at once
                wait_for_end=False,
            )
            assert not result.is_ended
        with pytest.raises(ZeroDivisionError):
            producer.send(protomq_topic, b"x", execute=failing, wait_for_end=False)

    async def run() -> None:
        async with AsyncTransactionProducer("desk", never, **options) as others:
            for number in range(20, 40):
                result = await others.send(
                    protomq_topic,
                    b"%d" % number,
                    execute=lambda half: ROLL_BACK if number % 2 else None,  # noqa: B023
                    wait_for_end=False,
                )
                assert not result.is_ended

    asyncio.run(run())
    expected = sorted(b"%d" % number for number in range(0, 40, 2))
    assert received(protomq_server, protomq_topic, 20) == expected


@pytest.mark.parametrize("waits", [True, False])
def test_a_producer_that_is_closed_while_work_is_done_leaves_the_transaction_open_and_raises_nothing(
    protomq_server: Broker, protomq_topic: str, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The work is done then: an error of `send` would say that it was not begun."""
    options: Any = {"namesrv": protomq_server.namesrv, "send_timeout_s": PATIENCE_S}
    producer = TransactionProducer("desk", never, **options)
    result = producer.send(protomq_topic, b"x", execute=lambda _: producer.close(), wait_for_end=waits)
    assert not result.is_ended

    def closes_and_fails(_: SendResult) -> TransactionDecision:
        failing_one.close()
        raise ZeroDivisionError

    failing_one = TransactionProducer("desk", never, **options)
    with pytest.raises(ZeroDivisionError):
        failing_one.send(protomq_topic, b"x", execute=closes_and_fails, wait_for_end=waits)

    async def run() -> None:
        other = AsyncTransactionProducer("desk", never, **options)
        result = await other.send(protomq_topic, b"x", execute=lambda _: other.close(), wait_for_end=waits)
        assert not result.is_ended

    asyncio.run(run())
    texts = [text for text in caplog.messages if "it will ask: the producer is closed" in text]
    assert len(texts) == 3


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_the_broker_asks_the_producers_that_stay_and_nobody_whose_producer_is_closed(transport: Any, is_shared: bool) -> None:
    """Each transaction is asked about once: a question to a producer that is closed would let it expire."""
    asked: list[bytes] = []
    asked_of_closed: list[bytes] = []

    def check(question: TransactionCheck) -> TransactionDecision:
        asked.append(question.message.body)
        return COMMIT

    def check_of_closed(question: TransactionCheck) -> TransactionDecision:
        asked_of_closed.append(question.message.body)
        return COMMIT

    bodies = [b"%02d" % number for number in range(30)]
    with Broker(environment=checks(1_000, 2_000, 1)) as broker, Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic("bookings")
        shared = SyncTransport(TransportOptions(transport=transport))
        how: Any = {"transport": shared if is_shared else transport, "namesrv": broker.namesrv}
        with shared, TransactionProducer("desk", check, topics=["bookings"], **how) as stays:
            stays.send("bookings", b"clean", execute=lambda _: None)
            before = own_threads()
            for number in range(10):
                with TransactionProducer("desk", check_of_closed, topics=["bookings"], **how) as producer:
                    if number % 2:
                        producer.send("bookings", b"clean", execute=lambda _: None)
                    else:
                        wait_for(lambda: producer._listening, PATIENCE_S)
                assert own_threads() == before
            for body in bodies:
                stays.begin("bookings", body)
            wait_for(lambda: len(asked) == len(bodies) and not admin.list_transactions(group="desk"), PATIENCE_S)
        assert (sorted(asked), asked_of_closed) == (bodies, [])
        assert received(broker, "bookings", len(bodies) + 6) == sorted([*bodies, *[b"clean"] * 6])


def own_threads() -> set[threading.Thread]:
    """Those of transaction producers."""
    return {thread for thread in threading.enumerate() if thread.name == "protomq-transaction-checks"}


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_decision_as_a_one_way_call_is_taken_and_not_answered(
    protomq_server: Broker, protomq_topic: str, transport: Any
) -> None:
    """As any client may tell it: the frame asks for no answer."""
    options: Any = {"namesrv": protomq_server.namesrv, "transport": transport, "send_timeout_s": PATIENCE_S}
    with TransactionProducer("desk", never, **options) as producer, Admin(namesrv=protomq_server.namesrv) as admin:
        begun = [producer.begin(protomq_topic, b"%d" % number) for number in range(3)]
        decisions = (COMMIT, ROLL_BACK, COMMIT)
        ends = [
            TransactionEnd(transaction_handle=one.transaction_handle, decision=decision.value)  # type: ignore[arg-type]
            for one, decision in zip(begun, decisions, strict=True)
        ]
        address = BrokerAddress("", protomq_server.grpc_address, protomq_server.remoting_address)
        with SyncTransport(TransportOptions(transport=transport)) as caller:
            for some in (ends[:2], ends[2:], ends[:1]):
                payload = EndTransactionRequest(ends=some).SerializeToString()
                assert caller.call(address, END_TRANSACTION, [payload], PATIENCE_S, one_way=True) == b""
            # A refused one has nobody to tell, and ends no connection.
            assert caller.call(address, END_TRANSACTION, [b"\x0a\x03\x0a\x01x"], PATIENCE_S, one_way=True) == b""
            wait_for(lambda: not admin.list_transactions(topic=protomq_topic), PATIENCE_S)
            again = caller.call(address, END_TRANSACTION, [EndTransactionRequest(ends=ends).SerializeToString()], PATIENCE_S)
        results = EndTransactionResponse.FromString(again).results
        assert [result.repeated_decision for result in results] == [True] * 3
    assert received(protomq_server, protomq_topic, 2) == [b"0", b"2"]


def test_a_decision_that_is_not_taken_is_logged(
    protomq_server: Broker, protomq_topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    with TransactionProducer(
        "desk", never, namesrv=protomq_server.namesrv, send_timeout_s=PATIENCE_S
    ) as producer:

        def decide_otherwise(half: Any) -> None:
            producer.end(half, ROLL_BACK)

        half = producer.send(
            protomq_topic, b"x", execute=decide_otherwise, wait_for_end=False
        ).half
    assert f"the transaction of message {half.message_id} is to COMMIT" in caplog.text
    assert "has been rolled back" in caplog.text


DYING_PRODUCER = """
    import os, sys
    from protomq import TransactionProducer
    producer = TransactionProducer("desk", lambda check: None, namesrv=sys.argv[1], send_timeout_s=60)
    for number in range(10):
        producer.begin("bookings", b"%d" % number, key=str(number))
    os.kill(os.getpid(), 9)
"""


def test_what_a_dead_producer_left_is_settled_by_others(tmp_path: Any) -> None:
    """With a kill -9 of the producer, and one of the broker in between."""
    asked: list[str] = []

    def check(question: TransactionCheck) -> TransactionDecision:
        assert question.message.body == question.message.key.encode()
        asked.append(question.message.key)
        return (UNKNOWN, COMMIT, ROLL_BACK)[int(question.message.key) % 3]

    async def check_async(question: TransactionCheck) -> TransactionDecision:
        return check(question)

    with Broker(data_dir=tmp_path, environment=checks(300, 300, 1_000)) as broker:
        script = [sys.executable, "-c", textwrap.dedent(DYING_PRODUCER), broker.namesrv]
        assert subprocess.run(script, check=False).returncode == -9
        broker.kill()
        broker.restart()
        with TransactionProducer("desk", check, topics=["bookings"], namesrv=broker.namesrv):
            assert received(broker, "bookings", 3) == [b"1", b"4", b"7"]
            wait_for(lambda: asked.count("0") > 1 and "8" in asked, PATIENCE_S)

        async def run() -> None:
            async with AsyncTransactionProducer(
                "desk", check_async, namesrv=broker.namesrv, send_timeout_s=PATIENCE_S
            ) as producer:
                await producer.begin("bookings", b"13", key="13")
                await asyncio.to_thread(received, broker, "bookings", 4)

        asyncio.run(run())
        assert received(broker, "bookings", 4) == [b"1", b"13", b"4", b"7"]


@pytest.mark.parametrize("told_within_s", [0.2, PATIENCE_S])
def test_decisions_that_nobody_waits_for_outlive_a_broker_that_is_killed(
    tmp_path: Any, told_within_s: float
) -> None:
    """They are told again until their time is up; then the broker asks. Each message comes, and comes once."""
    bodies = [b"%d" % number for number in range(20)]

    def check(question: TransactionCheck) -> TransactionDecision:
        assert question.message.body in bodies
        return COMMIT

    with (
        Broker(data_dir=tmp_path, environment=checks(300, 300, 1_000)) as broker,
        TransactionProducer("desk", check, namesrv=broker.namesrv, send_timeout_s=PATIENCE_S) as producer,
    ):
        producer.send("bookings", bodies[0], execute=lambda half: None)
        begun = [producer.begin("bookings", body) for body in bodies[1:]]
        broker.kill()
        for transaction in begun:
            producer._tell_end(transaction.half, COMMIT, told_within_s)
        broker.restart()
        assert received(broker, "bookings", len(bodies)) == sorted(bodies)


def test_what_nobody_can_say_anything_about_expires() -> None:
    with Broker(environment=checks(100, 100, 2)) as broker:
        script = [sys.executable, "-c", textwrap.dedent(DYING_PRODUCER), broker.namesrv]
        assert subprocess.run(script, check=False).returncode == -9

        def has_expired() -> bool:
            with Admin(namesrv=broker.namesrv) as admin:
                return EXPIRED_TOPIC in admin.list_topic_names()

        wait_for(has_expired, PATIENCE_S)
        assert received(broker, EXPIRED_TOPIC, 10) == [b"%d" % number for number in range(10)]
        with pytest.raises(NotPermittedError, match="only the broker writes it"), Producer(namesrv=broker.namesrv) as producer:
            producer.send(EXPIRED_TOPIC, b"mine")


def test_open_transactions_are_listed_shown_and_ended_by_hand(
    protomq_server: Broker, protomq_topic: str
) -> None:
    topic = protomq_topic

    def cli(*arguments: str, code: int = 0) -> Finished:
        return run("transaction", *arguments, namesrv=protomq_server.remoting_address, code=code)

    with TransactionProducer(
        "clerk", never, namesrv=protomq_server.namesrv, send_timeout_s=PATIENCE_S
    ) as producer:
        first = producer.begin(topic, b"first", key="k1", properties={"b": "2", "a": "1"})
        second = producer.begin(topic, b"second")
    listed = jsonl(cli("list", "--topic", topic, "--group", "clerk", "-o", "jsonl"))
    assert [row["message_id"] for row in listed] == [first.message_id, second.message_id]
    assert jsonl(cli("list", "--topic", topic, "--group", "other", "-o", "jsonl")) == []
    (shown,) = jsonl(cli("show", first.message_id, "-o", "jsonl"))
    assert (shown["body"], shown["keys"], shown["group"]) == ("first", ["k1"], "clerk")
    assert shown["properties"] == {"a": "1", "b": "2"}
    assert "committed" in cli("commit", first.message_id).stdout
    assert "rolled back" in cli("rollback", second.message_id.lower()).stdout
    for verb in ("show", "commit", "rollback"):
        refused = cli(verb, first.message_id, code=4)
        assert "no broker has an open transaction" in refused.stderr
    assert received(protomq_server, topic, 1) == [b"first"]
