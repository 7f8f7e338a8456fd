"""What groups have popped: a state machine over the log.

    record of %SYS%POP       its body is a PopRecord (state.proto): hand-outs, acknowledgements and the like, of many queues and groups
    config/popState.json     {"position": n, "time_ms": t, "queues": [["<a PoppedQueue that says everything, base64>", since, until], …]}

Rules:
- The records are the truth; the file is a cache. `popped_queue.py` says what one queue of a group is.
- A queue whose first needed record stands in what is deleted next is said again, whole.
- A reset says the whole of a queue, too, with nothing open. A queue that was said whole is another object. So whoever planned a hand-out or
  a copy with the former one sees that the plan is out of date.
- `time_ms` is the newest pop time that a record tells. Pop time goes on from there when a broker starts. The time in between does not
  count, whatever the wall clock says. So a message is invisible at least for the time that its holder was given.
- Who plans a hand-out and who appends it are two threads: `lock` is held while a queue is asked, and while a record is applied.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import DecodeError

from protomq.v1.state_pb2 import PoppedQueue, PopRecord
from protomq.wire.runs import count_in, runs_of
from protomq.wire.topics import POP_TOPIC, retry_topic
from protomq_broker.store.files.disk import Disk

from .acknowledged import Acknowledged, Remembered
from .machine import Carrier, Snapshot
from .popped_queue import OpenMessages, QueueOfGroup
from .snapshots import SnapshotFiles

log = logging.getLogger(__name__)

QUEUES_MAX: Final = 100_000
"""Queues of groups: each group pops each queue of its topics. Some KiB each."""
CARRIED_OPEN_COUNT: Final = 1_000
"""Open messages in a slice of what is carried forward, if they are of several queues."""
_MALFORMED: Final = (DecodeError, ValueError, IndexError)


class PopState:
    """`apply`, and what `carry` gives: the writer thread. Everything else: any thread, with `lock` where it says so.

    Attributes:
        replay_from: after the construction: the records before this position are in it already.
        deleted: topics that were deleted, and where the log ended then. They are known before any record is applied.
        time_ms: newest pop time that a record tells; 0: none does.
        handed_out_count, acked_count, dead_count, lost_count: messages, since the start.
    """

    topic = POP_TOPIC

    def __init__(self, disk: Disk, path: str, log_start: int, end_position: int) -> None:
        """Reads the cache of a log that goes from `log_start` to `end_position`."""
        self._files = SnapshotFiles(disk, path)
        self.deleted: Callable[[], Mapping[str, int]] = dict
        self.lock = threading.Lock()
        self._queues: dict[QueueOfGroup, OpenMessages] = {}
        self._remembered = Remembered()
        self._queue_counts: dict[tuple[str, str], int] = {}
        """One more than the highest queue that each group has popped of each topic."""
        self.time_ms = 0
        self.handed_out_count = self.acked_count = self.dead_count = self.lost_count = 0
        self._change_count = 0
        self._saved_count = 0
        self._end_position = 0
        self.replay_from = self._files.load(self._load, log_start, end_position)

    # The machine.

    def apply(self, body: bytes, position: int) -> Sequence[str]:
        """Takes the body of the record at `position`; one that does not hold changes nothing, and is said."""
        try:
            record = PopRecord.FromString(body)
            _check(record)
        except _MALFORMED:
            log.error("the record of %s at position %d is damaged", POP_TOPIC, position)
            return ()
        with self.lock:
            self.time_ms = max(self.time_ms, record.time_ms)
            for group in record.deleted_groups:
                for key in [key for key in self._queues if key.group == group]:
                    del self._queues[key]
                    self._queue_counts.pop((key.group, key.topic), None)
            for told in record.queues:
                self._take(told, position, record.time_ms)
            self._change_count += 1
            self._end_position = position + 1
        return ()

    def _take(self, told: PoppedQueue, position: int, time_ms: int) -> None:
        key = QueueOfGroup(told.consumer_group, told.topic, told.queue_id)
        known = self._queues.get(key)
        if (
            known is None
            or known.incarnation != told.topic_incarnation
            or (told.whole and position >= known.until)
            # Of a deleted topic, whose incarnation was given to the next one of its name.
            or known.until <= self.deleted().get(key.topic, 0) <= position
        ):
            acknowledged = self._nothing_acknowledged(told, time_ms)
            if known is not None and (known.incarnation, known.next_offset) == (told.topic_incarnation, told.next_offset):
                # It is said again. After a reset, what was acknowledged may come again.
                acknowledged = known.acknowledged
            known = self._add(OpenMessages(key, told.topic_incarnation, position, acknowledged))
        newest_number = known.hand_out_count
        known.take(told, position)
        if not told.whole:
            for hand_out in told.hand_outs:
                if hand_out.number > newest_number:  # Not one that is said again, since nobody has seen the delivery.
                    self.handed_out_count += count_in(hand_out.runs)
            if told.acked_runs:
                self.acked_count += count_in(told.acked_runs)
            if told.dead_runs:
                self.dead_count += count_in(told.dead_runs)
            if told.lost_runs:
                self.lost_count += count_in(told.lost_runs)

    def _nothing_acknowledged(self, told: PoppedQueue, time_ms: int) -> Acknowledged:
        """Knows nothing of the hand-outs before what is told here. Those of a group that was deleted had other numbers."""
        return Acknowledged(self._remembered, told.hand_out_count, time_ms)

    def _add(self, known: OpenMessages) -> OpenMessages:
        key = known.key
        self._queues[key] = known
        name = (key.group, key.topic)
        self._queue_counts[name] = max(self._queue_counts.get(name, 0), key.queue_id + 1)
        return known

    def begin_counting(self) -> None:
        """A start has read everything: what comes now happens."""
        self.handed_out_count = self.acked_count = self.dead_count = self.lost_count = 0

    def carry(self, cut: int) -> Sequence[Carrier]:
        """See `StateMachine`."""
        slices: list[list[QueueOfGroup]] = []
        open_count = CARRIED_OPEN_COUNT
        with self.lock:
            for key, known in self._queues.items():
                if known.since >= cut:
                    continue
                if open_count >= CARRIED_OPEN_COUNT:
                    slices.append([])
                    open_count = 0
                slices[-1].append(key)
                open_count += 10 + len(known.open)
        return [Carrier(partial(self._statement_of, cut=cut), keys) for keys in slices]

    def _statement_of(self, keys: Sequence[QueueOfGroup], cut: int) -> bytes:
        record = PopRecord(time_ms=self.time_ms)
        for key in keys:
            known = self._queues.get(key)
            if known is not None and known.since < cut:
                record.queues.append(known.statement())
        return record.SerializeToString() if record.queues else b""

    def unsaved(self) -> Snapshot | None:
        """See `StateMachine`."""
        change_count = self._change_count
        if change_count == self._saved_count:
            return None
        with self.lock:
            keys = list(self._queues)
        queues = []
        for key in keys:
            with self.lock:  # for one queue at a time: the writer must not wait for all of them
                known = self._queues.get(key)
                if known is not None:
                    queues.append((known.statement(), known.since, known.until))
        time_ms = self.time_ms

        def save(position: int) -> None:
            texts = [
                [base64.b64encode(told.SerializeToString()).decode(), since, until]
                for told, since, until in queues
            ]
            self._files.save({"position": position, "time_ms": time_ms, "queues": texts})
            self._saved_count = change_count

        return Snapshot(self._end_position, save)

    def _load(self, content: Any) -> None:
        queues: list[OpenMessages] = []
        for text, since, until in content["queues"]:
            told = PoppedQueue.FromString(base64.b64decode(text))
            key = QueueOfGroup(told.consumer_group, told.topic, told.queue_id)
            known = OpenMessages(key, told.topic_incarnation, int(since), self._nothing_acknowledged(told, content["time_ms"]))
            known.take(told, int(since))
            known.until = int(until)
            queues.append(known)
        self.time_ms = int(content["time_ms"])
        for known in queues:
            self._add(known)

    # Questions.

    def lost_with(self, topic: str) -> bytes:
        """The body of a record that gives up messages. This topic is that of a group's retries, and has all that is left of them.

        b"": there are none. The writer.
        """
        record = PopRecord(time_ms=self.time_ms)
        with self.lock:
            for key, known in self._queues.items():
                if known.moved and retry_topic(key.group) == topic:
                    record.queues.add(
                        consumer_group=key.group,
                        topic=key.topic,
                        topic_incarnation=known.incarnation,
                        queue_id=key.queue_id,
                        lost_runs=runs_of(sorted(known.moved)),
                    )
        return record.SerializeToString() if record.queues else b""

    def find(self, key: QueueOfGroup, incarnation: int) -> OpenMessages | None:
        """The queue as the group pops it; None if it never has, in this incarnation of the topic. Under the lock."""
        known = self._queues.get(key)
        return known if known is not None and known.incarnation == incarnation else None

    def open_queues_from(self, group: str, topic: str, incarnation: int, first: int) -> list[int]:
        """Queues from `first` on in which messages of the group are open. Under the lock."""
        return [
            queue_id
            for queue_id in range(first, self._queue_counts.get((group, topic), 0))
            if (known := self.find(QueueOfGroup(group, topic, queue_id), incarnation)) is not None and known.open
        ]

    def has_room(self) -> bool:
        """Whether a group may begin to pop another queue."""
        return len(self._queues) < QUEUES_MAX

    def has_group(self, group: str) -> bool:
        """Whether the group has popped anything."""
        with self.lock:
            return any(key.group == group for key in self._queues)

    def groups(self) -> dict[str, list[str]]:
        """All groups that have popped, each with its topics."""
        groups: dict[str, set[str]] = {}
        with self.lock:
            for key in self._queues:
                groups.setdefault(key.group, set()).add(key.topic)
        return {group: sorted(topics) for group, topics in groups.items()}

    def groups_of(self, topic: str, incarnation: int) -> dict[str, set[int]]:
        """The groups that have popped this incarnation of a topic, and which of its queues."""
        groups: dict[str, set[int]] = {}
        with self.lock:
            for key, known in self._queues.items():
                if key.topic == topic and known.incarnation == incarnation:
                    groups.setdefault(key.group, set()).add(key.queue_id)
        return groups

    def queue_ids(self, group: str, topic: str) -> list[int]:
        """The queues of the topic that the group has popped."""
        with self.lock:
            return self._queue_ids(group, topic)

    def _queue_ids(self, group: str, topic: str) -> list[int]:
        queue_count = self._queue_counts.get((group, topic), 0)
        return [queue_id for queue_id in range(queue_count) if QueueOfGroup(group, topic, queue_id) in self._queues]

    def queues(self) -> Iterator[OpenMessages]:
        """All of them, as they are now; what is asked of each is asked under the lock."""
        with self.lock:
            return iter(list(self._queues.values()))

    def keep(self, incarnation_of: Callable[[str], int | None], deleted: Mapping[str, int] = MappingProxyType({})) -> None:
        """Forgets the queues of topics that are not there, or in another incarnation. `deleted`: see `ConsumerOffsets.keep`."""
        with self.lock:
            gone = [
                key
                for key, known in self._queues.items()
                if incarnation_of(key.topic) != known.incarnation or known.until <= deleted.get(key.topic, 0)
            ]
            self._forget(gone)

    def forget_topic(self, topic: str) -> None:
        """The topic is gone, and with it what was popped of it."""
        with self.lock:
            self._forget([key for key in self._queues if key.topic == topic])

    def _forget(self, gone: Sequence[QueueOfGroup]) -> None:
        for key in gone:
            del self._queues[key]
            self._change_count += 1
        for group, topic in {key[:2] for key in gone}:
            queue_ids = self._queue_ids(group, topic)
            if queue_ids:
                self._queue_counts[group, topic] = queue_ids[-1] + 1
            else:
                del self._queue_counts[group, topic]


def _check(record: PopRecord) -> None:
    """Raises ValueError for columns that do not fit together."""
    for told in record.queues:
        odd = len(told.acked_runs) | len(told.dead_runs) | len(told.lost_runs) | len(told.waiting_runs)
        for parts in (told.changes, told.hand_outs, told.errors):
            for part in parts:
                odd |= len(part.runs)
        if (
            odd & 1
            or len(told.grouped_offsets) != len(told.sharding_hashes)
            or len(told.moved_offsets) != len(told.retry_offsets)
            or len(told.moved_store_times_ms) not in {0, len(told.moved_offsets)}
        ):
            raise ValueError("columns of different lengths")
