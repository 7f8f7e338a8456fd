"""A name server as a process: both transports, brokers that vanish, name servers that vanish."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from protomq import Admin
from protomq._name_servers import NameServerList
from protomq.errors import BrokerNotFoundError
from protomq.testing import Broker as StartedBroker
from protomq.v1 import options_pb2, route_service_pb2
from protomq.v1.route_service_pb2 import (
    Broker,
    ForgetBrokerRequest,
    ForgetBrokerResponse,
    GetClusterInfoRequest,
    GetClusterInfoResponse,
    GetRouteRequest,
    GetRouteResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    HoldRegistrationRequest,
    HoldRegistrationResponse,
    ListTopicNamesRequest,
    ListTopicNamesResponse,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
    WatchRouteRequest,
    WatchRouteResponse,
)
from protomq.v1.topic_pb2 import DataVersion, Permission, Topic
from protomq.wire.status import GRPC_STATUS_DETAILS_KEY, RpcStatus, decode_status
from protomq_broker.name_server_connections import (
    GrpcConnection,
    RemotingConnection,
    connect,
    remote_name_server,
)
from protomq_broker.registration import BrokerRegistration, BrokerTopics
from protomq_runtime.addresses import Address
from protomq_runtime.clock import SystemClock
from protomq_runtime.errors import ServiceError
from protomq_runtime.remoting_client import RemotingClient
from tests.support.namesrv import Namesrv, running_namesrv
from tests.support.waiting import PATIENCE_S

SERVICE = route_service_pb2.DESCRIPTOR.services_by_name["RouteService"]
HOLD_S = 30

NUMBERS = itertools.count()
"""For names: an unregistered incarnation does not come back."""

Transport = Callable[[str, Message], Any]


@pytest.fixture(scope="module")
def namesrv() -> Iterator[Namesrv]:
    with running_namesrv() as server:
        yield server


@pytest.fixture(scope="module")
def channel(namesrv: Namesrv) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(str(namesrv.grpc)) as channel:
        yield channel


@pytest.fixture(params=["grpc", "remoting"])
def call(
    request: pytest.FixtureRequest, namesrv: Namesrv, channel: grpc.Channel
) -> Iterator[Transport]:
    """A function that calls a unary method over one of the transports; errors are ServiceErrors."""
    if request.param == "grpc":
        yield lambda method, message: call_by_grpc(channel, method, message)
    else:
        with RemotingClient(namesrv.remoting, options_pb2.LANE_ROUTE, "test") as client:
            yield lambda method, message: call_by_remoting(client, method, message)


def call_by_grpc(channel: grpc.Channel, method: str, message: Message) -> Any:
    response_class = getattr(route_service_pb2, f"{method}Response")
    function: Any = channel.unary_unary(
        f"/{SERVICE.full_name}/{method}",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=response_class.FromString,
    )
    try:
        return function(message, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        metadata: Any = error.trailing_metadata()
        status = decode_status(dict(metadata)[GRPC_STATUS_DETAILS_KEY])
        seen = (error.code().value[0], error.details())
    assert seen == (status.code, status.message), "gRPC's own status says the same"
    raise to_error(status)


def call_by_remoting(client: RemotingClient, method: str, message: Message) -> Any:
    response_class = getattr(route_service_pb2, f"{method}Response")
    return response_class.FromString(
        client.call(method_id_of(method), message.SerializeToString(), PATIENCE_S)
    )


def method_id_of(method: str) -> int:
    method_id: int = (
        SERVICE.methods_by_name[method].GetOptions().Extensions[options_pb2.remoting].method_id
    )
    return method_id


def to_error(status: RpcStatus) -> ServiceError:
    return ServiceError(
        status.code,
        status.reason,
        status.message,
        metadata=status.metadata,
        field_violations=status.field_violations,
    )


def broker_named(name: str, **fields: Any) -> Broker:
    return Broker(
        cluster="c", broker_name=name, grpc_address=f"{name}:8081", incarnation=1, **fields
    )


def identity(name: str) -> dict[str, Any]:
    return {"cluster": "c", "broker_name": name, "incarnation": 1}


def brokers_of(channel: grpc.Channel) -> set[str]:
    response = call_by_grpc(channel, "GetClusterInfo", GetClusterInfoRequest())
    return {broker.broker_name for broker in response.brokers}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < PATIENCE_S, what
        time.sleep(0.02)


@pytest.mark.slow
def test_every_unary_method_answers_over_both_transports(call: Transport) -> None:
    unary = {method.name for method in SERVICE.methods if not method.server_streaming}
    called = set()
    name = f"unary_{next(NUMBERS)}"

    def checked(method: str, message: Message) -> Any:
        called.add(method)
        return call(method, message)

    version = DataVersion(counter=3)
    broker = broker_named(name, auto_create_queues=2)
    register = RegisterBrokerRequest(
        broker=broker, data_version=version, topics=[Topic(name="unary_topic")]
    )
    try:
        assert checked("RegisterBroker", register) == RegisterBrokerResponse(expiry_ms=120_000, tells_routes=True)
        heartbeat = HeartbeatRequest(data_version=version, **identity(name))
        assert checked("Heartbeat", heartbeat) == HeartbeatResponse()
        heartbeat.data_version.counter = 4
        assert checked("Heartbeat", heartbeat) == HeartbeatResponse(register_again=True)

        broker.permission = Permission.PERMISSION_READ_WRITE
        route = checked("GetRoute", GetRouteRequest(topic="unary_topic"))
        assert isinstance(route, GetRouteResponse)
        assert [
            (queue.broker_name, queue.write_queues, queue.read_queues)
            for queue in route.route.queues
        ] == [(name, 8, 8)]
        assert list(route.route.brokers) == [broker]
        unknown = call("GetRoute", GetRouteRequest(topic="not_yet"))
        assert (unknown.route.auto_create, unknown.route.queues[0].write_queues) == (True, 2)

        assert checked("ListTopicNames", ListTopicNamesRequest()) == ListTopicNamesResponse(
            topics=["unary_topic"]
        )
        assert checked("GetClusterInfo", GetClusterInfoRequest()) == GetClusterInfoResponse(
            brokers=[broker]
        )
        hold = checked("HoldRegistration", HoldRegistrationRequest(**identity(name)))
        assert hold == HoldRegistrationResponse()
    finally:
        unregistered = checked("UnregisterBroker", UnregisterBrokerRequest(**identity(name)))
    assert unregistered == UnregisterBrokerResponse()
    (missing,) = call("GetClusterInfo", GetClusterInfoRequest(topic="unary_topic")).missing_brokers
    assert (missing.broker, missing.cause) == (broker, "it was stopped")
    assert call("GetClusterInfo", GetClusterInfoRequest(topic="other")).missing_brokers == []
    assert checked("ForgetBroker", ForgetBrokerRequest(broker_name=name)) == ForgetBrokerResponse()
    assert call("GetClusterInfo", GetClusterInfoRequest()).missing_brokers == []
    assert called == unary


@pytest.mark.parametrize(
    ("method", "request_message", "reason", "fields"),
    [
        ("GetRoute", GetRouteRequest(topic="nobody_has_it"), "TOPIC_NOT_FOUND", []),
        ("GetRoute", GetRouteRequest(topic="../x"), "INVALID_ARGUMENT", ["topic"]),
        (
            "RegisterBroker",
            RegisterBrokerRequest(broker=broker_named("a.b", broker_id=-1)),
            "INVALID_ARGUMENT",
            ["broker.broker_id"],
        ),
        ("Heartbeat", HeartbeatRequest(), "INVALID_ARGUMENT", ["broker_name"]),
        ("HoldRegistration", HoldRegistrationRequest(**identity("nobody")), "BROKER_NOT_FOUND", []),
        ("ForgetBroker", ForgetBrokerRequest(broker_name="nobody"), "BROKER_NOT_FOUND", []),
        ("ForgetBroker", ForgetBrokerRequest(broker_name="../x"), "INVALID_ARGUMENT", ["broker_name"]),
        ("GetClusterInfo", GetClusterInfoRequest(topic="../x"), "INVALID_ARGUMENT", ["topic"]),
        ("ListTopicNames", ListTopicNamesRequest(page_size=-1), "INVALID_ARGUMENT", ["page_size"]),
        ("ListTopicNames", ListTopicNamesRequest(page_token="a b"), "INVALID_ARGUMENT", ["page_token"]),
    ],
)
def test_errors_are_the_same_over_both_transports(
    call: Transport, method: str, request_message: Message, reason: str, fields: list[str]
) -> None:
    with pytest.raises(ServiceError) as error:
        call(method, request_message)
    assert error.value.reason == reason
    assert [field for field, _ in error.value.field_violations] == fields


def test_without_any_broker_a_route_is_refused_with_that_cause(call: Transport) -> None:
    with pytest.raises(ServiceError) as error:
        call("GetRoute", GetRouteRequest(topic="nobody_has_it"))
    assert error.value.message == "no broker is registered, so none has the topic nobody_has_it; start one"
    assert (error.value.reason, error.value.metadata["missing_brokers"]) == ("TOPIC_NOT_FOUND", "")
    assert error.value.metadata["registered_brokers"] == "0"


def test_garbage_is_refused_over_both_transports(namesrv: Namesrv, channel: grpc.Channel) -> None:
    function: Any = channel.unary_unary(f"/{SERVICE.full_name}/GetRoute")
    with pytest.raises(grpc.RpcError) as error:
        function(b"\xff\xff", timeout=PATIENCE_S)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with RemotingClient(namesrv.remoting, options_pb2.LANE_ROUTE, "test") as client:
        with pytest.raises(ServiceError) as refusal:
            client.call(0x0104, b"\xff\xff", PATIENCE_S)
    assert refusal.value.reason == "INVALID_ARGUMENT"


@contextmanager
def registered(
    name: str, *addresses: Address, topics: Callable[[], BrokerTopics] | None = None
) -> Iterator[BrokerRegistration]:
    broker = broker_named(name)
    broker.incarnation = time.time_ns() // 1_000_000
    none = BrokerTopics(DataVersion(), ())
    servers = [remote_name_server(address) for address in addresses]
    registration = BrokerRegistration(broker, topics or (lambda: none), servers, SystemClock())
    registration.start()
    try:
        yield registration
    finally:
        registration.stop()


@pytest.mark.parametrize("port", ["grpc", "remoting"])
def test_broker_finds_out_which_transport_a_port_speaks(namesrv: Namesrv, port: str) -> None:
    connection = connect(getattr(namesrv, port), "test")
    try:
        assert isinstance(connection, GrpcConnection if port == "grpc" else RemotingConnection)
        assert connection.heartbeat(HeartbeatRequest(**identity("nobody"))).register_again
        connection.open_hold(HoldRegistrationRequest(**identity("nobody")))
        with pytest.raises(ServiceError, match="BROKER_NOT_FOUND"):
            wait_until(lambda: connection.wait(PATIENCE_S), "the hold of an unknown broker ends")
    finally:
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("port", ["grpc", "remoting"])
def test_broker_stays_registered_while_it_renews_its_holds(
    namesrv: Namesrv, channel: grpc.Channel, port: str
) -> None:
    name = f"renewing_{port}"
    with registered(name, getattr(namesrv, port)) as registration:
        assert registration.wait_registered(PATIENCE_S)
        # Longer than a hold and its grace.
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            assert name in brokers_of(channel)
            time.sleep(0.05)
    assert name not in brokers_of(channel), "unregistered at the stop"


BROKER_PROCESS = """
import sys, threading, time
from protomq.v1.route_service_pb2 import Broker
from protomq.v1.topic_pb2 import DataVersion
from protomq_broker.name_server_connections import GrpcConnection, RemotingConnection, remote_name_server
from protomq_broker.registration import BrokerRegistration, BrokerTopics
from protomq_runtime.addresses import parse_address
from protomq_runtime.clock import SystemClock

