"""The topics of a broker: names, configuration, and what was deleted; a state machine over the log.

    record of %SYS%TOPICS   its body is a TopicsRecord (state.proto): topics that were created or changed, or deleted
    config/topics.json      {"position": n, "version": {"counter": n, "time_ms": t}, "deleted": {"<name>": position, …},
                             "topics": [{"name": …, "write_queues": …, …, "position": n}, …]}

Rules:
- The records are the truth, the file is a cache (`snapshots.py`). A topic's `position` is where its newest record stands.
- All changes are made on the writer thread, in the turn that appends their record. Nobody waits for the disk here: whoever answers a caller
  waits until the record is stored, as for a send.
- A topic that is made by its first message gets its record in the same turn (`add`). Where the log takes no record, its messages report
  it, and the next start appends the record.
- A topic has an incarnation: a number that it gets when it is created and keeps until it is deleted. The number is random; if its first
  message creates the topic, it is a hash with the store's random number in it. What clients remember of a topic, offsets above all, belongs
  to one incarnation and means nothing in the next one of the same name.
- Readers see an immutable snapshot and take no lock.
- What the log has of a topic before its deletion belongs to nobody, not even to a later topic of the same name (`deleted`). That record
  needs no carrying forward: the log goes from its front, so what it takes away goes before it does.
- Topics of groups (%RETRY%group, %DLQ%group) are made by the broker, with one queue, and no client may write them.
- Other names with a percent sign belong to the system: such topics exist in the store, but are never found, listed or deleted here.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from protomq.v1.state_pb2 import EarlierDeletion, TopicsRecord
from protomq.v1.topic_pb2 import DataVersion, Permission, Topic, TopicType
from protomq.wire.topics import (
    QUEUES_DEFAULT,
    QUEUES_MAX,
    TOPICS_TOPIC,
    group_of,
    is_user_name,
    rules_of,
    why_no_group,
    why_no_topic,
)
from protomq_broker.store.errors import StoreError
from protomq_broker.store.files.disk import Disk

from .machine import Carrier, Snapshot, StateAppend
from .new_queues import Growth
from .snapshots import SnapshotFiles

log = logging.getLogger(__name__)

INCARNATION_MAX: Final = (1 << 63) - 1
CARRIED_COUNT: Final = 500
"""Topics in a slice of what is carried forward."""
NOWHERE: Final = -1
"""Position of the record of a topic of which no record tells yet: before everything."""


class InvalidNameError(StoreError):
    """A name that a topic or a group cannot have."""


def require_topic_name(name: str) -> None:
    """Raises InvalidNameError unless clients may have a topic of this name."""
    _refuse(why_no_topic(name))


def require_known_name(name: str) -> None:
    """Raises InvalidNameError unless a user or a group may have a topic of this name."""
    if group_of(name) is None:
        require_topic_name(name)


def require_group_name(name: str) -> None:
    """Raises InvalidNameError unless this can be the name of a consumer group."""
    _refuse(why_no_group(name))


def _refuse(reason: str) -> None:
    if reason:
        raise InvalidNameError(reason)


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic on this broker.

    Attributes:
        name: the name.
        write_queues: queues 0 to write_queues - 1 can be written; 1 to 1,024.
        read_queues: queues 0 to read_queues - 1 can be read; 1 to 1,024.
        readable: clients may consume.
        writable: clients may send.
        incarnation: 1 to 2^63 - 1; 0 in a wish: as it is, or for a new topic whatever the table draws. It does not count in comparisons.
        type: which messages it takes. MIXED, unless somebody chooses: a topic that its first message makes, and one that is older than
            types, must go on taking what it took.
        closed_from: its permission before somebody closed it for a while (`cluster drain`); UNSPECIFIED: nobody did.
    """

    name: str
    write_queues: int = QUEUES_DEFAULT
    read_queues: int = QUEUES_DEFAULT
    readable: bool = True
    writable: bool = True
    incarnation: int = field(default=0, compare=False)
    type: TopicType.ValueType = TopicType.TOPIC_TYPE_MIXED
    closed_from: Permission.ValueType = Permission.PERMISSION_UNSPECIFIED

    def __post_init__(self) -> None:
        for count in (self.write_queues, self.read_queues):
            if not 1 <= count <= QUEUES_MAX:
                raise ValueError(f"a topic has 1 to {QUEUES_MAX} queues, not {count}")
        if not 0 <= self.incarnation <= INCARNATION_MAX:
            raise ValueError(f"an incarnation is 0 to 2^63 - 1, not {self.incarnation}")


