"""Constructors take a group first and everything else by name; what is wrong says what to write."""

from __future__ import annotations

import inspect
import pydoc
from typing import Any

import pytest

from protomq import (
    Admin,
    AsyncProducer,
    AsyncPullConsumer,
    AsyncPushConsumer,
    MessageQueue,
    OutgoingMessage,
    Producer,
    PullConsumer,
    PushConsumer,
)
from protomq._checks import ExecuteChecks, check_group
from protomq._producer_options import ProducerOptions
from protomq._transport_options import TransportOptions
from protomq.errors import ConfigurationError, WrongTypeError
from protomq.wire.topics import GROUP_NAME_LENGTH_MAX
from tests.support.fake_cluster import FakeAsyncTransport, FakeCluster, FakeSyncTransport

CLIENTS = [Producer, AsyncProducer, PullConsumer, AsyncPullConsumer]


def test_a_group_is_what_the_broker_takes() -> None:
    assert check_group("") == ""
    assert check_group("a-Z_9") == "a-Z_9"
    for wrong in ("a b", "%RETRY%x", "ü", "g" * (GROUP_NAME_LENGTH_MAX + 1)):
        with pytest.raises(ConfigurationError, match="a group has 1 to 120 characters"):
            check_group(wrong)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_positional_address_is_told_where_it_belongs(client: type) -> None:
    with pytest.raises(ValueError, match=r"write namesrv='127\.0\.0\.1:10911'"):
        client("127.0.0.1:10911")
    with pytest.raises(TypeError, match=r"addresses of name servers are given as namesrv="):
        client(["127.0.0.1:10911"])
    with pytest.raises(TypeError, match="positional"):
        client("group", "127.0.0.1:10911")


@pytest.mark.parametrize("client", CLIENTS)
def test_all_but_the_group_is_by_name(client: type) -> None:
    first, *rest = inspect.signature(client).parameters.values()
    assert first.name == "group"
    assert {parameter.kind for parameter in rest} == {inspect.Parameter.KEYWORD_ONLY}
    assert client("shop", namesrv="127.0.0.1:1").group == "shop"


@pytest.mark.parametrize("client", [Producer, AsyncProducer])
def test_help_lists_each_setting_with_type_default_and_meaning(client: type) -> None:
    shown = pydoc.plain(pydoc.render_doc(client))
    for name, field in ProducerOptions.__dataclass_fields__.items():
        assert f"{name}: '{field.type}' = {field.default!r}" in shown, name
        assert f"`{name}`" in shown, name
    assert "settings" not in inspect.signature(client).parameters


def test_admin_takes_nothing_by_position() -> None:
    with pytest.raises(TypeError):
        Admin("127.0.0.1:10911")  # type: ignore[call-arg]


# -- values ----------------------------------------------------------------------------------------------------------------


