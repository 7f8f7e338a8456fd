"""Finds where a send is stored already, and checks that its messages are the stored ones: two producers may have been given one id.

The table of repeated sends knows producers and sequences, not their messages. So before the broker answers that a send is stored, it
compares its messages with the stored ones. Rules:
- Two messages are the same if the CRC-32C of their fields 1 to 5 is the same, or else if these fields are equal. A client may write
  a map in another order when it writes the message again.
- They are also of one kind: plain, delayed or half. Nobody gets a half message before it is committed, and a plain one everybody does.
- The born time does not count: a Spark task that computes and sends a message again gives it a new one.
- A deleted or damaged message cannot be compared: then nobody can tell whether the send is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protomq.v1.record_pb2 import Record, RecordBatch
from protomq.wire.record import (
    CRC32C_AT,
    FLAG_DUE_TIME,
    FLAG_KIND_HALF,
    FLAG_KIND_MASK,
    FLAGS_AT,
    encode_record_field,
)

from .errors import CorruptLogError
from .log.append import AppendRequest, RecordRegion
from .log.kinds import FATE_MASK, NO_OFFSET
from .log.positions import Positions
from .queues.consume_queue_table import ConsumeQueueTable
from .queues.log_reader import LogReader
from .queues.reading import ReadResult, ReadStatus, StoredPlace
from .state.repeated_sends import RepeatedSends
from .state.send_errors import (
    PartlyStoredError,
    ProducerIdTakenError,
    RepeatedSend,
    SequenceExpiredError,
)

READ_SIZE_BYTES: Final = 1 << 20
"""Bytes of the log that are read at a time."""


class Appended:
    """Lets a reader read up to the end of the log: messages that are not synced are compared too. Nobody receives them."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions

    @property
    def readable(self) -> int:
        """The end of the log."""
        return self._positions.appended


class SentAgain:
    """See the module's docstring. Writer thread."""

    def __init__(
        self,
        repeated: RepeatedSends,
        queues: ConsumeQueueTable,
        reader: LogReader,
        next_store_time_ms: Callable[[], int],
    ) -> None:
        """`reader` reads up to the end of the log. `next_store_time_ms`: the store time of an append that is made now."""
        self._repeated = repeated
        self._queues = queues
        self._reader = reader
        self._next_store_time_ms = next_store_time_ms

    def find(
        self, request: AppendRequest, previous_sequence: int | None = None
    ) -> StoredPlace | None:
        """Returns where this send is stored already; None if it is new: then the caller must append it next.

        `previous_sequence`: a sequence of the producer that must be stored here.

        Raises what `RepeatedSends.admit` raises, such as SendInFlightError if the same send is in the group not yet appended. Raises
        ProducerIdTakenError if other messages have its sequences, SequenceExpiredError if nobody can tell any more.
        """
        region = request.region
        if not region.producer_id:
            return None
        try:
            found = self._repeated.admit(
                region.producer_id,
                region.producer_epoch,
                region.first_sequence,
                region.count,
                topic=region.topic,
                previous_sequence=previous_sequence,
                now_ms=self._next_store_time_ms,
            )
        except PartlyStoredError as error:
            index = error.first_known - region.first_sequence
            self.require_same(region, error.part, index, error.count)
            raise
        if found is None:
            return None
        self.require_same(region, found, 0, region.count)
        if found.queue_offset == NO_OFFSET:
            position = self._reader.position_behind(found.position, found.ahead)
            return StoredPlace(found.topic, found.queue_id, NO_OFFSET, position)
        queue = self._queues.find(found.topic, found.queue_id)
        position = 0
        if queue is not None and queue.known_min_offset <= found.queue_offset < queue.end_offset:
            position = queue.entry(found.queue_offset)[0]
        return StoredPlace(found.topic, found.queue_id, found.queue_offset, position)

    def require_same(
        self, region: RecordRegion, stored: RepeatedSend, index: int, count: int
    ) -> None:
        """Raises ProducerIdTakenError unless `count` messages of `region` from `index` on are those that stand from `stored` on;
        SequenceExpiredError if nobody can tell.
        """
        if stored.queue_offset == NO_OFFSET:
            self._require_same_unqueued(region, stored, index, count)
            return
        done = 0
        while done < count:
            found = self._read(region, stored, done, count)
            data = b"".join(part.file.read(part.offset, part.size_bytes) for part in found.regions)
            starts = found.starts.astype(np.int64)
            _require_same_records(region, index + done, data, starts, starts + found.sizes)
            done += found.record_count

    def _require_same_unqueued(
        self, region: RecordRegion, stored: RepeatedSend, index: int, count: int
    ) -> None:
        """Does the same for messages in no consume queue, which follow one another in the log."""
        position = self._reader.position_behind(stored.position, stored.ahead)
        for number in range(count):
            record = self._reader.record_at(position) if position else None
            if record is None:
                raise _cannot_tell(region, f"the record at position {position} is deleted or damaged")
            data = encode_record_field(record)
            ends = np.array([len(data)])
            _require_same_records(region, index + number, data, np.zeros(1, np.int64), ends)
            position += len(data)

    def _read(
        self, region: RecordRegion, stored: RepeatedSend, done: int, count: int
    ) -> ReadResult:
        offset = stored.queue_offset + done
        reason = f"message {offset} of queue {stored.queue_id} of topic {stored.topic} is deleted"
        try:
            found = self._reader.read(
                stored.topic, stored.queue_id, offset, count - done, READ_SIZE_BYTES
            )
            is_whole = found.queue_offsets is None and found.first_offset == offset
            if found.status is ReadStatus.FOUND and is_whole:
                return found
        except CorruptLogError as error:
            reason = str(error)
        raise _cannot_tell(region, reason)


