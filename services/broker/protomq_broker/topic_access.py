"""Which topics clients may use: look-up, permission, and creation on the first send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from protomq.wire.topics import QUEUES_MAX, is_stored_name, rules_of
from protomq_runtime.errors import Code, ServiceError, invalid_argument

from .store.log.kinds import is_queued
from .store.state.topics import (
    InvalidNameError,
    TopicConfig,
    require_group_name,
    require_topic_name,
    topic_of_broker,
)

if TYPE_CHECKING:
    from .config import BrokerConfig
    from .store.log.append import AppendRequest
    from .store.store import Store

T = TypeVar("T")


def writable_topic(store: Store, config: BrokerConfig, name: str) -> tuple[TopicConfig, bool]:
    """Returns the topic if clients may send to it, and whether it exists. If not, the caller creates it once a message for it is stored.

    Raises ServiceError, also for a missing topic if the broker does not create topics.
    """
    topic = store.topics.find(name)
    if topic is None:
        check_topic_name(name)
        if not config.auto_create_topics:
            raise topic_not_found(name)
        queues = config.default_queues
        return TopicConfig(name, write_queues=queues, read_queues=queues), False
    if not topic.writable:
        if not rules_of(name).send:
            raise invalid_argument("topic", f"{name!r} is written by the broker alone: send to a topic of your own")
        raise not_permitted(name, "written")
    return topic, True


def add_missing_topics(store: Store, requests: Sequence[AppendRequest]) -> None:
    """Restores the topics of appended copies, if nobody could learn of them but by these messages. Writer thread."""
    queues: dict[str, int] = {}
    for request in requests:
        topic = request.region.topic
        queues[topic] = max(queues.get(topic, 0), request.queue_id + 1)
    find = store.topics.find
    missing = [topic_of_broker(name, n) for name, n in queues.items() if find(name) is None]
    if missing:
        store.topics.add(missing)


def keep_to_queues(store: Store, copies: Sequence[AppendRequest]) -> None:
    """Sends copies that consumers are to get now to queues that take messages: their topic may have fewer than when they were sent.

    All of a queue that is gone go to the same other one. Copies that wait for a later time keep theirs until then. Writer thread, in the
    turn that appends them: so the topic changes before or after that.
    """
    for copy in copies:
        topic = store.topics.find(copy.region.topic)
        if topic is not None and is_queued(copy.region.flags):
            # Earlier versions took fewer read than write queues.
            copy.queue_id %= min(topic.write_queues, topic.read_queues)


def readable_topic(store: Store, name: str) -> TopicConfig:
    """Returns the topic if clients may read it. Raises ServiceError."""
    topic = existing_topic(store, name)
    if not topic.readable:
        raise not_permitted(name, "read")
    return topic


def existing_topic(store: Store, name: str) -> TopicConfig:
    """Returns the topic if it is a client's topic. Raises ServiceError."""
    topic = store.topics.find(name)
    if topic is None:
        if not (is_stored_name(name) and rules_of(name).pull):
            check_topic_name(name)
        raise topic_not_found(name)
    return topic


def check_incarnation(topic: TopicConfig, wanted: int) -> None:
    """Raises ServiceError if the caller means another incarnation of the topic; 0 means any."""
    if wanted not in (0, topic.incarnation):
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "TOPIC_RECREATED",
            f"topic {topic.name!r} was deleted and created again: offsets of incarnation {wanted} mean nothing in the current one, "
            f"{topic.incarnation}; start again with that one, or stop",
            metadata={
                "topic": topic.name,
                "wanted": str(wanted),
                "current": str(topic.incarnation),
            },
        )


def read_one_incarnation(
    store: Store, look_up: Callable[[], TopicConfig], read: Callable[[TopicConfig], T]
) -> tuple[T, TopicConfig]:
    """Reads a topic and returns the result with the topic. Both are of one incarnation, even if somebody deletes and creates the topic
    meanwhile.

    Raises what both raise.
    """
    while True:
        before = look_up()
        found = read(before)
        after = store.topics.find(before.name)
        if after is not None and after.incarnation == before.incarnation:
            return found, before


def check_topic_name(name: str) -> None:
    """Raises ServiceError for a name that clients cannot give to a topic."""
    try:
        require_topic_name(name)
    except InvalidNameError as error:
        raise invalid_argument("topic", str(error)) from error
    if not rules_of(name).create:
        raise invalid_argument("topic", f"{name!r} is the broker's own: only the broker creates and writes it")


def check_group_name(name: str, field: str = "consumer_group") -> None:
    """Raises ServiceError for a name that no group can have. `field`: the request's field with the name."""
    try:
        require_group_name(name)
    except InvalidNameError as error:
        raise invalid_argument(field, str(error)) from error


def check_read_queue(topic: TopicConfig, queue_id: int) -> None:
    """Raises ServiceError if the topic has no such queue to read."""
    if not 0 <= queue_id < topic.read_queues:
        raise ServiceError(
            Code.NOT_FOUND,
            "QUEUE_NOT_FOUND",
            f"topic {topic.name!r} has no read queue {queue_id} here, it has {topic.read_queues}; look the route up again",
            metadata={
                "topic": topic.name,
                "queue_id": str(queue_id),
                "read_queues": str(topic.read_queues),
            },
        )


