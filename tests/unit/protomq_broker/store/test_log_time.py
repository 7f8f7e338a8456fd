"""Log time: monotonic, slewed, never back."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.wire.hashing import crc32c
from protomq_broker.log_time import LogTime
from protomq_broker.log_time_file import MAGIC, LogTimeFile
from protomq_broker.store.files.disk import write_fully
from protomq_broker.store.timer.log_time import (
    HEARD_FOR_MS,
    SLEW_RATIO,
    UNEQUAL_MIN_MS,
    UNREAD_MIN_MS,
    HeardTime,
    KeptTime,
    LogClock,
    UnreadAnswers,
)
from protomq_broker.testing.simdisk import Fault, SimDisk

from .log_helpers import ManualClock

HOUR_MS = 3_600_000
BOOT_ID = "b" * 36


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


def test_of_what_a_master_says_the_latest_counts_since_all_of_it_comes_late() -> None:
    heard = HeardTime()
    late_ms = (70, 20, 900, 40, 3_000)
    for number, late in enumerate(late_ms):
        monotonic_ms = 100 * number
        now_ms = heard.heard(1_000_000 + monotonic_ms - late, monotonic_ms)
        assert now_ms == 1_000_000 + monotonic_ms - min(late_ms[: number + 1])


def test_a_master_whose_log_time_is_slower_is_followed_all_the_same() -> None:
    heard = HeardTime()
    for monotonic_ms in range(0, HOUR_MS, 500):
        log_time_ms = 1_000_000 + int(monotonic_ms * (1 - SLEW_RATIO))
        apart_ms = heard.heard(log_time_ms, monotonic_ms) - log_time_ms
        assert 0 <= apart_ms <= 2 * HEARD_FOR_MS * SLEW_RATIO


@given(
    st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 700)), min_size=1, max_size=30),
    st.lists(st.integers(-HOUR_MS, HOUR_MS), min_size=2, max_size=2),
    st.integers(0, 20_000),
)
def test_what_is_heard_is_never_before_what_was_said_and_late_by_its_way_only(
    said: list[tuple[int, int]], walls_ms: list[int], leads_ms: int
) -> None:
    """`said`: (pause before the master says it, time on its way). `walls_ms`: how far the wall clocks of both are off."""
    right_ms, step_max_ms = 1_700_000_000_000, 3_700
    begins_ms, (master_wall_ms, slave_wall_ms) = right_ms + 5, walls_ms
    master = LogClock(begins_ms, 0)
    slave, heard = LogClock(right_ms + slave_wall_ms, 0), HeardTime()
    now_ms = apart_ms = 0
    for pause_ms, way_ms in said:
        now_ms += pause_ms
        told_ms = master.now_ms(right_ms + now_ms + master_wall_ms, now_ms)
        now_ms += way_ms
        slave.go_on_from(heard.heard(told_ms, now_ms), right_ms + now_ms + slave_wall_ms, now_ms)
        known_ms = slave.now_ms(right_ms + now_ms + slave_wall_ms, now_ms)
        apart_ms = known_ms - master.now_ms(right_ms + now_ms + master_wall_ms, now_ms)
        assert known_ms >= told_ms
        assert -way_ms * (1 + SLEW_RATIO) - 2 <= apart_ms <= (2 * HEARD_FOR_MS + step_max_ms) * SLEW_RATIO + 2
    # It leads from here on. The master before it would have gone on by its own clock.
    now_ms += leads_ms
    led_ms = slave.now_ms(right_ms + now_ms + slave_wall_ms, now_ms)
    would_be_ms = master.now_ms(right_ms + now_ms + master_wall_ms, now_ms)
    assert abs(led_ms - would_be_ms - apart_ms) <= 2 * SLEW_RATIO * leads_ms + 3


def test_what_a_master_said_before_a_long_silence_does_not_count() -> None:
    heard = HeardTime()
    heard.heard(1_000_000, 0)
    behind_ms = int(HOUR_MS * SLEW_RATIO)
    assert heard.heard(1_000_000 + HOUR_MS - behind_ms, HOUR_MS) == 1_000_000 + HOUR_MS - behind_ms


@given(
    st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 700), st.integers(0, 2 * HOUR_MS)), min_size=1, max_size=30),
    st.integers(-HOUR_MS, HOUR_MS),
)
def test_what_may_have_lain_unread_says_nothing_of_the_time_that_it_lay(said: list[tuple[int, int, int]], wall_ms: int) -> None:
    """`said`: (pause before the master says it, time on its way, how long the slave stood still before it read it)."""
    right_ms, step_max_ms = 1_700_000_000_000, 3_700
    master, heard = LogClock(right_ms, 0), HeardTime()
    now_ms = certain_ms = 0
    known: tuple[int, int] | None = None
    for pause_ms, way_ms, unread_ms in said:
        now_ms += pause_ms
        told_ms = master.now_ms(right_ms + now_ms + wall_ms, now_ms)
        now_ms += way_ms + unread_ms
        heard_ms = heard.heard(told_ms, now_ms, unread_ms and unread_ms + way_ms)
        assert heard_ms >= told_ms
        if known is not None and unread_ms:
            # But where the answer shows that the master's log time is slower, or that it is another one: it cannot be that late.
            went_on_ms = known[0] + now_ms - known[1]
            assert heard_ms >= went_on_ms or went_on_ms - told_ms > (unread_ms + way_ms) * (1 + SLEW_RATIO)
        # Its log time may be slower than this clock, since the last answer that was read as it came.
        if not unread_ms:
            certain_ms = now_ms
        ahead_ms = heard_ms - master.now_ms(right_ms + now_ms + wall_ms, now_ms)
        assert ahead_ms <= (now_ms - certain_ms + 2 * HEARD_FOR_MS + step_max_ms) * SLEW_RATIO + 2
        known = heard_ms, now_ms


def test_a_master_that_has_set_its_log_time_back_is_followed_at_once_whatever_lay_unread() -> None:
    heard = HeardTime()
    for monotonic_ms in range(0, 20_000, 500):
        heard.heard(HOUR_MS + monotonic_ms, monotonic_ms)
    assert heard.heard(1_000_000, 40_000, 20_000) == 1_000_000
    assert heard.heard(1_000_500, 40_500) == 1_000_500


def test_which_answers_may_have_lain_unread() -> None:
    unread = UnreadAnswers(100)
    unread.turn(100 + UNREAD_MIN_MS - 1, {1, 2})
    assert unread.unread_ms(1) == unread.unread_ms(2) == 0
    unread.turn(12_000, {1, 2})
    stood_still_ms = 12_000 - (100 + UNREAD_MIN_MS - 1)
    assert unread.unread_ms(1) == unread.unread_ms(2) == stood_still_ms
    # The second one is read 30 ms later, the third one was asked for behind that.
    unread.turn(12_030, {2, 3})
    assert unread.unread_ms(2) == stood_still_ms + 30
    assert unread.unread_ms(3) == 0
    # It stands still again: the second one may be as old as before, and the third one is not older than that.
    unread.turn(20_000, {2, 3})
    assert unread.unread_ms(2) == unread.unread_ms(3) == stood_still_ms + 8_000
    unread.turn(30_000, {4})
    assert unread.unread_ms(4) == 10_000
    assert unread.unread_ms(5) == 0


class Machine:
    """A broker's disk and clocks. `wall_ms` is how far its wall clock is off."""

    def __init__(self, wall_ms: int = 0) -> None:
        self.disk = SimDisk()
        self.disk.make_folder("/s/config")
        self.clock = ManualClock()
        self.right_ms = self.clock.time_ms
        self.clock.time_ms += wall_ms

    def start(self) -> LogTime:
        file = LogTimeFile(self.disk, "/s", BOOT_ID, self.clock.monotonic_ms)
        return LogTime(self.clock, 0, file)


