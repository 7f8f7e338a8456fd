"""How replication stands: what masters and slaves say of each other."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from . import _methods
from ._late_imports import fork_waits
from .errors import (
    BrokerNotFoundError,
    InvalidArgumentError,
    ProtomqError,
    RequestTimeoutError,
    TransportError,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message as PbMessage

    from ._admin_calls import AdminCalls
    from ._admin_values import BrokerInfo
    from ._types import MethodInfo

_T = TypeVar("_T", bound="PbMessage")

_LEADING: Final = "LEADING"
_LOOK_INTERVAL_S: Final = 0.05


class BrokerRole(IntEnum):
    """What a broker is (RocketMQ: BrokerRole)."""

    ASYNC_MASTER = 1
    SYNC_MASTER = 2
    SLAVE = 3


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A slave as its master sees it.

    `in_sync`: it keeps up, and its session lasts. `lag_bytes`: of the log that it has not. `silence_ms`: since it said something.
    """

    broker_id: int
    address: str
    in_sync: bool
    written_position: int
    flushed_position: int
    lag_bytes: int
    silence_ms: int


@dataclass(frozen=True, slots=True)
class KnownMember:
    """The broker of a member, as etcd has it. `member`: its store there. `broker_id`: while it follows. `address`: its remoting port."""

    member: str
    broker_id: int
    address: str


@dataclass(frozen=True, slots=True)
class LeadershipStatus:
    """What a broker knows of who leads, where that is decided in etcd.

    `member`: its own store there. `state`: FOLLOWING, STOPPING, RUNNING, OPENING, LEADING or HANDING_OVER. `epoch`: of the last election.
    `master`: the member that leads, "" if none does. `in_sync`: members of which one leads next. `problems`: what an operator should know.
    `broker_id`: its id while it follows; 0 from a broker of an earlier version. `known`: members that are in the in-sync set, or were, and
    were neither forgotten nor replaced by another store. `late`: of a master, members of the in-sync set that do not follow it now, or do
    not keep up; sends wait for them. `etcd_problem`: why nobody can take over, join or leave the set now, "" if that can be. Both are
    empty from a broker of an earlier version.
    """

    member: str
    state: str
    epoch: int
    master: str
    in_sync: tuple[str, ...]
    problems: tuple[str, ...]
    broker_id: int = 0
    known: tuple[KnownMember, ...] = ()
    late: tuple[str, ...] = ()
    etcd_problem: str = ""


@dataclass(frozen=True, slots=True)
class HaStatus:
    """How replication stands at one broker.

    Of a master: `replicas`, `in_sync_count` (copies that keep up now, its own among them). Under SYNC_MASTER also how many a send waits for
    and needs at least. Of a slave: `master_address`, where the master's log ended when it last answered, and how long ago that was
    (None: it never has). `problem` says why a slave does not follow now, or why a master takes no sends; "" if it does. `leadership`: None
    where roles are fixed. `away`: members of this name that this broker knows of, and that have no status of their own: they do not answer.
    """

    broker_name: str
    broker_id: int
    role: BrokerRole
    epoch: int
    first_position: int
    end_position: int
    flushed_position: int
    confirmed_position: int
    replicas: tuple[ReplicaStatus, ...]
    in_sync_count: int
    in_sync_replicas: int
    min_in_sync_replicas: int
    master_address: str
    master_end_position: int
    master_silence_ms: int | None
    problem: str
    leadership: LeadershipStatus | None = None
    away: tuple[KnownMember, ...] = ()

    @property
    def lag_bytes(self) -> int:
        """Of a slave: what it has not of the master's log. Of a master: what its slowest slave has not. One that is away, and in the
        in-sync set still, counts.
        """
        if self.role is BrokerRole.SLAVE:
            return max(self.master_end_position - self.end_position, 0)
        lag_bytes = max((replica.lag_bytes for replica in self.replicas), default=0)
        if self.leadership is not None and self.leadership.late:
            # Who follows nobody is no replica. It has what is confirmed, as all members of the set.
            lag_bytes = max(lag_bytes, self.end_position - self.confirmed_position)
        return lag_bytes


def ha_status(
    admin: AdminCalls, broker_name: str | None
) -> tuple[list[HaStatus], dict[str, ProtomqError]]:
    """Of all brokers by name and id, or of those with a name; what went wrong.

    By `name/id`, or by name if no master of it is registered.
    """
    brokers, missing = admin._brokers(None if broker_name is None else (broker_name,))
    states, failures = states_of(admin, brokers)
    return states, failures | admin._without_master(brokers) | {gone.broker.broker_name: gone.error for gone in missing}


