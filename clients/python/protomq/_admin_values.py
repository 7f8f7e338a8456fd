"""The values that Admin returns, and how to read them from servers' answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ._types import BrokerAddress, MessageQueue, Permission, QueueRange, TopicType
from .errors import BrokerMissingError


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic as one broker has it. `incarnation`: a number that it keeps until it is deleted. A new topic of the same name gets another
    one. `closed_from`: the permission that it gets back when what has closed it is undone (`protomq cluster drain`). UNSPECIFIED: nothing
    has closed it.
    """

    name: str
    write_queues: int
    read_queues: int
    permission: Permission
    incarnation: int = 0
    type: TopicType = TopicType.MIXED
    closed_from: Permission = Permission.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The state of one queue; `last_store_time` is None where nothing can be read."""

    queue: MessageQueue
    offsets: QueueRange
    last_store_time: datetime | None


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic on all brokers that have it."""

    name: str
    configs: dict[str, TopicConfig]
    queues: tuple[QueueStatus, ...]

    @property
    def message_count(self) -> int:
        """Messages that can be read."""
        return sum(queue.offsets.end_offset - queue.offsets.min_offset for queue in self.queues)


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """A broker as the name server knows it."""

    cluster: str
    broker_name: str
    broker_id: int
    grpc_address: str
    remoting_address: str
    ha_address: str
    incarnation: int
    permission: Permission

    @property
    def address(self) -> BrokerAddress:
        """The address that a transport needs."""
        return BrokerAddress(self.broker_name, self.grpc_address, self.remoting_address)

    @property
    def label(self) -> str:
        """The name of a master; `name/id` of a slave. No name has a slash."""
        return f"{self.broker_name}/{self.broker_id}" if self.broker_id else self.broker_name


@dataclass(frozen=True, slots=True)
class MissingBroker:
    """A broker that the name server misses, as it was last, with the time and cause of its removal. It is not in `cluster_info`."""

    broker: BrokerInfo
    removed_time: datetime
    cause: str

    @property
    def error(self) -> BrokerMissingError:
        """The error of an Admin method that needs this broker."""
        broker = self.broker
        since = self.removed_time.strftime("%Y-%m-%dT%H:%M:%SZ")
        return BrokerMissingError(
            f"broker {broker.broker_name} is not registered any more, since {since}: {self.cause}; "
            f"it was at {broker.remoting_address or broker.grpc_address}",
            metadata={
                "broker_name": broker.broker_name,
                "grpc_address": broker.grpc_address,
                "remoting_address": broker.remoting_address,
                "removed_time": since,
                "cause": self.cause,
            },
        )


@dataclass(frozen=True, slots=True)
class RefusedBroker:
    """A broker that a name server refuses, as it asked to register, and when it did so last. It is not in `cluster_info`.

    `reason`: of the error that it got, such as NAME_TAKEN. `cause`: the same in words.
    """

    broker: BrokerInfo
    refused_time: datetime
    reason: str
    cause: str


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """One pool of threads of a broker."""

    lane: str
    threads: int
    depth: int
    depth_max: int
    queue_time_us: int
    calls: int
    rejections: int
    connections: int
    holds: int


@dataclass(frozen=True, slots=True)
class DamagedQueue:
    """A queue with entries that were found damaged; the broker heals them, unless there is an obstacle ("": there is none)."""

    topic: str
    queue_id: int
    queue_offset: int
    reason: str
    obstacle: str


