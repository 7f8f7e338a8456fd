"""A head is reckoned from its CRC, if what stands around it bounds what it said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.store.log.lost_head import HeadBounds, find_head
from protomq_broker.store.log.seals import encode_head

crcs = st.integers(0, (1 << 32) - 1)
times_ms = st.integers(1_500_000_000_000, 2_500_000_000_000)
distances = st.integers(0, (1 << 32) - 1)


def crc_of(head: bytes) -> int:
    return int.from_bytes(head[-4:], "little")


def around(value: int, before: int, behind: int) -> tuple[int, int]:
    """Bounds around a value that agree with it but for its lower 32 bits: there one value has the CRC."""
    first = value >> 32 << 32
    return max(value - before, first), min(value + behind, first + (1 << 32) - 1)


@given(crcs, st.integers(0, 1 << 50), st.integers(0, 1 << 31), times_ms, distances, distances)
def test_the_position_that_was_synced_is_found(previous: int, base: int, epoch: int, time_ms: int, before: int, behind: int) -> None:
    synced = max(base - behind, 0)
    head = encode_head(base, previous, epoch=epoch, store_time_ms=time_ms, synced_position=synced)
    bounds = HeadBounds([epoch], (time_ms, time_ms + behind), around(synced, before, base - synced))
    assert find_head(base, previous, crc_of(head), bounds) == head


@given(crcs, st.integers(0, 1 << 31), times_ms, distances)
def test_the_time_of_a_logs_first_head_is_found(previous: int, epoch: int, time_ms: int, behind: int) -> None:
    head = encode_head(0, previous, epoch=epoch, store_time_ms=time_ms, synced_position=0)
    assert find_head(0, previous, crc_of(head), HeadBounds([epoch], (0, around(time_ms, 0, behind)[1]), (0, 0))) == head


@given(crcs, crcs, times_ms)
def test_what_is_found_lies_within_the_bounds_and_has_the_crc(previous: int, sealed: int, time_ms: int) -> None:
    bounds = HeadBounds([1, 2], (time_ms, time_ms + 60_000), (0, 0))
    found = find_head(0, previous, sealed, bounds)
    if found is not None:  # one of some 35,000
        assert crc_of(found) == sealed
        assert any(
            found == encode_head(0, previous, epoch=epoch, store_time_ms=at_ms, synced_position=0)
            for epoch in (1, 2)
            for at_ms in range(time_ms, time_ms + 60_001)
        )


def test_a_crc_that_no_head_within_the_bounds_has_is_told() -> None:
    head = encode_head(0, 0, epoch=1, store_time_ms=2_000, synced_position=0)
    assert find_head(0, 0, crc_of(head), HeadBounds([1], (0, 2_000), (0, 0))) == head
    assert find_head(0, 0, crc_of(head), HeadBounds([1], (0, 1_999), (0, 0))) is None
    assert find_head(0, 0, crc_of(head), HeadBounds([2], (0, 2_000), (0, 0))) is None
    assert find_head(0, 0, crc_of(head), HeadBounds([2, 1], (0, 2_000), (0, 0))) == head
