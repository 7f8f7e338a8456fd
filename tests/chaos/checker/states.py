"""Invariant C3 over the log alone: its records of states, applied by own code, tell what the broker tells.

The log is complete from its first segment on: topics with their settings and incarnations, committed offsets, settings of groups, locks of
queues, where queues begin and end.
Nothing of the store's code is used: records are read by `log_files.py`, and FORMAT.md says what counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from protomq.v1.group_pb2 import GroupSettings
from protomq.v1.state_pb2 import GroupsRecord, LocksRecord, LogRecord, OffsetsRecord, TopicsRecord
from protomq.v1.topic_pb2 import Topic

from .log_files import LogReport
from .violations import Violation

NO_QUEUE_OFFSET = (1 << 64) - 1
K = TypeVar("K")
Queue = tuple[str, int]


@dataclass(slots=True)
class States:
    """What is known.

    Attributes:
        topics: by name: write queues, read queues, permission, incarnation.
        offsets: by group, topic and queue.
        ranges: by queue: (its first offset, one past its last).
        groups: settings by group, version included.
        locks: by group, topic, incarnation and queue: token, and name and number of the member.
    """

    topics: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    offsets: dict[tuple[str, str, int], int] = field(default_factory=dict)
    ranges: dict[Queue, tuple[int, int]] = field(default_factory=dict)
    groups: dict[str, GroupSettings] = field(default_factory=dict)
    locks: dict[tuple[str, str, int, int], tuple[int, str, int]] = field(default_factory=dict)


def states_of(report: LogReport) -> States:
    """What the records of a log say, in their order."""
    states = States()
    offsets: dict[tuple[str, str, int], tuple[int, int]] = {}  # incarnation, offset
    firsts: dict[Queue, int] = {}
    ends: dict[Queue, int] = {}
    for _, _, record in report.records:
        queue = record.topic, record.queue_id
        if record.queue_offset != NO_QUEUE_OFFSET:
            firsts.setdefault(queue, record.queue_offset)
            ends[queue] = record.queue_offset + 1
        if record.topic == "%SYS%TOPICS":
            change = TopicsRecord.FromString(record.body)
            for name in change.deleted_topics:
                states.topics.pop(name, None)
                for places in (firsts, ends):
                    for key in [key for key in places if key[0] == name]:
                        del places[key]
            states.topics.update((topic.name, _settings(topic)) for topic in change.topics)
        elif record.topic == "%SYS%OFFSETS":
            committed = OffsetsRecord.FromString(record.body)
            for group in committed.deleted_groups:
                for at in [at for at in offsets if at[0] == group]:
                    del offsets[at]
            for commit in committed.commits:
                for offset in commit.offsets:
                    at = commit.consumer_group, offset.topic, offset.queue_id
                    offsets[at] = offset.topic_incarnation, offset.queue_offset
        elif record.topic == "%SYS%GROUPS":
            _apply_groups(states.groups, GroupsRecord.FromString(record.body))
        elif record.topic == "%SYS%LOCKS":
            _apply_locks(states.locks, LocksRecord.FromString(record.body))
        elif record.topic == "%SYS%LOG":
            for told in LogRecord.FromString(record.body).queues:
                for queue_id, end in zip(told.queue_ids, told.end_offsets, strict=True):
                    key = told.topic, queue_id
                    ends[key] = max(end, ends.get(key, 0))
    for at, (incarnation, queue_offset) in offsets.items():
        topic = states.topics.get(at[1])
        if topic is not None and topic[3] == incarnation:
            states.offsets[at] = queue_offset
    for queue, end in ends.items():
        states.ranges[queue] = firsts.get(queue, end), end
    return states


def _apply_groups(groups: dict[str, GroupSettings], change: GroupsRecord) -> None:
    for name in change.deleted_groups:
        groups.pop(name, None)
    for settings in change.settings:
        name = settings.consumer_group
        if name not in groups or settings.version >= groups[name].version:
            groups[name] = settings


def _apply_locks(
    locks: dict[tuple[str, str, int, int], tuple[int, str, int]], change: LocksRecord
) -> None:
    for lock in [lock for lock in locks if lock[0] in change.deleted_groups]:
        del locks[lock]
    for said in change.locks:
        key = said.consumer_group, said.topic, said.topic_incarnation, said.queue_id
        locks.pop(key, None)
        if said.token:
            locks[key] = said.token, said.client_id, said.nonce


def _settings(topic: Topic) -> tuple[int, int, int, int]:
    return topic.write_queues, topic.read_queues, topic.permission, topic.incarnation


def check_states(log: States, told: States) -> list[Violation]:
    """Where a broker tells something else than its log."""
    found = _differences("topic", log.topics, told.topics)
    found += _differences("committed offset", log.offsets, told.offsets)
    found += _differences("settings of group", log.groups, told.groups)
    found += _differences("lock", log.locks, told.locks)
    ranges = {key: log.ranges.get(key, (0, 0)) for key in told.ranges}
    return found + _differences("range of queue", ranges, told.ranges)


def _differences(what: str, log: Mapping[K, object], told: Mapping[K, object]) -> list[Violation]:
    return [
        Violation("C3", f"{what} {key}: the log says {log.get(key)}, the broker {told.get(key)}")
        for key in sorted({*log, *told}, key=repr)
        if log.get(key) != told.get(key)
    ]
