"""Where consumer groups go on: the committed offsets, a state machine over the log.

    record of %SYS%OFFSETS        its body is an OffsetsRecord (state.proto): commits, in their order; or groups that were deleted
    config/consumerOffsets.json   {"position": n, "groups": {"<group>": {"<topic>": {"incarnation": i,
                                   "offsets": {"<queue>": [offset, position, reset epoch, if there is one]}}}}}

Rules:
- The records are the truth. `apply` takes them in the order of the log: those just appended, and at a start those read back. The same
  records make the same offsets.
- The file is a cache (`snapshots.py`). Every record before its `position` is in it.
- An offset belongs to one incarnation of its topic, and is not found with another one.
- Before a segment goes, what is alive in it is carried forward. So the log has the offsets of a group that commits no more, however old.
  An offset's `position` is where its newest record stands.
- A commit may go back: an explicit seek does.
- A reset is a commit with an epoch: where the log ended when it was made. So every reset of a queue has another epoch, after a group was
  deleted and came again, too. Every later commit of the queue repeats the epoch: the newest record says all.
- A group is deleted by a record. It need not be carried forward: the log goes from its front, so what it takes away goes before it does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, QueueOffset
from protomq.v1.state_pb2 import OffsetsRecord
from protomq.wire.topics import OFFSETS_TOPIC
from protomq_broker.store.errors import StoreError
from protomq_broker.store.files.disk import Disk

from .machine import Carrier, Snapshot
from .snapshots import SnapshotFiles

log = logging.getLogger(__name__)

GROUPS_MAX: Final = 10_000
"""Group names are whatever clients say: somebody must say stop."""
CARRIED_COUNT: Final = 500
"""Offsets in a slice of what is carried forward."""


class TooManyGroupsError(StoreError):
    """Another group would be one too many."""

    def __init__(self) -> None:
        super().__init__(
            f"{GROUPS_MAX} consumer groups have committed offsets here, the most that it takes: delete those that nobody needs"
            " (`protomq group delete`), or pull without committing"
        )


class OffsetKey(NamedTuple):
    """Whose offset where."""

    group: str
    topic: str
    queue_id: int


class _TopicOffsets:
    """A group's offsets in one incarnation of a topic, by queue, and where the newest record of each stands."""

    __slots__ = ("incarnation", "offsets", "positions", "reset_epochs")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.offsets: dict[int, int] = {}
        self.positions: dict[int, int] = {}
        self.reset_epochs: dict[int, int] = {}
        """Of queues that were reset: which reset was the last."""

    def only(self, queue_ids: Iterable[int]) -> _TopicOffsets:
        """These queues alone. Another object: some read this one without the lock."""
        found = _TopicOffsets(self.incarnation)
        for queue_id in queue_ids:
            found.offsets[queue_id], found.positions[queue_id] = self.offsets[queue_id], self.positions[queue_id]
            if queue_id in self.reset_epochs:
                found.reset_epochs[queue_id] = self.reset_epochs[queue_id]
        return found


