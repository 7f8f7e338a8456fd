"""Takes regions apart at given messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protomq.wire.record import FLAG_DUE_TIME

from .append import RecordRegion


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
