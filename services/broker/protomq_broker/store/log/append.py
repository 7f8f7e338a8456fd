"""What is handed to the store to be appended, and what recovery reads back from the log.

Values only. `RecordRegion` is made by `record_region.py`, which proves that the layout holds; the store trusts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

MoreKey = tuple[int, int]
"""Of a key that is not the first one of its record: where the record field stands, and the hash of the key."""


class CorruptRecordError(Exception):
    """Bytes of the log that a valid seal covers and that are no records all the same.

    Attributes: position: the physical offset; reason: what does not hold.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"position {position}: {reason}")
        self.position = position
        self.reason = reason


@dataclass(slots=True)
class RecordRegion:
    """Whole record fields of one topic, one behind the other, ready to be stamped and written.

    Attributes:
        topic: the topic of all records.
        data: the bytes; each record field starts with its tag. Stamped in place.
        count: number of records, at least 1.
        starts: start of each record field in `data`, int64, shape (count,); None if count is 1 (then it is 0).
        sizes: size of each record field with tag and length, int64, shape (count,); None if count is 1 (then it is len(data)).
        tag_codes: int64, shape (count,); an int if count is 1.
        key_hashes: uint64, shape (count,); an int if count is 1.
        producer_id: 0 for none: then repeats are not recognised.
        producer_epoch: epoch of the producer.
        first_sequence: sequence of the first record; the others follow one by one.
        stride: size of each record field if all have the same, else 0: then records are reached by steps instead of by an index.
        more_keys: for each key of a record behind its first: (start of the record field in `data`, hash of the key).
        flags: the bits of `flags` that decide what takes the records (`kinds.py`), the same in all of them: 0 for plain messages;
            MIXED for a region that is refused.
        identities: producer id, epoch and sequence of each record, uint64, shape (count, 3); only of copies, which are no sends and so
            have the producer id 0 above.
        due_times_ms: uint64, shape (count,), 0 for a message without one; an int if count is 1; None if no message has one.
    """

    topic: str
    data: bytearray
    count: int
    starts: NDArray[np.int64] | None
    sizes: NDArray[np.int64] | None
    tag_codes: NDArray[np.int64] | int
    key_hashes: NDArray[np.uint64] | int
    producer_id: int
    producer_epoch: int
    first_sequence: int
    stride: int = 0
    due_times_ms: NDArray[np.uint64] | int | None = None
    more_keys: Sequence[MoreKey] = ()
    flags: int = 0
    identities: NDArray[np.uint64] | None = None


@dataclass(slots=True)
class AppendRequest:
    """One caller's records for one queue. The last three are filled in by `Store.append`: -1 until then.

    Attributes:
        region: the records.
        queue_id: the queue.
        queue_offset: queue offset of the first record; stays -1 for records that enter no consume queue.
        physical_offset: physical offset of the first record.
        store_time_ms: store time of all records.
    """

    region: RecordRegion
    queue_id: int
    queue_offset: int = -1
    physical_offset: int = -1
    store_time_ms: int = -1


@dataclass(frozen=True, slots=True)
class ScannedRecords:
    """Records read back from the log, in its order: arrays of one length, what derived structures are rebuilt from.

    Attributes:
        positions: int64, physical offset of each record field.
        sizes: int64, size of each record field with tag and length.
        topics: the distinct topics; `topic_indexes` (int32) says which one each record has.
        queue_ids: int64.
        queue_offsets: int64; -1 for a record that enters no consume queue.
        store_times_ms: int64.
        tag_codes: int64.
        key_hashes: uint64.
        producer_ids: uint64.
        producer_epochs: int64.
        sequences: uint64.
        flags: uint32, as they stand; `kinds.py` tells what they decide.
        due_times_ms: uint64, 0 for a record without one.
        more_keys: of the keys behind the first one of a record; positions are physical offsets.
    """

    positions: NDArray[np.int64]
    sizes: NDArray[np.int64]
    topics: tuple[str, ...]
    topic_indexes: NDArray[np.int32]
    queue_ids: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]
    store_times_ms: NDArray[np.int64]
    tag_codes: NDArray[np.int64]
    key_hashes: NDArray[np.uint64]
    producer_ids: NDArray[np.uint64]
    producer_epochs: NDArray[np.int64]
    sequences: NDArray[np.uint64]
    flags: NDArray[np.uint32]
    due_times_ms: NDArray[np.uint64]
    more_keys: Sequence[MoreKey] = ()

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.positions)

    def select(self, chosen: NDArray[np.bool_]) -> ScannedRecords:
        """Those of the records that are chosen, with their keys."""
        if np.count_nonzero(chosen) == self.count:
            return self
        columns = {
            field.name: getattr(self, field.name)[chosen]
            for field in fields(self)
            if field.name not in ("topics", "more_keys")
        }
        if self.more_keys:
            kept = set(columns["positions"].tolist())
            columns["more_keys"] = [key for key in self.more_keys if key[0] in kept]
        return replace(self, **columns)
