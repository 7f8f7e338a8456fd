"""Moves of one record, as tests of what moves need them."""

from __future__ import annotations

from typing import Any

import numpy as np

from protomq_broker.store.log.append import RecordRegion
from protomq_broker.store.log.move import move_records


def move_record(
    field: bytes,
    topic: str,
    *,
    due_time_ms: int | None = None,
    attempts: int = 0,
    last_error: str | None = None,
    **named: Any,
) -> RecordRegion:
    """`move_records` of one record field."""
    return move_records(
        field,
        np.zeros(1, np.int64),
        np.array([len(field)], np.int64),
        topic,
        due_times_ms=None if due_time_ms is None else np.array([due_time_ms], np.uint64),
        attempts=attempts,
        last_errors=None if last_error is None else [last_error],
        **named,
    )
