"""What a name server takes from the wire."""

from __future__ import annotations

from typing import Any

import pytest

from protomq.v1.route_service_pb2 import Broker, RegisterBrokerRequest
from protomq.v1.topic_pb2 import DataVersion, Permission, Topic
from protomq.wire.record import encode_varint
from protomq_namesrv.request_checks import (
    VIOLATIONS_MAX,
    check_topic,
    page_size_of,
    to_key,
    to_registration,
)
from protomq_namesrv.route_snapshot import BrokerKey, TopicShare, Version
from protomq_runtime.errors import Code, ServiceError


def request(topics: list[Topic] | None = None, **fields: Any) -> RegisterBrokerRequest:
    values: dict[str, Any] = {
        "cluster": "DefaultCluster",
        "broker_name": "broker-0.example",
        "grpc_address": "10.0.0.1:8081",
        "incarnation": 1_700_000_000_000,
    }
    broker = Broker(**{**values, **fields})
    return RegisterBrokerRequest(
        broker=broker, data_version=DataVersion(time_ms=5, counter=7), topics=topics or []
    )


def refused_fields(message: RegisterBrokerRequest) -> list[str]:
    with pytest.raises(ServiceError) as error:
        to_registration(message, 100)
    assert (error.value.code, error.value.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    return [field for field, _ in error.value.field_violations]


def test_defaults_are_filled_in() -> None:
    registration = to_registration(request([Topic(name="t"), Topic(name="u", write_queues=3)]), 100)
    assert registration.broker.permission == Permission.PERMISSION_READ_WRITE
    assert registration.topics == {
        "t": TopicShare(8, 8, Permission.PERMISSION_UNSPECIFIED),
        "u": TopicShare(3, 3, Permission.PERMISSION_UNSPECIFIED),
    }
    assert registration.version == Version(7, 5)


def test_registration_is_independent_of_the_request() -> None:
    message = request()
    registration = to_registration(message, 100)
    message.broker.grpc_address = "changed:1"
    assert registration.broker.grpc_address == "10.0.0.1:8081"


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"cluster": ""}, "broker.cluster"),
        ({"broker_name": ""}, "broker.broker_name"),
        ({"broker_name": "../x"}, "broker.broker_name"),
        ({"broker_name": ".hidden"}, "broker.broker_name"),
        ({"broker_name": "x" * 128}, "broker.broker_name"),
        ({"broker_name": "a\n"}, "broker.broker_name"),
        ({"broker_id": -1}, "broker.broker_id"),
        ({"grpc_address": ""}, "broker.grpc_address"),
        ({"grpc_address": "nonsense"}, "broker.grpc_address"),
        ({"remoting_address": "host:0"}, "broker.remoting_address"),
        ({"ha_address": "host"}, "broker.ha_address"),
        ({"grpc_address": "0.0.0.0:8081"}, "broker.grpc_address"),
        ({"remoting_address": "[::]:10911"}, "broker.remoting_address"),
        ({"remoting_address": "10.0.0.1:8081"}, "broker.remoting_address"),  # which gRPC has
        ({"incarnation": 0}, "broker.incarnation"),
        ({"permission": 17}, "broker.permission"),
        ({"auto_create_queues": -1}, "broker.auto_create_queues"),
        ({"auto_create_queues": 1_025}, "broker.auto_create_queues"),
    ],
)
def test_impossible_broker_is_refused_by_field(fields: dict[str, Any], refused: str) -> None:
    assert refused_fields(request(**fields)) == [refused]


@pytest.mark.parametrize(
    ("topic", "refused"),
    [
        (Topic(name="../../etc"), "topics[0].name"),
        (Topic(name=""), "topics[0].name"),
        (Topic(name="t", write_queues=-1), "topics[0].write_queues"),
        (Topic(name="t", read_queues=1_025), "topics[0].read_queues"),
        (Topic(name="t", permission=9), "topics[0].permission"),  # type: ignore[arg-type]
        (Topic(name="t", incarnation=-1), "topics[0].incarnation"),
    ],
)
def test_impossible_topic_is_refused_by_field(topic: Topic, refused: str) -> None:
    assert refused_fields(request([topic])) == [refused]


def test_topic_given_twice_is_refused() -> None:
    assert refused_fields(request([Topic(name="t"), Topic(name="t")])) == ["topics[1].name"]


def test_number_of_violations_told_is_bounded() -> None:
    assert len(refused_fields(request([Topic(name="/") for _ in range(90)]))) == VIOLATIONS_MAX


def test_more_topics_than_the_limit_are_refused() -> None:
    with pytest.raises(ServiceError) as error:
        to_registration(request([Topic(name=f"t{index}") for index in range(3)]), 2)
    assert error.value.reason == "TOO_MANY"

def test_lookups_with_impossible_names_are_refused() -> None:
    assert to_key("a", 0) == BrokerKey("a", 0)
    for attempt in (lambda: to_key("", 0), lambda: to_key("a", -1), lambda: check_topic("a b")):
        with pytest.raises(ServiceError) as error:
            attempt()
        assert error.value.code == Code.INVALID_ARGUMENT


def test_page_size_has_a_default_and_a_maximum() -> None:
    assert [page_size_of(0), page_size_of(1), page_size_of(10_000)] == [1_000, 1, 10_000]
    for size in (-1, 10_001):
        with pytest.raises(ServiceError):
            page_size_of(size)


@pytest.mark.parametrize("what", ["an address", "a field of a later version"])
def test_what_a_broker_says_of_itself_is_short_for_each_route_repeats_it(what: str) -> None:
    message = request()
    if what == "an address":
        message.broker.grpc_address = "h" * 1_000_000 + ":8081"
    else:
        later = b"\xaa\x3f" + encode_varint(1_000_000) + bytes(1_000_000)
        message.broker.MergeFromString(later)
    with pytest.raises(ServiceError) as error:
        to_registration(message, 100)
    assert [field for field, _ in error.value.field_violations] == ["broker"]
    assert len(str(error.value)) < 1_000
    message = request(grpc_address=f"{'h' * 253}:8081", remoting_address=f"{'h' * 253}:8082", ha_address=f"{'h' * 253}:8083")
    assert to_registration(message, 100).broker.grpc_address == message.broker.grpc_address