WRONG_MESSAGES: list[tuple[dict[str, object], str]] = [
    ({"key": 5}, "key is a str or None, not 5; write key='5'"),
    ({"key": b"k"}, r"key is a str or None, not b'k'; write key=b'k'\.decode\(\)"),
    ({"key": 0}, "key is a str or None, not 0"),
    ({"keys": "abc"}, "keys is a list of further keys, not 'abc'"),
    ({"keys": ["a", 5]}, "keys is a list of str, 5 is none"),
    ({"keys": 5}, "keys is a list of str, not 5"),
    ({"tag": 5}, "tag is a str, not 5"),
    ({"tag": None}, "tag is a str, not None"),
    ({"tag": ["a"]}, "tag is a str"),
    ({"properties": {"a": 5}}, "properties is a dict of str to str, 'a': 5 is not; write 'a': '5'"),
    ({"properties": {5: "a"}}, "properties is a dict of str to str"),
    ({"properties": [("a", "b")]}, "properties is a dict of str to str"),
    ({"sharding_key": 5}, "sharding_key is a str or None, not 5"),
    ({"queue": 3}, r"queue is a MessageQueue\(topic, broker_name, queue_id\) or None, not 3"),
    ({"body": None}, "a body is bytes, or what a body codec encodes, not NoneType: str, dict, list, "),
    ({"body": 5}, "a body is bytes, or what a body codec encodes, not int"),
    ({"body": {"when": {1}}}, "a body of type dict cannot be encoded: Object of type set is not JSON serializable"),
    ({"topic": 5}, "topic is a str, not 5"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_MESSAGES)
async def test_a_wrong_type_in_a_message_is_a_type_error_that_says_what_to_pass(
    wrong: dict[str, object], message: str
) -> None:
    cluster = FakeCluster()
    arguments: dict[str, Any] = {"topic": "T", "body": b"", **wrong}
    as_object = OutgoingMessage(**arguments)
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        for send in (producer.send, producer.send_async, producer.send_one_way):
            with pytest.raises(TypeError, match=message):
                send(**arguments)
            with pytest.raises(TypeError, match=message):
                send(as_object)
        with pytest.raises(TypeError, match=message):
            producer.send_batch(as_object.topic, [as_object])
    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as other:
        for send_too in (other.send, other.send_one_way):
            with pytest.raises(TypeError, match=message):
                await send_too(**arguments)
    assert cluster.calls == []


def test_a_wrong_type_in_a_batch_is_refused_whole() -> None:
    cluster = FakeCluster()
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        for wrong in ({"keys": ["a", 5]}, {"keys": "ab"}, {"tags": ["a", 5]}, {"queue": 3}):
            with pytest.raises(TypeError):
                producer.send_batch("T", [b"1", b"2"], **wrong)
        with pytest.raises(TypeError):
            producer.send_batch("T", [b"1", 2])
    assert cluster.calls == []


def test_a_queue_of_another_topic_is_refused() -> None:
    elsewhere = MessageQueue("U", "a", 0)
    with Producer(transport=FakeSyncTransport(FakeCluster())) as producer:
        for send in (producer.send, producer.send_async, producer.send_one_way):
            with pytest.raises(ConfigurationError, match="no queue of topic 'T'"):
                send("T", b"", queue=elsewhere)
        with pytest.raises(ConfigurationError, match="no queue of topic 'T'"):
            producer.send_batch("T", [b""], queue=elsewhere)


@pytest.mark.parametrize("timeout_s", [-1, 0, 1e-9, float("nan"), float("inf"), 1e7])
async def test_a_timeout_that_is_no_time_is_refused(timeout_s: float) -> None:
    cluster = FakeCluster()
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        for send in (producer.send, producer.send_async, producer.send_one_way):
            with pytest.raises(ConfigurationError, match=r"timeout_s is 0\.001 to 1e6 seconds"):
                send("T", b"", timeout_s=timeout_s)
        with pytest.raises(ConfigurationError, match=r"timeout_s is 0\.001 to 1e6 seconds"):
            producer.send_batch("T", [b""], timeout_s=timeout_s)
        with pytest.raises(TypeError, match="timeout_s is a number of seconds, not '1'"):
            producer.send("T", b"", timeout_s="1")  # type: ignore[arg-type]
    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as other:
        with pytest.raises(ConfigurationError, match=r"timeout_s is 0\.001 to 1e6 seconds"):
            await other.send("T", b"", timeout_s=timeout_s)
    assert cluster.calls == []


def test_poll_takes_a_time_of_zero_or_more() -> None:
    with PullConsumer() as consumer:
        for wrong in (-1, float("nan")):
            with pytest.raises(ConfigurationError, match="timeout_s is 0 to 1e6 seconds"):
                consumer.poll(wrong)
        with pytest.raises(TypeError, match="max_messages is an int"):
            consumer.poll(0, 2.5)  # type: ignore[arg-type]


NUMBERS: list[tuple[type, str]] = [
    *((Producer, name) for name in (
        "send_timeout_s", "retries", "batch_size_max_bytes", "coalesce_size_max_bytes", "coalesce_count_max",
        "pending_size_max_bytes", "compress_over_bytes", "producer_id", "producer_epoch", "compression_level",
    )),
    *((PullConsumer, name) for name in (
        "auto_commit_interval_s", "request_timeout_s", "hold_ms", "pull_record_count_max", "pull_size_max_bytes",
    )),
    (Admin, "request_timeout_s"),
    (TransportOptions, "connect_timeout_s"),
    (TransportOptions, "connections_idle_max"),
    (TransportOptions, "peer_timeout_s"),
]  # fmt: skip


@pytest.mark.parametrize(("client", "name"), NUMBERS)
def test_each_number_among_the_settings_is_checked_when_it_is_given(
    client: type, name: str
) -> None:
    for value in ("1", True, [1]):
        with pytest.raises(TypeError, match=f"{name} is a"):
            client(**{name: value})
    lowest = -(1 << 17) - 1 if name == "compression_level" else -1
    for number in (lowest, float("nan")) if name.endswith("_s") else (lowest,):
        with pytest.raises(ConfigurationError, match=f"{name} is "):
            client(**{name: number})


@pytest.mark.parametrize("client", [*CLIENTS, Admin])
@pytest.mark.parametrize(
    ("namesrv", "message"),
    [
        ("protomq://127.0.0.1:10911", r"without protomq://: write '127\.0\.0\.1:10911'"),
        ("tcp://h:1/x", "without tcp://: write 'h:1'"),
        (["http://h:1"], "without http://: write 'h:1'"),
        ("h/x:1", "has the form host:port"),
        ("::1:9876", "has the form host:port"),
        (f"{'a' * 64}:1", "has the form host:port"),
        ("a..b:1", "has the form host:port"),
    ],
)
def test_what_is_no_address_of_a_name_server_is_a_value_error(
    client: type, namesrv: str | list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        client(namesrv=namesrv)


def test_a_name_server_that_is_no_text_is_a_type_error() -> None:
    for wrong in (5, [5], {"h:1"}):
        with pytest.raises(TypeError, match="host:port"):
            Admin(namesrv=wrong)  # type: ignore[arg-type]


def _work(defaults: tuple[Any, ...] | None) -> Any:
    """A function of one code and other defaults each time."""

    def work(half: object, more: object, *, least: int = 0) -> None:
        del half, more, least

    work.__defaults__ = defaults
    return work


def test_local_work_is_checked_though_the_last_one_was_good() -> None:
    checks = ExecuteChecks(may_be_coroutine=False)
    for _ in range(2):
        checks.check(lambda half: None)
        checks.check(_work((1,)))
        with pytest.raises(ConfigurationError, match="execute is called with one SendResult"):
            checks.check(_work(None))
        with pytest.raises(ConfigurationError, match="execute is called with one SendResult"):
            checks.check(lambda: None)
        with pytest.raises(WrongTypeError, match="execute is the local work"):
            checks.check(None)


@pytest.mark.parametrize("may_be_coroutine", [True, False])
def test_local_work_that_is_a_coroutine_function_is_checked_each_time(may_be_coroutine: bool) -> None:
    async def work(half: object) -> None:
        del half

    checks = ExecuteChecks(may_be_coroutine=may_be_coroutine)
    for _ in range(2):
        if may_be_coroutine:
            checks.check(work)
        else:
            with pytest.raises(WrongTypeError, match="AsyncTransactionProducer takes those"):
                checks.check(work)


@pytest.mark.parametrize("topic", ["", "my topic", "*", "x" * 128])
@pytest.mark.parametrize("kind", [PushConsumer, AsyncPushConsumer])
def test_a_push_consumer_refuses_at_once_what_no_topic_can_be_called(kind: Any, topic: str) -> None:
    with pytest.raises(ConfigurationError, match="topic has to be 1 to 127 characters"):
        kind("g").subscribe(topic, print)
    with pytest.raises(ConfigurationError, match="topic has to be 1 to 127 characters"):
        kind("g").on(topic)
