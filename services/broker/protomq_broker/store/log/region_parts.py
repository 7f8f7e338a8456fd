"""Takes regions apart: at given messages, or where messages with and without a due time meet: what decides is the same in each part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protomq.wire.record import FLAG_DUE_TIME, FLAGS_AT

from .append import RecordRegion
from .kinds import MIXED
from .record_arrays import U32, windows


def parts_of(region: RecordRegion) -> list[RecordRegion]:
    """The region as it is, or in parts, in its order: stretches of messages with a due time and of such without one."""
    if region.flags != MIXED:
        return [region]
    assert region.starts is not None
    assert region.sizes is not None
    ends = region.starts + region.sizes
    has_due_time = windows(region.data, U32)[ends + FLAGS_AT] & FLAG_DUE_TIME != 0
    bounds = [0, *(np.flatnonzero(np.diff(has_due_time)) + 1).tolist(), region.count]
    return [
        _part(region, first, end, has_due_time[first] * FLAG_DUE_TIME)
        for first, end in pairwise(bounds)
    ]


def parts_between(region: RecordRegion, bounds: Sequence[int]) -> list[RecordRegion]:
    """The messages of a region between each two of the rising bounds, from 0 to their number; what decides is the same in all."""
    if len(bounds) == 2:
        return [region]
    return [_part(region, first, end, region.flags) for first, end in pairwise(bounds)]


def _part(region: RecordRegion, first: int, end: int, flags: int) -> RecordRegion:
    starts, sizes = region.starts, region.sizes
    assert starts is not None
    assert sizes is not None
    start = int(starts[first])
    stop = int(starts[end - 1] + sizes[end - 1])
    return RecordRegion(
        region.topic,
        region.data[start:stop],
        end - first,
        None if end - first == 1 else starts[first:end] - start,
        None if end - first == 1 else sizes[first:end].copy(),
        _one_or_many(region.tag_codes, first, end),
        _one_or_many(region.key_hashes, first, end),
        region.producer_id,
        region.producer_epoch,
        region.first_sequence + first,
        due_times_ms=_one_or_many(region.due_times_ms, first, end)
        if flags & FLAG_DUE_TIME
        else None,
        more_keys=[(at - start, key) for at, key in region.more_keys if start <= at < stop],
        flags=int(flags),
        identities=None if region.identities is None else region.identities[first:end],
    )


def _one_or_many(values: NDArray[Any] | int | None, first: int, end: int) -> Any:
    assert isinstance(values, np.ndarray)
    return int(values[first]) if end - first == 1 else values[first:end].copy()
