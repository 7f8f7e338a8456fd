"""A broker in the same process registers without a socket."""

from __future__ import annotations

import pytest

from protomq.v1.route_service_pb2 import (
    Broker,
    HeartbeatRequest,
    HoldRegistrationRequest,
    RegisterBrokerRequest,
    UnregisterBrokerRequest,
)
from protomq.v1.topic_pb2 import DataVersion, Topic
from protomq_broker.name_server_connections import NameServerConnection
from protomq_namesrv.config import LimitsConfig, LivenessConfig
from protomq_namesrv.direct_connection import DirectConnection
from protomq_namesrv.route_snapshot import BrokerKey
from protomq_namesrv.route_table import RouteTable
from protomq_runtime.errors import ServiceError


class StillClock:
    def now_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> int:
        return 0

    def monotonic(self) -> float:
        return 0.0


VERSION = DataVersion(counter=1)
BROKER = Broker(cluster="c", broker_name="b", grpc_address="h:1", incarnation=1)


def connection_to(table: RouteTable) -> NameServerConnection:
    return DirectConnection(table, LivenessConfig(), LimitsConfig(), StillClock())


def test_broker_is_in_the_table_when_the_call_returns() -> None:
    table = RouteTable()
    connection = connection_to(table)
    request = RegisterBrokerRequest(broker=BROKER, data_version=VERSION, topics=[Topic(name="t")])
    assert connection.register_broker(request).expiry_ms == 120_000
    assert table.snapshot.encoded_route("t") is not None
    connection.unregister_broker(UnregisterBrokerRequest(broker_name="b", incarnation=1))
    assert table.snapshot.encoded_route("t") is None


def test_heartbeat_and_errors_are_those_of_the_service() -> None:
    connection = connection_to(RouteTable())
    heartbeat = HeartbeatRequest(broker_name="b", incarnation=1, data_version=VERSION)
    assert connection.heartbeat(heartbeat).register_again
    connection.register_broker(RegisterBrokerRequest(broker=BROKER, data_version=VERSION))
    assert not connection.heartbeat(heartbeat).register_again
    with pytest.raises(ServiceError, match="INVALID_ARGUMENT"):
        connection.register_broker(RegisterBrokerRequest())


def test_wait_ends_when_woken_and_never_by_the_hold() -> None:
    connection = connection_to(RouteTable())
    connection.open_hold(HoldRegistrationRequest(broker_name="b"))
    connection.wake()
    assert not connection.wait(60)
    assert not connection.wait(0)
    connection.close()


def test_a_broker_hears_of_others_that_have_its_topics_until_it_is_closed() -> None:
    table = RouteTable()
    connection = connection_to(table)
    topics = [Topic(name="t")]
    assert connection.register_broker(RegisterBrokerRequest(broker=BROKER, data_version=VERSION, topics=topics)).tells_routes
    other = Broker(cluster="c", broker_name="other", grpc_address="h:2", incarnation=1)
    connection_to(table).register_broker(RegisterBrokerRequest(broker=other, data_version=VERSION, topics=topics))
    assert not connection.wait(60)
    assert connection.take_changed_topics() == ["t"]
    assert connection.take_changed_topics() == []
    connection.close()
    assert len(table.on_changed_topics) == 1


def test_who_loses_its_name_to_a_broker_in_this_process_hears_of_it_at_once() -> None:
    """It would take sends until its hold ends by itself."""
    table = RouteTable()
    key = BrokerKey("b", 0)
    newcomer = Broker(cluster="c", broker_name="b", grpc_address="h:2", incarnation=2, store_id=2)
    connection_to(table).register_broker(RegisterBrokerRequest(broker=newcomer, data_version=VERSION))
    table.open_hold(key, 2, 0, store_id=2)
    told: list[BrokerKey] = []
    table.on_doubt = told.append
    back = Broker(cluster="c", broker_name="b", grpc_address="h:1", incarnation=1, store_id=1)
    connection_to(table).register_broker(RegisterBrokerRequest(broker=back, data_version=VERSION, returning=True))
    assert told == [key]


def test_a_refusal_has_the_time_of_the_wall_clock() -> None:
    class WallClock(StillClock):
        def now_ms(self) -> int:
            return 1_700_000_000_000

    table = RouteTable()
    first = RegisterBrokerRequest(broker=Broker(cluster="c", broker_name="b", grpc_address="h:1", incarnation=1, store_id=1))
    second = RegisterBrokerRequest(broker=Broker(cluster="c", broker_name="b", grpc_address="h:2", incarnation=1, store_id=2))
    connection_to(table).register_broker(first)
    with pytest.raises(ServiceError, match="NAME_TAKEN"):
        DirectConnection(table, LivenessConfig(), LimitsConfig(), WallClock()).register_broker(second)
    (refused,) = table.refusals.all(0)
    assert refused.refused_time.ToMilliseconds() == 1_700_000_000_000
