"""Where groups begin in queues that a topic gets: at the first message, whether a member is there or not.

Else a group whose members begin at the end ("latest") would skip what came to a new queue while all were away. The commits stand in the
log before the topic has its queues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Final, NamedTuple

from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, QueueOffset
from protomq.v1.state_pb2 import OffsetsRecord

OFFSETS_IN_RECORD: Final = 1_000
"""With the longest names that is 300 KB."""


class Growth(NamedTuple):
    """The queues to read that a topic is about to get."""

    topic: str
    incarnation: int
    queue_ids: range


def begin_at_first(growth: Growth, *known: Mapping[str, Set[int]]) -> list[bytes]:
    """Bodies of records of %SYS%OFFSETS: each group of the topic begins at the first message of the new queues.

    `known`: by group, queues of this topic of which the log says where the group is. It may say so of a queue that the topic had before.
    """
    topic, incarnation, queue_ids = growth
    groups = sorted(set().union(*known))
    starts = (
        (group, QueueOffset(topic=topic, queue_id=queue_id, topic_incarnation=incarnation))
        for group in groups
        for queue_id in queue_ids
        if not any(queue_id in queues.get(group, ()) for queues in known)
    )
    bodies: list[bytes] = []
    while slice_ := list(islice(starts, OFFSETS_IN_RECORD)):
        bodies.append(OffsetsRecord(commits=_commits_of(slice_)).SerializeToString())
    return bodies


def _commits_of(starts: Iterable[tuple[str, QueueOffset]]) -> list[CommitOffsetsRequest]:
    commits: dict[str, CommitOffsetsRequest] = {}
    for group, offset in starts:
        commits.setdefault(group, CommitOffsetsRequest(consumer_group=group)).offsets.append(offset)
    return list(commits.values())
