"""What the store answers: where records stand, and what was counted. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq_broker.store.log.segment import SegmentFile

_NONE: NDArray[np.uint32] = np.empty(0, np.uint32)


class ReadStatus(Enum):
    """RocketMQ's four pull statuses."""

    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    NO_MATCHED_MSG = "NO_MATCHED_MSG"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


class LogRegion(NamedTuple):
    """A part of a segment file. The file stays open as long as this is referred to."""

    file: SegmentFile
    offset: int
    size_bytes: int


@dataclass(slots=True)
class ReadResult:
    """The answer to a read.

    Attributes:
        status: what was found.
        next_offset: queue offset to go on with.
        min_offset: first queue offset that is there.
        end_offset: one past the last that may be read.
        first_offset: queue offset of the first record found.
        starts: start of each record field in the regions, put one behind the other.
        sizes: size of each record field with tag and length.
        queue_offsets: queue offset of each record; None if they are dense from `first_offset` on.
        regions: where the bytes are.
        regions_size_bytes: size of all regions.
    """

    status: ReadStatus
    next_offset: int
    min_offset: int
    end_offset: int
    first_offset: int = 0
    starts: NDArray[np.uint32] = field(default_factory=lambda: _NONE)
    sizes: NDArray[np.uint32] = field(default_factory=lambda: _NONE)
    queue_offsets: NDArray[np.uint64] | None = None
    regions: list[LogRegion] = field(default_factory=list)
    regions_size_bytes: int = 0

    @property
    def record_count(self) -> int:
        """Number of records found."""
        return len(self.sizes)

    def octets(self) -> bytes:
        """The bytes of the regions, joined: in them the records begin at `starts`."""
        return b"".join([each.file.read(each.offset, each.size_bytes) for each in self.regions])

    def fields_of(self, data: bytes) -> list[bytes]:
        """The record fields in the bytes of the regions, with tag and length. Seals that stand between them are left out."""
        spans = zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
        return [data[start : start + size] for start, size in spans]


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """Where the first time of a repeated send is."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int


@dataclass(slots=True)
class TopicCounters:
    """Counted since the start. What is read is counted by several threads without a lock: it may miss a few."""

    records_in: int = 0
    bytes_in: int = 0
    records_out: int = 0
    bytes_out: int = 0
