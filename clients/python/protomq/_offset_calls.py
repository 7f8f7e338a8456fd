"""What consumers are told and what they conclude: arguments checked, queues and offsets sorted out, errors put together. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, Literal

from ._checks import OFFSET_MAX, check_count, check_message_queue, check_past, check_text
from ._outages import unreadable_text
from ._types import MessageQueue, QueueRange, Route
from .errors import (
    ConfigurationError,
    ProtomqError,
    QueueNotFoundError,
    QueueNotOwnedError,
    TopicNotFoundError,
    WrongTypeError,
)

TAGS_MAX: Final = 256
"""As brokers have it."""

Begin = Literal["earliest", "latest"] | datetime


def check_begin(begin: object) -> None:
    """Raises ConfigurationError for what is not a Begin."""
    if isinstance(begin, datetime):
        check_past("begin", begin, 'write "latest"')
    elif begin not in ("earliest", "latest"):
        raise ConfigurationError(f'begin is "earliest", "latest" or a datetime, not {begin!r}')


def checked_tags(tags: object) -> tuple[str, ...]:
    """The tags to ask for, () for all, as "*" among them is in RocketMQ; raises ConfigurationError for most likely mistakes."""
    if isinstance(tags, str):
        raise WrongTypeError(f"tags is a list of tags, not the text {tags!r}")
    if isinstance(tags, bytes) or not isinstance(tags, Iterable):
        raise WrongTypeError(f"tags is a list of str, not {tags!r}")
    checked = tuple(dict.fromkeys(check_text("a tag", tag) for tag in tags))
    if len(checked) > TAGS_MAX:
        raise ConfigurationError(f"tags has {len(checked):,} tags, brokers take {TAGS_MAX} at most: ask for all, or filter by a property")
    if "" in checked:
        raise ConfigurationError("a tag is not empty")
    if joined := [tag for tag in checked if "|" in tag]:
        raise ConfigurationError(f"tags is a list: no tag has a |, {joined[0]!r} are several")
    # Left out, it is (). An empty list is one that a program has put together, and it does not want all messages.
    if not checked and tags != ():
        raise ConfigurationError('tags names no tag, so no message would come; leave it out, or write tags=["*"], to get all')
    return () if "*" in checked else checked


def checked_queues(queues: object) -> tuple[MessageQueue, ...]:
    """The queues, each once; raises WrongTypeError for what is no list of MessageQueue."""
    if isinstance(queues, MessageQueue):
        raise WrongTypeError(f"queues is a list of MessageQueue: write [{queues}]")
    if isinstance(queues, str | bytes) or not isinstance(queues, Iterable):
        raise WrongTypeError(f"queues is a list of MessageQueue, not {queues!r}")
    return tuple(dict.fromkeys(check_message_queue(queue) for queue in queues))


def checked_offsets(offsets: object) -> dict[MessageQueue, int]:
    """Offsets to commit; raises WrongTypeError for what is no dict of MessageQueue to int. Their range is the broker's to judge."""
    if not isinstance(offsets, Mapping):
        raise WrongTypeError(f"offsets is a dict of MessageQueue to int, not {offsets!r}")
    return {
        check_message_queue(queue): check_count(
            f"the offset of {queue}", queue_offset, -OFFSET_MAX, OFFSET_MAX
        )
        for queue, queue_offset in offsets.items()
    }


