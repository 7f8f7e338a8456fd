"""Messages that wait for their time, looked up by message id. They are in no queue and in no index: the timer's rows lead to them.

A search reads records, those that fall due next first, and ends at a number of them: millions may wait. It says how many it left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from protomq.v1.record_pb2 import Record, RecordBatch

from .store.log.record_scan import read_trailers
from .store.timer.carrying import first_rows
from .store.timer.timer_runs import TimerDamagedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .store.store import Store

SEARCHED_COUNT_MAX: Final = 65_536
"""As many as a look-up by key opens. With records of 1 KiB they are read in some 0.1 s."""
SEARCHED_SIZE_MAX_BYTES: Final = 256 << 20
_PIECE_COUNT: Final = 1_024
_PIECE_SIZE_BYTES: Final = 1 << 20
"""Read at once: no other thread waits longer for the interpreter than this takes."""

Identity = tuple[int, int, int]
"""Producer id, producer epoch, sequence."""


class Waiting(NamedTuple):
    """What a search found.

    Attributes:
        records: those with the id, by their due time.
        unsearched_count: messages that wait and were not looked at.
    """

    records: Sequence[Record]
    unsearched_count: int


def find_waiting(
    store: Store, identity: Identity, count_max: int = SEARCHED_COUNT_MAX
) -> Waiting:
    """The messages with this id that wait for a delay or a retry. Any thread but the writer. Raises OSError.

    Several may: each group that gave the message back has a copy of its own. While the timer is rebuilt, nothing can be searched.
    """
    found: list[Record] = []
    searched_count = searched_bytes = 0
    if not store.pending.count:
        return Waiting(found, 0)
    try:
        for rows in _pieces(store, count_max):
            found += _with_id(store, rows, identity)
            searched_count += len(rows)
            searched_bytes += int(rows["size"].sum())
            if searched_bytes >= SEARCHED_SIZE_MAX_BYTES:
                break
    except TimerDamagedError:
        pass  # What it could not be asked for is counted, and the timer heals by itself.
    found.sort(key=lambda record: record.due_time_ms)
    return Waiting(found, max(store.pending.count - searched_count, 0))


def still_waiting(store: Store, records: Sequence[Record]) -> list[Record]:
    """Those that were not delivered, recalled or carried forward meanwhile."""
    try:
        return [record for record in records if _is_pending(store, record)]
    except TimerDamagedError:
        return list(records)


def _is_pending(store: Store, record: Record) -> bool:
    rows = store.pending.at_due(record.due_time_ms, 1, record.physical_offset)
    return bool(len(rows)) and int(rows["position"][0]) == record.physical_offset


def _pieces(store: Store, count_max: int) -> Iterator[NDArray[Any]]:
    """Rows of readable records, those that fall due next first, so many as are read at once, up to `count_max`."""
    left = count_max
    for rows in store.pending.below(store.readable_position):
        rows = rows[:left]
        left -= len(rows)
        while len(rows):
            piece = first_rows(rows, _PIECE_COUNT, _PIECE_SIZE_BYTES)
            yield piece
            rows = rows[len(piece) :]
        if not left:
            return


def _with_id(store: Store, rows: NDArray[Any], identity: Identity) -> list[Record]:
    """Records are read in the order of the log. What is damaged, or of a topic that is gone, is left out."""
    rows = rows[np.argsort(rows["position"], kind="stable")]
    sizes = rows["size"].astype(np.int64)
    data, starts, is_sound = store.read_records(rows["position"].astype(np.int64), sizes)
    starts, sizes = starts[is_sound], sizes[is_sound]
    trailers = read_trailers(data, 0, starts, sizes)
    producer_id, epoch, sequence = identity
    is_it = trailers.producer_ids == np.uint64(producer_id)
    is_it &= trailers.producer_epochs == epoch
    is_it &= trailers.sequences == np.uint64(sequence)
    found: list[Record] = []
    for row in np.flatnonzero(is_it).tolist():
        field = data[int(starts[row]) : int(starts[row] + sizes[row])]
        (record,) = RecordBatch.FromString(field).records
        if store.has_topic_of(record.topic, record.queue_id, record.physical_offset):
            found.append(record)
    return found