def is_known_queue(store: Store, topic: TopicConfig, queue_id: int) -> bool:
    """Whether it can be read, or its topic has fewer queues now and it has had messages. Consumers may hold some of these, and settle
    them as if the queue were there.
    """
    return 0 <= queue_id < topic.read_queues or store.appended_end_offset(topic.name, queue_id) > 0


def check_known_queues(store: Store, topic: TopicConfig, queue_ids: Sequence[int]) -> None:
    """Raises ServiceError if some of these queues are not known. It names them all: they alone are to be left out."""
    unknown = [queue_id for queue_id in queue_ids if not is_known_queue(store, topic, queue_id)]
    if unknown:
        text = ", ".join(map(str, unknown))
        raise ServiceError(
            Code.NOT_FOUND,
            "QUEUE_NOT_FOUND",
            f"topic {topic.name!r} has no read queue {text} here, it has {topic.read_queues}; look the route up again",
            metadata={
                "topic": topic.name,
                "queue_id": str(unknown[0]),
                "queue_ids": ",".join(map(str, unknown)),
                "read_queues": str(topic.read_queues),
            },
        )


def check_write_queue(topic: TopicConfig, queue_id: int) -> None:
    """Raises ServiceError if the topic has no such queue to write."""
    if not 0 <= queue_id < topic.write_queues:
        raise ServiceError(
            Code.NOT_FOUND,
            "QUEUE_NOT_FOUND",
            f"topic {topic.name!r} has no write queue {queue_id} here, it has {topic.write_queues}; look the route up again",
            metadata={
                "topic": topic.name,
                "queue_id": str(queue_id),
                "write_queues": str(topic.write_queues),
            },
        )


def check_queue_ids(topic: TopicConfig, queue_ids: Sequence[int]) -> None:
    """Raises ServiceError unless the topic has all of these queues to read, each named once."""
    if len(queue_ids) > QUEUES_MAX or len(set(queue_ids)) < len(queue_ids):
        raise invalid_argument("queue_ids", f"names each queue once, {QUEUES_MAX} at most")
    for queue_id in queue_ids:
        check_read_queue(topic, queue_id)


def check_committed_offset(
    store: Store, topic: TopicConfig, queue_id: int, queue_offset: int
) -> None:
    """Raises ServiceError unless a group may go on at the offset of a queue that is known. It may at a message that is or was in the
    queue, or behind the last one.

    A slow group may stand below the first message that is still stored. What is appended counts, readable or not.
    """
    end_offset = store.appended_end_offset(topic.name, queue_id)
    if 0 <= queue_offset <= end_offset:
        return
    min_offset, _ = store.queue_range(topic.name, queue_id)
    raise ServiceError(
        Code.OUT_OF_RANGE,
        "OFFSET_OUT_OF_RANGE",
        f"offset {queue_offset} cannot be committed in queue {queue_id} of {topic.name!r}: "
        f"it begins at {min_offset} and ends at {end_offset}; commit an offset from 0 to {end_offset}",
        metadata={
            "topic": topic.name,
            "queue_id": str(queue_id),
            "queue_offset": str(queue_offset),
            "min_offset": str(min_offset),
            "end_offset": str(end_offset),
        },
    )


def topic_not_found(name: str) -> ServiceError:
    """NOT_FOUND for a topic."""
    return ServiceError(
        Code.NOT_FOUND,
        "TOPIC_NOT_FOUND",
        f"topic {name!r} does not exist here; create it, or look the route up again",
        metadata={"topic": name},
    )


def nothing_consumed(name: str) -> ServiceError:
    """NOT_FOUND for the offsets of a consumer group that has none. It may have settings."""
    return _group_not_found(
        name,
        "has committed no offset here, and has popped nothing; another broker may know more of it. ListGroups tells which groups have",
    )


def group_not_found(name: str) -> ServiceError:
    """NOT_FOUND for a consumer group of which nothing is known."""
    return _group_not_found(
        name,
        "has no committed offset and no settings here, and has popped nothing; ListGroups and ListGroupSettings tell which groups have",
    )


def _group_not_found(name: str, why: str) -> ServiceError:
    return ServiceError(
        Code.NOT_FOUND, "GROUP_NOT_FOUND", f"group {name!r} {why}", metadata={"consumer_group": name}
    )


def group_disabled(name: str) -> ServiceError:
    """FAILED_PRECONDITION for a pull of a group that may not consume."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "GROUP_DISABLED",
        f"group {name!r} may not consume: its settings say so (consume_enabled); `protomq group set {name} --consume` switches it on",
        metadata={"consumer_group": name},
    )


def not_permitted(name: str, what: str) -> ServiceError:
    """PERMISSION_DENIED for a topic that may not be read or written."""
    return ServiceError(
        Code.PERMISSION_DENIED,
        "NOT_PERMITTED",
        f"topic {name!r} may not be {what}: its permission was taken away; ask the operator",
        metadata={"topic": name},
    )