def missing_queues(route: Route, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Those of the queues of the route's topic that cannot be read. Of a broker that is not in the route nobody knows."""
    if route.auto_create:
        return []
    readable = set(route.read_queues)
    return [
        queue
        for queue in queues
        if queue.topic == route.topic
        and queue.broker_name in route.brokers
        and queue not in readable
    ]


def check_queues_exist(route: Route, queues: Iterable[MessageQueue]) -> None:
    """Raises QueueNotFoundError for the first that is missing."""
    for queue in missing_queues(route, queues):
        ids = [other.queue_id for other in route.read_queues if other[:2] == queue[:2]]
        has = f"0 to {ids[-1]}" if ids else "none"
        raise QueueNotFoundError(
            f"topic {queue.topic!r} has no queue {queue.queue_id} to read at broker {queue.broker_name!r}; it has {has}",
            metadata={
                "topic": queue.topic,
                "broker_name": queue.broker_name,
                "queue_id": str(queue.queue_id),
            },
        )


def doubtful_topics(
    routes: Iterable[Route], exists: Mapping[str, bool], told: set[str]
) -> list[str]:
    """A warning for each topic that neither name servers nor brokers (`exists`) know, or that nobody may read.

    Those in `told` have been told: there it is added.
    """
    texts: list[str] = []
    for route in routes:
        if route.topic in told:
            continue
        if route.auto_create and not exists.get(route.topic, True):
            texts.append(
                f"topic {route.topic!r} does not exist; the consumer waits until the first send to it, or create_topic, makes it: "
                "is the name right?"
            )
        elif not route.read_queues:
            texts.append(unreadable_text(route.topic))
        else:
            continue
        told.add(route.topic)
    return texts


def unknown_topic(topic: str) -> TopicNotFoundError:
    """The error for a topic that neither the name servers nor the brokers know."""
    error = TopicNotFoundError(
        f"topic {topic!r} does not exist: neither the name server nor a broker knows it; create_topic, or the first send to it, makes it",
        metadata={"topic": topic},
    )
    error.retriable = False
    return error


def subscribed_queues(
    assigned: Iterable[MessageQueue], subscriptions: Mapping[str, Route]
) -> list[MessageQueue]:
    """All queues that a consumer was told to consume, by assignment and by subscription."""
    return [*assigned, *(queue for route in subscriptions.values() for queue in route.read_queues)]


def first_offsets(
    queues: Iterable[MessageQueue], ranges: Mapping[int, QueueRange], begin: Begin
) -> dict[MessageQueue, int]:
    """Where "earliest" or "latest" is; queues that the broker does not know are left out."""
    which = 0 if begin == "earliest" else 1
    return {queue: ranges[queue.queue_id][which] for queue in queues if queue.queue_id in ranges}


def by_broker(queues: Iterable[MessageQueue]) -> dict[tuple[str, str], list[MessageQueue]]:
    """The queues of each (topic, broker name)."""
    groups: dict[tuple[str, str], list[MessageQueue]] = {}
    for queue in queues:
        groups.setdefault((queue.topic, queue.broker_name), []).append(queue)
    return groups


CommitErrors = dict[tuple[str, str], ProtomqError]
"""What went wrong with a commit, by topic and broker name."""


def combined(errors: Mapping[tuple[str, str], ProtomqError]) -> ProtomqError:
    """The first of the errors by topic and broker name; its notes tell all."""
    first = next(iter(errors.values()))
    for (topic, broker_name), error in errors.items():
        queue_ids = error.metadata.get("queue_ids", "")
        where = f"{topic}/{broker_name}" + (f", queue {queue_ids}," if queue_ids else "")
        first.add_note(
            f"offsets in {where} not committed: {type(error).__name__}: {str(error).splitlines()[0]}"
        )
    return first


def without_gone_queues(
    offsets: Mapping[MessageQueue, int], error: QueueNotFoundError
) -> tuple[dict[MessageQueue, int], QueueNotFoundError]:
    """Of a commit to one broker that has fewer queues now: what can be committed all the same, and the error for the rest.

    A broker takes all offsets of a commit or none. It names the queues that it does not know: those that are gone and have had messages it
    knows. One of an earlier version says only how many it has. Nothing is left where it says neither.
    """
    count, named = error.metadata.get("read_queues", ""), error.metadata.get("queue_ids", "")
    if named:
        unknown = set(named.split(","))
        gone = [queue for queue in offsets if str(queue.queue_id) in unknown]
    else:
        gone = [queue for queue in offsets if count.isdigit() and queue.queue_id >= int(count)]
    if not gone:
        return {}, error
    queue_ids = ", ".join(str(queue.queue_id) for queue in gone)
    told = QueueNotFoundError(
        f"topic {gone[0].topic!r} has {count} queues to read at broker {gone[0].broker_name!r} now. The offset of queue {queue_ids} is "
        "not committed; those of the others are",
        metadata={**error.metadata, "queue_ids": queue_ids},
    )
    told.retriable = False  # By waiting alone no queue comes back.
    return {queue: offset for queue, offset in offsets.items() if queue not in gone}, told


def queues_left(queues: Sequence[MessageQueue], error: QueueNotFoundError) -> list[MessageQueue]:
    """Those that a broker has, which has fewer now. None where it does not say how many, or has all that were asked for by now."""
    count = error.metadata.get("read_queues", "")
    left = [queue for queue in queues if count.isdigit() and queue.queue_id < int(count)]
    return left if len(left) < len(queues) else []


def without_lost_queues(
    offsets: Mapping[MessageQueue, int], error: QueueNotOwnedError
) -> tuple[dict[MessageQueue, int], list[MessageQueue]]:
    """Of a commit to one broker that says whose locks are lost: what can be committed all the same, and the lost queues."""
    ids = set(error.metadata.get("queue_ids", "").split(","))
    lost = [queue for queue in offsets if str(queue.queue_id) in ids]
    return {queue: offset for queue, offset in offsets.items() if queue not in lost}, lost
