"""Makes a slave refuse all calls that change state. It does so in the dispatch table, so that no service can forget it.

This module lists the methods that a slave answers. It refuses all others with NOT_MASTER, also methods that are added later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from protomq_runtime.dispatch import Style
from protomq_runtime.errors import Code, ServiceError

if TYPE_CHECKING:
    from protomq_runtime.call import Call
    from protomq_runtime.dispatch import DispatchTable

BEHIND_RETRY_DELAY_MS: Final = 500

SERVED: Final = frozenset(
    f"/protomq.v1.{name}"
    for name in (
        "PullService/Pull",
        "ConsumerService/GetOffsets",
        "ConsumerService/GetQueueRange",
        "ConsumerService/SearchOffset",
        "ConsumerService/GetLag",
        "AdminService/Ping",
        "AdminService/DescribeTopic",
        "AdminService/ListTopics",
        "AdminService/ListGroups",
        "AdminService/GetBrokerStatus",
        "AdminService/GetStats",
        "AdminService/QueryMessages",
        "GroupService/GetGroup",
        "GroupService/ListGroupSettings",
        "DeadLetterService/ListDeadLetters",
        # Modules are files of each broker, in no log: a slave has to have them before it leads.
        "FilterService/DeployFilter",
        "FilterService/ListFilters",
        "FilterService/DeleteFilter",
        "FilterService/GetFilter",
        # Members are in memory, not in the log: while the master is away they find each other here.
        "MembershipService/HoldMembership",
        "MembershipService/LeaveGroup",
        "MembershipService/ListMembers",
        "MembershipService/DescribeMember",
        "TrackService/TrackMessage",
        "HaService/GetHaStatus",
        "LogService/ReadLog",
        "HaService/OrderLead",
        "HaService/ForgetMember",
    )
)
"""Paths of the methods that change nothing in the log."""


def not_master(broker_name: str, broker_id: int) -> ServiceError:
    """FAILED_PRECONDITION: a slave changes nothing."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "NOT_MASTER",
        f"this is slave {broker_id} of {broker_name}, which changes nothing: ask the master, which the route has",
        metadata={"broker_name": broker_name, "broker_id": str(broker_id)},
    )


def leads_another_epoch(broker_name: str, broker_id: int, epoch: int, asked_epoch: int) -> ServiceError:
    """FAILED_PRECONDITION: a slave has asked for the master of another election than the one in which this broker leads."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "NOT_MASTER",
        f"this broker has epoch {epoch} of {broker_name}, not {asked_epoch}: ask the master of that epoch, which the route has",
        metadata={"broker_name": broker_name, "broker_id": str(broker_id)},
    )


def master_is_elected(broker_name: str, broker_id: int) -> ServiceError:
    """FAILED_PRECONDITION: a slave with a fixed role has asked to follow a broker whose name elects its master."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "NOT_MASTER",
        f"the brokers of {broker_name} elect their master, and the slave that asks has no etcd setting: its role is fixed. Give it the same"
        " etcd setting as the others, and broker_role SYNC_MASTER",
        metadata={"broker_name": broker_name, "broker_id": str(broker_id)},
    )


def check_not_behind(topic: str, queue_id: int, queue_offset: int, end_offset: int) -> None:
    """Raises ServiceError for an offset that this slave, or a master that has just begun, may not serve yet. Such an offset is not illegal.
    """
    if queue_offset > end_offset:
        raise replica_behind(topic, queue_id, queue_offset, end_offset)


def replica_behind(topic: str, queue_id: int, queue_offset: int, end_offset: int) -> ServiceError:
    """UNAVAILABLE: the queue ends before that offset, as far as this broker may serve it yet."""
    return ServiceError(
        Code.UNAVAILABLE,
        "REPLICA_BEHIND",
        f"this broker may give queue {queue_id} of {topic!r} up to offset {end_offset}, and {queue_offset} was asked for: ask again later, "
        "or the master",
        metadata={
            "topic": topic,
            "queue_id": str(queue_id),
            "queue_offset": str(queue_offset),
            "end_offset": str(end_offset),
        },
        retry_delay_ms=BEHIND_RETRY_DELAY_MS,
    )


def refuse_changes(table: DispatchTable, error: ServiceError) -> None:
    """Makes all methods of the table but SERVED fail with the error. Call it before the server starts."""

    def refuse(call: Call) -> None:
        call.fail(error)

    for bound in table:
        if bound.method.path not in SERVED:
            assert bound.style is not Style.STREAMING, "a broker has no streams"
            bound.style, bound.function = Style.RAW, refuse
