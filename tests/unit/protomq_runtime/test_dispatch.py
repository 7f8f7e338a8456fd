from collections.abc import AsyncIterator

import pytest

from protomq.v1 import admin_service_pb2, pull_service_pb2, route_service_pb2, send_service_pb2
from protomq_runtime.dispatch import DispatchTable, Style, drained, raw, snake_case, streaming

SEND = send_service_pb2.DESCRIPTOR.services_by_name["SendService"]
PULL = pull_service_pb2.DESCRIPTOR.services_by_name["PullService"]
ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
ROUTE = route_service_pb2.DESCRIPTOR.services_by_name["RouteService"]


class SendImplementation:
    @drained
    def send(self, calls):
        pass

    @raw
    def recall_message(self, call):
        pass


class PullImplementation:
    @raw
    def pull(self, call):
        pass


def route_implementation(**changes):
    async def watch(self, request, context) -> AsyncIterator[object]:
        yield None

    def plain(self, request, context):
        return None

    names = (
        "register_broker",
        "unregister_broker",
        "heartbeat",
        "get_route",
        "hold_registration",
        "list_topic_names",
    )
    members = {
        **dict.fromkeys(names, plain),
        "get_cluster_info": plain,
        "forget_broker": plain,
        "watch_route": streaming(watch),
        **changes,
    }
    return type(
        "RouteImplementation", (), {name: member for name, member in members.items() if member}
    )()


def test_methods_are_found_by_number_and_by_path():
    table = DispatchTable()
    table.add_service(SEND, SendImplementation())
    table.add_service(PULL, PullImplementation())
    send = table.by_path["/protomq.v1.SendService/Send"]
    assert table.by_id == {
        0x0201: send,
        0x0202: table.by_path["/protomq.v1.SendService/RecallMessage"],
        0x0301: table.by_path["/protomq.v1.PullService/Pull"],
    }
    assert send.style is Style.DRAINED
    assert send.method.lane == "send"
    assert send.method.request_class is send_service_pb2.SendRequest
    assert table.lane_names == ["send", "pull"]
    assert table.service_names == ["protomq.v1.SendService", "protomq.v1.PullService"]


def test_a_stream_has_no_number():
    table = DispatchTable()
    table.add_service(ROUTE, route_implementation())
    bound = table.by_path["/protomq.v1.RouteService/WatchRoute"]
    assert bound.style is Style.STREAMING
    assert bound not in table.by_id.values()
    assert len(table.by_id) == len(table.by_path) - 1


def test_a_missing_rpc_is_an_error_at_start_up():
    with pytest.raises(
        TypeError, match=r"create_topic, which /protomq\.v1\.AdminService/CreateTopic needs"
    ):
        DispatchTable().add_service(ADMIN, SendImplementation())


def test_a_stream_needs_its_decorator():
    with pytest.raises(TypeError, match="watch_route"):
        DispatchTable().add_service(
            ROUTE, route_implementation(watch_route=lambda self, request, context: None)
        )


def test_a_stream_is_an_async_generator():
    @streaming
    async def watch(self, request, context):
        return None

    with pytest.raises(TypeError, match="async generator"):
        DispatchTable().add_service(ROUTE, route_implementation(watch_route=watch))


def test_a_method_on_a_lane_is_not_async():
    async def get_route(self, request, context):
        return None

    with pytest.raises(TypeError, match="not async"):
        DispatchTable().add_service(ROUTE, route_implementation(get_route=get_route))


def test_a_service_is_added_once():
    table = DispatchTable()
    table.add_service(SEND, SendImplementation())
    with pytest.raises(ValueError, match="added before"):
        table.add_service(SEND, SendImplementation())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Send", "send"),
        ("GetRoute", "get_route"),
        ("ListTopicNames", "list_topic_names"),
        ("GetHAStatus", "get_ha_status"),
    ],
)
def test_names_become_snake_case(name, expected):
    assert snake_case(name) == expected
