"""What the tests of the derived structures share: a log that is only a list, and requests as the store hands them on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.log.append import AppendRequest, RecordRegion, ScannedRecords
from protomq_broker.store.log.kinds import NO_OFFSET, is_queued
from protomq_broker.store.queues import (
    consume_queue,
    consume_queue_table,
    found_files,
    heal,
    queue_flush,
    queue_replay,
)
from protomq_broker.store.queues.consume_queue import (
    ENTRIES_PER_FILE,
    ConsumeQueue,
    ConsumeQueueDamagedError,
)
from protomq_broker.store.state.repeated_sends import RepeatedSends


class Send(NamedTuple):
    """One request: `records` records for one queue."""

    topic: str = "topic"
    queue_id: int = 0
    records: int = 1
    producer_id: int = 0
    producer_epoch: int = 0
    first_sequence: int = 0
    size: int = 200
    tag_code: int = 0
    key_hashes: Sequence[int] = ()
    flags: int = 0


class LoggedRecord(NamedTuple):
    """A record as it stands in the log."""

    position: int
    size: int
    topic: str
    queue_id: int
    queue_offset: int
    tag_code: int
    key_hash: int
    producer_id: int
    producer_epoch: int
    sequence: int
    store_time_ms: int
    flags: int = 0


def use_small_files(set_: Callable[..., None]) -> None:
    """Consume queue files of 8 entries."""
    here = sys.modules[__name__]
    modules = (consume_queue, consume_queue_table, found_files, queue_flush, queue_replay, heal)
    for module in (*modules, here):
        for name, value in (("ENTRIES_PER_FILE", 8), ("FILE_SIZE_BYTES", 160)):
            if hasattr(module, name):
                set_(module, name, value)


@dataclass
class ListLog:
    """The log that the derived structures follow.

    Attributes: records: all of them; end: appended position; boundaries: ends of the appends; time_ms: the log's time.
    """

    records: list[LoggedRecord] = field(default_factory=list)
    end: int = 0
    boundaries: list[int] = field(default_factory=lambda: [0])
    time_ms: int = 0
    restarted: dict[tuple[str, int], int] = field(default_factory=dict)
    _by_position: dict[int, LoggedRecord] = field(default_factory=dict)
    _by_offset: dict[tuple[str, int, int], LoggedRecord] = field(default_factory=dict)

    def append(self, *sends: Send) -> list[AppendRequest]:
        """Appends a group; the requests with their places."""
        requests = []
        for send in sends:
            region = make_region(send)
            is_listed = is_queued(send.flags)
            offset = self.next_offset(send.topic, send.queue_id) if is_listed else NO_OFFSET
            requests.append(AppendRequest(region, send.queue_id, offset, self.end, self.time_ms))
            for index in range(send.records):
                size = len(region.data) if region.sizes is None else int(region.sizes[index])
                keys = list(send.key_hashes) or [0] * send.records
                self.records.append(
                    LoggedRecord(
                        self.end,
                        size,
                        send.topic,
                        send.queue_id,
                        offset + index if is_listed else NO_OFFSET,
                        send.tag_code,
                        keys[index],
                        send.producer_id,
                        send.producer_epoch,
                        send.first_sequence + index,
                        self.time_ms,
                        send.flags,
                    )
                )
                self.end += size
        self.end += SEAL_SIZE_BYTES
        self.boundaries.append(self.end)
        return requests

    def next_offset(self, topic: str, queue_id: int) -> int:
        """Queue offset of the next message."""
        start = self.restarted.get((topic, queue_id), 0)
        return max(
            (r.queue_offset + 1 for r in self.of_queue(topic, queue_id) if r.position >= start),
            default=0,
        )

    def restart(self, topic: str) -> None:
        """The topic is removed: its offsets begin again."""
        for record in self.records:
            if record.topic == topic:
                self.restarted[topic, record.queue_id] = self.end

    def of_queue(self, topic: str, queue_id: int) -> list[LoggedRecord]:
        """The records of one queue since it was made."""
        start = self.restarted.get((topic, queue_id), 0)
        return [
            r
            for r in self.records
            if (r.topic, r.queue_id) == (topic, queue_id)
            and r.position >= start
            and r.queue_offset != NO_OFFSET
        ]

    def by_position(self) -> dict[int, LoggedRecord]:
        """The records by their position."""
        if len(self._by_position) != len(self.records):
            self._by_position = {r.position: r for r in self.records}
        return self._by_position

    def by_offset(self) -> dict[tuple[str, int, int], LoggedRecord]:
        """The records by topic, queue and offset."""
        if len(self._by_offset) != len(self.records):
            self._by_offset = {(r.topic, r.queue_id, r.queue_offset): r for r in self.records}
        return self._by_offset

    def queues(self) -> set[tuple[str, int]]:
        """All queues that have records."""
        return {(r.topic, r.queue_id) for r in self.records}

    def cut(self, end: int) -> None:
        """The log loses what lies at or beyond `end`."""
        self.records = [r for r in self.records if r.position < end]
        self._by_position, self._by_offset = {}, {}
        self.boundaries = [b for b in self.boundaries if b <= end]
        self.end = end

    def scanned(self, start: int = 0, end: int | None = None) -> ScannedRecords:
        """The records in [start, end) as recovery reads them."""
        records = [
            r for r in self.records if start <= r.position < (self.end if end is None else end)
        ]
        topics = tuple(dict.fromkeys(r.topic for r in records))
        return ScannedRecords(
            positions=np.array([r.position for r in records], np.int64),
            sizes=np.array([r.size for r in records], np.int64),
            topics=topics,
            topic_indexes=np.array([topics.index(r.topic) for r in records], np.int32),
            queue_ids=np.array([r.queue_id for r in records], np.int64),
            queue_offsets=np.array([r.queue_offset for r in records], np.int64),
            store_times_ms=np.array([r.store_time_ms for r in records], np.int64),
            tag_codes=np.array([r.tag_code for r in records], np.int64),
            key_hashes=np.array([r.key_hash for r in records], np.uint64),
            producer_ids=np.array([r.producer_id for r in records], np.uint64),
            producer_epochs=np.array([r.producer_epoch for r in records], np.int64),
            sequences=np.array([r.sequence for r in records], np.uint64),
            flags=np.array([r.flags for r in records], np.uint32),
            due_times_ms=np.zeros(len(records), np.uint64),
        )


def make_region(send: Send) -> RecordRegion:
    """The region of a request; its bytes are zeros, since nothing that is derived looks at them."""
    identity = (send.producer_id, send.producer_epoch, send.first_sequence)
    if send.records == 1:
        key_hash = send.key_hashes[0] if send.key_hashes else 0
        return RecordRegion(
            send.topic, bytearray(send.size), 1, None, None, send.tag_code, key_hash, *identity, flags=send.flags
        )  # fmt: skip
    sizes = np.arange(send.size, send.size + send.records, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    keys = np.array(send.key_hashes or [0] * send.records, np.uint64)
    tags = np.full(send.records, send.tag_code, np.int64)
    return RecordRegion(
        send.topic, bytearray(int(sizes.sum())), send.records, starts, sizes, tags, keys, *identity, flags=send.flags
    )  # fmt: skip


def verify_queue(queue: ConsumeQueue, log_start: int = 0) -> Iterable[ConsumeQueueDamagedError]:
    """Reads the whole queue; the damage found, file by file."""
    offset = max(queue.known_min_offset, queue.min_offset(log_start))
    while offset < queue.end_offset:
        end = min(queue.end_offset, (offset // ENTRIES_PER_FILE + 1) * ENTRIES_PER_FILE)
        try:
            offset += len(queue.entries(offset, end - offset))
        except ConsumeQueueDamagedError as error:
            yield error
            offset = end


def table_content(
    table: RepeatedSends,
) -> dict[int, tuple[int, int, int, list[tuple[int, int, tuple[str, int] | None, int]]]]:
    """All that the table knows, whatever its rows and numbers of queues are."""
    known = table._table

    def name(queue: int) -> tuple[str, int] | None:
        return table._runs.queue_names[queue]

    found: dict[int, tuple[int, int, int, list[tuple[int, int, tuple[str, int] | None, int]]]] = {}
    for row, producer_id in enumerate(known.ids):
        if known.find(producer_id) != row:
            continue
        runs = list(known.older[row]) if known.has_older(row) else []
        last = (known.firsts[row], known.ends[row], known.queues[row], known.queue_offsets[row])
        all_runs = [tuple(runs[at : at + 4]) for at in range(0, len(runs), 4)] + [last]
        found[producer_id] = (
            known.epochs[row],
            table._runs.floor(row),
            known.used_ms[row],
            [(first, end, name(queue), offset) for first, end, queue, offset in all_runs],
        )
    assert known.count == len(found)
    assert known.older_count == sum(len(runs) - 1 for _, _, _, runs in found.values())
    return found
