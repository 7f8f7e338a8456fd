"""Copies of half messages: those that are committed, that expire, and that are carried forward. Pure.

They are made in array operations: one for all messages of a topic, however many queues they go to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from protomq.wire.record import FLAG_COMMITTED, FLAG_EXPIRED
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.move import ReadRecords, move_records
from protomq_broker.store.log.record_scan import read_trailers
from protomq_broker.store.log.region_parts import parts_between

from .transactions import HalfMessage

CARRIED_COUNT: Final = 256
"""Half messages that are carried forward together."""
SIZE_MAX_BYTES: Final = 1 << 20
"""Of the half messages that are read, or copied in one append, beside the first: a few milliseconds' work."""


class HalfCopies(NamedTuple):
    """What is to be appended.

    Attributes: requests: the copies; halves: those that have one; unreadable: those that are damaged, or gone.
    """

    requests: list[AppendRequest]
    halves: list[HalfMessage]
    unreadable: list[HalfMessage]


def copied_size_max_bytes(append_size_max_bytes: int) -> int:
    """Of the half messages that are copied together: their copies, which are larger, and the record that reports them are one append."""
    return min(SIZE_MAX_BYTES, append_size_max_bytes // 4)


def first_halves(
    halves: Sequence[HalfMessage], size_max_bytes: int = SIZE_MAX_BYTES
) -> list[HalfMessage]:
    """The first of them, as many as one turn takes; at least one."""
    size_bytes = 0
    for count, half in enumerate(halves):
        size_bytes += half.size_bytes
        if count and size_bytes > size_max_bytes:
            return list(halves[:count])
    return list(halves)


def half_copies(
    halves: Sequence[HalfMessage],
    read_records: ReadRecords,
    *,
    is_half: bool = False,
    now_ms: int = 0,
    topic: str = "",
) -> HalfCopies:
    """The copies of half messages that are committed, for their queues; or of those that expire, all for queue 0 of `topic`.

    `is_half`: they are carried forward, and stay half messages with the due times that they have. Else a due time is kept that lies
    behind `now_ms`; with a `topic`, none is.
    """
    if not halves:
        return HalfCopies([], [], [])
    halves = sorted(halves, key=lambda half: half.position)
    positions = np.array([half.position for half in halves], np.int64)
    sizes = np.array([half.size_bytes for half in halves], np.int64)
    data, starts, is_sound = read_records(positions, sizes)
    sound = [half for half, holds in zip(halves, is_sound.tolist(), strict=True) if holds]
    unreadable = [half for half, holds in zip(halves, is_sound.tolist(), strict=True) if not holds]
    if not sound:
        return HalfCopies([], [], unreadable)
    starts, sizes = starts[is_sound], sizes[is_sound]
    due_times_ms = read_trailers(data, 0, starts, sizes).due_times_ms
    has_due_time = due_times_ms > np.uint64(0 if is_half else now_ms)
    if topic:
        has_due_time[:] = False
    targets: dict[tuple[str, bool], list[int]] = {}
    for row, (half, is_due) in enumerate(zip(sound, has_due_time.tolist(), strict=True)):
        targets.setdefault((topic or half.topic, is_due), []).append(row)
    requests: list[AppendRequest] = []
    for (target, is_due), rows in targets.items():
        if not topic:
            rows.sort(key=lambda row: sound[row].queue_id)
        queue_ids = [0 if topic else sound[row].queue_id for row in rows]
        chosen = np.array(rows, np.int64)
        region = move_records(
            data,
            starts[chosen],
            sizes[chosen],
            target,
            due_times_ms=due_times_ms[chosen] if is_due else None,
            is_half=is_half,
            marks=0 if is_half else FLAG_EXPIRED if topic else FLAG_COMMITTED,
        )
        bounds = [0, *(np.flatnonzero(np.diff(queue_ids)) + 1).tolist(), len(rows)]
        parts = parts_between(region, bounds)
        requests += [
            AppendRequest(part, queue_ids[first])
            for part, first in zip(parts, bounds[:-1], strict=True)
        ]
    return HalfCopies(requests, sound, unreadable)