def states_of(admin: AdminCalls, brokers: Sequence[BrokerInfo]) -> tuple[list[HaStatus], dict[str, ProtomqError]]:
    """Of these brokers, by name and id; what went wrong, by `name/id`."""
    with fork_waits:
        from .v1 import ha_service_pb2 as pb

    found: list[HaStatus] = []
    failures: dict[str, ProtomqError] = {}

    def ask(broker: BrokerInfo) -> pb.GetHaStatusResponse:
        return admin._call(broker.address, _methods.GET_HA_STATUS, pb.GetHaStatusRequest(), pb.GetHaStatusResponse)

    for broker, said in zip(brokers, admin._side_by_side([partial(ask, broker) for broker in brokers]), strict=True):
        try:
            answer = said()
        except ProtomqError as error:
            if isinstance(error, TransportError):
                error.metadata = {**error.metadata, "broker_name": broker.broker_name}
            failures[f"{broker.broker_name}/{broker.broker_id}"] = error
            continue
        found.append(_status(answer))
    found = [replace(each, away=_away(each, found)) for each in found]
    return sorted(found, key=lambda each: (each.broker_name, each.broker_id)), failures


def _away(state: HaStatus, found: list[HaStatus]) -> tuple[KnownMember, ...]:
    """Of the members that this broker knows, those that are not among `found`. A broker with an emptied folder is another member."""
    if state.leadership is None:
        return ()
    there = [each.leadership for each in found if each.broker_name == state.broker_name and each.leadership is not None]
    members = {each.member for each in there}
    broker_ids = {each.broker_id for each in there}
    return tuple(each for each in state.leadership.known if each.member not in members and each.broker_id not in broker_ids)


def order_lead(
    admin: AdminCalls, broker_name: str, broker_id: int | None, *, is_unclean: bool
) -> tuple[int, str] | None:
    """Leaves the order at a broker of the name. `broker_id`: as `ha_status` has it of the one that is to lead; None: the master chooses.

    Returns the epoch before it, and the order that it has replaced; None: that one leads already, and a switch is not ordered.
    """
    with fork_waits:
        from .v1 import ha_service_pb2 as pb

    brokers = admin._brokers_named(broker_name)
    states, failures = states_of(admin, brokers)
    target = next((each for each in states if each.broker_id == broker_id), None)
    if target is None and broker_id is not None:
        # A master is registered with the id 0, and has this one while it follows.
        leaders = (each for each in states if each.leadership is not None and each.leadership.state == _LEADING)
        target = next((each for each in leaders if each.leadership is not None and each.leadership.broker_id == broker_id), None)
    if target is None and (broker_id is not None or not states):
        raise _no_target(broker_name, broker_id, states, failures)
    if target is not None and target.leadership is not None and target.leadership.state == _LEADING and not is_unclean:
        return None
    # Each of them hands the order on to etcd; the one that is to lead does so itself.
    asked_id = target.broker_id if target is not None else states[0].broker_id
    address = next(each.address for each in brokers if each.broker_id == asked_id)
    request = pb.OrderLeadRequest(
        broker_name=broker_name,
        kind=pb.ORDER_KIND_PROMOTE_UNCLEAN if is_unclean else pb.ORDER_KIND_SWITCH,
        member=target.leadership.member if target is not None and target.leadership else "",
    )
    replaced = admin._call(address, _methods.ORDER_LEAD, request, pb.OrderLeadResponse).replaced_order
    return max((each.leadership.epoch for each in states if each.leadership is not None), default=0), replaced


def _no_target(
    broker_name: str, broker_id: int | None, states: list[HaStatus], failures: dict[str, ProtomqError]
) -> ProtomqError:
    """Why the broker that is to lead cannot be asked. One that does not answer is the reason only if it is that one, or if none does."""
    failure = failures.get(f"{broker_name}/{broker_id}") or (None if states else next(iter(failures.values()), None))
    if failure is not None:
        return failure
    if not states:
        return BrokerNotFoundError(f"no broker of that name is registered: {broker_name}")
    ids = {each.broker_id for each in states} | {int(label.rpartition("/")[2]) for label in failures}
    # A master is registered with the id 0, and may be named by the one that it has while it follows.
    ids |= {each.leadership.broker_id for each in states if each.leadership is not None}
    known = [str(each) for each in sorted(ids)]
    away = next((each for state in states for each in state.away if each.broker_id == broker_id), None)
    why = f"does not answer: it was at {away.address} last" if away is not None else f"is not registered, only {', '.join(known)}"
    metadata = {"broker_name": broker_name, "broker_id": str(broker_id), "broker_ids": ",".join(known)}
    return BrokerNotFoundError(f"broker_id {broker_id} of {broker_name} {why}", metadata=metadata)


