"""The members of consumer groups, as brokers list them for operators. Used by Admin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _methods
from ._checks import check_group
from ._late_imports import fork_waits
from ._types import MessageQueue
from .errors import ProtomqError

if TYPE_CHECKING:
    from ._group_admin import AsksBrokers


@dataclass(frozen=True, slots=True)
class GroupMemberInfo:
    """A member of a consumer group, as the brokers know it.

    `filters` has the topics that it consumes, each with its filter for people ("" for all messages); `queues` what it has of them.
    `member_s`: how long it has been there; `silent_s`: since it was last heard of, 0 while it holds a call at a broker. `brokers`: those
    that know it. `nonce` tells members of one name apart.
    """

    client_id: str
    nonce: int
    peer: str
    filters: dict[str, str]
    queues: tuple[MessageQueue, ...]
    allocation: str
    machine_room: str
    client_version: str
    member_s: float
    silent_s: float
    brokers: tuple[str, ...]


def group_members(
    admin: AsksBrokers, group: str, brokers: Iterable[str] | None
) -> tuple[list[GroupMemberInfo], dict[str, ProtomqError]]:
    """Members over all brokers, by name, and the failures by broker."""
    with fork_waits:
        from .v1 import membership_service_pb2 as pb

    check_group(group)
    found: dict[tuple[str, int], list[tuple[str, pb.ListedMember]]] = {}

    def ask(broker: Any) -> None:
        request = pb.ListMembersRequest(consumer_group=group)
        answer = admin._call(
            broker.address, _methods.LIST_MEMBERS, request, pb.ListMembersResponse
        )
        for listed in answer.members:
            key = (listed.member.client_id, listed.member.nonce)
            found.setdefault(key, []).append((broker.broker_name, listed))

    failures = admin._ask_each(brokers, ask)
    return [_joined(sorted(found[key], key=lambda one: one[0])) for key in sorted(found)], failures


def _joined(seen: list[tuple[str, Any]]) -> GroupMemberInfo:
    """What all brokers say of one member."""
    first = seen[0][1]
    return GroupMemberInfo(
        client_id=first.member.client_id,
        nonce=first.member.nonce,
        peer=first.peer,
        filters={topic.topic: topic.filter for _, listed in seen for topic in listed.member.topics},
        queues=tuple(
            sorted(
                MessageQueue(topic.topic, broker_name, queue_id)
                for broker_name, listed in seen
                for topic in listed.member.topics
                for queue_id in topic.queue_ids
            )
        ),
        allocation=first.member.allocation,
        machine_room=first.member.machine_room,
        client_version=first.member.client_version,
        member_s=max(listed.member_ms for _, listed in seen) / 1000,
        silent_s=min(listed.silent_ms for _, listed in seen) / 1000,
        brokers=tuple(broker_name for broker_name, _ in seen),
    )
