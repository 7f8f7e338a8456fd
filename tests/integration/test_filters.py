"""Filters that a real broker evaluates: over both transports, from both consumers and from a client without the SDK."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import wasmtime

from protomq import (
    Admin,
    AsyncPullConsumer,
    FilterModule,
    OutgoingMessage,
    Producer,
    PullConsumer,
    PushConsumer,
    SimpleConsumer,
)
from protomq._methods import PULL
from protomq._transport import SyncTransport
from protomq._transport_options import TransportOptions
from protomq.errors import (
    IllegalFilterError,
    InvalidArgumentError,
    TopicNotFoundError,
    UnsupportedError,
)
from protomq.testing import Broker
from protomq.v1.pull_service_pb2 import FilterType, PullRequest, PullResponse, PullStatus
from protomq.wire.hashing import crc32c
from tests.support.waiting import PATIENCE_S, wait_for
from tests.support.wasm_modules import LATE, LATE_TEXT

Transport = Literal["remoting", "grpc"]
TRANSPORTS = pytest.mark.parametrize("transport", ["remoting", "grpc"])
SQL, CEL, TAG = FilterType.FILTER_TYPE_SQL92, FilterType.FILTER_TYPE_CEL, FilterType.FILTER_TYPE_TAG


def address_of(broker: Broker, transport: Transport) -> str:
    return broker.grpc_address if transport == "grpc" else broker.remoting_address


class Puller:
    """Pulls from queue 0 of a topic with requests of its own."""

    def __init__(self, broker: Broker, topic: str, transport: Transport) -> None:
        with PullConsumer(namesrv=broker.namesrv) as consumer:
            self.queue = consumer.queues(topic)[0]
            route = consumer._routes.get(topic, 5.0)
        self._address = next(iter(route.brokers.values()))
        self._transport = SyncTransport(TransportOptions(transport=transport))
        self._topic = topic

    def __call__(self, timeout_s: float = PATIENCE_S, **fields: Any) -> PullResponse:
        request = PullRequest(**{"topic": self._topic, **fields})
        answer = self._transport.call(
            self._address, PULL, (request.SerializeToString(),), timeout_s
        )
        return PullResponse.FromString(bytes(answer))

    def close(self) -> None:
        self._transport.close()


@pytest.fixture(params=["remoting", "grpc"])
def pull(
    request: pytest.FixtureRequest, protomq_server: Broker, protomq_topic: str
) -> Iterator[Puller]:
    puller = Puller(protomq_server, protomq_topic, request.param)
    yield puller
    puller.close()


def flight(topic: str, number: int, **named: Any) -> OutgoingMessage:
    properties = {"delay": str(number), "carrier": ("UA", "DL", "AA")[number % 3]}
    return OutgoingMessage(
        topic, b"flight %d" % number, keys=(f"f{number}",), tag=("late", "early")[number % 2],
        properties=properties, **named,
    )  # fmt: skip


def bodies_of(consumer: PullConsumer, count: int) -> set[bytes]:
    got: list[bytes] = []
    ends_s = time.monotonic() + PATIENCE_S
    while len(got) < count and time.monotonic() < ends_s:
        got += [message.body for message in consumer.poll(0.5)]
    got += [message.body for message in consumer.poll(0)]
    assert len(got) == len(set(got))
    return set(got)


@TRANSPORTS
@pytest.mark.parametrize(
    ("language", "condition", "wanted"),
    [
        ("sql", "delay > 95", range(96, 100)),
        ("sql", "carrier = 'UA' AND delay BETWEEN 10 AND 20", (12, 15, 18)),
        ("sql", "TAGS = 'late' AND NOT (delay < 94) AND KEYS <> 'f96'", (94, 98)),
        ("cel", "int(properties.delay) >= 98 && TAGS == 'late'", (98,)),
    ],
)
def test_a_consumer_gets_what_matches_and_nothing_else(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer,
    transport: Transport, language: str, condition: str, wanted: range,
) -> None:  # fmt: skip
    for number in range(100):
        protomq_producer.send(flight(protomq_topic, number))
    with PullConsumer(
        namesrv=address_of(protomq_server, transport), transport=transport
    ) as consumer:
        consumer.subscribe(protomq_topic, **{language: condition})
        assert bodies_of(consumer, len(wanted)) == {b"flight %d" % number for number in wanted}
        protomq_producer.send(flight(protomq_topic, 0))
        protomq_producer.send(flight(protomq_topic, wanted[-1]))
        assert bodies_of(consumer, 1) == {b"flight %d" % wanted[-1]}
        consumer.subscribe(protomq_topic, sql="delay = 1")
        consumer.seek_to_begin()
        assert bodies_of(consumer, 1) == {b"flight 1"}


async def test_the_async_consumer_filters_too(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    for number in range(20):
        protomq_producer.send(flight(protomq_topic, number))
    async with AsyncPullConsumer(namesrv=protomq_server.namesrv) as consumer:
        await consumer.subscribe(protomq_topic, sql="delay >= 18")
        got: set[bytes] = set()
        while len(got) < 2:
            got |= {message.body for message in await consumer.poll(5)}
        assert got == {b"flight 18", b"flight 19"}
        with pytest.raises(IllegalFilterError, match="line 1, column 8"):
            await consumer.subscribe(protomq_topic, sql="delay >")


@TRANSPORTS
def test_a_wrong_expression_is_told_with_its_place(
    protomq_server: Broker, protomq_topic: str, transport: Transport
) -> None:
    with PullConsumer(
        namesrv=address_of(protomq_server, transport), transport=transport
    ) as consumer:
        with pytest.raises(IllegalFilterError, match="line 2, column 12") as caught:
            consumer.subscribe(protomq_topic, sql="delay > 5 AND\n  carrier == 'UA'")
        assert consumer.assignment() == ()
    known = caught.value.metadata
    assert (known["language"], known["line"], known["column"], known["position"]) == (
        "SQL92", "2", "12", "25",
    )  # fmt: skip
    assert "a text in single quotes" in known["expected"]


def test_a_simple_consumer_is_told_what_is_wrong_with_its_filter(protomq_server: Broker, protomq_topic: str) -> None:
    with SimpleConsumer("g", namesrv=protomq_server.namesrv) as consumer:
        with pytest.raises(IllegalFilterError, match="line 1, column 8"):
            consumer.receive(protomq_topic, sql="delay >")
        with pytest.raises(IllegalFilterError, match="line 1, column 8"):
            consumer.handle(protomq_topic, print, sql="delay >")


def test_wrong_requests(pull: Puller) -> None:
    with pytest.raises(IllegalFilterError, match="nope"):
        pull(filter_type=CEL, filter="nope == 1")
    with pytest.raises(IllegalFilterError, match="at most"):
        pull(filter_type=SQL, filter="a" * 100_000)
    with pytest.raises(IllegalFilterError, match="TAG filter, line 1, column 3"):
        pull(filter_type=TAG, filter="a | b")
    with pytest.raises(InvalidArgumentError, match="tags"):
        pull(filter_type=SQL, filter="delay > 5", tags=["a"])
    with pytest.raises(InvalidArgumentError, match="filter_type"):
        pull(filter="delay > 5")
    with pytest.raises(UnsupportedError, match="of the type 99"):
        pull(filter_type=99, filter="delay > 5")
    with pytest.raises(TopicNotFoundError):
        pull(topic="none", filter_type=SQL, filter="a")


def test_tags_as_rocketmq_writes_them(pull: Puller, protomq_producer: Producer) -> None:
    queue = pull.queue
    for number in range(4):
        protomq_producer.send(flight(pull._topic, number, queue=queue))
    answer = pull(filter_type=TAG, filter="early || other")
    assert [record.body for record in answer.records] == [b"flight 1", b"flight 3"]
    assert len(pull(filter_type=TAG, filter="*").records) == 4


def test_plain_bodies_and_limits(pull: Puller, protomq_producer: Producer) -> None:
    queue = pull.queue
    body = b"compressible " * 2_000
    for number in range(6):
        message = OutgoingMessage(
            pull._topic, body, properties={"delay": str(number)}, queue=queue
        )
        protomq_producer.send(message)
    answer = pull(filter_type=SQL, filter="delay <> 2", plain_bodies=True, record_count_max=3)
    assert [record.body for record in answer.records] == [body] * 3
    assert (answer.status, answer.next_offset) == (PullStatus.PULL_STATUS_FOUND, 4)
    answer = pull(filter_type=SQL, filter="delay <> 2", size_max_bytes=1, queue_offset=2)
    assert [record.queue_offset for record in answer.records] == [3]
    answer = pull(filter_type=SQL, filter="delay > 9")
    assert answer.status == PullStatus.PULL_STATUS_NO_MATCHED_MSG
    assert (answer.next_offset, answer.end_offset) == (6, 6)
    assert pull(filter_type=SQL, filter="delay > 9", queue_offset=7).status == (
        PullStatus.PULL_STATUS_OFFSET_ILLEGAL
    )


def test_a_held_pull_waits_for_what_matches(pull: Puller, protomq_producer: Producer) -> None:
    """Three wait for one thing, one for another; what matches nobody's filter answers nobody."""
    queue = pull.queue
    wanted = ["delay = 5", "delay = 5", "delay = 5", "delay = 6"]
    with ThreadPoolExecutor(len(wanted)) as executor:
        pulls = [
            executor.submit(pull, filter_type=SQL, filter=text, hold_ms=60_000) for text in wanted
        ]
        for number in range(6):
            protomq_producer.send(flight(pull._topic, number, queue=queue))
        for held in pulls[:3]:
            assert [record.body for record in held.result(PATIENCE_S).records] == [b"flight 5"]
        assert not pulls[3].done()
        protomq_producer.send(flight(pull._topic, 6, queue=queue))
        answer = pulls[3].result(PATIENCE_S)
        assert [record.queue_offset for record in answer.records] == [6]
    answer = pull(filter_type=SQL, filter="delay = 7", hold_ms=50)
    assert answer.status in (
        PullStatus.PULL_STATUS_NO_MATCHED_MSG, PullStatus.PULL_STATUS_NO_NEW_MSG,
    )  # fmt: skip
    assert answer.next_offset == 7


