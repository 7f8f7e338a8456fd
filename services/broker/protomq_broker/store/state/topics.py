"""The topics of a broker: names, configuration, and the file that keeps them.

    config/topics.json   {"version": {"counter": n, "time_ms": t}, "topics": [{"name": …, "write_queues": …, …}, …],
                          "deleted": {"<name>": position, …}}      with a checksum: side_files.py

Rules:
- A change is on the disk before it is visible; if the disk refuses it, nothing has changed. But a topic that is made by its first message
  (`add`) is visible at once and in the file half a second later (`save`): its message names it, so that a start finds it in the log.
- A topic has an incarnation: a number that it gets when it is made and keeps until it is deleted; random, or for one that its first message
  makes, a hash with the store's random number in it. What clients remember of a topic,
  offsets above all, belongs to one incarnation and means nothing in the next one of the same name.
- Readers see an immutable snapshot and take no lock.
- Of a deleted topic the file keeps where the log ended then: what the log has of that name in front of it belongs to nobody, not even to
  a topic of the same name that was made since. A recovery needs to know that.
- Names with a percent sign belong to the system: such topics exist in the store, but are never found, listed, created or deleted here.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from protomq.wire.topics import (
    QUEUES_DEFAULT,
    QUEUES_MAX,
    is_user_name,
    why_no_group,
    why_no_topic,
)
from protomq_broker.store.errors import StoreError
from protomq_broker.store.files.disk import Disk
from protomq_broker.store.files.side_files import (
    SideFileDamagedError,
    read_json_file,
    write_json_text,
)

log = logging.getLogger(__name__)

INCARNATION_MAX: Final = (1 << 63) - 1


class InvalidNameError(StoreError):
    """A name that a topic or a group cannot have."""


def require_topic_name(name: str) -> None:
    """Raises InvalidNameError unless clients may have a topic of this name."""
    _refuse(why_no_topic(name))


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
    """

    name: str
    write_queues: int = QUEUES_DEFAULT
    read_queues: int = QUEUES_DEFAULT
    readable: bool = True
    writable: bool = True
    incarnation: int = field(default=0, compare=False)

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
    """The clients' topics. Any thread may call; changes take a lock and wait for the disk.

    Attributes:
        on_change: called after each change, on the thread that made it.
        was_lost: there was no file, or none that could be read.
    """

    def __init__(
        self,
        disk: Disk,
        path: str,
        now_ms: Callable[[], int],
        draw_incarnation: Callable[[], int] | None = None,
    ) -> None:
        """`draw_incarnation` gives numbers of 63 bits, never 0 or one twice; without it the time and the count of changes make them."""
        self.on_change: Callable[[], None] = _nothing
        self._draw_incarnation = draw_incarnation or self._next_incarnation
        self._disk = disk
        self._path = path
        self._now_ms = now_ms
        self._lock = threading.Lock()  # of the file: held while the disk is waited for
        self._publishing = threading.Lock()  # of what is in memory: never held over a write
        self._is_behind = False  # the file lacks topics that were added
        self._lines: dict[
            str, str
        ] = {}  # each topic as it stands in the file, so that a change encodes one topic only
        content = _read(disk, path)
        loaded = _decode(content)
        self._deleted = _decode_deleted(content)
        self.was_lost = loaded is None
        self._snapshot = loaded or TopicsSnapshot(TopicsVersion(0, 0), MappingProxyType({}))
        _warn_of_unreadable_queues(self._snapshot.topics)
        self._by_name = self._snapshot.by_name
        self._lines = {topic.name: _encode(topic) for topic in self._by_name.values()}

    def snapshot(self) -> TopicsSnapshot:
        """All topics and their version, as they are now."""
        return self._snapshot

    def find(self, name: str) -> TopicConfig | None:
        """The topic, None if there is none."""
        return self._by_name.get(name)

    def all(self) -> list[TopicConfig]:
        """All topics, by name."""
        return self._snapshot.topics

    def create(self, topic: TopicConfig) -> TopicConfig:
        """Adds a topic; if there is one of that name already, that one stays and is the result. Raises InvalidNameError, OSError."""
        require_topic_name(topic.name)
        with self._lock:
            existing = self._by_name.get(topic.name)
            if existing is not None:
                return existing
            self._change([self._with_incarnation(topic)], ())
            made = self._by_name[topic.name]
        self.on_change()
        return made

    def add(self, topic: TopicConfig) -> None:
        """Adds a topic, if there is none of that name, without waiting for the disk; the log has a message that names it."""
        require_topic_name(topic.name)
        with self._publishing:
            if topic.name in self._by_name:
                return
            self._publish([self._with_incarnation(topic)], ())
            self._is_behind = True
        self.on_change()

    def save(self) -> None:
        """Writes down what was added since the last change. Raises OSError; then the next call tries again."""
        if self._is_behind:
            with self._lock:
                self._write([], (), self._deleted)

    def put(self, topics: Sequence[TopicConfig]) -> list[TopicConfig]:
        """Adds topics or gives them another configuration, all or none; one write, however many. The result is what they are now.

        Raises InvalidNameError, IncarnationGivenError, OSError.
        """
        for topic in topics:
            require_topic_name(topic.name)
        with self._lock:
            wanted = [self._with_incarnation(topic) for topic in topics]
            changed = [topic for topic in wanted if self._by_name.get(topic.name) != topic]
            if not changed:
                return wanted
            self._change(changed, ())
            made = [self._by_name[topic.name] for topic in topics]
        self.on_change()
        return made

    def delete(
        self,
        name: str,
        position: int = 0,
        clean_up: Callable[[], None] = lambda: None,
        remove: Callable[[Callable[[], None]], None] = lambda publish: publish(),
    ) -> bool:
        """Removes a topic; whether there was one. What the log has of it in front of `position` is gone with it. Raises OSError.

        `remove` is given the function that takes the topic out of sight, when the file has it no more. `clean_up` is called
        when the topic is gone and before `put` or `create` can make one of that name.
        """
        with self._lock:
            if name not in self._by_name:
                return False
            deleted = {**self._deleted, name: position}
            self._write([], [name], deleted)
            self._deleted = deleted

            def publish() -> None:
                with self._publishing:
                    if name in self._by_name:
                        self._publish([], [name])

            remove(publish)
            clean_up()
        self.on_change()
        return True

    @property
    def deleted(self) -> Mapping[str, int]:
        """Names of topics that were deleted, and where the log ended then."""
        return self._deleted

    def move_deleted(self, name: str, position: int) -> None:
        """A topic was deleted, and the log had grown to `position` by then. Raises OSError."""
        with self._lock:
            if self._deleted.get(name, position) < position:
                self._change([], [], {**self._deleted, name: position})

    def forget_deleted(self, log_start: int) -> None:
        """The log has nothing in front of `log_start` any more: earlier deletions need not be known. The next change leaves them out."""
        with self._lock:
            self._deleted = {
                name: position for name, position in self._deleted.items() if position > log_start
            }

    def restore(
        self,
        queue_counts: Mapping[str, int],
        queues_default: int = QUEUES_DEFAULT,
        incarnations: Mapping[str, int] = MappingProxyType({}),
    ) -> list[TopicConfig]:
        """Makes the topics that the consume queues tell of and the file does not, with as many queues as were ever used, the
        default at least; the result are those that were made. Names that no client could have chosen are left out.

        `incarnations`: those that can be told; the others are drawn.
        """
        found = []
        for name, count in queue_counts.items():
            if not is_user_name(name) or name in self._by_name:
                continue
            queues = min(max(count, queues_default), QUEUES_MAX)
            topic = TopicConfig(
                name,
                write_queues=queues,
                read_queues=queues,
                incarnation=incarnations.get(name, 0),
            )
            found.append(self._with_incarnation(topic))
        if found:
            with self._lock:
                self._change(found, ())
            self.on_change()
        self.was_lost = False
        return found

    def _with_incarnation(self, topic: TopicConfig) -> TopicConfig:
        """The topic with the incarnation that it has, or is to have. Raises IncarnationGivenError."""
        existing = self._by_name.get(topic.name)
        if existing is None:
            return replace(topic, incarnation=topic.incarnation or self._draw_incarnation())
        if topic.incarnation not in (0, existing.incarnation):
            raise IncarnationGivenError(topic.name, topic.incarnation, existing.incarnation)
        return replace(topic, incarnation=existing.incarnation)

    def _next_incarnation(self) -> int:
        return incarnation_of_first(0, str(self._now_ms()), self._snapshot.version.counter)

    def _change(
        self,
        put: Iterable[TopicConfig],
        removed: Iterable[str],
        deleted: Mapping[str, int] | None = None,
    ) -> None:
        deleted = self._deleted if deleted is None else dict(deleted)
        put, removed = list(put), list(removed)
        self._write(put, removed, deleted)
        self._deleted = deleted
        with self._publishing:
            self._publish(put, removed)

    def _write(
        self,
        put: Sequence[TopicConfig],
        removed: Iterable[str],
        deleted: Mapping[str, int],
    ) -> None:
        """Writes the file as it is with this change, which is not visible yet."""
        with self._publishing:
            lines, version = dict(self._lines), self._snapshot.version
            was_behind, self._is_behind = self._is_behind, False
        if put or removed:
            version = self._next_version(version)
        lines.update((topic.name, _encode(topic)) for topic in put)
        for name in removed:
            del lines[name]
        head = json.dumps(version._asdict(), sort_keys=True)
        body = ",\n".join(map(lines.__getitem__, sorted(lines)))
        gone = f',\n"deleted": {json.dumps(deleted, sort_keys=True)}' if deleted else ""
        try:
            write_json_text(
                self._disk,
                self._path,
                f'{{"version": {head},\n"topics": [\n{body}\n]{gone}}}',
            )
        except BaseException:
            self._is_behind |= was_behind
            raise

    def _publish(self, put: Iterable[TopicConfig], removed: Iterable[str]) -> None:
        """Makes a change visible. The caller holds `_publishing`.

        A topic that `add` made while the file was written keeps its incarnation: messages and offsets belong to that one already.
        """
        by_name, lines = dict(self._by_name), dict(self._lines)
        for topic in put:
            existing = by_name.get(topic.name)
            if existing is not None and existing.incarnation != topic.incarnation:
                topic = replace(topic, incarnation=existing.incarnation)
                self._is_behind = True
            by_name[topic.name] = topic
            lines[topic.name] = _encode(topic)
        for name in removed:
            del by_name[name], lines[name]
        self._lines = lines
        version = self._next_version(self._snapshot.version)
        self._snapshot = TopicsSnapshot(version, MappingProxyType(by_name))
        self._by_name = by_name

    def _next_version(self, old: TopicsVersion) -> TopicsVersion:
        return TopicsVersion(max(self._now_ms(), old.time_ms), old.counter + 1)


