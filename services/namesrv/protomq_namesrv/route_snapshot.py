"""What a name server serves: an immutable picture of all registrations.

Rules
- Any thread may read it; nothing is ever changed but caches, and those hold what each thread would compute alike.
- For one broker name, the registered process with the lowest id speaks for the topics. Without a master (id 0) they can be read
  only: slaves take no sends.
- What clients may do is what both the topic and the broker allow.
- A topic that nobody has gets the route that would come into being on the first send, from the brokers that create topics by
  themselves. Only these answers are not kept: their number is the callers' choice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from protomq.v1.route_service_pb2 import (
    Broker,
    GetClusterInfoResponse,
    GetRouteResponse,
    MissingBroker,
    QueueRoute,
    Route,
)
from protomq.v1.topic_pb2 import Permission
from protomq.wire.topics import rules_of

MASTER_ID: Final = 0

_READ: Final = 1
_WRITE: Final = 2
_BITS_OF: Final[Mapping[int, int]] = {
    Permission.PERMISSION_UNSPECIFIED: _READ | _WRITE,
    Permission.PERMISSION_NONE: 0,
    Permission.PERMISSION_READ: _READ,
    Permission.PERMISSION_WRITE: _WRITE,
    Permission.PERMISSION_READ_WRITE: _READ | _WRITE,
}
_PERMISSION_OF: Final[Mapping[int, Permission.ValueType]] = {
    0: Permission.PERMISSION_NONE,
    _READ: Permission.PERMISSION_READ,
    _WRITE: Permission.PERMISSION_WRITE,
    _READ | _WRITE: Permission.PERMISSION_READ_WRITE,
}


class BrokerKey(NamedTuple):
    """A broker process. Names are unique over all clusters, as routes name brokers by nothing else."""

    broker_name: str
    broker_id: int


class Version(NamedTuple):
    """A DataVersion that compares: the number of changes counts, the time breaks ties."""

    counter: int
    time_ms: int


class TopicShare(NamedTuple):
    """What one broker has of a topic."""

    write_queues: int
    read_queues: int
    permission: Permission.ValueType


@dataclass(frozen=True, slots=True)
class Registration:
    """What a broker last said of itself. `broker` must not be changed by anybody."""

    broker: Broker
    version: Version
    topics: Mapping[str, TopicShare]

    @property
    def key(self) -> BrokerKey:
        return BrokerKey(self.broker.broker_name, self.broker.broker_id)


@dataclass(frozen=True, slots=True)
class Missing:
    """A broker that was removed. `removed_time_ms`: by the wall clock."""

    registration: Registration
    removed_time_ms: int
    cause: str


class RouteSnapshot:
    """All registrations at one moment, with the answers to GetRoute, serialised when they are first asked for."""

    def __init__(
        self,
        registrations: Iterable[Registration] = (),
        missing: Iterable[Missing] = (),
        former_masters: Iterable[Registration] = (),
    ) -> None:
        """`former_masters`: those of names that have only slaves now."""
        self._registrations: dict[BrokerKey, Registration] = {}
        for registration in sorted(registrations, key=lambda registration: registration.key):
            self._registrations[registration.key] = registration
        speakers: dict[str, Registration] = {}
        for registration in self._registrations.values():
            speakers.setdefault(registration.broker.broker_name, registration)
        self._speakers: Sequence[Registration] = tuple(speakers.values())
        self._missing = sorted(missing, key=lambda gone: gone.registration.key)
        self._former_masters = tuple(former_masters)
        self._encoded_routes: dict[str, bytes] = {}

    @property
    def registrations(self) -> Mapping[BrokerKey, Registration]:
        """By broker name and id."""
        return self._registrations

    @cached_property
    def topic_names(self) -> Sequence[str]:
        """Of all brokers, in order."""
        return sorted({name for speaker in self._speakers for name in speaker.topics})

    def missing(self, topic: str = "") -> Sequence[Missing]:
        """The brokers that were removed, by name; `topic`: those of them that had it."""
        return [gone for gone in self._missing if not topic or topic in gone.registration.topics]

    def names_away(self, topic: str) -> Sequence[str]:
        """Names of brokers that had a topic: all of a name are gone, or its master is, and no slave has registered the topic yet."""
        gone = (missing.registration for missing in self.missing(topic))
        former = (master for master in self._former_masters if topic in master.topics)
        return sorted({registration.key.broker_name for registration in (*gone, *former)})

    def cluster_info(self, topic: str = "") -> GetClusterInfoResponse:
        """All brokers; `topic`: of those that are missing only the ones that had it."""
        brokers = sorted(
            (registration.broker for registration in self._registrations.values()),
            key=lambda broker: (broker.cluster, broker.broker_name, broker.broker_id),
        )
        answer = GetClusterInfoResponse(brokers=brokers)
        for gone in self.missing(topic):
            entry = MissingBroker(broker=gone.registration.broker, cause=gone.cause)
            entry.removed_time.FromMilliseconds(gone.removed_time_ms)
            answer.missing_brokers.append(entry)
        return answer

    def encoded_route(self, topic: str) -> bytes | None:
        """Serialised GetRouteResponse of a topic that a broker has; None if none has it."""
        encoded = self._encoded_routes.get(topic)
        if encoded is None:
            route = self.route(topic)
            if not route.queues:
                return None
            encoded = GetRouteResponse(route=route).SerializeToString()
            self._encoded_routes[topic] = encoded
        return encoded

    def route(self, topic: str) -> Route:
        """The route of a topic; without queues and brokers if no broker has it."""
        queues = []
        for speaker in self._speakers:
            share = speaker.topics.get(topic)
            if share is not None:
                queues.append(_queue_route(speaker.broker, share))
        return Route(topic=topic, queues=queues, brokers=self._brokers_named(queues))

    def auto_create_route(self, topic: str) -> Route | None:
        """The route that the first send to `topic` would make; None if no broker creates topics."""
        queues = []
        for speaker in self._speakers:
            broker = speaker.broker
            count = broker.auto_create_queues
            if broker.broker_id == MASTER_ID and count > 0 and _BITS_OF[broker.permission] & _WRITE:
                share = TopicShare(count, count, Permission.PERMISSION_READ_WRITE)
                queues.append(_queue_route(broker, share))
        if not queues:
            return None
        return Route(
            topic=topic, queues=queues, brokers=self._brokers_named(queues), auto_create=True
        )

    @cached_property
    def listed_names(self) -> Sequence[str]:
        """Of the topics that are listed unless others are asked for."""
        return [name for name in self.topic_names if rules_of(name).list]

    def topic_page(
        self, after: str, count: int, *, group_topics: bool = False
    ) -> tuple[Sequence[str], str]:
        """At most `count` names behind the name `after` ("" = from the first), and the name to go on behind ("" = that was all)."""
        names = self.topic_names if group_topics else self.listed_names
        start = bisect_right(names, after) if after else 0
        page = names[start : start + count]
        return page, page[-1] if start + count < len(names) else ""

    def _brokers_named(self, queues: Sequence[QueueRoute]) -> list[Broker]:
        names = {queue.broker_name for queue in queues}
        return [
            registration.broker
            for key, registration in self._registrations.items()
            if key.broker_name in names
        ]


def _queue_route(broker: Broker, share: TopicShare) -> QueueRoute:
    bits = _BITS_OF[share.permission] & _BITS_OF[broker.permission]
    if broker.broker_id != MASTER_ID:
        bits &= _READ
    return QueueRoute(
        broker_name=broker.broker_name,
        write_queues=share.write_queues,
        read_queues=share.read_queues,
        permission=_PERMISSION_OF[bits],
    )