def test_one_of_a_hundred_thousand(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    count, odd = 100_000, 73_421
    for first in range(0, count, 10_000):
        protomq_producer.send_batch(
            protomq_topic,
            [
                OutgoingMessage(
                    protomq_topic, b"%d" % number, properties={"n": str(number % 1_000), "odd": str(int(number == odd))}
                )
                for number in range(first, first + 10_000)
            ]
        )  # fmt: skip
    with PullConsumer(namesrv=protomq_server.namesrv) as consumer:
        for condition in ("odd = '1'", "odd = 1", "odd = 1 AND n > 0"):
            consumer.subscribe(protomq_topic, sql=condition)
            consumer.seek_to_begin()
            assert bodies_of(consumer, 1) == {b"%d" % odd}
        # All queues were gone through: what is committed next is their ends.
        ends_s = time.monotonic() + PATIENCE_S
        queues = consumer.queues(protomq_topic)
        while sum(map(consumer.position, queues)) < count and time.monotonic() < ends_s:
            assert consumer.poll(0.2) == []
        assert sum(map(consumer.position, queues)) == count


def test_a_topic_that_is_deleted_while_a_filter_reads_it(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer
) -> None:
    """Whoever pulls meanwhile is told so, and nothing else."""
    puller = Puller(protomq_server, protomq_topic, "remoting")
    queue = puller.queue
    for _ in range(4):
        protomq_producer.send_batch(protomq_topic, [flight(protomq_topic, n) for n in range(5_000)], queue=queue)
    outcomes: list[PullResponse | Exception] = []
    gone, begun = threading.Event(), threading.Event()

    def pull_on() -> None:
        while not gone.is_set() or not isinstance(outcomes[-1], Exception):
            try:
                outcomes.append(puller(filter_type=SQL, filter="delay < 0 OR carrier = 'none'"))
            except Exception as error:
                outcomes.append(error)
            begun.set()

    with ThreadPoolExecutor(3) as executor:
        pulls = [executor.submit(pull_on) for _ in range(2)]
        held = executor.submit(
            puller, filter_type=SQL, filter="delay < 0", queue_offset=20_000, hold_ms=60_000
        )
        assert begun.wait(PATIENCE_S)
        with Admin(namesrv=protomq_server.namesrv) as admin:
            admin.delete_topic(protomq_topic)
        gone.set()
        for one in pulls:
            one.result(PATIENCE_S)
        assert isinstance(held.exception(PATIENCE_S), TopicNotFoundError)
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert errors
    assert all(isinstance(error, TopicNotFoundError) for error in errors)
    puller.close()


@TRANSPORTS
def test_a_module_of_a_user_filters(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, transport: Transport
) -> None:
    name = f"late-{transport}"
    for body in (b"late 1", b"early", b"late 2"):
        protomq_producer.send(protomq_topic, body)

    def found(count: int = 1) -> set[bytes]:
        namesrv = address_of(protomq_server, transport)
        with PullConsumer(namesrv=namesrv, transport=transport) as consumer:
            consumer.subscribe(protomq_topic, module=name)
            return bodies_of(consumer, count)

    with Admin(namesrv=protomq_server.namesrv) as admin:
        with pytest.raises(IllegalFilterError, match="no module"):
            found()
        assert len(admin.deploy_filter(name, LATE)) == 1
        assert found(2) == {b"late 1", b"late 2"}
        (modules,) = admin.list_filters().values()
        assert FilterModule(name, len(LATE), crc32c(LATE)) in modules
        # Another one takes its place, and traps.
        trap = LATE_TEXT.replace("(i32.eq ", "(unreachable) (i32.eq ")
        admin.deploy_filter(name, bytes(wasmtime.wat2wasm(trap)))
        with pytest.raises(IllegalFilterError, match=rf"at message \d+ of queue \d+ of topic {protomq_topic}: .*unreachable") as failed:
            found()
        assert failed.value.metadata["topic"] == protomq_topic
        assert len(admin.delete_filter(name)) == 1
        assert admin.delete_filter(name) == []
        for wrong in ("a/b", "x" * 65):
            with pytest.raises(InvalidArgumentError, match="1 to 64 letters"):
                admin.delete_filter(wrong)
        with pytest.raises(IllegalFilterError, match="no module"):
            found()


@TRANSPORTS
def test_a_push_consumer_is_told_of_a_module_that_traps_and_goes_on_with_one_that_does_not(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    name, got = f"push-{transport}", []
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.deploy_filter(name, LATE)
        consumer = PushConsumer(f"modules-{protomq_topic}", namesrv=address_of(protomq_server, transport), transport=transport, hold_ms=500)
        consumer.subscribe(protomq_topic, lambda message: got.append(message.body), module=name)
        with consumer:
            protomq_producer.send(protomq_topic, b"late 1")
            wait_for(lambda: got == [b"late 1"])
            admin.deploy_filter(name, bytes(wasmtime.wat2wasm(LATE_TEXT.replace("(i32.eq ", "(unreachable) (i32.eq "))))
            sent = 0

            def is_told() -> bool:
                nonlocal sent
                # Those that a held pull finds are judged by the module with which it began.
                protomq_producer.send(protomq_topic, b"late 2")
                sent += 1
                return "nothing of the topic is consumed" in caplog.text

            wait_for(is_told)
            assert "instruction executed" in caplog.text
            assert consumer.is_running
            assert got.count(b"late 2") < sent
            admin.deploy_filter(name, LATE)
            wait_for(lambda: got.count(b"late 2") == sent)
        admin.delete_filter(name)


def test_a_module_filters_held_pulls(pull: Puller, protomq_server: Broker, protomq_producer: Producer) -> None:
    name, queue = f"held-{pull._transport.options.transport}", pull.queue
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.deploy_filter(name, LATE)
    with ThreadPoolExecutor(1) as executor:
        held = executor.submit(pull, filter_type=FilterType.FILTER_TYPE_MODULE, filter=name, hold_ms=60_000)
        for body in (b"early", b"late 1"):
            protomq_producer.send(pull._topic, body, queue=queue)
        found = held.result(PATIENCE_S)
    assert [record.body for record in found.records] == [b"late 1"]


def test_a_module_filters_what_is_popped_and_pushed(protomq_server: Broker, protomq_topic: str, protomq_producer: Producer) -> None:
    trap = LATE_TEXT.replace("(i32.eq ", "(unreachable) (i32.eq ")
    group, pushed = f"{protomq_topic}-pushed", set[bytes]()
    push = PushConsumer(group, namesrv=protomq_server.namesrv)
    push.subscribe(protomq_topic, lambda message: pushed.add(message.body), module="only-late")
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.deploy_filter("only-late", LATE)
    with push:
        for body in (b"late 1", b"early", b"late 2"):
            protomq_producer.send(protomq_topic, body)
        wait_for(lambda: pushed >= {b"late 1", b"late 2"}, PATIENCE_S)
    popped = set[bytes]()
    with SimpleConsumer(f"{protomq_topic}-popped", namesrv=protomq_server.namesrv) as pop:
        while len(popped) < 2:
            messages = pop.receive(protomq_topic, module="only-late", hold_s=1)
            pop.ack(messages)
            popped |= {message.body for message in messages}
        assert pushed == popped == {b"late 1", b"late 2"}
        with Admin(namesrv=protomq_server.namesrv) as admin:
            admin.deploy_filter("only-late", bytes(wasmtime.wat2wasm(trap)))
        protomq_producer.send(protomq_topic, b"late 3")
        with pytest.raises(IllegalFilterError, match="unreachable"):
            pop.receive(protomq_topic, module="only-late", hold_s=PATIENCE_S)


def test_what_is_no_module_is_not_deployed(protomq_server: Broker) -> None:
    with Admin(namesrv=protomq_server.namesrv) as admin:
        with pytest.raises(IllegalFilterError, match="no WebAssembly module"):
            admin.deploy_filter("text", b"(module)")
        with pytest.raises(IllegalFilterError, match="imports nothing"):
            admin.deploy_filter("wasi", bytes(wasmtime.wat2wasm('(module (import "wasi" "x" (func)))')))
        with pytest.raises(InvalidArgumentError, match="name"):
            admin.deploy_filter("../topics", LATE)
        assert "text" not in {one.name for (modules,) in [admin.list_filters().values()] for one in modules}


@pytest.mark.parametrize(
    "wrong", ['(memory (export "memory") 129)', '(memory (export "memory") 1) (func $begin unreachable) (start $begin)']
)
def test_a_module_that_could_never_run_does_not_replace_one_that_does(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, wrong: str
) -> None:
    protomq_producer.send(protomq_topic, b"late 1")
    never = bytes(wasmtime.wat2wasm(LATE_TEXT.replace('(memory (export "memory") 1)', wrong)))
    with Admin(namesrv=protomq_server.namesrv) as admin, PullConsumer(namesrv=protomq_server.namesrv) as consumer:
        admin.deploy_filter("works", LATE)
        with pytest.raises(IllegalFilterError, match=r"memory has a minimum|cannot start"):
            admin.deploy_filter("works", never)
        consumer.subscribe(protomq_topic, module="works")
        assert bodies_of(consumer, 1) == {b"late 1"}
        admin.delete_filter("works")


def test_a_module_outlives_its_broker(tmp_path: Path) -> None:
    with Broker(data_dir=tmp_path) as broker:
        with Admin(namesrv=broker.namesrv) as admin:
            admin.deploy_filter("late", LATE)
        broker.kill()
        broker.restart()
        with Admin(namesrv=broker.namesrv) as admin:
            assert list(admin.list_filters().values()) == [
                [FilterModule("late", len(LATE), crc32c(LATE))]
            ]