class IncarnationGivenError(StoreError):
    """A topic was to be made with an incarnation, and exists with another one.

    Attributes: topic: its name; wanted, current: the incarnations.
    """

    def __init__(self, topic: str, wanted: int, current: int) -> None:
        super().__init__(
            f"topic {topic!r} exists with the incarnation {current}, not {wanted}: delete it first, or leave the incarnation out"
        )
        self.topic = topic
        self.wanted = wanted
        self.current = current


def incarnation_of_first(store_id: int, name: str, position: int) -> int:
    """Incarnation of a topic that was made by its first message: by the store and by where that message stands in its log.

    So a start finds the same, and another store of the broker's name, with the same messages even, has another.
    """
    digest = blake2b(f"{store_id} {name} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 or 1


def topic_of_broker(name: str, queues: int = 1) -> TopicConfig:
    """A topic as the broker makes it by itself: clients may write it if it is a user's."""
    return TopicConfig(name, queues, queues, writable=rules_of(name).send)


class TopicsVersion(NamedTuple):
    """Orders the states of the topics: when the last change was made, and how many there were since the store was made."""

    time_ms: int
    counter: int


@dataclass(frozen=True, slots=True)
class TopicsSnapshot:
    """The topics at one moment."""

    version: TopicsVersion
    by_name: Mapping[str, TopicConfig]

    @property
    def topics(self) -> list[TopicConfig]:
        """The topics, by name."""
        return [self.by_name[name] for name in sorted(self.by_name)]


class TopicTable:
    """The clients' topics. Questions: any thread; changes and `apply`: the writer.

    Attributes:
        append: how changes get into the log; set before the first one.
        before_growth: called on the writer before a record gives topics more queues to read. What it appends stands before that record.
        on_change: called after each change, on the writer.
        on_applied: called after each record, on the writer: of a slave, where nobody asks for changes.
        replay_from: after the construction: the records before this position are in it already.
    """

    topic = TOPICS_TOPIC

    def __init__(
        self,
        disk: Disk,
        path: str,
        now_ms: Callable[[], int],
        draw_incarnation: Callable[[], int] | None = None,
        *,
        log_start: int = 0,
    ) -> None:
        """Reads the cache of a log that begins at `log_start`; `believe` comes when its end is known.

        `draw_incarnation` gives numbers of 63 bits, never 0 or one twice; without it the time and the count of changes make them.
        """
        self.append: StateAppend | None = None
        self.before_growth: Callable[[Sequence[Growth]], None] = _ignore
        self.on_change: Callable[[], None] = _nothing
        self.on_applied: Callable[[], None] = _nothing
        self._draw_incarnation = draw_incarnation or self._next_incarnation
        self._files = SnapshotFiles(disk, path)
        self._now_ms = now_ms
        self._lock = threading.Lock()  # of what is below: held while it changes and is copied
        self._log_start = log_start
        self._start(1 << 63)

    def _start(self, end_position: int) -> None:
        self._by_name: dict[str, TopicConfig] = {}
        self._positions: dict[str, int] = {}
        self._version = TopicsVersion(0, 0)
        self._snapshot: TopicsSnapshot | None = None  # made when somebody asks for it
        self._deleted: Mapping[str, int] = {}
        self._untold: dict[str, int] = {}  # deletions that a file of an earlier version reports
        self._change_count = self._saved_count = 0
        self._end_position = 0  # behind the start of the last record that was applied
        self.replay_from = self._files.load(self._load, self._log_start, end_position)
        self.forget_deleted(self._log_start)

    def believe(self, end_position: int) -> bool:
        """The log ends there: whether the cache has no more than the log. If it did, it is ignored."""
        if self.replay_from <= end_position:
            _warn_of_unreadable_queues(self._by_name.values())
            return True
        self._start(end_position)
        return False

    # Questions.

    def snapshot(self) -> TopicsSnapshot:
        """All topics and their version, as they are now."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = TopicsSnapshot(
                    self._version, MappingProxyType(dict(self._by_name))
                )
            return self._snapshot

    def find(self, name: str) -> TopicConfig | None:
        """The topic, None if there is none."""
        return self._by_name.get(name)

    def all(self) -> list[TopicConfig]:
        """All topics, by name."""
        return self.snapshot().topics

    def is_recorded(self, name: str, position: int) -> bool:
        """Whether the newest record of a topic stands before this position. One that was made by its messages may have none yet."""
        return NOWHERE < self._positions.get(name, NOWHERE) < position

    @property
    def deleted(self) -> Mapping[str, int]:
        """Names of topics that were deleted, and up to where what the log has of them is gone."""
        return self._deleted

    # Changes.

    def create(self, topic: TopicConfig) -> TopicConfig:
        """Adds a topic, a user's or a group's; if there is one of that name already, that one stays and is the result. Raises as `put`."""
        require_known_name(topic.name)
        existing = self._by_name.get(topic.name)
        if existing is not None:
            return existing
        made = self._with_incarnation(topic)
        self._change(self._record([made]))
        return made

    def put(self, topics: Sequence[TopicConfig]) -> list[TopicConfig]:
        """Adds topics or gives them another configuration, all or none; one record, however many. The result is what they are now.

        Raises InvalidNameError, IncarnationGivenError, and what `StateAppend` raises.
        """
        for topic in topics:
            require_topic_name(topic.name)
        wanted = [self._with_incarnation(topic) for topic in topics]
        changed = [topic for topic in wanted if self._by_name.get(topic.name) != topic]
        growths = list(filter(None, map(self._growth_to, changed)))
        if growths:
            self.before_growth(growths)
        if changed:
            self._change(self._record(changed))
        return wanted

    def delete(self, name: str, append: StateAppend | None = None) -> bool:
        """Removes a topic, and with it what the log has of it; whether there was one. `append`: appends the record with what goes with it.
        Raises what `StateAppend` raises.
        """
        if name not in self._by_name:
            return False
        self._change(self._record((), [name]), append)
        return True

    def add(self, topics: Iterable[TopicConfig]) -> int:
        """Adds topics that their first messages make, unless there are some of these names; where the record ends, 0 for none.

        The messages are in the log. So the topic is there even if the log takes no record of it; it gets one at the next start at the
        latest.
        """
        new: dict[str, TopicConfig] = {}
        for topic in topics:
            if topic.name not in self._by_name:
                new.setdefault(topic.name, topic)
        if not new:
            return 0
        made = list(map(self._with_incarnation, new.values()))
        assert self.append is not None
        end_position = 0
        try:
            end_position = self.append(self._record(made))
        except StoreError as error:
            log.warning("topics %s have no record yet: %s", sorted(new), error)
            self._enter(made, NOWHERE, self._next_version())
        self.on_change()
        return end_position

    def restore(
        self,
        queue_counts: Mapping[str, int],
        queues_default: int = QUEUES_DEFAULT,
        incarnations: Mapping[str, int] = MappingProxyType({}),
    ) -> list[TopicConfig]:
        """Creates the topics that the consume queues have and no record names. Each gets as many queues as were ever
        used, at least the default. Returns the topics that it created. Those of the system are left out.

        `incarnations`: those that can be told; the others are drawn.
        """
        found = []
        for name, count in queue_counts.items():
            if not (is_user_name(name) or group_of(name)) or name in self._by_name:
                continue
            queues = min(max(count, queues_default if is_user_name(name) else 1), QUEUES_MAX)
            topic = replace(topic_of_broker(name, queues), incarnation=incarnations.get(name, 0))
            found.append(self._with_incarnation(topic))
        if found:
            self._enter(found, NOWHERE, self._next_version())
        return found

    def forget_deleted(self, log_start: int) -> None:
        """The log has nothing before `log_start` any more: earlier deletions need not be known. Any thread."""
        with self._lock:
            kept = {name: position for name, position in self._deleted.items() if position > log_start}
            if len(kept) < len(self._deleted):
                self._deleted = kept

    # The machine.

    def apply(self, body: bytes, position: int) -> Sequence[str]:
        """See `StateMachine`; a body that is no TopicsRecord changes nothing, and is said."""
        try:
            record = TopicsRecord.FromString(body)
        except DecodeError:
            log.error("the record of %s at position %d does not parse", TOPICS_TOPIC, position)
            return ()
        gone = list(record.deleted_topics)
        with self._lock:
            if gone or record.earlier_deletions:
                deleted = dict(self._deleted)
                for name, end_position in deletions_in(record, position):
                    deleted[name] = max(end_position, deleted.get(name, 0))
                self._deleted = deleted
            for name in gone:
                self._by_name.pop(name, None)
                self._positions.pop(name, None)
            for deletion in record.earlier_deletions:
                self._untold.pop(deletion.topic, None)
        version = TopicsVersion(record.version.time_ms, record.version.counter)
        self._enter(map(topic_from_message, record.topics), position, version)
        self._end_position = position + 1
        self.on_applied()
        return gone

    def carry(self, cut: int) -> Sequence[Carrier]:
        """See `StateMachine`. The first record has the deletions that only a file of an earlier version reports."""
        with self._lock:
            names = [name for name, position in self._positions.items() if position < cut]
        slices = [
            names[start : start + CARRIED_COUNT] for start in range(0, len(names), CARRIED_COUNT)
        ]
        if self._untold and not slices:
            slices = [[]]
        return [Carrier(partial(self._carried, cut=cut), part) for part in slices]

    def unsaved(self) -> Snapshot | None:
        """See `StateMachine`."""
        with self._lock:
            if self._change_count == self._saved_count:
                return None
            change_count, version = self._change_count, self._version
            positions, deleted = dict(self._positions), self._deleted
            topics = dict(self._by_name)
            end_position = self._end_position

        def save(position: int) -> None:
            head = json.dumps(version._asdict(), sort_keys=True)
            lines = [_encode(topics[name], positions[name]) for name in sorted(topics)]
            gone = json.dumps(deleted, sort_keys=True)
            body = ",\n".join(lines)
            self._files.save_text(
                f'{{"position": {position},\n"version": {head},\n"topics": [\n{body}\n],\n"deleted": {gone}}}'
            )
            self._saved_count = change_count

        return Snapshot(end_position, save)

    # Parts.

    def _change(self, body: bytes, append: StateAppend | None = None) -> None:
        append = append or self.append
        assert append is not None
        append(body)
        self.on_change()

    def _record(self, topics: Iterable[TopicConfig], deleted: Iterable[str] = ()) -> bytes:
        """The body of a record of a change. The writer."""
        version = DataVersion(**self._next_version()._asdict())
        messages = map(topic_to_message, topics)
        return TopicsRecord(
            topics=messages, deleted_topics=deleted, version=version
        ).SerializeToString()

    def _carried(self, names: Sequence[str], cut: int) -> bytes:
        """A record that says again those of the topics whose newest record stands before `cut`. The writer."""
        topics = [self._by_name[name] for name in names if self._positions.get(name, cut) < cut]
        if not topics and not self._untold:
            return b""
        return TopicsRecord(
            topics=map(topic_to_message, topics),
            earlier_deletions=[
                EarlierDeletion(topic=name, end_position=position)
                for name, position in sorted(self._untold.items())
            ],
            version=DataVersion(**self._version._asdict()),
        ).SerializeToString()

    def _enter(self, topics: Iterable[TopicConfig], position: int, version: TopicsVersion) -> None:
        """Makes topics visible; `position` is where their record stands."""
        with self._lock:
            for topic in topics:
                self._by_name[topic.name] = topic
                self._positions[topic.name] = position
            self._version = max(self._version, version)
            self._snapshot = None
            self._change_count += 1

    def _with_incarnation(self, topic: TopicConfig) -> TopicConfig:
        """The topic with the incarnation that it has, or is to have. Raises IncarnationGivenError."""
        existing = self._by_name.get(topic.name)
        if existing is None:
            return replace(topic, incarnation=topic.incarnation or self._draw_incarnation())
        if topic.incarnation not in (0, existing.incarnation):
            raise IncarnationGivenError(topic.name, topic.incarnation, existing.incarnation)
        return replace(topic, incarnation=existing.incarnation)

    def _growth_to(self, topic: TopicConfig) -> Growth | None:
        """What the topic gets by becoming this; None: it has no fewer queues to read, or is new."""
        existing = self._by_name.get(topic.name)
        if existing is None or existing.read_queues >= topic.read_queues:
            return None
        return Growth(topic.name, existing.incarnation, range(existing.read_queues, topic.read_queues))

    def _next_incarnation(self) -> int:
        return incarnation_of_first(0, str(self._now_ms()), self._version.counter)

    def _next_version(self) -> TopicsVersion:
        return TopicsVersion(max(self._now_ms(), self._version.time_ms), self._version.counter + 1)

    def _load(self, content: Any) -> None:
        known = {field.name for field in fields(TopicConfig)}
        entries = [
            (
                TopicConfig(**{name: value for name, value in entry.items() if name in known}),
                int(entry.get("position", NOWHERE)),
            )
            for entry in content["topics"]
        ]
        version = TopicsVersion(
            int(content["version"]["time_ms"]), int(content["version"]["counter"])
        )
        deleted = {str(name): int(at) for name, at in content.get("deleted", {}).items()}
        for topic, _ in entries:
            require_known_name(topic.name)
            if not topic.incarnation:
                raise ValueError(f"topic {topic.name!r} has no incarnation")
        self._by_name = {topic.name: topic for topic, _ in entries}
        self._positions = {topic.name: position for topic, position in entries}
        self._version, self._deleted = version, deleted
        if "position" not in content:  # of an earlier version: no record reports it
            self._untold = {
                name: position for name, position in deleted.items() if position > self._log_start
            }


def deletions_in(record: TopicsRecord, position: int) -> Iterable[tuple[str, int]]:
    """What the record at `position` deletes: a topic, and before where what the log has of it is gone."""
    for deletion in record.earlier_deletions:
        yield deletion.topic, deletion.end_position
    for name in record.deleted_topics:
        yield name, position


_TO_PERMISSION: Final = {
    (False, False): Permission.PERMISSION_NONE,
    (True, False): Permission.PERMISSION_READ,
    (False, True): Permission.PERMISSION_WRITE,
    (True, True): Permission.PERMISSION_READ_WRITE,
}
FROM_PERMISSION: Final = {value: key for key, value in _TO_PERMISSION.items()} | {
    Permission.PERMISSION_UNSPECIFIED: (True, True)
}
"""(readable, writable)."""


def topic_to_message(topic: TopicConfig) -> Topic:
    """The configuration as records and clients see it."""
    return Topic(
        name=topic.name,
        write_queues=topic.write_queues,
        read_queues=topic.read_queues,
        permission=_TO_PERMISSION[(topic.readable, topic.writable)],
        incarnation=topic.incarnation,
        type=topic.type,
        closed_from=topic.closed_from,
    )


def topic_from_message(message: Topic) -> TopicConfig:
    """The configuration that a record tells."""
    readable, writable = FROM_PERMISSION[message.permission]
    return TopicConfig(
        message.name,
        message.write_queues,
        message.read_queues,
        readable,
        writable,
        message.incarnation,
        message.type or TopicType.TOPIC_TYPE_MIXED,
        message.closed_from,
    )


def _warn_of_unreadable_queues(topics: Iterable[TopicConfig]) -> None:
    """Earlier versions took fewer read than write queues: what is sent to the others is stored, and nobody can read it."""
    for topic in topics:
        if topic.read_queues < topic.write_queues:
            log.warning(
                "topic %r has %d write queues and %d read queues: nobody can read what is sent to the others; raise its read queues to %d",
                topic.name, topic.write_queues, topic.read_queues, topic.write_queues,
            )  # fmt: skip


def _encode(topic: TopicConfig, position: int) -> str:
    return json.dumps({**asdict(topic), "position": position})


def _nothing() -> None:
    pass


def _ignore(_: object) -> None:
    pass
