"""Small immutable values that all parts of the SDK share. No imports of grpc, protobuf or numpy here.

Everything in this module may be used from any thread, hashed, compared and pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final, NamedTuple

PEER_TIMEOUT_S: Final = 60.0
"""A server that answers nothing for this time, not even probes, is gone."""


class MessageQueue(NamedTuple):
    """One queue of a topic on one broker."""

    topic: str
    broker_name: str
    queue_id: int


Body = Any
"""bytes, or what a body codec encodes (`body_codecs`)."""


class PoppedQueue(MessageQueue):
    """The queue of a popped message (`message.queue`), and by which hand-out of it the message came.

    Attributes:
        receipt: what acknowledges the message, together with its queue offset.
        attempt: which delivery of the message this is, from 1.
    """

    receipt: bytes
    attempt: int


class DelayLevel(NamedTuple):
    """One of the broker's delay levels, from 1. RocketMQ's by default: `1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h
    2h`."""

    level: int


Delay = timedelta | float | DelayLevel
"""As a timedelta, in seconds, or as a level."""


class Target(NamedTuple):
    """What the messages of one request have in common.

    Attributes:
        queue: None: any.
        delay_field: what of `When` it says; None: they are delivered at once.
    """

    queue: MessageQueue | None
    delay_field: bytes | None = None


class BrokerAddress(NamedTuple):
    """Where a broker or a name server is reached; an address is host:port, "" where there is none."""

    broker_name: str
    grpc_address: str
    remoting_address: str


class Membership(NamedTuple):
    """What a commit names: a member of a group, and which of its memberships at the broker."""

    client_id: str
    nonce: int
    member_epoch: int


class MethodInfo(NamedTuple):
    """A method of a service: its gRPC path, its number in a frame and the number of its lane."""

    path: str
    method_id: int
    lane: int


class Permission(IntEnum):
    """What clients may do with a topic or a broker (protomq.v1.Permission without prefix)."""

    UNSPECIFIED = 0
    NONE = 1
    READ = 2
    WRITE = 3
    READ_WRITE = 4

    def __str__(self) -> str:
        return self.name

    @property
    def readable(self) -> bool:
        """Whether messages may be consumed; UNSPECIFIED stands for the default, read and write."""
        return self in (Permission.UNSPECIFIED, Permission.READ, Permission.READ_WRITE)

    @property
    def writable(self) -> bool:
        """Whether messages may be sent."""
        return self in (Permission.UNSPECIFIED, Permission.WRITE, Permission.READ_WRITE)


class TopicType(IntEnum):
    """Which messages a topic takes (protomq.v1.TopicType without prefix). The type of a message is the first that fits, from the last."""

    UNSPECIFIED = 0
    NORMAL = 1
    """Those that are of no other type."""
    FIFO = 2
    """With a sharding key."""
    DELAY = 3
    """With a delay or a due time."""
    TRANSACTION = 4
    MIXED = 5
    """All."""

    def __str__(self) -> str:
        return self.name


class PullStatus(IntEnum):
    """Outcome of a pull (protomq.v1.PullStatus without prefix)."""

    UNSPECIFIED = 0
    FOUND = 1
    NO_NEW_MSG = 2
    NO_MATCHED_MSG = 3
    OFFSET_ILLEGAL = 4
    OFFSET_RESET = 5
    DIVERGED = 6

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Route:
    """All that a client needs to reach a topic; a snapshot.

    `write_queues` and `read_queues` are in the order of broker name and queue id. `brokers` are by name: the master, or for
    reading the slave of lowest id if no master is known. `auto_create`: the topic does not exist yet, the queues are those that
    the brokers would make on the first send. `writable_brokers`: names of the brokers that have a queue to write.
    `slaves`: by name and broker id. `leaderless_brokers`: names of which only slaves are known now. `is_write_permitted`,
    `is_read_permitted`: not if the permission of the topic or the broker forbids it everywhere. `is_partly_closed`: some brokers
    forbid to write, and others do not. `lone_brokers`: names of masters that were not elected and have no slave: nobody takes their place.
    `elected_brokers`: names of masters that were elected in etcd.
    """

    topic: str
    write_queues: tuple[MessageQueue, ...] = ()
    read_queues: tuple[MessageQueue, ...] = ()
    brokers: Mapping[str, BrokerAddress] = field(default_factory=dict)
    writable_brokers: tuple[str, ...] = ()
    auto_create: bool = False
    leaderless_brokers: tuple[str, ...] = ()
    slaves: Mapping[tuple[str, int], BrokerAddress] = field(default_factory=dict)
    is_write_permitted: bool = True
    is_read_permitted: bool = True
    is_partly_closed: bool = False
    lone_brokers: frozenset[str] = frozenset()
    elected_brokers: frozenset[str] = frozenset()


class QueueRange(NamedTuple):
    """The half-open range [min_offset, end_offset) of queue offsets that can be read."""

    min_offset: int
    end_offset: int
