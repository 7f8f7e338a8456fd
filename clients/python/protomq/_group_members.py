"""The members of consumer groups, as brokers list them for operators, and as they say themselves. Used by Admin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _methods
from ._checks import NONCE_MAX, check_count, check_flag, check_group, check_text
from ._late_imports import fork_waits
from ._types import MessageQueue
from .errors import MemberUnknownError, ProtomqError, RequestTimeoutError

if TYPE_CHECKING:
    from ._admin_calls import AdminCalls
    from .v1 import membership_service_pb2 as pb


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


@dataclass(frozen=True, slots=True)
class MemberQueue:
    """A queue of a member, as it says itself.

    `position`: offset of the message that the program gets next, `committed_offset`: the last one that was committed; None: not known, or
    none. `open_count`: messages that are with the member and not done. `is_paused`: nothing of it is handed out now.
    """

    queue: MessageQueue
    position: int | None
    committed_offset: int | None
    open_count: int
    is_paused: bool


@dataclass(frozen=True, slots=True)
class MemberReport:
    """The state of a member of a group, as it reports it (RocketMQ: consumerRunningInfo, jstack).

    `kind`: of client, "PushConsumer" and so on; `version`: of the library, the language and the system. `settings`: for people. `counts`:
    for a push consumer those of PushCounts and the number of runs. `rates`: by how much a count grows in a second, as a mean of its last
    minute. `stacks`: name and calls of each thread and task, if they were asked for. `is_cut`: something was left out, for there was too
    much.
    """

    kind: str
    version: str
    running_s: float
    settings: dict[str, str]
    counts: dict[str, int]
    rates: dict[str, float]
    queues: tuple[MemberQueue, ...]
    stacks: tuple[tuple[str, str], ...]
    is_cut: bool


def describe_member(
    admin: AdminCalls, group: str, client_id: str, nonce: int, stacks: bool, timeout_s: float
) -> MemberReport:
    """Asks the brokers in turn, until the member has answered one."""
    with fork_waits:
        from .v1 import membership_service_pb2 as pb

    check_group(group)
    check_text("client_id", client_id)
    check_flag("stacks", stacks)
    check_count("nonce", nonce, 0, NONCE_MAX)
    found: list[pb.MemberDescription] = []
    silent: list[str] = []
    unknown: list[MemberUnknownError] = []
    # The answer of a broker whose member is silent is to come in time.
    wait_ms = min(max(int(timeout_s * 800), 1), 30_000)

    def ask(broker: Any) -> None:
        if found:
            return
        request = pb.DescribeMemberRequest(
            consumer_group=group, client_id=client_id, nonce=nonce, wants_stacks=stacks, wait_ms=wait_ms
        )
        try:
            answer = admin._call(
                broker.address, _methods.DESCRIBE_MEMBER, request, pb.DescribeMemberResponse
            )
        except MemberUnknownError as error:
            unknown.append(error)
            return
        if answer.HasField("description"):
            found.append(answer.description)
        else:
            silent.append(broker.broker_name)

    failures = admin._ask_each(None, ask, slave_stands_in=True)
    if found:
        return _report(found[0])
    if silent:
        raise RequestTimeoutError(
            f"{client_id} did not answer within {wait_ms / 1000:.3g} s. It is stopped, its event loop is blocked, or its version "
            "does not know the question",
            metadata={"consumer_group": group, "client_id": client_id},
        )
    raise next(iter((*failures.values(), *unknown)))


def _report(said: pb.MemberDescription) -> MemberReport:
    return MemberReport(
        kind=said.kind,
        version=said.version,
        running_s=said.running_ms / 1000,
        settings=dict(sorted(said.settings.items())),
        counts=dict(said.counts),
        rates=dict(said.rates),
        queues=tuple(
            MemberQueue(
                MessageQueue(one.topic, one.broker_name, one.queue_id),
                None if one.position < 0 else one.position,
                None if one.committed_offset < 0 else one.committed_offset,
                one.open_messages,
                one.is_paused,
            )
            for one in said.queues
        ),
        stacks=tuple((one.name, one.text) for one in said.stacks),
        is_cut=said.is_cut,
    )


def group_members(
    admin: AdminCalls, group: str, brokers: Iterable[str] | None
) -> tuple[list[GroupMemberInfo], dict[str, ProtomqError]]:
    """Members over all brokers, by name, and the failures by broker."""
    with fork_waits:
        from .v1 import membership_service_pb2 as pb

    check_group(group)
    found: dict[tuple[str, int], list[tuple[str, pb.ListedMember]]] = {}

    def ask(broker: Any) -> pb.ListMembersResponse:
        request = pb.ListMembersRequest(consumer_group=group)
        return admin._call(broker.address, _methods.LIST_MEMBERS, request, pb.ListMembersResponse)

    answers, failures = admin._answers(brokers, ask, slave_stands_in=True)
    for broker, answer in answers:
        for listed in answer.members:
            key = (listed.member.client_id, listed.member.nonce)
            found.setdefault(key, []).append((broker.broker_name, listed))
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
