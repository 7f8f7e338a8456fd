"""Where consumer groups go on: committed offsets.

    config/consumerOffsets.json   {"<group>": {"<topic>": {"<queue>": offset}}}

Rules:
- Memory is what is asked. What has changed goes, every few seconds, into the log as records of a system topic (what must survive a
  fail-over is a record) and into the file, which is a cache of those records.
- A commit may go back: an explicit seek does.
- A lost or damaged file costs what the log does not have; `replay` brings back what it has.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Container, Iterable
from typing import Any, Final

from google.protobuf.message import DecodeError

from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, QueueOffset

from .disk import Disk, read_json, write_file_atomically
from .errors import StoreError

OFFSETS_TOPIC: Final = "%SYS%OFFSETS"
"""The system topic of the records that hold committed offsets."""

OFFSETS_PER_RECORD_MAX: Final = 10_000
"""At the longest names 1.5 MB: well below the limit of a body."""

GROUPS_MAX: Final = 10_000
"""Group names are whatever clients say: somebody must say stop."""


class TooManyGroupsError(StoreError):
    """Another group would be one too many."""


_Group = dict[str, dict[int, int]]


class ConsumerOffsets:
    """The committed offsets of all groups. Any thread may call."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._lock = threading.Lock()
        self._changed: dict[
            tuple[str, str, int], None
        ] = {}  # since the last `changed_since_last`, in order
        self._is_unsaved = False
        self._groups = _decode(read_json(disk, path))

    def commit(self, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
        """The group goes on in that queue at `queue_offset`. Raises TooManyGroupsError."""
        with self._lock:
            topics = self._groups.get(group)
            if topics is None:
                if len(self._groups) >= GROUPS_MAX:
                    raise TooManyGroupsError(
                        f"{GROUPS_MAX} consumer groups have committed offsets here: no more are taken"
                    )
                topics = self._groups[group] = {}
            queues = topics.setdefault(topic, {})
            if queues.get(queue_id) == queue_offset:
                return
            queues[queue_id] = queue_offset
            self._changed[group, topic, queue_id] = None
            self._is_unsaved = True

    def find(self, group: str, topic: str, queue_id: int) -> int | None:
        """The committed offset, None if there is none."""
        return self._groups.get(group, _NO_TOPICS).get(topic, _NO_QUEUES).get(queue_id)

    def of_topic(self, group: str, topic: str) -> dict[int, int]:
        """The group's committed offsets in a topic, by queue."""
        return dict(self._groups.get(group, _NO_TOPICS).get(topic, _NO_QUEUES))

    def groups(self) -> dict[str, list[str]]:
        """All groups that have committed, each with the topics in which it has."""
        with self._lock:
            return {group: list(topics) for group, topics in self._groups.items()}

    def remove_topic(self, topic: str) -> None:
        """Forgets what groups have committed in a topic."""
        with self._lock:
            for group in [group for group, topics in self._groups.items() if topic in topics]:
                topics = {
                    name: queues for name, queues in self._groups[group].items() if name != topic
                }
                if topics:
                    self._groups[group] = topics
                else:
                    del self._groups[group]
                self._is_unsaved = True
            for key in [key for key in self._changed if key[1] == topic]:
                del self._changed[key]

    # The log.

    def changed_since_last(self) -> list[bytes]:
        """What has changed since the last call, as bodies of records: each a CommitOffsetsRequest of one group."""
        with self._lock:
            changed, self._changed = self._changed, {}
            requests: dict[str, list[CommitOffsetsRequest]] = {}
            for group, topic, queue_id in changed:
                pages = requests.setdefault(group, [])
                if not pages or len(pages[-1].offsets) == OFFSETS_PER_RECORD_MAX:
                    pages.append(CommitOffsetsRequest(consumer_group=group))
                pages[-1].offsets.append(
                    QueueOffset(
                        topic=topic,
                        queue_id=queue_id,
                        queue_offset=self._groups[group][topic][queue_id],
                    )
                )
        return [request.SerializeToString() for pages in requests.values() for request in pages]

    def mark_changed(self, bodies: Iterable[bytes]) -> None:
        """These bodies of `changed_since_last` did not get into the log: they come again. What was changed since stays as it is."""
        for body in bodies:
            request = CommitOffsetsRequest.FromString(body)
            group = request.consumer_group
            with self._lock:
                for offset in request.offsets:
                    if offset.queue_id in self._groups.get(group, _NO_TOPICS).get(
                        offset.topic, _NO_QUEUES
                    ):
                        self._changed[group, offset.topic, offset.queue_id] = None

    def replay(self, body: bytes, passed_over: Container[str] = ()) -> bool:
        """Applies the body of a record of `OFFSETS_TOPIC`, but for some topics; False, and nothing is changed, if it is none."""
        try:
            request = CommitOffsetsRequest.FromString(body)
        except DecodeError:
            return False
        with self._lock:
            topics = self._groups.setdefault(request.consumer_group, {})
            for offset in request.offsets:
                if offset.topic in passed_over:
                    continue
                queues = topics.setdefault(offset.topic, {})
                if queues.get(offset.queue_id) != offset.queue_offset:
                    queues[offset.queue_id] = offset.queue_offset
                    self._is_unsaved = True
        return True

    # The file.

    def flush(self) -> bool:
        """Writes the file if anything has changed since it was written; whether it did. OSError: it is tried again the next time."""
        with self._lock:
            if not self._is_unsaved:
                return False
            encoded = json.dumps(self._groups, indent=1).encode()
            self._is_unsaved = False
        try:
            write_file_atomically(self._disk, self._path, encoded)
        except OSError:
            self._is_unsaved = True
            raise
        return True


_NO_TOPICS: Final[_Group] = {}
_NO_QUEUES: Final[dict[int, int]] = {}


def _decode(value: Any) -> dict[str, _Group]:
    """The offsets in the parsed file; what is not of the right form is left out."""
    groups: dict[str, _Group] = {}
    if not isinstance(value, dict):
        return groups
    for group, topics in value.items():
        for topic, queues in topics.items() if isinstance(topics, dict) else ():
            for queue_id, offset in queues.items() if isinstance(queues, dict) else ():
                if queue_id.isdecimal() and type(offset) is int and offset >= 0:
                    groups.setdefault(group, {}).setdefault(topic, {})[int(queue_id)] = offset
    return groups