def _read(disk: Disk, path: str) -> Any | None:
    try:
        return read_json_file(disk, path)
    except SideFileDamagedError as error:
        log.error("%s: the topics are restored from the log, with default settings", error)
        return None


def _warn_of_unreadable_queues(topics: Iterable[TopicConfig]) -> None:
    """Earlier versions took fewer read than write queues: what is sent to the others is stored, and nobody can read it."""
    for topic in topics:
        if topic.read_queues < topic.write_queues:
            log.warning(
                "topic %r has %d write queues and %d read queues: what is sent to the others cannot be read; raise its read queues to %d",
                topic.name, topic.write_queues, topic.read_queues, topic.write_queues,
            )  # fmt: skip


def _encode(topic: TopicConfig) -> str:
    return json.dumps(asdict(topic))


def _decode(value: Any) -> TopicsSnapshot | None:
    """The snapshot in the parsed file; None if that is not what `TopicTable` writes."""
    known = {field.name for field in fields(TopicConfig)}
    try:
        topics = [
            TopicConfig(**{name: setting for name, setting in entry.items() if name in known})
            for entry in value["topics"]
        ]
        version = TopicsVersion(int(value["version"]["time_ms"]), int(value["version"]["counter"]))
        for topic in topics:
            require_topic_name(topic.name)
            if not topic.incarnation:
                raise ValueError(f"topic {topic.name!r} has no incarnation")
    except (AttributeError, InvalidNameError, KeyError, TypeError, ValueError):
        return None
    return TopicsSnapshot(version, MappingProxyType({topic.name: topic for topic in topics}))


def read_deleted(disk: Disk, path: str) -> dict[str, int]:
    """`TopicTable.deleted` as the file has it; nothing if it is lost or damaged."""
    return _decode_deleted(_read(disk, path))


def _decode_deleted(value: Any) -> dict[str, int]:
    found = value.get("deleted") if isinstance(value, dict) else None
    if not isinstance(found, dict):
        return {}
    return {name: at for name, at in found.items() if type(at) is int}


def _nothing() -> None:
    pass
