"""Routes and Admin against name servers and brokers on real sockets."""

from __future__ import annotations

import http.server
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from protomq import Admin, ConsumerGroup, Permission
from protomq import _methods as methods
from protomq._async_routes import AsyncRoutes
from protomq._async_transport import AsyncTransport
from protomq._routes import Routes
from protomq._transport import SyncTransport
from protomq.errors import (
    BrokerNotFoundError,
    ClosedError,
    ConfigurationError,
    ConnectFailedError,
    GroupInUseError,
    GroupNotFoundError,
    InvalidArgumentError,
    NoRouteError,
    NotPermittedError,
    PartialResultError,
    TopicNotFoundError,
)
from protomq.wire.record import encode_front
from protomq.wire.status import RpcStatus
from tests.support.fake_server import FakeGrpcFront, FakeServer
from tests.support.waiting import wait_for


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer({"t": 2}) as made:
        yield made


@pytest.fixture
def transport() -> Iterator[SyncTransport]:
    with SyncTransport() as made:
        yield made


def dead_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_route_is_looked_up_once(server: FakeServer, transport: SyncTransport) -> None:
    routes = Routes(transport, server.address)
    route = routes.get("t")
    assert [queue.queue_id for queue in route.write_queues] == [0, 1]
    assert route.brokers["broker-a"].remoting_address == server.address
    assert routes.get("t") is route
    assert server.called(methods.GET_ROUTE) == 1
    assert routes.brokers()[0].broker_name == "broker-a"


