from __future__ import annotations

import pytest

from protomq_cli.units import format_ms, format_size, parse_count, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("128", 128), ("128B", 128), ("4k", 4096), ("4KiB", 4096), ("4 KB", 4000), ("1.5m", 1_572_864),
     ("1GiB", 1 << 30)],
)  # fmt: skip
def test_sizes_are_read_with_their_unit(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 5.0), ("500ms", 0.5), ("30s", 30.0), ("2m", 120.0), ("1.5h", 5400.0), ("7d", 604_800.0)],
)
def test_durations_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "count"), [("1000", 1000), ("20k", 20_000), ("1.5M", 1_500_000)])
def test_counts_are_read_with_their_unit(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("parse", [parse_size, parse_duration, parse_count])
@pytest.mark.parametrize("text", ["", "-1", "x", "1x", "1 2", "k", "1e3", "nan", "inf"])
def test_nonsense_is_refused_with_an_example(parse: object, text: str) -> None:
    with pytest.raises(ValueError, match="; write "):
        parse(text)  # type: ignore[operator]


@pytest.mark.parametrize("parse", [parse_size, parse_duration, parse_count])
def test_more_than_a_64_bit_number_is_refused_and_not_taken_for_infinity(parse: object) -> None:
    with pytest.raises(ValueError, match="is more than any"):
        parse("9" * 400)  # type: ignore[operator]


def test_sizes_and_latencies_are_written_with_digits_that_mean_something() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 1536, 5 << 30, 3 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "3.0 TiB",
    ]  # fmt: skip
    assert [format_ms(s) for s in (0.000113, 0.0042, 0.0423, 1.2)] == [
        "0.113",
        "4.200",
        "42.30",
        "1200",
    ]
