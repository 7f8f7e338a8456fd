"""Bytes of another log, as its leader has them: whether they continue this one, and what they give to the structures that follow the log.

Values only. `following.py` writes them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from protomq.wire.log_walk import WalkedBlock, walk_appends
from protomq.wire.record import (
    FLAG_DUE_TIME,
    FLAG_KIND_COPY,
    FLAG_KIND_MASK,
    FLAG_TRANSIT,
    SEAL_SIZE_BYTES,
)
from protomq_broker.store.errors import ForeignBytesError, LogForkError, LogGapError

from .append import AppendRequest, CorruptRecordError, RecordRegion, ScannedRecords
from .kinds import FATE_MASK
from .positions import LogTail
from .record_scan import read_trailers

CLOSING_SIZE_MIN_BYTES: Final = 2 + SEAL_SIZE_BYTES
"""What a leader leaves free behind each append, if not less: its segment could not be closed any more."""


class LogEnd(NamedTuple):
    """Where a log continues.

    Attributes: tail: its end; epoch: of its last append; is_empty: it has none: then it may begin at any segment.
    """

    tail: LogTail
    epoch: int
    is_empty: bool


class ForeignBlock(NamedTuple):
    """Appends of another log within one segment, proved, and their records."""

    appends: WalkedBlock
    records: ScannedRecords


def prove(
    data: bytes | memoryview,
    position: int,
    end: LogEnd,
    segment_size_bytes: int,
    *,
    may_end_within: bool = False,
    previous_crc32c: int | None = None,
) -> list[ForeignBlock]:
    """The appends that `data` has, which is to continue the log at `position`, segment by segment.

    `may_end_within`: the beginning of one more append may stand at the end; it is left out. `previous_crc32c`: with which the chain comes
    to `position` where the log is empty and begins behind 0; None: not known. Then the head there is believed, as far as the chain goes on
    from it.

    It proves the position and each seal: its place, its CRC, the chain of CRCs, its records. Epochs and store times must not fall. Each
    segment must begin with its head, and leave room to close it. Raises ForeignBytesError: nothing of it continues the log.
    """
    tail = end.tail
    begins = end.is_empty and not position % segment_size_bytes
    if position != tail.position and not begins:
        raise LogGapError(tail.position, position)
    crc: int | None = previous_crc32c if begins and position else tail.crc32c
    # An empty log has a time if this store has led and could write nothing: that is the time of no append.
    epoch, store_time_ms = end.epoch, 0 if end.is_empty else tail.store_time_ms
    blocks: list[ForeignBlock] = []
    at = 0
    while at < len(data):
        base = position + at
        size_bytes = min(len(data) - at, segment_size_bytes - base % segment_size_bytes)
        block = walk_appends(data[at : at + size_bytes], base, crc)
        if block.size_bytes != size_bytes:
            is_last = may_end_within and at + size_bytes == len(data)
            if block.problem or not is_last:
                raise LogForkError(tail.position, block.problem or "they end within an append")
            if not block.seals:
                break
        if not base % segment_size_bytes and not block.seals[0].is_head:
            raise LogForkError(tail.position, "a segment does not begin with an empty append")
        for seal in block.seals:
            if seal.epoch < epoch or seal.store_time_ms < store_time_ms:
                reason = (
                    f"the append at {seal.start_position} has epoch {seal.epoch} and the time {seal.store_time_ms}, behind one with epoch"
                    f" {epoch} and the time {store_time_ms}"
                )
                raise LogForkError(tail.position, reason)
            epoch, store_time_ms = seal.epoch, seal.store_time_ms
        at += size_bytes
        behind = base + block.size_bytes
        if 0 < -behind % segment_size_bytes < CLOSING_SIZE_MIN_BYTES:
            raise ForeignBytesError(tail.position, "their segment could not be closed behind them")
        crc = block.seals[-1].crc32c
        try:
            records = read_trailers(block.data, base, *block.records())
        except CorruptRecordError as error:
            raise ForeignBytesError(tail.position, f"{error}, though its seal holds") from error
        blocks.append(ForeignBlock(block, records))
    return blocks


def requests_of(block: ForeignBlock, first: int, end: int) -> list[AppendRequest]:
    """The records of rows [first, end) as those who follow the log take them live: in runs, as the leader was given them or finer."""
    if first == end:
        return []
    records = block.records
    rows = slice(first, end)
    return [
        _request(block, first + start, first + stop)
        for start, stop in pairwise([0, *_bounds(records, rows), end - first])
    ]


def _bounds(records: ScannedRecords, rows: slice) -> list[int]:
    """Where in the rows another run begins."""

    def differs(column: NDArray[Any]) -> NDArray[np.bool_]:
        return column[1:] != column[:-1]

    positions, sizes = records.positions[rows], records.sizes[rows]
    offsets, flags = records.queue_offsets[rows], records.flags[rows]
    sequences = records.sequences[rows]
    begins = differs(records.topic_indexes[rows])
    begins |= differs(records.queue_ids[rows])
    begins |= differs(records.producer_ids[rows])
    begins |= differs(records.producer_epochs[rows])
    begins |= differs(flags & np.uint32(FATE_MASK | FLAG_TRANSIT))
    begins |= sequences[1:] != sequences[:-1] + np.uint64(1)
    begins |= positions[1:] != positions[:-1] + sizes[:-1]  # a seal stands in between
    begins |= (offsets[1:] != offsets[:-1] + 1) & (offsets[1:] >= 0)
    bounds: list[int] = (np.flatnonzero(begins) + 1).tolist()
    return bounds


def _request(block: ForeignBlock, first: int, end: int) -> AppendRequest:
    """The run of rows [first, end). Plain messages are not copied: what follows the log keeps none of their bytes."""
    records = block.records
    rows = slice(first, end)
    count = end - first
    position = int(records.positions[first])
    starts = records.positions[rows] - position
    size_bytes = int(starts[-1] + records.sizes[end - 1])
    at = position - block.appends.base_position
    flags = int(records.flags[first])
    data = memoryview(block.appends.data)[at : at + size_bytes]
    is_moved = bool(flags & FLAG_TRANSIT) or flags & FLAG_KIND_MASK == FLAG_KIND_COPY
    ids = (records.producer_ids[rows], records.producer_epochs[rows], records.sequences[rows])
    identities = np.array(ids, np.uint64).T if is_moved else None
    more_keys = [
        (at_key - position, hash_)
        for at_key, hash_ in records.more_keys
        if position <= at_key < position + size_bytes
    ]

    def of_all(column: NDArray[Any]) -> Any:
        return column[rows] if count > 1 else column[first].item()

    region = RecordRegion(
        records.topics[int(records.topic_indexes[first])],
        # A view does for a region that nobody stamps.
        bytearray(data) if flags & (FATE_MASK | FLAG_TRANSIT) else cast("bytearray", data),
        count,
        starts if count > 1 else None,
        records.sizes[rows] if count > 1 else None,
        of_all(records.tag_codes),
        of_all(records.key_hashes),
        0 if is_moved else int(records.producer_ids[first]),
        0 if is_moved else int(records.producer_epochs[first]),
        0 if is_moved else int(records.sequences[first]),
        due_times_ms=of_all(records.due_times_ms) if flags & FLAG_DUE_TIME else None,
        more_keys=more_keys,
        flags=flags & (FATE_MASK | FLAG_TRANSIT),
        identities=identities,
    )
    return AppendRequest(
        region,
        int(records.queue_ids[first]),
        int(records.queue_offsets[first]),
        position,
        int(records.store_times_ms[first]),
    )
