"""Converts times that clients give."""

from __future__ import annotations

from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from protomq_runtime.errors import invalid_argument

SECONDS_MIN: Final = -62_135_596_800
"""0001-01-01T00:00:00Z; the bounds are those that google.protobuf.Timestamp has by its definition."""
SECONDS_MAX: Final = 253_402_300_799
"""9999-12-31T23:59:59Z."""
AHEAD_MAX_MS: Final = 60_000
"""By so much the clocks of clients may differ."""
_NANOS_MAX: Final = 999_999_999


def time_ms_of(field: str, time: Timestamp) -> int:
    """Returns milliseconds since 1970-01-01 UTC, rounded up. Raises ServiceError for a time outside the years 1 to 9999."""
    if not (SECONDS_MIN <= time.seconds <= SECONDS_MAX and 0 <= time.nanos <= _NANOS_MAX):
        raise invalid_argument(
            field,
            f"must be a time of the years 1 to 9999: seconds {SECONDS_MIN} to {SECONDS_MAX}, nanos 0 to {_NANOS_MAX}; "
            f"it has {time.seconds} and {time.nanos}",
        )
    return time.seconds * 1000 + -(-time.nanos // 1_000_000)
