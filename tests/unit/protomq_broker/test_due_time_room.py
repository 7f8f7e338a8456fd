"""Records get room for a due time: the result is what a producer would have written that knew the time."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from protomq.wire import record as layout
from protomq_broker.store.log.append import RecordRegion
from protomq_broker.store.log.due_time_room import with_due_time
from protomq_broker.store.log.record_region import prove_region

DUE_TIME_MS = 1_999_999_999_999


def region_of(bodies: list[int], keys: list[str], due_time_ms: int | None) -> RecordRegion:
    template = layout.RecordTemplate("orders", 42, 1)
    records = [
        template.encode(
            bytes(size),
            index,
            5,
            key=keys[0] if keys else "",
            front=layout.encode_front(keys, "", {}) if keys else b"",
            flags=layout.FLAG_MANY_KEYS if len(keys) > 1 else 0,
            due_time_ms=due_time_ms,
        )
        for index, size in enumerate(bodies)
    ]
    data = bytearray().join(map(layout.encode_record_field, records))
    region = prove_region(data, "orders", [len(record) for record in records])
    assert region is not None
    return region


def values_of(region: RecordRegion) -> dict[str, Any]:
    values = {name: getattr(region, name) for name in RecordRegion.__dataclass_fields__}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


# At 127 and 16,383 octets the length of a record becomes an octet wider; the trailer of this topic has 111.
sizes = st.one_of(st.integers(0, 30), st.integers(16_250, 16_290))


@given(st.lists(sizes, min_size=1, max_size=30), st.sampled_from(([], ["k"], ["k", "l", "m"])))
@example([7] * 5, ["k", "l"])
@example([16_262] * 4, [])
@example(list(range(30)), ["k", "l"])
@example([2**21 - 120], ["k"])
@example([2**21 - 130, 2**21 - 120, 2**21 - 112], [])
def test_the_result_is_what_a_producer_with_the_time_writes(
    bodies: list[int], keys: list[str]
) -> None:
    made = with_due_time(region_of(bodies, keys, None), DUE_TIME_MS)
    written = region_of(bodies, keys, DUE_TIME_MS)
    made_values, written_values = values_of(made), values_of(written)
    assert made_values.pop("stride") in (0, written_values.pop("stride"))
    made_values["more_keys"], written_values["more_keys"] = (
        list(made_values["more_keys"]),
        list(written_values["more_keys"]),
    )
    assert made_values == written_values


def test_records_of_one_size_keep_one_size() -> None:
    made = with_due_time(region_of([7] * 5, [], None), DUE_TIME_MS)
    assert made.stride * 5 == len(made.data)