class ConsumerOffsets:
    """The committed offsets of all groups. `apply` and `record_of`: the writer thread; everything else: any thread.

    Attributes:
        replay_from: after the construction: the records before this position are in it already.
    """

    topic = OFFSETS_TOPIC

    def __init__(self, disk: Disk, path: str, log_start: int, end_position: int) -> None:
        """Reads the cache of a log that goes from `log_start` to `end_position`."""
        self._files = SnapshotFiles(disk, path)
        self._lock = threading.Lock()
        self._groups: dict[str, dict[str, _TopicOffsets]] = {}
        self._change_count = 0
        self._saved_count = 0
        self._end_position = 0  # behind the start of the last record that was applied
        self.replay_from = self._files.load(self._load, log_start, end_position)

    # The machine: the writer thread, and a start.

    def apply(self, body: bytes, position: int) -> Sequence[str]:
        """Takes the body of the record at `position`; one that is no OffsetsRecord changes nothing, and is said."""
        try:
            record = OffsetsRecord.FromString(body)
        except DecodeError:
            log.error("the record of %s at position %d does not parse", OFFSETS_TOPIC, position)
            return ()
        with self._lock:
            for group in record.deleted_groups:
                self._groups.pop(group, None)
            for commit in record.commits:
                topics = self._groups.setdefault(commit.consumer_group, {})
                for offset in commit.offsets:
                    known = topics.get(offset.topic)
                    if known is None or known.incarnation != offset.topic_incarnation:
                        known = topics[offset.topic] = _TopicOffsets(offset.topic_incarnation)
                    known.offsets[offset.queue_id] = offset.queue_offset
                    known.positions[offset.queue_id] = position
                    if offset.reset_epoch:
                        known.reset_epochs[offset.queue_id] = offset.reset_epoch
            self._change_count += 1
            self._end_position = position + 1
        return ()

    def carry(self, cut: int) -> Sequence[Carrier]:
        """See `StateMachine`."""
        keys = self.keys_below(cut)
        return [
            Carrier(partial(self.record_of, position=cut), keys[start : start + CARRIED_COUNT])
            for start in range(0, len(keys), CARRIED_COUNT)
        ]

    def keys_below(self, position: int) -> list[OffsetKey]:
        """The offsets whose newest record stands before `position`."""
        with self._lock:
            return [
                OffsetKey(group, topic, queue_id)
                for group, topics in self._groups.items()
                for topic, known in topics.items()
                for queue_id, at in known.positions.items()
                if at < position
            ]

    def record_of(self, keys: Iterable[OffsetKey], position: int) -> bytes:
        """The body of a record that says again those of `keys` whose newest record still stands before `position`; b"": none does."""
        commits: dict[str, CommitOffsetsRequest] = {}
        for group, topic, queue_id in keys:
            known = self._groups.get(group, _NO_TOPICS).get(topic)
            if known is None or known.positions.get(queue_id, position) >= position:
                continue
            commit = commits.get(group)
            if commit is None:
                commit = commits[group] = CommitOffsetsRequest(consumer_group=group)
            commit.offsets.append(
                QueueOffset(
                    topic=topic,
                    queue_id=queue_id,
                    queue_offset=known.offsets[queue_id],
                    topic_incarnation=known.incarnation,
                    reset_epoch=known.reset_epochs.get(queue_id),
                )
            )
        return OffsetsRecord(commits=commits.values()).SerializeToString()

    def unsaved(self) -> Snapshot | None:
        """See `StateMachine`."""
        with self._lock:
            change_count, names = self._change_count, list(self._groups)
        if change_count == self._saved_count:
            return None
        groups: dict[str, dict[str, Any]] = {}
        for name in names:
            with self._lock:  # for one group at a time: the writer must not wait for all of them
                topics = self._groups.get(name)
                if topics is None:  # it was deleted meanwhile
                    continue
                groups[name] = {
                    topic: {
                        "incarnation": known.incarnation,
                        "offsets": {
                            str(queue_id): [
                                offset,
                                known.positions[queue_id],
                                *_listed(known.reset_epochs.get(queue_id)),
                            ]
                            for queue_id, offset in known.offsets.items()
                        },
                    }
                    for topic, known in topics.items()
                }

        def save(position: int) -> None:
            self._files.save({"position": position, "groups": groups})
            self._saved_count = change_count

        return Snapshot(self._end_position, save)

    # Questions.

    def find(self, group: str, topic: str, incarnation: int, queue_id: int) -> int | None:
        """The committed offset, None if there is none."""
        known = self._groups.get(group, _NO_TOPICS).get(topic)
        if known is None or known.incarnation != incarnation:
            return None
        return known.offsets.get(queue_id)

    def reset_epoch(self, group: str, topic: str, incarnation: int, queue_id: int) -> int:
        """Which reset of the group's offset in the queue was the last; 0: none was made."""
        known = self._groups.get(group, _NO_TOPICS).get(topic)
        if known is None or known.incarnation != incarnation:
            return 0
        return known.reset_epochs.get(queue_id, 0)

    def of_topic(self, group: str, topic: str, incarnation: int) -> dict[int, int]:
        """The group's committed offsets in this incarnation of a topic, by queue."""
        known = self._groups.get(group, _NO_TOPICS).get(topic)
        return dict(known.offsets) if known is not None and known.incarnation == incarnation else {}

    def groups_of(self, topic: str, incarnation: int) -> dict[str, set[int]]:
        """The groups that have committed in this incarnation of a topic, and in which queues."""
        with self._lock:
            found = [(group, topics[topic]) for group, topics in self._groups.items() if topic in topics]
            return {group: set(known.offsets) for group, known in found if known.incarnation == incarnation}

    def groups(self) -> dict[str, list[str]]:
        """All groups that have committed, each with the topics in which it has, by name."""
        with self._lock:
            return {group: sorted(topics) for group, topics in self._groups.items()}

    def has_group(self, group: str) -> bool:
        """Whether the group has committed anything."""
        return group in self._groups

    def has_room_for(self, group: str, new_count: int = 0) -> bool:
        """Whether a commit of the group is taken: it has committed before, or not too many have, with `new_count` that are about to."""
        return group in self._groups or len(self._groups) + new_count < GROUPS_MAX

    def incarnations(self, deleted: Mapping[str, int]) -> dict[str, int]:
        """The incarnation of each topic that the newest commit in it names.

        `deleted`: topics that were deleted, and where the log ended then; a commit before that tells nothing of the topic of today.
        """
        newest: dict[str, tuple[int, int]] = {}
        with self._lock:
            for topics in self._groups.values():
                for topic, known in topics.items():
                    found = (max(known.positions.values()), known.incarnation)
                    if found[0] >= deleted.get(topic, 0):
                        newest[topic] = max(newest.get(topic, found), found)
        return {topic: incarnation for topic, (_, incarnation) in newest.items()}

    def keep(self, incarnation_of: Callable[[str], int | None], deleted: Mapping[str, int] = MappingProxyType({})) -> None:
        """Forgets the offsets of topics that are not there, or in another incarnation.

        `deleted`: topics that were deleted, and where the log ended then. Offsets from before that go, too: whoever makes a topic may give
        it the incarnation of one that was deleted.
        """
        with self._lock:
            for group, topics in list(self._groups.items()):
                for topic, known in list(topics.items()):
                    is_other = incarnation_of(topic) != known.incarnation
                    end_position = deleted.get(topic, 0)
                    if not is_other and not end_position:
                        continue  # nearly always; commits wait for the lock
                    kept = [queue_id for queue_id, at in known.positions.items() if not is_other and at >= end_position]
                    if len(kept) == len(known.positions):
                        continue
                    self._change_count += 1
                    if kept:
                        topics[topic] = known.only(kept)
                    else:
                        del topics[topic]
                if not topics:
                    del self._groups[group]

    def forget_topic(self, topic: str) -> None:
        """The topic is gone, and with it what was committed in it."""
        with self._lock:
            for group, topics in list(self._groups.items()):
                if topics.pop(topic, None) is not None:
                    self._change_count += 1
                    if not topics:
                        del self._groups[group]

    def _load(self, content: Any) -> None:
        groups: dict[str, dict[str, _TopicOffsets]] = {}
        for group, topics in content["groups"].items():
            loaded = groups[group] = {}
            for topic, entry in topics.items():
                known = loaded[topic] = _TopicOffsets(int(entry["incarnation"]))
                for queue_id, (offset, at, *reset_epoch) in entry["offsets"].items():
                    known.offsets[int(queue_id)] = int(offset)
                    known.positions[int(queue_id)] = int(at)
                    if reset_epoch:
                        known.reset_epochs[int(queue_id)] = int(reset_epoch[0])
        self._groups = groups


def _listed(number: int | None) -> list[int]:
    return [] if number is None else [number]


_NO_TOPICS: Final[dict[str, _TopicOffsets]] = {}
