"""Copies of pending messages: those that fall due, and those that are carried forward. Pure.

A batch becomes one request for each of its queues, in the order of the rows, and the record of %SYS%TIMER that reports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.move import ReadRecords, move_records
from protomq_broker.store.log.record_scan import read_trailers


class Copies(NamedTuple):
    """What is to be appended.

    Attributes:
        requests: the copies.
        rows: those that have a copy.
        dropped: those whose topic is gone.
        unreadable: those whose record is damaged, or is not what the row says.
    """

    requests: list[AppendRequest]
    rows: NDArray[Any]
    dropped: NDArray[Any]
    unreadable: NDArray[Any]


def copies_of(
    rows: NDArray[Any],
    read_records: ReadRecords,
    is_there: Callable[[str, int, int], bool],
    *,
    keeps_due_times: bool,
) -> Copies:
    """The copies of the messages that stand where the rows say.

    `is_there(topic, queue, position)`: whether the topic of the message at a position is there still. `keeps_due_times`: the copies are
    pending, too. Raises CorruptRecordError, ValueError for what is no record of a log.
    """
    order = np.argsort(rows["position"], kind="stable")
    positions = rows["position"].astype(np.int64)
    sizes = rows["size"].astype(np.int64)
    data, sorted_starts, sorted_sound = read_records(positions[order], sizes[order])
    starts, is_sound = np.empty_like(sorted_starts), np.empty_like(sorted_sound)
    starts[order], is_sound[order] = sorted_starts, sorted_sound
    sound = np.flatnonzero(is_sound)
    found = read_trailers(data, 0, starts[sound], sizes[sound])
    is_same = found.due_times_ms == rows["due_ms"][sound]
    is_sound[sound[~is_same]] = False
    requests: list[AppendRequest] = []
    is_dropped = np.zeros(len(rows), np.bool_)
    queues = found.topic_indexes.astype(np.int64) << 32 | found.queue_ids
    for queue in dict.fromkeys(queues[is_same].tolist()):
        topic, queue_id = found.topics[queue >> 32], queue & 0xFFFFFFFF
        chosen = sound[is_same & (queues == queue)]
        # What is gone of a topic is gone up to a position.
        if not is_there(topic, queue_id, int(positions[chosen].min())):
            gone = np.array([not is_there(topic, queue_id, int(at)) for at in positions[chosen]])
            is_dropped[chosen[gone]] = True
            chosen = chosen[~gone]
        if len(chosen):
            due_times_ms = rows["due_ms"][chosen] if keeps_due_times else None
            region = move_records(
                data, starts[chosen], sizes[chosen], topic, due_times_ms=due_times_ms
            )
            requests.append(AppendRequest(region, queue_id))
    return Copies(requests, rows[is_sound & ~is_dropped], rows[is_dropped], rows[~is_sound])


def first_rows(rows: NDArray[Any], count_max: int, size_max_bytes: int) -> NDArray[Any]:
    """The first of the rows whose records fit into that size; at least one."""
    ends = np.cumsum(rows["size"][:count_max].astype(np.int64))
    return rows[: max(int(np.searchsorted(ends, size_max_bytes, "right")), 1)]