@pytest.mark.parametrize("wall_ms", [-HOUR_MS, HOUR_MS])
def test_who_leads_goes_on_with_the_log_time_of_the_master_that_it_has_followed(wall_ms: int) -> None:
    machine = Machine(wall_ms)
    slave = machine.start()
    assert slave.now_ms() == machine.right_ms + wall_ms
    slave.follow(machine.right_ms)
    assert slave.now_ms() == machine.right_ms
    assert slave.offset_ms == wall_ms
    slave.save()
    master = machine.start()
    assert master.now_ms() == machine.right_ms
    # Name servers take no start that is earlier than the one before.
    assert master.own_ms() == slave.own_ms() == machine.right_ms + wall_ms


@pytest.mark.parametrize("wall_ms", [-HOUR_MS, HOUR_MS])
def test_who_is_opened_again_soon_after_it_has_begun_to_follow_goes_on_with_what_it_has_heard(wall_ms: int) -> None:
    machine = Machine(wall_ms)
    slave = machine.start()
    slave.save()
    slave.follow(machine.right_ms)
    master = machine.start()
    assert master.now_ms() == machine.right_ms


def test_a_disk_that_does_not_take_log_time_is_said_once_a_minute_until_it_does(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(wall_ms=HOUR_MS)
    slave = machine.start()
    slave.save()
    machine.disk.plan = lambda operation: Fault.ENOSPC
    slave.follow(machine.right_ms)
    assert caplog.text.count("log time cannot be kept for the next start yet") == 1
    for _ in range(59):
        machine.clock.time_ms += 1_000
        slave.save()
    assert caplog.text.count("log time cannot be kept") == 1
    machine.clock.time_ms += 1_000
    slave.save()
    assert caplog.text.count("log time cannot be kept") == 2
    machine.disk.plan = None
    slave.save()
    slave.save()
    assert caplog.text.count("log time is kept for the next start again") == 1
    assert machine.start().now_ms() == slave.now_ms()


def test_a_file_of_an_earlier_version_has_log_time_alone() -> None:
    machine = Machine()
    file = LogTimeFile(machine.disk, "/s", BOOT_ID, machine.clock.monotonic_ms)
    content = MAGIC + struct.pack("<36sQQ", BOOT_ID.encode(), machine.clock.monotonic_ms(), 17)
    fd = machine.disk.create("/s/config/logTime")
    write_fully(machine.disk, fd, content + crc32c(content).to_bytes(4, "little"), 0)
    assert file.load() == (KeptTime(17, 0), KeptTime(17, 0))
    file.save(18, 19)
    assert file.load() == (KeptTime(18, 0), KeptTime(19, 0))
