"""Runs of records: what came in one request, or looks as if it had."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .append import ScannedRecords


def run_continues(records: ScannedRecords) -> NDArray[np.bool_]:
    """Whether each record goes on where the one before it stopped: same producer, epoch and queue, next sequence, next offset.

    A queue id below 0 means: no queue, and what stands in place of the offset is the position. Then the next place in the log counts.
    """
    goes_on = np.zeros(records.count, np.bool_)
    same = records.producer_ids[1:] == records.producer_ids[:-1]
    same &= records.producer_epochs[1:] == records.producer_epochs[:-1]
    same &= records.sequences[1:] == records.sequences[:-1] + np.uint64(1)
    same &= records.topic_indexes[1:] == records.topic_indexes[:-1]
    same &= records.queue_ids[1:] == records.queue_ids[:-1]
    follows = records.queue_offsets[1:] == records.queue_offsets[:-1] + 1
    unqueued = records.queue_ids[1:] < 0
    if np.count_nonzero(unqueued):
        adjacent = records.positions[1:] == records.positions[:-1] + records.sizes[:-1]
        follows = np.where(unqueued, adjacent, follows)
    same &= follows
    goes_on[1:] = same
    return goes_on
