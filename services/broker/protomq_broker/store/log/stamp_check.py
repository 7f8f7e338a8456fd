"""Whether records are those that a consume queue takes them for: arithmetic on bytes that were read, nothing is read here.

A seal proves that a record is what was stored; it does not prove that it is the one that an entry was made for. The record itself says
where it stands and which message of which queue it is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protomq.wire.record import PHYSICAL_OFFSET_AT

from .append import CorruptRecordError
from .record_scan import read_trailers


def first_stranger(
    data: bytes,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    positions: NDArray[np.int64],
    topic: str,
    queue_id: int,
    queue_offsets: NDArray[np.int64],
) -> int | None:
    """Index of the first record that is not the one it is taken for, None if all are.

    The record fields stand at `starts` of `data` with `sizes`, and in the log at `positions`. They should be the messages with
    `queue_offsets` of a queue.
    """
    try:
        records = read_trailers(data, 0, starts, sizes)
    except CorruptRecordError as error:
        return int(np.searchsorted(starts, error.position))
    stamped = np.ndarray((len(data) - 7,), "<i8", buffer=data, strides=(1,))
    wrong = stamped[starts + sizes + PHYSICAL_OFFSET_AT] != positions
    wrong |= records.queue_offsets != queue_offsets
    wrong |= records.queue_ids != queue_id
    ours = np.array([name == topic for name in records.topics], np.bool_)
    wrong |= ~ours[records.topic_indexes]
    return int(wrong.argmax()) if np.count_nonzero(wrong) else None
