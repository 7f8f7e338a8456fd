"""What a start does with the entries of one consume queue: how far those in files hold, and what records from the log add.

- Records that the queue has are skipped. Offsets that are missing in between belong to records that the log has lost, and get entries
  that say so. So no queue offset is given twice.
- Offsets that begin again are those of a topic that was removed and created again: the entries before them go.
- A log that has no gap up to there reports each removal. So offsets that go back without one were given twice. A master had lost what is
  in the log again. The later messages keep these offsets, since consumers had them, and the earlier ones stay before them. That also
  holds for a replay that goes on from a checkpoint: the table knows the removals before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from protomq_broker.store.log.append import ScannedRecords

from .consume_queue import (
    ENTRIES_PER_FILE,
    LOST_TAG_CODE,
    NO_FOLDER,
    ConsumeQueue,
    ConsumeQueueDamagedError,
)

log = logging.getLogger(__name__)


def replay_queue(
    queue: ConsumeQueue,
    records: ScannedRecords,
    rows: NDArray[np.int64],
    knows_removals: Callable[[ConsumeQueue, int], bool],
    go_back: Callable[[ConsumeQueue, int, int], bool],
) -> None:
    """Adds the entries of those of the records that stand in `rows`, in the log's order; skips what the queue has.

    `knows_removals`: whether a removal of the topic behind the queue's last record, at that position, would be known. `go_back` gets the
    queue, an offset that was given before, and the position of the later record. It returns False if it may be a new topic of that name.
    """
    offsets, positions = records.queue_offsets[rows], records.positions[rows]
    sizes, tag_codes = records.sizes[rows], records.tag_codes[rows]
    bounds = [0, *(np.flatnonzero(np.diff(offsets) != 1) + 1).tolist(), len(rows)]
    for start, end in pairwise(bounds):
        offset = int(offsets[start])
        if queue.end_offset and offset < queue.end_offset:
            last_position, last_size, _ = queue.entry(queue.end_offset - 1)
            known = int(np.searchsorted(positions[start:end], last_position + last_size))
            start += known
            if start == end:
                continue
            offset = int(offsets[start])
            if offset < queue.end_offset and not (
                knows_removals(queue, last_position) and go_back(queue, offset, int(positions[start]))
            ):
                # The topic was removed and created again: its offsets began again.
                restart(queue)
        if offset > queue.end_offset:
            fill_up(queue, offset)
        queue.append_many(positions[start:end], sizes[start:end], tag_codes[start:end])


def note_given_twice(queue: ConsumeQueue, offset: int) -> None:
    """Logs that the offsets from `offset` on were given twice."""
    log.error(
        "queue offsets %d to %d of queue %d of topic %s were given twice. A master that had lost these messages gave them to later ones."
        " The log has the first messages again. They are not served, since the later ones are at these offsets",
        offset, queue.end_offset - 1, queue.queue_id, queue.topic,
    )  # fmt: skip


def restart(queue: ConsumeQueue) -> None:
    """The queue begins again, from offset 0."""
    queue.reset(0, 0)
    queue.synced_offset = NO_FOLDER


def fill_up(queue: ConsumeQueue, offset: int) -> None:
    """Entries up to `offset` are missing: before the log's start, or lost by it."""
    if queue.end_offset == 0:
        queue.reset(offset, offset)
        return
    last_position, last_size, _ = queue.entry(queue.end_offset - 1)
    fill_lost(queue, offset, last_position + last_size)


def fill_lost(queue: ConsumeQueue, end_offset: int, position: int) -> None:
    """Adds entries of lost records up to `end_offset`: `position` is where in the log they are missed."""
    missing = end_offset - queue.end_offset
    queue.append_many(
        np.full(missing, position, np.int64),
        np.zeros(missing, np.int64),
        np.full(missing, LOST_TAG_CODE, np.int64),
    )


def sound_end(queue: ConsumeQueue) -> int:
    """Up to which offset the entries hold."""
    offset = queue.known_min_offset
    while offset < queue.end_offset:
        count = min(queue.end_offset - offset, ENTRIES_PER_FILE)
        try:
            found = len(queue.entries(offset, count))
        except ConsumeQueueDamagedError:
            break
        offset += found
        if found < count:
            break
    return offset
