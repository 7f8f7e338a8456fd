"""Types of topics: which messages a topic takes, as RocketMQ 5 has them. Pure.

    TRANSACTION   half messages, whatever else they have
    DELAY         messages with a due time
    FIFO          messages with a sharding key: those of one key stay in order
    NORMAL        all others
    MIXED         takes all of these

The broker checks only sends of clients. It moves its own copies (retries, dead letters, due and committed messages) into topics of any
type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from protomq.v1.topic_pb2 import TopicType
from protomq.wire.record import FLAG_DUE_TIME, FLAG_KIND_HALF, FLAG_KIND_MASK
from protomq_runtime.errors import Code, ServiceError

from .store.log.record_region import sharding_hashes_of

if TYPE_CHECKING:
    from .store.log.append import RecordRegion
    from .store.state.topics import TopicConfig

NAMES: Final = {
    TopicType.TOPIC_TYPE_NORMAL: "normal",
    TopicType.TOPIC_TYPE_FIFO: "fifo",
    TopicType.TOPIC_TYPE_DELAY: "delay",
    TopicType.TOPIC_TYPE_TRANSACTION: "transaction",
    TopicType.TOPIC_TYPE_MIXED: "mixed",
}
_REMEDIES: Final = {
    TopicType.TOPIC_TYPE_NORMAL: "leave out delay, sharding key and transaction",
    TopicType.TOPIC_TYPE_FIFO: "give each message a sharding key, and no delay",
    TopicType.TOPIC_TYPE_DELAY: "give a delay or a due time",
    TopicType.TOPIC_TYPE_TRANSACTION: "send in a transaction",
}


def type_of(region: RecordRegion) -> TopicType.ValueType:
    """Returns the type of the messages of a request; MIXED if only some have a sharding key."""
    if region.flags & FLAG_KIND_MASK == FLAG_KIND_HALF:
        return TopicType.TOPIC_TYPE_TRANSACTION
    if region.flags & FLAG_DUE_TIME:
        return TopicType.TOPIC_TYPE_DELAY
    has_key = sharding_hashes_of(region) != 0
    if has_key.all():
        return TopicType.TOPIC_TYPE_FIFO
    return TopicType.TOPIC_TYPE_MIXED if has_key.any() else TopicType.TOPIC_TYPE_NORMAL


def check_type(topic: TopicConfig, region: RecordRegion) -> None:
    """Raises ServiceError for messages that the topic does not take."""
    if topic.type == TopicType.TOPIC_TYPE_MIXED or (found := type_of(region)) == topic.type:
        return
    name, wanted = NAMES[found], NAMES[topic.type]
    raise ServiceError(
        Code.FAILED_PRECONDITION,
        "TOPIC_TYPE_MISMATCH",
        f"topic {topic.name!r} takes {wanted} messages, these are {name}: {_REMEDIES[topic.type]}, use another topic, or have the type "
        "of this one changed",
        metadata={"topic": topic.name, "topic_type": wanted, "message_type": name},
    )
