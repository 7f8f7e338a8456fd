"""Which member of a group has which queue to itself; a state machine over the log.

    record of %SYS%LOCKS   its body is a LocksRecord (state.proto): queues that members lock or give up, groups that are deleted
    config/locks.json      {"position": n, "locks": [[group, topic, incarnation, queue id, token, client id, nonce,
                          is member, locked at, position], …]}

Rules:
- The records are the truth, the file is a cache (`snapshots.py`). A lock's position is where its newest record stands.
- That a lock expires is a record, too: here is no clock. That it was renewed is none: nothing changes.
- A lock of a topic that is deleted ends as every other, by a record; no later incarnation of the topic meets it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from protomq.v1.state_pb2 import LocksRecord, QueueLock
from protomq.wire.topics import LOCKS_TOPIC
from protomq_broker.store.files.disk import Disk

from .machine import Carrier, Snapshot
from .snapshots import SnapshotFiles

log = logging.getLogger(__name__)

CARRIED_COUNT: Final = 1_000
"""Locks in a slice of what is carried forward."""


class LockKey(NamedTuple):
    """A queue of one incarnation of a topic, for one group."""

    group: str
    topic: str
    incarnation: int
    queue_id: int


class LockOwner(NamedTuple):
    """Who has a queue. `token`: a random number of this lock, not 0; `nonce`: of the member.

    `is_member`: it held a call when it got the queue; `locked_at_ms`: since 1970, 0 if that is not known.
    """

    token: int
    client_id: str
    nonce: int
    is_member: bool = False
    locked_at_ms: int = 0

    def has_name(self, client_id: str, nonce: int) -> bool:
        """Whether it is this member."""
        return self.client_id == client_id and self.nonce == nonce


class LockTable:
    """The locks. Questions: any thread; `apply`: the writer.

    Attributes:
        replay_from: after the construction: the records before this position are in it already.
    """

    topic = LOCKS_TOPIC

    def __init__(self, disk: Disk, path: str, log_start: int, end_position: int) -> None:
        """Reads the cache of a log that goes from `log_start` to `end_position`."""
        self._files = SnapshotFiles(disk, path)
        self._lock = threading.Lock()  # of what is below: held while it changes and is copied
        self._owners: dict[LockKey, LockOwner] = {}
        self._groups: dict[str, dict[LockKey, LockOwner]] = {}
        self._positions: dict[LockKey, int] = {}
        self._change_count = self._saved_count = 0
        self._end_position = 0  # behind the start of the last record that was applied
        self.replay_from = self._files.load(self._load, log_start, end_position)

    # Questions.

    def owner(self, key: LockKey) -> LockOwner | None:
        """Who has the queue; None: nobody."""
        return self._owners.get(key)

    def all(self) -> dict[LockKey, LockOwner]:
        """All locks."""
        with self._lock:
            return dict(self._owners)

    def of_group(self, group: str) -> dict[LockKey, LockOwner]:
        """The locks of a group."""
        with self._lock:
            return dict(self._groups.get(group, ()))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._owners)

    @property
    def end_position(self) -> int:
        """Behind the start of the last record; 0 if none has come since the start."""
        return self._end_position

    # The machine.

    def apply(self, body: bytes, position: int) -> Sequence[str]:
        """See `StateMachine`; a body that is no LocksRecord changes nothing, and is said."""
        try:
            record = LocksRecord.FromString(body)
        except DecodeError as error:
            log.error("the record of %s at position %d is none: %s", LOCKS_TOPIC, position, error)
            return ()
        with self._lock:
            if record.deleted_groups:
                for group in set(record.deleted_groups):
                    for key in self._groups.pop(group, ()):
                        del self._owners[key], self._positions[key]
            for said in record.locks:
                key = LockKey(said.consumer_group, said.topic, said.topic_incarnation, said.queue_id)
                if said.token:
                    owner = LockOwner(said.token, said.client_id, said.nonce, said.is_member, said.locked_at_ms)
                    self._owners[key] = owner
                    self._groups.setdefault(key.group, {})[key] = owner
                    self._positions[key] = position
                else:
                    self._forget(key)
            self._change_count += 1
            self._end_position = position + 1
        return ()

    def carry(self, cut: int) -> Sequence[Carrier]:
        """See `StateMachine`."""
        with self._lock:
            keys = [key for key, position in self._positions.items() if position < cut]
        return [
            Carrier(partial(self._carried, cut=cut), keys[start : start + CARRIED_COUNT])
            for start in range(0, len(keys), CARRIED_COUNT)
        ]

    def unsaved(self) -> Snapshot | None:
        """See `StateMachine`."""
        with self._lock:
            if self._change_count == self._saved_count:
                return None
            change_count, end_position = self._change_count, self._end_position
            rows = [[*key, *owner, self._positions[key]] for key, owner in sorted(self._owners.items())]

        def save(position: int) -> None:
            self._files.save({"position": position, "locks": rows})
            self._saved_count = change_count

        return Snapshot(end_position, save)

    # Parts.

    def _forget(self, key: LockKey) -> None:
        if self._owners.pop(key, None) is None:
            return
        del self._positions[key]
        of_group = self._groups[key.group]
        del of_group[key]
        if not of_group:
            del self._groups[key.group]

    def _carried(self, keys: Sequence[LockKey], cut: int) -> bytes:
        """A record that says again those of the locks whose newest record stands before `cut`. The writer."""
        alive = [key for key in keys if self._positions.get(key, cut) < cut]
        return locks_record((key, self._owners[key]) for key in alive)

    def _load(self, content: Any) -> None:
        owners: dict[LockKey, LockOwner] = {}
        positions: dict[LockKey, int] = {}
        for group, topic, incarnation, queue_id, token, client_id, nonce, is_member, at_ms, position in content["locks"]:
            key = LockKey(str(group), str(topic), int(incarnation), int(queue_id))
            owners[key] = LockOwner(int(token), str(client_id), int(nonce), bool(is_member), int(at_ms))
            positions[key] = int(position)
        self._owners, self._positions = owners, positions
        self._groups = {}
        for key, owner in owners.items():
            self._groups.setdefault(key.group, {})[key] = owner


def locks_record(changes: Iterable[tuple[LockKey, LockOwner | None]]) -> bytes:
    """The body of a record that says who has which queue from here on; b"" if nothing changes."""
    return LocksRecord(
        locks=[
            QueueLock(
                consumer_group=key.group,
                topic=key.topic,
                topic_incarnation=key.incarnation,
                queue_id=key.queue_id,
                token=owner.token if owner is not None else 0,
                client_id=owner.client_id if owner is not None else "",
                nonce=owner.nonce if owner is not None else 0,
                is_member=owner is not None and owner.is_member,
                locked_at_ms=owner.locked_at_ms if owner is not None else 0,
            )
            for key, owner in changes
        ]
    ).SerializeToString()
