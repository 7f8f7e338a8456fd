"""What the comparison of two checkouts makes of what benchmarks print."""

from __future__ import annotations

from tests.bench.turns import broker_us_of, confidence_interval, table_of


def test_the_interval_of_twenty_goes_from_the_sixth_to_the_fifteenth() -> None:
    # P(Binomial(20, 1/2) <= 5) = 0.0207, and <= 6 is 0.0577.
    assert confidence_interval([float(n) for n in range(20, 0, -1)]) == (6.0, 10.5, 15.0)


def test_few_values_give_all_their_range() -> None:
    assert confidence_interval([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)


def test_cpu_times_are_read_and_bare_loops_left_out() -> None:
    output = (
        "batch send, prebuilt, remoting     888,927 msg/s            broker 1.10 us client 0.35 us\n"
        "bare loop: frame, file, answer     894,223 msg/s            broker 0.84 us client 0.33 us\n"
        "batch send, prebuilt / bare loop     0.994 x  ≥ 0.6 ok\n"
        "one caller, SDK, p50                 0.126 ms               broker 89.02 us client 105.24 us\n"
    )
    assert broker_us_of(output) == {
        "batch send, prebuilt, remoting": 1.10,
        "one caller, SDK, p50": 89.02,
    }


def test_a_row_that_one_side_lacks_is_left_out() -> None:
    lines = list(table_of({"a": [1.0, 2.0], "gone": [1.0, 1.0]}, {"a": [1.1, 2.2], "new": [1.0]}))
    assert len(lines) == 3
    assert "| a | 1.50 us | 1.65 us | 1.100 | 1.100 to 1.100 | 2 |" in lines
