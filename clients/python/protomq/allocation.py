"""Strategies by which the members of a group share queues: RocketMQ's six, as pure functions of the same lists everywhere.

    PullConsumer("readers", allocation=Circle())

Each member computes its own share. So all have to use the same strategy with the same settings, and lists in the same order.
Queues are ordered by broker name and queue id, members by name. The results are those of the Java classes
(tests/unit/protomq/allocation_vectors).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ._checks import check_count, check_message_queue, checked_texts
from ._types import MessageQueue
from .errors import ConfigurationError, WrongTypeError

__all__ = [
    "Allocation",
    "Average",
    "Circle",
    "Configured",
    "ConsistentHash",
    "GroupMember",
    "MachineRoom",
    "MachineRoomNear",
]


class GroupMember(NamedTuple):
    """A member, as strategies see it."""

    name: str
    """Unique among the members."""
    machine_room: str = ""
    """The machine room that the member has named (`machine_room`)."""


class Allocation(Protocol):
    """A strategy."""

    @property
    def name(self) -> str:
        """The strategy's name with all settings that matter. Members compare it to find a member that shares in another way."""

    def share(
        self, member: GroupMember, queues: Sequence[MessageQueue], members: Sequence[GroupMember]
    ) -> list[MessageQueue]:
        """Returns the queues of a topic that `member` gets; none if it is not one of `members`."""


@dataclass(frozen=True, slots=True)
class Average:
    """Each member gets a run of neighbouring queues (AllocateMessageQueueAveragely). The default."""

    @property
    def name(self) -> str:
        """See Allocation."""
        return "average"

    def share(
        self, member: GroupMember, queues: Sequence[MessageQueue], members: Sequence[GroupMember]
    ) -> list[MessageQueue]:
        """See Allocation."""
        if member not in members:
            return []
        index = members.index(member)
        size, more = divmod(len(queues), len(members))
        begin = index * size + min(index, more)
        return list(queues[begin : begin + size + (index < more)])


@dataclass(frozen=True, slots=True)
class Circle:
    """Members take queues in turn (AllocateMessageQueueAveragelyByCircle)."""

    @property
    def name(self) -> str:
        """See Allocation."""
        return "circle"

    def share(
        self, member: GroupMember, queues: Sequence[MessageQueue], members: Sequence[GroupMember]
    ) -> list[MessageQueue]:
        """See Allocation."""
        if member not in members:
            return []
        return list(queues[members.index(member) :: len(members)])


@dataclass(frozen=True, slots=True)
class Configured:
    """This member gets these queues, whichever other members there are (AllocateMessageQueueByConfig)."""

    queues: tuple[MessageQueue, ...]

    def __post_init__(self) -> None:
        given: object = self.queues
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise WrongTypeError(f"queues is a tuple of MessageQueue, not {given!r}")
        for queue in given:
            check_message_queue(queue)

    @property
    def name(self) -> str:
        """See Allocation."""
        return "configuration"

    def share(
        self, member: GroupMember, queues: Sequence[MessageQueue], members: Sequence[GroupMember]
    ) -> list[MessageQueue]:
        """See Allocation. In a group, only the queues that the topic has."""
        has = set(queues)
        return [queue for queue in self.queues if queue in has]


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """All members share the queues of brokers in these machine rooms (AllocateMessageQueueByMachineRoom).

    The name of a broker begins with its room: "room@name". Nobody gets queues of brokers in other rooms.
    """

    rooms: frozenset[str]

    def __post_init__(self) -> None:
        checked_texts("rooms", self.rooms)

    @property
    def name(self) -> str:
        """See Allocation."""
        return f"machine-room {','.join(sorted(self.rooms))}"

    def share(
        self, member: GroupMember, queues: Sequence[MessageQueue], members: Sequence[GroupMember]
    ) -> list[MessageQueue]:
        """See Allocation."""
        if member not in members:
            return []
        here = [queue for queue in queues if self._is_here(queue)]
        index = members.index(member)
        size, more = divmod(len(here), len(members))
        share = here[size * index : size * (index + 1)]
        if index < more:
            share.append(here[index + size * len(members)])
        return share

    def _is_here(self, queue: MessageQueue) -> bool:
        parts = queue.broker_name.split("@")
        return len(parts) == 2 and parts[0] in self.rooms


def room_of_broker_name(queue: MessageQueue) -> str:
    """Returns the room at the start of a broker's name: "room" of "room@name"; the whole name if it has no @."""
    return queue.broker_name.split("@")[0]


@dataclass(frozen=True, slots=True)
class MachineRoomNear:
    """Members get queues of their own machine room; all share those of rooms without a member (AllocateMachineRoomNearby).

    `inner` shares out the queues of a room. A member names its room (`machine_room`); `room_of` returns the room of a queue's broker.
    Raises ConfigurationError for a queue or a member without a room.
    """

    inner: Allocation = Average()
    room_of: Callable[[MessageQueue], str] = room_of_broker_name

    @property
    def name(self) -> str:
        """See Allocation."""
        return f"machine-room-near {self.inner.name}"

    def share(
        self, member: GroupMember, queues: Sequence[MessageQueue], members: Sequence[GroupMember]
    ) -> list[MessageQueue]:
        """See Allocation."""
        if member not in members:
            return []
        queues_of: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            queues_of.setdefault(_checked(self.room_of(queue), queue), []).append(queue)
        members_of: dict[str, list[GroupMember]] = {}
        for other in members:
            members_of.setdefault(_checked(other.machine_room, other.name), []).append(other)
        own = queues_of.pop(member.machine_room, [])
        share = [*self.inner.share(member, own, members_of[member.machine_room])]  # Another one's list is left as it is.
        for room in sorted(queues_of.keys() - members_of.keys()):
            share += self.inner.share(member, queues_of[room], members)
        return share


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """A member that comes or goes moves few queues (AllocateMessageQueueConsistentHash).

    Members stand at `virtual_nodes` places of a ring; a queue goes to the next one. Places are the first four octets of an MD5.
    """

    virtual_nodes: int = 10

    def __post_init__(self) -> None:
        check_count("virtual_nodes", self.virtual_nodes, 1)

    @property
    def name(self) -> str:
        """See Allocation."""
        return f"consistent-hash {self.virtual_nodes}"

    def share(
        self, member: GroupMember, queues: Sequence[MessageQueue], members: Sequence[GroupMember]
    ) -> list[MessageQueue]:
        """See Allocation."""
        if member not in members:
            return []
        ring = {
            _place(f"{other.name}-{i}"): other for other in members for i in range(self.virtual_nodes)
        }
        places = sorted(ring)
        return [queue for queue in queues if _owner(queue, ring, places) == member]


def _owner(
    queue: MessageQueue, ring: Mapping[int, GroupMember], places: Sequence[int]
) -> GroupMember:
    topic, broker_name, queue_id = queue
    place = _place(f"MessageQueue [topic={topic}, brokerName={broker_name}, queueId={queue_id}]")
    return ring[places[bisect_left(places, place) % len(places)]]


def _place(text: str) -> int:
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


def _checked(room: str, of: object) -> str:
    if not room:
        raise ConfigurationError(f"{of} has no machine room: say machine_room, or use another allocation")
    return room
