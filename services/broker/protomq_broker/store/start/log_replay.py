"""Replays blocks of the log to derived structures, with what stands between the blocks and what deletes topics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protomq.v1.record_pb2 import RecordBatch
from protomq.v1.state_pb2 import TopicsRecord
from protomq.wire.log_walk import WalkedBlock
from protomq.wire.topics import LOG_TOPIC, TOPICS_TOPIC
from protomq_broker.store.derived import Derived
from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.files.disk import Disk
from protomq_broker.store.log.append import CorruptRecordError, ScannedRecords
from protomq_broker.store.log.checkpoint import Checkpoint
from protomq_broker.store.log.record_scan import read_trailers
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from protomq_broker.store.queues.lost_records import records_that_seem_whole
from protomq_broker.store.queues.repaired import RepairedRange, repaired_in
from protomq_broker.store.state.log_front import tell
from protomq_broker.store.state.repeated_sends import RepeatedSends
from protomq_broker.store.state.topics import deletions_in
from protomq_broker.store.timer.timer import TimerEntries

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StartFiles:
    """What a start reads, and what it brings to the log's end.

    Attributes:
        folder: the segments.
        config_folder: the folder of the quarantine and of the queue ends.
        checkpoint: where the last run ended for certain; None: it is not known.
        derived: the derived structures, loaded; consume queues first.
        deleted: for each deleted topic the position up to which its records are deleted. A walk adds those that it finds.
    """

    disk: Disk
    folder: SegmentFolder
    config_folder: str
    checkpoint: Checkpoint | None
    queues: ConsumeQueueTable
    derived: Sequence[Derived]
    deleted: dict[str, int]


class LogReplay:
    """Hands blocks to derived structures, reports the damaged ranges in between, and saves the queue offsets of those ranges."""

    def __init__(self, files: StartFiles, derived: Sequence[Derived], position: int) -> None:
        """`derived`: those that need the blocks from `position` on. The replay adds to the deleted topics those that the blocks delete."""
        self._deleted = files.deleted
        self._folder = files.folder
        self._disk = files.disk
        self._queues = files.queues
        self._derived = derived
        self._position = position
        self.repaired: list[RepairedRange] = []
        """What repairs have taken out, by the blocks."""

    def take(self, block: WalkedBlock) -> None:
        """Takes the next block."""
        if block.base_position > self._position:
            self._pass_over(self._position, block.base_position)
        self._position = block.base_position + block.size_bytes
        repaired = repaired_in(block, self._folder)
        self.repaired += repaired
        timer = self._one_of(TimerEntries)
        for each in repaired:
            place = each.damage.start_position, each.damage.end_position
            if self._queues in self._derived:
                self._queues.pass_over(*place)
            if timer is not None:
                timer.pass_over(*place)
        starts, sizes = block.records()
        if not len(starts):
            return
        try:
            records = read_trailers(block.data, block.base_position, starts, sizes)
        except CorruptRecordError as error:
            raise CorruptLogError(
                self._folder.path_at(error.position),
                error.position,
                f"{error.reason}, though its seal holds",
            ) from error
        self._note_deletions(block, records)
        start = 0
        for row, body in state_records(block, records, LOG_TOPIC):
            self._replay(records.select(_between(records, start, row)))
            position = int(records.positions[row])
            queues, repeated = self._one_of(ConsumeQueueTable), self._one_of(RepeatedSends)
            tell(body, position, self._deleted, queues, repeated)
            start = row
        self._replay(records.select(_between(records, start, records.count)) if start else records)

    def _one_of(self, kind: type[T]) -> T | None:
        """Returns the structure of this kind if it is replayed."""
        return next((found for found in self._derived if isinstance(found, kind)), None)

    def _replay(self, records: ScannedRecords) -> None:
        if not records.count:
            return
        kept = records.select(_is_owned(records, self._deleted))
        for structure in self._derived:
            if kept is not records and structure.outlives_topics:
                structure.replay(_disowned(records, self._deleted))
            else:
                structure.replay(kept)

    def _note_deletions(self, block: WalkedBlock, records: ScannedRecords) -> None:
        """Notes topics that a block deletes: forgets them in all earlier blocks, and skips the records that the block itself has of them.
        """
        for name, end_position in deletions_in_block(block, records):
            if end_position > self._deleted.get(name, 0):
                self._deleted[name] = end_position
                for structure in self._derived:
                    structure.forget_deleted({name: end_position})

    def finish(self, end_position: int) -> None:
        """Ends the replay: there are no more blocks."""
        if end_position > self._position:
            self._pass_over(self._position, end_position)

    def _pass_over(self, start: int, end: int) -> None:
        for structure in self._derived:
            structure.pass_over(start, end)
        self._save_offsets(start, end)

    def _save_offsets(self, start: int, end: int) -> None:
        """Enters records of a damaged range into their queues, so that no new message gets their offsets. They are never served.

        It takes only records that name their real position, a known queue, and exactly the next offset of that queue.
        """
        if self._queues not in self._derived:
            return
        for record in records_that_seem_whole(self._disk, self._folder, start, end):
            queue = self._queues.find(record.topics[0], int(record.queue_ids[0]))
            if queue is not None and queue.end_offset == int(record.queue_offsets[0]):
                self._queues.replay(record)


def deletions_in_block(block: WalkedBlock, records: ScannedRecords) -> Iterator[tuple[str, int]]:
    """Yields the topics that records of a block delete, each with the position up to which its records are deleted."""
    for row, body in state_records(block, records, TOPICS_TOPIC):
        with suppress(DecodeError):
            yield from deletions_in(TopicsRecord.FromString(body), int(records.positions[row]))


def state_records(
    block: WalkedBlock, records: ScannedRecords, topic: str
) -> Iterator[tuple[int, bytes]]:
    """Yields row and body of each record of a system topic in a block."""
    if topic not in records.topics:
        return
    for row in np.flatnonzero(records.topic_indexes == records.topics.index(topic)).tolist():
        at = int(records.positions[row]) - block.base_position
        data = bytes(block.data[at : at + int(records.sizes[row])])
        (record,) = RecordBatch.FromString(data).records
        yield row, record.body


def _disowned(records: ScannedRecords, deleted: Mapping[str, int]) -> ScannedRecords:
    """Returns the records; those whose topic was deleted after them get the topic ""."""
    indexes = np.where(_is_owned(records, deleted), records.topic_indexes, len(records.topics))
    return replace(records, topics=(*records.topics, ""), topic_indexes=indexes.astype(np.int32))


def _between(records: ScannedRecords, start: int, end: int) -> NDArray[np.bool_]:
    """Chooses the records of rows [start, end)."""
    rows = np.arange(records.count)
    chosen: NDArray[np.bool_] = (rows >= start) & (rows < end)
    return chosen


def _is_owned(records: ScannedRecords, deleted: Mapping[str, int]) -> NDArray[np.bool_]:
    """Whether each record belongs to a topic that was not deleted after it."""
    ends = np.array([deleted.get(topic, 0) for topic in records.topics], np.int64)
    owned: NDArray[np.bool_] = records.positions >= ends[records.topic_indexes]
    return owned