def test_an_old_route_is_refreshed_behind_the_callers_back(
    server: FakeServer, transport: SyncTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protomq._routes.ROUTE_FRESH_S", 0.0)
    routes = Routes(transport, server.address)
    first = routes.get("t")
    server.topics["t"] = 3
    assert routes.get("t") is first
    wait_for(lambda: routes.last_known("t") is not first)
    assert len(routes.get("t").read_queues) == 3


def test_a_caller_in_a_hurry_gets_the_known_route_at_once(
    server: FakeServer, transport: SyncTransport
) -> None:
    routes = Routes(transport, server.address)
    route = routes.get("t")
    server.topics["t"] = 4
    routes.invalidate("t")
    assert routes.current("t") is route
    wait_for(lambda: routes.current("t") is not route)
    assert len(routes.current("t").read_queues) == 4
    assert len(Routes(transport, server.address).current("t").read_queues) == 4


def test_after_a_routing_error_the_next_caller_waits_for_the_look_up(
    server: FakeServer, transport: SyncTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protomq._routes.INVALIDATE_INTERVAL_S", 0.0)
    routes = Routes(transport, server.address)
    routes.get("t")
    server.topics["t"] = 5
    routes.invalidate("t")
    assert len(routes.get("t").read_queues) == 5


def test_a_dead_name_server_is_passed_over(server: FakeServer, transport: SyncTransport) -> None:
    routes = Routes(transport, [dead_address(), server.address, dead_address()])
    for topic in ("t", "t2", "t3"):
        server.topics[topic] = 1
        routes.get(topic)
    assert routes.name_servers.in_order()[0].grpc_address == server.address


async def test_a_server_that_is_no_name_server_is_said_to_be_none(
    server: FakeServer, transport: SyncTransport
) -> None:
    server.fail(methods.GET_ROUTE, RpcStatus(12, "no", "UNKNOWN_METHOD"), 2)
    with pytest.raises(ConfigurationError, match=f"{server.address} is no name server"):
        Routes(transport, server.address).get("t")
    async with AsyncTransport() as async_transport:
        with pytest.raises(ConfigurationError, match=f"{server.address} is no name server"):
            await AsyncRoutes(async_transport, server.address).get("t")


def test_a_restarted_name_server_that_knows_nothing_yet_is_not_believed(
    server: FakeServer, transport: SyncTransport
) -> None:
    with FakeServer({}) as empty:
        assert Routes(transport, [empty.address, server.address]).get("t").read_queues
        with pytest.raises(TopicNotFoundError):
            Routes(transport, [empty.address, server.address]).get("unknown")


def test_the_last_known_route_is_used_while_all_are_down(
    server: FakeServer, transport: SyncTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protomq._routes.INVALIDATE_INTERVAL_S", 0.0)
    routes = Routes(transport, server.address)
    route = routes.get("t")
    server.stop()
    routes.invalidate("t")
    assert routes.get("t") is route
    with pytest.raises(NoRouteError):
        routes.get("other")


def test_what_no_other_name_server_will_answer_better_is_raised_at_once(
    server: FakeServer, transport: SyncTransport
) -> None:
    server.fail(methods.GET_ROUTE, RpcStatus(3, "bad name", "INVALID_ARGUMENT"))
    with pytest.raises(InvalidArgumentError, match="bad name"):
        Routes(transport, [server.address, dead_address()]).get("t")


def test_a_name_server_may_be_given_by_its_grpc_port(
    server: FakeServer, transport: SyncTransport
) -> None:
    with FakeGrpcFront(server) as front:
        assert Routes(transport, front.address).get("t").read_queues
        transport.close()


def test_a_url_may_list_the_name_servers(server: FakeServer, transport: SyncTransport) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"{dead};{server.address}\n".encode())

        def log_message(self, *_: object) -> None:
            return

    dead = dead_address()
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as site:
        thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        routes = Routes(transport, f"http://127.0.0.1:{site.server_port}/namesrv")
        assert routes.get("t").read_queues
        site.shutdown()
        thread.join()
    assert {address.grpc_address for address in routes.name_servers.in_order()} == {
        dead,
        server.address,
    }
    assert not routes.name_servers.needs_reading(time.monotonic() + 60)
    assert routes.name_servers.needs_reading(time.monotonic() + 121)


async def test_async_routes(server: FakeServer) -> None:
    async with AsyncTransport() as transport:
        routes = AsyncRoutes(transport, [dead_address(), server.address])
        assert routes.cached("t") is None
        route = await routes.get("t")
        assert routes.cached("t") is route
        assert (await routes.brokers())[0].broker_name == "broker-a"
        with pytest.raises(TopicNotFoundError):
            await routes.get("unknown")
        server.stop()
        routes.invalidate("t")
        assert await routes.get("t") is route
        with pytest.raises(NoRouteError):
            await routes.get("other")
        await routes.close()


# -- Admin ---------------------------------------------------------------------------------------------------------------


def test_topics_are_created_described_listed_and_deleted(server: FakeServer) -> None:
    with Admin(namesrv=server.address) as admin:
        configs = admin.create_topic("new", write_queues=3)
        assert configs["broker-a"].write_queues == 3
        assert configs["broker-a"].permission is Permission.READ_WRITE
        assert admin.list_topic_names() == ["new", "t"]
        assert [config.name for config in admin.list_topics()["broker-a"]] == ["new", "t"]
        server.append("new", 1, [b"a", b"b"])
        described = admin.describe_topic("new")
        assert described.message_count == 2
        assert [status.offsets.end_offset for status in described.queues] == [0, 2, 0]
        assert admin.delete_topic("new") == ["broker-a"]
        with pytest.raises(TopicNotFoundError):
            admin.describe_topic("new")
        with pytest.raises(TopicNotFoundError):
            admin.delete_topic("new")


def test_many_topics_come_page_by_page(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protomq._routes.PAGE_SIZE", 3)
    server.topics = {f"t{i}": 1 for i in range(8)}
    with Admin(namesrv=server.address) as admin:
        assert admin.list_topic_names() == [f"t{i}" for i in range(8)]
    assert server.called(methods.LIST_TOPIC_NAMES) == 3


def test_groups_come_page_by_page_with_their_topics(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protomq._admin_calls.PAGE_SIZE", 2)
    server.topics = {"t": 1, "u": 1}
    server.committed = {("a", "u", 0): 1, ("a", "t", 0): 3, ("b", "t", 0): 2, ("c", "u", 0): 1}
    with Admin(namesrv=server.address) as admin:
        assert admin.list_groups() == [
            ConsumerGroup("a", ("t", "u")),
            ConsumerGroup("b", ("t",)),
            ConsumerGroup("c", ("u",)),
        ]
        assert server.called(methods.LIST_GROUPS) == 2
        assert [group.name for group in admin.list_groups("u")] == ["a", "c"]
        with pytest.raises(TopicNotFoundError):
            admin.list_groups("none")


def test_groups_are_deleted(server: FakeServer) -> None:
    server.topics = {"t": 1}
    server.committed = {("a", "t", 0): 3, ("b", "t", 0): 2}
    server.groups_in_use = {"b"}
    with Admin(namesrv=server.address) as admin:
        assert admin.delete_group("a") == ["broker-a"]
        with pytest.raises(GroupNotFoundError, match="at any broker"):
            admin.delete_group("a")
        with pytest.raises(GroupInUseError) as caught:
            admin.delete_group("b")
        assert caught.value.metadata == {"consumer_group": "b", "member": "m"}
        assert admin.delete_group("b", force=True, brokers=["broker-a"]) == ["broker-a"]
        assert admin.list_groups() == []


def test_brokers_are_shown(server: FakeServer) -> None:
    server.append("t", 0, [b"x"])
    with Admin(namesrv=server.address) as admin:
        assert [broker.broker_name for broker in admin.cluster_info()] == ["broker-a"]
        assert [status.broker_name for status in admin.broker_status()] == ["broker-a"]
        assert [(stats.topic, stats.records_in) for stats in admin.stats()] == [("t", 1)]
        assert 0 < admin.ping("broker-a") < 60
        assert admin.transport("broker-a") == "remoting"
        with pytest.raises(BrokerNotFoundError):
            admin.broker_status("other")
        with pytest.raises(ConfigurationError):
            admin.create_topic("x", brokers="broker-a")


def test_a_broker_that_is_down_does_not_hide_what_the_others_say(server: FakeServer) -> None:
    server.append("t", 0, [b"x"], key="k", front=encode_front(["k"]))
    server.committed = {("g", "t", 0): 1}
    gone = server.as_broker()
    gone.broker_name, gone.remoting_address = "broker-b", "127.0.0.1:1"
    server.brokers = [server.as_broker(), gone]
    calls: dict[str, Callable[[Admin], Any]] = {
        "list_topics": lambda admin: admin.list_topics(),
        "describe_topic": lambda admin: admin.describe_topic("t"),
        "list_groups": lambda admin: admin.list_groups(),
        "broker_status": lambda admin: admin.broker_status(),
        "stats": lambda admin: admin.stats(),
        "query_by_key": lambda admin: admin.query_by_key("t", "k"),
        "create_topic": lambda admin: admin.create_topic("new"),
        "delete_topic": lambda admin: admin.delete_topic("new"),
        "delete_group": lambda admin: admin.delete_group("g"),
    }
    with Admin(namesrv=server.address) as admin:
        parts: dict[str, Any] = {}
        errors: list[PartialResultError] = []
        for name, call in calls.items():
            with pytest.raises(PartialResultError, match="broker-b: ") as caught:
                call(admin)
            assert list(caught.value.failures) == ["broker-b"]
            assert isinstance(caught.value.failures["broker-b"], ConnectFailedError)
            parts[name] = caught.value.result
            errors.append(caught.value)
        assert list(parts["list_topics"]) == ["broker-a"]
        assert parts["describe_topic"].message_count == 1
        assert parts["list_groups"] == [ConsumerGroup("g", ("t",))]
        assert [status.broker_name for status in parts["broker_status"]] == ["broker-a"]
        assert [stats.topic for stats in parts["stats"]] == ["t"]
        assert [message.body for message in parts["query_by_key"]] == [b"x"]
        assert list(parts["create_topic"]) == parts["delete_topic"] == parts["delete_group"] == ["broker-a"]
        # Found is found, whoever else might be asked; and nobody knows whether the other has the topic.
        message_id = parts["query_by_key"][0].message_id
        assert admin.query_by_id("t", message_id) is not None
        with pytest.raises(ConnectFailedError):
            admin.describe_topic("unknown")
        server.brokers = [gone]
        with pytest.raises(ConnectFailedError):
            admin.list_topics()
    assert pickle.loads(pickle.dumps(errors[0])).failures.keys() == {"broker-b"}


def test_messages_are_found_by_key(server: FakeServer) -> None:
    server.append("t", 1, [b"1", b"2"], key="k", front=encode_front(["k"]))
    with Admin(namesrv=server.address) as admin:
        found = admin.query_by_key(
            "t", "k", begin=datetime(2020, 1, 1, tzinfo=UTC), end=datetime(2030, 1, 1, tzinfo=UTC)
        )
        assert [(message.body, message.queue_id, message.queue_offset) for message in found] == [
            (b"2", 1, 1),
            (b"1", 1, 0),
        ]
        assert admin.query_by_key("t", "other") == []


def test_admin_errors(server: FakeServer) -> None:
    server.fail(methods.CREATE_TOPIC, RpcStatus(7, "no", "NOT_PERMITTED"))
    admin = Admin(namesrv=server.address)
    with pytest.raises(NotPermittedError):
        admin.create_topic("x")
    admin.close()
    with pytest.raises(ClosedError):
        admin.cluster_info()
