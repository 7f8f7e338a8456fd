"""The table of methods is the one of the .proto files."""

from __future__ import annotations

from protomq import _methods
from protomq._types import MethodInfo, Permission, PullStatus
from protomq.v1 import (
    admin_service_pb2,
    consumer_service_pb2,
    dead_letter_service_pb2,
    filter_service_pb2,
    group_service_pb2,
    ha_service_pb2,
    membership_service_pb2,
    options_pb2,
    pop_service_pb2,
    pull_service_pb2,
    queue_lock_service_pb2,
    reply_service_pb2,
    route_service_pb2,
    send_service_pb2,
    topic_pb2,
    track_service_pb2,
    transaction_service_pb2,
)

FILES = (
    admin_service_pb2,
    consumer_service_pb2,
    dead_letter_service_pb2,
    filter_service_pb2,
    group_service_pb2,
    ha_service_pb2,
    membership_service_pb2,
    pop_service_pb2,
    pull_service_pb2,
    queue_lock_service_pb2,
    reply_service_pb2,
    route_service_pb2,
    send_service_pb2,
    track_service_pb2,
    transaction_service_pb2,
)


def described_methods() -> dict[str, MethodInfo]:
    found = {}
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            lane = service.GetOptions().Extensions[options_pb2.lane]
            for method in service.methods:
                options = method.GetOptions().Extensions
                method_id = options[options_pb2.remoting].method_id
                path = f"/{service.full_name}/{method.name}"
                found[path] = MethodInfo(path, method_id, options[options_pb2.method_lane] or lane)
    return found


def test_methods_are_those_of_the_descriptors() -> None:
    described = described_methods()
    table = [value for value in vars(_methods).values() if isinstance(value, MethodInfo)]
    assert len(table) >= 17
    for method in table:
        assert described[method.path] == method


def test_enums_are_those_of_the_descriptors() -> None:
    assert {f"PULL_STATUS_{status.name}": status.value for status in PullStatus} == dict(
        pull_service_pb2.PullStatus.items()
    )
    assert {f"PERMISSION_{permission.name}": permission.value for permission in Permission} == dict(
        topic_pb2.Permission.items()
    )


def test_a_change_that_an_operator_orders_goes_over_no_connection_that_may_be_closed() -> None:
    table = [value for value in vars(_methods).values() if isinstance(value, MethodInfo) and value.lane == _methods.LANE_ADMIN]
    changes = {method.path: method.method_id for method in table if method.method_id not in _methods.REPEATABLE}
    assert len(changes) >= 7
    assert [path for path, method_id in changes.items() if method_id not in _methods.LOOKED_AT_FIRST] == []
