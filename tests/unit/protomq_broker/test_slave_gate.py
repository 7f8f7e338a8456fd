"""Which methods a slave answers: each method of a broker's services is listed here, as served or as refused."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import protomq.v1
from protomq_broker.slave_gate import not_master, refuse_changes
from protomq_runtime.dispatch import DispatchTable, raw
from protomq_runtime.testing import FakeCall, FakeServer

SERVED = {
    "AdminService": {
        "DescribeTopic", "GetBrokerStatus", "GetStats", "ListGroups", "ListTopics", "Ping", "QueryMessages",
    },
    "ConsumerService": {"GetLag", "GetOffsets", "GetQueueRange", "SearchOffset"},
    "DeadLetterService": {"ListDeadLetters"},
    "FilterService": {"DeleteFilter", "DeployFilter", "GetFilter", "ListFilters"},
    "GroupService": {"GetGroup", "ListGroupSettings"},
    "HaService": {"ForgetMember", "GetHaStatus", "OrderLead"},
    "LogService": {"ReadLog"},
    "MembershipService": {"DescribeMember", "HoldMembership", "LeaveGroup", "ListMembers"},
    "PullService": {"Pull"},
    "TrackService": {"TrackMessage"},
}  # fmt: skip
REFUSED = {
    "AdminService": {"CreateTopic", "DeleteGroup", "DeleteTopic"},
    "ConsumerService": {"CloneOffsets", "CommitOffsets", "ResetOffsets"},
    "DeadLetterService": {"ReplayDeadLetters"},
    "GroupService": {"CreateRetryTopic", "PutGroup", "SendBack"},
    "HaService": {"Acknowledge", "CompareLog", "Fetch"},
    "PopService": {"Ack", "ChangeInvisible", "GiveUpPop", "Pop"},
    "QueueLockService": {"ListQueueLocks", "LockQueues", "UnlockQueues"},
    "ReplyService": {"Reply", "WaitForReplies"},
    "SendService": {"RecallMessage", "Send"},
    "TransactionService": {"EndTransaction", "ListTransactions", "WaitForChecks"},
}
OF_NAME_SERVERS = "RouteService"


def services() -> dict[str, Any]:
    """The descriptors of all services that a broker has."""
    names = [module.name for module in pkgutil.iter_modules(protomq.v1.__path__) if module.name.endswith("_service_pb2")]
    found = {
        name: descriptor
        for module in names
        for name, descriptor in import_module(f"protomq.v1.{module}").DESCRIPTOR.services_by_name.items()
    }
    assert found.pop(OF_NAME_SERVERS)
    return found


class Everything:
    """Implements all methods of any service: each answers."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        @raw
        def answers(call: FakeCall) -> None:
            call.answer(b"served")

        return answers


def test_a_slave_serves_what_changes_nothing_and_refuses_all_other_methods() -> None:
    table = DispatchTable()
    for descriptor in services().values():
        table.add_service(descriptor, Everything())
    refuse_changes(table, not_master("b", 3))
    server = FakeServer(table)
    served: dict[str, set[str]] = {}
    refused: dict[str, set[str]] = {}
    for bound in table:
        call = server.call(bound.method.path, b"")
        service, name = bound.method.path.removeprefix("/protomq.v1.").split("/")
        if call.error is None:
            served.setdefault(service, set()).add(name)
        else:
            assert call.error.reason == "NOT_MASTER"
            refused.setdefault(service, set()).add(name)
    assert served == SERVED
    assert refused == REFUSED
