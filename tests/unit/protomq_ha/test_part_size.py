"""A slave asks for what its link brings in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_ha.part_size import LEAST_BYTES, PART_S, PartSize

MIB = 1 << 20
LARGEST = 4 * MIB


def fetch(part_size: PartSize, rate_bytes_per_s: float, count: int = 1, log_bytes: int = 1 << 40) -> float:
    """So many parts come over a link, whose log has `log_bytes` each time; how long the last one took."""
    took_s = 0.0
    for _ in range(count):
        size_bytes = min(part_size.size_bytes, log_bytes)
        took_s = size_bytes / rate_bytes_per_s
        part_size.note(size_bytes, took_s)
    return took_s


def test_on_a_fast_link_parts_grow_to_the_largest_within_six() -> None:
    part_size = PartSize(LARGEST)
    assert part_size.size_bytes == LEAST_BYTES
    fetch(part_size, 100 * MIB, 6)
    assert part_size.size_bytes == LARGEST


@given(
    rates=st.lists(st.floats(2 * LEAST_BYTES, 1e10), min_size=1),
    largest=st.integers(4 << 10, 16 * MIB),
    sizes=st.lists(st.integers(1, 16 * MIB), min_size=1),
)
def test_parts_come_in_time_from_the_second_on_whatever_the_link_did_before(rates: list[float], largest: int, sizes: list[int]) -> None:
    part_size = PartSize(largest)
    for rate in rates:
        for size_bytes in sizes:
            fetch(part_size, rate, log_bytes=size_bytes)
            assert min(LEAST_BYTES, largest) <= part_size.size_bytes <= largest
        # The first whole part at this rate may be too large; no other one is.
        fetch(part_size, rate)
        assert fetch(part_size, rate) <= PART_S * 1.001
        assert fetch(part_size, rate, 20) <= PART_S * 1.001
        # And a part is no smaller than needed.
        assert part_size.size_bytes == largest or part_size.size_bytes > rate * PART_S / 4


@pytest.mark.parametrize("took_s", [0.0, PART_S / 2, PART_S])
def test_a_part_smaller_than_asked_for_that_comes_in_time_changes_nothing(took_s: float) -> None:
    part_size = PartSize(LARGEST)
    fetch(part_size, 1e9, 2)
    before = part_size.size_bytes
    part_size.note(before - 1, took_s)
    assert part_size.size_bytes == before


def test_of_two_parts_that_were_asked_for_together_one_counts() -> None:
    part_size = PartSize(LARGEST)
    asked = part_size.size_bytes
    part_size.note(asked, 0.0)
    part_size.note(asked, 0.0)
    assert part_size.size_bytes == 2 * asked


def test_a_link_that_has_become_slow_is_asked_for_less_at_once() -> None:
    part_size = PartSize(LARGEST)
    fetch(part_size, 1e9, 10)
    part_size.note(LARGEST, 21.0)
    assert part_size.size_bytes == int(LARGEST * PART_S / 21.0)
    part_size.note(0, 60.0)
    assert part_size.size_bytes == LEAST_BYTES
