"""What the front of the log tells beside offsets and topics, said again before that front is deleted.

    record of %SYS%LOG   its body is a LogRecord (state.proto): queues' ends and producers as of the record, or where the log begins

Rules:
- A queue's record says its first and its end offset. If all messages of a queue are gone, the log says nothing else of it, and its
  offsets would be given again.
- Producers are carried as long as a send of theirs may be repeated that stood in what goes: 15 minutes of the log's time. Mostly there are
  none, since segments are older. Of each producer the newest runs are told. All runs take no more than a quarter of what goes, so that
  retention frees more than it writes.
- `start` is appended when all else is synced, and synced before anything is deleted: a replica deletes below it, and not before.
- This state has no snapshot: consume queues and the table of repeated sends are its caches, and a replay hands them its records (`tell`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from google.protobuf.message import DecodeError

from protomq.v1.record_pb2 import Record
from protomq.v1.state_pb2 import LogRecord, LogStart, QueueEnds
from protomq.wire.topics import LOG_TOPIC
from protomq_broker.store.queues.consume_queue import ConsumeQueue, ConsumeQueueDamagedError
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from protomq_broker.store.queues.log_reader import LogReader

from .machine import Carrier, Snapshot
from .producer_runs import RUN_FIELDS
from .repeated_sends import RUNS_TOLD_MAX, RepeatedSends
from .send_errors import RETRY_MAX_MS

QUEUES_COUNT: Final = 1_000
"""Queues in a slice of what is carried forward: 1 ms."""
PRODUCERS_COUNT: Final = 100
"""Producers in a slice."""
RUNS_COUNT: Final = 8_192
"""Runs of sequences in a slice. Each has 32 octets, and may be of a queue of its own with the longest name: 2.5 MiB of 4."""

_RECORD_SIZE_BYTES: Final = 128
"""More than a record of %SYS%LOG has beside its body."""

_Queue = tuple[ConsumeQueue, int]
"""A queue, and the first offset that it will have."""


class LogFront:
    """See the module's docstring. A machine of the store's list (`machine.py`)."""

    topic = LOG_TOPIC

    def __init__(
        self,
        queues: ConsumeQueueTable,
        repeated: RepeatedSends,
        *,
        append_size_max_bytes: int,
        end_position: int,
        times: Callable[[int], tuple[int, int]],
        first_position: Callable[[], int],
    ) -> None:
        """`first_position`: where the log begins. `times` tells the store time of the last record before a position, and that of the last
        one of all.
        """
        self.replay_from = end_position
        self._queues = queues
        self._repeated = repeated
        self._append_size_max_bytes = append_size_max_bytes
        self._times = times
        self._first_position = first_position

    def apply(self, body: bytes, position: int) -> Sequence[str]:
        """Nothing to do: what has appended it knows it."""
        return ()

    def unsaved(self) -> Snapshot | None:
        """Nothing: see the module's docstring."""
        return None

    def carry(self, cut: int) -> Sequence[Carrier]:
        """See `StateMachine`."""
        if not cut:
            return ()
        carriers: list[Carrier] = []
        queues = [
            (queue, _first_behind(queue, cut)) for queue in self._queues.all() if queue.end_offset
        ]
        queues.sort(key=lambda found: (found[0].topic, found[0].queue_id))
        for start in range(0, len(queues), QUEUES_COUNT):
            carriers.append(Carrier(self._ends_of, queues[start : start + QUEUES_COUNT]))
        time_ms, end_time_ms = self._times(cut)
        limit_ms = end_time_ms - RETRY_MAX_MS
        if time_ms > limit_ms:
            slices = self._repeated.producers_since(limit_ms, PRODUCERS_COUNT, RUNS_COUNT)
            count = sum(map(len, slices))
            runs_max = (cut - self._first_position()) // (4 * 8 * RUN_FIELDS * max(count, 1))
            body_of = partial(self._producers, runs_max=min(max(runs_max, 1), RUNS_TOLD_MAX))
            carriers += [Carrier(body_of, ids) for ids in slices]
        return carriers

    def start_record(self, position: int, crc32c: int | None) -> bytes:
        """The body of the record that says where the log begins; `crc32c`: of the seal that ends there."""
        return LogRecord(start=LogStart(position=position, crc32c=crc32c or 0)).SerializeToString()

    def is_told(self, start: int, end_position: int, reader: LogReader) -> bool:
        """Whether a log that begins at `start` says so before `end_position`: only then all that is alive stands in it up to there."""
        if not start:
            return True
        queue = self._queues.find(LOG_TOPIC, 0)
        if queue is None:
            return False
        for queue_offset in range(queue.known_min_offset, queue.first_at_or_beyond(end_position)):
            field = reader.record_at(queue.entry(queue_offset)[0])
            if field is not None:
                record = LogRecord.FromString(Record.FromString(field).body)
                if record.HasField("start") and record.start.position >= start:
                    return True
        return False

    def _ends_of(self, queues: Sequence[_Queue]) -> bytes:
        """Where queues begin and end at this moment. The writer."""
        record = LogRecord()
        topic: QueueEnds | None = None
        for queue, min_offset in queues:
            if not self._queues.has(queue):  # its topic was deleted meanwhile
                continue
            if topic is None or topic.topic != queue.topic:
                topic = record.queues.add(topic=queue.topic)
            topic.queue_ids.append(queue.queue_id)
            topic.min_offsets.append(min_offset)
            topic.end_offsets.append(queue.end_offset)
        return record.SerializeToString()

    def _producers(self, ids: Sequence[int], runs_max: int) -> bytes:
        """What is known of producers at this moment. The writer. Of one whose runs fit into no append, only the newest are told."""
        while True:
            body = LogRecord(producers=self._repeated.told_of(ids, runs_max)).SerializeToString()
            if len(ids) > 1 or runs_max == 1 or len(body) + _RECORD_SIZE_BYTES <= self._append_size_max_bytes:
                return body
            runs_max //= 2


def tell(
    body: bytes,
    position: int,
    deleted: Mapping[str, int],
    queues: ConsumeQueueTable | None,
    repeated: RepeatedSends | None,
) -> None:
    """A replay has come to the record at `position`: it tells those of the two that are replayed.

    `deleted`: topics that were deleted, and up to where what the log has of them is gone.
    """

    def is_gone(topic: str) -> bool:
        return position < deleted.get(topic, 0)

    try:
        record = LogRecord.FromString(body)
    except DecodeError:
        return
    if queues is not None:
        for told in record.queues:
            if is_gone(told.topic):
                continue
            columns = (told.queue_ids, told.min_offsets, told.end_offsets)
            for queue_id, min_offset, end_offset in zip(*columns, strict=True):
                queues.note_carried(told.topic, queue_id, min_offset, end_offset, position)
    if repeated is not None and record.HasField("producers"):
        repeated.take_told(record.producers, position, is_gone)


def _first_behind(queue: ConsumeQueue, cut: int) -> int:
    try:
        return queue.first_at_or_beyond(cut)
    except ConsumeQueueDamagedError:
        return queue.known_min_offset
