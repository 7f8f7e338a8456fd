"""Delay levels: names of durations, as RocketMQ has them.

messageDelayLevel = 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h        level 1 is the first
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

DAY_MS: Final = 86_400_000
DELAY_MAX_MS: Final = 40 * DAY_MS
"""The longest delay; RocketMQ's timer goes to 3 days by default, and its cloud to 40."""
ROCKETMQ_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
LEVELS_MAX: Final = 256

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": DAY_MS}
_DURATION: Final = re.compile(r"([0-9]{1,12})(ms|s|m|h|d)")


class DelayError(ValueError):
    """A delay that nobody can have.

    Attributes: field: what is wrong (`delay_level`, `delay_ms` or `due_time_ms`); value: its value; limit: the nearest that can be had.
    """

    def __init__(self, field: str, value: int, limit: int, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.limit = limit


def parse_duration_ms(text: str) -> int:
    """Milliseconds of a duration such as "30s", "5m", "2h" or "40d"; ValueError for anything else, or above 40 days."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a duration: write a number and ms, s, m, h or d, such as 30s, 10m or 2h"
        )
    duration_ms = int(match[1]) * _UNITS_MS[match[2]]
    if duration_ms > DELAY_MAX_MS:
        raise ValueError(f"{text!r} is longer than 40 days, the longest delay")
    return duration_ms


def parse_levels(text: str) -> tuple[int, ...]:
    """Durations in milliseconds, level 1 first; ValueError if one is none, if one is shorter than the one before, or if there are none."""
    levels = tuple(map(parse_duration_ms, text.split()))
    if not 0 < len(levels) <= LEVELS_MAX:
        raise ValueError(f"there are 1 to {LEVELS_MAX} delay levels, not {len(levels)}")
    if list(levels) != sorted(levels):
        raise ValueError(f"delay levels must rise: {text!r} does not")
    return levels


def delay_of_level(levels: Sequence[int], level: int) -> int:
    """Milliseconds of this level. Raises DelayError if there is no such level."""
    if not 1 <= level <= len(levels):
        raise DelayError(
            "delay_level", level, len(levels), f"there is no delay level {level}: levels are 1 to {len(levels)}"
        )  # fmt: skip
    return levels[level - 1]


def checked_delay_ms(delay_ms: int) -> int:
    """The delay. Raises DelayError for one below zero, or above 40 days."""
    if delay_ms < 0:
        raise DelayError("delay_ms", delay_ms, 0, f"a delay below zero is none: {delay_ms} ms; 0 is at once")
    if delay_ms > DELAY_MAX_MS:
        raise DelayError("delay_ms", delay_ms, DELAY_MAX_MS, _too_long(delay_ms))
    return delay_ms


def due_behind(delay_ms: int, now_ms: int) -> int:
    """When this delay is over that begins now; 0: at once.

    The millisecond that has begun does not count: else a message could come that much too early.
    """
    return now_ms + delay_ms + 1 if delay_ms else now_ms


def check_due(field: str, due_time_ms: int, now_ms: int) -> None:
    """Raises DelayError for a due time more than 40 days away; one that is past is due at once."""
    limit_ms = due_behind(DELAY_MAX_MS, now_ms)
    if due_time_ms > limit_ms:
        raise DelayError(
            field,
            due_time_ms,
            limit_ms,
            _too_long(due_time_ms - now_ms),
        )


def _too_long(delay_ms: int) -> str:
    return f"a message is delayed for 40 days ({DELAY_MAX_MS} ms) at most, not for {delay_ms} ms"
