"""Delay levels and the limits of a delay."""

from __future__ import annotations

import pytest

from protomq_broker.store.timer.delay_levels import (
    DAY_MS,
    DELAY_MAX_MS,
    ROCKETMQ_LEVELS,
    DelayError,
    check_due,
    delay_of_level,
    due_behind,
    parse_duration_ms,
    parse_levels,
)


def test_the_levels_are_rocketmqs() -> None:
    levels = parse_levels(ROCKETMQ_LEVELS)
    assert len(levels) == 18
    assert levels[:4] == (1_000, 5_000, 10_000, 30_000)
    assert levels[-1] == 7_200_000
    assert delay_of_level(levels, 1) == 1_000
    assert delay_of_level(levels, 18) == 7_200_000


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("1ms", 1), ("30s", 30_000), ("5m", 300_000), ("2h", 7_200_000), ("40d", 40 * DAY_MS)],
)
def test_durations_are_numbers_with_a_unit(text: str, duration_ms: int) -> None:
    assert parse_duration_ms(text) == duration_ms


@pytest.mark.parametrize(
    "text", ["", "1", "s", "1 s", "-1s", "1.5s", "1S", "41d", "٣s", "9999999999999s"]
)
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|40 days"):
        parse_duration_ms(text)


@pytest.mark.parametrize("text", ["", "2s 1s", "1s x", " ".join(["1s"] * 257)])
def test_levels_that_nobody_can_mean_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"levels|duration"):
        parse_levels(text)


@pytest.mark.parametrize("level", [-1, 0, 19])
def test_a_level_that_is_none_says_which_there_are(level: int) -> None:
    with pytest.raises(DelayError) as caught:
        delay_of_level(parse_levels(ROCKETMQ_LEVELS), level)
    assert (caught.value.field, caught.value.value, caught.value.limit) == (
        "delay_level",
        level,
        18,
    )


def test_a_delay_is_over_when_the_last_of_its_milliseconds_is() -> None:
    asked_ms = 50.9  # the clock says 50
    assert due_behind(1_000, int(asked_ms)) >= asked_ms + 1_000
    assert due_behind(0, 50) == 50


def test_forty_days_and_no_more() -> None:
    latest_ms = due_behind(DELAY_MAX_MS, 7)
    check_due("due_time_ms", latest_ms, 7)
    check_due("due_time_ms", 0, 7)
    with pytest.raises(DelayError) as caught:
        check_due("due_time_ms", latest_ms + 1, 7)
    assert caught.value.limit == latest_ms