holds = threading.Semaphore(0)
for kind in (GrpcConnection, RemotingConnection):
    def open_hold(connection, request, open_hold=kind.open_hold):
        open_hold(connection, request)
        holds.release()
    kind.open_hold = open_hold

name, address = sys.argv[1:]
broker = Broker(cluster="c", broker_name=name, grpc_address="h:1", incarnation=1)
servers = [remote_name_server(parse_address(address))]
registration = BrokerRegistration(broker, lambda: BrokerTopics(DataVersion(), ()), servers, SystemClock())
registration.start()
assert registration.wait_registered(60)
for _ in range(2):  # The first one was answered then: it had arrived.
    assert holds.acquire(timeout=60)
print("registered", flush=True)
time.sleep(600)
"""


@contextmanager
def broker_process(name: str, address: Address) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", BROKER_PROCESS, name, str(address)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "registered\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("port", ["grpc", "remoting"])
def test_killed_broker_is_gone_within_seconds(
    namesrv: Namesrv, channel: grpc.Channel, port: str
) -> None:
    name = f"killed_{port}"
    with broker_process(name, getattr(namesrv, port)):
        assert name in brokers_of(channel)
    # A registration that nobody renews stays for two minutes.
    wait_until(lambda: name not in brokers_of(channel), "the killed broker is removed")


@pytest.mark.slow
@pytest.mark.parametrize("port", ["grpc", "remoting"])
def test_frozen_broker_is_removed_and_comes_back_by_itself(
    namesrv: Namesrv, channel: grpc.Channel, port: str
) -> None:
    name = f"frozen_{port}"
    with broker_process(name, getattr(namesrv, port)) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: name not in brokers_of(channel), "the silent broker is removed")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: name in brokers_of(channel), "the broker registers again")


@pytest.mark.slow
def test_name_server_that_was_frozen_has_lost_nobody() -> None:
    topics = BrokerTopics(DataVersion(counter=1), (Topic(name="t"),))
    with running_namesrv() as server, grpc.insecure_channel(str(server.grpc)) as channel:
        with registered("a", server.remoting, topics=lambda: topics), registered("b", server.grpc):
            wait_until(lambda: brokers_of(channel) == {"a", "b"}, "both are registered")
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(2.5)  # Longer than a hold and its grace.
            server.process.send_signal(signal.SIGCONT)
            end = time.monotonic() + 1
            while time.monotonic() < end:
                assert brokers_of(channel) == {"a", "b"}
                time.sleep(0.01)


@pytest.mark.slow
def test_broker_that_comes_back_within_the_grace_was_never_away(
    namesrv: Namesrv, channel: grpc.Channel
) -> None:
    version = DataVersion(counter=1)
    register = RegisterBrokerRequest(
        broker=broker_named("blip"), data_version=version, topics=[Topic(name="blip")]
    )
    stream = watch(channel, "blip")
    assert not next(stream).route.queues
    hold_id = method_id_of("HoldRegistration")
    hold = HoldRegistrationRequest(**identity("blip")).SerializeToString()
    with RemotingClient(namesrv.remoting, options_pb2.LANE_ROUTE, "test") as client:
        call_by_remoting(client, "RegisterBroker", register)
        client.start(hold_id, hold, PATIENCE_S)
        assert next(stream).route.queues
    with RemotingClient(namesrv.remoting, options_pb2.LANE_ROUTE, "test") as client:
        for _ in range(4):  # Longer than the grace.
            client.call(hold_id, hold, PATIENCE_S)
        register.data_version.counter += 1
        register.topics[0].write_queues = 3
        call_by_remoting(client, "RegisterBroker", register)
        assert next(stream).route.queues[0].write_queues == 3, "the watcher saw nothing in between"
        call_by_remoting(client, "UnregisterBroker", UnregisterBrokerRequest(**identity("blip")))
    assert not next(stream).route.queues
    stream.cancel()


@pytest.mark.parametrize("route_threads", [1, 3])
def test_a_broker_hears_of_changed_topics_by_its_newest_connection_though_earlier_ones_seem_to_live(
    route_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several lanes take the connections in turn: who changes the topics and who hears of it are on two of them.
    monkeypatch.setenv("PROTOMQ_ROUTE_THREADS", str(route_threads))

    def register(connection: RemotingClient, name: str, counter: int) -> None:
        topics = [Topic(name="half_open", write_queues=counter)]
        call_by_remoting(
            connection,
            "RegisterBroker",
            RegisterBrokerRequest(broker=broker_named(name), data_version=DataVersion(counter=counter), topics=topics),
        )

    hold_id = method_id_of("HoldRegistration")
    hold = HoldRegistrationRequest(**identity("half_open_a")).SerializeToString()
    with (
        running_namesrv(hold=60_000) as namesrv,
        RemotingClient(namesrv.remoting, options_pb2.LANE_ROUTE, "the name server has not noticed that it is gone") as old,
        RemotingClient(namesrv.remoting, options_pb2.LANE_ROUTE, "new") as new,
        RemotingClient(namesrv.remoting, options_pb2.LANE_ROUTE, "other") as other,
    ):
        register(old, "half_open_a", 1)
        for counter in range(1, 4):
            for _ in range(5):
                old.start(hold_id, hold, PATIENCE_S)
            # The answers to this connection's calls come in order: the holds have arrived.
            call_by_remoting(old, "Heartbeat", HeartbeatRequest(**identity("half_open_a")))
            held = new.start(hold_id, hold, PATIENCE_S)
            call_by_remoting(new, "Heartbeat", HeartbeatRequest(**identity("half_open_a")))
            register(other, "half_open_b", counter)
            answer = new.wait([held], PATIENCE_S)
            assert answer is not None
            assert list(HoldRegistrationResponse.FromString(answer.unwrap()).changed_topics) == ["half_open"]


@pytest.mark.slow
def test_who_loses_its_name_to_the_one_that_had_it_before_hears_of_it_at_once() -> None:
    def registration(store_id: int, **fields: Any) -> RegisterBrokerRequest:
        return RegisterBrokerRequest(
            broker=broker_named("twice", store_id=store_id),
            data_version=DataVersion(counter=1),
            **fields,
        )

    hold = HoldRegistrationRequest(**identity("twice"), store_id=2).SerializeToString()
    with (
        running_namesrv(hold=60_000) as server,
        RemotingClient(server.remoting, options_pb2.LANE_ROUTE, "first") as first,
        RemotingClient(server.remoting, options_pb2.LANE_ROUTE, "second") as second,
    ):
        call_by_remoting(second, "RegisterBroker", registration(2))
        held = second.start(method_id_of("HoldRegistration"), hold, 60.0)
        call_by_remoting(first, "RegisterBroker", registration(1, returning=True))
        answer = second.wait([held], PATIENCE_S)
        assert answer is not None
        with pytest.raises(ServiceError) as caught:
            second.call(method_id_of("HoldRegistration"), hold, PATIENCE_S)
    assert caught.value.reason == "NAME_TAKEN"


def watch(channel: grpc.Channel, topic: str) -> Any:
    function = channel.unary_stream(
        f"/{SERVICE.full_name}/WatchRoute",
        request_serializer=WatchRouteRequest.SerializeToString,
        response_deserializer=WatchRouteResponse.FromString,
    )
    return function(WatchRouteRequest(topic=topic), timeout=PATIENCE_S)


def test_watcher_is_told_the_route_now_and_at_each_change_of_it(
    namesrv: Namesrv, channel: grpc.Channel
) -> None:
    topics = BrokerTopics(DataVersion(counter=1), (Topic(name="watched", write_queues=1),))
    stream = watch(channel, "watched")
    first = next(stream).route
    assert (first.topic, list(first.queues)) == ("watched", [])
    with registered("watcher", namesrv.remoting, topics=lambda: topics) as registration:
        assert [queue.write_queues for queue in next(stream).route.queues] == [1]
        topics = BrokerTopics(DataVersion(counter=2), (*topics.topics, Topic(name="another")))
        registration.notify_changed()
        assert registration.wait_announced(PATIENCE_S)
        topics = BrokerTopics(DataVersion(counter=3), (Topic(name="watched", write_queues=2),))
        registration.notify_changed()
        assert [queue.write_queues for queue in next(stream).route.queues] == [2], (
            "another topic's change is not told"
        )
    assert not next(stream).route.queues
    stream.cancel()


def test_watching_an_impossible_topic_is_refused(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as error:
        next(watch(channel, "a/b"))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
def test_name_servers_are_independent_and_a_restarted_one_learns_all_again() -> None:
    topics = BrokerTopics(DataVersion(counter=1), (Topic(name="t"),))
    with running_namesrv() as stays:
        with running_namesrv() as dies:
            again = (dies.grpc.port, dies.remoting.port)
            with registered(
                "both", stays.remoting, dies.remoting, topics=lambda: topics
            ) as registration:
                assert registration.wait_registered(PATIENCE_S)
                dies.process.kill()
                dies.process.wait()
                wait_until(lambda: registration.registered_count() == 1, "the loss is noticed")
                topics = BrokerTopics(DataVersion(counter=2), (Topic(name="t"), Topic(name="u")))
                registration.notify_changed()
                assert registration.wait_announced(PATIENCE_S)
                with grpc.insecure_channel(str(stays.grpc)) as channel:
                    assert topic_names(channel) == ["t", "u"]
                with running_namesrv(*again) as restarted:
                    assert registration.wait_registered(PATIENCE_S)
                    with grpc.insecure_channel(str(restarted.grpc)) as channel:
                        assert topic_names(channel) == ["t", "u"]


@pytest.mark.slow
def test_a_broker_that_one_name_server_does_not_know_yet_is_asked_for_at_others(protomq_server: StartedBroker, protomq_topic: str) -> None:
    with Admin(namesrv=protomq_server.namesrv) as admin:
        (name,) = {broker.broker_name for broker in admin.cluster_info()}
    with running_namesrv() as young:
        young_server, *_ = NameServerList(str(young.remoting)).in_order()
        asked: list[Callable[[Admin], object]] = [
            lambda admin: admin.broker_status(name),
            lambda admin: admin.ha_status(name),
            lambda admin: admin.list_topics(name),
            Admin.cluster_info,
            lambda admin: admin.create_topic(protomq_topic, brokers=[name], update=True),
        ]
        with Admin(namesrv=[str(young.remoting), protomq_server.namesrv]) as admin:
            for ask in asked:
                admin._routes.name_servers.prefer(young_server)
                assert ask(admin)
            with pytest.raises(BrokerNotFoundError, match="no broker of that name is registered: nobody"):
                admin.broker_status("nobody")


def topic_names(channel: grpc.Channel) -> list[str]:
    return list(call_by_grpc(channel, "ListTopicNames", ListTopicNamesRequest()).topics)


@pytest.mark.slow
def test_stop_answers_holds_and_streams_and_exits_with_0() -> None:
    with running_namesrv(hold=HOLD_S * 1000) as server, grpc.insecure_channel(str(server.grpc)) as channel:
        stream = watch(channel, "t")
        next(stream)
        with registered("held", server.remoting) as registration:
            assert registration.wait_registered(PATIENCE_S)
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE_S) == 0
            assert time.monotonic() - start < HOLD_S - 1  # It did not wait for the hold.
        assert list(stream) == [], "the stream ended in order"