def forget_member(admin: AdminCalls, broker_name: str, broker_id: int) -> None:
    """Asks the brokers of the name in turn, until one of them has had etcd forget that one."""
    with fork_waits:
        from .v1 import ha_service_pb2 as pb

    request = pb.ForgetMemberRequest(broker_name=broker_name, broker_id=broker_id)
    _ask_any(admin, broker_name, _methods.FORGET_MEMBER, request, pb.ForgetMemberResponse)


def withdraw_order(admin: AdminCalls, broker_name: str) -> str:
    """Asks the brokers of the name in turn, until one of them has taken the order out of etcd. Returns which one; "": none stood."""
    with fork_waits:
        from .v1 import ha_service_pb2 as pb

    # So that a try whose answer was lost can be told from none.
    request_id = secrets.token_hex(16)
    request = pb.OrderLeadRequest(broker_name=broker_name, kind=pb.ORDER_KIND_WITHDRAW, request_id=request_id)
    return _ask_any(admin, broker_name, _methods.ORDER_LEAD, request, pb.OrderLeadResponse).replaced_order


def _ask_any(admin: AdminCalls, broker_name: str, method: MethodInfo, request: Any, answer_class: type[_T]) -> _T:
    """What the first broker of the name says that answers: each of them does it in etcd."""
    failure: ProtomqError = BrokerNotFoundError(f"no broker of that name is registered: {broker_name}")
    # The master is the likeliest to answer.
    for broker in sorted(admin._brokers_named(broker_name), key=lambda each: each.broker_id):
        try:
            return admin._call(broker.address, method, request, answer_class)
        except (TransportError, InvalidArgumentError) as error:  # One of an earlier version does not know all that is asked.
            failure = error
    raise failure


def wait_for_lead(admin: AdminCalls, broker_name: str, after_epoch: int, timeout_s: float) -> None:
    """Waits until the broker that name servers have as the master leads in a later epoch: then it takes all calls.

    Raises RequestTimeoutError.
    """
    with fork_waits:
        from .v1 import ha_service_pb2 as pb

    give_up_s = time.monotonic() + timeout_s
    while True:
        with suppress(ProtomqError):  # stores are being opened again
            for broker in admin._brokers_named(broker_name):
                if broker.broker_id:
                    continue
                said = admin._call(broker.address, _methods.GET_HA_STATUS, pb.GetHaStatusRequest(), pb.GetHaStatusResponse).leadership
                if said.state == _LEADING and said.epoch > after_epoch:
                    return
        if time.monotonic() >= give_up_s:
            late = RequestTimeoutError(f"nobody else leads {broker_name} after {timeout_s:g} s; `ha_status` tells who is in sync")
            late.metadata = {"order": "left"}  # A call to leave it that got no answer is another thing.
            raise late
        time.sleep(_LOOK_INTERVAL_S)


def _leadership(answer: Any) -> LeadershipStatus | None:
    if not answer.HasField("leadership"):
        return None
    found = answer.leadership
    return LeadershipStatus(
        found.member,
        found.state,
        found.epoch,
        found.master,
        tuple(found.in_sync),
        tuple(found.problems),
        found.broker_id,
        tuple(KnownMember(each.member, each.broker_id, each.address) for each in found.known),
        tuple(found.late),
        found.etcd_problem,
    )


def _status(answer: Any) -> HaStatus:
    silence_ms = answer.master_silence_ms if answer.HasField("master_silence_ms") else None
    return HaStatus(
        answer.broker_name,
        answer.broker_id,
        BrokerRole(answer.role),
        answer.epoch,
        answer.first_position,
        answer.end_position,
        answer.flushed_position,
        answer.confirmed_position,
        tuple(
            ReplicaStatus(
                each.broker_id,
                each.address,
                each.in_sync,
                each.written_position,
                each.flushed_position,
                each.lag_bytes,
                each.silence_ms,
            )
            for each in answer.replicas
        ),
        answer.in_sync_count,
        answer.in_sync_replicas,
        answer.min_in_sync_replicas,
        answer.master_address,
        answer.master_end_position,
        silence_ms,
        answer.problem,
        _leadership(answer),
    )