def _require_same_records(
    region: RecordRegion,
    index: int,
    data: bytes,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> None:
    """Compares the messages of a region from `index` on with the record fields that stand at `starts` of `data`."""
    sent_starts, sent_ends = _bounds(region, index, len(starts))
    sent_kinds, kinds = _words(region.data, sent_ends, FLAGS_AT) & FATE_MASK, _words(data, ends, FLAGS_AT) & FATE_MASK
    differs = (_words(data, ends, CRC32C_AT) != _words(region.data, sent_ends, CRC32C_AT)) | (sent_kinds != kinds)
    for row in np.flatnonzero(differs).tolist():
        sent_kind, kind = int(sent_kinds[row]), int(kinds[row])
        if sent_kind != kind:
            raise _taken(region, index + row, f"as a {_kind_name(kind)} message, and this one is {_kind_name(sent_kind)}")
        sent = _record(region.data, int(sent_starts[row]), int(sent_ends[row]))
        if not _is_same(sent, _record(data, int(starts[row]), int(ends[row]))):
            raise _taken(region, index + row, "and belongs to another message")


def _taken(region: RecordRegion, index: int, how: str) -> ProducerIdTakenError:
    """`how` the sequence of the message at `index` is stored."""
    return ProducerIdTakenError(
        f"sequence {region.first_sequence + index} of producer {region.producer_id:016X} with epoch {region.producer_epoch} is stored"
        f" here {how}. Two producers have this id, or one was restarted with its old epoch. Give each an id of its own, and a restarted"
        " one a higher epoch",
        region.producer_id,
        region.producer_epoch,
        region.first_sequence,
    )


def _kind_name(fate: int) -> str:
    """`fate`: the flags in FATE_MASK of a message as it was sent."""
    delayed = ["delayed"] if fate & FLAG_DUE_TIME else []
    half = ["half"] if fate & FLAG_KIND_MASK == FLAG_KIND_HALF else []
    return " ".join(delayed + half) or "plain"


def _cannot_tell(region: RecordRegion, reason: str) -> SequenceExpiredError:
    first = region.first_sequence
    return SequenceExpiredError(
        f"sequences {first} to {first + region.count - 1} were used, but the broker cannot know whether for these messages:"
        f" {reason}",
        region.producer_id,
        region.producer_epoch,
        first,
    )


def _bounds(
    region: RecordRegion, index: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(starts, ends) of record fields in the data of a region."""
    if region.starts is None or region.sizes is None:
        return np.zeros(1, np.int64), np.array([len(region.data)])
    part = slice(index, index + count)
    return region.starts[part], region.starts[part] + region.sizes[part]


def _words(data: bytes | bytearray, ends: NDArray[np.int64], at: int) -> NDArray[np.uint32]:
    """What each record that ends there has in the four octets at this place, counted from its end."""
    windows: NDArray[np.uint32] = np.ndarray((len(data) - 3,), "<u4", buffer=data, strides=(1,))
    return windows[ends + at]


def _record(data: bytes | bytearray, start: int, end: int) -> Record:
    return RecordBatch.FromString(bytes(data[start:end])).records[0]


def _is_same(one: Record, other: Record) -> bool:
    return (
        one.body == other.body
        and one.keys == other.keys
        and one.tag == other.tag
        and one.properties == other.properties
        and one.attributes == other.attributes
    )
