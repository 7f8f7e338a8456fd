"""Takes a region apart in which some messages have a due time and some have none, which no broker does: it refuses them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from protomq.wire.record import FLAG_DUE_TIME, FLAGS_AT
from protomq_broker.store.log.append import RecordRegion
from protomq_broker.store.log.kinds import MIXED
from protomq_broker.store.log.record_arrays import U32, windows
from protomq_broker.store.log.record_region import prove_region
from protomq_broker.store.log.record_scan import record_field_at


def parts_of(region: RecordRegion) -> list[RecordRegion]:
    """The region as it is, or in parts, in its order: stretches of messages with a due time and of such without one."""
    if region.flags != MIXED:
        return [region]
    assert region.starts is not None
    assert region.sizes is not None
    ends = region.starts + region.sizes
    has_due_time = windows(region.data, U32)[ends + FLAGS_AT] & FLAG_DUE_TIME != 0
    bounds = [0, *(np.flatnonzero(np.diff(has_due_time)) + 1).tolist(), region.count]
    parts = []
    for first, end in pairwise(bounds):
        data = region.data[int(region.starts[first]) : int(ends[end - 1])]
        starts = (region.starts[first:end] - region.starts[first]).tolist()
        sizes = [record_field_at(data, start, len(data))[0] for start in starts]
        part = prove_region(data, region.topic, sizes)
        assert part is not None
        parts.append(part)
    return parts
