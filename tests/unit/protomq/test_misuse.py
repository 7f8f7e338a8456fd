"""What a newcomer may write by mistake: each mistake is an error that names the argument and says what to give, before anything is asked
of a server."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import pickle
import re
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from protomq import (
    Admin,
    AsyncProducer,
    AsyncPullConsumer,
    AsyncPushConsumer,
    AsyncSimpleConsumer,
    AsyncTransactionProducer,
    ConnectionOptions,
    MessageQueue,
    OutgoingMessage,
    Producer,
    PullConsumer,
    PushConsumer,
    SimpleConsumer,
    TransactionDecision,
    TransactionProducer,
    allocation,
)
from protomq._compression import DECOMPRESSED_SIZE_MAX_BYTES
from protomq._consumer_calls import STORE_TIME_MAX_MS, ConsumerCalls, Limits
from protomq._steps import Steps
from protomq.asgi import Messaging
from protomq.calls import Calls
from protomq.errors import (
    ClosedError,
    ConfigurationError,
    MessageTooLargeError,
    RequestTimeoutError,
    WrongTypeError,
)
from protomq.v1.consumer_service_pb2 import SearchOffsetRequest, SearchOffsetResponse
from tests.support.fake_cluster import FakeAsyncTransport, FakeCluster, FakeSyncTransport

Q = MessageQueue("T", "a", 0)
MESSAGE = OutgoingMessage("T", b"x")
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001
AHEAD = datetime.now(UTC) + timedelta(days=365)
TEXT: Any = "0"
NOWHERE = "127.0.0.1:1"
"""Nothing listens there: who asks gets another error."""


def generator() -> Any:
    yield b"x"


PRODUCER_CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda p: p.send("T", b"x", queue=["T", "a", 0]), r"queue is a MessageQueue\(topic, broker_name, queue_id\)"),
    (lambda p: p.send("T", b"x", queue=("T", "a", 0)), "queue is a MessageQueue"),
    (lambda p: p.send("T", b"x", queue=MessageQueue("T", "a", -1)), "queue_id of MessageQueue.* is 0 to"),
    (lambda p: p.send("T", b"x", queue=MessageQueue("T", "a", TEXT)), "queue_id of MessageQueue.* is an int"),
    (lambda p: p.send("T", b"x", selector=5), "selector is a function"),
    (lambda p: p.send_one_way("T", b"x", selector=5), "selector is a function"),
    (lambda p: p.send("T", b"x", selector=lambda queues: queues[0]), r"selector is called with \(queues, message\), which .* not take"),
    (lambda p: p.send("T", b"x", selector=generator), "selector is a function, not the generator function"),
    (lambda p: p.send("T", b"x", queue=Q, selector=lambda queues, message: Q), "selector would never be called"),
    (lambda p: p.send(MESSAGE, b"y", key="k"), "body, key beside it would be lost"),
    (lambda p: p.send_one_way(MESSAGE, tag="t"), "tag beside it would be lost"),
    (lambda p: p.send("\ud800", b"x"), "topic cannot be written as UTF-8"),
    (lambda p: p.send("T", b"x", key="\ud800"), "key cannot be written as UTF-8"),
    (lambda p: p.send("T", b"x", tag="\ud800"), "tag cannot be written as UTF-8"),
    (lambda p: p.send("T", b"x", properties={"a": "\ud800"}), "property 'a' cannot be written as UTF-8"),
    (lambda p: p.send("T", b"x", sharding_key="\ud800"), "sharding_key cannot be written as UTF-8"),
    (lambda p: p.send("T", b"x", properties={"": "a"}), "a property has a name"),
    (lambda p: p.send("T", b"x", keys=["a", ""]), "keys is a list of further keys: none is empty"),
    (lambda p: p.send_batch("T", generator()), r"messages is a list, not .*: write list\(messages\)"),
    (lambda p: p.send_batch("T", b"abc"), "messages is a list of bodies, not one of them"),
    (lambda p: p.send_batch("T", 5), "messages is a list of bytes or OutgoingMessage, not 5"),
    (lambda p: p.send_batch(MESSAGE, [b"x"]), "topic is a str"),
    (lambda p: p.send_batch(5, []), "topic is a str, not 5"),
    (lambda p: p.send_batch("T", [b"x"], tags=5), "tags is a str, or a list with a tag for each message"),
    (lambda p: p.send_batch("T", [b"x"], tags={"a"}), "tags is a str, or a list"),
    (lambda p: p.send_batch("T", [b"x"], keys={"a"}), "keys is a list with a key for each message"),
    (lambda p: p.send_batch("T", [b"x"], sharding_key=5), "sharding_key is a str, not 5"),
    (lambda p: p.send_batch("T", [b"x"], queue=Q, sharding_key="s"), "sharding_key would not be used"),
    (lambda p: p.send_batch("T", [b"x", MESSAGE], keys=["a", "b"]), "message 1 of the batch is an OutgoingMessage"),
    (lambda p: p.send_batch("T", [MESSAGE], tags="a"), "message 0 of the batch is an OutgoingMessage"),
    (lambda p: p.transports(5), "topic is a str, not 5"),
    # What is false is no "nothing" either: `keys=order.number` of order 0 would store a message that nobody finds.
    (lambda p: p.send("T", b"x", keys=0), "keys is a list of str, not 0"),
    (lambda p: p.send("T", b"x", keys=""), "keys is a list of further keys, not ''"),
    (lambda p: p.send("T", b"x", keys=np.array(["k"])), "keys is a list of str, not array"),
    (lambda p: p.send("T", b"x", keys=np.array([])), "keys is a list of str, not array"),
    (lambda p: p.send("T", b"x", properties=0), "properties is a dict of str to str, not 0"),
    (lambda p: p.send("T", b"x", properties=[]), r"properties is a dict of str to str, not \[\]"),
    (lambda p: p.send(OutgoingMessage("T", b"x", properties="")), "properties is a dict of str to str, not ''"),  # type: ignore[arg-type]
    (lambda p: p.request("T", b"x", properties=5), "properties is a dict of str to str, not 5"),
    (lambda p: p.request("T", b"x", properties="a=b"), "properties is a dict of str to str, not 'a=b'"),
    (lambda p: p.request("T", b"x", properties=[]), r"properties is a dict of str to str, not \[\]"),
    (lambda p: p.request("T", b"x", queue=0), "queue is a MessageQueue.* or None, not 0"),
    (lambda p: p.request("T", b"x", queue=MessageQueue("U", "a", 0)), "is no queue of topic 'T'"),
    (lambda p: (p.send_async if hasattr(p, "send_async") else p.send)("T", b"x", queue=[]), r"queue is a MessageQueue.* not \[\]"),
]  # fmt: skip

PRODUCER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"timeout": 5}, "has no setting 'timeout'; did you mean .*send_timeout_s"),
    ({"namesrc": NOWHERE}, "has no setting 'namesrc'; did you mean namesrv"),
    ({"acks": "all"}, "has no setting 'acks'; it has group, namesrv"),
    ({"hooks": 5}, "hooks is a list of Hook, not 5"),
    ({"hooks": [5]}, "a hook is derived from protomq.hooks.Hook, 5 is not"),
    ({"fault_tolerance": "no"}, "fault_tolerance is True or False, not 'no'"),
    ({"wait_store_ok": 1}, "wait_store_ok is True or False"),
    ({"retry_another_broker": None}, "retry_another_broker is True or False"),
    ({"compression": ["zlib"]}, "compression is a str"),
    ({"compression_level": 22}, "compression_level 22 is no level of zlib"),
    ({"send_timeout_s": 1e-9}, r"send_timeout_s is 0\.001 to 1e6 seconds, not 1e-09"),
    ({"client_id": 5}, "client_id is a str, not 5"),
    ({"peer_timeout_s": 1}, "peer_timeout_s must be at least 3"),
]

CONSUMER_CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda c: c.subscribe(["T"]), "topic is a str"),
    (lambda c: c.subscribe("T", 5), "tags is a list of str, not 5"),
    (lambda c: c.subscribe("T", None), "tags is a list of str, not None"),
    (lambda c: c.subscribe("T", [["a"]]), "a tag is a str"),
    (lambda c: c.subscribe("T", [f"tag-{n}" for n in range(257)]), "tags has 257 tags, brokers take 256 at most"),
    (lambda c: c.subscribe("T", ["\ud800"]), "a tag cannot be written as UTF-8"),
    (lambda c: c.unsubscribe(["T"]), "topic is a str"),
    (lambda c: c.assign(Q), r"queues is a list of MessageQueue: write \[MessageQueue"),
    (lambda c: c.assign(5), "queues is a list of MessageQueue, not 5"),
    (lambda c: c.assign("T"), "queues is a list of MessageQueue, not 'T'"),
    (lambda c: c.assign([("T", "a", 0)]), r"a queue is a MessageQueue\(topic, broker_name, queue_id\)"),
    (lambda c: c.assign([MessageQueue("T", "a", -1)]), "queue_id of .* is 0 to"),
    (lambda c: c.seek(0, Q), "a queue is a MessageQueue"),
    (lambda c: c.seek_to_time("2026-01-01"), "when is a datetime, not '2026-01-01'"),
    (lambda c: c.seek_to_time(date(2026, 1, 1)), "when is a datetime"),
    (lambda c: c.seek_to_time(AHEAD), r"when is 2\d+-.*, which lies ahead: .* would be skipped; if that is wanted, call seek_to_end\(\)"),
    (lambda c: c.seek_to_time(NAIVE), r"when is a datetime with a time zone.*write when\.astimezone\(\)"),
    (lambda c: c.seek_to_time(datetime.now(UTC), Q), "queues is a list of MessageQueue"),
    (lambda c: c.seek_to_begin(Q), "queues is a list of MessageQueue"),
    (lambda c: c.seek_to_end(5), "queues is a list of MessageQueue"),
    (lambda c: c.commit({Q}), "offsets is a dict of MessageQueue to int"),
    (lambda c: c.commit({("T", 0): 1}), "a queue is a MessageQueue"),
    (lambda c: c.commit({Q: "1"}), "the offset of MessageQueue.* is an int, not '1'"),
    (lambda c: c.commit({Q: 1 << 70}), "the offset of MessageQueue"),
    (lambda c: c.committed("T"), "a queue is a MessageQueue"),
    (lambda c: c.queues(5), "topic is a str, not 5"),
    (lambda c: c.queue_range("T"), "a queue is a MessageQueue"),
    (lambda c: c.min_offset("T"), "a queue is a MessageQueue"),
    (lambda c: c.end_offset(("T", "a", 0)), "a queue is a MessageQueue"),
    (lambda c: c.offset_for_time(Q, NAIVE), "when is a datetime with a time zone"),
    (lambda c: c.position(5), "a queue is a MessageQueue"),
]  # fmt: skip

CONSUMER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"timeout": 5}, "has no setting 'timeout'; did you mean request_timeout_s"),
    ({"group_id": "g"}, "has no setting 'group_id'; did you mean group"),
    ({"auto_commit": "no"}, "auto_commit is True or False, not 'no'"),
    ({"resume": 0}, "resume is True or False, not 0"),
    ({"begin": NAIVE}, "begin is a datetime with a time zone"),
    ({"begin": AHEAD}, 'begin is 2.*, which lies ahead: .* if that is wanted, write "latest"'),
    ({"client_id": 5}, "client_id is a str"),
    ({"machine_room": "r" * 129}, "machine_room has at most 128 octets"),
    ({"machine_room": "a\nb"}, r"machine_room is a name that people read in one line, without control characters, not 'a\\nb'"),
    ({"instance_name": "a\x1b[31m"}, "instance_name is a name that people read in one line"),
    ({"allocation": allocation.MachineRoom(frozenset({"r" * 300}))}, "the name of the allocation has at most 255 octets, 'machine-room r"),
    ({"peer_timeout_s": 1}, "peer_timeout_s must be at least 3"),
]

ADMIN_CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda a: a.reset_offsets("g", "T", AHEAD), 'to is 2.*, which lies ahead: .* if that is wanted, write "latest"'),
    (lambda admin: admin.trace_of(""), "message_id is empty"),
    (lambda admin: admin.trace_of("zz"), "message_id: a message id has 40 hex digits, this has 2"),
    (lambda admin: admin.trace_of("0x" * 20), "message_id: a message id has 40 hex digits"),
    (lambda a: a.set_group("g"), "nothing is set: give orderly, retry_count_max, .* get_group has the settings"),
    (lambda a: a.create_topic("T", brokers=[]), "brokers names no broker; None stands for all"),
    (lambda a: a.create_topic("T", brokers="a"), "brokers is a list of str, not 'a'"),
    (lambda a: a.create_topic("T", brokers=5), "brokers is a list of str, not 5"),
    (lambda a: a.create_topic("T", brokers=[5]), "each of brokers is a str, not 5"),
    (lambda a: a.create_topic(5), "topic is a str, not 5"),
    (lambda a: a.create_topic("T", write_queues=-1), "write_queues is 0 to"),
    (lambda a: a.create_topic("T", read_queues="8"), "read_queues is an int, not '8'"),
    (lambda a: a.create_topic("T", permission="READ"), "permission is a Permission"),
    (lambda a: a.create_topic("T", update="no"), "update is True or False"),
    (lambda a: a.create_topic("T", incarnation=-1), "incarnation is 0 to"),
    (lambda a: a.describe_topic(5), "topic is a str"),
    (lambda a: a.delete_topic("T", brokers=[]), "brokers names no broker"),
    (lambda a: a.list_topics(5), "is a str, not 5"),
    (lambda a: a.list_groups(5), "topic is a str"),
    (lambda a: a.delete_group(5), "group is a str, not 5"),
    (lambda a: a.delete_group("g", force="no"), "force is True or False"),
    (lambda a: a.broker_status(5), "is a str, not 5"),
    (lambda a: a.stats("T"), "topics is a list of str, not 'T'"),
    (lambda a: a.ping(5), "broker_name is a str, not 5"),
    (lambda a: a.transport(5), "broker_name is a str, not 5"),
    (lambda a: a.query_by_key("T", "k", count_max=0), "count_max is 1 to 256, not 0"),
    (lambda a: a.query_by_key("T", 5), "key is a str, not 5"),
    (lambda a: a.query_by_key("T", ""), "key is empty: no message can be found by that"),
    (lambda a: a.query_by_id("T", ""), "message_id is empty: no message can be found by that"),
    (lambda a: a.query_by_key("T", "k", begin=NAIVE), "begin is a datetime with a time zone"),
    (lambda a: a.query_by_key("T", "k", end="now"), "end is a datetime, not 'now'"),
    (lambda a: a.query_by_id("T", 5), "message_id is a str"),
    (lambda a: a.clone_offsets("g", "h", 0), "topic is a str, not 0"),
    (lambda a: a.group_lag("g", []), r"topic is a str, not \[\]"),
    (lambda a: a.describe_member("g", "c", nonce=1.5), r"nonce is an int, not 1\.5"),
    (lambda a: a.describe_member("g", "c", nonce=-1), "nonce is 0 to"),
    (lambda a: a.deploy_filter("late", bytes((768 << 10) + 1)), "a module has 786,432 bytes at most, this one has 786433"),
]


TIME = datetime(2026, 1, 1, tzinfo=UTC)

CLOSED_CONSUMER: list[Callable[[Any], Any]] = [
    lambda c: c.subscribe("T"),
    lambda c: c.unsubscribe("T"),
    lambda c: c.assign([Q]),
    lambda c: c.poll(),
    lambda c: c.position(Q),
    lambda c: c.seek(Q, 0),
    lambda c: c.seek_to_time(TIME),
    lambda c: c.seek_to_begin(),
    lambda c: c.seek_to_end(),
    lambda c: c.commit(),
    lambda c: c.commit({Q: 0}),
    lambda c: c.committed(Q),
    lambda c: c.queues("T"),
    lambda c: c.queue_range(Q),
    lambda c: c.min_offset(Q),
    lambda c: c.end_offset(Q),
    lambda c: c.offset_for_time(Q, TIME),
]
CLOSED_PRODUCER: list[Callable[[Any], Any]] = [
    lambda p: p.send("T", b"x"),
    lambda p: p.send_one_way("T", b"x"),
    lambda p: p.send_batch("T", [b"x"]),
    lambda p: p.flush(),
    lambda p: p.queues("T"),
    lambda p: p.transports("T"),
]
CLOSED_ADMIN: list[Callable[[Any], Any]] = [
    lambda a: a.create_topic("T"),
    lambda a: a.describe_topic("T"),
    lambda a: a.delete_topic("T"),
    lambda a: a.list_topic_names(),
    lambda a: a.list_topics(),
    lambda a: a.list_groups(),
    lambda a: a.delete_group("g"),
    lambda a: a.cluster_info(),
    lambda a: a.missing_brokers(),
    lambda a: a.refused_brokers(),
    lambda a: a.forget_broker("a"),
    lambda a: a.broker_status(),
    lambda a: a.stats(),
    lambda a: a.ping("a"),
    lambda a: a.query_by_key("T", "k"),
    lambda a: a.query_by_id("T", "00"),
    lambda a: a.transport("a"),
]


def ids(table: list[tuple[Any, str]]) -> list[str]:
    return [f"{i}-{re.sub('[^a-z0-9 _]', '', message)[:40]}" for i, (_, message) in enumerate(table)]


async def call(function: Callable[[Any], Any], client: Any) -> None:
    outcome = function(client)
    if inspect.isawaitable(outcome):
        await outcome


@pytest.mark.parametrize(("misuse", "message"), PRODUCER_CALLS, ids=ids(PRODUCER_CALLS))
async def test_a_wrong_send_says_what_to_give(misuse: Callable[[Any], Any], message: str) -> None:
    cluster = FakeCluster()
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        producer.send("T", b"so that there is a line of the queue", queue=Q)
        with pytest.raises(ConfigurationError, match=message):
            misuse(producer)
    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as other:
        await other.send("T", b"here too", queue=Q)
        with pytest.raises(ConfigurationError, match=message):
            await call(misuse, other)
    assert len(cluster.calls) == 2


@pytest.mark.parametrize(("settings", "message"), PRODUCER_SETTINGS, ids=ids(PRODUCER_SETTINGS))
def test_a_wrong_setting_of_a_producer_says_what_to_give(
    settings: dict[str, Any], message: str
) -> None:
    for client in (Producer, AsyncProducer):
        with pytest.raises(ConfigurationError, match=message):
            client(**settings)


def test_a_check_listener_that_could_never_decide_is_refused() -> None:
    async def decide(_: object) -> TransactionDecision:
        return TransactionDecision.COMMIT

    for client in (TransactionProducer, AsyncTransactionProducer):
        with pytest.raises(WrongTypeError, match="check is a function of one TransactionCheck, not 5"):
            client("desk", 5, namesrv=NOWHERE)  # type: ignore[arg-type]
        with pytest.raises(WrongTypeError, match="topics is a list of str, not 'bookings'"):
            client("desk", decide, topics="bookings", namesrv=NOWHERE)  # type: ignore[arg-type]
    with pytest.raises(WrongTypeError, match="AsyncTransactionProducer takes those"):
        TransactionProducer("desk", decide, namesrv=NOWHERE)  # type: ignore[arg-type]


@pytest.mark.parametrize(("misuse", "message"), CONSUMER_CALLS, ids=ids(CONSUMER_CALLS))
async def test_a_wrong_call_of_a_consumer_says_what_to_give(
    misuse: Callable[[Any], Any], message: str
) -> None:
    with PullConsumer("g", namesrv=NOWHERE) as consumer:
        with pytest.raises(ConfigurationError, match=message):
            misuse(consumer)
    async with AsyncPullConsumer("g", namesrv=NOWHERE) as other:
        with pytest.raises(ConfigurationError, match=message):
            await call(misuse, other)


@pytest.mark.parametrize("when", [datetime.max.replace(tzinfo=UTC), datetime.max.replace(tzinfo=timezone(timedelta(hours=-23)))])
def test_the_last_time_that_there_is_is_behind_all_messages(when: datetime) -> None:
    asked_ms: list[int] = []

    def call(_: ConsumerCalls, *arguments: Any) -> Steps[bytes]:
        asked_ms.append(SearchOffsetRequest.FromString(arguments[-1]).store_time.ToMilliseconds())
        return SearchOffsetResponse(queue_offset=7).SerializeToString()
        yield

    with mock.patch.object(ConsumerCalls, "_call", call), pytest.raises(StopIteration) as ended:
        next(ConsumerCalls(lambda: 0.0).offset_for_time(Limits(1.0), Q, when))
    assert ended.value.value.queue_offset == 7
    assert asked_ms == [STORE_TIME_MAX_MS]


@pytest.mark.parametrize(("settings", "message"), CONSUMER_SETTINGS, ids=ids(CONSUMER_SETTINGS))
def test_a_wrong_setting_of_a_consumer_says_what_to_give(
    settings: dict[str, Any], message: str
) -> None:
    for client in (PullConsumer, AsyncPullConsumer):
        with pytest.raises(ConfigurationError, match=message):
            client(**settings)


@pytest.mark.parametrize(("misuse", "message"), ADMIN_CALLS, ids=ids(ADMIN_CALLS))
def test_a_wrong_call_of_admin_says_what_to_give(
    misuse: Callable[[Any], Any], message: str
) -> None:
    with Admin(namesrv=NOWHERE) as admin, pytest.raises(ConfigurationError, match=message):
        misuse(admin)


def test_a_wrong_setting_of_admin_says_what_to_give() -> None:
    wrong: dict[str, Any] = {"timeout": 5}
    with pytest.raises(TypeError, match="Admin has no setting 'timeout'; did you mean request_"):
        Admin(**wrong)
    wrong = {"spin": "no"}
    with pytest.raises(TypeError, match="spin is True or False"):
        Admin(**wrong)


def test_settings_beside_a_transport_that_is_handed_in_are_refused() -> None:
    cluster = FakeCluster()
    beside: list[dict[str, Any]] = [{"client_id": "c"}, {"peer_timeout_s": 30.0}, {"spin": False}]
    for settings in beside:
        with pytest.raises(ConfigurationError, match="belong to the transport"):
            Producer(transport=FakeSyncTransport(cluster), **settings)
    with pytest.raises(ConfigurationError, match="belong to the transport"):
        AsyncProducer(transport=FakeAsyncTransport(cluster), peer_timeout_s=30.0)
    with pytest.raises(ConfigurationError, match="belong to the transport"):
        Producer(transport=FakeSyncTransport(cluster), connection=ConnectionOptions())


CLIENTS: list[Callable[..., Any]] = [
    Producer, AsyncProducer, PullConsumer, AsyncPullConsumer, Admin, Calls,
    partial(SimpleConsumer, "g"), partial(AsyncSimpleConsumer, "g"),
]  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_takes_one_object_that_says_how_to_connect(client: Callable[..., Any]) -> None:
    options = ConnectionOptions(namesrv="h:1", transport="grpc", client_id="me", connect_timeout_s=1.0)
    made = client(connection=options)
    assert made._transport.options == options
    assert [server.grpc_address for server in made._routes.name_servers.in_order()] == ["h:1"]
    with pytest.raises(ConfigurationError, match="namesrv, client_id beside connection would be lost"):
        client(connection=options, namesrv="h:2", client_id="x")
    wrong: Any = "h:1"
    with pytest.raises(TypeError, match="connection is a ConnectionOptions, not 'h:1'"):
        client(connection=wrong)


@pytest.mark.parametrize("client_id", ["x" * 256, "é" * 128, "a\nb", "\x1b[31mred", "a\x7f", "a\u2028b"])
@pytest.mark.parametrize(
    "client",
    [
        *CLIENTS, partial(PushConsumer, "g"), partial(AsyncPushConsumer, "g"), ConnectionOptions,
        partial(TransactionProducer, "g", lambda _: TransactionDecision.COMMIT),
        partial(AsyncTransactionProducer, "g", lambda _: TransactionDecision.COMMIT),
    ],
)  # fmt: skip
def test_a_name_that_no_broker_takes_or_that_would_tear_a_log_is_refused(client: Callable[..., Any], client_id: str) -> None:
    with pytest.raises(ConfigurationError, match=r"client_id (has at most 255 octets|is a name that people read in one line), "):
        client(client_id=client_id)


@pytest.mark.parametrize("client_id", ["x" * 255, "é" * 127, "a b@c", "billing@north-1"])
def test_a_name_that_a_broker_takes_is_taken(client_id: str) -> None:
    assert PullConsumer("g", client_id=client_id).name is not None


def test_a_producer_group_names_the_client_where_nothing_else_does() -> None:
    assert Producer("shop", connection=ConnectionOptions())._transport.options.client_id.startswith("shop@")
    assert Producer("shop", connection=ConnectionOptions(client_id="me"))._transport.options.client_id == "me"


# -- what is allowed ---------------------------------------------------------------------------------------------------------


def test_an_empty_value_of_a_property_arrives_as_it_is() -> None:
    cluster = FakeCluster()
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        producer.send("T", b"x", key="", properties={"a": ""})
    (record,) = cluster.calls[0].request.records
    assert (dict(record.properties), list(record.keys)) == ({"a": ""}, [])


# -- time --------------------------------------------------------------------------------------------------------------------


async def test_the_time_out_covers_compression() -> None:
    cluster = FakeCluster()
    body = bytes(1 << 20)
    message = OutgoingMessage("T", body)
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        producer._core.clock = lambda: time.monotonic() + 100  # The time is up at the first look.
        for send in (
            lambda: producer.send("T", body),
            lambda: producer.send(message),
            lambda: producer.send_async("T", body),
            lambda: producer.send_one_way("T", body),
            lambda: producer.send_batch("T", [body]),
        ):
            with pytest.raises(RequestTimeoutError, match="while the body was compressed") as caught:
                send()
            assert caught.value.definite
    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as other:
        other._core.clock = lambda: time.monotonic() + 100
        for send_too in (
            lambda: other.send("T", body),
            lambda: other.send(message),
            lambda: other.send_one_way("T", body),
            lambda: other.send_batch("T", [body]),
        ):
            with pytest.raises(RequestTimeoutError, match="while the body was compressed"):
                await send_too()
    assert cluster.calls == []


def test_a_body_that_no_consumer_would_unpack_is_refused_however_small_it_gets() -> None:
    cluster = FakeCluster()
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        with pytest.raises(MessageTooLargeError, match="before compression") as caught:
            producer.send("T", bytes(DECOMPRESSED_SIZE_MAX_BYTES + 1))
        assert caught.value.metadata == {"limit_bytes": str(DECOMPRESSED_SIZE_MAX_BYTES)}
    assert cluster.calls == []


# -- after close ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", CLOSED_CONSUMER, ids=range(len(CLOSED_CONSUMER)))
async def test_a_closed_consumer_says_so(use: Callable[[Any], Any]) -> None:
    source = PullConsumer("g", namesrv=NOWHERE)
    source.close()
    source.close()
    with pytest.raises(ClosedError, match="the consumer is closed"):
        use(source)
    other = AsyncPullConsumer("g", namesrv=NOWHERE)
    await other.close()
    with pytest.raises(ClosedError, match="the consumer is closed"):
        await call(use, other)


@pytest.mark.parametrize("use", CLOSED_PRODUCER, ids=range(len(CLOSED_PRODUCER)))
async def test_a_closed_producer_says_so(use: Callable[[Any], Any]) -> None:
    producer = Producer(namesrv=NOWHERE)
    producer.close()
    with pytest.raises(ClosedError, match="the producer is closed"):
        use(producer)
    other = AsyncProducer(namesrv=NOWHERE)
    await other.close()
    with pytest.raises(ClosedError, match="the producer is closed"):
        await call(use, other)


@pytest.mark.parametrize("use", CLOSED_ADMIN, ids=range(len(CLOSED_ADMIN)))
def test_a_closed_admin_client_says_so(use: Callable[[Any], Any]) -> None:
    admin = Admin(namesrv=NOWHERE)
    admin.close()
    with pytest.raises(ClosedError, match="the admin client is closed"):
        use(admin)


@pytest.mark.parametrize("client", [PushConsumer, AsyncPushConsumer])
def test_settings_of_a_push_consumer_that_exclude_each_other_are_refused(client: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"orderly and broadcast exclude each other.*Leave one out"):
        client("g", orderly=True, broadcast=True, namesrv=NOWHERE)
    with pytest.raises(ConfigurationError, match=r"attempts_max is of an orderly consumer.*`protomq group set g --retries 2`"):
        client("g", attempts_max=3, namesrv=NOWHERE)
    assert client("g", orderly=True, attempts_max=3, namesrv=NOWHERE).options.attempts_max == 3


def test_a_transaction_without_local_work_is_refused_before_its_half_message_is_sent() -> None:
    nothing: Any = None
    with TransactionProducer("desk", lambda _: TransactionDecision.COMMIT, namesrv=NOWHERE) as producer:
        with pytest.raises(WrongTypeError, match=r"execute is the local work, a function .*producer\.begin"):
            producer.send("T", b"x", execute=nothing)
        with pytest.raises(WrongTypeError, match="wait_for_end is True or False, not 'no'"):
            producer.send("T", b"x", execute=lambda half: None, wait_for_end="no")  # type: ignore[arg-type]

    async def send() -> None:
        async with AsyncTransactionProducer("desk", lambda _: TransactionDecision.COMMIT, namesrv=NOWHERE) as producer:
            await producer.send("T", b"x", execute=nothing)

    with pytest.raises(WrongTypeError, match="execute is the local work"):
        asyncio.run(send())

    async def send_and_not_wait() -> None:
        async with AsyncTransactionProducer("desk", lambda _: TransactionDecision.COMMIT, namesrv=NOWHERE) as producer:
            await producer.send("T", b"x", execute=lambda half: None, wait_for_end="no")  # type: ignore[arg-type]

    with pytest.raises(WrongTypeError, match="wait_for_end is True or False, not 'no'"):
        asyncio.run(send_and_not_wait())


@pytest.mark.parametrize("client", [PushConsumer, AsyncPushConsumer])
def test_on_without_a_topic_is_refused_where_it_stands(client: Any) -> None:
    consumer = client("g", namesrv=NOWHERE)

    def bill(message: Any) -> None: ...

    with pytest.raises(WrongTypeError, match=r'write @consumer.on\("orders"\) above bill'):
        consumer.on(bill)
    with pytest.raises(WrongTypeError, match="topic is a str, not 5"):
        consumer.on(5)
    with pytest.raises(WrongTypeError, match=r'^on takes a topic: write @consumer.on\("orders"\)$'):
        consumer.on()


@pytest.mark.parametrize("client", [PushConsumer, AsyncPushConsumer])
def test_a_class_is_no_listener(client: Any) -> None:
    with pytest.raises(WrongTypeError, match="a listener is a function or a coroutine function, not the class dict"):
        client("g", namesrv=NOWHERE).subscribe("T", dict)


@pytest.mark.parametrize(
    ("do", "text"),
    [
        (lambda p: p.send("T", b"", key=["a", "b"]), r"write keys=\['a', 'b'\]$"),
        (lambda p: p.send("T", b"", key=b"a"), r"write key=b'a'\.decode\(\)"),
        (lambda p: p.send("T", b"", properties={"a": None}), "'a': None is not; leave it out"),
        (lambda p: p.send("T", b"", delay=math.inf), "delay is 0 seconds to 40 days, not inf"),
        (lambda p: p.send("T", b"", delay=-5), "delay is 0 seconds to 40 days, not -5$"),
        (lambda p: p.send("T", b"", delay=10**12), "delay is 0 seconds to 40 days, not 1000000000000; a time is given as deliver_at"),
        (lambda _: PushConsumer("g", threads=3), "did you mean concurrency"),  # type: ignore[call-arg]
        (lambda _: PushConsumer("g", batch_size=3), "belongs to a listener"),  # type: ignore[call-arg]
        (lambda _: PushConsumer("g", max_retries=3), "protomq group set GROUP --retries 3"),  # type: ignore[call-arg]
        (lambda _: PushConsumer("g", auto_commit=True), "committed by itself, every commit_interval_s"),  # type: ignore[call-arg]
        (lambda _: PushConsumer("g", prefetch_count=1), r"did you mean count_max\?"),  # type: ignore[call-arg]
        (lambda _: PushConsumer("g", max_workers=1), r"did you mean concurrency\?"),  # type: ignore[call-arg]
        (lambda _: PushConsumer("g", begin=AHEAD), "begin is 2.*, which lies ahead"),
        (lambda _: PushConsumer("g", commit_interval_s=0), "^commit_interval_s is"),
        (lambda _: PushConsumer("g", resume="no"), "resume is True or False, not 'no'"),  # type: ignore[arg-type]
        (lambda _: PushConsumer("g").stop(math.nan), "timeout_s is 0 to 1e6 seconds, not nan"),
        (lambda _: PushConsumer("g").stop("1"), "timeout_s is a number of seconds, not '1'"),  # type: ignore[arg-type]
        (lambda _: SimpleConsumer("g").receive("T", queue=MessageQueue("T", "a", TEXT)), "queue_id of .* is an int, not '0'"),
        (lambda _: SimpleConsumer("g").receive("T", queue=MessageQueue("U", "a", 0)), "is no queue of topic 'T'"),
        (lambda _: Messaging().consumer("g", concurency=3), "did you mean concurrency"),  # type: ignore[call-arg]
        (lambda _: SimpleConsumer("g", namesrv=NOWHERE).nack([], -1), "^after_s is 0 to"),
        (lambda _: Messaging(5), "group is a str"),  # type: ignore[arg-type]
        (lambda _: Messaging("x", connection="host:1"), "connection is a ConnectionOptions"),  # type: ignore[arg-type]
        (lambda _: Messaging("x", thread=1), "Messaging has no setting 'thread'"),  # type: ignore[call-arg]
        (lambda _: allocation.ConsistentHash(TEXT), "virtual_nodes is an int"),
        (lambda _: allocation.ConsistentHash(0), "virtual_nodes is 1 or more"),
        (lambda _: allocation.Configured(None), "queues is a tuple of MessageQueue"),  # type: ignore[arg-type]
        (lambda _: allocation.Configured([5]), "a queue is a MessageQueue"),  # type: ignore[arg-type]
        (lambda _: allocation.MachineRoom(None), "rooms is a list of str"),  # type: ignore[arg-type]
        (lambda _: allocation.MachineRoom("abc"), "rooms is a list of str"),  # type: ignore[arg-type]
    ],
)
def test_an_error_says_what_to_write_instead(do: Any, text: str) -> None:
    with Producer(namesrv=NOWHERE) as producer, pytest.raises((ConfigurationError, WrongTypeError), match=text):
        do(producer)


@pytest.mark.parametrize("client", [PushConsumer, AsyncPushConsumer])
def test_a_listener_of_a_consumer_that_has_stopped_is_refused(client: Any) -> None:
    consumer = client("g", namesrv=NOWHERE)
    consumer._is_ending = True
    with pytest.raises(ConfigurationError, match="the push consumer of group 'g' has stopped: make another one"):
        consumer.on("T")(print)
    assert not consumer._wanted


async def test_a_consumer_of_an_application_that_has_started_is_refused() -> None:
    messaging = Messaging("shop", connection=ConnectionOptions(namesrv=NOWHERE))
    async with messaging.lifespan():
        with pytest.raises(ConfigurationError, match="a consumer of group 'late' would never run; make it before"):
            messaging.consumer("late")
        assert messaging.is_running
    messaging.consumer("late")


async def test_run_in_an_event_loop_is_refused_and_nothing_has_begun() -> None:
    consumer = PushConsumer("g", namesrv=NOWHERE)
    consumer.subscribe("T", print)
    consumer.request_stop()
    with pytest.raises(ConfigurationError, match=r"run\(\) would block the event loop.*AsyncPushConsumer.*start\(\) and stop\(\)"):
        consumer.run()


@pytest.mark.parametrize("carry", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
@pytest.mark.parametrize(
    "make",
    [
        partial(Producer, namesrv=NOWHERE),
        partial(AsyncProducer, namesrv=NOWHERE),
        partial(PullConsumer, "g", namesrv=NOWHERE),
        partial(AsyncPullConsumer, "g", namesrv=NOWHERE),
        partial(PushConsumer, "g", namesrv=NOWHERE),
        partial(AsyncPushConsumer, "g", namesrv=NOWHERE),
        partial(SimpleConsumer, "g", namesrv=NOWHERE),
        partial(AsyncSimpleConsumer, "g", namesrv=NOWHERE),
        partial(TransactionProducer, "g", lambda _: TransactionDecision.COMMIT, namesrv=NOWHERE),
        partial(AsyncTransactionProducer, "g", lambda _: TransactionDecision.COMMIT, namesrv=NOWHERE),
        partial(Admin, namesrv=NOWHERE),
    ],
    ids=lambda make: make.func.__name__,
)
def test_a_client_is_not_carried_to_another_process(make: Any, carry: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=f"^{make.func.__name__} belongs to the process that made it.*make one where it is used"):
        carry(make())


async def test_a_simple_consumer_of_another_loop_that_is_open_is_refused_and_goes_on_there() -> None:
    consumer = AsyncSimpleConsumer("g", namesrv=NOWHERE)
    assert await consumer.ack([]) == []

    def elsewhere(use: Callable[[], Any]) -> None:
        with pytest.raises(ConfigurationError, match="belongs to another event loop, which is still open"):
            asyncio.run(use())

    for use in (lambda: consumer.receive("t", hold_s=0), lambda: consumer.ack([]), lambda: consumer.handle("t", print), consumer.close):
        await asyncio.to_thread(elsewhere, use)
    assert await consumer.ack([]) == []
    await consumer.close()


def test_a_simple_consumer_goes_on_in_a_loop_after_another_that_is_closed() -> None:
    consumer = AsyncSimpleConsumer("g", namesrv=NOWHERE)
    for _ in range(2):
        assert asyncio.run(consumer.ack([])) == []
    asyncio.run(consumer.close())


@pytest.mark.parametrize("seconds", [-1, 43_201, float("nan")])
def test_the_bounds_of_a_hold_are_named_as_they_are(seconds: float) -> None:
    with SimpleConsumer("g", namesrv=NOWHERE) as consumer:
        with pytest.raises(ConfigurationError, match=r"^after_s is 0 to 43200 \(12 h\), not "):
            consumer.nack([], seconds)
