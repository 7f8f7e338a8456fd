"""Log time: monotonic, slewed, never back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.store.timer.log_time import SLEW_RATIO, UNEQUAL_MIN_MS, KeptTime, LogClock


def test_it_is_the_wall_clock_where_nobody_sets_it() -> None:
    clock = LogClock(1_000_000, 50)
    for passed_ms in (0, 1, 10, 10_000):
        assert clock.now_ms(1_000_000 + passed_ms, 50 + passed_ms) == 1_000_000 + passed_ms
        assert not clock.is_off


def test_a_clock_set_ahead_delivers_nothing_early() -> None:
    clock = LogClock(1_000_000, 0)
    assert clock.now_ms(1_000_000 + 3_600_000, 10) == 1_000_011
    assert clock.is_off
    assert clock.now_ms(1_000_000 + 3_600_000, 1_010) == 1_001_111


def test_a_clock_set_back_stops_nothing() -> None:
    clock = LogClock(1_000_000, 0)
    assert clock.now_ms(1_000, 1_000) == 1_000_900
    assert clock.offset_ms == 1_000 - 1_000_900


def test_a_second_is_made_good_in_ten() -> None:
    clock = LogClock(0, 0)
    for now_ms in range(0, 11_000, 10):
        clock.now_ms(now_ms + 1_000, now_ms)
    assert abs(clock.offset_ms) < UNEQUAL_MIN_MS


def test_two_clocks_that_count_whole_milliseconds_never_make_it_early() -> None:
    """Their milliseconds begin at different moments, so that they are now equally far apart, now a millisecond farther."""
    clock = LogClock(1_000_000, 0)
    begun_ms = clock.now_ms(1_000_000, 0)
    for passed_ms in range(1, 100):
        now_ms = clock.now_ms(1_000_001 + passed_ms, passed_ms)
        assert now_ms - begun_ms == passed_ms


def test_a_start_does_not_go_behind_what_the_log_has_seen() -> None:
    clock = LogClock(1_000, 0, floor_ms=5_000)
    assert clock.now_ms(1_000, 0) == 5_000


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(-(10**8), 10**8)), max_size=40),
    st.integers(0, 10**12),
)
def test_it_never_goes_back_nor_faster_than_it_may(
    steps: list[tuple[int, int]], start_ms: int
) -> None:
    clock = LogClock(start_ms, 0)
    before, monotonic_ms, wall_ms = start_ms, 0, start_ms
    for passed_ms, jump_ms in steps:
        monotonic_ms += passed_ms
        wall_ms += passed_ms + jump_ms
        now_ms = clock.now_ms(wall_ms, monotonic_ms)
        slew_ms = passed_ms * SLEW_RATIO + 1
        assert before <= now_ms
        assert passed_ms - slew_ms <= now_ms - before <= passed_ms + slew_ms
        before = now_ms


def test_a_start_goes_on_where_log_time_was_and_does_not_jump_ahead_of_a_clock_that_was_set_back() -> None:
    kept = KeptTime(1_000_000, 60_000)
    assert kept.continued_ms(1_060_000) == 1_060_000
    assert kept.continued_ms(1_060_000 + 3_600_000) == 1_060_000
    assert kept.continued_ms(1_059_000) == 1_059_000
    assert kept.continued_ms(0) == 1_054_000
    running = LogClock(1_000_000, 0)
    assert running.now_ms(1_060_000 - 3_600_000, 60_000) == kept.continued_ms(1_060_000 - 3_600_000)
