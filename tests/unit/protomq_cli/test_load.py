from __future__ import annotations

import threading
import time
from array import array

import pytest

from protomq_cli.load import (
    Pace,
    Tally,
    Window,
    call_paced,
    first_error,
    percentile,
    run_threads,
    summarise,
)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 1001)]
    assert [percentile(values, p) for p in (50, 90, 99, 99.9, 100)] == [500, 900, 990, 999, 1000]
    assert percentile([7.0], 99.9) == 7.0
    assert percentile([], 50) == 0.0


def test_a_row_sums_up_all_callers() -> None:
    one = Tally(array("d", [0.001, 0.002]), messages=2, size_bytes=1 << 20)
    two = Tally(array("d", [0.003]), messages=1, size_bytes=1 << 20, errors=1)
    assert summarise("send", [one, two], 2.0) == {
        "what": "send", "messages": 3, "rate_per_s": 2, "mib_per_s": 1.0, "avg_ms": 2.0, "p50_ms": 2.0,
        "p90_ms": 3.0, "p99_ms": 3.0, "p99.9_ms": 3.0, "max_ms": 3.0, "errors": 1,
    }  # fmt: skip


def test_a_row_without_a_single_call_has_zeros() -> None:
    row = summarise("send", [Tally()], 0.0)
    assert row["rate_per_s"] == row["max_ms"] == 0


def test_a_stall_counts_for_every_call_that_it_delayed() -> None:
    """Ten calls are meant to start a millisecond apart; the first blocks for 20 ms, the rest take nothing."""
    start = time.perf_counter()
    stalls = iter([0.02])
    tally = Tally()

    def call(intended: float) -> int:
        time.sleep(next(stalls, 0.0))
        return 1

    call_paced(call, Pace(start, 1000), Window(start, start + 0.0095), 1, tally, threading.Event())
    assert tally.messages == 10
    assert all(latency >= 0.0105 for latency in tally.latencies_s)


def test_calls_of_the_warm_up_are_made_but_not_counted() -> None:
    start = time.perf_counter()
    calls: list[float] = []
    tally = Tally()

    def call(intended: float) -> int:
        calls.append(intended)
        return 1

    window = Window(start + 0.005, start + 0.0095)
    call_paced(call, Pace(start, 1000), window, 3, tally, threading.Event())
    assert (len(calls), tally.messages, tally.size_bytes) == (10, 15, 5)


def test_failed_calls_are_counted_and_the_first_error_is_kept() -> None:
    start = time.perf_counter()
    tally = Tally()

    def call(intended: float) -> int:
        raise ValueError("no")

    call_paced(call, Pace(start, 1000), Window(start, start + 0.0025), 1, tally, threading.Event())
    assert (tally.messages, tally.errors) == (0, 3)
    assert isinstance(first_error([Tally(), tally]), ValueError)


def test_what_escapes_from_a_thread_is_raised_and_stops_the_others() -> None:
    def work(number: int, tally: Tally, stop: threading.Event) -> None:
        if number == 0:
            raise ValueError("first")
        assert stop.wait(60)

    with pytest.raises(ValueError, match="first"):
        run_threads(work, 3)