@dataclass(frozen=True, slots=True)
class LogDamage:
    """A part of the log, in positions, that the broker does not serve because of damage."""

    start_position: int
    end_position: int
    reason: str


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """What a broker does: log positions in bytes, the lanes, why it takes no writes ("": it does), and what is damaged.

    `damaged_queues` and `log_damages` name 100 at most; `damaged_queue_files` counts all, `healed_queue_files` those since the start,
    `healed_log_ranges` what was healed of the log from a replica. `delayed_messages` wait for their time: delayed ones, and
    failed ones until their next delivery. Open transactions do not count: `list_transactions` has them. `checkpoint_failure` says why the
    store writes no checkpoint, and what helps ("": it writes them).
    """

    broker_name: str
    version: str
    start_time: datetime
    min_position: int
    appended_position: int
    flushed_position: int
    readable_position: int
    flush_mode: str
    write_refusal: str
    disk_used_ratio: float
    topics: int
    resident_memory_bytes: int
    lanes: tuple[LaneStatus, ...] = field(default=())
    damaged_queue_files: int = 0
    healed_queue_files: int = 0
    healed_log_ranges: int = 0
    delayed_messages: int = 0
    damaged_queues: tuple[DamagedQueue, ...] = field(default=())
    log_damages: tuple[LogDamage, ...] = field(default=())
    checkpoint_failure: str = ""


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """A consumer group and, by name, the topics in which it has committed offsets or popped."""

    name: str
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FilterModule:
    """A WebAssembly module by which a broker filters. If two brokers have the same module, its checksum is the same."""

    name: str
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class TopicStats:
    """Counters of a topic, summed over the brokers, each since its start."""

    topic: str
    records_in: int
    bytes_in: int
    records_out: int
    bytes_out: int


def broker_status_of(answer: Any) -> BrokerStatus:
    """From a GetBrokerStatusResponse."""
    return BrokerStatus(
        broker_name=answer.broker_name,
        version=answer.version,
        start_time=datetime_of(answer.start_time),
        min_position=answer.min_position,
        appended_position=answer.appended_position,
        flushed_position=answer.flushed_position,
        readable_position=answer.readable_position,
        flush_mode=answer.flush_mode,
        write_refusal=answer.write_refusal,
        checkpoint_failure=answer.checkpoint_failure,
        disk_used_ratio=answer.disk_used_ratio,
        topics=answer.topics,
        resident_memory_bytes=answer.resident_memory_bytes,
        lanes=tuple(
            LaneStatus(
                lane.lane, lane.threads, lane.depth, lane.depth_max, lane.queue_time_us,
                lane.calls, lane.rejections, lane.connections, lane.holds,
            )
            for lane in answer.lanes
        ),
        damaged_queue_files=answer.damaged_queue_files,
        healed_queue_files=answer.healed_queue_files,
        healed_log_ranges=answer.healed_log_ranges,
        delayed_messages=answer.delayed_messages,
        damaged_queues=tuple(
            DamagedQueue(each.topic, each.queue_id, each.queue_offset, each.reason, each.obstacle)
            for each in answer.damaged_queues
        ),
        log_damages=tuple(
            LogDamage(each.start_position, each.end_position, each.reason)
            for each in answer.log_damages
        ),
    )  # fmt: skip


def broker_info_of(broker: Any) -> BrokerInfo:
    return BrokerInfo(
        broker.cluster,
        broker.broker_name,
        broker.broker_id,
        broker.grpc_address,
        broker.remoting_address,
        broker.ha_address,
        broker.incarnation,
        Permission(broker.permission),
    )


def refused_broker_of(refused: Any) -> RefusedBroker:
    """RefusedBroker as the name server answers it."""
    return RefusedBroker(broker_info_of(refused.broker), datetime_of(refused.refused_time), refused.reason, refused.cause)


def missing_broker_of(gone: Any) -> MissingBroker:
    """MissingBroker as the name server answers it."""
    return MissingBroker(broker_info_of(gone.broker), datetime_of(gone.removed_time), gone.cause)


def topic_config_of(topic: Any) -> TopicConfig:
    return TopicConfig(
        topic.name,
        topic.write_queues,
        topic.read_queues,
        Permission(topic.permission),
        topic.incarnation,
        TopicType(topic.type or TopicType.MIXED),
        Permission(topic.closed_from),
    )


def topic_of_config(config: TopicConfig) -> Any:
    """A TopicConfig as the protobuf Topic."""
    from .v1 import topic_pb2

    numbers: dict[str, Any] = {"permission": int(config.permission), "type": int(config.type), "closed_from": int(config.closed_from)}
    return topic_pb2.Topic(
        name=config.name,
        write_queues=config.write_queues,
        read_queues=config.read_queues,
        incarnation=config.incarnation,
        **numbers,
    )


def datetime_of(timestamp: Any) -> datetime:
    """A protobuf Timestamp as a datetime in UTC."""
    from datetime import UTC

    found: datetime = timestamp.ToDatetime(UTC)
    return found
