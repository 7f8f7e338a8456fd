"""Settings of groups, and the plan of retries: after exactly the configured number of deliveries a message is a dead letter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.v1.group_pb2 import GroupSettings as GroupMessage
from protomq_broker.store.state.group_settings import (
    RETRY_COUNT_MAX,
    GroupSettings,
    GroupSettingsError,
    group_from_message,
    group_to_message,
    plan_retry,
    retry_delays_of,
)
from protomq_broker.store.timer.delay_levels import DELAY_MAX_MS, ROCKETMQ_LEVELS, parse_levels

LEVELS_MS = parse_levels(ROCKETMQ_LEVELS)
DELAYS = st.integers(0, DELAY_MAX_MS)
SETTINGS = st.builds(
    GroupSettings,
    st.sampled_from(["g", "A-b_9"]),
    orderly=st.booleans(),
    retry_count_max=st.none() | st.integers(0, 40) | st.just(RETRY_COUNT_MAX),
    retry_delays_ms=st.lists(DELAYS, max_size=20).map(tuple),
    consume_enabled=st.booleans(),
    broadcast_enabled=st.booleans(),
    version=st.integers(0, (1 << 63) - 1),
)


def deliveries(settings: GroupSettings, give_up: int = 200) -> list[int]:
    """The delays of a message that fails each time, until it is a dead letter or nobody has the patience."""
    delays: list[int] = []
    while len(delays) < give_up:
        delay_ms = plan_retry(settings, LEVELS_MS, len(delays) + 1)
        if delay_ms is None:
            break
        delays.append(delay_ms)
    return delays


def test_the_defaults_are_rocketmqs() -> None:
    seconds = [delay_ms // 1000 for delay_ms in deliveries(GroupSettings("g"))]
    minutes = [60 * minute for minute in range(1, 11)]
    assert seconds == [10, 30, *minutes, 1200, 1800, 3600, 7200], "16 retries: 17 deliveries"


def test_an_orderly_group_tries_without_limit_unless_one_is_set() -> None:
    assert len(deliveries(GroupSettings("g", orderly=True))) == 200
    assert len(deliveries(GroupSettings("g", orderly=True, retry_count_max=3))) == 3
    assert deliveries(GroupSettings("g", orderly=True))[-1] == 7_200_000


def test_without_retries_the_first_failure_is_the_last() -> None:
    assert deliveries(GroupSettings("g", retry_count_max=0)) == []


@given(SETTINGS, st.lists(st.none() | DELAYS, max_size=60))
def test_a_message_is_delivered_as_often_as_the_settings_say(
    settings: GroupSettings, asked: list[int | None]
) -> None:
    delays_ms = retry_delays_of(settings, LEVELS_MS)
    for number, asked_ms in enumerate(asked, 1):
        planned = plan_retry(settings, LEVELS_MS, number, asked_ms)
        limit = settings.retry_limit
        assert (planned is None) == (limit is not None and number > limit)
        if planned is not None and asked_ms is not None:
            assert planned == asked_ms
        elif planned is not None:
            assert planned == (delays_ms[number - 1] if number <= len(delays_ms) else delays_ms[-1])


@given(st.integers(1, 300), st.integers(1, 5))
def test_any_levels_do(failed_count: int, level_count: int) -> None:
    levels_ms = LEVELS_MS[:level_count]
    delay_ms = plan_retry(GroupSettings("g", retry_count_max=300), levels_ms, failed_count)
    assert delay_ms == levels_ms[min(failed_count + 2, level_count) - 1]


@given(SETTINGS)
def test_settings_come_back_from_their_message(settings: GroupSettings) -> None:
    assert group_from_message(group_to_message(settings)) == settings
    octets = group_to_message(settings).SerializeToString()
    assert group_from_message(GroupMessage.FromString(octets)) == settings


def test_what_is_absent_has_its_default() -> None:
    assert group_from_message(GroupMessage(consumer_group="g")) == GroupSettings("g")


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("consumer_group", {"group": ""}),
        ("consumer_group", {"group": "%RETRY%g"}),
        ("consumer_group", {"group": "x" * 121}),
        ("retry_count_max", {"retry_count_max": -1}),
        ("retry_count_max", {"retry_count_max": 1 << 31}),
        ("retry_delays_ms", {"retry_delays_ms": (1,) * 65}),
        ("retry_delays_ms", {"retry_delays_ms": (5, -1)}),
        ("retry_delays_ms", {"retry_delays_ms": (DELAY_MAX_MS + 1,)}),
        ("version", {"version": -1}),
    ],
)
def test_settings_that_no_group_can_have_are_refused(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(GroupSettingsError) as caught:
        GroupSettings(**{"group": "g", **settings})
    assert caught.value.field == field
